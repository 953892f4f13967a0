"""What can watch a run: `Callback` with all its hooks, and the list of callbacks that the loop calls as one."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ConfigError
from .naming import key_by_class

if TYPE_CHECKING:
    import torch

    from ..trainer import Trainer


class Callback:
    """Watches a run through its hooks, and asks (`trainer.request_stop(reason)`); what a hook returns is ignored.

    Every rank has its own callbacks and calls the same hooks at the same updates. Batch hooks fire for each micro-batch
    of this rank, step hooks for each optimizer update. A method that begins with `on_` and is no hook is a TypeError
    when the class is made. An error that a hook raises ends the run, and says which hook it came from.

    Example:
        >>> class CountUpdates(Callback):
        ...     updates = 0
        ...     def on_step_end(self, trainer):
        ...         self.updates += 1
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_hooks(cls)

    def on_setup_start(self, trainer: Trainer[Any]) -> None:
        """Fires first of all: there is a world and a device, no model yet."""

    def on_models_configured(self, trainer: Trainer[Any]) -> None:
        """Fires after `configure_models`: the models are on the meta device, neither wrapped nor sharded."""

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Fires when models, optimizers, schedulers and data are ready, before a checkpoint is looked for."""

    def on_restored(self, trainer: Trainer[Any]) -> None:
        """Fires after a checkpoint was loaded, and only then."""

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Fires once, before the first update of this attempt, on a fresh and on a resumed run."""

    def on_epoch_start(self, trainer: Trainer[Any]) -> None:
        """Fires before the first batch of an epoch, and again when a resumed run goes on inside one."""

    def on_batch_start(self, trainer: Trainer[Any], batch: Any, batch_idx: int) -> None:
        """Fires before the forward pass of each training micro-batch."""

    def on_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fires after the backward pass of each training micro-batch, with what `training_step` returned."""

    def on_step_start(self, trainer: Trainer[Any]) -> None:
        """Fires before the first micro-batch of each update."""

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        """Fires when the gradients of an update are summed over ranks and unscaled, but not yet clipped."""

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Fires after each update that was applied, when optimizer, scheduler and `global_step` have moved."""

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        """Fires instead of `on_step_end` when an update was not applied; nothing but the data has moved."""

    def on_out_of_memory(self, trainer: Trainer[Any], reason: str) -> None:
        """Fires when an update begins again in smaller micro-batches (`config.halve_on_out_of_memory`), on every rank.

        Batch hooks then fire for all micro-batches of the update; `on_step_start` does not fire again.
        """

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Fires with each record for the trackers: means over the interval and over all ranks, equal on every rank."""

    def on_log_images(self, trainer: Trainer[Any], images: Mapping[str, torch.Tensor]) -> None:
        """Fires when images are logged."""

    def on_evaluation_start(self, trainer: Trainer[Any]) -> None:
        """Fires when an evaluation begins; the models are in evaluation mode already."""

    def on_evaluation_batch_start(self, trainer: Trainer[Any], batch: Any, batch_idx: int) -> None:
        """Fires before `validation_step` sees a batch."""

    def on_evaluation_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fires after `validation_step`, with what it returned."""

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Fires with the metrics of a whole evaluation, equal on every rank; the models are back in training mode."""

    def on_checkpoint_start(self, trainer: Trainer[Any]) -> None:
        """Fires on every rank before the state of this update is taken for a checkpoint, `state_dict` among it."""

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Fires when a checkpoint is committed: it is whole, and a killed run would resume from it.

        One that is saved in the background is of an earlier update: `checkpoint.step`.
        """

    def on_checkpoint_failed(self, trainer: Trainer[Any], error: BaseException) -> None:
        """Fires when a checkpoint could not be written, on every rank, before `error` ends the run.

        What was saved before is untouched. No hook hears of what retention deletes: `headway checkpoints ls` shows
        what there is.
        """

    def on_epoch_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Fires after each epoch, also one in which a stop was asked for, with its training and evaluation means.

        An epoch whose evaluation a stop has cut short ends in the run that goes on, after its evaluation.
        """

    def on_stop_requested(self, trainer: Trainer[Any], reason: str) -> None:
        """Fires once, at the update at which all ranks have agreed to stop."""

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Fires exactly once, in every ending; `error` is what ended the run, or None. All callbacks get it."""

    def evaluation_context(self, trainer: Trainer[Any]) -> AbstractContextManager[object]:
        """Returns a context that is entered around every evaluation and left before `on_evaluation_end`.

        The models are in evaluation mode inside. It is left on an error as well, so what is put back there (weights
        that were swapped, a flag) always is. Contexts of several callbacks nest in their order.
        """
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run must know; an empty dict is not saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes over what `state_dict` returned. Called before `on_restored`."""


PlainFunction: TypeAlias = "Callable[[Trainer[Any], int, Mapping[str, float]], object]"

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def _do_nothing(self: object, *args: object) -> None:
    """What a trainer's own hook does where no subclass defines it."""


class OwnHooks:
    """Gives a trainer's class every hook, without the argument `trainer`, so that a subclass may call `super()`'s."""


for _name_of_hook in HOOKS:
    setattr(OwnHooks, _name_of_hook, _do_nothing)


def check_hooks(cls: type, *, leading: Sequence[str] = ("self", "trainer")) -> None:
    """Refuses a class with a method `on_*` that nothing calls, or that cannot be called as its hook is.

    Args:
        cls: a callback, or a trainer, whose own hooks lack the argument `trainer`.
        leading: the arguments before those of the hook's own.

    Raises:
        TypeError: names the attribute and the nearest hook, or the parameters that the hook needs.
    """
    for name in (name for name in dir(cls) if name.startswith("on_")):
        if name not in HOOKS:
            nearest = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.0)[0]
            raise TypeError(f"{cls.__qualname__} defines {name}, which nothing calls; did you mean {nearest}?")
        written = inspect.getattr_static(cls, name)
        if not inspect.isfunction(written):
            continue
        needed = [*leading, *list(inspect.signature(getattr(Callback, name)).parameters)[2:]]
        try:
            inspect.signature(written).bind(*needed)
        except TypeError as error:
            raise TypeError(
                f"{cls.__qualname__}.{name}({', '.join(inspect.signature(written).parameters)}) cannot be called "
                f"as its hook is, with ({', '.join(needed)}): {error}"
            ) from None


class CallbackList(Callback):
    """All callbacks of a trainer as one callback, in their order; the hooks of the trainer's own class come first.

    A hook that nobody overrides is the no-op of `Callback`, so calling it costs 0.05 microseconds.

    Args:
        callbacks: callbacks, or functions `(trainer, epoch, metrics)` to be called at the end of every epoch.
        trainer: its class may define hooks itself, with the same names and without the argument `trainer`.

    Attributes:
        overridden: names of the hooks that somebody overrides, for a loop that would do work only for a hook.

    Raises:
        ConfigError: one of `callbacks` is neither a callback nor such a function.
    """

    def __init__(self, callbacks: Sequence[Callback | PlainFunction] = (), trainer: object = None) -> None:
        self._callbacks = tuple(_as_callback(callback) for callback in callbacks)
        self._by_key = key_by_class(self._callbacks)
        self.overridden: set[str] = set()
        for hook in HOOKS:
            callees: list[tuple[str, Callable[..., object]]] = []
            own = getattr(trainer, hook, None)
            if own is not None and getattr(own, "__func__", None) is not _do_nothing:
                callees.append((type(trainer).__qualname__, _without_trainer(own)))
            for callback in self._callbacks:
                method = getattr(callback, hook)
                if getattr(method, "__func__", None) is not getattr(Callback, hook):
                    callees.append((_name(callback), method))
            if callees:
                self.overridden.add(hook)
                # Shadows the method, so that the call of the loop goes straight to those that listen.
                setattr(self, hook, (_call_at_end if hook == "on_fit_end" else _call_each)(hook, callees))

        self._contexts = {
            key: (_name(callback), callback.evaluation_context)
            for key, callback in self._by_key.items()
            if getattr(callback.evaluation_context, "__func__", None) is not Callback.evaluation_context
        }

    def evaluation_context(self, trainer: Trainer[Any]) -> AbstractContextManager[object]:
        """Returns the contexts of all callbacks that have one, as one; an error in entering or leaving says whose."""
        return _nested(list(self._contexts.values()), trainer) if self._contexts else nullcontext()

    @contextmanager
    def without_evaluation_context(self, keys: Collection[str]) -> Iterator[None]:
        """Leaves out the contexts of some callbacks, by the names of their states, for the time of a context."""
        before = self._contexts
        self._contexts = {key: each for key, each in before.items() if key not in keys}
        try:
            yield
        finally:
            self._contexts = before

    def with_evaluation_context(self) -> dict[str, Callback]:
        """Returns the callbacks that put a context around evaluations, by the names of their states."""
        return {
            key: callback
            for key, callback in self._by_key.items()
            if type(callback).evaluation_context is not Callback.evaluation_context
        }

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states that are not empty, by class and place among the callbacks of that class: "EMA/0"."""
        states = {key: callback.state_dict() for key, callback in self._by_key.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Gives each callback its state; one without stays fresh, a state without its callback is warned of."""
        if gone := sorted(set(state_dict) - set(self._by_key)):
            warnings.warn(
                f"the checkpoint has the state of callbacks that this run does not have: {', '.join(gone)}",
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


class _AtEpochEnd(Callback):
    """A plain function as a callback."""

    def __init__(self, function: PlainFunction) -> None:
        self.function = function

    def on_epoch_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        # An epoch that a limit or a stop cuts short is not complete, and has a number of its own all the same.
        self.function(trainer, trainer.current_epoch + (trainer.progress.step_in_epoch > 0), metrics)


def _as_callback(candidate: Callback | PlainFunction) -> Callback:
    if isinstance(candidate, Callback):
        return candidate
    if isinstance(candidate, type):
        raise ConfigError(
            f"{candidate.__qualname__} is a class; a callback is an object: {candidate.__qualname__}(...)"
        )
    if callable(candidate):
        try:
            inspect.signature(candidate).bind("trainer", "epoch", "metrics")
        except TypeError as error:
            raise ConfigError(
                f"a function as a callback takes (trainer, epoch, metrics), but {candidate!r}: {error}"
            ) from None
        return _AtEpochEnd(candidate)
    raise ConfigError(f"{candidate!r} is neither a Callback nor a function (trainer, epoch, metrics)")


def _name(callback: Callback) -> str:
    if isinstance(callback, _AtEpochEnd):
        return getattr(callback.function, "__qualname__", repr(callback.function))
    return type(callback).__qualname__


def _without_trainer(method: Callable[..., object]) -> Callable[..., object]:
    return lambda _trainer, *args: method(*args)


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
def _nested(
    contexts: Sequence[tuple[str, Callable[..., AbstractContextManager[object]]]], trainer: Any
) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, make in contexts:
            stack.enter_context(_named(owner, make, trainer))
        yield


@contextmanager
def _named(owner: str, make: Callable[..., AbstractContextManager[object]], trainer: Any) -> Iterator[None]:
    """One callback's context, whose own errors say whose they are, and those of the evaluation do not."""
    inside: BaseException | None = None
    try:
        with make(trainer):
            try:
                yield
            except BaseException as error:
                inside = error
                raise
    except BaseException as error:
        if error is not inside:
            error.add_note(f"raised by {owner}.evaluation_context")
        raise


def _call_at_end(hook: str, callees: Sequence[tuple[str, Callable[..., object]]]) -> Callable[..., None]:
    """Calls all of them whatever happens. The first error is raised, unless the run has one: that gets a note."""

    def call(trainer: Any, error: BaseException | None) -> None:
        first = error
        for owner, method in callees:
            try:
                method(trainer, error)
            except BaseException as raised:
                if first is None:
                    raised.add_note(f"raised by {owner}.{hook}")
                    first = raised
                elif raised is not first:
                    first.add_note(f"besides, {owner}.{hook} raised {type(raised).__name__}: {raised}")
        if error is None and first is not None:
            raise first

    return call
