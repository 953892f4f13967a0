"""From what the `configure_` methods of a trainer describe to models, data and optimizers that are ready to train."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoints.model_state import OptimizerState
from ..config import as_plain
from ..data.protocols import BatchStream, ShardInfo
from ..data.streams import as_stream
from ..distributed import parallelize
from ..distributed.parallelize import named_tensors
from ..errors import ConfigError
from ..exact.checks import check_exact_data, check_exact_models
from ..exact.determinism import hardware_fingerprint
from ..loop.run_state import versions
from ..step.lr_stepping import check_intervals
from . import weight_init
from .freezing import freeze
from .rank_consistency import check_agreement, check_weights, code_digests, shapes

if TYPE_CHECKING:
    from ..trainer import Trainer

T = TypeVar("T")


def make_models(trainer: Trainer[Any]) -> None:
    """Makes the models on the meta device, as far as that goes without other ranks.

    Raises:
        ConfigError: there is no model, two of them share a weight that neither has alone, or the config does not fit.
    """
    with torch.device("meta"):
        trainer.configure_models()
    trainer.models = _without_submodules(
        {name: each for name, each in _attributes(trainer, nn.Module).items() if _has_state(each)}
    )
    if not trainer.models:
        raise ConfigError(
            f"configure_models() of {type(trainer).__name__} set no module as an attribute: self.model = ..."
        )
    trainer.callbacks.on_models_configured(trainer)
    # A callback may have put another model in the place of one.
    trainer.models = {name: getattr(trainer, name) for name in trainer.models}
    freeze(trainer.models, trainer.config.freeze)
    parallelize.check_modules(trainer.models, trainer.config.parallel)
    if trainer.config.exact:
        check_exact_models(trainer.models)


def parallelize_models(trainer: Trainer[Any], born_on_meta: Mapping[str, nn.Module]) -> None:
    """Shards, materialises, initialises and replicates the models, in place. Every rank must call this.

    Args:
        trainer: with its models.
        born_on_meta: those of them that have no weights yet.

    Raises:
        ConfigError: the ranks have other models, configs, versions or code, or a weight has no value.
    """
    config, world = trainer.config, trainer.world
    facts = {
        "config": as_plain(config),
        "run_dir": trainer.run_dir,
        "models": shapes(trainer.models),
        "versions": versions(),
        "code": code_digests(type(trainer), trainer.models) if world.size > 1 else {},
    }
    if config.exact:
        facts["exact"] = hardware_fingerprint(world.device)
    times = trainer.setup_times
    with times.phase("parallelise"):
        # Before the first of the collectives that would wait, or mix up weights, where models differ.
        check_agreement(world, facts)
        for model in trainer.models.values():
            parallelize.shard(model, config.parallel, precision=config.precision, world=world)
    if born_on_meta:
        with times.phase("initialise"):
            weight_init.initialise_weights(born_on_meta, trainer.init_weights)
    with times.phase("parallelise"):
        check_weights(world, trainer.models)
        for name, model in trainer.models.items():
            if config.exact:
                parallelize.broadcast_weights(model, world)
            else:
                _set_model(trainer, name, parallelize.replicate(model, config.parallel, world))


def rejoin_process_group(trainer: Trainer[Any]) -> None:
    """Goes on after a `fit`, which has ended the process group that the trainer began. Every rank must call this.

    Raises:
        ConfigError: a model is sharded, and cannot.
    """
    for model in trainer.models.values():
        # Before the first collective: all ranks raise, or none does.
        parallelize.check_unsharded(model)
    trainer.world.rejoin()
    trainer._loop.rejoin()
    for name, model in trainer.models.items():
        _set_model(trainer, name, parallelize.rewrap_ddp(model, trainer.config.parallel, trainer.world))


def make_optimizers(trainer: Trainer[Any]) -> None:
    """Makes optimizers and schedulers over the models' parameters.

    Raises:
        ConfigError: there is no optimizer, one holds a parameter of none of the models, or a scheduler never moves.
    """
    trainer.configure_optimizers()
    trainer.optimizers = _attributes(trainer, Optimizer)
    for name, optimizer in trainer.optimizers.items():
        # Now, and not at the first save: what is in no model is neither averaged over the ranks nor saved.
        OptimizerState(trainer.models, name, optimizer)
    trainer.schedulers = _outermost(_attributes(trainer, LRScheduler))
    check_intervals(trainer)
    if not trainer.optimizers:
        raise ConfigError(f"configure_optimizers() of {type(trainer).__name__} set no optimizer: self.optimizer = ...")


def open_data(trainer: Trainer[Any]) -> tuple[BatchStream, dict[str, BatchStream]]:
    """Opens the training data and the sets of validation data by name.

    Raises:
        ConfigError, DataError: it is no data, empty, or does not fit the batch sizes.
    """
    loaders = trainer.configure_dataloaders()
    train, validation = loaders if isinstance(loaders, tuple) and len(loaders) == 2 else (loaders, None)
    data = _open(trainer, train, training=True, in_use=())
    sets = {} if validation is None else open_sets(trainer, validation, in_use=[data])
    if trainer.config.exact:
        check_exact_data(data, sets, trainer.world)
    return data, sets


def open_sets(trainer: Trainer[Any], data: Any, *, in_use: Sequence[BatchStream]) -> dict[str, BatchStream]:
    """Opens validation data: one set, whose name is "", or several by name; copies of streams that are in use.

    Raises:
        ConfigError, DataError: it is no data, empty, or called by no name.
    """
    sets = data if isinstance(data, Mapping) else {"": data}
    if not all(isinstance(name, str) and (name or sets is not data) for name in sets):
        raise ConfigError(f"sets of validation data are called by text, not by {', '.join(map(repr, sets))}")
    return {
        name: _open(trainer, each, training=False, in_use=in_use) for name, each in sets.items() if each is not None
    }


def check_data(trainer: Trainer[Any], streams: Sequence[BatchStream]) -> None:
    """Makes sure that all ranks have opened the same data. Every rank must call this.

    Raises:
        ConfigError: they have not. Iterables of their own may have any length.
    """
    facts = [
        (each.guarantee, each.fingerprint, each.steps_in_epoch(0) if each.guarantee == "exact" else None)
        for each in streams
    ]
    check_agreement(trainer.world, {"data": facts})


def _open(trainer: Trainer[Any], data: Any, *, training: bool, in_use: Sequence[BatchStream]) -> BatchStream:
    config = trainer.config
    stream = as_stream(data)
    if any(stream is each for each in in_use):
        # A stream is opened once: opened for an evaluation, it would no longer be what the training reads.
        stream = copy.copy(stream)
    stream.setup(
        ShardInfo(
            rank=trainer.world.rank,
            world_size=trainer.world.size,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed,
            device=trainer.device,
            training=training,
            by_shard=config.exact,
        )
    )
    return stream


def _attributes(trainer: Trainer[Any], kind: type[T]) -> dict[str, T]:
    """What a `configure_` method has set, by name. A name with an underscore is nobody's business."""
    return {name: each for name, each in vars(trainer).items() if isinstance(each, kind) and not name.startswith("_")}


def _without_submodules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Leaves out what lies inside another model and is born with it, as an encoder that a second attribute names."""
    born = {name: {id(each): path for path, each in named_tensors({name: model})} for name, model in models.items()}
    parts = {
        name
        for name, model in models.items()
        for other in models.values()
        if other is not model and parallelize.on_meta(model) and any(each is model for each in other.modules())
    }
    whole = {name: model for name, model in models.items() if name not in parts}
    for (one, first), (other, second) in itertools.combinations(whole.items(), 2):
        shared = born[one].keys() & born[other].keys()
        if shared and first is not second and parallelize.on_meta(first) and parallelize.on_meta(second):
            raise ConfigError(
                f"{one} and {other} share {born[one][min(shared, key=list(born[one]).index)]}, and each would be given "
                "memory, and spread over the ranks, by itself: make them parts of one module, such as an "
                "nn.ModuleDict, and set that one as the attribute"
            )
    return whole


def _outermost(schedulers: Mapping[str, LRScheduler]) -> dict[str, LRScheduler]:
    """Leaves out those inside another, as in a `SequentialLR`, which steps and saves them itself."""
    held: Iterable[LRScheduler] = schedulers.values()
    inside: set[LRScheduler] = set()
    while held := [inner for each in held for inner in getattr(each, "_schedulers", ())]:
        inside.update(held)
    return {name: each for name, each in schedulers.items() if each not in inside}


def _set_model(trainer: Trainer[Any], name: str, model: nn.Module) -> None:
    trainer.models[name] = model
    setattr(trainer, name, model)


def _has_state(module: nn.Module) -> bool:
    """Whether there is anything to train, move or save in a module; a loss function has nothing."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
