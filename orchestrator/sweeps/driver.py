"""The driver of one start of a sweep: gives trials to Ray Tune, keeps the journal, and handles stop requests."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from headway.trainer.errors import CheckpointError, ConfigError, HeadwayError
from headway.trainer.metrics.units import human_duration

from ..config.experiment import Experiment
from ..config.loader import override, to_plain, to_yaml
from ..config.values import check_paths
from ..errors import TrainingFailedError
from ..runs.open import open_run, provenance_of
from ..runs.requests import StopRequest, read_stop_request, request_stop
from ..runs.run import Run, now
from ..storage.events import read_events
from ..storage.folder import Folder, StorageOutage, retry_storage
from ..train.fit import summarize_error
from .console import SweepConsole, shown
from .ending import meets_target, out_of_patience, target_reached
from .optuna_search import PastTrial
from .pbt_checkpoints import PBTCheckpoints
from .record import Sweep, TrialResult
from .retention import checkpoint_bytes, delete_checkpoints, over_limit, surplus
from .sampling import Params
from .search import Search

if TYPE_CHECKING:
    from .concurrency import ConcurrencyLimit
    from .tune.searcher import TuneSearcher

# How long Ray Tune may take to abort its trials.
ABORT_TIMEOUT_S = 10.0
ALL_ENDED = "all trials have ended"


class SweepDriver:
    """One start of a sweep: Ray Tune in a thread, and a loop that shows the sweep and handles stop requests.

    Attributes:
        experiment, search, sweep: the arguments.
        is_over: whether Ray Tune is to abort all trials.
    """

    def __init__(
        self,
        experiment: Experiment,
        search: Search,
        sweep: Sweep,
        signals: Any,
        display: SweepConsole,
        searcher: TuneSearcher | None = None,
        warm: Sequence[PastTrial] = (),
    ) -> None:
        self._searcher, self._warm = searcher, list(warm)
        self._checkpoint_bytes: dict[str, int] = {}
        self.experiment, self.search, self.sweep = experiment, search, sweep
        self._signals, self._display = signals, display
        self._trials = {trial.name: trial for trial in sweep.trials()}
        self._waiting = [trial for trial in self._trials.values() if not trial.has_ended]
        # Shared by all trials, because it is the slowest part of starting one.
        self._provenance = provenance_of(experiment)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._training: set[str] = set()
        self._donors = PBTCheckpoints(
            (event for event in read_events(sweep.folder) if event["event"] == "trial_changed"),
            {trial.name: trial.resume for trial in self._waiting if trial.resume != "auto"},
        )
        # Trials that a user stopped one by one.
        self._left: set[str] = set()
        self._stop: StopRequest | None = None
        self._stop_since_s = 0.0
        self._signals_seen = 0
        # Why the sweep has nothing more to find.
        self._goal: str | None = None
        self._started_s = time.monotonic()
        self.is_over = False
        self._outage = StorageOutage()

    def run(
        self, capacity: ConcurrencyLimit, tune_trials: Callable[[SweepDriver], None], *, leave_s: float
    ) -> tuple[Any, str]:
        """Run the trials, and return the final status and its reason.

        Args:
            capacity: gives how many trials may train concurrently.
            tune_trials: runs the trials on Ray Tune, in another thread.
            leave_s: how long to wait for Ray Tune when the sweep ends immediately.

        Raises:
            ConfigError: no trial has started in time, or the algorithm suggests what the experiment or the space lacks.
            StorageError: the sweep's folder has been unavailable for a minute.
            TrainingFailedError: Ray Tune or the algorithm failed, or its thread could not use the storage for a minute.
        """
        done = sum(trial.has_ended for trial in self._trials.values())
        self._display.begin(self.experiment, self.search, capacity.summary, done=done, resuming=len(self._waiting))
        for trial in self._trials.values():
            if trial.has_ended:
                self._display.ended(trial, before=True)
        self._signals.raises = False
        self._capacity = capacity
        thread = threading.Thread(target=self._tune, args=(tune_trials,), name="headway-ray-tune", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.2)
                self._display.refresh()
                if (reason := self._poll()) is not None and self._stop is not None:
                    return self._stop.status, reason
                if self._stop is None and (line := capacity.poll()) is not None:
                    self._display.line(line, "dim")
        finally:
            # However this driver leaves, no trial may train or start from now on.
            self.is_over = True
            thread.join(leave_s)
        if isinstance(self._error, (ConfigError, TrainingFailedError)):
            raise self._error
        if self._error is not None:
            raise TrainingFailedError(f"Ray Tune failed: {summarize_error(self._error)}") from self._error
        if self._stop is not None:
            is_goal = self._stop.reason == self._goal
            return "completed" if is_goal else self._stop.status, self._stop.reason
        return self._outcome()

    def _outcome(self) -> tuple[Any, str]:
        """Return the status and reason of a sweep that was not stopped as a whole."""
        if self._left:
            return "stopped", f"not trained to the end: {', '.join(sorted(self._left))}"
        trials = self._trials.values()
        exhausted = self._searcher.exhausted if self._searcher is not None else None
        ended = self._goal or exhausted or target_reached(self.search, trials) or out_of_patience(self.search, trials)
        return "completed", ended or ALL_ENDED

    def _poll(self) -> str | None:
        """Call `_handle_requests`; return None if the storage is unavailable for the moment."""
        return self._outage.tolerate(self._handle_requests, fail_now=lambda: self._signals.count > 1)

    def _handle_requests(self) -> str | None:
        """Send the driver's heartbeat, and forward requests to stop to the trials.

        Returns:
            The reason to leave without waiting for the trials, or None.
        """
        self.sweep.beat()
        if (count := self._signals.count) > self._signals_seen:
            request_stop(
                self.sweep.folder, StopRequest(reason=self._signals.name, status="interrupted", abort=count > 1)
            )
            self._signals_seen = count
        elif self._stop is None and (stop := self._own_stop()) is not None:
            request_stop(self.sweep.folder, stop)
        asked = read_stop_request(self.sweep.folder)
        if asked is None:
            return None
        if asked != self._stop:
            self._stop_trials(asked)
            self._stop, self._stop_since_s = asked, time.monotonic()
            if not asked.abort:
                self._display.line(f"{asked.reason}: saving a checkpoint of each trial and ending")
        if asked.within_s is not None and time.monotonic() - self._stop_since_s > asked.within_s:
            self._stop_trials(replace(asked, abort=True))
            return f"{asked.reason}, without checkpoints after {human_duration(asked.within_s)}"
        return f"{asked.reason}, immediately" if asked.abort else None

    def _own_stop(self) -> StopRequest | None:
        """Return the request to stop of the search itself, if its goal is reached or its time is up."""
        if self._goal is not None and self._training:
            return StopRequest(reason=self._goal)
        budget = self.search.time_budget
        if budget is not None and time.monotonic() - self._started_s >= float(budget.amount):
            reason = f"time_budget of {human_duration(float(budget.amount))} is used up"
            return StopRequest(reason=reason, status="time_limit")
        return None

    def _stop_trials(self, asked: StopRequest) -> None:
        with self._lock:
            training = list(self._training)
        for name in training:
            # "interrupted" whatever the status of the sweep, so that the trial resumes with it.
            request_stop(Folder(self.sweep.folder.path(name)), replace(asked, status="interrupted", within_s=None))

    def _tune(self, tune_trials: Callable[[SweepDriver], None]) -> None:
        try:
            tune_trials(self)
        except BaseException as error:
            self._error = error

    @property
    def max_concurrent(self) -> int:
        """How many trials may train at the moment."""
        return self._capacity.max_concurrent

    def next_trial(self) -> tuple[TrialResult, Params] | Literal["wait"] | None:
        """Return the next trial to train and its values; "wait" if there may be one later, or None."""
        return retry_storage(self._next)

    def _next(self) -> tuple[TrialResult, Params] | Literal["wait"] | None:
        # Trials started by an earlier driver come first. May be repeated if the storage fails meanwhile.
        if self._signals.count or self._stop is not None or self._goal is not None:
            return None
        # First, so that no trial is taken from another driver.
        self.sweep.check_lease()
        while True:
            if not self._waiting and (outcome := self._suggest()) != "queued":
                return "wait" if outcome == "wait" else None
            trial = self._waiting[0]
            try:
                experiment = self._trial_experiment(trial)
            except ConfigError as error:
                self._record_invalid(trial, error)
                continue
            opened = open_run(
                experiment,
                accept_changes=self.search.pauses,
                take_over=True,
                provenance=self._provenance,
            )
            # The process that trains the trial claims it.
            opened.run.release()
            del self._waiting[0]
            with self._lock:
                self._training.add(trial.name)
            self._display.started(trial)
            return trial, self._typed(trial, experiment)

    def _suggest(self) -> Literal["queued", "wait", "finished"]:
        """Queue one more trial, unless all have been suggested or the search is to wait or to end."""
        index = len(self._trials)
        trials = list(self._trials.values())
        if index >= self.search.num_trials:
            return "finished"
        if out_of_patience(self.search, trials) is not None:
            # A running trial may still improve.
            return "wait" if self._training else "finished"
        tried = [each.tried for each in trials]
        with self._named_suggest():
            if self._searcher is None or index < len(self.search.points):
                values = self.search.suggest(index, [*self._warm, *tried])
                self._check_suggested(values)
            else:
                suggested = self._searcher.suggest(index, tried)
                if isinstance(suggested, str):
                    return suggested
                values = suggested
        width = len(str(max(self.search.num_trials - 1, 100)))
        name = f"trial-{index:0{width}}"
        values = to_plain(values)
        trial = TrialResult(name=name, index=index, values=values, run_dir=self.sweep.folder.path(name))
        # Before the trial has any files, so that a resumed sweep suggests the same values.
        self.sweep.note("trial_suggested", trial=name, index=index, values=values)
        self._trials[name] = trial
        self._waiting.append(trial)
        return "queued"

    @contextmanager
    def _named_suggest(self) -> Iterator[None]:
        """Name the class of the algorithm in an exception of its `suggest`."""
        try:
            yield
        except HeadwayError:
            raise
        except Exception as error:
            raise TrainingFailedError(
                f"{type(self.search.algorithm).__qualname__}.suggest raised {summarize_error(error)}",
                worker_traceback="".join(traceback.format_exception(error)),
            ) from error

    def _check_suggested(self, values: Params) -> None:
        """Check that the experiment has the fields that an algorithm of the user has suggested.

        Raises:
            ConfigError: it lacks one; names the nearest.
        """
        if isinstance(self.search.algorithm, str):
            return
        for path, value in values.items():
            try:
                check_paths(self.experiment, [path])
            except ConfigError as error:
                # A section that is None has its fields once one is set.
                try:
                    attrgetter(path)(override(self.experiment, {path: value}))
                except (ConfigError, AttributeError):
                    kind = type(self.search.algorithm).__qualname__
                    raise ConfigError(f"{kind}.suggest returned {path!r}: {error}") from error

    def _record_invalid(self, trial: TrialResult, error: ConfigError) -> None:
        """Record that the values of a trial are not a valid combination."""
        failed = replace(trial, status="failed", error=summarize_error(error))
        self._log_end(failed)
        del self._waiting[0]
        self._trials[trial.name] = failed
        self._display.ended(failed)

    def _trial_experiment(self, trial: TrialResult) -> Experiment:
        return self.search.trial(self.experiment, trial.name, trial.values)

    def _typed(self, trial: TrialResult, experiment: Experiment) -> Params:
        """Return all settings of a trial by path, with the types of its config."""
        return {path: attrgetter(path)(experiment) for path in self.search.settings(self.experiment, trial.values)}

    def ended(self, name: str, error: str | None) -> None:
        """Record that the process of a trial has ended, with an error if that is not in its files."""
        trial = self._trials[name] = retry_storage(lambda: self._record_end(name, error))
        with self._lock:
            self._training.discard(name)
        if not trial.has_ended:
            if read_stop_request(Folder(trial.run_dir)) is not None:
                self._left.add(name)
            self._display.left(trial)
            return
        self._donors.release(name)
        self._display.ended(trial)
        if (reason := target_reached(self.search, [trial])) is not None:
            self.reach_goal(reason)
        self._delete_checkpoints()

    def _record_end(self, name: str, error: str | None) -> TrialResult:
        """Return the state of a trial from its files, after recording its end in the journal if it has ended."""
        self.sweep.check_lease()
        # A trial that was aborted has not failed.
        if error is not None and self._stop is None:
            with suppress(ConfigError):
                Run(self.sweep.folder.path(name)).update(status="failed", reason="", error=error, ended=now())
        trial = self.sweep.refreshed(self._trials[name])
        if trial.has_ended:
            self._log_end(trial)
        return trial

    def _log_end(self, trial: TrialResult) -> None:
        self.sweep.note(
            "trial_ended", trial=trial.name, status=trial.status, reason=trial.reason, error=trial.error,
            metric=trial.metric, steps=trial.steps,
        )  # fmt: skip

    def _surplus(self) -> list[TrialResult]:
        """Return the finished trials whose checkpoints the search does not keep."""
        search, trials = self.search, self._trials.values()
        found = []
        if search.keep_best_trials is not None:
            found += surplus(trials, mode=search.mode, keep=search.keep_best_trials)
        if search.max_checkpoint_bytes is not None:
            sizes = self._checkpoint_bytes
            for trial in trials:
                if trial.has_ended and trial.name not in sizes:
                    # Counted the next time if the storage is away.
                    with suppress(OSError, CheckpointError):
                        sizes[trial.name] = 0 if trial.has_no_checkpoints else checkpoint_bytes(trial)
            found += over_limit(trials, sizes, mode=search.mode, limit=search.max_checkpoint_bytes)
        return found

    def _delete_checkpoints(self) -> None:
        """Delete the checkpoints that the search does not keep."""
        for trial in self._surplus():
            if not self._trials[trial.name].has_no_checkpoints:
                self._trials[trial.name] = replace(trial, has_no_checkpoints=True)
                self._checkpoint_bytes[trial.name] = 0
                try:
                    deleted = delete_checkpoints(trial)
                except OSError as error:
                    self._display.line(f"could not delete the checkpoints of {trial.name}: {error}", "yellow")
                    continue
                note = partial(self.sweep.note, "checkpoints_deleted", trial=trial.name, checkpoints=deleted)
                retry_storage(note)

    def exploited(self, name: str, checkpoint: str, values: Params) -> tuple[Params, str]:
        """Record that a trial resumes from another trial's checkpoint with other values. May be repeated.

        Returns:
            All its settings, and the checkpoint, which is kept until the trial has saved one itself.
        """
        tried = {path: to_plain(value) for path, value in values.items() if path in self.search.space}
        try:
            self.search.trial(self.experiment, name, tried)
        except ConfigError as error:
            (donor,) = [each for each in self._trials.values() if checkpoint.startswith(f"{each.run_dir}/")]
            self._display.line(f"{name} uses the values of {donor.name} unchanged: {summarize_error(error)}", "yellow")
            tried = donor.values
        checkpoint, pinned = self._donors.keep(name, checkpoint)
        trial = replace(self._trials[name], values=tried, resume=checkpoint)
        before = retry_storage(lambda: Run(trial.run_dir).lease)
        self.sweep.note("trial_changed", trial=name, values=tried, checkpoint=checkpoint, pinned=pinned, after=before)
        self._trials[name] = trial
        run = Run(trial.run_dir)
        experiment = self._trial_experiment(trial)
        run.folder.write("config.yaml", to_yaml(experiment), durable=True)
        self._display.line(f"{name} resumes from {checkpoint} with {shown(tried)}", "dim")
        return self._typed(trial, experiment), checkpoint

    def reach_goal(self, reason: str) -> None:
        """Start no more trials; the others save a checkpoint and end."""
        self._goal = self._goal or reason

    def forward(self, event: str, name: str, *args: Any) -> None:
        """Forward an event of a trial to the searcher."""
        if self._searcher is not None:
            self._searcher.forward(event, self._trials[name].index, *args)

    def reported(self, name: str, report: Mapping[str, Any]) -> None:
        """Show the report of a trial, and give it to the searcher."""
        self._display.reported(name, report)
        self.forward("on_trial_result", name, dict(report))
        if (reason := meets_target(self.search, name, report.get(self.search.metric))) is not None:
            self.reach_goal(reason)
        # The report that led to the change arrives here, too.
        if self._donors.is_waiting(name) and retry_storage(lambda: self.sweep.has_saved_since_change(name)):
            self._donors.release(name)
