"""Virtual watchers, and an auditor that compares what nodes say of their state.

A follower watches changes through the product's handler, at any node. It is cut off, falls behind,
resumes where it was at another node, and takes a snapshot when it is told to. Each committed entry
must reach it exactly once, in order, and nothing that is not committed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

from streammeta.controller.errors import ApiError
from streammeta.controller.runtime.persistence.metadata_checkpoint import FrozenCheckpoint
from streammeta.controller.runtime.writer.controller import StateHash
from streammeta.v1 import metadata_pb2 as pb
from tests.sim.sim_store import StoreView
from tests.sim.sim_time import check, violated

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode
    from tests.sim.sim_world import World

_RESUME_MS = 60
_CUTS = 0.02
"""Share of messages after which the connection is gone, in a noisy network."""
_SLOW_READS = 0.03
"""Share of messages that the watcher's end takes long to read."""
_AUDIT_MS = 400
_AHEAD_MAX = 6
_ASKED = 3


class _EndedError(ApiError):
    """The call was ended by the handler; its status is on the way."""


class _Connection:
    """What the handler takes for the call: delivers messages in order, and waits for slow reads."""

    def __init__(self, follower: Follower, node: SimNode, number: int) -> None:
        self._follower = follower
        self._node = node
        self._number = number
        self._arrives_at = 0

    async def write(self, message: bytes) -> None:
        response = pb.WatchResponse.FromString(message)
        rng = self._node.world.rngs.followers
        pause = 1 + rng.randrange(800) if rng.random() < _SLOW_READS else 0
        self._send(pause, lambda: self._follower.on_response(self._number, response))
        if pause:
            await asyncio.sleep(pause / 1000)

    async def abort(self, code: object, _message: str, _metadata: object = ()) -> NoReturn:
        self._send(0, lambda: self._follower.on_status(self._number, str(code)))
        raise _EndedError

    def _send(self, pause: int, action: Any) -> None:
        world = self._node.world
        delay = pause + 1 + int(world.rngs.followers.random() * world.profile.latency_ms)
        self._arrives_at = max(self._arrives_at, world.timeline.now + delay)
        world.timeline.later(self._arrives_at - world.timeline.now, action)


class Follower:
    """One watcher of all changes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rngs.followers
        self._next = 0
        """Everything below was seen, or was in a snapshot."""
        self._connection = 0
        """Messages of earlier connections are lost."""

    def begin(self) -> None:
        """Watch some node from where this follower was, or try another a little later."""
        world = self._world
        if not world.clients_may_go_on:
            return
        self._connection += 1
        number = self._connection
        node = self._rng.choice(world.nodes)
        if node.core is None:
            world.timeline.later(_RESUME_MS, self.begin)
            return
        world.count("watches begun")
        request = pb.WatchRequest(from_offset=self._next)
        context: Any = _Connection(self, node, number)

        def watch() -> None:
            node.loop.create_task(node.service.watches.watch(request, context))

        world.later_for(node, 1, watch)
        world.timeline.later(400 + self._rng.randrange(800), lambda: self._move_on(number))

    def _move_on(self, number: int) -> None:
        """Go to another node, as when a connection is lost or its node has stopped."""
        if number == self._connection:
            self._connection += 1
            self._world.timeline.later(1 + self._rng.randrange(_RESUME_MS), self.begin)

    # -- what the node sends

    def on_response(self, number: int, response: pb.WatchResponse) -> None:
        """Take a message of a connection, unless it is an earlier one."""
        if number != self._connection:
            return
        ledger = self._world.ghost.ledger
        check(
            response.high_watermark <= ledger.end,
            "watchers hear of what is committed",
            f"a high watermark of {response.high_watermark}, committed is {ledger.end}",
        )
        if response.snapshot_required:
            self._world.count("watchers sent to a snapshot")
            self._connection += 1
            self._take_snapshot()
            return
        if response.records:
            self._on_change(response)
        else:
            self._on_progress(response.offset)
        if self._world.profile.is_noisy and self._rng.random() < _CUTS:
            self._move_on(number)

    def _on_change(self, response: pb.WatchResponse) -> None:
        expected = self._world.ghost.ledger.entry_from(self._next)
        if expected != (response.offset, response.records):
            violated(
                "watchers see each committed change once, in order",
                f"from {self._next}: got the entry at {response.offset}, "
                f"committed is {expected and expected[0]}",
            )
        self._world.count("changes followed")
        self._next = response.offset + 1

    def _on_progress(self, offset: int) -> None:
        """Everything up to this offset was sent, or is of no interest."""
        ledger = self._world.ghost.ledger
        passed = ledger.entry_from(self._next)
        if (passed is not None and passed[0] <= offset) or offset >= ledger.end:
            violated(
                "watchers see each committed change once, in order",
                f"from {self._next}: told of nothing up to {offset}, committed is {passed}",
            )
        self._next = max(self._next, offset + 1)

    def on_status(self, number: int, code: str) -> None:
        """The handler ended the call: this follower was too slow, or came at a bad time."""
        if number == self._connection:
            self._world.count(f"watches ended: {code}")
            self._move_on(number)

    # -- snapshots

    def _take_snapshot(self) -> None:
        """Ask the leader for a view, which has everything that this follower has seen."""
        world, seen = self._world, self._next
        leader = next((node for node in world.nodes if node.claimed_epoch is not None), None)
        if leader is None or not world.clients_may_go_on:
            world.timeline.later(_RESUME_MS, self.begin)
            return
        number = self._connection
        asked = world.ghost.ledger.end

        def on_view(frozen: FrozenCheckpoint) -> None:
            end = frozen.id.end_offset
            if end < max(seen, asked):
                violated("views are linearizable", f"of {end}, seen was {seen}, committed {asked}")
            view: Any = frozen.view
            assert isinstance(view, StoreView)
            world.ghost.ledger.check_state(leader.key, end, view.hash, frozen.log_hash)
            world.count("views taken")
            if number == self._connection:
                self._next = end
                world.timeline.later(1, self.begin)

        service = leader.service
        world.later_for(leader, 1, lambda: service.begin(service.controller.frozen(), on_view))
        world.timeline.later(_RESUME_MS * 4, lambda: self._move_on(number))


class Auditor:
    """Asks all nodes for the hash of their state, often at an offset that lies ahead."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rngs.followers
        self._digests: dict[int, bytes] = {}

    def begin(self) -> None:
        if self._world.clients_may_go_on:
            self._world.timeline.later(1 + self._rng.randrange(2 * _AUDIT_MS), self._ask)

    def _ask(self) -> None:
        world = self._world
        is_ahead = self._rng.random() < 0.6
        end = world.ghost.ledger.end
        at_offset = end + 1 + self._rng.randrange(_AHEAD_MAX) if is_ahead else None
        for node in self._rng.sample(world.nodes, min(_ASKED, len(world.nodes))):
            if node.core is not None:
                self._ask_one(node, at_offset)
        self.begin()

    def _ask_one(self, node: SimNode, at_offset: int | None) -> None:
        service = node.service

        def on_hash(found: StateHash) -> None:
            self._world.count("state hashes compared")
            self._compare(node, at_offset, found)

        def ask() -> None:
            service.begin(service.controller.state_hash(at_offset), on_hash)

        self._world.later_for(node, 1 + self._rng.randrange(3), ask)

    def _compare(self, node: SimNode, at_offset: int | None, found: StateHash) -> None:
        ledger = self._world.ghost.ledger
        check(
            at_offset in (None, found.offset) and found.offset <= ledger.end,
            "hashes are of what is committed",
            f"{node.key} was asked for {at_offset}, answers for {found.offset} of {ledger.end}",
        )
        same_log = found.log_hash == ledger.log_hash_at(found.offset)
        same_state = found.digest == self._digests.setdefault(found.offset, found.digest)
        if not (same_log and same_state):
            violated(
                "equal hashes at equal offsets",
                f"{node.key} at {found.offset}: log {same_log}, state {same_state}",
            )
