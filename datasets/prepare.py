"""Tokenizes text files into Parquet rows of fixed length, once, before training.

The tokens of all documents are concatenated in the order of the file names and cut into rows. The same files and
options give the same bytes. Output goes to `<output>.partial`, which is renamed when it is complete, so a folder with
the final name is always complete. After an interruption, the next call resumes after the last complete Parquet file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import DataError
from .inputs import count, find_files, names, split_files
from .locking import LOCK, locked
from .paths import PathLike, Paths
from .tokenizers import ByteTokenizer, Tokenizer, name_of, to_tokens

__all__ = ["PrepareProgress", "Prepared", "find_files", "prepare_text", "split_files"]

RECORD = "prepared.json"
_PLACE = "place.json"
_SAMPLE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare_text`.

    Attributes:
        path: the output folder.
        rows, tokens: number of rows and tokens, including padding if tail="pad".
        files: number of Parquet files.
        already_done: True if an earlier call had created the folder.
    """

    path: Path
    rows: int
    tokens: int
    files: int
    already_done: bool

    def __str__(self) -> str:
        done = "already prepared" if self.already_done else "prepared"
        return f"{self.path} {done}: {self.rows:,} rows, {self.tokens:,} tokens, {self.files} Parquet files"


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """Progress of `prepare_text`.

    Attributes:
        files_done, files: input files done, and in total.
        rows, tokens: written so far, including those in memory.
        seconds: elapsed time.
    """

    files_done: int
    files: int
    rows: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.files_done} of {self.files} files, {self.rows:,} rows, {self.tokens:,} tokens, {self.seconds:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class _Position:
    """The input position of the next Parquet file: after `tokens` tokens of document `document`."""

    parts: int = 0
    rows: int = 0
    document: int = 0
    tokens: int = 0


def prepare_text(
    inputs: Paths,
    output: PathLike,
    *,
    row_length: int,
    tokenizer: Tokenizer | None = None,
    tail: Literal["drop", "pad"] = "drop",
    pad: int = 0,
    column: str = "tokens",
    rows_per_group: int = 256,
    rows_per_file: int = 65536,
    progress: Callable[[PrepareProgress], None] | None = None,
) -> Prepared:
    """Convert text files to Parquet files of token rows.

    Args:
        inputs: a file, a folder (searched recursively), a glob, or a list of these. Decoded as UTF-8; invalid bytes
            become U+FFFD.
        output: folder to create. An existing folder must be the result of the same call. It may be inside an input
            folder; its files are not read. If another process is creating it, this call waits.
        row_length: tokens per row.
        tokenizer: maps a document's text to its tokens. None uses `ByteTokenizer`: UTF-8 bytes between bos and eos.
            Must be deterministic. An existing output is matched by the tokenizer's name and by its tokens of the start
            of the first document.
        tail: tokens that do not fill the last row: "drop" leaves them out, "pad" fills the row with `pad`.
        pad: the padding token.
        column: name of the token column.
        rows_per_group: rows per row group, the unit that a stream reads and shuffles.
        rows_per_file: rows per Parquet file.
        progress: called with the progress, at most a few times a second.

    Raises:
        DataError: there is no input, an option is invalid, or `output` was created from other inputs or options.
    """
    if row_length < 1 or rows_per_group < 1 or rows_per_file < 1:
        raise DataError(
            f"row_length, rows_per_group and rows_per_file must be integers >= 1, got {row_length}, "
            f"{rows_per_group}, {rows_per_file}"
        )
    if tail not in ("drop", "pad"):
        raise DataError(f"tail must be 'drop' or 'pad', got {tail!r}")
    tokenizer = tokenizer or ByteTokenizer()
    folder = Path(output).expanduser().absolute()
    partial = folder.with_name(folder.name + ".partial")
    files = [each for each in find_files(inputs) if not {folder, partial} & {*each.parents}]
    if not files:
        raise DataError(f"inputs contains only files of the output folder {folder}")
    wanted = {
        "row_length": row_length,
        "tokenizer": name_of(tokenizer),
        "first_tokens": _first_tokens(files, tokenizer),
        "tail": tail,
        **({"pad": pad} if tail == "pad" else {}),
        "column": column,
        "rows_per_group": rows_per_group,
        "rows_per_file": rows_per_file,
        "inputs": _inputs(files),
    }
    if folder.exists():
        return _finished(folder, wanted)

    with locked(partial):
        if folder.exists():  # created by the process that this call waited for
            (partial / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                partial.rmdir()
            return _finished(folder, wanted)
        place = _resume(partial, wanted)
        started, shown = time.monotonic(), 0.0

        def show(files_done: int, rows: int, *, now: bool = False) -> None:
            nonlocal shown
            seconds = time.monotonic() - started
            if progress and (now or seconds - shown >= 0.25):
                shown = seconds
                progress(PrepareProgress(files_done, len(files), rows, rows * row_length, seconds))

        group, part = rows_per_group * row_length, rows_per_file * row_length
        rest = np.empty(0, np.int32)
        part_tokens = 0  # of the Parquet file that is being written
        writer = _Writer(partial, column, row_length)
        try:
            for document in range(place.document, len(files)):
                tokens = _tokens(files[document], tokenizer)
                rest = np.concatenate([rest, tokens[place.tokens :] if document == place.document else tokens])
                while len(rest) >= (size := min(group, part - part_tokens)):
                    writer.write(place.parts, rest[:size])
                    rest, part_tokens = rest[size:], part_tokens + size
                    if part_tokens == part:
                        writer.finish(place.parts)
                        place = _Position(
                            place.parts + 1, place.rows + rows_per_file, document, len(tokens) - len(rest)
                        )
                        _write_json(partial / _PLACE, asdict(place))
                        part_tokens = 0
                show(document + 1, place.rows + (part_tokens + len(rest)) // row_length)

            missing = -len(rest) % row_length
            rest = (
                np.pad(rest, (0, missing), constant_values=pad)
                if tail == "pad"
                else rest[: len(rest) // row_length * row_length]
            )
            if len(rest):
                writer.write(place.parts, rest)
                part_tokens += len(rest)
            if part_tokens:
                writer.finish(place.parts)
        finally:
            writer.close()
        rows, parts = place.rows + part_tokens // row_length, place.parts + (part_tokens > 0)
        if not rows:
            raise DataError(
                f"row_length {row_length} exceeds the tokens of {count(files)}; use a smaller row_length, or tail='pad'"
            )
        show(len(files), rows, now=True)
        (partial / _PLACE).unlink(missing_ok=True)
        _write_json(partial / RECORD, {**wanted, "rows": rows, "tokens": rows * row_length, "files": parts})
        partial.rename(folder)
        (folder / LOCK).unlink(missing_ok=True)
        return Prepared(folder, rows, rows * row_length, parts, already_done=False)


class _Writer:
    """Writes Parquet files under a temporary name until they are complete."""

    def __init__(self, folder: Path, column: str, row_length: int) -> None:
        self._folder = folder
        self._schema = pa.schema([pa.field(column, pa.list_(pa.int32(), row_length))])
        self._row_length = row_length
        self._writer: pq.ParquetWriter | None = None

    def write(self, part: int, tokens: npt.NDArray[np.int32]) -> None:
        """Write one row group."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path(part).with_suffix(".writing"), self._schema, compression="zstd")
        rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens), self._row_length)
        self._writer.write_table(pa.table([rows], schema=self._schema), row_group_size=len(rows))

    def finish(self, part: int) -> None:
        """Close a file and give it its final name."""
        self.close()
        self._path(part).with_suffix(".writing").replace(self._path(part))

    def close(self) -> None:
        """Close the open file, if any."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _path(self, part: int) -> Path:
        return self._folder / f"part-{part:05d}.parquet"


def _first_tokens(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    """Return a digest that tells tokenizers with the same name apart, such as lambdas."""
    first = next((each for each in files if each.stat().st_size), files[0])
    tokens = _tokens(first, tokenizer, length_bytes=_SAMPLE_BYTES)
    return f"{len(tokens)} tokens, {hashlib.sha256(tokens.tobytes()).hexdigest()[:12]}"


def _tokens(path: Path, tokenizer: Tokenizer, *, length_bytes: int = -1) -> npt.NDArray[np.int32]:
    try:
        with path.open("rb") as file:
            text = file.read(length_bytes).decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return to_tokens(tokenizer(text), f"the tokenizer {name_of(tokenizer)}", f" for {path}")


def _finished(folder: Path, wanted: dict[str, Any]) -> Prepared:
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        raise DataError(
            f"{folder} exists but was not made by `prepare`: it has no readable {RECORD}. Choose another output folder"
        ) from None
    _compare(folder, record, wanted)
    return Prepared(folder, record["rows"], record["tokens"], record["files"], already_done=True)


def _resume(partial: Path, wanted: dict[str, Any]) -> _Position:
    """Return the position of an interrupted call, after its last complete Parquet file."""
    if (partial / RECORD).exists():
        _compare(partial, json.loads((partial / RECORD).read_text()), wanted)
    else:
        partial.mkdir(parents=True, exist_ok=True)
        _write_json(partial / RECORD, wanted)
    if not (partial / _PLACE).exists():
        return _Position()
    return _Position(**json.loads((partial / _PLACE).read_text()))


def _compare(folder: Path, record: dict[str, Any], wanted: dict[str, Any]) -> None:
    if "first_tokens" not in record:  # made before this was recorded
        wanted = {key: value for key, value in wanted.items() if key != "first_tokens"}
    different = [
        f"{key} was {record.get(key)!r} and is {wanted.get(key)!r}"
        for key in dict.fromkeys([*wanted, *(key for key in record if key not in ("rows", "tokens", "files"))])
        if record.get(key) != wanted.get(key)
    ]
    if different:
        raise DataError(
            f"{folder} was made with other inputs or options: {'; '.join(different)}. Delete it, or choose "
            "another output folder"
        )


def _inputs(files: Sequence[Path]) -> str:
    """Describe the input by file names and sizes, without reading it."""
    sizes = [file.stat().st_size for file in files]
    digest = hashlib.sha256(
        "\0".join(f"{name} {size}" for name, size in zip(names(files), sizes, strict=True)).encode()
    )
    return f"{count(files)}, {sum(sizes)} bytes, {digest.hexdigest()[:12]}"


def _write_json(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
