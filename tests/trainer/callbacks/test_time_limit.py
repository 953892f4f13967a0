"""The time limit: parsed early, counted over attempts, respected in training and evaluations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headway.trainer import Callback, CheckpointConfig, ConfigError, Duration, World
from headway.trainer.callbacks import TimeLimit
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.single("cpu")


class Clock:
    """The real clock plus an offset, so that long waits take no time."""

    def __init__(self) -> None:
        self._real, self.ahead_s = time.perf_counter, 0.0

    def __call__(self) -> float:
        return self._real() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


class Slow(Callback):
    """Makes updates and evaluation batches take some time."""

    def __init__(self, clock: Clock, *, step_s: float = 0.0, batch_s: float = 0.0) -> None:
        self.clock, self.step_s, self.batch_s = clock, step_s, batch_s

    def on_step_start(self, trainer: Any) -> None:
        self.clock.ahead_s += self.step_s

    def on_evaluation_batch_start(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        self.clock.ahead_s += self.batch_s


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
def test_times_are_parsed(limit: Any, seconds: float) -> None:
    assert TimeLimit(limit).limit_s == seconds


@pytest.mark.parametrize("limit", ["2 months", "500 steps", "2 epochs", "500", 0, -1, "soon", True, None])
def test_what_is_no_time_is_refused_when_it_is_made(limit: Any) -> None:
    with pytest.raises(ConfigError):
        TimeLimit(limit)


def test_the_limit_counts_over_attempts_saves_and_is_told(tmp_path: Path, clock: Clock) -> None:
    """Three attempts of a fraction of the limit each, ended by a stop; the fourth has almost no time left."""

    def fit(limit_s: float) -> Any:
        callbacks = [Slow(clock, step_s=200.0), TimeLimit(limit_s)]
        return TinyTrainer(_config(), world=ALONE, callbacks=callbacks, run_dir=tmp_path).fit()

    first = fit(3600)
    assert (first.status, first.reason) == ("time_limit", "the time limit of 1h00m is reached")
    assert first.steps == 18
    assert first.last_checkpoint is not None
    # The time is already up: no update is made, and nothing is overwritten.
    again = fit(3600)
    assert (again.status, again.steps, again.last_checkpoint) == ("time_limit", first.steps, first.last_checkpoint)
    longer = fit(7200)
    assert (longer.status, longer.steps) == ("time_limit", 36)


def test_a_checkpoint_knows_the_time_up_to_it_though_nothing_was_logged(tmp_path: Path, clock: Clock) -> None:
    config = _config(max_steps=5, checkpoint=CheckpointConfig(every="5 steps", at_end=False))  # type: ignore[arg-type]
    TinyTrainer(config, world=ALONE, callbacks=[Slow(clock, step_s=200.0)], run_dir=tmp_path).fit()
    resumed = TinyTrainer(config, world=ALONE, run_dir=tmp_path)
    resumed.fit()
    assert 1000 <= resumed.progress.elapsed_s < 1200


def test_setting_up_counts_and_hastens_nothing_else(tmp_path: Path, clock: Clock) -> None:
    class Compiles(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            clock.ahead_s += 3600.0

    config = _config(max_steps=3, checkpoint=CheckpointConfig(every="50m", at_end=False))  # type: ignore[arg-type]
    trainer = Compiles(config, world=ALONE, run_dir=tmp_path)
    result = trainer.fit()
    assert (result.steps, result.last_checkpoint) == (3, None)
    assert 3600 <= result.metrics["elapsed_s"] < 7200
    result = Compiles(config, world=ALONE, callbacks=[TimeLimit("1h")]).fit()
    assert (result.status, result.steps) == ("time_limit", 0)


def test_an_evaluation_is_cut_short(clock: Clock) -> None:
    trainer = TinyTrainer(
        _config(evaluate_every="1 steps"), world=ALONE, callbacks=[Slow(clock, batch_s=200.0), TimeLimit(300)]
    )
    result = trainer.fit()
    assert (result.status, result.steps) == ("time_limit", 1)
    assert "validation/loss" not in result.metrics


def _on_ranks(world: World) -> tuple[str, int]:
    """The main rank's clock decides; the other rank's limit is never reached."""
    limit = TimeLimit("1h" if world.is_main else "1d")
    config = _config(checkpoint=CheckpointConfig(every=None))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "perf_counter", clock := Clock())
        result = TinyTrainer(config, world=world, callbacks=[Slow(clock, step_s=200.0), limit]).fit()
    return result.status, result.steps


def test_the_clock_of_the_main_rank_decides_for_all() -> None:
    first, second = run_on_ranks(_on_ranks, 2)
    assert first == second
    assert first[0] == "time_limit"
    assert 18 <= first[1] <= 20
