"""Makes one Parquet file of each part of an input, here or by tasks on Ray; resumable, and the same bytes either way.

A local output is written to `<output>.partial`, which is renamed when it is complete. In a bucket, which cannot rename,
the output contains `preparing.json` until then, with which `find` of `paths` refuses to read it. `.parts` has a record
of each finished part with the checksum of its file, by which the next call after an interruption verifies and keeps
it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ..data_nodes import RESOURCE as DATA_NODE, SHARE
from ..engines import connected_to_ray
from ..errors import DataError
from ..locking import LOCK, locked
from ..paths import PREPARING, PathLike, absolute
from ..tokenizers import one_thread

logger = logging.getLogger("headway.datasets")

# By its underscore, Parquet readers of others skip it.
RECORD = "_prepared.json"
_PARTS = ".parts"
# Parts that are submitted to Ray at a time, for each of its CPUs: more than one, so that an autoscaler sees a demand.
_WAITING_PER_CPU = 2
_SHOWN_EVERY_S = 0.25

Tables: TypeAlias = Generator[pa.Table, None, dict[str, Any]]
"""Yields the row groups of a file, and returns what the record of the part is to have besides."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare_text` or `prepare_images`.

    Attributes:
        path: the output folder, an absolute path or a URI.
        rows: number of rows.
        tokens: number of tokens, including padding if tail="pad"; 0 for images.
        files: number of Parquet files.
        skipped_rows: damaged inputs that were left out, as asked.
        digest: sixteen hex digits of the checksums of all files. The same input and options give the same, on any
            number of tasks.
        already_done: True if an earlier call had created the folder.
    """

    path: str
    rows: int
    tokens: int
    files: int
    skipped_rows: int
    digest: str
    already_done: bool

    def __str__(self) -> str:
        done = "already prepared" if self.already_done else "prepared"
        tokens = f"{self.tokens:,} tokens, " if self.tokens else ""
        skipped = f", {self.skipped_rows:,} damaged ones left out" if self.skipped_rows else ""
        files = f"{self.files} Parquet file{'' if self.files == 1 else 's'}"
        return f"{self.path} {done}: {self.rows:,} rows, {tokens}{files} ({self.digest}){skipped}"


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """Progress of `prepare_text` or `prepare_images`.

    Attributes:
        parts_done, parts: parts of the input done, and in total.
        parts_kept: of those done, the ones that an earlier call had made.
        rows, tokens: written so far.
        seconds: elapsed time.
    """

    parts_done: int
    parts: int
    parts_kept: int
    rows: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        kept = f" ({self.parts_kept} kept)" if self.parts_kept else ""
        tokens = f"{self.tokens:,} tokens, " if self.tokens else ""
        parts = f"{self.parts_done} of {self.parts} part{'' if self.parts == 1 else 's'}"
        return f"{parts}{kept}, {self.rows:,} rows, {tokens}{self.seconds:.0f} s"


class Convert(Protocol):
    """How a part of the input becomes a file. Can be pickled, by cloudpickle where tasks on Ray do it."""

    @property
    def compression(self) -> str:
        """Of the Parquet files, as `pyarrow.parquet.ParquetWriter` names it."""

    def tables(self, part: Any) -> Tables:
        """Convert one part.

        Raises:
            DataError: the input cannot be read or is damaged. Names the file and the place in it.
        """

    def last(self, records: Sequence[Mapping[str, Any]]) -> Tables:
        """Convert what is left over of all parts, whose records are given in order."""


def prepare(
    parts: Sequence[Any],
    convert: Convert,
    output: PathLike,
    wanted: Mapping[str, Any],
    *,
    tasks: int | None,
    progress: Callable[[PrepareProgress], None] | None,
) -> Prepared:
    """Convert all parts and return the finished folder, or the one that an earlier call has finished.

    Args:
        parts: the parts of the input, which can be pickled.
        convert: how to convert one.
        output: folder to create, local or a URI.
        wanted: everything that the output depends on, as plain values.
        tasks: see `prepare_text`.
        progress: called with the progress, at most a few times a second.

    Raises:
        DataError: the input is damaged, or `output` was created from other inputs or options.
    """
    (folder,) = absolute(output)
    is_local = "://" not in folder
    if (is_local and os.path.exists(folder)) or (not is_local and _is_finished(folder)):
        return _finished(folder, wanted)
    work = f"{folder}.partial" if is_local else folder
    if is_local:
        try:
            os.makedirs(work, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot create {work}: {error.strerror or error}. Choose another output folder") from error
    with locked(Path(work)) if is_local else nullcontext():
        if is_local and os.path.exists(folder):  # created by the process that this call waited for
            (Path(work) / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                os.rmdir(work)
            return _finished(folder, wanted)
        if is_done := (record := _read_json(work, RECORD)) is not None:  # interrupted just before its end
            _compare(work, record, wanted)
        else:
            _begin(work, wanted)
            records = _make_all(work, parts, convert, tasks, progress)
            _write_json(work, RECORD, {**wanted, **_summary(records)})
        _close(work)
        if is_local:
            os.rename(work, folder)
            Path(folder, LOCK).unlink(missing_ok=True)
        return _finished(folder, wanted, already_done=is_done)


def check_tasks(tasks: int | None) -> None:
    """Raise a `DataError` for an invalid number of tasks."""
    if tasks is not None and tasks < 1:
        raise DataError(f"tasks must be an integer >= 1, got {tasks}")
    if tasks != 1 and not connected_to_ray():
        raise DataError(
            f"tasks={tasks} needs Ray, which is not initialized in this process: call ray.init(), or use tasks=1"
        )


def _make_all(
    work: str,
    parts: Sequence[Any],
    convert: Convert,
    tasks: int | None,
    progress: Callable[[PrepareProgress], None] | None,
) -> list[dict[str, Any]]:
    """Return the records of all files in order."""
    started, shown = time.monotonic(), 0.0
    records: dict[int, dict[str, Any]] = {}

    def show(*, now: bool = False, rows: int = 0) -> None:
        nonlocal shown
        seconds = time.monotonic() - started
        if progress and (now or seconds - shown >= _SHOWN_EVERY_S):
            shown = seconds
            kept = sum(each["kept"] for each in records.values())
            written = [sum(each[name] for each in records.values()) for name in ("rows", "tokens")]
            progress(PrepareProgress(len(records), len(parts), kept, written[0] + rows, written[1], seconds))

    on_ray = tasks != 1 and len(parts) > 1
    made = _on_ray(work, parts, convert, tasks) if on_ray else _here(work, parts, convert, lambda rows: show(rows=rows))
    for number, record in made:
        records[number] = record
        show()
    ordered = [records[number] for number in range(len(parts))]
    ordered.append({**_write(work, len(parts), convert.last(ordered), convert.compression), "kept": False})
    show(now=True)
    return ordered


def _here(
    work: str, parts: Sequence[Any], convert: Convert, on_rows: Callable[[int], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, part in enumerate(parts):
        yield number, _make(work, number, convert, part, on_rows)


def _on_ray(
    work: str, parts: Sequence[Any], convert: Convert, tasks: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the record of each part when it is done."""
    import ray

    # With a CPU alone, more tasks than the CPU nodes hold would make the autoscaler start nodes with GPUs.
    on_data_nodes = {DATA_NODE: SHARE} if DATA_NODE in ray.cluster_resources() else {}
    # A worker that dies is tried again by Ray; a part is written again then, with the same bytes.
    task = ray.remote(num_cpus=1, resources=on_data_nodes)(_task)
    shared = ray.put(convert)
    todo = iter(enumerate(parts))
    running: dict[Any, int] = {}
    while True:
        most = tasks or _WAITING_PER_CPU * max(2, int(ray.cluster_resources().get("CPU", 0)))
        while len(running) < most and (item := next(todo, None)):
            number, part = item
            running[task.options(name=f"prepare part {number}").remote(work, number, shared, part)] = number
        if not running:
            return
        done, _ = ray.wait(list(running), timeout=2)
        for reference in done:
            number, record = running.pop(reference), ray.get(reference)
            if isinstance(record, DataError):
                raise record
            _check_is_here(work, record)
            yield number, record


def _task(work: str, number: int, convert: Convert, part: Any) -> dict[str, Any] | DataError:
    try:
        with one_thread():  # the task has one CPU
            return _make(work, number, convert, part)
    except DataError as error:  # Ray would wrap it in its own type
        return error


def _check_is_here(work: str, record: Mapping[str, Any]) -> None:
    path = Path(work, record["file"])
    if "://" not in work and record["rows"] and not (path.exists() and path.stat().st_size == record["bytes"]):
        raise DataError(
            f"{record['machine']} has written {path}, which is not on this machine: the output must be a folder that "
            "all machines see, or a URI"
        )


def _make(
    work: str, number: int, convert: Convert, part: Any, on_rows: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Convert a part unless this has been done, and return its record."""
    name = f"{_PARTS}/{_file(number)}.json"
    record = _read_json(work, name)
    if record is not None:
        if not record["rows"] or _sha256_of(work, record["file"]) == record["sha256"]:
            return {**record, "kept": True}
        logger.warning("%s/%s is damaged or missing, and is made again", work, record["file"])
    record = _write(work, number, convert.tables(part), convert.compression, on_rows)
    _write_json(work, name, record)
    return {**record, "kept": False}


def _write(
    work: str, number: int, tables: Tables, compression: str, on_rows: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Write the file of a part, if it has rows, and return its record."""
    file = _file(number)
    try:
        return _write_file(work, file, tables, compression, on_rows)
    except OSError as error:
        raise DataError(f"cannot make {work}/{file}: {error.strerror or error}") from error


def _write_file(
    work: str, file: str, tables: Tables, compression: str, on_rows: Callable[[int], None] | None
) -> dict[str, Any]:
    rows = 0
    with _new_file(work, file) as path:
        writer: pq.ParquetWriter | None = None
        try:
            while True:
                try:
                    table = next(tables)
                except StopIteration as end:
                    about = end.value
                    break
                if writer is None:
                    writer = pq.ParquetWriter(path, table.schema, compression=compression)
                writer.write_table(table, row_group_size=max(1, len(table)))
                rows += len(table)
                if on_rows:
                    on_rows(rows)
        finally:
            if writer is not None:
                writer.close()
        content = {"bytes": 0, "sha256": ""}
        if rows:
            with path.open("rb") as written:
                content = {
                    "sha256": hashlib.file_digest(written, "sha256").hexdigest(), "bytes": path.stat().st_size,
                }  # fmt: skip
    return {"file": file, "rows": rows, "tokens": 0, "skipped": 0, **content, **about, "machine": socket.gethostname()}


@contextmanager
def _new_file(work: str, name: str) -> Iterator[Path]:
    """Yield a path to write to. If there is a file then, it gets its name in the folder, complete or not at all."""
    if "://" not in work:
        # Its own name, because a task whose machine was lost may still be writing.
        path = Path(work, _PARTS, f"{os.path.basename(name)}.{uuid.uuid4().hex[:8]}.writing")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield path
            if path.exists():
                path.replace(Path(work, name))
        finally:
            path.unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(prefix="headway-prepare-") as scratch:
        path = Path(scratch, "file")
        yield path
        if path.exists():
            fs, inner = fsspec.core.url_to_fs(f"{work}/{name}")
            fs.put_file(str(path), inner)


def _begin(work: str, wanted: Mapping[str, Any]) -> None:
    """Record what is being made, or compare it with what an interrupted call was making."""
    if (record := _read_json(work, PREPARING)) is not None:
        _compare(work, record, wanted)
        return
    there = [name for name in _list(work) if name not in (LOCK, _PARTS)]
    if there:
        raise DataError(_not_ours(work, there))
    _write_json(work, PREPARING, wanted)


def _close(work: str) -> None:
    """Remove everything but the result."""
    fs, inner = fsspec.core.url_to_fs(work)
    if fs.exists(f"{inner}/{_PARTS}"):
        fs.rm(f"{inner}/{_PARTS}", recursive=True)
    with suppress(FileNotFoundError):
        fs.rm_file(f"{inner}/{PREPARING}")
    fs.invalidate_cache()


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    files = [
        {"file": each["file"], "rows": each["rows"], "bytes": each["bytes"], "sha256": each["sha256"]}
        for each in records
        if each["rows"]
    ]
    digest = hashlib.sha256("\0".join(each["sha256"] for each in files).encode()).hexdigest()
    total = {name: sum(each[name] for each in records) for name in ("rows", "tokens", "skipped")}
    return {**total, "digest": digest[:16], "files": files}


def _is_finished(folder: str) -> bool:
    return _read_json(folder, RECORD) is not None and _read_json(folder, PREPARING) is None


def _finished(folder: str, wanted: Mapping[str, Any], *, already_done: bool = True) -> Prepared:
    record = _read_json(folder, RECORD)
    if record is None or not isinstance(record.get("files"), list):
        raise DataError(_not_ours(folder, _list(folder)))
    _compare(folder, record, wanted)
    fs, inner = fsspec.core.url_to_fs(folder)
    sizes = {os.path.basename(path): about["size"] for path, about in fs.find(inner, detail=True).items()}
    for each in record["files"]:
        if sizes.get(each["file"]) != each["bytes"]:
            raise DataError(f"{folder}/{each['file']} is missing or damaged: delete the folder, and prepare it again")
    return Prepared(
        folder, record["rows"], record["tokens"], len(record["files"]), record["skipped"], record["digest"],
        already_done=already_done,
    )  # fmt: skip


def _not_ours(folder: str, there: Sequence[str]) -> str:
    return (
        f"{folder} exists but was not made by `prepare`: it has {', '.join(there[:5]) or 'no files'}, and no readable "
        f"{RECORD}. Choose another output folder"
    )


def _compare(folder: str, record: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    ours = ("rows", "tokens", "skipped", "digest", "files")
    different = [
        f"{key} was {record.get(key)!r} and is {wanted.get(key)!r}"
        for key in dict.fromkeys([*wanted, *(key for key in record if key not in ours)])
        if record.get(key) != wanted.get(key)
    ]
    if different:
        raise DataError(
            f"{folder} was made with other inputs or options: {'; '.join(different)}. Delete it, or choose "
            "another output folder"
        )


def _file(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _list(folder: str) -> list[str]:
    fs, inner = fsspec.core.url_to_fs(folder)
    fs.invalidate_cache()
    if not fs.isdir(inner):
        return []
    return sorted(os.path.basename(each.rstrip("/")) for each in fs.ls(inner, detail=False))


def _read_json(folder: str, name: str) -> dict[str, Any] | None:
    fs, inner = fsspec.core.url_to_fs(f"{folder}/{name}")
    try:
        found: dict[str, Any] = json.loads(fs.cat_file(inner))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {folder}/{name}: {error.strerror or error}") from error
    return found


def _write_json(folder: str, name: str, record: Mapping[str, Any]) -> None:
    try:
        with _new_file(folder, name) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise DataError(f"cannot write {folder}/{name}: {error.strerror or error}") from error


def _sha256_of(folder: str, name: str) -> str | None:
    """Return the digest of a file's contents; None if there is no such file."""
    try:
        with fsspec.open(f"{folder}/{name}", "rb") as file:
            digest = hashlib.sha256()
            while some := file.read(2**22):
                digest.update(some)
            return digest.hexdigest()
    except FileNotFoundError:
        return None
