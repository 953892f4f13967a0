"""Mixtures, packing, batches by length, tokens and images, side by side with other loaders, on two cores.

Every loader may use two workers or threads, reads files in the page cache, and returns batches of 256 rows of a mixture
with the same weights. The others get rows that are already tokenized and packed, each in its own format, with all
columns stored, because none of them packs in advance.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from headway.datasets.arrow import Rows, to_table
from headway.datasets.formats.base import DataFormat
from headway.datasets.formats.images import Images
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.formats.token_budget import TokenBudget
from headway.datasets.mixture import Mixture
from headway.datasets.packing import Packed
from headway.datasets.sources import Parquet
from headway.datasets.stream import Stream
from headway.datasets.tokenizers import ByteTokenizer

from .stream import BATCH, TOKENS, RowGroups, rate_row, shard_info
from .table import Row

PAIRS = 3
ROWS = 128_000
SHARES = {"web": 0.5, "code": 0.3, "books": 0.2}
COLUMNS = ("tokens", "document_ids", "positions", "mask")
WORKERS = 2
OTHERS = {"grain": "Grain", "streaming": "MosaicML Streaming", "litdata": "LitData"}
# Of 200,000 rows of tokens, before Ray Data read several row groups in one task, on a machine like this one.
RAY_BEFORE = SimpleNamespace(first_batch=7.0, first_epoch=18_000)
# Tokens of a padded batch, documents, and batches whose documents a DataLoader sorts together.
BUDGET, DOCUMENTS, SORTED_BATCHES = 16_384, 60_000, 50
STEP_SECONDS, JPEG_BATCH, JPEG_STEPS = 0.05, 32, 120


def rows(part: str = "all") -> list[Row]:
    """Measure all rows, or only "mixtures", "lengths", "columns" or "jpeg"; start a local Ray unless one is running."""
    import ray
    import ray.data

    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    parts = {"mixtures": mixtures, "lengths": lengths, "columns": columns, "jpeg": jpeg}
    try:
        made = []
        for name in parts if part == "all" else [part]:
            with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
                made += parts[name](Path(folder))
        return made
    finally:
        if started:
            ray.shutdown()


@dataclass(frozen=True)
class Reader:
    """A loader to measure.

    Attributes:
        batches: yields the number of rows of each batch, without an end.
        warm, timed: rows that are read before the time is taken, and while it is taken.
    """

    batches: Callable[[], Iterator[int]]
    warm: int
    timed: int

    def rate(self) -> float:
        """Return rows/s. Processes and execution have started before, and all read-ahead is full."""
        gc.collect()
        batches = self.batches()
        try:
            _read(batches, self.warm)
            start = time.perf_counter()
            seen = _read(batches, self.timed)
            return seen / (time.perf_counter() - start)
        finally:
            batches.close()  # type: ignore[attr-defined]


def _read(batches: Iterator[int], rows: int) -> int:
    seen = 0
    while seen < rows:
        seen += next(batches)
    return seen


def mixtures(folder: Path) -> list[Row]:
    """Measure rows/s of a packed mixture of three JSON Lines sources, and what it is compared with."""
    for index, (source, share) in enumerate(SHARES.items()):
        generator, documents = np.random.default_rng(index), int(ROWS * share)
        tokens = generator.integers(0, 50_257, documents * TOKENS, dtype=np.int32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), TOKENS)
        pq.write_table(pa.table({"tokens": column}), folder / f"{source}.parquet", row_group_size=1024)
        lengths = generator.integers(10, 1001, documents).tolist()
        lines = "".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths)
        (folder / f"{source}.jsonl").write_text(lines)
    packed = {
        source: Packed(JsonLines(folder / f"{source}.jsonl"), length=TOKENS, index=folder, tokenizer=ByteTokenizer())
        for source in SHARES
    }
    parquet = {source: Parquet(folder / f"{source}.parquet") for source in SHARES}
    ours = "packed mixture of 3 JSON Lines"
    readers = {
        ours: _stream(_mixture(packed)),
        "one Parquet stream": _stream(Parquet([folder / f"{source}.parquet" for source in SHARES])),
        "JSON Lines": _stream(JsonLines([folder / f"{source}.jsonl" for source in SHARES])),
        "mixture of 3 Parquet": _stream(_mixture(parquet)),
        "Ray Data, Dataset.mix": Reader(lambda: _ray_mix(folder), 16_000, 64_000),
    }
    _write_for_others(folder, packed)
    loaders = {"grain": _grain, "streaming": _mosaic, "litdata": _litdata}
    for module, name in OTHERS.items():
        if _installed(module):
            readers[name] = Reader(partial(loaders[module], folder), 16_000, 32_000)
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(PAIRS):
        for name, reader in readers.items():
            rates[name].append(reader.rate())
    single = "one Parquet stream"
    against_single = [(each, single) for each in (ours, "JSON Lines", "mixture of 3 Parquet")]
    targets = {"Ray Data, Dataset.mix": 1.5, **dict.fromkeys(OTHERS.values(), 1.0)}
    against_others = [(ours, each) for each in targets if each in rates]
    return [
        rate_row(f"rows/s: {one} against {other}", rates[one], rates[other], targets.get(other, 0.9))
        for one, other in against_single + against_others
    ]


def _installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module) is not None and bool(importlib.import_module(module))
    except (ImportError, RuntimeError, OSError) as error:
        print(f"{OTHERS[module]} cannot be imported ({error}), and is left out", file=sys.stderr)
        return False
    if not found:
        print(f"{OTHERS[module]} is not installed, and is left out", file=sys.stderr)
    return found


def _mixture(sources: dict[str, Any]) -> Mixture:
    return Mixture({source: (data, SHARES[source]) for source, data in sources.items()})


def _stream(data: DataFormat) -> Reader:
    return Reader(lambda: _stream_batches(data), ROWS, 2 * ROWS)


def _stream_batches(data: DataFormat, engine: Any = "threads") -> Iterator[int]:
    stream = Stream(data, tail="keep", engine=engine, readers=WORKERS)
    stream.setup(shard_info())
    try:
        for epoch in count():
            yield from (batch.global_num_samples for batch in stream.epoch(epoch))
    finally:
        stream.close()


def _write_for_others(folder: Path, packed: dict[str, Packed]) -> None:
    """Write the packed rows of each source as Parquet, and for each other loader that is installed."""
    for source, data in packed.items():
        opened = data.open()
        pieces = [opened.fragment(index).read() for index in range(len(opened.fragment_rows))]
        whole: Rows = {name: np.concatenate([each[name] for each in pieces]) for name in COLUMNS}
        pq.write_table(to_table(whole), folder / f"{source}-packed.parquet", row_group_size=1024)
        count_ = len(whole["tokens"])
        if _installed("grain"):
            for name, column in whole.items():
                np.save(folder / f"{source}.{name}.npy", column)
        if _installed("streaming"):
            from streaming import MDSWriter

            kinds = {name: f"ndarray:{'uint8' if name == 'mask' else 'int32'}:{TOKENS}" for name in COLUMNS}
            with MDSWriter(out=str(folder / f"{source}-mds"), columns=kinds) as writer:
                for row in range(count_):
                    writer.write(
                        {**{name: whole[name][row] for name in COLUMNS}, "mask": whole["mask"][row].view("u1")}
                    )
        if _installed("litdata"):
            from litdata.streaming.cache import Cache

            cache = Cache(str(folder / f"{source}-litdata"), chunk_bytes="64MB")
            for row in range(count_):
                cache[row] = {name: whole[name][row] for name in COLUMNS}
            cache.done()
            cache.merge()


def _ray_mix(folder: Path) -> Iterator[int]:
    """As documented: shuffled files, a mixing operator, and a local shuffle of the batches."""
    import ray.data

    first, *others = (ray.data.read_parquet(str(folder / f"{source}-packed.parquet")) for source in SHARES)
    mixed = first.mix(*others, weights=list(SHARES.values()))
    while True:
        for batch in mixed.iter_torch_batches(
            batch_size=BATCH, local_shuffle_buffer_size=16 * BATCH, prefetch_batches=4
        ):
            yield len(batch["tokens"])


class _Arrays:
    """Random access to packed rows in memory-mapped files, as Grain's sources have it."""

    def __init__(self, folder: Path, source: str) -> None:
        self._columns = {name: np.load(folder / f"{source}.{name}.npy", mmap_mode="r") for name in COLUMNS}

    def __len__(self) -> int:
        return len(self._columns["tokens"])

    def __getitem__(self, index: int) -> Rows:
        return {name: column[index] for name, column in self._columns.items()}


def _grain(folder: Path) -> Iterator[int]:
    """Batches are made in the worker processes: the fastest of the documented orders here."""
    import grain

    sources = [grain.MapDataset.source(_Arrays(folder, source)).seed(0).shuffle().repeat() for source in SHARES]
    mixed = grain.MapDataset.mix(sources, list(SHARES.values())).batch(BATCH)
    batches = iter(
        mixed.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)).mp_prefetch(
            grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=4)
        )
    )
    try:
        for batch in batches:
            yield len(batch["tokens"])
    finally:
        batches.close()


def _mosaic(folder: Path) -> Iterator[int]:
    from streaming import Stream as Part, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    parts = [Part(local=str(folder / f"{source}-mds"), proportion=share) for source, share in SHARES.items()]
    data = StreamingDataset(streams=parts, shuffle=True, batch_size=BATCH)
    while True:
        for batch in DataLoader(data, batch_size=BATCH, num_workers=WORKERS):
            yield len(batch["tokens"])


def _litdata(folder: Path) -> Iterator[int]:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    parts = [StreamingDataset(str(folder / f"{source}-litdata"), shuffle=True) for source in SHARES]
    mixed = CombinedStreamingDataset(parts, weights=list(SHARES.values()), iterate_over_all=False)
    while True:
        for batch in StreamingDataLoader(mixed, batch_size=BATCH, num_workers=WORKERS):
            yield len(batch["tokens"])


def lengths(folder: Path) -> list[Row]:
    """Measure documents/s and the padding of a `TokenBudget`, and of a DataLoader whose batch sampler sorts by length.

    Both give the same columns. The DataLoader reads documents that are already tokenized, from a memory-mapped file.
    """
    generator = np.random.default_rng(0)
    sizes = np.clip(generator.lognormal(5.5, 1.0, DOCUMENTS), 8, 4096).astype(np.int64)
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes.tolist()))
    np.full(sizes.sum(), ord("x"), np.int32).tofile(folder / "documents.bin")
    data = TokenBudget(JsonLines(folder / "documents.jsonl"), BUDGET, index=folder, tokenizer=ByteTokenizer())
    source = data.open()
    batches = _SortedBatches(sizes)
    padded = sum(len(batch) * int(sizes[batch].max()) for batch in batches)
    ours, theirs = source.padding / (source.tokens + source.padding), 1 - int(sizes.sum()) / padded
    readers = {
        "ours": Reader(lambda: _budget_batches(data), DOCUMENTS // 2, DOCUMENTS),
        "theirs": Reader(lambda: _sorted_batches(folder, sizes), DOCUMENTS // 2, DOCUMENTS),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(PAIRS):
        for name, reader in readers.items():
            rates[name].append(reader.rate())
    other = "a DataLoader that sorts by length"
    return [
        rate_row(f"documents/s: batches by length against {other}", rates["ours"], rates["theirs"], 1.0),
        Row(
            f"stream, padding of batches by length against {other}",
            *(f"{100 * each:.2f} %" for each in (ours, theirs)),
            ours / theirs,
            "<= 1.5",
            ours <= 1.5 * theirs,
        ),
    ]


def _budget_batches(data: TokenBudget) -> Iterator[int]:
    stream = Stream(data, tail="keep", engine="threads", readers=WORKERS)
    shard = shard_info()
    shard.global_batch_size, shard.micro_batch_size = 8, 1
    stream.setup(shard)
    try:
        for epoch in count():
            for batch in stream.epoch(epoch):
                yield sum(len(each["tokens"]) for each in batch.micro_batches)
    finally:
        stream.close()


class _SortedBatches(Sampler[list[int]]):
    """Shuffles documents, sorts those of 50 batches by length, and cuts them into batches, which it shuffles."""

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self._sizes, self._generator = sizes, np.random.default_rng(0)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._generator.permutation(len(self._sizes))
        together = int(SORTED_BATCHES * BUDGET / self._sizes.mean())
        for first in range(0, len(order), together):
            some = order[first : first + together]
            some = some[np.argsort(-self._sizes[some])]
            batches, at = [], 0
            while at < len(some):
                taken = BUDGET // int(self._sizes[some[at]])
                batches.append(some[at : at + taken].tolist())
                at += taken
            for index in self._generator.permutation(len(batches)):
                yield batches[index]


class _Documents(Dataset[Any]):
    def __init__(self, folder: Path, sizes: npt.NDArray[np.int64]) -> None:
        self._tokens = np.memmap(folder / "documents.bin", np.int32, mode="r")
        self._ends = np.cumsum(sizes)
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> torch.Tensor:
        end = self._ends[index]
        return torch.from_numpy(self._tokens[end - self._sizes[index] : end].copy())


def _pad(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    sizes = torch.tensor([len(each) for each in documents], dtype=torch.int32)
    tokens = pad_sequence(documents, batch_first=True)
    positions = torch.arange(tokens.shape[1], dtype=torch.int32)
    mask = positions < sizes[:, None]
    labels = tokens.long().masked_fill_(~mask, -100)
    ids = mask.int() - 1
    return {
        "tokens": tokens, "mask": mask, "labels": labels, "positions": positions * mask, "document_ids": ids,
        "lengths": sizes,
    }  # fmt: skip


def _sorted_batches(folder: Path, sizes: npt.NDArray[np.int64]) -> Iterator[int]:
    loader = DataLoader(
        _Documents(folder, sizes), batch_sampler=_SortedBatches(sizes), collate_fn=_pad, num_workers=WORKERS,
        prefetch_factor=4, persistent_workers=True,
    )  # fmt: skip
    while True:
        for batch in loader:
            yield len(batch["tokens"])


def columns(folder: Path) -> list[Row]:
    """Measure 200,000 rows of 512 tokens and 60,000 images of 3,072 bytes, on threads and on Ray."""
    made = []
    for name, total, size, dtype in (("tokens", 200_000, TOKENS, np.int32), ("images", 60_000, 3072, np.uint8)):
        paths = []
        for index in range(2):
            values = np.random.default_rng(index).integers(0, 256, total // 2 * size, dtype=dtype)
            column = pa.FixedSizeListArray.from_arrays(pa.array(values), size)
            paths.append(str(folder / f"{name}-{index}.parquet"))
            pq.write_table(pa.table({name: column}), paths[-1], row_group_size=1024)
        rates: dict[str, list[float]] = {each: [] for each in ("threads", "loader", "Ray", "first epoch")}
        first_batch = []
        for _ in range(PAIRS):
            rates["threads"].append(Reader(partial(_stream_batches, Parquet(paths)), total, total).rate())
            rates["loader"].append(Reader(partial(_loader_batches, paths, name), total, total).rate())
            start = time.perf_counter()
            batches = _stream_batches(Parquet(paths), engine="ray")
            seen = next(batches)
            first_batch.append(time.perf_counter() - start)
            rates["first epoch"].append((seen + _read(batches, total - seen)) / (time.perf_counter() - start))
            start = time.perf_counter()
            rates["Ray"].append(_read(batches, total) / (time.perf_counter() - start))
            batches.close()  # type: ignore[attr-defined]
        title = f"rows/s: {total // 1000}k {name}"
        made += [
            rate_row(f"{title}, threads against a DataLoader worker", rates["threads"], rates["loader"], 1.0),
            rate_row(f"{title}, Ray against a DataLoader worker", rates["Ray"], rates["loader"], 1.0),
        ]
        if name == "tokens":
            # The slowest, which is the first on a new Ray: so were the figures before.
            slowest, before = min(rates["first epoch"]), float(RAY_BEFORE.first_epoch)
            made.append(rate_row(f"{title}, first epoch on Ray against before", [slowest], [before], 2.0))
            ratio = max(first_batch) / RAY_BEFORE.first_batch
            both = (f"{each:.2f} s" for each in (max(first_batch), RAY_BEFORE.first_batch))
            made.append(
                Row("stream, first batch of tokens on Ray against before", *both, ratio, "<= 0.5", ratio <= 0.5)
            )
    return made


def _loader_batches(paths: list[str], column: str) -> Iterator[int]:
    loader = DataLoader(
        RowGroups(paths, column), batch_size=None, num_workers=1, prefetch_factor=4, persistent_workers=True
    )
    while True:
        for batch in loader:
            yield len(batch[column])


def jpeg(folder: Path) -> list[Row]:
    """Measure how long a training step of 50 ms waits for 32 JPEG images, which are decoded and cropped.

    The step only sleeps, as a step on a GPU leaves the cores free. Images of 256 x 256 pixels, 20 KB each.
    """
    from PIL import Image

    generator = np.random.default_rng(0)
    for index in range(1000):
        coarse = Image.fromarray(generator.integers(0, 256, (48, 48, 3), dtype=np.uint8))
        path = folder / f"class-{index % 10}" / f"{index}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
    data = Images(folder)
    readers: dict[str, Callable[[], Iterator[Any]]] = {
        "threads": lambda: _jpeg_stream(data, "threads"),
        "Ray": lambda: _jpeg_stream(data, "ray"),
        "loader": lambda: _jpeg_loader(folder),
    }
    waits: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(3):
        for name, read in readers.items():
            batches = read()
            for _ in islice(batches, 20):
                time.sleep(STEP_SECONDS)
            waited = 0.0
            for _ in range(JPEG_STEPS):
                start = time.perf_counter()
                next(batches)
                waited += time.perf_counter() - start
                time.sleep(STEP_SECONDS)
            waits[name].append(waited / JPEG_STEPS)
            batches.close()  # type: ignore[attr-defined]
    loader = statistics.median(waits["loader"])
    made = []
    for name in ("threads", "Ray"):
        own = statistics.median(waits[name])
        title = f"stream, wait per 50 ms step for 32 JPEGs: 2 readers on {name}, and 2 DataLoader workers"
        ratio = own / STEP_SECONDS
        made.append(
            Row(title, f"{own * 1e3:.1f} ms", f"{loader * 1e3:.1f} ms", ratio, "<= 0.05 of 50 ms", ratio <= 0.05)
        )
    return made


def _crop(rows: Rows) -> Rows:
    return {**rows, "image": rows["image"][:, 16:240, 16:240]}


def _jpeg_stream(data: Images, engine: Any) -> Iterator[Any]:
    stream = Stream(data, transforms=[_crop], engine=engine, readers=WORKERS)
    shard = shard_info()
    shard.global_batch_size = JPEG_BATCH
    stream.setup(shard)
    try:
        for epoch in count():
            yield from stream.epoch(epoch)
    finally:
        stream.close()


class _Decoded(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self._paths[index]) as image:
            return torch.from_numpy(np.asarray(image.convert("RGB"))[16:240, 16:240].copy())


def _jpeg_loader(folder: Path) -> Iterator[Any]:
    loader = DataLoader(
        _Decoded(folder), batch_size=JPEG_BATCH, shuffle=True, drop_last=True, num_workers=WORKERS,
        persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader
