"""Models from anywhere begin with the values that plain PyTorch gives them, whoever gives these."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import orthogonal

from headway.trainer import Callback, ConfigError, ParallelConfig, Session, World
from headway.trainer.checkpoints.rng import seed_everything
from tests.distributed import run_on_ranks
from tests.tiny import Deep, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Initializes(nn.Module):
    """As nanoGPT: its own initialization, at the end of the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.last = nn.Linear(4, 3)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
            torch.nn.init.constant_(module.bias, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class WritesData(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self[0].weight.data[0].fill_(0.25)


class OnesAndTable(nn.Module):
    """A LayerNorm of its own, and a position table, as buffers that `__init__` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.sin(torch.arange(6.0)), persistent=False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.weight + self.table)


class PlainTensor(nn.Module):
    """A tensor that is neither a parameter nor a buffer, in an object that is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.tables = {"shift": [torch.full((6,), 2.0)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.tables["shift"][0])


class Tempered(nn.Module):
    """As CLIP: a learned number. No operator makes a tensor from a Python number on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.tensor(2.5)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self.scale


class Literal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.shift = nn.Linear(6, 3), torch.as_tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) + self.shift


class Reads(nn.Sequential):
    """As timm: reads numbers from a tensor in the constructor."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]


def _initialized_by(function: Callable[[torch.Tensor], Any], *, data: bool = False) -> Callable[[], nn.Module]:
    """Return a maker of a model that changes a weight by a function of `torch.nn.init`."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Conv1d(6, 3, 1), nn.Flatten())
        weight = model[1].weight if function is nn.init.dirac_ else model[0].weight
        function(weight.data if data else weight)
        return nn.Sequential(nn.Unflatten(1, (1, 6)), model[0], nn.Flatten(), nn.Unflatten(1, (6, 1)), *model[1:])

    return make


class Truncates(nn.Linear):
    """Its `reset_parameters` does the same again."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Orthogonal(nn.Linear):
    """As a recurrent layer of one's own, by a function that shards do not know."""

    def __init__(self) -> None:
        super().__init__(6, 4)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)


class HeadTied(nn.Module):
    """The head has the embedding's weight, whose values come from the embedding, which is reset before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x @ self.embed.weight)[:, :3]


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(6, 6)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Attends(nn.Module):
    """torch's own, which initializes in `_reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        return self.out(self.attention(x, x, x)[0].squeeze(1))


class Unset(nn.Linear):
    """Its own parameter has no value in plain PyTorch, but `reset_parameters` draws one, before its layer's."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.scale, self.layer = nn.Parameter(torch.empty(3)), nn.Linear(6, 3)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            nn.init.normal_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.layer(x)


def _discards_last() -> nn.Module:
    model = nn.Linear(6, 3)
    nn.Linear(3, 3)
    return model


def _loads() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    with torch.device("cpu"):
        values = {"0.weight": torch.full((3, 6), 0.125), "0.bias": torch.ones(3)}
    model.load_state_dict(values)
    return model


def _applied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model.apply(lambda each: nn.init.constant_(each.weight, 0.75) if isinstance(each, nn.Linear) else None)
    return model


def _deprecated_spectral_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(6, 3)))


def _on_device() -> nn.Module:
    return Initializes().to("cpu")


def _in_part() -> nn.Module:
    model = Deep(4, 0.0)
    with torch.device("cpu"):
        model.first = nn.Linear(6, 4)
    return model


def _parametrized() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))


BUILT_FOR_REAL: dict[str, Callable[[], nn.Module]] = {
    "apply in __init__": Initializes,
    ".data in __init__": WritesData,
    "torch.ones and a computed buffer": OnesAndTable,
    "a plain tensor": PlainTensor,
    "a learned number": Tempered,
    "a tensor of numbers": Literal,
    ".item()": Reads,
    "a tied head": HeadTied,
    "copies of a layer": Copies,
    "MultiheadAttention": Attends,
    "load_state_dict": _loads,
    "apply in configure_models": _applied,
    ".to(device)": _on_device,
    "values in part": _in_part,
    "weight_norm": _parametrized,
    "orthogonal_": _initialized_by(nn.init.orthogonal_),
    "orthogonal_ of .data": _initialized_by(nn.init.orthogonal_, data=True),
    "trunc_normal_": _initialized_by(nn.init.trunc_normal_),
    "sparse_": _initialized_by(partial(nn.init.sparse_, sparsity=0.5)),
    "dirac_": _initialized_by(nn.init.dirac_),
    "eye_": _initialized_by(nn.init.eye_),
    "orthogonal_ in reset_parameters": lambda: nn.Sequential(Orthogonal(), nn.Linear(4, 3)),
}

BUILT_ON_META: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 3),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.LayerNorm(6), nn.RMSNorm(6), nn.Linear(6, 3)),
    "LSTM": lambda: nn.LSTM(6, 3),
    "Embedding": lambda: nn.Embedding(6, 3, padding_idx=0),
    "Conv": lambda: nn.Conv1d(6, 3, 1),
    "PReLU": lambda: nn.Sequential(nn.Linear(6, 3), nn.PReLU()),
    "a dtype that it has already": lambda: nn.Linear(6, 3).float(),
    "a parameter without a value in __init__": Unset,
    "a discarded layer at the end": _discards_last,
    "several": lambda: Deep(4, 0.1),
    "trunc_normal_ in reset_parameters": lambda: Truncates(6, 3),
}


def _trainer_of(make: Callable[[], nn.Module], **options: Any) -> type[TinyTrainer]:
    class Makes(TinyTrainer):
        def configure_models(self) -> None:
            self.model = make()

    return Makes


def _setup(make: Callable[[], nn.Module], *, world: World = ALONE, **parallel: Any) -> tuple[TinyTrainer, list[str]]:
    said: list[str] = []
    config = TinyConfig(max_steps=2, global_batch_size=8, parallel=ParallelConfig(**parallel))
    trainer = _trainer_of(make)(config, world=world, printer=said.append)
    trainer.setup()
    return trainer, said


@pytest.mark.parametrize("name", BUILT_FOR_REAL)
def test_values_that_a_model_gives_itself_are_those_of_plain_pytorch(name: str) -> None:
    make = BUILT_FOR_REAL[name]
    seed_everything(0, rank="common")
    plain = make()
    trainer, said = _setup(make)
    assert len(said) == 1
    assert said[0].startswith("the model is created with values")
    for (key, value), (own_key, own) in zip(
        (*plain.named_parameters(), *plain.named_buffers()),
        (*trainer.model.named_parameters(), *trainer.model.named_buffers()),
        strict=True,
    ):
        assert key == own_key
        assert torch.equal(value, own), key
    if name != "several":
        assert trainer.fit().status == "completed"


@pytest.mark.parametrize("name", BUILT_ON_META)
def test_models_that_reset_parameters_initializes_are_created_on_the_meta_device(name: str) -> None:
    devices: list[str] = []

    class Watches(Callback):
        def on_models_configured(self, trainer: Any) -> None:
            devices.extend(p.device.type for p in trainer.model.parameters())

    said: list[str] = []
    trainer = _trainer_of(BUILT_ON_META[name])(
        TinyConfig(max_steps=1), world=ALONE, callbacks=[Watches()], printer=said.append
    )
    trainer.setup()
    assert set(devices) == {"meta"}
    assert said == []


def test_the_line_names_the_code_and_the_weight() -> None:
    _, said = _setup(Initializes)
    assert said == [
        "the model is created with values, 0.0 MiB on every rank, because _init_weights "
        f"(test_models_as_they_come.py:{_line_of_normal()}) gives values to model.first.weight and 3 more. If "
        "init_weights() of the trainer sets the values, nothing is allocated before sharding"
    ]


def test_the_line_names_the_users_code_where_torch_decorates_its_own() -> None:
    _, said = _setup(_deprecated_spectral_norm)
    assert "because _deprecated_spectral_norm (test_models_as_they_come.py:" in said[0]


def _line_of_normal() -> int:
    code = Initializes._init_weights.__code__
    return code.co_firstlineno + 2


def test_a_callback_that_gives_values_is_heard_too() -> None:
    class Adds(Callback):
        def on_models_configured(self, trainer: Any) -> None:
            trainer.model.last = nn.Linear(4, 3)
            nn.init.zeros_(trainer.model.last.weight)

    said: list[str] = []
    trainer = _trainer_of(lambda: Deep(4, 0.0))(
        TinyConfig(max_steps=1), world=ALONE, callbacks=[Adds()], printer=said.append
    )
    trainer.setup()
    assert not trainer.model.last.weight.any()
    assert "because on_models_configured (test_models" in said[0]


def test_init_weights_has_the_last_word() -> None:
    class Sets(_trainer_of(Reads)):  # type: ignore[misc]
        def init_weights(self) -> None:
            nn.init.constant_(self.model[0].weight, 3.0)

    trainer = Sets(TinyConfig(max_steps=1), world=ALONE)
    trainer.setup()
    assert (trainer.model[0].weight == 3.0).all()

    class OnMeta(_trainer_of(Initializes)):  # type: ignore[misc]
        def init_weights(self) -> None:
            for each in (self.model.first, self.model.last):
                assert each.weight.isnan().all(), "nothing was drawn before"
                each.reset_parameters()

    said: list[str] = []
    OnMeta(TinyConfig(max_steps=1), world=ALONE, printer=said.append).setup()
    assert said == []


def test_memory_that_nothing_initializes_is_an_error_also_in_a_model_with_values() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.shift = nn.Parameter(torch.empty(3))

    with pytest.raises(ConfigError, match=r"^model\.shift got no value: define `reset_parameters\(\)`"):
        _setup(Forgets)

    class Resets(Forgets):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.shift, 7.0)

    trainer, _ = _setup(Resets)
    assert (trainer.model.shift == 7.0).all()


def test_an_error_of_the_users_own_is_raised_as_it_is() -> None:
    def fails() -> nn.Module:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        _setup(fails)


NAMES = (
    "apply in __init__",
    "torch.ones and a computed buffer",
    "a tied head",
    ".item()",
    "orthogonal_ in reset_parameters",
)


def _weights_on_ranks(world: World) -> dict[str, Any]:
    return {
        f"{name}, {strategy}": weights(_setup(BUILT_FOR_REAL[name], world=world, strategy=strategy)[0])
        for name in NAMES
        for strategy in ("ddp", "fsdp")
    }


def test_every_strategy_begins_with_the_values_of_one_process() -> None:
    ranks = run_on_ranks(_weights_on_ranks, 2)
    for name in NAMES:
        alone = weights(_setup(BUILT_FOR_REAL[name])[0])
        for rank in ranks:
            for strategy in ("ddp", "fsdp"):
                found = rank[f"{name}, {strategy}"]
                assert found.keys() == alone.keys()
                assert all(torch.equal(found[key], alone[key]) for key in alone), (name, strategy)


class WritesToViews(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            column = self.weight[:, 0]
            self.weight[1:3].normal_()
            self.weight[4, 1:3] = 7.0
            self.weight.data[-1].zero_()
            self.weight.t()[1].add_(1.0)
            column.mul_(2.0)
            self.bias[-1] = 3.0
            self.bias[:2].view(2, 1).fill_(4.0)


VIEWS = {
    "Embedding": lambda: nn.Embedding(7, 3, padding_idx=0),
    "EmbeddingBag": lambda: nn.EmbeddingBag(7, 3, padding_idx=5),
    "views": lambda: WritesToViews(3, 7),
}


def _reset_on_shards(world: World) -> dict[str, Any]:
    return {name: weights(_setup(make, world=world, strategy="fsdp")[0]) for name, make in VIEWS.items()}


def test_what_reset_parameters_writes_to_a_part_of_a_weight_is_written_to_its_shards() -> None:
    for rank in run_on_ranks(_reset_on_shards, 2):
        for name, make in VIEWS.items():
            trainer, said = _setup(make)
            assert said == [], "created on the meta device"
            alone = weights(trainer)
            assert all(torch.equal(rank[name][key], alone[key]) for key in alone), name
    assert not weights(_setup(VIEWS["Embedding"])[0])["model.weight"][0].any()


def _initializes_shards(world: World) -> list[str]:
    class Initializes(_trainer_of(Orthogonal)):  # type: ignore[misc]
        def init_weights(self) -> None:
            nn.init.orthogonal_(self.model.weight)

    config = TinyConfig(max_steps=1, global_batch_size=8, parallel=ParallelConfig(strategy="fsdp"))
    with pytest.raises(RuntimeError) as raised:
        Initializes(config, world=world).setup()
    return raised.value.__notes__


def test_init_weights_that_shards_do_not_know_is_told_what_to_do() -> None:
    for notes in run_on_ranks(_initializes_shards, 2):
        assert any("draw into a plain tensor of the weight's shape" in note for note in notes)


def _creations_with_values(world: World, runs_on_meta: bool) -> list[tuple[float, float]]:
    """Return when this rank created the model with values, from begin to end."""
    world = replace(world, local_rank=world.rank)
    found: list[tuple[float, float]] = []

    def make() -> nn.Module:
        began = time.monotonic()
        model = Initializes() if runs_on_meta else nn.Linear(6, 3)
        if not runs_on_meta:
            model.first = model.weight[0, 0].item()
        if not any(parameter.is_meta for parameter in model.parameters()):
            time.sleep(0.2)
            found.append((began, time.monotonic()))
        return model

    trainer, _ = _setup(make, world=world, strategy="fsdp")
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    return found


def test_only_the_main_rank_holds_the_values_of_a_model_that_is_to_be_sharded() -> None:
    main, other = run_on_ranks(_creations_with_values, 2, True)
    assert len(main) == 1
    assert other == []


def test_ranks_take_turns_where_each_must_create_a_model_that_is_to_be_sharded() -> None:
    (first,), (second,) = run_on_ranks(_creations_with_values, 2, False)
    assert first[1] <= second[0]


def _communicates(world: World) -> list[dict[str, torch.Tensor]]:
    """Return the weights of models whose code waits for all ranks, as around a download or in a broadcast."""

    def loads() -> nn.Module:
        model = nn.Linear(6, 3)
        if dist.get_rank() == 0:
            nn.init.ones_(model.weight)
        dist.barrier()
        return model

    def broadcasts() -> nn.Module:
        model = nn.Linear(6, 3)
        nn.init.constant_(model.weight, dist.get_rank() + 1)
        dist.broadcast(model.weight.data, 0)
        return model

    return [
        weights(_setup(make, world=world, strategy=strategy)[0])
        for make in (loads, broadcasts)
        for strategy in ("ddp", "fsdp")
    ]


def test_code_that_waits_for_all_ranks_runs_on_all_at_once() -> None:
    for found in run_on_ranks(_communicates, 2):
        assert [each["model.weight"].unique().tolist() for each in found] == [[1.0]] * 4


def _trained_orthogonal(world: World) -> dict[str, torch.Tensor]:
    # On the meta device, this parametrization of a matrix that is not square has no buffer.
    trainer, _ = _setup(lambda: orthogonal(nn.Linear(6, 3)), world=world, strategy="fsdp" if world.size > 1 else "none")
    trainer.fit()
    return weights(trainer)


def test_a_model_that_has_other_buffers_on_the_meta_device_is_sharded_with_its_values() -> None:
    alone = _trained_orthogonal(ALONE)
    for found in run_on_ranks(_trained_orthogonal, 2):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.allclose(found[name], value, atol=1e-6), name


def test_loaded_weights_are_kept_where_init_weights_sets_others() -> None:
    class Loads(_trainer_of(_loads)):  # type: ignore[misc]
        def init_weights(self) -> None:
            super().init_weights()
            nn.init.zeros_(self.model[0].bias)

    trainer = Loads(TinyConfig(max_steps=1), world=ALONE)
    trainer.setup()
    assert (trainer.model[0].weight == 0.125).all()
    assert not trainer.model[0].bias.any()


class _Resets(nn.Linear):
    """Its constructor gives its own initialization another number than the default."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.reset_parameters(std=1.0)

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)


class _Shifts(nn.Sequential):
    """A tensor that is neither a parameter nor a buffer, beside weights that are loaded into their places."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self.shift = torch.full((6,), 2.0)
        with torch.device("cpu"):
            values = {name: torch.ones(tensor.shape) for name, tensor in self.state_dict().items()}
        self.load_state_dict(values, assign=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift)


class _Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))[:, :3]


def _seeded_twice() -> nn.Module:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(nn.Linear(6, 3))
    return nn.ModuleList(models)


def _seeded_apart() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Linear(6, 3)


def _set_back() -> nn.Module:
    state = torch.get_rng_state()
    first = nn.Linear(6, 3)
    torch.set_rng_state(state)
    return nn.ModuleList([first, nn.Linear(6, 3)])


def _drawn_on_the_cpu() -> nn.Module:
    model = nn.Linear(6, 3, bias=False)
    model.weight = nn.Parameter(torch.Tensor(3, 6))
    nn.init.xavier_uniform_(model.weight)
    return model


class _Converted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double())


def _replaces_a_layer() -> nn.Module:
    model = Deep(4, 0.0)
    model.first = nn.Linear(6, 4)
    return model


def _discards_a_layer() -> nn.Module:
    nn.Linear(3, 3)
    return nn.Linear(6, 3)


def _in_another_order() -> nn.Module:
    last = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), last)


class _OwnLast(nn.Module):
    """Draws for its own weight after its layer, which `modules()` names after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(6, 6), nn.Parameter(torch.empty(6, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.weight


class _Narrowed(nn.Linear):
    """`reset_parameters` would draw by what is set after the constructor has called it."""

    std = 1.0

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.std = 0.02

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


DEPENDS_ON_MORE = (
    *(_Resets, _Shifts, _Aliased, _seeded_twice, _seeded_apart, _set_back, _drawn_on_the_cpu),
    *(_Converted, _replaces_a_layer, _discards_a_layer, _in_another_order, _OwnLast, _Narrowed),
)


@pytest.mark.parametrize("make", DEPENDS_ON_MORE)
def test_values_that_depend_on_more_than_reset_parameters_are_those_of_plain_pytorch(
    make: Callable[[], nn.Module],
) -> None:
    seed_everything(0, rank="common")
    plain = make()
    trainer, said = _setup(make)
    assert len(said) == 1
    for (name, value), own in zip(plain.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(value, own), name
    if not isinstance(plain, nn.ModuleList) and next(plain.parameters()).dtype == torch.float32:
        assert trainer.fit().status == "completed"


def test_the_line_names_the_code_that_draws_in_another_order() -> None:
    _, said = _setup(_replaces_a_layer)
    place = f"_replaces_a_layer (test_models_as_they_come.py:{_replaces_a_layer.__code__.co_firstlineno + 2})"
    assert f"because reset_parameters() would draw the random numbers of {place} in another order or dtype" in said[0]


class _Kind(nn.Parameter):
    pass


def _kept(world: World, strategy: Any = "none") -> dict[str, Any]:
    """Return what is left of the user's marks on parameters, and of references to them."""

    class Marks(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self.model.last.weight.decay = 0.25
            self.decayed = [self.model.last.weight]
            self.model.penalized = {"last": (self.model.last.weight,)}

    trainer = Marks(
        TinyConfig(max_steps=1, global_batch_size=8, parallel=ParallelConfig(strategy=strategy)), world=world
    )
    trainer.setup()
    weight = trainer.model.last.weight
    return {
        "attribute": getattr(weight, "decay", None),
        "list": trainer.decayed[0] is weight,
        "dict": trainer.model.penalized["last"][0] is weight,
    }


def _is_refused(world: World, make: Callable[[], nn.Module]) -> str:
    with pytest.raises(ConfigError) as raised:
        _setup(make, world=world, strategy="fsdp")
    return str(raised.value)


def _hooked() -> nn.Module:
    model = Deep(4, 0.0)
    model.last.weight.register_hook(torch.zeros_like)
    return model


def _of_a_class() -> nn.Module:
    model = Deep(4, 0.0)
    model.last.weight = _Kind(model.last.weight.data)
    return model


def _two_that_share() -> nn.Module:
    trunk = nn.Linear(6, 3)
    return nn.ModuleDict({"actor": nn.Sequential(trunk, nn.ReLU()), "critic": nn.Sequential(trunk, nn.Tanh())})


REFUSED = {
    _hooked: "model.last.weight has a hook, which is lost",
    _of_a_class: "model.last.weight is a _Kind, which is lost",
    _Aliased: "model.encode.weight and model.decode.weight share memory",
    _two_that_share: "model.actor.0.weight is a weight of two modules that are called by themselves",
}


def _kept_and_refused(world: World) -> Any:
    return [_kept(world, "ddp"), _kept(world, "fsdp")], [_is_refused(world, make) for make in REFUSED]


def test_attributes_and_references_of_parameters_are_kept_or_refused() -> None:
    everything = {"attribute": 0.25, "list": True, "dict": True}
    assert _kept(ALONE) == everything
    for kept, refusals in run_on_ranks(_kept_and_refused, 2):
        assert kept == [everything] * 2
        for refusal, message in zip(refusals, REFUSED.values(), strict=True):
            assert refusal.startswith(message)


def _hooks_after_sharding(world: World) -> str:
    class Hooks(TinyTrainer):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            self.model.last.weight.register_hook(torch.zeros_like)

    config = TinyConfig(max_steps=1, global_batch_size=8, parallel=ParallelConfig(strategy="fsdp"))
    with pytest.raises(ConfigError) as raised:
        Hooks(config, world=world).setup()
    return str(raised.value)


def test_a_hook_of_a_parameter_that_is_sharded_already_is_refused() -> None:
    for message in run_on_ranks(_hooks_after_sharding, 2):
        assert message.startswith("model.last.weight has a hook, which is not called for a sharded parameter")


def test_hooks_and_classes_of_parameters_are_kept() -> None:
    trainer, _ = _setup(_hooked)
    before = trainer.model.last.weight.detach().clone()
    trainer.fit()
    # AdamW's decay alone.
    assert torch.allclose(trainer.model.last.weight, before * (1 - 0.01 * 0.01) ** 2, atol=1e-6)
    assert type(_setup(_of_a_class)[0].model.last.weight) is _Kind


def test_init_weights_is_called_for_a_model_that_came_with_all_its_values() -> None:
    class Sets(_trainer_of(lambda: nn.utils.skip_init(nn.Linear, 6, 3))):  # type: ignore[misc]
        def init_weights(self) -> None:
            for parameter in self.model.parameters():
                nn.init.constant_(parameter, 0.5)

    trainer = Sets(TinyConfig(max_steps=1), world=ALONE)
    trainer.setup()
    assert all((parameter == 0.5).all() for parameter in trainer.model.parameters())


def test_init_weights_that_would_lose_values_by_the_default_is_refused() -> None:
    class Target(_trainer_of(lambda: nn.Linear(6, 3))):  # type: ignore[misc]
        def configure_models(self) -> None:
            super().configure_models()
            self.target = copy.deepcopy(self.model).requires_grad_(False)

        def init_weights(self) -> None:
            super().init_weights()
            nn.init.zeros_(self.model.bias)

    trainer = Target(TinyConfig(max_steps=1), world=ALONE)
    with pytest.raises(
        ConfigError, match=r"by which target\.weight gets the value of reset_parameters\(\) in place of"
    ):
        trainer.setup()

    class Sets(Target):
        def init_weights(self) -> None:
            super().init_weights()  # and then what it leaves out
            self.target.load_state_dict(self.model.state_dict())

    trainer = Sets(TinyConfig(max_steps=1), world=ALONE)
    trainer.setup()
    assert torch.equal(trainer.target.weight, trainer.model.weight)


def test_models_that_are_added_to_twice_are_refused() -> None:
    class Appends(TinyTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.layers: list[nn.Module] = []

        def configure_models(self) -> None:
            self.layers.append(nn.Linear(6, 3))
            nn.init.zeros_(self.layers[-1].bias)
            self.model = nn.Sequential(*self.layers)

    with pytest.raises(ConfigError, match=r"adds to self\.layers, which was there before, and runs twice"):
        Appends(TinyConfig(max_steps=1), world=ALONE).setup()


@functools.lru_cache
def _table() -> torch.Tensor:
    return torch.arange(6.0)


def test_a_cache_that_keeps_a_tensor_of_the_meta_device_is_named() -> None:
    def make() -> nn.Module:
        model = Initializes()
        model.table = _table()
        return model

    with pytest.raises(ConfigError, match=r"model\.table is on the meta device, from the first run"):
        _setup(make)


def test_a_callback_may_compare_weights() -> None:
    class Compares(Callback):
        def on_models_configured(self, trainer: Any) -> None:
            self.are_equal = torch.equal(trainer.model.last.weight, trainer.model.last.weight)

    compares = Compares()
    TinyTrainer(TinyConfig(max_steps=1), world=ALONE, callbacks=[compares]).setup()
    assert compares.are_equal


def _shares(world: World, strategy: Any) -> str:
    class Shares(TinyTrainer):
        def configure_models(self) -> None:
            with torch.device("cpu"):
                trunk = nn.Linear(6, 3)
                self.model, self.critic = nn.Sequential(trunk), nn.Sequential(trunk, nn.Linear(3, 1))

    config = TinyConfig(max_steps=1, global_batch_size=8, parallel=ParallelConfig(strategy=strategy))
    with pytest.raises(ConfigError) as raised:
        Shares(config, world=world).setup()
    return str(raised.value)


def _share(world: World) -> list[str]:
    return [_shares(world, strategy) for strategy in ("ddp", "fsdp")]


def test_two_models_with_values_that_share_a_weight_are_refused_on_several_ranks() -> None:
    for refusals in run_on_ranks(_share, 2):
        for refusal in refusals:
            assert refusal.startswith(
                "model and critic share model.0.weight, but each is created and sharded separately"
            )


def test_a_session_refuses_a_model_without_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 3)
    session = Session(
        TinyConfig(max_steps=1), model=model, optimizer=lambda model: torch.optim.SGD(model.parameters()),
        data=[torch.ones(2, 6)], world=ALONE,
    )  # fmt: skip
    with (
        pytest.raises(ConfigError, match="^model of the Session came without values, on the meta device: pass"),
        session,
    ):
        pass
