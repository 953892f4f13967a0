"""The identity of a process, by which another one can tell whether it still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process, also one on another machine.

    Attributes:
        host: host name of its machine.
        pid: its number, as seen in its own container.
        pids: the boot of the machine and the pid namespace in which `pid` counts. Containers of a machine may share a
            host name, and each may have a process 1. Empty on a system without `/proc`.
        started: its start in clock ticks since the boot, because numbers are used again; empty if unknown.
    """

    host: str
    pid: int
    pids: str = ""
    started: str = ""

    @classmethod
    def this(cls) -> ProcessId:
        """Return this process."""
        return cls(host=socket.gethostname(), pid=os.getpid(), pids=_own_pids(), started=_start_of(os.getpid()) or "")

    def is_alive(self) -> bool | None:
        """Return whether it runs; None if this process cannot know, because it is on another machine or container."""
        if (self.host, self.pids) != (socket.gethostname(), _own_pids()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        started = _start_of(self.pid)
        # None where /proc is hidden or absent: then the number is all there is.
        return started is None or started == (self.started or started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@lru_cache(maxsize=1)
def _own_pids() -> str:
    try:
        return f"{_BOOT_ID.read_text().strip()} {_PID_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Return the start of a process in clock ticks since the boot; "ended" for a zombie, None if unknown."""
    try:
        # The process name, in brackets, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] == "Z" else fields[19]
