"""An update that begins again, in smaller micro-batches, where a rank has run out of memory."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..checkpoints.rng import RngState
from ..data.protocols import GlobalBatch, HasRowIds, LoadedBatch
from ..data.tree import batch_size, map_tensors
from ..distributed.dtensor import is_sharded
from ..distributed.parallelize import without_gradient_sync
from ..errors import ConfigError, StepError
from ..loop.context import RunContext
from ..loop.steps import Steps
from ..metrics.means import MeanMetrics
from .oom import is_out_of_memory
from .optimizer_step import OptimizerStep, zero_gradients


class AutoMicrobatchStep(OptimizerStep):
    """Makes one optimizer update; where memory does not suffice, again in micro-batches of half the size.

    The global batch, its order and the mean that is learned from stay: more micro-batches are accumulated. An update
    that is begun again finds all as it was: gradients, buffers, random numbers, counters. Later updates are cut in the
    same way, and so are those of a resumed run, unless its `micro_batch_size` is another one.

    On several ranks the gradients meet when all ranks have come through their last backward pass, and not during it: a
    rank that has run out of memory then finds the others where they can turn back.

    Args:
        ctx: of one rank, or with models that are replicated.
        steps, metrics: as for `OptimizerStep`.

    Attributes:
        pieces: into how many each micro-batch of the data is cut.

    Raises:
        ConfigError: a model is sharded.
    """

    def __init__(self, ctx: RunContext, steps: Steps, metrics: MeanMetrics) -> None:
        super().__init__(ctx, steps, metrics)
        if sharded := [name for name, model in ctx.models.items() if is_sharded(model)]:
            raise ConfigError(
                f"halve_on_out_of_memory cannot be kept: {', '.join(sorted(sharded))} is sharded, and a rank without "
                "memory leaves the others waiting for its shards in the midst of a pass. Leave it out and set a "
                "smaller micro_batch_size, or take strategy 'ddp'"
            )
        self.splits = 1
        self._generators = RngState()
        # Averaged here, and not by DDP.
        self._averaged, self._replicated = self._replicated, set()
        self._buffers = [buffer for model in self._models.values() for buffer in model.buffers()]

    def counters(self) -> dict[str, float]:
        """Returns what `OptimizerStep.counters` does, and the pieces of a micro-batch where it is cut."""
        cut = {"micro_batch_pieces": float(self.splits)} if self.splits > 1 else {}
        return super().counters() | cut

    def state_dict(self) -> dict[str, Any]:
        """Returns what `OptimizerStep.state_dict` does, and how micro-batches are cut."""
        return super().state_dict() | {"pieces": self.splits, "pieces_of": self._config.micro_batch_size}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Takes it over; with another `micro_batch_size` than before, micro-batches are whole again."""
        super().load_state_dict(state)
        is_same = state.get("pieces_of") == self._config.micro_batch_size
        self.splits = state.get("pieces", 1) if is_same else 1

    def _accumulate_and_step(self, batch: GlobalBatch) -> str | None:
        generators = self._generators.state_dict()
        buffers = [buffer.clone() for buffer in self._buffers]
        micro_batches = self._ctx.progress.micro_batches
        while True:
            self._sync_buffers_now()
            try:
                return super()._accumulate_and_step(batch if self.splits == 1 else _split(batch, self.splits))
            except _OutOfMemory as error:
                message = self._agree_on_halving(batch, error.__cause__)
            # Out of the handler, which holds on to the graph of the pass that failed.
            self._losses = []
            zero_gradients(self._optimizers)
            gc.collect()
            if self._ctx.device.type == "cuda":
                torch.cuda.empty_cache()
            self._generators.load_state_dict(generators)
            with torch.no_grad():
                for buffer, before in zip(self._buffers, buffers, strict=True):
                    buffer.copy_(before)
            self._request_buffer_sync()
            self.logged.reset()
            self._ctx.progress.micro_batches = micro_batches
            self.is_last_micro_batch, self.is_padding, self.weight = True, False, 1.0
            self.splits *= 2
            self._ctx.print(message)
            self._callbacks.on_out_of_memory(message)

    def _compute_and_step(self) -> None:
        with without_gradient_sync(self._models):
            super()._compute_and_step()

    def _forward_backward(self, micro_batch: Any, batch_idx: int) -> Mapping[str, Any]:
        try:
            return super()._forward_backward(micro_batch, batch_idx)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self._stepped:
                error.add_note(
                    "halve_on_out_of_memory does not help here: an optimizer has stepped in this update already, so "
                    "that it cannot begin again"
                )
                raise
            # The others ask when they are about to step.
            self._world.sum_ints(1, 0)
            raise _OutOfMemory from error

    def _step(self, optimizers: Sequence[Optimizer]) -> torch.Tensor:
        if self._world.size > 1:
            own = [p for o in optimizers for group in o.param_groups for p in group["params"] if p in self._averaged]
            gradients = [p.grad for p in own if p.requires_grad and p.grad is not None]
            lacking = len(gradients) < sum(p.requires_grad for p in own)
            ran_out, lacking_on = self._world.sum_ints(0, int(lacking))
            if ran_out:
                raise _OutOfMemory
            if lacking_on:
                raise StepError(
                    f"on {lacking_on} of {self._world.size} ranks a parameter got no gradient, and with "
                    "halve_on_out_of_memory those of replicated models must all get one: freeze it, or leave "
                    "halve_on_out_of_memory out"
                )
            self._world.all_reduce_mean(gradients)
            self._request_buffer_sync()
        return super()._step(optimizers)

    def _request_buffer_sync(self) -> None:
        """Has DDP give all ranks the main one's buffers before the next pass, as after a backward of its own."""
        for model in self._models.values():
            if isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = True

    def _sync_buffers_now(self) -> None:
        """Does so here, where all ranks are, and not in a pass that a rank without memory may not come to."""
        for model in self._models.values():
            if isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                model._sync_buffers()  # type: ignore[no-untyped-call]
                model.require_forward_param_sync = False

    def _agree_on_halving(self, batch: GlobalBatch, error: BaseException | None) -> str:
        """Returns what to say of it, equal on every rank. Every rank must call this.

        Raises:
            StepError: it cannot be done, and another rank has run out of memory; this one raises what it ran into.
        """
        largest = max(batch.num_samples)
        reports = self._world.all_gather_object(
            _RankMemoryReport(ran_out=error is not None, largest=largest, problem=_why_not_splittable(batch))
        )
        ranks = ", ".join(str(rank) for rank, each in enumerate(reports) if each.ran_out)
        largest = math.ceil(max(each.largest for each in reports) / self.splits)
        what = f"rank {ranks} ran out of memory at step {self._ctx.progress.step + 1}"
        problem = next((each.problem for each in reports if each.problem), None)
        if largest <= 1:
            problem = "a micro-batch has one sample already"
        if problem is None:
            half = math.ceil(largest / 2)
            return (
                f"{what} with up to {largest} samples in a forward pass: the update begins again with up to {half}, "
                f"and so do later ones (micro_batch_size={half} begins with that)"
            )
        if error is None:
            raise StepError(f"{what}, and halve_on_out_of_memory does not help: {problem}")
        error.add_note(f"halve_on_out_of_memory does not help: {problem}")
        raise error


class _OutOfMemory(Exception):
    """A pass that this rank, which then knows the cause, or another one had no memory for."""


@dataclass(frozen=True)
class _RankMemoryReport:
    """What a rank has to say of an update that some rank has no memory for.

    Attributes:
        largest: samples of its largest micro-batch.
        problem: why its micro-batches cannot be cut.
    """

    ran_out: bool
    largest: int
    problem: str | None


def _split(batch: GlobalBatch, pieces: int) -> LoadedBatch:
    """Cuts each micro-batch into as many pieces; one without samples of its own keeps the ranks in step.

    Raises:
        StepError: it cannot be cut.
    """
    if problem := _why_not_splittable(batch):
        raise StepError(f"micro-batches were cut, since memory did not suffice, and this one cannot be: {problem}")
    rows = batch.row_ids() if isinstance(batch, HasRowIds) else ()
    micro_batches: list[Any] = []
    num_samples: list[int] = []
    own_rows: list[Sequence[Any]] = []
    for number, (micro_batch, num) in enumerate(zip(batch.micro_batches, batch.num_samples, strict=True)):
        for i in range(pieces):
            start, stop = num * i // pieces, num * (i + 1) // pieces
            micro_batches.append(
                _select_rows(micro_batch, start, stop) if start < stop else _select_rows(micro_batch, 0, 1)
            )
            num_samples.append(stop - start)
            if rows:
                own_rows.append(rows[number][start:stop])
    return LoadedBatch(micro_batches, num_samples, batch.global_num_samples, own_rows)


def _select_rows(micro_batch: Any, start: int, stop: int) -> Any:
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, micro_batch)


def _why_not_splittable(batch: GlobalBatch) -> str | None:
    """Says what of a batch is not cut with its rows, if there is anything."""
    for micro_batch, num in zip(batch.micro_batches, batch.num_samples, strict=True):
        rows = batch_size(micro_batch)
        if num and rows != num:
            return f"a micro-batch of {num} samples has tensors of {rows} rows"
        for leaf in _leaves(micro_batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.dim() and leaf.size(0) != rows:
                    return f"of a micro-batch of {rows} rows, one tensor has the shape {list(leaf.shape)}"
            elif isinstance(leaf, Sized) and not isinstance(leaf, (str, bytes)) and len(leaf) == rows:
                return f"a {type(leaf).__name__} beside its tensors has {rows} elements, perhaps one for each row"
    return None


def _leaves(nested: Any) -> Iterator[Any]:
    """Yields tensors, lists with nothing nested in them, and whatever else is in a batch."""
    values: Iterable[Any] | None = None
    if isinstance(nested, Mapping):
        values = nested.values()
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        values = [getattr(nested, each.name) for each in dataclasses.fields(nested)]
    elif isinstance(nested, (list, tuple)) and any(not isinstance(each, (str, bytes, int, float)) for each in nested):
        values = nested
    if values is None:
        yield nested
        return
    for value in values:
        yield from _leaves(value)
