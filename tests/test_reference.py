"""The reference in docs/reference lists every public name, its examples run, and its diagram of a run is correct."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
import pytest
import yaml

import headway.trainer.session
import headway.trainer.trainer
from headway.trainer import Callback, CheckpointConfig, Duration
from headway.trainer.callbacks.base import HOOKS
from tests.tiny import StopAt, TinyConfig, TinyTrainer

ROOT = Path(__file__).parents[1]
PACKAGES = ("headway.trainer", "headway.trainer.callbacks", "headway.trainer.trackers", "headway.orchestrator")


def documented() -> dict[str, Any]:
    """Return the objects that the reference shows, by path."""
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


READ = {
    "ActiveRun", "CallbackList", "Checkpoint", "Description", "Estimate", "File", "FitResult", "Histogram", "Plan",
    "PrepareProgress", "Prepared", "Progress", "Run", "RunInfo", "RunResult", "Source", "SweepResult", "TextPlan",
    "TrackerList", "TrialResult",
}  # fmt: skip
"""Classes that Headway makes, and users read. Errors and protocols have no examples either."""

DOCUMENTED = documented()


def test_every_class_that_users_make_has_an_example() -> None:
    made = {
        path: each
        for path, each in DOCUMENTED.items()
        if inspect.isclass(each) and not issubclass(each, Exception) and not getattr(each, "_is_protocol", False)
    }
    without = {path for path, each in made.items() if "Example:\n" not in (each.__doc__ or "")}
    missing = {path.rpartition(".")[2] for path in without} - READ
    assert missing == set(), f"give {missing} an Example, or say that Headway makes them"


def test_every_class_and_function_of_the_reference_says_what_it_is() -> None:
    bare = [
        path
        for path, each in DOCUMENTED.items()
        if (inspect.isclass(each) or inspect.isroutine(each)) and not (each.__doc__ or "").strip()
    ]
    assert bare == []


def test_every_parameter_and_attribute_of_the_reference_has_a_type() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (options,) = [plugin["mkdocstrings"]["handlers"]["python"] for plugin in config["plugins"] if plugin != "search"]
    loader = griffe.GriffeLoader(
        search_paths=[ROOT / path for path in options["paths"]],
        extensions=griffe.load_extensions(*(f"{ROOT}/{path}" for path in options["options"]["extensions"])),
        docstring_parser=griffe.Parser.google,
        docstring_options={**options["options"]["docstring_options"], "warnings": False},
    )
    headway = loader.load("headway")
    loader.resolve_aliases()
    shown = [headway[path.removeprefix("headway.")] for path in DOCUMENTED]
    shown = [each.final_target if each.is_alias else each for each in shown]
    untyped = [
        f"{each.path}: {item.name}"
        for owner in shown
        for each in (owner, *owner.members.values())
        if not each.is_alias and each.docstring is not None
        for section in each.docstring.parsed
        if section.kind.value in ("parameters", "attributes")
        for item in section.value
        if item.annotation is None
    ]
    assert untyped == [], f"annotate {untyped}"


EXAMPLES = [
    example
    for path, each in DOCUMENTED.items()
    if isinstance(each, ModuleType) or inspect.isclass(each) or inspect.isroutine(each)
    for example in doctest.DocTestFinder(exclude_empty=True).find(each, path, globs={})
    if example.examples
]


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Provide the folder and names that the examples of the reference assume."""
    page = (ROOT / "docs/reference/index.md").read_text()
    (code,) = re.findall(r"(?s)```python\n(.*?)```", page)
    folder, names = tmp_path_factory.mktemp("examples"), {"__name__": "beginning"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(code, "docs/reference/index.md", "exec"), names)
    return folder, names


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_the_examples_of_the_reference_run(
    example: doctest.DocTest, beginning: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = beginning
    monkeypatch.chdir(folder)
    example.globs = dict(names)
    told: list[str] = []
    # The display of progress, with times, is no result of an example.
    for landing in (headway.trainer.trainer, headway.trainer.session):
        monkeypatch.setattr(landing, "ProgressBar", lambda: None)
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append, clear_globs=False)
    assert "".join(told) == ""
    assert not [line for line in example.examples if "SKIP" in line.source], "an example that is skipped does not run"


def test_nothing_is_on_two_pages_or_twice_on_one() -> None:
    shown = documented()
    assert len({id(each) for each in shown.values()}) == len(shown)


class Everything(Callback):
    """Records the hooks that fire, in the order of their first call."""

    def __init__(self) -> None:
        self.fired: dict[str, None] = {}


for hook in HOOKS:
    # Hook names are checked when the class is created: these did not exist then.
    setattr(Everything, hook, lambda self, *_, hook=hook: self.fired.setdefault(hook))


def test_the_drawing_of_a_run_has_every_hook_in_the_order_of_a_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/life-of-a-run.md").read_text()
    drawing = next(block for block in re.findall(r"(?s)```text\n(.*?)```", page) if "on_fit_end" in block)
    drawn = re.findall(r"\bon_\w+", drawing)
    assert sorted(drawn) == sorted(HOOKS)

    every = Duration(1, "steps")
    config = TinyConfig(
        max_steps=4, log_every=every, evaluate_every=every, checkpoint=CheckpointConfig(every=every, background=False)
    )
    watching = Everything()
    TinyTrainer(config, run_dir=tmp_path, callbacks=[watching, StopAt(2)]).fit()
    fired = list(watching.fired)
    assert len(fired) >= len(HOOKS) - 5
    assert fired == [each for each in drawn if each in watching.fired]
