"""The files of a checkpoint: JSON and safetensors, a manifest with checksums of them, and no code."""
