"""Imports point one way: the orchestrator knows trainer and datasets, these know neither it nor one another."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("trainer", "datasets", "orchestrator")
STDLIB = set(sys.stdlib_module_names) | {"__future__"}

ALLOWED = {
    "trainer": {"torch", "numpy", "xxhash"},
    "datasets": {
        *("ray.cloudpickle", "ray.data", "ray.exceptions", "ray.get", "ray.is_initialized"),
        *("ray.cluster_resources", "ray.nodes", "ray.put", "ray.remote", "ray.wait"),
        *("ray.util.placement_group", "ray.util.placement_group_table", "ray.util.remove_placement_group"),
        *("pyarrow", "numpy", "torch", "fsspec", "xxhash"),
    },
    "orchestrator": {
        *("headway.trainer", "headway.datasets"),
        *("ray", "torch", "numpy", "pyarrow", "fsspec", "pydantic", "yaml", "typer", "rich", "jsonschema"),
    },
}
"""What each folder may import anywhere; a name stands for all that is below it."""

ALLOWED_INSIDE_FUNCTIONS = {
    # torch depends on fsspec; a run that stays on this machine does not pay for the import, nor one without an export.
    # torchao is asked for by name, in the config, and need not be there.
    "trainer": {"cryptography", "fsspec", "pandas", "safetensors", "torchao"},
    # Only images and tokenizers of Hugging Face need them.
    "datasets": {"PIL", "tokenizers"},
    # They need not be there: who asks for a report, or for a search by Optuna, is told how to get them.
    # grpc comes with Ray's dashboard.
    "orchestrator": {"grpc", "optuna", "plotly"},
}

ONLY_ORCHESTRATOR = ("ray.train", "ray.tune", "ray.job_submission", "pydantic", "yaml", "typer")


@dataclass(frozen=True)
class Import:
    """One module that one file names; `inside` a function, it is imported when that is called."""

    file: str
    line: int
    module: str
    level: int
    inside: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {'.' * self.level}{self.module}"


def imports_of(source: str, file: str) -> Iterator[Import]:
    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, 0, inside)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    # `from ray import train` names ray.train as much as `import ray.train` does.
                    name = f"{child.module}.{alias.name}" if child.module else alias.name
                    yield Import(file, child.lineno, name, child.level, inside)
            elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "ray":
                yield Import(file, child.lineno, f"ray.{child.attr}", 0, inside)
            yield from walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    yield from walk(ast.parse(source), inside=False)


def is_below(module: str, names: set[str] | tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def faults(folder: str, each: Import) -> str | None:
    """What is wrong with an import in a file of a folder."""
    depth = len(Path(each.file).parts) - 1
    if each.level:
        return f"{each} leaves its folder by a relative import" if each.level > depth else None
    if each.module.split(".")[0] in STDLIB:
        return None
    if is_below(each.module, (f"headway.{folder}",)):
        return f"{each} of its own folder: inside a folder imports are relative"
    if each.module == "ray" and any(name.startswith("ray.") for name in ALLOWED[folder]):
        # What is used of it is looked at name by name.
        return None
    allowed = set(ALLOWED[folder])
    if each.inside:
        allowed |= ALLOWED_INSIDE_FUNCTIONS[folder]
        if each.file.startswith("trainer/trackers/"):
            allowed.add(Path(each.file).stem)
    if is_below(each.module, allowed):
        return None
    return f"{each}, which {folder}/ may not" + (" outside a function" if is_below(each.module, {"fsspec"}) else "")


@functools.cache
def all_imports(folder: str) -> list[Import]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return [each for file in files for each in imports_of(file.read_text(), file.relative_to(ROOT).as_posix())]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    imports = all_imports(folder)
    assert imports
    assert [fault for each in imports if (fault := faults(folder, each))] == []


@pytest.mark.parametrize("folder", ["trainer", "datasets"])
def test_only_the_orchestrator_names_what_runs_the_processes_and_what_reads_configs(folder: str) -> None:
    assert [str(each) for each in all_imports(folder) if is_below(each.module, ONLY_ORCHESTRATOR)] == []


@pytest.mark.parametrize("folder", ["trainer", "datasets", "orchestrator", "examples", "benchmarks", "tests"])
def test_nobody_imports_a_folder_by_its_bare_name(folder: str) -> None:
    """`import datasets` is Hugging Face's, `import trainer` is the user's own file: ours are `headway.*`."""
    hugging_face = {
        "tests/architecture/test_packaging.py", "tests/datasets/test_hugging_face.py",
        "tests/trainer/data/test_stateful_data.py", "tests/promises/test_resume_bugs_of_other_trainers.py",
        "examples/finetune_causal_lm.py",
    }  # fmt: skip
    bare = [each for each in all_imports(folder) if not each.level and is_below(each.module, FOLDERS)]
    assert [str(each) for each in bare if each.file not in hugging_face] == []


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("trainer/step/optimizer_step.py", "import ray", "imports ray"),
        ("trainer/step/optimizer_step.py", "def f():\n    import ray.train", "imports ray.train"),
        ("trainer/step/optimizer_step.py", "from headway.datasets import stream", "imports headway.datasets.stream"),
        ("trainer/step/optimizer_step.py", "from headway.trainer.config import C", "imports are relative"),
        ("trainer/step/optimizer_step.py", "from ...datasets import plan", "leaves its folder"),
        ("trainer/callbacks/a.py", "from ...datasets import plan", "leaves its folder"),
        ("trainer/checkpoints/storage.py", "import fsspec", "outside a function"),
        ("trainer/trackers/wandb.py", "import wandb", "imports wandb"),
        ("trainer/trackers/wandb.py", "def f():\n    import mlflow", "imports mlflow"),
        ("trainer/step/optimizer_step.py", "def f():\n    import wandb", "imports wandb"),
        ("trainer/step/optimizer_step.py", "import pandas", "imports pandas"),
        ("datasets/stream.py", "from headway.trainer.data.protocols import BatchStream", "imports headway.trainer"),
        ("datasets/stream.py", "from ray import train", "imports ray.train"),
        ("datasets/stream.py", "import ray.data\nray.train.report", "imports ray.train"),
        ("orchestrator/train/fit.py", "import pandas", "imports pandas"),
        ("orchestrator/train/fit.py", "import trainer", "imports trainer"),
    ],
)
def test_the_rules_find_what_breaks_them(file: str, source: str, fault: str) -> None:
    found = [faults(file.split("/")[0], each) for each in imports_of(source, file)]
    assert fault in str(found[-1])


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "trainer/callbacks/a.py",
            "from ..errors import ConfigError\nfrom . import base\nimport torch.distributed as dist",
        ),
        ("trainer/trackers/wandb.py", "def f():\n    import wandb"),
        ("trainer/checkpoints/storage.py", "def f():\n    from fsspec.core import url_to_fs"),
        ("datasets/stream.py", "import ray.data\nfrom ray.data import Dataset\nray.data.from_items([])"),
        ("orchestrator/train/fit.py", "from headway.trainer import Trainer\nfrom ray.train.torch import TorchTrainer"),
    ],
)
def test_the_rules_let_pass_what_keeps_them(file: str, source: str) -> None:
    assert [faults(file.split("/")[0], each) for each in imports_of(source, file)] == [None] * len(
        list(imports_of(source, file))
    )


WITHOUT = """
import sys, importlib, pathlib
for name in {absent!r}:
    sys.modules[name] = None
root = pathlib.Path({root!r})
for file in sorted((root / {folder!r}).rglob("*.py")):
    parts = file.relative_to(root).with_suffix("").parts
    importlib.import_module(".".join(("headway", *parts)).removesuffix(".__init__"))
print(sorted(name for name in {unwanted!r} if name in sys.modules and sys.modules[name] is not None))
"""


@pytest.mark.parametrize(
    ("folder", "absent", "unwanted"),
    [
        (
            "trainer",
            ["ray", "pydantic", "yaml", "typer", "rich", "pyarrow", "wandb", "tensorboard"],
            ["headway.datasets"],
        ),
        ("datasets", [], ["headway.trainer", "headway.orchestrator", "ray.train", "ray.tune", "typer"]),
    ],
)
def test_folder_can_be_imported_where_the_others_are_not(folder: str, absent: list[str], unwanted: list[str]) -> None:
    program = WITHOUT.format(root=str(ROOT), folder=folder, absent=absent, unwanted=unwanted)
    # Where the program runs, a relative entry of the path would lead to another folder.
    path = os.pathsep.join(
        str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
