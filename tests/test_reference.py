"""The reference in docs/reference has every public name, and the run is drawn as it is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from headway.trainer import Callback, CheckpointConfig, Duration
from headway.trainer.callbacks.base import HOOKS
from tests.tiny import StopAt, TinyConfig, TinyTrainer

ROOT = Path(__file__).parents[1]
PACKAGES = ("headway.trainer", "headway.trainer.callbacks", "headway.trainer.trackers", "headway.orchestrator")


def documented() -> dict[str, Any]:
    """What the pages of the reference show, by its path there."""
    paths = [path for page in (ROOT / "docs/reference").glob("*.md") for path in directives(page.read_text())]
    return {path: resolve(path) for path in paths}


def directives(page: str) -> list[str]:
    return re.findall(r"(?m)^::: (\S+)", page)


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_a_page_of_the_reference(package: str) -> None:
    shown = {id(each) for each in documented().values()}
    exported = importlib.import_module(package).__all__
    assert [name for name in exported if id(resolve(f"{package}.{name}")) not in shown] == [], (
        f"add `::: {package}.NAME` to a page in docs/reference"
    )


def test_nothing_is_on_two_pages_or_twice_on_one() -> None:
    shown = documented()
    assert len({id(each) for each in shown.values()}) == len(shown)


class Everything(Callback):
    """Notes which hooks fire, in the order of their first time."""

    def __init__(self) -> None:
        self.fired: dict[str, None] = {}


for hook in HOOKS:
    # What it is called with is checked when the class is made: these were not there then.
    setattr(Everything, hook, lambda self, *_, hook=hook: self.fired.setdefault(hook))


def test_the_drawing_of_a_run_has_every_hook_in_the_order_of_a_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/life-of-a-run.md").read_text()
    drawing = next(block for block in re.findall(r"(?s)```text\n(.*?)```", page) if "on_fit_end" in block)
    drawn = re.findall(r"\bon_\w+", drawing)
    assert sorted(drawn) == sorted(HOOKS)

    every = Duration(1, "steps")
    config = TinyConfig(max_steps=4, log_every=every, evaluate_every=every, checkpoint=CheckpointConfig(every=every))
    watching = Everything()
    TinyTrainer(config, run_dir=tmp_path, callbacks=[watching, StopAt(2)]).fit()
    fired = list(watching.fired)
    assert len(fired) >= len(HOOKS) - 4
    assert fired == [each for each in drawn if each in watching.fired]
