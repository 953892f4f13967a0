"""The state of a run as named parts: saves, restores, rolls back, and loads initial weights."""

from __future__ import annotations

import functools
import platform
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
import torch

from ..checkpoints.background import BackgroundSave
from ..checkpoints.certificate import ResumeCertificate
from ..checkpoints.code_fingerprint import learning_code_at_first_use
from ..checkpoints.model_state import (
    ModelModes,
    ModelState,
    NamedModels,
    OptimizerState,
    tensors_changed_by_step,
)
from ..checkpoints.optimizer_settings import OptimizerSettings
from ..checkpoints.retention import Best
from ..checkpoints.rng import GeneratorsBefore, RngState, seed_everything
from ..checkpoints.scan import split_path
from ..checkpoints.state_in_memory import capture_state, check_is_own_state, restore_state
from ..checkpoints.store import Checkpoint, CheckpointStore, CheckpointWarning, DamagedCheckpointError
from ..config import CheckpointConfig, as_plain
from ..data.protocols import BatchStream, HasOrder, HasRankState, Stateful, SupportsDiff, is_exhausted
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
"""Components of a checkpoint to restore: "progress" is counters, history and records; "data" the position in it."""


class RunState:
    """Saves and restores all state that influences the next step.

    Args:
        ctx: of the run, with its models, optimizers and schedulers.
        steps: the user's steps; a resumed run compares their code.
        numerics: ordinary or exact arithmetic.
        recorder: saved with the state of its trackers.
        metrics: saved with all values since the last flush.
        update: saved with its loss scale and counters.
        spikes: saved with its recent losses.
        data: its fingerprint is saved; the position in it is in `ctx.progress`.
        length: of the run.

    Attributes:
        last_saved_step: the update of the newest checkpoint of this run, if there is one.
        is_half_restored: whether a restore has started to load, and then failed.
        before_read: the random states of before the read in progress, for a save inside it; its batch is not saved as
            read either. None between reads.
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
        self._modes = ModelModes(ctx.models, lambda: ctx.mode.before)
        self._settings = OptimizerSettings(ctx.optimizers, ctx.lr_stepping.schedulers)
        self._store: CheckpointStore | None = None
        config = ctx.config.checkpoint
        if ctx.run_dir is not None:
            self._store = CheckpointStore(
                f"{ctx.run_dir.rstrip('/')}/checkpoints",
                # Collectives of the saving thread must not mix with the training's.
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
        self.before_read: GeneratorsBefore | None = None

    def save(self) -> Checkpoint:
        """Write a checkpoint. Every rank must call this.

        Raises:
            ConfigError: the trainer has no run directory.
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        checkpoint = self._require_store().save(**self._contents_to_save_now())
        self.last_saved_step = checkpoint.step
        return checkpoint

    def save_to(self, path: str) -> Checkpoint:
        """Write a checkpoint at a path outside the run's own, where no rule deletes it. Every rank must call this.

        Raises:
            ConfigError: the path is in the folder of the run's own checkpoints.
            CheckpointError: it could not be written.
        """
        folder, name = split_path(path)
        if name in ("", ".", "..") or (self._store is not None and self._store.contains(path)):
            raise ConfigError(
                f"path={path} must be the path of a new folder outside of {self._ctx.run_dir}/checkpoints, where the "
                "run names and deletes its own: choose another, or leave path out"
            )
        store = CheckpointStore(folder.path_of(""), world=self._ctx.world)
        return store.save(**self._contents_to_save_now(), name=name)

    def guard_saves(self, ownership_problem: Callable[[], str | None]) -> None:
        """Make saves fail with the message that this returns, if any, on the main rank."""
        if self._store is not None:
            self._store.ownership_problem = ownership_problem

    def rejoin(self) -> None:
        """Create another process group for the saving threads. Every rank must call this."""
        if self._store is not None:
            self._store.world = self._saving_world()

    def _saving_world(self) -> World:
        return self._ctx.world.with_own_group(timeout_s=self._ctx.config.parallel.timeout.amount)

    def begin_save(self) -> BackgroundSave:
        """Start writing a checkpoint in the background. Every rank must call this, and later `result` of the save.

        Raises:
            ConfigError: the trainer has no run directory.
        """
        models = NamedModels(self._ctx.models)
        saving = self._require_store().begin_save(**self._contents(models), sharded=models.sharded())
        self.last_saved_step = self._ctx.progress.step
        return saving

    def rehearse_save(self) -> None:
        """Allocate the memory for the copies of background saves, in the background."""
        contents = self._contents()
        predicates = {key: contents[key] for key in ("changes_only_on_step", "is_replicated")}
        self._require_store().rehearse_save(contents["parts"], **predicates)

    def _require_store(self) -> CheckpointStore:
        if self._store is None:
            raise ConfigError("a checkpoint needs a folder: give the trainer a run_dir")
        return self._store

    def _contents_to_save_now(self) -> dict[str, Any]:
        return {key: value for key, value in self._contents().items() if key != "changes_only_on_step"}

    def _contents(self, models: NamedModels | None = None) -> dict[str, Any]:
        """Return the store's arguments for a background save of the current state."""
        ctx, certificate, models = self._ctx, self._certificate.capture(), models or NamedModels(self._ctx.models)
        meta = {
            "trainer": f"{self._program.__module__}:{self._program.__qualname__}",
            "data": {"guarantee": self._data.guarantee, "fingerprint": self._data.fingerprint},
            **({"order": self._data.order} if isinstance(self._data, HasOrder) else {}),
            "total_steps": self._length.total_steps,
            "began_after": self._store.began_after if self._store is not None else 0,
            "versions": versions(),
        }

        def complete() -> dict[str, Any]:
            # Called later by the saving thread; the config is frozen.
            return {"config": as_plain(ctx.config), **meta, "certificate": certificate()}

        changes_only_on_step, is_replicated = tensors_changed_by_step(
            models, ctx.optimizers, ctx.callbacks.tensors_changed_by_step()
        )
        return {
            "parts": self._parts(models),
            "rank_parts": self._rank_parts(),
            "step": ctx.progress.step,
            "epoch": ctx.progress.epoch,
            "metrics": self._current_metrics(),
            "meta": complete,
            "changes_only_on_step": changes_only_on_step,
            "is_replicated": is_replicated,
        }

    def record_evaluation(self, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation, and return whether it is the best of the run so far.

        Without the monitored metric no evaluation is the best; warns if the config names that metric.
        """
        if self.has_monitor(metrics):
            return self._best.update(metrics[self._ctx.config.checkpoint.monitor], step=self._ctx.progress.step)
        return False

    def has_monitor(self, metrics: Mapping[str, float]) -> bool:
        """Return whether metrics of an evaluation include the monitored one; warn once if the config names it."""
        config = self._ctx.config.checkpoint
        if config.monitor in metrics:
            return True
        asked = config.save_best or config.monitor != CheckpointConfig.monitor
        if asked and not self._has_warned_of_monitor and self._ctx.world.is_main:
            when = f"evaluation after step {self._ctx.progress.step}"
            warnings.warn(
                f"checkpoint.monitor is {config.monitor!r}, but the {when} has only "
                f"{', '.join(metrics) or 'no metrics'}: checkpoints are saved, but none is marked as the best",
                CheckpointWarning,
                stacklevel=2,
            )
        self._has_warned_of_monitor = True
        return False

    def check_storage(self) -> None:
        """Check before the first step that checkpoints can be written. Every rank must call this.

        Raises:
            CheckpointError: they cannot.
        """
        if self._store is not None:
            self._store.check_writable()

    def restore(
        self, resume: str, components: Collection[str] = COMPONENTS, *, accept_changes: bool = False
    ) -> Checkpoint | None:
        """Restore as `Trainer.fit(resume=..., restore=...)` describes, and return the checkpoint.

        Without a checkpoint to resume from, load the weights of `init_from`, if set. Every rank must call this.

        Raises:
            CheckpointError: no checkpoint is good, or the given one is not.
            ConfigError: the arguments or the config are invalid.
            DataError: the data has changed since the checkpoint was saved.
            ResumeError: something else has changed.
        """
        store, config = self._store, self._ctx.config
        check_components(components)
        if store is None or resume == "never":
            if resume not in ("auto", "never"):
                raise ConfigError(f"resume={resume!r} needs a trainer with a run_dir")
            if store is not None:
                store.start_over()
            self._has_begun = True
            self.load_initial_weights()
            return None
        if config.init_from is not None and resume != "auto":
            raise ConfigError(
                f"init_from={config.init_from!r} loads only weights, and resume={resume!r} the whole state: choose one"
            )
        store.remove_leftovers()
        checkpoint = store.newest_good(is_loaded_next=True) if resume == "auto" else store.read(resume)
        if checkpoint is None:
            self._has_begun = True
            self.load_initial_weights()
            return None
        # init_from is ignored on resume, but must be that of the run.
        began_from = checkpoint.meta.get("config", {}).get("init_from")
        if config.init_from not in (None, began_from):
            raise ConfigError(
                f"init_from={config.init_from!r} is for a new run, and this run has a checkpoint already, "
                f"{checkpoint.path}; it started {f'from {began_from}' if began_from else 'without init_from'}: leave "
                "init_from out to resume, or start another run"
            )
        changes = self._continue_order(checkpoint, components, accept_changes=accept_changes)
        is_other_data = not changes and self._check_data(checkpoint, components)
        self._certificate.check_before_load(checkpoint, components, accept_changes=accept_changes)
        parts = {name: part for name, part in self._parts().items() if _component(name) in components}
        rank_parts = {name: part for name, part in self._rank_parts().items() if _component(name) in components}
        self.is_half_restored = True
        try:
            loaded = store.load(parts, rank_parts=rank_parts, checkpoint=checkpoint)
        except DamagedCheckpointError:
            if resume != "auto":
                raise
            return self.restore(resume, components, accept_changes=accept_changes)  # from the one before it
        self._ctx.lr_stepping.forget_positions()
        if resume == "auto" or store.contains(checkpoint.path):
            store.began_after = checkpoint.meta.get("began_after", 0)
        if "rng" in rank_parts and self._ctx.world.size > checkpoint.world_size:
            self._seed_new_ranks(checkpoint)
        is_whole = len(set(components)) == len(COMPONENTS)
        self.last_saved_step = checkpoint.step if resume == "auto" and is_whole else None
        keeps_place = self._restore_data_position(begin_epoch_again="data" not in components or is_other_data)
        self._certificate.check_after_load(
            checkpoint, loaded, parts, rank_parts, keeps_place=keeps_place, accept_changes=accept_changes
        )
        if is_whole and keeps_place and not accept_changes and not self._ctx.callbacks.has_dropped_states:
            store.allow_replacing(checkpoint)
        if "rng" in rank_parts and self._ctx.mesh.tensor.size > 1:
            # Ranks that divide a layer draw the same numbers; the checkpoint may be of another arrangement.
            generators = RngState()
            generators.load_state_dict(self._ctx.mesh.tensor.broadcast(generators.state_dict()))
        self._report_changed_length(checkpoint)
        if "settings" in parts and (lines := self._settings.adopt(accept_changes=accept_changes)):
            self._ctx.print("configure_optimizers() has changed; " + "; ".join(lines))
        for line in changes:
            self._ctx.print(line)
        self._has_begun = True
        self._ctx.callbacks.on_restored()
        self.is_half_restored = False
        return checkpoint

    def capture(self) -> dict[str, Any]:
        """Return the whole state in memory. Every rank must call this."""
        contents = self._contents()
        state = capture_state(contents["parts"], contents["rank_parts"], self._ctx.world)
        return {**state, "meta": contents["meta"]()}

    def load_captured(self, state: Mapping[str, Any], *, accept_changes: bool) -> None:
        """Restore what `capture` has returned on this rank. Every rank must call this.

        Raises:
            ConfigError: the run directory has checkpoints of another run, which retention would delete.
            DataError: the data has changed since.
            ResumeError: the state is that of another rank, or of another run.
            CheckpointError: it does not fit these models.
        """
        ctx = self._ctx
        self._begin_in_own_folder()
        check_is_own_state(state, ctx.world)
        source = Checkpoint("state_dict()", 0, 0, {}, state["meta"], ctx.world.size, 0, 0.0)
        changes = self._continue_order(source, COMPONENTS, accept_changes=accept_changes)
        is_other_data = not changes and self._check_data(source, COMPONENTS)
        self._certificate.check_before_load(source, COMPONENTS, accept_changes=accept_changes)
        self.is_half_restored = True
        restore_state(state, self._parts(), self._rank_parts(), ctx.world)
        ctx.lr_stepping.forget_positions()
        self._loaded_initial_weights = True
        self.last_saved_step = None
        self._restore_data_position(begin_epoch_again=is_other_data)
        if lines := self._settings.adopt(accept_changes=accept_changes):
            ctx.print("configure_optimizers() has changed; " + "; ".join(lines))
        for line in changes:
            ctx.print(line)
        ctx.callbacks.on_restored()
        self.is_half_restored = False

    def roll_back(self, *, up_to: int) -> Checkpoint | None:
        """Roll the learning state back to the newest good checkpoint of at most `up_to` updates.

        Restores models, optimizers, schedulers, callbacks, random states and the number of updates; the position in the
        data, history and records do not change. Every rank must call this.

        Returns:
            The checkpoint; None, without any change, if there is none.

        Raises:
            CheckpointError: no such checkpoint is good.
        """
        assert self._store is not None
        checkpoint, ctx, then = self._store.newest_good(up_to=up_to), self._ctx, Progress()
        if checkpoint is None:
            return None
        learns = ("models", "optimizers", "schedulers", "callbacks")
        parts = {name: part for name, part in self._parts().items() if name.split("/")[0] in learns}
        self._store.load({**parts, "progress": then}, rank_parts={"rng": RngState()}, checkpoint=checkpoint)
        ctx.lr_stepping.forget_positions()
        ctx.progress.step, ctx.progress.evaluated_step = then.step, then.evaluated_step
        # The latest metrics may be those of the discarded weights.
        ctx.history.latest.update(checkpoint.metrics)
        # The data does not go back, so epochs are still counted, and their schedulers stepped.
        for scheduler in ctx.lr_stepping.at("epoch"):
            for _ in range(then.epoch, ctx.progress.epoch):
                ctx.lr_stepping.step(scheduler)
        self.last_saved_step = None
        ctx.callbacks.on_restored()
        return checkpoint

    def begin_without_restore(self) -> None:
        """Start a run for methods that are called without `restore`. Every rank must call this.

        Raises:
            CheckpointError: the run directory cannot be read, or `init_from` is not a checkpoint.
            ConfigError: there are checkpoints of another run, which retention would delete.
        """
        self._begin_in_own_folder()
        self.load_initial_weights()

    def _begin_in_own_folder(self) -> None:
        if not self._has_begun:
            if self._store is not None and not self._store.is_empty():
                raise ConfigError(
                    f"run_dir={self._ctx.run_dir} has checkpoints of a run that has not been restored: call fit(), or "
                    "restore() of a Session, to resume it, or use another run_dir"
                )
            self._has_begun = True

    def load_initial_weights(self) -> None:
        """Load the weights of `init_from`, once, before the first update. Every rank must call this.

        Raises:
            CheckpointError: the checkpoint does not exist, or does not fit these models.
        """
        ctx = self._ctx
        config = ctx.config
        if config.init_from is None or self._loaded_initial_weights or ctx.progress.step:
            return
        weights = InitialWeights(ctx.models, config.init_keys)
        checkpoint = self._load_parts_from(config.init_from, {"models": weights})
        self._loaded_initial_weights = True
        ctx.print(f"initialized from {checkpoint.path}: {weights.report()}")

    @contextmanager
    def weights_of(self, checkpoint: str) -> Iterator[None]:
        """Load a checkpoint's weights, and averages for callbacks that evaluate these; undone at the end.

        Every rank must call this.

        Raises:
            CheckpointError: the checkpoint does not exist, or does not fit these models.
        """
        borrowed = BorrowedWeights(self._ctx.models, self._ctx.callbacks)
        with borrowed.restored_afterwards():
            self._load_parts_from(checkpoint, borrowed.parts)
            with borrowed.without_missing_averages():
                yield

    def _seed_new_ranks(self, checkpoint: Checkpoint) -> None:
        """Seed ranks that are not in the checkpoint; in exact mode all share one state. Every rank must call this."""
        world = self._ctx.world
        if not self._numerics.share_rng(world) and world.rank >= checkpoint.world_size:
            seed_everything(self._ctx.config.seed, rank=self._ctx.mesh.loss.rank, step=checkpoint.step)

    def _load_parts_from(self, path: str, parts: Mapping[str, Stateful]) -> Checkpoint:
        store = CheckpointStore(path, world=self._ctx.world)
        checkpoint = store.read(path)
        store.load(parts, rank_parts={}, checkpoint=checkpoint)
        return checkpoint

    def _continue_order(
        self, checkpoint: Checkpoint, components: Collection[str], *, accept_changes: bool
    ) -> Sequence[str]:
        """Let the data continue in the order of the checkpoint; return the accepted changes of it from here on."""
        order = checkpoint.meta.get("order")
        if order is None or "data" not in components or not isinstance(self._data, HasOrder):
            return ()
        place = checkpoint.meta["certificate"]["position"]
        where = {name: place[name] for name in ("step", "epoch", "offset")}
        planned = self._length.total_steps
        changes = self._data.continue_order(order, **where, accept_changes=accept_changes)
        now = self._length.total_steps
        if now != planned and self._ctx.lr_stepping.schedulers:
            self._ctx.print(
                f"configure_optimizers() was told of {planned} updates, and the run has {now}, because its data has "
                "changed in mid-run: set max_steps if a schedule needs the number"
            )
        return changes

    def _check_data(self, checkpoint: Checkpoint, components: Collection[str]) -> bool:
        """Return whether the data has changed; raise unless the config or the components allow that."""
        before, now = checkpoint.meta.get("data", {}).get("fingerprint"), self._data.fingerprint
        if before == now or "data" not in components:
            return bool(before != now)
        if self._ctx.config.changed_data == "reset":
            self._ctx.print(f"the training data has changed from {before} to {now}: reading it from its beginning")
            return True
        why = self._data.explain_change(str(before)) if isinstance(self._data, SupportsDiff) else None
        if why is not None:
            raise DataError(
                f"the order of the training data has changed since {checkpoint.path} was saved: {why}, start another "
                'run, or resume with changed_data="reset", which reads the data from its beginning'
            )
        raise DataError(
            f"the training data has changed since {checkpoint.path} was saved: its fingerprint was {before} and is "
            f'{now}. Restore the old data, start another run, or resume with changed_data="reset", which reads the '
            "data from its beginning"
        )

    def is_epoch_complete(self) -> bool:
        """Return whether the epoch in progress has all its updates, if known. Every rank must call this."""
        progress, config = self._ctx.progress, self._ctx.config
        steps = progress.step_in_epoch
        is_cut_here = config.steps_per_epoch is not None and steps >= config.steps_per_epoch
        has_ended = is_exhausted(self._data, epoch=progress.epoch, steps=steps, offset=progress.offset)
        # With iterables of unequal lengths, an epoch ends on all ranks with the shortest one.
        return self._ctx.world.any(is_cut_here or has_ended)

    def _restore_data_position(self, *, begin_epoch_again: bool) -> bool:
        """Restart the epoch if the data cannot resume inside it; return whether the position was kept."""
        progress = self._ctx.progress
        begun = progress.step_in_epoch > 0 and not begin_epoch_again
        continues = self._data.guarantee == "exact" or (isinstance(self._data, HasRankState) and self._data.is_restored)
        if begun and not continues and not self.is_epoch_complete():
            why = ", and its state was not saved on this number of ranks" if self._data.guarantee == "state" else ""
            warnings.warn(
                f"the training data guarantees {self._data.guarantee!r}, not 'exact'{why}: epoch {progress.epoch + 1} "
                f"restarts, and the samples of its first {progress.step_in_epoch} steps may be seen twice",
                stacklevel=3,
            )
            begin_epoch_again = True
        if begin_epoch_again:
            progress.step_in_epoch = progress.offset = 0
        return not begin_epoch_again

    def _report_changed_length(self, checkpoint: Checkpoint) -> None:
        """Print how learning rate schedules change if the length of the run has changed."""
        before, now = checkpoint.meta.get("total_steps"), self._length.total_steps
        if before != now and self._ctx.lr_stepping.schedulers:
            self._ctx.print(
                f"the length of the run has changed from {before or 'an unknown number of'} steps to "
                f"{now or 'an unknown number'}: schedules that are functions of the step (headway.trainer.schedules, "
                "LambdaLR) follow the new length from here on; torch's other schedulers keep their saved settings"
            )

    def result(self, status: Status, reason: str, resumed_from: Checkpoint | None) -> FitResult:
        """Return how the run ended."""
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
        """Return the latest metrics, without metrics of earlier weights."""
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
            "settings": self._settings,
            "modes": self._modes,
            "update": self._optimizer_step,
            "progress": ctx.progress,
            "history": ctx.history,
            "best": self._best,
            "spikes": self._spikes,
            "callbacks": ctx.callbacks,
            "recorder": self._recorder,
        }

    def _rank_parts(self) -> dict[str, Stateful]:
        position: Stateful | None = None
        if isinstance(self._data, HasRankState):
            is_inside = self.before_read is not None
            position = self._data.rank_state_before_read if is_inside else self._data.rank_state
        generators = self.before_read or RngState()
        return {"rng": generators, "metrics": self._metrics, **({"data": position} if position else {})}


def _component(part: str) -> str:
    """Return the component of a part of a checkpoint; state of the update belongs to the optimizers."""
    kind = part.split("/")[0]
    if kind in ("history", "best", "spikes", "recorder", "metrics"):
        return "progress"
    return kind if kind in COMPONENTS else "optimizers"


def check_components(components: Collection[str]) -> None:
    """Check the components to restore.

    Raises:
        ConfigError: one does not exist, or needs another.
    """
    if isinstance(components, str) or (unknown := set(components) - set(COMPONENTS)):
        what = components if isinstance(components, str) else ", ".join(sorted(unknown))
        raise ConfigError(f"restore must be a collection of {', '.join(COMPONENTS)}, got {what!r}")
    if "data" in components and "progress" not in components:
        raise ConfigError('restore needs "progress" with "data", whose position is a part of it; or leave "data" out')


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of packages that influence training."""
    try:
        headway = metadata.version("headway")
    except metadata.PackageNotFoundError:
        headway = "from source"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "headway": headway,
    }
