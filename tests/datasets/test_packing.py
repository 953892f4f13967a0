"""Packing: every token in exactly one row, full rows, certified indexes, and exact resumes of packed mixtures."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections import Counter, defaultdict, deque
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from headway.datasets.arrow import Rows
from headway.datasets.errors import DataError
from headway.datasets.formats import jsonl
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.mixture import MixedSource, Mixture
from headway.datasets.mixture_plan import OnEnd
from headway.datasets.packing import Packed, PackedSource, pack
from headway.datasets.plan import row_order
from headway.datasets.sources import Parquet
from headway.datasets.stream import Stream
from headway.datasets.tokenizers import ByteTokenizer

from .conftest import RAY_IF_EXTENDED, shard_info, write

LENGTH = 32


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 70), max_size=60), row_length=st.integers(1, 40))
def test_every_token_is_in_exactly_one_piece_and_at_most_one_row_is_half_empty(
    lengths: list[int], row_length: int
) -> None:
    rows = pack(lengths, row_length)
    spans = sorted(piece for row in rows for piece in row)
    seen = [(document, at) for document, start, stop in spans for at in range(start, stop)]
    assert seen == [(document, at) for document, length in enumerate(lengths) for at in range(length)]
    filled = [sum(stop - start for _, start, stop in row) for row in rows]
    assert all(0 < each <= row_length for each in filled)
    assert sum(2 * each <= row_length for each in filled) <= 1


def words(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write documents of 0 to 90 letters, half of them short."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, 20 if draw.random() < 0.5 else 90) for _ in range(count)]
    texts = ["".join(draw.choices("abcdefgh", k=length)) for length in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def packed(path: Path, index: Path, **options: Any) -> Packed:
    return Packed(
        JsonLines(path, index=index), **{"length": LENGTH, "index": index, "tokenizer": ByteTokenizer(), **options}
    )


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several groups of small data."""
    monkeypatch.setattr(jsonl, "_FRAGMENT_ROWS", 16)
    monkeypatch.setattr("headway.datasets.packing._GROUP_ROWS", 16)


def steps(data: Any, *, world_size: int = 1, offset: int = 0, **options: Any) -> list[list[Any]]:
    """Return the row ids and tokens of each global batch, by rank."""
    ranks = []
    for rank in range(world_size):
        stream = Stream(data, engine=options.get("engine", "threads"), tail="keep")
        stream.setup(shard_info(rank, world_size))
        ranks.append([])
        for batch in stream.epoch(0, offset=offset):
            ranks[-1].append(list(zip(batch.row_ids()[0], batch.micro_batches[0]["tokens"].tolist(), strict=False)))
        stream.close()
    return [[row for own in step for row in own] for step in zip(*ranks, strict=True)]


def test_packed_rows_have_documents_positions_and_a_mask(tmp_path: Path) -> None:
    path = words(tmp_path / "words.jsonl", 200)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    stream = Stream(packed(path, tmp_path, pad=7), engine="threads", tail="keep")
    stream.setup(shard_info())
    assert isinstance(stream.source, PackedSource)
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    padding = 0
    for batch in stream.epoch(0):
        (columns,) = batch.micro_batches
        assert {name: each.dtype for name, each in columns.items()} == {
            "tokens": torch.int32, "document_ids": torch.int32, "positions": torch.int32, "mask": torch.bool
        }  # fmt: skip
        padding += int((~columns["mask"]).sum())
        assert (columns["tokens"][~columns["mask"]] == 7).all()
        assert torch.equal(columns["mask"], columns["document_ids"] >= 0)
        for at, name in enumerate(batch.row_ids()[0]):
            for number, piece in enumerate(str(name).split("+")):
                line, start, stop = (
                    int(each) for each in re.fullmatch(r"words.jsonl:(\d+)\[(\d+):(\d+)\]", piece).groups()
                )  # type: ignore[union-attr]
                own = columns["document_ids"][at] == number
                assert columns["positions"][at][own].tolist() == list(range(stop - start))
                found[line][start] = columns["tokens"][at][own].tolist()
    stream.close()
    assert padding == stream.source.padding
    back = [sum((found[line][start] for start in sorted(found[line])), []) for line in range(1, 201)]
    assert back == [ByteTokenizer()(text).tolist() for text in texts]


def unchanged(rows: Rows) -> Rows:
    return rows


@RAY_IF_EXTENDED
@pytest.mark.parametrize("lengths", [(37, 37), pytest.param((37, 40), marks=pytest.mark.extended)])
def test_columns_that_batches_derive_are_those_that_transforms_get(
    tmp_path: Path, engine: str, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank has no rows, and repeats one; and in a mixture of two lengths, whose rows stay lists."""
    monkeypatch.setattr("headway.datasets.formats.packed_rows._TOKENS_AT_A_TIME", 3 * 37)
    parts = {
        f"part-{seed}": (packed(words(tmp_path / f"{seed}.jsonl", 40, seed=seed), tmp_path, length=length, pad=9), 1)
        for seed, length in enumerate(lengths)
    }
    for data in (parts["part-0"][0], Mixture(parts)):
        for rank in range(3):
            seen = []
            for transforms in ([], [unchanged]):
                stream = Stream(data, transforms=transforms, engine=engine, tail="keep")  # type: ignore[arg-type]
                stream.setup(shard_info(rank, 3, micro_batch_size=1))
                each = [columns for batch in stream.epoch(0) for columns in batch.micro_batches]
                seen.append([[(name, repr(column)) for name, column in columns.items()] for columns in each])
                stream.close()
            assert seen[0] == seen[1]


def test_rows_of_real_text_are_at_least_98_percent_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own modules, in groups of the usual size."""
    monkeypatch.undo()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows = [json.dumps({"text": each.read_text(errors="replace")}) for each in files]
    (tmp_path / "stdlib.jsonl").write_text("\n".join(rows))
    source = packed(tmp_path / "stdlib.jsonl", tmp_path, length=2048).open()
    assert source.rows > 2000
    assert source.tokens / (source.rows * 2048) >= 0.98


def test_tokens_of_parquet_are_packed_without_a_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", range(40), length=5)
    seen = steps(Packed(Parquet(tmp_path / "a.parquet"), length=8, index=tmp_path, column="tokens"))
    assert Counter(name.partition("[")[0] for batch in seen for row, _ in batch for name in row.split("+")) == {
        "a.parquet": 40
    }
    with pytest.raises(DataError, match="the documents have no column 'text'"):
        Packed(Parquet(tmp_path / "a.parquet"), length=8, index=tmp_path).open()
    with pytest.raises(DataError, match="column 'tokens' must have text for the tokenizer, got ndarray"):
        Packed(
            Parquet(tmp_path / "a.parquet"), length=8, index=tmp_path, column="tokens", tokenizer=ByteTokenizer()
        ).open()


def test_a_resize_changes_nothing(tmp_path: Path, engine: str) -> None:
    data = packed(words(tmp_path / "words.jsonl", 200), tmp_path)
    whole = steps(data, engine=engine)
    assert len(whole) > 10
    assert steps(data, world_size=3)[:5] + steps(data, world_size=2, offset=40) == whole


class Shifted(ByteTokenizer):
    """Gives as many tokens as before, but others."""

    def __call__(self, text: str) -> Any:
        return super().__call__(text) + self.by

    by = 0


def test_a_tokenizer_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(words(tmp_path / "words.jsonl", 50), tmp_path, tokenizer=Shifted())
    source = data.open()
    source.fragment(0).read()
    monkeypatch.setattr(Shifted, "by", 1)
    with pytest.raises(DataError, match="the tokenizer has changed or is not deterministic"):
        data.open().fragment(0).read()
    monkeypatch.setattr(Shifted, "by", 0)
    other = packed(tmp_path / "words.jsonl", tmp_path, length=LENGTH + 1, tokenizer=Shifted())
    assert other.open().fingerprint != source.fingerprint


class Counting(ByteTokenizer):
    """Counts its documents."""

    calls = 0

    def __call__(self, text: str) -> Any:
        Counting.calls += 1
        return super().__call__(text)


def test_documents_are_tokenized_once_for_all_epochs_and_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "calls", 0)
    monkeypatch.setattr("headway.datasets.formats.token_file._SAMPLE_TOKENS", 1)
    data = packed(words(tmp_path / "words.jsonl", 200), tmp_path, tokenizer=Counting())
    first = steps(data)
    # Beside the documents themselves, each start tokenizes the first one.
    assert Counting.calls == 201
    assert steps(data) == first
    assert Counting.calls == 202
    (rows,) = tmp_path.glob("*.rows")
    assert rows.stat().st_size == 4 * LENGTH * data.open().rows


def test_a_file_of_rows_that_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    data = packed(words(tmp_path / "words.jsonl", 50), tmp_path)
    fragment = data.open().fragment(0)
    (rows,) = tmp_path.glob("*.rows")
    content = bytearray(rows.read_bytes())
    content[5] ^= 1
    rows.write_bytes(content)
    with pytest.raises(DataError, match=rf"{rows.name} has other tokens than when it was written: remove"):
        fragment.read()
    rows.write_bytes(content[:40])
    with pytest.raises(DataError, match=rf"{rows.name} has other tokens"):
        fragment.read()
    rows.unlink()
    with pytest.raises(
        DataError, match=r"No such file or directory\): set index to a folder that every machine can read"
    ):
        fragment.read()
    with pytest.raises(DataError, match=rf"{rows.name} is not complete: remove"):
        data.open()


def test_a_build_that_fails_leaves_no_rows_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "abc"}\n' * 40 + '{"text": null}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:41: column 'text' must have text for the tokenizer, got NoneType"):
        packed(tmp_path / "bad.jsonl", tmp_path / "index").open()
    assert not list((tmp_path / "index").glob("packed*"))


def test_packed_mixtures_and_lengths_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    data = packed(words(tmp_path / "words.jsonl", 50), tmp_path)
    with pytest.raises(DataError, match="make a Mixture of Packed data"):
        Packed(Mixture({"words": (data, 1)}), length=8, index=tmp_path)
    with pytest.raises(DataError, match="length must be an integer >= 1, got 0"):
        Packed(JsonLines(tmp_path), length=0, index=tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"tokens": []}\n')
    with pytest.raises(DataError, match="empty.jsonl has no tokens"):
        Packed(JsonLines(tmp_path / "empty.jsonl"), length=8, index=tmp_path, column="tokens").open()


class Simulation:
    """Runs of a packed mixture of three sources that are killed and resized, without processes.

    A rank is what it reads and learns: it fills its buffers by the reads of the plan, with the tokens of the real
    files, and takes them out by the batches of the plan.
    """

    def __init__(self, folder: Path) -> None:
        self.data = {
            name: packed(words(folder / f"{name}.jsonl", count, seed=count), folder)
            for name, count in (("web", 150), ("code", 90), ("books", 60))
        }
        self.sources = {name: each.open() for name, each in self.data.items()}
        self.mixed = MixedSource(Mixture({name: (each, 1) for name, each in self.data.items()}), self.sources)
        self.read = cache(lambda fragment: self.mixed.fragment(fragment).read())
        self.name = cache(self.mixed.row_name)

    def run(self, seed: int) -> None:
        """Check one schedule."""
        draw = random.Random(seed)
        on_end: OnEnd = draw.choice(get_args(OnEnd))
        shards = draw.randint(5, 8)
        size = shards * draw.randint(1, 2)
        mixed = self.mix(draw, on_end, shards, seed=seed, size=size)
        learned: list[tuple[str, int, list[int]]] = []
        starts = [0]
        for epoch in range(2):
            whole = self.learn(mixed, seed, epoch, size, world_size=1, offset=0)
            done = 0
            while done < len(whole):
                if draw.random() < 0.3:
                    # A person changes the weights; a checkpoint has the order as JSON.
                    order = json.loads(json.dumps(mixed.order))
                    mixed = self.mix(draw, on_end, shards, seed=seed, size=size).restored(order)
                    place = {"step": starts[-1] + done, "epoch": epoch, "offset": done * size}
                    mixed = mixed.changed(**place, global_batch_size=size, tail="keep")
                    replayed = self.learn(mixed, seed, epoch, size, world_size=1, offset=0)
                    assert replayed[:done] == whole[:done], "what was learned before keeps its weights"
                    whole = replayed
                    if done == len(whole):  # with the new weights, a source has ended here
                        break
                resumed = self.learn(mixed, seed, epoch, size, world_size=draw.randint(1, 5), offset=done * size)
                kept = resumed[: draw.randint(1, len(resumed))]  # the rest is lost in a kill, and learned again
                assert kept == whole[done : done + len(kept)], "the same batches, whatever happened before"
                learned += [row for batch in kept for row in batch]
                done += len(kept)
            starts.append(starts[-1] + len(whole))
            if on_end == "stop":
                of_epoch = mixed.plan(seed, epoch, shuffle=True, tail="keep").layout
                beyond = [of_epoch.interleave.counts(shard, of_epoch.mixed + 1) for shard in range(shards)]
                assert (of_epoch.lengths < np.array(beyond).T).any(), "not earlier than a source ends"
        seen = Counter((piece, number) for name, number, _ in learned for piece in name.split("+"))
        assert set(seen.values()) == {1}, "each span of tokens once in a pass"
        assert mixed.layout is not None
        if on_end == "drop":
            complete = [2] * 3
        elif on_end == "stop":
            complete = [0] * 3
        else:
            rows = len(learned) // shards
            counts = np.array([mixed.layout.interleave.counts(shard, rows) for shard in range(shards)]).T
            complete = (counts // mixed.layout.lengths).min(axis=1).tolist()
        for (name, source), passes in zip(self.sources.items(), complete, strict=True):
            spans = [
                piece if at else f"{name}/{piece}"
                for fragment, count in enumerate(source.fragment_rows.tolist())
                for row in range(count)
                for at, piece in enumerate(source.row_name(fragment, row).split("+"))
            ]
            assert all(seen[span, number] == 1 for span in spans for number in range(passes)), "every span in a pass"

    def mix(self, draw: random.Random, on_end: OnEnd, shards: int, *, seed: int, size: int) -> MixedSource:
        """Return the sources with random weights."""
        weights = [[draw.choice([0.2, 0.5, 1, 3]) for _ in self.data] for _ in range(3)]
        later = {draw.randint(1, 20): weights[1], draw.randint(21, 40): weights[2]}
        mixture = Mixture(
            {name: (each, weight) for (name, each), weight in zip(self.data.items(), weights[0], strict=True)},
            weights_by_step={step: dict(zip(self.data, each, strict=True)) for step, each in later.items()},
            on_end=on_end,
        )
        return MixedSource(mixture, self.sources).interleaved(shards, seed=seed, global_batch_size=size, tail="keep")

    def learn(
        self, mixed: MixedSource, seed: int, epoch: int, size: int, *, world_size: int, offset: int
    ) -> list[list[tuple[str, int, list[int]]]]:
        """Return (row id, pass over its source, tokens) of the rows of each global batch from `offset` on."""
        plan = mixed.plan(seed, epoch, shuffle=True, tail="keep")
        ranks = []
        for rank in range(world_size):
            buffers: dict[int, deque[tuple[int, int, int]]] = defaultdict(deque)
            for read in plan.reads(rank=rank, world_size=world_size, offset=offset, end=plan.rows):
                assert read.order is not None
                order_seed, number, fragment = read.order
                rows = int(mixed.fragment_rows[read.fragment])
                order = row_order(rows, seed=order_seed, epoch=number, fragment=fragment, shuffle=True)
                for each in read.slices:
                    buffers[each.shard] += [
                        (read.fragment, row, number) for row in order[each.start : each.stop].tolist()
                    ]
            ranks.append(
                [
                    [buffers[key].popleft() for key, rows in batch.shard_counts for _ in range(rows)]
                    for batch in plan.batches(rank=rank, world_size=world_size, global_batch_size=size, offset=offset)
                ]
            )
        return [[self.row(*row) for own in step for row in own] for step in zip(*ranks, strict=True)]

    def row(self, fragment: int, row: int, number: int) -> tuple[str, int, list[int]]:
        """Return (row id, pass, tokens) of a row."""
        content: Rows = self.read(fragment)
        return self.name(fragment, row), number, content["tokens"][row].tolist()


@pytest.fixture
def simulation(tmp_path: Path) -> Simulation:
    """Three sources of packed documents."""
    return Simulation(tmp_path)


def test_20_schedules_of_kills_and_resizes_learn_each_span_once(simulation: Simulation) -> None:
    for seed in range(20):
        simulation.run(seed)


@pytest.mark.extended
def test_300_schedules_of_kills_and_resizes_learn_each_span_once(simulation: Simulation) -> None:
    for seed in range(300):
        simulation.run(seed)


def test_a_stream_of_packed_mixtures_resumes_at_another_world_size(simulation: Simulation) -> None:
    data = Mixture({name: (each, 1) for name, each in simulation.data.items()}, weights_by_step={3: {"web": 4}})
    whole = steps(data)
    assert steps(data, world_size=3)[:4] + steps(data, world_size=2, offset=32) == whole
