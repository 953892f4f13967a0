"""What a sweep costs beside its training, what ASHA saves, and what ten deaths of the driver lose.

`python -m benchmarks sweep:overhead`, `sweep:asha` and `sweep:kills` measure one of them.
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
from headway.orchestrator.cli.sweep_console import SweepConsole
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder

from .table import Row, interleave, median_ratio

HERE = Path(__file__).parent
TRIALS, HOST_READABLE = 60, 2
SEEDS, SEARCHED, EPOCHS = range(5), 24, 16
KILLS, KILLED_TRIALS = 10, 24


def quiet() -> SweepConsole:
    return SweepConsole("validation/loss", "min", Console(file=io.StringIO()))


def overhead(folder: str, pairs: int = 7) -> Row:
    """Many short trials, two at a time, beside plain Ray Tune, which keeps no checkpoints."""
    import ray

    # Before the clock starts for either: a second, once in a process.
    import headway.orchestrator.sweeps.tune_adapter  # noqa: F401

    from .sweep_bare import sweep as sweep_bare
    from .sweep_headway import experiment, search

    number = itertools.count()
    ray.init(num_cpus=HOST_READABLE, include_dashboard=False, log_to_driver=False, configure_logging=False)

    def ours() -> float:
        name = f"ours{next(number)}"
        began = time.perf_counter()
        named = replace(experiment, name=name, storage=folder)
        result = sweep_experiment(named, replace(search, trials=TRIALS, concurrent=HOST_READABLE), display=quiet())
        seconds = time.perf_counter() - began
        assert [trial.status for trial in result.trials] == ["completed"] * TRIALS
        where_it_went(result)
        return seconds

    def theirs() -> float:
        began = time.perf_counter()
        sweep_bare(TRIALS, HOST_READABLE, f"{folder}/bare{next(number)}")
        return time.perf_counter() - began

    try:
        measured = interleave(ours, theirs, pairs=pairs)
    finally:
        ray.shutdown()
    for mine, bare in measured:
        print(f"  sweep, a pair: {mine:.1f} s against {bare:.1f} s")
    ratio = median_ratio(measured)
    return Row(
        f"sweep: {TRIALS} trials of 1 s, {HOST_READABLE} at once",
        f"{statistics.median(each for each, _ in measured):.1f} s",
        f"{statistics.median(each for _, each in measured):.1f} s",
        ratio,
        "<= 1.05",
        ratio <= 1.05,
    )


def where_it_went(result: SweepResult) -> None:
    """Prints the median seconds of a trial by what happened in them, from its events."""
    spans: dict[str, list[float]] = {}
    journal = read_events(Folder(result.sweep_dir))
    suggested = {each["trial"]: each["time"] for each in journal if each["event"] == "trial_suggested"}
    ended = {each["trial"]: each["time"] for each in journal if each["event"] == "trial_ended"}
    for trial in result.trials:
        marks = {each["event"]: each["time"] for each in reversed(read_events(Run(trial.run_dir).folder))}
        last = suggested[trial.name]
        order = ("driver_started", "attempt_started", "training", "attempt_ended")
        for name, at in [*((name, marks[name]) for name in order), ("told", ended[trial.name])]:
            spans.setdefault(name, []).append(at - last)
            last = at
    for name, seconds in spans.items():
        print(f"  sweep, a trial until {name}: {statistics.median(seconds):.3f} s")


def asha(folder: str) -> Row:
    """Digits, random search against the same with ASHA: the updates until the best loss of random search is reached."""
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
            concurrent=HOST_READABLE,
            seed=seed,
        )
        random_search = sweep_experiment(experiment, search, display=quiet())
        pruned = sweep_experiment(
            replace(experiment, name=f"asha{seed}"),
            replace(search, scheduler=ASHA(max_evaluations=EPOCHS)),
            display=quiet(),
        )
        assert random_search.best is not None
        assert pruned.best is not None
        target = random_search.best.metric
        theirs = sum(trial.trial.steps for trial in random_search.trials)
        ours = updates_until(pruned, target or 0.0)
        ratios.append(ours / theirs)
        spent = [spent[0] + sum(trial.trial.steps for trial in pruned.trials), spent[1] + theirs]
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
    """The updates that all trials had made when one of them had this loss; infinite if none ever did."""
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
    """A driver that is killed again and again: what had ended is as it was, and all results are there."""
    generator = random.Random(seed)
    place = Path(folder, "killed")
    command = [
        sys.executable, "-m", "headway.orchestrator", "sweep", str(HERE / "sweep_headway.py"), f"name={place.name}",
        f"storage={folder}", f"search.trials={KILLED_TRIALS}", "config.log_every=5 steps",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    before: dict[str, str] = {}
    lost = again = 0

    def look() -> None:
        """Compares what had ended with what is there now."""
        nonlocal lost, again
        ended = {each["trial"] for each in journal(place) if each["event"] == "trial_ended"}
        now = {name: record for name in ended | set(before) if (record := (place / name / "run.json").read_text())}
        lost += sum(name not in ended for name in before)
        again += sum(now[name] != record for name, record in before.items())
        before.update(now)

    began = time.time()
    for number in range(KILLS):
        since = time.time()
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        if number % 3:
            # However long Ray takes to come up: most die while trials train, begin and end.
            await_training(place, since)
        time.sleep(generator.uniform(0, 5))
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        look()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the sweep failed:\n{done.stdout}\n{done.stderr}")
    look()
    result = SweepResult.read(str(place))
    suggested = [each["index"] for each in journal(place) if each["event"] == "trial_suggested"]
    attempts = sum(Run(trial.run_dir).record.attempts for trial in result.trials)
    completed = sum(trial.status == "completed" and trial.metric is not None for trial in result.trials)
    lost += KILLED_TRIALS - completed
    print(
        f"  sweep, killed {KILLS} times in {time.time() - began:.0f} s: {completed} of {KILLED_TRIALS} trials have a "
        f"result, {again} were trained again, {lost} results lost, {attempts} attempts, "
        f"{len(suggested) - len(set(suggested))} suggestions made twice"
    )
    faults = lost + again + len(suggested) - len(set(suggested))
    if attempts == KILLED_TRIALS:
        raise RuntimeError("no trial was under way when its driver died: nothing was measured")
    return Row(
        f"sweep: driver killed {KILLS} times",
        f"{again} re-run",
        f"{lost} lost",
        float(faults),
        "0",
        not faults,
    )


def await_training(place: Path, since: float) -> None:
    """Waits until a trial trains that a driver of this life has started."""
    while True:
        folders = [Folder(str(each)) for each in place.glob("trial-*")]
        if any(each["event"] == "training" and each["time"] > since for one in folders for each in read_events(one)):
            return
        time.sleep(0.1)


def journal(place: Path) -> list[dict[str, object]]:
    return read_events(Folder(str(place)))


PARTS: dict[str, Callable[[str], Row]] = {"overhead": overhead, "asha": asha, "kills": kills}


def rows(*parts: str) -> list[Row]:
    """Measures the rows, or those of some parts."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        return [PARTS[part](folder) for part in parts or PARTS]
