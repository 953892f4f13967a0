"""Makes one rank's micro-batches of rows that arrive fragment by fragment. A batch takes rows of many fragments."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .arrow import NUMBERS, Rows, is_stackable, num_rows
from .errors import DataError
from .formats.base import RowSource, decodes_some_rows, is_fetched_whole
from .formats.derived_columns import empty, expand_packed, expand_padded
from .plan import Batch, Read
from .row_groups import RowGroup

HELD_BYTES = 2**30
"""Rows that a rank holds at most, or else `explain_large_fragments` names the largest fragment."""

# A mixture holds so many times the rows that one of its sources would hold alone, or so many bytes, without reading
# its fragments in parts.
_MIXED_TIMES, _MIXED_BYTES = 4, 32 * 2**20
# A fragment is read so many times at most for each of its shards.
_MOST_READS = 16
# Rows are spilled to disk if a fragment is at most this part of what a rank may hold: several are in memory at a time.
_SPILLED_FRAGMENT = 1 / 8
# Rows that wait on disk take so much at most for each rank.
_SPILLED_BYTES = 8 * 2**30
# The disk must have room for so many times as much, because a temporary file is removed after its last row was used.
_SPILL_ROOM = 3
# A temporary file ends with the rows that reach this size.
_SPILL_FILE_BYTES = 256 * 2**20
# So many ranks are presumed to share a disk, at most.
_RANKS_OF_A_DISK = 8

Part: TypeAlias = tuple[Rows, int, int]
"""(columns, start, stop): some consecutive rows of these columns."""


def limit_reads(sources: Sequence[RowSource], *, shards: int, world_size: int) -> list[int | None]:
    """Return how many rows of a shard a read of each source returns at most; None for all that a fragment has.

    A rank holds the rows of about one read for each of its logical shards and each source. Where whole fragments would
    take too much memory, they are read again for each part of their rows. This does not change the order of the rows.

    Args:
        sources: that are mixed; one without a mixture.
        shards: logical shards of all ranks.
        world_size: number of ranks.
    """
    most, own = _most_bytes(sources, shards=shards, world_size=world_size), -(-shards // world_size)
    limits: list[int | None] = [None] * len(sources)
    if most is not None:
        for index, source in enumerate(sources):
            largest, rows = int(source.fragment_rows.max()), most // (own * len(sources) * source.row_bytes)
            limit = max(rows, -(-largest // _most_reads(source)))
            limits[index] = limit if limit < largest else None
    return limits


def limit_rows_in_memory(sources: Sequence[RowSource], *, shards: int, world_size: int) -> list[int | None]:
    """Return how many rows of a shard and source stay in memory while the others wait on disk; None for all.

    Fragments that would take too much memory are then read once, instead of in parts. Sources that decode only the rows
    of a part are read in parts.

    Args:
        sources: that are mixed; one without a mixture.
        shards: logical shards of all ranks.
        world_size: number of ranks.
    """
    most, own = _most_bytes(sources, shards=shards, world_size=world_size), -(-shards // world_size)
    limits: list[int | None] = [None] * len(sources)
    if most is not None:
        spilled = 0
        for index, source in enumerate(sources):
            largest, rows = int(source.fragment_rows.max()), most // (own * len(sources) * source.row_bytes)
            limit = max(rows, -(-largest // _MOST_READS))
            fits = largest * source.row_bytes <= most * _SPILLED_FRAGMENT
            # A shard that has few rows takes them all from one read.
            saves_reads = limit < min(largest, source.rows // shards) and not decodes_some_rows(source.fragment(0))
            if fits and saves_reads:
                limits[index] = limit
                spilled += _held_rows(source, own) * source.row_bytes
        room = _SPILL_ROOM * spilled * min(world_size, _RANKS_OF_A_DISK)
        if spilled > _SPILLED_BYTES or (spilled and not _has_room(room)):
            return [None] * len(sources)
    return limits


def _most_bytes(sources: Sequence[RowSource], *, shards: int, world_size: int) -> int | None:
    """Return how many bytes of rows a rank may hold; None if it would not hold more anyway."""
    own = -(-shards // world_size)
    held = [_held_rows(each, own) * each.row_bytes for each in sources]
    most = min(max(_MIXED_TIMES * max(held), _MIXED_BYTES), HELD_BYTES)
    return most if sum(held) > most else None


def _held_rows(source: RowSource, own: int, limit: int | None = None) -> int:
    """Return the rows of a source that `own` logical shards hold at a time, of the largest fragments."""
    held = int(np.sort(source.fragment_rows)[-own:].sum())
    return held if limit is None else min(held, own * limit)


def _most_reads(source: RowSource) -> int:
    """Return how often a fragment may be read: once where each time would fetch it from a remote storage again."""
    return 1 if is_fetched_whole(source.fragment(0)) else _MOST_READS


def explain_large_fragments(sources: Sequence[RowSource], *, shards: int, world_size: int) -> str | None:
    """Return which fragment is too large to be shuffled in memory and what to do; None if all are small enough.

    See `limit_rows_in_memory` and `limit_reads` for what a rank holds.

    Args:
        sources: that are mixed; one without a mixture.
        shards: logical shards of all ranks.
        world_size: number of ranks.
    """
    own = -(-shards // world_size)
    limits = [
        in_memory or limit
        for in_memory, limit in zip(
            limit_rows_in_memory(sources, shards=shards, world_size=world_size),
            limit_reads(sources, shards=shards, world_size=world_size),
            strict=True,
        )
    ]
    held = sum(_held_rows(each, own, limit) * each.row_bytes for each, limit in zip(sources, limits, strict=True))
    if held <= HELD_BYTES:
        return None
    source = max(sources, key=lambda each: int(each.fragment_rows.max()) * each.row_bytes)
    index = int(source.fragment_rows.argmax())
    rows, fragment = int(source.fragment_rows[index]), source.fragment(index)
    fewer = shards * HELD_BYTES // held
    advice = [f"set shards to at most {fewer} (now {shards})"] if fewer >= world_size else ["use more workers"]
    if isinstance(fragment, RowGroup):
        what = f"row group {fragment.group} of {fragment.path}"
        most = _most_reads(source) * max(1, HELD_BYTES // (own * len(sources) * source.row_bytes))
        advice.insert(0, f"write row groups of at most {most:,} rows (row_group_size)")
    else:
        what = f"what is read at once from {source.row_name(index, 0)} on"
    each_of = f" and each of {len(sources)} sources" if len(sources) > 1 else ""
    share = "one such piece" if _most_reads(source) == 1 else f"1/{_MOST_READS} of such a piece"
    return (
        f"{what} has {rows:,} rows, {_megabytes(rows * source.row_bytes)}, which is too large for the shuffle: a rank "
        f"holds about {share} for each of its {own} logical shards{each_of}, {_megabytes(held)} in all. "
        f"To take less memory, {' or '.join(advice)}"
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This rank's part of the samples of one optimizer update.

    Attributes:
        micro_batches: columns as tensors [B, ...]; columns that are not numeric as lists of B Python objects.
        num_samples: rows of each micro-batch that count. 0 marks a repeated row, which only keeps the ranks in step.
        global_num_samples: rows of the update over all ranks.
        name_rows: returns the ids of the rows that count, in order.
    """

    micro_batches: Sequence[dict[str, Any]]
    num_samples: Sequence[int]
    global_num_samples: int
    name_rows: Callable[[], Sequence[str]]

    def row_ids(self) -> list[Sequence[str]]:
        """Return the row ids of each micro-batch, such as "<file>[<row group>]:<row in it>". Computed on demand."""
        names, ends = self.name_rows(), list(accumulate(self.num_samples))
        return [names[end - size : end] for size, end in zip(self.num_samples, ends, strict=True)]

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse to be unpacked or indexed as one batch of tensors."""
        raise TypeError(
            "this is a global batch, which may have several micro-batches: "
            "take its tensors from `for micro_batch in run.accumulate(batch)`"
        )


class SpillError(Exception):
    """Rows cannot be kept in a temporary file, such as on a full disk."""


def spill_folder() -> str | None:
    """Return the folder of temporary files: TMPDIR, or else /var/tmp, which is on a disk where /tmp is in memory.

    None if neither can be written.
    """
    folders = [each for each in (os.environ.get("TMPDIR"), "/var/tmp", "/tmp") if each]
    return next((each for each in folders if os.access(each, os.W_OK | os.X_OK)), None)


def _has_room(size_bytes: int) -> bool:
    folder = spill_folder()
    try:
        return folder is not None and shutil.disk_usage(folder).free >= size_bytes
    except OSError:
        return False


class _Spill:
    """Writes rows to temporary files without names, which the system removes even if the process is killed."""

    def __init__(self) -> None:
        self._file = _SpillFile()

    def put(self, pieces: Sequence[Rows]) -> list[_SpilledRows]:
        """Write some pieces of rows, to be read one by one.

        Raises:
            SpillError: they cannot be written.
        """
        if self._file.size >= _SPILL_FILE_BYTES:
            self._file = _SpillFile()
        return self._file.append(pieces)


class _SpillFile:
    """A temporary file, which is closed, and so removed, when no piece of it is left."""

    def __init__(self) -> None:
        self.size = 0
        try:
            self._file = tempfile.TemporaryFile(dir=spill_folder(), buffering=0)  # noqa: SIM115 (see `__del__`)
        except OSError as error:
            raise SpillError(str(error)) from error

    def append(self, pieces: Sequence[Rows]) -> list[_SpilledRows]:
        data = io.BytesIO()
        ends = [0]
        for each in pieces:
            pickle.dump(each, data, protocol=5)
            ends.append(data.tell())
        left = data.getbuffer()
        try:
            while left:  # a disk that becomes full takes some bytes, and fails at the next
                left = left[os.pwrite(self._file.fileno(), left, self.size + ends[-1] - len(left)) :]
        except OSError as error:
            raise SpillError(str(error)) from error
        spilled = [_SpilledRows(self, self.size + start, end - start) for start, end in pairwise(ends)]
        self.size += ends[-1]
        return spilled

    def read(self, offset: int, size: int) -> Rows:
        try:
            rows: Rows = pickle.loads(os.pread(self._file.fileno(), size, offset))
        except (OSError, pickle.UnpicklingError) as error:
            raise SpillError(str(error)) from error
        return rows

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class _SpilledRows(NamedTuple):
    """Some rows in a temporary file."""

    file: _SpillFile
    offset: int
    size: int

    def read(self) -> Part:
        """Return all of these rows."""
        rows = self.file.read(self.offset, self.size)
        return rows, 0, num_rows(rows)


class ShardBuffers:
    """Rows that have been read but not used yet, in one buffer per logical shard.

    Args:
        asked: reads whose rows are still to arrive, in this order; grows while rows arrive.
        chunks: the rows of these reads in order, in chunks of any length.
        filler_row: returns one row, to fill a micro-batch of a rank that has not had any.
        same_types: refuse rows whose columns or types of numbers differ from those of the first ones.
        rows_are_batches: each row is a padded batch, and a micro-batch. Micro-batches have one row then.
        in_memory: returns how many rows of a shard stay in memory while the others wait in a temporary file; None for
            all.

    Raises:
        SpillError: from `batches`; rows cannot be kept in a temporary file.
    """

    def __init__(
        self,
        asked: deque[Read],
        chunks: Iterator[Rows],
        filler_row: Callable[[], Rows],
        *,
        same_types: bool = False,
        rows_are_batches: bool = False,
        in_memory: Callable[[int], int | None] = lambda shard: None,
    ) -> None:
        self._asked = asked
        self._chunks = chunks
        self._filler_row = filler_row
        self._arrived: Part = {}, 0, 0
        self._buffers: defaultdict[int, deque[Part | _SpilledRows]] = defaultdict(deque)
        self._in_memory = in_memory
        self._spill: _Spill | None = None
        self._last: Rows | None = None
        self._same_types = same_types
        self._cut_all = _take_all if rows_are_batches else cut_all
        self._types: dict[str, str] | None = None

    def clear(self) -> None:
        """Discard the rows that the tail policy dropped, before the next epoch's rows arrive."""
        self._buffers.clear()

    def batches(
        self, batches: Sequence[Batch], names: Sequence[Callable[[], Sequence[str]]], *, pin_memory: bool = False
    ) -> list[GlobalBatch]:
        """Return the next batches, one for each of `names`, as tensors; waits for rows that have not arrived.

        Either all have rows of this rank or none has. Making several at a time is cheaper: a batch takes only a few
        rows of each shard, and a shard's rows for all the batches are contiguous.
        """
        ends = list(accumulate(sum(each.sizes) for each in batches))
        if not ends[-1]:
            rows = self._last = self._last or self._filler_row()
            columns = expand_packed(
                {name: gather_column([(column, np.zeros(1, np.intp))], 1, pin_memory) for name, column in rows.items()},
                pin_memory,
            )
            return [
                GlobalBatch(self._cut_all(columns, 0, each.sizes), each.sizes, each.global_num_samples, of)
                for each, of in zip(batches, names, strict=True)
            ]
        # The positions of each shard's rows, one shard after the other.
        shards = np.repeat(*np.array([pair for each in batches for pair in each.shard_counts], dtype=np.intp).T)
        order = np.argsort(shards, kind="stable")
        begins = np.flatnonzero(np.diff(shards[order], prepend=-1))
        parts, part_positions = [], []
        for shard, at, count in zip(
            *(shards[order[begins]].tolist(), begins.tolist(), np.diff(begins, append=len(order)).tolist()), strict=True
        ):
            for part in self._take(shard, count):
                size = part[2] - part[1]
                parts.append(part)
                part_positions.append(order[at : at + size])
                at += size
        rows, _, stop = parts[-1]
        self._last = {name: column[stop - 1 : stop].copy() for name, column in rows.items()}
        columns = {
            name: gather_column(
                [
                    (rows[name][start:stop], positions)
                    for (rows, start, stop), positions in zip(parts, part_positions, strict=True)
                ],
                len(order),
                pin_memory,
            )
            for name in rows
        }
        columns = expand_packed(columns, pin_memory)
        return [
            GlobalBatch(
                self._cut_all(columns, end - sum(each.sizes), each.sizes), each.sizes, each.global_num_samples, of
            )
            for each, end, of in zip(batches, ends, names, strict=True)
        ]

    def _take(self, shard: int, rows: int) -> Iterator[Part]:
        buffer = self._buffers[shard]
        while rows:
            while not buffer:
                self._receive()
            head = buffer[0]
            columns, start, stop = head.read() if isinstance(head, _SpilledRows) else head
            taken = min(rows, stop - start)
            yield columns, start, start + taken
            if start + taken == stop:
                buffer.popleft()
            else:
                buffer[0] = columns, start + taken, stop
            rows -= taken

    def _receive(self) -> None:
        """Add the rows of one read to the buffers."""
        self._arrive()  # first: a read is certain to be in `asked` only once its rows have arrived
        for each in self._asked.popleft().slices:
            missing = each.stop - each.start
            while missing:
                self._arrive()
                rows, at, end = self._arrived
                taken = min(missing, end - at)
                self._add(each.shard, rows, at, at + taken)
                self._arrived = rows, at + taken, end
                missing -= taken

    def _add(self, shard: int, rows: Rows, start: int, stop: int) -> None:
        """Add consecutive rows to a buffer. In parts, so that it need not hold all of what arrives together."""
        buffer, most = self._buffers[shard], self._in_memory(shard)
        if most is None:
            buffer.append((rows, start, stop))
            return
        ends = [*range(start, stop, most), stop]
        pieces = [{name: column[first:end] for name, column in rows.items()} for first, end in pairwise(ends)]
        # Numbers are copied, so that the other rows need not be held. Objects may be parts of what has been read.
        if not buffer and all(column.dtype != object for column in rows.values()):
            copied = {name: column.copy() for name, column in pieces.pop(0).items()}
            buffer.append((copied, 0, num_rows(copied)))
        if pieces:
            self._spill = self._spill or _Spill()
            buffer.extend(self._spill.put(pieces))

    def _arrive(self) -> None:
        _, at, end = self._arrived
        if at == end:
            rows = next(self._chunks)
            if self._same_types:
                types = {name: _type_name(column) for name, column in rows.items()}
                self._types = self._types or types
                if types != self._types:
                    raise DataError(
                        f"some rows have the columns {self._types} and others {types}: the sources of a mixture must "
                        "give the same. Select columns, or convert them in a transform"
                    )
            self._arrived = rows, 0, num_rows(rows)


def _type_name(column: npt.NDArray[Any]) -> str:
    """Return the type of a column; arrays of one length and of several are both "list of int64"."""
    if column.dtype != object:
        return str(column.dtype) if column.ndim == 1 else f"list of {column.dtype}"
    first = next((each for each in column if each is not None), None)
    return f"list of {first.dtype}" if isinstance(first, np.ndarray) else "objects"


def gather_column(
    pieces: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.intp]]], length: int, pin_memory: bool
) -> Any:
    """Copy the pieces of one column to their positions: a tensor if they are numbers of one shape, else a list."""
    if not is_stackable([piece for piece, _ in pieces]):
        objects: list[Any] = [None] * length
        for piece, positions in pieces:
            for row, at in zip(piece, positions.tolist(), strict=True):
                objects[at] = row
        return objects
    first = pieces[0][0]
    # Copied once, into the (pin_memory) batch: the pieces are views of read buffers, which must not be written to.
    tensor = empty((length, *first.shape[1:]), first.dtype, pin_memory)
    array = tensor.numpy()
    for piece, positions in pieces:
        array[positions] = piece
    return tensor


def cut_all(columns: dict[str, Any], first: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return micro-batches of these sizes from row `first` on.

    One is empty only if the rank has fewer rows than micro-batches: it repeats the previous row.
    """
    ends = accumulate(sizes)
    return [
        _cut(columns, range(first + end - (size or 1), first + end) if end else range(first, first + 1))
        for size, end in zip(sizes, ends, strict=True)
    ]


def _take_all(columns: dict[str, Any], first: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the same of rows that are batches: micro-batches of one row, without the dimension of the rows."""
    return [
        expand_padded({name: column[0] for name, column in micro_batch.items()})
        for micro_batch in cut_all(columns, first, sizes)
    ]


def _cut(columns: dict[str, Any], rows: range) -> dict[str, Any]:
    """Return some rows of each column; a list of arrays of one shape becomes a tensor."""
    cut = {name: column[rows.start : rows.stop] for name, column in columns.items()}
    for name, column in cut.items():
        if isinstance(column, list) and any(isinstance(each, np.ndarray) for each in column):
            cut[name] = _to_tensors(column)
    return cut


def _to_tensors(rows: Sequence[Any]) -> Any:
    """Stack arrays of one shape into a tensor; else return a list, with each numeric array as a tensor."""
    kinds = {(each.dtype, each.shape) if isinstance(each, np.ndarray) else None for each in rows}
    if len(kinds) == 1 and rows[0].dtype.kind in NUMBERS:
        return torch.from_numpy(np.stack(rows))
    return [_to_tensor(each) for each in rows]


def _to_tensor(row: Any) -> Any:
    if not isinstance(row, np.ndarray):
        return row
    if row.dtype == object:
        return [_to_tensor(each) for each in row]
    return torch.from_numpy(row.copy()) if row.dtype.kind in NUMBERS else row
