"""The RPCs that the client calls, as typed values.

Owns their paths and message types, and which of them only the leader answers. A method that names
a request id field gets the same id in all attempts of one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from streammeta.v1 import admin_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One unary RPC. `leader_only` is False for what any controller answers from what it knows."""

    service: str
    name: str
    request: type[RequestT]
    response: type[ResponseT]
    leader_only: bool = True

    @property
    def path(self) -> str:
        """The path of the RPC as gRPC spells it."""
        return f"/streammeta.v1.{self.service}/{self.name}"


CREATE_STREAMS = Method(
    "StreamService",
    "CreateStreams",
    streams_pb2.CreateStreamsRequest,
    streams_pb2.CreateStreamsResponse,
)
OPEN_STREAMS = Method(
    "StreamService",
    "OpenStreams",
    streams_pb2.OpenStreamsRequest,
    streams_pb2.OpenStreamsResponse,
)
CLOSE_STREAMS = Method(
    "StreamService",
    "CloseStreams",
    streams_pb2.CloseStreamsRequest,
    streams_pb2.CloseStreamsResponse,
)
TRIM_STREAMS = Method(
    "StreamService",
    "TrimStreams",
    streams_pb2.TrimStreamsRequest,
    streams_pb2.TrimStreamsResponse,
)
DELETE_STREAMS = Method(
    "StreamService",
    "DeleteStreams",
    streams_pb2.DeleteStreamsRequest,
    streams_pb2.DeleteStreamsResponse,
)
DESCRIBE_STREAMS = Method(
    "StreamService",
    "DescribeStreams",
    streams_pb2.DescribeStreamsRequest,
    streams_pb2.DescribeStreamsResponse,
)
GET_OPENING_STREAMS = Method(
    "StreamService",
    "GetOpeningStreams",
    streams_pb2.GetOpeningStreamsRequest,
    streams_pb2.GetOpeningStreamsResponse,
)
PREPARE_OBJECTS = Method(
    "ObjectService",
    "PrepareObjects",
    objects_pb2.PrepareObjectsRequest,
    objects_pb2.PrepareObjectsResponse,
)
COMMIT_STREAM_SET_OBJECT = Method(
    "ObjectService",
    "CommitStreamSetObject",
    objects_pb2.CommitStreamSetObjectRequest,
    objects_pb2.CommitStreamSetObjectResponse,
)
COMMIT_STREAM_OBJECT = Method(
    "ObjectService",
    "CommitStreamObject",
    objects_pb2.CommitStreamObjectRequest,
    objects_pb2.CommitStreamObjectResponse,
)
GET_OBJECTS = Method(
    "ObjectService",
    "GetObjects",
    objects_pb2.GetObjectsRequest,
    objects_pb2.GetObjectsResponse,
)
DESCRIBE_OBJECTS = Method(
    "ObjectService",
    "DescribeObjects",
    objects_pb2.DescribeObjectsRequest,
    objects_pb2.DescribeObjectsResponse,
)
REGISTER_NODE = Method(
    "NodeService",
    "RegisterNode",
    nodes_pb2.RegisterNodeRequest,
    nodes_pb2.RegisterNodeResponse,
)
HEARTBEAT = Method(
    "NodeService",
    "Heartbeat",
    nodes_pb2.HeartbeatRequest,
    nodes_pb2.HeartbeatResponse,
)
GET_NODES = Method(
    "NodeService",
    "GetNodes",
    nodes_pb2.GetNodesRequest,
    nodes_pb2.GetNodesResponse,
)
LIST_STREAM_SET_OBJECTS = Method(
    "NodeService",
    "ListStreamSetObjects",
    nodes_pb2.ListStreamSetObjectsRequest,
    nodes_pb2.ListStreamSetObjectsResponse,
)
PUT_KVS = Method("KVService", "PutKVs", kv_pb2.PutKVsRequest, kv_pb2.PutKVsResponse)
GET_KVS = Method("KVService", "GetKVs", kv_pb2.GetKVsRequest, kv_pb2.GetKVsResponse)
DESCRIBE_CLUSTER = Method(
    "AdminService",
    "DescribeCluster",
    admin_pb2.DescribeClusterRequest,
    admin_pb2.DescribeClusterResponse,
    leader_only=False,
)
