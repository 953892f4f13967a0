"""After one of two Ray workers is killed mid-epoch, the result equals that of an undisturbed run.

The same config in one process, without Ray, has the same losses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.orchestrator import Experiment, Retries, RunResult, Scaling, fit
from headway.orchestrator.runs.goodput import goodput_report
from headway.orchestrator.runs.requests import StopRequest, request_stop
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, Duration
from headway.trainer.trackers.jsonl import read_records
from tests.on_ray import OnRay, OnRayConfig, rows_seen, write_rows
from tests.tiny import weights

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROWS, BATCH, EPOCHS = 200, 16, 4
STEPS = EPOCHS * 13


def experiment(name: str, storage: Path, data: str, **config: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": data,
        "max_epochs": EPOCHS,
        "global_batch_size": BATCH,
        "log_every": Duration(1, "steps"),
        "evaluate_every": Duration(10, "steps"),
        "checkpoint": CheckpointConfig(every=Duration(5, "steps")),
        "dropout": 0.2,
        **config,
    }
    return Experiment(
        name=name,
        trainer=OnRay,
        config=OnRayConfig(**settings),
        scaling=Scaling(workers=2),
        storage=str(storage),
    )


def kill_worker_at(step: int, run_dir: str, killed: list[Event]) -> None:
    """Send SIGKILL to the worker of rank 1 once the run has logged a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(record["step"] >= step for record in read_records(f"{run_dir}/metrics.jsonl")):
            started = next(each for each in read_events(Folder(run_dir)) if each["event"] == "attempt_started")
            os.kill(started["workers"][1]["pid"], signal.SIGKILL)
            killed.append(started)
            return
        time.sleep(0.02)


def trained(experiment: Experiment) -> dict[str, torch.Tensor]:
    """Return the final weights of a run, loaded from its last checkpoint."""
    trainer = OnRay(experiment.config, run_dir=experiment.run_dir, trackers=())  # type: ignore[arg-type]
    assert trainer.fit().status == "completed"
    return weights(trainer)


def metrics(run_dir: str) -> dict[int, dict[str, float]]:
    """Return the logged metrics without speeds, which differ."""
    kept = ("train/loss", "validation/loss", "grad_norm", "lr", "epoch")
    return {
        record["step"]: {name: record[name] for name in kept if name in record}
        for record in read_records(f"{run_dir}/metrics.jsonl")
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "train", ROWS)


@pytest.fixture(scope="module")
def reference(ray_session: None, tmp_path_factory: pytest.TempPathFactory, data: str) -> tuple[Experiment, RunResult]:
    found = experiment("reference", tmp_path_factory.mktemp("runs"), data)
    return found, fit(found)


def test_the_run_that_lost_a_worker_is_the_run_that_did_not(
    reference: tuple[Experiment, RunResult], tmp_path: Path, data: str
) -> None:
    """Weights, metrics and the order of samples are bit-equal."""
    never_killed, undisturbed = reference
    killed_one = experiment("killed", tmp_path, data, pause_s=0.02)
    killed: list[Event] = []
    killer = threading.Thread(target=kill_worker_at, args=(18, killed_one.run_dir, killed))
    killer.start()
    result = fit(killed_one)
    killer.join()

    assert killed
    assert (result.status, result.steps, result.epochs) == ("completed", STEPS, EPOCHS)
    assert (undisturbed.status, undisturbed.steps, undisturbed.attempts) == ("completed", STEPS, 1)
    assert result.attempts == 2
    events = read_events(Folder(killed_one.run_dir))
    lost = next(each for each in events if each["event"] == "group_failed")
    assert (lost["rank"], lost["attempt"]) == (1, 1)
    assert "was killed without a trace (SIGKILL" in lost["text"]
    restored = next(each for each in events if each["event"] == "restored")
    # The save of step 15 may not have finished when the worker died.
    assert 10 <= restored["step"] < STEPS
    assert restored["step"] % 5 == 0

    account = goodput_report(events)
    assert (account.starts, account.attempts) == (1, 2)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=0.005)
    # The main rank reports that it lost its peer, unless Ray ended it first.
    reached = max((each["step"] for each in events if each["event"] == "rank_failed"), default=restored["step"])
    assert account.steps_again >= reached - restored["step"]
    assert (account.seconds["lost work done again"] > 0) is (account.steps_again > 0)
    for name in ("starting", "compute", "restart", "checkpoint stall", "evaluation"):
        assert account.seconds[name] > 0, name
    began = next(each for each in events if each["event"] == "driver_started")["since"]
    assert account.wall_s == pytest.approx(events[-1]["time"] - began)
    assert events[-1]["event"] == "driver_ended"

    expected, found = trained(never_killed), trained(killed_one)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert metrics(killed_one.run_dir) == metrics(never_killed.run_dir)
    for rank in range(2):
        assert rows_seen(killed_one.run_dir, rank) == rows_seen(never_killed.run_dir, rank)


def test_every_row_was_seen_once_in_every_epoch(reference: tuple[Experiment, RunResult]) -> None:
    found, _ = reference
    ranks = [rows_seen(found.run_dir, rank) for rank in range(2)]
    for epoch in range(EPOCHS):
        steps = range(epoch * 13, (epoch + 1) * 13)
        assert sorted(row for seen in ranks for step in steps for row in seen.get(step, [])) == list(range(ROWS))


@pytest.mark.extended
def test_one_process_and_two_ray_workers_have_the_same_losses(ray_session: None, tmp_path: Path, data: str) -> None:
    """The losses equal those without Ray."""
    on_ray = experiment("on-ray", tmp_path, data, dropout=0.0, max_epochs=None, max_steps=20)
    assert fit(on_ray).status == "completed"
    alone = OnRay(on_ray.config, run_dir=tmp_path / "alone")  # type: ignore[arg-type]
    assert alone.fit().status == "completed"
    one, two = metrics(str(tmp_path / "alone")), metrics(on_ray.run_dir)
    assert one.keys() == two.keys()
    for step, record in one.items():
        assert record == pytest.approx(two[step], rel=1e-4, abs=1e-6), step


@pytest.mark.extended
def test_spare_processes_take_the_place_of_the_workers(ray_session: None, tmp_path: Path, data: str) -> None:
    """Spares existed before the kill, idle, with torch imported; reading data does not use them up."""
    spared = experiment("spared", tmp_path, data, max_epochs=None, max_steps=10_000, pause_s=0.05)
    spared = replace(spared, retries=Retries(spares=True))
    spares: set[int] = set()
    # Idle processes of earlier tests in this Ray also have torch, but another environment.
    before = {int(each) for each in os.listdir("/proc") if each.isdigit()}

    def kill_when_there_are_spares() -> None:
        folder = Folder(spared.run_dir)
        (started,) = _attempts(folder, 1)
        pids = {worker["pid"] for worker in started["workers"]}
        while len(spares) < 2:
            time.sleep(0.1)
            spares.update(_warm(min(pids)) - before)
        os.kill(min(pids), signal.SIGKILL)
        _attempts(folder, 2)
        request_stop(folder, StopRequest(reason="seen"))

    killer = threading.Thread(target=kill_when_there_are_spares, daemon=True)
    killer.start()
    result = fit(spared)
    killer.join(timeout=60)
    assert (result.status, result.attempts) == ("stopped", 2)
    _, again = _attempts(Folder(spared.run_dir), 2)
    assert {worker["pid"] for worker in again["workers"]} <= spares


def _attempts(folder: Folder, count: int) -> list[Event]:
    """Wait for this many "attempt_started" events, and return them."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        found = [event for event in read_events(folder) if event["event"] == "attempt_started"]
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"no attempt {count}")


def _warm(pid: int) -> set[int]:
    """Return the idle processes with torch among the siblings of a worker."""

    def parent(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]

    found = set()
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        # It may have ended meanwhile.
        with contextlib.suppress(OSError):
            is_idle = Path(f"/proc/{each}/cmdline").read_bytes().startswith(b"ray::IDLE")
            if is_idle and parent(each) == parent(pid) and b"libtorch_cpu" in Path(f"/proc/{each}/maps").read_bytes():
                found.add(each)
    return found
