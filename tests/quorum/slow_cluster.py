"""A cluster of real cores and outboxes on virtual time, whose every fsync takes as long as it must.

The network is quick and never loses a message. A disk does its work in order and syncs as the
product's does: twice for a quorum-state, once for all batches of a round.
"""

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum import events
from streammeta.controller.quorum.config import QuorumConfig, QuorumState, QuorumTimings
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.messages import Request, Response
from streammeta.controller.quorum.roles import Follower, Leader
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.runtime.replication.core_loop import Outbox
from tests.quorum.core_harness import CLUSTER, log_of, voter_set

LATENCY_MS = 2
SYNCS_OF_STATE = 2


class SlowDisk:
    """Writes of one node; a round takes what waits, and reports its last token at the end."""

    def __init__(self, node: "SlowNode") -> None:
        self._node = node
        self._waiting: list[Any] = []
        self._is_busy = False
        self._round: Callable[[], None] | None = None

    def submit(self, write: Any) -> None:
        self._waiting.append(write)
        if not self._is_busy:
            self._is_busy = True
            self._begin()

    def _begin(self) -> None:
        work, self._waiting = self._waiting, []
        states = sum(isinstance(write, events.PersistQuorumState) for write in work)
        syncs = states * SYNCS_OF_STATE + (states < len(work))
        token = max(write.token for write in work)
        self._sync(syncs, token)

    def _sync(self, left: int, token: int) -> None:
        """Begin the next sync of a round; one that is under way ends at once when disks heal."""
        cluster = self._node.cluster
        if not left:
            self._end(token)
            return
        is_done = False

        def done() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                self._sync(left - 1, token)

        cluster.later(max(1, self._node.fsync_ms), done)
        cluster.under_way.append(done)

    def _end(self, token: int) -> None:
        if self._node.is_dead:
            return
        self._node.outbox.durable(token)
        self._node.step(events.WriteDone(token))
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._begin()


class SlowNode:
    """One replica; the transport of its outbox too."""

    def __init__(self, cluster: "SlowCluster", node_id: int, size: int) -> None:
        self.cluster = cluster
        self.node_id = NodeId(node_id)
        self.fsync_ms = 0
        self.is_dead = False
        self.outbox = Outbox(self)  # type: ignore[arg-type]
        self.disk = SlowDisk(self)
        self._timer = 0
        config = QuorumConfig(
            cluster_id=CLUSTER,
            local=ReplicaKey(self.node_id),
            endpoint=f"n{node_id}:1",
            bootstrap_voters=voter_set(*range(size)),
            timings=QuorumTimings(),
        )
        rng = random.Random(f"{cluster.seed} {node_id}")
        self.core = QuorumCore(config, QuorumState(), log_of(()), rng)

    def start(self) -> None:
        self._carry_out(self.core.start(self.cluster.now))

    def step(self, event: events.Event) -> None:
        if not self.is_dead:
            self._carry_out(self.core.step(self.cluster.now, event))

    def _carry_out(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Send():
                    self.outbox.send(effect)
                case events.PersistQuorumState() | events.AppendLog() | events.TruncateLog():
                    self.disk.submit(effect)
                case events.LeadershipStarted(epoch=epoch):
                    self.cluster.elected.append((self.cluster.now, self.node_id, epoch))
                case events.LeadershipEnded(reason=reason):
                    self.cluster.ended.append((self.cluster.now, self.node_id, reason))
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = self.core.next_deadline()
        self._timer += 1
        if deadline is None:
            return
        timer = self._timer

        def ring() -> None:
            if self._timer == timer:
                self.step(events.Tick())

        self.cluster.later(max(1, deadline - self.cluster.now), ring)

    # -- the transport

    def send(self, request: Request) -> None:
        cluster = self.cluster
        peer = cluster.nodes[request.header.receiver.node_id]
        failure = events.RequestFailed(peer.node_id, request.header.request_id)
        is_answered = False

        def reply(response: Response | None) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                event = failure if response is None else events.Received(response)
                cluster.later(LATENCY_MS, lambda: self.step(event))

        def arrive() -> None:
            if peer.is_dead:
                reply(None)
            else:
                peer.outbox.expect(request, reply)
                peer.step(events.Received(request))

        cluster.later(LATENCY_MS, arrive)
        cluster.later(self.core_timeout_ms, lambda: reply(None))

    @property
    def core_timeout_ms(self) -> int:
        return QuorumTimings().request_timeout_ms


class SlowCluster:
    """The nodes, their clock and what became of their elections."""

    def __init__(self, seed: int, size: int = 3) -> None:
        self.seed = seed
        self.now = 1000
        self.elected: list[tuple[int, NodeId, int]] = []
        self.ended: list[tuple[int, NodeId, str]] = []
        self.under_way: list[Callable[[], None]] = []
        """Syncs that have begun, done or not, since the disks were last healed."""
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.nodes = [SlowNode(self, node_id, size) for node_id in range(size)]

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def later(self, ms: int, work: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + ms, self._count, work))

    def run(self, ms: int, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; return whether `until` came true, and stop there."""
        end = self.now + ms
        while self._queue and self._queue[0][0] <= end:
            self.now, _, work = heapq.heappop(self._queue)
            work()
            if until():
                return True
        self.now = end
        return until()

    # -- faults

    def starve(self, fsync_ms: int, *nodes: int) -> None:
        """Let every sync of these nodes, or else of all, take this long from now on."""
        for node in self.nodes:
            if not nodes or node.node_id in nodes:
                node.fsync_ms = fsync_ms

    def heal(self) -> None:
        """End the starvation: syncs under way return now, later ones take 1 ms."""
        self.starve(0)
        under_way, self.under_way = self.under_way, []
        for done in under_way:
            done()

    def kill(self, victim: SlowNode) -> None:
        """End a process; the others see its connections reset."""
        victim.is_dead = True
        for node in self.nodes:
            loss = events.PeerConnectionLost(victim.node_id)
            self.later(LATENCY_MS, partial(node.step, loss))

    # -- the service

    @property
    def leader(self) -> SlowNode | None:
        """The established leader of the newest epoch, if there is one."""
        living = [node for node in self.nodes if not node.is_dead and node.core.is_established]
        return max(living, key=lambda node: node.core.epoch, default=None)

    def commit(self, within_ms: int) -> bool:
        """Append until something appended from now on is committed; return whether it was."""
        wanted: dict[NodeId, int] = {}

        def is_committed() -> bool:
            leader = self.leader
            if leader is None:
                return False
            if leader.node_id in wanted and leader.core.high_watermark >= wanted[leader.node_id]:
                return True
            role = leader.core.role
            if isinstance(role, Leader) and not role.uncommitted:
                leader.step(events.Append((b"x",)))
                wanted[leader.node_id] = leader.core.log.end_offset
            return False

        return self.run(within_ms, is_committed)

    def all_follow(self) -> bool:
        """Whether every living node follows the leader."""
        leader = self.leader
        return leader is not None and all(
            isinstance(node.core.role, Follower) and node.core.leader_id == leader.node_id
            for node in self.nodes
            if node is not leader and not node.is_dead
        )
