"""Suggestions of a sweep, and validation before anything starts. Without Ray."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch
from rich.console import Console

from headway.orchestrator import (
    ASHA,
    PBT,
    Choice,
    Experiment,
    HyperBand,
    LogUniform,
    Normal,
    RandInt,
    RunConflictError,
    Search,
    Uniform,
    When,
    sweep,
)
from headway.orchestrator.cli.run_list import print_runs
from headway.orchestrator.config.values import with_values
from headway.orchestrator.runs.open import open_run, open_sweep, record_changed_settings
from headway.orchestrator.runs.requests import StopRequest, read_stop_request, request_stop
from headway.orchestrator.runs.run import Run
from headway.orchestrator.storage.events import EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.console import SweepConsole
from headway.orchestrator.sweeps.driver import SweepDriver
from headway.orchestrator.sweeps.ending import out_of_patience, target_reached
from headway.orchestrator.sweeps.optuna_search import PastTrial
from headway.orchestrator.sweeps.record import Sweep, TrialResult
from headway.orchestrator.sweeps.result import SweepResult
from headway.orchestrator.sweeps.retention import checkpoint_bytes, delete_checkpoints, over_limit, surplus
from headway.orchestrator.sweeps.search import resolve_search
from headway.orchestrator.sweeps.sweep import _first_valid_trial
from headway.orchestrator.sweeps.tune.ray_schedulers import reports_of_ended_trials
from headway.orchestrator.sweeps.tune.trial import trial_resources
from headway.orchestrator.train.signals import StopSignals
from headway.trainer import ParallelConfig
from headway.trainer.errors import ConfigError
from tests.orchestrator.runs.test_run import claimed_by_another
from tests.tiny import TinyConfig, TinyTrainer


def experiment(storage: Path, **settings: Any) -> Experiment:
    return Experiment(
        **{
            "name": "tiny",
            "trainer": TinyTrainer,
            "config": TinyConfig(max_steps=4),
            "storage": str(storage),
            **settings,
        }
    )


def search(**settings: Any) -> Search:
    return Search(**{"space": {"config.learning_rate": LogUniform(1e-4, 1e-1)}, **settings})


def test_a_suggestion_depends_on_the_seed_and_the_index_alone() -> None:
    space = {
        "config.learning_rate": LogUniform(1e-4, 1e-1),
        "config.width": RandInt(2, 5),
        "config.noise": Uniform(0, 1),
    }
    one, other = Search(space=space, seed=3), Search(space=space, seed=4)
    found = [one.suggest(index) for index in range(50)]
    assert [one.suggest(index) for index in reversed(range(50))] == found[::-1]
    assert other.suggest(0) != found[0]
    assert len({values["config.learning_rate"] for values in found}) == 50
    assert {values["config.width"] for values in found} == {2, 3, 4, 5}
    assert all(1e-4 <= values["config.learning_rate"] <= 1e-1 for values in found)
    # Log-uniform: about a third is below 1e-3.
    assert 5 < sum(values["config.learning_rate"] < 1e-3 for values in found) < 30
    # Another field does not change the others.
    fewer = Search(space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, seed=3)
    assert fewer.suggest(7)["config.learning_rate"] == found[7]["config.learning_rate"]


def test_a_grid_has_every_combination_and_a_nested_list_is_a_value() -> None:
    grid = Search(
        space={
            "config.widths": Choice([[4, 4], [8]]),
            "config.schedule": Choice(["constant", "cosine"]),
            "config.warmup": When("config.schedule", "cosine", Choice([10, 20])),
            "config.dropout": 0.5,
        },
        algorithm="grid",
    )
    assert grid.num_trials == 6
    assert grid.suggest(0) == {"config.widths": [4, 4], "config.schedule": "constant", "config.dropout": 0.5}
    assert [grid.suggest(index).get("config.warmup") for index in range(6)] == [None, 10, 20, None, 10, 20]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"space": {}}, "space must be a non-empty dict of axes by path"),
        (
            {"space": {"config.learning_rate": LogUniform(1e-4, 1e-1)}, "algorithm": "grid"},
            r"a grid needs Choice\(\[...\]\), got a LogUniform",
        ),
        ({"mode": "low"}, "mode must be one of min, max"),
        ({"trials": 0}, "trials must be an integer >= 1"),
        ({"metric": "loss"}, "metric must start with 'validation/' or 'train/'"),
        ({"metric": ["validation/loss", "validation/accuracy"]}, "name the others in objectives"),
        (
            {"algorithm": "bayes"},
            r"algorithm must be one of random, grid, tpe, a Searcher of Ray Tune, or an object with suggest",
        ),
        ({"target": "low"}, "target must be a finite number"),
        ({"time_budget": "5 steps"}, 'time_budget must be a time such as "2h"'),
        ({"patience": 0}, "patience must be an integer >= 1"),
        ({"stop": 5}, "stop must be a dict"),
        ({"points": 3}, r"points must be a list of dicts of values by path, such as \[{.*}\], got 3"),
        ({"points": {"config.learning_rate": 1e-3}}, "points must be a list of dicts .*, got {'config.learning_rate'"),
        ({"warm_start": 3, "algorithm": "tpe"}, "warm_start must be a list of folders of sweeps, .*, got 3"),
        ({"warm_start": "runs/a", "algorithm": "tpe"}, "warm_start must be a list of folders of sweeps, .*'runs/a'"),
        ({"constraints": "validation/x <= 2"}, "constraints must be a list of limits, .*, got 'validation/x <= 2'"),
        ({"objectives": ["validation/x"]}, r"objectives must be a dict of .*, got \['validation/x'\]"),
        ({"max_checkpoint_bytes": "20GB"}, "max_checkpoint_bytes must be a number > 0, such as 20e9, got '20GB'"),
        ({"space": {"config.a": When("config.b", 1, Choice([1]))}}, "must come before it"),
        ({"scheduler": PBT(vary=("config.width",))}, "for which the space has no axis"),
        ({"scheduler": "asha"}, "scheduler must be one of ASHA"),
        ({"space": {"config.width": 4}}, "nothing in the space varies, so all 10 trials would be equal"),
        (
            {"space": {"config.a": Choice(["x", "y"]), "config.b": When("config.a", ("x", "z"), Choice([1]))}},
            "config.b applies when config.a is 'z', which never happens: its values are 'x', 'y'",
        ),
        (
            {"space": {"config.a": 1, "config.b": When("config.a", 2, Choice([1]))}},
            "which never happens: its values are 1",
        ),
        # A value that PBT draws for a field that a trial lacks would not be recorded.
        (
            {
                "space": {"config.width": Choice([4, 8]), "config.dropout": When("config.width", 4, Uniform(0, 0.5))},
                "scheduler": PBT(vary=("config.dropout",)),
            },
            "PBT cannot vary config.dropout, which depends on another field or on which",
        ),
        (
            {
                "space": {"config.width": Choice([4, 8]), "config.dropout": When("config.width", 4, Uniform(0, 0.5))},
                "scheduler": PBT(vary=("config.width",)),
            },
            "PBT cannot vary config.width, which depends on another field or on which",
        ),
    ],
)
def test_a_search_that_makes_no_sense_is_refused_when_it_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(**settings)


@pytest.mark.parametrize(
    ("path", "axis", "message"),
    [
        ("config.learning_rat", Uniform(0, 1), "did you mean config.learning_rate"),
        ("learning_rate", Uniform(0, 1), "did you mean config.learning_rate"),
        ("config.width", Uniform(0, 1), "config.width"),
        ("config.precision", Choice(["fp32", "fp8"]), "fp8"),
        ("storage", Choice(["a"]), "set by the sweep"),
    ],
)
def test_what_no_trial_could_be_is_refused_before_anything_starts(
    tmp_path: Path, path: str, axis: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Search(space={path: axis}).check(experiment(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_value_may_want_another_field_to_be_something_else(tmp_path: Path) -> None:
    strategy, offload, shard = (f"config.parallel.{name}" for name in ("strategy", "cpu_offload", "dp_shard"))
    conditional = {
        strategy: Choice(["ddp", "fsdp", "hsdp"]),
        offload: When(strategy, ("fsdp", "hsdp"), Choice([False, True])),
        shard: When(strategy, "hsdp", Choice([2])),
    }
    Search(space=conditional).check(experiment(tmp_path))
    # A nested condition, which holds with one of two strategies.
    Search(space={**conditional, shard: When(offload, True, Choice([2]))}).check(experiment(tmp_path))
    with pytest.raises(ConfigError, match="space: config.parallel.*dp_shard"):
        Search(space={**conditional, shard: When(strategy, "ddp", Choice([2]))}).check(experiment(tmp_path))
    # Neither is valid alone, but both together are.
    Search(space={strategy: Choice(["ddp", "hsdp"]), shard: Choice([None, 2])}).check(experiment(tmp_path))
    with pytest.raises(ConfigError, match="space: config.parallel.*dp_shard"):
        Search(space={strategy: Choice(["none", "ddp"]), shard: Choice([None, 2])}).check(experiment(tmp_path))


def test_pbt_leaves_alone_what_not_all_trials_have() -> None:
    space = {
        "config.learning_rate": LogUniform(1e-4, 1e-1),
        "config.width": Choice([4, 8]),
        "config.dropout": When("config.width", 4, Uniform(0, 0.5)),
    }
    assert list(Search(space=space, scheduler=PBT()).varied) == ["config.learning_rate"]


def test_a_trial_is_an_experiment_of_its_own_with_typed_values(tmp_path: Path) -> None:
    base = experiment(tmp_path)
    wanted = search(metric="validation/accuracy", mode="max")
    values = {"config.learning_rate": 0.5, "config.evaluate_every": "2 steps", "scaling.cpus_per_worker": 0.5}
    trial = wanted.trial(base, "trial-007", values)
    assert trial.run_dir == f"{tmp_path}/tiny/trial-007"
    assert (trial.config.learning_rate, str(trial.config.evaluate_every)) == (0.5, "2 steps")
    assert trial.scaling.cpus_per_worker == 0.5
    # The best checkpoint of a trial is the best by the metric of the sweep.
    assert (trial.config.checkpoint.monitor, trial.config.checkpoint.mode) == ("validation/accuracy", "max")
    # In the trial's process the types of fields are unknown, and values checked by the driver are set as they are.
    typed = {
        "config.learning_rate": 0.5,
        "config.evaluate_every": trial.config.evaluate_every,
        "config.checkpoint.monitor": "validation/accuracy",
        "config.checkpoint.mode": "max",
    }
    assert with_values(base, typed).config == trial.config


def test_the_journal_says_what_was_tried_and_another_search_of_the_same_name_is_refused(tmp_path: Path) -> None:
    base = experiment(tmp_path)
    opened = open_sweep(base, search(trials=3))
    opened.note("trial_suggested", trial="trial-000", index=0, values={"config.learning_rate": 0.5})
    opened.note("trial_suggested", trial="trial-001", index=1, values={"config.learning_rate": 0.25})
    opened.note("trial_ended", trial="trial-000", status="completed", reason="", error=None, metric=0.5, steps=4)
    # A line torn by a kill is ignored.
    with Path(tmp_path, "tiny/events.jsonl").open("a") as file:
        file.write('{"time": 1, "event": "trial_en')
    first, second = opened.trials()
    assert (first.status, first.metric, first.has_ended) == ("completed", 0.5, True)
    assert (second.status, second.values, second.has_ended) == ("pending", {"config.learning_rate": 0.25}, False)
    assert SweepResult.read(str(tmp_path / "tiny")).table[0]["validation/loss"] == 0.5
    again = open_sweep(base, search(trials=9, concurrent=1))
    assert again.record.id == opened.record.id
    with pytest.raises(RunConflictError, match="LogUniform.high: 0.1 -> 0.2"):
        open_sweep(base, search(space={"config.learning_rate": LogUniform(1e-4, 2e-1)}))
    with pytest.raises(RunConflictError, match="seed: 0 -> 1"):
        open_sweep(base, search(seed=1))
    with pytest.raises(RunConflictError, match="config.width"):
        open_sweep(experiment(tmp_path, config=TinyConfig(max_steps=4, width=3)), search())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"algorithm": ConcurrencyLimiter(OptunaSearch(), max_concurrent=2, batch=True)}, "batch=True. is not supp"),
        ({"algorithm": OptunaSearch(), "space": {"config.learning_rate": Normal(0.1, 0.01)}}, "cannot search this"),
        ({"algorithm": "tpe", "warm_start": ["/nowhere"]}, "/nowhere"),
    ],
)
def test_a_search_that_is_refused_before_ray_starts_leaves_its_name_free(
    tmp_path: Path, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        sweep(experiment(tmp_path), search(**settings))
    assert not (tmp_path / "tiny").exists()


def test_a_sweep_without_a_trial_may_start_with_other_settings(tmp_path: Path) -> None:
    first = open_sweep(experiment(tmp_path), search(trials=3))
    first.note("settings_changed", changes=[])
    first.folder.write("searcher.json", "{}")
    request_stop(first.folder, StopRequest(reason="earlier"))
    first.update(status="failed", reason="Ray has not started")
    first.release()
    second = open_sweep(experiment(tmp_path), search(trials=3))
    assert second.record.id == first.record.id
    second.release()
    base, other = experiment(tmp_path, config=TinyConfig(max_steps=4, width=3)), search(algorithm="tpe", trials=2)
    third = open_sweep(base, other)
    assert (third.record.search, third.record.trials) == (json.loads(json.dumps(other.to_plain())), 2)
    assert (third.record.experiment["config"]["width"], third.record.status) == (3, "running")
    assert third.folder.read("searcher.json") is None
    assert read_stop_request(third.folder) is None
    third.note("trial_suggested", trial="trial-000", index=0, values={})
    third.release()
    with pytest.raises(RunConflictError, match="algorithm: 'tpe' -> 'random'"):
        open_sweep(base, search())


def test_no_limit_changes_once_a_trial_has_come_to_its_end_and_the_record_says_what_trials_have(tmp_path: Path) -> None:
    opened = open_sweep(experiment(tmp_path), search(trials=2))
    longer = experiment(tmp_path, config=TinyConfig(max_steps=400, log_every="2 steps"))
    for name, status in (("trial-000", "failed"), ("trial-001", "completed")):
        # All trials that count would still have the new limit.
        again = open_sweep(longer, search(trials=2))
        assert again.record.experiment["config"]["max_steps"] == 4, "nothing is trained by it yet"
        opened.note("trial_suggested", trial=name, index=0, values={})
        opened.note("trial_ended", trial=name, status=status)
    with pytest.raises(RunConflictError, match="1 trials of tiny have ended with other limits:\n.*4 -> 400"):
        open_sweep(longer, search(trials=2))
    # Other settings may change; silently only if they do not affect training.
    other = experiment(tmp_path, config=TinyConfig(max_steps=4, log_every="2 steps"))
    finished = sweep(other, search(trials=2), display=SweepConsole("validation/loss", "min"))
    assert finished.status == "completed"
    assert Sweep(opened.sweep_dir).record.experiment == opened.record.experiment
    (change,) = record_changed_settings(Sweep(opened.sweep_dir), other)
    assert change == "config.log_every: '50 steps' -> '2 steps'"
    assert Sweep(opened.sweep_dir).record.experiment["config"]["log_every"] == "2 steps"
    assert [each["changes"] for each in read_events(opened.folder) if each["event"] == "settings_changed"] == [[change]]


def test_trials_that_failed_are_trained_again_where_that_is_asked_for(tmp_path: Path) -> None:
    """One failed in its code and has a run; one had an invalid combination of values and has none."""
    base, sought = experiment(tmp_path), search(trials=3, scheduler=ASHA())
    opened = open_sweep(base, sought)
    for index, status in enumerate(("failed", "completed", "failed")):
        name = f"trial-00{index}"
        opened.note("trial_suggested", trial=name, index=index, values={"config.learning_rate": 0.05})
        if index < 2:
            run = open_run(sought.trial(base, name, {"config.learning_rate": 0.05})).run
            EventWriter(run.folder, "rank-0").add("evaluated", step=2, metrics={"validation/loss": 0.5})
            run.update(status=status, error="no luck" if status == "failed" else None)
        opened.note("trial_ended", trial=name, status=status, error="no luck" if status == "failed" else None)
    opened.update(status="completed")
    assert list(reports_of_ended_trials(opened, sought)) == ["trial-000", "trial-001", "trial-002"]
    told = io.StringIO()
    result = sweep(base, sought, display=SweepConsole("validation/loss", "min", Console(file=told)))
    assert [trial.status for trial in result.trials] == ["failed", "completed", "failed"]
    assert "start it again with --retry-failed" in told.getvalue()

    opened.retry_failed()
    # Also for a resume after the driver was killed now.
    assert [(trial.status, trial.error) for trial in opened.trials()] == [
        ("interrupted", None), ("completed", None), ("pending", None),
    ]  # fmt: skip
    assert list(reports_of_ended_trials(opened, sought)) == ["trial-001"]
    lead = SweepDriver(base, sought, open_sweep(base, sought), StopSignals(), SweepConsole("validation/loss", "min"))
    given = []
    while (found := lead.next_trial()) is not None:
        given.append(found[0].name)
    assert given == ["trial-000", "trial-002"]
    # A trial that fails again stays failed until the next request.
    Run(f"{opened.sweep_dir}/trial-000").update(status="failed", error="again")
    lead.ended("trial-000", None)
    assert [trial.status for trial in Sweep(opened.sweep_dir).trials()] == ["failed", "completed", "running"]


def test_no_trial_is_under_way_in_a_sweep_that_has_ended(tmp_path: Path) -> None:
    """An aborted trial may still exist when its sweep reads its state."""
    base, sought = experiment(tmp_path), search(trials=3)
    opened = open_sweep(base, sought)
    values = {"config.learning_rate": 0.05}
    opened.note("trial_suggested", trial="trial-000", index=0, values=values)
    open_run(sought.trial(base, "trial-000", values))
    assert [trial.status for trial in opened.trials()] == ["running"]
    opened.update(status="stopped", reason="at once")
    assert [trial.status for trial in opened.trials()] == ["interrupted"]


def test_a_trial_whose_record_is_damaged_is_shown_as_such_and_takes_nothing_else_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, sought = experiment(tmp_path), search(trials=3)
    opened = open_sweep(base, sought)
    for index, text in enumerate(("", '{"id": "1"}', "")):
        opened.note("trial_suggested", trial=f"trial-00{index}", index=index, values={"config.learning_rate": 0.05})
        (tmp_path / f"tiny/trial-00{index}").mkdir()
        (tmp_path / f"tiny/trial-00{index}/run.json").write_text(text)
    opened.note("trial_ended", trial="trial-002", status="completed", reason="", error=None, metric=0.5, steps=4)
    first, second, third = opened.trials()
    for trial in (first, second):
        assert (trial.status, trial.has_ended) == ("failed", True)
        assert "run.json is damaged" in (trial.error or "")
    assert (third.status, third.metric, third.error) == ("completed", 0.5, None), "the journal knows"
    print_runs(str(tmp_path))
    assert "tiny: a sweep, running, 3 of 3 trials" in capsys.readouterr().out
    opened.update(status="failed")
    lead = SweepDriver(base, sought, open_sweep(base, sought), StopSignals(), SweepConsole("validation/loss", "min"))
    assert lead.next_trial() is None
    # Removing the folder makes it train.
    (tmp_path / "tiny/trial-000/run.json").unlink()
    assert opened.trials()[0].status == "pending"


def test_the_name_of_a_run_is_none_for_a_sweep_nor_the_other_way_round(tmp_path: Path) -> None:
    open_run(experiment(tmp_path, name="run"))
    with pytest.raises(RunConflictError, match="run is a run"):
        open_sweep(experiment(tmp_path, name="run"), search())
    open_sweep(experiment(tmp_path, name="sweep"), search())
    with pytest.raises(RunConflictError, match="sweep is a sweep"):
        open_run(experiment(tmp_path, name="sweep"))


def test_a_file_has_its_search_beside_the_experiment(tmp_path: Path) -> None:
    file = tmp_path / "tiny_sweep.py"
    file.write_text(
        "from headway.orchestrator import ASHA, Experiment, Search, Uniform\n"
        "from tests.tiny import TinyConfig, TinyTrainer\n"
        "experiment = Experiment(name='tiny', trainer=TinyTrainer, config=TinyConfig(max_steps=4))\n"
        "search = Search(space={'config.dropout': Uniform(0, 0.5)}, scheduler=ASHA())\n"
    )
    overrides = ["search.trials=5", "config.width=3", "search.scheduler.grace=2", "search.metric=validation/accuracy"]
    found, wanted = resolve_search(str(file), overrides)
    assert (wanted.trials, wanted.scheduler, wanted.metric) == (5, ASHA(grace=2), "validation/accuracy")
    assert found.config.width == 3
    # One path is fixed, and the others are unchanged.
    assert found.config.dropout == 0.0
    _, wanted = resolve_search(str(file), ["search.space.config.width=3", "search.space.config.noise=0.5"])
    assert wanted.space == {"config.dropout": Uniform(0, 0.5), "config.width": 3, "config.noise": 0.5}
    assert wanted.suggest(0)["config.dropout"] != wanted.suggest(1)["config.dropout"]
    with pytest.raises(ConfigError, match="nothing in the space varies"):
        resolve_search(str(file), ["search.space.config.dropout=0.5"])
    _, wanted = resolve_search(str(file), ["search.space.config.dropout=0.5", "search.trials=1"])
    assert wanted.suggest(0) == {"config.dropout": 0.5}
    with pytest.raises(ConfigError, match=r"did you mean search.trials\?"):
        resolve_search(str(file), ["search.trial=5"])
    with pytest.raises(ConfigError, match="there is no 'other'.* A sweep needs a Search: add search = Search"):
        resolve_search(str(file), [], name="other")


def test_a_sweep_ends_when_the_target_is_reached_or_nothing_improves(tmp_path: Path) -> None:
    wanted = search(trials=20, target=0.1, patience=3)
    base = experiment(tmp_path)
    opened = open_sweep(base, wanted)

    def trials(*metrics: float | None) -> list[TrialResult]:
        return [
            TrialResult(name=f"trial-{index:03}", index=index, values={}, metric=metric,
                  status="completed" if metric is not None else "failed")
            for index, metric in enumerate(metrics)
        ]  # fmt: skip

    assert target_reached(wanted, trials(0.5, 0.2)) is None
    assert target_reached(wanted, trials(0.5, 0.1)) == "trial-001 has reached the target 0.1 (validation/loss 0.1)"
    assert target_reached(search(target=0.5, mode="max"), trials(0.4, 0.6)) is not None
    assert out_of_patience(wanted, trials(0.5, 0.2, 0.3, None)) is None
    assert out_of_patience(wanted, trials(0.5, 0.2, 0.3, None, 0.2)) == "no better trial in the last 3"
    assert out_of_patience(wanted, trials(None, None, None)) is not None
    # A running trial may still improve, so the driver waits for it.
    for index, metric in enumerate([0.2, 0.3, 0.4]):
        opened.note("trial_suggested", trial=f"trial-00{index}", index=index, values={"config.learning_rate": 0.01})
        opened.note("trial_ended", trial=f"trial-00{index}", status="completed", metric=metric, steps=4)
    lead = SweepDriver(base, wanted, opened, StopSignals(), SweepConsole("validation/loss", "min"))
    running, other = lead.next_trial(), lead.next_trial()
    assert isinstance(running, tuple)
    assert isinstance(other, tuple)
    lead._trials["trial-003"] = replace(lead._trials["trial-003"], status="completed", metric=0.9)
    lead._training.discard("trial-003")
    assert lead.next_trial() == "wait"
    lead.reported("trial-004", {"validation/loss": 0.3, "step": 1})
    assert lead._own_stop() is None
    lead.reported("trial-004", {"validation/loss": 0.05, "step": 2})
    assert lead.next_trial() is None
    stop = lead._own_stop()
    assert stop is not None
    assert stop.reason == "trial-004 has reached the target 0.1 (validation/loss 0.05)"
    # A finished sweep whose target was reached trains nothing more.
    opened.note("trial_ended", trial="trial-003", status="completed", metric=0.05, steps=4)
    opened.update(status="completed")
    result = sweep(base, wanted, display=SweepConsole("validation/loss", "min"))
    assert (result.status, result.reason) == (
        "completed",
        "trial-003 has reached the target 0.1 (validation/loss 0.05)",
    )


def test_a_time_budget_stops_a_start_of_the_sweep_and_not_its_trials(tmp_path: Path) -> None:
    wanted = search(time_budget="2h")
    lead = SweepDriver(
        experiment(tmp_path), wanted, open_sweep(experiment(tmp_path), wanted), StopSignals(),
        SweepConsole("validation/loss", "min"),
    )  # fmt: skip
    assert lead.next_trial() is not None
    assert lead._handle_requests() is None
    assert lead.next_trial() is not None
    lead._started_s -= 7200
    assert lead._handle_requests() is None
    asked = read_stop_request(lead.sweep.folder)
    assert asked is not None
    assert (asked.status, asked.reason) == ("time_limit", "time_budget of 2h00m is used up")
    assert lead.next_trial() is None
    # The trials resume with the sweep.
    trial = read_stop_request(Folder(lead.sweep.folder.path("trial-000")))
    assert trial is not None
    assert trial.status == "interrupted"
    lead.sweep.update(status="time_limit", reason=asked.reason)
    said = io.StringIO()
    SweepConsole("validation/loss", "min", Console(file=said)).end(SweepResult.read(lead.sweep.sweep_dir))
    assert "to resume, start it again" in said.getvalue()


def test_the_resources_of_a_trial_may_be_searched(tmp_path: Path) -> None:
    workers = "scaling.workers"
    wanted = search(space={workers: [1, 2, 4], "config.learning_rate": LogUniform(1e-4, 1e-1)})
    base = experiment(tmp_path)
    wanted.check(base)
    assert wanted.largest_scaling(base).workers == 4
    assert search().largest_scaling(base) == base.scaling
    assert wanted.trial(base, "trial-000", {workers: 2, "config.learning_rate": 0.1}).scaling.workers == 2
    single = trial_resources(base.scaling, {workers: 1, "scaling.cpus_per_worker": 0.5, "trial": "trial-000"})
    assert single.required_resources == {"CPU": 0.5}
    # Beside its workers, the process of a trial reserves almost nothing.
    assert trial_resources(base.scaling, {workers: 2}).required_resources == {"memory": 1.0}
    with pytest.raises(ConfigError, match="scaling.workers"):
        search(space={workers: [0, 1]}).check(base)
    search(space=wanted.space, scheduler=PBT()).check(base)
    with pytest.raises(ConfigError, match=r"require single-worker trials \(scaling.workers=1\) .*, got 4 workers"):
        search(space=wanted.space, metric="train/loss").check(base)


def test_a_sweep_of_before_a_field_was_added_resumes(tmp_path: Path) -> None:
    wanted = search(space={"config.width": RandInt(2, 5)})
    opened = open_sweep(experiment(tmp_path), wanted)
    earlier = {name: value for name, value in opened.record.search.items() if name not in ("points", "target", "stop")}
    assert earlier["space"] == {"config.width": {"RandInt": {"low": 2, "high": 5}}}
    opened.update(search=earlier, status="failed")
    assert open_sweep(experiment(tmp_path), wanted).record.id == opened.record.id


def test_a_driver_that_has_lost_its_sweep_takes_no_trial_from_the_next_one(tmp_path: Path) -> None:
    opened = open_sweep(experiment(tmp_path), search())
    lead = SweepDriver(experiment(tmp_path), search(), opened, StopSignals(), SweepConsole("validation/loss", "min"))
    theirs = claimed_by_another(opened.folder, "sweep.json")
    for do in (lead.next_trial, lambda: lead.ended("trial-000", "died"), lambda: opened.update(status="failed")):
        with pytest.raises(RunConflictError, match=r"another process took over this sweep \(.*tiny"):
            do()
    assert opened.folder.read("sweep.json") == theirs
    assert opened.folder.folders() == ["owner"]


def test_a_trial_whose_values_do_not_go_together_fails_alone_and_in_every_life_of_the_sweep(tmp_path: Path) -> None:
    base = experiment(tmp_path, config=TinyConfig(max_steps=4, parallel=ParallelConfig(strategy="fsdp")))
    offload = {
        "config.parallel.strategy": Choice(["ddp", "fsdp"]),
        "config.parallel.cpu_offload": Choice([True, False]),
    }
    grid = Search(space=offload, algorithm="grid")
    grid.check(base)
    # As if the driver had been killed after suggesting the first one, which is invalid.
    killed = open_sweep(base, grid)
    killed.note("trial_suggested", trial="trial-000", index=0, values=grid.suggest(0))
    killed.update(status="failed")
    lead = SweepDriver(base, grid, open_sweep(base, grid), StopSignals(), SweepConsole("validation/loss", "min"))
    given = []
    while (found := lead.next_trial()) is not None:
        given.append(found[0].name)
    assert given == ["trial-001", "trial-002", "trial-003"]
    failed, *others = Sweep(killed.sweep_dir).trials()
    assert (failed.status, failed.has_ended) == ("failed", True)
    assert "cpu_offload must be False unless" in (failed.error or "")
    assert [trial.status for trial in others] == ["running"] * 3
    # The check before the start uses a valid trial; if there is none, nothing starts.
    assert _first_valid_trial(base, grid).config.parallel.strategy == "ddp"
    with pytest.raises(ConfigError, match="no trial in this space is valid; first error: .*cpu_offload"):
        _first_valid_trial(base, replace(grid, space={**offload, "config.parallel.strategy": "ddp"}, trials=1))


class InNumPy:
    def suggest(self, index: int, tried: list[PastTrial]) -> dict[str, Any]:
        return {"config.learning_rate": np.float64(0.01), "config.width": np.int64(4), "config.shuffle": np.bool_(True)}


def test_values_of_numpy_are_recorded_and_used_as_python_numbers(tmp_path: Path) -> None:
    rates = list(np.logspace(-4, -1, 4))
    space = {"config.learning_rate": rates, "config.width": RandInt(2, 9), "config.shuffle": [np.bool_(True), False]}
    points = [{"config.learning_rate": rates[0], "config.width": np.int64(5), "config.shuffle": np.bool_(False)}]
    numpy = Search(space=space, points=points, algorithm=InNumPy(), trials=2)
    base = experiment(tmp_path)
    numpy.check(base)
    opened = open_sweep(base, numpy)
    lead = SweepDriver(base, numpy, opened, StopSignals(), SweepConsole("validation/loss", "min"))
    given = []
    while (found := lead.next_trial()) is not None:
        given.append((found[0].values, found[1]["config.learning_rate"]))
    first = {"config.learning_rate": 1e-4, "config.width": 5, "config.shuffle": False}
    second = {"config.learning_rate": 0.01, "config.width": 4, "config.shuffle": True}
    assert repr(given) == repr([(first, 1e-4), (second, 0.01)])
    assert [trial.values for trial in Sweep(opened.sweep_dir).trials()] == [first, second]
    # The record has the numbers, and the same search in Python numbers resumes the sweep.
    opened.release()
    assert opened.record.search["points"] == [first]
    assert opened.record.search["space"]["config.shuffle"] == {"Choice": {"values": [True, False]}}
    plain = replace(numpy, space={**numpy.space, "config.learning_rate": [float(each) for each in rates]})
    assert open_sweep(base, replace(plain, points=[first])).record.id == opened.record.id


def test_a_trial_is_judged_by_the_best_value_of_a_metric_of_its_training(tmp_path: Path) -> None:
    """By the best value, as for metrics of evaluations: not by the last one."""
    asked = search(metric="train/loss")
    opened = open_sweep(experiment(tmp_path), asked)
    opened.note("trial_suggested", trial="trial-000", index=0, values={})
    run = open_run(asked.trial(experiment(tmp_path), "trial-000", {})).run
    lines = [{"step": step, "train/loss": loss} for step, loss in enumerate([0.5, 0.25, "NaN", 0.75])]
    run.folder.write("metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 9, "other": 0}]))
    run.update(status="completed", metrics={"train/loss": 0.75})
    (trial,) = opened.trials()
    assert trial.metric == 0.25
    assert opened.refreshed(trial).metric == 0.25
    # Values in the journal are not read again from the run.
    opened.note("trial_ended", trial="trial-000", status="completed", reason="", error=None, metric=0.125, steps=4)
    assert opened.trials()[0].metric == 0.125


def test_only_the_best_finished_trials_keep_their_checkpoints(tmp_path: Path) -> None:
    opened = open_sweep(experiment(tmp_path), search(trials=5, keep_best_trials=2))
    trained = TinyTrainer(TinyConfig(max_steps=4), run_dir=str(tmp_path / "tiny/trial-001")).fit()
    assert trained.last_checkpoint is not None
    trials = []
    for index, (status, metric) in enumerate(
        [
            ("completed", 0.1),
            ("stopped", 0.4),
            ("completed", 0.2),
            ("failed", None),
            ("completed", None),
            ("running", 9),
        ]
    ):
        name = f"trial-00{index}"
        opened.note("trial_suggested", trial=name, index=index, values={})
        trials.append(
            TrialResult(
                name=name, index=index, values={}, status=status, metric=metric, run_dir=str(tmp_path / "tiny" / name)
            )  # type: ignore[arg-type]
        )
    found = surplus(trials, mode="min", keep=2)
    assert [trial.name for trial in found] == ["trial-001", "trial-004"]
    assert {trial.name for trial in surplus(trials, mode="max", keep=1)} == {"trial-000", "trial-002", "trial-004"}
    without = [replace(trial, metric=None) for trial in trials]
    assert surplus(without, mode="min", keep=2) == [], "none is better than another"
    # 10 + 20 + 30 bytes of finished trials, of which trial-000 is the best and trial-004 has no metric.
    sizes = {"trial-000": 10, "trial-001": 20, "trial-002": 30, "trial-004": 5}
    for limit, names in (
        (65, []), (60, ["trial-004"]), (59, ["trial-004", "trial-001"]), (39, ["trial-004", "trial-001", "trial-002"]),
        (1, ["trial-004", "trial-001", "trial-002"]),
    ):  # fmt: skip
        assert [trial.name for trial in over_limit(trials, sizes, mode="min", limit=limit)] == names
    size = sum(file.stat().st_size for file in Path(tmp_path, "tiny/trial-001/checkpoints").rglob("step-*/*"))
    # All but the manifests.
    assert 0 < checkpoint_bytes(found[0]) < size
    assert delete_checkpoints(found[0]) >= 1
    assert checkpoint_bytes(found[0]) == 0
    assert delete_checkpoints(found[1]) == 0
    assert not Path(trained.last_checkpoint).exists()
    opened.note("checkpoints_deleted", trial="trial-001", checkpoints=1)
    assert opened.trials()[1].has_no_checkpoints
    assert opened.trials()[1].last_checkpoint is None


def test_brackets_of_hyperband_cost_the_same_and_a_trial_keeps_its_own() -> None:
    scheduler = HyperBand(max_evaluations=81)
    assert scheduler.first_looks == [1, 3, 9, 27, 81]
    dealt = [scheduler.bracket_of(index) for index in range(200)]
    # Li et al. 2018, table 1: 81, 34 (of 33.75), 15, 8 (of 7.5) and 5 trials, of which one survives all looks.
    shares = [dealt.count(bracket) * 81 / dealt.count(0) for bracket in range(5)]
    assert shares == pytest.approx([81, 33.75, 15, 7.5, 5], abs=1)
    assert HyperBand(max_evaluations=243, brackets=2).first_looks == [1, 3]
    # A quotient of logarithms that is 4.999...
    assert len(HyperBand(max_evaluations=243).first_looks) == 6
    assert ASHA(grace=100).grace == 100
    with pytest.raises(ConfigError, match=r"grace must be <= max_evaluations \(100\), got 200"):
        ASHA(grace=200)
    for wrong in ({"brackets": 6}, {"grace": 82}, {"reduction": 1}, {"brackets": 0}):
        with pytest.raises(ConfigError):
            HyperBand(**wrong)  # type: ignore[arg-type]
