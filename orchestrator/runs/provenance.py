"""The provenance of a run, for its record: code, packages and machine."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from headway.trainer.checkpoints.code_fingerprint import learning_code

from ..config.target import file_digest, import_folder_of


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("headway", "torch", "ray", "numpy", "pyarrow"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Return the commit of the current directory and whether it has changes; empty outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def code(trainer: type) -> dict[str, Any]:
    """Return digests of a trainer's methods by name, and the SHA-256 and folder of its file, if any."""
    file = getattr(sys.modules.get(trainer.__module__), "__file__", None)
    of_file = (
        {"sha256": file_digest(file), "folder": import_folder_of(trainer)} if file and os.path.isfile(file) else {}
    )
    return {**of_file, "methods": learning_code(trainer)}


def process_start_time() -> float | None:
    """Return the start of this process in seconds since 1970; None on a system without `/proc`."""
    try:
        # The start in ticks since boot. The process name, in brackets, may contain any character.
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def hardware() -> dict[str, Any]:
    """Return a description of this machine."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
