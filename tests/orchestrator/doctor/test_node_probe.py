"""The actor of a node works where Headway is absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray import cloudpickle

import headway.orchestrator.doctor as doctor
from headway.orchestrator.doctor.node_probe import NodeProbe

WITHOUT_HEADWAY = """
import pickle, sys
sys.modules["headway"] = None
probe = pickle.load(open(sys.argv[1], "rb"))("127.0.0.1")
assert probe.facts()["versions"]["python"]
port = probe.listen()
assert probe.connect({"self": ("127.0.0.1", port)}, 10.0) == {"self": ""}
assert probe.storage(sys.argv[2], "node", "text")["token"] == "absent"
"""


def test_the_class_is_sent_by_value(tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(doctor)
    try:
        (tmp_path / "class").write_bytes(cloudpickle.dumps(NodeProbe))
    finally:
        cloudpickle.unregister_pickle_by_value(doctor)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEADWAY, str(tmp_path / "class"), str(tmp_path / "none")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
