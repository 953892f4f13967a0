"""Before its first update, a resumed run is compared with the run that saved: here with planted faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from headway.datasets.stream import ParquetStream
from headway.trainer import CheckpointConfig, CheckpointError, DataError, ParallelConfig, ResumeError, World
from headway.trainer.checkpoints.format.file_checksums import FileChecksum
from headway.trainer.checkpoints.format.manifest import MANIFEST, parse_manifest, write_manifest
from headway.trainer.checkpoints.model_state import ModelState, OptimizerState
from headway.trainer.checkpoints.rng import RngState
from headway.trainer.checkpoints.store import CheckpointWarning, read_checkpoint
from headway.trainer.data.dataloader_stream import LoaderStream
from headway.trainer.loop.progress import Progress
from tests.distributed import run_on_ranks
from tests.tiny import Rows, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    """Return a config with six updates per epoch."""
    settings = {
        "max_epochs": 2,
        "global_batch_size": 16,
        "dropout": 0.3,
        "evaluate_every": None,
        "checkpoint": CheckpointConfig(every="2 steps", background=False),  # type: ignore[arg-type]
        **changes,
    }
    return TinyConfig(**settings)


def _trainer(folder: Path | str, *callbacks: Any, of: type[TinyTrainer] = TinyTrainer, **changes: Any) -> TinyTrainer:
    options = {"world": changes.pop("world", ALONE), "printer": changes.pop("printer", lambda text: None)}
    return of(_config(**changes), run_dir=folder, callbacks=callbacks, **options)


def _interrupted(folder: Path, **changes: Any) -> Path:
    """Train eight updates, two of them in the second epoch, and return the newest checkpoint."""
    result = _trainer(folder, StopAt(8), **changes).fit()
    assert result.last_checkpoint is not None
    return Path(result.last_checkpoint)


def _reseal(checkpoint: Path) -> None:
    """Recompute the checksums, as if the fault had come before they were taken."""
    said, files = parse_manifest(str(checkpoint), (checkpoint / MANIFEST).read_bytes())
    sums = {name: FileChecksum.of(checkpoint / name) for name in files}
    (checkpoint / MANIFEST).write_bytes(write_manifest(said, sums))


def _refused(folder: Path, message: str, **changes: Any) -> None:
    trainer = _trainer(folder, **changes)
    with pytest.raises(ResumeError, match=message):
        trainer.fit()
    assert trainer.seen == [], "nothing is learned before the proof"


def _with_progress(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    change(state["parts"]["progress"])
    file.write_text(json.dumps(state))
    _reseal(checkpoint)


_load_models = ModelState.load_state_dict


def _with_one_bit_flipped(self: ModelState, state: Any) -> None:
    _load_models(self, state)
    with torch.no_grad():
        self._models["model"].last.weight.view(torch.int32)[2, 3] ^= 1  # type: ignore[union-attr,index,operator]


def test_what_was_not_tampered_with_goes_on(tmp_path: Path) -> None:
    checkpoint = _interrupted(tmp_path)
    _reseal(checkpoint)
    certificate = read_checkpoint(checkpoint).meta["certificate"]
    assert certificate["position"] == {"step": 8, "epoch": 1, "step_in_epoch": 2, "offset": 32}
    assert (certificate["samples_per_step"], certificate["schedulers"]) == (16, ["scheduler"])
    resumed = _trainer(tmp_path)
    assert resumed.fit().steps == 12
    first = [row for _, rows in resumed.seen for row in rows][:4]
    assert certificate["next_rows"]["first"] == first


@pytest.mark.parametrize(
    ("field", "by", "message"),
    [
        ("offset", 1, "progress.offset: 32 -> 33\n  next rows: "),
        ("epoch", -1, "progress.epoch: 1 -> 0\n  next rows: "),
        ("step", 1, "progress.step: 8 -> 9"),
    ],
)
def test_a_place_that_is_off_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, by: int, message: str
) -> None:
    checkpoint = _interrupted(tmp_path)
    load = Progress.load_state_dict

    def shifted(self: Progress, state: dict[str, Any]) -> None:
        load(self, {**state, field: state[field] + by})

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "load_state_dict", shifted)
        _refused(tmp_path, message)
    _with_progress(checkpoint, lambda progress: progress.update({field: progress[field] + by}))
    _refused(tmp_path, message)


def test_another_seed(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    _refused(
        tmp_path,
        r"config.seed: 0 -> 1\nTo resume: revert the change, or accept it .*fit\(accept_changes=True\)",
        seed=1,
    )
    assert _trainer(tmp_path, seed=1).fit(accept_changes=True).steps == 12


def test_another_order_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupted(tmp_path)
    order = LoaderStream._order
    monkeypatch.setattr(LoaderStream, "_order", lambda self, epoch: order(self, epoch).flip(0))
    _refused(
        tmp_path,
        r"^this run differs from the one that saved .*step-00000008 .*\n  next rows: \d+, \d+, \d+, \d+, \.\.\. ",
    )


def test_another_batch_size(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    _refused(tmp_path, r"config.global_batch_size: 16 -> 8\n  samples of an update: 16 -> 8", global_batch_size=8)
    # The split of an update into forward passes may differ: it does not change the result.
    assert _trainer(tmp_path, micro_batch_size=4).fit().steps == 12


class Sized(TinyTrainer):
    """Its config does not contain the batch size."""

    rows = 16

    def configure_dataloaders(self) -> Any:
        return DataLoader(Rows(103), batch_size=self.rows, shuffle=True, drop_last=True)


def test_another_batch_size_that_no_config_knows_of(tmp_path: Path) -> None:
    _interrupted(tmp_path, of=Sized, global_batch_size=None)
    smaller = type("Smaller", (Sized,), {"rows": 8})
    _refused(tmp_path, r"\(saved -> now\):\n  samples of an update: 16 -> 8", of=smaller, global_batch_size=None)


def test_random_numbers_that_are_drawn_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupted(tmp_path)
    load = RngState.load_state_dict

    def drawn(self: RngState, state: dict[str, Any]) -> None:
        load(self, state)
        torch.rand(1)

    monkeypatch.setattr(RngState, "load_state_dict", drawn)
    _refused(tmp_path, r'rng.torch of rank 0: \w+ -> \w+\nTo resume: remove "rng" from restore=')
    kept = ("models", "optimizers", "schedulers", "progress", "data", "callbacks")
    assert _trainer(tmp_path).fit(restore=kept).steps == 12


def test_moments_of_another_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupted(tmp_path)
    one, other = (f"optimizers/optimizer/state/model.blocks.{block}.0.weight/exp_avg" for block in (0, 1))
    load = OptimizerState.load_state_dict

    def crossed(self: OptimizerState, state: dict[str, Any]) -> None:
        names = [name.split("/")[3] for name in (one, other)]
        moments = dict(zip(names, [state["state"][name] for name in reversed(names)], strict=True))
        load(self, {**state, "state": {**state["state"], **moments}})

    with monkeypatch.context() as patched:
        patched.setattr(OptimizerState, "load_state_dict", crossed)
        _refused(tmp_path, f"  {one}: float32 .*\n(.*\n)*  {other}: float32")


def test_weights_that_are_not_those_that_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupted(tmp_path)
    monkeypatch.setattr(ModelState, "load_state_dict", _with_one_bit_flipped)
    _refused(tmp_path, r"saved -> now\):\n  models/model/last.weight: float32 \w+ -> float32 \w+\nTo resume")


class Unscheduled(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)


def test_a_scheduler_that_was_left_out(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    _refused(tmp_path, r"schedulers: scheduler -> none\nTo resume: set self.scheduler in configure_", of=Unscheduled)
    kept = ("models", "optimizers", "progress", "data", "callbacks", "rng")
    with pytest.warns(CheckpointWarning, match=r"the code of configure_optimizers\(\) has changed"):
        assert _trainer(tmp_path, of=Unscheduled).fit(restore=kept).steps == 12


class OtherStep(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {name: 2 * value for name, value in super().training_step(batch, batch_idx).items()}

    def on_log(self, metrics: Any) -> None:
        """Not part of what is learned."""


def test_other_code_of_the_step_is_warned_of(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    with pytest.warns(CheckpointWarning, match=r"the code of training_step\(\) has changed since .*step-00000008"):
        assert _trainer(tmp_path, of=OtherStep).fit().steps == 12


class Streamed(TinyTrainer):
    folder: Path
    shards: int | None = 4

    def configure_dataloaders(self) -> Any:
        return ParquetStream(self.folder, engine="threads", shards=self.shards)


def _write(file: Path, seed: int, rows: int = 64) -> None:
    draw = np.random.default_rng(seed)
    columns = {
        "id": pa.array(np.arange(rows)),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(draw.standard_normal(rows * 6, dtype=np.float32)), 6),
        "y": pa.array(draw.integers(0, 3, rows)),
    }
    pq.write_table(pa.table(columns), file, compression="none", use_dictionary=False)


def test_a_file_replaced_by_another_of_equal_size(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(2):
        _write(data / f"{number}.parquet", number)
    of: Any = type("Streamed", (Streamed,), {"folder": data})
    checkpoint = _interrupted(tmp_path / "run", of=of)
    next_rows = read_checkpoint(checkpoint).meta["certificate"]["next_rows"]
    size = (data / "1.parquet").stat().st_size
    _write(data / "1.parquet", 5)
    assert (data / "1.parquet").stat().st_size == size
    with pytest.raises(DataError, match="the training data has changed since .*its fingerprint was"):
        _trainer(tmp_path / "run", of=of).fit()
    _write(data / "1.parquet", 1)
    resumed = _trainer(tmp_path / "run", of=of)
    assert resumed.fit().steps == 16
    # One row of each logical shard in turn: on one rank, the rows of the first batch.
    assert {int(row.rpartition(":")[2]) for row in next_rows["first"]} <= set(resumed.seen[0][1])


# ---- Ranks ---------------------------------------------------------------------------------------------------------


def _saves(world: World, folder: str, strategy: str) -> dict[str, torch.Tensor]:
    trainer = _trainer(folder, StopAt(8), world=world, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
    trainer.fit()
    return weights(trainer)


def _goes_on(world: World, folder: str) -> list[str]:
    """Return the outcome of each of several ways to resume."""
    ends = []
    for strategy in ("ddp", "fsdp"):
        here = f"{folder}-{strategy}"
        if world.is_main:
            shutil.copytree(folder, here)
        world.barrier()
        trainer = _trainer(here, world=world, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        try:
            ends.append(f"{trainer.fit().steps}")
        except (CheckpointError, ResumeError) as error:
            ends.append(f"{error}")
    return ends


def test_any_number_of_ranks_and_any_strategy_goes_on(tmp_path: Path) -> None:
    run_on_ranks(_saves, 2, str(tmp_path / "two"), "fsdp")
    _interrupted(tmp_path / "one")
    assert run_on_ranks(_goes_on, 2, str(tmp_path / "one")) == [["12", "12"]] * 2
    assert _goes_on(ALONE, str(tmp_path / "two")) == ["12", "12"]


def test_rank_files_that_have_changed_places(tmp_path: Path) -> None:
    run_on_ranks(_saves, 2, str(tmp_path / "run"), "ddp")
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    one, other = checkpoint / "rank-00000.json", checkpoint / "rank-00001.json"
    one.rename(checkpoint / "aside")
    other.rename(one)
    (checkpoint / "aside").rename(other)
    _reseal(checkpoint)
    for ends in run_on_ranks(_goes_on, 2, str(tmp_path / "run")):
        for end in ends:
            assert "rank-00000.json is that of rank 1" in end


class OwnBatches(TinyTrainer):
    """Reads batches that cannot be split."""

    def configure_dataloaders(self) -> Any:
        rows = Rows(64)
        return [rows_of(rows, first) for first in range(0, 64, 8)]


def rows_of(rows: Rows, first: int) -> dict[str, torch.Tensor]:
    return {"id": torch.arange(first, first + 8), "x": rows.x[first : first + 8], "y": rows.y[first : first + 8]}


def _saves_own_batches(world: World, folder: str) -> None:
    for of in (TinyTrainer, OwnBatches):
        _trainer(f"{folder}-{of.__name__}", StopAt(4), of=of, world=world, global_batch_size=None, max_epochs=1).fit()


def test_another_number_of_ranks_does_not_change_the_batch_in_silence(tmp_path: Path) -> None:
    run_on_ranks(_saves_own_batches, 2, str(tmp_path / "run"))
    own: dict[str, Any] = {"global_batch_size": None, "max_epochs": 1}
    read, brought = (tmp_path / f"run-{name}" for name in ("TinyTrainer", "OwnBatches"))
    _refused(read, r"samples of an update: 16 on 2 ranks -> 8 on 1 rank\n.*, with global_batch_size=16 to", **own)
    _refused(
        brought, r"batches of an update: 2 on 2 ranks -> 1 on 1 rank\n.*, with gradient_accumulation_steps=2 to",
        of=OwnBatches, **own,
    )  # fmt: skip

    # As the messages say: the samples per update are unchanged.
    kept = _trainer(read, max_epochs=1)
    assert kept.fit(accept_changes=True).samples == 6 * 16
    assert {step: len(rows) for step, rows in kept.seen} == {step: 8 for step, _ in kept.seen}
    assert [step for step, _ in kept.seen[:2]] == [kept.seen[0][0]] * 2, "two micro-batches make an update now"
    with pytest.warns(UserWarning, match="guarantees 'epoch'"):
        result = _trainer(brought, of=OwnBatches, **own).fit(accept_changes=True)
    assert result.status == "completed"


@pytest.mark.parametrize(("of", "drop_last"), [(TinyTrainer, True), (TinyTrainer, False), (Streamed, True)])
def test_larger_batches_in_the_midst_of_an_epoch_finish_it(tmp_path: Path, of: Any, drop_last: bool) -> None:
    """As many updates were made as an epoch of the larger batches has, and half of the rows are left."""
    _write(tmp_path / "rows.parquet", 0, rows=103)
    of = type("Of", (of,), {"folder": tmp_path / "rows.parquet"})
    settings = {"of": of, "max_epochs": 1, "drop_last": drop_last}
    first = _trainer(tmp_path / "run", StopAt(6), global_batch_size=8, **settings)
    first.fit()
    second = _trainer(tmp_path / "run", global_batch_size=16, **settings)
    result = second.fit(accept_changes=True)
    sizes = [16, 16, 16] if drop_last else [16, 16, 16, 7]
    assert [sum(len(rows) for at, rows in second.seen if at == step) for step in range(6, result.steps)] == sizes
    seen = [row for _, rows in first.seen + second.seen for row in rows]
    assert len(set(seen)) == len(seen) == 48 + sum(sizes)
    assert (result.status, result.steps, result.epochs) == ("completed", 6 + len(sizes), 1)
    assert result.history[0].get("dropped_samples", 0) == 103 - len(seen)


def test_a_batch_size_that_changes_the_shards_says_how_to_keep_them(tmp_path: Path) -> None:
    _write(tmp_path / "rows.parquet", 0)
    of: Any = type("Of", (Streamed,), {"folder": tmp_path / "rows.parquet", "shards": None})
    first = _trainer(tmp_path / "run", StopAt(2), of=of, global_batch_size=8, max_epochs=1)
    first.fit()
    settings: Any = {"global_batch_size": 16, "max_epochs": 1}
    with pytest.raises(
        DataError,
        match=r"the order of the training data has changed .*step-00000002.*shards=8 on the ParquetStream, start ano",
    ):
        _trainer(tmp_path / "run", of=of, **settings).fit(accept_changes=True)
    second = _trainer(tmp_path / "run", of=type("Of", (of,), {"shards": 8}), **settings)
    second.fit(accept_changes=True)
    assert sorted(row for _, rows in first.seen + second.seen for row in rows) == list(range(64))
