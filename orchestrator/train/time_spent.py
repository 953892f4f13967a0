"""The main rank's time by phase, as reported in its heartbeats and with every checkpoint."""

from __future__ import annotations

import time
from typing import Any

from headway.trainer.loop.timing import FIRST_UPDATE, UPDATE_PHASES, Activity


def time_spent(activity: Activity, *, attempt: int, step: int) -> dict[str, Any]:
    """Return this process's seconds by phase, with the time and the step up to which they count.

    Args:
        activity: of the main rank; any thread may read it.
        attempt: number of this attempt.
        step: completed updates.
    """
    phase, updates = activity.phase, activity.updates
    return {
        "attempt": attempt,
        "at": round(time.time(), 3),
        "step": step,
        "updates": updates,
        "phase": FIRST_UPDATE if phase in UPDATE_PHASES and not updates else phase,
        "seconds": {name: round(seconds, 3) for name, seconds in activity.spent_s().items() if seconds >= 0.0005},
    }
