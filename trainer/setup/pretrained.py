"""Filling a model from safetensors files, shard by shard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoints.model_state import named_state_tensors
from ..distributed.dtensor import own_part
from ..errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_MOST_NAMES = 8


def load_safetensors(model: nn.Module, source: str | Path, *, skip: Sequence[str] = ()) -> None:
    """Copy weights from safetensors files into a model, in place; this rank reads only its shards.

    No collectives: each rank may call this by itself. Values are converted to the dtype of the weights.

    Args:
        model: materialized; it may be wrapped and sharded.
        source: a `.safetensors` file, or a folder with `model.safetensors`, or with the files that its
            `model.safetensors.index.json` lists, as Hugging Face writes them.
        skip: shell patterns over names of weights that may be missing on either side, and are not loaded.

    Raises:
        CheckpointError: there are no such files; or names or shapes differ.
    """
    from safetensors import SafetensorError, safe_open

    files = _files_of(Path(source))
    tensors = {
        name: tensor
        for name, tensor in named_state_tensors(model)
        if not any(fnmatchcase(name, pattern) for pattern in skip)
    }
    with ExitStack() as opened, torch.no_grad():
        places: dict[str, Any] = {}
        for file in files:
            try:
                reader = opened.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
            places.update(dict.fromkeys(reader.keys(), reader))
        # Files have a tied weight once, under any of its names.
        filled = {id(tensors[name]) for name in places.keys() & tensors.keys()}
        missing = sorted(name for name, tensor in tensors.items() if id(tensor) not in filled)
        unexpected = sorted(
            name for name in places.keys() - tensors.keys() if not any(fnmatchcase(name, each) for each in skip)
        )
        shapes = {name: places[name].get_slice(name).get_shape() for name in places.keys() & tensors.keys()}
        reshaped = sorted(
            f"{name} ({shape} there, {list(tensors[name].shape)} here)"
            for name, shape in shapes.items()
            if shape != list(tensors[name].shape)
        )
        if missing or unexpected or reshaped:
            raise CheckpointError(
                f"{source} does not fit {type(model).__name__}. Missing in it: {_first(missing)}. Only in it: "
                f"{_first(unexpected)}. Of another shape: {_first(reshaped)}. Leave weights out with skip=, such as "
                '("lm_head.*",)'
            )
        for name in shapes:
            tensor = tensors[name]
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(places[name].get_slice(name)[own_part(tensor)])
            else:
                tensor.copy_(places[name].get_tensor(name))


def _files_of(source: Path) -> list[Path]:
    if source.is_file() and source.suffix == ".safetensors":
        return [source]
    if (index := source / _INDEX).is_file():
        return [source / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (whole := source / "model.safetensors").is_file():
        return [whole]
    raise CheckpointError(
        f"{source} is neither a .safetensors file nor a folder with model.safetensors or {_INDEX}: give a local path; "
        "huggingface_hub.snapshot_download(...) returns one"
    )


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
    return (", ".join(names[:_MOST_NAMES]) + more) or "none"
