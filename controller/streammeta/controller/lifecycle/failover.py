"""Heartbeats and failover of brokers on the leader.

Owns the node check of heartbeats and the work assigned to each node in the answer. Informs
`sessions` of time and leadership, writes planned recoveries to the metadata, and keeps planned
compactions only for this leader's term. The metadata only records that a node sends heartbeats at
all, so that the next leader expects them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import structlog

from streammeta.controller.errors import ApiError, ErrorCode
from streammeta.controller.ids import NONE_ID
from streammeta.controller.lifecycle import assignments
from streammeta.controller.lifecycle.broker_sessions import Sessions, SupervisedNode
from streammeta.controller.lifecycle.tasks import PeriodicTask
from streammeta.controller.metadata.api import answer_budget as budget
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import AbandonUploadsAnswer, NodeDescription
from streammeta.controller.metadata.registries.nodes import Node
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.writer.controller import MetadataController

COMPACTIONS_LISTED_MAX = 10_000
"""Maximum number of nodes listed for compaction in one heartbeat response. Others follow later."""

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

    `compactions` are departed or fenced nodes whose stream set objects this node should compact in
    their name.
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
        """Renew a node's session with the requested length.

        Raises:
            NotLeaderError: this controller does not lead.
            OutcomeUnknownError: leadership was lost while the first heartbeat was replicated.
            LimitExceededError: too many requests are waiting, or the disk is full.
            MarkerUnseenError, SupersededError, FencePendingError: there is no lease on the marker
                in the bucket: another cluster may have given the node's streams to others.
        """
        # A former leader must not answer: its clock and its sessions no longer decide.
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
        # Replicated once per node, so that the next leader expects its heartbeats.
        if not known.supervised:
            await self._controller.write(requests.SuperviseNode(node=node))
        may_shutdown = wants_shutdown and not self._has_unrecovered_data(node.node_id)
        if may_shutdown:
            # Its last change must be committed, or the next leader may not have it.
            await self._controller.settled()

        # The heartbeat counts, but without a lease the node must not rely on the answer.
        self._controller.lease.require()
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
        """Return the node that compacts a departed node's stream set objects, or `NONE_ID`."""
        return self._compacted_by.get(node_id, NONE_ID)

    @property
    def assigned_recoveries(self) -> int:
        """Number of nodes whose data another node should recover, in this leader's term."""
        return sum(map(len, self._recoveries.values()))

    @property
    def assigned_compactions(self) -> int:
        """Number of nodes whose stream set objects others should compact, in this leader's term."""
        return len(self._compacted_by)

    def set_recoveries(self, nodes: Iterable[NodeDescription]) -> None:
        """Assign recoveries to their targets. `nodes` are all nodes."""
        found: dict[int, list[Recovery]] = {}
        for node in nodes:
            # Negative numbers mean that nobody recovers the node.
            if node.recovered_by >= 0:
                recovery = Recovery(node.node_id, node.node_epoch, node.wal_config)
                found.setdefault(node.recovered_by, []).append(recovery)
        self._recoveries = {target: tuple(recoveries) for target, recoveries in found.items()}

    def set_compactions(self, nodes: Iterable[NodeDescription], plan: Mapping[int, int]) -> None:
        """Assign compactions to the targets of `plan`, departed -> target."""
        found: dict[int, list[NodeIdentity]] = {}
        for node in nodes:
            if node.node_id in plan:
                departed = NodeIdentity(node.node_id, node.node_epoch)
                found.setdefault(plan[node.node_id], []).append(departed)
        self._compacted_by = dict(plan)
        self._compactions = {target: tuple(departed) for target, departed in found.items()}

    def _has_unrecovered_data(self, node_id: int) -> bool:
        return any(map(assignments.has_unrecovered_data, read_nodes(self._controller, (node_id,))))


def read_nodes(
    controller: MetadataController, node_ids: tuple[int, ...] = ()
) -> Sequence[NodeDescription]:
    """Return nodes, or all, from the leader's current metadata, uncommitted changes included."""
    return controller.cluster_metadata.nodes(node_ids)


def _check(caller: NodeIdentity, known: Node | None) -> ErrorCode:
    if known is None:
        return ErrorCode.NODE_EPOCH_NOT_EXIST
    # A newer process of this node has registered, so the caller is a former one.
    if known.node_epoch > caller.node_epoch:
        return ErrorCode.NODE_EPOCH_EXPIRED
    # Its streams may already be open elsewhere, so it has to register again.
    if known.failover or known.departed:
        return ErrorCode.NODE_FENCED
    return ErrorCode.NONE


STALLED_MS = 60_000
"""Duration after which a recovery frees its slot, because it may be impossible."""


class StalledRecoveries:
    """Recoveries that have been assigned to one node for long, in this leader's term."""

    def __init__(self) -> None:
        self._since_ms: dict[tuple[int, int, int], int] = {}

    def among(self, nodes: Iterable[NodeDescription], now_ms: int) -> frozenset[int]:
        """Return the nodes whose recovery has been assigned for `STALLED_MS` without finishing."""
        assigned = [
            (node.node_id, node.node_epoch, node.recovered_by)
            for node in nodes
            if node.recovered_by >= 0
        ]
        # The key has epoch and target: a new assignment starts a new wait.
        self._since_ms = {key: self._since_ms.get(key, now_ms) for key in assigned}
        return frozenset(
            node_id
            for (node_id, _, _), since_ms in self._since_ms.items()
            if now_ms - since_ms >= STALLED_MS
        )


class Failover(PeriodicTask):
    """The leader's task that fences silent brokers and assigns the recovery of their data."""

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
        """Fence silent nodes, and assign recoveries and compactions."""
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
        # Logged before the assignment, which may fail.
        self._report(fenced, was_in_doubt=was_in_doubt)
        self._interval_ms = self._sessions.tick_ms  # brokers may have requested shorter sessions
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
        """Close the streams of failed nodes that need no recovery. Returns all nodes after that.

        While no node could open the streams, their owners keep them. An owner that only paused
        resumes.
        """
        if not assignments.has_successor(nodes, self._sessions):
            return nodes
        failed = [
            node
            for node in nodes
            if assignments.has_failed(node, self._sessions) and assignments.needs_no_recovery(node)
        ]
        for node in failed:
            try:
                await self._close_streams(NodeIdentity(node.node_id, node.node_epoch))
            except ApiError as error:
                _log.info("release_postponed", node=node.node_id, reason=str(error))
        return read_nodes(self._controller) if failed else nodes

    async def _close_streams(self, node: NodeIdentity) -> None:
        closed, left = 0, 1
        while left:
            answer = await self._write_release(node)
            closed, left = closed + answer.closed_streams, answer.open_streams
        if closed:
            _log.info("streams_released", node=node.node_id, streams=closed)

    async def _write_release(self, node: NodeIdentity) -> AbandonUploadsAnswer:
        written = await self._controller.write(requests.ReleaseStreams(node=node))
        return cast(AbandonUploadsAnswer, written.answer)

    async def _assign_recoveries(
        self, nodes: Sequence[NodeDescription]
    ) -> Sequence[NodeDescription]:
        """Write planned recoveries, and return the nodes with them."""
        stalled = self._stalled.among(nodes, self._clock.monotonic_ms())
        changes = assignments.plan_recoveries(nodes, self._sessions, self._per_target, stalled)
        if changes:
            await self._controller.write(requests.AssignRecoveries(targets=changes))
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
        # Until every active node could be heard, a plan would move work away from nodes that are
        # alive.
        if not self._sessions.is_settled:
            return
        before = self._compactions
        self._compactions = assignments.plan_compactions(nodes, self._sessions, before)
        self._heartbeats.set_compactions(nodes, self._compactions)
        for node_id, target in self._compactions.items():
            if before.get(node_id) != target:
                _log.info("compaction_assigned", node=node_id, target=target)

    def _on_leadership(self, leads: bool) -> None:
        # Assignments of the metadata are read again in the first step of a term.
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
            _log.warning("no_node_is_heard", note="this controller may be cut off, fencing nobody")
