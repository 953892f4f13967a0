"""A causal language model of Hugging Face: trained by the example, sharded, and loaded by `from_pretrained`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from headway.datasets.prepare import prepare_text
from headway.trainer import ParallelConfig, World
from tests.distributed import run_on_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune_causal_lm.py"
SHORT = {"max_steps": 3, "context": 16, "global_batch_size": 8, "log_every": "1 steps"}


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune_causal_lm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _train(world: World, folder: str, **changes: Any) -> tuple[float, list[float]]:
    """Return the loss before the first update, and the last row of logits of the trained model on its ranks."""
    example = _example()
    config = replace(example.experiment.config, **SHORT, **changes)
    trainer = example.Finetune(config, run_dir=folder, world=world, trackers=[])
    before = trainer.evaluate()["validation/loss"]
    trainer.fit()
    layers = trainer.unwrap(trainer.model).model.layers
    assert all(isinstance(layer, FSDPModule) for layer in layers) == (world.size > 1)
    tokens_1T = torch.arange(16)[None]
    trainer.model.eval()
    with torch.no_grad():
        return before, trainer.model(input_ids=tokens_1T, use_cache=False).logits[0, -1].tolist()


def _logits(folder: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        return loaded(input_ids=torch.arange(16)[None], use_cache=False).logits[0, -1].tolist()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write token rows as Parquet."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("train", "held-out"):
        text = folder / f"{name}.txt"
        text.write_text(f"def {name.replace('-', '_')}(a, b):\n    return a + b\n" * 20)
        prepare_text(text, folder / name, row_length=16)
    return str(folder)


@pytest.mark.extended
def test_what_two_ranks_have_trained_from_pretrained_loads_with_equal_logits(rows: str, tmp_path: Path) -> None:
    alone = _train(World.single("cpu"), str(tmp_path / "alone"), parquet=rows)
    assert _logits(f"{tmp_path}/alone/pretrained") == alone[1]
    on_ranks = run_on_ranks(_train_on_ranks, 2, str(tmp_path / "ranks"), rows)
    assert on_ranks[0] == on_ranks[1]
    assert _logits(f"{tmp_path}/ranks/pretrained") == pytest.approx(on_ranks[0][1], abs=1e-6)
    assert on_ranks[0][0] == pytest.approx(alone[0], abs=1e-5), "sharded or not, it begins with the same weights"
    assert on_ranks[0][1] == pytest.approx(alone[1], abs=1e-3)

    # A pretrained model starts from its weights.
    pretrained = f"{tmp_path}/alone/pretrained"
    second = _train(World.single("cpu"), str(tmp_path / "second"), parquet=rows, pretrained=pretrained)
    assert second[0] < alone[0] - 0.1
    (on_rank, _) = run_on_ranks(_train_on_ranks, 2, str(tmp_path / "second-ranks"), rows, pretrained)
    assert on_rank[0] == pytest.approx(second[0], abs=1e-5)
    assert on_rank[1] == pytest.approx(second[1], abs=1e-3)


def _train_on_ranks(world: World, folder: str, rows: str, pretrained: str | None = None) -> tuple[float, list[float]]:
    return _train(world, folder, parquet=rows, pretrained=pretrained, parallel=ParallelConfig(strategy="fsdp"))


@pytest.mark.extended
def test_the_example_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("completed: loss ")
    assert (tmp_path / "runs/finetune-alone/pretrained/model.safetensors").exists()
