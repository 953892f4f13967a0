"""`train_loop` inside a `TorchTrainer` of the user's: reports, restarts by Ray Train, and the run's files."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig, UserCallback, WorkerGroupError
from ray.train.torch import TorchTrainer

from headway.orchestrator import Experiment, Run, RunConflictError, checkpoint_path, train_loop
from headway.orchestrator.config.values import check_paths, with_values
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.pointer import Pointer, write_pointer
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.storage.events import EventWriter
from headway.orchestrator.train.train_loop import Start, train_rank
from headway.trainer import CheckpointConfig, ConfigError, Duration, World, load_weights
from tests.on_ray import OnRay, OnRayConfig, rows_seen, write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "train", 64)


class KilledOnce(OnRay):
    """Rank 1 dies in the first attempt."""

    def on_step_end(self) -> None:
        if self.attempt == 1 and self.global_step == 5 and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledBeforeReports(OnRay):
    """Rank 1 dies when the checkpoint of step 4 is complete, and rank 0 at the last one, each before it is reported."""

    def on_checkpoint_saved(self, checkpoint: Any) -> None:
        # Called before Headway's own callback, which reports.
        if (self.attempt, self.world.rank, checkpoint.step) in {(1, 1, 4), (2, 0, 6)}:
            heard = Path(str(self.run_dir)).parents[1] / "heard.jsonl"
            until = time.monotonic() + 30 * (self.attempt == 2)
            while time.monotonic() < until and '["report", [4, 4], true]' not in heard.read_text():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)


class Heard(UserCallback):
    """A callback of the user's, which Ray Train's controller calls. Writes down what it gets."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        self._write(["report", [each["step"] for each in metrics], checkpoint is not None])

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._write(["exception", sorted(worker_exceptions)])

    def _write(self, heard: list[Any]) -> None:
        with self._file.open("a") as file:
            print(json.dumps(heard), file=file)


def experiment(storage: Path, data: str, trainer: type[OnRay] = OnRay, **config: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": data, "max_steps": 8, "global_batch_size": 16, "engine": "threads", "log_every": Duration(1, "steps"),
        "evaluate_every": Duration(4, "steps"), "checkpoint": CheckpointConfig(every=Duration(2, "steps")), **config,
    }  # fmt: skip
    return Experiment(name="run", trainer=trainer, config=OnRayConfig(**settings), storage=str(storage / "runs"))


# Ray reads its own snapshot with a deprecated method of pydantic.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.ray
def test_ray_train_restarts_a_run_exactly_and_its_result_points_to_the_checkpoints(
    tmp_path: Path, data: str, ray_session: None
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class ByValue(OnRayConfig):
        """Pickled by value, as a class of a script is."""

        learning_rates: list[float] = field(default_factory=list)

    given = experiment(tmp_path, data, KilledOnce)
    ours = replace(given, config=ByValue(**vars(given.config)))
    result = TorchTrainer(
        train_loop(ours),
        train_loop_config={"config.max_steps": 6},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="theirs",
            storage_path=str(tmp_path / "ray"),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[Heard(tmp_path / "heard.jsonl")],
        ),  # fmt: skip
    ).fit()

    alone = experiment(tmp_path / "alone", data, max_steps=6)
    expected = OnRay(alone.config, run_dir=alone.run_dir, world=World.single("cpu"), show_progress=False).fit()
    run = Run(ours.run_dir)
    assert (run.status, run.record.attempts, run.record.steps) == ("completed", 2, 6)
    assert run.record.trainer == "tests.orchestrator.train.test_train_loop:KilledOnce"
    assert result.return_value["metrics"] == run.record.metrics
    both = [rows_seen(ours.run_dir, rank) for rank in (0, 1)]
    assert {step: sorted(both[0][step] + both[1][step]) for step in both[0]} == {
        step: sorted(rows) for step, rows in rows_seen(alone.run_dir, 0).items()
    }
    assert expected.last_checkpoint is not None
    weights = load_weights(expected.last_checkpoint)
    for found in (result, Result.from_path(str(tmp_path / "ray" / "theirs"))):
        assert found.metrics["step"] == 6
        assert found.metrics["validation/loss"] == run.record.metrics["validation/loss"]
        torch.testing.assert_close(load_weights(checkpoint_path(found.checkpoint)), weights, atol=1e-5, rtol=0)
    assert [metrics["step"] for _, metrics in result.best_checkpoints][-1] == 6
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    # Rank 1 was killed, and rank 0 may have noticed.
    assert [1 in ranks for kind, ranks, *_ in heard if kind == "exception"] == [True]
    assert heard[-1] == ["report", [6, 6], True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.ray
@pytest.mark.extended
def test_checkpoints_that_a_killed_worker_had_not_reported_are_reported_once_after_the_restart(
    tmp_path: Path, data: str, ray_session: None
) -> None:
    ours = experiment(tmp_path, data, KilledBeforeReports, max_steps=6, evaluate_every=Duration(2, "steps"))
    result = TorchTrainer(
        train_loop(ours),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="theirs",
            storage_path=str(tmp_path / "ray"),
            failure_config=FailureConfig(max_failures=2),
            callbacks=[Heard(tmp_path / "heard.jsonl")],
        ),  # fmt: skip
    ).fit()

    run = Run(ours.run_dir)
    assert (run.status, run.record.steps) == ("completed", 6)
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    assert [kind for kind, *_ in heard].count("exception") == 2
    saved = [steps for kind, steps, *rest in heard if kind == "report" and rest == [True]]
    assert saved == [[2, 2], [4, 4], [6, 6]]
    assert run.record.last_checkpoint is not None
    assert Path(run.record.last_checkpoint).name == "step-00000006"
    assert checkpoint_path(result.checkpoint) == run.record.last_checkpoint
    assert result.metrics == {**run.record.metrics, "step": 6}
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2, 4, 6]


def test_a_pointer_to_a_deleted_checkpoint_names_the_setting(tmp_path: Path) -> None:
    write_pointer(Pointer(run_dir=str(tmp_path), checkpoint=str(tmp_path / "checkpoints/step-00000002")), str(tmp_path))
    with pytest.raises(
        ConfigError, match="points to a checkpoint that is gone or damaged .* `config.checkpoint` decides"
    ):
        checkpoint_path(Checkpoint.from_directory(str(tmp_path)))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="is not a checkpoint of a Headway run"):
        checkpoint_path(Checkpoint.from_directory(str(other)))


class Reports(OnRay):
    """Reports to Ray itself, as code for Ray Train does."""

    def on_epoch_end(self, metrics: Any) -> None:
        if self.world.is_main:
            ray.train.report({"mine": 1.0})


@pytest.mark.ray
def test_a_report_in_the_code_of_a_trainer_is_refused_with_what_to_call(
    tmp_path: Path, data: str, ray_session: None
) -> None:
    ours = experiment(tmp_path, data, Reports, max_steps=None, max_epochs=2)
    with pytest.raises(WorkerGroupError) as raised:
        TorchTrainer(
            train_loop(ours), scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="theirs", storage_path=str(tmp_path / "ray")),
        ).fit()  # fmt: skip
    assert "ray.train.report() was called in the trainer's code: remove it, and return numbers" in str(raised.value)
    error = Run(ours.run_dir).record.error
    assert error is not None
    assert "call self.log(name, number)" in error


def start_of(ours: Experiment) -> Start:
    return Start.of(ours, ResumeOptions())


def train_here(start: Start, ours: Experiment) -> dict[str, Any]:
    """Train as a single worker does, without Ray."""
    return train_rank(start, ours, on_cpu=True, reports=False)


def test_a_finished_run_returns_its_result_again(tmp_path: Path, data: str) -> None:
    ours = experiment(tmp_path, data, max_steps=2)
    first, again = (train_here(start_of(ours), ours) for _ in range(2))
    assert first == again
    assert (first["status"], first["steps"]) == ("completed", 2)


def test_a_run_that_another_process_trains_is_refused_unless_its_workers_were_replaced(
    tmp_path: Path, data: str
) -> None:
    ours = experiment(tmp_path, data, max_steps=2)
    opened = open_run(ours)
    theirs = json.loads(Path(ours.run_dir, "owner/000001.json").read_text())
    # A process that is alive.
    theirs["process"] |= {"pid": os.getppid(), "started": ""}
    Path(ours.run_dir, "owner/000001.json").write_text(json.dumps(theirs))
    start = start_of(ours)
    with pytest.raises(RunConflictError, match="is being trained by"):
        train_here(start, ours)
    EventWriter(opened.run.folder, "driver").add("driver_started", call=start.id)
    assert train_here(start, ours)["status"] == "completed"


def test_an_error_is_recorded_and_raised_as_it_is(tmp_path: Path, data: str) -> None:
    ours = experiment(tmp_path, data, fail_at=1)
    with pytest.raises(ValueError, match="a bad batch at step 1"):
        train_here(start_of(ours), ours)
    assert (Run(ours.run_dir).status, Run(ours.run_dir).record.error) == (
        "failed", "ValueError: a bad batch at step 1",
    )  # fmt: skip


def test_values_of_ray_are_checked_and_become_plain(tmp_path: Path, data: str) -> None:
    ours = experiment(tmp_path, data)
    changed = with_values(ours, {"config.max_steps": np.int64(3), "config.checkpoint.keep_last": 1})
    assert (changed.config.max_steps, type(changed.config.max_steps)) == (3, int)
    assert changed.config.checkpoint == CheckpointConfig(every=Duration(2, "steps"), keep_last=1)
    check_paths(ours, ["config.max_steps", "config.checkpoint.keep_last", "name"])
    for path, message in {
        "config.max_step": "did you mean config.max_steps",
        "max_steps": "max_steps: Experiment has no field 'max_steps'; did you mean config.max_steps?",
        "config.data.path": f"config.data is {data!r}, which has no field 'path'",
        "config.checkpoint.keep": "config.checkpoint.keep: CheckpointConfig has no field 'keep'; did you mean",
    }.items():
        for check in (lambda path: with_values(ours, {path: 1}), lambda path: check_paths(ours, [path])):
            with pytest.raises(ConfigError, match=re.escape(message)):
                check(path)
    with pytest.raises(ConfigError, match="keep_last must be"):
        with_values(ours, {"config.checkpoint.keep_last": 0})
