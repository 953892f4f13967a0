"""Training on a GPU: saves, strategies, precisions, memory and resuming; and that no update waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from headway.trainer import Callback, CheckpointConfig, LossScaler, ParallelConfig, World, optimizers
from headway.trainer.callbacks import PeakMemory, Throughput
from headway.trainer.distributed import parallelize
from headway.trainer.distributed.ddp import ReplicatedModule
from headway.trainer.distributed.world import backend_for
from headway.trainer.loop.progress import Duration
from headway.trainer.loop.timing import UPDATE_PHASES
from tests.tiny import Losses, TinyConfig, TinyTrainer, weights

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
)
DEVICES = ["cpu", CUDA]
on_devices = pytest.mark.parametrize("device", DEVICES)


def _config(max_steps: int = 6, **fields: Any) -> TinyConfig:
    fields = {"checkpoint": CheckpointConfig(every=None, at_end=False), "log_every": Duration(1, "steps")} | fields
    return TinyConfig(max_steps=max_steps, evaluate_every=None, width=32, dropout=0.1, **fields)


class Fused(TinyTrainer):
    """Has buffers, which change in forward passes, and a fused optimizer, which can skip a step on the device."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.first = nn.Sequential(nn.Linear(6, self.config.width), nn.BatchNorm1d(self.config.width))

    def configure_optimizers(self) -> None:
        self.optimizer = optimizers.adamw(self.model, self.config.learning_rate)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        return {"loss": nn.functional.cross_entropy(logits.float(), batch["y"])}


def _train(device: str, config: TinyConfig, *, cls: type[TinyTrainer] = Fused, **options: Any) -> tuple[Any, Losses]:
    losses = Losses()
    world = options.pop("world", None) or World.single(device)
    trainer = cls(config, world=world, callbacks=[losses, *options.pop("callbacks", ())], **options)
    trainer.fit()
    return trainer, losses


def _losses(losses: Losses) -> list[float]:
    return [record["train/loss"] for record in losses.records.values() if "train/loss" in record]


# ---- Saves and resuming --------------------------------------------------------------------------------------------


@on_devices
def test_a_run_resumed_from_a_background_save_ends_with_the_same_weights(device: str, tmp_path: Path) -> None:
    expected, _ = _train(device, _config(12))
    every = CheckpointConfig(every=Duration(3, "steps"), at_end=False, keep_last="all")
    _train(device, _config(8, checkpoint=every), run_dir=str(tmp_path))
    resumed, losses = _train(device, _config(12, checkpoint=every), run_dir=str(tmp_path))
    assert min(losses.records) == 7
    for name, value in weights(resumed).items():
        assert torch.equal(value, weights(expected)[name]), name


class Watched(Callback):
    """Stores the weights at each save."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, torch.Tensor]] = {}

    def on_checkpoint_start(self, trainer: Any) -> None:
        self.at[trainer.global_step] = {name: value.clone() for name, value in trainer.model.state_dict().items()}


@on_devices
def test_each_background_save_is_bit_equal_while_training_goes_on(device: str, tmp_path: Path) -> None:
    watched = Watched()
    every = CheckpointConfig(every=Duration(2, "steps"), at_end=False, keep_last="all")
    config = _config(9, checkpoint=every)
    _train(device, config, run_dir=str(tmp_path), callbacks=[watched])
    assert sorted(watched.at) == [2, 4, 6, 8]
    for step, before in watched.at.items():
        # At its limit already: it only loads.
        loader = Fused(
            _config(step, checkpoint=every), world=World.single(device), run_dir=str(tmp_path / f"at-{step}")
        )
        loader.fit(resume=str(next((tmp_path / "checkpoints").glob(f"*{step}"))))
        assert loader.global_step == step
        for name, value in loader.model.state_dict().items():
            assert torch.equal(value, before[name]), (step, name)


# ---- Strategies ----------------------------------------------------------------------------------------------------


@pytest.fixture
def group(device: str, tmp_path: Path) -> Iterator[World]:
    """A process group of one rank, over NCCL on a GPU."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend_for(device, with_cpus=True), init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        yield World.attach(torch.device(device, 0) if device == "cuda" else "cpu")
    finally:
        dist.destroy_process_group()


class Plain(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.model(batch["x"]).float(), batch["y"])


class Sharded(Plain):
    """Sharded by the user, since Headway trains the plain model on one rank."""

    offload: OffloadPolicy = OffloadPolicy()
    policy = MixedPrecisionPolicy()

    def configure_models(self) -> None:
        super().configure_models()
        mesh = init_device_mesh(self.device.type, (1,))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, mp_policy=self.policy, offload_policy=self.offload)


class Offloaded(Sharded):
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


@on_devices
def test_ddp_on_one_rank_trains_as_the_plain_model(
    device: str, group: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = _config(micro_batch_size=4, max_grad_norm=1.0)
    _, plain = _train(device, config, cls=Plain)

    def replicate(model: nn.Module, config: ParallelConfig, world: World, *, gradients_are_kept: bool) -> nn.Module:
        ids = [world.device] if world.device.type == "cuda" else None
        return ReplicatedModule(model, device_ids=ids, gradient_as_bucket_view=not gradients_are_kept)

    monkeypatch.setattr(parallelize, "replicate", replicate)
    trainer, wrapped = _train(device, config, cls=Plain, world=group)
    assert type(trainer.models["model"]) is ReplicatedModule
    assert _losses(wrapped) == pytest.approx(_losses(plain), abs=1e-5)


@on_devices
def test_fsdp_on_one_rank_trains_and_resumes_as_the_plain_model(device: str, group: World, tmp_path: Path) -> None:
    _, plain = _train(device, _config(micro_batch_size=4, max_grad_norm=1.0), cls=Plain)
    every = CheckpointConfig(every=Duration(2, "steps"), at_end=False)
    config = _config(3, micro_batch_size=4, max_grad_norm=1.0, checkpoint=every)
    trainer, begun = _train(device, config, cls=Sharded, world=group, run_dir=str(tmp_path))
    assert isinstance(trainer.models["model"], FSDPModule)
    assert _losses(begun) == pytest.approx(_losses(plain)[:3], abs=1e-5)
    config = _config(micro_batch_size=4, max_grad_norm=1.0, checkpoint=every)
    _, resumed = _train(device, config, cls=Sharded, world=group, run_dir=str(tmp_path))
    assert _losses(resumed) == pytest.approx(_losses(plain)[2:], abs=1e-5)


# ---- Precision -----------------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_low_precision_trains_close_to_float32(device: str, precision: Any) -> None:
    _, exact = _train(device, _config())
    _, low = _train(device, _config(precision=precision))
    assert _losses(low) == pytest.approx(_losses(exact), rel=0.1)


class Overflows(Fused):
    def configure_loss_scaler(self) -> LossScaler:
        return LossScaler(2.0**40)


@on_devices
def test_a_float16_gradient_that_overflows_lowers_the_scale_and_is_skipped(device: str) -> None:
    trainer, losses = _train(device, _config(precision="fp16"), cls=Overflows)
    last = losses.records[max(losses.records)]
    assert 1 < last["loss_scale"] < 2.0**40
    assert trainer.global_step == 6
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


# ---- Memory and speed ----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_activation_checkpointing_changes_no_loss(device: str, policy: Any) -> None:
    _, plain = _train(device, _config(), cls=Plain)
    _, again = _train(device, _config(parallel=ParallelConfig(activation_checkpointing=policy)), cls=Plain)
    assert _losses(again) == pytest.approx(_losses(plain), abs=1e-6)


@on_devices
def test_offloaded_shards_train_as_those_on_the_device(device: str, group: World) -> None:
    _, plain = _train(device, _config(max_grad_norm=1.0), cls=Plain)
    trainer, offloaded = _train(device, _config(max_grad_norm=1.0), cls=Offloaded, world=group)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}
    # A random number generator of the CPU draws other first weights than that of a GPU.
    expected = _losses(plain)
    assert _losses(offloaded) == pytest.approx(expected, abs=1e-5 if device == "cpu" else 1.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.extended), CUDA])
def test_compiled_blocks_train_as_plain_ones(device: str) -> None:
    _, plain = _train(device, _config(), cls=Plain)
    _, compiled = _train(device, _config(parallel=ParallelConfig(compile=True)), cls=Plain)
    # Dropout draws other random numbers when it is compiled.
    assert _losses(compiled) == pytest.approx(_losses(plain), rel=0.2)


class Hungry(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and len(batch["x"]) > 2:
            torch.empty(2**50, dtype=torch.uint8, device=batch["x"].device)
        return super().training_step(batch, batch_idx)


@on_devices
def test_micro_batches_are_halved_after_a_real_out_of_memory_error(device: str) -> None:
    said: list[str] = []
    config = _config(micro_batch_size=8, halve_on_out_of_memory=True)
    trainer, losses = _train(device, config, cls=Hungry, printer=said.append)
    assert trainer.global_step == 6
    assert any("out of memory" in line for line in said)
    assert len(_losses(losses)) == 6


@on_devices
def test_exact_mode_repeats_a_run_bit_by_bit(device: str) -> None:
    one, two = (_train(device, _config(exact=True, global_batch_size=8), cls=Plain)[0] for _ in range(2))
    for name, value in weights(one).items():
        assert torch.equal(value, weights(two)[name]), name


class Counts(Fused):
    def num_tokens(self, batch: Any) -> Any:
        return (batch["id"] >= 0).sum()


@on_devices
def test_memory_and_mfu_are_logged(device: str) -> None:
    _, losses = _train(device, _config(), cls=Counts, callbacks=[Throughput(peak_flops=1e12), PeakMemory()])
    last = losses.records[6]
    assert 0 < last["mfu"] < 1
    if device == "cuda":
        held = sum(4 * 4 * value.numel() for value in weights(_train(device, _config(1))[0]).values())
        assert held / 2 < last["peak_memory_bytes"] <= last["reserved_memory_bytes"]
    else:
        assert last["peak_memory_bytes"] > 0


class MeasuresAll(Plain):
    """Has a metric of all logits, which the device could not hold."""

    def configure_metrics(self) -> Any:
        return {"share": self.share}

    def share(self, logits: torch.Tensor, labels: torch.Tensor) -> float:
        assert logits.device.type == labels.device.type == "cpu"
        assert len(logits) == 10
        return (logits.argmax(1) == labels).float().mean().item()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        self.metrics["share"].update(logits, batch["y"])
        return {"accuracy": (logits.argmax(1) == batch["y"]).float().mean()}


@on_devices
def test_arguments_of_a_metric_of_all_rows_wait_on_the_host(device: str) -> None:
    metrics = MeasuresAll(_config(2), world=World.single(device)).evaluate()
    assert metrics["validation/share"] == pytest.approx(metrics["validation/accuracy"])


class Accumulates(Plain):
    """Checks that only the micro-batches in use are on the device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        waiting = self._engine.loop.optimizer_step._micro_batches
        assert batch["x"].device.type == self.device.type
        assert all(each["x"].device.type == "cpu" for each in waiting)
        return super().training_step(batch, batch_idx)


@on_devices
def test_micro_batches_move_to_the_device_one_at_a_time(device: str) -> None:
    _train(device, _config(2, gradient_accumulation_steps=4), cls=Accumulates)


class Slow(Plain):
    """Keeps the device busy for longer than the host needs to request it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.cuda._sleep(50_000_000)
        return super().training_step(batch, batch_idx)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_time_of_the_device_counts_as_compute() -> None:
    trainer, _ = _train("cuda", _config(12, log_every=Duration(6, "steps")), cls=Slow)
    spent_s = trainer._engine.activity.spent_s()
    assert sum(spent_s[phase] for phase in UPDATE_PHASES) > spent_s["between updates"]


class SlowBackward(Slow):
    """Keeps the device busy in backward for about ten times as long as in forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: torch.cuda._sleep(500_000_000))
        return loss


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_time_of_the_device_is_divided_by_events() -> None:
    trainer, _ = _train("cuda", _config(12, log_every=Duration(6, "steps")), cls=SlowBackward)
    spent_s = trainer._engine.activity.spent_s()
    assert spent_s["backward"] > 5 * spent_s["forward"] > 0
    assert spent_s["backward"] > 5 * spent_s["optimizer"]


# ---- Waiting for the device ----------------------------------------------------------------------------------------


class NoWaiting(Callback):
    """Makes torch raise if an update waits for the GPU, after the first ones and unless a record or a save is due."""

    def __init__(self, device: str, log_every: int) -> None:
        self.device, self.log_every = device, log_every
        self.watched = 0

    def on_step_start(self, trainer: Any) -> None:
        step = trainer.global_step + 1
        is_due = step % self.log_every == 0 or step == trainer.total_steps
        self._set("error" if step > 2 and not is_due else "default")
        self.watched += step > 2 and not is_due

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        self._set("default")

    def _set(self, mode: str) -> None:
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)


@on_devices
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16", "micro_batch_size": 2, "max_grad_norm": 1.0, "max_grad_value": 0.5},
        {"grad_norm_groups": ("model.blocks.*",), "micro_batch_size": 4},
        {"parallel": ParallelConfig(activation_checkpointing="full")},
        {"checkpoint": CheckpointConfig(every=Duration(10, "steps"), at_end=False)},
    ],
    ids=["plain", "bf16", "norms", "checkpointing", "saves"],
)
def test_no_update_waits_for_the_device(device: str, fields: dict[str, Any], tmp_path: Path) -> None:
    watch = NoWaiting(device, 10)
    config = _config(30, **{"log_every": Duration(10, "steps")} | fields)
    cls = Plain if "parallel" in fields else Counts
    _train(device, config, cls=cls, callbacks=[watch, PeakMemory()], run_dir=str(tmp_path))
    assert watch.watched == 25
