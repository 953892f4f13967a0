"""Convert overrides, files and plain dicts to a typed `Experiment` and back, with errors that name the field.

The command line, the saved config and error messages use the same dotted path: `config.learning_rate`.
A renamed field keeps its old name as `field(metadata={"deprecated_names": ("lr",)})`.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast, get_type_hints

import numpy as np

from headway.trainer.config import FIELDS_ELSEWHERE, TrainerConfig
from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration
from headway.trainer.redaction import REDACTED, is_secret_field, redact_value
from headway.trainer.trainer import Trainer

from .coerce import PlainScalar, coerce, parse_yaml, render_yaml
from .experiment import Experiment, config_type
from .target import config_beside, load_target, target_of


def resolve(target: str | Experiment | type[Trainer[Any]], overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment of a target, with overrides.

    A trainer class becomes an experiment with the config that its file has for it, or with the defaults of its config;
    its name is the class name in kebab case.

    Args:
        target: as for `load_target`, or an object that it returns.
        overrides: as "config.learning_rate=3e-4"; the value is YAML, so `[1, 2]` is a list and `null` is None.

    Raises:
        ConfigError: names the path, the value, and the nearest valid name.
    """
    found = load_target(target) if isinstance(target, str) else target
    values = parse_overrides(overrides)
    if isinstance(found, Experiment):
        return cast(Experiment, override(found, values))
    tree = _tree(values)
    if "trainer" in tree:
        raise ConfigError("trainer cannot be overridden: use another target")
    name = PlainScalar(_kebab(found.__name__))
    config = config_beside(found) if isinstance(target, str) else None
    if config is None:
        return _experiment_of(found, {"name": name, **tree})
    config = _create(type(config), tree.pop("config", {}), "config", config)
    return cast(Experiment, _create(Experiment, {"name": name, **tree, "trainer": found, "config": config}, ""))


def override(settings: Any, values: Mapping[str, Any], path: str = "") -> Any:
    """Return an experiment, or another dataclass, with checked and converted values at some dotted paths.

    Args:
        settings: the dataclass to change.
        values: new values by path.
        path: path of `settings`, for errors.

    Raises:
        ConfigError: names the path, the value, and the nearest valid name.
    """
    return _create(type(settings), _tree(values), path, settings)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse overrides "path=value" to YAML values by path, for `override`.

    Raises:
        ConfigError: one is not an override.
    """
    values: dict[str, Any] = {}
    for each in overrides:
        path, equals, written = each.partition("=")
        if not equals or not all(part.isidentifier() for part in path.split(".")):
            raise ConfigError(f"{each!r} is not an override: write path=value, as in config.learning_rate=3e-4")
        # A repeated path moves to the end, because later overrides take precedence.
        values.pop(path, None)
        values[path] = parse_yaml(written, path)
    return values


def to_plain(value: Any, path: str = "") -> Any:
    """Return an experiment, or a part of one, as dicts, lists, numbers and strings; the inverse of `from_plain`.

    Secrets become "(redacted)", as in all files; see `headway.trainer.redaction`.

    Raises:
        ConfigError: a field's value cannot be saved in a file.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return redact_value(path, value)
    if isinstance(value, (Duration, Path)):
        return redact_value(path, str(value))
    if isinstance(value, Enum):
        return to_plain(value.value, path)
    if isinstance(value, type) and issubclass(value, Trainer):
        return target_of(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(each, _at(path, str(key))) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each, f"{path}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [to_plain(each, path) for each in sorted(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _field_to_plain(field, getattr(value, field.name), path) for field in _settable(type(value))
        }
    raise ConfigError(
        f"{path or 'the value'} is a {type(value).__name__}, which cannot be saved in a file: keep a name or a number "
        "in the config, and create the object in the trainer"
    )


def _field_to_plain(field: Field[Any], value: Any, path: str) -> Any:
    return REDACTED if is_secret_field(field, value) else to_plain(value, _at(path, field.name))


def check_experiment(value: Any) -> None:
    """Check that a value is an `Experiment`.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, Experiment):
        is_trainer = isinstance(value, type) and issubclass(value, Trainer)
        trainer = value.__qualname__ if is_trainer else "..."
        got = f"the class {trainer}" if is_trainer else repr(value)
        raise ConfigError(
            f"experiment must be an Experiment, got {got}: pass Experiment(name=..., trainer={trainer}, config=...)"
        )


def check_not_redacted(experiment: Experiment) -> None:
    """Check that no setting comes from a record without its secrets.

    Raises:
        ConfigError: names the settings to give again.
    """
    if lost := _redacted_in(experiment):
        raise ConfigError(
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} {REDACTED}, because records keep no secrets: give "
            f"{'it' if len(lost) == 1 else 'them'} again, as in {lost[0]}=..., or read it from an environment variable"
        )


def _redacted_in(value: Any, path: str = "") -> list[str]:
    """Return the paths of the values that are a redacted text."""
    if isinstance(value, str):
        return [path] if REDACTED in value else []
    if isinstance(value, Mapping):
        return [found for key, each in value.items() for found in _redacted_in(each, _at(path, str(key)))]
    if isinstance(value, (list, tuple)):
        return [found for index, each in enumerate(value) for found in _redacted_in(each, f"{path}[{index}]")]
    if is_dataclass(value) and not isinstance(value, type):
        return [
            found for each in _settable(type(value))
            for found in _redacted_in(getattr(value, each.name), _at(path, each.name))
        ]  # fmt: skip
    return []


def from_plain(plain: Mapping[str, Any]) -> Experiment:
    """Return the experiment from the output of `to_plain`.

    Raises:
        ConfigError: the trainer cannot be imported, or a field is invalid.
    """
    settings = dict(plain)
    trainer = load_target(str(settings.pop("trainer", "")))
    if isinstance(trainer, Experiment):
        raise ConfigError("trainer is an Experiment; it must be a Trainer class")
    return _experiment_of(trainer, settings)


def to_yaml(experiment: Experiment, *, trainer: str | None = None) -> str:
    """Return the whole experiment, including defaults, as YAML.

    Args:
        experiment: the experiment.
        trainer: target of its trainer, where this process cannot know its file.
    """
    return render_yaml(to_plain(experiment) | ({"trainer": trainer} if trainer else {}))


def from_yaml(text: str) -> Experiment:
    """Return the experiment from the output of `to_yaml`."""
    return from_plain(parse_yaml(text))


def non_default_fields(experiment: Experiment) -> dict[str, str | None]:
    """Return the defaults of all fields with another value, by path; None for a field without a default."""
    found: dict[str, str | None] = {}
    for section in ("config", "scaling", "retries"):
        settings = getattr(experiment, section)
        for each in _settable(type(settings)):
            where = _at(section, each.name)
            if _is_missing(each.default) and _is_missing(each.default_factory):
                found[where] = None
                continue
            default = each.default if _is_missing(each.default_factory) else each.default_factory()  # type: ignore[operator]
            sides = [
                {where: _field_to_plain(each, value, section)} for value in (default, getattr(settings, each.name))
            ]
            for change in differences(*sides):
                before = change.before
                found[change.path] = before if isinstance(before, str) else json.dumps(before)
    return found


def _is_missing(default: object) -> bool:
    # By its class: in a class that was pickled by value, `MISSING` is another object.
    return type(default) is type(MISSING)


@dataclass(frozen=True)
class Difference:
    """A field with two different values.

    Attributes:
        path: dotted path of the field.
        before, after: plain values; None if the field is missing.
    """

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.before!r} -> {self.after!r}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the fields in which two plain experiments differ, by path."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        Difference(path, old.get(path), new.get(path))
        for path in sorted({**old, **new})
        if (path in old) != (path in new) or old.get(path) != new.get(path)
    ]


def _leaves(plain: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, _at(path, key))
        else:
            yield _at(path, key), value


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted path as nested dicts."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        tree = root
        *parents, last = path.split(".")
        for depth, parent in enumerate(parents, 1):
            tree = tree.setdefault(parent, {})
            if not isinstance(tree, dict):
                raise ConfigError(f"{'.'.join(parents[:depth])} is set as a whole and in part: use only one of them")
        tree[last] = value
    return root


def _experiment_of(trainer: type[Trainer[Any]], settings: Mapping[str, Any]) -> Experiment:
    config = _create(config_type(trainer), settings.get("config", {}), "config")
    return cast(Experiment, _create(Experiment, {**settings, "trainer": trainer, "config": config}, ""))


def _create(cls: type[Any], tree: Any, path: str, current: Any = None) -> Any:
    """Create a dataclass from a tree. Missing fields are taken from `current`, whose sections keep their class."""
    if isinstance(tree, cls):
        return tree
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{path}={tree!r} is invalid: {path} is a section, so set its fields, as in {path}.field=value"
        )
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy: classes may lack a hash
    before = {} if current is None else {field.name: getattr(current, field.name) for field in _settable(cls)}
    sections = {**hints, **{name: type(value) for name, value in {**tree, **before}.items()}}
    values: dict[str, Any] = {}
    for field, written in _known_fields(cls, tree, path, sections):
        where, value = _at(path, field.name), before.get(field.name)
        if where == "trainer":
            if current is not None:
                raise ConfigError("trainer cannot be overridden: use another target")
            values[field.name] = written
        elif is_dataclass(value) and not isinstance(value, (type, Duration)) and isinstance(written, Mapping):
            values[field.name] = _create(type(value), written, where, value)
        else:
            values[field.name] = coerce(written, hints[field.name], where, _create)
    if current is not None:
        return _checked(lambda: replace(current, **values), path)
    for field in _settable(cls):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in values:
            where = _at(path, field.name)
            raise ConfigError(f"{where} is required: set {where}=...")
    return _checked(lambda: cls(**values), path)


def _checked(make: Any, path: str) -> Any:
    try:
        return make()
    except (ConfigError, ValueError, TypeError) as error:
        # The message starts with a field of the section, unless it concerns several.
        message = str(error)
        begins_with_field = bool(re.match(r"[a-z_]+(\[[^]]*\])? (must|is|counts|lies|belongs)\b", message))
        raise ConfigError(f"{path}{'.' if begins_with_field else ': '}{message}" if path else message) from error


def _known_fields(
    cls: type[Any], tree: Mapping[str, Any], path: str, sections: Mapping[str, Any]
) -> Iterator[tuple[Field[Any], Any]]:
    known = {field.name: field for field in _settable(cls)}
    renamed = {old: field for field in known.values() for old in field.metadata.get("deprecated_names", ())}
    for key, value in tree.items():
        if key in renamed and key not in known:
            now = renamed[key].name
            if now in tree:
                raise ConfigError(f"{_at(path, key)} is the old name of {_at(path, now)}: use only the new one")
            warnings.warn(f"{_at(path, key)} is now called {_at(path, now)}", FutureWarning, stacklevel=2)
            yield renamed[key], value
        elif key in known:
            yield known[key], value
        else:
            raise ConfigError(_unknown(cls, key, path, list(known), sections))


def _unknown(cls: type[Any], key: str, path: str, names: list[str], sections: Mapping[str, Any]) -> str:
    text = f"{_at(path, key)}: {cls.__name__} has no field {key!r}"
    for place, section in ((path, cls), *((_at(path, name), sections.get(name)) for name in names)):
        if isinstance(section, type) and issubclass(section, TrainerConfig):
            field = FIELDS_ELSEWHERE.get(key)
            if field in {each.name for each in _settable(section)}:
                return f"{text}; did you mean {_at(place, str(field))}?"
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.6):
        return f"{text}; did you mean {_at(path, near[0])}?"
    # The field may belong to another section.
    for name in names:
        section = sections.get(name)
        below = [each.name for each in _settable(section)] if is_dataclass(section) and section is not Duration else []
        if near := difflib.get_close_matches(key, below, n=1, cutoff=0.7):
            return f"{text}; did you mean {_at(_at(path, name), near[0])}?"
    return f"{text}; it has {', '.join(names)}"


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"the type hints of {cls.__qualname__} cannot be resolved ({error}): define it, and the types it names, at "
            "the top level of a module"
        ) from error


def _settable(cls: Any) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.init]


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).replace("_", "-").lower()
