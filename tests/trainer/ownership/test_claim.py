"""Claims on a folder: one owner at a time, dead owners recognized, on a disk and in an object store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headway.trainer.errors import RunConflictError
from headway.trainer.ownership import claim as claims
from headway.trainer.ownership.claim import Ownership, acquire, check_unowned
from headway.trainer.ownership.claim_files import Claim, ClaimFiles, number_of
from headway.trainer.ownership.process import ProcessId


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and watches of fractions of a second."""
    monkeypatch.setattr(claims, "BEAT_EVERY_S", 0.05)
    monkeypatch.setattr(claims, "ABANDONED_AFTER_S", 0.6)
    monkeypatch.setattr(claims, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(claims, "_LOOK_REMOTE_EVERY_S", 0.02)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        with suppress(ProcessLookupError):
            process.kill()


def elsewhere(place: str, **changes: object) -> Claim:
    """Claim a folder as a process of the number of this one on another machine."""
    files = ClaimFiles(place)
    process = replace(ProcessId.this(), host="another", pids="another boot 1")
    made = replace(Claim.next_after(files.newest()), **{"process": process, **changes})  # type: ignore[arg-type]
    assert files.create(made)
    return made


def of_pid(pid: int) -> ProcessId:
    """The identity of a process of this machine, as it would write it itself."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return replace(ProcessId.this(), pid=pid, started=text.rpartition(")")[2].split()[19])


def test_a_second_owner_is_refused_until_the_first_releases_the_folder(place: str) -> None:
    with acquire(place) as first:
        with pytest.raises(RunConflictError, match=rf"process {os.getpid()} on \S+ is training in .*run: wait until"):
            acquire(place)
        assert first.problem() is None
    check_unowned(place)
    with acquire(place) as second:
        assert number_of(second.id) == number_of(first.id) + 1
        assert len(ClaimFiles(place)._numbers()) == 1, "superseded claims are deleted"


def test_a_killed_owner_is_known_at_once(place: str, sleeper: subprocess.Popen[bytes]) -> None:
    elsewhere(place, process=of_pid(sleeper.pid))
    with pytest.raises(RunConflictError, match=f"process {sleeper.pid} on"):
        acquire(place)
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    # A zombie, whose parent has not asked for it yet.
    lines: list[str] = []
    acquire(place, say=lines.append).release()
    assert lines == [], "no wait for heartbeats"


def test_a_process_that_got_the_number_of_a_dead_one_is_another(place: str) -> None:
    elsewhere(place, process=replace(ProcessId.this(), pid=os.getppid(), started="1"))
    acquire(place).release()


def test_processes_of_other_containers_are_not_judged_by_their_numbers(place: str, quick: None) -> None:
    """With hostNetwork pods share a host name, and often each has a process 1."""
    other = replace(ProcessId.this(), pids=f"{ProcessId.this().pids}0", pid=2**22 + 1)
    assert other.is_alive() is None
    lines: list[str] = []
    elsewhere(place, process=other)
    acquire(place, say=lines.append).release()
    assert len(lines) == 1, lines
    assert "for a sign of life" in lines[0]


IN_A_CONTAINER = """
import sys, time
from headway.trainer.ownership.claim import acquire
owner = acquire(sys.argv[1])
print("owns", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-pf", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to make a pid namespace",
)
def test_a_process_in_a_real_pid_namespace_of_this_host_is_not_judged_by_its_number(tmp_path: Path) -> None:
    """It is process 1 there, which here is alive and another one."""
    command = ["unshare", "-pf", "--kill-child", "--mount-proc", sys.executable, "-c", IN_A_CONTAINER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "owns\n"
        newest = ClaimFiles(str(tmp_path)).newest()
        assert newest is not None
        assert newest.process is not None
        is_alive = newest.process.is_alive()
        container.kill()
    assert (newest.process.host, newest.process.pid) == (ProcessId.this().host, 1)
    assert is_alive is None


def test_an_owner_elsewhere_is_known_by_its_heartbeats(
    place: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clocks say: nothing in a claim is a time."""
    made = elsewhere(place)
    # The first heartbeat seen ends the watch.
    monkeypatch.setattr(claims, "ABANDONED_AFTER_S", 600.0)
    owner = Ownership(ClaimFiles(place), made)
    with pytest.raises(RunConflictError, match="on another is training"):
        acquire(place)
    owner._ended.set()
    owner._thread.join()
    monkeypatch.setattr(claims, "ABANDONED_AFTER_S", 0.6)
    with acquire(place) as mine:
        assert owner.problem() == f"process {os.getpid()} on {ProcessId.this().host} has taken over {mine._files.place}"


def test_a_suspended_owner_learns_that_it_has_lost_the_folder(place: str, quick: None) -> None:
    lost: list[str] = []
    told = threading.Event()
    first = acquire(place, on_lost=lambda problem: (lost.append(problem), told.set()))  # type: ignore[func-returns-value]
    with acquire(place, take_over=True) as second:
        assert told.wait(60)
        assert "has taken over" in lost[0]
        first.release()
        assert second.problem() is None
        assert ClaimFiles(place).newest().released is False  # type: ignore[union-attr]


def test_of_many_that_start_at_once_one_owns_the_folder(place: str) -> None:
    owners: list[Ownership] = []
    refused: list[str] = []
    ready = threading.Barrier(8)

    def start() -> None:
        ready.wait()
        try:
            owners.append(acquire(place))
        except RunConflictError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(owners), len(refused)) == (1, 7)
    owners[0].release()


def test_a_claim_torn_by_a_power_cut_is_waited_for_and_replaced(tmp_path: Path, quick: None) -> None:
    acquire(str(tmp_path)).release()
    (tmp_path / "owner" / "000002.json").write_text("")
    lines: list[str] = []
    with acquire(str(tmp_path), say=lines.append) as mine:
        assert number_of(mine.id) == 3
    assert "used by an unknown process" in lines[0]


def test_a_claim_whose_reply_a_network_file_system_lost_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats the request, and the second one finds the file of the first."""
    link = os.link

    def repeated(source: Path, name: Path) -> None:
        link(source, name)
        link(source, name)

    monkeypatch.setattr(os, "link", repeated)
    with acquire(str(tmp_path)) as owner:
        assert owner.problem() is None


def test_a_number_written_late_is_not_in_force(place: str) -> None:
    """A starter that was suspended between its look and its write finds that others have come and gone."""
    files = ClaimFiles(place)
    late = Claim.next_after(files.newest())
    acquire(place).release()
    with acquire(place) as second:
        assert not files.create(late)
        assert second.problem() is None
