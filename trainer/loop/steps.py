"""The protocol of the user's steps, which the loop calls."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..distributed.context_parallel import Divided
from ..step.precision import ScalesLoss

LossWeight = float | torch.Tensor
"""Weight of a micro-batch's mean loss: its samples, or tokens with a label; on the device if a tensor."""


class Steps(Protocol):
    """The steps of a training run. `Trainer` implements them, and any other object may.

    Attributes:
        overrides_loss_weight, overrides_num_tokens, overrides_prepare_batch: whether to call the method. If not, a
            micro-batch has its number of samples as weight, tokens are not counted, and batches are used unchanged.
    """

    overrides_loss_weight: bool
    overrides_num_tokens: bool
    overrides_prepare_batch: bool

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a micro-batch, or a dict with "loss"; or call `backward` directly."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a validation batch, or a dict of numbers."""

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch for the steps."""

    def configure_loss_scaler(self) -> ScalesLoss:
        """Return the loss scaler; called only if the precision is "fp16"."""

    def loss_weight(self, batch: Any) -> LossWeight:
        """Return the weight of a micro-batch's mean loss."""

    def context_parallel_buffers(self, batch: Any) -> Divided:
        """Return the tensors to divide along their sequence, and that dimension of each."""

    def num_tokens(self, batch: Any) -> int | torch.Tensor:
        """Return the number of tokens in a micro-batch without padding."""
