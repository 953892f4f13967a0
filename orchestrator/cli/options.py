"""Options and arguments shared by commands: the storage, overrides and JSON output."""

import difflib
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..config.experiment import Experiment

SCHEMA = 1
"""Version of the JSON output, incremented when a field changes or is removed (docs/command-line.md)."""

STORAGE_VARIABLE = "HEADWAY_STORAGE"
OVERRIDES_VARIABLE = "HEADWAY_OVERRIDES"


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of runs that start with `incomplete`, for shell completion."""
    from ..errors import StorageError
    from ..storage.folder import Folder, absolute

    try:
        return [name for name in Folder(absolute(storage_of(context))).folders() if name.startswith(incomplete)]
    except StorageError:
        return []


Storage = Annotated[
    str | None, typer.Option("--storage", help=f"Folder or URI of the runs (or set {STORAGE_VARIABLE}).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of the run; SWEEP/TRIAL for a trial.", autocompletion=complete_run)
]
OVERRIDES_ALLOWED = {"ignore_unknown_options": True}
"""Settings of a command with `Target` and `Overrides`, which get the options that it does not have and refuse them."""


def _refuse_options(context: typer.Context, value: str | list[str] | None) -> str | list[str] | None:
    """Raise ConfigError for an argument that is an option which the command does not have."""
    for each in [value] if isinstance(value, str) else value or ():
        if each.startswith("-"):
            option = each.partition("=")[0]
            names = [name for parameter in context.command.params for name in parameter.opts]
            near = difflib.get_close_matches(option, names, n=1)
            settings = "settings have no dashes, as in config.learning_rate=3e-4; --print-config of fit lists them"
            from headway.trainer.errors import ConfigError

            raise ConfigError(f"there is no option {option}: {f'did you mean {near[0]}?' if near else settings}")
    return value


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="file.py[:name] or module:name of an Experiment or Trainer.",
        callback=_refuse_options,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATH=VALUE", help="Overrides, e.g. config.learning_rate=3e-4.", callback=_refuse_options),
]
Resume = Annotated[
    str, typer.Option(metavar="CHECKPOINT", help="auto (newest), never (start over) or a checkpoint path.")
]
Restore = Annotated[
    str | None, typer.Option(metavar="PART,...", help="Parts to restore, e.g. models,optimizers (default: all).")
]
AcceptChanges = Annotated[bool, typer.Option("--accept-changes", help="Resume although the config has changed.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the output of Ray and of the workers.")]


def storage_of(context: typer.Context) -> str:
    """Return the storage of a command: --storage of the command or of a parent, HEADWAY_STORAGE, or "runs"."""
    return _given_storage(context) or os.environ.get(STORAGE_VARIABLE) or "runs"


def wants_json(context: typer.Context) -> bool:
    """Return whether --json was given to the command or to its group."""
    return any(each.params.get("as_json") for each in _chain(context))


def overrides_of(context: typer.Context, overrides: Sequence[str] | None) -> list[str]:
    """Return the overrides of a command: environment, --storage, command line; later ones take precedence."""
    from ..config.coerce import quote

    storages = os.environ.get(STORAGE_VARIABLE), _given_storage(context)
    first, last = ([f"storage={quote(each)}"] if each else [] for each in storages)
    return [*first, *shlex.split(os.environ.get(OVERRIDES_VARIABLE, "")), *last, *(overrides or [])]


def resolve_experiment(context: typer.Context, target: str, overrides: Sequence[str] | None) -> "Experiment":
    """Return the experiment of a target with all its overrides.

    Raises:
        ConfigError: the target or an override is invalid.
    """
    from ..config.loader import resolve

    return resolve(target, overrides_of(context, overrides))


def print_json(kind: str, **content: Any) -> None:
    """Print one JSON document with its schema version and kind."""
    print(json.dumps({"schema": SCHEMA, "kind": kind, **_plain(content)}, indent=2, default=str, allow_nan=False))


def _plain(value: Any) -> Any:
    """Return a value with the floats that JSON lacks as "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _given_storage(context: typer.Context) -> str | None:
    return next((each.params["storage"] for each in _chain(context) if each.params.get("storage")), None)


def _chain(context: Any) -> list[Any]:
    """Return a command's context and its parents, innermost first."""
    chain = []
    while context is not None:
        chain.append(context)
        context = context.parent
    return chain
