"""Samples: shown to the user, without any effect on training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from headway.trainer import ConfigError, ParallelConfig, Tracker, World
from headway.trainer.callbacks import Ema, Samples
from headway.trainer.config import Strategy
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Kept(Tracker):
    """Records what it is called with."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.images: list[Any] = []

    def log_text(self, texts: Mapping[str, str], *, step: int) -> None:
        self.texts.append((step, dict(texts)))

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        self.images.append((step, sorted(images)))


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(**{"num_rows": 64, "max_steps": 6, "evaluate_every": None, "dropout": 0.3, **changes})


def _logits(trainer: Any) -> torch.Tensor:
    return trainer.model(torch.ones(1, 6))  # type: ignore[no-any-return]


def test_texts_and_images_reach_the_person_and_the_trackers() -> None:
    printed: list[str] = []
    kept = Kept()

    def both(trainer: Any) -> Any:
        return {"poem": f"best class {_logits(trainer).argmax().item()}", "noise": torch.rand(3, 4, 4)}

    trainer = TinyTrainer(
        _config(),
        world=ALONE,
        callbacks=[Samples(both, every="3 steps"), Samples(lambda trainer: "hello", every="5 steps", name="greeting")],
        trackers=[kept],
        printer=printed.append,
    )
    trainer.fit()
    assert [step for step, _ in kept.texts] == [3, 5, 6]
    assert kept.texts[1] == (5, {"greeting": "hello"})
    assert kept.images == [(3, ["noise"]), (6, ["noise"])]
    assert printed[1] == "greeting after step 5: hello"
    assert printed[0].startswith("poem after step 3: best class ")


def test_training_is_the_same_with_and_without_them() -> None:
    """Samples run in evaluation mode, with the averages, without gradients; random states are restored."""
    seen: list[Any] = []
    ema = Ema(0.5)

    def look(trainer: Any) -> None:
        seen.append((trainer.training, trainer.model.training, torch.is_grad_enabled(), weights(trainer)))
        torch.rand(17)
        _logits(trainer)

    with_them = TinyTrainer(_config(noise=0.1), world=ALONE, callbacks=[ema, Samples(look, every="2 steps")])
    with_them.fit()
    without = TinyTrainer(_config(noise=0.1), world=ALONE)
    without.fit()
    assert len(seen) == 3
    assert all(each[:3] == (False, False, False) for each in seen)
    averages = ema.weights()["model"]
    assert all(torch.equal(value, averages[name.removeprefix("model.")]) for name, value in seen[-1][3].items())
    wanted = weights(without)
    assert all(torch.equal(value, wanted[name]) for name, value in weights(with_them).items())
    assert with_them.model.training
    assert with_them.training


@pytest.mark.parametrize("made", [LookupError("no tokenizer"), 3, {"a": 3}])
def test_a_failure_is_one_warning_and_training_goes_on(made: Any) -> None:
    def fails(trainer: Any) -> Any:
        if isinstance(made, Exception):
            raise made
        return made

    trainer = TinyTrainer(_config(), world=ALONE, callbacks=[Samples(fails, every=1)])
    with pytest.warns(UserWarning, match="sampling with .*fails failed; training continues") as warned:
        result = trainer.fit()
    assert len(warned) == 1
    assert result.status == "completed"
    assert trainer.training


def test_ctrl_c_while_sampling_is_no_failure() -> None:
    def interrupted(trainer: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TinyTrainer(_config(), world=ALONE, callbacks=[Samples(interrupted, every=1)]).fit()


def test_epochs_are_counted_when_they_are_whole() -> None:
    kept = Kept()
    config = _config(num_rows=32, max_epochs=2, max_steps=None)
    callbacks = [Samples(lambda trainer: "x", every="1 epochs")]
    TinyTrainer(config, world=ALONE, callbacks=callbacks, trackers=[kept], printer=lambda text: None).fit()
    assert [step for step, _ in kept.texts] == [4, 8]


@pytest.mark.parametrize(
    ("function", "every", "message"),
    [(lambda trainer: "", "5m", "every must be in steps or epochs"), ("text", 5, "function must be callable")],
)
def test_arguments_are_checked(function: Any, every: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Samples(function, every=every)


def _on_ranks(world: World) -> dict[str, Any]:
    """Under FSDP every rank must call the model, or ranks would wait forever."""
    shown: dict[str, Any] = {}
    for name in ("ddp", "fsdp"):
        strategy: Strategy = name  # type: ignore[assignment]
        kept = Kept()
        config = _config(global_batch_size=8, parallel=ParallelConfig(strategy=strategy))
        samples = Samples(lambda trainer: f"{_logits(trainer).sum().item():.4f}", every="3 steps")
        trainer = TinyTrainer(config, world=world, callbacks=[samples], trackers=[kept], printer=lambda text: None)
        trainer.fit()
        shown[name] = kept.texts
    return shown


def test_all_ranks_sample_and_the_main_one_shows() -> None:
    main, other = run_on_ranks(_on_ranks, 2)
    assert other == {"ddp": [], "fsdp": []}
    assert [step for step, _ in main["fsdp"]] == [3, 6]
    assert main["fsdp"] == main["ddp"]
