"""Environment variables that Ray reads when it is imported. Does not import Ray, so that it can run first."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    # Otherwise every worker of a driver under `uv run` would create its own environment.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # On a busy machine the start takes longer than Ray's half a minute. Ray reads these when it is imported.
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A dead worker is noticed within this time; the default of 2 s is a large part of a restart.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A preemption is known within this time; the default of 5 s is a large part of some notice periods.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}
# Ray prints this whatever the log level; the run reports which worker died.
_HIDDEN = {"RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed"}


def quiet_environment(*, verbose: bool = False) -> None:
    """Set the variables that make Ray quiet and fast, except those that the user has set.

    Args:
        verbose: keep Ray's messages.
    """
    for name, value in {**_SETTINGS, **({} if verbose else _HIDDEN)}.items():
        os.environ.setdefault(name, value)


@contextmanager
def temporary_env(values: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Set environment variables, and restore the previous ones at the end.

    Args:
        values: by name.
        unless_set: keep those that are set already.
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


@contextmanager
def log_errors_only(name: str) -> Iterator[None]:
    """Let a logger log only errors in this context."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
