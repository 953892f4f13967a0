"""Nothing that has to do with a checkpoint unpickles a class or executes code: watched by an audit hook."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import Program

PROGRAM = """
import sys
import torch
from headway.orchestrator.runs.checkpoints import RunCheckpoints
from headway.trainer import CheckpointConfig, World, export_safetensors, load_weights
from headway.trainer.callbacks.ema import Ema
from headway.trainer.checkpoints.store import CheckpointStore, read_checkpoint
from tests.tiny import StopAt, TinyConfig, TinyTrainer

ALONE = World.single("cpu")
SEEN = []
is_watching = False


def hook(event, arguments):
    if is_watching and event in ("pickle.find_class", "exec", "compile", "marshal.loads"):
        SEEN.append((event, str(arguments)[:200]))


def trainer(folder, *callbacks, **changes):
    saves = CheckpointConfig(every="5 steps", save_best=True)
    config = TinyConfig(max_epochs=2, dropout=0.3, checkpoint=saves, **changes)
    return TinyTrainer(config, run_dir=folder, callbacks=[Ema(0.9), *callbacks], world=ALONE, printer=lambda text: None)


def everything(folder):
    first = trainer(f"{folder}/run", StopAt(7)).fit()
    again = trainer(f"{folder}/run").fit()
    assert again.resumed_from == first.last_checkpoint
    trainer(f"{folder}/run").evaluate(checkpoint=again.last_checkpoint)
    export_safetensors(again.last_checkpoint, f"{folder}/weights.safetensors", ema=True)
    load_weights(again.last_checkpoint)
    saved = RunCheckpoints.of("run", folder)
    assert not any(saved.problems(entry) for entry in saved.entries)
    saved.digest(saved.entries[-1])
    other = trainer(f"{folder}/other", StopAt(3), init_from=again.last_checkpoint)
    other.fit()
    other.save_checkpoint(f"{folder}/aside")
    trainer(f"{folder}/third").fit(resume=f"{folder}/aside")


sys.addaudithook(hook)
everything(sys.argv[1] + "/imports")
is_watching = True
everything(sys.argv[1] + "/watched")
is_watching = False
print(SEEN)
"""


def test_no_class_is_unpickled_and_nothing_is_executed(tmp_path: Path) -> None:
    program = Program(PROGRAM, str(tmp_path))
    out, err = program.wait()
    assert (program.returncode, out.splitlines()[-1:]) == (0, ["[]"]), out + err


@pytest.mark.parametrize("name", ["pickle", "cloudpickle", "dill", "shelve", "marshal"])
def test_no_module_of_the_room_imports_a_serializer_of_code(name: str) -> None:
    room = Path(__file__).parents[3] / "trainer" / "checkpoints"
    files = [file for file in room.rglob("*.py") if file.name != "convert.py"]
    assert len(files) > 15
    assert [file.name for file in files if f"import {name}" in file.read_text()] == []
    assert [file.name for file in files if "torch.load(" in file.read_text()] == []
