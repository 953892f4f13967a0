"""safetensors files: written piece by piece with a checksum, and read as views of the file.

Types that safetensors does not have are stored as others of the same bits: complex128 and complex32 as pairs of floats,
and float4_e2m1fn_x2 as bytes. The JSON beside a file has the type of each tensor.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash

from ...errors import CheckpointError
from .file_checksums import PIECE_BYTES, FileChecksum, digest_of_section, read_header, sections_of
from .strict_json import dump_json
from .threads import in_threads

_ALIGNMENT = 64
SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""The types of tensors that safetensors has, and its names of them."""
_PAIRS = {torch.complex128: torch.float64, torch.complex32: torch.float16}
_AS_BYTES = {torch.float4_e2m1fn_x2}
DTYPES = {str(each).removeprefix("torch."): each for each in (*SAFETENSORS_NAMES, *_PAIRS, *_AS_BYTES)}
"""The types of tensors that a checkpoint can have, by their names in JSON."""


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the CPU, of a type that safetensors has; the same memory where that is possible."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _PAIRS:
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


def from_stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what `as_stored` was given.

    Raises:
        CheckpointError: this is not how a tensor of this type is stored.
    """
    stored = _PAIRS.get(dtype, torch.uint8 if dtype in _AS_BYTES else dtype)
    if tensor.dtype != stored or (dtype in _PAIRS and (not tensor.dim() or tensor.shape[-1] != 2)):
        raise CheckpointError(f"{dtype} is stored as {stored}, and not as {tensor.dtype} of shape {list(tensor.shape)}")
    if dtype in _PAIRS:
        return torch.view_as_complex(tensor)
    return tensor.view(dtype) if dtype in _AS_BYTES else tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, the same memory if it is a contiguous one on the CPU."""
    numbers: Any = as_stored(tensor).reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


_Span: TypeAlias = tuple[int, int]


class TensorFile:
    """A safetensors file to be written; its tensors must not change until then.

    Args:
        tensors: by name, local tensors on any device.

    Attributes:
        nbytes: size of the file.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # Wide types first, so that every tensor is aligned in memory when the file is mapped.
        in_order = sorted(tensors.items(), key=lambda each: -each[1].element_size())
        self._tensors = {name: as_stored(tensor) for name, tensor in in_order}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, tensor in self._tensors.items():
            end = at + tensor.nbytes
            header[name] = {
                "dtype": SAFETENSORS_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = dump_json(header)
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._header = struct.pack("<Q", len(text)) + text
        self.nbytes = len(self._header) + at

    def write(self, path: Path) -> FileChecksum:
        """Write the file, and return its checksum, computed from memory.

        A checksum of the bytes in memory also detects corruption on the way to the disk.
        """
        digests = []
        with path.open("wb", buffering=0) as file:
            for section in self._sections():
                hasher = xxhash.xxh3_128()
                for begin in range(0, len(section), PIECE_BYTES):
                    piece = section[begin : begin + PIECE_BYTES]
                    hasher.update(piece)
                    # One call may write less than it is given.
                    while len(piece := piece[file.write(piece) :]):
                        pass
                digests.append(hasher.digest())
        return FileChecksum.of_sections(self.nbytes, digests)

    def _sections(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        yield from (bytes_of(tensor) for tensor in self._tensors.values() if tensor.numel())


class TensorReader:
    """Tensors of an open file, as views of the file: copy what you keep.

    Args:
        file: as safetensors has opened it.
        name: name of the file, for messages.
        descriptor: of the same file.
        spans: begin and end of the data of each tensor in the file.
        sections: those of all that the file's checksum is made of.
    """

    def __init__(
        self, file: Any, name: str, descriptor: int, spans: Mapping[str, _Span], sections: Sequence[_Span]
    ) -> None:
        self._file, self._name, self._descriptor = file, name, descriptor
        self._spans, self._sections = spans, sections
        self.names = frozenset(file.keys())

    def read(
        self, name: str, dtype: torch.dtype, shape: Sequence[int] | None = None, index: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        """Return a tensor, or a block of it.

        Raises:
            CheckpointError: the file has no such tensor, or of another type or shape.
        """
        if name not in self.names:
            raise CheckpointError(f"{self._name} has no tensor {name!r}")
        tensor = from_stored(_aligned(self._file.get_tensor(name), dtype), dtype)
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(f"{self._name}: {name} has shape {list(tensor.shape)}, and not {list(shape)}")
        return tensor[index] if index else tensor

    def read_into(self, targets: Mapping[str, torch.Tensor], *, check: FileChecksum | None) -> dict[str, str]:
        """Read whole tensors into those of their types and sizes on any device, in several threads.

        Args:
            targets: by name; those on the CPU that are contiguous are read into without a copy.
            check: size and checksum that the file must have; all of it is then read, once.

        Returns:
            XXH3-128 of each tensor's bytes, in hex digits.

        Raises:
            CheckpointError: the file is not the one that was written.
        """
        names = {self._spans[name]: name for name in targets}

        # Memory is allocated, and copied to devices, in this thread: another one would make a context on device 0.
        def buffers() -> Iterator[tuple[_Span, torch.Tensor | None]]:
            for span in sorted(names) if check is None else self._sections:
                target = targets[names[span]] if span in names else None
                if target is not None and not (target.is_cpu and target.is_contiguous()):
                    target = torch.empty(target.shape, dtype=target.dtype)
                yield span, target

        def read(section: tuple[_Span, torch.Tensor | None]) -> tuple[_Span, torch.Tensor | None, bytes]:
            span, buffer = section
            into = None if buffer is None else bytes_of(buffer)
            return span, buffer, digest_of_section(self._descriptor, *span, into)

        digests: dict[_Span, bytes] = {}
        for span, buffer, digest in in_threads(read, buffers(), lambda section: section[0][1] - section[0][0]):
            digests[span] = digest
            if buffer is not None and buffer is not (target := targets[names[span]]):
                target.copy_(buffer)
        if check is not None:
            size = os.fstat(self._descriptor).st_size
            if FileChecksum.of_sections(size, list(digests.values())) != check:
                raise CheckpointError(f"{self._name} has changed since it was written: its checksum differs")
        return {name: digests[span].hex() for span, name in names.items()}


def _aligned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a mapped file, or a copy if it lies where a tensor of this type cannot be read."""
    if tensor.data_ptr() % dtype.itemsize == 0:
        return tensor
    copy = torch.empty_like(tensor)
    copy.reshape(-1).view(torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
    return copy


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorReader]:
    """Open a safetensors file; its tensors are views of the file, which must not change meanwhile.

    Raises:
        CheckpointError: it is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        data, entries = read_header(file.fileno(), path.name)
        try:
            # It checks the header, too.
            with safe_open(path, framework="pt") as tensors:
                offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
                spans = {name: (data + begin, data + end) for name, (begin, end) in offsets.items()}
                sections = sections_of(data, entries, os.fstat(file.fileno()).st_size)
                yield TensorReader(tensors, path.name, file.fileno(), spans, sections)
        except SafetensorError as error:
            raise CheckpointError(f"{path.name} is not a safetensors file: {error}") from error
