"""The folder of a run and its ranks: the main rank claims it, and all ranks prove that they see the claim."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ..distributed.world import World
from ..errors import CheckpointError, ConfigError, HeadwayError, RunConflictError
from .claim import Ownership, acquire
from .claim_files import ClaimFiles, number_of

# A network file system may show a listing from before the claim for so long.
_VISIBLE_WITHIN_S = 10.0
_SHOWN = 8


def claim_run_dir(
    world: World, run_dir: str, *, on_lost: Callable[[str], None], say: Callable[[str], None]
) -> Ownership | None:
    """Claim a run's folder on the main rank, and return its claim there. Every rank must call this.

    Args:
        world: the ranks.
        run_dir: path or URI.
        on_lost: as for `acquire`.
        say: as for `acquire`.

    Raises:
        RunConflictError: another process owns the folder; raised on every rank.
        ConfigError: a rank does not see the folder of the main rank; raised on every rank.
        CheckpointError: the folder cannot be written; raised on every rank.
    """
    ownership: Ownership | None = None
    failure: HeadwayError | None = None
    if world.is_main:
        try:
            ownership = acquire(run_dir, on_lost=on_lost, say=say)
        except RunConflictError as error:
            failure = error
        except Exception as error:  # each file system has its own exceptions
            failure = CheckpointError(f"cannot write to {run_dir}: {type(error).__name__}: {error}")
            failure.__cause__ = error
    claim_id, refused = world.broadcast((ownership.id if ownership is not None else "", failure))
    if (raised := failure or refused) is not None:
        raise raised
    if world.size == 1:
        return ownership
    try:
        check_same_storage(world, run_dir, claim_id)
    except BaseException:
        if ownership is not None:
            ownership.release()
        raise
    return ownership


def check_same_storage(world: World, run_dir: str, claim_id: str, *, written_by: str = "rank 0") -> None:
    """Check that every rank sees the newest claim on a run's folder. Every rank must call this.

    Args:
        world: the ranks.
        run_dir: path or URI.
        claim_id: the claim, as its writer knows it.
        written_by: the writer, for the message.

    Raises:
        ConfigError: some ranks see another folder under this path; raised on every rank, with their machines.
    """
    own = (socket.gethostname(), _problem_with(run_dir, claim_id))
    ranks = world.all_gather_object(own)
    unseen = {rank: found for rank, found in enumerate(ranks) if found[1] is not None}
    if not unseen:
        return
    lines = [f"  rank {rank} on {host}: {problem}" for rank, (host, problem) in list(unseen.items())[:_SHOWN]]
    more = f"\n  and {len(unseen) - _SHOWN} more" if len(unseen) > _SHOWN else ""
    by = f"{written_by} on {ranks[0][0]}" if written_by == "rank 0" else written_by
    raise ConfigError(
        f"these ranks do not see in {run_dir} what {by} has written there:\n"
        + "\n".join(lines)
        + f"{more}\nAll machines of a run must share its folder: use one on a shared file system that is mounted at "
        "the same path everywhere, or a bucket (run_dir='s3://...'; for `headway fit`: --storage s3://...)"
    )


def _problem_with(run_dir: str, claim_id: str) -> str | None:
    """Return how this process fails to see a claim, after a while in which it may become visible; None if it sees it.

    A newer claim is no problem here: it has been made in the same folder.
    """
    until_s = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            files = ClaimFiles(run_dir)
            found, newest = files.read(number_of(claim_id)), files.newest()
            if (found is not None and found.id == claim_id) or (
                newest is not None and newest.number > number_of(claim_id)
            ):
                return None
            problem = "there is no such folder, or it is empty" if newest is None else "the folder is another one"
        except Exception as error:  # each file system has its own exceptions
            problem = f"it cannot be read: {type(error).__name__}: {error}"
        if time.monotonic() > until_s:
            return problem
        time.sleep(0.2)
