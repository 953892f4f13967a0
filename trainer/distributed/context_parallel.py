"""Context parallelism: sequences that are divided over ranks, with attention over the whole of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import StepError

Divided = Sequence[tuple[torch.Tensor, int]]
"""Tensors that have a dimension along the sequence, and that dimension."""


@contextmanager
def divided_sequences(mesh: DeviceMesh, tensors: Divided) -> Iterator[None]:
    """Replace tensors, in place, by this rank's part of their sequences, until the block ends.

    Every rank must call this. `scaled_dot_product_attention` in the block covers whole sequences. The forward and the
    backward pass belong into one block. Each rank gets an early and a late part, since causal
    attention has more work for late ones.

    Args:
        mesh: of one dimension.
        tensors: equal on all ranks of the mesh.

    Raises:
        StepError: a sequence cannot be divided evenly, or tensors share memory.
    """
    from torch.distributed.tensor.experimental import context_parallel

    if not tensors:
        raise StepError("context_parallel_buffers returned no tensors: return those with a sequence, and its dimension")
    parts = 2 * mesh.size()
    for tensor, dim in tensors:
        if tensor.shape[dim] % parts:
            raise StepError(
                f"parallel.cp={mesh.size()} divides sequences into {parts} equal parts, but context_parallel_buffers "
                f"returned a tensor of shape {tuple(tensor.shape)} with dimension {dim}: pad that to a multiple "
                f"of {parts}"
            )
    # torch writes the part of a tensor over its memory, as if that were contiguous.
    memory = {tensor.untyped_storage().data_ptr() for tensor, _ in tensors}
    if len(memory) < len(tensors) or not all(tensor.is_contiguous() for tensor, _ in tensors):
        raise StepError(
            "parallel.cp divides sequences in place, but context_parallel_buffers returned tensors that are views of "
            "others or of each other, such as tokens[:, :-1] and tokens[:, 1:]: call .clone() on them in the dataset "
            "or in prepare_batch"
        )
    with context_parallel(mesh, buffers=[tensor for tensor, _ in tensors], buffer_seq_dims=[dim for _, dim in tensors]):
        yield


def add_attention_advice(error: BaseException, device: torch.device) -> None:
    """Add a note to an error of `scaled_dot_product_attention` if torch cannot divide sequences on this device."""
    if isinstance(error, NotImplementedError) and "scaled_dot_product" in str(error):
        error.add_note(
            f"parallel.cp: torch has no attention over divided sequences for this device ({device.type}); train on "
            "CUDA GPUs, or without parallel.cp"
        )
