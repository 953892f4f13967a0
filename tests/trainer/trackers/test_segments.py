"""Records in an object store: segments that a thread writes, which training never waits for."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from headway.trainer.trackers import JsonlTracker, RunInfo, jsonl as jsonl_module
from headway.trainer.trackers.jsonl import read_records
from headway.trainer.trackers.segments import SegmentWriter, read_segments


class Store(MemoryFileSystem):
    """An object store that counts what it is sent, and waits or fails when told."""

    protocol = "testedstore"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    open_: ClassVar[threading.Event] = threading.Event()
    called: ClassVar[threading.Event] = threading.Event()
    error: ClassVar[Exception | None] = None
    sent: ClassVar[dict[str, list[int]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.replace("testedstore://", "memory://"))

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        self.called.set()
        self.open_.wait()
        if self.error is not None:
            raise self.error
        self.sent.setdefault(path, []).append(len(value))
        super().pipe_file(path, value, **options)


fsspec.register_implementation("testedstore", Store)


@pytest.fixture
def place() -> Iterator[str]:
    Store.open_.set()
    Store.called.clear()
    Store.error = None
    Store.sent.clear()
    yield f"testedstore://{uuid.uuid4().hex}"
    Store.open_.set()


def started(place: str, *, step: int = 0, attempt: int = 1, state: dict[str, Any] | None = None) -> JsonlTracker:
    tracker = JsonlTracker()
    if state is not None:
        tracker.load_state_dict(state)
    tracker.start(RunInfo(name="a", run_dir=place, resumed=attempt > 1, attempt=attempt), step=step)
    return tracker


def steps(place: str) -> list[int]:
    return [record["step"] for record in read_records(f"{place}/metrics.jsonl")]


def test_5000_records_are_sent_about_once(place: str) -> None:
    tracker, size = started(place), 0
    for step in range(1, 5001):
        record = {f"metric/{index}": step / 7 for index in range(5)}
        tracker.log(record, step=step, epoch=0)
        size += len(tracker.line({"step": step, "epoch": 0, "time": 1234567890.123, "attempt": 1, **record})) + 1
        if step % 500 == 0:
            assert tracker.flush(60)
    tracker.finish("completed")
    assert steps(place) == list(range(1, 5001))
    assert sum(map(sum, Store.sent.values())) <= 1.2 * size
    assert len(Store.sent) >= 10
    assert all(len(times) == 1 for times in Store.sent.values()), "every segment is written once"


def test_a_store_that_hangs_does_not_block_training(place: str) -> None:
    Store.open_.clear()
    tracker = started(place)
    assert Store.called.wait(60), "the thread writes"
    for step in range(1, 101):
        tracker.log({"train/loss": 1.0}, step=step, epoch=0)
    tracker.rewind(50)
    state = tracker.state_dict()
    assert len(state["unwritten"]) == 102
    Store.open_.set()
    tracker.finish("completed")
    assert steps(place) == list(range(1, 51))


def test_a_store_that_fails_gets_the_records_later(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.trainer.trackers.segments._RETRY_AFTER_S", 0.01)
    Store.error = LookupError("no credentials")
    tracker = started(place)
    assert tracker._segments is not None
    with tracker._segments._changed:
        assert tracker._segments._changed.wait_for(lambda: tracker._segments._error, 60)
    with pytest.warns(UserWarning, match="metrics.jsonl cannot be written; .* retried: LookupError: no credentials"):
        tracker.log({"train/loss": 1.0}, step=1, epoch=0)
    tracker.log({"train/loss": 1.0}, step=2, epoch=0)
    Store.error = None
    tracker.finish("completed")
    assert steps(place) == [1, 2]


def test_the_end_of_a_run_waits_for_a_while_and_names_what_is_lost(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_module, "_FINISH_TIMEOUT_S", 0.05)
    Store.open_.clear()
    tracker = started(place)
    tracker.log({"train/loss": 1.0}, step=1, epoch=0)
    with pytest.warns(UserWarning, match=r"2 records of .*metrics.jsonl are lost: .* 2 could not be written within"):
        tracker.finish("completed")


def test_memory_for_records_is_bounded(place: str) -> None:
    Store.open_.clear()
    writer = SegmentWriter(f"{place}/metrics.jsonl", max_pending_bytes=1000)
    for _ in range(100):
        writer.append("x" * 99)
    assert len(writer.pending()) == 10
    Store.open_.set()
    with pytest.warns(UserWarning, match="90 records of .* are lost: 90 did not fit into memory, 0 could not"):
        writer.close(60)
    assert len(read_segments(f"{place}/metrics.jsonl")) == 10


def test_a_run_killed_before_its_records_are_written_resumes_with_all_of_them(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_module, "_FINISH_TIMEOUT_S", 0.05)
    killed = started(place)
    for step in range(1, 4):
        killed.log({"train/loss": 1.0}, step=step, epoch=0)
    assert killed.flush(60)
    Store.error = LookupError("the machine is gone")
    killed.log({"validation/loss": 2.0}, step=3, epoch=0)
    killed.log({"train/loss": 1.0}, step=4, epoch=0)
    state = killed.state_dict()
    with pytest.warns(UserWarning, match="are lost"):
        killed.finish("failed")
    Store.error = None
    monkeypatch.setattr(jsonl_module, "_FINISH_TIMEOUT_S", 60)
    tracker = started(place, step=4, attempt=2, state=state)
    tracker.log({"train/loss": 9.0}, step=5, epoch=0)
    tracker.finish("completed")
    records = read_records(f"{place}/metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert (records[2]["train/loss"], records[2]["validation/loss"]) == (1.0, 2.0)
    assert records[4]["train/loss"] == 9.0


def test_records_of_an_earlier_version_in_one_object_are_read_and_continued(place: str) -> None:
    fs = fsspec.filesystem("testedstore")
    path = f"{place.removeprefix('testedstore:/')}/metrics.jsonl"
    fs.pipe_file(path, b'{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    tracker = started(place, step=1, attempt=2)
    tracker.log({"loss": 3.0}, step=2, epoch=0)
    tracker.finish("completed")
    assert [record["loss"] for record in read_records(f"{place}/metrics.jsonl")] == [1, 3.0]
