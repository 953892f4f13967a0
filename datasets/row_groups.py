"""Reads what a plan asks for from row groups. Runs also in Ray's processes, so it is light: no torch, no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .arrow import Rows, from_table, join, to_rows, to_table
from .errors import DataError
from .plan import row_order
from .transforms import Transform, apply, name_of


class ReadJob(NamedTuple):
    """One row group to be read, and the rows wanted of it. Says all that another process must know.

    Attributes:
        path, digest: which file, and what it was when the plan was made.
        group, num_rows: which row group, and how many rows it had.
        columns: what to read.
        order: (seed, epoch, fragment) that its rows are permuted by; None reads them in the order of the file.
        ranges: (start, stop) in that order, one after the other.
    """

    path: str
    digest: str
    group: int
    num_rows: int
    columns: tuple[str, ...]
    order: tuple[int, int, int] | None
    ranges: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """How many rows are wanted."""
        return sum(stop - start for start, stop in self.ranges)


def read(job: ReadJob, transforms: Sequence[Transform] = ()) -> Rows:
    """Returns the rows that a job asks for, transformed.

    Raises:
        DataError: the file is gone or is not what it was, or a transform returned what it may not.
    """
    table = read_group(job)
    try:
        rows = to_rows(table)
    except DataError as error:
        raise DataError(f"row group {job.group} of {job.path}: {error}") from error
    if job.order is None and len(job.ranges) == 1:
        start, stop = job.ranges[0]
        rows = {name: column[start:stop] for name, column in rows.items()}
    else:
        seed, epoch, fragment = job.order or (0, 0, 0)
        order = row_order(job.num_rows, seed=seed, epoch=epoch, fragment=fragment, shuffle=job.order is not None)
        wanted = np.concatenate([order[start:stop] for start, stop in job.ranges])
        rows = {name: column[wanted] for name, column in rows.items()}
    return transform(rows, transforms)


def read_group(job: ReadJob) -> pa.Table:
    """Returns the whole row group of a job, in the order of the file.

    Raises:
        DataError: the file is gone, or is not what it was.
    """
    try:
        table = _read_group(job)
    except (OSError, pa.ArrowException, IndexError) as error:
        raise DataError(f"cannot read row group {job.group} of {job.path}: {type(error).__name__}: {error}") from error
    if table.num_rows != job.num_rows:
        raise DataError(
            f"row group {job.group} of {job.path} had {job.num_rows} rows when the run began and has {table.num_rows}; "
            "the data was rewritten. Start a new run for new data"
        )
    return table


def transform(rows: Rows, transforms: Sequence[Transform]) -> Rows:
    """Applies the transforms in their order."""
    for each in transforms:
        # Through Arrow, as between processes, so that a column looks the same to whoever reads it, wherever that is.
        changed = apply(each, rows)
        try:
            rows = from_table(to_table(changed))
        except DataError as error:
            raise DataError(f"what the transform {name_of(each)} returned: {error}") from error
    return rows


def read_table(jobs: Sequence[ReadJob]) -> pa.Table:
    """Returns the rows of several jobs as one table."""
    return as_table(read(job) for job in jobs)


def as_table(pieces: Iterable[Rows]) -> pa.Table:
    """Returns rows as one table, each piece in a chunk of its own."""
    return join(list(pieces))


def chunks(table: pa.Table) -> Iterator[Rows]:
    """Yields a table's rows, cut where copying can be avoided."""
    for batch in table.to_batches():
        yield from_table(pa.Table.from_batches([batch]))


def _read_group(job: ReadJob) -> pa.Table:
    metadata = _metadata(job.path, job.digest)
    # One thread: parallelism is across jobs. A local file is mapped, so what is not needed is not even read.
    if "://" not in job.path:
        with pq.ParquetFile(job.path, metadata=metadata, memory_map=True) as file:
            return _ordered(file, job)
    with fsspec.open(job.path, "rb") as raw, pq.ParquetFile(raw, metadata=metadata, pre_buffer=True) as file:
        return _ordered(file, job)


def _ordered(file: Any, job: ReadJob) -> pa.Table:
    return file.read_row_group(job.group, columns=list(job.columns), use_threads=False).select(list(job.columns))


@lru_cache(maxsize=256)
def _metadata(path: str, digest: str) -> pq.FileMetaData:
    """A file's footer, parsed once in each process: it describes all row groups, and one is read at a time."""
    with fsspec.open(path, "rb") as file:
        return pq.read_metadata(file)
