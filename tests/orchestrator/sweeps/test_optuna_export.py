"""A sweep as a study of Optuna, its importances, and a warm start from it. Without Ray."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from headway.orchestrator import (
    Choice,
    Experiment,
    Grid,
    LogUniform,
    Normal,
    RandInt,
    Search,
    SweepResult,
    Uniform,
    When,
    write_report,
)
from headway.orchestrator.runs.open import open_sweep
from headway.orchestrator.sweeps.sampling import fits
from headway.orchestrator.sweeps.sweep import warm_trials
from headway.orchestrator.sweeps.tune.searcher import TuneSearcher
from headway.trainer.errors import ConfigError
from tests.tiny import TinyConfig, TinyTrainer

RATE, WIDTH, SCHEDULE, WARMUP = "config.learning_rate", "config.width", "config.schedule", "config.warmup"
SPACE = {
    RATE: LogUniform(1e-5, 1e-1),
    WIDTH: RandInt(1, 64, log=True),
    "config.widths": Choice([[4, 4], [8]]),
    SCHEDULE: Grid(["constant", "cosine"]),
    WARMUP: When(SCHEDULE, "cosine", RandInt(0, 100)),
    "config.noise": Normal(0.0, 1.0),
    "config.dropout": 0.5,
}


def experiment(tmp_path: Path, name: str) -> Experiment:
    return Experiment(name=name, trainer=TinyTrainer, config=TinyConfig(max_steps=4), storage=str(tmp_path))


@pytest.fixture
def finished(tmp_path: Path) -> SweepResult:
    """A sweep whose metric follows from the learning rate; trial 20 was pruned, 21 failed, and 22 trains."""
    search = Search(space=SPACE, trials=23)
    sweep = open_sweep(experiment(tmp_path, "earlier"), search)
    for index in range(23):
        values = search.suggest(index)
        sweep.note("trial_suggested", trial=f"trial-{index:03}", index=index, values=values)
        ended: dict[str, Any] = {"status": "completed", "metric": abs(math.log10(values[RATE]) + 2)}
        if index == 20:
            ended = {**ended, "status": "stopped", "reason": "pruned by ASHA after 1 evaluation"}
        if index == 21:
            ended = {"status": "failed", "metric": None, "error": "no luck"}
        if index < 22:
            sweep.note("trial_ended", trial=f"trial-{index:03}", steps=4, **ended)
    sweep.update(status="stopped")
    return SweepResult.read(sweep.sweep_dir)


def test_a_sweep_becomes_a_study_in_a_storage(tmp_path: Path, finished: SweepResult) -> None:
    storage = f"sqlite:///{tmp_path}/sweeps.db"
    finished.to_optuna(storage)
    study = optuna.load_study(study_name="earlier", storage=storage)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE"] * 20 + ["PRUNED", "FAIL"]
    assert study.best_value == finished.best.metric if finished.best else False
    first = study.trials[0]
    assert first.params[RATE] == finished.trials[0].values[RATE]
    assert first.params["config.widths"] in ("[4, 4]", "[8]")
    assert first.user_attrs["trial"] == "trial-000"
    assert (WARMUP in first.params) == (first.params[SCHEDULE] == "cosine")
    with pytest.raises(ConfigError, match="already has a study 'earlier': pass another study_name"):
        finished.to_optuna(storage)
    finished.to_optuna(storage, study_name="again")


def test_the_report_says_which_parameters_matter(tmp_path: Path, finished: SweepResult) -> None:
    pytest.importorskip("sklearn")
    shares = finished.importances
    assert next(iter(shares)) == RATE
    assert shares[RATE] > 0.5
    assert sum(shares.values()) == pytest.approx(1.0)
    page = write_report("earlier", str(tmp_path))
    assert "Importance of parameters" in Path(page).read_text()


def test_a_search_learns_from_an_earlier_sweep(tmp_path: Path, finished: SweepResult) -> None:
    space = {RATE: LogUniform(1e-5, 1e-2), WIDTH: RandInt(1, 64, log=True)}
    search = Search(space=space, algorithm="tpe", warm_start=[finished.sweep_dir], trials=5)
    warm = warm_trials(search)
    # Without the trial that trains, and those whose learning rate is outside of this space.
    fitting = [trial for trial in finished.trials[:22] if trial.values[RATE] <= 1e-2]
    assert len(warm) == len(fitting) > 10
    assert [set(each.values) for each in warm] == [{RATE, WIDTH}] * len(warm)
    assert search.suggest(0, warm) != search.suggest(0)
    from ray.tune.search.optuna import OptunaSearch

    theirs = Search(space=space, algorithm=OptunaSearch(seed=1), warm_start=[finished.sweep_dir])
    folder = open_sweep(experiment(tmp_path, "theirs"), theirs).folder
    first = TuneSearcher(theirs, folder, warm)
    learned = [each for each in warm if each.metric is not None]
    assert len(first._searcher._ot_study.trials) == len(learned)
    first.suggest(0, [])
    # Once: a restored searcher knows them.
    assert len(TuneSearcher(theirs, folder, warm)._searcher._ot_study.trials) == len(learned) + 1
    with pytest.raises(ConfigError, match="warm_start needs an algorithm that learns"):
        Search(space=space, warm_start=[finished.sweep_dir])
    with pytest.raises(ConfigError, match=r"has the metric 'validation/loss' \(min\)"):
        warm_trials(Search(space=space, algorithm="tpe", mode="max", warm_start=[finished.sweep_dir]))
    with pytest.raises(ConfigError, match="there is no sweep in"):
        warm_trials(Search(space=space, algorithm="tpe", warm_start=[str(tmp_path / "nowhere")]))
    conditional = Search(space={SCHEDULE: ["constant", "cosine"], WARMUP: When(SCHEDULE, "cosine", Uniform(0, 1000))})
    assert not fits(conditional.space, {SCHEDULE: "cosine"})
    assert fits(conditional.space, {SCHEDULE: "constant"})
