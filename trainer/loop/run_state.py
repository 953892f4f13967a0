"""The state of a run as one dict of parts, used alike to save it and to restore it."""

from __future__ import annotations

import functools
import platform
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
import torch

from ..checkpoints.background import BackgroundSave
from ..checkpoints.code_fingerprint import learning_code_at_first_use
from ..checkpoints.model_state import ModelState, NamedModels, OptimizerState, tensors_changed_by_step
from ..checkpoints.resume_check import ResumeCertificate
from ..checkpoints.retention import Best
from ..checkpoints.rng import RngState, seed_everything
from ..checkpoints.store import Checkpoint, CheckpointStore, CheckpointWarning, Digests
from ..config import CheckpointConfig, as_plain
from ..data.protocols import BatchStream, Stateful, SupportsDiff, is_exhausted
from ..distributed.world import World
from ..errors import ConfigError, DataError
from ..exact.numerics import Numerics
from ..metrics.means import MeanMetrics
from ..metrics.train_log import Recorder
from ..result import FitResult, Status, Table
from ..setup.init_from import BorrowedWeights, InitialWeights
from ..step.optimizer_step import OptimizerStep
from .context import RunContext
from .loss_spikes import SpikeDetector
from .progress import Progress
from .run_length import RunLength
from .steps import Steps

COMPONENTS = ("models", "optimizers", "schedulers", "progress", "data", "callbacks", "rng")
"""What of a checkpoint can be restored or left: "progress" is counters, history and records; "data" its position."""


class RunState:
    """Saves and restores all that influences the next step.

    Args:
        ctx: of the run, with its models, optimizers and schedulers.
        steps: the user's steps, whose code a resumed run should have as well.
        numerics: ordinary or exact arithmetic.
        recorder: the state of its trackers is saved.
        metrics: what has been added since the last flush is saved.
        update: its loss scale and counts are saved.
        spikes: the losses that it takes for usual are saved.
        data: its fingerprint is saved; the position in it is in `ctx.progress`.
        length: of the run.

    Attributes:
        last_saved_step: the update after which the newest checkpoint of this run was saved, if there is one.
        is_half_restored: whether a restore has begun to load, and then failed.
    """

    def __init__(
        self,
        ctx: RunContext,
        steps: Steps,
        numerics: Numerics,
        recorder: Recorder,
        metrics: MeanMetrics,
        update: OptimizerStep,
        spikes: SpikeDetector,
        data: BatchStream,
        length: RunLength,
    ) -> None:
        self._ctx, self._numerics, self._recorder, self._metrics = ctx, numerics, recorder, metrics
        self._data, self._length, self._program = data, length, type(steps)
        self._optimizer_step, self._spikes = update, spikes
        self._certificate = ResumeCertificate(
            code=learning_code_at_first_use(self._program),
            config=ctx.config,
            world=ctx.world,
            progress=ctx.progress,
            optimizers=ctx.optimizers,
            schedulers=ctx.lr_stepping.schedulers,
            data=data,
            exact=numerics.facts(ctx.device),
        )
        self._store: CheckpointStore | None = None
        config = ctx.config.checkpoint
        if ctx.run_dir is not None:
            self._store = CheckpointStore(
                f"{ctx.run_dir.rstrip('/')}/checkpoints",
                # Its thread's collectives must not get between those of the training.
                world=self._saving_world(),
                keep_last=config.keep_last,
                monitor=config.monitor,
                mode=config.mode,
                keep_best=config.keep_best,
                keep_every=config.keep_every,
                keep_every_time=config.keep_every_time,
                retries=config.retries,
                retry_after_s=config.retry_after.amount,
            )
        self._best = Best(config.mode)
        self._has_warned_of_monitor = False
        self._loaded_initial_weights = self._has_begun = False
        self.last_saved_step: int | None = None
        self.is_half_restored = False

    def save(self) -> Checkpoint:
        """Writes a checkpoint. Every rank must call this.

        Raises:
            ConfigError: the trainer has no run directory.
            CheckpointError: it could not be written; what was there before is untouched.
        """
        models = NamedModels(self._ctx.models)
        checkpoint = self._require_store().save(
            self._parts(models),
            rank_parts=self._rank_parts(),
            **self._description(),
            changes_only_on_step=tensors_changed_by_step(models, self._ctx.optimizers),
        )
        self.last_saved_step = checkpoint.step
        return checkpoint

    def rejoin(self) -> None:
        """Lets the ranks' saving threads meet in another process group. Every rank must call this."""
        if self._store is not None:
            self._store.world = self._saving_world()

    def _saving_world(self) -> World:
        return self._ctx.world.with_own_group(timeout_s=self._ctx.config.parallel.timeout.amount)

    def begin_save(self) -> BackgroundSave:
        """Begins to write a checkpoint in the background. Every rank must call this, and ask for the result later.

        Raises:
            ConfigError: the trainer has no run directory.
        """
        models = NamedModels(self._ctx.models)
        saving = self._require_store().begin_save(
            self._parts(models),
            rank_parts=self._rank_parts(),
            **self._description(),
            changes_only_on_step=tensors_changed_by_step(models, self._ctx.optimizers),
        )
        self.last_saved_step = self._ctx.progress.step
        return saving

    def _require_store(self) -> CheckpointStore:
        if self._store is None:
            raise ConfigError("there is nowhere to save to: give the trainer a run_dir")
        return self._store

    def _description(self) -> dict[str, Any]:
        """What a checkpoint of this moment says of itself."""
        ctx, certificate = self._ctx, self._certificate.capture()
        meta = {
            "trainer": f"{self._program.__module__}:{self._program.__qualname__}",
            "data": {"guarantee": self._data.guarantee, "fingerprint": self._data.fingerprint},
            "total_steps": self._length.total_steps,
            "began_after": self._require_store().began_after,
            "versions": versions(),
        }

        def complete(digests: Digests) -> dict[str, Any]:
            # A config cannot change meanwhile.
            return {"config": as_plain(ctx.config), **meta, "certificate": certificate(digests)}

        return {
            "step": ctx.progress.step,
            "epoch": ctx.progress.epoch,
            "metrics": self._current_metrics(),
            "meta": complete,
        }

    def record_evaluation(self, metrics: Mapping[str, float]) -> bool:
        """Takes note of an evaluation, and returns whether it is the best of the run so far.

        A metric that is not there makes no evaluation the best; it costs a warning, where somebody asked for it.
        """
        if self.has_monitor(metrics):
            return self._best.update(metrics[self._ctx.config.checkpoint.monitor], step=self._ctx.progress.step)
        return False

    def has_monitor(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation, or a sanity check of one, gives the metric; warns once of one that was asked for."""
        config = self._ctx.config.checkpoint
        if config.monitor in metrics:
            return True
        asked = config.save_best or config.monitor != CheckpointConfig.monitor
        if asked and not self._has_warned_of_monitor and self._ctx.world.is_main:
            when = f"evaluation after step {self._ctx.progress.step}"
            warnings.warn(
                f"checkpoint.monitor is {config.monitor!r}, but the {when} gave "
                f"{', '.join(metrics) or 'nothing'}: checkpoints are saved all the same, and none of them is the best",
                CheckpointWarning,
                stacklevel=2,
            )
        self._has_warned_of_monitor = True
        return False

    def check_storage(self) -> None:
        """Finds out before the first step whether a checkpoint can be written. Every rank must call this.

        Raises:
            CheckpointError: it cannot, and why.
        """
        if self._store is not None:
            self._store.check_writable()

    def restore(
        self, resume: str, components: Collection[str] = COMPONENTS, *, accept_changes: bool = False
    ) -> Checkpoint | None:
        """Loads what `Trainer.fit(resume=..., restore=...)` asks for, and returns it. Every rank must call this.

        Where there is nothing to go on from, the run begins with the weights that `init_from` names, if it does.

        Raises:
            CheckpointError: there are checkpoints and none of them is good, or the one asked for is not.
            ConfigError: it makes no sense.
            DataError: the data is not what it was when the checkpoint was saved.
            ResumeError: something else is not.
        """
        store, config = self._store, self._ctx.config
        check_components(components)
        if store is None or resume == "never":
            if resume not in ("auto", "never"):
                raise ConfigError(f"resume={resume!r} needs a trainer with a run_dir to go on in")
            if store is not None:
                store.start_over()
            self._has_begun = True
            self.load_initial_weights()
            return None
        if config.init_from is not None and resume != "auto":
            raise ConfigError(
                f"init_from={config.init_from!r} takes weights only, and resume={resume!r} takes all: choose one"
            )
        store.remove_leftovers()
        checkpoint = store.newest_good() if resume == "auto" else store.read(resume)
        if checkpoint is None:
            self._has_begun = True
            self.load_initial_weights()
            return None
        # A run that began with other weights goes on with its own; it must be the run that began with them.
        began_from = checkpoint.meta.get("config", {}).get("init_from")
        if config.init_from not in (None, began_from):
            raise ConfigError(
                f"init_from={config.init_from!r} begins a new run, and this one has a checkpoint already, "
                f"{checkpoint.path}, of a run that began "
                f"{f'from {began_from}' if began_from else 'without'}: leave it out to go on, or begin another run"
            )
        is_other_data = self._check_data(checkpoint, components)
        self._certificate.check_before_load(checkpoint, components, accept_changes=accept_changes)
        parts = {name: part for name, part in self._parts().items() if _component(name) in components}
        rank_parts = {name: part for name, part in self._rank_parts().items() if _component(name) in components}
        self.is_half_restored = True
        store.load(parts, rank_parts=rank_parts, checkpoint=checkpoint)
        if resume == "auto" or store.contains(checkpoint):
            store.began_after = checkpoint.meta.get("began_after", 0)
        if "rng" in rank_parts and self._ctx.world.size > checkpoint.world_size:
            self._seed_new_ranks(checkpoint)
        self.last_saved_step = checkpoint.step if resume == "auto" and len(set(components)) == len(COMPONENTS) else None
        keeps_place = self._restore_data_position(begin_epoch_again="data" not in components or is_other_data)
        self._certificate.check_after_load(
            checkpoint, store, parts, rank_parts, keeps_place=keeps_place, accept_changes=accept_changes
        )
        self._report_changed_length(checkpoint)
        self._has_begun = True
        self._ctx.callbacks.on_restored()
        self.is_half_restored = False
        return checkpoint

    def roll_back(self, *, up_to: int) -> Checkpoint | None:
        """Takes what learns back to the newest good checkpoint of at most so many updates. Every rank must call this.

        Models, optimizers, schedulers, callbacks and random numbers are as they were then, and so is the count of
        updates; the position in the data, and what the run remembers of itself, stay as they are.

        Returns:
            The checkpoint; None if there is none, and nothing has changed.

        Raises:
            CheckpointError: none of those that are there is good.
        """
        assert self._store is not None
        checkpoint, ctx, then = self._store.newest_good(up_to=up_to), self._ctx, Progress()
        if checkpoint is None:
            return None
        learns = ("models", "optimizers", "schedulers", "callbacks")
        parts = {name: part for name, part in self._parts().items() if name.split("/")[0] in learns}
        self._store.load({**parts, "progress": then}, rank_parts={"rng": RngState()}, checkpoint=checkpoint)
        ctx.progress.step, ctx.progress.evaluated_step = then.step, then.evaluated_step
        # An evaluation of the weights that were given up says nothing of these.
        ctx.history.latest.update(checkpoint.metrics)
        # Epochs do not come back: the data goes on.
        for scheduler in ctx.lr_stepping.at("epoch"):
            for _ in range(then.epoch, ctx.progress.epoch):
                scheduler.step()
        self.last_saved_step = None
        ctx.callbacks.on_restored()
        return checkpoint

    def begin_without_restore(self) -> None:
        """Begins a run of what is called without `restore`. Every rank must call this.

        Raises:
            CheckpointError: nobody can tell what lies in the run directory, or `init_from` is no checkpoint.
            ConfigError: there are checkpoints of another run, which this one would delete for its own.
        """
        if not self._has_begun:
            if self._store is not None and not self._store.is_empty():
                raise ConfigError(
                    f"there are checkpoints of a run in {self._ctx.run_dir}, and they have not "
                    "been restored: call fit(), or restore() of a Session, which continues from the newest, or use "
                    "another run_dir"
                )
            self._has_begun = True
        self.load_initial_weights()

    def load_initial_weights(self) -> None:
        """Takes the weights that `init_from` names, once, before the first update. Every rank must call this.

        Raises:
            CheckpointError: they are not there, or not those of these models.
        """
        ctx = self._ctx
        config = ctx.config
        if config.init_from is None or self._loaded_initial_weights or ctx.progress.step:
            return
        weights = InitialWeights(ctx.models, config.init_keys)
        checkpoint = self._load_parts_from(config.init_from, {"models": weights})
        self._loaded_initial_weights = True
        ctx.print(f"began with the weights of {checkpoint.path}: {weights.report()}")

    @contextmanager
    def weights_of(self, checkpoint: str) -> Iterator[None]:
        """Lends the models the weights of a checkpoint, and averages of them to the callbacks that evaluate these.

        Nothing else is restored, and at the end all is as it was. Every rank must call this.

        Raises:
            CheckpointError: it is not there, or not of these models.
        """
        borrowed = BorrowedWeights(self._ctx.models, self._ctx.callbacks)
        with borrowed.restored_afterwards():
            self._load_parts_from(checkpoint, borrowed.parts)
            with borrowed.without_missing_averages():
                yield

    def _seed_new_ranks(self, checkpoint: Checkpoint) -> None:
        """Seeds the ranks that join a run; in exact mode they draw what all others draw. Every rank must call this."""
        world = self._ctx.world
        if not self._numerics.share_rng(world) and world.rank >= checkpoint.world_size:
            seed_everything(self._ctx.config.seed, rank=world.rank, step=checkpoint.step)

    def _load_parts_from(self, path: str, parts: Mapping[str, Stateful]) -> Checkpoint:
        store = CheckpointStore(path, world=self._ctx.world)
        checkpoint = store.read(path)
        store.load(parts, rank_parts={}, checkpoint=checkpoint)
        return checkpoint

    def _check_data(self, checkpoint: Checkpoint, components: Collection[str]) -> bool:
        """Returns whether the data has changed, where the config says that it may."""
        before, now = checkpoint.meta.get("data", {}).get("fingerprint"), self._data.fingerprint
        if before == now or "data" not in components:
            return bool(before != now)
        if self._ctx.config.changed_data == "reset":
            self._ctx.print(f"the training data was {before} and is {now}: it is read from its beginning")
            return True
        why = self._data.explain_change(str(before)) if isinstance(self._data, SupportsDiff) else None
        if why is not None:
            raise DataError(
                f"the training data is not read in the order of when {checkpoint.path} was saved: {why}, begin "
                'another run, or go on with changed_data="reset", which reads the data from its beginning'
            )
        raise DataError(
            f"the training data has changed since {checkpoint.path} was saved: its fingerprint was {before} and is "
            f'{now}. Bring the old data back, begin another run, or go on with changed_data="reset", which reads '
            "the data from its beginning"
        )

    def is_epoch_complete(self) -> bool:
        """Whether the epoch in progress has all its updates, as far as the data has a length. Every rank must ask."""
        progress, config = self._ctx.progress, self._ctx.config
        steps = progress.step_in_epoch
        is_cut_here = config.steps_per_epoch is not None and steps >= config.steps_per_epoch
        has_ended = is_exhausted(self._data, epoch=progress.epoch, steps=steps, offset=progress.offset)
        # Iterables of unequal lengths end for all ranks where the shortest one does.
        return self._ctx.world.any(is_cut_here or has_ended)

    def _restore_data_position(self, *, begin_epoch_again: bool) -> bool:
        """Begins the epoch in progress again, where the data cannot go on or is not to; returns whether it goes on."""
        progress = self._ctx.progress
        begun = progress.step_in_epoch > 0 and not begin_epoch_again
        if begun and self._data.guarantee != "exact" and not self.is_epoch_complete():
            warnings.warn(
                f"the training data guarantees {self._data.guarantee!r}, not 'exact': epoch {progress.epoch + 1} "
                f"begins again, and the samples of its first {progress.step_in_epoch} steps may be seen twice",
                stacklevel=3,
            )
            begin_epoch_again = True
        if begin_epoch_again:
            progress.step_in_epoch = progress.offset = 0
        return not begin_epoch_again

    def _report_changed_length(self, checkpoint: Checkpoint) -> None:
        """Says what becomes of the learning rate where the limit of the run has been moved."""
        before, now = checkpoint.meta.get("total_steps"), self._length.total_steps
        if before != now and self._ctx.lr_stepping.schedulers:
            self._ctx.print(
                f"the run was {before or 'an unknown number of'} steps long and is {now or 'an unknown number'} now: a "
                "schedule that is a function of the step (headway.trainer.schedules, LambdaLR) is that of the new "
                "length from here on; torch's other schedulers keep the settings that they were saved with"
            )

    def result(self, status: Status, reason: str, resumed_from: Checkpoint | None) -> FitResult:
        """Says how the run ended, as of now."""
        ctx = self._ctx
        kept = self._store.of_this_run() if self._store is not None else []
        best = self._store.best() if self._store is not None else None
        return FitResult(
            status=status,
            reason=reason,
            metrics=dict(ctx.history.latest),
            history=Table(ctx.history.epochs),
            steps=ctx.progress.step,
            epochs=ctx.progress.epoch,
            samples=ctx.progress.samples,
            tokens=ctx.progress.tokens,
            last_checkpoint=kept[-1].path if kept else None,
            best_checkpoint=best.path if best else None,
            best_metric=self._best.value,
            best_step=self._best.step,
            resumed_from=resumed_from.path if resumed_from else None,
            data_guarantee=self._data.guarantee,
        )

    def _current_metrics(self) -> dict[str, float]:
        """What was measured last, without the results of an evaluation of earlier weights: they are not these."""
        progress, latest = self._ctx.progress, self._ctx.history.latest
        if progress.evaluations and progress.evaluated_step == progress.step:
            return latest
        return {name: value for name, value in latest.items() if not name.startswith("validation/")}

    def _parts(self, models: NamedModels | None = None) -> dict[str, Stateful]:
        ctx = self._ctx
        models = NamedModels(ctx.models) if models is None else models
        return {
            "models": ModelState(models),
            **{f"optimizers/{name}": OptimizerState(models, name, each) for name, each in ctx.optimizers.items()},
            **{f"schedulers/{name}": each for name, each in ctx.lr_stepping.schedulers.items()},
            "update": self._optimizer_step,
            "progress": ctx.progress,
            "history": ctx.history,
            "best": self._best,
            "spikes": self._spikes,
            "callbacks": ctx.callbacks,
            "recorder": self._recorder,
        }

    def _rank_parts(self) -> dict[str, Stateful]:
        return {"rng": RngState(), "metrics": self._metrics}


def _component(part: str) -> str:
    """What a part of a checkpoint belongs to; what the arithmetic of an update keeps goes with the optimizers."""
    kind = part.split("/")[0]
    if kind in ("history", "best", "spikes", "recorder", "metrics"):
        return "progress"
    return kind if kind in COMPONENTS else "optimizers"


def check_components(components: Collection[str]) -> None:
    """Refuses what is no part of a checkpoint, or makes no sense alone.

    Raises:
        ConfigError: and why.
    """
    if isinstance(components, str) or (unknown := set(components) - set(COMPONENTS)):
        what = components if isinstance(components, str) else ", ".join(sorted(unknown))
        raise ConfigError(f"restore takes some of {', '.join(COMPONENTS)}, not {what!r}")
    if "data" in components and "progress" not in components:
        raise ConfigError('a position in the data is a part of the progress: restore "progress" as well, or not "data"')


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of what decides how a training goes."""
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
