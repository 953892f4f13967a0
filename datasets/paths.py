"""Resolves paths to files: a file, a folder, a glob or a URI. Never reads the files."""

from __future__ import annotations

import difflib
import os
import posixpath
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import fsspec

from .errors import DataError

PathLike: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = PathLike | Sequence[PathLike]

Suffixes: TypeAlias = tuple[str, ...]

SUFFIXES: Suffixes = (".parquet", ".pq", ".parq")

_READERS: dict[Suffixes, str] = {
    SUFFIXES: "Read Parquet with Parquet(path)",
    (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"): "Read JSON Lines with JsonLines(path)",
    (".json", ".json.gz"): "Name the files if each line is an object, as in JsonLines('data/*.json')",
    (".tar", ".tar.gz", ".tgz", ".tar.zst"): "Read tars with WebDataset(path)",
    (".csv", ".tsv", ".csv.gz", ".tsv.gz"): (
        "Read CSV with HuggingFace(datasets.Dataset.from_csv(path)), or convert it to Parquet with pandas or polars"
    ),
    (".arrow",): "Read a folder of save_to_disk with HuggingFace(datasets.load_from_disk(path))",
    (".jpg", ".jpeg", ".png", ".gif", ".webp", ".tif", ".tiff"): "Read images with Images(path)",
    (".txt", ".md"): "Convert text with `headway data prepare`",
    (".npy", ".npz", ".bin", ".h5", ".hdf5", ".mdb", ".db", ".sqlite", ".pt", ".pkl"): (
        "Read such files with a torch Dataset of your own, in a DataLoader"
    ),
    (".xz", ".bz2"): "Compress it with gzip or Zstandard",
}
"""What reads the files of each ending."""

INDEX = ".headway-index"
"""The folder beside files of data for their indexes."""

PREPARING = "preparing.json"
"""The file in a folder that `headway data prepare` has not finished."""


class Found(NamedTuple):
    """A file found.

    Attributes:
        path: absolute path or URI, which any process can open.
        fs: the fsspec file system that holds it.
        inner: its path in that file system.
    """

    path: str
    fs: Any
    inner: str


def absolute(path: Paths) -> tuple[str, ...]:
    """Return absolute paths, which mean the same in a process with another working directory."""
    if isinstance(path, (str, os.PathLike)):
        path = [path]
    texts = [os.fspath(each) for each in path]
    return tuple(_absolute(text) for text in texts)


def find(path: str, *, suffixes: Suffixes = SUFFIXES) -> list[Found]:
    """Return the files that an absolute path or a URI stands for; of a folder, those that end in one of `suffixes`.

    Raises:
        DataError: there are none, or the file system cannot be reached.
    """
    try:
        fs, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    try:
        if fs.isfile(inner):
            return _named([inner], fs, path)
        if fs.isdir(inner):
            return _named(_files_in(fs, inner, path, suffixes), fs, path)
        if any(mark in inner for mark in "*?["):
            if matches := _matching(fs, inner, suffixes):
                return _named(matches, fs, path)
            raise DataError(f"no file matches {path}, and no folder with {' or '.join(suffixes)} files")
    except OSError as error:
        raise DataError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if "{" in inner:
        raise DataError(f"{path} does not exist, because braces are not expanded: use * instead, or a list of paths")
    parent = posixpath.dirname(inner.rstrip("/"))
    names = [posixpath.basename(each.rstrip("/")) for each in fs.ls(parent, detail=False)] if fs.isdir(parent) else []
    there = sorted(each for each in names if each != INDEX)
    raise DataError(
        f"{path} does not exist; {nearest(posixpath.basename(inner.rstrip('/')), there)} in {parent or '/'}"
    )


def find_all(path: Paths, *, suffixes: Suffixes = SUFFIXES) -> list[Found]:
    """Return the files that some paths stand for, sorted.

    Raises:
        DataError: there are none, or one is listed twice.
    """
    if not (wanted := absolute(path)):
        raise DataError("path is empty: it must name at least one file (did a glob match nothing?)")
    found = sorted((each for one in wanted for each in find(one, suffixes=suffixes)), key=lambda each: each.path)
    if twice := [one.path for one, other in pairwise(found) if one.path == other.path]:
        raise DataError(f"{twice[0]} is listed twice in path, so its rows would be read twice; list it once")
    return found


def name_files(found: Sequence[Found]) -> list[str]:
    """Return a name for each file relative to their common folder, so that moving them together keeps the names."""
    # Inside an archive, the archive's own path is left out, because the archive may move.
    places = [each.inner if "::" in each.path else each.path for each in found]
    if len(set(places)) < len(places):  # two archives with files of the same name
        places = [each.path for each in found]
    if len(places) == 1:
        return [posixpath.basename(places[0])]
    common = posixpath.commonprefix(places)
    return [each[common.rfind("/") + 1 :] for each in places]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return "did you mean ...? There is: ...", for an error about a name that does not exist."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return (f"did you mean {close[0]!r}? There" if close else "there") + f" is: {listed or 'nothing'}"


def _absolute(path: str) -> str:
    if "://" not in path:
        return str(Path(path).expanduser().absolute())
    links, chained, last = path.rpartition("::")
    return f"{links}::{_absolute(last)}" if chained and last not in fsspec.available_protocols() else path


def _named(files: Sequence[str], fs: Any, path: str) -> list[Found]:
    """Restore the protocol that fsspec strips from a URI."""
    if "://" not in path:
        return [Found(each, fs, each) for each in files]
    if "::" not in path:
        return [Found(fs.unstrip_protocol(each), fs, each) for each in files]
    found = [Found(_in_chain(path, each), fs, each) for each in files]
    if fsspec.core.url_to_fs(found[0].path) != (fs, files[0]):
        raise DataError(
            f"cannot read {path}: {found[0].path} would open another file than {files[0]} in another process. "
            "Unpack or copy the data, and give a single URI"
        )
    return found


def _in_chain(path: str, inner: str) -> str:
    """Return the URI chain of one file, given a chain such as "zip://*.parquet::s3://bucket/data.zip"."""
    head, chained, tail = path.partition("::")
    protocol, has_path, _ = head.partition("://")
    if has_path:
        return (inner if "://" in inner else f"{protocol}://{inner}") + chained + tail
    return f"{head}::{_in_chain(tail, inner)}" if chained else inner  # "simplecache::" has no path


def _matching(fs: Any, pattern: str, suffixes: Suffixes) -> list[str]:
    """Return the files that a glob matches, and the files of the format in folders it matches, such as Spark writes."""
    files: list[str] = []
    for match in fs.glob(pattern):
        if fs.isfile(match):
            files.append(match)
        elif posixpath.basename(match.rstrip("/"))[:1] not in "._":
            files += [each for each in _visible_in(fs, match) if each.lower().endswith(suffixes)]
    return list(dict.fromkeys(files))  # `**` matches a folder and also its contents


def _visible_in(fs: Any, folder: str) -> list[str]:
    everything = [str(each) for each in fs.find(folder)]
    # As in Spark, Arrow and Hugging Face, names that begin with a dot or an underscore are metadata.
    return [
        each for each in everything if not any(part[:1] in "._" for part in posixpath.relpath(each, folder).split("/"))
    ]


def _files_in(fs: Any, folder: str, shown: str, suffixes: Suffixes) -> list[str]:
    visible = _visible_in(fs, folder)
    if unfinished := [each for each in visible if posixpath.basename(each) == PREPARING]:
        raise DataError(
            f"{posixpath.dirname(unfinished[0])} is not complete: it is being prepared, or this was interrupted. Wait "
            "for it, run the same `headway data prepare` again, or delete it"
        )
    if files := [each for each in visible if each.lower().endswith(suffixes)]:
        return files
    there = ", ".join(sorted(posixpath.relpath(each, folder) for each in visible)[:5])
    advice = next(filter(None, (advice_for(each, suffixes) for each in sorted(visible))), "")
    raise DataError(
        f"the folder {shown} has no file that ends in {', '.join(suffixes)}; there is: {there or 'nothing'}{advice}"
    )


def advice_for(name: str, suffixes: Suffixes) -> str:
    """Return what reads a file that a format of these suffixes cannot, by its ending; "" if that is unknown."""
    if name.lower().endswith(suffixes):
        return ""
    advice = next((advice for endings, advice in _READERS.items() if name.lower().endswith(endings)), None)
    return "" if advice is None else f". {advice}"
