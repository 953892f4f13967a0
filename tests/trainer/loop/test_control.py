"""Requests to a run: all ranks agree on each, once, and none is lost."""

from __future__ import annotations

import time
from collections import deque

import pytest

import headway.trainer.loop.control
from headway.trainer import World
from headway.trainer.loop.control import Agreed, Requests
from tests.distributed import run_on_ranks


def test_alone_a_request_holds_at_once_and_a_stop_stays() -> None:
    requests = Requests(World.single("cpu"))
    assert requests.agree() == requests.agree_now() == Agreed()
    requests.evaluate()
    requests.save()
    assert requests.agree() == Agreed(evaluate=True, save=True)
    assert requests.agree() == Agreed()
    requests.stop("first", "stopped")
    requests.stop("second", "interrupted")
    assert requests.stop_reason == "first"
    # The graver status: a run that a signal also wants to end is to go on later.
    assert requests.agree() == requests.agree() == requests.agree_now() == Agreed(stop="interrupted")
    requests.clear()
    assert requests.agree() == Agreed()
    assert requests.stop_reason == ""


@pytest.mark.parametrize("status", ["stopped", "time_limit", "interrupted"])
def test_a_stop_has_a_reason(status: str) -> None:
    requests = Requests(World.single("cpu"))
    requests.stop("", status)  # type: ignore[arg-type]
    assert requests.stop_reason == "a request without a reason"
    assert requests.agree().stop == status


def _agree(world: World) -> list[Agreed]:
    requests = Requests(world)
    agreed = []
    for update in range(6):
        if update == 1 and world.rank == 1:
            requests.save()
        if update == 3 and world.rank == 0:
            requests.stop("enough", "time_limit")
        agreed.append(requests.agree())
    if world.rank == 1:
        requests.evaluate()
    agreed.append(requests.agree_now())
    requests.close()
    requests.close()
    requests.clear()
    agreed.append(requests.agree_now())
    requests.close()
    return agreed


def test_on_ranks_a_request_holds_one_update_later_on_all() -> None:
    first, second = run_on_ranks(_agree, 2)
    assert first == second
    stop = Agreed(stop="time_limit")
    nothing = Agreed()
    wanted = [
        nothing,
        nothing,
        Agreed(save=True),
        nothing,
        stop,
        stop,
        Agreed(evaluate=True, stop="time_limit"),
        nothing,
    ]
    assert first == wanted


def _agree_after_an_error(world: World) -> list[Agreed]:
    requests = Requests(world)
    requests.stop("of the run that failed", "interrupted")
    requests.agree()  # begins to ask, and no rank reads the answer
    requests.clear()
    agreed = [requests.agree() for _ in range(3)]
    requests.close()
    return agreed


def test_a_run_that_follows_an_error_hears_nothing_of_what_was_asked_before() -> None:
    assert run_on_ranks(_agree_after_an_error, 2) == [[Agreed()] * 3] * 2


def _agree_seldom(world: World, update_s: float) -> list[int]:
    """The updates at which each of three saves takes effect; 1000 plus the call for the last one."""
    headway.trainer.loop.control.WITHIN_S = 0.25
    requests = Requests(world)
    found = []
    for update in range(150):
        if update in (20, 70) and world.rank == 1:
            requests.save()
        time.sleep(update_s * (1 + world.rank))
        if requests.agree().save:
            found.append(update)
    if world.rank == 0:
        requests.save()
    for call in range(4):
        if requests.agree(often=True).save:
            found.append(1000 + call)
    requests.close()
    return found


@pytest.mark.parametrize(("update_s", "most"), [(0.0005, 33), (0.01, 14)])
def test_ranks_meet_only_so_often_and_a_request_is_heard_soon(update_s: float, most: int) -> None:
    """Short updates: every 32; the slowest rank's 20 ms and more: every quarter of a second."""
    first, second = run_on_ranks(_agree_seldom, 2, update_s)
    assert first == second
    early, late, often = first
    assert 1 <= early - 20 <= most
    assert 1 <= late - 70 <= most
    assert 1000 < often <= 1002
    assert max(early - 20, late - 70) > 1, "it was agreed on after every update"


def test_a_request_of_another_thread_is_not_lost_while_requests_are_taken() -> None:
    requests = Requests(World.single("cpu"))

    class Interrupted(deque[int]):
        """Whose `append` runs after all requests have been taken, as if its thread had been switched off before."""

        def append(self, request: int, /) -> None:
            assert requests.agree().evaluate
            super().append(request)

    requests.evaluate()
    requests._saves = Interrupted()
    requests.save()
    assert requests.agree().save
