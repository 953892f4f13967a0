"""Messages of a run are records of `logging` too: files and levels work as users expect."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.orchestrator.display.console import RunConsole
from headway.trainer import Callback
from tests.tiny import TinyConfig, TinyTrainer

HEADWAY = logging.getLogger("headway")


class Hello(Callback):
    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == 1:
            trainer.print("hello from the first step")


@pytest.fixture(autouse=True)
def without_pytests_handlers() -> Iterator[None]:
    """The level and the handlers that users find: none."""
    root = logging.getLogger()
    before = root.handlers[:], HEADWAY.handlers[:], HEADWAY.level
    root.handlers[:] = []
    yield
    root.handlers[:], HEADWAY.handlers[:] = before[:2]
    HEADWAY.setLevel(before[2])


def train(**settings: Any) -> None:
    TinyTrainer(TinyConfig(max_steps=1), callbacks=[Hello()], **settings).fit()


def test_without_any_handler_messages_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    out, err = capsys.readouterr()
    assert (out.count("hello from"), err) == (1, "")


def test_a_start_without_anything_left_to_train_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    for limit in (1, 1, 2):
        TinyTrainer(TinyConfig(max_steps=limit), run_dir=tmp_path, printer=lines.append).fit()
    text = "nothing is left to train: max_steps=1 reached at step 1. To continue, raise the limit; to start over"
    assert [line for line in lines if line.startswith("nothing")] == [f"{text}, use another run_dir"]


def test_several_values_are_printed_as_by_print(capsys: pytest.CaptureFixture[str]) -> None:
    TinyTrainer(TinyConfig(max_steps=1)).print("steps", 3, None)
    assert capsys.readouterr().out == "steps 3 None\n"


def test_a_file_gets_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.FileHandler(tmp_path / "run.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.getLogger().addHandler(handler)
    train()
    handler.close()
    assert "INFO headway.run hello from the first step\n" in (tmp_path / "run.log").read_text()
    assert capsys.readouterr().out.count("hello from") == 1


def test_a_handler_that_prints_replaces_the_print(capsys: pytest.CaptureFixture[str]) -> None:
    HEADWAY.addHandler(logging.StreamHandler(sys.stderr))
    train()
    out, err = capsys.readouterr()
    assert (out.count("hello from"), err.count("hello from")) == (0, 1)


def test_a_level_silences_them(capsys: pytest.CaptureFixture[str]) -> None:
    HEADWAY.setLevel(logging.WARNING)
    train(show_progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_printer_of_the_users_gets_them_whatever_prints() -> None:
    HEADWAY.addHandler(logging.StreamHandler(sys.stderr))
    printed: list[str] = []
    train(printer=printed.append)
    assert [line for line in printed if "hello from" in line] == ["hello from the first step"]


def test_lines_of_a_run_on_ray_are_records_but_its_progress_is_not(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "run.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    HEADWAY.addHandler(handler)
    screen = io.StringIO()
    shown = RunConsole(Console(file=screen, width=200))
    shown.event({"time": 1.0, "event": "message", "text": "said by the main rank"})
    shown.event({"time": 2.0, "event": "warning", "category": "UserWarning", "text": "too hot"})
    shown.record({"step": 7, "epoch": 0, "attempt": 1, "elapsed_s": 1.0, "train/loss": 0.5})
    handler.close()
    assert (tmp_path / "run.log").read_text() == "INFO said by the main rank\nWARNING UserWarning: too hot\n"
    assert "said by the main rank" in screen.getvalue()
    assert "step 7" in screen.getvalue()
