"""The loop: order of hooks, requests, limits, all endings, and its methods called separately."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    DataError,
    ParallelConfig,
    StepError,
    Trainer,
    World,
)
from headway.trainer.callbacks.base import HOOKS
from headway.trainer.distributed.dtensor import unwrap
from headway.trainer.metrics.train_log import Recorder
from tests.distributed import run_on_ranks
from tests.tiny import Losses, Rows, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")

Notes = list[str]


def _noting(hook: str) -> Callable[..., None]:
    def note(self: Any, trainer: Any, *args: Any) -> None:
        self.notes.append(hook.removeprefix("on_"))
        self.arguments.setdefault(hook, []).append(args)

    return note


class _Notebook(Callback):
    def __init__(self) -> None:
        self.notes: Notes = []
        self.arguments: dict[str, list[Any]] = {}

    def runs(self) -> str:
        """The recorded calls, one line per group."""
        return " ".join(self.notes)


Spy: type[_Notebook] = type("Spy", (_Notebook,), {hook: _noting(hook) for hook in HOOKS})


def _config(**changes: Any) -> TinyConfig:
    """Two updates of 16 rows in an epoch."""
    settings = {
        "num_rows": 32,
        "batch_size": 16,
        "global_batch_size": 16,
        "log_every": "100 steps",
        "evaluate_every": None,
        **changes,
    }
    return TinyConfig(**{"max_epochs": 1, "checkpoint": CheckpointConfig(every=None, at_end=False), **settings})


class OneBatchToValidate(TinyTrainer):
    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0], DataLoader(Rows(10), batch_size=10)


class NoValidation(TinyTrainer):
    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0]


SETUP = "setup_start models_configured setup_end"
STEP = "step_start batch_start batch_end gradients_ready step_end"
EVALUATION = "evaluation_start evaluation_batch_start evaluation_batch_end evaluation_end log"
SAVE = "checkpoint_start checkpoint_saved"


def _order(*parts: str) -> str:
    return " ".join(parts)


# ---- The order of hooks --------------------------------------------------------------------------------------------


def _notes_of(
    trainer_class: type[TinyTrainer], config: TinyConfig, run_dir: Path | None = None, *more: Any
) -> _Notebook:
    spy = Spy()
    trainer_class(config, run_dir=run_dir, world=ALONE, callbacks=[spy, *more]).fit()
    return spy


def test_order_of_a_plain_run(tmp_path: Path) -> None:
    config = _config(max_epochs=2, evaluate_every="1 epochs", checkpoint=CheckpointConfig(background=False))
    spy = _notes_of(OneBatchToValidate, config, tmp_path)
    epoch = _order("epoch_start", STEP, STEP, "log", EVALUATION, "epoch_end", SAVE)
    assert spy.runs() == _order(SETUP, "fit_start", epoch, epoch, "fit_end")
    assert [arguments[1] for arguments in spy.arguments["on_batch_start"]] == [0, 1, 2, 3]
    assert spy.arguments["on_fit_end"] == [(None,)]
    assert [each[0]["epoch"] for each in spy.arguments["on_epoch_end"]] == [1, 2]
    assert {"train/loss", "validation/loss"} <= set(spy.arguments["on_epoch_end"][0][0])


def test_order_under_accumulation() -> None:
    spy = _notes_of(TinyTrainer, _config(micro_batch_size=4))
    batches = " ".join(["batch_start batch_end"] * 4)
    step = f"step_start {batches} gradients_ready step_end"
    evaluation = EVALUATION.replace(
        "evaluation_batch_start evaluation_batch_end", " ".join(["evaluation_batch_start evaluation_batch_end"] * 4)
    )
    assert spy.runs() == _order(SETUP, "fit_start epoch_start", step, step, "log epoch_end", evaluation, "fit_end")
    assert [arguments[2] for arguments in spy.arguments["on_batch_end"]] == list(range(8))
    assert [arguments[2] for arguments in spy.arguments["on_evaluation_batch_end"]] == [0, 1, 2, 3]


def test_order_of_evaluating_logging_and_saving_every_update(tmp_path: Path) -> None:
    config = _config(evaluate_every=1, log_every=1, checkpoint=CheckpointConfig(every=1, background=False))  # type: ignore[arg-type]
    update = _order(STEP, "log", EVALUATION, SAVE)
    spy = _notes_of(OneBatchToValidate, config, tmp_path)
    assert spy.runs() == _order(
        SETUP, "fit_start epoch_start", update, update, "epoch_end checkpoint_start checkpoint_saved fit_end"
    )


def test_order_of_a_stop_and_of_a_resume(tmp_path: Path) -> None:
    config = _config(evaluate_every="1 epochs", checkpoint=CheckpointConfig(background=False))
    spy = _notes_of(OneBatchToValidate, config, tmp_path, StopAt(1))
    stop = _order("stop_requested", SAVE, "log", "epoch_end")
    assert spy.runs() == _order(SETUP, "fit_start epoch_start", STEP, stop, "fit_end")
    assert spy.arguments["on_stop_requested"] == [("step 1",)]
    spy = _notes_of(OneBatchToValidate, config, tmp_path)
    rest = _order("epoch_start", STEP, "log", EVALUATION, "epoch_end", SAVE)
    assert spy.runs() == _order(SETUP, "restored fit_start", rest, "fit_end")
    spy = _notes_of(OneBatchToValidate, config, tmp_path)
    assert spy.runs() == _order(SETUP, "restored fit_end")


def test_a_stop_that_is_asked_for_in_the_setup_is_heard_of_once() -> None:
    class Early(Callback):
        def on_setup_end(self, trainer: Trainer[Any]) -> None:
            trainer.request_stop("early")

    spy = _notes_of(OneBatchToValidate, _config(sanity_batches=1, evaluate_at_start=True), None, Early())
    assert spy.notes.count("stop_requested") == 1
    assert spy.notes.index("fit_start") < spy.notes.index("stop_requested")
    assert "step_start" not in spy.notes


def test_a_run_whose_last_save_was_at_the_end_of_its_epoch_is_completed(tmp_path: Path) -> None:
    config = _config(checkpoint=CheckpointConfig(every="2 steps", background=False))  # type: ignore[arg-type]
    spy = _notes_of(NoValidation, config, tmp_path)
    save = "checkpoint_start checkpoint_saved"
    assert spy.runs().endswith(_order("step_end", save, "log epoch_end", save, "fit_end"))
    spy = _notes_of(NoValidation, config, tmp_path)
    assert spy.runs() == _order(SETUP, "restored fit_end")


def test_order_of_an_error() -> None:
    class Fails(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise LookupError("no such row")
            return super().training_step(batch, batch_idx)

    spy = Spy()
    with pytest.raises(LookupError) as raised:
        Fails(_config(), world=ALONE, callbacks=[spy]).fit()
    assert spy.runs() == _order(SETUP, "fit_start epoch_start", STEP, "step_start batch_start fit_end")
    assert spy.arguments["on_fit_end"] == [(raised.value,)]


def test_functions_objects_and_own_hooks_work_together() -> None:
    calls: list[Any] = []

    class Watches(Callback):
        def on_epoch_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
            calls.append(("object", trainer.current_epoch, metrics["step"]))

    class Own(TinyTrainer):
        def on_epoch_end(self, metrics: Mapping[str, float]) -> None:
            super().on_epoch_end(metrics)  # type: ignore[misc]
            calls.append(("own", self.current_epoch, metrics["step"]))

        def configure_callbacks(self) -> Any:
            return [Watches()]

    Own(
        _config(),
        world=ALONE,
        callbacks=[Watches(), lambda trainer, epoch, metrics: calls.append(("function", epoch, metrics["step"]))],
    ).fit()
    assert calls == [("own", 1, 2), ("object", 1, 2), ("object", 1, 2), ("function", 1, 2)]


# ---- Every ending --------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def _raises(hook: str, error: BaseException) -> Callback:
    def fail(self: Any, trainer: Any, *args: Any) -> None:
        raise error

    return type("Fails", (Callback,), {hook: fail})()


@pytest.mark.parametrize(
    "hook",
    [
        each
        for each in HOOKS
        if each not in ("on_step_skipped", "on_out_of_memory", "on_log_images", "on_checkpoint_failed", "on_fit_end")
    ],
)
def test_the_end_comes_once_wherever_a_run_fails(tmp_path: Path, hook: str) -> None:
    """An error is raised unchanged, except for notes."""
    config = _config(evaluate_every=1, log_every=1, checkpoint=CheckpointConfig(every=1))  # type: ignore[arg-type]
    callbacks = [StopAt(1)] if hook == "on_stop_requested" else []
    if hook == "on_restored":
        TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[StopAt(1)]).fit()
    error, spy = Boom(hook), Spy()
    trainer = TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[spy, _raises(hook, error), *callbacks])
    with pytest.raises(Boom) as raised:
        trainer.fit()
    assert raised.value is error
    assert error.args == (hook,)
    assert error.__cause__ is None
    assert error.__context__ is None
    assert error.__notes__ == [f"raised by Fails.{hook}"]
    assert spy.arguments["on_fit_end"] == [(error,)]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), Boom("no")], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("method", ["configure_models", "configure_dataloaders", "training_step", "validation_step"])
def test_what_user_code_raises_leaves_unchanged(error: BaseException, method: str) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise error

    spy = Spy()
    with pytest.raises(type(error)) as raised:
        type("Fails", (TinyTrainer,), {method: fail})(_config(), world=ALONE, callbacks=[spy]).fit()
    assert raised.value is error
    assert spy.arguments["on_fit_end"] == [(error,)]


def test_clean_up_never_hides_an_error() -> None:
    closed: list[str] = []

    class Stream:
        guarantee, fingerprint = "epoch", None

        def setup(self, feed: Any) -> None:
            pass

        def samples_in_epoch(self, epoch: int) -> None:
            return None

        def steps_in_epoch(self, epoch: int) -> None:
            return None

        def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[Any]:
            raise Boom("no such file")

        def close(self) -> None:
            closed.append("stream")
            raise OSError("cannot close either")

    class Reads(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            return Stream(), Stream()

    spy, error = Spy(), None
    with pytest.raises(Boom, match="no such file") as raised:
        Reads(_config(global_batch_size=None), world=ALONE, callbacks=[spy]).fit()
    error = raised.value
    assert closed == ["stream", "stream"]
    assert error.__notes__ == ["the clean-up also failed with OSError: cannot close either"]


def test_a_fit_may_be_called_again() -> None:
    """Also on the same trainer without a run directory, which continues from its state in memory."""
    spy = Spy()
    trainer = TinyTrainer(_config(max_epochs=3), world=ALONE, callbacks=[StopAt(3), spy])
    assert trainer.fit().status == "interrupted"
    assert set(trainer.evaluate()) == {"validation/loss", "validation/accuracy"}
    result = trainer.fit()
    assert (result.status, result.steps, result.epochs) == ("completed", 6, 3)
    assert trainer.fit().reason == "max_epochs=3 reached"
    assert len(spy.arguments["on_fit_end"]) == 3
    assert spy.notes.count("setup_start") == 1


@pytest.mark.parametrize("begins_a_group", [False, True])
def test_a_setup_that_failed_may_be_tried_again(monkeypatch: pytest.MonkeyPatch, begins_a_group: bool) -> None:
    class Second(TinyTrainer):
        tries = 0

        def configure_optimizers(self) -> None:
            self.tries += 1
            if self.tries == 1:
                raise Boom("the first time")
            super().configure_optimizers()

    if begins_a_group:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            monkeypatch.setenv(name, value)
    trainer = Second(_config(), world=None if begins_a_group else ALONE)
    assert trainer.world.owns_process_group == begins_a_group
    with pytest.raises(Boom):
        trainer.fit()
    assert trainer.fit().status == "completed"


@pytest.mark.parametrize(
    ("options", "steps"), [({"max_epochs": 3}, 6), ({"max_epochs": 3, "max_steps": 4}, 4), ({"steps_per_epoch": 1}, 1)]
)
def test_a_schedule_knows_the_length_of_the_run(options: dict[str, Any], steps: int) -> None:
    class Linear(TinyTrainer):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            assert self.total_steps is not None
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, total_iters=self.total_steps)

    trainer = Linear(_config(**options), world=ALONE)
    assert trainer.fit().steps == steps
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


# ---- Stops and limits ----------------------------------------------------------------------------------------------


def test_a_stop_at_the_end_of_an_epoch_stops_there() -> None:
    """Requests at the end of an epoch take effect without another update, and no epoch ends twice."""
    ends: list[int] = []

    def stop(trainer: Trainer[Any], epoch: int, metrics: Any) -> None:
        ends.append(epoch)
        trainer.request_stop("enough")

    result = TinyTrainer(_config(max_epochs=4), world=ALONE, callbacks=[stop]).fit()
    assert (result.status, result.reason, result.steps, result.epochs) == ("stopped", "enough", 2, 1)
    assert ends == [1]
    assert len(result.history) == 1


def test_a_stop_in_an_evaluation_stops_there() -> None:
    class Impatient(Callback):
        def on_evaluation_end(self, trainer: Trainer[Any], metrics: Any) -> None:
            trainer.request_stop("")

    trainer = TinyTrainer(_config(max_epochs=4, evaluate_every=3), world=ALONE, callbacks=[Impatient()])
    result = trainer.fit()
    assert (result.status, result.steps, result.reason) == ("stopped", 3, "a request without a reason")


def test_a_limit_that_is_reached_anyway_is_no_stop() -> None:
    class Late(Callback):
        def on_epoch_end(self, trainer: Trainer[Any], metrics: Any) -> None:
            trainer.request_stop("late")

    config = _config(evaluate_every="1 epochs")
    assert TinyTrainer(config, world=ALONE, callbacks=[Late()]).fit().status == "completed"
    # Where the last evaluation has yet to come, it does not: that is a stop, and a resume makes up for it.
    result = TinyTrainer(_config(), world=ALONE, callbacks=[Late()]).fit()
    assert (result.status, result.reason, result.epochs) == ("stopped", "late", 1)


def test_a_save_asked_for_in_an_evaluation_is_of_that_update(tmp_path: Path) -> None:
    class KeepBest(Callback):
        def on_evaluation_end(self, trainer: Trainer[Any], metrics: Any) -> None:
            trainer.request_save()

    result = TinyTrainer(_config(evaluate_every=1), run_dir=tmp_path, world=ALONE, callbacks=[KeepBest()]).fit()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    assert result.best_checkpoint is not None


@pytest.mark.parametrize("steps_per_epoch", [None, 1, 2, pytest.param(3, marks=pytest.mark.extended)])
@pytest.mark.parametrize("stop_at", [1, 2, pytest.param(3, marks=pytest.mark.extended)])
def test_an_epoch_that_was_whole_at_a_stop_is_closed_by_the_resume(
    tmp_path: Path, steps_per_epoch: int | None, stop_at: int
) -> None:
    config = _config(
        max_epochs=3, steps_per_epoch=steps_per_epoch, evaluate_every="1 epochs", checkpoint=CheckpointConfig()
    )
    reference = TinyTrainer(config, world=ALONE)
    wanted = reference.fit()
    ended: list[int] = []
    trainer = TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[StopAt(stop_at)])
    trainer.fit()
    resumed = TinyTrainer(
        config, run_dir=tmp_path, world=ALONE, callbacks=[lambda trainer, epoch, metrics: ended.append(epoch)]
    )
    result = resumed.fit()
    assert (result.steps, result.epochs) == (wanted.steps, wanted.epochs) == (3 * min(steps_per_epoch or 2, 2), 3)
    assert trainer.seen + resumed.seen == reference.seen
    names = ("epoch", "step", "train/loss", "validation/loss")
    assert [{name: row[name] for name in names} for row in result.history] == [
        {name: row[name] for name in names} for row in wanted.history
    ]
    assert ended == list(range(trainer.current_epoch + 1, 4))


class FollowsPlateaus(TinyTrainer):
    """Evaluations change all later weights through a scheduler; every epoch drops a tail."""

    scheduler_interval: ClassVar[Any] = {"a": "epoch"}

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.a = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.9)
        self.b = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, threshold=0.9, factor=0.5)


class CutsAnEvaluation(Callback):
    """During the evaluation at the end of an epoch: a stop, or an immediate save and a kill."""

    def __init__(self, how: str, epoch: int) -> None:
        self.how, self.epoch, self.batches, self.ended = how, epoch, 0, list[int]()

    def on_evaluation_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += trainer.current_epoch == self.epoch
        if self.batches == 1 and self.how == "stop":
            trainer.request_stop("cut", status="interrupted")
        elif self.batches == 1 and self.how == "save":
            trainer.request_save(at_once=True)
        elif self.batches == 3 and self.how == "save":
            raise KeyboardInterrupt

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Any) -> None:
        if self.how == "saves itself" and trainer.current_epoch == self.epoch:
            trainer.save_checkpoint()
            raise KeyboardInterrupt

    def on_epoch_end(self, trainer: Trainer[Any], metrics: Any) -> None:
        self.ended.append(trainer.current_epoch)


@pytest.mark.parametrize("epoch", [2, pytest.param(3, marks=pytest.mark.extended)])
@pytest.mark.parametrize("how", ["stop", "save", "saves itself"])
def test_an_epoch_whose_evaluation_was_cut_short_is_evaluated_and_ended_by_the_resume(
    tmp_path: Path, how: str, epoch: int
) -> None:
    config = _config(
        num_rows=37, drop_last=True, max_epochs=3, evaluate_every="1 epochs", checkpoint=CheckpointConfig()
    )
    reference = FollowsPlateaus(config, world=ALONE)
    wanted = reference.fit()
    cut, ends = CutsAnEvaluation(how, epoch), CutsAnEvaluation("not", 0)
    first = FollowsPlateaus(config, run_dir=tmp_path, world=ALONE, callbacks=[cut])
    if how == "stop":
        result = first.fit()
        assert (result.status, result.reason, result.steps) == ("interrupted", "cut", 2 * epoch)
    else:
        with pytest.raises(KeyboardInterrupt):
            first.fit()
    resumed = FollowsPlateaus(config, run_dir=tmp_path, world=ALONE, callbacks=[ends])
    result = resumed.fit()
    assert (result.status, result.steps) == ("completed", 6)
    assert cut.ended + ends.ended == [1, 2, 3]
    assert resumed.progress.evaluations == reference.progress.evaluations == 3
    assert resumed.optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]
    assert all(torch.equal(value, weights(reference)[name]) for name, value in weights(resumed).items())
    names = ("epoch", "step", "train/loss", "validation/loss", "dropped_samples")
    rows, wanted_rows = ([[row[name] for name in names] for row in each.history] for each in (result, wanted))
    assert rows == wanted_rows
    assert not resumed.progress.is_closing


def test_an_epoch_whose_evaluation_was_cut_short_is_ended_by_the_next_piece(tmp_path: Path) -> None:
    config = _config(max_epochs=3, evaluate_every="1 epochs")
    cut = CutsAnEvaluation("stop", 1)
    trainer = TinyTrainer(config, world=ALONE, callbacks=[cut])
    assert (trainer.fit().status, trainer.global_step, cut.ended) == ("interrupted", 2, [])
    assert trainer.train_epoch()["epoch"] == 1
    assert (trainer.global_step, trainer.progress.evaluations, cut.ended) == (2, 1, [1])
    assert trainer.train_epoch()["epoch"] == 2


def test_the_history_holds_whole_epochs_only() -> None:
    seen: list[Mapping[str, float]] = []
    trainer = TinyTrainer(
        _config(max_epochs=None, max_steps=5, evaluate_every=None),
        world=ALONE,
        callbacks=[lambda trainer, epoch, metrics: seen.append(metrics)],
    )
    result = trainer.fit()
    assert [(row["epoch"], row["step"]) for row in result.history] == [(1, 2), (2, 4)]
    assert len(seen) == 3
    assert set(seen[-1]) == {"train/loss", "train/accuracy", "validation/loss", "validation/accuracy"}
    assert (result.steps, result.epochs, trainer.progress.step_in_epoch) == (5, 2, 1)


def test_no_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="set max_epochs, max_steps, max_samples or max_tokens"):
        TinyTrainer(_config(max_epochs=None), world=ALONE).fit()


def test_logged_means_cover_all_updates_since_the_last_record() -> None:
    """Five updates, a record every two: the last one is of one update; all weigh by rows."""
    each, pairs = Losses(), Losses()
    for spy, every in ((each, 1), (pairs, 2)):
        TinyTrainer(_config(max_epochs=None, max_steps=5, log_every=every), world=ALONE, callbacks=[spy]).fit()
    losses = each.of("train/loss")
    wanted = {2: (losses[1] + losses[2]) / 2, 4: (losses[3] + losses[4]) / 2, 5: losses[5]}
    assert pairs.of("train/loss") == pytest.approx(wanted, rel=1e-6)


def test_own_numbers_are_logged_with_their_weights() -> None:
    class Logs(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("twice", 2.0 * batch_idx, weight=1 + batch_idx)
            self.log("tensor", torch.tensor(1.5))
            return {**super().training_step(batch, batch_idx), "nested": {"inside": 1}}

    losses = Losses()
    Logs(_config(), world=ALONE, callbacks=[losses]).fit()
    record = losses.records[2]
    assert record["train/twice"] == pytest.approx((0 * 1 + 2 * 2) / 3)
    assert record["train/nested/inside"] == 1.0
    assert record["validation/tensor"] == record["train/tensor"] == 1.5
    # Every validation batch logs once, at the same weights.
    assert record["validation/twice"] == pytest.approx((0 + 2 * 2 + 4 * 3 + 6 * 4) / 10)


# ---- Requests on several ranks ------------------------------------------------------------------------------------


class AsksOnOneRank(Callback):
    """The last rank makes a request at one update; all ranks record when it takes effect."""

    def __init__(self, request: str, at: int) -> None:
        self.request, self.at = request, at
        self.happened: list[int] = []

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        if trainer.global_step == self.at and trainer.world.rank == trainer.world.size - 1:
            arguments = ("one rank asks",) if self.request == "request_stop" else ()
            getattr(trainer, self.request)(*arguments)

    def on_stop_requested(self, trainer: Trainer[Any], reason: str) -> None:
        self._note("request_stop", trainer)

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        if self.request == "request_save" and checkpoint.step < 8:
            self.happened.append(checkpoint.step)

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Any) -> None:
        self._note("request_evaluation", trainer)

    def _note(self, request: str, trainer: Trainer[Any]) -> None:
        if request == self.request and trainer.global_step < 8:
            self.happened.append(trainer.global_step)


class StopsInEvaluation(Callback):
    """The last rank requests a stop during the evaluation of the second batch."""

    def on_evaluation_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.world.rank == trainer.world.size - 1:
            trainer.request_stop("in the evaluation", status="interrupted")


def _requests_on_ranks(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    config = _config(max_epochs=None, max_steps=8, checkpoint=CheckpointConfig(every=None))
    for request in ("request_stop", "request_save", "request_evaluation"):
        spy = AsksOnOneRank(request, at=3)
        result = TinyTrainer(config, run_dir=f"{folder}/{request}", world=world, callbacks=[spy]).fit()
        found[request] = spy.happened, result.status, result.reason, result.steps

    def stop(trainer: Trainer[Any], epoch: int, metrics: Any) -> None:
        if trainer.world.rank == 1:
            trainer.request_stop("enough")

    result = TinyTrainer(config, world=world, callbacks=[stop]).fit()
    found["epoch end"] = result.status, result.reason, result.steps, result.epochs
    long = TinyConfig(**{**vars(config), "evaluate_every": 2})
    cut = LongValidation(long, run_dir=f"{folder}/cut", world=world, callbacks=[StopsInEvaluation(), spy := Spy()])
    result = cut.fit()
    found["evaluation"] = result.status, result.reason, result.steps, spy.notes.count("evaluation_batch_end")
    found["metrics"] = [name for name in result.metrics if name.startswith("validation/")]
    found["again"] = LongValidation(long, run_dir=f"{folder}/cut", world=world).fit().steps
    found["unwrapped"] = type(cut.unwrap(cut.model)).__name__, type(cut.model).__name__
    return found


class LongValidation(TinyTrainer):
    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0], DataLoader(Rows(64), batch_size=1)


def test_what_one_rank_asks_for_happens_on_all_at_the_same_update(tmp_path: Path) -> None:
    first, second = run_on_ranks(_requests_on_ranks, 2, str(tmp_path))
    assert first == second
    assert first["request_stop"] == ([4], "stopped", "one rank asks", 4)
    assert first["request_save"] == ([4], "completed", "max_steps=8 reached", 8)
    assert first["request_evaluation"] == ([4], "completed", "max_steps=8 reached", 8)
    assert first["epoch end"] == ("stopped", "enough", 2, 1)
    status, reason, steps, evaluated = first["evaluation"]
    assert (status, reason, steps) == ("interrupted", "in the evaluation", 2)
    assert 2 <= evaluated <= 4, "a stop ends an evaluation of 32 batches early"
    assert first["metrics"] == []
    assert first["again"] == 8
    assert first["unwrapped"] == ("Deep", "ReplicatedModule")


# ---- Alone ---------------------------------------------------------------------------------------------------------


def test_pieces_of_the_loop_work_without_fit(tmp_path: Path) -> None:
    spy = Spy()
    trainer = TinyTrainer(_config(), run_dir=tmp_path, world=ALONE, callbacks=[spy])
    before = trainer.evaluate()
    batch = torch.utils.data.default_collate([Rows(32)[row] for row in range(5)])
    metrics = trainer.train_step(batch)
    assert metrics["train/loss"] > 0
    assert metrics["grad_norm"] > 0
    assert (trainer.global_step, trainer.progress.samples, trainer.micro_batches_seen) == (1, 5, 1)
    after = trainer.evaluate()
    assert after != before
    assert trainer.evaluate(DataLoader(Rows(10), batch_size=4)) == pytest.approx(after)
    assert trainer.evaluate([batch])["validation/loss"] > 0
    epoch = trainer.train_epoch()
    assert epoch["epoch"] == trainer.current_epoch == 1
    assert trainer.train_epoch()["epoch"] == 2
    assert trainer.save_checkpoint().step == trainer.global_step
    assert "fit_end" not in spy.notes
    assert spy.notes.count("setup_start") == 1


@pytest.mark.parametrize(
    "options", [{"global_batch_size": 16, "micro_batch_size": 4}, {"batch_size": 4, "gradient_accumulation_steps": 4}]
)
def test_a_train_step_takes_any_batch(options: dict[str, Any]) -> None:
    trainer = TinyTrainer(_config(**{"global_batch_size": None, **options}), world=ALONE)
    batch = torch.utils.data.default_collate([Rows(32)[row] for row in range(3)])
    assert trainer.train_step(batch)["train/loss"] > 0
    assert trainer.global_step == 1


@pytest.mark.parametrize("limit", [{"max_steps": 3}, {"max_samples": 48}])
def test_an_epoch_alone_ends_at_a_limit_inside_it_and_goes_on_beyond(limit: dict[str, int]) -> None:
    trainer = TinyTrainer(_config(max_epochs=None, **limit), world=ALONE)
    steps = []
    for _ in range(4):
        trainer.train_epoch()
        steps.append((trainer.global_step, trainer.current_epoch))
    assert steps == [(2, 1), (3, 1), (4, 2), (6, 3)]


def test_an_epoch_alone_after_a_fit_that_was_stopped_is_whole_and_its_save_has_ended(tmp_path: Path) -> None:
    config = _config(num_rows=64, max_epochs=3, checkpoint=CheckpointConfig(every="1 epochs"))  # type: ignore[arg-type]
    spy = Spy()
    trainer = TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[StopAt(1), spy])
    assert trainer.fit().steps == 1
    spy.notes.clear()
    trainer.train_epoch()
    assert (trainer.global_step, trainer.current_epoch) == (4, 1)
    assert spy.notes[-1] == "checkpoint_saved"


def test_a_number_that_comes_after_its_evaluation_is_refused() -> None:
    class Late(Callback):
        def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
            trainer.log("gap", 1.0)

    with pytest.raises(StepError, match=r"log\('gap'\) in on_evaluation_end is too late"):
        TinyTrainer(_config(), world=ALONE, callbacks=[Late()]).fit()


def test_evaluating_without_data_is_refused() -> None:
    trainer = NoValidation(_config(), world=ALONE)
    with pytest.raises(DataError, match="no validation data"):
        trainer.evaluate()
    assert trainer.fit().status == "completed"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of torch's own, when its compiler is imported.
def test_unwrap_finds_the_module_that_the_user_wrote() -> None:
    module = nn.Linear(2, 2)
    for wrapped in (
        module,
        torch.compile(module),
        checkpoint_wrapper(module),
        torch.compile(checkpoint_wrapper(module)),
        checkpoint_wrapper(torch.compile(module)),  # type: ignore[arg-type]
    ):
        assert unwrap(wrapped) is module  # type: ignore[arg-type]


# ---- Threads, processes, clocks ------------------------------------------------------------------------------------


def test_fit_runs_in_a_thread_and_is_stopped_from_another() -> None:
    trainer = TinyTrainer(_config(max_epochs=None, max_steps=10**9), world=ALONE, callbacks=[])
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(trainer.fit()))
    thread.start()
    while trainer.global_step < 2:
        time.sleep(0.001)
    trainer.request_stop("from outside", status="time_limit")
    thread.join(timeout=30)
    assert (results[0].status, results[0].reason) == ("time_limit", "from outside")


class BadRow(Dataset[Any]):
    """Fails in row 20, in the worker process."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> Any:
        if row == 20:
            raise LookupError("row 20 is broken")
        return Rows(32)[row]


class AsTheyCome(IterableDataset[Any]):
    """The rows of a dataset without random access."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[row] for row in range(len(self.rows)))


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.extended), True])
@pytest.mark.parametrize("ending", ["success", "stop", "step", "row", "iterable", "iterable row", "validation"])
def test_worker_processes_end_with_the_run(ending: str, persistent: bool) -> None:
    class WithWorkers(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            rows: Any = BadRow() if ending.endswith("row") else Rows(32)
            if ending.startswith("iterable"):
                rows = AsTheyCome(rows)
            held_out = rows if ending == "validation" else None
            return tuple(
                None if each is None else DataLoader(each, batch_size=4, num_workers=1, persistent_workers=persistent)
                for each in (rows, held_out)
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert multiprocessing.active_children()
            if ending == "step" and batch_idx == 1:
                raise Boom("in the step")
            return super().training_step(batch, batch_idx)

    callbacks = [StopAt(1)] if ending == "stop" else []
    rows = None if ending.startswith("iterable") else 8
    trainer = WithWorkers(_config(max_epochs=2, global_batch_size=rows), world=ALONE, callbacks=callbacks)
    if ending in ("step", "row", "iterable row"):
        with pytest.raises(Boom if ending == "step" else LookupError) as raised:
            trainer.fit()
        assert raised.value.__traceback__ is not None, "what the traceback holds must not keep them alive"
    else:
        trainer.fit()
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("ending", ["success", "stop", "error", "setup"])
def test_the_process_group_ends_with_the_run(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    hooks = {"success": [], "stop": [StopAt(1)], "error": [_raises("on_step_end", Boom())]}
    trainer = TinyTrainer(_config(), callbacks=hooks.get(ending, [_raises("on_models_configured", Boom())]))
    assert not torch.distributed.is_initialized()  # nor does it join before it is needed
    if ending != "setup":
        trainer.setup()
        assert torch.distributed.is_initialized()
        assert trainer.world.owns_process_group
    if ending in ("error", "setup"):
        with pytest.raises(Boom):
            trainer.fit()
    else:
        trainer.fit()
    assert not torch.distributed.is_initialized()


class Average(Callback):
    """The moving average of the weights, as a callback would keep it."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        for name, value in weights(trainer).items():
            self.average[name] = value if name not in self.average else torch.lerp(self.average[name], value, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.average

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.average = dict(state_dict)


def test_what_a_callback_keeps_goes_on_exactly(tmp_path: Path) -> None:
    averages = []
    for run_dir, stops in ((None, [None]), (tmp_path, [3, 5, None])):
        for stop in stops:
            callbacks = [Average(), *([] if stop is None else [StopAt(stop)])]
            TinyTrainer(_config(max_epochs=4), run_dir=run_dir, world=ALONE, callbacks=callbacks).fit()
        averages.append(callbacks[0].average)  # type: ignore[attr-defined]
    assert len(averages[0]) == 8
    assert all(torch.equal(averages[1][name], value) for name, value in averages[0].items())


class SlowSteps(Callback):
    def on_step_end(self, trainer: Trainer[Any]) -> None:
        time.sleep(0.05)


class Clock(Callback):
    """Seconds from the start of this attempt to its first evaluation and first checkpoint."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.first_s: dict[str, float] = {}
        self.steps: dict[str, int] = {}

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        self.began_s = time.perf_counter()

    def on_evaluation_start(self, trainer: Trainer[Any]) -> None:
        self._note("evaluation", trainer)

    def on_checkpoint_start(self, trainer: Trainer[Any]) -> None:
        self._note("checkpoint", trainer)

    def _note(self, what: str, trainer: Trainer[Any]) -> None:
        self.first_s.setdefault(what, time.perf_counter() - self.began_s)
        self.steps.setdefault(what, trainer.global_step)


def test_evaluating_and_saving_by_the_clock_begins_anew_with_a_resume(tmp_path: Path) -> None:
    config = _config(
        max_epochs=None,
        max_steps=24,
        evaluate_every="0.35s",
        checkpoint=CheckpointConfig(every="0.35s", keep_last="all"),  # type: ignore[arg-type]
    )
    for stops, end in (([StopAt(12)], 12), ([], 24)):
        clock = Clock()
        trainer = TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[clock, SlowSteps(), *stops])
        assert trainer.fit().steps == end
        # Twelve updates take 0.6 s and more: due before the end, and not before the time.
        for what in ("evaluation", "checkpoint"):
            assert clock.first_s[what] >= 0.3
            assert end - 12 < clock.steps[what] < end
    assert trainer.progress.elapsed_s > 1.1


def test_an_evaluation_that_takes_longer_than_the_time_between_two_leaves_time_to_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hours(Callback):
        now_s = 0.0
        evaluated: ClassVar[list[int]] = []

        def on_step_end(self, trainer: Trainer[Any]) -> None:
            self.now_s += 1

        def on_evaluation_end(self, trainer: Trainer[Any], metrics: Any) -> None:
            self.now_s += 100
            self.evaluated.append(trainer.global_step)

    hours = Hours()
    monkeypatch.setattr(Recorder, "elapsed_s", lambda recorder: hours.now_s)
    config = _config(max_epochs=None, max_steps=30, evaluate_every="10s")
    TinyTrainer(config, world=ALONE, callbacks=[hours]).fit()
    assert hours.evaluated == [10, 20, 30]


Strategy = Literal["ddp", "fsdp"]


def _clock_on_ranks(world: World, strategy: Strategy) -> list[int]:
    steps: list[int] = []

    class Note(Callback):
        def on_evaluation_end(self, trainer: Trainer[Any], metrics: Any) -> None:
            steps.append(trainer.global_step)

    class Skewed(SlowSteps):
        def on_step_start(self, trainer: Trainer[Any]) -> None:
            time.sleep(0.02 * trainer.world.rank)

    config = _config(max_epochs=None, max_steps=20, evaluate_every="0.3s", parallel=ParallelConfig(strategy=strategy))
    trainer = TinyTrainer(config, world=world, callbacks=[Note(), Skewed()])
    trainer.fit()
    assert len(weights(trainer)) == 8
    return steps


def test_the_clock_of_the_main_rank_decides() -> None:
    first, second = run_on_ranks(_clock_on_ranks, 2, "fsdp")
    assert first == second
    assert len(first) >= 2


# ---- Samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drop_last", "max_samples", "steps"), [(True, 40, 5), (True, 41, 6), (True, 96 + 8, 13), (False, 103 + 8, 14)]
)
def test_a_run_ends_with_the_update_that_reaches_so_many_samples(
    tmp_path: Path, drop_last: bool, max_samples: int, steps: int
) -> None:
    config = TinyConfig(max_samples=max_samples, drop_last=drop_last, global_batch_size=8)
    first = TinyTrainer(config, run_dir=tmp_path, callbacks=[StopAt(2)])
    first.fit()
    trainer = TinyTrainer(config, run_dir=tmp_path)
    result = trainer.fit()
    assert (result.status, result.reason) == ("completed", f"max_samples={max_samples} reached")
    assert (result.steps, first.total_steps, trainer.total_steps) == (steps, steps, steps)


class Uneven(TinyTrainer):
    """Rank 0 has three batches of three rows in an epoch, rank 1 four of five."""

    def configure_dataloaders(self) -> Any:
        size, count = ((3, 3), (5, 4))[self.world.rank]
        rows = Rows(size * count)
        return [{"x": rows.x[i::count], "y": rows.y[i::count], "id": rows.y[i::count]} for i in range(count)]


def _samples_on_ranks(world: World) -> tuple[Any, ...]:
    result = Uneven(TinyConfig(max_samples=30), world=world).fit()
    trainer = Uneven(TinyConfig(max_epochs=2), world=world)
    trainer.train_step(trainer.configure_dataloaders()[0])
    dropped = [row["dropped_samples"] for row in result.history]
    return result.steps, result.reason, dropped, trainer.progress.samples, trainer.total_steps


def test_uneven_ranks_reach_so_many_samples_together_and_count_what_they_leave_out() -> None:
    first, second = run_on_ranks(_samples_on_ranks, 2)
    assert first == second == (4, "max_samples=30 reached", [5], 8, 6)
