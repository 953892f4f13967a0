"""Choose the stream that reads the data returned by `configure_dataloaders`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ..errors import ConfigError
from .dataloader_stream import LoaderStream, unsupported_part
from .iterable_stream import IterableStream
from .protocols import BatchStream, is_stream


def as_stream(data: Any) -> BatchStream:
    """Return a stream over `data`: a stream (returned as is), a DataLoader, an iterable or a function that makes one.

    Raises:
        ConfigError: `data` is none of these.
    """
    if is_stream(data):
        return data
    if isinstance(data, DataLoader) and unsupported_part(data) is None:
        return LoaderStream(data)
    if hasattr(data, "iter_torch_batches"):  # a Dataset has __iter__, which raises a TypeError
        raise ConfigError(
            f"cannot read batches from a {type(data).__name__} of Ray Data by itself: return RayDataset(dataset), from "
            "headway.datasets.formats.ray_dataset"
        )
    if not isinstance(data, (str, bytes, Mapping)) and (isinstance(data, Iterable) or callable(data)):
        return IterableStream(data)
    if hasattr(data, "open") and type(data).__module__.startswith("headway.datasets."):
        raise ConfigError(
            f"a {type(data).__name__} has rows, not batches: return Stream({type(data).__name__}(...)), from "
            "headway.datasets.stream"
        )
    if hasattr(data, "train_dataloader"):
        raise ConfigError(
            f"cannot read batches from a {type(data).__name__}, a data module: call its prepare_data() and "
            "setup('fit'), and return (module.train_dataloader(), module.val_dataloader())"
        )
    raise ConfigError(
        f"cannot read batches from a {type(data).__name__}: use a torch DataLoader, a Headway stream, any iterable of "
        "batches, or a function that returns one"
    )
