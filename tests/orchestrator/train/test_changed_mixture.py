"""The record of a run, `runs show` and the report list a change of the weights of its mixture."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.datasets.mixture import Mixture
from headway.datasets.sources import Parquet
from headway.datasets.stream import Stream
from headway.orchestrator import Experiment, Run, fit
from headway.orchestrator.cli.show import print_run
from headway.orchestrator.reports.run import write_report
from tests.on_ray import OnRay, OnRayConfig, write_rows

pytestmark = [pytest.mark.ray, pytest.mark.extended]


@dataclass(frozen=True, kw_only=True)
class MixedConfig(OnRayConfig):
    web: float = 0.75


class Mixed(OnRay):
    def configure_dataloaders(self) -> Any:
        config: Any = self.config
        data = Parquet(config.data)
        mixture = Mixture({"web": (data, config.web), "code": (data, 1 - config.web)}, rows_per_epoch=640)
        return Stream(mixture, shards=8)


def test_a_change_is_recorded_and_listed(ray_session: None, tmp_path: Path, capsys: Any) -> None:
    data = write_rows(tmp_path / "rows", 64)

    def start(steps: int, **options: Any) -> Experiment:
        config = MixedConfig(data=data, max_steps=steps, global_batch_size=16, evaluate_every=None, **options)
        return Experiment(name="run", trainer=Mixed, config=config, storage=str(tmp_path / "runs"))

    fit(start(4))
    result = fit(start(8, web=0.5), accept_changes=True)
    line = "mixture weights from step 4 (sample 64) on: web 0.75, code 0.25 -> web 0.5, code 0.5"
    record = Run(result.run_dir).record
    assert record.data["changes"] == [line]
    assert "config.web: 0.75 -> 0.5" in record.changes
    print_run("run", str(tmp_path / "runs"))
    assert line in capsys.readouterr().out
    report = write_report("run", str(tmp_path / "runs"))
    assert html.escape(line) in Path(report).read_text()
