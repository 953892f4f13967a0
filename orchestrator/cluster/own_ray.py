"""Start Ray, or connect to one, in a thread: signals end the wait, and a Ray that died while starting is noticed."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address

from headway.trainer.errors import HeadwayError

START_THREAD = "headway-ray-start"
_POLL_EVERY_S = 0.1
_REPORT_EVERY_S = 30.0
# Ray's processes without which nothing works.
_SERVERS = ("raylet", "gcs_server")
# Levels in the first characters of a log line, after the time and the process.
_FATAL, _ERROR, _PREFIX = " C ", " E ", 60
_LONGEST_CAUSE = 300


class RayThread:
    """Runs `ray.init` in a thread that lives until `release`: Ray's processes end with the thread that started them.

    Args:
        say: shows a line while the start takes long.
        settings: arguments of `ray.init`.
    """

    def __init__(self, say: Callable[[str], None] | None = None, **settings: Any) -> None:
        self._say, self._settings = say, settings
        self._done, self._released = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._is_given_up = False
        self._error: BaseException | None = None
        self._logs: Path | None = None
        self._thread = threading.Thread(target=self._init, name=START_THREAD, daemon=True)

    def connect(self) -> None:
        """Return when Ray is connected. A signal handler that raises ends the wait.

        Raises:
            HeadwayError: a process of Ray ended while it was starting.
            BaseException: whatever `ray.init` raised.
        """
        before, began_s, said_s = server_processes(), time.monotonic(), time.monotonic()
        self._thread.start()
        try:
            while not self._done.wait(_POLL_EVERY_S):
                started = {pid: name for pid, name in server_processes().items() if pid not in before}
                self._find_logs(started)
                dead = ended_processes(started)
                if dead and not self._done.wait(_POLL_EVERY_S):
                    raise HeadwayError(_describe_death(dead[0], self._logs))
                if self._say is not None and time.monotonic() - said_s >= _REPORT_EVERY_S:
                    said_s = time.monotonic()
                    self._say(f"Ray has not started after {said_s - began_s:.0f} s: still waiting (Ctrl-C to end)")
        except BaseException:
            self._give_up()
            raise
        if self._error is not None:
            raise self._error

    @property
    def is_connected(self) -> bool:
        """Whether `ray.init` has returned; False while the thread is still in it, and after an error."""
        return self._done.is_set() and self._error is None

    def release(self) -> None:
        """Let the thread end, after `ray.shutdown`."""
        self._released.set()
        if self._done.is_set():
            self._thread.join()

    def _find_logs(self, pids: Iterable[int]) -> None:
        for pid in pids if self._logs is None else ():
            with contextlib.suppress(OSError):
                for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    name, _, folder = word.partition("=")
                    if name in ("--session-dir", "--session_dir"):
                        self._logs = Path(folder) / "logs"

    def _give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            if self._done.is_set() and self._error is None:
                ray.shutdown()
        self._released.set()

    def _init(self) -> None:
        try:
            ray.init(**self._settings)
        except BaseException as error:
            self._error = error
        with self._lock:
            if self._is_given_up and self._error is None:
                ray.shutdown()
            self._done.set()
        if self._error is None:
            self._released.wait()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that is started in this context listen on the loopback interface only.

    Ray replaces a loopback address by that of another interface, unless it runs on a system where it supports no
    cluster; there is no public argument for it. Without this private constant, Ray listens as it always does, with a
    warning.
    """
    try:
        from ray._private import ray_constants

        before = ray_constants.ENABLE_RAY_CLUSTER
    except (ImportError, AttributeError):
        yield
    else:
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
    if not is_on_loopback():
        warnings.warn(
            f"Ray {ray.__version__} listens on all network interfaces, not only on loopback",
            RuntimeWarning,
            stacklevel=2,
        )


def is_on_loopback() -> bool:
    """Return whether the connected Ray runs on the loopback interface, and so on this machine only."""
    try:
        return ipaddress.ip_address(get_node_ip_address()).is_loopback
    except ValueError:
        return False


def server_processes() -> dict[int, str]:
    """Return the names of this process's Ray processes, also of dead ones, by pid; empty without /proc."""
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, task.read_text().split()):
                name = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")[0]
                if name in _SERVERS:
                    found[pid] = name
    return found


def ended_processes(servers: Mapping[int, str]) -> list[str]:
    """Return the names of the processes among `server_processes` that have ended."""
    return [name for pid, name in servers.items() if not _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _describe_death(name: str, logs: Path | None) -> str:
    lines: list[str] = []
    for file in (logs / f"{name}.err", logs / f"{name}.out") if logs is not None else ():
        with contextlib.suppress(OSError):
            lines += file.read_text(errors="replace").splitlines()
    fatal = [line for line in lines if _FATAL in line[:_PREFIX]] or [line for line in lines if _ERROR in line[:_PREFIX]]
    cause = f" ({fatal[-1].rpartition('] ')[2].strip()[:_LONGEST_CAUSE]})" if fatal else ""
    where = f"; its logs are in {logs}" if logs is not None else ""
    return (
        f"Ray could not start on this machine: its process {name} ended{cause}{where}. Start the run again, with fewer "
        "other processes or more free memory, or start Ray first (`ray start --head`) and set RAY_ADDRESS=auto"
    )
