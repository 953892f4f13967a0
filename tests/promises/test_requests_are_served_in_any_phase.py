"""A request made in any phase of two ranks is handled by both after the same update, and costs nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.trainer import Callback, CheckpointConfig, Trainer, World
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer, weights

STEPS, AT = 12, 4
PHASES = ("first step", "waiting for data", "evaluation", "saving")


class Asked(TinyTrainer):
    """Makes a request twice from another thread of rank 1, in a given phase."""

    phase = ""
    ask: Any = None

    def configure_dataloaders(self) -> Any:
        trainer = self

        class Slow(Rows):
            def __getitem__(self, row: int) -> Any:
                if trainer.activity.phase == "reading data" and trainer.global_step == AT:
                    trainer.reach("waiting for data")
                return super().__getitem__(row)

        return DataLoader(Slow(64), batch_size=4, shuffle=True), DataLoader(Rows(24), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and self.global_step == 0:
            self.reach("first step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == AT and batch_idx == 1:
            self.reach("evaluation")
        # The training must not repeat the random numbers of an evaluation.
        torch.rand(1)
        time.sleep(0.01)
        return super().validation_step(batch, batch_idx)

    def reach(self, phase: str) -> None:
        if phase != self.phase or self.world.rank != 1:
            return
        self.phase = ""
        for _ in range(2):
            thread = threading.Thread(target=self.ask, args=(self,))
            thread.start()
            thread.join()
        time.sleep(0.1)


class Watches(Callback):
    """Records the order of events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        if trainer.global_step == AT and isinstance(trainer, Asked):
            trainer.reach("saving")

    def on_evaluation_start(self, trainer: Trainer[Any]) -> None:
        self.events.append(("evaluation begins", trainer.global_step))

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Any) -> None:
        self.events.append(("evaluated", trainer.global_step))

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        self.events.append(("saved", checkpoint.step))


def _trainer(world: World, run_dir: str | None, phase: str = "", ask: Any = None) -> tuple[Asked, Watches]:
    watches = Watches()
    config = TinyConfig(
        max_steps=STEPS,
        dropout=0.2,
        evaluate_every=f"{AT} steps",  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(
            every="1 steps" if phase == "saving" else None,  # type: ignore[arg-type]
            at_end=phase == "saving" or ask is None,
            keep_last=99,
        ),
    )
    trainer = Asked(config, world=world, run_dir=run_dir, callbacks=[watches])
    trainer.phase, trainer.ask = phase, ask
    return trainer, watches


def _everywhere(world: World, folder: str) -> None:
    reference, _ = _trainer(world, None)
    reference.fit()
    for phase in PHASES:
        asked_at = {"first step": 0, "waiting for data": AT, "evaluation": AT, "saving": AT}[phase]

        stopped, watches = _trainer(
            world, f"{folder}/stop {phase}", phase, lambda trainer: trainer.request_stop("asked", status="interrupted")
        )
        result = stopped.fit()
        assert (result.status, result.reason) == ("interrupted", "asked"), phase
        # The current update is completed; the ranks agree on the request after the next one.
        assert asked_at <= result.steps <= asked_at + (0 if phase == "evaluation" else 3), (phase, result.steps)
        assert world.all_gather_object(result.steps) == [result.steps] * world.size
        if phase != "saving":
            assert not [event for event in watches.events if event[0] == "saved"], "no checkpoint at the end was wanted"
            stopped.save_checkpoint()
        resumed, _ = _trainer(world, f"{folder}/stop {phase}")
        assert resumed.fit().resumed_from is not None
        _assert_equal(resumed, reference, phase)
        assert stopped.seen + resumed.seen == reference.seen, phase

        goes_on, watches = _trainer(
            world, f"{folder}/save {phase}", phase, lambda trainer: trainer.request_save(at_once=True)
        )
        assert goes_on.fit().status == "completed"
        _assert_equal(goes_on, reference, phase)
        saved = [step for event, step in watches.events if event == "saved"]
        assert saved == sorted(saved)
        if phase == "saving":
            # The evaluation of step 4 is interrupted, too, and the checkpoint saved before does not contain it.
            assert sorted({*saved}) == list(range(1, STEPS + 1)), saved
            assert len(saved) <= STEPS + 1
            continue
        assert len(saved) == 1, (phase, saved)
        assert asked_at <= saved[0] <= asked_at + (0 if phase == "evaluation" else 3), (phase, saved)
        if phase == "evaluation":
            at = [event for event, step in watches.events if step == AT]
            assert (at.count("evaluation begins"), at.count("evaluated")) == (2, 1), "cut short, and made again"


def _assert_equal(trainer: TinyTrainer, reference: TinyTrainer, phase: str) -> None:
    expected = weights(reference)
    for name, value in weights(trainer).items():
        assert torch.equal(value, expected[name]), (phase, name)


def test_in_any_phase_a_request_is_served_by_all_and_costs_nothing(tmp_path: Path) -> None:
    run_on_ranks(_everywhere, 2, str(tmp_path))
