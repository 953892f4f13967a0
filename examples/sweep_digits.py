"""Search for the best learning rate and hidden size of `digits.py`: the smallest complete sweep.

headway sweep examples/sweep_digits.py                       12 trials, bad ones pruned early
headway sweep examples/sweep_digits.py search.trials=24      resume the same sweep with 12 more
"""

from __future__ import annotations

from digits import Digits, DigitsConfig

from headway.orchestrator import ASHA, Choice, Experiment, LogUniform, Search, sweep

experiment = Experiment(
    name="sweep-digits",
    trainer=Digits,
    config=DigitsConfig(max_epochs=8, global_batch_size=64, micro_batch_size=32, seed=1),
)
search = Search(
    space={"config.learning_rate": LogUniform(1e-5, 1e-1), "config.hidden_size": Choice([16, 64, 256])},
    metric="validation/loss",
    trials=12,
    scheduler=ASHA(max_evaluations=8),
)

if __name__ == "__main__":
    results = sweep(experiment, search)
    print(results.table.text())
