"""The command of a job, its environment and its resources, checked before a cluster is contacted."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headway.trainer.errors import ConfigError

from ..config.coerce import quote
from ..config.experiment import Experiment

# By default `ray job stop` kills the driver after 3 s, too soon to save a checkpoint.
_SAVES_WITHIN_S = 600
_INSTALLERS = ("pip", "uv", "conda")

# `python` of a runtime environment or of the PATH if it has Ray; else the interpreter of the environment from which the
# parent process, Ray's supervisor of the job, has loaded Ray.
_FIND_PYTHON = (
    """p=python; $p -c 'import importlib.util as u, sys; sys.exit(u.find_spec("ray") is None)' 2>/dev/null || """
    r"""{ p=$(sed -n 's|.* \(/.*\)/lib[^/]*/python[^/]*/[^/]*-packages/ray/_raylet.so$|\1/bin/python|p' """
    """/proc/$PPID/maps | head -n 1); [ -x "$p" ] || p=$(readlink /proc/$PPID/exe); }; """
)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What a job needs besides its command.

    Attributes:
        runtime_env: Ray's runtime environment, without the copies of the working directory and of Headway.
        num_cpus, num_gpus, memory_bytes: reserved on the node that runs the driver; None reserves nothing.
        resources: other resources of that node, by name.
    """

    runtime_env: dict[str, Any] = field(default_factory=dict)
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory_bytes: int | None = None
    resources: dict[str, float] | None = None


def job_arguments(
    command: str, target: str, experiment: Experiment, *, overrides: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of `headway` that train an experiment in a copy of the current directory.

    Args:
        command: "fit" or "sweep".
        target: the experiment's target, as given here.
        experiment: the experiment that it resolves to here.
        overrides: overrides that it was resolved with.
        options: options of the command.

    Raises:
        ConfigError: the driver would not find the target, or its storage would be deleted with the copy.
    """
    _check_storage(experiment, overrides)
    others = [each for each in overrides if not each.startswith("storage=")]
    return [command, *options, _from_here(target), *others, f"storage={quote(experiment.storage)}"]


def entrypoint(arguments: Sequence[str]) -> str:
    """Return the shell command of a job: Headway, run by the interpreter that runs Ray on that node."""
    return f'{_FIND_PYTHON}exec "$p" -m headway.orchestrator {shlex.join(arguments)}'


def runtime_env_from_options(
    *,
    base: str | None = None,
    pip: Sequence[str] = (),
    requirements: str | None = None,
    env_file: str | None = None,
    env: Sequence[str] = (),
) -> dict[str, Any]:
    """Return Ray's runtime environment from options; later ones take precedence: base, env_file, env.

    Args:
        base: a runtime environment: a YAML or JSON file, or JSON.
        pip: requirements to install for the job.
        requirements: file of requirements to install for the job.
        env_file: file with lines NAME=VALUE.
        env: as for `env_from_options`.

    Raises:
        ConfigError: a file cannot be read, or an option is invalid; names the option.
    """
    found = _base(base) if base else {}
    for name in ("working_dir", "entrypoint"):
        if name in found:
            raise ConfigError(f"--runtime-env: {name} cannot be set there: use --working-dir")
    if packages := [*pip, *(_requirements(requirements) if requirements else ())]:
        if given := [name for name in _INSTALLERS if name in found]:
            raise ConfigError(f"--pip and --requirements cannot be combined with {given[0]} of --runtime-env")
        found["pip"] = packages
    variables = {str(name): str(value) for name, value in (found.get("env_vars") or {}).items()}
    variables |= _variables(env_file) if env_file else {}
    variables |= env_from_options(env)
    # Shown at once, and enough time to save when the job is stopped; both may be overridden.
    defaults = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(_SAVES_WITHIN_S)}
    found["env_vars"] = {**defaults, **variables}
    _check(found)
    return found


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


def resources_from_option(text: str | None) -> dict[str, float] | None:
    """Return resources by name from JSON.

    Raises:
        ConfigError: it is no JSON object of numbers.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
        return {str(name): float(amount) for name, amount in found.items()}
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(
            f"--entrypoint-resources must be a JSON object of numbers, e.g. '{{\"disk\": 1}}', got {text!r}"
        ) from None


def dashboard_url(address: str) -> str:
    """Return the URL of a dashboard. Without http:// Ray would take the address for that of its control service."""
    return address if "://" in address or not address else f"http://{address}"


def _check(runtime_env: dict[str, Any]) -> None:
    from ray.runtime_env import RuntimeEnv

    try:
        RuntimeEnv(**runtime_env)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the runtime environment is invalid: {error}") from error


def _base(given: str) -> dict[str, Any]:
    if given.lstrip().startswith("{"):
        text, source = given, "--runtime-env"
    else:
        text, source = _read(given, "--runtime-env"), f"--runtime-env {given}"
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not isinstance(found.get("env_vars") or {}, dict):
        raise ConfigError(f"{source} must be a mapping, as in {{env_vars: {{NAME: value}}}}")
    return {str(name): value for name, value in found.items()}


def _requirements(path: str) -> list[str]:
    lines = (line.split(" #")[0].strip() for line in _read(path, "--requirements").splitlines())
    packages = [line for line in lines if line and not line.startswith("#")]
    # The nodes do not have files that a requirements file refers to.
    if nested := [
        line for line in packages if line.startswith(("-r", "-c", "--requirement", "--constraint", "-e", "."))
    ]:
        raise ConfigError(
            f"--requirements {path}: {nested[0]!r} refers to a file that the nodes do not have: inline it"
        )
    return packages


def _variables(path: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(_read(path, "--env-file").splitlines(), start=1):
        line = line.strip().removeprefix("export ")
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env-file {path}, line {number}: write NAME=VALUE")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {path} ({error})") from None


def _from_here(target: str) -> str:
    """Return a target relative to the current directory, of which the driver gets a copy."""
    place, colon, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if not place.endswith(".py"):
        return target
    here, file = Path.cwd().resolve(), Path(place).resolve()
    if not file.is_relative_to(here):
        raise ConfigError(
            f"{place} is not in {here}, and the cluster gets a copy of the current directory only: change to the "
            "folder that contains the file, or name it with --working-dir"
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
