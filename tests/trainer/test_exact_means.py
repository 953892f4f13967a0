"""Sums that are exact say of numbers that are none what other means say of them."""

from __future__ import annotations

import math

import pytest

from headway.trainer.exact_means import ExactMeans
from headway.trainer.metrics import MeanMetrics
from headway.trainer.world import World


@pytest.mark.parametrize("kind", [MeanMetrics, ExactMeans])
@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1.0, math.nan), (2.0, 1.0)], math.nan),
        ([(1.0, math.inf), (2.0, 1.0)], math.nan),
        ([(math.inf, 1.0), (2.0, 1.0)], math.inf),
        ([(math.inf, 1.0), (-math.inf, 1.0)], math.nan),
        ([(1.0, 1.0), (2.0, 3.0)], 1.75),
    ],
)
def test_means_of_what_is_not_finite(
    kind: type[MeanMetrics], pairs: list[tuple[float, float]], expected: float
) -> None:
    means = kind()
    for value, weight in pairs:
        means.add({"loss": value}, weight)
    assert means.read(World.alone("cpu"))["loss"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("kind", [MeanMetrics, ExactMeans])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_beyond_all_numbers_is_infinite(kind: type[MeanMetrics], sign: float) -> None:
    means = kind()
    for _ in range(2):
        means.log("total", sign * 1.5e308, 1, "sum")
    assert means.read(World.alone("cpu"))["total"] == sign * math.inf
