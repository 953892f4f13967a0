"""The loss and the tokens of each source are those of the rows, on any number of ranks and through a resume."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.mixture import Mixture
from headway.datasets.stream import Stream
from headway.trainer import CheckpointConfig, StepError, Trainer, TrainerConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt

IDS = {"web": range(60), "code": range(100, 140)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, ids in IDS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"id": row}) + "\n" for row in ids))
    return tmp_path


class BySource(Trainer[TrainerConfig]):
    """The loss of row i is i, over i % 3 tokens."""

    folder: str
    counts_tokens = True

    def configure_models(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, int]] = []

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)

    def configure_dataloaders(self) -> Any:
        data = {name: JsonLines(f"{self.folder}/{name}.jsonl") for name in IDS}
        train = Mixture({name: (data[name], weight) for name, weight in (("web", 0.75), ("code", 0.25))})
        held_out = Mixture({"first": (data["code"], 1), "second": (data["web"], 1)})
        return Stream(train, engine="threads"), Stream(held_out, engine="threads")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["id"]
        if self.training:
            self.seen += [(self.global_step, row) for row in ids.tolist()]
        self.log_by_source(ids.float(), batch["source"], tokens=ids % 3 if self.counts_tokens else None)
        return self.model(ids.float()[:, None]).mean()


def _train(
    world: World, folder: str, run_dir: str | None = None, stop_at: int | None = None, **options: Any
) -> tuple[dict[int, dict[str, float]], list[tuple[int, int]], list[Any]]:
    config = TrainerConfig(
        max_epochs=1,
        global_batch_size=20,
        micro_batch_size=options.pop("micro_batch_size", 6),
        log_every=2,
        checkpoint=CheckpointConfig(every=None),
        exact=options.pop("exact", False),
    )
    log = Losses()
    callbacks = [log] if stop_at is None else [log, StopAt(stop_at)]
    trainer = BySource(config, run_dir=run_dir, world=world, callbacks=callbacks)
    vars(trainer).update(folder=folder, **options)
    history = trainer.fit().history
    return log.records, trainer.seen, list(history)


def expected(rows: list[int], *, tokens: bool = True) -> dict[str, float]:
    """Return the metrics of some rows."""
    result = {}
    for name, ids in IDS.items():
        weights = [(row, row % 3 if tokens else 1) for row in rows if row in ids]
        total = sum(weight for _, weight in weights)
        result[f"loss/{name}"] = sum(row * weight for row, weight in weights) / total
        result[f"{'tokens' if tokens else 'rows'}/{name}"] = float(total)
    return result


def check(records: dict[int, dict[str, float]], seen: list[tuple[int, int]], *, tokens: bool = True) -> None:
    by_record: dict[int, list[int]] = defaultdict(list)
    for step, row in seen:
        by_record[min(5, step // 2 * 2 + 2)].append(row)
    for step, rows in by_record.items():
        found = {name: value for name, value in records[step].items() if name.startswith("train/") and "/" in name[6:]}
        assert found == pytest.approx({f"train/{name}": each for name, each in expected(rows, tokens=tokens).items()})


@pytest.mark.parametrize("exact", [False, True])
def test_the_record_has_the_loss_and_the_tokens_of_each_source(folder: Path, exact: bool) -> None:
    records, seen, history = _train(World.single("cpu"), str(folder), exact=exact)
    check(records, seen)
    of_epoch = expected([row for _, row in seen])
    assert {name: history[0][f"train/{name}"] for name in of_epoch} == pytest.approx(of_epoch)
    held_out = expected([row for ids in IDS.values() for row in ids])
    for own, other in (("web", "second"), ("code", "first")):
        for kind in ("loss", "tokens"):
            assert records[5][f"validation/{kind}/{other}"] == pytest.approx(held_out[f"{kind}/{own}"])


def _train_rows(world: World, folder: str) -> Any:
    return _train(world, folder, counts_tokens=False, micro_batch_size=1)


def test_three_ranks_give_what_one_gives_and_padding_does_not_count(folder: Path) -> None:
    ranks = run_on_ranks(_train_rows, 3, str(folder))
    seen = sorted({each for rank in ranks for each in rank[1]})
    for records, _, _ in ranks:
        check(records, seen, tokens=False)


def test_a_resume_inside_an_interval_counts_every_row_once(folder: Path) -> None:
    run_dir = str(folder / "run")
    first = run_on_ranks(_train, 2, str(folder), run_dir, 3)
    records, seen, _ = _train(World.single("cpu"), str(folder), run_dir)
    check(first[0][0] | records, [each for rank in first for each in rank[1]] + seen)


def test_other_data_and_other_shapes_are_refused(folder: Path) -> None:
    class Alone(BySource):
        def configure_dataloaders(self) -> Any:
            return Stream(JsonLines(f"{folder}/web.jsonl"), transforms=[lambda rows: {**rows, "source": rows["id"]}])

    class Mean(BySource):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log_by_source(batch["id"].float().mean(), batch["source"])
            return super().training_step(batch, batch_idx)

    for of, message in ((Alone, "needs a Stream of a Mixture"), (Mean, "average the loss over the tokens of each row")):
        trainer = of(TrainerConfig(max_steps=1, global_batch_size=20), world=World.single("cpu"))
        trainer.folder = str(folder)
        with pytest.raises(StepError, match=message):
            trainer.fit()
