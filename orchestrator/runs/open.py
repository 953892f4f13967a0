"""Open a run or a sweep for this process: create, resume or refuse it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headway.trainer.config import MAY_CHANGE
from headway.trainer.ownership.claim import OwnedByAnotherError
from headway.trainer.redaction import redact_command, secret_paths

from ..config.coerce import parse_yaml
from ..config.experiment import Experiment
from ..config.loader import Difference, differences, non_default_fields, to_plain, to_yaml
from ..errors import RunConflictError
from ..storage.folder import Folder
from ..sweeps.record import SEARCHER_STATE, Sweep, SweepRecord
from ..sweeps.search import MUTABLE, Search
from .ownership import RUN_RECORD, check_not_owned, own_folder
from .provenance import code, git_state, hardware, versions
from .requests import clear_stop_request
from .run import SWEEP_RECORD, Driver, Record, Run, now

# Fields that may differ when a run is resumed: how it runs and for how long, not what it learns.
_MUTABLE = ("scaling", "retries", "storage", *(f"config.{name}" for name in MAY_CHANGE))
_LIMITS = ("config.max_epochs", "config.max_steps", "config.max_samples", "config.max_tokens")


RunState = Literal["new", "resuming", "finished"]


@dataclass(frozen=True)
class OpenedRun:
    """A run that this process has opened.

    Attributes:
        run: the run.
        state: "new", "resuming", or "finished" if there is nothing to train.
        changes: fields of the config that differ from the last start.
    """

    run: Run
    state: RunState
    changes: tuple[Difference, ...] = ()


def open_run(
    experiment: Experiment,
    *,
    accept_changes: bool = False,
    take_over: bool = False,
    provenance: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> OpenedRun:
    """Take the lease on a run, unless it is finished. Checks that its folder can be written.

    The caller ends it by `Run.release`.

    Args:
        experiment: the experiment.
        accept_changes: resume although the config has changed.
        take_over: also take the lease from a live process, such as a trial of a sweep whose driver is gone.
        provenance: the output of `provenance_of`, if already known.
        say: is given a line before a wait for the heartbeats of a driver on another machine.

    Raises:
        RunConflictError: the run has another config, or is being trained by another process.
        StorageError: the storage cannot be written.
    """
    folder = Folder(experiment.run_dir)
    with _named_conflict(experiment):
        if not take_over:
            check_not_owned(folder, watch=False)
        found = _inspect(experiment, accept_changes=accept_changes)
        if found is not None and found.state == "finished":
            return found
        folder.prepare()
        ownership = own_folder(folder, say=say, take_over=take_over)
    try:
        # Again, because another process may have ended the run in the meantime.
        found = _inspect(experiment, accept_changes=accept_changes)
        if found is not None and found.state == "finished":
            ownership.release()
            return found
        opened = _begin(experiment, folder, found, claim=ownership.id, provenance=provenance)
    except BaseException:
        ownership.release()
        raise
    opened.run.ownership = ownership
    return opened


def _begin(
    experiment: Experiment, folder: Folder, found: OpenedRun | None, *, claim: str, provenance: dict[str, Any] | None
) -> OpenedRun:
    """Write the record of a new start."""
    scaling, provenance = experiment.scaling, provenance or provenance_of(experiment)
    folder.write("config.yaml", to_yaml(experiment, trainer=provenance["trainer"]), durable=True)
    start: dict[str, Any] = {
        "status": "running", "started": now(), "driver": Driver.this(), "claim": claim, "workers": scaling.min_workers,
        "min_workers": scaling.min_workers, "max_workers": scaling.max_workers,
        "defaults": non_default_fields(experiment), **provenance,
    }  # fmt: skip
    if found is None:
        record = Record(id=uuid.uuid4().hex[:12], name=experiment.name, created=start["started"], **start)
        folder.write(RUN_RECORD, record.to_json(), durable=True)
        return OpenedRun(Run(folder.place), "new")
    run = found.run
    # Must precede the status "running": later requests are meant for this start.
    clear_stop_request(folder)
    changes = [f"{each.path}: {each.before} -> {each.after}" for each in found.changes]
    run.update(**start, reason="", error=None, ended=None, changes=[*run.record.changes, *changes])
    return found


def preview_run(experiment: Experiment, *, accept_changes: bool = False) -> OpenedRun | None:
    """Return what `open_run` would find, without writing; None if the run would be new.

    Args:
        experiment: the experiment.
        accept_changes: as for `open_run`.

    Raises:
        RunConflictError: as `open_run` does.
        StorageError: the storage cannot be read.
    """
    with _named_conflict(experiment):
        check_not_owned(Folder(experiment.run_dir), watch=True)
    return _inspect(experiment, accept_changes=accept_changes)


def _inspect(experiment: Experiment, *, accept_changes: bool) -> OpenedRun | None:
    """Return the run if it exists.

    Raises:
        RunConflictError: it has another config, or there is a sweep.
    """
    folder = Folder(experiment.run_dir)
    if folder.exists(SWEEP_RECORD):
        raise RunConflictError(f"name={experiment.name} is a sweep in {experiment.storage}: use another name")
    if folder.read(RUN_RECORD) is None:
        return None
    run = Run(experiment.run_dir)
    changes = tuple(differences(_comparable(run.folder.read("config.yaml") or ""), _comparable(to_yaml(experiment))))
    refused = [change for change in changes if not may_change(change.path)]
    if refused and not accept_changes:
        raise RunConflictError(_conflict(experiment, refused))
    if run.is_finished and not any(_raises_limit(change) for change in changes):
        return OpenedRun(run, "finished", changes)
    return OpenedRun(run, "resuming", changes)


@contextlib.contextmanager
def _named_conflict(experiment: Experiment) -> Iterator[None]:
    """Add to the error for an owned folder what to do about a run or a sweep."""
    try:
        yield
    except OwnedByAnotherError as error:
        raise RunConflictError(
            f"{experiment.name} is being trained by {error.owner}: wait for it, stop it with `headway runs stop "
            f"{experiment.name}`, or use another name (name=...)"
        ) from error


def open_sweep(experiment: Experiment, search: Search, *, say: Callable[[str], None] = lambda _: None) -> Sweep:
    """Take the lease on a sweep. Checks that its folder can be written. The caller ends it by `Sweep.release`.

    Args:
        experiment: the experiment.
        search: the search.
        say: as for `open_run`.

    Raises:
        RunConflictError: the name belongs to a run, the sweep has trials with other settings, or another process drives
            it.
        StorageError: the storage cannot be written.
    """
    folder = Folder(experiment.run_dir)
    if folder.read(RUN_RECORD) is not None:
        raise RunConflictError(f"name={experiment.name} is a run in {experiment.storage}: use another name")
    settings = {
        "search": search.to_plain(),
        "experiment": to_plain(experiment),
        "trials": search.num_trials,
    }
    with _named_conflict(experiment):
        check_not_owned(folder, watch=False)
        if folder.read(SWEEP_RECORD) is not None:
            _can_resume_sweep(Sweep(folder.place), settings, experiment)
        folder.prepare()
        ownership = own_folder(folder, say=say)
    try:
        sweep = _begin_sweep(experiment, folder, settings, claim=ownership.id)
    except BaseException:
        ownership.release()
        raise
    sweep.ownership = ownership
    return sweep


def _begin_sweep(experiment: Experiment, folder: Folder, settings: dict[str, Any], *, claim: str) -> Sweep:
    """Write the record of a new start of a sweep."""
    sweep = Sweep(folder.place) if folder.read(SWEEP_RECORD) is not None else None
    resumes = sweep is not None and _can_resume_sweep(sweep, settings, experiment)
    clear_stop_request(folder)
    if sweep is None or not resumes:
        # From a start with other settings.
        folder.remove(SEARCHER_STATE)
        record = SweepRecord(
            id=uuid.uuid4().hex[:12],
            name=experiment.name,
            created=now(),
            started=now(),
            driver=Driver.this(),
            claim=claim,
            **settings,
        )
        folder.write(SWEEP_RECORD, record.to_json(), durable=True)
        return Sweep(folder.place)
    # `record_changed_settings` updates the experiment before a trial is trained.
    del settings["experiment"]
    sweep.update(**settings, status="running", reason="", started=now(), ended=None, driver=Driver.this(), claim=claim)
    return sweep


def record_changed_settings(sweep: Sweep, experiment: Experiment) -> list[str]:
    """Update the experiment in a sweep's record to the settings of its next trials; return the changes."""
    plain = json.loads(json.dumps(to_plain(experiment)))
    changes = [str(each) for each in differences(sweep.record.experiment, plain) if may_change(each.path)]
    if changes:
        sweep.note("settings_changed", changes=changes)
        sweep.update(experiment=plain)
    return changes


def provenance_of(experiment: Experiment) -> dict[str, Any]:
    """Return the code, command, versions and machine of this start for its record. Takes 0.1 s."""
    return {
        "trainer": to_plain(experiment.trainer), "code": code(experiment.trainer), "working_dir": os.getcwd(),
        "command": redact_command(sys.argv, secret_paths(experiment)),
        "versions": versions(), "git": git_state(), "hardware": hardware(),
    }  # fmt: skip


def _comparable(text: str) -> Mapping[str, Any]:
    """Return a config with scalars as text: 1 and 1.0 differ."""
    plain: Mapping[str, Any] = parse_yaml(text) or {}
    # Only the class name: its file may have moved.
    return {**plain, "trainer": str(plain.get("trainer", "")).rpartition(":")[2]}


def may_change(path: str) -> bool:
    """Return whether a run may be resumed with another value of this field."""
    return any(path == each or path.startswith(f"{each}.") for each in _MUTABLE)


def _raises_limit(change: Difference) -> bool:
    if change.path not in _LIMITS or change.before == "null":
        return False
    return bool(change.after == "null" or float(change.after) > float(change.before))


def _conflict(experiment: Experiment, refused: list[Difference]) -> str:
    lines = "\n".join(f"  {change.path}: {change.before} -> {change.after}" for change in refused)
    return (
        f"the run {experiment.name} was started with another config:\n{lines}\n"
        "Use another name (name=...), revert the changes, or accept them (--accept-changes, in Python "
        f"accept_changes=True). The run is in {experiment.run_dir}"
    )


def _can_resume_sweep(sweep: Sweep, settings: Mapping[str, Any], experiment: Experiment) -> bool:
    """Return False if a sweep has other settings but no trial yet, so that its record may be replaced.

    Raises:
        RunConflictError: it has other settings, and trials.
    """
    before = {"search": {**Search.plain_defaults(), **sweep.record.search}, **sweep.record.experiment}
    after = json.loads(json.dumps({"search": settings["search"], **settings["experiment"]}))
    for each in (before, after):
        # Only the class name: its file may have moved.
        each["trainer"] = str(each["trainer"]).rpartition(":")[2]
    changes = list(differences(before, after))
    refused = [
        change
        for change in changes
        if not (may_change(change.path) or change.path.removeprefix("search.").split(".")[0] in MUTABLE)
    ]
    limits = [change for change in changes if change.path in _LIMITS]
    if limits and (ended := sum(each.has_ended and each.status != "failed" for each in sweep.trials())):
        lines = "\n".join(f"  {change}" for change in limits)
        raise RunConflictError(
            f"{ended} trials of {experiment.name} have ended with other limits:\n{lines}\n"
            "Trials of different lengths cannot be compared: use another name (name=...), or revert the changes. "
            f"The sweep is in {experiment.run_dir}"
        )
    if refused and not sweep.trials():
        return False
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        raise RunConflictError(
            f"the sweep {experiment.name} was started with other settings:\n{lines}\n"
            f"Use another name (name=...), or revert the changes. The sweep is in {experiment.run_dir}"
        )
    return True
