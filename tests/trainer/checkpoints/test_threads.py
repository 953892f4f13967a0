"""Work in threads: results in order, and little in memory at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from headway.trainer.checkpoints.format.threads import in_threads


@pytest.mark.parametrize(("nbytes", "most"), [(1 << 20, 260), (100 << 20, 3), (1 << 30, 2)])
def test_results_come_in_order_and_few_items_are_taken_before_them(nbytes: int, most: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1, 601):
            taken.append(item)
            yield item

    def slow(item: int) -> int:
        time.sleep(0.002 * (item % 3 == 0))
        return -item

    for number, result in enumerate(in_threads(slow, items(), lambda _: nbytes)):
        assert result == -(number + 1)
        assert len(taken) - number <= most
    assert len(taken) == 600


def test_an_error_of_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda item: 1 // item, [1, 0, 2], lambda _: 1))
