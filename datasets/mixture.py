"""`Mixture`: several sources in fixed or changing proportions, as one source."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from .arrow import Rows, num_rows
from .errors import DataError
from .formats.base import DataFormat, Fragment, RowSource, take
from .interleave import edges_of
from .mixture_plan import Layout, MixturePlan, OnEnd, lay_out
from .paths import nearest
from .plan import Tail

COLUMN = "source"

Phases = tuple[tuple[int, tuple[float, ...]], ...]
"""(first row of each logical shard, weight of each source from there on), in order."""

# The first word of the seed of an interleave; `plan` has the others.
_INTERLEAVE = 3


@dataclass(frozen=True)
class Mixture:
    """Mix several sources, to be read by a `Stream`.

    The order depends on nothing but the seed and the position, so a run resumes exactly, on any number of ranks. Over
    any 10,000 rows the proportions are within 0.1 % of the weights. All sources must give the same columns, of the same
    types. Each row gets the integer column `source`: the index of its source in `sources`.

    An evaluation reads every row of every source once, one source after the other.

    Args:
        sources: (data, weight) by name. Weights are relative: 7 and 3 mean the same as 0.7 and 0.3.
        weights_by_step: other weights, by name, from a step of the run on, counted as the trainer counts full epochs.
            Names that are left out keep their weight. A run that resumes with other weights uses them from there on, if
            it accepts the change.
        on_end: what follows the last row of a source. "repeat" reads it again, in another order. "stop" ends the epoch
            at the first source that ends. "drop" continues without it, so that an epoch has every row once.
        rows_per_epoch: rows of an epoch, with "repeat"; None for the rows of all sources together. Every epoch
            continues in each source where the previous one ended.

    Example:
        >>> from headway.datasets.formats.jsonl import JsonLines
        >>> from headway.datasets.mixture import Mixture
        >>> from headway.datasets.sources import Parquet
        >>> from headway.datasets.stream import Stream
        >>> mixture = Mixture(
        ...     {"web": (JsonLines("web/*.jsonl.gz"), 0.7), "code": (Parquet("code"), 0.3)},
        ...     weights_by_step={10_000: {"web": 0.5, "code": 0.5}},
        ... )
        >>> stream = Stream(mixture)
    """

    sources: Mapping[str, tuple[DataFormat, float]]
    weights_by_step: Mapping[int, Mapping[str, float]] | None = None
    on_end: OnEnd = "repeat"
    rows_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("sources is empty: a Mixture needs at least one source")
        if self.on_end not in get_args(OnEnd):
            raise DataError(f"on_end must be 'repeat', 'stop' or 'drop', got {self.on_end!r}")
        if self.on_end != "repeat" and (self.weights_by_step or self.rows_per_epoch is not None):
            raise DataError(
                f"weights_by_step and rows_per_epoch need on_end='repeat', because with {self.on_end!r} the sources "
                "decide where an epoch ends"
            )
        if self.rows_per_epoch is not None and self.rows_per_epoch < 1:
            raise DataError(f"rows_per_epoch must be an integer >= 1, or None, got {self.rows_per_epoch}")
        for step, weights in (self.weights_by_step or {}).items():
            if step < 1:
                raise DataError(
                    f"weights_by_step must have steps >= 1, got {step}: the weights of step 0 are in sources"
                )
            for name in weights:
                if name not in self.sources:
                    raise DataError(f"weights_by_step[{step}] names {name!r}; {nearest(name, self.sources)}")
        for step, values in self.weights().items():
            for name, weight in zip(self.sources, values, strict=True):
                if not 0 <= weight < float("inf") or (weight == 0 and self.on_end != "repeat"):
                    least = ">= 0" if self.on_end == "repeat" else "> 0"
                    raise DataError(f"the weight of {name!r} must be a number {least}, got {weight}")
            if not sum(values):
                raise DataError(f"all weights are 0 from step {step} on; give at least one source a weight")

    def weights(self) -> dict[int, tuple[float, ...]]:
        """Return the weight of every source, in the order of `sources`, by the step from which it holds."""
        current = {name: weight for name, (_, weight) in self.sources.items()}
        by_step = {0: tuple(current.values())}
        for step, changed in sorted((self.weights_by_step or {}).items()):
            current |= changed
            by_step[step] = tuple(current.values())
        return by_step

    def open(self) -> MixedSource:
        """Open every source.

        Raises:
            DataError: a source cannot be opened.
        """
        opened = {}
        for name, (data, _) in self.sources.items():
            try:
                opened[name] = data.open()
            except DataError as error:
                raise DataError(f"source {name!r}: {error}") from error
        return MixedSource(self, opened)

    def __str__(self) -> str:
        return "the mixture of " + ", ".join(self.sources)


class MixedFragment(NamedTuple):
    """A fragment of a source, whose rows say where they come from."""

    fragment: Fragment
    source: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.fragment.num_rows

    def read(self) -> Rows:
        """Return all rows, with the index of the source."""
        rows = self.fragment.read()
        if COLUMN in rows:
            raise DataError(f"a source has a column {COLUMN!r}, which a Mixture adds; leave it out with columns=[...]")
        return {**rows, COLUMN: np.full(num_rows(rows), self.source)}

    def take(self, rows: slice | npt.NDArray[np.int64]) -> MixedFragment:
        """Return some of the rows."""
        return self._replace(fragment=take(self.fragment, rows))


@dataclass(frozen=True)
class MixedSource:
    """Opened sources of a mixture, with their fragments one source after the other.

    Attributes:
        mixture: the weights.
        sources: by name.
        layout: how they are interleaved; None in an evaluation.
        declared: the weights that the mixture alone gives; empty in an evaluation.
        phases: those in force, which differ from it if the run has changed its weights.
        changes: a line for each of these changes.
    """

    mixture: Mixture
    sources: Mapping[str, RowSource]
    layout: Layout | None = None
    declared: Phases = ()
    phases: Phases = ()
    changes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows of all sources."""
        return int(self.fragment_rows.sum())

    @property
    def skipped_rows(self) -> int:
        """Damaged rows of all sources that are left out."""
        return sum(each.skipped_rows for each in self.sources.values())

    @cached_property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each fragment."""
        return np.concatenate([each.fragment_rows for each in self.sources.values()])

    @cached_property
    def row_bytes(self) -> int:
        """Size of the largest rows of a source."""
        return max(each.row_bytes for each in self.sources.values())

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the sources' names and fingerprints, and the weights with the sample they begin at."""
        return self._digest + (self._describe_order(self.phases) if self.layout else "")

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name, each in self.sources.items():
            digest.update(f"{name}\0{each.fingerprint}\0".encode())
        return digest.hexdigest()[:16]

    def _describe_order(self, phases: Phases) -> str:
        """Return the weights, how sources end, and the rows of an epoch, without spaces: they are parsed by words."""
        assert self.layout is not None
        told = ";".join(
            f"{row * self.layout.shards}:" + ",".join(f"{each:.9g}" for each in _shares(weights))
            for row, weights in phases
        )
        return f"({told};{self.mixture.on_end};{self.layout.rows})"

    def fragment(self, index: int) -> MixedFragment:
        """Return a fragment."""
        source, at = self._find(index)
        return MixedFragment(list(self.sources.values())[source].fragment(at), source)

    def row_name(self, index: int, row: int) -> str:
        """Return the id "<source>/<id in the source>" of a row of a fragment."""
        source, at = self._find(index)
        name, each = list(self.sources.items())[source]
        return f"{name}/{each.row_name(at, row)}"

    def interleaved(self, shards: int, *, seed: int, global_batch_size: int, tail: Tail) -> MixedSource:
        """Return the same sources, interleaved for a training.

        Raises:
            DataError: a source has fewer rows than there are shards.
        """
        for name, each in self.sources.items():
            if each.rows < shards:
                raise DataError(
                    f"source {name!r} has {each.rows} rows, fewer than the {shards} logical shards, and each takes "
                    f"rows of every source. Set shards to a divisor of global_batch_size that is at most {each.rows}"
                )
        rows = self.mixture.rows_per_epoch or self.rows
        rows = -(-rows // shards) * shards
        place = _Place(0, 0, 0, rows, shards, global_batch_size, tail)
        phases = tuple((place.row_of_step(step), values) for step, values in self.mixture.weights().items())
        layout = lay_out(
            [each.fragment_rows for each in self.sources.values()],
            phases,
            shards=shards,
            rotation=int(np.random.SeedSequence([_INTERLEAVE, seed]).generate_state(1, np.uint64)[0]),
            rows_per_epoch=rows,
            on_end=self.mixture.on_end,
        )
        return replace(self, layout=layout, declared=phases, phases=phases, changes=())

    @property
    def order(self) -> dict[str, Any]:
        """What `restored` needs in order to return to these weights; plain values. Only after `interleaved`."""
        return {
            "declared": self._describe_order(self.declared),
            "in_force": self._describe_order(self.phases),
            "phases": [[row, list(weights)] for row, weights in self.phases],
            "changes": list(self.changes),
        }

    def restored(self, order: Mapping[str, Any]) -> MixedSource:
        """Return the source with the weights of an earlier part of the run, as `order` has returned them."""
        return self._with_phases(tuple((row, tuple(each)) for row, each in order["phases"]), tuple(order["changes"]))

    def is_declared(self, order: Mapping[str, Any]) -> bool:
        """Return whether the mixture gives the same weights as it did then, or those that were then in force."""
        return self._describe_order(self.declared) in (order["declared"], order["in_force"])

    def changed(self, *, step: int, epoch: int, offset: int, global_batch_size: int, tail: Tail) -> MixedSource:
        """Return the source with the weights that the mixture gives from a position on, and its own ones before that.

        Rows of earlier positions do not change, and each source continues at its next row. Only with sources that
        repeat, because otherwise weights decide where an epoch ends.

        Args:
            step: updates so far.
            epoch: the epoch in progress.
            offset: samples of it that all ranks together have consumed.
            global_batch_size: converts the steps of `weights_by_step` from here on to samples.
            tail: of the epochs.
        """
        assert self.layout is not None, "interleaved(...) must be called first"
        before = self.phases
        place = _Place(step, epoch, offset, self.layout.rows, self.layout.shards, global_batch_size, tail)
        here = place.row_of_step(step)
        weights = self.mixture.weights()
        current = weights[max(each for each in weights if each <= step)]
        after = (here, current), *((place.row_of_step(at), each) for at, each in weights.items() if at > step)
        rows = [row for row, _ in before]
        kept, in_force = before[: bisect_left(rows, here)], bisect_right(rows, here) - 1
        was = (here, before[in_force][1]), *before[in_force + 1 :]
        change = (
            f"mixture weights from step {step} (sample {here * place.shards}) on: "
            f"{self._tell(was)} -> {self._tell(after)}"
        )
        return self._with_phases((*kept, *after), (*self.changes, change))

    def _with_phases(self, phases: Phases, changes: tuple[str, ...]) -> MixedSource:
        assert self.layout is not None, "interleaved(...) must be called first"
        interleave = replace(
            self.layout.interleave,
            starts=tuple(row for row, _ in phases),
            edges=tuple(edges_of(weights) for _, weights in phases),
        )
        # The layout of a mixture whose sources end has the same phases as when it was laid out.
        layout = replace(self.layout, interleave=interleave) if self.mixture.on_end == "repeat" else self.layout
        return replace(self, layout=layout, phases=phases, changes=changes)

    def _tell(self, phases: Phases) -> str:
        """Return the weights from the first of these phases on."""
        assert self.layout is not None
        told = []
        for number, (row, weights) in enumerate(phases):
            shares = [f"{name} {share:.4g}" for name, share in zip(self.sources, _shares(weights), strict=True)]
            told.append((f"from sample {row * self.layout.shards} on " if number else "") + ", ".join(shares))
        return "; ".join(told)

    def plan(self, seed: int, epoch: int, *, shuffle: bool, tail: Tail) -> MixturePlan:
        """Return the order of one epoch of a training; only after `interleaved`."""
        assert self.layout is not None, "interleaved(...) must be called first"
        return MixturePlan(self.layout, seed, epoch, shuffle=shuffle, tail=tail)

    def _find(self, index: int) -> tuple[int, int]:
        ends = np.cumsum([len(each.fragment_rows) for each in self.sources.values()])
        source = int(np.searchsorted(ends, index, side="right"))
        return source, index - int(ends[source - 1] if source else 0)


class _Place(NamedTuple):
    """A position of a training, from which steps are converted to rows.

    Attributes:
        step, epoch, offset: the position.
        rows: of an epoch.
        shards: logical shards.
        global_batch_size, tail: of the steps from here on.
    """

    step: int
    epoch: int
    offset: int
    rows: int
    shards: int
    global_batch_size: int
    tail: Tail

    def row_of_step(self, step: int) -> int:
        """Return the row of each shard that is the next one after `step` steps of the run, if all its epochs are full.

        Args:
            step: at least that of this place.
        """
        left, more = self._steps(self.rows - self.offset), step - self.step
        if more < left or not more:
            sample = self.epoch * self.rows + self.offset + more * self.global_batch_size
        else:
            epochs, within = divmod(more - left, max(1, self._steps(self.rows)))
            sample = (self.epoch + 1 + epochs) * self.rows + within * self.global_batch_size
        return sample // self.shards

    def _steps(self, rows: int) -> int:
        return rows // self.global_batch_size if self.tail == "drop" else -(-rows // self.global_batch_size)


def _shares(weights: Sequence[float]) -> list[float]:
    return [each / sum(weights) for each in weights]


def only_weights_differ(before: str, now: str) -> bool:
    """Return whether two fingerprints differ in weights alone, of sources that repeat."""
    ends = [each.split(";")[-2:] for each in (before, now)]
    return before.partition("(")[0] == now.partition("(")[0] and ends[0] == ends[1] and ends[0][0] == "repeat"
