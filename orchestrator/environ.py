"""Variables of the environment by which Ray is set, for the time that they are meant for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environ(values: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Sets variables of this process, and puts back what was there.

    Args:
        values: by name.
        unless_set: leaves those alone that the user has set.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if not unless_set or before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
