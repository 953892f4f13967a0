"""Whether a retry can help: a pure decision, without Ray and without a clock."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from torch.utils.data import DataLoader

from headway.orchestrator.errors import RunConflictError, StorageError
from headway.orchestrator.storage.events import Event, EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train.elastic import RestartToResize
from headway.orchestrator.train.failures.budget import Failure, exceeds_budget, would_recur
from headway.orchestrator.train.failures.cause import find_cause, is_fatal_error, is_secondary, phase_of, raised_failure
from headway.orchestrator.train.failures.retry_policy import (
    RestartRequired,
    RetriesExhausted,
    RetryPolicy,
    name_process,
)
from headway.orchestrator.train.preemption import count_endings
from headway.trainer import World
from headway.trainer.errors import CheckpointError, ConfigError, DataError, NonFiniteError, StepError
from tests.tiny import Rows, TinyConfig, TinyTrainer


def failure(
    kind: str = "ValueError", step: int | None = 5, began_at: int | None = 0, *, retryable: bool = True
) -> Failure:
    return Failure(attempt=1, rank=0, step=step, began_at=began_at, kind=kind, retryable=retryable)


def lost(step: int | None = 5) -> Failure:
    return Failure(attempt=1, rank=0, step=step, began_at=step, kind="RuntimeError", secondary=True)


DIED = failure(kind="")


@pytest.mark.parametrize(
    ("now", "before", "over"),
    [
        pytest.param(DIED, [], False, id="died once"),
        pytest.param(DIED, [DIED, lost()], True, id="died and lost peers"),
        pytest.param(DIED, [DIED, failure(), failure()], False, id="errors take no retry from deaths"),
        pytest.param(failure(step=9), [DIED] * 9, False, id="deaths take no retry from errors"),
        pytest.param(failure(step=9), [failure(step=5)], True, id="raised twice"),
        pytest.param(lost(), [failure(step=5)] * 9, False, id="lost peers are no errors"),
        pytest.param(failure("StorageError"), [failure(step=5)] * 9, False, id="neither is a storage that was away"),
    ],
)
def test_errors_of_the_code_and_of_machines_have_budgets_of_their_own(
    now: Failure, before: list[Failure], over: bool
) -> None:
    assert exceeds_budget(now, before, max_failures=2, max_errors=1) is over


class Raises(TinyTrainer):
    """Raises in one of its methods."""

    where = ""

    def _maybe(self, where: str) -> None:
        if self.where == where:
            raise ValueError(where)

    def configure_models(self) -> None:
        self._maybe("models")
        super().configure_models()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._maybe("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._maybe("validation")
        return super().validation_step(batch, batch_idx)

    def on_step_end(self) -> None:
        self._maybe("hook")

    def loop(self) -> None:
        self._maybe("loop")
        super().loop()

    def configure_dataloaders(self) -> Any:
        trainer = self
        self._maybe("opening")

        class Broken(Rows):
            def __getitem__(self, row: int) -> Any:
                trainer._maybe("data")
                return super().__getitem__(row)

        if self.where == "stream":
            return (trainer._maybe("stream") for _ in range(9))
        return DataLoader(Broken(16), batch_size=8), DataLoader(Rows(8), batch_size=8)


@pytest.mark.parametrize(
    ("where", "phase"),
    [
        ("models", "setting up"),
        ("step", "training step"),
        ("validation", "evaluation"),
        ("hook", "callback"),
        ("data", "reading data"),
        ("stream", "reading data"),
        ("opening", "setting up"),
        ("loop", "between two steps"),
    ],
)
def test_an_error_says_what_its_rank_was_doing(where: str, phase: str) -> None:
    trainer = type("Raising", (Raises,), {"where": where})(TinyConfig(max_steps=1), world=World.single("cpu"))
    with pytest.raises(ValueError, match=where) as raised:
        trainer.fit()
    assert phase_of(raised.value) == phase


def test_a_failure_is_told_with_rank_step_and_phase() -> None:
    told = str(Failure(attempt=2, rank=1, step=7, kind="ValueError", phase="evaluation", message="no rows"))
    assert told == "the worker of rank 1 raised ValueError at step 7 (evaluation): no rows"


@pytest.mark.parametrize(
    ("now", "before", "recurs"),
    [
        pytest.param(failure(kind=""), [], False, id="a process died"),
        pytest.param(
            failure(kind="", step=None, began_at=None), [failure(kind="")] * 9, False, id="died again and again"
        ),
        pytest.param(failure(step=None, began_at=None), [], True, id="raised before training began"),
        pytest.param(failure(step=0), [], True, id="raised in the first step"),
        pytest.param(failure(step=5), [], False, id="raised after some steps"),
        pytest.param(failure(step=5, began_at=5), [], True, id="raised where it went on"),
        pytest.param(failure(step=5, began_at=3), [failure(step=5)], True, id="raised at the same step again"),
        pytest.param(failure(step=4, began_at=3), [failure(step=5)], True, id="raised even earlier"),
        pytest.param(failure(step=9, began_at=3), [failure(step=5)], False, id="got further"),
        pytest.param(failure(step=5), [failure(kind="", step=None)], False, id="after a death"),
        pytest.param(failure(step=5, retryable=False), [], True, id="an error of ours"),
        pytest.param(failure("StorageError", step=0), [failure("StorageError")], False, id="a storage that was away"),
        pytest.param(lost(step=None), [lost()] * 9, False, id="lost its peers"),
        pytest.param(failure(step=5, began_at=3), [lost(step=5)], False, id="after losing its peers"),
    ],
)
def test_what_is_tried_again(now: Failure, before: list[Failure], recurs: bool) -> None:
    assert would_recur(now, before) is recurs


@pytest.mark.parametrize("kind", [ConfigError, DataError, StepError, NonFiniteError])
def test_errors_about_config_data_and_numbers_would_come_again(kind: type[Exception]) -> None:
    assert is_fatal_error(kind("x"))


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), OSError("x"), CheckpointError("disk full"), StorageError("s3://bucket/x cannot be written")],
)
def test_other_errors_may_not(error: Exception) -> None:
    assert not is_fatal_error(error)


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"), True),
        (RuntimeError("NCCL error: remote process exited"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_an_error_that_only_says_that_a_peer_is_gone(error: Exception, secondary: bool) -> None:
    assert is_secondary(error) is secondary


def started(attempt: int) -> Event:
    return {"event": "attempt_started", "attempt": attempt}


def raised(attempt: int, rank: int, *, secondary: bool = False) -> Event:
    return {
        "event": "rank_failed", "attempt": attempt, "rank": rank, "step": 3, "began_at": 0, "type": "ValueError",
        "message": f"of rank {rank}", "traceback": "", "retryable": True, "secondary": secondary,
    }  # fmt: skip


def test_the_first_cause_is_told_not_its_consequences() -> None:
    found = raised_failure([started(1), raised(1, 0, secondary=True), raised(1, 2), raised(1, 1)])
    assert found is not None
    assert (found.rank, found.kind) == (2, "ValueError")


def test_a_rank_that_died_is_the_cause_of_its_peers_errors() -> None:
    found = find_cause([started(1), raised(1, 0, secondary=True)], {1: RuntimeError("the process is gone")})
    assert (found.rank, found.kind) == (0, "ValueError")
    assert "lost its connection to another worker" in str(found)


def test_only_the_last_attempt_counts() -> None:
    assert raised_failure([started(1), raised(1, 0), started(2)]) is None
    found = raised_failure([started(1), raised(1, 0), started(2), raised(2, 1)])
    assert found is not None
    assert (found.attempt, found.rank) == (2, 1)


def test_a_lost_peer_of_which_nobody_knows_more_is_told_as_it_is() -> None:
    found = raised_failure([started(1), raised(1, 0, secondary=True)])
    assert found is not None
    assert found.rank == 0


def gone(actor: str) -> Exception:
    """Return the error of Ray Train for a dead worker; a new object each time."""
    return WorkerHealthCheckFailedError("A worker health check failed.", failure=RayActorError(actor, f"{actor} died"))


def named(error: Exception) -> Exception:
    name_process(error)
    return error


class Controller:
    """Ray Train's controller as the retry policy sees it: it reports errors and obeys."""

    def __init__(self, folder: Path, **budgets: Any) -> None:
        self.folder = Folder(str(folder))
        self.log = EventWriter(self.folder, "rank-0", start="1-a")
        self.delays: list[float] = []
        budgets = {"max_failures": 3, "max_errors": 3, **budgets}
        self.watch = RetryPolicy(str(folder), start="1-a", **budgets)

    def announces(self, attempt: int) -> None:
        self.log.add("attempt_started", attempt=attempt)

    def tells(self, *errors: Exception) -> bool:
        """Return whether the run is retried."""
        try:
            # Pickled, as when it comes from a worker.
            self.watch.after_exception(None, dict(enumerate(pickle.loads(pickle.dumps(errors)))))
        except RetriesExhausted:
            return False
        except RestartRequired as required:
            self.delays.append(required.restart.delay_s)
        return True

    def told(self) -> list[Event]:
        return [event for event in read_events(self.folder) if event["event"] == "group_failed"]


def test_groups_that_die_before_they_say_that_they_are_there_are_told_and_counted(tmp_path: Path) -> None:
    controller = Controller(tmp_path, max_failures=2)
    assert controller.tells(named(RuntimeError("the device is busy"))), "none of the user's code has run"
    controller.announces(1)
    assert controller.tells(gone("b1"), gone("b2"))
    assert controller.tells(gone("b1"), gone("b2"), gone("b3")), "Ray Train tells of one group several times"
    assert len(controller.told()) == 2
    assert not controller.tells(gone("c1"))
    assert [event["text"] for event in controller.told()] == [
        "the worker of rank 0 raised RuntimeError (starting): the device is busy",
        "the worker of rank 0 died",
        "the worker of rank 0 died (starting)",
    ]
    assert count_endings(read_events(controller.folder)) == (0, 3)


def test_who_has_lost_the_run_is_not_tried_again_although_its_group_says_nothing(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.announces(1)
    controller.log.add("attempt_ended", attempt=1, status="resizing")
    assert controller.tells(named(RestartToResize("there is room"))), "this has ended as it should"
    assert controller.told() == []
    assert not controller.tells(named(RunConflictError("another driver has it")))
    assert "raised RunConflictError (starting): another driver has it" in controller.told()[0]["text"]


def test_an_error_without_a_name_is_counted_once_in_each_attempt(tmp_path: Path) -> None:
    controller = Controller(tmp_path, max_errors=1)
    for attempt, step in [(1, 3), (2, 6)]:
        controller.announces(attempt)
        failed = {**raised(attempt, 0), "step": step}
        controller.log.add(failed.pop("event"), **failed)
        goes_on = [controller.tells(ValueError("x")), controller.tells(ValueError("x"))]
        assert goes_on[0] is (attempt == 1)
    assert [event["step"] for event in controller.told()] == [3, 6]


def test_machines_that_are_taken_away_have_the_one_budget(tmp_path: Path) -> None:
    """Also those that Ray does not recognize, because a rank lost its peer first."""
    controller = Controller(tmp_path, max_failures=0, max_preemptions=2)
    for attempt in (1, 2, 3):
        controller.announces(attempt)
        controller.log.add("preemption_notice", attempt=attempt)
        # Ray Train ends the second one at its deadline without calling any callback.
        if attempt != 2:
            assert controller.tells(gone(f"of attempt {attempt}")) is (attempt == 1)
    assert [event["preempted"] for event in controller.told()] == [True, True]


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_errors_of_workers_whose_clock_differs_are_found(tmp_path: Path, skew_s: float) -> None:
    """Before, an error of a host whose clock is behind seemed to be one of an earlier start, and was tried again."""
    controller = Controller(tmp_path)
    earlier = EventWriter(controller.folder, "rank-0", start="0-z")
    earlier.add("attempt_started", attempt=7)
    old = raised(7, 0)
    earlier.add(old.pop("event"), **old)
    now_s = time.time() + skew_s
    controller.log.add("attempt_started", attempt=1, time=now_s)
    controller.log.add("attempt_ended", attempt=1, status="resizing", time=now_s + 1)
    assert controller.tells(named(RestartToResize("there is room")))
    # The next attempt has its main rank on another host.
    controller.log.add("attempt_started", attempt=2, time=now_s - 7200)
    failed = {**raised(2, 0), "step": 0, "began_at": 0, "type": "ZeroDivisionError"}
    controller.log.add(failed.pop("event"), **failed, time=now_s - 7199)
    assert not controller.tells(ZeroDivisionError("division by zero")), "it would recur"
    (told,) = controller.told()
    assert (told["attempt"], told["step"]) == (2, 0)
    assert "raised ZeroDivisionError at step 0" in told["text"]
