"""What a dead process leaves behind: real processes, real signals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headway.orchestrator.storage.events import Event
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train.failures.cause import find_cause
from headway.orchestrator.train.failures.last_words import LastWords, describe_death, read_last_words, user_line

PROGRAM = """
import ctypes, faulthandler, json, os, signal, sys
from types import SimpleNamespace
from headway.orchestrator.train.failures.last_words import Recorder
faulthandler.enable()
recorder = Recorder()
print(json.dumps({**recorder.location(), "pid": os.getpid()}), flush=True)
recorder.on_fit_start(SimpleNamespace(global_step=0))
if os.fork() == 0:
    os._exit(5)  # as a DataLoader's worker ends
os.wait()
recorder.on_step_start(SimpleNamespace(global_step=25))
def training_step():
    %s
training_step()
"""


def end_of(tmp_path: Path, how: str) -> dict[str, object]:
    """Return the entry of a worker that has died in one of several ways."""
    import json

    script = tmp_path / "prog.py"
    script.write_text(PROGRAM % how)
    log = tmp_path / "worker.err"
    with log.open("w") as file:
        done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=file, check=False)
    worker: dict[str, object] = json.loads(done.stdout.splitlines()[0])
    return {**worker, "rank": 0, "host": socket.gethostname()}


@pytest.mark.parametrize(
    ("how", "death", "line"),
    [
        ("os._exit(7)", "ended itself by os._exit(7)", "prog.py:14 in training_step"),
        pytest.param("os.abort()", "was aborted (SIGABRT)", "prog.py:14 in training_step", marks=pytest.mark.extended),
        ("ctypes.string_at(0)", "was killed by a segmentation fault (SIGSEGV)", "prog.py:14 in training_step"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed without a trace", ""),
    ],
)
def test_a_dead_process_is_explained(tmp_path: Path, how: str, death: str, line: str) -> None:
    worker = end_of(tmp_path, how)
    words = read_last_words(worker)
    assert (words.step, words.phase, words.is_alive) == (25, "training step", False)
    told = describe_death(words, oom_kills_before=worker["oom_kills"], ray_message="died")  # type: ignore[arg-type]
    assert told[0].startswith(death)
    assert told[1] == line


def test_out_of_memory_is_named() -> None:
    killed = LastWords(oom_kills=4)
    assert "memory ran out" in describe_death(killed, oom_kills_before=3, ray_message="")[0]
    assert "without a trace" in describe_death(killed, oom_kills_before=4, ray_message="")[0]
    assert "without a trace" in describe_death(killed, oom_kills_before=None, ray_message="")[0]
    low = describe_death(LastWords(), oom_kills_before=None, ray_message="killed due to the node running low on memory")
    assert low[0] == "was killed by Ray because its machine ran low on memory"


def test_the_death_is_the_cause_and_not_its_peers_error(tmp_path: Path) -> None:
    """Rank 0 reports a closed connection before Ray reports the death of rank 1; the last output is kept."""
    dead = {**end_of(tmp_path, "ctypes.string_at(0)"), "rank": 1}
    alive = {"rank": 0, "host": socket.gethostname(), "pid": os.getpid(), "last_words": "", "stderr": ""}
    events: list[Event] = [
        {"time": 1.0, "event": "attempt_started", "attempt": 1, "workers": [alive, dead]},
        {"time": 2.0, "event": "training", "step": 20},
        {
            "time": 3.0, "event": "rank_failed", "attempt": 1, "rank": 0, "step": 24, "began_at": 20,
            "type": "RuntimeError", "message": "gloo: connection closed by peer", "traceback": "", "retryable": True,
            "secondary": True,
        },
    ]  # fmt: skip
    found = find_cause(events, {0: RuntimeError("gloo: connection closed by peer")}, Folder(str(tmp_path)))
    assert (found.rank, found.step, found.began_at, found.kind) == (1, 25, 20, "")
    assert "SIGSEGV" in str(found)
    assert "gloo" not in str(found)
    assert "Fatal Python error: Segmentation fault" in Path(found.last_words).read_text()


def test_lines_of_packages_are_not_the_users() -> None:
    frames = [(os.__file__, 1, "f"), ("<string>", 2, "g"), ("/home/me/train.py", 31, "training_step")]
    assert user_line(frames) == "train.py:31 in training_step"
    assert user_line(frames[:2]) == ""
