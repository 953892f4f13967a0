"""One start of a run: Ray Train in a thread, and beside it one that watches the files, the signals and the clock."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headway.trainer.metrics.units import human_duration

from ..cli.console import RunConsole
from ..cluster.connect import describe_wait, placed_groups, target_workers_now, wait_timeout_error
from ..config.experiment import Experiment
from ..errors import StorageError
from ..runs.ownership import lease_lost
from ..runs.requests import StopRequest, read_stop_request, request_scale_up, request_stop
from ..runs.result import RunResult
from ..runs.resume import ResumeOptions
from ..runs.run import Run
from ..storage.events import Event, EventWriter, JsonlTail, read_events
from ..storage.folder import StorageOutage, retry_storage
from ..watchdog.driver import HangMonitor
from .elastic import RESIZING, ScaleUpPolicy
from .preemption import count_endings
from .signals import StopSignals
from .worker_group import run_worker_group, training_error

_TELL_WAITING_EVERY_S = 5.0
# Thirty years, which Ray Train can count to.
_FOR_EVER_S = 1e9
# What Ray Train gives a machine that goes nobody knows when, and what it takes to look and to end a group.
_RAYS_DEADLINE_S = 120.0
_GRACE_S = 10.0


class RunDriver:
    """One start of a run.

    Args:
        experiment: what to train.
        run: claimed for this process.
        signals: that the person may send.
        display: where to show the run.
        resume_options: what it begins with.
        verbose: shows what Ray prints.
        spares: keeps worker processes in reserve.
        began: when this start did, in seconds since 1970; by default now.
        train: runs the workers to their end; returns the fields of rank 0's `FitResult`.
        gives_up: whether workers that do not come up are an error in the end; else somebody else minds the clock.
    """

    def __init__(
        self,
        experiment: Experiment,
        run: Run,
        signals: StopSignals,
        display: RunConsole,
        *,
        resume_options: ResumeOptions,
        verbose: bool,
        spares: bool,
        began: float | None = None,
        train: Callable[..., dict[str, Any]] = run_worker_group,
        gives_up: bool = True,
    ) -> None:
        self._train_workers = train
        self._patience_s = experiment.scaling.wait_timeout_s if gives_up else _FOR_EVER_S
        self._experiment, self._run, self._signals, self._display = experiment, run, signals, display
        self._resumption, self._verbose, self._spares = resume_options, verbose, spares
        self._since = time.time()
        self._began = self._since if began is None else began
        self._returned: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._is_up = False
        # Who trains in this process is there from the start.
        self._trains_here = self._has_workers = train is not run_worker_group
        self._signals_seen = 0
        self._stop: StopRequest | None = None
        self._stop_since_s = 0.0
        self._events = EventWriter(run.folder, "driver")
        self._growth = ScaleUpPolicy(experiment.scaling)
        # Attempt and workers of the group that is up.
        self._group = (0, 0)
        self._told_waiting_s = time.monotonic()
        self._start_clock()
        self._told_waiting: str | None = None
        self._taken_away_at = math.inf
        self._patience = StorageOutage()
        self._unheeded: list[Event] = []
        self._hang_monitor = HangMonitor(experiment, run.folder, self._events)
        self._event_lines = JsonlTail(run.folder, "events", from_now=True)
        self._metric_lines = JsonlTail(run.folder, "metrics.jsonl", from_now=True)

    def run(self) -> RunResult:
        """Trains to the end, whatever it is."""
        workers = self._experiment.scaling.workers
        self._events.add(
            "driver_started", pid=os.getpid(), workers=workers, since=round(self._began, 3), **self._resumption.choice
        )
        thread = threading.Thread(target=self._train, name="headway-ray-train", daemon=True)
        self._signals.raises = False
        thread.start()
        # A training in this very process wants its processor, and there are no workers to wait for.
        pause_s = (0.5 if self._has_workers else 0.1) if self._run.folder.is_local else 2.0
        try:
            while thread.is_alive():
                thread.join(pause_s)
                if (reason := self._turn()) is not None:
                    return self._abandoned(reason)
            retry_storage(self._look)
        except Exception:
            self._leave(thread)
            raise
        finally:
            self._display.close()
        return self._result()

    def _turn(self) -> str | None:
        """Looks at everything once; returns why to leave without the workers, or None to go on.

        Raises:
            ConfigError: the workers do not come up.
            StorageError: the folder of the run has been away for a minute.
        """
        # A second Ctrl-C means "at once", and it could not be told to anybody.
        return self._patience.take(self._look_around, is_at_once=lambda: self._signals.count > 1)

    def _look_around(self) -> str | None:
        self._look()
        self._heed_signals()
        if (reason := self._heed_stop()) is not None:
            return reason
        self._grow()
        self._heed_the_clock()
        return None

    def _leave(self, thread: threading.Thread) -> None:
        """Has the workers end as well. The thread stays in Ray Train, where they may come up when nobody watches."""
        if thread.is_alive() and not lease_lost(self._run.folder, self._run.lease):
            with contextlib.suppress(StorageError):
                request_stop(
                    self._run.folder, StopRequest(reason="its driver has failed", status="interrupted", abort=True)
                )

    def _train(self) -> None:
        try:
            self._returned = self._train_workers(
                self._experiment,
                self._run,
                since=self._since,
                resume_options=self._resumption,
                wait_timeout_s=self._patience_s,
                verbose=self._verbose,
                spares=self._spares,
            )
        except BaseException as error:
            self._error = error

    def _look(self) -> None:
        """Shows what is new, and takes it into the record."""
        # First: it finds out whether the files are still this driver's.
        self._run.beat()
        self._unheeded += self._event_lines.read()
        while self._unheeded:
            self._heed(self._unheeded[0])
            del self._unheeded[0]
        if self._has_workers and time.time() > self._taken_away_at:
            # Ray Train ends the group at the deadline, and nobody fails who could say so.
            self._wait_for_workers()
        for record in self._metric_lines.read():
            self._display.record(record)
        self._hang_monitor.poll()

    def _heed(self, event: Event) -> None:
        """Takes an event into the record, and shows it. It comes again where the storage was away meanwhile."""
        self._hang_monitor.handle(event)
        match event["event"]:
            case "attempt_started":
                self._is_up = self._has_workers = True
                self._waits_since = self._taken_away_at = math.inf
                self._group = event["attempt"], event["world_size"]
                self._run.update(attempts=event["attempt"], workers=event["world_size"], **self._endings())
            case "training":
                self._growth.begin(self._group[1])
                self._run.update(data=event["data"])
            case "preemption_notice" if event["attempt"] == self._group[0]:
                left_s = _RAYS_DEADLINE_S if event["deadline_s"] is None else event["deadline_s"]
                self._taken_away_at = min(self._taken_away_at, event["time"] + left_s + _GRACE_S)
            case "attempt_ended":
                self._taken_away_at = math.inf
                self._growth.end()
                if event["status"] == RESIZING:
                    self._wait_for_workers()
            case "group_failed":
                self._wait_for_workers()
                self._run.update(**self._endings())
            case "checkpoint_saved":
                # What is on storage is what a run without a last word has come to.
                self._run.update(steps=event["step"], last_checkpoint=event["path"])
        self._display.event(event)

    def _wait_for_workers(self) -> None:
        self._growth.end()
        self._hang_monitor.end()
        self._has_workers, self._taken_away_at = False, math.inf
        self._start_clock()

    def _start_clock(self) -> None:
        """Begins to count how long workers are waited for. What trains in this process is there."""
        self._waits_since = math.inf if self._trains_here else time.monotonic()
        self._taken = set() if self._trains_here else placed_groups()

    def _heed_signals(self) -> None:
        """The first signal asks for a checkpoint and the end, a second Ctrl-C for the end."""
        if self._signals.count == self._signals_seen:
            return
        count = self._signals.count
        request_stop(self._run.folder, StopRequest(reason=self._signals.name, status="interrupted", abort=count > 1))
        self._signals_seen = count

    def _heed_stop(self) -> str | None:
        """Returns why to leave without the workers, which heed the same request; None to go on.

        What was asked for last counts, and what is over cannot be asked back.
        """
        stop = read_stop_request(self._run.folder)
        if stop is None:
            return None
        if stop != self._stop:
            self._stop, self._stop_since_s = stop, time.monotonic()
            if self._has_workers and not stop.abort:
                self._display.line(f"{stop.reason}: saving a checkpoint and ending; {_again(stop)} to end at once")
        if not self._has_workers:
            return f"{stop.reason} {'while there were no workers' if self._is_up else 'before training began'}"
        if stop.within_s is not None and time.monotonic() - self._stop_since_s > stop.within_s:
            request_stop(self._run.folder, replace(stop, abort=True))
            return f"{stop.reason}, without a checkpoint after {human_duration(stop.within_s)}"
        return f"{stop.reason}, at once" if stop.abort else None

    def _abandoned(self, reason: str) -> RunResult:
        assert self._stop is not None
        signal = self._signals.number if self._stop.status == "interrupted" else None
        return RunResult.recorded(self._run, status=self._stop.status, reason=reason, signal=signal)

    def _grow(self) -> None:
        """Asks the workers to save and leave if there has been room for more of them for long enough."""
        if not self._growth.is_time_to_look():
            return
        attempt, workers = self._group
        room = target_workers_now(self._experiment.scaling, workers=workers)
        if self._growth.decide(room):
            request_scale_up(self._run.folder, attempt=attempt, workers=room)
            self._display.line(f"room for {room} workers ({workers} now): saving, to go on with them")

    def _heed_the_clock(self) -> None:
        """Says what workers wait for that do not come, and does not wait for ever."""
        scaling, now_s = self._experiment.scaling, time.monotonic()
        if now_s - self._waits_since >= self._patience_s:
            raise wait_timeout_error("the workers", scaling)
        if min(now_s - self._waits_since, now_s - self._told_waiting_s) > _TELL_WAITING_EVERY_S:
            self._told_waiting_s = now_s
            if (text := describe_wait(scaling, self._taken)) not in (None, self._told_waiting):
                self._told_waiting = text
                self._display.line(str(text))
                since = time.time() - (now_s - self._waits_since)
                self._events.add("waiting_for_machines", text=text, since=round(since, 3))

    def _result(self) -> RunResult:
        if self._error is not None:
            raise training_error(self._error, self._run, self._since)
        returned = self._returned or {}
        signal = self._signals.number if returned.get("status") == "interrupted" else None
        if returned.keys() == {"status", "reason"}:  # the workers were told to stop before they began
            return RunResult.recorded(self._run, **returned, signal=signal)
        record = self._run.record
        return RunResult(
            **returned, run_dir=self._run.run_dir, attempts=record.attempts, preemptions=record.preemptions,
            failures=record.failures, signal=signal,
        )  # fmt: skip

    def _endings(self) -> dict[str, int]:
        preemptions, failures = count_endings(read_events(self._run.folder))
        return {"preemptions": preemptions, "failures": failures}


def _again(stop: StopRequest) -> str:
    return "once more" if stop.reason == "Ctrl-C" else "`headway runs stop --now`"
