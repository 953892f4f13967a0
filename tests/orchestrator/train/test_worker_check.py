"""The first check of a worker: versions and storage of the driver."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from headway.orchestrator.runs.open import open_run
from headway.orchestrator.train.failures.cause import is_fatal_error
from headway.orchestrator.train.failures.retry_policy import RetriesExhausted
from headway.orchestrator.train.worker_check import check_worker, driver_versions
from headway.orchestrator.train.worker_group import training_error
from headway.trainer import ConfigError, World
from headway.trainer.ownership import run_dir
from tests.distributed import run_on_ranks
from tests.orchestrator.runs.test_run import experiment


def check(place: str, lease: str, world: World | None = None, **versions: str) -> list[str]:
    return check_worker(
        world or World.single("cpu"), place, lease=lease, driver_host="head", versions=driver_versions() | versions
    )


def test_workers_have_the_versions_of_the_driver(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path)).run
    assert driver_versions()["ray"] == ray.__version__
    assert check(run.run_dir, run.lease) == []
    assert check(run.run_dir, run.lease, torch=driver_versions()["torch"].partition("+")[0] + "+another") == []
    other_patch = f"{sys.version_info.major}.{sys.version_info.minor}.99"
    (warning,) = check(run.run_dir, run.lease, python=other_patch)
    assert warning.endswith(f"not {other_patch}, which the driver on head has")
    with pytest.raises(ConfigError, match=r"than the driver on head:\n  rank 0 on .*: Ray .*, not 1.0.0\nInstall the"):
        check(run.run_dir, run.lease, ray="1.0.0")


def _check_on_rank(world: World, places: list[str], lease: str) -> Any:
    run_dir._VISIBLE_WITHIN_S = 0.1
    with pytest.raises(ConfigError) as raised:
        check(places[world.rank], lease, world)
    return str(raised.value), is_fatal_error(raised.value)


def test_a_worker_that_does_not_see_what_the_driver_has_written_is_named_by_all(tmp_path: Path) -> None:
    run = open_run(experiment(tmp_path / "shared")).run
    for message, is_fatal in run_on_ranks(_check_on_rank, 2, [run.run_dir, str(tmp_path / "own")], run.lease):
        assert "what the driver on head has written there:\n  rank 1 on " in message
        assert "rank 0 on" not in message
        assert "--storage s3://..." in message
        assert is_fatal, "it would recur"


def test_the_driver_raises_the_error_of_the_check_as_it_is(tmp_path: Path) -> None:
    """Although no worker has written an event, and Ray Train's error is that of its controller."""
    run = open_run(experiment(tmp_path)).run
    refused = ConfigError("these ranks do not see ...")
    controller = RuntimeError("Training failed due to controller error")
    controller.controller_failure = RetriesExhausted("text", refused)  # type: ignore[attr-defined]
    assert training_error(controller, run) is refused


def test_an_error_of_the_driver_is_not_one_of_ray_train(tmp_path: Path) -> None:
    """Such as a trainer that cannot be pickled."""
    run = open_run(experiment(tmp_path)).run
    refused = ConfigError("Net cannot be pickled for the workers")
    assert training_error(refused, run) is refused


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "NODE_OUT_OF_MEMORY Memory on the node (IP: ...) was 22.82GB used / 23.54GB limit (0.969602)",
            "because its node ran out of memory: 22.82GB used / 23.54GB",
        ),
        (
            "Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: the node is running low on memory",
            "ran out of memory",
        ),
        ("The actor is dead because its worker process has died.", "its process died, alone or with the head node"),
        ("The actor is dead because its node has died.", "most likely with the head node"),
    ],
)
def test_the_end_of_ray_train_s_controller_has_a_cause(tmp_path: Path, text: str, told: str) -> None:
    run = open_run(experiment(tmp_path)).run
    assert told in str(training_error(RayActorError(error_msg=text), run))
