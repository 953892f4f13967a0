"""A sweep stops the trials that Ray Tune's schedulers would stop by themselves, given the same results."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from headway.orchestrator import ASHA, PBT, LogUniform, MedianStopping, Search
from headway.orchestrator.runs.requests import read_stop_request
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.tune.ray_schedulers import GracefulStopScheduler, make_schedulers
from headway.orchestrator.sweeps.tune.reporting import make_report

METRIC, TRIALS, EVALUATIONS = "validation/loss", 16, 9
CONTROLLER = SimpleNamespace(search_alg=None, get_live_trials=list)
COMMON = {"time_attr": "evaluations", "metric": METRIC, "mode": "min"}


@pytest.mark.parametrize(
    ("named", "own"),
    [
        (
            ASHA(grace=1, reduction=3, max_evaluations=EVALUATIONS),
            AsyncHyperBandScheduler(
                **COMMON, grace_period=1, reduction_factor=3, max_t=EVALUATIONS, stop_last_trials=False
            ),
        ),
        (
            MedianStopping(grace=2, trials=3),
            MedianStoppingRule(**COMMON, grace_period=2, min_samples_required=3, min_time_slice=1e9),
        ),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_trials_are_stopped_by_the_same_results(tmp_path: Path, named: Any, own: Any, seed: int) -> None:
    search = Search(space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, trials=TRIALS, scheduler=named)
    # A copy, because it keeps what it has heard.
    own, ours = copy.deepcopy(own), GracefulStopScheduler(_driver(search, tmp_path))
    trials = {}
    for name in (f"trial-{index:03}" for index in range(TRIALS)):
        folder = Folder(str(tmp_path / name))
        folder.prepare()
        pair = [Trial("headway", trial_id=name, config={"trial": name}, stub=True) for _ in range(2)]
        for scheduler, trial in zip((ours, own), pair, strict=True):
            trial.set_status(Trial.RUNNING)
            scheduler.on_trial_add(CONTROLLER, trial)
        trials[name] = pair
    stopped: set[str] = set()
    for name, report in _reports(random.Random(seed), stopped):
        mine, theirs = trials[name]
        assert ours.on_trial_result(CONTROLLER, mine, dict(report)) == TrialScheduler.CONTINUE
        if own.on_trial_result(CONTROLLER, theirs, dict(report)) == TrialScheduler.STOP:
            own.on_trial_complete(CONTROLLER, theirs, dict(report))
            stopped.add(name)
        requested = read_stop_request(Folder(str(tmp_path / name))) is not None
        assert requested == (name in stopped), (name, report)
    assert len(stopped) > 0


def test_pbt_is_that_of_ray_tune_with_the_settings_of_the_search() -> None:
    search = Search(
        space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, trials=4, scheduler=PBT(every=3, quantile=0.5)
    )
    (scheduler,) = make_schedulers(search)
    assert type(scheduler) is PopulationBasedTraining
    assert (scheduler._perturbation_interval, scheduler._quantile_fraction) == (3, 0.5)


def _driver(search: Search, folder: Path) -> Any:
    """Return a driver of a sweep without trials of an earlier start."""
    sweep = SimpleNamespace(folder=Folder(str(folder)), ended_trials=list)
    return SimpleNamespace(search=search, sweep=sweep, max_concurrent=TRIALS)


def _reports(generator: random.Random, stopped: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield reports of the trials in a random order, none of a trial that has been stopped."""
    quality = {f"trial-{index:03}": generator.random() for index in range(TRIALS)}
    done = dict.fromkeys(quality, 0)
    while open_trials := [name for name in quality if done[name] < EVALUATIONS and name not in stopped]:
        name = generator.choice(open_trials)
        done[name] += 1
        value = quality[name] + generator.gauss(0, 0.1) / done[name]
        yield name, make_report(METRIC, "min", value, done[name], 10 * done[name])
