"""What a run says of itself while it trains: records at intervals, with throughput, to the trackers."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from ..data.protocols import GlobalBatch
from ..loop.progress import Duration
from ..result import PER_EPOCH
from ..step.optimizer_step import OptimizerStep
from ..trackers.base import RunInfo, Tracker, TrackerList
from .means import MeanMetrics

if TYPE_CHECKING:
    from ..trainer import Trainer


_SLOW_DATA = 0.3
"""The share of the time that may go into waiting for data before somebody is told."""

SLOW_DATA_AFTER_S = 10.0
"""Shorter intervals say little: a run of a few seconds waits for its data to begin."""

_TOKENS = "tokens"

MetricSource = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Gets a record that is due and returns what it adds to it; called on every rank, so it may use a collective."""


class Recorder:
    """Reads the metrics when they are due, and gives them to hooks, history and trackers.

    The throughput is that of training: without evaluations and saves, and without the first update of an attempt, which
    compiles, allocates and waits for data to begin. Samples and tokens that only keep ranks in step do not count.

    Args:
        trainer: whose run it is.
        metrics: what the updates have added since the last flush.
        update: knows the learning rates that were used.

    Attributes:
        waited_s: how long the loop has waited for data since the last flush; the loop adds to it.
        metric_sources: asked at every flush, in their order, for what they add to the record.
        in_update: whether an update is being made; the loop says so.
        samples: samples of the interval of the last record.
    """

    def __init__(self, trainer: Trainer[Any], metrics: MeanMetrics, update: OptimizerStep) -> None:
        self._trainer, self._metrics, self._optimizer_step = trainer, metrics, update
        self.trackers = TrackerList()
        self.metric_sources: list[MetricSource] = []
        self.in_update = False
        self.samples = 0
        self._overrides_num_tokens = trainer.overrides_num_tokens
        self._began_s = time.perf_counter()
        self._flushed_samples = 0
        self._is_warm = self._has_warned_of_slow_data = False
        self._new_interval()

    def set_trackers(self, trackers: Sequence[Tracker]) -> None:
        """Records to these trackers; the main rank's only."""
        self.trackers = TrackerList(trackers)

    def start(self, *, resumed: bool, began_s: float) -> None:
        """Begins the trackers, when a checkpoint has been restored or none is there.

        Args:
            resumed: whether one has been.
            began_s: when `fit` was called, by `time.perf_counter`.
        """
        trainer = self._trainer
        self._began_s = began_s - trainer.progress.elapsed_s
        run = RunInfo(
            name=PurePosixPath(trainer.run_dir).name if trainer.run_dir else type(trainer).__name__,
            run_dir=trainer.run_dir,
            config=as_plain(trainer.config),
            attempt=trainer.attempt,
            resumed=resumed,
        )
        self.trackers.start(run, step=trainer.progress.step)
        self._is_warm = False
        self._new_interval()

    def elapsed_s(self) -> float:
        """Seconds inside `fit`, over all attempts."""
        return time.perf_counter() - self._began_s

    def count(self, batch: GlobalBatch) -> None:
        """Takes note of an update, for the throughput and the tokens of the run."""
        tokens: int | torch.Tensor = 0
        if self._overrides_num_tokens:
            for micro_batch, num_samples in zip(batch.micro_batches, batch.num_samples, strict=True):
                if num_samples:
                    tokens = tokens + self._trainer.num_tokens(micro_batch)
            # Among what a resumed run takes over: it goes on inside the interval.
            self._metrics.reduced.add(_TOKENS, tokens, "sum")
        if self._is_warm:
            self._steps += 1
            self._tokens += tokens
        else:
            self._is_warm = True
            first_s = time.perf_counter() - self._interval_s - self._paused_s - self.waited_s
            self._trainer.setup_times.update(first_batch=self.waited_s, first_update=first_s)
            self._new_interval()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what happens inside out of the throughput."""
        began_s = time.perf_counter()
        self._trainer.progress.elapsed_s = self.elapsed_s()  # a checkpoint is written in here
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - began_s
            self._trainer.progress.elapsed_s = self.elapsed_s()

    def flush(self) -> dict[str, float]:
        """Makes the record of the interval since the last flush, if there was an update. Every rank must call this."""
        trainer, progress = self._trainer, self._trainer.progress
        if progress.samples == self._flushed_samples:
            return {}
        record = self._metrics.read(trainer.world)
        if _TOKENS in record:
            progress.tokens += int(record[_TOKENS])
            record[_TOKENS] = float(progress.tokens)
        # After the read, which waits for the device: what it has yet to compute is not done.
        seconds = max(time.perf_counter() - self._interval_s - self._paused_s, 1e-9)
        times_s = (seconds, self._paused_s, self.elapsed_s())
        per_rank = trainer.world.all_gather_object((*times_s, float(self._tokens), self.waited_s / seconds))
        # The slowest rank's, so that records are equal on every rank.
        seconds, paused_s, elapsed_s = (max(each[i] for each in per_rank) for i in range(3))
        samples = progress.samples - self._samples
        record |= self._optimizer_step.last_learning_rates() | self._optimizer_step.counters()
        if self._steps:
            record["samples_per_s"] = samples / seconds
            record["step_s"] = seconds / self._steps
            # Of the rank that waits longest: the others wait for it in the next collective.
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
            # Of NumPy or torch, they could not be written as JSON.
            record |= {name: float(value) for name, value in source(record).items()}
        progress.elapsed_s = record["elapsed_s"] = elapsed_s
        # The means cover what an interrupted attempt has added before, the throughput does not.
        self.samples = progress.samples - self._flushed_samples
        trainer.history.add(
            record, samples=self.samples, kinds=self._metrics.reduced.kinds, weights=self._metrics.weights
        )
        self._flushed_samples = progress.samples
        self._log(record)
        self._new_interval()
        return record

    def _warn_of_slow_data(self, rank: int, share: float) -> None:
        if self._has_warned_of_slow_data or not self._trainer.world.is_main:
            return
        self._has_warned_of_slow_data = True
        warnings.warn(
            f"rank {rank} has spent {100 * share:.0f} % of the last {self._steps} updates waiting for data: give its "
            "loader more workers or a higher prefetch_factor, prepare the data beforehand, or look at its storage",
            stacklevel=2,
        )

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Logs the result of an evaluation."""
        self._trainer.history.add_evaluation(metrics)
        self._log(metrics)

    def log_epoch(self, metrics: Mapping[str, float]) -> None:
        """Logs the means over an epoch: `read_history` finds them. They have a hook of their own."""
        means = {f"{PER_EPOCH}{name}": value for name, value in metrics.items() if name not in ("epoch", "step")}
        self.trackers.log(means, step=self._trainer.progress.step, epoch=self._trainer.progress.epoch)

    def log_event(self, record: Mapping[str, float]) -> None:
        """Logs what happened to the run at this step, and is no mean over an interval."""
        self._log(record)

    @property
    def step(self) -> int:
        """The update that images and the like belong to: inside one, that one, as for the numbers that it logs.

        So a run that resumes, and makes it again, has them once.
        """
        return self._trainer.progress.step + self.in_update

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run must know: the trackers' state, and where the interval in progress began."""
        return {
            "trackers": self.trackers.state_dict(),
            "flushed_samples": self._flushed_samples,
            "learning_rates": self._optimizer_step.learning_rates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it over."""
        self.trackers.load_state_dict(state_dict["trackers"])
        self._flushed_samples = state_dict["flushed_samples"]
        self._optimizer_step.learning_rates = list(state_dict["learning_rates"])

    def finish(self, status: str) -> None:
        """Ends the trackers."""
        self.trackers.finish(status)

    def _log(self, record: Mapping[str, float]) -> None:
        trainer = self._trainer
        trainer.callbacks.on_log(trainer, record)
        self.trackers.log(record, step=trainer.progress.step, epoch=trainer.progress.epoch)

    def _new_interval(self) -> None:
        self._interval_s = time.perf_counter()
        self._samples = self._trainer.progress.samples
        self._steps = 0
        self._tokens: int | torch.Tensor = 0
        self.waited_s = self._paused_s = 0.0


def as_plain(config: Any) -> Any:
    """Turns a config into dicts, lists, numbers and text, as it would be written to a file."""
    if isinstance(config, Duration):
        return str(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {each.name: as_plain(getattr(config, each.name)) for each in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): as_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [as_plain(value) for value in config]
    return config if config is None or isinstance(config, (bool, int, float, str)) else str(config)
