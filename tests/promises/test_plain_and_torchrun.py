"""One file trains in a plain process and under torchrun, without Ray and without a GPU, to the same losses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

LOAD_DIGITS = """
from types import SimpleNamespace
import numpy

def load_digits():
    table = numpy.loadtxt({table!r}, delimiter=",")
    return SimpleNamespace(data=table[:, :-1], target=table[:, -1].astype(int))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example without dropout, which differs between ranks, and with a Ray that cannot be imported."""
    text = DIGITS.read_text()
    for before, after in (
        ("nn.Dropout(0.1)", "nn.Dropout(0.0)"),
        ("max_epochs=5", "max_epochs=2, log_every='10 steps'"),
        # In each process, the import of scikit-learn would take as long as that of torch.
        ("from sklearn.datasets import", "from digits_of_scikit_learn import"),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "digits.py").write_text(text)
    (tmp_path / "shim" / "ray").mkdir(parents=True)
    sklearn = importlib.util.find_spec("sklearn")
    assert sklearn is not None
    assert sklearn.origin is not None
    table = Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz"
    (tmp_path / "shim" / "digits_of_scikit_learn.py").write_text(LOAD_DIGITS.format(table=str(table)))
    (tmp_path / "shim" / "ray" / "__init__.py").write_text("raise ImportError('Ray is not installed')\n")
    return tmp_path


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "NCCL", "RAY"))}
    path = [str(folder / "shim"), str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def _losses(run_dir: Path) -> dict[int, dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "train/accuracy", "validation/loss", "validation/accuracy", "lr", "grad_norm")
    return {record["step"]: {name: record[name] for name in names if name in record} for record in records}


def test_alone_and_on_two_ranks_the_losses_are_equal(folder: Path) -> None:
    shim = _python(folder, "-c", "import ray")
    assert "Ray is not installed" in shim.stderr

    alone = _python(folder, "digits.py")
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.splitlines()[-1].startswith("completed: "), alone.stdout
    run_dir = (folder / "runs" / "digits-alone").rename(folder / "runs" / "alone")

    ranks = _python(folder, *TORCHRUN, "digits.py")
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout.count("completed: ") == 2, "the program prints on each rank, as it would without us"
    one, two = _losses(run_dir), _losses(folder / "runs" / "digits-alone")
    assert one.keys() == two.keys()
    assert len(one) >= 6
    assert "validation/accuracy" in one[max(one)]
    for step, record in one.items():
        assert two[step] == pytest.approx(record, rel=1e-4), step

    # One process resumes the run of two ranks, and finds nothing left to do.
    again = _python(folder, "digits.py")
    nothing, last = again.stdout.splitlines()
    assert nothing.startswith("nothing is left to train: max_epochs=2 reached at step 48")
    assert last.startswith("completed: ")
    assert _losses(folder / "runs" / "digits-alone") == two


def test_an_error_is_the_exit_code_of_the_program(folder: Path) -> None:
    (folder / "runs").touch()
    done = _python(folder, "digits.py")
    assert done.returncode == 1
    assert "headway.trainer.errors.CheckpointError: cannot write to" in done.stderr
    assert "Not a directory" in done.stderr


AFTER_FIT = """
import sys
import torch
from headway.trainer import ConfigError, ParallelConfig, World
from tests.tiny import TinyConfig, TinyTrainer

strategy, outlives = sys.argv[1:]
config = TinyConfig(max_epochs=1, parallel=ParallelConfig(strategy=strategy))

def main(**options):
    trainer = TinyTrainer(config, run_dir=f"runs/{strategy}-{outlives}", **options)
    result = trainer.fit()
    assert torch.distributed.is_initialized() == (outlives == "outlives")
    metrics = trainer.evaluate()
    assert metrics["validation/loss"] == result.metrics["validation/loss"], (metrics, result.metrics)
    trainer.train_epoch()
    again = trainer.fit()
    assert (again.status, again.epochs) == ("completed", 2)
    again = trainer.fit()
    assert (again.status, again.epochs) == ("completed", 2)
    trainer.print(f"fitted again after {again.steps}")

if outlives == "outlives":
    with World.from_environment() as world:
        main(world=world)
    assert not torch.distributed.is_initialized()
elif strategy == "fsdp":
    try:
        main()
    except ConfigError as error:
        print(error)
else:
    main()
"""


@pytest.mark.parametrize(
    ("strategy", "outlives", "says"),
    [
        pytest.param("ddp", "", "fitted again after 12", marks=pytest.mark.extended),
        pytest.param("fsdp", "outlives", "fitted again after 12", marks=pytest.mark.extended),
        pytest.param("fsdp", "", "Pass the trainer a world that outlives fit", marks=pytest.mark.extended),
    ],
)
def test_a_trainer_is_of_use_after_fit(folder: Path, strategy: str, outlives: str, says: str) -> None:
    """`fit` destroys the process group that the trainer created, and a later call creates another."""
    (folder / "after.py").write_text(AFTER_FIT)
    done = _python(folder, *TORCHRUN, "after.py", strategy, outlives)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert "destroy_process_group" not in done.stderr
