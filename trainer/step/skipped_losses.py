"""Micro-batches for which `training_step` returned no loss, which all ranks skip or none."""

from __future__ import annotations

from ..distributed.world import World
from ..errors import StepError


class SkippedLosses:
    """Agrees with the other ranks on micro-batches to skip, and counts them.

    Args:
        world: all ranks.
        most_in_a_row: `TrainerConfig.max_skipped_losses`.
        trainer_name: for errors.

    Attributes:
        total: micro-batches skipped so far in the run.
        in_update: micro-batches skipped in the current update.
    """

    def __init__(self, world: World, most_in_a_row: int, trainer_name: str) -> None:
        self._world, self._most_in_a_row, self._trainer_name = world, most_in_a_row, trainer_name
        self._in_a_row = 0
        self.total = self.in_update = 0

    def agree_to_skip(self, skips: bool) -> bool:
        """Return whether all ranks skip the current micro-batch. Every rank must call this.

        Args:
            skips: whether this rank has no loss.

        Raises:
            StepError: only some ranks skip it, or there have been too many in a row.
        """
        (num_skip,) = self._world.sum_ints(int(skips))
        if not num_skip:
            self._in_a_row = 0
            return False
        if num_skip < self._world.size:
            raise StepError(
                f"training_step of {self._trainer_name} returned no loss on {num_skip} of {self._world.size} ranks: "
                "skip a micro-batch on all of them, or return a loss of zero that depends on the model, such as "
                "0.0 * self.model(batch).sum()"
            )
        self.total += 1
        self._in_a_row += 1
        self.in_update += 1
        if self._in_a_row > self._most_in_a_row:
            raise StepError(
                f"training_step of {self._trainer_name} returned no loss for {self._in_a_row} micro-batches in a row "
                f"(max_skipped_losses={self._most_in_a_row})"
            )
        return True
