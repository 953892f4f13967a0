"""Every kind of state comes back bit by bit, on any number of ranks; what cannot be saved is refused by name."""

from __future__ import annotations

import functools
import json
import math
import random
import warnings
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import lr_scheduler

from headway.trainer import World
from headway.trainer.checkpoints.format.plain_values import decode_state, encode_state
from headway.trainer.checkpoints.format.tensor_files import DTYPES, bytes_of
from headway.trainer.checkpoints.snapshot import Snapshot, missing_elements
from headway.trainer.checkpoints.store import Checkpoint, CheckpointStore
from headway.trainer.errors import CheckpointError
from tests.distributed import run_on_ranks
from tests.trainer.checkpoints.kept_state import KeptState

ALONE = World.single("cpu")


def _save(world: World, root: str, state: Any) -> Checkpoint:
    store = CheckpointStore(root, world=world)
    return store.save({"part": KeptState(state)}, rank_parts={}, step=1, epoch=0, metrics={}, meta={})


def _load(world: World, checkpoint: Checkpoint, live: Any = None) -> Any:
    part = KeptState(live or {})
    CheckpointStore(str(Path(checkpoint.path).parent), world=world).load(
        {"part": part}, rank_parts={}, checkpoint=checkpoint
    )
    return part.state


@functools.cache
def _bits(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_of_every_type_come_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    whole = _bits(6, 5) % 2 if dtype == torch.bool else _bits(6, 5)
    table = whole[..., : dtype.itemsize].contiguous().view(dtype)[..., 0]
    state = {
        "whole": table, "none": table[:0], "one": table[2, 3].clone(), "columns": table.t(), "part": table[1:4, ::2],
        "wide": table[:1].expand(3, 5), "empty": torch.empty(0, 3, dtype=dtype), "odd": table[0, :3].clone(),
    }  # fmt: skip
    if dtype.is_complex and dtype != torch.complex32:
        state["conjugate"] = table.conj()
    back = _load(ALONE, _save(ALONE, str(tmp_path), state))
    for key, tensor in state.items():
        assert (back[key].dtype, back[key].shape) == (dtype, tensor.shape), key
        assert bytes_of(back[key]) == bytes_of(tensor.clone()), key


def test_a_tensor_that_is_shared_is_written_once(tmp_path: Path) -> None:
    head = torch.randn(30, 20)
    state = {"embedding": {"weight": head}, "head": {"weight": head}, "list": [head]}
    saved = _save(ALONE, str(tmp_path), state)
    back = _load(ALONE, saved)
    assert back["embedding"]["weight"] is back["head"]["weight"] is back["list"][0]
    with safe_open(Path(saved.path, "rank-00000.safetensors"), framework="pt") as file:
        assert list(file.keys()) == ["part/embedding/weight"]
        assert torch.equal(file.get_tensor("part/embedding/weight"), head)


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.9**step),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda step: 0.9),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [2, 3, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda it: lr_scheduler.ExponentialLR(it, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 10),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 3),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, mode="exp_range"),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.1, 20),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.LinearLR(it), lr_scheduler.StepLR(it, 2)], milestones=[2]
    ),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(it), lr_scheduler.StepLR(it, 2)]
    ),
    "SWALR": lambda it: torch.optim.swa_utils.SWALR(it, 0.05),
}


def test_every_scheduler_of_torch_is_here() -> None:
    there = {
        name
        for name, each in vars(lr_scheduler).items()
        if isinstance(each, type) and issubclass(each, lr_scheduler.LRScheduler)
    }
    assert {name for name in there - SCHEDULERS.keys() if not name.startswith("_")} <= {"LRScheduler", "Optimizer"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_continue(name: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        return float(optimizer.param_groups[0]["lr"])

    optimizer, scheduler = made()
    for _ in range(4):
        step(optimizer, scheduler)
    again, resumed = made()
    for one, other in ((optimizer, again), (scheduler, resumed)):
        encoded, tensors = encode_state("part", one.state_dict())
        json.dumps(encoded, allow_nan=False)
        other.load_state_dict(decode_state(encoded, tensors.__getitem__))
    assert [step(again, resumed) for _ in range(5)] == [step(optimizer, scheduler) for _ in range(5)]


class Holder:
    """No plain value."""


class Marked(torch.Tensor):
    """A tensor with another class, which a checkpoint would lose."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Holder(), "holds a .*Holder, which is neither .* return what it holds as plain values from"),
        (lambda: 3, "holds a builtins.function.*return a name of it"),
        (Path("x"), r"PosixPath.*return str\(\) of it"),
        (defaultdict(list), r"defaultdict.*return dict\(\) of it"),
        (torch.Generator(), r"Generator.*return its get_state\(\)"),
        (nn.Linear(1, 1), r"Linear.*return its state_dict\(\)"),
        (date(2026, 1, 1), r"datetime.date.*return its isoformat\(\)"),
        (np.array(["a", None], dtype=object), "ndarray.*return what it holds as plain values"),
        (torch.ones(2, 2).to_sparse(), r"Tensor.*return its dense or unquantised parts"),
        (
            torch.ones(2, device="meta"),
            "Tensor.*return a tensor with values, which one on the meta device",
        ),
        (nn.utils.rnn.pack_sequence([torch.ones(2)]), "PackedSequence.*return what it holds as plain values"),
        (torch.ones(2).as_subclass(Marked), r"Marked.*return tensor.as_subclass\(torch.Tensor\) of it"),
        (type("Local", (dict,), {})(), r"Local.*return dict\(\) of it"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_what_to_return(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"part 'callbacks', key 'Mine/items/1' .*{message}"):
        encode_state("callbacks", {"Mine": {"items": [1, value]}})


def test_a_quantised_tensor_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to remove them
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointError, match="return its dense or unquantised parts"):
        encode_state("part", {"weight": tensor})


def test_parameters_and_buffers_are_saved_as_tensors() -> None:
    state = {"parameter": nn.Parameter(torch.ones(2)), "buffer": nn.Buffer(torch.zeros(2))}
    encoded, tensors = encode_state("part", state)
    assert encoded == {"parameter": {"$tensor": "part/parameter"}, "buffer": {"$tensor": "part/buffer"}}
    assert [each.tolist() for each in tensors.values()] == [[1.0, 1.0], [0.0, 0.0]]


def test_a_nested_tensor_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its layout is a prototype
        tensor = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(CheckpointError, match="return its dense or unquantised parts"):
        encode_state("part", {"weight": tensor})


def test_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["itself"] = [state]
    with pytest.raises(CheckpointError, match="the state of part 'mine' contains itself, or is nested too deeply"):
        encode_state("mine", state)


def test_numbers_come_back_exactly() -> None:
    dice = random.Random(1)
    bits = [np.frombuffer(dice.randbytes(8), np.float64)[0].item() for _ in range(2000)]
    numbers = [*bits, math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**63, -(2**63), 10**400, True, 1]
    encoded, _ = encode_state("part", numbers)
    back = decode_state(json.loads(json.dumps(encoded, allow_nan=False)), {}.__getitem__)
    for one, other in zip(back, numbers, strict=True):
        assert type(one) is type(other)
        assert one == other if isinstance(one, int) else np.float64(one).tobytes() == np.float64(other).tobytes()


# ---- Ranks -----------------------------------------------------------------------------------------------------------

PLACEMENTS = {
    "rows": [Replicate(), Shard(0)], "columns": [Replicate(), Shard(1)], "both": [Shard(0), Shard(1)],
    "copies": [Replicate(), Replicate()], "small": [Replicate(), Shard(0)], "twice": [Shard(0), Shard(0)],
}  # fmt: skip


def _whole(name: str) -> torch.Tensor:
    rows = 1 if name == "small" else 7
    return torch.arange(rows * 5.0).view(rows, 5) + len(name)


def _sharded(shape: tuple[int, ...], *, zeros: bool = False) -> dict[str, Any]:
    """Return tensors in many arrangements over a mesh; with one dimension the last placement counts."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    tensors = {
        name: distribute_tensor(_whole(name) * (not zeros), mesh, kinds[-len(shape) :])
        for name, kinds in PLACEMENTS.items()
    }
    tensors["empty"] = distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)] * len(shape))
    # A tensor of one row of the mesh, as with tensor parallelism: each row has the whole.
    tensors["each"] = distribute_tensor(_whole("each") * (not zeros), mesh["shards"], [Shard(0)])
    return tensors


def _save_sharded(world: World, root: str) -> Checkpoint:
    # State that only the main rank has, such as that of a callback, changes nothing about who writes the rest.
    extra = {"main": [torch.ones(2)]} if world.is_main else {"main": []}
    parts = {"part": KeptState({**extra, **_sharded((2, 2)), "plain": torch.arange(5), "other": torch.ones(3)})}
    return CheckpointStore(root, world=world).save(
        parts, rank_parts={}, step=1, epoch=0, metrics={}, meta={}, is_replicated=lambda each: each.shape == (5,)
    )


def _load_sharded(world: World, checkpoint: Checkpoint, shape: tuple[int, ...]) -> dict[str, Any]:
    back = _load(world, checkpoint, _sharded(shape, zeros=True))
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in back.items()}


def test_shards_are_written_once_and_read_by_any_number_of_ranks(tmp_path: Path) -> None:
    saved = run_on_ranks(_save_sharded, 4, str(tmp_path))[0]
    wanted = {name: _whole(name) for name in (*PLACEMENTS, "each")}
    wanted |= {"plain": torch.arange(5), "other": torch.ones(3), "empty": torch.empty(0, 4), "main/0": torch.ones(2)}
    elements = dict.fromkeys(wanted, 0)
    for rank in range(4):
        with safe_open(Path(saved.path, f"rank-{rank:05d}.safetensors"), framework="pt") as file:
            assert list(file.keys()), "every rank writes something"
            for name in file.keys():  # noqa: SIM118
                elements[name.removeprefix("part/")] += file.get_tensor(name).numel()
    assert elements == {name: tensor.numel() for name, tensor in wanted.items()}
    alone = _load(ALONE, saved)
    loaded = [alone]
    for shape in ((2,), (3,), (2, 2)):
        loaded += run_on_ranks(_load_sharded, math.prod(shape), saved, shape)
    for state in loaded:
        (state["main/0"],) = state.pop("main")
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(state[name], tensor), name


def test_a_checkpoint_is_read_with_nothing_but_safetensors_and_json(tmp_path: Path) -> None:
    folder = Path(run_on_ranks(_save_sharded, 4, str(tmp_path))[0].path)
    full: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("rank-*.json")):
        entries = json.loads(path.read_text())["tensors"]
        with safe_open(path.with_suffix(".safetensors"), framework="pt") as file:
            for name, entry in entries.items():
                block = file.get_tensor(name)
                whole = full.setdefault(name, torch.empty(entry["shape"], dtype=block.dtype))
                begins = entry.get("offset", [0] * block.dim())
                whole[tuple(slice(at, at + size) for at, size in zip(begins, block.shape, strict=True))] = block
    assert torch.equal(full["part/both"], _whole("both"))
    assert torch.equal(full["part/rows"], _whole("rows"))


def _uneven(world: World, root: str) -> str:
    try:
        _save(world, root, {"both": torch.ones(2), **({"only here": torch.ones(3)} if world.is_main else {})})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_tensor_that_no_rank_would_write_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_on_ranks(_uneven, 2, str(tmp_path))
    assert first == second
    assert "3 elements of part/only here would not be saved" in first
    assert "state must have the same names on all ranks" in first
    assert missing_elements([{}], {"a": 3}) == {"a": 3}


def test_a_later_save_keeps_no_new_objects_for_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would make Python's garbage collector go through all objects of the process, for 0.1 s and more."""
    taken, write = list[Snapshot](), Snapshot.write

    def keep(self: Snapshot, folder: Path, rank: int) -> Any:
        taken.append(self)
        return write(self, folder, rank)

    monkeypatch.setattr(Snapshot, "write", keep)
    store = CheckpointStore(tmp_path, world=ALONE)
    for step, rows in enumerate((2, 2, 3)):
        state = {"same": torch.zeros(4), "resized": torch.zeros(rows)}
        store.save({"part": KeptState(state)}, rank_parts={}, step=step, epoch=0, metrics={}, meta={})
    assert taken[0].layout is taken[1].layout
    first, _, third = (each.layout.shards for each in taken)
    assert first["part/same"] is third["part/same"]
    assert (first["part/resized"].shape, third["part/resized"].shape) == ((2,), (3,))


def _grow(state: dict[str, Any]) -> None:
    weight = state["models"]["net"]["embedding"]
    weight.data = torch.cat([weight.data, torch.full((2, 3), 7.0)])


def _transpose(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["models"]["net"]["square"].t_()


def _cast(state: dict[str, Any]) -> None:
    state["models"]["net"]["square"].data = state["models"]["net"]["square"].data.double()


def _replace(state: dict[str, Any]) -> None:
    state["models"]["net"]["square"] = nn.Parameter(torch.full((3, 3), 5.0))


def _change_in_place(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for each in state["models"]["net"].values():
            each.add_(1)


def _tie(state: dict[str, Any]) -> None:
    state["models"]["net"]["head"] = state["models"]["net"]["embedding"]


def _untie(state: dict[str, Any]) -> None:
    state["models"]["net"]["tied"] = nn.Parameter(torch.full((3, 3), 4.0))


def _swap_names(state: dict[str, Any]) -> None:
    model = state["models"]["net"]
    model["square"], model["head"] = model["head"], model["square"]


def _begin_optimizer_state(state: dict[str, Any]) -> None:
    state["optimizer"]["embedding"] = {"exp_avg": torch.full((4, 3), 2.0), "step": torch.tensor(1.0)}


def _add_a_parameter(state: dict[str, Any]) -> None:
    state["models"]["net"] = {"first": nn.Parameter(torch.ones(2)), **state["models"]["net"]}


def _rename(state: dict[str, Any]) -> None:
    state["models"]["net"]["renamed"] = state["models"]["net"].pop("embedding")


def _change_values(state: dict[str, Any]) -> None:
    state["groups"] = [{"lr": 0.5, "params": ["square", "embedding"]}]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        _grow, _transpose, _cast, _replace, _change_in_place, _tie, _untie, _swap_names, _begin_optimizer_state,
        _add_a_parameter, _rename, _change_values,
    ],
)  # fmt: skip
def test_a_state_that_has_changed_since_the_last_save_is_saved_as_it_is_now(
    tmp_path: Path, change: Any, in_background: bool
) -> None:
    square = nn.Parameter(torch.arange(9.0).view(3, 3))
    state: dict[str, Any] = {
        "models": {
            "net": {
                "embedding": nn.Parameter(torch.ones(4, 3)), "square": square, "tied": square,
                "head": nn.Parameter(torch.full((3, 3), 3.0)),
            },
        },
        "optimizer": {"square": {"exp_avg": torch.zeros(3, 3), "step": torch.tensor(0.0)}},
        "groups": [{"lr": 0.1, "params": ["embedding", "square"]}],
    }  # fmt: skip
    parts, described = {"part": KeptState(state)}, {"epoch": 0, "metrics": {}, "meta": {}}
    reusing, alone = (CheckpointStore(tmp_path / name, world=ALONE) for name in ("reusing", "alone"))

    def save(step: int) -> Checkpoint:
        if not in_background:
            return reusing.save(parts, rank_parts={}, step=step, **described)  # type: ignore[arg-type]
        saving = reusing.begin_save(
            parts, rank_parts={}, step=step, **described,  # type: ignore[arg-type]
            changes_only_on_step=lambda tensor: isinstance(tensor, nn.Parameter),
        )  # fmt: skip
        return saving.result()

    save(1)
    save(2)
    change(state)
    now, expected = save(3), alone.save(parts, rank_parts={}, step=3, **described)  # type: ignore[arg-type]
    for file in ("rank-00000.safetensors", "rank-00000.json", "state.json"):
        assert Path(now.path, file).read_bytes() == Path(expected.path, file).read_bytes()
    loaded = _load(ALONE, now)
    assert {key: each.tolist() for key, each in loaded["models"]["net"].items()} == {
        key: each.tolist() for key, each in state["models"]["net"].items()
    }
    assert loaded["groups"] == state["groups"]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2).to_sparse(), torch.ones(2, 2, device="meta"), torch.ones(2, 2).as_subclass(Marked)],
    ids=["sparse", "meta", "subclass"],
)
def test_a_tensor_that_cannot_be_saved_is_refused_in_a_later_save_too(tmp_path: Path, tensor: torch.Tensor) -> None:
    state = {"model": {"weight": torch.ones(2, 2)}}
    store = CheckpointStore(tmp_path, world=ALONE)
    for step in (1, 2):
        store.save({"part": KeptState(state)}, rank_parts={}, step=step, epoch=0, metrics={}, meta={})
    state["model"]["weight"] = tensor
    with pytest.raises(CheckpointError, match="part 'part', key 'model/weight' holds a"):
        store.save({"part": KeptState(state)}, rank_parts={}, step=3, epoch=0, metrics={}, meta={})
