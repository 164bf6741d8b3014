"""Export of traces by OTLP, as the variables OTEL_* of the environment say.

Owns the provider of a process that runs as a command; a program that embeds the client has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from streammeta.cli.client import Command
from streammeta.rpc import tracing
from streammeta.storage.installation import optional_packages


def tracing_option(traced: str) -> Callable[[Command], Command]:
    """Add `--tracing` to a command; `traced` says in its help what it traces."""
    return click.option(
        "--tracing",
        is_flag=True,
        help=f"Trace {traced}, and send spans by OTLP; the variables OTEL_* say where and how."
        " Needs the extra tracing.",
    )


@contextmanager
def exporting_traces(service: str, *, wanted: bool) -> Iterator[None]:
    """Trace in the body if that is `wanted`, as `service` unless the environment names another.

    Raises `MissingPackageError` if the extra is not installed.
    """
    if not wanted:
        yield
        return
    with optional_packages("--tracing", "tracing"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    own = Resource.create({"service.name": service})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracing.enable(provider)
    try:
        yield
    finally:
        tracing.disable()
        provider.shutdown()
