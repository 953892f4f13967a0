"""`Scaling`: the workers of a run. Imports neither torch nor the trainer; Ray Train's controller waits for imports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration

_Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
# Ray reserves this much of an accelerator type for a worker that must be on a machine with it.
_SOME = 0.001
_NOT_FOR_WORKERS = {
    "env_vars": "use env",
    "worker_process_setup_hook": (
        "Ray runs it only for a whole job, by `headway submit --runtime-env` or ray.init(runtime_env=...); for the "
        "workers, call the function in the trainer's on_fit_start or at the top of its file"
    ),
    "excludes": "Ray applies it only where it uploads a folder, for a whole job; use .rayignore",
    "java_jars": "workers run Python",
}


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The number of workers and their resources. `str()` gives the number, as in "2 to 8 workers".

    Attributes:
        workers: training processes, one rank each. A range such as (2, 8) makes the run elastic: it uses as many
            workers as fit, and rescales when machines are added or lost. Global batch, schedule and data order do
            not change.
        cpus_per_worker: CPUs that a worker reserves, and its torch threads; below 1, workers share a CPU.
        gpus_per_worker: GPUs that a worker reserves; with GPUs, ranks communicate by NCCL instead of Gloo. Set
            `config.parallel.backend` for Intel GPUs. None: in `fit`, 1 if the machine or the connected cluster has a
            GPU for each worker when the run starts, else 0. Set it for a cluster that starts machines with GPUs on
            demand.
        resources_per_worker: other resources that a worker reserves, by Ray's names: "memory" in bytes, an accelerator
            such as "HPU", "NPU" or "TPU" together with `config.parallel.backend`, or custom.
        accelerator_type: the GPU that each worker needs, by Ray's name for it, such as "H100".
        placement_strategy: how Ray places the workers: "PACK", "SPREAD", "STRICT_PACK" (one node) or "STRICT_SPREAD"
            (a node each).
        label_selector: labels that the nodes of the workers must have, such as {"ray.io/market-type": "!spot"}.
        env: environment variables of the workers, such as {"NCCL_SOCKET_IFNAME": "eth0"}. They are in the record.
        runtime_env: Ray's `runtime_env` of the workers, such as {"pip": ["einops"]}; without spare processes. Fields
            that Ray applies to whole jobs only are refused, such as `worker_process_setup_hook`.
        evaluation_worker: resources of one more worker, such as {"CPU": 4, "GPU": 1}, which evaluates the checkpoints
            of the run while the others go on training. Needs `evaluate_every=None` in the config. None: the workers
            pause to evaluate.
        wait: timeout for resources that the cluster does not have yet; None: missing resources are an error.
        grow_after: in an elastic run, how long more workers must fit before the run saves and scales up.

    Example:
        >>> Scaling(workers=4, gpus_per_worker=1).total_resources
        {'CPU': 4, 'GPU': 4}
        >>> str(Scaling(workers=(2, 8)))
        '2 to 8 workers'
    """

    workers: int | tuple[int, int] = 1
    cpus_per_worker: float = 1
    gpus_per_worker: float | None = None
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    accelerator_type: str | None = None
    placement_strategy: _Placement = "PACK"
    label_selector: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    evaluation_worker: dict[str, float] | None = None
    wait: Duration | None = None
    grow_after: Duration = Duration(60, "seconds")

    def __post_init__(self) -> None:
        for name in ("wait", "grow_after"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Duration.parse(getattr(self, name)))
                if getattr(self, name).unit != "seconds":
                    raise ConfigError(f'{name} must be a time such as "10m", got {getattr(self, name)}')
        if isinstance(self.workers, (tuple, list)):
            object.__setattr__(self, "workers", _range(self.workers))
        elif type(self.workers) is not int or self.workers < 1:
            raise ConfigError(f"workers must be an integer >= 1, got {self.workers!r}")
        self._check_types()
        if not self.cpus_per_worker > 0:
            raise ConfigError(f"cpus_per_worker must be > 0, got {self.cpus_per_worker!r}")
        if self.gpus_per_worker is not None and self.gpus_per_worker < 0:
            raise ConfigError(f"gpus_per_worker must be >= 0, got {self.gpus_per_worker!r}")
        for name, amount in self.resources_per_worker.items():
            if name in ("CPU", "GPU"):
                raise ConfigError(f"resources_per_worker[{name!r}] is not allowed: use {name.lower()}s_per_worker")
            if amount < 0:
                raise ConfigError(f"resources_per_worker[{name!r}] must be >= 0, got {amount!r}")
        if self.max_workers > 1 and self.resources_per_worker.get("TPU"):
            raise ConfigError(
                f"resources_per_worker['TPU'] needs workers=1, got {self}: for several, which Ray Train places by "
                "topology, use TorchTrainer(train_loop(experiment), scaling_config=ScalingConfig(use_tpu=True, ...))"
            )
        if self.placement_strategy not in get_args(_Placement):
            raise ConfigError(
                f"placement_strategy must be {', '.join(get_args(_Placement))}, got {self.placement_strategy!r}"
            )
        for name in ("label_selector", "env"):
            for key, value in getattr(self, name).items():
                if not isinstance(value, str):
                    raise ConfigError(f"{name}[{key!r}] must be a string, got {value!r}: write it in quotes")
        _check_runtime_env(self.runtime_env)
        for name, amount in (self.evaluation_worker or {}).items():
            if not amount > 0:
                raise ConfigError(f"evaluation_worker[{name!r}] must be > 0, got {amount!r}")
        if self.evaluation_worker == {}:
            raise ConfigError('evaluation_worker must name resources, such as {"CPU": 1}, got {}')

    def _check_types(self) -> None:
        """Check the types of what is counted or looked up by name."""
        dicts = {
            name: getattr(self, name) for name in ("resources_per_worker", "label_selector", "env", "runtime_env")
        } | ({} if self.evaluation_worker is None else {"evaluation_worker": self.evaluation_worker})
        for name, value in dicts.items():
            if not isinstance(value, Mapping):
                all_workers = ", which is for all workers" if name == "label_selector" else ""
                raise ConfigError(f"{name} must be a dict{all_workers}, got {value!r}")
        counted: dict[str, Any] = {
            "cpus_per_worker": self.cpus_per_worker,
            "gpus_per_worker": self.gpus_per_worker or 0,
        }
        for name in ("resources_per_worker", "evaluation_worker"):
            counted |= {f"{name}[{key!r}]": amount for key, amount in dicts.get(name, {}).items()}
        for name, amount in counted.items():
            if not isinstance(amount, Real):
                raise ConfigError(f"{name} must be a number, got {amount!r}")

    @property
    def worker_resources(self) -> dict[str, float]:
        """Resources that one worker reserves, by Ray's names."""
        gpu = {"GPU": self.gpus_per_worker} if self.gpus_per_worker else {}
        accelerator = {f"accelerator_type:{self.accelerator_type}": _SOME} if self.accelerator_type else {}
        return {"CPU": self.cpus_per_worker, **gpu, **accelerator, **self.resources_per_worker}

    @property
    def min_workers(self) -> int:
        """The fewest workers."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def trains_in_trial(self) -> bool:
        """Whether a trial trains in its own process: one worker, and neither `env` nor `runtime_env` is set.

        Otherwise Ray Train starts the workers of the trial.
        """
        return self.max_workers == 1 and not self.env and not self.runtime_env

    @property
    def max_workers(self) -> int:
        """The most workers."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may vary."""
        return self.min_workers < self.max_workers

    def __str__(self) -> str:
        """The number of workers: "2 workers", "2 to 8 workers"."""
        count = f"{self.min_workers} to {self.max_workers}" if self.is_elastic else str(self.max_workers)
        return f"{count} worker{'s'[: self.max_workers > 1]}"

    @property
    def total_resources(self) -> dict[str, float]:
        """Resources that all workers reserve, by Ray's names; in an elastic run, the most workers."""
        total = self.reserved_by(self.max_workers)
        for name, amount in (self.evaluation_worker or {}).items():
            total[name] = total.get(name, 0) + amount
        return total

    @property
    def wait_timeout_s(self) -> float:
        """Timeout for workers: `wait`, or ten minutes if the cluster is large enough."""
        return self.wait.amount if self.wait else 600.0

    def reserved_by(self, workers: int) -> dict[str, float]:
        """Return the resources that this many training workers reserve, by Ray's names."""
        return {name: amount * workers for name, amount in self.worker_resources.items()}


def _check_runtime_env(found: Mapping[str, Any]) -> None:
    """Check a `runtime_env` of workers. Ray ignores some of its fields for them, or refuses them when they start."""
    for name, instead in _NOT_FOR_WORKERS.items():
        if name in found:
            raise ConfigError(f"runtime_env[{name!r}] is not allowed: {instead}")
    if "eager_install" in (found.get("config") or {}):
        raise ConfigError("runtime_env['config']['eager_install'] has no effect on workers: leave it out")
    modules = found.get("py_modules") or ()
    for name, path in [("working_dir", found.get("working_dir")), *(("py_modules", each) for each in modules)]:
        if path is not None and "://" not in str(path):
            raise ConfigError(
                f"runtime_env[{name!r}] must be a URI such as s3://bucket/code.zip, got {str(path)!r}: Ray uploads "
                "folders for a whole job only, by `headway submit` or ray.init(runtime_env=...)"
            )
    if not found:
        return
    from ray.runtime_env import RuntimeEnv

    # Plugins of a cluster have names of their own.
    unknown = sorted(set(found) - RuntimeEnv.known_fields) if "RAY_RUNTIME_ENV_PLUGINS" not in os.environ else ()
    if unknown:
        known = ", ".join(sorted({each for each in RuntimeEnv.known_fields if each[0] != "_"} - {*_NOT_FOR_WORKERS}))
        raise ConfigError(f"runtime_env[{unknown[0]!r}] is unknown to Ray, which would ignore it: use {known}")
    try:
        RuntimeEnv(**found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"runtime_env is invalid: {' '.join(str(error).split())}") from error


def _range(workers: Sequence[int]) -> int | tuple[int, int]:
    if len(workers) != 2 or any(type(each) is not int for each in workers) or not 1 <= workers[0] <= workers[1]:
        raise ConfigError(
            "workers must be an integer >= 1, or a range (fewest, most), written (2, 8) in Python and 2..8 on the "
            f"command line, got {workers!r}"
        )
    return workers[0] if workers[0] == workers[1] else (workers[0], workers[1])
