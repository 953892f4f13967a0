"""A script like nanoGPT with its own training loop: `python examples/nanogpt_loop.py`, or under `torchrun`.

The model and the loop look as they would without Headway. `Session` adds the rest: a killed run resumes exactly, on any
number of ranks; all ranks handle non-finite gradients alike; checkpoints are written in the background; Ctrl-C saves
first. The training text is the source code of Python's standard library.
"""

from __future__ import annotations

import math
import pathlib
import sys
import sysconfig
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway.trainer import CheckpointConfig, Duration, Session, TrainerConfig

BLOCK = 64


class Characters(Dataset):
    """Windows of characters, int64 [BLOCK + 1]: the model predicts each character from the earlier ones."""

    def __init__(self, text: str) -> None:
        self.data = torch.tensor([min(ord(character), 127) for character in text])

    def __len__(self) -> int:
        return (len(self.data) - 1) // BLOCK

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.data[i * BLOCK : (i + 1) * BLOCK + 1]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (
            each.view(B, T, self.heads, -1).transpose(1, 2) for each in self.attention(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Initializes its own weights, as nanoGPT does; Headway keeps them."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        inputs, targets = window[:, :-1], window[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class Config(TrainerConfig):
    learning_rate: float = 3e-3


config = Config(
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 100,
    global_batch_size=32,
    micro_batch_size=16,
    max_grad_norm=1.0,
    log_every=Duration(20, "steps"),
    evaluate_every=Duration(50, "steps"),
    checkpoint=CheckpointConfig(every=Duration(25, "steps")),
)


def make_optimizer(model: GPT) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def main() -> None:
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = "".join(file.read_text(errors="ignore") for file in files)
    train, held_out = Characters(text[20_000:]), Characters(text[:20_000])
    with Session(
        config,
        model=GPT,
        optimizer=make_optimizer,
        data=DataLoader(train, batch_size=32, shuffle=True),
        validation=DataLoader(held_out, batch_size=32),
        validation_step=lambda run, window: run.model(window),
        run_dir="runs/nanogpt",
    ) as run:
        run.restore()
        for batch in run:
            for window in run.accumulate(batch):
                run.backward(run.model(window))
            metrics = run.step()
            if metrics:
                run.print(f"step {run.global_step}: loss {metrics['train/loss']:.3f}")
    run.print(f"{run.result.status}: {run.result.reason}; validation loss {run.result.metrics['validation/loss']:.3f}")


if __name__ == "__main__":
    main()
