"""What runs in each Ray Train worker: a trainer in the world that Ray has set up, and the record of how it failed."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray.cloudpickle
import torch

from headway.trainer.callbacks.base import Callback
from headway.trainer.distributed.world import World
from headway.trainer.trainer import Trainer

from ..errors import RunConflictError, StorageError
from ..runs.ownership import lease_lost, takeover_message
from ..runs.provenance import process_start_time
from ..runs.requests import read_stop_request
from ..runs.resume import ResumeOptions
from ..storage.events import EventWriter, read_events
from ..storage.folder import Folder
from ..watchdog.worker import Watchdog, last_heartbeat_event
from .elastic import RESIZING, RestartToResize
from .failures import is_fatal_error, is_secondary, name_process, phase_of
from .run_callback import RunCallback
from .standby import Spares


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the driver tells its workers.

    Attributes:
        run_dir: of the run, an absolute path or a URI.
        since: when this driver started, in seconds since 1970.
        resume_options: what the user chose to begin with.
        imports: folders that the driver imports from, besides its packages.
        current_dir: of the driver; relative paths in a config mean the same here.
        threads: that torch takes on a CPU.
        on_cpu: whether no GPU was asked for.
        lease: of the driver; no other one may have claimed the run.
        noticed: whether Ray says when machines are about to be taken away.
        watched: whether the driver listens for ranks that hang.
        capture: whether what the main rank prints is sent to the driver through the run's events.
        max_workers: the most that there will ever be.
        timeout_s: after which a rank that waits for the others gives up.
    """

    run_dir: str
    since: float
    resume_options: ResumeOptions
    imports: tuple[str, ...]
    current_dir: str
    threads: int
    on_cpu: bool
    lease: str
    noticed: bool
    watched: bool
    capture: bool
    max_workers: int
    timeout_s: float


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains one attempt on one rank, as Ray Train wants to call it: with a dict.

    Args:
        settings: the "task", and as "training" the trainer's class and its config, pickled: a class from a user's file
            travels by value.
    """
    try:
        return run_attempt(settings["task"], lambda: ray.cloudpickle.loads(settings["training"]))
    except BaseException as error:
        name_process(error)
        raise


def run_attempt(
    task: Task, load: Callable[[], tuple[type[Trainer[Any]], Any]], callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Trains one attempt on one rank, and returns the fields of its `FitResult`. Raises whatever the trainer raises.

    Args:
        task: what the driver wants.
        load: gives the trainer's class and its config, once what they import can be found.
        callbacks: of who trains in this process.
    """
    entered = time.time()
    if os.path.isdir(task.current_dir):
        os.chdir(task.current_dir)
    sys.path[:0] = [path for path in task.imports if path not in sys.path]
    if task.on_cpu:
        torch.set_num_threads(task.threads)
    world = World.attach("cpu" if task.on_cpu else None, timeout_s=task.timeout_s)
    folder = Folder(task.run_dir)
    if lease_lost(folder, task.lease):
        raise RunConflictError(takeover_message(folder, "run"))
    if (asked := read_stop_request(folder)) is not None:
        return {"status": asked.status, "reason": asked.reason}
    events = EventWriter(folder, f"rank-{world.rank}")
    past = world.broadcast(_past(folder, task.resume_options, task.since) if world.is_main else None)
    assert past is not None
    attempt, begin, size_before = past
    bridge = RunCallback(
        folder,
        events,
        is_main=world.is_main,
        lease=task.lease,
        noticed=task.noticed,
        attempt=attempt if world.size < task.max_workers else None,
        before=size_before if size_before != world.size else None,
    )
    trainer: Any = None
    watchdog = Watchdog(folder, rank=world.rank, attempt=attempt)
    try:
        with contextlib.ExitStack() as around:
            # The main rank is heard in any case: where the time goes is known from it.
            if world.is_main and (before := last_heartbeat_event(folder)) is not None:
                events.add("last_heard", spent=before["spent"])
            if task.watched or world.is_main:
                around.enter_context(watchdog)
            _announce(events, world, attempt, entered)
            trainer_class, config = load()
            if task.capture and world.is_main:
                around.enter_context(_captured(events))
            if world.is_main and attempt == 1 and world.size < task.max_workers:
                # Now, before it has trained for hours on fewer.
                trainer_class(config, world=replace(world, size=task.max_workers)).check()
            trainer = trainer_class(
                config,
                run_dir=task.run_dir,
                callbacks=[bridge, Spares(), *callbacks],
                world=world,
                attempt=attempt,
                printer=lambda text: events.add("message", text=text),
            )
            watchdog.watch(trainer)
            result = trainer.fit(resume=begin.resume, restore=begin.restore, accept_changes=begin.accept_changes)
    except BaseException as error:
        step = trainer.global_step if trainer is not None and bridge.began_at is not None else None
        # Where it cannot be written, what was raised is more than that.
        with contextlib.suppress(StorageError):
            events.add(
                "rank_failed",
                attempt=attempt,
                rank=world.rank,
                step=step,
                began_at=bridge.began_at,
                type=type(error).__name__,
                phase=phase_of(error),
                message=str(error),
                hopeless=is_fatal_error(error),
                collateral=is_secondary(error),
                traceback="".join(traceback.format_exception(error)),
            )
        raise
    is_to_resize = False
    if bridge.is_to_resize and result.status == "interrupted":
        if (asked := read_stop_request(folder)) is not None:  # a person in the meantime, who comes first
            result = replace(result, status=asked.status, reason=asked.reason)
        else:
            is_to_resize = True
    # The main rank alone has heard of it.
    is_to_resize = world.broadcast(is_to_resize)
    if world.is_main:
        status = RESIZING if is_to_resize else result.status
        events.add("attempt_ended", attempt=attempt, status=status, reason=result.reason, step=result.steps)
    if is_to_resize:
        # Ray Train ends all as soon as one raises.
        world.barrier()
        raise RestartToResize(result.reason)
    return asdict(result)


def _past(folder: Folder, asked: ResumeOptions, since: float) -> tuple[int, ResumeOptions, int | None]:
    """The number of this attempt, what it begins with, and the workers of the attempt before it, if there was one.

    It begins with the user's choice until this driver has saved something.
    """
    events = read_events(folder)
    saved = any(event["event"] == "checkpoint_saved" and event["time"] >= since for event in events)
    sizes = [event["world_size"] for event in events if event["event"] == "attempt_started"]
    begin = asked.after_a_save() if saved else asked
    return 1 + len(sizes), begin, sizes[-1] if sizes else None


def _announce(events: EventWriter, world: World, attempt: int, entered: float) -> None:
    me = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(world.device),
        "entered": round(entered, 3),
    }
    if (began := process_start_time()) is not None:
        me["began"] = round(began, 3)
    workers = world.all_gather_object(me)
    if world.is_main:
        events.add("attempt_started", attempt=attempt, world_size=world.size, workers=workers)


class _Lines(io.TextIOBase):
    """A text stream whose lines become messages."""

    def __init__(self, events: EventWriter) -> None:
        self._events, self._rest = events, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._events.add("message", text=line)
        return len(text)

    def flush(self) -> None:
        """Keeps half a line until its end comes."""


@contextlib.contextmanager
def _captured(events: EventWriter) -> Iterator[None]:
    """Turns what is printed and warned of into events, because the worker's own output is not shown."""
    told: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        # Libraries that change the filters make Python forget what it has warned of.
        if str(message) not in told:
            told.add(str(message))
            events.add("warning", category=category.__name__, text=str(message))

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        with contextlib.redirect_stdout(_Lines(events)):
            yield
    finally:
        warnings.showwarning = before
