"""Loading only weights from a checkpoint: to initialize a run, or temporarily for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..callbacks.base import CallbackList
from ..checkpoints.model_state import ModelState, named_state_tensors
from ..data.tree import map_tensors
from ..distributed.dtensor import to_local
from ..distributed.fsdp import reshard
from ..errors import CheckpointError


class InitialWeights:
    """The weights that patterns select, as the only part of a checkpoint to load.

    Args:
        models: by name.
        patterns: as in `TrainerConfig.init_keys`; empty selects all.

    Attributes:
        not_taken: weights of the models that are not selected; set by loading.
        not_used: weights of the checkpoint that are not selected; set by loading.
    """

    def __init__(self, models: Mapping[str, nn.Module], patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._live = {
            f"{name}.{key}": value for name, model in models.items() for key, value in named_state_tensors(model)
        }
        self.not_taken: list[str] = []
        self.not_used: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: this part is only read."""
        return {}

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the live weight to read a selected tensor into, or None."""
        name = f"{path[0]}.{'/'.join(path[1:])}"
        live = self._live.get(name)
        return live.detach() if live is not None and live.shape == size and self._chooses(name) else None

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]], /) -> None:
        """Check that all selected weights have been read.

        Raises:
            CheckpointError: a selected weight is missing on one side, or has another shape.
        """
        saved = {
            f"{model}.{key}": value
            for model, values in state.items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        missing = sorted(name for name in self._live.keys() - saved.keys() if self._chooses(name))
        unexpected = sorted(name for name in saved.keys() - self._live.keys() if self._chooses(name))
        reshaped = sorted(
            f"{name} ({list(saved[name].shape)} there, {list(self._live[name].shape)} here)"
            for name in saved.keys() & self._live.keys()
            if self._chooses(name) and saved[name].shape != self._live[name].shape
        )
        if missing or unexpected or reshaped:
            raise CheckpointError(
                f"its weights do not fit the models. Missing in it: {_list(missing)}. Only in it: {_list(unexpected)}. "
                f"Of another shape: {_list(reshaped)}. Select the weights to load with init_keys, such as "
                '("*", "!model.head.*")'
            )
        if not any(self._chooses(name) for name in self._live):
            raise CheckpointError(
                f"init_keys={list(self._patterns)} matches none of its weights: {_list(sorted(saved))}"
            )
        self.not_taken = sorted(name for name in self._live if not self._chooses(name))
        self.not_used = sorted(name for name in saved if not self._chooses(name))

    def report(self) -> str:
        """Return a short description of the weights that were left out."""
        if not self.not_taken and not self.not_used:
            return "all weights"
        return f"all but {_list(self.not_taken)}; not used from it: {_list(self.not_used)}"

    def _chooses(self, name: str) -> bool:
        chosen = not self._patterns or self._patterns[0].startswith("!")
        for pattern in self._patterns:
            if fnmatchcase(name, pattern.removeprefix("!")):
                chosen = not pattern.startswith("!")
        return chosen


class BorrowedWeights:
    """Temporarily loaded weights of the models, and averages for callbacks that evaluate these.

    Args:
        models: by name.
        callbacks: those with an `evaluation_context` load their state from the checkpoint as well.
    """

    def __init__(self, models: Mapping[str, nn.Module], callbacks: CallbackList) -> None:
        self._models, self._callbacks = models, callbacks
        self._averages = _EvaluationState(callbacks)

    @property
    def parts(self) -> dict[str, Any]:
        """The parts of the checkpoint to load."""
        parts: dict[str, Any] = {"models": ModelState(self._models)}
        if self._callbacks.with_evaluation_context():
            parts["callbacks"] = self._averages
        return parts

    def without_missing_averages(self) -> AbstractContextManager[object]:
        """Return a context in which callbacks without averages in the checkpoint evaluate the plain weights."""
        return self._callbacks.without_evaluation_context(self._averages.absent)

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        """Restore the current weights and averages at the end, from copies on the CPU."""
        tensors = [value for model in self._models.values() for _, value in named_state_tensors(model)]
        before = [to_local(value.detach()).to("cpu", copy=True) for value in tensors]
        callbacks = _EvaluationState(self._callbacks)
        states = map_tensors(torch.clone, callbacks.state_dict())
        try:
            yield
        finally:
            with torch.no_grad():
                for value, was in zip(tensors, before, strict=True):
                    to_local(value).copy_(was)
            callbacks.load_state_dict(states)
            reshard(self._models.values())


class _EvaluationState:
    """The state of callbacks that evaluate other weights than the models'.

    Attributes:
        absent: names of callbacks whose state was not in the checkpoint; set by loading.
    """

    def __init__(self, callbacks: CallbackList) -> None:
        self._callbacks = callbacks.with_evaluation_context()
        self.absent: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        states = {key: callback.state_dict() for key, callback in self._callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self.absent = self.state_dict().keys() - state_dict.keys()
        for key, callback in self._callbacks.items():
            if key in state_dict:
                callback.load_state_dict(state_dict[key])


def _list(names: Sequence[str]) -> str:
    return (", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "none"
