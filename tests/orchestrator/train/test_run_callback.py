"""Events from outside during training: graceful and immediate stops, another driver, and preemption notices."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch

from headway.orchestrator.errors import StorageError
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.pointer import Pointer
from headway.orchestrator.runs.requests import StopRequest, request_stop
from headway.orchestrator.runs.run import Run
from headway.orchestrator.storage.events import Event, EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train import ray_train_thread, run_callback
from headway.orchestrator.train.failures.budget import Failure
from headway.orchestrator.train.failures.retry_policy import was_preempted
from headway.orchestrator.train.preemption import count_endings, has_time_to_save
from headway.orchestrator.train.run_callback import RunCallback
from headway.trainer import CheckpointConfig, Duration, World
from headway.trainer.ownership.claim import claimed_by_driver
from tests.orchestrator.runs.test_run import experiment
from tests.tiny import TinyConfig, TinyTrainer


def bridge(folder: Folder, *, noticed: bool = False) -> RunCallback:
    lease = Run(folder.place).lease
    return RunCallback(folder, EventWriter(folder, "rank-0"), is_main=True, lease=lease, polls_preemption=noticed)


def train(run_dir: str) -> None:
    """Train until a stop is requested, in a separate process."""
    config = TinyConfig(max_steps=10**9, checkpoint=CheckpointConfig(every=None))
    callbacks = [bridge(Folder(run_dir)), lambda *_: time.sleep(0.01)]
    world = World.single("cpu")
    with claimed_by_driver(run_dir):
        print(TinyTrainer(config, run_dir=run_dir, world=world, callbacks=callbacks, show_progress=False).fit().status)


@contextmanager
def training(run: Run) -> Iterator[subprocess.Popen[str]]:
    root = str(Path(__file__).parents[3])
    program = subprocess.Popen(
        [sys.executable, "-c", f"from tests.orchestrator.train.test_run_callback import train; train({run.run_dir!r})"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
    )
    try:
        deadline = time.monotonic() + 120
        while not any(event["event"] == "training" for event in read_events(run.folder)):
            assert program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield program
    finally:
        program.kill()
        program.communicate()


def checkpoints(run: Run) -> list[str]:
    return [each.name for each in Path(run.run_dir, "checkpoints").glob("step-*")]


def test_the_events_say_how_long_getting_ready_took(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    config = TinyConfig(max_steps=4, log_every=1, evaluate_at_start=True)  # type: ignore[arg-type]
    TinyTrainer(config, world=World.single("cpu"), callbacks=[bridge(run.folder)]).fit()
    (told,) = (event for event in read_events(run.folder) if event["event"] == "set_up")
    assert told["step"] == 0
    assert {"configure", "restore", "first_batch", "first_update"} <= set(told["seconds"])


class Cramped(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


def test_the_events_say_that_a_micro_batch_was_halved(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    config = TinyConfig(max_steps=2, halve_on_out_of_memory=True)
    Cramped(config, world=World.single("cpu"), callbacks=[bridge(run.folder)]).fit()
    (told,) = (event for event in read_events(run.folder) if event["event"] == "out_of_memory")
    assert told["step"] == 0
    assert "up to 8 samples in a forward pass: repeating the update with up to 4" in told["reason"]


class Reported:
    """In place of the thread that calls Ray Train: keeps the last report of each checkpoint.

    The last update may be saved twice, before its evaluation and after it.
    """

    def __init__(self, kept: dict[str, tuple[dict[str, Any], Pointer]], **_: Any) -> None:
        self._kept = kept

    def report(self, metrics: dict[str, Any], pointer: Pointer | None = None) -> None:
        if pointer is not None:
            self._kept[pointer.checkpoint] = (dict(metrics), pointer)

    def end(self, *, wait: bool) -> None:
        pass


def test_checkpoints_that_ray_train_does_not_have_are_reported_when_a_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(experiment(tmp_path)).run
    reports: dict[str, tuple[dict[str, Any], Pointer]] = {}
    monkeypatch.setattr(run_callback, "RayTrainThread", functools.partial(Reported, reports))

    def reported(max_steps: int, last: Pointer | None) -> list[tuple[dict[str, Any], Pointer]]:
        reports.clear()
        monkeypatch.setattr(run_callback, "last_pointer", lambda _: last)
        callback = RunCallback(
            run.folder, EventWriter(run.folder, "rank-0"), is_main=True, lease=run.lease, polls_preemption=False,
            reports=True,
        )  # fmt: skip
        config = TinyConfig(
            max_steps=max_steps, log_every=Duration(1, "steps"), evaluate_every=Duration(2, "steps"),
            checkpoint=CheckpointConfig(every=Duration(2, "steps"), keep_last="all"),
        )  # fmt: skip
        with claimed_by_driver(run.run_dir):
            TinyTrainer(config, run_dir=run.run_dir, world=World.single("cpu"), callbacks=[callback]).fit()
        return list(reports.values())

    EventWriter(run.folder, "driver").add("driver_started", call="first")
    first = reported(6, None)
    assert [metrics["step"] for metrics, _ in first] == [2, 4, 6]
    # The workers died before Ray Train had the last two.
    again = reported(8, first[0][1])
    assert [pointer for _, pointer in again[:2]] == [pointer for _, pointer in first[1:]]
    assert again[0] == first[1]
    assert [metrics["step"] for metrics, _ in again] == [4, 6, 8]
    assert [metrics["validation/loss"] for metrics, _ in again[:2]] == [m["validation/loss"] for m, _ in first[1:]]
    assert [metrics["step"] for metrics, _ in reported(10, again[-1][1])] == [10]
    # Before Ray Train had any.
    assert [metrics["step"] for metrics, _ in reported(12, None)] == [2, 4, 6, 8, 10, 12]
    # Another TorchTrainer gets the checkpoint from which it resumes, not those of earlier ones.
    EventWriter(run.folder, "driver").add("driver_started", call="second")
    assert [metrics["step"] for metrics, _ in reported(14, None)] == [12, 14]


@pytest.mark.extended
def test_a_stop_is_obeyed_with_a_checkpoint_and_at_once_without(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    with training(run) as program:
        request_stop(run.folder, StopRequest(reason="enough"))
        assert program.communicate(timeout=60)[0] == "stopped\n"
    assert len(checkpoints(run)) == 1

    other = open_run(experiment(tmp_path / "other")).run
    with training(other) as program:
        request_stop(other.folder, StopRequest(reason="enough", abort=True))
        assert program.wait(60) == 1
    assert checkpoints(other) == []


def test_requests_through_ray_need_no_file(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    stop = asdict(StopRequest(reason="enough", status="time_limit"))
    callback = RunCallback(
        run.folder, EventWriter(run.folder, "rank-0"), is_main=True, lease=run.lease, polls_preemption=False,
        requests=lambda: {"stop": stop},
    )  # fmt: skip
    config = TinyConfig(max_steps=10**9, checkpoint=CheckpointConfig(every=None))
    with claimed_by_driver(run.run_dir):
        result = TinyTrainer(config, run_dir=run.run_dir, world=World.single("cpu"), callbacks=[callback]).fit()
    assert (result.status, result.reason) == ("time_limit", "enough")
    assert len(checkpoints(run)) == 1


def test_requests_through_ray_to_scale_up_are_for_one_attempt(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    callback = RunCallback(
        run.folder, EventWriter(run.folder, "rank-0"), is_main=True, lease=run.lease, polls_preemption=False,
        scalable_attempt=2,
    )  # fmt: skip
    asked = [callback._workers_to_scale_to({"scale_up": {"attempt": attempt, "workers": 4}}) for attempt in (1, 2)]
    assert asked == [0, 4]


@pytest.mark.extended
def test_who_has_lost_the_run_to_another_driver_ends_at_once(tmp_path: Path) -> None:
    """Two attempts must not write to one run, even if the first was not ended otherwise."""
    run = open_run(experiment(tmp_path)).run
    with training(run) as program:
        run.update(steps=1)
        time.sleep(1)
        assert program.poll() is None, "its own driver goes on writing the record"
        record = json.loads(run.folder.read("run.json") or "")
        record["claim"] = "99-theirs"
        run.folder.write("run.json", json.dumps(record))
        assert program.wait(60) == 1
    assert checkpoints(run) == []


class Noticed(TinyTrainer):
    """Trains slowly enough to receive a notice, and does not pass the steps by which one must have been handled."""

    save_took: float | None = None
    polls: list[int]

    def on_fit_start(self) -> None:
        self._engine.loop.saver.took_s = self.save_took

    def on_step_end(self) -> None:
        time.sleep(0.01)
        for first, last in ((10, 40), (41, 90)):
            # A notice has been handled when the listener polls again.
            deadline = time.monotonic() + 120
            while self.global_step == last and sum(first <= step <= last for step in self.polls) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, left_s: float, save_took_s: float | None, then_s: float | None = None
) -> list[Event]:
    """Return the events of a short run with a notice for one node and later for a second, with deadlines."""
    deadline_ms: list[int] = []

    def get_preemption_info() -> Any:
        step = trainer.global_step
        trainer.polls.append(step)
        if step < 10:
            return None
        deadline_ms.append(int((time.time() + left_s) * 1000))
        if step <= 40:
            return ray.train.PreemptionInfo(deadline_ms[0], {"a": [1]})
        other_ms = deadline_ms[0] if then_s is None else int((time.time() + then_s) * 1000)
        return ray.train.PreemptionInfo(other_ms, {"a": [1], "b": [0]})

    monkeypatch.setattr(ray.train, "get_preemption_info", get_preemption_info)
    monkeypatch.setattr(ray_train_thread, "POLL_S", 0.01)
    config = TinyConfig(max_steps=100, checkpoint=CheckpointConfig(every=None, at_end=False))
    said: list[str] = []
    trainer = Noticed(
        config, run_dir=run.run_dir, world=World.single("cpu"), callbacks=[bridge(run.folder, noticed=True)],
        printer=said.append,
    )  # fmt: skip
    trainer.save_took, trainer.polls = save_took_s, []
    assert trainer.fit().status == "completed", "a notice ends nothing"
    return [*read_events(run.folder), {"event": "said", "lines": said}]


def test_a_notice_is_heeded_by_one_checkpoint_for_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(experiment(tmp_path)).run
    events = noticed(run, monkeypatch, left_s=60.0, save_took_s=1.0)
    notices = [event for event in events if event["event"] == "preemption_notice"]
    assert [(event["nodes"], event["ranks"], event["saves"]) for event in notices] == [
        (["a"], [1], True),
        (["a", "b"], [0, 1], True),
    ]
    assert 50 < notices[0]["deadline_s"] <= 60
    saved = [event["step"] for event in events if event["event"] == "checkpoint_saved"]
    assert len(saved) == 2
    assert 10 <= saved[0] <= 40 < saved[1]
    assert "rank 1 will be preempted in" in events[-1]["lines"][0]


def test_a_checkpoint_that_would_come_too_late_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(experiment(tmp_path)).run
    events = noticed(run, monkeypatch, left_s=10.0, save_took_s=20.0)
    assert [event["saves"] for event in events if event["event"] == "preemption_notice"] == [False, False]
    assert checkpoints(run) == []
    assert "no time for a checkpoint (one takes about 20 s): none is started" in events[-1]["lines"][0]


def test_after_a_notice_that_came_too_late_the_next_one_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(experiment(tmp_path)).run
    events = noticed(run, monkeypatch, left_s=-1.0, save_took_s=None, then_s=60.0)
    assert [event["saves"] for event in events if event["event"] == "preemption_notice"] == [False, True]
    assert len(checkpoints(run)) == 1
    first, second = events[-1]["lines"]
    assert "will be preempted now, which leaves no time for a checkpoint (its duration is not" in first
    assert "saving a checkpoint and continuing" in second


def test_a_notice_is_heeded_although_nobody_can_be_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the storage is unavailable for a moment, the save is requested and the listener keeps running."""
    run = open_run(experiment(tmp_path)).run
    add = EventWriter.add

    def away(self: EventWriter, kind: str, **details: Any) -> None:
        if kind == "preemption_notice":
            raise StorageError("the store is away")
        add(self, kind, **details)

    monkeypatch.setattr(EventWriter, "add", away)
    with pytest.warns(
        UserWarning, match="a preemption notice could not be handled: StorageError: the store is away"
    ) as warned:
        noticed(run, monkeypatch, left_s=60.0, save_took_s=1.0)
    assert len(warned) == 2
    assert len(checkpoints(run)) == 2


@pytest.mark.parametrize(
    ("left_s", "save_s", "leaves"),
    [(None, 100.0, True), (30.0, None, True), (30.0, 10.0, True), (30.0, 25.0, False), (-1.0, None, False)],
)
def test_there_is_the_time_for_a_checkpoint_or_not(left_s: float | None, save_s: float | None, leaves: bool) -> None:
    assert has_time_to_save(left_s, save_s) is leaves


def started(attempt: int) -> Event:
    return {"event": "attempt_started", "attempt": attempt}


def failed(attempt: int, *, preempted: bool) -> Event:
    return {"event": "group_failed", "attempt": attempt, "preempted": preempted}


def notice(attempt: int) -> Event:
    return {"event": "preemption_notice", "attempt": attempt}


@pytest.mark.parametrize(
    ("events", "counted"),
    [
        pytest.param([started(1)], (0, 0), id="undisturbed"),
        pytest.param([started(1), notice(1)], (0, 0), id="not gone yet"),
        pytest.param([started(1), notice(1), notice(1), started(2)], (1, 0), id="ended at the deadline"),
        pytest.param([started(1), notice(1), failed(1, preempted=True), started(2)], (1, 0), id="missed"),
        pytest.param([started(1), failed(1, preempted=True), started(2)], (1, 0), id="without notice"),
        pytest.param([started(1), notice(1), failed(1, preempted=False), started(2)], (0, 1), id="failed after it"),
        pytest.param([started(1), failed(1, preempted=False), started(2), notice(2), started(3)], (1, 1), id="both"),
    ],
)
def test_preemptions_and_failures_are_counted_apart(events: list[Event], counted: tuple[int, int]) -> None:
    assert count_endings(events) == counted


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(attempt=1, rank=1), True),
        (Failure(attempt=1, rank=0, kind="RuntimeError", secondary=True), True),
        (Failure(attempt=1, rank=0, kind="ValueError"), False),
        (Failure(attempt=1, rank=0, hung="rank 0 has not moved"), False),
        (Failure(attempt=2, rank=0), False),
    ],
)
def test_after_a_notice_a_lost_rank_is_no_failure(failure: Failure, expected: bool) -> None:
    assert was_preempted(failure, [started(1), notice(1)], {}) is expected
