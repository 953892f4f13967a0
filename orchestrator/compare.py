"""What two runs differ in: config, data, code, versions, result. From their records and checkpoints alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headway.trainer.errors import ConfigError

from .config import differences
from .convert import parse_yaml
from .runs import find_run
from .shelf import Shelf

_MISSING = "-"
# A run's own, however it is trained.
_NAMES = ("name", "storage")


def compare_runs(first: str, second: str, storage: str) -> list[tuple[str, str, str, str]]:
    """Returns the differences, as (of what, which field, in the first run, in the second).

    Args:
        first: name of a run.
        second: name of another one.
        storage: folder or URI that holds both.

    Raises:
        ConfigError: there is no such run.
    """
    sides = [_facts(name, storage) for name in (first, second)]
    found: list[tuple[str, str, str, str]] = []
    for part in sides[0]:
        before, after = (side[part] for side in sides)
        for field in dict.fromkeys((*before, *after)):
            values = [str(side.get(field, _MISSING)) for side in (before, after)]
            if values[0] != values[1]:
                found.append((part, field, values[0], values[1]))
    return found


def _facts(name: str, storage: str) -> dict[str, dict[str, Any]]:
    """What is known of a run, by what it is of and by field."""
    run = find_run(name, storage)
    record, plain = run.record, parse_yaml(run.folder.read("config.yaml") or "") or {}
    saved: Mapping[str, Any] = {}
    digest: dict[str, str] = {}
    try:
        shelf = Shelf.of(name, storage)
    except ConfigError:
        pass  # no checkpoint, no certificate
    else:
        newest = next((each for each in reversed(shelf.entries) if each.checkpoint), None)
        if newest is not None and newest.checkpoint is not None:
            saved, digest = newest.checkpoint.meta, {"weights": shelf.digest(newest)}
    return {
        "config": {path: value for path, value in _leaves(plain) if path not in _NAMES},
        "data": dict(saved.get("data", {})),
        "code": {"git": " ".join(_git(record.git)), **saved.get("certificate", {}).get("code", {})},
        "versions": dict(record.versions),
        "machine": dict(record.hardware),
        "result": {
            "status": run.status, "steps": record.steps, "epochs": record.epochs, "samples": record.samples,
            "attempts": record.attempts, **digest,
            **{name: f"{value:.6g}" for name, value in record.metrics.items()},
        },
    }  # fmt: skip


def _leaves(plain: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a config by their dotted paths."""
    for difference in differences({}, plain):
        yield difference.path, difference.after


def _git(state: Mapping[str, Any]) -> Iterator[str]:
    if state:
        yield state["commit"]
        if state["dirty"]:
            yield "with changes"
