"""Documents tokenized once, into a file with one group of neighbouring documents after the other. Each read is a group.

A format says what the file holds of a group; the lengths of all documents are in its index, with a checksum per group.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ..arrow import NUMBERS, Rows
from ..errors import DataError
from ..paths import PathLike, nearest
from ..tokenizers import Tokenizer, name_of, to_tokens
from .base import RowSource
from .index_cache import Index, cached_index

# At each start, so many tokens of the first documents are compared with those in the file.
_SAMPLE_TOKENS = 2**14

Document: TypeAlias = npt.NDArray[np.int32]
"""The tokens of a document, [T]."""


class Documents(NamedTuple):
    """The documents of a fragment.

    Attributes:
        tokens: of each document.
        columns: numbers that come with the documents, one for each, by name.
    """

    tokens: list[Document]
    columns: Mapping[str, npt.NDArray[Any]]


class Group(NamedTuple):
    """What the file holds of a group of documents, and what the index knows of it.

    Attributes:
        tokens: contiguous, of any shape.
        counts: numbers of the group, such as its rows.
        arrays: such as the parts of the rows; the index concatenates the arrays of all groups.
    """

    tokens: npt.NDArray[np.int32]
    counts: Mapping[str, int]
    arrays: Mapping[str, npt.NDArray[Any]]


class Tokens(NamedTuple):
    """How to get the tokens of documents, and the numbers that come with them."""

    column: str
    tokenizer: Tokenizer | None
    numbers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\0".join([self.column, name_of(self.tokenizer) if self.tokenizer else "", *self.numbers])

    def read(self, documents: RowSource, index: int, count: int | None = None) -> Documents:
        """Return the documents of a fragment, or its first `count`.

        Raises:
            DataError: the column has something else than text or tokens, or a column of `numbers` something else than
                a number for each document.
        """
        rows = documents.fragment(index).read()
        tokens = []
        for row, each in enumerate(self._column(rows, self.column)[:count]):
            try:
                tokens.append(self._tokens_of(each))
            except DataError as error:
                raise DataError(f"{documents.row_name(index, row)}: {error}") from error
        columns = {name: self._column(rows, name)[:count] for name in self.numbers}
        for name, column in columns.items():
            if column.ndim != 1 or column.dtype.kind not in NUMBERS:
                raise DataError(f"column {name!r} must have a number for each document")
        return Documents(tokens, columns)

    def read_all(self, documents: RowSource) -> Iterator[Documents]:
        """Yield the documents of each fragment in order, read by several threads, a few fragments ahead."""
        threads = os.cpu_count() or 1
        waiting: deque[Future[Documents]] = deque()
        with ThreadPoolExecutor(max_workers=threads) as pool:
            for index in range(len(documents.fragment_rows)):
                waiting.append(pool.submit(self.read, documents, index))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _column(self, rows: Rows, name: str) -> npt.NDArray[Any]:
        if name not in rows:
            raise DataError(f"the documents have no column {name!r}; {nearest(name, rows)}")
        return rows[name]

    def _tokens_of(self, document: Any) -> Document:
        if self.tokenizer is None:
            return to_tokens(document, f"column {self.column!r}")
        if not isinstance(document, str):
            raise DataError(f"column {self.column!r} must have text for the tokenizer, got {type(document).__name__}")
        return to_tokens(self.tokenizer(document), f"the tokenizer {name_of(self.tokenizer)}")


def open_tokens(
    documents: RowSource,
    tokens_of: Tokens,
    options: str,
    *,
    folder: PathLike,
    name: str,
    build: Callable[[Path], Index],
) -> tuple[str, Index]:
    """Return the file in a folder that has the tokens of some documents, and its index; `build` writes what is missing.

    Args:
        documents: the opened documents.
        tokens_of: how to get their tokens.
        options: what the file depends on beside the tokens.
        folder: for the file and its index.
        name: their names begin with it.
        build: writes the file at a path and returns its index.

    Raises:
        DataError: the tokenizer gives other tokens than when the file was written, or the folder cannot be written.
    """
    key = hashlib.sha256(f"{documents.fingerprint}\0{tokens_of}\0{options}".encode()).hexdigest()[:16]
    path = Path(folder).expanduser().absolute() / f"{name}.{key}.npz"
    file = path.with_suffix(".rows")
    index = cached_index(path, lambda: build(file))
    sampled, checksum = index.arrays["sample"].tolist()
    if tokens_of.tokenizer and _checksum(tokens_of.read(documents, 0, sampled).tokens) != checksum:
        raise DataError(
            f"the first documents have other tokens than those in {file}: the tokenizer has changed or is "
            "not deterministic. Use another index folder for another tokenizer"
        )
    return str(file), index


def check_complete(path: str, size_bytes: int) -> None:
    """Check the size of the file of an index.

    Raises:
        DataError: it is missing or has another size.
    """
    file = Path(path)
    if not file.exists() or file.stat().st_size != size_bytes:
        raise DataError(f"{file} is not complete: remove {file.with_suffix('.npz')}, so that both are written again")


@dataclass(frozen=True)
class TokenFileSource:
    """Opened documents and the groups of their tokens. Subclasses make the rows of a group.

    Attributes:
        documents: the opened documents.
        path: the file with the tokens.
        index: the arrays of `write_groups`; the counts include `rows`.
    """

    documents: RowSource
    path: str
    index: Index

    @property
    def options(self) -> str:
        """What the rows depend on beside the tokens of the documents."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.fragment_rows.sum())

    @property
    def skipped_rows(self) -> int:
        """Damaged documents that are left out."""
        return self.documents.skipped_rows

    @property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each group that has any."""
        rows: npt.NDArray[np.int64] = self.index.arrays["rows"][self.groups]
        return rows

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the documents' fingerprint, their tokens, and the options."""
        digest = hashlib.sha256(f"{self.documents.fingerprint} {self.options}".encode())
        digest.update(self.index.arrays["checksums"].tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def groups(self) -> npt.NDArray[np.int64]:
        """The group of each fragment: those that have rows."""
        return np.flatnonzero(self.index.arrays["rows"])

    def documents_of(self, group: int) -> slice:
        """Return the documents of a group."""
        return slice(*self._documents_before[self.index.arrays["groups"][group : group + 2]].tolist())

    def document_name(self, group: int, document: int) -> str:
        """Return the id of a document, counted from the first one of a group."""
        number = self.documents_of(group).start + document
        fragment = int(np.searchsorted(self._documents_before, number, side="right")) - 1
        return self.documents.row_name(fragment, number - int(self._documents_before[fragment]))

    @cached_property
    def _documents_before(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *self.documents.fragment_rows])


def write_groups(
    fragments: Iterable[Documents],
    path: Path,
    *,
    group_tokens: int,
    arrange: Callable[[Sequence[Document]], Group],
) -> dict[str, npt.NDArray[Any]]:
    """Write all groups to `path`, and return the arrays of their index.

    These are `lengths` and "column <name>" (of all documents), `groups` (first fragment of each group, and the end),
    `checksums` and the counts (of each group), the arrays of all groups, and `sample` (number and checksum of some
    first documents).

    Args:
        fragments: at least one.
        path: the file.
        group_tokens: a group ends with the first fragment that gives it so many tokens.
        arrange: returns what the file holds of some documents.
    """
    lengths: list[npt.NDArray[np.int64]] = []
    columns: list[Mapping[str, npt.NDArray[Any]]] = []
    groups: list[Group] = []
    checksums: list[int] = []
    ends, sample = [0], (0, 0)
    waiting: list[Document] = []
    temporary = path.with_name(f"{path.name}-writing")
    try:
        with temporary.open("wb") as file:

            def write() -> None:
                group = arrange(waiting)
                file.write(group.tokens.data)
                checksums.append(checksum_of(group.tokens))
                groups.append(group._replace(tokens=group.tokens[:0]))
                ends.append(len(lengths))
                waiting.clear()

            for tokens, numbers in fragments:
                if not lengths:
                    sampled = 1 + int(np.searchsorted(np.cumsum([*map(len, tokens)]), _SAMPLE_TOKENS))
                    sample = sampled, _checksum(tokens[:sampled])
                lengths.append(np.array([*map(len, tokens)], dtype=np.int64))
                columns.append(numbers)
                waiting += tokens
                if sum(map(len, waiting)) >= group_tokens:
                    write()
            if ends[-1] < len(lengths):
                write()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return {
        "lengths": np.concatenate(lengths),
        **{f"column {name}": np.concatenate([each[name] for each in columns]) for name in columns[0]},
        "groups": np.array(ends, dtype=np.int64),
        "checksums": np.array(checksums, dtype=np.int64),
        **{name: np.array([each.counts[name] for each in groups], dtype=np.int64) for name in groups[0].counts},
        **{name: np.concatenate([each.arrays[name] for each in groups]) for name in groups[0].arrays},
        "sample": np.array(sample, dtype=np.int64),
    }


def read_group(path: str, first: int, size: int, checksum: int) -> npt.NDArray[np.int32]:
    """Return `size` tokens from token `first` of the file on.

    Raises:
        DataError: the file is missing or has changed.
    """
    try:
        tokens = np.fromfile(path, np.int32, size, offset=4 * first)
    except OSError as error:
        raise DataError(
            f"cannot read the tokens in {path} ({error.strerror or error}): set index to a folder that "
            "every machine can read, or engine='threads'"
        ) from error
    if len(tokens) != size or checksum_of(tokens) != checksum:
        raise DataError(
            f"{path} has other tokens than when it was written: remove "
            f"{Path(path).with_suffix('.npz')}, so that both are written again"
        )
    return tokens


def checksum_of(tokens: npt.NDArray[np.int32]) -> int:
    """Return a checksum of contiguous tokens, as a signed 64-bit integer."""
    return int(np.uint64(xxhash.xxh3_64_intdigest(tokens.data)).astype(np.int64))


def _checksum(documents: Sequence[Document]) -> int:
    return checksum_of(np.concatenate(documents)) if documents else 0
