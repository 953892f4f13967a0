"""Runs the trials of a sweep on Ray Tune: a searcher over the journal, and a scheduler that stops trials gracefully.

Runs in a thread of the driver. All state is in the journal and the runs; Ray Tune's own state is not used.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import fsspec
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher
from ray.tune.stopper import NoopStopper

from ...cluster.ray_env import log_errors_only, temporary_env
from ...errors import StorageError
from ...runs.resume import ResumeOptions
from ...storage.folder import Folder
from ...storage.scratch import scratch_folder
from ...train.train_loop import Start
from ..driver import SweepDriver
from ..objectives import constrained
from .ray_schedulers import GracefulStopScheduler, NotPickled, trial_name
from .trial import SweepTask, trial_resources
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


def tune_trials(driver: SweepDriver) -> None:
    """Run trials of a sweep until its driver has no more."""
    experiment, search, sweep = driver.experiment, driver.search, driver.sweep
    scheduler = GracefulStopScheduler(driver)
    trains_here = experiment.scaling.trains_in_trial
    silence = f"{__name__}.{NoProgressOutput.__name__}"
    task = SweepTask(
        start=Start.of(experiment, ResumeOptions()), sweep_dir=sweep.sweep_dir, metric=search.metric, mode=search.mode,
        pauses=search.pauses, objectives=tuple(search.objectives), constraints=constrained(search.constraints),
    )  # fmt: skip
    with (
        temporary_env(_QUIET, unless_set=True),
        temporary_env({_CALLBACKS: ",".join(filter(None, [os.environ.get(_CALLBACKS), silence]))}),
        # Ray Tune warns about loggers that are disabled.
        log_errors_only("ray.tune"),
        _tune_storage(sweep.folder, are_shared=search.pauses) as (place, filesystem),
    ):
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(train_trial, packed=pickle.dumps(task), trains_here=trains_here),
                partial(trial_resources, experiment.scaling),
            ),
            tune_config=tune.TuneConfig(
                search_alg=JournalSearcher(driver, scheduler),
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
                stop=AbortStopper(driver),
                callbacks=list(search.callbacks) or None,
                failure_config=tune.FailureConfig(max_failures=experiment.retries.max_failures),
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


class JournalSearcher(NotPickled, Searcher):  # type: ignore[misc]
    """Gives Ray Tune one trial after another while there is room, and forwards their reports.

    A callback could not do that: given any, Ray Tune imports all its integrations, which takes two seconds.

    Args:
        driver: gives the trials, and gets their reports.
        scheduler: knows how many trials train.
    """

    def __init__(self, driver: SweepDriver, scheduler: GracefulStopScheduler) -> None:
        super().__init__(metric="metric", mode="min")
        self._driver, self._scheduler = driver, scheduler
        self._names: dict[str, str] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return a trial, None to be asked again later, or FINISHED."""
        if not self._scheduler.has_room():
            return None
        found = self._driver.next_trial()
        if found is None:
            self._scheduler.has_all_trials = True
            return str(Searcher.FINISHED)
        if found == "wait":
            return None
        trial, values = found
        self._names[trial_id] = trial.name
        return {**values, "trial": trial.name, "resume": trial.resume}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Forward it."""
        self._driver.reported(self._names[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Forward it."""
        self._driver.ended(self._names[trial_id], self._scheduler.training_error(trial_id) if error else None)

    def on_pause(self, trial_id: str) -> None:
        """Forward it: `HyperBandForBOHB` tells the searcher, which counts the trials that train."""
        self._driver.forward("on_pause", self._names[trial_id])

    def on_unpause(self, trial_id: str) -> None:
        """Forward it."""
        self._driver.forward("on_unpause", self._names[trial_id])

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the state is in the journal."""


class AbortStopper(NotPickled, NoopStopper):  # type: ignore[misc]
    """Aborts all trials without checkpoints when the driver says so."""

    def __init__(self, driver: SweepDriver) -> None:
        self._driver = driver

    def stop_all(self) -> bool:
        """Return whether to abort."""
        return self._driver.is_over


class NoProgressOutput(TrialProgressCallback):  # type: ignore[misc]
    """Replaces Ray Tune's progress output, which `verbose=0` leaves on for trials that end without a report.

    Ray Tune creates it by its name in the environment.
    """

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Print nothing."""
