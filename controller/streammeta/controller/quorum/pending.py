"""Unfinished work of one replica: requests without an answer, and writes that are not durable.

A replica can't vote, campaign or lead before its quorum-state is durable. Time that passes until
then must not count as anyone's silence, so deadlines move by the duration of the write.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum import messages


@dataclass(slots=True)
class PendingRequest:
    """A request without an answer yet."""

    request_id: int
    expires_at: int


class PendingRequests:
    """At most one pending request of each type for each peer.

    A newer request of the same type replaces the older one, whose late answer is then ignored.
    `incarnation` is the process's own: answers to an earlier process never match.
    """

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._next_id = 0
        self._pending: dict[tuple[NodeId, type[messages.Message]], PendingRequest] = {}

    def begin(self, to: NodeId, kind: type[messages.Response], expires_at: int) -> int:
        """Return the id of a new request that `kind` answers."""
        self._next_id += 1
        self._pending[to, kind] = PendingRequest(self._next_id, expires_at)
        return self._next_id

    def forget(self, to: NodeId, kind: type[messages.Message]) -> None:
        """Drop a pending request, so that a late answer is ignored."""
        self._pending.pop((to, kind), None)

    def forget_all(self) -> None:
        """Drop every pending request: answers to a former role mean nothing to the next one."""
        self._pending.clear()

    def is_waiting(self, to: NodeId, kind: type[messages.Message], now: int) -> bool:
        """Whether a request of this type waits for that peer's answer and has not expired."""
        waiting = self._pending.get((to, kind))
        return waiting is not None and now < waiting.expires_at

    def expiry(self, to: NodeId, kind: type[messages.Message]) -> int | None:
        """Return the expiry time of the pending request to that peer, None without one."""
        waiting = self._pending.get((to, kind))
        return waiting.expires_at if waiting else None

    def match_response(self, header: messages.ResponseHeader, kind: type[messages.Message]) -> bool:
        """End the pending request that an answer matches. Returns False without a match."""
        if header.incarnation != self.incarnation:
            return False
        waiting = self._pending.get((header.sender, kind))
        if waiting is None or waiting.request_id != header.request_id:
            return False
        del self._pending[header.sender, kind]
        return True

    def match_failure(
        self, peer: NodeId, request_id: int, now: int
    ) -> tuple[type[messages.Message] | None, bool]:
        """End the request with this id. Returns its type, and whether it timed out."""
        for (to, kind), waiting in self._pending.items():
            if to == peer and waiting.request_id == request_id:
                del self._pending[to, kind]
                return kind, now >= waiting.expires_at
        return None, False


class PendingWrites:
    """Tokens of writes in progress, each with its start time."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, int]] = deque()
        self._state: tuple[int, int] | None = None
        """Newest quorum-state in progress."""

    @property
    def is_state_pending(self) -> bool:
        """Whether the newest quorum-state is not durable yet."""
        return self._state is not None

    @property
    def is_empty(self) -> bool:
        """Whether everything is durable."""
        return not self._begun

    @property
    def oldest(self) -> int | None:
        """Return the start time of the oldest write in progress."""
        return self._begun[0][1] if self._begun else None

    def begin(self, token: int, now: int, *, is_state: bool) -> None:
        """Record a write. `is_state` says whether it includes the quorum-state."""
        assert not self._begun or self._begun[-1][0] < token, "tokens of writes must ascend"
        self._begun.append((token, now))
        if is_state:
            self._state = (token, now)

    def done(self, token: int, now: int) -> int:
        """Record that everything up to `token` is durable. Returns the same as `state_done`."""
        while self._begun and self._begun[0][0] <= token:
            self._begun.popleft()
        return self.state_done(token, now)

    def state_done(self, token: int, now: int) -> int:
        """Record a durable quorum-state.

        Returns how long the newest one took, 0 while it is pending.
        """
        # An older state proves nothing: the newest may contain another vote or epoch.
        if self._state is None or self._state[0] > token:
            return 0
        took = now - self._state[1]
        self._state = None
        return took
