"""Checks of a trainer class when it is defined: misspelt overrides, and methods that other frameworks call."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from types import CodeType

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
        ("train_dataloader", "val_dataloader", "get_train_dataloader", "get_eval_dataloader", "make_dataset"), _DATA
    ),
    **dict.fromkeys(("train_step", "train_on_batch", "compute_loss", "batch_loss"), _STEP),
    **dict.fromkeys(("val_step", "eval_step", "evaluation_step", "prediction_step"), _EVALUATION),
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


def check_overrides(cls: type, base: type) -> None:
    """Check the methods of a trainer class that nothing in it uses, because only Headway could call them.

    Args:
        cls: a subclass of `base`, just defined.
        base: `Trainer`.

    Raises:
        TypeError: a method has nearly the name of one to override, or the name of another framework's; or an override
            does not accept the arguments that Headway passes. The message says what to define.
    """
    used = set(_names_used(cls, base))
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


def _check_arguments(cls: type, name: str, written: object, ours: object) -> None:
    if not (inspect.isfunction(written) and inspect.isfunction(ours)) or name.startswith("on_"):
        return
    needed = [each for each in inspect.signature(ours).parameters.values() if each.default is each.empty]
    positional = [each.name for each in needed if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(positional) < len(needed):
        return
    try:
        inspect.signature(written).bind(*positional)
    except TypeError as error:
        raise TypeError(
            f"{cls.__qualname__}.{name}({', '.join(inspect.signature(written).parameters)}) must accept the arguments "
            f"({', '.join(positional)}): {error}"
        ) from None


def _names_used(cls: type, base: type) -> Iterator[str]:
    """Yield the names of attributes that the methods of a class use, and those of its bases up to `base`."""
    for each in cls.__mro__:
        if each is not base and not issubclass(base, each):
            for value in vars(each).values():
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
