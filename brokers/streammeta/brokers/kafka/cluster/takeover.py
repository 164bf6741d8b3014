"""Recovery of brokers named by the controllers: their streams are closed so that others open them.

Brokers of this shape acknowledge only committed records, so a dead one leaves nothing to upload.
"""

from __future__ import annotations

from collections.abc import Iterable

from streammeta.client import NodeIdentity
from streammeta.client.errors import (
    NodeFencedError,
    NodeNotRegisteredError,
    StreamEpochMismatchError,
)
from streammeta.client.parts import BrokerSession


async def close_streams_of(session: BrokerSession, recoveries: Iterable[NodeIdentity]) -> int:
    """Fence the nodes of `recoveries`, close their open streams, and return the number of streams.

    A node that was reassigned to another broker is skipped.
    """
    closed = 0
    for node in recoveries:
        try:
            streams = await session.list_streams_of(node)
        except (NodeFencedError, NodeNotRegisteredError, StreamEpochMismatchError):
            continue
        epochs = {stream.stream_id: stream.epoch for stream in streams}
        closed += len((await session.close_streams(epochs, of=node)).done)

    return closed
