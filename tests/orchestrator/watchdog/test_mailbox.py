"""Heartbeats and requests go through an actor where the run's folder is not on a local disk; files take over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

import headway.orchestrator.watchdog as watchdog_package
from headway.orchestrator import Experiment, Retries
from headway.orchestrator.storage.events import Event, EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.watchdog.driver import HangMonitor
from headway.orchestrator.watchdog.mailbox import DriverMailbox, Mailbox, MailboxLost, RankMailbox
from headway.orchestrator.watchdog.policy import HangTimeouts
from headway.orchestrator.watchdog.worker import Watchdog
from tests.tiny import TinyConfig, TinyTrainer

WITHOUT_HEADWAY = """
import pickle, sys
sys.modules["headway"] = sys.modules["torch"] = None
mailbox = pickle.load(open(sys.argv[1], "rb"))()
mailbox.start(1, [{"rank": 0}, {"rank": 1}], {"silent_kill_startup_s": 5.0})
mailbox.publish({"stop": "now"})
for number in range(1, 4):
    beat = {"attempt": 1, "rank": 1, "beat": number, "phase": "backward", "for_s": 0.0}
    assert mailbox.beat(beat) == {"stop": "now"}
    straggler = mailbox.find(3.0)
assert (straggler["ranks"], straggler["is_hung"]) == ((0,), True), straggler
"""


def started(ranks: int, attempt: int = 1) -> Event:
    workers = [{"rank": rank, "host": "another machine", "pid": 1} for rank in range(ranks)]
    return {"event": "attempt_started", "attempt": attempt, "workers": workers}


def beat(rank: int, number: int, *, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    fields = {"phase": "backward", "for_s": 0.1, "usual_s": 0.1, "updates": 7, "batches": 1, "step": 7, **fields}
    return {"attempt": attempt, "rank": rank, "beat": number, "host": "another machine", "pid": 1, **fields}


def wait_for(what: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


def test_the_actor_needs_neither_headway_nor_torch(tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(watchdog_package)
    try:
        (tmp_path / "class").write_bytes(cloudpickle.dumps(Mailbox))
    finally:
        cloudpickle.unregister_pickle_by_value(watchdog_package)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEADWAY, str(tmp_path / "class")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_late_copy_of_an_earlier_heartbeat_is_no_sign_of_life() -> None:
    mailbox = Mailbox()
    mailbox.start(1, started(2)["workers"], dataclasses.asdict(HangTimeouts()))
    mailbox.beat(beat(0, 5))
    mailbox.beat(beat(1, 5))
    assert mailbox.find(0.5) is None
    found = None
    for number in range(6, 12):
        mailbox.beat(beat(0, number))
        mailbox.beat(beat(1, 4))
        found = mailbox.find(1.0)
    assert found is not None
    assert (found["ranks"], found["is_silent"]) == ((1,), True)


class Monitored:
    """A driver that looks at the ranks of a run when the test says so."""

    def __init__(self, tmp_path: Path) -> None:
        self.now_s = 1000.0
        self.folder = Folder(str(tmp_path))
        Folder(str(tmp_path / "watch")).prepare()
        events = EventWriter(self.folder, "driver")
        self.mailbox = DriverMailbox()
        experiment = Experiment(name="x", trainer=TinyTrainer, config=TinyConfig(max_steps=9), retries=Retries())
        self.monitor = HangMonitor(experiment, self.folder, events, mailbox=self.mailbox, clock=lambda: self.now_s)

    def look(self, passed_s: float = 0.5) -> None:
        """Look once, after what was sent before has arrived."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.mailbox.actor.publish.remote({}), timeout=60)
        self.now_s += passed_s
        self.monitor.poll()

    def told(self) -> list[Event]:
        return read_events(self.folder)


@pytest.fixture
def monitored(ray_session: None, tmp_path: Path) -> Iterator[Monitored]:
    found = Monitored(tmp_path)
    try:
        yield found
    finally:
        found.mailbox.close()


@pytest.mark.ray
def test_the_driver_reads_no_file_for_any_number_of_ranks(
    monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, name: reads.append(name) or read(self, name))
    ranks = 1024
    monitored.monitor.handle(started(ranks))
    for number in range(1, 4):
        for rank in range(ranks):
            monitored.mailbox.relay(beat(rank, number))
        monitored.look(2.0)
    assert reads == []
    assert monitored.told() == []
    reads.clear()
    # Rank 700 falls silent: only its file is read.
    for number in range(4, 15):
        for rank in range(ranks):
            if rank != 700:
                monitored.mailbox.relay(beat(rank, number))
        monitored.look(4.0)
    assert set(reads) == {"rank-700.json"}
    assert [(event["event"], event["ranks"]) for event in monitored.told()] == [
        ("rank_late", [700]), ("rank_hung", [700])
    ]  # fmt: skip


@pytest.mark.ray
def test_a_rank_gets_requests_with_the_answers_and_writes_no_file(monitored: Monitored) -> None:
    watch = Path(monitored.folder.place, "watch")
    monitored.mailbox.publish(stop={"reason": "enough"})
    with Watchdog(
        monitored.folder, rank=1, attempt=1, ranks=2, mailbox=RankMailbox(monitored.mailbox.actor)
    ) as watchdog:
        assert wait_for(lambda: watchdog.requests) == {"stop": {"reason": "enough"}}
        monitored.mailbox.publish(order={"attempt": 1, "number": 1, "end": False, "why": "rank 0 sleeps"})
        stacks = wait_for(lambda: [file for file in watch.iterdir() if file.name == "stacks-1-rank-1.txt"])
        assert "rank 0 sleeps" in stacks[0].read_text()
    assert [file.name for file in watch.iterdir()] == ["stacks-1-rank-1.txt"]


@pytest.mark.ray
def test_a_rank_that_reaches_only_its_file_is_alive(monitored: Monitored) -> None:
    file = Path(monitored.folder.place, "watch", "rank-1.json")
    monitored.monitor.handle(started(2))
    for number in range(1, 60):
        monitored.mailbox.relay(beat(0, number))
        file.write_text(json.dumps(beat(1, number)))
        monitored.look(1.0)
    assert monitored.told() == []


@pytest.mark.ray
def test_files_take_over_from_a_lost_mailbox_on_both_sides(monitored: Monitored) -> None:
    watch = Path(monitored.folder.place, "watch")
    monitored.monitor.handle(started(2))
    monitored.look()
    ray.kill(monitored.mailbox.actor)
    with (
        Watchdog(monitored.folder, rank=0, attempt=1, ranks=2, mailbox=RankMailbox(monitored.mailbox.actor)),
        Watchdog(monitored.folder, rank=1, attempt=1, ranks=2, mailbox=RankMailbox(monitored.mailbox.actor)),
    ):
        wait_for(lambda: {"rank-0.json", "rank-1.json"} <= set(os.listdir(watch)))

        def is_lost() -> bool:
            monitored.look()
            return monitored.monitor._mailbox is None

        wait_for(is_lost)
        # The driver hears them through the files; a third rank, of which there is none, would be late.
        monitored.monitor.handle(started(3, attempt=1))
        seen = (0, 0)

        def beats() -> tuple[int, int]:
            first, second = (json.loads((watch / f"rank-{rank}.json").read_text())["beat"] for rank in range(2))
            return first, second

        def look_after_both() -> list[Event]:
            nonlocal seen
            before = seen
            wait_for(lambda: min(now - then for now, then in zip(beats(), before, strict=True)) > 0)
            seen = beats()
            monitored.look(1.0)
            return monitored.told()

        wait_for(look_after_both)
        late = monitored.told()[0]
        assert (late["event"], late["ranks"]) == ("rank_late", [2])
        order = wait_for(lambda: (watch / "stacks-1-rank-0.txt").exists() and (watch / "stacks-1-rank-1.txt").exists())
        assert order


@pytest.mark.ray
def test_a_mailbox_that_does_not_answer_is_ended_so_that_all_use_files(monitored: Monitored) -> None:
    actor = monitored.mailbox.actor
    actor.__ray_call__.remote(lambda _: time.sleep(3600))
    assert monitored.mailbox.find(1.0, most_s=5.0) is None
    for _ in range(6):
        assert monitored.mailbox.find(5.0, most_s=5.0) is None
    with pytest.raises(MailboxLost):
        monitored.mailbox.find(5.0, most_s=5.0)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.beat.remote(beat(0, 1)), timeout=60)
