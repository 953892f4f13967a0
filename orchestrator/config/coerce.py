"""Convert YAML 1.2 values to the types of fields: `3e-4` is a number, `no` is a string."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pydantic
import yaml

from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration

_CORE: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(?:null|Null|NULL|~|)"), lambda _: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)"), lambda text: text.lower() == "true"),
    "int": (re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*"), int),
    "float": (
        re.compile(
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
"""The scalars of YAML 1.2's core schema: their patterns and conversions."""

_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")
_BREAK = re.compile("[\x85\u2028\u2029]")


class PlainScalar(str):
    """An unquoted YAML scalar; the type of its field decides whether it is a number."""

    __slots__ = ()

    def value(self) -> Any:
        """Return the value by the rules of YAML 1.2, ignoring the field."""
        for pattern, convert in _CORE.values():
            if pattern.fullmatch(self):
                return convert(self)
        return str(self)


class _Loader(yaml.SafeLoader):
    # Without resolvers, scalars stay text; see PlainScalar.
    yaml_implicit_resolvers: dict[str, Any] = {}


# libyaml's dumper is 8 times as fast, which matters for each trial of a sweep.
class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    # Strings that would be read back as another type must be quoted.
    yaml_implicit_resolvers = {
        None: [(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{each.pattern})$")) for kind, (each, _) in _CORE.items()]
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(node.value) if node.style else PlainScalar(node.value)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Unquoted, Unicode line breaks would be read back as spaces.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAK.search(text) else None)


_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
_Dumper.add_representer(str, _represent_text)


def quote(text: str) -> str:
    """Return text as YAML for an override. Unquoted, "/shared/proj #2" would end at the comment."""
    try:
        is_plain = parse_yaml(text) == text
    except ConfigError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def parse_yaml(text: str, path: str = "") -> Any:
    """Parse YAML, keeping unquoted scalars as `PlainScalar`.

    Raises:
        ConfigError: the text is not YAML.
    """
    try:
        found = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}={text} is not valid YAML: {' '.join(str(error).split())}") from None
    return PlainScalar("") if found is None and path else found


def render_yaml(plain: Any) -> str:
    """Write plain values as YAML that `parse_yaml` and `coerce` read back unchanged."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


Build = Callable[[type[Any], Any, str], Any]


def coerce(value: Any, hint: Any, path: str, build: Build) -> Any:
    """Convert a value to the type of its field.

    Args:
        value: the output of `parse_yaml`, or a Python value.
        hint: type of the field.
        path: path of the field, for errors.
        build: creates a dataclass from (class, mapping, path).

    Raises:
        ConfigError: names the path, the value and the expected type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return coerce(value, arguments[0], path, build)
    if hint is Any:
        return resolve_scalars(value)
    if hint is str and isinstance(value, PlainScalar):
        return str(value)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, arguments, hint, path, build)
    if hint is Duration:
        return _coerce_duration(value, path)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, path)
    if origin is not None and origin is not Literal and isinstance(origin, type):
        if issubclass(origin, Mapping):
            return _coerce_mapping(value, arguments, hint, path, build)
        if issubclass(origin, (Sequence, AbstractSet)):
            return _coerce_sequence(value, origin, arguments, hint, path, build)
    return _coerce_leaf(resolve_scalars(value), hint, path)


def resolve_scalars(value: Any) -> Any:
    """Return the output of `parse_yaml` with plain scalars and NumPy scalars as Python values."""
    match value:
        case PlainScalar():
            return value.value()
        case np.generic():
            return value.item()
        case Mapping():
            return {str(key): resolve_scalars(each) for key, each in value.items()}
        case list():
            return [resolve_scalars(each) for each in value]
    return value


def _coerce_union(value: Any, arms: tuple[Any, ...], hint: Any, path: str, build: Build) -> Any:
    # Try the YAML type of the scalar first: for `str | int`, 5 is an int and "5" a str.
    yaml_type = type(resolve_scalars(value))
    failure: ConfigError | None = None
    for arm in sorted(arms, key=lambda arm: arm is not yaml_type):
        if arm is str and not isinstance(value, str):
            continue
        try:
            return coerce(value, arm, path, build)
        except ConfigError as error:
            failure = error if arm not in (type(None), str) and failure is None else failure
    if len([arm for arm in arms if arm is not type(None)]) == 1 and failure is not None:
        raise failure
    raise ConfigError(f"{path}={_shown(value)} must be {_type_name(hint)}") from failure


def _coerce_duration(value: Any, path: str) -> Duration:
    try:
        return Duration.parse(value if isinstance(value, (str, Duration)) else resolve_scalars(value))
    except ConfigError as error:
        raise ConfigError(f"{path}={_shown(value)}: {error}") from None


def _coerce_mapping(value: Any, arguments: tuple[Any, ...], hint: Any, path: str, build: Build) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}={_shown(value)} must be {_type_name(hint)}, as {{a: 1}} or {path}.a=1")
    key_hint, value_hint = arguments or (Any, Any)
    return {
        coerce(key, key_hint, path, build): coerce(each, value_hint, f"{path}.{key}", build)
        for key, each in value.items()
    }


def _coerce_sequence(value: Any, origin: Any, arguments: tuple[Any, ...], hint: Any, path: str, build: Build) -> Any:
    if isinstance(value, str) and arguments == (int, int) and (ends := _RANGE.fullmatch(value)):
        value = [int(end) for end in ends.groups()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path}={_shown(value)} must be {_type_name(hint)}, as [{_shown(value)}]")
    if origin is tuple and arguments and arguments[-1] is not ...:
        if len(arguments) != len(value):
            raise ConfigError(f"{path}={_shown(value)} must have {len(arguments)} items, got {len(value)}")
        hints: Sequence[Any] = arguments
    else:
        hints = [arguments[0] if arguments else Any] * len(value)
    items = [coerce(each, hints[index], f"{path}[{index}]", build) for index, each in enumerate(value)]
    kind = {tuple: tuple, set: set, frozenset: frozenset}.get(origin, list)
    return kind(items)


def _coerce_leaf(value: Any, hint: Any, path: str) -> Any:
    try:
        adapter = pydantic.TypeAdapter(hint)
    except pydantic.errors.PydanticUserError as error:
        raise ConfigError(f"{path} has the type {_type_name(hint)}, which cannot be set from text") from error
    # Strict for scalars: True is no number, 64.0 no integer. Other types (Path, Enum, date) are parsed from text.
    strict = hint in (int, float, bool, str) or get_origin(hint) is Literal
    try:
        return adapter.validate_python(value, strict=strict)
    except pydantic.ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{path}={_shown(value)}: {message[:1].lower()}{message[1:]}") from None


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) else repr(resolve_scalars(value))


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")
