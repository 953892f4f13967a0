"""How many rows a rank holds in memory for the shuffle, and how it gets the rest of a fragment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..formats.base import RowSource, decodes_some_rows, is_fetched_whole
from ..row_groups import RowGroup
from .spill import has_room

HELD_BYTES = 2**30
"""Rows that a rank holds at most, or else `explain_large_fragments` names the largest fragment."""

# A mixture may hold this many times the rows that one of its sources would hold alone, or this many bytes if that is
# more. Beyond that, `limit_rows` limits it.
_MIXED_TIMES, _MIXED_BYTES = 4, 32 * 2**20
# A fragment is read at most this often for each of its shards.
_MOST_READS = 16
# Rows are spilled to disk only if a fragment takes at most this part of what a rank may hold: several are in memory at
# a time.
_SPILLED_FRAGMENT = 1 / 8
# Most bytes of rows that wait on disk, for each rank.
_SPILLED_BYTES = 8 * 2**30
# The disk must have this many times the room, because a temporary file is removed only after its last row was used.
_SPILL_ROOM = 3
# Most ranks that are presumed to share a disk.
_RANKS_OF_A_DISK = 8


class RowLimit(NamedTuple):
    """How many rows of each logical shard a rank holds of a source. At most one is set; None means a whole fragment.

    Attributes:
        per_read: rows that a read returns at most. The fragment is read again for the next ones.
        in_memory: rows that stay in memory. The fragment is read once, and its other rows wait in a temporary file.
    """

    per_read: int | None = None
    in_memory: int | None = None


def limit_rows(sources: Sequence[RowSource], *, shards: int, world_size: int, spills: bool = True) -> list[RowLimit]:
    """Return the limit of each source. It does not change the order of the rows.

    A rank holds the rows of about one fragment for each of its logical shards and each source. Where that would take
    too much memory, fragments are read once and their rows wait on disk. Fragments that are too large for this, or of
    which only the rows that are asked for are decoded, are read in parts.

    Args:
        sources: that are mixed; one without a mixture.
        shards: logical shards of all ranks.
        world_size: number of ranks.
        spills: rows may wait on disk.
    """
    own = -(-shards // world_size)
    most_bytes = _most_bytes(sources, own)
    if most_bytes is None:
        return [RowLimit()] * len(sources)
    rows = [most_bytes // (own * len(sources) * each.row_bytes) for each in sources]
    in_memory: list[int | None] = [None] * len(sources)
    if spills:
        in_memory = [
            _limit_in_memory(source, each, shards, most_bytes) for source, each in zip(sources, rows, strict=True)
        ]
        spilled = sum(
            _held_rows(source, own) * source.row_bytes
            for source, limit in zip(sources, in_memory, strict=True)
            if limit is not None
        )
        if not _fits_on_disk(spilled, world_size):
            in_memory = [None] * len(sources)
    return [
        RowLimit(per_read=_limit_per_read(source, each)) if limit is None else RowLimit(in_memory=limit)
        for source, each, limit in zip(sources, rows, in_memory, strict=True)
    ]


def _limit_per_read(source: RowSource, rows: int) -> int | None:
    """Return the limit of a source that may hold so many rows of each shard, if its fragments are read in parts."""
    largest = int(source.fragment_rows.max())
    limit = max(rows, -(-largest // _most_reads(source)))
    return limit if limit < largest else None


def _limit_in_memory(source: RowSource, rows: int, shards: int, most_bytes: int) -> int | None:
    """Return the same if rows wait on disk; None if they are not to."""
    largest = int(source.fragment_rows.max())
    most_rows = min(largest, source.rows // shards)  # a shard may have fewer rows than a fragment
    limit = max(rows, -(-most_rows // _MOST_READS))
    fits = largest * source.row_bytes <= most_bytes * _SPILLED_FRAGMENT
    saves_reads = limit < most_rows and not decodes_some_rows(source.fragment(0))
    return limit if fits and saves_reads else None


def _fits_on_disk(spilled_bytes: int, world_size: int) -> bool:
    room = _SPILL_ROOM * spilled_bytes * min(world_size, _RANKS_OF_A_DISK)
    return not spilled_bytes or (spilled_bytes <= _SPILLED_BYTES and has_room(room))


def _most_bytes(sources: Sequence[RowSource], own: int) -> int | None:
    """Return how many bytes of rows a rank with `own` shards may hold; None if it would not hold more anyway."""
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

    See `limit_rows` for what a rank holds.

    Args:
        sources: that are mixed; one without a mixture.
        shards: logical shards of all ranks.
        world_size: number of ranks.
    """
    own = -(-shards // world_size)
    limits = limit_rows(sources, shards=shards, world_size=world_size)
    held = sum(
        _held_rows(source, own, limit.in_memory or limit.per_read) * source.row_bytes
        for source, limit in zip(sources, limits, strict=True)
    )
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
