"""Workers of the shared Ray are forks of a warm process, and share no random state."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import numpy
import pytest

from tests.conftest import warm_process
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


def test_a_process_that_is_killed_while_it_asks_for_a_worker_harms_nothing() -> None:
    with warm_process() as variables:
        address = variables["HEADWAY_TESTS_ZYGOTE"]
        for sent in (b"", b"\0\0\0\x20", b"\0\0\0\x20[["):
            with socket.socket(socket.AF_UNIX) as killed:
                killed.connect(address)
                killed.sendall(sent)
        text = json.dumps([["not_a_worker.py"], {}, "/"]).encode()
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(60)
            asking.connect(address)
            asking.sendall(len(text).to_bytes(4, "big") + text)
            assert asking.recv(1) == b"", "answered: this one has to start by itself"


def test_without_the_warm_process_workers_are_told_at_once_to_start_by_themselves() -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = set(children.read_text().split())
    with warm_process() as variables, socket.socket(socket.AF_UNIX) as asking:
        (warm,) = set(children.read_text().split()) - before
        os.kill(int(warm), signal.SIGKILL)
        os.waitid(os.P_PID, int(warm), os.WEXITED | os.WNOWAIT)
        with pytest.raises(ConnectionRefusedError):
            asking.connect(variables["HEADWAY_TESTS_ZYGOTE"])
