"""The command `headway`. Its imports are late: `headway --help` must not wait for torch and Ray.

Exit codes: 0 completed, stopped or finished before; 1 failed; 2 wrong input; 3 time limit reached;
130 and 143 interrupted by Ctrl-C and by SIGTERM, with a checkpoint, ready to go on. docs/stopping.md has the table.

HEADWAY_OVERRIDES has overrides that come before those of the line: HEADWAY_OVERRIDES="scaling.workers=4 storage=/data".
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

import typer

from .checkpoints import checkpoints_app

if TYPE_CHECKING:
    from ..cluster.jobs import Jobs
    from ..config.experiment import Experiment
    from ..runs.result import RunResult

app = typer.Typer(
    name="headway",
    help="Trains PyTorch models on Ray, and keeps making headway when machines die.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
runs_app = typer.Typer(help="Shows runs.", invoke_without_command=True, rich_markup_mode=None)
app.add_typer(runs_app, name="runs")
app.add_typer(checkpoints_app, name="checkpoints")
data_app = typer.Typer(help="Prepares and shows data.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

jobs_app = typer.Typer(help="Shows and stops jobs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(jobs_app, name="jobs")
cluster_app = typer.Typer(help="Checks clusters.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cluster_app, name="cluster")

_Address = Annotated[
    str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Of the cluster: where its dashboard answers.")
]
# Threads of `fit` and `sweep` that wait for Ray.
_WAITING = ("headway-ray-train", "headway-ray-tune")
_DASHBOARD = "http://127.0.0.1:8265"
_Job = Annotated[str, typer.Argument(help="Name of the job, or of its run: then its last job.")]
_Storage = Annotated[str, typer.Option(help="Folder or URI that holds the runs.")]


@app.command()
def fit(
    target: Annotated[
        str, typer.Argument(help="file.py, file.py:name or module:name; an Experiment or a Trainer class.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH=VALUE]...", help="As in config.learning_rate=3e-4 scaling.workers=4."),
    ] = None,
    resume: Annotated[
        str, typer.Option(help="Checkpoint to begin from; auto: the run's newest good one; never: begin anew.")
    ] = "auto",
    restore: Annotated[
        str | None,
        typer.Option(help="What to take of it, as in models,optimizers; by default all.", metavar="PART,..."),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although the config has changed.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole config as YAML, and end.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained, taken and written, and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show what Ray and the workers print.")] = False,
) -> None:
    """Trains a run, or goes on with it."""
    from ..cluster.ray_env import quiet_environment

    # Before the target is imported, which may import Ray.
    quiet_environment(verbose=verbose)
    from ..config.loader import to_yaml

    experiment = _resolved(target, overrides or [])
    if print_config:
        print(to_yaml(experiment), end="")
        return
    if dry_run:
        from ..train.dry_run import plan

        print(plan(experiment))
        return
    from headway.trainer.loop.run_state import COMPONENTS

    from ..train.fit import fit as fit_experiment

    parts = COMPONENTS if restore is None else [part.strip() for part in restore.split(",")]
    result = fit_experiment(experiment, resume=resume, restore=parts, accept_changes=accept_changes, verbose=verbose)
    raise typer.Exit(_exit_code(result))


@app.command("rerun")
def run_again(
    name: Annotated[str, typer.Argument(help="Name of the run; SWEEP/TRIAL of a trial.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH=VALUE]...", help="As those of fit; by default name=NAME-rerun."),
    ] = None,
    storage: _Storage = "runs",
    target: Annotated[
        str | None, typer.Option(help="Where its trainer is now, if not where it was: file.py:name or module:name.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse other code and other versions of packages, too.")
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Train although the data has changed.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show what Ray and the workers print.")] = False,
) -> None:
    """Trains a run again by its record, as a new run; says what has changed since, and if the weights are equal."""
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from ..runs.rerun import rerun

    result = rerun(
        name, storage, overrides=overrides or [], target=target, strict=strict, accept_changes=accept_changes,
        verbose=verbose,
    )  # fmt: skip
    raise typer.Exit(_exit_code(result))


@app.command()
def sweep(
    target: Annotated[
        str, typer.Argument(help="file.py, file.py:name or module:name; an Experiment or a Trainer class.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH=VALUE]...", help="As in config.max_epochs=3 search.trials=20."),
    ] = None,
    search: Annotated[str, typer.Option(help="Name of the Search in the same file.")] = "search",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Train trials that failed before again, from their last checkpoint.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show what Ray prints.")] = False,
) -> None:
    """Trains many runs with other values, or goes on with them, and says which is best."""
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from ..sweeps.driver import sweep as sweep_experiment
    from ..sweeps.search import resolve_search

    given = [*shlex.split(os.environ.get("HEADWAY_OVERRIDES", "")), *(overrides or [])]
    experiment, found = resolve_search(target, given, name=search)
    result = sweep_experiment(experiment, found, retry_failed=retry_failed, verbose=verbose)
    if result.status == "interrupted":
        raise typer.Exit(128 + (result.signal or 2))
    if result.trials and len(result.failed) == len(result.trials):
        raise typer.Exit(1)


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="Name of the run or the sweep; SWEEP/TRIAL of a trial.")],
    storage: _Storage = "runs",
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="File to write; by default report.html in its folder.")
    ] = None,
) -> None:
    """Writes one HTML file of a run or a sweep: curves, where the time went, configuration, events, trials."""
    from ..reports.run import write_report

    print(write_report(name, storage, output))


@runs_app.callback()
def runs(context: typer.Context, storage: _Storage = "runs") -> None:
    """Lists the runs, the last started first."""
    context.obj = storage
    if context.invoked_subcommand is None:
        from .tables import print_runs

        print_runs(storage)


@runs_app.command("show")
def show_run(context: typer.Context, name: Annotated[str, typer.Argument(help="Name of the run.")]) -> None:
    """Shows one run: where it stands, how it was started, what happened."""
    from .show import print_run

    print_run(name, context.obj)


@runs_app.command("compare")
def compare(
    context: typer.Context,
    first: Annotated[str, typer.Argument(help="Name of a run.")],
    second: Annotated[str, typer.Argument(help="Name of another one.")],
) -> None:
    """Shows what two runs differ in: config, data, code, versions, machine and result."""
    from .show import print_comparison

    print_comparison(first, second, context.obj)


@runs_app.command("stop")
def stop_run(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the run or the sweep, or SWEEP/TRIAL.")],
    storage: Annotated[str | None, typer.Option(help="Folder or URI that holds the runs.")] = None,
    now: Annotated[bool, typer.Option("--now", help="End without a checkpoint.")] = False,
    within: Annotated[
        str | None, typer.Option(help="End without a checkpoint if it has not ended after this time, as in 2m.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Come back when it has ended.")] = False,
) -> None:
    """Has a run or a sweep in another process save checkpoints and end, as "stopped"; its driver exits with 0."""
    from headway.trainer.loop.progress import Duration

    from ..runs.stop import stop_run

    limit = Duration.parse(within) if within is not None else None
    if limit is not None and limit.unit != "seconds":
        raise typer.BadParameter(f"a time such as 90s or 2m, not {within!r}", param_hint="--within")
    within_s = limit.amount if limit is not None else None
    print(stop_run(name, storage or context.obj, now=now, within_s=within_s, wait=wait))


@data_app.command("prepare")
def prepare_data(
    inputs: Annotated[list[str], typer.Argument(help="Text files, folders or globs.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Folder to write the Parquet files to.")],
    row_length: Annotated[int, typer.Option(help="Tokens per row.")],
    tail: Annotated[str, typer.Option(help="What becomes of the last, short row: drop or pad.")] = "drop",
) -> None:
    """Cuts text into rows of tokens, one byte each, once and for all; goes on where it was interrupted."""
    from headway.datasets.prepare import prepare_text

    if tail not in ("drop", "pad"):
        raise typer.BadParameter(f"drop or pad, not {tail!r}", param_hint="--tail")
    progress = (lambda done: print(done, file=sys.stderr, flush=True)) if sys.stderr.isatty() else None
    kept = cast(Literal["drop", "pad"], tail)
    print(prepare_text(inputs, output, row_length=row_length, tail=kept, progress=progress))


@data_app.command("show")
def show_data(
    path: Annotated[str, typer.Argument(help="Parquet file, folder, glob or URI.")],
    row: Annotated[str | None, typer.Option(help='One row, as errors name it: "a.parquet[3]:17".')] = None,
    columns: Annotated[
        str | None, typer.Option(help="Only these; files may differ in the others.", metavar="NAME,...")
    ] = None,
) -> None:
    """Shows rows, files, columns, fingerprint and the first row of a dataset; or one row of it."""
    from headway.datasets.show import describe, read_row

    wanted = columns.split(",") if columns is not None else None
    if row is None:
        print(describe(path, columns=wanted))
        return
    for name, value in read_row(path, row, columns=wanted).items():
        print(f"{name}: {value!r}")


@app.command()
def submit(
    target: Annotated[str, typer.Argument(help="As that of fit, in the current directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH=VALUE]...", help="As those of fit."),
    ] = None,
    address: _Address = _DASHBOARD,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="Environment variable of the driver and the workers: NAME for the value that it has here, or "
            "NAME=VALUE. Can be given several times.",
            metavar="NAME[=VALUE]",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option(help="Show what the run prints until it ends, and exit with its code.")
    ] = True,
    resume: Annotated[str, typer.Option(help="As that of fit.")] = "auto",
    restore: Annotated[str | None, typer.Option(help="As that of fit.", metavar="PART,...")] = None,
    accept_changes: Annotated[bool, typer.Option("--accept-changes", help="As that of fit.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show what Ray and the workers print.")] = False,
) -> None:
    """Trains a run on a cluster, as a job, with a copy of the current directory and of Headway; or goes on with it."""
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from ..cluster.jobs import env_from_options, fit_arguments

    written = _with_those_of_the_environment(overrides or [])
    experiment = _resolved(target, overrides or [])
    chosen = env_from_options(env or [])
    options = ["--resume", resume] if resume != "auto" else []
    options += ["--restore", restore] if restore is not None else []
    options += ["--accept-changes"] if accept_changes else []
    options += ["--verbose"] if verbose else []
    # What is wrong here is told before anybody is asked for anything.
    arguments = fit_arguments(target, experiment, overrides=written, options=options)
    jobs = _jobs(address)
    job = jobs.submit(experiment, arguments, chosen)
    print(f"{experiment.name}: submitted as {job}; its files: {experiment.run_dir}", flush=True)
    if follow:
        raise typer.Exit(_follow(jobs, job))


@jobs_app.command("ls")
def list_jobs(address: _Address = _DASHBOARD) -> None:
    """Lists the jobs of a cluster, the last one first."""
    from ..cluster.jobs import jobs_table

    print(jobs_table(_jobs(address).all()))


@jobs_app.command("logs")
def show_log(
    job: _Job,
    address: _Address = _DASHBOARD,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Until the job has ended; exits with the code of its run.")
    ] = False,
) -> None:
    """Shows what a job has printed."""
    jobs = _jobs(address)
    name = str(jobs.find(job).submission_id)
    if follow:
        raise typer.Exit(_follow(jobs, name))
    print(jobs.log(name), end="")


@jobs_app.command("stop")
def stop_job(
    job: _Job,
    address: _Address = _DASHBOARD,
    now: Annotated[bool, typer.Option("--now", help="End without a checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Come back when it has ended.")] = False,
) -> None:
    """Has a job save a checkpoint and end; submitted again, its run goes on from there."""
    print(_jobs(address).stop(job, now=now, wait=wait))


@cluster_app.command("check")
def check_cluster(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE.yaml] [TARGET [PATH=VALUE]...]", help="By default cluster.yaml, by itself."),
    ] = None,
) -> None:
    """Checks a file of Ray's cluster launcher, and whether it can ever hold an experiment. Needs no cloud."""
    from rich.console import Console

    from ..cluster.launcher_file import load_cluster, misfits_of, print_cluster

    file, rest = "cluster.yaml", list(arguments or [])
    if rest and rest[0].endswith((".yaml", ".yml")):
        file = rest.pop(0)
    experiment = _resolved(rest[0], rest[1:]) if rest else None
    cluster = load_cluster(file)
    # Where the output is no terminal, rich takes 80 columns and cuts what does not fit.
    print_cluster(
        cluster, experiment, Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    )
    faults = misfits_of(cluster, experiment) if experiment is not None else []
    for fault in faults:
        print(f"headway: {fault}", file=sys.stderr)
    raise typer.Exit(2 if faults else 0)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits; what the user can act on is one line on standard error, without a traceback."""
    warnings.showwarning = _show_warning
    try:
        # What typer finds wrong with the line it shows itself, and exits with 2; a command exits by raising typer.Exit.
        app(arguments, prog_name="headway")
    except SystemExit as end:
        _exit(end.code, is_own=arguments is None)
    except Exception as error:
        _exit(_explain(error), is_own=arguments is None)


def _exit(code: str | int | None, *, is_own: bool) -> NoReturn:
    """Exits. Where workers that never came were given up, a thread waits in Ray, and may crash Python's end."""
    if is_own and isinstance(code, int) and any(each.name.startswith(_WAITING) for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _resolved(target: str, overrides: list[str]) -> Experiment:
    from ..config.loader import resolve

    return resolve(target, _with_those_of_the_environment(overrides))


def _with_those_of_the_environment(overrides: list[str]) -> list[str]:
    return [*shlex.split(os.environ.get("HEADWAY_OVERRIDES", "")), *overrides]


def _jobs(address: str) -> Jobs:
    import logging

    from ..cluster.jobs import Jobs

    jobs = Jobs(address)
    # What Ray says of packages and uploads, through loggers to which it gives levels of its own.
    logging.disable(logging.WARNING)
    return jobs


def _follow(jobs: Jobs, job: str) -> int:
    try:
        return jobs.follow(job, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        at = "" if jobs.address == _DASHBOARD else f" --address {jobs.address}"
        print(
            f"\nheadway: {job} goes on. To see more of it: headway jobs logs {job} --follow{at}; "
            f"to have it save and end: headway jobs stop {job}{at}",
            file=sys.stderr,
        )
        return 130


def _explain(error: Exception) -> int:
    """Says what went wrong in one line; a worker's traceback comes before it. Errors that are not ours are raised."""
    from headway.trainer.errors import ConfigError

    from ..errors import StorageError, TrainingFailedError

    if not _is_ours(error):
        raise error
    if isinstance(error, TrainingFailedError) and error.worker_traceback:
        print(error.worker_traceback, file=sys.stderr)
    print(f"headway: {error}", file=sys.stderr)
    return 2 if isinstance(error, (ConfigError, StorageError)) else 1


def _is_ours(error: Exception) -> bool:
    # datasets has errors of its own, with no base in common.
    return type(error).__module__.startswith("headway.")


def _exit_code(result: RunResult) -> int:
    match result.status:
        case "time_limit":
            return 3
        case "interrupted":
            return 128 + (result.signal or 2)
        case "failed":
            return 1
    return 0


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"headway: {category.__name__}: {message}", file=sys.stderr)
