"""Checks of a machine or a Ray cluster before a run: `headway doctor`, and `preflight` for a run of several nodes."""
