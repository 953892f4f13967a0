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
_AHEAD_BYTES = 256 << 20


def in_threads(do: Callable[[T], R], items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[R]:
    """Yield the results of a function in the order of the items, computed by a few threads.

    Small items go to a thread together. At most 256 MiB of items, or two, are taken before their results are, because
    they may be copies; `Executor.map` takes all of them, before Python 3.14.
    """

    def do_all(batch: list[T]) -> list[R]:
        return [do(item) for item in batch]

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headway-read") as threads:
        pending: deque[tuple[Future[list[R]], int]] = deque()
        batch: list[T] = []
        nbytes = ahead_bytes = 0
        for item in items:
            batch.append(item)
            nbytes += nbytes_of(item)
            if nbytes < _BATCH_BYTES:
                continue
            pending.append((threads.submit(do_all, batch), nbytes))
            ahead_bytes += nbytes
            batch, nbytes = [], 0
            while ahead_bytes > _AHEAD_BYTES and len(pending) > 1:
                done, done_bytes = pending.popleft()
                ahead_bytes -= done_bytes
                yield from done.result()
        pending.append((threads.submit(do_all, batch), nbytes))
        for done, _ in pending:
            yield from done.result()
