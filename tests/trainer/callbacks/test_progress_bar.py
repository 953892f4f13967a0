"""Progress output: a bar on a terminal, one line per record elsewhere, from the main rank only."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer.callbacks import Pace, ProgressBar, human_duration, progress_line
from headway.trainer.config import TrainerConfig
from headway.trainer.distributed.world import World
from headway.trainer.loop.progress import Duration
from headway.trainer.trainer import Trainer
from tests.distributed import run_on_ranks


@dataclass(frozen=True, kw_only=True)
class Config(TrainerConfig):
    max_epochs: int | None = 2
    log_every: Duration = Duration(5, "steps")


class Tiny(Trainer[Config]):
    """Twelve updates in two epochs, each followed by an evaluation."""

    def configure_models(self) -> None:
        self.model = nn.Linear(2, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def configure_dataloaders(self) -> Any:
        rows = torch.ones(24, 2)
        return torch.utils.data.DataLoader(rows, batch_size=4), torch.utils.data.DataLoader(rows[:4], batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and self.global_step == 8:
            self.print("a sample")
        return {"loss": (self.model(batch) ** 2).mean()}


def fit(stream: io.StringIO, *, live: bool | None = None, world: World | None = None) -> None:
    bar = ProgressBar(stream, live=live)
    Tiny(Config(), callbacks=[bar], printer=bar.print, world=world or World.single("cpu")).fit()


def test_without_a_terminal_there_is_one_line_per_record() -> None:
    stream = io.StringIO()
    fit(stream)
    written = stream.getvalue()
    assert "\r" not in written
    assert "\x1b" not in written
    lines = written.splitlines()
    steps = [
        int(match[1]) for line in lines if (match := re.match(r"step (\d+)/12 · epoch \d · loss .* samples/s", line))
    ]
    assert steps == [5, 6, 10, 12]
    assert sum("validation/loss" in line for line in lines) == 2
    assert lines.count("a sample") == 1
    assert len(lines) == 7


def test_on_a_terminal_a_bar_is_redrawn_and_lines_stand_above_it() -> None:
    stream = io.StringIO()
    fit(stream, live=True)
    screen: list[str] = [""]
    for piece in re.split(r"(\n|\r\x1b\[2K)", stream.getvalue()):
        if piece == "\n":
            screen.append("")
        elif piece.startswith("\r"):
            screen[-1] = ""
        else:
            screen[-1] += piece
    assert screen[0] == "a sample" or "validation/loss" in screen[0]
    assert "a sample" in screen
    assert sum("validation/loss" in line for line in screen) == 2
    assert re.match(r"━{16} 100% step 12/12 · epoch 2 · loss", screen[-2])
    assert screen[-1] == ""
    assert not any("evaluating" in line for line in screen)


class OfTwoSets(Tiny):
    """A trainer with two named validation sets."""

    def configure_dataloaders(self) -> Any:
        train, validation = super().configure_dataloaders()
        return train, {"easy": validation, "hard": validation}


@pytest.mark.parametrize("live", [False, True])
def test_named_evaluation_sets_each_have_their_numbers_in_the_line(live: bool) -> None:
    stream = io.StringIO()
    OfTwoSets(Config(), callbacks=[ProgressBar(stream, live=live)], world=World.single("cpu")).fit()
    lines = re.split(r"\n|\r\x1b\[2K", stream.getvalue())
    evaluations = [line for line in lines if "validation/" in line]
    assert len(evaluations) == 2
    for line, start in zip(evaluations, ("step 6/12 · epoch 1", "step 12/12 · epoch 2"), strict=True):
        assert re.match(rf"{start} · validation/easy/loss [\d.e+-]+ · validation/hard/loss [\d.e+-]+", line)
    assert any(line.startswith(("━", "╌")) for line in lines) == live


def lines_of_rank(world: World) -> str:
    stream = io.StringIO()
    fit(stream, world=world)
    return stream.getvalue()


def test_only_the_main_rank_prints() -> None:
    main, other = run_on_ranks(lines_of_rank, 2)
    assert "step 12/12" in main or "step 6/6" in main
    assert other == ""


@pytest.mark.parametrize(
    ("record", "totals", "line"),
    [
        (
            {
                "step": 1250,
                "epoch": 2,
                "train/loss": 1.23449,
                "tokens_per_s": 45120.4,
                "samples_per_s": 88.0,
                "data_wait": 0.02,
            },
            {"total_steps": 5000, "left_s": 192.2},
            "step 1,250/5,000 · epoch 2 · loss 1.234 · 45,120 tokens/s · data 2 % · 3m12s left",
        ),
        (
            {"step": 3, "epoch": 0, "train/loss": 2.0, "samples_per_s": 1e4},
            {},
            "step 3 · epoch 0 · loss 2 · 10,000 samples/s",
        ),
        ({"step": 3, "epoch": 0, "train/loss": "NaN"}, {}, "step 3 · epoch 0 · loss nan"),
        (
            {"step": 3, "epoch": 1, "validation/loss": 0.51239, "validation/accuracy": 0.9},
            {"total_steps": 3},
            "step 3/3 · epoch 1 · validation/loss 0.5124 · validation/accuracy 0.9",
        ),
    ],
)
def test_progress_line(record: dict[str, Any], totals: dict[str, Any], line: str) -> None:
    assert progress_line(record, **totals) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (192, "3m12s"), (7500, "2h05m"), (86400 * 3 + 3600 * 4 + 59, "3d04h")],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_time_left_leaves_the_first_update_of_every_attempt_out() -> None:
    pace = Pace()
    records: list[tuple[int, int, dict[str, float]]] = [
        (1, 1, {}),
        (100, 1, {"step_s": 0.1}),
        (150, 1, {"step_s": 0.2}),
        (151, 2, {}),
        (200, 2, {"step_s": 0.1}),
    ]
    left = [pace.left_s({"step": step, "attempt": attempt, **took}, 1000) for step, attempt, took in records]
    assert left == [None, pytest.approx(90.0), pytest.approx(850 * 0.13), None, pytest.approx(80.0)]
    assert pace.left_s({"step": 250, "attempt": 2, "step_s": 0.1}, None) is None
