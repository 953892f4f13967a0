"""Natural mistakes of people who come from plain PyTorch, Lightning or Hugging Face are refused with the way out."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from headway.trainer import (
    ConfigError,
    ParallelConfig,
    Session,
    StepError,
    SupervisedTrainer,
    Trainer,
    TrainerConfig,
    World,
)
from headway.trainer.callbacks import EarlyStopping
from tests.tiny import Rows, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


def _fit(cls: type[TinyTrainer], **config: Any) -> None:
    cls(TinyConfig(**{"max_steps": 4, "log_every": 1, **config}), world=ALONE).fit()


def _nothing(self: Any, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("configure_optimizer", "did you mean configure_optimizers?"),
        ("valdation_step", "did you mean validation_step?"),
        ("traning_step", "did you mean training_step?"),
        ("configure_model", "did you mean configure_models?"),
        ("configure_dataloader", "did you mean configure_dataloaders?"),
        ("init_weight", "did you mean init_weights?"),
        ("train_dataloader", r"define configure_dataloaders\(self\), which returns \(train, validation\)"),
        ("val_dataloader", "define configure_dataloaders"),
        ("get_train_dataloader", "define configure_dataloaders"),
        ("val_step", "define validation_step"),
        ("compute_loss", "define training_step"),
        ("create_optimizer", "define configure_optimizers"),
        ("test_step", r"define trainer\.evaluate\(data\)"),
        ("optimizer_step", r"define self\.step\(optimizer\) inside training_step"),
        ("validation_epoch_end", "define the hook on_evaluation_end"),
        ("validation_dataloader", "define configure_dataloaders"),
        ("training_step_end", "define training_step"),
        ("evaluation_loop", "define validation_step"),
        ("forward", r"define training_step.*call self\.model\(\.\.\.\) in it"),
        ("teardown", r"define the hook on_fit_end\(self, error\)"),
    ],
)
def test_a_method_that_nobody_calls_is_refused_when_the_class_is_defined(name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"^Wrong defines {name}, which Headway never calls.*{advice}"):
        type("Wrong", (TinyTrainer,), {name: _nothing})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("on_after_backward", r"on_gradients_ready\?"),
        ("on_before_optimizer_step", r"on_gradients_ready\?"),
        ("on_optimizer_step", r"on_step_end\?"),
        ("on_validation_epoch_end", r"on_evaluation_end\?"),
        ("on_train_begin", r"on_fit_start\?"),
        ("on_exception", r"on_fit_end\?"),
        ("on_after_batch_transfer", r"prepare_batch\(self, batch\)"),
        ("on_save_checkpoint", r"state_dict\(self\) and load_state_dict\(self, state_dict\) of a callback"),
    ],
)
def test_a_hook_of_another_framework_names_the_one_to_use(name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"^Wrong defines {name}, which is not a hook; did you mean {advice}"):
        type("Wrong", (TinyTrainer,), {name: _nothing})


@pytest.mark.parametrize("method", ["configure_callbacks", "configure_trackers"])
@pytest.mark.parametrize("returned", [None, EarlyStopping("validation/loss")])
def test_a_single_callback_or_none_in_place_of_a_list_is_refused(method: str, returned: Any) -> None:
    wrong = type("Wrong", (TinyTrainer,), {method: lambda self: returned})
    with pytest.raises(ConfigError, match=rf"^{method}\(\) must be a list, which may be empty, got "):
        _fit(wrong)


def test_a_single_callback_as_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^callbacks must be a list, which may be empty, got .*EarlyStopping"):
        TinyTrainer(TinyConfig(max_steps=1), world=ALONE, callbacks=EarlyStopping("validation/loss"))  # type: ignore[arg-type]


def test_a_metric_object_that_is_logged_is_told_where_metrics_belong() -> None:
    class Logs(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("accuracy", torchmetrics.MeanMetric())  # type: ignore[arg-type]
            return super().training_step(batch, batch_idx)

    with pytest.raises(StepError, match=r"MeanMetric.* as 'train/accuracy'.*return such an object from configure_metr"):
        _fit(Logs)


class Forwards(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.right = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.right((self.model(batch["x"]).argmax(1) == batch["y"]).float())}


class CountsForever(Forwards):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        right = (self.model(batch["x"]).argmax(1) == batch["y"]).float()
        self.right.update(right)
        return {"loss": 1 - right.mean(), "right": self.right.compute()}


class ResetsIt(CountsForever):
    def on_evaluation_start(self) -> None:
        self.right.reset()


def test_a_metric_object_that_nothing_resets_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"self\.right is a torchmetrics object that nothing resets, .*configure_metri"
    ):
        _fit(CountsForever)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _fit(ResetsIt)
        _fit(Forwards)


def test_a_data_module_is_told_to_return_its_loaders() -> None:
    class Module:
        def train_dataloader(self) -> list[Any]:
            return []

    wrong = type("Wrong", (TinyTrainer,), {"configure_dataloaders": lambda self: Module()})
    with pytest.raises(ConfigError, match=r"a data module: call .*return \(module\.train_dataloader\(\), module\.val_"):
        _fit(wrong)


def test_an_attribute_of_lightning_is_refused_too() -> None:
    with pytest.raises(TypeError, match=r"defines automatic_optimization.*self\.backward\(loss\)"):
        type("Wrong", (TinyTrainer,), {"automatic_optimization": False})


def test_a_helper_that_the_class_uses_may_have_any_name() -> None:
    class Helps(TinyTrainer):
        def compute_loss(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(self.model(batch["x"]), batch["y"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.compute_loss(batch)

        @staticmethod
        def configure_optimizer(model: nn.Module) -> Any:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        def configure_optimizers(self) -> None:
            self.optimizer = self.configure_optimizer(self.model)

    _fit(Helps)


def test_a_method_that_would_replace_one_of_ours_is_refused() -> None:
    with pytest.raises(TypeError, match=r"defines train_step, and would replace the method of Trainer.*training_step"):
        type("Wrong", (TinyTrainer,), {"train_step": _nothing})

    class Extends(TinyTrainer):
        def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
            return super().evaluate(*args, **options)


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_a_step_with_the_arguments_of_hugging_face_is_refused(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"Wrong\.{name}\(self, model, inputs, num_items\) must .* the model is self\.model"
    ):
        type("Wrong", (TinyTrainer,), {name: lambda self, model, inputs, num_items=None: None})


class Output(dict[str, Any]):
    """Like the output of a Hugging Face model."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("cannot be updated")


def test_the_whole_output_of_a_model_is_refused_with_the_name_of_what_is_no_number() -> None:
    class Whole(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch["x"])
            return Output(loss=F.cross_entropy(logits, batch["y"]), logits=logits)

    with pytest.raises(StepError, match=r"returned a tensor of shape .* as 'train/logits', which must be a number"):
        _fit(Whole)


class Wraps:
    """Like Accelerate's AcceleratedScheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None: ...


class Halves:
    """Halves the learning rate, but is no scheduler of torch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def test_a_scheduler_that_headway_would_not_step_is_refused_or_warned_of() -> None:
    class Wrapped(TinyTrainer):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            self.scheduler = Wraps(torch.optim.lr_scheduler.StepLR(self.optimizer, 1))

    class Own(TinyTrainer):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            self.rates = Halves(self.optimizer)

    class Steps(Own):
        def on_step_end(self) -> None:
            self.rates.step()

    with pytest.raises(
        ConfigError, match=r"self\.scheduler is a Wraps around a StepLR, .*without accelerator\.prepare"
    ):
        _fit(Wrapped)
    with pytest.warns(UserWarning, match=r"self\.rates is a Halves, .* neither steps nor saves it"):
        _fit(Own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _fit(Steps)


@pytest.mark.parametrize("part", ["model", "model.first"])
def test_a_model_that_is_trained_in_evaluation_mode_is_warned_of(part: str) -> None:
    class Pretrained(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self.model.first = nn.Sequential(nn.Linear(6, 9), nn.Dropout(self.config.dropout))
            self.model.get_submodule(part.removeprefix("model").removeprefix(".")).eval()

    with pytest.warns(UserWarning, match=rf"^{part} is trained in evaluation mode, .* Call its train\(\) in"):
        _fit(Pretrained, dropout=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _fit(Pretrained, dropout=0.0)


@pytest.mark.parametrize("name", ["accumulate", "gather_for_metrics", "toggle_optimizer", "clip_gradients", "prepare"])
def test_an_attribute_of_another_framework_names_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': "):
        getattr(TinyTrainer(TinyConfig(max_steps=1), world=ALONE), name)


def test_the_optimizers_of_lightning_are_called_in_vain() -> None:
    class Manual(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (optimizer,) = self.optimizers()  # type: ignore[operator]
            return optimizer

    with pytest.raises(StepError, match=r"optimizers is a dict here, .*: use .* self\.optimizer, or"):
        _fit(Manual)


def test_what_other_trainers_have_names_what_to_use() -> None:
    trainer = TinyTrainer(TinyConfig(max_steps=1), world=ALONE)
    for name, advice in [
        ("max_epochs", r"use self\.config\.max_epochs"),
        ("zero_grad", "gradients are cleared after each step"),
        ("register_buffer", r"use self\.model\.register_buffer\("),
        ("unwrap_model", r"use self\.unwrap\("),
        ("train_dataset", "set it as an attribute before"),
    ]:
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {advice}"):
            getattr(trainer, name)
    with pytest.raises(StepError, match=r"should_stop cannot be set, .* call request_stop\(reason\)"):
        trainer.should_stop = True


def test_what_an_accelerator_has_names_what_a_session_has() -> None:
    config = TrainerConfig(max_steps=1)
    loader = DataLoader(Rows(8), batch_size=4)
    run = Session(config, model=nn.Linear(6, 3), optimizer=lambda m: SGD(m.parameters(), lr=0.1), data=loader)
    for name, advice in [
        ("prepare", "pass model=, optimizer= and data= to Session"),
        ("clip_grad_norm_", r"set config\.max_grad_norm"),
        ("is_main_process", r"use run\.world\.is_main"),
        ("load_state", r"call run\.restore\(\)"),
        ("colour", "models, optimizers and data exist in the `with` block"),
    ]:
        with pytest.raises(AttributeError, match=f"'Session' object has no attribute '{name}'.*: {advice}"):
            getattr(run, name)


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_a_step_without_batch_idx_is_refused(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"Wrong\.{name}\(self, batch\) must accept the arguments \(self, batch, batch_"
    ):
        type("Wrong", (TinyTrainer,), {name: lambda self, batch: None})


def test_a_step_for_one_of_several_optimizers_is_told_how_to_step_them() -> None:
    with pytest.raises(TypeError, match=r"missing a required argument: 'optimizer_idx'\. For several .* self\.step\("):
        type("Gan", (TinyTrainer,), {"training_step": lambda self, batch, batch_idx, optimizer_idx: None})


@pytest.mark.parametrize(
    ("field", "advice"),
    [
        ("max_step", "did you mean max_steps"),
        ("num_train_epochs", "use max_epochs"),
        ("gradient_clip_val", "use max_grad_norm"),
        ("accumulate_grad_batches", "use gradient_accumulation_steps"),
        ("strategy", r"use parallel=ParallelConfig\(strategy=...\)"),
        ("colour", "a field of your own belongs to a subclass; Headway's are max_epochs,"),
    ],
)
def test_an_unknown_field_names_the_nearest(field: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"TrainerConfig has no field '{field}': {advice}"):
        TrainerConfig(**{field: 1})
    with pytest.raises(ConfigError, match="ParallelConfig has no field 'stratgy': did you mean strategy"):
        ParallelConfig(stratgy="ddp")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="shard_modules must be a list of class names, got None"):
        ParallelConfig(shard_modules=None)  # type: ignore[arg-type]


def test_a_config_without_its_decorator_is_refused() -> None:
    class Plain(TrainerConfig):
        learning_rate: float = 0.1

    with pytest.raises(ConfigError, match=r"no field 'learning_rate': it is declared, but the class is no dataclass"):
        Plain(learning_rate=0.2)  # type: ignore[call-arg]

    class Silent(TinyConfig):
        depth: int = 3

    with pytest.raises(ConfigError, match=r"Silent declares depth, but is no dataclass: write @dataclass\(frozen"):
        TinyTrainer(Silent(max_steps=1), world=ALONE)


def test_a_config_may_have_an_init_of_its_own() -> None:
    @dataclass(frozen=True, kw_only=True, init=False)
    class Own(TinyConfig):
        def __init__(self, *, rate: float, **fields: Any) -> None:
            super().__init__(learning_rate=rate, **fields)

    assert Own(rate=0.5, max_steps=1).learning_rate == 0.5


def test_a_trainer_without_super_init_says_so() -> None:
    class Forgets(TinyTrainer):
        def __init__(self, config: TinyConfig) -> None:
            self.config = config

    with pytest.raises(ConfigError, match=r"Forgets\.__init__ does not call super\(\)\.__init__\(config, \.\.\.\)"):
        Forgets(TinyConfig(max_steps=1)).fit()
    with pytest.raises(AttributeError, match="'Forgets' object has no attribute 'colour'"):
        _ = Forgets(TinyConfig(max_steps=1)).colour  # type: ignore[attr-defined]


def test_data_and_models_are_not_arguments_of_fit() -> None:
    with pytest.raises(ConfigError, match=r"fit\(\) takes no DataLoader: return models, data and optimizers from"):
        TinyTrainer(TinyConfig(max_steps=1), world=ALONE).fit(DataLoader(Rows(8)))
    with pytest.raises(ConfigError, match=r"SupervisedTrainer takes its arguments by name: SupervisedTrainer\(model="):
        SupervisedTrainer(nn.Linear(6, 3), TrainerConfig(max_steps=1))  # type: ignore[call-arg]


def test_the_arguments_of_lightnings_log_are_refused() -> None:
    class Logs(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
            self.log("loss_too", loss, prog_bar=True, on_step=True)
            return loss

    with pytest.raises(StepError, match=r"log\(\) has no argument prog_bar, on_step: values are averaged"):
        _fit(Logs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda each: (each, each, each), r"returned a tuple of 3: return \(train, validation\); several"),
        (lambda each: [each, each, each], "returned a list of 3"),
        (lambda each: {"train": each, "val": each}, r"returned a dict of 2.*StackDataset\(a=..., b=...\)"),
        (lambda each: (each,), "returned a tuple of 1"),
    ],
)
def test_loaders_that_are_not_a_pair_are_refused(make: Any, message: str) -> None:
    class Wrong(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            return make(DataLoader(Rows(16), batch_size=4))

    with pytest.raises(ConfigError, match=message):
        _fit(Wrong)


def test_a_pair_may_be_a_list() -> None:
    class Lists(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            return [DataLoader(Rows(16), batch_size=4), DataLoader(Rows(8), batch_size=4)]

    trainer = Lists(TinyConfig(max_steps=4), world=ALONE)
    assert "validation/loss" in trainer.fit().metrics


class ByHand(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        self.by_hand(loss, batch_idx)
        return loss

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        raise NotImplementedError


class StepsScheduler(ByHand):
    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        self.scheduler.step()


class StepsSchedulerAtEpochs(TinyTrainer):
    def on_epoch_end(self, metrics: Any) -> None:
        self.scheduler.step()


class StepsOptimizer(ByHand):
    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        self.optimizer.step()


class RunsBackward(ByHand):
    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        loss.backward(retain_graph=True)


class StepsInBackward(TinyTrainer):
    """Each parameter's gradient is used and dropped during the backward pass, to save memory."""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        for parameter in self.model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)

            def step(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)


class SetsGradients(TinyTrainer):
    """Gradients that the user's code computes, as PCGrad does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        self.step(self.optimizer)


class ClearsGradients(ByHand):
    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        self.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("cls", "config", "message"),
    [
        (StepsScheduler, {}, r"^self\.scheduler\.step\(\) was called, but Headway steps the schedulers"),
        (StepsSchedulerAtEpochs, {"max_steps": 30}, r"^self\.scheduler\.step\(\) was called"),
        (StepsOptimizer, {}, r"^self\.optimizer\.step\(\) was called, but Headway steps the optimizers"),
        (RunsBackward, {}, r"changed gradients by loss\.backward\(\) or zero_grad\(\): return the loss"),
        (ClearsGradients, {"gradient_accumulation_steps": 2}, "changed gradients by loss"),
        (StepsInBackward, {}, "no parameter of the optimizer got a gradient.*hook.*steps an optimizer itself: remove"),
        (SetsGradients, {}, r"step\(optimizer\) was called without backward\(loss\).*Pass gradients that you compute"),
    ],
)
def test_what_headway_does_is_not_done_twice(cls: type[TinyTrainer], config: dict[str, Any], message: str) -> None:
    with pytest.raises(StepError, match=message):
        _fit(cls, **config)


def test_clearing_gradients_where_there_are_none_is_harmless() -> None:
    _fit(ClearsGradients)


def test_early_stopping_on_a_name_of_lightnings_names_ours() -> None:
    with pytest.raises(ConfigError, match="begin with 'validation/': did you mean 'validation/loss'"):
        TinyTrainer(
            TinyConfig(max_steps=4, log_every=1), world=ALONE, callbacks=[EarlyStopping("val_loss", patience=1)]
        ).fit()


def test_a_scheduler_may_be_restored_and_go_on(tmp_path: Any) -> None:
    for steps in (6, 12):
        trainer = TinyTrainer(TinyConfig(max_steps=steps), run_dir=tmp_path / "run", world=ALONE)
        assert trainer.fit().steps == steps
    assert isinstance(trainer, Trainer)


def _with(**methods: Any) -> type[TinyTrainer]:
    return type("Mistaken", (TinyTrainer,), methods)


def _hides_a_layer(self: Any) -> None:
    net = nn.Sequential(nn.Linear(6, 3))
    net.more = [nn.Linear(3, 3)]
    self.model = net


def _schedules_another(self: Any) -> None:
    self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
    self.scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(self.model.parameters(), lr=0.1), 1)


def _wraps_for_several_gpus(self: Any) -> None:
    self.model = nn.DataParallel(nn.Linear(6, 3))


def _is_lazy(self: Any) -> None:
    self.model = nn.Sequential(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (
            _with(configure_optimizers=_schedules_another),
            ConfigError,
            "self.scheduler is a scheduler of an optimizer that",
        ),
        (_with(configure_models=_wraps_for_several_gpus), ConfigError, "model is already wrapped in DataParallel"),
        (_with(configure_models=_is_lazy), ConfigError, "model.0 is a LazyLinear, whose shape is unknown"),
        (
            _with(configure_metrics=lambda self: [print]),
            ConfigError,
            r"configure_metrics\(\) returned a list: return a",
        ),
        (
            _with(loss_weight=lambda self, batch: -1.0),
            StepError,
            "loss_weight of Mistaken returned -1.0; it must be >= 0",
        ),
        (_with(on_step_start=lambda self: self.log(3, 1.0)), StepError, r"log\(\) takes a name and a number, got 3"),
    ],
)
def test_what_would_train_otherwise_or_fail_without_a_reason_is_refused(
    cls: type[TinyTrainer], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _fit(cls)


def _trains_half(self: Any) -> None:
    self.optimizer = torch.optim.SGD(self.model.blocks.parameters(), lr=0.1)


def _trains_twice(self: Any) -> None:
    self.first = torch.optim.SGD(self.model.parameters(), lr=0.1)
    self.second = torch.optim.SGD(self.model.last.parameters(), lr=0.1)


def _ends_in_evaluation(self: Any, batch: Any, batch_idx: int) -> Any:
    self.model.eval()
    return TinyTrainer.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (_with(configure_models=_hides_a_layer), "model.more is a list of modules, which are neither trained, moved"),
        (
            _with(configure_optimizers=_trains_half),
            "model.first.weight and 3 more can be trained, but no optimizer has",
        ),
        (
            _with(configure_optimizers=_trains_twice),
            "model.last.weight and 1 more is in several optimizers, and each updates it",
        ),
        (_with(training_step=_ends_in_evaluation), "training_step left model in evaluation mode"),
    ],
)
def test_what_plain_pytorch_does_in_silence_is_a_warning(cls: type[TinyTrainer], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        _fit(cls)


@pytest.mark.filterwarnings("error")
def test_right_code_is_not_warned_of() -> None:
    class Adversaries(TinyTrainer):
        """Two models with an optimizer each, a frozen one, and one that is shared without being registered again."""

        def configure_models(self) -> None:
            super().configure_models()
            self.critic = nn.Linear(3, 1)
            self.teacher = nn.Linear(6, 3).requires_grad_(False)
            self.model.shares = [self.model.last]

        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            self.other = torch.optim.SGD(self.critic.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch["x"])
            return F.cross_entropy(logits, batch["y"]) + self.critic(logits).mean() + 0 * self.teacher(batch["x"]).sum()

    _fit(Adversaries)


def test_models_before_setup_are_an_error_that_says_when_they_exist() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'model' yet: models, optimizers and data exist after setup"
    ):
        _ = TinyTrainer(TinyConfig(max_steps=1), world=ALONE).model
