"""The order of an epoch, for any dataset, any number of ranks and any interruption. Pure: no files, no Ray."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from headway.datasets.errors import DataError
from headway.datasets.plan import EpochPlan, check_shards, default_shards, permutation, row_order, split_reads

FRAGMENTS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda rows: sum(rows) > 0)
SHARDS = st.integers(1, 12)
SEEDS = st.integers(0, 2**63 - 1)
Row = tuple[int, int]

settings.register_profile("busy machine", deadline=None, max_examples=60)
settings.load_profile("busy machine")


def rank_batches(
    plan: EpochPlan,
    *,
    rank: int,
    world_size: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    offset: int = 0,
    part: int | None = None,
) -> list[tuple[list[Row], tuple[int, ...], int]]:
    """Return one rank's part of each batch: rows as (fragment, row), micro-batch sizes, and rows over all ranks."""
    buffers: dict[int, deque[Row]] = defaultdict(deque)
    need_before = -1
    reads = plan.reads(rank=rank, world_size=world_size, offset=offset)
    if part is not None:
        reads = list(split_reads(reads, shards=plan.shards, part=part, shift=plan.seed % part))
        assert all(each.stop - each.start <= part for read in reads for each in read.slices)
    for read in reads:
        window = 0 if part is None else part * plan.shards
        assert read.slices[0].first_need >= need_before - window, "reads come in the order of first need"
        need_before = read.slices[0].first_need
        order = row_order(
            int(plan.fragment_rows[read.fragment]),
            seed=plan.seed,
            epoch=plan.epoch,
            fragment=read.fragment,
            shuffle=plan.shuffle,
        )
        for each in read.slices:
            assert each.first_need >= offset
            buffers[each.shard] += [(read.fragment, int(row)) for row in order[each.start : each.stop]]
    return [
        (
            [buffers[shard].popleft() for shard, rows in batch.shard_counts for _ in range(rows)],
            batch.sizes,
            batch.global_num_samples,
        )
        for batch in plan.batches(
            rank=rank,
            world_size=world_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            offset=offset,
        )
    ]


def global_batches(plan: EpochPlan, *, world_size: int, **options: int | None) -> list[list[Row]]:
    """Return the rows of each global batch, by rank; checks what must be equal on all ranks."""
    ranks = [rank_batches(plan, rank=rank, world_size=world_size, **options) for rank in range(world_size)]  # type: ignore[arg-type]
    assert len({len(batches) for batches in ranks}) == 1, "equally many global batches on every rank"
    result = []
    for step in zip(*ranks, strict=True):
        assert len({len(sizes) for _, sizes, _ in step}) == 1, "equally many micro-batches on every rank"
        assert all(sum(sizes) == len(rows) for rows, sizes, _ in step)
        assert all(max(sizes) - min(sizes) <= 1 for _, sizes, _ in step)
        if most := options.get("micro_batch_size"):
            assert all(max(sizes) <= most for _, sizes, _ in step)
        rows = [row for own, _, _ in step for row in own]
        assert {total for _, _, total in step} == {len(rows)}
        result.append(rows)
    return result


def every_row(fragments: list[int]) -> list[Row]:
    return [(fragment, row) for fragment, rows in enumerate(fragments) for row in range(rows)]


@given(
    fragments=FRAGMENTS, seed=SEEDS, epoch=st.integers(0, 5), shards=SHARDS, per_shard=st.integers(1, 4),
    shuffle=st.booleans(), data=st.data(),
)  # fmt: skip
def test_any_interruptions_and_resizes_deliver_every_row_once(
    fragments: list[int], seed: int, epoch: int, shards: int, per_shard: int, shuffle: bool, data: st.DataObject
) -> None:
    plan = EpochPlan(np.array(fragments), seed, epoch, shards=shards, shuffle=shuffle, tail="keep")
    seen: list[Row] = []
    while len(seen) < sum(fragments):
        batches = global_batches(
            plan,
            world_size=data.draw(st.integers(1, shards)),
            global_batch_size=shards * data.draw(st.integers(1, 4)),  # may change at every interruption
            micro_batch_size=data.draw(st.integers(1, 8)),
            offset=len(seen),
            part=data.draw(st.none() | st.integers(1, 20)),
        )
        stop = data.draw(st.integers(1, len(batches)))
        seen += [row for batch in batches[:stop] for row in batch]
    assert sorted(seen) == every_row(fragments)


@given(
    fragments=FRAGMENTS, seed=SEEDS, shards=SHARDS, per_shard=st.integers(1, 4), shuffle=st.booleans(),
    world_size=st.integers(1, 3),
)  # fmt: skip
def test_the_rows_that_come_next_are_known_before_they_are_read(
    fragments: list[int], seed: int, shards: int, per_shard: int, shuffle: bool, world_size: int
) -> None:
    plan = EpochPlan(np.array(fragments), seed, 1, shards=shards, shuffle=shuffle, tail="keep")
    offset = 0
    for batch in global_batches(plan, world_size=min(world_size, shards), global_batch_size=shards * per_shard):
        assert sorted(plan.locate(offset, shards * per_shard)) == sorted(batch)
        offset += len(batch)
    assert plan.locate(offset, 1) == []


@given(
    fragments=FRAGMENTS, seed=SEEDS, shards=SHARDS, per_shard=st.integers(1, 4), tail=st.sampled_from(["drop", "keep"])
)
def test_a_global_batch_holds_the_same_rows_at_every_world_size(
    fragments: list[int], seed: int, shards: int, per_shard: int, tail: str
) -> None:
    plan = EpochPlan(np.array(fragments), seed, 0, shards=shards, tail=tail)  # type: ignore[arg-type]
    alone = global_batches(plan, world_size=1, global_batch_size=shards * per_shard)
    for world_size in range(2, shards + 1):
        assert global_batches(plan, world_size=world_size, global_batch_size=shards * per_shard) == alone
    assert len(alone) == plan.steps(shards * per_shard)
    assert sum(map(len, alone)) == plan.samples(shards * per_shard)
    if tail == "drop":
        assert all(len(batch) == shards * per_shard for batch in alone)


@given(fragments=FRAGMENTS, seed=SEEDS, shards=SHARDS, world_size=st.integers(1, 12), data=st.data())
def test_going_on_gives_what_would_have_come(
    fragments: list[int], seed: int, shards: int, world_size: int, data: st.DataObject
) -> None:
    world_size = min(world_size, shards)
    plan = EpochPlan(np.array(fragments), seed, 3, shards=shards, tail="keep")
    whole = rank_batches(
        plan, rank=world_size - 1, world_size=world_size, global_batch_size=2 * shards, micro_batch_size=3
    )
    done = data.draw(st.integers(0, len(whole)))
    offset = min(done * 2 * shards, sum(fragments))
    rest = rank_batches(
        plan,
        rank=world_size - 1,
        world_size=world_size,
        global_batch_size=2 * shards,
        micro_batch_size=3,
        offset=offset,
    )
    assert rest == whole[done:]


@settings(max_examples=30)
@given(seed=SEEDS, epoch=st.integers(0, 100))
def test_epochs_differ_and_repeat(seed: int, epoch: int) -> None:
    fragments = np.array([30, 30, 30, 30])
    orders = [
        global_batches(EpochPlan(fragments, seed, e, shards=4, tail="keep"), world_size=1, global_batch_size=8)
        for e in (epoch, epoch + 1, epoch)
    ]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


@pytest.mark.parametrize(("tail", "steps", "samples"), [("drop", 12, 96), ("keep", 13, 103)])
def test_103_rows_4_ranks_batches_of_8(tail: str, steps: int, samples: int) -> None:
    plan = EpochPlan(np.array([50, 53]), 0, 0, shards=8, tail=tail)  # type: ignore[arg-type]
    batches = global_batches(plan, world_size=4, global_batch_size=8, micro_batch_size=1)
    assert (len(batches), sum(map(len, batches))) == (plan.steps(8), plan.samples(8)) == (steps, samples)


def test_evaluation_of_10_rows_on_4_ranks_counts_each_once() -> None:
    plan = EpochPlan(np.array([10]), 0, 0, shards=32, shuffle=False, tail="keep")
    (batch,) = global_batches(plan, world_size=4, global_batch_size=32, micro_batch_size=2)
    assert sorted(batch) == every_row([10])


def test_more_ranks_than_rows_still_take_part_in_every_step() -> None:
    plan = EpochPlan(np.array([3]), 0, 0, shards=8, shuffle=False, tail="keep")
    sizes = [rank_batches(plan, rank=rank, world_size=8, global_batch_size=8)[0][1] for rank in range(8)]
    assert sum(size for (size,) in sizes) == 3
    assert sizes.count((0,)) == 5


def test_a_place_is_found_in_the_time_of_the_fragments_not_of_the_rows() -> None:
    """A trillion rows: an algorithm proportional to the rows would not end."""
    plan = EpochPlan(np.full(1000, 10**9), 0, 0, shards=64)
    offset = plan.samples(64) * 99 // 100 // 64 * 64
    reads = plan.reads(rank=1, world_size=2, offset=offset)
    assert len(reads) < 200
    assert min(each.first_need for read in reads for each in read.slices) == offset + 32


def test_an_ordinary_fragment_is_read_about_once() -> None:
    plan = EpochPlan(np.full(1000, 1024), 0, 0, shards=64)
    assert len(plan.reads(rank=0, world_size=1)) <= 1000 + 64


def test_a_row_group_longer_than_many_shards_is_read_once_for_all_of_them() -> None:
    plan = EpochPlan(np.array([100_000]), 0, 0, shards=64)
    (read,) = plan.reads(rank=0, world_size=2)
    assert len(read.slices) == 32
    assert read.rows == 50_000


def test_the_order_is_a_promise() -> None:
    """These numbers must never change: a checkpoint means the same position in every version and on every machine."""
    assert permutation(8, 2, 0, 0, 0).tolist() == [6, 4, 7, 0, 5, 2, 1, 3]
    batch = global_batches(EpochPlan(np.array([5, 3, 4]), 7, 1, shards=2), world_size=1, global_batch_size=4)[0]
    assert batch == [(2, 2), (2, 3), (0, 3), (0, 4)]


@pytest.mark.parametrize(
    ("global_batch_size", "shards"),
    [(1, 1), (8, 8), (64, 32), (256, 32), (96, 32), (100, 25), (1009, 1009), (202, 101), (512, 32), (1000, 40)],
)
def test_default_shards_is_the_divisor_nearest_to_32(global_batch_size: int, shards: int) -> None:
    assert default_shards(global_batch_size) == shards
    check_shards(shards, global_batch_size=global_batch_size, world_size=1)


@pytest.mark.parametrize(
    ("shards", "global_batch_size", "world_size", "message"),
    [
        (8, 100, 1, "global_batch_size 100 is not a multiple of the 8 logical shards.*Nearest: 96 or 104.*to use 25"),
        (8, 5, 1, r"Nearest: 8\."),
        (4, 8, 5, "5 ranks cannot share 4 logical shards.*at most 4 workers"),
        (0, 8, 1, "shards must be an integer >= 1, got 0"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards: int, global_batch_size: int, world_size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_shards(shards, global_batch_size=global_batch_size, world_size=world_size)


def test_rows_move_by_a_third_of_the_epoch_and_row_groups_stay_together() -> None:
    plan = EpochPlan(np.full(400, 256), 0, 0, shards=32)
    fragments, rows = np.array(plan.locate(0, plan.rows)).T
    moved = np.abs(256 * fragments + rows - np.arange(plan.rows)) / plan.rows
    assert abs(moved.mean() - 1 / 3) < 0.02
    spans = [np.ptp(np.flatnonzero(fragments == each)) for each in range(0, 400, 20)]
    assert np.median(spans) < 256 * 32
    assert {len(set(fragments[at : at + 256])) for at in range(0, plan.rows - 256, 2560)} <= set(range(1, 33))
