"""The context that all parts of a run share: config, ranks, models, counters and callbacks. `Engine` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..callbacks.base import CallbackList
from ..config import TrainerConfig
from ..distributed.context_parallel import divided_sequences
from ..distributed.mesh import Mesh
from ..distributed.world import World
from ..metrics.history import History
from ..step.lr_stepping import LrStepping
from .progress import Progress
from .steps import Steps
from .timing import Activity, SetupTimes


@dataclass(slots=True)
class Mode:
    """Whether the models are in training or being evaluated.

    Attributes:
        training: whether they are in training.
        before: during an evaluation, whether each module was in training mode before it; else empty.
    """

    training: bool = True
    before: Mapping[nn.Module, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Shared state of a run. The fields are constant; the objects in them change as the run proceeds.

    Attributes:
        name: class name of the trainer, for messages.
        config: how to train.
        world: the ranks.
        mesh: their arrangement.
        run_dir: path or URI of the run's directory; None if nothing is written.
        attempt: number of this attempt at the run, from 1.
        print: prints once, from the main rank.
        callbacks: bound to the trainer or session.
        progress: counters.
        history: means over whole epochs, and the latest metrics.
        activity: this rank's current phase; other threads read it.
        setup_times: seconds of each phase before the first update.
        mode: training or evaluating.
        models, optimizers: by the names of the attributes that hold them; filled during setup.
        models_without_weights: the models that were made on the meta device, for `init_weights`.
        lost_values: the tensors of these to which `reset_parameters` would give other values than the user's code, by
            name, and the place of that code.
        versions_after_reset: of the tensors, when the default `init_weights` has called `reset_parameters`.
        lr_stepping: the schedulers by name, and when they step.
    """

    name: str
    config: TrainerConfig
    world: World
    mesh: Mesh
    run_dir: str | None
    attempt: int
    print: Callable[[str], None]
    callbacks: CallbackList
    progress: Progress
    history: History
    activity: Activity
    setup_times: SetupTimes
    mode: Mode = field(default_factory=Mode)
    models: dict[str, nn.Module] = field(default_factory=dict)
    models_without_weights: dict[str, nn.Module] = field(default_factory=dict)
    lost_values: dict[str, str] = field(default_factory=dict)
    versions_after_reset: dict[str, int | None] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    lr_stepping: LrStepping = field(default_factory=LrStepping)

    def divided_sequences(self, steps: Steps, batch: Any) -> AbstractContextManager[None]:
        """Return a context in which this rank has its part of a batch's sequences, if `parallel.cp` divides them."""
        mesh = self.mesh.sequence_mesh
        return nullcontext() if mesh is None else divided_sequences(mesh, steps.context_parallel_buffers(batch))

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device
