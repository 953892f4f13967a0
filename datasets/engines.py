"""Runs reading jobs ahead of time, on Ray Data or on threads, and yields their rows in order.

Both engines yield the same rows in the same order, one epoch after the other without a pause. An engine is a
generator; closing it stops everything it started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from .arrow import Rows, concat
from .data_nodes import DataNodes
from .row_groups import ReadJob, chunks, read, read_table, transform
from .transforms import Transform

logger = logging.getLogger("headway.datasets")

# Ray Data's scheduling takes about 12 ms of this process's CPU per task, whatever its size (Ray 2.60), so row groups
# are combined up to this size.
_TASK_BYTES = 16 * 2**20
# Jobs that threads have not started, or whose rows wait, at most: each takes 2 KB beside its rows, which may be few.
_WAITING_JOBS = 1000
# Finished tasks whose rows may wait in Ray's object store, beside those being read. With one or two, Ray Data starts a
# task only when another's rows have been taken, and its readers idle half of the time (Ray 2.60).
_WAITING_TASKS = 4
# Tasks of one Ray Data execution for each of its readers. An execution ends only with all of its tasks, so closing a
# stream waits for them. With 8 or less, readers idle while one execution follows another (Ray 2.60).
_TASKS_PER_READER = 16
_ERROR = "headway: error"
# Key in the metadata of a table: the pickled jobs whose rows it has, to name the row of an error.
_JOBS = b"headway: jobs"
# Key of the warnings that were logged while they were read, as JSON.
_WARNINGS = b"headway: warnings"
# Set where worker processes of this environment are kept in reserve for training: reading must not use them up.
_SPARES = "HEADWAY_SPARES"


def connected_to_ray() -> bool:
    """Return whether Ray is initialized in this process, without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def read_with_threads(
    epochs: Iterable[Iterable[ReadJob]], *, transforms: Sequence[Transform], readers: int, ahead_rows: int
) -> Generator[Rows, None, None]:
    """Yield the rows of each job in order, read ahead by threads of this process."""
    pool = ThreadPoolExecutor(max_workers=readers, thread_name_prefix="headway-read")
    waiting: deque[tuple[Future[Rows], int]] = deque()
    todo = chain.from_iterable(epochs)
    rows = 0
    try:
        while True:
            while (len(waiting) <= readers or (rows < ahead_rows and len(waiting) < _WAITING_JOBS)) and (
                job := next(todo, None)
            ):
                waiting.append((pool.submit(read, job, transforms), job.rows))
                rows += job.rows
            if not waiting:
                return
            future, length = waiting.popleft()
            rows -= length
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_with_ray(
    epochs: Iterable[Iterable[ReadJob]],
    *,
    transforms: Sequence[Transform],
    readers: int,
    ahead_rows: int,
    row_bytes: int,
    cpus: float = 0,
    log_placement: bool = False,
) -> Generator[Rows, None, None]:
    """Yield the rows of each job in order, read ahead by tasks of Ray Data.

    Args:
        epochs: the jobs of each epoch.
        transforms: applied to the rows in this order.
        readers: tasks that run at a time.
        ahead_rows: rows to read ahead.
        row_bytes: approximate size of a row.
        cpus: CPUs of data nodes to reserve for each reader. If it is 0, reading is cheap, and threads of this process
            read the rows until the processes of Ray Data have started, which takes seconds.
        log_placement: log where the tasks run.
    """
    rows_per_task = max(1, _TASK_BYTES // row_bytes)
    tasks = _tasks(epochs, rows_per_task)
    ahead = 1 + ahead_rows // rows_per_task
    nodes = DataNodes(readers, cpus, log_placement=log_placement)
    starting: _Execution | None = None
    current: _Execution | None = None
    following: _Execution | None = None

    def start(previous: _Execution | None = None) -> _Execution | None:
        some = list(islice(tasks, _TASKS_PER_READER * readers))
        return _Execution(some, transforms, readers, nodes, previous) if some else None

    def until_started(starting: _Execution) -> Iterator[list[ReadJob]]:
        nonlocal current
        while starting.is_running and (task := next(tasks, None)):
            yield task
        current = start()

    try:
        if not cpus:
            starting = _Execution([[]] * readers, (), readers, nodes)
            starting.read_ahead(readers + 1)
            yield from read_with_threads(
                until_started(starting), transforms=transforms, readers=readers, ahead_rows=ahead_rows
            )
        while current or (current := start()):
            current.read_ahead(max(1, ahead - _WAITING_TASKS))
            for pieces in current:
                if following is None and current.left <= max(1, ahead - 1):
                    # The rest fits, with the end of the execution, so nothing keeps its tasks from ending.
                    current.read_ahead(max(2, ahead))
                    following = start(previous=current)
                yield from pieces
            current, following = following, None
    finally:
        running = [each for each in (starting, current, following) if each is not None]
        for each in running:
            each.stop()
        for each in running:
            each.join()
        nodes.release()


def _tasks(epochs: Iterable[Iterable[ReadJob]], rows_per_task: int) -> Iterator[list[ReadJob]]:
    task: list[ReadJob] = []
    rows = 0
    for jobs in epochs:
        for job in jobs:
            task.append(job)
            # Not `job.rows`: the whole fragment is decoded, even if a resumed epoch needs only a few of its rows.
            rows += job.fragment.num_rows
            if rows >= rows_per_task:
                yield task
                task, rows = [], 0
        # A task ends with its epoch. The epochs of a small dataset are endless and might never fill one.
        if task:
            yield task
            task, rows = [], 0


class _Execution:
    """One execution of Ray Data, drained by a thread so that it starts before its rows are needed.

    It starts when the tasks of the previous one have ended: beside them, Ray would start more processes, for seconds.
    """

    def __init__(
        self,
        tasks: list[list[ReadJob]],
        transforms: Sequence[Transform],
        readers: int,
        nodes: DataNodes,
        previous: _Execution | None = None,
    ) -> None:
        self.left = len(tasks)
        self._previous = previous
        self._blocks: queue.Queue[list[Rows] | BaseException | None] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._dataset = _dataset(tasks, transforms, readers, nodes)
        self._thread = threading.Thread(target=self._drain, name="headway-ray-data", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether a task may be running, or its rows wait for room."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until all tasks have ended and their rows have room, or the execution is stopped."""
        self._thread.join()

    def read_ahead(self, blocks: int) -> None:
        """Raise the number of blocks that may wait. It is one until it is this execution's turn."""
        with self._blocks.not_full:
            self._blocks.maxsize = blocks
            self._blocks.not_full.notify()

    def __iter__(self) -> Iterator[list[Rows]]:
        while (block := self._blocks.get()) is not None:
            if isinstance(block, BaseException):
                raise block
            self.left -= 1
            yield block

    def stop(self) -> None:
        """Discard all that follows; an execution that has not started never does."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until a stopped execution has ended."""
        while self._thread.is_alive():
            while not self._blocks.empty():
                self._blocks.get()
            self._thread.join(timeout=0.05)

    def _drain(self) -> None:
        end: BaseException | None = None
        if self._previous is not None:
            self._previous.wait()
            self._previous = None
            if self._stopped.is_set():
                return
        try:
            # Not `iter_batches`: abandoned midway, it kills the processes of its tasks, and the next stream spends
            # seconds starting them again. Blocks come out as they were made: in task order, never split or merged.
            # Always to the end: abandoning an execution cancels its tasks, and a task that ends while it is being
            # cancelled may abort this whole process: https://github.com/ray-project/ray/issues/54846.
            for bundle in self._dataset.iter_internal_ref_bundles():
                if end is None and not self._stopped.is_set():
                    try:
                        self._take(bundle.block_refs)
                    except BaseException as error:
                        end = error
                del bundle
        except BaseException as error:
            end = end or error
        self._put(end)

    def _take(self, block_refs: Iterable[Any]) -> None:
        import ray

        for table in ray.get(list(block_refs)):
            if _ERROR in table.column_names:
                raise pickle.loads(table.column(_ERROR)[0].as_py())
            for line in json.loads((table.schema.metadata or {}).get(_WARNINGS, b"[]")):
                logger.warning("%s (in a reading task)", line)
            if not self._wait_for_room():
                return
            # Copied, so that the shared block is returned to Ray now and not with the last of its rows.
            self._put([{name: column.copy() for name, column in rows.items()} for rows in chunks(table)])

    def _wait_for_room(self) -> bool:
        with self._blocks.not_full:
            while len(self._blocks.queue) >= self._blocks.maxsize and not self._stopped.is_set():
                self._blocks.not_full.wait(timeout=0.5)
        return not self._stopped.is_set()

    def _put(self, item: list[Rows] | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._blocks.put(item, timeout=0.5)
            except queue.Full:
                continue
            return


def _dataset(tasks: list[list[ReadJob]], transforms: Sequence[Transform], readers: int, nodes: DataNodes) -> Any:
    import ray.data
    from ray.data import ExecutionResources

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    shown = context.enable_progress_bars
    context.enable_progress_bars = False
    try:
        items = [{"jobs": pickle.dumps(task)} for task in tasks]
        dataset = ray.data.from_items(items, override_num_blocks=len(items))
        # num_cpus=0: training workers may have reserved all CPUs, and the epoch would never begin. `nodes` has reserved
        # CPUs where there are some for reading, and `concurrency` bounds the tasks of a rank.
        options: dict[str, Any] = {"batch_format": "pyarrow", "num_cpus": 0, "concurrency": min(readers, len(items))}
        options |= nodes.task_options()
        if os.environ.get(_SPARES):
            options["runtime_env"] = {"env_vars": {_SPARES: ""}}
        dataset = dataset.map_batches(_read_task, batch_size=1, **options)
        for each in transforms:
            dataset = dataset.map_batches(_Transformed(each), batch_size=None, **options)
    finally:
        context.enable_progress_bars = shown
    dataset.context.execution_options.preserve_order = True
    dataset.context.execution_options.resource_limits = ExecutionResources.for_limits(
        object_store_memory=(readers + _WAITING_TASKS) * _TASK_BYTES
    )
    # An evaluation or a checkpoint may take longer than Ray Data's default timeout for a slow consumer.
    dataset.context.execution_no_progress_timeout_s = -1
    return dataset


def _read_task(items: pa.Table) -> pa.Table:
    (task,) = items.column("jobs").to_pylist()

    def make() -> pa.Table:
        with _collected_warnings() as lines:
            table = read_table(pickle.loads(task))
        return table.replace_schema_metadata(
            {**(table.schema.metadata or {}), _JOBS: task, _WARNINGS: json.dumps(lines).encode()}
        )

    return _errors_as_table(make)


class _Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of a reading task, whose output is not shown."""
    handler = _Collected()
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


class _Transformed:
    """Wraps a transform as a function that Ray Data can call."""

    def __init__(self, function: Transform) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, table: pa.Table) -> pa.Table:
        if _ERROR in table.column_names:
            return table
        task = (table.schema.metadata or {}).get(_JOBS)
        pieces = list(chunks(table))
        # One piece per job, unless Ray Data has split or merged blocks.
        jobs = pickle.loads(task) if task is not None else []
        if len(jobs) != len(pieces):
            jobs = [None] * len(pieces)

        def make() -> pa.Table:
            done = [transform(rows, [self._function], job) for rows, job in zip(pieces, jobs, strict=True)]
            changed = concat(done)
            kept = {key: each for key, each in (table.schema.metadata or {}).items() if key in (_JOBS, _WARNINGS)}
            return changed.replace_schema_metadata({**(changed.schema.metadata or {}), **kept})

        return _errors_as_table(make)


def _errors_as_table(make: Callable[[], pa.Table]) -> pa.Table:
    """Return an exception as a table. Ray Data would log it at length and wrap it in its own type."""
    try:
        return make()
    except Exception as error:
        error.add_note("In a reading task:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip())
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(RuntimeError("".join(traceback.format_exception(error))))
        return pa.table({_ERROR: [pickled]})
