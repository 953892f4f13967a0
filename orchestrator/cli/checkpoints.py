"""The commands `headway checkpoints ...`. They need neither Ray nor a GPU, and work while the run trains.

A checkpoint that the run deletes during a command is not reported as damaged.
"""

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from .options import Json, RunName, Storage, print_json, storage_of

checkpoints_app = typer.Typer(
    help="List, verify, keep, delete and export checkpoints.", no_args_is_help=True, rich_markup_mode=None
)

_Which = Annotated[list[str], typer.Argument(metavar="CHECKPOINT", help="Step, name, newest or best.")]
_Some = Annotated[list[str] | None, typer.Argument(metavar="CHECKPOINT", help="Step, name, newest or best.")]


@checkpoints_app.callback()
def checkpoints(storage: Storage = None) -> None:
    """Accept options before the command."""


@checkpoints_app.command("ls")
def ls(context: typer.Context, run: RunName, storage: Storage = None, as_json: Json = False) -> None:
    """List checkpoints in the order saved, and why each is kept."""
    from headway.trainer.metrics.units import human_bytes

    from ..display.tables import format_table, local_time
    from ..runs.checkpoints import RunCheckpoints

    saved = RunCheckpoints.of(run, storage_of(context))
    reasons, monitor = saved.reasons(), saved.rules.monitor
    if as_json:
        print_json("checkpoints", run=run, monitor=monitor, checkpoints=[
            {
                "name": entry.name, "path": saved.storage.path_of(entry.name), "damage": entry.problem,
                "size_bytes": entry.size_bytes,
                "kept_for": reasons.get(entry.name, []),
                **({
                    "step": checkpoint.step, "epoch": checkpoint.epoch, "metrics": checkpoint.metrics,
                    "saved": datetime.fromtimestamp(checkpoint.time_s, UTC).isoformat(timespec="seconds"),
                    "world_size": checkpoint.world_size,
                } if (checkpoint := entry.checkpoint) else {}),
            }
            for entry in saved.entries
        ])  # fmt: skip
        return
    rows = [("CHECKPOINT", "EPOCH", "SAVED", "SIZE", monitor or "METRIC", "KEPT FOR")]
    for entry in saved.entries:
        if (checkpoint := entry.checkpoint) is None:
            rows.append((entry.name, "", "", "", "", "damaged: see `headway checkpoints verify`"))
            continue
        value = checkpoint.metrics.get(monitor or "")
        rows.append((
            entry.name, str(checkpoint.epoch), local_time(checkpoint.time_s), human_bytes(entry.size_bytes),
            "" if value is None else f"{value:.4g}", ", ".join(reasons[entry.name]) or "nothing",
        ))  # fmt: skip
    print(format_table(rows, right=("EPOCH", "SIZE")))


@checkpoints_app.command("verify")
def verify(
    context: typer.Context,
    run: RunName,
    which: _Some = None,
    key: Annotated[Path | None, typer.Option(help="Verify signatures, too, with this public key (PEM).")] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Verify that each is the successor of the one before.")
    ] = False,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Verify checksums; exit with 1 if a checkpoint is damaged.

    This reads all files of the checkpoints.
    """
    from headway.trainer.checkpoints.signatures import chain_problems, signature_problem

    from ..runs.checkpoints import RunCheckpoints

    saved, public = RunCheckpoints.of(run, storage_of(context)), _read_key(key)
    links = chain_problems(saved.entries) if chain else {}
    states = []
    for entry in saved.find(which) if which else saved.entries:
        problems = saved.problems(entry)
        if public is not None and (problem := signature_problem(saved.storage, entry.name, public)):
            problems.append(problem)
        if entry.name in links:
            problems.append(links[entry.name])
        is_deleted = bool(problems) and not saved.storage.committed(entry.name)
        state = "deleted" if is_deleted else "damaged" if problems else "whole"
        states.append({"name": entry.name, "state": state, "problems": [] if is_deleted else problems})
        if not as_json:
            text = {"deleted": "deleted in the meantime", "damaged": f"damaged: {'; '.join(problems)}"}
            print(f"{entry.name}  {text.get(state, state)}", flush=True)
    if as_json:
        print_json("verification", run=run, checkpoints=states)
    raise typer.Exit(1 if any(each["state"] == "damaged" for each in states) else 0)


@checkpoints_app.command("sign")
def sign(
    context: typer.Context,
    run: RunName,
    key: Annotated[Path, typer.Option(help="Private Ed25519 key (PEM).")],
    which: _Some = None,
    storage: Storage = None,
) -> None:
    """Sign checkpoints, all of them without CHECKPOINT.

    `verify --key` checks the signatures, with the public key.
    """
    from headway.trainer.checkpoints.signatures import sign_checkpoint

    from ..runs.checkpoints import RunCheckpoints

    saved, private = RunCheckpoints.of(run, storage_of(context)), _read_key(key)
    for entry in saved.find(which) if which else saved.entries:
        sign_checkpoint(saved.storage, entry.name, private or b"")
        print(f"{entry.name} is signed")


def _read_key(file: Path | None) -> bytes | None:
    if file is None:
        return None
    from headway.trainer.errors import ConfigError

    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--key {file} cannot be read: {error}") from error


@checkpoints_app.command("digest")
def digest(
    context: typer.Context, run: RunName, which: _Some = None, storage: Storage = None, as_json: Json = False
) -> None:
    """Print a digest of the weights, equal if all bits are equal.

    Without CHECKPOINT, print the digest of the newest good checkpoint.
    """
    from ..runs.checkpoints import RunCheckpoints

    saved = RunCheckpoints.of(run, storage_of(context))
    digests = {entry.name: saved.digest(entry) for entry in saved.find(which or ["newest"])}
    if as_json:
        print_json("digests", run=run, digests=digests)
        return
    for name, weights in digests.items():
        print(f"{name}  {weights}")


@checkpoints_app.command("pin")
def pin(context: typer.Context, run: RunName, which: _Which, storage: Storage = None) -> None:
    """Keep checkpoints until they are unpinned.

    Neither the retention of the run nor `prune` deletes them.
    """
    from headway.trainer.checkpoints.retention import mark_kept

    from ..runs.checkpoints import RunCheckpoints

    saved = RunCheckpoints.of(run, storage_of(context))
    for entry in saved.find(which):
        mark_kept(saved.storage, entry.name)
        print(f"{entry.name} is pinned")


@checkpoints_app.command("unpin")
def unpin(context: typer.Context, run: RunName, which: _Which, storage: Storage = None) -> None:
    """Return pinned checkpoints to the run's retention."""
    from headway.trainer.checkpoints.retention import unmark_kept

    from ..runs.checkpoints import RunCheckpoints

    saved = RunCheckpoints.of(run, storage_of(context))
    for entry in saved.find(which):
        unmark_kept(saved.storage, entry.name)
        print(f"{entry.name} is not pinned")


@checkpoints_app.command("prune")
def prune(
    context: typer.Context,
    run: RunName,
    which: _Some = None,
    storage: Storage = None,
    keep_last: Annotated[int | None, typer.Option(help="Number of last ones to keep (default: the run's).")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Number of best ones to keep (default: the run's).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, without deleting.")] = False,
) -> None:
    """Delete named checkpoints, or those that no rule keeps.

    The newest good checkpoint and pinned ones are never deleted.
    """
    from headway.trainer.errors import ConfigError

    from ..runs.checkpoints import RunCheckpoints

    saved = RunCheckpoints.of(run, storage_of(context), keep_last=keep_last, keep_best=keep_best)
    newest = saved.newest_good()
    if which:
        to_delete = saved.find(which)
        for entry in to_delete:
            if newest is not None and entry.name == newest.name:
                raise ConfigError(f"{entry.name} is the newest good checkpoint of {run}, from which the run resumes")
            if saved.is_pinned(entry):
                raise ConfigError(f"{entry.name} is pinned: unpin it first")
    else:
        reasons = saved.reasons()
        to_delete = [each for each in saved.entries if each.checkpoint and not reasons[each.name] and each != newest]
    for entry in to_delete:
        if not dry_run:
            # The run may have deleted it in the meantime.
            with contextlib.suppress(FileNotFoundError):
                saved.storage.remove(entry.name)
        print(f"{entry.name} {'would be' if dry_run else 'is'} deleted")
    if not to_delete:
        print("nothing to delete")


@checkpoints_app.command("export")
def export(
    context: typer.Context,
    run: RunName,
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="File to write, instead of --output.")] = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help="File to write: a path or a URI.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Step, name, newest or best.")] = "newest",
    model: Annotated[str | None, typer.Option(help="Attribute name of the model, if there are several.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Export the averaged weights.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point weights, e.g. to bfloat16.")] = None,
    storage: Storage = None,
) -> None:
    """Export the weights of a checkpoint to safetensors."""
    if (file is None) == (output is None):
        raise typer.BadParameter(
            f"name one file to write, as in `headway checkpoints export {run} weights.safetensors`", param_hint="FILE"
        )
    import torch

    from headway.trainer.checkpoints.export import export_safetensors
    from headway.trainer.errors import ConfigError

    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"--dtype must be the name of a torch dtype such as bfloat16, got {dtype!r}")
    from ..runs.checkpoints import RunCheckpoints

    saved = RunCheckpoints.of(run, storage_of(context))
    (entry,) = saved.find([checkpoint])
    path, to = saved.storage.path_of(entry.name), str(output or file)
    export_safetensors(path, to, model=model, ema=ema, dtype=getattr(torch, dtype) if dtype else None)
    print(f"the weights of {path} are in {to}")


@checkpoints_app.command("convert")
def convert(
    context: typer.Context,
    run: RunName,
    trust_pickle: Annotated[bool, typer.Option("--trust-pickle", help="Read the pickles in them.")] = False,
    storage: Storage = None,
) -> None:
    """Convert checkpoints of earlier versions, which held pickles.

    Reading a pickle can run any code: pass --trust-pickle if you know who wrote it.
    """
    from headway.trainer.checkpoints.convert import convert_checkpoint, is_convertible

    from ..runs.checkpoints import RunCheckpoints

    saved = RunCheckpoints.of(run, storage_of(context))
    old = [entry.name for entry in saved.entries if is_convertible(saved.storage, entry.name)]
    for name in old:
        print(f"{name} is now {convert_checkpoint(saved.storage, name, trust_pickle=trust_pickle)}", flush=True)
    if not old:
        print(f"{run} has no checkpoint of an earlier format")
