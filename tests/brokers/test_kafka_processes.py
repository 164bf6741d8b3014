"""Kafka-shaped brokers as processes, and the stock clients that others wrote."""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.cli.local import local_cluster
from streammeta.client.parts import ControllerClient
from tests.kit.certificates import Authority
from tests.kit.kafka_batches import Rec, make_batch
from tests.kit.kafka_brokers import KafkaBrokers, result_of, running_brokers
from tests.kit.kafka_wire import WireClient, produce_tree
from tests.kit.real_cluster import FAST
from tests.kit.waiting import until, wait_until

pytestmark = pytest.mark.process

_OPTIONS = (*FAST, "--session-timeout-ms", "1500")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[KafkaBrokers]:
    with running_brokers(tmp_path, options=_OPTIONS) as found:
        yield found


@pytest.mark.parametrize("client", ["confluent", "kafka_python", "aiokafka"])
def test_stock_client_produces_consumes_and_commits(brokers: KafkaBrokers, client: str) -> None:
    address = brokers.start(1)
    answer = result_of(brokers.run(f"{client}_script.py", address, "events"))
    expected = {"failed": [], "left": 0, "same": True, "committed": 500, "ends": 500}
    assert {key: answer[key] for key in expected} == expected
    assert answer.get("behind", 250) == 250


_REFUSED_FOR_GOOD = {
    "confluent": "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "kafka_python": "TransactionalIdAuthorizationFailedError",
    "aiokafka": "TransactionalIdAuthorizationFailed",
}


@pytest.mark.parametrize("client", list(_REFUSED_FOR_GOOD))
def test_transactions_are_refused_once_and_for_all(brokers: KafkaBrokers, client: str) -> None:
    """A client that took it for passing would ask until its time is over."""
    address = brokers.start(1)
    answer = result_of(brokers.run("transaction_script.py", client, address))
    assert answer == {"error": _REFUSED_FOR_GOOD[client]}


_NOTHING_LOST = {
    "failed": [],
    "left": 0,
    "unplaced": 0,
    "lost": [],
    "acknowledged": 2000,
    "seen": 2000,
    "same": True,
    "in_order": True,
}


def _produce_over_two(brokers: KafkaBrokers) -> tuple[local_cluster.Child, list[str]]:
    """Return a client that has produced a quarter of its records, and two brokers' addresses."""
    addresses = [brokers.start(node_id) for node_id in (1, 2)]
    client = brokers.run("failover_script.py", ",".join(addresses), "moved", "2000")
    while client.read_line() != "produced 500":
        assert client.is_running, client.log_tail()
    return client, addresses


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_nothing_acknowledged_is_lost_when_a_broker_ends(brokers: KafkaBrokers, end: str) -> None:
    client, _ = _produce_over_two(brokers)
    getattr(brokers.children[1], end)()
    assert result_of(client) == _NOTHING_LOST


def _leaders(address: str, topic: str) -> set[int]:
    admin = AdminClient({"bootstrap.servers": address})
    return {one.leader for one in admin.list_topics(timeout=60).topics[topic].partitions.values()}


def test_broker_that_was_replaced_while_it_stood_still_joins_again(brokers: KafkaBrokers) -> None:
    client, addresses = _produce_over_two(brokers)
    process = psutil.Process(brokers.children[1].pid)
    process.suspend()
    wait_until(lambda: _leaders(addresses[1], "moved") == {2}, "the other to lead everything")
    process.resume()
    assert result_of(client) == _NOTHING_LOST
    wait_until(lambda: _leaders(addresses[0], "moved") == {1, 2}, "the first to lead again")
    assert process.is_running()


def test_broker_ends_when_a_newer_process_has_its_node_id(brokers: KafkaBrokers) -> None:
    brokers.start(1)
    older = brokers.children[1]
    newer = brokers.start(1)
    wait_until(lambda: not older.is_running, "the older process to end")
    assert older.stop() == 1
    assert "newer" in older.log_tail()
    admin = AdminClient({"bootstrap.servers": newer})
    assert list(admin.list_topics(timeout=60).brokers) == [1]


def test_restarted_broker_has_its_records_and_offsets(brokers: KafkaBrokers) -> None:
    first = result_of(brokers.run("confluent_script.py", brokers.start(1), "kept"))
    brokers.children[1].kill()
    again = brokers.start(1)
    answer = result_of(brokers.run("kept_script.py", again, "kept"))
    assert answer == {"ends": 500, "committed": first["committed"]}


def test_clients_that_show_a_certificate_connect_over_tls(
    brokers: KafkaBrokers, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "clients")
    own, client = authority.issue("broker/1"), authority.issue("broker/7")
    address = brokers.start(1, *local_cluster.tls_words(own, "listen-tls"))
    trusting = {"bootstrap.servers": address, "security.protocol": "SSL"}
    trusting["ssl.ca.location"] = str(authority.ca)
    shown = {
        "ssl.certificate.location": str(client.certificate),
        "ssl.key.location": str(client.key),
    }
    admin = AdminClient({**trusting, **shown})
    admin.create_topics([NewTopic("secret", 1)])["secret"].result(60)
    assert set(admin.list_topics(timeout=60).topics) == {"secret"}
    for settings in (trusting, {"bootstrap.servers": address}):
        with pytest.raises(KafkaException):
            AdminClient({**settings}).list_topics(timeout=2)


async def _partition_streams(cluster: local_cluster.LocalCluster) -> list[int]:
    async with ControllerClient(cluster.endpoints) as client:
        return [id_.stream_id async for id_ in client.describe_streams() if "0" in id_.tags]


async def test_streams_of_a_deleted_topic_are_deleted(brokers: KafkaBrokers) -> None:
    admin = AdminClient({"bootstrap.servers": brokers.start(1)})
    for name in ("kept", "gone"):
        admin.create_topics([NewTopic(name, 2)])[name].result(60)

    async def has_streams(count: int) -> bool:
        return len(await _partition_streams(brokers.cluster)) == count

    await until(lambda: has_streams(12))
    admin.delete_topics(["gone"])["gone"].result(60)
    await until(lambda: has_streams(6))
    assert set(admin.list_topics(timeout=60).topics) == {"kept"}


async def test_partitions_move_to_a_broker_that_joins(brokers: KafkaBrokers) -> None:
    first = brokers.start(1)
    before = result_of(brokers.run("confluent_script.py", first, "shared"))
    second = brokers.start(2)
    admin = AdminClient({"bootstrap.servers": second})

    async def is_shared() -> bool:
        partitions = admin.list_topics("shared", timeout=60).topics["shared"].partitions
        return {partition.leader for partition in partitions.values()} == {1, 2}

    await until(is_shared)
    answer = result_of(brokers.run("kept_script.py", second, "shared"))
    assert answer == {"ends": 500, "committed": before["committed"]}


_BOMB_BYTES = 64 * 1024 * 1024


def test_batch_that_expands_to_much_is_kept_as_it_came(brokers: KafkaBrokers) -> None:
    address = brokers.start(1)
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("bomb", 1)])["bomb"].result(60)
    batch = make_batch([Rec(time.time_ns() // 1_000_000, None, bytes(_BOMB_BYTES))], attributes=1)
    process = psutil.Process(brokers.children[1].pid)
    before = process.memory_info().rss
    consumer = Consumer({"bootstrap.servers": address, "group.id": "nobody"})
    place = TopicPartition("bomb", 0)
    with WireClient(address) as client:
        while consumer.get_watermark_offsets(place, timeout=60)[1] == 0:
            produced = client.call(0, 8, produce_tree({0: batch}, "bomb"))
    consumer.close()
    assert produced.responses[0].partition_responses[0].error_code == Code.NONE
    assert process.memory_info().rss - before < _BOMB_BYTES


def _produce(address: str, topic: str, numbers: range) -> Producer:
    producer = Producer({"bootstrap.servers": address, "message.timeout.ms": 600_000})
    for number in numbers:
        producer.produce(topic, str(number).encode())
    return producer


def _joins(brokers: KafkaBrokers, node_id: int) -> int:
    with urllib.request.urlopen(f"http://{brokers.http[node_id]}/metrics", timeout=60) as page:
        found = re.search(r"^streammeta_kafka_joins_total (\d+)", page.read().decode(), re.M)
    assert found is not None
    return int(found[1])


def test_a_broker_that_only_lost_time_goes_on_with_its_partitions(brokers: KafkaBrokers) -> None:
    """Nobody took over: the same process leads under the same epochs, and keeps its connections."""
    address = brokers.start(1, "--session", "2s", "--http-listen", "127.0.0.1:0")
    assert _produce(address, "kept", range(100)).flush(60) == 0
    admin = AdminClient({"bootstrap.servers": address})
    process = psutil.Process(brokers.children[1].pid)
    process.suspend()
    controller = brokers.cluster.children[1]
    wait_until(lambda: "nodes_fenced" in controller.log_tail(), "the broker to be fenced")
    process.resume()
    assert _produce(address, "kept", range(100, 200)).flush(60) == 0
    assert _leaders(address, "kept") == {1}
    assert _joins(brokers, 1) == 1
    assert "streams_released" not in controller.log_tail()
    consumer = Consumer({"bootstrap.servers": address, "group.id": "g"})
    ends = [
        consumer.get_watermark_offsets(TopicPartition("kept", at), timeout=60)[1] for at in range(4)
    ]
    consumer.close()
    assert sum(ends) == 200
    assert set(admin.list_topics(timeout=60).brokers) == {1}


def test_a_broker_without_controllers_ends_on_a_signal_and_says_what_it_leaves(
    brokers: KafkaBrokers,
) -> None:
    address = brokers.start(1)
    assert _produce(address, "left", range(100)).flush(60) == 0
    for controller in brokers.cluster.children.values():
        controller.kill()
    producer = _produce(address, "left", range(100, 200))
    producer.poll(1)
    assert brokers.children[1].stop(120) == 0
    assert "with 4 partitions not closed" in brokers.children[1].log_tail()
    producer.purge(in_queue=True, in_flight=True, blocking=True)


def test_a_broker_ends_on_a_signal_while_it_still_joins(brokers: KafkaBrokers) -> None:
    for controller in brokers.cluster.children.values():
        controller.kill()
    (port,) = local_cluster.free_ports(1)
    words = ["--connect", brokers.cluster.connect, "--store", brokers.cluster.store_uri]
    listen = ["--node-id", "1", "--listen", f"127.0.0.1:{port}"]
    log = brokers.cluster.root / "joining.log"
    child = local_cluster.start_child(
        "joining", [*local_cluster.PROGRAM, "kafka", *words, *listen], log
    )
    try:
        wait_until(lambda: _is_open(port), "the listener")
    finally:
        assert child.stop(120) == 0


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 30).close()
    except OSError:
        return False
    return True
