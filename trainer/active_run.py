"""The interface of a run in progress for callbacks and user code, shared by `Trainer` and `Session`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .callbacks.base import CallbackList
from .checkpoints.collective_errors import on_main
from .checkpoints.export import (
    cast_weights,
    choose_model,
    gather_weights,
    write_pretrained,
    write_safetensors,
)
from .checkpoints.store import Checkpoint
from .config import as_plain
from .data.protocols import HasOrder
from .distributed import dtensor
from .distributed.mesh import Mesh
from .distributed.world import World
from .errors import ConfigError, DataError, StepError
from .loop.control import StopStatus
from .loop.engine import Engine
from .loop.progress import Progress
from .loop.steps import LossWeight
from .loop.timing import Activity, SetupTimes
from .metrics.histogram import Histogram
from .metrics.history import History
from .metrics.reductions import Reduce
from .metrics.train_log import MetricSource
from .setup.class_check import advice_on_attribute
from .setup.pretrained import load_safetensors
from .step.precision import autocast
from .trackers.images import as_tensor


class ActiveRun:
    """A run as callbacks see it; base class of `Trainer` and `Session`."""

    _engine: Engine
    _is_session = False

    if not TYPE_CHECKING:
        # Hidden from type checkers, for which every attribute would exist.
        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name == "_engine":
                raise ConfigError(
                    f"{kind}.__init__ does not call super().__init__(config, ...): call it first, and pass on the "
                    "keyword arguments"
                )
            engine = vars(self).get("_engine")
            fields = () if engine is None else engine.config.__dataclass_fields__
            hint = ""
            if (advice := advice_on_attribute(name, fields, in_session=self._is_session)) is not None:
                hint = f": {advice}"
            elif engine is not None and not engine.is_set_up:
                begins = "in the `with` block" if self._is_session else "after setup(), which fit() calls"
                hint = f" yet: models, optimizers and data exist {begins}"
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    # ---- State -----------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The ranks. By default, `setup` joins those that `torchrun` describes, or takes this process alone."""
        return self._engine.world

    @property
    def mesh(self) -> Mesh:
        """The arrangement of the ranks: which read different rows, average gradients, or divide layers."""
        return self._engine.context.mesh

    @property
    def run_dir(self) -> str | None:
        """The run's directory, a path or fsspec URI; None if nothing is written."""
        return self._engine.run_dir

    @property
    def attempt(self) -> int:
        """Number of this attempt at the run, from 1."""
        return self._engine.attempt

    @property
    def progress(self) -> Progress:
        """The run's counters."""
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
        """This rank's current phase; any thread may read it."""
        return self._engine.activity

    @property
    def setup_times(self) -> SetupTimes:
        """Seconds of each setup phase on this rank, up to and including the first update."""
        return self._engine.setup_times

    @property
    def training(self) -> bool:
        """False during an evaluation."""
        return self._engine.mode.training

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device

    @property
    def global_step(self) -> int:
        """Optimizer updates over all attempts."""
        return self.progress.step

    @property
    def current_epoch(self) -> int:
        """Completed passes over the data, which is the index of the one in progress."""
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
        return self._engine.loop.saver.took_s if self._engine.is_set_up else None

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run; None if config and data do not determine it."""
        return self._engine.total_steps

    @property
    def data_identity(self) -> dict[str, Any]:
        """The training data's "guarantee" and "fingerprint", which a resumed run compares; empty before it is open.

        Also "changes", if the run has changed the order of the data: a line for each.
        """
        data = self._engine.data
        if data is None:
            return {}
        order = data.order if isinstance(data, HasOrder) else None
        changes = {"changes": list(order["changes"])} if order and order["changes"] else {}
        return {"guarantee": data.guarantee, "fingerprint": data.fingerprint, **changes}

    @property
    def should_stop(self) -> bool:
        """Whether a limit is reached or all ranks have agreed to stop. Equal on every rank."""
        return self._engine.is_set_up and self._engine.loop.end_reason() is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        raise StepError("should_stop cannot be set, because all ranks must agree: call request_stop(reason)")

    @property
    def parameters_being_stepped(self) -> frozenset[torch.Tensor]:
        """The parameters of the optimizers that are about to step, for `on_gradients_ready`.

        With several optimizers, other parameters may have gradients too, from a loss that went through their models.
        """
        stepping = self._engine.loop.optimizer_step.stepping
        return frozenset(p for optimizer in stepping for group in optimizer.param_groups for p in group["params"])

    @property
    def is_accumulating_gradients(self) -> bool:
        """Whether the current micro-batch is not the last of its update."""
        return not self._engine.loop.optimizer_step.is_last_micro_batch

    # ---- Actions ---------------------------------------------------------------------------------------------------

    def autocast(self) -> Any:
        """Return a context for forward passes in the config's precision. Training and validation steps run in one."""
        return autocast(self._engine.config.precision, self.device)

    def log(
        self,
        name: str,
        value: float | torch.Tensor,
        weight: LossWeight | None = None,
        *,
        reduce: Reduce = "mean",
        **unexpected: Any,
    ) -> None:
        """Log a number of this step as `train/<name>` or `validation/<name>`. Any subset of the ranks may call this.

        Args:
            name: the metric; always use the same `reduce` for it.
            value: a number or a tensor with one element. It may be on the device: logging does not synchronize.
            weight: in a mean; by default that of the current micro-batch, as for the returned loss, and 1 between two
                updates.
            reduce: "mean" is the weighted mean over micro-batches, ranks and the interval between two records, as for
                values that the step returns. "sum", "max" and "min" reduce over the same. "last" is the latest value
                of the lowest rank that has one.
            unexpected: must be empty.

        Raises:
            StepError: the value is not a single number, or the name is logged elsewhere with another `reduce`; or
                there is an unexpected argument, such as Lightning's `prog_bar`.
        """
        if unexpected:
            raise StepError(
                f"log() has no argument {', '.join(unexpected)}: values are averaged over ranks and the interval "
                "config.log_every, shown in the progress display and written to every tracker; reduce= changes the "
                "average to a sum, max, min or the last value"
            )
        if not isinstance(name, str):
            raise StepError(f"log() takes a name and a number, got {name!r:.80}: call it once for each number")
        self._engine.loop.log(name, value, weight, reduce)

    def log_by_source(self, loss: torch.Tensor, source: torch.Tensor, *, tokens: torch.Tensor | None = None) -> None:
        """Log the loss and the number of tokens of each source of a `Mixture`. Any subset of the ranks may call this.

        They are `train/loss/<source>` and `train/tokens/<source>`, or `validation/...`, over all ranks and the interval
        between two records. Sources without a row in it are left out. It does not synchronize with the device, and
        costs the same for two sources and for a hundred.

        Args:
            loss: shape [B], the mean loss of each row.
            source: shape [B], the column `source` of the batch.
            tokens: shape [B], over how many tokens each loss is a mean; rows with 0 are ignored. Without it each row
                counts 1, and their number is `train/rows/<source>`.

        Raises:
            StepError: the data is not a `Stream` of a `Mixture`, or the shapes are wrong.
        """
        self._engine.loop.log_by_source(loss, source, tokens)

    def log_images(self, images: Mapping[str, Any]) -> None:
        """Log images by name. Any rank may call this; the main rank's are logged.

        Inside an update they are logged with the step that it completes, as numbers are.

        Args:
            images: each a tensor [channels, height, width], uint8 or floating-point from 0 to 1, or a PIL image.
        """
        images = {name: as_tensor(image) for name, image in images.items()}
        self.callbacks.on_log_images(images)
        recorder = self._engine.loop.recorder
        recorder.trackers.log_images(images, step=recorder.step)

    def log_text(self, texts: Mapping[str, str]) -> None:
        """Log texts by name, to trackers that support them. Any rank may call this; the main rank's are logged."""
        recorder = self._engine.loop.recorder
        recorder.trackers.log_text(texts, step=recorder.step)

    def log_histograms(self, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms by name, to trackers that support them. Any rank may call this; the main rank's are logged."""
        recorder = self._engine.loop.recorder
        recorder.trackers.log_histograms(histograms, step=recorder.step)

    def add_metric_source(self, source: MetricSource) -> None:
        """Add the metrics that a function returns to every training record. Call it in `on_setup_end` or later.

        Every rank must add the same sources in the same order, since a source may use collectives.

        Args:
            source: called with each record before it is logged; must return the same metrics on every rank.
        """
        self._engine.loop.recorder.metric_sources.append(source)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the models are as in an evaluation, for example to sample from them.

        They are in evaluation mode, without gradients, in the config's precision, and have averaged weights if
        evaluations use these; all is restored at the end. The time does not count in the throughput. Every rank must
        enter the context.
        """
        return self._engine.loop.evaluating()

    def wait_for_snapshot(self) -> None:
        """Wait until a background save has copied the state: call it before changing weights between two steps.

        Optimizer steps, evaluations and `Ema.applied` call it themselves. Any rank may call this.
        """
        self._engine.loop.saver.wait_for_snapshot()

    def print(self, *values: object) -> None:
        """Print values as `print` does, but once, from the main rank, on the console from which the run was started.

        That console may be on another machine. The text is an INFO record of the logger `headway.run`, too.
        """
        self._engine.print(" ".join(str(value) for value in values))

    def request_stop(self, reason: str, *, status: StopStatus = "stopped") -> None:
        """Request an orderly stop with a checkpoint, at the same update on all ranks. Any rank may, from any thread."""
        self._engine.requests.stop(reason, status)

    def request_save(self, *, at_once: bool = False) -> None:
        """Request a checkpoint at the next update. Any rank may call this, from any thread.

        Args:
            at_once: interrupts an evaluation in progress, which is repeated after the save.
        """
        self._engine.requests.save(at_once=at_once)

    def request_evaluation(self) -> None:
        """Request an evaluation at the next update. Any rank may call this, from any thread."""
        self._engine.requests.evaluate()

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module, without the wrappers of compile, DDP, FSDP, checkpointing and weight averages."""
        return dtensor.unwrap(module)

    def evaluate(self, data: Any = None, *, checkpoint: str | Path | Checkpoint | None = None) -> dict[str, float]:
        """Evaluate and return the metrics. Every rank must call this.

        Every row counts once, for any number of ranks. Nothing is logged. Works before, after and without `fit`.

        Args:
            data: data, or several sets by name, to use instead of the validation data.
            checkpoint: evaluates its weights, or its averaged weights if a callback such as `Ema` evaluates these.
                Nothing else is restored, and the models keep their own weights.

        Returns:
            The metrics, equal on every rank; empty if a stop request interrupts the evaluation.

        Raises:
            DataError: there is no data.
            CheckpointError: the checkpoint does not exist, or does not fit these models.
        """
        engine = self._engine
        engine.setup()
        if data is None and not engine.validation:
            raise DataError(
                "there is no validation data: return (train, validation) from configure_dataloaders, or pass data=..."
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

    def save_checkpoint(self, path: str | Path | None = None) -> Checkpoint:
        """Save the whole state and wait until it is written. Every rank must call this, between two updates.

        Args:
            path: a path or fsspec URI, which all ranks share, for a checkpoint outside of `run_dir`: a folder that is
                created, or replaced if it is a checkpoint. No rule deletes it, the run does not resume from it by
                itself, and `on_checkpoint_saved` is not called. By default it is one of the run's own.

        Returns:
            The checkpoint; its `path` works in `fit(resume=...)`, `init_from`, `load_weights` and `evaluate`.

        Raises:
            ConfigError: without `path`, there is no `run_dir`, or it has checkpoints of a run that has not been
                restored; or `path` is among these.
            CheckpointError: the checkpoint could not be written, or `path` exists and is not a checkpoint.
        """
        self._engine.setup()
        if path is not None:
            self._engine.loop.load_initial_weights()
            return self._engine.loop.saver.save_to(str(path))
        self._engine.loop.begin_without_restore()
        return self._engine.loop.saver.save()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the whole state of this rank in host memory. Every rank must call this, between two updates.

        It has all that a checkpoint has: models, optimizers, schedulers, loss scaler, callbacks, counters, the position
        in the data and random states; of sharded tensors, this rank's shards. Only `load_state_dict` understands it.
        Its type is a dict of tensors and plain values, which `torch.save` can write; a checkpoint that any number of
        ranks can read is `save_checkpoint(path)`.

        Raises:
            CheckpointError: a callback's state has something other than plain values and tensors.
        """
        self._engine.setup()
        return self._engine.loop.capture()

    def load_state_dict(self, state_dict: Mapping[str, Any], /, *, accept_changes: bool = False) -> None:
        """Restore what `state_dict` returned on this rank. Every rank must call this, outside of a run.

        Training then continues from there, as from a checkpoint: `fit` does not look for one. The state does not change
        and can be loaded again, also by another trainer of the same class.

        Args:
            state_dict: what `state_dict` returned.
            accept_changes: loads it even if the config or the samples per update differ, as for `Trainer.fit`.

        Raises:
            ConfigError: a run is in progress, or `run_dir` has checkpoints of a run that has not been restored.
            ResumeError, DataError: the state is that of another rank, config or data.
            CheckpointError: it does not fit the models, optimizers or callbacks, or was sharded in another way.
        """
        self._engine.setup()
        self._engine.loop.load_captured(state_dict, accept_changes=accept_changes)

    def load_pretrained(self, source: str | Path, *, model: str | None = None, skip: Sequence[str] = ()) -> None:
        """Copy weights from safetensors files into a model; each rank reads only its shards. Call it in `init_weights`.

        The model is then created on the meta device, sharded, and filled without a whole copy on any rank. Weights that
        the files do not have, such as computed buffers, must be set before. Any rank may call this, without others.

        Args:
            source: a `.safetensors` file, or a folder as `save_pretrained` of Hugging Face writes it; a local path.
            model: the attribute that holds the model; optional with a single model.
            skip: shell patterns over names of weights that may be missing on either side, such as ("lm_head.*",).

        Raises:
            CheckpointError: there are no such files; or names or shapes differ.
        """
        name = choose_model(model, self.models, self._engine.context.name)
        load_safetensors(self.models[name], source, skip=skip)

    def export(self, file: str | Path, *, model: str | None = None, dtype: torch.dtype | None = None) -> None:
        """Write the current weights to one safetensors file, from the main rank. Every rank must call this.

        Args:
            file: a path or fsspec URI.
            model: the attribute that holds the model; optional with a single model.
            dtype: of the floating-point tensors in the file; by default that of the weights.

        Raises:
            CheckpointError: the file could not be written; raised on every rank.
        """
        self._export(model, dtype, str(file), lambda _, weights: write_safetensors(weights, str(file)))

    def save_pretrained(
        self, folder: str | Path, *, model: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Write the current weights to a folder, from the main rank. Every rank must call this.

        A model with its own `save_pretrained`, such as Hugging Face's, is written by it, and `from_pretrained`
        reads it however it was sharded. Any other model is written as `model.safetensors`, with the config in
        `config.json`. Inside `with ema.applied():`, the averages are written.

        Args:
            folder: a path on the main rank's machine; created if needed.
            model: the attribute that holds the model; optional with a single model.
            dtype: of the floating-point tensors in the folder; by default that of the weights.

        Raises:
            CheckpointError: the folder could not be written; raised on every rank.
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
        on_main(self.world, f"write {target}", lambda: write(module, cast_weights(weights, dtype)))
