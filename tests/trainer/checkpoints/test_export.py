"""Export: full weights of a run under their unwrapped names, for every strategy."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from headway.trainer import (
    Callback,
    CheckpointError,
    ConfigError,
    ParallelConfig,
    World,
    export_pretrained,
    export_safetensors,
    load_weights,
)
from headway.trainer.callbacks import Ema
from headway.trainer.distributed.dtensor import unwrap
from tests.distributed import run_on_ranks
from tests.tiny import Deep, TinyConfig, TinyTrainer, weights


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class TiedTrainer(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Tied()


def causal_lm() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=3,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


class CausalTrainer(TinyTrainer):
    def configure_models(self) -> None:
        with torch.device("cpu"):
            self.model = causal_lm()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["y"][:, None].expand(-1, 4)
        return self.model(input_ids=tokens, labels=tokens).loss


def train(
    trainer_class: type[TinyTrainer], world: World, run_dir: str, strategy: str, *callbacks: Callback
) -> TinyTrainer:
    parallel = ParallelConfig(strategy=strategy, activation_checkpointing="full")  # type: ignore[arg-type]
    config = TinyConfig(max_steps=3, parallel=parallel)
    trainer = trainer_class(config, run_dir=run_dir, world=world, callbacks=callbacks)
    trainer.fit()
    return trainer


PLAIN_SCRIPT = """
import sys
import torch
from headway.trainer import load_weights
torch.save(load_weights(sys.argv[1]), sys.argv[2])
assert "ray" not in sys.modules and not torch.distributed.is_initialized()
"""


def train_sharded(world: World, folder: str) -> Any:
    ema = Ema(0.5)
    trainer = train(TiedTrainer, world, f"{folder}/tied", "fsdp", ema)
    trainer.export(f"{folder}/now.safetensors")
    with ema.applied():
        trainer.export(f"{folder}/averages.safetensors")
    trainer.save_pretrained(f"{folder}/no-hugging-face", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="cannot write /dev/null/x: .*Error"):
        trainer.save_pretrained("/dev/null/x")
    causal = train(CausalTrainer, world, f"{folder}/causal", "fsdp")
    causal.save_pretrained(f"{folder}/hugging-face")
    return weights(trainer), weights(causal)


@pytest.mark.extended
@pytest.mark.slow
def test_sharded_training_is_exported_whole_live_and_from_its_checkpoint(tmp_path: Path) -> None:
    (tied, causal), _ = run_on_ranks(train_sharded, 2, str(tmp_path))
    tied = {name.removeprefix("model.").replace("_checkpoint_wrapped_module.", ""): each for name, each in tied.items()}
    causal = {
        name.removeprefix("model.").replace("_checkpoint_wrapped_module.", ""): each for name, each in causal.items()
    }

    # From the live trainer; the model has no save_pretrained.
    live = load_file(tmp_path / "now.safetensors")
    torch.testing.assert_close(live, tied, rtol=0, atol=0)
    Tied().load_state_dict(live)
    halves = load_file(tmp_path / "no-hugging-face" / "model.safetensors")
    torch.testing.assert_close(halves, {name: each.bfloat16() for name, each in tied.items()}, rtol=0, atol=0)
    assert json.loads((tmp_path / "no-hugging-face" / "config.json").read_text())["max_steps"] == 3

    # From the checkpoint, in a script without a trainer.
    checkpoint = tmp_path / "tied" / "checkpoints" / "step-00000003"
    subprocess.run([sys.executable, "-c", PLAIN_SCRIPT, str(checkpoint), str(tmp_path / "read.pt")], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "read.pt"), tied, rtol=0, atol=0)

    # The averages, under both names of a tied weight.
    averages = load_file(tmp_path / "averages.safetensors")
    assert not torch.equal(averages["head.weight"], tied["head.weight"])
    torch.testing.assert_close(load_weights(checkpoint, ema=True), averages, rtol=0, atol=0)
    export_safetensors(checkpoint, tmp_path / "averages-later.safetensors", ema="Ema/0")
    torch.testing.assert_close(load_file(tmp_path / "averages-later.safetensors"), averages, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="has no averages 'Ema/1'; it has Ema/0"):
        load_weights(checkpoint, ema="Ema/1")

    # In Hugging Face's layout, live and from the checkpoint.
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        skeleton = causal_lm()
    export_pretrained(
        tmp_path / "causal" / "checkpoints" / "step-00000003",
        tmp_path / "from-checkpoint",
        skeleton,
        dtype=torch.float16,
    )
    for folder, dtype in (("hugging-face", torch.float32), ("from-checkpoint", torch.float16)):
        assert json.loads((tmp_path / folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / folder, dtype=dtype)
        expected = {name: each.to(dtype) for name, each in causal.items()}
        torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=0)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


class GanTrainer(TinyTrainer):
    def configure_models(self) -> None:
        self.model, self.critic = Deep(4, 0.0), Deep(5, 0.0)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.critic.parameters()], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["x"]).square().mean() + self.critic(batch["x"]).square().mean()


def test_one_of_several_models_is_exported_and_may_be_cast(tmp_path: Path) -> None:
    trainer = train(GanTrainer, World.single("cpu"), str(tmp_path), "none")
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    with pytest.raises(ConfigError, match="has several models: set model= to one of model, critic"):
        load_weights(checkpoint)
    with pytest.raises(ConfigError, match="has no model 'judge'; it has model, critic"):
        load_weights(checkpoint, model="judge")
    with pytest.raises(ConfigError, match="GanTrainer has several models"):
        trainer.export(tmp_path / "no.safetensors")
    critic = Deep(5, 0.0)
    critic.load_state_dict(load_weights(checkpoint, model="critic"))
    torch.testing.assert_close(dict(critic.state_dict()), load_weights(checkpoint, model="critic"), rtol=0, atol=0)

    uri = f"memory://{uuid.uuid4().hex}/weights/critic.safetensors"
    export_safetensors(checkpoint, uri, model="critic", dtype=torch.bfloat16)
    import fsspec
    from safetensors.torch import load

    exported = load(fsspec.filesystem("memory").cat_file(uri))
    assert {each.dtype for each in exported.values()} == {torch.bfloat16}
    torch.testing.assert_close(exported, {k: v.bfloat16() for k, v in critic.state_dict().items()}, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="Deep has no save_pretrained"):
        export_pretrained(checkpoint, tmp_path / "x", critic, model="critic")


def test_averages_that_have_not_begun_are_not_exported(tmp_path: Path) -> None:
    train(TinyTrainer, World.single("cpu"), str(tmp_path), "none", Ema(0.5, start_step=100))
    with pytest.raises(CheckpointError, match="was saved before the averages 'Ema/0' began"):
        load_weights(tmp_path / "checkpoints" / "step-00000003", ema=True)


def test_a_checkpoint_that_is_damaged_or_none_is_not_exported(tmp_path: Path) -> None:
    train(TinyTrainer, World.single("cpu"), str(tmp_path), "none")
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    (shard,) = checkpoint.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged.*its checksum differs"):
        export_safetensors(checkpoint, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_weights(tmp_path / "nothing")
    for folder in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(
            CheckpointError, match=f"{folder} is not a checkpoint, but has some in it: .*step-00000003$"
        ):
            load_weights(folder)
    assert not (tmp_path / "x.safetensors").exists()


def wrap(world: World) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as Ddp

    model = nn.Linear(2, 2)
    assert unwrap(model) is model
    assert unwrap(torch.compile(Ddp(model))) is model  # type: ignore[arg-type]
    assert unwrap(Ddp(torch.compile(model))) is model  # type: ignore[arg-type]
    assert unwrap(torch.compile(checkpoint_wrapper(Ddp(model)))) is model  # type: ignore[arg-type]
    average = AveragedModel(model)
    assert unwrap(torch.compile(Ddp(average))) is average.module  # type: ignore[arg-type]
    deep = AveragedModel(torch.compile(checkpoint_wrapper(model)))  # type: ignore[arg-type]
    assert type(unwrap(deep)) is nn.Linear
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    assert unwrap(torch.compile(checkpoint_wrapper(model))) is model  # type: ignore[arg-type]


def test_unwrap_finds_the_same_module_in_any_nesting() -> None:
    run_on_ranks(wrap, 1)
