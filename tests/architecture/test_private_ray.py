"""Private parts of Ray are listed in orchestrator/README.md, each with a test, and the variables set for Ray exist."""

from __future__ import annotations

import ast
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from headway.orchestrator.cluster import connect, ray_env
from headway.orchestrator.sweeps.tune import adapter

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "orchestrator" / "README.md").read_text().partition("## Private parts of Ray")[2]
# Of the standard library and of this code.
NOT_OF_RAY = ("_replace", "_exit", "_getframe", "_current_frames", "_root")


def private_names(source: str) -> Iterator[str]:
    """Yield the private names that a module imports from Ray, or uses of objects other than itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and re.match(r"ray\b", node.module or "") and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if re.search(r"\._|\.generated\.", name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if re.match(r"ray\b.*\._", alias.name))
        elif isinstance(node, ast.Attribute):
            is_private = re.match(r"_[a-z]", node.attr) and ast.unparse(node.value) not in ("self", "cls")
            yield from [ast.unparse(node)] if is_private and node.attr not in NOT_OF_RAY else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            name = ast.unparse(node.args[1])
            is_private = re.match(r"f?['\"]_[a-z{]", name) and name.strip("'\"") not in NOT_OF_RAY
            yield from [ast.unparse(node)] if is_private and ast.unparse(node.args[0]) not in ("self", "cls") else []


@pytest.mark.parametrize(
    "source",
    [
        "from ray._private.state import x", "import ray._private.worker", "dataset._execute()", "ray._raylet.X",
        'getattr(scheduler, "_mode", None)', 'getattr(scheduler, f"_{name}")',
    ],
)  # fmt: skip
def test_such_a_use_is_found(source: str) -> None:
    assert list(private_names(source))


def test_every_module_that_uses_private_parts_of_ray_is_in_the_table() -> None:
    using = _files_with_private_parts("orchestrator")
    assert len(using) >= 6
    assert using - set(re.findall(r"`([\w/]+\.py)`", TABLE)) == set()


def test_reading_data_uses_no_private_part_of_ray() -> None:
    assert _files_with_private_parts("datasets") == set()


def _files_with_private_parts(package: str) -> set[str]:
    root = ROOT / package
    return {file.relative_to(root).as_posix() for file in root.rglob("*.py") if any(private_names(file.read_text()))}


def test_every_row_of_the_table_names_a_test_that_exists() -> None:
    code = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    rows = [line.split("|")[-2] for line in TABLE.splitlines() if line.startswith("| `")]
    assert len(rows) >= 13
    for tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named or "test_failures.py" in tests
        assert [name for name in named if f"def {name}(" not in code] == []


def test_every_variable_that_is_set_for_ray_is_read_by_it() -> None:
    """Ray ignores a variable that it has renamed, and only becomes slower or louder."""
    found: set[str] = set()
    wanted = {
        *ray_env._SETTINGS, *ray_env._HIDDEN, *connect._OWN, *connect._PATIENCE, *adapter._QUIET, adapter._CALLBACKS,
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "TUNE_FUNCTION_THREAD_TIMEOUT_S", "RAY_JOB_STOP_WAIT_TIME_S",
        "RAY_RUNTIME_ENV_IGNORE_GITIGNORE",
    }  # fmt: skip
    package = Path(ray.__file__).parent
    for folder in ("_private", "_common", "train", "tune", "dashboard", "util", "scripts", "air"):
        for file in (package / folder).rglob("*.py"):
            text = file.read_text(errors="replace")
            found |= {name for name in wanted - found if name in text}
    # Settings of the servers, by their names without the prefix.
    with (package / "_raylet.so").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        found |= {name for name in wanted - found if binary.find(name.removeprefix("RAY_").encode()) >= 0}
    assert wanted - found == set()
