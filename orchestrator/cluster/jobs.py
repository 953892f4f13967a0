"""Submits, follows, lists and stops runs as Ray jobs of a remote cluster, over HTTP.

The driver then runs on the cluster, with a copy of the working directory and of Headway, and executes `headway fit`.
Its results are the files of the run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import AuthenticationError

import headway.datasets
import headway.trainer
from headway.trainer.errors import ConfigError, HeadwayError
from headway.trainer.metrics.units import human_duration

from ..cli.tables import format_table, local_time
from ..config.coerce import quote
from ..config.experiment import Experiment
from ..errors import StorageError
from ..runs.run import Run
from ..runs.stop import stop_run
from .ray_env import temporary_env

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

_RUN, _STORAGE = "headway_run", "headway_storage"
# By default `ray job stop` kills the driver after 3 s, too soon to save a checkpoint.
_SAVES_WITHIN_S = 600
_RECONNECTS_FOR_S = 60.0
_INTERRUPTED = 143


class Jobs:
    """The jobs of one cluster.

    Args:
        address: of its dashboard, as http://127.0.0.1:8265.

    Raises:
        ConfigError: no cluster answers there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        # The client prefers the variable to its argument.
        with temporary_env({"RAY_API_SERVER_ADDRESS": address}), self._asking():
            from ray.job_submission import JobSubmissionClient

            self._client = JobSubmissionClient(address)

    def submit(self, experiment: Experiment, arguments: Sequence[str], env: Mapping[str, str]) -> str:
        """Submit an experiment with a copy of the current directory, and return the job's name.

        Args:
            experiment: what the arguments stand for.
            arguments: of `headway`, as `fit_arguments` gives them.
            env: environment variables of the driver and of the workers.

        Raises:
            ConfigError: the cluster does not take it.
        """
        job = f"{experiment.name}-{secrets.token_hex(4)}"
        own = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(_SAVES_WITHIN_S)}
        with _copy_of_headway() as headway_folder, self._asking():
            self._client.submit_job(
                entrypoint=shlex.join(["python", "-m", "headway.orchestrator", *arguments]),
                submission_id=job,
                runtime_env={
                    "working_dir": os.getcwd(), "py_modules": [headway_folder], "env_vars": {**own, **env}
                },
                metadata={_RUN: experiment.name, _STORAGE: experiment.storage},
            )  # fmt: skip
        return job

    def all(self) -> list[JobDetails]:
        """Return the submitted jobs, the last one first."""
        with self._asking():
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, name: str) -> JobDetails:
        """Return a job by name, or the last job of the run of that name, preferring jobs that have not ended.

        A second job of a running run is refused and ends immediately, so the last one may not be the one that trains.

        Raises:
            ConfigError: there is none, with the names that there are.
        """
        jobs = self.all()
        for job in jobs:
            if job.submission_id == name:
                return job
        of_run = [job for job in jobs if (job.metadata or {}).get(_RUN) == name]
        if of_run:
            return next((job for job in of_run if not job.status.is_terminal()), of_run[0])
        names = ", ".join(str(job.submission_id) for job in jobs[:10])
        raise ConfigError(f"there is no job {name!r} at {self.address}; there is {names or 'none at all'}")

    def log(self, job: str) -> str:
        """Return the output of a job so far."""
        with self._asking():
            return str(self._client.get_job_logs(job))

    def follow(self, job: str, show: Callable[[str], None]) -> int:
        """Show the output of a job until it ends, and return its exit code.

        A lost connection is retried for a minute.

        Raises:
            HeadwayError: the cluster no longer answers; the job may still run.
        """
        news, lost_since_s = _News(show), None
        while True:
            try:
                asyncio.run(self._tail(job, news))
                with _connected():
                    details = self._client.get_job_info(job)
            except _Lost as lost:
                lost_since_s = lost_since_s or time.monotonic()
                if time.monotonic() - lost_since_s > _RECONNECTS_FOR_S:
                    raise HeadwayError(
                        f"{self.address} does not answer any more ({lost}); the job may go on: "
                        f"`headway jobs logs {job} --follow`"
                    ) from lost.__cause__
            else:
                lost_since_s = None
                if details.status.is_terminal():
                    return self._last_word(details, show)
            time.sleep(0.5)

    async def _tail(self, job: str, news: _News) -> None:
        """Show what is new, until the job ends. Each time the cluster sends all of it, from the beginning."""
        texts, passed = self._client.tail_job_logs(job), 0
        while True:
            with _connected():
                text = await anext(texts, None)
            if text is None:
                return
            news.show(text, passed)
            passed += len(text)

    def _last_word(self, details: JobDetails, show: Callable[[str], None]) -> int:
        if (code := details.driver_exit_code) is not None:
            # Of a process that a signal has ended it is the signal's number, below zero; shells add that to 128.
            return 128 - int(code) if code < 0 else int(code)
        if details.status.value == "STOPPED":
            return _INTERRUPTED
        show(f"the job has ended without its driver: {details.message}\n")
        return 1

    def stop(self, name: str, *, now: bool = False, wait: bool = False) -> str:
        """End a job, and return what happened, in words. Its run saves a checkpoint and becomes "stopped".

        Args:
            name: of the job, or of its run.
            now: without a checkpoint.
            wait: until it has ended.

        Raises:
            ConfigError: there is no such job.
        """
        job = self.find(name)
        job_id = str(job.submission_id)
        if job.status.is_terminal():
            return f"{job_id} is not running: {_standing(job)}"
        told = self._stop_run(job, now=now)
        if told is None:
            with self._asking():
                self._client.stop_job(job_id)
            told = f"{job_id} is asked to end: its run has not begun, or its folder cannot be reached from here"
            if now:
                told += "; a run that has begun cannot be told that it is to end at once, and saves first"
        if not wait:
            return told
        while not (job := self.find(job_id)).status.is_terminal():
            time.sleep(0.5)
        return f"{job_id} has ended: {_standing(job)}"

    def _stop_run(self, job: JobDetails, *, now: bool) -> str | None:
        """Asks by the folder of the run, in which that is the driver's to read; None where that does not work."""
        metadata = job.metadata or {}
        try:
            run = Run(f"{metadata[_STORAGE].rstrip('/')}/{metadata[_RUN]}")
            # An earlier driver may have left it so.
            if run.status != "running" or _seconds(run.record.started) < (job.start_time or 0) / 1000 - 1:
                return None
            return stop_run(metadata[_RUN], metadata[_STORAGE], now=now)
        except (KeyError, ConfigError, StorageError):
            return None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if getattr(error, "response", None) is not None:  # an answer, of requests
                raise ConfigError(f"the cluster at {self.address} is not ready: {error}") from error
            if not _is_of_the_network(error):
                raise ConfigError(
                    f"the working directory cannot be packaged ({error}): fix it, or exclude the file in .gitignore "
                    "or .rayignore"
                ) from error
            raise ConfigError(
                f"no cluster answers at {self.address}: start one (`ray start --head --dashboard-host=127.0.0.1`), "
                "open the way to one (`ray dashboard cluster.yaml`), or give another --address"
            ) from error
        except AuthenticationError as error:
            raise ConfigError(
                f"the cluster at {self.address} wants a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what "
                "`ray get-auth-token` says on its head, if that is another machine"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the cluster at {self.address} refuses: {error}") from error


def _is_of_the_network(error: OSError) -> bool:
    is_a_clients = type(error).__module__.partition(".")[0] in ("requests", "urllib3", "aiohttp")
    return is_a_clients or isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))


class _Lost(Exception):
    """The cluster did not answer; its cause is why."""


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of requests, aiohttp and Ray
        raise _Lost(str(error)) from error


class _News:
    """Shows what was not shown before of a text that comes in parts, and again from its beginning."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._shown = show, 0

    def show(self, text: str, begin: int) -> None:
        """Show what is new in the part that begins after so many characters."""
        if (end := begin + len(text)) > self._shown:
            fresh = text[max(0, self._shown - begin) :]
            self._shown = end
            self._show(fresh)


def job_summary(job: JobDetails) -> dict[str, Any]:
    """Return what `jobs ls --json` says of a job; times are UTC, in ISO 8601."""
    times = {name: getattr(job, f"{name}_time") for name in ("start", "end")}
    started, ended = (datetime.fromtimestamp(each / 1000, UTC).isoformat() if each else None for each in times.values())
    return {
        "name": job.submission_id, "run": (job.metadata or {}).get(_RUN), "status": job.status.value.lower(),
        "exit_code": job.driver_exit_code, "started": started, "ended": ended,
    }  # fmt: skip


def jobs_table(jobs: Sequence[JobDetails]) -> str:
    """Return a table of jobs."""
    rows = [("JOB", "RUN", "STATUS", "EXIT CODE", "STARTED", "TOOK")]
    for job in jobs:
        began_s = (job.start_time or 0) / 1000
        ended_s = job.end_time / 1000 if job.end_time else time.time()
        rows.append((
            str(job.submission_id), (job.metadata or {}).get(_RUN, ""), job.status.value.lower(),
            "" if job.driver_exit_code is None else str(job.driver_exit_code),
            local_time(began_s) if began_s else "",
            human_duration(ended_s - began_s) if began_s else "",
        ))  # fmt: skip
    return format_table(rows)


def fit_arguments(
    target: str, experiment: Experiment, *, overrides: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """Return the arguments with which `headway`, in a copy of the current directory, trains an experiment.

    Args:
        target: of the experiment.
        experiment: what the target comes to here.
        overrides: that it was made with.
        options: of `headway fit`.

    Raises:
        ConfigError: the driver would not find the target, or lose what it saves.
    """
    _check_storage(experiment, overrides)
    others = [each for each in overrides if not each.startswith("storage=")]
    return ["fit", *options, _from_here(target), *others, f"storage={quote(experiment.storage)}"]


def env_from_options(named: Sequence[str]) -> dict[str, str]:
    """Return environment variables from "NAME", which takes the value from here, and "NAME=VALUE".

    Raises:
        ConfigError: one is not set here.
    """
    chosen = {}
    for each in named:
        name, equals, value = each.partition("=")
        if not equals and name not in os.environ:
            raise ConfigError(f"--env {name}: there is no such variable here; give it a value, as --env {name}=...")
        chosen[name] = value if equals else os.environ[name]
    return chosen


def _from_here(target: str) -> str:
    """A target as a driver in a copy of the current directory finds it."""
    place, colon, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if not place.endswith(".py"):
        return target
    here, file = Path.cwd().resolve(), Path(place).resolve()
    if not file.is_relative_to(here):
        raise ConfigError(
            f"{place} is not in {here}: the cluster gets a copy of the current directory; go to where the file lies"
        )
    return f"{file.relative_to(here)}{colon}{name}"


def _check_storage(experiment: Experiment, overrides: Sequence[str]) -> None:
    """Refuse a storage that would lie in the copy of the current directory, and go with it."""
    storage = experiment.storage
    given = next((each.partition("=")[2] for each in reversed(overrides) if each.startswith("storage=")), "")
    if "://" in storage or os.path.isabs(given) or not Path(storage).is_relative_to(Path.cwd()):
        return
    raise ConfigError(
        f"the storage {storage} lies in the current directory, of which the cluster gets a copy that it throws away "
        "later: give a URI or the absolute path of a folder that every node sees, as in storage=s3://bucket/runs"
    )


@contextmanager
def _copy_of_headway() -> Iterator[str]:
    """A folder `headway` with what is imported here under that name, be it installed or a checkout."""
    datasets = next(iter(headway.datasets.__path__))
    parts = {
        "datasets": datasets,
        "orchestrator": str(Path(__file__).parents[1]),
        "trainer": headway.trainer.__path__[0],
    }
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        for name, place in parts.items():
            shutil.copytree(place, f"{folder}/headway/{name}", ignore=shutil.ignore_patterns("__pycache__"))
        yield f"{folder}/headway"


def _standing(job: JobDetails) -> str:
    code = "" if job.driver_exit_code is None else f", exit code {job.driver_exit_code}"
    return f"{job.status.value.lower()}{code}"


def _seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()
