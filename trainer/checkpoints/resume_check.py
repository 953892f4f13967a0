"""What a checkpoint says of the run that may go on from it, and the proof that a resumed run is that run.

The certificate is a part of the manifest: the place in the data and the rows that come next there, the names of
optimizers and schedulers, digests of all tensors and of each rank's random numbers, and of the code of the step. The
config and the fingerprint of the data stand beside it. What was loaded is compared with it before the first update.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..config import MAY_CHANGE
from ..data.protocols import BatchStream, Mergeable, Stateful, SupportsPeek
from ..errors import ResumeError
from ..exact.determinism import hardware_fingerprint
from ..loop.progress import Progress
from ..metrics.train_log import as_plain
from .state_codec import iter_tensors
from .store import Checkpoint, CheckpointStore, CheckpointWarning, Digests
from .tensor_checksums import TensorChecksum, compute_checksums, digest_of

if TYPE_CHECKING:
    from ..trainer import Trainer

# `init_from` is looked at where it is used: a run that goes on has no more use for it.
_NOT_COMPARED = (*MAY_CHANGE, "init_from", "init_keys")
_MEASURES = (
    "validation_step", "num_tokens", "flops_per_sample", "flops_per_token", "configure_metrics", "configure_trackers",
)  # fmt: skip
_NUM_ROWS = 32
_NUM_READABLE = 4
_MOST_LINES = 8


class ResumeCertificate:
    """Writes the certificate of a training's checkpoints, and holds a resumed run against that of the one it is from.

    Args:
        trainer: set up, but for its loop.
        data: its training data, open.
    """

    def __init__(self, trainer: Trainer[Any], data: BatchStream) -> None:
        self._trainer, self._data = trainer, data
        # Now, and once in a process of many trials: the file may be edited while the run goes on.
        self._code = _code_when_first_trained(type(trainer))  # type: ignore[arg-type]  # any class can be hashed

    def capture(self) -> Callable[[Digests], dict[str, Any]]:
        """Takes down the present place, and returns what completes the certificate once the state has been written."""
        trainer, place = self._trainer, _place(self._trainer.progress)

        def complete(digests: Digests) -> dict[str, Any]:
            return {
                "position": place,
                "samples_per_step": self._samples_per_step(),
                "next_rows": self._next_rows(place),
                "optimizers": sorted(trainer.optimizers),
                "schedulers": sorted(trainer.schedulers),
                "tensors": digests.tensors,
                "ranks": digests.ranks,
                "code": self._code,
                **({"exact": self._exactly()} if trainer.config.exact else {}),
            }

        return complete

    def check_before_load(self, checkpoint: Checkpoint, components: Collection[str], *, accept_changes: bool) -> None:
        """Refuses a checkpoint of another training, before anything is loaded. Warns of another code of the step.

        Raises:
            ResumeError: what was asked for has changed; the same on every rank.
        """
        info: Mapping[str, Any] = checkpoint.meta.get("certificate", {})
        trainer, changes = self._trainer, []
        if not accept_changes:
            before, now = checkpoint.meta.get("config", {}), as_plain(trainer.config)
            changes += [_Change(f"config.{path}", *pair, _ACCEPT) for path, pair in _differences(before, now)]
            if trainer.config.exact and "exact" in info:
                changes += self._other_bits(info["exact"])
            changes += self._other_size(checkpoint, info)
        for kind, live in (("optimizers", trainer.optimizers), ("schedulers", trainer.schedulers)):
            if kind in components and (lacking := sorted(set(info.get(kind, ())) - set(live))):
                changes.append(
                    _Change(
                        kind,
                        ", ".join(info[kind]),
                        ", ".join(sorted(live)) or "none",
                        f"set self.{lacking[0]} in configure_optimizers() again, or leave {kind!r} out of restore=",
                    )
                )
        self._refuse(checkpoint, changes)
        if (code := info.get("code")) and trainer.world.is_main and (edited := _edited(code, self._code)):
            warnings.warn(
                f"the code of {', '.join(edited)} is not what it was when {checkpoint.path} was saved: the run goes on "
                "with the new code, and is not the run that would have been",
                CheckpointWarning,
                stacklevel=5,
            )

    def check_after_load(
        self,
        checkpoint: Checkpoint,
        store: CheckpointStore,
        parts: Mapping[str, Stateful],
        rank_parts: Mapping[str, Stateful],
        *,
        keeps_place: bool,
        accept_changes: bool,
    ) -> None:
        """Compares what was loaded with the certificate. Every rank must call this, before anything is drawn or read.

        Args:
            checkpoint: that was loaded.
            store: that has loaded it.
            parts: those that were loaded of what the ranks share.
            rank_parts: and of what each keeps to itself.
            keeps_place: whether the data goes on where it stood.
            accept_changes: whether the rows that come next may be others, as of a config that has changed.

        Raises:
            ResumeError: on every rank, with what differs on any of them.
        """
        info: Mapping[str, Any] | None = checkpoint.meta.get("certificate")
        if info is None:  # saved by an earlier version
            return
        changes: list[_Change] = []
        if "progress" in parts:
            changes += self._other_place(info, keeps_place=keeps_place, accept_changes=accept_changes)
        changes += self._other_tensors(checkpoint, info, store, parts)
        changes += self._other_rank_state(info, rank_parts)
        self._refuse(checkpoint, changes)

    def _exactly(self) -> dict[str, Any]:
        """What the bits of a run in exact mode depend on besides all that no run may change."""
        return {
            "config.micro_batch_size": self._trainer.config.micro_batch_size,
            **hardware_fingerprint(self._trainer.device),
        }

    def _other_bits(self, before: Mapping[str, Any]) -> Iterator[_Change]:
        for name, now in self._exactly().items():
            if before.get(name) != now:
                yield _Change(name, str(before.get(name)), str(now), _ACCEPT)

    def _refuse(self, checkpoint: Checkpoint, changes: list[_Change]) -> None:
        """Raises on every rank if there is anything to say on one."""
        ranks = self._trainer.world.all_gather_object(changes)
        found = list(dict.fromkeys(change for each in ranks for change in each))
        if not found:
            return
        lines = [f"  {each.what}: {each.before} -> {each.now}" for each in found[:_MOST_LINES]]
        if len(found) > _MOST_LINES:
            lines.append(f"  and {len(found) - _MOST_LINES} more")
        raise ResumeError(
            f"this run is not the one that saved {checkpoint.path}; what differs, then -> now:\n"
            + "\n".join(lines)
            + "\nTo go on: "
            + "; ".join(dict.fromkeys(each.remedy for each in found))
        )

    def _other_size(self, checkpoint: Checkpoint, info: Mapping[str, Any]) -> Iterator[_Change]:
        """Finds out whether an update takes what it took, as far as the data tells: samples, or else its batches."""
        config, ranks, ranks_now = self._trainer.config, checkpoint.world_size, self._trainer.world.size
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
            remedy = f"{_ACCEPT}, with {keep} to have updates as large as before" if keep else _ACCEPT
            yield _Change(
                f"{what} of an update", f"{before} on {_ranks(ranks)}", f"{now} on {_ranks(ranks_now)}", remedy
            )

    def _other_place(self, info: Mapping[str, Any], *, keeps_place: bool, accept_changes: bool) -> Iterator[_Change]:
        wanted, now = dict(info["position"]), _place(self._trainer.progress)
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
                f"find out why the data comes in another order, or {_ACCEPT}",
            )

    def _other_tensors(
        self, checkpoint: Checkpoint, info: Mapping[str, Any], store: CheckpointStore, parts: Mapping[str, Stateful]
    ) -> list[_Change]:
        saved = store.tensor_checksums(checkpoint)
        if (digest := digest_of(saved)) != info["tensors"]:
            return [_Change("sums of all tensors", info["tensors"], digest, _ANOTHER)]
        certain = {name: part for name, part in parts.items() if name.split("/")[0] in ("models", "optimizers")}
        live = {
            "/".join((part, *path)): tensor
            for part, owner in certain.items()
            for path, tensor in iter_tensors(owner.state_dict())
        }
        # Of an earlier version, perhaps.
        of = TensorChecksum.kind_of(next(iter(saved.values()), ""))
        sums = {name: str(each) for name, each in compute_checksums(live, self._trainer.world, of=of).items()}
        changes = []
        for name in sorted(sums.keys() | saved.keys()):
            # Whatever a state holds inside objects has no name of its own: "part/#".
            if "#" in name or not any(name.startswith(f"{part}/") for part in certain):
                continue
            before, now = saved.get(name, "absent"), sums.get(name, "absent")
            # Another precision is a change of the config, and accepted by now.
            if before != now and (before.split()[0] == now.split()[0] or "absent" in (before, now)):
                changes.append(_Change(name, before, now, _ANOTHER))
        return changes

    def _other_rank_state(self, info: Mapping[str, Any], rank_parts: Mapping[str, Stateful]) -> Iterator[_Change]:
        rank = self._trainer.world.rank
        if rank >= len(info["ranks"]):
            return
        # Of ranks that are gone.
        has_more = rank + self._trainer.world.size < len(info["ranks"])
        for part, saved in info["ranks"][rank].items():
            if has_more and isinstance(rank_parts.get(part), Mergeable):
                continue
            state = rank_parts[part].state_dict() if part in rank_parts else {}
            # Only what there is on both sides: a GPU has a generator of its own.
            for key in saved.keys() & state.keys():
                if (now := digest_of(state[key])) != saved[key]:
                    remedy = 'leave "rng" out of restore=, for fresh random numbers' if part == "rng" else _ANOTHER
                    yield _Change(f"{part}.{key} of rank {rank}", saved[key], now, remedy)

    def _samples_per_step(self) -> int | None:
        return self._data.samples_per_step if isinstance(self._data, SupportsPeek) else None

    def _next_rows(self, place: Mapping[str, int]) -> dict[str, Any] | None:
        """The rows that come next over all ranks, in short; None where the data does not know."""
        if not isinstance(self._data, SupportsPeek):
            return None
        rows = list(self._data.next_rows(place["epoch"], offset=place["offset"], count=_NUM_ROWS))
        return {"first": rows[:_NUM_READABLE], "digest": digest_of(rows)}


_ACCEPT = "take the change back, or accept it if it is meant: fit(accept_changes=True), --accept-changes"
_ANOTHER = "no option explains this away: resume from another checkpoint, or begin a new run with init_from"


@dataclass(frozen=True, slots=True)
class _Change:
    """Something that is not what it was, and what a person can do about it."""

    what: str
    before: str
    now: str
    remedy: str


def code_of(trainer: type) -> dict[str, str]:
    """Returns a digest of the source of each method that has a say in what is learned, by name; comments do not count.

    Those are the methods that are not Headway's own, but for hooks and what only measures. One without source, as of a
    class made in an interpreter, is left out. What the methods call outside the class is not looked at.
    """
    code: dict[str, str] = {}
    for cls in trainer.__mro__:
        if cls.__module__ in ("builtins", "typing") or cls.__module__.startswith("headway.trainer."):
            continue
        for name, member in vars(cls).items():
            method: Any = getattr(member, "__func__", member)
            if name in code or not inspect.isfunction(method) or name in _MEASURES or name.startswith(("on_", "__")):
                continue
            with contextlib.suppress(OSError, TypeError, SyntaxError):
                tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
                code[name] = hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
    return code


@cache
def _code_when_first_trained(trainer: type) -> dict[str, str]:
    return code_of(trainer)


def _ranks(number: int) -> str:
    return f"{number} rank{'s'[: number > 1]}"


def _edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    if not now:
        return []
    return [f"{name}()" for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]


def _place(progress: Progress) -> dict[str, int]:
    names = ("step", "epoch", "step_in_epoch", "offset")
    return {name: getattr(progress, name) for name in names}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields each field that both configs have, with different values: another version may have more or fewer."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in before:
            if key in now and (path or key not in _NOT_COMPARED):
                yield from _differences(before[key], now[key], f"{path}.{key}" if path else key)
    elif (texts := (_text(before), _text(now)))[0] != texts[1]:
        yield path, texts


def _text(value: Any) -> str:
    # What a config writes for a function names its place in memory, another in every process.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
