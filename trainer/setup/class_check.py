"""Checks of a trainer class when it is defined: misspelt overrides, and methods that other frameworks call."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Collection, Iterator
from types import CodeType
from typing import NoReturn

from torch.optim import Optimizer

from ..config import FIELDS_ELSEWHERE
from ..errors import ConfigError, StepError

_DATA = "configure_dataloaders(self), which returns (train, validation)"
_STEP = "training_step(self, batch, batch_idx), which returns the loss"
_EVALUATION = "validation_step(self, batch, batch_idx)"
_OPTIMIZERS = "configure_optimizers(self), which sets self.optimizer and self.scheduler"

OVERRIDABLE = (
    "configure_models", "init_weights", "configure_optimizers", "configure_dataloaders", "prepare_batch",
    "training_step", "validation_step", "configure_metrics", "configure_loss_scaler", "loss_weight", "num_tokens",
    "flops_per_sample", "flops_per_token", "loop", "configure_callbacks", "configure_trackers", "scheduler_interval",
    "scheduler_monitor", "configure_tensor_parallel", "context_parallel_buffers",
)  # fmt: skip
"""What a subclass of `Trainer` may define for Headway to use, apart from hooks."""

FOREIGN = {
    **dict.fromkeys(
        (
            "train_dataloader",
            "val_dataloader",
            "validation_dataloader",
            "get_train_dataloader",
            "get_eval_dataloader",
            "make_dataset",
        ),
        _DATA,
    ),
    **dict.fromkeys(("train_step", "train_on_batch", "compute_loss", "batch_loss", "training_step_end"), _STEP),
    **dict.fromkeys(("val_step", "eval_step", "evaluation_step", "evaluation_loop", "prediction_step"), _EVALUATION),
    **dict.fromkeys(("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"), _OPTIMIZERS),
    **dict.fromkeys(("configure_sharded_model", "setup_model", "build_model"), "configure_models(self)"),
    **dict.fromkeys(("compute_metrics",), "configure_metrics(self), which returns metrics by name"),
    **dict.fromkeys(("training_epoch_end", "train_epoch_end"), "the hook on_epoch_end(self, metrics)"),
    **dict.fromkeys(
        ("validation_epoch_end", "eval_epoch_end", "test_epoch_end"), "the hook on_evaluation_end(self, metrics)"
    ),
    **dict.fromkeys(
        ("test_step", "test_dataloader", "predict_step", "predict_dataloader"),
        "trainer.evaluate(data), which evaluates other data after training",
    ),
    **dict.fromkeys(("build_grad_scaler", "create_scaler"), "configure_loss_scaler(self)"),
    "forward": "training_step(self, batch, batch_idx), and call self.model(...) in it: the trainer is not a module",
    "teardown": "the hook on_fit_end(self, error)",
    "prepare_data": "configure_dataloaders(self), or a script of its own",
    "transfer_batch_to_device": "prepare_batch(self, batch), which gets tensors on the device",
    "configure_gradient_clipping": "config.max_grad_norm or config.max_grad_value",
    "optimizer_step": "self.step(optimizer) inside training_step",
    "optimizer_zero_grad": "nothing: gradients are cleared after each step",
    "lr_scheduler_step": "scheduler_interval, the class attribute that says when schedulers step",
    "automatic_optimization": "self.backward(loss) and self.step(optimizer) inside training_step",
    "get_batch_samples": "loss_weight(self, batch)",
}
"""What Headway has in place of methods and attributes that Lightning, Hugging Face's Trainer and others call."""

ATTRIBUTES_ELSEWHERE = {
    "hparams": "use self.config",
    "args": "use self.config",
    "save_hyperparameters": "the config is recorded with every run",
    "log_dict": "call self.log(name, number) for each, or return a dict from the step",
    "manual_backward": "call self.backward(loss)",
    "toggle_optimizer": "call self.backward(loss) and self.step(optimizer) for each optimizer",
    "untoggle_optimizer": "call self.backward(loss) and self.step(optimizer) for each optimizer",
    "clip_gradients": "set config.max_grad_norm or config.max_grad_value",
    "clip_grad_norm_": "set config.max_grad_norm",
    "accumulate": "set config.gradient_accumulation_steps or config.global_batch_size",
    "zero_grad": "gradients are cleared after each step",
    "no_sync": "gradients are reduced as the strategy needs; see parallel.no_sync",
    "sync_gradients": "use not self.is_accumulating_gradients",
    "gather": "use self.world.all_gather(tensor), or return numbers, which are averaged over all ranks",
    "gather_for_metrics": "return numbers from validation_step, where each row counts once, or use configure_metrics()",
    "prepare": "what the configure_ methods set or return is prepared",
    "wait_for_everyone": "use self.world.barrier()",
    "reduce": "return or log the number, which is averaged over all ranks",
    "unwrap_model": "use self.unwrap(module)",
    "model_wrapped": "use self.model",
    "save_state": "call save_checkpoint()",
    "load_state": "resume with fit(), or fit(resume=path)",
    "skip_first_batches": "a resumed run continues at its next batch",
    "lr_schedulers": "schedulers are attributes, such as self.scheduler",
    "lr_scheduler": "use the attribute that configure_optimizers() sets, such as self.scheduler",
    "control": "call self.request_stop(reason), self.request_save() or self.request_evaluation()",
    "add_callback": "pass callbacks=[...], or define configure_callbacks()",
    "callback_metrics": "metrics are the argument of the hook on_evaluation_end(self, metrics)",
    "logged_metrics": "metrics are the argument of the hook on_evaluation_end(self, metrics)",
    "logger": "call self.log(), or use a tracker (configure_trackers)",
    "loggers": "call self.log(), or use a tracker (configure_trackers)",
    "trainer": "self is the trainer",
    **{
        name: f"use self.model.{name}(...)"
        for name in (
            "parameters",
            "named_parameters",
            "buffers",
            "named_buffers",
            "modules",
            "named_modules",
            "children",
            "named_children",
            "apply",
            "register_buffer",
            "register_parameter",
            "add_module",
            "requires_grad_",
        )
    },
    "freeze": "set config.freeze",
    "unfreeze": "set config.freeze",
    "forward": "call self.model(...)",
    "to": "Headway moves models and batches to self.device",
    "cuda": "Headway moves models and batches to self.device",
    "eval": "use `with trainer.evaluating():`",
    "train": "call fit()",
    "run": "call fit()",
    "validate": "call evaluate()",
    "test": "call evaluate(data)",
    "predict": "call trainer.model in `with trainer.evaluating():`",
    "save_model": "call save_pretrained(folder) or export(file)",
    "is_world_process_zero": "use self.world.is_main",
    "is_global_zero": "use self.world.is_main",
    "is_main_process": "use self.world.is_main",
    "is_local_main_process": "use self.world.local_rank == 0",
    "is_local_process_zero": "use self.world.local_rank == 0",
    "process_index": "use self.world.rank",
    "local_process_index": "use self.world.local_rank",
    "global_rank": "use self.world.rank",
    "local_rank": "use self.world.local_rank",
    "world_size": "use self.world.size",
    "num_processes": "use self.world.size",
    "all_gather": "use self.world.all_gather(tensor)",
    "accelerator": "self has its methods: backward, autocast, print, unwrap",
    "estimated_stepping_batches": "use self.total_steps",
    "num_training_batches": "use self.total_steps",
    "state": "use self.progress",
    "epoch": "use self.current_epoch",
    "iteration": "use self.global_step",
    **dict.fromkeys(
        ("datamodule", "train_dataloader", "val_dataloader", "get_train_dataloader", "get_eval_dataloader"),
        "data come from configure_dataloaders()",
    ),
    **dict.fromkeys(
        ("train_dataset", "eval_dataset", "data_collator", "tokenizer", "processing_class"),
        "set it as an attribute before, for example in configure_dataloaders()",
    ),
}
"""Attributes of trainers of other frameworks, and what to use in their place."""

_IN_A_SESSION = {
    "prepare": "pass model=, optimizer= and data= to Session",
    "clip_gradients": "set config.max_grad_norm or config.max_grad_value, which run.step() applies",
    "clip_grad_norm_": "set config.max_grad_norm, which run.step() applies",
    "gather_for_metrics": "return numbers from validation_step, where each row counts once, or use metrics=",
    "lr_schedulers": "use run.schedulers[name]",
    "lr_scheduler": "use run.schedulers[name]",
    "scheduler": "use run.schedulers[name]",
    "logger": "call run.log(), or use a tracker (trackers=)",
    "loggers": "call run.log(), or use a tracker (trackers=)",
    "add_callback": "pass callbacks=[...] to Session",
    "trainer": "the session has its methods",
    "accelerator": "the session has its methods: accumulate, backward, autocast, print, unwrap",
    "load_state": "call run.restore() before the loop",
    "fit": "write `for batch in run:`",
    "train": "write `for batch in run:`",
    "result": "it is set when the `with` block has been left",
}
"""The same for a `Session`, where it is different."""


class OptimizersByName(dict[str, Optimizer]):
    """The optimizers of a run, by the names of the attributes that hold them."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise, as Lightning's `self.optimizers()` is called here."""
        names = [f"self.{name}" for name in self]
        raise StepError(
            "optimizers is a dict here, and not a method as in Lightning: use the attributes that "
            f"configure_optimizers() set, {' and '.join(names) or 'such as self.optimizer'}, or "
            "run.optimizers[name] in a Session"
        )


def advice_on_attribute(name: str, config_fields: Collection[str], *, in_session: bool) -> str | None:
    """Return what to use in place of an attribute that a run does not have, or None if it is no known one.

    Args:
        name: of the attribute.
        config_fields: the fields of the run's config.
        in_session: whether the run is a `Session`, in place of a `Trainer`.
    """
    if in_session and name in _IN_A_SESSION:
        return _IN_A_SESSION[name]
    advice = ATTRIBUTES_ELSEWHERE.get(name)
    if advice is None and name in config_fields:
        advice = f"use self.config.{name}"
    return advice.replace("self.", "run.") if advice is not None and in_session else advice


ARGUMENTS_ELSEWHERE = {
    **dict.fromkeys(
        ("accelerator", "devices", "num_nodes", "gpus"),
        "start it with torchrun, or by headway fit with scaling.workers",
    ),
    **dict.fromkeys(("default_root_dir", "output_dir", "logging_dir", "project_dir", "save_dir"), "use run_dir"),
    **dict.fromkeys(("logger", "loggers", "log_with", "report_to"), "use trackers"),
    **dict.fromkeys(("enable_progress_bar", "disable_tqdm"), "use show_progress"),
    **dict.fromkeys(
        ("model", "optimizers", "train_dataset", "eval_dataset", "data_collator", "train_dataloader"),
        "they come from the configure_ methods, or use SupervisedTrainer",
    ),
    "args": "use config",
    "resume_from_checkpoint": "use fit(resume=...)",
    "train_loop_config": "use config",
    "run_config": "use an Experiment, of headway.orchestrator",
    "scaling_config": "use an Experiment, of headway.orchestrator",
    "strategy": "use config.parallel.strategy",
}
"""Arguments of trainers of other frameworks, and what to use in their place."""


def check_overrides(cls: type, base: type) -> None:
    """Check the methods of a trainer class that nothing in it uses, because only Headway could call them.

    Args:
        cls: a subclass of `base`, just defined.
        base: `Trainer`.

    Raises:
        TypeError: a method has nearly the name of one to override, or the name of another framework's; or an override
            does not accept the arguments that Headway passes, or clips gradients before there are any. The message
            says what to define.
    """
    used = set(_names_used(cls, base))
    _check_training_step(cls, used)
    for name, each in vars(cls).items():
        if name.startswith(("_", "on_")):
            continue
        if name in OVERRIDABLE:
            _check_arguments(cls, name, each, inspect.getattr_static(base, name))
        elif inspect.isfunction(each) and hasattr(base, name):
            if "super" not in each.__code__.co_names:
                instead = f": define {FOREIGN[name]}" if name in FOREIGN else ", or call it by super()"
                raise TypeError(
                    f"{cls.__qualname__} defines {name}, and would replace the method of {base.__name__}; give it "
                    f"another name{instead}"
                )
        elif name in used or not (inspect.isfunction(each) or name in FOREIGN):
            continue
        elif name in FOREIGN:
            raise TypeError(
                f"{cls.__qualname__} defines {name}, which Headway never calls: define {FOREIGN[name]}. A helper of "
                "your own needs another name, or a call in the class"
            )
        elif near := difflib.get_close_matches(name, OVERRIDABLE, n=1, cutoff=0.88):
            raise TypeError(
                f"{cls.__qualname__} defines {name}, which Headway never calls; did you mean {near[0]}? A helper of "
                "your own needs another name, or a call in the class"
            )


def _check_training_step(cls: type, used: set[str]) -> None:
    """Check a training step for what Headway does around it, and which would be lost or done twice in it.

    Raises:
        TypeError: it clips gradients that do not exist yet.
    """
    step = vars(cls).get("training_step")
    if not inspect.isfunction(step):
        return
    names = set(_names_in(step.__code__))
    if clips := sorted(names & {"clip_grad_norm_", "clip_grad_value_"}):
        field = "max_grad_norm" if "norm" in clips[0] else "max_grad_value"
        if "backward" not in used:
            raise TypeError(
                f"{cls.__qualname__}.training_step calls {clips[0]}, but gradients are computed after it has returned "
                f"the loss: set config.{field} and remove the call"
            )
        warnings.warn(
            f"{cls.__qualname__}.training_step calls {clips[0]}, which clips the gradient of a micro-batch, and not of "
            f"the update if that accumulates several: set config.{field}, or clip in the hook on_gradients_ready()",
            stacklevel=4,
        )
    if "gradient_accumulation_steps" in names:
        warnings.warn(
            f"{cls.__qualname__}.training_step uses gradient_accumulation_steps: return the mean loss of the "
            "micro-batch and do not divide it, because Headway weights it by the micro-batch's share of the update",
            stacklevel=4,
        )


def _check_arguments(cls: type, name: str, written: object, ours: object) -> None:
    if not (inspect.isfunction(written) and inspect.isfunction(ours)) or name.startswith("on_"):
        return
    needed = [each for each in inspect.signature(ours).parameters.values() if each.default is each.empty]
    positional = [each.name for each in needed if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(positional) < len(needed):
        return
    names = list(inspect.signature(written).parameters)
    if name in ("training_step", "validation_step") and names[1:2] == ["model"]:
        # As in Hugging Face's Trainer; the batch would be passed as the model.
        raise TypeError(
            f"{cls.__qualname__}.{name}({', '.join(names)}) must accept the arguments ({', '.join(positional)}): the "
            "model is self.model"
        )
    try:
        inspect.signature(written).bind(*positional)
    except TypeError as error:
        # As in Lightning before 2.0.
        per_optimizer = name == "training_step" and any(each.startswith("optimizer") for each in names)
        remedy = ". For several optimizers, call self.backward(loss) and self.step(optimizer) for each" * per_optimizer
        raise TypeError(
            f"{cls.__qualname__}.{name}({', '.join(names)}) must accept the arguments ({', '.join(positional)}): "
            f"{error}{remedy}"
        ) from None


def _names_used(cls: type, base: type) -> Iterator[str]:
    """Yield the names of attributes that the methods of a class use, and those of its bases up to `base`."""
    for each in cls.__mro__:
        if each is not base and not issubclass(base, each):
            yield from names_used(each)


def names_used(cls: type) -> Iterator[str]:
    """Yield the names of attributes that the methods of a class use; methods of its bases do not count."""
    for value in vars(cls).values():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if inspect.isfunction(function):
            yield from _names_in(function.__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            # getattr(self, "name")
            yield constant


def check_arguments(cls: type, names: Collection[str], config_fields: Collection[str]) -> None:
    """Check the keywords with which a trainer is created.

    Args:
        cls: its class.
        names: of the keywords.
        config_fields: the fields of `TrainerConfig`, which belong into the config.

    Raises:
        ConfigError: no constructor knows a keyword that is a field of the config, or another framework's.
    """
    inits = [vars(base)["__init__"] for base in cls.__mro__ if inspect.isfunction(vars(base).get("__init__"))]
    for name in sorted(set(names) - {each for init in inits for each in inspect.signature(init).parameters}):
        if name in ARGUMENTS_ELSEWHERE:
            raise ConfigError(f"{cls.__name__} has no argument {name}: {ARGUMENTS_ELSEWHERE[name]}")
        if name in config_fields:
            raise ConfigError(
                f"{cls.__name__} has no argument {name}, a field of its config: TrainerConfig({name}=...)"
            )
        if name in FIELDS_ELSEWHERE:
            raise ConfigError(f"{cls.__name__} has no argument {name}: in its config, use {FIELDS_ELSEWHERE[name]}")
