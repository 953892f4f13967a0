"""`fit` on a real Ray: validation before anything starts, reports of failures, and stopping a run."""

from __future__ import annotations

import io
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray._private.worker import global_worker
from rich.console import Console

from headway.datasets.errors import DataError
from headway.orchestrator import (
    Experiment,
    Retries,
    RunResult,
    Scaling,
    StorageError,
    TrainingFailedError,
    find_run,
    fit,
)
from headway.orchestrator.cli.main import _explain
from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.requests import StopRequest, request_stop
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.runs.run import Run
from headway.orchestrator.storage.events import EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train.fit import check_training
from headway.orchestrator.train.worker import _past
from headway.trainer import Duration
from headway.trainer.errors import ConfigError
from tests.on_ray import OnRay, OnRayConfig, write_rows
from tests.promises.test_a_hang_ends_by_itself import is_there


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "train", 64)


def experiment(storage: Path, data: str, *, workers: int = 1, retries: int = 3, **config: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": data, "max_steps": 10, "global_batch_size": 16, "log_every": Duration(1, "steps"), **config,
    }  # fmt: skip
    return Experiment(
        name="run", trainer=OnRay, config=OnRayConfig(**settings), scaling=Scaling(workers=workers),
        retries=Retries(max_failures=retries), storage=str(storage),
    )  # fmt: skip


class Screen:
    """Return the output as it is shown without a terminal."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.display = RunConsole(Console(file=self._file, highlight=False, soft_wrap=True))

    @property
    def text(self) -> str:
        return self._file.getvalue()


def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_more_workers_than_the_machine_has_is_said_at_once(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither Ray nor a folder is created."""
    no_ray(monkeypatch)
    with pytest.raises(ConfigError, match=r"4096 workers with 1 CPU each need 4096 CPUs, and this machine has \d+"):
        fit(experiment(tmp_path, data, workers=4096))
    scaling = Scaling(workers=4096, cpus_per_worker=0.0001, gpus_per_worker=1)
    with pytest.raises(ConfigError, match=r"=4096 with 1 GPU each needs 4096 GPUs, .* connect to a cluster with RAY_"):
        fit(replace(experiment(tmp_path, data), scaling=scaling))
    assert list(tmp_path.iterdir()) == []


def test_storage_that_cannot_be_written_is_said_before_ray_starts(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_ray(monkeypatch)
    with pytest.raises(StorageError, match="/dev/null/runs/run cannot be written"):
        fit(experiment(Path("/dev/null/runs"), data))


def test_a_checkpoint_to_resume_from_must_be_there(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails before workers start."""
    no_ray(monkeypatch)
    with pytest.raises(ConfigError, match=r"is not a checkpoint: .*no-such"):
        fit(experiment(tmp_path, data), resume=str(tmp_path / "no-such"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_a_finished_run_is_finished_at_once(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch, status: Any
) -> None:
    """Starts no Ray, makes no step, and overwrites nothing."""
    no_ray(monkeypatch)
    found = experiment(tmp_path, data)
    run = open_run(found).run
    best = {"best_checkpoint": f"{run.run_dir}/checkpoints/step-00000005", "best_metric": 0.25, "best_step": 5}
    known = {"steps": 10, "epochs": 2, "attempts": 1, "metrics": {"train/loss": 0.5}, "data_guarantee": "exact", **best}
    run.update(status=status, reason="max_steps=10", **known)
    run.folder.write("metrics.jsonl", '{"step": 10, "epoch": 1, "per_epoch/train/loss": 0.5}\n')
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    screen = Screen()
    result = fit(found, display=screen.display)
    assert result.status == status
    assert {name: getattr(result, name) for name in known} == known
    assert result.history == [{"epoch": 1.0, "step": 10.0, "train/loss": 0.5}]
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert "run is finished" in screen.text
    assert "raise config.max_steps or config.max_epochs" in screen.text
    assert run.run_dir in screen.text


@pytest.mark.ray
def test_more_workers_than_the_cluster_has_is_said_at_once(ray_session: None, tmp_path: Path, data: str) -> None:
    with pytest.raises(ConfigError, match=r"the cluster has 4 of 50 CPU that 50 workers need"):
        fit(experiment(tmp_path, data, workers=50))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_an_exception_in_a_step_is_raised_with_the_traceback_of_its_rank(
    ray_session: None, tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retried because steps had been made; given up when it recurs at the same step."""
    found, screen = experiment(tmp_path, data, workers=2, fail_at=3), Screen()
    with pytest.raises(
        TrainingFailedError,
        match=r"rank 1 on \S+ raised ValueError at step 3 \(training step\), at on_ray.py",
    ) as told:
        fit(found, display=screen.display)
    error = told.value
    assert (error.rank, error.step, error.attempt) == (1, 3, 2)
    assert isinstance(error.__cause__, ValueError)
    assert error.worker_traceback.count("in training_step") == 1
    run = Run(found.run_dir)
    assert (run.status, run.record.attempts) == ("failed", 2)
    assert "a bad batch at step 3" in str(run.record.error)
    assert screen.text.count("; restarting the workers") == 1
    assert "Traceback" not in screen.text
    # `headway fit` shows the cause, the traceback of that rank, once, and how to resume.
    assert _explain(error) == 1
    said = capsys.readouterr().err
    cause, _, rest = said.partition("\n\n")
    assert cause.startswith("headway: the worker of rank 1 on ")
    assert rest.startswith("Traceback")
    assert rest.count("in training_step") == 1
    assert said.splitlines()[-1].startswith("to resume, start it again")


@pytest.mark.ray
@pytest.mark.extended
def test_a_step_that_exits_is_a_failed_run(ray_session: None, tmp_path: Path, data: str) -> None:
    """Whatever its exit code, an unfinished run must not pass as finished."""
    found = experiment(tmp_path, data, workers=2, exit_at=3)
    with pytest.raises(TrainingFailedError, match=r"SystemExit at step 3 \(training step\)"):
        fit(found, display=Screen().display)
    assert Run(found.run_dir).status == "failed"


@pytest.mark.ray
def test_an_error_of_ours_is_raised_as_it_is_and_not_tried_again(ray_session: None, tmp_path: Path) -> None:
    found = experiment(tmp_path, str(tmp_path / "no-data"))
    with pytest.raises(DataError, match="no-data does not exist"):
        fit(found, display=Screen().display)
    assert Run(found.run_dir).record.attempts == 1


@pytest.mark.extended
@pytest.mark.ray
def test_a_run_begins_with_a_part_of_what_is_there(ray_session: None, tmp_path: Path, data: str) -> None:
    """By the rules of `Trainer.fit`, in the folder of the run."""
    first = fit(experiment(tmp_path, data, max_steps=3))
    part = fit(experiment(tmp_path, data, max_steps=4), restore=("models", "optimizers"))
    assert (part.steps, part.resumed_from) == (4, first.last_checkpoint)
    began = [event["step"] for event in read_events(Folder(part.run_dir)) if event["event"] == "training"]
    assert began == [0, 0]
    ready = [event for event in read_events(Folder(part.run_dir)) if event["event"] == "set_up"]
    assert [event["step"] for event in ready] == [0, 0]
    assert {"configure", "parallelise", "restore", "first_batch", "first_update"} <= set(ready[1]["seconds"])
    records = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records == [1, 2, 3, 4]


def test_after_a_save_of_its_own_a_start_goes_on_from_that(tmp_path: Path) -> None:
    """Known by the lease in each event, whatever the clocks of the hosts say."""
    folder = Folder(str(tmp_path))
    events = EventWriter(folder, "rank-0", start="1-this")
    asked = ResumeOptions.checked("never", ("models",), accept_changes=True)
    for attempt, before in ((1, None), (2, 1)):
        assert _past(folder, asked, "1-this") == (attempt, asked, before)
        events.add("attempt_started", attempt=attempt, world_size=attempt)
    events.add("checkpoint_saved", step=4)
    assert _past(folder, asked, "1-this") == (3, ResumeOptions(accept_changes=True), 2)
    assert _past(folder, asked, "2-next") == (3, asked, 2)


def test_a_run_says_what_its_main_rank_says_and_can_be_stopped_from_outside(
    ray_session: None, tmp_path: Path, data: str
) -> None:
    """A stopped run has a checkpoint and a readable record, and resumes when it is started again."""
    found, screen = experiment(tmp_path, data, workers=2, max_steps=100_000, pause_s=0.01, say="hello"), Screen()
    folder = Folder(found.run_dir)

    def fit_until(event: str, attempt: int, stop: StopRequest) -> RunResult:
        def ask() -> None:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                there = read_events(folder)
                if sum(each["event"] == event for each in there) == attempt:
                    return request_stop(folder, stop)
                time.sleep(0.05)
            return None

        asker = threading.Thread(target=ask)
        asker.start()
        result = fit(found, display=screen.display)
        asker.join()
        return result

    result = fit_until("warning", 2, StopRequest(reason="enough"))
    assert (result.status, result.reason) == ("stopped", "enough")
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.endswith(f"{result.steps:08d}")
    for line in ("printed: hello", "said: hello", "UserWarning: warned: hello", "data: logged: hello"):
        assert screen.text.count(line) == 1
    assert f"stopped after {result.steps:,} steps: enough" in screen.text
    assert "\r" not in screen.text
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], record["steps"], record["attempts"]) == ("stopped", result.steps, 1)
    assert find_run("run", str(tmp_path)).experiment() == found
    assert Run(found.run_dir).record.attempts == 1
    # Ray's log viewer shows the output of every rank.
    logs = Path(global_worker.node.get_session_dir_path(), "logs", "train").glob("ray-train-app-worker-*.log")
    own = [text for text in (file.read_text() for file in logs) if f'"run-{record["id"]}"' in text]
    assert len([text for text in own if "printed: hello" in text]) == 2
    assert any("said: hello" in text for text in own)

    # It resumes; after an abort it saves nothing, and its workers exit although this process and Ray remain.
    again = fit_until("training", 2, StopRequest(reason="now", abort=True))
    assert (again.status, again.reason, again.steps) == ("stopped", "now, immediately", result.steps)
    assert again.last_checkpoint == result.last_checkpoint
    workers = [each for each in read_events(folder) if each["event"] == "attempt_started"][-1]["workers"]
    deadline = time.monotonic() + 60
    while any(is_there(worker["pid"]) for worker in workers):
        assert time.monotonic() < deadline, "workers of a run that was abandoned train on"
        time.sleep(0.1)


def test_bad_data_is_a_mistake_in_what_was_asked_for(tmp_path: Path) -> None:
    """If the driver finds it before Ray starts, it counts as an invalid config: exit code 2."""
    with pytest.raises(ConfigError, match="no-data does not exist") as raised:
        check_training(experiment(tmp_path, str(tmp_path / "no-data")))
    assert isinstance(raised.value.__cause__, DataError)


def test_a_wrong_config_is_refused_before_a_cluster_is_asked_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the machines of the cluster can tell whether the data exists."""
    no_ray(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "ray://nowhere:10001")
    found = experiment(tmp_path, str(tmp_path / "no-data"))
    wrong = replace(found, config=replace(found.config, max_steps=None))
    with pytest.raises(ConfigError, match="the config has no limit"):
        fit(wrong)
    assert not Path(wrong.run_dir).exists()
    check_training(found, elsewhere=True)


def test_a_trainer_that_cannot_be_pickled_is_refused_before_a_cluster_is_asked_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Locked(OnRay):
        lock = threading.Lock()

    no_ray(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "ray://nowhere:10001")
    locked = replace(experiment(tmp_path, str(tmp_path / "data")), trainer=Locked)
    with pytest.raises(ConfigError, match="Locked cannot be pickled for the workers"):
        fit(locked)
    assert not Path(locked.run_dir).exists()
