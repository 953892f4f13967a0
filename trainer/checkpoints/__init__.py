"""Writing, finding, verifying, pruning and exporting checkpoints."""
