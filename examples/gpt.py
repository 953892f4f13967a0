"""Train a small word-level GPT on the source code of Python's standard library, streamed from Parquet.

python examples/prepare_stdlib.py data/stdlib              prepare the data, once
headway fit examples/gpt.py                                two Ray workers on this machine, DDP
headway fit examples/gpt.py config.parallel.strategy=fsdp scaling.workers=3
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from headway.datasets.stream import ParquetStream
from headway.orchestrator import Experiment, Scaling
from headway.trainer import CheckpointConfig, Duration, Trainer, TrainerConfig, optimizers, schedules
from headway.trainer.callbacks import Samples


@dataclass(frozen=True, kw_only=True)
class GptConfig(TrainerConfig):
    data: str = str(Path("data/stdlib").absolute())
    vocabulary: int = 2048
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    learning_rate: float = 4e-3
    warmup_fraction: float = 0.08
    weight_decay: float = 0.1


class Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention_in = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.attention_in(self.norm_1(x_BTC)).split(C, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x_BTC = x_BTC + self.attention_out(attended)
        return x_BTC + self.mlp(self.norm_2(x_BTC))


class Gpt(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.context = config.context
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.tokens(tokens_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.linear(self.norm(x_BTC), self.tokens.weight)


class GptTrainer(Trainer[GptConfig]):
    def configure_models(self):
        self.model = Gpt(self.config)

    def init_weights(self):
        super().init_weights()
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, Block):
                # Each block starts as the identity.
                nn.init.zeros_(module.attention_out.weight)
                nn.init.zeros_(module.mlp[-1].weight)

    def configure_optimizers(self):
        config = self.config
        self.optimizer = optimizers.adamw(self.model, config.learning_rate, config.weight_decay, betas=(0.9, 0.95))
        self.scheduler = schedules.cosine(
            self.optimizer, total_steps=self.total_steps, warmup_fraction=config.warmup_fraction
        )

    def configure_dataloaders(self):
        # For a few megabytes on a local disk, threads suffice and start faster than Ray Data tasks.
        train, held_out = (
            ParquetStream(f"{self.config.data}/{part}", engine="threads") for part in ("train", "held-out")
        )
        return train, held_out

    def configure_callbacks(self):
        return [Samples(GptTrainer.sample, every="100 steps", name="sample")]

    def training_step(self, batch, batch_idx):
        tokens_BT = batch["tokens"].long()
        logits_BTV = self.model(tokens_BT[:, :-1])
        return {"loss": F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())}

    def num_tokens(self, batch):
        return batch["tokens"][:, 1:].numel()

    def sample(
        self, prompt=("\n\n    ", "def", " __init__", "(", "self", "):", "\n        "), length=100, temperature=0.7
    ):
        """Return a continuation of the prompt. Every rank must call this, because the model may be sharded."""
        vocabulary = json.loads(Path(self.config.data, "vocabulary.json").read_text())
        # The same random numbers on every rank and for every sample of a run.
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        tokens = [vocabulary.index(word) for word in prompt]
        for _ in range(length):
            context_1T = torch.tensor([tokens[-self.config.context :]], device=self.device)
            logits_V = self.model(context_1T)[0, -1].float()
            logits_V[0] = -math.inf  # the entry for words outside the vocabulary
            tokens.append(int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator)))
        return "".join(vocabulary[token] for token in tokens)


experiment = Experiment(
    name="gpt",
    trainer=GptTrainer,
    config=GptConfig(
        max_steps=600,
        global_batch_size=16,
        micro_batch_size=8,
        max_grad_norm=1.0,
        # Short, because the progress bar moves with each record.
        log_every=Duration(10, "steps"),
        evaluate_every=Duration(200, "steps"),
        checkpoint=CheckpointConfig(every=Duration(100, "steps")),
    ),
    scaling=Scaling(workers=2),
)
