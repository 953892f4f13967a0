"""A sweep's folder: its record, and the journal from which it goes on after its driver was killed at any moment.

In `<storage>/<name>/` lie
`sweep.json`: who, when, what was asked for, how it stands; replaced as a whole, by the driver alone;
`events.jsonl`: the journal: what was suggested to which trial, and what came of it;
`trial-000/`, `trial-001/`, ...: the trials, each of them a run.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from headway.trainer.errors import ConfigError
from headway.trainer.result import Status

from .asking import asked_to_stop, withdraw_stop
from .config import differences, to_plain
from .errors import RunConflictError, StorageError
from .events import Event, EventLog, read_events
from .experiment import Experiment
from .lease import RECORD
from .runs import HEARTBEAT_S, SWEEP, Driver, Run, may_change, now
from .search import Search, Values
from .storage import Folder, absolute, join

PRUNED = "the scheduler "
"""What the reason of a run begins with that a scheduler has stopped."""

TrialStatus = Literal["pending", "running"] | Status
# Of a search, what may be another thing when the sweep goes on.
_FREE = {"trials", "concurrent", "keep_best_trials"}


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """What `sweep.json` says. Times are UTC, in ISO 8601.

    Attributes:
        id: unique.
        name: of the sweep and of its folder.
        status: "running" also when the driver died without a word.
        reason: why it ended, in words.
        search, experiment: what was asked for, as plain values.
        trials: how many there will be.
        created, started, ended: the first start, the last one, and its end.
        driver: the process that leads it, or led it last.
    """

    id: str
    name: str
    status: Literal["running"] | Status = "running"
    reason: str = ""
    search: dict[str, Any]
    experiment: dict[str, Any]
    trials: int
    created: str
    started: str
    ended: str | None = None
    driver: Driver

    @classmethod
    def from_json(cls, text: str) -> SweepRecord:
        """Reads a record; fields that a later version added are passed over."""
        plain = json.loads(text)
        known = {each.name for each in fields(cls)}
        settings = {name: value for name, value in plain.items() if name in known}
        return cls(**{**settings, "driver": Driver(**settings["driver"])})


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of a sweep, as its files say.

    Attributes:
        name: of the trial and of its folder.
        index: of its suggestion.
        values: what it tries, by path; a `PBT` changes them.
        status: "pending", "running", or how its run ended.
        reason: why, in words.
        error: what failed, in one line.
        metric: the best value of the sweep's metric in it; None if none was finite.
        steps: optimizer updates.
        metrics: the last value of every metric.
        run_dir: where its run lies.
        best_checkpoint, last_checkpoint: paths in it.
        resume: the checkpoint of another trial that it is to go on from, or "auto".
        has_no_checkpoints: whether the sweep has deleted them, to make room.
    """

    name: str
    index: int
    values: Values
    status: TrialStatus = "pending"
    reason: str = ""
    error: str | None = None
    metric: float | None = None
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    run_dir: str = ""
    best_checkpoint: str | None = None
    last_checkpoint: str | None = None
    resume: str = "auto"
    has_no_checkpoints: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether it is never to be trained again by its sweep."""
        return self.status not in ("pending", "running", "interrupted")


class Sweep:
    """A sweep that has a folder.

    Args:
        sweep_dir: an absolute path or a URI.

    Raises:
        ConfigError: there is no sweep.
    """

    def __init__(self, sweep_dir: str) -> None:
        self.folder = Folder(sweep_dir)
        text = self.folder.read(SWEEP)
        if text is None:
            raise ConfigError(f"there is no sweep in {sweep_dir}")
        try:
            self.record = SweepRecord.from_json(text)
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{self.folder.path(SWEEP)} is damaged ({error}): repair it, or remove the folder"
            ) from error
        self._journal = EventLog(self.folder, "driver")

    @property
    def sweep_dir(self) -> str:
        """Its folder: an absolute path or a URI."""
        return self.folder.place

    @property
    def status(self) -> Literal["running"] | Status:
        """How it stands; "interrupted" if its driver is gone without having said so."""
        if self.record.status == "running" and not self.record.driver.is_alive:
            return "interrupted"
        return self.record.status

    def note(self, kind: str, **details: Any) -> None:
        """Writes into the journal. For the driver alone."""
        self._journal.add(kind, **details)

    def update(self, **changes: Any) -> None:
        """Changes the record, on storage too. For the driver alone."""
        driver = replace(changes.pop("driver", self.record.driver), heartbeat=Driver.this().heartbeat)
        self.record = replace(self.record, driver=driver, **changes)
        self.folder.write(SWEEP, json.dumps(asdict(self.record), indent=2) + "\n")

    def beat(self) -> None:
        """Tells others that the driver lives, if it has been a while."""
        if Driver.this().heartbeat - self.record.driver.heartbeat > HEARTBEAT_S:
            self.update()

    def trials(self) -> list[Trial]:
        """Returns the trials that have been suggested, in that order, each as far as it is."""
        found: dict[str, Trial] = {}
        changed: dict[str, Event] = {}
        ended: dict[str, Event] = {}
        emptied: set[str] = set()
        for event in read_events(self.folder):
            match event["event"]:
                case "trial_suggested":
                    name = event["trial"]
                    found[name] = Trial(
                        name=name, index=event["index"], values=event["values"], run_dir=self.folder.path(name)
                    )
                case "trial_changed":
                    changed[event["trial"]] = event
                case "trial_ended":
                    ended[event["trial"]] = event
                case "checkpoints_deleted":
                    emptied.add(event["trial"])
        trials = [self._as_it_is(trial, changed.get(name), ended.get(name)) for name, trial in found.items()]
        return [_without_checkpoints(trial) if trial.name in emptied else trial for trial in trials]

    def trial_as_it_is(self, trial: Trial) -> Trial:
        """Returns a trial as the files of its run say now."""
        return self._as_it_is(trial, None, None)

    def _as_it_is(self, trial: Trial, change: Event | None, end: Event | None) -> Trial:
        if change is not None:
            saved = any(
                event["event"] == "checkpoint_saved" and event["time"] > change["time"]
                for event in read_events(Folder(trial.run_dir))
            )
            trial = replace(trial, values=change["values"], resume="auto" if saved else change["checkpoint"])
        try:
            run = Run(trial.run_dir)
        except ConfigError:
            run = None
        if run is not None:
            trial = _with_run(trial, run, self.record.search["metric"])
        if end is not None:
            return replace(trial, **{name: end[name] for name in ("status", "reason", "error", "metric")})
        if trial.has_ended and run is not None and _is_unfinished(run):
            return replace(trial, status="interrupted")
        return trial


def open_sweep(experiment: Experiment, search: Search) -> Sweep:
    """Claims the sweep of an experiment's name for this process. Checks that it can be written.

    Raises:
        RunConflictError: the name is that of a run, or of a sweep of something else, or somebody leads it right now.
        StorageError: the storage cannot be written.
    """
    folder = Folder(experiment.run_dir)
    if folder.read(RECORD) is not None:
        raise RunConflictError(f"{experiment.name} is a run in {experiment.storage}: give the sweep another name")
    asked = {
        "search": {**{each.name: _plain(getattr(search, each.name)) for each in fields(search)}},
        "experiment": to_plain(experiment),
        "trials": search.num_trials,
    }
    if folder.read(SWEEP) is None:
        folder.prepare()
        record = SweepRecord(
            id=uuid.uuid4().hex[:12], name=experiment.name, created=now(), started=now(), driver=Driver.this(), **asked
        )
        folder.write(SWEEP, json.dumps(asdict(record), indent=2) + "\n")
        return Sweep(folder.place)
    sweep = Sweep(folder.place)
    driver = sweep.record.driver
    if sweep.status == "running" and driver != replace(Driver.this(), heartbeat=driver.heartbeat):
        raise RunConflictError(
            f"{experiment.name} is being swept right now, by process {driver.pid} on {driver.host}; wait for it, or "
            "choose another name"
        )
    _refuse_another(sweep.record, asked, experiment)
    folder.prepare()
    withdraw_stop(folder)
    sweep.update(**asked, status="running", reason="", started=now(), ended=None, driver=Driver.this())
    return sweep


def list_sweeps(storage: str) -> list[Sweep]:
    """Returns the sweeps of a storage, the last started first; other folders are passed over."""
    place = absolute(storage)
    sweeps = []
    for name in Folder(place).folders():
        try:
            sweeps.append(Sweep(join(place, name)))
        except (ConfigError, StorageError):
            continue
    return sorted(sweeps, key=lambda sweep: sweep.record.started, reverse=True)


def _without_checkpoints(trial: Trial) -> Trial:
    there = [path if path and is_committed(path) else None for path in (trial.best_checkpoint, trial.last_checkpoint)]
    return replace(trial, best_checkpoint=there[0], last_checkpoint=there[1], has_no_checkpoints=True)


def is_committed(path: str) -> bool:
    """Whether a checkpoint is there: one that was pinned stays."""
    return Folder(path).exists("manifest.json")


def _with_run(trial: Trial, run: Run, metric: str) -> Trial:
    record = run.record
    best = record.best_metric if metric.startswith("validation/") else record.metrics.get(metric)
    return replace(
        trial,
        status=run.status,
        reason=run.reason,
        error=record.error,
        metric=best if best is not None and math.isfinite(best) else None,
        steps=record.steps,
        metrics=record.metrics,
        best_checkpoint=record.best_checkpoint,
        last_checkpoint=record.last_checkpoint,
    )


def _is_unfinished(run: Run) -> bool:
    """Whether a run was stopped from outside, and not by a scheduler."""
    stop = asked_to_stop(run.folder)
    return run.record.status == "stopped" and stop is not None and not stop.reason.startswith(PRUNED)


def _refuse_another(record: SweepRecord, asked: Mapping[str, Any], experiment: Experiment) -> None:
    before = {"search": record.search, **record.experiment}
    after = json.loads(json.dumps({"search": asked["search"], **asked["experiment"]}))
    refused = [
        change
        for change in differences(before, after)
        if not (may_change(change.path) or change.path.removeprefix("search.") in _FREE)
    ]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        raise RunConflictError(
            f"the sweep {experiment.name} was begun with other settings:\n{lines}\n"
            f"Give this one another name (name=...), or take the changes back. The sweep lies in {experiment.run_dir}"
        )


def _plain(value: Any) -> Any:
    """A part of a search as plain values; what a value is an instance of goes with it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if type(value).__module__.startswith(__package__ or "headway") and hasattr(value, "__dataclass_fields__"):
        return {
            type(value).__name__: {each.name: _plain(getattr(value, each.name)) for each in fields(value)},
        }
    return to_plain(value)
