"""WebDataset tars as a source: files that share a name up to its first dot are one row, with a column per extension.

An index of each tar is built once, from its headers and from the members with text, which are checked then. A
compressed tar cannot be read from the middle, so it is decompressed once, into the folder of the index.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrow import Rows, to_objects
from ..cache import Cache, Cached, cached_files, check_fits, open_data
from ..errors import DataError
from ..paths import Found, PathLike, Paths, absolute, advice_for, find_all, name_files, nearest
from .base import OnBadRow, check_options
from .index_cache import Index, cached_index, decompressed, index_folder, open_file, path_for, sample_digest

KEY = "__key__"
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
# A fragment ends at the first of these.
_FRAGMENT_ROWS, _FRAGMENT_BYTES = 256, 8 * 2**20

# How the contents of a member become a value, by extension; others stay bytes.
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": lambda data: int(data),
    "txt": lambda data: data.decode(),
    "json": json.loads,
}


@dataclass(frozen=True)
class WebDataset:
    """Tar files of samples, to be read by a `Stream`, alone or as a part of a mixture.

    The members `a/7.jpg`, `a/7.cls` and `a/7.seg.png` are one row with the columns `__key__` ("a/7"), `jpg`, `cls` and
    `seg.png`. Extensions are in lower case. `cls` becomes an integer, `txt` text, `json` a Python object; anything else
    stays bytes, to be decoded in a transform. The id of a row is "<tar>/<key>".

    Args:
        path: a tar file, a folder (searched recursively for `.tar`, also with `.gz` or `.zst`), a glob, an fsspec URI
            of one of these, or a list of them.
        columns: extensions to read; None for the first row's, if no row has others. `__key__` is always there.
        on_bad_row: a row that lacks a column, or whose `cls`, `txt` or `json` is damaged, is an error that names it
            ("raise"), or is left out ("skip"): the same rows on every rank and in every resume.
        index: folder for the index and for decompressed tars; None puts them beside the data, in `.headway-index`.
        cache: where remote data is kept on a local disk; None reads it remotely in every epoch. Compressed tars need
            none: they are read from the index.

    Example:
        >>> from headway.datasets.formats.webdataset import WebDataset
        >>> data = WebDataset("shards/*.tar", columns=["jpg", "cls"], on_bad_row="skip")
    """

    path: Paths
    columns: Sequence[str] | None = None
    on_bad_row: OnBadRow = "raise"
    index: PathLike | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        check_options(self.columns, self.on_bad_row)
        object.__setattr__(self, "path", absolute(self.path))

    def open(self) -> TarSource:
        """Read the index of each tar, or build it.

        Raises:
            DataError: the data is missing, has no rows, or has a damaged row.
        """
        found = find_all(self.path, suffixes=SUFFIXES)
        names = name_files(found)
        folders = [index_folder(each, self.index) for each in found]
        plain = [decompressed(each, path_for(each, to, ".plain")) for each, to in zip(found, folders, strict=True)]
        cached = [
            each if opened is listed else None
            for each, opened, listed in zip(cached_files(self.cache, found), plain, found, strict=True)
        ]
        indexes = [
            cached_index(path_for(listed, to, ".tar-2.npz"), partial(_build, opened, listed.path))
            for listed, opened, to in zip(found, plain, folders, strict=True)
        ]
        known = {extension for index in indexes for extension in index.facts["extensions"]}
        first = next((index.facts["first"] for index in indexes if index.facts["first"]), None)
        if first is None:
            raise DataError(f"{self} has no rows")
        for extension in self.columns or ():
            if extension not in known:
                raise DataError(f"no row has the extension {extension!r}; {nearest(extension, sorted(known))}")
        if self.columns is None:
            _check_has_all(first, dict(zip(names, indexes, strict=True)))
        columns = tuple(self.columns or first)
        named = zip(plain, names, indexes, cached, strict=True)
        tars = [_select(each.path, name, index, columns, cached) for each, name, index, cached in named]
        skipped = [(tar.name, *bad) for tar in tars for bad in tar.bad]
        if skipped and self.on_bad_row == "raise":
            name, key, why = skipped[0]
            more = f", and {len(skipped) - 1} more rows like it" if len(skipped) > 1 else ""
            raise DataError(
                f"{name}/{key} is not a row: {why}{more}. Mend it, select other columns with columns=[...], or set "
                "on_bad_row='skip'"
            )
        if not any(len(tar.keys) for tar in tars):
            raise DataError(f"{self} has no row with {', '.join(columns)}")
        check_fits(self.cache, max(_largest_read(tar) for tar in tars), str(self))
        digests = "\0".join(f"{tar.name}\0{index.facts['digest']}" for tar, index in zip(tars, indexes, strict=True))
        fingerprint = hashlib.sha256(f"{digests}\0{len(skipped)}".encode()).hexdigest()[:16]
        return TarSource(tuple(tars), columns, len(skipped), fingerprint)

    def __str__(self) -> str:
        return ", ".join(absolute(self.path))


class Tar(NamedTuple):
    """The rows of a tar.

    Attributes:
        path, name: the file.
        keys: of the rows.
        starts, sizes: int64 [rows, columns], where the contents of each member are.
        cuts: the first row of each fragment, and the number of rows.
        bad: (key, why) of the rows that are left out.
        cached: how the file is read through a cache; None without one.
    """

    path: str
    name: str
    keys: tuple[str, ...]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    cuts: tuple[int, ...]
    bad: tuple[tuple[str, str], ...]
    cached: Cached | None


class TarRows(NamedTuple):
    """A fragment: consecutive rows of a tar; see `Tar`."""

    path: str
    name: str
    keys: tuple[str, ...]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    columns: tuple[str, ...]
    cached: Cached | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.keys)

    def read(self) -> Rows:
        """Return all rows, in the order of the tar.

        Raises:
            DataError: the tar is missing, is shorter than before, or a member is damaged.
        """
        begin, end = int(self.starts.min()), int((self.starts + self.sizes).max())
        try:
            with open_data(self.path, self.cached) as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {type(error).__name__}: {error}") from error
        if len(data) < end - begin:
            raise DataError(f"{self.path} has become shorter since the run started. Start a new run for new data")
        rows: Rows = {KEY: to_objects(self.keys)}
        for column, extension in enumerate(self.columns):
            values = []
            for row, (start, size) in enumerate(zip(self.starts[:, column], self.sizes[:, column], strict=True)):
                content = data[start - begin : start - begin + size]
                try:
                    values.append(_DECODERS.get(extension, bytes)(content))
                except ValueError as error:
                    raise DataError(
                        f"{self.name}/{self.keys[row]}.{extension} has changed since the run started: {error}. Start a "
                        "new run for new data"
                    ) from error
            rows[extension] = np.array(values, dtype=np.int64) if extension == "cls" else to_objects(values)
        return rows


@dataclass(frozen=True)
class TarSource:
    """Opened tars.

    Attributes:
        tars: sorted by name.
        columns: extensions.
        skipped_rows: rows that are left out because they are damaged.
        fingerprint: of every tar's name, size and headers, and of 4 KiB from its start, middle and end.
    """

    tars: tuple[Tar, ...]
    columns: tuple[str, ...]
    skipped_rows: int
    fingerprint: str

    @property
    def rows(self) -> int:
        """Number of rows of all tars."""
        return int(self.fragment_rows.sum())

    @cached_property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each fragment."""
        return np.concatenate([np.diff(tar.cuts) for tar in self.tars]).astype(np.int64)

    @cached_property
    def row_bytes(self) -> int:
        """Approximate size of a row."""
        return max(1, sum(int(tar.sizes.sum()) for tar in self.tars) // self.rows)

    def fragment(self, index: int) -> TarRows:
        """Return a fragment."""
        tar, at = self._find(index)
        rows = slice(tar.cuts[at], tar.cuts[at + 1])
        return TarRows(tar.path, tar.name, tar.keys[rows], tar.starts[rows], tar.sizes[rows], self.columns, tar.cached)

    def row_name(self, index: int, row: int) -> str:
        """Return the id "<tar>/<key>" of a row of a fragment."""
        tar, at = self._find(index)
        return f"{tar.name}/{tar.keys[tar.cuts[at] + row]}"

    def _find(self, index: int) -> tuple[Tar, int]:
        ends = np.cumsum([len(tar.cuts) - 1 for tar in self.tars])
        which = int(np.searchsorted(ends, index, side="right"))
        return self.tars[which], index - int(ends[which - 1] if which else 0)


def _build(found: Found, shown: str) -> Index:
    """Read the headers of a tar, which is `shown` in errors, and the members with text."""
    last = "at its start"
    rows: list[tuple[str, dict[str, tuple[int, int]]]] = []
    damaged: list[tuple[int, str, str]] = []
    digest = hashlib.sha256(sample_digest(found).encode())
    try:
        with open_file(found) as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                last = f"after the header of {member.name} at byte {member.offset}"
                folder, slash, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if member.isdir() or not stem or not dot:
                    continue
                key, extension = f"{folder}{slash}{stem}", extension.lower()
                if not rows or rows[-1][0] != key:
                    rows.append((key, {}))
                if why := _why_unreadable(tar, member, extension, rows[-1][1]):
                    damaged.append((len(rows) - 1, extension, why))
                rows[-1][1][extension] = member.offset_data, member.size
                digest.update(f"{member.name}\0{member.offset_data}\0{member.size}\0".encode())
            # `tarfile` takes a header that is damaged or cut off for the end.
            raw.seek(tar.offset)
            if (header := raw.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
                cut_off = len(header) < tarfile.BLOCKSIZE
                raise tarfile.ReadError("it has no end marker" if cut_off else "the next header is damaged")
    except tarfile.TarError as error:
        advice = advice_for(shown, SUFFIXES) or ". Write or download it again, or leave it out of path"
        raise DataError(f"{shown} is not a complete tar file: {error}, {last}{advice}") from error
    except OSError as error:
        raise DataError(f"cannot read {shown}: {type(error).__name__}: {error}") from error
    extensions = sorted({extension for _, members in rows for extension in members})
    places = np.full((len(rows), len(extensions), 2), -1, dtype=np.int64)
    column = {extension: index for index, extension in enumerate(extensions)}
    for row, (_, members) in enumerate(rows):
        for extension, place in members.items():
            places[row, column[extension]] = place
    facts = {
        "digest": digest.hexdigest(),
        "extensions": extensions,
        "first": list(rows[0][1]) if rows else [],
        "keys": [key for key, _ in rows],
        "damaged": damaged,
    }
    return Index({"places": places}, facts)


def _why_unreadable(tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, others: Container[str]) -> str:
    """Return why a member cannot be in its row, which has `others`; "" if it can."""
    if extension in others:
        return f"it has several {extension}"
    if member.issparse():
        return f"its {extension} is stored in pieces: write the tar without --sparse"
    if not member.isfile():
        return f"its {extension} is a link or a device: write the tar with --dereference --hard-dereference"
    if extension in _DECODERS and (file := tar.extractfile(member)) is not None:
        try:
            _DECODERS[extension](file.read())
        except ValueError as error:
            return f"its {extension} is damaged: {error}"
    return ""


def _check_has_all(first: Sequence[str], indexes: Mapping[str, Index]) -> None:
    """Raise a `DataError` if a row has an extension that the first row lacks, so that it would be left out."""
    for name, (arrays, facts) in indexes.items():
        for column, extension in enumerate(facts["extensions"]):
            if extension not in first:
                key = facts["keys"][int((arrays["places"][:, column, 0] >= 0).argmax())]
                advice = "name the extensions to read with columns=[...] (a key ends at the first dot of a file name)"
                if facts["keys"].count(key) > 1:
                    advice = "write the members of a row next to each other, as `tar --sort=name` does"
                raise DataError(f"{name}/{key} has {extension}, which the first row lacks: {advice}")


def _select(path: str, name: str, index: Index, columns: Sequence[str], cached: Cached | None) -> Tar:
    """Return the rows of a tar that have all columns, undamaged."""
    facts, places = index.facts, index.arrays["places"]
    bad_members = {row: why for row, extension, why in facts["damaged"] if extension in columns}
    times = Counter(facts["keys"])
    which = [facts["extensions"].index(each) if each in facts["extensions"] else -1 for each in columns]
    # The last column, -1 of `which`, is that of an extension which no row has.
    lacks: npt.NDArray[np.bool_] = np.pad(places[..., 0], ((0, 0), (0, 1)), constant_values=-1)[:, which] < 0
    is_whole = [not any(each) for each in lacks.tolist()]
    whole = Counter(key for row, key in enumerate(facts["keys"]) if is_whole[row] and row not in bad_members)
    keys: list[str] = []
    kept: list[int] = []
    bad: list[tuple[str, str]] = []
    cuts = [0]
    size = 0
    for row, key in enumerate(facts["keys"]):
        why = bad_members.get(row)
        if not is_whole[row]:
            apart = ", or its members are not next to each other in the tar" if times[key] > 1 else ""
            why = f"it has no {columns[int(lacks[row].argmax())]}{apart}"
        elif why is None and whole[key] > 1:
            why = (
                f"{whole[key]} rows of the tar have this key, so their ids would be equal: write the members of a row "
                "next to each other, as `tar --sort=name` does, and give every row another key"
            )
        if why is not None:
            bad.append((key, why))
            continue
        keys.append(key)
        kept.append(row)
        size += int(places[row, :, 1].sum())
        if len(keys) - cuts[-1] == _FRAGMENT_ROWS or size >= _FRAGMENT_BYTES:
            cuts.append(len(keys))
            size = 0
    if cuts[-1] != len(keys):
        cuts.append(len(keys))
    chosen = places[kept][:, which] if kept else np.zeros((0, len(columns), 2), np.int64)
    return Tar(path, name, tuple(keys), chosen[..., 0], chosen[..., 1], tuple(cuts), tuple(bad), cached)


def _largest_read(tar: Tar) -> int:
    """Return the bytes of the largest fragment of a tar."""
    if not len(tar.keys):
        return 0
    firsts = tar.cuts[:-1]
    begin = np.minimum.reduceat(tar.starts.min(axis=1), firsts)
    end = np.maximum.reduceat((tar.starts + tar.sizes).max(axis=1), firsts)
    return int((end - begin).max())
