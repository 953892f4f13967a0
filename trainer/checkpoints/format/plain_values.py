"""Encode the state of a part as JSON and named tensors, and decode it without running any code that the file names.

Text, booleans, null, finite floats, lists, and dicts with text keys are themselves in JSON. Every other value is an
object with one key that begins with "$" and says what it is:

    {"$tensor": "optimizers/main/state/weight/exp_avg"}    a tensor, by its name in the tensor files
    {"$tuple": [1, 2]}   {"$set": [...]}   {"$frozenset": [...]}   {"$deque": [[...], null]}
    {"$dict": [[key, value], ...]}   {"$ordered_dict": ...}   {"$counter": ...}    dicts with any keys
    {"$float": "inf"}   {"$int": "0x1fff..."}   {"$complex": [1.0, 2.0]}   {"$bytes": "base64"}
    {"$enum": ["module:Class", "MEMBER"]}   {"$dataclass": ["module:Class", {"field": ...}]}
    {"$namedtuple": ["module:Class", [...]]}   {"$numpy": ["float32", 1.5]}   {"$ndarray": ["float32", tensor]}
    {"$dtype": "bfloat16"}   {"$device": "cuda:0"}   {"$size": [2, 3]}

A class is looked up among the modules that are already imported, and an object is made without calling any of its
methods. Two references to one tensor remain references to one tensor; two references to one list become two lists.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import operator
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError

_AS_IN_JSON = frozenset((str, bool, type(None)))
_LEAVES = frozenset((int, float, bool, str, bytes, type(None)))
PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of tensors that are not sharded and hold no others; a look-up takes less time than `isinstance`."""
_layout = operator.attrgetter("layout", "is_quantized", "is_nested", "is_meta")
_PLAIN_LAYOUT = (torch.strided, False, False, False)
_MANY_BYTES = 256
_INT_LIMIT = 1 << 63
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_MAPPINGS = {"$dict": dict, "$ordered_dict": OrderedDict, "$counter": Counter}
_NUMPY_KINDS = "biufc"


class Table(NamedTuple):
    """The JSON of a dict of dicts of tensors, to be used again while the dicts have the same keys.

    Attributes:
        keys: the keys of the outer dict, and then of all inner dicts.
        lengths: of the inner dicts.
        wanted: the name of each tensor unless it is tied to another.
        ids: of the tensors of the last save, which need not be checked again.
        names: the name of each tensor.
        encoded: the JSON.
    """

    keys: list[str]
    lengths: list[int]
    wanted: list[str]
    ids: list[int]
    names: list[str]
    encoded: dict[str, Any]


def encode_state(part: str, state: Any, tables: dict[str, Table] | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON of a state, and its live tensors by name ("part/key/key").

    Later changes of the state do not affect the JSON, which must not be changed.

    Args:
        part: name of the part.
        state: nested plain values and tensors.
        tables: filled by this call, and used by later calls, which then take less time.

    Raises:
        CheckpointError: a value is neither plain nor a tensor; the message names its part and keys, and what to return
            from `state_dict` instead.
    """
    tensors = _TensorNames({} if tables is None else tables)
    try:
        encoded = _encode(state, part, tensors)
    except RecursionError as error:
        raise CheckpointError(
            f"the state of part {part!r} contains itself, or is nested too deeply: return plain values from "
            "state_dict()"
        ) from error
    tensors.check()
    return encoded, tensors.by_name


def decode_state(encoded: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild a state. `tensor_of` returns a tensor by its name, with its values; it is called once for each.

    Raises:
        CheckpointError: this is not what `encode_state` returns, or a class in it is not imported in this process.
    """
    given: dict[str, torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        if name not in given:
            given[name] = tensor_of(name)
        return given[name]

    try:
        return _decode(encoded, tensor)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise CheckpointError(f"a value cannot be decoded ({type(error).__name__}: {error})") from error


def tensor_names(encoded: Any) -> Iterator[str]:
    """Yield the names of all tensors in encoded state; one that is referred to twice, twice."""
    return (name for _, name in tensor_places(encoded, ""))


def tensor_places(encoded: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield each place in encoded state that refers to a tensor, as "part/key/key", and the tensor's name.

    The name is the first place of the tensor. Whether two places have one tensor or equal ones may differ between a
    saved state and the live one, since loading an optimizer copies each.
    """
    if isinstance(encoded, dict):
        if encoded.keys() == {"$tensor"} and isinstance(name := encoded["$tensor"], str):
            yield place, name
        else:
            for key, each in encoded.items():
                yield from tensor_places(each, place if key.startswith("$") else f"{place}/{key}")
    elif isinstance(encoded, list):
        for index, each in enumerate(encoded):
            yield from tensor_places(each, f"{place}/{index}")


def iter_tensors(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield every tensor in nested dicts, lists and tuples, with its keys."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, (dict, Mapping)):  # dict first: a faster check
        for key, value in state.items():
            if type(value) not in _LEAVES:
                yield from iter_tensors(value, (*path, str(key)))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            if type(value) not in _LEAVES:
                yield from iter_tensors(value, (*path, str(index)))


def values_of_rows(rows: Mapping[Any, Any]) -> list[Any] | None:
    """Return the values of a dict of dicts; None if not all of its values are dicts."""
    if not set(map(type, rows.values())) <= {dict}:
        return None
    return list(itertools.chain.from_iterable(map(dict.values, rows.values())))


class _TensorNames:
    """The names of the tensors of one part."""

    def __init__(self, tables: dict[str, Table]) -> None:
        self.tables = tables
        self.by_name: dict[str, torch.Tensor] = {}
        self._unchecked: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}  # by id, which is unique because the tensors above are alive

    def add(self, wanted: str, tensor: torch.Tensor) -> str:
        """Return the tensor's name; a new tensor gets the wanted name, or the next free one."""
        name = self._names.setdefault(id(tensor), wanted)
        if name is not wanted:
            return name
        count = 1
        while name in self.by_name:
            name, count = f"{wanted}#{count}", count + 1
            self._names[id(tensor)] = name
        self.by_name[name] = self._unchecked[name] = tensor
        return name

    def add_all(
        self, wanted: Sequence[str], tensors: Sequence[torch.Tensor], ids: Sequence[int], *, are_checked: bool
    ) -> list[str] | None:
        """Return the names of many tensors, of which each wants another; None, and add none, if one is not free."""
        if not self.by_name.keys().isdisjoint(wanted):
            return None
        names = list(map(self._names.setdefault, ids, wanted))
        self.by_name.update(zip(names, tensors, strict=True))
        if not are_checked:
            self._unchecked.update(zip(names, tensors, strict=True))
        return names

    def check(self) -> None:
        """Check that all tensors can be saved.

        Raises:
            CheckpointError: one of them cannot.
        """
        tensors = self._unchecked.values()
        if set(map(type, tensors)) - PLAIN_TENSORS or any(map(_PLAIN_LAYOUT.__ne__, map(_layout, tensors))):
            for name, tensor in self._unchecked.items():
                _check_tensor(tensor, name)


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    if type(tensor) in PLAIN_TENSORS:
        pass
    elif isinstance(tensor, DTensor):
        local = tensor.to_local()
        if type(local) is not torch.Tensor:
            raise _refusal(path, local, "the plain tensors in it")
    elif hasattr(tensor, "__tensor_flatten__"):
        raise _refusal(path, tensor, "the plain tensors in it, such as __tensor_flatten__ names")
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _refusal(path, tensor, "the plain tensors in it")
    elif not isinstance(tensor, (torch.nn.Parameter, torch.nn.Buffer)):
        raise _refusal(path, tensor, "tensor.as_subclass(torch.Tensor) of it")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise _refusal(path, tensor, "its dense or unquantised parts, such as values() or int_repr()")
    if tensor.is_meta:
        raise _refusal(path, tensor, "a tensor with values, which one on the meta device has not,")


def _encode(value: Any, path: str, tensors: _TensorNames) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        return {"$tensor": tensors.add(path, value)}
    if kind in _AS_IN_JSON:
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensors.add(path, value)}
    if kind is int:
        return value if -_INT_LIMIT <= value < _INT_LIMIT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": _float_text(value)}
    if kind is dict:
        if all([type(key) is str and key[:1] != "$" for key in value]):
            if (encoded := _encode_table(value, path, tensors)) is not None:
                return encoded
            return {key: _encode(each, f"{path}/{key}", tensors) for key, each in value.items()}
        return {"$dict": _pairs(value, path, tensors)}
    if kind is list:
        return _items(value, path, tensors)
    if kind is tuple:
        return {"$tuple": _items(value, path, tensors)}
    if kind is bytes:
        return {"$bytes": _encode_bytes(value, path, tensors)}
    return _encode_rare(value, kind, path, tensors)


def _encode_table(rows: dict[str, Any], path: str, tensors: _TensorNames) -> Any:
    """Encode a dict of dicts of tensors, such as the state of an optimizer; return None for any other.

    In columns, by functions in C: models and optimizers have thousands of tensors, and a save delays the training.
    """
    values = values_of_rows(rows)
    if not values or not set(map(type, values)) <= PLAIN_TENSORS:
        return None
    keys, lengths = [*rows, *itertools.chain.from_iterable(rows.values())], list(map(len, rows.values()))
    ids, table = list(map(id, values)), tensors.tables.get(path)
    if table is None or table.keys != keys or table.lengths != lengths:
        wanted = [f"{path}/{row}/{key}" for row, each in rows.items() for key in each]
        if len(set(wanted)) != len(wanted) or any([type(key) is not str or key[:1] == "$" for key in keys]):
            return None
        table = Table(keys, lengths, wanted, [], [], {})
    names = tensors.add_all(table.wanted, values, ids, are_checked=ids == table.ids)
    if names is None:
        return None
    if names != table.names:  # in a new table, or because other tensors are tied
        following = iter(names)
        encoded = {row: {key: {"$tensor": next(following)} for key in each} for row, each in rows.items()}
        table = table._replace(names=names, encoded=encoded)
    tensors.tables[path] = table._replace(ids=ids)
    return table.encoded


def _encode_rare(value: Any, kind: type, path: str, tensors: _TensorNames) -> Any:
    if isinstance(value, Enum):
        # A combination of flags is no member of the enum.
        if value.name is None or value.name not in kind.__members__:  # type: ignore[attr-defined]
            raise _refusal(path, value, "its value")
        return {"$enum": [_class_name(kind, path, value), value.name]}
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        if extra := sorted(getattr(value, "__dict__", {}).keys() - set(names)):
            raise _refusal(path, value, f"a dict of what it holds: its attribute {extra[0]!r} is no field")
        fields = {name: _encode(getattr(value, name), f"{path}/{name}", tensors) for name in names}
        return {"$dataclass": [_class_name(kind, path, value), fields]}
    for tag, mapping in _MAPPINGS.items():
        if kind is mapping:
            return {tag: _pairs(value, path, tensors)}
    if kind is set or kind is frozenset:
        return {f"${kind.__name__}": _items(value, path, tensors)}
    if kind is deque:
        return {"$deque": [_items(value, path, tensors), value.maxlen]}
    if kind is torch.Size:
        return {"$size": list(value)}
    if isinstance(value, tuple) and "_fields" in vars(kind):
        return {"$namedtuple": [_class_name(kind, path, value), _items(value, path, tensors)]}
    if kind is complex:
        return {"$complex": [_encode(each, path, tensors) for each in (value.real, value.imag)]}
    if kind is bytearray:
        return {"$bytearray": _encode_bytes(bytes(value), path, tensors)}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _NUMPY_KINDS and value.dtype.itemsize <= 16:
        return _encode_numpy(value, path, tensors)
    raise _refusal(path, value, _instead_of(value))


def _encode_numpy(value: Any, path: str, tensors: _TensorNames) -> Any:
    kind = value.dtype.newbyteorder("=")
    if kind.name not in ("longdouble", "float128"):
        if isinstance(value, np.generic):
            return {"$numpy": [kind.name, _encode(value.item(), path, tensors)]}
        if type(value) is np.ndarray:
            copy = torch.from_numpy(np.array(value, kind, order="C"))
            return {"$ndarray": [kind.name, {"$tensor": tensors.add(path, copy)}]}
    raise _refusal(path, value, "an array of float64")


def _encode_bytes(value: bytes, path: str, tensors: _TensorNames) -> Any:
    if len(value) <= _MANY_BYTES:
        return base64.b64encode(value).decode()
    return {"$tensor": tensors.add(path, torch.frombuffer(bytearray(value), dtype=torch.uint8))}


def _items(values: Any, path: str, tensors: _TensorNames) -> list[Any]:
    if set(map(type, values)) <= _AS_IN_JSON:  # such as the names of thousands of parameters
        return list(values)
    return [_encode(each, f"{path}/{index}", tensors) for index, each in enumerate(values)]


def _pairs(values: Mapping[Any, Any], path: str, tensors: _TensorNames) -> list[Any]:
    return [
        [_encode(key, f"{path}/{key}", tensors), _encode(each, f"{path}/{key}", tensors)]
        for key, each in values.items()
    ]


def _float_text(value: float) -> str:
    """Return the bits of a float that JSON does not have; the common ones by name."""
    for text in ("inf", "-inf", "nan"):
        if struct.pack(">d", value) == struct.pack(">d", float(text)):
            return text
    return struct.pack(">d", value).hex()


def _class_name(kind: type, path: str, value: Any) -> str:
    if _imported_class(f"{kind.__module__}:{kind.__qualname__}") is not kind:
        raise _refusal(path, value, "its fields as a dict, or define its class at the top level of a module")
    return f"{kind.__module__}:{kind.__qualname__}"


def _refusal(path: str, value: Any, instead: str) -> CheckpointError:
    part, _, keys = path.partition("/")
    kind = type(value)
    where = f"part {part!r}" + (f", key {keys!r}" if keys else "")
    return CheckpointError(
        f"{where} holds a {kind.__module__}.{kind.__qualname__}, which is neither a plain value nor a tensor: "
        f"return {instead} from state_dict() instead"
    )


def _instead_of(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return "its get_state()"
    if isinstance(value, (PurePath, np.str_)):
        return "str() of it"
    if isinstance(value, Mapping):
        return "dict() of it"
    if hasattr(value, "state_dict"):
        return "its state_dict()"
    if hasattr(value, "isoformat"):
        return "its isoformat()"
    if callable(value):
        return "a name of it"
    return "what it holds as plain values"


def _decode(value: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(each, tensor_of) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, of),) = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, of, tensor_of)
    return {key: _decode(each, tensor_of) for key, each in value.items()}


def _decode_tagged(tag: str, of: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    if tag == "$tensor":
        return tensor_of(_text(of))
    if tag == "$tuple":
        return tuple(_decode_list(of, tensor_of))
    if tag in _MAPPINGS:
        pairs = {_decode(key, tensor_of): _decode(each, tensor_of) for key, each in of}
        return pairs if tag == "$dict" else _MAPPINGS[tag](pairs)
    if tag in ("$set", "$frozenset"):
        return (set if tag == "$set" else frozenset)(_decode_list(of, tensor_of))
    if tag == "$deque":
        items, maxlen = of
        return deque(_decode_list(items, tensor_of), maxlen)
    if tag == "$float":
        return float(of) if of in ("inf", "-inf", "nan") else struct.unpack(">d", bytes.fromhex(of))[0]
    if tag == "$int":
        return int(_text(of), 16)
    if tag == "$complex":
        real, imaginary = (_decode(each, tensor_of) for each in of)
        return complex(float(real), float(imaginary))
    if tag in ("$bytes", "$bytearray"):
        data = base64.b64decode(of, validate=True) if isinstance(of, str) else _bytes_of(_decode(of, tensor_of))
        return data if tag == "$bytes" else bytearray(data)
    if tag == "$size":
        return torch.Size([int(each) for each in of])
    if tag == "$dtype":
        return _DTYPES[f"torch.{_text(of)}"]
    if tag == "$device":
        return torch.device(_text(of))
    if tag == "$numpy":
        name, item = of
        return _numpy_dtype(name).type(_decode(item, tensor_of))
    if tag == "$ndarray":
        name, tensor = of
        return cast(torch.Tensor, _decode(tensor, tensor_of)).cpu().numpy().astype(_numpy_dtype(name), copy=False)
    if tag in ("$enum", "$dataclass", "$namedtuple"):
        name, content = of
        return _decode_object(tag, _text(name), content, tensor_of)
    raise CheckpointError(f"a value has the unknown kind {tag!r}")


def _decode_object(tag: str, name: str, content: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    kind = _imported_class(name)
    if kind is None:
        raise CheckpointError(f"it holds a {name}, and this process has not imported such a class: import it first")
    if tag == "$enum" and issubclass(kind, Enum):
        return type.__getattribute__(kind, "_member_map_")[_text(content)]
    if tag == "$namedtuple" and issubclass(kind, tuple) and isinstance(fields := vars(kind).get("_fields"), tuple):
        values = _decode_list(content, tensor_of)
        if len(values) == len(fields):
            return tuple.__new__(kind, values)
    if tag == "$dataclass" and dataclasses.is_dataclass(kind):
        names = {each.name for each in dataclasses.fields(kind)}
        if isinstance(content, dict) and content.keys() == names:
            made = object.__new__(kind)
            for field, each in content.items():
                object.__setattr__(made, field, _decode(each, tensor_of))
            return made
    raise CheckpointError(f"it holds a {name} that does not fit this class as it is now")


def _decode_list(of: Any, tensor_of: Callable[[str], torch.Tensor]) -> list[Any]:
    if not isinstance(of, list):
        raise TypeError(f"expected a list, got {type(of).__name__}")
    return [_decode(each, tensor_of) for each in of]


def _imported_class(name: str) -> type | None:
    """Return a class of a module that is already imported, without calling any code of the module."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for each in path.split("."):
        if not isinstance(found, (ModuleType, type)):
            return None
        found = vars(found).get(each)
    return found if isinstance(found, type) else None


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    dtype = np.dtype(_text(name))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"{name!r} is no type of numbers")
    return dtype


def _bytes_of(tensor: Any) -> bytes:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
        raise TypeError("bytes must be a tensor of uint8")
    return bytes(tensor.cpu().numpy().tobytes())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value
