"""A sweep's folder: its record, and the journal from which it resumes, at whatever moment its driver was killed.

`<storage>/<name>/` contains
`sweep.json`: the record, replaced as a whole and only by the driver;
`events.jsonl`: the journal of suggestions and results;
`searcher.json`: the state of a `Searcher` of Ray Tune;
`trial-000/`, `trial-001/`, ...: the trials, each a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from headway.trainer.errors import ConfigError
from headway.trainer.ownership.claim_files import number_of
from headway.trainer.result import Status, Table, read_history

from ..errors import DamagedRecordError
from ..runs.metric_history import metric_by_step
from ..runs.requests import read_stop_request
from ..runs.run import SWEEP_RECORD, BaseRecord, RecordedFolder, Run
from ..storage.events import Event, EventWriter, read_events
from ..storage.folder import Folder
from .objectives import is_feasible

if TYPE_CHECKING:
    from headway.trainer.checkpoints.retention import Mode
    from headway.trainer.config import TrainerConfig

    from .optuna_search import PastTrial
    from .sampling import Params

PRUNED = "pruned by "
"""Prefix of the reason of a run that a scheduler stopped."""
ENDED_EARLY = "ended by search.stop"
"""Prefix of the reason of a run that `Search.stop` ended; it counts as trained to the end."""

SEARCHER_STATE = "searcher.json"

TrialStatus = Literal["pending", "running"] | Status


@dataclass(frozen=True, kw_only=True)
class SweepRecord(BaseRecord):
    """The contents of `sweep.json`.

    Attributes:
        search, experiment: the arguments as plain data.
        trials: how many trials there will be.
    """

    search: dict[str, Any]
    experiment: dict[str, Any]
    trials: int


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of one trial, or its current state, read from its files.

    Attributes:
        name: name of the trial and its folder.
        index: index of its suggestion.
        values: its hyperparameters by dotted path; `PBT` changes them.
        status: "pending", "running", or the status with which its run ended.
        reason: why it ended.
        error: its error, in one line.
        metric: best value of the sweep's metric; None if none was finite.
        steps: completed updates.
        metrics: the last value of each metric.
        run_dir: folder of its run.
        best_checkpoint, last_checkpoint: paths.
        resume: the checkpoint of another trial to resume from, or "auto".
        has_no_checkpoints: whether the sweep has deleted its checkpoints to save space.
    """

    name: str
    index: int
    values: Params
    status: TrialStatus = "pending"
    reason: str = ""
    error: str | None = None
    metric: float | None = None
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    run_dir: str = ""
    best_checkpoint: str | None = None
    last_checkpoint: str | None = None
    resume: str = "auto"
    has_no_checkpoints: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the sweep will not train it again."""
        return self.status not in ("pending", "running", "interrupted")

    @property
    def checkpoint(self) -> str | None:
        """Path of its best checkpoint, else of its last one."""
        return self.best_checkpoint or self.last_checkpoint

    @property
    def config(self) -> TrainerConfig:
        """Its complete config."""
        return Run(self.run_dir).experiment().config

    @property
    def history(self) -> Table:
        """One dict per completed epoch."""
        return read_history(f"{self.run_dir}/metrics.jsonl")

    @property
    def tried(self) -> PastTrial:
        """Its outcome, from which a search learns."""
        from .optuna_search import PastTrial

        state: Literal["training", "ended", "pruned", "failed"] = "ended" if self.has_ended else "training"
        if self.status == "failed":
            state = "failed"
        elif self.status == "stopped" and self.reason.startswith(PRUNED):
            state = "pruned"
        return PastTrial(values=self.values, state=state, metric=self.metric, steps=self.steps, metrics=self.metrics)


class Sweep(RecordedFolder[SweepRecord]):
    """An existing sweep."""

    _KIND, _FILE, _record_type = "sweep", SWEEP_RECORD, SweepRecord

    def __init__(self, sweep_dir: str | Folder) -> None:
        super().__init__(sweep_dir)
        self._journal = EventWriter(self.folder, "driver")

    @property
    def sweep_dir(self) -> str:
        """Its folder: an absolute path or a URI."""
        return self.folder.place

    def note(self, kind: str, **details: Any) -> None:
        """Write to the journal. Only the driver may call this."""
        self._journal.add(kind, **details)

    def trials(self) -> list[TrialResult]:
        """Return the suggested trials in order, each in its current state."""
        journal = {name: events for name, events in self._journal_by_trial().items() if "trial_suggested" in events}
        return self.folder.map(lambda name: self._trial(name, journal[name]), journal)

    def ended_trials(self) -> list[str]:
        """Return the names of the trials that have ended and are not to be trained again, the first ended first."""
        journal = self._journal_by_trial()
        ended = [name for name, events in journal.items() if "trial_ended" in events]
        return sorted(ended, key=lambda name: journal[name]["trial_ended"]["time"])

    def retry_failed(self) -> None:
        """Queue the failed trials again. Only the driver may call this."""
        for trial in self.trials():
            if trial.status == "failed":
                self.note("trial_retried", trial=trial.name)

    def has_saved_since_change(self, name: str) -> bool:
        """Return whether a trial has saved a checkpoint itself since PBT last made it resume from another's."""
        change = self._journal_by_trial()[name].get("trial_changed")
        return change is None or _has_saved_since(self.folder.path(name), change)

    def _journal_by_trial(self) -> dict[str, dict[str, Event]]:
        """Return the last event of each kind by trial; no end of a trial that is to be trained again."""
        found: dict[str, dict[str, Event]] = {}
        for event in read_events(self.folder):
            if "trial" in event:
                events = found.setdefault(event["trial"], {})
                events[event["event"]] = event
                if event["event"] == "trial_retried":
                    events.pop("trial_ended", None)
        return found

    def _trial(self, name: str, events: Mapping[str, Event]) -> TrialResult:
        suggested, end = events["trial_suggested"], events.get("trial_ended")
        trial = TrialResult(
            name=name, index=suggested["index"], values=suggested["values"], run_dir=self.folder.path(name)
        )
        trial = self.refreshed(trial, events.get("trial_changed"), end)
        if "trial_retried" in events and end is None and trial.status == "failed":
            # The record shows the old failure until the trial starts.
            trial = replace(trial, status="interrupted", error=None)
        if "checkpoints_deleted" in events:
            best, last = (
                path if path and is_committed(path) else None for path in (trial.best_checkpoint, trial.last_checkpoint)
            )
            trial = replace(trial, best_checkpoint=best, last_checkpoint=last, has_no_checkpoints=True)
        return trial

    def refreshed(self, trial: TrialResult, change: Event | None = None, end: Event | None = None) -> TrialResult:
        """Return the current state of a trial, from the files of its run.

        Args:
            trial: its state of before.
            change: the last "trial_changed" event, unless the trial has it already.
            end: the "trial_ended" event, if the trial has ended.
        """
        if change is not None:
            saved = _has_saved_since(trial.run_dir, change)
            trial = replace(trial, values=change["values"], resume="auto" if saved else change["checkpoint"])
        try:
            run = Run(trial.run_dir)
        except ConfigError:
            run = None
        except DamagedRecordError as error:
            run, trial = None, replace(trial, status="failed", error=str(error))
        if run is not None:
            record = run.record
            trial = replace(
                trial, status=run.status, reason=run.reason, error=record.error, steps=record.steps,
                metrics=record.metrics, best_checkpoint=record.best_checkpoint, last_checkpoint=record.last_checkpoint,
            )  # fmt: skip
            if end is None:
                trial = replace(trial, metric=_best_of(run, self.record.search))
        if end is not None:
            return replace(
                trial, **{name: end[name] for name in ("status", "reason", "error", "metric", "steps") if name in end}
            )
        if run is not None and trial.status in ("stopped", "interrupted"):
            stop = read_stop_request(run.folder)
            if stop is not None and stop.reason.startswith((PRUNED, ENDED_EARLY)):
                # A scheduler may have ended it while Ray Tune was pausing it.
                return replace(trial, status=stop.status, reason=stop.reason)
            if stop is not None:
                return replace(trial, status="interrupted")
        if trial.status == "running" and self.status != "running":
            # It was aborted, and its process may still exist.
            return replace(trial, status="interrupted")
        return trial


def ranked(trials: Iterable[TrialResult], mode: Mode, constraints: Sequence[str] = ()) -> list[TrialResult]:
    """Return the trials that have a finite metric, did not fail and meet the constraints, best first.

    Args:
        trials: trials of a sweep; of equal ones, the first is better.
        mode: "min" if lower is better.
        constraints: limits on the last values of metrics.
    """
    judged = [each for each in trials if each.metric is not None and each.status != "failed"]
    feasible = [each for each in judged if is_feasible(each.metrics, constraints)]
    return sorted(feasible, key=attrgetter("metric"), reverse=mode == "max")


def _has_saved_since(run_dir: str, change: Event) -> bool:
    # Only a later start: that before the change also saves, when it is paused.
    before = number_of(change.get("after", ""))
    return any(
        event["event"] == "checkpoint_saved" and number_of(event.get("start", "")) > before
        for event in read_events(Folder(run_dir))
    )


def is_committed(path: str) -> bool:
    """Return whether a checkpoint exists; pinned ones are never deleted."""
    return Folder(path).exists("manifest.json")


def _best_of(run: Run, search: Mapping[str, Any]) -> float | None:
    """Return the best finite value of the sweep's metric, from the run's record or, for train/*, from its log."""
    metric = search["metric"]
    if metric.startswith("validation/"):
        return run.record.best_metric
    # Imported here: runs and sweeps are listed without it, and its module takes 20 ms.
    from headway.trainer.checkpoints.retention import Best

    best = Best(search["mode"])
    for step, value in metric_by_step(run.folder, metric).items():
        best.update(value, step=step)
    return best.value
