"""A background save captures a single instant while training continues, and reports its failure."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.trainer import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    CheckpointStore,
    Duration,
    ParallelConfig,
    Trainer,
    World,
)
from headway.trainer.callbacks import Ema, Samples
from headway.trainer.checkpoints import staging
from headway.trainer.checkpoints.background import BackgroundSave
from headway.trainer.checkpoints.format.manifest import CheckpointWarning
from headway.trainer.checkpoints.model_state import ModelState, OptimizerState
from headway.trainer.checkpoints.rng import RngState
from headway.trainer.checkpoints.staging import Copy
from headway.trainer.checkpoints.store import read_checkpoint
from headway.trainer.distributed.dtensor import to_full_tensor
from headway.trainer.distributed.mesh import Mesh
from headway.trainer.distributed.parallelize import replicate, shard
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights

from .kept_state import KeptState

ALONE = World.single("cpu")


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(3))


def _training(strategy: str = "none", world: World = ALONE) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model: nn.Module = WithBuffer()
    config = ParallelConfig(strategy=strategy)  # type: ignore[arg-type]
    shard(model, config, precision="fp32", world=world, mesh=Mesh.of(world, config))
    model = replicate(model, config, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    linear = (model.module if hasattr(model, "module") else model).linear
    for parameter in linear.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _changes_only_on_step(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 3


def _begin(store: CheckpointStore, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> BackgroundSave:
    return store.begin_save(
        _parts(model, optimizer), rank_parts={"rng": RngState()}, step=step, epoch=0, metrics={}, meta={},
        changes_only_on_step=_changes_only_on_step,
    )  # fmt: skip


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    models = {"model": model}
    return {"models": ModelState(models), "optimizers/optimizer": OptimizerState(models, "optimizer", optimizer)}


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [to_full_tensor(each.detach()).clone() for each in (*model.parameters(), *model.buffers(), *moments)]


def _trains_on(world: World, folder: str, strategy: str) -> None:
    store = CheckpointStore(folder, world=world.with_own_group())
    model, optimizer = _training(strategy, world)
    for step in (1, 2):  # the second save reuses the buffers of the first
        before = _values(model, optimizer)
        drawn = torch.get_rng_state()
        saving = _begin(store, model, optimizer, step)
        # Change a buffer, as a forward pass does.
        dict(model.named_buffers())[next(iter(dict(model.named_buffers())))].add_(1)
        torch.rand(3)
        saving.wait_for_snapshot()
        _step(model, optimizer)
        checkpoint = saving.result()
        assert checkpoint.step == step
        assert not all(torch.equal(*pair) for pair in zip(before, _values(model, optimizer), strict=True))
        other_model, other = _training(strategy, world)
        rng = RngState()
        store.load(_parts(other_model, other), rank_parts={"rng": rng}, checkpoint=checkpoint)
        assert all(torch.equal(*pair) for pair in zip(before, _values(other_model, other), strict=True))
        assert torch.equal(torch.get_rng_state(), drawn)


def test_what_is_saved_is_the_instant_at_which_it_was_asked_for(tmp_path: Path) -> None:
    _trains_on(ALONE, str(tmp_path), "none")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_ranks_their_threads_meet_apart_from_the_training(tmp_path: Path, strategy: str) -> None:
    run_on_ranks(_trains_on, 2, str(tmp_path), strategy)


def test_what_is_changed_under_the_copy_is_never_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _training()
    goes_on = threading.Event()
    finish = Copy.finish
    monkeypatch.setattr(Copy, "finish", lambda self: (goes_on.wait(), finish(self)))
    store = CheckpointStore(tmp_path, world=ALONE)
    saving = _begin(store, model, optimizer, 1)
    _step(model, optimizer)  # without wait_for_snapshot()
    goes_on.set()
    with pytest.raises(CheckpointError, match=r"models/model/linear.weight was changed while it was being saved"):
        saving.result()
    assert store.list() == []
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


class Intrudes(TinyTrainer):
    """Changes a weight before the forward pass, in the update after the save of step 2."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and self.global_step == 2:
            with torch.no_grad():
                self.model.first.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


def _intrude(world: World, folder: str, strategy: str) -> str:
    config = TinyConfig(max_steps=6, evaluate_every=None, checkpoint=CheckpointConfig(every=Duration.parse("2 steps")),
                        parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]  # fmt: skip
    finish = Copy.finish
    Copy.finish = lambda self: (time.sleep(0.3), finish(self))[1]  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as raised:
        Intrudes(config, run_dir=folder, world=world).fit()
    return str(raised.value)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_weight_that_a_step_changes_under_the_copy_is_never_committed(tmp_path: Path, strategy: str) -> None:
    for message in run_on_ranks(_intrude, 2, str(tmp_path), strategy):
        assert "models/model/first.weight was changed while it was being saved" in message
    assert CheckpointStore(tmp_path / "checkpoints", world=ALONE).list() == []


def _rows(number: int) -> dict[str, dict[str, Any]]:
    rows = {
        f"weight{row}": {key: torch.full((2, 3), float(number + row)) for key in ("first", "second")} for row in (0, 1)
    }
    return {**rows, "bias": {"third": torch.ones(1)}}


def _tied() -> dict[str, dict[str, Any]]:
    rows = _rows(0)
    rows["weight1"]["first"] = rows["weight0"]["first"]
    return rows


CHANGES: dict[str, Callable[[], dict[str, dict[str, Any]]]] = {
    "values": lambda: _rows(7),
    "tied": _tied,
    "new row": lambda: _rows(0) | {"new": {"first": torch.ones(3)}},
    "fewer rows": lambda: {"weight0": _rows(0)["weight0"]},
    "no rows": dict,
    "renamed row": lambda: {f"{row}_": each for row, each in _rows(0).items()},
    "another key": lambda: {row: {f"{key}_": value for key, value in each.items()} for row, each in _rows(0).items()},
    "keys in other rows": lambda: {
        "weight0": _rows(0)["weight0"], "weight1": _rows(0)["weight1"] | _rows(0)["bias"], "bias": {}
    },
    "plain value": lambda: {"weight0": {**_rows(0)["weight0"], "step": 3}, "weight1": _rows(0)["weight1"]},
    "tensor for a plain value": lambda: {"weight0": {"step": torch.ones(())}, "weight1": {"step": 2.5}},
    "shape": lambda: {row: {key: torch.ones(4) for key in each} for row, each in _rows(0).items()},
    "dtype": lambda: {row: {key: value.double() for key, value in each.items()} for row, each in _rows(0).items()},
    "names that clash": lambda: {"a/b": {"c": torch.ones(1)}, "a": {"b/c": torch.zeros(1)}},
    "key with a dollar": lambda: {"weight0": {"$tensor": torch.ones(1)}},
    "key that is no text": lambda: {"weight0": {0: torch.ones(1)}},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_state_may_change_its_structure_between_saves(tmp_path: Path, change: str) -> None:
    store = CheckpointStore(tmp_path, world=ALONE)
    part = KeptState()
    for step, rows in enumerate((_rows(1), CHANGES[change](), _rows(3)), 1):
        part.state = {"state": rows, "groups": [{"lr": 0.1 * step}]}
        wanted = copy.deepcopy(part.state)
        saving = store.begin_save(
            {"part": part}, rank_parts={}, step=step, epoch=0, metrics={}, meta={},
            changes_only_on_step=lambda tensor: True,
        )  # fmt: skip
        part.state["groups"][0]["lr"] = 0.0
        part.state["state"]["later"] = {}
        back = KeptState()
        store.load({"part": back}, rank_parts={}, checkpoint=saving.result())
        assert back.state["groups"] == wanted["groups"]
        leaves, live = ([(row, *pair) for row, each in it["state"].items() for pair in each.items()]
                        for it in (back.state, wanted))  # fmt: skip
        assert [each[:2] for each in leaves] == [each[:2] for each in live]
        assert back.state["state"].keys() == wanted["state"].keys()
        for (*_, one), (*_, other) in zip(leaves, live, strict=True):
            assert type(one) is type(other)
            assert (
                torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other
            )
        assert [[one[2] is other[2] for other in leaves] for one in leaves] == [
            [one[2] is other[2] for other in live] for one in live
        ]


class Unsaveable:
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise AssertionError


def _fails_on_one(world: World, folder: str) -> str:
    store = CheckpointStore(folder, world=world.with_own_group())
    model, optimizer = _training("ddp", world)
    parts = _parts(model, optimizer) | ({"lock": Unsaveable()} if world.rank == 1 else {})
    saving = store.begin_save(
        parts, rank_parts={}, step=1, epoch=0, metrics={}, meta={}, changes_only_on_step=_changes_only_on_step
    )  # fmt: skip
    saving.wait_for_snapshot()
    _step(model, optimizer)
    with pytest.raises(CheckpointError) as raised:
        saving.result()
    assert _begin(store, model, optimizer, 2).result().step == 2
    return str(raised.value)


def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    first, second = run_on_ranks(_fails_on_one, 2, str(tmp_path))
    assert first == second
    assert "rank 1: part 'lock', key 'lock' holds a _thread.lock" in first


# ---- In a run -----------------------------------------------------------------------------------------------------


class Saved(Callback):
    """Records the steps of reported checkpoints, and the updates at which they were reported."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.told_at: list[int] = []
        self.failed: list[BaseException] = []

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        assert read_checkpoint(checkpoint.path).step == checkpoint.step
        self.steps.append(checkpoint.step)
        self.told_at.append(trainer.global_step)

    def on_checkpoint_failed(self, trainer: Trainer[Any], error: BaseException) -> None:
        self.failed.append(error)
        raise OSError("the hook has failed too")


CONFIG = TinyConfig(
    max_steps=12,
    global_batch_size=16,
    dropout=0.3,
    noise=0.1,
    evaluate_every=None,
    checkpoint=CheckpointConfig(every=Duration(3), keep_last="all"),
)


def _run_and_resume(world: World, folder: str, strategy: str) -> list[list[int]]:
    config = replace(CONFIG, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
    saved = Saved()
    trainer = TinyTrainer(config, run_dir=f"{folder}/run", world=world, callbacks=[saved])
    result = trainer.fit()
    # The last step twice: the evaluation at the end is saved with its state.
    assert saved.steps == [3, 6, 9, 12, 12]
    assert all(step <= told <= step + 3 for step, told in zip(saved.steps, saved.told_at, strict=True))
    leftovers = [path for path in Path(folder, "run", "checkpoints").iterdir() if path.name.startswith(".")]
    assert leftovers == [] or not world.is_main  # the main rank deletes last
    for step in (3, 6, 9):
        resumed = TinyTrainer(
            replace(config, checkpoint=CheckpointConfig(every=None)), run_dir=f"{folder}/{step}", world=world
        )
        assert resumed.fit(resume=f"{folder}/run/checkpoints/step-{step:08d}").resumed_from is not None
        assert sorted({at for at, _ in resumed.seen}) == list(range(step, 12))
        for name, value in weights(trainer).items():
            assert torch.equal(value, weights(resumed)[name]), (step, name)
    assert result.last_checkpoint is not None
    return [saved.steps, saved.told_at]


def test_the_first_save_finds_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated_at: list[int] = []
    allocate = staging._allocate
    monkeypatch.setattr(
        staging, "_allocate", lambda tensors: (allocated_at.append(trainer.global_step), allocate(tensors))[1]
    )
    trainer = TinyTrainer(CONFIG, run_dir=tmp_path / "saves", world=ALONE)
    trainer.fit()
    assert allocated_at == [1]
    trainer = TinyTrainer(CONFIG, run_dir=tmp_path / "epoch", world=ALONE)
    trainer.train_epoch()
    assert allocated_at == [1, 1]
    # One that saves only at the end needs no copies.
    trainer = TinyTrainer(replace(CONFIG, checkpoint=CheckpointConfig(every=None)), run_dir=tmp_path, world=ALONE)
    trainer.fit()
    assert allocated_at == [1, 1]


def test_state_that_cannot_be_saved_fails_the_save_and_not_the_rehearsal(tmp_path: Path) -> None:
    class HoldsLock(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    trainer = TinyTrainer(CONFIG, run_dir=tmp_path, world=ALONE, callbacks=[HoldsLock()])
    with pytest.raises(CheckpointError, match="cannot save step 3 .*holds a _thread.lock"):
        trainer.fit()


def test_an_evaluation_that_fails_at_the_end_loses_no_update(tmp_path: Path) -> None:
    """Why the last step is saved twice: before its evaluation, and with it."""

    class Fails(TinyTrainer):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        Fails(CONFIG, run_dir=tmp_path, world=ALONE).fit()
    mended = TinyTrainer(CONFIG, run_dir=tmp_path, world=ALONE)
    result = mended.fit()
    assert mended.seen == []
    assert result.resumed_from == str(tmp_path / "checkpoints/step-00000012")
    alone = TinyTrainer(CONFIG, run_dir=tmp_path / "alone", world=ALONE).fit()
    for last in (result.last_checkpoint, alone.last_checkpoint):
        assert last is not None
        assert Path(last).name == "step-00000012"
        assert "validation/loss" in read_checkpoint(last).metrics
        assert not [each for each in Path(last).parent.iterdir() if "." in each.name]


@pytest.mark.parametrize("how", ["accept_changes", "restore", "callback"])
def test_what_a_run_does_not_continue_in_full_is_not_replaced(tmp_path: Path, how: str) -> None:
    class Fails(TinyTrainer):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        Fails(CONFIG, run_dir=tmp_path, world=ALONE, callbacks=[Ema(0.9)]).fit()
    options: dict[str, Any] = {
        "accept_changes": {"accept_changes": True},
        "restore": {"restore": ("models", "progress", "data", "callbacks")},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [] if how == "callback" else [Ema(0.9)]
        mended = TinyTrainer(CONFIG, run_dir=tmp_path, world=ALONE, callbacks=callbacks)
        result = mended.fit(**options.get(how, {}))
    assert result.last_checkpoint == f"{result.resumed_from}.2"


def test_a_run_goes_on_from_any_checkpoint_that_was_saved_while_it_trained(tmp_path: Path) -> None:
    _run_and_resume(ALONE, str(tmp_path), "none")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_ranks_hear_of_a_checkpoint_at_the_same_update(tmp_path: Path, strategy: str) -> None:
    first, second = run_on_ranks(_run_and_resume, 2, str(tmp_path), strategy)
    assert first == second


@pytest.mark.parametrize("background", [True, False])
def test_a_save_is_tried_again_as_often_as_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    from headway.trainer.checkpoints import storage

    commit, failures = storage._Local.commit, Counter[str]()

    def full(self: Any, staged: Path, name: str, manifest: bytes, files: Any) -> None:
        failures[name] += 1
        if failures[name] <= {"step-00000006": 2, "step-00000009": 9}.get(name, 0):
            raise OSError(28, "No space left on device")
        commit(self, staged, name, manifest, files)

    monkeypatch.setattr(storage._Local, "commit", full)
    saved, checkpoint = (
        Saved(),
        replace(CONFIG.checkpoint, retries=2, retry_after=Duration(0.01, "seconds"), background=background),
    )
    config = replace(CONFIG, checkpoint=checkpoint)
    with (
        pytest.warns(CheckpointWarning, match="cannot save step .* trying again in 0.01 s") as warned,
        pytest.raises(CheckpointError, match="cannot save step 9 .*No space left on device"),
    ):
        TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[saved]).fit()
    assert saved.steps == [3, 6]
    assert failures == {"step-00000003": 1, "step-00000006": 3, "step-00000009": 3}
    assert len([each for each in warned if "trying again" in str(each.message)]) == 4
    assert "up to 2 times" in str(warned[0].message)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]


def _fails_at_first(world: World, folder: str) -> list[str]:
    """Rank 1 fails at its first attempt to write."""
    from headway.trainer.checkpoints import storage

    publish, tries = storage._Local.publish, list[int]()

    def late(self: Any, *args: Any) -> None:
        tries.append(1)
        if world.rank == 1 and len(tries) == 1:
            raise OSError(5, "Input/output error")
        publish(self, *args)

    storage._Local.publish = late  # type: ignore[method-assign]
    config = replace(
        CONFIG, max_steps=3, checkpoint=CheckpointConfig(every=None, retries=1, retry_after=Duration(0.01, "seconds"))
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = TinyTrainer(config, run_dir=folder, world=world).fit()
    assert result.last_checkpoint is not None
    assert read_checkpoint(result.last_checkpoint).step == 3
    return [str(each.message) for each in warned if "trying again" in str(each.message)]


def test_all_ranks_try_again_when_one_has_failed(tmp_path: Path) -> None:
    first, second = run_on_ranks(_fails_at_first, 2, str(tmp_path))
    assert len(first) == 1
    assert "rank 1: OSError: [Errno 5] Input/output error" in first[0]
    assert second == []  # one rank warns for all


def test_a_failure_surfaces_and_what_was_saved_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.trainer.checkpoints import storage

    commit = storage._Local.commit

    def full(self: Any, staged: Path, name: str, manifest: bytes, files: Any) -> None:
        if name == "step-00000006":
            raise OSError(28, "No space left on device")
        commit(self, staged, name, manifest, files)

    monkeypatch.setattr(storage._Local, "commit", full)
    saved = Saved()
    with pytest.raises(CheckpointError, match="cannot save step 6 .*No space left on device") as raised:
        TinyTrainer(CONFIG, run_dir=tmp_path, world=ALONE, callbacks=[saved]).fit()
    assert saved.steps == [3]
    assert saved.failed == [raised.value]
    assert raised.value.__notes__ == ["on_checkpoint_failed also raised OSError: the hook has failed too"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_run_that_fails_leaves_the_save_that_was_under_way_whole(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_step_start(self, trainer: Trainer[Any]) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("just after the save was begun")

    with pytest.raises(RuntimeError, match="just after"):
        TinyTrainer(CONFIG, run_dir=tmp_path, world=ALONE, callbacks=[Fails()]).fit()
    store = CheckpointStore(tmp_path / "checkpoints", world=ALONE)
    newest = store.newest_good()
    assert newest is not None
    assert newest.step == 3


def test_averages_that_take_the_weights_place_wait_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The averages are read at the end of an epoch, while a save of its last update is in progress."""
    looks = threading.Event()
    copy, write = Copy._copy, Ema._write
    monkeypatch.setattr(Copy, "_copy", lambda self: (looks.wait(0.2), copy(self)))
    monkeypatch.setattr(Ema, "_write", lambda self, values: (write(self, values), looks.set()))
    config = TinyConfig(
        max_epochs=2, num_rows=32, global_batch_size=8, evaluate_every=None, checkpoint=CheckpointConfig(every=4)
    )
    callbacks = [Ema(0.5), Samples(lambda trainer: None, every="1 epochs")]
    assert TinyTrainer(config, run_dir=tmp_path, callbacks=callbacks, world=ALONE).fit().status == "completed"


def test_averages_that_a_hook_applies_wait_for_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = threading.Event()
    copy, write = Copy._copy, Ema._write
    monkeypatch.setattr(Copy, "_copy", lambda self: (looks.wait(0.2), copy(self)))
    monkeypatch.setattr(Ema, "_write", lambda self, values: (write(self, values), looks.set()))
    ema = Ema(0.5)

    class Looks(Callback):
        def on_step_start(self, trainer: Trainer[Any]) -> None:
            if trainer.global_step == 3:
                with ema.applied():
                    pass

    assert TinyTrainer(CONFIG, run_dir=tmp_path, callbacks=[ema, Looks()], world=ALONE).fit().status == "completed"
    assert looks.is_set()


def test_training_goes_on_while_a_save_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.trainer.checkpoints import storage

    commit, has_gone_on = storage._Local.commit, threading.Event()

    def waits(self: Any, *args: Any) -> None:
        assert has_gone_on.wait(120), "the training waits for the save"
        commit(self, *args)

    class GoesOn(Callback):
        def on_step_end(self, trainer: Trainer[Any]) -> None:
            if trainer.global_step == 5:
                has_gone_on.set()

    monkeypatch.setattr(storage._Local, "commit", waits)
    saved = Saved()
    TinyTrainer(replace(CONFIG, max_steps=6), run_dir=tmp_path, world=ALONE, callbacks=[saved, GoesOn()]).fit()
    assert saved.steps[0] == 3


def test_a_save_waits_for_the_one_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.trainer.checkpoints import storage

    commit, under_way, most = storage._Local.commit, [0], [0]

    def slow(self: Any, *args: Any) -> None:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.1)
        commit(self, *args)
        under_way[0] -= 1

    monkeypatch.setattr(storage._Local, "commit", slow)
    saved = Saved()
    config = replace(CONFIG, max_steps=5, checkpoint=CheckpointConfig(every=Duration(1), keep_last="all"))
    TinyTrainer(config, run_dir=tmp_path, world=ALONE, callbacks=[saved]).fit()
    # fit() waited for the last save.
    assert sorted(set(saved.steps)) == [1, 2, 3, 4, 5]
    assert most == [1]


def test_a_weight_that_gets_other_memory_during_the_copy_is_saved_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a step that computes with a rounded copy in `parameter.data`, and restores it."""
    model, optimizer = _training()
    continues, finish = threading.Event(), Copy.finish
    monkeypatch.setattr(Copy, "finish", lambda self: (continues.wait(), finish(self)))
    before = _values(model, optimizer)
    store = CheckpointStore(tmp_path, world=ALONE)
    saving = _begin(store, model, optimizer, 1)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    continues.set()
    other_model, other = _training()
    store.load(_parts(other_model, other), rank_parts={}, checkpoint=saving.result())
    assert all(torch.equal(*pair) for pair in zip(before, _values(other_model, other), strict=True))


class Teaches(TinyTrainer):
    """A teacher, held by no optimizer, which follows the weights at the beginning of a step, as in DINO and MoCo."""

    assigns = False
    has_followed = threading.Event()

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for average, weight in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            if self.assigns:
                average.data = average.data * 0.5 + weight.data * 0.5
            else:
                average.data.mul_(0.5).add_(weight.detach().data, alpha=0.5)  # `.data` changes no version
        self.has_followed.set()
        with torch.no_grad():
            target = self.teacher(batch["x"])
        return F.mse_loss(self.model(batch["x"]), target + 1)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.model(batch["x"]).mean()}


class Reassigns(Teaches):
    assigns = True


def _teaches(world: World, folder: str, strategy: str, cls: type[Teaches] = Teaches) -> None:
    config = replace(CONFIG, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
    finish = Copy.finish

    def finish_late(copy: Copy) -> None:
        cls.has_followed.clear()
        cls.has_followed.wait(1)
        finish(copy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copy, "finish", finish_late)
        trained = cls(config, run_dir=f"{folder}/run", world=world)
        trained.fit()
    resumed = cls(replace(config, checkpoint=CheckpointConfig(every=None)), run_dir=f"{folder}/6", world=world)
    resumed.fit(resume=f"{folder}/run/checkpoints/step-00000006")
    for name in ("model", "teacher"):
        pairs = zip(trained.models[name].parameters(), resumed.models[name].parameters(), strict=True)
        assert all(torch.equal(to_full_tensor(one), to_full_tensor(other)) for one, other in pairs)


@pytest.mark.parametrize("cls", [Teaches, Reassigns])
def test_a_teacher_that_follows_in_the_step_is_saved_as_it_was(tmp_path: Path, cls: type[Teaches]) -> None:
    _teaches(ALONE, str(tmp_path), "none", cls)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_a_teacher_on_ranks_is_saved_as_it_was(tmp_path: Path, strategy: str) -> None:
    run_on_ranks(_teaches, 2, str(tmp_path), strategy)
