"""Checkpoints in an S3 bucket: a real server process on loopback, accessed through s3fs."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, CheckpointError, CheckpointStore, World
from headway.trainer.checkpoints.format.manifest import CheckpointWarning
from headway.trainer.checkpoints.retention import mark_kept
from headway.trainer.checkpoints.storage import open_storage
from headway.trainer.errors import RunConflictError
from headway.trainer.ownership.claim import acquire
from headway.trainer.ownership.claim_files import Claim, ClaimFiles
from headway.trainer.trackers import JsonlTracker, RunInfo
from headway.trainer.trackers.jsonl import read_records
from tests.distributed import run_on_ranks
from tests.programs import Program
from tests.s3 import s3_server
from tests.tiny import StopAt, TinyConfig, TinyTrainer, weights

pytest.importorskip("s3fs")
pytest.importorskip("moto")

ALONE = World.single("cpu")
# s3fs keeps an event loop and sessions until the process ends.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def settings() -> Iterator[dict[str, str]]:
    # It caches connections by their arguments, not by the address in the environment, and another module used another
    # server.
    S3FileSystem = pytest.importorskip("s3fs").S3FileSystem
    S3FileSystem.clear_instance_cache()
    with s3_server() as settings:
        yield settings
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a new, empty bucket."""
    import s3fs

    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    name = f"runs-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"


def _objects(uri: str) -> set[str]:
    import s3fs

    s3 = s3fs.S3FileSystem()
    s3.invalidate_cache()
    return {str(each).split("/", 1)[1] for each in s3.find(uri)}


def _config(**settings: Any) -> TinyConfig:
    return TinyConfig(max_steps=12, checkpoint=CheckpointConfig(every="2 steps", **settings))  # type: ignore[arg-type]


def test_a_run_is_saved_there_and_goes_on_from_there_bit_by_bit(bucket: str) -> None:
    undisturbed = TinyTrainer(_config(), world=ALONE)
    undisturbed.fit()
    stopped = TinyTrainer(_config(), world=ALONE, run_dir=f"{bucket}/line", callbacks=[StopAt(5)])
    assert stopped.fit().steps == 5
    again = TinyTrainer(_config(), world=ALONE, run_dir=f"{bucket}/line")
    result = again.fit()
    assert result.resumed_from == f"{bucket}/line/checkpoints/step-00000005"
    torch.testing.assert_close(weights(again), weights(undisturbed), rtol=0, atol=0)
    # The last two, the best, and the one that it resumed from.
    store = CheckpointStore(f"{bucket}/line/checkpoints", world=ALONE)
    kept = [each.step for each in store.list()]
    assert kept[-2:] == [10, 12]
    assert 5 in kept
    names = {each.split("/")[2] for each in _objects(bucket) if each.startswith("line/checkpoints/")}
    assert names == {each.path.rsplit("/", 1)[1] for each in store.list()}


def test_a_folder_has_one_owner_there_by_a_conditional_write(bucket: str) -> None:
    files = ClaimFiles(f"{bucket}/line")
    # Both have found no claim.
    first, second = Claim.next_after(files.newest()), Claim.next_after(files.newest())
    assert files.create(first)
    assert not files.create(second)
    with pytest.raises(RunConflictError, match=f"process {os.getpid()} on .* is training in {bucket}/line"):
        TinyTrainer(_config(), world=ALONE, run_dir=f"{bucket}/line").fit()
    with acquire(f"{bucket}/line", take_over=True) as owner:
        assert owner.id.startswith("2-")
    assert TinyTrainer(_config(), world=ALONE, run_dir=f"{bucket}/line").fit().steps == 12
    assert {each for each in _objects(bucket) if "/owner/" in each} == {"line/owner/000003.json"}


def test_a_file_of_another_process_is_seen_although_the_folder_was_listed_before(bucket: str) -> None:
    import s3fs

    run = Folder(f"{bucket}/run")
    run.write("a", "a")
    assert run.files("") == ["a"]
    # Another client, as in another process.
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(f"{bucket}/run/stop.json", b"now")
    assert run.exists("stop.json")
    assert run.files("stop") == ["stop.json"]
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(f"{bucket}/run/grow.json", b"more")
    assert run.read("grow.json") == "more"


def _save(store: CheckpointStore, step: int) -> None:
    store.save(
        {"part": _Tensor(torch.full((64,), float(step)))}, rank_parts={}, step=step, epoch=0, metrics={}, meta={}
    )


class _Tensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


@pytest.mark.parametrize(
    ("file", "how"),
    [("rank-00000.safetensors", "flip"), ("rank-00000.safetensors", "delete"), ("manifest.json", "truncate")],
)
def test_a_damaged_object_is_named_and_the_checkpoint_before_is_used(bucket: str, file: str, how: str) -> None:
    import s3fs

    store = CheckpointStore(f"{bucket}/run", world=ALONE)
    for step in (1, 2):
        _save(store, step)
    s3, there = s3fs.S3FileSystem(), f"{bucket}/run/step-00000002/{file}"
    whole = s3.cat_file(there)
    if how == "delete":
        s3.rm_file(there)
    else:
        middle = len(whole) // 2
        s3.pipe_file(
            there, whole[:middle] + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if how == "flip" else b"")
        )
    again = CheckpointStore(f"{bucket}/run", world=ALONE)
    with pytest.warns(CheckpointWarning, match=f"step-00000002.*{file}"):
        newest = again.newest_good()
    assert newest is not None
    assert newest.step == 1


def test_retention_pins_and_another_run_are_seen_there(bucket: str) -> None:
    store = CheckpointStore(f"{bucket}/run", world=ALONE, keep_last=2)
    for step in (1, 2, 3):
        _save(store, step)
        if step == 1:
            mark_kept(open_storage(f"{bucket}/run"), "step-00000001")
    _save(store, 4)
    assert [each.step for each in store.list()] == [1, 3, 4]
    assert "run/step-00000001/pinned" in _objects(bucket)
    _save(CheckpointStore(f"{bucket}/run", world=ALONE, keep_last=2), 5)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* has saved step-00000005 here"):
        _save(store, 6)


def test_what_a_killed_save_has_left_is_none_and_is_removed(
    bucket: str, settings: dict[str, str], tmp_path: Path
) -> None:
    _save(CheckpointStore(f"{bucket}/run", world=ALONE), 1)
    program = (
        "import os, signal, sys\n"
        "from headway.trainer import CheckpointStore\n"
        "from tests.promises.test_an_object_store_is_as_good_as_a_disk import ALONE, _save\n"
        "store = CheckpointStore(sys.argv[1], world=ALONE)\n"
        "store._storage.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "_save(store, 2)\n"
    )
    killed = Program(program, f"{bucket}/run", environment=os.environ | {"TMPDIR": str(tmp_path)})
    killed.wait()
    assert killed.returncode == -signal.SIGKILL
    assert "run/step-00000002/rank-00000.safetensors" in _objects(bucket)
    again = CheckpointStore(f"{bucket}/run", world=ALONE)
    again.remove_leftovers()
    newest = again.newest_good()
    assert newest is not None
    assert newest.step == 1
    assert {each.split("/")[1] for each in _objects(bucket)} == {"step-00000001"}


def _on_ranks(world: World, root: str, settings: dict[str, str]) -> list[float]:
    os.environ.update(settings)
    rows = distribute_tensor(torch.arange(14.0).view(7, 2), init_device_mesh("cpu", (world.size,)), [Shard(0)])
    store = CheckpointStore(root, world=world)
    store.save({"part": _Tensor(rows)}, rank_parts={}, step=1, epoch=0, metrics={}, meta={})
    newest = CheckpointStore(root, world=world).newest_good()
    assert newest is not None
    part = _Tensor(torch.zeros_like(rows))
    store.load({"part": part}, rank_parts={}, checkpoint=newest)
    return part.tensor.full_tensor().flatten().tolist()  # type: ignore[attr-defined, no-any-return]


def test_two_ranks_meet_there_and_one_process_reads_it(bucket: str, settings: dict[str, str]) -> None:
    assert run_on_ranks(_on_ranks, 2, f"{bucket}/run", settings) == [[float(each) for each in range(14)]] * 2
    store, part = CheckpointStore(f"{bucket}/run", world=ALONE), _Tensor(torch.zeros(0))
    newest = store.newest_good()
    assert newest is not None
    store.load({"part": part}, rank_parts={}, checkpoint=newest)
    assert part.tensor.flatten().tolist() == [float(each) for each in range(14)]


def test_5000_records_cost_their_own_size(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an object that is replaced at each record they would cost 2,500 times as much."""
    import s3fs

    sent: list[int] = []
    pipe_file = s3fs.S3FileSystem._pipe_file

    async def count(self: s3fs.S3FileSystem, path: str, value: bytes, **options: object) -> object:
        sent.append(len(value))
        return await pipe_file(self, path, value, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", count)
    # Instances bind their methods when they are made.
    s3fs.S3FileSystem.clear_instance_cache()
    tracker = JsonlTracker()
    tracker.start(RunInfo(name="a", run_dir=f"{bucket}/a"), step=0)
    for step in range(1, 5001):
        tracker.log({"train/loss": 1 / step, "lr": 0.1}, step=step, epoch=0)
        if step % 1000 == 0:
            assert tracker.flush(60)
    tracker.finish("completed")
    records = read_records(f"{bucket}/a/metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 5001))
    size = sum(len(tracker.line(record)) + 1 for record in records)
    assert len(sent) >= 5
    assert size < sum(sent) <= 1.2 * size
