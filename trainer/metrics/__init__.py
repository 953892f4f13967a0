"""Means over batches, ranks and intervals, and the training record made of them."""
