"""A checkpoint of an earlier version is converted if one trusts it, and not read otherwise.

`data/format-3.tar.gz` is a checkpoint of two ranks with FSDP2 after nine updates, as commit de278cc has written it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from headway.orchestrator.cli.main import main
from headway.trainer import CheckpointStore, World, load_weights
from headway.trainer.callbacks.ema import Ema
from headway.trainer.errors import CheckpointError
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.single("cpu")
# Sums of the weights, as load_weights of that commit returned them.
SUMS = {
    "first.weight": -1.0748157841153443,
    "first.bias": -0.4973372109234333,
    "blocks.0.0.weight": 1.2485731868073344,
    "blocks.0.0.bias": -0.6906096190214157,
    "blocks.1.0.weight": -5.281647547031753,
    "blocks.1.0.bias": 0.20264924131333828,
    "last.weight": -0.6273451885208488,
    "last.bias": -0.006765387952327728,
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "data" / "format-3.tar.gz") as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path / "run" / "checkpoints" / "step-00000009"


def _headway(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", *arguments])
    return int(ended.value.code or 0)


def test_it_is_not_read_as_it_is(old: Path) -> None:
    with pytest.raises(CheckpointError, match="has format 3; .* convert it with `headway checkpoints convert`"):
        load_weights(old)
    with pytest.raises(CheckpointError, match="has format 3"):
        CheckpointStore(old.parent, world=ALONE).newest_good()


def test_it_is_converted_by_one_command_and_resumed(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = str(old.parents[2])
    assert _headway("convert", "run", "--storage", storage) == 2
    assert "pass --trust-pickle if you know who wrote it" in capsys.readouterr().err
    assert [each.name for each in old.parent.iterdir()] == [old.name]
    (old / "pinned").touch()
    assert _headway("convert", "run", "--trust-pickle", "--storage", storage) == 0
    assert capsys.readouterr().out == "step-00000009 is now step-00000009.2\n"
    assert [each.name for each in old.parent.iterdir()] == ["step-00000009.2"]
    assert (old.parent / "step-00000009.2" / "pinned").exists()
    weights = load_weights(old.with_name("step-00000009.2"))
    assert {name: float(each.double().sum()) for name, each in weights.items()} == SUMS
    assert _headway("verify", "run", "--storage", storage) == 0
    config = TinyConfig(max_epochs=2, global_batch_size=16, dropout=0.3, evaluate_every=None)
    resumed = TinyTrainer(config, run_dir=old.parents[1], world=ALONE, callbacks=[Ema(0.9)], printer=lambda text: None)
    result = resumed.fit()
    assert (result.resumed_from, result.steps) == (str(old.with_name("step-00000009.2")), 12)
    assert _headway("convert", "run", "--trust-pickle", "--storage", storage) == 0
    assert "has no checkpoint of an earlier format" in capsys.readouterr().out
