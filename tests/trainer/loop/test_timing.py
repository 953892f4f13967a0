"""The current phase of a trainer, as seen from another thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headway.trainer import Callback, CheckpointConfig, Duration, World
from headway.trainer.loop.timing import Activity, DeviceTimes, Phase
from tests.tiny import Rows, TinyConfig, TinyTrainer


class Looks(TinyTrainer):
    """Records the phase in all user code."""

    def look(self, where: str) -> None:
        self.looks = getattr(self, "looks", set()) | {(where, self.activity.phase)}

    def configure_models(self) -> None:
        self.look("configure_models")
        super().configure_models()

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.optimizer.register_step_pre_hook(lambda *_: self.look("optimizer"))

    def configure_dataloaders(self) -> Any:
        def rows(where: str) -> Iterator[Any]:
            data = Rows(32)
            for first in range(0, 32, 8):
                self.look(where)
                yield {key: torch.stack([data[first + i][key] for i in range(8)]) for key in ("id", "x", "y")}

        return lambda: rows("training data"), lambda: rows("validation data")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("training_step" if self.training else "validation_step")
        outputs = super().training_step(batch, batch_idx)
        if self.training:
            outputs["loss"].register_hook(lambda _: self.look("backward"))
        return outputs

    def on_step_end(self) -> None:
        self.look("on_step_end")

    def on_evaluation_start(self) -> None:
        self.look("on_evaluation_start")

    def on_evaluation_end(self, metrics: Any) -> None:
        self.look("on_evaluation_end")

    def on_checkpoint_saved(self, checkpoint: Any) -> None:
        self.look("on_checkpoint_saved")


class Saved(Callback):
    """Has a state, so that saves call state_dict."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_setup_start(self, trainer: Any) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        self.trainer.look("state_dict")
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores nothing."""


@pytest.mark.parametrize("background", [True, False])
def test_the_phase_is_true_wherever_a_run_may_wait(tmp_path: Path, background: bool) -> None:
    config = TinyConfig(
        max_steps=4,
        gradient_accumulation_steps=1,
        evaluate_every=Duration(2, "steps"),
        checkpoint=CheckpointConfig(every=Duration(2, "steps"), background=background),
    )
    trainer = Looks(config, run_dir=tmp_path, callbacks=[Saved()], world=World.single("cpu"))
    trainer.fit()
    assert trainer.looks == {
        ("configure_models", "setting up"),
        ("training data", "reading data"),
        ("training_step", "forward"),
        ("backward", "backward"),
        ("optimizer", "optimizer"),
        ("on_step_end", "between updates"),
        ("validation data", "reading validation data"),
        ("validation_step", "evaluation"),
        ("on_evaluation_start", "around an evaluation"),
        ("on_evaluation_end", "around an evaluation"),
        ("on_checkpoint_saved", "between updates"),
        ("state_dict", "saving"),
    }
    assert trainer.activity.updates == 4
    assert trainer.activity.usual_s("forward") is not None


def test_the_first_stays_of_a_phase_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stays in a phase compile and open files."""
    now_s = 0.0
    monkeypatch.setattr("headway.trainer.loop.timing.time", SimpleNamespace(monotonic=lambda: now_s))
    activity = Activity()
    for seconds in (4.0, 0.0, 1.0):
        assert activity.usual_s("forward") is None
        activity.enter("forward")
        now_s += seconds
        activity.enter("backward")
    assert activity.usual_s("forward") == 1.0


class _Device:
    """A clock of the host, and a device that works through what the host has queued."""

    def __init__(self) -> None:
        self.host_s = self.free_from_s = 0.0
        self.events = 0

    def monotonic(self) -> float:
        return self.host_s

    def queue(self, seconds: float) -> None:
        self.free_from_s = max(self.free_from_s, self.host_s) + seconds
        self.host_s += 0.01

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.free_from_s)


class _Event:
    def __init__(self, device: _Device) -> None:
        device.events += 1
        self.device = device

    def record(self) -> None:
        self.at_s = max(self.device.host_s, self.device.free_from_s)

    def query(self) -> bool:
        return self.at_s <= self.device.host_s

    def elapsed_time(self, end_event: _Event) -> float:
        return 1000 * (end_event.at_s - self.at_s)


def _train(device: _Device, activity: Activity, updates: int, *, read_s: float) -> None:
    for _ in range(updates):
        activity.enter("reading data")
        device.host_s += read_s
        activity.enter("forward")
        for phase, seconds in (("forward", 0.1), ("backward", 0.3), ("optimizer", 0.2)):
            if phase == "forward":
                activity.begin_batch("forward")
            else:
                activity.enter(cast(Phase, phase))
            device.queue(seconds)
        activity.end_update()
    activity.enter("optimizer")
    device.synchronize()
    activity.enter("between updates")
    activity.divide_as_device()


@pytest.mark.parametrize(
    ("read_s", "idle_s"),
    # The device always waits for the first batch after the host has waited for the device.
    [(0.5, 3 * 0.5), (0.8, 300 * 0.23)],
    ids=["hidden behind the device", "longer than the device works"],
)
def test_time_is_divided_as_a_device_spent_it_that_works_behind_the_host(
    monkeypatch: pytest.MonkeyPatch, read_s: float, idle_s: float
) -> None:
    device = _Device()
    monkeypatch.setattr("headway.trainer.loop.timing.time", device)
    activity = Activity()
    activity.measure_device(DeviceTimes(lambda: _Event(device)))
    _train(device, activity, 1, read_s=2.0)
    first = activity.spent_s()
    for _ in range(3):
        _train(device, activity, 100, read_s=read_s)
    spent_s = activity.spent_s()
    assert sum(spent_s.values()) == pytest.approx(device.host_s)
    assert spent_s["reading data"] - first["reading data"] == pytest.approx(idle_s, rel=0.1)
    updates = {phase: spent_s[phase] - first[phase] for phase in ("forward", "backward", "optimizer")}
    assert sum(updates.values()) == pytest.approx(300 * 0.6, rel=0.02)
    assert updates["backward"] == pytest.approx(3 * updates["forward"], rel=0.05)
    assert updates["optimizer"] == pytest.approx(2 * updates["forward"], rel=0.05)
    assert device.events < 400


def test_a_long_interval_keeps_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    monkeypatch.setattr("headway.trainer.loop.timing.time", device)
    activity = Activity()
    activity.measure_device(DeviceTimes(lambda: _Event(device)))
    _train(device, activity, 5000, read_s=0.7)
    assert device.events <= 1024
    spent_s = activity.spent_s()
    assert spent_s["backward"] == pytest.approx(4999 * 0.3, rel=0.02)
