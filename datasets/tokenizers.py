"""Text to numbers: one tokenizer that is always there. Any function from text to numbers is another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Tokenizer: TypeAlias = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]
"""Takes a whole document, returns its tokens, with whatever marks its beginning and its end."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, with a mark before and after every document.

    Attributes:
        bos, eos: what comes before a document and after it.
        vocab_size: how many different tokens there are.

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
        """Returns the tokens of a document, int32."""
        tokens = np.empty(len(encoded := text.encode("utf-8", errors="surrogateescape")) + 2, dtype=np.int32)
        tokens[0], tokens[-1] = self.bos, self.eos
        tokens[1:-1] = np.frombuffer(encoded, dtype=np.uint8)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of some tokens; marks are left out, and bytes that are no text become a replacement sign."""
        return bytes(token for token in map(int, tokens) if token < 256).decode("utf-8", errors="replace")
