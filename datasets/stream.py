"""A stream of batches from Parquet files: the plan says which rows, an engine reads them, this cuts them into batches.

It keeps the trainer's `BatchStream` contract by shape and knows nothing else of the trainer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from .batching import GlobalBatch
from .engines import connected_to_ray
from .errors import DataError
from .paths import Paths, absolute
from .plan import Tail, check_shards, default_shards
from .prefetch import Prefetcher, StreamContext, StreamSpec
from .sources import Source, read_source
from .transforms import Transform

logger = logging.getLogger("headway.datasets")

Engine = Literal["auto", "ray", "threads"]


class ParquetStream:
    """Streams Parquet rows to one rank, exactly and in an order that any number of ranks agrees on.

    Making one touches nothing, so it can be made anywhere and pickled; `setup` reads the files' footers.

    Args:
        path: a file, a folder (searched to its bottom), a glob, an fsspec URI of one of these, or a list of them.
        columns: columns to read; None for all.
        transforms: row-wise functions over {column: array}, applied in their order; see `headway.datasets.transforms`.
        shuffle: whether the training order is permuted, anew in every epoch. Evaluation never shuffles.
        tail: what becomes of rows that do not fill the last global batch of a training epoch: "drop" leaves them out,
            another few in every epoch; "keep" makes the last batch smaller. Evaluation always keeps.
        shards: logical shards: the most ranks that can ever share the data, and from how many places of it each batch
            is drawn. A divisor of the global batch size; None takes the one nearest to 32. Fixed for a run.
        readers: reading tasks of this rank that run at a time.
        engine: "ray" reads by Ray Data, "threads" in this process; "auto" takes Ray Data where Ray is connected.

    Example:
        >>> from headway.datasets.stream import ParquetStream
        >>> class Streamed(Digits):
        ...     def configure_dataloaders(self):
        ...         return ParquetStream("data/train", columns=["tokens"]), ParquetStream("data/held-out")
    """

    guarantee: Literal["exact"] = "exact"

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
        engine: Engine = "auto",
    ) -> None:
        if tail not in ("drop", "keep"):
            raise DataError(f"tail is 'drop' or 'keep', not {tail!r}")
        if engine not in ("auto", "ray", "threads"):
            raise DataError(f"engine is 'auto', 'ray' or 'threads', not {engine!r}")
        if readers < 1:
            raise DataError(f"readers is a whole number from 1, not {readers}")
        self.path = absolute(path)
        self.columns = None if columns is None else tuple(columns) if not isinstance(columns, str) else (columns,)
        self.transforms = tuple(transforms)
        self.shuffle, self.tail, self.shards, self.readers, self.engine = shuffle, tail, shards, readers, engine
        self._opened: StreamSpec | None = None
        self._prefetcher: Prefetcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, here or in another process, is not open.
        return {**vars(self), "_opened": None, "_prefetcher": None}

    @property
    def fingerprint(self) -> str:
        """Changes when the data changes, or the order in which a position counts it."""
        opened = self._open
        order = "" if opened.shuffle else " unshuffled"
        return f"{opened.source.fingerprint} in {opened.shards} shards{order}"

    def explain_change(self, before: str) -> str | None:
        """Says what of the order has changed since this was the fingerprint, and what to do; None if the files have."""
        opened, size = self._open, self._open.global_batch_size
        said = re.fullmatch(r"(\S+) in (\d+) shards( unshuffled)?", before)
        if said is None or said[1] != opened.source.fingerprint or before == self.fingerprint:
            return None
        shards, shuffle = int(said[2]), said[3] is None
        if shuffle != opened.shuffle:
            return f"the files are the same, and shuffle was {shuffle}: give the ParquetStream shuffle={shuffle}"
        multiple = f" and the run a global_batch_size (now {size}) that is a multiple of it" if size % shards else ""
        return (
            f"the files are the same, and were cut into {shards} logical shards and are into {opened.shards}, a number "
            f"that follows global_batch_size unless it is given: give the ParquetStream shards={shards}{multiple}"
        )

    @property
    def source(self) -> Source:
        """The files and row groups."""
        return self._open.source

    def setup(self, context: StreamContext) -> None:
        """Reads the files' footers and checks that the run can be fed from them.

        Raises:
            DataError: the data is not there, is not what was asked for, or does not make one global batch.
        """
        self.close()
        source = read_source(self.path, columns=self.columns)
        size = context.global_batch_size
        if size is None and not context.training and context.micro_batch_size:
            size = context.micro_batch_size * context.world_size
        if size is None:
            raise DataError(
                "a stream of rows is cut into global batches: set config.global_batch_size, the samples of one update "
                "over all ranks"
            )
        shards = self.shards or default_shards(size)
        check_shards(shards, global_batch_size=size, world_size=context.world_size)
        opened = StreamSpec(
            context=context,
            source=source,
            global_batch_size=size,
            shards=shards,
            shuffle=self.shuffle and context.training,
            tail=self.tail if context.training else "keep",
            transforms=self.transforms,
            readers=self.readers,
            engine=self._choose_engine(),
        )
        if opened.plan(0).steps(size) == 0:
            raise DataError(
                f"{', '.join(self.path)} has {source.rows} rows, less than one global batch of {size}, and tail='drop' "
                "drops it: nothing would be trained on. Use a smaller global_batch_size, or tail='keep'"
            )
        self._opened = opened
        if context.rank == 0 and (dropped := source.rows - opened.plan(0).samples(size)):
            logger.info(
                "%d rows make %d batches of %d; %d are left out, others each epoch",
                source.rows,
                source.rows // size,
                size,
                dropped,
            )

    @property
    def num_shards(self) -> int:
        """Logical shards: where a batch is cut for a run whose result is to be the same at every number of ranks."""
        return self._open.shards

    def samples_in_epoch(self, epoch: int) -> int:
        """Samples of one epoch over all ranks, after what the tail policy drops."""
        return self._open.plan(epoch).samples(self._open.global_batch_size)

    def dropped_in_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """Rows of one epoch that the tail policy leaves out, where its batches are cut from `offset` on."""
        opened = self._open
        return opened.source.rows - opened.plan(epoch).samples(opened.global_batch_size, offset=offset)

    def steps_in_epoch(self, epoch: int) -> int:
        """Global batches of one epoch."""
        return self._open.plan(epoch).steps(self._open.global_batch_size)

    @property
    def samples_per_step(self) -> int:
        """Rows of one update over all ranks."""
        return self._open.global_batch_size

    def next_rows(self, epoch: int, *, offset: int, count: int) -> list[str]:
        """Returns the rows that come next over all ranks, one of each logical shard in turn, by file, group and row."""
        opened = self._open
        plan = opened.plan(epoch)
        left = plan.samples(opened.global_batch_size, offset=offset) - offset
        return opened.row_names(plan.locate(offset, min(count, left)))

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yields this rank's part of every global batch of an epoch, from `offset` on; equally many on every rank.

        When a training epoch ends, the next one is already being read. An iterator closed in the middle ends its reads.

        Args:
            epoch: which order.
            offset: samples of this epoch that all ranks together have consumed.
        """
        opened = self._open
        if not 0 <= offset <= opened.source.rows:
            raise DataError(f"offset {offset} is not a place in an epoch of {opened.source.rows} rows")
        if self._prefetcher is None or self._prefetcher.next_place != (epoch, offset):
            self.close()
            self._prefetcher = Prefetcher(opened, epoch, offset)
        prefetcher = self._prefetcher
        try:
            yield from prefetcher.epoch()
        finally:
            if prefetcher.next_place != (epoch + 1, 0) or not opened.context.training:
                prefetcher.close()
                if self._prefetcher is prefetcher:
                    self._prefetcher = None

    def close(self) -> None:
        """Ends all reading. May be called twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _choose_engine(self) -> Literal["ray", "threads"]:
        if self.engine == "ray" and not connected_to_ray():
            raise DataError(
                "engine='ray' reads by Ray Data, and Ray is not up in this process: call ray.init(), or use 'auto'"
            )
        return "ray" if self.engine == "ray" or (self.engine == "auto" and connected_to_ray()) else "threads"

    @property
    def _open(self) -> StreamSpec:
        assert self._opened is not None, "open(context) comes before anything else"
        return self._opened
