"""Write tensors as Distributed Checkpoint files, with a plan that is reused from save to save.

Distributed Checkpoint plans which rank writes what, and its readers read the files. The plan and the bytes that
`torch.save` writes around a tensor's data depend only on names, shapes and shards, so both are cached. For 128 tensors
this saves 40 ms of Python per save, for which the training thread would have to wait.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from ..distributed.dtensor import to_local
from ..distributed.world import World
from .file_checksums import ChecksummedFile, FileChecksum
from .tensor_checksums import TensorChecksum, combine_checksums, has_checksum, shard_checksum
from .worker_thread import WorkerThread

METADATA = ".metadata"


class DcpWriter:
    """Writes the tensors of successive saves, on one rank.

    With one rank, it also reuses the last layout of earlier writers, as in successive trials of a sweep.
    """

    _of_one_rank: ClassVar[_Layout | None] = None

    def __init__(self) -> None:
        self._helper = WorkerThread("headway-sum", is_behind=True)
        self._layout: _Layout | None = None

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path, world: World) -> Written:
        """Write this rank's share and start to compute its checksums. Every rank must call this.

        Of replicas on several ranks only one is written; the checksums cover that one.
        """
        shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
        layout, self._layout = self._layout, None
        if world.size == 1:
            layout = layout or DcpWriter._of_one_rank
        is_known = layout is not None and layout.shapes == shapes
        if not all(world.all_gather_object(is_known)):
            writer = _Writer(folder, self._helper)
            group, alone = world.control, world.size == 1
            save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)
            metadata = (folder / METADATA).read_bytes() if world.is_main else b""
            file = writer.file
            layout = _Layout(shapes, file.path.name, writer.items, metadata)
        else:
            assert layout is not None
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(dict(tensors))
            file = _RankFile(folder / layout.file, self._helper)
            file.write(layout.items, planner.resolve_data)
            if world.is_main:
                (folder / METADATA).write_bytes(layout.metadata)
        if file.is_framed:
            self._layout = layout
            if world.size == 1:
                DcpWriter._of_one_rank = layout
        return Written(file.path.name, file.sum, file.part_sums)


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's tensor file; its checksums may still be in progress.

    Attributes:
        file: name of the file.
        file_sum: checksum of the file.
        part_sums: checksums of the shards in it, with the tensors' names.
    """

    file: str
    file_sum: Future[FileChecksum]
    part_sums: Sequence[tuple[str, Future[TensorChecksum]]]

    def tensor_checksums(self) -> dict[str, TensorChecksum]:
        """Wait for the checksums of the shards, and combine those of each tensor."""
        return combine_checksums([{name: each.result()} for name, each in self.part_sums])


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the tensors of a save were written; reused for the next save if its names, shapes and shards are equal.

    Attributes:
        shapes: shape and shards of each tensor, by name, on which the plan depends.
        file: this rank's file.
        items: the items that this rank writes, in order.
        metadata: content of the metadata file, on the main rank.
    """

    shapes: dict[str, Hashable]
    file: str
    items: Sequence[WriteItem]
    metadata: bytes


class _RankFile:
    """One rank's tensor file, each tensor as `torch.save` would write it.

    Attributes:
        path: path of the file.
        sum: checksum of the file; set by `write`.
        part_sums: checksums of the shards in it, with the tensors' names.
        is_framed: whether positions in the file do not depend on the tensors' values.
    """

    sum: Future[FileChecksum]

    def __init__(self, path: Path, helper: WorkerThread) -> None:
        self.path, self._helper = path, helper
        self.part_sums: list[tuple[str, Future[TensorChecksum]]] = []
        self.is_framed = True

    def write(self, items: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]) -> list[WriteResult]:
        """Write the tensors; the helper thread computes checksums, possibly after this returns."""
        results = []
        # Buffered, because one system call writes at most 2 GB; large writes bypass the buffer.
        with self.path.open("wb") as stream:
            file = ChecksummedFile(stream, self._helper)
            for item in items:
                begin = file.tell()
                self._write(item, resolve(item).detach(), file)
                length = file.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(self.path.name, begin, length)))
        self.sum = file.sum()
        return results

    def _write(self, item: WriteItem, tensor: torch.Tensor, file: ChecksummedFile) -> None:
        assert item.tensor_data is not None
        name, offsets, size = item.index.fqn, item.tensor_data.chunk.offsets, item.tensor_data.size
        is_plain = has_checksum(tensor) and not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or (frame := _frame(tensor.shape, tensor.dtype)) is None:
            self.is_framed = False
            stream = io.BytesIO()
            torch.save(tensor.cpu().clone(), stream)  # cloned: torch.save writes the whole storage of a view
            file.write(stream.getbuffer())
            if has_checksum(tensor):
                sum_it = functools.partial(shard_checksum, tensor, offsets=offsets, size=size)
                self.part_sums.append((name, self._helper.submit(sum_it, Future())))
            return
        here = tensor.cpu().contiguous()

        def read(also: Callable[[Any], None]) -> TensorChecksum:
            return shard_checksum(here, offsets=offsets, size=size, also=also)

        file.write(frame[0])
        numbers = here.view(-1).view(torch.uint8).numpy().data
        self.part_sums.append((name, file.write_and_read(numbers, read)))
        file.write(frame[1])


@functools.cache
def _frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes] | None:
    """Return the bytes that `torch.save` writes before and after the data of a tensor of this shape and dtype.

    None if this version of torch writes tensors in an unknown format.
    """
    tensor = torch.empty(shape, dtype=dtype)
    recorder = _Recorder(tensor)
    # torch computes the zip format's CRC but never verifies it; our checksums replace it.
    computes = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, cast(IO[bytes], recorder))
    finally:
        set_crc32_options(computes)
    if tensor.numel() and not recorder.has_seen_it:
        return None
    return b"".join(recorder.before), b"".join(recorder.after)


class _Recorder:
    """A file object that records the bytes written before and after a tensor's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.before: list[bytes] = []
        self.after: list[bytes] = []
        self.has_seen_it = False
        self._place = (tensor.data_ptr(), tensor.nbytes)

    def write(self, data: Any) -> int:
        """Record bytes."""
        view = memoryview(data).cast("B")
        if len(view) and (np.frombuffer(view, np.uint8).ctypes.data, len(view)) == self._place:
            self.has_seen_it = True
        else:
            (self.after if self.has_seen_it else self.before).append(bytes(view))
        return len(view)

    def flush(self) -> None:
        """Do nothing."""


class _Writer(FileSystemWriter):
    """Lets Distributed Checkpoint plan the save and write its metadata file."""

    file: _RankFile
    items: Sequence[WriteItem]

    def __init__(self, folder: Path, helper: WorkerThread) -> None:
        super().__init__(folder, sync_files=False)  # the storage syncs all files
        self._folder, self._helper = folder, helper

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write the items that the plan assigns to this rank."""
        self.items = plan.items
        self.file = _RankFile(self._folder / f"{plan.storage_data.prefix}0.distcp", self._helper)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(self.file.write(plan.items, planner.resolve_data))
        return future


def _shape(tensor: torch.Tensor) -> Hashable:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, to_local(tensor).shape, tensor.placements, tensor.device_mesh
    return tensor.shape, tensor.dtype
