"""The ledger of a run from the files in its folder: as far as they tell, also of a run that goes on."""

from __future__ import annotations

import time

from .events import read_events
from .ledger import Ledger, ledger
from .runs import Run
from .watchdog import last_heard


def ledger_of(run: Run) -> Ledger:
    """Accounts for every second of a run; of one that goes on, until now."""
    # What its main rank was last heard to do is in no event yet.
    heard = [] if (beat := last_heard(run.folder)) is None else [beat]
    return ledger([*read_events(run.folder), *heard], until=time.time() if run.status == "running" else None)
