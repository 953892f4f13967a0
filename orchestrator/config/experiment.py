"""What to train, where, and how often to try again: one frozen object that refuses nonsense when it is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from headway.trainer.config import TrainerConfig
from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration
from headway.trainer.trainer import Trainer

from ..storage.folder import absolute, join

# Less than this a busy machine may take for anything.
_SHORTEST_HANG_S = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How many workers there are, and what each of them has.

    Attributes:
        workers: training processes, one rank each; (2, 8) is as many of 2 to 8 as there is room for: the run begins
            with those, and changes as machines come and go. Global batch, schedule and order of the data stay.
        cpus_per_worker: CPUs that a worker reserves, and threads that torch takes on it; below 1 workers share a CPU.
        gpus_per_worker: GPUs that a worker reserves; with any, ranks talk by NCCL instead of Gloo.
        resources_per_worker: other things that a worker reserves, by Ray's names ("memory" in bytes, or your own).
        wait: how long to wait for machines that the cluster does not have yet; None: what is missing is an error.
        grow_after: where `workers` is a range: for how long there must have been room for more workers before the run
            saves and goes on with them.

    Example:
        >>> Scaling(workers=4, gpus_per_worker=1).total_resources
        {'CPU': 4, 'GPU': 4}
        >>> str(Scaling(workers=(2, 8)))
        '2 to 8 workers'
    """

    workers: int | tuple[int, int] = 1
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    wait: Duration | None = None
    grow_after: Duration = Duration(60, "seconds")

    def __post_init__(self) -> None:
        for name in ("wait", "grow_after"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Duration.parse(getattr(self, name)))
                if getattr(self, name).unit != "seconds":
                    raise ConfigError(f'{name} is a time such as "10m", not {getattr(self, name)}')
        if isinstance(self.workers, (tuple, list)):
            object.__setattr__(self, "workers", _range(self.workers))
        elif type(self.workers) is not int or self.workers < 1:
            raise ConfigError(f"workers is a whole number from 1, not {self.workers!r}")
        if not self.cpus_per_worker > 0:
            raise ConfigError(f"cpus_per_worker is above zero, not {self.cpus_per_worker!r}")
        if self.gpus_per_worker < 0 or any(amount < 0 for amount in self.resources_per_worker.values()):
            raise ConfigError("a worker cannot reserve less than nothing")
        if doubled := {"CPU", "GPU"} & set(self.resources_per_worker):
            raise ConfigError(f"{' and '.join(sorted(doubled))}: use cpus_per_worker and gpus_per_worker")

    @property
    def worker_resources(self) -> dict[str, float]:
        """What one worker reserves, by Ray's names."""
        gpu = {"GPU": self.gpus_per_worker} if self.gpus_per_worker else {}
        return {"CPU": self.cpus_per_worker, **gpu, **self.resources_per_worker}

    @property
    def min_workers(self) -> int:
        """The fewest that train."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def is_single_worker(self) -> bool:
        """Whether there is never more than one worker: a trial then trains in the process that it has anyway."""
        return self.max_workers == 1

    @property
    def max_workers(self) -> int:
        """The most that train."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def is_elastic(self) -> bool:
        """Whether their number may vary."""
        return self.min_workers < self.max_workers

    def __str__(self) -> str:
        """The number of workers: "2 workers", "2 to 8 workers"."""
        count = f"{self.min_workers} to {self.max_workers}" if self.is_elastic else str(self.max_workers)
        return f"{count} worker{'s'[: self.max_workers > 1]}"

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers together reserve, by Ray's names; of a number that may vary, the most."""
        return self.reserved_by(self.max_workers)

    @property
    def wait_timeout_s(self) -> float:
        """For how long workers are waited for: `wait`, or ten minutes for those that the cluster could hold."""
        return self.wait.amount if self.wait else 600.0

    def reserved_by(self, workers: int) -> dict[str, float]:
        """What so many workers reserve, by Ray's names."""
        return {name: amount * workers for name, amount in self.worker_resources.items()}


def _range(workers: Sequence[int]) -> int | tuple[int, int]:
    if len(workers) != 2 or any(type(each) is not int for each in workers) or not 1 <= workers[0] <= workers[1]:
        raise ConfigError(
            "workers is a whole number from 1, or the fewest and the most of them, as (2, 8) in Python and 2..8 on the "
            f"command line, not {workers!r}"
        )
    return workers[0] if workers[0] == workers[1] else (workers[0], workers[1])


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often a run goes on after its workers are gone. Counted anew each time that the run is started.

    An error that would only come again is never retried: see `failures.py`.

    Attributes:
        max_failures: workers that crashed, hung, or lost each other or the storage; one failure of the whole group
            counts once.
        max_errors: exceptions of the code that trains, counted apart: a machine that is unwell takes no retry from it.
        max_preemptions: machines that were taken away with notice; None: as often as it happens.
        hang_timeout: a time such as "10m": a rank that stays so long in one phase of its training, while others wait
            for it, hangs, and the attempt ends as a failure. "auto" learns how long each phase takes. None: never.
        spares: whether each worker has an idle process beside it that has imported what it needs, and takes its place
            at the next start; of about 320 MB. "auto": where Ray is started for this run alone.

    Example:
        >>> Retries(max_failures=1)
        Retries(max_failures=1, max_errors=3, max_preemptions=None, hang_timeout='auto', spares='auto')
    """

    max_failures: int = 3
    max_errors: int = 3
    max_preemptions: int | None = None
    hang_timeout: Duration | Literal["auto"] | None = "auto"
    spares: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.spares not in (True, False, "auto"):
            raise ConfigError(f'spares is "auto", true or false, not {self.spares!r}')
        for name in ("max_failures", "max_errors", "max_preemptions"):
            value = getattr(self, name)
            if (value is None and name == "max_preemptions") or (type(value) is int and value >= 0):
                continue
            raise ConfigError(f"{name} is a whole number from 0, not {value!r}")
        if self.hang_timeout not in ("auto", None):
            timeout = Duration.parse(self.hang_timeout)
            object.__setattr__(self, "hang_timeout", timeout)
            if timeout.unit != "seconds" or timeout.amount < _SHORTEST_HANG_S:
                raise ConfigError(f'hang_timeout is "auto", None or a time of at least 10s, not {self.hang_timeout}')


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that was asked for: enough to start the same run again.

    Attributes:
        name: of the run; its files lie in `<storage>/<name>/`.
        trainer: the class to train with; it must be a `Trainer`.
        config: what it is told.
        scaling: the workers.
        retries: what happens when workers fail.
        storage: where runs lie: a folder that all machines see, or an fsspec URI. Made absolute.

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
                f"{self.name!r} cannot name a run: begin with a letter or digit, go on with letters, digits and . _ -"
            )
        if not (isinstance(self.trainer, type) and issubclass(self.trainer, Trainer)):
            raise ConfigError(f"trainer is a class that inherits from Trainer, not {self.trainer!r}")
        if not isinstance(self.config, wanted := config_type(self.trainer)):
            raise ConfigError(f"{self.trainer.__name__} takes a {wanted.__name__}, not a {type(self.config).__name__}")
        if not isinstance(self.storage, (str, Path)) or not str(self.storage):
            raise ConfigError(f"storage is a folder or a URI, not {self.storage!r}")
        object.__setattr__(self, "storage", absolute(self.storage))
        if self.scaling.is_elastic:
            self._check_elastic()

    def _check_elastic(self) -> None:
        """Refuses what would not be the same training on any number of workers."""
        size, parallel, workers = self.config.global_batch_size, self.config.parallel, str(self.scaling)
        if size is None:
            raise ConfigError(
                f"with {workers} an update would take now more samples and now fewer: set "
                "config.global_batch_size, the samples of one update over all of them"
            )
        if size < self.scaling.max_workers:
            raise ConfigError(
                f"config.global_batch_size={size} is less than one sample for each of {workers}: raise it, or lower "
                "the most in scaling.workers"
            )
        if parallel.strategy == "hsdp":
            raise ConfigError(
                f"config.parallel.strategy=hsdp shards inside groups of {parallel.shard_size} ranks, which {workers} "
                "cannot always be dealt to: use fsdp, or one number in scaling.workers"
            )

    @property
    def run_dir(self) -> str:
        """The folder of the run: an absolute path or a URI."""
        return join(self.storage, self.name)


def config_type(trainer: type[Trainer[Any]]) -> type[TrainerConfig]:
    """Returns the config class that a trainer was written for: the `X` of its `Trainer[X]`."""
    for each in trainer.__mro__:
        for base in each.__dict__.get("__orig_bases__", ()):
            origin, arguments = get_origin(base), get_args(base)
            if isinstance(origin, type) and issubclass(origin, Trainer) and isinstance(arguments[0], type):
                found: type[TrainerConfig] = arguments[0]
                return found
    return TrainerConfig
