"""Exact means of NaN and infinities equal those of ordinary means."""

from __future__ import annotations

import math

import pytest

from headway.trainer.distributed.world import World
from headway.trainer.exact.means import ExactMeans
from headway.trainer.metrics.means import MeanMetrics


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
    assert means.read(World.single("cpu"))["loss"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("kind", [MeanMetrics, ExactMeans])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_beyond_all_numbers_is_infinite(kind: type[MeanMetrics], sign: float) -> None:
    means = kind()
    for _ in range(2):
        means.log("total", sign * 1.5e308, 1, "sum")
    assert means.read(World.single("cpu"))["total"] == sign * math.inf


def test_a_mean_is_rounded_once() -> None:
    """The mean of a constant is the constant, also across a resume."""
    means, resumed = ExactMeans(), ExactMeans()
    for weight in (3, 3):
        means.add({"loss": 0.7}, weight)
    resumed.load_state_dict(means.state_dict())
    for each in (means, resumed):
        each.add({"loss": 0.7}, 3)
        assert each.read(World.single("cpu")) == {"loss": 0.7}


def test_exact_means_go_on_from_others_and_others_from_exact_ones() -> None:
    for kinds in ((MeanMetrics, ExactMeans), (ExactMeans, MeanMetrics)):
        before, after = (kind() for kind in kinds)
        before.add({"loss": 1.0}, 3)
        after.load_state_dict(before.state_dict())
        after.add({"loss": 5.0}, 1)
        assert after.read(World.single("cpu")) == {"loss": 2.0}
