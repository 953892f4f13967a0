"""The rules of retries, as tables: budgets, refills, delays, and nodes to avoid."""

from __future__ import annotations

import pytest

from headway.orchestrator.train.failures.budget import (
    Failure,
    exceeds_budget,
    failures_since_refill,
    has_refilled,
    nodes_to_avoid,
    restart_delay_s,
    would_recur,
)


def died(step: int | None, node: str = "a", *, began_at: int = 0, trained_s: float = 1.0) -> Failure:
    return Failure(attempt=1, rank=0, step=step, began_at=began_at, trained_s=trained_s, node_id=node)


def lost(step: int | None, node: str = "a") -> Failure:
    return Failure(attempt=1, rank=0, step=step, node_id=node, host="h", lost_node=True, lost_ranks=(0, 1))


def raised(step: int) -> Failure:
    return Failure(attempt=1, rank=0, step=step, began_at=0, kind="ValueError")


@pytest.mark.parametrize(
    ("now", "before", "other_nodes", "recurs"),
    [
        pytest.param(died(25), [], False, False, id="first death"),
        pytest.param(died(25), [died(25)], False, True, id="same step twice"),
        pytest.param(died(25), [died(24)], False, False, id="another step"),
        pytest.param(died(25), [died(25), died(30)], False, False, id="progress in between"),
        pytest.param(died(None), [died(None)] * 5, False, False, id="before training began"),
        pytest.param(died(25), [died(25)], True, False, id="twice on one of several nodes"),
        pytest.param(died(25, "b"), [died(25)], True, True, id="twice on two nodes"),
        pytest.param(died(25), [died(25), died(25)], True, True, id="three times"),
        pytest.param(lost(25), [lost(25)] * 5, False, False, id="lost machines"),
        pytest.param(died(25), [lost(25)], False, False, id="a death after a lost machine"),
    ],
)
def test_a_process_that_dies_at_one_step_again_is_not_retried(
    now: Failure, before: list[Failure], other_nodes: bool, recurs: bool
) -> None:
    assert would_recur(now, before, has_other_nodes=other_nodes) is recurs


@pytest.mark.parametrize(
    ("now", "before", "refilled"),
    [
        pytest.param(died(5000), [], False, id="nothing to refill"),
        pytest.param(died(1009), [died(10)], False, id="too few updates"),
        pytest.param(died(1010), [died(10)], True, id="1,000 updates further"),
        pytest.param(died(1010), [died(10), died(900)], False, id="not beyond the furthest"),
        pytest.param(died(20, trained_s=7200), [died(10)], True, id="an hour beyond"),
        pytest.param(died(20, trained_s=7000), [died(10)], False, id="an hour, mostly of repeated updates"),
        pytest.param(died(9, trained_s=9e9), [died(10)], False, id="only repeated updates"),
        pytest.param(died(None, trained_s=9e9), [died(10)], False, id="unknown step"),
        pytest.param(died(1500, began_at=1200), [died(10)], False, id="updates of an earlier attempt"),
    ],
)
def test_budgets_are_full_again_after_progress(now: Failure, before: list[Failure], refilled: bool) -> None:
    assert has_refilled(now, before) is refilled


def test_only_failures_since_the_refill_count() -> None:
    failures = [died(1), died(2), died(2000), died(2001)]
    assert failures_since_refill(failures) == failures[2:]
    assert failures_since_refill(failures[:2]) == failures[:2]


def test_lost_machines_have_their_own_budget() -> None:
    limits = {"max_failures": 1, "max_errors": 1, "max_lost_nodes": 2}
    assert not exceeds_budget(lost(5), [died(1), raised(2), lost(3)], **limits)
    assert exceeds_budget(lost(5), [lost(1), lost(3)], **limits)
    assert not exceeds_budget(died(5), [lost(1)] * 9, **limits)
    assert not exceeds_budget(lost(5), [lost(1)] * 99, **{**limits, "max_lost_nodes": None})


@pytest.mark.parametrize(
    ("failures", "delay_s"),
    [
        ([died(5)], 0.0),
        ([died(None)], 0.0),
        ([died(5), died(5)], 5.0),
        ([died(5), died(4), died(3)], 10.0),
        ([died(None)] * 4, 20.0),
        ([died(None)] * 50, 300.0),
        ([died(5), died(4), died(6)], 0.0),
        ([died(5), died(4), died(6), died(6)], 5.0),
    ],
)
def test_restarts_without_progress_wait_longer_each_time(failures: list[Failure], delay_s: float) -> None:
    assert restart_delay_s(failures[-1], failures[:-1]) == delay_s


@pytest.mark.parametrize(
    ("failures", "avoided"),
    [
        ([died(5, "a")], set()),
        ([died(5, "a"), died(4, "a")], {"a"}),
        ([died(5, "a"), died(4, "b")], set()),
        ([died(5, "a"), died(9, "a")], set()),
        ([died(5, "a"), died(9, "a"), died(9, "a")], {"a"}),
        ([died(5, "a"), died(4, "a"), died(9, "b")], {"a"}),
        ([lost(5, "a"), lost(4, "a")], set()),
        ([raised(5), raised(5)], set()),
    ],
)
def test_a_node_on_which_ranks_died_twice_without_progress_is_avoided(
    failures: list[Failure], avoided: set[str]
) -> None:
    assert nodes_to_avoid(failures) == avoided


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (
            Failure(
                attempt=1, rank=0, kind="KeyError", step=6, phase="reading data",
                message="Caught KeyError in DataLoader worker 0.\nOriginal:\n  File x\nKeyError: 'row 3'\n",
            ),
            "the worker of rank 0 raised KeyError at step 6 (reading data): Caught KeyError in DataLoader worker 0: "
            "KeyError: 'row 3'",
        ),
        (
            Failure(attempt=1, rank=1, kind="KeyboardInterrupt", step=5),
            "the worker of rank 1 raised KeyboardInterrupt at step 5",
        ),
        (lost(7), "lost node h with ranks 0, 1 at step 7"),
        (
            Failure(
                attempt=1, rank=1, host="h", step=1234, phase="training step", line="train.py:31 in training_step",
                death="was killed by a segmentation fault (SIGSEGV)",
            ),
            "the worker of rank 1 on h was killed by a segmentation fault (SIGSEGV) at step 1,234 (training step), at "
            "train.py:31 in training_step",
        ),
        (
            Failure(attempt=1, rank=0, kind="RuntimeError", step=3, secondary=True, message="Connection reset"),
            "the worker of rank 0 lost its connection to another worker at step 3, although no worker is known to have "
            "died: Connection reset",
        ),
    ],
)  # fmt: skip
def test_the_cause_is_one_sentence(failure: Failure, sentence: str) -> None:
    assert str(failure) == sentence
