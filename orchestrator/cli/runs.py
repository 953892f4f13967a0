"""The commands `headway runs ...`: list, show, compare and stop. Listing and showing import neither torch nor Ray."""

from typing import Annotated

import typer

from .options import Json, RunName, Storage, complete_run, print_json, storage_of, wants_json

runs_app = typer.Typer(
    help="List, show, compare and stop runs (default: list).", invoke_without_command=True, rich_markup_mode=None
)


@runs_app.callback()
def runs(context: typer.Context, storage: Storage = None, as_json: Json = False) -> None:
    """List the runs, unless a command follows."""
    if context.invoked_subcommand is None:
        list_runs(context)


@runs_app.command("ls")
def list_runs(context: typer.Context, storage: Storage = None, as_json: Json = False) -> None:
    """List the runs and sweeps, last started first."""
    from .run_list import print_runs, runs_and_sweeps

    place = storage_of(context)
    if not wants_json(context):
        print_runs(place)
        return
    from .show import run_summary, sweep_summary

    found, sweeps = runs_and_sweeps(place)
    print_json("runs", runs=[run_summary(each) for each in found], sweeps=[sweep_summary(each) for each in sweeps])


@runs_app.command("show")
def show_run(context: typer.Context, name: RunName, storage: Storage = None, as_json: Json = False) -> None:
    """Show the state, origin and events of a run or sweep."""
    from .show import print_run, run_document

    if wants_json(context):
        kind, content = run_document(name, storage_of(context))
        print_json(kind, **content)
    else:
        print_run(name, storage_of(context))


@runs_app.command("compare")
def compare(
    context: typer.Context,
    first: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.", autocompletion=complete_run)],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Name of another run.", autocompletion=complete_run)],
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show what differs between two runs."""
    from ..runs.compare import compare_runs
    from .show import print_comparison

    differences = compare_runs(first, second, storage_of(context))
    if wants_json(context):
        rows = [dict(zip(("of", "field", "first", "second"), row, strict=True)) for row in differences]
        print_json("comparison", first=first, second=second, differences=rows)
    else:
        print_comparison(first, second, differences)


@runs_app.command("stop")
def stop_run(
    context: typer.Context,
    name: RunName,
    storage: Storage = None,
    now: Annotated[bool, typer.Option("--now", help="Stop without a checkpoint.")] = False,
    within: Annotated[str | None, typer.Option(help="Grace period (e.g. 2m); then stop without a checkpoint.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
) -> None:
    """Stop a run or sweep after it has saved checkpoints.

    This works from any machine that can access the storage. The status becomes
    "stopped", and the driver exits with 0.
    """
    from headway.trainer.loop.progress import Duration

    from ..runs.stop import stop_run

    limit = Duration.parse(within) if within is not None else None
    if limit is not None and limit.unit != "seconds":
        raise typer.BadParameter(f"must be a time such as 90s or 2m, got {within!r}", param_hint="--within")
    within_s = limit.amount if limit is not None else None
    print(stop_run(name, storage_of(context), now=now, within_s=within_s, wait=wait))
