"""The whole state in memory: training continues from it as from a checkpoint."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    ParallelConfig,
    ResumeError,
    Session,
    TrainerConfig,
    World,
)
from headway.trainer.callbacks import Ema
from headway.trainer.trackers import read_records
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    """Four updates in an epoch, with everything that draws random numbers."""
    return TinyConfig(
        **{"num_rows": 32, "max_epochs": 3, "dropout": 0.2, "noise": 0.1, "log_every": "3 steps", **changes}
    )


class Captures(Callback):
    """Keeps the state after an update, in the middle of an epoch."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.state: dict[str, Any] = {}

    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == self.step:
            self.state = trainer.state_dict()


def _all_of(trainer: TinyTrainer) -> dict[str, torch.Tensor]:
    """Return weights, moments and averages."""
    moments = {
        f"moment {number} {key}": value.clone()
        for number, state in trainer.optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    with next(each for each in trainer.callbacks if isinstance(each, Ema)).applied():
        averages = {f"average {name}": value for name, value in weights(trainer).items()}
    return {**weights(trainer), **moments, **averages}


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return bool(one) and all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())


def test_training_continues_from_it_bit_by_bit() -> None:
    captures = Captures(6)
    whole = TinyTrainer(_config(precision="fp16"), world=ALONE, callbacks=[Ema(0.9), captures])
    result = whole.fit()
    wanted, rows = _all_of(whole), whole.seen[6:]

    # In another trainer, after the way of a file; and in the same one, which has ended, twice.
    file = io.BytesIO()
    torch.save(captures.state, file)
    file.seek(0)
    again = TinyTrainer(_config(precision="fp16"), world=ALONE, callbacks=[Ema(0.9), Captures(99)])
    again.load_state_dict(torch.load(file, weights_only=True))
    assert (again.global_step, again.current_epoch) == (6, 1)
    for trainer in (again, whole, whole):
        trainer.seen.clear()
        trainer.load_state_dict(captures.state)
        assert not _same(weights(trainer), {name: wanted[name] for name in weights(trainer)})
        repeated = trainer.fit()
        assert trainer.seen == rows
        assert _same(_all_of(trainer), wanted)
        assert repeated.metrics["train/loss"] == result.metrics["train/loss"]
        assert [row["train/loss"] for row in repeated.history] == [row["train/loss"] for row in result.history]


def test_a_failed_update_can_be_undone() -> None:
    class Fails(TinyTrainer):
        fails = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.training and self.global_step == 7:
                raise RuntimeError("once")
            return super().training_step(batch, batch_idx)

    reference = TinyTrainer(_config(), world=ALONE)
    reference.fit()
    captures = Captures(6)
    trainer = Fails(_config(), world=ALONE, callbacks=[captures])
    trainer.fails = True
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit()
    trainer.fails = False
    trainer.load_state_dict(captures.state)
    trainer.fit()
    assert _same(weights(trainer), weights(reference))


def test_the_files_of_a_run_go_back_with_it(tmp_path: Path) -> None:
    captures = Captures(5)
    checkpoint = CheckpointConfig(every="2 steps", keep_last="all")  # type: ignore[arg-type]
    config = _config(log_every="1 steps", checkpoint=checkpoint)
    trainer = TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[captures])
    trainer.fit()

    def learned() -> list[tuple[int, float]]:
        return [(each["step"], each["train/loss"]) for each in read_records(tmp_path / "metrics.jsonl")]

    before = learned()
    trainer.load_state_dict(captures.state)
    result = trainer.fit()
    assert [step for step, _ in learned()] == list(range(1, 13))
    # The state is from before the record of its update, which the next record includes.
    assert learned()[6:] == before[6:]
    resumed = TinyTrainer(config, run_dir=tmp_path, world=ALONE).fit()
    assert (resumed.steps, resumed.resumed_from) == (12, result.last_checkpoint)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    captures = Captures(2)
    TinyTrainer(_config(), world=ALONE, callbacks=[captures]).fit()
    state = captures.state
    with pytest.raises(ResumeError, match=r"saved state_dict\(\) .*\n  config.seed: 0 -> 1"):
        TinyTrainer(_config(seed=1), world=ALONE).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"(?s)part 'models' cannot load its state: .*size mismatch"):
        TinyTrainer(_config(width=12), world=ALONE).load_state_dict(state, accept_changes=True)
    with pytest.raises(ResumeError, match="rank 0 of 1 was given a state of rank 0 of 2"):
        TinyTrainer(_config(), world=ALONE).load_state_dict({**state, "world_size": 2})

    TinyTrainer(_config(), run_dir=tmp_path, world=ALONE).fit()
    with pytest.raises(ConfigError, match="has checkpoints of a run that has not been restored"):
        TinyTrainer(_config(), run_dir=tmp_path, world=ALONE).load_state_dict(state)

    class Loads(Callback):
        def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
            trainer.load_state_dict(state)

    with pytest.raises(ConfigError, match=r"load_state_dict\(\) would change the position of a run"):
        TinyTrainer(_config(), world=ALONE, callbacks=[Loads()]).fit()


def test_a_loop_of_your_own_continues_alike() -> None:
    def run(state: dict[str, Any] | None = None) -> tuple[dict[str, Any], torch.Tensor]:
        torch.manual_seed(3)
        kept: dict[str, Any] = {}
        with Session(
            TrainerConfig(max_epochs=2),
            model=nn.Linear(1, 1),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
            data=torch.utils.data.DataLoader(torch.rand(24, 1), batch_size=4, shuffle=True),
            world=ALONE,
        ) as session:
            if state is not None:
                session.load_state_dict(state)
            for batch in session:
                for x in session.accumulate(batch):
                    session.backward((session.model(x) - 2 * x).square().mean())
                session.step()
                if session.global_step == 8:
                    kept = session.state_dict()
        return kept, session.model.weight.detach().clone()

    kept, wanted = run()
    assert torch.equal(run(kept)[1], wanted)


def _on_two_ranks(world: World, strategy: str) -> tuple[bool, list[str]]:
    config = _config(parallel=ParallelConfig(strategy=strategy), global_batch_size=8, micro_batch_size=4)  # type: ignore[arg-type]
    captures = Captures(6)
    trainer = TinyTrainer(config, world=world, callbacks=[captures])
    trainer.fit()
    wanted = weights(trainer)
    trainer.load_state_dict(captures.state)
    trainer.fit()
    # The state of the main rank, given to all.
    common = world.broadcast(captures.state if world.is_main else None)
    messages = []
    try:
        trainer.load_state_dict(common)
    except ResumeError as error:
        messages.append(str(error))
    return _same(weights(trainer), wanted), messages


def _under_another_strategy(world: World) -> list[str]:
    def make(strategy: Any) -> TinyTrainer:
        config = _config(parallel=ParallelConfig(strategy=strategy), global_batch_size=8, micro_batch_size=4)
        return TinyTrainer(config, world=world)

    messages = []
    for before, after in (("ddp", "fsdp"), ("fsdp", "ddp")):
        state = make(before).state_dict()
        with pytest.raises(CheckpointError) as raised:
            make(after).load_state_dict(state)
        messages.append(str(raised.value))
    return messages


def test_shards_are_not_loaded_where_they_do_not_belong() -> None:
    """A copy of another shape could even succeed, by broadcasting."""
    for to_shards, to_whole in run_on_ranks(_under_another_strategy, 2):
        assert "model/first.weight was not sharded and is now sharded as [Shard(dim=0)] over (2,) ranks" in to_shards
        assert "sharded as [Shard(dim=0)] over (2,) ranks and is now not sharded: load a state under" in to_whole


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_every_rank_keeps_its_own(strategy: str) -> None:
    for same, messages in run_on_ranks(_on_two_ranks, 2, strategy):
        assert same
        assert messages[0].startswith("rank 1 of 2 was given a state of rank 0 of 2: each rank must load")
