"""Data with a `state_dict` resumes where its state says, with the same rows and weights as an uninterrupted run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import LambdaType
from typing import Any

import grain
import pytest
import torch
from datasets import Dataset as HuggingFaceDataset
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from headway.trainer import CheckpointConfig, World
from headway.trainer.data.iterable_stream import state_of
from tests.distributed import run_on_ranks
from tests.tiny import Rows, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Walk:
    """Yields batches in an order of its own, which changes in every pass; its state is where it is."""

    def __init__(self, num_rows: int = 40, batch_size: int = 4) -> None:
        self.rows, self.batch_size = Rows(num_rows), batch_size
        self.passes, self.position = 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.passes)).tolist()
        while self.position < len(self.rows):
            ids = order[self.position : self.position + self.batch_size]
            self.position += self.batch_size
            yield default_collate([self.rows[row] for row in ids])
        self.passes, self.position = self.passes + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.passes, self.position = state_dict["passes"], state_dict["position"]


class Endless(Walk):
    """An iterator: it cannot be restarted, and has no end."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        ids = [(self.position + n) % len(self.rows) for n in range(self.batch_size)]
        self.position += self.batch_size
        return default_collate([self.rows[row] for row in ids])


class Stream(IterableDataset[Any]):
    """Rows of an iterable dataset with a state, in a plain DataLoader."""

    def __init__(self) -> None:
        self.rows, self.position = Rows(22), 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.rows):
            self.position += 1
            yield self.rows[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Resumable(BatchSampler):
    """A batch sampler with a state."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.position = num_rows, 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.position < self.num_rows:
            self.position += 4
            yield list(range(self.position - 4, self.position))
        self.position = 0

    def __len__(self) -> int:
        return self.num_rows // 4

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def _hugging_face() -> DataLoader[Any]:
    rows = Rows(24)
    ids = HuggingFaceDataset.from_dict({"row": range(24)}).to_iterable_dataset(num_shards=4)
    return DataLoader(ids, batch_size=4, collate_fn=lambda each: default_collate([rows[one["row"]] for one in each]))


def _grain() -> Any:
    rows = Rows(22)
    data = grain.MapDataset.source(range(22)).seed(7).shuffle().map(lambda row: rows[row])
    return data.to_iter_dataset().batch(4, batch_fn=default_collate)


def _grain_endless() -> Any:
    rows = Rows(22)
    shuffled = grain.MapDataset.source(range(22)).seed(7).shuffle().repeat()
    return iter(shuffled.map(lambda row: rows[row]).to_iter_dataset().batch(4, batch_fn=default_collate))


def _grain_loader() -> Any:
    sampler = grain.samplers.IndexSampler(22, shuffle=True, seed=3, num_epochs=1)
    rows = Rows(22)
    return grain.DataLoader(
        data_source=range(22),
        sampler=sampler,
        operations=[_Row(rows), grain.transforms.Batch(4, batch_fn=default_collate)],
    )


class _Row(grain.transforms.Map):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def map(self, element: int) -> Any:
        return self.rows[element]


SOURCES: dict[str, Callable[[], Any]] = {
    "own": lambda: Walk(),
    "iterator": lambda: Endless(),
    "dataset": lambda: DataLoader(Stream(), batch_size=4),
    "batch sampler": lambda: DataLoader(Rows(24), batch_sampler=Resumable(24)),
    "hugging face": lambda: _hugging_face(),
    "grain": lambda: _grain(),
    "grain, endless iterator": lambda: _grain_endless(),
    "grain, loader": lambda: _grain_loader(),
    "torchdata": lambda: StatefulDataLoader(Rows(22), batch_size=4, shuffle=True),
    "torchdata, workers": lambda: StatefulDataLoader(Rows(24), batch_size=4, shuffle=True, num_workers=2),
}


class Reads(TinyTrainer):
    """Trains on given data."""

    def __init__(self, data: Any, config: TinyConfig, **options: Any) -> None:
        super().__init__(config, **{"world": ALONE, **options})
        self.data = data

    def configure_dataloaders(self) -> Any:
        return self.data() if isinstance(self.data, LambdaType) else self.data


def _config(**changes: Any) -> TinyConfig:
    # Dropout shows whether resuming has drawn random numbers.
    settings = {
        "max_steps": 15,
        "evaluate_every": None,
        "dropout": 0.3,
        "checkpoint": CheckpointConfig(every="5 steps"),
    }
    return TinyConfig(**{**settings, **changes})  # type: ignore[arg-type]


def _fit(data: Any, config: TinyConfig, **options: Any) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    trainer = Reads(data, config, **options)
    result = trainer.fit()
    return trainer.seen, weights(trainer), result


# `make test` has one of each library.
EXTENDED = ("dataset", "batch sampler", "grain, endless iterator", "grain, loader", "torchdata, workers")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.extended) if each in EXTENDED else each for each in SOURCES]
)
def test_a_run_resumes_where_the_state_of_its_data_says(tmp_path: Path, name: str) -> None:
    make = SOURCES[name]
    seen, expected, result = _fit(make, _config(), run_dir=tmp_path / "whole")
    assert result.data_guarantee == "state"
    own: list[Any] = []
    # In the midst of an epoch, at its last batch and at the beginning of the next one.
    for stop in (3, 5, 6, 7, 10, 12):
        own += _fit(make, _config(), run_dir=tmp_path / "cut", callbacks=[StopAt(stop)])[0]
    rest, final, _ = _fit(make, _config(), run_dir=tmp_path / "cut")
    assert own + rest == seen
    assert all(torch.equal(final[each], value) for each, value in expected.items())


def test_a_state_at_the_end_of_an_epoch_is_for_the_next_one(tmp_path: Path) -> None:
    # Two batches an update, three batches an epoch: the end is read before the last update of the epoch is saved.
    config = _config(gradient_accumulation_steps=2, max_steps=8)

    def make() -> Any:
        return StatefulDataLoader(Rows(12), batch_size=4, shuffle=True)

    seen, expected, _ = _fit(make, config, run_dir=tmp_path / "whole")
    own: list[Any] = []
    for stop in (2, 4, 5):
        own += _fit(make, config, run_dir=tmp_path / "cut", callbacks=[StopAt(stop)])[0]
    rest, final, _ = _fit(make, config, run_dir=tmp_path / "cut")
    assert own + rest == seen
    assert all(torch.equal(final[each], value) for each, value in expected.items())


class Stuck(Walk):
    """Moves on to a batch, asks for a stop, and waits for what never comes."""

    trainer: Any = None

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.position == 16 and self.trainer is not None:
                self.trainer.request_stop("enough", status="interrupted")
                threading.Event().wait(60)
            yield batch


def test_a_save_inside_a_read_has_the_state_after_the_last_update(tmp_path: Path) -> None:
    seen, _, _ = _fit(Stuck(), _config(max_steps=8), run_dir=tmp_path / "whole")
    data = Stuck()
    data.trainer = stuck = Reads(data, _config(max_steps=8), run_dir=tmp_path / "cut")
    assert stuck.fit().steps == 3
    rest, _, result = _fit(Stuck(), _config(max_steps=8), run_dir=tmp_path / "cut")
    assert result.resumed_from.endswith("step-00000003")
    assert stuck.seen + rest == seen


def test_only_what_does_not_read_ahead_has_a_state() -> None:
    stream = Stream()
    assert state_of(DataLoader(stream, batch_size=4)) is stream
    assert state_of(DataLoader(stream, batch_size=4, num_workers=1)) is None
    assert state_of(DataLoader(Rows(8))) is None
    assert state_of([1, 2]) is None
    loader = StatefulDataLoader(Rows(8), num_workers=1)
    assert state_of(loader) is loader


def test_evaluation_data_with_a_state_is_read_from_its_beginning(tmp_path: Path) -> None:
    trainer = Reads((Walk(), StatefulDataLoader(Rows(8), batch_size=4)), _config(evaluate_every="2 steps", max_steps=6))
    assert trainer.fit().status == "completed"
    assert trainer.evaluate(StatefulDataLoader(Rows(8), batch_size=4))


def _on_ranks(world: World, folder: str, stop: int | None) -> list[Any]:
    # Each rank walks its own rows.
    data = Walk(40 + 8 * world.rank)
    callbacks = [] if stop is None else [StopAt(stop)]
    trainer = Reads(data, _config(max_steps=9), run_dir=folder, callbacks=callbacks, world=world)
    trainer.fit()
    return trainer.seen


@pytest.mark.extended
def test_each_rank_resumes_by_its_own_state_and_other_numbers_of_ranks_restart_the_epoch(tmp_path: Path) -> None:
    whole = run_on_ranks(_on_ranks, 2, str(tmp_path / "whole"), None)
    first = run_on_ranks(_on_ranks, 2, str(tmp_path / "cut"), 3)
    shutil.copytree(tmp_path / "cut", tmp_path / "alone")
    rest = run_on_ranks(_on_ranks, 2, str(tmp_path / "cut"), None)
    assert [one + other for one, other in zip(first, rest, strict=True)] == whole
    alone = Reads(Walk(40), _config(max_steps=6), run_dir=tmp_path / "alone")
    with pytest.warns(UserWarning, match=r"its state was not saved on this number of ranks: epoch 1 restarts"):
        alone.fit(accept_changes=True)
    assert alone.seen[0][1] == whole[0][0][1]
