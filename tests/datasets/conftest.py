"""Small real datasets, and the settings of ranks that read them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch


def write(path: Path, ids: range, *, length: int = 4, group: int = 16, **columns: Any) -> Path:
    """Write rows {id, tokens[length]} (tokens are id, id + 1, ...) and other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.array(ids, dtype=np.int64)
    tokens = (numbers[:, None] + np.arange(length)).astype(np.int32)
    table = {
        "id": numbers,
        "tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), length),
        **columns,
    }
    pq.write_table(pa.table(table), path, row_group_size=group)
    return path


def shard_info(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    """Return an object with the attributes of `headway.trainer.data.protocols.ShardInfo`."""
    defaults = {"global_batch_size": 8, "micro_batch_size": None, "accumulation": 1, "seed": 0, "training": True}
    fixed = {"rank": rank, "world_size": world_size, "device": torch.device("cpu"), "by_shard": False}
    return SimpleNamespace(**{**fixed, **defaults, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """103 rows in three files and seven row groups."""
    write(tmp_path / "data" / "a.parquet", range(0, 40))
    write(tmp_path / "data" / "b.parquet", range(40, 80))
    write(tmp_path / "data" / "deep" / "c.parquet", range(80, 103))
    return tmp_path / "data"


# For tests of formats, which differ little between the engines.
RAY_IF_EXTENDED = pytest.mark.parametrize(
    "engine", ["threads", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended])], indirect=True
)


@pytest.fixture(params=["threads", pytest.param("ray", marks=pytest.mark.ray)])
def engine(request: pytest.FixtureRequest) -> str:
    """Both engines; Ray Data on the session's Ray."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return str(request.param)
