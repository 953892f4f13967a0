"""Provokes faults in runs on Ray, and prints the sentence that each leaves: `python -m tests.chaos.faults [fault ...]`.

Needs root for out of memory (a memory control group) and disk full (a small tmpfs); these are skipped otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway.trainer import Trainer, TrainerConfig

ROOT = Path(__file__).parents[2]
FAULTS = (
    "exception", "sys.exit", "os._exit", "segfault", "kill", "out_of_memory", "stop", "unpicklable", "loader_worker",
    "import_error", "node_lost", "node_drained", "head_lost", "disk_full", "token_missing",
)  # fmt: skip
_AT = 6


@dataclass(frozen=True, kw_only=True)
class FaultConfig(TrainerConfig):
    fault: str = ""


class Locked(RuntimeError):
    """An error that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Rows(Dataset[torch.Tensor]):
    """Rows, one of which cannot be read."""

    def __init__(self, bad: int | None) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == self._bad:
            raise KeyError(f"row {row} has no label")
        return torch.full((4,), float(row) / 4000)


class Faulty(Trainer[FaultConfig]):
    """Has a fault on its last rank."""

    @property
    def _is_last(self) -> bool:
        return self.world.rank == self.world.size - 1

    def configure_models(self) -> None:
        if self.config.fault == "import_error" and self._is_last:
            import a_package_of_the_other_node  # type: ignore[import-not-found]  # noqa: F401
        width = 200_000 if self.config.fault == "disk_full" else 1
        self.model = nn.Linear(4, width)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def configure_dataloaders(self) -> Any:
        in_workers = self.config.fault == "loader_worker"
        return DataLoader(Rows(100 if in_workers else None), batch_size=8, num_workers=2 * in_workers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.1)
        if self.global_step == _AT and self._is_last:
            self._fail()
        return self.model(batch).square().mean()

    def _fail(self) -> None:
        match self.config.fault:
            case "exception":
                raise ValueError("a bad batch")
            case "unpicklable":
                raise Locked("it holds a lock")
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(7)
            case "segfault":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "out_of_memory":
                self._run_out_of_memory()

    def _run_out_of_memory(self) -> None:
        """Allocate until the control group is full, see `_run_in_memory_group`."""
        kept = []
        for _ in range(1000):
            kept.append(torch.ones(1 << 22))
        raise AssertionError(f"not killed with {len(kept)} blocks of 16 MiB")


def _command(fault: str, storage: str) -> list[str]:
    return [
        sys.executable, "-m", "headway.orchestrator", "fit", "tests.chaos.faults:Faulty", "name=faulty",
        f"storage={storage}", "scaling.workers=2", f"config.fault={fault}", "config.max_steps=60",
        "config.log_every=1 steps", "config.global_batch_size=16", "config.checkpoint.every=5 steps",
        "retries.hang_timeout=10s", "retries.spares=false", "scaling.wait=10m",
    ]  # fmt: skip


def _environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "build/types")])
    return {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", **variables}


def _run_alone(fault: str, folder: str) -> str:
    done = subprocess.run(
        _command(fault, folder), env=_environment(), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    return done.stdout + done.stderr


def _run_on_nodes(fault: str, folder: str) -> str:
    """Run on a cluster of nodes on this machine, one of which goes while the run trains."""
    from tests.machines import start_head

    environment = {"RAY_raylet_start_wait_time_s": "180", "RAY_TMPDIR": tempfile.mkdtemp(prefix="hw-")}
    os.environ.update(environment)
    cluster = start_head(num_cpus=0)
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        output = Path(folder, "output.txt")
        with output.open("w") as file:
            driver = subprocess.Popen(
                _command(fault, folder), env=_environment(RAY_ADDRESS=cluster.address), cwd=ROOT, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        events = Path(folder, "faulty/events.jsonl")
        _wait_for(lambda: events.exists() and "checkpoint_saved" in events.read_text())
        started = next(json.loads(line) for line in events.read_text().splitlines() if "attempt_started" in line)
        used = next(node for node in nodes if node.node_id == started["workers"][1]["node"])
        if fault == "head_lost":
            cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        elif fault == "node_drained":
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address, "--node-id",
                 used.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "rehearsal",
                 "--deadline-remaining-seconds", "15"],
                check=False, capture_output=True,
            )  # fmt: skip
            time.sleep(15)
            cluster.remove_node(used, allow_graceful=False)
        else:
            cluster.remove_node(used, allow_graceful=False)
        try:
            driver.wait(200)
        except subprocess.TimeoutExpired:
            driver.kill()
        return output.read_text()
    finally:
        cluster.shutdown()


def _run_in_memory_group(fault: str, folder: str) -> str:
    """Run in a memory control group, as in a container."""
    own = next(
        line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line
    )
    parent = Path("/sys/fs/cgroup/memory" + own)
    group = (parent if parent.exists() else Path("/sys/fs/cgroup/memory")) / f"headway-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(5 << 30))
    command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *_command(fault, folder)]
    try:
        done = subprocess.run(
            command, env=_environment(), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
        )
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):  # they may still be ending
            group.rmdir()
    return done.stdout + done.stderr


def _run_on_full_disk(fault: str, folder: str) -> str:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    try:
        return _run_alone(fault, folder) + _recorded(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def _run_without_token(fault: str, folder: str) -> str:
    from tests.heads import free_ports, head

    (port,) = free_ports(1)
    with head(f"--port={port}"):
        without = {name: text for name, text in _environment().items() if not name.startswith("RAY_AUTH")}
        done = subprocess.run(
            _command(fault, folder), env={**without, "RAY_ADDRESS": f"127.0.0.1:{port}", "HOME": folder}, cwd=ROOT,
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
    return done.stdout + done.stderr


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not train")
        time.sleep(0.1)


def _recorded(folder: str) -> str:
    """Return the sentences in the record and the events of the run."""
    lines = []
    events = Path(folder, "faulty/events.jsonl")
    for line in events.read_text().splitlines() if events.exists() else ():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event["event"] == "group_failed":
                lines.append(f"  event:  {event['text']}; {event.get('next', '')}")
    record = Path(folder, "faulty/run.json")
    if record.exists():
        found = json.loads(record.read_text() or "{}")
        lines.append(f"  record: {found.get('status')}: {found.get('error') or found.get('reason')}")
    return "\n".join(lines)


_RUN = {
    "node_lost": _run_on_nodes, "node_drained": _run_on_nodes, "head_lost": _run_on_nodes,
    "out_of_memory": _run_in_memory_group, "disk_full": _run_on_full_disk, "token_missing": _run_without_token,
}  # fmt: skip


def main() -> None:
    """Provoke the faults one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="fault", help=f"one of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--verbose", action="store_true", help="print the whole output of each run")
    options = parser.parse_args()
    for fault in options.faults or FAULTS:
        with tempfile.TemporaryDirectory(prefix="headway-fault-") as folder:
            print(f"\n{fault}", flush=True)
            try:
                output = _RUN.get(fault, _run_alone)(fault, folder)
            except (OSError, subprocess.SubprocessError, TimeoutError) as error:
                print(f"  not provoked here: {type(error).__name__}: {error}")
                continue
            told = [line for line in output.splitlines() if line.startswith("headway:")]
            print(output if options.verbose else "\n".join(f"  screen: {line}" for line in told))
            print(_recorded(folder), flush=True)


if __name__ == "__main__":
    main()
