"""Export of traces by OTLP, configured by the OTEL_* environment variables.

For processes whose traces belong to the product. A program that embeds the client has its own
provider.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streammeta.rpc import tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def otlp_provider(service: str) -> TracerProvider:
    """Create a provider that exports as `service`, unless the environment names another.

    Raises `ModuleNotFoundError` if a package of the extra `tracing` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = Resource.create({"service.name": service})
    # Merged in this order, so that the environment overrides the name.
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


@contextlib.contextmanager
def tracing_by(provider: TracerProvider) -> Iterator[None]:
    """Trace in the body with a provider. At the end it has sent all spans and is shut down."""
    tracing.enable(provider)
    try:
        yield
    finally:
        # No span may begin once the provider is shut down.
        tracing.disable()
        provider.shutdown()
