"""Text files to rows of equally many tokens in Parquet: once, before training, so that training only reads.

The documents' tokens are laid end to end in the order of the files' names and cut into rows. The same files and options
give the same bytes. All is written to `<output>.partial`, which takes its final name when it is whole: a folder that is
there is finished. Interrupted, the next call goes on after the last Parquet file that was finished.
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
from .tokenizers import ByteTokenizer, Tokenizer

__all__ = ["PrepareProgress", "Prepared", "find_files", "prepare_text", "split_files"]

RECORD = "prepared.json"
_PLACE = "place.json"
_SAMPLE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_text` made.

    Attributes:
        path: the folder.
        rows, tokens: what is in it; with tail="pad", padding included.
        files: Parquet files.
        already_done: whether an earlier call had made it.
    """

    path: Path
    rows: int
    tokens: int
    files: int
    already_done: bool

    def __str__(self) -> str:
        done = "was prepared before" if self.already_done else "is prepared"
        return f"{self.path} {done}: {self.rows:,} rows, {self.tokens:,} tokens, {self.files} Parquet files"


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """How far `prepare_text` has come.

    Attributes:
        files_done, files: input files.
        rows, tokens: written or about to be.
        seconds: since the call.
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
class _Place:
    """Where in the input the next Parquet file begins: after `tokens` tokens of document `document`."""

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
    """Turns text files into Parquet files of token rows.

    Args:
        inputs: a file, a folder (all files in it, to its bottom), a glob, or a list of these. UTF-8; what is not is
            replaced by U+FFFD.
        output: the folder to make. If it is there, it must be what this call would make. It may lie in a folder of the
            input, of which it is no part. Another process that makes it is waited for.
        row_length: tokens of one row.
        tokenizer: a function from a document's text to its tokens; None takes the bytes, with a mark before and after.
            The same text must always give the same tokens: by its name, and by what it makes of the first document's
            beginning, it is known again.
        tail: what becomes of tokens that do not fill the last row: "drop" leaves them out, "pad" fills up with `pad`.
        pad: the token that fills up.
        column: its name.
        rows_per_group: rows of one row group, which is what a stream reads and shuffles at a time.
        rows_per_file: rows of one Parquet file.
        progress: called a few times a second at most, with how far it is.

    Raises:
        DataError: there is no input, an option makes no sense, or `output` was made from something else.
    """
    if row_length < 1 or rows_per_group < 1 or rows_per_file < 1:
        raise DataError(
            f"row_length, rows_per_group and rows_per_file are whole numbers from 1, not {row_length}, "
            f"{rows_per_group}, {rows_per_file}"
        )
    if tail not in ("drop", "pad"):
        raise DataError(f"tail is 'drop' or 'pad', not {tail!r}")
    tokenizer = tokenizer or ByteTokenizer()
    folder = Path(output).expanduser().absolute()
    partial = folder.with_name(folder.name + ".partial")
    files = [each for each in find_files(inputs) if not {folder, partial} & {*each.parents}]
    if not files:
        raise DataError(f"the input holds no file but those of the output, {folder}")
    wanted = {
        "row_length": row_length,
        "tokenizer": _name(tokenizer),
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
        if folder.exists():  # made by whom this one waited for
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
                        place = _Place(place.parts + 1, place.rows + rows_per_file, document, len(tokens) - len(rest))
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
                f"{count(files)} hold fewer tokens than one row of {row_length}; use a smaller row_length, or "
                "tail='pad'"
            )
        show(len(files), rows, now=True)
        (partial / _PLACE).unlink(missing_ok=True)
        _write_json(partial / RECORD, {**wanted, "rows": rows, "tokens": rows * row_length, "files": parts})
        partial.rename(folder)
        (folder / LOCK).unlink(missing_ok=True)
        return Prepared(folder, rows, rows * row_length, parts, already_done=False)


class _Writer:
    """Writes Parquet files under a temporary name until they are whole."""

    def __init__(self, folder: Path, column: str, row_length: int) -> None:
        self._folder = folder
        self._schema = pa.schema([pa.field(column, pa.list_(pa.int32(), row_length))])
        self._row_length = row_length
        self._writer: pq.ParquetWriter | None = None

    def write(self, part: int, tokens: npt.NDArray[np.int32]) -> None:
        """Writes one row group."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path(part).with_suffix(".writing"), self._schema, compression="zstd")
        rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens), self._row_length)
        self._writer.write_table(pa.table([rows], schema=self._schema), row_group_size=len(rows))

    def finish(self, part: int) -> None:
        """Ends a file, which from then on is there."""
        self.close()
        self._path(part).with_suffix(".writing").replace(self._path(part))

    def close(self) -> None:
        """Closes what is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _path(self, part: int) -> Path:
        return self._folder / f"part-{part:05d}.parquet"


def _first_tokens(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    """Tells tokenizers apart that are called alike, such as functions without a name."""
    first = next((each for each in files if each.stat().st_size), files[0])
    tokens = _tokens(first, tokenizer, length_bytes=_SAMPLE_BYTES)
    return f"{len(tokens)} tokens, {hashlib.sha256(tokens.tobytes()).hexdigest()[:12]}"


def _tokens(path: Path, tokenizer: Tokenizer, *, length_bytes: int = -1) -> npt.NDArray[np.int32]:
    try:
        with path.open("rb") as file:
            text = file.read(length_bytes).decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    tokens = np.asarray(tokenizer(text))
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise DataError(
            f"the tokenizer {_name(tokenizer)} returned {tokens.dtype} of shape {tokens.shape} for {path}; it returns "
            "a flat sequence of whole numbers"
        )
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 2**31):
        raise DataError(
            f"the tokenizer {_name(tokenizer)} returned tokens from {tokens.min()} to {tokens.max()} for {path}; "
            "they are stored as int32, from 0"
        )
    return tokens.astype(np.int32)


def _finished(folder: Path, wanted: dict[str, Any]) -> Prepared:
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        raise DataError(
            f"{folder} is there and was not made by `prepare`: it has no readable {RECORD}. Choose "
            "another output folder"
        ) from None
    _compare(folder, record, wanted)
    return Prepared(folder, record["rows"], record["tokens"], record["files"], already_done=True)


def _resume(partial: Path, wanted: dict[str, Any]) -> _Place:
    """Returns where an interrupted call stopped, after its last whole Parquet file."""
    if (partial / RECORD).exists():
        _compare(partial, json.loads((partial / RECORD).read_text()), wanted)
    else:
        partial.mkdir(parents=True, exist_ok=True)
        _write_json(partial / RECORD, wanted)
    if not (partial / _PLACE).exists():
        return _Place()
    return _Place(**json.loads((partial / _PLACE).read_text()))


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
            f"{folder} was made from something else: {'; '.join(different)}. Delete it, or choose another output folder"
        )


def _inputs(files: Sequence[Path]) -> str:
    """Says what the input is: names and sizes, which is what can be told without reading it."""
    sizes = [file.stat().st_size for file in files]
    digest = hashlib.sha256(
        "\0".join(f"{name} {size}" for name, size in zip(names(files), sizes, strict=True)).encode()
    )
    return f"{count(files)}, {sum(sizes)} bytes, {digest.hexdigest()[:12]}"


def _name(tokenizer: Tokenizer) -> str:
    # A tokenizer is known by its type, or its method's name, and, if its object says so, by what that was loaded from.
    of = getattr(getattr(tokenizer, "__self__", tokenizer), "name_or_path", None)
    kind = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" {of}" if of else "")


def _write_json(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
