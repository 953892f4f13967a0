"""The cost of records: listing a thousand runs, and writing metrics and events during training."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headway.orchestrator import Experiment, list_runs
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.run import now
from headway.orchestrator.storage.events import EventWriter
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, Trainer, TrainerConfig, World

from .loop import make_mlp
from .table import Row, interleave

RUNS, MOST_S = 1000, 1.0
MOST_US = 2.0
# Steps per epoch (with one event each, as for a checkpoint), pairs, and steps between two records.
_STEPS, _PAIRS, _INTERVAL = 1000, 15, int(TrainerConfig(max_steps=1).log_every.amount)


class Tiny(Trainer[TrainerConfig]):
    """A model with steps of half a millisecond."""

    def configure_models(self) -> None:
        with torch.device("cpu"):
            self.model = make_mlp()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def configure_dataloaders(self) -> Any:
        return [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(_STEPS)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)


def config(**settings: Any) -> TrainerConfig:
    return TrainerConfig(checkpoint=CheckpointConfig(every=None, at_end=False), **settings)


def rows() -> list[Row]:
    """Measure all rows."""
    torch.set_num_threads(1)
    return [listing_row(), writing_row()]


def listing_row() -> Row:
    """Measure the command `headway runs` over a thousand runs and over none."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder, tempfile.TemporaryDirectory() as empty:
        make_runs(folder)
        assert command_s(folder, lines=RUNS + 1) > 0
        measured = interleave(lambda: command_s(folder, lines=RUNS + 1), lambda: command_s(empty, lines=1), pairs=9)
        listing_s = statistics.median(seconds(lambda: list_runs(folder)) for _ in range(9))
    full_s, empty_s = (statistics.median(column) for column in zip(*measured, strict=True))
    return Row(
        f"records: headway runs over {RUNS:,} and over none; reading them {listing_s:.2f} s",
        f"{full_s:.2f} s",
        f"{empty_s:.2f} s",
        full_s / empty_s,
        f"< {MOST_S:g} s",
        full_s < MOST_S,
    )


def make_runs(storage: str) -> None:
    """Train one run of 10,000 steps, and copy its files to make the others, each with a new record."""
    experiment = Experiment(name="run-0000", trainer=Tiny, config=config(max_steps=10_000), storage=storage)
    run = open_run(experiment).run
    events = EventWriter(run.folder, "driver")
    result = Tiny(config(max_steps=10_000), run_dir=run.run_dir, printer=lambda text: None).fit()
    for step in range(0, result.steps, 200):
        events.add("checkpoint_saved", step=step, path=f"{run.run_dir}/checkpoints/step-{step:08d}")
    run.update(
        status="completed", reason=result.reason, ended=now(), steps=result.steps, epochs=result.epochs,
        samples=result.samples, metrics=result.metrics, attempts=1,
    )  # fmt: skip
    for number in range(1, RUNS):
        name = f"run-{number:04d}"
        shutil.copytree(run.run_dir, Path(storage, name))
        record = replace(run.record, id=uuid.uuid4().hex[:12], name=name)
        Folder(f"{storage}/{name}").write("run.json", record.to_json())


def command_s(storage: str, *, lines: int) -> float:
    """Return the seconds of the whole process."""
    command = [sys.executable, "-m", "headway.orchestrator", "runs", "--storage", storage]
    began_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took_s = time.perf_counter() - began_s
    assert len(done.stdout.splitlines()) == lines, done.stdout
    return took_s


def writing_row() -> Row:
    """Measure the cost of writing per step, timed at the write itself: two loops differ by more than that."""
    with tempfile.TemporaryDirectory() as folder:
        writing, silent = trainer_of(Path(folder, "run").as_posix()), trainer_of(None)
        took_s: list[float] = []
        trackers = writing._engine.loop.recorder.trackers
        log = trackers.log

        def timed(*args: Any, **options: Any) -> None:
            took_s.append(seconds(lambda: log(*args, **options)))

        trackers.log = timed  # type: ignore[method-assign]
        measured = interleave(
            lambda: seconds(writing.train_epoch) / _STEPS, lambda: seconds(silent.train_epoch) / _STEPS, pairs=_PAIRS
        )
        assert len(took_s) >= _PAIRS * _STEPS // _INTERVAL
        events = EventWriter(Folder(folder), "driver")
        event_us = 1e6 * statistics.median(
            seconds(lambda: events.add("checkpoint_saved", step=1, path=folder)) for _ in range(1000)
        )
    record_us = 1e6 * statistics.median(took_s)
    ours_us, theirs_us = (1e6 * statistics.median(column) for column in zip(*measured, strict=True))
    per_step_us = 1e6 * sum(took_s) / (_PAIRS * _STEPS) + event_us / _STEPS
    return Row(
        f"records: {record_us:.0f} us every {_INTERVAL} steps, an event of {event_us:.0f} us every {_STEPS}: "
        f"{per_step_us:.2f} us per step; with and without",
        f"{ours_us:.0f} us",
        f"{theirs_us:.0f} us",
        ours_us / theirs_us,
        f"<= +{MOST_US:g} us",
        per_step_us <= MOST_US,
    )


def trainer_of(run_dir: str | None) -> Tiny:
    """Return a trainer that is ready for its first epoch; without a folder it writes nothing."""
    trainer = Tiny(config(max_steps=10**9), world=World.single("cpu"), run_dir=run_dir, printer=lambda text: None)
    trainer.setup()
    # `fit` does this before the first epoch. Without `fit`, the epochs of both can be interleaved.
    trainer._engine.loop.recorder.start(resumed=False, began_s=time.perf_counter())
    return trainer


def seconds(do: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s
