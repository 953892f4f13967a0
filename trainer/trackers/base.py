"""The base class of trackers, and the list that isolates training from their failures."""

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
    """The run that a tracker records.

    Attributes:
        name: the run's name.
        run_dir: the run's directory, a path or an fsspec URI; None if nothing is to be written.
        config: the trainer's config as plain dicts, lists, numbers and strings.
        attempt: number of the run's attempt, from 1.
        resumed: whether a checkpoint was loaded.
        group: name of the sweep of which the run is a trial; None for other runs.
    """

    name: str
    run_dir: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1
    resumed: bool = False
    group: str | None = None

    @property
    def full_name(self) -> str:
        """The name with that of the sweep before it, which tells the trials of several sweeps apart."""
        return f"{self.group}/{self.name}" if self.group else self.name


class Tracker:
    """Base class of trackers, which write the records of a run. Called on rank 0 only; errors become warnings.

    Order of calls: `load_state_dict` if there is a checkpoint, `start`, any number of `log`, `log_images`, `log_text`,
    `log_histograms`, `rewind` and `state_dict`, then `finish`. Steps after the checkpoint from which a run resumes, or
    after the step to which it rewinds, are logged again; a tracker must not record them twice.

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
        """Start the run, or resume it after update `step`."""

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write one record. Steps decrease only after `rewind`; records of the same step are merged."""

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Write images by name: tensors of shape [channels, height, width], uint8, or floats from 0 to 1."""

    def log_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Write texts by name, such as samples of a language model."""

    def log_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Write histograms by name."""

    def rewind(self, step: int) -> None:
        """Remove everything logged after update `step`: the run has rolled back to it and repeats the later updates."""

    def finish(self, status: str) -> None:
        """End the run with its final status; not called if the process is killed."""

    def state_dict(self) -> dict[str, Any]:
        """Return state for the checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore what `state_dict` returned."""


class TrackerList(Tracker):
    """All trackers of a run as one, which never raises. A tracker that fails causes one warning and is called again.

    A tracker that fails to start is dropped.

    Raises:
        ConfigError: one of `trackers` is not a `Tracker`.
    """

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        for tracker in trackers:
            if not isinstance(tracker, Tracker):
                raise ConfigError(f"trackers must be Tracker objects, such as JsonlTracker(), got {tracker!r}")
        self._by_key = key_by_class(trackers)
        self._live = list(trackers)
        self._warned: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def start(self, run: RunInfo, *, step: int) -> None:
        """Start each tracker, and drop those that fail."""
        for tracker in tuple(self._live):
            self._live.remove(tracker)
            with self._guarded(tracker, "start"):
                tracker.start(run, step=step)
                self._live.append(tracker)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Pass the record to each tracker."""
        for tracker in self._live:
            try:
                tracker.log(metrics, step=step, epoch=epoch)
            except Exception as error:
                # Not around the call: a context manager takes a sixth of the time of a record.
                with self._guarded(tracker, "log"):
                    raise error

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Pass the images to each tracker."""
        for tracker in self._live:
            with self._guarded(tracker, "log_images"):
                tracker.log_images(images, step=step)

    def log_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Pass the texts to each tracker."""
        for tracker in self._live:
            with self._guarded(tracker, "log_text"):
                tracker.log_text(texts, step=step)

    def log_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Pass the histograms to each tracker."""
        for tracker in self._live:
            with self._guarded(tracker, "log_histograms"):
                tracker.log_histograms(histograms, step=step)

    def rewind(self, step: int) -> None:
        """Rewind each tracker."""
        for tracker in self._live:
            with self._guarded(tracker, "rewind"):
                tracker.rewind(step)

    def finish(self, status: str) -> None:
        """Finish each tracker."""
        for tracker in self._live:
            with self._guarded(tracker, "finish"):
                tracker.finish(status)

    def state_dict(self) -> dict[str, Any]:
        """Return the non-empty states, keyed by class and index as in "JsonlTracker/0"."""
        states: dict[str, Any] = {}
        for key, tracker in self._by_key.items():
            with self._guarded(tracker, "state_dict"):
                if state := tracker.state_dict():
                    states[key] = state
        return states

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore each tracker; trackers added or removed since the checkpoint are ignored."""
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
                    f"{type(tracker).__qualname__}.{what} failed; training continues without it: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=4,
                )
