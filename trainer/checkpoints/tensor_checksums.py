"""Checksums of tensors, independent of their sharding, and digests of plain values.

A checksum is two numbers over the tensor's bytes as 32-bit integers (lanes, little-endian): the sum of the lanes, and
the sum of each lane times its index, both modulo 2**64. The checksums of shards therefore add up to that of the
full tensor, on any number of ranks. One or two changed bits are always detected; tampering is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Replicate

from ..distributed.dtensor import to_local
from ..distributed.world import World

# 64-bit words. This many rows stay in a core's cache after the first read.
_WIDTH, _ROWS = 1 << 10, 1 << 6
_FEWEST_WORDS = 8 * _WIDTH  # fewer are faster to sum without a table
_MOST_AT_ONCE = 1 << 20  # elements that are widened to 64 bits
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LANE = 0xFFFFFFFF
_MODULUS = 1 << 64

_Bytes: TypeAlias = "npt.NDArray[np.uint8]"
_Longs: TypeAlias = "npt.NDArray[np.int64]"


class TensorChecksum(NamedTuple):
    """The checksum of a tensor or of a shard; checksums of shards add up."""

    dtype: str
    bits: int
    places: int

    def plus(self, other: TensorChecksum) -> TensorChecksum:
        """Return the checksum of two shards of one tensor together."""
        bits, places = self.bits + other.bits, self.places + other.places
        return TensorChecksum(self.dtype, bits % _MODULUS, places % _MODULUS)

    def __str__(self) -> str:
        return f"{self.dtype} lanes:{self.bits:016x}{self.places:016x}"


def has_checksum(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a checksum: its local part is a plain tensor, not a subclass that packs others."""
    part = to_local(tensor)
    return type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout == torch.strided and not part.is_quantized


def shard_checksum(
    part: torch.Tensor,
    *,
    offsets: Sequence[int],
    size: Sequence[int],
    also: Callable[[_Bytes], object] | None = None,
) -> TensorChecksum:
    """Compute the checksum of a block of a tensor, on its device.

    Args:
        part: the block.
        offsets: position of the block in the full tensor, per dimension.
        size: size of the full tensor.
        also: called with all bytes of the block in order, in pieces that are still in the CPU cache, for another reader
            of the same bytes.
    """
    dtype = str(part.dtype).removeprefix("torch.")
    part, offsets, size = _as_numbers(part, offsets, size)
    if part.is_cpu and list(part.shape[1:]) == list(size[1:]):
        data: _Bytes = part.contiguous().view(-1).view(torch.uint8).numpy()
        first = int(offsets[0]) * (data.size // max(1, part.shape[0])) if size else 0
        bits, places = _sums_of_bytes(data, first, also)
    else:
        if also is not None:
            also(part.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        bits, places = _sums_of_elements(part, offsets, size)
    return TensorChecksum(dtype, bits % _MODULUS, places % _MODULUS)


def _as_numbers(
    part: torch.Tensor, offsets: Sequence[int], size: Sequence[int]
) -> tuple[torch.Tensor, Sequence[int], Sequence[int]]:
    """Return a complex tensor as pairs of real numbers; others as they are."""
    part = part.detach().resolve_conj().resolve_neg()
    part = torch.view_as_real(part) if part.is_complex() else part
    return (part, offsets, size) if part.dim() == len(size) else (part, (*offsets, 0), (*size, 2))


def _sums_of_bytes(data: _Bytes, first: int, also: Callable[[_Bytes], object] | None) -> tuple[int, int]:
    """Sum contiguous bytes that start at index `first` of the full tensor; not yet modulo 2**64."""
    begin = -first % 4
    # The table needs one more lane after its end.
    words = ((len(data) - begin - 4) // 8) // _WIDTH * _WIDTH
    if words < _FEWEST_WORDS:
        if also is not None:
            also(data)
        return _sums_of_few(data, first)
    end = begin + 8 * words
    if also is not None:
        also(data[:begin])
    bits, places = _sums_of_words(data[begin : end + 4], also)
    if also is not None:
        also(data[end:])
    places += bits * ((first + begin) // 4)
    for at, rest in ((0, data[:begin]), (end, data[end:])):
        rest_bits, rest_places = _sums_of_few(rest, first + at)
        bits, places = bits + rest_bits, places + rest_places
    return bits, places


def _sums_of_words(data: _Bytes, also: Callable[[_Bytes], object] | None) -> tuple[int, int]:
    """Sum pairs of lanes, and each times its index; there must be one more lane after the last pair.

    Sums of pairs, as 64-bit integers, give the sum of their lower lanes modulo 2**32. Pairs shifted by one lane give
    that of the other lanes; together they give the rest. That is several times faster than widening each lane.
    """
    count = len(data) // 8
    tables = [torch.from_numpy(np.frombuffer(data, np.int64, count, at)).view(-1, _WIDTH) for at in (0, 4)]
    of_rows: list[list[torch.Tensor]] = [[], []]
    of_columns = [torch.zeros(_WIDTH, dtype=torch.int64) for _ in tables]
    for begin in range(0, count // _WIDTH, _ROWS):
        for table, rows_so_far, columns_so_far in zip(tables, of_rows, of_columns, strict=True):
            rows = table[begin : begin + _ROWS]
            columns_so_far += rows.sum(0)
            rows_so_far.append(rows.sum(1))
        if also is not None:
            also(data[8 * _WIDTH * begin : min(8 * count, 8 * _WIDTH * (begin + _ROWS))])
    # An index is that of a row plus that of a column, so the sums of rows and of columns suffice.
    pairs, pair_places = [], []
    for rows_so_far, columns_so_far in zip(of_rows, of_columns, strict=True):
        row_sums, column_sums = torch.cat(rows_so_far).numpy(), columns_so_far.numpy()
        pairs.append(int(column_sums.sum()))
        pair_places.append(_times_place(row_sums) * _WIDTH + _times_place(column_sums))
    ends = data[:4], data[-4:]
    before, behind = (int.from_bytes(each.tobytes(), "little") for each in ends)
    # Sums over lanes with an even index, and over lanes with an odd index.
    even = _lower(pairs[0]) + (_upper(pairs[0]) - _lower(pairs[1]) << 32) % _MODULUS
    odd = _lower(pairs[1]) + (_upper(pairs[1]) - (even - before + behind) << 32) % _MODULUS
    even_places = _lower(pair_places[0]) + (_upper(pair_places[0]) - _lower(pair_places[1]) << 32) % _MODULUS
    in_later_pairs = even_places + count * behind - (even - before + behind)
    odd_places = _lower(pair_places[1]) + (_upper(pair_places[1]) - in_later_pairs << 32) % _MODULUS
    return even + odd, 2 * (even_places + odd_places) + odd


def _lower(number: int) -> int:
    return number & _LANE


def _upper(number: int) -> int:
    return number >> 32 & _LANE


def _times_place(long: _Longs) -> int:
    return int(long @ np.arange(len(long)))


def _sums_of_few(data: _Bytes, first: int) -> tuple[int, int]:
    """Sum a few bytes, without a table."""
    before = first % 4
    padded = np.zeros((before + len(data) + 3) // 4 * 4, np.uint8)
    padded[before : before + len(data)] = data
    lanes = padded.view("<u4").astype(np.int64)
    bits = int(lanes.sum())
    return bits, _times_place(lanes) + bits * (first // 4)


def _sums_of_elements(
    part: torch.Tensor,
    offsets: Sequence[int],
    size: Sequence[int],
) -> tuple[int, int]:
    """Sum any block, on any device; widen each element and its index to 64 bits."""
    sums = torch.zeros(2, dtype=torch.int64, device=part.device)
    at_once = max(1, _MOST_AT_ONCE // max(1, part[:1].numel() if part.dim() else 1))
    for begin in range(0, part.shape[0] if part.dim() else 1, at_once):
        rows = part[begin : begin + at_once] if part.dim() else part
        place = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, (offset, width, whole) in enumerate(zip(offsets, rows.shape, size, strict=True)):
            start = offset if dim else offset + begin
            place = place[..., None] * whole + torch.arange(start, start + width, device=part.device)
        values = rows.contiguous().view(-1).view(_BITS[part.element_size()])
        long, place = _lanes(values, place.view(-1))
        sums += torch.stack((long.sum(), (long * place).sum()))
    bits, places = sums.tolist()
    return bits, places


def _lanes(values: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements as lanes, or as shares of lanes, and the indices of the lanes."""
    num_bytes = values.element_size()
    if num_bytes == 8:
        values, place = values.view(torch.int32), torch.stack((2 * place, 2 * place + 1), 1).view(-1)
    if num_bytes >= 4:
        return values.to(torch.int64) & _LANE, place
    long = values.to(torch.int64) & ((1 << 8 * num_bytes) - 1)
    in_lane = 4 // num_bytes
    return long << (place % in_lane * (8 * num_bytes)), place // in_lane


def compute_checksums(tensors: Mapping[str, torch.Tensor], world: World) -> dict[str, TensorChecksum]:
    """Compute checksums of full tensors; sharded ones over all ranks. Every rank must call this.

    Tensors that have no checksum are left out.
    """
    own: dict[str, TensorChecksum] = {}
    shards: dict[str, tuple[int, TensorChecksum]] = {}
    for name, tensor in tensors.items():
        part = to_local(tensor)
        if not has_checksum(part):
            continue
        if not isinstance(tensor, DTensor):
            own[name] = shard_checksum(part, offsets=[0] * part.dim(), size=part.shape)
        elif _counts_here(tensor) and part.numel():
            # Distributed Checkpoint calls the same method for the offsets of a DTensor.
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            first_rank = int(tensor.device_mesh.mesh.min())
            shards[name] = first_rank, shard_checksum(part, offsets=chunk.offsets, size=tensor.shape)
    return own | combine_checksums(_of_first_meshes(world.all_gather_object(shards)))


def _of_first_meshes(
    ranks: Sequence[Mapping[str, tuple[int, TensorChecksum]]],
) -> list[dict[str, TensorChecksum]]:
    """Keep, for each tensor, the shards of one mesh: with tensor parallelism, several groups of ranks may have it."""
    first: dict[str, int] = {}
    for each in ranks:
        for name, (rank, _) in each.items():
            first[name] = min(rank, first.get(name, rank))
    return [{name: part for name, (rank, part) in each.items() if rank == first[name]} for each in ranks]


def combine_checksums(ranks: Sequence[Mapping[str, TensorChecksum]]) -> dict[str, TensorChecksum]:
    """Add up the ranks' checksums of each tensor."""
    whole: dict[str, TensorChecksum] = {}
    for each in ranks:
        for name, part in each.items():
            whole[name] = whole[name].plus(part) if name in whole else part
    return whole


def digest_of(value: Any) -> str:
    """Return a digest of a plain value, 16 hex digits: numbers, text, tensors, nested in dicts and lists.

    Lists and tuples count as equal; for any other object only the class counts.
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
        if all(type(each) is int for each in value):  # the states of random number generators are long
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
    """Whether this rank has the first replica of its shard."""
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    return all(
        place == 0 or not isinstance(kind, Replicate) for place, kind in zip(coordinate, tensor.placements, strict=True)
    )
