"""Reads rows of fragments. Also runs in Ray Data's worker processes, so it imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .arrow import Rows, concat, from_table, to_rows, to_table
from .cache import Cached, open_data
from .errors import DataError
from .formats.base import Fragment, take
from .plan import row_order
from .transforms import Transform, apply, name_of


class RowGroup(NamedTuple):
    """A row group of a Parquet file. Self-contained, so it can be sent to another process.

    Attributes:
        path, digest: the file, and its digest when the plan was made.
        group, num_rows: the row group, and its number of rows when the plan was made.
        columns: columns to read.
        cached: how the file is read through a cache; None without one.
    """

    path: str
    digest: str
    group: int
    num_rows: int
    columns: tuple[str, ...]
    cached: Cached | None = None

    def read(self) -> Rows:
        """Return all rows, in the order of the file.

        Raises:
            DataError: the file is missing or has changed, or a numeric column has nulls.
        """
        table = read_group(self)
        try:
            return to_rows(table)
        except DataError as error:
            raise DataError(f"row group {self.group} of {self.path}: {error}") from error


class ReadJob(NamedTuple):
    """A fragment and the rows to read of it. Self-contained, so it can be sent to another process.

    Attributes:
        fragment: the fragment.
        order: (seed, epoch, fragment) of the permutation of its rows; None keeps the order of the file.
        ranges: (start, stop) ranges in that order.
    """

    fragment: Fragment
    order: tuple[int, int, int] | None
    ranges: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Number of rows that the job returns."""
        return sum(stop - start for start, stop in self.ranges)


def read(job: ReadJob, transforms: Sequence[Transform] = ()) -> Rows:
    """Return the rows of a job, transformed.

    Raises:
        DataError: the data is missing or has changed, or a transform returned something invalid.
    """
    in_order = job.order is None and len(job.ranges) == 1
    wanted = slice(*job.ranges[0]) if in_order else _row_numbers(job)
    return transform(take(job.fragment, wanted).read(), transforms, job)


def read_group(group: RowGroup) -> pa.Table:
    """Return a whole row group, in the order of the file.

    Raises:
        DataError: the file is missing or has changed.
    """
    try:
        table = _read_group(group)
    except (OSError, pa.ArrowException, IndexError) as error:
        raise DataError(
            f"cannot read row group {group.group} of {group.path}: {type(error).__name__}: {error}"
        ) from error
    if table.num_rows != group.num_rows:
        raise DataError(
            f"row group {group.group} of {group.path} had {group.num_rows} rows when the run started and has "
            f"{table.num_rows} now; the data was rewritten. Start a new run for new data"
        )
    return table


def transform(rows: Rows, transforms: Sequence[Transform], job: ReadJob | None = None) -> Rows:
    """Apply the transforms in order to the rows of a job, if it is known; an error names the row that causes it."""
    for each in transforms:
        try:
            rows = _transform(rows, each)
        except Exception as error:
            error.add_note(_place(rows, each, job))
            raise
    return rows


def _transform(rows: Rows, each: Transform) -> Rows:
    # Through Arrow, as between processes, so that both engines give a column the same form.
    changed = apply(each, rows)
    try:
        return from_table(to_table(changed))
    except DataError as error:
        raise DataError(f"the transform {name_of(each)} returned invalid rows: {error}") from error


def _place(rows: Rows, each: Transform, job: ReadJob | None) -> str:
    """Say which row makes a transform fail, by transforming them one by one: each row's result depends on it only."""
    num_rows = len(next(iter(rows.values())))
    what = f"{num_rows} rows"
    for i in range(num_rows):
        try:
            _transform({name: column[i : i + 1] for name, column in rows.items()}, each)
        except Exception:
            what = f"row {_row_numbers(job)[i] if job is not None else i}"
            break
    where = f" of {_origin(job.fragment)}" if job is not None else f" of {num_rows} that were read together"
    return f"raised by the transform {name_of(each)} for {what}{where}"


def _origin(fragment: Fragment) -> str:
    # A mixture wraps the fragments of its sources.
    inner: Any = getattr(fragment, "fragment", fragment)
    return f"row group {inner.group} of {inner.path}" if isinstance(inner, RowGroup) else f"{inner!r:.200}"


def _row_numbers(job: ReadJob) -> npt.NDArray[np.int64]:
    """Return the numbers of a job's rows in its fragment, in the order of the job."""
    seed, epoch, fragment = job.order or (0, 0, 0)
    order = row_order(job.fragment.num_rows, seed=seed, epoch=epoch, fragment=fragment, shuffle=job.order is not None)
    return np.concatenate([order[start:stop] for start, stop in job.ranges])


def read_table(jobs: Sequence[ReadJob]) -> pa.Table:
    """Return the rows of several jobs as one table with one chunk per job."""
    return concat([read(job) for job in jobs]) if jobs else pa.table({})


def chunks(table: pa.Table) -> Iterator[Rows]:
    """Yield a table's rows, one piece per record batch, so that nothing is copied."""
    for batch in table.to_batches():
        yield from_table(pa.Table.from_batches([batch]))


def _read_group(group: RowGroup) -> pa.Table:
    metadata = _metadata(group.path, group.digest, group.cached)
    # One thread: jobs run in parallel. A local file is memory-mapped, so only the needed pages are read.
    if "://" not in group.path and group.cached is None:
        with pq.ParquetFile(group.path, metadata=metadata, memory_map=True) as file:
            return _ordered(file, group)
    with open_data(group.path, group.cached) as raw, pq.ParquetFile(raw, metadata=metadata, pre_buffer=True) as file:
        return _ordered(file, group)


def _ordered(file: Any, group: RowGroup) -> pa.Table:
    return file.read_row_group(group.group, columns=list(group.columns), use_threads=False).select(list(group.columns))


@lru_cache(maxsize=256)
def _metadata(path: str, digest: str, cached: Cached | None) -> pq.FileMetaData:
    """Return a file's footer. Cached: it describes all row groups, and each job reads only one."""
    with open_data(path, cached) as file:
        return pq.read_metadata(file)
