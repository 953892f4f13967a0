"""Temporary folders of drivers, also removed by a later driver on the machine if this one is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from headway.trainer.ownership.process import ProcessId

_PREFIX = "headway-ray-"
_UNFINISHED = "headway-unfinished-"
_OWNER = "owner.json"


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """Yield a temporary folder for Ray's own files, and remove it at the end.

    First removes the folders that ended processes of this user and machine have left behind.
    """
    remove_abandoned()
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED))
    # Renamed when it names its owner, so that no other process sees it without.
    (made / _OWNER).write_text(json.dumps(asdict(ProcessId.this())))
    folder = made.rename(made.with_name(_PREFIX + made.name.removeprefix(_UNFINISHED)))
    try:
        (folder / "files").mkdir()
        yield str(folder / "files")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the folders of ended processes; folders of other users, machines and containers are left alone."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            # Folders of other programs and earlier versions name no owner.
            with contextlib.suppress(OSError, ValueError, TypeError):
                owner = ProcessId(**json.loads((folder / _OWNER).read_text()))
                if folder.stat().st_uid == os.getuid() and owner.is_alive() is False:
                    shutil.rmtree(folder, ignore_errors=True)
