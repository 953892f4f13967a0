"""Claims the folder of a run or of a sweep for this process: a new one, one that goes on, or one that is refused."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from headway.trainer.config import MAY_CHANGE

from ..config.coerce import parse_yaml
from ..config.experiment import Experiment
from ..config.loader import Difference, differences, non_default_fields, to_plain, to_yaml
from ..errors import RunConflictError
from ..storage.folder import Folder
from ..sweeps.record import Sweep, SweepRecord
from ..sweeps.search import Search
from .ownership import RUN_RECORD
from .provenance import code, git_state, hardware, versions
from .requests import clear_stop_request
from .run import SWEEP_RECORD, Driver, Record, Run, now

# How and for how long a run trains may change while it lives. What it trains may not: the result would be no run's.
_FREE = ("scaling", "retries", "storage", *(f"config.{name}" for name in MAY_CHANGE))
_LIMITS = ("config.max_epochs", "config.max_steps", "config.max_samples", "config.max_tokens")
# Of a search, what may be another thing when the sweep goes on.
_FREE_IN_SEARCH = {"trials", "concurrent", "keep_best_trials"}


@dataclass(frozen=True)
class OpenedRun:
    """A run that is about to be trained, or need not be.

    Attributes:
        run: the run.
        state: "new", "goes on", or "finished": there is nothing to do.
        changes: fields that differ from the last start.
    """

    run: Run
    state: Literal["new", "goes on", "finished"]
    changes: tuple[Difference, ...] = ()


def open_run(
    experiment: Experiment,
    *,
    accept_changes: bool = False,
    take_over: bool = False,
    origin: dict[str, Any] | None = None,
) -> OpenedRun:
    """Claims the run of an experiment for this process, or says that it is finished. Checks that it can be written.

    Args:
        experiment: all that was asked for.
        accept_changes: goes on although what is trained has changed.
        take_over: also takes it from who trains it right now: from a process of a sweep whose driver is gone.
        origin: that of the experiment, for who opens many runs of one.

    Raises:
        RunConflictError: the run was begun with another config, or somebody trains it right now.
        StorageError: the storage cannot be written.
    """
    folder = Folder(experiment.run_dir)
    found = preview_run(experiment, accept_changes=accept_changes, take_over=take_over)
    text = to_yaml(experiment)
    if found is None:
        folder.prepare()
        return OpenedRun(_begin(folder, experiment, text, origin or provenance_of(experiment)), "new")
    if found.state == "finished":
        return found
    run, changes = found.run, found.changes
    folder.prepare()
    folder.write("config.yaml", text)
    # Before the run can be seen to live: what is asked from then on is asked of this life of it.
    clear_stop_request(folder)
    scaling = experiment.scaling
    run.update(
        status="running", reason="", error=None, started=now(), ended=None, driver=Driver.this(),
        workers=scaling.min_workers, min_workers=scaling.min_workers, max_workers=scaling.max_workers,
        changes=[*run.record.changes, *(f"{each.path}: {each.before} -> {each.after}" for each in changes)],
        defaults=non_default_fields(experiment), **(origin or provenance_of(experiment)),
    )  # fmt: skip
    return OpenedRun(run, "goes on", changes)


def preview_run(experiment: Experiment, *, accept_changes: bool = False, take_over: bool = False) -> OpenedRun | None:
    """Return what `open_run` would find, without writing; None if the run would be new.

    Args:
        experiment: what is asked for.
        accept_changes: allow changes of what is trained.
        take_over: allow a run that another process trains.

    Raises:
        RunConflictError: as `open_run` does.
        StorageError: the storage cannot be read.
    """
    folder = Folder(experiment.run_dir)
    if folder.exists(SWEEP_RECORD):
        raise RunConflictError(f"{experiment.name} is a sweep in {experiment.storage}: give the run another name")
    if folder.read(RUN_RECORD) is None:
        return None
    run = Run(experiment.run_dir)
    if run.status == "running" and not run.record.driver.is_this and not take_over:
        driver = run.record.driver
        raise RunConflictError(
            f"{experiment.name} is being trained right now, by process {driver.pid} on {driver.host}"
            f"{driver.retry_hint}; "
            f"wait for it, stop it with `headway runs stop {experiment.name}`, or choose another name"
        )
    changes = tuple(differences(_comparable(run.folder.read("config.yaml") or ""), _comparable(to_yaml(experiment))))
    refused = [change for change in changes if not may_change(change.path)]
    if refused and not accept_changes:
        raise RunConflictError(_conflict(experiment, refused))
    if run.is_finished and not any(_extends(change) for change in changes):
        return OpenedRun(run, "finished", changes)
    return OpenedRun(run, "goes on", changes)


def open_sweep(experiment: Experiment, search: Search) -> Sweep:
    """Claims the sweep of an experiment's name for this process. Checks that it can be written.

    Raises:
        RunConflictError: the name is that of a run, or of a sweep of something else, or somebody leads it right now.
        StorageError: the storage cannot be written.
    """
    folder = Folder(experiment.run_dir)
    if folder.read(RUN_RECORD) is not None:
        raise RunConflictError(f"{experiment.name} is a run in {experiment.storage}: give the sweep another name")
    asked = {
        "search": {**{each.name: _plain(getattr(search, each.name)) for each in fields(search)}},
        "experiment": to_plain(experiment),
        "trials": search.num_trials,
    }
    if folder.read(SWEEP_RECORD) is None:
        folder.prepare()
        record = SweepRecord(
            id=uuid.uuid4().hex[:12], name=experiment.name, created=now(), started=now(), driver=Driver.this(), **asked
        )
        folder.write(SWEEP_RECORD, json.dumps(asdict(record), indent=2) + "\n")
        return Sweep(folder.place)
    sweep = Sweep(folder.place)
    driver = sweep.record.driver
    if sweep.status == "running" and not driver.is_this:
        raise RunConflictError(
            f"{experiment.name} is being swept right now, by process {driver.pid} on {driver.host}"
            f"{driver.retry_hint}; "
            "wait for it, or choose another name"
        )
    _refuse_another(sweep, asked, experiment)
    folder.prepare()
    clear_stop_request(folder)
    # What trials are trained with from now on the record says when one is to be trained.
    del asked["experiment"]
    sweep.update(**asked, status="running", reason="", started=now(), ended=None, driver=Driver.this())
    return sweep


def record_changed_settings(sweep: Sweep, experiment: Experiment) -> list[str]:
    """Has the record of a sweep say what its trials are trained with from now on; returns what of it is new."""
    plain = json.loads(json.dumps(to_plain(experiment)))
    changes = [str(each) for each in differences(sweep.record.experiment, plain) if may_change(each.path)]
    if changes:
        sweep.note("settings_changed", changes=changes)
        sweep.update(experiment=plain)
    return changes


def provenance_of(experiment: Experiment) -> dict[str, Any]:
    """Returns what a record says of where a start comes from. Takes a tenth of a second."""
    return {
        "trainer": to_plain(experiment.trainer), "code": code(experiment.trainer), "working_dir": os.getcwd(),
        "command": sys.argv, "versions": versions(), "git": git_state(), "hardware": hardware(),
    }  # fmt: skip


def _begin(folder: Folder, experiment: Experiment, text: str, origin: dict[str, Any]) -> Run:
    folder.write("config.yaml", text)
    scaling = experiment.scaling
    record = Record(
        id=uuid.uuid4().hex[:12], name=experiment.name, status="running", created=now(), started=now(),
        workers=scaling.min_workers, min_workers=scaling.min_workers, max_workers=scaling.max_workers,
        driver=Driver.this(), defaults=non_default_fields(experiment), **origin,
    )  # fmt: skip
    folder.write(RUN_RECORD, record.to_json())
    return Run(folder.place)


def _comparable(text: str) -> Mapping[str, Any]:
    """A config as text throughout, so that 1 and 1.0 in files of two versions are compared as they were written."""
    plain: Mapping[str, Any] = parse_yaml(text) or {}
    # The class is the same one when its file has moved.
    return {**plain, "trainer": str(plain.get("trainer", "")).rpartition(":")[2]}


def may_change(path: str) -> bool:
    """Whether a run may go on with another value there."""
    return any(path == free or path.startswith(f"{free}.") for free in _FREE)


def _extends(change: Difference) -> bool:
    if change.path not in _LIMITS or change.before == "null":
        return False
    return bool(change.after == "null" or float(change.after) > float(change.before))


def _conflict(experiment: Experiment, refused: list[Difference]) -> str:
    lines = "\n".join(f"  {change.path}: {change.before} -> {change.after}" for change in refused)
    return (
        f"the run {experiment.name} was begun with another config:\n{lines}\n"
        "Give this one another name (name=...), take the changes back, or go on with them by --accept-changes. "
        f"The run lies in {experiment.run_dir}"
    )


def _refuse_another(sweep: Sweep, asked: Mapping[str, Any], experiment: Experiment) -> None:
    before = {"search": sweep.record.search, **sweep.record.experiment}
    after = json.loads(json.dumps({"search": asked["search"], **asked["experiment"]}))
    for each in (before, after):
        # The class is the same one when its file has moved.
        each["trainer"] = str(each["trainer"]).rpartition(":")[2]
    changes = list(differences(before, after))
    refused = [
        change
        for change in changes
        if not (may_change(change.path) or change.path.removeprefix("search.") in _FREE_IN_SEARCH)
    ]
    limits = [change for change in changes if change.path in _LIMITS]
    if limits and (ended := sum(each.has_ended and each.status != "failed" for each in sweep.trials())):
        lines = "\n".join(f"  {change}" for change in limits)
        raise RunConflictError(
            f"{ended} of the trials of {experiment.name} have ended with other limits:\n{lines}\n"
            "Trials of two lengths cannot be compared: give this sweep another name (name=...), or take the changes "
            f"back. The sweep lies in {experiment.run_dir}"
        )
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
    if type(value).__module__.startswith("headway.") and hasattr(value, "__dataclass_fields__"):
        return {
            type(value).__name__: {each.name: _plain(getattr(value, each.name)) for each in fields(value)},
        }
    return to_plain(value)
