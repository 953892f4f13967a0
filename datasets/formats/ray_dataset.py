"""Any `ray.data.Dataset` as training data: read by Ray Data, and divided among the ranks by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from ..arrow import num_rows
from ..batching.micro_batches import GlobalBatch, cut_all, gather_column
from ..engines import connected_to_ray
from ..errors import DataError
from ..plan import split_evenly
from ..prefetch import ShardInfo


class RayDataset:
    """Train on a `ray.data.Dataset`, or on a part of one that `ray.train.get_dataset_shard` returns.

    Return it from `configure_dataloaders`. Every rank must create the same dataset; the first one starts it for all,
    with `streaming_split`, so that each row is read by one rank. All ranks get equally many rows, so fewer rows than
    there are ranks are left out, also in an evaluation. In training, rows that do not fill the last global batch are
    left out as well.

    Ray Data decides which rank gets which rows, so the guarantee is "epoch": a resumed run repeats its epoch. Every
    epoch executes the dataset again: call `random_shuffle()` on it for another order.

    Ray Data's tasks need CPUs that the workers have not reserved, or `num_cpus=0` in `map_batches(...)`. With
    `resources={"data": 0.001}` they run on data nodes, which the autoscaler starts for them.

    Args:
        dataset: the dataset, or a `DataIterator` with this rank's part of one.
        prefetch_batches: batches that Ray Data prepares ahead on each rank.

    Example:
        >>> from headway.datasets.formats.ray_dataset import RayDataset
        >>> class OnRayData(Digits):
        ...     def configure_dataloaders(self):
        ...         return RayDataset(ray.data.read_parquet("s3://bucket/train").random_shuffle())
    """

    guarantee: Literal["epoch"] = "epoch"
    fingerprint: None = None

    def __init__(self, dataset: Any, *, prefetch_batches: int = 2) -> None:
        if not hasattr(dataset, "iter_batches"):
            raise DataError(f"dataset must be a ray.data.Dataset or a DataIterator, got {type(dataset).__name__}")
        self._dataset, self._prefetch_batches = dataset, prefetch_batches
        self._shard: ShardInfo | None = None
        self._own: Any = None

    def setup(self, shard: ShardInfo) -> None:
        """Divide the dataset among the ranks. Every rank must call this.

        Raises:
            DataError: Ray is not connected, the batch size is missing or not divisible by the number of ranks, or
                several ranks read the same rows, as in tensor parallelism.
        """
        if not connected_to_ray():
            raise DataError("a RayDataset needs Ray, which is not initialized in this process: use `headway fit`")
        size, per_rank = shard.global_batch_size, shard.micro_batch_size
        if size is None and (shard.training or per_rank is None):
            raise DataError("config.global_batch_size is not set: a RayDataset needs it (samples of one update)")
        if size is not None and size % shard.world_size:
            raise DataError(f"global_batch_size {size} must be a multiple of the {shard.world_size} ranks")
        self._shard = shard
        self._own = self._divide(shard) if hasattr(self._dataset, "streaming_split") else self._dataset

    def samples_in_epoch(self, epoch: int) -> None:
        """Return None: the number is unknown before the rows are read."""

    def steps_in_epoch(self, epoch: int) -> None:
        """Return None: the number is unknown before the rows are read."""

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yield this rank's part of every global batch of an epoch, from its start; the same number on every rank."""
        shard = self._shard
        assert shard is not None, "setup(shard) must be called first"
        size, micro = shard.global_batch_size, shard.micro_batch_size
        per_rank = size // shard.world_size if size is not None else micro
        for columns in self._own.iter_batches(
            batch_size=per_rank,
            batch_format="numpy",
            drop_last=shard.training,
            prefetch_batches=self._prefetch_batches,
        ):
            rows = num_rows(columns)
            positions = np.arange(rows)
            gathered = {name: gather_column([(each, positions)], rows, False) for name, each in columns.items()}
            sizes = split_evenly(rows, -(-rows // (micro or rows)))
            yield GlobalBatch(cut_all(gathered, 0, sizes), sizes, rows * shard.world_size, lambda: ())

    def close(self) -> None:
        """Do nothing: an abandoned execution ends when its iterator is deleted."""

    def _divide(self, shard: ShardInfo) -> Any:
        """Return the part of this rank. Iterators of one execution, made by the first rank, go to all."""
        if shard.world_size == 1:
            return self._dataset
        from ray import cloudpickle

        if torch.distributed.get_world_size() != shard.world_size:
            raise DataError(
                f"{torch.distributed.get_world_size()} ranks share {shard.world_size} parts of the data, which a "
                "RayDataset cannot give to several ranks: use a Stream, or no tensor parallelism"
            )
        box: list[Any] = [None]
        if shard.rank == 0:
            parts = self._dataset.streaming_split(shard.world_size, equal=True)
            box = [[cloudpickle.dumps(part) for part in parts]]
        torch.distributed.broadcast_object_list(box, src=0)
        return cloudpickle.loads(box[0][shard.rank])
