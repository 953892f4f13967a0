"""Hyperparameter sweeps on Ray Tune."""
