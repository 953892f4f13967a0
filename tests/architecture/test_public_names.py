"""What a package offers is what its `__all__` says: sorted, complete, and there."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    file.parent.relative_to(ROOT).as_posix().replace("/", ".")
    for folder in ("trainer", "orchestrator")
    for file in (ROOT / folder).rglob("__init__.py")
    if "__all__" in file.read_text()  # the rooms behind them offer nothing by themselves
)


def test_there_are_packages() -> None:
    assert {"trainer", "trainer.callbacks", "trainer.trackers", "orchestrator"} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_complete_and_importable(package: str) -> None:
    module = importlib.import_module(f"headway.{package}")
    names = list(module.__all__)
    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(module, name)] == []
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    taken_in = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    made_here = {
        node.name
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    }
    assert set(names) == taken_in | made_here


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_says_what_it_is(package: str) -> None:
    module = importlib.import_module(f"headway.{package}")
    objects = {name: getattr(module, name) for name in module.__all__}
    described = {name: value for name, value in objects.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert [name for name, value in described.items() if not (value.__doc__ or "").strip()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_is_that_of_a_file_that_hides_it(package: str) -> None:
    """A name that is imported on first use is the file of that name as soon as anybody has imported that."""
    folder = ROOT / package.replace(".", "/")
    files = {file.stem for file in folder.glob("*.py")} | {file.name for file in folder.iterdir() if file.is_dir()}
    modules = {"optimizers", "schedules"} if package == "trainer" else set()
    assert files & set(importlib.import_module(f"headway.{package}").__all__) == modules
