"""Shared streams of diskless topics: their creation, and what follows from the view.

One broker creates the streams that topics need, and puts their ids into the topic's key. So all
brokers know them from their view. Like other streams of partitions they are tagged with the topic's
id, and are deleted with the topic, also if the attempt was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from streammeta.brokers.kafka.cluster.cluster import ClusterView, Run, Topic
from streammeta.brokers.kafka.cluster.keys import Keys, topic_key
from streammeta.brokers.kafka.cluster.topic_configs import log_config
from streammeta.brokers.kafka.diskless.partition import LEADER_EPOCH
from streammeta.brokers.kafka.diskless.placement import choose_broker
from streammeta.brokers.partition.log import LogConfig
from streammeta.brokers.partition.opening import partition_tags
from streammeta.client import StreamClient


async def provide_streams(client: StreamClient, keys: Keys, topics: Iterable[Topic]) -> bool:
    """Create the streams that diskless topics need. Return whether a topic has changed."""
    has_changed = False
    for topic in topics:
        present = topic.provided
        if not topic.is_diskless or present >= topic.partitions:
            continue
        tags = [partition_tags(topic.topic_id, at) for at in range(present, topic.partitions)]
        created = await client.create_streams(tags, shared=True)
        provided = replace(topic, streams=(*topic.streams, *_runs(created)))
        has_changed = True
        # The topic may have been deleted, or changed by another broker, which is read next.
        if not await keys.put({topic_key(topic.name): provided.document()}, topic.version):
            await client.session.delete_streams(dict.fromkeys(created, LEADER_EPOCH))
    return has_changed


def _runs(stream_ids: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    for stream_id in stream_ids:
        if runs and sum(runs[-1]) == stream_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((stream_id, 1))
    return runs


def shared_partitions(topics: Iterable[Topic]) -> Mapping[tuple[str, int], tuple[int, LogConfig]]:
    """Return stream id and settings of each partition of the diskless topics."""
    found = {}
    for topic in topics:
        if topic.is_diskless:
            config = log_config(topic.configs)
            for partition, stream_id in enumerate(topic.stream_ids):
                found[topic.topic_id, partition] = (stream_id, config)
    return found


def chosen_places(view: ClusterView, node_id: int) -> list[tuple[str, int]]:
    """Return the partitions of diskless topics to which this node applies retention."""
    nodes = view.servers(None)
    return [
        (topic.topic_id, partition)
        for topic in view.topics.values()
        if topic.is_diskless
        for partition in range(topic.partitions)
        if choose_broker(nodes, topic.topic_id, partition) == node_id
    ]
