"""Headway: orchestrates training on Ray."""
