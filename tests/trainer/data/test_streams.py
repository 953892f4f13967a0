"""Any training data becomes a stream: a DataLoader an exact one, an iterable one with a weaker guarantee."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from headway.datasets.formats.jsonl import JsonLines
from headway.trainer import Callback, CheckpointConfig, ConfigError, DataError, World
from headway.trainer.data.dataloader_stream import LoaderStream
from headway.trainer.data.iterable_stream import IterableStream
from headway.trainer.data.protocols import GlobalBatch, ShardInfo
from headway.trainer.data.streams import as_stream
from headway.trainer.metrics import train_log
from tests.distributed import run_on_ranks
from tests.tiny import Losses, Rows, StopAt, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


class Numbers(Dataset[int]):
    """Row i is i; counts how often it is read."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.reads = num_rows, 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> int:
        self.reads += 1
        return row


def _shard_info(rank: int = 0, world_size: int = 1, **changes: Any) -> ShardInfo:
    settings = {"global_batch_size": None, "micro_batch_size": None, "accumulation": 1, "seed": 3, "training": True}
    return ShardInfo(rank=rank, world_size=world_size, device=torch.device("cpu"), **{**settings, **changes})


def _set_up(data: Any, rank: int = 0, world_size: int = 1, **changes: Any) -> Any:
    stream = as_stream(data)
    stream.setup(_shard_info(rank, world_size, **changes))
    return stream


def _counting(batch: GlobalBatch) -> list[int]:
    """Return the rows of a rank that count."""
    pairs = zip(batch.micro_batches, batch.num_samples, strict=True)
    return [int(row) for micro_batch, num_samples in pairs if num_samples for row in micro_batch]


def _epoch(
    loader: Callable[[], Any], world_size: int, epoch: int = 0, offset: int = 0, **changes: Any
) -> list[list[int]]:
    """Return the rows of every global batch over all ranks, in order."""
    ranks = [
        list(_set_up(loader(), rank, world_size, **changes).epoch(epoch, offset=offset)) for rank in range(world_size)
    ]
    batches = []
    for parts in zip(*ranks, strict=True):
        assert len({len(part.micro_batches) for part in parts}) == 1, "equally many forward passes on every rank"
        rows = [row for part in parts for row in _counting(part)]
        assert {part.global_num_samples for part in parts} == {len(rows)}
        assert sum(sum(part.num_samples) for part in parts) == len(rows)
        batches.append(rows)
    return batches


# ---- A DataLoader over rows ----------------------------------------------------------------------------------------


def _shuffled(drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(Numbers(103), batch_size=4, shuffle=True, drop_last=drop_last)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 16])
def test_the_same_global_batches_at_every_number_of_ranks(world_size: int, micro_batch_size: int | None) -> None:
    settings = {"global_batch_size": 8, "micro_batch_size": micro_batch_size}
    for drop_last, steps in ((False, 13), (True, 12)):
        batches = _epoch(lambda: _shuffled(drop_last), world_size, **settings)  # noqa: B023
        assert batches == _epoch(lambda: _shuffled(drop_last), 1, **settings)  # noqa: B023
        assert [len(batch) for batch in batches] == [8] * 12 + [7] * (not drop_last)
        assert len(batches) == steps
        rows = [row for batch in batches for row in batch]
        assert len(set(rows)) == len(rows) == (96 if drop_last else 103)


def test_micro_batches_are_no_larger_than_asked_for() -> None:
    for rank in range(3):
        stream = _set_up(_shuffled(), rank, 3, global_batch_size=32, micro_batch_size=4)
        sizes = [[len(each) for each in batch.micro_batches] for batch in stream.epoch(0)]
        assert all(len(each) == 3 and max(each) <= 4 for each in sizes[:-1])
        assert len(sizes) == stream.steps_in_epoch(0) == 4


def test_a_loader_that_says_nothing_brings_its_own_batch_size() -> None:
    stream = _set_up(_shuffled(), 0, 2, accumulation=3)
    first = next(iter(stream.epoch(0)))
    assert [len(each) for each in first.micro_batches] == [4, 4, 4]
    assert (first.global_num_samples, stream.steps_in_epoch(0), stream.samples_in_epoch(0)) == (24, 5, 103)


def test_orders_are_those_of_seed_and_epoch() -> None:
    orders = {
        (seed, epoch): tuple(itertools.chain(*_epoch(_shuffled, 1, epoch, seed=seed)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    torch.manual_seed(5)
    assert orders[0, 1] == tuple(itertools.chain(*_epoch(_shuffled, 3, 1, seed=0)))


@pytest.mark.parametrize("offset", [0, 8, 96, 103])
def test_any_place_in_an_epoch_is_found_without_reading_what_was_before(offset: int) -> None:
    whole = _epoch(_shuffled, 2, 1, global_batch_size=8)
    assert _epoch(_shuffled, 3, 1, offset, global_batch_size=8) == whole[offset // 8 + bool(offset % 8) :]
    data = Numbers(103)
    list(_set_up(DataLoader(data, batch_size=8, shuffle=True)).epoch(1, offset=offset))
    assert data.reads == 103 - offset


def test_the_tail_is_dropped_wherever_other_batches_have_led_to() -> None:
    stream = _set_up(_shuffled(drop_last=True), global_batch_size=10)
    assert [batch.global_num_samples for batch in stream.epoch(1, offset=48)] == [10] * 5
    assert (stream.dropped_in_epoch(1), stream.dropped_in_epoch(1, offset=48)) == (3, 5)
    assert len(stream.next_rows(1, offset=88, count=20)) == 10
    assert stream.next_rows(1, offset=98, count=20) == []


def test_what_is_not_shuffled_stays_in_order() -> None:
    rows = list(range(50))
    plain = lambda: DataLoader(Numbers(50), batch_size=8)  # noqa: E731
    assert list(itertools.chain(*_epoch(plain, 3, epoch=2))) == rows
    # An evaluation reads every row once, in order, even if training shuffles.
    shuffled = lambda: DataLoader(Numbers(50), batch_size=8, shuffle=True, drop_last=True)  # noqa: E731
    assert list(itertools.chain(*_epoch(shuffled, 3, training=False, global_batch_size=999, accumulation=4))) == rows
    assert _set_up(shuffled(), training=False, accumulation=4).steps_in_epoch(0) == 7


def test_a_distributed_sampler_is_replaced() -> None:
    """Rank 1 of 2 passes a sampler for its half; it is replaced, and the rank gets its share of all rows."""

    def loader(shuffle: bool = True) -> DataLoader[Any]:
        data = Numbers(20)
        return DataLoader(data, batch_size=5, sampler=DistributedSampler(data, 2, 1, shuffle=shuffle))

    assert as_stream(loader()).guarantee == "exact"
    assert sorted(itertools.chain(*_epoch(loader, 2))) == list(range(20))
    assert list(itertools.chain(*_epoch(lambda: loader(shuffle=False), 2))) == list(range(20))
    assert list(itertools.chain(*_epoch(loader, 2))) != list(range(20))


class Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(19, -1, -1))


class Backwards(Sampler[int]):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_rows - 1, -1, -1))

    def __len__(self) -> int:
        return self.num_rows


@pytest.mark.parametrize(
    "sampler",
    [
        Backwards(20),
        WeightedRandomSampler([1.0] * 20, 20),
        Reversed(range(20)),
        RandomSampler(range(20), replacement=True),
        RandomSampler(range(20), num_samples=7),
        SequentialSampler(range(4)),
        RandomSampler(range(4)),
        DistributedSampler(range(4), 1, 0),  # type: ignore[arg-type]
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_of_ones_own_is_kept(sampler: Any) -> None:
    stream = _set_up(DataLoader(Numbers(20), batch_size=5, sampler=sampler))
    assert stream.guarantee == "epoch"
    rows = list(itertools.chain(*(_counting(batch) for batch in stream.epoch(4))))
    assert len(rows) == len(sampler)
    if isinstance(sampler, Backwards):
        assert rows == list(range(19, -1, -1))
        assert sampler.epochs == [4]


class Hundredfold(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch * 100 for batch in super().__iter__())


class Iterates(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter([torch.tensor([7])])


@pytest.mark.parametrize(("of", "rows"), [(Hundredfold, [0, 100, 200, 300]), (Iterates, [7])])
def test_a_loader_that_iterates_in_its_own_way_does_so(of: type[DataLoader[Any]], rows: list[int]) -> None:
    stream = _set_up(of(Numbers(4), batch_size=2))
    assert stream.guarantee == "epoch"
    assert [row for batch in stream.epoch(0) for row in _counting(batch)] == rows


class Counted(DataLoader[Any]):
    """A subclass that does not change the iteration."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.count = 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 8, 8)}, "its sampler, a WeightedRandomSampler"),
        ({"sampler": SequentialSampler(range(4))}, "its SequentialSampler, which does not draw each row"),
        ({"batch_sampler": BatchSampler(range(8), 2, False)}, "its sampler, a range"),
        ({"batch_sampler": [[0, 1], [2, 3]]}, "its batch_sampler, a list"),
        ({"batch_size": None}, "batch_size=None"),
    ],
)
def test_a_loader_that_is_read_as_it_comes_says_why(options: dict[str, Any], why: str) -> None:
    loader = lambda: DataLoader(Numbers(8), **options)  # noqa: E731
    with pytest.raises(ConfigError, match=rf"global_batch_size=4 needs .*because of {why}.*gradient_accumulation"):
        _set_up(loader(), global_batch_size=4)
    for training, told in ((True, "training loader, so each row is trained on"), (False, "so each row counts")):
        with pytest.warns(UserWarning, match=f"each of the 2 ranks reads all .*{told} 2 times: .*because of {why}"):
            _set_up(loader(), 0, 2, training=training)
    # Warnings are errors: only rank 0 warns, and not if the rows are divided or there are none to divide.
    _set_up(loader(), 1, 2)
    _set_up(Counted(Numbers(8)), 0, 2, global_batch_size=4)
    _set_up(DataLoader(Short()), 0, 2)
    _set_up(DataLoader(Numbers(8), batch_sampler=BatchSampler(ByRank(Numbers(8), 2, 0), 2, False)), 0, 2)


class ByRank(DistributedSampler[int]):
    """A sampler that could have its own order."""


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_of_torch_is_read_like_the_batch_size_it_has(drop_last: bool) -> None:
    """As `batch_sampler=` it hides them from the loader's own attributes."""
    rows = Numbers(21)
    plain = _set_up(DataLoader(rows, batch_size=4, shuffle=True, drop_last=drop_last))
    given = _set_up(DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 4, drop_last)))
    assert isinstance(given, LoaderStream)
    wanted, seen = ([_counting(batch) for batch in stream.epoch(0)] for stream in (plain, given))
    assert seen == wanted
    assert sum(map(len, seen)) == (20 if drop_last else 21)


class Opened(Numbers):
    """Rows of a file that each worker process opens for itself."""

    file: int | None = None

    def __getitem__(self, row: int) -> int:
        assert self.file is not None
        return self.file + row


def _open_file(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.file = 100


def test_a_worker_finds_its_own_dataset_when_it_begins() -> None:
    stream = _set_up(DataLoader(Opened(4), batch_size=4, num_workers=1, worker_init_fn=_open_file))
    (batch,) = stream.epoch(0)
    assert batch.micro_batches[0].tolist() == [100, 101, 102, 103]
    stream.close()


def test_rows_draw_the_same_in_any_worker_process() -> None:
    def draws(num_workers: int, rank: int, world_size: int, offset: int) -> dict[int, Any]:
        loader = DataLoader(Draws(24), batch_size=4, shuffle=True, num_workers=num_workers)
        batches = list(_set_up(loader, rank, world_size, global_batch_size=8).epoch(1, offset=offset))
        rows = [row for batch in batches for micro_batch in batch.micro_batches for row in micro_batch.tolist()]
        return {int(row[0]): row for row in rows}

    reference = draws(1, 0, 1, 0)
    assert len({tuple(row[1:]) for row in reference.values()}) == 24
    for changed in (draws(2, 0, 1, 0), draws(1, 1, 2, 8)):
        assert changed == {row: reference[row] for row in changed}


class DrawsByItself(Numbers):
    """Seeds a separate generator, as torch's documentation recommends."""

    generator: np.random.Generator | None = None

    def __getitem__(self, row: int) -> float:  # type: ignore[override]
        if self.generator is None:
            info: Any = get_worker_info()
            self.generator = np.random.default_rng(info.seed)
        return self.generator.random()


def test_a_generator_of_a_datasets_own_has_a_seed_of_run_epoch_and_rank() -> None:
    def draws(rank: int, seed: int, epoch: int) -> tuple[float, ...]:
        stream = _set_up(DataLoader(DrawsByItself(8), batch_size=8, num_workers=1), rank, 2, seed=seed)
        (batch,) = stream.epoch(epoch)
        return tuple(batch.micro_batches[0].tolist())

    places = [(0, 3, 0), (1, 3, 0), (0, 4, 0), (0, 3, 1)]
    found = [draws(*place) for place in places]
    assert len(set(found)) == 4
    assert draws(*places[-1]) == found[-1]


class AtOnce(Dataset[Any]):
    """Can only read several rows at once."""

    def __len__(self) -> int:
        return 8

    def __getitems__(self, rows: list[int]) -> list[float]:
        return [row + torch.rand(()).item() for row in rows]


def test_a_dataset_that_only_reads_several_rows_at_once_does_so_in_worker_processes() -> None:
    def rows(num_workers: int, batch_size: int = 4) -> list[float]:
        stream = _set_up(DataLoader(AtOnce(), batch_size=batch_size, num_workers=num_workers))
        return [row for batch in stream.epoch(0) for row in batch.micro_batches[0].tolist()]

    assert [int(row) for row in rows(0)] == list(range(8))
    assert [int(row) for row in rows(1)] == list(range(8))
    assert rows(1) == rows(2) == rows(1, batch_size=2)


class Either(AtOnce):
    """Can read one row or several; tells which by the fraction, and may draw."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws

    def __getitem__(self, row: int) -> tuple[int, bool, float]:
        return row, False, torch.rand(()).item() if self.draws else 0.0

    def __getitems__(self, rows: list[int]) -> Any:
        return [(row, True, torch.rand(()).item() if self.draws else 0.0) for row in rows]


@pytest.mark.parametrize("draws", [False, True])
def test_worker_processes_read_several_rows_at_once_unless_these_draw_random_numbers(draws: bool) -> None:
    def rows(batch_size: int) -> list[tuple[int, bool, float]]:
        loader = DataLoader(Either(draws=draws), batch_size=batch_size, num_workers=1, collate_fn=list)
        return [row for batch in _set_up(loader).epoch(0) for row in batch.micro_batches[0]]

    several = rows(4)
    assert [at_once for _, at_once, _ in several] == [not draws] * 8
    # The random numbers of a row do not depend on those with which it is read.
    assert several == rows(2)


def _processes() -> int:
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dataset", [Numbers(16), lambda: Short()])
def test_worker_processes_end_with_their_epoch_unless_they_are_to_stay(dataset: Any, cut: bool) -> None:
    before = _processes()
    for persistent in (False, True):
        data = dataset() if callable(dataset) else dataset
        stream = _set_up(DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent))
        batches = stream.epoch(0)
        next(batches)
        assert _processes() == before + 1
        if cut:
            batches.close()
        else:
            # The loop does the same: it knows at the last batch that the epoch has ended.
            assert len(list(batches)) > 0
        assert _processes() == before + persistent
        assert len(list(stream.epoch(1))) > 1
        assert _processes() == before + persistent
        stream.close()
        assert _processes() == before


@pytest.mark.parametrize("given", ["loader", "function"])
def test_an_evaluation_in_an_epoch_leaves_the_workers_that_both_were_given_alone(given: str) -> None:
    loader = DataLoader(Short(), batch_size=2, num_workers=1, persistent_workers=True)
    data = loader if given == "loader" else lambda: loader
    training, evaluation = _set_up(data), _set_up(data, training=False)
    rows = []
    for epoch in range(2):
        for number, batch in enumerate(training.epoch(epoch)):
            rows += _counting(batch)
            if number == 2:
                assert len(list(evaluation.epoch(0))) == 5
    assert rows == [*range(10), *range(10)]
    training.close()
    evaluation.close()


def test_an_epoch_is_cut_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither time nor memory is spent on lists as long as an epoch."""
    stream = _set_up(DataLoader(Draws(2**14), batch_size=4, num_workers=1, prefetch_factor=2))
    cuts, split = [], stream._split
    monkeypatch.setattr(stream, "_split", lambda rows: cuts.append(rows) or split(rows))
    batches = stream.epoch(0)
    for number in range(1, 20):
        next(batches)
        assert number < len(cuts) <= number + 4
    batches.close()


class Draws(Dataset[torch.Tensor]):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor([row, torch.rand(()).item(), random.random(), np.random.random()], dtype=torch.float64)


# ---- Iterables -----------------------------------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Short(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def _batches(num_batches: int, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    data = Rows(num_batches * rows)
    return [
        torch.utils.data.default_collate([data[row] for row in range(start, start + rows)])
        for start in range(0, num_batches * rows, rows)
    ]


def test_iterables_say_what_they_guarantee() -> None:
    for data, guarantee in (
        ([1, 2], "epoch"),
        (lambda: iter([1]), "epoch"),
        (DataLoader(Short(), batch_size=4), "epoch"),
        (DataLoader(Numbers(8), batch_size=None), "epoch"),
        (iter([1, 2]), "none"),
        ((number for number in (1, 2)), "none"),
        (DataLoader(Numbers(8)), "exact"),
        (DataLoader(Subset(Numbers(8), [1, 2]), shuffle=True), "exact"),
    ):
        stream = as_stream(data)
        assert stream.guarantee == guarantee
        assert isinstance(stream, LoaderStream if guarantee == "exact" else IterableStream)
        assert as_stream(stream) is stream


def test_a_dataset_that_knows_its_rows_tells_other_ones_of_the_same_length() -> None:
    dataset: Any = Numbers(8)
    # As Hugging Face's sampler: a random length if unknown.
    dataset._fingerprint = "deadbeef"
    stream = as_stream(DataLoader(dataset))
    assert stream.fingerprint == "Numbers[8]"
    dataset.fingerprint = "c0ffee"
    assert stream.fingerprint == "Numbers[8] c0ffee"
    dataset.fingerprint = lambda: "of another kind"
    assert stream.fingerprint == "Numbers[8]"


def test_several_batches_of_an_iterable_make_an_update() -> None:
    stream = _set_up([[number] for number in range(5)], accumulation=2)
    assert [batch.micro_batches for batch in stream.epoch(0)] == [[[0], [1]], [[2], [3]], [[4]]]
    assert stream.steps_in_epoch(0) == 3
    evaluation = _set_up([[1], [2]], accumulation=2, training=False)
    assert [batch.micro_batches for batch in evaluation.epoch(0)] == [[[1]], [[2]]]
    assert _set_up(iter([1])).steps_in_epoch(0) is None
    assert _set_up(DataLoader(Short(), batch_size=4)).steps_in_epoch(0) is None


class Streamed(IterableDataset[int]):
    """Shuffles by `set_epoch`, as streams of Hugging Face's datasets do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist())


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_an_iterable_dataset_is_told_its_epoch(options: dict[str, Any]) -> None:
    stream = _set_up(DataLoader(Streamed(), batch_size=16, **options))
    orders = [[batch.micro_batches[0].tolist() for batch in stream.epoch(epoch)] for epoch in (0, 1, 1, 2)]
    stream.close()
    assert orders == [
        [torch.randperm(16, generator=torch.Generator().manual_seed(epoch)).tolist()] for epoch in (0, 1, 1, 2)
    ]


def test_a_sampler_inside_a_batch_sampler_is_told_its_epoch() -> None:
    sampler = ByRank(Numbers(8), num_replicas=1, rank=0, seed=3)
    stream = _set_up(DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 8, drop_last=False)))
    first, second = ([batch.micro_batches for batch in stream.epoch(epoch)] for epoch in (0, 1))
    assert isinstance(stream, IterableStream)
    assert str(first) != str(second)


class Brings(TinyTrainer):
    """Trains on given data."""

    def __init__(self, data: Any, config: TinyConfig, **options: Any) -> None:
        super().__init__(config, **{"world": ALONE, **options})
        self.data = data

    def configure_dataloaders(self) -> Any:
        return self.data


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(**{"evaluate_every": None, "checkpoint": CheckpointConfig(), **changes})


def _collated(dataset: Any) -> DataLoader[Any]:
    rows = Rows(400)
    return DataLoader(
        dataset, batch_size=4, collate_fn=lambda ids: torch.utils.data.default_collate([rows[i] for i in ids])
    )


class Uneven:
    """A batch sampler that does not know its length."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4], [5]])


@pytest.mark.parametrize(
    ("data", "config", "steps", "epochs"),
    [
        (lambda: DataLoader(Rows(8), batch_sampler=Uneven()), {"max_epochs": 2}, 6, 2),  # type: ignore[arg-type]
        (lambda: _batches(3), {"max_epochs": 2}, 6, 2),
        (lambda: lambda: iter(_batches(3)), {"max_epochs": 2}, 6, 2),
        (lambda: _collated(Short()), {"max_epochs": 2}, 6, 2),
        (lambda: _batches(3), {"max_steps": 7}, 7, 2),
        (lambda: _batches(5), {"max_epochs": 2, "gradient_accumulation_steps": 2}, 6, 2),
        (lambda: _batches(5), {"max_epochs": 2, "steps_per_epoch": 3}, 6, 2),
        (lambda: itertools.cycle(_batches(3)), {"max_steps": 7}, 7, 0),
        (lambda: itertools.cycle(_batches(3)), {"max_epochs": 2, "steps_per_epoch": 4}, 8, 2),
        (lambda: _collated(Endless()), {"max_epochs": 2, "steps_per_epoch": 4}, 8, 2),
        (lambda: iter(_batches(7)), {"max_steps": 7}, 7, 0),
        (lambda: DataLoader(Rows(20), batch_size=8), {"max_steps": 7}, 7, 2),
    ],
)
def test_steps_and_epochs_of_what_people_bring(data: Any, config: dict[str, Any], steps: int, epochs: int) -> None:
    trainer = Brings(data(), _config(**config))
    result = trainer.fit()
    assert (result.status, result.steps, result.epochs) == ("completed", steps, epochs)
    assert len(result.history) == epochs


def test_an_iterator_goes_on_where_the_last_epoch_left_it() -> None:
    trainer = Brings(iter(_batches(6)), _config(max_epochs=2, steps_per_epoch=3))
    trainer.fit()
    assert [row for _, rows in trainer.seen for row in rows] == list(range(24))


def test_an_iterable_begins_again_in_every_epoch_that_is_cut_as_a_resumed_one_would() -> None:
    trainer = Brings(_batches(6), _config(max_epochs=2, steps_per_epoch=3))
    trainer.fit()
    assert [row for _, rows in trainer.seen for row in rows] == [*range(12), *range(12)]


def test_a_new_epoch_has_a_new_order() -> None:
    trainer = Brings(DataLoader(Rows(16), batch_size=8, shuffle=True), _config(max_steps=4))
    trainer.fit()
    orders = [[row for step, rows in trainer.seen if step // 2 == epoch for row in rows] for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(16))
    assert orders[0] != orders[1]


def test_an_iterator_without_an_end_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"max_epochs=2 counts epochs.*set steps_per_epoch, or max_steps"):
        Brings(itertools.cycle(_batches(2)), _config(max_epochs=2)).fit()


@pytest.mark.parametrize("data", [lambda: _collated(Endless()), lambda: lambda: itertools.cycle(_batches(2))])
def test_what_waits_for_the_end_of_data_that_may_have_none_is_told_of(tmp_path: Path, data: Any) -> None:
    def fit(data: Any, name: str, **changes: Any) -> None:
        config = TinyConfig(**{"max_steps": 3, **changes})
        Brings((data, DataLoader(Rows(4))), config, run_dir=tmp_path / name).fit()

    with pytest.warns(UserWarning, match="the length of the training data is unknown") as warned:
        fit(data(), "epochs")
    (told,) = [str(each.message) for each in warned]
    assert 'evaluate_every="1 epochs" and checkpoint.every="1 epochs" may never be due' in told
    assert told.endswith("or set steps_per_epoch, with which each epoch restarts the data")
    # Warnings are errors: there is none if the config sets an end, or the data has one.
    fit(data(), "cut", steps_per_epoch=2)
    fit(data(), "steps", evaluate_every="2 steps", checkpoint=CheckpointConfig(every="2 steps"))  # type: ignore[arg-type]
    fit(_batches(2), "list")


def test_an_iterator_that_runs_out_is_an_error() -> None:
    trainer = Brings(iter(_batches(3)), _config(max_steps=7))
    with pytest.raises(
        DataError, match="epoch 2 has no batches: .* exhausted. An iterator can be read only once: give"
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(Numbers(0), sampler=Backwards(0)), "training data, a DataLoader, has no batches"),
        (DataLoader(Numbers(0)), "the Numbers of the training loader has no rows"),
        ([], "the training data, a list, has no batches"),
        (lambda: iter([]), "epoch 1 has no batches"),
        (DataLoader(Rows(5), batch_size=8, drop_last=True), "has 5 rows, fewer than one global batch of 8"),
    ],
)
def test_data_that_is_empty_is_an_error_and_never_a_loss_of_zero(data: Any, message: str) -> None:
    trainer = Brings(data, _config(max_epochs=1))
    with pytest.raises(DataError, match=message):
        trainer.fit()
    assert "validation/loss" not in trainer.history.latest


@pytest.mark.parametrize(
    "data", [None, 5, "data/train", b"", Path("data"), {"train": []}, Rows(8)], ids=lambda data: type(data).__name__
)
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=f"cannot read batches from a {type(data).__name__}: use a torch DataLoader"):
        Brings(data, _config(max_epochs=1)).fit()


def test_rows_without_a_stream_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a JsonLines has rows, not batches: return Stream\(JsonLines\(\.\.\.\)\)"):
        Brings(JsonLines("rows.jsonl"), _config(max_epochs=1)).fit()


def test_an_iterable_cannot_be_cut_to_size() -> None:
    with pytest.raises(
        ConfigError, match=r"global_batch_size=8 needs data that can be cut.*gradient_accumulation_steps"
    ):
        Brings(_batches(3), _config(max_epochs=1, global_batch_size=8)).fit()
    # But it can be evaluated.
    trainer = Brings((DataLoader(Rows(8), batch_size=4), _batches(3)), _config(max_epochs=1, global_batch_size=8))
    assert trainer.fit().metrics["validation/loss"] > 0


def test_a_loader_that_a_package_has_prepared_for_its_ranks_cannot_be_cut_to_size() -> None:
    from accelerate.data_loader import prepare_data_loader

    prepared = prepare_data_loader(DataLoader(Rows(8), batch_size=4), num_processes=1, process_index=0)
    with pytest.raises(
        ConfigError, match=r"return the DataLoader without accelerator\.prepare\(\), .* DataLoaderShard"
    ):
        Brings(prepared, _config(max_epochs=1, global_batch_size=8)).fit()


def test_a_resume_begins_the_epoch_of_an_iterable_again_and_says_so(tmp_path: Path) -> None:
    loader = DataLoader(Rows(20), batch_size=5, sampler=Backwards(20))
    config = _config(max_epochs=2)
    Brings(loader, config, run_dir=tmp_path, callbacks=[StopAt(6)]).fit()
    trainer = Brings(loader, config, run_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"guarantees 'epoch', not 'exact': epoch 2 restarts.*first 2 steps"):
        result = trainer.fit()
    assert [row for _, rows in trainer.seen for row in rows] == list(range(19, -1, -1))
    assert (result.steps, result.epochs) == (10, 2)
    manifest = (tmp_path / "checkpoints" / "step-00000010" / "manifest.json").read_text()
    assert '"guarantee": "epoch"' in manifest


class Dies(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_start(self, trainer: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("data", "changes"),
    [(lambda: _batches(4), {}), (lambda: lambda: iter(_batches(9)), {"steps_per_epoch": 4})],
    ids=["list", "cut"],
)
def test_a_resume_closes_an_epoch_of_an_iterable_that_was_whole(
    tmp_path: Path, data: Any, changes: dict[str, Any]
) -> None:
    config = _config(max_epochs=3, checkpoint=CheckpointConfig(every="4 steps", background=False), **changes)  # type: ignore[arg-type]
    ended: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        Brings(data(), config, run_dir=tmp_path, callbacks=[Dies(6)]).fit()
    trainer = Brings(data(), config, run_dir=tmp_path, callbacks=[lambda trainer, epoch, _: ended.append(epoch)])
    result = trainer.fit()
    assert (result.resumed_from or "").endswith("step-00000004")
    assert (result.steps, result.epochs, ended) == (12, 3, [1, 2, 3])
    assert [(row["epoch"], row["step"]) for row in result.history] == [(1, 4), (2, 8), (3, 12)]


# ---- On ranks ------------------------------------------------------------------------------------------------------


def _uneven(world: World, num_batches: list[int], config: dict[str, Any]) -> dict[str, Any]:
    trainer = Brings(_batches(num_batches[world.rank], rows=2 + world.rank), _config(**config), world=world)
    result = trainer.fit()
    assert result.status == "completed"
    return {"steps": result.steps, "epochs": result.epochs, "losses": [row["train/loss"] for row in result.history]}


def _resumed_uneven(world: World, folder: str) -> tuple[str | None, int, int]:
    """A save after the shorter rank has read everything is that of a complete epoch."""
    config = _config(max_epochs=2, checkpoint=CheckpointConfig(every="3 steps", background=False))  # type: ignore[arg-type]
    data = _batches([4, 3][world.rank])
    with pytest.raises(KeyboardInterrupt):
        Brings(data, config, world=world, run_dir=folder, callbacks=[Dies(4)]).fit()
    result = Brings(data, config, world=world, run_dir=folder).fit()
    return result.resumed_from, result.steps, result.epochs


def _uneven_on_ranks(world: World, folder: str) -> list[Any]:
    found: list[Any] = [
        _uneven(world, num_batches, config)
        for num_batches, config in (
            ([4, 3], {"max_epochs": 2}),
            ([3, 5], {"max_epochs": 2, "gradient_accumulation_steps": 2}),
            ([4, 3], {"max_steps": 3}),
            ([3, 4], {"max_steps": 6}),
        )
    ]
    with pytest.raises(DataError, match="no batches") as raised:
        Brings(lambda: iter(_batches(3) if world.rank else []), _config(max_epochs=1), world=world).fit()
    return [*found, _resumed_uneven(world, folder), str(raised.value)]


class Slow:
    """Batches that arrive late on one rank and immediately on the other."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.seconds = seconds if rank == 1 else 0.0
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for batch in list(_batches(8))[self.rank :: 2]:
            time.sleep(self.seconds)
            yield batch


def _slow_on_ranks(world: World) -> dict[str, Any]:
    train_log.SLOW_DATA_AFTER_S = 0.2
    losses = Losses()
    trainer = Brings(
        Slow(world.rank, 0.15), _config(max_epochs=1, log_every="4 steps"), world=world, callbacks=[losses]
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit()
    record = losses.records[4]
    return {
        "wait": record["data_wait"],
        "rank": record["data_wait_rank"],
        "warned": [str(each.message) for each in warned],
    }


def test_the_rank_that_waits_for_data_is_named() -> None:
    one, two = run_on_ranks(_slow_on_ranks, 2)
    assert one["rank"] == two["rank"] == 1
    assert one["wait"] == two["wait"] > 0.5
    assert two["warned"] == [], "once, on the main rank"
    assert len(one["warned"]) == 1
    assert re.search(r"rank 1 has spent \d+ % of the last 3 updates waiting for data", one["warned"][0])


def test_iterables_of_unequal_lengths_end_together(tmp_path: Path) -> None:
    """No rank waits for one without data, and all agree on steps and epochs."""
    first, second = run_on_ranks(_uneven_on_ranks, 2, str(tmp_path))
    assert first[-2:] == second[-2:]
    assert first[-2] == (f"{tmp_path}/checkpoints/step-00000003", 6, 2)
    for one, other, (steps, epochs) in zip(first, second, [(6, 2), (2, 2), (3, 1), (6, 2)], strict=False):
        assert (one["steps"], one["epochs"]) == (other["steps"], other["epochs"]) == (steps, epochs)
        assert len(one["losses"]) == epochs


def test_the_order_of_an_epoch_is_drawn_once_however_often_the_run_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda rows, **options: drawn.append(rows) or randperm(rows, **options))
    stream = _set_up(_shuffled(), global_batch_size=4)
    batches = stream.epoch(0)
    for batch in batches:
        assert stream.next_rows(0, offset=0, count=4) == batch.row_ids()[0]
        break
    for _ in range(3):
        stream.next_rows(0, offset=4, count=2)
    assert len(drawn) == 1
    assert stream.next_rows(1, offset=0, count=4) != stream.next_rows(0, offset=0, count=4)
    assert len(drawn) == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_while_reading_names_the_rows(num_workers: int) -> None:
    class Fails(Numbers):
        def __getitem__(self, row: int) -> int:
            return 1 // (row - 5)

    stream = _set_up(DataLoader(Fails(8), batch_size=4, num_workers=num_workers))
    with pytest.raises(ZeroDivisionError) as caught:
        list(stream.epoch(2))
    assert caught.value.__notes__[-1] == "raised while a DataLoader read the rows 4, 5, 6, 7 of its dataset, in epoch 2"


def test_a_dataset_of_ray_data_is_told_what_to_return() -> None:
    class Dataset:
        def iter_torch_batches(self) -> None: ...

        def __iter__(self) -> NoReturn:  # as in Ray
            raise TypeError("`Dataset` objects aren't iterable")

    with pytest.raises(ConfigError, match=r"return RayDataset\(dataset\), from headway.datasets.formats.ray_dataset"):
        as_stream(Dataset())


class Curriculum(Dataset[torch.Tensor]):
    """Rows that depend on the epoch, which the loop sets, and on a level, which the user's code sets."""

    def __init__(self) -> None:
        self.epoch, self.level = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor(100 * self.level + 10 * self.epoch)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("part", [False, True])
def test_rows_may_depend_on_the_epoch_and_on_what_the_user_sets(options: dict[str, Any], part: bool) -> None:
    """Also after a resume: what workers had been given before it must not matter."""
    dataset = Curriculum()
    stream = _set_up(DataLoader(Subset(dataset, range(8)) if part else dataset, batch_size=4, **options))
    seen = []
    for epoch in (0, 1, 2):
        dataset.level = epoch
        seen.append({int(value) for batch in stream.epoch(epoch) for each in batch.micro_batches for value in each})
    stream.close()
    assert seen == [{0}, {110}, {220}]


def test_an_evaluation_leaves_the_epoch_of_the_dataset_alone() -> None:
    dataset = Curriculum()
    dataset.set_epoch(3)
    list(_set_up(DataLoader(dataset, batch_size=4), training=False).epoch(0))
    assert dataset.epoch == 3
