"""Suggestions of Optuna's TPE from the journal: reproducible, and better than random. One sweep on Ray."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import (
    PBT,
    Choice,
    Experiment,
    LogUniform,
    RandInt,
    Search,
    SweepResult,
    Uniform,
    When,
    sweep,
)
from headway.orchestrator.runs.open import open_sweep
from headway.orchestrator.sweeps.optuna_search import PastTrial
from headway.orchestrator.sweeps.record import Sweep
from headway.trainer import Callback
from headway.trainer.errors import ConfigError
from tests.tiny import TinyConfig, TinyTrainer

RATE, WIDTHS, SCHEDULE, WARMUP = "config.learning_rate", "config.widths", "config.schedule", "config.warmup"


def search(**settings: Any) -> Search:
    space = {
        RATE: LogUniform(1e-5, 1.0),
        WIDTHS: Choice([[4, 4], [8], (True, 1)]),
        SCHEDULE: Choice(["constant", "cosine"]),
        WARMUP: When(SCHEDULE, "cosine", RandInt(0, 100)),
        "config.dropout": 0.5,
    }
    return Search(**{"space": space, "algorithm": "tpe", "trials": 40, "seed": 3, **settings})


def loss(values: dict[str, Any]) -> float:
    return (math.log10(values[RATE]) + 2) ** 2 + len(values[WIDTHS]) + abs(values.get(WARMUP, 100) - 30) / 100


def tried_in_turn(wanted: Search, trials: int, past: list[PastTrial] | None = None) -> list[PastTrial]:
    """Return suggestions one by one, each given the results of all before it; every seventh trial fails."""
    tried = list(past or [])
    for index in range(len(tried), trials):
        values = wanted.suggest(index, tried)
        if index % 7 == 6:
            tried.append(PastTrial(values=values, state="failed"))
        else:
            state: Any = "pruned" if index % 5 == 4 else "ended"
            tried.append(PastTrial(values=values, state=state, metric=loss(values), steps=index % 5))
    return tried


def test_it_finds_better_values_than_chance_and_keeps_to_the_space() -> None:
    found = [each.values for each in tried_in_turn(search(), 40)]
    for values in found:
        assert 1e-5 <= values[RATE] <= 1.0
        assert values[WIDTHS] in ([4, 4], [8], (True, 1))
        assert (WARMUP in values) == (values[SCHEDULE] == "cosine")
        assert type(values.get(WARMUP, 0)) is int
        assert values["config.dropout"] == 0.5
    assert len({values[RATE] for values in found}) == 40
    random = search(algorithm="random")
    by_chance = statistics.median(loss(random.suggest(index)) for index in range(200))
    assert statistics.median(map(loss, found[20:])) < 0.75 * by_chance
    highest = [each.values for each in tried_in_turn(search(mode="max"), 40)]
    assert statistics.median(map(loss, highest[20:])) > 1.25 * by_chance


@pytest.mark.extended
def test_the_same_past_gives_the_same_suggestion_in_any_process() -> None:
    past = tried_in_turn(search(), 25)
    wanted = [search().suggest(25 + number, past) for number in range(3)]
    assert wanted == [search().suggest(25 + number, past) for number in range(3)]
    script = (
        "import json\n"
        "from tests.orchestrator.sweeps.test_optuna_search import search, tried_in_turn\n"
        "past = tried_in_turn(search(), 25)\n"
        "print(json.dumps([search().suggest(25 + number, past) for number in range(3)]))\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(wanted))
    assert search(seed=4).suggest(25, past) != wanted[0]


def test_a_trial_that_a_scheduler_pruned_in_another_sweep_does_not_count_for_several_objectives() -> None:
    wanted = search(objectives={"validation/size": "min"})
    values = wanted.suggest(0)
    pruned = PastTrial(values=values, state="pruned", metric=0.5, steps=3, metrics={"validation/loss": 0.5})
    assert wanted.suggest(1, [pruned]) == wanted.suggest(1, [PastTrial(values=values, state="failed")])


def test_a_point_at_a_limit_may_be_off_by_the_noise_of_floats() -> None:
    wanted = search(space={RATE: Uniform(0.0, 0.3)}, points=[{RATE: 0.1 + 0.2}])
    first = wanted.suggest(0)
    assert wanted.suggest(1, [PastTrial(values=first, state="ended", metric=0.5)])


def test_the_journal_of_a_dead_driver_gives_what_it_would_have_suggested(tmp_path: Path) -> None:
    wanted = Search(space={RATE: LogUniform(1e-5, 1.0), "config.width": RandInt(2, 9)}, algorithm="tpe", trials=20)
    experiment = Experiment(name="tpe", trainer=TinyTrainer, config=TinyConfig(max_steps=4), storage=str(tmp_path))
    tried: list[PastTrial] = []
    journal = open_sweep(experiment, wanted)
    for index in range(20):
        values = wanted.suggest(index, tried)
        metric = None if index == 5 else (math.log10(values[RATE]) + 2) ** 2
        status = ("failed" if index == 5 else "stopped") if index % 5 == 0 else "completed"
        reason = "pruned by ASHA after 1 evaluations" if status == "stopped" else ""
        name = f"trial-{index:03}"
        # As the driver records them in the files of the sweep; the last two were running.
        journal.note("trial_suggested", trial=name, index=index, values=values)
        if index < 18:
            journal.note(
                "trial_ended", trial=name, status=status, reason=reason, error=None, metric=metric, steps=index
            )
        tried = [trial.tried for trial in Sweep(journal.sweep_dir).trials()]
    expected = {0: "pruned", 5: "failed", 10: "pruned", 15: "pruned", 18: "training", 19: "training"}
    assert [each.state for each in tried] == [expected.get(index, "ended") for index in range(20)]
    # A resumed sweep reads the same past from them; any other result changes it.
    assert wanted.suggest(20, tried) == wanted.suggest(20, [trial.tried for trial in Sweep(journal.sweep_dir).trials()])
    assert wanted.suggest(20, tried[:-2]) != wanted.suggest(20, tried)
    assert wanted.suggest(
        20, [*tried[:-2], PastTrial(values=tried[-2].values, state="ended", metric=0.0), tried[-1]]
    ) != (wanted.suggest(20, tried))


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="algorithm='tpe' cannot be used with PBT"):
        Search(space={RATE: Uniform(0, 1)}, algorithm="tpe", scheduler=PBT())
    monkeypatch.setitem(sys.modules, "optuna", None)
    experiment = Experiment(name="tpe", trainer=TinyTrainer, config=TinyConfig(max_steps=4), storage=str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'headway\[optuna\]'"):
        sweep(experiment, Search(space={RATE: Uniform(0, 1)}, algorithm="tpe"))
    assert list(tmp_path.iterdir()) == []


class WaitForAnother(Callback):
    """Waits until a second process trains a trial, since a trial may end before another process has started."""

    def on_fit_start(self, trainer: Any) -> None:
        pids = Path(trainer.run_dir).parents[1] / "pids"
        pids.mkdir(exist_ok=True)
        (pids / str(os.getpid())).touch()
        deadline = time.monotonic() + 120
        while len(list(pids.iterdir())) < 2:
            assert time.monotonic() < deadline, "no second process has trained a trial"
            time.sleep(0.05)


class TrainsBesideAnother(TinyTrainer):
    def configure_callbacks(self) -> list[Callback]:
        return [WaitForAnother()]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_sweep_that_goes_on_knows_all_results_and_trains_nothing_twice(tmp_path: Path) -> None:
    experiment = Experiment(
        name="tpe", trainer=TrainsBesideAnother, config=TinyConfig(max_steps=6), storage=str(tmp_path)
    )
    space = {RATE: LogUniform(1e-6, 1e-1), "config.width": RandInt(3, 9)}
    first = sweep(experiment, Search(space=space, algorithm="tpe", trials=11, concurrent=2, seed=1))
    assert [trial.status for trial in first.trials] == ["completed"] * 11
    more = Search(space=space, algorithm="tpe", trials=13, concurrent=1, seed=1)
    past = [trial.tried for trial in first.trials]
    next_one = more.suggest(11, past)
    # After ten ended trials, suggestions are no longer random.
    assert next_one != more.suggest(11)
    before = {trial.name: Path(trial.run_dir, "run.json").read_text() for trial in first.trials}
    second = sweep(experiment, more)
    assert [trial.values for trial in second.trials[:11]] == [trial.values for trial in first.trials]
    assert {name: (tmp_path / "tpe" / name / "run.json").read_text() for name in before} == before
    assert second.trials[11].values == next_one
    tried = [trial.tried for trial in SweepResult.read(second.sweep_dir).trials]
    assert second.trials[12].values == more.suggest(12, tried[:12])
    assert second.trials[12].metric is not None
