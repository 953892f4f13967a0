"""Searchers of Ray Tune, and objects of a user, behind the journal of a sweep. Without Ray processes."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    ResourceChangingScheduler,
)
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Repeater, Searcher
from ray.tune.search.optuna import OptunaSearch
from rich.console import Console

from headway.orchestrator import (
    ASHA,
    Choice,
    Experiment,
    LogUniform,
    RandInt,
    RunConflictError,
    Search,
    TrainingFailedError,
    Uniform,
    When,
)
from headway.orchestrator.runs.open import open_sweep
from headway.orchestrator.sweeps.console import SweepConsole
from headway.orchestrator.sweeps.driver import SweepDriver
from headway.orchestrator.sweeps.optuna_search import PastTrial
from headway.orchestrator.sweeps.record import Sweep
from headway.orchestrator.sweeps.schedulers import tune_setting
from headway.orchestrator.sweeps.tune.searcher import TuneSearcher
from headway.orchestrator.train.signals import StopSignals
from headway.trainer.errors import ConfigError
from tests.tiny import TinyConfig, TinyTrainer

RATE, WIDTH, DROPOUT = "config.learning_rate", "config.width", "config.dropout"
SPACE = {RATE: LogUniform(1e-4, 1e-1), WIDTH: RandInt(2, 9, step=3), "config.schedule": ["cosine"], DROPOUT: 0.5}


class Remembering(Searcher):
    """Counts what it hears. Saves nothing, and can learn results."""

    def __init__(self) -> None:
        super().__init__()
        self.space: dict[str, Any] = {}
        self.asked: list[str] = []
        self.learned: list[Any] = []

    def set_search_properties(self, metric: Any, mode: Any, config: Any, **_: Any) -> bool:
        self.space = config
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        if len(self.asked) == 5:
            return str(Searcher.FINISHED)
        self.asked.append(trial_id)
        return {RATE: 0.01, WIDTH: 4, "config.schedule": 0}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.learned.append((trial_id, result and result["validation/loss"], error))

    def add_evaluated_point(self, parameters: Any, value: float, *_: Any, **__: Any) -> None:
        self.learned.append((parameters, value))


class Forgetful(Remembering):
    """Cannot even learn."""

    add_evaluated_point = Searcher.add_evaluated_point


def experiment(storage: Path) -> Experiment:
    return Experiment(name="tiny", trainer=TinyTrainer, config=TinyConfig(max_steps=4), storage=str(storage))


def searcher_of(search: Search, storage: Path) -> TuneSearcher:
    return TuneSearcher(search, open_sweep(experiment(storage), search).folder)


def ended(values: Any, metric: float | None) -> PastTrial:
    return PastTrial(values=values, state="failed" if metric is None else "ended", metric=metric, steps=4)


def test_a_searcher_hears_of_results_once_and_values_fit_the_axes(tmp_path: Path) -> None:
    search = Search(space=SPACE, algorithm=Remembering())
    asked = searcher_of(search, tmp_path)
    inner: Any = asked._searcher
    assert inner is not search.algorithm
    assert list(inner.space) == [RATE, WIDTH, "config.schedule"]
    first = asked.suggest(0, [])
    # Rounded to the step, the choice by its index, and the fixed value.
    assert first == {RATE: 0.01, WIDTH: 5, "config.schedule": "cosine", DROPOUT: 0.5}
    second = asked.suggest(1, [PastTrial(values=first, state="training")])
    third = asked.suggest(2, [ended(first, 0.5), ended(second, None)])
    assert asked.suggest(3, [ended(first, 0.5), ended(second, None), ended(third, 0.25)]) == first
    assert inner.learned == [("0-0", 0.5, False), ("1-1", None, True), ("2-2", 0.25, False)]
    # A trial that it has not suggested, such as a point to begin with.
    later = searcher_of(search, tmp_path / "other")
    later.suggest(1, [ended(first, 0.5)])
    assert later._searcher.learned == [({RATE: 0.01, WIDTH: 5, "config.schedule": 0}, 0.5)]


@pytest.mark.parametrize("killed_before_the_journal", [False, True])
def test_the_state_of_a_searcher_survives_its_driver(tmp_path: Path, killed_before_the_journal: bool) -> None:
    search = Search(space=SPACE, algorithm=OptunaSearch(seed=3), trials=40)
    folder = open_sweep(experiment(tmp_path), search).folder
    undisturbed = TuneSearcher(search, open_sweep(experiment(tmp_path / "undisturbed"), search).folder)
    assert undisturbed.note is None
    tried: list[PastTrial] = []
    expected: list[PastTrial] = []
    driver = TuneSearcher(search, folder)
    for index in range(30):
        if index in (1, 12, 25):
            if killed_before_the_journal:
                driver.suggest(index, tried)
            driver = TuneSearcher(search, folder)
        for asked, trials in ((driver, tried), (undisturbed, expected)):
            values: Any = asked.suggest(index, trials)
            trials.append(ended(values, values[RATE]))
    studied = driver._searcher._ot_study.trials
    assert sum(trial.state.name == "COMPLETE" for trial in studied) == 29
    assert len({each.values[RATE] for each in tried}) == 30, "a restored searcher does not repeat itself"
    if killed_before_the_journal:
        assert sum(trial.state.name == "FAIL" for trial in studied) == 3, "suggestions that no trial had"
    else:
        assert tried == expected


def test_what_a_killed_driver_would_lose_is_said_before_the_sweep_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = []
    for number, made in enumerate((OptunaSearch(), Remembering(), Forgetful())):
        lines.append(searcher_of(Search(space=SPACE, algorithm=made), tmp_path / str(number)).note or "")
    assert lines[0] == ""
    assert "A new study created" not in capfd.readouterr().err
    assert "Remembering cannot save its state: if the driver is killed, it will learn all results again" in lines[1]
    assert "Forgetful can neither save its state nor learn earlier results" in lines[2]


def test_a_searcher_that_cannot_learn_the_results_of_points_is_named_before_the_sweep_starts(tmp_path: Path) -> None:
    points = [{RATE: 0.01}]
    for number, (made, learns) in enumerate(((OptunaSearch(), True), (Remembering(), True), (Forgetful(), False))):
        note = searcher_of(Search(space=SPACE, algorithm=made, points=points), tmp_path / str(number)).note or ""
        assert ("points are trained, but it does not learn their results" in note) is not learns
    assert "Forgetful can neither save" in note


def test_a_limiter_limits_and_a_searcher_may_have_enough(tmp_path: Path) -> None:
    search = Search(space=SPACE, algorithm=ConcurrencyLimiter(Remembering(), max_concurrent=2), trials=40)
    asked = searcher_of(search, tmp_path)
    training = [PastTrial(values={RATE: 0.01}, state="training")] * 2
    assert asked.suggest(2, training) == "wait"
    tried: list[PastTrial] = []
    while isinstance(values := asked.suggest(len(tried), tried), dict):
        tried.append(ended(values, 0.5))
    assert (len(tried), values, asked.exhausted) == (5, "finished", "Remembering suggests no more trials")
    with pytest.raises(ConfigError, match="batch"):
        searcher_of(
            Search(space=SPACE, algorithm=ConcurrencyLimiter(Remembering(), max_concurrent=2, batch=True)),
            tmp_path / "b",
        )


def test_a_searcher_that_waits_for_nothing_ends_the_sweep(tmp_path: Path) -> None:
    class Waiting(Remembering):
        def suggest(self, trial_id: str) -> Any:
            return None

    asked = searcher_of(Search(space=SPACE, algorithm=Waiting()), tmp_path)
    training = [PastTrial(values={RATE: 0.01}, state="training")]
    assert {asked.suggest(1, training) for _ in range(200)} == {"wait"}
    assert [asked.suggest(0, []) for _ in range(101)] == ["wait"] * 100 + ["finished"]
    assert asked.exhausted == "Waiting suggests no more trials"


def test_what_a_searcher_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="When cannot be used with OptunaSearch"):
        Search(space={WIDTH: [4, 8], RATE: When(WIDTH, 4, Uniform(0, 1))}, algorithm=OptunaSearch())
    with pytest.raises(ConfigError, match=r"algorithm=Repeater\(\.\.\.\) would repeat trials of a sweep with the same"):
        Search(space=SPACE, algorithm=Repeater(OptunaSearch(), repeat=2))
    with pytest.raises(ConfigError, match="algorithm must be a Searcher, got a BasicVariantGenerator"):
        Search(space=SPACE, algorithm=BasicVariantGenerator())
    with pytest.raises(ConfigError, match=r"or an object with suggest\(index, tried\), got <object"):
        Search(space=SPACE, algorithm=object())
    import optuna

    own = OptunaSearch(space={RATE: optuna.distributions.FloatDistribution(0, 1)}, metric="validation/loss", mode="min")
    with pytest.raises(ConfigError, match="OptunaSearch already has a space"):
        searcher_of(Search(space=SPACE, algorithm=own), tmp_path)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"scheduler": ASHAScheduler(metric="loss", mode="min")}, "has metric='loss' and mode='min', but the search"),
        ({"scheduler": ASHAScheduler(metric="validation/loss", mode="max")}, "create it without metric and mode"),
        ({"scheduler": ASHAScheduler(mode="min")}, "has metric=None and mode='min', but the search has"),
        ({"scheduler": ASHAScheduler(time_attr="epoch")}, "time_attr must be one of evaluations, step, .* got 'epoch'"),
        (
            {"scheduler": PopulationBasedTraining(hyperparam_mutations={"config.hidden": [1, 2]})},
            "changes config.hidden, which is not in the space",
        ),
        ({"scheduler": ResourceChangingScheduler()}, "would change the resources of trials"),
        ({"stop": {"epochs": 3}}, "stop: a report has validation/loss, evaluations, .* but no 'epochs'"),
        ({"callbacks": tune.Callback()}, "callbacks must be a list"),
        ({"space": {"config": {"learning_rate": tune.uniform(0, 1)}}}, "dotted paths, such as config.learning_rate"),
    ],
)  # fmt: skip
def test_parts_of_ray_tune_that_would_have_no_effect_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Search(**{"space": SPACE, **settings})


def test_a_replay_of_pbt_is_refused(tmp_path: Path) -> None:
    """It would replace the values of the trial, and its name in the sweep with them."""
    policy = tmp_path / "pbt_policy_x.txt"
    policy.write_text(json.dumps(["x", "x", 2, 2, {RATE: 0.1}, {RATE: 0.01}]))
    with pytest.raises(ConfigError, match="would replace the values that the search gives to a trial"):
        Search(space=SPACE, trials=1, scheduler=PopulationBasedTrainingReplay(str(policy)))


def test_schedulers_of_ray_tune_are_taken() -> None:
    own = ASHAScheduler(metric="validation/loss", mode="min", time_attr="step")
    for scheduler, pauses in (
        (ASHAScheduler(), False),
        (own, False),
        (FIFOScheduler(), False),
        (HyperBandScheduler(), True),
    ):
        search = Search(space=SPACE, scheduler=scheduler)
        assert search.pauses == pauses
        assert search.to_plain()["scheduler"] == type(scheduler).__qualname__


def test_the_private_settings_of_rays_schedulers_are_found() -> None:
    ranged = {RATE: [1e-6, 1e-1]}
    pbt = PopulationBasedTraining(hyperparam_mutations=ranged)
    for scheduler in (ASHAScheduler(), HyperBandScheduler(), MedianStoppingRule(), pbt):
        assert tune_setting(scheduler, "time_attr", None) in ("training_iteration", "time_total_s")
        assert tune_setting(scheduler, "mode", "unknown") is None
    for population in (pbt, PB2(hyperparam_bounds=ranged)):
        assert tune_setting(population, "hyperparam_mutations", None) == ranged
        assert tune_setting(population, "synch", None) is False


def test_a_scheduler_of_ray_without_the_private_settings_is_taken() -> None:
    class Renamed(FIFOScheduler):  # type: ignore[misc]
        def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
            return metric == "validation/loss"

    assert Search(space=SPACE, scheduler=Renamed()).num_trials == 10


@dataclass
class Bisection:
    """Suggests by its own rule: a function of the earlier trials."""

    seen: list[int] = field(default_factory=list)

    def suggest(self, index: int, tried: list[PastTrial]) -> dict[str, Any]:
        self.seen.append(len(tried))
        best = min((each for each in tried if each.metric is not None), key=lambda each: each.metric or 0, default=None)
        return {RATE: best.values[RATE] / 2 if best else 0.1}


def test_an_object_with_suggest_is_an_algorithm_and_a_resumed_sweep_keeps_its_suggestions(tmp_path: Path) -> None:
    search = Search(space={RATE: LogUniform(1e-4, 1e-1), DROPOUT: 0.5}, algorithm=Bisection(), trials=3)
    tried = [ended({RATE: 0.1}, 2.0), ended({RATE: 0.04}, 1.0)]
    assert search.suggest(2, tried) == {RATE: 0.02, DROPOUT: 0.5}
    sweep = open_sweep(experiment(tmp_path), search)
    console = SweepConsole("validation/loss", "min", Console(file=io.StringIO()))
    first: Any = SweepDriver(experiment(tmp_path), search, sweep, StopSignals(), console).next_trial()
    assert first[0].values == {RATE: 0.1, DROPOUT: 0.5}
    sweep.note("trial_ended", trial="trial-000", status="completed", metric=0.5, steps=4)
    sweep.update(status="failed")
    resumed = open_sweep(experiment(tmp_path), search)
    second: Any = SweepDriver(experiment(tmp_path), search, resumed, StopSignals(), console).next_trial()
    assert (second[0].name, second[0].values[RATE]) == ("trial-001", 0.05)
    assert Sweep(sweep.sweep_dir).record.search["algorithm"] == "Bisection"
    resumed.update(status="failed")
    with pytest.raises(RunConflictError, match="algorithm: 'Bisection' -> 'random'"):
        open_sweep(experiment(tmp_path), Search(space=search.space, trials=3))

    class Wrong:
        def suggest(self, index: int, tried: Any) -> Any:
            return [0.1]

    with pytest.raises(ConfigError, match=r"Wrong.suggest must return a dict of values by path, got \[0.1\]"):
        Search(space=SPACE, algorithm=Wrong()).suggest(0)


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (
            {"config.lerning_rate": 1},
            ConfigError,
            r"Mine.suggest returned 'config.lerning_rate': .*config.learning_rate\?",
        ),
        (KeyError("x"), TrainingFailedError, "Mine.suggest raised KeyError: 'x'"),
        (ConfigError("no more"), ConfigError, "no more"),
    ],
)
def test_a_wrong_suggestion_of_the_user_ends_the_sweep_and_names_suggest(
    tmp_path: Path, returned: Any, kind: type[Exception], message: str
) -> None:
    class Mine:
        def suggest(self, index: int, tried: Any) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    base, search = experiment(tmp_path), Search(space=SPACE, algorithm=Mine(), trials=3)
    sweep = open_sweep(base, search)
    driver = SweepDriver(base, search, sweep, StopSignals(), SweepConsole("validation/loss", "min"))
    capacity: Any = SimpleNamespace(summary="1 trial at a time", poll=lambda: None)
    with pytest.raises(kind, match=message) as caught:
        driver.run(capacity, lambda driver: driver.next_trial() and None, leave_s=0)
    if isinstance(returned, KeyError):
        assert caught.value.__cause__ is returned
        assert "in suggest" in getattr(caught.value, "worker_traceback", "")
    assert sweep.trials() == []


@pytest.mark.parametrize(
    ("settings", "field", "kind"),
    [
        ({"stop": tune.stopper.TrialPlateauStopper}, "stop", "TrialPlateauStopper"),
        ({"scheduler": ASHAScheduler}, "scheduler", "AsyncHyperBandScheduler"),
        ({"scheduler": ASHA}, "scheduler", "ASHA"),
        ({"algorithm": OptunaSearch}, "algorithm", "OptunaSearch"),
        ({"algorithm": Remembering}, "algorithm", "Remembering"),
        ({"callbacks": [tune.Callback]}, r"callbacks\[0\]", "Callback"),
    ],
)  # fmt: skip
def test_a_class_in_place_of_its_object_is_refused(settings: dict[str, Any], field: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} must be an object, got the class {kind}: create it: {kind}\("):
        Search(space=SPACE, **settings)


def test_a_choice_of_lists_goes_through_a_searcher(tmp_path: Path) -> None:
    search = Search(space={"config.widths": Choice([[4, 4], [8]])}, algorithm=OptunaSearch(seed=1), trials=8)
    asked = searcher_of(search, tmp_path)
    tried: list[PastTrial] = []
    for index in range(8):
        values: Any = asked.suggest(index, tried)
        tried.append(ended(values, 0.5))
    assert {str(each.values["config.widths"]) for each in tried} == {"[4, 4]", "[8]"}
