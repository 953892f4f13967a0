"""Padded batches within a budget of tokens: every document once, little padding, exact resumes, and token means."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import sysconfig
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from headway.datasets.errors import DataError
from headway.datasets.formats import jsonl, token_budget
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.formats.token_budget import TokenBatches, TokenBudget, TokenBudgetSource, cut
from headway.datasets.mixture import Mixture
from headway.datasets.packing import Packed
from headway.datasets.sources import Parquet
from headway.datasets.stream import Stream
from headway.datasets.tokenizers import ByteTokenizer
from headway.trainer import Callback, CheckpointConfig, Trainer, TrainerConfig, World
from tests.distributed import run_on_ranks

from .conftest import shard_info, write

BUDGET = 128


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=80),
    slack=st.integers(0, 60),
    multiple=st.integers(1, 9),
)
def test_every_document_is_in_one_batch_within_the_budget(lengths: list[int], slack: int, multiple: int) -> None:
    budget = -(-70 // multiple) * multiple + slack
    order, sizes = cut(np.array(lengths, dtype=np.int64), budget, multiple)
    assert sorted(order.tolist()) == [at for at, length in enumerate(lengths) if length]
    assert sum(sizes) == len(order)
    cuts = np.cumsum([0, *sizes]).tolist()
    for begin, end in zip(cuts, cuts[1:], strict=False):
        longest = -(-lengths[order[begin]] // multiple) * multiple
        assert longest == max(-(-lengths[at] // multiple) * multiple for at in order[begin:end])
        assert 0 < longest * (end - begin) <= budget
        assert end == len(order) or longest * (end - begin + 1) > budget, "another document would have fitted"


def words(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write documents of 3 to 90 letters, all different and half of them short."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, 20 if draw.random() < 0.5 else 87) for _ in range(count)]
    texts = [f"{number:03}" + "".join(draw.choices("abcdefgh", k=length)) for number, length in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def budgeted(path: Path, **options: Any) -> TokenBudget:
    folder = path.parent / "index"
    defaults = {"tokens": BUDGET, "index": folder, "tokenizer": ByteTokenizer()}
    return TokenBudget(JsonLines(path, index=folder), **{**defaults, **options})


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several groups of small data."""
    monkeypatch.setattr(jsonl, "_FRAGMENT_ROWS", 16)
    monkeypatch.setattr(token_budget, "_GROUP_BATCHES", 8)


def texts_of(columns: Mapping[str, torch.Tensor]) -> list[str]:
    return [ByteTokenizer().decode(row[mask]) for row, mask in zip(columns["tokens"], columns["mask"], strict=True)]


def opened(data: Any, rank: int = 0, world_size: int = 1, **options: Any) -> Stream:
    engine = options.pop("engine", "threads")
    stream = Stream(data, engine=engine, tail="keep")
    stream.setup(shard_info(rank, world_size, micro_batch_size=1, **options))
    return stream


def steps(data: Any, *, world_size: int = 1, epoch: int = 0, offset: int = 0, **options: Any) -> list[list[Any]]:
    """Return the id and the texts of each padded batch of each update."""
    ranks = []
    for rank in range(world_size):
        stream = opened(data, rank, world_size, **options)
        ranks.append([])
        for batch in stream.epoch(epoch, offset=offset):
            rows = zip(batch.micro_batches, batch.num_samples, strict=True)
            ranks[-1].append([texts_of(columns) for columns, counts in rows if counts])
            assert [len(ids) for ids in batch.row_ids()] == list(batch.num_samples)
        stream.close()
    return [[row for own in step for row in own] for step in zip(*ranks, strict=True)]


def test_an_epoch_has_every_document_once_in_batches_within_the_budget(tmp_path: Path, engine: str) -> None:
    path = words(tmp_path / "words.jsonl", 300)
    stream = opened(budgeted(path, pad=7, multiple_of=4), engine=engine)
    assert isinstance(stream.source, TokenBudgetSource)
    orders, padding, tokens = [], Counter[int](), Counter[int]()
    for epoch in range(2):
        orders.append([])
        for batch in stream.epoch(epoch):
            assert max(batch.num_samples) == 1
            for columns, ids in zip(batch.micro_batches, batch.row_ids(), strict=True):
                assert {name: each.dtype for name, each in columns.items()} == {
                    "tokens": torch.int32, "mask": torch.bool, "labels": torch.int64, "positions": torch.int32,
                    "document_ids": torch.int32, "lengths": torch.int32,
                }  # fmt: skip
                if not ids:
                    continue
                b, t = columns["tokens"].shape
                assert {each.shape for name, each in columns.items() if name != "lengths"} == {(b, t)}
                assert b * t <= BUDGET
                assert t % 4 == 0
                mask, lengths = columns["mask"], columns["lengths"].tolist()
                assert mask.sum(1).tolist() == lengths == sorted(lengths, reverse=True)
                assert t - lengths[0] < 4
                assert torch.equal(mask, torch.arange(t) < columns["lengths"][:, None])
                assert (columns["tokens"][~mask] == 7).all()
                assert torch.equal(columns["labels"], columns["tokens"].long().masked_fill(~mask, -100))
                assert torch.equal(columns["positions"], torch.arange(t, dtype=torch.int32) * mask)
                assert torch.equal(columns["document_ids"], mask.int() - 1)
                padding[epoch] += int((~mask).sum())
                tokens[epoch] += int(mask.sum())
                orders[-1] += texts_of(columns)
                names = ids[0].split("+")
                assert all(name.startswith("words.jsonl:") for name in names[:4])
                assert len(names) == min(b, 5)
                assert b <= 4 or names[4] == f"{b - 4} more"
    stream.close()
    expected = sorted(json.loads(line)["text"] for line in path.read_text().splitlines())
    assert sorted(orders[0]) == sorted(orders[1]) == expected
    assert orders[0] != orders[1]
    assert set(padding.values()) == {stream.source.padding}
    assert set(tokens.values()) == {stream.source.tokens}


def test_functions_of_real_code_need_a_fraction_of_the_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of Python's own modules, in groups of the usual size, and random batches beside it."""
    monkeypatch.undo()
    rows = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py")):
        source = path.read_bytes().decode(errors="replace")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                rows.append(json.dumps({"text": "".join(lines[node.lineno - 1 : node.end_lineno])}))
    (tmp_path / "functions.jsonl").write_text("\n".join(rows))
    source = budgeted(tmp_path / "functions.jsonl", tokens=8192, max_length=2048, on_too_long="truncate").open()
    assert source.tokens > 500_000
    lengths = source.budget.kept(source.index.arrays["lengths"]).tolist()
    random.Random(0).shuffle(lengths)
    padding = at = 0
    while at < len(lengths):
        size = 1
        while at + size < len(lengths) and max(lengths[at : at + size + 1]) * (size + 1) <= 8192:
            size += 1
        padding += size * max(lengths[at : at + size]) - sum(lengths[at : at + size])
        at += size
    shares = [each / (each + source.tokens) for each in (source.padding, padding)]
    assert shares[0] < 0.05
    assert shares[1] > 0.3


def test_every_number_of_ranks_gets_the_same_batches(tmp_path: Path) -> None:
    data = budgeted(words(tmp_path / "words.jsonl", 400))
    whole = steps(data)
    assert len(whole) > 10
    for world_size in range(2, 6):
        assert steps(data, world_size=world_size) == whole
    assert steps(data, world_size=3)[:5] + steps(data, world_size=2, offset=40) == whole
    assert sorted(map(str, sum(steps(data, training=False), []))) == sorted(map(str, sum(whole, [])))


def test_resuming_at_99_percent_reads_nothing_of_what_was_consumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = budgeted(words(tmp_path / "words.jsonl", 900))
    calls: list[int] = []
    read = TokenBatches.read
    monkeypatch.setattr(TokenBatches, "read", lambda self: (calls.append(self.first), read(self))[1])
    whole = steps(data)
    groups = len(data.open().fragment_rows)
    assert groups > 10
    calls.clear()
    # An evaluation, which does not go on to the next epoch.
    plan = opened(data, training=False)
    offset = plan.samples_in_epoch(0) * 99 // 100 // 8 * 8
    plan.close()
    in_order = steps(data, training=False)
    assert len(set(calls)) == groups
    calls.clear()
    assert steps(data, training=False, offset=offset) == in_order[offset // 8 :]
    assert len(calls) <= 8, "the last group of each of the shards"
    assert steps(data, offset=offset) == whole[offset // 8 :]


def test_documents_that_are_too_long_are_refused_truncated_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in (3, 40, 8, 0, 9)))
    with pytest.raises(DataError, match=r"some.jsonl:2 of .* has 42 tokens, more than the 10 of max_length: set"):
        budgeted(path, max_length=10).open()
    assert not list((tmp_path / "index").glob("batches*"))
    caplog.set_level("INFO")
    truncated = budgeted(path, max_length=10, on_too_long="truncate").open()
    assert sorted(truncated.fragment(0).read()["lengths"][0].tolist()) == [2, 5, 10, 10, 10]
    assert "put 5 documents of" in caplog.text
    assert "2 of 5 documents of" in caplog.text
    assert "have more than 10 tokens, and are truncated" in caplog.text
    skipped = budgeted(path, max_length=10, on_too_long="skip").open()
    assert sorted(skipped.fragment(0).read()["lengths"][0].tolist()) == [2, 5, 10]
    assert "put 3 documents of" in caplog.text
    assert "have more than 10 tokens, and are left out" in caplog.text
    assert len({truncated.fingerprint, skipped.fingerprint}) == 2
    with pytest.raises(DataError, match=r"some.jsonl has no tokens"):
        budgeted(path, max_length=1, on_too_long="skip").open()


def test_tokens_of_parquet_need_no_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", range(40), length=5)
    data = TokenBudget(Parquet(tmp_path / "a.parquet"), tokens=32, index=tmp_path, column="tokens")
    stream = opened(data)
    seen = [
        row[0]
        for batch in stream.epoch(0)
        for columns, count in zip(batch.micro_batches, batch.num_samples, strict=True)
        for row in columns["tokens"].tolist() * count
    ]
    stream.close()
    assert sorted(seen) == list(range(40))
    assert data.open().padding == 0


def test_numbers_of_the_documents_come_with_them(tmp_path: Path, engine: str) -> None:
    draw = random.Random(0)
    texts = [f"{number:03}" + "x" * draw.randint(0, 60) for number in range(200)]
    rows = [{"text": text, "label": number % 7, "weight": number / 2, "note": "a"} for number, text in enumerate(texts)]
    path = tmp_path / "labeled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = budgeted(path, columns=["label", "weight"], max_length=50, on_too_long="skip")
    stream = opened(data, engine=engine)
    seen = set()
    for batch in stream.epoch(0):
        for columns, counts in zip(batch.micro_batches, batch.num_samples, strict=True):
            assert columns["label"].dtype == torch.int64
            assert columns["weight"].dtype == torch.float64
            if counts:
                numbers = zip(texts_of(columns), columns["label"].tolist(), columns["weight"].tolist(), strict=True)
                seen |= set(numbers)
    stream.close()
    kept = [number for number, text in enumerate(texts) if len(text) + 2 <= 50]
    assert 100 < len(kept) < 200
    assert seen == {(texts[number], number % 7, number / 2) for number in kept}
    assert budgeted(path).open().fingerprint != budgeted(path, columns=["label"]).open().fingerprint
    with pytest.raises(DataError, match="column 'note' must have a number for each document"):
        budgeted(path, columns=["note"]).open()
    with pytest.raises(DataError, match="the documents have no column 'labels'; did you mean 'label'"):
        budgeted(path, columns=["labels"]).open()
    for names in ("label", ["lengths"], ["text"]):
        with pytest.raises(DataError, match="columns must be a list of names other than tokens, mask, positions"):
            budgeted(path, columns=names)


class Counting(ByteTokenizer):
    """Counts its documents."""

    calls = 0

    def __call__(self, text: str) -> Any:
        Counting.calls += 1
        return super().__call__(text)


def test_documents_are_tokenized_once_and_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "calls", 0)
    monkeypatch.setattr("headway.datasets.formats.token_file._SAMPLE_TOKENS", 1)
    data = budgeted(words(tmp_path / "words.jsonl", 200), tokenizer=Counting())
    first = steps(data)
    # Beside the documents themselves, each start tokenizes the first one.
    assert Counting.calls == 201
    assert steps(data) == first
    assert Counting.calls == 202
    (rows,) = (tmp_path / "index").glob("*.rows")
    source = data.open()
    assert rows.stat().st_size == 4 * source.tokens
    content = bytearray(rows.read_bytes())
    content[5] ^= 1
    rows.write_bytes(content)
    with pytest.raises(DataError, match=rf"{rows.name} has other tokens than when it was written: remove"):
        source.fragment(0).read()
    rows.write_bytes(content[:40])
    with pytest.raises(DataError, match=rf"{rows.name} is not complete: remove"):
        data.open()


def test_what_cannot_be_combined_is_refused(tmp_path: Path) -> None:
    path = words(tmp_path / "words.jsonl", 50)
    data = budgeted(path)
    for size in (None, 2):
        with pytest.raises(DataError, match=rf"set config.micro_batch_size=1, .* micro_batch_size is {size}"):
            Stream(data).setup(shard_info(micro_batch_size=size))
    for options, message in (
        ({"tokens": 0}, "tokens must be an integer >= 1, got 0"),
        ({"tokens": "64"}, "tokens must be an integer >= 1, got '64'"),
        ({"multiple_of": 0}, "multiple_of must be an integer >= 1, got 0"),
        ({"max_length": BUDGET + 1}, "max_length must be from 1 to 128, .*, got 129"),
        ({"multiple_of": 100}, "max_length must be from 1 to 100, .* a multiple of 100, got 128"),
        ({"on_too_long": "cut"}, "on_too_long must be 'raise', 'truncate' or 'skip', got 'cut'"),
    ):
        with pytest.raises(DataError, match=message):
            budgeted(path, **options)
    packed = Packed(JsonLines(path), length=8, index=tmp_path, tokenizer=ByteTokenizer())
    for other, message in (
        (Mixture({"words": (data, 1)}), "make a Mixture of TokenBudget data"),
        (data, "TokenBudget makes rows of them: pass its data"),
        (packed, "Packed makes rows of them: pass its data"),
    ):
        with pytest.raises(DataError, match=message):
            TokenBudget(other, tokens=8, index=tmp_path)
    mixture = Mixture({"packed": (packed, 1), "padded": (data, 1)})
    with pytest.raises(DataError, match="source 'padded' of the mixture gives padded batches and 'packed' gives rows"):
        opened(mixture)


def test_a_mixture_of_token_budgets_resumes_at_another_world_size(tmp_path: Path) -> None:
    data = Mixture(
        {
            name: (budgeted(words(tmp_path / f"{name}.jsonl", count, seed=count)), weight)
            for name, count, weight in (("web", 400, 3), ("code", 150, 1))
        },
        on_end="drop",
    )
    whole = steps(data)
    assert len({text for step in whole for batch in step for text in batch}) == 550
    assert sum(len(batch) for step in whole for batch in step) == 550
    assert steps(data, world_size=3)[:4] + steps(data, world_size=2, offset=32) == whole
    stream = opened(data)
    (batch,) = [next(stream.epoch(0))]
    assert {each["source"].shape for each in batch.micro_batches} == {torch.Size([])}
    stream.close()


def test_a_transform_gets_batches_of_any_shape(tmp_path: Path, engine: str) -> None:
    data = budgeted(words(tmp_path / "words.jsonl", 100))
    stream = Stream(data, engine=engine, transforms=[_doubled])  # type: ignore[arg-type]
    stream.setup(shard_info(micro_batch_size=1))
    for columns in next(stream.epoch(0)).micro_batches:
        assert torch.equal(columns["twice"], 2 * columns["tokens"])
        assert torch.equal(columns["labels"], columns["twice"])
        assert columns["mask"].shape == columns["tokens"].shape
    stream.close()


def _doubled(rows: dict[str, Any]) -> dict[str, Any]:
    assert set(rows) == {"tokens", "lengths"}
    twice = [2 * each for each in rows["tokens"]]
    return {**rows, "twice": twice, "labels": twice}


class Letters(Trainer[TrainerConfig]):
    """Predicts each token from itself, by the mean over all tokens, and writes down the texts of each update."""

    folder: Path

    def configure_models(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Embedding(258, 4), torch.nn.Linear(4, 258))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    def configure_dataloaders(self) -> Any:
        data = budgeted(self.folder / "words.jsonl")
        return Stream(data, engine="threads", tail="keep"), Stream(data, engine="threads")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.model, batch) / batch["lengths"].sum()

    def loss_weight(self, batch: Any) -> torch.Tensor:
        if self.training:  # not called for padding that keeps the ranks in step
            with (self.folder / f"seen-{self.world.rank}").open("a") as file:
                file.write(json.dumps([self.global_step, texts_of(batch)]) + "\n")
        return batch["lengths"].sum()


def token_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class KillAt(Callback):
    """Kills rank 0 after an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        if trainer.global_step == self.step and trainer.world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(world: World, folder: Path, run: str, kill_at: int | None = None, exact: bool = False) -> dict[str, Any]:
    Letters.folder = folder
    config = TrainerConfig(
        max_epochs=2,
        global_batch_size=8,
        micro_batch_size=1,
        exact=exact,
        checkpoint=CheckpointConfig(every="3 steps"),
    )
    callbacks = [] if kill_at is None else [KillAt(kill_at)]
    trainer = Letters(config, run_dir=folder / run, world=world, callbacks=callbacks)
    result = trainer.fit()
    return {
        "steps": result.steps,
        "loss": result.metrics["validation/loss"],
        "weights": {name.removeprefix("module."): each.clone() for name, each in trainer.model.state_dict().items()},
    }


def _reference(folder: Path) -> dict[str, Any]:
    """Train in plain PyTorch: the mean over all tokens of all batches of an update."""
    model = torch.manual_seed(1) and torch.nn.Sequential(torch.nn.Embedding(258, 4), torch.nn.Linear(4, 258))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stream = opened(budgeted(folder / "words.jsonl"))
    for epoch in range(2):
        for batch in stream.epoch(epoch):
            own = [each for each, count in zip(batch.micro_batches, batch.num_samples, strict=True) if count]
            loss = sum(token_loss(model, each) for each in own) / sum(int(each["lengths"].sum()) for each in own)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    stream.close()
    validation = opened(budgeted(folder / "words.jsonl"), training=False, global_batch_size=1)
    batches = [batch.micro_batches[0] for batch in validation.epoch(0)]
    with torch.no_grad():
        loss = sum(token_loss(model, each) for each in batches) / sum(int(each["lengths"].sum()) for each in batches)
    return {"weights": model.state_dict(), "loss": float(loss)}


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, other["weights"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_loss_is_the_mean_over_all_tokens_on_any_number_of_ranks(tmp_path: Path, exact: bool) -> None:
    words(tmp_path / "words.jsonl", 300)
    expected = _reference(tmp_path)
    runs = [result for size in (1, 3) for result in run_on_ranks(_train, size, tmp_path, f"{size}", None, exact)]
    for result in runs:
        _same(result, expected)
        if exact:
            assert all(torch.equal(each, runs[0]["weights"][name]) for name, each in result["weights"].items())


def test_a_killed_run_resumes_on_other_ranks_and_learns_every_document_once(tmp_path: Path) -> None:
    words(tmp_path / "words.jsonl", 300)
    expected = _reference(tmp_path)
    for world_size, kill_at in ((3, 5), (1, 13)):
        with pytest.raises(AssertionError, match="died|gloo"):
            run_on_ranks(_train, world_size, tmp_path, "run", kill_at)
    for result in run_on_ranks(_train, 2, tmp_path, "run"):
        _same(result, expected)
    by_step: dict[int, set[str]] = {}
    for path in tmp_path.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, texts = json.loads(line)
            by_step.setdefault(step, set()).update(texts)
    per_epoch = result["steps"] // 2
    texts = sorted(json.loads(line)["text"] for line in (tmp_path / "words.jsonl").read_text().splitlines())
    for epoch in range(2):
        # A step that was repeated after the kill had the same documents: the set of each step did not grow.
        own = [text for step in range(per_epoch) for text in by_step[epoch * per_epoch + step]]
        assert sorted(own) == texts
