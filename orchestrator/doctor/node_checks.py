"""Judges the facts of a node. Pure functions: the thresholds and the advice are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.trainer.metrics.units import human_bytes

from .report import Finding, Status, redact

# Docker's default of 64 MiB is too small for one DataLoader worker with large batches.
_LEAST_SHARED_MEMORY = 128 * 2**20
_GOOD_SHARED_MEMORY = 2 * 2**30
# Each Ray process and each data file of a worker holds tens of files; Ray's own advice is 65536.
_LEAST_LIMIT = {"open files": 1024, "processes": 1024}
_GOOD_LIMIT = {"open files": 8192, "processes": 4096}
_LIMIT_OPTION = {"open files": "-n", "processes": "-u"}
CLOCK_WARNING_S = 1.0
CLOCK_FAILED_S = 60.0
"""A driver counts as dead after 90 s without a heartbeat by the clock of another machine; S3 refuses 15 minutes."""


def judge_node(node: str, facts: Mapping[str, Any]) -> list[Finding]:
    """Return the findings about one node that need no comparison with others."""
    return [
        judge_shared_memory(node, facts["shared_memory"]),
        *judge_limits(node, facts["limits"]),
        *judge_gpus(node, facts["gpus"]),
        *judge_tokens(node, facts["tokens"]),
    ]


def describe_versions(versions: Mapping[str, str | None]) -> str:
    """Return versions as "python 3.11.9, torch 2.11.0, ...", with absent packages."""
    return ", ".join(f"{name} {version or '(absent)'}" for name, version in versions.items())


def judge_versions(node: str, here: Mapping[str, str | None], there: Mapping[str, str | None]) -> list[Finding]:
    """Compare the versions on a node with the driver's; return one finding for each difference."""
    differing = [
        Finding(
            "versions", node, _severity(name, here[name], there[name]),
            f"{name} is {there[name] or 'absent'} on {node}, but {here[name] or 'absent'} in the driver",
            f"install {name} {here[name]} on {node}, in the environment in which `ray start` runs"
            + (", or send the run with `headway submit`, which uploads Headway" if name == "headway" else ""),
        )
        for name in here if here[name] != there.get(name)
    ]  # fmt: skip
    return differing or [Finding("versions", node, "ok", describe_versions(there))]


def _severity(package: str, here: str | None, there: str | None) -> Status:
    if here is None or there is None:
        return "failed"
    # A patch release of Python, or a build of the same torch for CPUs or another CUDA, exchanges data with the other.
    same = here.split(".")[:2] == there.split(".")[:2] if package == "python" else _public(here) == _public(there)
    return "warning" if same and package in ("python", "torch") else "failed"


def _public(version: str) -> str:
    return version.partition("+")[0]


def judge_shared_memory(node: str, memory: Mapping[str, int] | None) -> Finding:
    """Judge the size of /dev/shm, which Ray's object store and DataLoader workers use."""
    if memory is None:
        return Finding("shared memory", node, "ok", "no /dev/shm on this system")
    total, free = memory["total"], memory["free"]
    found = f"/dev/shm has {human_bytes(total, digits=3)}, {human_bytes(free, digits=3)} free"
    if total >= _GOOD_SHARED_MEMORY and free >= _LEAST_SHARED_MEMORY:
        return Finding("shared memory", node, "ok", found)
    status: Status = "failed" if free < _LEAST_SHARED_MEMORY else "warning"
    return Finding(
        "shared memory", node, status, found,
        "give it 30 % of the memory: `docker run --shm-size=8g`, an emptyDir with medium: Memory at /dev/shm in "
        "Kubernetes, or `mount -o remount,size=8G /dev/shm`; delete files left there by other programs",
    )  # fmt: skip


def judge_limits(node: str, limits: Mapping[str, list[int]]) -> list[Finding]:
    """Judge the soft limits of open files and processes."""
    findings = []
    for name, (soft, hard) in limits.items():
        found = f"{_limit(soft)} {name} (hard limit {_limit(hard)})"
        if soft < 0 or soft >= _GOOD_LIMIT[name]:
            findings.append(Finding("limits", node, "ok", found))
            continue
        wanted = 65536
        status: Status = "failed" if soft < _LEAST_LIMIT[name] else "warning"
        option = _LIMIT_OPTION[name]
        raising = f"`ulimit {option} {wanted}` before `ray start` and `headway`"
        if 0 <= hard < wanted:
            raising += ", after raising the hard limit in /etc/security/limits.conf or with `docker run --ulimit`"
        findings.append(Finding("limits", node, status, found, raising))
    return findings


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def judge_gpus(node: str, gpus: Mapping[str, Any] | None) -> list[Finding]:
    """Judge what `nvidia-smi` and the kernel log report; nothing without NVIDIA's driver."""
    if gpus is None:
        return []
    if gpus["error"] or not gpus["gpus"]:
        found = redact(gpus["error"]) or "nvidia-smi lists none"
        advice = "check the driver with `nvidia-smi`; restart the machine, or take the node out of the cluster"
        return [Finding("GPUs", node, "failed", found, advice)]
    findings = [each for gpu in gpus["gpus"] if (each := _judge_gpu(node, gpu))]
    if gpus["xids"]:
        found = f"{len(gpus['xids'])} Xid errors since boot, the last one: {redact(gpus['xids'][-1])[:200]}"
        advice = "look the number up in NVIDIA's list of Xid errors; reset or replace the GPU if it recurs"
        findings.append(Finding("GPUs", node, "warning", found, advice))
    if findings:
        return findings
    names = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus["gpus"]))
    log = "; kernel log not readable, so Xid errors are unknown" if gpus["xids"] is None else ", no Xid errors"
    return [Finding("GPUs", node, "ok", f"{len(gpus['gpus'])} x {names}, no uncorrected ECC errors{log}")]


def _judge_gpu(node: str, gpu: Mapping[str, str]) -> Finding | None:
    which = f"GPU {gpu['index']} ({gpu['name']})"
    if gpu.get("remap_failure") in ("1", "Yes"):
        return Finding("GPUs", node, "failed", f"{which}: a memory row could not be remapped", "replace the GPU")
    errors = gpu.get("ecc_uncorrected", "")
    if gpu.get("remap_pending") in ("1", "Yes") or (errors.isdigit() and int(errors) > 0):
        found = f"{which}: {errors if errors.isdigit() else 'some'} uncorrected ECC errors since the driver was loaded"
        return Finding("GPUs", node, "failed", found, "reset the GPU (`nvidia-smi -r`) or restart the machine")
    return None


def judge_tokens(node: str, tokens: Mapping[str, Any]) -> list[Finding]:
    """Tell which secrets are present. No value of a secret is read into a finding."""
    needs_ray, has_ray = tokens["ray_mode"].lower() == "token", tokens["ray"]
    if needs_ray and not has_ray:
        advice = "set RAY_AUTH_TOKEN, or copy ~/.ray/auth_token from the head"
        ray = Finding("tokens", node, "failed", "RAY_AUTH_MODE is token, but there is no token", advice)
    else:
        ray = Finding("tokens", node, "ok", f"Ray auth token is {'present' if has_ray else 'absent (not required)'}")
    present = "present" if tokens["wandb"] else "absent (only W&B tracking needs it)"
    return [ray, Finding("tokens", node, "ok", f"WANDB_API_KEY is {present}")]


def judge_clock(node: str, skew_s: float, uncertainty_s: float) -> Finding:
    """Judge the skew of a node's clock to this machine; only what exceeds the uncertainty counts."""
    found = f"{1000 * skew_s:+.1f} ms ± {1000 * uncertainty_s:.1f} ms to the driver's clock"
    certain_s = max(0.0, abs(skew_s) - uncertainty_s)
    if certain_s <= CLOCK_WARNING_S:
        return Finding("clock", node, "ok", found)
    status: Status = "failed" if certain_s > CLOCK_FAILED_S else "warning"
    return Finding("clock", node, status, found, "synchronize the clocks: chrony, systemd-timesyncd or the cloud's NTP")
