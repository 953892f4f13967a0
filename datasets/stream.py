"""`Stream`: batches that can resume at any row of an epoch on any number of ranks.

`plan` computes which rows come next, an engine reads them, and `batching` makes batches of them. The class implements
the trainer's `BatchStream` protocol structurally; nothing here imports the trainer.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from .batching.memory_limits import explain_large_fragments
from .batching.micro_batches import GlobalBatch
from .cache import Cache
from .engines import connected_to_ray
from .errors import DataError
from .formats.base import DataFormat, RowSource, check_format
from .formats.images import Images
from .formats.token_budget import rows_are_batches
from .mixture import MixedSource, Mixture, only_weights_differ
from .packing import compact
from .paths import Paths
from .plan import Tail, check_shards, default_shards
from .prefetch import Prefetcher, ShardInfo, StreamSpec
from .sources import Parquet
from .transforms import Transform

logger = logging.getLogger("headway.datasets")

Engine = Literal["auto", "ray", "threads"]


class Stream:
    """Stream rows to one rank, in an order that does not depend on the number of ranks.

    The constructor does no I/O, so a stream can be created anywhere and pickled. `setup` opens the data.

    Args:
        data: what to read, such as `JsonLines`, `Parquet`, or a mixture of them.
        transforms: row-wise functions over {column: array}, applied in order; see `headway.datasets.transforms`.
        shuffle: reshuffle the training data every epoch. Evaluation never shuffles.
        tail: rows that do not fill the last global batch of a training epoch: "drop" leaves them out (different rows
            every epoch); "keep" makes the last batch smaller. Evaluation always keeps them.
        shards: number of logical shards: the maximum number of ranks, and the number of places in the data that each
            batch mixes. Must divide the global batch size; None takes the divisor nearest to 32. Fixed for a run.
        readers: concurrent reading tasks of this rank.
        reader_cpus: CPUs that each reading task asks of the data nodes of a Ray cluster, which start for it. None: 1 if
            there are transforms, or images to decode, and otherwise 0. Where no data node is free, and on a single
            machine, tasks share the CPUs that there are.
        engine: "ray" reads with Ray Data, "threads" in this process; "auto" uses Ray Data if Ray is connected.

    Example:
        >>> from headway.datasets.formats.jsonl import JsonLines
        >>> from headway.datasets.stream import Stream
        >>> class Streamed(Digits):
        ...     def configure_dataloaders(self):
        ...         return Stream(JsonLines("data/train")), Stream(JsonLines("data/held-out.jsonl.gz"))
    """

    guarantee: Literal["exact"] = "exact"

    def __init__(
        self,
        data: DataFormat,
        *,
        transforms: Sequence[Transform] = (),
        shuffle: bool = True,
        tail: Tail = "drop",
        shards: int | None = None,
        readers: int = 2,
        reader_cpus: float | None = None,
        engine: Engine = "auto",
    ) -> None:
        if tail not in ("drop", "keep"):
            raise DataError(f"tail must be 'drop' or 'keep', got {tail!r}")
        if engine not in ("auto", "ray", "threads"):
            raise DataError(f"engine must be 'auto', 'ray' or 'threads', got {engine!r}")
        if readers < 1:
            raise DataError(f"readers must be an integer >= 1, got {readers}")
        if reader_cpus is not None and not (isinstance(reader_cpus, int | float) and 0 <= reader_cpus < math.inf):
            raise DataError(f"reader_cpus must be a number of CPUs >= 0, or None, got {reader_cpus!r}")
        check_format(data)
        self.data = data
        self.transforms = tuple(transforms)
        self.shuffle, self.tail, self.shards, self.readers, self.engine = shuffle, tail, shards, readers, engine
        self.reader_cpus = float(bool(self.transforms) or _decodes(data)) if reader_cpus is None else reader_cpus
        self._opened: StreamSpec | None = None
        self._prefetcher: Prefetcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy or an unpickled stream is not open.
        return {**vars(self), "_opened": None, "_prefetcher": None}

    @property
    def fingerprint(self) -> str:
        """Identifies the data and its order: changes when either does."""
        return _fingerprint(self._open)

    def explain_change(self, before: str) -> str | None:
        """Return how the order differs from an earlier fingerprint, and the fix; None if the files differ."""
        opened, size = self._open, self._open.global_batch_size
        parsed = re.fullmatch(r"(\S+) in (\d+) shards( unshuffled)?", before)
        now = opened.source.fingerprint
        # That of a mixture ends with its weights, in brackets.
        if parsed is None or parsed[1].partition("(")[0] != now.partition("(")[0] or before == self.fingerprint:
            return None
        shards, shuffle, name = int(parsed[2]), parsed[3] is None, type(self).__name__
        if shuffle != opened.shuffle:
            return f"the files are the same, but shuffle was {shuffle}: set shuffle={shuffle} on the {name}"
        if shards != opened.shards:
            multiple = f", and global_batch_size (now {size}) to a multiple of it" if size % shards else ""
            return (
                f"the files are the same, but had {shards} logical shards and now have {opened.shards} (the default "
                f"follows global_batch_size): set shards={shards} on the {name}{multiple}"
            )
        advice = "restore weights, weights_by_step, on_end, rows_per_epoch and global_batch_size"
        if only_weights_differ(parsed[1], now):
            advice = (
                "accept the change, so that the new weights hold from here on: fit(accept_changes=True), "
                "--accept-changes; or restore weights, weights_by_step and global_batch_size"
            )
        return (
            "the sources are the same, but their mixture (sample:weights;...;on_end;rows of an epoch) was "
            f"{parsed[1][16:]} and is {now[16:]}: {advice}"
        )

    @property
    def order(self) -> dict[str, Any] | None:
        """The weights of a mixture so far, for `continue_order`; None for other data, whose order cannot change."""
        source = self._open.source
        if not isinstance(source, MixedSource) or source.layout is None:
            return None
        return {"fingerprint": self.fingerprint, **source.order}

    def continue_order(
        self, order: Mapping[str, Any], *, step: int, epoch: int, offset: int, accept_changes: bool
    ) -> list[str]:
        """Take over the weights that a mixture has had up to a position, if nothing but weights has changed since.

        Args:
            order: `order` of the stream that read up to there.
            step: updates of the run up to there.
            epoch: the epoch in progress.
            offset: samples of it that all ranks together have consumed.
            accept_changes: let other weights hold from there on; if not, the fingerprint shows the difference.

        Returns:
            What changes there: a line, or none.
        """
        opened, source = self._open, self._open.source
        if not isinstance(source, MixedSource) or source.layout is None:
            return []
        restored, lines = source.restored(order), []
        if _fingerprint(replace(opened, source=restored)) != order["fingerprint"]:
            return []
        if not source.is_declared(order):
            if not accept_changes:
                return []
            size, tail = opened.global_batch_size, opened.tail
            restored = restored.changed(step=step, epoch=epoch, offset=offset, global_batch_size=size, tail=tail)
            lines = [restored.changes[-1]]
        self.close()
        self._opened = replace(opened, source=restored)
        return lines

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources of a mixture, by the index in its column `source`; empty for other data."""
        return tuple(self.data.sources) if isinstance(self.data, Mixture) else ()

    @property
    def source(self) -> RowSource:
        """The opened dataset."""
        return self._open.source

    def setup(self, shard: ShardInfo) -> None:
        """Open the data and check that it fits the run.

        Raises:
            DataError: the data is missing, has other columns, or is smaller than one global batch.
        """
        self.close()
        source = self.data.open()
        if rows_are_batches(source) and shard.micro_batch_size != 1:
            raise DataError(
                "a micro-batch is one padded batch of a TokenBudget: set config.micro_batch_size=1, and "
                f"global_batch_size to the padded batches of an update; micro_batch_size is {shard.micro_batch_size}"
            )
        size = shard.global_batch_size
        if size is None and not shard.training and shard.micro_batch_size:
            size = shard.micro_batch_size * shard.world_size
        if size is None:
            raise DataError(
                f"config.global_batch_size is not set: a {type(self).__name__} needs it (samples of one update over "
                "all ranks)"
            )
        shards = self.shards or default_shards(size)
        check_shards(shards, global_batch_size=size, world_size=shard.world_size)
        if not self.transforms:  # which get all columns
            source = compact(source)
        if isinstance(source, MixedSource) and shard.training:
            source = source.interleaved(shards, seed=shard.seed, global_batch_size=size, tail=self.tail)
        opened = StreamSpec(
            shard=shard,
            source=source,
            global_batch_size=size,
            shards=shards,
            shuffle=self.shuffle and shard.training,
            tail=self.tail if shard.training else "keep",
            transforms=self.transforms,
            readers=self.readers,
            reader_cpus=self.reader_cpus,
            engine=self._choose_engine(),
        )
        plan = opened.plan(0)
        if plan.steps(size) == 0:
            raise DataError(
                f"global_batch_size {size} exceeds the {plan.rows} rows of {self.data}, and tail='drop' "
                "would drop them all. Use a smaller global_batch_size, or tail='keep'"
            )
        self._opened = opened
        if shard.rank == 0 and source.skipped_rows:
            logger.warning("%d damaged rows of %s are skipped", source.skipped_rows, self.data)
        large = explain_large_fragments(opened.mixed, shards=shards, world_size=shard.world_size)
        if shard.rank == 0 and large is not None:
            logger.warning("%s", large)
        if shard.rank == 0 and (dropped := plan.rows - plan.samples(size)):
            logger.info(
                "%d rows make %d batches of %d; %d rows are dropped, different ones each epoch",
                plan.rows,
                plan.rows // size,
                size,
                dropped,
            )

    @property
    def num_shards(self) -> int:
        """Number of logical shards. Exact mode cuts batches at their boundaries, whatever the number of ranks."""
        return self._open.shards

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the number of samples of one epoch over all ranks, after the tail policy."""
        return self._open.plan(epoch).samples(self._open.global_batch_size)

    def dropped_in_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """Return the number of rows that the tail policy drops from an epoch resumed at `offset`."""
        plan = self._open.plan(epoch)
        return plan.rows - plan.samples(self._open.global_batch_size, offset=offset)

    def steps_in_epoch(self, epoch: int) -> int:
        """Return the number of global batches of one epoch."""
        return self._open.plan(epoch).steps(self._open.global_batch_size)

    @property
    def samples_per_step(self) -> int:
        """Samples of one update over all ranks."""
        return self._open.global_batch_size

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs may have different numbers of samples: a mixture that ends with its first source may."""
        source = self._open.source
        return isinstance(source, MixedSource) and source.mixture.on_end == "stop" and len(source.phases) > 1

    def next_rows(self, epoch: int, *, offset: int, count: int) -> list[str]:
        """Return the ids of the next rows over all ranks, in sample order."""
        opened = self._open
        plan = opened.plan(epoch)
        left = plan.samples(opened.global_batch_size, offset=offset) - offset
        return opened.row_names(plan.locate(offset, min(count, left)))

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yield this rank's part of every global batch of an epoch from `offset` on; the same number on every rank.

        At the end of a training epoch the next one is already being read. Closing the iterator early stops its reads.

        Args:
            epoch: number of the epoch, which seeds its order.
            offset: samples of this epoch that all ranks together have consumed.
        """
        opened = self._open
        if not 0 <= offset <= (rows := opened.plan(epoch).rows):
            raise DataError(f"offset must be from 0 to {rows}, the rows of an epoch, got {offset}")
        if self._prefetcher is None or self._prefetcher.next_position != (epoch, offset):
            self.close()
            self._prefetcher = Prefetcher(opened, epoch, offset)
        prefetcher = self._prefetcher
        try:
            yield from prefetcher.epoch()
        finally:
            if prefetcher.next_position != (epoch + 1, 0) or not opened.shard.training:
                prefetcher.close()
                if self._prefetcher is prefetcher:
                    self._prefetcher = None

    def close(self) -> None:
        """Stop all reading. May be called more than once."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _choose_engine(self) -> Literal["ray", "threads"]:
        if self.engine == "ray" and not connected_to_ray():
            raise DataError(
                "engine='ray' needs Ray, which is not initialized in this process: call ray.init(), or use 'auto'"
            )
        return "ray" if self.engine == "ray" or (self.engine == "auto" and connected_to_ray()) else "threads"

    @property
    def _open(self) -> StreamSpec:
        assert self._opened is not None, "setup(shard) must be called first"
        return self._opened


def _fingerprint(opened: StreamSpec) -> str:
    order = "" if opened.shuffle else " unshuffled"
    return f"{opened.source.fingerprint} in {opened.shards} shards{order}"


class ParquetStream(Stream):
    """A `Stream` of Parquet files.

    Args:
        path, columns, cache: see `headway.datasets.sources.Parquet`.
        transforms, shuffle, tail, shards, readers, reader_cpus, engine: see `Stream`.

    Example:
        >>> from headway.datasets.stream import ParquetStream
        >>> class Streamed(Digits):
        ...     def configure_dataloaders(self):
        ...         return ParquetStream("data/train", columns=["tokens"]), ParquetStream("data/held-out")
    """

    def __init__(
        self,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        transforms: Sequence[Transform] = (),
        shuffle: bool = True,
        tail: Tail = "drop",
        shards: int | None = None,
        readers: int = 2,
        reader_cpus: float | None = None,
        engine: Engine = "auto",
        cache: Cache | None = None,
    ) -> None:
        data = Parquet(path, (columns,) if isinstance(columns, str) else columns, cache)
        super().__init__(
            data, transforms=transforms, shuffle=shuffle, tail=tail, shards=shards, readers=readers,
            reader_cpus=reader_cpus, engine=engine,
        )  # fmt: skip


def _decodes(data: DataFormat) -> bool:
    """Return whether reading decodes images."""
    if isinstance(data, Mixture):
        return any(_decodes(each) for each, _ in data.sources.values())
    return isinstance(data, Images)
