"""A whole quorum in one thread, one event at a time, replayed exactly by its seed.

Owns virtual time, the network and the faults. The nodes are real cores with real journals. After
the storm everything is healed, and the quorum must make progress within a bound.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from controller.errors import InvariantError
from controller.ids import NodeId
from controller.journal.errors import JournalError
from controller.quorum.config import QuorumConfig, QuorumLimits, QuorumTimings
from controller.quorum.events import (
    Append,
    PeerConnectionLost,
    ReadIndexRequested,
    Received,
    RequestFailed,
    Resign,
    Tick,
)
from controller.quorum.messages import Message, RequestHeader
from controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.sim.sim_disk import PowerFailure
from tests.sim.sim_ghost import Ghost, Violation, check
from tests.sim.sim_node import CLUSTER, SimNode
from tests.sim.sim_profiles import Profile, profile_for

TIMINGS = QuorumTimings(
    election_timeout_ms=120,
    fetch_timeout_ms=300,
    fetch_max_wait_ms=60,
    request_timeout_ms=200,
    retry_backoff_ms=15,
    failover_stagger_ms=15,
)
PROGRESS_WITHIN_MS = 15_000
_REPLAY_MEMORY = 300
_TRACE_EVENTS = 50


@dataclass(frozen=True)
class Failure:
    """What went wrong in one run, with enough to look into it."""

    seed: int
    profile: str
    invariant: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = "\n".join(self.trace)
        return f"seed {self.seed} profile {self.profile}: {self.invariant}\n{lines}"


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    seed: int
    events: int
    counts: Counter[str]
    failure: Failure | None


class World:
    """Nodes, network, time and faults of one run."""

    def __init__(
        self, seed: int, profile_name: str = "swarm", node_class: type[SimNode] = SimNode
    ) -> None:
        self.rng = random.Random(f"{seed}/{profile_name}")
        self.profile: Profile = profile_for(profile_name, self.rng)
        self.now = 0
        self.counts: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=_TRACE_EVENTS)
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._cuts: set[tuple[int, int]] = set()
        self._sent: deque[Message] = deque(maxlen=_REPLAY_MEMORY)
        self._ticks: dict[int, int] = {}
        self._next_payload = 0
        self._next_read = 0
        self._is_stormy = True
        size = self.rng.choice([1, 2, 3, 3, 3, 3, 4, 5, 5])
        self.ghost = Ghost(size)
        self.nodes = self._make_nodes(size, node_class)

    def _make_nodes(self, size: int, node_class: type[SimNode]) -> list[SimNode]:
        voters = VoterSet(tuple(Voter(ReplicaKey(NodeId(i)), f"node{i}:1") for i in range(size)))
        limits = QuorumLimits(
            max_fetch_bytes=self.rng.choice([100, 8 << 20]),
            tail_bytes=self.rng.choice([60, 32 << 20]),
        )
        return [
            node_class(
                self,
                index,
                QuorumConfig(
                    cluster_id=CLUSTER,
                    local=ReplicaKey(NodeId(index)),
                    voters=voters,
                    timings=TIMINGS,
                    limits=limits,
                ),
            )
            for index in range(size)
        ]

    # -- time

    def later(self, delay: int, action: Callable[[], None]) -> None:
        """Run `action` after `delay` virtual milliseconds."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay, self._sequence, action))

    def later_for(self, node: SimNode, delay: int, action: Callable[[], None]) -> None:
        """Run `action` unless the node has crashed by then; a paused node does it later."""
        life = node.life

        def guarded() -> None:
            if node.core is None or node.life != life:
                return
            if self.now < node.paused_until:
                self.later(node.paused_until - self.now, guarded)
                return
            try:
                action()
            except PowerFailure:
                self.note(f"power of node {node.node_id} failed in a disk operation")
                self.counts["crashes inside a write"] += 1
                self.crash(node)

        self.later(delay, guarded)

    def schedule_tick(self, node: SimNode) -> None:
        """Wake the node at its next deadline."""
        assert node.core is not None
        deadline = node.core.next_deadline()
        if deadline is None:
            return
        due = max(self.now, deadline - node.clock_offset)
        known = self._ticks.get(node.node_id)
        if known is not None and self.now < known <= due:
            return  # wakes early and looks again
        self._ticks[node.node_id] = due

        def tick() -> None:
            if self._ticks.get(node.node_id) == due:
                del self._ticks[node.node_id]
            node.step(Tick())

        self.later_for(node, due - self.now, tick)

    def note(self, text: str) -> None:
        """Add a line to the trace that a failure prints."""
        self.trace.append(f"{self.now:6d} {text}")

    def disk_delay(self) -> int:
        """Draw how long a disk operation takes."""
        if self._is_stormy and self.rng.random() < self.profile.slow_disk:
            return self.rng.randrange(300)
        return 1 + self.rng.randrange(self.profile.disk_ms)

    # -- network

    def transmit(self, message: Message) -> None:
        """Lose, double, delay or deliver a message."""
        rng, profile = self.rng, self.profile
        self._sent.append(message)
        copies = 1
        if self._is_stormy:
            if rng.random() < profile.drop:
                self.counts["messages dropped"] += 1
                return
            if rng.random() < profile.duplicate:
                self.counts["messages doubled"] += 1
                copies = 2
        for _ in range(copies):
            delay = 1 + rng.randrange(profile.latency_ms)
            if self._is_stormy and rng.random() < profile.delay:
                self.counts["messages delayed"] += 1
                delay = rng.randrange(profile.long_delay_ms)
            self.later(delay, lambda: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        header = message.header
        if isinstance(header, RequestHeader):
            source, target = header.sender.node_id, header.receiver.node_id
        else:
            source, target = header.sender, header.receiver
        if (source, target) in self._cuts:
            return
        node = self.nodes[target]
        if node.core is None:
            if isinstance(header, RequestHeader):
                self._refuse(header)
            return
        self.note(f"{source}->{target} {_brief(message)}")
        self._deliver(node, message)

    def _deliver(self, node: SimNode, message: Message) -> None:
        if self.now < node.paused_until:
            self.later_for(node, node.paused_until - self.now, lambda: node.step(Received(message)))
        else:
            node.step(Received(message))

    def _refuse(self, header: RequestHeader) -> None:
        """A request to a dead process: its sender usually hears of it."""
        sender, peer = self.nodes[header.sender.node_id], header.receiver.node_id
        if sender.core is None or self.rng.random() < 0.2:
            return
        self.later_for(sender, 1, lambda: sender.step(RequestFailed(peer, header.request_id)))
        self.later_for(sender, 1, lambda: sender.step(PeerConnectionLost(peer)))

    # -- faults

    def crash(self, node: SimNode) -> None:
        """Stop a node, tell its peers' transports, and start it again later."""
        if node.core is None:
            return
        self.counts["crashes"] += 1
        self.note(f"node {node.node_id} crashed")
        node.crash()
        self._ticks.pop(node.node_id, None)
        for other in self.nodes:
            if other.core is not None and self.rng.random() < 0.7:
                peer = NodeId(node.node_id)
                self.later_for(other, 1, lambda o=other, p=peer: o.step(PeerConnectionLost(p)))  # type: ignore[misc]
        delay = self.rng.choice([1, 20, 100, 400, 900])
        self.later(delay, lambda: self._restart(node))

    def _restart(self, node: SimNode) -> None:
        if node.core is None:
            self.note(f"node {node.node_id} starts")
            try:
                node.start()
            except PowerFailure:
                self.crash(node)

    def _crash_some(self) -> None:
        node = self.rng.choice(self.nodes)
        if self.rng.random() < 0.5:
            node.disk.crash_after = 1 + self.rng.randrange(12)
        else:
            self.crash(node)

    def _crash_leader(self) -> None:
        leaders = [node for node in self.nodes if node.core and node.core.leader_id == node.node_id]
        if leaders:
            self.counts["leader crashes"] += 1
            self.crash(self.rng.choice(leaders))

    def _partition(self) -> None:
        self.counts["partitions"] += 1
        side = {node.node_id for node in self.nodes if self.rng.random() < 0.5}
        cuts = {
            (a, b)
            for a in range(len(self.nodes))
            for b in range(len(self.nodes))
            if (a in side) != (b in side)
        }
        self._cut(cuts)

    def _cut_one_way(self) -> None:
        self.counts["one-way cuts"] += 1
        self._cut({(self.rng.randrange(len(self.nodes)), self.rng.randrange(len(self.nodes)))})

    def _cut(self, cuts: set[tuple[int, int]]) -> None:
        self.note(f"cut {sorted(cuts)}")
        self._cuts |= cuts
        self.later(50 + self.rng.randrange(1000), lambda: self._cuts.difference_update(cuts))

    def _replay(self) -> None:
        if self._sent:
            self.counts["messages replayed late"] += 1
            self._arrive(self.rng.choice(self._sent))

    def _resign(self) -> None:
        self.counts["resignations"] += 1
        self.rng.choice(self.nodes).step(Resign())

    def _pause(self) -> None:
        self.counts["pauses"] += 1
        self.rng.choice(self.nodes).paused_until = self.now + self.rng.randrange(800)

    # -- clients

    def _append(self) -> None:
        for node in self.nodes:
            if node.is_leader and self.now >= node.paused_until:
                payloads = []
                for _ in range(self.rng.choice([1, 1, 2, 4])):
                    self._next_payload += 1
                    payloads.append(b"%d." % self._next_payload)
                node.step(Append(tuple(payloads)))
                self.counts["appends"] += 1

    def _read(self) -> None:
        for node in self.nodes:
            if node.core is not None and self.now >= node.paused_until:
                self._next_read += 1
                node.reads[self._next_read] = self.ghost.ledger_end
                node.step(ReadIndexRequested(self._next_read))

    # -- the run

    def _repeat(self, rate: float, action: Callable[[], None]) -> None:
        """Do `action` about `rate` times a second while the storm lasts."""
        if rate <= 0:
            return

        def again() -> None:
            if self._is_stormy:
                action()
                self._repeat(rate, action)

        self.later(1 + int(self.rng.expovariate(rate) * 1000), again)

    def run(self) -> int:
        """Run storm and calm; return the number of events. Raises what went wrong."""
        profile = self.profile
        for node in self.nodes:
            node.start()
        for rate, action in (
            (profile.crashes, self._crash_some),
            (profile.leader_crashes, self._crash_leader),
            (profile.partitions, self._partition),
            (profile.one_way_cuts, self._cut_one_way),
            (profile.replays, self._replay),
            (profile.resignations, self._resign),
            (profile.pauses, self._pause),
            (profile.appends, self._append),
            (profile.reads, self._read),
        ):
            self._repeat(rate, action)
        events = self._run_until(lambda: self.now >= profile.duration_ms, 10 * profile.duration_ms)
        self._calm_down()
        goal = self.ghost.ledger_end
        self._append_in_calm()
        events += self._run_until(lambda: self._has_progressed(goal), PROGRESS_WITHIN_MS)
        for node in self.nodes:
            self.ghost.on_delivered(node.node_id, node.applied)
        return events

    def _calm_down(self) -> None:
        self.note("the storm is over")
        self._is_stormy = False
        self._cuts.clear()
        for node in self.nodes:
            node.disk.crash_after = None
            node.paused_until = 0
            self._restart(node)

    def _append_in_calm(self) -> None:
        self._append()
        self.later(100, self._append_in_calm)

    def _has_progressed(self, goal: int) -> bool:
        return self.ghost.ledger_end > goal and all(
            node.applied and node.applied[-1].end_offset > goal for node in self.nodes
        )

    def _run_until(self, done: Callable[[], bool], limit_ms: int) -> int:
        events = 0
        deadline = self.now + limit_ms
        while not done():
            check(self._queue, "liveness", "nothing is left to happen")
            due, _, action = heapq.heappop(self._queue)
            self.now = due
            check(due <= deadline, "liveness", f"no progress within {limit_ms} ms of calm")
            action()
            events += 1
            check(events < 400_000, "no busy loop", "400000 events")
        return events


def _brief(message: Message) -> str:
    fields = [f"epoch={message.header.epoch}"]
    names = ("pre_vote", "granted", "fetch_offset", "last_epoch", "end_offset", "diverging")
    fields += [f"{name}={getattr(message, name)}" for name in names if hasattr(message, name)]
    return f"{type(message).__name__} {' '.join(fields)}"


def simulate(seed: int, profile: str = "swarm", node_class: type[SimNode] = SimNode) -> Outcome:
    """Run one seed to its end or to the first violation."""
    world = World(seed, profile, node_class)
    events, failure = 0, None
    try:
        events = world.run()
    except (Violation, InvariantError, JournalError, AssertionError) as error:
        text = f"{type(error).__name__}: {error}"
        failure = Failure(seed, profile, text, tuple(world.trace))
    return Outcome(seed, events, world.counts, failure)
