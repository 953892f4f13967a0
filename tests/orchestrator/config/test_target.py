"""Targets `file.py`, `file.py:name` and `module:name`: what they import, and errors for wrong ones."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.orchestrator import Experiment, resolve
from headway.orchestrator.config.loader import from_yaml, to_yaml
from headway.orchestrator.config.target import load_target, target_of
from headway.trainer import Trainer
from headway.trainer.errors import ConfigError

HEADER = """
from dataclasses import dataclass
from headway.orchestrator import Experiment
from headway.trainer import Trainer, TrainerConfig
@dataclass(frozen=True, kw_only=True)
class AConfig(TrainerConfig):
    size: int = 1
class A(Trainer[AConfig]):
    pass
"""


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("headway_file_"):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "train.py") -> str:
    file = folder / name
    file.write_text(HEADER + textwrap.dedent(text))
    return str(file)


def test_a_file_with_one_trainer(tmp_path: Path) -> None:
    found = load_target(write(tmp_path, ""))
    assert isinstance(found, type)
    assert found.__name__ == "A"


def test_a_file_with_one_experiment(tmp_path: Path) -> None:
    found = load_target(write(tmp_path, 'x = Experiment(name="x", trainer=A, config=AConfig())'))
    assert isinstance(found, Experiment)


def test_an_experiment_called_experiment_comes_first(tmp_path: Path) -> None:
    text = """
        x = Experiment(name="x", trainer=A, config=AConfig())
        experiment = Experiment(name="main", trainer=A, config=AConfig())
    """
    assert resolve(write(tmp_path, text)).name == "main"


def test_a_function_returns_an_experiment(tmp_path: Path) -> None:
    file = write(tmp_path, 'def make():\n    return Experiment(name="made", trainer=A, config=AConfig(size=3))')
    assert resolve(f"{file}:make", ["config.size=4"]).name == "made"


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("class B(A): pass", "", "has A, B: choose one, as in .*:A"),
        ("", ":AConfg", "there is no 'AConfg'; did you mean AConfig"),
        ("", ":Other", "there is no 'Other'; there is AConfig, A$"),
        ("x = 1", ":x", "is a int: a target must be an Experiment"),
        ("del A", "", "neither an Experiment nor a Trainer class"),
    ],
)
def test_a_target_that_is_none(tmp_path: Path, text: str, suffix: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_target(write(tmp_path, text) + suffix)


def test_a_missing_file_module_or_name(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"there is no file .*trian.py; did you mean train.py?"):
        load_target(str(tmp_path / "trian.py"))
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        load_target("no_such_module:x")
    with pytest.raises(ConfigError, match="names neither a file.py nor module:name"):
        load_target("something")


def test_an_error_in_the_file_is_the_users_own(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_target(write(tmp_path, "import no_such_module"))
    with pytest.raises(ZeroDivisionError):
        load_target(write(tmp_path, "1 / 0", name="other.py"))


def test_a_file_of_a_package_is_named_by_its_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    file = write(tmp_path / "package", "from .neighbour import SIZE")
    with pytest.raises(ConfigError, match=rf"name its module, as in package\.{Path(file).stem}:name"):
        load_target(file)


def test_a_file_may_be_called_like_a_module(tmp_path: Path) -> None:
    import random

    load_target(write(tmp_path, "", name="random.py"))
    assert sys.modules["random"] is random


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "headway_test_neighbour.py").write_text("SIZE = 7")
    text = "from headway_test_neighbour import SIZE\nx = Experiment(name='x', trainer=A, config=AConfig(size=SIZE))"
    assert "size: 7" in to_yaml(resolve(write(tmp_path, text)))


def test_a_module_target() -> None:
    found = load_target("tests.tiny:TinyTrainer")
    assert isinstance(found, type)
    assert issubclass(found, Trainer)
    assert target_of(found) == "tests.tiny:TinyTrainer"


def test_the_recorded_target_finds_the_class_again(tmp_path: Path) -> None:
    """The config file of a run is enough to create its experiment again."""
    file = write(tmp_path, "")
    experiment = resolve(f"{file}:A", ["config.size=5"])
    assert target_of(experiment.trainer) == f"{file}:A"
    assert from_yaml(to_yaml(experiment)) == experiment


def test_the_config_of_a_file_is_that_of_its_trainer(tmp_path: Path) -> None:
    file = write(tmp_path, "config = AConfig(max_steps=60, size=5)\n")
    for target in (file, f"{file}:A"):
        experiment = resolve(target, ["config.max_steps=7"])
        assert (experiment.name, experiment.config.max_steps, experiment.config.size) == ("a", 7, 5)
    several = write(tmp_path, "one, two = AConfig(max_steps=1), AConfig(max_steps=2)\n", "several.py")
    with pytest.raises(ConfigError, match="several has one, two for A: name one of them config"):
        resolve(several)
    chosen = write(tmp_path, "one, config = AConfig(max_steps=1), AConfig(max_steps=2)\n", "chosen.py")
    assert resolve(chosen).config.max_steps == 2
