"""Norm and clipping are bitwise equal to torch's, for all kinds of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.trainer import NonFiniteError, World
from headway.trainer.callbacks import GradientNorms
from headway.trainer.step.gradients import clip_norm, total_norm
from tests.tiny import Losses, Rows, TinyConfig, TinyTrainer, weights

KINDS = {
    "float32": [torch.float32] * 3,
    "bfloat16": [torch.bfloat16] * 3,
    "mixed": [torch.float32, torch.bfloat16, torch.float64],
}


def parameters(dtypes: list[torch.dtype]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for shape, dtype in zip([(3, 4), (7,), (100, 30)], dtypes, strict=True):
        made.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        made[-1].grad = torch.randn(shape, generator=generator).to(dtype)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [0.37, 1.0, 3.0, 1e6])
def test_norm_and_clipping_equal_torch_to_the_last_bit(kind: str, limit: float) -> None:
    ours, torchs = parameters(KINDS[kind]), parameters(KINDS[kind])
    norm, expected = total_norm([p.grad for p in ours]), get_total_norm([p.grad for p in torchs])
    assert torch.equal(norm, expected)
    clip_norm(ours, limit, norm)
    clip_grads_with_norm_(torchs, limit, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_gives_a_norm_that_is_not(value: float) -> None:
    given = parameters(KINDS["float32"])
    given[1].grad[3] = value
    assert not total_norm([p.grad for p in given]).isfinite()


def test_the_norm_has_no_graph_even_where_a_gradient_has() -> None:
    given = parameters(KINDS["float32"])
    given[0].grad.requires_grad_()
    norm = total_norm([p.grad for p in given])
    assert not norm.requires_grad
    clip_norm(given, 0.1, norm)


class Grouped(TinyTrainer):
    """Its optimizer has the parameters in another order than the model."""

    def configure_models(self) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(9)), torch.nn.Linear(6, 3))
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}

    def configure_optimizers(self) -> None:
        matrices = [each for each in self.model.parameters() if each.dim() > 1]
        others = [each for each in self.model.parameters() if each.dim() < 2]
        self.optimizer = torch.optim.SGD([{"params": others}, {"params": matrices}], lr=0.5)


def test_the_norm_adds_in_the_order_of_the_model_as_a_plain_loop_does() -> None:
    trainer, rows = Grouped(TinyConfig(max_steps=20, max_grad_norm=0.01), world=World.single("cpu")), Rows(103)
    trainer.fit()
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(9)), torch.nn.Linear(6, 3))
    norms = []
    model.load_state_dict(trainer.first)
    for _, ids in trainer.seen:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(rows.x[ids]), rows.y[ids]).backward()
        gradients = [each.grad for each in model.parameters()]
        norms.append((get_total_norm(gradients), get_total_norm(sorted(gradients, key=torch.Tensor.dim))))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(each.grad, alpha=0.5)
    assert any(not torch.equal(one, other) for one, other in norms), "the order makes no difference here"
    own = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.testing.assert_close(weights(trainer), own, atol=0, rtol=0)


class Embeds(TinyTrainer):
    """Looks up rows of a table, some of them twice in a batch."""

    sparse = True
    factor = 1.0

    def configure_models(self) -> None:
        self.model = torch.nn.Embedding(16, 3, sparse=self.sparse)
        self.head = torch.nn.Linear(3, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.model(batch["id"] // 3)).square().mean() * self.factor


class EmbedsDensely(Embeds):
    sparse = False


@pytest.mark.parametrize("bounds", [{}, {"max_grad_norm": 0.02}, {"max_grad_value": 0.01}], ids=str)
def test_a_sparse_gradient_is_measured_and_clipped_as_a_dense_one(bounds: dict[str, float]) -> None:
    config = TinyConfig(max_steps=3, num_rows=40, log_every=1, evaluate_every=None, **bounds)  # type: ignore[arg-type]
    sparse, dense = Losses(), Losses()
    one = Embeds(config, world=World.single("cpu"), callbacks=[sparse, GradientNorms(every=1)])
    other = EmbedsDensely(config, world=World.single("cpu"), callbacks=[dense, GradientNorms(every=1)])
    one.fit()
    other.fit()
    for name, value in weights(other).items():
        torch.testing.assert_close(weights(one)[name], value)
    for name in ("grad_norm", "grad_norm/model.weight"):
        assert len(sparse.of(name)) == 3
        assert sparse.of(name) == pytest.approx(dense.of(name))


def test_a_sparse_gradient_that_is_not_finite_is_blamed() -> None:
    trainer = Embeds(TinyConfig(max_steps=3, num_rows=40), world=World.single("cpu"))
    trainer.factor = float("inf")
    with pytest.raises(NonFiniteError, match=r"model\.weight"):
        trainer.fit()
