"""The random number generators of Python, NumPy and torch: seeded per rank, saved and restored exactly."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from .manifest import CheckpointWarning


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
    """Seed the same generators for one purpose, independent of the rank; for exact mode.

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


class RngState:
    """The state of all generators of this rank, as a part of a checkpoint. For CUDA, that of the current device."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of Python, NumPy, torch and, if there is one, the CUDA device."""
        version, numbers, half_a_pair = random.getstate()
        kind, keys, position, has_gauss, gauss = np.random.get_state()
        state: dict[str, Any] = {
            # As bytes: lists of numbers pickle slowly, and arrays pickle with module paths that NumPy has moved.
            "python": (version, _as_bytes(numbers), half_a_pair),
            "numpy": (kind, np.asarray(keys, dtype="<u4").tobytes(), position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
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
        if torch.cuda.is_available():
            setters["cuda"] = lambda saved: torch.cuda.set_rng_state(saved.cpu())
        for name, setter in setters.items():
            if name in state:
                setter(state[name])
        if missing := [name for name in setters if name not in state]:
            what = f"the checkpoint has no random state of {', '.join(missing)}, which keeps its current one"
            warnings.warn(what, CheckpointWarning, stacklevel=2)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the generators of this process on exit."""
    generators = RngState()
    before = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(before)


def _as_bytes(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)  # twice as fast as through an array
