"""Which node compacts the stream objects of a shared stream, which has no owner.

Owns the choice. For each term every live node finds the same one, without a message. Another term
may choose another node, so that a node that compacts nothing delays a stream by a term or two. Two
nodes that disagree for a while do no harm: the controllers accept the first commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

from streammeta.client.compaction.runner import wall_ms
from streammeta.client.controllers.controller_client import ControllerClient

TERM_MS = 4 * 3_600_000
"""A node compacts a shared stream for this time, in ms."""


def chosen_node(stream_id: int, node_ids: Collection[int], term: int) -> int:
    """Return the node that compacts a shared stream in this term.

    Another node takes only its own part from each of the others (rendezvous hashing).
    """

    def weight(node_id: int) -> bytes:
        # Not `hash`: all processes have to agree.
        return hashlib.blake2b(b"%d/%d/%d" % (stream_id, node_id, term), digest_size=8).digest()

    return max(node_ids, key=weight)


class SharedStreams:
    """The shared streams of one cluster, and which of them a node compacts.

    `now_ms` returns the time, in ms since 1970.
    """

    def __init__(self, client: ControllerClient, now_ms: Callable[[], int] = wall_ms) -> None:
        self._client = client
        self._now_ms = now_ms

    async def all(self) -> list[int]:
        """Return the ids of all shared streams, in order."""
        # The controllers have no list of shared streams alone.
        described = self._client.describe_streams()
        return [stream.stream_id async for stream in described if stream.is_shared]

    async def of_node(self, node_id: int) -> list[int]:
        """Return the ids of the shared streams that this live node compacts now, in order."""
        shared = await self.all()
        if not shared:
            return []
        nodes = await self._client.describe_nodes()
        live = {
            node.node_id
            for node in nodes
            if not (node.departed or node.failover or node.state == "fenced")
        } | {node_id}
        term = self._now_ms() // TERM_MS
        return [stream for stream in shared if chosen_node(stream, live, term) == node_id]
