"""Callbacks of the process: traces of chosen updates, synchronised garbage collection, a summary of models."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import Callback, ConfigError, ParallelConfig, World
from headway.trainer.callbacks import GarbageCollection, ModelSummary, Profile, model_summary
from tests.distributed import run_on_ranks
from tests.tiny import Deep, StopAt, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


def config_of(**changes: Any) -> TinyConfig:
    return TinyConfig(**{"max_steps": 8, "global_batch_size": 8, "evaluate_every": None, **changes})


def steps_in(trace: Path) -> set[int]:
    """Return the updates in a trace, after checking that it is complete and has operators."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events if "name" in event]
    assert "aten::addmm" in names
    return {int(name.split("#")[1]) for name in names if name.startswith("ProfilerStep#")}


# ---- Profile -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "shown"), [((3, 4), {3, 4}), ((1, 2), {1, 2}), ((8, 9), {8, 9})])
def test_a_trace_shows_the_chosen_updates(tmp_path: Path, steps: tuple[int, int], shown: set[int]) -> None:
    TinyTrainer(config_of(), run_dir=tmp_path, world=ALONE, callbacks=[Profile(steps=steps)]).fit()
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == f"steps-{steps[0]}-{steps[1]}-rank0.json"
    assert steps_in(trace) == shown


def test_an_update_that_is_skipped_has_an_event_of_its_own(tmp_path: Path) -> None:
    class Skips(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            outputs["loss"] = outputs["loss"] * (float("nan") if batch_idx == 3 else 1.0)
            return outputs

    config = config_of(non_finite="skip")
    Skips(config, run_dir=tmp_path, world=ALONE, callbacks=[Profile(steps=(3, 5))]).fit()
    events = json.loads((tmp_path / "profile/steps-3-5-rank0.json").read_text())["traceEvents"]
    updates = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    updates = [each for each in updates if each.get("cat") == "user_annotation"]
    assert [each["name"].split("#")[1] for each in sorted(updates, key=lambda each: each["ts"])] == ["3", "4", "4", "5"]


def test_a_stop_inside_the_chosen_updates_writes_what_there_is_and_a_resumed_run_the_rest(tmp_path: Path) -> None:
    for callbacks in ([StopAt(4)], []):
        profile = Profile(steps=(3, 6), record_shapes=True)
        TinyTrainer(config_of(), run_dir=tmp_path, world=ALONE, callbacks=[profile, *callbacks]).fit()
    assert steps_in(tmp_path / "profile/steps-3-6-rank0.json") == {3, 4, 5}  # 5 is the end of the attempt
    assert steps_in(tmp_path / "profile/steps-5-6-rank0.json") == {5, 6}


class AskForProfile(Callback):
    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == 4:
            self.profile.steps = (6, 7)


def profiled(world: World, run_dir: str) -> None:
    profile = Profile(steps=(2, 2), ranks=(1,))
    TinyTrainer(config_of(), run_dir=run_dir, world=world, callbacks=[profile, AskForProfile(profile)]).fit()


def test_chosen_ranks_trace_and_can_be_asked_while_they_train(tmp_path: Path) -> None:
    run_on_ranks(profiled, 2, str(tmp_path))
    assert {file.name: steps_in(file) for file in (tmp_path / "profile").iterdir()} == {
        "steps-2-2-rank1.json": {2},
        "steps-6-7-rank1.json": {6, 7},
    }


def test_a_trace_goes_to_any_storage(tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    run_dir = f"memory://{tmp_path.name}"
    TinyTrainer(config_of(max_steps=2), run_dir=run_dir, world=ALONE, callbacks=[Profile(steps=(2, 2))]).fit()
    written = MemoryFileSystem().cat_file(f"/{tmp_path.name}/profile/steps-2-2-rank0.json")
    assert "ProfilerStep#2" in {event.get("name") for event in json.loads(written)["traceEvents"]}


@pytest.mark.parametrize("steps", [(0, 3), (4, 3), (3,)])
def test_steps_that_are_no_updates_are_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match="first and the last update"):
        Profile(steps=steps)


def test_without_a_run_directory_there_is_nowhere_to_write_to() -> None:
    with pytest.raises(ConfigError, match="pass run_dir to the trainer"):
        TinyTrainer(config_of(), world=ALONE, callbacks=[Profile(steps=(1, 2))]).fit()


# ---- Garbage collection --------------------------------------------------------------------------------------------


class Collections(Callback):
    """Records after which updates a full collection ran, and whether automatic collection was off."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.steps: list[int] = []
        self.enabled: set[bool] = set()

    def on_fit_start(self, trainer: Any) -> None:
        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                self.steps.append(trainer.global_step)

        self.note = note
        gc.callbacks.append(note)

    def on_step_start(self, trainer: Any) -> None:
        self.enabled.add(gc.isenabled())
        if trainer.global_step + 1 == self.fails_at:
            raise RuntimeError("as it was told")

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        if hasattr(self, "note"):
            gc.callbacks.remove(self.note)


def collections_on(world: World) -> tuple[list[int], set[bool], bool]:
    notes = Collections()
    TinyTrainer(config_of(), world=world, callbacks=[notes, GarbageCollection(every=3)]).fit()
    return notes.steps, notes.enabled, gc.isenabled()


def test_all_ranks_collect_after_the_same_updates_and_never_besides() -> None:
    assert run_on_ranks(collections_on, 2) == [([0, 3, 6], {False}, True)] * 2


def test_automatic_collection_is_on_again_after_a_stop_and_after_an_error() -> None:
    TinyTrainer(config_of(), world=ALONE, callbacks=[StopAt(2), GarbageCollection()]).fit()
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="as it was told"):
        TinyTrainer(config_of(), world=ALONE, callbacks=[Collections(fails_at=2), GarbageCollection()]).fit()
    assert gc.isenabled()


def test_what_was_off_before_stays_off() -> None:
    gc.disable()
    try:
        TinyTrainer(config_of(), world=ALONE, callbacks=[GarbageCollection(every="1 epochs")]).fit()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collecting_by_the_clock_is_refused() -> None:
    with pytest.raises(ConfigError, match="steps or epochs"):
        GarbageCollection(every="90s")


# ---- Model summary -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(100, 4, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).requires_grad_(False)
        self.head = nn.Linear(4, 100, bias=False)
        self.head.weight = self.embedding.weight


def test_a_summary_counts_what_is_there_on_meta_or_not() -> None:
    for device in ("meta", "cpu"):
        with torch.device(device):
            lines = model_summary(Tied(), name="tied").splitlines()
        assert [line.split() for line in lines] == [
            ["tied", "class", "parameters", "trained", "bytes"],
            ["(itself)", "Tied", "3", "3", "12", "B"],
            ["embedding", "Embedding", "400", "400", "800", "B"],
            ["norm", "BatchNorm1d", "8", "8", "72", "B"],  # and 32 of running means, 8 of a counter
            ["blocks", "ModuleList", "40", "0", "160", "B"],
            ["head", "Linear", "0", "0", "0", "B"],
            ["total", "Tied", "451", "411", "1.02", "KiB"],
        ]
        assert len({len(line) for line in lines}) == 1


def summaries(world: World, strategy: str) -> tuple[list[str], str]:
    printed: list[str] = []
    summary = ModelSummary()
    config = config_of(max_steps=1, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
    TinyTrainer(config, world=world, callbacks=[summary], printer=printed.append).fit()
    return printed, summary.text


def test_a_sharded_model_counts_as_a_whole_and_is_printed_once() -> None:
    with torch.device("meta"):
        expected = model_summary(Deep(config_of().width, 0.0))
    for strategy in ("ddp", "fsdp"):
        (printed, text), (nothing, same) = run_on_ranks(summaries, 2, strategy)
        assert printed == [expected]
        assert nothing == []
        assert text == same == expected
