"""Rerun: the same weights as the recorded run, and every difference reported before the start."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from headway.orchestrator import Run, fit, rerun, resolve
from headway.orchestrator.cli.main import main
from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.runs.checkpoints import RunCheckpoints
from headway.orchestrator.runs.compare import compare_runs, recorded_facts
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.rerun import _start_of
from headway.orchestrator.runs.resume import ResumeOptions
from headway.trainer.errors import ConfigError
from tests.on_ray import write_rows
from tests.orchestrator.runs.test_run import experiment
from tests.tiny import TinyTrainer

TRAINER = """
from dataclasses import dataclass

import torch
from torch import nn

from headway.datasets.stream import ParquetStream
from headway.trainer import Trainer, TrainerConfig

@dataclass(frozen=True, kw_only=True)
class DropConfig(TrainerConfig):
    data: str = "data/rows"
    rate: float = 0.1

class Drop(Trainer[DropConfig]):
    def configure_models(self):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.rate)

    def configure_dataloaders(self):
        return ParquetStream(self.config.data, engine="threads")

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
"""

SETTINGS = ["name=one", "config.max_steps=9", "config.global_batch_size=16"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a folder with a trainer and its data, and make it the current directory."""
    folder = tmp_path / "home"
    write_rows(folder / "data/rows", 96)
    (folder / "drop.py").write_text(TRAINER)
    monkeypatch.chdir(folder)
    before, path = set(sys.modules), list(sys.path)
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("headway_file_"):
            del sys.modules[name]


def begun(home: Path, **changes: object) -> Run:
    """Create a run that has only a record."""
    run = open_run(resolve("drop.py", [*SETTINGS, f"storage={home.parent}/runs"])).run
    run.update(status="completed", data={"guarantee": "exact", "fingerprint": "of then"})
    record = json.loads(run.folder.read("run.json") or "")
    run.folder.write("run.json", json.dumps({**record, **changes}))
    return Run(run.run_dir)


def again(home: Path, *overrides: str, **options: object) -> tuple[str, str]:
    """Return the output and the error of a rerun that is refused before it starts."""
    screen = io.StringIO()
    display = RunConsole(Console(file=screen, highlight=False, soft_wrap=True))
    with pytest.raises(ConfigError) as refused:
        rerun("one", f"{home.parent}/runs", overrides=overrides, display=display, **options)  # type: ignore[arg-type]
    assert not (home.parent / "runs/one-rerun").exists()
    return screen.getvalue(), str(refused.value)


@pytest.mark.ray
def test_the_record_of_a_run_suffices_for_the_same_weights(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rerun is started in another folder; the first one, like that of a job, no longer exists."""
    runs = f"{tmp_path}/runs"
    overrides = [*SETTINGS, "config.seed=3", "config.rate=0.05", f"storage={runs}"]
    first = fit(resolve("drop.py", overrides))
    assert Run(first.run_dir).record.data["fingerprint"]
    monkeypatch.setenv("HEADWAY_OVERRIDES", "config.rate=0.9")  # of another command
    shutil.copytree(home, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.rmtree(home)
    with pytest.raises(SystemExit) as ended:
        main(["rerun", "one", "--storage", runs, "--strict"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "repeating one as one-rerun: no differences from its record" in shown
    digests = [
        RunCheckpoints.of(name, runs).digest(RunCheckpoints.of(name, runs).entries[-1]) for name in ("one", "one-rerun")
    ]
    assert digests[0] == digests[1]
    assert f"the same weights as one at step 9, bit for bit: {digests[0]}" in shown
    speeds = {"elapsed_s", "samples_per_s", "step_s", "data_wait", "paused_s"}
    assert {field for _, field, _, _ in compare_runs("one", "one-rerun", runs)} <= speeds

    # The same command again would train nothing, and compare what was trained before the code has changed.
    with pytest.raises(ConfigError, match="one-rerun is a finished run.* as in name=one-rerun-2"):
        rerun("one", runs)

    # Another seed gives other weights, which is said; and a difference that was asked for is named.
    screen = io.StringIO()
    display = RunConsole(Console(file=screen, highlight=False, soft_wrap=True))
    rerun("one", runs, overrides=["name=two", "config.seed=4"], strict=True, display=display)
    assert "  config config.seed: 3 -> 4\n" in screen.getvalue()
    assert "different weights than one at step 9: " in screen.getvalue()


def test_other_data_is_refused_unless_it_is_accepted(home: Path) -> None:
    begun(home)
    shown, error = again(home)
    assert "  data fingerprint: of then -> " in shown
    assert "the training data differs from that of one: data fingerprint: of then -> " in error
    assert "--accept-changes" in error
    # Then what is wrong next is said.
    _, error = again(home, "scaling.workers=4096", accept_changes=True)
    assert "4096 workers" in error


def test_other_code_and_other_packages_are_named_and_strictly_refused(home: Path) -> None:
    record = begun(home, versions={"python": "2.7", "torch": "0.1"}).record
    (home / "drop.py").write_text(TRAINER.replace("cross_entropy(", "cross_entropy(0.5 * "))
    shown, error = again(home, strict=True, accept_changes=True)
    lines = shown.splitlines()
    assert lines[0] == "repeating one as one-rerun"
    assert "  versions python: 2.7 -> " in shown
    assert f"  code file: {record.code['sha256'][:16]} -> " in shown
    methods = [line.split()[1] for line in lines if line.startswith("  code ") and "()" not in line]
    assert "training_step:" in methods
    assert "configure_models:" not in methods
    assert error.startswith("--strict: one ran with different code or packages: ")
    assert "training_step" in error
    assert "versions torch: 0.1 -> " in error


def test_a_trainer_that_is_not_found_is_said_with_where_it_was(home: Path) -> None:
    begun(home, git={"commit": "c0ffee", "dirty": True}, working_dir="/tmp/gone", hardware={"host": "there"})
    (home / "drop.py").rename(home / "moved.py")
    _, error = again(home)
    assert f"there is no file {home}/drop.py and no /tmp/gone/drop.py. one was started in /tmp/gone on there" in error
    assert "at the commit c0ffee" in error
    assert "--target file.py:Name" in error
    # Found where it is said to be, it is asked for the data.
    _, error = again(home, target="moved.py:Drop")
    assert "the training data differs from that of one" in error


def test_of_two_files_of_one_name_the_one_with_the_recorded_content_is_taken(home: Path, tmp_path: Path) -> None:
    run = begun(home)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/drop.py").write_text(TRAINER + "\nclass Another(Drop):\n    pass\n")
    os.chdir(tmp_path / "other")
    experiment = run.experiment()
    assert sys.modules[experiment.trainer.__module__].__file__ == str(home / "drop.py")
    shutil.rmtree(home)
    assert sys.modules[run.experiment().trainer.__module__].__file__ == str(tmp_path / "other/drop.py")


def test_a_trainer_that_another_file_imports_from_beside_it_is_found(home: Path) -> None:
    """As in a sweep whose file imports that of the trainer by a name that other processes cannot import."""
    (home / "parts").mkdir()
    (home / "drop.py").rename(home / "parts/dropping.py")
    (home / "parts/main.py").write_text("from dropping import Drop, DropConfig\n")
    before = list(sys.path)
    experiment = resolve("parts/main.py:Drop", [*SETTINGS, f"storage={home.parent}/runs"])
    run = open_run(experiment).run
    assert run.record.trainer == "dropping:Drop"
    for folder in (home, home.parent):
        os.chdir(folder)
        sys.path[:] = before
        del sys.modules["dropping"]
        sys.modules.pop("headway_file_main", None)
        assert run.experiment().trainer.__name__ == "Drop"
        assert sys.modules["dropping"].__file__ == str(home / "parts/dropping.py")
    del sys.modules["dropping"]


def test_data_that_is_not_here_is_said_with_the_folder_that_paths_are_meant_from(home: Path) -> None:
    run = begun(home)
    os.chdir(home.parent)
    _, error = again(home)
    assert "data/rows does not exist" in error
    assert f"relative paths refer to {run.record.working_dir}" in error
    # Perhaps the workers see it. What is not known to be equal is strictly refused.
    shown, error = again(home, accept_changes=True, strict=True)
    assert "  data fingerprint: of then -> -\n" in shown
    assert "--strict: one ran with different code or packages: data guarantee: exact -> -" in error


def test_a_config_that_changed_along_the_way_is_told(home: Path) -> None:
    begun(home).update(status="interrupted")
    overrides = [*SETTINGS, "config.rate=0.2", f"storage={home.parent}/runs"]
    open_run(resolve("drop.py", overrides), accept_changes=True).run.update(status="completed")
    shown, _ = again(home)
    assert "the config of one was changed between starts; repeated with the last one: config.rate: 0.1 -> 0.2" in shown


def test_a_run_that_began_from_another_one_is_not_begun_from_nothing(home: Path) -> None:
    run, base = begun(home), home / "base/checkpoints/step-00000007"

    def add(event: str, **details: object) -> None:
        line = {"time": time.time(), "event": event, **details}
        run.folder.append("events.jsonl", json.dumps(line))

    # Written by an earlier version: with counters, or with the weights alone.
    add("driver_started")
    assert _start_of(run) == ResumeOptions()
    run.update(resumed_from=str(base))
    add("training", step=0)
    _, error = again(home)
    assert f"one started at step 0 from a checkpoint of another run ({base}), which is gone" in error

    # Now a start says what it was asked for.
    add("driver_started", resume=str(base), restore=["models"])
    add("driver_started", resume=f"{run.run_dir}/checkpoints/step-00000003")
    with pytest.raises(ConfigError, match="one started from the checkpoint .*step-00000007, which does not exist"):
        _start_of(run)
    base.mkdir(parents=True)
    (base / "manifest.json").write_text("{}")
    assert _start_of(run) == ResumeOptions(resume=str(base), restore=("models",))
    add("driver_started", resume="never")
    assert _start_of(run) == ResumeOptions()


def test_a_run_whose_checkpoint_is_damaged_can_still_be_compared(tmp_path: Path) -> None:
    found = experiment(tmp_path)
    open_run(found)
    result = TinyTrainer(found.config, run_dir=found.run_dir).fit()
    assert recorded_facts("tiny", str(tmp_path))["result"]["weights"]
    Path(result.last_checkpoint or "", "state.json").unlink()
    facts = recorded_facts("tiny", str(tmp_path))
    assert "weights" not in facts["result"]
    assert facts["data"], "the rest of what it says is still told"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("none", [], "there is no run 'none'"),
        ("one", ["name=one"], "name=one is the run itself: use another name"),
        ("one", ["config.rat=1"], "did you mean config.rate?"),
    ],
)
def test_what_cannot_be_meant_is_refused(home: Path, name: str, overrides: list[str], message: str) -> None:
    begun(home)
    with pytest.raises(ConfigError) as refused:
        rerun(name, f"{home.parent}/runs", overrides=overrides)
    assert message in str(refused.value)


def test_a_sweep_is_no_run(home: Path) -> None:
    (home.parent / "runs/many").mkdir(parents=True)
    (home.parent / "runs/many/sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="many is a sweep: rerun one of its trials, such as many/trial-000"):
        rerun("many", f"{home.parent}/runs")
