"""The state of an iterator as the state of the data that it comes from, as of datasets of Grain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class IteratorState:
    """Data whose position is known to its iterator alone, as a `Stateful` iterable.

    Args:
        data: an iterable whose iterators have `get_state()` and `set_state(state)`, or such an iterator.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data
        self._iterator: Any = None
        self._loaded: Any = None
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest after a loaded state, or over everything."""
        self._iterator = iter(self.data)
        if self._loaded is not None:
            self._iterator.set_state(self._loaded)
        self._loaded, self._has_ended = None, False
        return self._read(self._iterator)

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position; None at the end of an iterable, which then starts from its beginning."""
        restarts = self._iterator is None or (self._has_ended and not isinstance(self.data, Iterator))
        return {"iterator": None if restarts else self._iterator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iterator begin at a position."""
        self._loaded = state_dict["iterator"]


def has_iterator_state(data: Any) -> bool:
    """Whether data is an iterator with `get_state` and `set_state`, or a dataset or loader of Grain, which makes such.

    Other iterables are not asked for an iterator, because that may start processes.
    """
    if isinstance(data, Iterator):
        return hasattr(data, "get_state") and hasattr(data, "set_state")
    return isinstance(data, Iterable) and any(
        kind.__module__.partition(".")[0] == "grain" for kind in type(data).__mro__
    )
