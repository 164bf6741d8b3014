"""gRPC servers in the test's own process, on a free port of loopback unless told otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc

from streammeta.rpc.connections import listen, new_blocking_server, new_server

ANY_PORT = "127.0.0.1:0"
Service: TypeAlias = tuple[Callable[[Any, grpc.Server], None], Any]
"""The generated `add_..._to_server` of a service, and its servicer."""


async def started(
    *handlers: grpc.GenericRpcHandler, at: str = ANY_PORT
) -> tuple[grpc.aio.Server, str]:
    """Return a running server of these services, and its endpoint; the caller stops it."""
    server = new_server()
    server.add_generic_rpc_handlers(handlers)
    port = listen(server, at)
    await server.start()
    return server, f"127.0.0.1:{port}"


@asynccontextmanager
async def served(*handlers: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """Serve until the block ends; gives the endpoint."""
    server, endpoint = await started(*handlers)
    try:
        yield endpoint
    finally:
        await server.stop(None)


@contextmanager
def served_by_threads(*services: Service, at: str = ANY_PORT, threads: int = 4) -> Iterator[str]:
    """Serve in threads until the block ends; gives the endpoint."""
    server = new_blocking_server(threads)
    for add_to_server, servicer in services:
        add_to_server(servicer, server)
    port = listen(server, at)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
