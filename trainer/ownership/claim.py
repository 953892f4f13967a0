"""One owner for a run's folder, whoever starts the run: a process claims the folder before it writes there.

On one machine, a dead owner is known at once, by its process. For another machine or container an owner counts as gone
when its heartbeats have not changed while this process watched for `ABANDONED_AFTER_S`: no clocks are compared.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType

from ..errors import RunConflictError
from .claim_files import Claim, ClaimFiles, normalized
from .process import ProcessId

BEAT_EVERY_S = 10.0
ABANDONED_AFTER_S = 60.0
_LOOK_EVERY_S = 1.0
_LOOK_REMOTE_EVERY_S = 3.0

_claimed_by_driver: ContextVar[str | None] = ContextVar("claimed_by_driver", default=None)
# Folders that a driver in this process owns.
_driven: set[str] = set()


class OwnedByAnotherError(RunConflictError):
    """A live process owns a folder.

    Attributes:
        owner: the process, for messages.
    """

    def __init__(self, place: str, owner: str) -> None:
        super().__init__(place, owner)
        self.owner = owner

    def __str__(self) -> str:
        return f"{self.owner} is training in {self.args[0]}: wait until it has ended, stop it, or use another folder"


class Ownership:
    """This process's claim on a folder, kept alive by a thread until `release`.

    Args:
        files: the claims on the folder.
        claim: the claim in force.
        on_lost: called once, in the thread, with a message, if another process takes the folder over, as it may after
            this one was suspended.
    """

    def __init__(self, files: ClaimFiles, claim: Claim, on_lost: Callable[[str], None] | None = None) -> None:
        self._files, self._claim, self._on_lost = files, claim, on_lost
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._lost_to: str | None = None
        self._thread = threading.Thread(target=self._beat, name="headway-owner", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """Id of the claim."""
        return self._claim.id

    def problem(self) -> str | None:
        """Return a message if another process has taken the folder over, else None. Reads one or two small files.

        Raises:
            OSError: the storage cannot be read.
        """
        if self._lost_to is None:
            found = self._files.newest()
            # None while a network file system is not mounted.
            if found is not None and found.id != self._claim.id:
                self._lost_to = f"{found.process or 'another process'} has taken over {self._files.place}"
        return self._lost_to

    def release(self) -> None:
        """Give the folder up, so that another process may have it at once. May be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        _driven.discard(self._files.place)
        # If this fails, the next owner finds that this process has ended.
        with self._lock, contextlib.suppress(Exception):
            if self.problem() is None:
                self._files.replace(replace(self._claim, released=True))

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_EVERY_S):
            # A storage that is away for a while costs heartbeats, not the run.
            with self._lock, contextlib.suppress(Exception):
                if self._ended.is_set():
                    return
                if (problem := self.problem()) is not None:
                    if self._on_lost is not None:
                        self._on_lost(problem)
                    return
                self._claim = replace(self._claim, beats=self._claim.beats + 1)
                self._files.replace(self._claim)


def acquire(
    place: str,
    *,
    on_lost: Callable[[str], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
    as_driver: bool = False,
    take_over: bool = False,
) -> Ownership:
    """Claim a folder for this process; it is created if it does not exist.

    Args:
        place: path or fsspec URI of the run's folder.
        on_lost: see `Ownership`.
        say: is given a line before a wait for the heartbeats of an owner on another machine.
        as_driver: also take the folder from this process, whose trainers do not claim it as long as it is owned.
        take_over: also take it from a live process.

    Raises:
        OwnedByAnotherError: a live process owns the folder.
        OSError: the folder cannot be read or written; some file systems have their own errors.
    """
    files = ClaimFiles(place)
    while True:
        newest = files.newest() if take_over else _newest_if_free(files, say, from_itself=as_driver)
        claim = Claim.next_after(newest)
        if files.create(claim):
            files.remove_before(claim)
            if as_driver:
                _driven.add(files.place)
            return Ownership(files, claim, on_lost)


def check_unowned(
    place: str, *, say: Callable[[str], None] = lambda _: None, watch: bool = True, from_itself: bool = False
) -> None:
    """Check that `acquire` would succeed, without writing.

    Args:
        place: path or fsspec URI of the run's folder.
        say: as for `acquire`.
        watch: wait for heartbeats if the owner is on another machine; otherwise that owner counts as gone.
        from_itself: a claim of this process does not count.

    Raises:
        OwnedByAnotherError: a live process owns the folder.
        OSError: the folder cannot be read.
    """
    _newest_if_free(ClaimFiles(place), say, from_itself=from_itself, watch=watch)


@contextlib.contextmanager
def claimed_by_driver(place: str) -> Iterator[None]:
    """In this context and thread `Trainer.fit` does not claim the folder: the driver of its run has done so."""
    token = _claimed_by_driver.set(normalized(place))
    try:
        yield
    finally:
        _claimed_by_driver.reset(token)


def is_claimed_by_driver(place: str) -> bool:
    """Return whether the driver of the run owns this folder, so that a trainer here does not claim it."""
    return normalized(place) in (_claimed_by_driver.get(), *_driven)


def _newest_if_free(
    files: ClaimFiles, say: Callable[[str], None], *, from_itself: bool = False, watch: bool = True
) -> Claim | None:
    """Return the newest claim, which is released or abandoned; None if there is none.

    Raises:
        OwnedByAnotherError: a live process has made it.
    """
    seen: Claim | None = None
    since_s = 0.0
    while True:
        newest = files.newest()
        if newest is None or newest.released:
            return newest
        process = newest.process
        if process is not None and process == ProcessId.this() and from_itself:
            return newest
        alive = process.is_alive() if process is not None else None
        if alive is False:
            return newest
        is_same = seen is not None and seen.id == newest.id
        if alive or (is_same and seen != newest):
            raise OwnedByAnotherError(files.place, str(process or "another process"))
        if not watch:
            return newest
        if not is_same:
            seen, since_s = newest, time.monotonic()
            say(
                f"{files.place} was used by {process or 'an unknown process'}: waiting up to {ABANDONED_AFTER_S:.0f} s "
                "for a sign of life from it"
            )
        if time.monotonic() - since_s > ABANDONED_AFTER_S:
            return newest
        time.sleep(_LOOK_EVERY_S if files.is_local else _LOOK_REMOTE_EVERY_S)
