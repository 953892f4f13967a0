"""Runs the trials of a sweep on Ray Tune: a searcher over the journal, and a scheduler that stops trials gracefully.

Runs in a thread of the driver. All state is in the journal and the runs; Ray Tune's own state is not used.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import fsspec
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher
from ray.tune.stopper import FunctionStopper

from ..cluster.ray_env import temporary_env
from ..errors import StorageError
from ..runs.requests import StopRequest, request_stop
from ..runs.run import Run, now
from ..storage.folder import Folder, retry_storage
from ..storage.scratch import scratch_folder
from .record import ENDED_EARLY, PRUNED, Sweep, Trial
from .replay import reports_of_ended_trials
from .schedulers import ASHA, PBT, HyperBand, MedianStopping, is_tune_scheduler
from .search import Params, Search
from .space import Axis, Choice, Grid
from .trial import SweepTask, read_pointer
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

NextTrial = Callable[[], tuple[Trial, Params] | Literal["wait"] | None]
OnTrialEnd = Callable[[str, str | None], None]
OnTrialReport = Callable[[str, Mapping[str, Any]], None]
OnExploit = Callable[[str, str, Params], tuple[Params, str]]


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
    kind = type(search.scheduler).__name__
    scheduler = GracefulStopScheduler(
        _scheduler(search), sweep, kind=kind, at_once=at_once, on_exploit=on_exploit,
        stopper=as_stopper(search.stop), on_stop_all=on_stop_all,
        earlier_reports=retry_storage(lambda: reports_of_ended_trials(sweep, search)),
    )  # fmt: skip
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
                trial_name_creator=_name,
                trial_dirname_creator=_name,
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


def _name(trial: TuneTrial) -> str:
    return str(trial.config["trial"])


class NotPickled:
    """Pickles as a bare object. Ray Tune pickles its parts for its own restore, which is not used."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (object, ())


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


def as_stopper(stop: Any) -> tune.Stopper | None:
    """Return `Search.stop` as a stopper of Ray Tune: a dict ends a trial when a reported value is as large."""
    if stop is None or isinstance(stop, tune.Stopper):
        return copy.deepcopy(stop)
    if isinstance(stop, Mapping):
        return FunctionStopper(lambda _, result: any(result.get(key, -math.inf) >= most for key, most in stop.items()))
    return FunctionStopper(stop)


class GracefulStopScheduler(NotPickled, TrialScheduler):  # type: ignore[misc]
    """Stops trials through their runs, so that they save a checkpoint first; limits how many run concurrently.

    Args:
        inner: Ray's scheduler, which decides.
        sweep: the sweep.
        kind: name of the scheduler, for reasons.
        at_once, on_exploit: see `tune_trials`.
        earlier_reports: reports of trials that ended under an earlier driver, by name.
        stopper: ends trials besides the inner scheduler.
        on_stop_all: see `tune_trials`.
    """

    def __init__(
        self,
        inner: TrialScheduler,
        sweep: Sweep,
        *,
        kind: str,
        at_once: Callable[[], int],
        on_exploit: OnExploit,
        earlier_reports: Mapping[str, Sequence[dict[str, Any]]],
        stopper: tune.Stopper | None = None,
        on_stop_all: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._stopper, self._on_stop_all = stopper, on_stop_all
        self._earlier_reports = earlier_reports
        self._kind = kind
        self._inner, self._sweep, self._at_once, self._on_exploit = inner, sweep, at_once, on_exploit
        self._is_pbt = isinstance(inner, PopulationBasedTraining)
        self._stopped: set[str] = set()
        self._trials: dict[str, TuneTrial] = {}

    def has_room(self) -> bool:
        """Return whether one more trial may train."""
        training = (TuneTrial.PENDING, TuneTrial.RUNNING)
        return sum(trial.status in training for trial in self._trials.values()) < self._at_once()

    def training_error(self, trial_id: str) -> str:
        """Return the last line of a trial's error, from Ray Tune's file on this machine."""
        lines = Path(str(self._trials[trial_id].error_file)).read_text().strip().splitlines()
        return lines[-1] if lines else "its process died"

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Accept and ignore them: the inner scheduler has them already."""
        return True

    def on_trial_add(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it."""
        if not self._trials:
            self._replay(controller)
        self._trials[trial.trial_id] = trial
        self._inner.on_trial_add(ControllerWithoutSearch(controller), trial)

    def on_trial_error(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it."""
        self._inner.on_trial_error(controller, trial)

    def on_trial_result(self, controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """Let the inner scheduler decide. A pruned trial gets a request to stop, and continues until it has saved."""
        if trial.trial_id in self._stopped:
            # The inner scheduler expects no more reports of a stopped trial.
            return str(TrialScheduler.CONTINUE)
        before = trial.config
        decision = str(self._inner.on_trial_result(controller, trial, result))
        if trial.config is not before:
            self._apply_exploit(trial, before)
        if decision == TrialScheduler.STOP:
            return self._stop(trial, f"{PRUNED}{self._kind} after {_count(self._sweep, result)}")
        if self._stopper is not None:
            if self._stopper(_name(trial), result):
                return self._stop(trial, f"{ENDED_EARLY} after {_count(self._sweep, result)}")
            if self._stopper.stop_all():
                self._on_stop_all(f"search.stop ({type(self._stopper).__name__}) ended the sweep")
        if decision == TrialScheduler.PAUSE and self._is_pbt and len(self._trials) <= self._at_once():
            # PBT pauses to make room for a waiting trial, but all have room.
            return str(TrialScheduler.CONTINUE)
        return decision

    def _stop(self, trial: TuneTrial, reason: str) -> str:
        """Request that a trial stops; it continues until it has saved."""
        self._stopped.add(trial.trial_id)
        folder = Folder(self._sweep.folder.path(_name(trial)))
        retry_storage(lambda: request_stop(folder, StopRequest(reason=reason)))
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, controller: Any, trial: TuneTrial, result: dict[str, Any]) -> None:
        """Forward it, unless the trial never reported: the inner scheduler takes the last report for an evaluation."""
        if "evaluations" in result:
            self._inner.on_trial_complete(controller, trial, result)

    def on_trial_remove(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it. A trial that a synchronous scheduler removes while it is paused has ended."""
        self._inner.on_trial_remove(controller, trial)
        if trial.status == TuneTrial.PAUSED:
            run = Run(self._sweep.folder.path(_name(trial)))
            reason = f"{PRUNED}{self._kind} after {_count(self._sweep, trial.last_result)}"
            retry_storage(lambda: run.update(status="stopped", reason=reason, ended=now()))

    def choose_trial_to_run(self, controller: Any) -> TuneTrial | None:
        """Let the inner scheduler choose; a paused trial only if there is room."""
        chosen = self._inner.choose_trial_to_run(controller)
        if chosen is not None and chosen.status == TuneTrial.PAUSED and not self.has_room():
            return None
        return chosen

    def debug_string(self) -> str:
        """Return the debug text of the inner scheduler."""
        return str(self._inner.debug_string())

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the state is in the journal."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""

    def _replay(self, controller: Any) -> None:
        """Replay the trials that ended under an earlier driver into the inner scheduler."""
        for name, reports in self._earlier_reports.items():
            if not reports:
                continue
            trial = replayed_trial(name)
            self._inner.on_trial_add(controller, trial)
            for report in reports:
                if self._inner.on_trial_result(controller, trial, report) == TrialScheduler.STOP:
                    break
            self._inner.on_trial_complete(controller, trial, reports[-1])

    def _apply_exploit(self, trial: TuneTrial, before: dict[str, Any]) -> None:
        checkpoint = trial.latest_checkpoint_result.checkpoint
        name = str(before["trial"])
        values = {path: value for path, value in trial.config.items() if path not in ("trial", "resume")}
        typed, resume = self._on_exploit(name, read_pointer(checkpoint)["checkpoint"], values)
        trial.set_config({**typed, "trial": name, "resume": resume})


def replayed_trial(name: str) -> TuneTrial:
    """Return a trial that ended under an earlier driver, for schedulers."""
    trial = TuneTrial("headway", trial_id=name, config={"trial": name}, stub=True)
    trial.set_status(TuneTrial.TERMINATED)
    return trial


class ControllerWithoutSearch:
    """Ray Tune's controller without its searcher, because PBT refuses to run with one."""

    search_alg = None

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)


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


def _scheduler(search: Search) -> TrialScheduler:
    if is_tune_scheduler(search.scheduler):
        # A copy, because it keeps what it has heard of the trials.
        scheduler: TrialScheduler = copy.deepcopy(search.scheduler)
        scheduler.set_search_properties(search.metric, search.mode)
        return scheduler
    common = {"time_attr": "evaluations", "metric": search.metric, "mode": search.mode}
    match search.scheduler:
        case ASHA(grace=grace, reduction=reduction, max_evaluations=most):
            return AsyncHyperBandScheduler(
                **common, grace_period=grace, reduction_factor=reduction, max_t=most, stop_last_trials=False
            )
        case HyperBand() as wanted:
            return SeededHyperBand(wanted, **common)
        case MedianStopping(grace=grace, trials=trials):
            # An infinite time slice: otherwise it pauses trials until more of the others have reported.
            return MedianStoppingRule(
                **common, grace_period=grace, min_samples_required=trials, min_time_slice=math.inf
            )
        case PBT() as pbt:
            generator = random.Random(f"{search.seed} pbt")
            return PopulationBasedTraining(
                **common, perturbation_interval=pbt.every, quantile_fraction=pbt.quantile,
                resample_probability=pbt.resample, log_config=False,
                hyperparam_mutations={path: _mutation(axis, generator) for path, axis in search.varied.items()},
                custom_explore_fn=lambda values: _clamp_to_axes(values, search.varied),
            )  # fmt: skip
    return FIFOScheduler()


class SeededHyperBand(TrialScheduler):  # type: ignore[misc]
    """Asynchronous HyperBand whose bracket follows from the trial's index; Ray Tune draws it at random.

    A bracket is a scheduler of its own, with a later first rung.
    """

    def __init__(self, wanted: HyperBand, **common: Any) -> None:
        super().__init__()
        self._wanted = wanted
        self._brackets = [
            AsyncHyperBandScheduler(
                **common,
                grace_period=first,
                reduction_factor=wanted.reduction,
                # Ray Tune rounds a quotient of logarithms down.
                max_t=wanted.max_evaluations * (1 + 1e-9),
                stop_last_trials=False,
            )
            for first in wanted.first_looks
        ]

    def _bracket(self, trial: TuneTrial) -> TrialScheduler:
        return self._brackets[self._wanted.bracket_of(int(_name(trial).rpartition("-")[2]))]

    def on_trial_add(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it to the bracket."""
        self._bracket(trial).on_trial_add(controller, trial)

    def on_trial_error(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it to the bracket."""
        self._bracket(trial).on_trial_error(controller, trial)

    def on_trial_result(self, controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """Return the decision of the bracket."""
        return str(self._bracket(trial).on_trial_result(controller, trial, result))

    def on_trial_complete(self, controller: Any, trial: TuneTrial, result: dict[str, Any]) -> None:
        """Forward it to the bracket."""
        self._bracket(trial).on_trial_complete(controller, trial, result)

    def on_trial_remove(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it to the bracket."""
        self._bracket(trial).on_trial_remove(controller, trial)

    def choose_trial_to_run(self, controller: Any) -> TuneTrial | None:
        """Return the first trial that can run."""
        return self._brackets[0].choose_trial_to_run(controller)

    def debug_string(self) -> str:
        """Return the debug texts of the brackets."""
        return "\n".join(each.debug_string() for each in self._brackets)


def _mutation(axis: Axis, generator: random.Random) -> Any:
    return list(axis.values) if isinstance(axis, (Choice, Grid)) else lambda: axis.draw(generator)


def _clamp_to_axes(values: dict[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Move perturbed values to the nearest ones of their axes, in place."""
    for path, axis in axes.items():
        if path in values and not isinstance(axis, (Choice, Grid)):
            values[path] = axis.snap(values[path])
    return values


def _count(sweep: Sweep, result: Mapping[str, Any]) -> str:
    """Return after how many evaluations a trial was, as text."""
    kind = "record" if sweep.record.search["metric"].startswith("train/") else "evaluation"
    count = result["evaluations"]
    return f"{count} {kind}{'s'[: count != 1]}"
