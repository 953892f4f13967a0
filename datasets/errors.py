"""The error that datasets/ raises for bad data or options."""

from __future__ import annotations


class DataError(ValueError):
    """The data is missing, empty, has changed, or does not fit the options."""
