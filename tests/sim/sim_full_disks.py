"""Disks that are full for long: reads are answered, writes are refused or committed, none hangs.

The quorum is well but for the room on the disks of a majority of the voters, of all, or of all but
the leader's. Whoever leads is asked all the time; once it is stopped, and another must follow on
what the reserves hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.linearizability.models import Get, Put
from tests.sim.sim_service import Answered, Outcome, Refused
from tests.sim.sim_time import check

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode
    from tests.sim.sim_world import World

_ASK_EVERY_MS = 20
_KEY = "k0"


class FullDisks:
    """One such time, on a quorum in which everyone has caught up."""

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
