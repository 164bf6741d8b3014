"""Methods that a service declares and nobody implemented, and those that nothing declares."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from streammeta.controller.grpc_server.server import Server
from streammeta.rpc.connections import client_channel
from streammeta.v1 import metadata_pb2, metadata_pb2_grpc, objects_pb2, objects_pb2_grpc
from tests.kit.grpc_servers import unimplemented

_DECLARED = [
    *metadata_pb2.DESCRIPTOR.services_by_name["MetadataService"].methods,
    *objects_pb2.DESCRIPTOR.services_by_name["ObjectService"].methods,
]


@asynccontextmanager
async def generated_services() -> AsyncIterator[grpc.aio.Channel]:
    """Serve what gRPC generates for two services, without implementations; give a channel."""
    server: Any = Server()
    servicer = unimplemented(metadata_pb2_grpc, objects_pb2_grpc)()
    metadata_pb2_grpc.add_MetadataServiceServicer_to_server(servicer, server)
    objects_pb2_grpc.add_ObjectServiceServicer_to_server(servicer, server)
    endpoint = f"127.0.0.1:{server.listen('127.0.0.1:0')}"
    await server.start()
    async with client_channel(endpoint) as channel:
        yield channel
    await server.stop(None)


@pytest.mark.parametrize("method", _DECLARED, ids=lambda method: method.name)
async def test_a_method_that_nobody_implemented_is_unimplemented(method: MethodDescriptor) -> None:
    """Generated code raises an error in its place, which is not a defect of the controller."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with generated_services() as channel:
        opened: Any = channel
        if method.client_streaming:
            call = opened.stream_stream(path)()
        elif method.server_streaming:
            call = opened.unary_stream(path)(b"")
        else:
            call = opened.unary_unary(path)(b"")
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "not implemented" in await call.details()


@pytest.mark.parametrize("path", ["/streammeta.v1.ObjectService/No", "/no.Service/No", "/", "/no"])
async def test_a_method_that_nothing_declares_is_unimplemented(path: str) -> None:
    async with generated_services() as channel:
        opened: Any = channel
        code = await opened.unary_unary(path)(b"").code()
        assert code is grpc.StatusCode.UNIMPLEMENTED
