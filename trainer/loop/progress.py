"""Progress counters of a run, durations, and schedules of periodic actions; no torch, no clock."""

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
        amount: > 0; an integer for steps and epochs.
        unit: "steps" are optimizer updates, "epochs" passes over the data, "seconds" wall time.

    Raises:
        ConfigError: the amount or the unit is invalid.

    Example:
        >>> str(Duration.parse("2h30m")), str(Duration(500, "steps"))
        ('9000s', '500 steps')
    """

    amount: float
    unit: Unit = "steps"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ConfigError(f"the unit of a duration must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")
        if not self.amount > 0 or self.amount == float("inf"):
            raise ConfigError(f"a duration must be > 0, got {self.amount} {self.unit}; leave it out to mean never")
        if self.unit != "seconds":
            if self.amount != int(self.amount):
                raise ConfigError(f"a duration in {self.unit} must be an integer, got {self.amount}")
            object.__setattr__(self, "amount", int(self.amount))

    @classmethod
    def parse(cls, text: Duration | str | int) -> Duration:
        """Parse "500 steps", "2 epochs", "90m", "2h30m" or "1d"; a bare number is steps.

        Raises:
            ConfigError: the text is not a duration.
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
        """Return the shortest text that `parse` reads back as this duration."""
        if self.unit != "seconds":
            return f"{self.amount} {self.unit}"
        # Decimal writes all digits and no exponent, which `parse` does not accept.
        return f"{Decimal(repr(self.amount)):f}".removesuffix(".0") + "s"


@dataclass(slots=True)
class Progress:
    """Counters over all attempts of a run; equal on every rank.

    Attributes:
        step: optimizer updates.
        epoch: completed passes over the data, which is the index of the one in progress.
        step_in_epoch: updates of the epoch in progress, including skipped ones.
        offset: samples of the epoch in progress that all ranks together have consumed.
        is_closing: whether `epoch` counts an epoch that has yet to be evaluated, recorded and reported to callbacks.
        micro_batches: forward and backward passes of this rank.
        samples: samples trained on, over all ranks and epochs.
        tokens: tokens trained on up to the last record, if `Trainer.num_tokens` counts them.
        evaluations: completed evaluations.
        evaluated_step: the update after which the last evaluation was made; -1 before the first.
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
        """Return the counters by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters in `state`; others keep their values."""
        for field in fields(self):
            if field.name in state:
                setattr(self, field.name, state[field.name])


class Schedule:
    """Tells when a periodic action is due.

    The loop calls `due` after every update (`ended="steps"`) and at the end of every epoch (`ended="epochs"`), with
    equal progress on every rank. Clocks differ between ranks: the main rank calls `due_by_clock`, and requests the
    action on all ranks.
    """

    def __init__(self, every: Duration | None) -> None:
        self.every = every
        self._last_s = 0.0
        self._unit: Unit | None = every.unit if every else None
        self._amount = int(every.amount) if every and every.unit != "seconds" else 1

    def due(self, progress: Progress, *, ended: Literal["steps", "epochs"]) -> bool:
        """Return whether the action is due after a step or an epoch; False for schedules by wall time."""
        if self._unit != ended:
            return False
        return (progress.step if ended == "steps" else progress.epoch) % self._amount == 0

    def due_by_clock(self, elapsed_s: float) -> bool:
        """Return whether the seconds since the last action have passed. Call this on one rank only."""
        return self.every is not None and self.every.unit == "seconds" and elapsed_s - self._last_s >= self.every.amount

    def done(self, elapsed_s: float) -> None:
        """Restart the clock, after the action and when a run resumes."""
        self._last_s = elapsed_s
