"""Checks of a job before a cluster is contacted, and following its output. Without Ray."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from headway.orchestrator import Experiment, resolve
from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster.job_command import (
    JobRequest,
    dashboard_url,
    entrypoint,
    env_from_options,
    job_arguments,
    resources_from_option,
    runtime_env_from_options,
)
from headway.orchestrator.cluster.jobs import Jobs, _copy_of_headway, job_document, job_page, jobs_table
from headway.orchestrator.cluster.upload import missed_files, survey_upload
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
    arguments = job_arguments(
        "fit",
        f"{tmp_path}/a/line.py:Line",
        experiment("s3://bucket/runs"),
        overrides=overrides,
        options=["--resume", "never"],
    )
    assert arguments == ["fit", "--resume", "never", "a/line.py:Line", "config.x=[1, 2]", "storage=s3://bucket/runs"]
    assert job_arguments("fit", TARGET, experiment("s3://b"), overrides=[])[1] == TARGET
    for storage in ("/shared/proj #2/runs", "/shared/a: b", '/shared/it\'s "so"', "/shared/übung"):
        last = job_arguments("fit", TARGET, experiment(storage), overrides=[])[-1]
        assert resolve(experiment("/elsewhere"), [last]).storage == storage
    with pytest.raises(ConfigError, match="the cluster gets a copy of the current directory"):
        job_arguments("fit", "../line.py", experiment("s3://b"), overrides=[])


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
        job_arguments("fit", TARGET, experiment(storage), overrides=overrides)
        return
    with pytest.raises(ConfigError, match=r"gets a temporary copy: .* storage=s3://bucket/runs"):
        job_arguments("fit", TARGET, experiment(storage), overrides=overrides)


def test_the_environment_of_a_job_comes_from_files_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env").write_text("# keys\nexport A=1\n\nB='two words'\nC=\n")
    (tmp_path / "requirements.txt").write_text("# ours\nnumpy>=2  # fast\nscipy\n")
    (tmp_path / "base.yaml").write_text("env_vars: {A: 0, BASE: 7}\npip_check: false\n")
    monkeypatch.chdir(tmp_path)
    found = runtime_env_from_options(
        base="base.yaml", pip=["einops"], requirements="requirements.txt", env_file="env", env=["C=3"]
    )
    assert found["pip"] == ["einops", "numpy>=2", "scipy"]
    own = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": "600"}
    assert found["env_vars"] == {**own, "A": "1", "BASE": "7", "B": "two words", "C": "3"}
    assert found["pip_check"] is False
    assert runtime_env_from_options(base='{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "9"}}')["env_vars"] == {
        **own, "RAY_JOB_STOP_WAIT_TIME_S": "9"
    }  # fmt: skip
    (tmp_path / "bad.txt").write_text("-r other.txt\n")
    (tmp_path / "bad.env").write_text("A=1\nno variable\n")
    for options, message in (
        ({"base": "nowhere.yaml"}, "--runtime-env: cannot read nowhere.yaml"),
        ({"base": "{working_dir: x}"}, "working_dir cannot be set there: use --working-dir"),
        ({"base": "{pip: [x]}", "pip": ["y"]}, "cannot be combined with pip of --runtime-env"),
        ({"base": "requirements.txt"}, "is not valid YAML"),
        ({"base": "env"}, "must be a mapping"),
        ({"base": "{pip: 7}"}, "the runtime environment is invalid"),
        ({"requirements": "bad.txt"}, "'-r other.txt' refers to a file that the nodes do not have"),
        ({"env_file": "bad.env"}, "--env-file bad.env, line 2: write NAME=VALUE"),
    ):
        with pytest.raises(ConfigError, match=message):
            runtime_env_from_options(**options)
    assert resources_from_option('{"disk": 1}') == {"disk": 1.0}
    with pytest.raises(ConfigError, match="--entrypoint-resources must be a JSON object"):
        resources_from_option("disk")


def test_an_address_needs_no_http() -> None:
    assert dashboard_url("127.0.0.1:8265") == "http://127.0.0.1:8265"
    assert dashboard_url("https://there/ray") == "https://there/ray"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that keeps its data out of git, and reads it by relative paths, in its config and in its code."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "nested/cache").mkdir(parents=True)
    for name in ("data/train.parquet", "data/words.json", ".env", "nested/kept.txt", "nested/cache/x", "kept.json"):
        (folder / name).write_text("x" * 10)
    (tmp_path / "beside.json").touch()
    (folder / ".gitignore").write_text("data/\n.env\n")
    (folder / "nested/.rayignore").write_text("cache\n")
    (folder / "train_missed.py").write_text(TRAIN)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


TRAIN = """
from dataclasses import dataclass
from tests.tiny import TinyConfig, TinyTrainer
from headway.orchestrator import Choice, Experiment, Search

@dataclass(frozen=True, kw_only=True)
class Config(TinyConfig):
    train: str = "data/train.parquet"
    kept: str = "kept.json"
    absent: str = "data/nothing"

class Missed(TinyTrainer):
    config: Config

    def words(self):
        return open("data/words.json"), open("../beside.json"), {"data": 1}, run(run_dir="data/words.json")

experiment = Experiment(name="missed", trainer=Missed, config=Config(max_steps=1))
search = Search(metric="validation/loss", space={"config.width": Choice([3, 5])})
"""


def test_files_that_the_job_would_miss_are_named(project: Path) -> None:
    found = missed_files(resolve("train_missed.py"), Path.cwd())
    assert [each.partition(": ")[0] for each in found] == [
        "the job will not have data/train.parquet (config.train)",
        "the job will not have data/words.json (train_missed.py:16)",
        "the job will not have ../beside.json (train_missed.py:16)",
    ]
    assert ".gitignore or .rayignore excludes data/train.parquet" in found[0]
    assert "outside" in found[2]
    (project / ".gitignore").unlink()
    assert len(missed_files(resolve("train_missed.py"), Path.cwd())) == 1


def test_the_survey_of_the_upload_agrees_with_ray(project: Path, tmp_path: Path) -> None:
    """Names the private functions of Ray that the survey follows."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    upload = survey_upload(project)
    assert upload.excluded == (".env", "data/", "nested/cache/")
    packaging.create_package(str(project), tmp_path / "package.zip", include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "package.zip") as archive:
        sent = [each for each in archive.infolist() if not each.is_dir() and "__pycache__" not in each.filename]
    assert (upload.files, upload.size_bytes) == (len(sent), sum(each.file_size for each in sent))


@pytest.mark.parametrize("change", ["gone", "other arguments"])
def test_without_rays_rules_everything_counts_as_uploaded(
    project: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "gone":
        monkeypatch.setitem(sys.modules, "ray._private.runtime_env.packaging", None)
    else:
        monkeypatch.setattr("ray._private.runtime_env.packaging.get_excludes_from_ignore_files", lambda folder: [])
    assert survey_upload(project).excluded == ()
    found = missed_files(resolve("train_missed.py"), Path.cwd())
    assert [each.partition(": ")[0] for each in found] == ["the job will not have ../beside.json (train_missed.py:16)"]


def test_a_dry_run_shows_the_job_without_a_cluster_and_without_secrets(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "secrets.env").write_text("TOKEN=hush-hush\n")
    common = ["train_missed.py", "storage=/shared/runs", "--dry-run", "--env-file", "secrets.env"]
    for options, command in (
        (["--pip", "einops", "--entrypoint-num-cpus", "2"], "headway fit train_missed.py storage=/shared/runs"),
        (["--sweep", "--retry-failed"], "headway sweep --retry-failed train_missed.py storage=/shared/runs"),
        (["--working-dir", str(project)], "headway fit train_missed.py storage=/shared/runs"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["submit", *common, *options])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        assert command in out
        assert "TOKEN" in out
        assert "hush" not in out + err
        assert "data/" in out
        assert "the job will not have data/train.parquet (config.train)" in err
        assert ("einops" in out, "2 CPU" in out) == ("--pip" in options, "--pip" in options)


def test_the_interpreter_of_ray_runs_the_job_where_the_path_has_none(tmp_path: Path) -> None:
    """The shell of a job has a parent that has loaded Ray, from an environment that is not on the PATH."""
    package = tmp_path / "headway/orchestrator"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text("import sys\nprint(sys.executable, sys.argv[1:])\n")
    (tmp_path / "python").symlink_to("/bin/false")
    parent = "import ray, subprocess, sys; subprocess.run(sys.argv[1], shell=True, check=True)"
    command = [sys.executable, "-c", parent, entrypoint(["fit", "a file.py"])]
    expected = {}
    for path in ("/usr/bin:/bin", f"{Path(sys.executable).parent}:/usr/bin:/bin"):
        env = {"PATH": f"{tmp_path}:{path}" if path == "/usr/bin:/bin" else path, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        expected[path] = done.stdout
    interpreters = {Path(text.split()[0]).parent for text in expected.values()}
    assert interpreters == {Path(sys.executable).parent}
    assert all(text.endswith(" ['fit', 'a file.py']\n") for text in expected.values())


def test_jobs_show_leaves_secrets_out() -> None:
    shown = job("digits-1", JobStatus.FAILED, start_time=1_700_000_000_000)
    shown.end_time = 1_700_000_090_000
    shown.entrypoint = entrypoint(["fit", "digits.py"])
    shown.message = "Job entrypoint command failed"
    shown.runtime_env = {"env_vars": {"TOKEN": "hush-hush"}, "pip": {"packages": ["einops"]}, "working_dir": "gcs://x"}
    page, document = job_page(shown), job_document(shown)
    assert page.splitlines()[0] == "digits-1"
    for part in ("failed, exit code 2", "/nowhere/digits", "1m30s", "python -m headway.orchestrator fit digits.py"):
        assert part in page
    assert "einops" in page
    assert "hush" not in page + str(document)
    assert (document["env_vars"], document["storage"], document["exit_code"]) == (["TOKEN"], "/nowhere", 2)


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


def test_a_run_name_of_two_storages_stops_neither_job() -> None:
    mine, theirs = (job(f"digits-{each}", JobStatus.RUNNING, start_time=each) for each in (1, 2))
    theirs.metadata["headway_storage"] = "s3://theirs/runs"
    client = Client(mine, theirs)
    jobs = jobs_with(client)
    with pytest.raises(ConfigError, match=r"several runs .* are called digits.*\n.*digits-2: s3://theirs/runs/digits"):
        jobs.stop("digits")
    assert client.stopped == []
    assert jobs.find("/nowhere/digits") == mine
    assert jobs.find("s3://theirs/runs/digits") == theirs
    assert jobs.find("digits-1") == mine


def test_a_driver_that_a_signal_has_ended_has_the_exit_code_that_a_shell_would_say() -> None:
    client = Client(job("digits-1", JobStatus.FAILED, code=-9))
    assert jobs_with(client).follow("digits-1", lambda _: None) == 137


def test_a_file_that_cannot_be_copied_is_not_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    class Copying(Client):
        def submit_job(self, **_: object) -> None:
            (tmp_path / "secret").read_text()

    with pytest.raises(ConfigError, match="cannot be packaged .*secret.*: fix it"):
        jobs_with(Copying()).submit(experiment("s3://b"), [], JobRequest())


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
        (["submit", TARGET, "--retry-failed", "storage=/r"], "--retry-failed needs --sweep"),
        (["submit", TARGET, "--sweep", "--resume", "never"], "--resume cannot be combined with --sweep"),
        (
            ["submit", TARGET, "--working-dir", "nowhere"],
            "--working-dir nowhere is not a folder of this machine: name one that exists",
        ),
        (["jobs", "show", "digits"], "no cluster answers at http://127.0.0.1:"),
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
        main([*arguments, "--address", f"127.0.0.1:{port}"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
