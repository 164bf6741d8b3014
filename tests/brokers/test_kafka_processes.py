"""Kafka-shaped brokers as processes, and the stock clients that others wrote."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.kafka_brokers import KafkaBrokers, result_of
from tests.kit.real_cluster import FAST, running_cluster

pytestmark = pytest.mark.process

_OPTIONS = (*FAST, "--session-timeout-ms", "1500")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[KafkaBrokers]:
    with running_cluster(tmp_path, 1, _OPTIONS) as cluster:
        found = KafkaBrokers(cluster)
        try:
            yield found
        finally:
            found.stop()


@pytest.mark.parametrize("client", ["confluent", "kafka_python", "aiokafka"])
def test_stock_client_produces_consumes_and_commits(brokers: KafkaBrokers, client: str) -> None:
    address = brokers.start(1)
    answer = result_of(brokers.run(f"{client}_script.py", address, "events"))
    expected = {"failed": [], "left": 0, "same": True, "committed": 500, "ends": 500}
    assert {key: answer[key] for key in expected} == expected
    assert answer.get("behind", 250) == 250


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_nothing_acknowledged_is_lost_when_a_broker_ends(brokers: KafkaBrokers, end: str) -> None:
    addresses = [brokers.start(node_id) for node_id in (1, 2)]
    client = brokers.run("failover_script.py", ",".join(addresses), "moved", "2000")
    while client.read_line() != "produced 500":
        assert client.is_running, client.log_tail()
    getattr(brokers.children[1], end)()
    answer = result_of(client)
    assert answer == {
        "failed": [],
        "left": 0,
        "acknowledged": 2000,
        "seen": 2000,
        "same": True,
        "in_order": True,
    }


def test_restarted_broker_has_its_records_and_offsets(brokers: KafkaBrokers) -> None:
    first = result_of(brokers.run("confluent_script.py", brokers.start(1), "kept"))
    brokers.children[1].kill()
    again = brokers.start(1)
    answer = result_of(brokers.run("kept_script.py", again, "kept"))
    assert answer == {"ends": 500, "committed": first["committed"]}


def _exchange(address: str, frame: bytes) -> bytes:
    """Send bytes; return what comes until the broker closes the connection, or answers."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(frame)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while data := connection.recv(65536):
            found += data
        return found


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


_HOSTILE = {
    "huge": b"\x7f\xff\xff\xff",
    "negative": b"\xff\xff\xff\xff",
    "tiny": b"\x00\x00\x00\x02ab",
    "unknown API": _framed(b"\x03\xe7\x00\x00\x00\x00\x00\x01\xff\xff"),
    "array": _framed(b"\x00\x03\x00\x08\x00\x00\x00\x01\xff\xff\x7f\xff\xff\xff"),
    "old produce": _framed(b"\x00\x00\x00\x02\x00\x00\x00\x01\xff\xff"),
    "cut": _framed(b"\x00\x00\x00\x08\x00\x00\x00\x01\xff\xff\xff\xff\xff\xff\x00\x00"),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


def test_hostile_frame_ends_its_own_connection(brokers: KafkaBrokers) -> None:
    address = brokers.start(1)
    versions = _framed(b"\x00\x12\x00\x09\x00\x00\x00\x07\xff\xff")
    for name, frame in _HOSTILE.items():
        assert _exchange(address, frame) == b"", name
        answer = _exchange(address, versions)
        # the correlation id, error 35
        assert answer[4:10] == b"\x00\x00\x00\x07\x00\x23", name
