"""The driver's look at the heartbeats of its ranks: through the mailbox, which is an actor, and by reading their files.

The ranks are simulated: their heartbeats are sent before each look. The times are of the driver's thread.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.orchestrator.cluster.ray_env import quiet_environment
from headway.orchestrator.config.experiment import Experiment, Retries
from headway.orchestrator.storage.events import EventWriter
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.watchdog.driver import HangMonitor
from headway.orchestrator.watchdog.mailbox import DriverMailbox
from headway.orchestrator.watchdog.worker import heartbeat_file, watch_folder
from headway.trainer import TrainerConfig

from .records import Tiny
from .table import Row, interleave

FEW, MANY, MOST_MS = 2, 1024, 5.0
_PAIRS = 25


def rows() -> list[Row]:
    """Measure one look at 1,024 ranks, and through the mailbox also at two."""
    quiet_environment()
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            sent, few, read = (Looks(folder, ranks, by) for ranks, by in ((MANY, True), (FEW, True), (MANY, False)))
            measured = interleave(sent.look_ms, read.look_ms, pairs=_PAIRS)
            few_ms = statistics.median(few.look_ms() for _ in range(_PAIRS))
    finally:
        ray.shutdown()
    ours_ms, theirs_ms = (statistics.median(column) for column in zip(*measured, strict=True))
    return [
        Row(
            f"heartbeats: a look at {MANY:,} ranks by mailbox ({FEW} ranks: {few_ms:.2f} ms) and by files on a disk",
            f"{ours_ms:.2f} ms",
            f"{theirs_ms:.1f} ms",
            ours_ms / theirs_ms,
            f"<= {MOST_MS:g} ms",
            ours_ms <= MOST_MS,
        )
    ]


class Looks:
    """A driver that looks at simulated ranks.

    Args:
        folder: for the files.
        ranks: number of ranks.
        by_mailbox: use the mailbox; else files.
    """

    def __init__(self, folder: str, ranks: int, by_mailbox: bool) -> None:
        run, self._ranks, self._beats, self._now_s = Folder(folder), ranks, 0, 0.0
        self._watch = watch_folder(run)
        self._watch.prepare()
        self._mailbox = DriverMailbox() if by_mailbox else None
        experiment = Experiment(name="x", trainer=Tiny, config=TrainerConfig(max_steps=1), retries=Retries())
        self._monitor = HangMonitor(
            experiment, run, EventWriter(run, "driver"), mailbox=self._mailbox, clock=lambda: self._now_s
        )
        workers = [{"rank": rank, "host": "elsewhere", "pid": 1} for rank in range(ranks)]
        self._monitor.handle({"event": "attempt_started", "attempt": 1, "workers": workers})

    def look_ms(self) -> float:
        """Send a heartbeat of each rank, and return the milliseconds of the driver's look."""
        import ray

        self._beats += 1
        beats = [self._beat(rank) for rank in range(self._ranks)]
        if self._mailbox is None:
            for beat in beats:
                Path(self._watch.place, heartbeat_file(beat["rank"])).write_text(json.dumps(beat))
        else:
            ray.get([self._mailbox.actor.beat.remote(beat) for beat in beats])
        self._now_s += 2.0
        return 1e3 * _seconds(self._monitor.poll)

    def _beat(self, rank: int) -> dict[str, Any]:
        return {
            "attempt": 1, "rank": rank, "host": "elsewhere", "pid": 1, "beat": self._beats, "phase": "backward",
            "for_s": 0.1, "usual_s": 0.1, "updates": self._beats, "batches": 1, "step": self._beats,
        }  # fmt: skip


def _seconds(do: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s
