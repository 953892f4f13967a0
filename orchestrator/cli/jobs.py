"""The commands for clusters: `headway submit`, `headway jobs ...` and `headway cluster check`."""

import contextlib
import logging
import sys
from pathlib import Path
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
    from ..config.experiment import Experiment

jobs_app = typer.Typer(
    help="List, show, follow and stop jobs of a cluster.", no_args_is_help=True, rich_markup_mode=None
)
cluster_app = typer.Typer(help="Check cluster launcher files.", no_args_is_help=True, rich_markup_mode=None)

_DASHBOARD = "http://127.0.0.1:8265"
_Address = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Ray dashboard address.")]
_Job = Annotated[str, typer.Argument(metavar="JOB", help="Name of a job, or of a run (its last job).")]


def submit(
    context: typer.Context,
    target: Target,
    overrides: Overrides = None,
    address: _Address = _DASHBOARD,
    sweep: Annotated[bool, typer.Option("--sweep", help="Run the sweep of the target instead of one run.")] = False,
    search: Annotated[str, typer.Option(help="With --sweep: name of the Search.")] = "search",
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="With --sweep: retry failed trials.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Environment variable for the job; repeatable."),
    ] = None,
    env_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with variables for the job, e.g. .env.")
    ] = None,
    pip: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="Package to install for the job; repeatable.")
    ] = None,
    requirements: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requirements file to install for the job.")
    ] = None,
    runtime_env: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="Runtime environment of Ray, merged with the rest.")
    ] = None,
    working_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder to upload; the target is relative to it.")
    ] = ".",
    entrypoint_num_cpus: Annotated[float | None, typer.Option(help="CPUs to reserve for the driver.")] = None,
    entrypoint_num_gpus: Annotated[float | None, typer.Option(help="GPUs to reserve for the driver.")] = None,
    entrypoint_memory: Annotated[int | None, typer.Option(help="Bytes of memory to reserve for the driver.")] = None,
    entrypoint_resources: Annotated[
        str | None, typer.Option(metavar="JSON", help="Other resources to reserve for the driver.")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Print the job's output and exit with its code.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be submitted, without a cluster.")
    ] = False,
    resume: Resume = "auto",
    restore: Restore = None,
    accept_changes: AcceptChanges = False,
    storage: Storage = None,
    verbose: Verbose = False,
) -> None:
    """Submit a run or sweep as a Ray job; upload this folder.

    Options of the run are the same as for `headway fit`, with --sweep as for
    `headway sweep`. `--env NAME` passes the value that the variable has here.
    """
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from headway.trainer.errors import ConfigError

    from ..cluster.job_command import JobRequest, job_arguments, resources_from_option, runtime_env_from_options

    request = JobRequest(
        runtime_env=runtime_env_from_options(
            base=runtime_env, pip=pip or (), requirements=requirements, env_file=env_file, env=env or ()
        ),
        num_cpus=entrypoint_num_cpus,
        num_gpus=entrypoint_num_gpus,
        memory_bytes=entrypoint_memory,
        resources=resources_from_option(entrypoint_resources),
    )
    given = overrides_of(context, overrides)
    of_run = {"--resume": resume != "auto", "--restore": restore is not None, "--accept-changes": accept_changes}
    of_sweep = {"--search": search != "search", "--retry-failed": retry_failed}
    if wrong := [name for name, is_given in (of_run if sweep else of_sweep).items() if is_given]:
        raise ConfigError(f"{wrong[0]} {'cannot be combined with' if sweep else 'needs'} --sweep")
    if not Path(working_dir).is_dir():
        raise ConfigError(f"--working-dir {working_dir} is not a folder of this machine: name one that exists")
    with contextlib.chdir(working_dir):
        # Refuse invalid input before contacting the cluster.
        if sweep:
            from ..sweeps.search import resolve_search

            experiment, found = resolve_search(target, given, name=search)
            found.check(experiment)
            options = ["--search", search] if search != "search" else []
            options += ["--retry-failed"] if retry_failed else []
        else:
            experiment = resolve_experiment(context, target, overrides)
            options = ["--resume", resume] if resume != "auto" else []
            options += ["--restore", restore] if restore is not None else []
            options += ["--accept-changes"] if accept_changes else []
        options += ["--verbose"] if verbose else []
        arguments = job_arguments(
            "sweep" if sweep else "fit", target, experiment, overrides=given, options=options
        )  # fmt: skip
        _print_missed_files(experiment)
        if dry_run:
            from ..cluster.job_preview import job_preview

            print(job_preview(experiment, arguments, request))
            return
        jobs = connect_to_jobs(address)
        job = jobs.submit(experiment, arguments, request)
    print(f"{experiment.name}: submitted as {job}; its files: {experiment.run_dir}", flush=True)
    if follow:
        raise typer.Exit(follow_job(jobs, job))


def _print_missed_files(experiment: "Experiment") -> None:
    from ..cluster.upload import missed_files

    for sentence in missed_files(experiment, Path.cwd()):
        print(f"headway: {sentence}", file=sys.stderr)


@jobs_app.command("show")
def show_job(job: _Job, address: _Address = _DASHBOARD, as_json: Json = False) -> None:
    """Print the status, the command and the environment of a job."""
    from ..cluster.jobs import job_document, job_page

    found = connect_to_jobs(address).find(job)
    if as_json:
        print_json("job", job=job_document(found))
    else:
        print(job_page(found))


@jobs_app.command("ls")
def list_jobs(address: _Address = _DASHBOARD, as_json: Json = False) -> None:
    """List the jobs of a cluster, last submitted first."""
    from ..cluster.jobs import job_summary, jobs_table

    jobs = connect_to_jobs(address).all()
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
    jobs = connect_to_jobs(address)
    name = str(jobs.find(job).submission_id)
    if follow:
        raise typer.Exit(follow_job(jobs, name))
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
    print(connect_to_jobs(address).stop(job, now=now, wait=wait))


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


def connect_to_jobs(address: str) -> "Jobs":
    """Return the jobs of the cluster whose dashboard is at an address."""
    from ..cluster.jobs import Jobs

    jobs = Jobs(address)
    # Ray logs packages and uploads, and sets the levels of these loggers itself.
    logging.disable(logging.WARNING)
    return jobs


def follow_job(jobs: "Jobs", job: str) -> int:
    """Print the output of a job until it ends, and return its exit code."""
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
