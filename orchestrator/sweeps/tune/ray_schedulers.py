"""Ray Tune's schedulers for a sweep: trials that they stop save first, and earlier drivers' trials are replayed."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.stopper import FunctionStopper

from ...runs.metric_history import metric_by_step
from ...runs.pointer import read_pointer
from ...runs.requests import StopRequest, read_stop_request, request_stop
from ...runs.run import Run, now
from ...storage.folder import Folder, retry_storage
from ..driver import SweepDriver
from ..record import ENDED_EARLY, PRUNED, Sweep
from ..sampling import Params
from ..schedulers import ASHA, PBT, HyperBand, MedianStopping, is_tune_scheduler, tune_setting
from ..search import Search
from ..space import Choice, Grid
from .reporting import make_report

logger = logging.getLogger(__name__)


class NotPickled:
    """Pickles as a bare object. Ray Tune pickles its parts for its own restore, which is not used."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (object, ())


class GracefulStopScheduler(NotPickled, TrialScheduler):  # type: ignore[misc]
    """Stops trials through their runs, so that they save a checkpoint first; limits how many run concurrently.

    Ray's schedulers decide, one for each bracket of `HyperBand`.

    Args:
        driver: of the sweep.

    Attributes:
        has_all_trials: whether no more trials will be added.
    """

    def __init__(self, driver: SweepDriver) -> None:
        super().__init__()
        self.has_all_trials = False
        self._driver, self._search, self._sweep = driver, driver.search, driver.sweep
        self._stopper = as_stopper(self._search.stop)
        self._inner = make_schedulers(self._search)
        self._is_pbt = isinstance(self._inner[0], PopulationBasedTraining)
        self._is_async_pbt = self._is_pbt and not tune_setting(self._inner[0], "synch", True)
        self._stopped: set[str] = set()
        self._trials: dict[str, TuneTrial] = {}

    def has_room(self) -> bool:
        """Return whether one more trial may train."""
        return self._num_training < self._driver.max_concurrent

    @property
    def _num_training(self) -> int:
        return sum(trial.status in (TuneTrial.PENDING, TuneTrial.RUNNING) for trial in self._trials.values())

    def training_error(self, trial_id: str) -> str:
        """Return the last line of a trial's error, from Ray Tune's file on this machine."""
        lines = Path(str(self._trials[trial_id].error_file)).read_text().strip().splitlines()
        return lines[-1] if lines else "its process died"

    def on_trial_add(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it."""
        if not self._trials:
            self._replay(controller)
        self._trials[trial.trial_id] = trial
        try:
            self._of(trial).on_trial_add(ControllerWithoutSearch(controller), trial)
        except ValueError as error:
            if not self._is_pbt:
                raise
            logger.warning("this version of Ray Tune does not let PBT run, so trials train without it: %s", error)
            self._inner, self._is_pbt, self._is_async_pbt = [FIFOScheduler()], False, False

    def on_trial_error(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it."""
        self._of(trial).on_trial_error(controller, trial)

    def on_trial_result(self, controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """Let Ray's scheduler decide. A pruned trial gets a request to stop, and continues until it has saved."""
        if trial.trial_id in self._stopped:
            # Ray's scheduler expects no more reports of a stopped trial.
            return str(TrialScheduler.CONTINUE)
        decision = self._decide(controller, trial, result)
        if decision == TrialScheduler.STOP:
            return self._stop(trial, self._pruned(result))
        if self._stopper is not None:
            if self._stopper(trial_name(trial), result):
                return self._stop(trial, f"{ENDED_EARLY} after {self._count(result)}")
            if self._stopper.stop_all():
                self._driver.reach_goal(f"search.stop ({type(self._stopper).__name__}) ended the sweep")
        if decision == TrialScheduler.PAUSE and self._is_async_pbt and len(self._trials) <= self._driver.max_concurrent:
            # PBT pauses to make room for a waiting trial, but all have room.
            return str(TrialScheduler.CONTINUE)
        return decision

    def _decide(self, controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """Return the decision of Ray's scheduler, after applying its changes of trials."""
        before = {each: each.config for each in self._trials.values()}
        decision = str(self._of(trial).on_trial_result(controller, trial, result))
        # Synchronous PBT changes the trials that wait, too.
        for each, config in before.items():
            if each.config is not config:
                self._apply_exploit(each, config)
        return decision

    def on_trial_complete(self, controller: Any, trial: TuneTrial, result: dict[str, Any]) -> None:
        """Forward it; one that never reported is removed, because the last report counts as an evaluation."""
        if "evaluations" in result:
            self._of(trial).on_trial_complete(controller, trial, result)
        else:
            self._of(trial).on_trial_remove(controller, trial)
        # Ray Tune is still pausing it, and calls this, not `on_trial_remove`, if a scheduler ends it meanwhile.
        if trial.is_saving:
            self._end_paused(trial)

    def on_trial_remove(self, controller: Any, trial: TuneTrial) -> None:
        """Forward it."""
        self._of(trial).on_trial_remove(controller, trial)
        if trial.status == TuneTrial.PAUSED:
            self._end_paused(trial)

    def _end_paused(self, trial: TuneTrial) -> None:
        """Record the end of a trial that a synchronous scheduler ends while it is paused.

        Its process may still be saving, and then records that it was interrupted; the request says what it was.
        """
        if retry_storage(lambda: read_stop_request(self._sweep.folder)) is not None:
            return
        run, reason = Run(self._sweep.folder.path(trial_name(trial))), self._pruned(trial.last_result)
        retry_storage(lambda: request_stop(run.folder, StopRequest(reason=reason)))
        retry_storage(lambda: run.update(status="stopped", reason=reason, ended=now()))

    def choose_trial_to_run(self, controller: Any) -> TuneTrial | None:
        """Let Ray's scheduler choose; a paused trial only if there is room."""
        chosen = self._inner[0].choose_trial_to_run(controller)
        if chosen is not None and chosen.status == TuneTrial.PAUSED and not self.has_room():
            return None
        if chosen is None and self.has_all_trials and not self._num_training:
            return self._end_waiting(controller)
        return chosen

    def _end_waiting(self, controller: Any) -> TuneTrial | None:
        """End trials that would stay paused forever, or return one to resume, unless the sweep is being stopped.

        Ray's `HyperBandScheduler` forgets a trial that is still saving when the last one of its bracket ends. Its
        synchronous `PopulationBasedTraining` waits for trials that have ended.
        """
        paused = [trial for trial in self._trials.values() if trial.status == TuneTrial.PAUSED]
        if not paused or retry_storage(lambda: read_stop_request(self._sweep.folder)) is not None:
            return None
        if self._is_pbt:
            # Its last report again: now no other trial is behind.
            self._decide(controller, paused[0], paused[0].last_result)
            if (chosen := self._inner[0].choose_trial_to_run(controller)) is not None:
                return chosen
        for trial in paused:
            controller.stop_trial(trial)
        return None

    def debug_string(self) -> str:
        """Return the debug text of Ray's scheduler."""
        return str(self._inner[0].debug_string())

    def _of(self, trial: TuneTrial) -> TrialScheduler:
        """Return the scheduler of a trial: that of its bracket. Ray Tune would draw the bracket at random."""
        if len(self._inner) == 1:
            return self._inner[0]
        return self._inner[self._search.scheduler.bracket_of(int(trial_name(trial).rpartition("-")[2]))]

    def _replay(self, controller: Any) -> None:
        """Replay the trials that ended under an earlier driver."""
        earlier = retry_storage(lambda: reports_of_ended_trials(self._sweep, self._search))
        for name, reports in earlier.items():
            if not reports:
                continue
            trial = replayed_trial(name)
            inner = self._of(trial)
            inner.on_trial_add(controller, trial)
            for report in reports:
                if inner.on_trial_result(controller, trial, report) == TrialScheduler.STOP:
                    break
            inner.on_trial_complete(controller, trial, reports[-1])

    def _stop(self, trial: TuneTrial, reason: str) -> str:
        """Request that a trial stops; it continues until it has saved."""
        self._stopped.add(trial.trial_id)
        folder = Folder(self._sweep.folder.path(trial_name(trial)))
        retry_storage(lambda: request_stop(folder, StopRequest(reason=reason)))
        return str(TrialScheduler.CONTINUE)

    def _apply_exploit(self, trial: TuneTrial, before: dict[str, Any]) -> None:
        checkpoint = trial.latest_checkpoint_result.checkpoint
        name = str(before["trial"])
        values = {path: value for path, value in trial.config.items() if path not in ("trial", "resume")}
        source = read_pointer(checkpoint).checkpoint
        typed, resume = retry_storage(lambda: self._driver.exploited(name, source, values))
        trial.set_config({**typed, "trial": name, "resume": resume})

    def _pruned(self, result: Mapping[str, Any]) -> str:
        return f"{PRUNED}{type(self._search.scheduler).__name__} after {self._count(result)}"

    def _count(self, result: Mapping[str, Any]) -> str:
        kind = "record" if self._search.metric.startswith("train/") else "evaluation"
        return f"{result['evaluations']} {kind}{'s'[: result['evaluations'] != 1]}"


def trial_name(trial: TuneTrial) -> str:
    """Return the name of a trial in the sweep."""
    return str(trial.config["trial"])


def replayed_trial(name: str) -> TuneTrial:
    """Return a trial that ended under an earlier driver, for schedulers."""
    trial = TuneTrial("headway", trial_id=name, config={"trial": name}, stub=True)
    trial.set_status(TuneTrial.TERMINATED)
    return trial


def reports_of_ended_trials(sweep: Sweep, search: Search) -> dict[str, list[dict[str, Any]]]:
    """Return the evaluations of ended trials by name, as they were reported to Ray Tune.

    Empty for `PBT` and others that pause trials: they choose among running ones.
    """
    if search.scheduler is None or search.pauses:
        return {}

    def reports_of(name: str) -> list[dict[str, Any]]:
        values = metric_by_step(Folder(sweep.folder.path(name)), search.metric)
        return [
            make_report(search.metric, search.mode, value, number, step)
            for number, (step, value) in enumerate(values.items(), 1)
        ]

    ended = sweep.ended_trials()
    return dict(zip(ended, sweep.folder.map(reports_of, ended), strict=True))


class ControllerWithoutSearch:
    """Ray Tune's controller without its searcher, because PBT refuses to run with one."""

    search_alg = None

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)


def as_stopper(stop: Any) -> tune.Stopper | None:
    """Return `Search.stop` as a stopper of Ray Tune: a dict ends a trial when a reported value is as large."""
    if stop is None or isinstance(stop, tune.Stopper):
        return copy.deepcopy(stop)
    if isinstance(stop, Mapping):
        return FunctionStopper(lambda _, result: any(result.get(key, -math.inf) >= most for key, most in stop.items()))
    return FunctionStopper(stop)


def make_schedulers(search: Search) -> Sequence[TrialScheduler]:
    """Return Ray's scheduler for a search; several for the brackets of `HyperBand`."""
    if is_tune_scheduler(search.scheduler):
        # A copy, because it keeps what it has heard of the trials.
        scheduler: TrialScheduler = copy.deepcopy(search.scheduler)
        scheduler.set_search_properties(search.metric, search.mode)
        return [scheduler]
    common = {"time_attr": "evaluations", "metric": search.metric, "mode": search.mode}
    match search.scheduler:
        case ASHA(grace=grace, reduction=reduction, max_evaluations=most):
            first_rungs, max_t = [float(grace)], float(most)
        case HyperBand(first_looks=first_rungs, reduction=reduction, max_evaluations=most):
            # Ray Tune rounds a quotient of logarithms down.
            max_t = most * (1 + 1e-9)
        case MedianStopping(grace=grace, trials=trials):
            # An infinite time slice: otherwise it pauses trials until more of the others have reported.
            slice_s = math.inf
            return [
                MedianStoppingRule(**common, grace_period=grace, min_samples_required=trials, min_time_slice=slice_s)
            ]
        case PBT() as pbt:
            axes, generator = search.varied, random.Random(f"{search.seed} pbt")

            def clamped(values: Params) -> Params:
                return {**values, **{path: axis.snap(values[path]) for path, axis in axes.items()}}

            return [
                PopulationBasedTraining(
                    **common,
                    perturbation_interval=pbt.every,
                    quantile_fraction=pbt.quantile,
                    resample_probability=pbt.resample,
                    log_config=False,
                    custom_explore_fn=clamped,
                    hyperparam_mutations={
                        path: list(axis.values) if isinstance(axis, (Choice, Grid)) else partial(axis.draw, generator)
                        for path, axis in axes.items()
                    },
                )  # fmt: skip
            ]
        case _:
            return [FIFOScheduler()]
    return [
        AsyncHyperBandScheduler(
            **common, grace_period=first, reduction_factor=reduction, max_t=max_t, stop_last_trials=False
        )
        for first in first_rungs
    ]
