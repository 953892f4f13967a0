"""The cache of remote data: the same rows, no remote read in the second epoch, the limit, damage, changes and kills."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.datasets import cache as cache_module, row_groups
from headway.datasets.cache import Cache, version_of
from headway.datasets.errors import DataError
from headway.datasets.formats import jsonl, webdataset
from headway.datasets.formats.images import Images
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.formats.webdataset import WebDataset
from headway.datasets.sources import Parquet
from headway.datasets.stream import ParquetStream, Stream
from tests.programs import Program
from tests.s3 import BusyBucket, s3_server

from .conftest import shard_info, write
from .test_images import folder as photos  # noqa: F401
from .test_jsonl import write_lines
from .test_webdataset import write_tar

# s3fs keeps an event loop and sessions until the process ends.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

LARGE = 2**30
FORMATS = ("parquet", "jsonl", "tar", "images")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments small enough that there are many, and no memory of other tests' folders."""
    monkeypatch.setattr(jsonl, "_FRAGMENT_ROWS", 8)
    monkeypatch.setattr(webdataset, "_FRAGMENT_ROWS", 8)
    cache_module._full_until.clear()
    cache_module._warned.clear()


def data_of(kind: str, place: str, index: Path, cache: Cache | None, **options: Any) -> Any:
    """Return the data of a format in a folder or a URI."""
    if kind == "parquet":
        return Parquet(place, cache=cache, **options)
    make = {"jsonl": JsonLines, "tar": WebDataset, "images": Images}[kind]
    return make(place, index=index, cache=cache, **options)


@pytest.fixture
def places(tmp_path: Path, photos: Path) -> dict[str, Path]:  # noqa: F811
    """A folder of data in each format."""
    for name, rows in {"a": range(40), "b": range(40, 103)}.items():
        write(tmp_path / "parquet" / f"{name}.parquet", rows)
        write_lines(tmp_path / "jsonl" / f"{name}.jsonl", rows)
        write_tar(tmp_path / "tar" / f"{name}.tar", rows)
    return {"images": photos, **{kind: tmp_path / kind for kind in FORMATS[:3]}}


def opened(data: Any, *, rank: int = 0, world_size: int = 1, engine: Any = "threads", **options: Any) -> Stream:
    stream = Stream(data, engine=engine, tail="keep", **options)
    stream.setup(shard_info(rank, world_size))
    return stream


def values(batch: Any) -> list[Any]:
    """Return all columns of a batch, comparably."""
    return [
        [(name, [getattr(row, "tolist", lambda row=row: row)() for row in column]) for name, column in each.items()]
        for each in batch.micro_batches
    ]


def epoch(stream: Stream, number: int, offset: int = 0) -> list[Any]:
    return [values(batch) for batch in stream.epoch(number, offset=offset)]


def entries(folder: Path) -> list[Path]:
    return [each for each in folder.glob("??/*") if each.suffix != ".writing"]


def disk_bytes(folder: Path) -> int:
    """Return what is on the disk, in blocks of 4 KiB, also of files that are being written or removed."""
    total = 0
    for each in folder.glob("[0-9a-f][0-9a-f]/*"):
        try:
            total += -(-each.stat().st_size // 4096) * 4096
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, "threads") for kind in FORMATS),
        *(
            pytest.param(kind, "ray", marks=[pytest.mark.ray, *([pytest.mark.extended] if kind != "parquet" else [])])
            for kind in FORMATS
        ),
    ],
    indirect=["engine"],
)
def test_after_the_first_epoch_the_remote_files_are_not_needed(
    kind: str, places: dict[str, Path], engine: str, tmp_path: Path
) -> None:
    place = f"file://{places[kind]}"
    plain = opened(data_of(kind, place, tmp_path / "index", None), engine=engine)
    expected = [epoch(plain, number) for number in range(3)]
    plain.close()
    stream = opened(data_of(kind, place, tmp_path / "index", Cache(tmp_path / "cache", LARGE)), engine=engine)
    assert stream.fingerprint == plain.fingerprint
    assert epoch(stream, 0) == expected[0]
    shutil.rmtree(places[kind])
    assert [epoch(stream, number) for number in (1, 2)] == expected[1:]
    stream.close()


@pytest.mark.parametrize(
    "kind",
    [each if each in ("parquet", "images") else pytest.param(each, marks=pytest.mark.extended) for each in FORMATS],
)
def test_rows_of_a_bucket_are_requested_once(
    kind: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    requests: list[str] = []
    s3fs.S3FileSystem.clear_instance_cache()
    with s3_server() as settings:
        proxy = BusyBucket(settings["AWS_ENDPOINT_URL"], lambda method, path: requests.append(f"{method} {path}"))
        try:
            for name, value in {**settings, "AWS_ENDPOINT_URL": proxy.url}.items():
                monkeypatch.setenv(name, value)
            bucket = f"data-{uuid.uuid4().hex[:8]}"
            s3fs.S3FileSystem().mkdir(bucket)
            s3fs.S3FileSystem().put(f"{places[kind]}/", f"{bucket}/{kind}/", recursive=True)
            data = data_of(kind, f"s3://{bucket}/{kind}", tmp_path / "index", Cache(tmp_path / "cache", LARGE))
            plain = opened(data_of(kind, str(places[kind]), tmp_path / "local", None))
            stream = opened(data)
            assert stream.fingerprint == plain.fingerprint
            assert epoch(stream, 0) == epoch(plain, 0)
            before = len(requests)
            assert before
            assert epoch(stream, 1) == epoch(plain, 1)
            assert requests[before:] == []
            stream.close()
            again = opened(data)  # looks at the files, but not at the rows
            before = len(requests)
            assert epoch(again, 0) == epoch(plain, 0)
            assert requests[before:] == []
            again.close()
            plain.close()
        finally:
            proxy.close()
            s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("kind", ["parquet", "images"])
def test_a_local_path_is_cached_too(kind: str, places: dict[str, Path], tmp_path: Path) -> None:
    stream = opened(data_of(kind, str(places[kind]), tmp_path / "index", Cache(tmp_path / "cache", LARGE)))
    first = epoch(stream, 0)
    shutil.rmtree(places[kind])
    assert len(epoch(stream, 1)) == len(first)
    stream.close()


def test_a_file_in_an_archive_is_cached(places: dict[str, Path], tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "data"), "zip", places["parquet"])
    stream = opened(Parquet(f"zip://*.parquet::file://{archive}", cache=Cache(tmp_path / "cache", LARGE)))
    first = epoch(stream, 0)
    Path(archive).unlink()
    assert len(epoch(stream, 1)) == len(first)
    stream.close()


def test_compressed_lines_are_read_from_their_index_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl.gz", range(40), compression="gz")
    stream = opened(JsonLines(f"file://{tmp_path}/rows.jsonl.gz", index=tmp_path, cache=Cache(tmp_path / "c", LARGE)))
    assert len(epoch(stream, 0)) == 5
    assert entries(tmp_path / "c") == []
    stream.close()


def test_damaged_images_that_are_left_out_are_decoded_from_the_cache(places: dict[str, Path], tmp_path: Path) -> None:
    (places["images"] / "ant" / "00.png").write_bytes(b"no image")
    data = Images(f"file://{places['images']}", on_bad_row="skip", index=tmp_path, cache=Cache(tmp_path / "c", LARGE))
    stream = opened(data)
    assert stream.source.skipped_rows == 1
    shutil.rmtree(places["images"])  # the index has been built from what is in the cache now
    assert sum(len(micro[0][1]) for batch in epoch(stream, 0) for micro in batch) == 89
    stream.close()


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_entry_is_read_again(
    kind: str, damage: str, places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = opened(data_of(kind, f"file://{places[kind]}", tmp_path / "index", Cache(tmp_path / "cache", LARGE)))
    expected = epoch(stream, 0), epoch(stream, 1)
    everything = entries(tmp_path / "cache")
    sizes = {each: each.stat().st_size for each in everything}
    for each in everything:
        data = each.read_bytes()
        changed = {"cut": data[:-1], "changed": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[damage]
        each.write_bytes(changed)
    stream.close()
    row_groups._metadata.cache_clear()
    with caplog.at_level(logging.WARNING, logger="headway.datasets"):
        assert (epoch(stream, 0), epoch(stream, 1)) == expected
    stream.close()
    assert "damaged" in caplog.text
    assert {each: each.stat().st_size for each in everything} == sizes


def test_a_new_run_reads_a_changed_file(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    name = f"/changed-{uuid.uuid4().hex}/rows.jsonl"
    data = JsonLines(f"memory:/{name}", index=tmp_path / "index", cache=Cache(tmp_path / "cache", LARGE))
    for word in ("one", "two"):
        memory.pipe(name, b"".join(b'{"x": "%s"}\n' % word.encode() for _ in range(16)))
        stream = opened(data)
        assert {row for batch in stream.epoch(0) for row in batch.micro_batches[0]["x"]} == {word}
        stream.close()


def test_a_change_that_the_footer_does_not_show_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.parquet"
    table = pa.table({"x": pa.array(range(4000))})
    pq.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False, write_statistics=False)
    data = Parquet(f"file://{path}", cache=Cache(tmp_path / "cache", LARGE))
    stream = opened(data)
    before = epoch(stream, 0)
    stream.close()
    content = bytearray(path.read_bytes())
    time.sleep(0.01)  # another time of change
    content[content.index((17).to_bytes(8, "little"))] = 99  # a value that no digest covers
    path.write_bytes(content)
    changed, plain = opened(data), opened(Parquet(str(path)))
    assert changed.fingerprint == stream.fingerprint  # so only the cache could tell
    assert epoch(changed, 0) == epoch(plain, 0) != before
    changed.close()
    plain.close()


def test_a_file_that_changes_during_the_run_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "data" / "a.parquet", range(64))
    stream = opened(Parquet(f"file://{path}", cache=Cache(tmp_path / "cache", LARGE)))
    time.sleep(0.01)
    write(path, range(1, 65))
    with pytest.raises(DataError, match="has changed since the run started"):
        epoch(stream, 0)
    stream.close()


def test_the_least_recently_used_entries_leave_and_those_of_this_run_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path, max_bytes=10 * 8192)
    before = cache.open()
    names = [f"{number:032x}" for number in range(20)]
    for number, name in enumerate(names[:10]):
        before.put(name, bytes([number]) * 5000)
        os.utime(tmp_path / "00" / name, (number, number))
    assert before.get(names[0]) == bytes(5000)  # used again: the oldest is the second one now
    (tmp_path / "notes.txt").write_text("keep")
    (tmp_path / "00" / "notes.txt").write_text("keep")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / names[0]).write_text("keep")
    os.utime(tmp_path / "mine" / names[0], (0, 0))
    (tmp_path / "00" / f"{names[19]}.writing").write_bytes(bytes(5000))  # left by a process that was killed
    time.sleep(0.01)
    run = cache.open()
    for name in names[10:13]:
        run.put(name, b"x" * 5000)
    kept = {each.name for each in entries(tmp_path) if each.parent.name == "00"} - {"notes.txt"}
    assert not (tmp_path / "00" / f"{names[19]}.writing").exists()
    assert disk_bytes(tmp_path) - 4096 <= 10 * 8192
    assert {names[0], names[9], *names[10:13]} <= kept
    assert not {names[1], names[2], names[3]} & kept
    with caplog.at_level(logging.WARNING, logger="headway.datasets"):
        for name in names[10:]:
            assert (run.get(name) or run.put(name, b"x" * 5000)) in (None, b"x" * 5000)
            cache_module._full_until.clear()
        for name in names[:10]:
            run.put(name, b"y" * 5000)
    assert {each.name for each in entries(tmp_path)} - {"notes.txt"} == set(names[10:])
    assert caplog.text.count("is full") == 1
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "00" / "notes.txt").read_text() == "keep"
    assert (tmp_path / "mine" / names[0]).read_text() == "keep"


@pytest.mark.parametrize("kind", FORMATS)
def test_data_larger_than_the_cache_keeps_its_order_and_the_limit(
    kind: str, places: dict[str, Path], tmp_path: Path
) -> None:
    limit = 40_000
    stream = opened(data_of(kind, f"file://{places[kind]}", tmp_path / "index", Cache(tmp_path / "cache", limit)))
    plain = opened(data_of(kind, str(places[kind]), tmp_path / "local", None))
    for number in range(3):
        assert epoch(stream, number) == epoch(plain, number)
        assert 0 < disk_bytes(tmp_path / "cache") <= limit
    stream.close()
    plain.close()


_RANK = """
import sys
sys.path.insert(0, {root!r})
from headway.datasets.formats import jsonl
jsonl._FRAGMENT_ROWS = 8
from headway.datasets.cache import Cache
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.stream import Stream
from tests.datasets.conftest import shard_info
{before}
stream = Stream(JsonLines({place!r}, index={index!r}, cache=Cache({cache!r}, {limit})), tail="keep", engine="threads")
stream.setup(shard_info({rank}, {world_size}))
for epoch in range(3):
    for batch in stream.epoch(epoch):
        print(epoch, *batch.micro_batches[0]["id"].tolist()[: batch.num_samples[0]])
stream.close()
"""


def rank_process(**options: Any) -> Program:
    return Program(_RANK.format(**{"root": str(Path(__file__).parents[2]), "before": "", **options}))


@pytest.mark.parametrize("limit", [60_000, pytest.param(LARGE, marks=pytest.mark.extended)])
def test_ranks_share_a_cache_and_keep_its_limit(limit: int, tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "rows.jsonl", range(1003))
    options = {"place": f"file://{tmp_path}/data", "index": str(tmp_path / "index"), "limit": limit, "world_size": 3}
    processes = [rank_process(**options, cache=str(tmp_path / "cache"), rank=rank) for rank in range(3)]
    most = 0
    while any(each.returncode is None for each in processes):
        most = max(most, disk_bytes(tmp_path / "cache"))
        time.sleep(0.005)
    output = [each.wait() for each in processes]
    assert [each.returncode for each in processes] == [0, 0, 0], output
    for number in range(3):
        rows = [line.split()[1:] for out, _ in output for line in out.splitlines() if line.split()[0] == str(number)]
        assert sorted(int(row) for each in rows for row in each) == list(range(1003))
    assert 0 < most <= limit
    if limit == LARGE:
        assert len(entries(tmp_path / "cache")) == -(-1003 * 11 // 10 // 8)  # with the blank lines, each fragment once


_KILLED = """
import os, signal
from headway.datasets import cache
replace = cache.Path.replace
def stop(path, target):
    if {condition}:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(path, target)
cache.Path.replace = stop
"""


@pytest.mark.parametrize(
    "moment",
    [pytest.param("before the total is renamed", marks=pytest.mark.extended), "before the entry is renamed"],
)
def test_a_process_killed_while_it_stores_an_entry_harms_nothing(moment: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "rows.jsonl", range(203))
    options = {"place": f"file://{tmp_path}/data", "index": str(tmp_path / "index"), "limit": 60_000, "world_size": 1}
    whole = rank_process(**options, cache=str(tmp_path / "other"), rank=0).wait()[0]
    cache = tmp_path / "cache"
    stored = f"target.parent.parent == cache.Path({str(cache)!r})"
    condition = {"before the total is renamed": f"target == cache.Path({str(cache)!r}) / cache._TOTAL"}.get(
        moment, stored
    )
    killed = rank_process(**options, cache=str(cache), rank=0, before=_KILLED.format(condition=condition))
    killed.wait()
    assert killed.returncode == -signal.SIGKILL
    again = rank_process(**options, cache=str(cache), rank=0)
    assert (again.wait()[0], again.returncode) == (whole, 0)
    assert not list(cache.glob("??/*.writing"))
    assert disk_bytes(cache) <= 60_000


def test_training_continues_without_its_cache(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    stream = opened(Parquet(f"file://{places['parquet']}", cache=Cache(folder, LARGE)))
    expected = epoch(stream, 0)
    stream.close()  # which also reads ahead
    shutil.rmtree(folder)
    assert epoch(stream, 0) == expected
    assert entries(folder)
    stream.close()
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    with caplog.at_level(logging.WARNING, logger="headway.datasets"):
        assert epoch(stream, 0) == expected
    assert caplog.text.count("does not work") == 1
    stream.close()


@pytest.mark.ray
def test_the_warnings_of_reading_tasks_are_logged_by_the_process_that_trains(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, ray_session: None
) -> None:
    """Ray writes those of other processes to files only."""
    folder = tmp_path / "cache"
    data = Parquet(f"file://{places['parquet']}", cache=Cache(folder, LARGE))
    # With a CPU for each task, none of the rows is read in this process.
    stream = opened(data, engine="ray", reader_cpus=1)
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    with caplog.at_level(logging.WARNING, logger="headway.datasets"):
        assert len(epoch(stream, 0)) == 13
    stream.close()
    lines = {record.getMessage() for record in caplog.records if record.name == "headway.datasets"}
    told = [each for each in lines if each.startswith(f"the cache {folder} does not work")]
    assert told
    assert all(each.endswith(" (in a reading task)") for each in told)


FULL_DISK = """
import logging, os, sys
from pathlib import Path
from headway.datasets import cache as cache_module
from headway.datasets.cache import Cache

logging.basicConfig(format="%(message)s", stream=sys.stdout)
before, folder = Cache(sys.argv[1], max_bytes=2**30).open(), Path(sys.argv[1])
names = [f"{number:032x}" for number in range(500)]
for name in names[:300]:
    before.put(name, bytes(8000))
stored = [each.name for each in sorted(folder.glob("??/*"))]
assert 100 < len(stored) < 128, len(stored)  # of 1 MiB
for number, name in enumerate(stored):
    os.utime(folder / name[:2] / name, (number, number))
run = Cache(folder, max_bytes=2**30).open()
cache_module._full_until.clear()
for name in names[300:310]:
    run.put(name, bytes(8000))
    assert run.get(name) == bytes(8000), "older entries have left"
assert before.get(stored[-1]) == bytes(8000), "and only as many as were needed"
assert not list(folder.glob("??/*.writing"))
for name in names[310:]:
    run.put(name, bytes(8000))
    run.get(name)
assert run.get(names[300]) == bytes(8000), "those of this run are kept"
"""


def test_a_disk_that_is_full_below_the_limit_keeps_the_entries_of_this_run(tmp_path: Path) -> None:
    """On a real disk of 1 MiB, in a separate namespace."""
    if subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no user mount a disk in a namespace")
    mount = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$1" "{tmp_path}"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line == (
        f"the cache {tmp_path} is full, and what does not fit is read remotely in every epoch: its disk is, below "
        f"max_bytes ({2**30}). Free some of it, or lower max_bytes"
    )


def test_bad_settings_are_found_before_anything_is_read(places: dict[str, Path], tmp_path: Path) -> None:
    for bad in (0, -1, 1.5, True, None):
        with pytest.raises(DataError, match="max_bytes of a Cache must be an integer >= 1"):
            Cache(tmp_path, bad)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="must be on a local disk"):
        Cache("s3://bucket/cache", LARGE)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the cache"):
        Parquet(str(places["parquet"]), cache=Cache(tmp_path / "file", LARGE)).open()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cache_that_is_too_small_for_a_part_is_refused(kind: str, places: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="max_bytes of the Cache is 1000, but .* at least that"):
        data_of(kind, str(places[kind]), tmp_path / "index", Cache(tmp_path / "cache", 1000)).open()


def test_a_file_without_a_version_is_refused() -> None:
    assert version_of({"size": 5, "ETag": '"a"', "mtime": 3.0}, "f") == '5 ETag "a"'
    assert version_of({"size": 5, "ETag": "", "mtime": 3.0}, "f") == "5 mtime 3.0"
    for about in ({"size": 5}, {"size": None, "mtime": 3.0}):
        with pytest.raises(DataError, match="f cannot be cached"):
            version_of(about, "f")


def test_a_parquet_stream_takes_a_cache(places: dict[str, Path], tmp_path: Path) -> None:
    stream = ParquetStream(places["parquet"], cache=Cache(tmp_path / "cache", LARGE), engine="threads")
    stream.setup(shard_info())
    assert len(list(stream.epoch(0))) == 12
    assert entries(tmp_path / "cache")
    stream.close()
