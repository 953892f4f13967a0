"""Where a run starts: its own checkpoints, in whole or in part, the weights of another run, or other data."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from headway.trainer import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    ParallelConfig,
    ResumeError,
    World,
)
from headway.trainer.checkpoints import storage
from headway.trainer.checkpoints.store import CheckpointStore, CheckpointWarning
from headway.trainer.loop import saving
from tests.distributed import run_on_ranks
from tests.tiny import Losses, Rows, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")
NO_SAVE = CheckpointConfig(every=None, at_end=False)


def _config(**changes: Any) -> TinyConfig:
    """Four updates in an epoch."""
    return TinyConfig(**{"num_rows": 32, "max_epochs": 2, "evaluate_every": None, **changes})


def _fit(run_dir: Path, *callbacks: Any, trainer_class: type[TinyTrainer] = TinyTrainer, **changes: Any) -> Any:
    trainer = trainer_class(_config(**changes), run_dir=run_dir, world=ALONE, callbacks=callbacks)
    return trainer.fit(), trainer


def _same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())


# ---- Weights of another run ----------------------------------------------------------------------------------------


class Frugal(Callback):
    """Records the weights at the start of the first update."""

    def on_fit_start(self, trainer: Any) -> None:
        self.weights = weights(trainer)
        self.moments = len(trainer.optimizer.state)


class OtherHead(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.last = nn.Linear(self.config.width, 5)


def test_a_run_may_begin_with_the_weights_of_another(tmp_path: Path) -> None:
    first, trained = _fit(tmp_path / "first")
    said: list[str] = []
    begins = Frugal()
    trainer = TinyTrainer(
        _config(init_from=first.last_checkpoint, seed=5),
        run_dir=tmp_path / "second",
        world=ALONE,
        callbacks=[begins, StopAt(3)],
        printer=said.append,
    )
    second = trainer.fit()
    assert _same(begins.weights, weights(trained))
    assert (begins.moments, second.steps, second.resumed_from) == (0, 3, None)
    assert said == [f"initialized from {first.last_checkpoint}: all weights"]
    assert trainer.seen[0][0] == 0

    # It resumes from its own checkpoints, and no longer needs the other run's.
    again, _ = _fit(tmp_path / "second", init_from=first.last_checkpoint, seed=5)
    assert (again.steps, again.resumed_from) == (8, second.last_checkpoint)


def test_a_run_that_exists_cannot_begin_with_other_weights(tmp_path: Path) -> None:
    first, _ = _fit(tmp_path / "first")
    _fit(tmp_path / "second", StopAt(3))
    with pytest.raises(ConfigError, match="is for a new run, and this run has a checkpoint already.*started without"):
        _fit(tmp_path / "second", init_from=first.last_checkpoint)
    trainer = TinyTrainer(_config(init_from=first.last_checkpoint), run_dir=tmp_path / "third", world=ALONE)
    with pytest.raises(ConfigError, match="loads only weights, and resume=.* the whole state: choose one"):
        trainer.fit(resume=first.last_checkpoint)


def test_weights_that_differ_are_listed_and_may_be_left_out(tmp_path: Path) -> None:
    first, trained = _fit(tmp_path / "first")
    with pytest.raises(
        CheckpointError,
        match=r"Missing in it: none.*Of another shape: model.last.bias \(\[3\] there, \[5\] here\), model.last.weight",
    ):
        OtherHead(_config(init_from=first.last_checkpoint), world=ALONE).fit()

    class More(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self.model.extra = nn.Linear(2, 2)
            self.model.first = nn.Identity()

    with pytest.raises(
        CheckpointError, match=r"Missing in it: model.extra.bias, model.extra.weight. Only in it: model.first.bias"
    ):
        More(_config(init_from=first.last_checkpoint), world=ALONE).fit()
    said: list[str] = []
    begins = Frugal()
    config = _config(init_from=first.last_checkpoint, init_keys=("*", "!model.last.*"), max_epochs=1)

    class CutsOff(OtherHead):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch["x"]).square().mean()

    CutsOff(config, world=ALONE, callbacks=[begins], printer=said.append).fit()
    before = weights(trained)
    taken = {name for name, value in begins.weights.items() if torch.equal(value, before.get(name, torch.empty(0)))}
    assert taken == {name for name in before if not name.startswith("model.last")}
    assert "all but model.last.bias, model.last.weight; not used from it: model.last.bias" in "\n".join(said)
    with pytest.raises(CheckpointError, match=r"init_keys=\['encoder.*'\] matches none"):
        TinyTrainer(_config(init_from=first.last_checkpoint, init_keys=("encoder.*",)), world=ALONE).fit()
    with pytest.raises(ConfigError, match="init_keys=.* selects weights of init_from, which is not set"):
        _config(init_keys=("*",))
    with pytest.raises(CheckpointError, match="no-such"):
        TinyTrainer(_config(init_from=str(tmp_path / "no-such")), world=ALONE).fit()


def test_pieces_of_the_loop_begin_with_the_same_weights(tmp_path: Path) -> None:
    first, trained = _fit(tmp_path / "first")
    wanted = trained.evaluate()
    trainer = TinyTrainer(_config(init_from=first.last_checkpoint, seed=5), world=ALONE, printer=lambda text: None)
    assert trainer.evaluate() == wanted
    saver = TinyTrainer(trainer.config, run_dir=tmp_path / "saved", world=ALONE, printer=lambda text: None)
    assert trained.evaluate(checkpoint=saver.save_checkpoint()) == wanted
    trainer.train_epoch()
    assert trainer.evaluate() != wanted


# ---- The weights of a checkpoint, evaluated ------------------------------------------------------------------------


class Swaps(Callback):
    """Evaluates separate weights, such as an average."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.calls = 0

    def evaluation_context(self, trainer: Any) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def swapped() -> Any:
            self.calls += 1
            model = trainer.unwrap(trainer.model)
            before = model.last.weight.detach().clone()
            with torch.no_grad():
                model.last.weight.copy_(self.weights.get("last", before))
            yield
            with torch.no_grad():
                model.last.weight.copy_(before)

        return swapped()

    def on_step_end(self, trainer: Any) -> None:
        self.weights["last"] = torch.full((3, trainer.config.width), 1.0 / trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.weights = dict(state_dict)


class Counts(Callback):
    count = 0

    def on_step_end(self, trainer: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.count = state_dict["count"]


def test_a_checkpoint_is_evaluated_alone_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    keep_all = CheckpointConfig(every="1 epochs", keep_last="all")  # type: ignore[arg-type]
    result, trained = _fit(tmp_path, Swaps(), Counts(), checkpoint=keep_all, evaluate_every="1 epochs")
    first, last = (str(each) for each in sorted((tmp_path / "checkpoints").iterdir()))

    swaps, counts = Swaps(), Counts()
    trainer = TinyTrainer(_config(seed=5), world=ALONE, callbacks=[swaps, counts])
    by_checkpoint = [trainer.evaluate(checkpoint=each)["validation/loss"] for each in (first, Path(last))]
    assert by_checkpoint == [row["validation/loss"] for row in result.history]
    assert (trainer.global_step, counts.count, len(trainer.optimizer.state)) == (0, 0, 0)

    # In a trainer that has trained, only the weights are changed, and they are restored.
    before, average = weights(trained), trained.callbacks._callbacks[0].weights["last"].clone()
    assert trained.evaluate(checkpoint=first)["validation/loss"] == by_checkpoint[0]
    assert _same(before, weights(trained))
    assert torch.equal(trained.callbacks._callbacks[0].weights["last"], average)
    assert (trained.global_step, trained.callbacks._callbacks[1].count) == (8, 8)
    assert trained.evaluate()["validation/loss"] == by_checkpoint[1]
    with pytest.raises(LookupError):
        trained.evaluate(lambda: iter([{}["no such row"]]), checkpoint=first)
    assert _same(before, weights(trained))


def test_a_checkpoint_without_averages_is_evaluated_without_those_of_the_trainer(tmp_path: Path) -> None:
    plain, trained = _fit(tmp_path / "plain")
    _, averages = _fit(tmp_path / "averages", Swaps(), seed=5)
    assert averages.evaluate(checkpoint=plain.last_checkpoint) == trained.evaluate()
    # Afterwards its own weights are evaluated again.
    calls = averages.callbacks._callbacks[0].calls
    averages.evaluate()
    assert averages.callbacks._callbacks[0].calls == calls + 1


# ---- A checkpoint, in part -----------------------------------------------------------------------------------------


def test_parts_of_a_checkpoint_may_be_left(tmp_path: Path) -> None:
    stopped, before = _fit(tmp_path / "run", Counts(), StopAt(5))
    left: dict[str, Any] = {}

    counts = Counts()

    class Looks(Callback):
        def on_fit_start(self, trainer: Any) -> None:
            left.update(
                same=_same(weights(trainer), weights(before)),
                moments=len(trainer.optimizer.state) > 0,
                scheduler=trainer.scheduler.last_epoch,
                place=(trainer.global_step, trainer.current_epoch, trainer.progress.offset),
                count=counts.count,
                random=torch.equal(torch.get_rng_state(), states["rng"]),
            )

    states: dict[str, torch.Tensor] = {}

    class Notes(Callback):
        def on_restored(self, trainer: Any) -> None:
            states["rng"] = torch.get_rng_state()

    def resumed(*components: str) -> dict[str, Any]:
        trainer = TinyTrainer(_config(), run_dir=tmp_path / "run", world=ALONE, callbacks=[counts, Looks(), Notes()])
        counts.count = 0
        trainer.fit(resume=stopped.last_checkpoint, **({"restore": components} if components else {}))
        return dict(left)

    everything = {"same": True, "moments": True, "scheduler": 5, "place": (5, 1, 8), "count": 5, "random": True}
    assert resumed() == everything
    assert resumed("models") == {
        "same": True,
        "moments": False,
        "scheduler": 0,
        "place": (0, 0, 0),
        "count": 0,
        "random": True,
    }
    assert resumed("models", "optimizers", "schedulers", "progress", "callbacks", "rng") == {
        **everything,
        "place": (5, 1, 0),
    }
    for wrong, message in (
        (("models", "weights"), "got 'weights'"),
        (("data",), 'restore needs "progress" with "data"'),
    ):
        with pytest.raises(ConfigError, match=message):
            resumed(*wrong)


def test_other_data_is_read_from_its_beginning_where_that_is_allowed(tmp_path: Path) -> None:
    _fit(tmp_path, StopAt(6))
    with pytest.raises(DataError, match=r'was Rows\[32\] and is Rows\[48\].*changed_data="reset"'):
        _fit(tmp_path, num_rows=48)
    # The config, which names the data, differs too.
    trainer = TinyTrainer(
        _config(num_rows=48, changed_data="reset", shuffle=False),
        run_dir=tmp_path,
        world=ALONE,
        callbacks=[StopAt(8)],
        printer=lambda text: None,
    )
    with pytest.raises(ResumeError, match="config.num_rows: 32 -> 48\n  config.shuffle: True -> False"):
        trainer.fit()
    result = trainer.fit(accept_changes=True)
    assert trainer.seen == [(6, list(range(8))), (7, list(range(8, 16)))]
    assert (result.steps, result.epochs) == (8, 1)
    # The new data now belongs to the run: its position is kept.
    _, trainer = _fit(tmp_path, num_rows=48, changed_data="reset", shuffle=False)
    assert trainer.seen[0] == (8, list(range(16, 24)))


def test_a_longer_run_says_what_becomes_of_its_learning_rate(tmp_path: Path) -> None:
    """A schedule that is a function of the step uses the new length; torch's schedulers keep their saved settings."""

    class Linear(TinyTrainer):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            total = self.total_steps
            assert total is not None
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / total)

    class Cosine(TinyTrainer):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=self.total_steps or 0)

    for trainer_class in (Linear, Cosine):
        run_dir = tmp_path / trainer_class.__name__
        _fit(run_dir, trainer_class=trainer_class)
        said: list[str] = []
        trainer = trainer_class(_config(max_epochs=4), run_dir=run_dir, world=ALONE, printer=said.append)
        assert trainer.fit().steps == 16
        assert (
            "the length of the run has changed from 8 steps to 16: schedules that are functions of the step" in said[0]
        )
        if trainer_class is Linear:
            assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0)
        else:
            assert trainer.scheduler.T_max == 8


def test_the_result_and_the_warning_say_what_the_data_guarantees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fit(tmp_path / "exact")[0].data_guarantee == "exact"
    assert "guarantees" not in capsys.readouterr().out

    class Iterable(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            batches = list(DataLoader(Rows(32), batch_size=8))
            return batches, None

    result, _ = _fit(tmp_path / "epoch", StopAt(6), trainer_class=Iterable)
    assert result.data_guarantee == "epoch"
    assert "guarantees 'epoch', not 'exact': a resumed run restarts the epoch in progress" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="guarantees 'epoch', not 'exact': epoch 2 restarts"):
        _fit(tmp_path / "epoch", trainer_class=Iterable)


def test_a_second_fit_goes_on_from_memory_unless_an_error_ended_the_first(tmp_path: Path) -> None:
    trainer = TinyTrainer(_config(checkpoint=NO_SAVE), run_dir=tmp_path, world=ALONE, callbacks=[StopAt(3), StopAt(5)])
    assert trainer.fit().steps == 3
    second = trainer.fit()
    assert (second.steps, second.resumed_from) == (5, None)
    trainer.save_checkpoint()
    trainer.train_epoch()
    assert trainer.fit().steps == 8

    class Fails(TinyTrainer):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 6 and self.fails:
                self.fails = False
                raise LookupError
            return super().training_step(batch, batch_idx)

    every_epoch = CheckpointConfig()
    broken = Fails(_config(checkpoint=every_epoch), run_dir=tmp_path / "broken", world=ALONE)
    with pytest.raises(LookupError):
        broken.fit()
    result = broken.fit()
    assert result.resumed_from is not None
    assert [step for step, _ in broken.seen] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]


def test_what_has_trained_cannot_begin_anew_and_its_records_stay(tmp_path: Path) -> None:
    _, trainer = _fit(tmp_path)
    records = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="starts fresh, and this trainer has made 8 updates: create another"):
        trainer.fit(resume="never")
    assert (tmp_path / "metrics.jsonl").read_bytes() == records


@pytest.mark.parametrize("piece", ["train_epoch", "save_checkpoint", "train_step"])
def test_a_piece_alone_does_not_begin_over_a_run_that_is_there(tmp_path: Path, piece: str) -> None:
    result, _ = _fit(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    trainer = TinyTrainer(_config(), run_dir=tmp_path, world=ALONE)
    arguments = [torch.utils.data.default_collate([Rows(4)[0]])] if piece == "train_step" else []
    for _ in range(2):
        with pytest.raises(
            ConfigError,
            match="run_dir=.* has checkpoints of a run that has not been restored: call fit.*, or use another run_",
        ):
            getattr(trainer, piece)(*arguments)
    assert (sorted(tmp_path.rglob("*")), trainer.global_step) == (before, 0)
    # Read-only calls are allowed; after a resume everything is.
    assert trainer.evaluate()["validation/loss"] > 0
    assert trainer.fit().resumed_from == result.last_checkpoint
    getattr(trainer, piece)(*arguments)


def test_an_error_before_the_training_loses_no_update(tmp_path: Path) -> None:
    trainer = TinyTrainer(
        _config(checkpoint=CheckpointConfig(every=2, at_end=False)),
        run_dir=tmp_path,
        world=ALONE,
        callbacks=[StopAt(5)],
    )
    assert trainer.fit().steps == 5
    for asked, kind in (("never", ConfigError), (str(tmp_path / "nowhere"), CheckpointError)):
        with pytest.raises(kind):
            trainer.fit(resume=asked)
    result = trainer.fit()
    assert (result.steps, result.resumed_from) == (8, None)
    assert [step for step, _ in trainer.seen] == list(range(8))


@pytest.mark.parametrize("in_update", [1, 6])
def test_what_an_error_broke_off_without_a_checkpoint_is_refused(in_update: int) -> None:
    class Fails(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == in_update - 1:
                raise LookupError
            return super().training_step(batch, batch_idx)

    broken = Fails(_config(), world=ALONE)
    with pytest.raises(LookupError):
        broken.fit()
    for _ in range(2):
        with pytest.raises(ConfigError, match="no checkpoint to restore: create a new Trainer"):
            broken.fit()
    assert broken.global_step == in_update - 1


def test_a_restore_that_failed_when_all_was_loaded_is_made_again(tmp_path: Path) -> None:
    class Fails(Callback):
        fails = True

        def on_restored(self, trainer: Any) -> None:
            if self.fails:
                self.fails = False
                raise LookupError

    _fit(tmp_path, StopAt(5))
    trainer = TinyTrainer(_config(), run_dir=tmp_path, world=ALONE, callbacks=[Fails()])
    with pytest.raises(LookupError):
        trainer.fit()
    assert trainer.global_step == 5
    result = trainer.fit()
    assert result.resumed_from is not None
    assert result.steps == 8


def test_a_run_that_began_anew_knows_its_own_best_after_a_resume_as_well(tmp_path: Path) -> None:
    evaluated = {"max_epochs": None, "max_steps": 8, "evaluate_every": "2 steps", "checkpoint": CheckpointConfig()}
    earlier = _fit(tmp_path, **evaluated)[0]
    store = CheckpointStore(tmp_path / "checkpoints", world=ALONE, keep_last="all")
    store.save({}, rank_parts={}, step=99, epoch=0, metrics={"validation/loss": -1.0}, meta={})
    make = lambda *callbacks: TinyTrainer(_config(**evaluated), run_dir=tmp_path, world=ALONE, callbacks=callbacks)  # noqa: E731
    first = make(StopAt(4)).fit(resume="never")
    assert (first.resumed_from, first.steps) == (None, 4)
    result = make().fit()
    assert result.resumed_from == first.last_checkpoint
    assert result.best_metric == earlier.best_metric
    assert result.best_checkpoint is not None
    assert "step-00000099" not in result.best_checkpoint
    assert (tmp_path / "checkpoints" / "step-00000099").is_dir()


def test_a_run_that_began_anew_and_failed_does_not_go_on_from_the_one_before(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.global_step == 2:
                raise LookupError

    earlier, _ = _fit(tmp_path, checkpoint=CheckpointConfig())
    trainer = TinyTrainer(_config(checkpoint=CheckpointConfig()), run_dir=tmp_path, world=ALONE, callbacks=[Fails()])
    with pytest.raises(LookupError):
        trainer.fit(resume="never")
    for damage in (False, True):
        if damage:
            manifest = Path(earlier.last_checkpoint, "manifest.json")
            manifest.write_bytes(manifest.read_bytes()[:20])
        with pytest.raises(ConfigError, match="there is no checkpoint to restore: create a new Trainer"):
            trainer.fit()


class Breaks(TinyTrainer):
    """Fails once in the middle of update 7, after its first micro-batch has left a gradient."""

    error: str = "raises"
    is_broken: bool = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if self.training and self.is_broken and batch_idx == 4 * 6 + 1:
            self.is_broken = False
            if self.error == "raises":
                raise LookupError
            outputs["loss"] = outputs["loss"] * math.nan
        return outputs


@pytest.mark.parametrize(("error", "kind"), [("raises", LookupError), ("is not finite", NonFiniteError)])
def test_what_an_error_has_left_is_no_part_of_the_fit_that_follows(
    tmp_path: Path, error: str, kind: type[Exception]
) -> None:
    config = _config(micro_batch_size=2, log_every=4, checkpoint=CheckpointConfig(every=4))
    losses, expected = Losses(), Losses()
    broken = Breaks(config, run_dir=tmp_path / "broken", world=ALONE, callbacks=[losses])
    broken.error = error
    with pytest.raises(kind):
        broken.fit()
    assert broken._engine.loop.recorder.step == broken.global_step == 6
    broken.fit()
    undisturbed = TinyTrainer(config, run_dir=tmp_path / "whole", world=ALONE, callbacks=[expected])
    undisturbed.fit()
    assert _same(weights(undisturbed), weights(broken))
    assert losses.of("train/loss") == expected.of("train/loss")


# ---- On ranks ------------------------------------------------------------------------------------------------------


def _break_on_ranks(world: World, folder: str, strategy: str) -> bool:
    parallel = ParallelConfig(strategy=strategy)  # type: ignore[arg-type]
    # Two updates per epoch; the fourth of four fails.
    config = _config(micro_batch_size=1, checkpoint=CheckpointConfig(every=2), parallel=parallel)
    whole_run = TinyTrainer(config, run_dir=f"{folder}/whole", world=world)
    whole_run.fit()
    broken = Breaks(config, run_dir=f"{folder}/broken", world=world)
    with pytest.raises(LookupError):
        broken.fit()
    if strategy == "fsdp":
        with pytest.raises(ConfigError, match="create a new Trainer with the same run_dir"):
            broken.fit()
        broken = Breaks(config, run_dir=f"{folder}/broken", world=world)
        broken.is_broken = False
    broken.fit()
    return _same(weights(whole_run), weights(broken))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_after_an_error_inside_an_update_ranks_go_on_as_if_there_had_been_none(tmp_path: Path, strategy: str) -> None:
    """FSDP2 cannot drop the gradients of a failed update, so a new trainer is required."""
    assert run_on_ranks(_break_on_ranks, 2, str(tmp_path), strategy) == [True, True]


def _break_in_a_slow_save(world: World, folder: str) -> tuple[str, int]:
    saving._TIMEOUT_S = 0.0
    commit = storage._Local.commit

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        commit(*args)

    storage._Local.commit = slowly  # type: ignore[method-assign]
    broken = Breaks(_config(micro_batch_size=1, checkpoint=CheckpointConfig(every=3)), run_dir=folder, world=world)
    with pytest.raises(LookupError):
        broken.fit()
    result = broken.fit()
    assert result.resumed_from is not None
    return result.resumed_from, result.steps


def test_a_save_that_an_error_has_left_under_way_is_waited_for(tmp_path: Path) -> None:
    wanted = f"{tmp_path}/checkpoints/step-00000003", 4
    assert run_on_ranks(_break_in_a_slow_save, 2, str(tmp_path)) == [wanted, wanted]


def test_a_run_whose_newest_tensors_are_damaged_resumes_from_the_one_before_and_loses_nothing(tmp_path: Path) -> None:
    every = {"dropout": 0.2, "checkpoint": CheckpointConfig(every=2, keep_last="all", background=False)}
    _, wanted = _fit(tmp_path / "whole", **every)
    _fit(tmp_path / "run", StopAt(6), **every)
    files = sorted(tmp_path.glob("run/checkpoints/*/rank-00000.safetensors"))
    for file in files[1:]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.warns(CheckpointWarning, match=r"step-0000000[46]: rank-00000.safetensors has changed"):
        result, resumed = _fit(tmp_path / "run", **every)
    assert result.resumed_from == str(files[0].parent)
    assert resumed.seen[0][0] == wanted.seen[2][0]
    assert _same(weights(resumed), weights(wanted))


def test_a_run_whose_only_checkpoint_is_damaged_is_an_error(tmp_path: Path) -> None:
    _fit(tmp_path, StopAt(2))
    (file,) = tmp_path.glob("checkpoints/*/rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints can be read:\n.*its checksum differs\n"):
        _fit(tmp_path)


def _on_ranks(world: World, folder: str, checkpoint: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        parallel = ParallelConfig(strategy=strategy)  # type: ignore[arg-type]
        options = {"world": world, "printer": lambda text: None}
        trainer = TinyTrainer(_config(parallel=parallel, seed=5), **options)
        before = trainer.evaluate()
        found[f"{strategy}/borrowed"] = trainer.evaluate(checkpoint=checkpoint)
        assert trainer.evaluate() == before
        config = _config(parallel=parallel, seed=5, init_from=checkpoint, init_keys=("*",), max_steps=1)
        trainer = TinyTrainer(config, run_dir=f"{folder}/{strategy}", **options)
        found[f"{strategy}/initial"] = trainer.evaluate()
        assert trainer.fit().steps == 1
    return found


def test_two_ranks_borrow_and_begin_with_the_same_weights(tmp_path: Path) -> None:
    first, trained = _fit(tmp_path / "first", StopAt(5))
    wanted = trained.evaluate()
    for rank in run_on_ranks(_on_ranks, 2, str(tmp_path), first.last_checkpoint):
        for name, metrics in rank.items():
            assert metrics == pytest.approx(wanted, rel=1e-5), name
