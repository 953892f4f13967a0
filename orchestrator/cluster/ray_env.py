"""What Ray reads from the environment when it is imported. So this imports nothing, and comes first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    # Else every worker of a driver that runs under `uv run` would make an environment of its own.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A worker that is gone is noticed within this time; the default of 2 s is a good part of a restart.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # That a machine will be taken away is known within this time; the default of 5 s is a good part of some notices.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}
# Ray prints this to the driver whatever it is told about logs; the run says itself which worker died.
_HIDDEN = {"RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed"}


def quiet_environment(*, verbose: bool = False) -> None:
    """Sets what keeps Ray quiet and quick; values that the user has set stay.

    Args:
        verbose: leaves its messages.
    """
    for name, value in {**_SETTINGS, **({} if verbose else _HIDDEN)}.items():
        os.environ.setdefault(name, value)


@contextmanager
def temporary_env(values: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Sets variables of this process, and puts back what was there.

    Args:
        values: by name.
        unless_set: leaves those alone that the user has set.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if not unless_set or before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
