"""Model FLOPs utilisation: the share of the devices' peak that the model's arithmetic uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigError
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer

# Dense (half of the figure advertised with sparsity), in FLOPs per second, by format. The first key that a device's
# name contains applies. From the makers' data sheets: https://www.nvidia.com/en-us/data-center/a100 (and h100,
# h200, l4, l40, l40s, v100, tesla-t4); https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703;
# https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
_PEAK_FLOPS: dict[str, dict[str, float]] = {
    "GB200": {"bf16": 2.5e15, "fp16": 2.5e15},
    "B200": {"bf16": 2.25e15, "fp16": 2.25e15},
    "H200 NVL": {"bf16": 835e12, "fp16": 835e12, "tf32": 417e12, "fp32": 60e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12, "tf32": 417e12, "fp32": 60e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "NVIDIA L40": {"bf16": 181e12, "fp16": 181e12, "tf32": 90.5e12, "fp32": 90.5e12},
    "NVIDIA L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "V100-SXM": {"fp16": 125e12, "fp32": 15.7e12},
    "V100-PCIE": {"fp16": 112e12, "fp32": 14e12},
    "Tesla T4": {"fp16": 65e12, "fp32": 8.1e12},
    "MI300X": {"bf16": 1307e12, "fp16": 1307e12},
}


class Throughput(Callback):
    """Adds `mfu` (model FLOPs utilisation, 0 to 1) to every training record that has a throughput.

    `mfu` is the FLOPs of the samples or tokens per second, divided by the peak of all devices. The trainer's
    `flops_per_sample` or `flops_per_token` returns the cost. If both return None and tokens are counted, the 6N rule
    applies: 6 FLOPs per token and trainable parameter (2 forward, 4 backward), 4 for a frozen one, without embeddings
    that are only looked up and without attention scores. Recomputation by activation checkpointing does not count.
    Nothing is logged if the cost or the peak is unknown, as on a CPU.

    Args:
        peak_flops: FLOPs per second of one device in the training precision; looked up for known GPUs. float32 counts
            as TF32 if `torch.set_float32_matmul_precision` allows it, and with `float8` the peak is that of float8.

    Raises:
        ConfigError: `peak_flops` is not positive.

    Source: PaLM (Chowdhery et al., arXiv:2204.02311, appendix B) for MFU; Kaplan et al. (arXiv:2001.08361, section 2.1)
    for 6N.

    Example:
        >>> trainer = Digits(config, callbacks=[Throughput()])
    """

    def __init__(self, *, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ConfigError(f"peak_flops must be > 0, got {peak_flops}; remove it to look up the device")
        self._peak_flops = peak_flops
        self._by_parameters = 0

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Register as a metric source, if the peak is known."""
        config = trainer.config
        peak = self._peak_flops or known_peak_flops(trainer.device, config.precision, float8=config.float8)
        if peak is not None:
            self._by_parameters = sum(flops_by_parameters(model) for model in trainer.models.values())
            trainer.add_metric_source(partial(self._measure, trainer, peak))

    def _measure(self, trainer: Trainer[Any], peak: float, record: Mapping[str, float]) -> dict[str, float]:
        per_sample, per_token = trainer.flops_per_sample(), trainer.flops_per_token()
        if per_sample is not None:
            flops_per_s = per_sample * record.get("samples_per_s", 0.0)
        else:
            flops_per_s = (per_token or self._by_parameters) * record.get("tokens_per_s", 0.0)
        return {"mfu": flops_per_s / (trainer.world.size * peak)} if flops_per_s else {}


def flops_by_parameters(model: nn.Module) -> int:
    """Return the FLOPs of forward and backward per token by the 6N rule, as in `Throughput`."""
    looked_up = {id(each.weight) for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))}
    # An embedding that is tied to a head is also multiplied there.
    multiplied = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    return sum(
        (6 if parameter.requires_grad else 4) * parameter.numel()
        for parameter in model.parameters()
        if id(parameter) not in looked_up - multiplied
    )


def known_peak_flops(device: torch.device, precision: str, *, float8: bool = False) -> float | None:
    """Return the dense peak of a GPU in FLOPs per second, or None if unknown.

    Args:
        device: this rank's device.
        precision: as in `TrainerConfig.precision`.
        float8: as in `TrainerConfig.float8`, of which every device that supports it makes twice as many.
    """
    if device.type != "cuda":
        return None
    kind = precision.removesuffix("-true")
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    peak = peak_flops_of(torch.cuda.get_device_name(device), kind)
    return 2 * peak if peak is not None and float8 else peak


def peak_flops_of(name: str, kind: str) -> float | None:
    """Return the dense peak of the named GPU in "bf16", "fp16", "tf32" or "fp32", or None if unknown."""
    known = next((peaks for part, peaks in _PEAK_FLOPS.items() if part in name), {})
    return known.get(kind)
