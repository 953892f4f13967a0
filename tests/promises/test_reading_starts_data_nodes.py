"""A real autoscaler starts nodes for reading and preparing data, neither the head nor nodes with GPUs are used for it,
and they stop afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
import torch
from PIL import Image
from torch import nn

from headway.datasets import engines
from headway.datasets.data_nodes import RESOURCE
from headway.datasets.formats.images import Images
from headway.datasets.formats.ray_dataset import RayDataset
from headway.datasets.stream import ParquetStream, Stream
from headway.orchestrator import Run
from headway.orchestrator.cluster.connect import placed_groups
from headway.trainer import Trainer, TrainerConfig
from tests import heads
from tests.datasets.conftest import shard_info, write
from tests.machines import machines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(500)]

IMAGES = 64
ROWS = 640
# Updates that are to be made of rows from a data node.
ENOUGH = 20
GPU_NODES = {"resources": {"CPU": 4, "GPU": 1}, "max_workers": 1}


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A head whose only CPU a training worker takes, and groups of data nodes and of nodes with GPUs."""
    data = {"resources": {"CPU": 2, RESOURCE: 2}, "max_workers": 1}
    with heads.growing_head(tmp_path, {"CPU": 1, RESOURCE: 1}, data=data, gpu=GPU_NODES) as port:
        yield port


def augment(columns: dict[str, Any]) -> dict[str, Any]:
    """Make pixels of images, and note the node."""
    pixels = np.stack([image.astype("float32") / 255 for image in columns["image"]])
    node = int(ray.get_runtime_context().get_node_id()[-8:], 16)
    return {"pixels": pixels, "id": pixels[:, 0, 0, 0] * 255, "node": np.full(len(pixels), node)}


@dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainerConfig):
    data: str
    on_ray_data: bool = False


class ImageRun(Trainer[ImageConfig]):
    """Trains until enough batches have come from another node than its own, and writes down both."""

    def configure_models(self) -> None:
        self.model = nn.Linear(3, 1)
        self.away = 0

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def configure_dataloaders(self) -> Any:
        if self.config.on_ray_data:
            return RayDataset(ray.data.read_images(self.config.data).map_batches(augment, resources={RESOURCE: 0.001}))
        return Stream(Images(self.config.data), transforms=[augment])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = int(ray.get_runtime_context().get_node_id()[-8:], 16)
        self.away += own not in batch["node"].tolist()
        with open(f"{self.run_dir}/rows.jsonl", "a") as file:
            record = {"epoch": self.current_epoch, "ids": batch["id"].int().tolist(), "nodes": batch["node"].tolist()}
            file.write(json.dumps({**record, "own": own}) + "\n")
        if self.away >= ENOUGH:
            self.request_stop("enough rows from another node")
        return self.model(batch["pixels"].mean((1, 2))).square().mean()


@pytest.mark.parametrize("on_ray_data", [False, True])
def test_a_data_node_comes_for_the_images_of_a_run_and_goes_after_it(
    port: int, tmp_path: Path, on_ray_data: bool
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for row in range(IMAGES):
        Image.new("RGB", (8, 8), (row, row, row)).save(folder / f"{row}.png")
    heads.wait_until(lambda: len(heads.raylets(port)) == 1)
    head = heads.raylets(port)
    driver = heads.headway_on(
        port, "fit", "tests.promises.test_reading_starts_data_nodes:ImageRun", "name=run",
        f"storage={tmp_path}/runs", f"config.data={folder}", "config.global_batch_size=16", "config.max_steps=100000",
        f"config.on_ray_data={on_ray_data}", "scaling.workers=1",
    )  # fmt: skip
    with driver:
        try:
            heads.wait_until(lambda: len(heads.raylets(port)) == 2, driver)
            shown, _ = driver.communicate(timeout=300)
        except BaseException:
            print(heads.status(port))
            raise
        finally:
            driver.kill()
    assert driver.returncode == 0, shown
    assert Run(str(tmp_path / "runs/run")).status == "stopped"
    batches = [json.loads(line) for line in (tmp_path / "runs/run/rows.jsonl").read_text().splitlines()]
    assert sum(each["own"] not in each["nodes"] for each in batches) == ENOUGH
    for epoch in range(batches[-1]["epoch"]):
        ids = [one for each in batches if each["epoch"] == epoch for one in each["ids"]]
        assert sorted(ids) == list(range(IMAGES))
    if not on_ray_data:
        # While the node starts, the run trains.
        assert batches[0]["nodes"] == [batches[0]["own"]] * 16
    heads.wait_until(lambda: heads.raylets(port) == head)


def test_a_node_comes_for_the_tasks_of_a_preparation_and_goes_after_it(tmp_path: Path) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(400)))
    # Fewer CPUs than tasks that wait, for which nodes with GPUs must not start.
    data = {"resources": {"CPU": 1, RESOURCE: 1}, "max_workers": 1}
    with heads.growing_head(tmp_path, {"CPU": 0, RESOURCE: 1}, data=data, gpu=GPU_NODES) as port:
        heads.wait_until(lambda: len(heads.raylets(port)) == 1)
        head = heads.raylets(port)
        prepare = heads.headway_on(
            port, "data", "prepare", str(lines), "--output", str(tmp_path / "rows"), "--row-length", "16",
            "--part-mb", "0.002",
        )  # fmt: skip
        with prepare:
            try:
                heads.wait_until(lambda: len(heads.raylets(port)) == 2, prepare)
                shown, _ = prepare.communicate(timeout=300)
                assert "gpu" not in heads.status(port)
            except BaseException:
                print(heads.status(port))
                raise
            finally:
                prepare.kill()
        assert prepare.returncode == 0, shown
        assert len(os.listdir(tmp_path / "rows")) > 3
        heads.wait_until(lambda: heads.raylets(port) == head)


@ray.remote
class Busy:
    """Holds CPUs."""

    def there(self) -> None:
        """Return when it has them."""


def slowly(rows: dict[str, Any]) -> dict[str, Any]:
    """Note the node."""
    time.sleep(0.01)
    return {**rows, "node": [ray.get_runtime_context().get_node_id()] * len(rows["id"])}


def nodes_of_batches(stream: ParquetStream) -> Iterator[str]:
    """Yield the node that made the last row of each batch; check that each epoch has each row once."""
    epoch = 0
    while True:
        seen: list[int] = []
        for batch in stream.epoch(epoch):
            columns = batch.micro_batches[0]
            seen += columns["id"].tolist()
            yield columns["node"][-1]
        assert sorted(seen) == list(range(ROWS))
        epoch += 1


def test_reading_moves_to_a_data_node_that_comes_and_back_when_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All CPUs of the other nodes are taken, as by training workers."""
    caplog.set_level(logging.INFO, "headway.datasets")
    # Small, so that an execution is soon followed by the next one.
    monkeypatch.setattr(engines, "_TASK_BYTES", 1000)
    write(tmp_path / "data/rows.parquet", range(ROWS))
    with machines(monkeypatch, 1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            (head,) = (each["NodeID"] for each in ray.nodes() if "node:__internal_head__" in each["Resources"])
            (plain,) = (each["NodeID"] for each in ray.nodes() if each["NodeID"] != head)
            busy = Busy.options(num_cpus=1).remote()  # type: ignore[attr-defined]
            ray.get(busy.there.remote())

            stream = ParquetStream(tmp_path / "data", transforms=[slowly], engine="ray", shards=8)
            stream.setup(shard_info(global_batch_size=64))
            with closing(nodes_of_batches(stream)) as batches:
                # Without a data node: on the node with the busy CPU, not on the head, and nothing is reserved.
                assert {next(batches) for _ in range(20)} == {plain}
                assert not ray.util.placement_group_table()
            stream.close()

            added = cluster.add_node(num_cpus=2, resources={RESOURCE: 2})
            stream.setup(shard_info(global_batch_size=64))
            with closing(nodes_of_batches(stream)) as batches:
                taken = placed_groups()
                assert {next(batches) for _ in range(20)} == {added.node_id}
                assert ray.available_resources().get("CPU", 0) == 0
                # These are not the workers of a run.
                assert taken == placed_groups() == set()
                cluster.remove_node(added, allow_graceful=False)
                heads.wait_until(lambda: next(batches) == plain)
                # A node that takes its place: the reservation is made again.
                again = cluster.add_node(num_cpus=2, resources={RESOURCE: 2})
                heads.wait_until(lambda: next(batches) == again.node_id)
            stream.close()
            assert {each["state"] for each in ray.util.placement_group_table().values()} == {"REMOVED"}
            heads.wait_until(lambda: ray.available_resources().get("CPU", 0) == 2)
        finally:
            ray.shutdown()
    shares = "no CPU of a data node (resource 'data') is free for reading: reading tasks share the CPUs of other nodes"
    there = "reading tasks run on 1 data node"
    # How many more there are depends on when the loss is noticed.
    assert [message for message in caplog.messages if "reading tasks" in message][:2] == [shares, there]
