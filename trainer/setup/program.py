"""The user's `configure_` methods, and what they set or return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..callbacks.base import Callback, PlainFunction
from ..distributed.tensor_parallel import Plan
from ..errors import ConfigError
from ..loop.steps import Steps
from ..step.lr_stepping import Interval
from ..trackers.base import Tracker

T = TypeVar("T")


class Program(Steps, Protocol):
    """The user's code: steps, and methods that create models, optimizers and data. `Trainer` implements it.

    The `configure_` methods may set attributes, return objects, or both: see `collect`.
    """

    overrides_init_weights: bool
    overrides_loss_scaler: bool
    may_keep_gradients: bool
    scheduler_interval: Interval | Mapping[str, Interval]
    scheduler_monitor: str | Mapping[str, str]

    def configure_models(self) -> Any:
        """Create the models, on the meta device."""

    def init_weights(self) -> None:
        """Initialize models that were created on the meta device."""

    def configure_tensor_parallel(self) -> Plan:
        """Return how layers are divided over ranks."""

    def configure_optimizers(self) -> Any:
        """Create optimizers and schedulers."""

    def configure_dataloaders(self) -> Any:
        """Create the training data, or (training data, validation data)."""

    def configure_metrics(self) -> Mapping[str, Any]:
        """Return evaluation metrics that are not means."""

    def configure_callbacks(self) -> Sequence[Callback | PlainFunction]:
        """Return callbacks."""

    def configure_trackers(self) -> Sequence[Tracker]:
        """Return trackers."""


def collect(program: object, returned: Any, method: str, kinds: Mapping[str, type]) -> None:
    """Set the objects that a `configure_` method returned as attributes.

    Args:
        program: gets the attributes.
        returned: None; one object; several in a tuple or list, each named by its kind; or a dict of objects by name,
            whose values may be (optimizer, scheduler) pairs: the scheduler of `x` is `x_scheduler`.
        method: its name, for messages.
        kinds: the allowed classes, by the attribute name for a single object.

    Raises:
        ConfigError: it returned something else, or two objects of one kind without names.
    """
    if returned is None:
        return
    named: dict[str, Any] = {}
    groups = returned if isinstance(returned, Mapping) else {"": returned}
    for key, group in groups.items():
        for each in group if isinstance(group, (tuple, list)) else (group,):
            kind = next((name for name, cls in kinds.items() if isinstance(each, cls)), None)
            if kind is None:
                allowed = " or ".join(cls.__name__ for cls in kinds.values())
                foreign = isinstance(each, (list, Mapping)) or key in ("monitor", "interval", "frequency")
                advice = (
                    "; this is the form of Lightning: set self.optimizer and self.scheduler, with the class attributes "
                    "scheduler_interval and scheduler_monitor for the rest"
                    if foreign and method == "configure_optimizers"
                    else ""
                )
                raise ConfigError(
                    f"{method}() returned {type(each).__name__} {' '.join(repr(each).split()):.60}"
                    f"{f' as {key!r}' if key else ''}; return {allowed} objects, a dict of them by name, or nothing if "
                    f"the method sets them as attributes{advice}"
                )
            first = next(iter(kinds))
            name = (key if kind == first else f"{key}_{kind}") if key else kind
            if name in named:
                raise ConfigError(
                    f"{method}(), or {first}= of a Session, returned several objects without names: return a dict, "
                    "such as {'a': ..., 'b': ...}"
                )
            named[name] = each
    for name, each in named.items():
        setattr(program, name, each)


def public_attributes(program: object, kind: type[T]) -> dict[str, T]:
    """Return the public attributes of a type, by name."""
    return {name: each for name, each in vars(program).items() if isinstance(each, kind) and not name.startswith("_")}
