"""`trainable(experiment)`: the function that a `Tuner` of the user's runs, with one run of the experiment per trial."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ray import tune
from ray.tune.search.repeater import TRIAL_INDEX

from headway.trainer.callbacks.base import Callback
from headway.trainer.checkpoints.store import read_checkpoint
from headway.trainer.errors import CheckpointError, ConfigError

from ...config.experiment import Experiment
from ...config.script_settings import unpickle_with_settings
from ...config.values import check_paths
from ...runs.open import open_run
from ...runs.ownership import RUN_RECORD
from ...runs.result import RunResult
from ...runs.resume import ResumeOptions
from ...runs.run import Run
from ...storage.folder import Folder
from ...train.fit import close, finished_result, keep_error, record_failure
from ...train.ray_train_thread import last_pointer
from ...train.train_loop import Start, train_rank
from ...train.worker import has_accelerator
from .reporting import EventReporter, TuneReporter
from .trial import drive, trial_resources

_TRIAL = "trial.json"
_RESERVED = "reserved.json"


def trainable(experiment: Experiment, *, metric: str | None = None) -> Any:
    """Return the function for a `ray.tune.Tuner`, whose trials are runs of the experiment with the trial's values.

    The parameters of a search space are dotted paths, such as "config.learning_rate". The run of a trial has the name
    of the trial, and is in the folder `<storage>/<name>` of the experiment. Each evaluation is reported to Ray Tune
    with all metrics, "step" and "evaluations" once a checkpoint is saved, and with a pointer to that, by which Ray Tune
    resumes, pauses and clones trials; `checkpoint_path` gives the checkpoint. Several workers are started by Ray Train
    beside the process of the trial, and do not wait for its reports.

    Ray Tune retries a trial of one worker, by its `FailureConfig`; a trial of several, or with `scaling.env` or
    `runtime_env`, is retried by `retries`. A name that the experiment does not have ends `Tuner.fit`.

    Args:
        experiment: what to train; `scaling` gives the resources of a trial.
        metric: a metric that each evaluation must have, such as "validation/loss"; None: any will do.

    Raises:
        ConfigError: an argument is invalid, or the trainer cannot be pickled.

    Example:
        >>> from ray import tune
        >>> experiment = Experiment(name="digits", trainer=Digits, config=config)
        >>> tuner = tune.Tuner(
        ...     trainable(experiment, metric="validation/loss"),
        ...     param_space={"config.learning_rate": tune.loguniform(1e-4, 1e-1)},
        ...     tune_config=tune.TuneConfig(metric="validation/loss", mode="min", num_samples=40),
        ... )
        >>> # results = tuner.fit()
    """
    if not isinstance(metric, str | None):
        raise ConfigError(f"metric must be a name such as 'validation/loss', or None, got {metric!r}")
    start, scaling = Start.of(experiment, ResumeOptions(accept_changes=True)), experiment.scaling

    def train_trial(config: dict[str, Any], **parameters: Any) -> None:
        if parameters:
            raise ConfigError(
                f"tune.with_parameters(trainable(...), {', '.join(parameters)}=...) has no effect on a run: set fields "
                "of the experiment in param_space, and load large objects in the trainer's methods"
            )
        run_trial(start, config, metric)

    def resources(config: dict[str, Any]) -> Any:
        # Called in the process of `Tuner.fit` for each new trial: a wrong name ends it before a trial starts.
        check_paths(unpickle_with_settings(start.experiment), config.keys() - {TRIAL_INDEX})
        return trial_resources(scaling, config)

    # Ray Tune names trials after the function.
    train_trial.__name__ = experiment.name
    return tune.with_resources(train_trial, resources)


def run_trial(start: Start, config: Mapping[str, Any], metric: str | None) -> None:
    """Train one trial in the process that Ray Tune has started for it. Raises whatever the trainer raises.

    Args:
        start: of the process that called `trainable`.
        config: the trial's values at dotted paths. The number of a repetition, from Ray Tune's `Repeater`, is added to
            the seed.
        metric: a metric that each evaluation must have.
    """
    # Time for a trial that Ray Tune ends to save, where its process is used again.
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")
    values = dict(config)
    repetition = values.pop(TRIAL_INDEX, 0)
    experiment = start.enter(values)
    if repetition:
        experiment = replace(experiment, config=replace(experiment.config, seed=experiment.config.seed + repetition))
    trial = tune.get_context()
    experiment = replace(experiment, name=trial.get_trial_name(), storage=experiment.run_dir)
    experiment = _in_own_folder(experiment, trial.get_trial_id(), config)
    if not experiment.scaling.trains_in_trial:
        _check_reserved(Folder(experiment.run_dir), trial.get_trial_resources().required_resources)
    source = _source_of(experiment.run_dir)
    start = replace(start, resume_options=replace(start.resume_options, resume=source or "auto"))
    reporter = TuneReporter(experiment.run_dir, metric, saves=True, is_adopted=source is not None)
    trains_here = experiment.scaling.trains_in_trial
    callbacks = reporter.callbacks(trains_here=trains_here)
    if trains_here:
        # A trial has one process at a time; its last one may have been on a machine that is lost.
        result = train_rank(
            start, experiment, on_cpu=not has_accelerator(), reports=False,
            callbacks=callbacks, take_over=True,
        )  # fmt: skip
    else:
        result = asdict(_drive(start, experiment, reporter, callbacks))
    reporter.finish(result)
    if reporter.has_ended:
        # Ray Tune expects a paused trial's function to end this way.
        sys.exit(0)


def _in_own_folder(experiment: Experiment, trial_id: str, values: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a trial, with another name if a failed trial has the folder of its name.

    `Tuner.restore(..., restart_errored=True)` replaces a failed trial by a new one, which may get the same name.

    Raises:
        ConfigError: the folder is that of a trial with other values, whose result would be taken for this one's.
    """
    folder = Folder(experiment.run_dir)
    own = json.dumps({"id": trial_id, "values": dict(values)}, default=str, sort_keys=True)
    if (text := folder.read(_TRIAL)) is None:
        folder.prepare()
    elif (other := json.loads(text))["id"] != trial_id:
        if other["values"] != json.loads(own)["values"]:
            raise ConfigError(
                f"trial {trial_id} has the name {experiment.name}, but {experiment.run_dir} is the folder of trial "
                f"{other['id']} with the values {other['values']}: let trial_name_creator use trial.trial_id, and give "
                "a further Tuner an Experiment with another name"
            )
        if folder.read(RUN_RECORD) is not None and Run(folder).status == "failed":
            return _in_own_folder(replace(experiment, name=f"{experiment.name}_{trial_id}"), trial_id, values)
    folder.write(_TRIAL, own)
    return experiment


def _check_reserved(folder: Folder, reserved: Mapping[str, float]) -> None:
    """Check that the process of a trial of several workers reserves no more than at its first start.

    `ResourceChangingScheduler` gives free CPUs and GPUs to this process. Workers would wait for them forever.

    Raises:
        ConfigError: it reserves more.
    """
    first = json.loads(folder.read(_RESERVED) or "null")
    if first is None:
        folder.write(_RESERVED, json.dumps(reserved))
    elif any(reserved.get(name, 0) > first.get(name, 0) for name in ("CPU", "GPU")):
        raise ConfigError(
            f"the process of this trial now reserves {dict(reserved)} instead of {first}, which its workers would "
            "lack: use ResourceChangingScheduler with trials of one worker (scaling.workers=1)"
        )


def _source_of(run_dir: str) -> str | None:
    """Return the checkpoint of another trial from which Ray Tune starts this one; None to resume its own run."""
    pointer = last_pointer(tune)
    if pointer is None or pointer.run_dir == run_dir:
        return None
    try:
        read_checkpoint(pointer.checkpoint)
    except CheckpointError:
        # The other trial has gone on, and its retention has deleted the checkpoint.
        newest = Run(pointer.run_dir).record.last_checkpoint
        return newest or pointer.checkpoint
    return pointer.checkpoint


def _drive(start: Start, experiment: Experiment, reporter: TuneReporter, callbacks: Sequence[Callback]) -> RunResult:
    """Drive the run of a trial with several workers, as `fit` does."""
    opened = open_run(experiment, accept_changes=True, take_over=True, provenance=start.provenance)
    run, display = opened.run, EventReporter(reporter)
    if opened.state == "finished":
        return finished_result(run, display)
    try:
        result = drive(experiment, run, display, callbacks, start.resume_options)
        close(run, result, display)
    except BaseException as error:
        with keep_error(error):
            record_failure(run, error)
        raise
    finally:
        run.release()
    return result
