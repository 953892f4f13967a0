"""The commands `headway data ...`: prepare and show datasets."""

from dataclasses import asdict
from typing import Annotated

import typer

from .options import Json, print_json
from .prepare import prepare_data, prepare_image_data

data_app = typer.Typer(help="Prepare and show data.", no_args_is_help=True, rich_markup_mode=None)
data_app.command("prepare")(prepare_data)
data_app.command("prepare-images")(prepare_image_data)


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
