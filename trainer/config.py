"""How to train: frozen dataclasses that refuse nonsense when they are made. What to train is the Trainer's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

from .checkpoints.retention import Mode, Retention
from .errors import ConfigError
from .loop.progress import Duration

Strategy = Literal["none", "ddp", "fsdp", "hsdp"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-true"]
NonFinite = Literal["raise", "skip", "retry"]
ChangedData = Literal["raise", "reset"]
ActivationCheckpointing = Literal["none", "full", "selective"]

MAY_CHANGE = (
    "max_epochs", "max_steps", "max_samples", "max_tokens", "log_every", "grad_norm_groups", "evaluate_every",
    "evaluate_at_start", "evaluate_batches", "sanity_batches", "checkpoint", "parallel", "micro_batch_size",
    "halve_on_out_of_memory", "changed_data",
)  # fmt: skip
"""Fields of a `TrainerConfig` that do not change what is learned: a run may go on with others."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is spread over the ranks.

    Attributes:
        strategy: "none" keeps one process; "ddp" replicates; "fsdp" shards parameters, gradients and moments over all
            ranks (FSDP2); "hsdp" shards inside groups of `shard_size` ranks and replicates over the groups. With one
            rank every strategy trains the plain model.
        shard_size: ranks of one "hsdp" group; usually those of one machine.
        shard_modules: class names of the modules that are gathered, checkpointed and compiled one at a time; empty
            takes the layers that a model of Hugging Face's names itself (`_no_split_modules`), and in any other the
            children of every `ModuleList` and `ModuleDict`, which is where the blocks of a deep model live.
        reshard_after_forward: frees gathered parameters between forward and backward: less memory, one gather more.
        find_unused_parameters: lets DDP train a model of which some parameters get no gradient; costs a walk of the
            graph in every step.
        compile: compiles each of these modules (or the whole model where there are none) with `torch.compile`.
        activation_checkpointing: "full" keeps only the inputs of these modules and computes the rest again in backward;
            "selective" also keeps the results of matrix products, convolutions and attention.
        cpu_offload: keeps parameter shards, their gradients and the optimizer's state in the memory of the CPU, where
            the optimizer then computes; for "fsdp" and "hsdp". Saves memory of the GPU and costs a good part of the
            speed.
        timeout: a rank that has waited so long for the others gives up. Not for a process group that exists already.
        step_timeout: the same after the first update of an attempt, which may have to compile and to find its peers;
            long enough for one step, one batch of an evaluation and the end of a checkpoint. None keeps `timeout`.

    Example:
        >>> ParallelConfig(strategy="fsdp", activation_checkpointing="full", shard_modules=["Block"]).shard_modules
        ('Block',)
    """

    strategy: Strategy = "ddp"
    shard_size: int | None = None
    shard_modules: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    find_unused_parameters: bool = False
    compile: bool = False
    activation_checkpointing: ActivationCheckpointing = "none"
    cpu_offload: bool = False
    timeout: Duration = Duration(1800, "seconds")
    step_timeout: Duration | None = None

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, Strategy)
        _one_of("activation_checkpointing", self.activation_checkpointing, ActivationCheckpointing)
        _strings(self, "shard_modules", "class names")
        _positive("shard_size", self.shard_size)
        _parse_durations(self, "timeout", "step_timeout")
        for name in ("timeout", "step_timeout"):
            value = getattr(self, name)
            if (value is None and name == "timeout") or (value is not None and value.unit != "seconds"):
                raise ConfigError(f'{name} is a time such as "30m", not {value}')
        if (self.strategy == "hsdp") != (self.shard_size is not None):
            raise ConfigError(
                f"shard_size belongs to strategy 'hsdp', which needs it; there is strategy={self.strategy!r} with "
                f"shard_size={self.shard_size}"
            )
        if self.cpu_offload and self.strategy not in ("fsdp", "hsdp"):
            raise ConfigError(
                f"cpu_offload belongs to strategies 'fsdp' and 'hsdp', and there is {self.strategy!r}, where every "
                "rank needs the whole model on its device"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and how much of it is kept.

    Attributes:
        every: time between two checkpoints; None saves only at the end and on request.
        background: lets training go on while a checkpoint is copied, written and committed: it waits only where the
            optimizer steps before everything is copied. Takes host memory for one more copy of the state.
        at_end: whether an ended or interrupted run saves where it stands.
        keep_last: how many of the newest checkpoints stay; the newest good one always does. "all" deletes none.
        keep_best: how many of the best ones stay besides, however long ago they were saved.
        keep_every: steps or epochs; of the others, the first one at or after each multiple of it stays for good.
        keep_every_time: a time; of the others, the first one in each such stretch of the clock stays for good.
        monitor: the metric of an evaluation by which the best checkpoints are chosen.
        mode: "min" where lower is better, "max" where higher is.
        save_best: whether an evaluation that is the best so far is saved at once.
        retries: how often a save that could not be written (a full disk, a storage that does not answer) is tried again
            before it ends the run; each time with a warning. Training goes on meanwhile, if it is in the background.
        retry_after: the pause before each of these.

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
            raise ConfigError(f'retry_after is a time such as "10s", not {self.retry_after}')
        if self.retries != 0:
            _positive("retries", self.retries, optional=False)
        _one_of("mode", self.mode, Mode)
        if not isinstance(self.monitor, str) or not self.monitor.startswith("validation/"):
            raise ConfigError(
                f'monitor is the name of a metric in the log, such as "validation/loss", not {self.monitor!r}'
            )
        _ = self.retention  # which says what it cannot be

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay."""
        return Retention(
            keep_last=self.keep_last,
            monitor=self.monitor,
            mode=self.mode,
            keep_best=self.keep_best,
            keep_every=self.keep_every,
            keep_every_time=self.keep_every_time,
        )


@dataclass(frozen=True, kw_only=True)
class LossSpikeConfig:
    """When the loss has jumped away, and how often the run then goes back to a checkpoint from before.

    The loss is judged whenever the log is flushed, as it is logged: the mean over the interval and over all ranks. The
    fewer samples an interval has, as at the end of an epoch, the further off its mean may lie.

    Attributes:
        metric: the name of the loss in the log.
        factor: how many usual deviations above the median of the last losses are too much.
        window: so many of the last losses say what is usual.
        max_rollbacks: how often the run goes back, over all attempts; one spike more ends it.

    Example:
        >>> config = TrainerConfig(max_steps=1000, loss_spike=LossSpikeConfig(factor=6.0))
    """

    metric: str = "train/loss"
    factor: float = 10.0
    window: int = 20
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ConfigError(f"factor is above zero, not {self.factor}")
        if not isinstance(self.window, int) or self.window < 5:
            raise ConfigError(f"window is a whole number from 5, not {self.window!r}")
        _positive("max_rollbacks", self.max_rollbacks, optional=False)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What every training can be told. Subclass it, frozen and keyword-only, to add what the model needs.

    A `Duration` may be written as text: `evaluate_every="500 steps"`.

    Attributes:
        max_epochs: passes over the training data, in total over all attempts and resumes.
        max_steps: optimizer updates, in total. The first limit that is reached ends the run.
        max_samples: samples learned from over all ranks, in total; the update that reaches it is the last.
        max_tokens: tokens learned from, in total, of a trainer that counts them by `num_tokens`. They are counted when
            the log is flushed: the run ends with the first record (`log_every`) that has as many.
        steps_per_epoch: updates that make an epoch of data that has no end of its own, or cut a longer one short; the
            next epoch begins an iterable again, and goes on with an iterator.
        seed: of everything random; every rank derives its own stream, the order of the data is common.
        global_batch_size: samples of one update over all ranks. Stays what it is when the number of ranks changes.
        micro_batch_size: at most this many samples in one forward pass of one rank; accumulation follows.
        halve_on_out_of_memory: begins an update again in micro-batches of half the size where a rank has run out of
            memory, down to one sample, and stays with that. Costs a copy of random states and buffers per update, and
            on several ranks gradients meet after the backward pass; refused where models are sharded.
        gradient_accumulation_steps: micro-batches of one update and rank, for loaders that bring their own batches.
        precision: "bf16" and "fp16" run forward passes under autocast, "fp16" with a loss scaler; the weights stay
            float32. "bf16-true" keeps the weights themselves in bfloat16.
        float8: multiplies in float8 in the linear layers whose sizes allow it, by torchao; refused where the hardware
            cannot. Goes with precision "bf16" and `parallel.compile`, without which it is slower.
        freeze: shell patterns over names of parameters that are not trained, such as "model.encoder.*" or "*.bias"; one
            that begins with "!" takes parameters back. A module with nothing left to train stays in evaluation mode.
        max_grad_norm: clips the norm of the whole gradient; it is measured in any case.
        max_grad_value: clips each number of the gradient to plus or minus this, after the norm.
        grad_norm_groups: shell patterns over names of parameters, such as "model.blocks.*": the norm of the gradient of
            each group is logged as "grad_norm/<pattern>".
        non_finite: what becomes of an update whose gradient is NaN or infinite: "raise" ends the run, "skip" goes on
            with the next batch, "retry" computes the same batch again, with fresh random numbers.
        max_non_finite: so many in a row are skipped or tried again; one more ends the run.
        max_non_finite_total: so many over the whole run.
        loss_spike: goes back to a checkpoint when the loss has jumped away, and on behind the data that did it; None
            does not.
        log_every: updates between two flushes of the training metrics, or "1 epoch": every epoch ends with one.
        evaluate_every: time between two evaluations, where there is data for it; None evaluates at the end only.
        evaluate_at_start: also evaluates before the first update of the run, with what is drawn as the first weights.
        evaluate_batches: at most so many batches of each evaluation set and rank; None evaluates on all rows.
        sanity_batches: so many batches of each set are tried before the first update of the run, so that a mistake in
            `validation_step` shows at once. Nothing of it is logged, and no callback hears of it.
        init_from: a checkpoint whose weights the run begins with, and nothing else of it: the counters are zero and
            the optimizers fresh. A run that goes on from its own checkpoints has no more use for it.
        init_keys: shell patterns of the names of the weights that are taken from there, such as "model.encoder.*"; one
            that begins with "!" leaves weights out, as ("*", "!model.head.*") does. Empty takes all. What is chosen
            must be there, on both sides, and in the same shape.
        exact: gives the same bits at every number of ranks: each update adds up the gradients of the same parts of its
            batch in the same order, with random numbers of each part's own. Costs time; refuses what it cannot keep.
        changed_data: what to do where a run is to go on with other training data than it had: "raise", or "reset",
            which reads the new data from its beginning.
        parallel: how the model is spread over the ranks.
        checkpoint: when the state is saved.

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
            raise ConfigError("log_every counts steps or epochs; it cannot be left out")
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
                f"init_keys={list(self.init_keys)} chooses among the weights of init_from, which is not set"
            )
        _positive("evaluate_batches", self.evaluate_batches)
        if self.sanity_batches != 0:
            _positive("sanity_batches", self.sanity_batches, optional=False)
        _one_of("non_finite", self.non_finite, NonFinite)
        if self.loss_spike is not None and not isinstance(self.loss_spike, LossSpikeConfig):
            raise ConfigError(f"loss_spike is a LossSpikeConfig, or left out, not {self.loss_spike!r}")
        for name in ("max_non_finite", "max_non_finite_total"):
            _positive(name, getattr(self, name), optional=False)
        for name in ("max_grad_norm", "max_grad_value"):
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise ConfigError(f"{name} is above zero, not {limit}; leave it out to clip nothing")
        if self.log_every.unit == "seconds":
            raise ConfigError(
                f"log_every counts steps or epochs, not {self.log_every}: ranks would flush at other steps"
            )
        if self.log_every.unit == "epochs" and self.log_every.amount > 1:
            raise ConfigError(
                f'log_every is {self.log_every}, and every epoch ends with a record: say "1 epoch", or count steps'
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is a whole number from 0 to 2**63 - 1, not {self.seed!r}")
        for name, section in (("parallel", ParallelConfig), ("checkpoint", CheckpointConfig)):
            if not isinstance(getattr(self, name), section):
                raise ConfigError(f"{name} is a {section.__name__}, not {getattr(self, name)!r}")
        if (
            self.gradient_accumulation_steps > 1
            and self.micro_batch_size is not None
            and self.global_batch_size is not None
        ):
            raise ConfigError(
                "accumulation follows from global_batch_size and micro_batch_size; leave out "
                f"gradient_accumulation_steps (there is {self.gradient_accumulation_steps})"
            )


def as_plain(config: Any) -> Any:
    """Returns a config as dicts, lists, numbers and text, as it is written to files."""
    if isinstance(config, Duration):
        return str(config)
    if is_dataclass(config) and not isinstance(config, type):
        return {each.name: as_plain(getattr(config, each.name)) for each in fields(config)}
    if isinstance(config, Mapping):
        return {str(key): as_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [as_plain(value) for value in config]
    return config if config is None or isinstance(config, (bool, int, float, str)) else str(config)


def _positive(name: str, value: Any, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is a whole number from 1, not {value!r}")


def _one_of(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} is one of {', '.join(get_args(choices))}, not {value!r}")


def _strings(config: Any, name: str, what: str) -> None:
    value = getattr(config, name)
    if isinstance(value, str) or not all(isinstance(each, str) and each for each in value):
        raise ConfigError(f"{name} is a list of {what}, not {value!r}")
    object.__setattr__(config, name, tuple(value))


def _parse_durations(config: Any, *names: str) -> None:
    assert set(names) <= {each.name for each in fields(config)}
    for name in names:
        if (value := getattr(config, name)) is not None:
            object.__setattr__(config, name, Duration.parse(value))
