"""Searchers, schedulers, stoppers and callbacks of Ray Tune in a sweep on a real Ray."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandForBOHB, HyperBandScheduler, PopulationBasedTraining
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.orchestrator import PBT, Experiment, LogUniform, Retries, Scaling, Search, Uniform, sweep
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, Trainer, TrainerConfig, load_weights
from tests.tiny import TinyConfig, TinyTrainer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

RATE = "config.learning_rate"


class Counting(tune.Callback):  # type: ignore[misc]
    """Counts the reports that Ray Tune gives to a callback of the user."""

    reports: ClassVar[list[dict[str, Any]]] = []

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
        Counting.reports.append(result)


def experiment(tmp_path: Path, **settings: Any) -> Experiment:
    return Experiment(
        name="theirs", trainer=TinyTrainer, config=TinyConfig(**{"max_epochs": 4, **settings}), storage=str(tmp_path)
    )


def attempts_of(trial: Any) -> list[Any]:
    return [event for event in read_events(Folder(trial.run_dir)) if event["event"] == "attempt_started"]


def test_a_sweep_takes_a_searcher_a_scheduler_a_callback_and_a_stop_and_goes_on_with_more_trials(
    tmp_path: Path,
) -> None:
    def search(trials: int) -> Search:
        return Search(
            space={RATE: tune.loguniform(1e-6, 1e-1)},
            algorithm=OptunaSearch(seed=1),
            scheduler=ASHAScheduler(max_t=8, grace_period=1, reduction_factor=2),
            points=[{RATE: 0.01}],
            stop={"evaluations": 3},
            callbacks=[Counting()],
            concurrent=2,
            trials=trials,
        )

    Counting.reports.clear()
    first = sweep(experiment(tmp_path), search(4))
    assert first.status == "completed"
    assert len(first.trials) == 4
    assert first.trials[0].values == {RATE: 0.01}
    assert len({trial.values[RATE] for trial in first.trials}) == 4
    reasons = [trial.reason for trial in first.trials]
    assert {trial.status for trial in first.trials} == {"stopped"}
    assert any(reason == "ended by search.stop after 3 evaluations" for reason in reasons), reasons
    assert all(reason.startswith(("ended by search.stop", "pruned by AsyncHyperBandScheduler")) for reason in reasons)
    assert all(trial.last_checkpoint for trial in first.trials)
    assert {"validation/loss", "evaluations", "step"} <= set(Counting.reports[0])
    more = sweep(experiment(tmp_path), search(6))
    assert [trial.values for trial in more.trials[:4]] == [trial.values for trial in first.trials]
    assert len({trial.values[RATE] for trial in more.trials}) == 6


@pytest.mark.extended
def test_synchronous_hyperband_ends_the_trials_that_it_has_paused(tmp_path: Path) -> None:
    search = Search(
        space={RATE: [1e-2, 1e-5, 1e-6, 1e-7]},
        algorithm="grid",
        scheduler=HyperBandScheduler(time_attr="evaluations", max_t=4, reduction_factor=2),
        concurrent=2,
    )
    result = sweep(experiment(tmp_path), search)
    assert result.status == "completed", result.reason
    assert {trial.status for trial in result.trials} <= {"completed", "stopped"}
    pruned = [trial for trial in result.trials if trial.reason.startswith("pruned by HyperBandScheduler after ")]
    assert pruned
    assert all(trial.last_checkpoint for trial in pruned)


class LikeBOHB(Searcher):  # type: ignore[misc]
    """Has the methods of `TuneBOHB`, whose packages are not installed here."""

    # Per trial: budgets of the results, and "pause" or "unpause".
    heard: ClassVar[dict[str, list[Any]]] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **_: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, float]:
        LikeBOHB.heard[trial_id] = []
        return {RATE: 10.0 ** -len(LikeBOHB.heard)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        LikeBOHB.heard[trial_id] += filter(None, [result["hyperband_info"].get("budget")])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass

    def on_pause(self, trial_id: str) -> None:
        LikeBOHB.heard[trial_id].append("pause")

    def on_unpause(self, trial_id: str) -> None:
        LikeBOHB.heard[trial_id].append("unpause")

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).touch()


def test_a_searcher_for_bohb_hears_of_budgets_and_pauses(tmp_path: Path) -> None:
    LikeBOHB.heard.clear()
    search = Search(
        space={RATE: Uniform(0.0, 1.0)}, algorithm=LikeBOHB(), trials=4, concurrent=2,
        scheduler=HyperBandForBOHB(time_attr="evaluations", max_t=4, reduction_factor=2),
    )  # fmt: skip
    result = sweep(experiment(tmp_path), search)
    assert result.status == "completed"
    heard = list(LikeBOHB.heard.values())
    assert len(heard) == 4
    assert {each for events in heard for each in events} >= {1, "pause", "unpause"}
    pruned = [trial for trial in result.trials if trial.reason.startswith("pruned by HyperBandForBOHB after 1 eval")]
    assert len(pruned) == 2


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::sklearn.exceptions.ConvergenceWarning")
def test_pb2_changes_trials_as_pbt_does(tmp_path: Path) -> None:
    scheduler = PB2(
        time_attr="evaluations", perturbation_interval=1, quantile_fraction=0.5, hyperparam_bounds={RATE: [1e-6, 1e-1]}
    )
    search = Search(
        space={RATE: LogUniform(1e-6, 1e-1), "config.dropout": Uniform(0, 0.1)}, trials=2, scheduler=scheduler
    )
    # Long enough that both train at the same time on a busy machine, too.
    result = sweep(experiment(tmp_path, max_epochs=30), search)
    assert [trial.status for trial in result.trials] == ["completed", "completed"]
    changes = [event for event in read_events(Folder(result.sweep_dir)) if event["event"] == "trial_changed"]
    assert changes
    assert set(changes[0]["values"]) == {RATE, "config.dropout"}


@pytest.mark.extended
def test_trials_have_the_number_of_workers_of_their_values(tmp_path: Path) -> None:
    search = Search(space={"scaling.workers": [1, 2]}, algorithm="grid")
    result = sweep(replace(experiment(tmp_path, max_epochs=1), scaling=Scaling(cpus_per_worker=0.5)), search)
    assert [trial.status for trial in result.trials] == ["completed", "completed"]
    for workers, trial in enumerate(result.trials, 1):
        (started,) = attempts_of(trial)
        assert started["world_size"] == workers
    # Each worker has its own batches, so two take half as many steps.
    assert [trial.steps for trial in result.trials] == [12, 6]


class FailsLate(TinyTrainer):
    """Fails in an epoch if its learning rate is above 0.5, after the others have come to the end of theirs."""

    epoch = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.progress.epoch == self.epoch and self.config.learning_rate > 0.5:
            time.sleep(10)
            raise ValueError("as planned")
        return super().training_step(batch, batch_idx)


@pytest.mark.extended
def test_trials_of_synchronous_pbt_do_not_wait_for_one_that_has_failed(tmp_path: Path) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="evaluations", perturbation_interval=2, synch=True, quantile_fraction=0.5,
        hyperparam_mutations={RATE: tune.loguniform(1e-6, 1e-2)},
    )  # fmt: skip
    search = Search(
        space={RATE: LogUniform(1e-6, 1.0)}, points=[{RATE: 0.9}, {RATE: 1e-2}, {RATE: 1e-6}], trials=3,
        scheduler=scheduler, concurrent=3,
    )  # fmt: skip
    failing = replace(experiment(tmp_path), trainer=FailsLate, retries=Retries(max_errors=0))
    result = sweep(failing, search)
    assert [trial.status for trial in result.trials] == ["failed", "completed", "completed"]
    changes = [event for event in read_events(Folder(result.sweep_dir)) if event["event"] == "trial_changed"]
    assert changes
    assert all(Path(change["checkpoint"]).name == "step-00000024" for change in changes[:1])


class FailsFirst(FailsLate):
    """Fails before it has reported."""

    epoch = 0


@pytest.mark.extended
def test_trials_of_synchronous_hyperband_do_not_wait_for_one_that_failed_before_its_first_report(
    tmp_path: Path,
) -> None:
    # The first three are a bracket that does not wait.
    search = Search(
        space={RATE: [1e-2, 1e-3, 1e-4, 0.9, 1e-5, 1e-6]}, algorithm="grid", concurrent=3,
        scheduler=HyperBandScheduler(time_attr="evaluations", max_t=4, reduction_factor=2),
    )  # fmt: skip
    failing = replace(experiment(tmp_path), trainer=FailsFirst, retries=Retries(max_errors=0))
    result = sweep(failing, search)
    assert result.trials[3].status == "failed"
    # One epoch has 12 steps.
    assert max(trial.steps for trial in result.trials[4:]) == 48


@dataclass(frozen=True, kw_only=True)
class ClimbConfig(TrainerConfig):
    rate: float


class Climb(Trainer[ClimbConfig]):
    """Adds the rate to its only weight in each step, so the weight shows which trials it has been through."""

    def configure_models(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.config.rate)

    def configure_dataloaders(self) -> Any:
        ones = TensorDataset(torch.ones(8, 1))
        return DataLoader(ones, batch_size=1), DataLoader(ones, batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training:
            # So that both trials train at the same time on a busy machine, too.
            time.sleep(0.3)
        return -self.model(batch[0]).mean()


@pytest.mark.extended
@pytest.mark.parametrize(
    "scheduler",
    [
        PBT(every=2, quantile=0.5),
        PopulationBasedTraining(
            time_attr="evaluations", perturbation_interval=6, quantile_fraction=0.5, synch=True,
            hyperparam_mutations={"config.rate": [0.1, 0.2]},
        ),
    ],
    ids=["asynchronous", "synchronous"],
)  # fmt: skip
def test_pbt_gives_trials_of_several_workers_the_weights_of_others(tmp_path: Path, scheduler: Any) -> None:
    climb = Experiment(
        name="climb",
        trainer=Climb,
        config=ClimbConfig(rate=0.1, max_epochs=10, checkpoint=CheckpointConfig(keep_last="all")),
        scaling=Scaling(workers=2),
        storage=str(tmp_path),
    )
    search = Search(
        space={"config.rate": LogUniform(1e-3, 1.0)},
        points=[{"config.rate": 0.01}, {"config.rate": 0.1}],
        trials=2,
        scheduler=scheduler,
    )
    result = sweep(climb, search)
    assert [trial.status for trial in result.trials] == ["completed", "completed"]
    change = next(event for event in read_events(Folder(result.sweep_dir)) if event["event"] == "trial_changed")
    trial = result.trials[0]
    assert change["trial"] == trial.name
    assert Path(change["checkpoint"]).is_relative_to(result.trials[1].run_dir)
    events = read_events(Folder(trial.run_dir))
    assert {event["world_size"] for event in attempts_of(trial)} == {2}
    restored = next(event for event in events if event["event"] == "restored")
    first = next(event for event in events[events.index(restored) :] if event["event"] == "evaluated")
    weight = load_weights(change["checkpoint"])["weight"].item()
    assert weight == pytest.approx(0.1 * restored["step"])
    expected = weight + change["values"]["config.rate"] * (first["step"] - restored["step"])
    assert first["metrics"]["validation/loss"] == pytest.approx(-expected)
    if not isinstance(scheduler, PBT):
        # Each has waited for the other one, so the decision is about the same evaluation of both.
        assert restored["step"] == 24


@pytest.mark.extended
def test_synchronous_hyperband_ends_trials_of_several_workers_that_it_has_paused(tmp_path: Path) -> None:
    climb = Experiment(
        name="climb", trainer=Climb, config=ClimbConfig(rate=0.1, max_epochs=4),
        scaling=Scaling(workers=2, cpus_per_worker=0.5), storage=str(tmp_path),
    )  # fmt: skip
    scheduler = HyperBandScheduler(time_attr="evaluations", max_t=4, reduction_factor=2)
    search = Search(space={"config.rate": [0.1, 0.2, 0.3]}, algorithm="grid", scheduler=scheduler, concurrent=2)
    result = sweep(climb, search)
    assert result.status == "completed", result.reason
    assert {trial.status for trial in result.trials} <= {"completed", "stopped"}
    pruned = [trial for trial in result.trials if trial.reason.startswith("pruned by HyperBandScheduler after ")]
    assert pruned
    assert all(trial.last_checkpoint for trial in pruned)
