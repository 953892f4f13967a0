"""Interfaces of training data, and streams over DataLoaders and iterables."""
