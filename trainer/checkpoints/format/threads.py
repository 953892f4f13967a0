"""Reading and hashing in several threads, for which the GIL is released. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 4
_BATCH_BYTES = 4 << 20
_MOST_BATCHES = 8


def in_threads(do: Callable[[T], R], items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[R]:
    """Yield the results of a function in the order of the items, computed by a few threads.

    Small items go to a thread together. Only a few batches are taken before the results of earlier ones are, so that
    few items are in memory at once; `Executor.map` takes all of them, before Python 3.14.
    """

    def do_all(batch: list[T]) -> list[R]:
        return [do(item) for item in batch]

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headway-read") as threads:
        pending: deque[Future[list[R]]] = deque()
        batch: list[T] = []
        nbytes = 0
        for item in items:
            batch.append(item)
            nbytes += nbytes_of(item)
            if nbytes >= _BATCH_BYTES:
                pending.append(threads.submit(do_all, batch))
                batch, nbytes = [], 0
            if len(pending) > _MOST_BATCHES:
                yield from pending.popleft().result()
        pending.append(threads.submit(do_all, batch))
        while pending:
            yield from pending.popleft().result()
