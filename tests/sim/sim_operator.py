"""The operator of the simulated cluster: adds and removes voters, hands leadership over.

Asks for anything at any time, but never for a change after which a majority of the voters would be
disks that are gone: no protocol survives that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum import events
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.sim.sim_node import SimNode

if TYPE_CHECKING:
    from tests.sim.sim_world import World


class Operator:
    """Changes the membership of one cluster."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next_change = 0
        self._changes: dict[int, Voter | ReplicaKey] = {}

    # -- requests

    def change_voters(self) -> None:
        """Ask a leader to add or to remove somebody."""
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
            self._world.has_healthy_majority(voters.removed(node_id))
            for voters in self._world.possible_voters()
            if len(voters) > 1
        )

    def transfer(self) -> None:
        """Ask a leader to hand over to somebody, or to the best."""
        leader = self._leader()
        if leader is not None:
            assert leader.core is not None
            rng = self._world.rngs.faults
            ids: list[NodeId | None] = [voter.key.node_id for voter in leader.core.voters]
            self._world.counts["transfers asked for"] += 1
            event = events.TransferRequested(rng.choice([None, *ids]))
            self._world.act(leader, lambda: leader.step(event))

    def on_change_ended(self, effect: events.VoterChangeDone | events.VoterChangeRefused) -> None:
        """A leader says what became of a change."""
        if isinstance(effect, events.VoterChangeDone):
            self._world.counts["voter changes done"] += 1
            self._world.ghost.on_change_done(self._changes[effect.change_id], effect.end_offset)
        else:
            self._world.counts[f"voter changes refused: {effect.error.name}"] += 1
