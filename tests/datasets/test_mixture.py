"""Mixtures: proportions, every row once per pass, any interruptions and resizes, and the rows of real sources."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from headway.datasets import mixture_plan, prefetch
from headway.datasets.batching import memory_limits, spill
from headway.datasets.batching.shard_buffers import ShardBuffers
from headway.datasets.cache import Cache
from headway.datasets.errors import DataError
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.interleave import Interleave, edges_of
from headway.datasets.mixture import Mixture
from headway.datasets.mixture_plan import Layout, MixturePlan, lay_out
from headway.datasets.plan import row_order
from headway.datasets.sources import Parquet
from headway.datasets.stream import Stream

from .conftest import RAY_IF_EXTENDED, shard_info, write

Row = tuple[int, int, int]
"""Fragment, row in it, and the pass over its source."""


def layout(
    rows: list[list[int]], weights: list[tuple[int, tuple[float, ...]]], *, shards: int = 4, on_end: str = "repeat"
) -> Layout:
    fragments = [np.array(each) for each in rows]
    total = sum(map(sum, rows))
    return lay_out(fragments, weights, shards=shards, rotation=7 << 50, rows_per_epoch=total, on_end=on_end)  # type: ignore[arg-type]


def global_batches(
    plan: MixturePlan, *, world_size: int, global_batch_size: int, offset: int = 0, parts: Sequence[int | None] = ()
) -> list[list[Row]]:
    """Return the rows of each global batch by rank, through the reads and batches of every rank."""
    options: dict[str, Any] = {"world_size": world_size, "offset": offset}
    ranks = []
    rows = np.concatenate(plan.layout.fragment_rows)
    for rank in range(world_size):
        buffers: dict[int, deque[Row]] = defaultdict(deque)
        end = plan.samples(global_batch_size, offset=offset)
        for read in plan.reads(rank=rank, end=end, parts=parts, **options):
            assert not all(parts) or max(each.stop - each.start for each in read.slices) <= max(
                parts, default=rows.sum()
            )
            assert read.order is not None
            seed, epoch, fragment = read.order
            order = row_order(int(rows[read.fragment]), seed=seed, epoch=epoch, fragment=fragment, shuffle=True)
            for each in read.slices:
                assert each.start < each.stop
                buffers[each.shard] += [(read.fragment, int(row), epoch) for row in order[each.start : each.stop]]
        ranks.append(
            [
                [buffers[key].popleft() for key, count in batch.shard_counts for _ in range(count)]
                for batch in plan.batches(rank=rank, global_batch_size=global_batch_size, micro_batch_size=2, **options)
            ]
        )
        assert not any(buffers.values()), "nothing is read that is not needed"
    batches = [[row for own in step for row in own] for step in zip(*ranks, strict=True)]
    for step, batch in enumerate(batches):
        at = offset + step * global_batch_size
        assert sorted(plan.locate(at, len(batch))) == sorted((fragment, row) for fragment, row, _ in batch)
    return batches


SOURCES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=4).filter(lambda rows: sum(rows) >= 6), min_size=1, max_size=4
)
PARTS = st.just([]) | st.lists(st.none() | st.integers(1, 6), min_size=4, max_size=4)
WEIGHTS = st.tuples(*[st.sampled_from([0.1, 0.3, 1.0, 5.0])] * 4)


def _rest_on_any_ranks(plan: MixturePlan, shards: int, offset: int, data: st.DataObject) -> list[list[Row]]:
    """Return the global batches from an offset on, on a random number of ranks, of a random size."""
    return global_batches(
        plan,
        world_size=data.draw(st.integers(1, shards)),
        global_batch_size=shards * data.draw(st.integers(1, 3)),
        offset=offset,
        parts=data.draw(PARTS),
    )


@settings(max_examples=20, deadline=None)
@given(rows=SOURCES, weights=st.lists(WEIGHTS, min_size=1, max_size=3), shards=st.integers(1, 6), data=st.data())
def test_interruptions_and_resizes_change_nothing_and_each_pass_has_every_row_once(
    rows: list[list[int]], weights: list[tuple[float, ...]], shards: int, data: st.DataObject
) -> None:
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 30), min_size=len(weights) - 1, max_size=len(weights) - 1)))]
    phases = [(at, each[: len(rows)]) for at, each in zip(starts, weights, strict=True)]
    mixed = layout(rows, phases, shards=shards)
    whole: list[Row] = []
    for epoch in range(3):
        plan = MixturePlan(mixed, 5, epoch, tail="keep")
        seen: list[Row] = []
        while len(seen) < plan.rows:
            batches = _rest_on_any_ranks(plan, shards, len(seen), data)
            for batch in batches[: data.draw(st.integers(1, len(batches)))]:
                seen += batch
        alone = global_batches(plan, world_size=1, global_batch_size=shards)
        assert sorted(seen) == sorted(row for batch in alone for row in batch)
        whole += seen
    assert len(whole) == len(set(whole)), "no row comes twice in a pass"
    counts = np.array([mixed.interleave.counts(shard, len(whole) // shards) for shard in range(shards)]).T
    complete = (counts // mixed.lengths).min(axis=1)
    fragment = 0
    for source, of in enumerate(rows):
        for count in of:
            wanted = {(fragment, row, number) for row in range(count) for number in range(complete[source])}
            assert wanted <= set(whole), "every row comes in every complete pass"
            fragment += 1


@settings(max_examples=20, deadline=None)
@given(rows=SOURCES, weights=WEIGHTS, shards=st.integers(1, 6), epoch=st.integers(0, 2), data=st.data())
def test_a_source_that_drops_out_leaves_no_row_and_stops_at_no_row_twice(
    rows: list[list[int]], weights: tuple[float, ...], shards: int, epoch: int, data: st.DataObject
) -> None:
    every = [(fragment, row, epoch) for fragment, count in enumerate(sum(rows, [])) for row in range(count)]
    phases = [(0, weights[: len(rows)])]
    dropped = MixturePlan(layout(rows, phases, shards=shards, on_end="drop"), 5, epoch, tail="keep")
    seen: list[Row] = []
    while len(seen) < dropped.rows:
        batches = global_batches(
            dropped,
            world_size=data.draw(st.integers(1, shards)),
            global_batch_size=shards * data.draw(st.integers(1, 3)),
            offset=len(seen),
            parts=data.draw(PARTS),
        )
        for batch in batches[: data.draw(st.integers(1, len(batches)))]:
            seen += batch
    assert sorted(seen) == every
    stopped = MixturePlan(layout(rows, phases, shards=shards, on_end="stop"), 5, epoch, tail="keep")
    until = [row for batch in global_batches(stopped, world_size=shards, global_batch_size=shards) for row in batch]
    assert len(until) == len(set(until)) == stopped.rows
    # One more row of each shard, and a shard would lack one.
    lacking = [
        stopped.layout.interleave.counts(shard, stopped.rows // shards + 1) > stopped.layout.lengths[:, shard]
        for shard in range(shards)
    ]
    assert np.any(lacking)


@settings(max_examples=20, deadline=None)
@given(rows=SOURCES, weights=st.lists(WEIGHTS, min_size=2, max_size=3), shards=st.integers(1, 6), data=st.data())
def test_weights_may_change_where_sources_end_and_earlier_rows_do_not_follow_them(
    rows: list[list[int]], weights: list[tuple[float, ...]], shards: int, data: st.DataObject
) -> None:
    """With "drop" an epoch still has every row once; with "stop" it ends exactly where a shard lacks a row."""
    own = [each[: len(rows)] for each in weights]
    every = [(fragment, row, 0) for fragment, count in enumerate(sum(rows, [])) for row in range(count)]
    for on_end in ("drop", "stop"):
        changes = [(0, own[0])]
        seen: list[Row] = []
        for following in (*own[1:], None):
            plan = MixturePlan(layout(rows, changes, shards=shards, on_end=on_end), 5, 0, tail="keep")
            batches = _rest_on_any_ranks(plan, shards, len(seen), data)
            taken = batches if following is None else batches[: data.draw(st.integers(0, len(batches)))]
            seen += [row for batch in taken for row in batch]
            if following is not None and len(seen) < plan.rows and len(seen) // shards > changes[-1][0]:
                changes.append((len(seen) // shards, following))
        alone = global_batches(plan, world_size=1, global_batch_size=shards)
        assert sorted(seen) == sorted(row for batch in alone for row in batch)
        assert len(seen) == len(set(seen)) == plan.rows
        if on_end == "drop":
            assert sorted(seen) == every
        else:
            within, beyond = (
                np.array([plan.layout.interleave.counts(shard, end) for shard in range(shards)]).T
                for end in (plan.rows // shards, plan.rows // shards + 1)
            )
            assert (within <= plan.layout.lengths).all()
            assert (beyond > plan.layout.lengths).any()


def test_the_end_of_many_equal_sources_is_found_at_once() -> None:
    """Searching each of them for every shard took minutes."""
    rows = [[1000 + each] for each in range(100)]
    mixed = layout(rows, [(0, (1.0,) * 100), (500, (1.0, 2.0) * 50)], shards=32, on_end="drop")
    assert mixed.rows == sum(map(sum, rows))
    for shard in range(32):
        assert (mixed.interleave.counts(shard, mixed.mixed) <= mixed.lengths[:, shard]).all()


@settings(max_examples=60, deadline=None)
@given(
    left=st.lists(st.integers(0, 400), min_size=2, max_size=16),
    shards=st.integers(1, 4),
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.001, 0.2, 1, 5]), min_size=4, max_size=4).filter(any),
    start=st.sampled_from([0, 1234]),
    length=st.none() | st.integers(1, 2000),
    discrepancy=st.sampled_from([16, -300]),
)
def test_the_end_of_a_source_is_where_counting_each_row_finds_it(
    left: list[int], shards: int, weights: list[float], start: int, length: int | None, discrepancy: int
) -> None:
    """Also with a bound that is too high for a skip by arithmetic, which then is made shorter."""
    sources = max(1, min(4, len(left) // shards))
    rows = np.resize(np.array(left), (sources, shards))
    given = weights[:sources] if any(weights[:sources]) else [1.0] * sources
    until = None if length is None else start + length
    phase = Interleave(shards, (start,), (edges_of(given),), 7 << 50)
    row, counts, enough = start, np.zeros_like(rows), True
    while row != until and enough:
        more = counts.copy()
        np.add.at(more, (phase.sources(np.arange(shards), np.full(shards, row)), np.arange(shards)), 1)
        if enough := bool((more <= rows).all()):
            row, counts = row + 1, more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_plan, "_DISCREPANCY", discrepancy)
        found, before = mixture_plan._until_one_ends(phase, rows, until)
    assert found == row
    assert np.array_equal(before, counts)


@pytest.mark.parametrize("parts", [(), (4, 4, 4)])
@pytest.mark.parametrize("later", [(0.0, 0.5, 0.5), (1e-9, 0.5, 0.5)])
@pytest.mark.parametrize("row", range(14))
def test_a_source_whose_weight_becomes_0_is_read_before_the_others_go_past_the_change(
    row: int, later: tuple[float, ...], parts: tuple[int, ...]
) -> None:
    weights = [(0, (0.6, 0.3, 0.1)), (7, (0.1, 0.8, 0.1)), (13, later)]
    plan = MixturePlan(layout([[10] * 20, [10] * 10, [17] * 6], weights, shards=12), 1, 0)
    for rank in range(3):
        options: dict[str, Any] = {"rank": rank, "world_size": 3, "offset": row * 12}
        reads = plan.endless_reads(parts=parts, **options)
        held: Counter[int] = Counter()
        for batch in islice(plan.batches(global_batch_size=12, **options), 16):
            for key, count in batch.shard_counts:
                while held[key] < count:
                    held.update({each.shard: each.stop - each.start for each in next(reads).slices})
                    assert held.total() < 400
                held[key] -= count


@pytest.mark.parametrize("later", [(0.999, 0.001), (0.99999, 0.00001), (0.5, 0.5)])
@pytest.mark.parametrize("change", [0, 10])
@pytest.mark.parametrize("rows", [[[5] * 200, [5] * 40], [[10] * 40, [10] * 100]])
def test_a_source_of_little_weight_makes_no_other_be_read_ahead(
    rows: list[list[int]], change: int, later: tuple[float, ...]
) -> None:
    """Its rows were expected 1 / weight rows late."""
    weights = [(0, (0.5, 0.5)), (change, later)] if change else [(0, later)]
    plan = MixturePlan(layout(rows, weights, shards=32), 1, 0)
    for row in (0, 9, 11, 15):
        for rank, world_size in ((0, 1), (0, 3), (2, 3)):
            assert _most_held(plan, 20, rank=rank, world_size=world_size, offset=row * 32) < 15 * 32


@pytest.mark.parametrize("rows", [5, 7, 33])
def test_reads_of_a_small_source_stay_near_their_need_in_every_pass(rows: int) -> None:
    """Its shards of more rows take longer for a pass, so that reading pass by pass runs ahead in them."""
    mixed = layout([[40] * 20, [5] * (rows // 5) + [rows % 5]], [(0, (0.5, 0.5))])
    for epoch in (0, 1, 100):
        assert _most_held(MixturePlan(mixed, 1, epoch), 200, rank=0, world_size=1, offset=8) < 250


def _most_held(plan: MixturePlan, batches: int, **options: int) -> int:
    """Return how many rows are held at most that have been read and are not used yet."""
    reads = plan.endless_reads(**options)
    held: Counter[int] = Counter()
    most = 0
    for batch in islice(plan.batches(global_batch_size=plan.layout.shards, **options), batches):
        for key, count in batch.shard_counts:
            while held[key] < count:
                held.update({each.shard: each.stop - each.start for each in next(reads).slices})
                if (most := max(most, held.total())) > 10_000:
                    return most
            held[key] -= count
    return most


def test_rows_whose_sources_need_not_be_known_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the reads are the same as without."""
    for on_end in ("repeat", "drop", "stop"):
        weights = [(0, (0.5, 0.5)), (600, (0.9, 0.1))]
        plan = MixturePlan(layout([[2000] * 5, [3000, 50, 700]], weights, shards=3, on_end=on_end), 1, 1, tail="keep")
        options: dict[str, Any] = {"rank": 0, "world_size": 1, "offset": 6}
        monkeypatch.setattr(mixture_plan, "_ROWS_TO_SKIP", 2**40)
        walked = list(plan.reads(**options))
        monkeypatch.setattr(mixture_plan, "_ROWS_TO_SKIP", 1)
        monkeypatch.setattr(mixture_plan, "_MOST_ROWS_AT_A_TIME", 64)
        assert list(plan.reads(**options)) == walked
    large = MixturePlan(layout([[10**9] * 4, [10**9] * 4], [(0, (0.5, 0.5))], shards=1), 1, 0)
    reads = large.endless_reads(rank=0, world_size=1)
    assert [next(reads).rows for _ in range(4)] == [10**9] * 4


@pytest.mark.parametrize("shards", [1, 8, 25, 32, 1009])
@pytest.mark.parametrize("weights", [(0.7, 0.3), (5, 3, 2, 0), (0.98, 0.01, 0.01), (1.0,) * 100])
def test_proportions_are_within_a_thousandth_at_every_10_000_rows(shards: int, weights: tuple[float, ...]) -> None:
    later = weights[::-1]
    change = 101_000 // shards
    interleave = Interleave(shards, (0, change), (edges_of(weights), edges_of(later)), 12345 << 40)
    numbers = np.arange(200_000)
    sources = interleave.sources(numbers % shards, numbers // shards)
    expected = np.where(
        (numbers // shards < change)[:, None], np.array(weights) / sum(weights), np.array(later) / sum(later)
    )
    for begin in range(0, 200_000, 10_000):
        seen = np.bincount(sources[begin : begin + 10_000], minlength=len(weights))
        assert np.abs(seen - expected[begin : begin + 10_000].sum(0)).max() <= 10
    for shard in (0, shards - 1):
        for row in (0, 1, 17, change, 200_000 // shards):
            before = (numbers % shards == shard) & (numbers // shards < row)
            assert np.array_equal(interleave.counts(shard, row), np.bincount(sources[before], minlength=len(weights)))


def test_a_place_is_found_in_a_trillion_rows() -> None:
    """An algorithm proportional to the rows would not end."""
    mixed = layout([[10**9] * 300, [10**9] * 700], [(0, (0.7, 0.3)), (10**6, (0.4, 0.6))], shards=64)
    plan = MixturePlan(mixed, 0, 0)
    offset = plan.samples(64) * 99 // 100 // 64 * 64
    assert next(plan.reads(rank=1, world_size=2, offset=offset)).rows
    batch = next(plan.batches(rank=1, world_size=2, global_batch_size=64, offset=offset))
    assert sum(rows for _, rows in batch.shard_counts) == 32


def test_the_order_is_a_promise() -> None:
    """These numbers must never change: a checkpoint means the same position in every version and on every machine."""
    plan = MixturePlan(layout([[5, 3, 4], [9]], [(0, (0.7, 0.3))], shards=2), 7, 1)
    assert global_batches(plan, world_size=1, global_batch_size=4)[0] == [(2, 1, 1), (3, 4, 0), (0, 4, 1), (0, 2, 1)]


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, tuple[Any, float]]:
    """Three sources with 60, 40 and 30 rows of {id, text}, whose ids begin at 0, 100 and 200."""
    write(tmp_path / "web.parquet", range(0, 60), text=[f"web {i}" for i in range(60)])
    for name, ids in (("code", range(100, 140)), ("books", range(200, 230))):
        rows = [json.dumps({"text": f"{name} {i - ids.start}", "id": i}) for i in ids]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return {
        "web": (Parquet(tmp_path / "web.parquet", columns=["id", "text"]), 0.5),
        "code": (JsonLines(tmp_path / "code.jsonl"), 0.3),
        "books": (JsonLines(tmp_path / "books.jsonl"), 0.2),
    }


def batches(data: Any, *, rank: int = 0, world_size: int = 1, epoch: int = 0, offset: int = 0, **options: Any) -> Any:
    engine = options.pop("engine", "threads")
    stream = Stream(data, engine=engine, tail=options.pop("tail", "keep"), shards=options.pop("shards", None))
    stream.setup(shard_info(rank, world_size, **options))
    try:
        return list(stream.epoch(epoch, offset=offset))
    finally:
        stream.close()


def ids(data: Any, *, world_size: int = 1, **options: Any) -> list[list[int]]:
    ranks = [batches(data, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return [
        [row for batch in step for row in batch.micro_batches[0]["id"][: batch.num_samples[0]].tolist()]
        for step in zip(*ranks, strict=True)
    ]


def test_a_stream_of_a_mixture_resumes_anywhere_and_names_its_rows(sources: Any, engine: str) -> None:
    data = Mixture(sources, weights_by_step={6: {"web": 0.1}})
    whole = ids(data, engine=engine)
    assert ids(data, world_size=3)[:4] + ids(data, world_size=2, offset=32) == whole
    for batch in batches(data):
        (columns,) = batch.micro_batches
        for name, source, row in zip(
            batch.row_ids()[0], columns["source"].tolist(), columns["id"].tolist(), strict=True
        ):
            assert name.startswith(("web/web.parquet[", "code/code.jsonl:", "books/books.jsonl:")[source])
            assert row // 100 == source
    shares = [Counter(row // 100 for batch in part for row in batch) for part in (whole[:6], whole[6:])]
    assert abs(shares[0][0] - 24) <= 2
    assert abs(shares[1][0] - 82 / 6) <= 2


def test_epochs_go_on_in_each_source(sources: Any) -> None:
    data = Mixture(sources, rows_per_epoch=40)
    seen = Counter(row for epoch in range(8) for batch in ids(data, epoch=epoch) for row in batch)
    assert sum(seen.values()) == 320
    assert set(seen) >= {*range(60), *range(100, 140), *range(200, 230)}
    assert {seen[row] for row in range(60)} <= {2, 3, 4}, "160 rows of a source of 60, whose shards have 7 or 8 rows"


def test_an_evaluation_reads_every_row_once(sources: Any) -> None:
    every = [*range(60), *range(100, 140), *range(200, 230)]
    assert sorted(row for batch in ids(Mixture(sources), training=False, world_size=3) for row in batch) == every
    dropped = Mixture(sources, on_end="drop")
    assert sorted(row for batch in ids(dropped, world_size=3) for row in batch) == every


def test_the_fingerprint_follows_sources_and_weights(sources: Any) -> None:
    def stream(data: Mixture, **options: Any) -> Stream:
        made = Stream(data)
        made.setup(shard_info(**options))
        return made

    first = stream(Mixture(sources))
    changed = [
        Mixture({**sources, "web": (sources["web"][0], 0.6)}),
        Mixture(sources, weights_by_step={5: {"web": 1.0}}),
        Mixture(sources, rows_per_epoch=80),
        Mixture(sources, on_end="drop"),
    ]
    for data in changed:
        other = stream(data)
        assert other.fingerprint != first.fingerprint
        assert "the sources are the same, but their mixture" in str(other.explain_change(first.fingerprint))
    assert stream(Mixture({name: (data, 10 * weight) for name, (data, weight) in sources.items()})).fingerprint == (
        first.fingerprint
    )
    fewer = stream(Mixture({name: sources[name] for name in ("web", "code")}))
    assert fewer.explain_change(first.fingerprint) is None


@pytest.mark.parametrize("tail", ["keep", "drop"])
def test_a_row_group_in_which_an_epoch_ends_is_read_once_for_both_epochs(sources: Any, engine: str, tail: Any) -> None:
    """Epochs of 128 rows in batches of 24, so that 8 are left. The sources have 130."""
    data, rank = Mixture(sources, rows_per_epoch=128), {"rank": 1, "world_size": 2, "global_batch_size": 24}
    stream = Stream(data, engine=engine, tail=tail, shards=8)  # type: ignore[arg-type]
    stream.setup(shard_info(**rank))
    assert stream._opened is not None
    reads = [read for some in islice(stream._opened.reads_on(0, 0), 6) for read in some]
    taken = Counter((read.order, each.shard) for read in reads for each in read.slices)
    assert set(taken.values()) == {1}, "a shard gets its rows of a row group from one read"
    seen = [batch for epoch in range(6) for batch in stream.epoch(epoch)]
    stream.close()
    fresh = [batch for epoch in range(6) for batch in batches(data, epoch=epoch, tail=tail, shards=8, **rank)]
    assert [batch.micro_batches[0]["id"].tolist() for batch in seen] == [
        batch.micro_batches[0]["id"].tolist() for batch in fresh
    ]


@pytest.mark.parametrize(
    ("group", "limited", "held"),
    [
        pytest.param(8, "", 8, id="whole"),
        pytest.param(64, "read again", 4, id="parts", marks=pytest.mark.extended),
        pytest.param(64, "on disk", 4, id="disk", marks=pytest.mark.extended),
    ],
)
def test_100_sources_hold_few_rows_of_each_for_each_shard_and_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, limited: str, held: int
) -> None:
    """Of 25,600 rows, a rank of four logical shards holds about one row group of each source, or a part of it."""
    made: list[ShardBuffers] = []

    class Kept(ShardBuffers):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(prefetch, "ShardBuffers", Kept)
    sources = {}
    for number in range(100):
        path = write(tmp_path / f"{number:02d}.parquet", range(256 * number, 256 * (number + 1)), group=group)
        sources[f"{number:02d}"] = (Parquet(path), 1.0)
    stream = Stream(Mixture(sources), engine="threads", shards=4)
    stream.setup(shard_info(global_batch_size=64))
    whole = []
    if limited:
        whole = [batch.micro_batches[0]["id"].tolist() for batch in stream.epoch(0)]
        made.clear()
        monkeypatch.setattr(memory_limits, "_MIXED_BYTES", 0)
        monkeypatch.setattr(memory_limits, "_SPILL_ROOM", 3 if limited == "on disk" else 2**60)
        stream.setup(shard_info(global_batch_size=64))
        assert stream._opened is not None
        assert any(limit.in_memory for limit in stream._opened.row_limits) == (limited == "on disk")
        assert any(limit.per_read for limit in stream._opened.row_limits) == (limited == "read again")
    files, rows, seen = [], [], Counter[int]()
    for number, batch in enumerate(stream.epoch(0)):
        files.append(open_files(tmp_path))
        if number % 10 == 5:
            parts = [part for some in list(made[0]._buffers.values()) for part in list(some)]
            rows.append(sum(part[2] - part[1] for part in parts if isinstance(part[0], dict)))
        seen.update(batch.micro_batches[0]["id"].tolist())
        assert not whole or batch.micro_batches[0]["id"].tolist() == whole[number], "the order is the same"
    stream.close()
    assert len(seen) > 25_000
    assert max(files) <= 4, "the reading threads open a file each, and close it"
    assert max(rows) <= 2 * 100 * 4 * held, "one of each, and those that arrive a little early"


def test_rows_wait_on_disk_also_where_a_row_group_is_longer_than_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 sources of one row group of 256 rows each, of which a shard has 8."""
    sources = {}
    for number in range(20):
        path = write(tmp_path / f"{number:02d}.parquet", range(256 * number, 256 * (number + 1)), group=256)
        sources[f"{number:02d}"] = (Parquet(path), 1.0)
    whole = ids(Mixture(sources), shards=32, global_batch_size=64)
    monkeypatch.setattr(memory_limits, "_MIXED_BYTES", 8 * 256 * Parquet(path).open().row_bytes)
    stream = Stream(Mixture(sources), engine="threads", shards=32)
    stream.setup(shard_info(global_batch_size=64))
    assert stream._opened is not None
    assert [limit.in_memory for limit in stream._opened.row_limits] == [3] * 20
    assert ids(Mixture(sources), shards=32, global_batch_size=64) == whole


@pytest.fixture
def spilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Mixture, Path]:
    """A mixture of text, ragged lists and numbers, of whose rows few stay in memory, and the folder of the others."""
    sources: dict[str, Any] = {}
    for number in range(8):
        ids = range(512 * number, 512 * (number + 1))
        text, ragged = [f"row {each}" for each in ids], [list(range(each % 3)) for each in ids]
        path = write(tmp_path / f"{number}.parquet", ids, group=64, text=text, ragged=ragged)
        sources[str(number)] = (Parquet(path), 1.0 + number)
    monkeypatch.setattr(memory_limits, "_MIXED_BYTES", 0)
    monkeypatch.setattr(memory_limits, "_MIXED_TIMES", 2)
    (folder := tmp_path / "waiting").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return Mixture(sources), folder


def rows_of(steps: Any) -> list[Any]:
    return [
        (columns["id"].tolist(), columns["text"], [each.tolist() for each in columns["ragged"]])
        for batch in steps
        for columns in batch.micro_batches
    ]


def open_files(folder: Path) -> int:
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # reading threads open and close files meanwhile
            found += os.readlink(f"/proc/self/fd/{each}").startswith(str(folder))
    return found


@RAY_IF_EXTENDED
def test_rows_wait_on_disk_in_files_that_a_killed_process_leaves_no_trace_of(
    engine: str, spilled: tuple[Mixture, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder = spilled
    monkeypatch.setattr(spill, "_FILE_BYTES", 20_000)
    stream = Stream(data, engine=engine, tail="keep")  # type: ignore[arg-type]
    stream.setup(shard_info())
    assert stream._opened is not None
    assert all(limit.in_memory for limit in stream._opened.row_limits)
    seen, files = [], []
    for epoch in range(3):
        for batch in stream.epoch(epoch):
            seen.append(batch)
            files.append(open_files(folder))
            assert os.listdir(folder) == [], "the files have no names"
    stream.close()
    assert 1 < max(files) < 30, "files whose rows have been used are removed; about 60 have been written"
    assert open_files(folder) == 0
    monkeypatch.setattr(memory_limits, "HELD_BYTES", 2**40)
    monkeypatch.setattr(memory_limits, "_MIXED_TIMES", 1000)
    assert rows_of(seen) == rows_of([batch for epoch in range(3) for batch in batches(data, epoch=epoch)])
    assert open_files(folder) == 0


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[str]:
    """Make `folder` a disk of 100 kB, or limit the size of files where no mount is permitted; yield the error."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder]
    if shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield "[Errno 28] No space left on device"
        finally:
            subprocess.run(["umount", folder], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield "[Errno 27] File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_becomes_full_makes_row_groups_be_read_again_and_changes_no_row(
    spilled: tuple[Mixture, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder = spilled
    whole = rows_of(batches(data, offset=80))
    assert caplog.messages == []
    monkeypatch.setattr(memory_limits, "_SPILL_ROOM", 0)  # as if others had filled the disk since the start
    with full_disk(folder) as error:
        made = batches(data, offset=80)
    assert rows_of(made) == whole
    (line,) = caplog.messages
    assert line.startswith(f"rows that are needed later cannot be kept in {folder} ({error})")


def test_rows_wait_on_disk_where_it_has_room_for_the_rows_of_all_ranks(
    spilled: tuple[Mixture, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for has_room, world_size in [(True, 1), (True, 2), (False, 2)]:
        monkeypatch.setattr(memory_limits, "has_room", lambda size, answer=has_room: asked.append(size) or answer)
        stream = Stream(spilled[0], shards=8)
        stream.setup(shard_info(world_size=world_size))
        assert stream._opened is not None
        assert all(limit.in_memory for limit in stream._opened.row_limits) == has_room
    assert len(set(asked)) == 1


def test_rows_of_a_remote_storage_are_fetched_once_and_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files, and remote ones with a cache on a local disk, are read in parts instead, without room on disk."""

    def reads(path: str, **options: Any) -> int:
        stream = Stream(Mixture({str(number): (Parquet(path, **options), 1.0) for number in range(9)}), shards=4)
        stream.setup(shard_info())
        assert stream._opened is not None
        return len(list(stream._opened.reads(0, 0)))

    local = write(tmp_path / "rows.parquet", range(512), group=64)
    remote = f"memory://{tmp_path}/rows.parquet"
    fsspec.filesystem("memory").put(str(local), remote)
    whole = reads(str(local))
    monkeypatch.setattr(memory_limits, "_MIXED_BYTES", 0)
    assert reads(str(local)) == whole
    monkeypatch.setattr(memory_limits, "_SPILL_ROOM", 2**60)
    assert reads(remote) == whole
    assert reads(str(local)) > 2 * whole
    assert reads(remote, cache=Cache(tmp_path / "cache", max_bytes=2**20)) == reads(str(local))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": {}}, "sources is empty"),
        ({"sources": [1]}, r"sources must be \{name: \(data, weight\)\}, .* got a list"),
        ({"sources": {"web": JsonLines("web.jsonl")}}, r"sources\['web'\] must be \(data, weight\), got a JsonLines"),
        (
            {"sources": {"web": ("web.jsonl", 1)}},
            r"sources\['web'\]\[0\] must be data of a format, .*, got a str",
        ),
        ({"sources": {"web": (JsonLines("web.jsonl"), "1")}}, "the weight of 'web' must be a number >= 0, got '1'"),
        ({"on_end": "again"}, "on_end must be"),
        ({"on_end": "drop", "rows_per_epoch": 5}, "rows_per_epoch needs on_end='repeat'"),
        ({"rows_per_epoch": 0}, "rows_per_epoch must be an integer >= 1"),
        ({"weights_by_step": {0: {"web": 1}}}, "steps >= 1, got 0"),
        ({"weights_by_step": {5: {"wed": 1}}}, "names 'wed'; did you mean 'web'"),
        ({"weights_by_step": {5: {"web": -1}}}, "the weight of 'web' must be a number >= 0, got -1"),
        ({"weights_by_step": {5: {"web": 0, "code": 0, "books": 0}}}, "all weights are 0 from step 5 on"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Mixture(**{"sources": sources, **options})


def test_sources_that_do_not_fit_together_are_refused(sources: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="source 'books' has 30 rows, fewer than the 32 logical shards"):
        batches(Mixture(sources), global_batch_size=32)
    with pytest.raises(DataError, match="source 'gone': .*gone.jsonl does not exist"):
        batches(Mixture({"gone": (JsonLines(tmp_path / "gone.jsonl"), 1)}))
    tokens = Parquet(tmp_path / "web.parquet", columns=["id"])
    with pytest.raises(DataError, match="the sources of a mixture must give the same"):
        batches(Mixture({**sources, "tokens": (tokens, 1)}))
    (tmp_path / "own.jsonl").write_text('{"source": 1}\n' * 8)
    with pytest.raises(DataError, match="a source has a column 'source', which a Mixture adds; leave it out"):
        batches(Mixture({"own": (JsonLines(tmp_path / "own.jsonl"), 1)}))


def test_an_epoch_that_would_end_before_its_first_batch_is_refused(sources: Any) -> None:
    ends_first = {name: (data, 1000 if name == "books" else 1) for name, (data, _) in sources.items()}
    stream = Stream(Mixture(ends_first, on_end="stop"), engine="threads", shards=8)
    with pytest.raises(DataError, match="the first source ends after [0-9]+ rows .* less than global_batch_size 64"):
        stream.setup(shard_info(global_batch_size=64))
