"""Learns to write Python from Python's standard library: a byte-level GPT, streamed from Parquet by Ray Data.

python examples/prepare_stdlib.py data/stdlib              once
headway fit examples/gpt.py                                two Ray workers of this machine, DDP
headway fit examples/gpt.py config.parallel.strategy=fsdp scaling.workers=3
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from headway.datasets.stream import ParquetStream
from headway.datasets.tokenizers import ByteTokenizer
from headway.orchestrator import Experiment, Scaling
from headway.trainer import CheckpointConfig, Duration, Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class GptConfig(TrainerConfig):
    data: str = str(Path("data/stdlib").absolute())
    vocabulary: int = ByteTokenizer.vocab_size
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    learning_rate: float = 2e-3
    warmup_steps: int = 50
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
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def configure_optimizers(self):
        config = self.config
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.warm_up_then_cosine)

    def warm_up_then_cosine(self, step):
        warmup, total = self.config.warmup_steps, self.config.max_steps
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    def configure_dataloaders(self):
        return ParquetStream(f"{self.config.data}/train"), ParquetStream(f"{self.config.data}/held-out")

    def training_step(self, batch, batch_idx):
        tokens_BT = batch["tokens"].long()
        logits_BTV = self.model(tokens_BT[:, :-1])
        return {"loss": F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())}

    def num_tokens(self, batch):
        return batch["tokens"][:, 1:].numel()

    def on_fit_end(self, error):
        if error is None and self.config.parallel.strategy in ("none", "ddp") and self.world.is_main:
            self.print(f"A sample:\n{self.generate('def ', length=300)}")

    @torch.no_grad()
    def generate(self, prompt, *, length, temperature=0.7):
        """Continues a text, on this rank alone, from a generator of its own."""
        model, tokenizer = self.unwrap(self.model).eval(), ByteTokenizer()
        generator = torch.Generator(self.device).manual_seed(0)
        tokens = tokenizer(prompt)[:-1].tolist()
        for _ in range(length):
            context_1T = torch.tensor([tokens[-model.context :]], device=self.device)
            chances_V = (model(context_1T)[0, -1].float() / temperature).softmax(0)
            tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
        return tokenizer.decode(tokens)


experiment = Experiment(
    name="gpt",
    trainer=GptTrainer,
    config=GptConfig(
        max_steps=400,
        global_batch_size=32,
        micro_batch_size=16,
        max_grad_norm=1.0,
        log_every=Duration(20, "steps"),
        evaluate_every=Duration(200, "steps"),
        checkpoint=CheckpointConfig(every=Duration(100, "steps")),
    ),
    scaling=Scaling(workers=2),
)
