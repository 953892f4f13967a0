"""Whether all ranks wait for the same batch."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

_SERVE, _CONTINUE = b"serve", b"continue"


class CommonRead:
    """Finds a moment in which all ranks wait for the same batch, without a collective and at no cost to short reads.

    A rank that has waited for long registers in the store of the process group. Once all have, a rank with a request
    decides that all serve requests now; a rank whose batch has arrived decides that the read continues, after which no
    rank serves requests in it. A decision is one compare-and-set in the store: the first counts, and every rank follows
    it. A rank for which the store fails continues its read.

    `begin` and `leave` are for the thread that reads, `look` for another one that keeps it from leaving meanwhile.

    Args:
        store: of all ranks; its keys are not used by anything else, or earlier.
        num_ranks: their number.
    """

    def __init__(self, store: Store, num_ranks: int) -> None:
        self._store, self._num_ranks = store, num_ranks
        self._reads = {True: 0, False: 0}
        self._key, self._round = "", 0
        self._is_registered = False
        self.is_over = True

    def begin(self, *, in_training: bool) -> None:
        """Begin a read: the next in training or in evaluations, which all ranks count alike."""
        self._reads[in_training] += 1
        self._key = f"{'training' if in_training else 'evaluation'}-{self._reads[in_training]}"
        self._round, self._is_registered, self.is_over = 0, False, False

    def look(self, *, wants: bool) -> bool:
        """Return whether all ranks must serve requests now; this rank waits for its batch.

        Args:
            wants: whether this rank has a request.
        """
        try:
            num_waiting = self._store.add(f"{self._key}-{self._round}-waiting", int(not self._is_registered))
            self._is_registered = True
            decision = f"{self._key}-{self._round}-decision"
            if wants and num_waiting == self._num_ranks:
                return self._follow(self._store.compare_set(decision, "", _SERVE.decode()))
            return self._store.check([decision]) and self._follow(self._store.get(decision))
        except RuntimeError:
            self.is_over = True
            return False

    def leave(self) -> bool:
        """Return whether all ranks must serve requests before this one uses its batch, which has arrived."""
        if not self._is_registered or self.is_over:
            return False
        try:
            decision = f"{self._key}-{self._round}-decision"
            return self._follow(self._store.compare_set(decision, "", _CONTINUE.decode()))
        except RuntimeError:
            self.is_over = True
            return False

    def _follow(self, decision: bytes) -> bool:
        self._round, self._is_registered = self._round + 1, False
        self.is_over = decision != _SERVE
        return not self.is_over
