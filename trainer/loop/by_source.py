"""The loss and the number of tokens of each source of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..data.protocols import BatchStream, HasSources
from ..distributed.mesh import Mesh
from ..errors import StepError
from ..metrics.means import MeanMetrics, group_sums


def add_by_source(
    metrics: MeanMetrics,
    prefix: str,
    stream: BatchStream | None,
    loss_B: Tensor,
    source_B: Tensor,
    tokens_B: Tensor | None,
    *,
    mesh: Mesh,
) -> None:
    """Add "<prefix>loss/<source>" and "<prefix>tokens/<source>", or "rows" without tokens; never waits for a device.

    Args:
        metrics: to which they are added.
        prefix: "train/", or that of an evaluation.
        stream: of these rows.
        loss_B: the mean loss of each row.
        source_B: the index of the source of each row.
        tokens_B: over how many tokens each loss is a mean; None to count rows.
        mesh: of the ranks; those that divide sequences have the same rows, and tokens of their own.

    Raises:
        StepError: the stream has no sources, or the shapes are wrong.
    """
    names: Sequence[str] = stream.source_names if isinstance(stream, HasSources) else ()
    if not names:
        raise StepError(
            "log_by_source() needs a Stream of a Mixture, whose batches have the source of each row: use log() for "
            "other data"
        )
    shapes = {name: each for name, each in (("source", source_B), ("tokens", tokens_B)) if each is not None}
    for name, each in shapes.items():
        if each.shape != loss_B.shape or loss_B.ndim != 1:
            raise StepError(
                f"log_by_source() takes a loss and a {name} for each row, got shapes {list(loss_B.shape)} and "
                f"{list(each.shape)}: average the loss over the tokens of each row"
            )
    sums_2G = group_sums(loss_B, source_B, tokens_B, len(names))
    count = "rows" if tokens_B is None else "tokens"
    if tokens_B is None:
        # The mean does not change if all ranks that have the same rows divide their weight.
        sums_2G = sums_2G / mesh.sizes.cp
    metrics.add_groups(
        sums_2G, [f"{prefix}loss/{name}" for name in names], [f"{prefix}{count}/{name}" for name in names]
    )
