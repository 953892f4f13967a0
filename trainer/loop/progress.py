"""How far a run has come, and when things are due. Plain arithmetic: no torch, no clock of its own."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from typing import Any, Literal, get_args

from ..errors import ConfigError

Unit = Literal["steps", "epochs", "seconds"]

_WORDS: dict[str, tuple[Unit, float]] = {
    "step": ("steps", 1), "steps": ("steps", 1),
    "epoch": ("epochs", 1), "epochs": ("epochs", 1), "ep": ("epochs", 1),
    "s": ("seconds", 1), "sec": ("seconds", 1), "second": ("seconds", 1), "seconds": ("seconds", 1),
    "m": ("seconds", 60), "min": ("seconds", 60), "minute": ("seconds", 60), "minutes": ("seconds", 60),
    "h": ("seconds", 3600), "hour": ("seconds", 3600), "hours": ("seconds", 3600),
    "d": ("seconds", 86400), "day": ("seconds", 86400), "days": ("seconds", 86400),
}  # fmt: skip
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")


@dataclass(frozen=True, slots=True)
class Duration:
    """An amount with its unit: `Duration(500, "steps")`, or `Duration.parse("2h30m")`.

    Args:
        amount: above zero; a whole number for steps and epochs.
        unit: "steps" are optimizer updates, "epochs" passes over the data, "seconds" wall time.

    Raises:
        ConfigError: the amount or the unit is not one of these.

    Example:
        >>> str(Duration.parse("2h30m")), str(Duration(500, "steps"))
        ('9000s', '500 steps')
    """

    amount: float
    unit: Unit = "steps"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ConfigError(f"a duration is in {', '.join(get_args(Unit))}, not in {self.unit!r}")
        if not self.amount > 0 or self.amount == float("inf"):
            raise ConfigError(f"a duration is above zero, not {self.amount} {self.unit}; leave it out to mean never")
        if self.unit != "seconds":
            if self.amount != int(self.amount):
                raise ConfigError(f"{self.unit} come whole, not as {self.amount}")
            object.__setattr__(self, "amount", int(self.amount))

    @classmethod
    def parse(cls, text: Duration | str | int) -> Duration:
        """Reads "500 steps", "2 epochs", "90m", "2h30m", "1d"; a bare number is steps.

        Raises:
            ConfigError: the text is none of these, with examples of what would be.
        """
        if isinstance(text, Duration):
            return text
        if isinstance(text, int) and not isinstance(text, bool):
            return cls(text, "steps")
        written = str(text).strip()
        if re.fullmatch(r"\d+", written):
            return cls(int(written), "steps")
        parts = _PART.findall(written)
        known = [(float(amount), *_WORDS[word.lower()]) for amount, word in parts if word.lower() in _WORDS]
        units = {unit for _, unit, _ in known}
        leftover = _PART.sub("", written).strip()
        if (
            not known
            or len(known) != len(parts)
            or len(units) != 1
            or leftover
            or (len(known) > 1 and units != {"seconds"})
        ):
            raise ConfigError(f'{text!r} is not a duration: write "500 steps", "2 epochs", "90m", "2h30m" or "1d"')
        return cls(sum(amount * factor for amount, _, factor in known), units.pop())

    def __str__(self) -> str:
        """The shortest text that `parse` reads back as this duration."""
        if self.unit != "seconds":
            return f"{self.amount} {self.unit}"
        # Through Decimal: neither an exponent, which `parse` does not read, nor a digit too few.
        return f"{Decimal(repr(self.amount)):f}".removesuffix(".0") + "s"


@dataclass(slots=True)
class Progress:
    """What is complete, counted over all attempts of a run; the same on every rank.

    Attributes:
        step: optimizer updates.
        epoch: completed passes over the data, so also the index of the one in progress.
        step_in_epoch: updates of the epoch in progress, with those that were skipped.
        offset: samples of the epoch in progress that all ranks together have consumed.
        is_closing: whether the last update was that of an epoch which counts as completed, but is yet to be evaluated,
            recorded and told of.
        micro_batches: forward and backward passes of this rank.
        samples: samples learned from, over all ranks and epochs.
        tokens: tokens of these, where `Trainer.num_tokens` counts them; those since the last record are not in yet.
        evaluations: completed evaluations.
        evaluated_step: the update after which the last one was made; -1 before the first.
        elapsed_s: seconds inside `fit`, over all attempts.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    offset: int = 0
    is_closing: bool = False
    micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    evaluations: int = 0
    evaluated_step: int = -1
    elapsed_s: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the counters that `state` has; one that it lacks keeps its value."""
        for field in fields(self):
            if field.name in state:
                setattr(self, field.name, state[field.name])


class Schedule:
    """Says when something that happens every so often is due.

    `due` is asked after every update (`ended="steps"`) and at the end of every epoch (`ended="epochs"`), each time
    with the same progress on every rank. A schedule by wall time would differ between ranks: the main rank's clock
    decides, and the loop carries its word to the others as a request.
    """

    def __init__(self, every: Duration | None) -> None:
        self.every = every
        self._last_s = 0.0
        self._unit: Unit | None = every.unit if every else None
        self._amount = int(every.amount) if every and every.unit != "seconds" else 1

    def due(self, progress: Progress, *, ended: Literal["steps", "epochs"]) -> bool:
        """Whether it is time, now that a step or an epoch has ended; never by wall time."""
        if self._unit != ended:
            return False
        return (progress.step if ended == "steps" else progress.epoch) % self._amount == 0

    def due_by_clock(self, elapsed_s: float) -> bool:
        """Whether the seconds have passed since it was last done; ask on one rank only."""
        return self.every is not None and self.every.unit == "seconds" and elapsed_s - self._last_s >= self.every.amount

    def done(self, elapsed_s: float) -> None:
        """Starts the clock again: after it was done, and where a resumed run goes on."""
        self._last_s = elapsed_s
