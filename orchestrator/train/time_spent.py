"""What the main rank has spent its time on so far, as it says it in its heartbeats and at every checkpoint."""

from __future__ import annotations

import time
from typing import Any

from headway.trainer.loop.timing import FIRST_UPDATE, UPDATE_PHASES, Activity


def time_spent(activity: Activity, *, attempt: int, step: int) -> dict[str, Any]:
    """Returns the seconds of this process by phase, and until when and which step they go.

    Args:
        activity: of the main rank; any thread may read it.
        attempt: which one this is.
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
