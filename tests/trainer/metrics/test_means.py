"""Means are weighted by samples over micro-batches and ranks, exactly, and cost next to nothing until they are read."""

from __future__ import annotations

import copy
import math
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.trainer.distributed.world import World
from headway.trainer.errors import StepError
from headway.trainer.exact.means import ExactMeans
from headway.trainer.metrics.means import MeanMetrics, group_sums
from headway.trainer.metrics.reductions import to_float64
from tests.distributed import run_on_ranks

ALONE = World.single("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device(request.param)


def mean_of(*entries: tuple[Any, Any]) -> dict[str, float]:
    metrics = MeanMetrics()
    for outputs, weight in entries:
        metrics.add(outputs, weight)
    return metrics.read(ALONE)


def test_mean_is_weighted_by_samples() -> None:
    assert mean_of(({"loss": torch.tensor(1.0)}, 3), ({"loss": 5.0}, 1)) == {"loss": 2.0}


def test_nested_names_are_joined_and_sorted() -> None:
    outputs = {"loss": 1.0, "aux": {"z": torch.tensor(2), "deep": {"x": True}}}
    assert list(mean_of((outputs, 1)).items()) == [("aux/deep/x", 1.0), ("aux/z", 2.0), ("loss", 1.0)]


def test_prefix_goes_before_every_name() -> None:
    metrics = MeanMetrics()
    metrics.add({"loss": 1.0, "a": {"b": 2.0}}, prefix="train/")
    assert metrics.read(ALONE) == {"train/a/b": 2.0, "train/loss": 1.0}


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        np.float32(2),
        np.int64(2),
        torch.tensor(2),
        torch.tensor([2.0]),
        torch.tensor([[2.0]], dtype=torch.bfloat16),
    ],
)
def test_any_single_number_is_a_value(value: Any) -> None:
    assert mean_of(({"a": value}, 2)) == {"a": 2.0}


def test_numbers_and_tensors_of_all_kinds_mix_under_one_name() -> None:
    entries = [(1, 1), (torch.tensor(2.0), 1), (torch.tensor(3), torch.tensor(2)), (np.float64(5.5), torch.tensor(1.0))]
    assert mean_of(*[({"a": value}, weight) for value, weight in entries]) == {"a": 14.5 / 5}


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_weight_zero_does_not_contaminate(weight: Any) -> None:
    bad = {"loss": torch.tensor(float("nan")), "other": float("inf")}
    assert mean_of(({"loss": torch.tensor(2.0), "other": 1.0}, 4), (bad, weight)) == {"loss": 2.0, "other": 1.0}


@pytest.mark.parametrize("second", [0.3, torch.tensor(0.3, dtype=torch.float64)])
def test_numbers_keep_their_precision_beside_those_of_a_device(second: Any) -> None:
    assert to_float64(0.1, torch.device("cpu")).item() == 0.1
    metrics = MeanMetrics()
    metrics._keep("a", torch.tensor(1.0), 0.1)
    metrics._keep("a", torch.tensor(2.0), second)
    assert metrics.read(World.single("cpu"))["a"] == pytest.approx(1.75, rel=1e-14)


def test_without_any_weight_there_is_no_metric() -> None:
    assert mean_of() == {}
    assert mean_of(({"a": 1.0}, 0)) == {}
    assert mean_of(({"a": 1.0}, torch.tensor(0))) == {}


@pytest.mark.parametrize("constant", [0.9, -0.1, 1 / 3, 1e308, 5e-324])
def test_the_mean_of_a_constant_is_that_constant(constant: float) -> None:
    """At any magnitude, with any weights, and across a resume."""
    metrics, resumed = MeanMetrics(), MeanMetrics()
    sums = [0.0, 0.0]
    for weight in (3, 7.5, 0.1, 1, 1, 1, 11, 0.3):
        value = torch.tensor(constant, dtype=torch.float64)
        metrics.add({"a": constant, "nested": {"tensor": value}}, weight)
        metrics._keep("on device", value, weight)
        metrics._keep("weighed there", value, torch.tensor(weight))
        sums = [sums[0] + weight * constant, sums[1] + weight]
    metrics._keep("on device", torch.tensor(7.0), 0)
    resumed.load_state_dict(copy.deepcopy(metrics.state_dict()))
    resumed.merge(metrics)
    assert resumed.read(ALONE) == dict.fromkeys(("a", "nested/tensor", "on device", "weighed there"), constant)
    if constant == 0.9:
        assert sums[0] / sums[1] != constant  # the case under test


def test_sums_of_exact_mode_which_have_no_extremes_are_restored() -> None:
    metrics = MeanMetrics()
    metrics.load_state_dict({"sums": {"loss": [3.0, 4.0]}, "reduced": metrics.reduced.state_dict()})
    metrics.add({"loss": 2.0}, 1)
    assert metrics.read(ALONE) == {"loss": 1.0}


def test_nan_that_counts_is_seen() -> None:
    assert math.isnan(mean_of(({"loss": torch.tensor(float("nan"))}, 1), ({"loss": 1.0}, 1))["loss"])


def test_read_begins_anew_and_forgets_names_that_are_not_added_again() -> None:
    metrics = MeanMetrics()
    metrics.add({"a": 1.0, "b": 2.0})
    assert metrics.read(ALONE) == {"a": 1.0, "b": 2.0}
    metrics.add({"b": 4.0, "c": 5.0})
    assert metrics.read(ALONE) == {"b": 4.0, "c": 5.0}
    assert metrics.read(ALONE) == {}


def test_sums_are_in_float64() -> None:
    values = [random.Random(0).random() for _ in range(5000)]
    metrics = MeanMetrics()
    for value in values:
        metrics.add(
            {
                "a": torch.tensor(value, dtype=torch.float64),
                "big": torch.tensor(1e8 + 1, dtype=torch.float64),
                "int": 2**40 + 1,
            }
        )
    read = metrics.read(ALONE)
    assert read["a"] == pytest.approx(math.fsum(values) / len(values), rel=1e-13)
    assert read["big"] == 1e8 + 1
    assert read["int"] == 2**40 + 1


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_memory_is_bounded_and_the_mean_is_over_all(device: torch.device) -> None:
    metrics = MeanMetrics()
    for index in range(10_000):
        weight = torch.tensor(index % 3, device=device) if index % 2 else index % 3
        metrics.add({"a": torch.tensor(float(index), device=device)}, weight)
        assert len(metrics._on_device.get("a", ())) < 1024
    weights = [index % 3 for index in range(10_000)]
    expected = sum(index * weight for index, weight in enumerate(weights)) / sum(weights)
    assert metrics.read(ALONE)["a"] == pytest.approx(expected, rel=1e-13)


class Probe:
    """Lives as long as the graph that refers to it."""


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_graph_of_the_loss_is_let_go(device: torch.device) -> None:
    metrics, parameter = MeanMetrics(), torch.ones(1000, requires_grad=True, device=device)
    loss = (parameter**2).mean()
    loss.grad_fn.metadata["probe"] = probe = Probe()
    graph = weakref.ref(probe)
    metrics.add({"loss": loss, "parameter": parameter[0]})
    metrics._keep("loss", loss, 1)
    del loss, probe
    assert graph() is None


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_parameter_that_moves_later_is_averaged_as_it_was(device: torch.device) -> None:
    metrics, parameter = MeanMetrics(), torch.nn.Parameter(torch.tensor([1.0, 1.0], device=device))
    for _ in range(3):
        metrics.add({"whole": parameter[:1], "view": parameter[0], "plain": parameter.detach()[1]})
        with torch.no_grad():
            parameter.add_(1)
    assert metrics.read(World.single(device)) == {"plain": 2.0, "view": 2.0, "whole": 2.0}


def test_what_is_kept_for_a_device_adds_up_the_same() -> None:
    """Treats CPU tensors like a GPU's: unchanged values, weights of both kinds, many folds."""
    metrics, parameter = MeanMetrics(), torch.nn.Parameter(torch.tensor([0.0]))
    for index in range(5000):
        metrics._keep("index", torch.tensor(index, dtype=torch.bfloat16 if index < 256 else torch.int64), index % 3)
        metrics._keep("moving", parameter[0], torch.tensor(index % 2))
        metrics._keep("nan", torch.tensor(float("nan") if index % 2 else 1.0), 0 if index % 2 else torch.tensor([2.0]))
        with torch.no_grad():
            parameter.add_(1)
    weighted = sum(index * (index % 3) for index in range(5000)) / sum(index % 3 for index in range(5000))
    assert metrics.read(ALONE) == {"index": pytest.approx(weighted, rel=1e-13), "moving": 2500.0, "nan": 1.0}
    assert metrics.read(ALONE) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_values_and_weights_on_several_devices_mix_under_one_name() -> None:
    gpu, metrics = torch.device("cuda"), MeanMetrics()
    numbers = [1, torch.tensor(2.0), torch.tensor(3, device=gpu), torch.tensor(4.0, device=gpu, dtype=torch.bfloat16)]
    for value in numbers:
        for weight in (2, torch.tensor(1), torch.tensor(3.0, device=gpu), torch.tensor(0, device=gpu)):
            metrics.add({"a": value}, weight)
    metrics.add({"a": torch.tensor(float("nan"), device=gpu)}, torch.tensor(0, device=gpu))
    assert metrics.read(World.single(gpu)) == {"a": 2.5}


def test_interval_goes_on_after_a_resume() -> None:
    metrics, resumed = MeanMetrics(), MeanMetrics()
    metrics.add({"loss": 1.0}, weight=3)
    metrics._keep("kept", torch.tensor(2.0), 1)
    resumed.load_state_dict(copy.deepcopy(metrics.state_dict()))
    for each in (metrics, resumed):
        each.add({"loss": 5.0}, weight=1)
        each._keep("kept", torch.tensor(4.0), 3)
        assert each.read(ALONE) == {"kept": 3.5, "loss": 2.0}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"logits": torch.zeros(4, 10)}, r"a tensor of shape \[4, 10\] as 'logits'"),
        ({"a": {"b": torch.zeros(0)}}, r"a tensor of shape \[0\] as 'a/b'"),
        ({"text": "hello"}, "str 'hello' as 'text'"),
        ({"aux": None}, "NoneType None as 'aux'"),
        ({"losses": [1.0, 2.0]}, r"list \[1.0, 2.0\] as 'losses'"),
    ],
)
def test_what_is_no_single_number_is_refused_by_name(outputs: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        MeanMetrics().add(outputs)


def read_on_rank(world: World) -> list[dict[str, float]]:
    metrics, reads = MeanMetrics(), []
    values = torch.arange(10, dtype=torch.float64)[world.rank :: world.size]
    for value in values:
        metrics.add({"loss": value, "rank": {str(world.rank): 1.0}}, weight=value + 1)
    reads.append(metrics.read(world))
    if world.rank == 1:
        metrics.add({"only": 7.0}, weight=2)
    reads.append(metrics.read(world))
    metrics.add({"loss": float(world.rank)}, weight=0 if world.rank else 1)
    reads.append(metrics.read(world))
    reads.append(metrics.read(world))
    return reads


def count_collectives(world: World) -> list[int]:
    counts: list[int] = []

    class Counting:
        device, size, calls = world.device, world.size, 0

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return world.all_gather(tensor)

        def all_gather_object(self, value: Any) -> list[Any]:
            self.calls += 1
            return world.all_gather_object(value)

    metrics, counting = MeanMetrics(), Counting()
    for _ in range(3):
        metrics.add({"loss": 1.0, "accuracy": 0.5})
        metrics.read(counting)  # type: ignore[arg-type]
        counts.append(counting.calls)
        counting.calls = 0
    return counts


def read_constant(world: World) -> dict[str, float]:
    metrics = MeanMetrics()
    for weight in range(world.rank, 7):
        metrics.add({"a": 0.9, "fraction": -0.9}, weight)
        metrics.log("fraction", -0.9, weight / 10, "mean")
    return metrics.read(world)


def on_rank(world: World) -> tuple[list[dict[str, float]], list[int], dict[str, float]]:
    return read_on_rank(world), count_collectives(world), read_constant(world)


def test_ranks_meet_in_one_mean_by_one_collective_and_names_may_differ() -> None:
    ranks = run_on_ranks(on_rank, 3)
    reads, counts, constant = ranks[0]
    assert constant == {"a": 0.9, "fraction": -0.9}
    expected = sum(value * (value + 1) for value in range(10)) / sum(value + 1 for value in range(10))
    names = {f"rank/{rank}": 1.0 for rank in range(3)}
    assert reads == [{"loss": pytest.approx(expected, rel=1e-14), **names}, {"only": 7.0}, {"loss": 0.0}, {}]
    assert counts == [3, 1, 1]  # Three collectives while names are new, one afterwards.
    assert all(rank == ranks[0] for rank in ranks)


def test_evaluation_mean_does_not_depend_on_batch_size_or_ranks() -> None:
    per_row = [0.25 * row for row in range(10)]
    means = []
    for batch in (1, 3, 4, 10):
        rows = [per_row[start : start + batch] for start in range(0, 10, batch)]
        means.append(mean_of(*[({"loss": torch.tensor(part).mean()}, len(part)) for part in rows])["loss"])
    assert means == pytest.approx([sum(per_row) / 10] * 4, rel=1e-7)


def test_adding_a_loss_on_the_cpu_only_reads_its_value() -> None:
    metrics = MeanMetrics()
    loss = (torch.ones(3, requires_grad=True) ** 2).mean()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        metrics.add({"loss": loss}, 32)
    assert {event.name for event in profile.events()} == {"aten::item", "aten::_local_scalar_dense"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_nothing_waits_for_the_gpu_before_the_read() -> None:
    device = torch.device("cuda")
    metrics, loss = MeanMetrics(), torch.ones((), device=device, requires_grad=True) * 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3000):
            metrics.add({"loss": loss, "number": 1.0, "tokens": torch.ones((), device=device)}, weight=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metrics.read(World.single(device)) == {"loss": 2.0, "number": 1.0, "tokens": 1.0}


def test_a_rank_takes_over_what_ranks_that_are_gone_had_added() -> None:
    """As if this rank had added it before."""
    stays, gone = MeanMetrics(), MeanMetrics()
    for metrics, loss, weight, count in ((stays, 1.0, 1, 2.0), (gone, 4.0, 3, 5.0)):
        metrics.add({"loss": loss}, weight)
        metrics.reduced.add("rows", count, "sum")
        metrics.reduced.add("longest", count, "last")
    gone.add({"only": 2.0}, 1)
    stays.add_state_dict(copy.deepcopy(gone.state_dict()))
    assert stays.read(ALONE) == {"loss": 3.25, "only": 2.0, "rows": 7.0, "longest": 2.0}


def _grouped(world: World, exact: bool) -> tuple[dict[str, float], int]:
    """Add four micro-batches of rows of three groups, divided among the ranks; the last group has no row."""
    metrics = ExactMeans() if exact else MeanMetrics()
    names, totals = ["loss/a", "loss/b", "loss/c"], ["tokens/a", "tokens/b", "tokens/c"]
    for part in range(world.rank, 4, world.size):
        value_B = torch.tensor([1.0 + part, 10.0, math.nan])
        sums = group_sums(value_B, torch.tensor([0, 1, 1]), torch.tensor([2, 1 + part, 0]), 3)
        metrics.add_groups(sums, names, totals)
    state = metrics.state_dict()
    restored = type(metrics)()
    restored.load_state_dict(state)
    later = type(metrics)()
    later.merge(restored)
    return later.read(world), len(later.names())


@pytest.mark.parametrize("exact", [False, True])
def test_means_of_groups_are_those_of_all_their_rows(exact: bool) -> None:
    expected = {"loss/a": 2.5, "loss/b": 10.0, "tokens/a": 8.0, "tokens/b": 10.0}
    assert _grouped(ALONE, exact)[0] == expected
    assert [each for each, _ in run_on_ranks(_grouped, 3, exact)] == [expected] * 3


class CountOperators(TorchDispatchMode):
    """Counts the operators of torch."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_adding_groups_costs_the_same_for_many_and_does_not_wait() -> None:
    """Nothing is read back: on the meta device there is nothing to read."""
    counts = []
    for num_groups in (2, 100):
        metrics = MeanMetrics()
        names = [f"loss/{group}" for group in range(num_groups)]
        with CountOperators() as counted:
            for _ in range(3):
                value_B = torch.empty(8, device="meta")
                sums = group_sums(value_B, torch.empty(8, dtype=torch.int64, device="meta"), None, num_groups)
                metrics.add_groups(sums, names, [f"rows/{group}" for group in range(num_groups)])
        counts.append(counted.number)
    assert counts[0] == counts[1]
