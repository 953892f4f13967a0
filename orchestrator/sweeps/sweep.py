"""`sweep(experiment, search)`: many runs of one experiment on Ray Tune, resumable after any end of the driver."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.trainer.errors import ConfigError

from ..cluster.ray_env import quiet_environment
from ..config.experiment import Experiment
from ..config.loader import check_experiment, check_not_redacted
from ..errors import RunConflictError
from ..runs.open import open_sweep, record_changed_settings
from ..runs.run import SWEEP_RECORD, now
from ..storage.folder import Folder, absolute, retry_storage
from ..train.fit import check_training, keep_error, summarize_error
from .console import SweepConsole
from .driver import ABORT_TIMEOUT_S, ALL_ENDED, SweepDriver
from .ending import out_of_patience, target_reached
from .optuna_search import PastTrial
from .record import Sweep
from .result import SweepResult
from .sampling import fits
from .search import Search

if TYPE_CHECKING:
    from .tune.searcher import TuneSearcher


def sweep(
    experiment: Experiment,
    search: Search,
    *,
    retry_failed: bool = False,
    verbose: bool = False,
    display: SweepConsole | None = None,
) -> SweepResult:
    """Run or resume a sweep, and show its progress.

    Uses the Ray that `fit` would use. In the main thread, the first SIGINT or SIGTERM saves a checkpoint of each trial
    and ends the sweep as "interrupted"; a second Ctrl-C ends it immediately. The same call again resumes it: ended
    trials are not trained again, others resume from their checkpoints, and suggestions are the same.

    Args:
        experiment: what to train; gives the sweep its name, and the trials are in its folder.
        search: the space, the metric and the budget.
        retry_failed: train failed trials again, each from its newest checkpoint.
        verbose: show Ray's output.
        display: shows the sweep; by default on standard output.

    Raises:
        ConfigError: the arguments are invalid, or the machines do not suffice for one trial.
        RunConflictError: the name belongs to another run or sweep, or another driver has taken over the sweep.
        StorageError: the storage cannot be written.
    """
    quiet_environment(verbose=verbose)
    from ..cluster.connect import check_resources, usable_cpus, will_start_own_ray
    from ..cluster.token_check import check_token

    check_experiment(experiment)
    check_not_redacted(experiment)
    search.check(experiment)
    display = display or SweepConsole(search.metric, search.mode)
    check_token()
    check_resources(search.largest_scaling(experiment))
    # A Ray started here has more CPUs than the machine; those are for reading data.
    cpus = usable_cpus() if will_start_own_ray() else None
    first = _first_valid_trial(experiment, search)
    if cpus is not None:
        check_training(first)
    folder = Folder(experiment.run_dir)
    # Before the sweep has its name, because both may be refused. A sweep that exists may have ended and need neither.
    learned = None if folder.exists(SWEEP_RECORD) else _warm_and_searcher(search, folder)
    opened = open_sweep(experiment, search, say=display.line)
    try:
        return _run_sweep(
            experiment, search, opened, display, learned, retry_failed=retry_failed, cpus=cpus, verbose=verbose
        )
    finally:
        opened.release()


def _run_sweep(
    experiment: Experiment,
    search: Search,
    opened: Sweep,
    display: SweepConsole,
    learned: tuple[list[PastTrial], TuneSearcher | None] | None,
    *,
    retry_failed: bool,
    cpus: float | None,
    verbose: bool,
) -> SweepResult:
    """Run a sweep that this process owns."""
    from ..cluster.connect import ray_connection
    from ..train.signals import StopSignals
    from .concurrency import ConcurrencyLimit
    from .tune.adapter import tune_trials

    if retry_failed:
        opened.retry_failed()
    trials = opened.trials()
    ended = sum(trial.has_ended for trial in trials)
    reason = ALL_ENDED if ended >= search.num_trials else target_reached(search, trials)
    if reason is None and ended == len(trials):
        reason = out_of_patience(search, trials)
    if reason is not None:
        return _end(opened, display, "completed", reason)
    warm, searcher = learned or _warm_and_searcher(search, opened.folder)
    if searcher is not None and searcher.note is not None:
        display.line(searcher.note, "yellow")
    for change in record_changed_settings(opened, experiment):
        display.line(f"  {change}", "dim")
    with StopSignals() as signals:
        try:
            scaling = search.largest_scaling(experiment)
            with ray_connection(scaling, verbose=verbose, say=display.line) as is_own:
                signals.install()
                capacity = ConcurrencyLimit(scaling, search, cpus=cpus)
                lead = SweepDriver(experiment, search, opened, signals, display, searcher, warm)
                # Trials in a Ray started here end with it.
                status, reason = lead.run(capacity, tune_trials, leave_s=0.0 if is_own else ABORT_TIMEOUT_S)
        except KeyboardInterrupt:
            status, reason = "interrupted", f"{signals.name} before training began"
        except RunConflictError:
            # The sweep's files belong to another driver now.
            raise
        except BaseException as error:
            with keep_error(error):
                opened.update(status="failed", reason=summarize_error(error), ended=now())
            raise
        finally:
            display.close()
    return _end(opened, display, status, reason, signal=signals.number if status == "interrupted" else None)


def _warm_and_searcher(search: Search, folder: Folder) -> tuple[list[PastTrial], TuneSearcher | None]:
    """Return the trials of other sweeps to learn from, and the searcher of Ray Tune if the search has one.

    Raises:
        ConfigError: `warm_start` is invalid, or the searcher does not accept the search.
    """
    warm = warm_trials(search)
    if not search.has_searcher:
        return warm, None
    from .tune.searcher import TuneSearcher

    return warm, TuneSearcher(search, folder, warm)


def warm_trials(search: Search) -> list[PastTrial]:
    """Return the ended trials of the sweeps in `search.warm_start` that fit the space.

    Raises:
        ConfigError: there is no such sweep, or it has another metric or mode.
    """
    found: list[PastTrial] = []
    for place in search.warm_start:
        earlier = Sweep(absolute(place))
        if (earlier.record.search["metric"], earlier.record.search["mode"]) != (search.metric, search.mode):
            raise ConfigError(
                f"warm_start: {place} has the metric {earlier.record.search['metric']!r} "
                f"({earlier.record.search['mode']}), this search {search.metric!r} ({search.mode})"
            )
        trials = [trial.tried for trial in earlier.trials() if trial.has_ended and fits(search.space, trial.values)]
        found += [
            replace(each, values={path: value for path, value in each.values.items() if path in search.space})
            for each in trials
        ]
    return found


def _first_valid_trial(experiment: Experiment, search: Search) -> Experiment:
    """Return the first trial whose values are a valid combination.

    Raises:
        ConfigError: no trial is valid; gives the error of the first one.
    """
    wrong: ConfigError | None = None
    for index in range(search.num_trials):
        try:
            # Not by an object of the user, which may count how often it is asked.
            values = search.suggest(index) if isinstance(search.algorithm, str) else search.sample(index)
            return search.trial(experiment, "trial", values)
        except ConfigError as error:
            wrong = wrong or error
    raise ConfigError(f"no trial in this space is valid; first error: {wrong}")


def _end(sweep: Sweep, display: SweepConsole, status: Any, reason: str, signal: int | None = None) -> SweepResult:
    retry_storage(lambda: sweep.update(status=status, reason=reason, ended=now()))
    result = SweepResult.read(sweep.sweep_dir, signal=signal)
    display.end(result)
    return result
