"""Binding of brokers to their nodes: the nodes that a broker's request may name.

A broker may name its own node, a node that it recovers by the metadata, and a departed node whose
stream set objects it compacts by this leader's assignment. Requests are validated when they are
decided, against the same state, in addition to epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.registries.nodes import Node
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.trust.refusals import NotYourNodeError
from streammeta.tls.identity import Principal


def _is_recovery(request: requests.WriteRequest) -> bool:
    """Whether a request is one that a recovery makes in the name of the node it recovers."""
    match request:
        case requests.GetOpeningStreams() | requests.CommitStreamSetObject():
            return request.failover
        case requests.CloseStreams():
            return True
        case _:
            return False


def _is_compaction(request: requests.WriteRequest) -> bool:
    """Whether a request compacts stream set objects of a node that does not do so itself."""
    return (
        isinstance(request, requests.CommitStreamSetObject)
        and request.failover
        and len(request.compacted_object_ids) > 0
    )


def require_own_node(held_to: Principal, node_id: int) -> None:
    """Require that a broker names its own node. Raises NotYourNodeError."""
    if held_to.node_id != node_id:
        raise NotYourNodeError(str(held_to), node_id, f"broker/{node_id}")


class NodeBinding:
    """Judges requests by what the leader knows of the nodes they speak for."""

    def __init__(self, compacted_by: Callable[[int], int] = lambda _: NONE_ID) -> None:
        """`compacted_by` returns the node assigned to compact another's SSOs."""
        self._compacted_by = compacted_by

    def assign_compactions_by(self, compacted_by: Callable[[int], int]) -> None:
        """Take another source of assignments."""
        self._compacted_by = compacted_by

    def require(
        self,
        held_to: Principal,
        asked: Sequence[requests.WriteRequest],
        node_of: Callable[[int], Node | None],
    ) -> None:
        """Require that a broker may make all these requests. `node_of` reads the metadata.

        Raises:
            NotYourNodeError: it may not make one of them.
        """
        for request in asked:
            node: NodeIdentity = _spoken_for(request)
            # Epochs decide whether the process is the current one. Only the node id is checked
            # here.
            if node.node_id != held_to.node_id:
                self._require_assigned(held_to, request, node, node_of(node.node_id))

    def _require_assigned(
        self,
        held_to: Principal,
        request: requests.WriteRequest,
        identity: NodeIdentity,
        node: Node | None,
    ) -> None:
        is_compaction = _is_compaction(request)
        if is_compaction or _is_recovery(request):
            # The owner's return ends every assignment: the metadata has its higher epoch.
            if node is not None and node.node_epoch > identity.node_epoch:
                return
            if node is not None and held_to.node_id == self._assigned(node, is_compaction):
                return
        work = "compaction" if is_compaction else "recovery"
        node_id = identity.node_id
        needs = f"broker/{node_id}, or the {work} of node {node_id} to be assigned to it"
        raise NotYourNodeError(str(held_to), node_id, needs)

    def _assigned(self, node: Node, is_compaction: bool) -> int:
        return self._compacted_by(node.node_id) if is_compaction else node.recovered_by


def _spoken_for(request: Any) -> NodeIdentity:
    """Return the node of a request. All calls that bind brokers have one."""
    node: NodeIdentity = request.node
    return node
