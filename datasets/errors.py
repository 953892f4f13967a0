"""The one error of this folder that a person can act on."""

from __future__ import annotations


class DataError(ValueError):
    """The data is missing, empty, not what it was, or does not fit what was asked for."""
