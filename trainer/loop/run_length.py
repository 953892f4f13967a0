"""The number of updates of an epoch and of a whole run, if config and data determine it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ..config import TrainerConfig
from ..data.protocols import BatchStream, HasUnequalEpochs
from .progress import Progress


class RunLength:
    """The length of a run.

    Args:
        config: the limits.
        progress: the epoch in progress.
        data: the training data, open.

    Attributes:
        steps_on_ranks: updates of an epoch on each rank, if these may differ: an epoch ends on all ranks with the
            shortest one. Empty if the data is the same on all ranks.
    """

    def __init__(self, config: TrainerConfig, progress: Progress, data: BatchStream) -> None:
        self._config, self._progress, self._data = config, progress, data
        self.steps_on_ranks: Sequence[int | None] = ()

    @property
    def steps_in_epoch(self) -> int | None:
        """Updates of an epoch of the data; None if unknown."""
        each = self.steps_on_ranks or [self._data.steps_in_epoch(self._progress.epoch)]
        known = [steps for steps in each if steps is not None]
        return min(known) if len(known) == len(each) else None

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run; None if config and data do not determine it."""
        config, in_data = self._config, self.steps_in_epoch
        in_epoch = min((each for each in (config.steps_per_epoch, in_data) if each is not None), default=None)
        by_epochs = config.max_epochs * in_epoch if config.max_epochs and in_epoch else None
        if by_epochs is not None and self._epochs_differ:
            by_epochs = sum(self._steps_of_epoch(epoch) for epoch in range(config.max_epochs or 0))
        by_samples = self._steps_of_samples(in_epoch) if config.max_samples else None
        return min((each for each in (config.max_steps, by_epochs, by_samples) if each is not None), default=None)

    @property
    def _epochs_differ(self) -> bool:
        return isinstance(self._data, HasUnequalEpochs) and self._data.epochs_differ

    def _steps_of_epoch(self, epoch: int) -> int:
        """Return the updates of an epoch, of data whose epochs have known lengths."""
        limits = (self._data.steps_in_epoch(epoch), self._config.steps_per_epoch)
        return min(each for each in limits if each is not None)

    def _steps_of_samples(self, steps_in_epoch: int | None) -> int | None:
        """Return the updates for `max_samples`: each has the size of the global batch, except the last of an epoch."""
        limit, data, size = self._config.max_samples, self._data, self._config.global_batch_size
        if limit is None:
            return None
        if size is not None and self._epochs_differ:
            steps, left = 0, limit
            for epoch in itertools.count():
                in_epoch = self._steps_of_epoch(epoch)
                samples = min(data.samples_in_epoch(epoch) or limit, in_epoch * size)
                if left <= samples:
                    return steps + math.ceil(left / size)
                steps, left = steps + in_epoch, left - samples
        epoch = self._progress.epoch
        in_data, of_data = data.samples_in_epoch(epoch), data.steps_in_epoch(epoch)
        if size is None and in_data and of_data:
            size = math.ceil(in_data / of_data)
        if size is None:
            return None
        if steps_in_epoch is None:
            return math.ceil(limit / size)
        epochs, rest = divmod(limit, min(in_data or limit, steps_in_epoch * size))
        return epochs * steps_in_epoch + math.ceil(rest / size)
