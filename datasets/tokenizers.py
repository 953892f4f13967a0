"""A byte tokenizer that needs no download. Any function from text to token ids works in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import DataError

Tokenizer: TypeAlias = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]
"""Maps a whole document to its tokens, including any bos and eos tokens."""


class ByteTokenizer:
    """Tokenizes text as UTF-8 bytes, with bos and eos around every document.

    Attributes:
        bos, eos: tokens before and after a document.
        vocab_size: number of distinct tokens.

    Example:
        >>> from headway.datasets.tokenizers import ByteTokenizer
        >>> tokens = ByteTokenizer()("def")
        >>> tokens.tolist(), ByteTokenizer().decode(tokens)
        ([256, 100, 101, 102, 257], 'def')
    """

    bos: int = 256
    eos: int = 257
    vocab_size: int = 258

    def __call__(self, text: str) -> npt.NDArray[np.int32]:
        """Return the tokens of a document, int32 [T]."""
        tokens = np.empty(len(encoded := text.encode("utf-8", errors="surrogateescape")) + 2, dtype=np.int32)
        tokens[0], tokens[-1] = self.bos, self.eos
        tokens[1:-1] = np.frombuffer(encoded, dtype=np.uint8)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of some tokens. Skips bos and eos; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in map(int, tokens) if token < 256).decode("utf-8", errors="replace")


def name_of(tokenizer: Tokenizer) -> str:
    """Return the name of the function, method or type, and what the object was loaded from: its `name_or_path`."""
    of = getattr(getattr(tokenizer, "__self__", tokenizer), "name_or_path", None)
    kind = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" {of}" if of else "")


def to_tokens(values: Any, origin: str, document: str = "") -> npt.NDArray[np.int32]:
    """Return the tokens of a document as int32 [T].

    Args:
        values: what a tokenizer returned, or what a column holds.
        origin: where they come from, for errors.
        document: names the document in errors, as in " for a.txt".

    Raises:
        DataError: they are not a flat sequence of integers from 0 to 2**31 - 1.
    """
    tokens = np.asarray(values)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise DataError(
            f"{origin} returned {tokens.dtype} of shape {tokens.shape}{document}; it must return a flat sequence of "
            "integers"
        )
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 2**31):
        raise DataError(
            f"{origin} returned tokens from {tokens.min()} to {tokens.max()}{document}; they are stored as int32 and "
            "must be >= 0"
        )
    return tokens.astype(np.int32)
