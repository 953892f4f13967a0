"""What all tests share: one local Ray for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Before anything imports Ray: no report to the outside, no advice on migration, no second `uv run`.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS="0",
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    # A process less in every group of workers; what needs it has a Ray of its own.
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    # Or the watchers of one Ray ask the dashboard of another one on this machine, and end its runs.
    RAY_API_SERVER_ADDRESS="http://127.0.0.1:9",
)

# The models of the tests are tiny: a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray on this machine with four logical CPUs: two for workers, two for reading data."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
