"""docs/coming-from/small-trainers.md: every name of four trainers has a row, and every Headway name in it exists."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer

import headway.orchestrator
import headway.trainer
import headway.trainer.callbacks
import headway.trainer.trackers
from headway.orchestrator.cli.main import app
from headway.trainer import ConfigError, Duration, Trainer, World
from headway.trainer.callbacks import PeakMemory
from headway.trainer.callbacks.base import HOOKS
from headway.trainer.config import ActivationCheckpointing, NonFinite, Precision, Strategy
from headway.trainer.result import Status
from headway.trainer.step.lr_stepping import Interval
from tests.tiny import TinyConfig, TinyTrainer

PAGE = Path(__file__).parents[1] / "docs" / "coming-from" / "small-trainers.md"

THEIRS = {
    "Dream Trainer": """
        BaseTrainer BaseTrainerConfig DreamTrainer DreamTrainerConfig AbstractTrainer SetupMixin SetupConfigMixin *args
        config callbacks CallbackCollection training global_step local_batches current_epoch
        training_step batch_idx validation_step fit backward step(model, optimizer, scheduler=None)
        is_accumulating_gradients log
        pre_launch pre_configure post_configure pre_setup post_setup pre_fit pre_epoch post_epoch post_fit
        pre_train_batch post_train_batch pre_val_batch post_val_batch
        configure_models init_weights configure_optimizers configure_dataloaders
        project group experiment training_parameters TrainingParameters n_epochs train_batch_size val_batch_size
        gradient_accumulation_steps torchrun meta_device
        a_model_passed_to_the_constructor returned_dict training_loop train_loader log_metrics should_validate
        validation_loop device is_distributed wrap_model compile_model optimizer learning_rate weight_decay
        g_optimizer d_optimizer g_lr d_lr scheduler CosineAnnealingLR(T_max=n_epochs) criterion train_data_dir
        val_data_dir num_workers shuffle DistributedSampler world_size global_rank compute_metrics clip_gradients
        gradient_clip_val autocast save_checkpoint load_checkpoint Callback on_train_batch_end on_validation_batch_end
    """,
    "EasyDeL's BaseTrainer": """
        BaseTrainer arguments TrainingArguments BaseTrainerProtocol EasyDeLState configure_model
        TrainerConfigureModelOutput model state configure_dataloaders TrainerConfigureDataloaderOutput dataloader_train
        dataloader_eval configure_functions TrainerConfigureFunctionOutput train_step_fn eval_step_fn jax.jit
        create_collect_function train(ckpt_path=None) eval(state) save_pretrained(ckpt_path, state=None)
        model_name num_train_epochs learning_rate total_batch_size per_device_train_batch_size
        per_device_eval_batch_size gradient_accumulation_steps weight_decay max_steps gradient_checkpointing
        nothing_saveable everything_saveable sharding_array use_fast_kernels logging_steps save_steps save_total_limit
        evaluation_strategy eval_steps output_dir save_strategy train_step(state, batch) eval_step(state, batch)
        on_step_start on_step_end(state, metrics) on_log scheduler(step) SFTTrainer DPOTrainer multi-device
    """,
    "mini.trainer": """
        max_steps grad_clip max_non_finite_grad_retries mixed_precision gradient_accumulation_steps workspace device
        no_sync_accumulate state_dict_options logger build_data_loader build_model build_optimizer forward(input) loss
        records build_lr_scheduler build_grad_scaler build_hooks train _build _run_step state_dict load_state_dict
        BaseHook on_before_train on_after_train on_before_step on_after_step on_log on_log_images dry_run on_state_dict
        on_load_state_dict ProgressHook interval with_records sync eta_warmup step_time data_time lr_i grad_norm
        LoggingHook log(records, dry_run) CheckpointingHook keep_previous keep_interval path load exit_signals exit_code
        exit_wait checkpoint_step_{step}.pt checkpoint_latest.pt CudaMaxMemoryHook max_memory EmaHook decay
        update_interval ema_model WandbHook project name config ImageFileLoggerHook max_images
        step model optimizer lr_scheduler data_loader hooks step_info unwrap unwrapped_model log_images
        map_nested_tensor key_average load_config REGISTRY.register build_from_cfg type
    """,
    "qurious' Trainer": """
        Trainer model optimizer loss_fn config device scheduler train_step(batch) eval_step(batch)
        train_epoch(train_dl, eval_dl, epoch) evaluate(dl) train(train_dl, num_epochs) train_dataloader eval_dataloader
        num_epochs save_dir save_freq best_model_metric early_stopping_patience callbacks trainer, epoch, metrics
        history load_checkpoint load_optimizer load_scheduler _prepare_batch _forward_pass _compute_loss
        _save_checkpoint(path, epoch, metric_value) training.weight_decay training.max_grad_norm
        training.scheduler_step_per_batch Hugging_Face_models tuple dict train_loss eval_loss best-model per-epoch
        out_of_memory NaN slow
    """,
}
"""Section 1 of the inventory of the four, by the heading of their section. An underscore may stand for a space."""

COMPARISON = "Design differences"

OURS = {
    "self": Trainer,
    "torch": torch,
    "DataLoader": torch.utils.data.DataLoader,
    **{
        name: getattr(module, name)
        for module in (
            headway.trainer,
            headway.trainer.callbacks,
            headway.trainer.trackers,
            headway.orchestrator,
        )
        for name in module.__all__
    },
}


def _sections() -> dict[str, list[list[str]]]:
    """Return the table rows of each section by its heading."""
    sections: dict[str, list[list[str]]] = {}
    for part in re.split(r"(?m)^## ", PAGE.read_text())[1:]:
        heading, _, text = part.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        sections[heading] = [[cell.strip(" |") for cell in row] for row in rows if row[0] not in ("theirs", "question")]
    return sections


SECTIONS = _sections()


def _names(text: str) -> list[str]:
    """Split a checklist at spaces, except inside parentheses or after a comma."""
    return [name for name in re.split(r"(?<!,)\s+(?![^(]*\))", text.strip()) if name]


@pytest.mark.parametrize("section", THEIRS)
def test_every_name_of_theirs_has_a_row(section: str) -> None:
    first_cells = "\n".join(row[0] for row in SECTIONS[section]).replace("`", "")
    missing = [
        name
        for name in _names(THEIRS[section])
        if not re.search(rf"(?<![\w.]){re.escape(name).replace('_', '[_ ]')}(?!\w)", first_cells)
    ]
    assert not missing


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Values of settings and names in logs that the page may quote."""
    trainer = TinyTrainer(
        TinyConfig(max_steps=2, precision="fp16", log_every=1, num_rows=16),  # type: ignore[arg-type]
        world=World.single("cpu"),
        callbacks=[PeakMemory()],
    )
    settings = (Strategy, Precision, NonFinite, ActivationCheckpointing, Interval, Status)
    return set(trainer.fit().metrics) | {word for each in settings for word in get_args(each)} | {"auto", "never"}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_of_ours_exists(section: str, words: set[str]) -> None:
    wrong = []
    for row in SECTIONS[section]:
        _, ours, remark = (re.findall(r"`([^`]+)`", cell) for cell in [*row, ""][:3])
        assert ours or section == COMPARISON, f"{row[0]} has no name here"
        if section == COMPARISON:
            ours = []  # Its second column has their names, too.
        for span in [*ours, *(each for each in remark if _is_ours(each))]:
            try:
                _check(span, words)
            except (AttributeError, TypeError, LookupError, SyntaxError, ConfigError) as error:
                wrong.append(f"{span}: {error}")
    assert not wrong


@pytest.mark.parametrize(
    "span",
    [
        "Trainer.train_all",
        "TrainerConfig(max_epoch=1)",
        "CheckpointConfig.keep_first",
        "on_step_ended",
        "headway fit x.py --dry",
        "headway train x.py",
        '"gradient_norm"',
        "Experiment(name='x', worker=1)",
        "NoSuchThing",
    ],
)
def test_a_name_that_does_not_exist_is_found(span: str, words: set[str]) -> None:
    with pytest.raises((AttributeError, TypeError, LookupError, ConfigError)):
        _check(span, words)


def _is_ours(span: str) -> bool:
    """Return whether a name in a remark is one of Headway's; remarks contain both."""
    root = re.split(r"\W", span.lstrip('"'), maxsplit=1)[0]
    return root in OURS or root == "headway" or span.startswith('"') or span in HOOKS


def _check(span: str, words: set[str]) -> None:
    """Raise unless the names in a piece of code exist. The code is not run."""
    if span.startswith("headway "):
        _check_command(span.split()[1:])
        return
    expression = ast.parse(span, mode="eval").body
    if isinstance(expression, ast.Constant):
        if expression.value not in words:
            Duration.parse(expression.value)
        return
    if span.startswith("on_"):
        if span not in HOOKS:
            raise LookupError("no such hook")
        return
    _resolve(expression)
    for call in (node for node in ast.walk(expression) if isinstance(node, ast.Call)):
        if (callee := _resolve(call.func)) is None:
            continue
        if inspect.isclass(callee) and issubclass(callee, Trainer):
            known = {*inspect.signature(callee).parameters, *inspect.signature(Trainer).parameters}
        else:
            known = set(inspect.signature(callee).parameters) if not _takes_any(callee) else set()
        for keyword in call.keywords:
            if known and keyword.arg not in known:
                raise TypeError(f"{ast.unparse(call.func)} takes no {keyword.arg}")


def _takes_any(callee: Any) -> bool:
    try:
        parameters = inspect.signature(callee).parameters.values()
    except ValueError:
        return True
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def _resolve(node: ast.expr) -> Any:
    """Return the object of a dotted name, which may be an instance attribute."""
    match node:
        case ast.Name(name):
            return OURS[name]
        case ast.Call(func):
            return _resolve(func)
        case ast.Subscript(value):
            _resolve(value)
            return None
        case ast.Attribute(value, name):
            owner = _resolve(value)
            if owner is None:
                return None
            if hasattr(owner, name):
                return getattr(owner, name)
            if not inspect.isclass(owner) or not _is_set(owner, name):
                raise AttributeError(f"{ast.unparse(value)} has no {name}")
            return None
    raise TypeError(f"{ast.unparse(node)} is no name")


def _is_set(owner: type, name: str) -> bool:
    """Return whether instances have an attribute, as a field or set in `__init__`."""
    return any(
        name in inspect.get_annotations(each) or f"self.{name} " in inspect.getsource(each) or f"self.{name}:" in source
        for each in owner.__mro__[:-1]
        if each.__module__.startswith("headway") and (source := inspect.getsource(each))
    )


def _check_command(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    if unknown := [word for word in words if word.startswith("-") and word not in options]:
        raise LookupError(f"no such option: {unknown}")
