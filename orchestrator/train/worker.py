"""The function that runs in each Ray Train worker: one attempt of the trainer, and the record of its failure."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import ray.cloudpickle
import torch

from headway.trainer.callbacks.base import Callback
from headway.trainer.distributed.world import World
from headway.trainer.ownership.claim import claimed_by_driver
from headway.trainer.result import FitResult
from headway.trainer.trainer import Trainer

from ..config.script_settings import unpickle_with_settings
from ..errors import RunConflictError, StorageError
from ..runs.ownership import lease_lost, takeover_message
from ..runs.provenance import process_start_time
from ..runs.requests import read_stop_request
from ..runs.resume import ResumeOptions
from ..storage.events import EventWriter, read_events
from ..storage.folder import Folder
from ..watchdog.mailbox import RankMailbox
from ..watchdog.worker import Watchdog, last_heartbeat_event
from .elastic import RESIZING, RestartToResize
from .evaluated_elsewhere import EvaluatedElsewhere
from .failures.cause import is_fatal_error, is_secondary, phase_of, user_line_of
from .failures.last_words import Recorder
from .failures.retry_policy import name_process
from .ray_train_thread import replace_ray_calls
from .run_callback import RunCallback
from .standby import Spares
from .worker_check import check_worker


@dataclass(frozen=True, kw_only=True)
class Task:
    """The settings that the driver passes to its workers.

    Attributes:
        run_dir: the run's folder, an absolute path or a URI.
        resume_options: the user's choice of what to resume from.
        imports: folders that the driver imports from, besides its installed packages.
        current_dir: the driver's current directory, for relative paths in a config.
        threads: torch threads on a CPU; None leaves their number to Ray.
        on_cpu: whether the workers have no GPU; in a worker of Ray Train, nor another accelerator of Ray's.
        lease: the driver's lease on the run.
        driver_host: host of the driver.
        versions: of Python and packages in the driver.
        polls_preemption: whether Ray gives preemption notices.
        monitors_hangs: whether the driver reads the heartbeats.
        capture_output: whether the main rank's output goes to the driver through the run's events.
        max_workers: the most workers that the run may have.
        timeout_s: timeout of collectives.
        evaluates_elsewhere: whether another worker evaluates the checkpoints.
        mailbox: the actor for heartbeats and requests; None if they go through files only.
        reports: whether the ranks report evaluations and checkpoints to Ray Train.
        callbacks: further callbacks of the trainer.
    """

    run_dir: str
    resume_options: ResumeOptions
    imports: tuple[str, ...]
    current_dir: str
    threads: int | None
    on_cpu: bool
    lease: str
    driver_host: str
    versions: dict[str, str]
    polls_preemption: bool
    monitors_hangs: bool
    capture_output: bool
    max_workers: int
    timeout_s: float
    evaluates_elsewhere: bool
    mailbox: Any = None
    reports: bool = False
    callbacks: tuple[Callback, ...] = ()


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train one attempt on one rank; called by the function that Ray Train calls.

    Args:
        settings: pickled, as "task" the `Task`, and as "training" the class and config of the trainer.
    """
    try:
        replace_ray_calls()
        task = replace(ray.cloudpickle.loads(settings["task"]), on_cpu=not has_accelerator())
        return run_attempt(task, lambda: unpickle_with_settings(settings["training"]))
    except BaseException as error:
        name_process(error)
        raise


def has_accelerator() -> bool:
    """Return whether Ray has given this worker a GPU, HPU, NPU, TPU or another accelerator that Ray knows."""
    # Asking for the context would start a Ray where there is none.
    return ray.is_initialized() and any(ray.get_runtime_context().get_accelerator_ids().values())


def run_attempt(
    task: Task, load: Callable[[], tuple[type[Trainer[Any]], Any]], callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Train one attempt on one rank and return the fields of its `FitResult`. Raises whatever the trainer raises.

    Args:
        task: the driver's settings.
        load: returns the trainer's class and its config; called once their imports can be found.
        callbacks: callbacks of this process, besides those of the task.
    """
    entered = time.time()
    enter_driver_folders(task.current_dir, task.imports)
    if task.on_cpu and task.threads is not None:
        torch.set_num_threads(task.threads)
    world = World.attach("cpu" if task.on_cpu else None, timeout_s=task.timeout_s)
    differences = check_worker(
        world, task.run_dir, lease=task.lease, driver_host=task.driver_host, versions=task.versions
    )
    folder = Folder(task.run_dir)
    if lease_lost(folder, task.lease):
        raise RunConflictError(takeover_message(folder, "run"))
    if (stop := read_stop_request(folder)) is not None:
        return {"status": stop.status, "reason": stop.reason}
    events = EventWriter(folder, f"rank-{world.rank}", start=task.lease)
    past = world.broadcast(_past(folder, task.resume_options, task.lease) if world.is_main else None)
    assert past is not None
    attempt, resume, previous_workers = past
    mailbox = None if task.mailbox is None else RankMailbox(task.mailbox)
    watchdog = Watchdog(folder, rank=world.rank, attempt=attempt, ranks=world.size, mailbox=mailbox)
    run_callback = RunCallback(
        folder,
        events,
        is_main=world.is_main,
        lease=task.lease,
        polls_preemption=task.polls_preemption,
        reports=task.reports,
        scalable_attempt=attempt if world.size < task.max_workers else None,
        previous_workers=previous_workers if previous_workers != world.size else None,
        requests=lambda: watchdog.requests,
    )
    elsewhere = [EvaluatedElsewhere(folder)] if task.evaluates_elsewhere else []
    trainer: Any = None
    try:
        with contextlib.ExitStack() as stack:
            # The main rank always sends heartbeats: they also account for its time.
            if world.is_main and (before := last_heartbeat_event(folder)) is not None:
                events.add("last_heard", spent=before["spent"])
            if task.monitors_hangs or world.is_main:
                stack.enter_context(watchdog)
            recorder = stack.enter_context(contextlib.closing(Recorder()))
            _announce(events, world, attempt, entered, recorder)
            for text in differences if world.is_main else ():
                events.add("warning", category="UserWarning", text=text)
            trainer_class, config = load()
            if task.capture_output and world.is_main:
                stack.enter_context(_captured(events))
            if world.is_main and attempt == 1 and world.size < task.max_workers:
                # Now, not after hours on fewer workers.
                trainer_class(config, world=replace(world, size=task.max_workers)).check()
            trainer = trainer_class(
                config,
                run_dir=task.run_dir,
                callbacks=[run_callback, recorder, Spares(), *elsewhere, *callbacks, *task.callbacks],
                world=world,
                attempt=attempt,
                printer=partial(_print, events, shows=task.reports),
            )
            watchdog.attach(trainer)
            with claimed_by_driver(task.run_dir):
                result = trainer.fit(resume=resume.resume, restore=resume.restore, accept_changes=resume.accept_changes)
    except BaseException as error:
        step = trainer.global_step if trainer is not None and run_callback.began_at is not None else None
        # A failed write must not hide the error.
        with contextlib.suppress(StorageError):
            _add_failure(
                events, error, attempt=attempt, rank=world.rank, step=step, began_at=run_callback.began_at
            )  # fmt: skip
        raise
    return _end(events, world, folder, result, attempt=attempt, may_resize=run_callback.is_to_resize)


def _add_failure(
    events: EventWriter, error: BaseException, *, attempt: int, rank: int, step: int | None, began_at: int | None
) -> None:
    """Record that a rank failed at a step of an attempt that began at `began_at`; None: before training began."""
    events.add(
        "rank_failed",
        attempt=attempt,
        rank=rank,
        step=step,
        began_at=began_at,
        type=type(error).__name__,
        phase=phase_of(error),
        line=user_line_of(error),
        message=str(error),
        retryable=not is_fatal_error(error),
        secondary=is_secondary(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _end(
    events: EventWriter, world: World, folder: Folder, result: FitResult, *, attempt: int, may_resize: bool
) -> dict[str, Any]:
    """Record the end of an attempt, and return the fields of its result. Every rank must call this.

    Raises:
        RestartToResize: the attempt has ended for the run to continue on another number of workers.
    """
    is_to_resize = False
    if may_resize and result.status == "interrupted":
        if (stop := read_stop_request(folder)) is not None:  # a stop requested in the meantime takes precedence
            result = replace(result, status=stop.status, reason=stop.reason)
        else:
            is_to_resize = True
    # Only the main rank polls for requests.
    is_to_resize = world.broadcast(is_to_resize)
    if world.is_main:
        status = RESIZING if is_to_resize else result.status
        events.add("attempt_ended", attempt=attempt, status=status, reason=result.reason, step=result.steps)
    if is_to_resize:
        # Ray Train ends all ranks as soon as one raises.
        world.barrier()
        raise RestartToResize(result.reason)
    return asdict(result)


def enter_driver_folders(current_dir: str, imports: Sequence[str]) -> None:
    """Use the driver's current directory, where it exists, and import from its folders.

    Args:
        current_dir: the driver's current directory.
        imports: folders that the driver imports from, besides its installed packages.
    """
    if os.path.isdir(current_dir):
        os.chdir(current_dir)
    sys.path[:0] = [path for path in imports if path not in sys.path]
    if current_dir not in imports:
        # Ray puts it first, but a script in another folder does not import from it.
        here = [path for path in sys.path if os.path.realpath(path) == os.path.realpath(current_dir)]
        sys.path[:] = [*(path for path in sys.path if path not in here), *here]


def _print(events: EventWriter, text: str, *, shows: bool) -> None:
    events.add("message", text=text)
    if shows:
        # No driver shows the events: the line goes where Ray sends the output of workers.
        print(text, flush=True)


def _past(folder: Folder, asked: ResumeOptions, lease: str) -> tuple[int, ResumeOptions, int | None]:
    """Return the number of this attempt, what it resumes from, and the workers of the previous attempt, if any.

    The user's choice applies until this driver has saved a checkpoint.
    """
    events = read_events(folder)
    saved = any(event["event"] == "checkpoint_saved" and event.get("start") == lease for event in events)
    sizes = [event["world_size"] for event in events if event["event"] == "attempt_started"]
    resume = asked.after_save() if saved else asked
    return 1 + len(sizes), resume, sizes[-1] if sizes else None


def _announce(events: EventWriter, world: World, attempt: int, entered: float, recorder: Recorder) -> None:
    me = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(world.device),
        "entered": round(entered, 3),
        **recorder.location(),
    }
    if (began := process_start_time()) is not None:
        me["began"] = round(began, 3)
    workers = world.all_gather_object(me)
    if world.is_main:
        events.add("attempt_started", attempt=attempt, world_size=world.size, workers=workers)


class _Lines(io.TextIOBase):
    """A text stream whose lines become "message" events."""

    def __init__(self, events: EventWriter) -> None:
        self._events, self._rest = events, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._events.add("message", text=line)
        return len(text)

    def flush(self) -> None:
        """Keep an incomplete line until it is complete."""


class _LoggedWarnings(logging.Handler):
    """Passes the warnings that `headway.datasets` logs to a function."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on the text of a warning."""
        self._show(record.getMessage())


@contextlib.contextmanager
def _captured(events: EventWriter) -> Iterator[None]:
    """Turn output and warnings into events, because the worker's own output is not shown."""
    shown: set[str] = set()

    def show(category: str, text: str) -> None:
        # Libraries that change the warning filters reset Python's record of warnings shown.
        if text not in shown:
            shown.add(text)
            events.add("warning", category=category, text=text)

    def show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        show(category.__name__, str(message))

    before = warnings.showwarning
    warnings.showwarning = show_warning
    logged = _LoggedWarnings(partial(show, "data"))
    logging.getLogger("headway.datasets").addHandler(logged)
    try:
        with contextlib.redirect_stdout(_Lines(events)):
            yield
    finally:
        logging.getLogger("headway.datasets").removeHandler(logged)
        warnings.showwarning = before
