"""Runs the trials of a sweep on Ray Tune: a searcher over the journal, and a scheduler that stops trials gracefully.

Runs in a thread of the driver. All state is in the journal and the runs; Ray Tune's own state is not used.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import fsspec
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher

from ...cluster.ray_env import temporary_env
from ...errors import StorageError
from ...storage.folder import Folder
from ...storage.scratch import scratch_folder
from ..record import Sweep, TrialResult
from ..sampling import Params
from ..search import Search
from .ray_schedulers import GracefulStopScheduler, NotPickled, OnExploit, trial_name
from .trial import SweepTask
from .trial_process import train_trial

_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # Ray Tune's own state is never read.
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    # By default Ray Tune starts processes one after another, and a short trial hands its process on before the next is
    # up, so short trials would never run concurrently. `has_room` limits them instead.
    "TUNE_MAX_PENDING_TRIALS_PG": "1000000",
    "TUNE_WARN_THRESHOLD_S": "60",
    "RAY_AIR_NEW_OUTPUT": "0",
}
_CALLBACKS = "RAY_TUNE_CALLBACKS"

_TUNE_FOLDER = ".ray-tune"

NextTrial = Callable[[], tuple[TrialResult, Params] | Literal["wait"] | None]
OnTrialEnd = Callable[[str, str | None], None]
OnTrialReport = Callable[[str, Mapping[str, Any]], None]


def tune_trials(
    sweep: Sweep,
    search: Search,
    task: SweepTask,
    *,
    next_trial: NextTrial,
    on_end: OnTrialEnd,
    on_report: OnTrialReport,
    on_exploit: OnExploit,
    on_stop_all: Callable[[str], None],
    is_over: Callable[[], bool],
    resources: Callable[[dict[str, Any]], Any],
    at_once: Callable[[], int],
    max_failures: int,
) -> None:
    """Run trials until there are no more.

    Args:
        sweep: the sweep, with its journal.
        search: the definition of the search.
        task: settings for all trials.
        next_trial: returns the next trial and its typed values, "wait" to be asked again later, or None if there is
            none.
        on_end: called with the name of each trial that has ended, and an error that is not in its files, or None.
        on_report: called with the name and report of a trial.
        on_exploit: called when PBT changes a trial, with its name, the other trial's checkpoint and the new values;
            returns the typed values and the checkpoint to resume from.
        on_stop_all: called with a reason when `search.stop` wants to end the sweep.
        is_over: returns True to abort all trials.
        resources: returns the resources of a trial, given its settings.
        at_once: returns how many trials may train at the moment.
        max_failures: how often the process of a trial may die.
    """
    scheduler = GracefulStopScheduler(search, sweep, at_once=at_once, on_exploit=on_exploit, on_stop_all=on_stop_all)
    with (
        temporary_env(_QUIET, unless_set=True),
        temporary_env({_CALLBACKS: _with_no_progress_output(os.environ.get(_CALLBACKS))}),
        _log_errors_only(logging.getLogger("ray.tune")),
        _tune_storage(sweep.folder, are_shared=task.pauses) as (place, filesystem),
    ):
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(train_trial, packed=pickle.dumps(task), trains_here=task.trains_here), resources
            ),
            tune_config=tune.TuneConfig(
                search_alg=JournalSearcher(next_trial, scheduler, on_end=on_end, on_report=on_report),
                scheduler=scheduler,
                num_samples=-1,
                reuse_actors=True,
                trial_name_creator=trial_name,
                trial_dirname_creator=trial_name,
            ),
            run_config=tune.RunConfig(
                name=sweep.record.name,
                storage_path=place,
                storage_filesystem=filesystem,
                stop=AbortStopper(is_over),
                callbacks=list(search.callbacks) or None,
                failure_config=tune.FailureConfig(max_failures=max_failures),
                verbose=0,
            ),
        )
        tuner.fit()


@contextmanager
def _tune_storage(folder: Folder, *, are_shared: bool) -> Iterator[tuple[str, FileSystem | None]]:
    """Yield a temporary path for Ray Tune's files, and its file system; None for the local one.

    Args:
        folder: folder of the sweep.
        are_shared: whether other machines read the files, because trials are paused or exploit others.
    """
    if not are_shared:
        with scratch_folder() as place:
            yield place, None
        return
    try:
        # Through fsspec, as everywhere: Ray Tune would use pyarrow, with fewer stores and without our options.
        filesystem, path = fsspec.core.url_to_fs(folder.path(_TUNE_FOLDER))
        yield path, None if folder.is_local else PyFileSystem(FSSpecHandler(filesystem))
    finally:
        with suppress(StorageError):
            folder.remove_folder(_TUNE_FOLDER)


@contextmanager
def _log_errors_only(logger: logging.Logger) -> Iterator[None]:
    """Log only errors in this context: Ray Tune warns about loggers that are disabled."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class JournalSearcher(NotPickled, Searcher):  # type: ignore[misc]
    """Gives Ray Tune one trial after another while there is room, and forwards their reports.

    A callback could not do that: given any, Ray Tune imports all its integrations, which takes two seconds.

    Args:
        next_trial: returns the next trial and its values, or None.
        scheduler: knows how many trials train.
        on_end, on_report: see `tune_trials`.
    """

    def __init__(
        self, next_trial: NextTrial, scheduler: GracefulStopScheduler, *, on_end: OnTrialEnd, on_report: OnTrialReport
    ) -> None:
        super().__init__(metric="metric", mode="min")
        self._next, self._scheduler = next_trial, scheduler
        self._on_end, self._on_report = on_end, on_report
        self._names: dict[str, str] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return a trial, None to be asked again later, or FINISHED."""
        if not self._scheduler.has_room():
            return None
        found = self._next()
        if found is None:
            return str(Searcher.FINISHED)
        if found == "wait":
            return None
        trial, values = found
        self._names[trial_id] = trial.name
        return {**values, "trial": trial.name, "resume": trial.resume}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **_: Any) -> bool:
        """Accept and ignore them."""
        return True

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Forward it."""
        self._on_report(self._names[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Forward it."""
        self._on_end(self._names[trial_id], self._scheduler.training_error(trial_id) if error else None)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the state is in the journal."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""


class AbortStopper(NotPickled, tune.Stopper):  # type: ignore[misc]
    """Aborts all trials without checkpoints.

    Args:
        is_over: returns True to abort.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """End no trial by itself."""
        return False

    def stop_all(self) -> bool:
        """Return whether to abort."""
        return self._is_over()


class NoProgressOutput(TrialProgressCallback):  # type: ignore[misc]
    """Replaces Ray Tune's progress table. Ray Tune creates it by its name in the environment."""

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_error(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Print nothing."""


def _with_no_progress_output(callbacks: str | None) -> str:
    """Return the names of callbacks with `NoProgressOutput` added once."""
    silence = f"{__name__}.{NoProgressOutput.__name__}"
    return ",".join([*(name for name in (callbacks or "").split(",") if name not in ("", silence)), silence])
