"""Targets, `file.py:name` or `module:name`: import the object of a target, and return the target of a class."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from headway.trainer.config import TrainerConfig
from headway.trainer.errors import ConfigError
from headway.trainer.trainer import Trainer

from .experiment import Experiment, config_type

# Prefix of the module name of a user's file, so that `trainer.py` or `random.py` does not shadow another module.
_PREFIX = "headway_file_"


def load_target(target: str) -> Experiment | type[Trainer[Any]]:
    """Import a target and return the experiment or the trainer class that it names.

    A function is called without arguments and must return an experiment. Without a name, a file's target is its
    `experiment`, else its only Experiment, else its only trainer class.

    Args:
        target: `file.py`, `file.py:name` or `module:name`.

    Raises:
        ConfigError: there is no such file, module or name, or it is neither an experiment nor a trainer class.
    """
    place, name = _split(target)
    module = _import(place, target)
    found = _named(module, name, target) if name else _only_one(module, target)
    if isinstance(found, FunctionType):
        found = found()
    if isinstance(found, Experiment) or (isinstance(found, type) and issubclass(found, Trainer)):
        return found
    raise ConfigError(
        f"{target} is a {type(found).__name__}: a target must be an Experiment, a function that returns one, or a "
        "Trainer class"
    )


def config_beside(trainer: type[Trainer[Any]]) -> TrainerConfig | None:
    """Return the config of a trainer's class that its module has, as a `python file.py` would use it; None if none.

    Raises:
        ConfigError: there are several.
    """
    wanted = config_type(trainer)
    module = sys.modules[trainer.__module__]
    configs = {name: each for name, each in vars(module).items() if isinstance(each, wanted)}
    if len(configs) > 1 and "config" not in configs:
        raise ConfigError(
            f"{module.__name__.removeprefix(_PREFIX)} has {', '.join(sorted(configs))} for {trainer.__name__}: name "
            "one of them config, or put it into an Experiment"
        )
    return configs.get("config") or next(iter(configs.values()), None)


def load_named(target: str, name: str) -> Any:
    """Return an attribute of the file or the module of a target.

    Raises:
        ConfigError: there is no such file, module or name.
    """
    place, _ = _split(target)
    return _named(_import(place, target), name, f"{place}:{name}")


def target_of(trainer: type) -> str:
    """Return the target of a class for `load_target`: a file if its module is a user's file, else a module.

    The path is relative if the file is below the current directory, because a job runs in a copy of that directory.
    """
    module = sys.modules.get(trainer.__module__)
    file = getattr(module, "__file__", None)
    if file and (trainer.__module__ == "__main__" or trainer.__module__.startswith(_PREFIX)):
        return f"{_from_here(Path(file).resolve())}:{trainer.__qualname__}"
    return f"{trainer.__module__}:{trainer.__qualname__}"


def import_folder_of(trainer: type) -> str | None:
    """Return the folder from which the module of a class is imported; None if it has no file.

    The path is relative if the folder is below the current directory.
    """
    file = getattr(sys.modules.get(trainer.__module__), "__file__", None)
    if not file:
        return None
    path = Path(file).resolve()
    depth = 0 if trainer.__module__.startswith(_PREFIX) else trainer.__module__.count(".")
    return _from_here(path.parents[depth + (path.name == "__init__.py")])


def relocate_target(target: str, *, working_dir: str, folder: str | None, sha256: str | None) -> str:
    """Return the current target of a recorded class.

    A file is looked up below the current directory and below the recorded one, preferring the recorded content. If a
    module cannot be imported, its recorded folder is added to the import path.

    Args:
        target: the recorded `target_of`.
        working_dir: the recorded current directory, perhaps of another machine.
        folder: the recorded `import_folder_of`.
        sha256: the recorded digest of the file.

    Raises:
        ConfigError: the file is in neither directory.
    """
    place, name = _split(target)
    if not place.endswith(".py"):
        if folder is not None:
            _import_from((os.path.join(each, folder) for each in ("", working_dir)), place.partition(".")[0])
        return target
    places = list(dict.fromkeys(os.path.abspath(os.path.join(folder, place)) for folder in ("", working_dir)))
    there = [each for each in places if os.path.isfile(each)]
    same = [each for each in there if file_digest(each) == sha256]
    for each in same or there:
        return f"{each}:{name}"
    raise ConfigError(f"the trainer {target} was not found: there is no file {' and no '.join(places)}")


def file_digest(file: str) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _import_from(folders: Iterable[str], package: str) -> None:
    """Add the first folder with this package to the import path, unless it can be imported already."""
    finder = importlib.machinery.PathFinder
    if package in sys.modules or finder.find_spec(package, [os.getcwd(), *sys.path]) is not None:
        return
    for folder in map(os.path.abspath, folders):
        if finder.find_spec(package, [folder]) is not None:
            sys.path.insert(0, folder)
            return


def is_user_file(module: ModuleType | None) -> bool:
    """Return whether a module is a user's file, which workers cannot import by name."""
    return module is not None and module.__name__.startswith(_PREFIX)


def _from_here(path: Path) -> str:
    here = Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _split(target: str) -> tuple[str, str]:
    place, colon, name = target.rpartition(":")
    # The colon of "C:\digits.py" is not a separator.
    if not colon or "/" in name or "\\" in name:
        return target, ""
    return place, name


def _import(place: str, target: str) -> ModuleType:
    if place.endswith(".py"):
        return _import_file(Path(place))
    if os.sep in place or Path(place).exists():
        raise ConfigError(f"{place} is not a Python file: a target is file.py, file.py:name or module:name")
    if place == target:
        raise ConfigError(f"{target} names neither a file.py nor module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # If an import inside the target's module fails, the user needs its traceback.
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(f"there is no module {place!r} for the target {target}") from None
        raise


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = [f.name for f in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"there is no file {path}{_did_you_mean(path.name, near)}")
    path = path.resolve()
    name = _PREFIX + path.stem
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(path):
        return known
    # As with `python file.py`, add its folder to the import path.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[name]
        if "attempted relative import" not in str(error):
            raise
        raise ConfigError(
            f"{path} imports relatively, so it is part of a package and cannot be run as a file: name its module, as "
            f"in {path.parent.name}.{path.stem}:name, in the folder that contains {path.parent.name}"
        ) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _named(module: ModuleType, name: str, target: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = {each: value for each, value in vars(module).items() if not each.startswith("_")}
            own = [
                each
                for each, value in public.items()
                if isinstance(value, Experiment) or getattr(value, "__module__", None) == module.__name__
            ]
            there = f"; there is {', '.join(own)}" if own else ""
            raise ConfigError(f"{target}: there is no {name!r}{_did_you_mean(name, list(public)) or there}")
        found = getattr(found, part)
    return found


def _only_one(module: ModuleType, target: str) -> Any:
    experiments = {name: each for name, each in vars(module).items() if isinstance(each, Experiment)}
    if "experiment" in vars(module):
        return vars(module)["experiment"]
    classes = {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, Trainer) and each.__module__ == module.__name__
    }
    for found in (experiments, classes):
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            raise ConfigError(f"{target} has {', '.join(sorted(found))}: choose one, as in {target}:{sorted(found)[0]}")
    raise ConfigError(f"{target} has neither an Experiment nor a Trainer class")


def _did_you_mean(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
