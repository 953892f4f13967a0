"""Mistakes that train something else than was meant, and that other frameworks let pass in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from headway.trainer import (
    CheckpointConfig,
    ConfigError,
    ParallelConfig,
    Session,
    StepError,
    Trainer,
    TrainerConfig,
    World,
)
from headway.trainer.callbacks import EarlyStopping
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _fit(cls: type[TinyTrainer], **config: Any) -> TinyTrainer:
    trainer = cls(TinyConfig(**{"max_steps": 4, "log_every": 1, **config}), world=ALONE)
    trainer.fit()
    return trainer


def _loss(trainer: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(trainer.model(batch["x"]), batch["y"])


# ---- In the step ---------------------------------------------------------------------------------------------------


def test_gradients_are_not_clipped_before_they_exist() -> None:
    with pytest.raises(TypeError, match=r"training_step calls clip_grad_norm_, but .* set config\.max_grad_norm"):

        class Clips(TinyTrainer):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                return _loss(self, batch)

    with pytest.warns(
        UserWarning, match=r"clips the gradient of a micro-batch, .*set config\.max_grad_norm, or clip in"
    ):

        class ByHand(TinyTrainer):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.backward(_loss(self, batch))
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.step(self.optimizer)
                return {}

    _fit(ByHand)


def test_a_loss_that_is_divided_by_the_accumulation_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="uses gradient_accumulation_steps: return the mean loss of the micro-batch"):

        class Divides(TinyTrainer):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return _loss(self, batch) / self.config.gradient_accumulation_steps


def test_the_loss_is_not_scaled_twice() -> None:
    class Scales(TinyTrainer):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            self.scaler = torch.amp.GradScaler("cpu")

    with pytest.raises(ConfigError, match=r"self\.scaler is a GradScaler, but Headway scales the loss itself"):
        _fit(Scales)


def test_dropout_in_an_evaluation_is_warned_of() -> None:
    class Trains(TinyTrainer):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.model.train()
            return _loss(self, batch)

    with pytest.warns(UserWarning, match="validation_step left model in training mode"):
        _fit(Trains)


def test_a_gradient_in_an_evaluation_says_how() -> None:
    class Differentiates(TinyTrainer):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            loss = _loss(self, batch)
            loss.backward()
            return loss

    with pytest.raises(RuntimeError) as raised:
        _fit(Differentiates)
    assert "with torch.enable_grad()" in "".join(raised.value.__notes__)


def test_a_loop_does_not_clear_gradients_between_micro_batches() -> None:
    config = TinyConfig(max_steps=2, gradient_accumulation_steps=2)
    data = DataLoader(Rows(40), batch_size=8)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with Session(config, model=nn.Linear(6, 3), optimizer=optimizer_of, data=data, world=ALONE) as run:
            for batch in run:
                for micro_batch in run.accumulate(batch):
                    run.optimizer.zero_grad()
                    run.backward(_loss(run, micro_batch))
                run.step()

    with pytest.raises(StepError, match=r"zero_grad\(\) inside `for micro_batch in run\.accumulate\(batch\)`: remove"):
        train()


# ---- Learning rates and metrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda each: lr_scheduler.CosineAnnealingLR(each, T_max=3), "T_max is reached after 3 of the 36 updates"),
        (lambda each: lr_scheduler.StepLR(each, 1), "step_size is reached after 1 of the 36"),
        (lambda each: lr_scheduler.MultiStepLR(each, [1, 2]), "last of its milestones is reached after 2 of the 36"),
        (lambda each: lr_scheduler.ExponentialLR(each, 0.5), "gamma=0.5 makes the learning rate 1e-11 of the first"),
        (lambda each: lr_scheduler.CosineAnnealingLR(each, T_max=36), None),
        (lambda each: lr_scheduler.LinearLR(each, total_iters=3), None),
        (lambda each: lr_scheduler.ExponentialLR(each, 0.99), None),
    ],
)
def test_a_scheduler_that_counts_epochs_is_warned_of(make: Callable[[Any], Any], message: str | None) -> None:
    class Schedules(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.scheduler = make(self.optimizer)

    class ByEpoch(Schedules):
        scheduler_interval = "epoch"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in (ByEpoch, *([Schedules] if message is None else [])):
            cls(TinyConfig(max_epochs=3), world=ALONE).setup()
    if message is not None:
        with pytest.warns(UserWarning, match=rf"self\.scheduler steps after every update, and .*{message}"):
            Schedules(TinyConfig(max_epochs=3), world=ALONE).setup()


def test_a_plateau_needs_evaluations() -> None:
    class Waits(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer)

        def configure_dataloaders(self) -> Any:
            return super().configure_dataloaders()[0]

    with pytest.raises(ConfigError, match="ReduceLROnPlateau that steps after evaluations, but there is no validation"):
        _fit(Waits)


def test_the_lowest_accuracy_is_not_the_best_without_a_warning() -> None:
    with pytest.warns(UserWarning, match="CheckpointConfig with monitor='validation/accuracy' and mode='min' takes"):
        CheckpointConfig(monitor="validation/accuracy")
    with pytest.warns(
        UserWarning, match="EarlyStopping with monitor='validation/top5_acc' and mode='min' takes the low"
    ):
        EarlyStopping("validation/top5_acc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointConfig(monitor="validation/accuracy", mode="max")
        CheckpointConfig(monitor="validation/word_count")
        EarlyStopping("validation/loss")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda each: ([each], [lr_scheduler.StepLR(each, 9)]), "returned list .*this is the form of Lightning"),
        (
            lambda each: {"optimizer": each, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(each, 9)}},
            "returned dict .* as 'lr_scheduler'; .*scheduler_interval",
        ),
        (
            lambda each: {"optimizer": each, "monitor": "val_loss"},
            "returned str 'val_loss' as 'monitor'; .*scheduler_monitor",
        ),
    ],
)
def test_the_optimizers_of_lightning_are_refused(make: Callable[[Any], Any], message: str) -> None:
    class Returns(TinyTrainer):
        def configure_optimizers(self) -> Any:
            return make(torch.optim.SGD(self.model.parameters(), lr=0.1))

    with pytest.raises(ConfigError, match=message):
        _fit(Returns)


# ---- Changes during the run ----------------------------------------------------------------------------------------


class Changes(TinyTrainer):
    def on_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change()

    def change(self) -> None:
        raise NotImplementedError


class ReplacesOptimizer(Changes):
    def change(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)


class ReplacesModel(Changes):
    def change(self) -> None:
        self.model = nn.Linear(6, 3)


class ReplacesData(Changes):
    def change(self) -> None:
        self.train_dataloader = DataLoader(Rows(20), batch_size=8)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ReplacesData, r"self\.train_dataloader was replaced during the run, .* change its dataset, or pass batches"),
        (ReplacesOptimizer, r"self\.optimizer was replaced during the run, .* change its param_groups"),
        (ReplacesModel, r"self\.model was replaced during the run, .* change its weights in place"),
    ],
)
def test_a_model_or_optimizer_that_is_replaced_is_refused(cls: type[TinyTrainer], message: str) -> None:
    with pytest.raises(StepError, match=message):
        _fit(cls, max_steps=None, max_epochs=2)


def test_a_model_may_be_compiled_in_a_hook() -> None:
    class Compiles(Changes):
        def change(self) -> None:
            self.model = torch.compile(self.model, backend="eager")

    _fit(Compiles, max_steps=None, max_epochs=2)


def test_a_layer_that_no_optimizer_trains_is_warned_of_once() -> None:
    class Replaces(Changes):
        def change(self) -> None:
            self.model.last = nn.Linear(9, 3)

    with pytest.warns(UserWarning, match=r"model\.last\.weight and 1 more can be trained, but no opt") as raised:
        _fit(Replaces, max_steps=None, max_epochs=4)
    assert sum("no optimizer has it" in str(each.message) for each in raised) == 1


class Unfreezes(TinyTrainer):
    """Trains its blocks from step 2 on; before, only its last layer, or with `dropout` nothing at all."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.requires_grad_(False)
        self.model.last.requires_grad_(not self.config.dropout)

    def on_step_start(self) -> None:
        if self.global_step >= 2 or self.config.dropout:
            self.model.blocks.requires_grad_(True)

    def on_fit_start(self) -> None:
        self.before = self.model.blocks[0][0].weight.detach().clone()


def _unfreezes(world: World, dropout: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trainer = Unfreezes(TinyConfig(max_steps=4, batch_size=4, learning_rate=0.1, dropout=dropout), world=world)
    trainer.fit()
    return trainer.before, weights(trainer)


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["partly frozen", "wholly frozen"])
def test_what_is_unfrozen_during_the_run_is_equal_on_all_ranks(dropout: float) -> None:
    (before, first), (_, second) = run_on_ranks(_unfreezes, 2, dropout)
    assert not torch.equal(first["model.blocks.0.0.weight"], before)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Freezes(TinyTrainer):
    """Trains its first layer in every third update only."""

    def on_step_start(self) -> None:
        self.model.first.requires_grad_(self.global_step % 3 == 0)


def _freezes(world: World) -> dict[str, torch.Tensor]:
    config = TinyConfig(max_steps=5, global_batch_size=8, micro_batch_size=2, learning_rate=0.1)
    trainer = Freezes(config, world=world)
    trainer.fit()
    return weights(trainer)


def test_what_is_frozen_during_the_run_leaves_the_rest_as_in_one_process() -> None:
    alone = _freezes(World.single("cpu"))
    for found in run_on_ranks(_freezes, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], atol=1e-4, rtol=1e-4, msg=name)


class DrawsAgain(TinyTrainer):
    def on_step_end(self) -> None:
        if self.global_step == 2:
            with torch.no_grad():
                nn.init.normal_(self.model.last.weight)


class CreatesInForward(TinyTrainer):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "second"):
                self.second = nn.Linear(3, 3)
            return self.second(self.first(x))

    def configure_models(self) -> None:
        self.model = self.Model()


class OwnTeacher(TinyTrainer):
    def __init__(self, *args: Any, world: World, **kwargs: Any) -> None:
        super().__init__(*args, world=world, **kwargs)
        torch.manual_seed(world.rank)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)


DIFFERING = {DrawsAgain: "model.last.weight", CreatesInForward: "model.second.weight", OwnTeacher: "teacher.weight"}


def _differs(world: World) -> list[str]:
    messages = []
    for cls in DIFFERING:
        trainer = cls(TinyConfig(max_steps=4, global_batch_size=8), world=world)
        with pytest.raises(StepError) as raised:
            trainer.fit()
        messages.append(str(raised.value))
    return messages


def test_parameters_that_ranks_draw_differently_are_refused() -> None:
    for messages in run_on_ranks(_differs, 2):
        for message, name in zip(messages, DIFFERING.values(), strict=True):
            assert message.startswith(name)
            assert "differ between the ranks, since code outside of the optimizers has changed or created" in message


class DrawsInConfigureOptimizers(TinyTrainer):
    def configure_optimizers(self) -> None:
        with torch.no_grad():
            nn.init.normal_(self.model.first.weight)
        super().configure_optimizers()


def _draws(world: World, strategy: Any) -> dict[str, torch.Tensor]:
    config = TinyConfig(max_steps=1, global_batch_size=8, parallel=ParallelConfig(strategy=strategy))
    trainer = DrawsInConfigureOptimizers(config, world=world)
    trainer.setup()
    return weights(trainer)


def test_weights_that_configure_optimizers_draws_do_not_depend_on_sharding() -> None:
    alone = _draws(ALONE, "none")
    for sharded in run_on_ranks(_draws, 2, "fsdp"):
        assert all(torch.equal(sharded[name], value) for name, value in alone.items())


# ---- Arguments and attributes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("max_epochs", r"no argument max_epochs, a field of its config: TrainerConfig\(max_epochs=\.\.\.\)"),
        ("gradient_clip_val", "no argument gradient_clip_val: in its config, use max_grad_norm"),
        ("accelerator", "no argument accelerator: start it with torchrun"),
        ("default_root_dir", "no argument default_root_dir: use run_dir"),
    ],
)
def test_arguments_of_other_trainers_say_where_they_belong(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TinyTrainer(TinyConfig(max_steps=1), **{argument: 1})


def test_an_argument_of_the_users_own_is_not_refused() -> None:
    class Own(TinyTrainer):
        def __init__(self, config: TinyConfig, *, strategy: str, **options: Any) -> None:
            super().__init__(config, **options)
            self.own = strategy

    assert Own(TinyConfig(max_steps=1), strategy="mine", world=ALONE).own == "mine"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("log_dict", r"call self\.log"),
        ("hparams", r"use self\.config"),
        ("validate", r"call evaluate\(\)"),
        ("epoch", r"use self\.current_epoch"),
        ("iteration", r"use self\.global_step"),
    ],
)
def test_attributes_of_other_trainers_name_ours(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"'TinyTrainer' object has no attribute '{name}': {advice}"):
        getattr(TinyTrainer(TinyConfig(max_steps=1), world=ALONE), name)


class TrainsItself(nn.Linear):
    def train(self, inputs, labels):  # type: ignore[no-untyped-def, override]
        return inputs, labels


class HasItsOwnTrain(TinyTrainer):
    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 6), TrainsItself(6, 3))


class HasAList(TinyTrainer):
    def configure_models(self) -> None:
        self.model = nn.Module()
        self.model.layers = [nn.Linear(6, 3)]


def test_models_that_no_evaluation_can_handle_or_that_have_plain_lists_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.1, a TrainsItself, has its own train\(\) with other arguments .*rename"
    ):
        HasItsOwnTrain(TinyConfig(max_steps=1), world=ALONE).setup()
    with pytest.raises(ConfigError, match=r"no module with parameters: .*only if it is a torch\.nn\.ModuleList"):
        HasAList(TinyConfig(max_steps=1), world=ALONE).setup()


def test_resume_takes_a_path() -> None:
    with pytest.raises(ConfigError, match='resume must be "auto", "never" or the path of a checkpoint, got True'):
        TinyTrainer(TinyConfig(max_steps=1), world=ALONE).fit(resume=True)  # type: ignore[arg-type]


def test_a_config_that_may_change_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"Changing must not change .*: write @dataclass\(frozen=True, kw_only=True\)"):

        @dataclass
        class Changing(TrainerConfig):  # type: ignore[misc]
            rate: float = 0.1


def test_a_text_in_place_of_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate of TinyConfig must be a float, got the text '1e-3'"):
        TinyTrainer(TinyConfig(max_steps=1, learning_rate="1e-3"), world=ALONE)  # type: ignore[arg-type]
    assert isinstance(TinyTrainer(TinyConfig(max_steps=1, learning_rate=1), world=ALONE), Trainer)


# ---- Sessions ------------------------------------------------------------------------------------------------------


def _session(**options: Any) -> Session:
    model = nn.Linear(6, 3)
    options = {"optimizer": lambda each: torch.optim.SGD(each.parameters(), lr=0.1)} | options
    data = DataLoader(Rows(40), batch_size=8)
    return Session(TinyConfig(max_steps=2), model=model, data=data, world=ALONE, **options)


def test_an_optimizer_that_exists_already_is_refused() -> None:
    made = torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.1)
    for optimizer in (made, torch.optim.SGD):
        with pytest.raises(ConfigError, match=r"optimizer=lambda model: SGD\(model\.parameters\(\), \.\.\.\)"):
            _session(optimizer=optimizer)


def test_a_session_must_be_entered() -> None:
    with pytest.raises(ConfigError, match=r"use a Session in `with Session\(\.\.\.\) as run:`"):
        next(iter(_session()))


def test_restore_comes_before_the_loop() -> None:
    def train() -> None:
        with _session() as run:
            next(iter(run))
            run.restore()

    with pytest.raises(StepError, match="call it once, before `for batch in run`"):
        train()
