"""The command `headway`. Commands import what they need, so those that read files import neither torch nor Ray.

Exit codes: 0 completed, stopped or already finished; 1 failed; 2 invalid input; 3 time limit reached; 130 and 143
interrupted by Ctrl-C and SIGTERM after saving a checkpoint. docs/command-line.md has the table.
"""

import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .checkpoints import checkpoints_app
from .data import data_app
from .doctor import doctor
from .init import init
from .jobs import cluster_app, jobs_app, submit
from .node import node_app
from .options import (
    OVERRIDES_ALLOWED,
    AcceptChanges,
    Overrides,
    Restore,
    Resume,
    RunName,
    Storage,
    Target,
    Verbose,
    resolve_experiment,
    storage_of,
)
from .runs import runs_app
from .sweeps import sweep

if TYPE_CHECKING:
    from ..runs.result import RunResult

app = typer.Typer(
    name="headway",
    help="Train PyTorch models on Ray, and keep making headway when machines die.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Prefixes of the threads of `fit` and `sweep` that wait for Ray.
_WAITING = ("headway-ray-start", "headway-ray-train", "headway-ray-tune")


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib import metadata

    try:
        version = metadata.version("headway")
    except metadata.PackageNotFoundError:
        # A job runs from a copied folder, not an installed distribution.
        version = "(not installed)"
    print(f"headway {version}")
    raise typer.Exit()


@app.callback()
def headway(
    storage: Storage = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept options before the command."""


@app.command(context_settings=OVERRIDES_ALLOWED)
def fit(
    context: typer.Context,
    target: Target,
    overrides: Overrides = None,
    resume: Resume = "auto",
    restore: Restore = None,
    accept_changes: AcceptChanges = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved config and exit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, without running it.")] = False,
    step: Annotated[bool, typer.Option("--step", help="With --dry-run: make one step on the CPU.")] = False,
    storage: Storage = None,
    verbose: Verbose = False,
) -> None:
    """Train a run, or resume it."""
    if step and not dry_run:
        raise typer.BadParameter("--step needs --dry-run")
    from ..cluster.ray_env import quiet_environment

    # Must precede the import of the target, which may import Ray.
    quiet_environment(verbose=verbose)
    from ..imports import fast_imports

    with fast_imports():
        from ..config.loader import to_yaml

        experiment = resolve_experiment(context, target, overrides)
        if not (print_config or dry_run):
            # What `fit` imports later.
            from ..cluster import connect  # noqa: F401
            from ..train import driver  # noqa: F401
    if print_config:
        print(to_yaml(experiment), end="")
        return
    from headway.trainer.loop.run_state import COMPONENTS

    parts = COMPONENTS if restore is None else [part.strip() for part in restore.split(",")]
    if dry_run:
        from ..train.dry_run import plan

        print(plan(experiment, resume=resume, restore=parts, accept_changes=accept_changes, step=step))
        return
    from ..train.fit import fit as fit_experiment

    result = fit_experiment(experiment, resume=resume, restore=parts, accept_changes=accept_changes, verbose=verbose)
    raise typer.Exit(_exit_code(result))


@app.command("rerun", context_settings=OVERRIDES_ALLOWED)
def run_again(
    context: typer.Context,
    name: RunName,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option(help="New location of the trainer: file.py:name or module:name.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Also refuse changed code or package versions.")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Train although the data has changed.")
    ] = False,
    storage: Storage = None,
    verbose: Verbose = False,
) -> None:
    """Repeat a recorded run, and compare the weights.

    The new run is called NAME-rerun, unless name=... is given. All differences
    from the record are printed first.
    """
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from ..runs.rerun import rerun

    result = rerun(
        name, storage_of(context), overrides=overrides or [], target=target, strict=strict,
        accept_changes=accept_changes, verbose=verbose,
    )  # fmt: skip
    raise typer.Exit(_exit_code(result))


app.command(context_settings=OVERRIDES_ALLOWED)(sweep)


@app.command()
def report(
    context: typer.Context,
    name: RunName,
    storage: Storage = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="File to write (default: report.html in its folder).")
    ] = None,
) -> None:
    """Write one HTML page about a run or sweep.

    The page shows curves, time, configuration, events and trials.
    """
    from ..reports.run import write_report

    print(write_report(name, storage_of(context), output))


app.add_typer(runs_app, name="runs")
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(data_app, name="data")
app.command(context_settings=OVERRIDES_ALLOWED)(submit)
app.add_typer(jobs_app, name="jobs")
app.add_typer(cluster_app, name="cluster")
app.add_typer(node_app, name="node")
app.command()(init)
app.command()(doctor)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Print an error of Headway as one line on standard error."""
    warnings.showwarning = _show_warning
    try:
        # typer reports wrong usage itself and exits with 2; a command exits by raising typer.Exit.
        app(arguments, prog_name="headway")
    except SystemExit as end:
        _exit(end.code, is_own=arguments is None)
    except Exception as error:
        _exit(_explain(error), is_own=arguments is None)


def _exit(code: str | int | None, *, is_own: bool) -> NoReturn:
    """Exit; without Python's shutdown, which may crash, if a thread still waits in Ray for workers."""
    if is_own and isinstance(code, int) and any(each.name.startswith(_WAITING) for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _explain(error: Exception) -> int:
    """Print an error of Headway, the cause first, and return the exit code; raise any other error."""
    from headway.datasets.errors import DataError
    from headway.trainer.errors import ConfigError
    from headway.trainer.redaction import redact

    from ..errors import StorageError, TrainingFailedError

    # Errors of datasets/ have no common base class.
    if not type(error).__module__.startswith("headway."):
        raise error
    print(f"headway: {redact(str(error))}", file=sys.stderr)
    if isinstance(error, TrainingFailedError) and error.worker_traceback:
        print(f"\n{redact(error.worker_traceback)}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        if not note.startswith("raised in process "):
            print(redact(note), file=sys.stderr)
    return 2 if isinstance(error, (ConfigError, StorageError, DataError)) else 1


def _exit_code(result: "RunResult") -> int:
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
