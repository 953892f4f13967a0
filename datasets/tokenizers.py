"""A byte tokenizer that needs no download, and Hugging Face's. Any function from text to token ids works, too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import DataError

Tokenizer: TypeAlias = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]
"""Maps a whole document to its tokens, including any bos and eos tokens."""


_PARALLELISM = "TOKENIZERS_PARALLELISM"


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


class HuggingFaceTokenizer:
    """A tokenizer of Hugging Face's `tokenizers`, with the special tokens that its own template adds.

    Args:
        source: a `tokenizer.json`, a folder with one, or the name of a repository on the Hub.
        append: a token such as "<|endoftext|>" to put after every document.

    Attributes:
        name_or_path: the name of the source and a digest of the whole tokenizer.

    Raises:
        DataError: the package is missing, the tokenizer cannot be read, or it has no token `append`.

    Example:
        >>> from headway.datasets.tokenizers import HuggingFaceTokenizer
        >>> def tokenizer():
        ...     return HuggingFaceTokenizer("models/gpt2/tokenizer.json", append="<|endoftext|>")
    """

    def __init__(self, source: str, *, append: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise DataError(f"the tokenizer {source} needs a package: pip install 'headway[huggingface]'") from error
        path = Path(source).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._loaded: Any = Loaded.from_file(str(path)) if path.exists() else Loaded.from_pretrained(source)
        except Exception as error:  # the package raises plain exceptions
            raise DataError(f"cannot read the tokenizer {source}: {error}") from error
        self._loaded.no_truncation()
        self._loaded.no_padding()
        self._last: list[int] = []
        if append is not None:
            number = self._loaded.token_to_id(append)
            if number is None:
                raise DataError(f"the tokenizer {source} has no token {append!r}")
            self._last = [number]
        digest = hashlib.sha256(f"{self._loaded.to_str()}\0{self._last}".encode()).hexdigest()[:12]
        self.name_or_path: str = f"{path.parent.name if path.name == 'tokenizer.json' else source} {digest}"

    def __call__(self, text: str) -> npt.NDArray[np.int32]:
        """Return the tokens of a document, int32 [T]."""
        return self.batch([text])[0]

    def batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the tokens of several documents, encoded in threads unless TOKENIZERS_PARALLELISM is false."""
        return [np.array([*each.ids, *self._last], np.int32) for each in self._loaded.encode_batch_fast(list(texts))]


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the tokenizers of Hugging Face from starting a thread for each CPU of the machine."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


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
