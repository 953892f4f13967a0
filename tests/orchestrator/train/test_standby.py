"""A spare process only imports before it is taken; nothing else is visible later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import cloudpickle

from headway.orchestrator.config.experiment import Retries
from headway.orchestrator.train import standby
from headway.trainer.errors import ConfigError

# In a separate process, as started by Ray: the hook is pickled by value, and Headway is not imported.
_WARM = """
import json, os, sys
from ray import cloudpickle
hook, before = cloudpickle.loads(bytes.fromhex(sys.stdin.read())), dict(os.environ)
assert not [name for name in sys.modules if name == "torch" or name.startswith("headway")]
import importlib.util
import ray._private.worker
import torch
class Node:
    def get_session_dir_path(self): return sys.argv[1]
ray._private.worker.global_worker.node = Node()
def forbidden(*_): raise AssertionError("a device was looked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = forbidden
torch.cuda._lazy_init = forbidden
seed, state = torch.initial_seed(), torch.get_rng_state()
hook()
assert torch.initial_seed() == seed and torch.equal(torch.get_rng_state(), state)
print(json.dumps({
    "warm": sorted({"headway.orchestrator.train.worker", "ray.train.torch", "torch._dynamo"} & set(sys.modules)),
    "changed": sorted(name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)),
}))
"""


@pytest.mark.extended
def test_a_warm_process_has_imported_and_done_nothing_else(tmp_path: Path) -> None:
    def warmed(file: str, *, launched_ms: int = 2000) -> dict[str, list[str]]:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-c", _WARM, str(tmp_path), f"--worker-launch-time-ms={launched_ms}"],
            input=cloudpickle.dumps(standby._hook(file)).hex(), text=True,
            capture_output=True, timeout=300, env={**environment, standby.ENVIRONMENT: "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, list[str]] = json.loads(done.stdout)
        return found

    assert warmed(standby.__file__)["warm"] == []  # no spare was requested
    for name in ("1500-one", "2000-another"):
        tmp_path.joinpath("headway-spares").mkdir(exist_ok=True)
        tmp_path.joinpath("headway-spares", name).touch()
    assert warmed(standby.__file__, launched_ms=1499)["warm"] == []  # was already starting when one was requested
    assert warmed(standby.__file__) == {
        "warm": ["headway.orchestrator.train.worker", "ray.train.torch", "torch._dynamo"],
        "changed": [],
    }
    # Another Headway than the driver's: the job's import path is not known yet.
    assert warmed("/elsewhere/spares.py")["warm"] == []
    assert not list(tmp_path.joinpath("headway-spares").iterdir())


def test_what_is_no_answer_is_refused() -> None:
    assert (Retries().spares, Retries(spares=True).spares) == ("auto", True)
    with pytest.raises(ConfigError, match="spares must be"):
        Retries(spares="yes")  # type: ignore[arg-type]


def test_without_the_private_parts_of_ray_a_run_does_without_spares(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.runtime_env.setup_hook", None)
    monkeypatch.setitem(sys.modules, "ray._private.grpc_utils", None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    assert standby.environment(2) == {}
    standby._reserve()
    monkeypatch.setitem(sys.modules, "ray.train.v2._internal", None)
    standby.prestart(2, {"env_vars": {standby.ENVIRONMENT: "1"}})
    said = "cannot start worker processes early, so starts and restarts take longer (ModuleNotFoundError"
    assert caplog.text.count(said) == 3


# Writes the environment that was requested for early processes, instead of requesting them, and that of the workers.
_DRIVER = """
import sys
from pathlib import Path
from headway.orchestrator.cli.main import main
from headway.orchestrator.train import standby

standby._reserve = lambda workers, environment, **_: Path("requested").write_text(f"{workers} {environment}")
sys.exit(main(sys.argv[1:]))
"""
_PROGRAM = """
import os
from pathlib import Path
import ray
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from headway.trainer import Trainer, TrainerConfig

class Small(Trainer[TrainerConfig]):
    def configure_models(self):
        self.model = nn.Linear(2, 1)

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self):
        return DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1)), batch_size=2)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def on_fit_start(self):
        environment = ray.get_runtime_context().get_runtime_env_string()
        Path(os.environ["SEEN"], str(self.world.rank)).write_text(f"{self.world.size} {environment}")
"""


@pytest.mark.extended
@pytest.mark.parametrize("env", ["", 'scaling.env={GREETING: "h\u00e9llo"}'])
def test_the_first_workers_have_the_environment_of_the_early_processes(tmp_path: Path, env: str) -> None:
    """Otherwise Ray would start others: it matches processes by the text of their environment."""
    tmp_path.joinpath("small.py").write_text(_PROGRAM)
    tmp_path.joinpath("drive.py").write_text(_DRIVER)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "drive.py", "fit", "small.py", "scaling.workers=2", "config.max_steps=2", "name=early",
         *filter(None, [env])],
        cwd=tmp_path, env={**environment, "SEEN": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in "01":
        assert tmp_path.joinpath(rank).read_text() == tmp_path.joinpath("requested").read_text()
