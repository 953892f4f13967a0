"""Files that somebody has made to do harm: mutated, and their checksums computed again.

`HEADWAY_HOSTILE_FILES=10000` tries as many; by default `make test` tries 200, and `make test-all` 800 others.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headway.trainer import World, load_weights
from headway.trainer.checkpoints.format import strict_json
from headway.trainer.checkpoints.format.file_checksums import FileChecksum
from headway.trainer.checkpoints.format.plain_values import decode_state
from headway.trainer.checkpoints.format.strict_json import memory_bytes, parse_json
from headway.trainer.checkpoints.format.tensor_files import open_tensors
from headway.trainer.checkpoints.rng import RngState
from headway.trainer.checkpoints.storage import open_storage
from headway.trainer.checkpoints.store import Checkpoint, CheckpointStore, read_checkpoint
from headway.trainer.errors import CheckpointError, ConfigError
from tests.distributed import run_on_ranks
from tests.trainer.checkpoints.kept_state import KeptState

ALONE = World.single("cpu")
COUNT = int(os.environ.get("HEADWAY_HOSTILE_FILES", "1000"))
PIECES, SHORT = 20, 4
MOST_S = 10.0
MOST_BYTES = 64 << 20


class Canary:
    """Its pickle makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def _save(world: World, root: str) -> None:
    rows = distribute_tensor(torch.arange(15.0).view(5, 3), init_device_mesh("cpu", (world.size,)), [Shard(0)])
    pairs = torch.ones(3, dtype=torch.complex128)
    model = {"rows": rows, "scale": torch.tensor(2.0), "empty": torch.empty(0, 4), "pairs": pairs}
    plain = {"list": [1, 2.5, None, "text"], "tuple": (1, {2, 3}), "inf": float("inf"), 7: b"x", "in": {"a": [{}]}}
    CheckpointStore(root, world=world).save(
        {"models": KeptState({"model": model}), "plain": KeptState(plain)}, rank_parts={"rng": RngState()}, step=1,
        epoch=0, metrics={"loss": 1.0}, meta={"config": {"a": 1}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    run_on_ranks(_save, 2, str(root))
    return root / "step-00000001"


def _seal(folder: Path) -> None:
    """Compute checksums and digest again, if the manifest still has what they are of."""
    file = folder / "manifest.json"
    if file.is_symlink() or not file.is_file():
        return
    try:
        body = json.loads(file.read_bytes())
        body.pop("digest", None)
        for name in body["files"]:
            if (folder / name).is_file():
                found = FileChecksum.of(folder / name)
                body["files"][name] = [found.size_bytes, found.checksum]
        digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        file.write_text(json.dumps(body | {"digest": digest}))
    except (ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError):
        return


# ---- Mutations: each changes a folder --------------------------------------------------------------------------------


def _flip(folder: Path, dice: random.Random) -> None:
    file = _any_file(folder, dice)
    data = bytearray(file.read_bytes())
    for _ in range(dice.choice([1, 3, 30])):
        data[dice.randrange(len(data))] = dice.randrange(256)
    file.write_bytes(data)


def _truncate(folder: Path, dice: random.Random) -> None:
    file = _any_file(folder, dice)
    file.write_bytes(file.read_bytes()[: dice.randrange(file.stat().st_size)])


def _swap(folder: Path, dice: random.Random) -> None:
    one, other = dice.sample(sorted(folder.iterdir()), 2)
    before = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(before)


def _pickle_in_disguise(folder: Path, dice: random.Random) -> None:
    data = pickle.dumps(Canary(folder.parent / "canary"))
    file = _any_file(folder, dice)
    if file.suffix == ".safetensors" and dice.random() < 0.5:
        header = json.dumps({"__metadata__": {"format": "pickle"}}).encode()
        data = struct.pack("<Q", len(header)) + header + data
    file.write_bytes(data)


def _link(folder: Path, dice: random.Random) -> None:
    file = _any_file(folder, dice)
    outside = folder.parent / "outside"
    shutil.copy(file, outside)
    file.unlink()
    if dice.random() < 0.3:
        os.mkfifo(file)
    else:
        file.symlink_to(outside)


def _change_json(folder: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(folder.glob("*.json")))
    content = json.loads(file.read_bytes())
    _graft(content, dice)
    text = json.dumps(content)
    if dice.random() < 0.1:
        text = text.replace("{", '{"tensors":{},', 1) if dice.random() < 0.5 else text[:-1] + ',"parts":{}}'
    file.write_text(text)


def _change_header(folder: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(folder.glob("*.safetensors")))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = dice.choice([each for each in header if each != "__metadata__"])
    field = dice.choice(["dtype", "shape", "data_offsets", "name", "length"])
    if field == "dtype":
        header[name]["dtype"] = dice.choice(["F64", "I8", "BF16", "nothing", 7])
    elif field == "name":
        header[dice.choice(["../../outside", "/etc/passwd", "x" * 10_000, "models/model/scale"])] = header.pop(name)
    elif field != "length":
        values = header[name][field]
        values[dice.randrange(len(values)) if values else 0 :] = [
            dice.choice([-1, 0, 1, 1 << 40, 1 << 62, 1 << 70, 0.5])
        ]
    text = json.dumps(header).encode()
    claimed = dice.choice([0, len(text) + 1, 1 << 40, (1 << 64) - 1]) if field == "length" else len(text)
    file.write_bytes(struct.pack("<Q", claimed) + text + data[8 + length :])


def _name_files(folder: Path, dice: random.Random) -> None:
    file = folder / "manifest.json"
    body = json.loads(file.read_bytes())
    name = dice.choice(sorted(body["files"]))
    other = dice.choice(["../outside", "/etc/hostname", "..", ".", "", "a/b", "a\0b", "state.json\n", "x" * 300])
    body["files"][other] = body["files"].pop(name)
    file.write_text(json.dumps(body))


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    _flip, _truncate, _swap, _pickle_in_disguise, _link, _change_json, _change_json, _change_json, _change_header,
    _change_header, _name_files,
]  # fmt: skip

DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]

STRANGE: list[Any] = [
    None, True, -1, 0, 1 << 40, 1 << 80, 1.5, "", "../../x", "\ud800", [], {}, [[]], {"": 0}, DEEP,
    {"$tensor": "nothing"}, {"$tensor": "models/model/rows"}, {"$tensor": 7},
    {"$dataclass": ["os:system", {"x": "touch"}]},
    {"$enum": ["os:environ", "PATH"]}, {"$dataclass": ["builtins:eval", {}]}, {"$dataclass": ["tests.machines:x", {}]},
    {"$namedtuple": ["os:stat_result", []]}, {"$float": "0x1"},
    {"$int": "1" * 99_999}, {"$bytes": "="}, {"$set": [[1]]},
    {"$counter": [[1, "x"]]}, {"$deque": [[1], -1]}, {"$ndarray": ["object", {"$tensor": "models/model/rows"}]},
    {"$numpy": ["O", 1]}, {"$device": "pickle:0"}, {"$size": ["x"]}, {"$unknown": 1},
    {"$dict": [[1]]}, {"$dict": 7},
    {"dtype": "float32", "shape": [1 << 50]}, {"dtype": "float32", "shape": [5, 3], "offset": [9, 0], "sizes": [3, 3]},
]  # fmt: skip


def _graft(content: Any, dice: random.Random) -> None:
    """Replace one value somewhere inside JSON."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(each, (dict, list)):
                walk(each)

    walk(content)
    into, key = dice.choice(places)
    into[key] = dice.choice(STRANGE)


def _any_file(folder: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(folder.iterdir()))


# ---- Trials ----------------------------------------------------------------------------------------------------------


WATCHED = (
    "pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.mkdir",
    "os.rename", "os.remove", "os.symlink", "ctypes.dlopen", "socket.connect",
)  # fmt: skip
# Runs that other tests of this process have opened and not released.
HEARTBEATS = ("headway-owner",)
_seen: list[str] = []
_is_watching = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _is_watching or threading.current_thread().name in HEARTBEATS:
        return
    if event in WATCHED or (event == "open" and _writes(arguments)):
        _seen.append(f"{event} {arguments!r:.200}")


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


@cache
def _install_hook() -> None:
    """Once, and only in a process that needs it, which it makes slower for good."""
    sys.addaudithook(_hook)


@contextmanager
def _watched(scratch: str) -> Iterator[list[str]]:
    """List what is executed or written meanwhile, apart from temporary folders."""
    global _is_watching
    _install_hook()
    _seen.clear()
    _is_watching = True
    try:
        yield _seen
    finally:
        _is_watching = False
        _seen[:] = [each for each in _seen if scratch not in each]


def _read_all(folder: Path, scratch: Path) -> list[str]:
    """Read a checkpoint in every way, and return the errors."""
    errors = []

    def attempt(read: Callable[[], Any]) -> None:
        try:
            read()
        except (CheckpointError, ConfigError) as error:
            errors.append(str(error))

    attempt(CheckpointStore(folder.parent, world=ALONE).newest_good)
    store = CheckpointStore(folder.parent, world=ALONE)
    attempt(lambda: store.newest_good(is_loaded_next=True))

    def load(checkpoint: Checkpoint) -> None:
        live = {"model": {"rows": torch.zeros(5, 3), "scale": torch.tensor(0.0)}}
        parts = {"models": KeptState(live), "plain": KeptState()}
        store.load(parts, rank_parts={"rng": RngState()}, checkpoint=checkpoint)

    attempt(lambda: load(read_checkpoint(folder)))
    attempt(lambda: load_weights(folder))
    return errors


@pytest.mark.filterwarnings("ignore::headway.trainer.checkpoints.format.manifest.CheckpointWarning")
@pytest.mark.parametrize(
    "piece", [*range(SHORT), *(pytest.param(each, marks=pytest.mark.extended) for each in range(SHORT, PIECES))]
)
def test_a_hostile_file_is_an_error_that_names_it_and_nothing_else(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    assert _read_all(good, tmp_path) == []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    refused = 0
    for seed in range(piece, COUNT, PIECES):
        dice = random.Random(seed)
        folder = tmp_path / f"{seed}" / good.name
        shutil.copytree(good, folder)
        for _ in range(dice.choice([1, 1, 2])):
            # A second mutation may not find what the first has left.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):
                dice.choice(MUTATIONS)(folder, dice)
            if any(not each.is_file() or each.is_symlink() or not each.stat().st_size for each in folder.iterdir()):
                break
        if dice.random() < 0.9:
            _seal(folder)
        before_bytes, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, time.process_time()
        with _watched(str(scratch)) as seen:
            errors = _read_all(folder, scratch)
        assert seen == [], f"seed {seed}"
        assert time.process_time() - began_s < MOST_S, f"seed {seed}"
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before_bytes < MOST_BYTES, f"seed {seed}"
        assert not (folder.parent / "canary").exists(), f"seed {seed}"
        assert all(folder.name in error for error in errors), f"seed {seed}: {errors}"
        refused += bool(errors)
        shutil.rmtree(folder.parent)
    assert refused > 0.6 * COUNT / PIECES, "most of these files must be refused"


def test_a_name_outside_of_the_folder_is_not_read(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / good.name
    shutil.copytree(good, folder)
    (tmp_path / "outside.json").write_text("{}")
    body = json.loads((folder / "manifest.json").read_bytes())
    body["files"]["../outside.json"] = [2, FileChecksum.of(tmp_path / "outside.json").checksum]
    (folder / "manifest.json").write_text(json.dumps(body))
    _seal(folder)
    with pytest.raises(CheckpointError, match="'../outside.json', which is not the name of a file in its folder"):
        read_checkpoint(folder)


def test_a_link_is_no_file_of_a_checkpoint(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / good.name
    shutil.copytree(good, folder)
    (folder / "state.json").rename(tmp_path / "state.json")
    (folder / "state.json").symlink_to(tmp_path / "state.json")
    with pytest.raises(CheckpointError, match="state.json is no regular file"):
        open_storage(tmp_path).fetch(good.name, "state.json", tmp_path)


def _many(item: bytes, *, size: int = 1 << 16) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


SHAPES = {
    "empty lists": _many(b"[]"), "empty objects": _many(b"{}"), "small objects": _many(b'{"":0}'),
    "small integers": _many(b"0"), "integers": _many(b"123456789"), "floats": _many(b"0.1"),
    "lists of one": _many(b"[0]"), "pairs": _many(b"[1,2]"), "deep lists": _many(b"[" * 400 + b"]" * 400),
    "deep objects": _many(b'{"":' * 300 + b"0" + b"}" * 300), "short text": _many(b'"a1b2"'),
    "keys": b"{" + b",".join(b'"%x":0' % each for each in range(1 << 13)) + b"}",
    "long text": b'"' + b"x" * (1 << 16) + b'"', "wide text": b'"' + b"x" * (1 << 16) + "\U0001f600".encode() + b'"',
    "tuples": _many(b'{"$tuple":[]}'), "pairs of a dict": b'{"$dict":' + _many(b"[1,2]") + b"}",
}  # fmt: skip


SHORT_SHAPES = ("empty lists", "small integers", "pairs", "deep lists", "keys", "long text")


@pytest.mark.parametrize(
    "shape", [each if each in SHORT_SHAPES else pytest.param(each, marks=pytest.mark.extended) for each in SHAPES]
)
def test_json_takes_no_more_memory_than_is_expected_of_it(shape: str) -> None:
    text = SHAPES[shape]
    gc.collect()
    tracemalloc.start()
    try:
        with contextlib.suppress(CheckpointError):
            decode_state(parse_json(text, "state.json"), lambda name: torch.zeros(0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= memory_bytes(text)


@pytest.mark.parametrize("file", ["state.json", "rank-00001.json", "rank-00000.safetensors", "manifest.json"])
def test_json_of_too_much_memory_is_refused_unread(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    folder = tmp_path / good.name
    shutil.copytree(good, folder)
    text = SHAPES["deep lists"]
    if file.endswith(".safetensors"):
        text = struct.pack("<Q", len(text)) + text
    (folder / file).write_bytes(text)
    _seal(folder)
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: (parsed.append(len(text)), loads(text, **options))[1])
    monkeypatch.setattr(strict_json, "MOST_BYTES", 4 << 20)
    errors = _read_all(folder, tmp_path)
    assert any(f"{file} has 0 MiB of plain values, which take up to " in each for each in errors), errors
    assert max(parsed, default=0) < 1 << 16


def test_state_that_could_not_be_read_again_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MOST_BYTES", 1 << 20)

    def save(value: Any, beside: int) -> Checkpoint:
        tensors = KeptState(torch.zeros(beside, dtype=torch.uint8))
        store = CheckpointStore(tmp_path, world=ALONE)
        return store.save(
            {"rows": KeptState(value), "models": tensors}, rank_parts={}, step=1, epoch=0, metrics={}, meta={}
        )

    rows = list(range(100_000))
    with pytest.raises(CheckpointError, match=r"cannot save step 1 .*state\.json has 0 MiB of plain values, which take "
                       "up to 7 MiB of memory; .* as tensors or NumPy arrays"):  # fmt: skip
        save(rows, 1)
    assert list(tmp_path.iterdir()) == []
    kept = KeptState()
    # As much as the tensors is allowed.
    store = CheckpointStore(tmp_path, world=ALONE)
    store.load({"rows": kept}, rank_parts={}, checkpoint=save(rows, 16 << 20))
    assert kept.state == rows


@pytest.mark.parametrize(
    "offsets",
    ["[0.0, 16.0]", "[-4, 16]", "[0, 1e30]", "[0, 8]", "[8, 16]", "[16, 0]", "[0, 8, 16]", "[null, 16]", '"ab"', "{}"],
)
def test_a_header_with_wrong_offsets_has_another_checksum_and_no_tensors(tmp_path: Path, offsets: str) -> None:
    def write(name: str, offsets: str) -> Path:
        header = f'{{"a": {{"dtype": "F32", "shape": [4], "data_offsets": {offsets}}}}}'.encode()
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        return path

    good, bad = write("good", "[0, 16]"), write("bad", offsets)
    with open_tensors(good) as reader:
        assert reader.names == {"a"}
    assert FileChecksum.of(bad) != FileChecksum.of(good)
    with pytest.raises(CheckpointError, match="bad.safetensors"), open_tensors(bad):
        pass
