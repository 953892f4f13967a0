"""Drives a schedule: starts real ranks, injects faults from outside, restarts them, and checks the result."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from headway.trainer.trackers.jsonl import read_records
from tests.chaos.damage import checkpoints, damage, torn
from tests.chaos.ledger import Lived, complaints, surviving
from tests.chaos.program import run_rank
from tests.chaos.ray_schedule import RaySchedule
from tests.chaos.schedule import Fault, Life, Schedule, Training
from tests.distributed import forking
from tests.on_ray import write_rows

LATE_S = 120.0
MOST_LIVES = 12
ROWS = 103
_MEASURED = ("train/loss", "train/accuracy", "validation/loss", "validation/accuracy", "lr", "grad_norm", "epoch")


class Unexpected(Exception):
    """A result that no fault explains."""


@dataclass
class Outcome:
    """The outcome of a schedule.

    Attributes:
        complaints: violations; empty if all checks held.
        struck: faults that were injected, by life.
        torn: number of incomplete saves and deletions found.
        log: output of the processes, by life.
    """

    schedule: Schedule | RaySchedule
    complaints: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    torn: int = 0
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether faults were injected and all checks held."""
        return not self.complaints and bool(self.struck)


def judged(outcome: Outcome, place: Path, run: Callable[[], None]) -> Outcome:
    """Collect failures inside this context as complaints, without raising. Keeps the files of failed schedules."""
    began_s = time.monotonic()
    try:
        run()
    except Unexpected as unexpected:
        outcome.complaints.append(str(unexpected))
    except Exception as error:
        # The other schedules are run in any case.
        outcome.complaints.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began_s
    if outcome.held:
        shutil.rmtree(place)
    else:
        outcome.log.append(f"files: {place}")
    return outcome


@dataclass
class Undisturbed:
    """The result of an undisturbed training."""

    history: dict[int, tuple[int, list[int]]]
    digests: dict[str, str]
    records: dict[int, dict[str, float]]


class Drive:
    """Runs schedules, also concurrently. Each training is run undisturbed once; the first one twice.

    Args:
        folder: for runs and data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = write_rows(folder / "rows", ROWS)
        self._undisturbed: dict[Training, Undisturbed] = {}
        self._asking: dict[Training, threading.Lock] = {}
        self._lock = threading.Lock()
        self._processes = forking()

    def undisturbed(self, training: Training) -> Undisturbed:
        """Return the result of an undisturbed training; run twice to check that it is reproducible."""
        training = training.undisturbed
        with self._lock:
            lock = self._asking.setdefault(training, threading.Lock())
        with lock:
            if training not in self._undisturbed:
                first, second = (self._run_undisturbed(training) for _ in range(2))
                assert first == second, f"the undisturbed run is not the same twice: {training}\n{first}\n{second}"
                self._undisturbed[training] = first
        return self._undisturbed[training]

    def run(self, schedule: Schedule) -> Outcome:
        """Run a schedule to its end, and check it. Does not raise for failures of the run."""
        outcome, run_dir = Outcome(schedule), Path(tempfile.mkdtemp(prefix=f"seed-{schedule.seed}-", dir=self._folder))
        return judged(outcome, run_dir, lambda: self._run(schedule, run_dir, outcome))

    def _run_undisturbed(self, training: Training) -> Undisturbed:
        run_dir = Path(tempfile.mkdtemp(prefix="undisturbed-", dir=self._folder))
        life = _Life(self._processes, training, Life(training.ranks), run_dir, self._data, failing=0.0, name="")
        life.run()
        if life.statuses() != {"completed"}:
            raise AssertionError(f"the undisturbed run did not complete: {training}\n{life.text()}")
        found = Undisturbed(surviving([life.lived]), life.digest(), records(run_dir))
        assert complaints(found.history, found.history) == []
        shutil.rmtree(run_dir)
        return found

    def _run(self, schedule: Schedule, run_dir: Path, outcome: Outcome) -> None:
        training = schedule.training
        lives: list[Lived] = []
        wanted = self.undisturbed(training)
        rotten: set[tuple[Path, int]] = set()
        loses_records = training.storage == "failing"
        for number in itertools.count():
            if number >= MOST_LIVES:
                raise Unexpected(f"not completed after {MOST_LIVES} lives")
            plan = schedule.lives[min(number, len(schedule.lives) - 1)]
            is_last = number >= len(schedule.lives) - 1
            failing = 0.03 if training.storage == "failing" and not is_last else 0.0
            name = f"{schedule.seed} {number}"
            life = _Life(self._processes, training, plan, run_dir, self._data, failing=failing, name=name)
            before = _Before.look(run_dir, rotten, remote=training.storage != "disk")
            life.run()
            outcome.log.append(f"--- life {number + 1}: {'; '.join(life.struck) or 'nothing'}\n{life.text()}")
            outcome.struck += [f"life {number + 1}: {what}" for what in life.struck]
            if not life.struck and any("the storage does not answer" in error for error in life.errors.values()):
                # Before the fault that was planned.
                outcome.struck.append(f"life {number + 1}: a write failed")
            outcome.torn += torn(run_dir)
            loses_records |= any("disk" in what for what in life.struck)
            if life.is_late:
                raise Unexpected(f"life {number + 1} did not end within {LATE_S:.0f} s: {life.struck}\n{life.text()}")
            if before.nothing_is_good and "none of the checkpoints can be read" in life.text():
                # All were damaged, and the run reports it instead of starting over: move them away, as a user would.
                shutil.rmtree(run_dir / "checkpoints")
                rotten.clear()
                continue
            _judge_life(number + 1, life, before, lives[-1] if lives else None)
            lives.append(life.lived)
            if life.statuses() == {"completed"}:
                break
            if life.lived.ended and len(life.lived.ended) < plan.ranks and not life.struck:
                raise Unexpected(f"life {number + 1}: some ranks ended well, others did not\n{life.text()}")
            for wound in plan.damages:
                if there := [each for each in checkpoints(run_dir) if each.identity not in rotten]:
                    outcome.struck.append(f"life {number + 1}: {damage(there[-1], wound)}")
                    rotten.add(there[-1].identity)
        outcome.complaints += complaints(surviving(lives), wanted.history)
        if not schedule.keeps_bits:
            return
        digests = life.digest()
        outcome.complaints += [
            f"{name} differ: {digests.get(name)}, undisturbed {value}"
            for name, value in wanted.digests.items()
            if digests.get(name) != value
        ]
        if not loses_records:
            outcome.complaints += other_records(records(run_dir), wanted.records)


@dataclass(frozen=True)
class _Before:
    """The checkpoints on disk when a life starts.

    Attributes:
        newest_good: the update that it must resume from; 0 if there is no checkpoint.
        nothing_is_good: whether there are checkpoints and all are damaged.
    """

    newest_good: int
    nothing_is_good: bool

    @classmethod
    def look(cls, run_dir: Path, rotten: set[tuple[Path, int]], *, remote: bool) -> _Before:
        good = [each for each in checkpoints(run_dir) if each.identity not in rotten]
        visible = [
            folder
            for folder in (run_dir / "checkpoints").glob("step-*")
            # In an object store the manifest is the commit: without one there is no checkpoint.
            if not remote or (folder / "manifest.json").exists()
        ]
        return cls(good[-1].step if good else 0, bool(visible) and not good)


def _judge_life(number: int, life: _Life, before: _Before, last: Lived | None) -> None:
    lived = life.lived
    for rank, error in life.errors.items():
        if not life.struck and "the storage does not answer" not in error:
            raise Unexpected(f"life {number}: nothing had happened, and rank {rank} raised {error}\n{life.text()}")
    if not life.struck and not life.errors and life.statuses() != {"completed"}:
        raise Unexpected(f"life {number}: nothing had happened, and it ended {life.ends()}\n{life.text()}")
    if lived.restored is None:
        return
    if lived.restored != before.newest_good:
        raise Unexpected(
            f"life {number} resumed from {lived.restored}, but the newest good checkpoint was {before.newest_good}"
        )
    if last is not None and {status for status, _ in last.ended.values()} == {"interrupted"}:
        steps = {steps for _, steps in last.ended.values()}
        # Those damaged afterwards do not count.
        if steps != {last.reached}:
            raise Unexpected(f"life {number - 1} was interrupted after {last.reached} updates, and says {steps}")
    if life.statuses() == {"interrupted"}:
        if not any(what.startswith(("terminate", "interrupt")) for what in life.struck):
            raise Unexpected(f"life {number} reports an interruption that was not injected")
        # One that was stopped before an update saves nothing, also where newer checkpoints than its own are damaged.
        saved = [each.step for each in checkpoints(life.run_dir)]
        if saved and lived.reached not in (saved if lived.reached == lived.restored else saved[-1:]):
            raise Unexpected(f"life {number} was stopped in order after {lived.reached}; saved are {saved}")
    known = [each.step for each in checkpoints(life.run_dir)]
    # A newer one replaces it, possibly without having been reported before the end.
    if lived.saved and max(lived.saved) not in known and max(lived.saved) >= max(known[-1:], default=0):
        raise Unexpected(f"life {number} reported that {max(lived.saved)} was saved; there are {known}")


def records(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the logged metrics of a run without speeds, which differ."""
    # By a URI, which finds the segments of the storages behind URIs as well.
    return {
        int(each["step"]): {name: each[name] for name in _MEASURED if name in each}
        for each in read_records(f"local://{run_dir}/metrics.jsonl")
    }


def other_records(records: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]]) -> list[str]:
    """An interruption adds a record of the partial interval; it removes none."""
    return [
        f"record of step {step}: {mine}, undisturbed {record}"
        for step, record in wanted.items()
        if (mine := {name: records.get(step, {}).get(name) for name in record}) != record
    ]


class _Life:
    """One start of all ranks until the last has ended. Like `torchrun`, it ends all when one dies."""

    def __init__(
        self, processes: Any, training: Training, plan: Life, run_dir: Path, data: str, *, failing: float, name: str
    ) -> None:
        self.training, self.plan, self.run_dir = training, plan, run_dir
        self.lived = Lived()
        self.struck: list[str] = []
        self.errors: dict[int, str] = {}
        self.is_late = False
        self._digests: list[dict[str, str]] = []
        self._text: dict[int, bytes] = dict.fromkeys(range(plan.ranks), b"")
        self._said: dict[tuple[str, Any], int] = {}
        self._counts: dict[str, int] = {}
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._waiting = list(plan.faults)
        prefix = "" if training.storage == "disk" else f"{training.storage}://"
        meeting = tempfile.mktemp(prefix="meeting-", dir=run_dir.parent)
        self._pipes: dict[Connection, int] = {}
        self._outputs: dict[Connection, int] = {}
        self._processes: list[Any] = []
        for rank in range(plan.ranks):
            (mine, tell), (heard, output) = processes.Pipe(duplex=False), processes.Pipe(duplex=False)
            process = processes.Process(
                target=run_rank,
                args=(
                    rank,
                    plan.ranks,
                    training,
                    f"{prefix}{run_dir}",
                    data,
                    meeting,
                    failing,
                    name,
                    tell,
                    output,
                ),
                daemon=True,
            )
            process.start()
            # Otherwise the pipe would never end.
            tell.close()
            output.close()
            self._pipes[mine], self._outputs[heard] = rank, rank
            self._processes.append(process)

    def run(self) -> None:
        deadline_s = time.monotonic() + LATE_S
        try:
            while self._pipes or self._outputs or any(process.is_alive() for process in self._processes):
                now_s = time.monotonic()
                while self._todo and self._todo[0][0] <= now_s:
                    heapq.heappop(self._todo)[2]()
                if now_s > deadline_s:
                    if self.is_late:
                        break
                    self._ask_where_they_are()
                    deadline_s, self.is_late = now_s + 5, True
                until_s = self._todo[0][0] if self._todo else now_s + 0.05
                ready = wait([*self._pipes, *self._outputs], timeout=max(0.0, min(until_s - now_s, 0.05)))
                for each in ready:
                    self._hear(each)  # type: ignore[arg-type]
                if not ready and not self._pipes and not self._outputs:
                    time.sleep(0.005)
                self._notice_deaths()
        finally:
            for process in self._processes:
                process.kill()
                process.join()
                process.close()

    def text(self) -> str:
        """Return the end of the output of the ranks."""
        return "\n".join(
            f"[rank {rank}] {text.decode(errors='replace')[-4000:]}" for rank, text in self._text.items() if text
        )

    def statuses(self) -> set[str]:
        """Return the end that all ranks report; nothing if one has not."""
        return (
            {status for status, _ in self.lived.ended.values()} if len(self.lived.ended) == self.plan.ranks else set()
        )

    def ends(self) -> dict[int, tuple[str, int]]:
        return self.lived.ended

    def digest(self) -> dict[str, str]:
        """Return the digests of the result, which are equal on all ranks."""
        assert all(each == self._digests[0] for each in self._digests), f"ranks differ: {self._digests}"
        return self._digests[0]

    def _hear(self, connection: Connection) -> None:
        if connection in self._outputs:
            text = os.read(connection.fileno(), 65536)
            self._text[self._outputs[connection]] += text
            if not text:
                del self._outputs[connection]
            return
        rank = self._pipes[connection]
        try:
            said = connection.recv()
        except (EOFError, OSError):
            del self._pipes[connection]
            return
        match said:
            case ("fit", step):
                assert self.lived.restored in (None, step), "ranks resume from different updates"
                self.lived.restored = step
            case ("step", step, epoch, rows):
                self.lived.rows[step][rank] = rows
                self.lived.epochs[step] = epoch
                if step % self.training.every == 0:
                    self._begins("save", step)
            case ("saved", step):
                self.lived.saved.append(step)
            case ("raised", error):
                self.errors[rank] = error
            case ("ended", status, steps, digests):
                self.lived.ended[rank] = (status, steps)
                self._digests.append(digests)
        self._begins(said[0], said[1] if len(said) > 1 else None)

    def _begins(self, moment: str, what: Any) -> None:
        """Schedule the faults of this moment. A moment begins when the first rank reports it."""
        if (moment, what) in self._said:
            return
        self._said[moment, what] = 1
        self._counts[moment] = self._counts.get(moment, 0) + 1
        for fault in [each for each in self._waiting if each.moment == moment]:
            if self._counts[moment] == fault.count:
                self._waiting.remove(fault)
                self._after(fault.delay_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._todo, (time.monotonic() + delay_s, next(self._number), do))

    def _strike(self, fault: Fault) -> None:
        ranks = range(self.plan.ranks)
        whom = [rank for rank in ranks if fault.whom is None or rank == fault.whom % self.plan.ranks]
        # A rank that has reported its end cannot lose anything.
        alive = [rank for rank in whom if self._processes[rank].is_alive() and rank not in self.lived.ended]
        if not alive:
            return
        self.struck.append(f"{fault} (after update {self.lived.reached})")
        match fault.blow:
            case "kill":
                self._send(signal.SIGKILL, alive)
            case "terminate" | "interrupt":
                self._send(signal.SIGTERM if fault.blow == "terminate" else signal.SIGINT, alive)
                if fault.then_s is not None:
                    self._after(fault.then_s, lambda: self._send(signal.SIGKILL, alive))
            case "freeze":
                self._send(signal.SIGSTOP, alive)
                if fault.then_s is None:
                    self._after(0.3, lambda: self._send(signal.SIGKILL, list(ranks)))
                else:
                    self._after(fault.then_s, lambda: self._send(signal.SIGCONT, alive))
            case "fill the disk":
                self._limit(alive, 2048)
                if fault.then_s is not None:
                    self._after(fault.then_s, lambda: self._limit(alive, resource.RLIM_INFINITY))

    def _send(self, number: int, ranks: list[int]) -> None:
        for rank in ranks:
            if self._processes[rank].is_alive():
                with contextlib.suppress(ProcessLookupError):  # it may have ended since
                    os.kill(self._processes[rank].pid, number)

    def _limit(self, ranks: list[int], size_bytes: int) -> None:
        """Limit the size of files of these processes: writes beyond it fail, as on a full disk."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                with contextlib.suppress(ProcessLookupError):
                    _, hard = resource.prlimit(self._processes[rank].pid, resource.RLIMIT_FSIZE)
                    resource.prlimit(self._processes[rank].pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

    def _notice_deaths(self) -> None:
        dead = [rank for rank, process in enumerate(self._processes) if process.exitcode not in (None, 0)]
        if dead and "dead" not in self._counts:
            self._counts["dead"] = 1
            self._after(self.plan.grace_s, lambda: self._send(signal.SIGKILL, list(range(self.plan.ranks))))

    def _ask_where_they_are(self) -> None:
        self._send(signal.SIGCONT, list(range(self.plan.ranks)))
        self._send(signal.SIGUSR1, list(range(self.plan.ranks)))
