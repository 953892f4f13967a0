"""The commands for clusters: `headway submit`, `headway jobs ...` and `headway cluster check`."""

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    AcceptChanges,
    Json,
    Overrides,
    Restore,
    Resume,
    Storage,
    Target,
    Verbose,
    overrides_of,
    print_json,
    resolve_experiment,
)

if TYPE_CHECKING:
    from ..cluster.jobs import Jobs

jobs_app = typer.Typer(help="List, follow and stop jobs of a cluster.", no_args_is_help=True, rich_markup_mode=None)
cluster_app = typer.Typer(help="Check cluster launcher files.", no_args_is_help=True, rich_markup_mode=None)

_DASHBOARD = "http://127.0.0.1:8265"
_Address = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Ray dashboard address.")]
_Job = Annotated[str, typer.Argument(metavar="JOB", help="Name of a job, or of a run (its last job).")]


def submit(
    context: typer.Context,
    target: Target,
    overrides: Overrides = None,
    address: _Address = _DASHBOARD,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Environment variable for the job; repeatable."),
    ] = None,
    follow: Annotated[bool, typer.Option(help="Print the job's output and exit with its code.")] = True,
    resume: Resume = "auto",
    restore: Restore = None,
    accept_changes: AcceptChanges = False,
    storage: Storage = None,
    verbose: Verbose = False,
) -> None:
    """Submit a run as a Ray job; upload the current directory.

    Options of the run are the same as for `headway fit`. `--env NAME` passes the
    value that the variable has on this machine.
    """
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from ..cluster.jobs import env_from_options, fit_arguments

    experiment = resolve_experiment(context, target, overrides)
    chosen = env_from_options(env or [])
    options = ["--resume", resume] if resume != "auto" else []
    options += ["--restore", restore] if restore is not None else []
    options += ["--accept-changes"] if accept_changes else []
    options += ["--verbose"] if verbose else []
    # Refuse invalid input before contacting the cluster.
    arguments = fit_arguments(target, experiment, overrides=overrides_of(context, overrides), options=options)
    jobs = _connect(address)
    job = jobs.submit(experiment, arguments, chosen)
    print(f"{experiment.name}: submitted as {job}; its files: {experiment.run_dir}", flush=True)
    if follow:
        raise typer.Exit(_follow(jobs, job))


@jobs_app.command("ls")
def list_jobs(address: _Address = _DASHBOARD, as_json: Json = False) -> None:
    """List the jobs of a cluster, last submitted first."""
    from ..cluster.jobs import job_summary, jobs_table

    jobs = _connect(address).all()
    if as_json:
        print_json("jobs", jobs=[job_summary(job) for job in jobs])
    else:
        print(jobs_table(jobs))


@jobs_app.command("logs")
def show_log(
    job: _Job,
    address: _Address = _DASHBOARD,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow until the job ends; exit with its code.")
    ] = False,
) -> None:
    """Print the output of a job."""
    jobs = _connect(address)
    name = str(jobs.find(job).submission_id)
    if follow:
        raise typer.Exit(_follow(jobs, name))
    print(jobs.log(name), end="")


@jobs_app.command("stop")
def stop_job(
    job: _Job,
    address: _Address = _DASHBOARD,
    now: Annotated[bool, typer.Option("--now", help="Stop without a checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
) -> None:
    """Stop a job after its run has saved a checkpoint.

    To resume the run, submit it again.
    """
    print(_connect(address).stop(job, now=now, wait=wait))


@cluster_app.command("check")
def check_cluster(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|TARGET|PATH=VALUE", help="Launcher file (default: cluster.yaml), run and overrides."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a cluster launcher file, and whether a run fits.

    The check needs no cloud account and starts nothing.
    """
    from ..cluster.launcher_file import cluster_document, cluster_page, load_cluster, misfits_of

    file, rest = "cluster.yaml", list(arguments or [])
    if rest and rest[0].endswith((".yaml", ".yml")):
        file = rest.pop(0)
    experiment = resolve_experiment(context, rest[0], rest[1:]) if rest else None
    cluster = load_cluster(file)
    misfits = misfits_of(cluster, experiment) if experiment is not None else []
    if as_json:
        print_json("cluster", **cluster_document(cluster, experiment), problems=misfits)
    else:
        print(cluster_page(cluster, experiment))
        for misfit in misfits:
            print(f"headway: {misfit}", file=sys.stderr)
    raise typer.Exit(2 if misfits else 0)


def _connect(address: str) -> "Jobs":
    from ..cluster.jobs import Jobs

    jobs = Jobs(address)
    # Ray logs packages and uploads, and sets the levels of these loggers itself.
    logging.disable(logging.WARNING)
    return jobs


def _follow(jobs: "Jobs", job: str) -> int:
    try:
        return jobs.follow(job, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        at = "" if jobs.address == _DASHBOARD else f" --address {jobs.address}"
        print(
            f"\nheadway: {job} is still running. To follow it: headway jobs logs {job} --follow{at}; "
            f"to save and stop it: headway jobs stop {job}{at}",
            file=sys.stderr,
        )
        return 130
