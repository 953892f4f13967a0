"""Speed and memory in records: real samples and tokens, without warm-up and evaluations; MFU; peaks."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import Callback, ConfigError, Duration, World, optimizers, schedules
from headway.trainer.callbacks import EarlyStopping, GarbageCollection, PeakMemory, ProgressBar, Throughput, TimeLimit
from headway.trainer.callbacks.throughput import flops_by_parameters, known_peak_flops, peak_flops_of
from headway.trainer.metrics.units import human_bytes
from headway.trainer.step.oom import is_out_of_memory
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


def config_of(**changes: Any) -> TinyConfig:
    settings = {"max_steps": 6, "global_batch_size": 8, "log_every": Duration(3, "steps"), "evaluate_every": None}
    return TinyConfig(**{**settings, **changes})


class Padded(TinyTrainer):
    """Rows of five positions, three of them tokens; every update but the first takes a given time."""

    first_s = step_s = 0.0
    validation_s = 0.0

    def num_tokens(self, batch: Any) -> torch.Tensor:
        mask = torch.tensor([1, 1, 1, 0, 0]).expand(len(batch["id"]), 5)
        return mask.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.first_s if self.training and self.global_step == 0 else self.step_s)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.validation_s)
        return super().training_step(batch, batch_idx)


def records_of(trainer_class: type[TinyTrainer], config: TinyConfig, *callbacks: Any, world: World = ALONE) -> Any:
    losses = Losses()
    trainer_class(config, world=world, callbacks=[*callbacks, losses]).fit()
    return losses.records


def test_padding_is_no_token() -> None:
    for record in records_of(Padded, config_of()).values():
        assert record["tokens_per_s"] / record["samples_per_s"] == pytest.approx(3)


def test_the_tokens_of_a_run_are_counted_over_a_resume_and_limit_it(tmp_path: Path) -> None:
    """Stopped inside an interval of three updates of 24 tokens; the limit is checked when tokens are counted."""
    config = config_of(max_steps=None, max_tokens=96, log_every=Duration(3, "steps"))
    first = Padded(config, run_dir=tmp_path, world=ALONE, callbacks=[StopAt(2)]).fit()
    assert (first.tokens, first.samples) == (48, 16)
    losses = Losses()
    result = Padded(config, run_dir=tmp_path, world=ALONE, callbacks=[losses]).fit()
    assert losses.of("tokens") == {3: 72, 6: 144}
    assert (result.steps, result.tokens, result.reason) == (6, 144, "max_tokens=96 reached")
    with pytest.raises(
        ConfigError, match=r"needs a trainer that counts tokens: TinyTrainer does not define num_tokens"
    ):
        TinyTrainer(config, world=ALONE).fit()


class PaddedOnRanks(Padded):
    """Of 20 samples in three updates, rank 0 has one more micro-batch in the last update."""

    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0]


def tokens_per_sample(world: World) -> tuple[list[float], float]:
    config = config_of(max_steps=None, max_epochs=1, num_rows=20, drop_last=False, micro_batch_size=2)
    records = records_of(PaddedOnRanks, config, world=world)
    ratios = [record["tokens_per_s"] / record["samples_per_s"] for record in records.values() if "step_s" in record]
    return ratios, max(record["tokens"] for record in records.values())


def test_rows_that_only_keep_ranks_in_step_count_nowhere() -> None:
    for ratios, tokens in run_on_ranks(tokens_per_sample, 2):
        assert tokens == 20 * 3
        assert ratios
        assert ratios == pytest.approx([3.0] * len(ratios))


def all_records(world: World) -> dict[int, dict[str, float]]:
    return records_of(Padded, config_of(evaluate_every=Duration(3, "steps")), world=world)


def test_records_are_equal_on_every_rank_also_their_times() -> None:
    first, second = run_on_ranks(all_records, 2)
    assert {"elapsed_s", "paused_s", "step_s", "tokens_per_s", "data_wait"} <= first[6].keys()
    assert first == second


def test_the_first_update_and_evaluations_are_no_part_of_the_throughput() -> None:
    class Slow(Padded):
        first_s, step_s, validation_s = 0.6, 0.01, 0.2

    records = records_of(Slow, config_of(evaluate_every=Duration(3, "steps")))
    # The excluded time is at least the sleep, however busy the machine is.
    assert records[3]["elapsed_s"] - 2 * records[3]["step_s"] >= 0.6
    assert records[6]["elapsed_s"] - records[3]["elapsed_s"] - 3 * records[6]["step_s"] >= 4 * 0.2
    assert records[6]["paused_s"] >= 4 * 0.2
    assert records[3]["samples_per_s"] * records[3]["step_s"] == pytest.approx(8)


def test_a_record_of_the_first_update_alone_has_no_throughput() -> None:
    records = records_of(Padded, config_of(log_every=Duration(1, "steps"), max_steps=2))
    assert "step_s" not in records[1]
    assert "train/loss" in records[1]
    assert "step_s" in records[2]


class PerSample(Padded):
    def flops_per_sample(self) -> float:
        return 5e6


class PerToken(Padded):
    def flops_per_token(self) -> float:
        return 7e6


def test_mfu_is_the_share_of_the_peak_that_the_model_takes() -> None:
    for trainer_class, unit, flops in (
        (PerSample, "samples", 5e6),
        (PerToken, "tokens", 7e6),
        (Padded, "tokens", None),
    ):
        losses = Losses()
        trainer = trainer_class(config_of(), world=ALONE, callbacks=[Throughput(peak_flops=1e9), losses])
        trainer.fit()
        flops = flops or 6 * sum(parameter.numel() for parameter in trainer.model.parameters())
        for record in losses.records.values():
            assert record["mfu"] == pytest.approx(flops * record[f"{unit}_per_s"] / 1e9)


def test_mfu_is_left_out_if_the_peak_or_the_cost_is_unknown() -> None:
    assert not any("mfu" in record for record in records_of(Padded, config_of(), Throughput()).values())
    records = records_of(TinyTrainer, config_of(), Throughput(peak_flops=1e9))
    assert not any("mfu" in record for record in records.values())
    with pytest.raises(ConfigError, match="peak_flops must be > 0"):
        Throughput(peak_flops=0)


def test_parameters_cost_six_flops_frozen_ones_four_and_those_only_looked_up_none() -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    model[1].requires_grad_(False)
    assert flops_by_parameters(model) == 4 * 12 + 6 * 12
    head = nn.Linear(4, 11, bias=False)
    head.weight = model[0].weight
    assert flops_by_parameters(nn.Sequential(model, head)) == 4 * 12 + 6 * 12 + 6 * 44


@pytest.mark.parametrize(
    ("name", "kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "fp16", 835e12),
        ("NVIDIA H200", "tf32", 494e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L40", "bf16", 181e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
    ],
)
def test_peaks_of_known_gpus(name: str, kind: str, peak: float | None) -> None:
    assert peak_flops_of(name, kind) == peak


def test_float8_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    device = torch.device("cuda")
    assert known_peak_flops(device, "bf16") == 989e12
    assert known_peak_flops(device, "bf16", float8=True) == 1978e12


def test_a_cpu_has_no_known_peak() -> None:
    assert known_peak_flops(torch.device("cpu"), "bf16") is None


def test_peak_memory_is_in_every_training_record() -> None:
    callback = PeakMemory(per_rank=True)
    records = records_of(TinyTrainer, config_of(evaluate_every=Duration(3, "steps")), callback)
    for record in records.values():
        assert record["peak_memory_bytes"] > 10e6
        assert record["peak_memory_bytes/0"] == record["peak_memory_bytes"]
        assert "peak_memory_rank" not in record


class NoWaiting(Callback):
    """Makes PyTorch raise on any synchronisation with the GPU, in updates after which no record is due."""

    def __init__(self, log_every: int) -> None:
        self.log_every = log_every
        self.watched = 0

    def on_step_start(self, trainer: Any) -> None:
        step = trainer.global_step + 1
        is_due = step % self.log_every == 0 or step == trainer.total_steps
        # The first update allocates and may wait. The mode stays on until the next update starts.
        if step > 1:
            torch.cuda.set_sync_debug_mode("default" if is_due else "error")
            self.watched += not is_due

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        torch.cuda.set_sync_debug_mode("default")


class OnGpu(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = optimizers.adamw(self.model, self.config.learning_rate)
        self.scheduler = schedules.cosine(self.optimizer, total_steps=self.total_steps, warmup_steps=2)

    def num_tokens(self, batch: Any) -> torch.Tensor:
        return (batch["id"] >= 0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        return {"loss": nn.functional.cross_entropy(logits, batch["y"])}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_between_two_records_nothing_waits_for_the_gpu() -> None:
    watch = NoWaiting(log_every=10)
    usual = [
        ProgressBar(io.StringIO(), live=True),
        Throughput(),
        PeakMemory(),
        GarbageCollection(every=7),
        EarlyStopping("train/loss"),
        TimeLimit("1h"),
    ]
    config = config_of(max_steps=40, log_every=Duration(10, "steps"), max_grad_norm=1.0, micro_batch_size=4)
    OnGpu(config, world=World.single("cuda"), callbacks=[watch, *usual]).fit()
    assert watch.watched == 35


class Hungry(TinyTrainer):
    """Rank 1 holds 300 MB."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.world.rank == 1:
            self.kept = torch.ones(300 * 1024 * 1024, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


class Failing(Hungry):
    """Rank 1 runs out of memory in its fifth update; the others fail with another error."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 4 and self.world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.global_step == 4:
            raise RuntimeError("the other rank is gone")
        return super().training_step(batch, batch_idx)


def on_two_ranks(world: World) -> tuple[dict[str, float], str, list[str]]:
    record = records_of(Hungry, config_of(), PeakMemory(per_rank=True), world=world)[3]
    try:
        Failing(config_of(micro_batch_size=4), world=world, callbacks=[PeakMemory()]).fit()
    except RuntimeError as error:  # OutOfMemoryError is a subclass
        return record, f"{type(error).__name__}: {error}", getattr(error, "__notes__", [])
    raise AssertionError("nothing failed")


def test_peaks_of_all_ranks_and_help_where_one_runs_out_of_memory() -> None:
    (record, failed, notes), (other_record, out_of_memory, help_) = run_on_ranks(on_two_ranks, 2)
    assert record["peak_memory_rank"] == 1
    assert record["peak_memory_bytes/1"] - record["peak_memory_bytes/0"] > 250e6
    assert {name: record[name] for name in record if "memory" in name} == {
        name: other_record[name] for name in other_record if "memory" in name
    }
    assert (failed, notes) == ("RuntimeError: the other rank is gone", [])
    assert out_of_memory == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    text = "\n".join(help_)
    assert "rank 1 of 2 ran out of memory after 4 updates" in text
    assert "micro_batch_size=4, global_batch_size=8, gradient_accumulation_steps=1, precision='fp32'" in text
    assert "parallel.strategy='ddp', parallel.activation_checkpointing='none'" in text
    assert "a smaller micro_batch_size" in text
    assert "parallel.strategy='fsdp'" in text
    assert "peak memory in the last record: rank 0: " in text


def test_a_real_failure_to_allocate_on_a_cpu_is_known_and_others_are_not() -> None:
    class Greedy(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.empty(2**55, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="memory") as caught:
        Greedy(config_of(global_batch_size=None), world=ALONE).fit()
    assert is_out_of_memory(caught.value)
    assert "global_batch_size and a micro_batch_size" in "\n".join(caught.value.__notes__)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(None)


def test_bytes_are_written_for_people() -> None:
    assert [human_bytes(each) for each in (512, 1536, 80 * 2**30, 2**50)] == ["512 B", "1.5 KiB", "80 GiB", "1024 TiB"]
