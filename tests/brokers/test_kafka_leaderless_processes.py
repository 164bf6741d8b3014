"""Topics without leaders: two brokers serve the same partitions, and one of them dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from streammeta.client.parts import ControllerClient
from tests.kit.kafka_brokers import KafkaBrokers, result_of, running_brokers
from tests.kit.kafka_wire import WireClient, metadata_tree
from tests.kit.real_cluster import FAST, raise_level
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.process

_LEVEL = 5
_PARTITIONS = 4
_DISKLESS = {"diskless.enable": "true"}


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[KafkaBrokers]:
    with running_brokers(tmp_path, options=(*FAST, "--session-timeout-ms", "1500")) as found:
        raise_level(found.cluster, _LEVEL)
        yield found


def _create(address: str, name: str) -> AdminClient:
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(name, _PARTITIONS, config=_DISKLESS)])[name].result(60)
    return admin


def test_killed_broker_loses_and_repeats_nothing_of_a_topic_without_leaders(
    brokers: KafkaBrokers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each acknowledged record is read once, in the order of its producer and partition."""
    addresses = [brokers.start(node_id, "--shared") for node_id in (1, 2)]
    _create(addresses[0], "free")
    words = (",".join(addresses), "free", "2000", str(_PARTITIONS))
    client = brokers.run("leaderless_script.py", *words)
    while client.read_line() != "produced 500":
        assert client.is_running, client.log_tail()
    brokers.children[1].kill()
    answer = result_of(client)
    with capsys.disabled():
        print(f"\nlongest wait of the producer: {answer.pop('longest_wait_s')} s")
    assert answer == {
        "failed": [],
        "left": 0,
        "acknowledged": 2000,
        "in_order": True,
        "without_gaps": True,
    }


def test_metadata_names_brokers_of_the_rack_of_the_one_that_answers(brokers: KafkaBrokers) -> None:
    addresses = {
        node_id: brokers.start(node_id, "--shared", "--rack", rack)
        for node_id, rack in ((1, "a"), (2, "b"))
    }
    _create(addresses[1], "near")
    for node_id, address in addresses.items():
        # A stock client may ask another broker than the one of its address.
        with WireClient(address) as client:
            (topic,) = client.call(3, 8, metadata_tree("near")).topics
        assert {row.leader_id for row in topic.partitions} == {node_id}


def test_broker_without_shared_streams_rejects_a_topic_without_leaders(
    brokers: KafkaBrokers,
) -> None:
    with pytest.raises(KafkaException, match="--shared"):
        _create(brokers.start(1), "free")


def test_topic_without_leaders_grows_and_is_deleted_with_its_streams(
    brokers: KafkaBrokers,
) -> None:
    admin = _create(brokers.start(1, "--shared"), "free")
    admin.create_partitions([NewPartitions("free", 6)])["free"].result(60)
    partitions = admin.list_topics("free", timeout=60).topics["free"].partitions
    assert {row.leader for row in partitions.values()} == {1}
    assert len(partitions) == 6
    wait_until(lambda: _tagged(brokers) == 6, "a stream of each partition")
    admin.delete_topics(["free"])["free"].result(60)
    wait_until(lambda: _tagged(brokers) == 0, "the streams to be deleted")


def _tagged(brokers: KafkaBrokers) -> int:
    """Return the number of streams of partitions."""

    async def count() -> int:
        async with ControllerClient(brokers.cluster.endpoints) as client:
            return len([row.stream_id async for row in client.describe_streams() if row.tags])

    return asyncio.run(count())


def test_producer_goes_on_when_a_broker_stops_in_order(brokers: KafkaBrokers) -> None:
    """Owned and diskless topics take the same producer's records, whose ids come from one place."""
    addresses = [brokers.start(node_id, "--shared") for node_id in (1, 2)]
    admin = _create(addresses[0], "free")
    admin.create_topics([NewTopic("led", _PARTITIONS)])["led"].result(60)
    failed: list[str] = []
    servers = ",".join(addresses)
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for number in range(400):
        for topic in ("free", "led"):
            producer.produce(
                topic,
                str(number),
                on_delivery=lambda error, _: failed.append(str(error)) if error else None,
            )
        producer.poll(0)
        if number == 200:
            assert brokers.children[1].stop(60) == 0
    assert producer.flush(60) == 0
    assert failed == []
    reader = Consumer({"bootstrap.servers": addresses[1], "group.id": "ends"})
    for topic in ("free", "led"):
        places = [TopicPartition(topic, place) for place in range(_PARTITIONS)]
        ends = [reader.get_watermark_offsets(place, timeout=60)[1] for place in places]
        assert sum(ends) == 400
    reader.close()
