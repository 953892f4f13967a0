"""Sums of tensors: the same however a tensor is cut, and other ones for other tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from headway.trainer import World
from headway.trainer.digests import TensorSum, add_up, digest_of, sum_of_part, sums_of
from tests.distributed import run_on_ranks

ALONE = World.alone("cpu")
KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def _sum(tensor: torch.Tensor) -> str:
    return str(sums_of({"it": tensor}, ALONE)["it"])


def _some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_parts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    tensor = (_some(7, 5, 3) * 4).to(dtype)
    before = tensor.clone()
    whole = sums_of({"it": tensor}, ALONE)
    for dim in range(3):
        cuts = (0, 2, 3, tensor.shape[dim])
        parts = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            offsets = [begin if each == dim else 0 for each in range(3)]
            part = tensor.narrow(dim, begin, end - begin)
            parts.append({"it": sum_of_part(part, offsets=offsets, size=tensor.shape)})
        assert add_up(parts) == whole, dim
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)) or dtype == torch.bool


def test_longer_than_a_chunk_and_without_dimensions() -> None:
    long = _some(3, 70_001)
    halves = [{"it": sum_of_part(long[i : i + 1], offsets=(i, 0), size=long.shape)} for i in range(3)]
    assert add_up(halves) == sums_of({"it": long}, ALONE)
    assert _sum(torch.tensor(3.0)) != _sum(torch.tensor(4.0))
    assert _sum(torch.empty(0)) == "float32 " + "0" * 32


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int32, -1), (torch.int32, 2**31 - 1), (torch.int32, -(2**31)), (torch.int16, -(2**15)), (torch.uint8, 255)],
)
def test_numbers_as_large_as_they_come_are_summed_exactly(dtype: torch.dtype, value: int) -> None:
    count = 2**25 + 2**10 + 3  # more than is summed in 32 bits at once
    tensor = torch.full((count,), value, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    expected = TensorSum(name, count * value % 2**64, count * (count - 1) // 2 * value % 2**64)
    assert sums_of({"it": tensor}, ALONE) == {"it": expected}


def test_the_sums_are_what_they_are_said_to_be_and_all_numbers_are_looked_at_once() -> None:
    tensor, seen = _some(300_007), list[torch.Tensor]()
    found = sum_of_part(tensor, offsets=(0,), size=tensor.shape, first_look=lambda piece: seen.append(piece.clone()))
    bits = tensor.view(torch.int32).tolist()
    assert found == ("float32", sum(bits) % 2**64, sum(place * each for place, each in enumerate(bits)) % 2**64)
    assert len(seen) > 2
    assert torch.equal(torch.cat(seen), tensor.view(torch.int32))


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
    return {name: str(each) for name, each in sums_of(tensors, world).items()}


def test_sharded_over_ranks_it_is_the_same() -> None:
    whole = _sum(_some(7, 5))
    for sums in run_on_ranks(_sharded, 4):
        assert sums == {**dict.fromkeys(("rows", "columns", "both", "copies"), whole), "small": _sum(_some(1, 5))}
