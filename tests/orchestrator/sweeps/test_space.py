"""Axes of a search space, also those of Ray Tune and Optuna. Without Ray processes."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.orchestrator import Choice, Experiment, Grid, LogUniform, Normal, RandInt, Search, Uniform, When
from headway.orchestrator.sweeps.space import as_axis, contains
from headway.trainer.errors import ConfigError
from tests.tiny import TinyConfig, TinyTrainer

RATE, WIDTH = "config.learning_rate", "config.width"


def drawn(axis: Any, number: int = 2000) -> list[Any]:
    generator = random.Random(1)
    return [axis.draw(generator) for _ in range(number)]


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        (Uniform(0.0, 0.5, step=0.1), [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (Uniform(0.0, 1.0, step=0.4), [0.0, 0.4, 0.8]),
        (LogUniform(1.0, 9.0, step=4.0), [1.0, 5.0, 9.0]),
        (RandInt(8, 32, step=8), [8, 16, 24, 32]),
        (RandInt(1, 10, step=4), [1, 5, 9]),
        (RandInt(1, 4, log=True), [1, 2, 3, 4]),
        (RandInt(2, 9, step=3, log=True), [2, 5, 8]),
    ],
    ids=str,
)
def test_steps_are_counted_from_the_lower_limit_and_keep_within_the_limits(axis: Any, values: list[Any]) -> None:
    found = drawn(axis)
    assert sorted(set(found)) == values
    assert {type(value) for value in found} == {type(values[0])}
    assert set(axis.samples()) <= set(values)
    assert all(contains(axis, value) for value in values)
    assert not contains(axis, values[0] + (values[1] - values[0]) / 3)


def test_integers_on_a_logarithmic_scale_and_normal_values_have_their_distribution() -> None:
    widths = drawn(RandInt(1, 1024, log=True))
    # Half of the values are below the geometric mean.
    assert 0.45 < statistics.mean(value < 32 for value in widths) < 0.55
    assert {1, 2, 3} <= set(widths)
    noise = drawn(Normal(1.0, 0.5))
    assert statistics.mean(noise) == pytest.approx(1.0, abs=0.05)
    assert statistics.stdev(noise) == pytest.approx(0.5, abs=0.05)
    assert set(drawn(Normal(0.0, 1.0, step=0.5))) >= {-1.0, -0.5, 0.0, 0.5, 1.0}


def test_domains_of_ray_tune_and_distributions_of_optuna_become_axes() -> None:
    tune, optuna = pytest.importorskip("ray.tune"), pytest.importorskip("optuna").distributions
    expected = [
        (tune.uniform(0, 1), Uniform(0, 1)),
        (tune.quniform(0, 1, 0.25), Uniform(0, 1, 0.25)),
        (tune.loguniform(1e-4, 1e-1), LogUniform(1e-4, 1e-1)),
        (tune.qloguniform(1.0, 9.0, 1.0), LogUniform(1.0, 9.0, 1.0)),
        # The upper limit is exclusive in Ray Tune, but not with a step.
        (tune.randint(1, 8), RandInt(1, 7)),
        (tune.qrandint(8, 64, 8), RandInt(8, 64, 8)),
        # Multiples of the step, wherever the limits are.
        (tune.qrandint(2, 20, 4), RandInt(4, 20, 4)),
        (tune.qrandint(1, 64, 8), RandInt(8, 64, 8)),
        (tune.qrandint(-5, 10, 4), RandInt(-4, 8, 4)),
        (tune.qrandint(1, 8, 1), RandInt(1, 7)),
        (tune.qlograndint(3, 70, 8), RandInt(8, 64, 8, log=True)),
        (tune.lograndint(1, 1025), RandInt(1, 1024, log=True)),
        (tune.randn(1.0, 2.0), Normal(1.0, 2.0)),
        (tune.qrandn(0.0, 1.0, 0.5), Normal(0.0, 1.0, 0.5)),
        (tune.qrandn(0.3, 1.0, 0.1), Normal(0.3, 1.0, 0.1)),
        (tune.choice([[4, 4], [8]]), Choice([[4, 4], [8]])),
        (tune.grid_search([1, 2]), Grid([1, 2])),
        (optuna.FloatDistribution(0.0, 1.0), Uniform(0.0, 1.0)),
        (optuna.FloatDistribution(0.0, 1.0, step=0.25), Uniform(0.0, 1.0, 0.25)),
        (optuna.FloatDistribution(0.1, 1.0, log=True), LogUniform(0.1, 1.0)),
        (optuna.IntDistribution(8, 64, step=8), RandInt(8, 64, 8)),
        (optuna.IntDistribution(1, 64, log=True), RandInt(1, 64, log=True)),
        (optuna.CategoricalDistribution(("a", "b")), Choice(["a", "b"])),
        ([16, 32], Choice([16, 32])),
        ((16, 32), (16, 32)),
        (0.5, 0.5),
    ]
    for value, axis in expected:
        assert as_axis(value) == axis
    for value, message in [
        (tune.randint(2, 3), "from 2 to 3 has only the value 2, because its upper limit is exclusive: use 2 itself"),
        (tune.choice([tune.randint(2, 5), 16]), "values must not be axes, got one of Integer: .* use When"),
        ([0.1, optuna.FloatDistribution(0.0, 1.0)], "values must not be axes, got one of FloatDistribution"),
        (optuna.FloatDistribution(0.1, 0.1), "low and high are both 0.1"),
        (tune.randint(5, 2), "from 5 to 2 contains no integer: its upper limit is exclusive"),
        (tune.qrandint(3, 5, 4), "from 3 to 5 has only the value 4, the only multiple of 4: use 4 itself"),
        (tune.qrandint(5, 7, 4), "from 5 to 7 contains no multiple of 4"),
        (tune.qrandn(0.1, 1.0, 0.25), "draws multiples of 0.25, but .* use a mean that is a multiple of 0.25"),
    ]:
        with pytest.raises(ConfigError, match=message):
            as_axis(value)
    conditional = Search(space={WIDTH: [4, 8], RATE: When(WIDTH, 4, tune.uniform(0, 1))}).space[RATE]
    assert conditional == When(WIDTH, 4, Uniform(0, 1))
    with pytest.raises(ConfigError, match="sample_from of Ray Tune has no equivalent.*When"):
        Search(space={RATE: tune.sample_from(lambda config: 1)})


@pytest.mark.parametrize(
    ("given", "axis"),
    [
        (list(np.array([1e-4, 1e-3])), Choice([1e-4, 1e-3])),
        (np.array([8, 16]), Choice([8, 16])),
        (Choice(np.arange(8, 33, 8)), Choice([8, 16, 24, 32])),
        (Grid([[np.int64(4), 4], {"a": np.float64(0.5)}]), Grid([[4, 4], {"a": 0.5}])),
        (Uniform(np.float32(0.5), np.int64(2), np.float64(0.25)), Uniform(0.5, 2, 0.25)),
        (RandInt(np.int64(2), np.int32(8), step=np.int64(2)), RandInt(2, 8, step=2)),
        (Normal(np.float64(0.5), np.float64(0.25)), Normal(0.5, 0.25)),
        (When("config.width", np.int64(4), [np.str_("a"), np.bool_(True)]), When("config.width", 4, ["a", True])),
        (np.float64(0.5), 0.5),
    ],
    ids=str,
)
def test_scalars_of_numpy_become_python_numbers(given: Any, axis: Any) -> None:
    # By their text, because numbers of NumPy are equal to others.
    assert repr(as_axis(given)) == repr(axis)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("qrandint", (2, 20, 4)),
        ("qrandint", (1, 64, 8)),
        ("qrandint", (-5, 10, 4)),
        ("qrandint", (1, 8, 1)),
        ("qlograndint", (3, 70, 8)),
        ("randint", (2, 9)),
        ("lograndint", (1, 9)),
        ("quniform", (0.25, 1.5, 0.25)),
        ("qloguniform", (1.0, 9.0, 1.0)),
    ],
)
def test_an_axis_has_the_values_that_ray_tune_draws(name: str, limits: tuple[Any, ...]) -> None:
    domain = getattr(pytest.importorskip("ray.tune"), name)(*limits)
    theirs = set(domain.sample(size=2000, random_state=1))
    assert sorted(set(drawn(as_axis(domain)))) == pytest.approx(sorted(theirs))


def test_a_grid_over_some_axes_and_samples_over_others() -> None:
    space = {WIDTH: Grid([4, 8]), "config.schedule": Grid(["constant", "cosine"]), RATE: LogUniform(1e-4, 1e-1)}
    search = Search(space=space)
    assert search.num_trials == 4
    found = [search.suggest(index) for index in range(8)]
    cells = [(each[WIDTH], each["config.schedule"]) for each in found]
    assert cells == [(4, "constant"), (4, "cosine"), (8, "constant"), (8, "cosine")] * 2
    assert len({each[RATE] for each in found}) == 8
    assert Search(space=space, trials=12).num_trials == 12
    # With algorithm="grid", a Grid is a Choice.
    assert Search(space={WIDTH: Grid([4, 8])}, algorithm="grid").grid() == [{WIDTH: 4}, {WIDTH: 8}]
    with pytest.raises(ConfigError, match=r"Grid needs algorithm='random' or 'grid'.*use Choice\(\[4, 8\]\)"):
        Search(space={WIDTH: Grid([4, 8])}, algorithm="tpe")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1, 0), "low must be less than high"),
        (lambda: Uniform(0.1, 0.1), "Uniform: low and high are both 0.1: use the value 0.1 itself"),
        (lambda: Choice([0.1, Uniform(0, 1)]), "Choice: values must not be axes, got one of Uniform: list its values"),
        (lambda: Grid([1, {"grid_search": [2, 3]}]), "Grid: values must not be axes, got one of dict"),
        (lambda: Uniform(0, 1, step=2), r"step must be <= high - low \(1\), got 2"),
        (lambda: Uniform(0, 1, step=0), "step must be > 0, got 0"),
        (lambda: LogUniform(0, 1), "low must be > 0 on a logarithmic scale, got 0"),
        (lambda: RandInt(0, 8, log=True), "low must be > 0 on a logarithmic scale, got 0"),
        (lambda: RandInt(0.5, 2), "RandInt: low, high and step must be integers"),  # type: ignore[arg-type]
        (lambda: Normal(0, 0), "std > 0, got 0 and 0"),
        (lambda: Uniform(0, math.inf), "low and high must be finite numbers"),
        (lambda: Choice("ab"), "Choice: values must be a list"),  # type: ignore[arg-type]
        (lambda: Grid([]), "Grid: values must not be empty"),  # type: ignore[arg-type]
        (lambda: Search(space={RATE: Normal(0, 1)}, algorithm="tpe"), "algorithm='tpe' has no normal distribution"),
    ],
)
def test_wrong_axes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_first_trials_have_the_given_points(tmp_path: Path) -> None:
    space = {
        RATE: LogUniform(1e-4, 1e-1),
        "config.schedule": ["constant", "cosine"],
        "config.warmup": When("config.schedule", "cosine", RandInt(0, 100)),
        "config.dropout": 0.5,
    }
    points = [{RATE: 0.01, "config.schedule": "cosine", "config.warmup": 7}, {RATE: 0.02}]
    for algorithm in ("random", "tpe"):
        search = Search(space=space, points=points, algorithm=algorithm, trials=5)
        assert search.num_trials == 5
        first, second, third = (search.suggest(index) for index in range(3))
        assert first == {**points[0], "config.dropout": 0.5}
        assert second[RATE] == 0.02
        assert second["config.schedule"] in ("constant", "cosine")
        assert third[RATE] not in (0.01, 0.02)
    grid = Search(space={WIDTH: [4, 8, 16]}, points=[{WIDTH: 8}], algorithm="grid")
    assert [grid.suggest(index)[WIDTH] for index in range(grid.num_trials)] == [8, 4, 8, 16]
    for point, message in (
        ({RATE: 0.5}, r"points\[0\]: config.learning_rate=0.5 is not a value of LogUniform\(low=0.0001"),
        ({WIDTH: 4}, "config.width is not in the space, which has config.learning_rate"),
        ({"config.warmup": 7}, "config.warmup applies when config.schedule is 'cosine': add that"),
        ({}, "must be a dict of values by path"),
    ):
        with pytest.raises(ConfigError, match=message):
            Search(space=space, points=[point])
    # Also against the config, before anything starts.
    experiment = Experiment(name="tiny", trainer=TinyTrainer, config=TinyConfig(max_steps=4), storage=str(tmp_path))
    refused = Search(
        space={"config.precision": ["fp32", "bf16"], "config.max_steps": [1, -1]}, points=[{"config.max_steps": -1}]
    )
    with pytest.raises(ConfigError, match="max_steps"):
        refused.check(experiment)
