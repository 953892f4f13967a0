"""A Hugging Face folder with each checkpoint: written in the background, pruned with it, the same when sharded."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.trainer import (
    CheckpointConfig,
    ConfigError,
    ParallelConfig,
    World,
    load_weights,
)
from headway.trainer.callbacks import Ema, SavePretrained
from headway.trainer.checkpoints.format.manifest import CheckpointWarning
from tests.distributed import run_on_ranks
from tests.tiny import Deep, TinyConfig, TinyTrainer
from tests.trainer.checkpoints.test_export import CausalTrainer

ALONE = World.single("cpu")


class Hub(Deep):
    """Has what Hugging Face's models have."""

    threads: list[str] = []

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor]) -> None:
        Hub.threads.append(threading.current_thread().name)
        Path(folder).mkdir(exist_ok=True)
        save_file(state_dict, Path(folder, "model.safetensors"))


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "words").mkdir()
        Path(folder, "words", "words.txt").write_text("one two")


class HubTrainer(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Hub(self.config.width, self.config.dropout)


def _config(**changes: Any) -> TinyConfig:
    settings = {"num_rows": 64, "max_epochs": 1, "evaluate_every": "2 steps", **changes}
    return TinyConfig(**{"checkpoint": CheckpointConfig(every="2 steps", keep_last=2), **settings})  # type: ignore[arg-type]


def _folders(run_dir: Path) -> dict[str, bool]:
    checkpoints = sorted((run_dir / "checkpoints").iterdir())
    return {each.name: (each / "pretrained").exists() for each in checkpoints}


def test_each_checkpoint_that_is_kept_has_its_folder(tmp_path: Path) -> None:
    Hub.threads.clear()
    callbacks = [Ema(0.5), SavePretrained(Tokenizer(), dtype=torch.bfloat16)]
    result = HubTrainer(_config(), run_dir=tmp_path, world=ALONE, callbacks=callbacks).fit()
    folders = _folders(tmp_path)
    assert len(folders) >= 2
    assert all(folders.values()), "and nothing else, such as what a deleted checkpoint has left"
    assert set(Hub.threads) == {"headway-pretrained"}
    for name in folders:
        path = tmp_path / "checkpoints" / name
        written = load_file(path / "pretrained/model.safetensors")
        torch.testing.assert_close(
            written, {key: each.bfloat16() for key, each in load_weights(path).items()}, rtol=0, atol=0
        )
        assert (path / "pretrained/words/words.txt").read_text() == "one two"
    assert result.steps == 8


def test_only_the_best_and_averages_may_be_written(tmp_path: Path) -> None:
    class Worse(HubTrainer):
        """Is best after the fourth update."""

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": abs(self.global_step - 4.0)}

    checkpoint = CheckpointConfig(every="2 steps", keep_last="all", background=False)  # type: ignore[arg-type]
    callbacks = [Ema(0.5), SavePretrained(only_best=True, ema=True)]
    result = Worse(_config(checkpoint=checkpoint), run_dir=tmp_path, world=ALONE, callbacks=callbacks).fit()
    with_folder = [name for name, there in _folders(tmp_path).items() if there]
    assert result.best_checkpoint is not None
    best = Path(result.best_checkpoint)
    assert best.name in with_folder
    assert {int(name[5:13]) for name in with_folder} <= {2, 4}
    written = load_file(best / "pretrained/model.safetensors")
    torch.testing.assert_close(written, load_weights(best, ema=True), rtol=0, atol=0)


def test_a_checkpoint_that_is_deleted_meanwhile_does_not_come_back(tmp_path: Path) -> None:
    """Retention deletes faster than a slow model is written."""
    waits = threading.Event()

    class Slow(Hub):
        def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor]) -> None:
            waits.wait(30)
            super().save_pretrained(folder, state_dict)

    class SlowTrainer(HubTrainer):
        def configure_models(self) -> None:
            self.model = Slow(self.config.width, self.config.dropout)

        def on_epoch_end(self, metrics: Any) -> None:
            waits.set()

    checkpoint = CheckpointConfig(every="1 steps", keep_last=1, keep_best=0)  # type: ignore[arg-type]
    trainer = SlowTrainer(_config(checkpoint=checkpoint), run_dir=tmp_path, world=ALONE, callbacks=[SavePretrained()])
    trainer.fit()
    assert list(_folders(tmp_path).values()) == [True]


def test_an_object_store_gets_it_too(tmp_path: Path) -> None:
    run_dir = "memory://headway-pretrained/run"
    HubTrainer(_config(), run_dir=run_dir, world=ALONE, callbacks=[SavePretrained(Tokenizer())]).fit()
    files = fsspec.filesystem("memory").find("/headway-pretrained/run/checkpoints")
    folders = {file.split("/pretrained/")[0] for file in files if "/pretrained/" in file}
    assert folders == {file.rpartition("/")[0] for file in files if file.endswith("manifest.json")}
    assert all(f"{folder}/pretrained/words/words.txt" in files for folder in folders)


def test_a_failure_is_a_warning_and_a_mistake_an_error(tmp_path: Path) -> None:
    class Full(Tokenizer):
        def save_pretrained(self, folder: str) -> None:
            raise OSError("the disk is full")

    with pytest.warns(CheckpointWarning, match="is saved, but its folder 'pretrained' .*OSError: the disk is full"):
        HubTrainer(_config(), run_dir=tmp_path / "a", world=ALONE, callbacks=[SavePretrained(Full())]).fit()
    assert not any(_folders(tmp_path / "a").values())
    for trainer, others, message in (
        (TinyTrainer, (), r"needs save_pretrained\(folder\).* and Deep has none"),
        (HubTrainer, ("tokenizer",), "and str has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(_config(), run_dir=tmp_path / "b", world=ALONE, callbacks=[SavePretrained(*others)]).fit()
    with pytest.raises(ConfigError, match="run_dir is not set"):
        HubTrainer(_config(), world=ALONE, callbacks=[SavePretrained()]).fit()


def _train_sharded(world: World, folder: str) -> None:
    config = _config(num_rows=32, parallel=ParallelConfig(strategy="fsdp"), global_batch_size=8, micro_batch_size=4)
    CausalTrainer(config, run_dir=folder, world=world, callbacks=[SavePretrained()]).fit()


@pytest.mark.extended
def test_a_sharded_model_is_written_whole(tmp_path: Path) -> None:
    run_on_ranks(_train_sharded, 2, str(tmp_path))
    from transformers import LlamaForCausalLM

    folders = _folders(tmp_path)
    assert folders
    assert all(folders.values())
    for name in folders:
        path = tmp_path / "checkpoints" / name
        assert json.loads((path / "pretrained/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        loaded = LlamaForCausalLM.from_pretrained(path / "pretrained")
        torch.testing.assert_close(dict(loaded.state_dict()), load_weights(path), rtol=0, atol=0)
