"""The Session: a training run with a `for` loop of your own. `Trainer.fit` is built on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from .active_run import ActiveRun
from .callbacks.base import Callback, PlainFunction
from .callbacks.progress_bar import ProgressBar
from .checkpoints.store import Checkpoint
from .config import TrainerConfig
from .data.protocols import GlobalBatch
from .distributed.context_parallel import Divided
from .distributed.tensor_parallel import Plan
from .distributed.world import World
from .errors import ConfigError, StepError
from .loop.engine import Engine
from .loop.run_state import COMPONENTS
from .loop.steps import LossWeight
from .result import FitResult, Status
from .step.lr_stepping import Interval
from .step.precision import LossScaler, ScalesLoss
from .trackers.base import Tracker

T = TypeVar("T")
Models = nn.Module | Mapping[str, nn.Module]


class Session(ActiveRun):
    """A training run with a loop of your own, and the same guarantees as `Trainer`.

    Use it as a context manager: entering sets everything up, leaving evaluates and saves the last state. It is the same
    in one process, under `torchrun` and in a Ray Train worker. `restore` resumes a run, however it ended.

        with Session(config, model=GPT(), optimizer=make_optimizer, data=loader, run_dir="runs/mine") as run:
            run.restore()
            for batch in run:
                for micro_batch in run.accumulate(batch):
                    run.backward(loss_of(run.model, micro_batch))
                run.step()
        print(run.result)

    `for batch in run` yields global batches from the current position, epoch by epoch, until a limit of the config or a
    stop request; each rank gets its part. `step` checks on all ranks that the gradient is finite, clips it, steps the
    optimizers and schedulers, updates the counters, and then logs, evaluates or stops if due. A checkpoint that is due
    is saved, in the background, when the loop asks for the next batch: it includes what the loop has done after `step`.

    Args:
        config: how to train. `halve_on_out_of_memory` and `non_finite="retry"` are errors: they repeat a step, which
            only a `Trainer` can.
        model: a module, several by name, or a function that returns these. A function is called with the same seed on
            every rank. The main rank's weights are used.
        optimizer: a function from the model (or, with several, the dict of models) to an optimizer, an (optimizer,
            scheduler) pair, or a dict of both by name. It is called with your module after sharding, when `total_steps`
            is known.
        data: the training data: a DataLoader, a Headway stream, any iterable of batches, or a function that returns
            one.
        validation: the validation data, or several sets by name.
        validation_step: a function `(run, batch)` that returns the loss of a validation batch or a dict of numbers.
        loss_weight: a function from a micro-batch to the weight of its mean loss, such as the number of tokens with a
            label; by default the number of samples.
        num_tokens: a function from a micro-batch to its number of tokens, for the throughput and `max_tokens`.
        metrics: evaluation metrics that are not means, as for `Trainer.configure_metrics`.
        loss_scaler: for `precision="fp16"`, as for `Trainer.configure_loss_scaler`.
        tensor_parallel_plan: as `Trainer.configure_tensor_parallel` returns it.
        context_parallel_buffers: a function from a micro-batch, as for `Trainer`.
        scheduler_interval, scheduler_monitor: as the attributes of `Trainer`.
        run_dir, callbacks, trackers, world, attempt, printer, show_progress: as for `Trainer`. Hooks get the session in
            place of the trainer.

    Attributes:
        result: how the run ended; set when the block has been left.

    Raises:
        ConfigError: an argument is missing, or not supported in a loop of your own.

    Example:
        >>> loader = DataLoader(torch.rand(64, 1), batch_size=8)
        >>> config = TrainerConfig(max_epochs=2)
        >>> make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Session(config, model=nn.Linear(1, 1), optimizer=make, data=loader) as run:
        ...     for batch in run:
        ...         for x in run.accumulate(batch):
        ...             run.backward((run.model(x) - 2 * x).square().mean())
        ...         metrics = run.step()
        >>> run.result.steps
        16
    """

    result: FitResult
    _is_session = True

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: Models | Callable[[], Models],
        optimizer: Callable[[Any], Any],
        data: Any,
        validation: Any = None,
        validation_step: Callable[[Session, Any], Any] | None = None,
        loss_weight: Callable[[Any], LossWeight] | None = None,
        num_tokens: Callable[[Any], int | torch.Tensor] | None = None,
        metrics: Mapping[str, Any] | None = None,
        loss_scaler: ScalesLoss | None = None,
        tensor_parallel_plan: Plan | None = None,
        context_parallel_buffers: Callable[[Any], Divided] | None = None,
        scheduler_interval: Interval | Mapping[str, Interval] = "step",
        scheduler_monitor: str | Mapping[str, str] = "validation/loss",
        run_dir: str | Path | None = None,
        callbacks: Sequence[Callback | PlainFunction] = (),
        trackers: Sequence[Tracker] | None = None,
        world: World | None = None,
        attempt: int = 1,
        printer: Callable[[str], None] | None = None,
        show_progress: bool | None = None,
    ) -> None:
        if not isinstance(config, TrainerConfig):
            raise ConfigError(f"config must be a TrainerConfig (or a subclass), got {config!r:.80}")
        made_by = getattr(optimizer, "func", optimizer)
        if isinstance(made_by, Optimizer) or (isinstance(made_by, type) and issubclass(made_by, Optimizer)):
            name = getattr(made_by, "__name__", type(made_by).__name__)
            raise ConfigError(
                f"optimizer must be a function from the model to an optimizer, got {name}: it is called after "
                f"sharding, so pass optimizer=lambda model: {name}(model.parameters(), ...)"
            )
        if validation is not None and validation_step is None:
            raise ConfigError("validation data needs validation_step, a function (run, batch) that returns the loss")
        if config.halve_on_out_of_memory or config.non_finite == "retry":
            field = "halve_on_out_of_memory=True" if config.halve_on_out_of_memory else 'non_finite="retry"'
            raise ConfigError(
                f"{field} repeats a step, and a Session cannot repeat your loop: leave it out, or use a Trainer"
            )
        if config.max_skipped_losses:
            raise ConfigError("max_skipped_losses is for training_step: a loop of your own may leave out a batch")
        program = _Functions(
            self, model, optimizer, (data, validation), validation_step, loss_weight, num_tokens, metrics or {}
        )
        program.loss_scaler = loss_scaler
        program.tensor_parallel_plan = tensor_parallel_plan or {}
        program.divided = context_parallel_buffers
        program.scheduler_interval, program.scheduler_monitor = scheduler_interval, scheduler_monitor
        self.config = config
        self._program = program
        self._use(
            Engine(
                program,
                config,
                owner=self,
                run_dir=str(run_dir) if run_dir is not None else None,
                callbacks=callbacks,
                trackers=trackers,
                world=world,
                attempt=attempt,
                printer=printer,
                progress_bar=ProgressBar() if show_progress or (printer is None and show_progress is None) else None,
            )
        )

    @classmethod
    def of_engine(cls, engine: Engine) -> Session:
        """Return a session over the engine of a `Trainer`."""
        session = cls.__new__(cls)
        session._use(engine)
        return session

    def _use(self, engine: Engine) -> None:
        self._engine = engine
        self._has_started = self._has_finished = False

    @property
    def model(self) -> nn.Module:
        """The model, wrapped and sharded: call it for a forward pass.

        Raises:
            ConfigError: there is none yet, or there are several; use `models`.
        """
        return _only(self._engine.models, "model")

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, for example to set its learning rate; `step` steps it.

        Raises:
            ConfigError: there is none yet, or there are several; use `optimizers`.
        """
        return _only(self._engine.optimizers, "optimizer")

    def __enter__(self) -> Session:
        self._has_started = self._has_finished = False
        self._engine.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status: Status = "failed"
        try:
            if error is None:
                status = self.finish().status
        except BaseException as raised:
            self._engine.end(raised, status)
            raise
        self._engine.end(error, status)

    def restore(
        self,
        resume: Literal["auto", "never"] | str = "auto",
        restore: Collection[str] = COMPONENTS,
        *,
        accept_changes: bool = False,
    ) -> Checkpoint | None:
        """Resume from a checkpoint. Every rank must call this, before the loop.

        Args:
            resume: "auto" resumes from the newest good checkpoint of `run_dir`, or starts fresh if there is none;
                "never" starts fresh; a path resumes from that checkpoint.
            restore: the components to restore, see `Trainer.fit`.
            accept_changes: see `Trainer.fit`.

        Returns:
            The checkpoint; None if the run starts fresh.

        Raises:
            ConfigError, DataError, ResumeError, CheckpointError: as `Trainer.fit`.
        """
        if self._has_started and not self._has_finished:
            raise StepError("run.restore() was called during the run: call it once, before `for batch in run`")
        return self._engine.loop.restore(resume, restore, accept_changes=accept_changes)

    def start(self) -> bool:
        """Prepare for the first update; iterating calls this. Every rank must call this.

        Checks the storage, starts the trackers, runs the sanity check and any evaluation that is due, and closes an
        epoch whose evaluation was interrupted by a stop.

        Returns:
            Whether anything is left to train.
        """
        self._has_started = True
        return self._engine.loop.start()

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Yield global batches from the current position to the end of the run. Make an update from each."""
        if not self._has_started and not self.start():
            return
        while not self.should_stop:
            yield from self.epoch()

    def epoch(self) -> Generator[GlobalBatch, None, dict[str, float]]:
        """Yield the rest of the epoch in progress and close it; returns its metrics. Every rank must exhaust it."""
        return self._engine.loop.epoch()

    def accumulate(self, batch: Any) -> Iterator[Any]:
        """Yield this rank's micro-batches of a global batch, on the device; DDP reduces gradients at the last one.

        Inside the `for`, forward passes run in the config's precision. A batch that does not come from `for batch in
        run` is used as one micro-batch of this rank, and the position in the training data does not change.
        """
        return self._engine.loop.accumulate(batch)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward and log the loss; call it inside `accumulate`, instead of `loss.backward()`.

        Args:
            loss: the mean over the micro-batch; it is weighted so that the update has the gradient of the mean over the
                global batch.
            retain_graph: keeps the graph for another loss that shares a part of it, as in `Tensor.backward`.

        Raises:
            StepError: the loss is not a single number with a gradient.
        """
        self._engine.loop.optimizer_step.backward_and_log(loss, retain_graph=retain_graph)

    def step(self, optimizer: Optimizer | None = None) -> Any:
        """Complete the update: check and clip the gradient, step, and log or evaluate if due.

        Every rank must call this.

        Args:
            optimizer: steps only this one, inside `accumulate`, as `Trainer.step` does. A `step()` without it completes
                the update.

        Returns:
            The metrics of the interval when `log_every` is due, otherwise an empty dict. With an `optimizer`, the norm
            of its gradient, or None while gradients are accumulated.

        Raises:
            StepError: `accumulate` has not been exhausted, or no parameter got a gradient.
            NonFiniteError: the gradient is not finite, and the config does not allow skipping it.
        """
        if optimizer is not None:
            return self._engine.loop.optimizer_step.step(optimizer)
        return self._engine.loop.complete()

    def finish(self) -> FitResult:
        """Evaluate and save the last state, and return how the run ended; leaving the block calls this."""
        if not self._has_finished:
            if not self._has_started:
                self.start()
            self.result = self._engine.loop.finish()
            self._has_finished = True
        return self.result


def _only(found: Mapping[str, T], kind: str) -> T:
    """Return the only model or the only optimizer of a run, given all by name."""
    if not found:
        raise ConfigError(f"the run has no {kind} yet: use run.{kind} inside `with Session(...) as run:`")
    if len(found) > 1:
        raise ConfigError(f"the run has {len(found)} {kind}s ({', '.join(found)}): use run.{kind}s[name]")
    return next(iter(found.values()))


class _Functions:
    """The arguments of a `Session` as a `Program` for the engine."""

    overrides_prepare_batch = False
    overrides_init_weights = True
    overrides_loss_scaler = False
    may_keep_gradients = True
    loss_scaler: ScalesLoss | None
    scheduler_interval: Interval | Mapping[str, Interval]
    scheduler_monitor: str | Mapping[str, str]
    tensor_parallel_plan: Plan
    divided: Callable[[Any], Divided] | None

    def __init__(
        self,
        run: Session,
        model: Any,
        optimizer: Callable[[Any], Any],
        data: Any,
        validation_step: Callable[[Session, Any], Any] | None,
        loss_weight: Callable[[Any], LossWeight] | None,
        num_tokens: Callable[[Any], int | torch.Tensor] | None,
        metrics: Mapping[str, Any],
    ) -> None:
        self._run, self._make_model, self._make_optimizer, self._data = run, model, optimizer, data
        self._validation_step, self._loss_weight, self._num_tokens = validation_step, loss_weight, num_tokens
        self._metrics = metrics
        self.overrides_loss_weight, self.overrides_num_tokens = loss_weight is not None, num_tokens is not None

    def configure_models(self) -> Any:
        # Not on the meta device: constructors initialize the weights.
        with torch.device("cpu"):
            return self._make_model if isinstance(self._make_model, (nn.Module, Mapping)) else self._make_model()

    def init_weights(self) -> None:
        # The models have the values of their constructors.
        if without := list(self._run._engine.context.models_without_weights):
            raise ConfigError(
                f"{', '.join(without)} of the Session came without values, on the meta device: pass a function that "
                "returns the model with its values, or use a Trainer with init_weights()"
            )

    def configure_tensor_parallel(self) -> Plan:
        return self.tensor_parallel_plan

    def context_parallel_buffers(self, batch: Any) -> Divided:
        if self.divided is None:
            raise ConfigError("parallel.cp divides sequences: pass context_parallel_buffers= to the Session")
        return self.divided(batch)

    def configure_optimizers(self) -> Any:
        models = {name: self._run.unwrap(model) for name, model in self._run.models.items()}
        return self._make_optimizer(next(iter(models.values())) if len(models) == 1 else models)

    def configure_dataloaders(self) -> Any:
        return self._data

    def configure_metrics(self) -> Mapping[str, Any]:
        return self._metrics

    def configure_loss_scaler(self) -> ScalesLoss:
        return LossScaler() if self.loss_scaler is None else self.loss_scaler

    def configure_callbacks(self) -> Sequence[Callback | PlainFunction]:
        return ()

    def configure_trackers(self) -> Sequence[Tracker]:
        return ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise StepError(
            "a Session has no training_step: write `for micro_batch in run.accumulate(batch)`, and run.step()"
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self._validation_step is None:
            raise ConfigError("an evaluation needs validation_step, a function (run, batch) that returns the loss")
        return self._validation_step(self._run, batch)

    def prepare_batch(self, batch: Any) -> Any:
        return batch

    def loss_weight(self, batch: Any) -> LossWeight:
        assert self._loss_weight is not None
        return self._loss_weight(batch)

    def num_tokens(self, batch: Any) -> int | torch.Tensor:
        return 0 if self._num_tokens is None else self._num_tokens(batch)
