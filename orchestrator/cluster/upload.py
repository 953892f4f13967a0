"""The files of the working directory that a job gets, and those that its experiment reads but would not get."""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from ..config.experiment import Experiment
from ..config.loader import to_plain

_Rule: TypeAlias = Callable[[Path], bool]
# Paths of outputs, which need not exist.
_OUTPUTS = ("run_dir", "storage")
# As Ray's; such folders are no news to the user.
_NEVER_UPLOADED = (".git", ".venv", "venv", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What Ray uploads of a folder.

    Attributes:
        files: number of files.
        size_bytes: their size, before compression.
        excluded: topmost files and folders that ignore files exclude, relative; folders end in a slash.
    """

    files: int
    size_bytes: int
    excluded: tuple[str, ...]


def survey_upload(folder: Path) -> Upload:
    """Return what Ray uploads of a folder. It does not descend into excluded folders."""
    return _survey(folder, folder, [])


def _survey(folder: Path, root: Path, rules: Sequence[_Rule]) -> Upload:
    rules = [*rules, *_ignore_rules(folder)]
    files, size_bytes, excluded = 0, 0, list[str]()
    for path in sorted(folder.iterdir()):
        if path.name in _NEVER_UPLOADED:
            continue
        name = f"{path.relative_to(root)}{'/' if path.is_dir() else ''}"
        if _is_excluded(path, rules):
            excluded.append(name)
        elif path.is_dir():
            below = _survey(path, root, rules)
            files, size_bytes = files + below.files, size_bytes + below.size_bytes
            # A rule such as "data/" excludes the files of the folder one by one.
            excluded += below.excluded if below.files else [name] * bool(below.excluded)
        elif path.is_file():
            files, size_bytes = files + 1, size_bytes + path.stat().st_size
    return Upload(files=files, size_bytes=size_bytes, excluded=tuple(excluded))


def missed_files(experiment: Experiment, folder: Path) -> list[str]:
    """Return a sentence for each relative path in the config or the code that exists here, but not in the job's copy.

    The code is that of the trainer, the config and the modules that they import from the folder. Only whole string
    constants are found, no joined paths.
    """
    folder = folder.resolve()
    found: dict[str, str] = {}
    for text, where in [*_config_paths(experiment), *_code_paths(experiment, folder)]:
        reason = _why_missed(text, folder) if text not in found else None
        if reason:
            found[text] = (
                f"the job will not have {text} ({where}): {reason}. Give a URI, or the absolute path of a folder "
                "that all nodes share"
            )
    return list(found.values())


def _why_missed(text: str, folder: Path) -> str | None:
    """Return why the job's copy of a folder lacks a path; None if it has it, or if there is no such file here."""
    try:
        # Without resolving links: Ray uploads what a link leads to.
        path = Path(os.path.normpath(folder / text))
        if os.path.isabs(text) or folder.is_relative_to(path) or not path.exists():
            return None
    except (OSError, ValueError):  # no path: too long, or with a NUL
        return None
    if not path.is_relative_to(folder):
        return f"it is outside {folder}, of which the cluster gets a copy"
    rules: list[_Rule] = []
    for part in (*reversed(path.relative_to(folder).parents), path.relative_to(folder)):
        here = folder / part
        if part.parts and _is_excluded(here, rules):
            return f".gitignore or .rayignore excludes {part}"
        rules += _ignore_rules(here)
    return None


def _config_paths(experiment: Experiment) -> Iterator[tuple[str, str]]:
    yield from _strings(to_plain(experiment.config), "config")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value:
        yield value, path
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _strings(each, f"{path}.{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _strings(each, f"{path}[{index}]")


def _code_paths(experiment: Experiment, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the string constants that look like paths, in the modules of an experiment below a folder."""
    for file in _module_files(experiment, folder):
        try:
            tree = ast.parse(file.read_text())
        except (OSError, SyntaxError, ValueError):
            continue
        outputs = {
            id(keyword.value) for node in ast.walk(tree) if isinstance(node, ast.Call)
            for keyword in node.keywords if keyword.arg in _OUTPUTS
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in outputs:
                text = node.value
                # A bare word is more likely a key than a folder.
                if len(text) < 300 and "\n" not in text and ("/" in text or "." in text):
                    yield text, f"{file.relative_to(folder)}:{node.lineno}"


def _module_files(experiment: Experiment, folder: Path) -> list[Path]:
    """Return the files below a folder of the modules that define the trainer and the config, or are imported there."""
    names = [each.__module__ for each in (*experiment.trainer.__mro__, *type(experiment.config).__mro__)]
    seen: set[str] = set()
    files = []
    while names:
        module = sys.modules.get(name := names.pop())
        file = Path(getattr(module, "__file__", None) or "/")
        if name in seen or not file.is_relative_to(folder) or "site-packages" in file.relative_to(folder).parts:
            continue
        seen.add(name)
        files.append(file)
        for value in vars(module).values():
            found = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            names += [found] if isinstance(found, str) else []
    return sorted(files)


def _is_excluded(path: Path, rules: Sequence[_Rule]) -> bool:
    return any(rule(path) for rule in rules)


def _ignore_rules(folder: Path) -> list[_Rule]:
    """Return the rules of a folder's .gitignore and .rayignore, as Ray applies them.

    Ray has no public function for this. Without its private one there are no rules: everything seems to be uploaded,
    and only what is outside of the folder is reported as missing.
    """
    if not folder.is_dir():
        return []
    use_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    quiet = logging.getLogger(f"{__name__}.quiet")
    quiet.disabled = True
    try:
        from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

        return list(get_excludes_from_ignore_files(folder, include_gitignore=use_gitignore, logger=quiet))
    except (ImportError, TypeError):
        return []
