"""Submits, follows, lists and stops runs as Ray jobs of a remote cluster, over HTTP.

The driver runs `headway fit` on the cluster, in a copy of the working directory and with a copy of Headway. Its results
are the files of the run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import AuthenticationError

import headway.datasets
import headway.trainer
from headway.trainer.errors import ConfigError, HeadwayError
from headway.trainer.metrics.units import human_duration

from ..display.tables import format_table, local_time
from ..errors import StorageError
from ..runs.run import Run
from ..runs.stop import stop_run
from ..storage.folder import join
from .job_command import JobRequest, dashboard_url, entrypoint
from .ray_env import temporary_env
from .token_check import token_error

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from ..config.experiment import Experiment

_RUN, _STORAGE = "headway_run", "headway_storage"
_RECONNECTS_FOR_S = 60.0
_INTERRUPTED = 143


class Jobs:
    """The jobs of one cluster.

    Args:
        address: of the cluster's dashboard, e.g. http://127.0.0.1:8265 or 127.0.0.1:8265.

    Raises:
        ConfigError: no cluster answers at the address.
    """

    def __init__(self, address: str) -> None:
        self.address = dashboard_url(address)
        # The client prefers this variable to its argument.
        with temporary_env({"RAY_API_SERVER_ADDRESS": self.address}), self._as_config_errors():
            from ray.job_submission import JobSubmissionClient

            self._client = JobSubmissionClient(self.address)

    def submit(self, experiment: Experiment, arguments: Sequence[str], request: JobRequest) -> str:
        """Submit an experiment with a copy of the current directory, and return the job's name.

        Args:
            experiment: the experiment that the arguments resolve to.
            arguments: arguments of `headway`; see `job_arguments`.
            request: environment and resources of the job.

        Raises:
            ConfigError: the cluster rejects the job.
        """
        metadata = {_RUN: experiment.name, _STORAGE: experiment.storage}
        return self.submit_command(experiment.name, arguments, request, metadata=metadata)

    def submit_command(
        self, name: str, arguments: Sequence[str], request: JobRequest, *, metadata: dict[str, str] | None = None
    ) -> str:
        """Submit a command of `headway` with a copy of the current directory, and return the job's name.

        Args:
            name: what the job's name begins with.
            arguments: arguments of `headway`.
            request: environment and resources of the job.
            metadata: for `jobs ls`.

        Raises:
            ConfigError: the cluster rejects the job.
        """
        job = f"{name}-{secrets.token_hex(4)}"
        with _copy_of_headway() as headway_folder, self._as_config_errors():
            modules = [headway_folder, *(request.runtime_env.get("py_modules") or ())]
            self._client.submit_job(
                entrypoint=entrypoint(arguments),
                submission_id=job,
                runtime_env={**request.runtime_env, "working_dir": os.getcwd(), "py_modules": modules},
                metadata=metadata,
                entrypoint_num_cpus=request.num_cpus,
                entrypoint_num_gpus=request.num_gpus,
                entrypoint_memory=request.memory_bytes,
                entrypoint_resources=request.resources,
            )
        return job

    def all(self) -> list[JobDetails]:
        """Return the submitted jobs, newest first."""
        with self._as_config_errors():
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, name: str) -> JobDetails:
        """Return a job by its name, or the newest job of a run, preferring jobs that have not ended.

        A run is given by its name, or by its storage and name, as in `s3://bucket/runs/digits`.

        A second job of a running run is refused and ends immediately, so the newest may not be the one that trains.

        Raises:
            ConfigError: there is none, or runs of that name have several storages; names the jobs.
        """
        jobs = self.all()
        for job in jobs:
            if job.submission_id == name:
                return job
        of_run = [job for job in jobs if name in ((job.metadata or {}).get(_RUN), _run_dir(job))]
        found = [job for job in of_run if not job.status.is_terminal()] or of_run
        if len({_run_dir(job) for job in found}) > 1:
            # Run names are often class names, which two users of a cluster may share.
            runs = "\n".join(f"  {job.submission_id}: {_run_dir(job)}" for job in found[:10])
            raise ConfigError(
                f"several runs at {self.address} are called {name}: give the name of a job, or the run with its "
                f"storage\n{runs}"
            )
        if found:
            return found[0]
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
            raise token_error(self.address) from error
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


def job_document(job: JobDetails) -> dict[str, Any]:
    """Return the document of `jobs show --json`. Values of environment variables are left out: they may be secrets."""
    environment = dict(job.runtime_env or {})
    return {
        **job_summary(job),
        "storage": (job.metadata or {}).get(_STORAGE),
        "message": job.message,
        "command": _command_of(job),
        "env_vars": sorted(environment.pop("env_vars", None) or {}),
        "runtime_env": environment,
        "driver_ip": getattr(job.driver_info, "node_ip_address", None),
    }


def job_page(job: JobDetails) -> str:
    """Return the page of `jobs show`."""
    document = job_document(job)
    began_s = (job.start_time or 0) / 1000
    ended_s = job.end_time / 1000 if job.end_time else time.time()
    run, storage = document["run"], document["storage"]
    facts = {
        "status": _outcome(job),
        "message": document["message"] if job.status.value != "RUNNING" else None,
        "run": f"{run}, its files: {storage.rstrip('/')}/{run}" if run and storage else run,
        "started": local_time(began_s) if began_s else None,
        "took": human_duration(ended_s - began_s) if began_s else None,
        "driver": document["driver_ip"],
        "command": document["command"],
        "variables": ", ".join(document["env_vars"]),
        "packages": ", ".join(_packages_of(document["runtime_env"])),
    }
    lines = [f"  {name:<11}{' '.join(str(value).split())}" for name, value in facts.items() if value]
    return "\n".join([str(job.submission_id), *lines])


def _command_of(job: JobDetails) -> str:
    """Return the command of a job, without the part that looks for the interpreter."""
    _, found, command = str(job.entrypoint).partition('; exec "$p" ')
    return f"python {command}" if found else str(job.entrypoint)


def _packages_of(runtime_env: dict[str, Any]) -> list[str]:
    given = runtime_env.get("pip") or runtime_env.get("uv") or []
    packages = given.get("packages", []) if isinstance(given, dict) else given
    return packages if isinstance(packages, list) else [str(packages)]


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


def _run_dir(job: JobDetails) -> str:
    """Return the storage and name of a job's run; empty for other jobs."""
    metadata = job.metadata or {}
    return join(metadata.get(_STORAGE, ""), metadata[_RUN]) if _RUN in metadata else ""
