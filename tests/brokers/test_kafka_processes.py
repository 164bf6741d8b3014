"""Kafka-shaped brokers as processes, and the stock clients that others wrote."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local_cluster import PROGRAM, Child, LocalCluster, start_child
from tests.kit.real_cluster import FAST, running_cluster

pytestmark = pytest.mark.process

_CLIENTS = Path(__file__).parent / "clients"
_OPTIONS = (*FAST, "--session-timeout-ms", "1500")


class Brokers:
    """Brokers by node id over one cluster of controllers."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.children: dict[int, Child] = {}
        self.addresses: dict[int, str] = {}

    def start(self, node_id: int) -> str:
        """Start a broker; return its address."""
        child = start_child(
            f"kafka {node_id}",
            [
                *PROGRAM,
                "kafka",
                *("--connect", self.cluster.connect, "--store", self.cluster.store_uri),
                *("--node-id", str(node_id), "--listen", "127.0.0.1:0"),
                *("--linger", "5ms", "--partitions", "4"),
            ],
            self.cluster.root / f"kafka-{node_id}.log",
        )
        self.children[node_id] = child
        found = re.search(r"bootstrap\.servers=(\S+)", child.wait_ready())
        assert found is not None
        self.addresses[node_id] = found[1]
        return found[1]

    def run(self, script: str, *words: str) -> Child:
        """Start a script of a stock client."""
        command = [sys.executable, str(_CLIENTS / script), *words]
        return start_child(script, command, self.cluster.root / f"{script}.log")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with running_cluster(tmp_path, 1, _OPTIONS) as cluster:
        found = Brokers(cluster)
        try:
            yield found
        finally:
            for child in found.children.values():
                child.stop()


def _result(child: Child) -> dict[str, Any]:
    last = ""
    while line := child.read_line():
        last = line
    code = child.stop()
    assert code == 0, child.log_tail()
    answer: dict[str, Any] = json.loads(last)
    return answer


@pytest.mark.parametrize("client", ["confluent", "kafka_python", "aiokafka"])
def test_stock_client_produces_consumes_and_commits(brokers: Brokers, client: str) -> None:
    address = brokers.start(1)
    answer = _result(brokers.run(f"{client}_script.py", address, "events"))
    expected = {"failed": [], "left": 0, "same": True, "committed": 500, "ends": 500}
    assert {key: answer[key] for key in expected} == expected
    assert answer.get("behind", 250) == 250


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_nothing_acknowledged_is_lost_when_a_broker_ends(brokers: Brokers, end: str) -> None:
    addresses = [brokers.start(node_id) for node_id in (1, 2)]
    client = brokers.run("failover_script.py", ",".join(addresses), "moved", "2000")
    while client.read_line() != "produced 500":
        assert client.is_running, client.log_tail()
    getattr(brokers.children[1], end)()
    answer = _result(client)
    assert answer == {
        "failed": [],
        "left": 0,
        "acknowledged": 2000,
        "seen": 2000,
        "same": True,
        "in_order": True,
    }


def test_restarted_broker_has_its_records_and_offsets(brokers: Brokers) -> None:
    first = _result(brokers.run("confluent_script.py", brokers.start(1), "kept"))
    brokers.children[1].kill()
    again = brokers.start(1)
    answer = _result(brokers.run("kept_script.py", again, "kept"))
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


def test_hostile_frame_ends_its_own_connection(brokers: Brokers) -> None:
    address = brokers.start(1)
    versions = _framed(b"\x00\x12\x00\x09\x00\x00\x00\x07\xff\xff")
    for name, frame in _HOSTILE.items():
        assert _exchange(address, frame) == b"", name
        answer = _exchange(address, versions)
        # the correlation id, error 35
        assert answer[4:10] == b"\x00\x00\x00\x07\x00\x23", name
