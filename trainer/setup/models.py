"""Creates the models, and shards or replicates them."""

from __future__ import annotations

import inspect
import itertools
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoints.rng import seed_everything
from ..config import as_plain
from ..distributed import parallelize
from ..distributed.dtensor import is_sharded
from ..distributed.fsdp import gather_in_methods
from ..distributed.parallelize import in_same_memory, named_tensors
from ..distributed.replaced_parameters import ReplacedParameters, marked
from ..distributed.tensor_parallel import divide_layers
from ..errors import ConfigError, HeadwayError
from ..exact.numerics import Numerics
from ..loop.context import RunContext
from ..loop.run_state import versions
from ..loop.timing import Activity, Phase
from . import weight_init
from .freezing import call_own_train, freeze
from .program import Program, collect, public_attributes
from .rank_consistency import check_agreement, check_weights, code_digests, shapes
from .value_tracking import ValueTracker

_STEP_PHASES: tuple[Phase, ...] = ("forward", "evaluation", "around an evaluation")
"""The phases in which every rank calls the model."""


def make_models(program: Program, ctx: RunContext, numerics: Numerics, *, shapes_only: bool = False) -> bool:
    """Create the models and freeze parameters. Every rank must call this, unless `shapes_only`.

    They are created on the meta device, without memory. If `init_weights` is not overridden and would lose values that
    the user's code gives to them, or if that code does not run there, they are created again with their values. If they
    are to be sharded, only the main rank keeps values; the others need not create them where code runs on the meta
    device and makes the same tensors there, and otherwise take turns, so that a machine has room for one model besides
    that of the main rank. Code that communicates runs on all ranks at once.

    Args:
        program: gets the models as attributes.
        ctx: gets the models.
        numerics: ordinary or exact arithmetic.
        shapes_only: leaves the models on the meta device if possible, also without their values.

    Returns:
        Whether the models have values, or will get them from the main rank.

    Raises:
        ConfigError: there is no model, one is in a private attribute, two models share a weight, the code would add to
            models a second time, or the config does not fit.
    """
    before = dict(vars(program))
    on_meta_before = _on_meta(before)
    tracker = ValueTracker()
    obstacle = _make_on_meta(program, ctx, tracker, shapes_only=shapes_only)
    shards = not shapes_only and ctx.mesh.divides_weights
    at_once = not shapes_only and any(ctx.world.all_gather_object(tracker.communicates))
    if at_once:
        obstacle = next(filter(None, ctx.world.all_gather_object(obstacle)), None)
    refusal: str | None = None

    def make_with_values() -> None:
        nonlocal refusal
        vars(program).clear()
        vars(program).update(before)
        # The attempt on the meta device may have drawn random numbers.
        seed_everything(ctx.config.seed, rank="common")
        with weight_init.UnsetTensors() as unset:
            _collect_models(program, ctx, program.configure_models())
            ctx.callbacks.on_models_configured()
            _update_models(program, ctx)
            _check_plain_tensors(ctx.models)
            replaced = ReplacedParameters(ctx.models)
            for model in ctx.models.values():
                parallelize.allocate(model)
            replaced.follow(program, ctx.models)
        refusal = _why_not_sharded(ctx.models) if shards else None
        if program.overrides_init_weights:
            with torch.no_grad():
                program.init_weights()
        unset.initialize(ctx.models)

    if obstacle is not None and (added := _on_meta(before) - on_meta_before):
        raise ConfigError(
            f"configure_models() adds to self.{min(added)}, which was there before, and runs twice, as {obstacle.why}: "
            f"create self.{min(added)} in configure_models()"
        )
    if obstacle is None and not shapes_only and program.overrides_init_weights and not _on_meta(ctx.models):
        with torch.no_grad():
            program.init_weights()
    if shards:
        # Before the ranks take turns.
        check_agreement(ctx.world, {"models created": obstacle.kind if obstacle else "on meta"})
    if obstacle is not None and not shards:
        make_with_values()
    elif obstacle is not None:
        has_values = obstacle.runs_on_meta and ctx.world.is_main and not at_once
        if has_values:
            make_with_values()
        # A module may have other tensors on the meta device, such as the buffer of an orthogonal parametrization.
        if not obstacle.runs_on_meta or at_once or _differ_between_ranks(ctx):
            own_turn = 0 if at_once else ctx.world.local_rank
            for turn in range(max(ctx.world.all_gather_object(own_turn)) + 1):
                if turn == own_turn and not has_values:
                    make_with_values()
                    if not ctx.world.is_main:
                        replaced = ReplacedParameters(ctx.models)
                        parallelize.drop_values(ctx.models)
                        replaced.follow(program, ctx.models)
                ctx.world.barrier()
    if shards:
        refusal = refusal or _why_not_sharded(ctx.models)
        if any(refusals := ctx.world.all_gather_object(refusal)):
            raise ConfigError(next(each for each in refusals if each))
    if obstacle is not None and not shapes_only:
        ctx.print(_why_with_values(ctx.models, obstacle.why, shards=shards))
    call_own_train(ctx.models)
    freeze(ctx.models, ctx.config.freeze)
    parallelize.check_modules(ctx.models, ctx.config.parallel, ctx.world)
    numerics.check_models(ctx.models)
    _check_listed_models(program, ctx.models)
    if ctx.world.size > 1:
        _check_shared(ctx.models)
    if ctx.world.is_main:
        _warn_of_hidden_modules(ctx.models)
    return obstacle is not None


def _on_meta(attributes: Mapping[str, Any]) -> set[str]:
    """Return the names of values that are modules with tensors on the meta device, or lists or dicts with some."""

    def has_meta(value: Any) -> bool:
        if isinstance(value, nn.Module):
            return parallelize.on_meta(value)
        if isinstance(value, torch.Tensor):
            return value.is_meta
        return any(map(has_meta, _held(value)))

    return {name for name, value in attributes.items() if has_meta(value)}


def _held(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def _check_plain_tensors(models: Mapping[str, nn.Module]) -> None:
    """Raise for a tensor of the first run of `configure_models` in a model of the second one."""
    for name, model in models.items():
        for path, module in model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise ConfigError(
                        f"{f'{name}.{path}'.rstrip('.')}.{attribute} is on the meta device, from the first run of "
                        "configure_models(), which a cache has kept, such as functools.lru_cache: compute it without "
                        'the cache, or in the cached function under `with torch.device("cpu")`'
                    )


def _why_not_sharded(models: Mapping[str, nn.Module]) -> str | None:
    """Return why models cannot be sharded as the user's code has made them, if so."""
    for name, why in marked(models):
        return (
            f"{name} {why}, which is lost when the weight is sharded: change gradients in on_gradients_ready(), mark "
            "parameters by attributes (parameter.kind = ...), or use parallel.strategy='ddp'"
        )
    if pair := in_same_memory(models):
        return (
            f"{pair[0]} and {pair[1]} share memory, and would be sharded separately: tie them by setting one parameter "
            "in both modules, or use parallel.strategy='ddp'"
        )
    return None


def _update_models(program: Program, ctx: RunContext) -> None:
    """Take over the models that callbacks have put into the trainer's attributes."""
    ctx.models.update({name: getattr(program, name) for name in ctx.models})


def _differ_between_ranks(ctx: RunContext) -> bool:
    """Return whether the models' tensors differ in names, shapes or dtypes. Every rank must call this."""
    found = shapes(ctx.models)
    return len({str(each) for each in ctx.world.all_gather_object(found)}) > 1


def _make_on_meta(program: Program, ctx: RunContext, tracker: ValueTracker, *, shapes_only: bool) -> _Obstacle | None:
    """Create the models on the meta device; return why that is not enough, or None."""
    ctx.lost_values.clear()
    ctx.versions_after_reset.clear()
    generator = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as raised:
        try:
            with torch.device("meta"), tracker:
                returned = program.configure_models()
        except Exception as error:
            return _Obstacle(_reason(error, "configure_models()"))
    _collect_models(program, ctx, returned)
    num_draws = tracker.num_draws
    with warnings.catch_warnings(record=True) as also_raised:
        try:
            with torch.device("meta"), tracker:
                ctx.callbacks.on_models_configured()
        except Exception as error:
            if "meta" not in str(error).lower():
                raise
            return _Obstacle(_reason(error, "on_models_configured()"))
    _update_models(program, ctx)
    if tracker.has_drawn and tracker.seeded is None:
        torch.set_rng_state(generator)
    models = ctx.models
    has_values = {name for name, tensor in named_tensors(models) if not tensor.is_meta}
    on_meta = {name for name, tensor in named_tensors(models) if tensor.is_meta}
    if has_values and on_meta:
        return _Obstacle(f"{_first(sorted(has_values))} came with values")
    if not shapes_only and (writer := tracker.elsewhere(models)) is not None:
        return _Obstacle(f"{writer.place} makes a tensor that is neither a parameter nor a buffer")
    if not shapes_only and tracker.seeded is not None and (not program.overrides_init_weights or not on_meta):
        return _Obstacle(
            f"random numbers are seeded, or drawn on the CPU, before {tracker.seeded.place}", runs_on_meta=True
        )
    if on_meta and not shapes_only:
        for name, why in marked(models):
            return _Obstacle(f"{name} {why}", runs_on_meta=True)
        if pair := in_same_memory(models):
            return _Obstacle(f"{pair[0]} and {pair[1]} share memory", runs_on_meta=True)
        if tracker.loaded is not None:
            return _Obstacle(f"{tracker.loaded.place} loads values", runs_on_meta=True)
        # What callbacks create has no equal in plain PyTorch.
        is_users = tracker.num_draws == num_draws and not program.overrides_init_weights
        try:
            lost = tracker.lost(models)
        except Exception as error:
            if not program.overrides_init_weights:
                return _Obstacle(_reason(error, "reset_parameters()"), runs_on_meta=True)
        else:
            ctx.lost_values.update({name: writer.place for name, writer in lost.items()})
            if lost and not program.overrides_init_weights:
                why = f"{next(iter(lost.values())).place} gives values to {_first(list(lost))}"
                return _Obstacle(why, runs_on_meta=True)
            if is_users and tracker.drawn_otherwise is not None:
                place = tracker.drawn_otherwise.place
                why = f"reset_parameters() would draw the random numbers of {place} in another order or dtype"
                return _Obstacle(why, runs_on_meta=True)
    for each in (*raised, *also_raised):
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)
    return None


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


def _collect_models(program: Program, ctx: RunContext, returned: Any) -> None:
    collect(program, returned, "configure_models", {"model": nn.Module})
    models = _without_submodules(
        {name: each for name, each in public_attributes(program, nn.Module).items() if _has_state(each)}
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


def _without_submodules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop models that are submodules of another, such as an encoder in a second attribute."""
    parts = {
        name
        for name, model in models.items()
        for other in models.values()
        if other is not model and any(each is model for each in other.modules())
    }
    whole = {name: model for name, model in models.items() if name not in parts}
    _check_shared({name: model for name, model in whole.items() if parallelize.on_meta(model)})
    return whole


def _check_shared(models: Mapping[str, nn.Module]) -> None:
    """Raise for two models that share a parameter or buffer."""
    tensors = {name: {id(each): path for path, each in named_tensors({name: model})} for name, model in models.items()}
    for (one, first), (other, second) in itertools.combinations(models.items(), 2):
        shared = tensors[one].keys() & tensors[other].keys()
        if shared and first is not second:
            first_shared = min(shared, key=list(tensors[one]).index)
            raise ConfigError(
                f"{one} and {other} share {tensors[one][first_shared]}, but each is created and sharded separately: "
                "make them submodules of one module whose forward() or methods call them, and set that as the attribute"
            )


def _has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers; a loss function usually has none."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _check_private_models(program: object, models: Mapping[str, nn.Module], owner: str) -> None:
    """Raise for modules in private attributes, which would be neither moved, synchronized nor saved."""
    managed = {id(module) for model in models.values() for module in model.modules()}
    for name, each in vars(program).items():
        if name.startswith("_") and isinstance(each, nn.Module) and id(each) not in managed and _has_state(each):
            raise ConfigError(
                f"self.{name} of {owner} is a module in a private attribute, which Headway would neither move to the "
                f"device nor save: rename it self.{name.strip('_')}, and freeze it if it is not to be trained"
            )


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
        replaced = ReplacedParameters(ctx.models)
        values = parallelize.drop_values(with_values_here) if ctx.mesh.divides_weights else []
        if ctx.mesh.tensor_mesh is not None:
            divide_layers(ctx.models, program.configure_tensor_parallel(), ctx.mesh.tensor_mesh)
        for model in ctx.models.values():
            parallelize.shard(model, config.parallel, precision=config.precision, world=world, mesh=ctx.mesh)
        if ctx.mesh.divides_weights:
            parallelize.fill_from_main(with_values_here, values, world)
        del values
        replaced.follow(program, ctx.models)
        del replaced
    if born_on_meta:
        with times.phase("initialise"):
            weight_init.initialize_weights(
                born_on_meta, program.init_weights, ctx.lost_values, ctx.versions_after_reset
            )
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


def _set_model(program: Program, ctx: RunContext, name: str, model: nn.Module) -> None:
    ctx.models[name] = model
    setattr(program, name, model)
