"""Registry of nodes: brokers, the epochs of their newest processes, fencing, and node ids.

One registry serves fencing and registration. A node that unregisters while it has stream set
objects is departed: it remains until the last of them is removed, so that they can be compacted in
its name. The registry does not know whether a node is alive.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from streammeta.controller.errors import ErrorCode, LimitExceededError
from streammeta.controller.features import FIELDS
from streammeta.controller.metadata.api import answers, request_identity
from streammeta.controller.metadata.api.requests import (
    AssignRecoveries,
    GetNextNodeId,
    RegisterNode,
    SetNodeLock,
    SuperviseNode,
)
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel
from streammeta.controller.metadata.registries.object_indexes import NodeObjects
from streammeta.controller.metadata.tables.epochs import check_growth
from streammeta.controller.metadata.tables.shared_views import Window, WindowView
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import INT32_MAX, NodeIdentity, Tags
from streammeta.controller.records import record as rec

_PROCESS_IDS = FIELDS["NodeRegisteredRecord", "process_id"]
"""Feature level from which processes of one epoch are distinguished."""

NODE_ID_MIN = 1_000
"""First id of the counter. Smaller ids are reserved for manually numbered nodes."""


@dataclass(frozen=True, slots=True)
class Node:
    """A broker.

    `failover`: another node recovers its data. `locked`: only itself can open streams that it owned
    last. `departed`: unregistered, but it still has stream set objects. `recovered_by`: the node
    that recovers its data, or -1. `supervised`: it sends heartbeats, so missing ones mean failure.
    """

    node_id: int
    node_epoch: int
    failover: bool = False
    wal_config: str = ""
    tags: Tags = ()
    locked: bool = False
    departed: bool = False
    recovered_by: int = -1
    supervised: bool = False
    process_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesView:
    """Immutable content of the registry of nodes, nodes in id order."""

    in_order: list[Node]
    last_issued_id: int
    free_ids: frozenset[int]
    requests: WindowView[request_identity.RequestKey, request_identity.IssuedIds]


class Nodes:
    """Nodes by id, issued ids, and ids that can be issued again."""

    def __init__(self, set_objects: NodeObjects, feature_level: FeatureLevel) -> None:
        self._set_objects = set_objects
        self._feature_level = feature_level
        self._nodes: dict[int, Node] = {}
        self._departed: set[int] = set()
        self._free_ids: frozenset[int] = frozenset()
        self._last_issued_id = -1
        self._requests: Window[request_identity.RequestKey, request_identity.IssuedIds] = Window(
            request_identity.REQUESTS_MAX
        )

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, node_id: int) -> Node | None:
        """Return a node, or None if it never registered or was forgotten."""
        return self._nodes.get(node_id)

    def lowest_id(self) -> int:
        """Return the smallest id of a known node, or -1."""
        return min(self._nodes, default=-1)

    def in_order(self) -> list[Node]:
        """Return all nodes by id."""
        return [self._nodes[node_id] for node_id in sorted(self._nodes)]

    def view(self) -> NodesView:
        """Return an immutable view of the current registry."""
        return NodesView(
            in_order=self.in_order(),
            last_issued_id=self._last_issued_id,
            free_ids=self._free_ids,
            requests=self._requests.view(),
        )

    def is_locked(self, node_id: int) -> bool:
        """Return whether only the node itself may open streams that it owned last."""
        node = self._nodes.get(node_id)
        return node is not None and node.locked

    def stream_set_object_count(self, node_id: int) -> int:
        """Return a node's number of committed stream set objects."""
        return self._set_objects.get(node_id)

    def check(
        self,
        identity: NodeIdentity,
        *,
        fence_failover: bool = True,
        recoverer: NodeIdentity | None = None,
    ) -> ErrorCode:
        """Return NONE if this process may act for its node.

        An epoch newer than the registered one is accepted and not recorded. `fence_failover` False
        accepts calls made in the name of a recovered or departed node. A caller that names itself
        as `recoverer` must be the node that the recovery is assigned to.
        """
        node = self._nodes.get(identity.node_id)
        if node is None:
            return ErrorCode.NODE_EPOCH_NOT_EXIST
        # A newer process of the node has registered.
        if node.node_epoch > identity.node_epoch:
            return ErrorCode.NODE_EPOCH_EXPIRED
        if fence_failover and (node.failover or node.departed):
            return ErrorCode.NODE_FENCED
        # This fences a recoverer whose assignment moved to another node.
        if recoverer is not None:
            assigned = node.recovered_by == recoverer.node_id
            return self.check(recoverer) if assigned else ErrorCode.NODE_FENCED
        return ErrorCode.NONE

    def check_newest(self, identity: NodeIdentity) -> ErrorCode:
        """Return NONE if this is the newest process of its node, fenced or not."""
        node = self._nodes.get(identity.node_id)
        if node is None or node.node_epoch < identity.node_epoch:
            return ErrorCode.NODE_EPOCH_NOT_EXIST
        # A larger registered epoch means that a newer process has replaced this one.
        newest = node.node_epoch == identity.node_epoch
        return ErrorCode.NONE if newest else ErrorCode.NODE_EPOCH_EXPIRED

    # ---- deciding ----

    def decide_register(
        self, request: RegisterNode
    ) -> tuple[rec.NodeRegistered | None, answers.ErrorAnswer]:
        """Create or replace a node unless a newer process, or another of its epoch, registered.

        A fenced or unregistered process cannot register again, but a newer one can.
        """
        identity = request.node
        node = self._nodes.get(identity.node_id)
        error = self._check_registration(identity)
        if error is not ErrorCode.NONE:
            return None, answers.ErrorAnswer(error=error)
        _check_growth(identity, node)

        # A process without an id may have registered before its broker was upgraded.
        process_id = request.process_id if self._feature_level.current >= _PROCESS_IDS else ""
        if node is not None and node.node_epoch == identity.node_epoch and node.process_id:
            process_id = process_id or node.process_id
            if process_id != node.process_id:
                return None, answers.ErrorAnswer(error=ErrorCode.NODE_EPOCH_EXPIRED)

        tags = tuple(sorted(request.tags))
        answer = answers.ErrorAnswer(error=ErrorCode.NONE)
        known = (identity.node_epoch, request.wal_config, tags, process_id)
        if node is not None and known == (
            node.node_epoch,
            node.wal_config,
            node.tags,
            node.process_id,
        ):
            return None, answer

        record = rec.NodeRegistered(
            node_id=identity.node_id,
            node_epoch=identity.node_epoch,
            wal_config=request.wal_config,
            tags=tags,
            process_id=process_id,
        )
        return record, answer

    def decide_epoch(
        self, identity: NodeIdentity, *, failover: bool
    ) -> tuple[rec.NodeEpochSet | None, ErrorCode]:
        """Set a node's epoch and failover flag unless a newer process has registered.

        Only a newer process ends a failover: a fenced process cannot lift its own fence.
        """
        node = self._nodes.get(identity.node_id)
        error = self._check_registration(identity, fence_failover=not failover)
        if error is not ErrorCode.NONE:
            return None, error
        _check_growth(identity, node)

        known = (identity.node_epoch, failover)
        if node is not None and (node.node_epoch, node.failover) == known:
            return None, ErrorCode.NONE

        record = rec.NodeEpochSet(
            node_id=identity.node_id, node_epoch=identity.node_epoch, failover=failover
        )
        return record, ErrorCode.NONE

    def _check_registration(
        self, identity: NodeIdentity, *, fence_failover: bool = True
    ) -> ErrorCode:
        """Return NONE if this process may register: it is newer, or known and not fenced."""
        # A larger epoch passes even if the older process is fenced.
        node = self._nodes.get(identity.node_id)
        if node is None or node.node_epoch < identity.node_epoch:
            return ErrorCode.NONE
        return self.check(identity, fence_failover=fence_failover)

    def decide_unregister(
        self, identity: NodeIdentity, *, owes_streams: bool
    ) -> tuple[rec.NodeUnregistered | None, answers.ErrorAnswer]:
        """Forget a node, or mark it departed.

        `owes_streams`: it has open streams or pending uploads. The answer for a forgotten or
        departed node is NONE.
        """
        error = self.check(identity, fence_failover=False)
        node = self._nodes.get(identity.node_id)
        if node is None:
            return None, answers.ErrorAnswer(error=ErrorCode.NONE)
        if error is ErrorCode.NONE and owes_streams:
            error = ErrorCode.STREAM_NOT_CLOSED
        # A lock reserves the node's streams for its return.
        if error is ErrorCode.NONE and node.locked:
            error = ErrorCode.NODE_LOCKED
        if error is not ErrorCode.NONE or node.departed:
            return None, answers.ErrorAnswer(error=error)
        return rec.NodeUnregistered(node_id=node.node_id), answers.ErrorAnswer(error=ErrorCode.NONE)

    def decide_lock(
        self, request: SetNodeLock
    ) -> tuple[rec.NodeLocked | None, answers.ErrorAnswer]:
        """Lock or unlock a node."""
        node = self._nodes.get(request.node_id)
        if node is None:
            return None, answers.ErrorAnswer(error=ErrorCode.NODE_EPOCH_NOT_EXIST)
        answer = answers.ErrorAnswer(error=ErrorCode.NONE)
        if node.locked == request.locked:
            return None, answer
        return rec.NodeLocked(node_id=request.node_id, locked=request.locked), answer

    def decide_supervise(
        self, request: SuperviseNode
    ) -> tuple[rec.NodeSupervised | None, answers.ErrorAnswer]:
        """Remember that a node sends heartbeats."""
        error = self.check(request.node)
        node = self._nodes.get(request.node.node_id)
        if error is not ErrorCode.NONE or node is None or node.supervised:
            return None, answers.ErrorAnswer(error=error)
        return rec.NodeSupervised(node_id=node.node_id), answers.ErrorAnswer(error=ErrorCode.NONE)

    def decide_next_id(
        self, request: GetNextNodeId
    ) -> tuple[rec.NodeIdIssued | None, answers.NodeIdAnswer]:
        """Issue the smallest id that is free again, or one above all others."""
        issued = self._requests.get(_request_key(request.request_id))
        if issued is not None:
            return None, answers.NodeIdAnswer(node_id=issued.first_id)
        node_id = self._next_id()
        record = rec.NodeIdIssued(request_id=request.request_id, node_id=node_id)
        return record, answers.NodeIdAnswer(node_id=node_id)

    def _next_id(self) -> int:
        if self._free_ids:
            return min(self._free_ids)
        above_issued = max(NODE_ID_MIN, self._last_issued_id + 1)
        node_id = max(above_issued, max(self._nodes, default=-1) + 1)
        if node_id > INT32_MAX:  # somebody chose a very large id, but smaller ones are free
            node_id = next(
                number for number in itertools.count(above_issued) if not self.get(number)
            )
        if node_id > INT32_MAX:
            raise LimitExceededError(
                f"all node ids up to {INT32_MAX} are in use: unregister some nodes",
                "node_id",
                INT32_MAX,
            )
        return node_id

    def decide_recoveries(
        self, request: AssignRecoveries
    ) -> tuple[list[rec.RecoveryAssigned], answers.AssignRecoveriesAnswer]:
        """Assign recoveries of processes that are still the newest of their node."""
        records = []
        for target in request.targets:
            node = self._nodes.get(target.node_id)
            # The process restarted or left since the leader looked.
            if node is None or node.node_epoch != target.node_epoch:
                continue
            if node.recovered_by != target.target_id:
                records.append(
                    rec.RecoveryAssigned(node_id=node.node_id, target_id=target.target_id)
                )
        return records, answers.AssignRecoveriesAnswer(assigned=len(records))

    # ---- replaying ----

    def replay_registered(self, record: rec.NodeRegistered, undo: Undo) -> None:
        """Replay `NodeRegistered`."""
        before = self._of_epoch(record.node_id, record.node_epoch)
        after = replace(
            before,
            wal_config=record.wal_config,
            tags=record.tags,
            process_id=record.process_id,
        )
        self._set(after, undo)

    def replay_epoch_set(self, record: rec.NodeEpochSet, undo: Undo) -> None:
        """Replay `NodeEpochSet`."""
        before = self._of_epoch(record.node_id, record.node_epoch)
        self._set(replace(before, failover=record.failover), undo)

    def _of_epoch(self, node_id: int, node_epoch: int) -> Node:
        """Return the node as that process sees it. A new process needs no recovery."""
        node = self._nodes.get(node_id)
        if node is None:
            return Node(node_id, node_epoch)
        if node.node_epoch == node_epoch:
            return node
        return replace(
            node,
            node_epoch=node_epoch,
            failover=False,
            # A broker that returns takes its stream set objects back.
            departed=False,
            recovered_by=-1,
            process_id="",
        )

    def replay_unregistered(self, record: rec.NodeUnregistered, undo: Undo) -> None:
        """Replay `NodeUnregistered`."""
        # A departed node sends no heartbeats.
        self._set(replace(self._nodes[record.node_id], departed=True, supervised=False), undo)
        self.forget_departed(undo)

    def forget_departed(self, undo: Undo) -> None:
        """Forget departed nodes without stream set objects, and free their ids."""
        if not self._departed:
            return
        gone = [node_id for node_id in sorted(self._departed) if not self._set_objects.get(node_id)]
        for node_id in gone:
            self._write(node_id, None, undo)
        # Manually chosen ids are never issued.
        free = [node_id for node_id in gone if node_id >= NODE_ID_MIN]
        if free:
            undo.assign(self, "_free_ids", self._free_ids.union(free))

    def replay_locked(self, record: rec.NodeLocked, undo: Undo) -> None:
        """Replay `NodeLocked`."""
        self._set(replace(self._nodes[record.node_id], locked=record.locked), undo)

    def replay_supervised(self, record: rec.NodeSupervised, undo: Undo) -> None:
        """Replay `NodeSupervised`."""
        self._set(replace(self._nodes[record.node_id], supervised=True), undo)

    def replay_recovery_assigned(self, record: rec.RecoveryAssigned, undo: Undo) -> None:
        """Replay `RecoveryAssigned`."""
        self._set(replace(self._nodes[record.node_id], recovered_by=record.target_id), undo)

    def replay_id_issued(self, record: rec.NodeIdIssued, undo: Undo) -> None:
        """Replay `NodeIdIssued`."""
        undo.assign(self, "_last_issued_id", max(self._last_issued_id, record.node_id))
        undo.assign(self, "_free_ids", self._free_ids - {record.node_id})
        self._requests.put(
            _request_key(record.request_id), request_identity.IssuedIds(record.node_id, 1), undo
        )

    def load(
        self,
        nodes: Iterable[Node],
        last_issued_id: int,
        free_ids: Iterable[int],
        requests: Iterable[tuple[request_identity.RequestKey, request_identity.IssuedIds]],
    ) -> None:
        """Fill an empty registry."""
        for node in nodes:
            self._put(node.node_id, node)
        self._last_issued_id = last_issued_id
        self._free_ids = frozenset(free_ids)
        self._requests.load(requests)

    def _set(self, node: Node, undo: Undo) -> None:
        self._write(node.node_id, node, undo)
        if node.node_id in self._free_ids:
            undo.assign(self, "_free_ids", self._free_ids - {node.node_id})

    def _write(self, node_id: int, node: Node | None, undo: Undo) -> None:
        before = self._nodes.get(node_id)
        self._put(node_id, node)
        undo.append(lambda: self._put(node_id, before))

    def _put(self, node_id: int, node: Node | None) -> None:
        if node is not None and node.departed:
            self._departed.add(node_id)
        else:
            self._departed.discard(node_id)
        if node is None:
            self._nodes.pop(node_id, None)
        else:
            self._nodes[node_id] = node


def _request_key(request_id: str) -> request_identity.RequestKey:
    # The caller has no node id yet, so only the request id identifies it.
    return request_identity.RequestKey(request_identity.RequestKind.NEXT_NODE_ID, -1, request_id)


def _check_growth(identity: NodeIdentity, node: Node | None) -> None:
    present = 0 if node is None else node.node_epoch
    check_growth("node.node_epoch", identity.node_epoch, present)
