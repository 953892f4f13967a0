"""The mailbox: an actor beside the driver that receives the heartbeats of the ranks, and answers with requests.

It also decides which rank hangs, so that the driver's loop costs the same for any number of ranks. It is used where the
run's folder is not on a local disk: there all ranks would write to a network file system or an object store, and the
driver would read all their files. Files remain the record, and take over if the mailbox is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .policy import HangTimeouts, Straggler
from .ranks import RankStates

if TYPE_CHECKING:
    from ray import ObjectRef

Requests = Mapping[str, Any]
"""The driver's requests by kind: "order" (of the watchdog), "stop" and "scale_up"."""

# Before a rank writes its heartbeat to a file instead.
_RANK_WAITS_S = 2.0
# Before the driver reads the files instead, for good.
_DRIVER_WAITS_S = 30.0


class Mailbox:
    """The actor. Sent by value, and given plain values, so that its process imports nothing of Headway or torch."""

    def __init__(self) -> None:
        self._ranks: RankStates | None = None
        self._requests: dict[str, Any] = {}

    def start(self, attempt: int, workers: Sequence[Mapping[str, Any]], timeouts: Mapping[str, Any]) -> None:
        """Watch the ranks of a new attempt, with the fields of `HangTimeouts`."""
        self._ranks = RankStates(attempt, workers, HangTimeouts(**timeouts))

    def beat(self, beat: Mapping[str, Any]) -> Requests:
        """Take a heartbeat of a rank, and return the driver's requests."""
        if self._ranks is not None:
            self._ranks.receive(beat)
        return self._requests

    def find(self, passed_s: float) -> dict[str, Any] | None:
        """Return the fields of the `Straggler`, if there is one."""
        straggler = None if self._ranks is None else self._ranks.find(passed_s)
        return None if straggler is None else dataclasses.asdict(straggler)

    def publish(self, requests: Requests) -> None:
        """Answer heartbeats with these requests, too; each replaces the one of its kind."""
        self._requests = {**self._requests, **requests}


class MailboxLost(Exception):
    """The mailbox is gone: files are the way from now on."""


class DriverMailbox:
    """The driver's side. Never waits for the actor.

    The driver must be connected to Ray.

    Attributes:
        actor: to be passed to the ranks.
    """

    def __init__(self) -> None:
        import ray
        from ray import cloudpickle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        package = sys.modules[__package__]
        cloudpickle.register_pickle_by_value(package)
        try:
            self.actor: Any = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        finally:
            cloudpickle.unregister_pickle_by_value(package)
        self._answer: ObjectRef[Any] | None = None
        self._waited_s = self._unsent_s = 0.0

    def start(self, attempt: int, workers: Sequence[Mapping[str, Any]], timeouts: HangTimeouts) -> None:
        """Watch the ranks of a new attempt."""
        self._answer, self._waited_s, self._unsent_s = None, 0.0, 0.0
        self.actor.start.remote(attempt, workers, dataclasses.asdict(timeouts))

    def publish(self, **requests: Any) -> None:
        """Send requests to the ranks, with the answers to their next heartbeats."""
        self.actor.publish.remote(requests)

    def relay(self, beat: Mapping[str, Any]) -> None:
        """Pass on the heartbeat of a rank that has written it to a file."""
        self.actor.beat.remote(beat)

    def find(self, passed_s: float, *, most_s: float) -> Straggler | None:
        """Return the straggler as of the last call, and ask for the next one.

        Args:
            passed_s: seconds since the last call.
            most_s: the most that count as silence of the ranks.

        Raises:
            MailboxLost: the actor has died, or has not answered for 30 s.
        """
        import ray
        from ray.exceptions import RayError

        found = None
        self._unsent_s += passed_s
        try:
            if self._answer is not None:
                if not ray.wait([self._answer], timeout=0)[0]:
                    self._waited_s += min(passed_s, most_s)
                    if self._waited_s > _DRIVER_WAITS_S:
                        # The ranks must see this, too.
                        self.close()
                        raise MailboxLost
                    return None
                found = ray.get(self._answer)
            self._answer, self._waited_s = self.actor.find.remote(min(self._unsent_s, most_s)), 0.0
        except RayError as error:
            raise MailboxLost from error
        self._unsent_s = 0.0
        return None if found is None else Straggler(**found)

    def close(self) -> None:
        """End the actor. Ray may be gone."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self.actor)


class RankMailbox:
    """A rank's side.

    Args:
        actor: the driver's `DriverMailbox.actor`.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._answer: ObjectRef[Any] | None = None

    def send(self, beat: Mapping[str, Any]) -> Requests | None:
        """Send a heartbeat, and return the driver's requests; None if there is no answer within two seconds."""
        # While the actor is busy, one heartbeat waits, not all.
        if self._answer is not None and self._receive() is None:
            return None
        self._answer = self._actor.beat.remote(beat)
        return self._receive()

    def _receive(self) -> Requests | None:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            requests: Requests = ray.get(self._answer, timeout=_RANK_WAITS_S)
        except GetTimeoutError:
            return None
        except RayError:
            self._answer = None
            return None
        self._answer = None
        return requests
