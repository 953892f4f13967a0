"""Reports of runs and sweeps: correct, self-contained, safe, and rendered by a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import ASHA, Choice, Experiment, LogUniform, Run, Search, write_report
from headway.orchestrator.cli.main import main
from headway.orchestrator.reports.charts import Line, _Scale, _thinned, curves
from headway.orchestrator.reports.sweep import _figures
from headway.orchestrator.runs.goodput import goodput_report_of
from headway.orchestrator.runs.open import open_run, open_sweep
from headway.orchestrator.storage.events import EventWriter
from headway.orchestrator.sweeps.record import TrialResult
from headway.orchestrator.sweeps.result import SweepResult, labels
from headway.orchestrator.train.run_callback import RunCallback
from headway.trainer.errors import ConfigError
from tests.tiny import TinyConfig, TinyTrainer

OWNED = "<b>bold</b></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
"""A malicious name."""


@dataclass(frozen=True, kw_only=True)
class NamedConfig(TinyConfig):
    note: str


class Named(TinyTrainer):
    """Names a metric after the note of its config, and logs one non-finite value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(self.config, NamedConfig)
        if self.training:
            self.log(self.config.note, math.inf if self.global_step == 3 else 1.0)
        return super().training_step(batch, batch_idx)


def train(storage: Path, name: str = "one", **config: Any) -> Run:
    """Make the files of a run without Ray: two attempts, of which the first failed."""
    settings: dict[str, Any] = {"max_epochs": 4, "log_every": "2 steps", "note": OWNED, **config}
    experiment = Experiment(name=name, trainer=Named, config=NamedConfig(**settings), storage=str(storage))
    run = open_run(experiment).run
    driver = EventWriter(run.folder, "driver")
    driver.add("driver_started")
    worker = {"rank": 0, "host": "here", "pid": 1}
    driver.add("attempt_started", attempt=1, world_size=1, workers=[worker])
    driver.add("training", attempt=1, step=0)
    driver.add(
        "rank_failed", attempt=1, rank=0, step=1, type="ValueError", message=OWNED, traceback=f"Traceback\n{OWNED}"
    )
    driver.add("group_failed", text=f"rank 0 raised ValueError: {OWNED}", retrying=True)
    driver.add("attempt_started", attempt=2, world_size=1, workers=[worker])
    bridge = RunCallback(
        run.folder, EventWriter(run.folder, "rank-0"), is_main=True, lease=run.lease, polls_preemption=False
    )
    trainer = Named(experiment.config, run_dir=run.run_dir, callbacks=[bridge], attempt=2)
    result = trainer.fit()
    driver.add("attempt_ended", attempt=2, status=result.status, reason=result.reason, step=result.steps)
    driver.add("driver_ended", status=result.status)
    run.update(
        status=result.status, reason=result.reason, steps=result.steps, metrics=result.metrics, attempts=2, failures=1,
        best_metric=result.best_metric, best_step=result.best_step, ended=run.record.started,
    )  # fmt: skip
    return run


def sweep(storage: Path, trials: int = 5) -> None:
    """Make the files of a sweep: the last trial failed, the one before has no finite metric, the second is the best."""
    experiment = Experiment(name="many", trainer=TinyTrainer, config=TinyConfig(max_epochs=2), storage=str(storage))
    space = {
        "config.learning_rate": LogUniform(1e-4, 1e-1),
        "config.width": Choice([4, 9]),
        "config.noise": Choice([0.0]),
    }
    many = open_sweep(experiment, Search(space=space, trials=trials, scheduler=ASHA()))
    for index in range(trials):
        name, values = f"trial-{index:03d}", {"config.learning_rate": 10.0**-index, "config.width": [4, 9][index % 2]}
        values["config.kind"] = OWNED if index % 2 else "plain"
        many.note("trial_suggested", trial=name, index=index, values=values)
        trial = Experiment(name=name, trainer=TinyTrainer, config=TinyConfig(max_epochs=2), storage=many.sweep_dir)
        run = open_run(trial).run
        worth = [0.9, 0.3, 0.5, math.nan, math.nan][index % 5]
        for step in (10, 20):
            run.folder.append(
                "metrics.jsonl", json.dumps({"step": step, "epoch": 1, "validation/loss": worth + 10 / step})
            )
        failed = index == trials - 1
        status, error = ("failed", f"ValueError: {OWNED}") if failed else ("completed", None)
        run.update(status=status, error=error, steps=20, best_metric=worth if math.isfinite(worth) else None)
        metric = worth if math.isfinite(worth) and not failed else None
        many.note("trial_ended", trial=name, status=status, reason="", error=error, metric=metric, steps=20)
    many.update(status="completed")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and a finished sweep, with their reports."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder)
    sweep(folder)
    for name in ("one", "many"):
        assert write_report(name, str(folder)) == f"{folder}/{name}/report.html"
    return folder


class Text(HTMLParser):
    """The cells, headings and paragraphs of a page, without its scripts."""

    CELLS = ("td", "th", "h1", "h2", "h3", "p", "pre", "summary")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.links: list[str] = []
        self._is_open = False
        self.feed(html)
        self.cells = [cell.strip() for cell in self.cells]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag in self.CELLS:
            self.cells.append("")
            self._is_open = True

    def handle_endtag(self, tag: str) -> None:
        self._is_open = self._is_open and tag not in self.CELLS

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.cells[-1] += data

    @property
    def text(self) -> str:
        return "\n".join(self.cells)


def of(storage: Path, name: str) -> Text:
    return Text((storage / name / "report.html").read_text())


def test_the_page_of_a_run_says_what_its_files_say(storage: Path) -> None:
    run, page = Run(f"{storage}/one"), of(storage, "one")
    for heading in ("Curves", "Where the time went", "Attempts", "Checkpoints", "Configuration", "Events"):
        assert heading in page.cells
    cells = page.cells
    assert cells[cells.index("steps") + 1] == str(run.record.steps)
    for figure in ("loss", "accuracy", "learning rate", "grad_norm", "samples_per_s", "seconds by class"):
        assert figure in cells
    # Settings that differ from the defaults: value and default.
    assert cells[cells.index("config.max_epochs") + 1 :][:2] == ["4", "null"]
    assert cells[cells.index("config.note") + 1 :][:2] == [OWNED, "(required)"]
    assert "config.width" not in cells
    assert f"Goodput: {100 * goodput_report_of(run).goodput:.1f} % of it" in page.text
    assert "train/" + OWNED + ": 1 value is not finite and not drawn, the first at step 4." in page.text
    assert {f"step-{run.record.steps:08d}", "group failed", "rank 0 raised ValueError: " + OWNED} <= set(cells)
    assert f"Traceback\n{OWNED}" in page.cells


def test_the_page_of_a_sweep_has_its_trials_the_best_first(storage: Path) -> None:
    page = of(storage, "many")
    cells = page.cells
    names = [cell for cell in cells if re.fullmatch(r"trial-\d+", cell)]
    assert names == ["trial-001", "trial-002", "trial-000", "trial-003", "trial-004", "trial-004"]
    assert cells[cells.index("best") + 1] == "trial-001: 0.3"
    assert cells[cells.index("trials") + 1] == "4 completed, 1 failed"
    assert f"ValueError: {OWNED}" in cells
    assert "Not drawn, without a finite value: 2 of 5 trials." in page.text


@pytest.mark.parametrize("name", ["one", "many"])
def test_a_page_is_one_file_whose_names_are_no_markup(storage: Path, name: str) -> None:
    text, page = (storage / name / "report.html").read_text(), of(storage, name)
    assert text.count("* plotly.js v") == 1, "the library must be in it, and once"
    assert len(text) < 5_500_000
    assert "img" not in page.tags
    assert page.links == ["data:,"]
    assert "<script>document.title" not in text


def test_a_run_under_way_without_metrics_and_one_that_failed_at_once_have_pages(tmp_path: Path) -> None:
    experiment = Experiment(name="new", trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path))
    run = open_run(experiment).run
    page = Text(Path(write_report("new", str(tmp_path))).read_text())
    for line in ("There is no metric yet.", "Nothing is known yet.", "There are none.", "running"):
        assert line in page.text
    run.update(status="failed", error="ConfigError: nothing fits")
    page = Text(Path(write_report("new", str(tmp_path), str(tmp_path / "here.html"))).read_text())
    for line in ("There are no metrics.", "ConfigError: nothing fits", "failed"):
        assert line in page.text
    assert (tmp_path / "new/report.html").exists()


def test_the_command_says_where_the_page_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_run(Experiment(name="new", trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path)))
    with pytest.raises(SystemExit) as ended:
        main(["report", "new", "--storage", str(tmp_path)])
    assert not ended.value.code
    assert capsys.readouterr().out == f"{tmp_path}/new/report.html\n"
    with pytest.raises(SystemExit) as ended:
        main(["report", "old", "--storage", str(tmp_path)])
    assert ended.value.code == 2
    assert "there is no run 'old'" in capsys.readouterr().err


def test_without_plotly_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_run(Experiment(name="new", trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[report\]'"):
        write_report("new", str(tmp_path))


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(float(step), 1.0, "") for step in range(100_000)]
    points[54_321] = (54_321.0, 99.0, "")
    points[77_777] = (77_777.0, -99.0, "")
    kept = _thinned(points)
    assert len(kept) < 2100
    assert [point[0] for point in kept] == sorted(point[0] for point in kept)
    assert {points[54_321], points[77_777], points[0], points[-1]} <= set(kept)
    assert curves("nothing", [Line(name="a", x=[1.0, 2.0], y=[math.nan, math.inf])]) == ""


def test_an_axis_is_logarithmic_where_its_values_are_far_apart() -> None:
    wide, narrow, words = _Scale.of([1e-4, 1e-2, 1.0]), _Scale.of([1.0, 2.0, 3.0]), _Scale.of(["b", "a", None])
    assert [wide.place(each) for each in (1e-4, 1e-2, 1.0)] == pytest.approx([0, 0.5, 1])
    assert [narrow.place(each) for each in (1.0, 2.0, 3.0)] == pytest.approx([0, 0.5, 1])
    assert {words.place(each) for each in ("b", "a", None)} == {0, 0.5, 1}
    assert _Scale.of([3]).place(3) == 0.5
    # The cross-entropy of perfect predictions is -0.0.
    for values in ([0.0, -0.0, 1.0, 2.0], [1, 1.0, 2, 3], [1, 1.0], [0.0, -0.0]):
        scale = _Scale.of(values)
        assert scale.place(values[0]) == scale.place(values[1])
        assert len({scale.place(each) for each in values}) == len(values) - 1
    assert [text for _, text in _Scale.of([0.1391, 0.1446, 1.0]).ticks] == ["0.139", "1"]


def test_of_many_trials_the_best_hundred_are_drawn(tmp_path: Path) -> None:
    trials = [
        TrialResult(
            name=f"trial-{index:03d}", index=index, status="completed", metric=float(index), run_dir=str(tmp_path),
            values={"config.head.lr": float(index), "config.body.lr": 0.5, "config.width": index % 3},
        )
        for index in range(130)
    ]  # fmt: skip
    few = SweepResult(str(tmp_path), "completed", "", trials[:100], "validation/loss", "min")
    assert "the table shows all" not in _figures(few)
    text = _figures(replace(few, trials=trials))
    assert "The best 100 of 130 trials; the table shows all." in text
    (drawn,) = re.findall(r"(?s)hyperparameters by trial: dark is good.*?</figure>", text)
    assert {f"trial-{index:03d}" for index in range(100)} == set(re.findall(r"trial-\d+", drawn))
    assert '"ticktext":["head.lr","body.lr","width","validation\\u002floss"]' in drawn


def test_two_fields_of_one_name_are_told_apart() -> None:
    assert labels(["config.lr", "config.width"]) == {"config.lr": "lr", "config.width": "width"}
    assert labels(["config.a.lr", "config.b.lr", "config.a.b"]) == {
        "config.a.lr": "a.lr", "config.b.lr": "b.lr", "config.a.b": "b",
    }  # fmt: skip
    assert labels(["lr", "config.lr"]) == {"lr": "lr", "config.lr": "config.lr"}


# ---- In a browser ----------------------------------------------------------------------------------------------------

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


@dataclass(frozen=True)
class Shown:
    """A page as rendered by a browser.

    Attributes:
        dom: the page after its scripts ran.
        console: their messages.
        colors: number of colors in the screenshot.
    """

    dom: str
    console: list[str]
    colors: int


def look(page: Path, folder: Path, *, width: int = 1280, height: int = 3000) -> Shown:
    """Open a page in Chromium, without a network."""
    from PIL import Image

    picture = folder / "page.png"
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
         "--disable-sync", "--disable-background-networking", "--disable-component-update", "--no-first-run",
         "--hide-scrollbars", "--v=0", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
         "--virtual-time-budget=10000", f"--screenshot={picture}", "--dump-dom", "--enable-logging=stderr",
         page.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    with Image.open(picture) as image:
        assert image.size == (width, height)
        colors = len(image.convert("RGB").getcolors(1 << 24) or ())
    return Shown(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE:" in line], colors)


@pytest.mark.extended
@pytest.mark.skipif(not BROWSER, reason="there is no chromium here: apt-get install chromium")
@pytest.mark.parametrize(("name", "lines"), [("one", 10), ("many", 7)])
def test_a_browser_draws_the_page_without_a_complaint(storage: Path, name: str, lines: int, tmp_path: Path) -> None:
    """As wide as a screen, and as narrow as this browser allows."""
    for width in (1280, 500):
        folder = tmp_path / str(width)
        folder.mkdir()
        shown = look(storage / name / "report.html", folder, width=width)
        assert shown.console == []
        assert f"<title>{name}</title>" in shown.dom, "a name has become markup"
        if name == "many":
            assert re.search(r"<text[^>]*>&lt;b&gt;bold", shown.dom), "what was tried has become plotly's markup"
        curves = re.findall(r'<path class="js-line" d="M[^"]{8,}"', shown.dom)
        assert len(curves) >= lines
        assert shown.colors > 100, "the picture is blank"
        figures = re.findall(r'<svg class="main-svg"[^>]*?width="([\d.]+)"', shown.dom)
        assert len(figures) >= 4
        assert max(map(float, figures)) <= width, "a figure is wider than the window"


@pytest.mark.extended
@pytest.mark.skipif(not BROWSER, reason="there is no chromium here: apt-get install chromium")
def test_the_browser_of_these_tests_tells_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<title>bad</title><p>text</p><script>nobody()</script>")
    shown = look(page, tmp_path, width=300, height=200)
    assert len(shown.console) == 1
    assert "nobody is not defined" in shown.console[0]
    assert shown.colors < 100
