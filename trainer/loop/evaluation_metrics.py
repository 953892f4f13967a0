"""Evaluation metrics that are not means: objects with update, compute and reset, and functions of all rows.

They are exact over ranks, in one of two ways. A torchmetrics object whose states are reduced by sum, cat, max or min
keeps its states, which are reduced over the ranks in `compute`. For all others the arguments of `update` are kept in
host memory, gathered from all ranks in `compute`, and ordered as a single rank would have seen them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from ..data.tree import map_tensors, move
from ..distributed.world import World
from ..errors import ConfigError, StepError

_MERGED_EXACTLY = frozenset({"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"})
_ABSENT = object()

Call = tuple[tuple[Any, ...], dict[str, Any]]


class EvaluationMetrics(Mapping[str, "EvaluationMetric"]):
    """The metrics of `configure_metrics` by name, as in `Trainer.metrics`. Evaluations reset and compute them.

    Args:
        metrics: torchmetrics objects, others with `update`, `compute` and `reset`, or functions, by name.
        world: the ranks over which they are computed, and their device.

    Attributes:
        counts: whether `update` has an effect: not in training, nor for padding.

    Raises:
        ConfigError: a metric is neither such an object nor a function.
    """

    def __init__(self, metrics: Mapping[str, Any], world: World) -> None:
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"configure_metrics() returned a {type(metrics).__name__}: return a dict of metrics by name, such as "
                '{"accuracy": ...}'
            )
        self._world = world
        self._by_name = {name: EvaluationMetric(name, metric, world, self) for name, metric in metrics.items()}
        self.counts = False

    def __getitem__(self, name: str) -> EvaluationMetric:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Enable `update` during an evaluation."""
        self.counts = True
        try:
            yield
        finally:
            self.counts = False

    def reset(self) -> None:
        """Clear all updates."""
        for metric in self._by_name.values():
            metric.reset()

    def compute(self) -> dict[str, float]:
        """Return the metrics that got an update on any rank, equal on every rank. Every rank must call this.

        Raises:
            StepError: a metric computes neither a number nor a dict of numbers.
        """
        if not self._by_name:
            return {}
        counts = self._world.sum_ints(*(metric.num_updates for metric in self._by_name.values()))
        found: dict[str, float] = {}
        for metric, count in zip(self._by_name.values(), counts, strict=True):
            if count:
                found |= _numbers(metric.name, metric.compute())
        # A function with random numbers differs between ranks, and callbacks decide by these values.
        return self._world.broadcast(found)


class EvaluationMetric:
    """One metric: call `update` in `validation_step`, with the arguments of the metric.

    Outside of evaluations `update` does nothing, so that a training step can be a validation step.

    Args:
        name: in the log, after `validation/`.
        metric: an object with `update`, `compute` and `reset`; or a function, which is called with the arguments of
            `update`, each concatenated over all batches and ranks (tensors and arrays along their first dimension);
            tensors are on the CPU.
        world: the ranks over which it is computed.
        owner: whose `counts` enables updates.
    """

    def __init__(self, name: str, metric: Any, world: World, owner: EvaluationMetrics) -> None:
        lacks = [each for each in ("update", "compute", "reset") if not callable(getattr(metric, each, None))]
        if isinstance(metric, type) or (lacks and not callable(metric)):
            raise ConfigError(
                f"metric {name!r} must be an object with update, compute and reset, such as those of torchmetrics, or "
                f"a function of all arguments of update, got {metric!r:.60}"
            )
        self.name = name
        self._world, self._owner = world, owner
        self._function: Callable[..., Any] | None = metric if lacks else None
        self._object: Any = None if lacks else metric.to(world.device) if hasattr(metric, "to") else metric
        self._parts = [] if lacks else _parts(self._object)
        self._merges_states = world.size > 1 and bool(self._parts) and all(map(_merges_exactly, self._parts))
        for part in self._parts:
            # torchmetrics' own synchronization hangs if a rank had no rows.
            part.dist_sync_fn, part.distributed_available_fn = self._gather_states, lambda: self._merges_states
        self._keeps_calls = bool(lacks) or (world.size > 1 and not self._merges_states)
        self._calls: list[Call] = []
        self.num_updates = 0

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch of this rank."""
        if not self._owner.counts:
            return
        self.num_updates += 1
        if self._keeps_calls:
            self._calls.append((map_tensors(_to_host, args), map_tensors(_to_host, kwargs)))
        else:
            self._object.update(*args, **kwargs)

    def reset(self) -> None:
        """Clear all updates."""
        self._calls, self.num_updates = [], 0
        if self._object is not None:
            self._object.reset()

    def compute(self) -> Any:
        """Return the value over all ranks. Every rank must call this, if any rank has an update."""
        if not self._keeps_calls:
            with warnings.catch_warnings():
                # "... was called before update": other ranks had updates.
                warnings.filterwarnings("ignore", "The ``compute`` method")
                return self._object.compute()
        calls = self._all_calls()
        if self._function is not None:
            return self._function(*_joined(args for args, _ in calls), **_joined_by_name(kwargs for _, kwargs in calls))
        self._object.reset()
        for args, kwargs in calls:
            self._object.update(*move(args, self._world.device), **move(kwargs, self._world.device))
        return self._object.compute()

    def _gather_states(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        states = [each.to(self._world.device) for each in self._world.all_gather_object(state.cpu())]
        # A list state without updates is gathered as an empty tensor, perhaps of another shape.
        return [each for each in states if each.numel()] or states[:1]

    def _all_calls(self) -> list[Call]:
        if self._world.device.type == "cuda":
            # The copies of `_to_host` may be in progress.
            torch.cuda.synchronize(self._world.device)
        if self._world.size == 1:
            return self._calls
        in_turn: Iterator[tuple[Any, ...]] = zip_longest(*self._world.all_gather_object(self._calls), fillvalue=_ABSENT)
        return [call for calls in in_turn for call in calls if call is not _ABSENT]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host, without waiting for the device: it would keep the arguments of all batches."""
    return tensor.detach().to("cpu", non_blocking=True)


def _parts(metric: Any) -> list[Any]:
    """Return the torchmetrics objects in a metric: itself, or those of a collection, or none."""
    if hasattr(metric, "sync") and hasattr(metric, "_reductions"):
        return [metric]
    if not hasattr(metric, "_enable_compute_groups"):
        return []
    # Metrics of a collection share states until one is read, which must not happen while states are gathered.
    metric._enable_compute_groups = False
    return [part for each in metric.values() for part in _parts(each)]


def _merges_exactly(part: Any) -> bool:
    """Return whether reducing the ranks' states is exact. It is not for a mean of means, nor for wrappers."""
    names = {getattr(reduction, "__name__", None) for reduction in part._reductions.values()}
    return bool(names) and names <= _MERGED_EXACTLY and len(list(part.modules())) == 1


def _joined(calls: Iterator[tuple[Any, ...]]) -> list[Any]:
    return [_join(list(values)) for values in zip(*calls, strict=True)]


def _joined_by_name(calls: Iterator[dict[str, Any]]) -> dict[str, Any]:
    each = list(calls)
    return {name: _join([kwargs[name] for kwargs in each]) for name in each[0]}


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if first.dim() else torch.stack(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values) if first.ndim else np.stack(values)
    if isinstance(first, (list, tuple)):
        return [item for value in values for item in value]
    return values


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {key: number for part, each in value.items() for key, number in _numbers(f"{name}/{part}", each).items()}
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        raise StepError(
            f"metric {name!r} must compute a number or a dict of numbers, got a {type(value).__name__}{shape}: "
            "average it, or return a dict"
        ) from None
