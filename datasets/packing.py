"""Packs documents of any length into rows of fixed length. A packed row is a row like any other: nothing else changes.

Documents are packed within groups of neighbouring fragments, so that a row needs only its group. Which parts of which
documents share a row follows from the lengths alone. All rows are written to one file when the index is built, so that
documents are tokenized once, and each read is one range of this file, which is compared with a checksum.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import DataError
from .formats.base import DataFormat, RowSource
from .formats.index_cache import Index
from .formats.packed_rows import PackedRows
from .formats.token_file import Group, TokenFileSource, Tokens, check_complete, open_tokens, write_groups
from .mixture import MixedSource, Mixture
from .paths import PathLike
from .tokenizers import Tokenizer

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
        index: folder for the index and the rows, 4 bytes per token and padding. The first start tokenizes all documents
            to write them; later ones only read. If reading tasks run on other machines, they must see the folder.
        column: the column with the text, or with the tokens if `tokenizer` is None.
        tokenizer: maps a text to its tokens. Must be deterministic. It runs in threads of this process.
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
        """Open the documents, and find their packed rows or write them.

        Raises:
            DataError: the documents cannot be opened, `column` has something else than text or tokens, or the tokenizer
                gives other tokens than when the rows were written.
        """
        documents = self.data.open()
        tokens_of = Tokens(self.column, self.tokenizer)
        options = f"{self.length}\0{self.pad}"
        path, index = open_tokens(
            *(documents, tokens_of, options),
            folder=self.index,
            name=f"packed-{self.length}",
            build=lambda file: self._build(documents, tokens_of, file),
        )
        if not index.arrays["rows"].any():
            raise DataError(f"{self} has no tokens")
        check_complete(path, 4 * self.length * int(index.arrays["rows"].sum()))
        return PackedSource(documents, path, index, self)

    def _build(self, documents: RowSource, tokens_of: Tokens, path: Path) -> Index:
        """Write all rows to `path`, and return their index."""
        arrays = write_groups(
            tokens_of.read_all(documents),
            path,
            group_tokens=_GROUP_ROWS * self.length,
            arrange=lambda group: _pack_rows(group, self.length, self.pad),
        )
        arrays["pieces"] = np.cumsum([0, *arrays["pieces"]])
        total, tokens = int(arrays["rows"].sum()), int(arrays["lengths"].sum())
        logger.info(
            "packed %d documents of %s, %d tokens, into %d rows of %d, %.2f %% full; %.1f MB in %s",
            *(len(arrays["lengths"]), self.data, tokens, total, self.length),
            *(100 * tokens / max(1, total * self.length), 4 * total * self.length / 1e6, path),
        )
        return Index(arrays, {})

    def __str__(self) -> str:
        return str(self.data)


def _pack_rows(documents: Sequence[npt.NDArray[np.int32]], row_length: int, pad: int) -> Group:
    """Return the packed rows [R, row_length] of some documents, and where their pieces are (see `PackedRows`)."""
    rows = pack([*map(len, documents)], row_length)
    tokens = np.full((len(rows), row_length), pad, np.int32)
    starts, ids = [], []
    for row, pieces in enumerate(rows):
        at = 0
        for number, (document, start, stop) in enumerate(pieces):
            end = at + stop - start
            tokens[row, at:end] = documents[document][start:stop]
            starts.append(row * row_length + at)
            ids.append(number)
            at = end
        if at < row_length:
            starts.append(row * row_length + at)
            ids.append(-1)
    counts = {"rows": len(rows), "pieces": len(starts)}
    return Group(tokens, counts, {"starts": np.array(starts, np.int32), "ids": np.array(ids, np.int32)})


@dataclass(frozen=True)
class PackedSource(TokenFileSource):
    """Opened documents and their packed rows.

    Attributes:
        documents, path: see `TokenFileSource`.
        index: its arrays, and `pieces` (first piece of each group, and the end), `starts` and `ids` (of each piece, see
            `PackedRows`).
        packed: the options.
        compact_rows: whether fragments have compact rows, see `PackedRows`.
    """

    packed: Packed
    compact_rows: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents, without padding."""
        return int(self.index.arrays["lengths"].sum())

    @property
    def padding(self) -> int:
        """Number of tokens that fill up rows."""
        return self.rows * self.packed.length - self.tokens

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return 13 * self.packed.length

    @property
    def options(self) -> str:
        """The length of a row, and the token that fills it up."""
        return f"{self.packed.length} {self.packed.pad}"

    def fragment(self, index: int) -> PackedRows:
        """Return a group."""
        group, arrays = int(self.groups[index]), self.index.arrays
        pieces = slice(*arrays["pieces"][group : group + 2].tolist())
        return PackedRows(
            path=self.path,
            first=int(self._rows_before[group]),
            num_rows=int(arrays["rows"][group]),
            row_length=self.packed.length,
            checksum=int(arrays["checksums"][group]),
            starts=arrays["starts"][pieces],
            ids=arrays["ids"][pieces],
            compact=self.compact_rows,
        )

    def row_name(self, index: int, row: int) -> str:
        """Return the pieces of a packed row, as in "rows.jsonl:17[0:512]+rows.jsonl:20[2048:2300]"."""
        group = int(self.groups[index])
        pieces = pack(self.index.arrays["lengths"][self.documents_of(group)].tolist(), self.packed.length)[row]
        return "+".join(f"{self.document_name(group, document)}[{start}:{stop}]" for document, start, stop in pieces)

    @cached_property
    def _rows_before(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *self.index.arrays["rows"]])


def compact(source: RowSource) -> RowSource:
    """Return packed documents, or a mixture of nothing else, with compact rows; any other source as it is."""
    if isinstance(source, PackedSource):
        return replace(source, compact_rows=True)
    if isinstance(source, MixedSource):
        parts = {name: each for name, each in source.sources.items() if isinstance(each, PackedSource)}
        if len(parts) == len(source.sources) and len({each.packed.length for each in parts.values()}) == 1:
            return replace(source, sources={name: replace(each, compact_rows=True) for name, each in parts.items()})
    return source
