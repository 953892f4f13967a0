"""A byte tokenizer that needs no download. Any function from text to token ids works in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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
