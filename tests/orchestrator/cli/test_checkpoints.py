"""`headway checkpoints`, without Ray and while the run is training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway.orchestrator import Experiment
from headway.orchestrator.cli.main import main
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.run import find_run
from headway.trainer import Callback, CheckpointConfig, CheckpointStore, Trainer, World, load_weights
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.single("cpu")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def train(folder: Path, *callbacks: Callback, steps: int = 6, **settings: Any) -> None:
    checkpoint = CheckpointConfig(**{"every": "1 steps", "keep_last": "all", **settings})
    config = TinyConfig(max_steps=steps, evaluate_every="1 steps", checkpoint=checkpoint)  # type: ignore[arg-type]
    TinyTrainer(config, world=ALONE, run_dir=folder, callbacks=list(callbacks), show_progress=False).fit()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with one run, "one", that keeps six checkpoints."""
    storage = tmp_path_factory.mktemp("runs")
    train(storage / "one")
    return storage


@pytest.fixture
def storage(trained: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-r", trained, tmp_path / "runs"], check=True)
    return tmp_path / "runs"


def there(storage: Path) -> list[int]:
    return [each.step for each in CheckpointStore(storage / "one/checkpoints", world=ALONE).list()]


def damage(storage: Path, step: int, pattern: str) -> str:
    file = next((storage / "one/checkpoints" / f"step-{step:08d}").glob(pattern))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    return file.name


def test_they_are_listed_with_what_keeps_them(capsys: pytest.CaptureFixture[str], storage: Path) -> None:
    place = ("--storage", str(storage))
    assert run(capsys, "pin", "one", "2", *place)[:2] == (0, "step-00000002 is pinned\n")
    damage(storage, 5, "manifest.json")
    code, out, _ = run(capsys, "ls", "one", *place)
    assert code == 0
    heading, *rows = out.splitlines()
    assert "validation/loss" in heading
    assert [row.split()[0] for row in rows] == [f"step-{step:08d}" for step in (1, 2, 3, 4, 6, 5)]
    assert rows[1].rstrip().endswith("last, pinned")
    assert "KiB" in rows[0]
    assert rows[-1].rstrip().endswith("damaged: see `headway checkpoints verify`")


def test_equal_weights_have_equal_digests_and_others_do_not(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path
) -> None:
    train(tmp_path / "runs/two", steps=6, every=None)
    place = ("--storage", str(storage))
    code, one, _ = run(capsys, "digest", "one", "newest", "5", *place)
    assert code == 0
    (name, newest), (_, other) = (line.split() for line in one.splitlines())
    assert (name, len(newest)) == ("step-00000006", 16)
    assert other != newest
    assert run(capsys, "digest", "two", *place)[1] == f"step-00000006  {newest}\n"


def test_damaged_files_are_named_and_the_exit_code_tells(capsys: pytest.CaptureFixture[str], storage: Path) -> None:
    place = ("--storage", str(storage))
    code, out, _ = run(capsys, "verify", "one", *place)
    assert (code, out) == (0, "".join(f"step-{step:08d}  whole\n" for step in range(1, 7)))
    name = damage(storage, 3, "*.safetensors")
    code, out, _ = run(capsys, "verify", "one", *place)
    assert code == 1
    assert f"step-00000003  damaged: {name} has changed since it was written: its checksum differs" in out.splitlines()
    assert out.count("whole") == 5
    assert run(capsys, "verify", "one", "4", "newest", *place)[0] == 0
    assert run(capsys, "verify", "one", "step-00000003", *place)[0] == 1


def test_prune_keeps_what_is_good_pinned_or_wanted(capsys: pytest.CaptureFixture[str], storage: Path) -> None:
    place = ("--storage", str(storage))
    losses = CheckpointStore(storage / "one/checkpoints", world=ALONE, monitor="validation/loss")
    best = losses.best()
    assert best is not None
    run(capsys, "pin", "one", "2", *place)
    # By the run's own rules, which keep all.
    assert run(capsys, "prune", "one", *place)[:2] == (0, "nothing to delete\n")
    damage(storage, 6, "*.safetensors")
    code, out, _ = run(capsys, "prune", "one", "--keep-last", "1", "--dry-run", *place)
    assert (code, there(storage)) == (0, [1, 2, 3, 4, 5, 6])
    assert "step-00000003 would be deleted" in out
    assert "step-00000005" not in out, "the newest good one"
    run(capsys, "prune", "one", "--keep-last", "1", *place)
    assert there(storage) == sorted({2, 5, 6, best.step})
    for name, why in (("newest", "step-00000005 is the newest good checkpoint"), ("2", "step-00000002 is pinned")):
        code, _, err = run(capsys, "prune", "one", name, *place)
        assert code == 2
        assert why in err
    run(capsys, "prune", "one", "6", *place)
    run(capsys, "unpin", "one", "2", *place)
    run(capsys, "prune", "one", "2", *place)
    assert there(storage) == sorted({5, best.step} - {2, 6})


def test_what_was_saved_before_a_run_began_anew_is_neither_its_best_nor_pruned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "one/checkpoints", world=ALONE, keep_last="all")

    def save(step: int, loss: float) -> None:
        meta = {
            "config": {"checkpoint": {"monitor": "validation/loss", "mode": "min", "keep_last": "all"}},
            "began_after": store.began_after,
        }
        store.save({}, rank_parts={}, step=step, epoch=0, metrics={"validation/loss": loss}, meta=meta)

    save(30, 0.1)
    save(40, 0.2)
    store.start_over()
    for step, loss in ((1, 0.8), (2, 0.7), (3, 0.9), (4, 0.9)):
        save(step, loss)
    place = ("--storage", str(tmp_path))
    assert run(capsys, "verify", "one", "best", *place) == (0, "step-00000002  whole\n", "")
    rows = run(capsys, "ls", "one", *place)[1].splitlines()[1:]
    assert [row.rstrip().endswith("before the run was restarted") for row in rows] == [True, True, *[False] * 4]
    run(capsys, "prune", "one", "--keep-last", "1", *place)
    assert there(tmp_path) == [30, 40, 2, 4]
    run(capsys, "prune", "one", "30", *place)
    assert there(tmp_path) == [40, 2, 4]


def test_weights_are_exported(capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path) -> None:
    place, file = ("--storage", str(storage)), tmp_path / "weights.safetensors"
    damage(storage, 6, "*.safetensors")
    code, out, _ = run(capsys, "export", "one", str(file), *place)
    assert code == 0
    assert "step-00000005" in out
    expected = load_weights(storage / "one/checkpoints/step-00000005")
    torch.testing.assert_close(load_file(file), expected, rtol=0, atol=0)
    run(capsys, "export", "one", str(file), "--checkpoint", "1", "--dtype", "bfloat16", *place)
    assert {each.dtype for each in load_file(file).values()} == {torch.bfloat16}
    code, _, err = run(capsys, "export", "one", *place)
    assert code == 2
    assert "name one file to write, as in `headway checkpoints export one weights.safetensors`" in err
    code, _, err = run(capsys, "export", "one", str(file), "--checkpoint", "6", *place)
    assert code == 1
    assert "is damaged" in err


def test_what_is_not_there_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path
) -> None:
    open_run(Experiment(name="fresh", trainer=TinyTrainer, config=TinyConfig(), storage=str(storage)))
    for arguments, message in (
        (("ls", "two"), "there is no run 'two'"),
        (("ls", "fresh"), "the run fresh in "),
        (("pin", "one", "17"), "there is no checkpoint '17' in "),
        (("verify", "one", "last"), "there is no checkpoint 'last'"),
        (("prune", "one", "--keep-last", "0"), "keep_last must be an integer >= 1"),
        (("export", "one", str(tmp_path / "x"), "--dtype", "half-ish"), "--dtype must be the name of a torch dtype"),
    ):
        code, out, err = run(capsys, *arguments, "--storage", str(storage))
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1


class Meanwhile(Callback):
    """Run commands in another process while the run is training."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.told: list[str] = []

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        commands = {2: [["pin", "one", "newest"]], 4: [["verify", "one"], ["ls", "one"], ["prune", "one"]]}
        for command in commands.get(checkpoint.step, []):
            program = (
                "import sys; from headway.orchestrator.cli.main import main\n"
                "try:\n    main(sys.argv[1:])\nfinally:\n    assert 'ray' not in sys.modules"
            )
            done = subprocess.run(
                [sys.executable, "-c", program, "checkpoints", *command, "--storage", str(self.storage)],
                capture_output=True, text=True, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
            self.told.append(done.stdout)


@pytest.mark.extended
def test_they_work_without_ray_while_the_run_is_training(tmp_path: Path) -> None:
    meanwhile = Meanwhile(tmp_path)
    train(tmp_path / "one", meanwhile, keep_last=1, keep_best=0, background=False)
    pinned, verified, listed, pruned = meanwhile.told
    assert pinned == "step-00000002 is pinned\n"
    assert verified == "step-00000002  whole\nstep-00000004  whole\n"
    assert len(listed.splitlines()) == 3
    assert pruned == "nothing to delete\n"
    assert there(tmp_path) == [2, 6]


def test_two_runs_are_compared_by_what_they_left_behind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without the code of the trainer, a GPU or Ray."""
    for name, width in (("one", 9), ("two", 5)):
        config = TinyConfig(width=width, max_steps=2, evaluate_every="1 steps")  # type: ignore[arg-type]
        experiment = Experiment(name=name, trainer=TinyTrainer, config=config, storage=str(tmp_path))
        run = open_run(experiment).run
        result = TinyTrainer(config, world=ALONE, run_dir=run.run_dir, show_progress=False).fit()
        run.update(status=result.status, steps=result.steps, metrics={"validation/loss": float(width)})

    def compare(*names: str) -> list[str]:
        with pytest.raises(SystemExit):
            main(["runs", "--storage", str(tmp_path), "compare", *names])
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    heading, *rows = compare("one", "two")
    assert heading == "OF FIELD one two"
    assert [row for row in rows if not row.startswith("result weights ")] == [
        "config config.width 9 5",
        "result validation/loss 9 5",
    ]
    assert len(rows) == 3
    assert compare("one", "one") == ["one and one have no recorded differences"]
    # What is copied from there must be all there.
    for name in ("one", "two"):
        find_run(name, str(tmp_path)).update(data={"fingerprint": f"[red]{'x' * 300} {name}"})
    assert f"data fingerprint [red]{'x' * 300} one [red]{'x' * 300} two" in compare("one", "two")
