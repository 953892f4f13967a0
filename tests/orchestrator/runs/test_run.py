"""A start with an existing name is resumed, refused with the difference, or finished; states after a lost driver."""

from __future__ import annotations

import json
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from headway.orchestrator import Experiment, RunConflictError, Scaling, StorageError, find_run, fit, list_runs, resolve
from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster import connect
from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.errors import TrainingFailedError
from headway.orchestrator.runs.open import open_run, preview_run
from headway.orchestrator.runs.ownership import lease_lost
from headway.orchestrator.runs.run import Driver, Run
from headway.orchestrator.storage.events import Event, EventWriter, JsonlTail, read_events
from headway.orchestrator.storage.folder import Folder, absolute
from headway.orchestrator.train import driver, driver_watch
from headway.orchestrator.train.driver import RunDriver
from headway.trainer import World
from headway.trainer.checkpoints import storage
from headway.trainer.errors import ConfigError
from headway.trainer.ownership import claim as claims
from headway.trainer.ownership.claim import Ownership
from headway.trainer.ownership.claim_files import Claim, ClaimFiles
from headway.trainer.ownership.process import ProcessId
from tests.tiny import TinyConfig, TinyTrainer


def experiment(storage: Path, **config: Any) -> Experiment:
    return Experiment(
        name="tiny", trainer=TinyTrainer, config=TinyConfig(**{"max_steps": 10, **config}), storage=str(storage)
    )


def left_by_a_dead_driver(run: Run, **changes: Any) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    record = json.loads(run.folder.read("run.json") or "")
    record["driver"] = {**record["driver"], "pid": int(done.stdout)}
    run.folder.write("run.json", json.dumps({**record, **changes}))


def test_a_new_run_has_a_record_that_says_what_it_is(tmp_path: Path) -> None:
    opened = open_run(experiment(tmp_path))
    assert opened.state == "new"
    record = json.loads((tmp_path / "tiny/run.json").read_text())
    assert (record["status"], record["name"], record["trainer"]) == ("running", "tiny", "tests.tiny:TinyTrainer")
    assert {"python", "torch", "ray", "headway"} <= set(record["versions"])
    assert len(record["git"]["commit"]) == 40
    assert record["hardware"]["host"] == socket.gethostname()
    assert opened.run.experiment() == experiment(tmp_path)


def test_an_unfinished_run_goes_on_with_its_identity(tmp_path: Path) -> None:
    first = open_run(experiment(tmp_path)).run
    first.update(status="interrupted", attempts=2, steps=4)
    again = open_run(experiment(tmp_path))
    assert (again.state, again.changes) == ("resuming", ())
    assert again.run.record.id == first.record.id
    assert again.run.record.attempts == 2
    assert again.run.status == "running"


@pytest.mark.parametrize("status", ["interrupted", "failed", "time_limit", "completed", "stopped"])
def test_another_config_is_refused_with_the_difference(tmp_path: Path, status: Any) -> None:
    open_run(experiment(tmp_path)).run.update(status=status)
    with pytest.raises(RunConflictError, match=r"config.learning_rate: 0.01 -> 0.5\n"):
        open_run(experiment(tmp_path, learning_rate=0.5))
    assert Run(str(tmp_path / "tiny")).status == status


def test_another_config_can_be_accepted(tmp_path: Path) -> None:
    open_run(experiment(tmp_path)).run.update(status="interrupted")
    opened = open_run(experiment(tmp_path, learning_rate=0.5), accept_changes=True)
    assert [str(change) for change in opened.changes] == ["config.learning_rate: '0.01' -> '0.5'"]
    assert opened.run.experiment().config == TinyConfig(max_steps=10, learning_rate=0.5)


@pytest.mark.parametrize(
    "override",
    [
        "scaling.workers=2",
        "retries.max_failures=9",
        "config.max_steps=20",
        "config.log_every=7",
        "config.evaluate_every=null",
        "config.checkpoint.keep_last=5",
        "config.parallel.strategy=fsdp",
        "config.micro_batch_size=4",
    ],
)
def test_how_and_how_long_a_run_trains_may_change(tmp_path: Path, override: str) -> None:
    open_run(experiment(tmp_path)).run.update(status="interrupted")
    opened = open_run(resolve(experiment(tmp_path), [override]))
    assert opened.state == "resuming"
    assert [change.path for change in opened.changes] == [override.partition("=")[0]]


@pytest.mark.parametrize(
    ("override", "state"),
    [
        ("config.max_steps=10", "finished"),
        ("config.max_steps=9", "finished"),
        ("scaling.workers=2", "finished"),
        ("config.max_steps=11", "resuming"),
        ("config.max_steps=null", "resuming"),
    ],
)
@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_a_finished_run_is_finished_until_its_limit_is_raised(
    tmp_path: Path, status: Any, override: str, state: str
) -> None:
    open_run(experiment(tmp_path, max_epochs=99)).run.update(status=status)
    before = (tmp_path / "tiny/run.json").read_text()
    assert open_run(resolve(experiment(tmp_path, max_epochs=99), [override])).state == state
    assert ((tmp_path / "tiny/run.json").read_text() == before) == (state == "finished")


def test_a_run_whose_driver_died_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    left_by_a_dead_driver(run)
    found = find_run("tiny", str(tmp_path))
    assert found.record.status == "running"
    assert found.status == "interrupted"
    assert "is gone" in found.reason
    assert open_run(experiment(tmp_path)).state == "resuming"


def claim_as(run: Run, process: ProcessId) -> None:
    """Claim the folder of a run, and write its record, as another driver would."""
    run.release()
    files = ClaimFiles(run.run_dir)
    claim = replace(Claim.next_after(files.newest()), process=process)
    assert files.create(claim)
    driver = Driver(
        host=process.host, pid=process.pid, pids=process.pids, process_started=process.started, heartbeat=time.time()
    )
    run.update(driver=driver, claim=claim.id)


def of_pid(pid: int) -> ProcessId:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return replace(ProcessId.this(), pid=pid, started=fields[19])


def test_a_run_is_not_trained_twice_at_a_time(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    claim_as(run, of_pid(os.getppid()))
    for start in (open_run, preview_run):
        with pytest.raises(RunConflictError, match=rf"tiny is being trained by process {os.getppid()} on .*runs stop"):
            start(experiment(tmp_path))
    with pytest.raises(RunConflictError, match=f"process {os.getppid()} on .* is training in"):
        TinyTrainer(TinyConfig(max_steps=1), run_dir=run.run_dir, world=World.single("cpu")).fit()


def test_a_driver_that_was_killed_is_dead_before_its_parent_asks(tmp_path: Path) -> None:
    """In a container without an init process it may stay a zombie forever."""
    run = open_run(experiment(tmp_path)).run
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as driver:
        claim_as(run, of_pid(driver.pid))
        assert find_run("tiny", str(tmp_path)).status == "running"
        driver.kill()
        os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)
        assert find_run("tiny", str(tmp_path)).status == "interrupted"
    assert open_run(experiment(tmp_path)).state == "resuming"


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_driver_elsewhere_is_known_by_its_heartbeats_whatever_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """Two hosts whose clocks differ by an hour; in containers both drivers often are process 1."""
    monkeypatch.setattr(claims, "BEAT_EVERY_S", 0.05)
    # The first heartbeat seen ends the watch.
    monkeypatch.setattr(claims, "ABANDONED_AFTER_S", 600.0)
    monkeypatch.setattr(claims, "_LOOK_EVERY_S", 0.02)
    run = open_run(experiment(tmp_path)).run
    mine = run.lease
    theirs = replace(ProcessId.this(), host="another", pids="another boot")
    claim_as(run, theirs)
    heartbeat = run.record.driver.heartbeat + skew_s
    record = {**json.loads(run.folder.read("run.json") or ""), "started": "2001-01-01T00:00:00+00:00"}
    record["driver"]["heartbeat"] = heartbeat
    run.folder.write("run.json", json.dumps(record))
    assert lease_lost(run.folder, mine), "a claim by a host whose clock is behind is seen"
    files = ClaimFiles(run.run_dir)
    owner = Ownership(files, files.newest())  # type: ignore[arg-type]
    with pytest.raises(RunConflictError, match=f"by process {os.getpid()} on another"):
        open_run(experiment(tmp_path))
    # It dies.
    monkeypatch.setattr(claims, "ABANDONED_AFTER_S", 0.6)
    owner._ended.set()
    owner._thread.join()
    lines: list[str] = []
    opened = open_run(experiment(tmp_path), say=lines.append)
    assert opened.state == "resuming"
    assert "for a sign of life" in lines[0]
    assert lease_lost(run.folder, run.lease)
    assert not lease_lost(run.folder, opened.run.lease)


def claimed_by_another(folder: Folder, record: str = "run.json") -> str:
    """Write the record of a driver on another host that has taken over the run."""
    found = json.loads(folder.read(record) or "")
    found["driver"] = {"host": "another", "pid": 1, "heartbeat": found["driver"]["heartbeat"]}
    folder.write(record, text := json.dumps({**found, "claim": "99-theirs"}))
    return text


def test_a_driver_that_was_taken_for_dead_leaves_the_record_to_the_next_one(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    run.update(steps=3)
    theirs = claimed_by_another(run.folder)
    run.beat()
    stale = replace(run.record.driver, heartbeat=run.record.driver.heartbeat - 100)
    run.record = replace(run.record, driver=stale)
    for say in (lambda: run.update(status="failed"), run.beat):
        with pytest.raises(RunConflictError, match=r"another process took over this run \(.*tiny"):
            say()
    assert run.folder.read("run.json") == theirs
    # Its own claim is no conflict, whoever had the run before.
    mine = Run(run.run_dir)
    mine.update(driver=Driver.this(), claim="100-mine")
    mine.update(steps=4)
    assert Run(run.run_dir).record.steps == 4


def test_a_fit_that_has_lost_its_run_writes_nothing_more_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[str, list[Event]]] = []

    def wake_up(self: RunDriver) -> Any:
        left.append((claimed_by_another(self._run.folder), read_events(self._run.folder)))
        self._run.record = replace(self._run.record, driver=replace(self._run.record.driver, heartbeat=0.0))
        self._poll()

    monkeypatch.setattr(RunDriver, "run", wake_up)
    monkeypatch.setattr(driver, "placed_groups", set)
    # It would start Ray, if there is none.
    monkeypatch.setattr(driver_watch, "watch_driver", lambda *_: nullcontext())
    monkeypatch.setattr(connect, "ray_connection", lambda *_, **__: nullcontext(True))
    monkeypatch.setattr(connect, "clamp_to_machine", lambda scaling: scaling)
    monkeypatch.setattr(connect, "unused_gpus", lambda _: None)
    with pytest.raises(RunConflictError, match="another process took over"):
        fit(experiment(tmp_path), display=RunConsole(Console(quiet=True)))
    folder = Folder(str(tmp_path / "tiny"))
    assert left == [(folder.read("run.json"), read_events(folder))]


def test_a_storage_that_is_away_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RunDriver) -> Any:
        monkeypatch.setattr(Folder, "write", unavailable)
        raise TrainingFailedError("rank 1 was killed")

    def unavailable(self: Folder, name: str, text: str, **options: Any) -> None:
        raise StorageError(f"{name} cannot be written: the store is away")

    monkeypatch.setattr(RunDriver, "run", fail)
    monkeypatch.setattr(driver, "placed_groups", set)
    # It would start Ray, if there is none.
    monkeypatch.setattr(driver_watch, "watch_driver", lambda *_: nullcontext())
    monkeypatch.setattr(connect, "ray_connection", lambda *_, **__: nullcontext(True))
    monkeypatch.setattr(connect, "clamp_to_machine", lambda scaling: scaling)
    monkeypatch.setattr(connect, "unused_gpus", lambda _: None)
    with pytest.raises(TrainingFailedError, match="rank 1 was killed") as raised:
        fit(experiment(tmp_path), display=RunConsole(Console(quiet=True)))
    assert "its record could not be updated, and may still say that it runs: run.json" in raised.value.__notes__[0]
    assert "to resume, start it again" in raised.value.__notes__[-1]


def test_runs_are_listed_the_last_started_first(tmp_path: Path) -> None:
    for index, name in enumerate("abc"):
        found = open_run(Experiment(name=name, trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path)))
        found.run.update(started=f"2026-01-0{index + 1}T00:00:00+00:00")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/run.json").write_text("{")
    assert [run.record.name for run in list_runs(str(tmp_path))] == ["c", "b", "a"]
    assert list_runs(str(tmp_path / "nowhere")) == []
    with pytest.raises(ConfigError, match="there is no run 'd' in .*; existing runs: c, b, a"):
        find_run("d", str(tmp_path))
    (tmp_path / "d/checkpoints/step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="d has no record, because it was trained without `headway fit`"):
        find_run("d", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path}/d/ is the folder of a run: give its name 'd'$"):
        find_run(f"{tmp_path}/d/", str(tmp_path))
    with pytest.raises(ConfigError, match=f"is the folder of a run: give its name 'd' and --storage {tmp_path}$"):
        find_run(f"{tmp_path}/d", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("place", ["/dev/null/runs", "/proc/runs", "nosuchscheme://bucket/runs"])
def test_storage_that_cannot_be_written_is_an_error_of_its_own(place: str) -> None:
    with pytest.raises(StorageError, match=place):
        open_run(Experiment(name="a", trainer=TinyTrainer, config=TinyConfig(), storage=place))


class Refusing(MemoryFileSystem):
    """A file system without access. Like those of object stores, its error is not an OSError."""

    protocol = "refusing"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise LookupError("no credentials")

    ls = info = size = exists = cat_file = pipe_file = rm_file = _refuse


def test_storage_that_cannot_be_read_is_an_error_of_its_own_too(capsys: pytest.CaptureFixture[str]) -> None:
    fsspec.register_implementation("refusing", Refusing)
    folder = Folder("refusing://runs")
    asks: list[Callable[[], object]] = [
        folder.folders,
        lambda: folder.files("events"),
        lambda: folder.exists("run.json"),
        lambda: folder.read("run.json"),
        lambda: folder.read_from("metrics.jsonl", 0),
    ]
    for ask in asks:
        with pytest.raises(StorageError, match="refusing://runs.* cannot be .*: no credentials"):
            ask()
    with pytest.raises(SystemExit) as ended:
        main(["runs", "--storage", "refusing://runs"])
    assert ended.value.code == 2
    assert "no credentials" in capsys.readouterr().err


def test_places_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(tmp_path / "runs")
    assert absolute("file:///a/b") == "/a/b"
    assert absolute("s3://bucket/runs/") == "s3://bucket/runs"
    assert experiment(Path("runs")).run_dir == str(tmp_path / "runs/tiny")


def test_later_fields_of_a_record_are_passed_over(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    record = json.loads(run.folder.read("run.json") or "")
    run.folder.write("run.json", json.dumps({**record, "of_a_later_version": 1}))
    assert Run(run.run_dir).record.id == run.record.id


def test_a_line_that_a_crash_has_torn_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    log = EventWriter(Folder(str(tmp_path)), "driver")
    log.add("a")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "event": "to')
    log.add("b", text="two\nlines")
    log.add("c")
    assert [event["event"] for event in read_events(Folder(str(tmp_path)))] == ["a", "b", "c"]
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 4, "no empty line where none was torn"


def test_events_are_told_in_order_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    log = EventWriter(folder, "driver")
    follower = JsonlTail(folder, "events", from_now=True)
    log.add("a", step=1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "ev\n{"half')
    assert [event["event"] for event in follower.read()] == ["a"]
    assert [event["event"] for event in read_events(folder)] == ["a"]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('": 2, "event": "b", "time": 9e9}\n')
    assert [event["event"] for event in follower.read()] == ["b"]


def test_a_file_that_is_cut_back_shows_nothing_twice(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    file = tmp_path / "metrics.jsonl"
    follower = JsonlTail(folder, "metrics", from_now=False)
    assert follower.read() == []
    first, second, again, moved = (
        {"step": 1, "time": 10.0, "attempt": 1},
        {"step": 2, "time": 11.0, "attempt": 1},
        {"step": 2, "time": 12.0, "attempt": 1},
        # The clock of the next machine is behind.
        {"step": 2, "time": 5.0, "attempt": 2},
    )

    def write(*records: dict[str, float]) -> None:
        file.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    write(first, second)
    assert follower.read() == [first, second]
    write(first)
    assert follower.read() == []
    write(first, again)
    assert follower.read() == [again]
    write(first)
    assert follower.read() == []
    write(first, moved)
    assert follower.read() == [moved]


def test_a_tail_does_not_keep_what_it_has_read(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    follower = JsonlTail(folder, "metrics", from_now=False)
    sizes = []
    for start in (0, 1000):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for step in range(start, start + 1000):
                file.write(json.dumps({"step": step, "time": float(step), "attempt": 1}) + "\n")
        assert len(follower.read()) == 1000
        sizes.append(len(pickle.dumps({name: value for name, value in vars(follower).items() if name != "_folder"})))
    assert max(sizes) < 500


def test_an_object_store_gets_a_bounded_number_of_bytes_per_event() -> None:
    fsspec.filesystem("memory").makedirs("/events-many", exist_ok=True)
    folder = Folder("memory://events-many")
    sent: list[int] = []
    write = folder.write

    def count(name: str, text: str) -> None:
        sent.append(len(text))
        write(name, text)

    folder.write = count  # type: ignore[method-assign]
    log = EventWriter(folder, "rank-0")
    tail = JsonlTail(folder, "events", from_now=True)
    for number in range(500):
        log.add("printed", text=f"line {number}")
    assert max(sent) <= 9 << 10
    assert [event["text"] for event in tail.read()] == [f"line {number}" for number in range(500)]
    assert [event["text"] for event in read_events(folder)] == [f"line {number}" for number in range(500)]
    # A writer that starts again leaves the segments of the one before it.
    EventWriter(folder, "rank-0").add("printed", text="again")
    assert [event["text"] for event in tail.read()] == ["again"]
    assert len(read_events(folder)) == 501


def test_threads_may_replace_one_file_at_once(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    parts: list[str] = []
    both, replace_path = threading.Barrier(2), Path.replace

    def replace_together(self: Path, target: Any) -> Any:
        # Threads of runs that earlier tests have left open replace files, too.
        if self.parent == tmp_path:
            parts.append(self.name)
            both.wait(30)
        return replace_path(self, target)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(Path, "replace", replace_together)
        list(pool.map(lambda text: folder.write("run.json", text), ["a", "b"]))
    assert folder.read("run.json") in ("a", "b")
    assert len(set(parts)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_threads_that_write_one_file_do_not_take_each_others_temporary_file(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    both_have_written = threading.Barrier(2, timeout=300)
    replace = Path.replace

    def wait_and_replace(self: Path, target: Path) -> Path:
        if self.parent == tmp_path:
            both_have_written.wait()
        return replace(self, target)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(Path, "replace", wait_and_replace)
        list(pool.map(lambda text: folder.write("run.json", text), ["a" * 9, "b" * 9]))
    assert folder.read("run.json") in ("a" * 9, "b" * 9)
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


def test_a_record_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        if self.parent == tmp_path:  # as above
            done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    Folder(str(tmp_path)).write("run.json", "{}", durable=True)
    assert done == ["file", "rename", "folder"]


def test_where_nothing_can_be_appended_each_writer_has_its_file() -> None:
    import fsspec

    fsspec.filesystem("memory").makedirs("/events-test", exist_ok=True)
    folder = Folder("memory://events-test")
    EventWriter(folder, "rank-0").add("a")
    log = EventWriter(folder, "driver")
    log.add("b")
    log.add("c")
    first, second = folder.files("events")
    assert (first.startswith("events-driver-"), second.startswith("events-rank-0-")) == (True, True)
    assert {event["event"] for event in read_events(folder)} == {"a", "b", "c"}


def test_on_a_network_file_system_each_writer_appends_to_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 0 0:1 / / rw - ext4 /dev/a rw\n" + f"2 1 0:2 / {tmp_path}/nfs rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(storage, "_MOUNTS", mounts)
    for place, expected in (
        ("nfs", ["events-driver.jsonl", "events-rank-0.jsonl"]),
        ("disk", ["events.jsonl"]),
    ):
        (tmp_path / place).mkdir()
        folder = Folder(str(tmp_path / place))
        tail = JsonlTail(folder, "events", from_now=True)
        log = EventWriter(folder, "driver")
        log.add("a")
        EventWriter(folder, "rank-0").add("b")
        log.add("c")
        assert folder.files("events") == expected
        assert [event["event"] for event in read_events(folder)] == ["a", "b", "c"]
        assert [event["event"] for event in tail.read()] == ["a", "b", "c"]


def test_threads_of_one_writer_lose_no_event_of_each_other() -> None:
    """Like the thread that polls for notices and the one that trains."""

    second_is_there = threading.Event()

    class Slow(MemoryFileSystem):
        protocol = "lagging"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
            if b"second" not in value:
                # For the second one to overtake it, if it may.
                second_is_there.wait(0.5)
            super().pipe_file(path, value, **options)
            if b"second" in value:
                second_is_there.set()

    fsspec.register_implementation("lagging", Slow)
    log = EventWriter(Folder("lagging://run"), "rank-0")
    first = threading.Thread(target=log.add, args=("first",))
    first.start()
    time.sleep(0.1)
    log.add("second")
    first.join()
    assert [event["event"] for event in read_events(Folder("lagging://run"))] == ["first", "second"]


@pytest.mark.parametrize("place", ["disk", "memory://removing"])
def test_a_folder_is_removed_with_all_that_is_in_it_wherever_it_lies(tmp_path: Path, place: str) -> None:
    folder = Folder(str(tmp_path) if place == "disk" else place)
    below = Folder(folder.path("a/b"))
    below.prepare()
    below.write("x", "1")
    folder.write("kept", "2")
    folder.remove_folder("a")
    folder.remove_folder("a")
    assert (below.read("x"), folder.folders(), folder.read("kept")) == (None, [], "2")


def test_errors_survive_pickling() -> None:
    failed = TrainingFailedError("it failed", rank=1, attempt=2, step=3, worker_traceback="here")
    again = pickle.loads(pickle.dumps(failed))
    assert (str(again), again.rank, again.attempt, again.step, again.worker_traceback) == ("it failed", 1, 2, 3, "here")
    assert str(pickle.loads(pickle.dumps(StorageError("no")))) == "no"


def test_a_scaling_says_what_it_takes_in_total() -> None:
    scaling = Scaling(workers=3, cpus_per_worker=2, gpus_per_worker=1, resources_per_worker={"memory": 10})
    assert scaling.total_resources == {"CPU": 6, "GPU": 3, "memory": 30}


def test_runs_that_lie_far_away_are_read_many_at_a_time(tmp_path: Path) -> None:
    """As in an object store, where each request takes time."""
    record = open_run(experiment(tmp_path)).run.record
    together = threading.Barrier(4)

    class Far(MemoryFileSystem):
        protocol = "far"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        def cat_file(self, *args: Any, **options: Any) -> Any:
            # An error, unless as many come here as wait.
            together.wait(60)
            return super().cat_file(*args, **options)

    fsspec.register_implementation("far", Far)
    for number in range(4):
        started = f"2026-01-01T00:00:0{number}+00:00"
        Folder(f"far://runs/{number}").write("run.json", replace(record, name=str(number), started=started).to_json())
    assert [run.record.name for run in list_runs("far://runs")] == ["3", "2", "1", "0"]
