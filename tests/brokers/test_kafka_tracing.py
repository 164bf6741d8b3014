"""Traces, metrics and probes of a Kafka-shaped broker: its own words about stock clients.

Broker and controllers are processes that send their spans to a collector of the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.tally import API_NAMES, BrokerTally
from streammeta.brokers.kafka.protocol.wire import SERVED
from streammeta.brokers.kafka.service.metrics import (
    LEADER_SILENT_MAX_S,
    VIEW_AGE_MAX_S,
    BrokerState,
)
from tests.kit.kafka_brokers import KafkaBrokers, result_of, running_brokers
from tests.kit.real_cluster import STEADY
from tests.kit.traces import Collector, collecting
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get, samples

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
    return {attribute.key: attribute.value.int_value for attribute in span.attributes}


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


# ---- metrics and probes ----


HTTP = ("--http-listen", "127.0.0.1:0")


def scraped(address: str) -> dict[str, float]:
    status, text = get(address, "/metrics")
    assert status == 200
    return {name.removeprefix("streammeta_"): value for name, value in samples(text).items()}


@pytest.mark.process
def test_a_scrape_tells_what_clients_did_and_what_a_dead_broker_left(tmp_path: Path) -> None:
    with running_brokers(tmp_path) as brokers:
        _scrape(brokers)


def _scrape(brokers: KafkaBrokers) -> None:
    address = brokers.start(1, *HTTP)
    http = brokers.http[1]
    assert get(http, "/livez")[0] == 200
    assert get(http, "/readyz") == (200, "[+] serving\n")
    assert get(http, "/nothing")[0] == 404
    before = scraped(http)
    assert before['kafka_requests_total{api="Produce"}'] == 0
    assert before['kafka_errors_total{error="NOT_COORDINATOR"}'] == 0
    assert "kafka_tls_certificate_not_after_timestamp_seconds" not in before, "plain text"
    assert (before["kafka_produced_bytes_total"], before["client_appends_total"]) == (0, 0)
    result_of(brokers.run("confluent_script.py", address, "events"))
    after = scraped(http)
    for api in ("Produce", "Fetch", "Metadata", "OffsetCommit", "JoinGroup"):
        assert after[f'kafka_requests_total{{api="{api}"}}'] > 0
    assert after["kafka_produced_bytes_total"] > 0
    assert after["kafka_fetched_bytes_total"] >= after["kafka_produced_bytes_total"]
    assert (after["kafka_partitions_led"], after["kafka_groups"]) == (3, 1)
    assert after["kafka_partitions_unavailable"] == 0
    assert after["kafka_connections_opened_total"] > 0
    assert after["client_append_records_total"] >= 500
    assert after['client_commit_duration_seconds_count{verdict="accepted"}'] > 0
    assert after["process_resident_memory_bytes"] > 1 << 20
    brokers.start(2, *HTTP)
    brokers.children[1].kill()
    wait_until(
        lambda: scraped(brokers.http[2])["kafka_partitions_led"] == 3, "the other to lead all"
    )


def test_errors_are_counted_for_each_item_of_an_answer() -> None:
    tally = BrokerTally()
    rows = [{"error_code": Code.NONE}, {"error_code": Code.NOT_LEADER_OR_FOLLOWER}]
    tally.count_errors({"error_code": Code.NONE, "topics": [{"name": "a", "partitions": rows * 2}]})
    tally.count_errors({"error_code": Code.UNSUPPORTED_VERSION, "api_keys": [{"api_key": 0}]})
    found = {code: number for code, number in tally.errors.items() if number}
    assert found == {Code.NOT_LEADER_OR_FOLLOWER: 2, Code.UNSUPPORTED_VERSION: 1}


def test_every_api_that_is_served_has_a_name() -> None:
    assert API_NAMES.keys() == SERVED.keys()


def test_a_broker_is_ready_while_it_serves_and_hears_of_controllers() -> None:
    assert "joining" in BrokerState().unready
    assert BrokerState(is_serving=True, view_age_s=VIEW_AGE_MAX_S).unready == ""
    assert "12 s" in BrokerState(is_serving=True, view_age_s=12.0).unready


def test_a_broker_whose_leader_is_silent_is_not_ready_although_its_view_is_fresh() -> None:
    state = BrokerState(is_serving=True, leader_silent_s=LEADER_SILENT_MAX_S)
    assert state.unready == ""
    reason = replace(state, leader_silent_s=14.0).unready
    assert reason == "the leading controller has not answered for 14 s"
