"""Services of the contract: the request of the map behind each RPC, and the calls that are none.

Translates, submits and waits; decides nothing. CommitPipeline, Watch and the quorum's service have
modules of their own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from streammeta.controller.config import ConfigError, ControllerConfig, check_controller_id
from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import NodeId
from streammeta.controller.lifecycle.bucket_claim import BucketClaims
from streammeta.controller.lifecycle.failover import Heartbeats
from streammeta.controller.metadata.requests import HoldDeletions
from streammeta.controller.rpc import (
    convert_kv,
    convert_nodes,
    convert_objects,
    convert_streams,
    wire_columns,
)
from streammeta.controller.rpc.convert import error_out, node_identity, optional_out
from streammeta.controller.rpc.request_guard import (
    Context,
    StreamHandler,
    UnaryHandler,
    abort,
    guarded,
    longest_wait_ms,
    parsed,
    quote_offset,
    read_after,
)
from streammeta.controller.rpc.watch import WatchHandler
from streammeta.controller.runtime.admission import Gate, RequestClass, class_of
from streammeta.controller.runtime.controller import MetadataController
from streammeta.controller.runtime.operations import QuorumDescription
from streammeta.controller.runtime.quorum_driver import QuorumDriver
from streammeta.v1 import admin_pb2, common_pb2, metadata_pb2, nodes_pb2

PipelineHandler = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """Translation of one unary RPC; `writes` is True for mutations, False for queries."""

    decode: Callable[[Any], Any]
    encode: Callable[[Any], Message]
    writes: bool


_PARSERS: Mapping[str, Callable[[bytes], Message]] = {
    "streammeta.v1.ObjectService.CommitStreamSetObject": wire_columns.parse_commit
}


def _write(decode: Callable[[Any], Any], encode: Callable[[Any], Message]) -> Route:
    return Route(decode, encode, writes=True)


def _read(decode: Callable[[Any], Any], encode: Callable[[Any], Message]) -> Route:
    return Route(decode, encode, writes=False)


def routes(cluster_id: str, view: convert_nodes.LeaderView) -> Mapping[str, Route]:
    """Return the routes by full name, e.g. `streammeta.v1.KVService.PutKVs`."""
    s, o, n, k = convert_streams, convert_objects, convert_nodes, convert_kv
    table = {
        "StreamService.CreateStreams": _write(s.create_streams_in, s.create_streams_out),
        "StreamService.OpenStreams": _write(s.open_streams_in, s.open_streams_out),
        "StreamService.CloseStreams": _write(s.close_streams_in, s.close_streams_out),
        "StreamService.TrimStreams": _write(s.trim_streams_in, s.trim_streams_out),
        "StreamService.DeleteStreams": _write(s.delete_streams_in, s.delete_streams_out),
        "StreamService.DescribeStreams": _read(s.describe_streams_in, s.describe_streams_out),
        "StreamService.GetOpeningStreams": _write(
            s.get_opening_streams_in, s.get_opening_streams_out
        ),
        "StreamService.AbandonUploads": _write(s.abandon_uploads_in, s.abandon_uploads_out),
        "ObjectService.PrepareObjects": _write(o.prepare_objects_in, o.prepare_objects_out),
        "ObjectService.CommitStreamSetObject": _write(
            wire_columns.commit_stream_set_object_in, wire_columns.commit_stream_set_object_out
        ),
        "ObjectService.CommitStreamObject": _write(
            o.commit_stream_object_in, o.commit_stream_object_out
        ),
        "ObjectService.GetObjects": _read(o.get_objects_in, o.get_objects_out),
        "ObjectService.DescribeObjects": _read(o.describe_objects_in, o.describe_objects_out),
        "ObjectService.CheckObjects": _read(
            o.check_objects_in, lambda answer: o.check_objects_out(answer, cluster_id)
        ),
        "NodeService.RegisterNode": _write(n.register_node_in, n.register_node_out),
        "NodeService.UnregisterNode": _write(n.unregister_node_in, n.unregister_node_out),
        "NodeService.GetNodes": _read(n.get_nodes_in, lambda answer: n.get_nodes_out(answer, view)),
        "NodeService.ListStreamSetObjects": _read(
            n.list_stream_set_objects_in, n.list_stream_set_objects_out
        ),
        "NodeService.GetNextNodeId": _write(n.get_next_node_id_in, n.get_next_node_id_out),
        "NodeService.LockNode": _write(n.lock_node_in, n.lock_node_out),
        "NodeService.UnlockNode": _write(n.unlock_node_in, n.unlock_node_out),
        "KVService.PutKVs": _write(k.put_kvs_in, k.put_kvs_out),
        "KVService.GetKVs": _read(k.get_kvs_in, k.get_kvs_out),
        "KVService.DeleteKVs": _write(k.delete_kvs_in, k.delete_kvs_out),
        "KVService.ListKVs": _read(k.list_kvs_in, k.list_kvs_out),
    }
    return {f"streammeta.v1.{name}": route for name, route in table.items()}


def routed(route: Route, controller: MetadataController) -> UnaryHandler:
    """Return the handler that submits a route's requests to the loop; reads may name an offset."""

    async def handle(request: Message, context: Context) -> Message:
        decoded = route.decode(request)
        kind = class_of(decoded, writes=route.writes)
        async with controller.gate.admitted(kind, context.time_remaining()):
            if route.writes:
                answered = await controller.write(decoded)
            else:
                answered = await controller.read(
                    decoded, at_least=read_after(context), timeout_ms=longest_wait_ms(context)
                )
            quote_offset(context, answered.offset)
            return route.encode(answered.answer)

    return guarded(handle)


def service_handler(
    service: ServiceDescriptor,
    unary: Mapping[str, UnaryHandler],
    streams: Mapping[str, StreamHandler],
    pipelines: Mapping[str, PipelineHandler] | None = None,
) -> grpc.GenericRpcHandler:
    """Return a handler for a service; `unary`, `streams` and `pipelines` are by method name."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        request_class = message_factory.GetMessageClass(method.input_type)
        parse = _PARSERS.get(method.full_name, request_class.FromString)
        if (call := unary.get(method.name)) is not None:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                parsed(call, parse), response_serializer=_serialized
            )
        elif (stream := streams.get(method.name)) is not None:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                parsed(stream, parse), response_serializer=_serialized
            )
        elif (pipeline := (pipelines or {}).get(method.name)) is not None:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(pipeline)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _serialized(message: Message | bytes) -> bytes:
    """Return the bytes of a message; messages that go to many watches are bytes already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


OBSERVER_PRESENT_MS = 10_000
"""Maximum time since an observer's last fetch for it to be listed, in milliseconds."""

TRANSFER_TIMEOUT_MS = 30_000
"""Maximum time of a transfer, in milliseconds; the driver gives up a slow successor earlier."""


class AdminHandlers:
    """AdminService: answers from this controller's own state, leader or not, but for transfers."""

    def __init__(
        self,
        config: ControllerConfig,
        driver: QuorumDriver,
        controller: MetadataController,
        bucket: BucketClaims,
    ) -> None:
        self._config = config
        self._driver = driver
        self._controller = controller
        self._bucket = bucket

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {
            "DescribeCluster": guarded(self._describe_cluster),
            "StateHash": guarded(self._state_hash),
            "TakeSnapshot": guarded(self._take_snapshot),
            "TransferLeadership": guarded(self._transfer_leadership),
        }

    async def _describe_cluster(self, _: Any, __: Context) -> admin_pb2.DescribeClusterResponse:
        leader = self._driver.leader
        seen = self._driver.describe()
        size = self._controller.cluster_map.size()
        return admin_pb2.DescribeClusterResponse(
            cluster_id=self._config.cluster_id,
            leader_id=None if leader is None else leader[0],
            leader_endpoint="" if leader is None else leader[1],
            epoch=self._driver.epoch,
            high_watermark=optional_out(self._driver.high_watermark),
            answered_by=self._config.node_id,
            controllers=_controllers(seen),
            size=admin_pb2.MapSize(
                streams=size.streams,
                objects=size.objects,
                prepared_objects=size.prepared_objects,
                committed_objects=size.committed_objects,
                destroyed_objects=size.destroyed_objects,
                stream_set_objects=size.stream_set_objects,
                nodes=size.nodes,
                keys=size.keys,
                committed_bytes=size.committed_bytes,
            ),
            object_namespace=self._config.namespace,
            cluster_uuid=self._bucket.cluster_uuid,
            bucket_problem=self._bucket.problem,
        )

    async def _state_hash(
        self, request: admin_pb2.StateHashRequest, _: Context
    ) -> admin_pb2.StateHashResponse:
        seen = await self._controller.state_hash(
            request.at_offset if request.HasField("at_offset") else None
        )
        return admin_pb2.StateHashResponse(
            offset=seen.offset,
            hash=seen.digest,
            answered_by=self._config.node_id,
            log_hash=seen.log_hash,
        )

    async def _take_snapshot(
        self, _: admin_pb2.TakeSnapshotRequest, __: Context
    ) -> admin_pb2.TakeSnapshotResponse:
        taken = await self._driver.take_snapshot()
        return admin_pb2.TakeSnapshotResponse(
            end_offset=taken.end_offset, epoch=taken.epoch, answered_by=self._config.node_id
        )

    async def _transfer_leadership(
        self, request: admin_pb2.TransferLeadershipRequest, context: Context
    ) -> admin_pb2.TransferLeadershipResponse:
        successor = None
        if request.HasField("to_node_id"):
            successor = _controller_id("to_node_id", request.to_node_id)
        await self._driver.transfer_leadership(successor, TRANSFER_TIMEOUT_MS)
        return admin_pb2.TransferLeadershipResponse()


def _controllers(seen: QuorumDescription) -> list[admin_pb2.Controller]:
    """Voters, and observers that fetch; a leader remembers those that are gone for a while."""
    present = [(voter, True) for voter in seen.voters]
    present += [
        (observer, False)
        for observer in seen.observers
        if observer.last_fetch_age_ms is not None
        and observer.last_fetch_age_ms < OBSERVER_PRESENT_MS
    ]
    return [
        admin_pb2.Controller(node_id=replica.key.node_id, endpoint=replica.endpoint, voter=is_voter)
        for replica, is_voter in sorted(present, key=lambda item: item[0].key.node_id)
    ]


def _controller_id(field: str, node_id: int) -> NodeId:
    try:
        check_controller_id(field, node_id)
    except ConfigError as error:
        raise InvalidRequestError(field, str(error).removeprefix(f"{field}: ")) from None
    return NodeId(node_id)


class NodeHandlers:
    """NodeService.Heartbeat: passes heartbeats to the leader's sessions."""

    def __init__(self, heartbeats: Heartbeats, gate: Gate) -> None:
        self._heartbeats = heartbeats
        self._gate = gate

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {"Heartbeat": guarded(self._heartbeat)}

    async def _heartbeat(
        self, request: nodes_pb2.HeartbeatRequest, context: Context
    ) -> nodes_pb2.HeartbeatResponse:
        async with self._gate.admitted(RequestClass.HEARTBEAT, context.time_remaining()):
            answer = await self._heartbeats.heartbeat(
                node_identity(request.node), wants_shutdown=request.wants_shutdown
            )
        return nodes_pb2.HeartbeatResponse(
            error=error_out(answer.error),
            may_shutdown=answer.may_shutdown,
            session_timeout_ms=answer.session_timeout_ms,
            recoveries=[
                nodes_pb2.Recovery(
                    node_id=one.node_id, node_epoch=one.node_epoch, wal_config=one.wal_config
                )
                for one in answer.recoveries
            ],
            compactions=[
                common_pb2.NodeIdentity(node_id=gone.node_id, node_epoch=gone.node_epoch)
                for gone in answer.compactions
            ],
        )


HOLD_MS_MAX = 604_800_000
"""Maximum time that a reader may hold deletions for its snapshot, in milliseconds: a week."""

CHUNK_BYTES_MAX = 1 << 20


class MetadataHandlers:
    """MetadataService: snapshots, written to a temporary file by a thread, and watches."""

    def __init__(
        self, controller: MetadataController, on_copied: Callable[[], None] = lambda: None
    ) -> None:
        """`on_copied` is called after each snapshot made for a caller."""
        self._controller = controller
        self._on_copied = on_copied
        self._watch = WatchHandler(controller.changes)

    def streams(self) -> Mapping[str, StreamHandler]:
        """Return the handlers by method name."""
        return {"GetSnapshot": self._get_snapshot, "Watch": self._watch.watch}

    async def _get_snapshot(
        self, request: metadata_pb2.GetSnapshotRequest, context: Context
    ) -> None:
        with tempfile.TemporaryFile() as file:
            try:
                # Few snapshots are written at a time; a slow reader holds up no other.
                gate = self._controller.gate
                async with gate.admitted(RequestClass.SNAPSHOT, context.time_remaining()):
                    await self._require_offset(request.not_before_offset)
                    await self._hold_deletions(request.hold_ms)
                    frozen = await self._controller.frozen()
                    self._on_copied()
                    total = await asyncio.to_thread(frozen.write, file)
            except Exception as error:  # noqa: BLE001 - every failure of a call is a status
                await abort(context, error)
            for position in range(0, total, CHUNK_BYTES_MAX):
                chunk = metadata_pb2.GetSnapshotResponse(
                    end_offset=frozen.id.end_offset,
                    epoch=frozen.id.epoch,
                    total_bytes=total,
                    position=position,
                    data=await asyncio.to_thread(_read_at, file, position),
                )
                await context.write(chunk)

    async def _require_offset(self, wanted: int) -> None:
        """Check first of all, so that a refused call leaves no hold behind."""
        if wanted <= self._controller.committed_end:
            return
        end_offset = (await self._controller.frozen()).id.end_offset  # the newest, by a majority
        if wanted > end_offset:
            raise InvalidRequestError(
                "not_before_offset", f"{wanted}; the log is committed up to {end_offset} only"
            )

    async def _hold_deletions(self, hold_ms: int) -> None:
        """Hold deletions before the snapshot, so that no object in it loses its bytes."""
        if not 0 <= hold_ms <= HOLD_MS_MAX:
            raise InvalidRequestError("hold_ms", f"{hold_ms}; wanted 0 to {HOLD_MS_MAX}, a week")
        if hold_ms:
            await self._controller.write(HoldDeletions(hold_ms=hold_ms))


def _read_at(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(CHUNK_BYTES_MAX)
