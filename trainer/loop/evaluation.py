"""One evaluation: every row counted once, over all ranks, and the models left as they were."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from ..callbacks.base import CallbackList
from ..checkpoints.rng import seed_for
from ..data.protocols import BatchStream, GlobalBatch, LoadedBatch, SupportsShards, micro_batch_ranges
from ..data.tree import move
from ..distributed.world import World
from ..errors import ConfigError, DataError, StepError
from ..exact.determinism import clone_batch, deterministic_mode
from ..exact.means import ExactMeans
from ..metrics.means import MeanMetrics
from ..metrics.reductions import Reduce
from ..step.precision import autocast
from .control import Requests
from .timing import Activity

if TYPE_CHECKING:
    from ..step.optimizer_step import LossWeight
    from ..trainer import Trainer


class Evaluation:
    """Evaluates on one or several sets of data. Every rank must make one, and call it once.

    Args:
        trainer: set up.
        sets: the open streams by name; an only one may be called "", and its metrics are `validation/x` then.
        requests: a request to stop cuts it short.
        max_batches: of every set; None takes all.
        may_repeat: whether a request to save at once cuts it short as well: who calls it will call another one.
        is_sanity_check: finds out whether an evaluation works: no callback hears of it.

    Attributes:
        weight: how much the micro-batch in hand counts in means; 1 where none is in hand.
    """

    def __init__(
        self,
        trainer: Trainer[Any],
        sets: Mapping[str, BatchStream],
        requests: Requests,
        *,
        max_batches: int | None = None,
        is_sanity_check: bool = False,
        may_repeat: bool = False,
    ) -> None:
        self._trainer, self._sets, self._requests = trainer, sets, requests
        self._max_batches, self._may_repeat = max_batches, may_repeat
        self._callbacks = CallbackList() if is_sanity_check else trainer.callbacks
        self._means = ExactMeans() if trainer.config.exact else MeanMetrics()
        self._prefix = "validation/"
        self._is_over = False
        self.weight: LossWeight = 1.0

    def __call__(self) -> dict[str, float] | None:
        """Runs `validation_step` over all sets and returns the metrics, equal on every rank.

        One that a request cuts short returns None, rather than the metrics of a part of the data; one that
        found no data returns nothing either, with a warning.

        Raises:
            DataError: an iterator has run out, or a rank has no batch where others do.
            StepError: a step returned neither a tensor nor a dict.
            ConfigError: a step and `configure_metrics` share a name.
        """
        trainer = self._trainer
        computed: dict[str, float] = {}
        num_batches = 0
        exactly = deterministic_mode(trainer.device) if trainer.config.exact else nullcontext()
        with exactly, evaluating(trainer), trainer.metrics.counting():
            self._callbacks.on_evaluation_start(trainer)
            for name, stream in self._sets.items():
                self._prefix = f"validation/{name}/" if name else "validation/"
                trainer.metrics.reset()
                seen = self._run(stream)
                if seen is None:
                    return None
                if seen == 0:
                    self._report_no_data(name, stream)
                num_batches += seen
                # Ahead of a rank that is still in its last batch.
                trainer.activity.begin_batch("around an evaluation")
                computed |= {self._prefix + metric: value for metric, value in trainer.metrics.compute().items()}
            means = self._means.read(trainer.world)
        if twice := means.keys() & computed.keys():
            raise ConfigError(
                f"{', '.join(sorted(twice))}: both validation_step and configure_metrics give a metric of this name; "
                "rename one of them"
            )
        result = dict(sorted({**means, **computed}.items()))
        self._is_over = True
        if num_batches:
            self._callbacks.on_evaluation_end(trainer, result)
        return result

    def log(self, name: str, value: float | torch.Tensor, weight: LossWeight, reduce: Reduce) -> None:
        """Takes in a number that a step logs by itself."""
        if self._is_over:
            raise StepError(
                f"log({name!r}) in on_evaluation_end comes too late: the means of this evaluation have been read. Log "
                "it in validation_step, or in on_evaluation_batch_end"
            )
        if self._trainer.metrics.counts:
            self._means.log(self._prefix + name, value, weight, reduce)

    def _run(self, stream: BatchStream) -> int | None:
        """Runs over one set, and returns how many batches it had; None if a request cut it short."""
        trainer, callbacks, metrics = self._trainer, self._callbacks, self._trainer.metrics
        overrides_loss_weight = trainer.overrides_loss_weight
        num_batches = first = 0
        with closing(_aligned_batches(stream, trainer.world, trainer.activity)) as batches:
            for batch in islice(batches, self._max_batches):
                own, first = self._batch_indices(stream, batch, first)
                micro_batches = zip(own, batch.micro_batches, batch.num_samples, strict=True)
                for batch_idx, micro_batch, num_samples in micro_batches:
                    if trainer.device.type != "cpu":
                        micro_batch = move(micro_batch, trainer.device)
                    if trainer.config.exact:
                        if not num_samples:
                            continue
                        seed_for(trainer.config.seed, self._prefix, trainer.progress.step, batch_idx)
                        micro_batch = clone_batch(micro_batch)
                    # A row that is there to keep the ranks in step counts nowhere.
                    metrics.counts = num_samples > 0
                    trainer.activity.begin_batch("evaluation")
                    self.weight = (
                        trainer.loss_weight(micro_batch) if overrides_loss_weight and num_samples else num_samples
                    )
                    if trainer.overrides_prepare_batch:
                        micro_batch = trainer.prepare_batch(micro_batch)
                    callbacks.on_evaluation_batch_start(trainer, micro_batch, batch_idx)
                    with autocast(trainer.config.precision, trainer.device):
                        outputs = _as_dict(trainer, trainer.validation_step(micro_batch, batch_idx))
                    if num_samples:
                        self._means.add(outputs, self.weight, self._prefix)
                    callbacks.on_evaluation_batch_end(trainer, outputs, micro_batch, batch_idx)
                    self.weight = 1.0
                num_batches += 1
                agreed = self._requests.agree(often=True)
                if agreed.evaluate:
                    self._requests.evaluate()
                if agreed.save:
                    self._requests.save(at_once=agreed.at_once)
                if agreed.stop or (agreed.at_once and self._may_repeat):
                    return None
        return num_batches

    def _batch_indices(self, stream: BatchStream, batch: GlobalBatch, first: int) -> tuple[range, int]:
        """Returns the numbers of this rank's micro-batches, and the first of the next batch: in exact mode over all."""
        num_own, world = len(batch.micro_batches), self._trainer.world
        if not (self._trainer.config.exact and isinstance(stream, SupportsShards)):
            return range(first, first + num_own), first + num_own
        rank_ranges = micro_batch_ranges(stream.num_shards, world.size, num_own=num_own, rank=world.rank)
        own = rank_ranges[world.rank]
        return range(first + own.start, first + own.stop), first + rank_ranges[-1].stop

    def _report_no_data(self, name: str, stream: BatchStream) -> None:
        what = f"the validation data{f' {name!r}' if name else ''}"
        if stream.guarantee == "none":
            raise DataError(
                f"{what} has no batches, or was an iterator that has run out; give a function that returns one, or "
                "return (train, None) to train without"
            )
        if self._trainer.world.is_main:
            warnings.warn(f"{what} has no batches: it is left out, and gives no metric", stacklevel=2)


def _as_dict(trainer: Trainer[Any], outputs: Any) -> Mapping[str, Any]:
    if isinstance(outputs, torch.Tensor):
        return {"loss": outputs}
    if not isinstance(outputs, Mapping):
        raise StepError(
            f"validation_step of {type(trainer).__name__} returned "
            f"{'nothing' if outputs is None else f'a {type(outputs).__name__}'}; it must return the loss, or a dict of "
            "numbers, which may be empty"
        )
    return outputs


def _aligned_batches(stream: BatchStream, world: World, activity: Activity) -> Generator[GlobalBatch, None, None]:
    """Yields equally many batches on every rank: a rank that has run out repeats its last, which then counts nothing.

    Raises:
        DataError: a rank has no batch to repeat.
    """
    must_agree = world.size > 1 and stream.guarantee != "exact"
    iterator = stream.epoch(0)
    last: GlobalBatch | None = None
    try:
        while True:
            activity.enter("reading validation data")
            batch = next(iterator, None)
            activity.enter("evaluation")
            if must_agree and world.any(batch is not None):
                if last is None and world.any(batch is None):
                    raise DataError("the validation data of some rank has no batches, and that of another has")
                if batch is None and last is not None:
                    batch = LoadedBatch(last.micro_batches, [0] * len(last.micro_batches), None)
            if batch is None:
                return
            last = batch
            yield batch
    finally:
        if (close := getattr(iterator, "close", None)) is not None:
            close()


@contextmanager
def evaluating(trainer: Trainer[Any]) -> Iterator[None]:
    """Puts the models in evaluation mode, without gradients, and every module back as it was, whatever happens.

    The contexts of the callbacks are entered last and left first.
    """
    modes = [(module, module.training) for model in trainer.models.values() for module in model.modules()]
    for model in trainer.models.values():
        model.eval()
    was_training, trainer.training = trainer.training, False
    try:
        with torch.no_grad(), trainer.callbacks.evaluation_context(trainer):
            yield
    finally:
        trainer.training = was_training
        for module, mode in modes:
            module.training = mode
