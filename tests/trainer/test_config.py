"""Configs refuse nonsense when they are made, and say what they take."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from headway.trainer import CheckpointConfig, ConfigError, Duration, ParallelConfig, Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class MyConfig(TrainerConfig):
    learning_rate: float = 1e-3
    max_steps: int | None = 100


def test_a_subclass_adds_fields_and_changes_defaults() -> None:
    config = MyConfig(learning_rate=0.5, log_every="10 steps", evaluate_every="90m")  # type: ignore[arg-type]
    assert (config.learning_rate, config.max_steps, config.seed) == (0.5, 100, 0)
    assert config.log_every == Duration(10, "steps")
    assert config.evaluate_every == Duration(5400, "seconds")
    assert CheckpointConfig(every=5).every == Duration(5, "steps")  # type: ignore[arg-type]
    assert MyConfig(evaluate_every=None).evaluate_every is None
    assert ParallelConfig(shard_modules=["Block"]).shard_modules == ("Block",)  # type: ignore[arg-type]


def test_a_config_is_frozen_pickles_and_compares() -> None:
    config = MyConfig(evaluate_every="2 epochs", parallel=ParallelConfig(strategy="fsdp"))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(config, seed=0)
    assert config != dataclasses.replace(config, learning_rate=2.0)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (TrainerConfig, {"max_epochs": 0}, "max_epochs must be an integer >= 1, got 0"),
        (TrainerConfig, {"max_steps": 1.5}, "max_steps must be an integer >= 1, got 1.5"),
        (TrainerConfig, {"max_steps": True}, "max_steps must be an integer >= 1, got True"),
        (TrainerConfig, {"steps_per_epoch": -1}, "steps_per_epoch must be an integer >= 1"),
        (TrainerConfig, {"global_batch_size": "8"}, "global_batch_size must be an integer >= 1, got '8'"),
        (TrainerConfig, {"micro_batch_size": 0}, "micro_batch_size must be an integer >= 1"),
        (TrainerConfig, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be an integer >= 1"),
        (TrainerConfig, {"gradient_accumulation_steps": None}, "gradient_accumulation_steps must be an integer >= 1"),
        (TrainerConfig, {"max_grad_norm": 0}, "max_grad_norm must be > 0, got 0; leave it out"),
        (TrainerConfig, {"max_grad_norm": "1.0"}, "max_grad_norm must be > 0, got '1.0'; leave it out"),
        (TrainerConfig, {"max_grad_norm": float("nan")}, "max_grad_norm must be > 0, got nan"),
        (TrainerConfig, {"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, bf16-true, got 'fp8'"),
        (TrainerConfig, {"max_grad_value": -1.0}, "max_grad_value must be > 0, got -1.0; leave it out"),
        (TrainerConfig, {"grad_norm_groups": "*"}, r"grad_norm_groups must be a list of patterns, got '\*'"),
        (TrainerConfig, {"non_finite": "ignore"}, "non_finite must be one of raise, skip, retry, got 'ignore'"),
        (TrainerConfig, {"max_non_finite": 0}, "max_non_finite must be an integer >= 1"),
        (TrainerConfig, {"log_every": "30s"}, "log_every must be in steps or epochs, got 30s"),
        (
            TrainerConfig,
            {"log_every": "3 epochs"},
            'log_every must be "1 epoch" or in steps, got 3 epochs: every epoch ends with a record',
        ),
        (TrainerConfig, {"log_every": None}, "log_every"),
        (TrainerConfig, {"evaluate_every": "2 months"}, "'2 months' is not a duration"),
        (TrainerConfig, {"evaluate_every": 0}, "a duration must be > 0"),
        (TrainerConfig, {"freeze": "model.*"}, "freeze must be a list of patterns, got 'model.*'"),
        (TrainerConfig, {"freeze": [""]}, "freeze must be a list of patterns"),
        (
            ParallelConfig,
            {"cpu_offload": True},
            "cpu_offload must be False unless strategy is 'fsdp' or 'hsdp', got strategy='ddp'",
        ),
        (ParallelConfig, {"cpu_offload": True, "strategy": "none"}, "cpu_offload must be False unless"),
        (ParallelConfig, {"timeout": "3 steps"}, 'timeout must be a time such as "30m", got 3 steps'),
        (ParallelConfig, {"timeout": None}, "timeout must be a time"),
        (ParallelConfig, {"step_timeout": "1 epochs"}, "step_timeout must be a time"),
        (ParallelConfig, {"activation_checkpointing": "some"}, "must be one of none, full, selective, got 'some'"),
        (TrainerConfig, {"seed": -1}, "seed must be an integer from 0"),
        (TrainerConfig, {"seed": 1.5}, "seed"),
        (TrainerConfig, {"seed": None}, "seed"),
        (
            TrainerConfig,
            {"gradient_accumulation_steps": 2, "global_batch_size": 8, "micro_batch_size": 4},
            "gradient_accumulation_steps must be left out if global_batch_size and micro_batch_size are set",
        ),
        (TrainerConfig, {"parallel": "ddp"}, "parallel must be a ParallelConfig, got 'ddp'"),
        (TrainerConfig, {"checkpoint": None}, "checkpoint must be a CheckpointConfig, got None"),
        (ParallelConfig, {"strategy": "deepspeed"}, "strategy must be one of none, ddp, fsdp, hsdp, got 'deepspeed'"),
        (ParallelConfig, {"activation_checkpointing": "some"}, "activation_checkpointing must be one of none, full"),
        (
            ParallelConfig,
            {"strategy": "hsdp"},
            "dp_shard or dp_replicate must be set for strategy='hsdp', got None for both",
        ),
        (ParallelConfig, {"dp_shard": 2}, "dp_shard=2 shards the model, but strategy='ddp' does not"),
        (ParallelConfig, {"strategy": "fsdp", "dp_replicate": 2}, "dp_replicate=2 replicates the model, but"),
        (ParallelConfig, {"tp": 0}, "tp must be an integer >= 1"),
        (ParallelConfig, {"strategy": "hsdp", "dp_shard": 0}, "dp_shard must be an integer >= 1"),
        (ParallelConfig, {"shard_modules": "Block"}, r"shard_modules must be a list of class names, got 'Block'"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last must be an integer >= 1"),
        (CheckpointConfig, {"keep_last": "some"}, "keep_last must be an integer >= 1"),
        (CheckpointConfig, {"keep_last": None}, "keep_last must be an integer >= 1"),
        (CheckpointConfig, {"keep_every": "10m"}, "keep_every must be in steps or epochs.*set keep_every_time"),
        (CheckpointConfig, {"keep_every_time": "10 steps"}, "keep_every_time must be a time"),
        (CheckpointConfig, {"keep_best": -1}, "keep_best must be an integer >= 0"),
        (CheckpointConfig, {"keep_best": True}, "keep_best must be an integer >= 0"),
        (CheckpointConfig, {"every": "often"}, "'often' is not a duration"),
    ],
)
def test_nonsense_is_refused(section: type[Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**values)


@pytest.mark.parametrize("config", [None, {"max_steps": 1}, MyConfig])
def test_a_trainer_needs_a_config(config: Any) -> None:
    with pytest.raises(ConfigError, match="Trainer needs a TrainerConfig"):
        Trainer(config)
