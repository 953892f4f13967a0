"""Which modules are gathered, checkpointed and compiled one at a time, in the layouts that people use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from headway.trainer import ConfigError, ParallelConfig, World
from headway.trainer.distributed.parallelize import blocks_of
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class NanoGpt(nn.Module):
    """The layout of nanoGPT: a ModuleDict that holds a ModuleList, and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(Block() for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(6, 6), "h": layers, "ln_f": nn.LayerNorm(6)})
        self.lm_head = nn.Linear(6, 6, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](x.argmax(-1))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))[:, :3]


class Stages(nn.Module):
    """A ModuleList of ModuleLists."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.out(x)


class Named(nn.Module):
    """A ModuleDict of blocks, as torchtitan has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.out(x)


class ResNet(nn.Module):
    """Sequential layers of blocks, as in torchvision and timm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.Sequential(Block())
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer2(self.layer1(x))))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class TiedBlocks(nn.Module):
    """A ModuleList whose first element shares its weight with a module outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False), Block()])
        self.out = nn.Linear(6, 6, bias=False)
        self.out.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)[:, :3]


LAYOUTS: dict[str, tuple[type[nn.Module], list[str]]] = {
    "nanoGPT": (NanoGpt, ["transformer.h.0", "transformer.h.1"]),
    "lists of lists": (Stages, ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]),
    "a dict of blocks": (Named, ["layers.0", "layers.1"]),
    "Sequential": (ResNet, ["layer1.0", "layer1.1", "layer2.0"]),
    "no blocks": (Plain, []),
    "a tied element": (TiedBlocks, ["layers.1"]),
}


def _trainer(make: type[nn.Module], world: World, **options: Any) -> TinyTrainer:
    class Makes(TinyTrainer):
        def configure_models(self) -> None:
            self.model = make()

    precision = options.pop("precision", "fp32")
    config = TinyConfig(max_steps=3, global_batch_size=8, precision=precision, parallel=ParallelConfig(**options))
    return Makes(config, world=world)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_found(layout: str) -> None:
    make, expected = LAYOUTS[layout]
    model = make()
    names = {id(module): name for name, module in model.named_modules()}
    assert [names[id(block)] for _, _, block in blocks_of(model, ParallelConfig())] == expected


def test_a_container_is_no_block_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"shard_modules names ModuleList, .* it contains .*Block"):
        _trainer(NanoGpt, ALONE, shard_modules=("ModuleList",)).setup()
    with pytest.raises(ConfigError, match=r"Embedding shares model\.transformer\.wte\.weight with another module"):
        _trainer(NanoGpt, ALONE, strategy="fsdp", shard_modules=("Embedding",)).setup()


def test_checkpointing_a_batch_norm_is_refused() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))

    with pytest.raises(ConfigError, match="would update the running means of BatchNorm1d twice"):
        _trainer(Norms, ALONE, activation_checkpointing="full").setup()


def _train_on_ranks(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout, (make, _) in LAYOUTS.items():
        for precision in ("fp32", "bf16") if layout == "Sequential" else ("fp32",):
            for strategy in ("ddp", "fsdp"):
                trainer = _trainer(make, world, strategy=strategy, precision=precision)
                metrics = trainer.fit().metrics
                name = f"{layout}, {precision}, {strategy}"
                found[name] = weights(trainer) | {"loss": torch.tensor(metrics["validation/loss"])}
    return found


@pytest.mark.extended
def test_every_layout_trains_sharded_as_it_does_replicated() -> None:
    for found in run_on_ranks(_train_on_ranks, 2):
        for name in (each for each in found if each.endswith("fsdp")):
            replicated = found[name.replace("fsdp", "ddp")]
            assert found[name].keys() == replicated.keys()
            tolerance = 2e-2 if "bf16" in name else 1e-5
            for key, value in found[name].items():
                torch.testing.assert_close(value, replicated[key], rtol=tolerance, atol=tolerance, msg=f"{name} {key}")


# ---- Attributes, methods and parts of a model -----------------------------------------------------------------------


class Encodes(nn.Module):
    """Has attributes and methods that a step uses, and parts that a step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 6
        self.temperature = 1.0
        self.encoder = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x)) / self.temperature

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)

    def init_hidden(self, size: int) -> torch.Tensor:
        return next(self.parameters()).new_zeros(size, self.width)

    def configure_optimizers(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=rate)


class UsesMethods(TinyTrainer):
    """Never calls the model as a whole, and makes its optimizer by a method of the model, as nanoGPT does."""

    def configure_models(self) -> None:
        self.model = Encodes()

    def configure_optimizers(self) -> None:
        self.optimizer = self.model.configure_optimizers(0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"] + self.model.init_hidden(len(batch["x"]))
        return F.cross_entropy(self.model.decode(self.model.encode(x)), batch["y"])


class CallsWhole(UsesMethods):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])


class CallsPart(CallsWhole):
    """Calls a part, in every second update only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step % 2:
            return super().training_step(batch, batch_idx)
        x = self.model.encoder(batch["x"])
        for block in self.model.blocks:
            x = block(x)
        return F.cross_entropy(self.model.out(x), batch["y"])


class CallsByName(TinyTrainer):
    """The model is a container, of which a step calls the elements."""

    def configure_models(self) -> None:
        self.model = nn.ModuleDict({"encoder": nn.Sequential(Block(), Block()), "head": nn.Linear(6, 3)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(self.model) == 2
        assert "head" in self.model
        return F.cross_entropy(self.model["head"](self.model["encoder"](batch["x"])), batch["y"])


class SetsAttribute(CallsWhole):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model.temperature = 1.0 + self.global_step
        return super().training_step(batch, batch_idx)


def _fit(cls: type[TinyTrainer], world: World, **options: Any) -> dict[str, torch.Tensor]:
    config = TinyConfig(
        max_steps=4, global_batch_size=8, micro_batch_size=2, parallel=ParallelConfig(**options), batch_size=8
    )
    trainer = cls(config, world=world)
    trainer.fit()
    return weights(trainer)


def _use_on_ranks(world: World) -> dict[str, dict[str, torch.Tensor]]:
    found = {
        f"{cls.__name__}, {strategy}": _fit(cls, world, strategy=strategy)
        for cls in (UsesMethods, CallsWhole, SetsAttribute, CallsByName)
        for strategy in ("ddp", "fsdp")
    }
    return found | {"CallsPart, ddp": _fit(CallsPart, world, strategy="ddp")}


@pytest.mark.extended
def test_self_model_is_the_users_module_under_every_strategy() -> None:
    ranks = run_on_ranks(_use_on_ranks, 2)
    for cls in (UsesMethods, CallsWhole, SetsAttribute, CallsByName, CallsPart):
        alone = _fit(cls, ALONE)
        for rank, found in enumerate(ranks):
            for name in (each for each in found if each.startswith(f"{cls.__name__},")):
                assert found[name].keys() == alone.keys()
                for key, value in found[name].items():
                    torch.testing.assert_close(value, alone[key], rtol=1e-4, atol=1e-5, msg=f"{rank} {name} {key}")


class NotesDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)
        self.register_buffer("frequencies", torch.full((6,), 997.3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x) + self.frequencies / 997.3)


def _dtypes_on_ranks(world: World) -> list[Any]:
    found = []
    for precision in ("bf16", "fp16", "bf16-true"):
        for strategy in ("ddp", "fsdp"):
            trainer = _trainer(NotesDtypes, world, strategy=strategy, precision=precision)
            trainer.fit()
            model = trainer.unwrap(trainer.model)
            found.append((precision, strategy, set(model.seen), model.frequencies.dtype, model.norm.weight.dtype))
            assert torch.equal(model.frequencies, torch.full((6,), 997.3))
            kept = {p.dtype for group in trainer.optimizer.param_groups for p in group["params"]}
            assert kept == ({torch.bfloat16, torch.float32} if precision == "bf16-true" else {torch.float32})
    return found


@pytest.mark.extended
def test_inputs_and_buffers_keep_their_dtype_under_every_strategy() -> None:
    for found in run_on_ranks(_dtypes_on_ranks, 2):
        assert found == [
            (precision, strategy, {torch.float32}, torch.float32, torch.float32)
            for precision in ("bf16", "fp16", "bf16-true")
            for strategy in ("ddp", "fsdp")
        ]


class Describes(Stages):
    def is_gathered(self) -> bool:
        return not isinstance(self.out.weight, DTensor)


class DescribesMeanwhile(TinyTrainer):
    """A thread of rank 0, as one that saves the model, calls a method of it in the middle of a step."""

    def configure_models(self) -> None:
        self.model = Describes()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Later, a forward pass may have left the weights gathered.
        if self.world.is_main and self.global_step == 0:
            with ThreadPoolExecutor(1) as other:
                assert not other.submit(self.model.is_gathered).result()
        assert self.model.is_gathered()
        return super().training_step(batch, batch_idx)


def _call_meanwhile(world: World) -> int:
    config = TinyConfig(max_steps=2, global_batch_size=8, parallel=ParallelConfig(strategy="fsdp"))
    return DescribesMeanwhile(config, world=world).fit().steps


def test_a_method_called_in_another_thread_waits_for_no_other_rank() -> None:
    assert run_on_ranks(_call_meanwhile, 2) == [2, 2]
