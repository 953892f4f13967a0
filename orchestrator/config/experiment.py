"""`Experiment`, with `Retries`: frozen dataclasses, checked on construction."""

from __future__ import annotations

import re
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
from .scaling import Scaling

# Any phase may take this long on a busy machine.
_SHORTEST_HANG_S = 10
RAYS_BACKENDS = ("hccl", "tpu_dist")
"""Backends whose packages Ray Train loads in the workers, so that the driver need not know them."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
