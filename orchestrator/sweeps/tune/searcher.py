"""Suggestions by a `Searcher` of Ray Tune, whose state survives the driver of the sweep."""

from __future__ import annotations

import base64
import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ray import tune
from ray.tune.search import ConcurrencyLimiter, Searcher

from headway.trainer.errors import ConfigError

from ...storage.folder import Folder
from ..optuna_search import PastTrial
from ..record import SEARCHER_STATE
from ..sampling import Params
from ..search import Search
from ..space import Axis, Choice, Normal, RandInt

# Refusals in a row while no trial trains, after which there is nothing to wait for. Some searchers refuse duplicates or
# wait for the result of a trial that has failed.
_MOST_REFUSALS = 100


class TuneSearcher:
    """Asks a copy of a searcher for values, and gives it the results of the trials.

    Before a suggestion is used, the state of the searcher is saved in the folder of the sweep, by its own `save`. A
    searcher that cannot save learns of the earlier trials by `add_evaluated_point`, else not at all.

    Args:
        search: the search; its algorithm is a `Searcher`.
        folder: folder of the sweep.
        warm: trials of other sweeps to learn from.

    Attributes:
        note: what the searcher cannot learn, and what a restart of the driver would lose, as lines to print; None if
            nothing.
        exhausted: why there are no more suggestions; None while there may be.

    Raises:
        ConfigError: the searcher has a space of its own, cannot search this one, or cannot learn from other sweeps.
    """

    def __init__(self, search: Search, folder: Folder, warm: Sequence[PastTrial] = ()) -> None:
        self._search, self._folder = search, folder
        self._axes = {path: axis for path, axis in search.space.items() if isinstance(axis, Axis)}
        self._searcher, self._max_concurrent = _without_limiter(copy.deepcopy(search.algorithm))
        self._kind = type(self._searcher).__name__
        self._set_space()
        # Ids in the searcher by the index of the trial. Ids of suggestions that were lost with a driver are not reused.
        self._ids: dict[int, str] = {}
        self._num_asked = self._num_refusals = 0
        self.exhausted: str | None = None
        self._told: set[int] = set()
        self._can_save = self._state() is not None
        if not (self._can_save and self._restore()):
            self._warm_up(warm)
        self.note = "\n".join(filter(None, (self._describe_loss(), self._describe_points()))) or None

    def suggest(self, index: int, tried: Sequence[PastTrial]) -> Params | Literal["wait", "finished"]:
        """Return the values of a trial, "wait" to be asked again later, or "finished" if there are no more.

        Args:
            index: index of the trial, from 0.
            tried: the earlier trials in their current state.
        """
        for lost in [each for each in self._ids if each >= index]:
            # Suggested by a driver that was killed before it could record the trial.
            self._searcher.on_trial_complete(self._ids.pop(lost), error=True)
        for place, each in enumerate(tried):
            if each.state != "training" and place not in self._told:
                self._tell(place, each)
                self._told.add(place)
        if sum(each.state == "training" for each in tried) >= self._max_concurrent:
            return "wait"
        trial_id = f"{index}-{self._num_asked}"
        suggested = self._searcher.suggest(trial_id)
        if suggested is None and any(each.state == "training" for each in tried):
            return "wait"
        self._num_refusals = 0 if suggested is not None else self._num_refusals + 1
        if suggested == Searcher.FINISHED or self._num_refusals > _MOST_REFUSALS:
            self.exhausted = f"{self._kind} suggests no more trials"
            return "finished"
        if suggested is None:
            return "wait"
        self._num_asked += 1
        self._ids[index] = trial_id
        self._save()
        return {**self._search.fixed, **{path: self._decode(path, value) for path, value in suggested.items()}}

    def forward(self, event: str, index: int, *args: Any) -> None:
        """Forward "on_trial_result", "on_pause" or "on_unpause" of a trial. Only `TuneBOHB` has the last two."""
        method = getattr(self._searcher, event, None)
        if method is not None and index in self._ids and index not in self._told:
            method(self._ids[index], *args)

    def _set_space(self) -> None:
        if (optuna := sys.modules.get("optuna")) is not None:
            # As for "tpe": otherwise it prints a line for each study and each result.
            optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = {path: _to_tune(axis) for path, axis in self._axes.items()}
        try:
            accepted = self._searcher.set_search_properties(self._search.metric, self._search.mode, space)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._kind} cannot search this space: {error}") from error
        if not accepted and type(self._searcher).set_search_properties is not Searcher.set_search_properties:
            raise ConfigError(
                f"{self._kind} already has a space, metric or mode: create it without, because it gets those of the "
                "Search"
            )

    def _tell(self, place: int, tried: PastTrial) -> None:
        """Give the searcher the outcome of a trial: None as its value if it was pruned without any, or failed."""
        search = self._search
        failed = tried.state == "failed" or tried.metric is None
        if (trial_id := self._ids.get(place)) is not None:
            result = None if failed else {search.metric: tried.metric, "training_iteration": max(tried.steps, 1)}
            self._searcher.on_trial_complete(trial_id, result, error=failed)
            return
        with suppress(NotImplementedError):
            self._add(tried)

    def _add(self, tried: PastTrial) -> None:
        """Give the searcher a result that it has not suggested itself."""
        if tried.metric is not None and tried.state != "failed" and all(path in tried.values for path in self._axes):
            values = {path: axis.encode(tried.values[path]) for path, axis in self._axes.items()}
            self._searcher.add_evaluated_point(values, tried.metric)

    def _warm_up(self, warm: Sequence[PastTrial]) -> None:
        try:
            for each in warm:
                self._add(each)
        except NotImplementedError as error:
            raise ConfigError(
                f"warm_start cannot be used with {self._kind}, which has no add_evaluated_point"
            ) from error

    def _decode(self, path: str, value: Any) -> Any:
        if path not in self._axes:
            raise ConfigError(f"{self._kind} suggested {path}={value!r}, which is not in the space")
        return self._axes[path].decode(value)

    @property
    def _can_learn(self) -> bool:
        """Whether the searcher accepts results that it has not suggested."""
        return type(self._searcher).add_evaluated_point is not Searcher.add_evaluated_point

    def _describe_points(self) -> str | None:
        if self._can_learn or not self._search.points:
            return None
        return (
            f"{self._kind} has no add_evaluated_point: points are trained, but it does not learn their results, as "
            "OptunaSearch or algorithm='tpe' would"
        )

    def _describe_loss(self) -> str | None:
        if self._can_save:
            return None
        if self._can_learn:
            return f"{self._kind} cannot save its state: if the driver is killed, it will learn all results again"
        return (
            f"{self._kind} can neither save its state nor learn earlier results: if the driver is killed, no trial is "
            "lost, but later suggestions will ignore the earlier trials"
        )

    def _state(self) -> bytes | None:
        """Return the state of the searcher; None if it cannot save it."""
        with tempfile.TemporaryDirectory(prefix="headway-searcher-") as folder:
            try:
                self._searcher.save(f"{folder}/state")
                return Path(folder, "state").read_bytes()
            except (NotImplementedError, AttributeError, TypeError, OSError):
                return None

    def _save(self) -> None:
        state = self._state() if self._can_save else None
        if state is not None:
            plain = {"asked": self._num_asked, "ids": list(self._ids.items()), "told": sorted(self._told)}
            self._folder.write(
                SEARCHER_STATE, json.dumps({**plain, "state": base64.b64encode(state).decode()}), durable=True
            )

    def _restore(self) -> bool:
        """Restore the state of an earlier driver; return False if there is none."""
        text = self._folder.read(SEARCHER_STATE)
        if text is None:
            return False
        plain = json.loads(text)
        with tempfile.TemporaryDirectory(prefix="headway-searcher-") as folder:
            Path(folder, "state").write_bytes(base64.b64decode(plain["state"]))
            self._searcher.restore(f"{folder}/state")
        self._num_asked, self._ids, self._told = plain["asked"], dict(plain["ids"]), set(plain["told"])
        return True


def _without_limiter(searcher: Searcher) -> tuple[Searcher, int]:
    """Return the searcher inside of a `ConcurrencyLimiter`, whose own state would be lost, and its limit."""
    if not isinstance(searcher, ConcurrencyLimiter):
        return searcher, sys.maxsize
    if searcher.batch:
        raise ConfigError("ConcurrencyLimiter(batch=True) is not supported: leave batch out")
    inner, limit = _without_limiter(searcher.searcher)
    return inner, min(limit, searcher.max_concurrent)


def _to_tune(axis: Any) -> Any:
    """Return the domain of an axis, without its step."""
    if isinstance(axis, Choice):
        return tune.choice(list(range(len(axis.values))))
    if isinstance(axis, Normal):
        return tune.randn(axis.mean, axis.std)
    if isinstance(axis, RandInt):
        # Ray Tune's upper limit is exclusive.
        return (tune.lograndint if axis.is_log else tune.randint)(axis.low, axis.high + 1)
    return (tune.loguniform if axis.is_log else tune.uniform)(axis.low, axis.high)
