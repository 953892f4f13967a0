"""The tensors of a save as files of Distributed Checkpoint, planned once and written again, save after save.

Distributed Checkpoint decides which rank writes what, and its readers read it. What it plans depends on names, shapes
and shards alone, and so do the bytes that `torch.save` puts around the numbers of a tensor: both are kept. For 128
tensors that is 40 ms of Python less in each save, for which a training thread would have to wait.
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
    """Writes the tensors of one save after another. Of one rank; keep it from save to save.

    The layout of what one process wrote last, alone, is also known to the next in it: a sweep has it train one trial
    after another.
    """

    _of_one_rank: ClassVar[_Layout | None] = None

    def __init__(self) -> None:
        self._helper = WorkerThread("headway-sum", is_behind=True)
        self._layout: _Layout | None = None

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path, world: World) -> Written:
        """Writes this rank's share, and begins to sum it. Every rank must call this.

        Of equal copies on several ranks, one is written: the sums are of that one.
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
    """A rank's tensors in their file, whose sums may still be under way.

    Attributes:
        file: its name.
        file_sum: of the file.
        part_sums: of the parts of tensors that are in it, by the tensors' names.
    """

    file: str
    file_sum: Future[FileChecksum]
    part_sums: Sequence[tuple[str, Future[TensorChecksum]]]

    def tensor_checksums(self) -> dict[str, TensorChecksum]:
        """Waits for the sums of the parts, and adds up those of one tensor."""
        return combine_checksums([{name: each.result()} for name, each in self.part_sums])


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the tensors of a save have been written: those of the next are written so too, if they are alike.

    Attributes:
        shapes: all that the plan depends on, by name.
        file: of this rank.
        items: what this rank writes, in its order.
        metadata: the main rank's file of that name.
    """

    shapes: dict[str, Hashable]
    file: str
    items: Sequence[WriteItem]
    metadata: bytes


class _RankFile:
    """One rank's tensors, each as `torch.save` would write it.

    Attributes:
        path: of the file.
        sum: of the file; there once it is written.
        part_sums: of the parts of tensors that are in it.
        is_framed: whether all of it lies where it would for any other numbers.
    """

    sum: Future[FileChecksum]

    def __init__(self, path: Path, helper: WorkerThread) -> None:
        self.path, self._helper = path, helper
        self.part_sums: list[tuple[str, Future[TensorChecksum]]] = []
        self.is_framed = True

    def write(self, items: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]) -> list[WriteResult]:
        """Writes these tensors; a thread of its own sums them, and may go on when all is written."""
        results = []
        # Buffered, because a system writes at most 2 GB at a time; what is large passes the buffer by.
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
            torch.save(tensor.cpu().clone(), stream)  # of a view it would write all that lies around it
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
    """What `torch.save` writes before and after the numbers of a tensor: the same for all of its shape and dtype.

    None where this torch writes tensors in another way than those that we know.
    """
    tensor = torch.empty(shape, dtype=dtype)
    recorder = _Recorder(tensor)
    # The zip format has a checksum of its own, which torch computes but never reads; we have better ones.
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
    """A file that keeps what is written to it before and after a tensor's own memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.before: list[bytes] = []
        self.after: list[bytes] = []
        self.has_seen_it = False
        self._place = (tensor.data_ptr(), tensor.nbytes)

    def write(self, data: Any) -> int:
        """Takes some bytes."""
        view = memoryview(data).cast("B")
        if len(view) and (np.frombuffer(view, np.uint8).ctypes.data, len(view)) == self._place:
            self.has_seen_it = True
        else:
            (self.after if self.has_seen_it else self.before).append(bytes(view))
        return len(view)

    def flush(self) -> None:
        """Does nothing."""


class _Writer(FileSystemWriter):
    """Lets Distributed Checkpoint plan, and write its own file of what lies where."""

    file: _RankFile
    items: Sequence[WriteItem]

    def __init__(self, folder: Path, helper: WorkerThread) -> None:
        super().__init__(folder, sync_files=False)  # the storage does, for all files
        self._folder, self._helper = folder, helper

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes what the plan gives to this rank."""
        self.items = plan.items
        self.file = _RankFile(self._folder / f"{plan.storage_data.prefix}0.distcp", self._helper)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(self.file.write(plan.items, planner.resolve_data))
        return future


def _shape(tensor: torch.Tensor) -> Hashable:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, to_local(tensor).shape, tensor.placements, tensor.device_mesh
    return tensor.shape, tensor.dtype
