"""Digests of the final weights of small trainings, to compare two commits: `python -m benchmarks.digests`.

Six modes times six seeds: one process, two ranks, exact, FSDP2, accumulation, several optimizers. A change that should
not affect the arithmetic must print the same lines before and after, on the same machine and version of torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SEEDS = range(6)
MODES = ("alone", "two ranks", "exact", "fsdp", "accumulation", "several optimizers")
TWO_RANKS = ("two ranks", "fsdp")


def train(mode: str, seed: int, folder: str) -> None:
    """Train in this process, one of several ranks in some modes, and write the weights of each model to `folder`."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from headway.trainer import ParallelConfig, Trainer, TrainerConfig, World

    torch.set_num_threads(1)

    class Small(Trainer[TrainerConfig]):
        def configure_models(self) -> None:
            dropout = 0.0 if mode == "exact" else 0.1
            self.model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4))
            if mode == "several optimizers":
                self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=60)
            if mode == "several optimizers":
                self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

        def configure_dataloaders(self) -> Any:
            generator = torch.Generator().manual_seed(1)
            x, y = torch.randn(203, 8, generator=generator), torch.randint(0, 4, (203,), generator=generator)
            train, held_out = TensorDataset(x[:163], y[:163]), TensorDataset(x[163:], y[163:])
            return DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=16)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits = self.model(x)
            loss = F.cross_entropy(logits, y)
            if mode != "several optimizers":
                return loss
            value = self.critic(logits.detach())
            self.backward(F.softplus(-value).mean() + F.softplus(self.critic(torch.randn_like(logits))).mean())
            self.step(self.critic_optimizer)
            self.backward(loss - 0.1 * self.critic(logits).mean())
            self.step(self.optimizer)
            return {"loss": loss}

    sizes: dict[str, Any] = {"global_batch_size": 16, "micro_batch_size": 4 if mode == "accumulation" else None}
    if mode == "exact":
        sizes["exact"] = True
    config = TrainerConfig(
        max_epochs=6,
        seed=seed,
        max_grad_norm=1.0,
        parallel=ParallelConfig(strategy="fsdp" if mode == "fsdp" else "ddp"),
        **sizes,
    )
    # The world outlives fit, so that sharded weights can be exported afterwards.
    with World.from_environment() as world:
        trainer = Small(config, world=world, printer=lambda text: None)
        trainer.fit()
        for name in trainer.models:
            trainer.export(f"{folder}/{seed}-{name}.safetensors", model=name)


def digests(mode: str) -> list[str]:
    """Train each seed in new processes, and return the hashes of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            launch = [sys.executable]
            if mode in TWO_RANKS:
                launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            done = subprocess.run(
                [*launch, __file__, mode, str(seed), folder],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                return ["failed:", done.stderr]
        files = [sorted(Path(folder).glob(f"{seed}-*.safetensors")) for seed in SEEDS]
        return [hashlib.sha256(b"".join(file.read_bytes() for file in each)).hexdigest()[:16] for each in files]


if __name__ == "__main__":
    if len(sys.argv) == 4:
        train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        for mode in sys.argv[1:] or MODES:
            print(f"{mode:20}", *digests(mode), flush=True)
