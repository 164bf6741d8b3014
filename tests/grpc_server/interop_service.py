"""gRPC's interoperability service on the product's server, and the programs that call it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from grpc_tools import protoc

from streammeta.controller.grpc_server.server import Server
from tests.kit.grpc_servers import listening

ROOT = Path(__file__).parents[2]
_ECHOED_FIRST, _ECHOED_LAST = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def program_in_go(name: str) -> Path:
    """Return the program that scripts/fetch_peers builds; skip the test without it."""
    program = ROOT / ".go" / name
    if not program.exists():
        pytest.skip(f"the program {name} is not built: run ./scripts/fetch_peers, with Go on PATH")
    return program


async def run_program(program: Path, *words: str) -> tuple[int, str, str]:
    """Run a program to its end; return its exit code and what it prints."""
    process = await asyncio.create_subprocess_exec(
        program, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@asynccontextmanager
async def interop_server(generated: Path) -> AsyncIterator[str]:
    """Serve the interoperability service until the block ends; its stubs go to `generated`."""
    messages, services = _stubs(generated)
    server = Server()
    servicer = type("Servicer", (InteropService, services.TestServiceServicer), {})
    services.add_TestServiceServicer_to_server(servicer(messages), server)
    async with listening(server) as endpoint:
        yield endpoint


def _stubs(generated: Path) -> tuple[ModuleType, ModuleType]:
    """Generate the modules of the service's messages and stubs, and import them."""
    source = ROOT / "tests" / "interop" / "grpc"
    options = [f"-I{source}", f"--python_out={generated}", f"--grpc_python_out={generated}"]
    assert protoc.main(["protoc", *options, "service.proto"]) == 0
    sys.path.insert(0, str(generated))
    try:
        return import_module("service_pb2"), import_module("service_pb2_grpc")
    finally:
        sys.path.remove(str(generated))


class InteropService:
    """What the cases call, but for the method that nobody implements."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages

    async def EmptyCall(self, request: Any, _: Any) -> Any:  # noqa: N802 - the cases' names
        return request

    async def UnaryCall(self, request: Any, context: Any) -> Any:  # noqa: N802
        await _send_echo(context)
        await _end_as_asked(request, context)
        payload = self._payload(request.response_size)
        return self._messages.SimpleResponse(payload=payload, server_id="streammeta")

    async def StreamingInputCall(  # noqa: N802
        self, requests: AsyncIterator[Any], _: Any
    ) -> Any:
        sizes = [len(request.payload.body) async for request in requests]
        return self._messages.StreamingInputCallResponse(aggregated_payload_size=sum(sizes))

    async def StreamingOutputCall(  # noqa: N802
        self, request: Any, _: Any
    ) -> AsyncIterator[Any]:
        async for answer in self._answers(request):
            yield answer

    async def FullDuplexCall(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        await _send_echo(context)
        async for request in requests:
            await _end_as_asked(request, context)
            async for answer in self._answers(request):
                yield answer

    async def _answers(self, request: Any) -> AsyncIterator[Any]:
        for wanted in request.response_parameters:
            await asyncio.sleep(wanted.interval_us / 1e6)
            yield self._messages.StreamingOutputCallResponse(payload=self._payload(wanted.size))

    def _payload(self, size: int) -> Any:
        return self._messages.Payload(body=bytes(size))


async def _send_echo(context: Any) -> None:
    """Send the metadata back that the caller asks to have back, first and last."""
    given = context.invocation_metadata()
    if first := [item for item in given if item[0] == _ECHOED_FIRST]:
        await context.send_initial_metadata(first)
    context.set_trailing_metadata([item for item in given if item[0] == _ECHOED_LAST])


async def _end_as_asked(request: Any, context: Any) -> None:
    status = request.response_status
    if status.code:
        await context.abort(_CODES[status.code], status.message)
