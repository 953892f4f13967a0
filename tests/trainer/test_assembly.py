"""From what a trainer's `configure_` methods set to models, optimizers and schedulers: which attributes count as what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.trainer import ConfigError, World
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.alone("cpu")


def test_an_optimizer_over_a_parameter_in_no_module_is_refused_before_the_first_step() -> None:
    class Tempered(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.temperature = nn.Parameter(torch.tensor(1.0))
            self.optimizer = torch.optim.SGD([*self.model.parameters(), self.temperature], lr=0.1)

    trainer = Tempered(TinyConfig(max_steps=1), world=ALONE)
    with pytest.raises(ConfigError, match=r"'optimizer' holds 1 parameters .* shape \(\): put each into a module"):
        trainer.fit()
    assert trainer.global_step == 0
