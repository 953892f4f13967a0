"""The errors of runs and of their storage, below those of the trainer. All survive pickling.

HeadwayError (headway.trainer.errors)
├── ConfigError
│   └── RunConflictError     the run of this name was begun with another config, or somebody trains it right now
├── StorageError             a place for runs cannot be written or read
│   └── DamagedRecordError   the record of a run is there and cannot be made out
└── TrainingFailedError      a worker raised, or died more often than the retries allow
"""

from __future__ import annotations

from typing import Any

from headway.trainer.errors import ConfigError, HeadwayError


class RunConflictError(ConfigError):
    """The run of this name was begun with another config, or somebody trains it right now."""


class StorageError(HeadwayError, OSError):
    """A place for runs cannot be written or read."""


class DamagedRecordError(StorageError):
    """The record of a run or a sweep is there and cannot be made out: to wait does not mend it."""


class TrainingFailedError(HeadwayError, RuntimeError):
    """A worker raised, or workers died more often than the retries allow. `__cause__` is what was raised, if anything.

    Attributes:
        rank: of the worker that failed first, or None where nobody can tell.
        attempt: in which that was.
        step: completed updates when it failed, or None if it had not begun to train.
        worker_traceback: the traceback in the worker, as text; empty if the worker just died.
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
        return (_failed, (str(self), self.rank, self.attempt, self.step, self.worker_traceback))


def _failed(message: str, rank: int | None, attempt: int | None, step: int | None, text: str) -> TrainingFailedError:
    return TrainingFailedError(message, rank=rank, attempt=attempt, step=step, worker_traceback=text)
