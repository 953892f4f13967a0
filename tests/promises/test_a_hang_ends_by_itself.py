"""One of two Ray workers hangs: it is reported, all stacks are written, and the run restarts and continues."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.orchestrator import Experiment, Retries, Scaling, TrainingFailedError, fit
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, Duration
from headway.trainer.trackers.jsonl import read_records
from tests.on_ray import OnRay, OnRayConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 40


@dataclass(frozen=True, kw_only=True)
class WaitsConfig(OnRayConfig):
    slow_s: float = 0.0
    hang_at: int | None = None


class Waits(OnRay):
    """A trainer that is slow where that is legitimate, and can hang while reading data."""

    def configure_dataloaders(self) -> Any:
        return self._batches, self._batches

    def _batches(self) -> Any:
        config: Any = self.config
        for number in range(STEPS):
            if number == 0 and (self.attempt == 1 or (not self.training and self.global_step == 20)):
                time.sleep(config.slow_s)  # the first batch of training and of an evaluation, once each
            if self.training and number == config.hang_at and self.world.rank == 1:
                time.sleep(3600)
            yield {"id": torch.arange(8), "x": torch.ones(8, 6), "y": torch.zeros(8, dtype=torch.int64)}

    def on_checkpoint_saved(self, checkpoint: Any) -> None:
        if self.attempt == 1 and self.global_step == 5:
            time.sleep(self.config.slow_s)  # type: ignore[attr-defined]


def experiment(storage: Path, *, hang_timeout: str, max_failures: int, **config: Any) -> Experiment:
    return Experiment(
        name="waits",
        trainer=Waits,
        config=WaitsConfig(
            data="",
            max_steps=STEPS,
            log_every=Duration(1, "steps"),
            evaluate_every=Duration(20, "steps"),
            evaluate_batches=2,
            checkpoint=CheckpointConfig(every=Duration(5, "steps")),
            **config,
        ),
        scaling=Scaling(workers=2),
        retries=Retries(max_failures=max_failures, hang_timeout=hang_timeout),  # type: ignore[arg-type]
        storage=str(storage),
    )


def stop_worker_at(step: int, run_dir: str, stopped: list[Event]) -> None:
    """Send SIGSTOP to the worker of rank 1 once the run has logged a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(record["step"] >= step for record in read_records(f"{run_dir}/metrics.jsonl")):
            started = next(each for each in read_events(Folder(run_dir)) if each["event"] == "attempt_started")
            os.kill(started["workers"][1]["pid"], signal.SIGSTOP)
            stopped.append({"time": time.time(), "pid": started["workers"][1]["pid"]})
            return
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_stopped_worker_is_named_and_replaced_and_nothing_else_is_suspected(
    ray_session: None, tmp_path: Path
) -> None:
    waits = experiment(tmp_path, hang_timeout="12s", max_failures=1, slow_s=5.5, pause_s=0.05)
    stopped: list[Event] = []
    stopper = threading.Thread(target=stop_worker_at, args=(12, waits.run_dir, stopped))
    stopper.start()
    result = fit(waits)
    stopper.join()

    assert stopped
    assert (result.status, result.steps, result.attempts) == ("completed", STEPS, 2)
    events = read_events(Folder(waits.run_dir))
    late = [each for each in events if each["event"] == "rank_late"]
    assert [each["ranks"] for each in late] == [[1]]
    # The target is 5 s; a test shares its cores with others.
    assert late[0]["time"] - stopped[0]["time"] < 60
    assert next(each for each in events if each["event"] == "group_failed")["text"].startswith(
        "rank 1 has sent no heartbeat"
    )
    assert next(each for each in events if each["event"] == "restored")["step"] >= 10
    assert "loop.py" in Path(waits.run_dir, "watch", "stacks-1-rank-0.txt").read_text()
    assert not is_there(stopped[0]["pid"])


@pytest.mark.extended
@pytest.mark.parametrize("is_disk", [True, False])
def test_a_rank_whose_data_never_comes_is_named_with_its_phase(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disk: bool
) -> None:
    """Heartbeats and orders are files on a local disk; for another folder they go through Ray."""
    monkeypatch.setattr(Folder, "is_disk", is_disk)
    waits = experiment(tmp_path, hang_timeout="10s", max_failures=0, hang_at=7)
    with pytest.raises(TrainingFailedError, match=r"rank 1 has not moved for \d+ s, in phase 'reading data' at step 7"):
        fit(waits)
    assert "_batches" in Path(waits.run_dir, "watch", "stacks-1-rank-1.txt").read_text()
    assert "rank 0, process" in Path(waits.run_dir, "watch", "stacks-1-rank-0.txt").read_text()
    assert Path(waits.run_dir, "watch", "rank-0.json").exists(), "the record of its time"
    assert Path(waits.run_dir, "watch", "rank-1.json").exists() is is_disk
