"""Heartbeats and failover of brokers on the leader.

Owns the node check of heartbeats and the work each node is assigned in the answer. Informs
`sessions` of time and leadership, writes planned recoveries to the map, and keeps planned
compactions for this leader's reign alone. The map holds only that a node sends heartbeats at all,
so that the next leader knows to miss them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import structlog

from streammeta.controller.errors import ApiError, ErrorCode
from streammeta.controller.ids import NONE_ID
from streammeta.controller.lifecycle.assignments import (
    has_failed,
    has_successor,
    has_unrecovered_data,
    owes_nothing,
    plan_compactions,
    plan_recoveries,
)
from streammeta.controller.lifecycle.broker_sessions import Sessions, SupervisedNode
from streammeta.controller.lifecycle.tasks import PeriodicTask
from streammeta.controller.metadata.api import answer_budget as budget
from streammeta.controller.metadata.api.answers import AbandonUploadsAnswer, NodeDescription
from streammeta.controller.metadata.api.requests import (
    AssignRecoveries,
    ReleaseStreams,
    SuperviseNode,
)
from streammeta.controller.metadata.registries.nodes import Node
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.writer.controller import MetadataController

COMPACTIONS_LISTED_MAX = 10_000
"""Maximum number of nodes that one heartbeat's answer lists for compaction; others follow later."""

_log = structlog.get_logger(component="lifecycle")


@dataclass(frozen=True, slots=True)
class Recovery:
    """A process whose data is to be recovered, and the location of its write-ahead log."""

    node_id: int
    node_epoch: int
    wal_config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """Result of the node check, permission to shut down, and assigned work.

    `compactions` are departed or fenced nodes whose set objects it is to compact in their name.
    """

    error: ErrorCode
    may_shutdown: bool = False
    session_timeout_ms: int
    recoveries: tuple[Recovery, ...] = ()
    compactions: tuple[NodeIdentity, ...] = ()


def _recovery_bytes(recovery: Recovery) -> int:
    return budget.text_bytes(recovery.wal_config)


class Heartbeats:
    """Answers heartbeats while this controller leads."""

    def __init__(self, controller: MetadataController, sessions: Sessions, clock: Clock) -> None:
        self._controller = controller
        self._sessions = sessions
        self._clock = clock
        self._recoveries: dict[int, tuple[Recovery, ...]] = {}
        self._compacted_by: dict[int, int] = {}
        self._compactions: dict[int, tuple[NodeIdentity, ...]] = {}
        controller.binding.assign_compactions_by(self.compacted_by)

    async def heartbeat(
        self,
        node: NodeIdentity,
        *,
        wants_shutdown: bool,
        closes: bool = False,
        session_timeout_ms: int = 0,
    ) -> HeartbeatAnswer:
        """Renew a node's session, of the length that it asks for.

        Raises:
            NotLeaderError: this controller does not lead.
            OutcomeUnknownError: it ceased to lead while the node's first heartbeat was replicated.
            LimitExceededError: too many requests wait already, or the disk is full.
            MarkerUnseenError, SupersededError, FencePendingError: there is no lease on the marker
                in the bucket: another cluster may have given the node's streams to others.
        """
        if not self._controller.is_active:
            await self._controller.settled()  # raises with the leader's address
        known = self._controller.cluster_metadata.node(node.node_id)
        error = _check(node, known)
        granted_ms = self._sessions.granted_ms(session_timeout_ms)
        if known is None or error is not ErrorCode.NONE:
            return HeartbeatAnswer(error=error, session_timeout_ms=granted_ms)

        self._sessions.heartbeat(
            node.node_id,
            node.node_epoch,
            self._clock.monotonic_ms(),
            wants_shutdown=wants_shutdown,
            closes=closes,
            wanted_ms=session_timeout_ms,
        )
        if not known.supervised:
            await self._controller.write(SuperviseNode(node=node))
        may_shutdown = wants_shutdown and not self._owes(node.node_id)
        if may_shutdown:
            # Its last change must be committed, so that the next leader has it too.
            await self._controller.settled()

        self._controller.lease.require()  # the node is heard, and may not rely on the answer
        # The rest is listed once these are done.
        recoveries, _ = budget.take_fitting(self._recoveries.get(node.node_id, ()), _recovery_bytes)
        return HeartbeatAnswer(
            error=error,
            may_shutdown=may_shutdown,
            session_timeout_ms=granted_ms,
            recoveries=recoveries,
            compactions=self._compactions.get(node.node_id, ())[:COMPACTIONS_LISTED_MAX],
        )

    def compacted_by(self, node_id: int) -> int:
        """Return the node assigned to compact a departed one's set objects, or `NONE_ID`."""
        return self._compacted_by.get(node_id, NONE_ID)

    @property
    def assigned_recoveries(self) -> int:
        """Nodes whose data another node is to recover; of this leader's reign."""
        return sum(map(len, self._recoveries.values()))

    @property
    def assigned_compactions(self) -> int:
        """Nodes whose set objects another node is to compact; of this leader's reign."""
        return len(self._compacted_by)

    def set_recoveries(self, nodes: Iterable[NodeDescription]) -> None:
        """Assign recoveries to their targets; `nodes` are all of the map."""
        found: dict[int, list[Recovery]] = {}
        for node in nodes:
            if node.recovered_by >= 0:
                recovery = Recovery(node.node_id, node.node_epoch, node.wal_config)
                found.setdefault(node.recovered_by, []).append(recovery)
        self._recoveries = {target: tuple(owed) for target, owed in found.items()}

    def set_compactions(self, nodes: Iterable[NodeDescription], plan: Mapping[int, int]) -> None:
        """Assign compactions to the targets of `plan`, departed -> target."""
        found: dict[int, list[NodeIdentity]] = {}
        for node in nodes:
            if node.node_id in plan:
                departed = NodeIdentity(node.node_id, node.node_epoch)
                found.setdefault(plan[node.node_id], []).append(departed)
        self._compacted_by = dict(plan)
        self._compactions = {target: tuple(departed) for target, departed in found.items()}

    def _owes(self, node_id: int) -> bool:
        return any(map(has_unrecovered_data, read_nodes(self._controller, (node_id,))))


def read_nodes(
    controller: MetadataController, node_ids: tuple[int, ...] = ()
) -> Sequence[NodeDescription]:
    """Read nodes, or all, as the leader's map has them now, uncommitted changes included."""
    return controller.cluster_metadata.nodes(node_ids)


def _check(caller: NodeIdentity, known: Node | None) -> ErrorCode:
    if known is None:
        return ErrorCode.NODE_EPOCH_NOT_EXIST
    if known.node_epoch > caller.node_epoch:
        return ErrorCode.NODE_EPOCH_EXPIRED
    if known.failover or known.departed:
        return ErrorCode.NODE_FENCED
    return ErrorCode.NONE


STALLED_MS = 60_000
"""A recovery that takes longer leaves its room to another: it may be one that can't be done."""


class StalledRecoveries:
    """Recoveries that have been assigned to one node for long, in this leader's reign."""

    def __init__(self) -> None:
        self._since_ms: dict[tuple[int, int, int], int] = {}

    def among(self, nodes: Iterable[NodeDescription], now_ms: int) -> frozenset[int]:
        """Return the nodes whose recovery has been assigned for `STALLED_MS` without an end."""
        assigned = [
            (node.node_id, node.node_epoch, node.recovered_by)
            for node in nodes
            if node.recovered_by >= 0
        ]
        self._since_ms = {key: self._since_ms.get(key, now_ms) for key in assigned}
        return frozenset(
            node_id
            for (node_id, _, _), since_ms in self._since_ms.items()
            if now_ms - since_ms >= STALLED_MS
        )


class Failover(PeriodicTask):
    """The leader's task that fences silent brokers and has their data recovered."""

    def __init__(
        self,
        controller: MetadataController,
        sessions: Sessions,
        heartbeats: Heartbeats,
        clock: Clock,
        *,
        per_target: int,
    ) -> None:
        super().__init__(sessions.tick_ms)
        self._controller = controller
        self._sessions = sessions
        self._heartbeats = heartbeats
        self._clock = clock
        self._per_target = per_target
        self._compactions: dict[int, int] = {}
        self._stalled = StalledRecoveries()
        controller.on_leadership(self._on_leadership)

    async def step(self) -> None:
        """Fence silent nodes; assign recoveries and compactions."""
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
        self._interval_ms = self._sessions.tick_ms  # brokers may have asked for shorter sessions
        try:
            await self._assign(nodes)
        except ApiError as error:
            _log.info("failover_postponed", reason=str(error))

    async def _assign(self, nodes: Sequence[NodeDescription]) -> None:
        nodes = await self._release(nodes)
        nodes = await self._assign_recoveries(nodes)
        self._heartbeats.set_recoveries(nodes)
        self._assign_compactions(nodes)

    async def _release(self, nodes: Sequence[NodeDescription]) -> Sequence[NodeDescription]:
        """Close the streams of nodes that are gone and owe nothing; return all nodes after that.

        While no node could open them, their owners keep them. An owner that only lost time resumes.
        """
        if not has_successor(nodes, self._sessions):
            return nodes
        gone = [node for node in nodes if has_failed(node, self._sessions) and owes_nothing(node)]
        for node in gone:
            try:
                await self._close_streams(NodeIdentity(node.node_id, node.node_epoch))
            except ApiError as error:
                _log.info("release_postponed", node=node.node_id, reason=str(error))
        return read_nodes(self._controller) if gone else nodes

    async def _close_streams(self, node: NodeIdentity) -> None:
        closed, left = 0, 1
        while left:
            answer = await self._write_release(node)
            closed, left = closed + answer.closed_streams, answer.open_streams
        if closed:
            _log.info("streams_released", node=node.node_id, streams=closed)

    async def _write_release(self, node: NodeIdentity) -> AbandonUploadsAnswer:
        written = await self._controller.write(ReleaseStreams(node=node))
        return cast(AbandonUploadsAnswer, written.answer)

    async def _assign_recoveries(
        self, nodes: Sequence[NodeDescription]
    ) -> Sequence[NodeDescription]:
        """Write planned recoveries; return the nodes with them."""
        stalled = self._stalled.among(nodes, self._clock.monotonic_ms())
        changes = plan_recoveries(nodes, self._sessions, self._per_target, stalled)
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
            _log.warning("nodes_fenced", nodes=list(fenced))
        if self._sessions.is_in_doubt and not was_in_doubt:
            _log.warning("no_node_is_heard", note="this controller may be cut off; it fences none")
