"""gRPC servers in the test's own process, on a free port of loopback unless told otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import Any, NoReturn

import grpc

from streammeta.rpc.connections import listen, new_blocking_server, new_server
from streammeta.rpc.failures import details_trailer
from streammeta.rpc.tls import TlsFiles

ANY_PORT = "127.0.0.1:0"


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


def unimplemented(*modules: ModuleType) -> Any:
    """Return a base class for fakes: servicers of the services of these `*_pb2_grpc` modules."""
    found = [vars(module).items() for module in modules]
    bases = (kind for items in found for name, kind in items if name.endswith("Servicer"))
    return type("Unimplemented", tuple(bases), {})


def abort(
    context: Any, code: grpc.StatusCode, reason: str, message: str, metadata: dict[str, str]
) -> NoReturn:
    """End a call of a servicer in threads with a status and ErrorInfo, as controllers do."""
    context.set_trailing_metadata(details_trailer(code, message, reason, metadata))
    context.abort(code, message)
    raise AssertionError("abort returned")


@contextmanager
def served_by_threads(
    servicer: Any,
    *modules: ModuleType,
    at: str = ANY_PORT,
    threads: int = 4,
    tls: TlsFiles | None = None,
) -> Iterator[str]:
    """Serve these modules' services in threads until the block ends; gives the endpoint."""
    server = new_blocking_server(threads)
    for name, add_to_server in (item for module in modules for item in vars(module).items()):
        if name.startswith("add_"):
            add_to_server(servicer, server)
    port = listen(server, at, tls)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
