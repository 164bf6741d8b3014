"""Random protobuf messages of any type, and what a controller tells of its map meanwhile."""

from dataclasses import fields
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from streammeta.controller.rpc.services.routes import MAP_SERVICES, PLAIN, ROUTES
from streammeta.v1 import (
    common_pb2,
    nodes_pb2,
    nodes_pb2_grpc,
    objects_pb2,
    objects_pb2_grpc,
    streams_pb2,
    streams_pb2_grpc,
)
from tests.metadata.random_requests import RandomRequests
from tests.metadata.slow_model import Model
from tests.metadata.slow_model_state import Node, Object, State, Stream

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_IDS_MAX = 24
_NODES = (7, 1_000, 1_001)
_HUGE = 30_000


class RandomMessages:
    """Draws messages; `clusters` are the cluster ids they may name."""

    def __init__(self, rng: Random, clusters: tuple[str, ...]) -> None:
        self._rng = rng
        self._clusters = clusters

    def make(self, descriptor: Descriptor) -> Message:
        """Return a message of a type."""
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if field.is_repeated:
                self._fill(message, field)
            elif self._rng.random() < 0.93:
                self._set(message, field)
        if self._rng.random() < 0.85:
            _make_plausible(message, self._rng)
        return message

    def spoil(self, payload: bytes) -> bytes:
        """Return bytes that may no longer be a message."""
        rng = self._rng
        spoilt = bytearray(payload or rng.randbytes(9))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(spoilt))
            spoilt[at] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del spoilt[rng.randrange(len(spoilt)) :]
        return bytes(spoilt) if rng.random() < 0.8 else rng.randbytes(rng.randrange(200))

    def _set(self, message: Message, field: FieldDescriptor) -> None:
        if field.message_type is not None:
            getattr(message, field.name).CopyFrom(self.make(field.message_type))
        else:
            setattr(message, field.name, self._scalar(field))

    def _fill(self, message: Message, field: FieldDescriptor) -> None:
        rng, values = self._rng, getattr(message, field.name)
        if field.message_type is not None:
            for _ in range(rng.choice((0, 1, 1, 2, 3, 12))):
                values.append(self.make(field.message_type))
            if values and rng.random() < 0.1:
                values.append(values[0])
            return
        drawn = [self._scalar(field) for _ in range(rng.choice((0, 1, 2, 2, 2, 2, 3, 12)))]
        if field.cpp_type in _BITS and rng.random() < 0.6:
            drawn.sort()
        if drawn and rng.random() < 0.01:
            drawn = drawn[:1] * _HUGE
        values.extend(drawn)

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.name == "cluster_id":
            return rng.choice(self._clusters)
        if field.enum_type is not None:
            return rng.choice([value.number for value in field.enum_type.values])
        if field.cpp_type in _BITS:
            return self._integer(field)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.3
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 40)))
        assert field.cpp_type == FieldDescriptor.CPPTYPE_STRING, field.full_name
        return rng.choice(("", "a", "b", "c", "7", "-1", "\x00", "é" * 40, "x" * 70))

    def _integer(self, field: FieldDescriptor) -> int:
        rng, (low, high) = self._rng, _BITS[field.cpp_type]
        drawn = rng.random()
        if field.name in ("ttl_ms", "count") and drawn < 0.7:
            return 1_000 if field.name == "ttl_ms" else 3
        if "epoch" in field.name and drawn < 0.75:
            return 1
        if field.name == "node_id" and drawn < 0.85:
            return rng.choice(_NODES)
        if drawn < 0.15:
            return rng.choice((max(low, -1), max(low, -1), 0, high, high - 1, low, 10_001))
        return rng.randrange(_IDS_MAX)


def _make_plausible(message: Any, rng: Random) -> None:
    """Give columns one length, ids an order, and ranges an end above their start."""
    fields = {field.name: field for field in message.DESCRIPTOR.fields}
    columns = [name for name, field in fields.items() if field.is_repeated]
    if message.DESCRIPTOR.name.endswith("Columns"):
        rows = rng.choice((1, 1, 2, 3))
        for name in columns:
            values = getattr(message, name)
            may_be_empty = name in ("stream_epoch", "attributes")
            kept = [*values, *range(rows)][:rows]
            del values[:]
            if not (may_be_empty and rng.random() < 0.5):
                values.extend(sorted(set(kept)) if len(set(kept)) == rows else range(rows))
    if "start_offset" in fields and "end_offset" in fields:
        if fields["end_offset"].is_repeated:
            del message.end_offset[:]
            message.end_offset.extend(
                min(start + rng.randint(1, 5), 2**63 - 1) for start in message.start_offset
            )
        else:
            message.end_offset = min(message.start_offset + rng.randint(1, 5), 2**63 - 1)


_TIMEOUT_S = 10
_LOOK_EVERY = 3
"""Brokers know what is a little old, too."""
_OFFSETS_MAX = 10_000
"""Objects that hold more are left out: the draws look at every offset, and spoilt commits got
through that hold all there are."""
_METHODS = {
    method.name: GetMessageClass(method.input_type)
    for service in MAP_SERVICES
    for method in service.methods
}
_CALLS = {
    **{request: (name, _METHODS[name]) for name, (request, _) in ROUTES.items()},
    r.CommitStreamSetObject: ("CommitStreamSetObject", _METHODS["CommitStreamSetObject"]),
}


class SensibleCalls:
    """Draws calls that a correct broker could make, or almost, by what there is."""

    def __init__(self, channel: grpc.Channel, rng: Random) -> None:
        self._channel = channel
        self._requests = RandomRequests(rng)
        self._drawn = 0
        self._model = Model()

    def draw(self) -> tuple[str, Message]:
        """Return a method's name and a request."""
        if self._drawn % _LOOK_EVERY == 0:
            self._model = Model(state_of(self._channel))
        self._drawn += 1
        while True:
            request = self._requests.any(self._model)
            if isinstance(request, r.CommitUploads):
                uploads = message_of(request, objects_pb2.UploadColumns)
                batch = objects_pb2.CommitPipelineRequest(sequence=1, uploads=uploads)
                return "CommitPipeline", batch
            if isinstance(request, r.SetNodeLock):
                name = "LockNode" if request.locked else "UnlockNode"
                return name, message_of(request, _METHODS[name])
            if type(request) in _CALLS:
                name, kind = _CALLS[type(request)]
                return name, message_of(request, kind)


def message_of(request: Any, kind: type[Message]) -> Any:
    """Return a request of the map as the message that asks for it."""
    missing = {"request_id"} - {part.name for part in fields(request)}
    return PLAIN.writer(type(request), kind, *missing)(request)


def state_of(channel: grpc.Channel) -> State:
    """Return what the controller describes."""
    streams = streams_pb2_grpc.StreamServiceStub(channel)
    objects = objects_pb2_grpc.ObjectServiceStub(channel)
    nodes = nodes_pb2_grpc.NodeServiceStub(channel)
    check = objects_pb2.CheckObjectsRequest(object_ids=[0])
    state = State(next_object=objects.CheckObjects(check, timeout=_TIMEOUT_S).next_object_id)
    every_stream = streams_pb2.DescribeStreamsRequest()
    for stream in streams.DescribeStreams(every_stream, timeout=_TIMEOUT_S).streams:
        state.streams[stream.stream_id] = Stream(
            epoch=_known(stream, "epoch"),
            index=_known(stream, "range_index"),
            start=stream.start_offset,
            end=stream.end_offset,
            opened=stream.state == common_pb2.STREAM_STATE_OPENED,
            node=_known(stream, "node_id"),
        )
        for owed in stream.pending_uploads:
            key = (owed.node_id, owed.stream_id)
            state.pending[key] = (owed.start_offset, owed.end_offset)
    state.next_stream = max(state.streams, default=-1) + 1
    every_object = objects_pb2.DescribeObjectsRequest()
    for item in objects.DescribeObjects(every_object, timeout=_TIMEOUT_S).objects:
        described = _object(item)
        if all(end - start <= _OFFSETS_MAX for _, start, end in described.held):
            state.objects[item.object_id] = described
    for node in nodes.GetNodes(nodes_pb2.GetNodesRequest(), timeout=_TIMEOUT_S).nodes:
        state.nodes[node.node_id] = Node(
            epoch=node.node_epoch, failover=node.failover, departed=node.departed
        )
    return state


def _known(message: Message, field: str) -> int:
    return getattr(message, field) if message.HasField(field) else -1


def _object(one: objects_pb2.ObjectDescription) -> Object:
    columns = (one.ranges.stream_id, one.ranges.start_offset, one.ranges.end_offset)
    return Object(
        timestamp=max(one.deadline_ms, one.committed_at_ms, one.marked_at_ms),
        state=ObjectState(one.state),
        kind=ObjectKind(one.kind),
        attributes=one.attributes,
        node=_known(one, "node_id"),
        composite=_known(one, "composite_id"),
        held=list(zip(*columns, strict=True)),
    )
