"""Refuses a run that starts while a spawned process imports the user's script."""

from __future__ import annotations

import multiprocessing

from ..errors import ConfigError


def check_not_spawning() -> None:
    """Check that this process is not being spawned, as worker processes of a `DataLoader` may be.

    Such a process runs the script again before it does its work. Under `torchrun` it would join the ranks as one of
    them, and all would wait for each other.

    Raises:
        ConfigError: the script starts a run without a guard.
    """
    # Private: by this attribute, `multiprocessing` itself refuses to start processes then.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a process that this script has spawned, such as a DataLoader worker, imports the script and would start "
            'the run again: put what starts it below `if __name__ == "__main__":`'
        )
