"""The checkpoint store: checkpoints are complete and verified, or absent."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import xxhash
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from headway.trainer.checkpoints import scan, storage as storage_module
from headway.trainer.checkpoints.format.digests import tensor_digests
from headway.trainer.checkpoints.reader import FetchedFiles
from headway.trainer.checkpoints.retention import mark_kept, unmark_kept
from headway.trainer.checkpoints.rng import RngState, seed_everything
from headway.trainer.checkpoints.storage import open_storage
from headway.trainer.checkpoints.store import (
    Checkpoint,
    CheckpointStore,
    CheckpointWarning,
    DamagedCheckpointError,
    read_checkpoint,
)
from headway.trainer.distributed.world import World
from headway.trainer.errors import CheckpointError, ConfigError
from tests.distributed import run_on_ranks
from tests.programs import Program

ALONE = World.single("cpu")


class Held:
    """A part that stores the state loaded into it."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["held"]


def save(store: CheckpointStore, step: int, metrics: Mapping[str, float] | None = None, **parts: Any) -> Checkpoint:
    state = {name: Held(value) for name, value in (parts or {"part": torch.full((64,), float(step))}).items()}
    return store.save(state, rank_parts={}, step=step, epoch=0, metrics=metrics or {}, meta={})


def load(store: CheckpointStore, checkpoint: Checkpoint, *names: str) -> list[Any]:
    parts = {name: Held() for name in names or ("part",)}
    store.load(parts, rank_parts={}, checkpoint=checkpoint)
    return [part.state for part in parts.values()]


def steps(store: CheckpointStore) -> list[int]:
    return [each.step for each in store.list()]


def damage(checkpoint: Checkpoint, pattern: str, how: str) -> Path:
    file = next(Path(checkpoint.path).glob(pattern))
    whole = file.read_bytes()
    if how == "flip":
        at = len(whole) // 2
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif how == "truncate":
        file.write_bytes(whole[: len(whole) // 2])
    else:
        file.unlink()
    return file


class Color(enum.IntEnum):
    RED = 3


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass(frozen=True)
class Boxed:
    tensor: torch.Tensor


def test_a_state_comes_back_exactly_however_it_is_nested(tmp_path: Path) -> None:
    shared = torch.arange(4)
    state = {
        "dict with int keys": {1: "one", "1": "text", (2, 3): torch.tensor(1.5)},
        "same names": {1: torch.tensor(1), "1": torch.tensor(2)},
        "lists": [1, [2.5, None, [torch.ones(2, 3, dtype=torch.bfloat16)]], (), (torch.zeros(0),)],
        "empty": {},
        "none": None,
        "scalars": [torch.tensor(3, dtype=torch.int64), torch.tensor(True), torch.tensor(float("nan"))],
        "types": [
            collections.OrderedDict(b=1, a=2),
            {3, 1},
            10**40,
            1e-310,
            b"\x00",
            complex(1, 2),
            collections.deque([1], maxlen=3),
            collections.Counter("aab"),
            frozenset({(1, "b")}),
            bytearray(b"abc"),
            bytes(range(256)) * 4,
            torch.Size([2, 3]),
            torch.bfloat16,
            torch.device("cpu"),
            math.inf,
            -0.0,
            np.float32(1.5),
            np.arange(6, dtype="<u4").reshape(2, 3),
            Color.RED,
            Point(1, Boxed(torch.arange(2))),
        ],
        "twice": [shared, shared],
        "view": torch.arange(100).view(10, 10).t()[3],
    }
    store = CheckpointStore(str(tmp_path), world=ALONE)
    (back,) = load(store, save(store, 1, part=state))
    assert repr(back) == repr(state)
    assert back["twice"][0] is back["twice"][1]
    assert back["lists"][1][2][0].dtype == torch.bfloat16
    assert back["dict with int keys"].keys() == {1, "1", (2, 3)}


def test_a_tensor_inside_an_object_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    (back,) = load(store, save(store, 1, part=[Boxed(torch.arange(3)), Boxed(torch.arange(4))]))
    assert [each.tensor.tolist() for each in back] == [[0, 1, 2], [0, 1, 2, 3]]


def test_what_changes_after_a_save_has_begun_is_not_in_it(tmp_path: Path) -> None:
    store, shared = CheckpointStore(str(tmp_path), world=ALONE), [1, {"deep": (2, [3])}]
    plain: dict[Any, Any] = {"shared": shared, "again": shared, 7: "seven", "tensor": torch.arange(3)}
    parts = {"plain": Held(plain), "other": Held(collections.OrderedDict(inside=[1]))}
    saving = store.begin_save(
        parts, rank_parts={}, step=1, epoch=0, metrics={}, meta={}, changes_only_on_step=lambda tensor: False
    )
    shared[1]["deep"][1].append(4)  # type: ignore[index]
    shared.append(5)
    plain |= {7: "eight", "tensor": None, "new": True}
    parts["other"].state["inside"].append(2)
    first, other = load(store, saving.result(), "plain", "other")
    assert first["shared"] == first["again"] == [1, {"deep": (2, [3])}]
    assert torch.equal(first["tensor"], torch.arange(3))
    assert (first[7], "new" in first, other) == ("seven", False, {"inside": [1]})


BEGINS_AND_ENDS = """
import sys, torch
from headway.trainer.checkpoints.store import CheckpointStore
from headway.trainer.distributed.world import World

class Weights:
    def state_dict(self):
        return {"weights": torch.ones(5_000_000)}

store = CheckpointStore(sys.argv[1], world=World.single("cpu"))
state = {"step": 1, "epoch": 0, "metrics": {}, "meta": {}}
store.begin_save({"part": Weights()}, rank_parts={}, **state, changes_only_on_step=lambda it: True)
"""


def test_a_process_ends_after_the_save_that_is_under_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGINS_AND_ENDS, tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(CheckpointStore(str(tmp_path), world=ALONE)) == [1]
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_the_threads_that_save_are_kept_and_end_with_their_store(tmp_path: Path) -> None:
    store, before = CheckpointStore(str(tmp_path), world=ALONE), set(threading.enumerate())
    own: list[set[threading.Thread]] = []
    for step in (1, 2):
        parts, described = {"part": Held(torch.ones(3))}, {"epoch": 0, "metrics": {}, "meta": {}}
        store.begin_save(
            parts, rank_parts={}, step=step, **described, changes_only_on_step=lambda tensor: True
        ).result()  # type: ignore[arg-type]
        own.append(set(threading.enumerate()) - before)
    assert own[0] == own[1]
    assert {thread.name for thread in own[0]} == {"headway-copy", "headway-save"}
    del store
    for thread in own[0]:
        thread.join(60)
        assert not thread.is_alive()


def test_any_float_is_a_metric_and_the_manifest_is_json(tmp_path: Path) -> None:
    metrics = {"nan": math.nan, "inf": math.inf, "less": -math.inf, "zero": -0.0, "tiny": 5e-324, "third": -1 / 3}
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = store.save({}, rank_parts={}, step=3, epoch=2, metrics=metrics, meta={"limits": [math.inf, {"a": None}]})
    json.loads((Path(saved.path) / "manifest.json").read_text(), parse_constant=pytest.fail)
    for again in (store.newest_good(), *store.list(), read_checkpoint(saved.path)):
        assert again is not None
        assert repr(again) == repr(saved)
        assert repr(again.metrics) == repr(metrics)
        assert again.meta == {"limits": [math.inf, {"a": None}]}


def test_no_checkpoint_at_all_is_none_not_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "not" / "there"), world=ALONE)
    store.remove_leftovers()
    assert store.newest_good() is None
    assert store.list() == []
    (tmp_path / "not" / "there" / ".partial-step-00000003-aa").mkdir(parents=True)
    assert store.newest_good() is None


def test_an_explicit_checkpoint_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing is not a checkpoint.*manifest\.json"):
        read_checkpoint(str(tmp_path / "nothing"))


@pytest.mark.parametrize("how", ["truncate", "flip", "delete"])
@pytest.mark.parametrize("file", ["*.safetensors", "state.json", "rank-00000.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, file: str, how: str) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    good = save(store, 1)
    bad = save(store, 2)
    name = damage(bad, file, how).name
    again = CheckpointStore(str(tmp_path), world=ALONE)
    with pytest.warns(CheckpointWarning, match=f"step-00000002.*{re.escape(name)}") as caught:
        assert again.newest_good() == good
    assert len(caught) == 1
    assert len(again.skipped) == 1
    assert bad.path in again.skipped[0]
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(again, bad)


def test_a_bit_that_flips_anywhere_in_any_file_is_found(tmp_path: Path) -> None:
    store, dice = CheckpointStore(str(tmp_path), world=ALONE), random.Random(7)
    good = save(store, 1)
    # Tensors larger and smaller than one piece of a checksum.
    bad = save(store, 2, big=torch.randn(700_001), wide=torch.randn(1300, 257).bfloat16(), small=torch.arange(3))
    files = sorted(file for file in Path(bad.path).iterdir())
    assert len(files) == 4
    assert CheckpointStore(str(tmp_path), world=ALONE).newest_good() == bad
    for file in files:
        whole = file.read_bytes()
        for at in {0, len(whole) - 1, *(dice.randrange(len(whole)) for _ in range(10))}:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << dice.randrange(8)
            file.write_bytes(damaged)
            with pytest.warns(CheckpointWarning, match=re.escape(file.name)):
                assert CheckpointStore(str(tmp_path), world=ALONE).newest_good() == good, (file, at)
        file.write_bytes(whole)
    assert CheckpointStore(str(tmp_path), world=ALONE).newest_good() == bad


def test_a_bit_that_flips_anywhere_is_found_while_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    store, dice = CheckpointStore(str(tmp_path), world=ALONE), random.Random(8)
    good = save(store, 1)
    parts = {"part": Held(torch.randn(300_001)), "other": Held(torch.arange(700))}
    own = {"own": Held(torch.arange(900))}
    bad = store.save(parts, rank_parts=own, step=2, epoch=0, metrics={}, meta={})
    for file in sorted(Path(bad.path).glob("[rs]*")):
        whole = file.read_bytes()
        for at in {0, 9, len(whole) - 1, *(dice.randrange(len(whole)) for _ in range(8))}:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << dice.randrange(8)
            file.write_bytes(damaged)
            again = CheckpointStore(str(tmp_path), world=ALONE)
            if file.suffix == ".safetensors":
                assert again.newest_good(is_loaded_next=True) == bad
                # Also if the damage is in another part than the one that is wanted.
                with pytest.raises(DamagedCheckpointError, match=f"step-00000002 is damaged: {file.name}"):
                    load(again, bad)
            with pytest.warns(CheckpointWarning, match=re.escape(file.name)):
                assert again.newest_good(is_loaded_next=True) == good, (file, at)
        file.write_bytes(whole)
    assert torch.equal(load(CheckpointStore(str(tmp_path), world=ALONE), bad)[0], parts["part"].state)


def test_tensors_are_verified_and_loaded_by_reading_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = save(store, 1, part=torch.randn(700_001), other=torch.arange(9_000))
    preadv, counts = os.preadv, collections.Counter[str]()

    def counting(descriptor: int, *args: Any) -> int:
        count = preadv(descriptor, *args)
        counts[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    again = CheckpointStore(str(tmp_path), world=ALONE)
    newest = again.newest_good(is_loaded_next=True)
    assert newest == saved
    load(again, newest, "part")
    assert counts["rank-00000.safetensors"] == (Path(saved.path) / "rank-00000.safetensors").stat().st_size
    assert counts.keys() == {"rank-00000.safetensors", "state.json", "rank-00000.json"}


def test_the_checksum_of_a_tensor_file_is_that_of_the_checksums_of_its_header_and_tensors(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    tensors = {"wide": torch.randn(5, dtype=torch.double), "empty": torch.ones(0), "one": torch.tensor(2.0)}
    saved = save(store, 1, part=tensors, other=torch.arange(600_001, dtype=torch.int16))
    file = Path(saved.path) / "rank-00000.safetensors"
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:data])
    del entries["__metadata__"]
    sections = [content[:data]]
    for begin, end in sorted(each["data_offsets"] for each in entries.values() if 0 not in each["shape"]):
        sections.append(content[data + begin : data + end])
    assert b"".join(sections) == content
    checksum = xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(each) for each in sections))
    manifest = json.loads((Path(saved.path) / "manifest.json").read_bytes())
    assert manifest["files"][file.name] == [len(content), f"xxh3_128:{checksum}"]


class Transposed(Held):
    """A part whose tensor is read into memory in another order, as with channels_last."""

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(reversed(size)), dtype=dtype).t()


def test_the_digest_of_what_is_read_is_that_of_the_file_in_whatever_order_the_memory_is(tmp_path: Path) -> None:
    store, rows = CheckpointStore(str(tmp_path), world=ALONE), torch.arange(35.0).view(5, 7)
    part = Transposed()
    loaded = store.load({"part": part}, rank_parts={}, checkpoint=save(store, 1, part=rows))
    assert torch.equal(part.state, rows)
    assert not part.state.is_contiguous()
    assert loaded.tensors == tensor_digests({"part/held": rows})


def test_a_read_that_fails_for_a_moment_while_a_checkpoint_is_loaded_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(CheckpointStore(str(tmp_path), world=ALONE), 1)
    preadv, failures = os.preadv, [OSError(errno.EIO, "the network is gone")]

    def fails_once(*args: Any) -> int:
        if failures:
            raise failures.pop()
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", fails_once)
    assert torch.equal(load(CheckpointStore(str(tmp_path), world=ALONE), saved)[0], torch.full((64,), 1.0))
    assert not failures


@pytest.mark.parametrize("file", ["*.safetensors", "manifest.json"])
def test_when_none_is_good_it_is_an_error_never_a_fresh_start(tmp_path: Path, file: str) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    damage(save(store, 1), file, "truncate")
    damage(save(store, 2), file, "delete")
    with pytest.raises(CheckpointError, match=r"(?s)step-00000002: .* missing.*step-00000001: "):
        CheckpointStore(str(tmp_path), world=ALONE).newest_good()


def test_what_retention_cannot_look_at_is_a_warning_and_the_checkpoint_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised on the main rank alone, the error would leave the other ranks with a successful save."""

    def unreachable(storage: Any) -> Any:
        raise OSError("the storage does not answer")

    store = CheckpointStore(str(tmp_path), world=ALONE, keep_last=1)
    save(store, 1)
    monkeypatch.setattr("headway.trainer.checkpoints.store.scan", unreachable)
    with pytest.warns(
        CheckpointWarning, match=r"step-00000002 is saved, but .* \(OSError: the storage does not answer"
    ):
        save(store, 2)
    monkeypatch.undo()
    assert steps(store) == [1, 2]
    save(store, 3)
    assert steps(store) == [3]


def test_saving_a_step_again_replaces_it_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.trainer.checkpoints.storage._exchange", lambda one, other: False)
    store = CheckpointStore(str(tmp_path), world=ALONE)
    save(store, 4, part="first")
    last = save(store, 4, part="second")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000004"]
    assert load(store, last) == ["second"]


def test_saving_a_step_again_replaces_it_and_there_always_is_one(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    save(store, 4, part="first")
    seen: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(len(CheckpointStore(str(tmp_path), world=ALONE).list()))

    looker = threading.Thread(target=look)
    looker.start()
    for again in range(2, 40):
        last = save(store, 4, part=f"part {again}")
    stop.set()
    looker.join()
    assert steps(store) == [4]
    assert store.newest_good() == last
    assert load(store, last) == ["part 39"]
    assert min(seen) >= 1


@pytest.mark.parametrize("before", ["_verify", "_share"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    writer, reader = (CheckpointStore(str(tmp_path), world=ALONE) for _ in range(2))
    first = save(writer, 4, part="first")
    go_on = getattr(CheckpointStore, before)

    def replaces(self: CheckpointStore, *args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        save(writer, 4, part="another one")
        return go_on(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, before, replaces)
    assert load(reader, first) == ["another one"]
    assert load(reader, first) == ["another one"], "the manifest is newer than the caller's"


def test_a_step_that_is_saved_again_keeps_its_name_unless_something_needs_the_first(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(each.name for each in tmp_path.iterdir())

    first = CheckpointStore(str(tmp_path), world=ALONE, keep_last="all")
    save(first, 1)
    save(first, 2)
    # The newest of an earlier process.
    store = CheckpointStore(str(tmp_path), world=ALONE, keep_last="all")
    newest = save(store, 2, part="again")
    assert names() == ["step-00000001", "step-00000002"]
    assert newest.previous is not None
    assert newest.previous[0] == "step-00000001"
    # One that was loaded stays, and is replaced only by a run that continues it.
    load(store, newest)
    save(store, 2)
    assert names() == ["step-00000001", "step-00000002", "step-00000002.2"]
    store = CheckpointStore(str(tmp_path), world=ALONE, keep_last="all")
    newest = store.list()[-1]
    load(store, newest)
    store.allow_replacing(newest)
    save(store, 2, part="continued")
    assert names() == ["step-00000001", "step-00000002.2"]
    assert load(store, store.list()[-1]) == ["continued"]
    # Neither one that is not the newest, nor a pinned one.
    save(store, 1)
    assert names() == ["step-00000001.2", "step-00000002.2"]
    mark_kept(open_storage(tmp_path), "step-00000001.2")
    save(store, 1)
    save(store, 1)
    assert names()[:2] == ["step-00000001", "step-00000001.2"]


REPLACES = """
import os, signal, sys
from pathlib import Path
from tests.trainer.checkpoints.test_store import ALONE, load, save
from headway.trainer.checkpoints import storage
from headway.trainer.checkpoints.store import CheckpointStore

storage._exchange = lambda one, other: False  # as on NFS
store, rename = CheckpointStore(sys.argv[1], world=ALONE, keep_last=1), Path.rename
saved = save(store, 1)
if sys.argv[2] == "resumed":
    store = CheckpointStore(sys.argv[1], world=ALONE, keep_last=1)
    load(store, saved)
    store.allow_replacing(saved)

def once(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)

Path.rename = once
save(store, 1)
"""


@pytest.mark.parametrize("begun", ["new", "resumed"])
def test_a_checkpoint_that_was_to_be_replaced_is_put_back(tmp_path: Path, begun: str) -> None:
    """Killed between two renames, when no checkpoint has a visible name."""
    killed = Program(REPLACES, str(tmp_path), begun)
    killed.wait()
    assert killed.returncode == -signal.SIGKILL
    assert [each.name[:22] for each in tmp_path.glob(".replaced-*")] == [".replaced-step-00000001"[:22]]
    assert not (tmp_path / "step-00000001").exists()
    store = CheckpointStore(str(tmp_path), world=ALONE)
    store.remove_leftovers()
    newest = store.newest_good()
    assert newest is not None
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
    assert load(store, newest)[0].tolist() == [1.0] * 64


def test_a_failed_commit_says_why_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename = CheckpointStore(str(tmp_path), world=ALONE, keep_last="all"), Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.startswith(".partial-"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return rename(self, target)

    save(store, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails)
        patched.setattr("headway.trainer.checkpoints.storage._exchange", lambda one, other: False)
        for step in (1, 2):
            with pytest.raises(CheckpointError, match="Disk quota exceeded"):
                save(store, step)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
    assert load(store, store.list()[0])[0].tolist() == [1.0] * 64


def test_the_newest_is_the_one_saved_last_even_when_a_run_went_back(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE, keep_last="all")
    for step in (10, 20, 12):
        save(store, step)
    newest = CheckpointStore(str(tmp_path), world=ALONE).newest_good()
    assert newest is not None
    assert newest.step == 12
    assert steps(store) == [10, 20, 12]


def test_the_last_k_are_kept_and_the_one_resumed_from(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE, keep_last=2)
    for step in range(1, 13):
        save(store, step)
    assert steps(store) == [11, 12]
    resumed = CheckpointStore(str(tmp_path), world=ALONE, keep_last=2)
    newest = resumed.newest_good()
    assert newest is not None
    load(resumed, newest)
    for step in range(13, 18):
        save(resumed, step)
    assert steps(resumed) == [12, 16, 17]
    everything = CheckpointStore(str(tmp_path), world=ALONE, keep_last="all")
    save(everything, 18)
    assert steps(everything) == [12, 16, 17, 18]
    assert all(each.name.startswith("step-") for each in tmp_path.iterdir())


def test_what_a_person_pins_stays_while_the_run_goes_on(tmp_path: Path) -> None:
    for root in (str(tmp_path), f"memory://{uuid.uuid4().hex}/checkpoints"):
        store, storage = CheckpointStore(root, world=ALONE, keep_last=1), open_storage(root)
        for step in (1, 2):
            save(store, step)
        mark_kept(storage, "step-00000002")
        for step in (3, 4):
            save(store, step)
        save(store, 2)  # again: the pinned one stays beside it
        assert steps(store) == [2, 2]
        good = store.list()[0]
        assert load(CheckpointStore(root, world=ALONE), good)[0].tolist() == [2.0] * 64
        unmark_kept(storage, "step-00000002")
        unmark_kept(storage, "step-00000002")
        save(store, 5)
        assert steps(store) == [5]
        with pytest.raises(CheckpointError, match="cannot pin .*step-00000002: there is no such checkpoint"):
            mark_kept(storage, "step-00000002")


def test_two_runs_in_one_place_are_found_out(tmp_path: Path) -> None:
    for root in (str(tmp_path), f"memory://{uuid.uuid4().hex}/checkpoints"):
        # Not retried: a retry would warn, and warnings are errors here.
        first, second = (CheckpointStore(root, world=ALONE, keep_last=3, retries=9) for _ in range(2))
        assert [first.newest_good(), second.newest_good()] == [None, None]
        save(first, 1)
        who = f"process {os.getpid()} on {socket.gethostname()} has saved step-00000001 here since this run started"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=re.escape(who)):
                save(second, 2)
        # The first run continues, and so does a process that takes it over: that is not a second run.
        save(first, 2)
        successor = CheckpointStore(root, world=ALONE, keep_last=3)
        successor.check_writable()
        save(successor, 3)
        with pytest.raises(CheckpointError, match="saved step-00000003 here"):
            save(first, 3)
        assert steps(first) == [1, 2, 3]


def test_what_retention_deleted_and_another_run_saved_again_is_found_out(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE, keep_last=1)
    for step in (1, 2):
        save(store, step)
    save(CheckpointStore(str(tmp_path), world=ALONE, keep_last="all"), 1)
    with pytest.raises(CheckpointError, match="saved step-00000001 here"):
        save(store, 3)


def test_a_commit_that_failed_half_way_is_not_taken_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    save(store, 1)
    commit = store._storage.commit

    def lose_the_answer(*args: Any) -> None:
        commit(*args)
        raise OSError("the connection is gone")

    with monkeypatch.context() as patched:
        patched.setattr(store._storage, "commit", lose_the_answer)
        with pytest.raises(CheckpointError, match="the connection is gone"):
            save(store, 2)
    save(store, 3)
    assert steps(store) == [2, 3]


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.5, "every"])
def test_keep_last_is_checked(tmp_path: Path, keep_last: Any) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        CheckpointStore(str(tmp_path), world=ALONE, keep_last=keep_last)


def test_a_run_that_begins_anew_keeps_its_own_best_and_leaves_those_of_the_run_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"world": ALONE, "keep_last": 1, "monitor": "loss"}
    save(CheckpointStore(str(tmp_path), **options), 30, {"loss": 0.1})
    (tmp_path / ".partial-step-00000031-ab12").mkdir()
    store = CheckpointStore(str(tmp_path), **options)
    store.start_over()
    assert store.best() is None
    for step, loss in ((1, 0.8), (2, 0.9), (3, 0.9)):
        save(store, step, {"loss": loss})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000001", "step-00000003", "step-00000030"]
    assert [each.step for each in store.of_this_run()] == [1, 3]
    best = store.best()
    assert best is not None
    assert best.step == 1
    # Nor does it load the other run's checkpoint.
    assert store.newest_good(up_to=2) == best
    (tmp_path / "step-00000001").rename(tmp_path / "elsewhere")
    assert store.newest_good(up_to=2) is None


def test_leftovers_are_removed_and_never_mistaken(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    good = save(store, 1)
    for leftover in (".partial-step-00000002-ab12", ".deleted-step-00000000-cd34"):
        shutil.copytree(good.path, tmp_path / leftover)
    (tmp_path / "notes.txt").write_text("a person's own")
    assert store.newest_good() == good
    assert steps(store) == [1]
    store.remove_leftovers()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes.txt", "step-00000001"]


def test_a_file_that_cannot_be_read_now_is_no_damage_and_nobody_goes_on_from_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    save(store, 1)
    newest = save(store, 2)
    failures = [OSError("try again")] * 2
    fetch = type(store._storage).fetch

    def fails(self: Any, name: str, file: str, into: Path) -> Path:
        if name == "step-00000002" and failures:
            raise failures.pop()
        return fetch(self, name, file, into)

    monkeypatch.setattr(scan, "_PAUSE_S", 0.0)
    monkeypatch.setattr(type(store._storage), "fetch", fails)
    assert store.newest_good() == newest
    assert not failures
    failures += [OSError("no space left")] * 99
    with pytest.raises(CheckpointError, match="cannot verify .*step-00000002.*no space left.*it is unknown whether"):
        store.newest_good()


@pytest.mark.parametrize("what", ["file", "manifest"])
def test_what_a_disk_of_this_machine_has_lost_is_damaged_and_what_a_network_cannot_give_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    good, bad = save(store, 1), save(store, 2)
    method = "read" if what == "manifest" else "fetch"
    read = getattr(type(store._storage), method)

    def fails(self: Any, name: str, *args: Any) -> Any:
        if self.path_of(name) == bad.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, name, *args)

    monkeypatch.setattr(type(store._storage), method, fails)
    monkeypatch.setattr(scan, "_PAUSE_S", 0.0)
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(storage_module, "_MOUNTS", mounts)
    for place, kind, is_lost in (
        (tmp_path, "ext4", True), (tmp_path, "nfs4", False), (tmp_path / "else", "ext4", False),
    ):  # fmt: skip
        root = str(place).replace(" ", "\\040")
        mounts.write_text(f"1 0 8:1 / / rw - fuse a rw\n2 1 8:2 / {root} rw,relatime shared:1 - {kind} /dev/sda rw\n")
        again = CheckpointStore(str(tmp_path), world=ALONE)
        if is_lost:
            with pytest.warns(
                CheckpointWarning, match=r"step-00000002: .*cannot be read in 3 tries \(Input/output error"
            ):
                assert again.newest_good() == good
            assert len(again.skipped) == 1
        else:
            with pytest.raises(CheckpointError, match="step-00000002.*Input/output error.*it is unknown whether"):
                again.newest_good()


def test_where_a_path_lies_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_module._file_system(Path("/proc/self")) == "proc"
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(storage_module, "_MOUNTS", mounts)
    mounts.write_bytes(
        b"1 0 8:1 / / rw - ext4 a rw\n"
        b"2 1 0:3 / /data\\040of\\040m\xc3\xbcller rw,relatime shared:1 master:2 - nfs4 server:/a\\040b rw\n"
        b"3 1 0:3 / /mnt rw - xfs b rw\n4 3 0:4 / /mnt rw - fuse.sshfs c rw\n"
    )
    (tmp_path / "link").symlink_to("/data of müller")
    places = ("/", "/data of", "/data of müller/runs/checkpoints", "/mnt/a", tmp_path / "link/runs")
    kinds = [storage_module._file_system(Path(place)) for place in places]
    assert kinds == ["ext4", "ext4", "nfs4", "fuse.sshfs", "nfs4"]
    mounts.unlink()
    assert storage_module._file_system(Path("/")) is None
    assert not open_storage("memory://somewhere").is_disk()


def _lost_on_rank_1(world: World, root: str) -> tuple[Checkpoint | None, list[str]]:
    store = CheckpointStore(root, world=world)
    scan._PAUSE_S = 0.0
    if world.rank == 1:
        fetch = store._storage.fetch

        def fails(name: str, file: str, into: Path) -> Path:
            if name == "step-00000002":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return fetch(name, file, into)

        store._storage.fetch = fails  # type: ignore[method-assign]
        store._storage.is_disk = lambda: True  # type: ignore[method-assign]
    with pytest.warns(CheckpointWarning) if world.is_main else contextlib.nullcontext():
        return store.newest_good(), store.skipped


def test_what_one_rank_cannot_read_from_its_disk_all_pass_over(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    good, _ = save(store, 1), save(store, 2)
    first, second = run_on_ranks(_lost_on_rank_1, 2, str(tmp_path))
    assert first == second
    assert first[0] == good
    assert "the disk is damaged" in first[1][0]


def _client_fails_on_rank_1(world: World, root: str) -> list[str]:
    """The storage client raises no OSError but another error: on one rank in a file check, on main in a listing."""
    store, told = CheckpointStore(root, world=world), []

    def fails(*args: Any) -> Any:
        raise LookupError("the client is confused")

    looks = [(1, "size_bytes", store.newest_good), (0, "leftovers", store.remove_leftovers)]
    for rank, method, look in looks:
        if world.rank == rank:
            setattr(store._storage, method, fails)
        try:
            look()
        except CheckpointError as error:
            told.append(str(error))
        vars(store._storage).pop(method, None)
    newest = store.newest_good()
    assert newest is not None
    return [*told, str(newest.step)]


def test_what_a_client_of_one_rank_raises_is_an_error_on_all(tmp_path: Path) -> None:
    save(CheckpointStore(str(tmp_path), world=ALONE), 1)
    first, second = run_on_ranks(_client_fails_on_rank_1, 2, str(tmp_path))
    assert first == second
    assert "rank 1: LookupError: the client is confused" in first[0]
    assert "rank 0: LookupError: the client is confused" in first[1]
    assert first[2] == "1"


def _agree(world: World, folder: str) -> list[tuple[list[str], str, list[str]]]:
    """Return the collectives of a second save, and the error and what is left of a third that one rank cannot begin."""
    calls: list[str] = []

    def counted(name: str) -> Any:
        call = getattr(dist, name)
        return lambda *args, **options: (calls.append(name), call(*args, **options))[1]

    for name in ("all_gather_object", "gather_object", "broadcast_object_list", "barrier"):
        setattr(dist, name, counted(name))
    fsspec.register_implementation("counted", Counted, clobber=True)
    found = []
    for scheme, kind in (("", storage_module._Local), ("counted://", storage_module._Remote)):
        root = Path(folder, kind.__name__)
        store = CheckpointStore(f"{scheme}{root}", world=world, keep_last="all")
        save(store, 1)
        calls.clear()
        save(store, 2)
        of_second = list(calls)
        with pytest.MonkeyPatch.context() as patch:
            if not world.is_main:
                patch.setattr(kind, "stage", _cannot_stage)
            with pytest.raises(CheckpointError) as failed:
                save(store, 3)
        world.barrier()
        found.append((of_second, str(failed.value), sorted(each.name for each in root.iterdir())))
    return found


def _cannot_stage(storage: Any, token: str) -> Path:
    raise OSError("no space left")


def test_ranks_agree_four_times_in_a_save_and_leave_nothing_if_one_cannot_begin(tmp_path: Path) -> None:
    """On machines without an idle core, each collective waits for its turn on every rank."""
    first, second = run_on_ranks(_agree, 2, str(tmp_path))
    assert first == second
    gather, broadcast = "all_gather_object", "broadcast_object_list"
    # In a bucket, they also agree that all have written, before any uploads.
    of_kinds = [gather, broadcast, gather, broadcast], [gather, broadcast, gather, gather, broadcast]
    for (collectives, error, left), wanted in zip(first, of_kinds, strict=True):
        assert collectives == wanted
        assert "rank 1: OSError: no space left" in error
        assert left == ["step-00000001", "step-00000002"]


def test_what_is_no_plain_value_is_named_with_its_part_and_key(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    good = save(store, 1)
    state = {"MyCallback": {"seen": [1, 2], "guard": [torch.ones(1), threading.Lock()]}}
    with pytest.raises(CheckpointError, match=r"part 'callbacks', key 'held/MyCallback/guard/1' holds a _thread\.lock"):
        save(store, 2, callbacks=state)
    with pytest.raises(CheckpointError, match="part 'rank'.*_thread.lock"):
        store.save({}, rank_parts={"rank": Held(threading.Lock())}, step=2, epoch=0, metrics={}, meta={})
    with pytest.raises(CheckpointError, match="JSON"):
        store.save({}, rank_parts={}, step=2, epoch=0, metrics={}, meta={"a": object()})
    assert store.newest_good() == good
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_a_part_that_is_missing_is_named_and_one_too_many_is_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = save(store, 1, model=torch.ones(3), optimizer={"lr": 0.1})
    assert load(store, saved, "optimizer") == [{"lr": 0.1}]
    with pytest.raises(CheckpointError, match=r"scheduler; it has model, optimizer"):
        load(store, saved, "model", "scheduler")


def test_a_part_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    class Refuses(Held):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("gamma")

    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = save(store, 1)
    with pytest.raises(CheckpointError, match=r"part 'part' cannot load its state: KeyError: 'gamma'"):
        store.load({"part": Refuses()}, rank_parts={}, checkpoint=saved)


def test_random_state_that_is_missing_is_one_warning(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    saved = save(store, 1)
    with pytest.warns(CheckpointWarning, match="no rng state") as caught:
        store.load({}, rank_parts={"rng": RngState()}, checkpoint=saved)
    assert len(caught) == 1


def test_a_remote_store_works_like_a_local_one() -> None:
    root = f"memory://run-{uuid.uuid4().hex}/checkpoints"
    store = CheckpointStore(root, world=ALONE, keep_last=2)
    assert store.newest_good() is None
    seed_everything(1, rank=0)
    for step in range(1, 5):
        state = {"part": Held({"weights": torch.arange(step), "none": None})}
        rng = {"rng": RngState()}
        last = store.save(state, rank_parts=rng, step=step, epoch=0, metrics={"loss": math.nan}, meta={})
    expected = random.random()
    assert steps(store) == [3, 4]
    assert last.path == f"{root}/step-00000004"
    assert repr(read_checkpoint(last.path)) == repr(last)
    held = Held()
    store.load({"part": held}, rank_parts={"rng": RngState()}, checkpoint=last)
    assert random.random() == expected
    assert held.state["weights"].tolist() == [0, 1, 2, 3]

    memory = fsspec.filesystem("memory")
    folder = root.removeprefix("memory:/")
    memory.rm(f"{folder}/step-00000004/manifest.json")  # as if the upload had been killed
    again = CheckpointStore(root, world=ALONE)
    newest = again.newest_good()
    assert newest is not None
    assert newest.step == 3
    save(again, 4)
    assert steps(again) == [3, 4]
    again.remove_leftovers()
    assert sorted(name.rsplit("/", 1)[1] for name in memory.ls(folder, detail=False)) == [
        "step-00000003",
        "step-00000004.2",
    ]
    memory.pipe_file(f"{folder}/step-00000004.2/state.json", b"rot")
    with pytest.warns(CheckpointWarning, match=r"step-00000004\.2: state\.json has 3 of"):
        newest = again.newest_good()
    assert newest is not None
    assert newest.step == 3


def test_each_byte_of_a_bucket_is_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = f"memory://run-{uuid.uuid4().hex}/checkpoints"
    store = CheckpointStore(root, world=ALONE)
    for step in (1, 2):
        save(store, step, part={"weights": torch.arange(1000.0), "text": "x"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    again = CheckpointStore(root, world=ALONE)
    fetched: list[str] = []
    memory = again._storage.fs  # type: ignore[attr-defined]
    get_file = memory.get_file
    monkeypatch.setattr(memory, "get_file", lambda path, *args: (fetched.append(path), get_file(path, *args)))
    newest = again.newest_good()
    assert newest is not None
    load(again, newest)
    assert sorted(path.rpartition("/")[2] for path in fetched) == [
        "rank-00000.json", "rank-00000.safetensors", "state.json",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [], "copies are deleted once they are loaded"


class Counted(LocalFileSystem):
    """A file system that is remote to the store, and records which files are fetched."""

    protocol = "counted"
    log = Path()

    def get_file(self, path1: str, path2: str, *args: Any, **kwargs: Any) -> None:
        with self.log.open("a") as log:
            log.write(f"{Path(path1).name}\n")
        super().get_file(path1, path2, *args, **kwargs)


def _sharded(world: World, scale: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world.size,))
    rows = distribute_tensor(torch.arange(70.0).view(14, 5) * scale, mesh, [Shard(0)])
    return {"rows": rows, "whole": torch.arange(9.0) * scale, "also": torch.ones(3) * scale}


def _save_in_bucket(world: World, root: str) -> None:
    fsspec.register_implementation("counted", Counted, clobber=True)
    parts = {"part": Held(_sharded(world, 1.0))}
    store = CheckpointStore(root, world=world)
    store.save(parts, rank_parts={"rng": RngState()}, step=1, epoch=0, metrics={}, meta={})


def _load_from_bucket(world: World, root: str, is_loaded_next: bool, temporary: str, log: Path) -> None:
    fsspec.register_implementation("counted", Counted, clobber=True)
    tempfile.tempdir, Counted.log = temporary, log
    store = CheckpointStore(root, world=world)
    newest = store.newest_good(is_loaded_next=is_loaded_next)
    assert newest is not None
    part = Held(_sharded(world, 0.0))
    store.load({"part": part}, rank_parts={"rng": RngState()}, checkpoint=newest)
    assert torch.equal(part.state["rows"].full_tensor(), torch.arange(70.0).view(14, 5))
    assert torch.equal(part.state["whole"], torch.arange(9.0))


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 2), (2, 3), pytest.param(3, 2, marks=pytest.mark.extended), pytest.param(4, 1, marks=pytest.mark.extended)],
)
def test_the_ranks_of_a_machine_fetch_each_file_of_a_bucket_once(before: int, after: int, tmp_path: Path) -> None:
    root = f"counted://{tmp_path}/run/checkpoints"
    run_on_ranks(_save_in_bucket, before, root)
    files = {each.name for each in (tmp_path / "run/checkpoints/step-00000001").iterdir()} - {"manifest.json"}
    assert len(files) == 2 * before + 1
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for is_loaded_next in (True, False):
        log = tmp_path / f"fetched-{is_loaded_next}"
        run_on_ranks(_load_from_bucket, after, root, is_loaded_next, str(temporary), log)
        assert collections.Counter(log.read_text().split()) == dict.fromkeys(files, 1)
        assert list(temporary.iterdir()) == [], "copies are deleted once they are loaded"


def test_a_full_disk_is_an_error_and_the_previous_checkpoint_is_intact(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    good = save(store, 1)
    told = _in_child(_save_with_little_room, str(tmp_path))
    assert re.fullmatch(r"CheckpointError: cannot save step 2 in \S+: OSError: \[Errno 27\] File too large", told)
    assert CheckpointStore(str(tmp_path), world=ALONE).newest_good() == good
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def _save_with_little_room(root: str) -> str:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    store = CheckpointStore(root, world=ALONE)
    try:
        save(store, 2, part=torch.ones(1 << 20))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.extended
def test_a_disk_that_is_really_full_leaves_the_previous_one_and_says_so(tmp_path: Path) -> None:
    """A file system of 3 MB, in a mount namespace that ends with the process."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    program = (
        f"mount -t tmpfs -o size=3m none {tmp_path} && exec {sys.executable} -m tests.trainer.checkpoints.test_store"
    )
    done = subprocess.run([*alone, "sh", "-c", f"{program} {tmp_path}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, left, after = json.loads(done.stdout.splitlines()[-1])
    assert re.fullmatch(r"cannot save step 2 in \S+: OSError: \[Errno 28\] No space left on device.*", told)
    assert left == ["step-00000001"]
    assert after == [1, 3]


def _fill_the_disk(root: str) -> list[Any]:
    """Return the error of a save without space, the files afterwards, and the result of a smaller save."""
    store, told = CheckpointStore(root, world=ALONE), ""
    save(store, 1, part=torch.ones(1 << 18))
    try:
        save(store, 2, part=torch.ones(1 << 20))
    except CheckpointError as error:
        told = str(error)
    left = sorted(each.name for each in Path(root).iterdir())
    assert store.newest_good() == store.list()[0]
    save(store, 3, part=torch.ones(1 << 18))
    return [told, left, steps(store)]


def test_a_deletion_that_fails_is_a_warning() -> None:
    root = Path(tempfile.mkdtemp(prefix="headway-test-"))
    try:
        root.chmod(0o777)
        told = _in_child(_save_where_nothing_can_be_deleted, str(root / "checkpoints"))
        assert told == [[2, 3], 1, True]
        os.chmod(next((root / "checkpoints").glob(".deleted-*")), 0o755)
        store = CheckpointStore(str(root / "checkpoints"), world=ALONE)
        store.remove_leftovers()
        assert sorted(each.name for each in (root / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    finally:
        shutil.rmtree(root)


def _save_where_nothing_can_be_deleted(root: str) -> list[Any]:
    if os.getuid() == 0:
        os.setuid(65534)  # root may write anywhere
    store = CheckpointStore(root, world=ALONE, keep_last=2)
    first = save(store, 1)
    save(store, 2)
    os.chmod(first.path, 0o555)
    with pytest.warns(CheckpointWarning, match="could not delete .*step-00000001") as caught:
        save(store, 3)
    newest = store.newest_good()
    told = [each for each in caught if each.category is CheckpointWarning]
    return [steps(store), len(told), newest is not None and newest.step == 3]


def _in_child(function: Any, *args: Any) -> Any:
    """Return the result of a function run in a separate process, which it may restrict."""
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=lambda: results.put(function(*args)))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    return results.get()


# Several ranks.


def sharded(world: World, whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (world.size,)), [Shard(0)])


def save_on_ranks(world: World, root: str) -> Checkpoint:
    store = CheckpointStore(root, world=world)
    seed_everything(7, rank=world.rank)
    parts = {
        "part": Held({"rows": sharded(world, torch.arange(14.0).view(7, 2)), "plain": torch.arange(5), "text": "x"})
    }
    saved = store.save(parts, rank_parts={"rng": RngState()}, step=1, epoch=0, metrics={}, meta={})
    assert store.newest_good() == saved
    return saved


def load_on_ranks(world: World, saved: Checkpoint) -> tuple[float, list[Any]]:
    seed_everything(123, rank=world.rank)
    part = Held({"rows": sharded(world, torch.zeros(7, 2))})
    store = CheckpointStore(str(Path(saved.path).parent), world=world)
    store.load({"part": part}, rank_parts={"rng": RngState()}, checkpoint=saved)
    rows = part.state["rows"]
    assert isinstance(rows, DTensor)
    assert rows.to_local().shape[0] < 7
    return random.random(), [rows.full_tensor().tolist(), part.state["plain"].tolist(), part.state["text"]]


def stream_of(seed: int, rank: int) -> float:
    seed_everything(seed, rank=rank)
    return random.random()


def test_saved_by_two_ranks_loaded_by_two_three_and_one_plain_process(tmp_path: Path) -> None:
    saved, other = run_on_ranks(save_on_ranks, 2, str(tmp_path))
    assert saved == other
    assert {each.name for each in Path(saved.path).iterdir()} == {
        "manifest.json", "state.json", "rank-00000.json", "rank-00001.json", "rank-00000.safetensors",
        "rank-00001.safetensors",
    }  # fmt: skip
    whole = [torch.arange(14.0).view(7, 2).tolist(), [0, 1, 2, 3, 4], "x"]
    for world_size in (2, 3):
        loaded = run_on_ranks(load_on_ranks, world_size, saved)
        assert [state for _, state in loaded] == [whole] * world_size
        # Every rank restores its own random state; a rank that did not save keeps its fresh ones.
        fresh = [stream_of(123, rank) for rank in range(2, world_size)]
        assert [number for number, _ in loaded] == [stream_of(7, 0), stream_of(7, 1), *fresh]
    store = CheckpointStore(str(tmp_path), world=ALONE)
    assert store.newest_good() == saved
    (state,) = load(store, saved)
    assert [state["rows"].tolist(), state["plain"].tolist(), state["text"]] == whole


def fail_on_one_rank(world: World, root: str) -> list[str]:
    """Every kind of failure on rank 1 only; all ranks must raise, and the next save must work."""
    import resource

    store = CheckpointStore(root, world=world)
    told = []

    def attempt(step: int, part: Any, store: CheckpointStore = store) -> None:
        try:
            store.save({"part": part}, rank_parts={}, step=step, epoch=0, metrics={}, meta={})
        except CheckpointError as error:
            told.append(str(error))

    attempt(1, Held(sharded(world, torch.ones(8))))
    attempt(2, Held(threading.Lock() if world.rank == 1 else None))
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    attempt(3, Held(sharded(world, torch.ones(1 << 20))))
    attempt(4, Held(sharded(world, torch.ones(8))))
    # The main rank detects it, and no rank retries.
    late = CheckpointStore(root, world=world, retries=1, retry_after_s=3600.0)
    late.check_writable()
    attempt(5, Held(sharded(world, torch.ones(8))))
    attempt(6, Held(sharded(world, torch.ones(8))), late)
    newest = store.newest_good()
    assert newest is not None
    told.append(str(newest.step))
    try:
        read_back = Held() if world.rank == 0 else Held(3)
        if world.rank == 1:
            read_back.load_state_dict = None  # type: ignore[assignment]
        store.load({"part": read_back}, rank_parts={}, checkpoint=newest)
    except CheckpointError as error:
        told.append(str(error))
    return told


def test_what_fails_on_one_rank_is_an_error_on_all_and_nobody_waits(tmp_path: Path) -> None:
    first, second = run_on_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert first == second
    refused_value, full, taken, newest, refused = first
    assert "rank 1: part 'part', key 'held' holds a _thread.lock" in refused_value
    assert "cannot save step 3" in full
    assert "rank 1: OSError: [Errno 27] File too large" in full
    assert "has saved step-00000005 here" in taken
    assert newest == "5"
    assert "rank 1: part 'part' cannot load its state" in refused
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def damaged_on_ranks(world: World, root: str, is_loaded_next: bool) -> tuple[Checkpoint | None, list[str]]:
    store = CheckpointStore(root, world=world)
    if is_loaded_next:
        newest = store.newest_good(is_loaded_next=True)
        assert newest is not None
        with pytest.raises(DamagedCheckpointError, match="step-00000002"):
            load(store, newest)
    with pytest.warns(CheckpointWarning, match="step-00000002") if world.is_main else contextlib.nullcontext():
        return store.newest_good(is_loaded_next=is_loaded_next), store.skipped


@pytest.mark.parametrize("is_loaded_next", [False, True])
def test_all_ranks_choose_the_same_good_checkpoint(tmp_path: Path, is_loaded_next: bool) -> None:
    store = CheckpointStore(str(tmp_path), world=ALONE)
    good = save(store, 1)
    damage(save(store, 2), "*.safetensors", "flip")
    first, second = run_on_ranks(damaged_on_ranks, 2, str(tmp_path), is_loaded_next)
    assert first == second
    assert first[0] == good
    assert len(first[1]) == 1


if __name__ == "__main__":
    print(json.dumps(_fill_the_disk(sys.argv[1])))


def test_the_folders_of_killed_processes_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "from headway.trainer.checkpoints.reader import FetchedFiles\n"
        "import time; files = FetchedFiles(); files.begin('x'); print(files.folder, flush=True); time.sleep(600)"
    )
    programs = [Program(program, environment={**os.environ, "TMPDIR": str(tmp_path)}) for _ in range(2)]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        deadline = time.monotonic() + 120
        while not all(each.read("out").endswith("\n") for each in programs):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        folders = [Path(each.read("out").strip()) for each in programs]
        for folder in folders:
            os.utime(folder, (0, 0))
        programs[0].kill()
        programs[0].wait()
        files = FetchedFiles()
        files.begin("y")
        assert {*tmp_path.iterdir()} == {folders[1], files.folder}
        with files:
            pass
        assert [*tmp_path.iterdir()] == [folders[1]]
    finally:
        for each in programs:
            each.kill()
            each.wait()
