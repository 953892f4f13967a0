"""What two runs differ in: config, data, code, versions, result. From their records and checkpoints alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from headway.trainer.errors import ConfigError

from ..config.coerce import parse_yaml
from ..config.experiment import Experiment
from ..config.loader import differences, to_yaml
from .checkpoints import RunCheckpoints
from .provenance import code, git_state, hardware, versions
from .run import find_run

Facts = dict[str, dict[str, Any]]
"""By what they are of, and by field."""

Row = tuple[str, str, str, str]

MISSING = "-"
"""Stands for what one side does not have."""

# A run's own, however it is trained.
_NAMES = ("name", "storage")


def compare_runs(first: str, second: str, storage: str) -> list[Row]:
    """Returns the differences, as (of what, which field, in the first run, in the second).

    Args:
        first: name of a run.
        second: name of another one.
        storage: folder or URI that holds both.

    Raises:
        ConfigError: there is no such run.
    """
    return list(differing_facts(recorded_facts(first, storage), recorded_facts(second, storage)))


def differing_facts(before: Facts, after: Facts) -> Iterator[Row]:
    """Yields what differs in the parts that both have, as `compare_runs` returns it."""
    for part in before:
        if part not in after:
            continue
        for field in dict.fromkeys((*before[part], *after[part])):
            values = [str(side[part].get(field, MISSING)) for side in (before, after)]
            if values[0] != values[1]:
                yield part, field, values[0], values[1]


def current_facts(experiment: Experiment, data: Mapping[str, Any]) -> Facts:
    """Returns what is known of a run that would be started now, in the same words as of one that was.

    Args:
        experiment: of the run.
        data: the identity of its training data.
    """
    return {
        "config": _config(parse_yaml(to_yaml(experiment))),
        "data": dict(data),
        "code": _code(git_state(), code(experiment.trainer)),
        "versions": versions(),
        "machine": hardware(),
    }


def recorded_facts(name: str, storage: str) -> Facts:
    """Returns what is known of a run, by what it is of and by field.

    Raises:
        ConfigError: there is no such run.
    """
    run = find_run(name, storage)
    record, plain = run.record, parse_yaml(run.folder.read("config.yaml") or "") or {}
    saved: Mapping[str, Any] = {}
    digest: dict[str, str] = {}
    with suppress(ConfigError):  # no checkpoint, no certificate; nor a digest where the file with its sums is gone
        shelf = RunCheckpoints.of(name, storage)
        newest = next((each for each in reversed(shelf.entries) if each.checkpoint), None)
        if newest is not None and newest.checkpoint is not None:
            saved = newest.checkpoint.meta
            digest = {"weights": shelf.digest(newest)}
    return {
        "config": _config(plain),
        "data": dict(record.data or saved.get("data", {})),
        # A record of an earlier version has the code in its checkpoints only.
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
    # Where the trainer's file lies is no matter; what is in it is one of the code.
    target = str(plain.get("trainer", "")).replace("\\", "/").rpartition("/")[2]
    return {**{path: value for path, value in _leaves(plain) if path not in _NAMES}, "trainer": target}


def _code(git: Mapping[str, Any], digests: Mapping[str, Any]) -> dict[str, Any]:
    file = {"file": digests["sha256"][:16]} if "sha256" in digests else {}
    return {"git": " ".join(_git(git)), **file, **digests.get("methods", {})}


def _leaves(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config by their dotted paths."""
    for difference in differences({}, plain):
        yield difference.path, _number(difference.after)


def _number(written: Any) -> Any:
    """What a file has for a number, in one way for each: where a field takes any, 1 comes back as 1.0."""
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
