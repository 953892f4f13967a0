"""Schedules of faults, generated from a seed by arithmetic alone: no clock, no process, no file.

A schedule is a training and a list of lives. In each life the run is started on some number of ranks, and at most two
faults are injected; after its end its files may be damaged, and it is started again. The last life is undisturbed and
completes the run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

STEPS_PER_EPOCH = 12

Strategy = Literal["none", "ddp", "fsdp"]
Data = Literal["loader", "parquet"]
Storage = Literal["disk", "slow", "failing"]
Moment = Literal["start", "fit", "step", "save", "evaluation", "saved"]
Blow = Literal["kill", "terminate", "interrupt", "freeze", "fill the disk"]
Wound = Literal["flip a bit", "truncate", "delete", "overwrite", "append"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of the training. Two trainings that differ only in how they save have equal results.

    Attributes:
        ranks: number of ranks of the undisturbed run, and of all lives unless the schedule resizes.
        every: steps between two saves.
        storage: "slow" and "failing" are URIs; some calls of the latter fail.
        exact: gives the same bits on every number of ranks.
        forgets: a part that resume leaves out; used only to test that this suite notices.
    """

    data: Data = "loader"
    strategy: Strategy = "ddp"
    ranks: int = 2
    epochs: int = 2
    micro_batch_size: int | None = None
    log_every: int = 4
    evaluate_every: int | None = 5
    averages: bool = False
    every: int = 3
    background: bool = True
    keep_last: int = 2
    save_best: bool = False
    storage: Storage = "disk"
    exact: bool = False
    forgets: Literal["", "rng", "data"] = ""

    @property
    def undisturbed(self) -> Training:
        """The training with the same result that is not interrupted, and saves only at its end."""
        return replace(self, every=10**6, background=False, keep_last=2, save_best=False, storage="disk", forgets="")

    @property
    def steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH

    def __str__(self) -> str:
        parts = [
            f"{self.strategy} on {self.ranks}",
            f"{self.epochs} epochs of a {self.data}",
            f"a save every {self.every} steps{' in the background' * self.background}",
            f"keeping {self.keep_last}{' and the best at once' * self.save_best}",
        ]
        parts += [f"micro-batches of {self.micro_batch_size}"] if self.micro_batch_size else []
        parts += [f"evaluated every {self.evaluate_every}"] if self.evaluate_every else []
        parts += (
            ["exact"] * self.exact
            + ["averages"] * self.averages
            + [f"{self.storage} storage"] * (self.storage != "disk")
        )
        return ", ".join(parts)


@dataclass(frozen=True)
class Fault:
    """A fault injected into processes from outside.

    Attributes:
        blow: SIGKILL, SIGTERM, SIGINT, SIGSTOP, or a limit on the size of files that makes writes fail.
        whom: a rank, modulo the number of ranks; None for all, as if the machine or the driver dies.
        moment: the phase that the run reports to start; "save" is the update after which one is due.
        count: at which occurrence of the moment.
        delay_s: delay from then on.
        then_s: seconds until frozen processes continue or the disk has room again; None for never, and frozen ones are
            killed in the end. For SIGTERM and SIGINT: seconds until SIGKILL follows; None for never.
    """

    blow: Blow
    whom: int | None
    moment: Moment
    count: int
    delay_s: float
    then_s: float | None

    def __str__(self) -> str:
        whom = "all ranks" if self.whom is None else f"rank {self.whom}"
        after = {
            "freeze": "until it is given up" if self.then_s is None else f"for {1000 * (self.then_s or 0):.0f} ms",
            "fill the disk": "for good" if self.then_s is None else f"for {1000 * (self.then_s or 0):.0f} ms",
        }.get(self.blow, "" if self.then_s is None else f"and kill {1000 * (self.then_s or 0):.0f} ms later")
        return f"{self.blow} {whom} {1000 * self.delay_s:.0f} ms after {self.moment} {self.count} {after}".strip()


@dataclass(frozen=True)
class Damage:
    """Damage to the newest checkpoint while no process runs.

    Attributes:
        file: relative position in the sorted list of files, in [0, 1).
        place: relative position in the file, in [0, 1).
        bit: the bit to flip.
    """

    wound: Wound
    file: float
    place: float
    bit: int

    def __str__(self) -> str:
        return f"then {self.wound} in the newest checkpoint"


@dataclass(frozen=True)
class Life:
    """One start of the run, until its end.

    Attributes:
        grace_s: how long the remaining ranks may run after one has died.
    """

    ranks: int
    faults: tuple[Fault, ...] = ()
    damages: tuple[Damage, ...] = ()
    grace_s: float = 0.3

    def __str__(self) -> str:
        what = "; ".join(map(str, (*self.faults, *self.damages))) or "nothing"
        return f"{self.ranks} ranks: {what}"


@dataclass(frozen=True)
class Schedule:
    """A training and its lives. The last life is undisturbed."""

    seed: int
    training: Training
    lives: tuple[Life, ...]

    @property
    def keeps_bits(self) -> bool:
        """Whether the result must be bit-equal to the undisturbed run: equal ranks in every life, or exact mode."""
        return self.training.exact or all(life.ranks == self.training.ranks for life in self.lives)

    def __str__(self) -> str:
        lives = [f"  life {number}: {life}" for number, life in enumerate(self.lives, 1)]
        return "\n".join([f"seed {self.seed}: {self.training}", *lives])


def schedule(seed: int) -> Schedule:
    """Return the schedule of a seed; deterministic."""
    chance = random.Random(f"chaos {seed}")
    training = _training(chance)
    resizes = training.ranks > 1 and chance.random() < 0.25
    if resizes and training.strategy == "ddp":
        # Exact mode needs several micro-batches: four in a batch of eight.
        training = replace(training, exact=True, micro_batch_size=2)
    lives = [_life(chance, training, resizes) for _ in range(chance.choice((1, 2, 2, 3, 3, 4)))]
    last = Life(chance.choice((1, 2, 3)) if resizes else training.ranks)
    return Schedule(seed, training, (*lives, last))


def _training(chance: random.Random) -> Training:
    # Few undisturbed runs for many schedules: settings that change the result are varied together.
    strategies: tuple[Strategy, ...] = ("none", "ddp", "ddp", "fsdp", "fsdp")
    strategy, averages = chance.choice(strategies), chance.random() < 0.3
    return Training(
        data=chance.choice(("loader", "parquet")),
        strategy=strategy,
        ranks=1 if strategy == "none" else 2,
        epochs=3 if averages else 2,
        micro_batch_size=2 if averages else None,
        evaluate_every=chance.choice((None, 5)),
        averages=averages,
        every=chance.choice((1, 2, 3, 5)),
        background=chance.random() < 0.7,
        keep_last=chance.choice((1, 2, 2, 3)),
        save_best=chance.random() < 0.3,
        storage=chance.choice(("disk", "disk", "disk", "slow", "failing")),
    )  # fmt: skip


def _life(chance: random.Random, training: Training, resizes: bool) -> Life:
    ranks = chance.choice((1, 2, 3)) if resizes else training.ranks
    faults = [_fault(chance, training) for _ in range(chance.choice((1, 1, 1, 2)))]
    damages = []
    if chance.random() < 0.3:
        wounds: tuple[Wound, ...] = ("flip a bit", "flip a bit", "truncate", "delete", "overwrite", "append")
        damages = [
            Damage(chance.choice(wounds), chance.random(), chance.random(), chance.randrange(8))
            for _ in range(chance.choice((1, 1, 2)))
        ]
    return Life(ranks, tuple(faults), tuple(damages), grace_s=chance.uniform(0.0, 0.5))


def _fault(chance: random.Random, training: Training) -> Fault:
    blows: tuple[Blow, ...] = ("kill", "kill", "kill", "terminate", "interrupt", "freeze", "fill the disk")
    blow = chance.choice(blows)
    moments: list[Moment] = ["start", "fit", "step", "step", "save", "save", "save", "saved"]
    if training.evaluate_every is not None:
        moments.append("evaluation")
    moment = chance.choice(moments)
    most = {"step": 15, "save": max(1, 15 // training.every), "saved": max(1, 12 // training.every), "evaluation": 2}
    then_s = None
    if blow == "freeze" or blow == "fill the disk":
        then_s = chance.choice((None, chance.uniform(0.0, 0.4)))
    elif blow != "kill":
        then_s = chance.choice((None, None, chance.uniform(0.0, 0.1)))
    return Fault(
        blow=blow,
        whom=chance.choice((None, 0, 1)),
        moment=moment,
        count=chance.randint(1, most.get(moment, 1)),
        # Mostly short: a step and a save take milliseconds.
        delay_s=chance.uniform(0.0, 0.3) if moment == "start" else chance.choice((0.003, 0.03, 0.1)) * chance.random(),
        then_s=then_s,
    )
