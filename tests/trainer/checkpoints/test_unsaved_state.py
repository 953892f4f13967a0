"""State that a step keeps on the trainer for the next one: warned of, unless a callback saves it, of each rank."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from headway.trainer import Callback, CheckpointConfig, Duration, ParallelConfig, StepError, World
from tests.distributed import run_on_ranks
from tests.tiny import Rows, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Recurrent(TinyTrainer):
    """Truncated backpropagation through time: the hidden state goes from batch to batch."""

    def configure_models(self) -> None:
        self.cell, self.hidden = nn.RNNCell(6, 5), torch.zeros(4, 5)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.cell.parameters(), lr=0.1)

    def configure_dataloaders(self) -> Any:
        return DataLoader(torch.randn(96, 6, generator=torch.Generator().manual_seed(1)), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.cell(batch, self.hidden)
        self.hidden = hidden.detach()
        return (hidden - 1).square().mean()


class Centers(TinyTrainer):
    """Changes a tensor in place, and a number."""

    def configure_models(self) -> None:
        super().configure_models()
        self.center, self.factor, self.mean = torch.zeros(3), torch.ones(3), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logits = self.model(batch["x"]) * self.factor - self.center
        self.center.mul_(0.9).add_(self.logits.detach().mean(0), alpha=0.1)
        self.mean += self.logits.mean().item()
        return self.logits.square().mean() + self.logits.mean()


class KeepsHidden(Callback):
    """Saves the hidden states of all ranks, one after the other."""

    trainer: Recurrent

    def on_setup_start(self, trainer: Any) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.trainer.world.all_gather(self.trainer.hidden.flatten())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        world = self.trainer.world
        self.trainer.hidden = state_dict["hidden"].view(world.size, 4, 5)[world.rank].clone()


def test_state_on_the_trainer_is_warned_of(tmp_path: Path) -> None:
    for cls, names in ((Recurrent, "self.hidden"), (Centers, "self.center, self.mean")):
        with pytest.warns(UserWarning, match=f"training_step hands {names} on to the next one, but no checkpoint has"):
            cls(TinyConfig(max_steps=8), run_dir=str(tmp_path / cls.__name__), world=ALONE).fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TinyTrainer(TinyConfig(max_steps=8), run_dir=str(tmp_path / "tiny"), world=ALONE).fit()
        Recurrent(TinyConfig(max_steps=8), world=ALONE).fit()


def _resume(world: World, folder: str) -> list[dict[str, torch.Tensor]]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run, stops in (("whole", []), ("resumed", [StopAt(3)]), ("resumed", [])):
            callbacks = [KeepsHidden(), *stops]
            trainer = Recurrent(TinyConfig(max_steps=8), run_dir=f"{folder}/{run}", world=world, callbacks=callbacks)
            trainer.fit()
            found.append(weights(trainer))
    return found


def test_a_callback_saves_the_state_of_each_rank(tmp_path: Path) -> None:
    for whole, _, resumed in run_on_ranks(_resume, 2, str(tmp_path)):
        torch.testing.assert_close(resumed, whole, atol=0, rtol=0)


class DrawsItself(Rows):
    """Augments rows by a generator that it keeps."""

    def __init__(self, generator: Any) -> None:
        super().__init__(64)
        self.generator = generator

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        draw = torch.rand((), generator=self.generator) if isinstance(self.generator, torch.Generator) else None
        return {**super().__getitem__(row), "z": torch.tensor(self.generator.random()) if draw is None else draw}


class SeedsEachRow(DrawsItself):
    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        self.generator.manual_seed(row)
        return super().__getitem__(row)


class KeepsGenerator(Rows):
    """Has drawn its rows before."""

    def __init__(self) -> None:
        super().__init__(64)
        self.generator = np.random.default_rng(0)


class Augments(TinyTrainer):
    dataset: Any

    def configure_dataloaders(self) -> Any:
        return DataLoader(self.dataset, batch_size=8)


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0), torch.Generator()], ids=type)
def test_a_generator_that_a_dataset_keeps_is_warned_of_once(generator: Any, tmp_path: Path) -> None:
    Augments.dataset = Subset(DrawsItself(generator), range(48))
    (text,) = _warnings_of(Augments, tmp_path, "so that a resumed run draws")
    assert text.startswith("rows draw random numbers from DrawsItself.generator, but no checkpoint has a generator")


@pytest.mark.parametrize("dataset", [SeedsEachRow(torch.Generator()), KeepsGenerator()], ids=type)
def test_a_generator_that_rows_seed_or_do_not_use_needs_no_checkpoint(dataset: Any, tmp_path: Path) -> None:
    Augments.dataset = dataset
    assert not _warnings_of(Augments, tmp_path, "draws")


class CopiesLate(TinyTrainer):
    """A target network that is made and replaced after `configure_models`."""

    def on_fit_start(self) -> None:
        self.target = copy.deepcopy(self.model)

    def on_step_end(self) -> None:
        self.follow()

    def follow(self) -> None:
        self.target.load_state_dict(self.model.state_dict())


class ReplacesCopy(CopiesLate):
    def follow(self) -> None:
        self.target = copy.deepcopy(self.model)


class KeepsCopy(CopiesLate):
    def follow(self) -> None: ...


def _warnings_of(
    trainer_class: type[TinyTrainer], tmp_path: Path, said: str = "so that a resumed run begins with"
) -> list[str]:
    config = TinyConfig(max_steps=6, checkpoint=CheckpointConfig(every=Duration(2, "steps")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_class(config, world=ALONE, run_dir=tmp_path / "run").fit()
    return [text for each in caught if said in (text := str(each.message))]


@pytest.mark.parametrize("trainer_class", [CopiesLate, ReplacesCopy])
def test_a_model_made_late_that_changes_is_warned_of_once(trainer_class: type[TinyTrainer], tmp_path: Path) -> None:
    (text,) = _warnings_of(trainer_class, tmp_path)
    assert text.startswith("self.target is a model that changes during the run")
    assert "make it in configure_models()" in text


def test_a_model_made_late_that_stays_as_it_is_needs_no_checkpoint(tmp_path: Path) -> None:
    assert not _warnings_of(KeepsCopy, tmp_path)


def _copy_on_ranks(world: World) -> None:
    for strategy, error in (("ddp", StepError), ("fsdp", AssertionError)):
        config = TinyConfig(max_steps=1, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        with pytest.raises(error) as raised:
            CopiesLate(config, world=world).fit()
        said = str(raised.value) + "".join(raised.value.__notes__)
        assert "make it there, as self.target = copy.deepcopy(self.model), or in model= of a Session" in said


def test_a_copy_of_a_replicated_or_sharded_model_is_told_where_to_make_it() -> None:
    run_on_ranks(_copy_on_ranks, 2)


class Averaging(nn.Module):
    """Subtracts a moving average of its outputs, which it keeps as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.average, self.shown = nn.Linear(6, 3), torch.zeros(3), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.last(x)
        self.shown = outputs.detach()
        self.average = 0.9 * self.average + 0.1 * outputs.detach().mean(0)
        return outputs - self.average


class Averages(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Averaging()


class Resets(Averages):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model.average = torch.zeros(3)
        return super().training_step(batch, batch_idx)


def test_a_tensor_that_a_module_hands_on_is_warned_of(tmp_path: Path) -> None:
    (text,) = _warnings_of(Averages, tmp_path)
    assert text.startswith("model.average is a tensor that forward() hands on")
    assert not _warnings_of(Resets, tmp_path / "resets")
