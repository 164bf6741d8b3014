"""gRPC servers in the test's own process, on a free port of loopback unless told otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import Any, NoReturn

import grpc

from streammeta.controller.grpc_server.limits import ANSWER_BYTES_MAX, DEFAULT, Limits
from streammeta.controller.grpc_server.server import Server
from streammeta.rpc.failures import details_trailer
from streammeta.tls.files import TlsFiles
from streammeta.tls.server_certificates import ServerCertificates

ANY_PORT = "127.0.0.1:0"


async def started(
    *handlers: grpc.GenericRpcHandler, at: str = ANY_PORT, limits: Limits = DEFAULT
) -> tuple[Server, str]:
    """Return a running server of these services, and its endpoint; the caller stops it."""
    server = Server(limits)
    server.add_generic_rpc_handlers(handlers)
    port = server.listen(at)
    await server.start()
    return server, f"127.0.0.1:{port}"


@asynccontextmanager
async def listening(
    server: Server, tls: TlsFiles | ServerCertificates | None = None, at: str = ANY_PORT
) -> AsyncIterator[str]:
    """Let a server that has its services serve until the block ends; gives the endpoint."""
    port = server.listen(at, tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def served(*handlers: grpc.GenericRpcHandler, limits: Limits = DEFAULT) -> AsyncIterator[str]:
    """Serve until the block ends; gives the endpoint."""
    server = Server(limits)
    server.add_generic_rpc_handlers(handlers)
    async with listening(server) as endpoint:
        yield endpoint


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
    options = [("grpc.max_send_message_length", ANSWER_BYTES_MAX), ("grpc.so_reuseport", 0)]
    # The product has no server of threads; what is served here is a stand-in.
    server = grpc.server(ThreadPoolExecutor(threads), options=options)  # noqa: TID251
    for name, add_to_server in (item for module in modules for item in vars(module).items()):
        if name.startswith("add_"):
            add_to_server(servicer, server)
    port = server.add_insecure_port(at) if tls is None else _secure_port(server, at, tls)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _secure_port(server: grpc.Server, at: str, tls: TlsFiles) -> int:
    shown = tls.load()
    pair = [(shown.key, shown.certificate)]
    credentials = grpc.ssl_server_credentials(  # noqa: TID251
        pair, shown.ca, require_client_auth=True
    )
    return server.add_secure_port(at, credentials)


def stock_channel(endpoint: str) -> grpc.aio.Channel:
    """Return a channel without any option, as clients of others open one."""
    return grpc.aio.insecure_channel(endpoint)  # noqa: TID251


def balanced_channel(target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """Return a blocking channel with options of gRPC alone, such as a service config."""
    return grpc.insecure_channel(target, options)  # noqa: TID251
