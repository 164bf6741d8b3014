"""What a controller tells of its map, as the state that sensible random requests are made from."""

from dataclasses import fields
from random import Random
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.values import ObjectKind, ObjectState
from streammeta.controller.rpc.map_routes import MAP_SERVICES, PLAIN, ROUTES
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
    for one in streams.DescribeStreams(every_stream, timeout=_TIMEOUT_S).streams:
        state.streams[one.stream_id] = Stream(
            epoch=_known(one, "epoch"),
            index=_known(one, "range_index"),
            start=one.start_offset,
            end=one.end_offset,
            opened=one.state == common_pb2.STREAM_STATE_OPENED,
            node=_known(one, "node_id"),
        )
        for owed in one.pending_uploads:
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
