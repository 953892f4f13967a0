"""Checksums of tensors: independent of sharding, and different for different tensors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from headway.trainer import World
from headway.trainer.checkpoints import tensor_checksums
from headway.trainer.checkpoints.tensor_checksums import (
    TensorChecksum,
    combine_checksums,
    compute_checksums,
    digest_of,
    shard_checksum,
)
from tests.distributed import run_on_ranks

ALONE = World.single("cpu")
KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def _sum(tensor: torch.Tensor) -> str:
    return str(compute_checksums({"it": tensor}, ALONE)["it"])


def _some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_parts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    tensor = (_some(7, 5, 3) * 4).to(dtype)
    before = tensor.clone()
    whole = compute_checksums({"it": tensor}, ALONE)
    for dim in range(3):
        cuts = (0, 2, 3, tensor.shape[dim])
        parts = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            offsets = [begin if each == dim else 0 for each in range(3)]
            part = tensor.narrow(dim, begin, end - begin)
            parts.append({"it": shard_checksum(part, offsets=offsets, size=tensor.shape)})
        assert combine_checksums(parts) == whole, dim
    # Devices use a different algorithm.
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    offsets, size = [0] * numbers.dim(), numbers.shape
    bits, places = tensor_checksums._sums_of_elements(numbers, offsets, size)
    assert (bits % 2**64, places % 2**64) == (whole["it"].bits, whole["it"].places)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)) or dtype == torch.bool


def test_longer_than_a_chunk_and_without_dimensions() -> None:
    long = _some(3, 70_001)
    halves = [{"it": shard_checksum(long[i : i + 1], offsets=(i, 0), size=long.shape)} for i in range(3)]
    assert combine_checksums(halves) == compute_checksums({"it": long}, ALONE)
    assert _sum(torch.tensor(3.0)) != _sum(torch.tensor(4.0))
    assert _sum(torch.empty(0)) == "float32 lanes:" + "0" * 32


def _said(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the sum of a tensor's lanes, and of each times its index, in Python integers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    lanes = np.frombuffer(data + bytes(-len(data) % 4), "<u4").tolist()
    return sum(lanes) % 2**64, sum(place * each for place, each in enumerate(lanes)) % 2**64


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("value", [None, -1, -(2**7)])
def test_the_sums_are_what_they_are_said_to_be_wherever_it_is_cut(dtype: torch.dtype, value: int | None) -> None:
    """With and without a table, with and without partial lanes and words; extreme and random values."""
    some = torch.randint(-(2**62), 2**62, (300_007,), generator=torch.Generator().manual_seed(1))
    tensor = (some if value is None else torch.full_like(some, value)).to(dtype)
    for count in (0, 1, 70_001, len(tensor)):
        whole, seen = tensor[:count], list[bytes]()
        found = shard_checksum(
            whole, offsets=(0,), size=whole.shape, also=lambda piece, seen=seen: seen.append(bytes(piece))
        )
        assert (found.bits, found.places) == _said(whole), count
        assert b"".join(seen) == whole.view(torch.uint8).numpy().tobytes()
        assert len(seen) > 2 or count < len(tensor)
        for cut in (1, 2, 3, count // 2 + 1):
            parts = [
                {"it": shard_checksum(part, offsets=(begin,), size=whole.shape)}
                for begin, part in ((0, whole[:cut]), (cut, whole[cut:]))
                if len(part)
            ]
            assert combine_checksums(parts).get("it", found) == found, (count, cut)


def test_more_than_fits_into_32_bits_is_summed_exactly() -> None:
    count = 2**25 + 2**10 + 3
    largest = torch.full((count,), -1, dtype=torch.int32)
    lane = 2**32 - 1
    expected = TensorChecksum("int32", count * lane % 2**64, count * (count - 1) // 2 * lane % 2**64)
    assert compute_checksums({"it": largest}, ALONE) == {"it": expected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_each_flipped_bit_shows_and_each_two(dtype: torch.dtype) -> None:
    """In a row and column of the table, in the lower and upper lane of a pair, and after the table."""
    tensor = torch.zeros(300_007, dtype=dtype)
    data = tensor.view(torch.uint8).numpy()
    data[:] = torch.randint(0, 256, (len(data),), generator=torch.Generator().manual_seed(1)).numpy()
    whole = _sum(tensor)
    places = [0, 3, 4, 7, 8, 8192, 8199, 8192 * 9 + 15, len(data) - 1]
    flips = [(place, 1 << bit) for place in places for bit in (0, 6, 7)]
    for some in [*((flip,) for flip in flips), *itertools.combinations(flips, 2)]:
        for place, bit in some:
            data[place] ^= bit
        assert _sum(tensor) != whole, some
        for place, bit in some:
            data[place] ^= bit
    assert _sum(tensor) == whole


def test_a_conjugate_that_is_not_worked_out_yet_has_the_sum_of_its_numbers() -> None:
    tensor = torch.view_as_complex(_some(5, 2))
    assert _sum(tensor.conj()) == _sum(tensor.conj().resolve_conj()) != _sum(tensor)
    assert _sum(tensor.conj().imag) == _sum(-tensor.imag)


def test_whatever_is_changed_shows() -> None:
    tensor = _some(64, 64)
    sums = {_sum(tensor), _sum(tensor.flip(0)), _sum(tensor.T), _sum(tensor.double()), _sum(-tensor)}
    for row, column, bit in ((0, 0, 0), (63, 63, 31), (5, 9, 22)):
        flipped = tensor.clone()
        flipped.view(torch.int32)[row, column] ^= 1 << bit if bit < 31 else -(1 << 31)
        sums.add(_sum(flipped))
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert len(sums | {_sum(swapped)}) == 9


def test_plain_values() -> None:
    value: dict[str, Any] = {"a": (1, 2.5, None), "b": [torch.arange(3), "text"]}
    assert digest_of(value) == digest_of({"b": (torch.arange(3), "text"), "a": [1, 2.5, None]})
    others = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": torch.tensor(1)}, {"a": [1]}, {"b": 1}]
    assert len({digest_of(each) for each in others}) == len(others)


def _sharded(world: World) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    placements = {
        "rows": [Replicate(), Shard(0)],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "copies": [Replicate(), Replicate()],
    }
    tensors = {name: distribute_tensor(_some(7, 5), mesh, each) for name, each in placements.items()}
    tensors["small"] = distribute_tensor(_some(1, 5), mesh, [Replicate(), Shard(0)])
    return {name: str(each) for name, each in compute_checksums(tensors, world).items()}


def test_sharded_over_ranks_it_is_the_same() -> None:
    whole = _sum(_some(7, 5))
    for sums in run_on_ranks(_sharded, 4):
        assert sums == {**dict.fromkeys(("rows", "columns", "both", "copies"), whole), "small": _sum(_some(1, 5))}
