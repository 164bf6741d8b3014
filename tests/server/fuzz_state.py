"""What a controller tells of its map, as the state that sensible random requests are made from."""

from random import Random
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.values import ObjectKind, ObjectState
from streammeta.v1 import (
    common_pb2,
    kv_pb2,
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
_MESSAGES: dict[type, tuple[str, type[Message]]] = {
    r.CreateStreams: ("CreateStreams", streams_pb2.CreateStreamsRequest),
    r.OpenStreams: ("OpenStreams", streams_pb2.OpenStreamsRequest),
    r.CloseStreams: ("CloseStreams", streams_pb2.CloseStreamsRequest),
    r.TrimStreams: ("TrimStreams", streams_pb2.TrimStreamsRequest),
    r.DeleteStreams: ("DeleteStreams", streams_pb2.DeleteStreamsRequest),
    r.GetOpeningStreams: ("GetOpeningStreams", streams_pb2.GetOpeningStreamsRequest),
    r.AbandonUploads: ("AbandonUploads", streams_pb2.AbandonUploadsRequest),
    r.PrepareObjects: ("PrepareObjects", objects_pb2.PrepareObjectsRequest),
    r.CommitStreamSetObject: ("CommitStreamSetObject", objects_pb2.CommitStreamSetObjectRequest),
    r.CommitStreamObject: ("CommitStreamObject", objects_pb2.CommitStreamObjectRequest),
    r.RegisterNode: ("RegisterNode", nodes_pb2.RegisterNodeRequest),
    r.UnregisterNode: ("UnregisterNode", nodes_pb2.UnregisterNodeRequest),
    r.GetNextNodeId: ("GetNextNodeId", nodes_pb2.GetNextNodeIdRequest),
    r.PutKVs: ("PutKVs", kv_pb2.PutKVsRequest),
    r.DeleteKVs: ("DeleteKVs", kv_pb2.DeleteKVsRequest),
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
                batch = objects_pb2.CommitPipelineRequest(sequence=1)
                fill(batch.uploads, request)
                return "CommitPipeline", batch
            if isinstance(request, r.SetNodeLock):
                if request.locked:
                    return "LockNode", nodes_pb2.LockNodeRequest(node_id=request.node_id)
                return "UnlockNode", nodes_pb2.UnlockNodeRequest(node_id=request.node_id)
            if type(request) in _MESSAGES:
                name, kind = _MESSAGES[type(request)]
                message = kind()
                fill(message, request)
                return name, message


def fill(message: Any, request: Any) -> None:
    """Set a message's fields to what the request's fields of the same names hold."""
    if isinstance(message, common_pb2.Tag):
        message.key, message.value = request
        return
    for field in message.DESCRIPTOR.fields:
        value = getattr(request, field.name, None)
        if value is None:
            continue
        if not field.is_repeated:
            if field.message_type is not None:
                fill(getattr(message, field.name), value)
            elif value != -1 or not field.has_presence:
                setattr(message, field.name, value)
            continue
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if field.message_type is None:
            getattr(message, field.name).extend(values)
        else:
            for item in values:
                fill(getattr(message, field.name).add(), item)


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
