"""One trace from an append through its upload to the commit, across the client and controllers.

The controllers are processes that send spans to an OTLP server of the test; the client's spans are
kept in memory.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient
from streammeta.rpc import tracing
from tests.kit.real_cluster import STEADY, running_cluster
from tests.kit.traces import Collector, collecting, exporting, ids, only, parents
from tests.kit.waiting import wait_until

COMMIT = "streammeta.v1.ObjectService/CommitPipeline"
PREPARE = "streammeta.v1.ObjectService/PrepareObjects"
PHASES = ("admitted", "decided", "flushed", "committed")
PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as kept:
        yield kept


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    with exporting() as exporter:
        yield exporter


async def produce(cluster: LocalCluster) -> None:
    store = f"file://{cluster.root / 'bucket'}"
    async with await StreamClient.open(cluster.endpoints, store, node_id=7) as client:
        (stream,) = await client.create_streams([{"topic": "traced"}])
        await client.open_streams([stream])

        async def append(name: str, offset: int) -> None:
            with tracing.span(name):
                assert await client.append(stream, b"one") == offset

        await asyncio.gather(append("produce", 0), append("another", 1))


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
    assert {ids(span)[0] for span in (append, upload, commit, root)} == {ids(root)[0]}
    another = only(spans, "another")
    assert ids(another)[0] != ids(root)[0]
    assert links(another) == [int.from_bytes(ids(append)[1])], "they share an object"
    assert links(append) == [int.from_bytes(ids(another)[1])]

    (message,) = collector.named(COMMIT)
    assert (message.trace_id, message.parent_span_id) == ids(commit)
    assert {attribute.key: attribute.value.int_value for attribute in message.attributes}[
        "refused"
    ] == 0
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


def links(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def test_work_for_several_spans_is_a_child_of_the_first_and_linked_to_the_others(
    exported: InMemorySpanExporter,
) -> None:
    with tracing.span("first"):
        work = tracing.begin("work")
        assert work.share("work") is work
    for name in ("second", "third"):
        with tracing.span(name):
            assert work.share("work").share("work") is work
    work.end()
    spans = exported.get_finished_spans()
    first, second, third = (only(spans, name) for name in ("first", "second", "third"))
    done = only(spans, "work")
    assert parents(done) == [ids(first)[1]]
    assert links(done) == [int.from_bytes(ids(span)[1]) for span in (second, third)]
    (own_id,) = {int.from_bytes(ids(done)[1])}
    assert [links(span) for span in (first, second, third)] == [[], [own_id], [own_id]]


def test_work_is_traced_from_the_first_sampled_span_that_it_is_for() -> None:
    with exporting(ParentBased(ALWAYS_OFF)) as exported:
        work = tracing.begin("work")
        assert work.share("work") is work
        with tracing.serving("call", PARENT):
            work = work.share("work")
        work.end()
        done, call = exported.get_finished_spans()[::-1]
        assert (done.name, parents(done)) == ("work", [ids(call)[1]])


async def test_a_task_that_outlives_a_span_is_no_part_of_it(exported: InMemorySpanExporter) -> None:
    async def work() -> None:
        with tracing.span("work"):
            pass

    with tracing.span("request"):
        await asyncio.create_task(work(), context=tracing.outside())
        assert tracing.is_traced()
    assert only(exported.get_finished_spans(), "work").parent is None


def test_a_span_that_is_dropped_is_in_no_trace(exported: InMemorySpanExporter) -> None:
    dropped = tracing.begin("dropped")
    dropped.drop()
    dropped.end("an error", {"size": 1})
    assert exported.get_finished_spans() == ()


def test_without_tracing_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, streammeta.client, streammeta.controller.process.server\n"
        "from streammeta.rpc import tracing\n"
        "with tracing.span('x') as span: assert span.traceparent == ''\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
