"""Differences between two runs in config, data, code, versions and result, from their records and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from headway.trainer.errors import CheckpointError, ConfigError

from ..config.coerce import parse_yaml
from ..config.experiment import Experiment
from ..config.loader import differences, to_yaml
from .checkpoints import RunCheckpoints
from .provenance import code, git_state, hardware, versions
from .run import find_run

Facts = dict[str, dict[str, Any]]
"""Facts of a run, by part ("config", "data", ...) and by field."""

Row = tuple[str, str, str, str]

MISSING = "-"
"""Stands for a field that one run does not have."""

# Fields that do not affect the training.
_NAMES = ("name", "storage")


def compare_runs(first: str, second: str, storage: str) -> list[Row]:
    """Return the differences as rows (part, field, value in the first run, value in the second).

    Args:
        first: name of a run.
        second: name of another run.
        storage: folder or URI of both.

    Raises:
        ConfigError: there is no such run.
    """
    return list(differing_facts(recorded_facts(first, storage), recorded_facts(second, storage)))


def differing_facts(before: Facts, after: Facts) -> Iterator[Row]:
    """Yield the rows of `compare_runs` for the parts that both runs have."""
    for part in before:
        if part not in after:
            continue
        for field in dict.fromkeys((*before[part], *after[part])):
            values = [str(side[part].get(field, MISSING)) for side in (before, after)]
            if values[0] != values[1]:
                yield part, field, values[0], values[1]


def current_facts(experiment: Experiment, data: Mapping[str, Any]) -> Facts:
    """Return the facts of a run started now, comparable with `recorded_facts`.

    Args:
        experiment: the experiment of the run.
        data: identity of the training data.
    """
    return {
        "config": _config(parse_yaml(to_yaml(experiment))),
        "data": dict(data),
        "code": _code(git_state(), code(experiment.trainer)),
        "versions": versions(),
        "machine": hardware(),
    }


def recorded_facts(name: str, storage: str) -> Facts:
    """Return the recorded facts of a run.

    Raises:
        ConfigError: there is no such run.
    """
    run = find_run(name, storage)
    record, plain = run.record, parse_yaml(run.folder.read("config.yaml") or "") or {}
    saved: Mapping[str, Any] = {}
    digest: dict[str, str] = {}
    with suppress(ConfigError, CheckpointError):  # the run may have no checkpoint, or a damaged one
        checkpoints = RunCheckpoints.of(name, storage)
        newest = next((each for each in reversed(checkpoints.entries) if each.checkpoint), None)
        if newest is not None and newest.checkpoint is not None:
            saved = newest.checkpoint.meta
            digest = {"weights": checkpoints.digest(newest)}
    return {
        "config": _config(plain),
        "data": dict(record.data or saved.get("data", {})),
        # Records of earlier versions have the code only in their checkpoints.
        "code": _code(record.git, record.code or {"methods": saved.get("certificate", {}).get("code", {})}),
        "versions": dict(record.versions),
        "machine": dict(record.hardware),
        "result": {
            "status": run.status, "steps": record.steps, "epochs": record.epochs, "samples": record.samples,
            "attempts": record.attempts, **digest,
            **{name: f"{value:.6g}" for name, value in record.metrics.items()},
        },
    }  # fmt: skip


def _config(plain: Mapping[str, Any]) -> dict[str, Any]:
    # Only the class of the trainer, because its file is compared as code.
    target = str(plain.get("trainer", "")).replace("\\", "/").rpartition("/")[2]
    return {**{path: value for path, value in _leaves(plain) if path not in _NAMES}, "trainer": target}


def _code(git: Mapping[str, Any], digests: Mapping[str, Any]) -> dict[str, Any]:
    file = {"file": digests["sha256"][:16]} if "sha256" in digests else {}
    return {"git": " ".join(_git(git)), **file, **digests.get("methods", {})}


def _leaves(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a config by their dotted paths."""
    for difference in differences({}, plain):
        yield difference.path, _number(difference.after)


def _number(written: Any) -> Any:
    """Normalize a number, because 1 may have been written as 1.0."""
    try:
        number = float(written)
    except (TypeError, ValueError):
        return written
    return int(number) if number.is_integer() else number


def _git(state: Mapping[str, Any]) -> Iterator[str]:
    if state:
        yield state["commit"]
        if state["dirty"]:
            yield "with changes"
