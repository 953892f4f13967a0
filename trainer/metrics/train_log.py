"""The training log: records at intervals, with throughput, for history and trackers."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch

from ..config import as_plain
from ..data.protocols import GlobalBatch
from ..errors import StepError
from ..loop.context import RunContext
from ..loop.steps import Steps
from ..result import PER_EPOCH
from ..step.optimizer_step import OptimizerStep
from ..step.precision import describe_unequal_scales
from ..trackers.base import RunInfo, Tracker, TrackerList
from .means import MeanMetrics

_SLOW_DATA = 0.3
"""Share of time spent waiting for data above which to warn."""

SLOW_DATA_AFTER_S = 10.0
"""Shorter intervals cause no warning: a run of a few seconds mostly waits for its first batch."""

_TOKENS = "tokens"

MetricSource = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Function called with each record on every rank; returns entries to add, and may use collectives."""


class Recorder:
    """Writes records of the metrics to hooks, history and trackers.

    The throughput excludes evaluations, saves, and the first update of an attempt, which compiles, allocates and waits
    for the first batch. Padding samples and tokens, which only keep ranks in step, do not count.

    Args:
        ctx: the run's context.
        steps: the user's steps, which count tokens.
        metrics: means added by the updates since the last flush.
        update: the optimizer step, which provides the learning rates used.

    Attributes:
        waited_s: seconds that the loop has waited for data since the last flush; set by the loop.
        metric_sources: called in order at every flush for further entries.
        in_update: whether an update is in progress; set by the loop.
        samples: samples in the interval of the last record.
    """

    def __init__(self, ctx: RunContext, steps: Steps, metrics: MeanMetrics, update: OptimizerStep) -> None:
        self._ctx, self._user_steps, self._metrics, self._optimizer_step = ctx, steps, metrics, update
        self.trackers = TrackerList()
        self.metric_sources: list[MetricSource] = []
        self.in_update = False
        self.samples = 0
        self._overrides_num_tokens = steps.overrides_num_tokens
        self._began_s = time.perf_counter()
        self._flushed_samples = 0
        self._is_warm = self._has_warned_of_slow_data = False
        self._new_interval()

    def set_trackers(self, trackers: Sequence[Tracker]) -> None:
        """Set the trackers; empty except on rank 0."""
        self.trackers = TrackerList(trackers)

    def start(self, *, resumed: bool, began_s: float) -> None:
        """Start the trackers, after any checkpoint has been restored.

        Args:
            resumed: whether a checkpoint was restored.
            began_s: `time.perf_counter()` when `fit` was called.
        """
        ctx = self._ctx
        self._began_s = began_s - ctx.progress.elapsed_s
        run = RunInfo(
            name=PurePosixPath(ctx.run_dir).name if ctx.run_dir else ctx.name,
            run_dir=ctx.run_dir,
            config=as_plain(ctx.config),
            attempt=ctx.attempt,
            resumed=resumed,
            group=_sweep_of(ctx.run_dir),
        )
        self.trackers.start(run, step=ctx.progress.step)
        self._is_warm = False
        self._new_interval()

    def elapsed_s(self) -> float:
        """Return the seconds inside `fit`, over all attempts."""
        return time.perf_counter() - self._began_s

    def count(self, batch: GlobalBatch) -> None:
        """Count an update, for throughput and tokens."""
        tokens: int | torch.Tensor = 0
        if self._overrides_num_tokens:
            for micro_batch, num_samples in zip(batch.micro_batches, batch.num_samples, strict=True):
                if num_samples:
                    tokens = tokens + self._user_steps.num_tokens(micro_batch)
            tokens = tokens if self._ctx.mesh.counts_rows else 0
            # In the metrics, because their state is restored when a run resumes inside an interval.
            self._metrics.reduced.add(_TOKENS, tokens, "sum")
        if self._is_warm:
            self._steps += 1
            self._tokens += tokens
        else:
            self._is_warm = True
            first_s = time.perf_counter() - self._interval_s - self._paused_s - self.waited_s
            self._ctx.setup_times.update(first_batch=self.waited_s, first_update=first_s)
            self._new_interval()

    def wait_for_updates(self) -> None:
        """Wait until a GPU has made all updates, as part of their time. Call it where the host reads results anyway."""
        device, activity = self._ctx.device, self._ctx.activity
        if device.type == "cuda":
            phase = activity.phase
            activity.enter("optimizer")
            torch.cuda.current_stream(device).synchronize()
            activity.enter(phase)
            activity.divide_as_device()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the throughput."""
        began_s = time.perf_counter()
        self._ctx.progress.elapsed_s = self.elapsed_s()  # checkpoints are written inside
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - began_s
            self._ctx.progress.elapsed_s = self.elapsed_s()

    def flush(self) -> dict[str, float]:
        """Write the record of the interval since the last flush, if there was an update. Every rank must call this."""
        ctx, progress = self._ctx, self._ctx.progress
        if progress.samples == self._flushed_samples:
            return {}
        self.wait_for_updates()
        record = ctx.mesh.agree(self._metrics.read(ctx.mesh.loss))
        if _TOKENS in record:
            progress.tokens += int(record[_TOKENS])
            record[_TOKENS] = float(progress.tokens)
        # After read(), which waits for the device.
        seconds = max(time.perf_counter() - self._interval_s - self._paused_s, 1e-9)
        times_s = (seconds, self._paused_s, self.elapsed_s())
        counters = self._optimizer_step.counters()
        scale = counters.get("loss_scale", 1.0)
        per_rank = ctx.world.all_gather_object((*times_s, scale, float(self._tokens), self.waited_s / seconds))
        if len(set(scales := [each[3] for each in per_rank])) > 1:
            raise StepError(describe_unequal_scales(scales))
        # From the slowest rank, so that records are equal on every rank.
        seconds, paused_s, elapsed_s = (max(each[i] for each in per_rank) for i in range(3))
        samples = progress.samples - self._samples
        record |= self._optimizer_step.last_learning_rates() | counters
        if self._steps:
            record["samples_per_s"] = samples / seconds
            record["step_s"] = seconds / self._steps
            # From the rank that waits longest: the others then wait for it in the next collective.
            waits = [wait for *_, wait in per_rank]
            record["data_wait"] = max(waits)
            slowest = waits.index(max(waits))
            if len(waits) > 1:
                record["data_wait_rank"] = slowest
            if waits[slowest] > _SLOW_DATA and seconds > SLOW_DATA_AFTER_S:
                self._warn_of_slow_data(slowest, waits[slowest])
            if self._overrides_num_tokens:
                record["tokens_per_s"] = sum(tokens for *_, tokens, _ in per_rank) / seconds
        if paused_s:
            record["paused_s"] = paused_s
        for source in self.metric_sources:
            # JSON cannot encode NumPy or torch scalars.
            more = {name: float(value) for name, value in source(record).items()}
            if twice := sorted(more.keys() & record.keys()):
                raise StepError(f"a metric source returns {twice[0]!r}, which the record has already: rename it")
            record |= more
        progress.elapsed_s = record["elapsed_s"] = elapsed_s
        # Unlike the throughput, the means include what an interrupted attempt had added.
        self.samples = progress.samples - self._flushed_samples
        ctx.history.add(record, samples=self.samples, kinds=self._metrics.reduced.kinds, weights=self._metrics.weights)
        self._flushed_samples = progress.samples
        self._log(record)
        self._new_interval()
        return record

    def _warn_of_slow_data(self, rank: int, share: float) -> None:
        if self._has_warned_of_slow_data or not self._ctx.world.is_main:
            return
        self._has_warned_of_slow_data = True
        warnings.warn(
            f"rank {rank} has spent {100 * share:.0f} % of the last {self._steps} updates waiting for data: increase "
            "num_workers or prefetch_factor of its loader, preprocess the data, or check its storage",
            stacklevel=2,
        )

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Log the result of an evaluation."""
        self._ctx.history.add_evaluation(metrics)
        self._log(metrics)

    def log_epoch(self, metrics: Mapping[str, float]) -> None:
        """Log the means over an epoch to the trackers, for `read_history`; hooks get them in `on_epoch_end`."""
        means = {f"{PER_EPOCH}{name}": value for name, value in metrics.items() if name not in ("epoch", "step")}
        self.trackers.log(means, step=self._ctx.progress.step, epoch=self._ctx.progress.epoch)

    def log_event(self, record: Mapping[str, float]) -> None:
        """Log an event of the run at this step."""
        self._log(record)

    @property
    def step(self) -> int:
        """The update to which logged images, texts and histograms belong; inside an update, that update.

        A resumed run, which repeats the update, then records them only once.
        """
        return self._ctx.progress.step + self.in_update

    def state_dict(self) -> dict[str, Any]:
        """Return the trackers' state and the start of the current interval."""
        return {
            "trackers": self.trackers.state_dict(),
            "flushed_samples": self._flushed_samples,
            "learning_rates": self._optimizer_step.learning_rates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the trackers' state and the start of the interval."""
        self.trackers.load_state_dict(state_dict["trackers"])
        self._flushed_samples = state_dict["flushed_samples"]
        self._optimizer_step.learning_rates = list(state_dict["learning_rates"])

    def finish(self, status: str) -> None:
        """Finish the trackers."""
        self.trackers.finish(status)

    def _log(self, record: Mapping[str, float]) -> None:
        progress = self._ctx.progress
        self._ctx.callbacks.on_log(record)
        self.trackers.log(record, step=progress.step, epoch=progress.epoch)

    def _new_interval(self) -> None:
        self._interval_s = time.perf_counter()
        self._samples = self._ctx.progress.samples
        self._steps = 0
        self._tokens: int | torch.Tensor = 0
        self.waited_s = self._paused_s = 0.0


def _sweep_of(run_dir: str | None) -> str | None:
    """Return the name of the sweep of which a run is a trial, from its folder, such as "runs/sweep/trial-003"."""
    parts = PurePosixPath(run_dir or "").parts
    return parts[-2] if len(parts) > 1 and re.fullmatch(r"trial-\d{3,}", parts[-1]) else None
