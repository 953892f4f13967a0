"""Calls on the main rank or on all of them, whose failure on one rank is an error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..distributed.world import World
from ..errors import CheckpointError

T = TypeVar("T")


class ConcurrentWriterError(CheckpointError):
    """Another process saves to the same directory, so a retry cannot succeed."""


class _Failure(NamedTuple):
    """An error of one rank, for the others."""

    text: str
    is_concurrent_writer: bool


def on_main(world: World, doing: str, do: Callable[[], T]) -> T:
    """Call a function on the main rank, and return its result, which must be picklable, on every rank.

    Every rank must call this. It takes one broadcast.

    Args:
        world: the ranks.
        doing: what the function does, for the message.
        do: the function.

    Raises:
        CheckpointError: the function failed; raised on every rank.
    """
    value, error = _attempt(do) if world.is_main else (None, None)
    value, failure = world.broadcast((value, _describe(error)))
    _raise_any(world, doing, [failure], error)
    return value  # type: ignore[return-value]


def on_all_ranks(world: World, doing: str, do: Callable[[], T]) -> T:
    """Call a function on every rank, and return its result there.

    Every rank must call this. The arguments are as in `on_main`.

    Raises:
        CheckpointError: the function failed on some rank; raised on every rank, with the error of each.
    """
    box: list[T] = []
    gather_from_all(world, doing, lambda: box.append(do()))
    return box[0]


def gather_from_all(world: World, doing: str, do: Callable[[], T]) -> Sequence[T]:
    """Do the same, and return the results of all ranks, which must be small. It takes one gathering."""
    value, error = _attempt(do)
    gathered = world.all_gather_object((value, _describe(error)))
    _raise_any(world, doing, [failure for _, failure in gathered], error)
    return [value for value, _ in gathered]  # type: ignore[misc]


def _attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of a function, or its error."""
    try:
        return do(), None
    except Exception as error:
        return None, error


def _describe(error: Exception | None) -> _Failure | None:
    if error is None:
        return None
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return _Failure(text, isinstance(error, ConcurrentWriterError))


def _raise_any(world: World, doing: str, failures: Sequence[_Failure | None], own: Exception | None) -> None:
    there = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if there:
        lines = [each.text if world.size == 1 else f"rank {rank}: {each.text}" for rank, each in there]
        kind = ConcurrentWriterError if any(each.is_concurrent_writer for _, each in there) else CheckpointError
        raise kind(f"cannot {doing}: {'; '.join(lines)}") from own
