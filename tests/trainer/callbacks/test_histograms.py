"""Histograms: count every element once under every strategy, cost nothing in other updates, and reach the trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from headway.trainer import ConfigError, Histogram, ParallelConfig, Tracker, World, histograms
from headway.trainer.callbacks import Histograms
from headway.trainer.config import Strategy
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Kept(Tracker):
    """Records what it is called with."""

    def __init__(self) -> None:
        self.got: dict[int, dict[str, Histogram]] = {}

    def log_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        self.got.setdefault(step, {}).update(histograms)


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(**{"num_rows": 64, "max_steps": 5, "evaluate_every": None, **changes})


def test_a_histogram_counts_what_numpy_counts() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    found = histograms({"a": values}, ALONE, bins=16)["a"]
    counts, edges = torch.histogram(values, bins=16)
    assert found.counts == tuple(counts.int().tolist())
    assert found.edges == pytest.approx(edges.tolist(), abs=1e-6)
    assert (found.total, found.total_of_squares) == pytest.approx((values.sum().item(), values.square().sum().item()))


@pytest.mark.parametrize(
    ("values", "counted", "lost"),
    [([1.0, math.nan, math.inf, 3.0], 2, 2), ([5.0] * 7, 7, 0), ([0.0], 1, 0), ([math.nan], 0, 1), ([1e30] * 2, 2, 0)],
)
def test_equal_huge_and_non_finite_values_are_counted_too(values: list[float], counted: int, lost: int) -> None:
    found = histograms({"a": torch.tensor(values)}, ALONE)["a"]
    assert (sum(found.counts), found.non_finite) == (counted, lost)
    assert all(low < high for low, high in zip(found.edges, found.edges[1:], strict=False))


def test_nothing_has_no_histogram() -> None:
    assert histograms({"a": torch.empty(0)}, ALONE) == {}
    assert histograms({}, ALONE) == {}


def test_they_come_on_their_interval_and_of_what_the_patterns_name() -> None:
    kept = Kept()
    callback = Histograms(every="2 steps", patterns=["model.blocks.*.weight", "model.last.bias"])
    trainer = TinyTrainer(_config(), world=ALONE, callbacks=[callback], trackers=[kept])
    trainer.fit()
    names = ["model.blocks.0.0.weight", "model.blocks.1.0.weight", "model.last.bias"]
    assert {step: sorted(each) for step, each in kept.got.items()} == {
        step: [f"{kind}/{name}" for kind in ("gradients", "parameters") for name in names] for step in (2, 4)
    }
    assert sum(kept.got[2]["gradients/model.blocks.0.0.weight"].counts) == 81


@pytest.mark.parametrize(("parameters", "gradients"), [(True, False), (False, True)])
def test_of_one_kind_only(parameters: bool, gradients: bool) -> None:
    kept = Kept()
    callback = Histograms(every=5, parameters=parameters, gradients=gradients)
    trainer = TinyTrainer(_config(), world=ALONE, callbacks=[callback], trackers=[kept])
    trainer.fit()
    assert {name.split("/")[0] for name in kept.got[5]} == {"parameters" if parameters else "gradients"}
    if parameters:
        now = histograms({f"parameters/{name}": value for name, value in weights(trainer).items()}, ALONE)
        assert kept.got[5] == now


def test_a_pattern_that_matches_nothing_is_refused_before_the_first_step() -> None:
    trainer = TinyTrainer(_config(), world=ALONE, callbacks=[Histograms(every=1, patterns=["head.*"])])
    with pytest.raises(ConfigError, match=r"'head\.\*' matches no parameter; the parameters are model\.first\.weight"):
        trainer.fit()
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "2 epochs"}, "every must be in steps"),
        ({"every": 1, "patterns": "model.*"}, "patterns must be a list"),
        ({"every": 1, "bins": 1}, "bins must be an integer"),
        ({"every": 1, "parameters": False, "gradients": False}, "set one of them"),
    ],
)
def test_arguments_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Histograms(**options)


def _on_ranks(world: World) -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp", "hsdp"):
        kept = Kept()
        name: Strategy = strategy  # type: ignore[assignment]
        parallel = ParallelConfig(strategy=name, dp_shard=1 if name == "hsdp" else None)
        config = _config(max_steps=2, global_batch_size=8, parallel=parallel)
        TinyTrainer(config, world=world, callbacks=[Histograms(every=2)], trackers=[kept]).fit()
        found[strategy] = kept.got
    return found


def test_every_element_counts_once_however_it_is_sharded() -> None:
    main, other = run_on_ranks(_on_ranks, 2)
    assert other == {"ddp": {}, "fsdp": {}, "hsdp": {}}
    kept = Kept()
    config = _config(max_steps=2, global_batch_size=8)
    TinyTrainer(config, world=ALONE, callbacks=[Histograms(every=2)], trackers=[kept]).fit()
    for strategy, got in main.items():
        assert got[2].keys() == kept.got[2].keys()
        for name, wanted in kept.got[2].items():
            found = got[2][name]
            assert sum(found.counts) == sum(wanted.counts), (strategy, name)
            assert found.edges == pytest.approx(wanted.edges, rel=1e-4, abs=1e-6)
            assert found.total == pytest.approx(wanted.total, rel=1e-4, abs=1e-5)
            assert found.total_of_squares == pytest.approx(wanted.total_of_squares, rel=1e-4, abs=1e-7)
            # Rounding may move a value across a bin edge.
            assert sum(abs(a - b) for a, b in zip(found.counts, wanted.counts, strict=True)) <= 4
