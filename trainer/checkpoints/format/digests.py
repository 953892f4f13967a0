"""Digests of plain values and tensors, to compare two states."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from .plain_values import tensor_names
from .strict_json import dump_json
from .tensor_files import bytes_of
from .threads import in_threads


def digest_of(value: Any) -> str:
    """Return a digest of a plain value, 16 hex digits: numbers, text, tensors, nested in dicts and lists.

    Lists and tuples count as equal; for any other object only the class counts.
    """
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()[:16]


def tensor_digests(
    tensors: Mapping[str, torch.Tensor], known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return, by name, the type of each local tensor and XXH3-128 of its bytes, such as "float32 0f3a...".

    Args:
        tensors: by name.
        known: XXH3-128 of some of them, in hex digits.
    """
    unknown = [name for name in tensors if name not in known]
    # Copied from devices here: another thread would make a context on device 0.
    digests = in_threads(xxhash.xxh3_128_hexdigest, (bytes_of(tensors[name]) for name in unknown), len)
    found = {**known, **dict(zip(unknown, digests, strict=True))}
    return {name: f"{str(each.dtype).removeprefix('torch.')} {found[name]}" for name, each in tensors.items()}


def digests_by_key(encoded: Any, tensor_of: Callable[[str], torch.Tensor]) -> dict[str, str]:
    """Return a digest of each value of an encoded state that is a dict, by key; of any other state one, by ""."""
    values: Mapping[str, Any] = encoded if isinstance(encoded, dict) else {"": encoded}
    return {
        key: digest_of([dump_json(value), *(tensor_of(name) for name in tensor_names(value))])
        for key, value in values.items()
    }


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(bytes_of(value))
    elif isinstance(value, Mapping):
        digest.update(b"{")
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _feed(digest, value[key])
        digest.update(b"}")
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        for each in value:
            _feed(digest, each)
        digest.update(b"]")
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(f"{value!r},".encode())
    else:
        digest.update(type(value).__qualname__.encode())
