"""Headway: the training loop, in one process."""
