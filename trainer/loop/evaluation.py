"""One evaluation over all ranks, in which every row counts once; afterwards the models are in their previous mode."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch

from ..callbacks.base import CallbackList
from ..data.protocols import BatchStream, GlobalBatch, LoadedBatch
from ..data.tree import move
from ..distributed.fsdp import reshard, sync_buffers
from ..distributed.world import World
from ..errors import ConfigError, DataError, StepError
from ..exact.numerics import Numerics
from ..metrics.reductions import Reduce
from ..step.evaluation_weights import evaluation_weights
from ..step.precision import autocast
from .blocked_reads import BlockedReads
from .by_source import add_by_source
from .context import RunContext
from .control import Requests
from .evaluation_metrics import EvaluationMetrics
from .steps import LossWeight, Steps
from .timing import Activity


class Evaluation:
    """Evaluates on one or several sets of data. Every rank must create one, and call it once.

    Args:
        ctx: of the run, set up.
        steps: the user's steps.
        numerics: ordinary or exact arithmetic.
        metrics: those of `configure_metrics`.
        sets: the open streams by name; a single unnamed set has the key "", and its metrics are `validation/x`.
        requests: a stop request interrupts the evaluation.
        reads: reads the batches.
        max_batches: of every set; None uses all.
        may_repeat: whether a request to save immediately interrupts it as well, because the caller will repeat it.
        is_sanity_check: calls no callbacks.

    Attributes:
        weight: of the current micro-batch in means; 1 between micro-batches.
    """

    def __init__(
        self,
        ctx: RunContext,
        steps: Steps,
        numerics: Numerics,
        metrics: EvaluationMetrics,
        sets: Mapping[str, BatchStream],
        requests: Requests,
        reads: BlockedReads,
        *,
        max_batches: int | None = None,
        is_sanity_check: bool = False,
        may_repeat: bool = False,
    ) -> None:
        self._ctx, self._steps, self._numerics, self._metrics = ctx, steps, numerics, metrics
        self._sets, self._requests, self._reads = sets, requests, reads
        self._max_batches, self._may_repeat = max_batches, may_repeat
        self._callbacks = CallbackList() if is_sanity_check else ctx.callbacks
        self._means = numerics.make_means()
        self._prefix = "validation/"
        self._stream: BatchStream | None = None
        self._is_over = False
        self.weight: LossWeight = 1.0

    def __call__(self) -> dict[str, float] | None:
        """Run `validation_step` over all sets and return the metrics, equal on every rank.

        Returns:
            The metrics; None if a request interrupted the evaluation; an empty dict, with a warning, if there is no
            data.

        Raises:
            DataError: an iterator is exhausted, or a rank has no batches and another has some.
            StepError: a step returned neither a tensor nor a dict.
            ConfigError: a step and `configure_metrics` use the same name.
        """
        ctx, metrics = self._ctx, self._metrics
        computed: dict[str, float] = {}
        num_batches = 0
        with self._numerics.deterministic(ctx.device), evaluating(ctx), metrics.counting():
            self._callbacks.on_evaluation_start()
            for name, stream in self._sets.items():
                self._prefix, self._stream = f"validation/{name}/" if name else "validation/", stream
                metrics.reset()
                seen = self._run(stream)
                if seen is None:
                    return None
                if seen == 0:
                    self._report_no_data(name, stream)
                num_batches += seen
                # Switch phase before the collective below, which waits for ranks that are still in their last batch.
                ctx.activity.begin_batch("around an evaluation")
                computed |= {self._prefix + metric: value for metric, value in metrics.compute().items()}
            means = ctx.mesh.agree(self._means.read(ctx.mesh.loss))
        if twice := means.keys() & computed.keys():
            raise ConfigError(
                f"{', '.join(sorted(twice))}: both validation_step and configure_metrics define this metric; rename "
                "one of them"
            )
        result = dict(sorted({**means, **computed}.items()))
        self._is_over = True
        if num_batches:
            self._callbacks.on_evaluation_end(result)
        return result

    def log(self, name: str, value: float | torch.Tensor, weight: LossWeight, reduce: Reduce) -> None:
        """Add a number that a step logs."""
        if self._is_over:
            raise StepError(
                f"log({name!r}) in on_evaluation_end is too late: the means of this evaluation are complete. Log it in "
                "validation_step, or in on_evaluation_batch_end"
            )
        if self._metrics.counts:
            self._means.log(self._prefix + name, value, weight, reduce)

    def log_by_source(self, loss_B: torch.Tensor, source_B: torch.Tensor, tokens_B: torch.Tensor | None) -> None:
        """Add the loss and the number of tokens of each source."""
        if self._metrics.counts:
            add_by_source(self._means, self._prefix, self._stream, loss_B, source_B, tokens_B, mesh=self._ctx.mesh)

    def _run(self, stream: BatchStream) -> int | None:
        """Run over one set, and return its number of batches; None if a request interrupted it."""
        ctx, steps, numerics, callbacks = self._ctx, self._steps, self._numerics, self._callbacks
        num_batches = first = 0
        with closing(_aligned_batches(stream, ctx.world, ctx.activity, self._reads)) as batches:
            for batch in islice(batches, self._max_batches):
                own, first = numerics.batch_numbers(stream, batch, first, ctx.world)
                micro_batches = zip(own, batch.micro_batches, batch.num_samples, strict=True)
                for batch_idx, micro_batch, num_samples in micro_batches:
                    if ctx.device.type != "cpu":
                        micro_batch = move(micro_batch, ctx.device)
                    if not num_samples and numerics.skips_padding:
                        continue
                    key = self._prefix, ctx.progress.step, batch_idx
                    micro_batch = numerics.evaluation_batch(ctx.config, micro_batch, *key)
                    # Padding, which only keeps the ranks in step, does not count.
                    self._metrics.counts = num_samples > 0
                    ctx.activity.begin_batch("evaluation")
                    weighs = steps.overrides_loss_weight and num_samples
                    with ctx.divided_sequences(steps, micro_batch):
                        self.weight = steps.loss_weight(micro_batch) if weighs else num_samples
                    if steps.overrides_prepare_batch:
                        micro_batch = steps.prepare_batch(micro_batch)
                    callbacks.on_evaluation_batch_start(micro_batch, batch_idx)
                    with ctx.divided_sequences(steps, micro_batch), autocast(ctx.config.precision, ctx.device):
                        outputs = _as_dict(ctx.name, self._validation_step(micro_batch, batch_idx))
                    if num_samples:
                        self._means.add(outputs, self.weight, self._prefix)
                    callbacks.on_evaluation_batch_end(outputs, micro_batch, batch_idx)
                    self.weight = 1.0
                num_batches += 1
                agreed = self._requests.agree(often=True)
                if agreed.evaluate:
                    self._requests.evaluate()
                if agreed.save:
                    self._requests.save(at_once=agreed.at_once)
                if agreed.stop or (agreed.at_once and self._may_repeat):
                    return None
        return None if self._reads.was_ended else num_batches

    def _validation_step(self, micro_batch: Any, batch_idx: int) -> Any:
        try:
            outputs = self._steps.validation_step(micro_batch, batch_idx)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                error.add_note(
                    "evaluations run under torch.no_grad(): compute gradients in `with torch.enable_grad():`"
                )
            raise
        if self._ctx.world.is_main and (left := [name for name, each in self._ctx.models.items() if each.training]):
            warnings.warn(
                f"validation_step left {', '.join(left)} in training mode, with dropout and updates of running means: "
                "remove the call of train(), because evaluations set and restore the mode",
                stacklevel=2,
            )
        return outputs

    def _report_no_data(self, name: str, stream: BatchStream) -> None:
        what = f"the validation data{f' {name!r}' if name else ''}"
        if stream.guarantee == "none":
            raise DataError(
                f"{what} has no batches, or is an exhausted iterator; give a function that returns one, or return "
                "(train, None) to train without"
            )
        if self._ctx.world.is_main:
            warnings.warn(f"{what} has no batches: it is skipped, and has no metrics", stacklevel=2)


def _as_dict(name: str, outputs: Any) -> Mapping[str, Any]:
    if isinstance(outputs, torch.Tensor):
        return {"loss": outputs}
    if not isinstance(outputs, Mapping):
        raise StepError(
            f"validation_step of {name} returned "
            f"{'nothing' if outputs is None else f'a {type(outputs).__name__}'}; it must return the loss, or a dict of "
            "numbers, which may be empty"
        )
    return outputs


def _aligned_batches(
    stream: BatchStream, world: World, activity: Activity, reads: BlockedReads
) -> Generator[GlobalBatch, None, None]:
    """Yield equally many batches on every rank: a rank without more batches repeats its last, as padding.

    Raises:
        DataError: a rank has no batches at all.
    """
    must_agree = world.size > 1 and stream.guarantee != "exact"
    iterator = stream.epoch(0)
    last: GlobalBatch | None = None
    try:
        while True:
            activity.enter("reading validation data")
            batch = reads.next(iterator, in_training=False, agrees=must_agree)
            activity.enter("evaluation")
            if must_agree and not reads.was_ended:
                (num_ranks,) = reads.agree(batch is not None)
                if num_ranks and last is None and num_ranks < world.size and not reads.was_ended:
                    raise DataError(
                        "the validation data has no batches on one rank, but some on another: give every rank at least "
                        "one, or all of the data"
                    )
                if num_ranks and batch is None and last is not None:
                    batch = LoadedBatch(last.micro_batches, [0] * len(last.micro_batches), None)
            if batch is None or reads.was_ended:
                return
            last = batch
            yield batch
    finally:
        if (close := getattr(iterator, "close", None)) is not None:
            close()


@contextmanager
def evaluating(ctx: RunContext) -> Iterator[None]:
    """Put the models in evaluation mode, without gradients, and restore the mode of every module at the end.

    Every rank must enter this.

    The contexts of the callbacks are entered last and exited first.
    """
    modes = {module: module.training for model in ctx.models.values() for module in model.modules()}
    for model in ctx.models.values():
        model.eval()
        # Each rank has its own running means; evaluations and checkpoints have the main rank's.
        sync_buffers(model, ctx.world)
    mode, before = ctx.mode, (ctx.mode.training, ctx.mode.before)
    mode.training, mode.before = False, mode.before or modes
    try:
        with (
            torch.no_grad(),
            evaluation_weights(ctx.optimizers.values(), lambda: reshard(ctx.models.values())),
            ctx.callbacks.evaluation_context(),
        ):
            yield
    finally:
        reshard(ctx.models.values())
        mode.training, mode.before = before
        for module, was_training in modes.items():
            module.training = was_training
