"""How much memory training takes at its peak, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..step.oom import is_out_of_memory, peak_bytes, reset_peak
from .base import Callback
from .progress_bar import human_bytes

if TYPE_CHECKING:
    from ..trainer import Trainer


class PeakMemory(Callback):
    """Adds `peak_memory_bytes` to every training record: of the rank that took most, since the record before.

    On CUDA that is the peak of what tensors took, and `reserved_memory_bytes` is what PyTorch held of the device for
    them; on a CPU it is what the process holds when the record is made. Several ranks cost one small collective per
    record, and `peak_memory_rank` names the one that took most. When the memory is not enough, the error says what each
    rank had taken.

    Args:
        per_rank: adds `peak_memory_bytes/<rank>` for every rank.

    Attributes:
        latest_bytes: the last record's peaks, in the order of the ranks.

    Example:
        >>> trainer = Digits(config, callbacks=[PeakMemory()])
    """

    def __init__(self, *, per_rank: bool = False) -> None:
        self._per_rank = per_rank
        self.latest_bytes: list[int] = []

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Joins the records."""
        trainer.add_metric_source(partial(self._measure, trainer))

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Leaves out what the building of the models took."""
        reset_peak(trainer.device)

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Tells an out-of-memory error what each rank had taken, as of the last record: the others cannot be asked."""
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
