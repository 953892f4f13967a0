"""The commands `headway data prepare` and `prepare-images`: data to Parquet, by tasks on Ray."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .jobs import connect_to_jobs, follow_job
from .options import Verbose

if TYPE_CHECKING:
    from headway.datasets.prepare import PrepareProgress, TextPlan

# Starting Ray takes some seconds: shorter work is done in this process.
_WORTH_RAY_S = 20.0
_LINE_EVERY_S = 10.0

_Tasks = Annotated[int | None, typer.Option(min=1, help="Ray tasks at a time; 1: without Ray. Default: all CPUs.")]
_Address = Annotated[str | None, typer.Option(metavar="URL", help="Ray dashboard: run as a job of that cluster.")]
_RuntimeEnv = Annotated[
    str | None, typer.Option(metavar="FILE|JSON", help="With --address: runtime environment of Ray.")
]


def prepare_data(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT", help="Text, JSON Lines, Parquet: files, folders, globs, URIs.")
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Folder or URI for the Parquet files.")],
    row_length: Annotated[int | None, typer.Option(help="Tokens per row; default: one row per document.")] = None,
    tail: Annotated[str, typer.Option(help="How to handle the last, short row: drop or pad.")] = "drop",
    tokenizer: Annotated[str, typer.Option(help="bytes, tokenizer.json, a Hub repository, or file.py:name.")] = "bytes",
    append: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Token after each document, e.g. '<|endoftext|>'.")
    ] = None,
    text: Annotated[str, typer.Option(metavar="KEY", help="Key or column with the text.")] = "text",
    on_bad_row: Annotated[str, typer.Option(help="Damaged lines: raise, or skip and count.")] = "raise",
    part_mb: Annotated[float, typer.Option(min=0.001, help="Megabytes of input per Parquet file.")] = 32,
    tasks: _Tasks = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Estimate sizes and time; write nothing.")] = False,
    address: _Address = None,
    runtime_env: _RuntimeEnv = None,
    verbose: Verbose = False,
) -> None:
    """Tokenize text into Parquet, with many tasks on Ray.

    To resume after an interruption, run the same command again. Files that are
    complete are verified and kept.
    """
    if tail not in ("drop", "pad"):
        raise typer.BadParameter(f"must be drop or pad, got {tail!r}", param_hint="--tail")
    if on_bad_row not in ("raise", "skip"):
        raise typer.BadParameter(f"must be raise or skip, got {on_bad_row!r}", param_hint="--on-bad-row")
    if address is not None:
        raise typer.Exit(_submit(address, [*inputs, output], runtime_env))
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from headway.datasets.prepare import plan_text, prepare_text

    options: dict[str, Any] = {
        "row_length": row_length, "text": text, "on_bad_row": on_bad_row, "part_bytes": int(part_mb * 2**20),
        "tokenizer": _tokenizer(tokenizer, append),
    }  # fmt: skip
    plan = plan_text(inputs, output, **options)
    if dry_run:
        print(_plan_page(plan, tasks, row_length))
        return
    is_small = plan.parts == 1 or plan.seconds(1) < _WORTH_RAY_S
    with _ray_for(tasks, is_small=is_small, verbose=verbose) as chosen, _prepare_bar() as progress:
        done = prepare_text(inputs, output, tail=cast(Any, tail), tasks=chosen, progress=progress, **options)
    print(done)


def prepare_image_data(
    images: Annotated[str, typer.Argument(metavar="FOLDER", help="One folder of images per class.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Folder or URI for the Parquet files.")],
    size: Annotated[int, typer.Option(min=1, help="Height and width of the result, in pixels.")],
    encoding: Annotated[str, typer.Option(help="raw pixels, jpeg or png.")] = "raw",
    quality: Annotated[int, typer.Option(min=1, max=95, help="Quality of JPEG.")] = 90,
    mode: Annotated[str, typer.Option(help="RGB, or L for grey.")] = "RGB",
    on_bad_row: Annotated[str, typer.Option(help="Damaged images: raise, or skip and count.")] = "raise",
    rows_per_file: Annotated[int, typer.Option(min=1, help="Images per Parquet file.")] = 2048,
    index: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder for the index of the images.")] = None,
    tasks: _Tasks = None,
    address: _Address = None,
    runtime_env: _RuntimeEnv = None,
    verbose: Verbose = False,
) -> None:
    """Resize images into Parquet, with many tasks on Ray.

    To resume after an interruption, run the same command again. Files that are
    complete are verified and kept.
    """
    if address is not None:
        raise typer.Exit(_submit(address, [images, output], runtime_env))
    from ..cluster.ray_env import quiet_environment

    quiet_environment(verbose=verbose)
    from headway.datasets.formats.images import Images
    from headway.datasets.prepare import prepare_images

    source = Images(images, mode=mode, on_bad_row=cast(Any, on_bad_row), index=index)
    is_small = source.open().rows <= rows_per_file
    with _ray_for(tasks, is_small=is_small, verbose=verbose) as chosen, _prepare_bar() as progress:
        done = prepare_images(
            source, output, size=size, encoding=cast(Any, encoding), quality=quality, rows_per_file=rows_per_file,
            tasks=chosen, progress=progress,
        )  # fmt: skip
    print(done)


def _tokenizer(name: str, append: str | None) -> Any:
    """Return the tokenizer of `--tokenizer`."""
    from headway.datasets.tokenizers import ByteTokenizer, HuggingFaceTokenizer

    place, _, attribute = name.rpartition(":")
    is_function = bool(place) and "://" not in name
    if append is not None and (is_function or name == "bytes"):
        raise typer.BadParameter("needs a tokenizer of Hugging Face", param_hint="--append")
    if name == "bytes":
        return ByteTokenizer()
    if not is_function:
        return HuggingFaceTokenizer(name, append=append)
    from ray import cloudpickle

    from ..config.target import load_named

    found = load_named(name, attribute)
    # The workers of a cluster need not have the file.
    cloudpickle.register_pickle_by_value(sys.modules[getattr(found, "__module__", type(found).__module__)])
    return found() if isinstance(found, type) else found


def _plan_page(plan: "TextPlan", tasks: int | None, row_length: int | None) -> str:
    from headway.trainer.metrics.units import human_duration

    rows = f"{plan.rows:,} rows of {row_length}" if row_length else f"{plan.documents:,} rows, one per document"
    lines = [
        f"{plan.input_bytes / 1e6:,.1f} MB of input in {plan.parts:,} part{'' if plan.parts == 1 else 's'}",
        f"about {plan.documents:,} documents, {plan.tokens:,} tokens ({4 * plan.tokens / 1e6:,.1f} MB uncompressed)",
        f"about {rows}",
        f"one task reads {plan.bytes_per_s / 1e6:.2f} MB/s here:",
    ]
    for each in sorted({1, 2, 16, 1000, *([tasks] if tasks else [])}):
        lines.append(f"  {each:>5} task{'s' if each > 1 else ' '} about {human_duration(plan.seconds(each))}")
    return "\n".join(lines)


@contextlib.contextmanager
def _ray_for(tasks: int | None, *, is_small: bool, verbose: bool) -> Iterator[int | None]:
    """Connect to Ray or start it where it is worth its start; yield the number of tasks."""
    if tasks == 1 or (tasks is None and is_small and not os.environ.get("RAY_ADDRESS")):
        yield 1
        return
    from headway.trainer.loop.progress import Duration

    from ..cluster.connect import ray_connection, usable_cpus
    from ..config.scaling import Scaling

    # A cluster may have no CPU until its autoscaler starts a node.
    scaling = Scaling(wait=Duration(3600, "seconds"))
    with ray_connection(scaling, verbose=verbose, say=lambda line: print(line, file=sys.stderr)) as is_own:
        yield tasks or (usable_cpus() if is_own else None)


@contextlib.contextmanager
def _prepare_bar() -> Iterator[Callable[["PrepareProgress"], None]]:
    """Yield a function that shows progress: in a bar on a terminal, else by a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        next_s = _LINE_EVERY_S

        def line(done: "PrepareProgress") -> None:
            nonlocal next_s
            if done.seconds >= next_s:
                next_s = done.seconds + _LINE_EVERY_S
                print(done, file=sys.stderr, flush=True)

        yield line
        return
    with Progress(BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done: bar.update(task, completed=done.parts_done, total=done.parts, description=str(done))


def _submit(address: str, paths: Sequence[str], runtime_env: str | None) -> int:
    """Run this command as a job, and return its exit code."""
    from headway.trainer.errors import ConfigError

    from ..cluster.job_command import JobRequest, runtime_env_from_options

    for each in paths:
        if "://" not in each and not os.path.isabs(each):
            raise ConfigError(
                f"{each} is a path of this machine, of which the cluster has no copy: give a URI, or the absolute path "
                "of a folder that all nodes share"
            )
    arguments = without_option(sys.argv[1:], "--address", "--runtime-env")
    jobs = connect_to_jobs(address)
    job = jobs.submit_command(
        "data-prepare", arguments, JobRequest(runtime_env=runtime_env_from_options(base=runtime_env))
    )
    print(f"submitted as {job}", flush=True)
    return follow_job(jobs, job)


def without_option(arguments: Sequence[str], *names: str) -> list[str]:
    """Return command-line arguments without some options that take a value."""
    kept: list[str] = []
    rest = iter(arguments)
    for each in rest:
        if each in names:
            next(rest, None)
        elif not each.startswith(tuple(f"{name}=" for name in names)):
            kept.append(each)
    return kept
