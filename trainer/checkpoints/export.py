"""Export weights from a checkpoint or a trainer, as safetensors or as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed.dtensor import to_full_tensor, unwrap
from ..distributed.world import World
from ..errors import CheckpointError, ConfigError
from .format.digests import digest_of
from .format.tensor_files import SAFETENSORS_NAMES, TensorFile
from .model_state import unwrapped_state_dict
from .scan import read_checkpoint, split_path
from .store import CheckpointStore


def load_weights(
    checkpoint_path: str | os.PathLike[str], *, model: str | None = None, ema: bool | str = False
) -> dict[str, torch.Tensor]:
    """Read the weights and buffers of a checkpoint, without a trainer, cluster or GPU.

    The tensors are full, on the CPU, and named as in the unwrapped model, whatever number of ranks and parallel
    strategy saved them: `module.load_state_dict(load_weights(path))`. The whole checkpoint is read and
    verified first. `TrainerConfig.init_from` starts a run from such weights.

    Args:
        checkpoint_path: directory or fsspec URI, such as `FitResult.last_checkpoint`.
        model: name of the trainer's attribute; optional if there is only one model.
        ema: whether to return the averages of the callback `Ema` in place of the weights; with several such
            callbacks, the key of one, such as "Ema/1".

    Raises:
        CheckpointError: the path is not a checkpoint, or the checkpoint is damaged or has no averages.
        ConfigError: `model` is ambiguous or unknown.

    Example:
        >>> model.load_state_dict(load_weights(result.last_checkpoint))
        <All keys matched successfully>
    """
    where = f"the checkpoint {os.fspath(checkpoint_path)}"
    parts = read_parts(checkpoint_path, ("models", "callbacks") if ema else ("models",))
    models = parts["models"]
    if not isinstance(models, dict) or not models or not all(isinstance(each, dict) for each in models.values()):
        raise CheckpointError(f"{where} has no weights by model and name in its part 'models'")
    name = choose_model(model, models, where)
    weights = {key: value for key, value in models[name].items() if isinstance(value, torch.Tensor)}
    return _averaged(weights, name, parts["callbacks"], "Ema/0" if ema is True else ema, where) if ema else weights


def export_safetensors(
    checkpoint_path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    model: str | None = None,
    ema: bool | str = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of a checkpoint to one safetensors file.

    Tied weights are written under each of their names, so that a strict `load_state_dict` finds all.

    Args:
        checkpoint_path: directory or fsspec URI.
        file: path or fsspec URI; an existing file is replaced atomically.
        model: as in `load_weights`.
        ema: as in `load_weights`.
        dtype: cast floating-point tensors to this dtype; by default as saved.

    Raises:
        CheckpointError, ConfigError: as in `load_weights`.

    Example:
        >>> export_safetensors(result.last_checkpoint, "digits.safetensors", dtype=torch.bfloat16)
        >>> from safetensors.torch import load_file
        >>> model.load_state_dict(load_file("digits.safetensors"))
        <All keys matched successfully>
    """
    weights = load_weights(checkpoint_path, model=model, ema=ema)
    write_safetensors(cast_weights(weights, dtype), os.fspath(file))


def export_pretrained(
    checkpoint_path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    module: nn.Module,
    *,
    model: str | None = None,
    ema: bool | str = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, which `from_pretrained` reads.

    Args:
        checkpoint_path: directory or fsspec URI.
        folder: a local path, created if needed.
        module: an instance of the trained class, with its config; its weights are ignored, so it may be on "meta".
        model: as in `load_weights`.
        ema: as in `load_weights`.
        dtype: cast floating-point tensors to this dtype; by default as saved.

    Raises:
        CheckpointError, ConfigError: as in `load_weights`; ConfigError also if `module` has no `save_pretrained`.
    """
    if not hasattr(module, "save_pretrained"):
        raise ConfigError(
            f"{type(module).__name__} has no save_pretrained, which Hugging Face models have: use "
            "export_safetensors(checkpoint_path, file)"
        )
    weights = load_weights(checkpoint_path, model=model, ema=ema)
    write_pretrained(module, cast_weights(weights, dtype), folder, config={})


def weights_digest(checkpoint_path: str | os.PathLike[str]) -> str:
    """Return a digest of the weights and buffers of all models, equal if they are bit-identical.

    Raises:
        CheckpointError: the path is not a checkpoint, or the checkpoint is damaged.
    """
    return digest_of(read_parts(checkpoint_path, ("models",))["models"])


PRETRAINED = "pretrained"
"""The folder inside a checkpoint for what `from_pretrained` reads."""


def add_pretrained(
    checkpoint_path: str,
    module: nn.Module,
    *,
    others: Sequence[Any] = (),
    model: str | None = None,
    ema: bool | str = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder inside of it, with which it is deleted.

    The arguments are those of `export_pretrained`; `others` are objects with their own `save_pretrained` for the
    same folder. Does nothing if the checkpoint has been deleted in the meantime.
    """
    storage, name = split_path(checkpoint_path)
    # A folder at its place from the start would bring a deleted checkpoint back.
    staged = storage.stage(f"{PRETRAINED}-{uuid.uuid4().hex[:8]}")
    try:
        export_pretrained(checkpoint_path, staged, module, model=model, ema=ema, dtype=dtype)
        for each in others:
            each.save_pretrained(os.fspath(staged))
        storage.attach(staged, name, PRETRAINED)
    except Exception:
        if storage.committed(name):
            raise
    finally:
        storage.abandon(staged, name)


def gather_weights(module: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Return the full weights and buffers of a live model, on the main rank's CPU. Every rank must call this.

    Tied weights stay tied. Other ranks hold one full tensor at a time and return an empty dict.
    """
    gathered: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, value in unwrapped_state_dict(unwrap(module), keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) not in seen:
            full = to_full_tensor(value.detach().to(world.device))
            seen[id(value)] = full.cpu() if world.is_main else full.new_empty(0)
        if world.is_main:
            gathered[name] = seen[id(value)]
    return gathered


def write_pretrained(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
) -> None:
    """Write weights with the module's `save_pretrained`, or else as `model.safetensors` and `config.json`."""
    module = unwrap(module)
    if callable(save := getattr(module, "save_pretrained", None)):
        save(os.fspath(folder), state_dict=dict(weights))
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_safetensors(weights, str(Path(folder, "model.safetensors")))
    Path(folder, "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


def cast_weights(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Cast floating-point weights to a dtype; tied weights stay tied."""
    done: dict[int, torch.Tensor] = {}
    for tensor in weights.values():
        done.setdefault(id(tensor), tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
    return {name: done[id(tensor)] for name, tensor in weights.items()}


def choose_model(name: str | None, models: Mapping[str, object], where: str) -> str:
    """Return `name`, or the name of the only model.

    Raises:
        ConfigError: the name is unknown, or missing although there are several models.
    """
    if name is None and len(models) > 1:
        raise ConfigError(f"{where} has several models: set model= to one of {', '.join(models)}")
    if name is not None and name not in models:
        raise ConfigError(f"{where} has no model {name!r}; it has {', '.join(models)}")
    return name if name is not None else next(iter(models))


def _averaged(
    weights: Mapping[str, torch.Tensor], model: str, callbacks: Mapping[str, Any], key: str, where: str
) -> dict[str, torch.Tensor]:
    """Return the weights, with those that a callback `Ema` averages replaced by their averages."""
    if key not in callbacks:
        there = [name for name in callbacks if name.startswith("Ema/")]
        raise CheckpointError(f"{where} has no averages {key!r}; it has {', '.join(there) or 'none'}")
    if not callbacks[key]["has_begun"]:
        raise CheckpointError(
            f"{where} was saved before the averages {key!r} began: use a later checkpoint, or ema=False"
        )
    averages: Mapping[str, torch.Tensor] = callbacks[key]["averages"].get(model, {})
    averaged = {**weights, **averages}
    # A tied weight is saved under each of its names, bit-identical, and averaged under the first.
    for first, average in averages.items():
        for name in weights.keys() - averages.keys():
            if weights[name].shape == average.shape and torch.equal(weights[name], weights[first]):
                averaged[name] = average
    return averaged


class _StateCollector:
    """A part that stores the state loaded into it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.state = state


def read_parts(checkpoint_path: str | os.PathLike[str], parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the states of some parts of a checkpoint, with full tensors on the CPU. The whole checkpoint is verified.

    Raises:
        CheckpointError: the path is not a checkpoint, or it is damaged, or has no such part.
    """
    checkpoint = read_checkpoint(checkpoint_path)
    collected = {part: _StateCollector() for part in parts}
    store = CheckpointStore(os.path.dirname(checkpoint.path), world=World.single("cpu"))
    store.load(collected, rank_parts={}, checkpoint=checkpoint)
    return {part: each.state for part, each in collected.items()}


def write_safetensors(weights: Mapping[str, torch.Tensor], file: str) -> None:
    """Write tensors to a safetensors file, at a path or an fsspec URI, atomically; tied ones under each name."""
    if wrong := [name for name, tensor in weights.items() if tensor.dtype not in SAFETENSORS_NAMES]:
        raise CheckpointError(f"{wrong[0]} has the type {weights[wrong[0]].dtype}, which safetensors does not have")
    if "://" in file.removeprefix("file://"):
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(file)
        fs.makedirs(fs._parent(path), exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="headway-export-") as scratch:
            TensorFile(weights).write(Path(scratch, "weights"))
            fs.put_file(f"{scratch}/weights", path)
        return
    target = Path(file.removeprefix("file://"))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    TensorFile(weights).write(partial)
    partial.replace(target)
