"""`headway runs stop`: its requests, and its answers if nothing is running."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from headway.orchestrator import Experiment, LogUniform, Scaling, Search, StorageError
from headway.orchestrator.cli.main import main
from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.runs.open import open_run, open_sweep
from headway.orchestrator.runs.ownership import lease_lost
from headway.orchestrator.runs.requests import StopRequest, clear_stop_request, read_stop_request, request_stop
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.runs.run import Driver, Run
from headway.orchestrator.runs.stop import stop_run
from headway.orchestrator.storage.events import EventWriter
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train.driver import RunDriver
from headway.orchestrator.train.signals import StopSignals
from headway.orchestrator.train.worker_group import run_worker_group
from headway.trainer import Duration
from headway.trainer.errors import ConfigError
from tests.orchestrator.runs.test_run import claim_as, experiment, left_by_a_dead_driver, of_pid


@pytest.fixture(autouse=True)
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver asks Ray for its groups; without a cluster, Ray would look for one or start one."""
    monkeypatch.setattr("headway.orchestrator.train.driver.placed_groups", set)


@pytest.mark.parametrize("place", ["disk", "memory://stopping"])
def test_what_is_asked_for_can_be_read_wherever_the_run_lies(tmp_path: Path, place: str) -> None:
    folder = Folder(str(tmp_path) if place == "disk" else place)
    folder.prepare()
    assert read_stop_request(folder) is None
    stop = StopRequest(reason="enough", status="interrupted", abort=True, within_s=3.5)
    request_stop(folder, stop)
    assert read_stop_request(folder) == stop
    for damaged in ("{", "[1]", '{"reason": "x", "status": "completed"}', '{"why": "x"}'):
        folder.write("stop.json", damaged)
        assert read_stop_request(folder) is None
    clear_stop_request(folder)
    clear_stop_request(folder)
    assert read_stop_request(folder) is None


@pytest.mark.parametrize(
    ("options", "wanted", "answer"),
    [
        ([], StopRequest(reason="headway runs stop"), "was asked to save a checkpoint and stop"),
        (["--now"], StopRequest(reason="headway runs stop", abort=True), "was asked to stop immediately"),
        (["--within", "2m"], StopRequest(reason="headway runs stop", within_s=120.0), "was asked to save"),
    ],
)
@pytest.mark.parametrize("where", ["of the group", "of the command"])
def test_a_running_run_is_asked_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], wanted: StopRequest, answer: str, where: str
) -> None:
    run = open_run(experiment(tmp_path)).run
    storage = ["--storage", str(tmp_path)]
    before, after = (storage, []) if where == "of the group" else ([], storage)
    with pytest.raises(SystemExit) as ended:
        main(["runs", *before, "stop", "tiny", *options, *after])
    assert ended.value.code in (0, None)
    assert answer in capsys.readouterr().out
    assert read_stop_request(run.folder) == wanted


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"status": "completed", "steps": 10, "reason": "max_steps=10 reached"}, "completed after 10 steps (max_steps"),
        ({"status": "interrupted", "steps": 7, "reason": "Ctrl-C"}, "interrupted after 7 steps (Ctrl-C); to resume"),
        ({"status": "interrupted", "reason": "Ctrl-C"}, "interrupted before an update was saved (Ctrl-C); to resume"),
    ],
)
def test_a_run_that_has_ended_is_left_alone(tmp_path: Path, changes: dict[str, Any], answer: str) -> None:
    run = open_run(experiment(tmp_path)).run
    run.update(**changes)
    assert f"tiny is not running: {answer}" in stop_run("tiny", str(tmp_path))
    assert read_stop_request(run.folder) is None


def test_a_run_whose_driver_is_dead_is_said_to_be_dead(tmp_path: Path) -> None:
    left_by_a_dead_driver(open_run(experiment(tmp_path)).run)
    answer = stop_run("tiny", str(tmp_path), wait=True)
    assert "is not running: interrupted" in answer
    assert "is gone" in answer


def test_there_must_be_a_run_and_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="there is no run 'none'"):
        stop_run("none", str(tmp_path))
    open_run(experiment(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["runs", "stop", "tiny", "--storage", str(tmp_path), "--within", "3 steps"])
    assert ended.value.code == 2
    assert "a time such as 90s or 2m" in capsys.readouterr().err


def test_waiting_tells_how_it_ended(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run

    def obey() -> None:
        while read_stop_request(run.folder) is None:
            time.sleep(0.01)
        run.update(status="stopped", steps=7, reason="headway runs stop")

    thread = threading.Thread(target=obey)
    thread.start()
    assert "has ended: stopped after 7 steps (headway runs stop); to resume, start it again" in stop_run(
        "tiny", str(tmp_path), wait=True
    )
    thread.join()


def test_what_was_asked_of_one_life_is_not_asked_of_the_next(tmp_path: Path) -> None:
    """A run that was stopped by a request is unfinished, so the next start resumes it."""
    run = open_run(experiment(tmp_path)).run
    request_stop(run.folder, StopRequest(reason="enough"))
    run.update(status="stopped", started="2001-01-01T00:00:00+00:00")
    assert not Run(run.run_dir).is_finished
    opened = open_run(experiment(tmp_path))
    assert opened.state == "resuming"
    assert read_stop_request(run.folder) is None


def test_a_lease_is_of_one_life_of_the_run(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    first = run.lease
    run.update(steps=3)
    assert run.lease == first
    assert not lease_lost(run.folder, first)
    run.update(driver=Driver.this(), claim="10-later")
    assert run.lease != first
    assert lease_lost(run.folder, first)
    assert not lease_lost(run.folder, "11-newest"), "a file system may show for a while what was there before"
    run.folder.write("run.json", "{")
    assert not lease_lost(run.folder, first)


@pytest.mark.parametrize(
    ("stop", "workers", "waited_s", "leaves"),
    [
        (None, True, 0.0, None),
        (StopRequest(reason="x"), True, 0.0, None),
        (StopRequest(reason="x"), False, 0.0, "x before training began"),
        (StopRequest(reason="x", abort=True), True, 0.0, "x, immediately"),
        (StopRequest(reason="x", within_s=60.0), True, 0.0, None),
        (StopRequest(reason="x", within_s=60.0), True, 61.0, "x, without a checkpoint after 1m00s"),
    ],
)
def test_the_driver_leaves_where_nothing_is_left_to_wait_for(
    tmp_path: Path, stop: StopRequest | None, workers: bool, waited_s: float, leaves: str | None
) -> None:
    asked = experiment(tmp_path)
    run = open_run(asked).run
    supervision = RunDriver(
        asked,
        run,
        StopSignals(),
        RunConsole(Console(file=io.StringIO())),
        resume_options=ResumeOptions(),
        verbose=False,
        spares=False,
    )
    supervision._has_workers = workers
    if stop is not None:
        request_stop(run.folder, stop)
    first = supervision._handle_stop()
    supervision._stop_since_s -= waited_s
    assert (supervision._handle_stop() if waited_s else first) == leaves
    # The workers are told as well.
    assert (read_stop_request(run.folder) or StopRequest(reason="")).abort == (
        "immediately" in str(leaves) or waited_s > 0
    )


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_waiting_for_a_silent_driver_ends_only_if_its_process_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("headway.orchestrator.runs.stop.SILENT_S", 0.1)
    run = open_run(experiment(tmp_path)).run
    with subprocess.Popen(["sleep", "60"]) as driver:
        process = of_pid(driver.pid)
        claim_as(run, process if where == "here" else replace(process, host="another-machine"))
        waiting = threading.Timer(1.0, driver.kill)
        waiting.start()
        answer = stop_run("tiny", str(tmp_path), wait=True)
        ended = not waiting.is_alive()
        driver.kill()
    if where == "here":
        assert ended
        assert "tiny has ended: interrupted" in answer
        assert "is gone" in answer
    else:
        assert not ended
        assert "tiny may have ended: its driver has written nothing for 0 s; running" in answer


def test_a_sweep_is_asked_in_its_folder_and_one_that_has_ended_is_left_alone(tmp_path: Path) -> None:
    sweep = open_sweep(experiment(tmp_path), Search(space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, trials=3))
    answer = stop_run("tiny", str(tmp_path), within_s=60.0)
    assert answer == "tiny was asked to save a checkpoint of each trial and stop"
    assert read_stop_request(sweep.folder) == StopRequest(reason="headway runs stop", within_s=60.0)
    sweep.update(status="completed", reason="all trials have ended")
    clear_stop_request(sweep.folder)
    answer = "tiny is not running: completed with 0 of 3 trials done (all trials have ended)"
    assert stop_run("tiny", str(tmp_path), wait=True) == answer
    assert read_stop_request(sweep.folder) is None


class Leaving(MemoryFileSystem):
    """A remote storage that can become unavailable."""

    protocol = "leaving"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    is_away = False

    def cat_file(self, *args: Any, **options: Any) -> Any:
        return self._there(super().cat_file, *args, **options)

    def pipe_file(self, *args: Any, **options: Any) -> Any:
        return self._there(super().pipe_file, *args, **options)

    def ls(self, *args: Any, **options: Any) -> Any:
        return self._there(super().ls, *args, **options)

    def _there(self, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if Leaving.is_away:
            raise LookupError("the store is away")
        return do(*args, **options)


def supervision(asked: Experiment, run: Run, train: Any) -> RunDriver:
    return RunDriver(
        asked, run, StopSignals(), RunConsole(Console(file=io.StringIO())), resume_options=ResumeOptions(),
        verbose=False, spares=False, train=train,
    )  # fmt: skip


def test_the_driver_waits_for_a_storage_that_is_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("leaving", Leaving)
    asked = replace(experiment(Path("runs")), storage="leaving://runs")
    run = open_run(asked).run
    driver = supervision(asked, run, lambda *_, **__: {})
    worker = EventWriter(run.folder, "rank-0")
    worker.add("checkpoint_saved", step=7, path="somewhere")
    monkeypatch.setattr(Leaving, "is_away", True)
    assert driver._poll() is None
    driver._signals.count = 1
    assert driver._poll() is None
    monkeypatch.setattr(Leaving, "is_away", False)
    assert driver._poll() is None
    assert Run(run.run_dir).record.steps == 7
    assert read_stop_request(run.folder) is not None, "a signal in the meantime was not lost"
    monkeypatch.setattr(Leaving, "is_away", True)
    assert driver._poll() is None
    driver._outage._since_s -= 61
    with pytest.raises(StorageError, match="the store is away"):
        driver._poll()


@pytest.mark.parametrize(("number", "aborts"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_second_sigterm_leaves_a_slow_save_its_time(tmp_path: Path, number: signal.Signals, aborts: bool) -> None:
    """A scheduler may repeat its signal; a second Ctrl-C is intended."""
    asked = experiment(tmp_path)
    run = open_run(asked).run

    def train(*_: Any, **__: Any) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        wait_for(lambda: read_stop_request(run.folder))
        time.sleep(1.1)
        os.kill(os.getpid(), number)
        # What saves looks as often as here whether it is to end at once.
        deadline_s = time.monotonic() + (120 if aborts else 1)
        while time.monotonic() < deadline_s:
            stop = read_stop_request(run.folder)
            if stop is not None and stop.abort:
                return {}
            time.sleep(0.05)
        return {"status": "interrupted", "reason": "saved"}

    with StopSignals() as signals:
        driver = RunDriver(
            asked, run, signals, RunConsole(Console(file=io.StringIO())), resume_options=ResumeOptions(), verbose=False,
            spares=False, train=train,
        )  # fmt: skip
        signals.raises = False
        driver._has_workers = True
        result = driver.run()
    assert result.signal == number
    assert ("immediately" in result.reason) is aborts
    assert aborts or (result.status, result.reason) == ("interrupted", "saved")


def wait_for(what: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_workers_that_start_too_slowly_are_not_told_as_missing_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(experiment(tmp_path), scaling=Scaling(wait=Duration(0.1, "seconds")))
    ended = threading.Event()

    def train(*_: Any, **__: Any) -> dict[str, Any]:
        ended.wait(120)
        return {}

    monkeypatch.setattr("headway.orchestrator.train.driver.run_worker_group", train)
    placed: list[set[str]] = [set()]
    monkeypatch.setattr("headway.orchestrator.train.driver.placed_groups", lambda: placed[0])
    driver = supervision(asked, open_run(asked).run, train)
    placed[0] = {"ours"}
    try:
        with pytest.raises(ConfigError, match="the workers: they have their resources, but their processes have not"):
            driver.run()
    finally:
        ended.set()


def test_a_driver_that_fails_leaves_nobody_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that start after the driver has given up would train without supervision."""
    asked = replace(experiment(tmp_path), scaling=Scaling(wait=Duration(0.3, "seconds")))
    run = open_run(asked).run
    told: list[StopRequest | None] = []

    def train(*_: Any, **__: Any) -> dict[str, Any]:
        deadline_s = time.monotonic() + 120
        while read_stop_request(run.folder) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        told.append(read_stop_request(run.folder))
        return {}

    monkeypatch.setattr("headway.orchestrator.cluster.connect.missing_resources", lambda _: "")
    # It stands for workers of their own; what trains in this process waits for none.
    monkeypatch.setattr("headway.orchestrator.train.driver.run_worker_group", train)
    monkeypatch.setattr("headway.orchestrator.train.driver.placed_groups", set)
    with pytest.raises(ConfigError, match="timed out after 0s waiting for the workers"):
        supervision(asked, run, train).run()
    deadline_s = time.monotonic() + 120
    while not told:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert told[0] is not None
    assert told[0].abort


@pytest.mark.parametrize(("left_s", "waits"), [(-11.0, True), (60.0, False), (None, False)])
def test_a_group_is_gone_after_the_deadline_of_its_machine(tmp_path: Path, left_s: float | None, waits: bool) -> None:
    """Ray then ends the worker without an error, so the watchdog must not wait for it or count it as silent."""
    asked = experiment(tmp_path)
    run = open_run(asked).run
    driver = supervision(asked, run, run_worker_group)
    worker = EventWriter(run.folder, "rank-0")
    worker.add("attempt_started", attempt=1, world_size=1, workers=[{"rank": 0, "host": "another", "pid": 1}])
    worker.add("preemption_notice", attempt=1, nodes=["a"], ranks=[0], deadline_s=left_s, saves=True)
    request_stop(run.folder, StopRequest(reason="x"))
    assert driver._poll() == ("x while there were no workers" if waits else None)
    assert (driver._hang_monitor._attempt is None) is waits
    worker.add("attempt_started", attempt=2, world_size=1, workers=[{"rank": 0, "host": "another", "pid": 2}])
    assert driver._poll() is None
