"""Which rank hangs: a pure decision, without Ray and without a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import Retries
from headway.orchestrator.watchdog.driver import hang_timeouts_of
from headway.orchestrator.watchdog.policy import HangTimeouts, Rank, find_straggler
from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration
from tests.orchestrator.runs.test_run import experiment

AUTO = HangTimeouts()
TEN_SECONDS = HangTimeouts(fixed_s=10.0)


def at(rank: int, phase: Any, for_s: float, **known: Any) -> Rank:
    """A rank at step 12 of a run whose phases usually take half a second."""
    return Rank(**{"rank": rank, "phase": phase, "for_s": for_s, "updates": 12, "step": 12, "usual_s": 0.5, **known})


@pytest.mark.parametrize(
    ("ranks", "timeouts", "blamed", "over"),
    [
        pytest.param(
            [at(0, "backward", 5), at(1, "forward", 5, silent_s=4.5)], AUTO, (1,), False, id="stopped: named at once"
        ),
        pytest.param(
            [at(0, "backward", 31), at(1, "forward", 31, silent_s=31)], AUTO, (1,), True, id="stopped: ended"
        ),
        pytest.param(
            [at(0, "forward", 31, batches=1), at(1, "backward", 31, silent_s=31)], AUTO, (1,), True,
            id="stopped while it was ahead",
        ),
        pytest.param(
            [at(0, "backward", 31), at(1, "forward", 31, silent_s=31, usual_s=None)], AUTO, (1,), False,
            id="silent in its first steps: time to compile",
        ),
        pytest.param([at(0, "forward", 5, silent_s=4.5)], AUTO, (0,), False, id="stopped, alone"),
        pytest.param([at(0, "forward", 31, silent_s=31)], AUTO, (0,), True, id="stopped, alone: ended"),
        pytest.param(
            [at(0, "backward", 99, silent_s=99), at(1, "forward", 99, silent_s=99)], AUTO, None, False,
            id="no heartbeat arrives: the storage is unavailable",
        ),
        pytest.param(
            [at(0, "backward", 31), at(1, "reading data", 31)], AUTO, (1,), False, id="data do not come: named"
        ),
        pytest.param([at(0, "backward", 301), at(1, "reading data", 301)], AUTO, (1,), True, id="data never come"),
        pytest.param([at(0, "backward", 11), at(1, "reading data", 11)], TEN_SECONDS, (1,), True, id="as asked for"),
        pytest.param(
            [at(0, "backward", 301), at(1, "backward", 301), at(2, "backward", 302)], AUTO, (0, 1, 2), True,
            id="all wait, for an unknown rank",
        ),
        pytest.param(
            [at(0, "reading data", 400), at(1, "optimizer", 400, updates=11, step=11)], AUTO, (1,), True,
            id="a whole update behind",
        ),
        pytest.param([at(0, "backward", 20), at(1, "forward", 20, usual_s=15)], AUTO, None, False, id="usually slow"),
        pytest.param(
            [at(0, "backward", 500), at(1, "forward", 500, usual_s=60)], AUTO, (1,), False, id="much slower than usual"
        ),
        pytest.param(
            [at(0, "forward", 301, batches=0), at(1, "reading data", 301, batches=0)], AUTO, (1,), True,
            id="others wait to agree on the batch",
        ),
        pytest.param(
            [at(0, "between updates", 1801, batches=0), at(1, "forward", 1801, batches=0)], AUTO, (0,), True,
            id="a hook of one that never returns",
        ),
        pytest.param([at(0, "backward", 290), at(1, "forward", 0.2)], AUTO, None, False, id="slow but moving"),
        pytest.param(
            [at(0, "evaluation", 3, batches=9), at(1, "evaluation", 200, batches=8)], AUTO, (1,), False,
            id="a long evaluation: named",
        ),
        pytest.param(
            [at(0, "around an evaluation", 301, batches=9), at(1, "evaluation", 301, batches=8)], AUTO, (1,), True,
            id="a step of an evaluation never ends",
        ),
        pytest.param(
            [at(0, "evaluation", 800, batches=2, usual_s=None), at(1, "evaluation", 800, batches=1, usual_s=None)],
            AUTO, None, False, id="the first evaluation compiles",
        ),
        pytest.param(
            [at(0, "reading validation data", 301), at(1, "evaluation", 301)], AUTO, (0,), True,
            id="validation data never come",
        ),
        pytest.param(
            [at(0, "around an evaluation", 800, batches=9)], AUTO, None, False, id="a hook at the end of an evaluation"
        ),
        pytest.param(
            [at(0, "reading validation data", 900, usual_s=None)], AUTO, None, False, id="a slow first batch of it"
        ),
        pytest.param(
            [at(0, "forward", 800, usual_s=None, updates=0), at(1, "forward", 800, usual_s=None, updates=0)], AUTO,
            None, False, id="the first step compiles",
        ),
        pytest.param([at(0, "reading data", 800, usual_s=None, updates=0)], AUTO, None, False, id="the first batch"),
        pytest.param([at(0, "saving", 800), at(1, "saving", 800)], AUTO, None, False, id="a big save"),
        pytest.param(
            [at(0, "between updates", 800), at(1, "backward", 800, updates=13)], AUTO, None, False,
            id="others wait for the hook of one",
        ),
        pytest.param(
            [at(0, "setting up", 800, usual_s=None, updates=0), at(1, "setting up", 800, usual_s=None, updates=0)],
            AUTO, None, False, id="a resumed run that loads",
        ),
        pytest.param(
            [at(0, "setting up", 1801, usual_s=None, updates=0), at(1, "between updates", 1, updates=0)], AUTO,
            (0,), True, id="loads for ever",
        ),
        pytest.param([at(0, "ended", 900, silent_s=900), at(1, "saving", 3)], AUTO, None, False, id="one has ended"),
        pytest.param([at(0, "ended", 900, silent_s=900)], AUTO, None, False, id="all have ended"),
    ],
)  # fmt: skip
def test_who_keeps_the_others_waiting(
    ranks: list[Rank], timeouts: HangTimeouts, blamed: tuple[int, ...] | None, over: bool
) -> None:
    straggler = find_straggler(ranks, timeouts)
    assert (straggler.ranks if straggler else None, bool(straggler and straggler.is_hung)) == (blamed, over)


def test_it_is_told_with_rank_phase_and_time() -> None:
    stopped, waits = at(1, "forward", 31, silent_s=31.4), at(0, "backward", 31)
    assert str(find_straggler([waits, stopped], AUTO)) == (
        "rank 1 has sent no heartbeat for 31 s, last seen in phase 'forward' at step 12"
    )
    assert str(find_straggler([waits, at(1, "reading data", 31)], AUTO)) == (
        "rank 1 has not moved for 31 s, in phase 'reading data' at step 12"
    )


def test_a_phase_of_unknown_length_ends_before_the_ranks_that_wait_give_up(tmp_path: Path) -> None:
    """Otherwise collectives would time out, with an error that names neither the rank nor its phase."""
    asked = experiment(tmp_path)
    timeouts = hang_timeouts_of(asked, 0.5)
    timeout_s = asked.config.parallel.timeout.amount
    assert timeouts is not None
    for phase in ("setting up", "saving", "between updates"):
        straggler = find_straggler(
            [at(0, "backward", 3), at(1, phase, 0.9 * timeout_s, updates=11, usual_s=None)], timeouts
        )
        assert straggler is not None
        assert (straggler.ranks, straggler.phase, straggler.is_hung) == ((1,), phase, True)


def test_the_patience_is_a_time_auto_or_none() -> None:
    assert Retries(hang_timeout="10m").hang_timeout == Duration(600, "seconds")  # type: ignore[arg-type]
    assert (Retries().hang_timeout, Retries(hang_timeout=None).hang_timeout) == ("auto", None)
    for wrong in ("3s", "10 steps"):
        with pytest.raises(ConfigError, match=r"at least 10s|not a duration|is a time"):
            Retries(hang_timeout=wrong)  # type: ignore[arg-type]
