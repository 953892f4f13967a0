"""A model is filled from safetensors files shard by shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway.trainer import CheckpointError, ParallelConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import Deep, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.empty(()))

    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)


def _files(folder: Path, *, sharded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    values = {name: torch.rand_like(each) for name, each in Deep(9, 0.0).state_dict().items()}
    folder.mkdir(exist_ok=True)
    if not sharded:
        save_file(values, folder / "model.safetensors")
        return values
    names = sorted(values)
    halves = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    for file, own in halves.items():
        save_file({name: values[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in halves.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return values


class FromFiles(TinyTrainer):
    source: str
    skip: tuple[str, ...] = ()

    def init_weights(self) -> None:
        super().init_weights()
        self.load_pretrained(self.source, skip=self.skip)


def _setup(world: World, source: str, **options: Any) -> FromFiles:
    precision = options.pop("precision", "fp32")
    config = TinyConfig(max_steps=1, precision=precision, parallel=ParallelConfig(**options))
    trainer = FromFiles(config, world=world)
    trainer.source = source
    trainer.setup()
    return trainer


def _on_ranks(world: World, source: str) -> list[dict[str, torch.Tensor]]:
    options: list[dict[str, Any]] = [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "activation_checkpointing": "full"},
        {"strategy": "fsdp", "precision": "bf16-true"},
    ]
    return [weights(_setup(world, source, **each)) for each in options]


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.extended), True])
def test_every_rank_reads_its_part(tmp_path: Path, sharded: bool) -> None:
    values = _files(tmp_path / "files", sharded=sharded)
    for found in run_on_ranks(_on_ranks, 3, str(tmp_path / "files")):
        for number, each in enumerate(found):
            for name, value in each.items():
                wanted = values[name.removeprefix("model.").replace("_checkpoint_wrapped_module.", "")]
                assert torch.equal(value, wanted.to(value.dtype)), (number, name)


def test_a_tied_weight_is_in_the_file_once(tmp_path: Path) -> None:
    class Makes(FromFiles):
        def configure_models(self) -> None:
            self.model = Tied()

    values = {name: torch.rand_like(each.float()) for name, each in Tied().state_dict().items()}
    values["norm.num_batches_tracked"] = torch.tensor(5)
    del values["embed.weight"]
    save_file(values, tmp_path / "tied.safetensors")
    trainer = Makes(TinyConfig(max_steps=1), world=ALONE)
    trainer.source = str(tmp_path / "tied.safetensors")
    trainer.setup()
    assert torch.equal(trainer.model.embed.weight, values["head.weight"])
    assert trainer.model.scale == values["scale"]
    assert trainer.model.norm.num_batches_tracked == 5


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    values = _files(tmp_path / "files", sharded=False)
    wrong = {name: each for name, each in values.items() if name != "last.bias"}
    wrong |= {"more.weight": torch.ones(2), "last.weight": torch.ones(4, 9)}
    save_file(wrong, tmp_path / "wrong.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"does not fit Deep\. Missing in it: last\.bias\. Only in it: more\.weight\. Of another shape: "
        r"last\.weight \(\[4, 9\] there, \[3, 9\] here\)\. Leave weights out with skip=",
    ):
        _setup(ALONE, str(tmp_path / "wrong.safetensors"))

    class Skips(FromFiles):
        skip = ("last.*", "more.*")

    trainer = Skips(TinyConfig(max_steps=1), world=ALONE)
    trainer.source = str(tmp_path / "wrong.safetensors")
    trainer.setup()
    assert torch.equal(trainer.model.first.weight, values["first.weight"])
    with pytest.raises(CheckpointError, match=r"neither a \.safetensors file nor a folder with model\.safetensors"):
        _setup(ALONE, str(tmp_path / "nowhere"))
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"torn\.safetensors cannot be read as safetensors"):
        _setup(ALONE, str(tmp_path / "torn.safetensors"))
