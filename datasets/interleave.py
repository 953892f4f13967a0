"""Which source gives a row of a mixture. Pure arithmetic, like `plan`.

Row m of logical shard j is number n = m * shards + j of the mixture. Its source is the one in whose part of [0, 1) the
fraction of n * g falls, where g is the golden ratio and a source's part is as long as its weight. These fractions fill
[0, 1) evenly over every stretch of n, so the realised proportions follow the weights closely at all times, and so do
those of each shard. How many of a shard's first m rows come from a source is a sum of floors of a linear function,
which Euclid's algorithm computes in O(log m) steps, so any position is found without replay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

_ONE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15  # _ONE divided by the golden ratio


@dataclass(frozen=True)
class Interleave:
    """The source of every row of a mixture, for weights that are constant from each start to the next.

    Attributes:
        shards: number of logical shards.
        starts: the first row (of each shard) with these weights; the first is 0.
        edges: for each start, where the parts of the sources begin and end, from 0 to 2**64.
        rotation: added to every fraction, as part of 2**64; another one gives another order.
    """

    shards: int
    starts: tuple[int, ...]
    edges: tuple[tuple[int, ...], ...]
    rotation: int

    def sources(self, shard: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the source of each of these rows of these shards."""
        number = (row * self.shards + shard).astype(np.uint64)
        fraction = number * np.uint64(_GOLDEN) + np.uint64(self.rotation)  # modulo 2**64
        phases = np.searchsorted(self.starts, row, side="right") - 1
        result = np.empty(len(row), dtype=np.int64)
        for phase in np.unique(phases):
            here = phases == phase
            inner = np.array(self.edges[phase][1:], dtype=object)
            inner = inner[inner < _ONE].astype(np.uint64)
            result[here] = np.searchsorted(inner, fraction[here], side="right")
        return result

    def counts(self, shard: int, row: int) -> npt.NDArray[np.int64]:
        """Return how many of a shard's first `row` rows come from each source."""
        total = np.zeros(len(self.edges[0]) - 1, dtype=np.int64)
        for start, end, edges in self._phases(row):
            below = [_count_below(shard, self.shards, self.rotation, end, edge) for edge in edges]
            before = [_count_below(shard, self.shards, self.rotation, start, edge) for edge in edges]
            total += np.diff(below) - np.diff(before)
        return total

    def _phases(self, row: int) -> list[tuple[int, int, tuple[int, ...]]]:
        last = bisect_right(self.starts, row)
        ends = [*self.starts[1:last], row]
        return list(zip(self.starts[:last], ends, self.edges[:last], strict=True))


def edges_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return where the parts of sources with these weights begin and end; those of weight 0 are empty."""
    total = sum(weights)
    inner = [min(_ONE, int(each / total * _ONE)) for each in accumulate(weights)]
    last = max(index for index, each in enumerate(weights) if each > 0)
    return 0, *inner[:last], *[_ONE] * (len(weights) - last)


@lru_cache(maxsize=4096)
def _count_below(shard: int, shards: int, rotation: int, rows: int, edge: int) -> int:
    """Return how many of a shard's first `rows` fractions are below `edge`."""
    if edge in (0, _ONE):
        return rows if edge else 0
    first, step = (shard * _GOLDEN + rotation) % _ONE, shards * _GOLDEN % _ONE
    # A fraction f of y is below the edge where floor(y) - floor(y - edge) is 1. `_ONE` more on both sides avoids
    # negative numbers.
    return _floor_sum(rows, _ONE, step, first + _ONE) - _floor_sum(rows, _ONE, step, first + _ONE - edge)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of (a * i + b) // m for i from 0 to n - 1, for a and b of at least 0.

    The method of the AtCoder Library: https://github.com/atcoder/ac-library/blob/master/document_en/math.md.
    """
    total = 0
    while n:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            return total
        n, b = top // m, top % m
        m, a = a, m
    return total
