"""How long each phase of getting ready has taken on this rank: what a restart costs before it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SetupTimes(dict[str, float]):
    """Seconds by phase, in the order in which they end.

    `configure` builds the models on the meta device; `parallelise` checks that the ranks agree, shards and replicates;
    `initialise` draws the weights; `open_data`, `optimizers` and `restore` are what they say. `first_batch` is the wait
    for the first batch of the attempt, and `first_update` the update of it, in which torch compiles.

    Example:
        >>> from headway.trainer.setup_times import SetupTimes
        >>> times = SetupTimes()
        >>> with times.phase("open_data"):
        ...     pass
        >>> list(times)
        ['open_data']
    """

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds to a phase what happens inside."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - began_s
