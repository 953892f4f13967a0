"""The Trainer: what users subclass, and the life of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.optim import Optimizer

from .active_run import ActiveRun
from .callbacks.base import Callback, OwnHooks, PlainFunction, check_hooks
from .config import TrainerConfig
from .distributed.world import World
from .errors import ConfigError
from .loop.engine import Engine
from .loop.run_state import COMPONENTS
from .loop.steps import LossWeight
from .result import FitResult
from .session import Session
from .setup import weight_init
from .setup.dry_run import Estimate
from .step.lr_stepping import Interval
from .trackers.base import Tracker

C = TypeVar("C", bound=TrainerConfig)


class Trainer(OwnHooks, ActiveRun, Generic[C]):
    """Trains what a subclass describes: the same in one process, under `torchrun` and inside a Ray Train worker.

    A subclass says what the model is and what a step does; every method that it may override is under "What users
    write" below. The life of a run, with its hooks:

        fit()
        ├─ setup                                  on_setup_start
        │  ├─ configure_models, on the meta device  on_models_configured
        │  ├─ freeze, float8, checkpoint, compile, shard; materialise; init_weights; replicate   (parallel.py)
        │  ├─ configure_dataloaders, which tells `total_steps`
        │  └─ configure_optimizers                                                    on_setup_end
        ├─ restore the newest good checkpoint of the run directory, if there is one   on_restored
        ├─ try `sanity_batches` of the validation data, of which no hook hears
        ├─ on_fit_start; evaluate, if `evaluate_at_start`; end the epoch whose evaluation a stop has cut short
        ├─ loop(): until a limit (max_epochs, max_steps, ...) or a request to stop   on_epoch_start
        │  ├─ for each global batch                                (update.py)        on_step_start
        │  │  ├─ for each micro-batch of this rank: prepare_batch                     on_batch_start
        │  │  │     training_step, backward; gradients meet at the last one           on_batch_end
        │  │  │     or again, in smaller ones (halving.py)                             on_out_of_memory
        │  │  ├─ measure the norm, guard                                              on_gradients_ready
        │  │  ├─ clip, step, schedule                                                 on_step_end
        │  │  └─ what is due or was asked for:
        │  │        log                                                               on_log
        │  │        evaluate    on_evaluation_start, on_evaluation_batch_start/end, on_evaluation_end
        │  │        save, in the background                                           on_checkpoint_start
        │  │              told when it is committed                                    on_checkpoint_saved
        │  │              or could not be, which ends the run                          on_checkpoint_failed
        │  │        stop                                                              on_stop_requested
        │  └─ log, evaluate, save at the end of the epoch                             on_epoch_end
        ├─ evaluate and save, if the last step has not been
        └─ whatever happened                                                          on_fit_end(error)

    What a run offers while it trains (`models`, `progress`, `log`, `evaluate`, `request_stop`, ...) is in `ActiveRun`.

    Args:
        config: how to train.
        run_dir: the run's directory, a path or fsspec URI: `checkpoints/` and `metrics.jsonl` go there, and `fit`
            resumes from what is there. None writes nothing and always starts fresh.
        callbacks: called after those of `configure_callbacks`; functions `(trainer, epoch, metrics)` are welcome.
        trackers: instead of those of `configure_trackers`; one that writes `metrics.jsonl` is always there besides.
        world: the ranks to train on. By default `setup` joins what `torchrun` describes, or this process trains alone;
            a process group that is joined in this way ends with `fit`, one of a given world is its owner's to end.
        attempt: number of this attempt at the run, for its records.
        printer: displays messages of the main rank, such as those of `print`; by default on stdout. See "Logging" in
            the documentation for files and levels.

    Attributes:
        config: as given.
        overrides_loss_weight, overrides_num_tokens, overrides_prepare_batch: whether the subclass overrides the method.

    Raises:
        ConfigError: the config is no `TrainerConfig`.

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
    """Whether schedulers move after every update ("step"), "epoch" or "evaluation"; or a dict of these by their names.

    A `ReduceLROnPlateau` always moves after evaluations, by the value of `scheduler_monitor`.
    """

    scheduler_monitor: str | Mapping[str, str] = "validation/loss"
    """The metric that a `ReduceLROnPlateau` gets after every evaluation; or a dict of these by their names."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_hooks(cls, leading=("self",))

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
    ) -> None:
        if not isinstance(config, TrainerConfig):
            raise ConfigError(f"{type(self).__name__} needs a TrainerConfig (or a subclass), not {config!r:.80}")
        self.config: C = config
        self.overrides_loss_weight: bool = type(self).loss_weight is not Trainer.loss_weight
        self.overrides_num_tokens: bool = type(self).num_tokens is not Trainer.num_tokens
        self.overrides_prepare_batch: bool = type(self).prepare_batch is not Trainer.prepare_batch
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
        )

    # ---- What users write ------------------------------------------------------------------------------------------

    def configure_models(self) -> Any:
        """Sets one or several modules as attributes, or returns one, or a dict of them by name.

        Runs on the meta device: shapes, but no memory and no values.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_models(self) and set self.model in it, or return it"
        )

    def init_weights(self) -> None:
        """Gives every parameter and buffer its value, on the real device, after sharding.

        By default calls `reset_parameters` of every module that has one. Random numbers come out the same for every
        number of ranks and every strategy. Not called for models that came with their weights.
        """
        for model in self._engine.context.models_without_weights.values():
            weight_init.reset_parameters(model)

    def configure_optimizers(self) -> Any:
        """Sets optimizers, and schedulers if there are any, as attributes, over the finished models' parameters.

        Or returns them: an optimizer, an (optimizer, scheduler) pair, or a dict of either by name. The data is open by
        now: `self.total_steps` is the length of the whole run, where config and data tell it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_optimizers(self) and set self.optimizer in it, or return it"
        )

    def configure_dataloaders(self) -> Any:
        """Returns the training data, or (training data, validation data); or sets `train_dataloader`, `val_dataloader`.

        Each is a torch DataLoader, a Headway stream, any iterable of batches, or a function that returns one. Several
        sets of validation data come as a dict by name, `{"held_out": ..., "news": ...}`; their metrics are
        `validation/held_out/loss` and so on.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_dataloaders(self) and return (train, validation)"
        )

    def prepare_batch(self, batch: Any) -> Any:
        """Returns what the steps and the batch hooks get instead of a batch: normalised, augmented, renamed.

        Asked before each forward pass, in training and in evaluations (`self.training` tells which), on the device.
        A retry asks again, with the batch as it came: return a new one. `loss_weight` and `num_tokens` get the batch as
        it came, too.
        """
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the mean loss of a micro-batch, or a dict with "loss" and other numbers to log; dicts may be nested.

        Args:
            batch: what the data gives, its tensors on `self.device`.
            batch_idx: micro-batches of this rank before this one, over the whole run.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define training_step(self, batch, batch_idx) and return the loss"
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns numbers to average over the validation data, by default those of `training_step`. No gradients."""
        return self.training_step(batch, batch_idx)

    def configure_metrics(self) -> Mapping[str, Any]:
        """Returns metrics of evaluations that are no means of a batch's: exact over all batches and ranks.

        Each is a torchmetrics object, another object with `update`, `compute` and `reset`, or a function of all that
        `update` got: `{"f1": BinaryF1Score(), "auc": lambda scores_N, labels_N: ...}`. Call
        `self.metrics["f1"].update(...)` in `validation_step`; the result is logged as `validation/f1`.
        """
        return {}

    def loss_weight(self, batch: Any) -> LossWeight:
        """Returns how much the mean loss of a micro-batch counts: override it where that is not the number of samples.

        A language model returns the number of tokens that have a label, as a number or a tensor on the device.
        """
        raise AssertionError("asked only when overridden")

    def num_tokens(self, batch: Any) -> int | torch.Tensor:
        """Returns the tokens of a micro-batch that are no padding: for `tokens` and `tokens_per_s` in the log.

        Args:
            batch: as the data gives it: that of a stream lies on the device, that of a loader where the loader leaves
                it. Return the tensor that counts a mask, and not its `int()`, which waits for the device.
        """
        return 0

    def flops_per_sample(self) -> float | None:
        """Returns the floating-point operations of forward and backward for a sample; see `callbacks.Throughput`."""
        return None

    def flops_per_token(self) -> float | None:
        """Returns the same for a token; where neither is known, it is estimated from the number of parameters."""
        return None

    def loop(self) -> None:
        """Trains until `should_stop`, epoch by epoch. Override it to train in another order.

        `fit` calls it when everything is set up and restored, unless there is nothing left to do, and evaluates and
        saves afterwards. Call `train_epoch` and `train_step` in it, which log, evaluate, save and stop when that is due
        or asked for; on every rank the same.
        """
        while not self.should_stop:
            self.train_epoch()

    def configure_callbacks(self) -> Sequence[Callback | PlainFunction]:
        """Returns the callbacks of every run of this class."""
        return ()

    def configure_trackers(self) -> Sequence[Tracker]:
        """Returns trackers besides the one that is always there: one JSON line per record in the run directory."""
        return ()

    # ---- What users call -------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Replaces `loss.backward()` in a `training_step` that wants to call it itself; weighs the loss.

        In an evaluation it does nothing, as `step`, so that a training step serves as a validation step.
        """
        if self.training:
            self._engine.loop.optimizer_step.backward(loss)

    def step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Replaces `optimizer.step()` in a `training_step` that wants to call it itself.

        Returns the norm of the gradient before clipping, or None while gradients are accumulated and nothing was done.
        """
        return self._engine.loop.optimizer_step.step(optimizer) if self.training else None

    # ---- The loop --------------------------------------------------------------------------------------------------

    def fit(
        self,
        *,
        resume: Literal["auto", "never"] | str = "auto",
        restore: Collection[str] = COMPONENTS,
        accept_changes: bool = False,
    ) -> FitResult:
        """Trains, or goes on, until a limit is reached or a stop is asked for. Every rank must call this.

        Args:
            resume: "auto" goes on from the newest good checkpoint of `run_dir` and begins anew where there is none; a
                trainer that has trained already goes on from where it stands, unless an error broke its loop off: that
                one needs a checkpoint to go back to. "never" begins anew; a path goes on from that checkpoint.
            restore: what to take of it, some of "models", "optimizers", "schedulers", "progress" (counters and
                history), "data" (the position in it), "callbacks" and "rng"; the rest stays fresh. Without "data" the
                epoch in progress begins again, on whatever data there is now.
            accept_changes: goes on although the config, the samples of an update or the order of the rows are not those
                of the run that saved the checkpoint. For other data there is `config.changed_data`.

        Raises:
            ConfigError, DataError: what was asked for makes no sense; raised before the first step.
            ResumeError: the run is not the one that saved the checkpoint; raised before the first step.
            StepError, NonFiniteError: a step gave nothing to learn from.
            CheckpointError: no checkpoint is good, or none can be written.
        """
        with Session.of_engine(self._engine) as run:
            run.restore(resume, restore, accept_changes=accept_changes)
            if run.start():
                self.loop()
            return run.finish()

    def train_epoch(self) -> dict[str, float]:
        """Trains to the end of the epoch in progress and returns its metrics. Every rank must call this.

        Raises:
            ConfigError: `run_dir` has checkpoints of a run that `fit` has not gone on from.
        """
        self.setup()
        self._engine.loop.begin_without_restore()
        return self._engine.loop.train_epoch()

    def train_step(self, batch: Any) -> dict[str, float]:
        """Makes one update from one batch of this rank and returns its metrics. Every rank must call this.

        Inside `loop` it also does what is due, and returns metrics when `log_every` is due, otherwise nothing. The
        batch is not one of the epoch's: the position in the training data stays.

        Raises:
            ConfigError: as `train_epoch`.
        """
        self.setup()
        self._engine.loop.begin_without_restore()
        return self._engine.loop.train_step(batch)

    def check(self, *, elsewhere: bool = False) -> None:
        """Refuses what is wrong with the config or the data; builds no model and reads no row. Any process may call it.

        Args:
            elsewhere: leaves the data and the device to the machines that will train.

        Raises:
            ConfigError, DataError: what is wrong.
        """
        self._engine.check(elsewhere=elsewhere)

    def estimate(self) -> Estimate:
        """Finds out what this training would take. Takes no memory, reads no row and needs no other rank.

        Models and optimizers are made on the meta device, and the data is opened. The trainer cannot be used for
        anything else afterwards.

        Raises:
            ConfigError, DataError: what `fit` would refuse.
        """
        return self._engine.estimate()

    def setup(self) -> None:
        """Joins the process group, and builds models, optimizers and data, once. Every rank must call this.

        `fit`, `evaluate` and the others call it.
        """
        self._engine.setup()
