"""The Trainer: the class that users subclass, and the course of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch.optim import Optimizer

from .active_run import ActiveRun
from .callbacks.base import Callback, OwnHooks, PlainFunction, check_hooks
from .callbacks.progress_bar import ProgressBar
from .config import InitSignature, TrainerConfig, check_is_dataclass, one_step_on_cpu
from .distributed.context_parallel import Divided
from .distributed.mesh_sizes import MeshSizes
from .distributed.tensor_parallel import Plan
from .distributed.world import World
from .errors import ConfigError
from .loop.engine import Engine
from .loop.run_state import COMPONENTS
from .loop.steps import LossWeight
from .result import FitResult
from .session import Session
from .setup import weight_init
from .setup.class_check import check_arguments, check_overrides
from .setup.dry_run import Estimate
from .step.lr_stepping import Interval
from .step.precision import LossScaler, ScalesLoss
from .trackers.base import Tracker

C = TypeVar("C", bound=TrainerConfig)


class Trainer(OwnHooks, ActiveRun, Generic[C]):
    """Trains a model; equal in one process, under `torchrun` and in a Ray Train worker.

    A subclass defines the model, the data and a step; the methods to override are under "Methods to override" below.
    The course of a run, with its hooks:

        fit()
        ├─ setup (setup/models.py)                                                    on_setup_start
        │  ├─ configure_models, on the meta device; freeze, float8                    on_models_configured
        │  ├─ checkpoint, compile, shard; materialize; init_weights; replicate (distributed/parallelize.py)
        │  ├─ configure_dataloaders, which determines `total_steps`
        │  └─ configure_optimizers                                                    on_setup_end
        ├─ restore the newest good checkpoint (loop/run_state.py)                     on_restored
        ├─ sanity check with `sanity_batches`, without hooks
        ├─ evaluate, if `evaluate_at_start`; close an epoch that a stop interrupted   on_fit_start
        ├─ loop(): until a limit (max_epochs, max_steps, ...) or a stop request       on_epoch_start
        │  ├─ for each global batch (step/optimizer_step.py)                          on_step_start
        │  │  ├─ for each micro-batch of this rank: prepare_batch                     on_batch_start
        │  │  │     training_step, backward; DDP reduces gradients at the last one    on_batch_end
        │  │  │     out of memory: repeat with smaller ones (step/auto_microbatch.py) on_out_of_memory
        │  │  ├─ gradient norm, check for NaN (step/nonfinite.py)                     on_gradients_ready
        │  │  ├─ clip, step, schedule                                                 on_step_end
        │  │  └─ if due or requested (loop/loop.py):
        │  │        log                                                               on_log
        │  │        evaluate    on_evaluation_start, on_evaluation_batch_start/end, on_evaluation_end
        │  │        save in the background                                            on_checkpoint_start
        │  │           committed                                                      on_checkpoint_saved
        │  │           failed, which ends the run                                     on_checkpoint_failed
        │  │        stop                                                              on_stop_requested
        │  └─ log, evaluate, save at the end of the epoch                             on_epoch_end
        ├─ evaluate and save the last state, unless done
        └─ clean up, on success and failure                                           on_fit_end(error)

    Attributes and methods of a run in progress (`models`, `progress`, `log`, `evaluate`, `request_stop`, ...) are in
    `ActiveRun`.

    Args:
        config: how to train.
        run_dir: the run's directory, a path or fsspec URI, for `checkpoints/` and `metrics.jsonl`; `fit` resumes from
            it. None writes nothing and always starts fresh.
        callbacks: called after those of `configure_callbacks`; functions `(trainer, epoch, metrics)` are allowed.
        trackers: replace those of `configure_trackers`. A tracker that writes `metrics.jsonl` is always added.
        world: the ranks to train on. By default `setup` joins those that `torchrun` describes, or uses this process
            alone; `fit` closes that process group at its end. It never closes the process group of a given world.
        attempt: number of this attempt at the run, for its records.
        printer: displays messages of the main rank, such as those of `print`; by default on stdout. See "Logging" in
            the documentation for files and levels.
        show_progress: whether the main rank shows its progress: a bar on a terminal, elsewhere a line per record. By
            default if there is no `printer`. A `ProgressBar` among the callbacks replaces it.

    Attributes:
        config: as given.
        overrides_init_weights, overrides_loss_scaler, overrides_loss_weight, overrides_num_tokens,
            overrides_prepare_batch: whether the subclass overrides the method.
        may_keep_gradients: whether `training_step` calls `backward` itself, after which it has the gradients.

    Raises:
        ConfigError: the config is not a `TrainerConfig`.

    Example:
        >>> class Line(Trainer[TrainerConfig]):
        ...     def configure_models(self):
        ...         self.model = nn.Linear(1, 1)
        ...     def configure_optimizers(self):
        ...         self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        ...     def configure_dataloaders(self):
        ...         return [torch.rand(8, 1) for _ in range(10)]
        ...     def training_step(self, batch, batch_idx):
        ...         return (self.model(batch) - 2 * batch).square().mean()
        >>> Line(TrainerConfig(max_epochs=2)).fit().steps
        20
    """

    scheduler_interval: Interval | Mapping[str, Interval] = "step"
    """When schedulers step: after every update ("step"), "epoch" or "evaluation"; or a dict of these by scheduler name.

    A `ReduceLROnPlateau` always steps after evaluations, with the value of `scheduler_monitor`.
    """

    scheduler_monitor: str | Mapping[str, str] = "validation/loss"
    """The metric for `ReduceLROnPlateau`; or a dict of these by scheduler name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_hooks(cls, leading=("self",))
        check_overrides(cls, Trainer)

    __signature__ = InitSignature()

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Check the keywords: other trainers take fields of the config as arguments."""
        check_arguments(cls, given, [each.name for each in fields(TrainerConfig)])
        return super().__new__(cls)

    def __init__(
        self,
        config: C,
        *,
        run_dir: str | Path | None = None,
        callbacks: Sequence[Callback | PlainFunction] = (),
        trackers: Sequence[Tracker] | None = None,
        world: World | None = None,
        attempt: int = 1,
        printer: Callable[[str], None] | None = None,
        show_progress: bool | None = None,
    ) -> None:
        if not isinstance(config, TrainerConfig):
            raise ConfigError(f"{type(self).__name__} needs a TrainerConfig (or a subclass), got {config!r:.80}")
        check_is_dataclass(config)
        self.config: C = config
        self.overrides_loss_weight: bool = type(self).loss_weight is not Trainer.loss_weight
        self.overrides_loss_scaler: bool = type(self).configure_loss_scaler is not Trainer.configure_loss_scaler
        self.overrides_num_tokens: bool = type(self).num_tokens is not Trainer.num_tokens
        self.overrides_init_weights: bool = type(self).init_weights is not Trainer.init_weights
        self.overrides_prepare_batch: bool = type(self).prepare_batch is not Trainer.prepare_batch
        code = getattr(inspect.unwrap(type(self).training_step), "__code__", None)
        self.may_keep_gradients: bool = code is None or "backward" in code.co_names
        self._engine = Engine(
            self,
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

    # ---- Methods to override ---------------------------------------------------------------------------------------

    def configure_models(self) -> Any:
        """Set one or several modules as attributes, or return one, or a dict of them by name.

        Runs on the meta device: tensors have shapes, but no memory and no values. If that would lose values that this
        code gives to them, or fails, it runs again, for real.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_models(self) and set self.model in it, or return it"
        )

    def init_weights(self) -> None:
        """Initialize every parameter and buffer, on the real device, after sharding.

        By default calls `reset_parameters` of every module that has one. Random numbers are the same for every number
        of ranks and every strategy. Not called for models that have their weights already.
        """
        ctx = self._engine.context
        for model in ctx.models_without_weights.values():
            weight_init.reset_parameters(model)
        ctx.versions_after_reset.update(weight_init.versions_of(ctx.models_without_weights))

    def configure_tensor_parallel(self) -> Plan:
        """Return how `parallel.tp` divides layers over ranks.

        Names of modules begin with the attribute of the model, and `*` stands for one part of a name:
        `{"model.blocks.*.up": ColwiseParallel(), "model.blocks.*.down": RowwiseParallel()}`, with the styles of
        `torch.distributed.tensor.parallel`. Without a plan, a Hugging Face model uses its own. Modules that are not
        named are computed alike by all these ranks.
        """
        return {}

    def configure_optimizers(self) -> Any:
        """Set optimizers and schedulers as attributes, over the parameters of the sharded models.

        Or return them: an optimizer, an (optimizer, scheduler) pair, or a dict of either by name. `self.total_steps` is
        known here, if config and data determine it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_optimizers(self) and set self.optimizer in it, or return it"
        )

    def configure_dataloaders(self) -> Any:
        """Return the training data, or (training data, validation data); or set `train_dataloader`, `val_dataloader`.

        Each is a torch DataLoader, a Headway stream, any iterable of batches, or a function that returns one. Several
        sets of validation data are a dict by name, `{"held_out": ..., "news": ...}`; their metrics are
        `validation/held_out/loss` and so on.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_dataloaders(self) and return (train, validation)"
        )

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch for the steps and batch hooks, for example normalized or augmented.

        Called on the device before each forward pass, in training and in evaluations (see `self.training`). A retry
        calls it again with the original batch, so return a new one. `loss_weight` and `num_tokens` get the original.
        """
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean loss of a micro-batch, or a dict with "loss" and other numbers to log; dicts may be nested.

        Args:
            batch: a micro-batch of the data, its tensors on `self.device`.
            batch_idx: number of earlier micro-batches of this rank, over the whole run.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define training_step(self, batch, batch_idx) and return the loss"
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return numbers to average over the validation data, by default those of `training_step`. No gradients."""
        return self.training_step(batch, batch_idx)

    def configure_metrics(self) -> Mapping[str, Any]:
        """Return evaluation metrics that are not means over batches; they are exact over all batches and ranks.

        Each is a torchmetrics object, another object with `update`, `compute` and `reset`, or a function of all
        arguments of `update`, concatenated: `{"f1": BinaryF1Score(), "auc": lambda scores_N, labels_N: ...}`. Call
        `self.metrics["f1"].update(...)` in `validation_step`; the result is logged as `validation/f1`.
        """
        return {}

    def configure_loss_scaler(self) -> ScalesLoss:
        """Return the loss scaler for `precision="fp16"`, without which this is not called.

        It is a `LossScaler` with settings of your own, or any object with a number `scale`, `update(overflowed=...)`,
        `state_dict()` and `load_state_dict(state)`. All of it must be equal on every rank; the state is in checkpoints.
        """
        return LossScaler()

    def context_parallel_buffers(self, batch: Any) -> Divided:
        """Return the tensors that `parallel.cp` divides along their sequences, each with that dimension.

        Such as `[(batch["tokens"], 1), (batch["targets"], 1), (self.model.rope, 0)]`: everything that has one value per
        position. During a step each rank has its part of them, and `scaled_dot_product_attention` covers whole
        sequences. Their lengths must be multiples of `2 * cp`. Positions that the model computes by `torch.arange`
        would be wrong: pass them as a tensor. `loss_weight` gets the parts, `num_tokens` the whole batch.

        Args:
            batch: a micro-batch, on the device.
        """
        raise NotImplementedError(
            f"parallel.cp divides sequences: {type(self).__name__} must define context_parallel_buffers(self, batch)"
        )

    def loss_weight(self, batch: Any) -> LossWeight:
        """Return the weight of a micro-batch's mean loss; by default its number of samples.

        A language model returns the number of tokens that have a label, as a number or a tensor on the device.
        """
        raise AssertionError("called only if overridden")

    def num_tokens(self, batch: Any) -> int | torch.Tensor:
        """Return the number of tokens in a micro-batch without padding, for `tokens` and `tokens_per_s` in the log.

        Return a sum over a mask as a tensor: `int()` would wait for the device.

        Args:
            batch: a micro-batch of the data: on the device for a stream, wherever the loader leaves it for a loader.
        """
        return 0

    def flops_per_sample(self) -> float | None:
        """Return the floating-point operations of forward and backward per sample; see `callbacks.Throughput`."""
        return None

    def flops_per_token(self) -> float | None:
        """Return the same per token; if neither is defined, it is estimated from the number of parameters."""
        return None

    def loop(self) -> None:
        """Train until `should_stop`, epoch by epoch. Override it for another order.

        `fit` calls it after setup and restore, if anything is left to train, and evaluates and saves afterwards. In it,
        call `train_epoch` or `train_step`, which log, evaluate, save and stop if due or requested. Every rank must make
        the same calls.
        """
        while not self.should_stop:
            self.train_epoch()

    def configure_callbacks(self) -> Sequence[Callback | PlainFunction]:
        """Return callbacks for every run of this class."""
        return ()

    def configure_trackers(self) -> Sequence[Tracker]:
        """Return trackers, in addition to the one that writes `metrics.jsonl` in the run directory."""
        return ()

    # ---- Methods to call -------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward inside `training_step`, instead of `loss.backward()`; weights the loss.

        In evaluations `backward` and `step` do nothing, so that a training step can be a validation step.

        Args:
            loss: the mean over the micro-batch.
            retain_graph: keeps the graph for another loss that shares a part of it, as in `Tensor.backward`.
        """
        if self.training:
            self._engine.loop.optimizer_step.backward(loss, retain_graph=retain_graph)

    def step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Step an optimizer inside `training_step`, instead of `optimizer.step()`.

        Returns:
            The norm of the gradient before clipping; None, without a step, while gradients are accumulated.
        """
        return self._engine.loop.optimizer_step.step(optimizer) if self.training else None

    # ---- Running ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        *unexpected: Any,
        resume: Literal["auto", "never"] | str = "auto",
        restore: Collection[str] = COMPONENTS,
        accept_changes: bool = False,
    ) -> FitResult:
        """Start or resume training, until a limit is reached or a stop is requested. Every rank must call this.

        Args:
            unexpected: must be empty; models and data come from the `configure_` methods.
            resume: "auto" resumes from the newest good checkpoint of `run_dir`, or starts fresh if there is none. A
                trainer that has trained already continues from its current state, unless its loop ended with an error:
                then it needs a checkpoint. "never" starts fresh; a path resumes from that checkpoint.
            restore: the components to restore, some of "models", "optimizers", "schedulers", "progress" (counters and
                history), "data" (the position in it), "callbacks" and "rng"; others start fresh. Without "data" the
                epoch in progress restarts, on the current data.
            accept_changes: resumes even if the config, the samples per update or the order of the rows differ from
                those in the checkpoint. For other data set `config.changed_data`.

        Raises:
            ConfigError, DataError: a setting or the data is invalid; raised before the first step.
            ResumeError: the run is not the one that saved the checkpoint; raised before the first step.
            RunConflictError: another process is training in `run_dir`; the message has its host and number.
            StepError, NonFiniteError: a step returned no loss, or gave a gradient that is not finite.
            CheckpointError: no checkpoint is good, or none can be written.
        """
        if unexpected:
            raise ConfigError(
                f"fit() takes no {type(unexpected[0]).__name__}: return models, data and optimizers from the "
                "configure_ methods, or use SupervisedTrainer(model=..., train=..., config=...)"
            )
        with Session.of_engine(self._engine) as run:
            run.restore(resume, restore, accept_changes=accept_changes)
            if run.start():
                self.loop()
            return run.finish()

    def train_epoch(self) -> dict[str, float]:
        """Train to the end of the epoch in progress and return its metrics. Every rank must call this.

        Raises:
            ConfigError: `run_dir` has checkpoints of a run that `fit` has not resumed.
        """
        self.setup()
        self._engine.loop.begin_without_restore()
        return self._engine.loop.train_epoch()

    def train_step(self, batch: Any) -> dict[str, float]:
        """Make one update from a batch of this rank and return its metrics. Every rank must call this.

        Inside `loop` it also logs, evaluates and saves if due, and returns metrics only when `log_every` is due. The
        batch is your own: the position in the training data does not change.

        Raises:
            ConfigError: as for `train_epoch`.
        """
        self.setup()
        self._engine.loop.begin_without_restore()
        return self._engine.loop.train_step(batch)

    def check(self, *, elsewhere: bool = False) -> None:
        """Check the config and the data, without building a model or reading a row. Any process may call this.

        Args:
            elsewhere: skips checks of the data and the device, for a machine that will not train.

        Raises:
            ConfigError, DataError: the config or the data is invalid.
        """
        self._engine.check(elsewhere=elsewhere)

    def estimate(self) -> Estimate:
        """Estimate the size and memory of this training, without allocating memory, reading rows or other ranks.

        Makes models and optimizers on the meta device, and opens the data. The trainer cannot be used for anything else
        afterwards.

        Raises:
            ConfigError, DataError: as `fit` would raise.
        """
        return self._engine.estimate()

    def check_step(self, *, ranks: int = 1) -> dict[str, float]:
        """Make one update and evaluate one batch of each validation set in this process, on the CPU.

        Uses real data: the first micro-batch that rank 0 gets. Nothing is written in `run_dir` and to trackers;
        callbacks that write get a temporary one. The config is changed to what a CPU can do: without the strategy,
        `compile`, `float8`, `cpu_offload` and `exact`. The trainer cannot be used for anything else afterwards.

        It cannot show whether the memory of a GPU suffices, what only happens in later batches, on a GPU, or between
        several ranks, and whether checkpoints can be written.

        Args:
            ranks: number of ranks that will train, among which a global batch is divided.

        Returns:
            The metrics of the update and of the evaluation.

        Raises:
            HeadwayError: as `fit` would raise, also after the first step; errors of the trainer's own code as they are.
        """
        num_data = MeshSizes.of(self.config.parallel, ranks).num_data
        self.config = self._engine.config = one_step_on_cpu(self.config)
        return self._engine.check_step(num_data)

    def setup(self) -> None:
        """Join the process group, and build models, optimizers and data, once. Every rank must call this.

        `fit`, `evaluate` and other methods call it.
        """
        self._engine.setup()
