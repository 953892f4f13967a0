"""The commands `headway checkpoints ...`: what lies in a run's store, by name. Needs no Ray, no GPU and no quiet run.

They work beside a run that is going on: what its retention deletes in the meantime is left out, not called damaged.
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import Annotated

import typer

checkpoints_app = typer.Typer(
    help="Shows and keeps the checkpoints of a run.", no_args_is_help=True, rich_markup_mode=None
)

_Name = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
_Which = Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="Step, name, newest or best.")]
_Some = Annotated[list[str] | None, typer.Argument(metavar="[CHECKPOINT]...", help="Step, name, newest or best.")]
_Place = Annotated[str, typer.Option(help="Folder or URI that holds the runs.")]


@checkpoints_app.command("ls")
def ls(run: _Name, storage: _Place = "runs") -> None:
    """Lists the checkpoints in the order of their commits, and what keeps each of them."""
    from rich.console import Console
    from rich.table import Table

    from headway.trainer.step.oom import human_bytes

    from ..runs.checkpoints import RunCheckpoints

    there = RunCheckpoints.of(run, storage)
    table = Table(box=None, pad_edge=False)
    for heading in ("CHECKPOINT", "EPOCH", "SAVED", "SIZE", there.rules.monitor or "METRIC", "KEPT FOR"):
        table.add_column(heading, justify="right" if heading in ("EPOCH", "SIZE") else "left", no_wrap=True)
    reasons = there.reasons()
    for entry in there.entries:
        if (checkpoint := entry.checkpoint) is None:
            table.add_row(entry.name, "", "", "", "", "damaged: verify says how")
            continue
        value = checkpoint.metrics.get(there.rules.monitor or "")
        saved = datetime.fromtimestamp(checkpoint.time_s).strftime("%Y-%m-%d %H:%M:%S")
        size = human_bytes(sum(each.size_bytes for each in entry.files.values()))
        table.add_row(
            entry.name, str(checkpoint.epoch), saved, size, "" if value is None else f"{value:.4g}",
            ", ".join(reasons[entry.name]) or "nothing",
        )  # fmt: skip
    # Wider than any row: what is piped into another program must not be cut.
    Console(highlight=False, width=240).print(table)


@checkpoints_app.command("verify")
def verify(run: _Name, which: _Some = None, storage: _Place = "runs") -> None:
    """Reads all of the checkpoints and compares checksums; exits with 1 if any is damaged."""
    from ..runs.checkpoints import RunCheckpoints

    there = RunCheckpoints.of(run, storage)
    damaged = 0
    for entry in there.chosen(which) if which else there.entries:
        problems = there.problems(entry)
        if problems and not there.storage.committed(entry.name):
            print(f"{entry.name}  deleted in the meantime")
            continue
        damaged += bool(problems)
        print(f"{entry.name}  {'damaged: ' + '; '.join(problems) if problems else 'whole'}", flush=True)
    raise typer.Exit(1 if damaged else 0)


@checkpoints_app.command("digest")
def digest(run: _Name, which: _Some = None, storage: _Place = "runs") -> None:
    """Prints a digest of the weights, without a name the newest good checkpoint's; equal ones mean equal bits."""
    from ..runs.checkpoints import RunCheckpoints

    there = RunCheckpoints.of(run, storage)
    for entry in there.chosen(which or ["newest"]):
        print(f"{entry.name}  {there.digest(entry)}")


@checkpoints_app.command("pin")
def pin(run: _Name, which: _Which, storage: _Place = "runs") -> None:
    """Keeps checkpoints for good, also from the retention of a run that is going on."""
    from headway.trainer.checkpoints.retention import mark_kept

    from ..runs.checkpoints import RunCheckpoints

    there = RunCheckpoints.of(run, storage)
    for entry in there.chosen(which):
        mark_kept(there.storage, entry.name)
        print(f"{entry.name} is pinned")


@checkpoints_app.command("unpin")
def unpin(run: _Name, which: _Which, storage: _Place = "runs") -> None:
    """Gives checkpoints back to the retention of the run."""
    from headway.trainer.checkpoints.retention import unmark_kept

    from ..runs.checkpoints import RunCheckpoints

    there = RunCheckpoints.of(run, storage)
    for entry in there.chosen(which):
        unmark_kept(there.storage, entry.name)
        print(f"{entry.name} is not pinned")


@checkpoints_app.command("prune")
def prune(
    run: _Name,
    which: _Some = None,
    storage: _Place = "runs",
    keep_last: Annotated[int | None, typer.Option(help="In place of the run's own.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="In place of the run's own.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and end.")] = False,
) -> None:
    """Deletes the checkpoints that are named, or those that the rules of the run do not keep.

    Never the newest good one, nor a pinned one.
    """
    from headway.trainer.errors import ConfigError

    from ..runs.checkpoints import RunCheckpoints

    there = RunCheckpoints.of(run, storage, keep_last=keep_last, keep_best=keep_best)
    newest = there.newest_good()
    if which:
        doomed = there.chosen(which)
        for entry in doomed:
            if newest is not None and entry.name == newest.name:
                raise ConfigError(f"{entry.name} is the newest good checkpoint of {run}: a run goes on from it")
            if there.is_pinned(entry):
                raise ConfigError(f"{entry.name} is pinned: unpin it first")
    else:
        reasons = there.reasons()
        doomed = [each for each in there.entries if each.checkpoint and not reasons[each.name] and each != newest]
    for entry in doomed:
        if not dry_run:
            with contextlib.suppress(FileNotFoundError):  # the run has, in the meantime
                there.storage.remove(entry.name)
        print(f"{entry.name} {'would be' if dry_run else 'is'} deleted")


@checkpoints_app.command("export")
def export(
    run: _Name,
    file: Annotated[str, typer.Argument(help="safetensors file to write: a path or a URI.")],
    checkpoint: Annotated[str, typer.Option(help="Step, name, newest or best.")] = "newest",
    model: Annotated[str | None, typer.Option(help="Which one, of several: the name of the attribute.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averages in place of the weights.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Of the floating-point weights, such as bfloat16.")] = None,
    storage: _Place = "runs",
) -> None:
    """Writes the weights of a checkpoint to a safetensors file."""
    import torch

    from headway.trainer.checkpoints.export import export_safetensors
    from headway.trainer.errors import ConfigError

    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"--dtype is the name of one of torch's, such as bfloat16, not {dtype!r}")
    from ..runs.checkpoints import RunCheckpoints

    there = RunCheckpoints.of(run, storage)
    (entry,) = there.chosen([checkpoint])
    path = there.storage.path_of(entry.name)
    export_safetensors(path, file, model=model, ema=ema, dtype=getattr(torch, dtype) if dtype else None)
    print(f"the weights of {path} are in {file}")
