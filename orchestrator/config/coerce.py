"""Convert YAML 1.2 scalars to the types of fields: `3e-4` is a number, `no` is a string."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
import yaml

from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration

_CORE = {
    "null": re.compile(r"(?:null|Null|NULL|~|)"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)"),
    "int": re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}


_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")
_BREAK = re.compile("[\x85\u2028\u2029]")


class PlainScalar(str):
    """An unquoted YAML scalar; the type of its field decides whether it is a number."""

    __slots__ = ()

    def value(self) -> Any:
        """Return the value by YAML's own rules."""
        for kind, pattern in _CORE.items():
            if pattern.fullmatch(self):
                match kind:
                    case "null":
                        return None
                    case "bool":
                        return self.lower() == "true"
                    case "int":
                        return int(self)
                    case "float":
                        return float(self.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return str(self)


class _Loader(yaml.SafeLoader):
    # Every scalar stays text; see PlainScalar.
    yaml_implicit_resolvers: dict[str, Any] = {}


# libyaml's dumper takes an eighth of the time, which matters for each trial of a sweep.
class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    # Quote strings that this module would read as another type.
    yaml_implicit_resolvers = {
        None: [(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{each.pattern})$")) for kind, each in _CORE.items()]
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _word(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(node.value) if node.style else PlainScalar(node.value)


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Unquoted Unicode line breaks would be read as spaces.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAK.search(text) else None)


_Loader.add_constructor("tag:yaml.org,2002:str", _word)
_Dumper.add_representer(str, _quoted)


def quote(text: str) -> str:
    """Return text as the value of an override, which is YAML: "/shared/proj #2" alone would end at the comment."""
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
        value: plain values, whose scalars may be `PlainScalar`.
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
        return _resolved(value)
    if hint is str and isinstance(value, PlainScalar):
        return str(value)
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, arguments, hint, path, build)
    if hint is Duration:
        return _duration(value, path)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, path)
    if origin is not None and origin is not Literal and isinstance(origin, type):
        if issubclass(origin, Mapping):
            return _mapping(value, arguments, hint, path, build)
        if issubclass(origin, (Sequence, AbstractSet)):
            return _items(value, origin, arguments, hint, path, build)
    return _validated(_resolved(value), hint, path)


def _resolved(value: Any) -> Any:
    match value:
        case PlainScalar():
            return value.value()
        case Mapping():
            return {str(key): _resolved(each) for key, each in value.items()}
        case list():
            return [_resolved(each) for each in value]
    return value


def _first_that_fits(value: Any, arms: tuple[Any, ...], hint: Any, path: str, build: Build) -> Any:
    # Try the type that the scalar looks like first: for `str | int`, 5 is a number and "5" in quotes is not.
    looks_like = type(_resolved(value))
    complaint: ConfigError | None = None
    for arm in sorted(arms, key=lambda arm: arm is not looks_like):
        if arm is str and not isinstance(value, str):
            continue
        try:
            return coerce(value, arm, path, build)
        except ConfigError as error:
            complaint = error if arm not in (type(None), str) and complaint is None else complaint
    if len([arm for arm in arms if arm is not type(None)]) == 1 and complaint is not None:
        raise complaint
    raise ConfigError(f"{path}={_shown(value)}: it should be {_type_name(hint)}") from complaint


def _duration(value: Any, path: str) -> Duration:
    try:
        return Duration.parse(value if isinstance(value, (str, Duration)) else _resolved(value))
    except ConfigError as error:
        raise ConfigError(f"{path}={_shown(value)}: {error}") from None


def _mapping(value: Any, arguments: tuple[Any, ...], hint: Any, path: str, build: Build) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}={_shown(value)}: it should be {_type_name(hint)}, as {{a: 1}} or {path}.a=1")
    key_hint, value_hint = arguments or (Any, Any)
    return {
        coerce(key, key_hint, path, build): coerce(each, value_hint, f"{path}.{key}", build)
        for key, each in value.items()
    }


def _items(value: Any, origin: Any, arguments: tuple[Any, ...], hint: Any, path: str, build: Build) -> Any:
    if isinstance(value, str) and arguments == (int, int) and (ends := _RANGE.fullmatch(value)):
        value = [int(end) for end in ends.groups()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path}={_shown(value)}: it should be {_type_name(hint)}, as [{_shown(value)}]")
    if origin is tuple and arguments and arguments[-1] is not ...:
        if len(arguments) != len(value):
            raise ConfigError(f"{path}={_shown(value)}: it should have {len(arguments)} items, not {len(value)}")
        hints: Sequence[Any] = arguments
    else:
        hints = [arguments[0] if arguments else Any] * len(value)
    items = [coerce(each, hints[index], f"{path}[{index}]", build) for index, each in enumerate(value)]
    kind = {tuple: tuple, set: set, frozenset: frozenset}.get(origin, list)
    return kind(items)


def _validated(value: Any, hint: Any, path: str) -> Any:
    try:
        adapter = pydantic.TypeAdapter(hint)
    except pydantic.errors.PydanticUserError as error:
        raise ConfigError(f"{path} is a {_type_name(hint)}, which cannot be given as text") from error
    # Strict for scalars: True is not a number, and 64.0 not an integer. Others (Path, Enum, date) come from text.
    strict = hint in (int, float, bool, str) or get_origin(hint) is Literal
    try:
        return adapter.validate_python(value, strict=strict)
    except pydantic.ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{path}={_shown(value)}: {message[:1].lower()}{message[1:]}") from None


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) else repr(_resolved(value))


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")
