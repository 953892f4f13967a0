"""Any `ray.data.Dataset` as training data: what it refuses, and the batches of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.datasets.errors import DataError
from headway.datasets.formats.ray_dataset import RayDataset

from .conftest import shard_info


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="dataset must be a ray.data.Dataset or a DataIterator, got list"):
        RayDataset([1])


class Dataset:
    """Has the interface that is looked for, and is never read."""

    def iter_batches(self) -> None:
        raise AssertionError


def test_ray_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.datasets.formats.ray_dataset.connected_to_ray", lambda: False)
    with pytest.raises(DataError, match="a RayDataset needs Ray, which is not initialized"):
        RayDataset(Dataset()).setup(shard_info())


def test_the_batch_size_must_fit_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.datasets.formats.ray_dataset.connected_to_ray", lambda: True)
    with pytest.raises(DataError, match="global_batch_size 8 must be a multiple of the 3 ranks"):
        RayDataset(Dataset()).setup(shard_info(0, 3))
    with pytest.raises(DataError, match="config.global_batch_size is not set"):
        RayDataset(Dataset()).setup(shard_info(global_batch_size=None))


@pytest.mark.ray
def test_batches_are_cut_to_the_sizes_of_the_run(ray_session: None) -> None:
    import ray.data

    def more(columns: Any) -> Any:
        return {**columns, "text": [f"row {each}" for each in columns["id"]]}

    dataset = ray.data.range(20, override_num_blocks=2).map_batches(more)
    stream = RayDataset(dataset)
    stream.setup(shard_info(micro_batch_size=3))
    for epoch in range(2):
        batches = list(stream.epoch(epoch))
        assert [batch.num_samples for batch in batches] == [(2, 3, 3)] * 2
        assert [batch.global_num_samples for batch in batches] == [8, 8]
        assert batches[0].row_ids() == [(), (), ()]
        micro_batches = [each for batch in batches for each in batch.micro_batches]
        seen = torch.cat([each["id"] for each in micro_batches]).tolist()
        assert len(set(seen)) == 16
        assert [text for each in micro_batches for text in each["text"]] == [f"row {each}" for each in seen]
    evaluation = RayDataset(dataset.iterator())
    evaluation.setup(shard_info(training=False))
    assert sorted(int(each) for batch in evaluation.epoch(0) for each in batch.micro_batches[0]["id"]) == [*range(20)]
