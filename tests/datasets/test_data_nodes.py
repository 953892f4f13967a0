"""Which streams ask for CPUs of data nodes; tests/promises/test_reading_starts_data_nodes.py has such nodes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import ray

from headway.datasets.data_nodes import RESOURCE, DataNodes
from headway.datasets.errors import DataError
from headway.datasets.formats.images import Images
from headway.datasets.mixture import Mixture
from headway.datasets.sources import Parquet
from headway.datasets.stream import ParquetStream, Stream
from tests.datasets.conftest import shard_info


def note_the_node(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "node": [ray.get_runtime_context().get_node_id()] * len(rows["id"])}


@ray.remote
class Busy:
    """Holds CPUs."""

    def there(self) -> None:
        """Return when it has them."""


def test_transforms_and_images_ask_for_a_cpu() -> None:
    assert ParquetStream("x").reader_cpus == 0
    assert ParquetStream("x", transforms=[note_the_node]).reader_cpus == 1
    assert ParquetStream("x", transforms=[note_the_node], reader_cpus=0).reader_cpus == 0
    assert Stream(Images("x")).reader_cpus == 1
    assert Stream(Mixture({"a": (Parquet("x"), 1.0), "b": (Images("x"), 1.0)})).reader_cpus == 1
    assert Stream(Parquet("x"), reader_cpus=0.5).reader_cpus == 0.5
    for wrong in (-1, float("nan"), float("inf"), "2"):
        with pytest.raises(DataError, match="reader_cpus must be a number of CPUs >= 0"):
            ParquetStream("x", reader_cpus=wrong)


@pytest.mark.ray
def test_on_one_machine_reading_needs_no_free_cpu(
    folder: Path, ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway.datasets")
    groups = len(ray.util.placement_group_table())
    busy = Busy.options(num_cpus=ray.cluster_resources()["CPU"]).remote()  # type: ignore[attr-defined]
    ray.get(busy.there.remote())
    try:
        stream = ParquetStream(folder, transforms=[note_the_node], engine="ray", tail="keep")
        stream.setup(shard_info())
        assert sum(sum(batch.num_samples) for batch in stream.epoch(0)) == 103
        stream.close()
    finally:
        ray.kill(busy)
    assert len(ray.util.placement_group_table()) == groups
    assert caplog.messages == []


@pytest.mark.ray
def test_a_reservation_of_a_ray_that_is_gone_is_released(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, RESOURCE: 1.0})
        nodes = DataNodes(1, 1, log_placement=True)
    assert nodes.task_options() == {}
    (state,) = (
        each["state"]
        for each in ray.util.placement_group_table().values()
        if {"CPU": 1.0, RESOURCE: 0.001} in each["bundles"].values()
    )
    assert state == "PENDING"
    nodes.release()
    nodes.release()
