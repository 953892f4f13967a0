"""Schedules of faults for runs on Ray, generated from a seed: workers, machines and drivers die."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from tests.chaos.schedule import Damage, Wound

ROWS, BATCH, EPOCHS = 200, 16, 3
STEPS = EPOCHS * 13

RayBlow = Literal[
    "kill a worker",
    "freeze a worker",
    "kill a raylet",
    "kill the driver",
    "terminate the driver",
    "interrupt the driver",
]


@dataclass(frozen=True)
class RayFault:
    """A fault of a process of the cluster, injected once the run has logged a step.

    Attributes:
        step: the step; 0 for the start of the workers.
        whom: index of the worker or node, modulo their number.
    """

    blow: RayBlow
    step: int
    delay_s: float
    whom: int

    def __str__(self) -> str:
        whom = f" ({self.whom})" if "driver" not in self.blow else ""
        return f"{self.blow}{whom} {1000 * self.delay_s:.0f} ms after step {self.step}"


@dataclass(frozen=True)
class RayLife:
    """One start of `headway fit`, until its end."""

    workers: int
    faults: tuple[RayFault, ...] = ()
    damages: tuple[Damage, ...] = ()

    def __str__(self) -> str:
        what = "; ".join(map(str, (*self.faults, *self.damages))) or "nothing"
        return f"{self.workers} workers: {what}"


@dataclass(frozen=True)
class RaySchedule:
    """Repeated starts of `headway fit` on a cluster of several nodes, until it completes."""

    seed: int
    every: int
    strategy: Literal["ddp", "fsdp"]
    lives: tuple[RayLife, ...]

    @property
    def resizes(self) -> bool:
        """Whether the number of workers of any life differs from the undisturbed run."""
        return any(life.workers != 2 for life in self.lives)

    def __str__(self) -> str:
        lives = [f"  start {number}: {life}" for number, life in enumerate(self.lives, 1)]
        return "\n".join([f"seed {self.seed} on Ray: {self.strategy}, a save every {self.every} steps", *lives])


def ray_schedule(seed: int) -> RaySchedule:
    """Return the schedule of a seed; deterministic."""
    chance = random.Random(f"chaos on Ray {seed}")
    resizes = chance.random() < 0.3
    lives, first = [], 0
    for _ in range(chance.choice((1, 2))):
        # The first fault is one that the driver recovers from by itself.
        within: tuple[RayBlow, ...] = ("kill a worker", "kill a worker", "kill a raylet", "freeze a worker")
        at_its_end: tuple[RayBlow, ...] = ("kill the driver", "terminate the driver", "interrupt the driver")
        steps = sorted(chance.sample(range(first, first + 12), 2))
        faults = [
            RayFault(chance.choice(blows), step, chance.choice((0.01, 0.3)) * chance.random(), chance.randrange(2))
            for blows, step in zip((within, at_its_end), steps, strict=True)
        ]
        first += 12
        wounds: tuple[Wound, ...] = ("flip a bit", "truncate", "delete")
        damage = Damage(chance.choice(wounds), chance.random(), chance.random(), chance.randrange(8))
        damages = (damage,) if chance.random() < 0.4 else ()
        lives.append(RayLife(chance.choice((1, 2)) if resizes else 2, tuple(faults), damages))
    last = RayLife(chance.choice((1, 2)) if resizes else 2)
    return RaySchedule(seed, chance.choice((2, 3, 5)), chance.choice(("ddp", "ddp", "fsdp")), (*lives, last))
