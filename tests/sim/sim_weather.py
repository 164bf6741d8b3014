"""Faults of the storm, disks that are full for long, and the operator, at the profile's rates.

The quorum is well but for the room on the disks of a majority of the voters, of all, or of all but
the leader's. The leader is asked all the time; once it is stopped, and another must follow on
what the reserves hold.

Asks for anything at any time, but never for a change after which a majority of the voters would be
disks that are gone: no protocol survives that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum import events
from streammeta.controller.quorum.events import PeerConnectionLost, Resign
from streammeta.controller.quorum.roles import Leader
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.linearizability.models import Get, Put
from tests.sim.sim_controller import Answered, Outcome, Refused
from tests.sim.sim_network import ONE_WAY_SHAPES, SHAPES
from tests.sim.sim_node import RemovedDisk, SimNode
from tests.sim.sim_time import check

if TYPE_CHECKING:
    from tests.sim.sim_world import World


class Weather:
    """Orders faults at random, until the storm is over."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rngs.faults
        self._is_stormy = True

    def begin(self) -> None:
        """Let every kind of fault happen at its rate."""
        profile, world = self._world.profile, self._world
        for rate, action in (
            (profile.crashes, self._crash_some),
            (profile.leader_crashes, self._crash_leader),
            (profile.partitions, self._partition),
            (profile.one_way_cuts, self._cut_one_way),
            (profile.slow_links, self._slow_links),
            (profile.replays, world.network.replay),
            (profile.false_alarms, self._false_alarm),
            (profile.pauses, self._pause),
            (profile.resignations, self._resign),
            (profile.sync_errors, self._fail_sync),
            (profile.full_disks, self._fill_disk),
            (profile.rot, self._rot),
            (profile.wipes, self._wipe),
            (profile.voter_changes, world.operator.change_voters),
            (profile.transfers, world.operator.transfer),
            (profile.probes, self._probe_leaders),
        ):
            self._repeat(rate, action)

    def end(self) -> None:
        self._is_stormy = False

    def _repeat(self, rate: float, action: Callable[[], None]) -> None:
        if rate <= 0:
            return

        def again() -> None:
            if self._is_stormy:
                action()
                self._repeat(rate, action)

        self._world.timeline.later(1 + int(self._rng.expovariate(rate) * 1000), again)

    def _some_node(self) -> SimNode:
        return self._rng.choice(self._world.nodes)

    def _count(self, kind: str) -> None:
        self._world.counts[kind] += 1
        if self._world.tracing:
            self._world.note(f"fault: {kind}")

    # -- processes

    def _crash_some(self) -> None:
        node, drawn = self._some_node(), self._rng.random()
        if node.core is None:
            return
        if drawn < 0.4:
            self._count("stops ordered inside a disk call")
            node.disk.crash_after = 1 + self._rng.randrange(12)
            node.disk.loses_power = self._rng.random() < 0.6
        elif drawn < 0.6:
            self._count("stops ordered between two effects")
            node.effects_left = self._rng.randrange(6)
        else:
            self._world.crash(node, power=drawn < 0.85)

    def _crash_leader(self) -> None:
        leaders = [
            node
            for node in self._world.nodes
            if node.core is not None and node.core.leader_id == node.node_id
        ]
        if leaders:
            self._count("leader crashes")
            self._world.crash(self._rng.choice(leaders), power=self._rng.random() < 0.7)

    def _pause(self) -> None:
        self._count("pauses")
        longest = self._world.timings.check_quorum_ms * 3
        self._world.pause(self._some_node(), self._rng.randrange(longest))

    def _resign(self) -> None:
        self._count("resignations")
        node = self._some_node()
        if self._world.timeline.now >= node.paused_until:
            self._world.act(node, lambda: node.step(Resign()))

    def _probe_leaders(self) -> None:
        """Ask the leader for a read, above all when there are two."""
        leaders = self._leaders()
        if len(leaders) > 1 or self._rng.random() < 0.1:
            self._probe(leaders)

    def _leaders(self) -> list[SimNode]:
        now = self._world.timeline.now
        return [
            node
            for node in self._world.nodes
            if node.core is not None
            and isinstance(node.core.role, Leader)
            and now >= node.paused_until
        ]

    def _probe(self, leaders: list[SimNode]) -> None:
        if len(leaders) > 1:
            self._count("moments with two leaders probed")
        for node in leaders:
            self._world.act(node, node.service.probe)

    # -- the first moments of a leader

    def on_elected(self, leader: SimNode) -> None:
        """Let a new leader learn late that it has been deposed, and ask it for reads meanwhile.

        Soon after it was elected, what the voters send it is held up, acknowledgements and the
        news of another leader alike. They take it for gone and elect another, which commits.
        """
        rng, world = self._rng, self._world
        if not self._is_stormy or rng.random() >= world.profile.takeovers:
            return
        self._count("takeovers made hard")
        election = world.timings.election_timeout_ms
        others = [node for node in world.nodes if node is not leader]
        links = [(node.node_id, leader.node_id) for node in others]
        begins = rng.randrange(election // 3)
        delay = election // 4 + rng.randrange(election)
        world.timeline.later(begins, lambda: self._hold_up(links, delay, 2 * election))
        for node in others:
            for _ in range(2):
                self._lose_sight_of(leader, node, begins + rng.randrange(election // 2))
        if rng.random() < 0.3:
            self._some_node().slow_disk_until = world.timeline.now + election
        self._probe_until(world.timeline.now + 3 * election, rng.choice([3, 15, 50]))

    def _hold_up(self, links: list[tuple[int, int]], by_ms: int, for_ms: int) -> None:
        if self._is_stormy:
            self._world.network.hold_up(links, by_ms, for_ms)

    def _lose_sight_of(self, leader: SimNode, node: SimNode, after_ms: int) -> None:
        event = PeerConnectionLost(NodeId(leader.node_id))
        self._world.later_for(node, after_ms, lambda: node.step(event))

    def _probe_until(self, end: int, every_ms: int) -> None:
        """Ask all leaders for reads about every so often."""

        def again() -> None:
            if self._is_stormy and self._world.timeline.now < end:
                self._probe(self._leaders())
                self._probe_until(end, every_ms)

        self._world.timeline.later(1 + self._rng.randrange(2 * every_ms), again)

    # -- network

    def _partition(self) -> None:
        kind = self._rng.choice(list(SHAPES))
        self._count(f"partitions: {kind}")
        self._cut(SHAPES[kind](self._node_ids(), self._rng))

    def _cut_one_way(self) -> None:
        kind = self._rng.choice(list(ONE_WAY_SHAPES))
        self._count(f"one-way cuts: {kind}")
        self._cut(ONE_WAY_SHAPES[kind](self._node_ids(), self._rng))

    def _node_ids(self) -> list[int]:
        return [node.node_id for node in self._world.nodes]

    def _cut(self, links: set[tuple[int, int]]) -> None:
        if self._world.tracing:
            self._world.note(f"cut {sorted(links)}")
        self._world.network.cut(links, 50 + self._rng.randrange(1000))

    def _slow_links(self) -> None:
        self._count("slow links")
        node = self._some_node().node_id
        links = [(other, node) for other in self._node_ids()]
        self._world.network.slow_down(links, 100 + self._rng.randrange(1000))

    def _false_alarm(self) -> None:
        node, peer = self._some_node(), self._some_node()
        if node is not peer and self._world.timeline.now >= node.paused_until:
            self._count("connections reset without cause")
            event = PeerConnectionLost(NodeId(peer.node_id))
            self._world.act(node, lambda: node.step(event))

    # -- disks

    def _fail_sync(self) -> None:
        node = self._some_node()
        if node.core is not None:
            self._count("sync errors ordered")
            node.disk.fail_sync_after = 1 + self._rng.randrange(4)

    def _fill_disk(self) -> None:
        node = self._some_node()
        if node.disk.space is None:
            self._count("disks filled")
            node.disk.space = self._rng.randrange(300)
            disk = node.disk

            def heal() -> None:
                if self._is_stormy:
                    disk.space = None

            self._world.timeline.later(100 + self._rng.randrange(700), heal)

    def _rot(self) -> None:
        """Turn over a bit of what is durable and acknowledged, on a minority of voters at most."""
        node = self._some_node()
        if not self._world.may_be_harmed(node) or not node.is_settled:
            return
        kind = self._rng.choice([".log", ".log", ".log", ".checkpoint", ".checkpoint", ""])
        if not kind and self._rng.random() < 0.8:
            return  # a quorum-state can't be repaired: the replica is lost
        node.disk.write_back()
        paths = [
            path
            for path in node.disk.durable_names()
            if path.suffix == kind and (kind or path.name == "quorum-state")
        ]
        path = self._rng.choice(paths) if paths else None
        data = None if path is None else node.disk.durable(path)
        # Room for batches to come holds nothing that could be missed.
        if path is None or not (data := (data or b"").rstrip(b"\0")):
            return
        self._count(f"bits turned over: {path.suffix or path.name}")
        node.disk.flip(path, self._rng.randrange(len(data)), self._rng.randrange(8))
        self._world.ghost.replicas[node.key].is_rotten = True
        # An observer has to notice: a voter to be must not bring damage that was not counted.
        if self._rng.random() < 0.6 or not self._world.is_voter(node):
            self._world.crash(node, power=self._rng.random() < 0.5)

    def _wipe(self) -> None:
        """Give a node an empty disk: it comes back as another replica."""
        node = self._some_node()
        if self._world.may_be_harmed(node):
            self._count("disks wiped")
            self._world.crash(node, power=True)
            removed = node.remove_disk()
            node.renew(VoterSet())
            if self._rng.random() < self._world.profile.disks_return:
                pause = 50 + self._rng.randrange(600)
                self._world.timeline.later(pause, lambda: self._put_back(node, removed))

    def _put_back(self, node: SimNode, removed: RemovedDisk) -> None:
        """Give a node its earlier disk again, with the log and the votes that it had."""
        if self._is_stormy and self._world.may_be_harmed(node):
            self._count("disks put back")
            self._world.crash(node, power=True)
            node.put_back(removed)


_ASK_EVERY_MS = 20
_KEY = "k0"


class FullDisks:
    """One such time, on a quorum in which all have caught up."""

    def __init__(self, world: World, rng: random.Random, standing: Callable[[], str]) -> None:
        self._world = world
        self._rng = rng
        self._standing = standing
        self._is_over = False
        self._answered = 0
        self._refused = 0
        self._patience = 3 * world.timings.fetch_timeout_ms
        """Milliseconds in which a read or write must end, one way or another."""

    def endure(self, within_ms: int) -> None:
        """Fill disks and ask the leader; every answer must come in time, and there must be some."""
        world = self._world
        self._await_reserves(within_ms)
        self._fill()
        self._ask()
        self._await_reads("reads go on while disks are full", within_ms)
        world.timeline.run_until(lambda: False, self._rng.randrange(within_ms // 4))
        if (leader := self._leader()) is not None and self._rng.random() < 0.5:
            world.count("leaders stopped while disks are full")
            world.crash(leader, power=self._rng.random() < 0.5)
        self._await_reads("reads go on after an election on full disks", within_ms)
        world.timeline.run_until(lambda: False, self._rng.randrange(within_ms // 4))
        self._await_reads("reads go on for as long as disks are full", within_ms)
        self._is_over = True
        for node in world.nodes:
            node.disk.space = None
        world.counts["reads answered while disks are full"] += self._answered
        world.counts["writes refused while disks are full"] += self._refused

    def _await_reserves(self, within_ms: int) -> None:
        """Wait until room is kept on every disk: what others take of it first is gone for good."""
        nodes = self._world.nodes

        def are_whole() -> bool:
            return all(node.core is None or node.journal.reserve.shortage is None for node in nodes)

        seen = self._world.timeline.run_until(are_whole, within_ms)
        check(seen, "reserves are taken again when there is room", self._standing())

    def _fill(self) -> None:
        world, rng = self._world, self._rng
        voters = [voter.key.node_id for voter in world.ghost.ledger.voters]
        leader = self._leader()
        kind = rng.choice(["all", "a majority", "all but the leader"])
        full = [node.node_id for node in world.nodes]
        if kind == "a majority":
            full = rng.sample(voters, len(voters) // 2 + 1)
        elif kind == "all but the leader" and leader is not None and len(voters) > 1:
            full.remove(leader.node_id)
        world.count(f"full for long: {kind}")
        for node_id in full:
            world.nodes[node_id].disk.space = rng.randrange(300)

    def _leader(self) -> SimNode | None:
        nodes = (node for node in self._world.nodes if node.core is not None)
        return next((node for node in nodes if node.claimed_epoch is not None), None)

    def _await_reads(self, invariant: str, within_ms: int) -> None:
        before = self._answered
        seen = self._world.timeline.run_until(lambda: self._answered > before + 3, within_ms)
        check(seen, invariant, f"none answered in {within_ms} ms, {self._standing()}")

    # -- asking

    def _ask(self) -> None:
        if self._is_over:
            return
        leader = self._leader()
        if leader is not None:
            self._world.act(leader, lambda: self._read(leader))
        if leader is not None and leader.core is not None and self._rng.random() < 0.5:
            self._world.act(leader, lambda: self._write(leader))
        self._world.timeline.later(_ASK_EVERY_MS, self._ask)

    def _read(self, node: SimNode) -> None:
        ended = self._expect(node, "a read is answered in time while disks are full")

        def on_outcome(outcome: Outcome) -> None:
            ended()
            self._answered += isinstance(outcome, Answered)

        node.service.read(_KEY, Get(), on_outcome)

    def _write(self, node: SimNode) -> None:
        ended = self._expect(node, "a write is refused or committed in time while disks are full")
        recorder = self._world.recorder
        request = Put(f"v{self._world.next_number()}", None)
        handle = recorder.invoke("while disks are full", _KEY, request)

        def on_outcome(outcome: Outcome) -> None:
            ended()
            if isinstance(outcome, Answered):
                recorder.complete(handle, outcome.answer)
            elif isinstance(outcome, Refused):
                self._refused += 1
                recorder.fail(handle)
            else:
                recorder.ambiguous(handle)

        node.service.write(_KEY, request, on_outcome)

    def _expect(self, node: SimNode, invariant: str) -> Callable[[], None]:
        """Return what is to be called when something asked of a node has ended, in this life."""
        life, has_ended = node.life, False

        def ended() -> None:
            nonlocal has_ended
            has_ended = True

        def look() -> None:
            is_late = not has_ended and node.life == life and not self._is_over
            check(not is_late, invariant, f"node {node.node_id}, {self._standing()}")

        self._world.timeline.later(self._patience, look)
        return ended


class Operator:
    def __init__(self, world: World) -> None:
        self._world = world
        self._next_change = 0
        self._changes: dict[int, Voter | ReplicaKey] = {}

    # -- requests

    def change_voters(self) -> None:
        """Ask a leader to add or to remove a voter."""
        leader = self._leader()
        if leader is None:
            return
        assert leader.core is not None
        change = self._some_change(leader.core.voters)
        if change is not None:
            self._next_change += 1
            self._changes[self._next_change] = change
            kind = "added" if isinstance(change, Voter) else "removed"
            self._world.counts[f"voters to be {kind}"] += 1
            event = events.VoterChangeRequested(self._next_change, change)
            self._world.act(leader, lambda: leader.step(event))

    def _leader(self) -> SimNode | None:
        now = self._world.timeline.now
        leaders = [
            node
            for node in self._world.nodes
            if node.claimed_epoch is not None and now >= node.paused_until
        ]
        return self._world.rngs.faults.choice(leaders) if leaders else None

    def _some_change(self, voters: VoterSet) -> Voter | ReplicaKey | None:
        rng = self._world.rngs.faults
        gone = [
            voter.key
            for voter in voters
            if voter.key.directory_id is not None
            and voter.key != self._world.nodes[voter.key.node_id].key
        ]
        if gone and rng.random() < 0.6:
            return rng.choice(gone)
        spare = [
            node.voter
            for node in self._world.nodes
            if node.core is not None and voters.find(NodeId(node.node_id)) is None
        ]
        if spare and rng.random() < 0.6:
            return rng.choice(spare)
        chosen = rng.choice(voters.voters).key
        return chosen if self._may_be_removed(chosen.node_id) else None

    def _may_be_removed(self, node_id: NodeId) -> bool:
        return all(
            self._world.has_healthy_majority(voters.without_node(node_id))
            for voters in self._world.possible_voters()
            if len(voters) > 1
        )

    def transfer(self) -> None:
        """Ask a leader to hand over to one voter, or to the best."""
        leader = self._leader()
        if leader is not None:
            assert leader.core is not None
            rng = self._world.rngs.faults
            ids: list[NodeId | None] = [voter.key.node_id for voter in leader.core.voters]
            self._world.counts["transfers asked for"] += 1
            event = events.TransferRequested(rng.choice([None, *ids]))
            self._world.act(leader, lambda: leader.step(event))

    def on_change_ended(self, effect: events.VoterChangeDone | events.VoterChangeRejected) -> None:
        """A leader says what became of a change."""
        if isinstance(effect, events.VoterChangeDone):
            self._world.counts["voter changes done"] += 1
            self._world.ghost.on_change_done(self._changes[effect.change_id], effect.end_offset)
        else:
            self._world.counts[f"voter changes refused: {effect.error.name}"] += 1
