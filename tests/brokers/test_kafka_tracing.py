"""Traces of a Kafka-shaped broker's requests, from the socket to what the quorum has committed.

Broker and controllers are processes that send their spans to a collector of the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.kit.kafka_brokers import KafkaBrokers, running_brokers
from tests.kit.real_cluster import STEADY
from tests.kit.traces import Collector, collecting
from tests.kit.waiting import wait_until

PRODUCE, FETCH = "streammeta.kafka.Produce", "streammeta.kafka.Fetch"
COMMIT = "streammeta.v1.ObjectService/CommitPipeline"
VALUE = b"a value that is read again"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as kept:
        yield kept


@pytest.fixture
def brokers(tmp_path: Path, collector: Collector) -> Iterator[KafkaBrokers]:
    with running_brokers(tmp_path, options=(*STEADY, "--tracing")) as found:
        yield found


def produce(address: str, value: bytes) -> None:
    quiet: Any = {"bootstrap.servers": address, "log_level": 0, "linger.ms": 0}
    producer = Producer(quiet)
    producer.produce("events", value, partition=0)
    assert producer.flush(30) == 0


def read(address: str) -> bytes | None:
    quiet: Any = {"bootstrap.servers": address, "log_level": 0, "group.id": "readers"}
    consumer = Consumer(quiet)
    consumer.assign([TopicPartition("events", 0, 0)])
    found = consumer.poll(30)
    consumer.close()
    assert found is not None
    assert found.error() is None
    return found.value()


def numbers(span: Span) -> dict[str, int]:
    return {each.key: each.value.int_value for each in span.attributes}


def taken(collector: Collector) -> list[Span]:
    """Return the requests that were no error; a client asks again until a partition is open."""
    found = collector.named(PRODUCE)
    return [span for span in found if span.status.code != Status.STATUS_CODE_ERROR]


def filled(collector: Collector) -> list[Span]:
    """Return the requests that were answered with records."""
    return [span for span in collector.named(FETCH) if numbers(span)["bytes"]]


@pytest.mark.process
def test_a_trace_leads_from_a_produced_batch_to_what_is_committed_and_from_a_fetch_to_the_bucket(
    brokers: KafkaBrokers, collector: Collector
) -> None:
    address = brokers.start(1, "--tracing")
    produce(address, VALUE)
    wait_until(lambda: bool(taken(collector)), "the broker's span of the request")
    (produced,) = taken(collector)
    (append,) = wait_for_children(collector, produced, ["streammeta.append"])
    _, commit = wait_for_children(collector, append, ["streammeta.upload", "streammeta.commit"])
    (message,) = wait_for_children(collector, commit, [COMMIT])
    assert {span.name for span in collector.in_span(message)} >= {"admitted", "committed"}
    chain = (produced, append, commit, message)
    assert {span.trace_id for span in chain} == {produced.trace_id}
    assert produced.parent_span_id == b""
    assert produced.end_time_unix_nano >= message.end_time_unix_nano, "acknowledged is committed"
    assert numbers(produced)["partitions"] == 1
    assert numbers(produced)["bytes"] > len(VALUE)
    assert collector.services == {"streammeta-kafka", "streammeta-controller"}

    assert brokers.children[1].stop() == 0
    assert read(brokers.start(1, "--tracing")) == VALUE
    wait_until(lambda: bool(filled(collector)), "the broker's span of what was fetched")
    fetched = filled(collector)[0]
    assert numbers(fetched)["bytes"] > len(VALUE)
    inside = {span.name for span in collector.in_span(fetched)}
    assert "streammeta.read" in inside, inside
    assert all(
        numbers(span)["bytes"] or span.status.code == Status.STATUS_CODE_ERROR
        for span in collector.named(FETCH)
    ), "what waited in vain is no span"


def wait_for_children(collector: Collector, parent: Span, names: list[str]) -> list[Span]:
    """Return the children of a span once they have come."""
    wait_until(
        lambda: [span.name for span in collector.in_span(parent)] == names,
        f"{names} in {parent.name}",
    )
    return collector.in_span(parent)
