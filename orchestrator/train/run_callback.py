"""The callback through which a training and the world outside of it hear of each other, over the files of the run.

It is the one place inside the loop that may talk to Ray, and it has nothing to say: metrics, checkpoints and progress
are in the run's own files, and a `ray.train.report` is a barrier of a second or more over all ranks, to be paid at
every checkpoint. It asks Ray whether machines will be taken away. Nothing here is on the path of a step.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from headway.trainer.callbacks.base import Callback
from headway.trainer.trainer import Trainer

from ..runs.ownership import lease_lost
from ..runs.requests import read_scale_up_request, read_stop_request
from ..storage.events import EventWriter
from ..storage.folder import Folder
from .preemption import PreemptionListener, PreemptionNotice, has_time_to_save
from .time_spent import time_spent


class RunCallback(Callback):
    """Writes what happens to the events of the run, and listens for a request to stop. Both on the main rank.

    All ranks listen for notices that machines will be taken away: then all save, and go on until they are.

    The process ends at once where that is asked for, and where another driver has taken the run over: two attempts must
    not train it at a time. Ray ends the other ranks then.

    Args:
        folder: of the run.
        events: where to write.
        is_main: whether this is the main rank.
        lease: of the driver that this attempt belongs to.
        noticed: whether this Ray gives notice; equal on every rank.
        attempt: which one this is, if its workers may be asked to come back as more.
        before: workers of the attempt before this one, if there were others than now.

    Attributes:
        began_at: the step from which this attempt trains, or None before it does.
        is_to_resize: whether the workers have been asked to save and leave, to come back as more.
    """

    def __init__(
        self,
        folder: Folder,
        events: EventWriter,
        *,
        is_main: bool,
        lease: str,
        noticed: bool,
        attempt: int | None = None,
        before: int | None = None,
    ) -> None:
        self.began_at: int | None = None
        self.is_to_resize = False
        self._folder, self._events, self._is_main, self._lease = folder, events, is_main, lease
        self._noticed = noticed
        self._notices: PreemptionListener | None = None
        self._attempt, self._before = attempt, before
        self._ended = threading.Event()
        self._has_told_of_setup = False

    def on_setup_start(self, trainer: Trainer[Any]) -> None:
        """Begins to listen."""
        if self._is_main:
            threading.Thread(target=self._listen, args=(trainer,), name="headway-stop", daemon=True).start()
        if self._noticed:
            self._notices = PreemptionListener(functools.partial(self._heed, trainer))

    def on_restored(self, trainer: Trainer[Any]) -> None:
        """Writes where the run goes on, and with how many workers if there were others before."""
        self._tell_size(trainer)
        self._tell("restored", step=trainer.global_step, epoch=trainer.current_epoch)

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Writes that the set-up is over."""
        self.began_at = trainer.global_step
        self._tell_size(trainer)
        self._tell(
            "training",
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            total_steps=trainer.total_steps,
            data=trainer.data_identity,
        )

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Writes, with the first record of training, how long each phase took until then."""
        if not self._has_told_of_setup and "first_update" in trainer.setup_times:
            self._has_told_of_setup = True
            seconds = {phase: round(seconds, 3) for phase, seconds in trainer.setup_times.items()}
            self._tell("set_up", step=self.began_at, seconds=seconds)

    def on_out_of_memory(self, trainer: Trainer[Any], reason: str) -> None:
        """Writes how the run goes on."""
        self._tell("out_of_memory", step=trainer.global_step, reason=reason)

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Writes the metrics."""
        self._tell("evaluated", step=trainer.global_step, metrics=dict(metrics))

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Writes where it lies, and where the time has gone until now."""
        so_far = time_spent(trainer.activity, attempt=trainer.attempt, step=trainer.global_step)
        self._tell("checkpoint_saved", step=checkpoint.step, path=str(checkpoint.path), spent=so_far)

    def on_checkpoint_failed(self, trainer: Trainer[Any], error: BaseException) -> None:
        """Writes why."""
        self._tell("checkpoint_failed", step=trainer.global_step, error=str(error))

    def on_stop_requested(self, trainer: Trainer[Any], reason: str) -> None:
        """Writes why, unless it is only to come back."""
        if not self.is_to_resize:
            self._tell("stop_requested", step=trainer.global_step, reason=reason)

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Stops listening."""
        self._ended.set()
        if self._notices is not None:
            self._notices.end()

    def _tell_size(self, trainer: Trainer[Any]) -> None:
        if self._before is not None:
            self._tell("resized", **{"from": self._before, "to": trainer.world.size, "step": trainer.global_step})
            self._before = None

    def _tell(self, kind: str, **details: Any) -> None:
        if self._is_main:
            self._events.add(kind, **details)

    def _heed(self, trainer: Trainer[Any], notice: PreemptionNotice) -> None:
        """Asks for a checkpoint, if there is the time for one. Every rank is told; one asks for all."""
        if not self._is_main:
            return
        left_s = None if notice.deadline is None else notice.deadline - time.time()
        saves = has_time_to_save(left_s, trainer.save_took_s)
        if saves:
            # First: the storage may be away, and what is told there with it.
            trainer.request_save(at_once=True)
        self._tell(
            "preemption_notice",
            attempt=trainer.attempt,
            step=trainer.global_step,
            nodes=notice.nodes,
            ranks=notice.ranks,
            deadline_s=left_s,
            saves=saves,
        )
        where = f"the machine{'s'[: len(notice.nodes) > 1]} of rank {', '.join(map(str, notice.ranks))}"
        when = "soon" if left_s is None else f"in {left_s:.0f} s" if left_s > 0 else "now"
        if saves:
            trainer.print(f"{where} will be taken away {when}: saving a checkpoint, and going on")
            return
        took_s = trainer.save_took_s
        takes = "how long a checkpoint takes is not known yet" if took_s is None else f"one takes about {took_s:.0f} s"
        trainer.print(
            f"{where} will be taken away {when}, which leaves no time for a checkpoint ({takes}): none is begun, and "
            "what comes after the last one will be trained again"
        )

    def _listen(self, trainer: Trainer[Any]) -> None:
        while not self._ended.wait(0.3 if self._folder.is_local else 3.0):
            asked = read_stop_request(self._folder)
            if (asked and asked.abort) or lease_lost(self._folder, self._lease):
                os._exit(1)
            if asked:
                trainer.request_stop(asked.reason, status=asked.status)
            elif (
                not self.is_to_resize
                and self._attempt
                and (workers := read_scale_up_request(self._folder, self._attempt))
            ):
                self.is_to_resize = True
                trainer.request_stop(f"there is room for {workers} workers", status="interrupted")
