"""A GPT of 124M parameters on a GPU: Headway against a bare loop, saves, float8 and the memory estimate.

Run it with `make bench-gpu`; `--smoke` tries every part on the CPU with a tiny model, whose numbers mean nothing.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headway.trainer import Callback, CheckpointConfig, ParallelConfig, Trainer, TrainerConfig, World
from headway.trainer.callbacks import PeakMemory, Throughput
from headway.trainer.callbacks.throughput import flops_by_parameters, known_peak_flops

from .table import Row, interleave, median_ratio, show

WARM_UP = 10


@dataclass(frozen=True, kw_only=True)
class GptConfig(TrainerConfig):
    width: int = 768
    layers: int = 12
    heads: int = 12
    words: int = 50304
    length: int = 1024
    rows: int = 16
    steps: int = 110


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class Gpt(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(config.words, config.width), nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(config: GptConfig) -> Any:
    ids = torch.randint(config.words, (config.rows * config.steps, config.length + 1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=config.rows, pin_memory=False)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


class Trains(Trainer[GptConfig]):
    def configure_models(self) -> None:
        self.model = Gpt(self.config)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def configure_dataloaders(self) -> Any:
        return batches(self.config)

    def num_tokens(self, batch: Any) -> int:
        return batch[0].numel() - len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(self.model, batch[0])


class Clock(Callback):
    """Times the updates after the first ones, and the host's part of each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.began_s, self.ended_s = device, 0.0, 0.0
        self.records: list[dict[str, float]] = []
        self.saves_s: list[float] = []
        self._save_began_s = 0.0

    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == WARM_UP:
            _synchronize(self.device)
            self.began_s = time.perf_counter()
        if trainer.global_step == trainer.config.steps:
            _synchronize(self.device)
            self.ended_s = time.perf_counter()
        if self._save_began_s:
            self.saves_s.append(time.perf_counter() - self._save_began_s)
            self._save_began_s = 0.0

    def on_checkpoint_start(self, trainer: Any) -> None:
        # What the device still has to do is no stall of the save.
        _synchronize(self.device)
        self._save_began_s = time.perf_counter()

    def on_log(self, trainer: Any, record: Any) -> None:
        self.records.append(dict(record))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(config: GptConfig, device: torch.device, clocks: list[Clock]) -> float:
    """Return the seconds of an update under Headway, with saves, metrics and everything else on."""
    clock = Clock(device)
    clocks.append(clock)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        Trains(
            config, world=World.single(device), run_dir=folder, callbacks=[clock, Throughput(), PeakMemory()],
            show_progress=False, printer=lambda text: None,
        ).fit()  # fmt: skip
    return (clock.ended_s - clock.began_s) / (config.steps - WARM_UP)


def theirs(config: GptConfig, device: torch.device) -> float:
    """Return the seconds of an update in a bare loop, which clips, but logs and saves nothing."""
    torch.manual_seed(0)
    with device:
        model = Gpt(config)
    if config.parallel.compile:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    began_s = 0.0
    for number, (ids,) in enumerate(batches(config), 1):
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number == WARM_UP:
            _synchronize(device)
            began_s = time.perf_counter()
    _synchronize(device)
    return (time.perf_counter() - began_s) / (config.steps - WARM_UP)


def rows(smoke: bool = False, pairs: int = 3) -> list[Row]:
    """Measure all rows."""
    device = torch.device("cpu" if smoke else "cuda:0")
    size = {"width": 32, "layers": 2, "heads": 2, "words": 128, "length": 16, "rows": 2, "steps": 14} if smoke else {}
    every = CheckpointConfig(every="5 steps" if smoke else "50 steps", at_end=False)
    parallel = ParallelConfig(compile=not smoke)
    config = GptConfig(**size, max_epochs=1, precision="bf16", max_grad_norm=1.0, parallel=parallel, checkpoint=every)
    clocks: list[Clock] = []
    measured = interleave(lambda: theirs(config, device), lambda: ours(config, device, clocks), pairs=pairs)
    tokens, ratio = config.rows * config.length, median_ratio(measured)
    bare_s, our_s = (statistics.median(pair[i] for pair in measured) for i in (0, 1))
    model = Gpt(config)
    peak = known_peak_flops(device, config.precision)
    mfu = [f", MFU {flops_by_parameters(model) * tokens / s / peak:.3f}" if peak else "" for s in (our_s, bare_s)]
    found = [Row(
        "gpu: tokens/s of a GPT, everything on", f"{tokens / our_s:.0f}{mfu[0]}", f"{tokens / bare_s:.0f}{mfu[1]}",
        ratio, ">= 0.99", ratio >= 0.99,
    )]  # fmt: skip
    # The first save allocates the memory for the copy.
    stalls_s = [each for clock in clocks for each in clock.saves_s[1:]]
    if stalls_s:
        held = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
        stall_s = max(stalls_s) - our_s
        found.append(Row(
            f"gpu: stall of a checkpoint of {held / 1e9:.2f} GB", f"{stall_s * 1e3:.1f} ms", "10 ms",
            stall_s / 0.01, "<= 1", stall_s <= 0.01,
        ))  # fmt: skip
    estimate = Trains(config, world=World.single(device)).estimate().memory.total
    used = max(record.get("peak_memory_bytes", 0) for record in clocks[-1].records)
    found.append(Row(
        "gpu: estimated memory (no activations) of the peak", f"{estimate / 1e9:.2f} GB", f"{used / 1e9:.2f} GB",
        estimate / used, "0.9 to 1.1", 0.9 <= estimate / used <= 1.1,
    ))  # fmt: skip
    if not smoke and importlib.util.find_spec("torchao") is not None:
        low = GptConfig(
            float8=True, max_epochs=1, precision="bf16", max_grad_norm=1.0, parallel=parallel, checkpoint=every
        )
        float8_s = ours(low, device, [])
        found.append(Row(
            "gpu: seconds of an update, float8 and bf16", f"{float8_s:.4f} s", f"{our_s:.4f} s", float8_s / our_s,
            "<= 1", float8_s <= our_s,
        ))  # fmt: skip
    return found


if __name__ == "__main__":
    table = rows("--smoke" in sys.argv, pairs=1 if "--smoke" in sys.argv else 3)
    print(show(table))
