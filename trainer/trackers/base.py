"""Where the records of a run go: the base of all trackers, and the list that keeps their failures from training."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..callbacks.naming import key_by_class
from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..metrics.histogram import Histogram


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker is told of the run that it records.

    Attributes:
        name: of the run.
        run_dir: the run's directory, a path or an fsspec URI; None where nothing is to be written.
        config: the trainer's config as plain dicts, lists, numbers and strings.
        attempt: which life of the run this is, from 1.
        resumed: whether a checkpoint was loaded.
    """

    name: str
    run_dir: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1
    resumed: bool = False


class Tracker:
    """Writes the records of a run somewhere. Lives on the main rank only; a failure costs a warning, never the run.

    The order of calls: `load_state_dict` if there is a checkpoint, `start`, any number of `log`, `log_images`,
    `rewind` and `state_dict`, `finish`. What was logged after the checkpoint that a run resumes from, or after the step
    that it rewinds to, will be logged again: a tracker sees to it that no step appears twice.

    Example:
        >>> class Lowest(Tracker):
        ...     loss = float("inf")
        ...     def log(self, metrics, *, step, epoch):
        ...         self.loss = min(self.loss, metrics.get("validation/loss", self.loss))
        >>> lowest = Lowest()
        >>> result = Digits(config, trackers=[lowest]).fit()
        >>> lowest.loss == result.metrics["validation/loss"]
        True
    """

    def start(self, run: RunInfo, *, step: int) -> None:
        """Begins, or goes on after update `step` of a resumed run."""

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Writes one record. Steps decrease only after `rewind`; records of the same step complete one another."""

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Writes images by name: tensors of shape [channels, height, width], uint8, or floats from 0 to 1."""

    def log_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Writes texts by name, such as samples of a language model."""

    def log_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Writes histograms by name."""

    def rewind(self, step: int) -> None:
        """Forgets what was logged after update `step`: a run has gone back to it, and will make those updates again."""

    def finish(self, status: str) -> None:
        """Ends with the status of the run's result, in every ending that leaves the time."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run must know."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes over what `state_dict` returned."""


class TrackerList(Tracker):
    """All trackers of a run as one, which never raises: a tracker that fails is warned of once, and tried again.

    One that fails to start is left out from then on.

    Raises:
        ConfigError: one of them is no tracker.
    """

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        for tracker in trackers:
            if not isinstance(tracker, Tracker):
                raise ConfigError(f"{tracker!r} is not a Tracker; a tracker is an object, such as JsonlTracker()")
        self._by_key = key_by_class(trackers)
        self._live = list(trackers)
        self._warned: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def start(self, run: RunInfo, *, step: int) -> None:
        """Starts each, and drops those that cannot."""
        for tracker in tuple(self._live):
            self._live.remove(tracker)
            with self._guarded(tracker, "start"):
                tracker.start(run, step=step)
                self._live.append(tracker)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Gives each the record."""
        for tracker in self._live:
            try:
                tracker.log(metrics, step=step, epoch=epoch)
            except Exception as error:
                # Not around it: to enter and leave a context takes a sixth of the time of a record.
                with self._guarded(tracker, "log"):
                    raise error

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Gives each the images."""
        for tracker in self._live:
            with self._guarded(tracker, "log_images"):
                tracker.log_images(images, step=step)

    def log_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Gives each the texts."""
        for tracker in self._live:
            with self._guarded(tracker, "log_text"):
                tracker.log_text(texts, step=step)

    def log_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Gives each the histograms."""
        for tracker in self._live:
            with self._guarded(tracker, "log_histograms"):
                tracker.log_histograms(histograms, step=step)

    def rewind(self, step: int) -> None:
        """Takes each back."""
        for tracker in self._live:
            with self._guarded(tracker, "rewind"):
                tracker.rewind(step)

    def finish(self, status: str) -> None:
        """Ends each."""
        for tracker in self._live:
            with self._guarded(tracker, "finish"):
                tracker.finish(status)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states that are not empty, by class and place among the trackers of that class."""
        states: dict[str, Any] = {}
        for key, tracker in self._by_key.items():
            with self._guarded(tracker, "state_dict"):
                if state := tracker.state_dict():
                    states[key] = state
        return states

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Gives each its state; those that came or went since are no matter."""
        for key, tracker in self._by_key.items():
            if key in state_dict:
                with self._guarded(tracker, "load_state_dict"):
                    tracker.load_state_dict(state_dict[key])

    @contextlib.contextmanager
    def _guarded(self, tracker: Tracker, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if id(tracker) not in self._warned:
                self._warned.add(id(tracker))
                warnings.warn(
                    f"{type(tracker).__qualname__}.{what} failed, and training goes on without it: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=4,
                )
