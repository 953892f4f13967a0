"""SIGTERM and SIGINT end a run with a checkpoint of the current update, in any phase and however often they arrive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headway.trainer import Callback, CheckpointConfig, Trainer, World
from headway.trainer.checkpoints import storage
from tests.distributed import forking
from tests.tiny import Rows, StopAt, TinyConfig, TinyTrainer, weights

STEPS = 40
CONFIG = TinyConfig(
    max_steps=STEPS,
    global_batch_size=16,
    dropout=0.2,
    evaluate_every="8 steps",  # type: ignore[arg-type]
    log_every="5 steps",  # type: ignore[arg-type]
    checkpoint=CheckpointConfig(every=None),
)


class Patient(TinyTrainer):
    """Has a slow evaluation."""

    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0], DataLoader(Rows(64), batch_size=1)


class Announces(Callback):
    """Reports the phases of the run to the other process, and gives it time to act."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        self._at(trainer, "training", trainer.global_step == 5)

    def on_evaluation_batch_start(self, trainer: Trainer[Any], batch: Any, batch_idx: int) -> None:
        self._at(trainer, "evaluating", trainer.global_step == 8 and batch_idx == 3)

    def _at(self, trainer: Trainer[Any], doing: str, here: bool) -> None:
        if here:
            self.tell.send(doing)
        # On a busy machine, the other process needs a moment to send its signals.
        time.sleep(0.5 if here else 0.005)


def _run(run_dir: str, tell: Any, save_at: int | None) -> None:
    torch.set_num_threads(1)

    def save(trainer: Trainer[Any], epoch: int, metrics: Any) -> None:
        if epoch == save_at:
            trainer.request_save()

    commit = storage._Local.commit

    def slow(self: Any, *args: Any) -> None:
        if not told:
            told.append("saving")
            tell.send("saving")
            time.sleep(0.5)
        commit(self, *args)

    told: list[str] = []
    if save_at is not None:
        storage._Local.commit = slow  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGTERM)
    trainer = Patient(CONFIG, run_dir=run_dir, world=World.single("cpu"), callbacks=[Announces(tell), save])
    result = trainer.fit()
    assert signal.getsignal(signal.SIGTERM) is before, "the handlers are as they were"
    tell.send(("ended", result.status, result.reason, result.steps, trainer.seen))


@pytest.fixture(scope="module")
def reference() -> Patient:
    trainer = Patient(CONFIG, world=World.single("cpu"))
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("doing", "step", "signals"),
    [
        ("training", 5, ["SIGTERM"]),
        ("training", 5, ["SIGINT", "SIGINT"]),
        ("training", 5, ["SIGINT", "SIGTERM"]),
        ("evaluating", 8, ["SIGINT"]),
        ("evaluating", 8, ["SIGTERM", "SIGTERM"]),
        ("saving", 6, ["SIGTERM", "SIGTERM"]),
    ],
)
def test_nothing_is_lost(tmp_path: Path, reference: Patient, signals: list[str], doing: str, step: int) -> None:
    """A terminal and `torchrun` may both send one: the second within a second has no effect."""
    # In a separate process, whose main thread receives the signals.
    processes = forking()
    here, there = processes.Pipe()
    process = processes.Process(target=_run, args=(str(tmp_path), there, 1 if doing == "saving" else None))
    process.start()
    try:
        while here.recv() != doing:
            pass
        for name in signals:
            os.kill(process.pid, getattr(signal, name))  # type: ignore[arg-type]
        told: Any = ("",)
        while told[0] != "ended":
            assert here.poll(120), "it hangs"
            told = here.recv()
        process.join(120)
        assert process.exitcode == 0
    finally:
        process.kill()
    _, status, reason, steps, seen = told
    assert (status, reason in signals) == ("interrupted", True)
    # Training continues while a checkpoint is saved.
    assert 0 <= steps - step <= (6 if doing == "saving" else 2)
    assert len(seen) == 2 * steps, "two micro-batches an update"
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert f"step-{steps:08d}" in names
    assert set(names) <= {f"step-{steps:08d}", "step-00000006"}, "one checkpoint of the stop, whole"
    assert doing != "saving" or "step-00000006" in names, "and the one that was under way"
    resumed = Patient(CONFIG, run_dir=tmp_path, world=World.single("cpu"))
    assert resumed.fit().steps == STEPS
    assert seen + resumed.seen == reference.seen
    for name, value in weights(reference).items():
        assert torch.equal(weights(resumed)[name], value), name


class Stuck(Callback):
    """Hangs in an update."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell

    def on_step_start(self, trainer: Trainer[Any]) -> None:
        self.tell.send("stuck")
        while not trainer._engine.loop._requests.stop_is_pending:
            time.sleep(0.01)
        self.tell.send("asked to stop")
        time.sleep(200)


def _get_stuck(tell: Any) -> None:
    try:
        Patient(CONFIG, world=World.single("cpu"), callbacks=[Stuck(tell)]).fit()
    except KeyboardInterrupt:
        tell.send("KeyboardInterrupt")


def test_a_second_ctrl_c_is_for_the_impatient() -> None:
    # In a separate process, whose main thread receives the signals.
    processes = forking()
    here, there = processes.Pipe()
    process = processes.Process(target=_get_stuck, args=(there,))
    process.start()
    try:
        assert here.recv() == "stuck"
        os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
        # The second counts only if the process has seen the first a second before, which a busy machine delays.
        assert here.poll(120)
        assert here.recv() == "asked to stop"
        assert not here.poll(1.5)
        os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
        assert here.poll(120)
        assert here.recv() == "KeyboardInterrupt"
        process.join(120)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_handlers_of_the_program_itself_come_back() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        Patient(CONFIG, world=World.single("cpu"), callbacks=[StopAt(1)]).fit()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


SCRIPT = """
from tests.promises.test_signals_lose_nothing import CONFIG, Announces, Patient
from headway.trainer import World
class Tell:
    def send(self, doing):
        print(doing, flush=True)
result = Patient(CONFIG, run_dir={run_dir!r}, world=World.single("cpu"), callbacks=[Announces(Tell())]).fit()
print(result.status, result.reason, result.steps, flush=True)
"""


def test_a_program_of_its_own_ends_in_order(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(run_dir=str(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    assert program.stdout is not None
    with program:
        assert program.stdout.readline() == "training\n"
        program.send_signal(signal.SIGTERM)
        rest = program.stdout.read().splitlines()
    assert program.returncode == 0
    status, reason, steps = rest[-1].split()
    assert (status, reason) == ("interrupted", "SIGTERM")
    assert 5 <= int(steps) < STEPS
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{int(steps):08d}"]
