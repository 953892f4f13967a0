"""What made an attempt fail: the first cause, from the events of its ranks, Ray's errors and the dead processes."""

from __future__ import annotations

import re
import socket
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from headway.trainer.errors import CheckpointError, ResumeError

from ...errors import StorageError
from ...storage.events import Event
from ...storage.folder import Folder
from .budget import STARTING, Failure
from .last_words import FRAME, LastWords, describe_death, fetch_last_words, user_line

# By module of the trainer, or by a function in it.
_PHASES = {
    "trainer": "setting up",
    "trainer.fit": "between two steps",  # calls the loop, also a custom one of the user's
    "session.__enter__": "setting up",
    "session.restore": "saving or restoring",
    "setup.models": "setting up",
    "setup.optimizers": "setting up",
    "setup.data": "setting up",
    "distributed.parallelize": "setting up",
    "setup.weight_init": "setting up",
    "loop.run_state": "saving or restoring",
    "checkpoints.store": "saving or restoring",
    "checkpoints.reader": "saving or restoring",
    "checkpoints.snapshot": "saving or restoring",
    "checkpoints.background": "saving or restoring",
    "setup.init_from": "saving or restoring",
    "loop.loop": "between two steps",
    "loop.loop._global_batches": "reading data",
    "metrics.train_log": "logging",
    "data.dataloader_stream": "reading data",
    "data.iterable_stream": "reading data",
    "step.optimizer_step": "training step",
    "loop.evaluation": "evaluation",
    "callbacks.base": "callback",
}
_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)
_NODE_DIED = re.compile(
    r"node (has )?died|owner\'s node|node_died|node was terminated|marked (as )?dead", re.IGNORECASE
)
# Peers notice a dead process before the system has removed it.
_NOTICE_S = 6.0
_CONNECT_S = 3.0


def is_fatal_error(error: BaseException) -> bool:
    """Return whether an error would recur, judging by its class: Headway's own concern the config, data or numbers.

    Failed writes of a checkpoint or an event are retried; a checkpoint that belongs to another run is not.
    """
    # By module, not by class: headway.datasets has its own errors, and not every run needs to import it.
    is_ours = type(error).__module__.startswith("headway.")
    return is_ours and (not isinstance(error, (CheckpointError, StorageError)) or isinstance(error, ResumeError))


def is_secondary(error: BaseException) -> bool:
    """Return whether an error only reports that another rank is gone."""
    is_torch = type(error).__module__.startswith("torch.distributed") or type(error) in (RuntimeError, ConnectionError)
    return is_torch and bool(_LOST_PEER.search(f"{type(error).__name__} {error}"))


def last_attempt(events: Sequence[Event]) -> int:
    """Return the number of the last attempt that announced itself; 0 if none has."""
    return max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=0)


def raised_failure(events: Sequence[Event]) -> Failure | None:
    """Return the first hang or exception that the last attempt recorded, preferring causes to secondary errors.

    Args:
        events: of the run, earliest first.
    """
    attempt = last_attempt(events)
    for event in events:
        if event["event"] == "rank_hung" and event["attempt"] == attempt:
            # The driver ended the attempt for it, so later errors of the ranks are consequences.
            return Failure(
                attempt=attempt,
                rank=event["ranks"][0] if len(event["ranks"]) == 1 else None,
                step=event["step"],
                phase=event["phase"],
                hung=f"{event['text']}; the stacks of all ranks that could write them: {event['stacks']}",
            )
    raised = [event for event in events if event["event"] == "rank_failed" and event["attempt"] == attempt]
    if not raised:
        return None
    first = next((event for event in raised if not event["secondary"]), raised[0])
    worker = workers_of(events).get(first["rank"], {})
    return Failure(
        attempt=attempt,
        rank=first["rank"],
        step=first["step"],
        began_at=first["began_at"],
        trained_s=_trained_s(events, first.get("time")),
        kind=first["type"],
        phase=first.get("phase", ""),
        line=first.get("line", ""),
        message=first["message"],
        traceback=first["traceback"],
        host=worker.get("host", ""),
        node_id=worker.get("node", ""),
        retryable=first["retryable"],
        secondary=first["secondary"],
    )


def workers_of(events: Sequence[Event]) -> dict[int, dict[str, Any]]:
    """Return the workers of the last attempt by rank, as it announced them."""
    started = [event for event in events if event["event"] == "attempt_started"][-1:]
    return {worker["rank"]: worker for event in started for worker in event.get("workers", ())}


def find_cause(events: Sequence[Event], errors: Mapping[int, BaseException], folder: Folder | None = None) -> Failure:
    """Return how the last attempt failed: an exception of a rank, else a lost machine, else the death of a process.

    May wait some seconds for Ray to notice a dead machine, if all that is known is secondary.

    Args:
        events: of the run, earliest first.
        errors: Ray's errors of the group, by rank.
        folder: the run's folder, which receives the last output of a dead process.
    """
    raised = raised_failure(events)
    if raised is not None and (raised.hung or not raised.secondary):
        return raised
    recorded = {event["rank"] for event in events if event["event"] == "rank_failed"
                and event["attempt"] == last_attempt(events)}  # fmt: skip
    workers = workers_of(events)
    silent = {rank: error for rank, error in errors.items() if rank not in recorded}
    if not workers:
        return raised or _unexplained(events, silent or errors)
    found = _find_death(workers, silent, others=[rank for rank in workers if rank not in recorded])
    if found is None:
        return raised or _unexplained(events, silent or errors)
    rank, words, lost = found
    worker = workers[rank]
    began_at = _began_at(events)
    if lost:
        ranks = tuple(each for each, other in sorted(workers.items()) if other.get("node") == worker.get("node"))
        beaten = None if words is None else words.step
        return Failure(
            attempt=last_attempt(events), rank=rank, step=_last_step(events) if beaten is None else beaten,
            began_at=began_at, trained_s=_trained_s(events), host=worker["host"], node_id=worker.get("node", ""),
            lost_node=True, lost_ranks=ranks or (rank,),
        )  # fmt: skip
    message = str(silent.get(rank, ""))
    words = words or LastWords()
    death, line = describe_death(words, oom_kills_before=worker.get("oom_kills"), ray_message=message)
    failure = Failure(
        attempt=last_attempt(events), rank=rank, step=words.step, began_at=began_at, trained_s=_trained_s(events),
        phase=words.phase, line=line, death=death, host=worker["host"], node_id=worker.get("node", ""),
        message=message.strip().splitlines()[-1][:300] if message.strip() else "",
    )  # fmt: skip
    return failure if folder is None else _keep_last_words(failure, words, folder)


def _find_death(
    workers: Mapping[int, dict[str, Any]], silent: Mapping[int, BaseException], *, others: Sequence[int]
) -> tuple[int, LastWords | None, bool] | None:
    """Return a rank that died, its last words, and whether its machine is lost; None if there is none.

    Args:
        workers: of the attempt, by rank.
        silent: Ray's errors of ranks that recorded none.
        others: all ranks that recorded no error.
    """
    until_s = time.monotonic() + _NOTICE_S
    while True:
        suspects = [rank for rank in sorted(silent) if rank in workers] or others
        lost = lost_nodes({workers[rank].get("node", "") for rank in suspects})
        dead: list[tuple[int, LastWords]] = []
        for rank in suspects:
            if workers[rank].get("node") in lost or _NODE_DIED.search(str(silent.get(rank, ""))):
                return rank, _words_here(workers[rank]), True
            words = fetch_last_words(workers[rank])
            if words is not None and not words.is_alive:
                dead.append((rank, words))
        if dead:
            return (*next((each for each in dead if _has_trace(each[1])), dead[0]), False)
        if time.monotonic() > until_s:
            first = next((rank for rank in suspects if rank in silent), None)
            return None if first is None else (first, None, False)
        time.sleep(0.3)


def _has_trace(words: LastWords) -> bool:
    return bool(words.exited) or "Fatal Python error" in words.output


def _words_here(worker: dict[str, Any]) -> LastWords | None:
    """Return the last words of a process on a lost machine, if that was another Ray node of this host."""
    return fetch_last_words(worker) if worker["host"] == socket.gethostname() else None


def lost_nodes(nodes: Collection[str]) -> set[str]:
    """Return which of these nodes, by id, are gone: by Ray's list, or because their raylet cannot be reached.

    Ray's list alone is late: it waits for several missed heartbeats.
    """
    if not ray.is_initialized():
        return set()
    known = {each["NodeID"]: each for each in ray.nodes()}
    return {node for node in nodes if node in known and not _is_reachable(known[node])}


def _is_reachable(node: Mapping[str, Any]) -> bool:
    if not node["Alive"]:
        return False
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _keep_last_words(failure: Failure, words: LastWords, folder: Folder) -> Failure:
    """Write the last output of a dead process to the run's folder, and return the failure with its path."""
    if not words.output.strip():
        return failure
    kept = folder.child("failures")
    name = f"attempt-{failure.attempt}-rank-{failure.rank}.txt"
    try:
        kept.prepare()
        kept.write(name, f"{failure}\n\nThe end of its standard error:\n\n{words.output}")
    except StorageError:  # the cause is known without it
        return failure
    return replace(failure, last_words=kept.path(name))


def _unexplained(events: Sequence[Event], errors: Mapping[int, BaseException]) -> Failure:
    """Return the failure of a group that had announced itself, from Ray's errors alone."""
    failure = startup_failure(last_attempt(events), errors)
    return failure if failure.kind else replace(failure, phase="", began_at=_began_at(events))


def _start_of_last(events: Sequence[Event]) -> int:
    return max((number for number, event in enumerate(events) if event["event"] == "attempt_started"), default=0)


def _began_at(events: Sequence[Event]) -> int | None:
    begun = [event["step"] for event in events[_start_of_last(events) :] if event["event"] == "training"]
    return begun[-1] if begun else None


def _last_step(events: Sequence[Event]) -> int | None:
    """Return the last step that an event of the last attempt names."""
    steps = [event["step"] for event in events[_start_of_last(events) :] if isinstance(event.get("step"), int)]
    return max(steps, default=None)


def _trained_s(events: Sequence[Event], until: float | None = None) -> float:
    begun = [event["time"] for event in events[_start_of_last(events) :] if event["event"] == "training"]
    return max(0.0, (time.time() if until is None else until) - begun[-1]) if begun else 0.0


def startup_failure(attempt: int, errors: Mapping[int, BaseException]) -> Failure:
    """Return how a group failed before it announced itself, from Ray's errors alone.

    Args:
        attempt: the last attempt that announced itself, or 0.
        errors: by rank.
    """
    rank, error = min(errors.items(), key=lambda each: (is_secondary(each[1]), each[0]))
    lines = str(error).strip().splitlines()
    # Ray's own error means that the process is gone.
    is_gone = type(error).__module__.startswith("ray.")
    return Failure(
        attempt=attempt,
        rank=rank,
        kind="" if is_gone else type(error).__name__,
        phase=STARTING,
        message="\n".join(lines[-1:])[:300] if is_gone else str(error),
        retryable=not is_fatal_error(error),
        secondary=is_secondary(error),
    )


def phase_of(error: BaseException) -> str:
    """Return what a rank was doing when it raised, by the innermost frame of the trainer in the traceback."""
    phase = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("headway.datasets."):
            phase = "reading data"
        elif module.startswith("headway.trainer."):
            file = module.removeprefix("headway.trainer.")
            phase = _PHASES.get(f"{file}.{frame.f_code.co_name}") or _PHASES.get(file, phase)
    return phase


def user_line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of an error; empty if there is none."""
    # torch passes on the error of a loader's worker with its traceback as text.
    in_loader = [(file, int(line), function) for file, line, function in FRAME.findall(str(error))]
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return user_line(reversed([*frames, *in_loader]))
