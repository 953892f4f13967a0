"""Search quality of "tpe" against Optuna and Ray Tune by themselves, and the time of a suggestion after 1,000 trials.

To measure one of them: `python -m benchmarks search:quality`, `search:training` or `search:time`. Starts no Ray.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import scipy.stats
import torch
from sklearn.datasets import load_digits
from torch import nn

from headway.orchestrator import LogUniform, PastTrial, RandInt, Search, Uniform

from .table import Row, interleave, median_ratio

# With thirty seeds, the same comparison gave anything from p=0.04 to p=0.7.
SEEDS, TRIALS, BEFORE, SUGGESTIONS = range(110), 60, 1000, 20
TRAINING_SEEDS, UPDATES = range(30), 25

Function = Callable[..., float]
Space = Mapping[str, Uniform | LogUniform | RandInt]


def branin(x: float, y: float) -> float:
    """Return the Branin function minus its minimum."""
    a = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return a**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10 - 0.397887


def rosenbrock(x: float, y: float) -> float:
    """Return the Rosenbrock function."""
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels and labels of scikit-learn's digits."""
    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def training(learning_rate: float, hidden: int) -> float:
    """Return the validation loss of a small network after some updates with all training data."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, labels = digits()
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[300:]), labels[300:]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(pixels[:300]), labels[:300]))


FUNCTIONS: Mapping[str, tuple[Function, Space]] = {
    "Branin": (branin, {"config.x": Uniform(-5.0, 10.0), "config.y": Uniform(0.0, 15.0)}),
    "Rosenbrock": (rosenbrock, {"config.x": Uniform(-2.0, 2.0), "config.y": Uniform(-1.0, 3.0)}),
}


def sampler(seed: int) -> Any:
    """Return Optuna's sampler with the settings of ours."""
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


TRAINING: Space = {"config.learning_rate": LogUniform(1e-5, 10.0), "config.hidden": RandInt(4, 64)}


def ours(function: Function, space: Space, seed: int) -> float:
    """Return the best value of a search of ours."""
    search, tried = Search(space=space, algorithm="tpe", seed=seed, trials=TRIALS), []
    for index in range(TRIALS):
        values = search.suggest(index, tried)
        tried.append(PastTrial(values=values, state="ended", metric=function(*values.values())))
    return min(each.metric or 0.0 for each in tried)


def optunas(function: Function, space: Space, seed: int) -> float:
    """Return the best value of a study of Optuna."""
    study = optuna.create_study(sampler=sampler(seed))

    def objective(trial: Any) -> float:
        values = [
            trial.suggest_int(path, axis.low, axis.high) if isinstance(axis, RandInt)
            else trial.suggest_float(path, axis.low, axis.high, log=isinstance(axis, LogUniform))
            for path, axis in space.items()
        ]  # fmt: skip
        return function(*values)

    study.optimize(objective, n_trials=TRIALS)
    return float(study.best_value)


def tunes(function: Function, space: Space, seed: int) -> float:
    """Return the best value of Ray Tune's `OptunaSearch` with its defaults, asked as Ray Tune does."""
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    kinds = {Uniform: tune.uniform, LogUniform: tune.loguniform, RandInt: lambda low, high: tune.randint(low, high + 1)}
    searcher = OptunaSearch(seed=seed)
    searcher.set_search_properties(
        "loss", "min", {path: kinds[type(axis)](axis.low, axis.high) for path, axis in space.items()}
    )
    values = []
    for trial in map(str, range(TRIALS)):
        suggested = searcher.suggest(trial)
        values.append(function(*(suggested[path] for path in space)))
        searcher.on_trial_complete(trial, {"loss": values[-1], "training_iteration": 1})
    return min(values)


def quality(name: str, function: Function, space: Space, seeds: range) -> list[Row]:
    """Compare the best value after 60 trials over many seeds; missed if a rank test finds ours larger."""
    own = [ours(function, space, seed) for seed in seeds]
    found = []
    for library, search in (("Optuna", optunas), ("Ray Tune's OptunaSearch", tunes)):
        other = [search(function, space, seed) for seed in seeds]
        worse = scipy.stats.mannwhitneyu(own, other, alternative="greater").pvalue
        medians = statistics.median(own), statistics.median(other)
        found.append(
            Row(
                f"{name}, {TRIALS} trials, {len(seeds)} seeds: best value against {library}",
                f"{medians[0]:.4f}",
                f"{medians[1]:.4f}",
                medians[0] / medians[1],
                f"not worse by rank (p={worse:.2f} > 0.05)",
                worse > 0.05,
            )  # fmt: skip
        )
    return found


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
        for name, (function, space) in FUNCTIONS.items():
            found += quality(name, function, space, SEEDS)
    if not some or "training" in some:
        found += quality("a network for digits", training, TRAINING, TRAINING_SEEDS)
    if not some or "time" in some:
        found.append(suggestion_time())
    return found
