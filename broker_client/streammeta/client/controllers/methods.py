"""RPCs of the contract as typed values.

A method with a request id field gets the same id in all attempts of one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import Message

from streammeta.rpc.methods import METHODS
from streammeta.v1 import admin_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One unary RPC, with its facts from `streammeta.rpc.methods`."""

    request: type[RequestT]
    response: type[ResponseT]
    service: str = field(init=False)
    name: str = field(init=False)
    path: str = field(init=False)
    """The path of the RPC on the wire."""
    is_read: bool = field(init=False)
    """True if the RPC changes nothing."""
    leader_only: bool = field(init=False)
    """True if only the leader answers. Otherwise any controller answers from its own state."""

    def __post_init__(self) -> None:
        asked = self.request.DESCRIPTOR
        services = asked.file.services_by_name.values()
        rpc = next(
            method
            for service in services
            for method in service.methods
            if method.input_type is asked
        )
        facts = METHODS[rpc.full_name]
        object.__setattr__(self, "service", rpc.containing_service.name)
        object.__setattr__(self, "name", rpc.name)
        object.__setattr__(self, "is_read", facts.is_read)
        object.__setattr__(self, "leader_only", facts.leader_only)
        object.__setattr__(self, "path", f"/{rpc.containing_service.full_name}/{rpc.name}")


CREATE_STREAMS = Method(streams_pb2.CreateStreamsRequest, streams_pb2.CreateStreamsResponse)
OPEN_STREAMS = Method(streams_pb2.OpenStreamsRequest, streams_pb2.OpenStreamsResponse)
CLOSE_STREAMS = Method(streams_pb2.CloseStreamsRequest, streams_pb2.CloseStreamsResponse)
TRIM_STREAMS = Method(streams_pb2.TrimStreamsRequest, streams_pb2.TrimStreamsResponse)
DELETE_STREAMS = Method(streams_pb2.DeleteStreamsRequest, streams_pb2.DeleteStreamsResponse)
ISSUE_PRODUCER_IDS = Method(
    streams_pb2.IssueProducerIdsRequest, streams_pb2.IssueProducerIdsResponse
)
DESCRIBE_STREAMS = Method(streams_pb2.DescribeStreamsRequest, streams_pb2.DescribeStreamsResponse)
FIND_STREAMS = Method(streams_pb2.FindStreamsRequest, streams_pb2.FindStreamsResponse)
GET_OPENING_STREAMS = Method(
    streams_pb2.GetOpeningStreamsRequest, streams_pb2.GetOpeningStreamsResponse
)
PREPARE_OBJECTS = Method(objects_pb2.PrepareObjectsRequest, objects_pb2.PrepareObjectsResponse)
COMMIT_STREAM_SET_OBJECT = Method(
    objects_pb2.CommitStreamSetObjectRequest, objects_pb2.CommitStreamSetObjectResponse
)
COMMIT_STREAM_OBJECT = Method(
    objects_pb2.CommitStreamObjectRequest, objects_pb2.CommitStreamObjectResponse
)
GET_OBJECTS = Method(objects_pb2.GetObjectsRequest, objects_pb2.GetObjectsResponse)
DESCRIBE_OBJECTS = Method(objects_pb2.DescribeObjectsRequest, objects_pb2.DescribeObjectsResponse)
COMMIT_NAMED_OBJECTS = Method(
    objects_pb2.CommitNamedObjectsRequest, objects_pb2.CommitNamedObjectsResponse
)
DELETE_NAMED_OBJECTS = Method(
    objects_pb2.DeleteNamedObjectsRequest, objects_pb2.DeleteNamedObjectsResponse
)
DESCRIBE_NAMED_OBJECTS = Method(
    objects_pb2.DescribeNamedObjectsRequest, objects_pb2.DescribeNamedObjectsResponse
)
REGISTER_NODE = Method(nodes_pb2.RegisterNodeRequest, nodes_pb2.RegisterNodeResponse)
HEARTBEAT = Method(nodes_pb2.HeartbeatRequest, nodes_pb2.HeartbeatResponse)
GET_NODES = Method(nodes_pb2.GetNodesRequest, nodes_pb2.GetNodesResponse)
LIST_STREAM_SET_OBJECTS = Method(
    nodes_pb2.ListStreamSetObjectsRequest, nodes_pb2.ListStreamSetObjectsResponse
)
LIST_STREAM_OBJECTS = Method(
    objects_pb2.ListStreamObjectsRequest, objects_pb2.ListStreamObjectsResponse
)
PUT_KVS = Method(kv_pb2.PutKVsRequest, kv_pb2.PutKVsResponse)
GET_KVS = Method(kv_pb2.GetKVsRequest, kv_pb2.GetKVsResponse)
DELETE_KVS = Method(kv_pb2.DeleteKVsRequest, kv_pb2.DeleteKVsResponse)
LIST_KVS = Method(kv_pb2.ListKVsRequest, kv_pb2.ListKVsResponse)
DESCRIBE_CLUSTER = Method(admin_pb2.DescribeClusterRequest, admin_pb2.DescribeClusterResponse)
