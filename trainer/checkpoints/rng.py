"""Every generator of random numbers that a training step may draw from: seeded per rank, saved and restored exactly."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from .manifest import CheckpointWarning


def seed_everything(seed: int, *, rank: int | Literal["common"], step: int = 0) -> None:
    """Seeds Python, NumPy and torch (on all devices of this process), each with its own numbers.

    Args:
        seed: from 0; nearby seeds give unrelated numbers.
        rank: whose stream. Each rank has one of its own for dropout and augmentation; the "common" one is the same on
            every rank, and no rank's own, for what all must agree on, such as initial weights.
        step: the update after which a rank joins a run; it gets other numbers than one that was there from the start.
    """
    # spawn_key is how NumPy derives streams that do not overlap: numpy.random.SeedSequence, "spawn".
    key = (0,) if rank == "common" else (1, rank, step) if step else (1, rank)
    _seed(np.random.SeedSequence(seed, spawn_key=key))


def seed_for(seed: int, *purpose: str | int) -> None:
    """Seeds the same generators for one purpose, such as ("part", step, tries, part): in exact mode, on any rank.

    Args:
        seed: of the run.
        purpose: what the numbers are for, a word and whole numbers from 0. Each gives a stream of its own.
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
    """Seeds torch's generators that are in use, of the CPU and of CUDA, in a hundredth of the time of its own function.

    `torch.manual_seed` writes down a traceback for each kind of device that is not in use, to seed it when it is.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


class RngState:
    """The state of all these generators on this rank, as a part of a checkpoint. Of CUDA, the current device's."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of Python's, NumPy's, torch's and, where there is one, the CUDA device's generator."""
        version, numbers, half_a_pair = random.getstate()
        kind, keys, position, has_gauss, gauss = np.random.get_state()
        state: dict[str, Any] = {
            # As bytes: plain numbers are pickled one by one, arrays by module paths that NumPy has moved.
            "python bytes": (version, _as_bytes(numbers), half_a_pair),
            "numpy bytes": (kind, np.asarray(keys, dtype="<u4").tobytes(), position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators. One whose state is missing keeps what it has, with a warning."""
        # An earlier version saved plain numbers, as "python" and "numpy".
        state = {name.removesuffix(" bytes"): saved for name, saved in state.items()}
        setters: dict[str, Callable[[Any], object]] = {
            "python": lambda saved: random.setstate((saved[0], tuple(_from(saved[1]).tolist()), *saved[2:])),
            "numpy": lambda saved: np.random.set_state((saved[0], _from(saved[1]), *saved[2:])),
            "torch": lambda saved: torch.set_rng_state(saved.cpu()),
        }
        if torch.cuda.is_available():
            setters["cuda"] = lambda saved: torch.cuda.set_rng_state(saved.cpu())
        for name, setter in setters.items():
            if name in state:
                setter(state[name])
        if missing := [name for name in setters if name not in state]:
            what = f"the checkpoint has no random state of {', '.join(missing)}, which will not go on where it was"
            warnings.warn(what, CheckpointWarning, stacklevel=2)


def _as_bytes(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)  # twice as fast as by way of an array


def _from(words: bytes | Sequence[int]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(words, "<u4") if isinstance(words, bytes) else np.array(words, dtype=np.uint32)
