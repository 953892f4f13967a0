"""Trackers: none stops training, and after a kill and a resume none has a step twice."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from headway.trainer import Callback, World, histograms
from headway.trainer.errors import ConfigError
from headway.trainer.trackers import (
    ConsoleTracker,
    CsvTracker,
    ImageFilesTracker,
    JsonlTracker,
    MlflowTracker,
    RunInfo,
    TensorBoardTracker,
    Tracker,
    TrackerList,
    WandbTracker,
    read_records,
)
from headway.trainer.trackers.images import as_tensor, encode_png, pixels_HWC
from tests.tiny import TinyConfig, TinyTrainer


class Broken(Tracker):
    """Fails at every call from `fails_from` on."""

    def __init__(self, fails_from: str = "start") -> None:
        self.fails_from, self.failing, self.calls = fails_from, False, 0

    def _call(self, name: str) -> None:
        self.calls += 1
        self.failing = self.failing or name == self.fails_from
        if self.failing:
            raise OSError(f"no space left in {name}")

    def start(self, run: RunInfo, *, step: int) -> None:
        self._call("start")

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        self._call("log")

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        self._call("log_images")

    def rewind(self, step: int) -> None:
        self._call("rewind")

    def finish(self, status: str) -> None:
        self._call("finish")

    def state_dict(self) -> dict[str, Any]:
        self._call("state_dict")
        return {"calls": self.calls}


class Keeping(Tracker):
    """Records what it is called with."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.state: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        self.records.append((step, epoch, dict(metrics)))

    def state_dict(self) -> dict[str, Any]:
        return {"records": len(self.records)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = state_dict


def run_info(tmp_path: Path | str | None, **changes: Any) -> RunInfo:
    run_dir = None if tmp_path is None else str(tmp_path)
    return RunInfo(**{"name": "digits", "run_dir": run_dir, "config": {"lr": 0.1, "nested": {"a": [1, 2]}}, **changes})


def use_all(trackers: TrackerList, tmp_path: Path) -> None:
    trackers.start(run_info(tmp_path), step=0)
    for step in range(1, 4):
        trackers.log({"loss": 1.0 / step}, step=step, epoch=0)
        trackers.log_images({"image": torch.zeros(3, 2, 2)}, step=step)
        trackers.state_dict()
    trackers.rewind(3)
    trackers.finish("completed")


@pytest.mark.parametrize("fails_from", ["start", "log", "log_images", "state_dict", "rewind", "finish"])
def test_failing_tracker_is_warned_of_once_and_others_go_on(tmp_path: Path, fails_from: str) -> None:
    keeping = Keeping()
    with pytest.warns(UserWarning, match="training continues") as warned:
        use_all(TrackerList([Broken(fails_from), keeping]), tmp_path)
    message = f"Broken.{fails_from} failed; training continues without it: OSError: no space left in {fails_from}"
    assert [str(warning.message) for warning in warned] == [message]
    assert [step for step, _, _ in keeping.records] == [1, 2, 3]


def test_every_failing_tracker_has_its_own_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Broken.log") as warned:
        use_all(TrackerList([Broken("log"), Broken("log")]), tmp_path)
    assert len(warned) == 2


def test_tracker_that_cannot_start_is_left_alone(tmp_path: Path) -> None:
    broken = Broken("start")
    trackers = TrackerList([broken])
    with pytest.warns(UserWarning, match="Broken.start"):
        trackers.start(run_info(tmp_path), step=0)
    trackers.log({"loss": 1.0}, step=1, epoch=0)
    assert broken.calls == 1


def test_keyboard_interrupt_in_a_tracker_is_not_swallowed() -> None:
    class Interrupted(Tracker):
        def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrackerList([Interrupted()]).log({}, step=1, epoch=0)


def test_states_find_their_tracker() -> None:
    first, second = Keeping(), Keeping()
    second.log({}, step=1, epoch=0)
    state = TrackerList([first, second]).state_dict()
    restored = [Keeping(), Keeping(), Keeping()]
    TrackerList(restored).load_state_dict({**state, "Gone/0": {"a": 1}})
    assert [tracker.state for tracker in restored] == [{"records": 0}, {"records": 1}, {}]


def test_what_is_no_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match="trackers must be Tracker objects"):
        TrackerList([JsonlTracker])  # type: ignore[list-item]


# ---- JSON lines ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs" / "a") if request.param == "local" else f"memory://{uuid.uuid4().hex}/runs/a"


Make = Callable[..., JsonlTracker]


@pytest.fixture
def jsonl() -> Iterator[Make]:
    made: list[JsonlTracker] = []

    def make(path: Path | None = None) -> JsonlTracker:
        made.append(JsonlTracker(path))
        return made[-1]

    yield make
    for tracker in made:
        tracker.finish("stopped")


def write(tracker: JsonlTracker, folder: str, steps: range, *, resume: int | None = None, attempt: int = 1) -> None:
    tracker.start(run_info(folder, resumed=resume is not None, attempt=attempt), step=resume or 0)
    for step in steps:
        tracker.log({"train/loss": 1.0 / step}, step=step, epoch=step // 4)
    assert tracker.flush(60)


def test_record_is_readable_as_soon_as_it_is_written(folder: str, jsonl: Make) -> None:
    tracker = jsonl()
    tracker.start(run_info(folder), step=0)
    assert read_records(f"{folder}/metrics.jsonl") == []
    tracker.log({"train/loss": 0.5, "lr": 1e-3}, step=50, epoch=2)
    assert tracker.flush(60)
    (record,) = read_records(f"{folder}/metrics.jsonl")
    assert record.pop("time") > 1.7e9
    assert record == {"step": 50, "epoch": 2, "attempt": 1, "train/loss": 0.5, "lr": 1e-3}


def test_resume_drops_later_steps(folder: str, jsonl: Make) -> None:
    write(jsonl(), folder, range(1, 8))
    write(jsonl(), folder, range(5, 10), resume=4, attempt=2)
    records = read_records(f"{folder}/metrics.jsonl")
    assert [(record["step"], record["attempt"]) for record in records] == [
        (s, 1 if s <= 4 else 2) for s in range(1, 10)
    ]
    assert [record["train/loss"] for record in records] == [1.0 / step for step in range(1, 10)]


@pytest.mark.parametrize("attempt", [1, 2])
def test_run_that_begins_anew_keeps_nothing(folder: str, attempt: int, jsonl: Make) -> None:
    write(jsonl(), folder, range(0, 0))
    write(jsonl(), folder, range(1, 8))
    write(jsonl(), folder, range(1, 3), attempt=attempt)
    assert [record["step"] for record in read_records(f"{folder}/metrics.jsonl")] == [1, 2]


def test_records_of_one_step_become_one_line(folder: str, jsonl: Make) -> None:
    tracker = jsonl()
    write(tracker, folder, range(1, 3))
    tracker.log({"validation/loss": 7.0}, step=2, epoch=1)
    tracker.log({"validation/loss": 8.123456789, "step": 9.0}, step=2, epoch=1)
    tracker.log({"train/loss": 3.0}, step=3, epoch=1)
    assert tracker.flush(60)
    records = read_records(f"{folder}/metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[1]["train/loss"] == 0.5
    assert records[1]["validation/loss"] == 8.123456789
    assert "validation/loss" not in records[2]


def test_shorter_record_of_the_same_step_leaves_no_rest(tmp_path: Path, jsonl: Make) -> None:
    tracker = jsonl(tmp_path / "metrics.jsonl")
    tracker.start(run_info(None), step=0)
    tracker.log({"loss": 1.23456789012345}, step=1, epoch=0)
    tracker.log({"loss": 1.0}, step=1, epoch=0)
    assert [record["loss"] for record in read_records(tmp_path / "metrics.jsonl")] == [1.0]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_step_from_which_a_run_resumes_is_not_doubled_either(folder: str, jsonl: Make) -> None:
    """Records after the checkpoint, such as the evaluation of an epoch, are logged again with the same step."""
    write(jsonl(), folder, range(1, 5))
    tracker = jsonl()
    write(tracker, folder, range(0, 0), resume=4, attempt=2)
    tracker.log({"validation/loss": 9.0}, step=4, epoch=1)
    tracker.log({"train/loss": 1.0}, step=5, epoch=1)
    assert tracker.flush(60)
    records = read_records(f"{folder}/metrics.jsonl")
    assert [(record["step"], record["attempt"]) for record in records] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert (records[3]["train/loss"], records[3]["validation/loss"]) == (0.25, 9.0)


def test_rewind_drops_later_steps_and_what_follows_is_written_once(folder: str, jsonl: Make) -> None:
    tracker = jsonl()
    write(tracker, folder, range(1, 8))
    tracker.rewind(4)
    assert tracker.flush(60)
    assert [record["step"] for record in read_records(f"{folder}/metrics.jsonl")] == [1, 2, 3, 4]
    tracker.log({"validation/loss": 9.0}, step=4, epoch=1)
    for step in range(5, 8):
        tracker.log({"train/loss": -1.0}, step=step, epoch=1)
    assert tracker.flush(60)
    records = read_records(f"{folder}/metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 8))
    assert [record["train/loss"] for record in records[3:]] == [0.25, -1.0, -1.0, -1.0]
    assert records[3]["validation/loss"] == 9.0


def test_line_cut_short_by_a_kill_is_dropped(tmp_path: Path, jsonl: Make) -> None:
    write(jsonl(), str(tmp_path), range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [record["step"] for record in read_records(path)] == [1, 2]
    write(jsonl(), str(tmp_path), range(3, 5), resume=2, attempt=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_values_that_are_not_finite_are_valid_json_and_come_back(folder: str, jsonl: Make) -> None:
    tracker = jsonl()
    write(tracker, folder, range(0, 0))
    tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1, epoch=0)
    if "://" not in folder:
        line = Path(folder, "metrics.jsonl").read_text()
        written = json.loads(line, parse_constant=pytest.fail)
        assert (written["a"], written["b"], written["c"]) == ("NaN", "Infinity", "-Infinity")
    assert tracker.flush(60)
    (record,) = read_records(f"{folder}/metrics.jsonl")
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_without_a_run_dir_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jsonl: Make) -> None:
    monkeypatch.chdir(tmp_path)
    trackers = TrackerList([jsonl(), CsvTracker(), TensorBoardTracker(), ImageFilesTracker()])
    trackers.start(run_info(None), step=0)
    trackers.log({"loss": 1.0}, step=1, epoch=0)
    trackers.log_images({"image": torch.zeros(3, 2, 2)}, step=1)
    trackers.rewind(0)
    trackers.finish("completed")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from headway.trainer.trackers import JsonlTracker, RunInfo
tracker = JsonlTracker()
tracker.start(RunInfo(name="r", run_dir=sys.argv[1], resumed=True, attempt=int(sys.argv[3])), step=int(sys.argv[2]))
step = int(sys.argv[2])
while True:
    step += 1
    tracker.log({f"metric/{i}": step * 1.5 for i in range(50)}, step=step, epoch=0)
    tracker.log({"validation/loss": step * 2.5}, step=step, epoch=0)
    if step == int(sys.argv[2]) + 500:
        print(step, flush=True)
"""


def test_killed_at_any_time_the_file_holds_every_step_once(tmp_path: Path) -> None:
    resume = 0
    for attempt in range(1, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(resume), str(attempt)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout as lines:
            reached = int(lines.readline())
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        records = read_records(tmp_path / "metrics.jsonl")
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        assert len(records) >= reached
        resume = reached - 200
    assert len({record["attempt"] for record in records}) == 3


# ---- CSV -----------------------------------------------------------------------------------------------------------


def table(folder: str) -> list[dict[str, str]]:
    with fsspec.open(f"{folder}/metrics.csv", "rt", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_gets_a_column_when_a_metric_first_comes_and_a_step_one_row(folder: str) -> None:
    tracker = CsvTracker()
    tracker.start(run_info(folder), step=0)
    assert table(folder) == []
    for step in range(1, 4):
        tracker.log({"train/loss": 1.0 / step}, step=step, epoch=0)
    tracker.log({"validation/loss": math.nan, 'a "name", with a comma': 2.0}, step=3, epoch=1)
    tracker.log({"validation/loss": 8.5}, step=3, epoch=1)
    tracker.log({"train/loss": math.inf, "step": 7.0}, step=4, epoch=1)
    tracker.finish("completed")
    rows = table(folder)
    names = ["step", "epoch", "time", "attempt", "train/loss", "validation/loss", 'a "name", with a comma']
    assert [list(row) for row in rows] == [names] * 4
    assert [(row["step"], row["epoch"], row["train/loss"], row["validation/loss"]) for row in rows] == [
        ("1", "0", "1.0", ""),
        ("2", "0", "0.5", ""),
        ("3", "1", repr(1 / 3), "8.5"),
        ("4", "1", "inf", ""),
    ]
    assert [row[names[-1]] for row in rows] == ["", "", "2.0", ""]


def test_csv_has_no_step_twice_after_a_resume_or_a_rewind(folder: str) -> None:
    for attempt, resume, steps in ((1, None, range(1, 8)), (2, 4, range(5, 10))):
        tracker = CsvTracker()
        tracker.start(run_info(folder, resumed=resume is not None, attempt=attempt), step=resume or 0)
        for step in steps:
            tracker.log({"train/loss": float(step), f"only/{attempt}": 1.0}, step=step, epoch=0)
        if attempt == 1:
            tracker.finish("failed")
    tracker.rewind(6)
    tracker.log({"validation/loss": 3.0}, step=6, epoch=1)
    tracker.log({"train/loss": -7.0}, step=7, epoch=1)
    rows = table(folder)
    assert [(row["step"], row["attempt"]) for row in rows] == [(str(s), "1" if s <= 4 else "2") for s in range(1, 8)]
    assert [row["train/loss"] for row in rows] == ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "-7.0"]
    assert [row["only/2"] for row in rows] == ["", "", "", "", "1.0", "1.0", ""]
    tracker.finish("completed")

    fresh = CsvTracker()
    fresh.start(run_info(folder), step=0)
    assert table(folder) == []
    fresh.finish("completed")


def test_csv_row_cut_short_by_a_kill_is_dropped_though_it_reads_like_one(tmp_path: Path) -> None:
    tracker = CsvTracker(tmp_path / "a.csv")
    tracker.start(run_info(None), step=0)
    tracker.log({"loss": 0.125}, step=1, epoch=0)
    tracker.log({"loss": 0.375}, step=2, epoch=0)
    tracker.finish("failed")
    content = (tmp_path / "a.csv").read_bytes()
    assert content.endswith(b"0.375\n")
    (tmp_path / "a.csv").write_bytes(content[:-3])
    tracker.start(run_info(None, resumed=True, attempt=2), step=2)
    tracker.finish("completed")
    assert [line.rsplit(",", 1)[-1] for line in (tmp_path / "a.csv").read_text().splitlines()] == ["loss", "0.125"]


# ---- Image files ---------------------------------------------------------------------------------------------------


def stored(folder: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(f"{folder}/images")
    return sorted(str(path).split("/images/")[1] for path in fs.find(root))


def test_of_a_hundred_images_as_many_as_the_limit_are_stored(folder: str) -> None:
    tracker = ImageFilesTracker(limit=8)
    tracker.start(run_info(folder), step=0)
    tracker.log_images({f"image {i}": torch.rand(3, 4, 5) for i in range(100)}, step=3)
    tracker.log_images({"one more": torch.rand(3, 4, 5)}, step=3)
    assert stored(folder) == [f"step-00000003/image {i}.png" for i in range(8)]
    tracker.log_images({"validation/a?": torch.rand(3, 4, 5), "../../b": torch.rand(3, 4, 5)}, step=4)
    assert stored(folder)[8:] == ["step-00000004/b.png", "step-00000004/validation/a%3F.png"]
    with pytest.raises(ConfigError, match="limit must be >= 1, got 0"):
        ImageFilesTracker(limit=0)


def test_images_of_steps_that_are_made_again_are_deleted(folder: str) -> None:
    tracker = ImageFilesTracker()
    tracker.start(run_info(folder), step=0)
    for step in (2, 4, 6):
        tracker.log_images({f"first {step}": torch.rand(3, 4, 5)}, step=step)
    tracker = ImageFilesTracker()
    tracker.start(run_info(folder, resumed=True, attempt=2), step=4)
    assert stored(folder) == ["step-00000002/first 2.png", "step-00000004/first 4.png"]
    tracker.rewind(3)
    tracker.log_images({"again 4": torch.rand(3, 4, 5)}, step=4)
    assert stored(folder) == ["step-00000002/first 2.png", "step-00000004/again 4.png"]
    ImageFilesTracker().start(run_info(folder), step=0)
    assert stored(folder) == []


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_are_valid_png_with_the_values_they_had(channels: int) -> None:
    Image = pytest.importorskip("PIL.Image")
    import numpy as np

    image = torch.randint(0, 256, (channels, 7, 5), dtype=torch.uint8)
    read = np.array(Image.open(io.BytesIO(encode_png(pixels_HWC(image)))))
    assert torch.equal(torch.from_numpy(read).reshape(7, 5, channels), image.permute(1, 2, 0))
    floats = pixels_HWC(torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0]).reshape(1, 1, 5))
    assert floats.flatten().tolist() == [0, 0, 128, 255, 255]


def test_what_is_no_image_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"with 1 to 4 channels, got \[64, 4, 5\]"):
        pixels_HWC(torch.zeros(64, 4, 5))


# ---- Console, TensorBoard, wandb, MLflow ----------------------------------------------------------------------------


def test_console_prints_one_line_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = ConsoleTracker()
    tracker.start(run_info(None, resumed=True, attempt=2), step=1000)
    tracker.log({"train/loss": 1.23456, "tokens_per_s": 45120.4, "lr": 3e-4, "bad": math.nan}, step=1250, epoch=2)
    tracker.finish("completed")
    assert capsys.readouterr().out.splitlines() == [
        "digits · attempt 2 · resumed after step 1,000",
        "step 1,250 · epoch 2 · train/loss 1.235 · tokens_per_s 45,120 · lr 0.0003 · bad nan",
        "completed",
    ]


def test_tensorboard_curves_have_every_step_once_after_a_resume(tmp_path: Path) -> None:
    for attempt, resume, steps in ((1, None, range(1, 8)), (2, 4, range(5, 10))):
        tracker = TensorBoardTracker()
        tracker.start(run_info(tmp_path, resumed=resume is not None, attempt=attempt), step=resume or 0)
        for step in steps:
            tracker.log({"train/loss": float(step * attempt)}, step=step, epoch=0)
        # The first attempt's records after step 7 are purged as well.
        tracker.log_images({"byte": torch.zeros(3, 4, 5, dtype=torch.uint8), "float": torch.rand(1, 4, 5)}, step=step)
        if attempt == 2:
            tracker.finish("completed")  # The first attempt was killed.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert scalars == [(step, float(step)) for step in range(1, 5)] + [(step, 2.0 * step) for step in range(5, 10)]
    assert {(tag, image.step) for tag in ("byte", "float") for image in events.Images(tag)} == {
        ("byte", 9),
        ("float", 9),
    }


def test_tensorboard_hides_what_a_rewind_has_taken_back(tmp_path: Path) -> None:
    tracker = TensorBoardTracker()
    tracker.start(run_info(tmp_path), step=0)
    for step in range(1, 8):
        tracker.log({"train/loss": float(step)}, step=step, epoch=0)
    tracker.rewind(4)
    for step in range(5, 9):
        tracker.log({"train/loss": -float(step)}, step=step, epoch=0)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert scalars == [(step, float(step if step <= 4 else -step)) for step in range(1, 9)]
    tracker.finish("completed")


def test_tensorboard_takes_texts_as_they_are_and_histograms(tmp_path: Path) -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 3.0])
    tracker = TensorBoardTracker()
    tracker.start(run_info(tmp_path), step=0)
    tracker.log_text({"poem": "# no title\nbut *this*"}, step=3)
    tracker.log_histograms(histograms({"weights": values}, World.single("cpu"), bins=4), step=3)
    tracker.finish("completed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0, "histograms": 0})
    events.Reload()
    (text,) = events.Tensors("poem/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "    # no title\n    but *this*\n"
    (event,) = events.Histograms("weights")
    found = event.histogram_value
    assert (event.step, found.min, found.max, found.num, found.sum) == (3, -1.0, 3.0, 4.0, 2.5)
    assert [count for count in found.bucket if count] == [1.0, 2.0, 1.0]


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Reads the history of all offline runs: 7 bytes, then LevelDB's log of records, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    history = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, payload = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
            size, kind = struct.unpack_from("<HB", data, at + 4)
            payload += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record.FromString(payload)
                payload = b""
                if record.WhichOneof("record_type") == "history":
                    items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                    history.append({"id": path.stem.removeprefix("run-"), **items})
    return history


@pytest.mark.slow
def test_wandb_offline_is_one_run_with_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    for attempt, resume, steps in ((1, None, range(1, 6)), (2, 3, range(4, 8))):
        tracker = WandbTracker("tests", mode="offline", tags=["a"])
        tracker.start(run_info(tmp_path, resumed=resume is not None, attempt=attempt), step=resume or 0)
        for step in steps:
            tracker.log({"train/loss": float(step)}, step=step, epoch=0)
            tracker.log({"validation/loss": 2.0 * step}, step=step, epoch=0)
        tracker.log_images({"image": torch.rand(3, 4, 5), "byte": torch.zeros(1, 4, 5, dtype=torch.uint8)}, step=step)
        tracker.log_text({"poem": "<b>no tag"}, step=step)
        tracker.log_histograms(histograms({"weights": torch.rand(9)}, World.single("cpu")), step=step)
        tracker.rewind(step - 1)
        tracker.log({"train/loss": -1.0}, step=step, epoch=0)  # Already sent.
        state = tracker.state_dict()
        tracker.finish("failed" if attempt == 1 else "completed")
        # wandb names the folder of an offline run by the second in which it begins.
        time.sleep(1.1)
    history = wandb_history(tmp_path)
    assert [record["_step"] for record in history] == list(range(1, 8))
    assert [record["train/loss"] for record in history] == list(range(1, 8))
    assert [record["validation/loss"] for record in history] == [2 * step for step in range(1, 8)]
    assert [record["_step"] for record in history if any(name.startswith("image") for name in record)] == [5, 7]
    media = [{name.split("/")[0] for name in record} & {"poem", "weights"} for record in history]
    assert media == [set()] * 4 + [{"poem", "weights"}, set(), {"poem", "weights"}]
    assert "&lt;b&gt;no tag" in next(iter(tmp_path.glob("wandb/*/files/media/html/poem*"))).read_text()
    assert {record["id"] for record in history} == {state["id"]}

    for name, value in {"NAME": "other", "RUN_ID": "abcd1234", "PROJECT": "elsewhere", "MODE": "offline"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # It has read the environment once.
    overridden = WandbTracker()
    overridden.start(run_info(tmp_path, resumed=True, attempt=3), step=7)
    assert (overridden._run.name, overridden._run.id, overridden._run.project) == ("other", "abcd1234", "elsewhere")
    overridden.log({"train/loss": 1.0}, step=7, epoch=0)  # It was not sent to the other run.
    assert overridden.state_dict() == {"id": "abcd1234", "name": "digits", "sent": 7}
    overridden.finish("completed")
    monkeypatch.delenv("WANDB_RUN_ID")

    fresh = WandbTracker("tests", mode="disabled")
    fresh.load_state_dict(state)
    fresh.start(run_info(None, resumed=True, attempt=3), step=7)
    assert fresh.state_dict() == state  # Without a run directory, the id is in the checkpoint.
    fresh.finish("completed")

    fork = WandbTracker("tests", mode="disabled")
    fork.load_state_dict(state)
    fork.start(run_info(tmp_path / "fork", name="fork", resumed=True), step=5)
    assert fork.state_dict()["id"] != state["id"], "another run went on from a checkpoint of this one"
    assert fork.state_dict()["sent"] == -1
    fork.finish("completed")


@pytest.mark.slow
def test_mlflow_is_one_run_with_every_step_once_and_a_true_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    client = MlflowClient((tmp_path / "store").as_uri())
    statuses = []
    lives = ((None, range(1, 6), "failed"), (3, range(4, 8), "interrupted"), (7, range(8, 9), "completed"))
    for attempt, (resume, steps, status) in enumerate(lives, 1):
        tracker = MlflowTracker(tracking_uri=(tmp_path / "store").as_uri(), tags={"team": "a"})
        # The config's limits may change, but MLflow allows no parameter to change.
        config = {"max_steps": attempt, "parallel": {"strategy": "ddp", "modules": ["a"]}, "long": "x" * 9000}
        tracker.start(run_info(tmp_path, resumed=resume is not None, attempt=attempt, config=config), step=resume or 0)
        (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        assert run.info.status == "RUNNING"
        for step in steps:
            tracker.log({"train/loss": 1.0 / step, "bad": math.nan}, step=step, epoch=0)
            tracker.log({"validation/loss": 2.0 * step}, step=step, epoch=0)
        tracker.log_images({"validation/image": torch.rand(3, 4, 5)}, step=step)
        tracker.log_text({"poem": f"after {step}"}, step=step)
        tracker.rewind(step - 1)
        tracker.log({"train/loss": -1.0}, step=step, epoch=0)  # Already sent.
        tracker.finish(status)
        statuses.append(client.get_run(run.info.run_id).info.status)
    assert statuses == ["FAILED", "KILLED", "FINISHED"]
    for name, value in (("train/loss", lambda step: 1 / step), ("validation/loss", lambda step: 2.0 * step)):
        history = sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, name))
        assert history == [(step, value(step)) for step in range(1, 9)]
    ended = client.get_run(run.info.run_id)
    assert ended.info.run_name == "digits"
    assert ended.data.params["max_steps"] == "1"
    assert ended.data.params["parallel.strategy"] == "ddp"
    assert ended.data.tags["team"] == "a"
    assert ended.data.tags["headway.status"] == "completed"
    assert [each.path[-6:-4] for each in client.list_artifacts(run.info.run_id, "texts/poem")] == ["05", "07", "08"]
    images = {image.path.split("+timestamp")[0] for image in client.list_artifacts(run.info.run_id, "images")}
    assert images == {f"images/validation~image+step+{step}" for step in (5, 7, 8)}


def test_trials_of_a_sweep_are_a_group_and_have_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from mlflow import MlflowClient

    seen: list[RunInfo] = []

    class Sees(Tracker):
        def start(self, run: RunInfo, *, step: int) -> None:
            seen.append(run)

    for folder in (tmp_path / "digits/trial-003", tmp_path / "alone"):
        TinyTrainer(TinyConfig(max_steps=1), run_dir=folder, world=World.single("cpu"), trackers=[Sees()]).fit()
    assert [(run.name, run.group, run.full_name) for run in seen] == [
        ("trial-003", "digits", "digits/trial-003"), ("alone", None, "alone"),
    ]  # fmt: skip
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **options: given.append(options))
    for run in seen:
        WandbTracker("tests").open_run(run, None)
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    WandbTracker("tests").open_run(seen[0], None)
    assert [(each["name"], each.get("group")) for each in given] == [
        ("digits/trial-003", "digits"), ("alone", None), ("digits/trial-003", None),
    ]  # fmt: skip
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = MlflowTracker(tracking_uri=(tmp_path / "store").as_uri())
    made = MlflowClient((tmp_path / "store").as_uri()).get_run(tracker.open_run(seen[0], None))
    assert (made.info.run_name, made.data.tags["headway.sweep"]) == ("digits/trial-003", "digits")


def test_a_pil_image_is_logged_as_a_tensor() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for mode, channels in (("RGB", 3), ("L", 1), ("RGBA", 3), ("1", 1)):
        tensor = as_tensor(image.new(mode, (4, 2), 1))
        assert (tensor.dtype, list(tensor.shape)) == (torch.uint8, [channels, 2, 4])
    given = torch.zeros(3, 2, 4)
    assert as_tensor(given) is given
    seen: dict[str, torch.Tensor] = {}

    class Sees(Tracker):
        def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
            seen.update(images)

    class Draws(Callback):
        def on_step_end(self, trainer: Any) -> None:
            trainer.log_images({"red": image.new("RGB", (4, 2), (255, 0, 0))})

    TinyTrainer(TinyConfig(max_steps=1), world=World.single("cpu"), callbacks=[Draws()], trackers=[Sees()]).fit()
    assert seen["red"][:, 0, 0].tolist() == [255, 0, 0]
