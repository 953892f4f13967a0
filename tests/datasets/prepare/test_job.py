"""Tasks on Ray and a bucket: the same bytes as in one process, and killed at any time, the rest alone is made."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from headway.datasets.errors import DataError
from headway.datasets.prepare import PrepareProgress, plan_text, prepare_text
from headway.datasets.sources import read_source
from tests.s3 import s3_server

OPTIONS: dict[str, Any] = {"row_length": 16, "part_bytes": 2000}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number} " * (number % 9)}) + "\n" for number in range(200)))
    return path


def bytes_of(folder: str | Path) -> dict[str, bytes]:
    fs, inner = fsspec.core.url_to_fs(str(folder))
    fs.invalidate_cache()
    return {os.path.relpath(path, inner): fs.cat_file(path) for path in fs.find(inner)}


@pytest.mark.usefixtures("ray_session")
def test_any_number_of_tasks_gives_the_same_bytes(lines: Path, tmp_path: Path) -> None:
    here = prepare_text(lines, tmp_path / "here", **OPTIONS)
    shown: list[PrepareProgress] = []
    for tasks in (2, 3, None):
        made = prepare_text(lines, tmp_path / f"tasks-{tasks}", tasks=tasks, progress=shown.append, **OPTIONS)
        assert made.digest == here.digest
        assert bytes_of(made.path) == bytes_of(here.path)
        assert shown[-1].parts_done == shown[-1].parts > 4


@pytest.mark.usefixtures("ray_session")
def test_an_error_of_a_task_is_the_same_as_here(lines: Path, tmp_path: Path) -> None:
    rows = lines.read_text().splitlines()
    lines.write_text("\n".join([*rows[:150], "{", *rows[150:]]))
    messages = []
    for tasks in (1, 2):
        with pytest.raises(DataError, match=r"line 151 of .*rows\.jsonl is not JSON") as caught:
            prepare_text(lines, tmp_path / f"out-{tasks}", tasks=tasks, **OPTIONS)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.usefixtures("ray_session")
def test_a_local_function_is_a_tokenizer_of_tasks(lines: Path, tmp_path: Path) -> None:
    shift = 7
    made = [
        prepare_text(lines, tmp_path / str(tasks), tokenizer=lambda text: [ord(c) + shift for c in text], tasks=tasks,
                     **OPTIONS)
        for tasks in (1, 2)
    ]  # fmt: skip
    assert made[0].digest == made[1].digest


def test_more_tasks_need_ray(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.datasets.prepare.job.connected_to_ray", lambda: False)
    for tasks, message in {2: "tasks=2 needs Ray, which is not initialized", 0: "must be an integer >= 1"}.items():
        with pytest.raises(DataError, match=message):
            prepare_text(lines, tmp_path / "out", tasks=tasks, **OPTIONS)


PROGRAM = """
import sys, time
from headway.datasets.prepare import prepare_text
from headway.datasets.tokenizers import ByteTokenizer

class Slow(ByteTokenizer):
    def batch(self, texts):
        time.sleep(0.05)
        return [self(text) for text in texts]

if int(sys.argv[3]) > 1:
    import ray
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print(prepare_text(sys.argv[1], sys.argv[2], row_length=16, part_bytes=2000, tasks=int(sys.argv[3]),
                   tokenizer=Slow()))
"""


def start(lines: Path | str, output: str, tasks: int, program: Path) -> subprocess.Popen[str]:
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(program), str(lines), output, str(tasks)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def kill_in_the_middle(lines: Path | str, output: str, tasks: int, folder: Path) -> dict[str, bytes]:
    """Kill the processes of a call when it has finished some parts, and return the files of these."""
    process = start(lines, output, tasks, folder / "program.py")
    work = output if "://" in output else f"{output}.partial"
    fs, inner = fsspec.core.url_to_fs(work)
    deadline = time.monotonic() + 240
    try:
        while True:
            fs.invalidate_cache()
            finished = [each for each in fs.find(f"{inner}/.parts") if each.endswith(".parquet.json")]
            if len(finished) >= 3:
                break
            assert time.monotonic() < deadline
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    parts = [os.path.basename(each).removesuffix(".json") for each in finished]
    return {each: fs.cat_file(f"{inner}/{each}") for each in parts}


def run_to_the_end(lines: Path | str, output: str, folder: Path) -> str:
    process = start(lines, output, 1, folder / "program.py")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return said


@pytest.mark.parametrize("tasks", [1, pytest.param(2, marks=[pytest.mark.ray, pytest.mark.extended])])
def test_killed_in_the_middle_it_goes_on(lines: Path, tmp_path: Path, tasks: int) -> None:
    output = str(tmp_path / "out")
    kept = kill_in_the_middle(lines, output, tasks, tmp_path)
    before = {name: Path(f"{output}.partial", name).stat().st_mtime_ns for name in kept}
    process = start(lines, output, tasks, tmp_path / "program.py")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert {name: Path(output, name).stat().st_mtime_ns for name in kept} == before, "finished parts are not made again"
    assert said.replace("/out ", "/whole ") == run_to_the_end(lines, str(tmp_path / "whole"), tmp_path)
    assert bytes_of(output) == bytes_of(tmp_path / "whole")
    assert bytes_of(output).items() >= kept.items()


def test_no_documents_and_folders_that_cannot_be_written_are_one_error(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for prepare in (prepare_text, plan_text):
        with pytest.raises(DataError, match="the inputs have no documents"):
            prepare(tmp_path / "empty.jsonl", tmp_path / "out", row_length=8)
    with pytest.raises(DataError, match=r"cannot create /proc/out.partial: .*Choose another output folder"):
        prepare_text(lines, "/proc/out", **OPTIONS)


def test_a_full_disk_is_one_error_and_the_next_call_goes_on(lines: Path, tmp_path: Path) -> None:
    output, program = str(tmp_path / "out"), tmp_path / "program.py"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (900, -1))\n"
    program.write_text(limited + PROGRAM)
    command = [sys.executable, str(program), str(lines), output, "1"]
    full = subprocess.run(command, capture_output=True, text=True, check=False)
    assert full.returncode
    assert re.search(r"DataError: cannot (make|write) .*out.partial/.*: .*File too large", full.stderr.splitlines()[-1])
    assert " prepared: " in run_to_the_end(lines, output, tmp_path)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server() as settings:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("data")
        yield "s3://data"
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.extended
def test_a_bucket_on_both_sides(lines: Path, tmp_path: Path, bucket: str) -> None:
    """Killed in the middle; until it is finished, the folder is refused as data."""
    fs = fsspec.filesystem("s3")
    fs.put_file(str(lines), "data/raw/rows.jsonl")
    output = f"{bucket}/tokens"
    kept = kill_in_the_middle(f"{bucket}/raw", output, 1, tmp_path)
    with pytest.raises(DataError, match="data/tokens is not complete: it is being prepared, or this was interrupted"):
        read_source(output)
    with pytest.raises(DataError, match="row_length was 16 and is 8; .*Delete it"):
        prepare_text(f"{bucket}/raw", output, **{**OPTIONS, "row_length": 8})
    before = {name: fs.info(f"data/tokens/{name}", refresh=True)["LastModified"] for name in kept}
    said = run_to_the_end(f"{bucket}/raw", output, tmp_path)
    assert " prepared: " in said
    after = {name: fs.info(f"data/tokens/{name}", refresh=True)["LastModified"] for name in kept}
    assert after == before, "finished parts are not made again"
    here = run_to_the_end(lines, str(tmp_path / "here"), tmp_path)
    assert said.split(" prepared: ")[1] == here.split(" prepared: ")[1]
    assert bytes_of(output) == bytes_of(tmp_path / "here")
    assert read_source(output).rows == read_source(tmp_path / "here").rows
    assert " already prepared: " in run_to_the_end(f"{bucket}/raw", output, tmp_path)
    with pytest.raises(DataError, match="s3://data/raw exists but was not made by `prepare`: it has rows.jsonl"):
        prepare_text(lines, f"{bucket}/raw", **OPTIONS)
