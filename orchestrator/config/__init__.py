"""Experiments: their fields, and how files, overrides and flags become one."""
