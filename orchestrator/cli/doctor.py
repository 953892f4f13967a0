"""The command `headway doctor`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Json, Storage, print_json, storage_of

if TYPE_CHECKING:
    from ..doctor.report import Finding

_HEADINGS = ("STATUS", "CHECK", "NODE", "FOUND", "WHAT TO DO")


def doctor(
    context: typer.Context,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="Head of a Ray cluster: host:port, or auto.")
    ] = None,
    storage: Storage = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for each answer of a node.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Check a machine or a Ray cluster, before you train on it.

    Checks Ray, versions, shared memory, limits, clocks, storage, network, GPUs
    and tokens. Without an address, it checks this machine and starts no Ray.
    Exits with 1 if a check failed.
    """
    from ..cluster.ray_env import quiet_environment

    quiet_environment()
    from ..doctor.report import document, exit_code, summary
    from ..storage.folder import absolute

    place = absolute(storage_of(context))
    if address:
        from ..doctor.cluster_checks import check_cluster

        findings = check_cluster(address, place, timeout_s=timeout)
    else:
        from ..doctor.machine_checks import check_machine

        findings = check_machine(place, timeout_s=timeout)
    if as_json:
        print_json("doctor", address=address, **document(findings))
    else:
        _print_table(findings)
        print(summary(findings))
    raise typer.Exit(exit_code(findings))


def _print_table(findings: Sequence["Finding"]) -> None:
    """Print a table: wrapped on a terminal, else one line per finding."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..display.tables import format_table

    rows = [(each.status, each.check, each.node, each.found, each.advice) for each in findings]
    console = Console(highlight=False)
    if not console.is_terminal:
        print(format_table([_HEADINGS, *rows]))
        return
    table = Table(*_HEADINGS, box=None, pad_edge=False)
    colours = {"ok": "green", "warning": "yellow", "failed": "red"}
    for status, *cells in rows:
        table.add_row(Text(status, style=colours[status]), *map(Text, cells))
    console.print(table)
