"""The end of a run names its first cause: dead processes, lost machines, hopeless code; on real Rays."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from headway.orchestrator import Experiment, Retries, Run, Scaling, fit
from headway.orchestrator.errors import TrainingFailedError
from headway.orchestrator.runs.requests import StopRequest, request_stop
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train import worker_group
from headway.orchestrator.train.failures.retry_policy import RetriesExhausted, RetryPolicy
from tests.tiny import TinyConfig, TinyTrainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True, kw_only=True)
class FaultyConfig(TinyConfig):
    fault: str = ""
    pause_s: float = 0.0


class Faulty(TinyTrainer):
    """Has a fault on its last rank: at step 5, or everywhere on the node named in `fault`."""

    config: FaultyConfig

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.config.pause_s)
        is_here = self.world.rank == self.world.size - 1 and self.global_step == 5
        match self.config.fault:
            case "segfault" if is_here:
                ctypes.string_at(0)
            case "raise" if is_here and self.training:
                raise ValueError("a bad batch")
            case node if node == ray.get_runtime_context().get_node_id() and self.global_step == 7 - self.attempt:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def experiment(
    storage: Path, fault: str, *, workers: int = 1, retries: Retries | None = None, **config: Any
) -> Experiment:
    return Experiment(
        name="faulty", trainer=Faulty, storage=str(storage), scaling=Scaling(workers=workers, wait="5m"),
        config=FaultyConfig(fault=fault, max_steps=40, log_every="1 steps", global_batch_size=4, **config),
        retries=retries or Retries(),
    )  # fmt: skip


def of_kind(experiment: Experiment, kind: str) -> list[Event]:
    return [event for event in read_events(Folder(experiment.run_dir)) if event["event"] == kind]


def test_a_process_that_dies_at_one_step_twice_is_not_tried_a_third_time(ray_session: None, tmp_path: Path) -> None:
    """The record, the error and the screen have the same sentence, with signal, step, phase and line."""
    faulty = experiment(tmp_path, "segfault", workers=2)
    with pytest.raises(TrainingFailedError) as failed:
        fit(faulty)
    failures = of_kind(faulty, "group_failed")
    assert [(each["rank"], each["step"], each["retrying"]) for each in failures] == [(1, 5, True), (1, 5, False)]
    sentence = failures[-1]["text"]
    assert "was killed by a segmentation fault (SIGSEGV) at step 5 (training step), at " in sentence
    assert "test_a_failure_is_explained.py" in sentence
    assert str(failed.value).startswith(sentence)
    assert "not retried: a process died at this step before" in str(failed.value)
    assert sentence in Run(faulty.run_dir).record.error
    assert any("to resume, start it again" in note for note in failed.value.__notes__)
    assert "Fatal Python error: Segmentation fault" in Path(failures[-1]["last_words"]).read_text()


@pytest.mark.extended
def test_hopeless_code_is_not_restarted_for_ever_if_ray_suppresses_the_policy(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Suppressed(RetryPolicy):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            try:
                super().after_exception(run_context, worker_exceptions)
            except RetriesExhausted:
                return

    monkeypatch.setattr(worker_group, "RetryPolicy", Suppressed)
    monkeypatch.setattr(worker_group, "_MOST_RAY_RETRIES", 2)
    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["_"]))
    faulty = experiment(tmp_path, "raise", retries=Retries(max_errors=0))
    with pytest.raises(TrainingFailedError, match="raised ValueError at step 5"):
        fit(faulty)
    assert len(of_kind(faulty, "attempt_started")) == 3


def test_a_wait_before_a_restart_ends_with_a_stop_request(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    threading.Timer(0.5, lambda: request_stop(folder, StopRequest(reason="Ctrl-C", status="interrupted"))).start()
    stop = worker_group.wait_to_restart(folder, 300.0)
    assert stop is not None
    assert stop.status == "interrupted"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
