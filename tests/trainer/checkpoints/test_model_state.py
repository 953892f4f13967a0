"""Models and optimizers in a checkpoint: the next step equals the uninterrupted one under every strategy."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from headway.trainer.checkpoints.model_state import ModelState, OptimizerState
from headway.trainer.checkpoints.store import Checkpoint, CheckpointStore
from headway.trainer.distributed.world import World
from headway.trainer.errors import CheckpointError, ConfigError
from tests.distributed import run_on_ranks

ALONE = World.single("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread, as on the ranks; more threads only slow tiny layers down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Tied weights, a frozen layer, a parameter without gradients, a buffer, rows that ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        self.calls += 1
        logits: torch.Tensor = self.head(self.frozen(x))
        return logits


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def spread(model: Net, strategy: str) -> nn.Module:
    if strategy.endswith("+wrapped"):
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
        model.compile(backend="eager")
    if strategy.startswith("ddp"):
        return DistributedDataParallel(model, find_unused_parameters=True)
    if strategy.startswith("fsdp"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


Make = Callable[[nn.Module], torch.optim.Optimizer]


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    weights = [value for name, value in named.items() if "blocks" in name]
    return [
        {"params": [value for value in named.values() if not any(value is each for each in weights)], "lr": 0.01},
        {"params": weights, "lr": 0.002, "weight_decay": 0.3},
    ]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "groups": lambda m: torch.optim.AdamW(decayed(m)),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "trainable only": lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad]),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"models": ModelState({"net": model}), "optimizers/adam": OptimizerState({"net": model}, "adam", optimizer)}


def save(store: CheckpointStore, parts: dict[str, Any], step: int = 1) -> Checkpoint:
    return store.save(parts, rank_parts={}, step=step, epoch=0, metrics={}, meta={})


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.extended), 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_step_is_bit_equal_for_every_optimizer(tmp_path: Path, name: str, after: int) -> None:
    model = build()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 0, after)
    store = CheckpointStore(str(tmp_path), world=ALONE)
    before = copy.deepcopy(optimizer.state_dict())
    saved = save(store, parts_of(model, optimizer))
    assert repr(before) == repr(optimizer.state_dict())  # saving has no side effects, not even before the first step
    expected = train(model, optimizer, after, after + 3)
    for warm in (0, 2):  # into a fresh optimizer, and into one that has made steps
        again = build(seed=1)
        resumed = OPTIMIZERS[name](again)
        train(again, resumed, 50, 50 + warm)
        store.load(parts_of(again, resumed), rank_parts={}, checkpoint=saved)
        assert train(again, resumed, after, after + 3) == expected
        assert all(map(torch.equal, everything(again, resumed), everything(model, optimizer)))
        assert [{**group, "params": 0} for group in resumed.param_groups] == [
            {**group, "params": 0} for group in optimizer.param_groups
        ]


def test_moments_keep_their_own_dtype(tmp_path: Path) -> None:
    model = build().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        moments = {name: torch.randn(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(5.0), **moments}
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = save(store, parts_of(model, optimizer))
    again = build(seed=1).to(torch.bfloat16)
    resumed = torch.optim.AdamW(again.parameters(), foreach=False)
    store.load(parts_of(again, resumed), rank_parts={}, checkpoint=saved)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert resumed.state[mine]["exp_avg"].dtype == torch.float32
        assert torch.equal(resumed.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_two_models_and_an_optimizer_over_both(tmp_path: Path) -> None:
    def gan(seed: int) -> tuple[dict[str, nn.Module], torch.optim.Optimizer, torch.optim.Optimizer, dict[str, Any]]:
        models: dict[str, nn.Module] = {"generator": build(seed), "critic": build(seed + 1), "no_weights": nn.Tanh()}
        one = torch.optim.Adam(models["critic"].parameters())
        both = torch.optim.SGD(
            [*models["critic"].parameters(), *models["generator"].parameters()], lr=0.1, momentum=0.9
        )
        parts = {
            "models": ModelState(models),
            "optimizers/one": OptimizerState(models, "one", one),
            "optimizers/both": OptimizerState(models, "both", both),
        }
        return models, one, both, parts

    models, one, both, parts = gan(0)
    train(models["critic"], one, 0, 2)
    train(models["generator"], both, 0, 2)
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = save(store, parts)
    models2, one2, both2, parts2 = gan(7)
    store.load(parts2, rank_parts={}, checkpoint=saved)
    for name in ("critic", "generator"):
        assert all(map(torch.equal, everything(models[name], one), everything(models2[name], one2)))
    assert train(models["critic"], one, 2, 4) == train(models2["critic"], one2, 2, 4)
    assert train(models["generator"], both, 2, 4) == train(models2["generator"], both2, 2, 4)


def test_keys_and_shapes_that_differ_are_named(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = save(store, {"models": ModelState({"net": nn.Linear(2, 3)})})

    def load(model: nn.Module, name: str = "net") -> None:
        store.load({"models": ModelState({name: model})}, rank_parts={}, checkpoint=saved)

    with pytest.raises(
        CheckpointError, match=r"keys of 'net' differ.*not in the checkpoint: 0\.bias, 0\.weight; only.*: bias"
    ):
        load(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(CheckpointError, match=r"(?s)part 'models'.*size mismatch for weight"):
        load(nn.Linear(4, 3))
    with pytest.raises(
        CheckpointError, match=r"models differ: not in the checkpoint: other; only in the checkpoint: net"
    ):
        load(nn.Linear(2, 3), "other")
    pruned = prune.l1_unstructured(nn.Linear(2, 3), "weight", amount=0.5)
    with pytest.raises(
        CheckpointError, match=r"only in the checkpoint: weight\. torch\.nn\.utils\.prune.*prune\.identity"
    ):
        load(pruned)
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: weight\. A parametrization.*configure_models"):
        load(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))


def test_a_module_may_change_in_place_what_it_loads(tmp_path: Path) -> None:
    def clamp(module: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
        state_dict[f"{prefix}weight"].clamp_(max=0.5)

    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = store.save({"models": ModelState({"model": model})}, rank_parts={}, step=1, epoch=0, metrics={}, meta={})
    other = nn.Linear(2, 2)
    other.register_load_state_dict_pre_hook(clamp)
    store.load({"models": ModelState({"model": other})}, rank_parts={}, checkpoint=saved)
    assert torch.equal(other.weight, torch.full((2, 2), 0.5))
    assert torch.equal(other.bias, model.bias)
    assert other.weight.requires_grad


def test_an_optimizer_over_other_parameters_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    model = build()
    saved = save(store, parts_of(model, OPTIMIZERS["groups"](model)))

    def load(optimizer: torch.optim.Optimizer) -> None:
        part = OptimizerState({"net": model}, "adam", optimizer)
        store.load({"optimizers/adam": part}, rank_parts={}, checkpoint=saved)

    with pytest.raises(CheckpointError, match=r"'adam' has 1 parameter groups, but the checkpoint has 2"):
        load(OPTIMIZERS["adamw"](model))
    with pytest.raises(CheckpointError, match=r"group 0 of optimizer 'adam' differ.*net\.embed\.weight"):
        load(torch.optim.AdamW(list(reversed(decayed(model)))))
    with pytest.raises(
        ConfigError,
        match=r"'adam' holds 1 parameters that belong to none of the models \(net\).*shape \(3,\).*sharding replaces",
    ):
        parts_of(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1))


# Several ranks: a run saved under one strategy can resume under every other.

MADE = ("groups", "sgd")


def save_and_go_on(world: World, root: str, strategy: str, name: str) -> list[Any]:
    model = spread(build(), strategy)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 0, 2)
    saved = save(CheckpointStore(f"{root}/{world.size} {strategy} {name}", world=world), parts_of(model, optimizer), 2)
    return [saved, everything(model, optimizer), train(model, optimizer, 2, 5)]


def resume(world: World, saved: Checkpoint, strategy: str, name: str) -> list[Any]:
    model = spread(build(seed=world.rank + 1), strategy)
    optimizer = OPTIMIZERS[name](model)
    parts = parts_of(model, optimizer)
    CheckpointStore("unused", world=world).load(parts, rank_parts={}, checkpoint=saved)
    if strategy.startswith("fsdp"):
        for parameter in model.parameters():
            for value in optimizer.state[parameter].values():
                if value.shape == parameter.shape:
                    assert isinstance(value, DTensor)
                    assert value.placements == parameter.placements  # type: ignore[attr-defined]
    return [everything(model, optimizer), train(model, optimizer, 2, 5)]


def save_all(world: World, root: str, strategies: tuple[str, ...]) -> dict[tuple[str, str], list[Any]]:
    return {(strategy, name): save_and_go_on(world, root, strategy, name) for strategy in strategies for name in MADE}


def resume_all(world: World, saved: dict[Any, Checkpoint], strategies: tuple[str, ...]) -> dict[Any, list[Any]]:
    return {
        (source, strategy): resume(world, checkpoint, strategy, source[2])
        for source, checkpoint in saved.items()
        for strategy in strategies
    }


@pytest.mark.extended
def test_saved_under_one_strategy_and_number_of_ranks_resumed_under_all_others() -> None:
    with tempfile.TemporaryDirectory() as root:
        ran: dict[tuple[int, str, str], list[Any]] = {}
        for size, strategies in ((1, ("plain",)), (2, ("ddp", "fsdp+wrapped"))):
            results = (
                [save_all(ALONE, root, strategies)] if size == 1 else run_on_ranks(save_all, size, root, strategies)
            )
            for key, (saved, state, losses) in results[0].items():
                ran[size, *key] = [saved, state, losses]
                assert all(result[key][2] == losses for result in results)
        saved = {key: value[0] for key, value in ran.items()}
        for size, strategies in ((1, ("plain",)), (2, ("ddp+wrapped", "fsdp")), (3, ("fsdp",))):
            resumed = (
                [resume_all(ALONE, saved, strategies)]
                if size == 1
                else run_on_ranks(resume_all, size, saved, strategies)
            )
            for rank_result in resumed:
                for (source, strategy), (state, losses) in rank_result.items():
                    _, expected_state, expected_losses = ran[source]
                    told = f"{source} resumed as {strategy} on {size}"
                    assert all(map(torch.equal, state, expected_state)), told
                    assert losses == pytest.approx(expected_losses, abs=1e-6), told
