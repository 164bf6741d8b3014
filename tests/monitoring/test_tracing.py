"""One trace from an append through its upload to the commit, across the client and controllers.

The controllers are processes that send spans to an OTLP server of the test; the client's spans are
kept in memory.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streammeta.cli.local_cluster import LocalCluster
from streammeta.client import StreamClient
from streammeta.rpc import tracing
from tests.kit.real_cluster import STEADY, running_cluster, wait_until

COMMIT = "streammeta.v1.ObjectService/CommitPipeline"
PREPARE = "streammeta.v1.ObjectService/PrepareObjects"
PHASES = ("admitted", "decided", "flushed", "committed")
PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()

    def Export(  # noqa: N802 - the contract's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for part in request.resource_spans:
            self.services |= {
                each.value.string_value
                for each in part.resource.attributes
                if each.key == "service.name"
            }
            for scope in part.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = grpc.server(ThreadPoolExecutor(2))  # noqa: TID251 - of others, not of the product
    kept = Collector()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield kept
    server.stop(None).wait()


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    yield exporter
    tracing.disable()


async def produce(cluster: LocalCluster) -> None:
    store = f"file://{cluster.root / 'bucket'}"
    async with await StreamClient.open(cluster.endpoints, store, node_id=7) as client:
        (stream,) = await client.create_streams([{"topic": "traced"}])
        await client.open_streams([stream])
        with tracing.span("produce"):
            assert await client.append(stream, b"one") == 0


def only(spans: tuple[ReadableSpan, ...], name: str) -> ReadableSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


@pytest.mark.process
def test_a_trace_leads_from_an_append_to_what_is_committed(
    tmp_path: Path, collector: Collector, exported: InMemorySpanExporter
) -> None:
    with running_cluster(tmp_path, count=1, options=(*STEADY, "--tracing")) as cluster:
        asyncio.run(produce(cluster))
        wait_until(lambda: bool(collector.named(COMMIT)), "the leader's span of the commit")
    spans = exported.get_finished_spans()
    append, commit = only(spans, "streammeta.append"), only(spans, "streammeta.commit")
    upload, root = only(spans, "streammeta.upload"), only(spans, "produce")
    assert parents(append, upload, commit) == [ids(root)[1], ids(append)[1], ids(append)[1]]
    assert {ids(each)[0] for each in (append, upload, commit, root)} == {ids(root)[0]}

    (message,) = collector.named(COMMIT)
    assert (message.trace_id, message.parent_span_id) == ids(commit)
    assert {each.key: each.value.int_value for each in message.attributes}["refused"] == 0
    phases: list[Span] = [
        span for span in collector.spans if span.parent_span_id == message.span_id
    ]
    ended = sorted((span.end_time_unix_nano, PHASES.index(span.name)) for span in phases)
    assert [phase for _, phase in ended] == [0, 1, 2, 3]
    assert (commit.start_time or 0) <= message.start_time_unix_nano
    assert message.end_time_unix_nano <= (commit.end_time or 0)

    (prepared,) = collector.named(PREPARE)
    asked = only(spans, PREPARE)
    assert (prepared.trace_id, prepared.parent_span_id) == ids(asked)
    assert parents(asked) == [ids(upload)[1]]
    assert collector.services == {"streammeta-controller"}
    assert not any("Heartbeat" in span.name for span in spans)
    assert not any("Heartbeat" in span.name for span in collector.spans)


def ids(span: ReadableSpan) -> tuple[bytes, bytes]:
    of = span.get_span_context()
    assert of is not None
    return of.trace_id.to_bytes(16, "big"), of.span_id.to_bytes(8, "big")


def parents(*spans: ReadableSpan) -> list[bytes]:
    return [span.parent.span_id.to_bytes(8, "big") for span in spans if span.parent is not None]


def test_a_message_of_several_traces_is_a_child_of_the_first_and_linked_to_the_others(
    exported: InMemorySpanExporter,
) -> None:
    other = f"00-{'ab' * 16}-00000000000000aa-01"
    tracing.record_phases("message", (PARENT, other), (("began", 10), ("decided", 30)))
    decided, message = exported.get_finished_spans()
    assert message.parent is not None
    assert f"{message.parent.span_id:016x}" == "0123456789abcdef"
    assert [link.context.span_id for link in message.links] == [0xAA]
    assert (decided.name, decided.start_time, decided.end_time) == ("decided", 10, 30)


@pytest.mark.parametrize(
    "stranger",
    [
        "",
        "no traceparent",
        PARENT[:-1],
        PARENT.replace("-01", "-00"),
        "00-" + "0" * 32 + PARENT[35:],
        "ff" + PARENT[2:],
        PARENT.replace("a", "x"),
        PARENT.replace("a", "\u00e9"),
        PARENT.replace("0123", "+123"),
    ],
)
def test_what_names_no_sampled_trace_is_not_traced(
    exported: InMemorySpanExporter, stranger: str
) -> None:
    tracing.record_phases("message", (stranger,), (("began", 10), ("decided", 30)))
    with tracing.serving("call", stranger):
        assert not tracing.is_traced()
    assert exported.get_finished_spans() == ()


def test_without_tracing_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, streammeta.client, streammeta.controller.server\n"
        "from streammeta.rpc import tracing\n"
        "with tracing.span('x') as span: assert span.traceparent == ''\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
