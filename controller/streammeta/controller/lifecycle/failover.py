"""Keeps sessions, and what nodes do for others that are gone, up to date on the leader.

Sessions are told of time and of leadership here, and what `recoveries` plans is written to the map
when it changes anything: those assignments outlive this leader. What `gone_nodes` plans is this
leader's alone, and begins when it has heard who is there.
"""

import asyncio
from collections.abc import Sequence

import structlog

from streammeta.controller.errors import ApiError
from streammeta.controller.lifecycle.gone_nodes import plan_compactions
from streammeta.controller.lifecycle.heartbeats import Heartbeats, read_nodes
from streammeta.controller.lifecycle.recoveries import plan_recoveries
from streammeta.controller.lifecycle.sessions import Sessions, SupervisedNode
from streammeta.controller.metadata.answers import NodeDescription
from streammeta.controller.metadata.requests import AssignRecoveries
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.controller import MetadataController

_log = structlog.get_logger(component="lifecycle")


class Failover:
    """The task of the leader that misses brokers and has their data recovered."""

    def __init__(
        self,
        controller: MetadataController,
        sessions: Sessions,
        heartbeats: Heartbeats,
        clock: Clock,
        *,
        per_target: int,
    ) -> None:
        self._controller = controller
        self._sessions = sessions
        self._heartbeats = heartbeats
        self._clock = clock
        self._per_target = per_target
        self._compactions: dict[int, int] = {}
        controller.on_leadership(self._on_leadership)

    async def run(self) -> None:
        """Look at sessions and recoveries again and again, until cancelled."""
        while True:
            await self.tick()
            await asyncio.sleep(self._sessions.tick_ms / 1000)

    async def tick(self) -> None:
        """Fence who is silent, assign what has to be recovered and what others are to compact."""
        if not self._controller.is_active:
            return
        nodes = read_nodes(self._controller)
        was_in_doubt = self._sessions.is_in_doubt
        fenced = self._sessions.tick(
            self._clock.monotonic_ms(),
            (
                SupervisedNode(node.node_id, node.node_epoch)
                for node in nodes
                if node.supervised and not node.departed
            ),
        )
        self._report(fenced, was_in_doubt=was_in_doubt)
        try:
            await self._assign(nodes)
        except ApiError as error:
            _log.info("failover_postponed", reason=str(error))

    async def _assign(self, nodes: Sequence[NodeDescription]) -> None:
        nodes = await self._assign_recoveries(nodes)
        self._heartbeats.set_recoveries(nodes)
        self._assign_compactions(nodes)

    async def _assign_recoveries(
        self, nodes: Sequence[NodeDescription]
    ) -> Sequence[NodeDescription]:
        """Return the nodes as they are then."""
        changes = plan_recoveries(nodes, self._sessions, self._per_target)
        if changes:
            await self._controller.write(AssignRecoveries(targets=changes))
            for change in changes:
                _log.info(
                    "recovery_assigned",
                    node=change.node_id,
                    node_epoch=change.node_epoch,
                    target=change.target_id,
                )
            nodes = read_nodes(self._controller)
        return nodes

    def _assign_compactions(self, nodes: Sequence[NodeDescription]) -> None:
        if not self._sessions.is_settled:
            return
        before = self._compactions
        self._compactions = plan_compactions(nodes, self._sessions, before)
        self._heartbeats.set_compactions(nodes, self._compactions)
        for node_id, target in self._compactions.items():
            if before.get(node_id) != target:
                _log.info("compaction_assigned", node=node_id, target=target)

    def _on_leadership(self, leads: bool) -> None:
        self._heartbeats.set_recoveries(())
        self._compactions = {}
        self._heartbeats.set_compactions((), {})
        if leads:
            self._sessions.lead(self._clock.monotonic_ms())
        else:
            self._sessions.resign()

    def _report(self, fenced: Sequence[int], *, was_in_doubt: bool) -> None:
        if fenced:
            _log.warning("nodes_fenced", nodes=list(fenced), silent_ms=self._sessions.timeout_ms)
        if self._sessions.is_in_doubt and not was_in_doubt:
            _log.warning("no_node_is_heard", note="this controller may be cut off; fencing nobody")
