"""The commands `headway data ...`: prepare and show datasets."""

import sys
from dataclasses import asdict
from typing import Annotated, Literal, cast

import typer

from .options import Json, print_json

data_app = typer.Typer(help="Prepare and show data.", no_args_is_help=True, rich_markup_mode=None)


@data_app.command("prepare")
def prepare_data(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Text files, folders or globs.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Folder for the Parquet files.")],
    row_length: Annotated[int, typer.Option(help="Tokens per row.")],
    tail: Annotated[str, typer.Option(help="How to handle the last, short row: drop or pad.")] = "drop",
) -> None:
    """Tokenize text into Parquet rows, one token per byte.

    To resume after an interruption, run the same command again.
    """
    from headway.datasets.prepare import prepare_text

    if tail not in ("drop", "pad"):
        raise typer.BadParameter(f"must be drop or pad, got {tail!r}", param_hint="--tail")
    progress = (lambda done: print(done, file=sys.stderr, flush=True)) if sys.stderr.isatty() else None
    kept = cast(Literal["drop", "pad"], tail)
    print(prepare_text(inputs, output, row_length=row_length, tail=kept, progress=progress))


@data_app.command("show")
def show_data(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Parquet, JSON Lines, tars, images: file, folder, glob, URI.")
    ],
    row: Annotated[str | None, typer.Option(help='Row to show, e.g. "a.parquet[3]:17".')] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Columns to read; other columns may differ between files.")
    ] = None,
    index: Annotated[str | None, typer.Option(help="Folder for the index; default: beside the data.")] = None,
    as_json: Json = False,
) -> None:
    """Show a dataset and its first row, or one of its rows."""
    from headway.datasets.show import describe, read_row

    wanted = columns.split(",") if columns is not None else None
    if row is not None:
        values = read_row(path, row, columns=wanted, index=index)
        if as_json:
            print_json("row", path=path, row=row, values=values)
        else:
            print("\n".join(f"{name}: {value!r}" for name, value in values.items()))
        return
    description = describe(path, columns=wanted, index=index)
    if as_json:
        print_json("dataset", **asdict(description))
    else:
        print(description)
