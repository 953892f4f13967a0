"""Data that every worker process or every rank reads completely is found, and no other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headway.trainer import World
from headway.trainer.data.repeats import WorkerRepeats, digest
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer


class Numbers(IterableDataset[torch.Tensor]):
    """Rows of numbers; divided among the workers, or not; or all alike."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        begin = info.id if self.kind == "divided" and info is not None else 0
        for i in range(begin, 16, 2 if self.kind == "divided" else 1):
            yield torch.tensor([0.0 if self.kind == "alike" else float(i)])


def _warnings_of(kind: str, num_workers: int) -> list[str]:
    loader = DataLoader(Numbers(kind), batch_size=2, num_workers=num_workers)
    repeats = WorkerRepeats(loader, "training")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            repeats.add(batch)
    return [str(each.message) for each in caught if "worker processes" in str(each.message)]


def test_workers_that_all_read_everything_are_reported_once() -> None:
    (message,) = _warnings_of("whole", 2)
    assert message.startswith("all 2 worker processes of the training loader yield the same batches, so each row is")
    assert "get_worker_info()" in message


@pytest.mark.parametrize(("kind", "num_workers"), [("divided", 2), ("whole", 1), ("alike", 2)])
def test_workers_that_divide_the_rows_or_have_only_equal_ones_are_not_reported(kind: str, num_workers: int) -> None:
    assert _warnings_of(kind, num_workers) == []


def test_a_digest_depends_on_every_tensor_and_is_zero_without_one() -> None:
    batch = {"x": torch.ones(2, dtype=torch.bfloat16), "y": [torch.tensor(True)], "name": "cat"}
    assert digest(batch) == digest({**batch, "name": "dog"}) != 0
    assert digest(batch) != digest({**batch, "y": [torch.tensor(False)]})
    assert digest({"name": "cat"}) == digest(None) == 0


class OwnData(TinyTrainer):
    kind = "whole"

    def configure_dataloaders(self) -> Any:
        rank = self.world.rank if self.kind == "divided" else 0
        generator = torch.Generator().manual_seed(rank)
        first = {
            "x": torch.randn(4, 6, generator=generator),
            "y": torch.zeros(4, dtype=torch.int64),
            "id": torch.arange(4),
        }
        other = first if self.kind == "alike" else {**first, "x": first["x"] + 1}
        return [first, other, first]


class Divided(OwnData):
    kind = "divided"


class Alike(OwnData):
    kind = "alike"


def _warned_on_ranks(world: World) -> list[int]:
    counts = []
    for cls in (OwnData, Divided, Alike):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cls(TinyConfig(max_epochs=1), world=world).fit()
        counts.append(sum("ranks read the same batches" in str(each.message) for each in caught))
    return counts


def test_ranks_that_all_read_everything_are_reported_once() -> None:
    assert run_on_ranks(_warned_on_ranks, 2) == [[1, 0, 0], [0, 0, 0]]
