"""Imports of torch, Ray and the trainer without the garbage collector, which takes a fifth of their time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports() -> Iterator[None]:
    """Disable the garbage collector in this context.

    The objects of modules live as long as the process. Scanning them frees nothing, so they are frozen for later
    collections, too, together with all other objects: only for processes that have done nothing else yet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
