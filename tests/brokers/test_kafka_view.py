"""Appointments of leaders, settings of topics, and the codec of messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import ClusterView, Endpoint, Leader, Topic
from streammeta.brokers.kafka.cluster.topic_configs import checked, log_config
from streammeta.brokers.kafka.protocol import wire
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from tests.conformance.test_conformance import VECTORS
from tests.kit.kafka_wire import read_response

_HERE = Endpoint("h", 9092, 1)
_TOPIC = Topic("t", "id", 4, {})


def test_leaderless_partitions_go_to_those_that_lead_least_one_epoch_on() -> None:
    leaders = {("id", 0): Leader(1, 3, 10), ("id", 1): Leader(9, 5, 11)}
    view = ClusterView({1: _HERE, 2: _HERE}, {"t": _TOPIC}, leaders)
    assert view.appointments() == {
        ("id", 1): Leader(2, 6, 11),
        ("id", 2): Leader(1, 0, 0),
        ("id", 3): Leader(2, 0, 0),
    }
    assert view.leader(_TOPIC, 1) is None
    assert ClusterView({}, {"t": _TOPIC}).appointments() == {}


def test_partitions_move_to_brokers_that_lead_less_one_epoch_on() -> None:
    led = {("id", at): Leader(1, at, 10 + at) for at in range(4)}
    view = ClusterView({1: _HERE, 2: _HERE}, {"t": _TOPIC}, led)
    moved = view.moves()
    assert moved == {("id", 3): Leader(2, 4, 13), ("id", 2): Leader(2, 3, 12)}
    assert len(view.moves(most=1)) == 1
    assert ClusterView({1: _HERE, 2: _HERE}, {"t": _TOPIC}, led | moved).moves() == {}
    three = {place: leader for place, leader in led.items() if place[1] != 1}
    assert ClusterView({1: _HERE, 2: _HERE}, {"t": _TOPIC}, three).moves() == {}
    uneven = led | {("id", 0): Leader(2, 1, 1)}
    view = ClusterView({1: _HERE, 2: _HERE, 3: _HERE}, {"t": _TOPIC}, uneven)
    assert {place: target.node_id for place, target in view.moves().items()} == {("id", 3): 3}
    assert ClusterView().moves() == {}


def test_what_has_no_leader_or_is_not_open_at_its_own_is_unavailable() -> None:
    nobody: Any = None
    led = {("id", at): Leader(node_id, 1, at) for at, node_id in enumerate((1, 1, 2, 9))}
    broker = Broker(nobody, nobody, "c", 1, view=ClusterView({1: _HERE, 2: _HERE}, {"t": _TOPIC}))
    assert broker.unavailable == 4, "nobody leads"
    broker.view = ClusterView({1: _HERE, 2: _HERE}, {"t": _TOPIC}, led)
    assert broker.unavailable == 3, "its own two, and one of a broker that is gone"
    is_open: Any = SimpleNamespace(is_writable=True)
    has_failed: Any = SimpleNamespace(is_writable=False)
    broker.logs |= {("id", 0): is_open, ("id", 1): has_failed}
    assert broker.unavailable == 2


def test_group_has_one_coordinator_among_the_living() -> None:
    view = ClusterView(dict.fromkeys((4, 7, 9), _HERE))
    assert {view.coordinator(f"group {number}") for number in range(50)} == {4, 7, 9}
    assert ClusterView().coordinator("g") == -1


def test_settings_of_topics_are_checked_and_count() -> None:
    config = log_config(
        checked({"retention.ms": "5", "segment.bytes": "100", "retention.bytes": None})
    )
    assert (config.retention.age_ms, config.segment.bytes, config.retention.bytes) == (5, 100, -1)
    for bad in ({"cleanup.policy": "compact"}, {"retention.ms": "soon"}, {"colour": "red"}):
        with pytest.raises(KafkaError, match=next(iter(bad))) as refused:
            checked(bad)
        assert refused.value.code is Code.INVALID_CONFIG


def _vectors() -> dict[str, dict[str, dict[str, str]]]:
    scenarios = yaml.safe_load((VECTORS / "kafka.yaml").read_text())["scenarios"]
    return {scenario["name"]: scenario for scenario in scenarios}


def test_request_of_another_implementation_is_read() -> None:
    raw = bytes.fromhex(_vectors()["wire_api_versions"]["derived"]["request_hex"])
    request = wire.read_request(raw)
    assert (request.api_key, request.version, request.correlation_id) == (18, 3, 1)
    assert (request.client_id, request.body.client_software_name) == ("c", "test")
    with pytest.raises(wire.MalformedRequestError):
        wire.read_request(raw + b"!")


def test_all_topics_are_asked_for_as_librdkafka_does() -> None:
    """It writes the length of an array that is absent in four bytes, and Apache Kafka takes it."""
    raw = bytes.fromhex("0003000c00000005000772646b61666b610000000000010000")
    request = wire.read_request(raw)
    assert (request.api_key, request.version, request.body.topics) == (3, 12, None)
    for other in (raw + b"!", raw[:-1], raw.replace(b"\x00\x0c", b"\x00\x08", 1)):
        with pytest.raises(wire.MalformedRequestError):
            wire.read_request(other)


def test_unknown_version_of_api_versions_is_answered_in_the_oldest_layout() -> None:
    wanted = _vectors()["wire_api_versions_unknown_version"]["derived"]["response_hex"]
    request = wire.Request(18, 9, 1, "", None)
    tree = {
        **wire.api_versions(request),
        "api_keys": [{"api_key": 18, "min_version": 0, "max_version": 3}],
    }
    answer = b"".join(wire.write_response(request, tree))
    assert answer[4:].hex() == wanted


@pytest.mark.parametrize(
    ("name", "api", "tree"),
    [
        ("wire_init_producer_id", 22, {"error_code": 0, "producer_id": 1000, "producer_epoch": 0}),
        (
            "wire_list_offsets",
            2,
            {
                "topics": [
                    {
                        "name": "t",
                        "partitions": [
                            {
                                "partition_index": 0,
                                "error_code": 0,
                                "timestamp": -1,
                                "offset": 42,
                                "leader_epoch": 4,
                            }
                        ],
                    }
                ]
            },
        ),
        (
            "wire_fetch",
            1,
            {
                "error_code": 0,
                "session_id": 0,
                "responses": [
                    {
                        "topic": "t",
                        "partitions": [
                            {
                                "partition_index": 0,
                                "error_code": 0,
                                "high_watermark": 42,
                                "last_stable_offset": 42,
                                "log_start_offset": 0,
                                "aborted_transactions": None,
                                "records": b"\x01\x02\x03",
                            }
                        ],
                    }
                ],
            },
        ),
    ],
)
def test_answers_have_the_bytes_of_another_implementation(
    name: str, api: int, tree: dict[str, object]
) -> None:
    checked_versions = 0
    for key, wanted in _vectors()[name]["derived"].items():
        if not key.endswith("_body_hex"):
            continue
        version = int(key.removeprefix("v").removesuffix("_body_hex"))
        if (api, version) in ((22, 4),):
            continue  # not served
        answer = b"".join(wire.write_response(wire.Request(api, version, 7, "", object()), tree))
        assert answer[8:].hex() == wanted, key
        checked_versions += 1
    assert checked_versions


def test_records_are_written_without_a_copy_and_the_frame_is_whole() -> None:
    def of(*records: bytes) -> list[bytes]:
        rows = [
            {
                "partition_index": index,
                "error_code": 0,
                "high_watermark": 9,
                "last_stable_offset": 9,
                "log_start_offset": 0,
                "aborted_transactions": None,
                "records": record,
            }
            for index, record in enumerate(records)
        ]
        responses = [{"topic": "t", "partitions": rows}]
        tree = {"error_code": 0, "session_id": 0, "responses": responses}
        return wire.write_response(wire.Request(1, 11, 7, "", object()), tree)

    large, small = bytes(range(256)) * 4096, b"small"
    pieces = of(large, small, large)
    assert sum(piece is large for piece in pieces) == 2
    frame = b"".join(pieces)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    rows = read_response(1, 11, frame[8:]).responses[0].partitions
    assert [bytes(row.records) for row in rows] == [large, small, large]
