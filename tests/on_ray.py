"""A trainer for tests on Ray: streams Parquet rows, and records in the run's folder which rank saw which rows."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

from headway.datasets.stream import ParquetStream
from headway.trainer import Trainer, TrainerConfig


def write_rows(folder: Path, rows: int) -> str:
    """Write numbered rows, each with a vector and a label, in small row groups."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(rows, 6)).astype("float32")
    table = pa.table({
        "id": pa.array(range(rows), pa.int64()),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 6),
        "y": pa.array(generator.integers(0, 3, rows), pa.int64()),
    })  # fmt: skip
    pq.write_table(table, folder / "rows.parquet", row_group_size=16)
    return str(folder)


@dataclass(frozen=True, kw_only=True)
class OnRayConfig(TrainerConfig):
    data: str
    dropout: float = 0.0
    pause_s: float = 0.0
    fail_at: int | None = None
    exit_at: int | None = None
    say: str = ""
    engine: Literal["auto", "ray", "threads"] = "auto"


class OnRay(Trainer[OnRayConfig]):
    def configure_models(self) -> None:
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.GELU(), nn.Dropout(self.config.dropout), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=200)

    def configure_dataloaders(self) -> Any:
        data, engine = self.config.data, self.config.engine
        return ParquetStream(data, tail="keep", shards=8, engine=engine), ParquetStream(data, engine=engine)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training:
            self._write_down(batch["id"].tolist())
            time.sleep(self.config.pause_s)
            if self.config.fail_at == self.global_step and self.world.rank == self.world.size - 1:
                raise ValueError(f"a bad batch at step {self.global_step}")
            if self.config.exit_at == self.global_step:
                sys.exit(0)
            if self.config.say and self.global_step == 1:
                print(f"printed: {self.config.say}")
                self.print(f"said: {self.config.say}")
                warnings.warn(f"warned: {self.config.say}", stacklevel=1)
                for _ in range(2):  # a line is shown once
                    logging.getLogger("headway.datasets").warning("logged: %s", self.config.say)
        return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def _write_down(self, ids: list[int]) -> None:
        assert self.run_dir is not None
        line = json.dumps({"attempt": self.attempt, "step": self.global_step, "ids": ids})
        handle = os.open(f"{self.run_dir}/rows-{self.world.rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{line}\n".encode())
        os.close(handle)


def rows_seen(run_dir: str, rank: int) -> dict[int, list[int]]:
    """Return the rows of each update on one rank; repeated updates count as the last attempt made them."""
    seen: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in Path(run_dir, f"rows-{rank}.jsonl").read_text().splitlines():
        record = json.loads(line)
        seen[record["step"]][record["attempt"]] += record["ids"]
    return {step: attempts[max(attempts)] for step, attempts in sorted(seen.items())}
