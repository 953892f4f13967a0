"""JSON without surprises: parsed strictly and in limited memory, written without NaN. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from ...errors import CheckpointError

MOST_BYTES = 1 << 30
"""Memory that parsing JSON may always take."""
# Bytes per character of the text, for the parsed value and a decoded copy; measured with CPython 3.11.
_MEMORY = {b"[": 200, b"{": 200, b",": 64, b":": 256}
_MEMORY_OF_TEXT, _MEMORY_OF_WIDE_TEXT = 3, 9


def dump_json(value: Any) -> bytes:
    """Return a value as JSON text."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def memory_bytes(text: bytes) -> int:
    """Return an upper bound of the memory that it takes to parse and decode JSON, without parsing it."""
    of_text = _MEMORY_OF_TEXT if text.isascii() else _MEMORY_OF_WIDE_TEXT
    return of_text * len(text) + sum(each * text.count(character) for character, each in _MEMORY.items())


def check_memory(text: bytes, file: str, tensor_bytes: int) -> None:
    """Check that JSON can be parsed in the memory of the tensors beside it, or in `MOST_BYTES`.

    Raises:
        CheckpointError: it takes more; the message names the file.
    """
    if (needed := memory_bytes(text)) > max(MOST_BYTES, tensor_bytes):
        raise CheckpointError(
            f"{file} has {len(text) >> 20} MiB of plain values, which take up to {needed >> 20} MiB of memory; allowed "
            f"are {MOST_BYTES >> 20} MiB, or as much as the tensors: return long lists and large dicts as tensors or "
            "NumPy arrays from state_dict()"
        )


def parse_json(text: bytes, file: str, *, tensor_bytes: int = 0) -> Any:
    """Parse JSON: no duplicate keys, no NaN or infinity.

    Args:
        text: the JSON.
        file: its name, for messages.
        tensor_bytes: size of the tensors beside it.

    Raises:
        CheckpointError: the text is not JSON, nested too deeply, or takes too much memory; the message names the file.
    """
    check_memory(text, file, tensor_bytes)
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({type(error).__name__}: {error})") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
