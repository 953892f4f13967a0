"""Parts of a sharded model that are called by themselves, and assignments to `data` of shards, which torch ignores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.trainer import StepError, World
from tests.distributed import run_on_ranks
from tests.tiny import TinyTrainer, weights
from tests.trainer.distributed.test_parallelize import _config


class Holder(nn.Module):
    """Two networks in one module that is never called, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.teacher = nn.Linear(6, 3).requires_grad_(False)


class Distils(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Holder()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.student.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.model.student(batch["x"]), self.model.teacher(batch["x"]))


class CallsAPart(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.first(batch["x"]).square().mean()


class Assigns(TinyTrainer):
    def on_step_end(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data * 0.5


class ChangesInPlace(TinyTrainer):
    def on_step_end(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.mul_(0.5)


def _train(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        config = _config(strategy=strategy)
        for cls in (Distils, ChangesInPlace):
            trainer = cls(config, world=world)
            trainer.fit()
            found[f"{cls.__name__}/{strategy}"] = weights(trainer)
    Assigns(_config(strategy="ddp"), world=world).fit()
    with pytest.raises(StepError, match=r"parameter\.data = value has no effect on a sharded parameter: change it in"):
        Assigns(_config(strategy="fsdp"), world=world).fit()
    with pytest.raises(RuntimeError, match="DTensor") as raised:
        CallsAPart(_config(strategy="fsdp"), world=world).fit()
    assert "call it in forward or another method of the model" in "".join(raised.value.__notes__)
    return found


def test_parts_of_a_model_that_only_holds_them_are_sharded_and_mistakes_are_named() -> None:
    for found in run_on_ranks(_train, 2):
        for name in ("Distils", "ChangesInPlace"):
            for key, value in found[f"{name}/ddp"].items():
                torch.testing.assert_close(found[f"{name}/fsdp"][key], value, atol=1e-6, rtol=1e-5)
