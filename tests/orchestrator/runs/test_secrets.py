"""Secrets in a config are in no file of a run, and neither resuming nor repeating the run needs them there."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from headway.orchestrator import Experiment, resolve
from headway.orchestrator.config.loader import check_not_redacted, override
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.storage.events import EventWriter
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.train.fit import summarize_error
from headway.trainer import TrainerConfig
from headway.trainer.errors import ConfigError
from headway.trainer.trainer import Trainer

SECRET = "hunter2"


@dataclass(frozen=True, kw_only=True)
class HubConfig(TrainerConfig):
    api_key: str
    tracking: str = ""


class Hub(Trainer[HubConfig]):
    pass


def experiment(folder: Path, secret: str = SECRET) -> Experiment:
    config = HubConfig(api_key=secret, tracking=f"https://me:{secret}@tracking", max_steps=3)
    return Experiment(name="hub", trainer=Hub, config=config, storage=str(folder))


def test_no_file_of_a_run_has_a_secret_and_it_resumes_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["headway", "fit", "hub.py", f"config.api_key={SECRET}"])
    opened = open_run(experiment(tmp_path))
    EventWriter(Folder(opened.run.run_dir), "driver").add("message", text=f"GET https://me:{SECRET}@tracking failed")
    opened.run.update(error=summarize_error(ValueError(f"api_key={SECRET} is wrong")))
    for file in (tmp_path / "hub").rglob("*"):
        assert not file.is_file() or SECRET not in file.read_text(), file
    assert "config.api_key=(redacted)" in opened.run.record.command
    assert open_run(experiment(tmp_path, "another")).state == "resuming"


def test_a_run_started_from_a_record_asks_for_its_secrets(tmp_path: Path) -> None:
    recorded = open_run(experiment(tmp_path)).run.experiment()
    with pytest.raises(ConfigError, match=r"config.api_key, config.tracking are \(redacted\).* give them again"):
        check_not_redacted(recorded)
    given = override(recorded, {"config.api_key": SECRET, "config.tracking": ""})
    check_not_redacted(given)
    assert given.config.api_key == SECRET


def test_a_storage_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match=r"sftp://\(redacted\)@host/runs contains a password") as error:
        resolve(
            Experiment(name="a", trainer=Hub, config=HubConfig(api_key=""), storage=f"sftp://me:{SECRET}@host/runs")
        )
    assert SECRET not in str(error.value)
    replace(experiment(Path("/tmp")), storage="sftp://me@host/runs")
