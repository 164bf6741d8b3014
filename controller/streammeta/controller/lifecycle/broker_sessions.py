"""Sessions of brokers, by their heartbeats: active, fenced, or shutting down.

A pure state machine of the leader, on monotonic milliseconds. Owns the rule that silence fences a
node, and its exception when the leader itself may be at fault: a leader whose event loop stalled,
or that receives no heartbeat at all, fences nobody. It never compares its clock with a broker's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

SHUTDOWN_GRACE_MS = 60_000
"""Milliseconds after a shutdown request in which a silent node counts as shutting down."""

DOUBT_TIMEOUTS = 3
"""Session timeouts of silence from all nodes after which the leader fences them."""

STALL_SHARE = 3
"""A pause between two ticks of more than 1/3 of the session timeout is a stall of the leader."""

SHORTEST_MS = 2_000
"""Shortest session that a broker may request, in milliseconds."""

TICK_MS = 1_000
"""Longest time between two ticks, in milliseconds."""


class NodeState(IntEnum):
    """State of a node's session, with the numbers of the protobuf enum."""

    ACTIVE = 1
    FENCED = 2
    CONTROLLED_SHUTDOWN = 3
    UNKNOWN = 4


@dataclass(frozen=True, slots=True)
class SupervisedNode:
    """A node that sends heartbeats, and its newest epoch."""

    node_id: int
    node_epoch: int


@dataclass(slots=True)
class _Session:
    node_epoch: int
    heard_ms: int
    timeout_ms: int
    is_granted: bool = True
    is_fenced: bool = False
    has_closed: bool = False
    leaving_since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """Time of a node's last heartbeat, and whether it announced the end of its process."""

    age_ms: int
    is_exact: bool
    """False if there was no heartbeat in this term, so that the last one is older than the term."""
    has_closed: bool


class Sessions:
    """Sessions by node id, only of this leader's term.

    `timeout_ms` is the longest session, and the default of nodes that request none.
    """

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._leads = False
        self._led_since_ms = 0
        self._sessions: dict[int, _Session] = {}
        self.fenced = 0
        """Number of sessions that ended because of silence, in all terms of this process."""
        self._ticked_ms = 0
        self._doubt_since_ms: int | None = None

    @property
    def tick_ms(self) -> int:
        """Interval of calls of `tick`, well below the pause that counts as a stall."""
        timeouts_ms = (session.timeout_ms for session in self._sessions.values())
        shortest = min(timeouts_ms, default=self.timeout_ms)
        return max(1, min(TICK_MS, shortest // (3 * STALL_SHARE)))

    @property
    def is_in_doubt(self) -> bool:
        """Whether no node is fenced now, because no heartbeat arrives at all."""
        return self._doubt_since_ms is not None

    @property
    def is_settled(self) -> bool:
        """Whether the term is older than a session timeout, so every active node was heard."""
        return self._leads and self._ticked_ms - self._led_since_ms > self.timeout_ms

    def lead(self, now_ms: int) -> None:
        """Begin a term: every node gets a new session when first seen."""
        self._leads = True
        self._led_since_ms = self._ticked_ms = now_ms

    def resign(self) -> None:
        """End the term and remove all sessions."""
        self._leads = False
        self._sessions.clear()
        self._doubt_since_ms = None

    def state(self, node_id: int) -> NodeState:
        """Return the state of a node, UNKNOWN without a session or when not leading."""
        session = self._sessions.get(node_id)
        if session is None:
            return NodeState.UNKNOWN
        if session.is_fenced:
            return NodeState.FENCED
        if session.leaving_since_ms is not None:
            return NodeState.CONTROLLED_SHUTDOWN
        return NodeState.ACTIVE

    def counts(self) -> Mapping[NodeState, int]:
        """Return the number of sessions in each state, none when not leading.

        A node whose process closed properly counts as shutting down, for any time.
        """
        return Counter(
            NodeState.CONTROLLED_SHUTDOWN if session.has_closed else self.state(node_id)
            for node_id, session in self._sessions.items()
        )

    def heard(self, node_id: int) -> Heard | None:
        """Return the time of a node's last heartbeat at the last tick, None without a session."""
        session = self._sessions.get(node_id)
        if session is None:
            return None
        age_ms = max(0, self._ticked_ms - session.heard_ms)
        return Heard(age_ms, not session.is_granted, session.has_closed)

    def is_heard(self, node_id: int) -> bool:
        """Whether a node that is not fenced sent a heartbeat in this term."""
        session = self._sessions.get(node_id)
        return session is not None and not session.is_fenced and not session.is_granted

    def granted_ms(self, wanted_ms: int) -> int:
        """Return the session length for a node that requests `wanted_ms`, 0 for the longest."""
        # 0 is the default of the field, for clients that do not know it.
        if wanted_ms <= 0:
            return self.timeout_ms
        return min(self.timeout_ms, max(wanted_ms, SHORTEST_MS))

    def heartbeat(
        self,
        node_id: int,
        node_epoch: int,
        now_ms: int,
        *,
        wants_shutdown: bool = False,
        closes: bool = False,
        wanted_ms: int = 0,
    ) -> None:
        """Renew the session of a node with a valid epoch. Ends its fence and any doubt.

        Without `wants_shutdown`, a node that was leaving stays. With `closes` the node announces
        the end of its process: it is fenced like any other, but its silence is expected.
        `wanted_ms` is the requested session length of the newest heartbeat.
        """
        if not self._leads:
            return

        # The leader can receive heartbeats again, so silence is no longer its own fault.
        self._end_doubt(now_ms)
        session = self._sessions.get(node_id)
        # A new process of the node must not inherit the fence or the farewell of the former one.
        if session is None or session.node_epoch < node_epoch:
            session = self._sessions[node_id] = _Session(node_epoch, now_ms, self.timeout_ms)
        session.heard_ms = now_ms
        session.timeout_ms = self.granted_ms(wanted_ms)
        # Heard in this term, so the node counts as a target for work.
        session.is_granted = False
        session.is_fenced = False
        session.has_closed = closes
        if not wants_shutdown:
            session.leaving_since_ms = None
        elif session.leaving_since_ms is None:
            session.leaving_since_ms = now_ms

    def tick(self, now_ms: int, nodes: Iterable[SupervisedNode]) -> tuple[int, ...]:
        """Advance to `now_ms`. Returns the newly fenced nodes, in id order.

        `nodes` are all supervised nodes. New ones, and new processes of known ones, get a session.
        Missing ones are removed.
        """
        if not self._leads:
            return ()
        pause_ms = now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        self._follow_metadata(now_ms, nodes)
        # Heartbeats may have waited in sockets that this process did not read.
        if _is_stall(pause_ms, self.timeout_ms):
            self._renew_all(now_ms)
            return ()
        for session in self._sessions.values():
            if _is_stall(pause_ms, session.timeout_ms):
                session.heard_ms = max(session.heard_ms, now_ms)
        return self._fence_silent(now_ms)

    def _follow_metadata(self, now_ms: int, nodes: Iterable[SupervisedNode]) -> None:
        present = set()
        for node in nodes:
            present.add(node.node_id)
            session = self._sessions.get(node.node_id)
            if session is None or session.node_epoch < node.node_epoch:
                self._end_doubt(now_ms)
                timeout_ms = self.timeout_ms if session is None else session.timeout_ms
                self._sessions[node.node_id] = _Session(node.node_epoch, now_ms, timeout_ms)
        for node_id in [node_id for node_id in self._sessions if node_id not in present]:
            del self._sessions[node_id]

    def _fence_silent(self, now_ms: int) -> tuple[int, ...]:
        waiting = {i: s for i, s in self._sessions.items() if not s.is_fenced}
        silent = {i: s for i, s in waiting.items() if now_ms - s.heard_ms > s.timeout_ms}
        if not silent:
            self._doubt_since_ms = None
            return ()
        # Silence of all nodes suggests that this leader is cut off, not that all have failed.
        if len(silent) == len(waiting) and not self._is_believed(now_ms):
            return ()
        fenced = sorted(i for i, s in silent.items() if not _is_within_grace(s, now_ms))
        for node_id in fenced:
            self._sessions[node_id].is_fenced = True
        self.fenced += len(fenced)
        return tuple(fenced)

    def _is_believed(self, now_ms: int) -> bool:
        """Whether the silence of all nodes has lasted long enough to fence them."""
        if self._doubt_since_ms is None:
            self._doubt_since_ms = now_ms
        return now_ms - self._doubt_since_ms > DOUBT_TIMEOUTS * self.timeout_ms

    def _end_doubt(self, now_ms: int) -> None:
        if self._doubt_since_ms is not None:
            # A heartbeat arrived, so from now on the others' silence counts.
            self._renew_all(now_ms)

    def _renew_all(self, now_ms: int) -> None:
        self._doubt_since_ms = None
        for session in self._sessions.values():
            # Only forward: the time of a newer heartbeat stays.
            session.heard_ms = max(session.heard_ms, now_ms)


def _is_stall(pause_ms: int, timeout_ms: int) -> bool:
    """Whether a pause between two ticks may itself have silenced a session."""
    return pause_ms > max(1, timeout_ms // STALL_SHARE)


def _is_within_grace(session: _Session, now_ms: int) -> bool:
    since = session.leaving_since_ms
    return since is not None and now_ms - since <= SHUTDOWN_GRACE_MS
