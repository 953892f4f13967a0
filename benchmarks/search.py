"""Search quality of "tpe" against Optuna by itself, and the time of a suggestion after a thousand trials. Without Ray.

To measure one of them: `python -m benchmarks search:quality` or `search:time`.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import scipy.stats

from headway.orchestrator import PastTrial, Search, Uniform

from .table import Row, interleave, median_ratio

# With thirty seeds, the same comparison gave anything from p=0.04 to p=0.7.
SEEDS, TRIALS, BEFORE, SUGGESTIONS = range(110), 60, 1000, 20


def branin(x: float, y: float) -> float:
    """Return the Branin function minus its minimum."""
    a = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return a**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10 - 0.397887


def rosenbrock(x: float, y: float) -> float:
    """Return the Rosenbrock function."""
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


FUNCTIONS: Mapping[str, tuple[Callable[[float, float], float], dict[str, Uniform]]] = {
    "Branin": (branin, {"config.x": Uniform(-5.0, 10.0), "config.y": Uniform(0.0, 15.0)}),
    "Rosenbrock": (rosenbrock, {"config.x": Uniform(-2.0, 2.0), "config.y": Uniform(-1.0, 3.0)}),
}


def sampler(seed: int) -> Any:
    """Return Optuna's sampler with the settings of ours."""
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def ours(function: Callable[[float, float], float], space: dict[str, Uniform], seed: int) -> float:
    """Return the best value of a search of ours."""
    search, tried = Search(space=space, algorithm="tpe", seed=seed, trials=TRIALS), []
    for index in range(TRIALS):
        values = search.suggest(index, tried)
        tried.append(PastTrial(values=values, state="ended", metric=function(*values.values())))
    return min(each.metric or 0.0 for each in tried)


def theirs(function: Callable[[float, float], float], space: dict[str, Uniform], seed: int) -> float:
    """Return the best value of a study of Optuna."""
    study = optuna.create_study(sampler=sampler(seed))

    def objective(trial: Any) -> float:
        return function(*(trial.suggest_float(path, axis.low, axis.high) for path, axis in space.items()))

    study.optimize(objective, n_trials=TRIALS)
    return float(study.best_value)


def quality(name: str) -> Row:
    """Compare the regret after 60 trials over many seeds; missed if a rank test finds ours larger."""
    function, space = FUNCTIONS[name]
    own, other = ([search(function, space, seed) for seed in SEEDS] for search in (ours, theirs))
    worse = scipy.stats.mannwhitneyu(own, other, alternative="greater").pvalue
    medians = statistics.median(own), statistics.median(other)
    return Row(
        f"{name}, {TRIALS} trials, {len(SEEDS)} seeds: regret against Optuna", f"{medians[0]:.3f}", f"{medians[1]:.3f}",
        medians[0] / medians[1], f"not worse by rank (p={worse:.2f} > 0.05)", worse > 0.05,
    )  # fmt: skip


def suggestion_time() -> Row:
    """Compare the time of a suggestion after a thousand trials with that of an Optuna study."""
    generator = random.Random(0)
    _, space = FUNCTIONS["Branin"]
    search, study = Search(space=space, algorithm="tpe"), optuna.create_study(sampler=sampler(0))
    tried: list[PastTrial] = []
    for index in range(BEFORE):
        values, metric = search.sample(index), generator.random()
        tried.append(PastTrial(values=values, state="ended", metric=metric))
        study.add_trial(
            optuna.trial.create_trial(
                params=values, value=metric,
                distributions={
                    path: optuna.distributions.FloatDistribution(axis.low, axis.high) for path, axis in space.items()
                },
            )
        )  # fmt: skip
    search.suggest(BEFORE, tried)

    def suggest_ours() -> float:
        before_s = time.perf_counter()
        values = search.suggest(len(tried), tried)
        took_s = time.perf_counter() - before_s
        tried.append(PastTrial(values=values, state="ended", metric=generator.random()))
        return took_s

    def suggest_theirs() -> float:
        before_s = time.perf_counter()
        trial = study.ask()
        for path, axis in space.items():
            trial.suggest_float(path, axis.low, axis.high)
        took_s = time.perf_counter() - before_s
        study.tell(trial, generator.random())
        return took_s

    pairs = interleave(suggest_ours, suggest_theirs, pairs=SUGGESTIONS)
    medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
    return Row(
        f"a suggestion after {BEFORE:,} trials", f"{medians[0] * 1e3:.0f} ms", f"{medians[1] * 1e3:.0f} ms",
        median_ratio(pairs), "<= 50 ms", medians[0] <= 0.05,
    )  # fmt: skip


def rows(*some: str) -> list[Row]:
    """Return the rows that were asked for, by default all."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = []
    if not some or "quality" in some:
        found += [quality(name) for name in FUNCTIONS]
    if not some or "time" in some:
        found.append(suggestion_time())
    return found
