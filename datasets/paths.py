"""Which files a path means: one file, a folder, a pattern, a URI. Knows how files are called, not what is in them."""

from __future__ import annotations

import difflib
import os
import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import fsspec

from .errors import DataError

PathLike: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = PathLike | Sequence[PathLike]

SUFFIXES = (".parquet", ".pq", ".parq")


class Found(NamedTuple):
    """A file that was found.

    Attributes:
        path: absolute path or URI, which any process can open from the text alone.
        fs: the file system of fsspec that holds it.
        inner: its path there.
    """

    path: str
    fs: Any
    inner: str


def absolute(path: Paths) -> tuple[str, ...]:
    """Returns the paths so that they mean the same in another process, which may run in another folder."""
    if isinstance(path, (str, os.PathLike)):
        path = [path]
    texts = [os.fspath(each) for each in path]
    return tuple(_absolute(text) for text in texts)


def find(path: str) -> list[Found]:
    """Returns the files that an absolute path or a URI means.

    Raises:
        DataError: there is none, or its file system cannot be reached.
    """
    try:
        fs, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    try:
        if fs.isfile(inner):
            return _named([inner], fs, path)
        if fs.isdir(inner):
            return _named(_parquet_in(fs, inner, path), fs, path)
        if any(mark in inner for mark in "*?["):
            if matches := _matching(fs, inner):
                return _named(matches, fs, path)
            raise DataError(f"no file matches {path}, and no folder that holds {' or '.join(SUFFIXES)}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    parent = posixpath.dirname(inner.rstrip("/"))
    there = (
        sorted(posixpath.basename(each.rstrip("/")) for each in fs.ls(parent, detail=False)) if fs.isdir(parent) else []
    )
    raise DataError(
        f"{path} does not exist; {nearest(posixpath.basename(inner.rstrip('/')), there)} in {parent or '/'}"
    )


def name_files(found: Sequence[Found]) -> list[str]:
    """Returns a name of each file, relative to what all have in common: it stays when they are moved together."""
    # In an archive, it is the archive that moves.
    places = [each.inner if "::" in each.path else each.path for each in found]
    if len(set(places)) < len(places):  # two archives with files of one name
        places = [each.path for each in found]
    if len(places) == 1:
        return [posixpath.basename(places[0])]
    common = posixpath.commonprefix(places)
    return [each[common.rfind("/") + 1 :] for each in places]


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the end of an error about a name that does not exist: the names there are, the likeliest first."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return (f"did you mean {close[0]!r}? " if close else "") + f"There is: {listed or 'nothing'}"


def _absolute(path: str) -> str:
    if "://" not in path:
        return str(Path(path).expanduser().absolute())
    links, chained, last = path.rpartition("::")
    return f"{links}::{_absolute(last)}" if chained and last not in fsspec.available_protocols() else path


def _named(files: Sequence[str], fs: Any, path: str) -> list[Found]:
    """Puts back what fsspec strips from a URI."""
    if "://" not in path:
        return [Found(each, fs, each) for each in files]
    if "::" not in path:
        return [Found(fs.unstrip_protocol(each), fs, each) for each in files]
    found = [Found(_in_chain(path, each), fs, each) for each in files]
    if fsspec.core.url_to_fs(found[0].path) != (fs, files[0]):
        raise DataError(
            f"cannot read {path}: another process would take {found[0].path} for another file than {files[0]}. "
            "Unpack or copy the data, and name it by one URI"
        )
    return found


def _in_chain(path: str, inner: str) -> str:
    """Returns a chain of URIs, such as "zip://*.parquet::s3://bucket/data.zip", for one of the files that it means."""
    head, chained, tail = path.partition("::")
    protocol, has_path, _ = head.partition("://")
    if has_path:
        return (inner if "://" in inner else f"{protocol}://{inner}") + chained + tail
    return f"{head}::{_in_chain(tail, inner)}" if chained else inner  # "simplecache::" has no path of its own


def _matching(fs: Any, pattern: str) -> list[str]:
    """Returns the files that a pattern matches, and those in the folders that it matches, such as Spark writes."""
    files: list[str] = []
    for match in fs.glob(pattern):
        if fs.isfile(match):
            files.append(match)
        elif posixpath.basename(match.rstrip("/"))[:1] not in "._":
            files += [each for each in _visible_in(fs, match) if each.endswith(SUFFIXES)]
    return list(dict.fromkeys(files))  # `**` matches a folder and what is in it


def _visible_in(fs: Any, folder: str) -> list[str]:
    everything = [str(each) for each in fs.find(folder)]
    # Like Spark, Arrow and Hugging Face: what begins with a dot or an underscore is somebody's bookkeeping.
    return [
        each for each in everything if not any(part[:1] in "._" for part in posixpath.relpath(each, folder).split("/"))
    ]


def _parquet_in(fs: Any, folder: str, shown: str) -> list[str]:
    visible = _visible_in(fs, folder)
    if files := [each for each in visible if each.endswith(SUFFIXES)]:
        return files
    there = ", ".join(sorted(posixpath.relpath(each, folder) for each in visible)[:5])
    raise DataError(
        f"the folder {shown} has no file that ends in {', '.join(SUFFIXES)}; there is: {there or 'nothing'}. "
        "`headway data prepare` makes Parquet from text"
    )
