"""Brokers of the Kafka shape over controllers and streams in memory, without connections."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import Topic
from streammeta.brokers.kafka.cluster.keys import Keys, topic_key
from streammeta.brokers.kafka.protocol.wire import Request, read_request
from streammeta.client import NodeIdentity
from streammeta.client.parts import BrokerSession
from streammeta.v1 import kv_pb2, nodes_pb2
from tests.kit.kafka_wire import request_bytes
from tests.kit.memory_keys import MemoryControllers
from tests.kit.memory_streams import MemoryStreams, StreamTable


class Client(MemoryStreams):
    """A client of a node: streams in memory, and the controllers that brokers share."""

    def __init__(self, controllers: MemoryControllers, node_id: int, table: StreamTable) -> None:
        super().__init__(table)
        self.controllers = controllers
        self.session = BrokerSession(cast(Any, controllers), NodeIdentity(node_id, 1), "")


class Cluster:
    """Brokers over one map, each registered and alive at epoch 1."""

    def __init__(self) -> None:
        self.controllers = MemoryControllers()
        self.keys = Keys(cast(Any, self.controllers), "c")
        self.table = StreamTable()

    async def join(self, node_id: int) -> Broker:
        """Return a broker that is in the view, and reads it when a test says so."""
        client = Client(self.controllers, node_id, self.table)
        self.controllers.nodes.append(node(node_id))
        await self.keys.put({f"broker/{node_id}": {"host": "h", "port": 1, "node_epoch": 1}})
        return Broker(cast(Any, client), self.keys, "c", node_id)

    async def make_topic(self, name: str = "t", partitions: int = 1) -> Topic:
        """Put the key of a topic."""
        topic = Topic(name, f"id-{name}", partitions, {})
        await self.keys.put({topic_key(name): topic.document()})
        return topic

    def put_before_next(self, key: str, value: bytes) -> None:
        """Let another broker put a key just before the next put of this one."""
        item = kv_pb2.KVToPut(namespace=self.keys.namespace, key=key, value=value, overwrite=True)

        def put() -> None:
            self.controllers._put_item(item)

        self.controllers.before["PutKVs"] = put

    def grow_before_next(self, topic: Topic) -> None:
        """Let another broker give a topic nine partitions just before the next put."""
        value = b'{"id":"%s","partitions":9,"configs":{}}' % topic.topic_id.encode()
        self.put_before_next(topic_key(topic.name), value)


def node(node_id: int, **said: Any) -> nodes_pb2.NodeDescription:
    """Return the description of an active node at epoch 1, but for what is said."""
    return nodes_pb2.NodeDescription(
        **{"node_id": node_id, "node_epoch": 1, "state": nodes_pb2.NODE_STATE_ACTIVE, **said}
    )


async def opened(broker: Broker) -> None:
    """Refresh, and wait for all partitions that are being opened."""
    await broker.refresh()
    if broker._opening:
        await asyncio.wait(tuple(broker._opening.values()))


async def lead_topic(name: str = "t", partitions: int = 1) -> tuple[Cluster, Topic, Broker]:
    """Return a cluster whose only broker leads every partition of its only topic."""
    cluster = Cluster()
    topic = await cluster.make_topic(name, partitions)
    broker = await cluster.join(1)
    await opened(broker)
    return cluster, topic, broker


def request_of(api: tuple[int, int], tree: Any) -> Request:
    """Return a request as a connection would read it."""
    return read_request(request_bytes(*api, tree))


async def asked(broker: Broker, call: Any, api: tuple[int, int], tree: Any) -> Any:
    """Return the answer of a call to a broker."""
    return await call(broker, request_of(api, tree))
