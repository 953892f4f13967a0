"""Packs documents of any length into rows of fixed length. A packed row is a row like any other: nothing else changes.

Documents are packed within groups of neighbouring fragments, so that reading a packed row needs only its group. Which
parts of which documents share a row follows from the lengths alone. An index has the length of every document, and a
checksum of the tokens of every fragment, with which each read is compared.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arrow import Rows
from .errors import DataError
from .formats.base import DataFormat, Fragment, RowSource
from .formats.index_cache import Index, cached_index
from .mixture import Mixture
from .paths import PathLike, nearest
from .tokenizers import Tokenizer, name_of, to_tokens

logger = logging.getLogger("headway.datasets")

# Documents are packed with others of at least so many rows. More fill the rows better, and take more memory.
_GROUP_ROWS = 128


class Piece(NamedTuple):
    """Tokens of a document from `start` to before `stop`."""

    document: int
    start: int
    stop: int


def pack(lengths: Sequence[int], row_length: int) -> list[list[Piece]]:
    """Return the pieces of every row, for documents of these lengths. Every token is in exactly one piece.

    A document is cut only where a row is full: it fills whole rows, and its rest shares a row with others. The rests
    are placed from the longest to the shortest, each into the fullest row that has room (best fit decreasing).
    """
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for document, length in enumerate(lengths):
        whole = length - length % row_length
        rows += [[Piece(document, start, start + row_length)] for start in range(0, whole, row_length)]
        if whole < length:
            rests.append(Piece(document, whole, length))
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    rests.sort(key=lambda each: each.start - each.stop)
    for piece in rests:
        size = piece.stop - piece.start
        at = bisect_left(room, (size, -1))
        if at < len(room):
            free, row = room.pop(at)
            rows[row].append(piece)
        else:
            free, row = row_length, len(rows)
            rows.append([piece])
        if free > size:
            insort(room, (free - size, row))
    return rows


@dataclass(frozen=True)
class Packed:
    """Documents packed into rows of fixed length, to be read by a `Stream`, alone or as a part of a mixture.

    The columns, each of shape [B, length]:

    - `tokens`: int32, filled up with `pad`.
    - `document_ids`: int32, 0, 1, ... for the documents of a row, and -1 for padding.
    - `positions`: int32, from 0 in each document of a row, and 0 for padding.
    - `mask`: bool, False for padding.

    Args:
        data: the documents, such as `JsonLines`.
        length: tokens of a row. A longer document continues in other rows.
        index: local folder for the index. The first start tokenizes all documents to build it.
        column: the column with the text, or with the tokens if `tokenizer` is None.
        tokenizer: maps a text to its tokens. Must be deterministic. It runs when rows are read, in threads or in
            other processes.
        pad: token that fills up a row.

    Example:
        >>> from headway.datasets.formats.jsonl import JsonLines
        >>> from headway.datasets.packing import Packed
        >>> from headway.datasets.stream import Stream
        >>> from headway.datasets.tokenizers import ByteTokenizer
        >>> stream = Stream(Packed(JsonLines("web"), length=2048, index="index", tokenizer=ByteTokenizer()))
    """

    data: DataFormat
    length: int
    index: PathLike
    column: str = "text"
    tokenizer: Tokenizer | None = None
    pad: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError(f"length must be an integer >= 1, got {self.length}")
        if isinstance(self.data, Mixture):
            raise DataError(
                "a Mixture cannot be packed, because packing takes neighbours: make a Mixture of Packed data"
            )

    def open(self) -> PackedSource:
        """Open the documents, and read their index or build it.

        Raises:
            DataError: the documents cannot be opened, or `column` has something else than text or tokens.
        """
        documents = self.data.open()
        tokens_of = Tokens(self.column, self.tokenizer)
        named = f"{documents.fingerprint}\0{self.column}\0{name_of(self.tokenizer) if self.tokenizer else ''}"
        key = hashlib.sha256(f"{named}\0{self.length}".encode()).hexdigest()[:16]
        folder = Path(self.index).expanduser().absolute()
        index = cached_index(folder / f"packed-{self.length}.{key}.npz", lambda: self._build(documents, tokens_of))
        if not index.arrays["rows"].any():
            raise DataError(f"{self} has no tokens")
        return PackedSource(self, documents, tokens_of, index)

    def _build(self, documents: RowSource, tokens_of: Tokens) -> Index:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            fragments = [documents.fragment(index) for index in range(len(documents.fragment_rows))]
            measured = list(pool.map(tokens_of.measure, fragments))
        lengths = np.concatenate([each for each, _ in measured])
        groups, rows, first, tokens = [0], [], 0, 0
        for index, (own, _) in enumerate(measured):
            tokens += int(own.sum())
            if tokens >= _GROUP_ROWS * self.length or index == len(measured) - 1:
                last = int(documents.fragment_rows[: index + 1].sum())
                rows.append(len(pack(lengths[first:last].tolist(), self.length)))
                groups.append(index + 1)
                first, tokens = last, 0
        arrays = {
            "lengths": lengths,
            "checksums": np.array([checksum for _, checksum in measured], dtype=np.int64),
            "groups": np.array(groups, dtype=np.int64),
            "rows": np.array(rows, dtype=np.int64),
        }
        logger.info(
            "packed %d documents of %s, %d tokens, into %d rows of %d, %.2f %% full",
            *(len(lengths), self.data, lengths.sum(), sum(rows), self.length),
            100 * lengths.sum() / max(1, sum(rows) * self.length),
        )
        return Index(arrays, {})

    def __str__(self) -> str:
        return str(self.data)


class Tokens(NamedTuple):
    """How to get the tokens of documents."""

    column: str
    tokenizer: Tokenizer | None

    def read(self, fragment: Fragment) -> list[npt.NDArray[np.int32]]:
        """Return the tokens of each document of a fragment, as int32."""
        return [np.ascontiguousarray(each, dtype=np.int32) for each in self._documents(fragment)]

    def measure(self, fragment: Fragment) -> tuple[npt.NDArray[np.int64], int]:
        """Return the length of each document of a fragment, and a checksum of all tokens, after checking them.

        Raises:
            DataError: the column has something else than text or tokens.
        """
        origin = f"the tokenizer {name_of(self.tokenizer)}" if self.tokenizer else f"column {self.column!r}"
        documents = [to_tokens(each, origin) for each in self._documents(fragment)]
        return np.array([len(each) for each in documents], dtype=np.int64), _checksum(documents)

    def _documents(self, fragment: Fragment) -> Iterable[Any]:
        rows = fragment.read()
        if self.column not in rows:
            raise DataError(f"the documents have no column {self.column!r}; {nearest(self.column, rows)}")
        documents = rows[self.column]
        if self.tokenizer is None:
            return documents
        for each in documents:
            if not isinstance(each, str):
                raise DataError(f"column {self.column!r} must have text for the tokenizer, got {type(each).__name__}")
        return map(self.tokenizer, documents)


def _checksum(documents: Sequence[npt.NDArray[np.int32]]) -> int:
    checksum = 0
    for each in documents:
        checksum = zlib.crc32(each.data, checksum)
    return checksum


class PackedFragment(NamedTuple):
    """Some neighbouring fragments of documents, packed.

    Attributes:
        fragments, checksums: the documents, and the checksums of their tokens.
        lengths: of the documents.
        tokens_of: how to get their tokens.
        row_length, pad: see `Packed`.
        num_rows: number of packed rows.
    """

    fragments: tuple[Fragment, ...]
    checksums: tuple[int, ...]
    lengths: npt.NDArray[np.int64]
    tokens_of: Tokens
    row_length: int
    pad: int
    num_rows: int

    def read(self) -> Rows:
        """Return all packed rows.

        Raises:
            DataError: the documents cannot be read, or have other tokens than when the index was built.
        """
        documents = []
        for fragment, checksum in zip(self.fragments, self.checksums, strict=True):
            some = self.tokens_of.read(fragment)
            if _checksum(some) != checksum:
                raise DataError(
                    "documents have other tokens than when their index was built: the tokenizer has changed or is not "
                    "deterministic. Use another index folder for another tokenizer"
                )
            documents += some
        shape = (self.num_rows, self.row_length)
        tokens, document_ids = np.full(shape, self.pad, np.int32), np.full(shape, -1, np.int32)
        positions = np.zeros(shape, np.int32)
        count = np.arange(self.row_length, dtype=np.int32)
        for row, pieces in enumerate(pack(self.lengths.tolist(), self.row_length)):
            at = 0
            for number, (document, start, stop) in enumerate(pieces):
                end = at + stop - start
                tokens[row, at:end] = documents[document][start:stop]
                document_ids[row, at:end] = number
                positions[row, at:end] = count[: stop - start]
                at = end
        return {"tokens": tokens, "document_ids": document_ids, "positions": positions, "mask": document_ids >= 0}


@dataclass(frozen=True)
class PackedSource:
    """Opened documents and their index.

    Attributes:
        packed: the options.
        documents: the opened documents.
        tokens_of: how to get their tokens.
        index: arrays `lengths` (of all documents), `checksums` (of all fragments), `groups` (first fragment of each
            group, and the end), and `rows` (of each group).
    """

    packed: Packed
    documents: RowSource
    tokens_of: Tokens
    index: Index

    @property
    def rows(self) -> int:
        """Number of packed rows."""
        return int(self.fragment_rows.sum())

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents, without padding."""
        return int(self.index.arrays["lengths"].sum())

    @property
    def padding(self) -> int:
        """Number of tokens that fill up rows."""
        return self.rows * self.packed.length - self.tokens

    @property
    def skipped_rows(self) -> int:
        """Damaged documents that are left out."""
        return self.documents.skipped_rows

    @cached_property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each group that has any."""
        rows: npt.NDArray[np.int64] = self.index.arrays["rows"]
        return rows[rows > 0]

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return 13 * self.packed.length

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the documents' fingerprint, their tokens, and the length of a row."""
        digest = hashlib.sha256(f"{self.documents.fingerprint} {self.packed.length} {self.packed.pad}".encode())
        digest.update(self.index.arrays["checksums"].tobytes())
        return digest.hexdigest()[:16]

    def fragment(self, index: int) -> PackedFragment:
        """Return a group."""
        group, (first, last), (begin, end) = self._find(index)
        return PackedFragment(
            fragments=tuple(self.documents.fragment(each) for each in range(first, last)),
            checksums=tuple(self.index.arrays["checksums"][first:last].tolist()),
            lengths=self.index.arrays["lengths"][begin:end],
            tokens_of=self.tokens_of,
            row_length=self.packed.length,
            pad=self.packed.pad,
            num_rows=int(self.index.arrays["rows"][group]),
        )

    def row_name(self, index: int, row: int) -> str:
        """Return the pieces of a packed row, as in "rows.jsonl:17[0:512]+rows.jsonl:20[2048:2300]"."""
        _, (first, _), (begin, end) = self._find(index)
        pieces = pack(self.index.arrays["lengths"][begin:end].tolist(), self.packed.length)[row]
        ends = np.cumsum(self.documents.fragment_rows[first:])
        names = []
        for document, start, stop in pieces:
            at = int(np.searchsorted(ends, document, side="right"))
            within = document - int(ends[at - 1] if at else 0)
            names.append(f"{self.documents.row_name(first + at, within)}[{start}:{stop}]")
        return "+".join(names)

    def _find(self, index: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
        """Return a fragment's group, its range of fragments, and its range of documents."""
        group = int(np.flatnonzero(self.index.arrays["rows"])[index])
        first, last = (int(each) for each in self.index.arrays["groups"][group : group + 2])
        begin, end = (int(self._documents_before[each]) for each in (first, last))
        return group, (first, last), (begin, end)

    @cached_property
    def _documents_before(self) -> npt.NDArray[Any]:
        return np.cumsum([0, *self.documents.fragment_rows])
