"""Real jobs on a real Ray head: the losses of one process, the exit code of the run, and a stop that saves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.orchestrator import Run
from headway.orchestrator.config.target import load_target
from headway.trainer.trackers.jsonl import read_records
from tests import heads

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TARGET = """
import os, time
from dataclasses import dataclass
import torch
from torch import nn
import headway.trainer
from headway.trainer import Trainer, TrainerConfig
from neighbour import scale

@dataclass(frozen=True, kw_only=True)
class LineConfig(TrainerConfig):
    pause_s: float = 0.0
    fail_at: int = -1

class Line(Trainer[LineConfig]):
    def configure_models(self):
        self.model = nn.Linear(4, 1)
    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
    def configure_dataloaders(self):
        x = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
        rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    def on_fit_start(self):
        self.print(f"Headway of {headway.trainer.__file__}, color {os.environ.get('COLOR')}")
    def training_step(self, batch, batch_idx):
        time.sleep(self.config.pause_s)
        if self.global_step == self.config.fail_at:
            raise ValueError("a bad batch")
        return nn.functional.mse_loss(self.model(batch[0]), batch[1]) * scale
"""
SETTINGS = ["config.global_batch_size=8", "config.log_every=1", "scaling.workers=2"]
# A run without limits, which ends only when it is stopped.
LONG = ["config.max_steps=100000", "config.pause_s=0.02"]


@pytest.fixture(scope="module")
def head(warm_workers: None) -> Iterator[str]:
    with heads.head() as address:
        yield address


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "line.py").write_text(TARGET)
    (folder / "neighbour.py").write_text("scale = 0.5\n")
    return folder


def headway(project: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Run the command line with Headway from this checkout, which the head and its nodes do not see."""
    path = os.pathsep.join((str(ROOT / "build/types"), str(ROOT)))
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=project, start_new_session=True,
        env={**heads.environment(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables},
    )  # fmt: skip


def done(process: subprocess.Popen[str], code: int = 0) -> str:
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    print(out)
    assert process.returncode == code, out
    return out


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in read_records(run_dir / "metrics.jsonl") if "train/loss" in row}


def wait_for_step(step: int, run_dir: Path) -> None:
    deadline = time.monotonic() + 200
    while not any(at >= step for at in losses(run_dir)):
        assert time.monotonic() < deadline, f"{run_dir} did not get to step {step}"
        time.sleep(0.1)


def test_a_job_trains_what_one_process_does_and_has_the_exit_code_of_its_run(
    head: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = project.parent / "runs"
    submit = ["submit", "line.py", *SETTINGS, f"storage={storage}", "--address", head]
    failing = headway(project, *submit, "name=failing", "config.max_steps=9", "config.fail_at=2", "scaling.workers=1")
    out = done(
        headway(
            project, *submit, "config.max_steps=9", "--env", "COLOR=blue", "--env", "TOKEN", TOKEN="hush-hush"
        )
    )  # fmt: skip
    assert "color blue" in out
    # The nodes have only the copy of Headway that came with the job.
    assert "py_modules_files" in out
    assert "Traceback" not in out
    run = Run(str(storage / "line"))
    assert (run.status, run.record.steps, run.record.workers) == ("completed", 9, 2)
    # The target is relative to the submitted folder, not its copy on the cluster, so `headway rerun` works here.
    assert run.record.trainer.startswith("line.py:")
    assert not [file for file in storage.rglob("*.*") if file.is_file() and b"hush-hush" in file.read_bytes()]

    monkeypatch.chdir(project)
    line = load_target("line.py")
    assert run.experiment().trainer is line
    assert isinstance(line, type)
    config = sys.modules[line.__module__].LineConfig(max_steps=9, global_batch_size=8, log_every=1)
    line(config, run_dir=project.parent / "alone").fit()
    alone = losses(project.parent / "alone")
    assert sorted(alone) == list(range(1, 10))
    assert losses(storage / "line") == pytest.approx(alone, rel=1e-5)

    out = done(failing, code=1)
    assert out.count("ValueError: a bad batch") >= 1
    assert Run(str(storage / "failing")).status == "failed"

    # The same run with another config.
    refused = done(headway(project, *submit, "config.max_steps=9", "config.pause_s=0.5"), code=2)
    assert "was started with another config" in refused
    listed = done(headway(project, "jobs", "ls", "--address", head)).splitlines()
    rows = {" ".join(line.split()[1:4]) for line in listed[1:]}
    assert {"line succeeded 0", "line failed 2", "failing failed 1"} <= rows


def test_a_job_of_ray_itself_trains_the_same(head: str, project: Path) -> None:
    """As in the documentation, with `ray job submit` and a copy of Headway that comes with the job."""
    storage = project.parent / "runs"
    submit = ["submit", "line.py", *SETTINGS, f"storage={storage}", "--address", head]
    done(headway(project, *submit, "config.max_steps=9"))
    package = project.parent / "headway"
    package.mkdir()
    for part in ("trainer", "datasets", "orchestrator"):
        (package / part).symlink_to(ROOT / part)
    by_hand = subprocess.run(
        [
            str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", head, "--working-dir", ".",
            "--runtime-env-json", json.dumps({"py_modules": [str(package)]}),
            "--", "python", "-m", "headway.orchestrator", "fit", "line.py", *SETTINGS,
            "name=hand", "config.max_steps=9", f"storage={storage}",
        ],
        cwd=project, env=heads.environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert by_hand.returncode == 0, by_hand.stdout + by_hand.stderr
    assert losses(storage / "hand") == losses(storage / "line")


def test_a_stopped_job_has_saved_and_goes_on_when_it_is_submitted_again(head: str, project: Path) -> None:
    storage = project.parent / "runs"
    at = ["--address", head]
    submit = ["submit", "line.py", *SETTINGS, *LONG, f"storage={storage}", *at]
    out = done(headway(project, *submit, "--no-follow"))
    assert out.startswith("line: submitted as line-")
    wait_for_step(20, storage / "line")
    assert "has ended: succeeded, exit code 0" in done(headway(project, "jobs", "stop", "line", "--wait", *at))
    run = Run(str(storage / "line"))
    assert (run.status, run.reason) == ("stopped", "headway runs stop")
    steps = run.record.steps
    assert steps >= 20
    assert str(run.record.last_checkpoint).endswith(f"step-{steps:08d}")
    assert "saving a checkpoint and ending" in done(headway(project, "jobs", "logs", str(storage / "line"), *at))

    following = headway(project, *submit)
    wait_for_step(steps + 20, storage / "line")
    # The follower is interrupted; the job runs on, and is found by the name of its run.
    following.send_signal(signal.SIGINT)
    out = done(following, code=130)
    assert "is still running. To follow it: headway jobs logs line-" in out
    assert "headway jobs stop line-" in out
    assert "Traceback" not in out
    wait_for_step(max(losses(storage / "line")) + 20, storage / "line")

    # Ray's own command to stop a job saves a checkpoint, too.
    job = out.split("submitted as ")[1].split(";")[0]
    stop = [str(Path(sys.executable).parent / "ray"), "job", "stop", job, "--address", head, "--no-wait"]
    subprocess.run(stop, env=heads.environment(), capture_output=True, timeout=120, check=True)
    assert f"resuming from step {steps:,}" in done(headway(project, "jobs", "logs", job, "--follow", *at), code=143)
    run = Run(str(storage / "line"))
    assert (run.status, run.reason) == ("interrupted", "SIGTERM")
    assert run.record.steps > steps
    assert str(run.record.last_checkpoint).endswith(f"step-{run.record.steps:08d}")


def test_a_sweep_is_a_job_and_needs_no_python_on_the_path_of_the_head(warm_workers: None, project: Path) -> None:
    (project / "line.py").write_text(
        f"{TARGET}\nfrom headway.orchestrator import Choice, Search\n"
        'search = Search(metric="train/loss", algorithm="grid", space={"config.pause_s": Choice([0.0, 0.001])})\n'
    )
    (project / "secrets.env").write_text("COLOR=green\n")
    # A python without Ray, as that of the system.
    binaries = project.parent / "bin"
    binaries.mkdir()
    (binaries / "python").symlink_to("/usr/bin/false")
    storage = project.parent / "runs"
    with heads.head(PATH=f"{binaries}:/usr/bin:/bin") as head:
        address = head.removeprefix("http://")
        done(
            headway(
                project, "submit", "--sweep", "line.py", "config.global_batch_size=8", "config.max_steps=9",
                f"storage={storage}", "--env-file", "secrets.env", "--entrypoint-num-cpus", "0.5", "--address", address,
            )
        )  # fmt: skip
        shown = done(headway(project, "jobs", "show", "line", "--address", address))
    assert "succeeded, exit code 0" in shown
    assert "headway.orchestrator sweep line.py" in shown
    assert "COLOR" in shown
    assert "green" not in shown
    trials = [Run(str(storage / "line" / f"trial-{index:03d}")) for index in range(2)]
    assert [(trial.status, trial.record.steps) for trial in trials] == [("completed", 9)] * 2


def test_data_is_prepared_by_a_job_with_a_tokenizer_of_the_current_directory(head: str, project: Path) -> None:
    (project / "mine.py").write_text("def words(text):\n    return [len(word) for word in text.split()]\n")
    texts = [{"text": f"document {number} " * 9} for number in range(200)]
    source = project.parent / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in texts))
    output = project.parent / "tokens"
    command = (
        "data", "prepare", str(source), "-o", str(output), "--tokenizer", "mine.py:words", "--part-mb", "0.002",
        "--tasks", "3", "--address", head,
    )  # fmt: skip
    out = done(headway(project, *command))
    assert f"{output} prepared: 200 rows, 3,600 tokens" in out
    assert len(list(output.glob("*.parquet"))) > 8
    assert "already prepared" in done(headway(project, *command))
