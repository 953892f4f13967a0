"""Tokenizes documents into Parquet, once, before training.

The input is cut into parts, by its bytes alone. Each part becomes one Parquet file: its documents' tokens end to end,
cut into rows of fixed length, or one row per document. What does not fill the last row of a part is left over; all
leftovers, in order, make the rows of the last file.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import DataError
from ..formats.base import DataFormat, OnBadRow, check_options
from ..formats.jsonl import JsonLines
from ..paths import PathLike, Paths, absolute
from ..tokenizers import ByteTokenizer, Tokenizer, name_of, one_thread, to_tokens
from .job import Prepared, PrepareProgress, Tables, check_tasks, prepare
from .pieces import Piece, find_pieces, group, read_documents

PART_BYTES = 32 * 2**20
# Documents that are given to a tokenizer at a time, up to so many characters.
_BATCH_CHARACTERS = 2**19
_SAMPLE_CHARACTERS = 16 * 1024
# Tokens of a row group of documents, at most.
_GROUP_TOKENS = 2**22


def prepare_text(
    inputs: Paths | DataFormat,
    output: PathLike,
    *,
    row_length: int | None,
    tokenizer: Tokenizer | None = None,
    tail: Literal["drop", "pad"] = "drop",
    pad: int = 0,
    text: str = "text",
    column: str = "tokens",
    on_bad_row: OnBadRow = "raise",
    rows_per_group: int = 256,
    part_bytes: int = PART_BYTES,
    tasks: int | None = 1,
    progress: Callable[[PrepareProgress], None] | None = None,
) -> Prepared:
    """Convert documents to Parquet files of tokens.

    After an interruption, the same call verifies the finished files by their checksums, and makes the others.

    Args:
        inputs: files, folders (searched recursively), globs, fsspec URIs of these, or a list of them. JSON Lines (also
            compressed) and Parquet have one document per row; any other file is one document, decoded as UTF-8 with
            invalid bytes as U+FFFD. Or a format such as `HuggingFace`, or a folder that its `save_to_disk` has written.
        output: folder or fsspec URI to create. An existing one must be the result of the same call. It may be inside an
            input folder; its files are not read. If another process is creating it, this call waits; in a bucket, where
            it cannot wait, both write the same.
        row_length: tokens per row. None writes one row per document, as `Packed` can read them.
        tokenizer: maps a document's text to its tokens. None uses `ByteTokenizer`: UTF-8 bytes between bos and eos.
            Must be deterministic. A method `batch`, if there is one, maps a list of texts to a list of tokens. An
            existing output is matched by the tokenizer's name and by its tokens of the start of the first document.
        tail: tokens that do not fill the last row of all: "drop" leaves them out, "pad" fills the row with `pad`.
        pad: the padding token.
        text: the key or column with the text, of inputs that have some.
        column: name of the token column.
        on_bad_row: a damaged line, or one without text, is an error that names it ("raise") or is left out ("skip") and
            counted in `Prepared.skipped_rows`.
        rows_per_group: rows per row group, the unit that a stream reads and shuffles.
        part_bytes: bytes of input per Parquet file, about; a compressed file or a whole text file is never cut.
        tasks: 1: in this process. More: so many tasks at a time on Ray, which must be connected, with a CPU each. None:
            as many as Ray has CPUs, also those of nodes that join. The files are the same for any number.
        progress: called with the progress, at most a few times a second.

    Raises:
        DataError: there is no input or it is damaged, an option is invalid, or `output` was created from other inputs
            or options.
    """
    check_tasks(tasks)
    job = _Job.create(
        inputs, output, row_length=row_length, tokenizer=tokenizer, tail=tail, pad=pad, text=text, column=column,
        on_bad_row=on_bad_row, rows_per_group=rows_per_group, part_bytes=part_bytes,
    )  # fmt: skip
    return prepare(job.parts, job.convert, output, job.wanted, tasks=tasks, progress=progress)


@dataclass(frozen=True, slots=True)
class TextPlan:
    """What `prepare_text` would do, estimated from a sample of the input; made by `plan_text`.

    Attributes:
        parts: parts of the input, each of which becomes a Parquet file.
        input_bytes: size of the input.
        documents, tokens, rows: estimates of the result; rows without `row_length` are documents.
        bytes_per_s: of the input, by one task on one CPU.
    """

    parts: int
    input_bytes: int
    documents: int
    tokens: int
    rows: int
    bytes_per_s: float

    def seconds(self, tasks: int) -> float:
        """Return the estimated time on so many tasks, without their start."""
        rounds = -(-self.parts // tasks)
        return rounds * self.input_bytes / self.parts / self.bytes_per_s


def plan_text(
    inputs: Paths | DataFormat,
    output: PathLike,
    *,
    row_length: int | None,
    tokenizer: Tokenizer | None = None,
    text: str = "text",
    on_bad_row: OnBadRow = "raise",
    part_bytes: int = PART_BYTES,
) -> TextPlan:
    """Estimate what `prepare_text` with these arguments would do, by tokenizing some of up to three parts.

    Writes nothing.

    Raises:
        DataError: as for `prepare_text`, as far as the sample shows it.
    """
    job = _Job.create(
        inputs, output, row_length=row_length, tokenizer=tokenizer, tail="drop", pad=0, text=text, column="tokens",
        on_bad_row=on_bad_row, rows_per_group=256, part_bytes=part_bytes,
    )  # fmt: skip
    documents, tokens, read_bytes = 0, 0, 0
    started = time.perf_counter()
    with one_thread():
        for number in {0, len(job.parts) // 2, len(job.parts) - 1}:
            sizes, some = next(job.convert.batches(job.parts[number], {"skipped": 0}), ([], []))
            documents += len(some)
            tokens += sum(map(len, some))
            read_bytes += sum(sizes)
    seconds = time.perf_counter() - started
    size = sum(each.size for part in job.parts for each in part)
    factor = size / max(1, read_bytes)
    rows = round(tokens * factor) // row_length if row_length else round(documents * factor)
    return TextPlan(len(job.parts), size, round(documents * factor), round(tokens * factor), rows, read_bytes / seconds)


@dataclass(frozen=True)
class _Job:
    """Checked options and the parts of the input."""

    parts: list[tuple[Piece, ...]]
    convert: _Tokenize
    wanted: dict[str, Any]

    @classmethod
    def create(
        cls,
        inputs: Paths | DataFormat,
        output: PathLike,
        *,
        row_length: int | None,
        tokenizer: Tokenizer | None,
        tail: Literal["drop", "pad"],
        pad: int,
        text: str,
        column: str,
        on_bad_row: OnBadRow,
        rows_per_group: int,
        part_bytes: int,
    ) -> _Job:
        if (row_length is not None and row_length < 1) or rows_per_group < 1 or part_bytes < 1:
            raise DataError(
                f"row_length, rows_per_group and part_bytes must be integers >= 1, got {row_length}, "
                f"{rows_per_group}, {part_bytes}"
            )
        if tail not in ("drop", "pad"):
            raise DataError(f"tail must be 'drop' or 'pad', got {tail!r}")
        on_bad_row = inputs.on_bad_row if isinstance(inputs, JsonLines) else on_bad_row
        check_options(None, on_bad_row)
        tokenizer = tokenizer or ByteTokenizer()
        (folder,) = absolute(output)
        pieces, names = find_pieces(
            inputs, column=text, outside=(folder, f"{folder}.partial"), part_bytes=part_bytes
        )  # fmt: skip
        if not pieces:
            raise DataError("the inputs have no documents")
        convert = _Tokenize(tokenizer, row_length, tail, pad, column, on_bad_row, rows_per_group)
        digest = hashlib.sha256("\0".join(f"{name} {size}" for name, size in names).encode()).hexdigest()[:12]
        files = f"{len(names)} file{'s' if len(names) != 1 else ''}"
        wanted = {
            "row_length": row_length,
            "tokenizer": name_of(tokenizer),
            "first_tokens": convert.first_tokens(pieces),
            **({"tail": tail, **({"pad": pad} if tail == "pad" else {})} if row_length else {}),
            "text": text,
            "column": column,
            "on_bad_row": on_bad_row,
            "rows_per_group": rows_per_group,
            "part_bytes": part_bytes,
            "inputs": f"{files}, {sum(size for _, size in names)} bytes, {digest}",
        }
        return cls(group(pieces, part_bytes), convert, wanted)


@dataclass(frozen=True)
class _Tokenize:
    """Converts documents to rows of tokens."""

    tokenizer: Tokenizer
    row_length: int | None
    tail: Literal["drop", "pad"]
    pad: int
    column: str
    on_bad_row: OnBadRow
    rows_per_group: int

    @property
    def compression(self) -> str:
        """Of the Parquet files."""
        return "zstd"

    def tables(self, part: Sequence[Piece]) -> Tables:
        """Yield the row groups of one part."""
        counts = {"skipped": 0}
        if self.row_length is None:
            tokens = yield from self._documents(part, counts)
            return {"tokens": tokens, **counts}
        group_tokens = self.rows_per_group * self.row_length
        waiting: list[npt.NDArray[np.int32]] = []
        size = written = 0
        for _, some in self.batches(part, counts):
            waiting += some
            size += sum(map(len, some))
            if size >= group_tokens:
                tokens = np.concatenate(waiting)
                whole = size - size % group_tokens
                for start in range(0, whole, group_tokens):
                    yield self._rows(tokens[start : start + group_tokens])
                waiting, size, written = [tokens[whole:]], size - whole, written + whole
        tokens = np.concatenate(waiting) if waiting else np.empty(0, np.int32)
        whole = size - size % self.row_length
        if whole:
            yield self._rows(tokens[:whole])
        rest = base64.b64encode(tokens[whole:].astype("<i4").tobytes()).decode()
        return {"tokens": written + whole, "rest": rest, **counts}

    def last(self, records: Sequence[Mapping[str, Any]]) -> Tables:
        """Yield the rows of all leftovers."""
        length, rows = self.row_length, sum(each["rows"] for each in records)
        if length is None:
            if not rows:
                raise DataError("the inputs have no documents")
            return {}
        rests = [np.frombuffer(base64.b64decode(each["rest"]), "<i4").astype(np.int32) for each in records]
        tokens = np.concatenate(rests)
        missing = -len(tokens) % length
        if self.tail == "pad":
            tokens = np.pad(tokens, (0, missing), constant_values=self.pad)
        else:
            tokens = tokens[: len(tokens) // length * length]
        if not rows and not len(tokens):
            raise DataError(
                f"row_length {length} exceeds the tokens of all inputs; use a smaller row_length, or tail='pad'"
            )
        for start in range(0, len(tokens), self.rows_per_group * length):
            yield self._rows(tokens[start : start + self.rows_per_group * length])
        return {"tokens": len(tokens)}

    def batches(
        self, part: Sequence[Piece], counts: dict[str, int]
    ) -> Iterator[tuple[list[int], list[npt.NDArray[np.int32]]]]:
        """Yield the sizes in the input and the tokens of some documents; count those left out."""
        origin = f"the tokenizer {name_of(self.tokenizer)}"
        sizes: list[int] = []
        texts: list[str] = []
        places: list[str] = []
        characters = 0

        def tokens() -> list[npt.NDArray[np.int32]]:
            batch = getattr(self.tokenizer, "batch", None)
            values = batch(texts) if batch else map(self.tokenizer, texts)
            return [to_tokens(each, origin, f" for {place}") for each, place in zip(values, places, strict=True)]

        for size, text, place in read_documents(part, self.on_bad_row):
            sizes.append(size)
            if text is None:
                counts["skipped"] += 1
                continue
            texts.append(text)
            places.append(place or "a document")
            characters += len(text)
            if characters >= _BATCH_CHARACTERS:
                yield sizes, tokens()
                sizes, texts, places, characters = [], [], [], 0
        if sizes:
            yield sizes, tokens()

    def first_tokens(self, pieces: Sequence[Piece]) -> str:
        """Return a digest that tells tokenizers with the same name apart, such as lambdas."""
        documents = read_documents(pieces, "skip")
        text = next((each.text for each in documents if each.text), "")[:_SAMPLE_CHARACTERS]
        values = to_tokens(self.tokenizer(text), f"the tokenizer {name_of(self.tokenizer)}")
        return f"{len(values)} tokens, {hashlib.sha256(values.tobytes()).hexdigest()[:12]}"

    def _rows(self, tokens: npt.NDArray[np.int32]) -> pa.Table:
        assert self.row_length is not None
        schema = pa.schema([pa.field(self.column, pa.list_(pa.int32(), self.row_length))])
        rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens), self.row_length)
        return pa.table([rows], schema=schema)

    def _documents(self, part: Sequence[Piece], counts: dict[str, int]) -> Any:
        """Yield tables with one document per row; return the number of tokens."""
        waiting: list[npt.NDArray[np.int32]] = []
        in_all = 0
        for _, some in self.batches(part, counts):
            in_all += sum(map(len, some))
            waiting += [each for each in some if len(each)]
            while len(waiting) >= self.rows_per_group or sum(map(len, waiting)) >= _GROUP_TOKENS:
                now, waiting = waiting[: self.rows_per_group], waiting[self.rows_per_group :]
                yield self._ragged(now)
        if waiting:
            yield self._ragged(waiting)
        return in_all

    def _ragged(self, documents: Sequence[npt.NDArray[np.int32]]) -> pa.Table:
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int32)
        values = pa.array(np.concatenate(documents), pa.int32())
        schema = pa.schema([pa.field(self.column, pa.list_(pa.int32()))])
        return pa.table([pa.ListArray.from_arrays(pa.array(offsets), values)], schema=schema)
