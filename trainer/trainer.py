"""The Trainer: what users subclass, and the life of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .callbacks.base import Callback, CallbackList, OwnHooks, PlainFunction, check_hooks
from .checkpoints.export import (
    cast_weights,
    choose_model,
    gather_weights,
    write_on_main,
    write_pretrained,
    write_safetensors,
)
from .checkpoints.rng import seed_everything
from .checkpoints.store import Checkpoint
from .config import TrainerConfig, as_plain
from .data.protocols import BatchStream, LoadedBatch, check_data
from .data.tree import batch_size
from .distributed import dtensor, parallelize
from .distributed.world import World
from .errors import ConfigError, DataError, HeadwayError
from .exact.checks import check_exact_config, check_exact_metrics
from .exact.determinism import deterministic_mode
from .exact.step import ExactStep
from .loop.control import Requests, StopStatus
from .loop.evaluation_metrics import EvaluationMetrics
from .loop.loop import Loop
from .loop.progress import Progress
from .loop.run_state import COMPONENTS
from .loop.signals import stop_on_signals
from .loop.timing import Activity, SetupTimes
from .metrics.histogram import Histogram
from .metrics.reductions import Reduce
from .metrics.train_log import MetricSource
from .result import FitResult, History, Status
from .setup import build, weight_init
from .setup.dry_run import Estimate, estimate_of
from .setup.float8 import check_float8, convert_to_float8
from .step.lr_stepping import Interval
from .step.oom import add_memory_advice, is_out_of_memory
from .step.optimizer_step import LossWeight
from .step.precision import autocast
from .trackers.base import Tracker
from .trackers.jsonl import JsonlTracker

C = TypeVar("C", bound=TrainerConfig)


class Trainer(OwnHooks, Generic[C]):
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

    Args:
        config: how to train.
        run_dir: the run's directory, a path or fsspec URI: `checkpoints/` and `metrics.jsonl` go there, and `fit` goes
            on from what is there. None writes nothing and always begins anew.
        callbacks: called after those of `configure_callbacks`; functions `(trainer, epoch, metrics)` are welcome.
        trackers: instead of those of `configure_trackers`; one that writes `metrics.jsonl` is always there besides.
        world: the ranks to train on; by default what `torchrun` set up, or this process alone. A process group that
            the trainer begins by itself ends with `fit`; one that a given world began is its owner's to end.
        attempt: which life of the run this is, for its records.
        printer: where `print` goes on the main rank.

    Attributes:
        config, run_dir, world, attempt, progress, callbacks: as given, or made from what was given.
        models, optimizers, schedulers: by the names of the attributes that hold them, once set up.
        history: means over whole epochs.
        activity: what this rank is doing right now, for who watches it from another thread.
        setup_times: seconds that each phase of getting ready has taken on this rank, up to the first update.
        training: False during an evaluation.
        metrics: those of `configure_metrics`, by name; their `update` counts in evaluations.
        overrides_loss_weight, overrides_num_tokens, overrides_prepare_batch: whether the subclass overrides that
            method.

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
        printer: Callable[[str], None] = print,
    ) -> None:
        if not isinstance(config, TrainerConfig):
            raise ConfigError(f"{type(self).__name__} needs a TrainerConfig (or a subclass), not {config!r:.80}")
        self.config: C = config
        self.run_dir: str | None = str(run_dir) if run_dir is not None else None
        self.world: World = world or World.from_environment(
            timeout_s=config.parallel.timeout.amount, with_cpus=config.parallel.cpu_offload
        )
        self.attempt: int = attempt
        self.progress: Progress = Progress()
        self.history: History = History()
        self.activity: Activity = Activity()
        self.setup_times: SetupTimes = SetupTimes()
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.schedulers: dict[str, LRScheduler] = {}
        self.training: bool = True
        self.overrides_loss_weight: bool = type(self).loss_weight is not Trainer.loss_weight
        self.overrides_num_tokens: bool = type(self).num_tokens is not Trainer.num_tokens
        self.overrides_prepare_batch: bool = type(self).prepare_batch is not Trainer.prepare_batch
        self.callbacks: CallbackList = CallbackList()
        self._given_callbacks, self._given_trackers = tuple(callbacks), trackers
        self._printer = printer
        self._owns_world = world is None
        self._is_set_up = False
        self._data: BatchStream | None = None
        self._validation: dict[str, BatchStream] = {}
        self._steps_on_ranks: list[int | None] = []
        self.metrics: EvaluationMetrics = EvaluationMetrics({}, self.world)
        self._born_on_meta: dict[str, nn.Module] = {}
        self._requests = Requests(self.world)
        self._made_loop: Loop | None = None

    # ---- What users write ------------------------------------------------------------------------------------------

    def configure_models(self) -> None:
        """Sets one or several modules as attributes. Runs on the meta device: shapes, but no memory and no values."""
        raise NotImplementedError(f"{type(self).__name__} must define configure_models(self) and set self.model in it")

    def init_weights(self) -> None:
        """Gives every parameter and buffer its value, on the real device, after sharding.

        By default calls `reset_parameters` of every module that has one. Random numbers come out the same for every
        number of ranks and every strategy. Not called for models that came with their weights.
        """
        for model in self._born_on_meta.values():
            weight_init.reset_parameters(model)

    def configure_optimizers(self) -> None:
        """Sets optimizers, and schedulers if there are any, as attributes, over the finished models' parameters.

        The data is open by now: `self.total_steps` is the length of the whole run, as far as anybody knows.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_optimizers(self) and set self.optimizer in it"
        )

    def configure_dataloaders(self) -> Any:
        """Returns the training data, or (training data, validation data).

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

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def global_step(self) -> int:
        """Optimizer updates over all attempts."""
        return self.progress.step

    @property
    def current_epoch(self) -> int:
        """Completed passes over the data, so the index of the one in progress."""
        return self.progress.epoch

    @property
    def micro_batches_seen(self) -> int:
        """Micro-batches of this rank over all attempts."""
        return self.progress.micro_batches

    @property
    def elapsed_s(self) -> float:
        """Seconds inside `fit` over all attempts, up to now."""
        return self._loop.recorder.elapsed_s()

    @property
    def save_took_s(self) -> float | None:
        """Seconds from the beginning of the last checkpoint to its commit; None before there was one."""
        return self._loop.save_took_s if self._is_set_up else None

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run, as far as the config and the data tell; None where nobody knows."""
        config = self.config
        in_data = self._steps_in_epoch()
        in_epoch = min((each for each in (config.steps_per_epoch, in_data) if each is not None), default=None)
        by_epochs = config.max_epochs * in_epoch if config.max_epochs and in_epoch else None
        by_samples = self._steps_of_samples(in_epoch) if config.max_samples else None
        return min((each for each in (config.max_steps, by_epochs, by_samples) if each is not None), default=None)

    @property
    def data_identity(self) -> dict[str, str | None]:
        """What a resumed run compares the training data by: "guarantee" and "fingerprint". Empty before it is open."""
        data = self._data
        return {} if data is None else {"guarantee": data.guarantee, "fingerprint": data.fingerprint}

    @property
    def _loop(self) -> Loop:
        if self._made_loop is None:
            raise ConfigError(
                "this trainer is not set up yet: what belongs to its training is there from on_setup_end on, or after "
                "setup()"
            )
        return self._made_loop

    @property
    def should_stop(self) -> bool:
        """Whether a limit is reached or all ranks have agreed to stop, and `loop` is to return. Equal on every rank."""
        return self._is_set_up and self._loop.end_reason() is not None

    @property
    def parameters_being_stepped(self) -> frozenset[torch.Tensor]:
        """The parameters whose gradients `on_gradients_ready` is about: those of the optimizers that are to step.

        With several optimizers others may have gradients too, left by a loss that went through their models.
        """
        stepping = self._loop.optimizer_step.stepping
        return frozenset(p for optimizer in stepping for group in optimizer.param_groups for p in group["params"])

    @property
    def is_accumulating_gradients(self) -> bool:
        """Whether the micro-batch in hand is not the last of its update."""
        return not self._loop.optimizer_step.is_last_micro_batch

    def backward(self, loss: torch.Tensor) -> None:
        """Replaces `loss.backward()` in a `training_step` that wants to call it itself; weighs the loss.

        In an evaluation it does nothing, as `step`, so that a training step serves as a validation step.
        """
        if self.training:
            self._loop.optimizer_step.backward(loss)

    def step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Replaces `optimizer.step()` in a `training_step` that wants to call it itself.

        Returns the norm of the gradient before clipping, or None while gradients are accumulated and nothing was done.
        """
        return self._loop.optimizer_step.step(optimizer) if self.training else None

    def autocast(self) -> Any:
        """A context in which a forward pass computes in the precision of the config; steps run in one already."""
        return autocast(self.config.precision, self.device)

    def log(
        self, name: str, value: float | torch.Tensor, weight: LossWeight | None = None, *, reduce: Reduce = "mean"
    ) -> None:
        """Logs a number of this step under `train/<name>` or `validation/<name>`. On any subset of the ranks.

        Args:
            name: one name is reduced in one way for the whole run.
            value: a number or a tensor of one element, which may lie on the device: nothing waits for it.
            weight: how much it counts in a mean; by default as much as the micro-batch in hand, as what the step
                returns, and where none is in hand, between two updates, as 1.
            reduce: "mean" averages by weight over micro-batches, ranks and the interval between two records, as it is
                done with what the step returns. "sum", "max" and "min" are over the same. "last" is the latest value,
                of the first rank that has one.

        Raises:
            StepError: it is no single number, or the name is reduced in another way elsewhere.
        """
        self._loop.log(name, value, weight, reduce)

    def log_images(self, images: Mapping[str, torch.Tensor]) -> None:
        """Gives images by name, [channels, height, width], to the trackers. Every rank may; the main rank's count.

        From inside an update they are logged with the step that it completes, as numbers are.
        """
        self.callbacks.on_log_images(self, images)
        self._loop.recorder.trackers.log_images(images, step=self._loop.recorder.step)

    def add_metric_source(self, source: MetricSource) -> None:
        """Asks a function for numbers to add to every training record, under names of its own: from `on_setup_end` on.

        Args:
            source: gets the record so far, when it is due. Every rank must add the same sources in the same order: a
                source may use a collective, and what it returns must be equal on every rank.
        """
        self._loop.recorder.metric_sources.append(source)

    def log_text(self, texts: Mapping[str, str]) -> None:
        """Gives texts by name to the trackers that take them. Every rank may; the main rank's count."""
        self._loop.recorder.trackers.log_text(texts, step=self._loop.recorder.step)

    def log_histograms(self, histograms: Mapping[str, Histogram]) -> None:
        """Gives histograms by name to the trackers that take them. Every rank may; the main rank's count."""
        self._loop.recorder.trackers.log_histograms(histograms, step=self._loop.recorder.step)

    def evaluating(self) -> AbstractContextManager[None]:
        """A context for whatever looks at the models in training, as samples do: they are as in an evaluation.

        In evaluation mode, without gradients, in the precision of the config, with averages where an evaluation has
        them, and as before at the end; the time is left out of the throughput. Every rank must enter it.
        """
        return self._loop.evaluating()

    def wait_for_snapshot(self) -> None:
        """Waits until a save in the background has its copy: for whatever puts other values into a model between steps.

        Optimizer steps, evaluations and `Ema.applied` do so by themselves. Any rank may call this.
        """
        self._loop.wait_for_snapshot()

    def print(self, text: str) -> None:
        """Prints once, from the main rank, where the person is looking: also when this rank is on another machine."""
        if self.world.is_main:
            self._printer(text)

    def request_stop(self, reason: str, *, status: StopStatus = "stopped") -> None:
        """Asks for an orderly end, with a checkpoint. Any rank may, from any thread; all stop at the same update."""
        self._requests.stop(reason, status)

    def request_save(self, *, at_once: bool = False) -> None:
        """Asks for a checkpoint at the next update. Any rank may, from any thread.

        Args:
            at_once: does not wait for the end of an evaluation of the run, which begins again afterwards.
        """
        self._requests.save(at_once=at_once)

    def request_evaluation(self) -> None:
        """Asks for an evaluation at the next update. Any rank may, from any thread."""
        self._requests.evaluate()

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Returns the module that the user wrote, inside any nesting of compile, DDP, FSDP, checkpointing, averages."""
        return dtensor.unwrap(module)

    def evaluate(self, data: Any = None, *, checkpoint: str | Path | Checkpoint | None = None) -> dict[str, float]:
        """Evaluates on the validation data, or on other data (or sets by name). Every rank must call this.

        Every row counts once, at every number of ranks. Nothing is logged; works before, after and without `fit`.
        Returns nothing if a request to stop cuts it short.

        Args:
            data: instead of the validation data.
            checkpoint: whose weights to evaluate, with the averages in it where a callback such as `Ema` evaluates
                these. Nothing else is restored, and afterwards the models have the weights that they had.

        Raises:
            DataError: there is no data.
            CheckpointError: the checkpoint is not there, or not one of these models.
        """
        self.setup()
        if data is None and not self._validation:
            raise DataError(
                "there is no validation data: return (train, validation) from configure_dataloaders, or pass some"
            )
        with ExitStack() as opened:
            in_use = [each for each in (self._data, *self._validation.values()) if each is not None]
            sets = self._validation if data is None else build.open_sets(self, data, in_use=in_use)
            for stream in sets.values() if data is not None else ():
                opened.callback(stream.close)
            if checkpoint is not None:
                path = checkpoint.path if isinstance(checkpoint, Checkpoint) else str(checkpoint)
                return self._loop.evaluate_weights_of(path, sets) or {}
            self._loop.load_initial_weights()
            return self._loop.evaluate(sets) or {}

    def save_checkpoint(self) -> Checkpoint:
        """Saves the whole state. Every rank must call this, between two updates.

        Raises:
            ConfigError: the trainer has no `run_dir`, or one with checkpoints of a run that `fit` has not gone on from.
            CheckpointError: it could not be written.
        """
        self.setup()
        self._loop.begin_without_restore()
        return self._loop.save()

    def export(self, file: str | Path, *, model: str | None = None, dtype: torch.dtype | None = None) -> None:
        """Writes the weights as they are now to one safetensors file. Every rank must call this; the main one writes.

        Args:
            file: a path or fsspec URI.
            model: the attribute that holds the model; may be left out where there is one model.
            dtype: of the floating-point tensors in the file; by default as they are.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        self._export(model, dtype, str(file), lambda _, weights: write_safetensors(weights, str(file)))

    def save_pretrained(
        self, folder: str | Path, *, model: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Writes the weights as they are now to a folder, by the model's own `save_pretrained` where it has one.

        A Hugging Face model is then read by `from_pretrained`, however it was sharded. A model without the method
        becomes `model.safetensors`, with the trainer's config in `config.json`. Inside `with ema.applied():`, the
        averages are written. Every rank must call this; the main one writes.

        Args:
            folder: a path on the main rank's machine; made if it is not there.
            model: the attribute that holds the model; may be left out where there is one model.
            dtype: of the floating-point tensors in the folder; by default as they are.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        config = as_plain(self.config)
        self._export(
            model, dtype, str(folder), lambda module, weights: write_pretrained(module, weights, folder, config=config)
        )

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
        began_s = time.perf_counter()
        error: BaseException | None = None
        status: Status = "failed"
        try:
            self.activity.enter("setting up")
            pins = deterministic_mode(self.device) if self.config.exact else nullcontext()
            with pins, stop_on_signals(lambda name: self.request_stop(name, status="interrupted")):
                self._check_config()
                self.setup()
                self._report_data_guarantee()
                result = self._loop.run(resume, restore, accept_changes=accept_changes, began_s=began_s)
            status = result.status
            return result
        except BaseException as raised:
            error = raised
            if is_out_of_memory(error):
                add_memory_advice(error, self)
            raise
        finally:
            self._clean_up(error, status)

    def train_epoch(self) -> dict[str, float]:
        """Trains to the end of the epoch in progress and returns its metrics. Every rank must call this.

        Raises:
            ConfigError: `run_dir` has checkpoints of a run that `fit` has not gone on from.
        """
        self.setup()
        self._loop.begin_without_restore()
        return self._loop.train_epoch()

    def train_step(self, batch: Any) -> dict[str, float]:
        """Makes one update from one batch of this rank and returns its metrics. Every rank must call this.

        Inside `loop` it also does what is due, and returns metrics when `log_every` is due, otherwise nothing. The
        batch is none of the epoch's: the position in the training data stays.

        Raises:
            ConfigError: as `train_epoch`.
        """
        self.setup()
        self._loop.begin_without_restore()
        rows = batch_size(batch)
        return self._loop.train_step(LoadedBatch([batch], [rows], rows if self.world.size == 1 else None))

    def check(self, *, elsewhere: bool = False) -> None:
        """Refuses what is wrong with the config or the data; builds no model and reads no row. Any process may call it.

        Args:
            elsewhere: leaves the data and the device to the machines that will train.

        Raises:
            ConfigError, DataError: what is wrong.
        """
        self._check_config(elsewhere=elsewhere)
        if elsewhere:
            return
        try:
            self._open_data()
        finally:
            for stream in self._streams():
                stream.close()

    def estimate(self) -> Estimate:
        """Finds out what this training would take. Takes no memory, reads no row and needs no other rank.

        Models and optimizers are made on the meta device, and the data is opened. The trainer cannot be used for
        anything else afterwards.

        Raises:
            ConfigError, DataError: what `fit` would refuse.
        """
        self._check_config()
        self.callbacks = CallbackList((*self.configure_callbacks(), *self._given_callbacks), trainer=self)
        try:
            build.make_models(self)
            self._open_data()
            unknown = ""
            try:
                build.make_optimizers(self)
            except HeadwayError:
                raise
            except Exception as error:
                # Some want parameters that have values: fused ones, those of other packages.
                unknown = f"on the meta device configure_optimizers() raises {type(error).__name__}: {error}"
            assert self._data is not None
            return estimate_of(self, self._data, self._validation, unknown)
        finally:
            for stream in self._streams():
                stream.close()

    def setup(self) -> None:
        """Builds models, optimizers and data, once. `fit`, `evaluate` and the others call it. Every rank must."""
        if self.world.has_ended and not self._is_set_up:
            # An attempt to set up has failed, and ended the process group.
            self.world.rejoin()
        elif self.world.has_ended:
            build.rejoin_process_group(self)
        if self._is_set_up:
            return
        self.callbacks = CallbackList((*self.configure_callbacks(), *self._given_callbacks), trainer=self)
        self.callbacks.on_setup_start(self)
        # One seed for all ranks while weights are drawn, each its own afterwards.
        seed_everything(self.config.seed, rank="common")
        with self.setup_times.phase("configure"):
            build.make_models(self)
            if self.config.float8:
                convert_to_float8(self.models)
        self._born_on_meta = {name: model for name, model in self.models.items() if parallelize.on_meta(model)}
        build.parallelize_models(self, self._born_on_meta)
        # Before the optimizers: a schedule over the whole run needs to know how many steps that is.
        with self.setup_times.phase("open_data"):
            self._open_data()
            build.check_data(self, self._streams())
            if self._data is not None and self._data.guarantee != "exact":
                self._steps_on_ranks = self.world.all_gather_object(self._data.steps_in_epoch(0))
        with self.setup_times.phase("optimizers"):
            build.make_optimizers(self)
        assert self._data is not None
        self._made_loop = Loop(self, self._requests, self._data, self._validation)
        self.metrics = EvaluationMetrics(self.configure_metrics(), self.world)
        if self.config.exact:
            check_exact_metrics(self.metrics)
        trackers = self._given_trackers if self._given_trackers is not None else self.configure_trackers()
        if self.run_dir is not None and not any(isinstance(tracker, JsonlTracker) for tracker in trackers):
            # Who follows the run from outside reads this file.
            trackers = [JsonlTracker(), *trackers]
        self._loop.recorder.set_trackers(trackers if self.world.is_main else ())
        seed_everything(self.config.seed, rank=0 if self.config.exact else self.world.rank)
        if isinstance(update := self._loop.optimizer_step, ExactStep):
            self.print(update.describe())
            self.add_metric_source(update.measure)
        self._is_set_up = True
        self.callbacks.on_setup_end(self)

    def _report_data_guarantee(self) -> None:
        """Says before the first step what of its place in the data a resumed run will not find again."""
        assert self._data is not None
        if self.run_dir is None or self._data.guarantee == "exact":
            return
        again = {
            "epoch": "a resumed run begins the epoch in progress again, and may see its samples twice",
            "none": "a resumed run goes on with whatever the data gives then",
        }
        self.print(f"the training data guarantees {self._data.guarantee!r}, not 'exact': {again[self._data.guarantee]}")

    def _check_config(self, *, elsewhere: bool = False) -> None:
        config = self.config
        limits = (config.max_epochs, config.max_steps, config.max_samples, config.max_tokens)
        if all(limit is None for limit in limits):
            raise ConfigError(
                "the config does not say when to stop: set max_epochs, max_steps, max_samples or max_tokens"
            )
        if config.max_tokens is not None and not self.overrides_num_tokens:
            raise ConfigError(
                f"max_tokens={config.max_tokens} needs a trainer that counts them: {type(self).__name__} does not "
                "define num_tokens(self, batch)"
            )
        parallelize.check_strategy(self.config.parallel, self.world)
        if self.config.float8 and not elsewhere:
            check_float8(self.device)
        if self.config.exact:
            check_exact_config(self.config)

    def _open_data(self) -> None:
        self._data, self._validation = build.open_data(self)
        check_data(self.config, self._data, self._validation)

    def _steps_in_epoch(self) -> int | None:
        if self._data is None:
            return None
        # Iterables may differ in length, and an epoch ends for all ranks where the shortest does.
        each = self._steps_on_ranks or [self._data.steps_in_epoch(self.current_epoch)]
        known = [steps for steps in each if steps is not None]
        return min(known) if len(known) == len(each) else None

    def _steps_of_samples(self, steps_in_epoch: int | None) -> int | None:
        """How many updates max_samples are; all have the size of the global batch, but the tail of an epoch."""
        limit, data, size = self.config.max_samples, self._data, self.config.global_batch_size
        if limit is None or data is None:
            return None
        in_data, of_data = data.samples_in_epoch(self.current_epoch), data.steps_in_epoch(self.current_epoch)
        if size is None and in_data and of_data:
            size = math.ceil(in_data / of_data)
        if size is None:
            return None
        if steps_in_epoch is None:
            return math.ceil(limit / size)
        epochs, rest = divmod(limit, min(in_data or limit, steps_in_epoch * size))
        return epochs * steps_in_epoch + math.ceil(rest / size)

    def _streams(self) -> list[BatchStream]:
        return ([] if self._data is None else [self._data]) + list(self._validation.values())

    def _export(
        self,
        name: str | None,
        dtype: torch.dtype | None,
        where: str,
        write: Callable[[nn.Module, dict[str, torch.Tensor]], None],
    ) -> None:
        self.setup()
        self._loop.load_initial_weights()
        self._loop.optimizer_step.check_pending_norms()
        module = self.models[choose_model(name, self.models, type(self).__name__)]
        weights = gather_weights(module, self.world)
        write_on_main(self.world, where, lambda: write(module, cast_weights(weights, dtype)))

    def _clean_up(self, error: BaseException | None, status: Status) -> None:
        """Whatever happened. No collective: the other ranks may not be here."""
        self._requests.clear()
        try:
            with ExitStack() as last_first:
                if self._owns_world:
                    last_first.callback(self.world.close)
                for stream in self._streams():
                    last_first.callback(stream.close)
                if self._is_set_up:
                    last_first.callback(self._loop.recorder.finish, status)
                    last_first.callback(self._loop.clean_up)
                self.callbacks.on_fit_end(self, error)
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"besides, the clean-up failed with {type(failure).__name__}: {failure}")
