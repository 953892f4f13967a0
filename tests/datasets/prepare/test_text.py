"""Text to rows of tokens: complete, deterministic, interrupted anywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from headway.datasets.arrow import to_rows
from headway.datasets.errors import DataError
from headway.datasets.locking import locked
from headway.datasets.prepare import PrepareProgress, find_files, prepare_text, split_files
from headway.datasets.sources import read_source
from headway.datasets.tokenizers import ByteTokenizer

TEXTS = {"a.txt": "hello", "b/c.txt": "wörld " * 40, "b/d.txt": "", "e.txt": "the end\n" * 30, "f.txt": "x" * 333}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


OPTIONS: dict[str, Any] = {"row_length": 10, "rows_per_group": 4}


def tokens_of(folder: Path | str) -> list[int]:
    files = sorted(Path(folder).glob("*.parquet"))
    return [int(token) for file in files for token in to_rows(pq.read_table(file))["tokens"].reshape(-1)]


def bytes_of(folder: Path | str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def everything_of(name: str) -> list[int]:
    return [int(token) for token in ByteTokenizer()(TEXTS[name])]


def everything() -> list[int]:
    return [token for name in sorted(TEXTS) for token in everything_of(name)]


def test_rows_are_the_documents_end_to_end(texts: Path, tmp_path: Path) -> None:
    whole = everything()
    made = prepare_text(texts, tmp_path / "out", **OPTIONS)
    assert tokens_of(made.path) == whole[: len(whole) // 10 * 10]
    assert (made.rows, made.tokens, made.already_done) == (len(whole) // 10, len(whole) // 10 * 10, False)
    source = read_source(made.path)
    assert source.rows == made.rows
    assert source.fragment_rows.tolist()[:3] == [4, 4, 4]
    assert len(source.files) == made.files == 1
    assert not (tmp_path / "out.partial").exists()


def test_the_tail_can_be_padded(texts: Path, tmp_path: Path) -> None:
    whole = everything()
    assert len(whole) % 10
    made = prepare_text(texts, tmp_path / "out", tail="pad", pad=257, **OPTIONS)
    assert tokens_of(made.path) == whole + [257] * (-len(whole) % 10)


def test_the_same_input_gives_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    assert bytes_of(prepare_text(texts, tmp_path / "one", **OPTIONS).path) == bytes_of(
        prepare_text([texts / "b", texts / "*.txt"], tmp_path / "two", **OPTIONS).path
    )


class _Interrupted(Exception):
    pass


def _failing(after: int) -> Callable[[str], Any]:
    calls = 0

    def bytes_but_not_for_ever(text: str) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise _Interrupted
        return ByteTokenizer()(text)

    return bytes_but_not_for_ever


PARTS = {**OPTIONS, "part_bytes": 1}
"""Every document is a part; the empty one has one with the next."""


def test_leftovers_of_parts_make_the_last_rows(texts: Path, tmp_path: Path) -> None:
    made = prepare_text(texts, tmp_path / "out", tail="pad", pad=257, **PARTS)
    names = [["a.txt"], ["b/c.txt"], ["b/d.txt", "e.txt"], ["f.txt"]]
    pieces = [[token for name in each for token in everything_of(name)] for each in names]
    whole = [token for each in pieces for token in each[: len(each) // 10 * 10]]
    rest = [token for each in pieces for token in each[len(each) // 10 * 10 :]]
    assert tokens_of(made.path) == whole + rest + [257] * (-len(rest) % 10)
    # "hello" fills no row.
    files = [each.name for each in sorted(Path(made.path).glob("*.parquet"))]
    assert files == [f"part-0000{number}.parquet" for number in (1, 2, 3, 4)]


def test_interrupted_anywhere_it_goes_on_and_ends_with_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    reference = bytes_of(prepare_text(texts, tmp_path / "whole", tokenizer=_failing(99), **PARTS).path)
    for after in range(1, 1 + len(TEXTS)):  # once for its beginning, then once for each
        out = tmp_path / f"out-{after}"
        with pytest.raises(_Interrupted):
            prepare_text(texts, out, tokenizer=_failing(after), **PARTS)
        assert not out.exists(), "a folder that is there is whole"
        partial = out.with_name(out.name + ".partial")
        with pytest.raises(DataError, match="out-.*partial is not complete: it is being prepared"):
            read_source(partial)
        finished = {file.name: file.stat().st_mtime_ns for file in partial.glob("*.parquet")}
        shown: list[PrepareProgress] = []
        prepare_text(texts, out, tokenizer=_failing(99), progress=shown.append, **PARTS)
        assert bytes_of(out) == reference
        assert shown[-1].parts_kept == [0, 1, 2, 2, 3][after - 1]
        assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished, (
            "finished files are not made again"
        )


def test_a_finished_file_that_was_damaged_is_made_again(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = bytes_of(prepare_text(texts, tmp_path / "whole", tokenizer=_failing(99), **PARTS).path)
    with pytest.raises(_Interrupted):
        prepare_text(texts, tmp_path / "out", tokenizer=_failing(5), **PARTS)
    damaged = tmp_path / "out.partial" / "part-00001.parquet"
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    (tmp_path / "out.partial" / "part-00002.parquet").unlink()
    prepare_text(texts, tmp_path / "out", tokenizer=_failing(99), **PARTS)
    assert bytes_of(tmp_path / "out") == reference
    assert caplog.text.count("is damaged or missing, and is made again") == 2


def test_a_finished_folder_that_lacks_a_file_is_named(texts: Path, tmp_path: Path) -> None:
    made = prepare_text(texts, tmp_path / "out", **PARTS)
    (Path(made.path) / "part-00003.parquet").unlink()
    with pytest.raises(DataError, match="out/part-00003.parquet is missing or damaged: delete the folder"):
        prepare_text(texts, tmp_path / "out", **PARTS)


def test_finished_it_says_so_at_once(texts: Path, tmp_path: Path) -> None:
    made = prepare_text(texts, tmp_path / "out", **OPTIONS)
    before = {file: file.stat().st_mtime_ns for file in Path(made.path).iterdir()}
    again = prepare_text(texts, tmp_path / "out", **OPTIONS)
    assert again.already_done
    assert (again.rows, again.tokens, again.files) == (made.rows, made.tokens, made.files)
    assert {file: file.stat().st_mtime_ns for file in Path(made.path).iterdir()} == before
    assert "already prepared" in str(again)
    assert " prepared: " in str(made)


def test_other_options_in_the_same_folder_show_the_difference(texts: Path, tmp_path: Path) -> None:
    prepare_text(texts, tmp_path / "out", **OPTIONS)
    with pytest.raises(DataError, match="row_length was 10 and is 12. Delete it"):
        prepare_text(texts, tmp_path / "out", **{**OPTIONS, "row_length": 12})
    with pytest.raises(DataError, match="tail was 'drop' and is 'pad'; pad was None and is 0"):
        prepare_text(texts, tmp_path / "out", **OPTIONS, tail="pad")
    file = texts / "e.txt"
    before = file.read_text()
    file.write_text(before[::-1])
    with pytest.raises(DataError, match="inputs was '5 files, .* and is '5 files"):
        prepare_text(texts, tmp_path / "out", **OPTIONS)
    file.write_text(before)
    (texts / "new.txt").write_text("more")
    with pytest.raises(DataError, match="inputs was '5 files, .* and is '6 files"):
        prepare_text(texts, tmp_path / "out", **OPTIONS)


def test_other_options_after_an_interruption_are_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(_Interrupted):
        prepare_text(texts, tmp_path / "out", tokenizer=_failing(3), **OPTIONS)
    with pytest.raises(
        DataError, match=r"out\.partial was made with other inputs or options: row_length was 10 and is 12"
    ):
        prepare_text(texts, tmp_path / "out", tokenizer=_failing(99), **{**OPTIONS, "row_length": 12})


class _Letters:
    """Maps every letter to one number, which is not part of its name."""

    def __init__(self, number: int, name_or_path: str = "") -> None:
        self.number = number
        self.name_or_path = name_or_path

    def encode(self, text: str) -> list[int]:
        return [self.number] * len(text)


def test_another_tokenizer_of_the_same_name_is_told_apart(texts: Path, tmp_path: Path) -> None:
    prepare_text(texts, tmp_path / "out", tokenizer=_Letters(1, "small").encode, **OPTIONS)
    with pytest.raises(DataError, match=r"_Letters.encode small' and is '.*_Letters.encode large'"):
        prepare_text(texts, tmp_path / "out", tokenizer=_Letters(1, "large").encode, **OPTIONS)
    with pytest.raises(
        DataError, match=r"inputs or options: first_tokens was '5 tokens, \w+' and is '5 tokens, \w+'\. Delete it"
    ):
        prepare_text(texts, tmp_path / "out", tokenizer=_Letters(2, "small").encode, **OPTIONS)
    assert prepare_text(texts, tmp_path / "out", tokenizer=_Letters(1, "small").encode, **OPTIONS).already_done


def test_the_output_may_lie_in_the_input(texts: Path, tmp_path: Path) -> None:
    reference = prepare_text(texts, tmp_path / "out", **PARTS)
    with pytest.raises(_Interrupted):
        prepare_text(texts, texts / "out", tokenizer=_failing(5), **PARTS)
    assert list((texts / "out.partial").glob("*.parquet"))
    made = prepare_text(texts, texts / "out", tokenizer=_failing(99), **PARTS)
    assert tokens_of(made.path) == tokens_of(reference.path)
    assert prepare_text(texts, texts / "out", tokenizer=_failing(99), **PARTS).already_done
    with pytest.raises(DataError, match="contains only files of the output folder"):
        prepare_text(made.path, made.path, **PARTS)


def test_who_makes_the_same_folder_meanwhile_is_waited_for(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Locks belong to open files, so threads can stand for processes here."""
    running, most = 0, 0

    def counted(text: str) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return ByteTokenizer()(text)

    reference = tokens_of(prepare_text(texts, tmp_path / "whole", **OPTIONS).path)
    out = tmp_path / "out"
    with ThreadPoolExecutor(3) as pool, locked(tmp_path / "out.partial"):
        made = [pool.submit(prepare_text, texts, out, tokenizer=counted, **OPTIONS) for _ in range(3)]
        deadline = time.monotonic() + 60
        while caplog.text.count("waiting for another process") < 3:  # each has read the start of the input
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)
        assert [each.name for each in (tmp_path / "out.partial").iterdir()] == [".lock"]
        most = 0
    assert sorted(each.result().already_done for each in made) == [False, True, True]
    assert most == 1
    assert tokens_of(out) == reference
    assert not (tmp_path / "out.partial").exists()
    assert not (out / ".lock").exists()


def test_a_folder_of_somebody_else_is_left_alone(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="was not made by `prepare`.*Choose another output folder"):
        prepare_text(texts, tmp_path / "out", **OPTIONS)


def test_any_function_is_a_tokenizer(texts: Path, tmp_path: Path) -> None:
    def lengths(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    made = prepare_text(texts, tmp_path / "out", row_length=5, tokenizer=lengths)
    assert tokens_of(made.path)[:5] == [5, 5, 5, 5, 5]
    assert "lengths" in json.loads(Path(made.path, "_prepared.json").read_text())["tokenizer"]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lambda text: [[1]], r"returned int64 of shape \(1, 1\)"),
        (lambda text: [0.5], "a flat sequence of integers"),
        (lambda text: [-1], "returned tokens from -1 to -1"),
        (lambda text: [2**31], "stored as int32"),
    ],
)
def test_a_tokenizer_that_returns_something_else_is_named(
    texts: Path, tmp_path: Path, tokenizer: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare_text(texts, tmp_path / "out", tokenizer=tokenizer, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_length": 0}, "must be integers >= 1, got 0, 4"),
        ({"tail": "keep"}, "tail must be 'drop' or 'pad', got 'keep'"),
        (
            {"row_length": 10**6},
            "row_length 1000000 exceeds the tokens of all inputs; use a smaller row_length, or tail='pad'",
        ),
    ],
)
def test_options_that_make_no_sense(texts: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare_text(texts, tmp_path / "out", **{**OPTIONS, **options})


def test_input_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file or folder, and matches no file as a glob"):
        prepare_text(tmp_path / "nothing", tmp_path / "out", row_length=4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is an empty folder"):
        find_files(tmp_path / "empty")
    with pytest.raises(DataError, match="inputs is empty"):
        find_files([])


def test_progress_is_shown(texts: Path, tmp_path: Path) -> None:
    shown: list[PrepareProgress] = []
    made = prepare_text(texts, tmp_path / "out", progress=shown.append, **OPTIONS)
    assert (shown[-1].parts_done, shown[-1].parts, shown[-1].rows) == (1, 1, made.rows)
    assert "1 of 1 part," in str(shown[-1])


def test_held_out_files_are_chosen_by_name(tmp_path: Path) -> None:
    for index in range(200):
        (tmp_path / f"{index}.txt").write_text("x")
    train, held_out = split_files(tmp_path, held_out=0.1)
    assert sorted(train + held_out) == find_files(tmp_path)
    assert 10 <= len(held_out) <= 30
    assert (train, held_out) == split_files(tmp_path / "*.txt", held_out=0.1)
    assert held_out != split_files(tmp_path, held_out=0.1, seed=1)[1]
    train[0].unlink()
    assert split_files(tmp_path, held_out=0.1)[1] == held_out
    assert len(split_files(tmp_path, held_out=1e-9)[1]) == 1
    with pytest.raises(DataError, match="between 0 and 1, got 1"):
        split_files(tmp_path, held_out=1)
    with pytest.raises(DataError, match="a split needs at least two"):
        split_files(tmp_path / "7.txt")


def test_bytes_and_back() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer("naïve ✓")
    assert tokens.dtype == np.int32
    assert (tokens[0], tokens[-1], tokens.max() < tokenizer.vocab_size) == (256, 257, True)
    assert tokenizer.decode(tokens) == "naïve ✓"
    assert tokenizer.decode([255, 65]) == "\N{REPLACEMENT CHARACTER}A"
