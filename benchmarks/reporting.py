"""What a report to Ray Train costs the updates of a `train_loop`, whose workers report in a thread of their own.

Two workers take blocks of updates, with a report of metrics and a checkpoint at the beginning of a block or without.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.orchestrator.cluster.ray_env import quiet_environment

from .table import Row, interleave, median_ratio

UPDATES, MOST = 100, 1.05
_PAIRS, _DIRECT = 10, 3
_METRICS = {"validation/loss": 1.0, "step": 1}


def rows() -> list[Row]:
    """Measure a block with a report against one without, and against one that calls `ray.train.report` itself."""
    quiet_environment()
    import ray
    from ray.train import LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            out = f"{folder}/measured.json"
            TorchTrainer(
                _measure,
                train_loop_config={"out": out},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(
                    name="reports", storage_path=folder, logging_config=LoggingConfig(log_level="ERROR")
                ),
            ).fit()
            measured, direct = json.loads(Path(out).read_text())
    finally:
        ray.shutdown()
    ratio = median_ratio(measured)
    ours_s, without_s = (statistics.median(column) for column in zip(*measured, strict=True))
    return [
        Row(
            f"reporting: {UPDATES} updates of two workers with a report to Ray Train, and without "
            f"({statistics.median(direct) / without_s:.2f} times as long if the loop itself reports)",
            f"{1e3 * ours_s / UPDATES:.2f} ms",
            f"{1e3 * without_s / UPDATES:.2f} ms",
            ratio,
            f"<= {MOST:g}",
            ratio <= MOST,
        )
    ]


def _measure(settings: dict[str, Any]) -> None:
    """Measure in a worker; rank 0 writes the seconds of all blocks."""
    import ray.train
    from ray.train.torch import prepare_model

    from headway.orchestrator.runs.pointer import Pointer
    from headway.orchestrator.train.ray_train_thread import RayTrainThread

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = prepare_model(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)))
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(128, 512)
    is_main = dist.get_rank() == 0
    thread = RayTrainThread(is_main=is_main, on_notice=None, reports=True)

    def block_s(report: Callable[[], None]) -> float:
        # The report of the block before is over.
        time.sleep(1.5)
        dist.barrier()
        began_s = time.perf_counter()
        report()
        for _ in range(UPDATES):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - began_s

    pointer = Pointer(run_dir="/runs/run", checkpoint="/runs/run/checkpoints/step-00000001")
    measured = interleave(
        lambda: block_s(lambda: thread.report(_METRICS, pointer)), lambda: block_s(lambda: None), pairs=_PAIRS
    )
    thread.end(wait=True)
    direct = [block_s(lambda: ray.train.report(_METRICS)) for _ in range(_DIRECT)]
    if is_main:
        Path(settings["out"]).write_text(json.dumps([measured, direct]))
