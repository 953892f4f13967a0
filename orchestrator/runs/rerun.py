"""`rerun(name)`: a run started again from its record, with every difference named before it and at its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from headway.trainer.errors import ConfigError
from headway.trainer.loop.run_state import COMPONENTS

from ..cli.console import RunConsole
from ..cluster.ray_env import quiet_environment
from ..config.experiment import Experiment
from ..config.loader import override, parse_overrides
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

# What a result depends on besides the config and the data.
_SURROUNDINGS = ("code", "versions")


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
    """Trains a run again, from its beginning, as a new run, by what its record says.

    Before it starts, every difference from the record is shown: of the config, the data, the code, the versions and the
    machine. Other data is refused. At the end the weights of both runs are compared.

    Args:
        name: of the run; `sweep/trial-000` of a trial.
        storage: folder or URI that holds it; the new run lies there, too.
        overrides: as those of `resolve`; without `name=...` the new run is called NAME-rerun.
        target: where the trainer is now, if not where it was: `file.py:name` or `module:name`.
        strict: refuses other code and other versions of packages as well.
        accept_changes: trains on other data, too, and on data that only the workers can see.
        verbose: shows what Ray and the workers print.
        display: where to show it; by default on standard output.

    Raises:
        ConfigError: there is no such run, its trainer is not found, or what differs is refused.
        HeadwayError: whatever `fit` raises.
    """
    quiet_environment(verbose=verbose)
    display = display or RunConsole()
    past = _find(name, storage)
    experiment = _again(past, name, storage, overrides, target)
    begin = _beginning(past)
    before = recorded_facts(name, storage)
    now = _data_now(past, experiment, accept_changes=accept_changes)
    rows = list(differing_facts(before, current_facts(experiment, now)))
    display.line(f"{name} again, as {experiment.name}" + ("" if rows else ": nothing differs from its record"))
    for row in rows:
        display.line(f"  {_told(row)}", "dim")
    for change in past.record.changes:
        display.line(f"  while {name} trained, its config was changed; now from the beginning: {change}", "yellow")
    _refuse(past, rows, before, strict=strict, accept_changes=accept_changes)
    result = fit(experiment, resume=begin.resume, restore=begin.restore, verbose=verbose, display=display)
    if result.status in ("completed", "stopped"):
        display.line(_verdict(name, storage, experiment), "bold")
    return result


def _find(name: str, storage: str) -> Run:
    if Folder(join(absolute(storage), name)).exists(SWEEP_RECORD):
        raise ConfigError(f"{name} is a sweep: run one of its trials again, as {name}/trial-000")
    return find_run(name, storage)


def _again(past: Run, name: str, storage: str, overrides: Sequence[str], target: str | None) -> Experiment:
    """The recorded experiment under a name of its own."""
    try:
        found = past.experiment(target)
    except ConfigError as error:
        if target is not None:
            raise
        commit = past.record.git.get("commit")
        code = f", at the commit {commit}" if commit else ""
        raise ConfigError(
            f"{error}. {name} was started in {past.record.working_dir or 'another folder'} on "
            f"{past.record.hardware.get('host', 'another machine')}{code}: go to the folder in which the code lies "
            "now, or say where its trainer is, as in --target file.py:Name"
        ) from error
    found = replace(found, name=f"{name.replace('/', '-')}-rerun", storage=absolute(storage))
    again: Experiment = override(found, parse_overrides(overrides))
    if again.run_dir == past.run_dir:
        raise ConfigError(f"the new run would be {name} itself: give it another name, as in name={name}-2")
    if Folder(again.run_dir).exists(RUN_RECORD) and Run(again.run_dir).is_finished:
        raise ConfigError(
            f"{again.name} is finished already, so that nothing would be trained and nothing shown of what the code "
            f"does now: give the new run another name, as in name={again.name}-2"
        )
    return again


def _beginning(past: Run) -> ResumeOptions:
    """What the run began with: nothing, or a checkpoint of another one.

    Raises:
        ConfigError: it cannot begin so again.
    """
    events, name = read_events(past.folder), past.record.name
    for event in reversed([event for event in events if event["event"] == "driver_started"]):
        resume = event.get("resume")
        # The last start that began anew is the beginning of what there is; one that went back in the run is not.
        if resume == "never":
            return ResumeOptions()
        if resume is not None and _is_of_another(resume, past):
            if not Folder(resume).exists("manifest.json"):
                raise ConfigError(f"{name} began with {resume}, which is gone: bring it back")
            return ResumeOptions(resume=resume, restore=tuple(event.get("restore", COMPONENTS)))
    # Earlier versions wrote down neither.
    began = next((event["step"] for event in events if event["event"] == "training"), 0)
    last = past.record.resumed_from
    if began == 0 and not (last and _is_of_another(last, past)):
        return ResumeOptions()
    if began and last and _is_of_another(last, past) and Folder(last).exists("manifest.json"):
        return ResumeOptions(resume=last)
    raise ConfigError(
        f"{name} began at step {began} with a checkpoint of another run ({last or 'not named'}), and its record does "
        "not say with how much of it, or it is gone: give it to `headway fit --resume`, with --restore for a part of it"
    )


def _is_of_another(checkpoint: str, past: Run) -> bool:
    return not checkpoint.startswith(f"{past.run_dir}/")


def _data_now(past: Run, experiment: Experiment, *, accept_changes: bool) -> dict[str, str | None]:
    """The identity of the training data here and now; reads no row. Empty where any will do, and there is none here."""
    try:
        train = plan(experiment).estimate.train
    except ConfigError as error:
        if accept_changes:
            return {}
        where = past.record.working_dir
        # It has a cause if the data has something against it.
        if error.__cause__ is None or not where or where == os.getcwd():
            raise
        raise ConfigError(f"{error} (its relative paths are meant from {where}, and this is {os.getcwd()})") from error
    return {"guarantee": train.guarantee, "fingerprint": train.fingerprint}


def _refuse(past: Run, rows: Sequence[Row], before: Facts, *, strict: bool, accept_changes: bool) -> None:
    data = [row for row in rows if row[0] == "data" and row[2] != MISSING]
    if data and not accept_changes:
        raise ConfigError(
            f"the training data is not that of {past.record.name}: {_list(data)}. Bring it back as it was, or train on "
            "what there is now: --accept-changes"
        )
    if not strict:
        return
    unknown = [part for part in ("data", *_SURROUNDINGS) if not any(before[part].values())]
    if unknown:
        raise ConfigError(f"{past.record.name} has no record of its {', '.join(unknown)}, which --strict asks for")
    if others := [row for row in rows if row[0] in ("data", *_SURROUNDINGS)]:
        raise ConfigError(
            f"--strict: not all is as it was for {past.record.name}: {_list(others)}. Go back to its code and "
            "packages, or leave --strict out"
        )


def _verdict(name: str, storage: str, experiment: Experiment) -> str:
    """Whether both runs have come to the same weights, as far as their checkpoints tell."""
    try:
        shelves = [RunCheckpoints.of(name, storage), RunCheckpoints.of(experiment.name, experiment.storage)]
        newest = [shelf.entries[-1] for shelf in shelves]
        digests = [shelf.digest(entry) for shelf, entry in zip(shelves, newest, strict=True)]
    except ConfigError as error:
        return f"its weights cannot be compared with those of {name}: {error}"
    steps = [entry.checkpoint.step if entry.checkpoint else None for entry in newest]
    if steps[0] != steps[1]:
        return f"{name} has come to step {steps[0]}, this run to step {steps[1]}: their weights cannot be compared"
    if digests[0] == digests[1]:
        return f"the same weights as {name} at step {steps[0]}, bit by bit: {digests[0]}"
    return f"other weights than {name} at step {steps[0]}: {digests[1]}, there {digests[0]}"


def _told(row: Row) -> str:
    part, field, before, after = row
    return f"{part} {field}: {before} -> {after}"


def _list(rows: Sequence[Row]) -> str:
    return "; ".join(map(_told, rows))
