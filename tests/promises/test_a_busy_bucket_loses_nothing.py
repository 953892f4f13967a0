"""A bucket that answers 503, is late, or loses replies to requests that it carried out changes no result."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.orchestrator.errors import StorageError
from headway.orchestrator.runs.checkpoints import RunCheckpoints
from headway.orchestrator.runs.ownership import check_not_owned
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, Duration, World
from headway.trainer.checkpoints.storage import open_storage
from headway.trainer.ownership.claim_files import Claim, ClaimFiles
from headway.trainer.trackers.jsonl import read_records
from tests.s3 import BusyBucket, Fault, each_nth, s3_server
from tests.tiny import StopAt, TinyConfig, TinyTrainer, weights

pytest.importorskip("s3fs")
pytest.importorskip("moto")

ROOT = Path(__file__).parents[2]
ALONE = World.single("cpu")
# s3fs keeps an event loop and sessions until the process ends.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def settings() -> Iterator[dict[str, str]]:
    with s3_server() as settings:
        yield settings


@pytest.fixture
def proxy(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyBucket]:
    """The proxy before the server, which this process uses."""
    from s3fs import S3FileSystem

    # It caches connections by their arguments, not by the address in the environment.
    S3FileSystem.clear_instance_cache()
    proxy = BusyBucket(settings["AWS_ENDPOINT_URL"])
    for name, value in {**settings, "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    yield proxy
    S3FileSystem.clear_instance_cache()
    proxy.close()


@pytest.fixture
def bucket(proxy: BusyBucket) -> str:
    """The URI of a new, empty bucket behind the proxy."""
    from s3fs import S3FileSystem

    name = f"runs-{uuid.uuid4().hex[:8]}"
    S3FileSystem().mkdir(name)
    return f"s3://{name}"


@pytest.mark.parametrize("every", [20, pytest.param(5, marks=pytest.mark.extended)])
def test_a_run_goes_on_bit_by_bit(bucket: str, proxy: BusyBucket, every: int) -> None:
    config = TinyConfig(max_steps=8, log_every=Duration(1, "steps"), checkpoint=CheckpointConfig(every="3 steps"))  # type: ignore[arg-type]
    undisturbed = TinyTrainer(config, world=ALONE)
    undisturbed.fit()
    proxy.choose = each_nth(every)
    assert TinyTrainer(config, world=ALONE, run_dir=f"{bucket}/line", callbacks=[StopAt(5)]).fit().steps == 5
    again = TinyTrainer(config, world=ALONE, run_dir=f"{bucket}/line")
    result = again.fit()
    assert (result.steps, result.resumed_from) == (8, f"{bucket}/line/checkpoints/step-00000005")
    torch.testing.assert_close(weights(again), weights(undisturbed), rtol=0, atol=0)
    assert min(proxy.done[fault] for fault in ("slow down", "late", "reply lost")) >= 3
    assert [record["step"] for record in read_records(f"{bucket}/line/metrics.jsonl")] == list(range(1, 9))


def test_a_file_sent_in_parts_whose_last_reply_was_lost_arrives(
    bucket: str, proxy: BusyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    # Instead of 50 MiB; the least that S3 accepts.
    monkeypatch.setattr(s3fs.core, "calculate_chunksize", lambda *_, **__: 5 * 2**20)
    storage, content = open_storage(bucket), os.urandom(11 * 2**20)
    staged = storage.stage("a")
    (staged / "large").write_bytes(content)
    # The error that S3 documents for an upload that has ended; this server ends it twice.
    faults: list[Fault] = ["no such upload", "reply lost"]
    proxy.choose = lambda method, path: faults.pop() if method == "POST" and "uploadId=" in path and faults else None
    storage.publish(staged, "step-00000001", ["large"])
    assert not faults
    assert storage.read("step-00000001", "large") == content


def test_a_claim_whose_reply_was_lost_is_in_force(bucket: str, proxy: BusyBucket) -> None:
    """The client repeats the conditional write, which fails because of its own object."""
    files = ClaimFiles(f"{bucket}/line")
    first, second = Claim.next_after(None), Claim.next_after(None)
    faults: list[Fault] = ["reply lost"]
    proxy.choose = lambda method, path: faults.pop() if method == "PUT" and "/owner/" in path and faults else None
    assert files.create(first)
    assert proxy.done["reply lost"] == 1
    assert not files.create(second)
    newest = files.newest()
    assert newest is not None
    assert newest.id == first.id
    # Also if the client has listed the folder before.
    faults.append("reply lost")
    assert files.create(Claim.next_after(newest))
    assert proxy.done["reply lost"] == 2


def test_wrong_credentials_are_one_sentence_after_a_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    # It knows no credentials.
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="0") as settings:
        proxy = BusyBucket(settings["AWS_ENDPOINT_URL"])
        for name, value in {**settings, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        run = Folder("s3://bucket/run")
        for do in (lambda: run.read("run.json"), run.prepare, lambda: check_not_owned(run, watch=False)):
            with pytest.raises(StorageError, match=r"s3://bucket/run.* cannot be .*; check the credentials"):
                do()
        # Otherwise it would be tried again for minutes.
        assert proxy.done.total() <= 12
        S3FileSystem.clear_instance_cache()
        proxy.close()


PROGRAM = """
import time

from headway.orchestrator import Experiment, Scaling
from headway.trainer import CheckpointConfig, Duration
from tests.tiny import TinyConfig, TinyTrainer


class Slow(TinyTrainer):
    def training_step(self, batch, batch_idx):
        time.sleep(0.1 * self.training)
        return super().training_step(batch, batch_idx)


experiment = Experiment(
    name="run",
    trainer=Slow,
    config=TinyConfig(max_steps=30, log_every=Duration(1, "steps"), checkpoint=CheckpointConfig(every="8 steps")),
    scaling=Scaling(workers=2, cpus_per_worker=0.5),
)
"""


def headway(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT / "build/types"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, "-m", "headway.orchestrator", *arguments], cwd=folder, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_two_workers_on_ray_write_each_event_and_record_once(bucket: str, proxy: BusyBucket, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(PROGRAM)
    proxy.choose = each_nth(5)
    for storage in (str(tmp_path), bucket):
        done = headway("fit", "run.py", f"storage={storage}", folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    proxy.choose = lambda *_: None
    assert min(proxy.done[fault] for fault in ("slow down", "late", "reply lost")) >= 10
    assert kinds(f"{bucket}/run") == kinds(f"{tmp_path}/run")
    assert losses(f"{bucket}/run") == losses(f"{tmp_path}/run")
    assert digest(bucket) == digest(str(tmp_path))


def kinds(run_dir: str) -> list[str]:
    return sorted(event["event"] for event in read_events(Folder(run_dir)))


def losses(run_dir: str) -> list[tuple[int, float]]:
    return [(record["step"], record["train/loss"]) for record in read_records(f"{run_dir}/metrics.jsonl")]


def digest(storage: str) -> str:
    checkpoints = RunCheckpoints.of("run", storage)
    newest = checkpoints.newest_good()
    assert newest is not None
    return checkpoints.digest(newest)
