"""Ranks that run a program by rendezvous, in memory."""

from collections import deque
from collections.abc import Iterable, Mapping

from d9d_train.parallel.pipeline.actions import SENDS, Action


class Lockstep:
    """Ranks of which each does its next action once the messages of the last batch were all exchanged.

    Consecutive messages are one batch. Between two ranks and in one direction messages meet in order:
    the first that is open on one side and the first on the other, if they are counterparts. Who waits
    does so for one certain message, so whether all get to the end does not depend on how fast any rank
    is: one walk decides for all timings.

    Attributes:
        ranks: The actions of each rank.
        open: Of each rank's current batch, the messages that have not met their counterparts.
    """

    def __init__(self, ranks: Iterable[Iterable[Action]], rank_of: Mapping[int, int]) -> None:
        self.ranks = [list(actions) for actions in ranks]
        self.open: list[list[Action]] = [[] for _ in self.ranks]
        self._rank_of = rank_of
        self._began = [0] * len(self.ranks)
        self._next = [0] * len(self.ranks)
        self._run(range(len(self.ranks)))

    def peer(self, message: Action) -> int:
        """The rank at the other end."""
        return self._rank_of[message.far]

    def circle(self) -> dict[int, Action]:
        """Ranks that wait for each other and the message of each, in the order of waiting; empty when done."""
        path: list[int] = []
        rank = next((rank for rank, batch in enumerate(self.open) if batch), None)
        if rank is None:
            return {}
        while rank not in path:
            path.append(rank)
            rank = self.peer(self.open[rank][0])
        return {waiting: self.open[waiting][0] for waiting in path[path.index(rank) :]}

    def hoist(self, send: Action) -> None:
        """Move the receive of an open send into the batch that its rank is in, and go on.

        It goes ahead of what the batch still receives: the sender will not send anything else before.
        """
        receive, rank = send.counterpart, self.peer(send)
        actions, at = self.ranks[rank], self._next[rank]
        del actions[actions.index(receive, at)]
        ahead = next((a for a in self.open[rank] if a.kind not in SENDS), None)
        actions.insert(at if ahead is None else actions.index(ahead, self._began[rank]), receive)
        self._next[rank] += 1
        self.open[rank].insert(0, receive)
        self._run((rank, self._rank_of[send.stage]))

    def _run(self, ranks: Iterable[int]) -> None:
        ready = deque(ranks)
        while ready:
            rank = ready.popleft()
            ready.extend(self._meet(rank))
            while not self.open[rank] and self._next[rank] < len(self.ranks[rank]):
                self._begin(rank)
                ready.extend(self._meet(rank))

    def _begin(self, rank: int) -> None:
        """Do a computation, or open a batch."""
        actions, at = self.ranks[rank], self._next[rank]
        self._began[rank] = at
        while at < len(actions) and actions[at].is_message:
            at += 1
        self.open[rank] = actions[self._began[rank] : at]
        self._next[rank] = max(at, self._began[rank] + 1)

    def _meet(self, rank: int) -> list[int]:
        """Close what can be closed of the rank's batch; the peers whose batches that ends."""
        freed = []
        for message in tuple(self.open[rank]):
            peer, other = self.peer(message), message.counterpart
            if self._is_first(rank, message) and self._is_first(peer, other):
                self.open[rank].remove(message)
                self.open[peer].remove(other)
                if not self.open[peer]:
                    freed.append(peer)
        return freed

    def _is_first(self, rank: int, message: Action) -> bool:
        """Whether it is the first open one of its direction between its two ranks."""
        sends, peer = message.kind in SENDS, self.peer(message)
        alike = (a for a in self.open[rank] if (a.kind in SENDS, self.peer(a)) == (sends, peer))
        return next(alike, None) == message
