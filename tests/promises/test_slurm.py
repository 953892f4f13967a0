"""The batch script for Slurm as shipped, in a real Slurm: checkpoint before the time limit, requeue, and resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm import Slurm, can_isolate, slurm, why_not

pytestmark = [
    pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=f"no Slurm: {why_not()}"),
]  # fmt: skip

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "orchestrator/cluster/templates/slurm.sbatch"
STEPS = 600
# SLOW makes updates so slow that the first start cannot complete within the limit; a requeued one is fast.
PROGRAM = """
import os, time
from dataclasses import dataclass
import torch
from torch import nn
from headway.trainer import Trainer, TrainerConfig

PAUSE_S = 0.25 if "SLOW" in os.environ and "SLURM_RESTART_COUNT" not in os.environ else 0

class Line(Trainer[TrainerConfig]):
    def configure_models(self):
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
    def configure_dataloaders(self):
        x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
        rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    def training_step(self, batch, batch_idx):
        time.sleep(PAUSE_S)
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

if __name__ == "__main__":
    config = TrainerConfig(max_steps=int(os.environ.get("STEPS", 300)), global_batch_size=8, log_every=10)
    result = Line(config, run_dir="runs/digits").fit()
    print("ended:", result.status, flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as started:
        yield started


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "train.sbatch").write_text(TEMPLATE.read_text())
    return tmp_path


def environment() -> dict[str, str]:
    binaries = Path(sys.executable).parent
    there = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
    return {
        **there,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "build/types"), str(ROOT))),
    }


def submit(cluster: Slurm, project: Path, *options: str, **variables: str) -> str:
    """Submit the script; options of sbatch take precedence over the script's lines, as if those had been edited."""
    return cluster.run(
        "sbatch", "--parsable", "--gpus-per-node=2", "--cpus-per-task=2", *options, "train.sbatch",
        cwd=project, **{**environment(), **variables},
    ).strip()  # fmt: skip


def wait_for(cluster: Slurm, number: str, condition: Callable[[dict[str, str]], bool], project: Path) -> dict[str, str]:
    deadline = time.monotonic() + 600
    while not condition(job := cluster.job(number)):
        output = "".join(each.read_text() for each in project.glob("*.out"))
        assert time.monotonic() < deadline, f"{job}\n{output}\n{cluster.logs()}"
        time.sleep(0.5)
    return job


def has_ended(job: dict[str, str]) -> bool:
    return job["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


def digest(project: Path) -> str:
    command = ["headway.orchestrator", "--storage", "runs", "checkpoints", "digest", "digits", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project, env=environment(), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ((name, value),) = json.loads(done.stdout)["digests"].items()
    assert name == f"step-{STEPS:08}"
    return str(value)


def steps(project: Path) -> list[int]:
    log = project / "runs/digits/metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def test_a_job_saves_before_its_limit_and_resumes_after_the_requeue(
    cluster: Slurm, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The first start cannot train 600 steps in its minute; the second, of which a machine may need half to start, can.
    number = submit(cluster, project, "--time=00:02:00", "--signal=B:USR1@60", SLOW="1", STEPS=str(STEPS))
    job = wait_for(cluster, number, has_ended, project)
    output = (project / f"digits-{number}.out").read_text()
    print(output)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), output
    assert f"job {number} saves a checkpoint, and goes back to the queue" in output
    assert output.count("ended: completed") == 2

    undisturbed = tmp_path_factory.mktemp("undisturbed")
    (undisturbed / "train.py").write_text(PROGRAM)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=undisturbed, env={**environment(), "OMP_NUM_THREADS": "1", "STEPS": str(STEPS)}, timeout=300, check=True,
    )  # fmt: skip
    assert digest(project) == digest(undisturbed)
    logged = steps(project)
    assert logged == sorted(set(logged)), "no update is repeated: the first start has saved when it was stopped"
    assert logged[-1] == STEPS


@pytest.mark.ray
@pytest.mark.parametrize("way", ["2. One node", "3. Several nodes"])
def test_a_job_with_ray_saves_on_the_signal_and_resumes(cluster: Slurm, project: Path, way: str) -> None:
    if way.startswith("3") and not can_isolate():
        pytest.skip("no process namespaces: `ray symmetric-run` would stop all Rays of this machine")
    (project / "train.sbatch").write_text(with_way(way, project / "runs"))
    number = submit(
        cluster, project, SLOW="1", HEADWAY_OVERRIDES="config.max_steps=300 config.log_every=1"
    )  # fmt: skip
    wait_for(cluster, number, lambda job: bool(steps(project)), project)
    # As Slurm sends it before the limit.
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    job = wait_for(cluster, number, has_ended, project)
    output = (project / f"digits-{number}.out").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), output
    assert "resuming from step" in output
    assert steps(project) == list(range(1, 301)), "no update is lost or repeated"


def with_way(way: str, storage: Path) -> str:
    """Return the script with another way to launch, without GPUs and with another storage."""
    lines = TEMPLATE.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"# {way}"))
    begin = next(number for number in range(begin, len(lines)) if lines[number].startswith("# launch()"))
    end = next(number for number in range(begin, len(lines)) if not lines[number])
    chosen = "\n".join(line.removeprefix("# ") for line in lines[begin:end])
    for before, after in (("/shared/runs", str(storage)), ("scaling.gpus_per_worker=1", "scaling.cpus_per_worker=0.5")):
        assert before in chosen
        chosen = chosen.replace(before, after)
    return "\n".join([*lines[:begin], chosen, *lines[end:], ""])


def test_an_error_and_scancel_end_the_job_for_good(cluster: Slurm, project: Path) -> None:
    failing = submit(cluster, project, "--job-name=failing", STEPS="no number")
    job = wait_for(cluster, failing, has_ended, project)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")

    cancelled = submit(cluster, project, SLOW="1")
    wait_for(cluster, cancelled, lambda job: bool(steps(project)), project)
    cluster.run("scancel", cancelled)
    job = wait_for(cluster, cancelled, has_ended, project)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
