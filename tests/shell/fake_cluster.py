"""An in-process gRPC server that answers the shell's questions from dicts, page by page.

It counts calls per method, so that tests can tell how much a command asked for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from streammeta.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    kv_pb2,
    kv_pb2_grpc,
    nodes_pb2,
    nodes_pb2_grpc,
    objects_pb2,
    objects_pb2_grpc,
    streams_pb2,
    streams_pb2_grpc,
)
from tests.kit.grpc_servers import abort, served_by_threads, unimplemented

Context = Any  # grpc.ServicerContext; its stubs disagree between sync and async
Item = TypeVar("Item")


_SERVICES = (admin_pb2_grpc, kv_pb2_grpc, nodes_pb2_grpc, objects_pb2_grpc, streams_pb2_grpc)


class FakeCluster(unimplemented(*_SERVICES)):  # type: ignore[misc]
    """The map that a fake controller serves; tests fill its dicts."""

    def __init__(self) -> None:
        self.streams: dict[int, streams_pb2.StreamDescription] = {}
        self.objects: dict[int, objects_pb2.ObjectDescription] = {}
        self.nodes: dict[int, nodes_pb2.NodeDescription] = {}
        self.keys: dict[tuple[str, str], kv_pb2.KVEntry] = {}
        self.calls: Counter[str] = Counter()
        self.leader_endpoint: str | None = None  # not None: this controller does not lead
        self.failure: tuple[grpc.StatusCode, str, str] | None = None
        self.page_size = 1000  # at most

    def put(self, namespace: str, key: str, value: bytes) -> None:
        """Have a key."""
        self.keys[namespace, key] = kv_pb2.KVEntry(key=key, value=value, version=9)

    def enter(self, method: str, context: Context) -> None:
        """Count the call; end it if this controller can't answer."""
        self.calls[method] += 1
        if self.failure is not None:
            abort(context, *self.failure, {})
        if self.leader_endpoint is not None:
            metadata = {"leader_endpoint": self.leader_endpoint, "leader_id": "1", "epoch": "1"}
            abort(context, grpc.StatusCode.UNAVAILABLE, "NOT_LEADER", "does not lead", metadata)

    def page_of(
        self, items: Sequence[Item], request: common_pb2.PageRequest
    ) -> tuple[Sequence[Item], str]:
        """The page asked for and the token of the next one; a token is a position."""
        start = int(request.page_token or 0)
        end = start + min(request.page_size or self.page_size, self.page_size)
        return items[start:end], str(end) if end < len(items) else ""

    def DescribeStreams(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("DescribeStreams", context)
        streams = self.streams
        ids = set(request.stream_ids) & set(streams) if request.stream_ids else set(streams)
        described = [streams[stream_id] for stream_id in sorted(ids)]
        page, token = self.page_of(described, request.page)
        return streams_pb2.DescribeStreamsResponse(
            streams=page, next_page_token=token, total=len(streams)
        )

    def FindStreams(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("FindStreams", context)
        wanted = {(tag.key, tag.value) for tag in request.tags}
        found = [
            stream
            for _, stream in sorted(self.streams.items())
            if wanted <= {(tag.key, tag.value) for tag in stream.tags}
        ]
        page, token = self.page_of(found, request.page)
        return streams_pb2.FindStreamsResponse(streams=page, next_page_token=token)

    def DescribeObjects(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("DescribeObjects", context)
        objects = self.objects
        ids = set(request.object_ids) & set(objects) if request.object_ids else set(objects)
        page, token = self.page_of([objects[object_id] for object_id in sorted(ids)], request.page)
        return objects_pb2.DescribeObjectsResponse(
            objects=page, next_page_token=token, total=len(objects)
        )

    def GetObjects(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("GetObjects", context)
        return objects_pb2.GetObjectsResponse(
            results=[self._slices_of(query.stream_id) for query in request.queries]
        )

    def _slices_of(self, stream_id: int) -> objects_pb2.ObjectList:
        slices = [
            objects_pb2.ObjectSlice(
                object_id=described.object_id,
                kind=described.kind,
                start_offset=start,
                end_offset=end,
                object_size=described.object_size,
            )
            for described in self.objects.values()
            for stream, start, end in zip(
                described.ranges.stream_id,
                described.ranges.start_offset,
                described.ranges.end_offset,
                strict=True,
            )
            if stream == stream_id
        ]
        return objects_pb2.ObjectList(objects=sorted(slices, key=lambda part: part.start_offset))

    def GetNodes(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("GetNodes", context)
        nodes = self.nodes
        ids = set(request.node_ids) & set(nodes) if request.node_ids else set(nodes)
        page, token = self.page_of([nodes[node_id] for node_id in sorted(ids)], request.page)
        answer = nodes_pb2.GetNodesResponse(nodes=page, next_page_token=token)
        for node in answer.nodes:
            node.ClearField("stream_set_objects")
        return answer

    def ListStreamSetObjects(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("ListStreamSetObjects", context)
        held = self.nodes[request.node_id].stream_set_objects
        page, token = self.page_of(held, request.page)
        return nodes_pb2.ListStreamSetObjectsResponse(
            objects=page, next_page_token=token, total=len(held)
        )

    def ListKVs(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("ListKVs", context)
        keys = self.keys
        if request.namespaces:
            names, token = self.page_of(sorted({name for name, _ in keys}), request.page)
            return kv_pb2.ListKVsResponse(namespace_names=names, next_page_token=token)
        found = [
            entry
            for (namespace, key), entry in sorted(keys.items())
            if namespace == request.namespace and key.startswith(request.prefix)
        ]
        page, token = self.page_of(found, request.page)
        return kv_pb2.ListKVsResponse(entries=page, next_page_token=token)

    def DescribeCluster(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.enter("DescribeCluster", context)
        return admin_pb2.DescribeClusterResponse(
            cluster_id="test",
            leader_id=1,
            leader_endpoint="127.0.0.1:9091",
            epoch=4,
            high_watermark=120,
            answered_by=1,
            controllers=[admin_pb2.Controller(node_id=1, endpoint="127.0.0.1:9091", voter=True)],
            size=admin_pb2.MapSize(streams=len(self.streams)),
            object_namespace="_streammeta_test",
        )


@contextmanager
def serve(cluster: FakeCluster) -> Iterator[str]:
    """Serve the cluster on a loopback port until the block ends; gives `host:port`."""
    with served_by_threads(cluster, *_SERVICES) as endpoint:
        yield endpoint


def sample_cluster() -> FakeCluster:
    """Node 1 holds two set objects with parts of stream 3, and keys in two namespaces."""
    cluster = FakeCluster()
    cluster.streams[3] = streams_pb2.StreamDescription(
        stream_id=3,
        epoch=2,
        range_index=1,
        start_offset=0,
        end_offset=6,
        state=common_pb2.STREAM_STATE_OPENED,
        node_id=1,
        tags=[common_pb2.Tag(key="topic", value="automq-test")],
        ranges=[
            streams_pb2.StreamRange(range_index=0, epoch=1, end_offset=4, node_id=1),
            streams_pb2.StreamRange(
                range_index=1, epoch=2, start_offset=4, end_offset=6, node_id=1
            ),
        ],
    )
    cluster.objects[68] = _set_object(68, 4096, [(3, 0, 4)])
    cluster.objects[78] = _set_object(78, 5242306, [(3, 4, 6), (4, 50390, 55430), (5, 8376, 9384)])
    cluster.nodes[1] = nodes_pb2.NodeDescription(
        node_id=1,
        node_epoch=1712451139190,
        state=nodes_pb2.NODE_STATE_ACTIVE,
        has_opening_streams=True,
        stream_set_object_count=2,
        stream_set_objects=[
            nodes_pb2.StreamSetObject(object_id=object_id, order_id=object_id, data_time_ms=0)
            for object_id in (68, 78)
        ],
    )
    for namespace, key, value in [
        ("", "__automq_node/1", b"\x00\xff"),
        ("topics", "automq-test", b"3"),
        ("topics", "automq-test-2", b"7"),
    ]:
        cluster.put(namespace, key, value)
    return cluster


def _set_object(
    object_id: int, size: int, ranges: list[tuple[int, int, int]]
) -> objects_pb2.ObjectDescription:
    streams, starts, ends = zip(*ranges, strict=True)
    return objects_pb2.ObjectDescription(
        object_id=object_id,
        state=common_pb2.OBJECT_STATE_COMMITTED,
        kind=common_pb2.OBJECT_KIND_STREAM_SET,
        object_size=size,
        committed_at_ms=1712451146293,
        node_id=1,
        ranges=objects_pb2.RangeColumns(stream_id=streams, start_offset=starts, end_offset=ends),
    )
