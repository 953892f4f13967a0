"""The driver reads heartbeats of ranks from files and sends orders; with a fake clock."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import Experiment, Retries
from headway.orchestrator.storage.events import Event, EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train.failures.cause import raised_failure
from headway.orchestrator.watchdog.driver import HangMonitor
from headway.orchestrator.watchdog.worker import Watchdog
from tests.tiny import TinyConfig, TinyTrainer

PROCESS = {"host": "another machine", "pid": 1}
STARTED = {
    "event": "attempt_started", "attempt": 2, "workers": [{"rank": 0, **PROCESS}, {"rank": 1, **PROCESS}]
}  # fmt: skip


class Ranks:
    """Two ranks that send heartbeats on demand, and the driver that reads them."""

    def __init__(self, tmp_path: Path) -> None:
        self.now_s, self.beats = 1000.0, 0
        self.folder = Folder(str(tmp_path))
        Folder(str(tmp_path / "watch")).prepare()
        events = EventWriter(self.folder, "driver")
        events.add(STARTED["event"], attempt=2, workers=STARTED["workers"])  # type: ignore[arg-type]
        experiment = Experiment(name="x", trainer=TinyTrainer, config=TinyConfig(max_steps=9), retries=Retries())
        self.monitor = HangMonitor(experiment, self.folder, events, clock=lambda: self.now_s)
        self.monitor.handle(STARTED)

    def say(self, rank: int, phase: str, for_s: float, *, attempt: int = 2) -> None:
        self.beats += 1
        beat = {
            **PROCESS, "rank": rank, "attempt": attempt, "beat": self.beats, "phase": phase, "for_s": for_s,
            "usual_s": 0.1, "updates": 7, "batches": 1, "step": 7,
        }  # fmt: skip
        Path(self.folder.place, "watch", f"rank-{rank}.json").write_text(json.dumps(beat))

    def pass_s(self, seconds: float, *speaking: int) -> None:
        """Let time pass while these ranks send heartbeats from their backward."""
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            for rank in speaking:
                self.say(rank, "backward", 1.0)
            self.monitor.poll()

    def told(self) -> list[Event]:
        return [event for event in read_events(self.folder) if event["event"] != "attempt_started"]

    def order(self) -> dict[str, Any]:
        order: dict[str, Any] = json.loads(Path(self.folder.place, "watch", "order.json").read_text())
        return order


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    found = Ranks(tmp_path)
    for rank in range(2):
        found.say(rank, "forward", 0.0)
    found.monitor.poll()
    found.pass_s(2, 0, 1)
    assert found.told() == []
    return found


def test_a_rank_that_falls_silent_is_named_then_ended_and_is_a_failure_of_the_machine(ranks: Ranks) -> None:
    ranks.pass_s(5, 0)
    (straggler,) = ranks.told()
    assert (straggler["event"], straggler["ranks"], straggler["phase"], straggler["step"]) == (
        "rank_late",
        [1],
        "backward",
        7,
    )
    assert (ranks.order()["end"], ranks.order()["attempt"]) == (False, 2)
    ranks.pass_s(28, 0)
    assert [event["event"] for event in ranks.told()] == ["rank_late", "rank_hung"]
    assert ranks.order()["end"]
    failure = raised_failure(read_events(ranks.folder))
    assert failure is not None
    assert (failure.rank, failure.step, failure.is_user_error) == (1, 7, False)
    assert str(failure).startswith("rank 1 has sent no heartbeat for 30 s")
    assert failure.hung.endswith("stacks-2-rank-*.txt")


def test_a_driver_that_slept_blames_nobody(ranks: Ranks) -> None:
    ranks.now_s += 3600
    ranks.monitor.poll()
    ranks.pass_s(3, 0, 1)
    assert ranks.told() == []


def test_ranks_of_an_earlier_attempt_are_not_heard(ranks: Ranks) -> None:
    for _ in range(12):
        ranks.now_s += 0.5
        ranks.say(0, "forward", 0.1)
        ranks.say(1, "forward", 0.1, attempt=1)
        ranks.monitor.poll()
    assert [event["ranks"] for event in ranks.told()] == [[1]]


def test_nobody_is_late_between_two_attempts(ranks: Ranks) -> None:
    ranks.monitor.handle({"event": "group_failed"})
    ranks.pass_s(60)
    assert ranks.told() == []


def test_a_rank_says_what_its_training_does_and_writes_its_stacks_when_asked(tmp_path: Path) -> None:
    watch = tmp_path / "watch"

    def wait_for(file: str, text: str) -> None:
        deadline_s = time.monotonic() + 120
        while not ((watch / file).exists() and text in (watch / file).read_text()):
            assert time.monotonic() < deadline_s, file
            time.sleep(0.05)

    with Watchdog(Folder(str(tmp_path)), rank=3, attempt=2) as watchdog:
        wait_for("rank-3.json", '"setting up"')
        trainer = TinyTrainer(TinyConfig(max_steps=1))
        trainer.activity.enter("reading data")
        watchdog.attach(trainer)
        wait_for("rank-3.json", '"reading data"')
        order = {"number": 1, "end": False, "why": "rank 1 sleeps"}
        (watch / "order.json").write_text(json.dumps({"attempt": 1, **order}))
        (watch / "order.json").write_text(json.dumps({"attempt": 2, **order}))
        wait_for("stacks-2-rank-3.txt", "wait_for")
        assert "rank 1 sleeps" in (watch / "stacks-2-rank-3.txt").read_text()
        # By now, the training thread may have noticed the hang, and left: the first stacks are kept.
        (watch / "order.json").write_text(
            json.dumps({"attempt": 2, "number": 2, "end": False, "why": "it still sleeps"})
        )
        wait_for("stacks-2-rank-3.txt", "it still sleeps")
        assert "rank 1 sleeps" in (watch / "stacks-2-rank-3.txt").read_text()
    assert json.loads((watch / "rank-3.json").read_text())["phase"] == "ended"
