"""An optimizer step that repeats an update with smaller micro-batches when a rank runs out of memory."""

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
from .gradients import zero_gradients
from .oom import is_out_of_memory
from .optimizer_step import OptimizerStep


class AutoMicrobatchStep(OptimizerStep):
    """Makes one optimizer update; when memory runs out, repeats it with micro-batches of half the size.

    The global batch, its order and the mean loss do not change: more micro-batches are accumulated. Before a repeat,
    gradients, buffers, random states and counters are reset. Later updates use the smaller size too, and so does a
    resumed run, unless its `micro_batch_size` differs.

    On several ranks gradients are reduced after the last backward pass, not during it, so that all ranks can agree on a
    repeat.

    Args:
        ctx: of one rank, or with models that are replicated.
        steps, metrics: as for `OptimizerStep`.

    Attributes:
        splits: number of parts into which each micro-batch of the data is split.

    Raises:
        ConfigError: a model is sharded, or sequences are divided.
    """

    def __init__(self, ctx: RunContext, steps: Steps, metrics: MeanMetrics) -> None:
        super().__init__(ctx, steps, metrics)
        if sharded := [name for name, model in ctx.models.items() if is_sharded(model)]:
            raise ConfigError(
                f"halve_on_out_of_memory does not support sharded models ({', '.join(sorted(sharded))}): a rank out of "
                "memory would leave the others waiting for its shards. Leave it out and set a smaller "
                "micro_batch_size, or use strategy 'ddp'"
            )
        if ctx.config.parallel.cp > 1:
            raise ConfigError(
                f"halve_on_out_of_memory does not support parallel.cp={ctx.config.parallel.cp}: a rank out of memory "
                "would leave the others waiting for its part of the sequences. Leave it out and set a smaller "
                "micro_batch_size"
            )
        self.splits = 1
        self._generators = RngState()
        # Reduced in `_step`, not by DDP.
        self._averaged = {p for model in self._replicated for p in model.parameters()}
        self._replicated = []
        self._buffers = [buffer for model in self._models.values() for buffer in model.buffers()]

    def counters(self) -> dict[str, float]:
        """Return the counters of `OptimizerStep`, and the parts of a micro-batch if it is split."""
        cut = {"micro_batch_pieces": float(self.splits)} if self.splits > 1 else {}
        return super().counters() | cut

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `OptimizerStep`, and how micro-batches are split."""
        return super().state_dict() | {"pieces": self.splits, "pieces_of": self._config.micro_batch_size}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the state; with another `micro_batch_size` than the saved one, micro-batches are not split."""
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
            # Outside the handler, whose exception keeps the graph of the failed pass alive.
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
        with without_gradient_sync(self._models, no_sync=True, must_reach_parameters=False):
            super()._compute_and_step()

    def _compute_gradients(self) -> None:
        try:
            super()._compute_gradients()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self._stepped:
                error.add_note(
                    "halve_on_out_of_memory cannot repeat this update: an optimizer has already stepped in it"
                )
                raise
            # Other ranks make the matching call in `_step`.
            self._world.sum_ints(1, 0)
            raise _OutOfMemory from error

    def _step(self, optimizers: Sequence[Optimizer]) -> torch.Tensor:
        if self._world.size > 1:
            own = [p for o in optimizers for group in o.param_groups for p in group["params"] if p in self._averaged]
            gradients = [p.grad for p in own if p.requires_grad and p.grad is not None]
            lacking = len(gradients) < sum(p.requires_grad for p in own)
            failure: Exception | None = None
            try:
                # Now: a rank that runs out of memory inside the reduction would leave the others in it.
                self._world.reserve_for_mean(gradients)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            ran_out, lacking_on = self._world.sum_ints(int(failure is not None), int(lacking))
            if ran_out:
                raise _OutOfMemory from failure
            if lacking_on:
                raise StepError(
                    f"on {lacking_on} of {self._world.size} ranks a parameter got no gradient, but "
                    "halve_on_out_of_memory requires one for every parameter of replicated models: freeze it, or "
                    "leave halve_on_out_of_memory out"
                )
            self._world.all_reduce_mean(gradients)
            self._request_buffer_sync()
        return super()._step(optimizers)

    def _request_buffer_sync(self) -> None:
        """Make DDP broadcast the main rank's buffers before the next forward pass, as after its own backward pass."""
        for model in self._models.values():
            if isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = True

    def _sync_buffers_now(self) -> None:
        """Sync DDP buffers now, while all ranks are present, not in a forward pass that an OOM rank may not reach."""
        for model in self._models.values():
            if isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                for buffer in model.module.buffers():
                    self._loss_world.broadcast_tensor(buffer)
                model.require_forward_param_sync = False

    def _agree_on_halving(self, batch: GlobalBatch, error: BaseException | None) -> str:
        """Return a message about the smaller micro-batches, equal on every rank. Every rank must call this.

        Raises:
            StepError: micro-batches cannot be split, and another rank ran out of memory; a rank that ran out of memory
                raises that error instead.
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
            problem = "micro-batches already have only one sample"
        if problem is None:
            half = math.ceil(largest / 2)
            return (
                f"{what} with up to {largest} samples in a forward pass: repeating the update with up to {half}, also "
                f"in later updates (set micro_batch_size={half} to start with that)"
            )
        if error is None:
            raise StepError(f"{what}, and halve_on_out_of_memory does not help: {problem}")
        error.add_note(f"halve_on_out_of_memory does not help: {problem}")
        raise error


class _OutOfMemory(Exception):
    """This rank (then with a cause) or another one ran out of memory in the update."""


@dataclass(frozen=True)
class _RankMemoryReport:
    """One rank's report on an update for which memory ran out on some rank.

    Attributes:
        ran_out: whether this rank ran out of memory.
        largest: samples of its largest micro-batch.
        problem: why its micro-batches cannot be split, if so.
    """

    ran_out: bool
    largest: int
    problem: str | None


def _split(batch: GlobalBatch, pieces: int) -> LoadedBatch:
    """Split each micro-batch into `pieces` parts; a part without samples is padding.

    Raises:
        StepError: a micro-batch cannot be split.
    """
    if problem := _why_not_splittable(batch):
        raise StepError(f"halve_on_out_of_memory has split earlier micro-batches, but cannot split this one: {problem}")
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
    """Return which part of a batch cannot be split by rows, or None."""
    for micro_batch, num in zip(batch.micro_batches, batch.num_samples, strict=True):
        rows = batch_size(micro_batch)
        if num and rows != num:
            return f"a micro-batch of {num} samples has tensors of {rows} rows"
        for leaf in _leaves(micro_batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.dim() and leaf.size(0) != rows:
                    return f"in a micro-batch of {rows} rows, one tensor has the shape {list(leaf.shape)}"
            elif isinstance(leaf, Sized) and not isinstance(leaf, (str, bytes)) and len(leaf) == rows:
                return f"in addition to tensors it has a {type(leaf).__name__} of {rows} elements, perhaps one per row"
    return None


def _leaves(nested: Any) -> Iterator[Any]:
    """Yield the leaves of a batch: tensors, flat lists of plain values, and other objects."""
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
