"""`Mixture`: several sources in fixed or changing proportions, as one source."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from .arrow import Rows, num_rows
from .errors import DataError
from .formats.base import DataFormat, Fragment, RowSource, check_format, take
from .interleave import edges_of
from .mixture_plan import Layout, MixturePlan, OnEnd, lay_out
from .paths import nearest
from .plan import Tail

COLUMN = "source"

Phases = tuple[tuple[int, tuple[float, ...]], ...]
"""(first row of each logical shard, weight of each source from there on), in order.

Rows count through the epochs, each of which takes `MixedSource.span`, even if it ends before.
"""

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
            at the first source that ends. "drop" continues without it, so that an epoch has every row once. With both,
            every epoch begins all sources again, and other weights change where sources end.
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
        if not isinstance(self.sources, Mapping):
            raise DataError(
                f"sources must be {{name: (data, weight)}}, where the names appear in metrics and row ids, got a "
                f"{type(self.sources).__name__}"
            )
        if not self.sources:
            raise DataError("sources is empty: a Mixture needs at least one source")
        for name, source in self.sources.items():
            if not isinstance(source, Sequence) or isinstance(source, str) or len(source) != 2:
                raise DataError(f"sources[{name!r}] must be (data, weight), got a {type(source).__name__}")
            check_format(source[0], f"sources[{name!r}][0]")
        if self.on_end not in get_args(OnEnd):
            raise DataError(f"on_end must be 'repeat', 'stop' or 'drop', got {self.on_end!r}")
        if self.on_end != "repeat" and self.rows_per_epoch is not None:
            raise DataError(
                f"rows_per_epoch needs on_end='repeat', because with {self.on_end!r} the sources decide where an epoch "
                "ends"
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
                if (
                    not isinstance(weight, int | float | np.number)
                    or not 0 <= weight < float("inf")
                    or (weight == 0 and self.on_end != "repeat")
                ):
                    least = ">= 0" if self.on_end == "repeat" else "> 0"
                    raise DataError(f"the weight of {name!r} must be a number {least}, got {weight!r}")
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
        layout: how they are interleaved; None in an evaluation. Where sources end, the one with the first weights.
        declared: the weights that the mixture alone gives; empty in an evaluation.
        phases: those in force, which differ from it if the run has changed its weights.
        changes: a line for each of these changes.
        layouts: layouts of epochs by their weights, where sources end.
    """

    mixture: Mixture
    sources: Mapping[str, RowSource]
    layout: Layout | None = None
    declared: Phases = ()
    phases: Phases = ()
    changes: tuple[str, ...] = ()
    layouts: dict[Phases, Layout] = field(default_factory=dict, repr=False)

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
        """Return the weights, how sources end, and the most rows of an epoch, without spaces, which separate words."""
        assert self.layout is not None
        weights_by_sample = ";".join(
            f"{row * self.layout.shards}:" + ",".join(f"{each:.9g}" for each in _shares(weights))
            for row, weights in phases
        )
        rows = self.layout.rows if self.mixture.on_end == "repeat" else self.rows
        return f"({weights_by_sample};{self.mixture.on_end};{rows})"

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
        first = ((0, self.mixture.weights()[0]),)
        layout = lay_out(
            [each.fragment_rows for each in self.sources.values()],
            first,
            shards=shards,
            rotation=int(np.random.SeedSequence([_INTERLEAVE, seed]).generate_state(1, np.uint64)[0]),
            rows_per_epoch=-(-(self.mixture.rows_per_epoch or self.rows) // shards) * shards,
            on_end=self.mixture.on_end,
        )
        source = replace(self, layout=layout, layouts={first: layout})
        declared = source.planned_phases((), _Place(0, 0, 0), global_batch_size=global_batch_size, tail=tail)
        return replace(source.with_phases(declared, ()), declared=declared)

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
        return self.with_phases(tuple((row, tuple(each)) for row, each in order["phases"]), tuple(order["changes"]))

    def is_declared(self, order: Mapping[str, Any]) -> bool:
        """Return whether the mixture gives the same weights as it did then, or those that were then in force."""
        return self._describe_order(self.declared) in (order["declared"], order["in_force"])

    def changed(self, *, step: int, epoch: int, offset: int, global_batch_size: int, tail: Tail) -> MixedSource:
        """Return the source with the weights that the mixture gives from a position on, and its own ones before that.

        Rows of earlier positions do not change, and each source continues at its next row.

        Args:
            step: updates so far.
            epoch: the epoch in progress.
            offset: samples of it that all ranks together have consumed.
            global_batch_size: converts the steps of `weights_by_step` from here on to samples.
            tail: of the epochs.

        Raises:
            DataError: an epoch would end before its first global batch.
        """
        before, place = self.phases, _Place(step, epoch, offset)
        phases = self.planned_phases(before, place, global_batch_size=global_batch_size, tail=tail)
        rows = [row for row, _ in before]
        here = self._row(self._after(place, 0, before, global_batch_size=global_batch_size, tail=tail))
        in_force = bisect_right(rows, here) - 1
        was = (here, before[in_force][1]), *before[in_force + 1 :]
        after = phases[bisect_left(rows, here) :]
        weights = f"{self._describe(was)} -> {self._describe(after)}"
        change = f"mixture weights from step {step} ({self._name(here)}) on: {weights}"
        return self.with_phases(phases, (*self.changes, change))

    def planned_phases(self, before: Phases, place: _Place, *, global_batch_size: int, tail: Tail) -> Phases:
        """Return the phases before a place, followed by those that the mixture gives from there on."""
        weights = self.mixture.weights()
        current = max(step for step in weights if step <= place.step)
        phases = before
        for step, values in weights.items():
            if step < current:
                continue
            if phases:
                place = self._after(
                    place, max(0, step - place.step), phases, global_batch_size=global_batch_size, tail=tail
                )
            here = self._row(place)
            phases = *(each for each in phases if each[0] < here), (here, values)
            rows = self._layout(place.epoch + 1, phases).rows
            if self.mixture.on_end == "stop" and not _steps(rows, global_batch_size, tail):
                raise DataError(
                    f"with the weights from step {place.step} on, the first source ends after {rows} rows of an epoch, "
                    f"less than global_batch_size {global_batch_size}: give that source less weight, or use "
                    "on_end='drop' or 'repeat'"
                )
        return phases

    def _after(self, place: _Place, steps: int, phases: Phases, *, global_batch_size: int, tail: Tail) -> _Place:
        """Return the place after more steps, if all epochs are full, and no weights change on the way."""
        left = _steps(self._layout(place.epoch, phases).rows - place.offset, global_batch_size, tail)
        if steps < left:
            return _Place(place.step + steps, place.epoch, place.offset + steps * global_batch_size)
        following = _steps(self._layout(place.epoch + 1, phases).rows, global_batch_size, tail)
        epochs, within = divmod(steps - left, max(1, following))
        return _Place(place.step + steps, place.epoch + 1 + epochs, within * global_batch_size)

    def _row(self, place: _Place) -> int:
        """Return the next row of each shard, as `Phases` count rows."""
        assert self.layout is not None
        return place.epoch * self.span + place.offset // self.layout.shards

    def _name(self, row: int) -> str:
        """Return the name of this row of each shard in messages."""
        assert self.layout is not None
        if self.mixture.on_end == "repeat":
            return f"sample {row * self.layout.shards}"
        epoch, within = divmod(row, self.span)
        return f"sample {within * self.layout.shards} of epoch {epoch + 1}"

    @property
    def span(self) -> int:
        """Rows of each shard that an epoch has at most."""
        assert self.layout is not None, "interleaved(...) must be called first"
        return self.layout.mixed if self.mixture.on_end == "repeat" else -(-self.rows // self.layout.shards)

    def _layout(self, epoch: int, phases: Phases) -> Layout:
        """Return the layout of an epoch. Where sources end, it depends on the weights of this epoch alone."""
        assert self.layout is not None, "interleaved(...) must be called first"
        if self.mixture.on_end == "repeat":
            return self.layout
        first = epoch * self.span
        begun = bisect_right([row for row, _ in phases], first) - 1
        later = ((row - first, each) for row, each in phases[begun + 1 :] if row < first + self.span)
        own = (0, phases[begun][1]), *later
        if own not in self.layouts:
            self.layouts[own] = lay_out(
                self.layout.fragment_rows,
                own,
                shards=self.layout.shards,
                rotation=self.layout.interleave.rotation,
                rows_per_epoch=self.layout.rows,
                on_end=self.mixture.on_end,
            )
        return self.layouts[own]

    def with_phases(self, phases: Phases, changes: tuple[str, ...]) -> MixedSource:
        """Return the source with these weights in force."""
        assert self.layout is not None, "interleaved(...) must be called first"
        layout = self.layout
        if self.mixture.on_end == "repeat":
            starts, edges = tuple(row for row, _ in phases), tuple(edges_of(weights) for _, weights in phases)
            layout = replace(layout, interleave=replace(layout.interleave, starts=starts, edges=edges))
        return replace(self, layout=layout, phases=phases, changes=changes)

    def _describe(self, phases: Phases) -> str:
        """Return the weights from the first of these phases on."""
        described = []
        for number, (row, weights) in enumerate(phases):
            shares = [f"{name} {share:.4g}" for name, share in zip(self.sources, _shares(weights), strict=True)]
            described.append((f"from {self._name(row)} on " if number else "") + ", ".join(shares))
        return "; ".join(described)

    def plan(self, seed: int, epoch: int, *, shuffle: bool, tail: Tail) -> MixturePlan:
        """Return the order of one epoch of a training; only after `interleaved`."""
        return MixturePlan(self._layout(epoch, self.phases), seed, epoch, shuffle=shuffle, tail=tail)

    def _find(self, index: int) -> tuple[int, int]:
        ends = np.cumsum([len(each.fragment_rows) for each in self.sources.values()])
        source = int(np.searchsorted(ends, index, side="right"))
        return source, index - int(ends[source - 1] if source else 0)


class _Place(NamedTuple):
    """A position of a training: updates so far, the epoch in progress, and samples of it that have been consumed."""

    step: int
    epoch: int
    offset: int


def _steps(rows: int, global_batch_size: int, tail: Tail) -> int:
    return rows // global_batch_size if tail == "drop" else -(-rows // global_batch_size)


def _shares(weights: Sequence[float]) -> list[float]:
    return [each / sum(weights) for each in weights]


def only_weights_differ(before: str, now: str) -> bool:
    """Return whether two fingerprints of mixtures differ in weights alone."""
    ends = [each.split(";")[-2:] for each in (before, now)]
    return before.partition("(")[0] == now.partition("(")[0] and ends[0] == ends[1]
