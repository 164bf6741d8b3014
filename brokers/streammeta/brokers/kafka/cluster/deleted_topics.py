"""Streams of deleted topics: found by the topic's id, which they have as tag, and deleted.

A deletion notes the topic's id before its key goes, so it is finished by whichever broker names
leaders, however often brokers end meanwhile. A note is kept for a while after the last stream is
gone: a broker that was opening a partition may still have made one.
"""

from __future__ import annotations

from collections.abc import Collection

from streammeta.brokers.kafka.cluster.keys import Keys, deleted_key, meta_key
from streammeta.client import StreamClient
from streammeta.client.controllers.methods import DELETE_STREAMS
from streammeta.client.model import node_message
from streammeta.v1 import streams_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE

NOTE_KEPT_MS = 60_000
_TOPIC_TAG = "0"
_BATCH = 5_000


async def delete_streams_of_deleted(
    client: StreamClient, keys: Keys, living: Collection[str], now_ms: int
) -> int:
    """Delete the closed streams of topics that are noted; return their number.

    Topics whose ids are `living` are passed over: their deletion has not got that far. What is not
    closed yet is left to the next call.
    """
    noted = await keys.list(deleted_key())
    gone = {topic_id: value for topic_id, (value, _) in noted.items() if topic_id not in living}
    if not gone:
        return 0
    left = set()
    closed: list[streams_pb2.StreamToDelete] = []
    async for one in client.controllers.describe_streams():
        topic_id = one.tags.get(_TOPIC_TAG, "")
        if topic_id in gone:
            left.add(topic_id)
            if not one.is_open:
                stream = streams_pb2.StreamToDelete(stream_id=one.stream_id, stream_epoch=one.epoch)
                closed.append(stream)
    deleted = 0
    for at in range(0, len(closed), _BATCH):
        request = streams_pb2.DeleteStreamsRequest(
            node=node_message(client.session.node), streams=closed[at : at + _BATCH]
        )
        answer = await client.controllers.call(DELETE_STREAMS, request)
        deleted += sum(error == ERROR_CODE_NONE for error in answer.errors)
    for topic_id, value in gone.items():
        if topic_id not in left and now_ms - value["at_ms"] >= NOTE_KEPT_MS:
            metas = [meta_key(topic_id, partition) for partition in range(value["partitions"])]
            await keys.delete([*metas, deleted_key(topic_id)])
    return deleted
