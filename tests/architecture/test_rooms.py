"""The rooms of the house: small folders, no import cycles, and a landing that alone knows the Trainer."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("trainer", "datasets", "orchestrator")
MOST_FILES = 20


def modules_of(package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name; a package's `__init__` has the name of its folder."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_of(name: str, file: Path, source: str, modules: dict[str, Path]) -> set[str]:
    """The modules of the same package that a module imports anywhere, imports for type checking included."""
    parent = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parent.split(".")[: len(parent.split(".")) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            targets = {f"{module}.{alias.name}" for alias in node.names}
            found |= {target if target in modules else module for target in targets}
    # The public names of a package are imported on first use, from modules that may import one another through it.
    return {each for each in found if each in modules and modules[each].name != "__init__.py"} - {name}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    modules = modules_of(package)
    graph = {
        name: imports_of(name, file, file.read_text(), modules)
        for name, file in modules.items()
        if file.name != "__init__.py"
    }
    assert sum(map(len, graph.values())) > len(graph) / 2
    assert cycle_in(graph) == []


def test_a_cycle_is_found_also_where_it_is_for_type_checking_alone() -> None:
    modules = {"trainer.a": Path("trainer/a.py"), "trainer.b": Path("trainer/b.py")}
    sources = {"trainer.a": "from .b import B", "trainer.b": "if TYPE_CHECKING:\n    from .a import A"}
    graph = {name: imports_of(name, file, sources[name], modules) for name, file in modules.items()}
    assert set(cycle_in(graph)) == {"trainer.a", "trainer.b"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_holds_more_files_than_one_can_survey(package: str) -> None:
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    assert {folder: count for folder in folders if (count := len(list(folder.glob("*.py")))) > MOST_FILES} == {}


def test_only_the_landing_knows_the_trainer() -> None:
    """The rooms know a `RunContext` and the user's steps. Callbacks are given the trainer, like code of the user's."""
    modules = modules_of("trainer")
    rooms = [name for name in modules if name.count(".") == 2 and not name.startswith("trainer.callbacks.")]
    knowing = {"trainer.trainer", "trainer.session", "trainer.supervised"}
    assert [
        name for name in rooms if imports_of(name, modules[name], modules[name].read_text(), modules) & knowing
    ] == []


def test_no_room_imports_the_command_line() -> None:
    """What other rooms show is in `display`, or beside what it shows."""
    modules = modules_of("orchestrator")
    importing = {
        name
        for name, file in modules.items()
        for target in imports_of(name, file, file.read_text(), modules)
        if target.startswith("orchestrator.cli.") and not name.startswith("orchestrator.cli")
    }
    assert importing == {"orchestrator.__main__"}


def test_exact_mode_is_asked_for_in_one_place() -> None:
    asking = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "trainer").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "exact" and "config" in ast.unparse(node.value)
    }
    assert asking == {"trainer/exact/numerics.py"}
