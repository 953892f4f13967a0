"""The loop: epochs, updates, and what is due between two of them. No optimizer, no device, no process group."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch

from ..checkpoints.background import BackgroundSave
from ..checkpoints.rng import RngState
from ..checkpoints.store import Checkpoint
from ..config import LossSpikeConfig
from ..data.protocols import BatchStream, GlobalBatch, HasDroppedTail, LoadedBatch, is_exhausted
from ..data.tree import batch_size
from ..distributed.parallelize import check_no_partial_gradients
from ..errors import CheckpointError, ConfigError, DataError, LossSpikeError, StepError
from ..exact.numerics import Numerics
from ..metrics.reductions import Reduce
from ..metrics.train_log import Recorder
from ..result import FitResult
from ..step.precision import autocast
from .context import RunContext
from .control import Requests, StopStatus
from .evaluation import Evaluation, evaluating
from .evaluation_metrics import EvaluationMetrics
from .limits import reached_limit, reached_limit_in_epoch, reached_steps_per_epoch
from .loss_spikes import SpikeDetector
from .progress import Schedule
from .run_length import RunLength
from .run_state import RunState
from .steps import LossWeight, Steps
from .timing import Phase

_SAVE_TIMEOUT_S = 10.0


class Loop:
    """Runs what `Trainer` draws in its docstring. Every rank must call every method.

    A run is `restore`, then `start`, then `epoch` until `end_reason` is not None, then `finish`. Between two batches of
    `epoch` the caller makes an update: by `update`, which calls `training_step`, or by `accumulate` and `complete`.

    Args:
        ctx: of the run, with its models, optimizers and schedulers.
        steps: the user's steps.
        numerics: ordinary or exact arithmetic.
        requests: what is asked of the run while it trains.
        data: the training data, open.
        validation: the sets of validation data, open, by name; a single unnamed set has the key "".
        metrics: those of `configure_metrics`.
        length: of the run.

    Attributes:
        optimizer_step: makes updates.
        recorder: makes the records of the log.
        save_took_s: from the start of the last checkpoint to its commit; None before there was one.
        needs_restore: True after an exception mid-update: model state is undefined until a checkpoint is restored.
        began_s: when the run began, by `time.perf_counter`: setting up counts as time of the run.
    """

    def __init__(
        self,
        ctx: RunContext,
        steps: Steps,
        numerics: Numerics,
        requests: Requests,
        data: BatchStream,
        validation: Mapping[str, BatchStream],
        *,
        metrics: EvaluationMetrics,
        length: RunLength,
    ) -> None:
        config = ctx.config
        self._ctx, self._steps, self._numerics, self._requests = ctx, steps, numerics, requests
        self._config, self._progress, self._world = config, ctx.progress, ctx.world
        self._activity, self._callbacks, self._history = ctx.activity, ctx.callbacks, ctx.history
        self._data, self._validation, self._evaluation_metrics = data, validation, metrics
        self.metrics = numerics.make_means()
        self.optimizer_step = numerics.make_step(ctx, steps, self.metrics, data)
        self.recorder = Recorder(ctx, steps, self.metrics, self.optimizer_step)
        self._spikes = SpikeDetector(config.loss_spike or LossSpikeConfig())
        self._state = RunState(
            ctx, steps, numerics, self.recorder, self.metrics, self.optimizer_step, self._spikes, data, length
        )
        self._logs = Schedule(config.log_every)
        self._evaluations = Schedule(config.evaluate_every)
        self._checkpoints = Schedule(config.checkpoint.every)
        self._has_clocks = any(
            each and each.unit == "seconds" for each in (config.evaluate_every, config.checkpoint.every)
        )
        self.save_took_s: float | None = None
        self._save_began_s = 0.0
        self.began_s = time.perf_counter()
        self.needs_restore = False
        self._step_timeout = config.parallel.step_timeout
        self._is_running = False
        self._resumes = False
        self._resumed_from: Checkpoint | None = None
        self._stopped: StopStatus | None = None
        self._evaluation: Evaluation | None = None
        self._accumulated: tuple[GlobalBatch, bool] | None = None
        self._epoch_batch: GlobalBatch | None = None
        self._awaits_update = False
        self._must_save_best = False
        self._uneven_samples = 0
        self._has_warned = False
        self._saving: BackgroundSave | None = None
        if config.loss_spike is not None and ctx.run_dir is None:
            raise ConfigError(
                "loss_spike rolls back to a checkpoint: give the trainer a run_dir, where checkpoints are"
            )

    def announce_step(self) -> None:
        """Prints what is special about the way to step, and adds its numbers to the log."""
        if (text := self.optimizer_step.describe()) is not None:
            self._ctx.print(text)
        if (source := self.optimizer_step.metric_source()) is not None:
            self.recorder.metric_sources.append(source)

    # ---- The life of a run -----------------------------------------------------------------------------------------

    def restore(self, resume: str, components: Collection[str], *, accept_changes: bool) -> Checkpoint | None:
        """Restores what `Trainer.fit` describes, and returns the checkpoint that it came from, if there is one."""
        if resume == "never" and self._progress.step:
            raise ConfigError(
                f'resume="never" starts fresh, and this trainer has made {self._progress.step} updates: create another '
                "trainer, or continue with this one"
            )
        if self._saving is not None:
            # Of a run that has failed: it must end before this one cleans up and saves.
            self._saving.wait(None)
            self._saving = self._state.last_saved_step = None
        # Equal on every rank, or some would continue while others restore.
        failed, half_restored = self._world.sum_ints(self.needs_restore, self._state.is_half_restored)
        needs_restore = bool(failed or half_restored)
        if failed:
            for model in self._ctx.models.values():
                check_no_partial_gradients(model)
        continues = resume == "auto" and self._progress.step > 0 and not needs_restore
        with self._ctx.setup_times.phase("restore"):
            self._resumed_from = (
                None if continues else self._state.restore(resume, components, accept_changes=accept_changes)
            )
        if needs_restore and self._resumed_from is None:
            raise ConfigError(
                "the previous fit() failed during an update, so the model state is undefined, and there is no "
                "checkpoint to restore: create a new Trainer"
            )
        self.needs_restore = False
        self._resumes = continues or self._resumed_from is not None
        return self._resumed_from

    def start(self) -> bool:
        """Does what comes before the first update, and returns whether there is anything left to train."""
        self._state.begin_without_restore()
        has_work = reached_limit(self._config, self._progress) is None or self._progress.is_closing
        if has_work:
            self._state.check_storage()
            self._warn_if_data_is_endless()
        self.recorder.start(resumed=self._resumes or self._progress.step > 0, began_s=self.began_s)
        for schedule in (self._evaluations, self._checkpoints):
            schedule.done(self.recorder.elapsed_s())
        self._activity.enter("between updates")
        if has_work:
            if self._config.sanity_batches and self._progress.step == 0:
                self._sanity_check()
            self._callbacks.on_fit_start()
            if self._config.evaluate_at_start and self._progress.step == 0:
                self._evaluate()
            elif self._progress.step and self._evaluations.due(self._progress, ended="steps"):
                # The previous attempt was stopped when it was due.
                self._evaluate()
            if self._progress.is_closing:
                self._close_epoch()
            self._handle_requests()
        self._is_running = self.needs_restore = has_work and self.end_reason() is None
        return self._is_running

    def finish(self) -> FitResult:
        """Evaluates and saves the last state, and returns how the run ended."""
        reason = self.end_reason()
        if self._is_running:
            self._is_running = False
            # Before these weights are used further, saved or not.
            self.optimizer_step.check_pending_norms()
            self.needs_restore = False
            reason = self.end_reason() or "loop() has returned"
            self._evaluate_and_save_last()
            # What a loop of the user's own has left, saved before as in `epoch`.
            self._flush()
        else:
            self._evaluate_and_save_last()
        self._requests.close()
        # Asked again: a stop may have cut the last evaluation short.
        reason = self.end_reason() or reason
        assert reason is not None
        return self._state.result(self._stopped or "completed", reason, self._resumed_from)

    def clean_up(self) -> None:
        """Clears the handled stop request. No collectives: after a failure other ranks may be gone.

        A save that is under way gets a limited time to end; the next `restore` waits for one that takes longer.
        """
        self._stopped, self._is_running, self._resumes, self._resumed_from = None, False, False, None
        self._epoch_batch = self._accumulated = None
        self.recorder.in_update = False
        if self._saving is not None:
            self._saving.wait(None if self._world.size == 1 else _SAVE_TIMEOUT_S)
            self._requests.watch(None)

    def rejoin_process_group(self, rebuild: Callable[[], None]) -> None:
        """Continues in another process group, after `rebuild` has wrapped the models for it."""
        rebuild()
        self._state.rejoin()
        # Its first update may have to find its peers again.
        self._step_timeout = self._config.parallel.step_timeout

    # ---- Updates ---------------------------------------------------------------------------------------------------

    def epoch(self) -> Generator[GlobalBatch, None, dict[str, float]]:
        """Yields batches from where the epoch stands to its end, or to a limit or stop inside it; returns its metrics.

        Raises:
            StepError: the caller has made no update of a batch before asking for the next.
            DataError: the epoch has no batches.
        """
        progress, config, epoch = self._progress, self._config, self._progress.epoch
        if progress.is_closing:
            return self._close_epoch()
        # A caller who continues past a limit gets full epochs.
        was_past_limit = reached_limit_in_epoch(config, progress)
        self._callbacks.on_epoch_start()
        with closing(self._global_batches(epoch)) as batches:
            for batch in batches:
                self._epoch_batch, self._awaits_update = batch, True
                yield batch
                if self._awaits_update:
                    raise StepError(
                        "a batch was not made an update of: call run.step() after `for micro_batch in "
                        "run.accumulate(batch)`, once for every batch"
                    )
                past_limit = reached_limit_in_epoch(config, progress) and not was_past_limit
                if self._stopped or past_limit or reached_steps_per_epoch(config, progress):
                    break
            else:
                if progress.step_in_epoch == 0:
                    raise DataError(f"epoch {epoch + 1} has no batches: the training data is empty, or has run out")
                return self._end_epoch()
        # A stop leaves even a whole epoch open: the resumed run closes it, with the evaluation that belongs to it.
        if not self._stopped and self._state.is_epoch_complete():
            return self._end_epoch()
        # Saved before the flush: a resumed run's next record covers the whole interval, as if there had been no break.
        self._evaluate_and_save_last()
        self._flush()
        metrics = self._history.so_far()
        self._callbacks.on_epoch_end(metrics)
        return metrics

    def train_epoch(self) -> dict[str, float]:
        """Trains to the end of the epoch in progress by `training_step`, and returns its metrics."""
        batches = self.epoch()
        with closing(batches):
            while True:
                try:
                    batch = next(batches)
                except StopIteration as ended:
                    return dict(ended.value)
                self.update(batch)

    def update(self, batch: GlobalBatch) -> dict[str, float]:
        """Makes one update of a batch of `epoch` by `training_step`, does what is due and returns what it logs."""
        return self._run_due_actions(applied=self._run_step(batch, lambda: self.optimizer_step(batch)))

    def train_step(self, batch: Any) -> dict[str, float]:
        """Makes one update of a batch of this rank that is not one of the epoch's, and returns its metrics.

        While the run is running it does what is due as well, and returns metrics only when they are due.
        """
        loaded = self._as_own_batch(batch)
        applied = self._run_step(loaded, lambda: self.optimizer_step(loaded), of_epoch=False)
        return self._run_due_actions(applied=applied) if self._is_running else self._flush()

    def accumulate(self, batch: Any) -> Generator[Any, None, None]:
        """Yields the micro-batches of a batch of `epoch`, or of another one, for `backward` and `complete`."""
        of_epoch = self._awaits_update and batch is self._epoch_batch
        loaded: GlobalBatch = batch if of_epoch else self._as_own_batch(batch)
        self.recorder.in_update = True
        yield from self.optimizer_step.accumulate(loaded)
        self._accumulated = loaded, of_epoch

    def complete(self) -> dict[str, float]:
        """Makes the update of what was accumulated, does what is due and returns what it logs."""
        accumulated, self._accumulated = self._accumulated, None
        # Without a batch it raises, and says what to do.
        batch, of_epoch = accumulated or (LoadedBatch([], [], 0), False)
        return self._run_due_actions(applied=self._run_step(batch, self.optimizer_step.complete, of_epoch=of_epoch))

    def _as_own_batch(self, batch: Any) -> LoadedBatch:
        self._numerics.check_own_batch()
        rows = batch_size(batch)
        return LoadedBatch([batch], [rows], self._world.sum_ints(rows)[0])

    def load_initial_weights(self) -> None:
        """Takes the weights that the config begins with, for what is called without `run`."""
        self._state.load_initial_weights()

    def begin_without_restore(self) -> None:
        """Does the same for what trains or saves, and refuses where it would do so over another run."""
        self._state.begin_without_restore()

    def evaluate_weights_of(self, checkpoint: str, sets: Mapping[str, BatchStream]) -> dict[str, float] | None:
        """Evaluates the weights of a checkpoint; the models and all else stay as they are."""
        self.wait_for_snapshot()
        with self._state.weights_of(checkpoint):
            return self.evaluate(sets)

    def evaluate(self, sets: Mapping[str, BatchStream], *, may_repeat: bool = False) -> dict[str, float] | None:
        """Evaluates on these sets; None if a request cuts it short, one to save only where that may be repeated."""
        self.optimizer_step.check_pending_norms()
        return self._run_evaluation(
            self._make_evaluation(sets, max_batches=self._config.evaluate_batches, may_repeat=may_repeat)
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has the models as they are in an evaluation, and the time left out."""
        self.wait_for_snapshot()
        with (
            self._in_phase("around an evaluation"),
            self.recorder.paused(),
            evaluating(self._ctx),
            autocast(self._config.precision, self._ctx.device),
        ):
            yield

    def log(self, name: str, value: float | torch.Tensor, weight: LossWeight | None, reduce: Reduce) -> None:
        """Takes in a number that a step logs by itself."""
        if weight is None:
            in_hand = self.optimizer_step.weight if self._evaluation is None else self._evaluation.weight
            weight = in_hand if reduce == "mean" else 1.0
        if self._evaluation is not None:
            self._evaluation.log(name, value, weight, reduce)
        elif self.optimizer_step.should_log:
            metrics = self.optimizer_step.logged if self.recorder.in_update else self.metrics
            metrics.log(f"{'train' if self._ctx.mode.training else 'validation'}/{name}", value, weight, reduce)

    def save(self) -> Checkpoint:
        """Saves the whole state, between two updates, and waits until that is done."""
        self._finish_background_save()
        self.optimizer_step.check_pending_norms()
        self._save_began_s = time.perf_counter()
        with self._in_phase("saving"), self.recorder.paused(), self._reporting_save_failure():
            self._callbacks.on_checkpoint_start()
            checkpoint = self._state.save()
        self.save_took_s = time.perf_counter() - self._save_began_s
        self._checkpoints.done(self._progress.elapsed_s)
        self._callbacks.on_checkpoint_saved(checkpoint)
        return checkpoint

    def _start_background_save(self) -> None:
        """Saves the whole state while training goes on."""
        self._finish_background_save()
        self.optimizer_step.check_pending_norms()
        self._save_began_s = time.perf_counter()
        with self._in_phase("saving"), self.recorder.paused(), self._reporting_save_failure():
            self._callbacks.on_checkpoint_start()
            self._saving = self._state.begin_save()
        self.optimizer_step.wait_for_snapshot = self._saving.wait_for_snapshot
        self._requests.watch(self._saving)
        self._checkpoints.done(self._progress.elapsed_s)

    def _finish_background_save(self) -> None:
        """Waits for the save that is under way, if there is one, and tells of it. Every rank calls it at one update."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        self._requests.watch(None)
        with self._in_phase("saving"), self.recorder.paused(), self._reporting_save_failure():
            checkpoint = saving.result()
        self.save_took_s = time.perf_counter() - self._save_began_s
        self._callbacks.on_checkpoint_saved(checkpoint)

    @contextmanager
    def _reporting_save_failure(self) -> Iterator[None]:
        """Lets the hooks hear of a save that has failed; what one of them raises does not hide why."""
        try:
            yield
        except CheckpointError as error:
            try:
                self._callbacks.on_checkpoint_failed(error)
            except Exception as failure:
                error.add_note(f"besides, {type(failure).__name__}: {failure}")
            raise

    def wait_for_snapshot(self) -> None:
        """Waits for what a save in the background has yet to copy: averages may take the place of the weights."""
        if self._saving is not None:
            self._saving.wait_for_snapshot()

    def _make_evaluation(self, sets: Mapping[str, BatchStream], **options: Any) -> Evaluation:
        ctx, metrics = self._ctx, self._evaluation_metrics
        return Evaluation(ctx, self._steps, self._numerics, metrics, sets, self._requests, **options)

    def _run_evaluation(self, evaluation: Evaluation) -> dict[str, float] | None:
        self._evaluation = evaluation
        self.wait_for_snapshot()
        try:
            with self._in_phase("around an evaluation"), self.recorder.paused():
                return evaluation()
        finally:
            self._evaluation = None
            self._numerics.seed_after_evaluation(self._config, self._progress.step)

    @contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        # An error leaves the phase as it is: that is where it came from.
        self._activity.enter(phase)
        yield
        self._activity.enter("between updates")

    def _warn_if_data_is_endless(self) -> None:
        """Says before the first epoch what may never come, where nobody can tell whether the data has an end."""
        config, data, progress = self._config, self._data, self._progress
        if config.steps_per_epoch or data.guarantee == "exact" or data.steps_in_epoch(0) or progress.epoch:
            return
        every = {
            "evaluate_every": config.evaluate_every if self._validation else None,
            "checkpoint.every": config.checkpoint.every if self._ctx.run_dir is not None else None,
        }
        waits = " and ".join(f'{name}="{each}"' for name, each in every.items() if each and each.unit == "epochs")
        if waits and self._world.is_main:
            again = ", by which each epoch begins the data again" if data.guarantee == "epoch" else ""
            warnings.warn(
                f"what is due at the end of an epoch ({waits}) may never come: nobody can tell whether this training "
                f"data has an end. Say it in steps or minutes, or set steps_per_epoch{again}",
                stacklevel=2,
            )

    def _sanity_check(self) -> None:
        """Finds out before the first step whether an evaluation works. Draws no random number of the run's."""
        generators = RngState()
        before = generators.state_dict()
        evaluation = self._make_evaluation(
            self._validation, max_batches=self._config.sanity_batches, is_sanity_check=True
        )
        # A stop that cuts it short stays asked for, and is heeded when the hooks have heard that the run has begun.
        if metrics := self._run_evaluation(evaluation):
            # Hours before the first evaluation may be due.
            self._state.has_monitor(metrics)
        generators.load_state_dict(before)

    def _run_step(self, batch: GlobalBatch, step: Callable[[], str | None], *, of_epoch: bool = True) -> bool:
        """Makes one update, and counts it; returns whether it was applied. If not, only the data has moved."""
        progress = self._progress
        self.recorder.in_update = True
        try:
            rejection = step()
        finally:
            self.recorder.in_update = False
        self._activity.end_update()
        if self._step_timeout is not None:
            self._world.set_timeout(self._step_timeout.amount)
            self._step_timeout = None
        samples = batch.global_num_samples
        if samples is None:
            samples = self._world.sum_ints(sum(batch.num_samples))[0]
        if of_epoch:
            self._awaits_update = False
            progress.step_in_epoch += 1
            progress.offset += samples
        if rejection is not None:
            # What was saved at this step stands before the batch that was skipped.
            self._state.last_saved_step = None
            self._callbacks.on_step_skipped(rejection)
            return False
        progress.step += 1
        progress.samples += samples
        self.recorder.count(batch)
        self._callbacks.on_step_end()
        return True

    def _run_due_actions(self, *, applied: bool) -> dict[str, float]:
        """Logs, then stops, or evaluates and saves: whatever is due or agreed on after an update. Returns what it logs.

        What comes every so many updates has been done already where the last one was not applied.
        """
        progress, agreed = self._progress, self._requests.agree()
        if agreed.saved:
            self._finish_background_save()
        record = self._flush() if applied and self._logs.due(progress, ended="steps") else {}
        if record and self._maybe_roll_back(record):
            applied = False
        if agreed.stop:
            self._stop(agreed.stop)
            return record
        if agreed.evaluate or (applied and self._evaluations.due(progress, ended="steps")):
            self._evaluate()
            self._handle_requests()
        self._save_if_best()
        if agreed.save or (applied and self._checkpoints.due(progress, ended="steps")):
            self._save_unless_saved()
        if self._has_clocks and self._world.is_main:
            # Clocks differ between ranks: the main one's decides, and the others hear of it like of any request.
            elapsed_s = self.recorder.elapsed_s()
            if self._evaluations.due_by_clock(elapsed_s):
                self._evaluations.done(elapsed_s)
                self._requests.evaluate()
            if self._checkpoints.due_by_clock(elapsed_s):
                self._checkpoints.done(elapsed_s)
                self._requests.save()
        return record

    def _flush(self) -> dict[str, float]:
        """Logs the interval since the last time, and warns once of a loss that poisons nothing but the log."""
        record = self.recorder.flush()
        if math.isfinite(loss := record.get("train/loss", 0.0)):
            return record
        # The gradient may not be finite either, and nobody have looked yet.
        self.optimizer_step.check_pending_norms()
        if not self._has_warned and self._world.is_main:
            self._has_warned = True
            warnings.warn(
                f"train/loss is {loss} at step {self._progress.step}, and the gradient is finite: training goes on, "
                "and the means over the epoch leave it out. Does the step return the loss that it learns from?",
                stacklevel=2,
            )
        return record

    def _maybe_roll_back(self, record: Mapping[str, float]) -> bool:
        """Judges the loss of an interval; if it has jumped away, goes back to a checkpoint from before, and says so.

        Raises:
            ConfigError: there is no such loss.
            LossSpikeError: the run has gone back often enough.
        """
        config, spikes, progress = self._config.loss_spike, self._spikes, self._progress
        if config is None or not record:
            return False
        if config.metric not in record:
            raise ConfigError(f"loss_spike.metric is {config.metric!r}, but the log has {', '.join(record)}")
        loss, samples = record[config.metric], self.recorder.samples
        limit = spikes.limit(samples=samples)
        if not spikes.is_spike(loss, samples=samples, step=progress.step):
            return False
        what = f"{config.metric} is {loss:.6g} at step {progress.step}, where up to {limit:.6g} is usual"
        if spikes.rollbacks >= config.max_rollbacks:
            raise LossSpikeError(
                f"{what}, and the run has gone back {spikes.rollbacks} times already (max_rollbacks): lower the "
                "learning rate, clip the gradient, or look at the data"
            )
        self._finish_background_save()
        self.optimizer_step.check_pending_norms()
        with self.recorder.paused():
            checkpoint = self._state.roll_back(up_to=spikes.good_step)
        if checkpoint is None:
            self._ctx.print(f"{what}; there is no checkpoint from before to go back to, so training goes on")
            return False
        spikes.rolled_back(progress.step)
        self.recorder.trackers.rewind(progress.step)
        self._history.rewind(progress.step)
        self.recorder.log_event({"rollbacks": float(spikes.rollbacks)})
        self._ctx.print(
            f"{what}; went back to the weights of step {progress.step} ({checkpoint.path}), and on behind the data "
            f"that did it ({spikes.rollbacks} of at most {config.max_rollbacks} times)"
        )
        # A killed run must go on from here, and not from a checkpoint of the weights that were given up.
        self.save()
        return True

    def _end_epoch(self) -> dict[str, float]:
        progress, history = self._progress, self._history
        history.dropped_samples = self._uneven_samples
        place = {"epoch": progress.epoch, "offset": progress.offset}
        if isinstance(self._data, HasDroppedTail) and is_exhausted(self._data, steps=progress.step_in_epoch, **place):
            history.dropped_samples = self._data.dropped_in_epoch(**place)
        self._uneven_samples = 0
        progress.epoch += 1
        progress.step_in_epoch = progress.offset = 0
        # What is saved from here on goes on with the closing.
        progress.is_closing = True
        for scheduler in self._ctx.lr_stepping.at("epoch"):
            scheduler.step()
        self._maybe_roll_back(self._flush())
        return self._close_epoch()

    def _close_epoch(self) -> dict[str, float]:
        """Evaluates if that is due, and closes the epoch; one whose evaluation a stop cuts short, the resume closes."""
        progress, history = self._progress, self._history
        if self._evaluations.due(progress, ended="epochs") and not self._evaluate():
            return history.so_far()
        progress.is_closing = False
        metrics = history.end_epoch(epoch=progress.epoch, step=progress.step)
        self.recorder.log_epoch(metrics)
        self._callbacks.on_epoch_end(metrics)
        # What was saved of this update before does not know that the epoch has ended.
        self._state.last_saved_step = None
        self._save_if_best()
        if self._checkpoints.due(progress, ended="epochs"):
            self._save_unless_saved()
        self._handle_requests()
        if not self._is_running:
            self._finish_background_save()
        return metrics

    def _handle_requests(self) -> None:
        """Does at once what was asked for during an evaluation or at the end of an epoch, unless the run ends here."""
        agreed = self._requests.agree_now()
        if agreed.saved:
            self._finish_background_save()
        if agreed.evaluate:
            self._evaluate()
        self._save_if_best()
        if agreed.save:
            self._save_unless_saved()
        if agreed.stop and self._stopped is None and reached_limit(self._config, self._progress) is None:
            self._stop(agreed.stop)

    def _evaluate(self) -> bool:
        """Evaluates during a run: the metrics are logged, and steer the schedulers that follow one.

        Returns:
            Whether the weights as they are have been evaluated, so far as there is data; not if a stop cuts it short.
        """
        if not self._validation or self._progress.evaluated_step == self._progress.step:
            return True
        generators = RngState()
        before = generators.state_dict()
        while (metrics := self.evaluate(self._validation, may_repeat=True)) is None:
            # Whoever evaluates again, this run or the resumed one, draws what was drawn here.
            generators.load_state_dict(before)
            agreed = self._requests.agree_now()
            if agreed.stop:
                self._stop(agreed.stop)
                return False
            self._save_unless_saved()
        self._progress.evaluated_step = self._progress.step
        self._progress.evaluations += 1
        self._evaluations.done(self.recorder.elapsed_s())
        # What was saved of this update before does not know of it.
        self._state.last_saved_step = None
        if metrics:
            self.recorder.log_evaluation(metrics)
            self._must_save_best = self._state.record_evaluation(metrics) and self._config.checkpoint.save_best
            self._ctx.lr_stepping.step_after_evaluation(metrics)
        return True

    def _save_unless_saved(self) -> None:
        if self._ctx.run_dir is None or self._state.last_saved_step == self._progress.step:
            return
        # What ends the run is saved at once: there is nothing left to do meanwhile.
        if self._config.checkpoint.background and self.end_reason() is None:
            self._start_background_save()
        else:
            self.save()

    def _save_if_best(self) -> None:
        """Saves the state of the evaluation that has just been, if it is the best and that is asked for."""
        best, self._must_save_best = self._must_save_best, False
        if best:
            self._save_unless_saved()

    def _stop(self, status: StopStatus) -> None:
        self._stopped = status
        reasons = self._world.all_gather_object(self._requests.stop_reason)
        self._requests.stop_reason = next(reason for reason in reasons if reason)
        self._callbacks.on_stop_requested(self._requests.stop_reason)

    def _evaluate_and_save_last(self) -> None:
        """Evaluates and saves the last state, unless that has been done; one that was told to stop only saves."""
        if self._stopped is None:
            self._evaluate()
        self._save_if_best()
        if self._config.checkpoint.at_end:
            self._save_unless_saved()
        self._finish_background_save()

    def end_reason(self) -> str | None:
        """Returns why the run is to end here, or None if it is to go on; equal on every rank."""
        return self._requests.stop_reason if self._stopped else reached_limit(self._config, self._progress)

    def _global_batches(self, epoch: int) -> Generator[GlobalBatch, None, None]:
        """Yields the rest of an epoch, equally much on every rank, and measures how long the loop waits for it."""
        if self._progress.step_in_epoch and self._state.is_epoch_complete():
            # What was saved was saved at the last update of the epoch, which is closed now.
            return
        must_agree = self._world.size > 1 and self._data.guarantee != "exact"
        iterator = self._data.epoch(epoch, offset=self._progress.offset)
        try:
            while True:
                self._activity.enter("reading data")
                began_s = self._activity.since_s
                batch = next(iterator, None)
                # Here it may wait for the data of other ranks, so it must be ahead of who reads them.
                self._activity.enter("forward")
                self.recorder.waited_s += self._activity.since_s - began_s
                if must_agree:
                    own = batch.num_samples if batch is not None else ()
                    count, squares, samples = self._world.sum_ints(len(own), len(own) ** 2, sum(own))
                    # Equal only if every rank has as many micro-batches; the epoch ends where the shortest one does.
                    if batch is None or count**2 != self._world.size * squares:
                        # What other ranks have not read yet nobody can count.
                        self._uneven_samples = samples
                        return
                    batch = LoadedBatch(batch.micro_batches, batch.num_samples, samples)
                if batch is None:
                    return
                yield batch
        finally:
            if (close := getattr(iterator, "close", None)) is not None:
                close()
