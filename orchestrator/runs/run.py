"""A run: its folder, record and status, which outlive Ray and the driver.

The files in `<storage>/<name>/`:
`run.json`: the record, which only the driver replaces, atomically;
`config.yaml`: the whole experiment, enough to start the run again;
`events.jsonl`, on a network file system or an object store `events-<writer>.jsonl`: the events (storage/events.py);
`owner/`: the claim of the process that owns the run (ownership.py);
`watch/`: the last heartbeats of the ranks, and the stacks of a hang (watchdog/);
`metrics.jsonl` and `checkpoints/`: written by the trainer;
`report.html`: the last report (reports/run.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

from headway.trainer.errors import ConfigError
from headway.trainer.ownership.claim import Ownership
from headway.trainer.ownership.process import ProcessId
from headway.trainer.result import Status

from ..errors import DamagedRecordError, RunConflictError, StorageError
from ..storage.folder import Folder, absolute, join
from .ownership import RUN_RECORD, lease_of, lease_taken, takeover_message
from .requests import read_stop_request

if TYPE_CHECKING:
    from headway.trainer.data.protocols import Guarantee

    from ..config.experiment import Experiment

RunStatus = Literal["running"] | Status

# A driver writes its record this often, and on another machine is shown as dead after SILENT_S without a heartbeat.
HEARTBEAT_S = 20.0
SILENT_S = 90.0
# The record in the folder of a sweep, which also contains the folders of its trials.
SWEEP_RECORD = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The process that drives a run.

    Attributes:
        host, pid, pids, process_started: identify the process, as in `ProcessId`.
        heartbeat: when it last wrote the record, in seconds since 1970 by its own clock.
    """

    host: str
    pid: int
    heartbeat: float
    pids: str = ""
    process_started: str = ""

    @classmethod
    def this(cls) -> Driver:
        """Return this process."""
        me = ProcessId.this()
        return cls(host=me.host, pid=me.pid, pids=me.pids, process_started=me.started, heartbeat=time.time())

    @property
    def process(self) -> ProcessId:
        """Its identity."""
        return ProcessId(host=self.host, pid=self.pid, pids=self.pids, started=self.process_started)

    @property
    def is_alive(self) -> bool:
        """Whether it seems to be alive, for display: for another machine by its clock, which may be wrong.

        Who owns a run is decided by the claims on its folder (ownership.py).
        """
        known = self.process.is_alive()
        return time.time() - self.heartbeat < SILENT_S if known is None else known


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """What the records of a run and of a sweep have in common. Times are UTC, in ISO 8601.

    Attributes:
        id: unique id; a new run of the same name has another one.
        name: name of the run or the sweep, and of its folder.
        status: still "running" after the driver died; use `Run.status`.
        reason: why it ended, as text.
        created, started, ended: time of the first start, of the last start, and of its end.
        driver: the process that drives it or drove it last.
        claim: id of that process's claim on the folder.
    """

    id: str
    name: str
    status: RunStatus = "running"
    reason: str = ""
    created: str
    started: str
    ended: str | None = None
    driver: Driver
    claim: str = ""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a record, ignoring unknown fields of later versions."""
        plain = json.loads(text)
        settings = {name: plain[name] for name in cls.__dataclass_fields__.keys() & plain.keys()}
        return cls(**{**settings, "driver": Driver(**settings["driver"])})

    def to_plain(self) -> dict[str, Any]:
        """Return the record as JSON values that must not be modified: `asdict`, which copies, is slow."""
        return {**vars(self), "driver": vars(self.driver)}

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(self.to_plain(), indent=2) + "\n"


@dataclass(frozen=True, kw_only=True)
class Record(BaseRecord):
    """The content of `run.json`.

    Attributes:
        trainer: target of the class.
        workers: ranks of the last attempt.
        min_workers, max_workers: the fewest and the most workers of the config; 0 in records of earlier versions.
        attempts: number of worker groups so far.
        preemptions, failures: number of attempts that ended by preemption, and by a failure.
        steps, epochs, samples, tokens, metrics: progress at the end.
        last_checkpoint, best_checkpoint, best_metric, best_step: checkpoints at the end.
        resumed_from: the checkpoint from which the last attempt resumed.
        data_guarantee: how exactly a resumed run finds its position in the training data.
        error: the failure as one line.
        versions: of Python and packages.
        git: commit of the current directory, and whether it had changes.
        hardware: the machine on which it was started.
        command: command line of the driver.
        working_dir: current directory of the driver, to which relative paths refer.
        code: digests of the trainer's file ("sha256") and of its methods ("methods", by name), and the "folder" from
            which its module is imported.
        data: identity of the training data: its "guarantee" and "fingerprint", and "changes": accepted ones of a
            mixture's weights.
        defaults: defaults of the experiment's fields that have another value, by path; None for a field without one.
        changes: config fields that changed between starts, each as "path: before -> after".
    """

    trainer: str
    workers: int
    min_workers: int = 0
    max_workers: int = 0
    attempts: int = 0
    preemptions: int = 0
    failures: int = 0
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
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    working_dir: str = ""
    code: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, str | None] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)

    def all_changes(self) -> list[str]:
        """Return a line for every change that a start has accepted, of the config and of the data."""
        return [*self.changes, *self.data.get("changes", ())]


RecordT = TypeVar("RecordT", bound=BaseRecord)


class RecordedFolder(Generic[RecordT]):
    """The folder of a run or a sweep: its record, which only the driver that owns it writes.

    Args:
        place: an absolute path, a URI, or the folder itself.

    Attributes:
        ownership: this process's claim on the folder; None if it only reads.

    Raises:
        ConfigError: there is no run or no sweep.
        StorageError: its record cannot be read; a `DamagedRecordError` if it cannot be parsed.
    """

    _KIND: ClassVar[str]
    _FILE: ClassVar[str]
    _record_type: type[RecordT]

    def __init__(self, place: str | Folder) -> None:
        self.folder = Folder(place) if isinstance(place, str) else place
        self.ownership: Ownership | None = None
        text = self.folder.read(self._FILE)
        if text is None:
            raise ConfigError(f"there is no {self._KIND} in {self.folder.place}")
        try:
            self.record = self._record_type.from_json(text)
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedRecordError(
                f"{self.folder.path(self._FILE)} is damaged ({error}): repair it, or remove the folder"
            ) from error

    @property
    def status(self) -> RunStatus:
        """The status; "interrupted" if the driver died without recording the end."""
        if self.record.status == "running" and not self.record.driver.is_alive:
            return "interrupted"
        return self.record.status

    @property
    def lease(self) -> str:
        """The lease of the driver that owns the folder."""
        return lease_of(self.record.to_plain())

    def check_lease(self) -> None:
        """Check that no other driver has taken the lease, as it may after this one missed its heartbeats.

        Raises:
            RunConflictError: another driver owns the folder.
            StorageError: the record cannot be read.
        """
        if lease_taken(self.folder, self.lease, self._FILE):
            raise RunConflictError(takeover_message(self.folder, self._KIND))

    def update(self, **changes: Any) -> None:
        """Change the record and write it. Only the driver may call this; passing `driver` takes the lease.

        Raises:
            RunConflictError: another driver has taken the lease; its record is not changed.
        """
        if "driver" not in changes:
            self.check_lease()
        driver = replace(changes.pop("driver", self.record.driver), heartbeat=time.time())
        self.record = replace(self.record, driver=driver, **changes)
        self.folder.write(self._FILE, self.record.to_json(), durable=True)

    def release(self) -> None:
        """Give the folder up, at the end of a start, so that another process may start it."""
        if self.ownership is not None:
            self.ownership.release()

    def beat(self) -> None:
        """Write the record with a new heartbeat, if one is due."""
        if time.time() - self.record.driver.heartbeat > HEARTBEAT_S:
            self.update()


class Run(RecordedFolder[Record]):
    """A run in its folder.

    Args:
        place: an absolute path, a URI, or the folder itself.

    Attributes:
        record: its record.

    Raises:
        ConfigError: there is no run.
        StorageError: its record cannot be read; a `DamagedRecordError` if it cannot be parsed.
    """

    record: Record
    _KIND, _FILE, _record_type = "run", RUN_RECORD, Record

    @property
    def run_dir(self) -> str:
        """The run's folder, an absolute path or a URI."""
        return self.folder.place

    @property
    def reason(self) -> str:
        """The reason of the status, as text."""
        if self.record.status == "running" and self.status != "running":
            driver = self.record.driver
            return f"its driver (process {driver.pid} on {driver.host}) is gone"
        return self.record.reason

    @property
    def is_finished(self) -> bool:
        """Whether a start with the same limits would train nothing."""
        return self.record.status == "completed" or (
            self.record.status == "stopped" and read_stop_request(self.folder) is None
        )

    def experiment(self, target: str | None = None) -> Experiment:
        """Return the recorded experiment, to start the same run again.

        Args:
            target: where the trainer is now, if it has moved: `file.py:name` or `module:name`.

        Raises:
            ConfigError: the trainer is not found, or takes another config.
        """
        # Imported here because these import torch, and runs are listed without it.
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


def list_runs(storage: str) -> list[Run]:
    """Return the runs of a storage, last started first. Folders that are not runs are ignored."""
    return list_folders(Run, storage)


FolderT = TypeVar("FolderT", bound=RecordedFolder[Any])


def list_folders(kind: type[FolderT], storage: str, *, but: Collection[str] = ()) -> list[FolderT]:
    """Return the runs or the sweeps of a storage, last started first. Other folders are ignored.

    Args:
        kind: `Run` or `Sweep`.
        storage: folder or URI.
        but: names of folders to ignore without a look into them.
    """

    def look(folder: Folder) -> FolderT | None:
        try:
            return kind(folder)
        except (ConfigError, StorageError):
            return None

    folder = Folder(absolute(storage))
    found = folder.map(look, [folder.child(name) for name in folder.folders() if name not in but])
    return sorted((each for each in found if each is not None), key=lambda each: each.record.started, reverse=True)


def find_run(name: str, storage: str) -> Run:
    """Return a run by its name.

    Raises:
        ConfigError: there is none; the message lists the existing names.
    """
    place = absolute(storage)
    try:
        return Run(join(place, name))
    except ConfigError:
        if "checkpoints" in Folder(join(place, name)).folders():
            raise ConfigError(
                f"{join(place, name)} has no record, because it was trained without `headway fit`: see its "
                f"metrics.jsonl, and `headway checkpoints ls {name}`"
            ) from None
        parent, _, own_name = absolute(name).rstrip("/").rpartition("/")
        if "/" in name and "checkpoints" in Folder(join(parent, own_name)).folders():
            storage_option = "" if parent == place else f" and --storage {parent}"
            raise ConfigError(f"{name} is the folder of a run: give its name {own_name!r}{storage_option}") from None
        names = [run.record.name for run in list_runs(place)]
        raise ConfigError(
            f"there is no run {name!r} in {place}; existing runs: {', '.join(names[:10]) or 'none'}"
        ) from None


def now() -> str:
    """Return the current time in the format of records."""
    return datetime.now(UTC).isoformat(timespec="seconds")
