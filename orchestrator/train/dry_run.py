"""`plan(experiment)`: estimate what `fit` would train, use and write, without starting it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from headway.trainer.distributed.mesh_sizes import MeshSizes
from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration
from headway.trainer.loop.run_state import COMPONENTS
from headway.trainer.metrics.units import human_bytes
from headway.trainer.setup.dry_run import DataSize, Estimate

from ..cluster.ray_env import quiet_environment
from ..config.experiment import Experiment
from ..runs.open import preview_run
from ..runs.resume import ResumeOptions
from ..storage.folder import Folder
from .fit import rank0_world
from .step_check import check_step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run. `str()` gives the page that `headway fit --dry-run` prints.

    Attributes:
        experiment: the run.
        estimate: sizes and counts of what it trains.
        resumes: whether a run of this name exists, which `fit` would resume.
        is_finished: whether that run is finished, so that `fit` would train nothing.
        step: the metrics of one step on the CPU; None if none was made.
    """

    experiment: Experiment
    estimate: Estimate
    resumes: bool
    is_finished: bool = False
    step: dict[str, float] | None = None

    @property
    def epochs(self) -> float | None:
        """Passes over the training data, if known."""
        in_epoch = self._steps_in_epoch
        total = self.estimate.total_steps
        return None if total is None or not in_epoch else total / in_epoch

    @property
    def num_evaluations(self) -> int | None:
        """Number of evaluations, including the one at the end. None if their schedule depends on time."""
        config = self.experiment.config
        times = self._times(config.evaluate_every, at_end=True) if self.estimate.validation else 0
        return times + 1 if times and config.evaluate_at_start else times

    @property
    def num_checkpoints(self) -> int | None:
        """Number of checkpoints written in all. None if their schedule depends on time."""
        config = self.experiment.config.checkpoint
        return self._times(config.every, at_end=config.at_end)

    @property
    def storage_bytes(self) -> int | None:
        """Approximate bytes of the checkpoints that are kept; None if unknown."""
        each, config = self.estimate.checkpoint_bytes, self.experiment.config.checkpoint
        number = self.num_checkpoints
        if config.keep_last != "all":
            if config.keep_every_time is not None:
                return None
            # The best checkpoint is usually also one of the last.
            best = config.keep_best - 1 if self.estimate.validation and config.keep_best else 0
            kept = config.keep_last + best + (self._times(config.keep_every, at_end=False) or 0)
            number = min(kept, number or kept)
        return None if each is None or number is None else each * number

    @property
    def _steps_in_epoch(self) -> int | None:
        of_config, of_data = self.experiment.config.steps_per_epoch, self.estimate.train.steps
        return min((each for each in (of_config, of_data) if each), default=None)

    def _times(self, every: Duration | None, *, at_end: bool) -> int | None:
        total = self.estimate.total_steps
        if every is None:
            return int(at_end)
        if every.unit == "seconds" or total is None:
            return None
        if every.unit == "epochs":
            if not self._steps_in_epoch:
                return None
            steps = int(every.amount) * self._steps_in_epoch
        else:
            steps = int(every.amount)
        return total // steps + int(at_end and total % steps > 0)

    def __str__(self) -> str:
        state = "is finished: nothing to train" if self.is_finished else "resumes" if self.resumes else "new"
        lines = [f"{self.experiment.name}: {state}; its files: {self.experiment.run_dir}"]
        lines += [f"  {label:<13}{fact}" for label, fact in _facts(self)]
        return "\n".join(lines)


def plan(
    experiment: Experiment,
    *,
    resume: str = "auto",
    restore: Collection[str] = COMPONENTS,
    accept_changes: bool = False,
    step: bool = False,
) -> Plan:
    """Return what `fit` would do. Starts no Ray and no process group, allocates no weights, and writes nothing.

    Args:
        experiment: what to train.
        resume: as that of `fit`.
        restore: as that of `fit`.
        accept_changes: as that of `fit`.
        step: makes one update and evaluates one batch in this process on the CPU, as `Trainer.check_step` does; this
            does allocate weights.

    Raises:
        ConfigError: as `fit` does: the config, the data, the checkpoint, or the resources of this machine.
        StepError: the step fails; the message has the lines of the user's code.
        RunConflictError: as `fit` does: the run has another config, or is being trained.
        StorageError: the storage cannot be written.
    """
    quiet_environment()
    from ..cluster.connect import check_resources, with_gpus

    experiment = replace(experiment, scaling=with_gpus(experiment.scaling))
    ResumeOptions.checked(resume, restore, accept_changes=accept_changes)
    check_resources(experiment.scaling)
    Folder(experiment.run_dir).check_writable()
    found = preview_run(experiment, accept_changes=accept_changes)
    try:
        most, fewest = experiment.scaling.max_workers, experiment.scaling.min_workers
        if most > fewest:
            experiment.trainer(experiment.config, world=rank0_world(experiment, most)).check()
        # With the fewest ranks, each needs the most memory.
        estimate = experiment.trainer(experiment.config, world=rank0_world(experiment, fewest)).estimate()
    except ConfigError:
        raise
    except Exception as error:
        if type(error).__module__.startswith("headway."):
            raise ConfigError(str(error)) from error
        raise
    return Plan(
        experiment=experiment,
        estimate=estimate,
        resumes=found is not None,
        is_finished=found is not None and found.state == "finished",
        step=check_step(experiment) if step else None,
    )


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    scaling, config, estimate = plan.experiment.scaling, plan.experiment.config, plan.estimate
    each = ", ".join(f"{amount:g} {name}" for name, amount in scaling.worker_resources.items())
    yield "workers", f"{str(scaling).split(' worker')[0]}, each with {each}"
    if scaling.evaluation_worker is not None:
        evaluates = ", ".join(f"{amount:g} {name}" for name, amount in scaling.evaluation_worker.items())
        yield "evaluation", f"of each checkpoint, in one more worker with {evaluates}, while training goes on"
    yield "strategy", _strategy(plan.experiment)
    yield "precision", config.precision + (", linear layers in float8" if config.float8 else "")
    for name, size in estimate.models.items():
        frozen = f", {size.frozen:,} of them frozen" if size.frozen else ""
        units = _many(size.blocks, "block") if size.blocks else "one block"
        weights = f"{_many(size.parameters, 'parameter')}{frozen}, {_about(size.parameter_bytes)}"
        yield name, f"{size.kind}, {weights}" + (f", in {units}" if config.parallel.strategy != "none" else "")
    state = estimate.optimizer_bytes
    for name, kind in estimate.optimizers.items():
        yield name, kind
    yield "batch", _batch(plan.experiment, plan.estimate.train)
    dropped = f", {estimate.train.dropped:,} left out" if estimate.train.dropped else ""
    yield (
        "data",
        f"{_amount(estimate.train)} an epoch{dropped}; resume guarantee: {estimate.train.guarantee}",
    )
    yield "steps", _steps(plan)
    yield "evaluation", _evaluation(plan)
    yield "checkpoints", _checkpoints(plan)
    memory = estimate.memory
    known = [("weights", memory.parameters), ("gradients", memory.gradients)]
    known += [("optimizer", memory.optimizer)] if memory.optimizer is not None else []
    known += [(name, size) for name, size in (("buffers", memory.buffers), ("gathered", memory.gathered)) if size]
    yield (
        "memory",
        f"{_about(memory.total)} per rank: {' + '.join(f'{name} {_about(size)}' for name, size in known)}",
    )
    if memory.offloaded:
        yield "", "of which weights, gradients and optimizer in CPU memory"
    if state is None:
        yield "", f"and the state of the optimizer, which is unknown ({estimate.unknown})"
    yield "", "and activations, which grow with the micro-batch, and libraries"
    if plan.step is not None:
        losses = ", ".join(f"{name} {value:.4g}" for name, value in plan.step.items() if name.endswith("loss"))
        evaluated = " and evaluated" if estimate.validation else ""
        yield "step", f"made{evaluated} on the CPU{': ' if losses else ''}{losses}"


def _strategy(experiment: Experiment) -> str:
    workers, parallel = experiment.scaling.max_workers, experiment.config.parallel
    over = f" over {str(experiment.scaling).replace('worker', 'rank')}"
    over = over if workers > 1 else ": one rank trains the plain model"
    if workers > 1:
        sizes = MeshSizes.of(parallel, workers)
        if parallel.strategy == "hsdp":
            over += f", sharded inside groups of {sizes.dp_shard}"
        over += f", layers divided over {sizes.tp}" if sizes.tp > 1 else ""
        over += f", sequences divided over {sizes.cp}" if sizes.cp > 1 else ""
    if parallel.activation_checkpointing != "none":
        over += f"; activation checkpointing {parallel.activation_checkpointing}"
    if parallel.cpu_offload and workers > 1:
        over += "; offloaded to the CPU"
    return parallel.strategy + over + ("; compiled" if parallel.compile else "")


def _batch(experiment: Experiment, data: DataSize) -> str:
    config, scaling = experiment.config, experiment.scaling
    if config.global_batch_size is None:
        return f"batches of the data, {config.gradient_accumulation_steps:,} on each rank per step"
    shares = []
    for workers in sorted({scaling.min_workers, scaling.max_workers}):
        share = math.ceil(config.global_batch_size / workers)
        micro = min(config.micro_batch_size or data.micro_batch_size or share, share)
        passes = _many(math.ceil(share / micro), "micro-batch", "micro-batches")
        shares.append(f"on each of {_many(workers, 'rank')} {passes} of at most {micro:,}")
    return f"{_many(config.global_batch_size, 'sample')} per step: {', '.join(shares)}"


def _steps(plan: Plan) -> str:
    config, total, epochs = plan.experiment.config, plan.estimate.total_steps, plan.epochs
    if total is None:
        return f"unknown, {_many(config.max_epochs or 0, 'epoch')} of data of unknown length"
    return f"{total:,}" + ("" if epochs is None else f", {epochs:.3g} epochs")


def _evaluation(plan: Plan) -> str:
    sets, config, times = plan.estimate.validation, plan.experiment.config, plan.num_evaluations
    if not sets:
        return "none: there is no validation data"
    every = "at the end" if config.evaluate_every is None else f"every {config.evaluate_every}"
    every += " and at the start" if config.evaluate_at_start else ""
    over = "; ".join(f"{name}: {_amount(size)}" if name else _amount(size) for name, size in sets.items())
    count = "" if times is None else f", {_many(times, 'time')}"
    return f"{every}{count}, over {over}"


def _checkpoints(plan: Plan) -> str:
    config, each, number = plan.experiment.config.checkpoint, plan.estimate.checkpoint_bytes, plan.num_checkpoints
    every = "on request only" if config.every is None else f"every {config.every}"
    every += " and at the end" if config.at_end else ""
    size = "of unknown size" if each is None else f"of about {_about(each)}"
    many = "" if number is None else f"{number:,} "
    kept = "all are kept" if config.keep_last == "all" else f"the last {config.keep_last} are kept"
    if config.keep_last != "all":
        kept += f", the {config.keep_best} best" if config.keep_best > 1 and plan.estimate.validation else ""
        for every_so in (config.keep_every, config.keep_every_time):
            kept += f", and one every {every_so}" if every_so is not None else ""
    return f"{every}: {many}{size}; {kept}" + ("" if plan.storage_bytes is None else f" ({_about(plan.storage_bytes)})")


def _amount(size: DataSize) -> str:
    counts = (size.samples, "sample"), (size.steps, "step")
    return " in ".join(_many(number, unit) for number, unit in counts if number is not None) or "data of unknown length"


def _many(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def _about(size: float) -> str:
    return human_bytes(size, digits=3)
