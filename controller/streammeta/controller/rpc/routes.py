"""Which RPC becomes which request of the map, and gRPC handlers made from that table.

Calls that are no request to the map are not in it: their services bring handlers along.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from streammeta.controller.rpc import (
    convert_kv,
    convert_nodes,
    convert_objects,
    convert_streams,
    wire_columns,
)
from streammeta.controller.rpc.door import StreamHandler, UnaryHandler, guarded, parsed
from streammeta.controller.rpc.session import longest_wait_ms, quote_offset, read_after
from streammeta.controller.rpc.status import Context
from streammeta.controller.runtime.admission import class_of
from streammeta.controller.runtime.controller import MetadataController

PipelineHandler = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """How one unary RPC is translated; `writes` tells a mutation from a query."""

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
    """Return the handler that submits a route's requests to the loop; see `session` for reads."""

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
    """Messages that go to many are bytes already."""
    return message if isinstance(message, bytes) else message.SerializeToString()
