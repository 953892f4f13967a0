"""The programs in examples/ports/ learn, also when they are interrupted and started again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.orchestrator import Experiment, plan, resolve
from headway.trainer import TrainerConfig
from headway.trainer.trackers import read_records
from tests.tiny import StopAt

PORTS = Path(__file__).parents[1] / "examples" / "ports"


def _import(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"port_{name}", PORTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        # For models of this size, synchronizing threads costs several times the computation.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _last_evaluation(run_dir: Path) -> dict[str, Any]:
    records = read_records(run_dir / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps)), "no step twice"
    return [record for record in records if any(name.startswith("validation/") for name in record)][-1]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "experiment", "stop", "metric", "low", "high"),
    [
        ("dream_trainer", "classifier", 50, "validation/f1", 0.85, 1.0),
        ("dream_trainer", "gan", 130, "validation/off_circle", 0.0, 0.2),
        ("easydel", "experiment", 30, "validation/loss", 0.0, 0.75),
        ("mini_trainer", "experiment", 70, "validation/top/1", 0.88, 1.0),
    ],
)
def test_an_interrupted_example_goes_on_and_learns(
    name: str, experiment: str, stop: int, metric: str, low: float, high: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    chosen: Experiment = getattr(_import(name), experiment)
    run_dir = tmp_path / "runs" / f"{chosen.name}-alone"
    result = chosen.trainer(chosen.config, run_dir=run_dir, callbacks=[StopAt(stop)]).fit()
    assert (result.status, result.steps) == ("interrupted", stop)

    printed = _run(str(PORTS / f"{name}.py"), experiment, folder=tmp_path)
    (first, *_) = re.findall(r"(?m)^step (\d+)/", printed)
    assert int(first) > stop
    assert "completed" in printed
    last = _last_evaluation(run_dir)
    assert last["step"] > stop
    assert low <= last[metric] <= high
    if name == "easydel":
        assert "after 4 5 6: [7, 8, 9, 0]" in printed
    if name == "mini_trainer":
        images = {step.name: len(list(step.iterdir())) for step in (run_dir / "images").iterdir()}
        assert images == dict.fromkeys(("step-00000001", "step-00000101", "step-00000201"), 8)
        assert (run_dir / "metrics.csv").exists()
        assert (run_dir / "checkpoints" / "step-00000100").exists(), "kept for good"


@pytest.mark.extended
def test_an_interrupted_example_without_a_class_goes_on_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = _import("qurious")
    monkeypatch.setattr(module, "TrainerConfig", lambda **options: TrainerConfig(**{**options, "max_epochs": 2}))
    assert module.regression().epochs == module.classification().epochs == 2
    printed = _run(str(PORTS / "qurious.py"), folder=tmp_path)
    assert re.findall(r"(?m)^epoch (\d+)", printed)[0] == "3"
    assert "early stopping: validation/accuracy has not improved" in printed or "completed after 40" in printed
    assert _last_evaluation(tmp_path / "runs/qurious-regression")["validation/loss"] < 0.1
    assert _last_evaluation(tmp_path / "runs/qurious-classification")["validation/accuracy"] > 0.88


@pytest.mark.parametrize(
    "target", ["dream_trainer.py:classifier", "dream_trainer.py:gan", "easydel.py", "mini_trainer.py"]
)
def test_the_command_finds_and_plans_an_example(target: str) -> None:
    assert "parameters" in str(plan(resolve(str(PORTS / target))))


@pytest.mark.extended
@pytest.mark.ray
def test_the_command_trains_an_example(tmp_path: Path) -> None:
    overrides = ["config.max_steps=40", "config.model.hidden_size=32", "scaling.cpus_per_worker=0.5"]
    _run("-m", "headway.orchestrator", "fit", str(PORTS / "mini_trainer.py"), *overrides, folder=tmp_path)
    run_dir = tmp_path / "runs" / "mini"
    assert _last_evaluation(run_dir)["step"] == 40
    assert json.loads((run_dir / "run.json").read_text())["status"] == "completed"
