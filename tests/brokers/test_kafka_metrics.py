"""Metrics and probes of a Kafka-shaped broker: its own words about what stock clients did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.tally import API_NAMES, BrokerTally
from streammeta.brokers.kafka.protocol.wire import SERVED
from streammeta.brokers.kafka.service.state import LEADER_SILENT_MAX_S, VIEW_AGE_MAX_S, BrokerState
from tests.kit.kafka_brokers import KafkaBrokers, result_of, running_brokers
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get, samples

HTTP = ("--http-listen", "127.0.0.1:0")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[KafkaBrokers]:
    with running_brokers(tmp_path) as found:
        yield found


def scraped(address: str) -> dict[str, float]:
    status, text = get(address, "/metrics")
    assert status == 200
    return {name.removeprefix("streammeta_"): value for name, value in samples(text).items()}


@pytest.mark.process
def test_a_scrape_tells_what_clients_did_and_what_a_dead_broker_left(brokers: KafkaBrokers) -> None:
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
