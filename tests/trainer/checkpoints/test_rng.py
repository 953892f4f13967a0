"""Random numbers: one stream per rank, saved and restored exactly."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from headway.trainer.checkpoints.format.manifest import CheckpointWarning
from headway.trainer.checkpoints.rng import RngState, seed_everything, seed_torch


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        tuple(torch.randn(5).tolist()),
    )


def test_a_restored_state_goes_on_where_it_was() -> None:
    seed_everything(3, rank=0)
    draw()  # leaves half a pair of Gaussian numbers in Python's and NumPy's generators
    state = pickle.loads(pickle.dumps(RngState().state_dict()))
    expected = [draw() for _ in range(3)]
    seed_everything(99, rank=1)
    RngState().load_state_dict(state)
    assert [draw() for _ in range(3)] == expected


def test_a_state_holds_no_long_list_which_would_be_pickled_number_by_number() -> None:
    for saved in RngState().state_dict().values():
        assert isinstance(saved, torch.Tensor) or all(not isinstance(each, (list, tuple)) for each in saved)


def test_saving_draws_nothing() -> None:
    seed_everything(3, rank=0)
    expected = draw()
    seed_everything(3, rank=0)
    RngState().state_dict()
    assert draw() == expected


def test_every_rank_and_seed_has_a_stream_of_its_own_and_zero_is_a_seed() -> None:
    def stream(seed: int, rank: Any) -> tuple[Any, ...]:
        seed_everything(seed, rank=rank)
        return draw()

    ranks = [0, 1, 2, 63, "common"]
    streams = [stream(seed, rank) for seed in (0, 1, 2**63 - 1) for rank in ranks]
    values = [value for each in streams for value in each]
    assert len(set(values)) == len(values)
    assert streams == [stream(seed, rank) for seed in (0, 1, 2**63 - 1) for rank in ranks]


def test_a_missing_generator_is_one_warning_and_the_others_are_restored() -> None:
    seed_everything(5, rank=0)
    state = RngState().state_dict()
    expected = draw()
    del state["python"], state["numpy"]
    seed_everything(6, rank=0)
    with pytest.warns(CheckpointWarning, match="python, numpy") as caught:
        RngState().load_state_dict(state)
    assert len(caught) == 1
    assert draw()[-1] == expected[-1]


def test_seeding_torch_gives_what_its_own_function_gives() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    seed_torch(7)
    assert torch.equal(torch.rand(4), expected)
