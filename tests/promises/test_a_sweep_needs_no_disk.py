"""A `PBT` sweep whose files are in a bucket that only fsspec can reach."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from headway.orchestrator import SweepResult
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from tests.promises.test_an_object_store_is_as_good_as_a_disk import settings as settings  # the server of its tests

pytestmark = [
    pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(400),
    # s3fs keeps an event loop and sessions until the process ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]  # fmt: skip

ROOT = Path(__file__).parents[2]
TARGET = """
import time
import uuid
from pathlib import Path

from headway.orchestrator import PBT, Experiment, LogUniform, Scaling, Search
from tests.tiny import TinyConfig, TinyTrainer


class Member(TinyTrainer):
    def on_fit_start(self):
        # The trials of a population meet, however late one of them starts.
        Path("started", uuid.uuid4().hex).touch()
        while len(list(Path("started").iterdir())) < 2:
            time.sleep(0.1)

    def on_epoch_end(self, metrics):
        time.sleep(0.3)


experiment = Experiment(
    name="sweep", trainer=Member, config=TinyConfig(max_epochs=6), scaling=Scaling(cpus_per_worker=0.5)
)
search = Search(space={"config.learning_rate": LogUniform(1e-6, 1e-1)}, trials=2, scheduler=PBT(quantile=0.5), seed=3)
"""


def test_a_population_trains_in_a_bucket(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3fs = pytest.importorskip("s3fs")
    # Only fsspec reads this setting; pyarrow, which Ray would use, goes elsewhere.
    variables = {name: value for name, value in settings.items() if name != "AWS_ENDPOINT_URL"}
    variables["FSSPEC_S3_ENDPOINT_URL"] = settings["AWS_ENDPOINT_URL"]
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    bucket = f"runs-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem().mkdir(bucket)
    (tmp_path / "population.py").write_text(TARGET)
    (tmp_path / "started").mkdir()
    path = os.pathsep.join((str(ROOT / "build/types"), str(ROOT), os.environ["PYTHONPATH"]))
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    done = subprocess.run(
        [sys.executable, "-m", "headway.orchestrator", "sweep", "population.py", f"storage=s3://{bucket}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**environment, **variables, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = SweepResult.read(f"s3://{bucket}/sweep")
    assert [trial.status for trial in result.trials] == ["completed"] * 2
    events = read_events(Folder(f"s3://{bucket}/sweep"))
    changes = [each for each in events if each["event"] == "trial_changed"]
    assert changes
    assert all(each["checkpoint"].startswith(f"s3://{bucket}/sweep/trial-00") for each in changes)
    assert Folder(f"s3://{bucket}/sweep").folders() == ["owner", "trial-000", "trial-001"]
