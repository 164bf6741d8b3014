"""Handlers of health and reflection, gRPC's own services, in the same call pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from streammeta.controller.rpc.calls.error_mapping import Context
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.services.contract import service_handler
from streammeta.rpc.contract import SERVICES

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


def health_handler(
    servicer: health.aio.HealthServicer, entrance: CallPipeline
) -> grpc.GenericRpcHandler:
    """Return a handler for the states that are set on `servicer`."""
    # Probes ask for one service by Check. No tool of ours lists them.
    return service_handler(
        _HEALTH,
        entrance,
        {"Check": servicer.Check},
        {"Watch": servicer.Watch},
        unserved=("List",),
    )


def reflection_handler(entrance: CallPipeline) -> grpc.GenericRpcHandler:
    """Return a handler that describes the services of the contract, health and itself."""
    contract = (service.full_name for service in SERVICES.values())
    # Without their names the tool could not find health and reflection themselves.
    names = (*contract, health.SERVICE_NAME, reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)

    async def answer(messages: AsyncIterator[bytes], context: Context) -> None:
        # The pipeline passes bytes, because callers are authenticated before anything is parsed.
        requests = _parsed(messages)
        async for response in servicer.ServerReflectionInfo(requests, context):
            await context.write(response.SerializeToString())

    return service_handler(_REFLECTION, entrance, {}, {}, {"ServerReflectionInfo": answer})


async def _parsed(
    messages: AsyncIterator[bytes],
) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    async for data in messages:
        yield reflection_pb2.ServerReflectionRequest.FromString(data)
