"""`fit(experiment)`: one run on Ray Train, from the claim on its folder to its last word."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import torch

from headway.trainer.distributed.world import World
from headway.trainer.errors import ConfigError
from headway.trainer.loop.run_state import COMPONENTS

from ..cli.console import RunConsole
from ..cluster.ray_env import quiet_environment
from ..config.experiment import Experiment
from ..errors import RunConflictError
from ..runs.open import OpenedRun, open_run
from ..runs.result import RunResult
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
    """Trains an experiment with its workers, or goes on with it, and shows it while it trains.

    Uses the Ray that this process is connected to, else that of RAY_ADDRESS, else starts a quiet one for the time of
    the run. In the main thread, the first SIGINT or SIGTERM saves a checkpoint and ends the run as "interrupted"; a
    second Ctrl-C ends it at once.

    Args:
        experiment: what to train.
        resume: "auto" goes on from the newest good checkpoint of the run; "never" begins an unfinished run anew, in its
            folder; a path begins from that checkpoint. An attempt after a failure goes on from what this start has
            saved, whatever it began from; so does the same call again, except one with "never".
        restore: what to take of the checkpoint: as in `Trainer.fit`.
        accept_changes: goes on although the config is not the one that the run was begun with.
        verbose: shows what Ray and the workers print.
        display: where to show the run; by default on standard output.

    Raises:
        ConfigError: what was asked for makes no sense, or there are not the machines for it.
        RunConflictError: the run of this name is another one, or another driver has taken this one over.
        StorageError: the storage cannot be written.
        HeadwayError: an error of Headway in a worker (DataError, StepError, ...), as it was raised.
        TrainingFailedError: any other error in a worker, with its traceback, or more failures than retries.
    """
    began = time.time()
    quiet_environment(verbose=verbose)
    from ..cluster.connect import check_resources, clamp_to_machine, ray_connection, will_start_own_ray
    from .driver import RunDriver
    from .signals import StopSignals

    display = display or RunConsole()
    resume_options = ResumeOptions.asked(resume, restore, accept_changes=accept_changes)
    check_resources(experiment.scaling)
    check_training(experiment, elsewhere=not will_start_own_ray())
    opened = open_run(experiment, accept_changes=accept_changes)
    if opened.state == "finished":
        return _finished(opened.run, display)
    run = opened.run
    _greet(opened, experiment, display)
    resume_options = _resumption(resume_options, run, display)
    experiment = replace(experiment, scaling=clamp_to_machine(experiment.scaling))
    with StopSignals() as signals:
        try:
            display.starting(f"starting {experiment.scaling}")
            with ray_connection(experiment.scaling, verbose=verbose) as is_own:
                # ray.init takes SIGTERM for itself.
                signals.install()
                supervision = RunDriver(
                    experiment, run, signals, display, resume_options=resume_options, verbose=verbose,
                    spares=is_own if experiment.retries.spares == "auto" else experiment.retries.spares, began=began,
                )  # fmt: skip
                result = supervision.run()
        except KeyboardInterrupt:
            display.close()
            reason = f"{signals.name} before training began"
            result = RunResult.recorded(run, status="interrupted", reason=reason, signal=signals.number)
        except RunConflictError:
            # The files of the run are another driver's now.
            display.close()
            raise
        except BaseException as error:
            display.close()
            run.update(status="failed", reason="", error=summarize_error(error), ended=now())
            write_driver_ended(run, "failed")
            raise
    close(run, result, display, again="without --resume never" if resume == "never" else "as before")
    return result


def check_training(experiment: Experiment, *, elsewhere: bool = False) -> None:
    """Refuses a wrong config and bad data before Ray is started or a machine is asked for.

    Args:
        experiment: what to train.
        elsewhere: leaves the data to the workers, which may be on machines that see other files.

    Raises:
        ConfigError: what the trainer, or its data, has against it.
    """
    try:
        for workers in {experiment.scaling.min_workers, experiment.scaling.max_workers}:
            experiment.trainer(experiment.config, world=rank0_world(experiment, workers)).check(elsewhere=elsewhere)
    except ConfigError:
        raise
    except Exception as error:
        # An error of the user's own code is the worker's to tell: there it has its place and its traceback.
        if type(error).__module__.startswith("headway."):
            raise ConfigError(str(error)) from error


def rank0_world(experiment: Experiment, workers: int) -> World:
    """Returns the world of so many workers as the first will see it, for what can be found out before there is one."""
    device = torch.device("cuda" if experiment.scaling.gpus_per_worker else "cpu")
    return World(rank=0, size=workers, local_rank=0, device=device)


def _finished(run: Run, display: RunConsole) -> RunResult:
    record = run.record
    display.line(
        f"{record.name} is finished: {record.status} after {record.steps:,} steps ({record.reason}). "
        f"Its files: {run.run_dir}"
    )
    display.line(
        "To train on, raise its limit: config.max_steps=... or config.max_epochs=...; "
        "to train anew, give it another name: name=..."
    )
    assert record.status in ("completed", "stopped")
    return RunResult.recorded(run, status=record.status, reason=record.reason)


def _greet(opened: OpenedRun, experiment: Experiment, display: RunConsole) -> None:
    display.goes_on = opened.state == "goes on"
    display.line(f"{experiment.name}: {experiment.scaling}, {opened.state}; its files: {experiment.run_dir}")
    for change in opened.changes:
        display.line(f"  {change.path}: {change.before} -> {change.after}", "dim")


def _resumption(asked: ResumeOptions, run: Run, display: RunConsole) -> ResumeOptions:
    """What a start begins with; says it where that is not the newest checkpoint of the run, or not what was asked."""
    if not asked.choice:
        return asked
    events = read_events(run.folder)
    resume_options = asked.repeated(events)
    newest = next((event["path"] for event in reversed(events) if event["event"] == "checkpoint_saved"), None)
    if resume_options != asked:
        display.line(f"  begun so before, it goes on from what it has saved since: {newest}", "dim")
    elif asked.resume != "auto" and newest is not None:
        begins = "anew" if asked.resume == "never" else f"from {asked.resume}"
        display.line(f"  as asked for, it begins {begins}, and not from its newest checkpoint: {newest}", "yellow")
    return resume_options


def close(run: Run, result: RunResult, display: RunConsole, *, again: str = "as before") -> None:
    """Writes how a run ended into its record, and says it.

    Args:
        run: which.
        result: how.
        display: where to say it.
        again: how to start it again, so that it goes on.
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
        f"{result.status} after {result.steps:,} steps: {result.reason}" + (f"  ({numbers})" if numbers else ""), "bold"
    )
    display.line(f"its files: {result.run_dir}")
    if result.status in ("interrupted", "time_limit"):
        display.line(f"to go on, start it again {again}")


def write_driver_ended(run: Run, status: str) -> None:
    """Writes the last event of a start, with what the main rank has spent its time on."""
    events = EventWriter(run.folder, "driver")
    if (heard := last_heartbeat_event(run.folder)) is not None:
        events.add("last_heard", spent=heard["spent"])
    events.add("driver_ended", status=status)


def summarize_error(error: BaseException) -> str:
    """Returns an error as records have it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
