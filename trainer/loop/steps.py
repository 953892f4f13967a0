"""What the loop asks of the user's code."""

from __future__ import annotations

from typing import Any, Protocol

import torch

LossWeight = float | torch.Tensor
"""How much the mean loss of a micro-batch counts: samples, or tokens with a label; on the device if a tensor."""


class Steps(Protocol):
    """The steps of a training. `Trainer` has them; so can a test, or any object.

    Attributes:
        overrides_loss_weight, overrides_num_tokens, overrides_prepare_batch: whether the method is to be called. Where
            it is not, a micro-batch weighs its number of samples, tokens are not counted, and batches stay as they are.
    """

    overrides_loss_weight: bool
    overrides_num_tokens: bool
    overrides_prepare_batch: bool

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss of a micro-batch, or a dict with "loss"; or calls `backward` itself."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss of a validation batch, or a dict of numbers."""

    def prepare_batch(self, batch: Any) -> Any:
        """Returns the batch that the steps get instead."""

    def loss_weight(self, batch: Any) -> LossWeight:
        """Returns how much the mean loss of a micro-batch counts."""

    def num_tokens(self, batch: Any) -> int | torch.Tensor:
        """Returns the tokens of a micro-batch that are no padding."""
