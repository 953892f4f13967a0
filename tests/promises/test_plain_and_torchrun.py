"""One file trains in a plain process and under torchrun, without Ray and without a GPU, to the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example, without dropout, which draws other numbers on other ranks; and a Ray that cannot be imported."""
    text = DIGITS.read_text()
    for before, after in (
        ("nn.Dropout(0.1)", "nn.Dropout(0.0)"),
        ("max_epochs=5", "max_epochs=2, log_every='10 steps'"),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "digits.py").write_text(text)
    (tmp_path / "shim" / "ray").mkdir(parents=True)
    (tmp_path / "shim" / "ray" / "__init__.py").write_text("raise ImportError('Ray is not installed')\n")
    return tmp_path


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "NCCL", "RAY"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(folder / "shim"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _losses(run_dir: Path) -> dict[int, dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "train/accuracy", "validation/loss", "validation/accuracy", "lr", "grad_norm")
    return {record["step"]: {name: record[name] for name in names if name in record} for record in records}


def test_alone_and_on_two_ranks_the_losses_are_equal_I1_K5(folder: Path) -> None:
    shim = _python(folder, "-c", "import ray")
    assert "Ray is not installed" in shim.stderr

    alone = _python(folder, "digits.py")
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("completed: "), alone.stdout
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

    # What two ranks have trained, one process takes up, and finds that nothing is left to do.
    again = _python(folder, "digits.py")
    assert again.stdout.startswith("completed: ")
    assert _losses(folder / "runs" / "digits-alone") == two


def test_an_error_is_the_exit_code_of_the_program(folder: Path) -> None:
    (folder / "runs").touch()
    done = _python(folder, "digits.py")
    assert done.returncode == 1
    assert "headway.trainer.errors.CheckpointError: cannot write to" in done.stderr
    assert "Not a directory" in done.stderr
