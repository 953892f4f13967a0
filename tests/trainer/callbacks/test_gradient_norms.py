"""The largest norms of single parameters are those of the full gradient, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import Callback, ConfigError, ParallelConfig, StepError, World
from headway.trainer.callbacks import GradientNorms, Histograms
from headway.trainer.step.gradients import named_parameters
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer
from tests.trainer.callbacks.test_histograms import Kept


def records(
    world: World, *callbacks: Callback, strategy: str = "ddp", groups: tuple[str, ...] = ()
) -> dict[int, dict[str, float]]:
    losses = Losses()
    config = TinyConfig(
        max_steps=4, log_every=1, global_batch_size=8, evaluate_every=None, grad_norm_groups=groups,  # type: ignore[arg-type]
        parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
    )  # fmt: skip
    TinyTrainer(config, world=world, callbacks=[*callbacks, losses]).fit()
    return {
        step: {name: value for name, value in record.items() if name.startswith("grad_norm/")}
        for step, record in losses.records.items()
    }


def test_the_largest_are_in_the_records_of_its_updates() -> None:
    """The norms that an update measures for groups of one parameter are the reference."""
    alone = World.single("cpu")
    norms = GradientNorms(every="2 steps", top=3)
    largest = records(alone, norms)
    trainer = TinyTrainer(TinyConfig(max_steps=1), world=alone)
    trainer.setup()
    every = records(alone, groups=tuple(name for name, _ in named_parameters(trainer.models)))
    assert largest[1] == largest[3] == {}
    for step in (2, 4):
        expected = sorted(every[step].items(), key=lambda pair: -pair[1])[:3]
        assert largest[step] == pytest.approx(dict(expected), rel=1e-6)
    assert {f"grad_norm/{name}": norm for name, norm in norms.norms.items()} == largest[4]


def test_a_resumed_run_tells_what_was_measured_before(tmp_path: Path) -> None:
    def told(name: str, *stops: Callback) -> dict[str, float]:
        losses = Losses()
        config = TinyConfig(max_steps=5, log_every="5 steps", evaluate_every=None, global_batch_size=8)  # type: ignore[arg-type]
        callbacks = [GradientNorms(every=3, top=1), losses, *stops]
        world = World.single("cpu")
        TinyTrainer(config, world=world, run_dir=str(tmp_path / name), callbacks=callbacks, printer=print).fit()
        return {name: value for name, value in losses.records.get(5, {}).items() if "grad_norm/" in name}

    expected = told("undisturbed")
    assert len(expected) == 1
    # Right after the measurement, before anything is logged.
    assert told("stopped", StopAt(3)) == {}
    assert told("stopped") == expected


def test_a_step_that_gives_no_gradient_is_what_is_complained_of() -> None:
    class Nothing(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.zeros((), requires_grad=True)

    trainer = Nothing(TinyConfig(max_steps=1), world=World.single("cpu"), callbacks=[GradientNorms(every=1)])
    with pytest.raises(StepError, match="no parameter of the optimizer got a gradient"):
        trainer.fit()


def on_ranks(world: World) -> list[dict[int, dict[str, float]]]:
    return [records(world, GradientNorms(every=2, top=3), strategy=strategy) for strategy in ("ddp", "fsdp")]


def test_they_are_those_of_the_whole_gradient_on_every_rank() -> None:
    alone = records(World.single("cpu"), GradientNorms(every=2, top=3))
    for rank in run_on_ranks(on_ranks, 2):
        for each in rank:
            for step, norms in alone.items():
                assert list(each[step]) == list(norms)
                assert each[step] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"), [({"every": "1m"}, "must be in steps"), ({"every": 1, "top": 0}, "top must be")]
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientNorms(**options)


class TwoSided(TinyTrainer):
    """Two models with an optimizer each; the second loss also depends on the first model."""

    def configure_models(self) -> None:
        self.critic, self.generator = torch.nn.Linear(6, 1), torch.nn.Linear(6, 6)

    def configure_optimizers(self) -> None:
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.0)
        self.of_generator = torch.optim.SGD(self.generator.parameters(), lr=0.0)
        self.own: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.backward(self.critic(self.generator(batch["x"]).detach()).mean())
        self._note("critic", self.critic)
        self.step(self.of_critic)
        self.backward(-100 * self.critic(self.generator(batch["x"])).mean())
        self._note("generator", self.generator)
        self.step(self.of_generator)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {}

    def _note(self, name: str, model: torch.nn.Module) -> None:
        self.own |= {f"{name}.{key}": float(p.grad.norm()) for key, p in model.named_parameters() if p.grad is not None}


def test_a_gradient_that_another_loss_has_left_is_not_measured() -> None:
    norms, kept = GradientNorms(every=1), Kept()
    config = TinyConfig(max_steps=1, global_batch_size=8, evaluate_every=None)
    callbacks = [norms, Histograms(every=1, parameters=False)]
    trainer = TwoSided(config, world=World.single("cpu"), callbacks=callbacks, trackers=[kept])
    trainer.fit()
    assert norms.norms == pytest.approx(trainer.own)
    told = kept.got[1]
    bias = told["gradients/critic.bias"]
    assert bias.total_of_squares**0.5 == pytest.approx(trainer.own["critic.bias"]), "and not 100 times as much"
