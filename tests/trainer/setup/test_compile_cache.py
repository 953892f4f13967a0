"""Compiled code in the folder of a run: a restarted rank compiles nothing, and a foreign or damaged file is ignored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import ParallelConfig, World
from headway.trainer.setup import compile_cache
from headway.trainer.setup.compile_cache import FOLDER, UPDATES_BEFORE_SAVE, CompileCache
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.single("cpu")

SCRIPT = """
import json, sys
from torch._dynamo.utils import counters
from headway.trainer import ParallelConfig, World
from tests.tiny import TinyConfig, TinyTrainer

class OnlyTrains(TinyTrainer):
    def configure_dataloaders(self):
        return super().configure_dataloaders()[0]

config = TinyConfig(max_steps=int(sys.argv[2]), parallel=ParallelConfig(compile=True))
trainer = OnlyTrains(config, run_dir=sys.argv[1], world=World.single("cpu"), show_progress=False)
result = trainer.fit()
print(json.dumps({"steps": trainer.global_step, "loss": result.metrics["train/loss"], **counters["inductor"]}))
"""


def _train_compiled(run_dir: Path, max_steps: int, caches: Path, compiler: Path) -> dict[str, Any]:
    """Train in a new process with empty caches, and return its counters."""
    # Otherwise Inductor builds five programs to see what the processor can do.
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_VEC_ISA_OK": "1", "CXX": str(compiler)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir), str(max_steps)], text=True, capture_output=True,
        env={**os.environ, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.extended
def test_a_restarted_process_compiles_nothing_again(tmp_path: Path) -> None:
    calls, compiler = tmp_path / "calls", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    cold = _train_compiled(tmp_path / "run", UPDATES_BEFORE_SAVE + 1, tmp_path / "first", compiler)
    assert "fxgraph_cache_hit" not in cold
    assert ".main.cpp" in calls.read_text()
    calls.unlink()
    warm = _train_compiled(tmp_path / "run", UPDATES_BEFORE_SAVE + 2, tmp_path / "second", compiler)
    assert warm["steps"] == UPDATES_BEFORE_SAVE + 2
    assert warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"]
    assert "fxgraph_cache_miss" not in warm
    # It may still be asked for its version, and to precompile a header.
    assert ".cpp" not in calls.read_text()


def _saved(run_dir: Path, artifacts: bytes = b"of torch", libraries: dict[str, bytes] | None = None) -> Path:
    path = run_dir / FOLDER / "cpu-0.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compile_cache._encode(artifacts, libraries or {}))
    return path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """What torch was given to load."""
    given: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: given.append(content) or given)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return given


def test_artifacts_and_libraries_are_loaded(tmp_path: Path, loaded: list[bytes]) -> None:
    said: list[str] = []
    path = _saved(tmp_path, libraries={"ab/one.so": b"1", "two.so": b"22"})
    assert CompileCache(str(tmp_path), ALONE, said.append).load() == path.stat().st_size
    assert (loaded, said) == ([b"of torch"], [])
    assert (tmp_path / "inductor" / "ab" / "one.so").read_bytes() == b"1"
    assert (tmp_path / "inductor" / "two.so").read_bytes() == b"22"


def test_libraries_that_are_there_stay(tmp_path: Path, loaded: list[bytes]) -> None:
    _saved(tmp_path, libraries={"one.so": b"new"})
    there = tmp_path / "inductor" / "one.so"
    there.parent.mkdir()
    there.write_bytes(b"in use")
    CompileCache(str(tmp_path), ALONE, pytest.fail).load()
    assert there.read_bytes() == b"in use"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
def test_a_damaged_file_is_ignored_with_a_message(tmp_path: Path, loaded: list[bytes], damage: str) -> None:
    path, said = _saved(tmp_path), []
    content = path.read_bytes()
    path.write_bytes(
        {"flip": content[:-1] + b"x", "cut": content[:-1], "empty": b"", "other": b"[1]\nsomething"}[damage]
    )
    assert CompileCache(str(tmp_path), ALONE, said.append).load() == 0
    assert loaded == []
    assert said == [f"ignored the compiled code in {path}, and compile again: it is damaged"]


def test_a_file_of_another_torch_is_ignored(
    tmp_path: Path, loaded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.0.0")
        _saved(tmp_path)
    said: list[str] = []
    assert CompileCache(str(tmp_path), ALONE, said.append).load() == 0
    assert loaded == []
    assert "it was compiled with torch 2.0.0" in said[0]


def test_a_file_that_others_may_write_is_ignored(tmp_path: Path, loaded: list[bytes]) -> None:
    path, said = _saved(tmp_path), []
    path.chmod(0o666)
    assert CompileCache(str(tmp_path), ALONE, said.append).load() == 0
    assert loaded == []
    assert f"another user can write to {path}" in said[0]


def test_a_library_outside_of_the_folder_is_refused(tmp_path: Path, loaded: list[bytes]) -> None:
    _saved(tmp_path, libraries={"../../outside.so": b"1"})
    said: list[str] = []
    assert CompileCache(str(tmp_path), ALONE, said.append).load() == 0
    assert "outside of the folder" in said[0]
    assert not list(tmp_path.rglob("outside.so"))


def test_a_file_that_torch_cannot_read_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: None)
    _saved(tmp_path)
    said: list[str] = []
    assert CompileCache(str(tmp_path), ALONE, said.append).load() == 0
    assert "torch cannot read it" in said[0]


def test_too_much_code_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 10)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"x" * 100, None))
    said: list[str] = []
    cache = CompileCache(str(tmp_path), ALONE, said.append)
    cache.save()
    cache.clean_up()
    assert "the compiled code is not kept" in said[0]
    assert not (tmp_path / FOLDER).exists()


def test_a_save_that_fails_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FOLDER).write_text("a file in place of the folder")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"x", None))
    said: list[str] = []
    cache = CompileCache(str(tmp_path), ALONE, said.append)
    cache.save()
    cache.clean_up()
    assert "could not save the compiled code" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


@pytest.mark.parametrize(
    ("parallel", "keeps"),
    [
        (ParallelConfig(compile=True), True),
        (ParallelConfig(compile=True, keep_compile_cache=False), False),
        (ParallelConfig(), False),
    ],
)
def test_what_is_compiled_is_saved_once_after_the_first_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: ParallelConfig, keeps: bool
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(
        torch.compiler, "save_cache_artifacts", lambda: saved.append(trainer.global_step) or (b"", None)
    )
    trainer = TinyTrainer(TinyConfig(max_steps=6, parallel=parallel), run_dir=str(tmp_path), world=ALONE)
    trainer.fit()
    assert len(saved) == keeps
    assert (tmp_path / FOLDER / "cpu-0.bin").exists() == keeps


@pytest.mark.parametrize(
    ("rank", "local_rank", "device", "file", "writes"),
    [
        (0, 0, "cpu", "cpu-0.bin", True),
        (1, 1, "cpu", "cpu-0.bin", False),
        (1, 1, "cuda:1", "cuda-1.bin", True),
        (9, 1, "cuda:1", "cuda-1.bin", False),
        (1, 1, "cuda:0", "cuda-0.bin", False),
    ],
)
def test_one_rank_writes_the_code_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, device: str, file: str, writes: bool
) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"", None))
    world = World(rank=rank, size=16, local_rank=local_rank, device=torch.device(device))
    cache = CompileCache(str(tmp_path), world, pytest.fail)
    cache.save()
    cache.clean_up()
    assert [path.name for path in tmp_path.rglob("*.bin")] == ([file] if writes else [])
