"""What all tests share: one local Ray for the whole session."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

    with warm_process() as variables:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


@contextlib.contextmanager
def warm_process() -> Iterator[dict[str, str]]:
    """Starts what is in tests/warm, and gives the variables with which a Ray has its workers forked from it."""
    folder = Path(__file__).parent / "warm"
    with tempfile.TemporaryDirectory(prefix="hw", dir="/tmp") as place, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/warm")
        server.listen(64)
        command = [sys.executable, str(folder / "zygote.py"), str(server.fileno())]
        settings: Any = {"pass_fds": [server.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(command, **settings) as process:
            try:
                found = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
                yield {"PYTHONPATH": os.pathsep.join(found), "HEADWAY_TESTS_ZYGOTE": f"{place}/warm"}
            finally:
                process.kill()
