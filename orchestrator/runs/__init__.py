"""What is known of a run: its record, owner, checkpoints, time account and provenance."""
