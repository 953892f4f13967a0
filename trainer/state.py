"""The state of a run as one dict of parts, used alike to save it and to restore it."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .best import Best
from .checkpoint import Checkpoint, CheckpointStore, CheckpointWarning, read_checkpoint
from .config import CheckpointConfig
from .errors import ConfigError, DataError
from .metrics import MeanMetrics
from .model_state import ModelState, OptimizerState
from .recorder import Recorder, as_plain
from .result import FitResult, Status
from .rng import RngState
from .streams import BatchStream, Stateful
from .update import Update

if TYPE_CHECKING:
    from .trainer import Trainer


class RunState:
    """Saves and restores all that influences the next step of a trainer that is set up.

    Args:
        trainer: whose state it is.
        recorder: its trackers' state belongs to it.
        metrics: what has been added since the last flush belongs to it.
        update: its loss scale and counts belong to it.
        data: the position is in the trainer's progress; what the data is must not change under it.

    Attributes:
        last_saved_step: the update after which the newest checkpoint of this run was saved, if there is one.
    """

    def __init__(
        self, trainer: Trainer[Any], recorder: Recorder, metrics: MeanMetrics, update: Update, data: BatchStream
    ) -> None:
        self._trainer, self._recorder, self._metrics, self._data = trainer, recorder, metrics, data
        self._update = update
        self._store: CheckpointStore | None = None
        config = trainer.config.checkpoint
        if trainer.run_dir is not None:
            self._store = CheckpointStore(
                f"{trainer.run_dir.rstrip('/')}/checkpoints",
                world=trainer.world,
                keep_last=config.keep_last,
                monitor=config.monitor,
                mode=config.mode,
            )
        self._best = Best(config.mode)
        self._misses_monitor = False
        self.last_saved_step: int | None = None

    def save(self) -> Checkpoint:
        """Writes a checkpoint. Every rank must call this.

        Raises:
            ConfigError: the trainer has no run directory.
            CheckpointError: it could not be written; what was there before is untouched.
        """
        if self._store is None:
            raise ConfigError("there is nowhere to save to: give the trainer a run_dir")
        trainer = self._trainer
        checkpoint = self._store.save(
            self._parts(),
            rank_parts=self._rank_parts(),
            step=trainer.progress.step,
            epoch=trainer.progress.epoch,
            metrics=self._metrics_of_this_state(),
            meta={
                "config": as_plain(trainer.config),
                "trainer": f"{type(trainer).__module__}:{type(trainer).__qualname__}",
                "data": {"guarantee": self._data.guarantee, "fingerprint": self._data.fingerprint},
                "versions": _versions(),
            },
        )
        self.last_saved_step = trainer.progress.step
        return checkpoint

    def judge(self, metrics: Mapping[str, float]) -> bool:
        """Takes note of an evaluation, and returns whether it is the best of the run so far.

        A metric that is not there makes no evaluation the best; it costs a warning, where somebody asked for it.
        """
        config, step = self._trainer.config.checkpoint, self._trainer.progress.step
        if config.monitor in metrics:
            return self._best.offer(metrics[config.monitor], step=step)
        asked = config.save_best or config.monitor != CheckpointConfig.monitor
        if asked and not self._misses_monitor and self._trainer.world.is_main:
            warnings.warn(
                f"checkpoint.monitor is {config.monitor!r}, but the evaluation after step {step} gave "
                f"{', '.join(metrics) or 'nothing'}: checkpoints are saved all the same, and none of them is the best",
                CheckpointWarning,
                stacklevel=2,
            )
        self._misses_monitor = True
        return False

    def check_storage(self) -> None:
        """Finds out before the first step whether a checkpoint can be written. Every rank must call this.

        Raises:
            CheckpointError: it cannot, and why.
        """
        if self._store is not None:
            self._store.check()

    def restore(self, resume: str) -> Checkpoint | None:
        """Loads what `Trainer.fit(resume=...)` asks for, and returns it. Every rank must call this.

        Raises:
            CheckpointError: there are checkpoints and none of them is good, or the one asked for is not.
            DataError: the data is not what it was when the checkpoint was saved.
        """
        store, trainer = self._store, self._trainer
        if store is None or resume == "never":
            if resume not in ("auto", "never"):
                raise ConfigError(f"resume={resume!r} needs a trainer with a run_dir to go on in")
            return None
        store.clean()
        checkpoint = store.newest_good() if resume == "auto" else read_checkpoint(resume)
        if checkpoint is None:
            return None
        before = checkpoint.meta.get("data", {}).get("fingerprint")
        if before != self._data.fingerprint:
            raise DataError(
                f"the training data has changed since {checkpoint.path} was saved: its fingerprint was {before} and is "
                f"{self._data.fingerprint}. Bring the old data back, or begin another run"
            )
        store.load(self._parts(), rank_parts=self._rank_parts(), checkpoint=checkpoint)
        self.last_saved_step = checkpoint.step if resume == "auto" else None
        progress = trainer.progress
        if self._data.guarantee != "exact" and progress.step_in_epoch:
            warnings.warn(
                f"the training data guarantees {self._data.guarantee!r}, not 'exact': epoch {progress.epoch + 1} "
                f"begins again, and the samples of its first {progress.step_in_epoch} steps may be seen twice",
                stacklevel=2,
            )
            progress.step_in_epoch = progress.offset = 0
        trainer.callbacks.on_restored(trainer)
        return checkpoint

    def result(self, status: Status, reason: str, resumed_from: Checkpoint | None) -> FitResult:
        """Says how the run ended, as of now."""
        trainer = self._trainer
        kept = self._store.list() if self._store is not None else []
        best = self._store.best() if self._store is not None else None
        return FitResult(
            status=status,
            reason=reason,
            metrics=dict(trainer.history.latest),
            history=list(trainer.history.epochs),
            steps=trainer.progress.step,
            epochs=trainer.progress.epoch,
            last_checkpoint=kept[-1].path if kept else None,
            best_checkpoint=best.path if best else None,
            best_metric=self._best.value,
            best_step=self._best.step,
            resumed_from=resumed_from.path if resumed_from else None,
        )

    def _metrics_of_this_state(self) -> dict[str, float]:
        """What was measured last, without the results of an evaluation of earlier weights: they are not these."""
        progress, latest = self._trainer.progress, self._trainer.history.latest
        if progress.evaluations and progress.evaluated_step == progress.step:
            return latest
        return {name: value for name, value in latest.items() if not name.startswith("validation/")}

    def _parts(self) -> dict[str, Stateful]:
        trainer = self._trainer
        return {
            "models": ModelState(trainer.models),
            **{
                f"optimizers/{name}": OptimizerState(trainer.models, name, each)
                for name, each in trainer.optimizers.items()
            },
            **{f"schedulers/{name}": each for name, each in trainer.schedulers.items()},
            "update": self._update,
            "progress": trainer.progress,
            "history": trainer.history,
            "best": self._best,
            "callbacks": trainer.callbacks,
            "recorder": self._recorder,
        }

    def _rank_parts(self) -> dict[str, Stateful]:
        return {"rng": RngState(), "metrics": self._metrics}


def _versions() -> dict[str, str]:
    try:
        headway = metadata.version("headway")
    except metadata.PackageNotFoundError:
        headway = "from source"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "headway": headway,
    }
