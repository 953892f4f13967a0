"""The training loop: epochs, updates, and the evaluations, saves and stops between them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch

from ..checkpoints.rng import GeneratorsBefore, RngState
from ..checkpoints.store import Checkpoint
from ..config import LossSpikeConfig
from ..data.protocols import BatchStream, GlobalBatch, HasDroppedTail, HasRankState, LoadedBatch, is_exhausted
from ..data.repeats import RankRepeats
from ..data.tree import batch_size
from ..distributed.fsdp import AssignedData, RefuseLostChanges
from ..distributed.parallelize import check_no_partial_gradients
from ..errors import ConfigError, DataError, LossSpikeError, NonFiniteError, StepError
from ..exact.numerics import Numerics
from ..metrics.reductions import Reduce
from ..metrics.train_log import Recorder
from ..result import FitResult
from ..setup.compile_cache import UPDATES_BEFORE_SAVE, CompileCache
from ..step.evaluation_weights import set_training_mode
from ..step.precision import autocast
from .blocked_reads import BlockedReads
from .by_source import add_by_source
from .context import RunContext
from .control import Requests, StopStatus
from .evaluation import Evaluation, evaluating
from .evaluation_metrics import EvaluationMetrics
from .limits import reached_limit, reached_limit_in_epoch, reached_steps_per_epoch
from .loss_spikes import SpikeDetector
from .progress import Schedule
from .run_length import RunLength
from .run_state import RunState
from .saving import Saver
from .steps import LossWeight, Steps

_MOST_SCALES = 18
_UPDATES_WITH_CHECKS = 2


class Loop:
    """Runs the loop drawn in the docstring of `Trainer`. Every rank must call every method.

    A run is `restore`, `start`, `epoch` until `end_reason` is not None, and `finish`. Between two batches of `epoch`
    the caller makes an update: by `update`, which calls `training_step`, or by `accumulate` and `complete`.

    Args:
        ctx: of the run, with its models, optimizers and schedulers.
        steps: the user's steps.
        numerics: ordinary or exact arithmetic.
        requests: stop, save and evaluate requests.
        data: the training data, open.
        validation: the sets of validation data, open, by name; a single unnamed set has the key "".
        metrics: those of `configure_metrics`.
        length: of the run.

    Attributes:
        optimizer_step: makes updates.
        recorder: writes the records of the log.
        saver: writes checkpoints.
        needs_restore: True after an exception mid-update: model state is undefined until a checkpoint is restored.
        began_s: start of the run, including setup, by `time.perf_counter`.
        compile_cache: saves what the first updates have compiled; None if it is not kept.
        check_trainable: called at the start of each epoch and evaluation and at the end, since hooks may change models.
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
        self._config, self._progress, self._world, self._mesh = config, ctx.progress, ctx.world, ctx.mesh
        self._activity, self._callbacks, self._history = ctx.activity, ctx.callbacks, ctx.history
        self._data, self._validation, self._evaluation_metrics = data, validation, metrics
        self.metrics = numerics.make_means()
        self.optimizer_step = numerics.make_step(ctx, steps, self.metrics, data)
        if (order := self.optimizer_step.gather_order) is not None:
            requests.fingerprint = lambda: order.fingerprint
        self.recorder = Recorder(ctx, steps, self.metrics, self.optimizer_step)
        self._spikes = SpikeDetector(config.loss_spike or LossSpikeConfig())
        self._state = RunState(
            ctx, steps, numerics, self.recorder, self.metrics, self.optimizer_step, self._spikes, data, length
        )
        self._logs = Schedule(config.log_every)
        self._evaluations = Schedule(config.evaluate_every)
        self.saver = Saver(ctx, self._state, self.optimizer_step, self.recorder, requests)
        agrees = any(stream.guarantee != "exact" for stream in (data, *validation.values()))
        self._reads = BlockedReads(
            requests, self._save_during_read, ctx.world, agrees=agrees, timeout_s=config.parallel.timeout.amount
        )
        self._repeats = RankRepeats(num_ranks=ctx.world.size, num_readers=ctx.mesh.data.size, is_main=ctx.world.is_main)
        self._has_clocks = any(
            each and each.unit == "seconds" for each in (config.evaluate_every, config.checkpoint.every)
        )
        self.began_s = time.perf_counter()
        self.needs_restore = False
        self._step_timeout = config.parallel.step_timeout
        self.compile_cache: CompileCache | None = None
        self.check_trainable: Callable[[], None] = _no_op
        self._is_running = False
        self._resumes = False
        self._resumed_from: Checkpoint | None = None
        self._stopped: StopStatus | None = None
        self._evaluation: Evaluation | None = None
        self._accumulated: tuple[GlobalBatch, bool] | None = None
        self._epoch_batch: GlobalBatch | None = None
        self._awaits_update = False
        self._must_save_best = self._must_save = False
        self._uneven_samples = 0
        self._has_warned = False
        # Not under compile, whose code would be compiled again afterwards.
        self._checks_changes = ctx.mesh.shard_mesh is not None and not config.parallel.compile
        self._first_checks: AbstractContextManager[object] = nullcontext()
        self._assigned_data = AssignedData({})
        if config.loss_spike is not None and ctx.run_dir is None:
            raise ConfigError("loss_spike needs checkpoints to roll back to: give the trainer a run_dir")

    def announce_step(self) -> None:
        """Print the description of the optimizer step, if it has one, and add its metrics to the log."""
        if (text := self.optimizer_step.describe()) is not None:
            self._ctx.print(text)
        if (source := self.optimizer_step.metric_source()) is not None:
            self.recorder.metric_sources.append(source)

    # ---- Start and end ---------------------------------------------------------------------------------------------

    def restore(self, resume: str, components: Collection[str], *, accept_changes: bool) -> Checkpoint | None:
        """Restore as `Trainer.fit` describes, and return the checkpoint, if there is one."""
        if not isinstance(resume, str):
            raise ConfigError(f'resume must be "auto", "never" or the path of a checkpoint, got {resume!r}')
        if resume == "never" and self._progress.step:
            raise ConfigError(
                f'resume="never" starts fresh, and this trainer has made {self._progress.step} updates: create another '
                "trainer, or continue with this one"
            )
        self.saver.discard()
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
        """Prepare for the first update, and return whether anything is left to train."""
        self._state.begin_without_restore()
        set_training_mode(self._ctx.optimizers.values())
        self._assigned_data = AssignedData(self._ctx.models)
        if self._checks_changes:
            self._first_checks = RefuseLostChanges(self._ctx.models.values())
        limit = reached_limit(self._config, self._progress)
        has_work = limit is None or self._progress.is_closing
        if not has_work and self._resumed_from is not None:
            self._ctx.print(
                f"nothing is left to train: {limit} at step {self._progress.step}. To continue, raise the limit; "
                "to start over, use another run_dir"
            )
        if has_work:
            self._state.check_storage()
            self._warn_if_data_is_endless()
        self.recorder.start(resumed=self._resumes or self._progress.step > 0, began_s=self.began_s)
        for schedule in (self._evaluations, self.saver.schedule):
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
            self._save_if_due()
        self._is_running = self.needs_restore = has_work and self.end_reason() is None
        if self._is_running:
            self._reads.start()
        return self._is_running

    def finish(self) -> FitResult:
        """Evaluate and save the last state, and return how the run ended."""
        reason = self.end_reason()
        if self._is_running:
            self._is_running = False
            # Before these weights are evaluated, saved or exported.
            self.optimizer_step.check_pending_norms()
            self._assigned_data.check()
            self.check_trainable()
            self.needs_restore = False
            reason = self.end_reason() or "loop() has returned"
            self._evaluate_and_save_last()
            # A custom loop may leave unlogged metrics; saved before they are logged, as in `epoch`.
            self._flush()
        else:
            self._evaluate_and_save_last()
        self._requests.close()
        # Again, since a stop may have interrupted the last evaluation.
        reason = self.end_reason() or reason
        assert reason is not None
        return self._state.result(self._stopped or "completed", reason, self._resumed_from)

    def clean_up(self) -> None:
        """Clear the handled stop request. No collectives: after a failure other ranks may be gone.

        Waits a limited time for a background save; the next `restore` waits for one that takes longer.
        """
        self._reads.close()
        self._stopped, self._is_running, self._resumes, self._resumed_from = None, False, False, None
        self._epoch_batch = self._accumulated = None
        self._must_save_best = self._must_save = False
        self.recorder.in_update = False
        self.saver.clean_up()
        if self.compile_cache is not None:
            self.compile_cache.clean_up()

    def guard_saves(self, ownership_problem: Callable[[], str | None]) -> None:
        """Make saves fail with the message that this returns, if any, on the main rank."""
        self._state.guard_saves(ownership_problem)

    def rejoin_process_group(self, rebuild: Callable[[], None]) -> None:
        """Continue in another process group; `rebuild` wraps the models for it."""
        rebuild()
        self._state.rejoin()
        self._reads.rejoin(timeout_s=self._config.parallel.timeout.amount)
        # The first update has to connect to the other ranks again.
        self._step_timeout = self._config.parallel.step_timeout

    # ---- Updates ---------------------------------------------------------------------------------------------------

    def epoch(self) -> Generator[GlobalBatch, None, dict[str, float]]:
        """Yield batches to the end of the epoch, or to a limit or stop inside it; returns its metrics.

        Raises:
            StepError: the caller asked for the next batch without an update from this one.
            DataError: the epoch has no batches.
        """
        progress, config, epoch = self._progress, self._config, self._progress.epoch
        if progress.is_closing:
            return self._close_epoch()
        # A caller who continues past a limit gets full epochs.
        was_past_limit = reached_limit_in_epoch(config, progress)
        self._callbacks.on_epoch_start()
        self.check_trainable()
        with closing(self._global_batches(epoch)) as batches:
            for batch in batches:
                self._epoch_batch, self._awaits_update = batch, True
                yield batch
                if self._awaits_update:
                    raise StepError(
                        "a batch was not used for an update: call run.step() after `for micro_batch in "
                        "run.accumulate(batch)`, once per batch"
                    )
                # Only now, so that the checkpoint has what the caller's loop has done after the update.
                self._save_if_due()
                past_limit = reached_limit_in_epoch(config, progress) and not was_past_limit
                if self._stopped or past_limit or reached_steps_per_epoch(config, progress):
                    break
            else:
                if self._stopped is None:
                    if progress.step_in_epoch == 0:
                        raise DataError(
                            f"epoch {epoch + 1} has no batches: the training data is empty or exhausted. An iterator "
                            "can be read only once: give an iterable instead, such as a list or a DataLoader"
                        )
                    return self._end_epoch()
        # A stop leaves even a complete epoch open: the resumed run evaluates and closes it.
        if not self._stopped and self._state.is_epoch_complete():
            return self._end_epoch()
        # Saved before the flush, so that a resumed run's next record covers the whole interval.
        self._evaluate_and_save_last()
        self._flush()
        metrics = self._history.so_far()
        self._callbacks.on_epoch_end(metrics)
        return metrics

    def train_epoch(self) -> dict[str, float]:
        """Train to the end of the epoch in progress by `training_step`, and return its metrics."""
        batches = self.epoch()
        with closing(batches):
            while True:
                try:
                    batch = next(batches)
                except StopIteration as ended:
                    return dict(ended.value)
                self.update(batch)

    def update(self, batch: GlobalBatch) -> dict[str, float]:
        """Make an update from a batch of `epoch` by `training_step`, run due actions, and return the logged record."""
        return self._run_due_actions(applied=self._run_step(batch, lambda: self.optimizer_step(batch)))

    def train_step(self, batch: Any) -> dict[str, float]:
        """Make an update from a batch of this rank that is not part of the epoch, and return its metrics.

        During a run, also run due actions, and return metrics only when a record is due.
        """
        loaded = self._as_own_batch(batch)
        applied = self._run_step(loaded, lambda: self.optimizer_step(loaded), of_epoch=False)
        return self._run_due_actions(applied=applied, of_epoch=False) if self._is_running else self._flush()

    def accumulate(self, batch: Any) -> Generator[Any, None, None]:
        """Yield the micro-batches of a batch, of `epoch` or not, for `backward` and `complete`."""
        of_epoch = self._awaits_update and batch is self._epoch_batch
        loaded: GlobalBatch = batch if of_epoch else self._as_own_batch(batch)
        self.recorder.in_update = True
        yield from self.optimizer_step.accumulate(loaded)
        self._accumulated = loaded, of_epoch

    def complete(self) -> dict[str, float]:
        """Make the update from the accumulated gradients, run due actions, and return the logged record."""
        accumulated, self._accumulated = self._accumulated, None
        # Without a batch, `complete` below raises.
        batch, of_epoch = accumulated or (LoadedBatch([], [], 0), False)
        applied = self._run_step(batch, self.optimizer_step.complete, of_epoch=of_epoch)
        return self._run_due_actions(applied=applied, of_epoch=of_epoch)

    def _as_own_batch(self, batch: Any) -> LoadedBatch:
        self._numerics.check_own_batch()
        rows = batch_size(batch)
        return LoadedBatch([batch], [rows], self._mesh.data.sum_ints(rows)[0])

    def load_initial_weights(self) -> None:
        """Load the weights of `init_from`, for methods that are called without `fit`."""
        self._state.load_initial_weights()

    def begin_without_restore(self) -> None:
        """Do the same for methods that train or save; raises if they would overwrite another run."""
        self._state.begin_without_restore()

    def capture(self) -> dict[str, Any]:
        """Return the whole state in memory, between two updates."""
        self._state.load_initial_weights()
        self.optimizer_step.check_pending_norms()
        self._callbacks.on_checkpoint_start()
        return self._state.capture()

    def load_captured(self, state: Mapping[str, Any], *, accept_changes: bool) -> None:
        """Restore what `capture` has returned.

        Raises:
            ConfigError: a run is in progress.
        """
        if self._is_running:
            raise ConfigError(
                "load_state_dict() would change the position of a run that is reading its data: call it before fit(), "
                "or before the loop of a Session; to evaluate other weights, use evaluate(checkpoint=...)"
            )
        self.saver.discard()
        self._state.load_captured(state, accept_changes=accept_changes)
        self.needs_restore = False

    def evaluate_weights_of(self, checkpoint: str, sets: Mapping[str, BatchStream]) -> dict[str, float] | None:
        """Evaluate the weights of a checkpoint, and restore the models' weights."""
        self.saver.wait_for_snapshot()
        with self._state.weights_of(checkpoint):
            return self.evaluate(sets)

    def evaluate(self, sets: Mapping[str, BatchStream], *, may_repeat: bool = False) -> dict[str, float] | None:
        """Evaluate on these sets; return None if a stop request, or with `may_repeat` a save request, interrupts it."""
        self.optimizer_step.check_pending_norms()
        return self._run_evaluation(
            self._make_evaluation(sets, max_batches=self._config.evaluate_batches, may_repeat=may_repeat)
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the models in evaluation mode; the time does not count in the throughput."""
        self.saver.wait_for_snapshot()
        self.recorder.wait_for_updates()
        with (
            self._activity.during("around an evaluation"),
            self.recorder.paused(),
            evaluating(self._ctx),
            autocast(self._config.precision, self._ctx.device),
        ):
            yield

    def log(self, name: str, value: float | torch.Tensor, weight: LossWeight | None, reduce: Reduce) -> None:
        """Add a number that a step or a hook logs."""
        if weight is None:
            current = self.optimizer_step.weight if self._evaluation is None else self._evaluation.weight
            weight = current if reduce == "mean" else 1.0
        if self._evaluation is not None:
            self._evaluation.log(name, value, weight, reduce)
        elif self.optimizer_step.should_log:
            metrics = self.optimizer_step.logged if self.recorder.in_update else self.metrics
            metrics.log(f"{'train' if self._ctx.mode.training else 'validation'}/{name}", value, weight, reduce)

    def log_by_source(self, loss_B: torch.Tensor, source_B: torch.Tensor, tokens_B: torch.Tensor | None) -> None:
        """Add the loss and the number of tokens of each source that a step logs."""
        if self._evaluation is not None:
            self._evaluation.log_by_source(loss_B, source_B, tokens_B)
            return
        weight = self.optimizer_step.weight
        is_padding = not isinstance(weight, torch.Tensor) and not weight
        if self.optimizer_step.should_log and not is_padding:
            metrics = self.optimizer_step.logged if self.recorder.in_update else self.metrics
            add_by_source(metrics, "train/", self._data, loss_B, source_B, tokens_B, mesh=self._ctx.mesh)

    def _make_evaluation(self, sets: Mapping[str, BatchStream], **options: Any) -> Evaluation:
        ctx, metrics = self._ctx, self._evaluation_metrics
        return Evaluation(ctx, self._steps, self._numerics, metrics, sets, self._requests, self._reads, **options)

    def _run_evaluation(self, evaluation: Evaluation) -> dict[str, float] | None:
        self._evaluation = evaluation
        self.saver.wait_for_snapshot()
        self.recorder.wait_for_updates()
        try:
            with self._activity.during("around an evaluation"), self.recorder.paused():
                return evaluation()
        finally:
            self._evaluation = None
            self._numerics.seed_after_evaluation(self._config, self._progress.step)

    def check_step(self) -> dict[str, float]:
        """Make one update from the first micro-batch, evaluate one batch of each set, and return the metrics.

        Raises:
            DataError: the epoch has no batches.
            NonFiniteError: no scale of the loss gives a finite gradient.
        """
        self._state.begin_without_restore()
        self._callbacks.on_fit_start()
        self._callbacks.on_epoch_start()
        with closing(self._global_batches(0)) as batches:
            batch = next(batches, None)
            if batch is None:
                raise DataError("epoch 1 has no batches: the training data is empty")
            first = LoadedBatch(batch.micro_batches[:1], batch.num_samples[:1], batch.num_samples[0])
            # The first scales of float16 may overflow.
            if not any(self._run_step(first, lambda: self.optimizer_step(first)) for _ in range(_MOST_SCALES)):
                raise NonFiniteError(
                    "the gradient of the first micro-batch is not finite at any scale of the loss: check the loss for "
                    "a division by zero or a log of zero, or set precision='bf16'"
                )
        metrics = self._flush()
        evaluation = self._make_evaluation(self._validation, max_batches=1)
        if evaluated := self._run_evaluation(evaluation):
            self._state.record_evaluation(evaluated)
            self._ctx.lr_stepping.step_after_evaluation(evaluated)
        return {**metrics, **(evaluated or {})}

    def _warn_if_data_is_endless(self) -> None:
        """Warn before the first epoch if actions are due at its end, and the data may have none."""
        config, data, progress = self._config, self._data, self._progress
        if config.steps_per_epoch or data.guarantee == "exact" or data.steps_in_epoch(0) or progress.epoch:
            return
        every = {
            "evaluate_every": config.evaluate_every if self._validation else None,
            "checkpoint.every": config.checkpoint.every if self._ctx.run_dir is not None else None,
        }
        waits = " and ".join(f'{name}="{each}"' for name, each in every.items() if each and each.unit == "epochs")
        if waits and self._world.is_main:
            again = ", with which each epoch restarts the data" if data.guarantee == "epoch" else ""
            warnings.warn(
                f"{waits} may never be due: the length of the training data is unknown, and it may be endless. Give a "
                f"number of steps or a time, or set steps_per_epoch{again}",
                stacklevel=2,
            )

    def _sanity_check(self) -> None:
        """Run a short evaluation before the first step, to find mistakes early. Random states do not change."""
        generators = RngState()
        before = generators.state_dict()
        evaluation = self._make_evaluation(
            self._validation, max_batches=self._config.sanity_batches, is_sanity_check=True
        )
        # A stop request that interrupts it stays pending, and is handled after on_fit_start.
        if metrics := self._run_evaluation(evaluation):
            # Warns now rather than hours later, after the first evaluation.
            self._state.has_monitor(metrics)
        generators.load_state_dict(before)

    def _run_step(self, batch: GlobalBatch, step: Callable[[], str | None], *, of_epoch: bool = True) -> bool:
        """Make one update and count it; return whether it was applied. If not, only the data position advances."""
        progress = self._progress
        self.recorder.in_update = True
        with self._first_checks:
            try:
                rejection = step()
            finally:
                self.recorder.in_update = False
        self._activity.end_update()
        if self.compile_cache is not None and self._activity.updates == UPDATES_BEFORE_SAVE:
            self.compile_cache.save()
        if self._step_timeout is not None:
            self._world.set_timeout(self._step_timeout.amount)
            self._reads.timeout_s = self._step_timeout.amount
            self._step_timeout = None
        samples = batch.global_num_samples
        if samples is None:
            samples = self._mesh.data.sum_ints(sum(batch.num_samples))[0]
        if of_epoch:
            self._awaits_update = False
            progress.step_in_epoch += 1
            progress.offset += samples
        if rejection is not None:
            # A checkpoint of this step is from before the skipped batch.
            self._state.last_saved_step = None
            self._callbacks.on_step_skipped(rejection)
            return False
        progress.step += 1
        progress.samples += samples
        self.recorder.count(batch)
        with self._first_checks:
            self._callbacks.on_step_end()
        if self._activity.updates >= _UPDATES_WITH_CHECKS:
            self._first_checks = nullcontext()
        return True

    def _run_due_actions(self, *, applied: bool, of_epoch: bool = True) -> dict[str, float]:
        """Log, then stop, or evaluate and save, as due or requested after an update; return the logged record.

        If the update was not applied, actions due by the number of updates have been done already. If the
        batch is `of_epoch`, `epoch` saves when it is asked for the next one.
        """
        progress, agreed = self._progress, self._requests.agree()
        if agreed.saved:
            self.saver.finish()
        record = self._flush() if applied and self._logs.due(progress, ended="steps") else {}
        if record and self._maybe_roll_back(record):
            applied = False
        if agreed.stop:
            self._stop(agreed.stop)
            return record
        if agreed.evaluate or (applied and self._evaluations.due(progress, ended="steps")):
            self._evaluate()
            self._handle_requests()
        self._must_save |= agreed.save or (applied and self.saver.schedule.due(progress, ended="steps"))
        if not of_epoch:
            self._save_if_due()
        if applied and not self._must_save:
            self.saver.rehearse()
        if self._has_clocks and self._world.is_main:
            # Clocks differ between ranks: the main rank's decides, and requests the action on all ranks.
            elapsed_s = self.recorder.elapsed_s()
            if self._evaluations.due_by_clock(elapsed_s):
                self._evaluations.done(elapsed_s)
                self._requests.evaluate()
            if self.saver.schedule.due_by_clock(elapsed_s):
                self.saver.schedule.done(elapsed_s)
                self._requests.save()
        return record

    def _flush(self) -> dict[str, float]:
        """Log the interval since the last flush, and warn once if the loss is not finite but the gradient is.

        Raises:
            StepError: see `AssignedData`.
        """
        self._assigned_data.check()
        record = self.recorder.flush()
        if math.isfinite(loss := record.get("train/loss", 0.0)):
            return record
        # The gradient may be non-finite too; its norm has not been checked yet.
        self.optimizer_step.check_pending_norms()
        if not self._has_warned and self._world.is_main:
            self._has_warned = True
            warnings.warn(
                f"train/loss is {loss} at step {self._progress.step}, but the gradient is finite: training continues, "
                "and means over the epoch leave this value out. Does the step return the loss that it differentiates?",
                stacklevel=2,
            )
        return record

    def _maybe_roll_back(self, record: Mapping[str, float]) -> bool:
        """Roll back to an earlier checkpoint if the loss of an interval is a spike; return whether it did.

        Raises:
            ConfigError: there is no such loss.
            LossSpikeError: the run has rolled back `max_rollbacks` times already.
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
        what = f"{config.metric} is {loss:.6g} at step {progress.step}, a spike (the limit is {limit:.6g})"
        if spikes.rollbacks >= config.max_rollbacks:
            raise LossSpikeError(
                f"{what}, and the run has rolled back {spikes.rollbacks} times already (max_rollbacks): lower the "
                "learning rate, clip the gradient, or check the data"
            )
        self.saver.finish()
        self.optimizer_step.check_pending_norms()
        with self.recorder.paused():
            checkpoint = self._state.roll_back(up_to=spikes.good_step)
        if checkpoint is None:
            self._ctx.print(f"{what}; there is no earlier checkpoint to roll back to, so training continues")
            return False
        spikes.rolled_back(progress.step)
        self.recorder.trackers.rewind(progress.step)
        self._history.rewind(progress.step)
        self.recorder.log_event({"rollbacks": float(spikes.rollbacks)})
        self._ctx.print(
            f"{what}; rolled back to the weights of step {progress.step} ({checkpoint.path}), continuing behind the "
            f"data that caused it (rollback {spikes.rollbacks} of at most {config.max_rollbacks})"
        )
        # A killed run must resume from here, and not from a checkpoint of the discarded weights.
        self.saver.save()
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
        # A checkpoint from here on resumes with closing the epoch.
        progress.is_closing = True
        for scheduler in self._ctx.lr_stepping.at("epoch"):
            self._ctx.lr_stepping.step(scheduler)
        self._maybe_roll_back(self._flush())
        return self._close_epoch()

    def _close_epoch(self) -> dict[str, float]:
        """Evaluate if due, and close the epoch; if a stop interrupts the evaluation, the resumed run closes it."""
        progress, history = self._progress, self._history
        if self._evaluations.due(progress, ended="epochs") and not self._evaluate():
            return history.so_far()
        progress.is_closing = False
        metrics = history.end_epoch(epoch=progress.epoch, step=progress.step)
        self.recorder.log_epoch(metrics)
        self._callbacks.on_epoch_end(metrics)
        # An earlier checkpoint of this update does not have the end of the epoch.
        self._state.last_saved_step = None
        self._must_save |= self.saver.schedule.due(progress, ended="epochs")
        self._handle_requests()
        self._save_if_due()
        if not self._is_running:
            self.saver.finish()
        return metrics

    def _handle_requests(self) -> None:
        """Handle requests after an evaluation or at the end of an epoch; `_save_if_due` saves."""
        agreed = self._requests.agree_now()
        if agreed.saved:
            self.saver.finish()
        if agreed.evaluate:
            self._evaluate()
        self._must_save |= agreed.save
        if agreed.stop and self._stopped is None and reached_limit(self._config, self._progress) is None:
            self._stop(agreed.stop)

    def _evaluate(self) -> bool:
        """Evaluate during a run, log the metrics, and step the schedulers that follow evaluations.

        Returns:
            Whether the current weights have been evaluated, or there is no data; False if a stop interrupted it.
        """
        if not self._validation or self._progress.evaluated_step == self._progress.step:
            return True
        self.check_trainable()
        generators = RngState()
        before = generators.state_dict()
        while (metrics := self.evaluate(self._validation, may_repeat=True)) is None:
            # The repeated evaluation, here or in the resumed run, draws the same random numbers.
            generators.load_state_dict(before)
            agreed = self._requests.agree_now()
            if agreed.stop:
                self._stop(agreed.stop)
                return False
            self._save_unless_saved()
        self._progress.evaluated_step = self._progress.step
        self._progress.evaluations += 1
        self._evaluations.done(self.recorder.elapsed_s())
        # An earlier checkpoint of this update does not have this evaluation.
        self._state.last_saved_step = None
        if metrics:
            self.recorder.log_evaluation(metrics)
            self._must_save_best = self._state.record_evaluation(metrics) and self._config.checkpoint.save_best
            self._ctx.lr_stepping.step_after_evaluation(metrics)
        return True

    def _save_unless_saved(self) -> None:
        if self._ctx.run_dir is None or self._state.last_saved_step == self._progress.step:
            return
        # At the end of the run there is nothing to do during a background save.
        if self._config.checkpoint.background and self.end_reason() is None:
            self.saver.start()
        else:
            self.saver.save()

    def _save_during_read(self, generators: GeneratorsBefore, save: bool, stop: bool) -> None:
        """Save as requested, with the position and the random states of before a read. Every rank must call this.

        In another thread than the one that reads; or, on a rank that has its batch while others wait, in the training
        thread. The collectives of a save have their own group; hooks that communicate find no other thread that does.

        Args:
            generators: the random states.
            save: whether a rank has requested it.
            stop: whether the run stops now.
        """
        wanted = save or (stop and self._config.checkpoint.at_end)
        if not wanted or self._ctx.run_dir is None or self._state.last_saved_step == self._progress.step:
            return
        if (index := self._ctx.device.index) is not None and self._ctx.device.type != "cpu":
            torch.accelerator.set_device_index(index)
        phase, self._state.before_read = self._activity.phase, generators
        try:
            self.saver.save()
        finally:
            self._state.before_read = None
            self._activity.enter(phase)

    def _stop_after_read(self) -> None:
        """Stop, after a request has ended a read on all ranks; their batches are not used."""
        self._activity.enter("between updates")
        if isinstance(self._data, HasRankState):
            self._data.return_to_before_read()
        if (status := self._requests.agree_now().stop) is not None:
            self._stop(status)

    def _save_if_due(self) -> None:
        """Save if that is due or requested, or the last evaluation is the best so far and `save_best` is set."""
        must_save = self._must_save or self._must_save_best
        self._must_save = self._must_save_best = False
        if must_save:
            self._save_unless_saved()

    def _stop(self, status: StopStatus) -> None:
        self._stopped = status
        reasons = self._world.all_gather_object(self._requests.stop_reason)
        self._requests.stop_reason = next(reason for reason in reasons if reason)
        self._callbacks.on_stop_requested(self._requests.stop_reason)

    def _evaluate_and_save_last(self) -> None:
        """Evaluate and save the last state, unless done already; after a stop request only save it."""
        if self._stopped is None:
            self._evaluate()
        self._must_save |= self._config.checkpoint.at_end
        self._save_if_due()
        self.saver.finish()

    def end_reason(self) -> str | None:
        """Return why the run must end now, or None if it continues; equal on every rank."""
        return self._requests.stop_reason if self._stopped else reached_limit(self._config, self._progress)

    def _global_batches(self, epoch: int) -> Generator[GlobalBatch, None, None]:
        """Yield the rest of an epoch, equally many batches on every rank, and measure the time spent waiting."""
        if self._progress.step_in_epoch and self._state.is_epoch_complete():
            # Resumed at the last update of the epoch, which only needs closing.
            return
        must_agree = self._world.size > 1 and self._data.guarantee != "exact"
        reads, draws = self._reads, getattr(self._data, "draws_random_numbers", True)
        iterator = self._data.epoch(epoch, offset=self._progress.offset)
        try:
            while True:
                self._activity.enter("reading data")
                began_s, saving_s = self._activity.since_s, reads.saving_s
                batch = reads.next(iterator, in_training=True, draws=draws, agrees=must_agree)
                # Switch phase before the collective below, so waiting for a slower rank is not counted as data wait.
                self._activity.enter("forward")
                self.recorder.waited_s += self._activity.since_s - began_s - (reads.saving_s - saving_s)
                own = batch.num_samples if batch is not None else ()
                sums: list[int] = []
                if must_agree and not reads.was_ended:
                    repeats = self._repeats.numbers(batch.micro_batches if batch is not None else None)
                    sums = reads.agree(len(own), len(own) ** 2, sum(own), *repeats)
                if reads.was_ended:
                    self._stop_after_read()
                    return
                if must_agree:
                    count, squares, samples, *sums = sums
                    self._repeats.check(sums)
                    samples //= self._mesh.ranks_on_same_rows
                    # Equal only if all ranks have equally many micro-batches; the epoch ends with the shortest one.
                    if batch is None or count**2 != self._world.size * squares:
                        # Batches that other ranks have not read yet cannot be counted.
                        self._uneven_samples = samples
                        return
                    batch = LoadedBatch(batch.micro_batches, batch.num_samples, samples)
                if batch is None:
                    return
                yield batch
        finally:
            if (close := getattr(iterator, "close", None)) is not None:
                close()


def _no_op() -> None:
    return
