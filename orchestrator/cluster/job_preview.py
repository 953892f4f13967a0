"""The page of `headway submit --dry-run`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from headway.trainer.metrics.units import human_bytes

from ..config.experiment import Experiment
from .job_command import JobRequest
from .upload import survey_upload

_MOST_NAMED = 10


def job_preview(experiment: Experiment, arguments: Sequence[str], request: JobRequest) -> str:
    """Return what `submit` would send, without the values of environment variables, which may be secrets."""
    upload = survey_upload(Path.cwd())
    excluded = [*upload.excluded[:_MOST_NAMED], *(["..."] if len(upload.excluded) > _MOST_NAMED else [])]
    reserved = {
        "CPU": request.num_cpus, "GPU": request.num_gpus, "bytes of memory": request.memory_bytes,
        **(request.resources or {}),
    }  # fmt: skip
    environment = {name: value for name, value in request.runtime_env.items() if name not in ("env_vars", "pip")}
    facts = {
        "command": shlex.join(["headway", *arguments]),
        "files": experiment.run_dir,
        "upload": f"{Path.cwd()}: {upload.files} files, {human_bytes(upload.size_bytes)}",
        "not sent": ", ".join(excluded),
        "variables": ", ".join(sorted(request.runtime_env.get("env_vars", {}))),
        "packages": ", ".join(map(str, request.runtime_env.get("pip", ()))),
        "runtime env": str(environment) if environment else "",
        "driver": ", ".join(f"{amount:g} {name}" for name, amount in reserved.items() if amount is not None),
    }
    lines = [f"  {name:<13}{value}" for name, value in facts.items() if value]
    return "\n".join([f"{experiment.name}: would be submitted", *lines])
