"""Sweeps: overhead beside training, updates saved by ASHA, and results lost when the driver is killed ten times.

To measure one of them: `python -m benchmarks sweep:overhead`, `sweep:asha` or `sweep:kills`.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from headway.orchestrator import (
    ASHA,
    Choice,
    Experiment,
    LogUniform,
    Run,
    Search,
    SweepResult,
    sweep as sweep_experiment,
)
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.console import SweepConsole

from .table import Row, interleave, median_ratio

HERE = Path(__file__).parent
TRIALS, CONCURRENT = 60, 2
SEEDS, SEARCHED, EPOCHS = range(5), 24, 16
KILLS, KILLED_TRIALS = 10, 24


def silent_console() -> SweepConsole:
    return SweepConsole("validation/loss", "min", Console(file=io.StringIO()))


def overhead(folder: str, pairs: int = 7) -> Row:
    """Compare many short trials, two at a time, with plain Ray Tune, which saves no checkpoints."""
    import ray

    # Import before timing either side: this takes a second, once per process.
    import headway.orchestrator.sweeps.tune.adapter  # noqa: F401

    from .sweep_bare import sweep as sweep_bare
    from .sweep_headway import experiment, search

    number = itertools.count()
    ray.init(num_cpus=CONCURRENT, include_dashboard=False, log_to_driver=False, configure_logging=False)

    def ours() -> float:
        name = f"ours{next(number)}"
        began = time.perf_counter()
        named = replace(experiment, name=name, storage=folder)
        result = sweep_experiment(
            named, replace(search, trials=TRIALS, concurrent=CONCURRENT), display=silent_console()
        )
        seconds = time.perf_counter() - began
        assert [trial.status for trial in result.trials] == ["completed"] * TRIALS
        print_phases(result)
        return seconds

    def theirs() -> float:
        began = time.perf_counter()
        sweep_bare(TRIALS, CONCURRENT, f"{folder}/bare{next(number)}")
        return time.perf_counter() - began

    try:
        measured = interleave(ours, theirs, pairs=pairs)
    finally:
        ray.shutdown()
    for mine, bare in measured:
        print(f"  sweep, a pair: {mine:.1f} s against {bare:.1f} s")
    ratio = median_ratio(measured)
    return Row(
        f"sweep: {TRIALS} trials of 1 s, {CONCURRENT} at a time",
        f"{statistics.median(each for each, _ in measured):.1f} s",
        f"{statistics.median(each for _, each in measured):.1f} s",
        ratio,
        "<= 1.05",
        ratio <= 1.05,
    )


def print_phases(result: SweepResult) -> None:
    """Print the median seconds of each phase of a trial, from its events."""
    spans: dict[str, list[float]] = {}
    journal = read_events(Folder(result.sweep_dir))
    suggested = {each["trial"]: each["time"] for each in journal if each["event"] == "trial_suggested"}
    ended = {each["trial"]: each["time"] for each in journal if each["event"] == "trial_ended"}
    for trial in result.trials:
        marks = {each["event"]: each["time"] for each in reversed(read_events(Run(trial.run_dir).folder))}
        last = suggested[trial.name]
        order = ("driver_started", "attempt_started", "training", "attempt_ended")
        for name, at in [*((name, marks[name]) for name in order), ("recorded", ended[trial.name])]:
            spans.setdefault(name, []).append(at - last)
            last = at
    for name, seconds in spans.items():
        print(f"  sweep, a trial until {name}: {statistics.median(seconds):.3f} s")


def asha(folder: str) -> Row:
    """Compare random search with and without ASHA on digits: updates to reach the best loss of random search."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    from digits import Digits, DigitsConfig  # type: ignore[import-not-found]

    ratios = []
    spent = [0, 0]
    for seed in SEEDS:
        experiment = Experiment(
            name=f"random{seed}",
            trainer=Digits,
            config=DigitsConfig(max_epochs=EPOCHS, global_batch_size=64, micro_batch_size=32, seed=seed),
            storage=folder,
        )
        search = Search(
            space={"config.learning_rate": LogUniform(1e-5, 1e-1), "config.hidden_size": Choice([16, 64, 256])},
            trials=SEARCHED,
            concurrent=CONCURRENT,
            seed=seed,
        )
        random_search = sweep_experiment(experiment, search, display=silent_console())
        pruned = sweep_experiment(
            replace(experiment, name=f"asha{seed}"),
            replace(search, scheduler=ASHA(max_evaluations=EPOCHS)),
            display=silent_console(),
        )
        assert random_search.best is not None
        assert pruned.best is not None
        target = random_search.best.metric
        theirs = sum(trial.steps for trial in random_search.trials)
        ours = updates_until(pruned, target or 0.0)
        ratios.append(ours / theirs)
        spent = [spent[0] + sum(trial.steps for trial in pruned.trials), spent[1] + theirs]
        print(
            f"  sweep, seed {seed}: random search {target:.4f} after {theirs:,} updates; "
            f"ASHA {pruned.best.metric:.4f}, reached after {ours:,}"
        )
    ratio = statistics.median(ratios)
    return Row(
        f"sweep: ASHA to the best of {SEARCHED} random trials, digits",
        f"{spent[0]:,} updates",
        f"{spent[1]:,} updates",
        ratio,
        "<= 0.35",
        ratio <= 0.35,
    )


def updates_until(result: SweepResult, loss: float) -> float:
    """Return the updates of all trials until one of them reached this loss; infinity if none did."""
    made = [
        (each["time"], trial.name, each["step"], each["metrics"]["validation/loss"])
        for trial in result.trials
        for each in read_events(Folder(trial.run_dir))
        if each["event"] == "evaluated"
    ]
    reached = min((time_s for time_s, _, _, value in made if value <= loss * (1 + 1e-6)), default=None)
    if reached is None:
        return float("inf")
    steps: dict[str, int] = {}
    for time_s, name, step, _ in made:
        if time_s <= reached:
            steps[name] = max(steps.get(name, 0), step)
    return sum(steps.values())


def kills(folder: str, seed: int = 0) -> Row:
    """Kill the driver repeatedly; count finished trials that changed and results that are missing."""
    generator = random.Random(seed)
    sweep_dir = Path(folder, "killed")
    command = [
        sys.executable, "-m", "headway.orchestrator", "sweep", str(HERE / "sweep_headway.py"), f"name={sweep_dir.name}",
        f"storage={folder}", f"search.trials={KILLED_TRIALS}", "config.log_every=5 steps",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    before: dict[str, str] = {}
    lost = again = 0

    def compare() -> None:
        """Compare the trials that had ended before with their records now."""
        nonlocal lost, again
        ended = {each["trial"] for each in journal(sweep_dir) if each["event"] == "trial_ended"}
        now = {name: record for name in ended | set(before) if (record := (sweep_dir / name / "run.json").read_text())}
        lost += sum(name not in ended for name in before)
        again += sum(now[name] != record for name, record in before.items())
        before.update(now)

    began = time.time()
    for number in range(KILLS):
        since = time.time()
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        if number % 3:
            # However long Ray takes to start, most kills should come while trials start, train and end.
            await_training(sweep_dir, since)
        time.sleep(generator.uniform(0, 5))
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        compare()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the sweep failed:\n{done.stdout}\n{done.stderr}")
    compare()
    result = SweepResult.read(str(sweep_dir))
    suggested = [each["index"] for each in journal(sweep_dir) if each["event"] == "trial_suggested"]
    attempts = sum(Run(trial.run_dir).record.attempts for trial in result.trials)
    completed = sum(trial.status == "completed" and trial.metric is not None for trial in result.trials)
    lost += KILLED_TRIALS - completed
    print(
        f"  sweep, killed {KILLS} times in {time.time() - began:.0f} s: {completed} of {KILLED_TRIALS} trials have a "
        f"result, {again} were repeated, {lost} results lost, {attempts} attempts, "
        f"{len(suggested) - len(set(suggested))} duplicate suggestions"
    )
    faults = lost + again + len(suggested) - len(set(suggested))
    if attempts == KILLED_TRIALS:
        raise RuntimeError("no trial was running when its driver was killed, so nothing was measured")
    return Row(
        f"sweep: driver killed {KILLS} times",
        f"{again} re-run",
        f"{lost} lost",
        float(faults),
        "0",
        not faults,
    )


def await_training(sweep_dir: Path, since: float) -> None:
    """Wait until a trial trains that was started after `since`."""
    while True:
        folders = [Folder(str(each)) for each in sweep_dir.glob("trial-*")]
        if any(each["event"] == "training" and each["time"] > since for one in folders for each in read_events(one)):
            return
        time.sleep(0.1)


def journal(sweep_dir: Path) -> list[dict[str, object]]:
    return read_events(Folder(str(sweep_dir)))


PARTS: dict[str, Callable[[str], Row]] = {"overhead": overhead, "asha": asha, "kills": kills}


def rows(*parts: str) -> list[Row]:
    """Measure all rows, or those of the named parts."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        return [PARTS[part](folder) for part in parts or PARTS]
