"""NaN and infinite gradients: raised, skipped or retried by all ranks alike, without changes to other state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import Callback, CheckpointConfig, ConfigError, NonFiniteError, ParallelConfig, Trainer, World
from headway.trainer.checkpoints.store import CheckpointWarning
from headway.trainer.distributed.dtensor import to_full_tensor
from headway.trainer.step import nonfinite, optimizer_step
from tests.distributed import run_on_ranks
from tests.tiny import Losses, Rows, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")
NAN = float("nan")


def _config(**changes: Any) -> TinyConfig:
    settings = {
        "max_steps": 6,
        "shuffle": False,
        "evaluate_every": None,
        "log_every": "1 steps",
        "global_batch_size": 16,
        "micro_batch_size": 4,
        **changes,
    }
    return TinyConfig(**settings)


def _fit_although_changed(trainer: Trainer[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        trainer.fit(accept_changes=True)


class Explodes(TinyTrainer):
    """Gets NaN as the loss of the micro-batches that `guilty` names, on the last rank."""

    guilty: Any = staticmethod(lambda trainer: trainer.global_step == 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if self.training and self.world.rank == self.world.size - 1 and type(self).guilty(self):
            outputs["loss"] = outputs["loss"] * NAN
        self.log("by_itself", outputs["loss"], weight=len(batch["x"]))
        return outputs


class ExplodesOnce(Explodes):
    """In the last micro-batch of the third global batch, of which two ranks have two each, and one rank four."""

    guilty = staticmethod(lambda trainer: trainer.micro_batches_seen == (5 if trainer.world.size == 2 else 11))


def _everything(trainer: Trainer[Any]) -> dict[str, Any]:
    """The current state that a skipped update must not change."""
    moments = {
        f"{number}/{name}": to_full_tensor(value).clone()
        for number, state in trainer.optimizers["optimizer"].state_dict()["state"].items()
        for name, value in state.items()
    }
    counts = {"step": trainer.global_step, "scheduler": trainer.schedulers["scheduler"].last_epoch}
    return {**weights(trainer), **moments, **{key: torch.tensor(value) for key, value in counts.items()}}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


class Remembers(Callback):
    """Records all states, the hooks that were called, and the final error."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.errors: list[BaseException | None] = []

    def on_step_start(self, trainer: Trainer[Any]) -> None:
        self.calls.append("start")

    def on_batch_start(self, trainer: Trainer[Any], batch: Any, batch_idx: int) -> None:
        self.calls.append("batch")

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        self.calls.append("gradients")

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        self.calls.append(f"end {trainer.global_step}")
        self.states.append(_everything(trainer))

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        self.calls.append(f"skipped: {reason}")
        self.states.append(_everything(trainer))

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        self.errors.append(error)


# ---- raise ---------------------------------------------------------------------------------------------------------


def _explode(world: World, folder: str, strategy: str = "ddp", **changes: Any) -> dict[str, Any]:
    spy = Remembers()
    config = _config(
        parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(every=2),  # type: ignore[arg-type]
        **changes,
    )
    trainer = Explodes(config, run_dir=folder, world=world, callbacks=[spy])
    with pytest.raises(NonFiniteError) as raised:
        trainer.fit()
    checkpoints = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    resumed = TinyTrainer(_config(max_steps=2, parallel=config.parallel), run_dir=folder, world=world)
    _fit_although_changed(resumed)
    return {
        "message": str(raised.value),
        "step": trainer.global_step,
        "calls": spy.calls,
        "unchanged": all(torch.equal(spy.states[-1][name], value) for name, value in weights(trainer).items()),
        "told": spy.errors == [raised.value],
        "saved": checkpoints,
        "saved_finite": all(value.isfinite().all() for value in weights(resumed).values()),
    }


def _assert_refused(result: dict[str, Any]) -> None:
    assert "gradient of step 3 is nan" in result["message"]
    assert result["step"] == 2
    assert result["unchanged"]
    assert result["told"]
    assert result["saved"] == ["step-00000002"]
    assert result["saved_finite"]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, max_grad_norm: float | None) -> None:
    result = _explode(ALONE, str(tmp_path), max_grad_norm=max_grad_norm)
    _assert_refused(result)
    assert (
        "step 3 is nan: rank 0: the loss of micro-batch 1 is nan, the loss of micro-batch 2 is nan, the loss of "
        "micro-batch 3 is nan, the loss of micro-batch 4 is nan, rows 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, "
        "44, 45, 46, 47; in the gradient of model.first.weight, model.first.bias, model.blocks.0.0.weight"
    ) in result["message"]
    assert result["message"].count("model.") == 8


def _explode_on_ranks(world: World, folder: str) -> list[dict[str, Any]]:
    return [_explode(world, f"{folder}/{strategy}", strategy) for strategy in ("ddp", "fsdp")]


@pytest.mark.extended
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_and_names_it(tmp_path: Path) -> None:
    """Also under DDP, whose gradients are reduced before the check: the losses show the rank that caused it."""
    for rank in run_on_ranks(_explode_on_ranks, 2, str(tmp_path)):
        for result in rank:
            _assert_refused(result)
            assert (
                "rank 1: the loss of micro-batch 1 is nan, the loss of micro-batch 2 is nan, "
                "rows 40, 41, 42, 43, 44, 45, 46, 47; in the gradient of model.first.weight" in result["message"]
            )
            assert "rank 0" not in result["message"]


def test_one_gradient_that_is_not_finite_is_named() -> None:
    class OneGradient(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                self.model.last.bias.register_hook(lambda gradient: gradient * float("inf"))
            return outputs

    config = _config(micro_batch_size=16, global_batch_size=20)
    with pytest.raises(
        NonFiniteError,
        match=r"step 1 is (inf|nan): rank 0: every loss is finite, rows 0, 1, .*, 15 and 4 more; in the gradient of "
        r"model\.last\.bias\.",
    ):
        OneGradient(config, world=ALONE).fit()


def test_where_the_norm_arrives_late_parameters_are_named_and_no_innocent_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(nonfinite.AsyncScalar):
        """Arrives only when waited for, after the update has been applied."""

        def is_ready(self) -> bool:
            return False

    class OneGradient(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            self.model.last.bias.register_hook(lambda gradient: gradient * float("inf"))
            return outputs

    monkeypatch.setattr(optimizer_step, "HOST_READABLE", ())
    said = "step 1 is nan: on rank 0, every loss is finite; not finite by now: model.last.bias; later weights are"
    for arrival in (nonfinite.AsyncScalar, Late):
        monkeypatch.setattr(optimizer_step, "AsyncScalar", arrival)
        with pytest.raises(NonFiniteError) as raised:
            OneGradient(_config(max_steps=1), world=ALONE).fit()
        assert said in str(raised.value)


@pytest.mark.parametrize("policy", ["raise", "skip", "retry"])
def test_where_norms_arrive_late_the_guilty_rows_and_parameters_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """As on a GPU."""
    monkeypatch.setattr(optimizer_step, "HOST_READABLE", ())
    result = _explode(ALONE, str(tmp_path), non_finite=policy, max_non_finite=1)
    assert "the loss of micro-batch 4 is nan, rows " in result["message"]
    assert result["message"].count("model.") == 8
    assert (result["saved"], result["saved_finite"], result["told"]) == (["step-00000002"], True, True)
    if policy == "raise":
        assert "gradient of step 3 is nan: on rank 0, the loss of micro-batch 1 is nan" in result["message"]
        assert "; not finite by now: model.first.weight" in result["message"]
    else:
        _assert_refused(result)


def test_data_that_is_not_finite_is_named() -> None:
    class BadRow(TinyTrainer):
        def on_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                batch["x"][1] = NAN

    with pytest.raises(
        NonFiniteError,
        match="rank 0: the loss of micro-batch 3 is nan, the data of micro-batch 3 is not finite, rows 8, 9, 10, 11;",
    ):
        BadRow(_config(), world=ALONE).fit()


# ---- skip ----------------------------------------------------------------------------------------------------------


def _skip(world: World, strategy: str, folder: str | None = None, *, fused: bool = False) -> dict[str, Any]:
    class Skips(ExplodesOnce):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            if fused:
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
                self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=100)

    spy, losses = Remembers(), Losses()
    config = _config(non_finite="skip", num_rows=120, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
    trainer = Skips(config, world=world, run_dir=folder, callbacks=[spy, losses])
    result = trainer.fit()
    return {
        "steps": result.steps,
        "unchanged": _equal(spy.states[1], spy.states[2]),
        "moved": not _equal(spy.states[2], spy.states[3]),
        "calls": [call for call in spy.calls if call[:2] in ("en", "sk")],
        "order": spy.calls,
        "skipped": losses.of("skipped_steps"),
        "finite": all(value == value for record in losses.records.values() for value in record.values()),
        "seen": trainer.seen,
    }


def _assert_skipped(result: dict[str, Any]) -> None:
    assert result["steps"] == 6
    assert result["unchanged"]
    assert result["moved"]
    skipped = "skipped: the norm of the gradient is nan"
    assert result["calls"] == ["end 1", "end 2", skipped, "end 3", "end 4", "end 5", "end 6"]
    assert result["skipped"] == {1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}
    assert result["finite"], "the loss of the skipped update has no place in the log"
    # Data moves on: each micro-batch is seen once.
    ids = [row for _, rows in result["seen"] for row in rows]
    assert len(ids) == len(set(ids))


def test_a_skipped_update_moves_nothing_but_the_data() -> None:
    result = _skip(ALONE, "ddp")
    _assert_skipped(result)
    update_of_4 = ["start", *["batch"] * 4, "gradients"]
    skipped = "skipped: the norm of the gradient is nan"
    assert result["order"][:21] == [*update_of_4, "end 1", *update_of_4, "end 2", *update_of_4, skipped]


def _skip_on_ranks(world: World, strategy: str) -> list[dict[str, Any]]:
    results = [_skip(world, strategy)]
    # As on a GPU, where the norm arrives later: the host waits before the step of an optimizer that cannot be told on
    # the device, and after that of one that can.
    optimizer_step.HOST_READABLE = ()
    return results + [_skip(world, strategy, fused=fused) for fused in (False, True)]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(strategy: str) -> None:
    for rank in run_on_ranks(_skip_on_ranks, 2, strategy):
        for result in rank:
            _assert_skipped(result)


@pytest.mark.parametrize("policy", ["skip", "retry"])
def test_gradients_that_stay_not_finite_end_the_run_with_a_finite_checkpoint(tmp_path: Path, policy: str) -> None:
    result = _explode(ALONE, str(tmp_path), non_finite=policy, max_non_finite=3)
    _assert_refused(result)
    assert "for the 4th time in a row (max_non_finite=3)" in result["message"]
    skipped = sum(call.startswith("skipped") for call in result["calls"])
    assert skipped == (3 if policy == "skip" else 0)
    assert result["calls"].count("gradients") == 2 + 4


def test_gradients_that_are_not_finite_again_and_again_end_the_run() -> None:
    class EverySecond(Explodes):
        guilty = staticmethod(lambda trainer: trainer.micro_batches_seen // 4 % 2 == 1)

    config = _config(max_steps=20, non_finite="skip", max_non_finite=1, max_non_finite_total=3)
    trainer = EverySecond(config, world=ALONE)
    with pytest.raises(NonFiniteError, match=r"for the 4th time \(max_non_finite_total=3\)"):
        trainer.fit()
    assert trainer.global_step == 4


def test_a_run_stopped_after_a_skipped_update_goes_on_behind_it_with_its_counts(tmp_path: Path) -> None:
    class StopWhenSkipped(Callback):
        def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
            trainer.request_stop("skipped", status="interrupted")

    def run(folder: Path, *callbacks: Callback) -> TinyTrainer:
        config = _config(non_finite="skip", checkpoint=CheckpointConfig(every=1), max_non_finite_total=1)  # type: ignore[arg-type]
        trainer = ExplodesOnce(config, run_dir=folder, world=ALONE, callbacks=callbacks)
        trainer.fit()
        return trainer

    whole_run = run(tmp_path / "whole")
    begun = run(tmp_path / "stopped", StopWhenSkipped())
    losses = Losses()
    resumed = run(tmp_path / "stopped", losses)
    assert _equal(_everything(resumed), _everything(whole_run))
    assert [rows for _, rows in begun.seen + resumed.seen] == [rows for _, rows in whole_run.seen]
    assert losses.of("skipped_steps")[6] == 1


# ---- retry ---------------------------------------------------------------------------------------------------------


class Diverges(TinyTrainer):
    """Draws NaN with its random numbers in the second update, but not in its retry."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if self.training and torch.rand(()).item() < 0.15:
            outputs["loss"] = outputs["loss"] * NAN
        return outputs


def _retry(world: World, seed: int) -> dict[str, Any]:
    spy, losses = Remembers(), Losses()
    config = _config(non_finite="retry", dropout=0.5, seed=seed, max_non_finite=20)
    trainer = Diverges(config, world=world, callbacks=[spy, losses])
    trainer.fit()
    return {
        "weights": weights(trainer),
        "seen": trainer.seen,
        "calls": spy.calls,
        "retried": losses.of("retried_steps")[6],
        "skipped": losses.of("skipped_steps")[6],
    }


def _retry_twice(world: World) -> list[dict[str, Any]]:
    return [_retry(world, seed=3), _retry(world, seed=3)]


def _assert_retried(result: dict[str, Any], again: dict[str, Any]) -> None:
    assert result["retried"] > 0
    assert result["skipped"] == 0
    assert [call for call in result["calls"] if call.startswith("end")] == [f"end {step}" for step in range(1, 7)]
    assert result["calls"].count("gradients") == 6 + result["retried"]
    assert result["calls"].count("start") == 6
    assert result["seen"] == again["seen"]
    assert _equal(result["weights"], again["weights"])


def test_the_same_batch_is_tried_again_with_fresh_random_numbers() -> None:
    result, again = _retry_twice(ALONE)
    _assert_retried(result, again)
    in_order = [rows for _, rows in result["seen"]]
    batches = [in_order[i : i + 4] for i in range(0, len(in_order), 4)]
    assert [batch for i, batch in enumerate(batches) if i == 0 or batch != batches[i - 1]] == [
        [list(range(first, first + 4)) for first in range(start, start + 16, 4)] for start in range(0, 96, 16)
    ]


def test_all_ranks_try_again_together() -> None:
    ranks = run_on_ranks(_retry_twice, 2)
    assert ranks[0][0]["calls"] == ranks[1][0]["calls"]
    for result, again in ranks:
        _assert_retried(result, again)


# ---- Where norms arrive late ---------------------------------------------------------------------------------------


def test_where_norms_arrive_late_nothing_is_saved_that_is_not_finite(tmp_path: Path) -> None:
    """Under "raise" no update waits for its norm on a GPU: weights may become NaN, but checkpoints do not."""
    optimizer_step.HOST_READABLE, before = (), optimizer_step.HOST_READABLE
    try:
        config = _config(checkpoint=CheckpointConfig(every=1))  # type: ignore[arg-type]
        trainer = Explodes(config, run_dir=tmp_path, world=ALONE)
        with pytest.raises(NonFiniteError, match="step 3 is nan: on rank 0, the loss of micro-batch 1 is nan"):
            trainer.fit()
    finally:
        optimizer_step.HOST_READABLE = before
    resumed = TinyTrainer(_config(max_steps=2), run_dir=tmp_path, world=ALONE)
    _fit_although_changed(resumed)
    assert resumed.global_step == 2
    assert all(value.isfinite().all() for value in weights(resumed).values())


@pytest.mark.parametrize("returns", [True, False], ids=["returns a loss", "returns none"])
def test_weights_whose_norms_are_still_on_their_way_do_not_leave_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """A non-finite loss appears in the log, and a step need not return a loss."""

    class Last(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            return super().configure_dataloaders()[0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"] * (1.0 if self.global_step < 5 else NAN)
            self.backward(loss)
            return {"loss": loss} if returns else None

    monkeypatch.setattr(optimizer_step, "HOST_READABLE", ())
    monkeypatch.setattr(nonfinite.AsyncScalar, "is_ready", lambda self: False)
    config = _config(micro_batch_size=None, checkpoint=CheckpointConfig(every=None, at_end=False))
    trainer = Last(config, world=ALONE)
    with pytest.raises(NonFiniteError, match="the norm of the gradient of step 6 is nan"):
        trainer.fit()
    with pytest.raises(ConfigError, match="the model state is undefined"):
        trainer.fit()
    batch = torch.utils.data.default_collate([Rows(4)[row] for row in range(4)])
    for look in ("evaluate", "export"):
        alone = Last(config, world=ALONE)
        for _ in range(5):
            alone.train_step(batch)
        with pytest.raises(NonFiniteError, match="the norm of the gradient of step 6 is nan"):  # noqa: PT012
            alone.train_step(batch)
            getattr(alone, look)([batch] if look == "evaluate" else tmp_path / "weights.safetensors")
    assert not (tmp_path / "weights.safetensors").exists()


# ---- Losses --------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_with_a_gradient_that_is_gets_a_warning() -> None:
    class OnlyTheLoss(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            self.backward(outputs["loss"])
            return {"loss": outputs["loss"] * NAN}

    with pytest.warns(UserWarning, match="train/loss is nan at step 1, but the gradient is finite") as warned:
        result = OnlyTheLoss(_config(), world=ALONE).fit()
    assert len(warned) == 1
    assert result.steps == 6
