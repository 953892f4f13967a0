"""What a run offers while it trains, to callbacks and to the user's code: `Trainer` and `Session` both have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .callbacks.base import CallbackList
from .checkpoints.export import (
    cast_weights,
    choose_model,
    gather_weights,
    write_on_main,
    write_pretrained,
    write_safetensors,
)
from .checkpoints.store import Checkpoint
from .config import as_plain
from .distributed import dtensor
from .distributed.world import World
from .errors import DataError
from .loop.control import StopStatus
from .loop.engine import Engine
from .loop.progress import Progress
from .loop.steps import LossWeight
from .loop.timing import Activity, SetupTimes
from .metrics.histogram import Histogram
from .metrics.history import History
from .metrics.reductions import Reduce
from .metrics.train_log import MetricSource
from .step.precision import autocast


class ActiveRun:
    """A run as callbacks see it, whoever keeps its loop.

    Attributes:
        metrics: those of `configure_metrics`, by name; their `update` counts in evaluations.
    """

    _engine: Engine

    # ---- What it is ------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The ranks. Without one that was given, `setup` joins what `torchrun` describes, or this process is alone."""
        return self._engine.world

    @property
    def run_dir(self) -> str | None:
        """The run's directory, a path or fsspec URI; None writes nothing."""
        return self._engine.run_dir

    @property
    def attempt(self) -> int:
        """Number of this attempt at the run, from 1."""
        return self._engine.attempt

    @property
    def progress(self) -> Progress:
        """All counters."""
        return self._engine.progress

    @property
    def history(self) -> History:
        """Means over whole epochs."""
        return self._engine.history

    @property
    def callbacks(self) -> CallbackList:
        """The callbacks, bound to this run; empty before `setup`."""
        return self._engine.callbacks

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models, wrapped and sharded, by the names of the attributes that hold them."""
        return self._engine.models

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers, by the names of the attributes that hold them."""
        return self._engine.optimizers

    @property
    def schedulers(self) -> dict[str, LRScheduler]:
        """The learning rate schedulers, by the names of the attributes that hold them."""
        return self._engine.lr_stepping.schedulers

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics of `configure_metrics`, by name; their `update` counts in evaluations."""
        return self._engine.metrics

    @property
    def activity(self) -> Activity:
        """What this rank is doing right now; any thread may read it."""
        return self._engine.activity

    @property
    def setup_times(self) -> SetupTimes:
        """Seconds that each phase of getting ready has taken on this rank, up to the first update."""
        return self._engine.setup_times

    @property
    def training(self) -> bool:
        """False during an evaluation."""
        return self._engine.mode.training

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
        return self._engine.loop.recorder.elapsed_s()

    @property
    def save_took_s(self) -> float | None:
        """Seconds from the start of the last checkpoint to its commit; None before the first."""
        return self._engine.loop.save_took_s if self._engine.is_set_up else None

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run, as far as the config and the data tell; None where they do not."""
        return self._engine.total_steps

    @property
    def data_identity(self) -> dict[str, str | None]:
        """What a resumed run compares the training data by: "guarantee" and "fingerprint". Empty before it is open."""
        data = self._engine.data
        return {} if data is None else {"guarantee": data.guarantee, "fingerprint": data.fingerprint}

    @property
    def should_stop(self) -> bool:
        """Whether a limit is reached or all ranks have agreed to stop. Equal on every rank."""
        return self._engine.is_set_up and self._engine.loop.end_reason() is not None

    @property
    def parameters_being_stepped(self) -> frozenset[torch.Tensor]:
        """The parameters of the optimizers that are about to step, which `on_gradients_ready` is about.

        With several optimizers others may have gradients too, left by a loss that went through their models.
        """
        stepping = self._engine.loop.optimizer_step.stepping
        return frozenset(p for optimizer in stepping for group in optimizer.param_groups for p in group["params"])

    @property
    def is_accumulating_gradients(self) -> bool:
        """Whether the current micro-batch is not the last of its update."""
        return not self._engine.loop.optimizer_step.is_last_micro_batch

    # ---- What can be asked of it -----------------------------------------------------------------------------------

    def autocast(self) -> Any:
        """Returns a context in which a forward pass computes in the precision of the config; steps run in one."""
        return autocast(self._engine.config.precision, self.device)

    def log(
        self, name: str, value: float | torch.Tensor, weight: LossWeight | None = None, *, reduce: Reduce = "mean"
    ) -> None:
        """Logs a number of this step under `train/<name>` or `validation/<name>`. On any subset of the ranks.

        Args:
            name: one name is reduced in one way for the whole run.
            value: a number or a tensor of one element, which may be on the device: nothing waits for it.
            weight: how much it counts in a mean; by default as much as the current micro-batch, as the returned loss
                does, and 1 between two updates, where there is none.
            reduce: "mean" averages by weight over micro-batches, ranks and the interval between two records, as it is
                done with what the step returns. "sum", "max" and "min" are over the same. "last" is the latest value,
                of the first rank that has one.

        Raises:
            StepError: it is no single number, or the name is reduced in another way elsewhere.
        """
        self._engine.loop.log(name, value, weight, reduce)

    def log_images(self, images: Mapping[str, torch.Tensor]) -> None:
        """Gives images by name, [channels, height, width], to the trackers. Every rank may; the main rank's count.

        From inside an update they are logged with the step that it completes, as numbers are.
        """
        self.callbacks.on_log_images(images)
        recorder = self._engine.loop.recorder
        recorder.trackers.log_images(images, step=recorder.step)

    def log_text(self, texts: Mapping[str, str]) -> None:
        """Gives texts by name to the trackers that take them. Every rank may; the main rank's count."""
        recorder = self._engine.loop.recorder
        recorder.trackers.log_text(texts, step=recorder.step)

    def log_histograms(self, histograms: Mapping[str, Histogram]) -> None:
        """Gives histograms by name to the trackers that take them. Every rank may; the main rank's count."""
        recorder = self._engine.loop.recorder
        recorder.trackers.log_histograms(histograms, step=recorder.step)

    def add_metric_source(self, source: MetricSource) -> None:
        """Adds the numbers that a function returns to every training record: from `on_setup_end` on.

        Args:
            source: gets the record so far, when it is due. Every rank must add the same, in the same order: a source
                may use a collective, and what it returns must be equal on every rank.
        """
        self._engine.loop.recorder.metric_sources.append(source)

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context in which the models are as in an evaluation, for example to draw samples from them.

        In evaluation mode, without gradients, in the precision of the config, with averages where an evaluation has
        them, and as before at the end; the time is left out of the throughput. Every rank must enter it.
        """
        return self._engine.loop.evaluating()

    def wait_for_snapshot(self) -> None:
        """Waits until a save in the background has its copy: call it before changing weights between two steps.

        Optimizer steps, evaluations and `Ema.applied` do so by themselves. Any rank may call this.
        """
        self._engine.loop.wait_for_snapshot()

    def print(self, text: str) -> None:
        """Print once, from the main rank, on the console from which the run was started; also from another machine.

        The text is an INFO record of the logger `headway.run`, too.
        """
        self._engine.print(text)

    def request_stop(self, reason: str, *, status: StopStatus = "stopped") -> None:
        """Asks for an orderly end, with a checkpoint. Any rank may, from any thread; all stop at the same update."""
        self._engine.requests.stop(reason, status)

    def request_save(self, *, at_once: bool = False) -> None:
        """Asks for a checkpoint at the next update. Any rank may, from any thread.

        Args:
            at_once: does not wait for the end of an evaluation of the run, which is repeated afterwards.
        """
        self._engine.requests.save(at_once=at_once)

    def request_evaluation(self) -> None:
        """Asks for an evaluation at the next update. Any rank may, from any thread."""
        self._engine.requests.evaluate()

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
        engine = self._engine
        engine.setup()
        if data is None and not engine.validation:
            raise DataError(
                "there is no validation data: return (train, validation) from configure_dataloaders, or pass some"
            )
        with ExitStack() as opened:
            sets = engine.validation if data is None else engine.open_sets(data)
            for stream in sets.values() if data is not None else ():
                opened.callback(stream.close)
            if checkpoint is not None:
                path = checkpoint.path if isinstance(checkpoint, Checkpoint) else str(checkpoint)
                return engine.loop.evaluate_weights_of(path, sets) or {}
            engine.loop.load_initial_weights()
            return engine.loop.evaluate(sets) or {}

    def save_checkpoint(self) -> Checkpoint:
        """Saves the whole state. Every rank must call this, between two updates.

        Raises:
            ConfigError: there is no `run_dir`, or it has checkpoints of a run that has not been restored.
            CheckpointError: it could not be written.
        """
        self._engine.setup()
        self._engine.loop.begin_without_restore()
        return self._engine.loop.save()

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
        becomes `model.safetensors`, with the config in `config.json`. Inside `with ema.applied():`, the averages are
        written. Every rank must call this; the main one writes.

        Args:
            folder: a path on the main rank's machine; created if needed.
            model: the attribute that holds the model; may be left out where there is one model.
            dtype: of the floating-point tensors in the folder; by default as they are.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        config = as_plain(self._engine.config)
        self._export(
            model, dtype, str(folder), lambda module, weights: write_pretrained(module, weights, folder, config=config)
        )

    def _export(
        self,
        name: str | None,
        dtype: torch.dtype | None,
        target: str,
        write: Callable[[nn.Module, dict[str, torch.Tensor]], None],
    ) -> None:
        engine = self._engine
        engine.setup()
        engine.loop.load_initial_weights()
        engine.loop.optimizer_step.check_pending_norms()
        module = self.models[choose_model(name, self.models, engine.context.name)]
        weights = gather_weights(module, self.world)
        write_on_main(self.world, target, lambda: write(module, cast_weights(weights, dtype)))
