"""Send records, images and texts to MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .base import RunInfo
from .remote_run import RemoteRunTracker

if TYPE_CHECKING:
    import numpy as np

_PARAMS_AT_ONCE, _CHARACTERS = 100, 6000  # MLflow's limits: parameters per call, and characters per value

_STATUS = {"failed": "FAILED", "interrupted": "KILLED", "time_limit": "KILLED"}


class MlflowTracker(RemoteRunTracker):
    """Records a run with MLflow, as one MLflow run over all restarts.

    Parameters are the config by dotted paths, from the first attempt: MLflow does not allow changes. A run ends as
    FINISHED if it was completed or stopped on request, as FAILED if it failed, and as KILLED if a signal or a time
    limit ended it; the tag `headway.status` has the exact status. Trials of a sweep have the tag `headway.sweep`. The
    id of the run is in `mlflow.json` in the run directory, and in the checkpoints. Steps that were sent before a resume
    or a rewind are not sent again: MLflow can append, but not delete.

    Args:
        experiment: name of the experiment, created if needed. By default from the environment (`MLFLOW_EXPERIMENT_ID`,
            `MLFLOW_EXPERIMENT_NAME`), or "Default".
        tracking_uri: URI of the server or store, such as `http://host:5000` or `sqlite:///runs.db`; by default from the
            environment (`MLFLOW_TRACKING_URI`). `mlflow-skinny` suffices for a server; a database needs `mlflow`.
        tags: the MLflow run's tags.

    Example:
        >>> tracker = MlflowTracker("digits", tracking_uri="http://localhost:5000", tags={"team": "a"})
        >>> trainer = Digits(config, run_dir="runs/served", trackers=[tracker])
    """

    service = "mlflow"

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._experiment, self._tracking_uri, self._tags = experiment, tracking_uri, dict(tags or {})
        self._client: Any = None

    def open_run(self, run: RunInfo, known: str | None) -> str:
        """Resume the run, or create it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self._tracking_uri)
        joined = os.environ.get("MLFLOW_RUN_ID") or known
        if joined:
            client.update_run(joined, status="RUNNING")
        else:
            tags = {**({"headway.sweep": run.group} if run.group else {}), **self._tags}
            joined = str(client.create_run(self._experiment_id(client), run_name=run.full_name, tags=tags).info.run_id)
        if joined != known:
            params = [Param(name, str(value)[:_CHARACTERS]) for name, value in _flat(run.config)]
            for first in range(0, len(params), _PARAMS_AT_ONCE):
                client.log_batch(joined, params=params[first : first + _PARAMS_AT_ONCE])
        self._client = client
        return joined

    def send_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Send metrics, in one call."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        values = [Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def send_images(self, images: Mapping[str, np.ndarray[Any, Any]], *, step: int) -> None:
        """Send images; MLflow needs Pillow for this."""
        for name, pixels in images.items():
            self._client.log_image(self._id, pixels, key=name, step=step)

    def send_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Send texts, as files."""
        for name, text in texts.items():
            self._client.log_text(self._id, text, f"texts/{name}/step-{step:08d}.txt")

    def finish(self, status: str) -> None:
        """End the run with the matching MLflow status."""
        if self._client is not None:
            self._client.set_tag(self._id, "headway.status", status)
            self._client.set_terminated(self._id, _STATUS.get(status, "FINISHED"))
            self._client = None

    def _experiment_id(self, client: Any) -> str:
        if self._experiment is None and (given := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = client.get_experiment_by_name(name)
        return str(found.experiment_id if found else client.create_experiment(name))


def _flat(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted paths."""
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, config
