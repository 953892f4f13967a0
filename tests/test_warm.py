"""Workers of the shared Ray are forks of a warm process, and share no random state."""

from __future__ import annotations

import os
import random
import time

import numpy
import pytest

from tests.promises.test_a_hang_ends_by_itself import is_there


@pytest.mark.ray
def test_workers_come_from_a_warm_process_and_have_nothing_random_in_common(ray_session: None) -> None:
    import ray

    class Worker:
        def tell(self) -> tuple[int, str, list[object]]:
            with open(f"/proc/{os.getppid()}/cmdline") as command:
                parent = command.read()
            # The object ids of Ray's core, and the unseeded random numbers of libraries.
            names = [ray.PlacementGroupID.of(ray.JobID.from_int(1)).hex(), ray.put(0).hex()]
            return os.getpid(), parent, [*names, random.random(), float(numpy.random.random()), os.urandom(8)]

    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    (first, parent, numbers), (second, _, others) = ray.get([worker.tell.remote() for worker in workers])
    assert "zygote.py" in parent
    assert not set(numbers) & set(others)
    assert first != second

    # They end like other workers: by Ray, and when the process is killed.
    ray.kill(workers[0])
    os.kill(second, 9)
    deadline = time.monotonic() + 60
    while is_there(first) or is_there(second):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(workers[1].tell.remote())
