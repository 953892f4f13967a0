"""The command line: output, errors of one line on standard error, and exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from headway.orchestrator import Choice, Experiment, RunResult, Search
from headway.orchestrator.cli.main import _exit_code, app, main
from headway.orchestrator.runs.open import open_run, open_sweep
from headway.orchestrator.runs.run import Driver
from headway.orchestrator.sweeps.record import TrialResult
from headway.orchestrator.sweeps.result import SweepResult
from headway.orchestrator.watchdog.worker import heartbeat_file, watch_folder
from headway.trainer.checkpoints.format.file_checksums import FileChecksum
from headway.trainer.checkpoints.format.manifest import Checkpoint, write_manifest
from tests.programs import Program
from tests.tiny import TinyConfig, TinyTrainer


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "tests.tiny:TinyTrainer", "config.widht=3"], "did you mean config.width?"),
        (["fit", "no_such.py"], "there is no file no_such.py"),
        (["fit", "tests.tiny:TinyTrainer", "--width=3"], "settings have no dashes, as in config.learning_rate=3e-4"),
        (["fit", "--dryrun", "tests.tiny:TinyTrainer"], "there is no option --dryrun: did you mean --dry-run?"),
        (["sweep", "tests.tiny:TinyTrainer", "--trials", "3"], "settings have no dashes"),
        (["fit", "tests.tiny:TinyTrainer", "scaling.workers=4096"], "this machine has"),
        (["fit", "tests.tiny:TinyTrainer", "config.max_steps=1", "storage=/dev/null/runs"], "cannot be written"),
        (["fit", "tests.tiny:TinyTrainer", "--resume", "/no/such"], "resume=/no/such is not a checkpoint"),
        (
            ["fit", "tests.tiny:TinyTrainer", "--restore", "models, weights"],
            "restore must be a collection of models, optimizers",
        ),
        (["runs", "--storage", "/no/such", "show", "x"], "there is no run 'x' in /no/such"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("headway: ")
    assert len(err.splitlines()) == 1


def test_an_unknown_command_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "fti")
    assert code == 2
    assert "fti" in err


def test_an_old_name_is_warned_of_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "old.py"
    file.write_text(
        "from dataclasses import dataclass, field\nfrom headway.trainer import Trainer, TrainerConfig\n"
        "@dataclass(frozen=True, kw_only=True)\nclass C(TrainerConfig):\n"
        "    rate: float = field(default=1.0, metadata={'deprecated_names': ('lr',)})\n"
        "class T(Trainer[C]):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = "from headway.orchestrator.cli.main import main; main()"
    done = Program(program, "fit", str(file), "config.lr=2", "--print-config")
    out, err = done.wait()
    assert done.returncode == 0
    assert "  rate: 2.0" in out
    assert err == "headway: FutureWarning: config.lr is now called config.rate\n"


def test_the_config_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fit", "tests.tiny:TinyTrainer", "config.width=3", "--print-config")
    assert code == 0
    assert "trainer: tests.tiny:TinyTrainer" in out
    assert "  width: 3" in out


def test_overrides_come_from_the_environment_and_the_line_wins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_OVERRIDES", "config.width=3 config.noise=0.5 'storage=a folder'")
    code, out, _ = run(capsys, "fit", "tests.tiny:TinyTrainer", "config.width=4", "--print-config")
    assert code == 0
    assert "  width: 4\n" in out
    assert "  noise: 0.5\n" in out
    assert "/a folder\n" in out
    monkeypatch.setenv("HEADWAY_OVERRIDES", "config.widht=3")
    code, _, err = run(capsys, "fit", "tests.tiny:TinyTrainer", "--print-config")
    assert code == 2
    assert "did you mean config.width?" in err


def test_runs_are_a_table_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        run(capsys, "runs", "--storage", str(tmp_path))[1].replace("\n", "")
        == f"no runs of `headway fit` in {tmp_path}"
    )
    experiment = Experiment(name="one", trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path))
    open_run(experiment).run.update(status="completed", steps=1234, metrics={"validation/loss": 0.25}, attempts=2)
    code, out, _ = run(capsys, "runs", "--storage", str(tmp_path))
    assert code == 0
    assert out.splitlines()[1].split()[:5] == ["one", "completed", "1,234", "0.25", "2"]
    code, out, _ = run(capsys, "runs", "--storage", str(tmp_path), "show", "one")
    assert code == 0
    for part in ("status     completed", "tests.tiny:TinyTrainer with 1 worker", str(tmp_path / "one"), "  width: 9"):
        assert part in out


def test_the_page_of_a_run_has_its_ledger_and_where_its_processes_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For a running run, up to now: the last heartbeat of the main rank is not in the events yet."""
    experiment = Experiment(name="one", trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path))
    folder = open_run(experiment).run.folder
    now = time.time()
    seconds = {"setting up": 1.0, "reading data": 31.0, "forward": 10.0, "optimizer": 58.0}
    heard = {"attempt": 1, "at": now, "step": 9, "updates": 9, "phase": "forward", "seconds": seconds}
    worker = {"rank": 0, "host": "here", "pid": 4321, "began": now - 101, "entered": now - 101}
    for event in (
        {"time": now - 101, "event": "driver_started"},
        {"time": now - 100, "event": "attempt_started", "attempt": 1, "world_size": 1, "workers": [worker]},
    ):
        folder.append("events.jsonl", json.dumps(event))
    watched = watch_folder(folder)
    watched.prepare()
    watched.write(heartbeat_file(0), json.dumps({"spent": heard}))
    code, out, _ = run(capsys, "runs", "--storage", str(tmp_path), "show", "one")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "rank 0 process 4321 on here" in lines
    assert f"driver process {os.getpid()} on {socket.gethostname()}" in lines
    # The shares shrink while this test takes its time.
    assert any(re.fullmatch(r"compute [56]\d\.\d % 68\.0 s", line) for line in lines)
    assert any(re.fullmatch(r"goodput [56]\d\.\d % of the time went into updates that counted", line) for line in lines)
    assert any(
        re.match(r"fix first data wait is [23]\d % of the time: use more loader workers", line) for line in lines
    )


@pytest.mark.parametrize(
    ("status", "signal", "code"),
    [
        ("completed", None, 0),
        ("stopped", None, 0),
        ("time_limit", None, 3),
        ("interrupted", 2, 130),
        ("interrupted", 15, 143),
        ("failed", None, 1),
    ],
)
def test_exit_codes(status: Any, signal: int | None, code: int) -> None:
    assert _exit_code(RunResult(status=status, reason="", run_dir="x", signal=signal)) == code


@pytest.mark.parametrize(
    ("status", "signal", "code"),
    [("completed", None, 0), ("stopped", None, 0), ("time_limit", None, 3), ("interrupted", 15, 143)],
)
def test_exit_codes_of_a_sweep(
    status: str, signal: int | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [TrialResult(name="trial-000", index=0, values={}, run_dir="x", status="completed")]
    result = SweepResult("x", status, "", trials, "train/loss", "min", signal=signal)
    monkeypatch.setattr("headway.orchestrator.sweeps.search.resolve_search", lambda *_, **__: (None, None))
    monkeypatch.setattr("headway.orchestrator.sweeps.sweep.sweep", lambda *_, **__: result)
    assert run(capsys, "sweep", "x.py")[0] == code


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A storage with a run "one" that has a checkpoint, and a sweep "many"."""
    folder = tmp_path_factory.mktemp("runs")
    experiment = Experiment(name="one", trainer=TinyTrainer, config=TinyConfig(), storage=str(folder))
    opened = open_run(experiment).run
    opened.update(status="completed", steps=8, metrics={"validation/loss": 0.25, "train/loss": math.nan})
    checkpoint = folder / "one/checkpoints/step-00000008"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text("weights")
    description = Checkpoint(
        path=str(checkpoint), step=8, epoch=1, metrics={"validation/loss": 0.25}, meta={}, world_size=1, sequence=1,
        time_s=time.time(),
    )  # fmt: skip
    files = {"weights": FileChecksum.of(checkpoint / "weights")}
    (checkpoint / "manifest.json").write_bytes(write_manifest(description, files))
    open_sweep(replace(experiment, name="many"), Search(space={"config.width": Choice([4, 8])}, metric="train/loss"))
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "Train a run, or resume it."),
        (["--version"], "headway "),
        (["runs", "ls"], "many: a sweep, "),
        (["runs", "show", "one"], "completed"),
        (["runs", "show", "many"], "no trials yet"),
        (["checkpoints", "ls", "one"], "step-00000008"),
        (["checkpoints", "pin", "one", "8"], "step-00000008 is pinned"),
        (["checkpoints", "verify", "one"], "step-00000008  whole"),
    ],
)
def test_a_command_that_reads_files_imports_nothing_heavy(storage: str, arguments: list[str], shown: str) -> None:
    program = (
        "import sys, headway.orchestrator.cli.main as cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'ray', 'numpy', 'pandas', 'pyarrow', 'yaml', 'rich', 'plotly')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True,
        env={**os.environ, "HEADWAY_STORAGE": storage},
    )  # fmt: skip
    assert shown in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_storage_is_understood_in_every_place_and_the_innermost_counts(
    capsys: pytest.CaptureFixture[str], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        ["--storage", storage, "runs"],
        ["--storage", storage, "runs", "ls"],
        ["runs", "--storage", storage],
        ["runs", "--storage", storage, "ls"],
        ["runs", "ls", "--storage", storage],
        ["--storage", "/no/such", "runs", "ls", "--storage", storage],
    ]
    for variable in ("", "/no/such"):
        monkeypatch.setenv("HEADWAY_STORAGE", variable)
        for line in lines:
            code, out, _ = run(capsys, *line)
            assert (code, "one   completed" in out) == (0, True), line
    monkeypatch.setenv("HEADWAY_STORAGE", storage)
    assert "one   completed" in run(capsys, "runs")[1]
    assert "step-00000008" in run(capsys, "checkpoints", "--storage", storage, "ls", "one")[1]
    for line, expected in (
        (["fit", "tests.tiny:TinyTrainer"], storage),
        (["fit", "tests.tiny:TinyTrainer", "--storage", "/a b"], "/a b"),
        (["--storage", "/a #b", "fit", "tests.tiny:TinyTrainer"], "/a #b"),
        (["fit", "tests.tiny:TinyTrainer", "--storage", "/a", "storage=/c"], "/c"),
    ):
        assert f"storage: {expected}\n" in run(capsys, *line, "--print-config")[1].replace("'", "")


@pytest.mark.parametrize(
    ("line", "kind", "names"),
    [
        (["runs", "ls"], "runs", {"runs", "sweeps"}),
        (["runs"], "runs", {"runs", "sweeps"}),
        (["runs", "show", "one"], "run", {"run", "time", "config", "events"}),
        (["runs", "show", "many"], "sweep", {"sweep"}),
        (["runs", "compare", "one", "one"], "comparison", {"first", "second", "differences"}),
        (["checkpoints", "ls", "one"], "checkpoints", {"run", "monitor", "checkpoints"}),
        (["checkpoints", "verify", "one"], "verification", {"run", "checkpoints"}),
        (["cluster", "check", "cluster.yaml"], "cluster", {"name", "groups", "max_nodes", "problems"}),
    ],
)
def test_what_reads_prints_json(
    capsys: pytest.CaptureFixture[str], storage: str, line: list[str], kind: str, names: set[str]
) -> None:
    code, out, err = run(capsys, "--storage", storage, *line, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out, parse_constant=pytest.fail)
    assert (document["schema"], document["kind"]) == (1, kind)
    assert names <= document.keys()
    page = (Path(__file__).parents[3] / "docs/command-line.md").read_text()
    assert f"`{kind}`" in page
    assert all(f"`{name}`" in page for name in document.keys() - {"schema", "kind"})
    if kind == "runs":
        assert document["runs"][0]["metrics"] == {"validation/loss": 0.25, "train/loss": "NaN"}
        assert document["sweeps"][0]["trials"] == 10
    if document.get("config"):
        assert document["config"]["config"]["width"] == 9


def test_a_dry_run_refuses_what_the_run_would_refuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    experiment = Experiment(name="tiny", trainer=TinyTrainer, config=TinyConfig(max_steps=4), storage=str(tmp_path))
    opened = open_run(experiment).run
    fit = ["fit", "tests.tiny:TinyTrainer", "name=tiny", "config.max_steps=4", "--storage", str(tmp_path)]
    opened.update(status="failed", driver=Driver(host="elsewhere", pid=1, heartbeat=0.0))
    before = sorted(tmp_path.rglob("*"))
    for more, message in (
        (["config.width=3"], "was started with another config"),
        (["--resume", "/no/such"], "is not a checkpoint"),
        (["--restore", "weights"], "restore must be a collection of"),
        (["name=many"], "is a sweep"),
    ):
        if "name=many" in more:
            (tmp_path / "many").mkdir()
            (tmp_path / "many/sweep.json").write_text("{}")
            before = sorted(tmp_path.rglob("*"))
        refused = run(capsys, *fit, *more)
        assert refused == run(capsys, *fit, *more, "--dry-run")
        assert refused[0] == 2
        assert message in refused[2]
    code, out, _ = run(capsys, *fit, "--dry-run")
    assert (code, "tiny: resumes; " in out) == (0, True)
    opened.update(status="completed")
    assert "tiny: is finished: nothing to train; " in run(capsys, *fit, "--dry-run")[1]
    assert sorted(tmp_path.rglob("*")) == before


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _commands(each, (*path, name))


def test_help_is_whole_sentences_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in _commands(typer.main.get_command(app)):
        code, out, _ = run(capsys, *path, "--help")
        assert code == 0
        lines = [line for line in out.splitlines() if not line.lstrip().startswith(("Usage:", "["))]
        assert not [line for line in lines if len(line) > 80 or line.rstrip().endswith("...")], path
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            assert len(text) <= 60 or "completion" in parameter.name, (path, parameter.name, text)


def test_data_is_prepared_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world " * 50)
    output = str(tmp_path / "tokens")
    code, out, _ = run(capsys, "data", "prepare", str(tmp_path / "a.txt"), "--output", output, "--row-length", "16")
    assert code == 0
    assert " prepared: " in out
    code, out, _ = run(capsys, "data", "show", output)
    assert code == 0
    assert "fingerprint" in out
    code, out, _ = run(capsys, "data", "show", output, "--row", "part-00000.parquet[0]:1")
    assert code == 0
    assert out.startswith("tokens: [")
    code, _, err = run(capsys, "data", "show", output, "--columns", "tokens,words")
    assert code == 2
    assert "no column 'words'" in err
    code, _, err = run(capsys, "data", "show", str(tmp_path / "nothing"))
    assert code == 2
    assert "nothing" in err
