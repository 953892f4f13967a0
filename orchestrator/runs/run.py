"""A run: its folder, its record and its status, which outlive Ray and the driver.

In `<storage>/<name>/` lie
`run.json`: who, when, where, how it stands; replaced as a whole, by the driver alone;
`config.yaml`: the whole experiment, enough to start the same run again;
`events.jsonl`: what happened (events.py);
`watch/`: what the ranks of the last attempt did when they were last heard, and the stacks of a hang (watchdog/);
`metrics.jsonl` and `checkpoints/`: the trainer's;
`report.html`: the page that was made of it last (report.py).
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from headway.trainer.errors import ConfigError
from headway.trainer.result import Status

from ..errors import DamagedRecordError, RunConflictError, StorageError
from ..storage.folder import Folder, absolute, join
from .ownership import RUN_RECORD, lease_of, lease_taken, takeover_message
from .requests import read_stop_request

if TYPE_CHECKING:
    from headway.trainer.data.protocols import Guarantee

    from ..config.experiment import Experiment

RunStatus = Literal["running"] | Status

# A driver writes its record this often while it lives; one that has been silent for long is taken for dead.
HEARTBEAT_S = 20.0
_SILENT_S = 90.0
# The record of a sweep, whose trials are runs below it.
SWEEP_RECORD = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The process that leads a run.

    Attributes:
        host, pid: which process it is.
        heartbeat: when it last wrote the record, in seconds since 1970.
    """

    host: str
    pid: int
    heartbeat: float

    @classmethod
    def this(cls) -> Driver:
        """Returns this process."""
        return cls(host=socket.gethostname(), pid=os.getpid(), heartbeat=time.time())

    @property
    def is_this(self) -> bool:
        """Whether it is this process. Its number alone says nothing: a driver in a container often is process 1."""
        return (self.host, self.pid) == (socket.gethostname(), os.getpid())

    @property
    def is_alive(self) -> bool:
        """Whether it may still be there: here by its process, elsewhere by its heartbeat."""
        if self.host == socket.gethostname():
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                pass
        return time.time() - self.heartbeat < _SILENT_S

    @property
    def retry_hint(self) -> str:
        """What to do where it is gone, for people; empty where it is known not to be."""
        if self.host == socket.gethostname():
            return ""
        left_s = max(1.0, self.heartbeat + _SILENT_S - time.time())
        return f" (if that machine is gone, start this again in {left_s:.0f} s)"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What `run.json` says. Times are UTC, in ISO 8601.

    Attributes:
        id: unique; a run of the same name, begun anew, has another one.
        name: of the run and of its folder.
        status: "running" also when the driver died without a word; ask `Run.status`.
        reason: why it ended, in words.
        trainer: target of the class.
        workers: ranks of the last attempt.
        min_workers, max_workers: how many were asked for, the fewest and the most; 0 in records of earlier versions.
        attempts: lives of worker groups so far.
        preemptions, failures: how many of them ended because machines were taken away, and how many by a failure.
        created, started, ended: the first start, the last one, and its end.
        steps, epochs, samples, tokens, metrics: where it stands, as of its end.
        last_checkpoint, best_checkpoint, best_metric, best_step: the same.
        resumed_from: the checkpoint that the last attempt began from.
        data_guarantee: what of its place in the training data a resumed run finds again.
        error: what failed, in one line.
        driver: the process that leads it, or led it last.
        versions: of Python and packages.
        git: commit of the folder that it was started in, and whether that had changes.
        hardware: of the machine that it was started on.
        command: how it was started.
        working_dir: the current directory then, from which relative paths are meant.
        code: digests of the trainer's file ("sha256") and of its methods ("methods", by name), and the "folder" from
            which its module is imported.
        data: what a resumed run compares the training data by: its "guarantee" and its "fingerprint".
        defaults: of the fields of the experiment that have another value, by path; None where there is none.
        changes: fields of the config that were changed between two starts, each as "path: before -> after".
    """

    id: str
    name: str
    status: RunStatus
    reason: str = ""
    trainer: str
    workers: int
    min_workers: int = 0
    max_workers: int = 0
    attempts: int = 0
    preemptions: int = 0
    failures: int = 0
    created: str
    started: str
    ended: str | None = None
    steps: int = 0
    epochs: int = 0
    samples: int = 0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    last_checkpoint: str | None = None
    best_checkpoint: str | None = None
    best_metric: float | None = None
    best_step: int | None = None
    resumed_from: str | None = None
    data_guarantee: Guarantee = "none"
    error: str | None = None
    driver: Driver
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    working_dir: str = ""
    code: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, str | None] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Reads a record; fields that a later version added are passed over."""
        plain = json.loads(text)
        settings = {name: plain[name] for name in cls.__dataclass_fields__.keys() & plain.keys()}
        return cls(**{**settings, "driver": Driver(**settings["driver"])})

    def to_plain(self) -> dict[str, Any]:
        """Returns the record as what JSON can say. Not for changing: `asdict` would copy it, and takes a while."""
        return {**vars(self), "driver": vars(self.driver)}

    def to_json(self) -> str:
        """Returns the record as text."""
        return json.dumps(self.to_plain(), indent=2) + "\n"


class Run:
    """A run that has a folder.

    Args:
        run_dir: an absolute path, a URI, or the folder itself.

    Raises:
        ConfigError: there is no run.
        StorageError: its record cannot be read; a `DamagedRecordError` if that is not for the moment.
    """

    def __init__(self, run_dir: str | Folder) -> None:
        self.folder = Folder(run_dir) if isinstance(run_dir, str) else run_dir
        text = self.folder.read(RUN_RECORD)
        if text is None:
            raise ConfigError(f"there is no run in {self.folder.place}")
        try:
            self.record = Record.from_json(text)
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedRecordError(
                f"{self.folder.path(RUN_RECORD)} is damaged ({error}): repair it, or remove the folder"
            ) from error

    @property
    def run_dir(self) -> str:
        """Its folder: an absolute path or a URI."""
        return self.folder.place

    @property
    def status(self) -> RunStatus:
        """How it stands; "interrupted" if its driver is gone without having said so."""
        if self.record.status == "running" and not self.record.driver.is_alive:
            return "interrupted"
        return self.record.status

    @property
    def reason(self) -> str:
        """Why it stands so, in words."""
        if self.record.status == "running" and self.status != "running":
            driver = self.record.driver
            return f"its driver (process {driver.pid} on {driver.host}) is gone"
        return self.record.reason

    @property
    def is_finished(self) -> bool:
        """Whether starting it again, with the same limits, would train nothing: it has come to its own end."""
        return self.record.status == "completed" or (
            self.record.status == "stopped" and read_stop_request(self.folder) is None
        )

    @property
    def lease(self) -> str:
        """What tells the driver that has claimed the run from every other one."""
        return lease_of(self.record.to_plain())

    def experiment(self, target: str | None = None) -> Experiment:
        """Returns the experiment that was recorded, to start the same run again.

        Args:
            target: where its trainer is now, if not where it was: `file.py:name` or `module:name`.

        Raises:
            ConfigError: the trainer is not there any more, or it has another config.
        """
        # Late, for it imports torch: runs are listed without.
        from ..config.coerce import parse_yaml
        from ..config.loader import from_plain
        from ..config.target import relocate_target

        plain, record = parse_yaml(self.folder.read("config.yaml") or "") or {}, self.record
        if target is None:
            target = relocate_target(
                str(plain.get("trainer", "")),
                working_dir=record.working_dir,
                folder=record.code.get("folder"),
                sha256=record.code.get("sha256"),
            )
        return from_plain({**plain, "trainer": target})

    def check_lease(self) -> None:
        """Makes sure that no other driver has claimed the run since: one that was silent for long is taken for dead.

        Raises:
            RunConflictError: one has.
            StorageError: nobody can tell.
        """
        if lease_taken(self.folder, self.lease, RUN_RECORD):
            raise RunConflictError(takeover_message(self.folder, "run"))

    def update(self, **changes: Any) -> None:
        """Changes the record, on storage too. For the driver alone; with another `driver` this one claims the run.

        Raises:
            RunConflictError: another driver has claimed it since; its record is left alone.
        """
        if "driver" not in changes:
            self.check_lease()
        driver = replace(changes.pop("driver", self.record.driver), heartbeat=time.time())
        self.record = replace(self.record, driver=driver, **changes)
        self.folder.write(RUN_RECORD, self.record.to_json())

    def beat(self) -> None:
        """Tells others that the driver lives, if it has been a while."""
        if time.time() - self.record.driver.heartbeat > HEARTBEAT_S:
            self.update()


def list_runs(storage: str) -> list[Run]:
    """Returns the runs of a storage, the last started first; folders that are no runs are passed over."""
    folder = Folder(absolute(storage))
    found = folder.map(_run_in, map(folder.child, folder.folders()))
    return sorted((run for run in found if run is not None), key=lambda run: run.record.started, reverse=True)


def find_run(name: str, storage: str) -> Run:
    """Returns a run by its name.

    Raises:
        ConfigError: there is none, with the names that there are.
    """
    place = absolute(storage)
    try:
        return Run(join(place, name))
    except ConfigError:
        names = [run.record.name for run in list_runs(place)]
        raise ConfigError(
            f"there is no run {name!r} in {place}; there is {', '.join(names[:10]) if names else 'none at all'}"
        ) from None


def now() -> str:
    """Returns the time as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _run_in(folder: Folder) -> Run | None:
    try:
        return Run(folder)
    except (ConfigError, StorageError):
        return None
