"""`fit(experiment)`: one run on Ray Train, from opening its folder to recording its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

import torch

from headway.trainer.distributed.world import World
from headway.trainer.errors import ConfigError, HeadwayError
from headway.trainer.loop.run_state import COMPONENTS
from headway.trainer.redaction import redact

from ..cluster.ray_env import quiet_environment
from ..config.experiment import Experiment
from ..config.loader import check_experiment, check_not_redacted
from ..display.console import RunConsole
from ..errors import RunConflictError, StorageError
from ..runs.open import OpenedRun, open_run
from ..runs.result import RunResult, describe_end
from ..runs.resume import ResumeOptions
from ..runs.run import Run, now
from ..storage.events import EventWriter, read_events
from ..storage.folder import retry_storage
from ..watchdog.worker import last_heartbeat_event


def fit(
    experiment: Experiment,
    *,
    resume: Literal["auto", "never"] | str = "auto",
    restore: Collection[str] = COMPONENTS,
    accept_changes: bool = False,
    verbose: bool = False,
    display: RunConsole | None = None,
) -> RunResult:
    """Train an experiment, or resume it, and show its progress.

    Uses the Ray that this process is connected to, else the one of RAY_ADDRESS, else starts one for this run. In the
    main thread, the first SIGINT or SIGTERM saves a checkpoint and ends the run as "interrupted"; a second Ctrl-C ends
    it immediately. A dead Ray ends this process; if this function has connected to it, the run is recorded as failed.

    Args:
        experiment: what to train.
        resume: "auto" resumes from the newest good checkpoint of the run; "never" restarts an unfinished run in its
            folder; a path starts from that checkpoint. An attempt after a failure always resumes from what this start
            has saved; so does the same call again, except with "never".
        restore: parts of the checkpoint to restore, as in `Trainer.fit`.
        accept_changes: resume although the config differs from the recorded one.
        verbose: show the output of Ray and the workers.
        display: shows the run; by default on standard output.

    Raises:
        ConfigError: the arguments are invalid, the trainer cannot be pickled, the cluster requires a token, or the
            machines do not suffice.
        RunConflictError: a run of this name has another config, or belongs to another process.
        StorageError: the storage cannot be written.
        HeadwayError: an error of Headway in a worker (DataError, StepError, ...), as it was raised.
        TrainingFailedError: any other error in a worker, with its traceback, or more failures than retries.
    """
    began = time.time()
    quiet_environment(verbose=verbose)
    from ..cluster.connect import check_resources, will_start_own_ray, with_gpus
    from ..cluster.token_check import check_token
    from .worker_group import pickle_trainer

    display = display or RunConsole()
    resume_options = ResumeOptions.checked(resume, restore, accept_changes=accept_changes)
    check_experiment(experiment)
    check_not_redacted(experiment)
    check_token()
    # The record keeps what was asked for, because the next start may find other machines.
    on_gpus = replace(experiment, scaling=with_gpus(experiment.scaling))
    check_resources(on_gpus.scaling)
    check_training(on_gpus, elsewhere=not will_start_own_ray())
    pickle_trainer(on_gpus)  # again for the workers, but an error comes before anything starts
    opened = open_run(experiment, accept_changes=accept_changes, say=display.line)
    if opened.state == "finished":
        return finished_result(opened.run, display)
    try:
        return _train(opened, experiment, resume_options, display, began=began, verbose=verbose)
    finally:
        opened.run.release()


def _train(
    opened: OpenedRun,
    experiment: Experiment,
    resume_options: ResumeOptions,
    display: RunConsole,
    *,
    began: float,
    verbose: bool,
) -> RunResult:
    """Train a run that this process owns."""
    import ray

    from ..cluster.connect import clamp_to_machine, ray_connection, unused_gpus, with_gpus
    from ..cluster.own_ray import ended_processes, server_processes
    from .driver import RunDriver
    from .driver_watch import watch_driver
    from .signals import StopSignals

    run, is_never = opened.run, resume_options.resume == "never"
    _greet(opened, experiment, display)
    resume_options = _resumption(resume_options, run, display)
    experiment = replace(experiment, scaling=clamp_to_machine(with_gpus(experiment.scaling)))
    connects = not ray.is_initialized()
    with contextlib.ExitStack() as watched, StopSignals() as signals:
        try:
            display.starting(f"starting {experiment.scaling}")
            with ray_connection(experiment.scaling, verbose=verbose, say=display.line) as is_own:
                # In case a library has taken them.
                signals.install()
                servers = server_processes() if is_own else {}
                experiment = replace(experiment, scaling=with_gpus(experiment.scaling))
                if (unused := unused_gpus(experiment.scaling)) is not None:
                    display.line(unused, "yellow")
                if connects:
                    watched.enter_context(watch_driver(run, servers))
                driver = RunDriver(
                    experiment, run, signals, display, resume_options=resume_options, verbose=verbose,
                    spares=is_own if experiment.retries.spares == "auto" else experiment.retries.spares, began=began,
                )  # fmt: skip
                try:
                    result = driver.run()
                except Exception as error:
                    # Often Ray ends this process first; then `watch_driver` says it.
                    if dead := ended_processes(servers):
                        raise HeadwayError(
                            f"Ray died: its process {dead[0]} ended; to resume, start it again"
                        ) from error
                    raise
        except KeyboardInterrupt:
            display.close()
            reason = f"{signals.name} before training began"
            result = RunResult.recorded(run, status="interrupted", reason=reason, signal=signals.number)
        except RunConflictError:
            # The run's files belong to another driver now.
            display.close()
            raise
        except BaseException as error:
            display.close()
            with keep_error(error):
                record_failure(run, error)
            _add_next_steps(error, run, without=" without --resume never" if is_never else "")
            raise
        close(run, result, display, without=" without --resume never" if is_never else "")
    return result


def check_training(experiment: Experiment, *, elsewhere: bool = False) -> None:
    """Check the config and the data before Ray is started.

    Args:
        experiment: what to train.
        elsewhere: leave the data to the workers, which may be on machines that see other files.

    Raises:
        ConfigError: the trainer or its data refuses the config.
    """
    try:
        for workers in {experiment.scaling.min_workers, experiment.scaling.max_workers}:
            experiment.trainer(experiment.config, world=rank0_world(experiment, workers)).check(elsewhere=elsewhere)
    except ConfigError:
        raise
    except Exception as error:
        # An error in user code is left to the worker, which reports it with its rank and traceback.
        if type(error).__module__.startswith("headway."):
            raise ConfigError(str(error)) from error


def rank0_world(experiment: Experiment, workers: int) -> World:
    """Return the world of this many workers as seen by rank 0, for checks before workers exist."""
    device = torch.device("cuda" if experiment.scaling.gpus_per_worker else "cpu")
    return World(rank=0, size=workers, local_rank=0, device=device)


def finished_result(run: Run, display: RunConsole) -> RunResult:
    """Show that a run is finished, and return its result."""
    record = run.record
    display.line(
        f"{record.name} is finished: {record.status} after {record.steps:,} steps ({record.reason}). "
        f"Its files: {run.run_dir}"
    )
    display.line("To continue, raise config.max_steps or config.max_epochs. To start over, use another name: name=...")
    assert record.status in ("completed", "stopped")
    return RunResult.recorded(run, status=record.status, reason=record.reason)


def _greet(opened: OpenedRun, experiment: Experiment, display: RunConsole) -> None:
    display.is_resumed = opened.state == "resuming"
    display.line(f"{experiment.name}: {experiment.scaling}, {opened.state}; its files: {experiment.run_dir}")
    for change in opened.changes:
        display.line(f"  {change.path}: {change.before} -> {change.after}", "dim")


def _resumption(asked: ResumeOptions, run: Run, display: RunConsole) -> ResumeOptions:
    """Return what this start resumes from; shows a line unless that is the newest checkpoint, as asked."""
    if not asked.explicit:
        return asked
    events = read_events(run.folder)
    resume_options = asked.for_restart(events)
    newest = next((event["path"] for event in reversed(events) if event["event"] == "checkpoint_saved"), None)
    if resume_options != asked:
        display.line(f"  started with these options before: resuming from what it has saved since: {newest}", "dim")
    elif asked.resume != "auto" and newest is not None:
        start = "from step 0" if asked.resume == "never" else f"from {asked.resume}"
        display.line(f"  starting {start} as requested, not from the newest checkpoint {newest}", "yellow")
    return resume_options


def close(run: Run, result: RunResult, display: RunConsole, *, without: str = "") -> None:
    """Record how a run ended, and show it.

    Args:
        run: the run.
        result: its result.
        display: shows the end.
        without: options to leave out when the run is started again, as text.
    """
    retry_storage(lambda: run.update(
        status=result.status, reason=result.reason, ended=now(), steps=result.steps, epochs=result.epochs,
        samples=result.samples, tokens=result.tokens, metrics=result.metrics,
        last_checkpoint=result.last_checkpoint or run.record.last_checkpoint,
        best_checkpoint=result.best_checkpoint, best_metric=result.best_metric, best_step=result.best_step,
        resumed_from=result.resumed_from, data_guarantee=result.data_guarantee,
    ))  # fmt: skip
    write_driver_ended(run, result.status)
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in result.metrics.items() if "loss" in name)
    display.line(
        f"{describe_end(result.status, result.steps)}: {result.reason}" + (f"  ({numbers})" if numbers else ""), "bold"
    )
    display.line(f"its files: {result.run_dir}")
    if result.status in ("interrupted", "time_limit"):
        display.line(f"to resume, start it again{without}")


def _add_next_steps(error: BaseException, run: Run, *, without: str) -> None:
    """Note on an error where the run's files are, and how to resume it."""
    error.add_note(f"its files: {run.run_dir}")
    # An unavailable storage must not hide the error.
    with contextlib.suppress(StorageError):
        # Not from the events: a checkpoint may have been committed while the error came.
        checkpoints = run.folder.child("checkpoints")
        saved = [name for name in checkpoints.folders() if name.startswith("step-")]
        where = f"it resumes from {checkpoints.path(saved[-1])}" if saved else "without a checkpoint, from step 0"
        error.add_note(f"to resume, start it again{without}: {where}")


@contextlib.contextmanager
def keep_error(error: BaseException) -> Iterator[None]:
    """Record an error in this context: a storage that is unavailable becomes a note on it, and does not replace it."""
    try:
        yield
    except StorageError as unavailable:
        error.add_note(f"its record could not be updated, and may still say that it runs: {unavailable}")


def record_failure(run: Run, error: BaseException) -> None:
    """Record that a start of a run ended by an error.

    Raises:
        StorageError: the storage is unavailable.
    """
    run.update(status="failed", reason="", error=summarize_error(error), ended=now())
    write_driver_ended(run, "failed")


def write_driver_ended(run: Run, status: str) -> None:
    """Write the last event of a start, with the main rank's time by phase."""
    events = EventWriter(run.folder, "driver", start=run.lease)
    if (heartbeat := last_heartbeat_event(run.folder)) is not None:
        events.add("last_heard", spent=heartbeat["spent"])
    events.add("driver_ended", status=status)


def summarize_error(error: BaseException) -> str:
    """Return the type and first line of an error, for records, without secrets."""
    lines = redact(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
