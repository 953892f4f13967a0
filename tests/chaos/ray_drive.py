"""Drives a schedule on Ray: `headway fit` in a separate process, on a local cluster of one head and two nodes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, Duration, ParallelConfig, World
from headway.trainer.checkpoints.export import read_parts
from headway.trainer.checkpoints.format.digests import digest_of
from headway.trainer.trackers.jsonl import read_records
from tests.chaos.damage import checkpoints, damage
from tests.chaos.drive import Outcome, Unexpected, judged, other_records, records
from tests.chaos.ledger import complaints
from tests.chaos.ray_schedule import BATCH, EPOCHS, ROWS, RayFault, RayLife, RaySchedule
from tests.distributed import run_on_ranks
from tests.on_ray import OnRay, OnRayConfig, write_rows

LATE_S = 1800.0
MOST_LIVES = 6
REPOSITORY = Path(__file__).parents[2]


class RayDrive:
    """Runs schedules one after another on one cluster; a context manager that stops the cluster.

    Args:
        folder: for runs and data.
    """

    def __init__(self, folder: Path) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before Ray is imported
        from tests.machines import start_head

        self._folder = folder
        self._data = write_rows(folder / "rows-on-ray", ROWS)
        self._undisturbed: dict[str, Path] = {}
        # Separate, or every ray.init() on this machine would find this cluster. Short, because it contains sockets.
        self._before, self._rays_files = os.environ.get("RAY_TMPDIR"), tempfile.mkdtemp(prefix="hc-")
        os.environ["RAY_TMPDIR"] = self._rays_files
        self._cluster: Any = start_head(num_cpus=3)
        self._nodes: list[Any] = []
        self._due_s = [0.0, 0.0]
        while self._due_s:
            self.mend()

    def __enter__(self) -> RayDrive:
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.shutdown()
        os.environ.pop("RAY_TMPDIR")
        if self._before is not None:
            os.environ["RAY_TMPDIR"] = self._before
        shutil.rmtree(self._rays_files, ignore_errors=True)

    def run(self, schedule: RaySchedule) -> Outcome:
        """Run a schedule to its end, and check it. Does not raise for failures of the run."""
        outcome = Outcome(schedule)
        storage = Path(tempfile.mkdtemp(prefix=f"ray-seed-{schedule.seed}-", dir=self._folder))
        return judged(outcome, storage, lambda: self._run(schedule, storage, outcome))

    def _run(self, schedule: RaySchedule, storage: Path, outcome: Outcome) -> None:
        undisturbed = self._run_undisturbed(schedule.strategy)
        run_dir = storage / "run"
        for number in itertools.count():
            if number >= MOST_LIVES:
                raise Unexpected(f"not completed after {MOST_LIVES} starts")
            plan = schedule.lives[min(number, len(schedule.lives) - 1)]
            start = _Start(schedule, plan, storage, self._data, self._cluster.address)
            code = start.run(self)
            outcome.struck += [f"start {number + 1}: {what}" for what in start.struck]
            outcome.log.append(f"--- start {number + 1}: exit code {code}\n{start.text()}")
            if code == 0:
                break
            if not any("driver" in what for what in start.struck):
                raise Unexpected(f"start {number + 1}: `headway fit` ended with {code}\n{start.text()}")
            for wound in plan.damages:
                # Only if there are several, so that a good one is left.
                if len(there := checkpoints(run_dir)) > 1:
                    outcome.struck.append(f"start {number + 1}: {damage(there[-1], wound)}")
        outcome.complaints += complaints(_history(run_dir), _history(undisturbed))
        if not schedule.resizes:
            ours, theirs = (_sums(each) for each in (run_dir, undisturbed))
            outcome.complaints += [
                f"{name}: {ours.get(name)}, undisturbed {value}"
                for name, value in theirs.items()
                if ours.get(name) != value
            ]
            outcome.complaints += other_records(records(run_dir), records(undisturbed))

    def _run_undisturbed(self, strategy: str) -> Path:
        """Train without Ray and without interruption, on the same number of ranks."""
        if strategy not in self._undisturbed:
            run_dir = self._folder / f"undisturbed-{strategy}"
            run_on_ranks(_train, 2, str(run_dir), self._data, strategy)
            self._undisturbed[strategy] = run_dir
        return self._undisturbed[strategy]

    def replace_node(self, worker: int) -> None:
        """Kill the raylet of a worker, and with it all processes of its node; later another node is added."""
        raylet = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        for node in self._nodes:
            if any(each.process.pid == raylet for each in node.all_processes["raylet"]):
                self._nodes.remove(node)
                self._cluster.remove_node(node, allow_graceful=False)
                self._due_s.append(time.monotonic() + 3.0)
                return
        raise ProcessLookupError(worker)

    def mend(self) -> None:
        """Add a node if one is due. Called in the main thread, where Ray can install its signal handlers."""
        if not self._due_s or time.monotonic() < self._due_s[0]:
            return
        try:
            # Each worker needs this resource: one is on each node, and none on the head.
            self._nodes.append(self._cluster.add_node(num_cpus=2, resources={"place": 1}))
            self._due_s.pop(0)
        except Exception as error:
            # On a busy machine a raylet may need longer than Ray's timeout.
            print(f"no node yet: {error}", file=sys.stderr)


def _train(world: World, run_dir: str, data: str, strategy: str) -> None:
    config = OnRayConfig(
        data=data, max_epochs=EPOCHS, global_batch_size=BATCH, log_every=Duration(1, "steps"), dropout=0.2,
        evaluate_every=Duration(10, "steps"), checkpoint=CheckpointConfig(every=None),
        parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
    )  # fmt: skip
    Path(run_dir).mkdir(exist_ok=True)
    assert OnRay(config, run_dir=run_dir, world=world).fit().status == "completed"


def _history(run_dir: Path) -> dict[int, tuple[int, list[int]]]:
    """Return the rows of each update over all ranks, from 1; repeated updates count as the last attempt made them."""
    ranks = [_rows_of_rank(run_dir, int(each.stem.split("-")[1])) for each in run_dir.glob("rows-*.jsonl")]
    history = {}
    for step in sorted({step for rank in ranks for step in rank}):
        there = [rank[step] for rank in ranks if step in rank]
        last = max(attempt for attempt, _ in there)
        history[step + 1] = (step // 13, sorted({row for attempt, rows in there if attempt == last for row in rows}))
    return history


def _rows_of_rank(run_dir: Path, rank: int) -> dict[int, tuple[int, list[int]]]:
    """Return the last attempt that made each update on a rank, and its rows."""
    seen: dict[int, tuple[int, list[int]]] = {}
    for line in (run_dir / f"rows-{rank}.jsonl").read_text().splitlines():
        said = json.loads(line)
        attempt, rows = seen.get(said["step"], (0, []))
        if said["attempt"] >= attempt:
            seen[said["step"]] = (said["attempt"], [*(rows if attempt == said["attempt"] else []), *said["ids"]])
    return seen


def _sums(run_dir: Path) -> dict[str, str]:
    """Return digests of weights and moments in the last checkpoint."""
    folder = checkpoints(run_dir)[-1].folder
    parts = json.loads((folder / "state.json").read_text())["parts"]
    states = read_parts(folder, [part for part in parts if part.split("/")[0] in ("models", "optimizers")])
    return {part: digest_of(state) for part, state in states.items()}


class _Start:
    """One `headway fit`, with the faults injected until it ends."""

    def __init__(self, schedule: RaySchedule, plan: RayLife, storage: Path, data: str, address: str) -> None:
        self.plan, self.struck = plan, list[str]()
        self._run_dir = storage / "run"
        self._waiting = list(plan.faults)
        self._began_s = time.time()
        self._log = storage / f"driver-{time.time_ns()}.log"
        settings = {
            "name": "run", "storage": storage, "scaling.workers": plan.workers, "scaling.wait": "15m",
            "scaling.resources_per_worker.place": 1, "retries.max_failures": 8,
            "config.data": data, "config.max_epochs": EPOCHS, "config.global_batch_size": BATCH,
            "config.log_every": "1 steps", "config.dropout": 0.2, "config.evaluate_every": "10 steps",
            "config.pause_s": 0.05, "config.checkpoint.every": f"{schedule.every} steps",
            "config.parallel.strategy": schedule.strategy,
        }  # fmt: skip
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headway.orchestrator", "fit", "tests.on_ray:OnRay"]
                + [f"{name}={value}" for name, value in settings.items()],
                cwd=REPOSITORY,
                env={**os.environ, "RAY_ADDRESS": address, "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, drive: RayDrive) -> int:
        """Wait for the end, and return the exit code."""
        deadline_s = time.monotonic() + LATE_S
        try:
            while self._process.poll() is None:
                if time.monotonic() > deadline_s:
                    raise Unexpected(f"`headway fit` did not end within {LATE_S:.0f} s: {self.struck}\n{self.text()}")
                for fault in [each for each in self._waiting if self._is_time(each)]:
                    self._waiting.remove(fault)
                    time.sleep(fault.delay_s)
                    self._strike(fault, drive)
                drive.mend()
                time.sleep(0.05)
        finally:
            self._process.kill()
            self._process.wait()
        return self._process.returncode

    def text(self) -> str:
        """Return the end of the output of the driver."""
        return self._log.read_text()[-6000:]

    def _attempts(self) -> list[Event]:
        return [
            each for each in read_events(Folder(str(self._run_dir)))
            if each["event"] == "attempt_started" and each["time"] >= self._began_s
        ]  # fmt: skip

    def _is_time(self, fault: RayFault) -> bool:
        # Faults of workers need the workers of this start; inject one after another.
        if fault is not self._waiting[0] or not self._attempts():
            return False
        return fault.step == 0 or max((each["step"] for each in _logged(self._run_dir)), default=0) >= fault.step

    def _strike(self, fault: RayFault, drive: RayDrive) -> None:
        if self._process.poll() is not None:
            return
        workers = self._attempts()[-1]["workers"]
        pid = workers[fault.whom % len(workers)]["pid"]
        try:
            match fault.blow:
                case "kill a worker":
                    os.kill(pid, signal.SIGKILL)
                case "freeze a worker":
                    os.kill(pid, signal.SIGSTOP)
                case "kill a raylet":
                    drive.replace_node(pid)
                case "kill the driver":
                    os.killpg(self._process.pid, signal.SIGKILL)
                case "terminate the driver":
                    os.kill(self._process.pid, signal.SIGTERM)
                case "interrupt the driver":
                    os.kill(self._process.pid, signal.SIGINT)
        except (ProcessLookupError, FileNotFoundError):
            return
        self.struck.append(str(fault))


def _logged(run_dir: Path) -> list[dict[str, Any]]:
    return read_records(run_dir / "metrics.jsonl")
