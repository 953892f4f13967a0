"""Builds models, data and optimizers from the user's `configure_` methods, ready to train."""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..callbacks.base import Callback, PlainFunction
from ..checkpoints.model_state import OptimizerState
from ..checkpoints.rng import seed_everything
from ..config import as_plain
from ..data.protocols import BatchStream, ShardInfo, is_stream
from ..data.streams import as_stream
from ..distributed import parallelize
from ..distributed.dtensor import is_sharded
from ..distributed.fsdp import gather_in_methods
from ..distributed.parallelize import named_tensors
from ..distributed.tensor_parallel import Plan, divide_layers
from ..distributed.world import World
from ..errors import ConfigError, HeadwayError
from ..exact.numerics import Numerics
from ..loop.context import RunContext
from ..loop.run_state import versions
from ..loop.steps import Steps
from ..loop.timing import Activity, Phase
from ..private_torch import inner_schedulers
from ..step.evaluation_weights import set_training_mode
from ..step.lr_stepping import Interval
from ..trackers.base import Tracker
from . import weight_init
from .freezing import call_own_train, freeze
from .rank_consistency import check_agreement, check_weights, code_digests, shapes
from .scheduler_checks import check_schedulers, check_schedulers_of_other_classes
from .value_tracking import ValueTracker

T = TypeVar("T")

_STEP_PHASES: tuple[Phase, ...] = ("forward", "evaluation", "around an evaluation")
"""The phases in which every rank calls the model."""


class Program(Steps, Protocol):
    """The user's code: steps, and methods that create models, optimizers and data. `Trainer` implements it.

    The `configure_` methods may set attributes, return objects, or both: see `collect`.
    """

    overrides_init_weights: bool
    overrides_loss_scaler: bool
    may_keep_gradients: bool
    scheduler_interval: Interval | Mapping[str, Interval]
    scheduler_monitor: str | Mapping[str, str]

    def configure_models(self) -> Any:
        """Create the models, on the meta device."""

    def init_weights(self) -> None:
        """Initialize models that were created on the meta device."""

    def configure_tensor_parallel(self) -> Plan:
        """Return how layers are divided over ranks."""

    def configure_optimizers(self) -> Any:
        """Create optimizers and schedulers."""

    def configure_dataloaders(self) -> Any:
        """Create the training data, or (training data, validation data)."""

    def configure_metrics(self) -> Mapping[str, Any]:
        """Return evaluation metrics that are not means."""

    def configure_callbacks(self) -> Sequence[Callback | PlainFunction]:
        """Return callbacks."""

    def configure_trackers(self) -> Sequence[Tracker]:
        """Return trackers."""


def make_models(program: Program, ctx: RunContext, numerics: Numerics, *, shapes_only: bool = False) -> bool:
    """Create the models and freeze parameters. Every rank must call this, unless `shapes_only`.

    They are created on the meta device, without memory. If `init_weights` is not overridden and would lose values that
    the user's code gives to them, or if that code does not run there, they are created again with their values. If they
    are to be sharded, only the main rank keeps values; the others need not create them where code runs on the meta
    device, and take turns where it does not, so that a machine has room for one model besides that of the main rank.

    Args:
        program: gets the models as attributes.
        ctx: gets the models.
        numerics: ordinary or exact arithmetic.
        shapes_only: leaves the models on the meta device if possible, also without their values.

    Returns:
        Whether the models have values, or will get them from the main rank.

    Raises:
        ConfigError: there is no model, one is in a private attribute, two models share a weight, or the config does not
            fit.
    """
    before = dict(vars(program))
    obstacle = _make_on_meta(program, ctx, shapes_only=shapes_only)
    shards = not shapes_only and ctx.mesh.divides_weights

    def make_with_values() -> None:
        vars(program).clear()
        vars(program).update(before)
        # The attempt on the meta device may have drawn random numbers.
        seed_everything(ctx.config.seed, rank="common")
        with weight_init.UnsetTensors() as unset:
            _collect_models(program, ctx, program.configure_models())
            ctx.callbacks.on_models_configured()
        if program.overrides_init_weights:
            with torch.no_grad():
                program.init_weights()
        unset.initialize({name: getattr(program, name) for name in ctx.models})

    if shards:
        # Before the ranks take turns.
        check_agreement(ctx.world, {"models created": obstacle.kind if obstacle else "on meta"})
    if obstacle is not None:
        if not shards:
            make_with_values()
        elif not obstacle.runs_on_meta:
            for turn in range(max(ctx.world.all_gather_object(ctx.world.local_rank)) + 1):
                if turn == ctx.world.local_rank:
                    make_with_values()
                    if not ctx.world.is_main:
                        parallelize.drop_values({name: getattr(program, name) for name in ctx.models})
                ctx.world.barrier()
        elif ctx.world.is_main:
            make_with_values()
        if not shapes_only:
            ctx.print(_why_with_values(ctx.models, obstacle.why, shards=shards))
    # A callback may have replaced a model.
    ctx.models.update({name: getattr(program, name) for name in ctx.models})
    call_own_train(ctx.models)
    freeze(ctx.models, ctx.config.freeze)
    parallelize.check_modules(ctx.models, ctx.config.parallel, ctx.world)
    numerics.check_models(ctx.models)
    _check_listed_models(program, ctx.models)
    if ctx.world.is_main:
        _warn_of_hidden_modules(ctx.models)
    return obstacle is not None


def _check_listed_models(program: Program, models: Mapping[str, nn.Module]) -> None:
    """Check that no plain list or dict of the trainer holds further models, which would stay without values.

    Raises:
        ConfigError: one does.
    """
    known = {id(module) for model in models.values() for module in model.modules()}
    for attribute, value in vars(program).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if any(isinstance(each, nn.Module) and id(each) not in known and parallelize.on_meta(each) for each in held):
            kind = type(value).__name__
            raise ConfigError(
                f"self.{attribute} is a {kind} of modules, which are neither trained, moved to the device nor saved: "
                f"use {'nn.ModuleDict' if kind == 'dict' else 'nn.ModuleList'}, or an attribute for each"
            )


def _warn_of_hidden_modules(models: Mapping[str, nn.Module]) -> None:
    """Warn of modules in plain lists and dicts, which PyTorch does not see."""
    known = {id(parameter) for model in models.values() for parameter in model.parameters()}
    for name, model in models.items():
        for path, module in model.named_modules():
            for attribute, value in vars(module).items():
                held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
                hidden = [each for each in held if isinstance(each, nn.Module)]
                if attribute.startswith("_") or not any(
                    parameter.requires_grad and id(parameter) not in known
                    for each in hidden
                    for parameter in each.parameters()
                ):
                    continue
                warnings.warn(
                    f"{f'{name}.{path}'.rstrip('.')}.{attribute} is a {type(value).__name__} of modules, which are "
                    "neither trained, moved to the device nor saved: use nn.ModuleList or nn.ModuleDict",
                    stacklevel=2,
                )


class _Obstacle(NamedTuple):
    """Why models cannot be created without values.

    Attributes:
        why: for the user.
        runs_on_meta: whether models on the meta device are complete apart from their values.
    """

    why: str
    runs_on_meta: bool = False

    @property
    def kind(self) -> str:
        return "with values" if self.runs_on_meta else "with values, on every rank"


def _make_on_meta(program: Program, ctx: RunContext, *, shapes_only: bool) -> _Obstacle | None:
    """Create the models on the meta device; return why that is not enough, or None."""
    tracker = ValueTracker()
    with warnings.catch_warnings(record=True) as raised:
        try:
            with torch.device("meta"), tracker:
                returned = program.configure_models()
        except Exception as error:
            return _Obstacle(_reason(error, "configure_models()"))
    _collect_models(program, ctx, returned)
    with warnings.catch_warnings(record=True) as also_raised:
        try:
            with torch.device("meta"), tracker:
                ctx.callbacks.on_models_configured()
        except Exception as error:
            if "meta" not in str(error):
                raise
            return _Obstacle(_reason(error, "on_models_configured()"))
    models = {name: getattr(program, name) for name in ctx.models}
    has_values = {name for name, tensor in named_tensors(models) if not tensor.is_meta}
    on_meta = {name for name, tensor in named_tensors(models) if tensor.is_meta}
    if has_values and on_meta:
        return _Obstacle(f"{_first(sorted(has_values))} came with values")
    if on_meta and not shapes_only:
        if (writer := tracker.elsewhere(models)) is not None:
            return _Obstacle(f"{writer.place} makes a tensor that is neither a parameter nor a buffer")
        if tracker.loaded is not None:
            return _Obstacle(f"{tracker.loaded.place} loads values", runs_on_meta=True)
        if not program.overrides_init_weights:
            try:
                lost = tracker.lost(models)
            except Exception as error:
                return _Obstacle(_reason(error, "reset_parameters()"), runs_on_meta=True)
            if lost:
                why = f"{next(iter(lost.values())).place} gives values to {_first(list(lost))}"
                return _Obstacle(why, runs_on_meta=True)
    for each in (*raised, *also_raised):
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)
    return None


def _collect_models(program: Program, ctx: RunContext, returned: Any) -> None:
    collect(program, returned, "configure_models", {"model": nn.Module})
    models = _without_submodules(
        {name: each for name, each in _attributes(program, nn.Module).items() if _has_state(each)}
    )
    _check_private_models(program, models, ctx.name)
    if not models:
        raise ConfigError(
            f"configure_models() of {ctx.name} made no module with parameters: set self.model = ..., or return it; "
            "modules in a list belong to a model only if it is a torch.nn.ModuleList"
        )
    for name, model in models.items():
        _check_modes(name, model)
    ctx.models.clear()
    ctx.models.update(models)


def _check_modes(name: str, model: nn.Module) -> None:
    """Raise for modules whose own `train` or `eval` method an evaluation could not call."""
    for path, module in model.named_modules():
        for method, arguments in (("train", (False,)), ("eval", ())):
            if getattr(type(module), method) is getattr(nn.Module, method):
                continue
            try:
                inspect.signature(getattr(module, method)).bind(*arguments)
            except TypeError as error:
                raise ConfigError(
                    f"{f'{name}.{path}'.rstrip('.')}, a {type(module).__name__}, has its own {method}() with other "
                    "arguments than torch.nn.Module's, which evaluations call to change the mode: rename it"
                ) from error


def _reason(error: Exception, where: str) -> str:
    """Return why something does not run on the meta device."""
    if isinstance(error, HeadwayError):
        raise error
    text = str(error).strip().partition("\n")[0]
    return f"{where} does not run on the meta device ({type(error).__name__}: {text:.120})"


def _why_with_values(models: Mapping[str, nn.Module], why: str, *, shards: bool) -> str:
    size = sum(tensor.nbytes for _, tensor in named_tensors(models))
    what = "the model is" if len(models) == 1 else "the models are"
    where = "the main rank" if shards else "every rank"
    return (
        f"{what} created with values, {size / 2**20:,.1f} MiB on {where}, because {why}. If init_weights() of the "
        "trainer sets the values, nothing is allocated before sharding"
    )


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def parallelize_models(program: Program, ctx: RunContext, numerics: Numerics, *, with_values: bool) -> None:
    """Shard, materialize, initialize and replicate the models, in place. Every rank must call this.

    Args:
        program: has the models as attributes.
        ctx: has the models.
        numerics: ordinary or exact arithmetic.
        with_values: as `make_models` returned it.

    Raises:
        ConfigError: models, configs, versions or code differ between ranks, or a weight has no value.
    """
    config, world, times = ctx.config, ctx.world, ctx.setup_times
    born_on_meta = ctx.models_without_weights
    born_on_meta.clear()
    if not with_values:
        born_on_meta.update({name: model for name, model in ctx.models.items() if parallelize.on_meta(model)})
    facts = {
        "config": as_plain(config),
        "run_dir": ctx.run_dir,
        "models": shapes(ctx.models),
        "models created": {name: "on meta" if name in born_on_meta else "with values" for name in ctx.models},
        "versions": versions(),
        "code": code_digests(type(program), ctx.models) if world.size > 1 else {},
    }
    if exact := numerics.facts(world.device):
        facts["exact"] = exact
    with times.phase("parallelise"):
        # Before the first collective that would hang, or mix up weights, if models differ.
        check_agreement(world, facts)
        parallelize.prepare_weights(ctx.models, config.precision)
        with_values_here = {
            name: model for name, model in ctx.models.items() if name not in born_on_meta and not is_sharded(model)
        }
        values = parallelize.drop_values(with_values_here) if ctx.mesh.divides_weights else []
        if ctx.mesh.tensor_mesh is not None:
            divide_layers(ctx.models, program.configure_tensor_parallel(), ctx.mesh.tensor_mesh)
        for model in ctx.models.values():
            parallelize.shard(model, config.parallel, precision=config.precision, world=world, mesh=ctx.mesh)
        if ctx.mesh.divides_weights:
            parallelize.fill_from_main(with_values_here, values, world)
        del values
    if born_on_meta:
        with times.phase("initialise"):
            weight_init.initialize_weights(born_on_meta, program.init_weights)
    with times.phase("parallelise"):
        check_weights(world, ctx.models)
        are_kept = program.may_keep_gradients or ctx.callbacks.may_keep_gradients()
        for name, model in ctx.models.items():
            gather_in_methods(model, lambda: _is_in_step(ctx.activity))
            replicated = numerics.replicate(model, config, ctx.mesh.loss, gradients_are_kept=are_kept)
            _set_model(program, ctx, name, replicated)


def _is_in_step(activity: Activity) -> bool:
    """Whether the caller is a step. Another thread, which may save the model meanwhile, runs on one rank only."""
    return activity.phase in _STEP_PHASES and activity.thread == threading.get_ident()


def rejoin_process_group(program: Program, ctx: RunContext) -> None:
    """Continue after a `fit` that has closed the trainer's process group. Every rank must call this.

    Raises:
        ConfigError: a model is sharded, which prevents this.
    """
    for model in ctx.models.values():
        # Before the first collective: either all ranks raise or none.
        parallelize.check_unsharded(model)
    ctx.world.rejoin()
    for name, model in ctx.models.items():
        _set_model(program, ctx, name, parallelize.rewrap_ddp(model, ctx.config.parallel, ctx.world))


def _check_inner_optimizers(name: str, optimizer: Optimizer) -> None:
    """Check that the state of an optimizer inside another, as in SAM and Lookahead, is in the state dict of that one.

    Raises:
        ConfigError: it is not, so that a resumed run would begin without it.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return
    for key, inner in vars(optimizer).items():
        if not isinstance(inner, Optimizer) or inner.state is optimizer.state:
            continue
        if type(inner) is torch.optim.SGD and not any(group["momentum"] for group in inner.param_groups):
            continue  # has no state
        raise ConfigError(
            f"self.{name} is a {type(optimizer).__name__} around another optimizer, {key}, whose state its "
            "state_dict() leaves out, so that a resumed run would begin without it: override state_dict() and "
            f"load_state_dict() of {type(optimizer).__name__} to add that of self.{key}"
        )


def _check_state_dict(name: str, optimizer: Optimizer) -> None:
    """Check that the state dict of an optimizer has the form of torch's, in which Headway finds the parameters.

    Raises:
        ConfigError: it has another.
    """
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    keys = list(optimizer.state_dict())
    if missing := [key for key in ("state", "param_groups") if key not in keys]:
        raise ConfigError(
            f"self.{name} is a {type(optimizer).__name__}, whose state_dict() has {', '.join(map(str, keys))}, but no "
            f"{' and no '.join(map(repr, missing))}, as that of torch.optim.Optimizer has, so that a checkpoint could "
            "not name its parameters: use another optimizer, override state_dict() and load_state_dict(), or train "
            "without run_dir"
        )


def _check_hooks(name: str, optimizer: Optimizer) -> None:
    """Raise for an optimizer without the hooks of torch's, such as Opacus' DPOptimizer."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError as error:
        raise ConfigError(
            f"self.{name} is a {type(optimizer).__name__}, whose __init__() does not call that of torch.optim."
            "Optimizer, so that it can have no hooks: use another, or call super().__init__(...) in it. For clipped "
            'gradients of samples (DP-SGD), see "Gradients that you compute" in docs/models.md'
        ) from error


def _check_optimizers_of_other_classes(program: Program) -> None:
    """Raise for an attribute that is used like an optimizer, but is none for torch: Headway would not step it."""
    for name, each in vars(program).items():
        looks = all(hasattr(each, attribute) for attribute in ("step", "zero_grad", "param_groups"))
        if looks and not isinstance(each, (Optimizer, type)):
            raise ConfigError(
                f"self.{name} is a {type(each).__name__}, which has step() and param_groups, but is no "
                "torch.optim.Optimizer, so that Headway would neither step nor save it: use an optimizer that is one, "
                "or derive the class from it"
            )


def make_optimizers(program: Program, ctx: RunContext, *, evaluates: bool, total_steps: int | None) -> None:
    """Create optimizers and schedulers over the models' parameters.

    Args:
        program: gets them as attributes.
        ctx: gets them.
        evaluates: whether there is validation data.
        total_steps: updates of the whole run, if known.

    Raises:
        ConfigError: there is no optimizer, one has a parameter of no model, needs a closure or has an inner one that
            no checkpoint would contain, or scheduler settings are invalid.
    """
    returned = program.configure_optimizers()
    collect(program, returned, "configure_optimizers", {"optimizer": Optimizer, "scheduler": LRScheduler})
    ctx.optimizers.clear()
    ctx.optimizers.update(_attributes(program, Optimizer))
    _check_optimizers_of_other_classes(program)
    check_schedulers_of_other_classes(program, ctx)
    set_training_mode(ctx.optimizers.values())
    for name, optimizer in ctx.optimizers.items():
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigError(
                f"self.{name} is a {type(optimizer).__name__}, whose step() needs a closure that computes the loss "
                "again, but Headway computes the loss of an update once: use an optimizer that needs no closure"
            )
        if ctx.run_dir is not None:
            _check_inner_optimizers(name, optimizer)
            _check_state_dict(name, optimizer)
        _check_hooks(name, optimizer)
        # Raises now rather than at the first save: parameters of no model are neither averaged nor saved.
        OptimizerState(ctx.models, name, optimizer)
    ctx.lr_stepping.use(
        _outermost(_attributes(program, LRScheduler)),
        interval=program.scheduler_interval,
        monitor=program.scheduler_monitor,
    )
    if not ctx.optimizers:
        raise ConfigError(
            f"configure_optimizers() of {ctx.name} made no optimizer: set self.optimizer = ..., or return it"
        )
    check_schedulers(ctx, evaluates=evaluates, total_steps=total_steps)
    if ctx.mesh.divides_weights:
        _check_grouping(ctx)


def _check_grouping(ctx: RunContext) -> None:
    """Raise for an optimizer that would update divided and whole parameters in one call, which torch cannot."""
    for name, optimizer in ctx.optimizers.items():
        for group in optimizer.param_groups:
            meshes = {each.device_mesh if isinstance(each, DTensor) else None for each in group["params"]}
            for setting in ("foreach", "fused"):
                if group.get(setting) and len(meshes) > 1:
                    raise ConfigError(
                        f"self.{name} has {setting}=True, which torch does not support for divided and whole "
                        f"parameters in one group, as with parallel.tp or with a scalar: leave {setting} out"
                    )


def open_data(program: Program, ctx: RunContext, numerics: Numerics) -> tuple[BatchStream, dict[str, BatchStream]]:
    """Open the training data and the sets of validation data by name.

    Raises:
        ConfigError, DataError: the data has an unsupported type, is empty, or does not fit the batch sizes.
    """
    loaders = program.configure_dataloaders()
    if loaders is None:
        loaders = getattr(program, "train_dataloader", None), getattr(program, "val_dataloader", None)
    train, validation = _train_and_validation(loaders)
    data = _open(ctx, numerics, train, training=True, in_use=())
    sets = {} if validation is None else open_sets(ctx, numerics, validation, in_use=[data])
    numerics.check_data(data, sets, ctx.world)
    return data, sets


def _train_and_validation(loaders: Any) -> tuple[Any, Any]:
    """Return what `configure_dataloaders` returned as training and validation data.

    Raises:
        ConfigError: it returned several loaders that are not a pair.
    """
    if not isinstance(loaders, (tuple, list, Mapping)):
        return loaders, None
    values = loaders.values() if isinstance(loaders, Mapping) else loaders
    num_loaders = sum(isinstance(each, DataLoader) or is_stream(each) for each in values)
    if num_loaders and (isinstance(loaders, Mapping) or len(loaders) != 2):
        raise ConfigError(
            f"configure_dataloaders() returned a {type(loaders).__name__} of {len(loaders)}: return (train, "
            'validation); several validation sets are a dict, (train, {"validation": ..., "test": ...}), and '
            "trainer.evaluate(test) reads others after training"
        )
    if isinstance(loaders, tuple) and len(loaders) == 2 or num_loaders == 2:
        train, validation = loaders
        return train, validation
    return loaders, None


def open_sets(
    ctx: RunContext, numerics: Numerics, data: Any, *, in_use: Sequence[BatchStream]
) -> dict[str, BatchStream]:
    """Open validation data: one set, named "", or several by name. Streams in `in_use` are copied.

    Raises:
        ConfigError, DataError: the data has an unsupported type, is empty, or has an invalid name.
    """
    sets = data if isinstance(data, Mapping) else {"": data}
    if not all(isinstance(name, str) and (name or sets is not data) for name in sets):
        raise ConfigError(f"names of validation sets must be non-empty text, got {', '.join(map(repr, sets))}")
    return {
        name: _open(ctx, numerics, each, training=False, in_use=in_use)
        for name, each in sets.items()
        if each is not None
    }


def check_same_data(world: World, streams: Sequence[BatchStream]) -> None:
    """Check that all ranks have opened the same data. Every rank must call this.

    Iterables may have different lengths on each rank.

    Raises:
        ConfigError: the data differs.
    """
    facts = [
        (each.guarantee, each.fingerprint, each.steps_in_epoch(0) if each.guarantee == "exact" else None)
        for each in streams
    ]
    check_agreement(world, {"data": facts})


def collect(program: object, returned: Any, method: str, kinds: Mapping[str, type]) -> None:
    """Set the objects that a `configure_` method returned as attributes.

    Args:
        program: gets the attributes.
        returned: None; one object; several in a tuple or list, each named by its kind; or a dict of objects by name,
            whose values may be (optimizer, scheduler) pairs: the scheduler of `x` is `x_scheduler`.
        method: its name, for messages.
        kinds: the allowed classes, by the attribute name for a single object.

    Raises:
        ConfigError: it returned something else, or two objects of one kind without names.
    """
    if returned is None:
        return
    named: dict[str, Any] = {}
    groups = returned if isinstance(returned, Mapping) else {"": returned}
    for key, group in groups.items():
        for each in group if isinstance(group, (tuple, list)) else (group,):
            kind = next((name for name, cls in kinds.items() if isinstance(each, cls)), None)
            if kind is None:
                allowed = " or ".join(cls.__name__ for cls in kinds.values())
                foreign = isinstance(each, (list, Mapping)) or key in ("monitor", "interval", "frequency")
                advice = (
                    "; this is the form of Lightning: set self.optimizer and self.scheduler, with the class attributes "
                    "scheduler_interval and scheduler_monitor for the rest"
                    if foreign and method == "configure_optimizers"
                    else ""
                )
                raise ConfigError(
                    f"{method}() returned {type(each).__name__} {' '.join(repr(each).split()):.60}"
                    f"{f' as {key!r}' if key else ''}; return {allowed} objects, a dict of them by name, or nothing if "
                    f"the method sets them as attributes{advice}"
                )
            first = next(iter(kinds))
            name = (key if kind == first else f"{key}_{kind}") if key else kind
            if name in named:
                raise ConfigError(
                    f"{method}() returned several objects without names: return a dict, such as {{'a': ..., 'b': ...}}"
                )
            named[name] = each
    for name, each in named.items():
        setattr(program, name, each)


def _check_private_models(program: object, models: Mapping[str, nn.Module], owner: str) -> None:
    """Raise for modules in private attributes, which would be neither moved, synchronized nor saved."""
    managed = {id(module) for model in models.values() for module in model.modules()}
    for name, each in vars(program).items():
        if name.startswith("_") and isinstance(each, nn.Module) and id(each) not in managed and _has_state(each):
            raise ConfigError(
                f"self.{name} of {owner} is a module in a private attribute, which Headway would neither move to the "
                f"device nor save: rename it self.{name.strip('_')}, and freeze it if it is not to be trained"
            )


def _open(
    ctx: RunContext, numerics: Numerics, data: Any, *, training: bool, in_use: Sequence[BatchStream]
) -> BatchStream:
    config = ctx.config
    stream = as_stream(data)
    if any(stream is each for each in in_use):
        # Opening the same stream again, for evaluation, would change it for training.
        stream = copy.copy(stream)
    stream.setup(
        ShardInfo(
            rank=ctx.mesh.data.rank,
            world_size=ctx.mesh.data.size,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed,
            device=ctx.device,
            training=training,
            by_shard=numerics.cuts_by_shard,
        )
    )
    return stream


def _attributes(program: object, kind: type[T]) -> dict[str, T]:
    """Return the public attributes of a type, by name."""
    return {name: each for name, each in vars(program).items() if isinstance(each, kind) and not name.startswith("_")}


def _without_submodules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop models that are submodules of another, such as an encoder in a second attribute."""
    born = {name: {id(each): path for path, each in named_tensors({name: model})} for name, model in models.items()}
    parts = {
        name
        for name, model in models.items()
        for other in models.values()
        if other is not model and any(each is model for each in other.modules())
    }
    whole = {name: model for name, model in models.items() if name not in parts}
    for (one, first), (other, second) in itertools.combinations(whole.items(), 2):
        shared = born[one].keys() & born[other].keys()
        if shared and first is not second and parallelize.on_meta(first) and parallelize.on_meta(second):
            raise ConfigError(
                f"{one} and {other} share {born[one][min(shared, key=list(born[one]).index)]}, but each is created "
                "and sharded separately: make them submodules of one module, such as an nn.ModuleDict, and set that as "
                "the attribute"
            )
    return whole


def _outermost(schedulers: Mapping[str, LRScheduler]) -> dict[str, LRScheduler]:
    """Drop schedulers inside another, such as a `SequentialLR`, which steps and saves them."""
    held: Iterable[LRScheduler] = schedulers.values()
    inside: set[LRScheduler] = set()
    while held := [inner for each in held for inner in inner_schedulers(each)]:
        inside.update(held)
    return {name: each for name, each in schedulers.items() if each not in inside}


def _set_model(program: Program, ctx: RunContext, name: str, model: nn.Module) -> None:
    ctx.models[name] = model
    setattr(program, name, model)


def _has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers; a loss function usually has none."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
