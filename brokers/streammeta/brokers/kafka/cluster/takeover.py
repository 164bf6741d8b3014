"""Recovery of brokers named by the controllers: their streams are closed so that others open them.

Brokers of this shape acknowledge only committed records, so a dead one leaves nothing to upload.
"""

from __future__ import annotations

from collections.abc import Iterable

from streammeta.client import ControllerClient, NodeIdentity
from streammeta.client.controllers.methods import CLOSE_STREAMS, GET_OPENING_STREAMS
from streammeta.client.model import node_message
from streammeta.v1 import streams_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE

_BATCH = 5_000


async def close_streams_of(
    controllers: ControllerClient, own: NodeIdentity, recoveries: Iterable[NodeIdentity]
) -> int:
    """Fence the nodes of `recoveries`, close their open streams, and return the number of streams.

    A node that was reassigned to another broker is skipped.
    """
    closed = 0
    for node in recoveries:
        asked = streams_pb2.GetOpeningStreamsRequest(
            node=node_message(node), failover=True, recoverer=node_message(own)
        )
        streams: list[streams_pb2.StreamToClose] = []
        async for answer in controllers.pages(GET_OPENING_STREAMS, asked):
            if answer.error != ERROR_CODE_NONE:
                break
            streams.extend(
                streams_pb2.StreamToClose(stream_id=open_.stream_id, stream_epoch=open_.epoch)
                for open_ in answer.streams
                # These streams have records in a log in the bucket. Only a broker that reads such
                # logs may close them.
                if not open_.HasField("upload_end_offset")
            )
        for at in range(0, len(streams), _BATCH):
            request = streams_pb2.CloseStreamsRequest(
                node=node_message(node),
                streams=streams[at : at + _BATCH],
                recoverer=node_message(own),
            )
            answered = await controllers.call(CLOSE_STREAMS, request)
            closed += sum(error == ERROR_CODE_NONE for error in answered.errors)

    return closed
