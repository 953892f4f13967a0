"""Documents of every format: each one once, wherever the input is cut, and damaged ones named by file and place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.datasets.errors import DataError
from headway.datasets.formats.hugging_face import HuggingFace
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.packing import Packed
from headway.datasets.prepare import plan_text, prepare_text
from headway.datasets.sources import Parquet
from headway.datasets.tokenizers import ByteTokenizer, HuggingFaceTokenizer

DOCUMENTS = [f"document {number} " * (number % 7) + "ü" * (number % 3) for number in range(100)]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows_of(documents: list[str]) -> list[str]:
    return [json.dumps({"text": each, "id": number}, ensure_ascii=False) for number, each in enumerate(documents)]


def documents_of(folder: str) -> list[str]:
    files = sorted(Path(folder).glob("*.parquet"))
    return [ByteTokenizer().decode(each) for file in files for each in pq.read_table(file)["tokens"].to_pylist()]


@pytest.mark.parametrize("part_bytes", [pytest.param(1, marks=pytest.mark.extended), 50, 97, 1000, 10**6])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_every_line_is_read_once_wherever_the_file_is_cut(tmp_path: Path, name: str, part_bytes: int) -> None:
    path = write_lines(tmp_path / name, [*rows_of(DOCUMENTS)[:50], "", *rows_of(DOCUMENTS)[50:]])
    made = prepare_text(path, tmp_path / "out", row_length=None, part_bytes=part_bytes)
    assert documents_of(made.path) == DOCUMENTS
    assert made.rows == 100


def test_the_last_line_needs_no_end(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(rows_of(DOCUMENTS)))
    made = prepare_text(tmp_path / "rows.jsonl", tmp_path / "out", row_length=None, part_bytes=64)
    assert documents_of(made.path) == DOCUMENTS


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "rows.parquet", row_group_size=7)
    saved = datasets.Dataset.from_dict({"text": DOCUMENTS})
    saved.save_to_disk(str(tmp_path / "saved"))
    inputs: dict[str, Any] = {
        "Parquet": tmp_path / "rows.parquet",
        "saved": tmp_path / "saved",
        "in memory": HuggingFace(saved),
        "JsonLines": JsonLines(write_lines(tmp_path / "rows" / "rows.jsonl", rows_of(DOCUMENTS))),
    }
    for name, each in inputs.items():
        made = prepare_text(each, tmp_path / f"out of {name}", row_length=None, part_bytes=300)
        assert documents_of(made.path) == DOCUMENTS, name


def test_documents_can_be_packed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", rows_of(DOCUMENTS))
    made = prepare_text(path, tmp_path / "out", row_length=None)
    packed = Packed(Parquet(made.path), length=64, index=tmp_path / "index", column="tokens").open()
    assert packed.tokens == made.tokens == sum(len(ByteTokenizer()(each)) for each in DOCUMENTS)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 61 of .*rows\.jsonl.* is not JSON: JSONDecodeError"),
        ("[1]", r"line 61 of .*rows\.jsonl.* is a list, not an object"),
        ('{"txt": "a"}', r"line 61 of .* has no key 'text'; did you mean 'txt'\?"),
        ('{"text": null}', r"line 61 of .* has null in 'text', not text"),
    ],
)
def test_a_damaged_line_is_named_or_left_out_if_asked(tmp_path: Path, name: str, line: str, message: str) -> None:
    lines = rows_of(DOCUMENTS)
    path = write_lines(tmp_path / name, [*lines[:60], line, *lines[60:]])
    with pytest.raises(DataError, match=message + ".*on_bad_row='skip'"):
        prepare_text(path, tmp_path / "out", row_length=None, part_bytes=500)
    with pytest.raises(DataError, match="on_bad_row was 'raise' and is 'skip'. Delete it"):
        prepare_text(path, tmp_path / "out", row_length=None, part_bytes=500, on_bad_row="skip")
    made = prepare_text(path, tmp_path / "skipped", row_length=None, part_bytes=500, on_bad_row="skip")
    assert documents_of(made.path) == DOCUMENTS
    assert made.skipped_rows == 1
    assert "1 damaged ones left out" in str(made)


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [*DOCUMENTS[:20], None]}), tmp_path / "rows.parquet", row_group_size=8)
    with pytest.raises(DataError, match=r"row 4 of row group 2 of .*rows\.parquet has null in 'text', not text"):
        prepare_text(tmp_path / "rows.parquet", tmp_path / "out", row_length=None)
    with pytest.raises(DataError, match=r"[Ss]elect|txt"):
        prepare_text(tmp_path / "rows.parquet", tmp_path / "out", row_length=None, text="txt")


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl.gz", rows_of(DOCUMENTS))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz is not a complete gzip file: .*, after line \d+\. Write"):
        prepare_text(path, tmp_path / "out", row_length=None)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"text"), b"\x28\xb5\x2f\xfd text", "text".encode("utf-16")],
    ids=["gzip", "zstd", "UTF-16"],
)
def test_a_file_that_is_not_text_is_named(tmp_path: Path, content: bytes) -> None:
    """Its bytes would become U+FFFD, and be trained on."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("a document")
    (tmp_path / "raw" / "b.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"b\.txt is not text in UTF-8, but .*: convert it\. Mend it, or leave such"):
        prepare_text(tmp_path / "raw", tmp_path / "out", row_length=None)
    made = prepare_text(tmp_path / "raw", tmp_path / "skipped", row_length=None, on_bad_row="skip")
    assert (documents_of(made.path), made.skipped_rows) == (["a document"], 1)


def test_files_of_several_kinds_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw" / "rows.jsonl", rows_of(DOCUMENTS))
    (tmp_path / "raw" / "README.md").write_text("about")
    with pytest.raises(DataError, match=r"mix JSON Lines \(.*rows\.jsonl\) and text \(.*README\.md\): name the files"):
        prepare_text(tmp_path / "raw", tmp_path / "out", row_length=8)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A tokenizer of Hugging Face, trained on the documents."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_of_hugging_face(tmp_path: Path, trained: Path) -> None:
    import tokenizers

    path = write_lines(tmp_path / "rows.jsonl", rows_of(DOCUMENTS))
    tokenizer = HuggingFaceTokenizer(str(trained), append="<end>")
    made = prepare_text(path, tmp_path / "out", row_length=16, tail="pad", part_bytes=10**6, tokenizer=tokenizer)
    loaded = tokenizers.Tokenizer.from_file(str(trained))
    wanted = [token for each in DOCUMENTS for token in [*loaded.encode(each).ids, loaded.token_to_id("<end>")]]
    found = np.concatenate([pq.read_table(file)["tokens"].combine_chunks().flatten() for file in
                            sorted(Path(made.path).glob("*.parquet"))])  # fmt: skip
    assert found[: len(wanted)].tolist() == wanted
    assert tokenizer(DOCUMENTS[5]).tolist() == [*loaded.encode(DOCUMENTS[5]).ids, 0]
    without = HuggingFaceTokenizer(str(trained))
    with pytest.raises(DataError, match="tokenizer was '.*' and is '.*'. Delete it"):
        prepare_text(path, tmp_path / "out", row_length=16, tail="pad", part_bytes=10**6, tokenizer=without)
    with pytest.raises(DataError, match="has no token '<stop>'"):
        HuggingFaceTokenizer(str(trained), append="<stop>")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="cannot read the tokenizer .*broken.json"):
        HuggingFaceTokenizer(str(tmp_path / "broken.json"))


def test_the_plan_is_about_right_and_writes_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", rows_of(DOCUMENTS * 20))
    plan = plan_text(path, tmp_path / "out", row_length=16, part_bytes=10_000)
    assert not (tmp_path / "out.partial").exists()
    made = prepare_text(path, tmp_path / "out", row_length=16, part_bytes=10_000)
    assert plan.parts == -(-path.stat().st_size // 10_000) == made.files - 1, "the last file has the leftovers"
    assert plan.input_bytes == path.stat().st_size
    assert abs(plan.tokens / made.tokens - 1) < 0.1
    assert abs(plan.rows / made.rows - 1) < 0.1
    assert plan.seconds(1) > plan.seconds(2) > 0
    assert plan.seconds(1000) == plan.seconds(plan.parts)
