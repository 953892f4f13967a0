"""Checks of a job before a cluster is contacted, and following its output. Without Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from headway.orchestrator import Experiment, resolve
from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster.jobs import Jobs, _copy_of_headway, env_from_options, fit_arguments, jobs_table
from headway.trainer.errors import ConfigError
from tests.heads import free_ports
from tests.tiny import TinyConfig, TinyTrainer

TARGET = "tests.tiny:TinyTrainer"


def experiment(storage: str) -> Experiment:
    return Experiment(name="x", trainer=TinyTrainer, config=TinyConfig(max_steps=1), storage=storage)


def test_variables_are_taken_from_here_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "a=b")
    monkeypatch.delenv("NOT_HERE", raising=False)
    assert env_from_options(["HERE", "OTHER=x=y", "EMPTY="]) == {"HERE": "a=b", "OTHER": "x=y", "EMPTY": ""}
    with pytest.raises(ConfigError, match="--env NOT_HERE: the variable is not set here"):
        env_from_options(["NOT_HERE"])


def test_the_driver_gets_what_was_resolved_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/line.py").touch()
    overrides = ["config.x=[1, 2]", "storage=s3://bucket/old", "storage=s3://bucket/runs/"]
    arguments = fit_arguments(
        f"{tmp_path}/a/line.py:Line", experiment("s3://bucket/runs"), overrides=overrides, options=["--resume", "never"]
    )
    assert arguments == ["fit", "--resume", "never", "a/line.py:Line", "config.x=[1, 2]", "storage=s3://bucket/runs"]
    assert fit_arguments(TARGET, experiment("s3://b"), overrides=[])[1] == TARGET
    for storage in ("/shared/proj #2/runs", "/shared/a: b", '/shared/it\'s "so"', "/shared/übung"):
        last = fit_arguments(TARGET, experiment(storage), overrides=[])[-1]
        assert resolve(experiment("/elsewhere"), [last]).storage == storage
    with pytest.raises(ConfigError, match="the cluster gets a copy of the current directory"):
        fit_arguments("../line.py", experiment("s3://b"), overrides=[])


@pytest.mark.parametrize(
    ("storage", "overrides", "is_fine"),
    [
        ("runs", [], False),
        ("runs", ["storage=runs"], False),
        ("runs", ["storage=/tmp", "storage=./runs"], False),
        ("../runs", [], True),
        ("/elsewhere/runs", [], True),
        ("s3://bucket/runs", [], True),
        # An absolute path: a folder that all nodes share, which contains this project.
        ("runs", ["storage=/said/here"], True),
    ],
)
def test_a_storage_that_would_go_with_the_copy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, overrides: list[str], is_fine: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if is_fine:
        fit_arguments(TARGET, experiment(storage), overrides=overrides)
        return
    with pytest.raises(ConfigError, match=r"gets a temporary copy: .* storage=s3://bucket/runs"):
        fit_arguments(TARGET, experiment(storage), overrides=overrides)


def test_headway_is_packed_as_it_is_imported(tmp_path: Path) -> None:
    with _copy_of_headway() as folder:
        files = {file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if file.is_file()}
    assert Path(folder).name == "headway"
    assert {
        "trainer/trainer.py",
        "trainer/callbacks/base.py",
        "datasets/plan.py",
        "orchestrator/cluster/jobs.py",
    } <= files
    assert "datasets/__init__.py" not in files
    assert not [file for file in files if "__pycache__" in file]


def test_jobs_are_a_table_that_cuts_nothing() -> None:
    name = "a-long-name-" * 6 + "1a2b3c4d"
    ended = JobDetails(
        type=JobType.SUBMISSION, submission_id=name, status=JobStatus.FAILED, entrypoint="x", driver_exit_code=3,
        metadata={"headway_run": "digits"}, start_time=1_700_000_000_000, end_time=1_700_000_090_000,
    )  # fmt: skip
    fresh = JobDetails(type=JobType.SUBMISSION, submission_id="raysubmit_x", status=JobStatus.PENDING, entrypoint="x")
    heading, *rows = jobs_table([ended, fresh]).splitlines()
    assert heading.split() == ["JOB", "RUN", "STATUS", "EXIT", "CODE", "STARTED", "TOOK"]
    assert rows[0].split()[:4] == [name, "digits", "failed", "3"]
    assert rows[0].endswith("1m30s")
    assert rows[1].split() == ["raysubmit_x", "pending"]
    assert jobs_table([]) == "JOB  RUN  STATUS  EXIT CODE  STARTED  TOOK"


def job(name: str, status: JobStatus, *, run: str = "digits", start_time: int = 0, code: int = 2) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION, submission_id=name, status=status, entrypoint="x", driver_exit_code=code,
        metadata={"headway_run": run, "headway_storage": "/nowhere"}, start_time=start_time,
    )  # fmt: skip


class Client:
    """A fake of Ray's client: with some jobs, and a log whose connection breaks."""

    def __init__(self, *jobs: JobDetails) -> None:
        self.jobs, self.stopped = list(jobs), list[str]()
        self.breaks_after = [3, 1]

    def list_jobs(self) -> list[JobDetails]:
        return self.jobs

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)

    def get_job_info(self, name: str) -> JobDetails:
        return self.jobs[0]

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        lines = [f"line {number}\n" for number in range(5)]
        most = self.breaks_after.pop(0) if self.breaks_after else None
        for line in lines[:most]:
            yield line
        if most is not None:
            raise ConnectionError("the connection has broken")


def jobs_with(client: Client) -> Jobs:
    jobs = object.__new__(Jobs)
    jobs.address, jobs._client = "http://there", client
    return jobs


def test_the_job_of_a_run_is_the_one_that_trains_not_the_one_that_was_refused() -> None:
    running = job("digits-1", JobStatus.RUNNING, start_time=1000)
    refused = job("digits-2", JobStatus.FAILED, start_time=2000)
    client = Client(refused, running, job("other-1", JobStatus.RUNNING, run="other", start_time=3000))
    jobs = jobs_with(client)
    assert jobs.find("digits") == running
    assert jobs.find("digits-2") == refused
    # If its folder cannot be reached, the answer says that `now` has no effect.
    assert "saves a checkpoint first" not in jobs.stop("digits")
    assert "a run that has started saves a checkpoint first" in jobs.stop("digits", now=True)
    assert client.stopped == ["digits-1", "digits-1"]
    client.jobs.remove(running)
    assert jobs.find("digits") == refused


def test_a_driver_that_a_signal_has_ended_has_the_exit_code_that_a_shell_would_say() -> None:
    client = Client(job("digits-1", JobStatus.FAILED, code=-9))
    assert jobs_with(client).follow("digits-1", lambda _: None) == 137


def test_a_file_that_cannot_be_copied_is_not_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    class Copying(Client):
        def submit_job(self, **_: object) -> None:
            (tmp_path / "secret").read_text()

    with pytest.raises(ConfigError, match="cannot be packaged .*secret.*: fix it"):
        jobs_with(Copying()).submit(experiment("s3://b"), [], {})


def test_a_connection_that_breaks_shows_nothing_twice() -> None:
    shown: list[str] = []
    client = Client(job("digits-1", JobStatus.SUCCEEDED))
    assert jobs_with(client).follow("digits-1", shown.append) == 2
    assert "".join(shown) == "".join(f"line {number}\n" for number in range(5))
    assert client.breaks_after == []


def test_a_reader_that_has_gone_is_not_a_cluster_that_is_lost() -> None:
    def show(text: str) -> None:
        raise BrokenPipeError

    client = Client(job("digits-1", JobStatus.SUCCEEDED))
    with pytest.raises(BrokenPipeError):
        jobs_with(client).follow("digits-1", show)
    assert client.breaks_after == [1], "asked once"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", TARGET, "config.widht=3"], "did you mean config.width?"),
        (["submit", TARGET, "config.max_steps=1"], "is in the current directory"),
        (["submit", TARGET, "config.max_steps=1", "storage=/r", "--env", "NOT_HERE"], "the variable is not set here"),
        (["submit", TARGET, "config.max_steps=1", "storage=/r"], "no cluster answers at http://127.0.0.1:"),
        (["jobs", "ls"], "no cluster answers at http://127.0.0.1:"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    # Settings of another cluster in the environment are ignored.
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    (port,) = free_ports(1)
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--address", f"http://127.0.0.1:{port}"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
