"""One evaluation: every row counted once, over all ranks, and the models left as they were."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .errors import DataError, StepError
from .loaders import LoadedBatch
from .metrics import MeanMetrics
from .nested import move
from .precision import autocast
from .requests import Requests
from .streams import BatchStream, GlobalBatch
from .world import World

if TYPE_CHECKING:
    from .trainer import Trainer


def evaluate(
    trainer: Trainer[Any], stream: BatchStream, metrics: MeanMetrics, requests: Requests
) -> dict[str, float] | None:
    """Runs `validation_step` over a stream and returns the means, equal on every rank. Every rank must call this.

    An evaluation that a request to stop cuts short returns None, rather than the metrics of a part of the data.

    Raises:
        DataError: the data has no rows.
        StepError: a step returned neither a tensor nor a dict.
    """
    num_batches = 0
    weighs_itself = trainer.weighs_itself
    with evaluating(trainer), closing(_in_step(stream, trainer.world)) as batches:
        trainer.callbacks.on_evaluation_start(trainer)
        for batch in batches:
            for micro_batch, num_samples in zip(batch.micro_batches, batch.num_samples, strict=True):
                if trainer.device.type != "cpu":
                    micro_batch = move(micro_batch, trainer.device)
                trainer.callbacks.on_evaluation_batch_start(trainer, micro_batch, num_batches)
                with autocast(trainer.config.precision, trainer.device):
                    outputs = trainer.validation_step(micro_batch, num_batches)
                if isinstance(outputs, torch.Tensor):
                    outputs = {"loss": outputs}
                if not isinstance(outputs, Mapping):
                    raise StepError(
                        f"validation_step of {type(trainer).__name__} returned "
                        f"{'nothing' if outputs is None else f'a {type(outputs).__name__}'}; it must return the "
                        "loss, or a dict of numbers, which may be empty"
                    )
                if num_samples:
                    metrics.add(
                        outputs, trainer.loss_weight(micro_batch) if weighs_itself else num_samples, "validation/"
                    )
                trainer.callbacks.on_evaluation_batch_end(trainer, outputs, micro_batch, num_batches)
                num_batches += 1
            agreed = requests.agree(often=True)
            if agreed.evaluate:
                requests.evaluate()
            if agreed.save:
                requests.save()
            if agreed.stop:
                return None
        if num_batches == 0:
            raise DataError(
                "the validation data has no batches, or was an iterator that has run out; return (train, None) to "
                "train without"
            )
        result = metrics.read(trainer.world)
    trainer.callbacks.on_evaluation_end(trainer, result)
    return result


def _in_step(stream: BatchStream, world: World) -> Generator[GlobalBatch, None, None]:
    """Yields equally many batches on every rank: a rank that has run out repeats its last, which then counts nothing.

    Raises:
        DataError: a rank has no batch to repeat.
    """
    must_agree = world.size > 1 and stream.guarantee != "exact"
    iterator = stream.epoch(0)
    last: GlobalBatch | None = None
    try:
        while True:
            batch = next(iterator, None)
            if must_agree and world.any(batch is not None):
                if last is None and world.any(batch is None):
                    raise DataError("the validation data of some rank has no batches, and that of another has")
                if batch is None and last is not None:
                    batch = LoadedBatch(last.micro_batches, [0] * len(last.micro_batches), None)
            if batch is None:
                return
            last = batch
            yield batch
    finally:
        if (close := getattr(iterator, "close", None)) is not None:
            close()


@contextmanager
def evaluating(trainer: Trainer[Any]) -> Iterator[None]:
    """Puts the models in evaluation mode, without gradients, and every module back as it was, whatever happens.

    The contexts of the callbacks are entered last and left first.
    """
    modes = [(module, module.training) for model in trainer.models.values() for module in model.modules()]
    for model in trainer.models.values():
        model.eval()
    trainer.training = False
    try:
        with torch.no_grad(), trainer.callbacks.evaluation_context(trainer):
            yield
    finally:
        trainer.training = True
        for module, mode in modes:
            module.training = mode
