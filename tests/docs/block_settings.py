"""Names that fragments of Python in the documentation use without making them, by setting."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import streammeta.client.errors
import streammeta.client.parts
from streammeta.brokers.partition import opening
from streammeta.brokers.pulsar.automatic_offload import AutomaticOffload
from streammeta.brokers.pulsar.blobs.named_blobs import NamedBlobs
from streammeta.brokers.pulsar.cluster_lists import ClusterListStore
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.ledger_list import ManagedLedger, OffloadPolicy
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.brokers.pulsar.policies import PolicyStore, TopicPolicies
from streammeta.brokers.pulsar.segments import Segments
from streammeta.brokers.pulsar.streaming import OfferResult, StreamingSegment
from streammeta.brokers.rocketmq.cluster.cluster_store import QueueStore
from streammeta.client import NamedObjects, OwnerKey, StreamClient
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import kv_pb2
from tests.brokers.rocketmq_messages import LocalMessages
from tests.conformance.pulsar_ledgers import Sources
from tests.conformance.pulsar_offload import MemoryLedger
from tests.kit.kafka_batches import Rec, make_batch

Names = dict[str, Any]
Setting = Callable[[list[str], str], AbstractAsyncContextManager[Names]]

NODE_IDS = itertools.count(2001)
"""Nodes of fragments: each runs as a broker of its own."""

_TOPIC = "AAAAAAAAAAAAAAAAAAAAAA"


@contextlib.asynccontextmanager
async def _nothing(_endpoints: list[str], _bucket: str) -> AsyncIterator[Names]:
    """No names: a block that is complete by itself, and that may start the cluster."""
    yield {}


@contextlib.asynccontextmanager
async def _client(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    """All that `streammeta.client` exports, and a record."""
    modules = (streammeta.client, streammeta.client.errors, streammeta.client.parts)
    exported = {name: value for module in modules for name, value in vars(module).items()}
    yield {**exported, "endpoints": endpoints, "bucket": bucket, "payload": b"a record"}


@contextlib.asynccontextmanager
async def _partition(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    async with _client(endpoints, bucket) as names:
        functions = ("create_meta_stream", "open_log", "partition_tags")
        names |= {name: getattr(opening, name) for name in functions}
        yield names | {"topic_id": _TOPIC, "epoch": 1, "batch": make_batch([Rec(1, b"k", b"v")])}


@contextlib.asynccontextmanager
async def _queue(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    async with _client(endpoints, bucket) as names:
        yield names | {"QueueStore": QueueStore, "local_queue": LocalMessages("orders", 0, 40)}


@contextlib.asynccontextmanager
async def _queue_store(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    async with await StreamClient.open(endpoints, bucket, node_id=next(NODE_IDS)) as client:
        store = await QueueStore.open(client, "cluster", f"broker-{client.session.node.node_id}")
        yield {"store": store}
        await store.close()


@contextlib.asynccontextmanager
async def _opened(endpoints: list[str], bucket: str) -> AsyncIterator[tuple[StreamClient, Names]]:
    """A client and its parts."""
    async with (
        _client(endpoints, bucket) as names,
        await StreamClient.open(endpoints, bucket, node_id=next(NODE_IDS)) as client,
    ):
        names |= {"session": client.session, "store": open_object_store(bucket)}
        yield client, names


@contextlib.asynccontextmanager
async def _ledgers(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    async with _opened(endpoints, bucket) as (client, names):
        sources = Sources({number: MemoryLedger(number, [b"a" * 50] * 9) for number in (1, 2)})
        yield names | {
            "client": client.controllers,
            "sources": sources,
            "now_ms": lambda: 0,
            "ClusterListStore": ClusterListStore,
            "ManagedLedger": ManagedLedger,
            "NamedBlobs": NamedBlobs,
            "Offloader": Offloader,
            "OffloadPolicy": OffloadPolicy,
        }


@contextlib.asynccontextmanager
async def _policies(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    """A managed ledger whose only ledger is open."""
    async with _opened(endpoints, bucket) as (client, names):
        key = OwnerKey("tenant/ns/topic", "ledgers")
        blobs = NamedBlobs(
            NamedObjects(client.session, names["store"]),
            names["store"],
            client.session.namespace,
            key,
            "tenant/ns/topic/",
        )
        managed = ManagedLedger(
            "tenant/ns/topic",
            ClusterListStore(client.controllers, key),
            Sources({1: MemoryLedger(1, [b"a" * 10] * 3)}),
            Offloader(blobs),
            lambda: 0,
        )
        await managed.open()
        await managed.roll(0, 0, 1)
        yield names | {
            "client": client,
            "managed": managed,
            "entries": 3,
            "size": 30,
            "next_ledger": 2,
            "AutomaticOffload": AutomaticOffload,
            "PolicyStore": PolicyStore,
            "TopicPolicies": TopicPolicies,
        }


@contextlib.asynccontextmanager
async def _segments(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    async with _opened(endpoints, bucket) as (client, names):
        named = NamedObjects(client.session, names["store"])
        key = OwnerKey("persistent/topic", "segments")
        item = kv_pb2.KVToPut(key=key.key, namespace=key.namespace, value=b"an owner")
        await client.controllers.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
        blobs = NamedBlobs(named, names["store"], client.session.namespace, key, "segments/")
        yield names | {
            "blobs": blobs,
            "uuid": "0c1f4d5e-8a8c-4f0e-9a5a-1f0d6c1b2a3f",
            "ledger_id": 1,
            "entry_id": 0,
            "entry": Entry(0, b"an entry"),
            "OfferResult": OfferResult,
            "Segments": Segments,
            "StreamingSegment": StreamingSegment,
        }


@contextlib.asynccontextmanager
async def _compaction(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    async with _opened(endpoints, bucket) as (client, names):
        names |= {"client": client.controllers}
        yield names
        await names["heartbeat"].close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if "Compactor.run" in repr(task.get_coro()):  # they run until they are cancelled
                task.cancel()


@contextlib.asynccontextmanager
async def _uploads(endpoints: list[str], bucket: str) -> AsyncIterator[Names]:
    """Node 1007 has uploaded two objects."""
    async with await StreamClient.open(endpoints, bucket, node_id=1007) as client:
        (stream_id,) = await client.create_streams([{"topic": "example"}])
        (await client.open_streams([stream_id])).require_all()
        for payload in (b"first", b"second"):
            await client.append(stream_id, payload)
        yield {}


SETTINGS: Mapping[str, Setting] = {
    "": _nothing,
    "client": _client,
    "partition": _partition,
    "queue": _queue,
    "queue store": _queue_store,
    "ledgers": _ledgers,
    "policies": _policies,
    "segments": _segments,
    "compaction": _compaction,
    "uploads": _uploads,
}
