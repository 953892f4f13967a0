"""A run from setup to end: joins the ranks, builds models, optimizers and data, and owns the loop."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..callbacks.base import Callback, CallbackList, PlainFunction
from ..checkpoints.rng import seed_everything
from ..config import TrainerConfig, as_plain
from ..data.protocols import BatchStream, check_data
from ..distributed import parallelize
from ..distributed.context_parallel import add_attention_advice
from ..distributed.ddp import add_ddp_advice
from ..distributed.fsdp import add_shard_advice
from ..distributed.gather_order import add_timeout_advice
from ..distributed.mesh import Mesh
from ..distributed.tensor_parallel import add_division_advice
from ..distributed.world import World
from ..errors import ConfigError, HeadwayError
from ..exact.numerics import Numerics, numerics_of
from ..metrics.history import History
from ..ownership.claim import Ownership, is_claimed_by_driver
from ..ownership.run_dir import claim_run_dir
from ..result import Status
from ..setup.class_check import OptimizersByName
from ..setup.compile_cache import CompileCache
from ..setup.data import check_same_data, open_data, open_sets
from ..setup.dry_run import Estimate, estimate_of
from ..setup.float8 import check_float8, convert_to_float8
from ..setup.metric_attributes import warn_of_metrics_never_reset
from ..setup.models import make_models, parallelize_models, rejoin_process_group
from ..setup.optimizers import make_optimizers
from ..setup.program import Program
from ..setup.rank_consistency import check_agreement
from ..setup.trainable import ReplicaCheck, TrainableCheck
from ..setup.unsaved_state import UnsavedState
from ..setup.versions import check_same_versions
from ..step.lr_stepping import LrStepping
from ..step.oom import add_memory_advice, is_out_of_memory
from ..trackers.base import Tracker
from ..trackers.jsonl import JsonlTracker
from . import messages
from .context import Mode, RunContext
from .control import Requests
from .evaluation_metrics import EvaluationMetrics
from .loop import Loop
from .progress import Progress
from .run_length import RunLength
from .signals import stop_on_signals
from .timing import Activity, DeviceTimes, SetupTimes


class Engine:
    """The common part of `Trainer` and `Session`: all but the user's code.

    Args:
        program: the user's code: how models, optimizers and data are made, and the steps.
        owner: the trainer or session that hooks get as `trainer`.
        config, run_dir, callbacks, trackers, world, attempt, printer: as `Trainer` describes them.
        progress_bar: a callback with a method `print`, added unless the user's callbacks have one of its class.

    Attributes:
        numerics: ordinary or exact arithmetic.
        requests: stop, save and evaluate requests to the loop.
        data: the training data, once open.
        validation: the sets of validation data, once open.
        context: shared by all parts, once `setup` has begun.
    """

    def __init__(
        self,
        program: Program,
        config: TrainerConfig,
        *,
        owner: object,
        run_dir: str | None,
        callbacks: Sequence[Callback | PlainFunction],
        trackers: Sequence[Tracker] | None,
        world: World | None,
        attempt: int,
        printer: Callable[[str], None] | None,
        progress_bar: Callback | None,
    ) -> None:
        self.program, self.config, self.owner = program, config, owner
        self.run_dir, self.attempt = run_dir, attempt
        self.numerics: Numerics = numerics_of(config)
        self.progress = Progress()
        self.history = History()
        self.activity = Activity()
        self.setup_times = SetupTimes()
        self.mode = Mode()
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = OptimizersByName()
        self.lr_stepping = LrStepping()
        self.callbacks = CallbackList()
        self.metrics: Mapping[str, Any] = {}
        self.data: BatchStream | None = None
        self.validation: dict[str, BatchStream] = {}
        self.is_set_up = False
        self._given_callbacks = _as_list(callbacks, "callbacks")
        self._given_trackers = None if trackers is None else _as_list(trackers, "trackers")
        self._printer = printer
        self._progress_bar = progress_bar
        self._display: Callable[[str], None] = print
        self._given_world = self._world = world
        self._data_world: World | None = None
        self._requests: Requests | None = None
        self._loop: Loop | None = None
        self._context: RunContext | None = None
        self._length: RunLength | None = None
        self._running: ExitStack | None = None
        self._ownership: Ownership | None = None

    @property
    def world(self) -> World:
        """The ranks. Joins the process group that `torchrun` describes if `setup` has not done so yet."""
        if self._world is None:
            parallel = self.config.parallel
            self._world = World.from_environment(
                timeout_s=parallel.timeout.amount, with_cpus=parallel.cpu_offload, backend=parallel.backend
            )
        return self._world

    @property
    def requests(self) -> Requests:
        """Stop, save and evaluate requests to the loop."""
        if self._requests is None:
            self._requests = Requests(self.world)
        return self._requests

    @property
    def context(self) -> RunContext:
        """The context that all parts share."""
        assert self._context is not None, "setup() makes it"
        return self._context

    @property
    def loop(self) -> Loop:
        """The loop.

        Raises:
            ConfigError: it does not exist before the end of `setup`.
        """
        if self._loop is None:
            raise ConfigError(
                "this run is not set up yet: call setup() of a trainer first, or use on_setup_end and later hooks; use "
                "a Session in `with Session(...) as run:`"
            )
        return self._loop

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run; None if unknown."""
        return self._length.total_steps if self._length is not None else self.config.max_steps

    @property
    def streams(self) -> list[BatchStream]:
        """The open data."""
        return ([] if self.data is None else [self.data]) + list(self.validation.values())

    def print(self, text: str) -> None:
        """Log a message of the run and display it once, from the main rank."""
        if self.world.is_main:
            messages.log(text, self._printer or self._display, on_console=self._printer is None)

    def begin(self) -> None:
        """Start the run: install signal handlers, claim the folder and set everything up. Every rank must call this.

        `end` undoes it.
        """
        _check_not_spawning()
        began_s = time.perf_counter()
        self.activity.enter("setting up")
        self._running = ExitStack()
        try:
            self._running.enter_context(self.numerics.deterministic(self.world.device))
            self._running.enter_context(stop_on_signals(lambda name: self.requests.stop(name, "interrupted")))
            self.check_config()
            self._rejoin_process_group()
            self._claim_run_dir()
            if self.world.device.type == "cuda":
                self.activity.measure_device(DeviceTimes(partial(torch.cuda.Event, enable_timing=True)))
            self.setup()
            self.loop.began_s = began_s
            self.loop.guard_saves(self._ownership_problem)
            self._print_guarantee()
        except BaseException as error:
            self.end(error, "failed")
            raise

    def end(self, error: BaseException | None, status: Status) -> None:
        """Clean up after a run, on success and failure. Must not communicate: other ranks may be gone."""
        if error is not None:
            self._add_advice(error)
        if self._requests is not None:
            self._requests.clear()
        running, self._running = self._running, None
        if running is not None:
            running.close()
        try:
            with ExitStack() as last_first:
                if self._given_world is None and self._world is not None:
                    last_first.callback(self._world.close, after_error=error is not None)
                last_first.callback(self._release_run_dir)
                for stream in self.streams:
                    last_first.callback(stream.close)
                if self.is_set_up:
                    last_first.callback(self.loop.recorder.finish, status)
                    last_first.callback(self.loop.clean_up)
                self.callbacks.on_fit_end(error)
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"the clean-up also failed with {type(failure).__name__}: {failure}")

    def _add_advice(self, error: BaseException) -> None:
        """Add notes to errors of torch that do not say what to change."""
        parallel = self.config.parallel
        if is_out_of_memory(error):
            add_memory_advice(
                error, self.config, self.world, step=self.progress.step, may_halve=self.numerics.may_halve
            )
        if parallel.cp > 1:
            add_attention_advice(error, self.world.device)
        if parallel.strategy in ("fsdp", "hsdp"):
            add_shard_advice(error)
            if self.is_set_up and self.world.size > 1:
                order = self.loop.optimizer_step.gather_order
                add_timeout_advice(error, None if order is None else order.calls_outside)
        add_ddp_advice(error)
        if parallel.tp > 1:
            add_division_advice(error, self.models)

    def setup(self) -> None:
        """Build models, optimizers and data, once. Every rank must call this."""
        _check_not_spawning()
        self._rejoin_process_group()
        if self.is_set_up:
            return
        program, config, numerics = self.program, self.config, self.numerics
        check_same_versions(self.world)
        # Before the first collective that would hang if they differ.
        check_agreement(self.world, {"config": {"parallel": as_plain(config.parallel)}})
        mesh = Mesh.of(self.world, config.parallel)
        ctx = self._make_context(mesh)
        self.callbacks.on_setup_start()
        compile_cache = None
        if config.parallel.compile and config.parallel.keep_compile_cache and self.run_dir is not None:
            compile_cache = CompileCache(self.run_dir, self.world, self.print)
            with self.setup_times.phase("compile_cache"):
                compile_cache.load()
        # The same seed on all ranks while weights are drawn; different ones afterwards.
        seed_everything(config.seed, rank="common")
        with self.setup_times.phase("configure"):
            with_values = make_models(program, ctx, numerics)
            if config.float8:
                convert_to_float8(self.models)
        parallelize_models(program, ctx, numerics, with_values=with_values)
        # Before the optimizers: schedules may need the number of steps of the whole run.
        with self.setup_times.phase("open_data"):
            self.open_data(ctx)
            check_same_data(self.world, self.streams)
            assert self.data is not None
            assert self._length is not None
            if self.data.guarantee != "exact":
                self._length.steps_on_ranks = self.world.all_gather_object(self.data.steps_in_epoch(0))
        with self.setup_times.phase("optimizers"):
            make_optimizers(program, ctx, evaluates=bool(self.validation), total_steps=self._length.total_steps)
        metrics = EvaluationMetrics(program.configure_metrics(), mesh.loss)
        numerics.check_metrics(metrics)
        self.metrics = metrics
        self._loop = Loop(
            ctx, program, numerics, self.requests, self.data, self.validation, metrics=metrics, length=self._length
        )
        self._loop.compile_cache = compile_cache
        check_trainable, check_replicas = TrainableCheck(program, ctx), ReplicaCheck(ctx)
        self._loop.check_trainable = partial(_call_all, (check_trainable, check_replicas))
        check_trainable()
        if self.world.is_main:
            warn_of_metrics_never_reset(program, self.callbacks)
        self._loop.saver.check_unsaved = UnsavedState(program, ctx, self.data)
        trackers = self._given_trackers
        if trackers is None:
            trackers = _as_list(program.configure_trackers(), "configure_trackers()")
        if self.run_dir is not None and not any(isinstance(tracker, JsonlTracker) for tracker in trackers):
            # Commands that follow the run read this file.
            trackers = [JsonlTracker(), *trackers]
        self._loop.recorder.set_trackers(trackers if self.world.is_main else ())
        seed_everything(config.seed, rank=numerics.seed_rank(mesh.loss))
        self._loop.announce_step()
        self.is_set_up = True
        self.callbacks.on_setup_end()

    def _rejoin_process_group(self) -> None:
        """Start another process group if the end of an earlier run has closed the first."""
        if self.world.has_ended and not self.is_set_up:
            # An earlier setup failed.
            self.world.rejoin()
        elif self.world.has_ended:
            self.loop.rejoin_process_group(lambda: rejoin_process_group(self.program, self.context))

    def _claim_run_dir(self) -> None:
        if self.run_dir is None or is_claimed_by_driver(self.run_dir):
            return
        self._ownership = claim_run_dir(
            self.world,
            self.run_dir,
            # The save at the stop fails with the same message.
            on_lost=lambda problem: self.requests.stop(problem, "interrupted"),
            say=self.print,
        )

    def _release_run_dir(self) -> None:
        ownership, self._ownership = self._ownership, None
        if ownership is not None:
            ownership.release()

    def _ownership_problem(self) -> str | None:
        return None if self._ownership is None else self._ownership.problem()

    def check(self, *, elsewhere: bool = False) -> None:
        """Check the config and the data, without building a model or reading a row. Any process may call this.

        Args:
            elsewhere: skips checks of the data and the device, for a machine that will not train.
        """
        _check_not_spawning()
        self.check_config(elsewhere=elsewhere)
        if elsewhere:
            return
        try:
            self.open_data(self._make_context(Mesh.without_groups(self.world, self.config.parallel)))
        finally:
            self._close_streams()

    def estimate(self) -> Estimate:
        """Estimate the size and memory of this run from shapes on the meta device and the data's metadata."""
        self.check_config()
        ctx = self._make_context(Mesh.without_groups(self.world, self.config.parallel))
        try:
            make_models(self.program, ctx, self.numerics, shapes_only=True)
            self.open_data(ctx)
            unknown = ""
            try:
                make_optimizers(self.program, ctx, evaluates=bool(self.validation), total_steps=self.total_steps)
            except HeadwayError:
                raise
            except Exception as error:
                # Fused and third-party optimizers may need parameters with values.
                unknown = f"on the meta device configure_optimizers() raises {type(error).__name__}: {error}"
            assert self.data is not None
            return estimate_of(ctx, self.data, self.validation, total_steps=self.total_steps, unknown=unknown)
        finally:
            self._close_streams()

    def check_step(self, ranks: int) -> dict[str, float]:
        """Make one update and evaluate one batch of each validation set, in this process on the CPU.

        Files of the run, such as those that callbacks write, go to a temporary folder.

        Args:
            ranks: the number of ranks that read different rows; this process gets the part of rank 0.
        """
        error: BaseException | None = None
        with tempfile.TemporaryDirectory(prefix="headway-check-step-") as folder:
            self.run_dir, self._given_trackers, self._progress_bar = folder, [], None
            self._given_world = self._world = World.single("cpu")
            self._data_world = replace(self._world, size=ranks)
            self.numerics = numerics_of(self.config)
            try:
                self.check_config()
                self.setup()
                return self.loop.check_step()
            except BaseException as raised:
                error = raised
                raise
            finally:
                self.end(error, "stopped")

    def check_config(self, *, elsewhere: bool = False) -> None:
        """Check the config.

        Raises:
            ConfigError: a field is invalid.
        """
        config = self.config
        limits = (config.max_epochs, config.max_steps, config.max_samples, config.max_tokens)
        if all(limit is None for limit in limits):
            raise ConfigError("the config has no limit: set max_epochs, max_steps, max_samples or max_tokens")
        if config.max_tokens is not None and not self.program.overrides_num_tokens:
            raise ConfigError(
                f"max_tokens={config.max_tokens} needs a trainer that counts tokens: {type(self.owner).__name__} does "
                "not define num_tokens(self, batch)"
            )
        parallelize.check_strategy(config.parallel, self.world)
        if config.float8 and config.parallel.tp > 1:
            raise ConfigError("float8=True does not support parallel.tp: leave one of them out")
        if config.parallel.cp > 1 and self.program.overrides_prepare_batch and self.program.overrides_loss_weight:
            raise ConfigError(
                "parallel.cp does not support prepare_batch with loss_weight, which gets batches as loaded: "
                "prepare them in the dataset or collate_fn"
            )
        if config.float8 and not elsewhere:
            check_float8(self.world.device)
        self.numerics.check_config(config)

    def open_data(self, ctx: RunContext) -> None:
        """Open training and validation data on this rank."""
        reading = ctx if self._data_world is None else replace(ctx, mesh=replace(ctx.mesh, data=self._data_world))
        self.data, self.validation = open_data(self.program, reading, self.numerics)
        self._length = RunLength(self.config, self.progress, self.data)
        check_data(self.config, self.data, self.validation)

    def open_sets(self, data: Any) -> dict[str, BatchStream]:
        """Open other validation data than the run's, for an evaluation."""
        return open_sets(self.context, self.numerics, data, in_use=self.streams)

    def _make_context(self, mesh: Mesh) -> RunContext:
        given = (*_as_list(self.program.configure_callbacks(), "configure_callbacks()"), *self._given_callbacks)
        bar = self._progress_bar
        if bar is not None and not any(isinstance(each, type(bar)) for each in given):
            given = (*given, bar)
            self._display = bar.print  # type: ignore[attr-defined]
        self.callbacks = CallbackList(given, trainer=self.owner)
        self._context = RunContext(
            name=type(self.owner).__name__,
            config=self.config,
            world=self.world,
            mesh=mesh,
            run_dir=self.run_dir,
            attempt=self.attempt,
            print=self.print,
            callbacks=self.callbacks,
            progress=self.progress,
            history=self.history,
            activity=self.activity,
            setup_times=self.setup_times,
            mode=self.mode,
            models=self.models,
            optimizers=self.optimizers,
            lr_stepping=self.lr_stepping,
        )
        return self._context

    def _close_streams(self) -> None:
        for stream in self.streams:
            stream.close()

    def _print_guarantee(self) -> None:
        """Print before the first step if a resumed run could not continue exactly inside an epoch."""
        assert self.data is not None
        if self.run_dir is None or self.data.guarantee == "exact":
            return
        effect = {
            "state": "a resumed run continues where the state_dict of the data says, on the same number of ranks; on "
            "another it restarts the epoch in progress",
            "epoch": "a resumed run restarts the epoch in progress, and may see its samples twice",
            "none": "a resumed run continues with the batches that the data yields then",
        }
        self.print(f"the training data guarantees {self.data.guarantee!r}, not 'exact': {effect[self.data.guarantee]}")


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _as_list(given: Any, source: str) -> list[Any]:
    """Return callbacks or trackers as a list.

    Raises:
        ConfigError: `given` is a single one, or None.
    """
    if not isinstance(given, Iterable):
        raise ConfigError(f"{source} must be a list, which may be empty, got {given!r}: return or pass [...]")
    return list(given)


def _check_not_spawning() -> None:
    """Check that this process is not being spawned, as worker processes of a `DataLoader` may be.

    Such a process runs the script again before it does its work. Under `torchrun` it would join the ranks as one of
    them, and all would wait for each other.

    Raises:
        ConfigError: the script starts a run without a guard.
    """
    # Private: by this attribute, `multiprocessing` itself refuses to start processes then.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a process that this script has spawned, such as a DataLoader worker, imports the script and would start "
            'the run again: put what starts it below `if __name__ == "__main__":`'
        )
