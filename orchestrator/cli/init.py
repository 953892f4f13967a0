"""The command `headway init`."""

from typing import Annotated

import typer

_KINDS = "aws, gcp, azure, kubernetes, slurm, skypilot or docker"


def init(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=_KINDS)],
    folder: Annotated[str, typer.Option(metavar="FOLDER", help="Folder to write to.")] = ".",
) -> None:
    """Write a commented file for a cluster, scheduler or image.

    The lines to edit are marked EDIT. Existing files are never overwritten.
    """
    from ..cluster.starter_files import KINDS, write_starter_files

    for file in write_starter_files(kind, folder):
        lines = ", ".join(map(str, file.edits))
        print(f"{file.path}: edit the lines marked EDIT ({lines})")
    print(f"to check: {KINDS[kind][1]}")
