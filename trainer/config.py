"""The training config: frozen dataclasses that check their fields when they are created."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Real
from typing import Any, Literal, Self, TypeVar, get_args

from .checkpoints.retention import Mode, Retention, warn_of_mode
from .errors import ConfigError
from .loop.progress import Duration
from .redaction import REDACTED, is_secret_field, redact_urls, redact_value

Strategy = Literal["none", "ddp", "fsdp", "hsdp"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-true"]
NonFinite = Literal["raise", "skip", "retry"]
ChangedData = Literal["raise", "reset"]
ActivationCheckpointing = Literal["none", "full", "selective"]
_BACKEND = re.compile(r"[a-z]\w*|[a-z]\w*:[a-z]\w*(,[a-z]\w*:[a-z]\w*)*")

MAY_CHANGE = (
    "max_epochs", "max_steps", "max_samples", "max_tokens", "log_every", "grad_norm_groups", "evaluate_every",
    "evaluate_at_start", "evaluate_batches", "sanity_batches", "checkpoint", "parallel", "micro_batch_size",
    "halve_on_out_of_memory", "changed_data",
)  # fmt: skip
"""Fields of a `TrainerConfig` that do not change what is learned: a resumed run may have other values."""


FIELDS_ELSEWHERE = {
    "batch_size": "global_batch_size", "train_batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size", "epochs": "max_epochs", "num_epochs": "max_epochs",
    "num_train_epochs": "max_epochs", "steps": "max_steps", "total_steps": "max_steps", "max_grad": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm", "grad_clip": "max_grad_norm", "clip_grad_norm": "max_grad_norm",
    "accumulate_grad_batches": "gradient_accumulation_steps", "grad_accum": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps", "logging_steps": "log_every",
    "log_every_n_steps": "log_every", "val_check_interval": "evaluate_every", "eval_steps": "evaluate_every",
    "check_val_every_n_epoch": "evaluate_every", "limit_val_batches": "evaluate_batches",
    "num_sanity_val_steps": "sanity_batches", "save_steps": "checkpoint=CheckpointConfig(every=...)",
    "save_total_limit": "checkpoint=CheckpointConfig(keep_last=...)", "random_seed": "seed",
    "strategy": "parallel=ParallelConfig(strategy=...)", "bf16": 'precision="bf16"', "fp16": 'precision="fp16"',
    "mixed_precision": "precision", "amp": 'precision="bf16"', "torch_compile": "parallel=ParallelConfig(compile=...)",
    "gradient_checkpointing": 'parallel=ParallelConfig(activation_checkpointing="full")',
    "devices": "scaling.workers of an Experiment", "num_workers": "num_workers of the DataLoader",
    "resume_from_checkpoint": "Trainer.fit(resume=...)", "output_dir": "Trainer(config, run_dir=...)",
    "max_time": "the callback TimeLimit",
}  # fmt: skip
"""What to set here in place of the fields of other libraries, if the names are too different to guess."""


class InitSignature:
    """The signature of a class as that of its `__init__`, where `__new__` takes anything only to check it."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class _FrozenOnly(type):
    """Metaclass of the configs: a dataclass decorator without `frozen=True` is an error that says what to write.

    The decorator sets `__dataclass_params__` before it compares them with those of the base.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__dataclass_params__" and not value.frozen:
            raise TypeError(
                f"{cls.__name__} must not change once it is created, since it is the record of a run: write "
                "@dataclass(frozen=True, kw_only=True) above the class"
            )
        super().__setattr__(name, value)


class _NamesTheNearest(metaclass=_FrozenOnly):
    """Base of the configs: an unknown keyword is an error that names the nearest field."""

    __signature__ = InitSignature()

    def __new__(cls, *args: Any, **given: Any) -> Self:
        known = [each.name for each in fields(cls) if each.init]  # type: ignore[arg-type]
        if unknown := given.keys() - known:
            parameters = inspect.signature(cls.__init__).parameters.values()
            # A subclass may define __init__.
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                for name in sorted(unknown - {each.name for each in parameters}):
                    raise ConfigError(f"{cls.__name__} has no field {name!r}: {_instead_of(cls, name, known)}")
        return super().__new__(cls)


def _instead_of(cls: type, name: str, known: list[str]) -> str:
    """Return what to do about a field that a config does not have."""
    if any(name in vars(base).get("__annotations__", ()) for base in cls.__mro__):
        return (
            "it is declared, but the class is no dataclass; write @dataclass(frozen=True, kw_only=True) above the class"
        )
    if name in FIELDS_ELSEWHERE and issubclass(cls, TrainerConfig):
        return f"use {FIELDS_ELSEWHERE[name]}"
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    if issubclass(cls, TrainerConfig):
        return f"a field of your own belongs to a subclass; Headway's are {', '.join(known)}"
    return f"it has {', '.join(known)}"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(_NamesTheNearest):
    """How a model is distributed over the ranks.

    Attributes:
        strategy: "none" is a single process; "ddp" replicates; "fsdp" shards parameters, gradients and optimizer state
            over all ranks (FSDP2); "hsdp" shards within groups of `dp_shard` ranks and replicates across groups. With
            one rank every strategy trains the plain model, and the sizes below are ignored.
        dp_replicate, dp_shard: number of copies of the model, and ranks that share each. "hsdp" needs one of them; what
            is None follows from the number of ranks. `dp_shard` is usually the number of GPUs of a machine.
        tp: ranks that divide layers (tensor parallelism), by `Trainer.configure_tensor_parallel`.
        cp: ranks that divide sequences (context parallelism), by `Trainer.context_parallel_buffers`.
        shard_modules: class names of the modules that are gathered, checkpointed and compiled one at a time. If empty:
            the layers that a Hugging Face model names (`_no_split_modules`), or the children of every `ModuleList` and
            `ModuleDict`, which usually hold the blocks of a deep model. All ranks gather a module at once: name the
            whole layers if the data decides which of their children run, such as experts.
        reshard_after_forward: frees gathered parameters between forward and backward: less memory, one more all-gather.
        no_sync: reduces gradients in the last micro-batch of an update only: less traffic; but under "fsdp" and "hsdp"
            every rank then holds the whole gradient between micro-batches. None does so under "ddp" only ("hsdp" still
            reduces across groups only once).
        find_unused_parameters: lets DDP train a model in which some parameters get no gradient; traverses the graph in
            every step. Lets "fsdp" and "hsdp" train one in which ranks use different parameters: unused ones get a
            gradient of zero.
        compile: compiles each of these modules (or the whole model if there are none) with `torch.compile`.
        keep_compile_cache: keeps compiled code in the run's folder, from which a restarted rank loads it instead of
            compiling again. Loading runs that code: turn it off if others may write to the folder.
        activation_checkpointing: "full" keeps only the inputs of these modules and recomputes the rest in backward;
            "selective" also keeps the results of matrix products, convolutions and attention.
        cpu_offload: keeps parameter shards, their gradients and the optimizer state in CPU memory, where the optimizer
            then runs; for "fsdp" and "hsdp". Saves GPU memory, and is considerably slower.
        backend: of `torch.distributed`: "nccl", "gloo", "xccl" (Intel XPU), "hccl" (Gaudi, Ascend) or another that a
            package registers, also by type of device, as in "cpu:gloo,cuda:nccl". Ranks then train on the accelerator
            that `torch.accelerator` names, if the backend serves it. None: NCCL on NVIDIA and AMD GPUs, else Gloo.
            Ignored for an existing process group.
        timeout: of collectives: a rank that has waited this long for others fails. Ignored for an existing process
            group.
        step_timeout: the same after the first update of an attempt, which may have to compile and connect. Must cover
            one step, one batch of an evaluation and the end of a checkpoint. None keeps `timeout`.

    Example:
        >>> ParallelConfig(strategy="fsdp", activation_checkpointing="full", shard_modules=["Block"]).shard_modules
        ('Block',)
    """

    strategy: Strategy = "ddp"
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int = 1
    cp: int = 1
    shard_modules: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    no_sync: bool | None = None
    find_unused_parameters: bool = False
    compile: bool = False
    keep_compile_cache: bool = True
    activation_checkpointing: ActivationCheckpointing = "none"
    cpu_offload: bool = False
    backend: str | None = None
    timeout: Duration = Duration(1800, "seconds")
    step_timeout: Duration | None = None

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, Strategy)
        _one_of("activation_checkpointing", self.activation_checkpointing, ActivationCheckpointing)
        _strings(self, "shard_modules", "class names")
        if self.backend is not None and (type(self.backend) is not str or not _BACKEND.fullmatch(self.backend)):
            raise ConfigError(
                'backend must be a name such as "nccl", or names by type of device such as "cpu:gloo,cuda:nccl", got '
                f"{self.backend!r}"
            )
        if self.no_sync not in (None, True, False):
            raise ConfigError(f"no_sync must be True, False or None, got {self.no_sync!r}")
        _positive("dp_replicate", self.dp_replicate)
        _positive("dp_shard", self.dp_shard)
        _positive("tp", self.tp, optional=False)
        _positive("cp", self.cp, optional=False)
        _parse_durations(self, "timeout", "step_timeout")
        for name in ("timeout", "step_timeout"):
            value = getattr(self, name)
            if (value is None and name == "timeout") or (value is not None and value.unit != "seconds"):
                raise ConfigError(f'{name} must be a time such as "30m", got {value}')
        if self.strategy == "hsdp" and self.dp_shard is None and self.dp_replicate is None:
            raise ConfigError("dp_shard or dp_replicate must be set for strategy='hsdp', got None for both")
        if self.strategy in ("none", "ddp") and self.dp_shard not in (None, 1):
            raise ConfigError(
                f"dp_shard={self.dp_shard} shards the model, but strategy={self.strategy!r} does not: use strategy "
                "'fsdp', or 'hsdp' to shard within groups of ranks"
            )
        if self.strategy in ("none", "fsdp") and self.dp_replicate not in (None, 1):
            raise ConfigError(
                f"dp_replicate={self.dp_replicate} replicates the model, but strategy={self.strategy!r} does not: use "
                "strategy 'hsdp', or 'ddp' without shards"
            )
        if self.cpu_offload and self.strategy not in ("fsdp", "hsdp"):
            raise ConfigError(
                f"cpu_offload must be False unless strategy is 'fsdp' or 'hsdp', got strategy={self.strategy!r}, where "
                "every rank needs the whole model on its device"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_NamesTheNearest):
    """When checkpoints are saved, and which are kept.

    Attributes:
        every: interval between two checkpoints; None saves only at the end and on request.
        background: trains on while a checkpoint is copied, written and committed; waits only if the optimizer would
            step before everything is copied. Needs host memory for one more copy of the state; on GPUs up to twice
            that, because torch rounds pinned memory up to powers of two, and allocates it during the first save.
        at_end: whether to save when the run ends or is interrupted.
        keep_last: number of newest checkpoints to keep, or "all"; the newest good one is always kept.
        keep_best: number of best checkpoints to keep as well, whatever their age.
        keep_every: steps or epochs; also keeps the first checkpoint at or after each multiple of it.
        keep_every_time: a time; also keeps the first checkpoint in each such interval of the clock.
        monitor: the evaluation metric by which the best checkpoints are chosen.
        mode: "min" if lower is better, "max" if higher is.
        save_best: whether to save immediately after an evaluation that is the best so far.
        retries: how often a failed save (full disk, unreachable storage) is repeated, each time with a warning, before
            it ends the run. Training continues meanwhile if `background` is set.
        retry_after: the pause before each retry.

    Example:
        >>> CheckpointConfig(every="10m", keep_last=5).every
        Duration(amount=600.0, unit='seconds')
    """

    every: Duration | None = Duration(1, "epochs")
    background: bool = True
    at_end: bool = True
    keep_last: int | Literal["all"] = 2
    keep_best: int = 1
    keep_every: Duration | None = None
    keep_every_time: Duration | None = None
    monitor: str = "validation/loss"
    mode: Mode = "min"
    save_best: bool = False
    retries: int = 0
    retry_after: Duration = Duration(10, "seconds")

    def __post_init__(self) -> None:
        _parse_durations(self, "every", "keep_every", "keep_every_time", "retry_after")
        if self.retry_after is None or self.retry_after.unit != "seconds":
            raise ConfigError(f'retry_after must be a time such as "10s", got {self.retry_after}')
        if self.retries != 0:
            _positive("retries", self.retries, optional=False)
        _one_of("mode", self.mode, Mode)
        if not isinstance(self.monitor, str) or not self.monitor.startswith("validation/"):
            raise ConfigError(
                f'monitor must be an evaluation metric in the log, such as "validation/loss", got {self.monitor!r}'
            )
        _ = self.retention  # checks its own fields
        warn_of_mode("CheckpointConfig", self.monitor, self.mode)

    @property
    def retention(self) -> Retention:
        """Which checkpoints are kept."""
        return Retention(
            keep_last=self.keep_last,
            monitor=self.monitor,
            mode=self.mode,
            keep_best=self.keep_best,
            keep_every=self.keep_every,
            keep_every_time=self.keep_every_time,
        )


@dataclass(frozen=True, kw_only=True)
class LossSpikeConfig(_NamesTheNearest):
    """Which losses count as spikes, and how often the run rolls back to an earlier checkpoint.

    The logged loss is checked at every flush of the log: the mean over the interval and all ranks. The fewer samples an
    interval has, as at the end of an epoch, the larger the deviation that is allowed.

    Attributes:
        metric: the name of the loss in the log.
        factor: a loss is a spike if it exceeds the median of the recent losses by this many typical deviations.
        window: number of recent losses to compare with.
        max_rollbacks: over all attempts; one more spike ends the run with an error.

    Example:
        >>> config = TrainerConfig(max_steps=1000, loss_spike=LossSpikeConfig(factor=6.0))
    """

    metric: str = "train/loss"
    factor: float = 10.0
    window: int = 20
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if not _is_positive(self.factor):
            raise ConfigError(f"factor must be > 0, got {self.factor!r}")
        if not isinstance(self.window, int) or self.window < 5:
            raise ConfigError(f"window must be an integer >= 5, got {self.window!r}")
        _positive("max_rollbacks", self.max_rollbacks, optional=False)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(_NamesTheNearest):
    """How to train. Subclass it, frozen and keyword-only, to add fields of your own.

    A `Duration` may be written as text: `evaluate_every="500 steps"`.

    Attributes:
        max_epochs: passes over the training data, in total over all attempts and resumes.
        max_steps: optimizer updates, in total. The first limit that is reached ends the run.
        max_samples: samples to train on over all ranks, in total; the update that reaches it is the last.
        max_tokens: tokens to train on, in total; needs `num_tokens`. They are counted when the log is flushed: the run
            ends with the first record (`log_every`) that reaches it.
        steps_per_epoch: updates per epoch, for endless data or to end epochs early; the next epoch restarts an
            iterable, and continues an iterator.
        seed: of all random numbers; each rank derives its own stream, but the order of the data is common.
        global_batch_size: samples per update over all ranks, whatever their number.
        micro_batch_size: maximum samples in one forward pass of one rank; gradient accumulation follows from it.
        halve_on_out_of_memory: when a rank runs out of memory, repeats the update with micro-batches of half the size,
            down to one sample, and keeps that size. Copies random states and buffers in each update, and on several
            ranks reduces gradients after the backward pass. Not for sharded models.
        gradient_accumulation_steps: micro-batches per update and rank, for loaders that make their own batches.
        precision: "bf16" and "fp16" run forward passes under autocast, "fp16" with a loss scaler; the weights stay
            float32. "bf16-true" keeps the weights themselves in bfloat16.
        float8: uses float8 matrix products in linear layers of suitable sizes, by torchao; an error on hardware without
            float8. Use it with precision "bf16" and `parallel.compile`, without which it is slower.
        freeze: shell patterns over names of parameters not to train, such as "model.encoder.*" or "*.bias"; a pattern
            that begins with "!" unfreezes. A module that is frozen completely by them stays in evaluation mode.
        max_grad_norm: clips the norm of the whole gradient, which is logged in any case.
        max_grad_value: clips each element of the gradient to plus or minus this, after the norm.
        grad_norm_groups: shell patterns over names of parameters, such as "model.blocks.*": the gradient norm of each
            group is logged as "grad_norm/<pattern>".
        non_finite: what to do with an update whose gradient is NaN or infinite: "raise" ends the run, "skip" continues
            with the next batch, "retry" computes the same batch again, with new random numbers.
        max_skipped_losses: micro-batches in a row for which `training_step` may return None as its loss: these are
            skipped without a backward pass, on all ranks or not at all, and add nothing to the gradient. With 0 that is
            an error; otherwise several ranks wait for one another in every micro-batch, to agree.
        max_non_finite: consecutive updates that are skipped or retried; one more ends the run.
        max_non_finite_total: the same over the whole run.
        loss_spike: rolls back to a checkpoint after a spike of the loss, and continues behind the data that caused it;
            None never does.
        log_every: updates between two flushes of the training metrics, or "1 epoch"; every epoch ends with a flush.
        evaluate_every: interval between two evaluations, if there is validation data; None evaluates only at the end.
        evaluate_at_start: also evaluates the initial weights before the first update.
        evaluate_batches: maximum batches of each validation set and rank; None evaluates on all rows.
        sanity_batches: batches of each validation set to try before the first update, so that a mistake in
            `validation_step` shows immediately. Nothing is logged, and no callback is called.
        init_from: a checkpoint from which a new run takes its initial weights, and nothing else. Ignored when a run
            resumes from its own checkpoints.
        init_keys: shell patterns over names of the weights to take from `init_from`, such as "model.encoder.*"; a
            pattern that begins with "!" excludes, as in ("*", "!model.head.*"). Empty takes all. Selected weights must
            exist on both sides, with the same shape.
        exact: gives bitwise equal results for every number of ranks: each update sums the gradients of the same parts
            of its batch in the same order, and each part has its own random numbers. Slower; unsupported settings are
            errors.
        changed_data: what to do if a run is resumed with different training data: "raise", or "reset", which reads the
            new data from its beginning.
        parallel: how the model is distributed over the ranks.
        checkpoint: when checkpoints are saved, and which are kept.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class DigitsConfig(TrainerConfig):
        ...     learning_rate: float = 3e-3
        >>> config = DigitsConfig(max_epochs=5, global_batch_size=64, evaluate_every="500 steps")
        >>> config.learning_rate, str(config.evaluate_every)
        (0.003, '500 steps')
    """

    max_epochs: int | None = None
    max_steps: int | None = None
    max_samples: int | None = None
    max_tokens: int | None = None
    steps_per_epoch: int | None = None
    seed: int = 0
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    halve_on_out_of_memory: bool = False
    gradient_accumulation_steps: int = 1
    precision: Precision = "fp32"
    float8: bool = False
    freeze: tuple[str, ...] = ()
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    grad_norm_groups: tuple[str, ...] = ()
    non_finite: NonFinite = "raise"
    max_non_finite: int = 3
    max_skipped_losses: int = 0
    max_non_finite_total: int = 100
    loss_spike: LossSpikeConfig | None = None
    log_every: Duration = Duration(50, "steps")
    evaluate_every: Duration | None = Duration(1, "epochs")
    evaluate_at_start: bool = False
    evaluate_batches: int | None = None
    sanity_batches: int = 0
    init_from: str | None = None
    init_keys: tuple[str, ...] = ()
    exact: bool = False
    changed_data: ChangedData = "raise"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.log_every is None:
            raise ConfigError('log_every must be in steps or epochs, such as "50 steps", got None')
        _parse_durations(self, "log_every", "evaluate_every")
        _one_of("precision", self.precision, Precision)
        for name in (
            "max_epochs",
            "max_steps",
            "max_samples",
            "max_tokens",
            "steps_per_epoch",
            "global_batch_size",
            "micro_batch_size",
        ):
            _positive(name, getattr(self, name))
        _positive("gradient_accumulation_steps", self.gradient_accumulation_steps, optional=False)
        _strings(self, "freeze", "patterns")
        _strings(self, "grad_norm_groups", "patterns")
        _strings(self, "init_keys", "patterns")
        _one_of("changed_data", self.changed_data, ChangedData)
        if self.init_keys and self.init_from is None:
            raise ConfigError(
                f"init_keys={list(self.init_keys)} selects weights of init_from, which is not set: set it, or leave "
                "init_keys out"
            )
        _positive("evaluate_batches", self.evaluate_batches)
        if self.sanity_batches != 0:
            _positive("sanity_batches", self.sanity_batches, optional=False)
        _one_of("non_finite", self.non_finite, NonFinite)
        if self.loss_spike is not None and not isinstance(self.loss_spike, LossSpikeConfig):
            raise ConfigError(f"loss_spike must be a LossSpikeConfig or None, got {self.loss_spike!r}")
        for name in ("max_non_finite", "max_non_finite_total"):
            _positive(name, getattr(self, name), optional=False)
        for name in ("max_grad_norm", "max_grad_value"):
            if (limit := getattr(self, name)) is not None and not _is_positive(limit):
                raise ConfigError(f"{name} must be > 0, got {limit!r}; leave it out for no clipping")
        if self.log_every.unit == "seconds":
            raise ConfigError(
                f"log_every must be in steps or epochs, got {self.log_every}: ranks would flush at different steps"
            )
        if self.log_every.unit == "epochs" and self.log_every.amount > 1:
            raise ConfigError(
                f'log_every must be "1 epoch" or in steps, got {self.log_every}: every epoch ends with a record'
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer from 0 to 2**63 - 1, got {self.seed!r}")
        for name, section in (("parallel", ParallelConfig), ("checkpoint", CheckpointConfig)):
            if not isinstance(getattr(self, name), section):
                raise ConfigError(f"{name} must be a {section.__name__}, got {getattr(self, name)!r}")
        if (
            self.gradient_accumulation_steps > 1
            and self.micro_batch_size is not None
            and self.global_batch_size is not None
        ):
            raise ConfigError(
                "gradient_accumulation_steps must be left out if global_batch_size and micro_batch_size are set, from "
                f"which it follows, got {self.gradient_accumulation_steps}"
            )
        if self.max_skipped_losses != 0:
            _positive("max_skipped_losses", self.max_skipped_losses, optional=False)
            delayed = {"fsdp": (True,), "hsdp": (None, True)}.get(self.parallel.strategy, ())
            if self.exact or self.halve_on_out_of_memory or self.parallel.no_sync in delayed:
                raise ConfigError(
                    "max_skipped_losses needs gradients that are reduced in every micro-batch: set parallel.no_sync="
                    "False, and neither exact nor halve_on_out_of_memory"
                )


C = TypeVar("C", bound=TrainerConfig)


def check_is_dataclass(config: TrainerConfig) -> None:
    """Check that the fields that a config's class declares are fields, and that numbers are not texts.

    Raises:
        ConfigError: the class lacks its decorator, so that declared fields are ignored; or a field that is declared as
            a number is a text, as from a command line.
    """
    known = {each.name for each in fields(config)}
    for each in fields(config):
        kind = getattr(each.type, "__name__", each.type)
        if kind in ("int", "float", "bool") and isinstance(value := getattr(config, each.name), str):
            raise ConfigError(f"{each.name} of {type(config).__name__} must be a {kind}, got the text {value!r}")
    for base in type(config).__mro__:
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if name not in known and "ClassVar" not in str(annotation):
                raise ConfigError(
                    f"{base.__name__} declares {name}, but is no dataclass: write @dataclass(frozen=True, "
                    "kw_only=True) above the class"
                )


def one_step_on_cpu(config: C) -> C:
    """Return the config of a step in one process on a CPU, without what that cannot do."""
    sizes: dict[str, Any] = {"dp_replicate": None, "dp_shard": None, "tp": 1, "cp": 1}
    parallel = replace(config.parallel, strategy="none", **sizes, compile=False, cpu_offload=False)
    return replace(config, float8=False, exact=False, parallel=parallel)


def as_plain(config: Any) -> Any:
    """Return a config as dicts, lists, numbers and text, as it is written to files: without secrets (redaction.py)."""
    if isinstance(config, Duration):
        return str(config)
    if is_dataclass(config) and not isinstance(config, type):
        values = {each: getattr(config, each.name) for each in fields(config)}
        return {
            each.name: REDACTED if is_secret_field(each, value) else as_plain(value) for each, value in values.items()
        }
    if isinstance(config, Mapping):
        return {str(key): redact_value(str(key), as_plain(value)) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [as_plain(value) for value in config]
    return config if config is None or isinstance(config, (bool, int, float)) else redact_urls(str(config))


def _positive(name: str, value: Any, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and float(value) > 0


def _one_of(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _strings(config: Any, name: str, what: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(
        isinstance(each, str) and each for each in value
    ):
        raise ConfigError(f"{name} must be a list of {what}, got {value!r}")
    object.__setattr__(config, name, tuple(value))


def _parse_durations(config: Any, *names: str) -> None:
    assert set(names) <= {each.name for each in fields(config)}
    for name in names:
        if (value := getattr(config, name)) is not None:
            object.__setattr__(config, name, Duration.parse(value))
