"""The commands that prepare data: options, estimates, a local Ray, and resuming after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from headway.datasets.prepare import prepare_text
from headway.datasets.tokenizers import ByteTokenizer
from headway.orchestrator.cli.prepare import without_option
from tests.orchestrator.cli.test_main import run

TOKENIZER = """
import time

def words(text):
    return [len(word) for word in text.split()]

class Slow:
    def __call__(self, text):
        time.sleep(0.02)
        return words(text)
"""


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with 200 documents and a file of tokenizers."""
    monkeypatch.chdir(tmp_path)
    rows = [{"body": f"document {number} " * (1 + number % 9)} for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(TOKENIZER)
    return tmp_path


def test_a_function_of_a_file_is_the_tokenizer_and_rows_are_documents(
    capsys: pytest.CaptureFixture[str], lines: Path
) -> None:
    code, out, err = run(
        capsys, "data", "prepare", "rows.jsonl", "-o", "out", "--text", "body", "--tokenizer", "mine.py:words"
    )
    assert (code, err) == (0, "")
    assert "out prepared: 200 rows, " in out
    first = pq.read_table("out/part-00000.parquet").to_pylist()[1]
    assert first["tokens"] == [8, 1, 8, 1]


def test_an_estimate_writes_nothing(capsys: pytest.CaptureFixture[str], lines: Path) -> None:
    code, out, _ = run(
        capsys, "data", "prepare", "rows.jsonl", "-o", "out", "--text", "body", "--row-length", "16", "--part-mb",
        "0.002", "--dry-run", "--tasks", "7",
    )  # fmt: skip
    assert code == 0
    assert not Path("out").exists()
    prepared = prepare_text("rows.jsonl", "real", text="body", row_length=16, tokenizer=ByteTokenizer())
    estimate = next(line for line in out.splitlines() if "rows of 16" in line)
    assert int(estimate.split()[1].replace(",", "")) == pytest.approx(prepared.rows, rel=0.25)
    assert "     7 tasks about" in out
    assert "  1000 tasks about" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "0"], "Invalid value for '--tasks': Input should be greater than or equal to 1"),
        (["--tail", "cut"], "must be drop or pad, got 'cut'"),
        (["--on-bad-row", "drop"], "must be raise or skip, got 'drop'"),
        (["--append", "<end>"], "needs a tokenizer of Hugging Face"),
        (["--tokenizer", "mine.py:wrods"], "there is no 'wrods'; did you mean words?"),
        (["--tokenizer", "no/such/tokenizer.json"], "cannot read the tokenizer no/such/tokenizer.json"),
        (["--text", "bdoy"], "did you mean 'body'?"),
        (["--address", "http://127.0.0.1:1"], "rows.jsonl is a path of this machine, of which the cluster has no copy"),
    ],
)
def test_wrong_options_are_one_error_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], lines: Path, arguments: list[str], message: str
) -> None:
    chosen = arguments if "--text" in arguments else ["--text", "body", *arguments]
    code, _, err = run(capsys, "data", "prepare", "rows.jsonl", "-o", "out", *chosen)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert not Path("out").exists()


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", "data", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.ray
@pytest.mark.extended
def test_killed_on_a_ray_of_its_own_it_goes_on_and_the_files_are_those_of_one_process(lines: Path) -> None:
    options = (
        "rows.jsonl",
        "--text",
        "body",
        "--row-length",
        "16",
        "--part-mb",
        "0.001",
        "--tokenizer",
        "mine.py:Slow",
    )
    process = start("prepare", *options, "-o", "out", "--tasks", "2")
    deadline = time.monotonic() + 120
    try:
        while len(done := list(Path("out.partial/.parts").glob("*.json"))) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    kept = {path.stem: Path("out.partial", path.stem).stat().st_mtime_ns for path in done}
    ended = start("prepare", *options, "-o", "out", "--tasks", "2")
    out, err = ended.communicate(timeout=240)
    assert ended.returncode == 0, err
    assert "out prepared: " in out
    assert {name: Path("out", name).stat().st_mtime_ns for name in kept} == kept
    alone = start("prepare", *options, "-o", "alone", "--tasks", "1")
    assert alone.communicate(timeout=240)[0].replace("/alone ", "/out ") == out
    for file in sorted(Path("alone").glob("*.parquet")):
        assert file.read_bytes() == Path("out", file.name).read_bytes()


def test_images_are_prepared_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "photos" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 12, 3), number, np.uint8)).save(path)
    output = str(tmp_path / "out")
    code, out, err = run(capsys, "data", "prepare-images", str(tmp_path / "photos"), "-o", output, "--size", "8")
    assert (code, err) == (0, "")
    assert "prepared: 6 rows, 1 Parquet file (" in out
    code, out, _ = run(capsys, "data", "show", output)
    assert code == 0
    assert "image" in out
    code, _, err = run(
        capsys, "data", "prepare-images", str(tmp_path / "photos"), "-o", output, "--size", "8", "--encoding", "gif"
    )
    assert code == 2
    assert "encoding must be 'raw', 'jpeg' or 'png', got 'gif'" in err


def test_options_with_a_value_are_removed_in_both_spellings() -> None:
    arguments = ["data", "prepare", "a", "--address", "http://x", "-o", "b", "--runtime-env=c"]
    assert without_option(arguments, "--address", "--runtime-env") == ["data", "prepare", "a", "-o", "b"]
