"""A run continues with other weights of its mixture, if a person accepts them: from there on, and only there."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.mixture import Mixture
from headway.datasets.stream import Stream
from headway.trainer import CheckpointConfig, DataError, Trainer, TrainerConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import StopAt

Weights = dict[str, float]
Planned = dict[int, Weights]

OLD, NEW, NEWER = {"web": 0.9, "code": 0.1}, {"web": 0.25, "code": 0.75}, {"web": 0.5, "code": 0.5}


class Mixed(Trainer[TrainerConfig]):
    """Keeps the ids of the rows of every update."""

    folder: str
    weights: Weights
    planned: Planned | None = None
    ends: Any = "repeat"
    shards: int = 20
    by_epoch: bool = False

    def configure_models(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def configure_dataloaders(self) -> Any:
        sources = {name: (JsonLines(f"{self.folder}/{name}.jsonl"), weight) for name, weight in self.weights.items()}
        return Stream(
            Mixture(sources, weights_by_step=self.planned, on_end=self.ends), shards=self.shards, engine="threads"
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch if self.by_epoch else self.global_step, batch["id"].tolist()))
        return self.model(batch["id"].float()[:, None]).square().mean()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources of 300 and 200 rows, whose ids begin at 0 and 1000."""
    for name, ids in (("web", range(300)), ("code", range(1000, 1200))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"id": row}) + "\n" for row in ids))
    return tmp_path


def _train(
    world: World,
    folder: str,
    run_dir: str,
    max_steps: int,
    weights: Weights,
    accept: bool = False,
    **options: Any,
) -> tuple[list[tuple[int, list[int]]], list[str], dict[str, Any]]:
    said: list[str] = []
    size = options.pop("global_batch_size", 20)
    resume = options.pop("resume", "auto")
    config = TrainerConfig(
        max_steps=max_steps,
        global_batch_size=size,
        evaluate_every=None,
        checkpoint=CheckpointConfig(every=None, keep_last=9),
    )
    trainer = Mixed(config, run_dir=run_dir, world=world, printer=said.append)
    vars(trainer).update(folder=folder, weights=weights, **options)
    trainer.fit(resume=resume, accept_changes=accept)
    return trainer.seen, [line for line in said if line.startswith("mixture")], dict(trainer.data_identity)


def train(folder: Path, run: str, max_steps: int, *args: Any, **options: Any) -> Any:
    return _train(World.single("cpu"), str(folder), str(folder / run), max_steps, *args, **options)


def learned(*legs: Any) -> dict[int, Counter[int]]:
    """Return the ids of each update, of all ranks."""
    steps: dict[int, Counter[int]] = {}
    for leg in legs:
        for step, rows in leg:
            steps.setdefault(step, Counter()).update(rows)
    return steps


def test_accepted_weights_hold_from_the_change_on_at_every_number_of_ranks(folder: Path) -> None:
    first, said, identity = train(folder, "run", 10, OLD)
    assert said == []
    assert "changes" not in identity
    with pytest.raises(DataError, match=r"accept the change, so that the new weights hold from here on: fit\(accept_"):
        train(folder, "run", 20, NEW)
    second = run_on_ranks(_train, 3, str(folder), str(folder / "run"), 14, NEW, True)
    lines = [
        "mixture weights from step 10 (sample 200) on: web 0.9, code 0.1 -> web 0.25, code 0.75",
        "mixture weights from step 14 (sample 280) on: web 0.25, code 0.75 -> web 0.5, code 0.5",
    ]
    assert second[0][1] == lines[:1]
    assert {str(rank[2]["changes"]) for rank in second} == {str(lines[:1])}
    third = run_on_ranks(_train, 2, str(folder), str(folder / "run"), 20, NEWER, True)
    assert third[0][1] == lines[1:]
    last, said, identity = train(folder, "run", 60, NEWER)
    assert said == [], "a change is accepted once"
    assert identity["changes"] == lines

    steps = learned(first, *(rank[0] for rank in (*second, *third)), last)
    assert sorted(steps) == list(range(60))
    shares = [
        sum(row < 1000 for step in part for row in steps[step].elements()) / (20 * len(part))
        for part in (range(10), range(10, 14), range(14, 60))
    ]
    assert shares == pytest.approx([0.9, 0.25, 0.5], abs=0.03)

    # Another process that resumes from the checkpoint of the first change, or of the last, learns the same rows.
    for checkpoint, weights, end in ((14, NEW, 14), (20, NEWER, 60)):
        path = next((folder / "run" / "checkpoints").glob(f"*{checkpoint:08d}*"))
        again, _, _ = train(folder, f"again-{checkpoint}", 60, weights, resume=str(path))
        for step, rows in learned(again).items():
            if step < end:
                assert rows == steps[step]

    # 60 updates are 1,200 rows: sources of 300 and 200 rows are read again, and no row a time more than another one.
    counts = sum(steps.values(), Counter())
    assert len(counts) == 500
    for source in (range(300), range(1000, 1200)):
        times = {counts[row] for row in source}
        assert max(times) - min(times) <= 1 + (len(source) % 20 > 0), "shards of a source end at about the same time"


def test_a_plan_that_says_what_was_changed_is_the_same_data(folder: Path) -> None:
    train(folder, "run", 10, OLD)
    train(folder, "run", 12, NEW, accept=True)
    _, said, identity = train(folder, "run", 14, OLD, planned={10: NEW})
    assert said == []
    assert len(identity["changes"]) == 1
    assert train(folder, "run", 16, OLD, planned={10: NEW})[1] == []


def test_weights_by_step_are_counted_from_the_change_on(folder: Path) -> None:
    """A larger batch moves the samples of later steps, and no earlier ones."""
    first, _, _ = train(folder, "run", 6, OLD, planned={4: NEWER, 12: NEW})
    second, said, _ = train(folder, "run", 14, OLD, planned={4: NEWER, 12: NEW}, global_batch_size=40, accept=True)
    assert said == [
        "mixture weights from step 6 (sample 120) on: web 0.5, code 0.5; from sample 240 on web 0.25, code 0.75 -> "
        "web 0.5, code 0.5; from sample 360 on web 0.25, code 0.75"
    ]
    steps = learned(first, second)
    code = {step: sum(row >= 1000 for row in rows.elements()) / sum(rows.values()) for step, rows in steps.items()}
    assert max(code[step] for step in range(4)) < 0.3
    assert all(0.4 <= code[step] <= 0.6 for step in range(4, 12))
    assert min(code[step] for step in (12, 13)) > 0.65


def test_what_cannot_be_accepted_is_not_advised(folder: Path) -> None:
    """Other logical shards are named first, because no acceptance of the weights helps."""
    train(folder, "run", 5, OLD)
    for accept in (False, True):
        with pytest.raises(DataError, match=r"had 20 logical shards and now have 10 .*: set shards=20 on the Stream"):
            train(folder, "run", 9, NEW, accept=accept, shards=10)
    assert train(folder, "run", 9, NEW, accept=True)[1]


def _epochs(legs: Any) -> list[Counter[int]]:
    """Return the ids of each epoch, of all ranks."""
    found: list[Counter[int]] = []
    for leg in legs:
        for epoch, rows in leg:
            found += [Counter() for _ in range(epoch + 1 - len(found))]
            found[epoch].update(rows)
    return found


def _until_the_end(
    world: World, folder: str, run_dir: str, max_steps: int, weights: Weights, ends: str, planned: Planned | None
) -> tuple[list[tuple[int, list[int]]], list[str], float]:
    """Train in exact mode; return (epoch, ids) of each micro-batch, what was printed, and the weight of the model."""
    said: list[str] = []
    config = TrainerConfig(
        max_steps=max_steps, global_batch_size=20, exact=True, micro_batch_size=1, evaluate_every=None,
        checkpoint=CheckpointConfig(every=None, keep_last=9),
    )  # fmt: skip
    trainer = Mixed(config, run_dir=run_dir, world=world, printer=said.append)
    vars(trainer).update(folder=folder, weights=weights, ends=ends, planned=planned, by_epoch=True)
    trainer.fit(accept_changes=True)
    return trainer.seen, [line for line in said if line.startswith("mixture")], trainer.model.weight.item()


@pytest.mark.parametrize("ends", [pytest.param("drop", marks=pytest.mark.extended), "stop"])
def test_where_sources_end_too_and_equals_a_run_that_was_never_interrupted(folder: Path, ends: str) -> None:
    rng = random.Random(ends)
    at = sorted(rng.sample(range(2, 60), 4))
    plans = [rng.choice([OLD, NEW, NEWER, {"web": 1.0, "code": 40.0}]) for _ in range(5)]
    legs, told = [], []
    for until, weights in zip([*at, 70], plans, strict=True):
        ranks = rng.randint(1, 3)
        args = (str(folder), str(folder / "run"), until, weights, ends, None)
        done = run_on_ranks(_until_the_end, ranks, *args) if ranks > 1 else [_until_the_end(World.single("cpu"), *args)]
        legs += [rank[0] for rank in done]
        told += done[0][1]
    assert told
    assert all("of epoch" in line for line in told)
    planned = dict(zip(at, plans[1:], strict=True))
    alone = _until_the_end(World.single("cpu"), str(folder), str(folder / "alone"), 70, plans[0], ends, planned)
    epochs = _epochs(legs)
    assert epochs == _epochs([alone[0]])
    assert len(epochs) > 2
    assert {rank[2] for rank in done} == {alone[2]}
    assert all(set(epoch.values()) == {1} for epoch in epochs), "an epoch has no row twice"
    if ends == "drop":
        assert all(sum(epoch.values()) == 500 for epoch in epochs[:-1])
    else:
        assert len({sum(epoch.values()) for epoch in epochs[:-1]}) > 1, "an epoch is as long as its weights let it be"


def test_other_weights_may_end_the_epoch_sooner(folder: Path) -> None:
    """Few rows of a source are left, and from here on all shards want one: 18 updates would be the whole epoch."""
    train(folder, "run", 16, {"web": 0.5, "code": 0.5}, ends="stop")
    only_code = {"web": 1.0, "code": 1e6}
    seen, said, _ = train(folder, "run", 27, only_code, accept=True, ends="stop", by_epoch=True)
    assert said[0].startswith("mixture weights from step 16 (sample 320 of epoch 1) on: ")
    epochs = Counter(epoch for epoch, _ in seen)
    # Of the 200 rows of code, each shard gave about eight, and has one or two; then epochs of code alone.
    assert epochs[0] == 1
    assert epochs[1] == 10


def test_the_length_of_a_run_is_the_sum_of_its_epochs(folder: Path) -> None:
    """With "stop", and weights that change."""

    class Told(Mixed):
        def configure_optimizers(self) -> None:
            self.told = self.total_steps
            super().configure_optimizers()

    for limit in ({"max_epochs": 4}, {"max_samples": 1000}):
        config = TrainerConfig(**limit, global_batch_size=20, evaluate_every=None)
        trainer = Told(config, run_dir=str(folder / str(limit)), world=World.single("cpu"))
        vars(trainer).update(folder=str(folder), weights=OLD, ends="stop", planned={5: NEW, 30: NEWER})
        result = trainer.fit()
        assert trainer.told == trainer.total_steps == result.steps


def test_a_schedule_is_told_if_accepted_weights_change_the_length_of_the_run(folder: Path) -> None:
    """The epoch in progress has begun with other weights than `configure_optimizers` knows."""

    class Scheduled(Mixed):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            self.planned_steps = self.total_steps
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def fit(weights: Weights, **config: Any) -> tuple[Scheduled, list[str]]:
        said: list[str] = []
        limits = {"max_epochs": 2, "global_batch_size": 20, "evaluate_every": None, **config}
        callbacks = [] if weights is NEW else [StopAt(8)]
        trainer = Scheduled(
            TrainerConfig(**limits), run_dir=str(folder / "run"), world=World.single("cpu"), printer=said.append,
            callbacks=callbacks,
        )  # fmt: skip
        vars(trainer).update(folder=str(folder), weights=weights, ends="stop")
        trainer.fit(accept_changes=weights is NEW)
        return trainer, [line for line in said if "was told of" in line]

    assert fit(OLD)[1] == []
    trainer, said = fit(NEW)
    assert trainer.planned_steps != trainer.total_steps == trainer.global_step
    assert said == [
        f"configure_optimizers() was told of {trainer.planned_steps} updates, and the run has {trainer.total_steps}, "
        "because its data has changed in mid-run: set max_steps if a schedule needs the number"
    ]
    assert fit(NEW)[1] == said, "another process is told the same number, and so the same schedule is made"


def test_how_sources_end_stays(folder: Path) -> None:
    train(folder, "run", 5, OLD, ends="drop")
    with pytest.raises(DataError, match="accept the change, so that the new weights hold"):
        train(folder, "run", 9, NEW, ends="drop")
    with pytest.raises(DataError, match="restore weights, weights_by_step, on_end"):
        train(folder, "run", 9, NEW, accept=True, ends="repeat")
