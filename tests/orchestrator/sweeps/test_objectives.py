"""Sweeps with several objectives and with constraints. Without Ray."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.orchestrator import ASHA, Experiment, PastTrial, Search, SweepResult, Uniform, write_report
from headway.orchestrator.runs.open import open_run, open_sweep
from headway.orchestrator.sweeps.console import SweepConsole
from headway.orchestrator.sweeps.objectives import Constraint, is_feasible, pareto
from headway.trainer.errors import ConfigError
from tests.tiny import TinyConfig, TinyTrainer

DROPOUT, LOSS, SIZE = "config.dropout", "validation/loss", "validation/size"
SPACE = {DROPOUT: Uniform(0.0, 1.0)}


def trained(search: Search, metrics_of: Any, trials: int) -> list[PastTrial]:
    """Return trials suggested one by one, with metrics of their value."""
    tried: list[PastTrial] = []
    for index in range(trials):
        values = search.suggest(index, tried)
        metrics = metrics_of(values[DROPOUT])
        tried.append(PastTrial(values=values, state="ended", metric=metrics[LOSS], metrics=metrics))
    return tried


def test_the_pareto_front_has_what_nothing_dominates() -> None:
    items = [("a", (1.0, 5.0)), ("b", (2.0, 2.0)), ("c", (3.0, 3.0)), ("d", (5.0, 1.0)), ("e", (2.0, 2.0))]
    assert pareto(items, ["min", "min"]) == ["a", "b", "d", "e"]
    assert pareto(items, ["min", "max"]) == ["a"]


def test_constraints_are_limits_on_metrics() -> None:
    upper, lower = Constraint.parse("validation/size <= 20"), Constraint.parse("validation/size>=1e1")
    assert (upper.violation({SIZE: 25.0}), lower.violation({SIZE: 25.0})) == (5.0, -15.0)
    assert is_feasible({SIZE: 15.0}, ["validation/size <= 20", "validation/size >= 10"])
    assert not is_feasible({}, ["validation/size <= 20"])
    assert not is_feasible({SIZE: float("nan")}, ["validation/size <= 20"])
    for wrong in ("validation/size < 20", "validation/size", "validation/size <= big", 5):
        with pytest.raises(ConfigError, match="constraints must be texts such as 'validation/latency <= 20'"):
            Search(space=SPACE, constraints=[wrong])  # type: ignore[list-item]


def test_tpe_searches_the_whole_front_and_keeps_to_constraints() -> None:
    # A low loss needs a high dropout, a small size a low one; the second constraint forbids the optimum.
    both = Search(space=SPACE, algorithm="tpe", objectives={SIZE: "min"}, seed=1)
    front = [each.values[DROPOUT] for each in trained(both, lambda x: {LOSS: (x - 0.8) ** 2, SIZE: (x - 0.2) ** 2}, 40)]
    # The front is between the two optima.
    assert sum(0.15 <= value <= 0.85 for value in front[15:]) > 20
    bounded = Search(space=SPACE, algorithm="tpe", constraints=[f"{SIZE} <= 0.3"], seed=1)
    found = [each.values[DROPOUT] for each in trained(bounded, lambda x: {LOSS: (x - 0.8) ** 2, SIZE: x}, 40)]
    assert sum(value <= 0.4 for value in found[15:]) > 15
    # A study that is kept gives what a new one would.
    for search, metrics_of in ((both, lambda x: {LOSS: x, SIZE: -x}), (bounded, lambda x: {LOSS: x, SIZE: x})):
        tried = trained(search, metrics_of, 15)
        running = [*tried, PastTrial(values={DROPOUT: 0.5}, state="training")]
        search.suggest(16, running)
        for last in (
            PastTrial(values={DROPOUT: 0.5}, state="ended", metric=0.1, metrics={LOSS: 0.1, SIZE: 0.2}),
            PastTrial(values={DROPOUT: 0.5}, state="failed"),
        ):
            new = Search(**{**vars_of(search)})
            assert search.suggest(17, [*tried, last]) == new.suggest(17, [*tried, last])


def vars_of(search: Search) -> dict[str, Any]:
    names = ("space", "algorithm", "objectives", "constraints", "seed")
    return {name: getattr(search, name) for name in names}


def test_the_result_says_what_is_feasible_and_not_dominated(tmp_path: Path) -> None:
    experiment = Experiment(name="both", trainer=TinyTrainer, config=TinyConfig(max_steps=4), storage=str(tmp_path))
    search = Search(space=SPACE, objectives={SIZE: "min"}, constraints=[f"{SIZE} <= 20"], trials=4)
    sweep = open_sweep(experiment, search)
    for index, (loss, size) in enumerate([(0.1, 25.0), (0.2, 15.0), (0.3, 5.0), (0.4, 10.0)]):
        name, values = f"trial-{index:03}", {DROPOUT: index / 10}
        sweep.note("trial_suggested", trial=name, index=index, values=values)
        run = open_run(search.trial(experiment, name, values)).run
        run.update(status="completed", best_metric=loss, metrics={LOSS: loss, SIZE: size})
        sweep.note("trial_ended", trial=name, status="completed", metric=loss, steps=4)
    sweep.update(status="completed")
    result = SweepResult.read(sweep.sweep_dir)
    # The first one violates the constraint; the last one is dominated.
    assert result.best is not None
    assert result.best.name == "trial-001"
    assert [trial.name for trial in result.pareto] == ["trial-001", "trial-002"]
    assert [row[SIZE] for row in result.table] == [25.0, 15.0, 5.0, 10.0]
    page = Path(write_report("both", str(tmp_path))).read_text()
    assert "Not dominated (Pareto)" in page
    told = io.StringIO()
    SweepConsole(LOSS, "min", Console(file=told, width=200)).end(result)
    assert "not dominated: trial-001, trial-002" in told.getvalue()
    assert [trial.tried.metrics[SIZE] for trial in sweep.trials()] == [25.0, 15.0, 5.0, 10.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objectives": {LOSS: "min"}}, "objectives must be metrics besides validation/loss"),
        ({"objectives": {SIZE: "low"}}, "each 'min' or 'max', got 'validation/size': 'low'"),
        ({"objectives": {SIZE: "min"}, "scheduler": ASHA()}, "ASHA cannot be used with objectives"),
        ({"objectives": {SIZE: "min"}, "target": 0.1}, "target cannot be used with objectives"),
        (
            {"constraints": ["validation/size <= 1"], "keep_best_trials": 1},
            "keep_best_trials cannot be used with constr",
        ),
    ],
)
def test_what_judges_by_one_metric_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Search(space=SPACE, **settings)
