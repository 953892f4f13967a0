"""A small process that outlives the driver of a run, and says how the run ended if Ray ends the driver.

When Ray dies, its C++ code ends the process that is connected to it, without running any Python. The watching process
imports only the standard library until then.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runs.run import Run

_GOODBYE = b"goodbye\n"
# If the driver ends this soon after its Ray, it was killed, and Ray ended with it.
_TOGETHER_S = 0.3
# A flag of a thread that is ending (PF_EXITING in Linux's include/linux/sched.h).
_ENDING = 0x4
_CONNECT_TIMEOUT_S = 5.0
_LONGEST_END_S = 10.0


@contextlib.contextmanager
def watch_driver(run: Run, servers: Mapping[int, str]) -> Iterator[None]:
    """Watch this process, which is connected to Ray, inside a `with` block; record the end of the run before its end.

    Args:
        run: the run that this process drives.
        servers: the processes of a Ray that this process has started, by pid; empty for a cluster.
    """
    # Not above, so that the watching process does not import Ray.
    import ray

    settings = {
        "run_dir": run.run_dir, "lease": run.lease, "driver": os.getpid(),
        "address": ray.get_runtime_context().gcs_address, "servers": [[pid, name] for pid, name in servers.items()],
    }  # fmt: skip
    watch = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # A terminal sends Ctrl-C to all processes of a group.
        start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            watch.communicate(_GOODBYE, timeout=_LONGEST_END_S)


def main(settings: Mapping[str, object]) -> None:
    """Wait for the end of the driver, and record it if Ray was the cause."""
    servers = {int(pid): str(name) for pid, name in settings["servers"]}  # type: ignore[attr-defined]
    said, dead = _wait(servers, int(str(settings["driver"])))
    if said:
        return
    address = str(settings["address"])
    if dead is not None:
        cause = f"Ray died: its process {dead} ended"
    elif not servers and not _can_connect(address):
        cause = f"lost Ray: its head at {address} cannot be reached"
    else:
        cause = None
    killed = f"its driver (process {settings['driver']}) was killed, or exited at once"
    print(f"headway: the run has ended: {cause or killed}; to resume, start it again", file=sys.stderr, flush=True)
    if cause is not None:
        _record(str(settings["run_dir"]), str(settings["lease"]), cause)


def _wait(servers: Mapping[int, str], driver: int) -> tuple[bool, str | None]:
    """Return at the end of the driver whether it said goodbye, and the process of Ray that ended before it."""
    handles: dict[int, str] = {}
    dead: str | None = None
    for pid, name in servers.items():
        try:
            handles[os.pidfd_open(pid)] = name
        except ProcessLookupError:
            if not _is_ending(driver):
                dead = dead or name
        except (OSError, AttributeError):
            # Not on macOS; there a dead Ray is told like a killed driver.
            continue
    said = b""
    while True:
        ready, _, _ = select.select([0, *handles], [], [])
        if 0 in ready:
            chunk = os.read(0, 1024)
            if not chunk:
                return said.endswith(_GOODBYE), dead
            said += chunk
            continue
        ended = next(handle for handle in ready if handle != 0)
        name = handles.pop(ended)
        # Linux ends Ray with the main thread of a killed driver. On a busy machine, its other threads keep the pipe
        # open for longer.
        if dead is None and not _is_ending(driver) and not select.select([0], [], [], _TOGETHER_S)[0]:
            dead = name


def _is_ending(pid: int) -> bool:
    """Return whether the main thread of a process is ending, or has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program, in parentheses, may contain anything.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return not os.path.exists(f"/proc/{pid}")
    return bool(int(fields[6]) & _ENDING)


def _can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _record(run_dir: str, lease: str, cause: str) -> None:
    from ..runs.run import Run, now
    from ..storage.events import EventWriter
    from ..storage.folder import retry_storage

    run = Run(run_dir)
    if run.lease == lease and run.record.status == "running":
        retry_storage(
            lambda: run.update(status="failed", reason="", error=f"{cause}; to resume, start it again", ended=now())
        )
        EventWriter(run.folder, "driver").add("driver_ended", status="failed")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
