"""One update: its gradient is that of the whole batch, however it is split; norm, NaN check and clipping."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    NonFiniteError,
    ParallelConfig,
    StepError,
    Trainer,
    World,
)
from headway.trainer.distributed.dtensor import to_full_tensor, to_local
from headway.trainer.step.loss_weights import scales_of_mean
from headway.trainer.step.oom import is_out_of_memory
from tests.distributed import run_on_ranks
from tests.tiny import Deep, Losses, Rows, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")
NOTHING_BETWEEN = CheckpointConfig(every=None)


def _config(**changes: Any) -> TinyConfig:
    settings = {"max_steps": 1, "shuffle": False, "evaluate_every": None, "log_every": "1 steps", **changes}
    return TinyConfig(**settings)


class Gradients(Callback):
    """Records the weights before the first update, and the gradients of every update before clipping."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        self.before = weights(trainer)

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        parameters = trainer.unwrap(trainer.models["model"]).named_parameters()
        self.gradients.append({name: to_full_tensor(p.grad).clone() for name, p in parameters if p.grad is not None})


# ---- What a step gets ----------------------------------------------------------------------------------------------


class Doubling(TinyTrainer):
    """prepare_batch doubles its rows, but not their weights; its first update is retried."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared: list[tuple[bool, int]] = []
        self.fails = True

    def prepare_batch(self, batch: Any) -> Any:
        self.prepared.append((self.training, len(batch["id"])))
        return {**batch, **{name: batch[name].repeat_interleave(2, 0) for name in ("x", "y")}, "twice": True}

    def loss_weight(self, batch: Any) -> float:
        assert "twice" not in batch
        return float(len(batch["x"]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        assert len(batch["x"]) == 2 * len(batch["id"])
        if self.training and self.fails:
            self.fails = False
            outputs["loss"] = outputs["loss"] * float("nan")
        return outputs


class Seen(Callback):
    """The batches that hooks get, and gradient norms right after each optimizer step."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.norms: list[float] = []

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        trainer.optimizers["optimizer"].register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *args: Any) -> None:
        self.norms.append(sum(p.grad.norm().item() for group in optimizer.param_groups for p in group["params"]))

    def on_batch_start(self, trainer: Trainer[Any], batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    on_evaluation_batch_start = on_batch_start


@pytest.mark.parametrize("exact", [False, True])
def test_steps_and_hooks_get_batches_as_they_are_prepared(exact: bool) -> None:
    config = _config(max_steps=2, global_batch_size=16, micro_batch_size=8, non_finite="retry", exact=exact)
    plain, losses = Losses(), Losses()
    TinyTrainer(config, world=ALONE, callbacks=[plain]).fit()
    seen = Seen()
    trainer = Doubling(config, world=ALONE, callbacks=[losses, seen])
    trainer.fit()
    # Two micro-batches of three tries; then the rows of the evaluation.
    assert trainer.prepared[:6] == [(True, 8)] * 6
    assert sum(rows for is_training, rows in trainer.prepared if not is_training) == 10
    assert [batch["twice"] for batch in seen.batches] == [True] * len(trainer.prepared)
    for name in ("train/loss", "validation/loss"):
        assert losses.of(name) == pytest.approx(plain.of(name), rel=1e-5)
    # Of two updates, from before the gradients are let go.
    assert len(seen.norms) == 2
    assert min(seen.norms) > 0


# ---- Token weights -------------------------------------------------------------------------------------------------


def _labels(batch: Any) -> torch.Tensor:
    """Three tokens a row, of which row i has a label for i % 4: none at all in every fourth row."""
    has_label = torch.arange(3) < (batch["id"] % 4)[:, None]
    return torch.where(has_label, batch["y"][:, None], -100)


def _token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    labels = _labels(batch)
    logits = model(batch["x"])[:, None, :].expand(-1, 3, -1)
    return F.cross_entropy(logits.reshape(-1, 3), labels.reshape(-1))


class TokenTrainer(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": _token_loss(self.model, batch)}

    def loss_weight(self, batch: Any) -> torch.Tensor:
        return (_labels(batch) != -100).sum()


class CountingTrainer(TokenTrainer):
    """Returns its weights as Python integers."""

    def loss_weight(self, batch: Any) -> int:  # type: ignore[override]
        return int(super().loss_weight(batch))


def _first_gradient(world: World, trainer_class: type[TinyTrainer], **changes: Any) -> dict[str, Any]:
    spy, losses = Gradients(), Losses()
    settings = {"global_batch_size": 14, "drop_last": False, **changes}
    trainer = trainer_class(_config(**settings), world=world, callbacks=[spy, losses])
    trainer.fit()
    return {
        "before": spy.before,
        "gradient": spy.gradients[0],
        "loss": losses.records[1]["train/loss"],
        "norm": losses.records[1]["grad_norm"],
    }


def _of_plain_torch(before: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = Deep(9, 0.0)
    model.load_state_dict({name.removeprefix("model."): value for name, value in before.items()})
    rows = Rows(103)
    batch = {"id": torch.arange(14), "x": rows.x[:14], "y": rows.y[:14]}
    loss = _token_loss(model, batch)
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.cat([value.flatten() for value in gradient.values()]).norm().item()
    return {"gradient": gradient, "loss": loss.item(), "norm": norm}


class _Sums:
    """A world that sums as if two ranks had equal values."""

    size = 2

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)


class _Kernels(TorchDispatchMode):
    """Records the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_that_are_numbers_get_to_the_device_without_a_copy_that_waits(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _Kernels() as kernels:
            scales = scales_of_mean([3, 5], _Sums(), torch.device(device))  # type: ignore[arg-type]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    # What torch makes of a number elsewhere and then copies, no dispatch shows: it must come out of a kernel.
    assert kernels.names[0] == "aten::full"
    assert [float(scale) for scale in scales] == pytest.approx([3 * 2 / 16, 5 * 2 / 16])


def _assert_is_of_whole_batch(result: dict[str, Any]) -> None:
    wanted = _of_plain_torch(result["before"])
    for name, value in wanted["gradient"].items():
        torch.testing.assert_close(result["gradient"][name], value, atol=1e-6, rtol=1e-5)
    assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert result["norm"] == pytest.approx(wanted["norm"], rel=1e-5)


@pytest.mark.parametrize("trainer_class", [TokenTrainer, CountingTrainer])
@pytest.mark.parametrize("micro_batch_size", [14, 3, 1])
def test_token_weights_give_the_gradient_of_the_whole_batch(
    trainer_class: type[TinyTrainer], micro_batch_size: int
) -> None:
    """With micro-batches of one row, every fourth has no token at all, and NaN as its mean loss: it counts nothing."""
    _assert_is_of_whole_batch(_first_gradient(ALONE, trainer_class, micro_batch_size=micro_batch_size))


def _token_weights_on_ranks(world: World) -> list[dict[str, Any]]:
    return [
        _first_gradient(world, trainer_class, micro_batch_size=size, parallel=ParallelConfig(strategy=strategy))
        for trainer_class, strategy, size in (
            (TokenTrainer, "ddp", 3),
            (CountingTrainer, "ddp", 1),
            (TokenTrainer, "fsdp", 3),
            (TokenTrainer, "fsdp", 7),
        )
    ]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_token_weights_on_ranks_give_the_gradient_of_the_whole_batch(world_size: int) -> None:
    for rank in run_on_ranks(_token_weights_on_ranks, world_size):
        for result in rank:
            _assert_is_of_whole_batch(result)


# ---- Once per update -----------------------------------------------------------------------------------------------


class _CountReduceScatters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def _count_synchronisations(world: World) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    settings = {"max_steps": 3, "global_batch_size": 16}

    class CountBuckets(Callback):
        buckets = 0

        def on_setup_end(self, trainer: Trainer[Any]) -> None:
            def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
                self.buckets += 1
                return allreduce_hook(None, bucket)  # type: ignore[arg-type]

            trainer.models["model"].register_comm_hook(None, count)  # type: ignore[operator]

    for micro_batch_size in (8, 2):
        spy = CountBuckets()
        config = _config(**settings, micro_batch_size=micro_batch_size)
        TinyTrainer(config, world=world, callbacks=[spy]).fit()
        counts[f"ddp/{micro_batch_size}"] = spy.buckets
        for name, no_sync in (("fsdp", None), ("no_sync", True)):
            parallel = ParallelConfig(strategy="fsdp", no_sync=no_sync)
            config = _config(**settings, micro_batch_size=micro_batch_size, parallel=parallel)
            held = _HeldGradients()
            trainer = TinyTrainer(config, world=world, callbacks=[held])
            with _CountReduceScatters() as mode:
                trainer.fit()
            counts[f"{name}/{micro_batch_size}"] = mode.count
            counts[f"{name}/{micro_batch_size}/held"] = held.most
    counts["parameters"] = sum(parameter.numel() for parameter in Deep(9, 0.0).parameters())
    return counts


class _HeldGradients(Callback):
    """Counts the elements of unsharded gradients that a rank holds between micro-batches."""

    most = 0

    def on_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_accumulating_gradients:
            leaves = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.is_leaf]
            gradients = {id(each.grad): each.grad for each in leaves if each.grad is not None}
            self.most = max(self.most, sum(to_local(each).numel() for each in gradients.values()))


@pytest.mark.extended
def test_gradients_meet_once_per_update_or_are_never_whole_on_a_rank() -> None:
    """Three updates of one or of four micro-batches: as many all-reduces of DDP's one bucket, and reduce-scatters."""
    counts = run_on_ranks(_count_synchronisations, 2)[0]
    assert counts["ddp/8"] == counts["ddp/2"] == 3
    # FSDP2 has the two blocks and the rest of the model as its groups.
    assert counts["fsdp/8"] == counts["no_sync/8"] == counts["no_sync/2"] == 3 * 3
    assert counts["fsdp/2"] == 3 * 3 * 4
    # Between micro-batches a rank holds its half of the gradient, padded to whole rows, unless no_sync is set.
    assert counts["parameters"] / 2 <= counts["fsdp/2/held"] < 0.7 * counts["parameters"]
    assert counts["no_sync/2/held"] >= counts["parameters"]


# ---- The norm ------------------------------------------------------------------------------------------------------


class SgdTrainer(TinyTrainer):
    """Moves the weights by exactly the gradient."""

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)


def _norms(world: World, strategy: str) -> dict[str, float]:
    norms = {}
    for limit in (None, 0.05):
        spy, losses = Gradients(), Losses()
        config = _config(
            max_grad_norm=limit,
            global_batch_size=16,
            parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
        )
        trainer = SgdTrainer(config, world=world, callbacks=[spy, losses])
        trainer.fit()
        after = weights(trainer)
        moved = torch.cat([(after[name] - value).flatten() for name, value in spy.before.items()]).norm()
        true = torch.cat([value.flatten() for value in spy.gradients[0].values()]).norm()
        norms |= {f"logged/{limit}": losses.records[1]["grad_norm"], f"true/{limit}": true.item()}
        norms[f"moved/{limit}"] = moved.item()
    return norms


def _norms_of_both(world: World) -> list[dict[str, float]]:
    return [_norms(world, "ddp"), _norms(world, "fsdp")]


def test_the_norm_is_global_and_from_before_clipping() -> None:
    alone = _norms(ALONE, "ddp")
    assert alone["logged/None"] == pytest.approx(alone["true/None"], rel=1e-5)
    assert alone["moved/None"] == pytest.approx(alone["true/None"], rel=1e-4)
    assert alone["logged/0.05"] == alone["logged/None"] > 0.05
    assert alone["moved/0.05"] == pytest.approx(0.05, rel=1e-3)
    for rank in run_on_ranks(_norms_of_both, 2):
        for strategy in rank:
            assert strategy == pytest.approx(alone, rel=1e-4)


def _clipped_by_value(world: World, strategy: str) -> list[float]:
    """Each number of the gradient is cut off where SGD with a rate of 1 would move a weight by more."""
    spy, losses = Gradients(), Losses()
    config = _config(
        max_grad_value=0.01,
        max_grad_norm=0.5,
        grad_norm_groups=("model.blocks.*", "*.bias"),
        global_batch_size=16,
        micro_batch_size=4,
        parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
    )
    trainer = SgdTrainer(config, world=world, callbacks=[spy, losses])
    trainer.fit()
    record, gradients = losses.records[1], spy.gradients[0]
    norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, value in weights(trainer).items():
        gradient = gradients[name.removeprefix("model.")] * min(1.0, 0.5 / norm.item())
        torch.testing.assert_close(spy.before[name] - value, gradient.clamp(-0.01, 0.01), atol=1e-6, rtol=1e-4)
    for pattern, part in (("model.blocks.*", "blocks."), ("*.bias", ".bias")):
        group = [value.flatten() for name, value in gradients.items() if part in name]
        assert record[f"grad_norm/{pattern}"] == pytest.approx(torch.cat(group).norm().item(), rel=1e-5)
    return [record["grad_norm"], record["grad_norm/model.blocks.*"], record["grad_norm/*.bias"]]


def _clipped_on_ranks(world: World) -> list[list[float]]:
    return [_clipped_by_value(world, "ddp"), _clipped_by_value(world, "fsdp")]


def test_numbers_are_clipped_by_value_and_norms_logged_by_group() -> None:
    alone = _clipped_by_value(ALONE, "ddp")
    for rank in run_on_ranks(_clipped_on_ranks, 2):
        for norms in rank:
            assert norms == pytest.approx(alone, rel=1e-4)


def test_a_group_without_parameters_is_refused_before_the_first_step() -> None:
    with pytest.raises(
        ConfigError, match=r"'blocks\.\*' matches no parameter; patterns match whole names, such as model\."
    ):
        TinyTrainer(_config(grad_norm_groups=("blocks.*",)), world=ALONE).setup()


# ---- Gradients of zero, and none ------------------------------------------------------------------------------------


def test_a_gradient_of_zero_is_legal() -> None:
    class NoSignal(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx)["loss"] * 0.0}

    losses = Losses()
    for limit in (None, 1.0):
        trainer = NoSignal(_config(max_grad_norm=limit), world=ALONE, callbacks=[losses])
        assert trainer.fit().status == "completed"
        assert losses.records[1]["grad_norm"] == 0.0
        assert all(value.isfinite().all() for value in weights(trainer).values())


def test_parameters_that_are_frozen_or_unused_stay_as_they_are() -> None:
    class Partly(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self.model.unused = nn.Linear(2, 2)
            self.model.first.requires_grad_(False)

    spy = Gradients()
    trainer = Partly(_config(max_steps=2), world=ALONE, callbacks=[spy])
    with pytest.warns(UserWarning, match="model.unused.weight, model.unused.bias got no gradient") as warned:
        trainer.fit()
    assert len(warned) == 1
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, spy.before[name])}
    assert moved == {name for name in spy.before if "first" not in name and "unused" not in name}


class Unused(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.unused = nn.Linear(2, 2)


def _unused_on_ranks(world: World) -> list[str]:
    told = []
    with pytest.raises(StepError) as raised:
        Unused(_config(max_steps=3, global_batch_size=16), world=world).fit()
    told.append(str(raised.value))
    for parallel in (ParallelConfig(find_unused_parameters=True), ParallelConfig(strategy="fsdp")):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            Unused(_config(max_steps=3, global_batch_size=16, parallel=parallel), world=world).fit()
        told += [str(each.message) for each in warned if "got no gradient" in str(each.message)]
    return told


def test_unused_parameters_are_named_where_ddp_waits_for_them() -> None:
    main, other = run_on_ranks(_unused_on_ranks, 2)
    assert main[0] == other[0]
    assert main[0].startswith("model.unused.weight, model.unused.bias got no gradient in the first update, but DDP")
    assert len(main) == 3
    assert len(other) == 1
    assert all(each.startswith("model.unused.weight, model.unused.bias got no gradient") for each in main[1:])


# ---- Steps that do it themselves -----------------------------------------------------------------------------------


class CallsBackward(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.backward(outputs["loss"])
        return {"accuracy": outputs["accuracy"], "loss": outputs["loss"].item()}


class CallsStep(TinyTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.backward(super().training_step(batch, batch_idx)["loss"])
        norm = self.step(self.optimizer)
        if self.training:
            self.norms.append(norm)
        return {}


@pytest.mark.parametrize("micro_batch_size", [16, 4])
def test_a_step_may_do_what_the_loop_would(micro_batch_size: int) -> None:
    results = {}
    for trainer_class in (TinyTrainer, CallsBackward, CallsStep):
        config = _config(max_steps=4, global_batch_size=16, micro_batch_size=micro_batch_size, max_grad_norm=0.5)
        trainer = trainer_class(config, world=ALONE)
        assert trainer.fit().steps == 4
        results[trainer_class] = weights(trainer), trainer.scheduler.last_epoch
    reference, moved = results.pop(TinyTrainer)
    for after, scheduled in results.values():
        assert scheduled == moved == 4
        assert all(torch.equal(after[name], value) for name, value in reference.items())
    accumulated = 16 // micro_batch_size
    assert [norm is not None for norm in trainer.norms] == ([False] * (accumulated - 1) + [True]) * 4  # type: ignore[attr-defined]


class Gan(Trainer[TinyConfig]):
    """Two models with an optimizer each; the critic learns in every update, the generator in every `pace`-th."""

    pace = 1

    def configure_models(self) -> None:
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def configure_optimizers(self) -> None:
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=0.02)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)

    def configure_dataloaders(self) -> Any:
        return DataLoader(Rows(64), batch_size=16, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fake = self.generator(torch.randn_like(batch["x"]))
        critic_loss = F.softplus(-self.critic(batch["x"])).mean() + F.softplus(self.critic(fake.detach())).mean()
        self.backward(critic_loss)
        self.step(self.critic_optimizer)
        outputs = {"critic": critic_loss}
        if self.global_step % self.pace == 0:
            outputs["generator"] = F.softplus(-self.critic(fake)).mean()
            self.backward(outputs["generator"])
            self.step(self.generator_optimizer)
        return outputs


def test_two_optimizers_train_as_in_a_loop_written_by_hand() -> None:
    trainer = Gan(_config(max_steps=8), world=ALONE)
    trainer.fit()

    by_hand = Gan(_config(max_steps=8), world=ALONE)
    by_hand.setup()
    generator, critic = by_hand.generator, by_hand.critic
    batches = [batch for epoch in range(2) for batch in by_hand._engine.data.epoch(epoch)]
    for batch in (micro_batch for each in batches for micro_batch in each.micro_batches):
        fake = generator(torch.randn_like(batch["x"]))
        by_hand.critic_optimizer.zero_grad()
        (F.softplus(-critic(batch["x"])).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        by_hand.critic_optimizer.step()
        by_hand.generator_optimizer.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        by_hand.generator_optimizer.step()
    for name, value in weights(by_hand).items():
        assert torch.equal(weights(trainer)[name], value), name


class SlowGenerator(Gan):
    pace = 3


def test_an_optimizer_that_a_manual_step_leaves_out_does_not_move() -> None:
    states: list[dict[str, torch.Tensor]] = []

    class Keep(Callback):
        def on_step_end(self, trainer: Trainer[Any]) -> None:
            states.append(weights(trainer))

    SlowGenerator(_config(max_steps=6), world=ALONE, callbacks=[Keep()]).fit()
    for name in states[0]:
        moves = [not torch.equal(states[i][name], states[i - 1][name]) for i in range(1, 6)]
        assert moves == ([False, False, True, False, False] if "generator" in name else [True] * 5), name


def _fit_gan(world: World, folder: str, stop_at: int | None) -> Gan:
    config = _config(max_steps=7, global_batch_size=16, micro_batch_size=4, max_grad_norm=1.0)
    trainer = Gan(config, run_dir=folder, world=world, callbacks=[] if stop_at is None else [StopAt(stop_at)])
    trainer.fit()
    return trainer


def _gan_on_ranks(world: World, folder: str) -> bool:
    reference = _fit_gan(world, f"{folder}/reference", None)
    _fit_gan(world, f"{folder}/interrupted", 3)
    resumed = _fit_gan(world, f"{folder}/interrupted", None)
    assert reference.global_step == resumed.global_step == 7
    for name in ("generator_optimizer", "critic_optimizer"):
        mine, theirs = (each.optimizers[name].state_dict()["state"] for each in (resumed, reference))
        assert all(torch.equal(mine[i]["exp_avg"], theirs[i]["exp_avg"]) for i in theirs)
    return all(torch.equal(weights(resumed)[name], value) for name, value in weights(reference).items())


def test_two_optimizers_resume_exactly_under_accumulation(tmp_path: Path) -> None:
    assert _gan_on_ranks(ALONE, str(tmp_path))


def test_two_optimizers_resume_exactly_on_two_ranks(tmp_path: Path) -> None:
    assert run_on_ranks(_gan_on_ranks, 2, str(tmp_path)) == [True, True]


# ---- Steps that nothing can be learned from ------------------------------------------------------------------------


def _returning(value: Any) -> type[TinyTrainer]:
    class Returns(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return value(self, batch) if callable(value) else value

    return Returns


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned nothing; it must return the loss"),
        ({}, "returned a dict with no items"),
        ({"accuracy": 0.5}, "returned a dict with 'accuracy'; it must return the loss"),
        ("done", "returned a str"),
        (0.5, "returned a float"),
        ({"loss": 0.5}, "the loss is a float; it must be a tensor"),
        (lambda self, batch: self.model(batch["x"]), r"the loss has shape \[8, 3\]; reduce it"),
        (lambda self, batch: self.model(batch["x"]).mean().detach(), "the loss has no gradient"),
        (lambda self, batch: torch.tensor(1.0), "the loss has no gradient"),
        (lambda self, batch: nn.Parameter(torch.ones(())) * 2, "no parameter of the optimizer got a gradient"),
        (lambda self, batch: (self.backward(self.model(batch["x"]).mean()), 1), "after self.backward"),
        (lambda self, batch: {"loss": self.model(batch["x"]).mean(), "x": batch["x"]}, "as 'train/x'"),
        (lambda self, batch: self.backward(0.5), "the loss is a float"),
    ],
)
def test_a_step_that_nothing_can_be_learned_from_is_refused(value: Any, message: str) -> None:
    trainer = _returning(value)(_config(), world=ALONE)
    with pytest.raises(StepError, match=message):
        trainer.fit()
    assert trainer.global_step == 0


def test_an_optimizer_that_nobody_knows_is_refused() -> None:
    class Stranger(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.backward(super().training_step(batch, batch_idx)["loss"])
            self.step(torch.optim.SGD(self.model.parameters()))

    with pytest.raises(StepError, match="not an attribute of the trainer"):
        Stranger(_config(), world=ALONE).fit()


# ---- Zeroing -------------------------------------------------------------------------------------------------------


class ZeroesItself(torch.optim.SGD):
    """An optimizer that overrides zero_grad."""

    zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


class ZeroingTrainer(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = ZeroesItself(self.model.parameters(), lr=0.1)


def test_an_optimizers_own_zero_grad_is_called_after_every_update() -> None:
    trainer = ZeroingTrainer(_config(max_steps=3), world=ALONE)
    trainer.fit()
    assert trainer.optimizer.zeroed == 3
    assert all(p.grad is None for p in trainer.model.parameters())


def test_no_gradient_is_left_after_an_update() -> None:
    trainer = TinyTrainer(_config(max_steps=3), world=ALONE)
    trainer.fit()
    assert all(p.grad is None for p in trainer.model.parameters())


# ---- What an update leaves behind, and what it refuses --------------------------------------------------------------


class _Keeps(torch.autograd.Function):
    """Keeps a tensor in the graph, as custom kernels do."""

    alive: list[weakref.ref[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = torch.ones(3)
        _Keeps.alive.append(weakref.ref(ctx.kept))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def test_no_graph_outlives_its_micro_batch() -> None:
    class Keeping(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = _Keeps.apply(F.cross_entropy(self.model(batch["x"]), batch["y"]))  # type: ignore[no-untyped-call]
            return {"loss": loss, "too": loss * 2}

    alive: list[int] = []

    class Counts(Callback):
        def on_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
            gc.collect()
            alive.append(sum(each() is not None for each in _Keeps.alive))

    _Keeps.alive.clear()
    config = _config(max_steps=2, global_batch_size=8, micro_batch_size=2)
    Keeping(config, world=World.single("cpu"), callbacks=[Counts()]).fit()
    assert alive == [0] * 8


@pytest.mark.parametrize("exact", [False, True])
def test_a_number_is_not_both_returned_and_logged(exact: bool) -> None:
    class Twice(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 5.0)
            return F.cross_entropy(self.model(batch["x"]), batch["y"])

    with pytest.raises(StepError, match=r"'loss' is both returned by training_step and logged by self\.log\('loss'"):
        Twice(_config(max_steps=2, exact=exact, global_batch_size=8), world=World.single("cpu")).fit()


def test_a_metric_source_does_not_replace_a_metric() -> None:
    class Adds(Callback):
        def on_setup_end(self, trainer: Trainer[Any]) -> None:
            trainer.add_metric_source(lambda record: {"train/loss": 0.0})

    with pytest.raises(StepError, match="a metric source returns 'train/loss', which the record has already"):
        TinyTrainer(_config(max_steps=2), world=World.single("cpu"), callbacks=[Adds()]).fit()


def test_the_report_names_only_the_guilty_parameters_where_the_host_learns_the_norm_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where gradients are clipped before the norm is known."""
    monkeypatch.setattr("headway.trainer.step.optimizer_step.HOST_READABLE", ())

    class Spoils(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

        def on_gradients_ready(self) -> None:
            self.model.last.bias.grad.fill_(float("nan"))

    config = _config(max_steps=2, max_grad_norm=0.1, non_finite="skip", max_non_finite=1)
    with pytest.raises(NonFiniteError, match=r"in the gradient of model\.last\.bias\. The update") as caught:
        Spoils(config, world=World.single("cpu")).fit()
    assert "blocks" not in str(caught.value)


def test_fp16_without_a_gradient_says_what_is_wrong() -> None:
    class Elsewhere(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.ones((), requires_grad=True) * 2

    with pytest.raises(StepError, match="no parameter of the optimizer got a gradient"):
        Elsewhere(_config(max_steps=2, precision="fp16"), world=World.single("cpu")).fit()


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "MPS backend out of memory (MPS allocated: 1 GB)",
    ],
)
def test_every_way_to_say_out_of_memory_is_understood(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
