"""Precision: dtypes of forward passes, the loss scale of float16 on all ranks, and bfloat16 weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    LossScaler,
    NonFiniteError,
    ParallelConfig,
    Session,
    StepError,
    Trainer,
    TrainerConfig,
    World,
)
from headway.trainer.distributed.dtensor import to_full_tensor
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    settings = {
        "max_steps": 4,
        "evaluate_every": None,
        "log_every": "1 steps",
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "num_rows": 400,
        **changes,
    }
    return TinyConfig(**settings)


class Spy(Callback):
    """Records where autocast is enabled, and the dtypes."""

    def __init__(self) -> None:
        self.seen: dict[str, set[Any]] = {}

    def note(self, name: str, value: Any) -> None:
        self.seen.setdefault(name, set()).add(value)

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        for module in trainer.unwrap(trainer.models["model"]).modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _, __, output: self.note("computed", output.dtype))
        optimizer = trainer.optimizers["optimizer"]
        optimizer.register_step_pre_hook(lambda *_: self.note("optimizer autocast", torch.is_autocast_enabled("cpu")))

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        self.note("hook autocast", torch.is_autocast_enabled("cpu"))
        for parameter in trainer.models["model"].parameters():
            assert parameter.grad is not None
            self.note("gradient", parameter.grad.dtype)

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        for parameter in trainer.models["model"].parameters():
            self.note("weight", parameter.dtype)
            self.note("moment", trainer.optimizers["optimizer"].state[parameter]["exp_avg"].dtype)


class StepsItself(TinyTrainer):
    """Calls backward and step inside the forward pass, where autocast is on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        if self.training:
            loss.register_hook(lambda _: self.in_backward.append(torch.is_autocast_enabled("cpu")))
        self.backward(loss)
        self.step(self.optimizer)
        return {"loss": loss}

    in_backward: list[bool]


@pytest.mark.parametrize("trainer_class", [TinyTrainer, StepsItself])
@pytest.mark.parametrize(
    ("precision", "computes", "keeps"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_autocast_covers_the_forward_pass_only(
    trainer_class: type[TinyTrainer], precision: Any, computes: torch.dtype, keeps: torch.dtype
) -> None:
    spy, losses = Spy(), Losses()
    trainer = trainer_class(_config(precision=precision), world=ALONE, callbacks=[spy, losses])
    trainer.in_backward = []  # type: ignore[attr-defined]
    trainer.fit()
    assert spy.seen == {
        "computed": {computes},
        "gradient": {keeps},
        "weight": {keeps},
        "moment": {keeps},
        "hook autocast": {False},
        "optimizer autocast": {False},
    }
    assert set(trainer.in_backward) == ({False} if trainer_class is StepsItself else set())  # type: ignore[attr-defined]
    assert all(record["grad_norm"] > 0 for record in losses.records.values())


class Sgd(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.9)


class ScaleFrom(Callback):
    """Starts with another loss scale, and records the gradients that hooks see."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.largest: list[float] = []
        self.skipped: list[str] = []

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        _scaler(trainer).scale = self.scale

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        gradients = [to_full_tensor(p.grad) for p in trainer.models["model"].parameters() if p.grad is not None]
        self.largest.append(max(gradient.abs().max().item() for gradient in gradients))

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        self.skipped.append(reason)


def _scaler(trainer: Trainer[Any]) -> LossScaler:
    scaler = trainer._engine.loop.optimizer_step._scaler
    assert isinstance(scaler, LossScaler)
    return scaler


def _overflow(world: World) -> list[dict[str, Any]]:
    results = []
    for strategy in ("ddp", "fsdp"):
        spy, losses = ScaleFrom(2.0**26), Losses()
        config = _config(precision="fp16", parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        trainer = Sgd(config, world=world, callbacks=[spy, losses])
        trainer.fit()
        results.append(
            {
                "weights": weights(trainer),
                "scale": _scaler(trainer).scale,
                "good_updates": _scaler(trainer).good_updates,
                "skipped": spy.skipped,
                "logged": (losses.of("loss_scale")[4], losses.of("skipped_steps")[4]),
                "largest": spy.largest[-1],
                "scheduled": trainer.scheduler.last_epoch,
                "seen": [rows for _, rows in trainer.seen],
            }
        )
    return results


def _assert_scaled(result: dict[str, Any]) -> None:
    skipped = len(result["skipped"])
    assert skipped > 0
    assert result["skipped"][0] == "the gradient overflows at loss scale 6.71089e+07"
    assert result["scale"] == 2.0 ** (26 - skipped)
    assert result["good_updates"] == result["scheduled"] == 4
    assert result["logged"] == (result["scale"], skipped)
    assert result["largest"] < 10, "hooks see gradients as they are without the scale"


def test_a_scale_that_overflows_is_halved_and_nothing_else_moves() -> None:
    """The gradient that is applied is that of float32, up to the rounding of float16."""
    result = _overflow(ALONE)[0]
    _assert_scaled(result)
    skipped = len(result["skipped"])

    exact = Sgd(_config(), world=ALONE)
    exact.setup()
    stream = exact._engine.data
    assert stream is not None
    for batch in list(stream.epoch(0))[skipped : skipped + 4]:
        loss = sum(F.cross_entropy(exact.model(each["x"]), each["y"]) / 4 for each in batch.micro_batches)
        loss.backward()  # type: ignore[union-attr]
        exact.optimizer.step()
        exact.scheduler.step()
        exact.optimizer.zero_grad()
    for name, value in weights(exact).items():
        torch.testing.assert_close(result["weights"][name], value, atol=2e-3, rtol=1e-2)


@pytest.mark.extended
def test_all_ranks_keep_the_same_loss_scale_for_whole_and_sharded_gradients() -> None:
    ranks = run_on_ranks(_overflow, 2)
    for result in (each for rank in ranks for each in rank):
        _assert_scaled(result)
    for one, other in zip(*ranks, strict=True):
        assert one["scale"] == other["scale"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


def test_the_loss_scale_goes_on_where_it_was_after_a_resume(tmp_path: Path) -> None:
    def run(folder: Path, *callbacks: Callback) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        config = _config(precision="fp16", max_steps=6, dropout=0.1, checkpoint=CheckpointConfig(every=None))
        trainer = TinyTrainer(config, run_dir=folder, world=ALONE, callbacks=callbacks)
        trainer.fit()
        return _scaler(trainer).state_dict(), weights(trainer)

    begins = ScaleFrom(2.0**26)
    reference = run(tmp_path / "whole", begins)
    at_3, _ = run(tmp_path / "cut", ScaleFrom(2.0**26), StopAt(3))
    resumed = run(tmp_path / "cut")
    assert at_3["good_updates"] == 3
    assert resumed[0] == reference[0] == {"scale": 2.0 ** (26 - len(begins.skipped)), "good_updates": 6}
    assert all(torch.equal(value, resumed[1][name]) for name, value in reference[1].items())


def test_the_loss_scale_grows_after_2000_good_updates_and_is_never_below_one() -> None:
    scaler = LossScaler()
    for _ in range(2000):
        assert scaler.scale == 2.0**16
        scaler.update(overflowed=False)
    assert (scaler.scale, scaler.good_updates) == (2.0**17, 0)
    scaler.update(overflowed=False)
    scaler.update(overflowed=True)
    assert (scaler.scale, scaler.good_updates) == (2.0**16, 0)
    for _ in range(20):
        scaler.update(overflowed=True)
    assert scaler.scale == 1.0


class Own(TinyTrainer):
    def configure_loss_scaler(self) -> LossScaler:
        return LossScaler(2.0**26, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)


def test_a_scaler_of_your_own_is_used_and_saved(tmp_path: Path) -> None:
    def run(folder: Path, *callbacks: Callback) -> tuple[dict[str, Any], list[float], Any]:
        config = _config(precision="fp16", max_steps=6, dropout=0.1, checkpoint=CheckpointConfig(every=None))
        losses = Losses()
        trainer = Own(config, run_dir=folder, world=ALONE, callbacks=[losses, *callbacks])
        trainer.fit()
        return _scaler(trainer).state_dict(), list(losses.of("loss_scale").values()), weights(trainer)

    state, scales, reference = run(tmp_path / "whole")
    # Lowered to a quarter until it fits, then raised after three updates, and so on.
    assert scales[0] in (2.0**24, 2.0**22, 2.0**20, 2.0**18, 2.0**16)
    assert any(after == 4 * before for before, after in itertools.pairwise(scales))
    assert _config().precision == "fp32"
    run(tmp_path / "cut", StopAt(4))
    resumed, later, end = run(tmp_path / "cut")
    assert (resumed, later) == (state, scales[4:])
    assert all(torch.equal(value, end[name]) for name, value in reference.items())


class Constant:
    """The smallest object that a scaler can be."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale
        self.told: list[bool] = []

    def update(self, *, overflowed: bool) -> None:
        self.told.append(overflowed)

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.told = state["told"]


class Given(TinyTrainer):
    scaler: Any = None

    def configure_loss_scaler(self) -> Any:
        return self.scaler


def test_a_scale_that_does_not_fall_is_not_excused_for_ever() -> None:
    """Every update would be skipped without end."""
    good, bad = Constant(128.0), Constant(2.0**30)
    trainer = Given(_config(precision="fp16"), world=ALONE)
    trainer.scaler = good
    assert trainer.fit().steps == 4
    assert good.told == [False] * 4
    trainer = Given(_config(precision="fp16"), world=ALONE)
    trainer.scaler = bad
    with pytest.raises(NonFiniteError, match="step 1 is"):
        trainer.fit()
    assert bad.told == [True]


@pytest.mark.parametrize(
    ("scaler", "message"),
    [
        (
            torch.amp.GradScaler("cpu"),
            "returned a GradScaler, which looks at the gradients of one rank: return headway",
        ),
        (None, r"returned a NoneType without a scale > 0 \(it is None\), update, state_dict"),
        (Constant(0.0), r"without a scale > 0 \(it is 0.0\): return a headway.trainer.LossScaler, or an object"),
        (Constant("big"), "without a scale > 0"),
    ],
    ids=["GradScaler", "None", "zero", "text"],
)
def test_what_is_no_scaler_is_refused(scaler: Any, message: str) -> None:
    trainer = Given(_config(precision="fp16"), world=ALONE)
    trainer.scaler = scaler
    with pytest.raises(ConfigError, match=message):
        trainer.fit()
    # Not called in another precision.
    trainer = Given(_config(), world=ALONE)
    trainer.scaler = scaler
    assert trainer.fit().steps == 4


def test_settings_of_a_scaler_are_checked() -> None:
    for settings in ({"init_scale": 0.5}, {"growth_factor": 0.9}, {"backoff_factor": 0.0}, {"growth_interval": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} must be"):
            LossScaler(**settings)  # type: ignore[arg-type]


class PerRank(TinyTrainer):
    """Scales that differ between ranks, from the start or after two updates."""

    at_start = False

    def configure_loss_scaler(self) -> Any:
        rank, scaler = self.world.rank, Constant(64.0)
        if self.at_start:
            scaler.scale += rank

        class Drifts(Constant):
            def update(self, *, overflowed: bool) -> None:
                super().update(overflowed=overflowed)
                self.scale = 64.0 + rank * (len(self.told) > 2)

        return scaler if self.at_start else Drifts(64.0)


def _disagree(world: World) -> list[str]:
    messages = []
    for at_start in (True, False):
        trainer = PerRank(_config(precision="fp16"), world=world)
        trainer.at_start = at_start
        with pytest.raises((ConfigError, StepError)) as raised:
            trainer.fit()
        messages.append(str(raised.value))
    return messages


def test_ranks_whose_scales_differ_are_told_so() -> None:
    for messages in run_on_ranks(_disagree, 2):
        for message in messages:
            assert message.startswith("the loss scales of the ranks differ (rank 0: 64, rank 1: 65), and so would")


def test_a_loop_of_your_own_takes_a_scaler() -> None:
    scaler = Constant(32.0)

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    config = TrainerConfig(max_epochs=1, precision="fp16")
    data = [torch.ones(2, 1) for _ in range(3)]
    model = torch.nn.Linear(1, 1)
    with Session(config, model=model, optimizer=make, data=data, world=ALONE, loss_scaler=scaler) as run:
        for batch in run:
            for x in run.accumulate(batch):
                run.backward(run.model(x).square().mean())
            run.step()
    assert scaler.told == [False] * 3


def test_where_no_scale_helps_the_policy_for_gradients_that_are_not_finite_holds() -> None:
    class Hopeless(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] * float("nan")

    spy = ScaleFrom(8.0)
    with pytest.raises(NonFiniteError, match="step 1 is nan: rank 0: the loss of micro-batch 1 is nan"):
        Hopeless(_config(precision="fp16"), world=ALONE, callbacks=[spy]).fit()
    assert spy.skipped == [f"the gradient overflows at loss scale {scale}" for scale in (8, 4, 2)]


def test_float16_weights_are_refused() -> None:
    class Half(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self.model.last.half()

    with pytest.raises(ConfigError, match="needs float32 weights, but 2 of the 8 weights are float16"):
        Half(_config(precision="fp16"), world=ALONE).fit()


# ---- Weights in bfloat16 -------------------------------------------------------------------------------------------


class MomentumIn32(torch.optim.Optimizer):
    """Keeps its momentum in float32, whatever the weights are."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                with torch.no_grad():
                    parameter.sub_(group["lr"] * state["momentum"])


class PureBf16(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = MomentumIn32(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)


def _resume_in_bf16(world: World, folder: str, strategies: tuple[str, ...]) -> list[bool]:
    same = []
    for strategy in strategies:
        states = []
        for name, stops in (("whole", [None]), ("cut", [3, None])):
            for stop in stops:
                config = _config(
                    precision="bf16-true",
                    max_steps=6,
                    dropout=0.1,
                    parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
                )
                callbacks = [] if stop is None else [StopAt(stop)]
                trainer = PureBf16(config, run_dir=f"{folder}/{strategy}/{name}", world=world, callbacks=callbacks)
                trainer.fit()
            moments = {i: to_full_tensor(state["momentum"]) for i, state in enumerate(trainer.optimizer.state.values())}
            assert {value.dtype for value in weights(trainer).values()} == {torch.bfloat16}
            assert {value.dtype for value in moments.values()} == {torch.float32}
            states.append({**weights(trainer), **moments})
        same.append(all(torch.equal(value, states[1][name]) for name, value in states[0].items()))
    return same


def test_moments_in_float32_of_weights_in_bfloat16_resume_as_they_were(tmp_path: Path) -> None:
    assert _resume_in_bf16(ALONE, str(tmp_path), ("ddp",)) == [True]
    assert run_on_ranks(_resume_in_bf16, 2, str(tmp_path / "ranks"), ("ddp", "fsdp")) == [[True, True]] * 2
