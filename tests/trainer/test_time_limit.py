"""The time limit: parsed when it is made, counted over attempts, obeyed in training and in evaluations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headway.trainer import Callback, CheckpointConfig, ConfigError, Duration, World
from headway.trainer.callbacks import TimeLimit
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.alone("cpu")


class Slow(Callback):
    """Makes updates and batches of an evaluation take some time."""

    def __init__(self, *, step_s: float = 0.0, batch_s: float = 0.0) -> None:
        self.step_s, self.batch_s = step_s, batch_s

    def on_step_start(self, trainer: Any) -> None:
        time.sleep(self.step_s)

    def on_evaluation_batch_start(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.batch_s)


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(
        **{"num_rows": 8000, "max_steps": 900, "evaluate_every": None, "log_every": "1000 steps", **changes}
    )


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90m", 5400), ("2h30m", 9000), ("1d", 86400), (5400, 5400), (0.5, 0.5), ("45 s", 45),
        (Duration(60, "seconds"), 60),
    ],
)  # fmt: skip
def test_times_are_parsed_C11(limit: Any, seconds: float) -> None:
    assert TimeLimit(limit).limit_s == seconds


@pytest.mark.parametrize("limit", ["2 months", "500 steps", "2 epochs", "500", 0, -1, "soon", True, None])
def test_what_is_no_time_is_refused_when_it_is_made_C11(limit: Any) -> None:
    with pytest.raises(ConfigError):
        TimeLimit(limit)


def test_the_limit_counts_over_attempts_saves_and_is_told_C11_H3(tmp_path: Path) -> None:
    """Three attempts of a fraction of the limit each, ended by a stop; a fourth has next to nothing left."""

    def fit(limit_s: float) -> Any:
        callbacks = [Slow(step_s=0.02), TimeLimit(limit_s)]
        return TinyTrainer(_config(), world=ALONE, callbacks=callbacks, run_dir=tmp_path).fit()

    first = fit(0.4)
    assert (first.status, first.reason) == ("time_limit", "the time limit of 0s is reached")
    assert 0 < first.steps <= 20
    assert first.last_checkpoint is not None
    # Time is up already: no update is made, and nothing is written over.
    again = fit(0.4)
    assert (again.status, again.steps, again.last_checkpoint) == ("time_limit", first.steps, first.last_checkpoint)
    longer = fit(3.0)
    assert longer.status == "time_limit"
    assert first.steps < longer.steps <= 150


def test_a_checkpoint_knows_the_time_up_to_it_though_nothing_was_logged(tmp_path: Path) -> None:
    config = _config(max_steps=5, checkpoint=CheckpointConfig(every="5 steps", at_end=False))  # type: ignore[arg-type]
    TinyTrainer(config, world=ALONE, callbacks=[Slow(step_s=0.02)], run_dir=tmp_path).fit()
    resumed = TinyTrainer(config, world=ALONE, run_dir=tmp_path)
    resumed.fit()
    assert resumed.progress.elapsed_s >= 0.1


def test_an_evaluation_is_cut_short_C11() -> None:
    trainer = TinyTrainer(
        _config(evaluate_every="1 steps"), world=ALONE, callbacks=[Slow(batch_s=0.1), TimeLimit(0.15)]
    )
    result = trainer.fit()
    assert (result.status, result.steps) == ("time_limit", 1)
    assert "validation/loss" not in result.metrics


def _on_ranks(world: World) -> tuple[str, int]:
    """The main rank's clock decides: the other one's limit never comes."""
    limit = TimeLimit(0.2 if world.is_main else "1d")
    config = _config(checkpoint=CheckpointConfig(every=None))
    result = TinyTrainer(config, world=world, callbacks=[Slow(step_s=0.02), limit]).fit()
    return result.status, result.steps


def test_the_clock_of_the_main_rank_decides_for_all_C11() -> None:
    first, second = run_on_ranks(_on_ranks, 2)
    assert first == second
    assert first[0] == "time_limit"
