"""Callbacks: each hook is called, misspelt hooks are errors, errors name their source, states reach their owners."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headway.trainer.callbacks.base import HOOKS, Callback, CallbackList, check_hooks
from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Progress

DESIGN = """
on_setup_start, on_models_configured, on_setup_end, on_restored, on_fit_start, on_epoch_start,
on_batch_start, on_batch_end, on_step_start, on_gradients_ready, on_step_end, on_step_skipped,
on_out_of_memory, on_log, on_log_images, on_evaluation_start, on_evaluation_batch_start, on_evaluation_batch_end,
on_evaluation_end, on_checkpoint_start, on_checkpoint_saved, on_checkpoint_failed,
on_epoch_end, on_stop_requested, on_fit_end"""


class Recorder(Callback):
    """Records the end of each update."""

    def __init__(self, name: str = "", log: list[Any] | None = None) -> None:
        self.name = name
        self.log: list[Any] = [] if log is None else log

    def on_step_end(self, trainer: Any) -> None:
        self.log.append((self.name, trainer))

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        self.log.append((self.name, error))

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name} if self.name else {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.name = state_dict["name"]


class Broken(Callback):
    def on_step_end(self, trainer: Any) -> None:
        raise TypeError("bad operand")

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        raise OSError("disk full")

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise KeyError("nothing here")


def test_hooks_are_those_of_the_design() -> None:
    assert tuple(re.findall(r"on_\w+", DESIGN)) == HOOKS


def test_every_hook_of_every_callback_is_called_in_order_with_all_arguments() -> None:
    calls: list[Any] = []
    arguments = {"on_batch_end": ("outputs", "batch", 3), "on_fit_end": (None,), "on_log": ({"a": 1.0},)}
    methods: dict[str, Any] = {}
    for hook in HOOKS:
        methods[hook] = lambda self, trainer, *args, hook=hook: calls.append((id(self), hook, trainer, args))
    spy = type("Spy", (Callback,), methods)
    first, second = spy(), spy()
    callbacks = CallbackList([first, second], trainer="trainer")
    for hook in HOOKS:
        getattr(callbacks, hook)(*arguments.get(hook, ()))
    expected = [(id(spy), hook, "trainer", arguments.get(hook, ())) for hook in HOOKS for spy in (first, second)]
    assert calls == expected
    assert callbacks.overridden == set(HOOKS)


def test_misspelt_hook_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="defines on_step_ended, which is not a hook; did you mean on_step_end"):

        class Ema(Callback):
            def on_step_ended(self, trainer: Any) -> None: ...


def test_misspelt_hook_of_a_mixin_is_an_error_too() -> None:
    class Mixin:
        def on_epoch_ends(self, trainer: Any) -> None: ...

    with pytest.raises(TypeError, match="did you mean on_epoch_end"):

        class Both(Mixin, Callback): ...


def test_hook_with_too_few_parameters_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(
        TypeError, match=r"on_epoch_end\(self, trainer\).*its hook, \(self, trainer, metrics\).*too many"
    ):

        class Old(Callback):
            def on_epoch_end(self, trainer: Any) -> None: ...  # type: ignore[override]


def test_hooks_may_take_any_arguments_and_further_defaults() -> None:
    class Spy(Callback):
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None: ...

        def on_step_end(self, trainer: Any, verbose: bool = False) -> None: ...

    assert CallbackList([Spy()]).overridden == {"on_epoch_end", "on_step_end"}


def test_two_instances_of_one_class_both_run() -> None:
    log: list[Any] = []
    CallbackList([Recorder("a", log), Recorder("b", log)], trainer="trainer").on_step_end()
    assert log == [("a", "trainer"), ("b", "trainer")]


def test_function_object_and_trainer_method_work_together() -> None:
    seen: list[Any] = []

    class Fake:
        current_epoch = 4
        progress = Progress()

        def on_epoch_end(self, metrics: Any) -> None:
            seen.append(("method", metrics))

    class Spy(Callback):
        def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
            seen.append(("object", metrics))

    trainer: Any = Fake()
    callbacks = CallbackList(
        [lambda trainer, epoch, metrics: seen.append(("function", epoch, metrics)), Spy()], trainer
    )
    callbacks.on_epoch_end({"loss": 1.0})
    assert seen == [("method", {"loss": 1.0}), ("function", 4, {"loss": 1.0}), ("object", {"loss": 1.0})]


def test_hooks_of_a_trainer_class_are_guarded_as_well() -> None:
    class Misspelt:
        def on_step_ended(self) -> None: ...

    class WithTrainer:
        def on_step_end(self, trainer: Any) -> None: ...

    with pytest.raises(TypeError, match="did you mean on_step_end"):
        check_hooks(Misspelt, leading=("self",))
    with pytest.raises(TypeError, match=r"its hook, \(self\): missing a required argument: 'trainer'"):
        check_hooks(WithTrainer, leading=("self",))


def test_error_of_a_hook_names_callback_and_hook() -> None:
    with pytest.raises(TypeError, match="bad operand") as caught:
        CallbackList([Recorder(), Broken()]).on_step_end()
    assert caught.value.__notes__ == ["raised by Broken.on_step_end"]


def test_error_of_a_function_names_the_function() -> None:
    def report(trainer: Any, epoch: int, metrics: Any) -> None:
        raise ValueError("no network")

    class Fake:
        current_epoch = 0
        progress = Progress()

    with pytest.raises(ValueError, match="no network") as caught:
        CallbackList([report], Fake()).on_epoch_end({})
    assert "report.on_epoch_end" in caught.value.__notes__[0]


def test_fit_end_reaches_all_and_the_first_error_wins() -> None:
    last = Recorder("last")
    with pytest.raises(OSError, match="disk full") as caught:
        CallbackList([Broken(), Broken(), last]).on_fit_end(None)
    assert last.log == [("last", None)]
    assert caught.value.__notes__ == [
        "raised by Broken.on_fit_end",
        "Broken.on_fit_end also raised OSError: disk full",
    ]


def test_fit_end_never_masks_the_error_of_the_run() -> None:
    last, error = Recorder("last"), ValueError("loss is bad")
    CallbackList([Broken(), last]).on_fit_end(error)
    assert last.log == [("last", error)]
    assert error.__notes__ == ["Broken.on_fit_end also raised OSError: disk full"]


def test_states_find_their_callback_by_class_and_place() -> None:
    states = CallbackList([Recorder("a"), Broken(), Recorder("b"), Recorder()]).state_dict()
    assert states == {"Recorder/0": {"name": "a"}, "Recorder/1": {"name": "b"}}
    restored = [Recorder(), Recorder(), Recorder("fresh")]
    with pytest.warns(
        UserWarning, match="has no state of Recorder/2: added, renamed or moved callbacks start without one"
    ):
        CallbackList(restored).load_state_dict(states)
    assert [callback.name for callback in restored] == ["a", "b", "fresh"]


def test_state_without_its_callback_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="Gone/0, Recorder/0") as warned:
        CallbackList([Broken()]).load_state_dict({"Gone/0": {"a": 1}, "Recorder/0": {"name": "a"}})
    assert len(warned) == 1


def test_error_while_loading_a_state_names_callback_and_state() -> None:
    with pytest.raises(KeyError) as caught:
        CallbackList([Broken()]).load_state_dict({"Broken/0": {"a": 1}})
    assert caught.value.__notes__ == ["raised by Broken.load_state_dict, for the state 'Broken/0' of the checkpoint"]


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (Recorder, r"is a class: use Recorder\(\.\.\.\)"),
        (3, "callbacks must be Callback objects"),
        (lambda trainer: None, "must accept"),
    ],
)
def test_what_is_no_callback_is_refused(candidate: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CallbackList([candidate])


def test_a_hook_without_overrides_calls_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = CallbackList([Recorder(), Recorder()])
    called: list[object] = []
    monkeypatch.setattr(Callback, "on_gradients_ready", lambda *args: called.append(args))
    trainer: Any = None
    callbacks.on_gradients_ready(trainer)
    assert "on_gradients_ready" not in callbacks.overridden
    assert not called
