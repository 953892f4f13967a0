"""The command `headway sweep`."""

from typing import Annotated

import typer

from .options import Overrides, Storage, Target, overrides_of


def sweep(
    context: typer.Context,
    target: Target,
    overrides: Overrides = None,
    search: Annotated[str, typer.Option(help="Name of the Search in the same file.")] = "search",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry failed trials from their last checkpoints.")
    ] = False,
    storage: Storage = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the output of Ray.")] = False,
) -> None:
    """Run or resume a hyperparameter sweep."""
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from ..sweeps.search import resolve_search
    from ..sweeps.sweep import sweep as sweep_experiment

    experiment, found = resolve_search(target, overrides_of(context, overrides), name=search)
    result = sweep_experiment(experiment, found, retry_failed=retry_failed, verbose=verbose)
    if result.status == "interrupted":
        raise typer.Exit(128 + (result.signal or 2))
    if result.status == "time_limit":
        raise typer.Exit(3)
    if result.trials and len(result.failed) == len(result.trials):
        raise typer.Exit(1)
