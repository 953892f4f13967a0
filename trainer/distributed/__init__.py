"""Process groups, DDP and FSDP, DTensors and activation checkpointing."""
