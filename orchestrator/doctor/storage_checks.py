"""Checks a storage: whether it can be written, how long each operation takes, and whether all nodes share it.

`probe_storage` is sent to the nodes by value, as `node_facts` is, and imports the standard library only; fsspec where
the storage is a URI.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .report import Finding, redact

_TOKEN = "token"
_SLOW_S = 1.0


def probe_storage(folder: str, name: str, token: str) -> dict[str, Any]:
    """Read the token in a folder, then write, rename, list, read and delete a file. Never creates the folder.

    Args:
        folder: absolute path or URI, in which the driver has written the token.
        name: of the file, unlike that of any other node.
        token: the text that the driver has written.

    Returns:
        `token`: "same", "absent", "other", or "" if reading failed; `seconds` by operation; `failed`: the operation
        that failed, with `error`, else "".
    """
    seconds: dict[str, float] = {}
    answer: dict[str, Any] = {"token": "", "seconds": seconds, "failed": "", "error": ""}
    step = "open"

    def timed(operation: str, do: Callable[[], Any]) -> Any:
        nonlocal step
        step, started_s = operation, time.monotonic()
        value = do()
        seconds[operation] = time.monotonic() - started_s
        return value

    try:
        is_local = "://" not in folder
        if is_local:
            read, operations = _local_operations(folder, name)
        else:
            read, operations = _remote_operations(folder, name)
        try:
            seen = timed("read", lambda: read(_TOKEN))
            answer["token"] = "same" if seen == token.encode() else "other"
        except (FileNotFoundError, NotADirectoryError):
            answer["token"] = "absent"
            return answer
        for operation, do in operations.items():
            timed(operation, do)
    except Exception as error:  # each file system has its own exceptions
        answer.update(failed=step, error=f"{type(error).__name__}: {error}")
    return answer


def _local_operations(folder: str, name: str) -> tuple[Callable[[str], bytes], dict[str, Callable[[], Any]]]:
    part, final = os.path.join(folder, f".{name}.part"), os.path.join(folder, name)

    def read(file: str) -> bytes:
        with open(os.path.join(folder, file), "rb") as opened:
            return opened.read()

    def write() -> None:
        with open(part, "wb") as opened:
            opened.write(name.encode())

    def fsync() -> None:
        for path in (part, folder):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    return read, {
        "write": write,
        "fsync": fsync,
        "rename": lambda: os.replace(part, final),
        "list": lambda: _expect(name in os.listdir(folder), "the file written is not listed"),
        "read": lambda: _expect(read(name) == name.encode(), "the text read differs from the text written"),
        "delete": lambda: os.remove(final),
    }


def _remote_operations(folder: str, name: str) -> tuple[Callable[[str], bytes], dict[str, Callable[[], Any]]]:
    from fsspec.core import url_to_fs

    files, root = url_to_fs(folder)
    path = f"{root}/{name}"

    def listed() -> None:
        files.invalidate_cache()
        entries = [str(each).rstrip("/").rpartition("/")[2] for each in files.ls(root, detail=False)]
        _expect(name in entries, "the object written is not listed")

    # No rename and no fsync: an object is complete and durable, or it does not exist.
    return lambda file: bytes(files.cat_file(f"{root}/{file}")), {
        "write": lambda: files.pipe_file(path, name.encode()),
        "list": listed,
        "read": lambda: _expect(files.cat_file(path) == name.encode(), "the text read differs from the text written"),
        "delete": lambda: files.rm_file(path),
    }


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise OSError(otherwise)


@dataclass(frozen=True)
class StorageToken:
    """A token that the driver has written into a temporary folder of the storage."""

    storage: str
    folder: str
    text: str

    def arguments(self, name: str) -> tuple[str, str, str]:
        """Return the arguments of `probe_storage` for a node."""
        return self.folder, f"node-{name}", self.text


@contextlib.contextmanager
def storage_token(storage: str) -> Iterator[StorageToken]:
    """Write a token into a new folder in the storage, and remove the folder, and the storage if it was created here.

    Args:
        storage: absolute path or URI.

    Raises:
        StorageError: the storage cannot be written.
    """
    from ..storage.folder import Folder

    name, text = f".headway-doctor-{secrets.token_hex(4)}", secrets.token_hex(16)
    created = list(_absent_parents(storage))
    folder = Folder(storage).child(name)
    try:
        folder.prepare()
        folder.write(_TOKEN, text)
        yield StorageToken(storage, folder.place, text)
    finally:
        with contextlib.suppress(Exception):
            Folder(storage).remove_folder(name)
        for path in created:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _absent_parents(storage: str) -> Iterator[str]:
    """Yield a local folder and its parents, as far as they do not exist, innermost first."""
    path = storage
    while "://" not in path and path and not os.path.exists(path) and os.path.dirname(path) != path:
        yield path
        path = os.path.dirname(path)


def judge_storage(node: str, storage: str, answer: Mapping[str, Any]) -> Finding:
    """Judge the answer of `probe_storage` on a node."""
    place, seconds = redact(storage), answer["seconds"]
    if answer["token"] in ("absent", "other"):
        seen = "is not there" if answer["token"] == "absent" else "has another text there"
        return Finding(
            "storage", node, "failed", f"{place} is not shared: a token that the driver wrote {seen} on {node}",
            f"mount the same folder at {place} on {node} and on the driver's machine, or use a URI that all nodes "
            "reach, such as storage=s3://bucket/runs",
        )  # fmt: skip
    if answer["failed"]:
        return not_usable(node, storage, f"{answer['failed']}: {answer['error']}")
    times = ", ".join(f"{operation} {1000 * each:.3g} ms" for operation, each in seconds.items())
    slow = [operation for operation, each in seconds.items() if each > _SLOW_S]
    if slow:
        advice = "use a faster storage for runs, or one that is nearer to the nodes; look for other load on it"
        return Finding("storage", node, "warning", f"{place} is slow: {times}", advice)
    return Finding("storage", node, "ok", f"{place}: {times}")


def not_usable(node: str, storage: str, error: str) -> Finding:
    """Return the finding for a storage that cannot be used on a node."""
    if "://" in storage:
        advice = (
            "check the bucket's name, the credentials of this node (environment, profile or role) and its permission "
            "to list, read, write and delete objects"
        )
    else:
        advice = (
            "make it a folder that the user of Headway and Ray may write, on a disk that is neither full nor read-only"
        )
    return Finding("storage", node, "failed", f"{redact(storage)} cannot be used: {redact(error)}", advice)
