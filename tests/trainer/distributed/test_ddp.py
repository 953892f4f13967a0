"""DDP reduces gradients in the same buckets from the first update on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader

from headway.trainer import ConfigError, ParallelConfig, Session, World
from headway.trainer.distributed.parallelize import replicate
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer, weights


class _Mixed(nn.Module):
    """Parameters of several kinds, used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(300, 7)
        self.phases = nn.Parameter(torch.randn(300, dtype=torch.complex64))
        self.hidden = nn.Linear(300, 300)
        self.words = nn.Embedding(50, 300, sparse=True)
        self.frozen = nn.Parameter(torch.randn(300), requires_grad=False)
        self.norm = nn.BatchNorm1d(300)
        self.calls: list[str] = []
        self.register_forward_hook(lambda *_: self.calls.append("forward"))

    def forward(self, words: torch.Tensor) -> Any:
        hidden = self.norm(self.hidden(self.words(words) + self.frozen))
        return self.head(hidden * (self.phases * hidden.detach()).abs()).square().sum()


def _gradients(world: World) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    model = _Mixed()
    replicated = replicate(model, ParallelConfig(strategy="ddp"), world)
    assert model.calls == []
    assert all(each.grad is None for each in model.parameters())
    assert set(model.norm.state_dict()) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert int(model.norm.num_batches_tracked) == 0
    words = torch.randint(50, (8,), generator=torch.Generator().manual_seed(world.rank))
    found = []
    for _ in range(3):
        replicated(words).backward()
        found.append([each.grad.to_dense().clone() for each in model.parameters() if each.grad is not None])
        replicated.zero_grad()
    return found


def test_the_first_update_adds_as_all_others_do() -> None:
    for first, *others in run_on_ranks(_gradients, 3):
        assert len(first) == 8
        for gradients in others:
            assert all(map(torch.equal, first, gradients))


class _ByName(nn.Module):
    """Parameters in the root and in children, which users select by name or child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)


def _names(model: nn.Module) -> list[Any]:
    return [
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_parameters("model", recurse=False)],
        [name for name, _ in model.named_buffers()],
        [name for name, _ in model.named_modules()],
        [type(each).__name__ for each in model.modules()],
        [name for name, _ in model.named_children()],
        len(list(model.children())),
        len(list(model.parameters())),
        list(model.state_dict()),
        [model.get_parameter("head.bias").shape, model.get_submodule("encoder.1").training],
    ]


def _same_names(world: World) -> None:
    model = _ByName()
    replicated = replicate(model, ParallelConfig(strategy="ddp"), world)
    assert _names(replicated) == _names(model)
    other = _ByName()
    with torch.no_grad():
        other.scale.fill_(7)
    assert replicated.load_state_dict(other.state_dict()) == model.load_state_dict(other.state_dict())
    other.load_state_dict(replicated.state_dict())
    assert model.scale[0].item() == 7
    assert [replicated.eval().training, model.training, model.encoder[1].training] == [False] * 3
    assert [replicated.train().training, model.training, model.encoder[1].training] == [True] * 3
    seen: list[nn.Module] = []
    replicated.apply(seen.append)
    assert set(seen) == set(model.modules())
    assert {each.dtype for each in (replicated.double().scale, model.head.weight)} == {torch.float64}


def test_a_replicated_model_has_the_names_and_children_of_the_model() -> None:
    run_on_ranks(_same_names, 2)


def _with_a_weight_that_gloo_lacks(world: World) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("codes", torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ConfigError, match="gloo does not send 'codes' of dtype torch.int16: keep it in another dtype"):
        replicate(model, ParallelConfig(strategy="ddp"), world)
    model = nn.Linear(2, 1)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int16), requires_grad=False)
    with pytest.raises(ConfigError, match="gloo does not send 'codes' of dtype torch.int16: keep it in another dtype"):
        replicate(model, ParallelConfig(strategy="ddp"), world)


def test_ddp_refuses_a_weight_of_a_dtype_that_gloo_lacks() -> None:
    run_on_ranks(_with_a_weight_that_gloo_lacks, 2)


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen: list[float] = []
        self.layer.weight.register_post_accumulate_grad_hook(lambda each: self.seen.append(float(each.sum())))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows).sum()  # type: ignore[no-any-return]


def _hooked(world: World) -> int:
    model = _Hooked()
    replicated = replicate(model, ParallelConfig(strategy="ddp"), world)
    assert model.seen == []
    replicated(torch.ones(2, 3)).backward()
    return len(model.seen)


def test_a_hook_of_a_users_is_called_for_real_gradients_only() -> None:
    assert run_on_ranks(_hooked, 3) == [1, 1, 1]


class _AddsThoseBefore(TinyTrainer):
    """Adds the gradients of all earlier updates to each, as Grokfast does with their mean."""

    def __init__(self, *args: Any, copies: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies, self.kept = copies, list[list[torch.Tensor]]()

    def on_gradients_ready(self) -> None:
        self.kept.append([each.grad.detach() for each in self.model.parameters()])
        if self.copies:
            self.kept[-1] = [each.clone() for each in self.kept[-1]]
        for parameter, *gradients in zip(self.model.parameters(), *self.kept, strict=True):
            if self.copies:
                parameter.grad = sum(gradients)
            else:
                parameter.grad.data = sum(gradients)


class _StepsItself(_AddsThoseBefore):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if not self.training:
            return result
        self.backward(result["loss"])
        super().on_gradients_ready()
        self.step(self.optimizer)
        return {"loss": result["loss"].detach()}

    on_gradients_ready = TinyTrainer.on_gradients_ready


def _kept_in_steps(world: World) -> None:
    _kept(world, _StepsItself)


def _kept_in_a_session(world: World) -> None:
    found = []
    for copies in (True, False):
        torch.manual_seed(0)
        session = Session(
            TinyConfig(max_steps=4, evaluate_every=None, parallel=ParallelConfig(strategy="ddp")),
            model=nn.Linear(6, 3),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            data=DataLoader(Rows(48), batch_size=4),
            world=world,
        )
        before: list[torch.Tensor] = []
        with session as run:
            for batch in run:
                for micro_batch in run.accumulate(batch):
                    run.backward(nn.functional.cross_entropy(run.model(micro_batch["x"]), micro_batch["y"]))
                weight = run.model.weight
                before.append(weight.grad.clone() if copies else weight.grad)
                weight.grad = sum(before)
                run.step()
        found.append(run.model.weight.detach().clone())
    assert torch.equal(*found)


def _kept(world: World, kind: Any = _AddsThoseBefore) -> None:
    config = TinyConfig(max_steps=4, evaluate_every=None, parallel=ParallelConfig(strategy="ddp"))
    found = []
    for copies in (True, False):
        trainer = kind(config, world=world, copies=copies)
        trainer.fit()
        found.append(weights(trainer))
    assert all(map(torch.equal, found[0].values(), found[1].values()))


@pytest.mark.parametrize("train", [_kept, _kept_in_steps, _kept_in_a_session])
def test_gradients_may_be_kept_and_replaced(train: Any) -> None:
    run_on_ranks(train, 2)


class _PartOfAModel(TinyTrainer):
    """A loss that no longer reaches the whole model after the first update."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.model(batch["x"])
        return outputs.square().mean() if batch_idx == 0 else (self.model.last.bias * outputs.detach()).mean()


def _unfinished(world: World) -> None:
    parallel = ParallelConfig(strategy="ddp")
    with pytest.raises(RuntimeError, match="finished reduction in the prior iteration") as raised:
        _PartOfAModel(TinyConfig(max_steps=4, parallel=parallel), world=world).fit()
    assert "set parallel.find_unused_parameters=True" in "".join(raised.value.__notes__)


def test_a_loss_of_a_part_of_a_model_is_told_what_to_set() -> None:
    run_on_ranks(_unfinished, 2)


class _WeighsByGradientNorms(TinyTrainer):
    """Counts samples with large gradients less."""

    takes_wrapped = False

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        model = self.model if self.takes_wrapped else self.unwrap(self.model)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

        gradients = vmap(grad(loss_of), (None, 0, 0))(weights, batch["x"], batch["y"])
        norms_B = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
        return (F.cross_entropy(self.model(batch["x"]), batch["y"], reduction="none") / (1 + norms_B)).mean()


class _GivesTheWrappedModel(_WeighsByGradientNorms):
    takes_wrapped = True


def _per_sample(world: World) -> tuple[dict[str, torch.Tensor], list[str]]:
    trainer = _WeighsByGradientNorms(TinyConfig(max_steps=4, global_batch_size=8), world=world)
    trainer.fit()
    with pytest.raises(RuntimeError) as raised:
        _GivesTheWrappedModel(TinyConfig(max_steps=4, global_batch_size=8), world=world).fit()
    return weights(trainer), raised.value.__notes__


def test_gradients_of_samples_need_the_model_without_ddp() -> None:
    alone = _WeighsByGradientNorms(TinyConfig(max_steps=4, global_batch_size=8), world=World.single("cpu"))
    alone.fit()
    for trained, notes in run_on_ranks(_per_sample, 2):
        torch.testing.assert_close(trained, weights(alone))
        assert any("self.unwrap(self.model) and the named_parameters() of that" in note for note in notes)


class _AsksTorchForItsState(TinyTrainer):
    def on_step_end(self) -> None:
        assert set(get_model_state_dict(self.unwrap(self.model))) == set(self.model.state_dict())
        get_model_state_dict(self.model)


def _states_of_torch(world: World) -> list[str]:
    with pytest.raises(AssertionError, match="Expected 'module'") as raised:
        _AsksTorchForItsState(TinyConfig(max_steps=1), world=world).fit()
    return raised.value.__notes__


def test_states_of_torchs_checkpoints_need_the_model_without_ddp() -> None:
    for notes in run_on_ranks(_states_of_torch, 2):
        assert any("give it self.unwrap(self.model), which is right under every strategy" in note for note in notes)
