"""Real Parquet files through both engines: the rows of each rank, their order, and errors."""

from __future__ import annotations

import inspect
import itertools
import pickle
import re
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch

from headway.datasets import engines
from headway.datasets.batching import memory_limits
from headway.datasets.engines import _tasks
from headway.datasets.errors import DataError
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.mixture import Mixture
from headway.datasets.show import read_row
from headway.datasets.sources import Parquet
from headway.datasets.stream import ParquetStream, Stream
from headway.trainer import NonFiniteError, Trainer, TrainerConfig
from headway.trainer.data.protocols import HasRowIds, ShardInfo, SupportsPeek, is_stream
from headway.trainer.distributed.world import World

from .conftest import RAY_IF_EXTENDED, shard_info, write


def opened(
    path: Any, *, rank: int = 0, world_size: int = 1, context: dict[str, Any] | None = None, **options: Any
) -> ParquetStream:
    stream = ParquetStream(path, **{"engine": "threads", **options})
    stream.setup(shard_info(rank, world_size, **(context or {})))
    return stream


def ids(batch: Any) -> list[int]:
    """Return the rows that count."""
    return [
        row
        for columns, samples in zip(batch.micro_batches, batch.num_samples, strict=True)
        for row in columns["id"][:samples].tolist()
    ]


def steps(path: Any, *, world_size: int = 1, epoch: int = 0, offset: int = 0, **options: Any) -> list[list[int]]:
    """Return the rows of each global batch, by rank."""
    ranks = []
    for rank in range(world_size):
        stream = opened(path, rank=rank, world_size=world_size, **options)
        ranks.append(list(stream.epoch(epoch, offset=offset)))
        stream.close()
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len({len(batch.micro_batches) for batch in step}) == 1 for step in zip(*ranks, strict=True))
    return [[row for batch in step for row in ids(batch)] for step in zip(*ranks, strict=True)]


def test_it_keeps_the_trainers_contract(folder: Path) -> None:
    assert is_stream(ParquetStream(folder))
    assert isinstance(opened(folder), SupportsPeek)
    assert {"rank", "world_size", "global_batch_size", "micro_batch_size", "seed", "device", "training"} <= set(
        inspect.signature(ShardInfo).parameters
    )


def test_batches_are_tensors_of_the_rows(folder: Path, engine: str) -> None:
    stream = opened(folder, engine=engine)
    batch = next(iter(stream.epoch(0)))
    (columns,) = batch.micro_batches
    assert columns["tokens"].dtype == torch.int32
    assert columns["tokens"].shape == (8, 4)
    assert torch.equal(columns["tokens"], columns["id"][:, None].int() + torch.arange(4, dtype=torch.int32))
    assert (batch.num_samples, batch.global_num_samples) == ((8,), 8)
    stream.close()


def test_a_batch_names_its_rows(folder: Path) -> None:
    for rank, context in ((0, {}), (2, {"micro_batch_size": 1}), (3, {"global_batch_size": 4})):
        stream = opened(folder, rank=rank, world_size=4, tail="keep", shards=4, context=context)
        for batch in stream.epoch(1, offset=20):
            assert isinstance(batch, HasRowIds)
            named = [[read_row(folder, str(row))["id"] for row in rows] for rows in batch.row_ids()]
            assert [len(rows) for rows in named] == list(batch.num_samples)
            assert [row for rows in named for row in rows] == ids(batch)
        stream.close()


def test_an_error_says_which_rows_of_which_file(tmp_path: Path) -> None:
    x = pa.array([float("nan") if i == 21 else 1.0 for i in range(32)])
    path = write(tmp_path / "numbers.parquet", range(32), x=x)

    class Line(Trainer[TrainerConfig]):
        def configure_models(self) -> None:
            self.model = torch.nn.Linear(1, 1)

        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def configure_dataloaders(self) -> Any:
            return ParquetStream(path)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch["x"].float()[:, None]).square().mean()

    config = TrainerConfig(max_epochs=1, global_batch_size=8, micro_batch_size=2)
    with pytest.raises(NonFiniteError, match=r"is not finite, rows numbers.parquet\[\d\]:\d+, numbers") as raised:
        Line(config, world=World.single("cpu")).fit()
    rows = re.findall(r"numbers\.parquet\[\d+\]:\d+", str(raised.value))
    assert len(rows) == 2
    assert 21 in [read_row(path, row)["id"] for row in rows]


class Watched(Trainer[TrainerConfig]):
    """Trains on a stream, and evaluates on the same one meanwhile."""

    def configure_models(self) -> None:
        self.model = torch.nn.Linear(4, 1)
        self.seen: dict[str, list[int]] = {"training": [], "validation": []}

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)

    def configure_dataloaders(self) -> Any:
        self.stream = ParquetStream(self.path, engine="threads")
        return (self.stream, self.stream) if self.twice else self.stream

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step(batch, batch_idx, "training")

    def validation_step(self, batch: Any, batch_idx: int, kind: str = "validation") -> Any:
        self.seen[kind] += batch["id"].tolist()
        return self.model(batch["tokens"].float()).square().mean()

    def on_step_end(self) -> None:
        if not self.twice and self.progress.step == 3:
            self.evaluate(self.stream)


@pytest.mark.parametrize("twice", [False, True])
def test_one_stream_may_train_and_evaluate_at_a_time(folder: Path, twice: bool) -> None:
    trainer = Watched(TrainerConfig(max_epochs=1, global_batch_size=8), world=World.single("cpu"))
    trainer.path, trainer.twice = folder, twice
    trainer.fit()
    assert sorted(trainer.seen["validation"]) == list(range(103))
    assert [trainer.seen["training"][i : i + 8] for i in range(0, 96, 8)] == steps(folder)


def test_who_reads_from_a_stream_that_is_opened_again_is_told(folder: Path) -> None:
    stream = opened(folder)
    batches = stream.epoch(0)
    next(batches)
    stream.setup(shard_info(0, 1, training=False))
    with pytest.raises(DataError, match="opened again, while an iterator"):
        list(batches)


@pytest.mark.parametrize(("tail", "count"), [("drop", 12), ("keep", 13)])
def test_103_rows_4_ranks_batches_of_8(folder: Path, engine: str, tail: str, count: int) -> None:
    batches = steps(folder, world_size=4, engine=engine, tail=tail)
    assert [len(batch) for batch in batches] == [8] * 12 + [7] * (count - 12)
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows)
    assert opened(folder, tail=tail).steps_in_epoch(0) == count
    assert opened(folder, tail=tail).samples_in_epoch(0) == len(rows)


def test_dropped_rows_are_reported_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="headway.datasets")
    opened(folder, rank=0, world_size=2)
    opened(folder, rank=1, world_size=2)
    assert caplog.messages == ["103 rows make 12 batches of 8; 7 rows are dropped, different ones each epoch"]


def test_interrupted_twice_every_row_is_seen_once(folder: Path, engine: str) -> None:
    whole = steps(folder, engine=engine, tail="keep")
    seen = []
    for begin, end in ((0, 3), (3, 7), (7, None)):
        stream = opened(folder, engine=engine, tail="keep")
        for batch in stream.epoch(0, offset=begin * 8):
            seen.append(ids(batch))
            if len(seen) == end:
                break
        stream.close()
    assert seen == whole
    assert sorted(row for batch in seen for row in batch) == list(range(103))


def test_4_ranks_then_2_then_3_see_the_rest_once_in_the_same_batches(folder: Path) -> None:
    whole = steps(folder, tail="keep")
    resized = [
        *steps(folder, world_size=4, tail="keep")[:5],
        *steps(folder, world_size=2, tail="keep", offset=40)[:4],
        *steps(folder, world_size=3, tail="keep", offset=72),
    ]
    assert resized == whole


def test_another_global_batch_size_in_the_middle_of_an_epoch(folder: Path) -> None:
    before = steps(folder, tail="keep", shards=8)[:5]
    after = steps(folder, tail="keep", shards=8, offset=40, context={"global_batch_size": 16})
    assert sorted(row for batch in before + after for row in batch) == list(range(103))
    assert [len(batch) for batch in after] == [16, 16, 16, 15]


def test_epochs_differ_and_repeat_on_any_world_size(folder: Path) -> None:
    first, second = steps(folder), steps(folder, epoch=1)
    assert first != second
    assert steps(folder, world_size=3, epoch=1) == second
    assert steps(folder, context={"seed": 1}) != first


@pytest.mark.ray
@pytest.mark.parametrize("reader_cpus", [0, 1])
def test_engines_agree_to_the_bit(folder: Path, ray_session: None, reader_cpus: float) -> None:
    """Without CPUs of their own, the first rows are read by threads of this process, and the others by Ray Data."""
    stream = opened(folder, engine="ray", tail="keep", reader_cpus=reader_cpus)
    on_ray = [[ids(batch) for batch in stream.epoch(epoch)] for epoch in range(6)]
    stream.close()
    assert on_ray == [steps(folder, engine="threads", tail="keep", epoch=epoch) for epoch in range(6)]


@pytest.mark.ray
def test_auto_takes_ray_where_it_is_up(folder: Path, ray_session: None) -> None:
    stream = opened(folder, engine="auto")
    batches = stream.epoch(0)
    next(batches)
    assert "headway-ray-data" in {thread.name for thread in threading.enumerate()}
    stream.close()


def test_evaluation_of_10_rows_on_4_ranks_counts_each_once(tmp_path: Path, engine: str) -> None:
    path = write(tmp_path / "ten.parquet", range(10))
    for micro_batch_size in (None, 1, 2, 3):
        context = {"training": False, "global_batch_size": 32, "micro_batch_size": micro_batch_size}
        assert sorted(steps(path, world_size=4, context=context, engine=engine)[0]) == list(range(10))


def test_a_rank_without_rows_repeats_one_that_does_not_count(tmp_path: Path) -> None:
    path = write(tmp_path / "three.parquet", range(3))
    for rank in range(8):
        stream = opened(path, rank=rank, world_size=8, context={"training": False})
        (batch,) = stream.epoch(0)
        (columns,) = batch.micro_batches
        assert columns["tokens"].shape == (1, 4)
        assert batch.global_num_samples == 3
    assert sorted(steps(path, world_size=8, context={"training": False})[0]) == [0, 1, 2]


def test_evaluation_never_shuffles_and_can_be_repeated(folder: Path) -> None:
    stream = opened(folder, context={"training": False}, shuffle=True, tail="drop")
    runs = [[row for batch in stream.epoch(epoch) for row in ids(batch)] for epoch in (0, 0, 1)]
    assert runs[0] == runs[1] == runs[2]
    assert sorted(runs[0]) == list(range(103))
    assert (
        opened(folder, context={"training": False, "global_batch_size": None, "micro_batch_size": 4}).steps_in_epoch(0)
        == 26
    )


def test_micro_batches_cut_a_rank_s_rows(folder: Path) -> None:
    stream = opened(folder, context={"micro_batch_size": 3})
    batch = next(iter(stream.epoch(0)))
    assert batch.num_samples == (2, 3, 3)
    assert [len(columns["id"]) for columns in batch.micro_batches] == [2, 3, 3]
    stream.close()


def test_epochs_follow_one_another_without_a_gap(folder: Path, engine: str) -> None:
    """At the end of an epoch, the first batches of the next one are prepared before they are requested."""
    stream = opened(folder, engine=engine, context={"global_batch_size": 32})
    epochs = [[ids(batch) for batch in stream.epoch(epoch)] for epoch in range(3)]
    assert epochs == [steps(folder, epoch=epoch, context={"global_batch_size": 32}) for epoch in range(3)]
    prefetcher = stream._prefetcher
    assert prefetcher is not None
    deadline = time.monotonic() + 120
    while prefetcher._ready.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not prefetcher._ready.empty()
    assert [ids(batch) for batch in stream.epoch(7)] == steps(folder, epoch=7, context={"global_batch_size": 32})
    stream.close()


def test_closing_ends_every_thread(folder: Path, engine: str) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("headway")}
    stream = opened(folder, engine=engine)
    batches = stream.epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert {thread for thread in threading.enumerate() if thread.name.startswith("headway")} == before
    next(stream.epoch(0, offset=16))
    stream.close()
    stream.close()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("headway")} == before


def test_a_task_decodes_no_more_where_a_resumed_epoch_wants_little_of_each_row_group(tmp_path: Path) -> None:
    """Otherwise the first batch would wait for one process that reads everything."""
    write(tmp_path / "many.parquet", range(50_000), group=50)
    stream = opened(tmp_path / "many.parquet", context={"global_batch_size": 32})
    spec = stream._opened
    assert spec is not None
    jobs = [spec.job(each) for each in spec.reads(0, 49_504)]
    assert len(jobs) > 16
    assert sum(job.rows for job in jobs) < sum(job.fragment.num_rows for job in jobs) / 2
    tasks = list(_tasks([jobs], 200))
    assert [job for task in tasks for job in task] == jobs
    assert max(sum(job.fragment.num_rows for job in task) for task in tasks) == 200


@pytest.mark.ray
def test_closing_leaves_no_execution_in_ray_data(
    folder: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing cancels no task: one that ends while it is cancelled may abort the process."""
    import ray

    def slowly(rows: Any) -> Any:
        time.sleep(0.03)
        return rows

    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", lambda task, **_: cancelled.append(task))
    stream = opened(folder, engine="ray", transforms=[slowly])
    next(stream.epoch(0))
    stream.close()
    assert not cancelled
    deadline = time.monotonic() + 120
    while (running := _executors()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running


@pytest.mark.ray
def test_no_more_tasks_run_at_once_than_there_are_readers(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one execution of Ray Data follows another, too: for more tasks, Ray would start more processes."""
    monkeypatch.setattr(engines, "_TASKS_PER_READER", 2)
    monkeypatch.setattr(engines, "_TASK_BYTES", 1)
    write(tmp_path / "data" / "rows.parquet", range(400), group=10)
    times = tmp_path / "times"
    times.mkdir()

    def slowly(rows: Any) -> Any:
        begin = time.monotonic()
        time.sleep(0.1)
        (times / f"{begin}").write_text(f"{time.monotonic()}")
        return rows

    stream = opened(tmp_path / "data", engine="ray", transforms=[slowly], readers=2)
    assert len(list(stream.epoch(0))) == 400 // 8
    stream.close()
    changes = [change for each in times.iterdir() for change in ((float(each.name), 1), (float(each.read_text()), -1))]
    running = itertools.accumulate(change for _, change in sorted(changes))
    assert len(changes) >= 2 * 40
    assert max(running) == 2


def _executors() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor-")]


def test_resuming_reads_nothing_of_what_was_consumed(tmp_path: Path) -> None:
    """At 99 % of 50,000 rows, at most as many row groups are read before the first batch as at the start."""
    write(tmp_path / "many.parquet", range(50_000), group=50)
    first_reads = []
    for offset in (0, 49_504):
        stream = opened(tmp_path / "many.parquet", context={"global_batch_size": 32})
        assert stream._opened is not None
        reads = list(stream._opened.reads(0, offset))
        first_reads.append(sum(read.slices[0].first_need < offset + 32 for read in reads))
        assert len(ids(next(stream.epoch(0, offset=offset)))) == 32
        stream.close()
    assert first_reads[1] <= first_reads[0]


@RAY_IF_EXTENDED
def test_rows_that_would_take_too_much_memory_are_read_again(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups of 500 rows, of which a rank holds 8 x 500, or 8 x 32."""
    write(tmp_path / "large.parquet", range(5000), group=500)
    whole = steps(tmp_path, world_size=2)
    monkeypatch.setattr(memory_limits, "HELD_BYTES", 1000)
    assert steps(tmp_path, engine=engine)[:300] + steps(tmp_path, offset=2400, world_size=2) == whole
    stream = opened(tmp_path)
    assert stream._opened is not None
    assert max(each.stop - each.start for read in stream._opened.reads(0, 0) for each in read.slices) == 32


def test_transforms_run_in_order_and_keep_the_rows(folder: Path, engine: str) -> None:
    def shift(rows: dict[str, np.ndarray]) -> dict[str, Any]:
        return {**rows, "label": rows["tokens"][:, 1:] + 1}

    def image(rows: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"id": rows["id"], "image": np.zeros((len(rows["id"]), 3, 2, 2), np.float32), "label": rows["label"] * 2}

    stream = opened(folder, engine=engine, transforms=[shift, image])
    columns = next(iter(stream.epoch(0))).micro_batches[0]
    assert columns["image"].shape == (8, 3, 2, 2)
    assert torch.equal(columns["label"][:, 0], (columns["id"].int() + 2) * 2)
    assert set(columns) == {"id", "image", "label"}
    stream.close()


def test_a_transform_that_changes_the_number_of_rows_is_refused(folder: Path, engine: str) -> None:
    stream = opened(folder, engine=engine, transforms=[_half])
    with pytest.raises(DataError, match="the transform _half got .* rows and returned .* one row in, one row out"):
        next(iter(stream.epoch(0)))
    stream.close()


def _half(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: column[::2] for name, column in rows.items()}


def test_an_error_in_a_transform_comes_out_as_it_was_raised(folder: Path, engine: str) -> None:
    stream = opened(folder, engine=engine, transforms=[_broken])
    with pytest.raises(ZeroDivisionError, match="in the user's code") as raised:
        next(iter(stream.epoch(0)))
    stream.close()
    notes = "".join(raised.value.__notes__)
    assert re.search(rf"raised by the transform _broken for row \d+ of row group \d+ of {folder}/.*parquet", notes)


def _broken(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    raise ZeroDivisionError("in the user's code")


@RAY_IF_EXTENDED
def test_text_ragged_lists_and_objects_stay_lists(tmp_path: Path, engine: str) -> None:
    """In row groups of one row, with different types; forwarded by a transform that works in place."""
    ragged = [list(range(i % 3)) for i in range(40)]
    counts = [[("k", i)] if i % 2 else None for i in range(40)]
    turns = [{"role": "u", "tool": "t" if i % 4 else None, "tags": ["x"] * (i % 2)} for i in range(40)]
    columns = {
        "text": [f"row {i}" for i in range(40)],
        "ragged": pa.array(ragged, pa.list_(pa.int16())),
        "counts": pa.array(counts, pa.map_(pa.string(), pa.uint64())),
        "turns": turns,
    }
    path = write(tmp_path / "mixed.parquet", range(40), group=1, **columns)

    def negate(rows: dict[str, Any]) -> dict[str, Any]:
        rows["tokens"] *= -1
        return rows

    stream = opened(path, engine=engine, transforms=[negate])
    seen = 0
    for batch in stream.epoch(0):
        columns = batch.micro_batches[0]
        rows = columns["id"].tolist()
        seen += len(rows)
        assert columns["text"] == [f"row {i}" for i in rows]
        assert [(each.dtype, each.tolist()) for each in columns["ragged"]] == [(torch.int16, ragged[i]) for i in rows]
        assert columns["counts"] == [counts[i] for i in rows]
        assert columns["turns"] == [turns[i] for i in rows]
        assert columns["tokens"][:, 0].tolist() == [-i for i in rows]
    assert seen == 40
    stream.close()


def test_lists_of_one_length_become_a_tensor(tmp_path: Path, engine: str) -> None:
    path = write(tmp_path / "lists.parquet", range(40), plain=pa.array([[i, i] for i in range(40)]))
    columns = next(iter(opened(path, engine=engine).epoch(0))).micro_batches[0]
    assert torch.equal(columns["plain"], columns["id"][:, None].expand(8, 2))


def test_a_relative_path_means_the_same_in_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    stream = pickle.loads(pickle.dumps(ParquetStream("data", engine="threads")))
    monkeypatch.chdir("/")
    stream.setup(shard_info())
    assert len(list(stream.epoch(0))) == 12
    stream.close()


def test_the_fingerprint_names_the_data_and_the_order(folder: Path) -> None:
    fingerprint = opened(folder).fingerprint
    assert opened(folder, rank=1, world_size=2).fingerprint == fingerprint
    assert opened(folder, shuffle=False).fingerprint != fingerprint
    assert opened(folder, shards=4).fingerprint == fingerprint.replace("8 shards", "4 shards")
    doubled = opened(folder, context={"global_batch_size": 16})
    assert "had 8 logical shards and now have 16" in str(doubled.explain_change(fingerprint))
    assert str(doubled.explain_change(fingerprint)).endswith("set shards=8 on the ParquetStream")
    odd = opened(folder, context={"global_batch_size": 9})
    assert "shards=8 on the ParquetStream, and global_batch_size (now 9) to a multiple" in str(
        odd.explain_change(fingerprint)
    )
    unshuffled = opened(folder, shuffle=False)
    assert "shuffle was True: set shuffle=True on the ParquetStream" in str(unshuffled.explain_change(fingerprint))
    assert doubled.explain_change("of another kind of data") is None
    write(folder / "b.parquet", range(41, 81))
    changed = opened(folder)
    assert changed.fingerprint != fingerprint
    assert changed.explain_change(fingerprint) is None


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        ({}, {"global_batch_size": None}, "config.global_batch_size is not set"),
        ({}, {"global_batch_size": 128}, "global_batch_size 128 exceeds the 103 rows.*smaller global_batch_size"),
        ({"shards": 3}, {}, "global_batch_size 8 is not a multiple of the 3 logical shards.*Nearest: 6 or 9"),
        ({"columns": ["token"]}, {}, "no column 'token'; did you mean 'tokens'"),
        ({}, {"world_size": 9}, "9 ranks cannot share 8 logical shards"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_row_is_read(
    folder: Path, options: dict[str, Any], context: dict[str, Any], message: str
) -> None:
    stream = ParquetStream(folder, engine="threads", **options)
    with pytest.raises(DataError, match=message):
        stream.setup(shard_info(**context))


@pytest.mark.parametrize("options", [{"tail": "pad"}, {"engine": "spark"}, {"readers": 0}])
def test_options_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(options))):
        ParquetStream("data", **options)


def test_data_rewritten_under_a_run_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(64))
    stream = opened(path)
    write(path, range(60))
    with pytest.raises(DataError, match="was rewritten|cannot read row group"):
        list(stream.epoch(0))
    stream.close()


def test_nulls_in_numbers_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(16), score=pa.array([1.0, None] * 8))
    stream = opened(path)
    with pytest.raises(DataError, match=r"row group 0 of .*a\.parquet: column 'score' has 8 nulls among 16"):
        next(iter(stream.epoch(0)))
    stream.close()


def test_an_offset_outside_the_epoch_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="offset must be from 0 to 103.*got 104"):
        next(iter(opened(folder).epoch(0, offset=104)))
    assert list(opened(folder).epoch(0, offset=96)) == []


def test_an_epoch_that_is_read_twice_is_the_same(folder: Path) -> None:
    stream = opened(folder)
    assert [ids(batch) for batch in stream.epoch(2)] == [ids(batch) for batch in stream.epoch(2)]
    stream.close()


def test_row_groups_that_are_too_large_for_the_shuffle_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(data: Any, rank: int = 0, world_size: int = 1, **options: Any) -> list[str]:
        caplog.clear()
        stream = Stream(data, engine="threads", **options)
        stream.setup(shard_info(rank, world_size))
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    write(folder / "large.parquet", range(103, 203), group=100)
    data = Parquet(folder)
    row_bytes = data.open().row_bytes
    # Seven rows of a row group (of at most 100) for each of eight logical shards, because it is read 16 times at most.
    monkeypatch.setattr(memory_limits, "HELD_BYTES", 8 * 7 * row_bytes)
    assert warnings(data) == []
    monkeypatch.setattr(memory_limits, "HELD_BYTES", 8 * 7 * row_bytes - 1)
    (line,) = warnings(data)
    assert line.startswith(f"row group 0 of {folder}/large.parquet has 100 rows, 0 MB, which is too large")
    assert "holds about 1/16 of such a piece for each of its 8 logical shards," in line
    assert line.endswith("write row groups of at most 96 rows (row_group_size) or set shards to at most 7 (now 8)")
    assert "\n" not in line
    assert warnings(data, rank=1, world_size=2) == [], "by one rank"
    assert warnings(data, world_size=8) == [], "a rank with one shard holds one row group"
    mixture = Mixture({"one": (data, 1), "two": (Parquet(folder / "a.parquet"), 1)})
    assert "each of its 8 logical shards and each of 2 sources" in warnings(mixture)[0]
    remote = f"memory://{folder}"
    fsspec.filesystem("memory").put(str(folder), remote, recursive=True)
    held = 100 + 5 * 16 + 2 * 8  # the eight largest of nine row groups, which are fetched once
    monkeypatch.setattr(memory_limits, "HELD_BYTES", held * row_bytes)
    assert warnings(Parquet(remote)) == []
    monkeypatch.setattr(memory_limits, "HELD_BYTES", held * row_bytes - 1)
    (line,) = warnings(Parquet(remote))
    assert "holds about one such piece for each of its 8 logical shards," in line
    assert line.endswith("write row groups of at most 24 rows (row_group_size) or set shards to at most 7 (now 8)")
    (tmp := folder.parent / "lines.jsonl").write_text("".join(f'{{"id": {row}}}\n' for row in range(100)))
    monkeypatch.setattr(memory_limits, "HELD_BYTES", 10)
    (line,) = warnings(JsonLines(tmp), world_size=2)
    assert line.startswith("what is read at once from lines.jsonl:1 on has 100 rows")
    assert line.endswith("To take less memory, use more workers")


@pytest.mark.parametrize(
    "data",
    ["data/train", Path("data"), [1], torch.utils.data.TensorDataset(), JsonLines],
    ids=["text", "path", "list", "torch dataset", "class"],
)
def test_what_is_no_format_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match=rf"data must be data of a format, such as .*, got a {type(data).__name__}"):
        Stream(data)


def test_a_dataset_of_ray_data_in_a_stream_is_told_what_to_return() -> None:
    class Dataset:
        def iter_torch_batches(self) -> None: ...

    with pytest.raises(DataError, match=r"got a Dataset of Ray Data: in place of the Stream, return RayDataset"):
        Stream(Dataset())  # type: ignore[arg-type]
