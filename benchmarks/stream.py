"""Streams compared with alternatives: rows/s, time to the first batch of a resumed run, memory."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Ray workers run at nice 15, DataLoader workers do not: on a busy machine this difference would dominate.
# Used blocks are freed as quickly as in the Ray that Headway starts.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS="0",
    RAY_worker_niceness="0",
    RAY_free_objects_period_milliseconds="100",
)

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.datasets.mixture import Mixture
from headway.datasets.plan import EpochPlan
from headway.datasets.sources import Parquet
from headway.datasets.stream import ParquetStream, Stream

from .table import Row

TOKENS = 512
ROWS_PER_FILE = 100_000
FILES = 10
BATCH = 256
PAIRS = 7


def rows(part: str = "all") -> list[Row]:
    """Measure all rows, or only "sources"; start a local Ray unless one is running."""
    if part != "all":
        return sources()
    import ray
    import ray.data

    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            files = make_data(Path(folder))
            return [
                *throughput(files[:2]),
                seeking(),
                first_batch(files),
                memory(files[:1], files),
                *sources(),
            ]
    finally:
        if started:
            ray.shutdown()


def make_data(folder: Path) -> list[str]:
    """Write 10 files of 100,000 rows of 512 int32 tokens, in row groups of 1024 rows."""
    paths = []
    for index in range(FILES):
        tokens = np.random.default_rng(index).integers(0, 50_257, ROWS_PER_FILE * TOKENS, dtype=np.int32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), TOKENS)
        paths.append(str(folder / f"part-{index:05d}.parquet"))
        pq.write_table(pa.table({"tokens": column}), paths[-1], row_group_size=1024)
    return paths


def shard_info() -> Any:
    """Return the `ShardInfo` of a single rank on the CPU."""
    return SimpleNamespace(
        rank=0, world_size=1, global_batch_size=BATCH, micro_batch_size=None, accumulation=1, seed=0,
        device=torch.device("cpu"), training=True, by_shard=False,
    )  # fmt: skip


def throughput(files: list[str]) -> list[Row]:
    """Measure rows/s over 200,000 shuffled rows. Each reader reads two epochs; the second is timed.

    This excludes the start of processes, and what a stream has prefetched: it prefetches across epochs.
    """
    ray_data, loader = "rows/s: read_parquet, iter_torch_batches", "rows/s: DataLoader, one worker"
    readers: dict[str, Callable[[], Iterator[Iterable[Any]]]] = {
        "ours": lambda: _stream(files),
        ray_data: lambda: _ray_data(files),
        loader: lambda: _loader(files),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(PAIRS):
        for name, read in readers.items():
            gc.collect()
            epochs = read()
            sum(len(batch["tokens"]) for batch in next(epochs))
            start = time.perf_counter()
            seen = sum(len(batch["tokens"]) for batch in next(epochs))
            rates[name].append(seen / (time.perf_counter() - start))
            epochs.close()  # type: ignore[attr-defined]
    return [rate_row(name, rates["ours"], rates[name], target) for name, target in ((ray_data, 1.5), (loader, 1.0))]


def sources() -> list[Row]:
    """Measure the peak resident memory of a new process that reads 200 MB in 100 sources, against one of all rows."""
    made = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        generator = np.random.default_rng(0)
        for source in range(100):
            tokens = generator.integers(0, 50_257, 1000 * TOKENS, dtype=np.int32)
            column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), TOKENS)
            pq.write_table(pa.table({"tokens": column}), Path(name) / f"{source:02d}.parquet", row_group_size=64)
        for shards in (32, 4):
            one, many = (_peak_of_new_process(name, number, shards) for number in (1, 100))
            ratio = many / one
            made.append(
                Row(
                    f"stream, peak memory of 100 sources against 1, {shards} shards",
                    *(f"{each / 1e6:.0f} MB" for each in (many, one)),
                    ratio,
                    "<= 1.2",
                    ratio <= 1.2,
                )
            )
    return made


def _peak_of_new_process(folder: str, number: int, shards: int) -> int:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_read_epoch, folder, number, shards).result()


def _read_epoch(folder: str, number: int, shards: int) -> int:
    """Read an epoch, and return the peak resident memory in bytes."""
    files = sorted(Path(folder).glob("*.parquet"))
    data = Mixture({each.stem: (Parquet(each), 1.0) for each in files}) if number > 1 else Parquet(files)
    stream = Stream(data, engine="threads", shards=shards)
    stream.setup(shard_info())
    for _ in stream.epoch(0):
        pass
    stream.close()
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def rate_row(name: str, ours: list[float], theirs: list[float], target: float) -> Row:
    """Return the row of two series of rates, which were measured in turn."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    both = (f"{statistics.median(each):,.0f}" for each in (ours, theirs))
    return Row(f"stream, {name}", *both, ratio, f">= {target}", ratio >= target)


def _stream(files: list[str]) -> Iterator[Iterable[Any]]:
    stream = ParquetStream(files, tail="keep")
    stream.setup(shard_info())
    try:
        for epoch in count():
            yield (columns for batch in stream.epoch(epoch) for columns in batch.micro_batches)
    finally:
        stream.close()


def _ray_data(files: list[str]) -> Iterator[Iterable[Any]]:
    import ray.data

    dataset = ray.data.read_parquet(files, shuffle="files")
    while True:
        yield dataset.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=16 * BATCH, prefetch_batches=4)


def _loader(files: list[str]) -> Iterator[Iterable[Any]]:
    loader = DataLoader(RowGroups(files), batch_size=None, num_workers=1, prefetch_factor=4, persistent_workers=True)
    while True:
        yield loader


class RowGroups(IterableDataset[Any]):
    """A typical hand-written dataset: row groups in random order, rows shuffled within each, full batches."""

    def __init__(self, files: list[str], column: str = "tokens") -> None:
        self._files, self._column = files, column

    def __iter__(self) -> Iterator[Any]:
        generator = np.random.default_rng()
        files = [pq.ParquetFile(file, memory_map=True) for file in self._files]
        groups = [(file, group) for file in files for group in range(file.num_row_groups)]
        rest: Any = None
        for index in generator.permutation(len(groups)):
            file, group = groups[index]
            column = file.read_row_group(group, columns=[self._column]).column(self._column).combine_chunks()
            values = column.flatten().to_numpy().reshape(len(column), -1)
            values = values[generator.permutation(len(values))]
            rest = values if rest is None else np.concatenate([rest, values])
            while len(rest) >= BATCH:
                yield {self._column: torch.from_numpy(rest[:BATCH].copy())}
                rest = rest[BATCH:]
        if len(rest):
            yield {self._column: torch.from_numpy(rest)}


def seeking() -> Row:
    """Measure the seconds to plan the first reads in an epoch of 1e9 rows, at the slowest of several offsets."""
    plan = EpochPlan(np.full(10_000, 100_000), seed=0, epoch=1, shards=32)
    seconds: dict[float, list[float]] = {part: [] for part in (0.0, 0.001, 0.25, 0.5, 0.75, 0.99, 0.999999)}
    for _ in range(PAIRS):
        for part, times in seconds.items():
            start = time.perf_counter()
            reads = plan.reads(rank=1, world_size=2, offset=int(plan.rows * part) // BATCH * BATCH)
            assert reads[0].rows
            next(plan.batches(rank=1, world_size=2, global_batch_size=BATCH, offset=int(plan.rows * part)))
            times.append(time.perf_counter() - start)
    fresh, *others = (statistics.median(times) for times in seconds.values())
    slowest = max(others)
    ratio = slowest / fresh
    return Row(
        "stream, plan in 1e9 rows, any offset against 0 %",
        f"{slowest * 1e3:.0f} ms",
        f"{fresh * 1e3:.0f} ms",
        ratio,
        "<= 1.2",
        ratio <= 1.2,
    )


def first_batch(files: list[str]) -> Row:
    """Measure the seconds from `setup` to the first batch in an epoch of 1,000,000 rows, at 0 % and at 99 %."""
    seconds: dict[float, list[float]] = {0.0: [], 0.99: []}
    for _ in range(PAIRS):
        for part, times in seconds.items():
            stream = ParquetStream(files)
            start = time.perf_counter()
            stream.setup(shard_info())
            batches = stream.epoch(0, offset=int(stream.samples_in_epoch(0) * part) // BATCH * BATCH)
            next(batches)
            times.append(time.perf_counter() - start)
            batches.close()
            stream.close()
    fresh, resumed = (times[1:] for times in seconds.values())
    ratio = statistics.median(b / a for a, b in zip(fresh, resumed, strict=True))
    both = (f"{statistics.median(each):.2f} s" for each in (resumed, fresh))
    return Row("stream, first batch at 99 % against 0 %", *both, ratio, "<= 1.2", ratio <= 1.2)


def memory(small: list[str], large: list[str]) -> Row:
    """Measure the peak resident memory of a new worker that reads an epoch: 2 GB against 200 MB of tokens."""
    import ray

    def peak(files: list[str]) -> int:
        stream = ParquetStream(files)
        stream.setup(shard_info())
        for _ in stream.epoch(0):
            pass
        stream.close()
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def fresh(files: list[str]) -> int:
        # A unique runtime environment forces a new process; a reused one may have had a higher peak.
        unique = {"env_vars": {"HEADWAY_BENCH": files[-1]}}
        return int(ray.get(ray.remote(num_cpus=0, max_calls=1, runtime_env=unique)(peak).remote(files)))

    theirs, ours = fresh(small), fresh(large)
    ratio = ours / theirs
    return Row(
        "stream, peak memory 2 GB against 200 MB",
        f"{ours / 1e6:.0f} MB",
        f"{theirs / 1e6:.0f} MB",
        ratio,
        "<= 1.2",
        ratio <= 1.2,
    )
