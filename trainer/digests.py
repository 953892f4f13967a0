"""Checksums of tensors that come out the same however these are cut into shards, and digests of plain values.

The sum of a tensor is two numbers: of its elements' bits as whole numbers, and of these times their places in the whole
tensor, both modulo 2**64. So the sums of shards add up to the sum of the whole, on any number of ranks. They find
errors, not a forger; on one core they read about 3 GB/s of float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from .parallel import local
from .world import World

_WIDTH = 1 << 10
# Rows at a time: what is read again comes from the cache of a core; a GPU wants fewer, larger pieces. At most 2**15
# rows: sums of 16 bits have to fit into 32.
_ROWS = {False: 1 << 7, True: 1 << 14}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64


class TensorSum(NamedTuple):
    """What is known of a tensor, or of a part of it: add the parts."""

    dtype: str
    bits: int
    places: int

    def plus(self, other: TensorSum) -> TensorSum:
        """Returns the sum of two parts of one tensor."""
        bits, places = self.bits + other.bits, self.places + other.places
        return TensorSum(self.dtype, bits % _MODULUS, places % _MODULUS)

    def __str__(self) -> str:
        return f"{self.dtype} {self.bits:016x}{self.places:016x}"


def has_sum(tensor: torch.Tensor) -> bool:
    """Whether this rank's part of a tensor is plain numbers: what libraries pack into subclasses has no sum."""
    part = local(tensor)
    return type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout == torch.strided and not part.is_quantized


def sum_of_part(part: torch.Tensor, *, offsets: Sequence[int], size: Sequence[int]) -> TensorSum:
    """Sums a part of a tensor, on the device where it lies.

    Args:
        part: a block of the whole tensor.
        offsets: where the block begins in it, in every dimension.
        size: of the whole tensor.
    """
    dtype = str(part.dtype).removeprefix("torch.")
    part = part.detach().resolve_conj()
    part = torch.view_as_real(part) if part.is_complex() else part
    if part.dim() > len(size):
        offsets, size = (*offsets, 0), (*size, 2)
    values = part.contiguous().view(-1).view(_BITS[part.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=part.device)
    if list(part.shape[1:]) == list(size[1:]):
        first = int(offsets[0]) * (part.numel() // max(1, part.shape[0])) if size else 0
        step = _WIDTH * _ROWS[part.is_cuda]
        for start in range(0, len(values), step):
            total += _sums(values[start : start + step], first + start)
    else:
        places = torch.zeros((), dtype=torch.int64, device=part.device)
        for offset, width, whole in zip(offsets, part.shape, size, strict=True):
            places = places[..., None] * whole + torch.arange(offset, offset + width, device=part.device)
        long = values.to(torch.int64)
        total[0], total[1] = long.sum(), (long * places.view(-1)).sum()
    bits_sum, places_sum = total.tolist()
    return TensorSum(dtype, bits_sum % _MODULUS, places_sum % _MODULUS)


def _sums(values: torch.Tensor, first: int) -> torch.Tensor:
    """The sum of some values, and of each times its place, counted from `first` on: int64, shape [2]."""
    rows = len(values) // _WIDTH
    if rows < 2:
        bits, places = _sums_of_few(values.to(torch.int64))
        return torch.stack((bits, places + bits * first))
    # As a table, where a place is a row's and a column's: the sums of rows and of columns tell all, and no value but
    # these has to be multiplied.
    of_rows, of_columns = _exact_sums(values[: rows * _WIDTH].view(rows, _WIDTH))
    bits, row_places = _sums_of_few(of_rows)
    _, column_places = _sums_of_few(of_columns)
    sums = torch.stack((bits, row_places * _WIDTH + column_places + bits * first))
    return sums + _sums(values[rows * _WIDTH :], first + rows * _WIDTH) if len(values) % _WIDTH else sums


def _exact_sums(table: torch.Tensor) -> list[torch.Tensor]:
    """Of rows and of columns, in int64; processors add whole numbers several times faster than they widen them."""
    if table.dtype == torch.int64:
        return [table.sum(1), table.sum(0)]
    table = table.to(torch.int32)
    # Modulo 2**32 the sums of all bits say what those of the lower halves are, once those of the upper ones are known.
    upper = table >> 16
    exact = []
    for dim in (1, 0):
        high = upper.sum(dim, dtype=torch.int32).to(torch.int64) << 16
        exact.append(high + ((table.sum(dim, dtype=torch.int32) - high) & 0xFFFFFFFF))
    return exact


def _sums_of_few(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return wide.sum(), (wide * torch.arange(len(wide), device=wide.device)).sum()


def sums_of(tensors: Mapping[str, torch.Tensor], world: World) -> dict[str, TensorSum]:
    """Sums whole tensors: sharded ones over all ranks, others as this rank has them. Every rank must call this.

    One that has no sum is left out.
    """
    own: dict[str, TensorSum] = {}
    shards: dict[str, TensorSum] = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        if not has_sum(part):
            continue
        if not isinstance(tensor, DTensor):
            own[name] = sum_of_part(part, offsets=[0] * part.dim(), size=part.shape)
        elif _counts_here(tensor) and part.numel():
            # What Distributed Checkpoint itself asks a DTensor for its place by.
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            shards[name] = sum_of_part(part, offsets=chunk.offsets, size=tensor.shape)
    return own | add_up(world.gather(shards))


def add_up(ranks: Sequence[Mapping[str, TensorSum]]) -> dict[str, TensorSum]:
    """Adds up what the ranks have of each tensor."""
    whole: dict[str, TensorSum] = {}
    for each in ranks:
        for name, part in each.items():
            whole[name] = whole[name].plus(part) if name in whole else part
    return whole


def digest_of(value: Any) -> str:
    """Returns sixteen hex digits of a plain value: numbers, text, tensors, and any nesting of them in dicts and lists.

    A list and a tuple of the same things are the same; of any other object only the class counts.
    """
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()[:16]


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        digest.update(b"{")
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _feed(digest, value[key])
        digest.update(b"}")
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        if all(type(each) is int for each in value):  # states of generators are long
            digest.update("".join([f"{each!r}," for each in value]).encode())
        else:
            for each in value:
                _feed(digest, each)
        digest.update(b"]")
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(f"{value!r},".encode())
    else:
        digest.update(type(value).__qualname__.encode())


def _counts_here(tensor: DTensor) -> bool:
    """Whether this rank has the first of equal copies of its shard."""
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    return all(
        place == 0 or not isinstance(kind, Replicate) for place, kind in zip(coordinate, tensor.placements, strict=True)
    )
