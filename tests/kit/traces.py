"""Spans of a test: those of its own process in memory, those of others by OTLP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from streammeta.rpc import tracing


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent, and the names of the services that sent them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()

    def Export(  # noqa: N802 - the contract's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for part in request.resource_spans:
            self.services |= {
                attribute.value.string_value
                for attribute in part.resource.attributes
                if attribute.key == "service.name"
            }
            for scope in part.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def in_span(self, parent: Span) -> list[Span]:
        """Return the children of a span, by their begin."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector that processes started in the body send their spans to."""
    server = grpc.server(ThreadPoolExecutor(2))  # noqa: TID251 - of others, not of the product
    kept = Collector()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield kept
    server.stop(None).wait()


@contextlib.contextmanager
def exporting(sampler: Sampler | None = None) -> Iterator[InMemorySpanExporter]:
    """Trace in this process, all spans if no sampler says otherwise."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    yield exporter
    tracing.disable()


def only(spans: tuple[ReadableSpan, ...], name: str) -> ReadableSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def ids(span: ReadableSpan) -> tuple[bytes, bytes]:
    """Return the ids of trace and span as OTLP has them."""
    of = span.get_span_context()
    assert of is not None
    return of.trace_id.to_bytes(16, "big"), of.span_id.to_bytes(8, "big")


def parents(*spans: ReadableSpan) -> list[bytes]:
    return [span.parent.span_id.to_bytes(8, "big") for span in spans if span.parent is not None]
