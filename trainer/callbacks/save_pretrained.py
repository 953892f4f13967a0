"""Write a Hugging Face folder into each checkpoint, in the background, from the files of the checkpoint."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.export import PRETRAINED, add_pretrained, choose_model
from ..checkpoints.format.manifest import Checkpoint, CheckpointWarning
from ..checkpoints.store import CheckpointStore
from ..distributed.dtensor import unwrap
from ..distributed.world import World
from ..errors import ConfigError
from ..worker_thread import WorkerThread
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class SavePretrained(Callback):
    """Writes what `from_pretrained` reads into the folder `pretrained` of each checkpoint of the run.

    A thread of the main rank reads a checkpoint that is complete, gathers its weights in host memory and calls the
    model's `save_pretrained`, while training continues. It works with every strategy, since no other rank takes part.
    The folder is deleted with its checkpoint. The end of the run waits for the last one. A failure is a warning. If a
    run is killed, its last checkpoint may lack the folder; `export_pretrained` writes it.

    Args:
        others: objects with their own `save_pretrained(folder)` for the same folder, such as the tokenizer.
        only_best: only for a checkpoint that is the best so far by `checkpoint.monitor`.
        model: the attribute that holds the model; optional with a single model.
        ema: writes the averages of the callback `Ema` in place of the weights, as in `load_weights`.
        dtype: of the floating-point tensors in the folder; by default that of the checkpoint.

    Raises:
        ConfigError: at setup: the trainer has no `run_dir`, or the model or one of `others` no `save_pretrained`.

    Example:
        >>> trainer = Digits(config, run_dir="runs/digits", callbacks=[SavePretrained(only_best=True)])
    """

    def __init__(
        self,
        *others: Any,
        only_best: bool = False,
        model: str | None = None,
        ema: bool | str = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._others, self._only_best, self._ema, self._dtype = others, only_best, ema, dtype
        self._model = model
        self._thread = WorkerThread("headway-pretrained")
        self._written: list[tuple[Checkpoint, Future[None]]] = []

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Check that there is something to write, and a place for it."""
        if trainer.run_dir is None:
            raise ConfigError("run_dir is not set, and SavePretrained writes into its checkpoints: pass it")
        name = choose_model(self._model, trainer.models, type(trainer).__name__)
        for each in (unwrap(trainer.models[name]), *self._others):
            if not callable(getattr(each, "save_pretrained", None)):
                raise ConfigError(
                    f"SavePretrained needs save_pretrained(folder), as Hugging Face's models and tokenizers have it, "
                    f"and {type(each).__name__} has none: leave it out; for plain weights there is export_safetensors"
                )

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Checkpoint) -> None:
        """Start to write the folder."""
        if not trainer.world.is_main:
            return
        self._warn_of_failures()
        module = unwrap(trainer.models[choose_model(self._model, trainer.models, "the trainer")])
        config = trainer.config.checkpoint

        def write() -> None:
            if self._only_best and not _is_best(checkpoint, monitor=config.monitor, mode=config.mode):
                return
            add_pretrained(
                checkpoint.path, module, others=self._others, model=self._model, ema=self._ema, dtype=self._dtype
            )

        self._written.append((checkpoint, self._thread.submit(write, Future())))

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Wait for the last folder."""
        for _, written in self._written:
            written.exception()
        self._warn_of_failures()

    def _warn_of_failures(self) -> None:
        done, self._written = (
            [each for each in self._written if each[1].done()],
            [each for each in self._written if not each[1].done()],
        )
        for checkpoint, written in done:
            if (error := written.exception()) is not None:
                warnings.warn(
                    f"{checkpoint.path} is saved, but its folder {PRETRAINED!r} could not be written "
                    f"({type(error).__name__}: {error})",
                    CheckpointWarning,
                    stacklevel=2,
                )


def _is_best(checkpoint: Checkpoint, *, monitor: str, mode: Any) -> bool:
    folder = checkpoint.path.rpartition("/")[0]
    store = CheckpointStore(folder, world=World.single("cpu"), monitor=monitor, mode=mode)
    store.began_after = checkpoint.meta.get("began_after", 0)
    best = store.best()
    return best is not None and best.path == checkpoint.path
