"""Padded batches of documents of about equal length, with a limit on their tokens. A batch is a row of the source.

Documents are sorted by length within groups of neighbouring fragments, and cut into batches. All of this follows from
the lengths alone, so a batch needs only its group. The tokens are written to one file when the index is built, in the
order of the batches and without padding, so that documents are tokenized once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ..arrow import Rows, to_objects
from ..errors import DataError
from ..mixture import MixedSource, Mixture
from ..packing import Packed
from ..paths import PathLike
from ..tokenizers import Tokenizer
from .base import DataFormat, RowSource
from .index_cache import Index
from .token_file import (
    Document,
    Documents,
    Group,
    TokenFileSource,
    Tokens,
    check_complete,
    open_tokens,
    read_group,
    write_groups,
)

logger = logging.getLogger("headway.datasets")

OnTooLong = Literal["raise", "truncate", "skip"]

# What a batch has beside the columns that the user names. `labels` may be named.
_MADE = ("tokens", "mask", "positions", "document_ids", "lengths")
# Documents are sorted with others of at least so many batches. More need less padding, and take more memory.
_GROUP_BATCHES = 128
# The id of a batch names so many documents. The first one is in no other batch.
_NAMED = 4


def cut(lengths: npt.NDArray[np.int64], tokens: int, multiple: int) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the documents from the longest to the shortest, without empty ones, and how many each batch has of them.

    Args:
        lengths: of each document.
        tokens: of a batch at most, padding included; at least the length of a document, rounded up.
        multiple: the length of a batch is a multiple of it.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.count_nonzero(lengths)]
    padded = _round_up(lengths[order], multiple).tolist()
    sizes: list[int] = []
    at = 0
    while at < len(order):
        sizes.append(min(tokens // padded[at], len(order) - at))
        at += sizes[-1]
    return order, sizes


@dataclass(frozen=True)
class TokenBudget:
    """Documents in padded batches of about equal lengths, to be read by a `Stream`, alone or as a part of a mixture.

    Each batch is a row of the stream, and a micro-batch of the training. So `micro_batch_size` must be 1, and
    `global_batch_size` counts padded batches. With b documents, of which the longest has t tokens, the columns are:

    - `tokens`: int32 [b, t], filled up with `pad`.
    - `mask`: bool [b, t], False for padding.
    - `labels`: int64 [b, t], the tokens, and -100 for padding.
    - `positions`: int32 [b, t], from 0 in each document, and 0 for padding.
    - `document_ids`: int32 [b, t], 0, and -1 for padding, as `Packed` has them.
    - `lengths`: int32 [b], from the longest to the shortest.
    - those named in `columns`: [b], a number for each document.

    A transform gets a batch as a row, with `tokens`, `lengths` and `columns`. The others are computed from what it
    returns, unless it returns a column of that name.

    Batches have different numbers of tokens. For the mean over all tokens of an update, return the mean of a batch from
    `training_step`, and `batch["lengths"].sum()` from `loss_weight`.

    Args:
        data: the documents, such as `JsonLines`. Empty ones are left out.
        tokens: of a batch at most, padding included.
        index: folder for the index and the tokens, 4 bytes each. The first start tokenizes all documents to write them;
            later ones only read. If reading tasks run on other machines, they must see the folder.
        column: the column with the text, or with the tokens if `tokenizer` is None.
        tokenizer: maps a text to its tokens. Must be deterministic. It runs in threads of this process.
        columns: columns of the documents with one number each, such as a class. One with the name `labels` replaces the
            labels above.
        max_length: tokens of a document at most; None for `tokens`.
        on_too_long: what happens to a longer document: "raise" refuses it, "truncate" leaves out its end, "skip" leaves
            it out.
        multiple_of: t is a multiple of this number, for kernels that want it, or for fewer different shapes to compile.
        pad: token that fills up documents.

    Example:
        >>> from headway.datasets.formats.jsonl import JsonLines
        >>> from headway.datasets.formats.token_budget import TokenBudget
        >>> from headway.datasets.stream import Stream
        >>> from headway.datasets.tokenizers import ByteTokenizer
        >>> reviews = JsonLines("reviews")
        >>> stream = Stream(TokenBudget(reviews, tokens=16_384, index="index", tokenizer=ByteTokenizer()))
    """

    data: DataFormat
    tokens: int
    index: PathLike
    column: str = "text"
    tokenizer: Tokenizer | None = None
    columns: Sequence[str] = ()
    max_length: int | None = None
    on_too_long: OnTooLong = "raise"
    multiple_of: int = 1
    pad: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "multiple_of"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DataError(f"{name} must be an integer >= 1, got {value!r}")
        if isinstance(self.columns, str) or set(self.columns) & {*_MADE, self.column}:
            raise DataError(
                f"columns must be a list of names other than {', '.join(_MADE)} and column, got {self.columns!r}"
            )
        if self.on_too_long not in get_args(OnTooLong):
            raise DataError(f"on_too_long must be 'raise', 'truncate' or 'skip', got {self.on_too_long!r}")
        most = self.tokens // self.multiple_of * self.multiple_of
        if not 1 <= self.longest <= most:
            raise DataError(
                f"max_length must be from 1 to {most}, the longest batch of {self.tokens} tokens whose length is a "
                f"multiple of {self.multiple_of}, got {self.longest}"
            )
        if isinstance(self.data, Mixture):
            raise DataError(
                "a TokenBudget cannot take a Mixture, because it sorts neighbours: make a Mixture of TokenBudget data"
            )
        if isinstance(self.data, (Packed, TokenBudget)):
            raise DataError(
                f"a TokenBudget takes documents, and {type(self.data).__name__} makes rows of them: pass its data"
            )

    @property
    def longest(self) -> int:
        """Number of tokens of a document at most."""
        return self.tokens if self.max_length is None else self.max_length

    def open(self) -> TokenBudgetSource:
        """Open the documents, and find their batches or write them.

        Raises:
            DataError: the documents cannot be opened, `column` has something else than text or tokens, one of `columns`
                something else than numbers, a document is too long, or the tokenizer gives other tokens than when the
                batches were written.
        """
        documents = self.data.open()
        tokens_of = Tokens(self.column, self.tokenizer, tuple(self.columns))
        path, index = open_tokens(
            *(documents, tokens_of, self.options),
            folder=self.index,
            name=f"batches-{self.tokens}",
            build=lambda file: self._build(documents, tokens_of, file),
        )
        if not index.arrays["rows"].any():
            raise DataError(f"{self} has no tokens")
        check_complete(path, 4 * int(index.arrays["tokens"].sum()))
        return TokenBudgetSource(documents, path, index, self)

    def kept(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many tokens of documents of these lengths are kept."""
        too_long = lengths > self.longest
        return np.where(too_long, 0 if self.on_too_long == "skip" else self.longest, lengths)

    @property
    def options(self) -> str:
        """What the batches depend on beside the documents and their tokens. The pad token is not in the file."""
        return f"{self.tokens} {self.longest} {self.on_too_long} {self.multiple_of}"

    def _build(self, documents: RowSource, tokens_of: Tokens, path: Path) -> Index:
        """Write the tokens of all batches to `path`, and return their index."""
        arrays = write_groups(
            self._checked(documents, tokens_of),
            path,
            group_tokens=_GROUP_BATCHES * self.tokens,
            arrange=self._arrange,
        )
        lengths, tokens, padding = arrays["lengths"], int(arrays["tokens"].sum()), int(arrays["padding"].sum())
        logger.info(
            "put %d documents of %s, %d tokens, into %d batches of at most %d, %.2f %% of them padding; %.1f MB in %s",
            *(np.count_nonzero(self.kept(lengths)), self.data, tokens, arrays["rows"].sum(), self.tokens),
            *(100 * padding / max(1, tokens + padding), 4 * tokens / 1e6, path),
        )
        if too_long := np.count_nonzero(lengths > self.longest):
            logger.warning(
                "%d of %d documents of %s have more than %d tokens, and are %s",
                *(too_long, len(lengths), self.data, self.longest),
                "left out" if self.on_too_long == "skip" else "truncated",
            )
        return Index(arrays, {})

    def _checked(self, documents: RowSource, tokens_of: Tokens) -> Iterator[Documents]:
        for fragment, read in enumerate(tokens_of.read_all(documents)):
            if self.on_too_long == "raise":
                for row, each in enumerate(read.tokens):
                    if len(each) > self.longest:
                        raise DataError(
                            f"{documents.row_name(fragment, row)} of {self} has {len(each)} tokens, more than the "
                            f"{self.longest} of max_length: set on_too_long='truncate' or 'skip', or a larger "
                            "max_length or tokens"
                        )
            yield read

    def _arrange(self, documents: Sequence[Document]) -> Group:
        """Return the tokens of a group in the order of its batches."""
        lengths = self.kept(np.array([*map(len, documents)], dtype=np.int64))
        order, sizes = cut(lengths, self.tokens, self.multiple_of)
        kept = [documents[at][: lengths[at]] for at in order.tolist()]
        tokens = np.concatenate([np.empty(0, np.int32), *kept])
        firsts = np.cumsum([0, *sizes])[:-1]
        padded = int((np.array(sizes) * _round_up(lengths[order][firsts], self.multiple_of)).sum())
        return Group(tokens, {"rows": len(sizes), "tokens": len(tokens), "padding": padded - len(tokens)}, {})

    def __str__(self) -> str:
        return str(self.data)


@dataclass(frozen=True)
class TokenBudgetSource(TokenFileSource):
    """Opened documents and their batches.

    Attributes:
        documents, path: see `TokenFileSource`.
        index: its arrays, and `tokens` and `padding` (of each group).
        budget: the options.
    """

    budget: TokenBudget

    @property
    def tokens(self) -> int:
        """Number of tokens of all batches, without padding."""
        return int(self.index.arrays["tokens"].sum())

    @property
    def padding(self) -> int:
        """Number of tokens that fill up batches."""
        return int(self.index.arrays["padding"].sum())

    @property
    def row_bytes(self) -> int:
        """Size of a batch at most."""
        return 4 * self.budget.tokens

    @property
    def options(self) -> str:
        """The options of the batches, their padding and columns."""
        return f"{self.budget.options} {self.budget.pad} {','.join(self.budget.columns)}"

    def fragment(self, index: int) -> TokenBatches:
        """Return a group."""
        group, arrays = int(self.groups[index]), self.index.arrays
        lengths, order, sizes = self._cut(group)
        own = self.documents_of(group)
        return TokenBatches(
            path=self.path,
            first=int(self._tokens_before[group]),
            checksum=int(arrays["checksums"][group]),
            lengths=lengths[order].astype(np.int32),
            columns={name: arrays[f"column {name}"][own][order] for name in self.budget.columns},
            sizes=tuple(sizes),
            multiple_of=self.budget.multiple_of,
            pad=self.budget.pad,
        )

    def row_name(self, index: int, row: int) -> str:
        """Return the longest documents of a batch, as in "rows.jsonl:17+rows.jsonl:20+308 more"."""
        group = int(self.groups[index])
        _, order, sizes = self._cut(group)
        at = sum(sizes[:row])
        named = order[at : at + min(sizes[row], _NAMED)].tolist()
        names = [self.document_name(group, each) for each in named]
        return "+".join([*names, *([f"{sizes[row] - _NAMED} more"] if sizes[row] > _NAMED else [])])

    def _cut(self, group: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[int]]:
        """Return the kept lengths of a group's documents, and their batches."""
        lengths = self.budget.kept(self.index.arrays["lengths"][self.documents_of(group)])
        return lengths, *cut(lengths, self.budget.tokens, self.budget.multiple_of)

    @cached_property
    def _tokens_before(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *self.index.arrays["tokens"]])


class TokenBatches(NamedTuple):
    """A fragment: the batches of a group.

    Attributes:
        path: the file with the tokens of all batches.
        first: where the tokens of the group begin in it.
        checksum: of them.
        lengths: int32, of each document, in the order of the batches.
        columns: the numbers that come with the documents, in this order.
        sizes: documents of each batch.
        multiple_of, pad: see `TokenBudget`.
    """

    path: str
    first: int
    checksum: int
    lengths: npt.NDArray[np.int32]
    columns: Mapping[str, npt.NDArray[Any]]
    sizes: tuple[int, ...]
    multiple_of: int
    pad: int

    @property
    def num_rows(self) -> int:
        """Number of batches."""
        return len(self.sizes)

    def read(self) -> Rows:
        """Return `tokens`, `lengths` and the named columns of all batches of the group; the others follow from them.

        Raises:
            DataError: the file is missing or has changed.
        """
        tokens = read_group(self.path, self.first, int(self.lengths.sum()), self.checksum)
        ends = np.cumsum(self.sizes)
        rows = {
            name: to_objects(np.split(column, ends[:-1]))
            for name, column in (("lengths", self.lengths), *self.columns.items())
        }
        of_batches = np.split(tokens, np.cumsum(self.lengths)[ends[:-1] - 1])
        padded = [self._pad(*each) for each in zip(of_batches, rows["lengths"], strict=True)]
        return {"tokens": to_objects(padded), **rows}

    def _pad(self, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return a batch of documents of these lengths, which are one after the other in `tokens`."""
        mask = np.arange(_round_up(int(lengths[0]), self.multiple_of)) < lengths[:, None]
        padded = np.full(mask.shape, self.pad, np.int32)
        padded[mask] = tokens
        return padded


def rows_are_batches(source: RowSource) -> bool:
    """Return whether each row of a source is a padded batch.

    Raises:
        DataError: only some of the sources of a mixture give batches.
    """
    sources = source.sources if isinstance(source, MixedSource) else {"": source}
    batches = [name for name, each in sources.items() if isinstance(each, TokenBudgetSource)]
    if batches and (others := sources.keys() - batches):
        raise DataError(
            f"source {batches[0]!r} of the mixture gives padded batches and {min(others)!r} gives rows: use a "
            "TokenBudget for every source, or for none"
        )
    return bool(batches)


def _round_up(length: Any, multiple: int) -> Any:
    return -(-length // multiple) * multiple
