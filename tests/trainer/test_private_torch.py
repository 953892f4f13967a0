"""What Headway uses of torch's private functions is there; and without them it trains, or says what is missing."""

from __future__ import annotations

import ast
import datetime
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import private_torch
from headway.trainer.distributed.world import World
from headway.trainer.errors import ConfigError
from headway.trainer.setup import value_tracking
from tests.distributed import run_on_ranks

TRAINER = Path(__file__).parents[2] / "trainer"
DOCUMENTED = {"torch.utils._python_dispatch"}
"""Names with an underscore that torch's documentation tells users to import."""
PRIVATE_METHODS = re.compile(
    r"_(to_copy|iterator|shutdown_workers|last_lr|schedulers|step_supports_amp_scaling|"
    r"version|schema|forward_cls|values|indices|foreach_\w+|call_impl|compiled_call_impl|orig_mod|checkpoint_wrapped_module|"
    r"set_pg_timeout|record_memory_history|dump_snapshot|sync_buffers|NormBase|BatchNorm|world|get_backend|_create_"
    r"chunk_list__|spec|local_tensor|fsdp_\w+|get_fsdp_state)"
)


def _private_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module in DOCUMENTED:
                continue
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if PRIVATE_METHODS.fullmatch(node.attr) and names[0] != f"self.{node.attr}":
                yield names[0]
        else:
            continue
        yield from (name for name in names if re.match(r"torch\b[\w.]*\._[A-Za-z]", name))


def test_private_parts_of_torch_are_used_in_one_module() -> None:
    found = {
        f"{file.relative_to(TRAINER)}: {name}"
        for file in TRAINER.rglob("*.py")
        if file.name != "private_torch.py"
        for name in _private_names(file.read_text())
    }
    assert found == set()
    assert len(set(_private_names((TRAINER / "private_torch.py").read_text()))) >= 3


@pytest.mark.parametrize(
    "source",
    [
        "torch._foreach_mul_(a, 2)", "from torch._inductor import x", "import torch._dynamo", "p.grad._version",
        "from torch.nn.modules.batchnorm import _NormBase", "distributed_c10d._world.pg_map", "self.model._call_impl()",
        "aten._to_copy.default", "self.loader._iterator = None", "batches._shutdown_workers()", "inner._last_lr",
    ],
)  # fmt: skip
def test_such_a_use_is_found(source: str) -> None:
    assert list(_private_names(source))


@pytest.mark.parametrize("name", ["_foreach_norm", "_foreach_mul_", "_foreach_copy_", "_foreach_lerp_"])
def test_lists_of_tensors_are_changed_alike_without_the_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed() -> list[torch.Tensor]:
        tensors, others = [torch.arange(3.0), torch.ones(2, 2)], [torch.full((3,), 5.0), torch.eye(2)]
        function: Any = getattr(private_torch, name.removeprefix("_"))
        second: Any = {"_foreach_norm": (), "_foreach_mul_": (0.5,), "_foreach_copy_": (others,)}.get(
            name, (others, 0.25)
        )
        result = function(tensors, *second)
        return list(result) if result is not None else tensors

    expected = changed()
    monkeypatch.delattr(torch, name)
    torch.testing.assert_close(changed(), expected, rtol=0, atol=0)


def test_a_changed_tensor_has_another_version() -> None:
    tensor = torch.zeros(2)
    before = private_torch.version_of(tensor)
    tensor.add_(1)
    assert before is not None
    assert private_torch.version_of(tensor) not in (None, before)
    assert private_torch.version_of(object()) is None  # type: ignore[arg-type]


def test_arguments_that_an_operator_changes_are_known_by_its_schema_or_its_name() -> None:
    class Operator:
        def __init__(self, name: str) -> None:
            self.overloadpacket = name

    aten = torch.ops.aten
    assert private_torch.written_arguments(aten.add_.Tensor) == [(0, "self")]
    assert private_torch.written_arguments(aten.add.out) == [(3, "out")]
    assert private_torch.written_arguments(aten.add.Tensor) == []
    assert private_torch.written_arguments(Operator("aten.add_")) == [(0, "self")]
    assert private_torch.written_arguments(Operator("aten.add")) == []


def _parts(world: World) -> list[tuple[list[int], list[int]]]:
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(35.0).view(5, 7)
    parts = []
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(whole, mesh, [placement])
        told = private_torch.chunk_of(tensor)
        with pytest.MonkeyPatch.context() as patched:
            patched.delattr(DTensor, "__create_chunk_list__")
            computed = private_torch.chunk_of(tensor)
            with pytest.raises(NotImplementedError, match=r"P\(sum\)"):
                private_torch.chunk_of(DTensor.from_local(whole, mesh, [Partial()]))
        assert tuple(map(list, computed)) == tuple(map(list, told))
        parts.append((list(told[0]), list(told[1])))
    return parts


def test_the_part_of_a_rank_is_told_by_torch_or_computed() -> None:
    first, second = run_on_ranks(_parts, 2)
    assert first == [([0, 0], [3, 7]), ([0, 0], [5, 4]), ([0, 0], [5, 7])]
    assert second == [([3, 0], [2, 7]), ([0, 4], [5, 3]), ([0, 0], [5, 7])]


def test_a_torch_that_cannot_change_timeouts_is_told_once_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(distributed_c10d._set_pg_timeout)
    monkeypatch.delattr(distributed_c10d, "_set_pg_timeout")
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    with pytest.warns(UserWarning, match=r"parallel\.step_timeout has no effect"):
        private_torch.set_group_timeout(None, 5.0)  # type: ignore[arg-type]


def test_the_public_function_for_timeouts_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Any] = []
    monkeypatch.setattr(dist, "set_timeout", lambda *args: set_to.append(args), raising=False)
    private_torch.set_group_timeout("group", 5.0)  # type: ignore[arg-type]
    assert set_to == [(datetime.timedelta(seconds=5), "group")]


def test_modules_of_torch_are_compiled_in_place_and_their_wrappers_are_seen_through() -> None:
    linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not private_torch.is_compiled(linear)
    private_torch.compile_in_place(linear)
    assert private_torch.is_compiled(linear)
    compiled = torch.compile(other)
    assert private_torch.is_compiled(compiled)  # type: ignore[arg-type]
    assert private_torch.compiled_module(compiled) is other  # type: ignore[arg-type]
    assert private_torch.compiled_module(other) is None
    wrapped = private_torch.wrap_in_checkpoint(other)
    assert private_torch.checkpointed_module(wrapped) is other
    assert list(wrapped.state_dict()) == list(other.state_dict())


def test_without_the_wrapper_activation_checkpointing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", None)
    with pytest.raises(ConfigError, match=r"call torch\.utils\.checkpoint\.checkpoint in the model"):
        private_torch.wrap_in_checkpoint(nn.Linear(2, 2))


def test_operators_that_torch_does_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = private_torch.expensive_operators()
    assert {str(each) for each in expected} >= {"aten.mm.default", "aten._scaled_mm.default", "flex_attention"}
    monkeypatch.delattr(torch, "_higher_order_ops")
    assert len(private_torch.expensive_operators()) == len(expected) - 1


def test_a_torch_that_cannot_record_allocations_profiles_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    with pytest.warns(UserWarning, match="cannot record allocations"):
        assert private_torch.memory_history(most_allocations=10) is None


def test_the_folder_of_inductor_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert private_torch.inductor_folder() == tmp_path
    monkeypatch.setitem(__import__("sys").modules, "torch._inductor.runtime.cache_dir_utils", None)
    assert private_torch.inductor_folder() == tmp_path


class Operators(TorchDispatchMode):
    """Lists the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def test_a_conversion_is_known_by_its_name() -> None:
    with Operators() as operators:
        torch.zeros(2).double().add_(1)
    assert [private_torch.is_conversion(each) for each in operators.called] == [False, True, False]
    assert operators.called[1] is torch.ops.aten._to_copy.default


def test_a_model_that_is_converted_by_an_unknown_operator_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is then created with values, and not on the meta device."""

    def lost() -> set[str]:
        tracker = value_tracking.ValueTracker()
        with torch.device("meta"), tracker:
            model = nn.Linear(2, 2).double()
        return set(tracker.lost({"model": model}))

    assert lost() == set()
    monkeypatch.setattr(value_tracking, "is_conversion", lambda operator: False)
    assert lost() == {"model.weight", "model.bias"}


def test_workers_of_a_loader_end_at_once_or_with_their_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True)
    kind = type(iter(loader))
    assert callable(kind._shutdown_workers)  # type: ignore[attr-defined]
    iterator = private_torch.forget_iterator(loader)
    assert iterator is not None
    assert loader._iterator is None
    private_torch.shut_down_workers(iterator)
    assert multiprocessing.active_children() == []
    assert len(list(loader)) == 4, "it starts new workers"
    private_torch.shut_down_workers(private_torch.forget_iterator(loader))

    iterator = iter(loader)
    monkeypatch.delattr(kind, "_shutdown_workers")
    monkeypatch.setattr(kind, "__del__", lambda self: None)
    private_torch.shut_down_workers(iterator)
    assert next(iterator)[0].tolist() == [0]
    assert private_torch.forget_iterator(DataLoader([1])) is None
    del vars(loader)["_iterator"]
    assert private_torch.forget_iterator(loader) is None
    monkeypatch.undo()
    private_torch.shut_down_workers(iterator)


def test_schedulers_inside_another_are_found_without_the_attribute() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    inner: list[LRScheduler] = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    outer = lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
    assert outer._schedulers == inner
    assert private_torch.inner_schedulers(outer) == inner
    vars(outer)["renamed"] = vars(outer).pop("_schedulers")
    assert private_torch.inner_schedulers(outer) == inner
    assert private_torch.inner_schedulers(inner[0]) == []


def test_the_last_rates_are_set_or_stay_those_of_the_last_step() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    private_torch.set_last_lr(scheduler, [0.25])
    assert scheduler._last_lr == scheduler.get_last_lr() == [0.25]
    del vars(scheduler)["_last_lr"]
    private_torch.set_last_lr(scheduler, [0.125])
    assert "_last_lr" not in vars(scheduler)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_that_does_not_tell_cannot_skip_its_step() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, fused=True)
    assert optimizer._step_supports_amp_scaling
    assert private_torch.can_skip(optimizer)
    del optimizer._step_supports_amp_scaling
    assert not private_torch.can_skip(optimizer)


def test_hooks_of_a_parameter_are_found_or_it_seems_to_have_none() -> None:
    plain, masked, watched = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    masked.register_hook(lambda gradient: gradient)
    watched.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [private_torch.has_gradient_hooks(each) for each in (plain, masked, watched)] == [False, True, True]
    assert not private_torch.has_gradient_hooks(object())  # type: ignore[arg-type]
    assert [private_torch.has_tensor_hooks(each) for each in (plain, masked, watched)] == [False, True, False]
    assert not private_torch.has_tensor_hooks(object())  # type: ignore[arg-type]


def test_a_group_tells_its_store_or_none() -> None:
    class Group:
        pass

    assert callable(dist.ProcessGroup.get_group_store)
    assert private_torch.store_of(Group()) is None  # type: ignore[arg-type]


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *of_outputs: torch.Tensor) -> Any:
        return 2 * of_outputs[0]


def test_a_function_of_the_users_is_found_in_a_graph() -> None:
    """Without the attribute, what it gets is not checked."""
    x = torch.ones(2, requires_grad=True)
    assert private_torch.function_of(Doubles.apply(x).grad_fn) is Doubles
    assert private_torch.function_of((2 * x).grad_fn) is None
