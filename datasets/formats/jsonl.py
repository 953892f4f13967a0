"""JSON Lines files as a source: one object per line, plain or compressed with gzip or Zstandard.

An index of each file is built once: the byte ranges of runs of lines (the fragments), a checksum of each, and the type
of every column. A compressed file cannot be read from the middle, so it is decompressed once, into the folder of the
index, and read from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrow import Rows, to_objects
from ..cache import Cache, Cached, cached_files, check_fits, entry_name, open_data
from ..errors import DataError
from ..paths import Found, PathLike, Paths, absolute, advice_for, find_all, name_files, nearest
from .base import OnBadRow, check_options
from .index_cache import Index, cached_index, decompressed, index_folder, open_file, path_for

SUFFIXES = tuple(f"{each}{zipped}" for each in (".jsonl", ".ndjson") for zipped in ("", ".gz", ".zst"))
# A fragment ends at the first of these.
_FRAGMENT_ROWS, _FRAGMENT_BYTES = 1024, 2**20
# How files begin that are no lines of text, and what to do.
_NO_TEXT = {
    b"\x1f\x8b": "it is compressed with gzip, so its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "it is compressed with Zstandard, so its name must end in .zst",
    b"BZh": "it is compressed with bzip2; use gzip or Zstandard",
    b"\xfd7zXZ": "it is compressed with xz; use gzip or Zstandard",
    b"\xff\xfe": "it is in UTF-16; convert it to UTF-8",
    b"\xfe\xff": "it is in UTF-16; convert it to UTF-8",
    b"PAR1": "it is a Parquet file; read it with Parquet(path)",
}
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class JsonLines:
    """JSON Lines files, to be read by a `Stream`, alone or as a part of a mixture.

    A number becomes int64 or float64 in all rows, a flat list of numbers an array; anything else stays a Python object.
    A key that a row lacks is None. Blank lines are not rows. The id of a row is "<file>:<line>", counted from 1.

    Args:
        path: a file, a folder (searched recursively for `.jsonl` and `.ndjson`, also with `.gz` or `.zst`), a glob, an
            fsspec URI of one of these, or a list of them.
        columns: keys to read; None for all keys that occur.
        on_bad_row: a line that is not a JSON object is an error that names it ("raise"), or is left out ("skip"). Which
            lines are left out is part of the index, so it is the same for every rank and every resume.
        index: folder for the index and for decompressed files; None puts them beside the data, in `.headway-index`.
        cache: where remote data is kept on a local disk; None reads it remotely in every epoch. Compressed files need
            none: they are read from the index.

    Example:
        >>> from headway.datasets.formats.jsonl import JsonLines
        >>> data = JsonLines("data/*.jsonl.zst", columns=["text"], on_bad_row="skip", index="index")
    """

    path: Paths
    columns: Sequence[str] | None = None
    on_bad_row: OnBadRow = "raise"
    index: PathLike | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        check_options(self.columns, self.on_bad_row)
        object.__setattr__(self, "path", absolute(self.path))

    def open(self) -> LineSource:
        """Read the index of each file, or build it.

        Raises:
            DataError: the data is missing or has no rows, a line is not a JSON object, or a column mixes numbers with
                null.
        """
        found = find_all(self.path, suffixes=SUFFIXES)
        names = name_files(found)
        cached = cached_files(self.cache, found)
        files = [self._open_file(*each) for each in zip(found, names, cached, strict=True)]
        bad = [(file.name, *each) for file in files for each in file.facts["bad"]]
        if bad and self.on_bad_row == "raise":
            name, line, why = bad[0]
            more = f", and {len(bad) - 1} more lines like it" if len(bad) > 1 else ""
            advice = advice_for(name, (*SUFFIXES, ".json", ".json.gz"))
            raise DataError(
                f"line {line} of {name} is not a row: {why}{more}. Mend it, or set on_bad_row='skip'{advice}"
            )
        if not any(len(file.arrays["rows"]) for file in files):
            raise DataError(f"{self} has no rows")
        lengths = [int(file.arrays["length"].max(initial=0)) for file in files if file.cached]
        check_fits(self.cache, max(lengths, default=0), str(self))
        return LineSource(tuple(files), _columns(files, self.columns), len(bad))

    def _open_file(self, found: Found, name: str, cached: Cached | None) -> LineFile:
        folder = index_folder(found, self.index)
        plain = decompressed(found, path_for(found, folder, ".lines"))
        cached = cached if plain is found else None
        arrays, facts = cached_index(path_for(found, folder, ".lines-1.npz"), lambda: _build(plain, cached))
        return LineFile(plain.path, name, arrays, facts, cached)

    def __str__(self) -> str:
        return ", ".join(absolute(self.path))


class LineFile(NamedTuple):
    """A file and its index.

    Attributes:
        path: the decompressed file.
        name: relative to the common folder of all files.
        arrays: `start`, `length`, `rows`, `first_line` and `checksum` of each fragment; `skipped`: numbers of the lines
            that are not rows.
        facts: `digest` of the contents, `bad` lines with the reason, and for each of the `columns` the kinds of values
            with the first line of each.
        cached: how the file is read through a cache; None without one.
    """

    path: str
    name: str
    arrays: dict[str, npt.NDArray[np.int64]]
    facts: dict[str, Any]
    cached: Cached | None


class Lines(NamedTuple):
    """A fragment: consecutive lines of a file.

    Attributes:
        path, name: the file.
        start, length, checksum: its bytes, and their CRC-32.
        num_rows, first_line: rows, and number of the first line.
        skipped: numbers of the lines that are not rows.
        columns: (key, kind) of each column.
        cached: see `LineFile`.
    """

    path: str
    name: str
    start: int
    length: int
    checksum: int
    num_rows: int
    first_line: int
    skipped: tuple[int, ...]
    columns: tuple[tuple[str, str], ...]
    cached: Cached | None = None

    def read(self) -> Rows:
        """Return all rows, in the order of the file.

        Raises:
            DataError: the file is missing, or has changed since its index was built.
        """
        try:
            with open_data(self.path, self.cached) as file:
                file.seek(self.start)
                data = file.read(self.length)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {type(error).__name__}: {error}") from error
        if len(data) != self.length or zlib.crc32(data) != self.checksum:
            raise DataError(
                f"the lines of {self.path} from {self.first_line} on have changed since the run started. Start a new "
                "run for new data"
            )
        skipped = {each - self.first_line for each in self.skipped}
        rows = _load([line for index, line in enumerate(_lines(data)) if index not in skipped])
        return {name: _to_array([row.get(name) for row in rows], kind) for name, kind in self.columns}

    def line(self, row: int) -> int:
        """Return the number of a row's line."""
        line = self.first_line + row
        for each in self.skipped:
            line += each <= line
        return line


@dataclass(frozen=True)
class LineSource:
    """Opened JSON Lines files.

    Attributes:
        files: sorted by name.
        columns: (key, kind) of each column.
        skipped_rows: lines that are left out because they are not JSON objects.
    """

    files: tuple[LineFile, ...]
    columns: tuple[tuple[str, str], ...]
    skipped_rows: int

    @property
    def rows(self) -> int:
        """Number of rows of all fragments."""
        return int(self.fragment_rows.sum())

    @cached_property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each fragment."""
        return np.concatenate([each.arrays["rows"] for each in self.files])

    @cached_property
    def row_bytes(self) -> int:
        """Approximate size of a row."""
        return max(1, sum(int(each.arrays["length"].sum()) for each in self.files) // self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of a digest of every file's name and contents, and of whether lines are left out."""
        digest = hashlib.sha256(b"skip" if self.skipped_rows else b"")
        for file in self.files:
            digest.update(f"{file.name}\0{file.facts['digest']}\0".encode())
        return digest.hexdigest()[:16]

    def fragment(self, index: int) -> Lines:
        """Return a fragment."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        file, at = self.files[which], index - int(self._ends[which]) + len(self.files[which].arrays["rows"])
        start, length, rows, first_line, checksum = (
            int(file.arrays[each][at]) for each in ("start", "length", "rows", "first_line", "checksum")
        )
        end = int(file.arrays["first_line"][at + 1]) if at + 1 < len(file.arrays["rows"]) else np.iinfo(np.int64).max
        skipped = file.arrays["skipped"]
        some = skipped[np.searchsorted(skipped, first_line) : np.searchsorted(skipped, end)]
        return Lines(
            *(file.path, file.name, start, length, checksum, rows, first_line, tuple(some.tolist())),
            *(self.columns, file.cached),
        )

    def row_name(self, index: int, row: int) -> str:
        """Return the id "<file>:<line>" of a row of a fragment."""
        fragment = self.fragment(index)
        return f"{fragment.name}:{fragment.line(row)}"

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([len(each.arrays["rows"]) for each in self.files])


def _build(found: Found, cached: Cached | None) -> Index:
    """Read a file once, and return its index. Its lines are cached, so that the first epoch finds them."""
    fragments: list[tuple[int, int, int, int, int]] = []
    skipped: list[int] = []
    bad: list[tuple[int, str]] = []
    columns: dict[str, dict[str, int]] = {}
    line, start, first_row = 1, 0, 0
    digest = hashlib.sha256()
    for data in _runs(found):
        if not start:
            _check_is_text(found.path, data)
        digest.update(data)
        first, rows = line, 0
        for text in _lines(data):
            row, why = _parse(text)
            if row is None:
                skipped.append(line)
                if why:
                    bad.append((line, why))
            else:
                rows += 1
                first_row = first_row or line
                for name, value in row.items():
                    kinds = columns.setdefault(name, {} if line == first_row else {"null": first_row})
                    kinds.setdefault(_kind(value), line)
                if len(row) < len(columns):
                    for name in columns.keys() - row.keys():
                        columns[name].setdefault("null", line)
            line += 1
        if rows:
            fragments.append((start, len(data), rows, first, zlib.crc32(data)))
            if cached is not None:
                cached.entries.put(entry_name(found.path, cached.version, start, len(data)), data)
        start += len(data)
    table = np.array(fragments, dtype=np.int64).reshape(-1, 5)
    arrays = dict(zip(("start", "length", "rows", "first_line", "checksum"), table.T, strict=True))
    facts = {"digest": digest.hexdigest(), "bad": bad, "columns": columns}
    return Index({**arrays, "skipped": np.array(skipped, dtype=np.int64)}, facts)


def _check_is_text(path: str, start: bytes) -> None:
    """Raise a `DataError` if a file begins like one that is compressed, or in UTF-16."""
    for magic, advice in _NO_TEXT.items():
        if start.startswith(magic):
            raise DataError(f"{path} is not plain text in UTF-8: {advice}")


def _runs(found: Found) -> Iterator[bytes]:
    """Yield the whole file as runs of whole lines."""
    with open_file(found) as file:
        run: list[bytes] = []
        size = 0
        for line in file:
            run.append(line)
            size += len(line)
            if len(run) == _FRAGMENT_ROWS or size >= _FRAGMENT_BYTES:
                yield b"".join(run)
                run, size = [], 0
        if run:
            yield b"".join(run)


def _lines(data: bytes) -> list[bytes]:
    """Return the lines of whole lines; not `splitlines`, which also splits at a carriage return."""
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _load(lines: list[bytes]) -> list[Any]:
    """Return the values of lines, each of which is JSON on its own."""
    # Parsed as one array, which takes a quarter of the time. A line that begins with a byte order mark, or is near the
    # limit of recursion, is JSON only on its own.
    with contextlib.suppress(ValueError, RecursionError):
        values: list[Any] = json.loads("[" + b",".join(lines).decode("utf-8", "surrogatepass") + "]")
        if len(values) == len(lines):
            return values
    return [json.loads(line) for line in lines]


def _parse(text: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the object of a line; or None and why it is not one, which is "" for a blank line."""
    if not (content := text.strip()):
        return None, ""
    if content == b"[":
        return None, "it begins a JSON array, and each line must be an object on its own, as `jq -c '.[]'` writes it"
    if content == b"{":
        return None, "it begins an object that ends in another line; write each on one line, as `jq -c .` does"
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, f"{type(error).__name__}: {error}"
    return (row, "") if isinstance(row, dict) else (None, f"it is a {type(row).__name__}, not an object")


def _kind(value: Any) -> str:
    """Return the kind of a value, as the type of its column depends on it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "object"
    if isinstance(value, float):
        return "float"
    if isinstance(value, list):
        inner = {_kind(each) for each in value}
        if inner <= {"int"}:
            return "ints"
        if inner <= {"int", "float"}:
            return "floats"
    return "object"


def _columns(files: Sequence[LineFile], wanted: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Return (key, kind) of the columns to read.

    Raises:
        DataError: no row has a wanted key, or a column of numbers has a null or a row without it.
    """
    kinds: dict[str, dict[str, tuple[str, int]]] = {}
    for file in files:
        for name, first in file.facts["columns"].items():
            for kind, line in first.items():
                kinds.setdefault(name, {}).setdefault(kind, (file.name, line))
    for name, first in kinds.items():
        for file in files:
            if len(file.arrays["rows"]) and name not in file.facts["columns"]:
                first.setdefault("null", (file.name, int(file.arrays["first_line"][0])))
    if not kinds:
        raise DataError(f"no row of {', '.join(file.name for file in files[:3])} has a key")
    for name in wanted or ():
        if name not in kinds:
            raise DataError(f"no row has the key {name!r}; {nearest(name, kinds)}")
    return tuple((name, _column_kind(name, kinds[name])) for name in (wanted or kinds))


def _column_kind(name: str, first: dict[str, tuple[str, int]]) -> str:
    kinds = first.keys() - {"null"}
    if kinds and kinds <= {"ints", "floats"}:
        return "floats" if "floats" in kinds else "ints"
    if kinds == {"bool"} or (kinds and kinds <= {"int", "float"}):
        if "null" in first:
            file, line = first["null"]
            raise DataError(
                f"{name!r} is a number, but null or missing in line {line} of {file}; tensors cannot hold null. Fill "
                "it in, or select other keys with columns=[...]"
            )
        return "float" if "float" in kinds else kinds.pop()
    return "object"


_DTYPES = {"int": np.int64, "float": np.float64, "bool": np.bool_, "ints": np.int64, "floats": np.float64}


def _to_array(values: list[Any], kind: str) -> npt.NDArray[Any]:
    if kind in ("int", "float", "bool"):
        return np.array(values, dtype=_DTYPES[kind])
    if kind != "object":
        lists: list[Any] = [None if each is None else np.array(each, dtype=_DTYPES[kind]) for each in values]
        if len({None if each is None else len(each) for each in lists}) == 1 and lists[0] is not None:
            return np.stack(lists)
        values = lists
    return to_objects(values)
