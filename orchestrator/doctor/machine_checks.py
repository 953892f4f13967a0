"""Checks this machine alone, without Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import StorageError
from .network import free_port
from .node_checks import describe_versions, judge_node
from .node_facts import node_facts
from .report import Finding, redact
from .storage_checks import judge_storage, not_usable, probe_storage, storage_token

_JOIN = """
import sys
sys.path[:] = sys.argv[5].split("|")
from headway.orchestrator.doctor.network import join_group
join_group("gloo", int(sys.argv[1]), 2, sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
"""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def check_machine(storage: str, *, timeout_s: float) -> list[Finding]:
    """Check the versions, limits, GPUs, tokens and storage of this machine, and gloo between two of its processes.

    Args:
        storage: absolute path or URI.
        timeout_s: for the storage, and for gloo.
    """
    here, facts = socket.gethostname(), node_facts()
    return [
        Finding("versions", here, "ok", describe_versions(facts["versions"])),
        *judge_node(here, facts),
        check_storage_here(here, storage, timeout_s=timeout_s),
        _check_gloo(here, timeout_s),
    ]


def check_storage_here(here: str, storage: str, *, timeout_s: float) -> Finding:
    """Check a storage from this process."""

    def check() -> Finding:
        try:
            with storage_token(storage) as token:
                return judge_storage(here, storage, probe_storage(*token.arguments("driver")))
        except StorageError as error:
            return unusable_storage(here, storage, error)

    return within(timeout_s, check) or not_usable(here, storage, f"no answer within {timeout_s:g} s")


def unusable_storage(here: str, storage: str, error: StorageError) -> Finding:
    """Return the finding for a storage into which the token cannot be written."""
    cause = error.__cause__
    return not_usable(here, storage, f"{type(cause).__name__}: {cause}" if cause else str(error))


def within(timeout_s: float, do: Callable[[], Finding]) -> Finding | None:
    """Return `do()`, or None if it takes longer: a mounted disk may hang for ever."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(do())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True, name="headway-doctor")
    thread.start()
    thread.join(timeout_s)
    if result and isinstance(result[0], BaseException):
        raise result[0]
    return result[0] if result else None


def _check_gloo(here: str, timeout_s: float) -> Finding:
    port = free_port("127.0.0.1")
    path = "|".join(each or os.getcwd() for each in sys.path)
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _JOIN, str(rank), "127.0.0.1", str(port), str(timeout_s), path],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = []
    try:
        for process in ranks:
            # Until the timeout of the group itself, after importing torch.
            _, text = process.communicate(timeout=2 * timeout_s)
            if process.returncode:
                errors.append((text.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    except subprocess.TimeoutExpired:
        errors.append(f"no answer within {2 * timeout_s:g} s")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stderr:
                process.stderr.close()
    if errors:
        advice = "check that this host's name resolves to an address of this machine, or set GLOO_SOCKET_IFNAME=lo"
        return Finding("gloo", here, "failed", redact(errors[0])[:300], advice)
    return Finding("gloo", here, "ok", "two processes of this machine reach each other")
