"""Notices that worker processes or ranks, each with its own copy of iterable data, read the same batches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from .tree import map_tensors

_COMPARED = 2
"""Batches compared per worker or rank. If one reader's are equal to each other, all data may be alike: no warning."""


def digest(batch: Any) -> int:
    """Return 24 bits of the content of the tensors in host memory of a nested batch; 0 if it has none."""
    content = xxhash.xxh3_64()
    found = False

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel():
            content.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            found = True
        return tensor

    map_tensors(add, batch)
    return content.intdigest() % 2**24 if found else 0


class WorkerRepeats:
    """Warns if all worker processes of a loader over an `IterableDataset` yield the same first batches.

    Args:
        data: training or validation data.
        role: "training" or "validation", for the message.
    """

    def __init__(self, data: Any, role: str) -> None:
        is_divided = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
        self._num_workers = data.num_workers if is_divided and data.num_workers > 1 else 0
        self._role = role
        self._digests: list[int] = []

    def add(self, batch: Any) -> None:
        """Compare a batch of the first epoch; the loader takes one from each worker in turn."""
        if not self._num_workers:
            return
        self._digests.append(digest(batch))
        if len(self._digests) < _COMPARED * self._num_workers:
            return
        count, self._num_workers = self._num_workers, 0
        first, second = set(self._digests[:count]), set(self._digests[count:])
        if len(first) == len(second) == 1 and first != second and first != {0}:
            warnings.warn(
                f"all {count} worker processes of the {self._role} loader yield the same batches, so each row is read "
                f"{count} times: let __iter__ of the dataset read the part of this worker, from "
                "torch.utils.data.get_worker_info(), or set num_workers=1",
                stacklevel=2,
            )


class RankRepeats:
    """Warns if all ranks read the same first batches. The ranks compare them in sums that they exchange anyway.

    Args:
        num_ranks: all ranks, which call this.
        num_readers: those that should read different rows.
        is_main: whether this rank warns.
    """

    def __init__(self, *, num_ranks: int, num_readers: int, is_main: bool) -> None:
        self._num_ranks, self._num_readers, self._is_main = num_ranks, num_readers, is_main
        self._own: list[int] = []
        self._are_equal = True

    def numbers(self, batch: Any) -> list[int]:
        """Return numbers to sum over the ranks, equally many on each; none after the first batches."""
        if len(self._own) == _COMPARED:
            return []
        self._own.append(digest(batch))
        return [self._own[-1], self._own[-1] ** 2]

    def check(self, sums: list[int]) -> None:
        """Take the sums of `numbers`, and warn on the main rank after the last ones."""
        if not sums:
            return
        total, squares = sums
        # Equality in the inequality of Cauchy and Schwarz.
        self._are_equal = self._are_equal and total > 0 and total**2 == self._num_ranks * squares
        repeats = self._num_readers > 1 and self._are_equal and len(set(self._own)) > 1
        if repeats and len(self._own) == _COMPARED and self._is_main:
            warnings.warn(
                f"all {self._num_readers} ranks read the same batches, so each row is trained on {self._num_readers} "
                "times: let the data read only the part of self.mesh.data.rank, or use a DataLoader over a map-style "
                "dataset, which Headway divides",
                stacklevel=2,
            )
