"""Errors of runs and their storage, in the trainer's hierarchy. All errors can be pickled.

HeadwayError (headway.trainer.errors)
├── ConfigError
│   └── RunConflictError     a run of this name has another config, or is being trained by another process
├── StorageError             the storage of runs cannot be read or written
│   └── DamagedRecordError   the record of a run or a sweep exists but cannot be parsed
└── TrainingFailedError      a worker raised, or workers failed more often than the retries allow
"""

from __future__ import annotations

from typing import Any

from headway.trainer.errors import HeadwayError, RunConflictError as RunConflictError


class StorageError(HeadwayError, OSError):
    """The storage of runs cannot be read or written."""


class DamagedRecordError(StorageError):
    """The record of a run or a sweep exists but cannot be parsed, so waiting does not help."""


class TrainingFailedError(HeadwayError, RuntimeError):
    """A worker raised, or workers failed more often than the retries allow. `__cause__` is the exception, if any.

    Attributes:
        rank: the rank that failed first; None if unknown.
        attempt: the attempt in which it failed.
        step: completed updates at the failure; None if training had not started.
        worker_traceback: the worker's traceback as text; empty if its process died.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        step: int | None = None,
        worker_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank: int | None = rank
        self.attempt: int | None = attempt
        self.step: int | None = step
        self.worker_traceback: str = worker_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (str(self), self.rank, self.attempt, self.step, self.worker_traceback))


def _restore(message: str, rank: int | None, attempt: int | None, step: int | None, text: str) -> TrainingFailedError:
    return TrainingFailedError(message, rank=rank, attempt=attempt, step=step, worker_traceback=text)
