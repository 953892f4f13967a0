"""Exact mode: bit-identical training on any number of ranks."""
