"""`Callback` with all its hooks, and `CallbackList`, which calls all callbacks of a run."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ConfigError
from .naming import key_by_class

if TYPE_CHECKING:
    import torch


class Callback:
    """Base class of callbacks: hooks that observe a run and can make requests, as in `trainer.request_stop(reason)`.

    Every rank has its own callbacks and calls the same hooks at the same updates; their return values are ignored.
    Batch hooks are called for each micro-batch of this rank, step hooks for each optimizer update. Defining a method
    `on_*` that is not a hook raises TypeError when the class is created. An error in a hook ends the run, with a note
    that names the hook.

    Example:
        >>> class CountUpdates(Callback):
        ...     updates = 0
        ...     def on_step_end(self, trainer):
        ...         self.updates += 1
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_hooks(cls)

    def on_setup_start(self, trainer: Any) -> None:
        """Called first: the world and device exist, the models do not yet."""

    def on_models_configured(self, trainer: Any) -> None:
        """Called after `configure_models`: the models are on the meta device, neither wrapped nor sharded."""

    def on_setup_end(self, trainer: Any) -> None:
        """Called when models, optimizers, schedulers and data are ready, before a checkpoint is restored."""

    def on_restored(self, trainer: Any) -> None:
        """Called after a checkpoint was loaded."""

    def on_fit_start(self, trainer: Any) -> None:
        """Called once, before the first update of this attempt, whether the run is new or resumed."""

    def on_epoch_start(self, trainer: Any) -> None:
        """Called before the first batch of an epoch, and when a run resumes inside one."""

    def on_batch_start(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        """Called before the forward pass of each training micro-batch."""

    def on_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after the backward pass of each training micro-batch, with the result of `training_step`."""

    def on_step_start(self, trainer: Any) -> None:
        """Called before the first micro-batch of each update."""

    def on_gradients_ready(self, trainer: Any) -> None:
        """Called when the gradients of an update are reduced over the ranks and unscaled, but not yet clipped."""

    def on_step_end(self, trainer: Any) -> None:
        """Called after each applied update, when optimizer, scheduler and `global_step` have advanced."""

    def on_step_skipped(self, trainer: Any, reason: str) -> None:
        """Called instead of `on_step_end` if an update was not applied; only the data has advanced."""

    def on_out_of_memory(self, trainer: Any, reason: str) -> None:
        """Called on every rank when an update restarts in smaller micro-batches (`config.halve_on_out_of_memory`).

        Batch hooks are then called for all micro-batches of the update, and `on_step_start` is not called again.
        """

    def on_log(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Called with each record for the trackers: means over the interval and all ranks, equal on every rank."""

    def on_log_images(self, trainer: Any, images: Mapping[str, torch.Tensor]) -> None:
        """Called when images are logged."""

    def on_evaluation_start(self, trainer: Any) -> None:
        """Called when an evaluation begins, with the models in evaluation mode."""

    def on_evaluation_batch_start(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        """Called before `validation_step`."""

    def on_evaluation_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after `validation_step`, with its result."""

    def on_evaluation_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of a complete evaluation, equal on every rank, with the models in training mode."""

    def on_checkpoint_start(self, trainer: Any) -> None:
        """Called on every rank before the state of this update, including each `state_dict`, is captured."""

    def on_checkpoint_saved(self, trainer: Any, checkpoint: Any) -> None:
        """Called when a checkpoint is complete: a run that is killed now resumes from it.

        A checkpoint saved in the background is of an earlier update, `checkpoint.step`.
        """

    def on_checkpoint_failed(self, trainer: Any, error: BaseException) -> None:
        """Called on every rank if a checkpoint could not be written, before `error` ends the run.

        Earlier checkpoints are untouched. Deletions by retention call no hook; `headway checkpoints ls` lists the
        remaining checkpoints.
        """

    def on_epoch_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Called after each epoch, even if a stop cut it short, with its training and evaluation means.

        If a stop interrupts the evaluation of an epoch, the resumed run repeats it and then ends the epoch.
        """

    def on_stop_requested(self, trainer: Any, reason: str) -> None:
        """Called once, at the update at which all ranks have agreed to stop."""

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        """Called exactly once on every callback, however `fit` ends; `error` is what ended the run, or None."""

    def evaluation_context(self, trainer: Any) -> AbstractContextManager[object]:
        """Return a context that is entered around every evaluation and exited before `on_evaluation_end`.

        The models are in evaluation mode inside. It is also exited after an error, so it can restore swapped weights or
        flags. Contexts of several callbacks nest in the callbacks' order.
        """
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; an empty dict is not saved."""
        return {}

    def tensors_changed_by_step(self) -> Iterable[torch.Tensor]:
        """Return the tensors of `state_dict` that change only between the optimizer step and the end of `on_step_end`.

        A background save copies them while training continues, as it copies parameters; it copies other tensors before
        training continues. Tensors that are not sharded must be equal on all ranks.
        """
        return ()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore what `state_dict` returned. Called before `on_restored`."""


PlainFunction: TypeAlias = "Callable[[Any, int, Mapping[str, float]], object]"

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))

HOOKS_ELSEWHERE = {
    **dict.fromkeys(("on_after_backward", "on_before_optimizer_step", "on_pre_optimizer_step"), "on_gradients_ready"),
    **dict.fromkeys(("on_optimizer_step", "on_before_zero_grad"), "on_step_end"),
    **dict.fromkeys(("on_exception", "on_keyboard_interrupt"), "on_fit_end"),
    **dict.fromkeys(
        ("on_save_checkpoint", "on_load_checkpoint"),
        "state_dict(self) and load_state_dict(self, state_dict) of a callback, for values that a resumed run needs",
    ),
    **dict.fromkeys(
        ("on_before_batch_transfer", "on_after_batch_transfer"), "prepare_batch(self, batch), a method of the trainer"
    ),
    **dict.fromkeys(("on_train_start", "on_train_begin"), "on_fit_start"),
    **dict.fromkeys(("on_validation_end", "on_validation_epoch_end", "on_evaluate"), "on_evaluation_end"),
    **dict.fromkeys(
        ("on_validation_start", "on_validation_epoch_start", "on_validation_model_eval"), "on_evaluation_start"
    ),
}
"""What Headway has in place of hooks of Lightning and of Hugging Face's callbacks, if its name is not similar."""


def _do_nothing(self: object, *args: object) -> None:
    """Default of every hook."""


class OwnHooks:
    """Every hook as a method of the trainer, without the argument `trainer`, so that subclasses can call `super()`."""


for _name_of_hook in HOOKS:
    setattr(OwnHooks, _name_of_hook, _do_nothing)


def check_hooks(cls: type, *, leading: Sequence[str] = ("self", "trainer")) -> None:
    """Check that every method `on_*` of a class is a hook, with the hook's parameters.

    Args:
        cls: a callback class, or a trainer class, whose hooks lack the argument `trainer`.
        leading: the parameters that precede the hook's own.

    Raises:
        TypeError: a method is not a hook (the message suggests the nearest one) or has other parameters.
    """
    for name in (name for name in dir(cls) if name.startswith("on_")):
        if name not in HOOKS:
            nearest = HOOKS_ELSEWHERE.get(name) or difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.0)[0]
            raise TypeError(f"{cls.__qualname__} defines {name}, which is not a hook; did you mean {nearest}?")
        written = inspect.getattr_static(cls, name)
        if not inspect.isfunction(written):
            continue
        needed = [*leading, *list(inspect.signature(getattr(Callback, name)).parameters)[2:]]
        try:
            inspect.signature(written).bind(*needed)
        except TypeError as error:
            raise TypeError(
                f"{cls.__qualname__}.{name}({', '.join(inspect.signature(written).parameters)}) must accept the "
                f"arguments of its hook, ({', '.join(needed)}): {error}"
            ) from None


class CallbackList:
    """The callbacks of one run, in order, bound to its trainer: `callbacks.on_step_end()` calls each of them.

    Hooks of the trainer's own class come first. A hook without overrides costs 0.05 microseconds.

    Args:
        callbacks: `Callback` objects, or functions `(trainer, epoch, metrics)` called at the end of every epoch.
        trainer: the `Trainer` or `Session` passed to the hooks. Its class may define hooks too, under the same names
            and without the argument `trainer`.

    Attributes:
        overridden: names of the overridden hooks; a loop can skip work that only a hook needs.

    Raises:
        ConfigError: one of `callbacks` is neither a `Callback` nor a function of these arguments.
    """

    def __init__(self, callbacks: Sequence[Callback | PlainFunction] = (), trainer: object = None) -> None:
        self._callbacks = tuple(_as_callback(callback) for callback in callbacks)
        self._trainer = trainer
        self._by_key = key_by_class(self._callbacks)
        self.has_dropped_states = False
        self.overridden: set[str] = set()
        for hook in HOOKS:
            callees: list[tuple[str, Callable[..., object]]] = []
            own = getattr(trainer, hook, None)
            if own is not None and getattr(own, "__func__", None) is not _do_nothing:
                callees.append((type(trainer).__qualname__, own))
            for callback in self._callbacks:
                if _overrides(callback, hook):
                    callees.append((_name(callback), partial(getattr(callback, hook), trainer)))
            if callees:
                self.overridden.add(hook)
                setattr(self, hook, (_call_at_end if hook == "on_fit_end" else _call_each)(hook, callees))
        self._contexts = self.with_evaluation_context()

    if TYPE_CHECKING:

        def __getattr__(self, hook: str) -> Callable[..., None]: ...

    def tensors_changed_by_step(self) -> list[torch.Tensor]:
        """Return the tensors of all callbacks that change only when an optimizer steps."""
        return [tensor for each in self._callbacks for tensor in each.tensors_changed_by_step()]

    def may_keep_gradients(self) -> bool:
        """Return whether a hook of the user's gets the gradients, and may keep or replace them."""
        own = getattr(self._trainer, "on_gradients_ready", _do_nothing)
        others = [each for each in self._callbacks if not type(each).__module__.startswith(__package__)]
        return getattr(own, "__func__", own) is not _do_nothing or any(
            _overrides(each, "on_gradients_ready") for each in others
        )

    def have_own_state(self) -> bool:
        """Return whether a callback of the user's returns state for checkpoints."""
        others = [each for each in self._callbacks if not type(each).__module__.startswith(__package__)]
        return any(_overrides(each, "state_dict") for each in others)

    def evaluation_context(self) -> AbstractContextManager[object]:
        """Return the nested contexts of all callbacks; errors on entry or exit get a note that names the callback."""
        return _nested(self._contexts.values(), self._trainer) if self._contexts else nullcontext()

    @contextmanager
    def without_evaluation_context(self, keys: Collection[str]) -> Iterator[None]:
        """Leave out the evaluation contexts of some callbacks, by state key, inside this context."""
        before = self._contexts
        self._contexts = {key: each for key, each in before.items() if key not in keys}
        try:
            yield
        finally:
            self._contexts = before

    def with_evaluation_context(self) -> dict[str, Callback]:
        """Return the callbacks that override `evaluation_context`, by state key."""
        return {key: each for key, each in self._by_key.items() if _overrides(each, "evaluation_context")}

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Return the states that are not empty, keyed by `key_by_class`, as in "Ema/0"."""
        states = {key: callback.state_dict() for key, callback in self._by_key.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore each callback that has a state in the checkpoint.

        Warns about states without a callback, and callbacks that should have a state.
        """
        gone = sorted(set(state_dict) - set(self._by_key))
        self.has_dropped_states = bool(gone)
        if gone:
            warnings.warn(
                f"the checkpoint has states of callbacks that this run does not have: {', '.join(gone)}",
                stacklevel=2,
            )
        if new := sorted(key for key in self.state_dict() if key not in state_dict):
            warnings.warn(
                f"the checkpoint has no state of {', '.join(new)}: added, renamed or moved callbacks start without one",
                stacklevel=2,
            )
        for key, callback in self._by_key.items():
            if key in state_dict:
                try:
                    callback.load_state_dict(state_dict[key])
                except Exception as error:
                    error.add_note(
                        f"raised by {_name(callback)}.load_state_dict, for the state {key!r} of the checkpoint"
                    )
                    raise


for _name_of_hook in HOOKS:
    setattr(CallbackList, _name_of_hook, _do_nothing)


class _AtEpochEnd(Callback):
    """A plain function as a callback."""

    def __init__(self, function: PlainFunction) -> None:
        self.function = function

    def on_epoch_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        # An incomplete epoch counts as one.
        self.function(trainer, trainer.current_epoch + (trainer.progress.step_in_epoch > 0), metrics)


def _as_callback(candidate: Callback | PlainFunction) -> Callback:
    if isinstance(candidate, Callback):
        return candidate
    if isinstance(candidate, type):
        raise ConfigError(
            f"callbacks must be instances, but {candidate.__qualname__} is a class: use {candidate.__qualname__}(...)"
        )
    if callable(candidate):
        try:
            inspect.signature(candidate).bind("trainer", "epoch", "metrics")
        except TypeError as error:
            raise ConfigError(
                f"a callback function must accept (trainer, epoch, metrics), but {candidate!r}: {error}"
            ) from None
        return _AtEpochEnd(candidate)
    raise ConfigError(f"callbacks must be Callback objects or functions (trainer, epoch, metrics), got {candidate!r}")


def _name(callback: Callback) -> str:
    if isinstance(callback, _AtEpochEnd):
        return getattr(callback.function, "__qualname__", repr(callback.function))
    return type(callback).__qualname__


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)


def _call_each(hook: str, callees: Sequence[tuple[str, Callable[..., object]]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for owner, method in callees:
            try:
                method(*args)
            except BaseException as error:
                error.add_note(f"raised by {owner}.{hook}")
                raise

    return call


@contextmanager
def _nested(callbacks: Collection[Callback], trainer: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for callback in callbacks:
            stack.enter_context(_named(callback, trainer))
        yield


@contextmanager
def _named(callback: Callback, trainer: Any) -> Iterator[None]:
    """Enter one callback's context; add a note to errors of the context itself, not to those from inside it."""
    inside: BaseException | None = None
    try:
        with callback.evaluation_context(trainer):
            try:
                yield
            except BaseException as error:
                inside = error
                raise
    except BaseException as error:
        if error is not inside:
            error.add_note(f"raised by {_name(callback)}.evaluation_context")
        raise


def _call_at_end(hook: str, callees: Sequence[tuple[str, Callable[..., object]]]) -> Callable[..., None]:
    """Call all of them, even after errors. Raise the first error, or add it as a note to the run's own error."""

    def call(error: BaseException | None) -> None:
        first = error
        for owner, method in callees:
            try:
                method(error)
            except BaseException as raised:
                if first is None:
                    raised.add_note(f"raised by {owner}.{hook}")
                    first = raised
                elif raised is not first:
                    first.add_note(f"{owner}.{hook} also raised {type(raised).__name__}: {raised}")
        if error is None and first is not None:
            raise first

    return call
