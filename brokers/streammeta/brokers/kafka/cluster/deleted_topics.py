"""Deletion of the streams of deleted topics, which carry the topic's id as a tag.

A deletion records the topic's id before it deletes the topic's key, so any broker that becomes
Kafka's controller can finish it, even after crashes. The record outlives the last stream for a
while, because a broker that was opening a partition may still create a stream.
"""

from __future__ import annotations

from collections.abc import Collection

from streammeta.brokers.kafka.cluster.keys import Keys, deleted_key, meta_key
from streammeta.client import StreamClient

NOTE_KEPT_MS = 60_000
_TOPIC_TAG = "0"


async def delete_streams_of_deleted(
    client: StreamClient, keys: Keys, living: Collection[str], now_ms: int
) -> int:
    """Delete the closed streams of recorded topics, and return their number.

    Topics whose ids are `living` are skipped: their keys are not deleted yet. Open streams are left
    to the next call.
    """
    noted = await keys.list(deleted_key())
    gone = {topic_id: value for topic_id, (value, _) in noted.items() if topic_id not in living}
    if not gone:
        return 0

    left = set()
    closed: dict[int, int | None] = {}
    async for stream in client.controllers.describe_streams():
        topic_id = stream.tags.get(_TOPIC_TAG, "")
        if topic_id in gone:
            left.add(topic_id)
            # The leader closes its streams once it sees that the topic is gone.
            if not stream.is_open:
                closed[stream.stream_id] = stream.epoch
    deleted = await client.session.delete_streams(closed)

    for topic_id, value in gone.items():
        # A broker that was opening a partition may still create a stream, so the record stays a
        # while.
        if topic_id not in left and now_ms - value["at_ms"] >= NOTE_KEPT_MS:
            metas = [meta_key(topic_id, partition) for partition in range(value["partitions"])]
            await keys.delete([*metas, deleted_key(topic_id)])

    return len(deleted.done)
