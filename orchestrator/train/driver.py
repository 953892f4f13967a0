"""The driver of one start of a run: Ray Train runs in a thread; the main thread polls files, signals and timeouts."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from headway.trainer.callbacks.base import Callback
from headway.trainer.metrics.units import human_duration

from ..cluster.connect import describe_wait, placed_groups, target_workers_now, wait_timeout_error
from ..config.experiment import Experiment
from ..display.console import RunConsole
from ..errors import StorageError
from ..runs.ownership import lease_lost
from ..runs.requests import StopRequest, read_stop_request, request_scale_up, request_stop
from ..runs.result import RunResult
from ..runs.resume import ResumeOptions
from ..runs.run import Run
from ..storage.events import Event, EventWriter, JsonlTail, read_events
from ..storage.folder import StorageOutage, retry_storage
from ..watchdog.driver import HangMonitor
from ..watchdog.mailbox import DriverMailbox
from .elastic import RESIZING, ScaleUpPolicy
from .evaluation_worker import CheckpointEvaluator
from .preemption import count_endings
from .signals import StopSignals
from .worker_group import make_task, pickle_trainer, run_worker_group, training_error

_REPORT_WAIT_EVERY_S = 5.0
# Thirty years; Ray Train needs a finite number.
_FOREVER_S = 1e9
# Ray Train's deadline for a preempted machine without one, and the time it takes to poll and to end a group.
_DEFAULT_DEADLINE_S = 120.0
_GRACE_S = 10.0
_EVALUATION_WORKER_WAIT_S = 60.0


class RunDriver:
    """Drives one start of a run to its end.

    Args:
        experiment: what to train.
        run: the run, owned by this process.
        signals: SIGINT and SIGTERM of this process.
        display: shows the run.
        resume_options: what to resume from.
        verbose: show Ray's output.
        spares: keep idle worker processes for restarts.
        began: when this start began, in seconds since 1970; by default now.
        train: runs the workers to their end and returns the fields of rank 0's `FitResult`; another function than
            `run_worker_group` trains in this process.
        callbacks: further callbacks of the trainer, on all ranks.
        enforce_wait: raise if workers do not start within `scaling.wait`; False if the caller enforces it.
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
        callbacks: Sequence[Callback] = (),
        enforce_wait: bool = True,
    ) -> None:
        self._train_workers, self._callbacks = train, callbacks
        self._wait_timeout_s = experiment.scaling.wait_timeout_s if enforce_wait else _FOREVER_S
        self._experiment, self._run, self._signals, self._display = experiment, run, signals, display
        self._resume_options, self._verbose, self._spares = resume_options, verbose, spares
        self._began = time.time() if began is None else began
        self._returned: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._is_up = False

        self._trains_in_process = self._has_workers = train is not run_worker_group
        self._signals_seen = 0
        self._stop: StopRequest | None = None
        self._stop_since_s = 0.0
        self._events = EventWriter(run.folder, "driver", start=run.lease)
        self._scale_up = ScaleUpPolicy(experiment.scaling)
        # Attempt and workers of the running group.
        self._group = (0, 0)
        self._reported_wait_s = time.monotonic()
        self._start_clock()
        self._reported_wait: str | None = None
        self._preempted_at = math.inf
        self._outage = StorageOutage()
        self._unhandled: list[Event] = []
        # All workers of a run on a local disk are on this machine, where files cost less than another process.
        uses_mailbox = not self._trains_in_process and not run.folder.is_disk
        self._mailbox = DriverMailbox() if uses_mailbox else None
        self._hang_monitor = HangMonitor(experiment, run.folder, self._events, mailbox=self._mailbox)
        self._evaluator: CheckpointEvaluator | None = None
        if experiment.scaling.evaluation_worker is not None:
            task = make_task(experiment, run, resume_options=resume_options, verbose=verbose)
            self._evaluator = CheckpointEvaluator(experiment, task, pickle_trainer(experiment), self._events)
        self._event_lines = JsonlTail(run.folder, "events", from_now=True)
        self._metric_lines = JsonlTail(run.folder, "metrics", from_now=True)

    def run(self) -> RunResult:
        """Train until the run ends, is stopped or fails.

        Raises:
            ConfigError: the workers do not start in time.
            RunConflictError: another driver has taken over the run.
            StorageError: the storage has been unavailable for a minute.
            HeadwayError: as `fit` raises it for a failure of the workers.
        """
        self._events.add(
            "driver_started", pid=os.getpid(), workers=self._experiment.scaling.workers, since=round(self._began, 3),
            **self._resume_options.explicit,
        )  # fmt: skip
        thread = threading.Thread(target=self._train, name="headway-ray-train", daemon=True)
        self._signals.raises = False
        thread.start()
        # Training in this process needs the CPU, so poll less often.
        pause_s = (0.5 if self._has_workers else 0.1) if self._run.folder.is_local else 2.0
        try:
            while thread.is_alive():
                thread.join(pause_s)
                if (reason := self._poll()) is not None:
                    return self._left_early(reason)
            retry_storage(self._poll_files)
            self._finish_evaluations()
        except Exception:
            self._abort_workers(thread)
            raise
        finally:
            if self._evaluator is not None:
                self._evaluator.close()
            if self._mailbox is not None:
                self._mailbox.close()
            self._display.close()
        return self._result()

    def _poll(self) -> str | None:
        """Poll everything once; returns the reason to leave without waiting for the workers, or None.

        Raises:
            ConfigError: the workers do not start in time.
            StorageError: the run's folder has been unavailable for a minute.
        """
        # A second Ctrl-C ends the run immediately, but cannot reach the workers without the storage.
        return self._outage.tolerate(self._poll_all, fail_now=lambda: self._signals.count > 1)

    def _poll_all(self) -> str | None:
        self._poll_files()
        self._handle_signals()
        if (reason := self._handle_stop()) is not None:
            return reason
        self._maybe_scale_up()
        self._check_wait()
        if self._evaluator is not None:
            self._evaluator.poll()
        return None

    def _finish_evaluations(self) -> None:
        """Wait for the evaluation of the last checkpoints after training has completed, or until a stop request."""
        if self._evaluator is None or (self._returned or {}).get("status") != "completed":
            return
        until_s = time.monotonic() + _EVALUATION_WORKER_WAIT_S
        while self._evaluator.is_busy and not self._signals.count and read_stop_request(self._run.folder) is None:
            self._display.starting("evaluating the last checkpoints")
            if not self._evaluator.is_prepared and time.monotonic() > until_s:
                self._display.line("the evaluation worker has not started: no more checkpoints are evaluated", "yellow")
                return
            time.sleep(0.1)
            retry_storage(self._evaluator.poll)
            retry_storage(self._poll_files)

    def _abort_workers(self, thread: threading.Thread) -> None:
        """Make the workers exit, because the thread stays in Ray Train, where they could still start."""
        if thread.is_alive() and not lease_lost(self._run.folder, self._run.lease):
            with contextlib.suppress(StorageError):
                self._request_stop(StopRequest(reason="its driver has failed", status="interrupted", abort=True))

    def _train(self) -> None:
        try:
            self._returned = self._train_workers(
                self._experiment,
                self._run,
                resume_options=self._resume_options,
                wait_timeout_s=self._wait_timeout_s,
                verbose=self._verbose,
                spares=self._spares,
                mailbox=None if self._mailbox is None else self._mailbox.actor,
                callbacks=self._callbacks,
            )
        except BaseException as error:
            self._error = error

    def _poll_files(self) -> None:
        """Handle new events, show new metrics, and poll for hangs."""
        # First, because it checks that this driver still owns the run.
        self._run.beat()
        self._unhandled += self._event_lines.read()
        while self._unhandled:
            self._handle(self._unhandled[0])
            del self._unhandled[0]
        if self._has_workers and time.monotonic() > self._preempted_at:
            # Ray Train ends the group at the deadline without an event.
            self._wait_for_workers()
        for record in self._metric_lines.read():
            self._display.record(record)
        self._hang_monitor.poll()

    def _handle(self, event: Event) -> None:
        """Record and show an event. Repeated if the storage fails meanwhile."""
        self._hang_monitor.handle(event)
        match event["event"]:
            case "attempt_started":
                self._is_up = self._has_workers = True
                self._waits_since = self._preempted_at = math.inf
                self._group = event["attempt"], event["world_size"]
                self._run.update(attempts=event["attempt"], workers=event["world_size"], **self._endings())
            case "training":
                self._scale_up.begin(self._group[1])
                self._run.update(data=event["data"])
                if self._evaluator is not None:
                    # Not before the training workers have their resources.
                    self._evaluator.start()
            case "preemption_notice" if event["attempt"] == self._group[0]:
                left_s = _DEFAULT_DEADLINE_S if event["deadline_s"] is None else event["deadline_s"]
                self._preempted_at = min(self._preempted_at, time.monotonic() + left_s + _GRACE_S)
            case "attempt_ended":
                self._preempted_at = math.inf
                self._scale_up.end()
                if event["status"] == RESIZING:
                    self._wait_for_workers()
            case "group_failed":
                self._wait_for_workers()
                self._run.update(**self._endings())
            case "checkpoint_saved":
                # The record stays true if this driver dies.
                self._run.update(steps=event["step"], last_checkpoint=event["path"])
                if self._evaluator is not None:
                    self._evaluator.add(event["step"], event["path"])
            case "evaluated" if self._evaluator is not None and "checkpoint" not in event:
                self._evaluator.skip(event["step"])
        self._display.event(event)

    def _wait_for_workers(self) -> None:
        self._scale_up.end()
        self._hang_monitor.end()
        self._has_workers, self._preempted_at = False, math.inf
        self._start_clock()

    def _start_clock(self) -> None:
        """Start measuring how long to wait for workers; not if training runs in this process."""
        self._waits_since = math.inf if self._trains_in_process else time.monotonic()
        self._taken = set() if self._trains_in_process else placed_groups()

    def _handle_signals(self) -> None:
        """Turn the first signal into a request to stop with a checkpoint, a second Ctrl-C into one without."""
        if self._signals.count == self._signals_seen:
            return
        count = self._signals.count
        self._request_stop(StopRequest(reason=self._signals.name, status="interrupted", abort=count > 1))
        self._signals_seen = count

    def _request_stop(self, stop: StopRequest) -> None:
        """Request a stop from the workers, through the mailbox even if the storage is unavailable."""
        self._publish(stop=asdict(stop))
        request_stop(self._run.folder, stop)

    def _publish(self, **requests: Any) -> None:
        if self._mailbox is not None:
            self._mailbox.publish(**requests)

    def _handle_stop(self) -> str | None:
        """Return the reason to leave without waiting for the workers, which read the same request; None to stay.

        The last request counts.
        """
        stop = read_stop_request(self._run.folder)
        if stop is None:
            return None
        if stop != self._stop:
            self._stop, self._stop_since_s = stop, time.monotonic()
            # It may come from another process.
            self._publish(stop=asdict(stop))
            if self._has_workers and not stop.abort:
                self._display.line(
                    f"{stop.reason}: saving a checkpoint and ending; {_abort_hint(stop)} to end immediately"
                )
        if not self._has_workers:
            return f"{stop.reason} {'while there were no workers' if self._is_up else 'before training began'}"
        if stop.within_s is not None and time.monotonic() - self._stop_since_s > stop.within_s:
            self._request_stop(replace(stop, abort=True))
            return f"{stop.reason}, without a checkpoint after {human_duration(stop.within_s)}"
        return f"{stop.reason}, immediately" if stop.abort else None

    def _left_early(self, reason: str) -> RunResult:
        assert self._stop is not None
        signal = self._signals.number if self._stop.status == "interrupted" else None
        return RunResult.recorded(self._run, status=self._stop.status, reason=reason, signal=signal)

    def _maybe_scale_up(self) -> None:
        """Ask the workers to save and exit if more have fit for long enough."""
        if not self._scale_up.is_due():
            return
        attempt, workers = self._group
        target = target_workers_now(self._experiment.scaling, workers=workers)
        if self._scale_up.decide(target):
            self._publish(scale_up={"attempt": attempt, "workers": target})
            request_scale_up(self._run.folder, attempt=attempt, workers=target)
            self._display.line(f"scaling up from {workers} to {target} workers: saving a checkpoint first")

    def _check_wait(self) -> None:
        """Report what the workers wait for, and raise when the wait times out."""
        scaling, now_s = self._experiment.scaling, time.monotonic()
        if now_s - self._waits_since >= self._wait_timeout_s:
            raise wait_timeout_error("the workers", scaling, are_placed=bool(placed_groups() - self._taken))
        if min(now_s - self._waits_since, now_s - self._reported_wait_s) > _REPORT_WAIT_EVERY_S:
            self._reported_wait_s = now_s
            if (text := describe_wait(scaling, self._taken)) not in (None, self._reported_wait):
                self._reported_wait = text
                self._display.line(str(text))
                since = time.time() - (now_s - self._waits_since)
                self._events.add("waiting_for_machines", text=text, since=round(since, 3))

    def _result(self) -> RunResult:
        if self._error is not None:
            raise training_error(self._error, self._run)
        returned = self._returned or {}
        signal = self._signals.number if returned.get("status") == "interrupted" else None
        return RunResult.returned(self._run, returned, signal=signal)

    def _endings(self) -> dict[str, int]:
        preemptions, failures = count_endings(read_events(self._run.folder))
        return {"preemptions": preemptions, "failures": failures}


def _abort_hint(stop: StopRequest) -> str:
    return "once more" if stop.reason == "Ctrl-C" else "`headway runs stop --now`"
