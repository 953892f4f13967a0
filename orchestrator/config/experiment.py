"""`Experiment`, with `Scaling` and `Retries`: frozen dataclasses, checked on construction."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from headway.trainer.config import TrainerConfig
from headway.trainer.distributed.mesh_sizes import MeshSizes
from headway.trainer.distributed.world import check_backend, device_types
from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration
from headway.trainer.trainer import Trainer

from ..storage.folder import absolute, join

# Any phase may take this long on a busy machine.
_SHORTEST_HANG_S = 10
_Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
# Ray reserves this much of an accelerator type for a worker that must be on a machine with it.
_SOME = 0.001
RAYS_BACKENDS = ("hccl", "tpu_dist")
"""Backends whose packages Ray Train loads in the workers, so that the driver need not know them."""
_NOT_FOR_WORKERS = {
    "env_vars": "use env",
    "worker_process_setup_hook": (
        "Ray runs it only for a whole job, by `headway submit --runtime-env` or ray.init(runtime_env=...); for the "
        "workers, call the function in the trainer's on_fit_start or at the top of its file"
    ),
    "excludes": "Ray applies it only where it uploads a folder, for a whole job; use .rayignore",
    "java_jars": "workers run Python",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
        if not self.cpus_per_worker > 0:
            raise ConfigError(f"cpus_per_worker must be > 0, got {self.cpus_per_worker!r}")
        if self.gpus_per_worker is not None and self.gpus_per_worker < 0:
            raise ConfigError(f"gpus_per_worker must be >= 0, got {self.gpus_per_worker!r}")
        for name, amount in self.resources_per_worker.items():
            if name in ("CPU", "GPU"):
                raise ConfigError(f"resources_per_worker[{name!r}] is not allowed: use {name.lower()}s_per_worker")
            if amount < 0:
                raise ConfigError(f"resources_per_worker[{name!r}] must be >= 0, got {amount!r}")
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
    def is_single_worker(self) -> bool:
        """Whether there is at most one worker: a trial then trains in its own process."""
        return self.max_workers == 1

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


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often a run restarts after a failure.

    Each start of the run counts from zero, and so does each failure after 1,000 updates, or an hour of training, beyond
    the furthest step reached before. Errors that would recur are not retried: see `train/failures/budget.py`.

    Attributes:
        max_failures: retries after workers crashed, hung, or lost their connection to each other or to the storage;
            a failure of the whole group counts once.
        max_errors: retries after exceptions in training code, counted separately from failures of machines.
        max_preemptions: retries after preemptions with notice; None: unlimited.
        max_lost_nodes: retries after machines that vanished without notice; None: unlimited.
        hang_timeout: a time such as "10m": the attempt fails if a rank stays longer in one phase while others wait for
            it. "auto": learned from the duration of each phase. None: hangs are not detected.
        spares: whether each worker has an idle spare process (about 320 MB) with all imports done, which replaces it at
            the next restart. "auto": only if Ray is started for this run.

    Example:
        >>> retries = Retries(max_failures=1)
        >>> retries.max_failures, retries.max_errors
        (1, 3)
    """

    max_failures: int = 3
    max_errors: int = 3
    max_preemptions: int | None = None
    max_lost_nodes: int | None = 10
    hang_timeout: Duration | Literal["auto"] | None = "auto"
    spares: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.spares not in (True, False, "auto"):
            raise ConfigError(f'spares must be "auto", true or false, got {self.spares!r}')
        for name in ("max_failures", "max_errors", "max_preemptions", "max_lost_nodes"):
            value = getattr(self, name)
            if (value is None and name in ("max_preemptions", "max_lost_nodes")) or (type(value) is int and value >= 0):
                continue
            raise ConfigError(f"{name} must be an integer >= 0, got {value!r}")
        if self.hang_timeout not in ("auto", None):
            timeout = Duration.parse(self.hang_timeout)
            object.__setattr__(self, "hang_timeout", timeout)
            if timeout.unit != "seconds" or timeout.amount < _SHORTEST_HANG_S:
                raise ConfigError(
                    f'hang_timeout must be "auto", None or a time of at least 10s, got {self.hang_timeout}'
                )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The complete settings of a run, enough to start it again.

    Attributes:
        name: name of the run; its folder is `<storage>/<name>/`.
        trainer: the `Trainer` class.
        config: the config of the trainer.
        scaling: the workers.
        retries: the retries after failures.
        storage: folder or fsspec URI of the runs, visible to all machines. Made absolute.

    Example:
        >>> experiment = Experiment(name="digits", trainer=Digits, config=config, scaling=Scaling(workers=2))
        >>> experiment.run_dir.endswith("/runs/digits")  # result = fit(experiment)
        True
    """

    name: str
    trainer: type[Trainer[Any]]
    config: TrainerConfig
    scaling: Scaling = field(default_factory=Scaling)
    retries: Retries = field(default_factory=Retries)
    storage: str = "runs"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name must start with a letter or digit and contain only letters, digits and . _ -, got {self.name!r}"
            )
        if not (isinstance(self.trainer, type) and issubclass(self.trainer, Trainer)):
            raise ConfigError(f"trainer must be a subclass of Trainer, got {self.trainer!r}")
        if not isinstance(self.config, wanted := config_type(self.trainer)):
            raise ConfigError(
                f"config must be a {wanted.__name__} for {self.trainer.__name__}, got a {type(self.config).__name__}"
            )
        if not isinstance(self.storage, (str, Path)) or not str(self.storage):
            raise ConfigError(f"storage must be a folder or a URI, got {self.storage!r}")
        object.__setattr__(self, "storage", absolute(self.storage))
        if self.config.parallel.backend is not None:
            self._check_backend(self.config.parallel.backend)
        if self.scaling.evaluation_worker is not None:
            self._check_evaluation_worker()
        if self.scaling.is_elastic:
            self._check_elastic()
        else:
            MeshSizes.of(self.config.parallel, self.scaling.max_workers)

    def _check_backend(self, backend: str) -> None:
        """Refuse a backend that torch does not know, or that is for other devices than the workers have."""
        check_backend(backend, known=RAYS_BACKENDS)
        if backend in RAYS_BACKENDS:
            return
        types, gpus = device_types(backend), self.scaling.gpus_per_worker
        if gpus and types == {"cpu"}:
            raise ConfigError(
                f"config.parallel.backend={backend!r} is for CPUs, and each worker has {gpus:g} GPU: leave it out, or "
                "set scaling.gpus_per_worker=0"
            )
        has_other = any(name != "memory" and amount for name, amount in self.scaling.resources_per_worker.items())
        if gpus == 0 and "cpu" not in types and not has_other:
            raise ConfigError(
                f"config.parallel.backend={backend!r} is for {' and '.join(sorted(types))}, and the workers have "
                "CPUs only: set scaling.gpus_per_worker=1, or reserve their device, as in "
                'scaling.resources_per_worker={"HPU": 1}'
            )

    def _check_evaluation_worker(self) -> None:
        """Refuse settings with which training would wait for evaluations, or there were no checkpoints to evaluate."""
        config = self.config
        if config.evaluate_every is not None or config.evaluate_at_start:
            raise ConfigError(
                "scaling.evaluation_worker evaluates each checkpoint while training goes on: set "
                "config.evaluate_every=None and leave out evaluate_at_start, so that training does not wait for "
                "evaluations of its own"
            )
        if config.checkpoint.every is None:
            raise ConfigError(
                "scaling.evaluation_worker evaluates the checkpoints of the run, and config.checkpoint.every=None "
                "saves none before its end: set it to the interval of the evaluations"
            )

    def _check_elastic(self) -> None:
        """Refuse settings with which training would depend on the number of workers."""
        size, parallel, workers = self.config.global_batch_size, self.config.parallel, str(self.scaling)
        if size is None:
            raise ConfigError(
                f"config.global_batch_size is required with {workers}: it keeps the samples of an update independent "
                "of the number of workers"
            )
        if size < self.scaling.max_workers:
            raise ConfigError(
                f"config.global_batch_size={size} is less than one sample per worker with {workers}: raise it, or "
                "lower the maximum of scaling.workers"
            )
        fixed = {name: getattr(parallel, name) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
        if given := ", ".join(f"{name}={size}" for name, size in fixed.items() if size not in (None, 1)):
            raise ConfigError(
                f"config.parallel has groups of a fixed size ({given}), into which {workers} cannot always be divided: "
                "use strategy fsdp without sizes, or a fixed number in scaling.workers"
            )

    @property
    def run_dir(self) -> str:
        """The run's folder, an absolute path or a URI."""
        return join(self.storage, self.name)


def config_type(trainer: type[Trainer[Any]]) -> type[TrainerConfig]:
    """Return the config class of a trainer: the `X` of its `Trainer[X]`."""
    for each in trainer.__mro__:
        for base in each.__dict__.get("__orig_bases__", ()):
            origin, arguments = get_origin(base), get_args(base)
            if isinstance(origin, type) and issubclass(origin, Trainer) and isinstance(arguments[0], type):
                found: type[TrainerConfig] = arguments[0]
                return found
    return TrainerConfig
