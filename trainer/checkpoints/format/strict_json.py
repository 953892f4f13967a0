"""JSON without surprises: parsed strictly, written without NaN. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from ...errors import CheckpointError


def dump_json(value: Any) -> bytes:
    """Return a value as JSON text."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def parse_json(text: bytes, file: str) -> Any:
    """Parse JSON: no duplicate keys, no NaN or infinity.

    Raises:
        CheckpointError: the text is not JSON, or nested too deeply; the message names the file.
    """
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
