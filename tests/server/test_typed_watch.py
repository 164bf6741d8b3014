"""Typed changes of a watch are enough to mirror the metadata; a watch can begin now."""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any, get_args

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import ObjectState, StreamState, column
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import decode_records
from streammeta.controller.rpc.watch import service
from streammeta.controller.rpc.watch.typed_changes import CHANGES, INTERNAL, encode_changes
from streammeta.rpc.connections import client_channel
from streammeta.v1 import changes_pb2, nodes_pb2
from streammeta.v1 import metadata_pb2 as pb
from tests.kit.seeds import seeds
from tests.metadata.map_pair import Pair
from tests.metadata.random_requests import RandomRequests
from tests.server.test_server_watch import SERVICE, Node, kv, status_of, trimmed, watching

STEPS = 400
MAX_MESSAGE_BYTES = 4 << 20


@pytest_asyncio.fixture
async def node() -> Any:
    async with Node() as started:
        yield started


def test_every_record_has_a_change_or_is_internal() -> None:
    known = {*CHANGES, rec.KVsPut}
    assert known | INTERNAL == set(get_args(rec.Record))
    assert not known & INTERNAL
    names = {name for name, _ in CHANGES.values()} | {"keys_put"}
    kinds = changes_pb2.MetadataChange.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert names == {field.name for field in kinds}


class Mirror:
    """State that a caller keeps by typed changes alone."""

    def __init__(self) -> None:
        self.streams: dict[int, dict[str, Any]] = {}
        self.objects: dict[int, ObjectState] = {}
        self.sizes: dict[int, int] = {}
        self.nodes: dict[int, tuple[int, bool]] = {}
        self.keys: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.level = 1

    def follow(self, change: changes_pb2.MetadataChange) -> None:
        name = change.WhichOneof("kind")
        assert name is not None
        handle = getattr(self, f"_on_{name}", None)
        if handle is not None:
            handle(getattr(change, name))

    def _on_streams_created(self, content: Any) -> None:
        for stream in content.streams:
            self.streams[stream.stream_id] = {
                "node": -1,
                "epoch": 0 if stream.shared else -1,
                "opened": False,
                "shared": stream.shared,
                "start": 0,
                "end": 0,
                "tags": {tag.key: tag.value for tag in stream.tags},
            }

    def _on_streams_opened(self, content: Any) -> None:
        for stream in content.streams:
            state = self.streams[stream.stream_id]
            state |= {"node": content.node_id, "epoch": stream.epoch, "opened": True}
            if not state["tags"]:
                state["tags"] = {tag.key: tag.value for tag in stream.tags}

    def _on_streams_reopened(self, content: Any) -> None:
        for stream_id in content.stream_ids:
            self.streams[stream_id]["opened"] = True

    def _on_streams_closed(self, content: Any) -> None:
        for stream in content.streams:
            state = self.streams[stream.stream_id]
            state["opened"] = False
            if stream.HasField("end_offset"):
                state["end"] = stream.end_offset

    def _on_streams_trimmed(self, content: Any) -> None:
        for stream in content.streams:
            state = self.streams[stream.stream_id]
            state["start"] = stream.start_offset
            state["end"] = max(state["end"], stream.start_offset)

    def _on_streams_deleted(self, content: Any) -> None:
        for stream_id in content.stream_ids:
            del self.streams[stream_id]

    def _on_objects_prepared(self, content: Any) -> None:
        first = content.first_object_id
        for object_id in range(first, first + content.count):
            self.objects[object_id] = ObjectState.PREPARED

    def _on_stream_set_objects_committed(self, content: Any) -> None:
        for object_ in content.objects:
            self._commit(object_)
            ranges = object_.ranges
            assert len(ranges.stream_id) == object_.range_count
            for stream_id, end in zip(ranges.stream_id, ranges.end_offset, strict=True):
                self._extend(stream_id, end)

    def _on_stream_objects_committed(self, content: Any) -> None:
        for object_ in content.objects:
            self._commit(object_)
            self._extend(object_.stream_id, object_.end_offset)

    def _on_named_objects_committed(self, content: Any) -> None:
        for object_ in content.objects:
            self._commit(object_)

    def _commit(self, object_: Any) -> None:
        self.objects[object_.object_id] = ObjectState.COMMITTED
        self.sizes[object_.object_id] = object_.object_size

    def _extend(self, stream_id: int, end: int) -> None:
        if stream_id in self.streams:
            state = self.streams[stream_id]
            state["end"] = max(state["end"], end)

    def _on_objects_destroyed(self, content: Any) -> None:
        self._set(content.object_ids, ObjectState.MARK_DESTROYED)

    def _on_objects_linked(self, content: Any) -> None:
        self._set(content.object_ids, ObjectState.LINKED)

    def _on_objects_removed(self, content: Any) -> None:
        self._set(content.object_ids, ObjectState.REMOVED)

    def _set(self, object_ids: Any, state: ObjectState) -> None:
        self.objects |= dict.fromkeys(object_ids, state)

    def _on_node_registered(self, content: Any) -> None:
        epoch, failover = self.nodes.get(content.node_id, (-1, False))
        is_same_process = epoch == content.node_epoch
        self.nodes[content.node_id] = (content.node_epoch, failover and is_same_process)

    def _on_node_epoch_changed(self, content: Any) -> None:
        self.nodes[content.node_id] = (content.node_epoch, content.failover)

    def _on_keys_put(self, content: Any) -> None:
        for key in content.keys:
            self.keys[key.namespace, key.key] = (key.value, key.version)

    def _on_keys_deleted(self, content: Any) -> None:
        for key in content.keys:
            del self.keys[key.namespace, key.key]

    def _on_feature_level_changed(self, content: Any) -> None:
        self.level = content.level


@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_typed_changes_mirror_the_metadata(seed: int) -> None:
    pair, requests, mirror = Pair(), RandomRequests(Random(seed)), Mirror()
    pair.begin(requests)
    followed = 0
    for _ in range(STEPS):
        pair.now += 50
        pair.write(requests.any(pair.model))
        for offset, payload in pair.log[followed:]:
            for change in encode_changes(offset, decode_records(payload)):
                assert change.offset == offset
                mirror.follow(change)
        followed = len(pair.log)
        compare_streams(mirror, pair)
    compare_others(mirror, pair)


def compare_streams(mirror: Mirror, pair: Pair) -> None:
    streams: Any = pair.map.query(r.DescribeStreams())
    assert mirror.streams == {
        stream.stream_id: {
            "node": stream.node_id,
            "epoch": stream.epoch,
            "opened": stream.state is StreamState.OPENED,
            "shared": stream.state is StreamState.SHARED,
            "start": stream.start_offset,
            "end": stream.end_offset,
            "tags": dict(stream.tags),
        }
        for stream in streams.streams
    }


def compare_others(mirror: Mirror, pair: Pair) -> None:
    states: Any = pair.map.query(r.CheckObjects(object_ids=tuple(mirror.objects)))
    assert list(mirror.objects.values()) == list(states.states)
    objects: Any = pair.map.query(r.DescribeObjects())
    for object_ in objects.objects:
        if object_.state is ObjectState.COMMITTED:
            assert mirror.sizes[object_.object_id] == object_.object_size

    nodes: Any = pair.map.query(r.GetNodes())
    present = {node.node_id: node for node in nodes.nodes if not node.departed}
    for node_id, described in present.items():
        assert mirror.nodes[node_id] == (described.node_epoch, described.failover)
    assert mirror.level == pair.map.feature_level

    keys = dict(_all_keys(pair))
    assert mirror.keys == keys


def _all_keys(pair: Pair) -> Iterator[tuple[tuple[str, str], tuple[bytes, int]]]:
    names: Any = pair.map.query(r.ListKVs(namespaces=True))
    for namespace in names.namespace_names:
        listed: Any = pair.map.query(r.ListKVs(namespace=namespace))
        for entry in listed.entries:
            yield (namespace, entry.key), (entry.value, entry.version)


async def next_changes(call: Any) -> Any:
    while True:
        response: Any = await call.read()
        assert response is not grpc.aio.EOF
        assert not response.records
        if response.changes:
            return response


async def test_a_typed_watch_has_changes_instead_of_records(node: Node) -> None:
    node.commit(kv("a"), trimmed(1, 2, 3))
    async with watching(node, typed=True) as call:
        first, second = await next_changes(call), await next_changes(call)
        (put,) = first.changes
        key = changes_pb2.StoredKey(key="a", value=bytes(1), version=1)
        assert (first.offset, put.keys_put.keys[:]) == (0, [key])
        (change,) = second.changes
        assert [stream.stream_id for stream in change.streams_trimmed.streams] == [1, 2, 3]
        assert (second.offset, change.offset) == (1, 1)

        async with watching(node) as plain:
            assert (await plain.read()).records, "the same selection in the form of records"


async def test_filters_apply_to_typed_changes(node: Node) -> None:
    node.commit(kv("a"), trimmed(1, 2, 3), trimmed(9), trimmed(3))
    async with watching(node, typed=True, may_combine=True, stream_ids=[3, 1]) as call:
        response = await next_changes(call)
        found = [
            (change.offset, [stream.stream_id for stream in change.streams_trimmed.streams])
            for change in response.changes
        ]
        assert (response.offset, found) == (3, [(1, [1, 3]), (3, [3])])


async def test_a_watch_from_now_tells_its_position_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PROGRESS_S", 1_000.0)
    node.commit(kv("a"), kv("b"))
    async with watching(node, typed=True, from_now=True) as call:
        position = await asyncio.wait_for(call.read(), 10)
        assert (position.offset, position.high_watermark, len(position.changes)) == (1, 2, 0)
        node.commit(kv("c"))
        response = await next_changes(call)
        assert (response.offset, response.changes[0].keys_put.keys[0].key) == (2, "c")


async def test_a_watch_from_now_survives_a_full_ring(node: Node) -> None:
    node.commit(*(kv(f"{number}", size=100_000) for number in range(20)))
    async with watching(node, from_now=True) as call:
        assert not (await call.read()).snapshot_required
        node.commit(kv("z"))
        assert (await call.read()).offset == 20


async def test_now_and_an_offset_exclude_each_other(node: Node) -> None:
    async with watching(node, from_now=True, from_offset=1) as call:
        assert await status_of(call) == (
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
            {"field": "from_offset"},
        )


async def test_the_typed_form_of_the_largest_entry_fits_a_message() -> None:
    node = Node()
    node.changes._ring_bytes = 64 << 20
    async with node:
        # The most keys of a request, with values that fill a log entry.
        count, size = 10_000, 360
        keys = tuple(f"{number:04}" for number in range(count))
        node.commit(rec.KVsPut(namespaces=("",) * count, keys=keys, values=(bytes(size),) * count))
        async with client_channel(node.endpoint) as channel:
            call: Any = channel.unary_stream(
                f"/{SERVICE}/Watch",
                request_serializer=pb.WatchRequest.SerializeToString,
                response_deserializer=pb.WatchResponse.FromString,
            )(pb.WatchRequest(typed=True))
            response = await call.read()
            assert len(response.changes[0].keys_put.keys) == count
            assert response.ByteSize() < MAX_MESSAGE_BYTES
            call.cancel()


def test_a_change_of_a_node_has_no_address_of_its_log() -> None:
    registered = rec.NodeRegistered(node_id=1, node_epoch=2, wal_config="s3://secret@place")
    (change,) = encode_changes(5, [registered])
    assert b"secret" not in change.SerializeToString()


def test_unknown_facts_are_absent() -> None:
    committed = rec.StreamSetObjectsCommitted(
        node_id=1,
        committed_at_ms=5,
        data_time_ms=5,
        object_id=column([1, 2]),
        order_id=column([1, 2]),
        object_size=column([3, 4]),
        attributes=column([0, 0]),
        range_count=column([1, 1]),
        ranges=rec.StreamSetObjectRanges(
            stream_id=column([0, 0]), start_offset=column([0, 1]), end_offset=column([1, 2])
        ),
        crc32c=column([-1, 7]),
        content_digest=column([1, 2]),
    )
    (change,) = encode_changes(0, [committed])
    first, second = change.stream_set_objects_committed.objects
    assert isinstance(first, nodes_pb2.StreamSetObject)
    assert not first.HasField("crc32c")
    assert not first.HasField("min_timestamp_ms")
    assert (second.crc32c, list(second.ranges.start_offset)) == (7, [1])
