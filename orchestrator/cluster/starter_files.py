"""Writes the files of `headway init`: clusters, batch scripts and an image, with the lines to edit marked EDIT."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headway.trainer.errors import ConfigError

_TEMPLATES = Path(__file__).with_name("templates")

# Written file by template, and the next command.
KINDS: dict[str, tuple[dict[str, str], str]] = {
    "aws": ({"aws.yaml": "cluster.yaml"}, "headway cluster check cluster.yaml"),
    "gcp": ({"gcp.yaml": "cluster.yaml"}, "headway cluster check cluster.yaml"),
    "azure": ({"azure.yaml": "cluster.yaml"}, "headway cluster check cluster.yaml"),
    "kubernetes": (
        {"rayjob.yaml": "rayjob.yaml", "raycluster.yaml": "raycluster.yaml"},
        "kubectl apply --dry-run=server -f rayjob.yaml",
    ),
    "slurm": ({"slurm.sbatch": "train.sbatch"}, "sbatch --test-only train.sbatch"),
    "skypilot": ({"sky.yaml": "sky.yaml"}, "sky jobs launch --dryrun sky.yaml"),
    "docker": ({"Dockerfile": "Dockerfile"}, "docker build ."),
}


@dataclass(frozen=True)
class StarterFile:
    """A file that was written. `edits` has the numbers of the lines that are marked EDIT, from 1."""

    path: Path
    edits: tuple[int, ...]


def write_starter_files(kind: str, folder: str = ".") -> list[StarterFile]:
    """Write the files of a kind into a folder, with the versions of Python, Ray, torch and Headway of this machine.

    Raises:
        ConfigError: the kind is unknown, the folder does not exist, or a file exists; then none is written.
    """
    if kind not in KINDS:
        raise ConfigError(f"there are no files for {kind!r}, only for {', '.join(KINDS)}")
    if not Path(folder).is_dir():
        raise ConfigError(f"the folder {folder} does not exist: create it, or name another")
    files, _ = KINDS[kind]
    texts = {Path(folder, file): render(template) for template, file in files.items()}
    if existing := [str(path) for path in texts if path.exists() or path.is_symlink()]:
        raise ConfigError(f"{', '.join(existing)} exists and is not overwritten: rename it, or give another --folder")
    for path, text in texts.items():
        path.write_text(text)
    return [StarterFile(path, _lines_to_edit(text)) for path, text in texts.items()]


def render(template: str) -> str:
    """Return the text of a template with the versions of this machine."""
    headway = _headway()
    versions = {
        "headway": headway,
        "copy": f"{'' if headway.startswith('./') else '# '}COPY *.whl ./",
        "python": f"py{sys.version_info.major}{sys.version_info.minor}",
        "ray": _version("ray", "2.60.0"),
        # A local version such as +cpu is on no public index.
        "torch": _version("torch", "2.13.0").partition("+")[0],
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: versions[match[1]], (_TEMPLATES / template).read_text())


def _headway() -> str:
    """Return Headway for pip, as it was installed here; a wheel if it is a checkout or a local file."""
    wheel = f"./headway-{_version('headway', '0.1.0')}-py3-none-any.whl"
    try:
        distribution = metadata.distribution("headway")
    except metadata.PackageNotFoundError:
        return wheel
    # Absent if it came from a package index: https://peps.python.org/pep-0610/
    text = distribution.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    url = str(origin.get("url", ""))
    if not url:
        return f"headway=={distribution.version}"
    if url.startswith("file:"):
        return wheel
    version_control = origin.get("vcs_info")
    if version_control:
        return f"headway @ {version_control['vcs']}+{url}@{version_control['commit_id']}"
    return f"headway @ {url}"


def _version(package: str, otherwise: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a folder that is not installed
        return otherwise


def _lines_to_edit(text: str) -> tuple[int, ...]:
    lines = enumerate(text.splitlines(), start=1)
    return tuple(number for number, line in lines if re.search(r"# ?EDIT\b", line))
