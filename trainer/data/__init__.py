"""What the loop asks of training data, and the streams made of DataLoaders and iterables."""
