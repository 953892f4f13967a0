"""The average of weights: over applied updates and all shards, exact after a resume, removed after evaluations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import Callback, CheckpointConfig, CheckpointError, ConfigError, ParallelConfig, World
from headway.trainer.callbacks import Ema
from headway.trainer.checkpoints.staging import Copy, Staging
from headway.trainer.checkpoints.store import CheckpointWarning
from headway.trainer.config import Strategy
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(**{"num_rows": 64, "max_steps": 6, "evaluate_every": None, **changes})


class Watch(Callback):
    """Records the weights before the first update and after each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_fit_start(self, trainer: Any) -> None:
        self.seen.append(weights(trainer))

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append(weights(trainer))


def _flat(ema: Ema) -> dict[str, torch.Tensor]:
    return {f"{model}.{key}": value for model, state in ema.weights().items() for key, value in state.items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _wanted(seen: list[dict[str, torch.Tensor]], decay: float, every: int = 1, start: int = 0) -> Any:
    average = {name: value.clone() for name, value in seen[start].items()}
    for step in range(start + every, len(seen), every):
        for name, value in average.items():
            value.lerp_(seen[step][name], 1 - decay)
    return average


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"update_every": 2}, {}),
        ({"start_step": 3}, {}),
        ({"start_step": 1, "update_every": 4}, {}),
        ({}, {"micro_batch_size": 2}),
    ],
)
def test_it_averages_once_per_update(options: dict[str, int], config: dict[str, int]) -> None:
    ema, watch = Ema(0.7, **options), Watch()  # type: ignore[arg-type]
    TinyTrainer(_config(**config), world=ALONE, callbacks=[watch, ema]).fit()
    assert len(watch.seen) == 7
    assert _equal(_flat(ema), _wanted(watch.seen, 0.7, options.get("update_every", 1), options.get("start_step", 0)))
    assert not _equal(_flat(ema), watch.seen[-1])


def test_before_it_begins_it_is_the_weights() -> None:
    ema, watch = Ema(0.7, start_step=100), Watch()
    TinyTrainer(_config(), world=ALONE, callbacks=[watch, ema]).fit()
    assert _equal(_flat(ema), watch.seen[-1])


def test_it_begins_with_weights_that_were_loaded_between_setup_and_training() -> None:
    ema, watch = Ema(0.9), Watch()
    trainer = TinyTrainer(_config(max_steps=1), world=ALONE, callbacks=[watch, ema])
    trainer.setup()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(1.0)
    trainer.fit()
    assert _equal(_flat(ema), _wanted(watch.seen, 0.9))


class SometimesBad(TinyTrainer):
    """The gradients of two batches are NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if self.training and batch_idx in (2, 5):
            outputs["loss"] = outputs["loss"] * float("nan")
        return outputs


def test_it_leaves_out_updates_that_were_skipped() -> None:
    ema, watch = Ema(0.7), Watch()
    trainer = SometimesBad(_config(num_rows=96, non_finite="skip"), world=ALONE, callbacks=[watch, ema])
    trainer.fit()
    assert trainer.micro_batches_seen == 8
    assert len(watch.seen) == 7
    assert _equal(_flat(ema), _wanted(watch.seen, 0.7))


class Inside(Callback):
    """Records the weights during and after evaluations."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.after: list[Any] = []

    def on_evaluation_batch_start(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.inside.append(weights(trainer))

    def on_evaluation_end(self, trainer: Any, metrics: Any) -> None:
        self.after.append(weights(trainer))


@pytest.mark.parametrize("evaluate", [True, False])
def test_evaluations_see_the_averages_and_training_does_not(evaluate: bool) -> None:
    """Two averages, one of them evaluated; training is unaffected."""
    ema, other, watch, spy = Ema(0.7, evaluate=evaluate), Ema(0.2, evaluate=False), Watch(), Inside()
    config = _config(evaluate_every="3 steps")
    TinyTrainer(config, world=ALONE, callbacks=[spy, ema, other, watch]).fit()
    bare = TinyTrainer(config, world=ALONE)
    bare.fit()
    assert _equal(weights(bare), watch.seen[-1])
    for index, step in enumerate((3, 6)):
        assert _equal(spy.inside[index], _wanted(watch.seen[: step + 1], 0.7) if evaluate else watch.seen[step])
        assert _equal(spy.after[index], watch.seen[step])
    assert _equal(_flat(ema), _wanted(watch.seen, 0.7))
    assert _equal(_flat(other), _wanted(watch.seen, 0.2))


def test_the_weights_are_back_after_an_error_in_an_evaluation() -> None:
    class Fails(TinyTrainer):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise LookupError("in the step")

    ema, watch = Ema(0.5), Watch()
    trainer = Fails(_config(evaluate_every="4 steps"), world=ALONE, callbacks=[ema, watch])
    with pytest.raises(LookupError, match="in the step"):
        trainer.fit()
    assert _equal(weights(trainer), watch.seen[4])
    assert trainer.model.training
    with ema.applied():
        assert _equal(weights(trainer), _wanted(watch.seen, 0.5))
    assert _equal(weights(trainer), watch.seen[4])


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["first", "last"])
def test_a_resumed_average_is_the_uninterrupted_one(tmp_path: Path, order: slice) -> None:
    """Two averages, with other callbacks before and after them, stopped twice in the middle of an epoch."""

    def callbacks(*stops: Callback) -> list[Callback]:
        return [Losses(), slow, fast, *stops][order]

    config = _config(max_steps=12, evaluate_every="5 steps", dropout=0.2, noise=0.1)
    slow, fast = Ema(0.9, start_step=2, update_every=3), Ema(0.5, evaluate=False)
    TinyTrainer(config, world=ALONE, callbacks=callbacks(), run_dir=tmp_path / "whole").fit()
    wanted = [_flat(slow), _flat(fast)]
    for stop in (4, 7, 99):
        slow, fast = Ema(0.9, start_step=2, update_every=3), Ema(0.5, evaluate=False)
        TinyTrainer(config, world=ALONE, callbacks=callbacks(StopAt(stop)), run_dir=tmp_path / "cut").fit()
    assert _equal(_flat(slow), wanted[0])
    assert _equal(_flat(fast), wanted[1])


def test_a_save_copies_the_averages_while_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[set[str]] = []
    begin, finish = Staging.begin, Copy.finish

    def begins(self: Staging, *args: Any, **options: Any) -> Copy:
        copy = begin(self, *args, **options)
        started.append(set(copy._deferred.names))
        return copy

    monkeypatch.setattr(Staging, "begin", begins)
    monkeypatch.setattr(Copy, "finish", lambda self: (time.sleep(0.05), finish(self)))
    watch = Watch()
    config = _config(checkpoint=CheckpointConfig(every="1 steps", keep_last="all"))
    TinyTrainer(config, world=ALONE, callbacks=[Ema(0.5, start_step=2), watch], run_dir=tmp_path / "whole").fit()
    assert all({"callbacks/Ema/0/averages/model/last.weight", "models/model/last.weight"} <= names for names in started)
    for step in range(3, 6):
        ema = Ema(0.5, start_step=2)
        checkpoint = str(tmp_path / "whole" / "checkpoints" / f"step-{step:08}")
        TinyTrainer(config, world=ALONE, callbacks=[ema], run_dir=tmp_path / f"from-{step}").fit(resume=checkpoint)
        assert _equal(_flat(ema), _wanted(watch.seen, 0.5, start=2))


def test_a_checkpoint_evaluated_alone_is_evaluated_with_its_averages(tmp_path: Path) -> None:
    config = _config(evaluate_every="6 steps")
    result = TinyTrainer(config, world=ALONE, callbacks=[Ema(0.5)], run_dir=tmp_path).fit()
    assert result.last_checkpoint is not None
    alone = TinyTrainer(config, world=ALONE, callbacks=[Ema(0.5)])
    found = alone.evaluate(checkpoint=result.last_checkpoint)["validation/loss"]
    bare = TinyTrainer(config, world=ALONE).evaluate(checkpoint=result.last_checkpoint)["validation/loss"]
    assert found == result.metrics["validation/loss"] != bare


class Half(TinyTrainer):
    """A model with bfloat16 weights, a buffer, a frozen layer and a tied weight."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.norm = nn.BatchNorm1d(self.config.width)
        self.model.blocks[1][0].weight = self.model.blocks[0][0].weight
        self.model.first.requires_grad_(False)
        self.model.to(torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.model.norm(self.model.first(batch["x"].bfloat16()))
        for block in self.model.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.model.last(x).float(), batch["y"])


def test_half_precision_is_averaged_in_float32_and_buffers_are_the_model_s() -> None:
    ema, spy, watch = Ema(0.99), Inside(), Watch()
    trainer = Half(_config(), world=ALONE, callbacks=[ema, spy, watch])
    trainer.fit()
    averaged, now = _flat(ema), weights(trainer)
    assert {name for name, value in averaged.items() if value.dtype == torch.float32} == {
        name for name in now if not name.startswith("model.first") and "running" not in name and "num_b" not in name
    }
    seen = [{name: value.float() for name, value in each.items()} for each in watch.seen]
    for name, value in _wanted(seen, 0.99).items():
        assert torch.equal(averaged[name], value if averaged[name].dtype == torch.float32 else now[name]), name
    # In the models the averages are bfloat16 again, and the weights are restored bit for bit.
    assert spy.inside[-1]["model.last.weight"].dtype == torch.bfloat16
    assert torch.equal(spy.inside[-1]["model.last.weight"], averaged["model.last.weight"].bfloat16())
    assert _equal(spy.after[-1], watch.seen[-1])
    assert torch.equal(averaged["model.blocks.1.0.weight"], averaged["model.blocks.0.0.weight"])


def test_an_average_of_other_parameters_is_refused(tmp_path: Path) -> None:
    class Frozen(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self.model.last.bias.requires_grad_(False)

    TinyTrainer(_config(), world=ALONE, callbacks=[Ema()], run_dir=tmp_path).fit()
    with (
        pytest.raises(CheckpointError, match=r"do not match the trainable parameters; these differ: model\.last\.bias"),
        pytest.warns(CheckpointWarning, match="the code of"),
    ):
        Frozen(_config(max_steps=9), world=ALONE, callbacks=[Ema()], run_dir=tmp_path).fit()


def test_only_one_average_can_be_evaluated() -> None:
    with pytest.raises(ConfigError, match="set evaluate=False on all but one"):
        TinyTrainer(_config(), world=ALONE, callbacks=[Ema(0.9), Ema(0.99)]).fit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "decay must be >= 0 and < 1"),
        ({"update_every": 0}, "update_every must be an integer >= 1"),
        ({"start_step": -1}, "start_step must be an integer >= 0"),
    ],
)
def test_arguments_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ema(**options)


def _on_ranks(world: World, folder: str) -> dict[str, Any]:
    """The same run under every strategy, and split in two halves with different strategies."""

    def run(strategy: Strategy, name: str, stop: int = 99, *, watched: bool = True) -> Any:
        config = _config(
            num_rows=96,
            max_steps=8,
            global_batch_size=8,
            evaluate_every="3 steps",
            checkpoint=CheckpointConfig(every=None),
            parallel=ParallelConfig(strategy=strategy, dp_shard=2 if strategy == "hsdp" else None),
        )
        ema, watch, spy, losses = Ema(0.8), Watch(), Inside(), Losses()
        trainer = TinyTrainer(
            config,
            world=world,
            callbacks=[*([spy, watch] if watched else []), ema, losses, StopAt(stop)],
            run_dir=f"{folder}/{name}",
        )
        trainer.fit()
        return {
            "average": _flat(ema),
            "exact": not watched or stop < 99 or _equal(_flat(ema), _wanted(watch.seen, 0.8)),
            "swapped": all(
                _equal(inside, _wanted(watch.seen[: step + 1], 0.8)) and _equal(after, watch.seen[step])
                for step, inside, after in zip((3, 6, 8), spy.inside, spy.after, strict=False)
            ),
            "losses": losses.of("validation/loss"),
        }

    results = {strategy: run(strategy, strategy) for strategy in ("ddp", "fsdp", "hsdp")}
    # Reading weights frees FSDP's gathered copy. Nothing reads them here, so a leftover average would be trained on.
    results["unwatched"] = run("fsdp", "unwatched", watched=False)
    run("ddp", "ddp-then-fsdp", stop=4)
    run("fsdp", "fsdp-then-ddp", stop=4)
    run("fsdp", "fsdp-then-alone", stop=4)
    halves = {"fsdp": run("fsdp", "ddp-then-fsdp"), "ddp": run("ddp", "fsdp-then-ddp")}
    return {"whole": results, "resumed": {name: half["average"] for name, half in halves.items()}}


@pytest.mark.extended
def test_averages_are_the_same_under_every_strategy_and_resume_under_another(tmp_path: Path) -> None:
    for results in run_on_ranks(_on_ranks, 2, str(tmp_path)):
        whole = results["whole"]
        for name, each in whole.items():
            assert each["exact"], name
            assert each["swapped"], name
            assert each["losses"].keys() == {3, 6, 8}
            assert each["losses"] == pytest.approx(whole["ddp"]["losses"], abs=1e-6)
            for key, value in each["average"].items():
                torch.testing.assert_close(value, whole["ddp"]["average"][key], rtol=1e-6, atol=1e-7)
        for name, average in results["resumed"].items():
            for key, value in average.items():
                torch.testing.assert_close(value, whole[name]["average"][key], rtol=1e-6, atol=1e-7)
    ema = Ema(0.8)
    config = _config(num_rows=96, max_steps=8, global_batch_size=8, evaluate_every="3 steps")
    TinyTrainer(config, world=ALONE, callbacks=[ema], run_dir=tmp_path / "fsdp-then-alone").fit()
    for key, value in _flat(ema).items():
        torch.testing.assert_close(value, whole["ddp"]["average"][key], rtol=1e-6, atol=1e-7)
