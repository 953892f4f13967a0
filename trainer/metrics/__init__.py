"""Means over batches, ranks, intervals and epochs, and the training log made of them."""
