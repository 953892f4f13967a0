"""A dozen schedules of kills, stops, full disks and damaged files: the short form of `make chaos`.

In any case, each row was used once in each epoch of the surviving history; and with a constant number of ranks,
weights, moments, averages and records are bit-equal to the undisturbed run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.chaos.drive import Drive, Outcome
from tests.chaos.ledger import Lived, complaints, surviving
from tests.chaos.schedule import Damage, Fault, Life, Schedule, Training, schedule

# Five trainings, so that few run undisturbed; together they cover every blow, wound, strategy and storage.
# `make test` runs three, with every blow and strategy, a resize and a failing storage; `make test-all`
# runs the others.
SHORT, LONG = (43, 260, 236), (21, 79, 171, 174, 229, 342, 388, 462, 464)
SEEDS = SHORT + LONG


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    return Drive(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def outcome_of(drive: Drive) -> Callable[[int], Outcome]:
    """Run the schedule of a seed, once."""
    return cache(lambda seed: drive.run(schedule(seed)))


@pytest.mark.parametrize("seed", [*SHORT, *(pytest.param(seed, marks=pytest.mark.extended) for seed in LONG)])
def test_whatever_befalls_a_run_it_is_the_run_that_would_have_been(
    seed: int, outcome_of: Callable[[int], Outcome]
) -> None:
    outcome = outcome_of(seed)
    print(f"again: python -m tests.chaos --seed {seed}", outcome.schedule, *outcome.struck, *outcome.log, sep="\n")
    assert outcome.complaints == []


@pytest.mark.extended
def test_something_did_befall_them(outcome_of: Callable[[int], Outcome]) -> None:
    struck = [outcome for seed in SEEDS if (outcome := outcome_of(seed)).struck]
    assert len(struck) >= len(SEEDS) // 2


KILLED_AT_7 = Life(1, (Fault("kill", None, "step", 7, 0.0, None),))
PLAIN = Training(strategy="none", ranks=1, evaluate_every=None)


@pytest.mark.parametrize(("forgets", "complaint"), [("rng", "weights differ"), ("data", "were learned from more")])
def test_a_resume_that_forgets_something_is_noticed(drive: Drive, forgets: str, complaint: str) -> None:
    training = replace(PLAIN, forgets=forgets)  # type: ignore[arg-type]
    outcome = drive.run(Schedule(0, training, (KILLED_AT_7, Life(1))))
    assert outcome.struck
    assert any(complaint in each for each in outcome.complaints), outcome.complaints


def test_where_all_is_damaged_it_is_said_and_nothing_begins_anew_by_itself(drive: Drive) -> None:
    training = replace(PLAIN, keep_last=1, background=False)
    wound = Damage("flip a bit", 0.5, 0.5, 3)
    outcome = drive.run(Schedule(0, training, (replace(KILLED_AT_7, damages=(wound,)), Life(1))))
    assert outcome.complaints == []
    assert any("none of the checkpoints can be read" in each for each in outcome.log)


def test_a_schedule_is_made_from_its_seed_alone() -> None:
    assert [schedule(seed) for seed in range(200)] == [schedule(seed) for seed in range(200)]
    assert len({str(schedule(seed)) for seed in range(200)}) == 200
    assert {life.faults for each in map(schedule, range(200)) for life in each.lives[-1:]} == {()}
    blows = {fault.blow for each in map(schedule, range(200)) for life in each.lives for fault in life.faults}
    assert blows == {"kill", "terminate", "interrupt", "freeze", "fill the disk"}
    resized = [
        each for each in map(schedule, range(200)) if any(life.ranks != each.training.ranks for life in each.lives)
    ]
    assert {(each.training.strategy, each.keeps_bits) for each in resized} >= {("ddp", True), ("fsdp", False)}


def lived(restored: int | None, rows: dict[int, list[list[int]]]) -> Lived:
    told = Lived(restored)
    for step, ranks in rows.items():
        told.rows[step] = dict(enumerate(ranks))
        told.epochs[step] = (step - 1) // 2
    return told


WANTED = {1: (0, [1, 2]), 2: (0, [3, 4]), 3: (1, [2, 4]), 4: (1, [1, 3])}


@pytest.mark.parametrize(
    ("lives", "complaint"),
    [
        ([lived(0, {1: [[1], [2]], 2: [[3], [4]], 3: [[1], [3]]}), lived(2, {3: [[2], [4]], 4: [[1], [3]]})], None),
        ([lived(0, {1: [[1, 2]], 2: [[3, 4]], 3: [[2, 4]]}), lived(None, {}), lived(3, {4: [[1, 3]]})], None),
        ([lived(0, {1: [[1, 2]], 2: [[2, 4]], 3: [[2, 4]], 4: [[1, 3]]})], r"epoch 0: rows \[2\] .* more than once"),
        ([lived(0, {1: [[1, 2]], 2: [[4]], 3: [[2, 4]], 4: [[1, 3]]})], r"epoch 0: rows \[3\] were never"),
        ([lived(0, {1: [[1, 2]], 2: [[3, 4]], 3: [[1, 3]], 4: [[2, 4]]})], r"updates \[3, 4\] had other rows"),
        ([lived(0, {1: [[1, 2]]}), lived(2, {3: [[2, 4]], 4: [[1, 3]]})], r"updates \[2\] are in no surviving life"),
        ([lived(0, {1: [[1, 2]], 2: [[3, 4]], 3: [[2, 4]]})], "3 updates instead of 4"),
    ],
)  # fmt: skip
def test_the_ledger_finds_what_is_wrong(lives: list[Lived], complaint: str | None) -> None:
    found = complaints(surviving(lives), WANTED)
    if complaint is None:
        assert found == []
    else:
        assert any(re.search(complaint, each) for each in found), found
