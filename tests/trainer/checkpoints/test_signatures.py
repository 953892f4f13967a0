"""Who signed a checkpoint is known, and a checkpoint that took another's place is found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from headway.orchestrator.cli.main import main
from headway.trainer import CheckpointConfig, World
from headway.trainer.checkpoints.format.file_checksums import FileChecksum
from headway.trainer.checkpoints.format.manifest import MANIFEST, parse_manifest, write_manifest
from tests.tiny import TinyConfig, TinyTrainer


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    checkpoint = CheckpointConfig(every="2 steps", keep_last="all", background=False)  # type: ignore[arg-type]
    config = TinyConfig(max_steps=6, evaluate_every=None, checkpoint=checkpoint)
    TinyTrainer(config, run_dir=tmp_path / "run", world=World.single("cpu"), printer=lambda text: None).fit()
    return tmp_path


def _keys(folder: Path, name: str, *, kind: str = "ed25519") -> tuple[Path, Path]:
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", kind, "-out", private], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


def _run(capsys: pytest.CaptureFixture[str], storage: Path, *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", *map(str, arguments), "--storage", str(storage)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def _forge(folder: Path) -> None:
    """Put other weights into a checkpoint, with checksums and digest as they should be."""
    file = folder / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-8:] = torch.ones(2).numpy().tobytes()
    file.write_bytes(data)
    facts, files = parse_manifest(str(folder), (folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(write_manifest(facts, {name: FileChecksum.of(folder / name) for name in files}))


def test_a_forged_link_of_a_signed_chain_is_found(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (private, public), (_, other) = _keys(storage, "ours"), _keys(storage, "other")
    code, text = _run(capsys, storage, "verify", "run", "--key", public)
    assert (code, text.count("it is not signed")) == (1, 3)
    assert _run(capsys, storage, "sign", "run", "--key", private)[1].count("is signed") == 3
    code, text = _run(capsys, storage, "verify", "run", "--key", public, "--chain")
    assert (code, text.count("whole")) == (0, 3)
    assert "it is signed by another key" in _run(capsys, storage, "verify", "run", "--key", other)[1]

    folder = storage / "run" / "checkpoints"
    _forge(folder / "step-00000004")
    assert _run(capsys, storage, "verify", "run")[0] == 0, "checksums alone do not tell"
    code, text = _run(capsys, storage, "verify", "run", "--chain")
    assert code == 1
    assert "step-00000006  damaged: it names step-00000004 with digest" in text
    code, text = _run(capsys, storage, "verify", "run", "--key", public)
    assert code == 1
    assert "step-00000004  damaged: manifest.json, rank-00000.safetensors changed since it was signed" in text
    assert text.count("whole") == 2

    signature = folder / "step-00000002" / "signature.json"
    content = json.loads(signature.read_text())
    content["files"]["state.json"] = "0" * 64
    signature.write_text(json.dumps(content))
    assert (
        "step-00000002  damaged: its signature is forged" in _run(capsys, storage, "verify", "run", "--key", public)[1]
    )
    signature.write_text("[")
    assert "signature.json cannot be read" in _run(capsys, storage, "verify", "run", "--key", public)[1]


def test_a_key_that_is_none_is_refused(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = _run(capsys, storage, "sign", "run", "--key", storage / "nothing.pem")
    assert (code, "cannot be read" in text) == (2, True)
    (storage / "text.pem").write_text("no key")
    code, text = _run(capsys, storage, "sign", "run", "--key", storage / "text.pem")
    assert (code, "must be a private Ed25519 key" in text) == (2, True)
    private, public = _keys(storage, "rsa", kind="rsa")
    assert "must be a private Ed25519 key" in _run(capsys, storage, "sign", "run", "--key", private)[1]
    assert "must be a public Ed25519 key" in _run(capsys, storage, "verify", "run", "--key", public)[1]


def test_a_resumed_run_continues_the_chain(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = CheckpointConfig(every="2 steps", keep_last="all", background=False)  # type: ignore[arg-type]
    config = TinyConfig(max_steps=8, evaluate_every=None, checkpoint=checkpoint)
    TinyTrainer(config, run_dir=storage / "run", world=World.single("cpu"), printer=lambda text: None).fit()
    folder = storage / "run" / "checkpoints"
    found = {each.name: json.loads((each / MANIFEST).read_text()) for each in folder.iterdir()}
    names = sorted(found)
    assert found[names[0]]["previous"] is None
    for before, after in zip(names, names[1:], strict=False):
        assert found[after]["previous"] == [before, found[before]["digest"]]
    assert _run(capsys, storage, "verify", "run", "--chain")[0] == 0
