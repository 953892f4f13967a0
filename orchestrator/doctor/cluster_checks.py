"""Checks a Ray cluster from the driver: the connection, each node, and what nodes share."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator

import ray

from headway.trainer.errors import ConfigError

from ..errors import StorageError
from .machine_checks import check_machine, check_storage_here, unusable_storage
from .network import connect_to
from .node_checks import judge_clock, judge_limits, judge_node, judge_versions
from .node_facts import package_versions, process_limits
from .probes import Node, Probes, live_nodes, node_probes
from .report import Finding, redact
from .storage_checks import judge_storage, storage_token

_DRIVER = "(driver)"
_CLOCK_SAMPLES = 5
_CONNECT_TIMEOUT_S = 5.0
_UNEXPECTED = 2  # DeathReason of a node that was lost, not drained or stopped
_UNAUTHENTICATED = ("Unauthenticated", "InvalidAuthToken", "AuthenticationError")


def check_cluster(address: str, storage: str, *, timeout_s: float) -> list[Finding]:
    """Check a Ray cluster and all its nodes; if Ray cannot be reached, this machine.

    Args:
        address: host:port of the head, "auto" or ray://host:port. A Ray to which this process is connected is used.
        storage: absolute path or URI.
        timeout_s: for each question to a node.

    Raises:
        ConfigError: the address has another form.
    """
    check_address(address)
    if ray.is_initialized():
        return check_connected(storage, timeout_s=timeout_s)
    dashboard = connect(address)
    if isinstance(dashboard, Finding):
        return [dashboard, *check_machine(storage, timeout_s=timeout_s)]
    try:
        return [_check_dashboard(dashboard), *check_connected(storage, timeout_s=timeout_s)]
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Check the form of an address.

    Raises:
        ConfigError: it is the dashboard's, or not an address.
    """
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"address={address} is a dashboard, but the checks run on the nodes: log in to a node and use "
            f"--address=auto, or run them as a job: ray job submit --address={address} -- headway doctor"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto" and not (host and port.isdigit()):
        raise ConfigError(f"address={address} must be auto or host:port of the head, such as 10.0.0.1:6379")


def connect(address: str) -> str | Finding:
    """Connect to Ray, and return the address of its dashboard, empty without one; or a finding if that fails.

    Takes up to about 25 s, for which Ray tries.
    """
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        # Without this, Ray would try for 20 s and more.
        if error := connect_to({"head": (host.strip("[]"), int(port))}, _CONNECT_TIMEOUT_S)["head"]:
            return Finding("Ray", "", "failed", f"cannot connect to {error}", _start_advice())
    output: list[str] = []
    try:
        with _captured_stderr(output):
            context = ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, RuntimeError for other versions, and others
        # The reason for a refused connection is only in the messages of Ray's C++ code.
        if any(word in f"{error}{output}" for word in _UNAUTHENTICATED):
            has_token = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
            return Finding(
                "Ray", "", "failed", f"the cluster at {address} refuses this Ray auth token"
                if has_token else f"the cluster at {address} needs a Ray auth token",
                "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token of the cluster (on the head: "
                "`ray get-auth-token`), or copy ~/.ray/auth_token from the head",
            )  # fmt: skip
        return Finding("Ray", "", "failed", redact(str(error))[:500], _start_advice())
    return str(context.dashboard_url or "")


def _start_advice() -> str:
    return (
        "start Ray (`ray start --head`), or check the address, and that a firewall lets this machine reach the head; "
        "`ray status` on the head shows the nodes"
    )


@contextlib.contextmanager
def _captured_stderr(output: list[str]) -> Iterator[None]:
    """Append what this process, C++ code included, writes to standard error."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            output.append(file.read().decode(errors="replace"))


def check_connected(storage: str, *, timeout_s: float) -> list[Finding]:
    """Check the cluster to which this process is connected. Arguments as for `check_cluster`."""
    nodes = live_nodes()
    findings = [*_check_ray(nodes), *judge_limits(_DRIVER, process_limits())]
    with node_probes(nodes, timeout_s=timeout_s) as probes:
        facts, silent = probes.ask("node", "facts")
        findings += silent
        versions = package_versions()
        for node, found in facts.items():
            findings += [*judge_versions(node.name, versions, found["versions"]), *judge_node(node.name, found)]
        findings += _check_clocks(probes)
        findings += check_storage(probes, storage)
        findings += _check_ports(probes)
        findings += _check_group("gloo", probes)
    if with_gpus := [node for node in facts if node.num_gpus >= 1]:
        with node_probes(with_gpus, timeout_s=timeout_s, num_gpus=1) as probes:
            findings += _check_nccl(probes)
    return findings


def _check_ray(nodes: list[Node]) -> list[Finding]:
    resources = ray.cluster_resources()
    amounts = f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
    count = f"{len(nodes)} node{'s'[: len(nodes) != 1]}"
    findings = [Finding("Ray", "", "ok", f"{ray.__version__}, {count}, {amounts}")]
    dead = [each for each in ray.nodes() if not each["Alive"] and each.get("DeathReason") == _UNEXPECTED]
    if dead:
        last = dead[-1]
        where = f"{last['NodeManagerHostname']} ({last['NodeManagerAddress']})"
        found = f"{len(dead)} lost without notice, the last one {where}: {redact(last['DeathReasonMessage'])[:200]}"
        findings.append(Finding("nodes", "", "warning", found, "restart Ray there if the machine is still needed"))
    return findings


def _check_dashboard(address: str) -> Finding:
    advice = "start the head with --include-dashboard=true (needs ray[default]) to use jobs"
    if not address:
        return Finding("dashboard", "", "warning", "not running: `headway submit` and `ray job` need it", advice)
    host, _, port = address.rpartition(":")
    if port.isdigit() and (error := connect_to({"": (host, int(port))}, _CONNECT_TIMEOUT_S)[""]):
        return Finding("dashboard", "", "warning", f"cannot be reached: {error}", advice)
    return Finding("dashboard", "", "ok", f"http://{address}")


def _check_clocks(probes: Probes) -> list[Finding]:
    """Measure the skew of each node's clock by round trips; the shortest one has the least uncertainty."""
    best: dict[Node, tuple[float, float]] = {}
    findings: list[Finding] = []
    for node in list(probes.actors):
        one = Probes({node: probes.actors[node]}, probes.timeout_s)
        for _ in range(_CLOCK_SAMPLES):
            # The wall clock of the driver may be set during a round trip.
            before, started_s = time.time(), time.monotonic()
            answers, failed = one.ask("clock", "clock")
            half_s = (time.monotonic() - started_s) / 2
            if failed:
                findings += failed
                del probes.actors[node]
                break
            sample = (answers[node] - before - half_s, half_s)
            best[node] = min(best.get(node, sample), sample, key=lambda each: each[1])
    return findings + [judge_clock(node.name, *sample) for node, sample in best.items()]


def check_storage(probes: Probes, storage: str) -> list[Finding]:
    """Check a storage from the driver and from each node, and that all see the same token."""
    first = check_storage_here(_DRIVER, storage, timeout_s=probes.timeout_s)
    if first.status == "failed":
        return [first]
    try:
        with storage_token(storage) as token:
            answers, silent = probes.ask("storage", "storage", lambda node: token.arguments(node.id))
    except StorageError as error:
        return [unusable_storage(_DRIVER, storage, error)]
    return [first, *silent, *(judge_storage(node.name, storage, answer) for node, answer in answers.items())]


def _check_ports(probes: Probes) -> list[Finding]:
    """Check that each node can open a connection to an ephemeral port of each other node."""
    if len(probes.actors) < 2:
        return []
    ports, silent = probes.ask("ports", "listen")
    targets = {node.name: (node.address, port) for node, port in ports.items()}
    # Connections are tried in parallel.
    wait_s = min(_CONNECT_TIMEOUT_S, probes.timeout_s / 2)
    answers, failed = probes.ask(
        "ports", "connect", lambda node: ({name: at for name, at in targets.items() if name != node.name}, wait_s)
    )
    findings = [*silent, *failed]
    for node, errors in answers.items():
        refused = {name: error for name, error in errors.items() if error}
        if not refused:
            found = f"connects to {len(errors)} other node{'s'[: len(errors) != 1]} at ephemeral ports"
            findings.append(Finding("ports", node.name, "ok", found))
        for name, error in refused.items():
            advice = (
                f"open all TCP ports between the nodes, or at least the range in /proc/sys/net/ipv4/ip_local_port_range"
                f" on {name}: torch uses any of them"
            )
            findings.append(Finding("ports", node.name, "failed", f"cannot connect to {name} at {error}", advice))
    return findings


def _check_group(backend: str, probes: Probes) -> list[Finding]:
    """Check that one process on each node can form a process group."""
    if len(probes.actors) < 2 and backend == "gloo":
        return []
    nodes = list(probes.actors)
    first = Probes({nodes[0]: probes.actors[nodes[0]]}, probes.timeout_s)
    ports, silent = first.ask(backend, "free_port")
    if silent:
        return silent
    arguments = (len(nodes), nodes[0].address, ports[nodes[0]], probes.timeout_s)
    # Until the timeout of the group itself, after importing torch.
    answers, failed = probes.ask(backend, "join", lambda node: (backend, nodes.index(node), *arguments), factor=2)
    interface = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    advice = (
        f"set {interface} to the network interface of the node's address ({{}}); open all TCP ports between the nodes"
        + ("; NCCL_DEBUG=INFO shows more" if backend == "nccl" else "")
    )
    without_nccl = "install a build of torch for CUDA on {}"
    return (
        failed
        + [
            Finding(
                backend,
                node.name,
                "failed",
                redact(error)[:300],
                # torch's words where it was built without a backend.
                without_nccl.format(node.name) if "built in" in error else advice.format(node.address),
            )  # fmt: skip
            if error
            else Finding(backend, node.name, "ok", f"all_reduce over {len(nodes)} node{'s'[: len(nodes) != 1]}")
            for node, error in answers.items()
        ]
    )


def _check_nccl(probes: Probes) -> list[Finding]:
    """Check NCCL with one GPU of each node that has a free one."""
    _, busy = probes.ask("nccl", "clock")
    skipped = [
        Finding("nccl", each.node, "warning", f"not checked: no free GPU ({each.found})", "repeat when a GPU is free")
        for each in busy
    ]
    return skipped + (_check_group("nccl", probes) if probes.actors else [])
