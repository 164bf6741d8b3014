"""Whose set objects are compacted, and in whose name their compaction is committed."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.v1.common_pb2 import NodeIdentity


@dataclass(frozen=True, slots=True)
class CompactionTarget:
    """A node and the epoch of its newest process, as the controllers know it.

    With `failover` another node compacts what a node that is gone has left behind; a commit in the
    name of a node that is there is made by the node itself, without it.
    """

    node_id: int
    node_epoch: int
    failover: bool = False

    @classmethod
    def of(cls, node: NodeIdentity, *, failover: bool = False) -> CompactionTarget:
        """Make the target of a node's identity."""
        return cls(node.node_id, node.node_epoch, failover)

    @property
    def identity(self) -> NodeIdentity:
        """The identity that commits are made with."""
        return NodeIdentity(node_id=self.node_id, node_epoch=self.node_epoch)

    def __str__(self) -> str:
        return f"node {self.node_id} at epoch {self.node_epoch}"
