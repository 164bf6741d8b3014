"""The nodes: brokers, the epoch of each one's newest process, and what fences it.

One registry serves fencing and registration. Whether a node is alive is not known here.
"""

from dataclasses import dataclass, replace

from controller.errors import ErrorCode
from controller.metadata.answers import RegisterNodeAnswer
from controller.metadata.columns import Undo
from controller.metadata.requests import RegisterNode
from controller.metadata.values import NodeIdentity, Tags
from controller.records.record import NodeEpochSet, NodeRegistered


@dataclass(frozen=True, slots=True)
class Node:
    """One broker; `failover`: another node recovers its data."""

    node_id: int
    node_epoch: int
    failover: bool = False
    wal_config: str = ""
    tags: Tags = ()


class Nodes:
    """Nodes by id."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, node_id: int) -> Node | None:
        """Return a node, or None if it never registered."""
        return self._nodes.get(node_id)

    def in_order(self) -> list[Node]:
        """Return all nodes by id."""
        return [self._nodes[node_id] for node_id in sorted(self._nodes)]

    def check(self, identity: NodeIdentity, *, fence_failover: bool = True) -> ErrorCode:
        """Return NONE if this process may speak for its node.

        An epoch newer than the registered one passes and is not recorded. `fence_failover` False
        lets calls pass that a recovery makes on the node's behalf.
        """
        node = self._nodes.get(identity.node_id)
        if node is None:
            return ErrorCode.NODE_EPOCH_NOT_EXIST
        if node.node_epoch > identity.node_epoch:
            return ErrorCode.NODE_EPOCH_EXPIRED
        if fence_failover and node.failover:
            return ErrorCode.NODE_FENCED
        return ErrorCode.NONE

    def decide_register(
        self, request: RegisterNode
    ) -> tuple[NodeRegistered | None, RegisterNodeAnswer]:
        """Create or replace a node unless a newer process has registered."""
        identity = request.node
        node = self._nodes.get(identity.node_id)
        if node is not None and node.node_epoch > identity.node_epoch:
            return None, RegisterNodeAnswer(error=ErrorCode.NODE_EPOCH_EXPIRED)
        tags = tuple(sorted(request.tags))
        answer = RegisterNodeAnswer(error=ErrorCode.NONE)
        known = (identity.node_epoch, request.wal_config, tags)
        if node is not None and (node.node_epoch, node.wal_config, node.tags) == known:
            return None, answer
        record = NodeRegistered(
            node_id=identity.node_id,
            node_epoch=identity.node_epoch,
            wal_config=request.wal_config,
            tags=tags,
        )
        return record, answer

    def decide_epoch(
        self, identity: NodeIdentity, *, failover: bool
    ) -> tuple[NodeEpochSet | None, ErrorCode]:
        """Set a node's epoch and failover flag unless a newer process has registered."""
        node = self._nodes.get(identity.node_id)
        if node is not None and node.node_epoch > identity.node_epoch:
            return None, ErrorCode.NODE_EPOCH_EXPIRED
        known = (identity.node_epoch, failover)
        if node is not None and (node.node_epoch, node.failover) == known:
            return None, ErrorCode.NONE
        record = NodeEpochSet(
            node_id=identity.node_id, node_epoch=identity.node_epoch, failover=failover
        )
        return record, ErrorCode.NONE

    def replay_registered(self, record: NodeRegistered, undo: Undo) -> None:
        """See `NodeRegistered`."""
        before = self._nodes.get(record.node_id)
        same_process = before is not None and before.node_epoch == record.node_epoch
        node = Node(
            node_id=record.node_id,
            node_epoch=record.node_epoch,
            failover=same_process and before is not None and before.failover,
            wal_config=record.wal_config,
            tags=record.tags,
        )
        self._set(node, undo)

    def replay_epoch_set(self, record: NodeEpochSet, undo: Undo) -> None:
        """See `NodeEpochSet`."""
        before = self._nodes.get(record.node_id, Node(record.node_id, record.node_epoch))
        self._set(replace(before, node_epoch=record.node_epoch, failover=record.failover), undo)

    def load(self, nodes: list[Node]) -> None:
        """Fill an empty registry."""
        self._nodes = {node.node_id: node for node in nodes}

    def _set(self, node: Node, undo: Undo) -> None:
        before = self._nodes.get(node.node_id)
        self._nodes[node.node_id] = node
        undo.append(lambda: self._restore(node.node_id, before))

    def _restore(self, node_id: int, node: Node | None) -> None:
        if node is None:
            del self._nodes[node_id]
        else:
            self._nodes[node_id] = node
