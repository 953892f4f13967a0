"""Verify, before the first update, that a resumed run continues the run that saved the checkpoint.

The certificate is part of the manifest: the position in the data, the next rows, the names of optimizers and
schedulers, and digests of the training code. The manifest also has the config and the fingerprint of the data. Weights,
moments and random states are compared with what was read from the files of the checkpoint.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import MAY_CHANGE, TrainerConfig, as_plain
from ..data.protocols import BatchStream, Stateful, SupportsPeek
from ..distributed.dtensor import to_local
from ..distributed.world import World
from ..errors import ResumeError
from ..loop.progress import Progress
from .format.digests import digest_of, digests_by_key, tensor_digests
from .format.plain_values import encode_state, tensor_places
from .store import Checkpoint, CheckpointWarning, Loaded

# A resumed run does not use `init_from`.
_NOT_COMPARED = (*MAY_CHANGE, "init_from", "init_keys")
_NUM_ROWS = 32
_NUM_READABLE = 4
_MOST_LINES = 8


class ResumeCertificate:
    """Creates the certificates of a run's checkpoints, and compares a resumed run with its checkpoint's certificate.

    Args:
        code: digests of the methods that affect what is learned, by name.
        config: the trainer's config.
        world: the ranks that train.
        progress: the run's live progress.
        optimizers, schedulers: names.
        data: the training data, after `setup`.
        exact: facts besides config and code on which the bits depend in exact mode; empty in an ordinary run.
    """

    def __init__(
        self,
        *,
        code: Mapping[str, str],
        config: TrainerConfig,
        world: World,
        progress: Progress,
        optimizers: Collection[str],
        schedulers: Collection[str],
        data: BatchStream,
        exact: Mapping[str, str],
    ) -> None:
        self._exact = exact
        self._code, self._config, self._world, self._progress = code, config, world, progress
        self._optimizers, self._schedulers, self._data = sorted(optimizers), sorted(schedulers), data

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Record the position now; return a function that completes the certificate later."""
        place = _position(self._progress)

        def complete() -> dict[str, Any]:
            return {
                "position": place,
                "samples_per_step": self._samples_per_step(),
                "next_rows": self._next_rows(place),
                "optimizers": self._optimizers,
                "schedulers": self._schedulers,
                "code": self._code,
                **({"exact": self._exact_facts()} if self._exact else {}),
            }

        return complete

    def check_before_load(self, checkpoint: Checkpoint, components: Collection[str], *, accept_changes: bool) -> None:
        """Refuse a checkpoint of a different run, before anything is loaded; warn if the training code has changed.

        Every rank must call this.

        Raises:
            ResumeError: on every rank, if the config, the batch size, an optimizer or a scheduler has changed.
        """
        info: Mapping[str, Any] = checkpoint.meta["certificate"]
        changes: list[_Change] = []
        if not accept_changes:
            before, now = checkpoint.meta.get("config", {}), as_plain(self._config)
            changes += [_Change(f"config.{path}", *pair, _ACCEPT) for path, pair in _differences(before, now)]
            if self._exact and "exact" in info:
                changes += self._changed_exact_facts(info["exact"])
            changes += self._changed_update_size(checkpoint, info)
        for kind, live in (("optimizers", self._optimizers), ("schedulers", self._schedulers)):
            if kind in components and (lacking := sorted(set(info.get(kind, ())) - set(live))):
                changes.append(
                    _Change(
                        kind,
                        ", ".join(info[kind]),
                        ", ".join(live) or "none",
                        f"set self.{lacking[0]} in configure_optimizers() again, or remove {kind!r} from restore=",
                    )
                )
        self._raise_if_changed(checkpoint, changes)
        if (code := info.get("code")) and self._world.is_main and (edited := _edited(code, self._code)):
            warnings.warn(
                f"the code of {', '.join(edited)} has changed since {checkpoint.path} was saved: the run resumes "
                "with the new code, so its result may differ from that of an uninterrupted run",
                CheckpointWarning,
                stacklevel=5,
            )

    def check_after_load(
        self,
        checkpoint: Checkpoint,
        loaded: Loaded,
        parts: Mapping[str, Stateful],
        rank_parts: Mapping[str, Stateful],
        *,
        keeps_place: bool,
        accept_changes: bool,
    ) -> None:
        """Compare the state with the certificate, and with what was read.

        Every rank must call this, before any random number is drawn or any data is read.

        Args:
            checkpoint: the loaded checkpoint.
            loaded: what this rank has read from it.
            parts: the loaded parts that all ranks share.
            rank_parts: the loaded parts that belong to this rank.
            keeps_place: whether the data resumes at its saved position.
            accept_changes: whether the next rows may differ, as after a change of the config.

        Raises:
            ResumeError: on every rank, with all differences found on any rank.
        """
        info: Mapping[str, Any] = checkpoint.meta["certificate"]
        changes: list[_Change] = []
        if "progress" in parts:
            changes += self._changed_position(info, keeps_place=keeps_place, accept_changes=accept_changes)
        changes += _changed_tensors(loaded, parts)
        changes += self._changed_rank_state(loaded, rank_parts)
        self._raise_if_changed(checkpoint, changes)

    def _exact_facts(self) -> dict[str, Any]:
        """Return the facts that must not change in exact mode, besides those that no run may change."""
        return {
            "config.micro_batch_size": self._config.micro_batch_size,
            **self._exact,
        }

    def _changed_exact_facts(self, before: Mapping[str, Any]) -> Iterator[_Change]:
        for name, now in self._exact_facts().items():
            if before.get(name) != now:
                yield _Change(name, str(before.get(name)), str(now), _ACCEPT)

    def _raise_if_changed(self, checkpoint: Checkpoint, changes: list[_Change]) -> None:
        """Raise on every rank if one rank has found a change."""
        ranks = self._world.all_gather_object(changes)
        found = list(dict.fromkeys(change for each in ranks for change in each))
        if not found:
            return
        lines = [f"  {each.what}: {each.before} -> {each.now}" for each in found[:_MOST_LINES]]
        if len(found) > _MOST_LINES:
            lines.append(f"  and {len(found) - _MOST_LINES} more")
        raise ResumeError(
            f"this run differs from the one that saved {checkpoint.path} (saved -> now):\n"
            + "\n".join(lines)
            + "\nTo resume: "
            + "; ".join(dict.fromkeys(each.remedy for each in found))
        )

    def _changed_update_size(self, checkpoint: Checkpoint, info: Mapping[str, Any]) -> Iterator[_Change]:
        """Compare the samples per update, or the batches per update if the data does not know its samples."""
        config, ranks, ranks_now = self._config, checkpoint.world_size, self._world.size
        before, now = info.get("samples_per_step"), self._samples_per_step()
        what, keep = "samples", f"global_batch_size={before}"
        if before is None or now is None:
            before = ranks * checkpoint.meta.get("config", {}).get("gradient_accumulation_steps", 1)
            now = ranks_now * config.gradient_accumulation_steps
            what = "batches"
            keep = "" if before % ranks_now else f"gradient_accumulation_steps={before // ranks_now}"
        if before == now:
            return
        if ranks == ranks_now:
            yield _Change(f"{what} of an update", str(before), str(now), _ACCEPT)
        else:
            remedy = f"{_ACCEPT}, with {keep} to keep the size of an update" if keep else _ACCEPT
            yield _Change(
                f"{what} of an update", f"{before} on {_ranks(ranks)}", f"{now} on {_ranks(ranks_now)}", remedy
            )

    def _changed_position(
        self, info: Mapping[str, Any], *, keeps_place: bool, accept_changes: bool
    ) -> Iterator[_Change]:
        wanted, now = dict(info["position"]), _position(self._progress)
        if not keeps_place:
            wanted |= {"step_in_epoch": 0, "offset": 0}
        for name, before in wanted.items():
            if before != now[name]:
                yield _Change(f"progress.{name}", str(before), str(now[name]), _ANOTHER)
        before_rows, rows = info["next_rows"], self._next_rows(now)
        if keeps_place and not accept_changes and before_rows and rows and before_rows != rows:
            first = [", ".join(map(str, each["first"])) for each in (before_rows, rows)]
            yield _Change(
                "next rows",
                f"{first[0]}, ... ({before_rows['digest']})",
                f"{first[1]}, ... ({rows['digest']})",
                f"check why the order of the data has changed, or {_ACCEPT}",
            )

    def _changed_rank_state(self, loaded: Loaded, rank_parts: Mapping[str, Stateful]) -> Iterator[_Change]:
        for part, saved in loaded.rank_parts.items():
            encoded, tensors = encode_state(part, rank_parts[part].state_dict())
            now = digests_by_key(encoded, tensors.__getitem__)
            # Only keys on both sides: a GPU adds a generator.
            for key in saved.keys() & now.keys():
                if now[key] != saved[key]:
                    remedy = (
                        'remove "rng" from restore= to start with fresh random numbers' if part == "rng" else _ANOTHER
                    )
                    yield _Change(f"{part}.{key} of rank {self._world.rank}", saved[key], now[key], remedy)

    def _samples_per_step(self) -> int | None:
        return self._data.samples_per_step if isinstance(self._data, SupportsPeek) else None

    def _next_rows(self, place: Mapping[str, int]) -> dict[str, Any] | None:
        """Return the first ids and a digest of the next rows over all ranks; None if the data does not know."""
        if not isinstance(self._data, SupportsPeek):
            return None
        rows = list(self._data.next_rows(place["epoch"], offset=place["offset"], count=_NUM_ROWS))
        return {"first": rows[:_NUM_READABLE], "digest": digest_of(rows)}


def _changed_tensors(loaded: Loaded, parts: Mapping[str, Stateful]) -> Iterator[_Change]:
    for part, owner in parts.items():
        if part.split("/")[0] not in ("models", "optimizers"):
            continue
        encoded, tensors = encode_state(part, owner.state_dict())
        by_name = tensor_digests({name: to_local(each) for name, each in tensors.items()})
        digests = {place: by_name[name] for place, name in tensor_places(encoded, part)}
        saved = {place: each for place, each in loaded.tensors.items() if place.startswith(f"{part}/")}
        for place in sorted(digests.keys() | saved.keys()):
            before, now = saved.get(place, "absent"), digests.get(place, "absent")
            # A dtype differs only after a change of the config, which has been accepted by now.
            if before != now and (before.split()[0] == now.split()[0] or "absent" in (before, now)):
                yield _Change(place, before, now, _ANOTHER)


_ACCEPT = "revert the change, or accept it if it is intended: fit(accept_changes=True), --accept-changes"
_ANOTHER = "this cannot be overridden: resume from another checkpoint, or start a new run with init_from"


@dataclass(frozen=True, slots=True)
class _Change:
    """A difference between the saved and the resumed run, and its remedy."""

    what: str
    before: str
    now: str
    remedy: str


def _ranks(number: int) -> str:
    return f"{number} rank{'s'[: number > 1]}"


def _edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    if not now:
        return []
    return [f"{name}()" for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]


def _position(progress: Progress) -> dict[str, int]:
    names = ("step", "epoch", "step_in_epoch", "offset")
    return {name: getattr(progress, name) for name in names}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each field that differs and that both configs have; other versions may have more or fewer fields."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in before:
            if key in now and (path or key not in _NOT_COMPARED):
                yield from _differences(before[key], now[key], f"{path}.{key}" if path else key)
    elif (texts := (_text(before), _text(now)))[0] != texts[1]:
        yield path, texts


def _text(value: Any) -> str:
    # The repr of a function contains its address, which differs in every process.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
