"""Map-style datasets of Hugging Face: every row once in any order, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from headway.datasets.errors import DataError
from headway.datasets.formats import hugging_face
from headway.datasets.formats.hugging_face import HuggingFace
from headway.datasets.stream import Stream

from .conftest import shard_info


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """103 rows on disk, behind a filter, in several fragments."""
    monkeypatch.setattr(hugging_face, "_FRAGMENT_ROWS", 16)
    columns = {"id": range(206), "text": [f"row {i}" for i in range(206)], "tokens": [[i, i] for i in range(206)]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    return datasets.load_from_disk(tmp_path / "saved").select(range(0, 206, 2))


def batches(data: Any, *, rank: int = 0, world_size: int = 1, offset: int = 0) -> Any:
    stream = Stream(data, engine="threads", tail="keep")
    stream.setup(shard_info(rank, world_size))
    try:
        return list(stream.epoch(0, offset=offset))
    finally:
        stream.close()


def rows(data: Any, *, world_size: int = 1, offset: int = 0) -> list[list[int]]:
    """Return the ids of each global batch, by rank."""
    ranks = [batches(data, rank=rank, world_size=world_size, offset=offset) for rank in range(world_size)]
    return [
        [row for batch in step for row in batch.micro_batches[0]["id"].tolist()] for step in zip(*ranks, strict=True)
    ]


def test_every_row_is_seen_once_and_a_resize_changes_nothing(dataset: Any) -> None:
    whole = rows(HuggingFace(dataset))
    assert sorted(row for batch in whole for row in batch) == list(range(0, 206, 2))
    assert rows(HuggingFace(dataset), world_size=2)[:5] + rows(HuggingFace(dataset), offset=40) == whole
    for batch in batches(HuggingFace(dataset)):
        (columns,) = batch.micro_batches
        ids = columns["id"].tolist()
        assert columns["text"] == [f"row {i}" for i in ids]
        assert torch.equal(columns["tokens"], columns["id"][:, None].expand(-1, 2))
        assert [int(name) for name in batch.row_ids()[0]] == [i // 2 for i in ids]
    assert set(batches(HuggingFace(dataset, columns=["id"]))[0].micro_batches[0]) == {"id"}


def test_a_format_selects_columns_and_a_transform_is_refused(dataset: Any) -> None:
    (columns,) = batches(HuggingFace(dataset.with_format("torch", columns=["id"])))[0].micro_batches
    assert set(columns) == {"id"}
    with pytest.raises(DataError, match=r"with_transform, which would not be called: pass one to the stream"):
        HuggingFace(dataset.with_transform(lambda rows: rows))


def test_the_fingerprint_follows_the_rows_and_the_version(dataset: Any) -> None:
    first = HuggingFace(dataset).open().fingerprint
    assert HuggingFace(dataset.select(range(103))).open().fingerprint == first
    changed = [
        HuggingFace(dataset, version="2"),
        HuggingFace(dataset, columns=["id"]),
        HuggingFace(dataset.select(range(102))),
    ]
    assert first not in {each.open().fingerprint for each in changed}


def test_what_does_not_fit_is_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match="must be a map-style Dataset of Hugging Face.*got IterableDataset"):
        HuggingFace(dataset.to_iterable_dataset())
    with pytest.raises(DataError, match="got DatasetDict"):
        HuggingFace(datasets.DatasetDict({"train": dataset}))
    with pytest.raises(DataError, match="no column 'txt'; did you mean 'text'"):
        HuggingFace(dataset, columns=["txt"]).open()
    with pytest.raises(DataError, match="the dataset has no rows"):
        HuggingFace(dataset.select([])).open()
    with pytest.raises(DataError, match="rows 0 to 1 of the dataset: column 'x' has 1 nulls"):
        batches(HuggingFace(datasets.Dataset.from_dict({"x": [1, None]})))
