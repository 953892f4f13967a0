"""Fixtures of all tests: one local Ray for the whole session."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Before anything imports Ray: no usage statistics, no migration warnings, no second `uv run`.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS="0",
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    # One process less per worker group; tests that need it start their own Ray.
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    # Otherwise watchers of one Ray may ask the dashboard of another on this machine, and end runs.
    RAY_API_SERVER_ADDRESS="http://127.0.0.1:9",
    # On a busy machine, a start may take longer than Ray's minute.
    RAY_raylet_start_wait_time_s="240",
    # A raylet ends itself if its agent has not imported everything within this time, by default 30 s.
    RAY_agent_register_timeout_ms="240000",
    # Otherwise its workers would have a lower priority than other pytest-xdist workers.
    RAY_worker_niceness="0",
)

# A shell ignores Ctrl-C for what it starts in the background, and the programs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The models of the tests are tiny: more threads only wait for each other.
torch.set_num_threads(1)


@functools.cache
def sources_of(file: str) -> tuple[str, dict[str, str]]:
    """Return the source of a file without its tests, and that of each test, if any of it mentions Ray."""
    text = (Path(__file__).parents[1] / file).read_text()
    if "ray_session" not in text and "pytest.mark.ray" not in text:
        return "", {}
    lines, tests = text.splitlines(), {}
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min(each.lineno for each in (node, *node.decorator_list)) - 1
            tests[node.name] = "\n".join(lines[first : node.end_lineno])
            del lines[first : node.end_lineno]
    return "\n".join(lines), tests


def group_of(nodeid: str) -> str:
    """Return "shared Ray", if a test runs on it, or "own Ray", if it starts one, else its file."""
    file, _, test = nodeid.partition("::")
    around, tests = sources_of(file)
    # What a mark or a fixture of the file says holds for all its tests.
    text = around + tests.get(test.partition("[")[0], "")
    # tests/datasets/conftest.py starts the shared Ray for a parameter.
    if "ray_session" in text or (file.startswith("tests/datasets/") and re.search(r"[\[-]ray[\]-]", test)):
        return "shared Ray"
    # Two groups, because these tests mostly wait, and most of those that wait for machines are promises.
    own = "own Ray, promises" if file.startswith("tests/promises/") else "own Ray"
    return own if "pytest.mark.ray" in text else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first: those on Ray, then chaos, then the other promises."""
    first = ("shared Ray", "own Ray", "tests/chaos/", "tests/promises/")

    def place(item: pytest.Item) -> int:
        group = group_of(item.nodeid)
        return next((number for number, name in enumerate(first) if group.startswith(name)), len(first))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign whole files to each worker, and all tests of a kind on Ray to one, so that few Rays start at once.

    With pytest 9.2 the marks of pytest-xdist 3.8 have no effect.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the shared Ray after its last test: even idle, its processes take a tenth of a core."""
    is_last = nextitem is not None and group_of(nextitem.nodeid) != "shared Ray"
    if is_last and group_of(item.nodeid) == "shared Ray" and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip an extended test that would begin too late for CI, which sets a time in seconds since 1970."""
    last_start_s = float(os.environ.get("HEADWAY_TESTS_LAST_START", "inf"))
    if time.time() > last_start_s and item.get_closest_marker("extended"):
        pytest.skip("this machine is too slow to begin this test within the time of CI; `make test-all` runs it")


@pytest.fixture(autouse=True)
def warm_workers_on_ray(request: pytest.FixtureRequest) -> None:
    """Give the Ray of a test warm workers, also one that the test starts itself."""
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("warm_workers")


@pytest.fixture(scope="session")
def warm_workers() -> Iterator[None]:
    """Fork the workers of every Ray that is started from now on from a process that has imported what they need."""
    with warm_process() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def ray_session(warm_workers: None) -> Iterator[None]:
    """A Ray on this machine with four logical CPUs: two for workers, two for reading data."""
    import ray

    for attempt in range(3):
        try:
            quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
            # "local", so that a cluster that runs on this machine is never used.
            ray.init("local", num_cpus=4, **quiet)
            break
        except Exception as error:
            # Ray waits half a minute for its raylet, too short on a busy machine.
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    yield
    ray.shutdown()


@contextlib.contextmanager
def warm_process() -> Iterator[dict[str, str]]:
    """Start tests/warm, and yield the variables that make Ray fork its workers from it."""
    folder = Path(__file__).parent / "warm"
    with tempfile.TemporaryDirectory(prefix="hw", dir="/tmp") as place, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/warm")
        server.listen(64)
        command = [sys.executable, str(folder / "zygote.py"), str(server.fileno())]
        settings: Any = {"pass_fds": [server.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(command, **settings) as process:
            # Otherwise, if that process ended, workers would connect to this one, and wait for ever.
            server.close()
            try:
                found = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
                yield {"PYTHONPATH": os.pathsep.join(found), "HEADWAY_TESTS_ZYGOTE": f"{place}/warm"}
            finally:
                process.kill()
