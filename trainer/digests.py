"""Checksums of tensors that come out the same however these are cut into shards, and digests of plain values.

The sum of a tensor is two numbers: of its elements' bits as whole numbers, and of these times their places in the whole
tensor, both modulo 2**64. So the sums of shards add up to the sum of the whole, on any number of ranks. They find
errors, not a forger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Replicate

from .parallel import local
from .world import World

_WIDTH = 1 << 10
# Rows at a time: what is read again comes from the cache of a core; a GPU wants fewer, larger pieces.
_ROWS = {False: 1 << 7, True: 1 << 14}
_MOST_ROWS = 1 << 15  # sums of so many numbers of 16 bits fit into 32
_FEWEST_ROWS = 8  # fewer are summed sooner without a table
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64

_Longs: TypeAlias = "npt.NDArray[np.int64]"


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


def sum_of_part(
    part: torch.Tensor,
    *,
    offsets: Sequence[int],
    size: Sequence[int],
    first_look: Callable[[torch.Tensor], object] | None = None,
) -> TensorSum:
    """Sums a part of a tensor, on the device where it lies.

    Args:
        part: a block of the whole tensor.
        offsets: where the block begins in it, in every dimension.
        size: of the whole tensor.
        first_look: is given all numbers of the part in their order, in flat pieces, each just before it is summed: what
            else has to read them finds them in the processor's cache.
    """
    dtype = str(part.dtype).removeprefix("torch.")
    part = part.detach().resolve_conj()
    part = torch.view_as_real(part) if part.is_complex() else part
    if part.dim() > len(size):
        offsets, size = (*offsets, 0), (*size, 2)
    values = part.contiguous().view(-1).view(_BITS[part.element_size()])
    if list(part.shape[1:]) == list(size[1:]):
        first = int(offsets[0]) * (part.numel() // max(1, part.shape[0])) if size else 0
        bits, places = _sums_of_run(values, first, first_look)
    else:
        if first_look is not None:
            first_look(values)
        place = torch.zeros((), dtype=torch.int64, device=part.device)
        for offset, width, whole in zip(offsets, part.shape, size, strict=True):
            place = place[..., None] * whole + torch.arange(offset, offset + width, device=part.device)
        long = values.to(torch.int64)
        bits, places = torch.stack((long.sum(), (long * place.view(-1)).sum())).tolist()
    return TensorSum(dtype, bits % _MODULUS, places % _MODULUS)


def _sums_of_run(
    values: torch.Tensor, first: int, first_look: Callable[[torch.Tensor], object] | None
) -> tuple[int, int]:
    """The sum of values side by side, and of each times its place, counted from `first` on; not yet modulo 2**64."""
    bits = places = 0
    for start in range(0, len(values), _WIDTH * _MOST_ROWS):
        run = values[start : start + _WIDTH * _MOST_ROWS]
        whole = len(run) // _WIDTH * _WIDTH if len(run) >= _WIDTH * _FEWEST_ROWS else 0
        if whole:
            # As a table, where a place is a row's and a column's: the sums of rows and of columns tell all, and no
            # value but these has to be multiplied.
            of_rows, of_columns = _exact_sums(run[:whole].view(-1, _WIDTH), first_look)
            sum_of_all, row_places = _sums_of_few(of_rows)
            _, column_places = _sums_of_few(of_columns)
            bits += sum_of_all
            places += row_places * _WIDTH + column_places + sum_of_all * (first + start)
        if len(rest := run[whole:]):
            if first_look is not None:
                first_look(rest)
            sum_of_all, rest_places = _sums_of_few(rest.to(torch.int64).cpu().numpy())
            bits += sum_of_all
            places += rest_places + sum_of_all * (first + start + whole)
    return bits, places


def _exact_sums(table: torch.Tensor, first_look: Callable[[torch.Tensor], object] | None) -> tuple[_Longs, _Longs]:
    """Of rows and of columns; processors add whole numbers several times faster than they widen them."""
    kind = torch.int64 if table.dtype == torch.int64 else torch.int32
    # Of 32 bits, those of the upper halves too: modulo 2**32 the sums of all bits then say what the lower ones are.
    num_sums = 2 if table.dtype == torch.int32 else 1
    of_rows: list[list[torch.Tensor]] = [[] for _ in range(num_sums)]
    of_columns = [torch.zeros(_WIDTH, dtype=kind, device=table.device) for _ in range(num_sums)]
    upper: torch.Tensor | None = None
    for rows in torch.split(table, _ROWS[table.is_cuda]):
        if first_look is not None:
            first_look(rows.view(-1))
        numbers = [rows.to(kind)]
        if num_sums == 2:
            upper = (
                rows >> 16
                if upper is None or len(upper) != len(rows)
                else torch.bitwise_right_shift(rows, 16, out=upper)
            )
            numbers.append(upper)
        for each, rows_so_far, columns_so_far in zip(numbers, of_rows, of_columns, strict=True):
            rows_so_far.append(each.sum(1, dtype=kind))
            columns_so_far += each.sum(0, dtype=kind)
    return _exact([torch.cat(each) for each in of_rows]), _exact(of_columns)


def _exact(sums: Sequence[torch.Tensor]) -> _Longs:
    exact: _Longs = sums[0].to(torch.int64).cpu().numpy()
    if len(sums) == 2:
        upper: _Longs = sums[1].to(torch.int64).cpu().numpy() << 16
        exact = upper + ((exact - upper) & 0xFFFFFFFF)
    return exact


def _sums_of_few(long: _Longs) -> tuple[int, int]:
    return int(long.sum()), int(long @ np.arange(len(long)))


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
