"""Loss spikes: detection, rollback to a checkpoint, and continuing behind the data that caused them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    LossSpikeConfig,
    LossSpikeError,
    ParallelConfig,
    Trainer,
    World,
    read_history,
)
from headway.trainer.callbacks import EarlyStopping
from headway.trainer.distributed.dtensor import to_full_tensor
from headway.trainer.loop.loss_spikes import SpikeDetector
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([2.0, 2.0, 2.0, 2.0, 9.0], []),  # four say nothing yet
        ([2.0, 2.0, 2.0, 2.0, 2.0, 9.0], [5]),
        ([2.0, 2.0, 2.0, 2.0, 2.0, 2.19], []),  # less than ten hundredths
        ([2.0, 2.0, 2.0, 2.0, 2.0, 2.21], [5]),
        ([2.0, 2.2, 1.8, 2.1, 1.9, 3.0], []),  # of 0.1 in the median, times 1.48
        ([2.0, 2.2, 1.8, 2.1, 1.9, 3.6], [5]),
        ([5.0, 4.0, 3.0, 2.0, 1.0, 0.1], []),  # falling
        ([-1.0, -1.0, -1.0, -1.0, -1.0, -0.5], [5]),  # losses may be negative
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], []),
        ([2.0, math.nan, math.inf], [1, 2]),  # never usual
        ([2.0] * 5 + [9.0] * 3, [5, 6, 7]),  # a spike does not become usual
    ],
)
def test_what_is_a_spike(losses: list[float], spikes: list[int]) -> None:
    detector = SpikeDetector(LossSpikeConfig(factor=10, window=20))
    assert [i for i, loss in enumerate(losses) if detector.is_spike(loss, samples=8, step=i)] == spikes
    assert detector.good_step == max(i for i in range(len(losses)) if i not in spikes)


def test_a_detector_goes_on_where_it_was() -> None:
    detector = SpikeDetector(LossSpikeConfig(window=5))
    for step in range(7):
        detector.is_spike(1.0, samples=8, step=step)
    detector.rolled_back(3)
    again = SpikeDetector(LossSpikeConfig(window=5))
    again.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert (again.rollbacks, again.good_step) == (1, 3)
    assert again.limit(samples=8) == detector.limit(samples=8) == pytest.approx(1.1)


def test_the_short_interval_at_the_end_of_an_epoch_is_no_spike() -> None:
    """Epochs of 1001 updates of a loss that only scatters, logged every 50: each ends with an interval of one."""
    scatter = random.Random(0)
    for _ in range(40):
        detector = SpikeDetector(LossSpikeConfig())
        for _ in range(10):
            for samples in [50] * 20 + [1]:
                assert not detector.is_spike(2.5 + 0.3 * scatter.gauss(0, 1) / samples**0.5, samples=samples, step=1)
        # A jump is one over few samples as well.
        assert detector.is_spike(9.0, samples=1, step=1)
        assert detector.is_spike(3.5, samples=50, step=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"factor": 0}, "factor must be > 0"),
        ({"window": 4}, "window must be an integer >= 5"),
        ({"max_rollbacks": 0}, "max_rollbacks must be an integer >= 1"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossSpikeConfig(**values)


# ---- Going back ----------------------------------------------------------------------------------------------------


class Jumps(TinyTrainer):
    """Has data that ruins the weights: micro-batches 16 and 17, so updates 17 and 18."""

    ruinous: tuple[int, ...] = (16, 17)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if self.training and batch_idx in self.ruinous:
            outputs["loss"] = outputs["loss"] * 100
        return outputs


class Watches(Callback):
    """Has a state in checkpoints, and records rollbacks."""

    def __init__(self) -> None:
        self.updates = 0
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self.restored: list[tuple[int, bool]] = []
        self.seen: list[list[int]] = []

    def on_batch_start(self, trainer: Trainer[Any], batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["id"].tolist())

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        self.updates += 1
        self.states[trainer.global_step] = _learned(trainer)

    def on_restored(self, trainer: Trainer[Any]) -> None:
        before, now = self.states.get(trainer.global_step, {}), _learned(trainer)
        self.restored.append((trainer.global_step, all(torch.equal(now[name], before[name]) for name in now)))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.updates = state_dict["updates"]


def _learned(trainer: Trainer[Any]) -> dict[str, torch.Tensor]:
    moments = {
        f"{number}/{name}": to_full_tensor(value).clone()
        for number, state in trainer.optimizers["optimizer"].state_dict()["state"].items()
        for name, value in state.items()
    }
    return {
        **weights(trainer),
        **moments,
        "scheduled": torch.tensor(trainer.schedulers["scheduler"].last_epoch),
        "random": torch.get_rng_state(),
    }


def _config(**changes: Any) -> TinyConfig:
    settings = {
        "max_steps": 30,
        "num_rows": 400,
        "global_batch_size": 8,
        "evaluate_every": None,
        "dropout": 0.1,
        "log_every": "2 steps",
        "checkpoint": CheckpointConfig(every=3, keep_last="all"),
        "loss_spike": LossSpikeConfig(factor=20.0),
        **changes,
    }
    return TinyConfig(**settings)


def _spike(world: World, folder: str, strategy: str = "ddp") -> dict[str, Any]:
    spy, printed = Watches(), list[str]()
    trainer = Jumps(
        _config(parallel=ParallelConfig(strategy=strategy)),  # type: ignore[arg-type]
        run_dir=folder,
        world=world,
        callbacks=[spy],
        printer=printed.append,
    )
    result = trainer.fit()
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": result.steps,
        "restored": spy.restored,
        "updates": spy.updates,
        "seen": spy.seen,
        "printed": printed,
        "lines": lines,
        "micro_batches": trainer.micro_batches_seen,
        "samples": trainer.progress.offset,
    }


def _assert_went_back(result: dict[str, Any]) -> None:
    assert result["steps"] == result["updates"] == 30
    # The loss up to step 18 has jumped; that up to 16 was usual; the last checkpoint until then is of step 15.
    assert result["restored"] == [(15, True)]
    # No row twice: three updates of data have been left behind.
    assert result["micro_batches"] == len(result["seen"]) == 33
    rows = [row for batch in result["seen"] for row in batch]
    assert len(rows) == len(set(rows))
    steps = [line["step"] for line in result["lines"] if "train/loss" in line]
    assert steps == list(range(2, 31, 2)), "no step is twice in the records"
    assert [(line["step"], line["rollbacks"]) for line in result["lines"] if "rollbacks" in line] == [(15, 1.0)]
    assert all(line["train/loss"] < 10 for line in result["lines"] if "train/loss" in line)


def test_a_spike_takes_the_run_back_and_on_behind_the_guilty_data(tmp_path: Path) -> None:
    result = _spike(ALONE, str(tmp_path))
    _assert_went_back(result)
    (told,) = [line for line in result["printed"] if "a spike" in line]
    assert "at step 18, a spike (the limit is" in told
    assert "rolled back to the weights of step 15" in told
    assert "(rollback 1 of at most 3)" in told


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_all_ranks_go_back_together(tmp_path: Path, strategy: str) -> None:
    for result in run_on_ranks(_spike, 2, str(tmp_path), strategy):
        _assert_went_back(result)


def test_what_was_evaluated_of_weights_given_up_is_not_said_of_those_gone_back_to(tmp_path: Path) -> None:
    class Saved(Callback):
        def __init__(self) -> None:
            self.losses: list[tuple[int, float]] = []

        def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
            self.losses.append((checkpoint.step, checkpoint.metrics["validation/loss"]))

    saved, stopping = Saved(), EarlyStopping(patience=100)
    # Of step 14 there is a checkpoint, of 16 only an evaluation, and at 18 the loss has jumped.
    config = _config(max_steps=20, evaluate_every="2 steps", checkpoint=CheckpointConfig(every=14, keep_last="all"))
    result = Jumps(config, run_dir=tmp_path, world=ALONE, callbacks=[saved, stopping]).fit()
    assert [step for step, _ in saved.losses] == [14, 14, 20]
    assert saved.losses[0] == saved.losses[1]
    # Neither is the record of going back taken for one of an evaluation.
    assert result.steps == 20


def test_an_epoch_at_whose_end_the_run_goes_back_is_in_the_history_once(tmp_path: Path) -> None:
    class Without(Jumps):
        """The last log of the epoch of 20 updates is that of its end, and no evaluation follows it."""

        ruinous = (18,)

        def configure_dataloaders(self) -> Any:
            return super().configure_dataloaders()[0]

    rows = []
    for epochs in (1, 2):
        config = _config(max_steps=None, max_epochs=epochs, num_rows=160, log_every=3)
        trainer = Without(config, run_dir=tmp_path, world=ALONE, printer=lambda text: None)
        rows.append([(row["epoch"], row["step"]) for row in trainer.fit().history])
    assert rows == [[(1, 18)], [(1, 18), (2, 38)]]


def test_an_epoch_of_updates_that_are_made_again_is_in_no_history(tmp_path: Path) -> None:
    """The first epoch ends at step 16, and the spike at step 18 rolls the run back to 15."""
    config = _config(max_steps=None, max_epochs=3, num_rows=128)
    result = Jumps(config, run_dir=tmp_path, world=ALONE, printer=lambda text: None).fit()
    assert [(row["epoch"], row["step"]) for row in result.history] == [(2, 29), (3, 45)]
    assert read_history(tmp_path / "metrics.jsonl") == result.history


def test_a_run_killed_after_going_back_goes_on_from_there(tmp_path: Path) -> None:
    class Killed(Callback):
        def on_batch_start(self, trainer: Trainer[Any], batch: Any, batch_idx: int) -> None:
            if batch_idx == 19:
                raise KeyboardInterrupt

    whole_run = Jumps(_config(), run_dir=tmp_path / "whole", world=ALONE)
    whole_run.fit()
    killed = Jumps(_config(), run_dir=tmp_path / "killed", world=ALONE, callbacks=[Killed()])
    with pytest.raises(KeyboardInterrupt):
        killed.fit()
    resumed = Jumps(_config(), run_dir=tmp_path / "killed", world=ALONE)
    resumed.fit()
    assert resumed.seen[0][0] == 15
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole_run).items())


def test_a_run_goes_back_so_many_times_and_no_more(tmp_path: Path) -> None:
    class JumpsOften(Jumps):
        ruinous = tuple(range(16, 200))

    config = _config(loss_spike=LossSpikeConfig(factor=20.0, max_rollbacks=2))
    with pytest.raises(LossSpikeError, match="the run has rolled back 2 times already") as raised:
        JumpsOften(config, run_dir=tmp_path, world=ALONE).fit()
    assert "train/loss is" in str(raised.value)


def test_without_a_checkpoint_from_before_the_run_goes_on(tmp_path: Path) -> None:
    printed: list[str] = []
    config = _config(checkpoint=CheckpointConfig(every=None))
    trainer = Jumps(config, run_dir=tmp_path, world=ALONE, printer=printed.append)
    assert trainer.fit().steps == 30
    assert "there is no earlier checkpoint to roll back to" in printed[0]


def test_what_a_guard_needs_is_asked_for_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the trainer a run_dir"):
        Jumps(_config(), world=ALONE).fit()
    config = _config(loss_spike=LossSpikeConfig(metric="train/los"))
    with pytest.raises(ConfigError, match=r"loss_spike.metric is 'train/los', but the log has .*train/loss"):
        Jumps(config, run_dir=tmp_path, world=ALONE).fit()
