"""The random number generators of Python, NumPy and torch: seeded per rank, saved and restored exactly."""

from __future__ import annotations

import random
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from .format.manifest import CheckpointWarning

_SHARE, _NUM_FIRST = 0.002, 50


def seed_everything(seed: int, *, rank: int | Literal["common"], step: int = 0) -> None:
    """Seed Python, NumPy and torch (all devices of this process), each with a different seed.

    Args:
        seed: an integer >= 0; nearby seeds give unrelated numbers.
        rank: the rank, for dropout and augmentation; or "common" for a stream that is equal on every rank, such as for
            initial weights.
        step: the update after which a rank joins a run; its numbers differ from those of the rank at the start.
    """
    # NumPy derives independent streams by spawn_key; see numpy.random.SeedSequence.spawn.
    key = (0,) if rank == "common" else (1, rank, step) if step else (1, rank)
    _seed(np.random.SeedSequence(seed, spawn_key=key))


def seed_for(seed: int, *purpose: str | int) -> None:
    """Seed the same generators for one purpose, independent of the rank.

    Args:
        seed: the run's seed.
        purpose: a word and integers >= 0, such as ("part", step, tries, part). Each purpose has a separate stream.
    """
    key = [int.from_bytes(each.encode(), "big") if isinstance(each, str) else each for each in purpose]
    _seed(np.random.SeedSequence(seed, spawn_key=(2, *key)))


def _seed(stream: np.random.SeedSequence) -> None:
    words = stream.generate_state(8, np.uint64)
    random.seed(b"".join(int(word).to_bytes(8, "little") for word in words[:2]))
    np.random.seed(words[2:6].view(np.uint32))
    if torch.accelerator.is_available():
        torch.manual_seed(int(words[6]))
    else:
        seed_torch(int(words[6]))


def seed_torch(seed: int) -> None:
    """Seed torch's CPU generator and initialized CUDA generators, 100 times faster than `torch.manual_seed`.

    `torch.manual_seed` also records a traceback for each device type that is not initialized yet, to seed it later.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _accelerator() -> tuple[str, Any] | None:
    """Return the type and torch's module of the devices whose generators are saved, such as CUDA's; None: CPU only."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "mps" else (found.type, torch.get_device_module(found.type))


class RngState:
    """The state of all generators of this rank, as a part of a checkpoint. For accelerators, of the current device."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of Python, NumPy, torch and, if there is one, the accelerator."""
        version, numbers, half_a_pair = random.getstate()
        kind, keys, position, has_gauss, gauss = np.random.get_state()
        state: dict[str, Any] = {
            # As bytes, which are saved as a tensor; a list of numbers is slow.
            "python": (version, _as_bytes(numbers), half_a_pair),
            "numpy": (kind, np.asarray(keys, dtype="<u4").tobytes(), position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
        }
        if (accelerator := _accelerator()) is not None:
            device_type, module = accelerator
            state[device_type] = module.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators. A generator without a saved state keeps its current one, with a warning."""
        setters: dict[str, Callable[[Any], object]] = {
            "python": lambda saved: random.setstate(
                (saved[0], struct.unpack(f"<{len(saved[1]) // 4}I", saved[1]), *saved[2:])
            ),
            "numpy": lambda saved: np.random.set_state((saved[0], np.frombuffer(saved[1], "<u4"), *saved[2:])),
            "torch": lambda saved: torch.set_rng_state(saved.cpu()),
        }
        if (accelerator := _accelerator()) is not None:
            device_type, module = accelerator
            setters[device_type] = lambda saved: module.set_rng_state(saved.cpu())
        for name, setter in setters.items():
            if name in state:
                setter(state[name])
        if missing := [name for name in setters if name not in state]:
            what = f"the checkpoint has no random state of {', '.join(missing)}, which keeps its current one"
            warnings.warn(what, CheckpointWarning, stacklevel=2)


class GeneratorsBefore:
    """The states of all generators at one moment, which is taken often; a `RngState` that cannot be restored later.

    Copying the states of Python and NumPy takes some 30 microseconds. If they have not changed at first, they are
    copied in at most 0.2 % of the time: if they are equal to the last copy later, they have not been used since.
    """

    def __init__(self) -> None:
        self._copied: dict[str, Any] | None = None
        self._is_whole = self._may_change = self._are_used = False
        self._cpu_state: torch.Tensor | None = None
        self._device_state: dict[str, torch.Tensor] = {}
        self._num_copies = 0
        self._began_s, self._spent_s = time.perf_counter(), 0.0

    def capture(self, now_s: float, *, may_change: bool) -> None:
        """Take the states of now, `time.perf_counter`. With `may_change=False` they remain until they are asked for."""
        self._may_change = may_change
        if not may_change:
            return
        has_time = self._spent_s <= _SHARE * (now_s - self._began_s)
        self._is_whole = self._are_used or has_time or self._num_copies < _NUM_FIRST
        if self._is_whole:
            before, self._copied = self._copied, RngState().state_dict()
            self._are_used = self._are_used or (before is not None and not _have_equal_slow(before, self._copied))
            self._num_copies += 1
            self._spent_s += time.perf_counter() - now_s
        else:
            self._cpu_state = torch.default_generator.get_state()
            if (accelerator := _accelerator()) is not None:
                device_type, module = accelerator
                self._device_state = {device_type: module.get_rng_state()}

    @property
    def are_known(self) -> bool:
        """Whether the states of the last `capture` are known; False in rare cases."""
        if not self._may_change or self._is_whole:
            return True
        return self._copied is not None and _have_equal_slow(self._copied, RngState().state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the last `capture`, which must be known."""
        if not self._may_change or self._copied is None:
            return RngState().state_dict()
        if self._is_whole:
            return self._copied
        return {**self._copied, "torch": self._cpu_state, **self._device_state}

    def restore(self) -> None:
        """Set the generators to the states of the last `capture`, which must be known."""
        RngState().load_state_dict(self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load states into the generators."""
        RngState().load_state_dict(state_dict)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the generators of this process on exit."""
    generators = RngState()
    before = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(before)


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states of a `RngState` are equal."""
    others = one.keys() - {"python", "numpy"}
    return _have_equal_slow(one, other) and all(torch.equal(one[name], other[name]) for name in others)


def _have_equal_slow(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("python", "numpy"))


def _as_bytes(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)  # twice as fast as through an array
