"""A `ray.data.Dataset` as the data of a run: each row is read by one rank, by `fit` and inside a `TorchTrainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import ray.data
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from headway.datasets.formats.ray_dataset import RayDataset
from headway.orchestrator import Experiment, Run, Scaling, fit, train_loop
from tests.on_ray import OnRay, OnRayConfig, rows_seen, write_rows

pytestmark = pytest.mark.ray


class OnRayData(OnRay):
    """Reads 64 rows, filtered to 48, and evaluates on all of them."""

    def configure_dataloaders(self) -> Any:
        rows = ray.data.read_parquet(self.config.data)
        some = rows.map_batches(lambda table: table.filter(pc.field("id") < 48), batch_format="pyarrow")
        return RayDataset(some), RayDataset(rows)


class OnDatasetShard(OnRay):
    """Reads what the `TorchTrainer` was given."""

    def configure_dataloaders(self) -> Any:
        return RayDataset(ray.train.get_dataset_shard("train"))


def experiment(folder: Path, trainer: type[OnRay], **options: Any) -> Experiment:
    config = OnRayConfig(data=write_rows(folder / "rows", 64), max_epochs=2, global_batch_size=16, micro_batch_size=4)
    return Experiment(name="run", trainer=trainer, config=config, storage=str(folder / "runs"), **options)


def check(run_dir: str, *, rows: int) -> None:
    """Both ranks together see each row once in each epoch."""
    ranks = [rows_seen(run_dir, rank) for rank in range(2)]
    steps = rows // 16
    assert [len(rank) for rank in ranks] == [2 * steps] * 2
    for epoch in range(2):
        ids = [row for rank in ranks for step, own in rank.items() if step // steps == epoch for row in own]
        assert sorted(ids) == list(range(rows))


def test_fit_divides_a_dataset_among_its_workers(ray_session: None, tmp_path: Path) -> None:
    result = fit(experiment(tmp_path, OnRayData, scaling=Scaling(workers=2)))
    assert result.status == "completed"
    assert result.steps == 6
    assert result.data_guarantee == "epoch"
    assert result.metrics["validation/loss"] > 0
    check(result.run_dir, rows=48)


@pytest.mark.extended
# Ray reads its own snapshot with a deprecated method of pydantic.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torch_trainer_divides_its_datasets(ray_session: None, tmp_path: Path) -> None:
    ours = experiment(tmp_path, OnDatasetShard)
    TorchTrainer(
        train_loop(ours),
        datasets={"train": ray.data.read_parquet(ours.config.data)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    run = Run(ours.run_dir)
    assert run.status == "completed"
    check(ours.run_dir, rows=64)
