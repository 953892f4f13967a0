"""`headway node watch`: drains the Ray node of this machine when the machine is about to be taken away.

Ray asks no cloud for such notices. Once a node is drained, Ray Train tells the run, which saves a checkpoint and leaves
the node at the deadline; nothing new is placed on it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType

from headway.trainer.errors import ConfigError

from .cloud_notices import METADATA_URL, MetadataService, Notice, find_service

POLL_S = 2.0
_FIND_EVERY_S = 30.0
_RAY_STARTS_WITHIN_S = 300.0
_RETRY_S = 2.0
_TRIES = 5
_CALL_TIMEOUT_S = 30.0
_LOOK_S = 0.5
_NODE_ID = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get_runtime_context().get_node_id())
"""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The options of `headway node watch`.

    Attributes:
        cloud: "aws", "gcp", "azure", "auto" for the one that answers, or "none" for SIGTERM only.
        address: address of the Ray cluster (host:port); by default the one that this machine has joined.
        node_id: id of the Ray node; by default the node of this machine.
        grace_s: after SIGTERM, seconds until the machine goes.
        rebalance: drain on a rebalance recommendation of EC2, too.
        metadata_url: address of the metadata service.
    """

    cloud: str = "auto"
    address: str = "auto"
    node_id: str | None = None
    grace_s: float = 90.0
    rebalance: bool = False
    metadata_url: str = METADATA_URL


def watch_node(options: WatchOptions) -> None:
    """Watch for notices until SIGTERM or SIGINT, and drain the node at each. Call it in the main thread.

    After SIGTERM it drains the node and returns when the machine is to go, or at the next signal. Before
    Ray has come up there is nothing to drain, and it returns at once.

    Raises:
        ConfigError: there is no such cloud, or no Ray has come up on this machine.
    """
    ended, terminated = threading.Event(), threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        # The first SIGTERM gives notice; Ctrl-C, or another signal, ends the process.
        if number == signal.SIGTERM and not terminated.is_set():
            terminated.set()
        else:
            ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    service = _find_service(options)
    node_id = options.node_id or _node_id(options.address, lambda: ended.is_set() or terminated.is_set())
    if node_id is None:
        _log("ended before Ray has come up on this machine")
        return
    watched = "SIGTERM" if service is None else f"notices of {service.cloud}, and for SIGTERM"
    if options.cloud != "none" and service is None:
        watched += f" (no metadata service answers at {options.metadata_url}; asking again every {_FIND_EVERY_S:.0f} s)"
    _log(f"watching for {watched}; node {node_id}")
    _watch(service, node_id, options, ended, terminated)


def _find_service(options: WatchOptions) -> MetadataService | None:
    if options.cloud == "none":
        return None
    return find_service(options.cloud, options.metadata_url, counts_rebalance=options.rebalance)


def _watch(
    service: MetadataService | None,
    node_id: str,
    options: WatchOptions,
    ended: threading.Event,
    terminated: threading.Event,
) -> None:
    drained: Notice | None = None
    problem: str | None = None
    find_at_s = time.monotonic() + _FIND_EVERY_S
    while not ended.is_set():
        if terminated.is_set():
            _start_drain(node_id, options.address, Notice(reason="SIGTERM", left_s=options.grace_s))
            ended.wait(options.grace_s)
            return
        if service is None and options.cloud != "none" and time.monotonic() >= find_at_s:
            # The service may have been silent at the start: the network of a new machine comes up late.
            if (service := _find_service(options)) is not None:
                _log(f"watching for notices of {service.cloud}, too")
            find_at_s = time.monotonic() + _FIND_EVERY_S
        notice_now: Notice | None = None
        if service is not None:
            try:
                notice_now, problem_now = service.notice(), None
            except (OSError, ValueError) as error:
                problem_now = f"{type(error).__name__}: {error}"
            if problem_now != problem:
                _log("the metadata service answers again" if problem_now is None else f"no answer: {problem_now}")
                problem = problem_now
        # A recommendation has no time; an interruption that follows it has.
        if notice_now is not None and (drained is None or (drained.left_s is None and notice_now.left_s is not None)):
            _start_drain(node_id, options.address, notice_now)
            drained = notice_now
        terminated.wait(POLL_S)


def _start_drain(node_id: str, address: str, notice: Notice) -> None:
    """Drain a node in a thread, because Ray may take long to answer."""
    when = "" if notice.left_s is None else f", {notice.left_s:.0f} s left"
    _log(f"{notice.reason}{when}: draining node {node_id}")
    threading.Thread(target=_drain, args=(node_id, address, notice), name="headway-drain", daemon=True).start()


def _drain(node_id: str, address: str, notice: Notice) -> None:
    """Drain a node, with retries, and log how that went."""
    since_s = time.monotonic()
    for left in reversed(range(_TRIES)):
        left_s = None if notice.left_s is None else max(0.0, notice.left_s - (time.monotonic() - since_s))
        problem = drain_node(node_id, address, reason=notice.reason, left_s=left_s)
        if problem is None:
            _log("drained the node")
            return
        _log(f"could not drain the node: {problem}")
        if left:
            time.sleep(_RETRY_S)
    _log("giving up: a run on this node will lose the updates since its last checkpoint")


def drain_node(node_id: str, address: str, *, reason: str, left_s: float | None) -> str | None:
    """Drain a node of Ray, for preemption; return the problem, if any.

    Ray has no public function for this. Its command `ray drain-node` is hidden; without it, the run is not told.

    Args:
        node_id: id of the node.
        address: address of the cluster, or "auto".
        reason: for Ray's logs.
        left_s: seconds until the machine goes; None if unknown.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", reason]
    command += [] if address == "auto" else ["--address", address]
    command += [] if left_s is None else ["--deadline-remaining-seconds", str(int(left_s))]
    return _problem_of(command)[0]


def _node_id(address: str, is_ended: Callable[[], bool] = lambda: False) -> str | None:
    """Return the id of the Ray node of this machine; waits for Ray to come up, or to be ended (None).

    Asked in another process, because a connection to Ray takes 100 MB as long as it lasts.
    """
    until_s = time.monotonic() + _RAY_STARTS_WITHIN_S
    while True:
        problem, out = _problem_of([sys.executable, "-c", _NODE_ID, address], is_ended)
        if problem is None:
            return out.split()[-1]
        if is_ended():
            return None
        if time.monotonic() > until_s:
            raise ConfigError(
                f"no Ray has come up on this machine in {_RAY_STARTS_WITHIN_S:.0f} s: run `headway node watch` beside "
                f"`ray start`, or give --address and --node-id ({problem})"
            )
        time.sleep(_RETRY_S)


def _problem_of(command: list[str], is_ended: Callable[[], bool] = lambda: False) -> tuple[str | None, str]:
    """Run a command of Ray; return what went wrong, if anything, and its output."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )  # fmt: skip
    except OSError as error:
        return f"{type(error).__name__}: {error}", ""
    until_s = time.monotonic() + _CALL_TIMEOUT_S
    with process:
        while True:
            try:
                out, err = process.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if is_ended() or time.monotonic() > until_s:
                    process.kill()
                    process.communicate()
                    return f"no answer within {_CALL_TIMEOUT_S:.0f} s", ""
    lines = (err.strip() or out.strip()).splitlines()
    return (None if process.returncode == 0 else lines[-1] if lines else f"exit code {process.returncode}"), out


def _log(text: str) -> None:
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z headway node watch: {text}", flush=True)
