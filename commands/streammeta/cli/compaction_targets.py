"""Whose set objects an operator's compaction works on, and in whose name.

Owns the choice among the nodes that the map knows. Nothing is registered and nobody is fenced: a
node is spoken for with the epoch that it has registered itself. Object ids are prepared in the
name of a node that lives, as those of a node that is gone are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.cli.compaction_request import NodeChoice
from streammeta.cli.output import CommandError
from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.controller_client import ControllerClient
from streammeta.client.methods import GET_NODES
from streammeta.client.model import NodeIdentity
from streammeta.v1 import nodes_pb2


@dataclass(frozen=True, slots=True)
class Targets:
    """Nodes with set objects, and the live node in whose name ids are prepared.

    `writer` is None if, and only if, there is nothing to compact.
    """

    targets: tuple[CompactionTarget, ...]
    writer: NodeIdentity | None


async def find_targets(client: ControllerClient, choice: NodeChoice) -> Targets:
    """Look the chosen nodes up in the map; nodes without set objects are left out of all and gone.

    Raises `CommandError` when a node that was named has not registered, or no node lives.
    """
    answer = await client.call(GET_NODES, nodes_pb2.GetNodesRequest())
    known = {node.node_id: node for node in answer.nodes}
    unknown = [node_id for node_id in choice.node_ids if node_id not in known]
    if unknown:
        raise CommandError(
            "NODE_EPOCH_NOT_EXIST",
            f"node {unknown[0]} has not registered",
            "`streammeta node list` shows the nodes that have registered",
        )
    chosen = [known[node_id] for node_id in dict.fromkeys(choice.node_ids)] or [
        node
        for node in answer.nodes
        if node.stream_set_object_count and (is_gone(node) or not choice.gone)
    ]
    targets = tuple(
        CompactionTarget(node.node_id, node.node_epoch, failover=is_gone(node)) for node in chosen
    )
    return Targets(targets, _writer(answer.nodes, chosen) if targets else None)


def is_gone(node: nodes_pb2.NodeDescription) -> bool:
    """Tell whether no process of the node is there to compact by itself."""
    return _is_barred(node) or node.state == nodes_pb2.NODE_STATE_FENCED


def _is_barred(node: nodes_pb2.NodeDescription) -> bool:
    """Tell whether the map refuses what the node's own process asks for."""
    return node.departed or node.failover


def _writer(
    nodes: Sequence[nodes_pb2.NodeDescription], chosen: Sequence[nodes_pb2.NodeDescription]
) -> NodeIdentity:
    """Take a node that may prepare ids: one of the chosen if possible, one that is heard first."""
    able = [node for node in (*chosen, *nodes) if not _is_barred(node)]
    able.sort(key=is_gone)
    if not able:
        raise CommandError(
            "NO_LIVE_NODE",
            "no node lives in whose name object ids could be prepared",
            "start a broker, or register a node, and repeat",
        )
    return NodeIdentity(node_id=able[0].node_id, node_epoch=able[0].node_epoch)
