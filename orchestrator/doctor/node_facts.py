"""Reads the state of the machine that it runs on: versions, shared memory, limits, GPUs, tokens.

Sent to the nodes by value, so that it also works where Headway is absent or has another version. Therefore it imports
the standard library only, and returns plain values.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
from importlib import metadata, util
from typing import Any

PACKAGES = ("torch", "ray", "headway")
_GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
    "remap_pending": "remapped_rows.pending",
    "remap_failure": "remapped_rows.failure",
}
_COMMAND_TIMEOUT_S = 10


def node_facts() -> dict[str, Any]:
    """Return all facts about this machine, by check."""
    return {
        "host": socket.gethostname(),
        "versions": package_versions(),
        "shared_memory": shared_memory(),
        "limits": process_limits(),
        "gpus": gpus(),
        "tokens": tokens(),
    }


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that all nodes need; None for an absent package."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # A package sent with a job is a copied folder, without a version.
            found[package] = "(copied with the job)" if _is_importable(package) else None
    return found


def _is_importable(package: str) -> bool:
    try:
        return util.find_spec("headway.orchestrator" if package == "headway" else package) is not None
    except ModuleNotFoundError:
        return False


def shared_memory(folder: str = "/dev/shm") -> dict[str, int] | None:
    """Return the size and the free bytes of the shared memory; None on a system without it."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def process_limits() -> dict[str, list[int]]:
    """Return the soft and the hard limits of open files and processes; -1 is unlimited."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return {}
    names = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
    limits = {name: resource.getrlimit(number) for name, number in names.items()}
    return {name: [-1 if each == resource.RLIM_INFINITY else each for each in limit] for name, limit in limits.items()}


def gpus() -> dict[str, Any] | None:
    """Return the GPUs of this machine as `nvidia-smi` reports them, and Xid errors; None without NVIDIA's driver.

    `error` is set if `nvidia-smi` fails or does not answer. `xids` is None if the kernel log cannot be read.
    """
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error), "gpus": [], "xids": _xids()}
    if done.returncode:
        return {"error": (done.stdout + done.stderr).strip()[:500], "gpus": [], "xids": _xids()}
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    found = [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]
    return {"error": "", "gpus": found, "xids": _xids()}


def _xids() -> list[str] | None:
    """Return the driver's error reports since boot; None if the kernel log cannot be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return re.findall(r"NVRM: (Xid .*)", done.stdout) if done.returncode == 0 else None


def tokens() -> dict[str, Any]:
    """Return which secrets are present in this process, never their values."""
    home = os.path.expanduser("~")
    ray_file = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.join(home, ".ray", "auth_token")
    return {
        "ray_mode": os.environ.get("RAY_AUTH_MODE", ""),
        "ray": bool(os.environ.get("RAY_AUTH_TOKEN")) or os.path.isfile(ray_file),
        "wandb": bool(os.environ.get("WANDB_API_KEY")) or _has_netrc_entry(os.path.join(home, ".netrc")),
    }


def _has_netrc_entry(file: str) -> bool:
    try:
        with open(file) as netrc:
            return "api.wandb.ai" in netrc.read()
    except (OSError, UnicodeDecodeError):
        return False
