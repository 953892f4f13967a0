"""`rerun(name)`: repeat a run from its record as a new run, and report all differences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from headway.trainer.errors import CheckpointError, ConfigError
from headway.trainer.loop.run_state import COMPONENTS

from ..cluster.ray_env import quiet_environment
from ..config.experiment import Experiment
from ..config.loader import override, parse_overrides
from ..display.console import RunConsole
from ..storage.events import read_events
from ..storage.folder import Folder, absolute, join
from ..train.dry_run import plan
from ..train.fit import fit
from .checkpoints import RunCheckpoints
from .compare import MISSING, Facts, Row, current_facts, differing_facts, recorded_facts
from .ownership import RUN_RECORD
from .result import RunResult
from .resume import ResumeOptions
from .run import SWEEP_RECORD, Run, find_run

# Facts other than config and data that affect a result.
_ENVIRONMENT = ("code", "versions")


def rerun(
    name: str,
    storage: str = "runs",
    *,
    overrides: Sequence[str] = (),
    target: str | None = None,
    strict: bool = False,
    accept_changes: bool = False,
    verbose: bool = False,
    display: RunConsole | None = None,
) -> RunResult:
    """Repeat a run from its record, from its first step, as a new run.

    Differences from the record in config, data, code, versions and machine are shown first; changed data is refused.
    At the end, the weights of both runs are compared.

    Args:
        name: name of the run; `sweep/trial-000` for a trial.
        storage: folder or URI of the run, and of the new one.
        overrides: as in `resolve`; without `name=...` the new run is called NAME-rerun.
        target: new location of the trainer, if it has moved: `file.py:name` or `module:name`.
        strict: also refuse changed code or package versions.
        accept_changes: accept changed data, and data that only the workers can read.
        verbose: show the output of Ray and the workers.
        display: output of the run; by default standard output.

    Raises:
        ConfigError: there is no such run, its trainer is not found, or a difference is refused.
        HeadwayError: as raised by `fit`.
    """
    quiet_environment(verbose=verbose)
    display = display or RunConsole()
    past = _find(name, storage)
    experiment = _new_experiment(past, name, storage, overrides, target)
    start = _start_of(past)
    before = recorded_facts(name, storage)
    now = _data_now(past, experiment, accept_changes=accept_changes)
    rows = list(differing_facts(before, current_facts(experiment, now)))
    display.line(f"repeating {name} as {experiment.name}" + ("" if rows else ": no differences from its record"))
    for row in rows:
        display.line(f"  {_shown(row)}", "dim")
    for change in past.record.changes:
        display.line(
            f"  the config of {name} was changed between starts; repeated with the last one: {change}", "yellow"
        )
    _refuse(past, rows, before, strict=strict, accept_changes=accept_changes)
    result = fit(experiment, resume=start.resume, restore=start.restore, verbose=verbose, display=display)
    if result.status in ("completed", "stopped"):
        display.line(_compare_weights(name, storage, experiment), "bold")
    return result


def _find(name: str, storage: str) -> Run:
    if Folder(join(absolute(storage), name)).exists(SWEEP_RECORD):
        raise ConfigError(f"{name} is a sweep: rerun one of its trials, such as {name}/trial-000")
    return find_run(name, storage)


def _new_experiment(past: Run, name: str, storage: str, overrides: Sequence[str], target: str | None) -> Experiment:
    """Return the recorded experiment under a new name."""
    try:
        found = past.experiment(target)
    except ConfigError as error:
        if target is not None:
            raise
        commit = past.record.git.get("commit")
        code = f", at the commit {commit}" if commit else ""
        raise ConfigError(
            f"{error}. {name} was started in {past.record.working_dir or 'another folder'} on "
            f"{past.record.hardware.get('host', 'another machine')}{code}: change to the folder of the code, or pass "
            "the trainer's location, as in --target file.py:Name"
        ) from error
    found = replace(found, name=f"{name.replace('/', '-')}-rerun", storage=absolute(storage))
    renamed: Experiment = override(found, parse_overrides(overrides))
    if renamed.run_dir == past.run_dir:
        raise ConfigError(f"name={name} is the run itself: use another name, as in name={name}-2")
    if Folder(renamed.run_dir).exists(RUN_RECORD) and Run(renamed.run_dir).is_finished:
        raise ConfigError(
            f"name={renamed.name} is a finished run, so nothing would be trained: use another name, as in "
            f"name={renamed.name}-2"
        )
    return renamed


def _start_of(past: Run) -> ResumeOptions:
    """Return the options with which the run started: from scratch, or from a checkpoint of another run.

    Raises:
        ConfigError: that checkpoint does not exist or is unknown.
    """
    events, name = read_events(past.folder), past.record.name
    for event in reversed([event for event in events if event["event"] == "driver_started"]):
        resume = event.get("resume")
        # Only a start from scratch or from another run is the origin of the run's state.
        if resume == "never":
            return ResumeOptions()
        if resume is not None and _is_of_other_run(resume, past):
            if not Folder(resume).exists("manifest.json"):
                raise ConfigError(f"{name} started from the checkpoint {resume}, which does not exist: restore it")
            return ResumeOptions(resume=resume, restore=tuple(event.get("restore", COMPONENTS)))
    # Earlier versions did not record `resume`.
    began = next((event["step"] for event in events if event["event"] == "training"), 0)
    last = past.record.resumed_from
    if began == 0 and not (last and _is_of_other_run(last, past)):
        return ResumeOptions()
    if began and last and _is_of_other_run(last, past) and Folder(last).exists("manifest.json"):
        return ResumeOptions(resume=last)
    raise ConfigError(
        f"{name} started at step {began} from a checkpoint of another run ({last or 'not recorded'}), which is gone or "
        "whose restored parts were not recorded: use `headway fit --resume PATH`, with --restore for a part of it"
    )


def _is_of_other_run(checkpoint: str, past: Run) -> bool:
    return not checkpoint.startswith(f"{past.run_dir}/")


def _data_now(past: Run, experiment: Experiment, *, accept_changes: bool) -> dict[str, str | None]:
    """Return the identity of the current training data, without reading rows; empty if unavailable but accepted."""
    try:
        train = plan(experiment).estimate.train
    except ConfigError as error:
        if accept_changes:
            return {}
        where = past.record.working_dir
        # Only errors of the data have a cause.
        if error.__cause__ is None or not where or where == os.getcwd():
            raise
        raise ConfigError(f"{error} (relative paths refer to {where}, not to {os.getcwd()})") from error
    return {"guarantee": train.guarantee, "fingerprint": train.fingerprint}


def _refuse(past: Run, rows: Sequence[Row], before: Facts, *, strict: bool, accept_changes: bool) -> None:
    data = [row for row in rows if row[0] == "data" and row[2] != MISSING]
    if data and not accept_changes:
        raise ConfigError(
            f"the training data differs from that of {past.record.name}: {_list(data)}. Restore it, or pass "
            "--accept-changes to train on the current data"
        )
    if not strict:
        return
    unknown = [part for part in ("data", *_ENVIRONMENT) if not any(before[part].values())]
    if unknown:
        raise ConfigError(f"{past.record.name} has no record of its {', '.join(unknown)}, which --strict requires")
    if others := [row for row in rows if row[0] in ("data", *_ENVIRONMENT)]:
        raise ConfigError(
            f"--strict: {past.record.name} ran with different code or packages: {_list(others)}. Restore them, or omit "
            "--strict"
        )


def _compare_weights(name: str, storage: str, experiment: Experiment) -> str:
    """Return a line on whether the newest checkpoints of both runs have the same weights."""
    try:
        both = [RunCheckpoints.of(name, storage), RunCheckpoints.of(experiment.name, experiment.storage)]
        newest = [each.entries[-1] for each in both]
        digests = [each.digest(entry) for each, entry in zip(both, newest, strict=True)]
    except (ConfigError, CheckpointError) as error:
        return f"the weights cannot be compared with those of {name}: {error}"
    steps = [entry.checkpoint.step if entry.checkpoint else None for entry in newest]
    if steps[0] != steps[1]:
        return f"the weights cannot be compared: {name} reached step {steps[0]}, this run step {steps[1]}"
    if digests[0] == digests[1]:
        return f"the same weights as {name} at step {steps[0]}, bit for bit: {digests[0]}"
    return f"different weights than {name} at step {steps[0]}: {digests[1]}, not {digests[0]}"


def _shown(row: Row) -> str:
    part, field, before, after = row
    return f"{part} {field}: {before} -> {after}"


def _list(rows: Sequence[Row]) -> str:
    return "; ".join(map(_shown, rows))
