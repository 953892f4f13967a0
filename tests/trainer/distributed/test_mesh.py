"""Ranks that divide layers or sequences train the model that one process trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader, Dataset

from headway.trainer import CheckpointConfig, ConfigError, ParallelConfig, Trainer, TrainerConfig, World
from headway.trainer.callbacks import Ema
from headway.trainer.distributed.mesh_sizes import MeshSizes
from headway.trainer.metrics.histogram import histograms
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, weights

WIDTH, WORDS, LENGTH = 8, 12, 8


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, WORDS, (num_rows, LENGTH + 1), generator=generator)
        # Rows of different lengths: 0 is padding.
        for row, tokens in enumerate(self.tokens):
            tokens[LENGTH - row % 5 :] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(row), "x": self.tokens[row, :-1].clone(), "y": self.tokens[row, 1:].clone()}


class Block(nn.Module):
    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.norm1(x)
        # -1: each rank has some of the heads.
        q, k, v = (part(before).unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.attends else q * k.sigmoid() + v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, *, attends: bool, ties: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attends=attends) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Writer(Trainer[TrainerConfig]):
    attends = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[list[int]] = []

    def configure_models(self) -> None:
        self.model = Gpt(attends=self.attends)

    def configure_tensor_parallel(self) -> Mapping[str, ParallelStyle]:
        return {
            "model.embed": RowwiseParallel(input_layouts=Replicate()),
            "model.blocks.*.qkv.*": ColwiseParallel(),
            "model.blocks.*.out": RowwiseParallel(),
            "model.blocks.*.up": ColwiseParallel(),
            "model.blocks.*.down": RowwiseParallel(),
            "model.head": ColwiseParallel(output_layouts=Replicate()),
        }

    def context_parallel_buffers(self, batch: Any) -> Any:
        return [(batch["x"], 1), (batch["y"], 1)]

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def configure_dataloaders(self) -> Any:
        return DataLoader(Texts(48), batch_size=8, shuffle=True), DataLoader(Texts(10), batch_size=4)

    def loss_weight(self, batch: Any) -> torch.Tensor:
        return (batch["y"] != 0).sum()

    def num_tokens(self, batch: Any) -> torch.Tensor:
        return (batch["y"] != 0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training:
            self.seen.append(batch["id"].tolist())
        logits = self.model(batch["x"])
        kept = batch["y"] != 0
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=0, reduction="sum")
        return {"loss": loss / kept.sum().clamp(min=1)}


class Pointwise(Writer):
    """Without attention, which torch cannot divide on a CPU."""

    attends = False


class Untied(Writer):
    """Created on the meta device."""

    def configure_models(self) -> None:
        self.model = Gpt(attends=True, ties=False)


CURVES = ("train/loss", "grad_norm", "tokens", "validation/loss")


def _config(parallel: dict[str, Any], **changes: Any) -> TrainerConfig:
    return TrainerConfig(
        parallel=ParallelConfig(**parallel),
        **{
            "max_epochs": 2,
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "max_grad_norm": 0.3,
            "log_every": "1 steps",
            "evaluate_every": "1 epochs",
            "checkpoint": CheckpointConfig(every=None),
            **changes,
        },
    )


def _fit(
    world: World,
    kind: type[Writer],
    parallel: dict[str, Any],
    run_dir: str | None = None,
    stop_at: int = 0,
    max_epochs: int = 2,
) -> dict[str, Any]:
    losses = Losses()
    trainer = kind(
        _config(parallel, max_epochs=max_epochs),
        run_dir=run_dir,
        world=world,
        callbacks=[losses, StopAt(stop_at), Ema(0.9)],
    )
    trainer.fit()
    return {
        "curves": {name: losses.of(name) for name in CURVES},
        "weights": weights(trainer),
        "seen": trainer.seen,
        "samples": trainer.progress.samples,
        "data": (trainer.mesh.data.rank, trainer.mesh.data.size),
        "divided": sorted(
            name
            for name, each in trainer.model.named_parameters()
            if isinstance(each, DTensor) and each.to_local().numel() < each.numel()
        ),
    }


def _assert_equal(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for rank in ranks:
        assert rank["samples"] == alone["samples"]
        for name in CURVES:
            assert rank["curves"][name] == pytest.approx(alone["curves"][name], abs=1e-5), name
        for name, value in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=2e-5)
    rows = {tuple(each["data"]): each["seen"] for each in ranks}
    # Ranks that work on the same rows have seen the same; together, all of them.
    assert all(rows[tuple(each["data"])] == each["seen"] for each in ranks)
    assert sorted(row for seen in rows.values() for step in seen for row in step) == sorted(
        row for step in alone["seen"] for row in step
    )


class NormsQueries(Block):
    """One weight for all heads, of which each rank has some."""

    def __init__(self) -> None:
        super().__init__(attends=True)
        self.qkv[0] = nn.Sequential(self.qkv[0], nn.Unflatten(-1, (-1, 2)), nn.RMSNorm(2), nn.Flatten(2))


class NormOfParts(Writer):
    def configure_models(self) -> None:
        self.model = Gpt(attends=True)
        self.model.blocks[1] = NormsQueries()

    def configure_tensor_parallel(self) -> Mapping[str, ParallelStyle]:
        plan = dict(super().configure_tensor_parallel())
        del plan["model.blocks.*.qkv.*"]
        places = ("model.blocks.0.qkv.*", "model.blocks.1.qkv.0.0", "model.blocks.1.qkv.[12]")
        return plan | {place: ColwiseParallel() for place in places}


class DividedNormOfParts(NormOfParts):
    def configure_tensor_parallel(self) -> Mapping[str, ParallelStyle]:
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        return {**super().configure_tensor_parallel(), "model.blocks.1.qkv.0.2": norm}


@pytest.fixture(scope="module")
def alone() -> dict[type[Writer], dict[str, Any]]:
    return {kind: _fit(World.single("cpu"), kind, {}) for kind in (Writer, Pointwise, Untied, DividedNormOfParts)}


@pytest.mark.parametrize(
    ("kind", "parallel", "num_ranks"),
    [
        pytest.param(Writer, {"strategy": "fsdp", "tp": 2}, 4, id="fsdp-tp"),
        pytest.param(Untied, {"strategy": "fsdp", "tp": 2}, 4, id="fsdp-tp-on-meta", marks=pytest.mark.extended),
        pytest.param(Writer, {"strategy": "ddp", "tp": 2}, 4, id="ddp-tp", marks=pytest.mark.extended),
        pytest.param(Untied, {"strategy": "none", "tp": 2}, 2, id="tp-on-meta", marks=pytest.mark.extended),
        pytest.param(
            DividedNormOfParts, {"strategy": "none", "tp": 2}, 2, id="tp-norm-of-parts", marks=pytest.mark.extended
        ),
    ],
)
def test_layers_are_divided(
    kind: type[Writer], parallel: dict[str, Any], num_ranks: int, alone: dict[type[Writer], dict[str, Any]]
) -> None:
    ranks = run_on_ranks(_fit, num_ranks, kind, parallel)
    _assert_equal(ranks, alone[kind])
    assert "blocks.0.up.weight" in ranks[0]["divided"]
    assert ranks[0]["data"][1] == num_ranks // 2


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        pytest.param({"strategy": "fsdp", "cp": 2}, 4, id="fsdp-cp"),
        pytest.param({"strategy": "ddp", "cp": 2}, 4, id="ddp-cp", marks=pytest.mark.extended),
        pytest.param({"strategy": "ddp", "cp": 2, "tp": 2}, 4, id="cp-tp", marks=pytest.mark.extended),
    ],
)
def test_sequences_are_divided(
    parallel: dict[str, Any], num_ranks: int, alone: dict[type[Writer], dict[str, Any]]
) -> None:
    _assert_equal(run_on_ranks(_fit, num_ranks, Pointwise, parallel), alone[Pointwise])


@pytest.mark.extended
def test_a_checkpoint_of_any_arrangement_resumes_under_any_other(tmp_path: Path) -> None:
    alone = _fit(World.single("cpu"), Writer, {}, max_epochs=4)
    curves: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    chain: list[tuple[int, dict[str, Any]]] = [
        (4, {"strategy": "fsdp", "tp": 2}), (2, {"strategy": "ddp", "tp": 2}), (1, {}), (2, {"strategy": "fsdp"}),
        (4, {"strategy": "ddp", "tp": 2}),
    ]  # fmt: skip
    for number, (num_ranks, parallel) in enumerate(chain):
        stop_at = 2 * number + 1 if number < 4 else 0
        ranks = run_on_ranks(_fit, num_ranks, Writer, parallel, str(tmp_path), stop_at, 4)
        for name in CURVES:
            assert not curves[name].keys() & ranks[0]["curves"][name].keys()
            curves[name] |= ranks[0]["curves"][name]
    for name in CURVES:
        assert curves[name] == pytest.approx(alone["curves"][name], abs=1e-5), name
    for name, value in alone["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, rtol=0, atol=5e-5)


def _histograms(world: World, parallel: dict[str, Any]) -> dict[str, Any]:
    trainer = Writer(_config(parallel, max_steps=1), world=world)
    trainer.setup()
    found = histograms(dict(trainer.model.named_parameters()), world)
    return {name: sum(each.counts) for name, each in found.items()}


def test_a_value_counts_once_in_histograms() -> None:
    expected = _histograms(World.single("cpu"), {})
    assert run_on_ranks(_histograms, 4, {"strategy": "fsdp", "tp": 2}) == [expected] * 4


class LogsOnMainRank(Writer):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.world.is_main:
            self.log("accuracy", 1.0)
        return self.training_step(batch, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.world.rank == 1:
            self.log("other", 2.0, reduce="max")
        return super().training_step(batch, batch_idx)


def _metrics(world: World, run_dir: str) -> tuple[dict[str, float], str | None]:
    keep_best = CheckpointConfig(every=None, at_end=False, monitor="validation/accuracy", mode="max", save_best=True)
    trainer = LogsOnMainRank(_config({"tp": 2}, max_epochs=1, checkpoint=keep_best), world=world, run_dir=run_dir)
    result = trainer.fit()
    return {name: value for name, value in result.metrics.items() if "/" in name}, result.best_checkpoint


@pytest.mark.extended
def test_a_number_that_one_rank_logs_is_known_to_all(tmp_path: Path) -> None:
    """Or ranks would decide differently about what to save, and wait for each other."""
    first, second = run_on_ranks(_metrics, 2, str(tmp_path))
    assert first == second
    assert first[1] is not None
    assert (first[0]["validation/accuracy"], first[0]["train/other"]) == (1.0, 2.0)


def _refusal(world: World, kind: type[Writer], parallel: dict[str, Any], changes: dict[str, Any]) -> str:
    with pytest.raises(Exception) as raised:
        kind(_config(parallel, max_steps=1, **changes), world=world).fit()
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def _in_float16(world: World) -> tuple[int, float]:
    trainer = Pointwise(_config({"tp": 2} if world.size > 1 else {}, max_steps=3, precision="fp16"), world=world)
    result = trainer.fit()
    return result.steps, result.metrics["validation/loss"]


@pytest.mark.extended
def test_gradients_of_divided_and_whole_layers_have_one_loss_scale() -> None:
    alone = _in_float16(World.single("cpu"))
    for steps, loss in run_on_ranks(_in_float16, 2):
        assert steps == alone[0]
        assert loss == pytest.approx(alone[1], rel=0.02)


class NoPlan(Writer):
    def configure_tensor_parallel(self) -> Mapping[str, ParallelStyle]:
        return {}


class Misspelt(Writer):
    def configure_tensor_parallel(self) -> Mapping[str, ParallelStyle]:
        return {"blocks.*.up": ColwiseParallel()}


class HalfTied(Writer):
    def configure_tensor_parallel(self) -> Mapping[str, ParallelStyle]:
        return {"model.head": ColwiseParallel(output_layouts=Replicate())}


class OddLengths(Pointwise):
    def context_parallel_buffers(self, batch: Any) -> Any:
        return [(batch["x"][:, 1:], 1)]


class Unpaired(Writer):
    def configure_tensor_parallel(self) -> Mapping[str, ParallelStyle]:
        return {"model.blocks.*.up": ColwiseParallel()}


class Reparametrized(Writer):
    def configure_models(self) -> None:
        self.model = Gpt(attends=True)
        nn.utils.parametrizations.weight_norm(self.model.blocks[0].up)


class OddWidth(Writer):
    def configure_models(self) -> None:
        self.model = Gpt(attends=True)
        for block in self.model.blocks:
            block.up, block.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)


class Fused(Writer):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)


class Views(Pointwise):
    def context_parallel_buffers(self, batch: Any) -> Any:
        tokens = torch.cat([batch["x"], batch["y"]], 1)
        return [(tokens[:, : tokens.shape[1] // 2], 1), (tokens[:, tokens.shape[1] // 2 :], 1)]


@pytest.mark.parametrize(
    ("kind", "parallel", "message"),
    [
        (NoPlan, {"tp": 2}, "parallel.tp=2 divides layers by a plan, and model brings none"),
        (NormOfParts, {"tp": 2}, "the gradients of model.blocks.1.qkv.0.2.weight"),
        (Unpaired, {"tp": 2}, "a layer with ColwiseParallel() returns this rank's part of its output, and one with"),
        (Reparametrized, {"tp": 2}, "model.blocks.0.up computes its weight from others (ParametrizedLinear)"),
        (Misspelt, {"tp": 2}, "'blocks.*.up' matches no module; names begin with the attribute"),
        (HalfTied, {"tp": 2}, "model.embed.weight and model.head.weight are one weight"),
        (OddLengths, {"cp": 2}, "with dimension 1: pad that to a multiple of 4"),
        (OddWidth, {"tp": 2}, "evenly: model.blocks.0.up.weight (15, 8), model.blocks.0.up.bias (15,), model.blocks."),
        (
            Fused,
            {"tp": 2},
            "self.optimizer has fused=True, which torch does not support for divided and whole parameters in",
        ),
        (Views, {"cp": 2}, "views of others or of each other, such as tokens[:, :-1] and tokens[:, 1:]: call .clone()"),
        (Writer, {"cp": 2}, "torch has no attention over divided sequences for this device (cpu)"),
    ],
)
def test_what_cannot_be_divided_is_refused(kind: type[Writer], parallel: dict[str, Any], message: str) -> None:
    for refusal in run_on_ranks(_refusal, 2, kind, parallel, {}):
        assert message in refusal


def test_ranks_that_divide_sequences_cannot_repeat_an_update() -> None:
    for refusal in run_on_ranks(_refusal, 2, Pointwise, {"cp": 2}, {"halve_on_out_of_memory": True}):
        assert "halve_on_out_of_memory does not support parallel.cp=2" in refusal


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "sizes"),
    [
        ({"strategy": "fsdp", "tp": 2}, 8, (1, 4, 1, 2)),
        ({"strategy": "hsdp", "dp_shard": 2, "tp": 2}, 8, (2, 2, 1, 2)),
        ({"strategy": "hsdp", "dp_replicate": 2, "cp": 2}, 8, (2, 2, 2, 1)),
        ({"strategy": "ddp", "dp_replicate": 4, "tp": 2}, 8, (4, 1, 1, 2)),
        ({"tp": 2, "cp": 2}, 1, (1, 1, 1, 1)),
        ({"tp": 3}, 8, "parallel.tp=3 must divide the number of ranks, 8"),
        ({"dp_replicate": 3}, 4, "parallel.dp_replicate=3 x parallel.dp_shard=1 .* must be the number of ranks, 4"),
        ({"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 2}, 8, "must be the number of ranks, 8"),
    ],
)
def test_sizes_follow_from_the_number_of_ranks(parallel: dict[str, Any], num_ranks: int, sizes: Any) -> None:
    config = ParallelConfig(**parallel)
    if isinstance(sizes, str):
        with pytest.raises(ConfigError, match=sizes):
            MeshSizes.of(config, num_ranks)
    else:
        found = MeshSizes.of(config, num_ranks)
        assert (found.dp_replicate, found.dp_shard, found.cp, found.tp) == sizes
