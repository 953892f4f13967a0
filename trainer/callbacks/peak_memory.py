"""Log the peak memory of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..metrics.units import human_bytes
from ..step.oom import is_out_of_memory, peak_bytes, reset_peak
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class PeakMemory(Callback):
    """Adds `peak_memory_bytes` to every training record: the maximum over the ranks since the previous record.

    On CUDA this is the peak of allocated memory, and `reserved_memory_bytes` the peak that PyTorch reserved; on a CPU
    it is the resident memory of the process at the record. With several ranks this costs one small collective per
    record and adds `peak_memory_rank`, the rank of the maximum. Out-of-memory errors get a note with each rank's peak.

    Args:
        per_rank: also add `peak_memory_bytes/<rank>` for every rank.

    Attributes:
        latest_bytes: peaks in the last record, in rank order.

    Example:
        >>> trainer = Digits(config, callbacks=[PeakMemory()])
    """

    def __init__(self, *, per_rank: bool = False) -> None:
        self._per_rank = per_rank
        self.latest_bytes: list[int] = []

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Register as a metric source."""
        trainer.add_metric_source(partial(self._measure, trainer))

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Reset the peak, which so far includes setup."""
        reset_peak(trainer.device)

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Add the last record's peaks to an out-of-memory error. No collectives: other ranks may be gone."""
        if error is not None and is_out_of_memory(error) and self.latest_bytes:
            taken = ", ".join(f"rank {rank}: {human_bytes(each)}" for rank, each in enumerate(self.latest_bytes))
            error.add_note(f"peak memory in the last record: {taken}")

    def _measure(self, trainer: Trainer[Any], record: Mapping[str, float]) -> dict[str, float]:
        device = trainer.device
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        gathered = trainer.world.all_gather_object((peak_bytes(device), reserved))
        reset_peak(device)
        self.latest_bytes = [peak for peak, _ in gathered]
        most = max(self.latest_bytes)
        measured: dict[str, float] = {"peak_memory_bytes": most}
        if device.type == "cuda":
            measured["reserved_memory_bytes"] = max(reserved for _, reserved in gathered)
        if len(gathered) > 1:
            measured["peak_memory_rank"] = self.latest_bytes.index(most)
        if self._per_rank:
            measured |= {f"peak_memory_bytes/{rank}": peak for rank, peak in enumerate(self.latest_bytes)}
        return measured
