"""What a worker process leaves behind if it dies without an exception: its step and phase, and its last output.

The step and phase are in a file beside Ray's log of the process. It is mapped into memory, so an update costs no system
call, and the kernel keeps it when the process is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import socket
import struct
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ray

from headway.trainer.callbacks.base import Callback

# The step, -1 before training; the index of the phase; the length of the text on `os._exit`, and the text.
_HEADER = struct.Struct("qqq")
_SIZE = 4096
_PHASES = ("", "training step", "between two steps", "evaluation")
_TAIL_BYTES = 32_768
_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")})
_SIGNALS = {
    "Segmentation fault": "was killed by a segmentation fault (SIGSEGV)",
    "Aborted": "was aborted (SIGABRT)",
    "Bus error": "was killed by a bus error (SIGBUS)",
    "Floating-point exception": "was killed by a floating-point exception (SIGFPE)",
    "Illegal instruction": "was killed by an illegal instruction (SIGILL)",
}
_FATAL = re.compile(r"^Fatal Python error: ([^\n]+)", re.MULTILINE)
FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (.+)$', re.MULTILINE)
_KILLED = "was killed without a trace (SIGKILL, which the kernel also sends if memory runs out)"
_OUT_OF_MEMORY = "was killed because memory ran out (SIGKILL by the kernel's out-of-memory killer)"


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """What is known of a dead process.

    Attributes:
        is_alive: whether the process still runs.
        step: completed updates; None before training began.
        phase: what it was doing, if known.
        exited: exit code and line of a call of `os._exit`; empty without one.
        output: end of its standard error.
        oom_kills: processes of its control group killed for memory, as now counted; None if unknown.
    """

    is_alive: bool = False
    step: int | None = None
    phase: str = ""
    exited: str = ""
    output: str = ""
    oom_kills: int | None = None


class Recorder(Callback):
    """Records the step and phase of this process outside of it; a callback of the trainer, on every rank.

    Also notes a call of `os._exit`, which leaves no exception, until `close`.
    """

    def __init__(self) -> None:
        self._exit = os._exit
        self._map: mmap.mmap | None = None
        log = _stderr_file()
        folder = os.path.dirname(log) if log else tempfile.gettempdir()
        self.path = os.path.join(folder, f"headway-last-words-{os.getpid()}.bin")
        with contextlib.suppress(OSError):  # a full disk must not end the run here
            Path(self.path).write_bytes(_HEADER.pack(-1, 0, 0).ljust(_SIZE, b"\0"))
            with open(self.path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)
        self._note_exits()

    def location(self) -> dict[str, Any]:
        """Return where to find the last words of this process: details of a worker in "attempt_started"."""
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return {"node": node, "stderr": _stderr_file(), "last_words": self.path, "oom_kills": _count_oom_kills()}

    def on_fit_start(self, trainer: Any) -> None:
        """Record that training starts."""
        self._mark(trainer.global_step, 2)

    def on_step_start(self, trainer: Any) -> None:
        """Record the step."""
        self._mark(trainer.global_step, 1)

    def on_step_end(self, trainer: Any) -> None:
        """Record the step."""
        self._mark(trainer.global_step, 2)

    def on_evaluation_start(self, trainer: Any) -> None:
        """Record the evaluation."""
        self._mark(trainer.global_step, 3)

    def on_evaluation_end(self, trainer: Any, metrics: Any) -> None:
        """Record the end of the evaluation."""
        self._mark(trainer.global_step, 2)

    def close(self) -> None:
        """Remove the file, unless the process dies before."""
        os._exit = self._exit
        with contextlib.suppress(OSError):
            os.remove(self.path)

    def _mark(self, step: int, phase: int) -> None:
        if self._map is not None:
            _HEADER.pack_into(self._map, 0, step, phase, 0)

    def _note_exits(self) -> None:
        pid, leave = os.getpid(), self._exit

        def _exit(status: int) -> NoReturn:
            # Forked children, such as a DataLoader's workers, end this way as well.
            if os.getpid() == pid and self._map is not None:
                line = user_line(_frames(sys._getframe(1)))
                text = f"os._exit({status})|{line}".encode()[: _SIZE - _HEADER.size]
                step, phase, _ = _HEADER.unpack_from(self._map, 0)
                self._map[_HEADER.size : _HEADER.size + len(text)] = text
                _HEADER.pack_into(self._map, 0, step, phase, len(text))
            leave(status)

        os._exit = _exit


def read_last_words(worker: dict[str, Any]) -> LastWords:
    """Return what a process of this machine has left.

    Args:
        worker: its entry in "attempt_started".
    """
    step, phase, exited = None, "", ""
    with contextlib.suppress(OSError, struct.error, IndexError):
        data = Path(worker["last_words"]).read_bytes()
        number, index, length = _HEADER.unpack_from(data)
        step, phase = None if number < 0 else number, _PHASES[index]
        exited = data[_HEADER.size : _HEADER.size + length].decode(errors="replace")
    output = ""
    with contextlib.suppress(OSError), open(worker["stderr"], "rb") as file:
        file.seek(max(0, os.path.getsize(worker["stderr"]) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        # Ray's own marks.
        output = "\n".join(line for line in lines if not line.startswith((":job_id:", ":actor_name:", ":task_name:")))
    return LastWords(
        is_alive=_is_alive(worker["pid"]), step=step, phase=phase, exited=exited, output=output,
        oom_kills=_count_oom_kills(),
    )  # fmt: skip


def fetch_last_words(worker: dict[str, Any], *, timeout_s: float = 10.0) -> LastWords | None:
    """Return what a process has left, read on the machine where it ran; None if that does not answer."""
    if not worker.get("last_words"):
        return None
    if worker["host"] == socket.gethostname() and os.path.exists(worker["last_words"]):
        return read_last_words(worker)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=worker["node"], soft=False)
    read = ray.remote(num_cpus=0, max_retries=0)(read_last_words).options(scheduling_strategy=there)
    try:
        return ray.get(read.remote(worker), timeout=timeout_s)  # type: ignore[no-any-return]
    except Exception:  # the machine may be gone, or too busy to start a process
        return None


def describe_death(words: LastWords, *, oom_kills_before: int | None, ray_message: str) -> tuple[str, str]:
    """Return how a process died, and the line of the user's code, both as text.

    Args:
        words: what it has left.
        oom_kills_before: count at the start of the process.
        ray_message: Ray's error.
    """
    if fatal := list(_FATAL.finditer(words.output)):
        frames = FRAME.findall(words.output[fatal[-1].end() :])
        cause = fatal[-1][1].strip()
        return _SIGNALS.get(cause, f"ended with a fatal error of Python ({cause})"), user_line(
            (file, int(line), function) for file, line, function in frames
        )
    if words.exited:
        call, _, line = words.exited.partition("|")
        return f"ended itself by {call}", line
    was_killed_for_memory = (words.oom_kills or 0) > (oom_kills_before or 0) and oom_kills_before is not None
    if was_killed_for_memory:
        return _OUT_OF_MEMORY, ""
    if "memory pressure" in ray_message or "running low on memory" in ray_message or "OutOfMemory" in ray_message:
        return "was killed by Ray because its machine ran low on memory", ""
    return _KILLED, ""


def user_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the innermost line outside of Headway and of installed packages; empty if there is none.

    Args:
        frames: file, line and function, innermost first.
    """
    for file, line, function in frames:
        path = os.path.realpath(file)
        is_ours = "/headway/" in file or path.startswith(_PACKAGES)
        if not (is_ours or path.startswith(_INSTALLED) or "site-packages" in path or file.startswith("<")):
            return f"{os.path.basename(file)}:{line} in {function}"
    return ""


# The packages may be links to a checkout.
_PACKAGES = tuple(
    os.path.realpath(Path(__file__).parents[2] / name) + os.sep for name in ("trainer", "orchestrator", "datasets")
)


def _frames(frame: types.FrameType | None) -> Iterable[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _stderr_file() -> str:
    """Return the file that receives this process's standard error; empty if it is a terminal or a pipe."""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/2")
        return path if os.path.isfile(path) else ""
    return ""


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _count_oom_kills() -> int | None:
    """Return how many processes of this one's control group were killed for memory; None if it is not counted."""
    counts = []
    with contextlib.suppress(OSError, ValueError):
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, names, group in groups:
            if names not in ("", "memory"):
                continue
            root, file = (
                ("/sys/fs/cgroup/memory", "memory.oom_control") if names else ("/sys/fs/cgroup", "memory.events")
            )
            # In a container the path may be the host's, and the group the root of what is mounted.
            for folder in (f"{root}{group}", root):
                found = Path(folder, file)
                if found.exists():
                    counts += [
                        int(line.split()[1]) for line in found.read_text().splitlines() if line[:9] == "oom_kill "
                    ]
                    break
    return max(counts, default=None)
