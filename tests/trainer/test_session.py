"""A loop of one's own: with the same weights as a Trainer, exact on resume, and the same on every number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from headway.datasets.batching.micro_batches import GlobalBatch
from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    Duration,
    NonFiniteError,
    ParallelConfig,
    Session,
    StepError,
    SupervisedTrainer,
    TrainerConfig,
    World,
    load_weights,
)
from headway.trainer.callbacks import Ema
from headway.trainer.data.protocols import LoadedBatch
from tests.distributed import run_on_ranks
from tests.programs import Program
from tests.tiny import Deep, Rows, StopAt

SINGLE = World.single("cpu")
ROOT = Path(__file__).parents[2]


def config_of(**changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = {"max_epochs": 2, "global_batch_size": 16, "evaluate_every": Duration(1, "epochs")}
    return TrainerConfig(**{**settings, **changes})


def model_of(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(3)
    return Deep(12, dropout)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_optimizer(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def session(config: TrainerConfig | None = None, **options: Any) -> Session:
    settings: dict[str, Any] = {
        "model": model_of,
        "optimizer": make_optimizer,
        "data": DataLoader(Rows(103), batch_size=16, shuffle=True),
        "validation": DataLoader(Rows(10), batch_size=4),
        "validation_step": lambda run, batch: loss_of(run.model, batch),
        "world": SINGLE,
    }
    return Session(config or config_of(), **{**settings, **options})


def train(run: Session, *, restore: bool = True, stop_after: int | None = None) -> Session:
    with run:
        if restore:
            run.restore()
        for batch in run:
            for micro_batch in run.accumulate(batch):
                run.backward(loss_of(run.model, micro_batch))
            run.step()
            if run.global_step == stop_after:
                break
    return run


def weights(run: Any) -> dict[str, torch.Tensor]:
    (model,) = run.models.values()
    return {name: value.detach().clone() for name, value in run.unwrap(model).state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Supervised(SupervisedTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": loss_of(self.model, batch)}

    def configure_optimizers(self) -> None:
        self.optimizer, self.scheduler = make_optimizer(self.model)


@pytest.mark.parametrize(
    "use", [lambda batch: batch["x"], lambda batch: dict(zip("xy", batch, strict=True))], ids=["index", "unpack"]
)
@pytest.mark.parametrize(
    "batch_of",
    [
        lambda: LoadedBatch([{"x": torch.ones(2)}], [2], 2),
        lambda: GlobalBatch([{"x": torch.ones(2)}], [2], 2, list),
    ],
    ids=["loader", "parquet"],
)
def test_a_batch_that_is_used_without_accumulate_says_so(batch_of: Any, use: Any) -> None:
    with pytest.raises(TypeError, match="for micro_batch in run.accumulate"):
        use(batch_of())


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_a_session_and_a_trainer_train_the_same_weights(micro_batch_size: int | None) -> None:
    config = config_of(micro_batch_size=micro_batch_size, max_grad_norm=0.5)
    trainer = Supervised(
        model=model_of(),
        train=DataLoader(Rows(103), batch_size=16, shuffle=True),
        validation=DataLoader(Rows(10), batch_size=4),
        config=config,
        world=SINGLE,
    )
    result = trainer.fit()
    run = train(session(config))
    assert same(weights(trainer), weights(run))
    assert run.result.metrics.keys() >= {"train/loss", "validation/loss", "grad_norm", "lr"}
    for name in ("train/loss", "validation/loss", "grad_norm", "lr"):
        assert run.result.metrics[name] == result.metrics[name]
    assert (run.result.steps, run.result.epochs, run.result.status) == (result.steps, 2, "completed")


def test_a_session_that_was_stopped_resumes_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = train(session(run_dir=tmp_path / "whole"))
    stopped = train(session(run_dir=tmp_path / "cut", callbacks=[StopAt(4)]))
    assert (stopped.result.status, stopped.result.steps) == ("interrupted", 4)
    resumed = train(session(run_dir=tmp_path / "cut", attempt=2))
    assert resumed.result.resumed_from == stopped.result.last_checkpoint
    assert same(weights(whole), weights(resumed))
    assert whole.result.history == resumed.result.history


@pytest.mark.parametrize("background", [True, False])
def test_what_the_loop_does_after_a_step_is_in_the_checkpoint_of_that_step(tmp_path: Path, background: bool) -> None:
    """An average kept by hand, and random numbers, which decide on the dropout of the next step."""

    def run_with(name: str, fails_at: int | None = None) -> list[dict[str, torch.Tensor]]:
        config = config_of(
            checkpoint=CheckpointConfig(every=Duration(2, "steps"), background=background), max_steps=8, max_epochs=None
        )
        models = {"model": model_of(), "average": model_of().requires_grad_(False)}
        run = session(
            config,
            model=lambda: models,
            optimizer=lambda models: {"optimizer": torch.optim.AdamW(models["model"].parameters(), lr=0.01)},
            validation_step=lambda run, batch: loss_of(run.models["model"], batch),
            run_dir=tmp_path / name,
        )
        with run:
            run.restore()
            for batch in run:
                for micro_batch in run.accumulate(batch):
                    run.backward(loss_of(run.models["model"], micro_batch))
                run.step()
                if run.global_step == fails_at:
                    raise OSError("the machine is gone")
                with torch.no_grad():
                    pairs = zip(run.models["average"].parameters(), run.models["model"].parameters(), strict=True)
                    for average, weight in pairs:
                        average.lerp_(weight, torch.rand(()))
        return [
            {name: value.clone() for name, value in run.unwrap(model).state_dict().items()}
            for model in run.models.values()
        ]

    straight = run_with("straight")
    with pytest.raises(OSError, match="the machine is gone"):
        run_with("killed", fails_at=5)
    resumed = run_with("killed")
    assert all(same(first, second) for first, second in zip(straight, resumed, strict=True))


def test_leaving_the_loop_early_saves_where_it_stands(tmp_path: Path) -> None:
    run = train(session(run_dir=tmp_path), stop_after=3)
    assert (run.result.status, run.result.steps) == ("completed", 3)
    assert "loop" in run.result.reason
    resumed = train(session(run_dir=tmp_path))
    assert resumed.result.steps == train(session(run_dir=tmp_path / "whole")).result.steps


def test_an_error_in_the_loop_ends_the_run_as_failed(tmp_path: Path) -> None:
    ends: list[BaseException | None] = []

    class Ends(Callback):
        def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
            ends.append(error)

    def fail(run: Session) -> None:
        with run:
            for batch in run:
                for micro_batch in run.accumulate(batch):
                    run.backward(loss_of(run.model, micro_batch))
                run.step()
                if run.global_step == 2:
                    raise ZeroDivisionError

    run = session(run_dir=tmp_path, callbacks=[Ends()])
    with pytest.raises(ZeroDivisionError):
        fail(run)
    assert [type(error) for error in ends] == [ZeroDivisionError]
    assert not hasattr(run, "result")


def test_a_run_directory_of_another_run_is_refused_without_restore(tmp_path: Path) -> None:
    train(session(run_dir=tmp_path))
    with pytest.raises(ConfigError, match="restore"):
        train(session(run_dir=tmp_path), restore=False)


def test_the_guard_skips_a_gradient_that_is_not_finite() -> None:
    def poisoned(run: Session, batch: Any) -> torch.Tensor:
        loss = loss_of(run.model, batch)
        return loss * float("nan") if run.progress.step_in_epoch == 2 and run.current_epoch == 0 else loss

    def loop(policy: str) -> Session:
        with session(config_of(non_finite=policy)) as run:
            for batch in run:
                for micro_batch in run.accumulate(batch):
                    run.backward(poisoned(run, micro_batch))
                run.step()
        return run

    run = loop("skip")
    assert run.result.metrics["skipped_steps"] == 1
    assert all(value.isfinite().all() for value in weights(run).values())
    with pytest.raises(NonFiniteError):
        loop("raise")


def _without_step(run: Session, batch: Any) -> None:
    for micro_batch in run.accumulate(batch):
        run.backward(loss_of(run.model, micro_batch))


def _without_accumulate(run: Session, batch: Any) -> None:
    run.step()


def _step_inside(run: Session, batch: Any) -> None:
    for micro_batch in run.accumulate(batch):
        run.backward(loss_of(run.model, micro_batch))
        run.step()


def _without_backward(run: Session, batch: Any) -> None:
    for _ in run.accumulate(batch):
        pass
    run.step()


def _optimizer_step(run: Session, batch: Any) -> None:
    for micro_batch in run.accumulate(batch):
        run.backward(loss_of(run.model, micro_batch))
    run.optimizer.step()
    run.step()


def _backward_outside(run: Session, batch: Any) -> None:
    run.backward(loss_of(run.model, batch.micro_batches[0]))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_without_step, r"call run\.step\(\)"),
        (_without_accumulate, "run.accumulate"),
        (_step_inside, "run.accumulate"),
        (_without_backward, r"call run\.backward\(loss\)"),
        (
            _optimizer_step,
            r"step\(\) of 'optimizer' was called, but run\.step\(\) steps the optimizers: remove the call",
        ),
        (_backward_outside, "outside of `for micro_batch in run.accumulate"),
    ],
)
def test_a_loop_that_leaves_something_out_is_told_what(body: Any, message: str) -> None:
    def loop() -> None:
        with session(config_of(micro_batch_size=4)) as run:
            for batch in run:
                body(run, batch)

    with pytest.raises(StepError, match=message):
        loop()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"halve_on_out_of_memory": True}, {}, "halve_on_out_of_memory=True"),
        ({"non_finite": "retry"}, {}, 'non_finite="retry"'),
        ({}, {"validation_step": None}, "validation_step"),
        ({"max_epochs": None}, {}, "max_epochs"),
        ({}, {"model": lambda: None}, "model"),
        ({}, {"optimizer": lambda model: None}, "optimizer"),
        (
            {},
            {"optimizer": torch.optim.SGD},
            r"got SGD: .* pass optimizer=lambda model: SGD\(model.parameters\(\), ...\)$",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(changes: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(session(config_of(**changes), **options))


def test_the_model_and_the_optimizer_exist_inside_the_block() -> None:
    run = session()
    with pytest.raises(ConfigError, match="the run has no model yet: use run.model inside `with Session"):
        _ = run.model
    with pytest.raises(ConfigError, match="the run has no optimizer yet: use run.optimizer inside `with Session"):
        _ = run.optimizer


def test_hooks_get_the_session_and_averages_are_evaluated(tmp_path: Path) -> None:
    class Steps(Callback):
        seen: list[int] = []

        def on_step_end(self, trainer: Any) -> None:
            self.seen.append(trainer.global_step)

    run = train(session(callbacks=[steps := Steps(), Ema(0.9)], run_dir=tmp_path))
    assert steps.seen == list(range(1, run.result.steps + 1))
    plain = train(session())
    assert plain.result.metrics["validation/loss"] != run.result.metrics["validation/loss"]
    assert same(weights(plain), weights(run))


def test_numbers_that_the_loop_logs_are_means_over_the_interval() -> None:
    with session(config_of(log_every=Duration(2, "steps"))) as run:
        records = []
        for batch in run:
            for micro_batch in run.accumulate(batch):
                run.log("rows", float(len(micro_batch["id"])))
                run.backward(loss_of(run.model, micro_batch))
            if record := run.step():
                records.append(record)
    assert records
    assert all(record["train/rows"] == 16.0 for record in records[:3])


def test_the_loop_may_set_the_learning_rate() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    with session(config_of(log_every=Duration(1, "steps")), optimizer=optimizer) as run:
        for batch in run:
            run.optimizer.param_groups[0]["lr"] = rate = 0.01 / (1 + run.global_step)
            for micro_batch in run.accumulate(batch):
                run.backward(loss_of(run.model, micro_batch))
            assert run.step()["lr"] == rate


def test_several_models_and_optimizers() -> None:
    def models() -> dict[str, nn.Module]:
        return {"first": nn.Linear(6, 4), "second": nn.Linear(4, 3)}

    def optimizers(models: dict[str, nn.Module]) -> dict[str, Any]:
        return {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}

    with session(model=models, optimizer=optimizers, validation=None, validation_step=None) as run:
        for batch in run:
            for micro_batch in run.accumulate(batch):
                hidden = run.models["first"](micro_batch["x"])
                run.backward(F.cross_entropy(run.models["second"](hidden), micro_batch["y"]))
            run.step()
        with pytest.raises(ConfigError, match=r"has 2 optimizers \(first, second\): use run\.optimizers\[name\]"):
            _ = run.optimizer
    assert set(run.optimizers) == {"first", "second"}
    assert run.result.metrics["train/loss"] < 1.3


def _on_ranks(world: World, strategy: str, exact: bool, folder: str, stop: bool) -> dict[str, torch.Tensor]:
    parallel: Any = ParallelConfig(strategy=strategy)  # type: ignore[arg-type]
    config = config_of(exact=exact, micro_batch_size=4 if exact else None, parallel=parallel, max_grad_norm=0.5)
    options: dict[str, Any] = {"model": lambda: model_of(0.0), "run_dir": folder, "world": world}
    if stop:
        train(session(config, callbacks=[StopAt(5)], **options))
    run = train(session(config, **options))
    assert run.result.last_checkpoint is not None
    return load_weights(run.result.last_checkpoint)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_two_ranks_train_what_one_trains_and_resume(strategy: str, tmp_path: Path) -> None:
    alone = _on_ranks(SINGLE, strategy, False, str(tmp_path / "alone"), False)
    whole, _ = run_on_ranks(_on_ranks, 2, strategy, False, str(tmp_path / "whole"), False)
    resumed, _ = run_on_ranks(_on_ranks, 2, strategy, False, str(tmp_path / "cut"), True)
    assert same(whole, resumed)
    for name in alone:
        torch.testing.assert_close(whole[name], alone[name])


def test_exact_mode_gives_the_same_bits_on_one_and_two_ranks(tmp_path: Path) -> None:
    alone = _on_ranks(SINGLE, "ddp", True, str(tmp_path / "alone"), False)
    both, _ = run_on_ranks(_on_ranks, 2, "ddp", True, str(tmp_path / "both"), False)
    assert same(alone, both)


def test_a_model_keeps_the_values_of_its_own_initialisation() -> None:
    class Initialised(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            nn.init.constant_(self.weight, 0.25)

    with session(config_of(max_steps=1), model=Initialised) as run:
        assert (run.unwrap(run.model).weight == 0.25).all()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


@pytest.mark.extended
def test_the_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    def start(name: str) -> Program:
        (tmp_path / name).mkdir(exist_ok=True)
        source = (ROOT / "examples/nanogpt_loop.py").read_text()
        return Program(source, "60", environment={**os.environ, "OMP_NUM_THREADS": "1"}, folder=tmp_path / name)

    killed = start("cut")
    deadline = time.monotonic() + 120
    while not (tmp_path / "cut/runs/nanogpt/checkpoints/step-00000025/manifest.json").exists():
        assert killed.returncode is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    assert killed.returncode == -signal.SIGKILL
    programs = [start("cut"), start("whole")]
    ended = [each.wait()[0].splitlines()[-1] for each in programs]
    assert [each.returncode for each in programs] == [0, 0]
    assert ended[0] == ended[1]
    assert "completed" in ended[0]
    digests = [
        load_weights(str(tmp_path / name / "runs/nanogpt/checkpoints/step-00000060")) for name in ("cut", "whole")
    ]
    assert same(digests[0], digests[1])


class Halves(nn.Module):
    """Two networks that one forward pass calls, with a loss and an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self(x)


def _halves() -> nn.Module:
    torch.manual_seed(3)
    return Halves()


def _optimizer_per_half(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in ("left", "right")}


def _train_halves(world: World, *, around_ddp: bool) -> dict[str, torch.Tensor]:
    data = DataLoader(Rows(64), batch_size=16)
    run = session(
        config_of(max_epochs=1), model=_halves, optimizer=_optimizer_per_half, data=data, validation=None, world=world
    )
    with run:
        for batch in run:
            for micro_batch in run.accumulate(batch):
                forward = run.model.both if around_ddp else run.model
                for name, logits in zip(("left", "right"), forward(micro_batch["x"]), strict=True):
                    run.backward(F.cross_entropy(logits, micro_batch["y"]))
                    run.step(run.optimizers[name])
            run.step()
    return weights(run)


def test_each_of_two_optimizers_steps_by_its_own_loss() -> None:
    trained, model = _train_halves(SINGLE, around_ddp=False), _halves()
    optimizers = _optimizer_per_half(model)
    for batch in DataLoader(Rows(64), batch_size=16):
        for optimizer, logits in zip(optimizers.values(), model(batch["x"]), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(logits, batch["y"]).backward()
            optimizer.step()
    assert same(trained, model.state_dict())


def _halves_on_ranks(world: World) -> dict[str, torch.Tensor]:
    with pytest.raises(StepError, match="reached only a part of the model.*call a method of the model in place of"):
        _train_halves(world, around_ddp=False)
    return _train_halves(world, around_ddp=True)


def test_losses_of_parts_of_a_model_on_ranks_need_a_method_of_it() -> None:
    """DDP waits for the gradients of all parameters; after a forward pass around it, they are reduced before a step."""
    first, second = run_on_ranks(_halves_on_ranks, 2)
    assert same(first, second)
    for name, value in _train_halves(SINGLE, around_ddp=False).items():
        torch.testing.assert_close(first[name], value, atol=1e-6, rtol=1e-5)
