"""What is installed: every folder is in the wheel, the wheel works by itself, and no other package's name is taken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("trainer", "datasets", "orchestrator")
MODULES = sorted(file.relative_to(ROOT).as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
TEMPLATES = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "orchestrator/cluster/templates").iterdir())


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_packages_are_the_folders_that_hold_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = sorted({f"headway.{Path(module).parent.as_posix().replace('/', '.')}" for module in MODULES})
    assert project["packages"] == folders
    assert project["package-dir"] == {f"headway.{folder}": folder for folder in FOLDERS}


def test_datasets_has_no_init_which_would_take_hugging_face_s_name() -> None:
    assert not (ROOT / "datasets" / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy: a build folder would carry modules that are gone into it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), cwd=source)
    (built,) = target.glob("headway-*.whl")
    return built


def test_wheel_holds_every_module_and_template_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (entry_points,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("/entry_points.txt"))
    assert sorted(names) == sorted(f"headway/{file}" for file in MODULES + TEMPLATES)
    assert "headway = headway.orchestrator.cli.main:main" in entry_points


SMOKE = """
import importlib, pathlib, sys
import torch

target = pathlib.Path(sys.argv[1])
for file in sorted((target / "headway").rglob("*.py")):
    name = ".".join(file.relative_to(target).with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    module = importlib.import_module(name)
    assert module.__file__ == str(file), (name, module.__file__)

from headway.trainer import SupervisedTrainer, TrainerConfig

torch.manual_seed(0)
x = torch.randn(32, 4)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)
model = torch.nn.Linear(4, 2)
result = SupervisedTrainer(
    model=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
    loss_fn=torch.nn.functional.cross_entropy,
    train=data,
    config=TrainerConfig(max_epochs=5),
    run_dir="run",
).fit()
losses = [epoch["train/loss"] for epoch in result.history]
assert result.status == "completed" and result.steps == 20 and losses[-1] < losses[0] / 2, result
print("trained", pathlib.Path(result.last_checkpoint).exists())
"""


def site_packages() -> str:
    return os.pathsep.join(dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")))


@pytest.mark.extended
def test_wheel_imports_and_trains_by_itself(wheel: Path, tmp_path: Path) -> None:
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    run(*pip, str(wheel), cwd=empty)
    # -S: no .pth files, so an editable install of this checkout cannot stand in for a module that the wheel lacks.
    path = os.pathsep.join((str(target), site_packages()))
    assert "trained True" in run(sys.executable, "-S", "-c", SMOKE, str(target), cwd=empty, PYTHONPATH=path)


HUGGING_FACE = """
import datasets
assert datasets.Dataset.from_dict({"a": [1, 2]})[1] == {"a": 2}
import headway.datasets, headway.trainer
print(datasets.__file__)
"""


@pytest.fixture(scope="module")
def hugging_face_path() -> str:
    from importlib.metadata import distribution

    return str(distribution("datasets").locate_file("datasets/__init__.py"))


@pytest.mark.extended
def test_datasets_is_hugging_face_s_from_the_root_of_the_repository(hugging_face_path: str) -> None:
    assert run(sys.executable, "-c", HUGGING_FACE, cwd=ROOT).strip() == hugging_face_path


IN_A_WORKER = """
import os, sys
import ray

@ray.remote
def where():
    import datasets, headway.datasets
    assert datasets.Dataset.from_dict({"a": [1, 2]})[1] == {"a": 2}
    return datasets.__file__, os.path.isfile("datasets/plan.py"), os.path.abspath(".") in map(os.path.abspath, sys.path)

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         runtime_env={"working_dir": sys.argv[1]})
print(ray.get(where.remote()))
"""


@pytest.mark.ray
@pytest.mark.extended
def test_datasets_is_hugging_face_s_in_a_ray_worker_in_a_copy_of_the_repository(
    hugging_face_path: str, tmp_path: Path
) -> None:
    copy = tmp_path / "repository"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    printed = run(sys.executable, "-c", IN_A_WORKER, str(copy), cwd=tmp_path)
    result = printed.strip().splitlines()[-1]
    assert result == str((hugging_face_path, True, True))
