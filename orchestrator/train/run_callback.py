"""The callback that connects the trainer with the driver: writes events to the run's files, polls for requests.

Metrics, checkpoints and progress are in the run's own files. Ray Train gives preemption notices; in a user's own
`TorchTrainer` it also receives evaluations and checkpoints, in a thread. Nothing here is on the path of a step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray.train

from headway.trainer.callbacks.base import Callback
from headway.trainer.checkpoints.scan import scan
from headway.trainer.checkpoints.storage import open_storage
from headway.trainer.errors import ConfigError
from headway.trainer.trainer import Trainer

from ..runs.metric_history import metrics_at
from ..runs.ownership import lease_lost
from ..runs.pointer import Pointer
from ..runs.requests import StopRequest, read_scale_up_request, read_stop_request
from ..storage.events import EventWriter, read_events
from ..storage.folder import Folder, retry_storage
from .preemption import PreemptionNotice, has_time_to_save
from .ray_train_thread import RayTrainThread, last_pointer
from .time_spent import time_spent


class RunCallback(Callback):
    """Writes the events of the run and polls for requests to stop or to scale up, on the main rank.

    All ranks poll for preemption notices; on one, all save and continue until their machine is taken.

    The process exits immediately if a stop without a checkpoint is requested, or if another driver has taken over the
    run, because two attempts must not train it at the same time. Ray then ends the other ranks.

    Args:
        folder: the run's folder.
        events: receives the events.
        is_main: whether this is the main rank.
        lease: lease of the driver that started this attempt.
        polls_preemption: whether this Ray gives preemption notices; must be equal on every rank.
        reports: whether to report evaluations and checkpoints to Ray Train; must be equal on every rank.
        scalable_attempt: number of this attempt if it may be asked to scale up, else None.
        previous_workers: workers of the previous attempt, if their number differs.
        requests: returns the driver's requests that came through the mailbox, by kind.

    Attributes:
        began_at: the step from which this attempt trains; None before training begins.
        is_to_resize: whether the workers were asked to save and exit to restart with more.
    """

    def __init__(
        self,
        folder: Folder,
        events: EventWriter,
        *,
        is_main: bool,
        lease: str,
        polls_preemption: bool,
        reports: bool = False,
        scalable_attempt: int | None = None,
        previous_workers: int | None = None,
        requests: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.began_at: int | None = None
        self.is_to_resize = False
        self._folder, self._events, self._is_main, self._lease = folder, events, is_main, lease
        self._polls_preemption, self._reports = polls_preemption, reports
        self._ray_train: RayTrainThread | None = None
        # The last value of each metric, now and when the last checkpoint was captured.
        self._metrics: dict[str, float] = {}
        self._captured_metrics: dict[str, float] = {}
        self._scalable_attempt, self._previous_workers = scalable_attempt, previous_workers
        self._requests = requests
        self._ended = threading.Event()
        self._has_emitted_setup = False

    def on_setup_start(self, trainer: Trainer[Any]) -> None:
        """Start the polling threads."""
        if self._is_main:
            threading.Thread(target=self._poll_requests, args=(trainer,), name="headway-stop", daemon=True).start()
        if self._polls_preemption or self._reports:
            on_notice = functools.partial(self._handle_notice, trainer) if self._polls_preemption else None
            self._ray_train = RayTrainThread(is_main=self._is_main, on_notice=on_notice, reports=self._reports)

    def on_restored(self, trainer: Trainer[Any]) -> None:
        """Write the step from which the run resumes, and a change in the number of workers; report what was missed."""
        self._emit_size(trainer)
        self._emit("restored", step=trainer.global_step, epoch=trainer.current_epoch)
        # Not after a rollback to before a loss spike.
        if self._reports and self.began_at is None:
            self._report_restored(trainer)

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Write that training starts."""
        self.began_at = trainer.global_step
        self._emit_size(trainer)
        self._emit(
            "training",
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            total_steps=trainer.total_steps,
            data=trainer.data_identity,
        )

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Write the durations of the setup phases, with the first record of training."""
        self._metrics.update(metrics)
        if not self._has_emitted_setup and "first_update" in trainer.setup_times:
            self._has_emitted_setup = True
            seconds = {phase: round(seconds, 3) for phase, seconds in trainer.setup_times.items()}
            self._emit("set_up", step=self.began_at, seconds=seconds)

    def on_out_of_memory(self, trainer: Trainer[Any], reason: str) -> None:
        """Write how the run recovers."""
        self._emit("out_of_memory", step=trainer.global_step, reason=reason)

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Write the metrics, and report them."""
        # The loop increases its counter after the callbacks.
        evaluations = trainer.progress.evaluations + 1
        self._emit("evaluated", step=trainer.global_step, metrics=dict(metrics), evaluations=evaluations)
        self._metrics.update(metrics)
        self._report(trainer.global_step, self._metrics)

    def on_checkpoint_start(self, trainer: Trainer[Any]) -> None:
        """Keep the metrics of this update, because the checkpoint may be complete only after later ones."""
        self._captured_metrics = dict(self._metrics)

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Write its path and the time spent so far, and report it."""
        so_far = time_spent(trainer.activity, attempt=trainer.attempt, step=trainer.global_step)
        self._emit("checkpoint_saved", step=checkpoint.step, path=str(checkpoint.path), spent=so_far)
        self._report(
            checkpoint.step,
            self._captured_metrics,
            Pointer(run_dir=self._folder.place, checkpoint=str(checkpoint.path)),
        )

    def on_checkpoint_failed(self, trainer: Trainer[Any], error: BaseException) -> None:
        """Write the error."""
        self._emit("checkpoint_failed", step=trainer.global_step, error=str(error))

    def on_stop_requested(self, trainer: Trainer[Any], reason: str) -> None:
        """Write the reason, unless the run only restarts with more workers."""
        if not self.is_to_resize:
            self._emit("stop_requested", step=trainer.global_step, reason=reason)

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Stop polling. Without an error, wait until Ray Train has all reports."""
        self._ended.set()
        if self._ray_train is not None:
            self._ray_train.end(wait=error is None)

    def _report(self, step: int, metrics: Mapping[str, float], pointer: Pointer | None = None) -> None:
        if self._reports and self._ray_train is not None:
            self._ray_train.report({**metrics, "step": step}, pointer)

    def _report_restored(self, trainer: Trainer[Any]) -> None:
        """Report the checkpoints that Ray Train does not have: a worker may have died before it reported them."""
        self._metrics = dict(trainer.history.latest)
        step = trainer.global_step
        missed = retry_storage(lambda: self._missed(step)) if self._is_main else None
        # Every rank must report equally often.
        for at, metrics, pointer in trainer.world.broadcast(missed) or []:
            self._report(at, metrics if at < step else self._metrics, pointer)

    def _missed(self, step: int) -> list[tuple[int, dict[str, float], Pointer]]:
        """Return step, metrics and pointer of each checkpoint, up to a restored step, that Ray Train does not have."""
        found = [each.checkpoint for each in scan(open_storage(self._folder.path("checkpoints")))]
        steps = {each.path: each.step for each in found if each is not None}
        restored = next((path for path, at in reversed(steps.items()) if at == step), None)
        last: Pointer | None = None
        with contextlib.suppress(ConfigError):
            last = last_pointer(ray.train)
        if last is not None and last.run_dir != self._folder.place:
            last = None
        if restored is None or (last is not None and last.checkpoint == restored):
            # It is of another run, or was reported.
            return []
        paths = [path for path in self._saved_since(last) if steps.get(path, step) < step] + [restored]
        metrics = metrics_at(self._folder, [steps[path] for path in paths])
        return [
            (steps[path], metrics[steps[path]], Pointer(run_dir=self._folder.place, checkpoint=path)) for path in paths
        ]

    def _saved_since(self, last: Pointer | None) -> list[str]:
        """Return the checkpoints saved after the last one that Ray Train has; without one, all of this TorchTrainer."""
        saved: list[str] = []
        call = None
        for event in read_events(self._folder):
            if event["event"] == "driver_started" and event.get("call") != call:
                call = event.get("call")
                saved = saved if last is not None else []
            elif event["event"] == "checkpoint_saved":
                saved.append(event["path"])
        if last is not None and last.checkpoint in saved:
            saved = saved[len(saved) - saved[::-1].index(last.checkpoint) :]
        return list(dict.fromkeys(saved))

    def _emit_size(self, trainer: Trainer[Any]) -> None:
        if (before := self._previous_workers) is not None:
            self._emit("resized", **{"from": before, "to": trainer.world.size, "step": trainer.global_step})
            self._previous_workers = None

    def _emit(self, kind: str, **details: Any) -> None:
        if self._is_main:
            self._events.add(kind, **details)

    def _handle_notice(self, trainer: Trainer[Any], notice: PreemptionNotice) -> None:
        """Request a checkpoint if there is time for one. Every rank gets the notice; the main rank acts for all."""
        if not self._is_main:
            return
        left_s = None if notice.deadline is None else notice.deadline - time.time()
        saves = has_time_to_save(left_s, trainer.save_took_s)
        if saves:
            # Before the event, which may fail with the storage.
            trainer.request_save(at_once=True)
        self._emit(
            "preemption_notice",
            attempt=trainer.attempt,
            step=trainer.global_step,
            nodes=notice.nodes,
            ranks=notice.ranks,
            deadline_s=left_s,
            saves=saves,
        )
        where = f"rank{'s'[: len(notice.ranks) > 1]} {', '.join(map(str, notice.ranks))}"
        when = "soon" if left_s is None else f"in {left_s:.0f} s" if left_s > 0 else "now"
        if saves:
            trainer.print(f"{where} will be preempted {when}: saving a checkpoint and continuing until then")
            return
        took_s = trainer.save_took_s
        takes = "its duration is not known yet" if took_s is None else f"one takes about {took_s:.0f} s"
        trainer.print(
            f"{where} will be preempted {when}, which leaves no time for a checkpoint ({takes}): none is started, and "
            "updates since the last one will be repeated"
        )

    def _poll_requests(self, trainer: Trainer[Any]) -> None:
        every_s, looked_s = 0.3 if self._folder.is_local else 3.0, time.monotonic()
        while not self._ended.wait(0.3):
            # The files are the record; the mailbox brings their content sooner.
            sent = self._requests()
            stop = StopRequest(**sent["stop"]) if "stop" in sent else None
            if time.monotonic() - looked_s >= 0.9 * every_s:
                looked_s = time.monotonic()
                stop = read_stop_request(self._folder) or stop
                if lease_lost(self._folder, self._lease):
                    os._exit(1)
            if stop and stop.abort:
                os._exit(1)
            if stop:
                trainer.request_stop(stop.reason, status=stop.status)
            elif not self.is_to_resize and (workers := self._workers_to_scale_to(sent)):
                self.is_to_resize = True
                trainer.request_stop(f"scaling up to {workers} workers", status="interrupted")

    def _workers_to_scale_to(self, sent: Mapping[str, Any]) -> int:
        if self._scalable_attempt is None:
            return 0
        if (request := sent.get("scale_up")) and request["attempt"] == self._scalable_attempt:
            return int(request["workers"])
        return read_scale_up_request(self._folder, self._scalable_attempt)
