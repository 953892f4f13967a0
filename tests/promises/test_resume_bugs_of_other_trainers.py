"""Five bugs of other trainers that resumed inside an epoch of packed or streamed data, each with its source."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as HuggingFaceDataset
from torch import nn
from torch.utils.data import DataLoader

from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.mixture import Mixture
from headway.datasets.packing import Packed
from headway.datasets.stream import Stream
from headway.datasets.tokenizers import ByteTokenizer
from headway.trainer import CheckpointConfig, Trainer, TrainerConfig, World
from tests.tiny import StopAt

LENGTH = 32


class Learns(Trainer[TrainerConfig]):
    """Remembers the tokens of every update."""

    def __init__(self, make: Callable[[], Any], config: TrainerConfig, **options: Any) -> None:
        super().__init__(config, world=World.single("cpu"), **options)
        self.make = make
        self.seen: list[Any] = []

    def configure_models(self) -> None:
        self.model = nn.Embedding(258, 2)  # bytes, and the ends of documents

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self) -> Any:
        return self.make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch["tokens"].tolist())
        return self.model(batch["tokens"].long()).square().mean()


def _assert_that_resuming_changes_nothing(
    make: Callable[[], Any], folder: Path, stops: list[int], **config: Any
) -> None:
    """Compare a run that was stopped after these updates with one that was not; each resumes in a new trainer."""
    settings = TrainerConfig(checkpoint=CheckpointConfig(every="1000 steps"), **config)
    whole = Learns(make, settings, run_dir=folder / "whole")
    whole.fit()
    seen: list[Any] = []
    for number, stop in enumerate([*stops, None]):
        # Nothing may depend on what else has drawn random numbers in the process.
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        torch.manual_seed(number)
        part = Learns(make, settings, run_dir=folder / "cut", callbacks=[StopAt(stop)] if stop else [])
        part.fit()
        seen += part.seen
    assert seen == whole.seen


def _documents(path: Path, lengths: list[int]) -> Path:
    texts = [chr(ord("a") + number % 26) * length for number, length in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _packed(path: Path) -> Packed:
    return Packed(JsonLines(path), length=LENGTH, tokenizer=ByteTokenizer(), index=path.parent)


@pytest.mark.parametrize("stops", [[1, 2, 3, 4, 5, 6], [7, 13], [14]])
def test_a_stream_of_hugging_face_resumes_in_a_later_pass(tmp_path: Path, stops: list[int]) -> None:
    """pytorch/torchtitan#3008: once a pass had ended, a resumed stream began with the first shard again."""

    def make() -> Any:
        rows = HuggingFaceDataset.from_dict({"tokens": [[number] * 4 for number in range(24)]})
        stream = rows.to_iterable_dataset(num_shards=4).with_format("torch")
        return DataLoader(stream, batch_size=4)  # type: ignore[arg-type]

    _assert_that_resuming_changes_nothing(make, tmp_path, stops, max_steps=16)


def test_the_document_that_did_not_fit_into_a_row_is_not_lost(tmp_path: Path) -> None:
    """pytorch/torchtitan#3008 and PrimeIntellect-ai/prime-rl#2944: a packer held it while a full row was saved."""
    path = _documents(tmp_path / "long.jsonl", [20, 25] * 12)
    run = Learns(lambda: Stream(_packed(path), tail="keep"), TrainerConfig(max_epochs=1, global_batch_size=2))
    run.fit()
    letters = sum(chr(token).isalpha() and token < 256 for step in run.seen for row in step for token in row)
    assert letters == 12 * 45, "no document is lost without an interruption either"
    every = list(range(1, len(run.seen)))
    _assert_that_resuming_changes_nothing(
        lambda: Stream(_packed(path), tail="keep"), tmp_path, every, max_epochs=1, global_batch_size=2
    )


def test_a_position_counts_packed_rows_and_not_documents(tmp_path: Path) -> None:
    """mosaicml/llm-foundry#1277: the position was too early by the documents of a row, so data was repeated."""
    path = _documents(tmp_path / "short.jsonl", [random.Random(7).randint(1, 6) for _ in range(200)])
    _assert_that_resuming_changes_nothing(
        lambda: Stream(_packed(path)), tmp_path, [3, 5, 11], max_steps=14, global_batch_size=4
    )


def test_worker_processes_do_not_change_the_position(tmp_path: Path) -> None:
    """mosaicml/llm-foundry#1277: with worker processes, the position counted batches of another size."""

    def make() -> Any:
        rows = [{"tokens": torch.full((4,), number)} for number in range(40)]
        return DataLoader(rows, batch_size=3, shuffle=True, num_workers=2)  # type: ignore[arg-type]

    _assert_that_resuming_changes_nothing(make, tmp_path, [2, 7], max_steps=9, gradient_accumulation_steps=2)


def test_the_order_of_packed_rows_is_that_of_the_seed(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4237: what was packed depended on the state of Python's random numbers."""
    sources = {
        name: (
            _packed(_documents(tmp_path / f"{name}.jsonl", [random.Random(at).randint(1, 50) for _ in range(60)])),
            1,
        )
        for at, name in enumerate(("web", "code"))
    }
    _assert_that_resuming_changes_nothing(
        lambda: Stream(Mixture(sources)), tmp_path, [2, 9], max_steps=12, global_batch_size=4
    )
