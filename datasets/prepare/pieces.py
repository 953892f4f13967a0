"""Documents to be tokenized: cut into pieces that one task reads without the others.

How the input is cut depends on it and on `part_bytes` alone, never on the number of tasks.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
import pyarrow as pa

from ..errors import DataError
from ..formats.base import DataFormat, Fragment, OnBadRow
from ..formats.hugging_face import HuggingFace, HuggingFaceRows
from ..formats.images import ImageFiles
from ..formats.index_cache import codec_of, sample_digest
from ..formats.jsonl import SUFFIXES as JSONL_SUFFIXES, JsonLines
from ..formats.webdataset import TarRows
from ..paths import SUFFIXES as PARQUET_SUFFIXES, Found, Paths, absolute, find, find_all, name_files, nearest
from ..row_groups import RowGroup
from ..sources import Parquet
from .inputs import find_files

_READ_BYTES = 2**20
# As git does, a file is taken for binary if there is a zero byte at its start. Some compressed files have none there.
_CHECKED_BYTES = 8000
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")


class Document(NamedTuple):
    """One document, or a damaged one.

    Attributes:
        size: bytes of the piece that it took.
        text: None if it is damaged.
        place: where it is, for errors; or where and why it is damaged.
    """

    size: int
    text: str | None
    place: str


class Piece(Protocol):
    """Some documents. Can be pickled."""

    @property
    def size(self) -> int:
        """Bytes to read, about."""

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order.

        Raises:
            DataError: they cannot be read.
        """


class TextFile(NamedTuple):
    """A file that is one document."""

    path: str
    size: int

    def documents(self) -> Iterator[Document]:
        """Yield the document; invalid UTF-8 becomes U+FFFD. A file that is not text is damaged."""
        data = _read(self.path)
        if b"\0" in data[:_CHECKED_BYTES] or data.startswith(_COMPRESSED):
            why = "is not text in UTF-8, but compressed, binary or in another encoding: convert it"
            yield Document(self.size, None, f"{self.path} {why}")
        else:
            yield Document(self.size, data.decode("utf-8", errors="replace"), self.path)


class LineRange(NamedTuple):
    """The lines of a JSON Lines file that begin from byte `start` to before byte `stop`."""

    path: str
    start: int
    stop: int
    column: str

    @property
    def size(self) -> int:
        """Bytes to read, about."""
        return self.stop - self.start

    def documents(self) -> Iterator[Document]:
        """Yield the documents; blank lines are none."""
        first = max(0, self.start - 1)
        data = _read(self.path, first, self.stop)
        end = first + len(data)
        while data and not data.endswith(b"\n") and (more := _read(self.path, end, end + _READ_BYTES)):
            end += len(more)
            line_end = more.find(b"\n")
            data += more if line_end < 0 else more[: line_end + 1]
        # The line that contains the byte before `start` is of the range before, which may be all there is.
        at = data.find(b"\n") + 1 if self.start else 0
        if self.start and not at:
            return
        while at < len(data) and first + at < self.stop:
            line_end = data.find(b"\n", at)
            line_end = len(data) if line_end < 0 else line_end
            text, why = _text_of(data[at:line_end], self.column)
            if text is not None or why:
                place = self._place(first + at) + why if why else self.path
                yield Document(line_end + 1 - at, text, place)
            at = line_end + 1

    def _place(self, at: int) -> str:
        with fsspec.open(self.path, "rb") as file:
            before, line = 0, 1
            while before < at and (some := file.read(min(_READ_BYTES, at - before))):
                before += len(some)
                line += some.count(b"\n")
        return f"line {line} of {self.path} "


class CompressedLines(NamedTuple):
    """A compressed JSON Lines file, which cannot be read from the middle."""

    path: str
    size: int
    column: str

    def documents(self) -> Iterator[Document]:
        """Yield the documents; blank lines are none."""
        codec, at, line = codec_of(self.path), 0, 0
        try:
            with (
                fsspec.open(self.path, "rb") as raw,
                pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec) as data,
            ):
                for line, content in enumerate(_lines_of(data), start=1):
                    text, why = _text_of(content, self.column)
                    if text is not None or why:
                        was, at = at, raw.tell()
                        yield Document(at - was, text, f"line {line} of {self.path} {why}")
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self.path} is not a complete {codec} file: {error}, after line {line}. Write or download it "
                "again, or leave it out"
            ) from error


class Rows(NamedTuple):
    """A fragment of a format with columns, such as a row group of a Parquet file."""

    fragment: Fragment
    size: int
    column: str

    def documents(self) -> Iterator[Document]:
        """Yield the column's value in each row."""
        values = self.fragment.read()[self.column]
        for row, value in enumerate(values):
            size = self.size // len(values) + (self.size % len(values) if row == 0 else 0)
            if isinstance(value, str):
                yield Document(size, value, "")
            else:
                place = place_of(self.fragment, row)
                yield Document(size, None, f"{place} has {_kind(value)} in {self.column!r}, not text")


def place_of(fragment: Fragment, row: int) -> str:
    """Return where a row of a fragment is, for errors."""
    match fragment:
        case RowGroup():
            return f"row {row} of row group {fragment.group} of {fragment.path}"
        case HuggingFaceRows():
            return f"row {fragment.start + row} of the dataset"
        case TarRows():
            return f"{fragment.keys[row]} in {fragment.path}"
        case ImageFiles():
            return f"{fragment.names[row]} in {fragment.path}"
        case _:
            return f"row {row} of {fragment!r:.200}"


def find_pieces(
    data: Paths | DataFormat, *, column: str, outside: Sequence[str], part_bytes: int
) -> tuple[list[Piece], list[tuple[str, int]]]:
    """Return the pieces of the input in order, and (name, size) of everything that it consists of.

    Args:
        data: see `prepare_text`.
        column: the column or key with the text.
        outside: folders whose files are not read: the output.
        part_bytes: a JSON Lines file is cut into ranges of this length.

    Raises:
        DataError: there is no input, its files are of several kinds, or it has no such column.
    """
    if isinstance(data, JsonLines):
        files = find_all(data.path, suffixes=JSONL_SUFFIXES)
    elif isinstance(data, (str, os.PathLike, Sequence)):
        if saved := _saved_dataset(data):
            return _pieces_of_format(saved, column)
        files = _files(data, outside)
    else:
        return _pieces_of_format(data, column)
    kinds = {each.path: _kind_of(each.path) for each in files}
    if len(set(kinds.values())) > 1:
        examples = {kind: path for path, kind in reversed(kinds.items())}
        listed = " and ".join(f"{kind} ({path})" for kind, path in sorted(examples.items()))
        raise DataError(f"the inputs mix {listed}: name the files of one kind, for example by a glob such as *.jsonl")
    kind = kinds[files[0].path]
    if kind == "Parquet":
        return _pieces_of_format(Parquet([each.path for each in files], columns=[column]), column)
    sizes = [int(each.fs.size(each.inner)) for each in files]
    pieces: list[Piece] = []
    for each, size in zip(files, sizes, strict=True):
        if kind == "text":
            pieces.append(TextFile(each.path, size))
        elif codec_of(each.path):
            pieces.append(CompressedLines(each.path, size, column))
        else:
            pieces += [
                LineRange(each.path, start, min(start + part_bytes, size), column)
                for start in range(0, size, part_bytes)
            ]
    # Samples, because other contents may have the same size.
    named = [f"{name} {sample_digest(each)}" for name, each in zip(name_files(files), files, strict=True)]
    return pieces, list(zip(named, sizes, strict=True))


def group(pieces: Sequence[Piece], part_bytes: int) -> list[tuple[Piece, ...]]:
    """Return the parts: consecutive pieces of at least `part_bytes` together, but for the last."""
    parts: list[tuple[Piece, ...]] = []
    waiting: list[Piece] = []
    size = 0
    for each in pieces:
        waiting.append(each)
        size += each.size
        if size >= part_bytes:
            parts.append(tuple(waiting))
            waiting, size = [], 0
    return [*parts, tuple(waiting)] if waiting else parts


def read_documents(pieces: Sequence[Piece], on_bad_row: OnBadRow) -> Iterator[Document]:
    """Yield the documents of some pieces; damaged ones only if they are to be left out.

    Raises:
        DataError: a document is damaged, and is not to be left out.
    """
    for piece in pieces:
        for document in piece.documents():
            if document.text is None and on_bad_row == "raise":
                raise DataError(f"{document.place}. Mend it, or leave such documents out with on_bad_row='skip'")
            yield document


def _pieces_of_format(data: Any, column: str) -> tuple[list[Piece], list[tuple[str, int]]]:
    source = data.open()
    rows = source.fragment_rows.tolist()
    if column not in (names := source.fragment(0).read()):
        raise DataError(f"{data} has no column {column!r}; {nearest(column, names)}")
    pieces: list[Piece] = [
        Rows(source.fragment(index), int(count) * source.row_bytes, column) for index, count in enumerate(rows)
    ]
    return pieces, [(source.fingerprint, source.rows)]


def _saved_dataset(data: Any) -> HuggingFace | None:
    """Return the dataset that Hugging Face's `save_to_disk` has written into a folder; None if it is no such folder."""
    if not isinstance(data, (str, os.PathLike)):
        data = data[0] if len(data) == 1 else ""
    folder = Path(data).expanduser()
    if not data or not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return None
    try:
        # By its name, which in an import statement would mean this package.
        hugging_face = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{folder} is a dataset of Hugging Face, whose package is missing: pip install 'headway[huggingface]'"
        ) from error
    return HuggingFace(hugging_face.load_from_disk(str(folder.absolute())))


def _files(data: Paths, outside: Sequence[str]) -> list[Found]:
    """Return the files that paths and URIs stand for, sorted, without those in the folders `outside`."""
    texts = [os.fspath(each) for each in ([data] if isinstance(data, (str, os.PathLike)) else data)]
    here = [each for each in texts if "://" not in each]
    local = fsspec.filesystem("file")
    found = [Found(str(each), local, str(each)) for each in (find_files(here) if here or not texts else ())]
    for each in absolute([each for each in texts if "://" in each]):
        found += find(each, suffixes=("",))
    own = tuple(f"{each}/" for each in outside)
    kept = {each.path: each for each in found if not each.path.startswith(own)}
    if not kept:
        raise DataError(f"inputs contains only files of the output folder {outside[0]}")
    return [kept[path] for path in sorted(kept)]


def _kind_of(path: str) -> str:
    if path.lower().endswith(JSONL_SUFFIXES):
        return "JSON Lines"
    return "Parquet" if path.lower().endswith(PARQUET_SUFFIXES) else "text"


def _read(path: str, start: int | None = None, stop: int | None = None) -> bytes:
    try:
        if "://" not in path:
            with open(path, "rb") as file:
                file.seek(start or 0)
                return file.read(-1 if stop is None else stop - (start or 0))
        fs, inner = fsspec.core.url_to_fs(path)
        if start is not None and start >= fs.size(inner):
            return b""
        content: bytes = fs.cat_file(inner, start=start, end=stop)  # by name: s3fs has others by position
        return content
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _lines_of(data: Any) -> Iterator[bytes]:
    rest = b""
    while some := data.read(_READ_BYTES):
        *lines, rest = (rest + some).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _text_of(line: bytes, column: str) -> tuple[str | None, str]:
    """Return the text of a line; or None and why it has none, which is "" for a blank line."""
    if not line.strip():
        return None, ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"is not JSON: {type(error).__name__}: {error}"
    if not isinstance(row, dict):
        return None, f"is a {type(row).__name__}, not an object"
    if column not in row:
        return None, f"has no key {column!r}; {nearest(column, row)}"
    text = row[column]
    return (text, "") if isinstance(text, str) else (None, f"has {_kind(text)} in {column!r}, not text")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
