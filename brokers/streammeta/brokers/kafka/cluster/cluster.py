"""View of a Kafka cluster: live brokers, topics, leaders, and appointments of missing leaders.

A diskless topic has no leaders. Its partitions are shared streams, whose ids its key contains.

A view is read from keys and from the controllers' sessions, and may be outdated. Correctness does
not depend on it: the epoch of its streams fences a leader, and the version that was read guards a
change.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streammeta.brokers.kafka.cluster.keys import Keys
from streammeta.brokers.kafka.cluster.topic_configs import is_diskless
from streammeta.client import NodeDescription, NodeIdentity
from streammeta.client.parts import ControllerClient
from streammeta.storage.cluster_files.wal_config import NO_LOG


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which clients reach a broker, and the epoch of its process.

    `is_shared` brokers serve the partitions of diskless topics.
    """

    host: str
    port: int
    node_epoch: int
    rack: str | None = None
    is_shared: bool = False

    def document(self) -> Mapping[str, Any]:
        """Return the JSON value of its key."""
        value: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "node_epoch": self.node_epoch,
        }
        if self.rack is not None:
            value["rack"] = self.rack
        if self.is_shared:
            value["shared"] = True
        return value

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Endpoint:
        """Return the endpoint in the JSON value of a key."""
        return cls(
            value["host"],
            value["port"],
            value["node_epoch"],
            value.get("rack"),
            value.get("shared", False),
        )


Run = tuple[int, int]
"""Consecutive stream ids: the first, and how many."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic with its id, partitions and settings.

    `streams` are the shared streams of a diskless topic in the order of its partitions. The
    streams of the newest partitions may be missing.
    """

    name: str
    topic_id: str
    partitions: int
    configs: Mapping[str, str]
    version: int = 0
    streams: Sequence[Run] = ()

    def document(self) -> Mapping[str, Any]:
        """Return the JSON value of its key."""
        value: dict[str, Any] = {
            "id": self.topic_id,
            "partitions": self.partitions,
            "configs": dict(self.configs),
        }
        # The key of another topic stays as older brokers write it.
        if self.streams:
            value["streams"] = [list(run) for run in self.streams]
        return value

    @property
    def is_diskless(self) -> bool:
        """Whether its partitions are shared streams, without leaders."""
        return is_diskless(self.configs)

    @property
    def provided(self) -> int:
        """Number of partitions that have a shared stream."""
        return sum(count for _, count in self.streams)

    @property
    def stream_ids(self) -> Sequence[int]:
        """Ids of the shared streams, by partition."""
        return [
            stream_id for first, count in self.streams for stream_id in range(first, first + count)
        ]


@dataclass(frozen=True, slots=True)
class Leader:
    """Leader of a partition since an epoch. `version` is its key's version."""

    node_id: int
    epoch: int
    version: int = 0

    def document(self) -> Mapping[str, Any]:
        """Return the JSON value of its key."""
        return {"leader": self.node_id, "epoch": self.epoch}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Live brokers by node id, topics by name, leaders by topic id and partition.

    `recoveries` are the processes whose streams a node has to close, by that node's id.
    """

    brokers: Mapping[int, Endpoint] = field(default_factory=dict)
    topics: Mapping[str, Topic] = field(default_factory=dict)
    leaders: Mapping[tuple[str, int], Leader] = field(default_factory=dict)
    recoveries: Mapping[int, Sequence[NodeIdentity]] = field(default_factory=dict)

    def partitions(self) -> Iterator[tuple[Topic, int]]:
        """Iterate over all partitions that have leaders, which diskless topics do not."""
        for topic in self.topics.values():
            if topic.is_diskless:
                continue
            for partition in range(topic.partitions):
                yield topic, partition

    def servers(self, rack: str | None) -> tuple[int, ...]:
        """Return the nodes that serve diskless topics, only from a rack if it has any."""
        shared = {node for node, endpoint in self.brokers.items() if endpoint.is_shared}
        near = {node for node in shared if rack is not None and self.brokers[node].rack == rack}
        return tuple(sorted(near or shared))

    def leader(self, topic: Topic, partition: int) -> Leader | None:
        """Return the leader of a partition if it is alive."""
        found = self.leaders.get((topic.topic_id, partition))
        return found if found is not None and found.node_id in self.brokers else None

    @property
    def controller(self) -> int:
        """Node id of the broker that appoints leaders: the smallest live one, -1 for none."""
        return min(self.brokers, default=-1)

    def coordinator(self, group: str) -> int:
        """Return the node id of a group's coordinator, -1 for none."""
        # Every broker computes the same coordinator from the same view, so none is stored.
        nodes = sorted(self.brokers)
        return nodes[zlib.crc32(group.encode()) % len(nodes)] if nodes else -1

    def appointments(self) -> dict[tuple[str, int], Leader]:
        """Return a leader for each partition without one, the least loaded brokers first.

        Its epoch is one above the former leader's, its version is the key's current one.
        """
        if not self.brokers:
            return {}

        load: Counter[int] = Counter(dict.fromkeys(self.brokers, 0))
        vacant = []
        for topic, partition in self.partitions():
            leader = self.leader(topic, partition)
            if leader is None:
                vacant.append((topic.topic_id, partition))
            else:
                load[leader.node_id] += 1

        chosen = {}
        for place in vacant:
            # Ties are broken by node id, so that the choice does not depend on dict order.
            node_id = min(load, key=lambda one: (load[one], one))
            load[node_id] += 1
            # A new epoch fences a former leader that still writes to the streams.
            former = self.leaders.get(place)
            epoch = 0 if former is None else former.epoch + 1
            chosen[place] = Leader(node_id, epoch, 0 if former is None else former.version)

        return chosen

    def moves(self, most: int = 10) -> dict[tuple[str, int], Leader]:
        """Return next leaders for partitions of overloaded brokers, at most `most`.

        Return none while a partition has no leader. A broker that leads one more than others keeps
        it.
        """
        led: dict[int, list[tuple[str, int]]] = {node_id: [] for node_id in self.brokers}
        for topic, partition in self.partitions():
            leader = self.leader(topic, partition)
            if leader is None:
                return {}
            led[leader.node_id].append((topic.topic_id, partition))

        moved: dict[tuple[str, int], Leader] = {}
        while led and len(moved) < most:
            giver = max(led, key=lambda one: (len(led[one]), -one))
            taker = min(led, key=lambda one: (len(led[one]), one))
            # A difference of one can't be improved: moving would only swap the two brokers.
            if len(led[giver]) - len(led[taker]) < 2:
                break
            place = led[giver].pop()
            led[taker].append(place)
            former = self.leaders[place]
            moved[place] = Leader(taker, former.epoch + 1, former.version)

        return moved


async def read_view(
    keys: Keys, controllers: ControllerClient, own: NodeIdentity | None = None
) -> ClusterView:
    """Read the current view, as seen by the broker `own`.

    A broker that was silent for too long regards itself as alive until its process is replaced or
    released. It resumes with its partitions unless the view shows other leaders.
    """
    listed = await keys.list("broker/")
    topics = await keys.list("topic/")
    leaders = await keys.list("leader/")
    nodes = await controllers.describe_nodes()
    # The nodes are read after the keys, so a broker whose key was just written counts as alive.
    alive = _living(nodes, own)
    brokers = {int(node): Endpoint.of(value) for node, (value, _) in listed.items()}
    return ClusterView(
        {
            node: endpoint
            for node, endpoint in brokers.items()
            # The key of a replaced process names its old epoch, and must not make the new one
            # leader.
            if alive.get(node) == endpoint.node_epoch
        },
        {name: _topic_of(name, value, version) for name, (value, version) in topics.items()},
        {_place(key): Leader(v["leader"], v["epoch"], at) for key, (v, at) in leaders.items()},
        _recoveries(nodes),
    )


def _topic_of(name: str, value: Mapping[str, Any], version: int) -> Topic:
    streams = tuple((first, count) for first, count in value.get("streams", ()))
    return Topic(name, value["id"], value["partitions"], value["configs"], version, streams)


def _place(key: str) -> tuple[str, int]:
    topic_id, _, partition = key.partition("/")
    return topic_id, int(partition)


_GONE = ("fenced", "controlled_shutdown")


def _recoveries(nodes: Iterable[NodeDescription]) -> dict[int, list[NodeIdentity]]:
    """Return the nodes to recover, without nodes that have a log in the bucket."""
    found: dict[int, list[NodeIdentity]] = {}
    for node in nodes:
        if node.recovered_by is not None and node.wal_config in ("", NO_LOG):
            owed = NodeIdentity(node.node_id, node.node_epoch)
            found.setdefault(node.recovered_by, []).append(owed)
    return found


def _living(nodes: Iterable[NodeDescription], own: NodeIdentity | None) -> dict[int, int]:
    """Return the epochs of nodes that no leader regards as gone."""
    return {
        node.node_id: node.node_epoch
        for node in nodes
        if not (node.failover or node.departed)
        and (node.state not in _GONE or NodeIdentity(node.node_id, node.node_epoch) == own)
    }
