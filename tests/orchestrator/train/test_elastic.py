"""Elastic runs: configuration, validation, and when a run scales up. Without Ray."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from headway.datasets.stream import ParquetStream
from headway.orchestrator import Experiment, Scaling, plan, resolve
from headway.orchestrator.cli.show import print_run
from headway.orchestrator.cluster.connect import check_resources
from headway.orchestrator.config.loader import from_yaml, to_yaml
from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.requests import read_scale_up_request, request_scale_up
from headway.orchestrator.runs.run import Run
from headway.orchestrator.storage.events import EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train.elastic import RAY_LEARNS_S, ScaleUpPolicy, slots_capped, target_workers
from headway.orchestrator.train.failures.retry_policy import has_left_to_resize
from headway.trainer import ConfigError, ParallelConfig
from tests.on_ray import OnRay, OnRayConfig, write_rows
from tests.tiny import TinyConfig, TinyTrainer


def experiment(storage: Path, workers: Any = (2, 8), **config: Any) -> Experiment:
    settings = {"max_steps": 6, "global_batch_size": 64, "micro_batch_size": 16, **config}
    scaling = Scaling(workers=workers, cpus_per_worker=0.1)
    return Experiment(
        name="tiny", trainer=TinyTrainer, config=TinyConfig(**settings), scaling=scaling, storage=str(storage)
    )


# ---- Configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["2..8", "[2,8]", "[2, 8]", '"2..8"'])
def test_a_range_of_workers_is_written_as_two_numbers(written: str) -> None:
    found = resolve(TinyTrainer, [f"scaling.workers={written}", "config.global_batch_size=8", "config.max_steps=1"])
    assert found.scaling.workers == (2, 8)
    assert (found.scaling.min_workers, found.scaling.max_workers, found.scaling.is_elastic) == (2, 8, True)
    assert str(found.scaling) == "2 to 8 workers"


def test_one_number_is_no_range() -> None:
    for workers in (3, (3, 3), [3, 3]):
        scaling = Scaling(workers=workers)  # type: ignore[arg-type]
        assert (scaling.workers, scaling.is_elastic, str(scaling)) == (3, False, "3 workers")


@settings(deadline=None)
@given(st.tuples(st.integers(1, 64), st.integers(1, 64)).map(sorted), st.floats(0.5, 1e6))
def test_a_range_comes_back_from_a_file(ends: list[int], seconds: float) -> None:
    config = TinyConfig(global_batch_size=64, max_steps=1)
    scaling = Scaling(workers=(ends[0], ends[1]), grow_after=f"{seconds}s")  # type: ignore[arg-type]
    found = Experiment(name="tiny", trainer=TinyTrainer, config=config, scaling=scaling)
    assert from_yaml(to_yaml(found)) == found


# ---- Validation before resources are reserved ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [(8, 2), (0, 2), (2,), (1, 2, 3), (1.0, 2), (True, 2), [2, "8"], ()])
def test_a_range_that_makes_no_sense_is_refused(workers: Any) -> None:
    with pytest.raises(ConfigError, match=r"workers must be an integer >= 1, or a range \(fewest, most\)"):
        Scaling(workers=workers)


@pytest.mark.parametrize("written", ["8..2", "2..", "2...8", "a..b", "[2]", "{a: 1}"])
def test_what_is_no_range_names_its_path(written: str) -> None:
    with pytest.raises(ConfigError, match=r"^scaling.workers"):
        resolve(TinyTrainer, [f"scaling.workers={written}", "config.global_batch_size=8", "config.max_steps=1"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"global_batch_size": None, "micro_batch_size": None},
            "config.global_batch_size is required with 2 to 8 workers",
        ),
        ({"global_batch_size": 4, "micro_batch_size": 4}, "is less than one sample per worker with 2 to 8 workers"),
        (
            {"parallel": ParallelConfig(strategy="hsdp", dp_shard=2)},
            "into which 2 to 8 workers cannot always be divided",
        ),
    ],
)
def test_what_would_be_another_training_on_another_number_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path, **config)
    assert experiment(tmp_path, workers=2, **{**config, "global_batch_size": 16})


def test_more_workers_than_logical_shards_are_refused_though_fewer_would_do(tmp_path: Path) -> None:
    """OnRay has 8 shards: 9 ranks cannot share them."""
    config = OnRayConfig(data=write_rows(tmp_path / "rows", 64), max_steps=1, global_batch_size=16)
    for workers in ((1, 8), (1, 9)):
        found = Experiment(
            name="run", trainer=OnRay, config=config, scaling=Scaling(workers=workers, cpus_per_worker=0.1),
            storage=str(tmp_path / "runs"),
        )  # fmt: skip
        if workers[1] == 8:
            assert plan(found).estimate.train.steps == 4
        else:
            with pytest.raises(ConfigError, match="9 ranks cannot share 8 logical shards"):
                plan(found)
    assert ParquetStream("x", shards=8).shards == 8


def test_the_fewest_must_have_a_place_the_most_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_resources(Scaling(workers=(1, 4096)))
    with pytest.raises(ConfigError, match="4000 workers with 1 CPU each need 4000 CPUs, and this machine has"):
        check_resources(Scaling(workers=(4000, 4096)))


# ---- Output ----------------------------------------------------------------------------------------------------------


def test_a_plan_and_a_record_have_both_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = str(plan(experiment(tmp_path, parallel=ParallelConfig(strategy="fsdp")))).splitlines()
    for line in (
        "  workers      2 to 8, each with 0.1 CPU",
        "  strategy     fsdp over 2 to 8 ranks",
        "  batch        64 samples per step: on each of 2 ranks 2 micro-batches of at most 16, "
        "on each of 8 ranks 1 micro-batch of at most 8",
    ):
        assert line in lines
    run = open_run(experiment(tmp_path)).run
    run.update(workers=3)
    record = Run(run.run_dir).record
    assert (record.workers, record.min_workers, record.max_workers) == (3, 2, 8)
    print_run("tiny", str(tmp_path))
    assert "with 3 workers, of 2 to 8 workers" in capsys.readouterr().out


def test_a_group_of_another_size_says_so_once() -> None:
    screen = io.StringIO()
    display = RunConsole(Console(file=screen, highlight=False, soft_wrap=True))
    for event in (
        {"event": "resized", "from": 2, "to": 3, "step": 40},
        {"event": "restored", "step": 40},
        {"event": "resized", "from": 3, "to": 1, "step": 50},
        {"event": "restored", "step": 50},
        {"event": "restored", "step": 60},
    ):
        display.event(event)
    assert screen.getvalue().splitlines() == [
        "3 workers now (2 before), resuming from step 40",
        "1 worker now (3 before), resuming from step 50",
        "resuming from step 60 (attempt 0)",
    ]


# ---- When a run scales up --------------------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def asked_at(growth: ScaleUpPolicy, clock: Clock, rooms: dict[float, int], *, until_s: float) -> float | None:
    """Return the time of the request to scale up, given when how many workers fit."""
    while clock.now_s < until_s:
        clock.now_s += 1
        if growth.is_due():
            now = rooms[max(time for time in rooms if time <= clock.now_s)]
            if growth.decide(now):
                return clock.now_s
    return None


@pytest.mark.parametrize(
    ("workers", "rooms", "expected"),
    [
        (2, {0: 2}, None),
        (2, {0: 4}, 60),
        (2, {0: 2, 50: 3}, 110),
        (2, {0: 2, 50: 3, 80: 2, 90: 3}, 150),  # it went away again
        (2, {0: 2, 50: 3, 80: 8}, 110),
        (2, {0: 1}, None),
        (8, {0: 9}, None),
    ],
)
def test_a_run_grows_when_there_has_been_room_for_a_while(
    workers: int, rooms: dict[float, int], expected: float | None
) -> None:
    clock = Clock()
    growth = ScaleUpPolicy(Scaling(workers=(2, 8)), clock=clock)
    assert not growth.is_due()
    growth.begin(workers)
    asked = asked_at(growth, clock, rooms, until_s=400)
    assert asked is None if expected is None else asked is not None and expected <= asked <= expected + 6
    growth.end()
    clock.now_s += 100
    assert not growth.is_due()


def test_a_group_that_has_not_grown_is_left_alone_for_twice_as_long() -> None:
    clock = Clock()
    growth = ScaleUpPolicy(Scaling(workers=(1, 8), grow_after="30s"), clock=clock)  # type: ignore[arg-type]
    took = []
    for came_back_as in (1, 1, 2, 3):
        growth.begin(came_back_as)
        began_s = clock.now_s
        asked = asked_at(growth, clock, {0: 8}, until_s=began_s + 500)
        assert asked is not None
        took.append(round((asked - began_s) / 30))
        growth.end()
    assert took == [1, 2, 1, 1]


def test_ray_train_needs_its_time_to_see_a_machine() -> None:
    clock = Clock()
    growth = ScaleUpPolicy(Scaling(workers=(1, 2), grow_after="1s"), clock=clock)  # type: ignore[arg-type]
    growth.begin(1)
    asked = asked_at(growth, clock, {0: 2}, until_s=100)
    assert asked is not None
    assert asked >= RAY_LEARNS_S


def test_workers_are_counted_machine_by_machine() -> None:
    scaling = Scaling(workers=(1, 8), cpus_per_worker=2, gpus_per_worker=1)
    assert slots_capped([{"CPU": 3, "GPU": 4}, {"CPU": 3}, {"CPU": 16, "GPU": 2}], scaling) == 1 + 0 + 2
    assert slots_capped([{"CPU": 64, "GPU": 64}], scaling) == 8
    assert slots_capped([{"CPU": 0.3}], Scaling(workers=(1, 8), cpus_per_worker=0.1)) == 3


@pytest.mark.parametrize(
    ("nodes", "free", "expected"),
    [
        ([4, 4], [2, 4], 8),
        ([4, 4], [2, 3], 2),  # Ray Train would wait for resources that others use
        ([4], [2], 4),
        ([2], [0], 2),
        ([1], [0], 1),  # a machine is gone, and its workers soon will be
    ],
)
def test_there_is_room_where_all_that_ray_train_would_take_is_free(
    nodes: list[int], free: list[int], expected: int
) -> None:
    found = target_workers(_with_cpus(nodes), _with_cpus(free), Scaling(workers=(1, 8)), workers=2)
    assert found == expected


@pytest.mark.parametrize(("free", "expected"), [([2, 2, 0], 6), ([1, 1, 2], 4)])
def test_there_is_no_room_in_pieces_too_small_for_a_worker(free: list[int], expected: int) -> None:
    scaling = Scaling(workers=(1, 8), cpus_per_worker=2)
    assert target_workers(_with_cpus([4, 4, 4]), _with_cpus(free), scaling, workers=4) == expected


def _with_cpus(nodes: list[int]) -> list[dict[str, float]]:
    return [{"CPU": cpus} for cpus in nodes]


# ---- How a run scales up ---------------------------------------------------------------------------------------------


def test_workers_heed_what_was_asked_of_their_attempt(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert read_scale_up_request(folder, attempt=2) == 0
    for attempt, workers in ((1, 0), (2, 3)):
        request_scale_up(folder, attempt=attempt, workers=3)
        assert read_scale_up_request(folder, attempt=2) == workers
    folder.write("grow.json", "{torn")
    assert read_scale_up_request(folder, attempt=2) == 0


def test_to_leave_for_more_workers_is_no_failure(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    events = EventWriter(folder, "rank-0")
    assert not has_left_to_resize(read_events(folder))
    for kind, details, expected in (
        ("attempt_started", {"attempt": 1}, False),
        ("attempt_ended", {"attempt": 1, "status": "resizing"}, True),
        ("checkpoint_saved", {}, True),
        ("attempt_started", {"attempt": 2}, False),
        ("attempt_ended", {"attempt": 2, "status": "completed"}, False),
    ):
        events.add(kind, **details)
        assert has_left_to_resize(read_events(folder)) == expected
