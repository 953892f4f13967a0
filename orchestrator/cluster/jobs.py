"""Submits, follows, lists and stops runs as Ray jobs of a remote cluster, over HTTP.

The driver runs `headway fit` on the cluster, in a copy of the working directory and with a copy of Headway. Its results
are the files of the run.
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
from ..errors import StorageError
from ..runs.run import Run
from ..runs.stop import stop_run
from .ray_env import temporary_env

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from ..config.experiment import Experiment

_RUN, _STORAGE = "headway_run", "headway_storage"
# By default `ray job stop` kills the driver after 3 s, too soon to save a checkpoint.
_SAVES_WITHIN_S = 600
_RECONNECTS_FOR_S = 60.0
_INTERRUPTED = 143


class Jobs:
    """The jobs of one cluster.

    Args:
        address: of the cluster's dashboard, e.g. http://127.0.0.1:8265.

    Raises:
        ConfigError: no cluster answers at the address.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        # The client prefers this variable to its argument.
        with temporary_env({"RAY_API_SERVER_ADDRESS": address}), self._as_config_errors():
            from ray.job_submission import JobSubmissionClient

            self._client = JobSubmissionClient(address)

    def submit(self, experiment: Experiment, arguments: Sequence[str], env: Mapping[str, str]) -> str:
        """Submit an experiment with a copy of the current directory, and return the job's name.

        Args:
            experiment: the experiment that the arguments resolve to.
            arguments: arguments of `headway`; see `fit_arguments`.
            env: environment variables of the driver and the workers.

        Raises:
            ConfigError: the cluster rejects the job.
        """
        job = f"{experiment.name}-{secrets.token_hex(4)}"
        own = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(_SAVES_WITHIN_S)}
        with _copy_of_headway() as headway_folder, self._as_config_errors():
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
        """Return the submitted jobs, newest first."""
        with self._as_config_errors():
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, name: str) -> JobDetails:
        """Return a job by its name, or the newest job of the run of that name, preferring jobs that have not ended.

        A second job of a running run is refused and ends immediately, so the newest may not be the one that trains.

        Raises:
            ConfigError: there is none; names the jobs that exist.
        """
        jobs = self.all()
        for job in jobs:
            if job.submission_id == name:
                return job
        of_run = [job for job in jobs if (job.metadata or {}).get(_RUN) == name]
        if of_run:
            return next((job for job in of_run if not job.status.is_terminal()), of_run[0])
        names = ", ".join(str(job.submission_id) for job in jobs[:10])
        raise ConfigError(f"there is no job {name!r} at {self.address}; its jobs: {names or 'none'}")

    def log(self, job: str) -> str:
        """Return the output of a job so far."""
        with self._as_config_errors():
            return str(self._client.get_job_logs(job))

    def follow(self, job: str, show: Callable[[str], None]) -> int:
        """Show the output of a job until it ends, and return its exit code.

        A lost connection is retried for a minute.

        Raises:
            HeadwayError: the cluster no longer answers; the job may still run.
        """
        output, lost_since_s = _NewOutput(show), None
        while True:
            try:
                asyncio.run(self._tail(job, output))
                with _connected():
                    details = self._client.get_job_info(job)
            except _ConnectionLost as lost:
                lost_since_s = lost_since_s or time.monotonic()
                if time.monotonic() - lost_since_s > _RECONNECTS_FOR_S:
                    raise HeadwayError(
                        f"{self.address} no longer answers ({lost}); the job may still run. To reconnect: "
                        f"`headway jobs logs {job} --follow`"
                    ) from lost.__cause__
            else:
                lost_since_s = None
                if details.status.is_terminal():
                    return self._exit_code(details, show)
            time.sleep(0.5)

    async def _tail(self, job: str, output: _NewOutput) -> None:
        """Show new output until the job ends. Each call receives all of the output again."""
        texts, passed = self._client.tail_job_logs(job), 0
        while True:
            with _connected():
                text = await anext(texts, None)
            if text is None:
                return
            output.show(text, passed)
            passed += len(text)

    def _exit_code(self, details: JobDetails, show: Callable[[str], None]) -> int:
        if (code := details.driver_exit_code) is not None:
            # Negative: the number of the signal that ended the process, for which shells return 128 + number.
            return 128 - int(code) if code < 0 else int(code)
        if details.status.value == "STOPPED":
            return _INTERRUPTED
        show(f"the job ended, but not through its driver: {details.message}\n")
        return 1

    def stop(self, name: str, *, now: bool = False, wait: bool = False) -> str:
        """Stop a job, and return a sentence about it. Its run saves a checkpoint and becomes "stopped".

        Args:
            name: name of the job or its run.
            now: stop without a checkpoint.
            wait: wait until the job has ended.

        Raises:
            ConfigError: there is no such job.
        """
        job = self.find(name)
        job_id = str(job.submission_id)
        if job.status.is_terminal():
            return f"{job_id} is not running: {_outcome(job)}"
        text = self._stop_run(job, now=now)
        if text is None:
            with self._as_config_errors():
                self._client.stop_job(job_id)
            text = f"asked {job_id} to stop: its run has not started, or its folder cannot be reached from here"
            if now:
                text += "; without access to the folder, a run that has started saves a checkpoint first"
        if not wait:
            return text
        while not (job := self.find(job_id)).status.is_terminal():
            time.sleep(0.5)
        return f"{job_id} has ended: {_outcome(job)}"

    def _stop_run(self, job: JobDetails, *, now: bool) -> str | None:
        """Request a stop through the run's folder, which the driver polls; return None if that is impossible."""
        metadata = job.metadata or {}
        try:
            run = Run(f"{metadata[_STORAGE].rstrip('/')}/{metadata[_RUN]}")
            # An earlier driver may have left the record.
            started_s = datetime.fromisoformat(run.record.started).timestamp()
            if run.status != "running" or started_s < (job.start_time or 0) / 1000 - 1:
                return None
            return stop_run(metadata[_RUN], metadata[_STORAGE], now=now)
        except (KeyError, ConfigError, StorageError):
            return None

    @contextmanager
    def _as_config_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if getattr(error, "response", None) is not None:  # the cluster answered
                raise ConfigError(f"the cluster at {self.address} is not ready: {error}") from error
            if not _is_network_error(error):
                raise ConfigError(
                    f"the working directory cannot be packaged ({error}): fix it, or exclude the file in .gitignore "
                    "or .rayignore"
                ) from error
            raise ConfigError(
                f"no cluster answers at {self.address}: start one (`ray start --head --dashboard-host=127.0.0.1`), "
                "forward the port of one (`ray dashboard cluster.yaml`), or give another --address"
            ) from error
        except AuthenticationError as error:
            raise ConfigError(
                f"the cluster at {self.address} requires a token: set RAY_AUTH_MODE=token and, if its head is another "
                "machine, RAY_AUTH_TOKEN to the output of `ray get-auth-token` there"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the cluster at {self.address} rejected the request: {error}") from error


def _is_network_error(error: OSError) -> bool:
    is_from_client = type(error).__module__.partition(".")[0] in ("requests", "urllib3", "aiohttp")
    return is_from_client or isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))


class _ConnectionLost(Exception):
    """The cluster did not answer."""


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of requests, aiohttp or Ray
        raise _ConnectionLost(str(error)) from error


class _NewOutput:
    """Shows each part of a growing text once, although it is received in pieces and repeatedly."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._shown = show, 0

    def show(self, text: str, begin: int) -> None:
        """Show what is new in a piece that begins at character `begin` of the text."""
        if (end := begin + len(text)) > self._shown:
            fresh = text[max(0, self._shown - begin) :]
            self._shown = end
            self._show(fresh)


def job_summary(job: JobDetails) -> dict[str, Any]:
    """Return the entry of a job in `jobs ls --json`. Times are UTC, in ISO 8601."""
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
    """Return the arguments of `headway` that train an experiment in a copy of the current directory.

    Args:
        target: the experiment's target, as given here.
        experiment: the experiment that it resolves to here.
        overrides: overrides that it was resolved with.
        options: options of `headway fit`.

    Raises:
        ConfigError: the driver would not find the target, or its storage would be deleted with the copy.
    """
    _check_storage(experiment, overrides)
    others = [each for each in overrides if not each.startswith("storage=")]
    return ["fit", *options, _from_here(target), *others, f"storage={quote(experiment.storage)}"]


def env_from_options(named: Sequence[str]) -> dict[str, str]:
    """Return environment variables from "NAME=VALUE", or "NAME" for the value of this process.

    Raises:
        ConfigError: a variable is not set here.
    """
    chosen = {}
    for each in named:
        name, equals, value = each.partition("=")
        if not equals and name not in os.environ:
            raise ConfigError(f"--env {name}: the variable is not set here; give it a value: --env {name}=...")
        chosen[name] = value if equals else os.environ[name]
    return chosen


def _from_here(target: str) -> str:
    """Return a target relative to the current directory, of which the driver gets a copy."""
    place, colon, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if not place.endswith(".py"):
        return target
    here, file = Path.cwd().resolve(), Path(place).resolve()
    if not file.is_relative_to(here):
        raise ConfigError(
            f"{place} is not in {here}, and the cluster gets a copy of the current directory only: change to the "
            "folder that contains the file"
        )
    return f"{file.relative_to(here)}{colon}{name}"


def _check_storage(experiment: Experiment, overrides: Sequence[str]) -> None:
    """Check that the storage is not in the copy of the current directory, which is deleted later."""
    storage = experiment.storage
    given = next((each.partition("=")[2] for each in reversed(overrides) if each.startswith("storage=")), "")
    if "://" in storage or os.path.isabs(given) or not Path(storage).is_relative_to(Path.cwd()):
        return
    raise ConfigError(
        f"storage {storage} is in the current directory, of which the cluster gets a temporary copy: give a URI, or "
        "the absolute path of a folder that all nodes share, e.g. storage=s3://bucket/runs"
    )


@contextmanager
def _copy_of_headway() -> Iterator[str]:
    """Yield a temporary folder `headway` with the packages that this process imports, installed or a checkout."""
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


def _outcome(job: JobDetails) -> str:
    code = "" if job.driver_exit_code is None else f", exit code {job.driver_exit_code}"
    return f"{job.status.value.lower()}{code}"
