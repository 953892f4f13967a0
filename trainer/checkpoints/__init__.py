"""Writing, finding, verifying, keeping and exporting checkpoints."""
