"""Evaluation of a run's checkpoints in a worker of its own, while the others go on training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
import torch

from headway.trainer.distributed.world import World
from headway.trainer.trainer import Trainer

from ..config.experiment import Experiment
from ..config.script_settings import unpickle_with_settings
from ..storage.events import EventWriter
from .worker import Task, enter_driver_folders

_MOST_FAILURES = 3


class CheckpointEvaluator:
    """Evaluates checkpoints one at a time in a Ray actor; of those that wait only the newest, the others are skipped.

    The actor keeps models and data between checkpoints, and Ray starts it again if its machine is lost. A checkpoint
    that cannot be evaluated is reported by an event; the run does not fail. After three failures in a row no more
    checkpoints are evaluated.

    Args:
        experiment: of the run, with `scaling.evaluation_worker`.
        task: the settings of the training workers.
        training: the pickled class and config of the trainer.
        events: receives the metrics.
    """

    def __init__(self, experiment: Experiment, task: Task, training: bytes, events: EventWriter) -> None:
        resources = dict(experiment.scaling.evaluation_worker or {})
        self._options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "max_restarts": -1,
        }
        self._arguments = task, training, max(1, int(self._options["num_cpus"]))
        self._events = events
        self._actor: Any = None
        # What the actor does: with the step and path of a checkpoint, unless it prepares itself.
        self._running: tuple[Any, int | None, str] | None = None
        self._waiting: tuple[int, str] | None = None
        self._skipped: int | None = None
        self._num_failures = 0

    @property
    def is_prepared(self) -> bool:
        """Whether the actor has started and evaluates checkpoints."""
        return self._actor is not None and (self._running is None or self._running[1] is not None)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being evaluated, or waits for it."""
        return self._waiting is not None or (self._running is not None and self._running[1] is not None)

    def start(self) -> None:
        """Start the actor, unless it has been started."""
        if self._actor is None:
            self._actor = ray.remote(_Worker).options(**self._options).remote(*self._arguments)
            self._running = self._actor.prepare.remote(), None, ""

    def add(self, step: int, path: str) -> None:
        """Evaluate this checkpoint next; it takes the place of one that waits."""
        if self._num_failures < _MOST_FAILURES and step != self._skipped:
            self._waiting = step, path
            self._begin()

    def skip(self, step: int) -> None:
        """Do not evaluate checkpoints of this step, because the training workers have evaluated it."""
        self._skipped = step
        if self._waiting is not None and self._waiting[0] == step:
            self._waiting = None

    def poll(self) -> None:
        """Write the metrics of a checkpoint whose evaluation has ended as an event, and begin the next one.

        Raises:
            StorageError: the event could not be written; the next call does so.
        """
        if self._running is None:
            return
        reference, step, path = self._running
        if not ray.wait([reference], timeout=0)[0]:
            return
        try:
            metrics = ray.get(reference)
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            what = f"{type(cause).__name__}: {cause}".split("\n")[0]
            self._events.add("evaluation_failed", step=step, checkpoint=path, error=what)
            self._num_failures += 1
            if step is not None and isinstance(error, ray.exceptions.RayActorError) and self._waiting is None:
                self._waiting = step, path
        else:
            if step is not None:
                self._events.add("evaluated", step=step, checkpoint=path, metrics=metrics)
            self._num_failures = 0
        self._running = None
        if self._num_failures < _MOST_FAILURES:
            self._begin()
        else:
            self._waiting = None

    def close(self) -> None:
        """End the actor, and an evaluation in progress."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = self._running = self._waiting = None

    def _begin(self) -> None:
        if self._actor is not None and self._running is None and self._waiting is not None:
            (step, path), self._waiting = self._waiting, None
            self._running = self._actor.evaluate.remote(path), step, path


class _Worker:
    """The actor: a trainer of its own, in one process."""

    def __init__(self, task: Task, training: bytes, threads: int) -> None:
        enter_driver_folders(task.current_dir, task.imports)
        torch.set_num_threads(threads)
        self._training = training
        self._trainer: Trainer[Any] | None = None

    def prepare(self) -> None:
        """Build the models and open the data."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        trainer_class, config = unpickle_with_settings(self._training)
        # A roll-back needs a folder of checkpoints, which belongs to the training workers.
        trainer = trainer_class(replace(config, loss_spike=None), world=World.single(device))
        trainer.setup()
        self._trainer = trainer

    def evaluate(self, path: str) -> dict[str, float]:
        """Return the metrics of a checkpoint."""
        if self._trainer is None:
            self.prepare()
        assert self._trainer is not None
        return self._trainer.evaluate(checkpoint=path)
