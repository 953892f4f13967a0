"""From the meta device to many ranks: equal weights everywhere, none left out, invalid settings refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from headway.trainer import Callback, ConfigError, ParallelConfig, World
from headway.trainer.distributed.dtensor import to_full_tensor, to_local, unwrap
from headway.trainer.distributed.parallelize import check_strategy
from tests.distributed import run_on_ranks
from tests.tiny import Deep, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _config(**parallel: Any) -> TinyConfig:
    return TinyConfig(max_steps=1, parallel=ParallelConfig(**parallel))


def _model(make: Any) -> type[TinyTrainer]:
    class Makes(TinyTrainer):
        def configure_models(self) -> None:
            self.model = make()

    return Makes


def _of(size: int) -> World:
    """A rank without a process group, for checks before any collective."""
    return World(rank=0, size=size, local_rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("parallel", "size", "message"),
    [
        ({"strategy": "none"}, 2, "strategy='none' trains in one process, but there are 2 ranks: use 'ddp' or 'fsdp'"),
        (
            {"strategy": "hsdp", "dp_shard": 2},
            3,
            r"dp_shard=2 \(strategy 'hsdp'\) must divide the number of ranks, 3",
        ),
        (
            {"strategy": "hsdp", "dp_shard": 4},
            2,
            r"dp_shard=4 \(strategy 'hsdp'\) must divide the number of ranks, 2",
        ),
        ({"strategy": "hsdp", "dp_shard": 2}, 4, None),
        ({"strategy": "hsdp", "dp_shard": 2}, 1, None),
        ({"strategy": "none"}, 1, None),
        ({"strategy": "fsdp"}, 3, None),
    ],
)
def test_a_strategy_must_fit_the_ranks(parallel: dict[str, Any], size: int, message: str | None) -> None:
    if message is None:
        check_strategy(ParallelConfig(**parallel), _of(size))
        return
    configured: list[str] = []

    class Watches(Callback):
        def on_models_configured(self, trainer: Any) -> None:
            configured.append("too late")

    with pytest.raises(ConfigError, match=message):
        TinyTrainer(_config(**parallel), world=_of(size), callbacks=[Watches()]).fit()
    assert configured == []


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_one_rank_trains_the_plain_model(strategy: str) -> None:
    trainer = TinyTrainer(_config(strategy=strategy), world=ALONE)
    trainer.fit()
    assert type(trainer.model) is Deep
    assert {type(parameter) for parameter in trainer.model.parameters()} == {nn.Parameter}


# ---- Born on meta --------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Has a parameter, a float buffer and an integer buffer, and initialises none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mean", torch.empty(3))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))


class FilledScale(Scale):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.mean.zero_()
        self.count.zero_()


def _with(module: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(6, 3), module())


def test_tensors_without_values_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.1\.weight, model\.1\.mean, model\.1\.count got no value: define `reset_"
    ):
        _model(_with(Scale))(_config(), world=ALONE).setup()


def test_what_is_filled_is_not() -> None:
    trainer = _model(_with(FilledScale))(_config(), world=ALONE)
    trainer.setup()
    assert torch.equal(trainer.model[1].weight, torch.ones(3))
    for standard in (
        lambda: nn.BatchNorm1d(3),
        lambda: nn.LayerNorm(3),
        lambda: nn.LSTM(3, 3),
        lambda: nn.Embedding(3, 3),
    ):
        _model(_with(standard))(_config(), world=ALONE).setup()


def test_a_trainer_may_fill_it_itself() -> None:
    class Fills(_model(_with(Scale))):  # type: ignore[misc]
        def init_weights(self) -> None:
            super().init_weights()
            nn.init.constant_(self.model[1].weight, 2.0)
            self.model[1].mean.zero_()
            self.model[1].count.fill_(7)

    trainer = Fills(_config(), world=ALONE)
    trainer.setup()
    assert (trainer.model[1].weight.sum(), trainer.model[1].count) == (6, 7)
    assert trainer.model[0].weight.isfinite().all()


def test_a_model_that_has_its_values_keeps_them() -> None:
    before: list[torch.Tensor] = []

    def make() -> nn.Module:
        with torch.device("cpu"):
            model = Deep(4, 0.0)
        before.extend(parameter.detach().clone() for parameter in model.parameters())
        return model

    trainer = _model(make)(_config(), world=ALONE)
    trainer.setup()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ({"configure_models": lambda self: None}, ConfigError, r"configure_models\(\) of Wrong made no module"),
        (
            {"configure_optimizers": lambda self: None},
            ConfigError,
            r"configure_optimizers\(\) of Wrong made no optimizer",
        ),
        (
            {"configure_models": lambda self: setattr(self, "loss", nn.CrossEntropyLoss())},
            ConfigError,
            "made no module with parameters",
        ),
    ],
)
def test_a_trainer_without_model_or_optimizer_is_refused(methods: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        type("Wrong", (TinyTrainer,), methods)(_config(), world=ALONE).fit()


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"shard_modules": ("Block",)},
            "names Block, which model does not contain as a module .* it contains Dropout, GELU, Linear",
        ),
        ({"activation_checkpointing": "full", "shard_modules": ("Block", "Linear")}, "names Block"),
    ],
)
def test_modules_that_are_not_there_are_named(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TinyTrainer(_config(**parallel), world=ALONE).setup()


def test_activation_checkpointing_needs_blocks() -> None:
    with pytest.raises(ConfigError, match=r"needs blocks to checkpoint, but there is no ModuleList in model: name"):
        _model(lambda: nn.Linear(6, 3))(_config(activation_checkpointing="full"), world=ALONE).setup()


# ---- Between the models and their wrapping -------------------------------------------------------------------------


class Wider(Callback):
    """Replaces a module of the model while it is on the meta device."""

    def on_models_configured(self, trainer: Any) -> None:
        assert all(parameter.is_meta for parameter in trainer.model.parameters())
        trainer.model.last = nn.Sequential(nn.Linear(trainer.config.width, 16), nn.ReLU(), nn.Linear(16, 3))


def test_a_callback_may_replace_a_part_of_a_model_before_it_is_sharded() -> None:
    trainer = TinyTrainer(_config(), world=ALONE, callbacks=[Wider()])
    trainer.fit()
    assert [type(each).__name__ for each in trainer.model.last] == ["Linear", "ReLU", "Linear"]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in trainer.model.parameters()} == held


class Smaller(Callback):
    """Replaces the model by another on the meta device."""

    def on_models_configured(self, trainer: Any) -> None:
        with torch.device("meta"):
            trainer.model = nn.Linear(6, 3)


class SmallerHead(Callback):
    """Replaces a module of the model by one on the meta device, whatever the model is on."""

    def on_models_configured(self, trainer: Any) -> None:
        trainer.model.last = nn.Linear(trainer.config.width, 3, device="meta")


class _WithValues(TinyTrainer):
    """Cannot be created on the meta device."""

    def configure_models(self) -> None:
        super().configure_models()
        self.scale = self.model.first.weight.abs().sum().item()


@pytest.mark.parametrize("trainer_class", [TinyTrainer, _WithValues])
@pytest.mark.parametrize("callback", [Smaller, SmallerHead])
@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_what_a_callback_puts_on_the_meta_device_is_initialized(
    trainer_class: type[TinyTrainer], callback: type[Callback], strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_class(_config(strategy=strategy), world=ALONE, callbacks=[callback()])
    trainer.setup()
    assert trainer.models == {"model": trainer.model}
    assert ("created with values" in capsys.readouterr().out) == (trainer_class is _WithValues)
    new = trainer.model if isinstance(trainer.model, nn.Linear) else trainer.model.last
    for parameter in new.parameters():
        value = to_full_tensor(parameter)
        assert 0 < value.abs().max() <= new.in_features**-0.5
    trainer.fit()
    assert all(to_full_tensor(parameter).isfinite().all() for parameter in trainer.model.parameters())


def test_a_compiled_model_cannot_be_sharded_and_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"model is already compiled, .* parallel.compile=True compiles it"):
        _model(lambda: torch.compile(nn.Linear(6, 3), backend="eager"))(_config(strategy="fsdp"), world=ALONE).setup()


# ---- Activation checkpointing --------------------------------------------------------------------------------------


class Counts(TorchDispatchMode):
    """Counts the operators of forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + nn.functional.dropout(attended, 0.5)


class AttendsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attends(), Attends()])
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(-1).expand(-1, -1, 8)
        for block in self.blocks:
            x = block(x)
        return self.last(x).mean(1)


def test_selective_checkpointing_computes_again_what_is_cheap_and_nothing_else() -> None:
    counts, losses, gradients = {}, {}, {}
    for policy in ("none", "full", "selective"):
        trainer = _model(AttendsTwice)(_config(activation_checkpointing=policy), world=ALONE)
        trainer.setup()
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        with Counts() as counting:
            loss = trainer.model(x).square().mean()
            loss.backward()
        counts[policy], losses[policy] = counting.counts, loss.detach()
        gradients[policy] = [parameter.grad for parameter in trainer.model.parameters()]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert {
        policy: (found["addmm"], found[attention], found["native_layer_norm"]) for policy, found in counts.items()
    } == {
        "none": (3, 2, 2),
        "full": (5, 4, 4),
        "selective": (3, 2, 4),
    }
    for policy in ("full", "selective"):
        assert torch.equal(losses[policy], losses["none"])
        for found, wanted in zip(gradients[policy], gradients["none"], strict=True):
            torch.testing.assert_close(found, wanted)


# ---- On ranks ------------------------------------------------------------------------------------------------------


class NamesItsLayers(Deep):
    """Like the models of `transformers`; a name may be missing from this model."""

    _no_split_modules: Any = {"GELU", "VisionLayer"}


class NamesNothing(Deep):
    _no_split_modules: Any = None


@pytest.mark.parametrize(("model", "checkpointed"), [(NamesItsLayers, nn.GELU), (NamesNothing, nn.Sequential)])
def test_a_model_may_name_its_layers_itself(model: Any, checkpointed: type[nn.Module]) -> None:
    trainer = _model(lambda: model(8, 0.0))(_config(activation_checkpointing="full"), world=ALONE)
    trainer.setup()
    wrapped = [each for each in trainer.model.modules() if type(each).__name__ == "CheckpointWrapper"]
    assert [type(unwrap(each)) for each in wrapped] == [checkpointed] * 2


class Tied(nn.Module):
    """Ties the embedding to the head, as most language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.down = nn.Linear(6, 3, bias=False)
        self.up = nn.Linear(6, 3, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.blocks[0](self.down(x) @ self.up.weight))


def _train_tied(world: World, strategy: Any = "none") -> torch.Tensor:
    trainer = _model(Tied)(TinyConfig(max_steps=3, global_batch_size=8, parallel=ParallelConfig(strategy=strategy)))
    trainer.fit()
    model = unwrap(trainer.model)
    assert model.up.weight is model.down.weight
    assert len(trainer.optimizer.param_groups[0]["params"]) == 3
    return to_full_tensor(model.up.weight.detach()).clone()


def _train_tied_on_ranks(world: World) -> list[torch.Tensor]:
    return [_train_tied(world, strategy) for strategy in ("ddp", "fsdp")]


def test_tied_weights_stay_tied_on_the_way_from_meta_to_many_ranks() -> None:
    alone = _train_tied(ALONE)
    for on_ranks in run_on_ranks(_train_tied_on_ranks, 2):
        for weight in on_ranks:
            torch.testing.assert_close(weight, alone)


class Drawn(nn.Module):
    """Draws its weights with many of torch's functions, including those that return a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(5, 2)) for _ in range(6))

    def reset_parameters(self) -> None:
        first, normal, uniform, chosen, around, geometric = self.weights
        nn.init.uniform_(first, 0.1, 0.9)
        normal.copy_(torch.randn_like(normal) * 2)
        uniform.copy_(torch.rand_like(uniform) - 0.5)
        chosen.copy_(torch.bernoulli(first))
        around.copy_(torch.normal(first, 0.1))
        geometric.geometric_(0.5).add_(torch.empty_like(geometric).bernoulli_(first))


class TwoModels(TinyTrainer):
    """One trained model, and one that is frozen."""

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.drawn = Drawn()


class Shuffled(Drawn):
    def reset_parameters(self) -> None:
        first = self.weights[0]
        first.copy_(first[torch.multinomial(first.new_ones(5), 5)])


def _setup_on_ranks(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parallel in {
        "ddp": {"strategy": "ddp"},
        "fsdp": {"strategy": "fsdp"},
        "linear": {"strategy": "fsdp", "shard_modules": ("Linear",)},
        "hsdp": {"strategy": "hsdp", "dp_shard": 2},
        "checkpointed": {"strategy": "fsdp", "activation_checkpointing": "full"},
        "selective": {"strategy": "fsdp", "activation_checkpointing": "selective"},
        "offloaded": {"strategy": "fsdp", "cpu_offload": True},
    }.items():
        if name == "hsdp" and world.size % 2:
            continue
        trainer = TwoModels(_config(**parallel), world=world)
        trainer.setup()
        model = trainer.model
        assert isinstance(model, DistributedDataParallel if name == "ddp" else FSDPModule)
        assert not isinstance(trainer.teacher, DistributedDataParallel)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        found[name] = {
            "weights": {
                key.replace("_checkpoint_wrapped_module.", ""): value for key, value in weights(trainer).items()
            },
            "held": sum(to_local(parameter).numel() for parameter in unwrap(model).parameters()),
            "groups": len(sharded),
            "dtensors": all(isinstance(parameter, DTensor) for parameter in unwrap(model).parameters()),
        }
    with pytest.raises(ConfigError, match="aten.multinomial.default on a sharded weight"):
        _model(Shuffled)(_config(strategy="fsdp"), world=world).setup()
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_every_strategy_begins_with_the_same_weights(world_size: int) -> None:
    alone = TwoModels(_config(), world=ALONE)
    alone.setup()
    reference, total = weights(alone), sum(parameter.numel() for parameter in alone.model.parameters())
    ranks = run_on_ranks(_setup_on_ranks, world_size)
    groups = {"ddp": 0, "fsdp": 3, "linear": 5, "hsdp": 3, "checkpointed": 3, "selective": 3, "offloaded": 3}
    for name in ranks[0]:
        for rank in ranks:
            assert rank[name]["weights"].keys() == reference.keys()
            for key, value in reference.items():
                assert torch.equal(rank[name]["weights"][key], value), (name, key)
            assert rank[name]["groups"] == groups[name]
            assert rank[name]["dtensors"] == (name != "ddp")
        held = [rank[name]["held"] for rank in ranks]
        assert sum(held) == total * (world_size if name == "ddp" else 1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.mark.parametrize(
    "block",
    [
        _Block,
        lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU()),
        lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0),
    ],
    ids=["own", "Sequential", "TransformerEncoderLayer"],
)
def test_blocks_are_compiled_once_also_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, block: Callable[[], nn.Module]
) -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(str(graph.code))
        return graph

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend=backend, **options))
    made = nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(10))})
    names = list(made.state_dict())
    trainer = _model(lambda: made)(_config(compile=True), world=ALONE)
    trainer.setup()
    x = torch.zeros(2, 3, 6, requires_grad=True)
    for each in trainer.model["blocks"]:
        x = each(x)
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert list(trainer.model.state_dict()) == names


class _Coupling(nn.Module):
    def __init__(self, mask_C: torch.Tensor) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.register_buffer("mask", mask_C)

    def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
        return x_BC + (1 - self.mask) * self.net(x_BC * self.mask).tanh()


class _Flow(TinyTrainer):
    """Each mask is a buffer of two layers."""

    def configure_models(self) -> None:
        mask_C = torch.arange(6) % 2.0
        masks = [mask_C, 1 - mask_C]
        self.model = nn.Sequential(*[_Coupling(masks[i % 2]) for i in range(4)], nn.Linear(6, 3))


def _train_flow(world: World) -> dict[str, torch.Tensor]:
    trainer = _Flow(
        replace(_config(strategy="fsdp" if world.size > 1 else "none"), max_steps=4, global_batch_size=8), world=world
    )
    trainer.fit()
    assert trainer.model[0].mask is trainer.model[2].mask
    return weights(trainer)


def test_a_buffer_that_two_modules_share_gets_its_values_when_the_model_is_sharded() -> None:
    alone = _train_flow(ALONE)
    for on_ranks in run_on_ranks(_train_flow, 2):
        torch.testing.assert_close(on_ranks, alone)
