"""The shapes in Python and a client, beside stock brokers in one bucket: written, killed, read."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import NamedObjects, OwnerStream, StreamClient
from tests.brokers.test_rocketmq_processes import _check as check_queues
from tests.brokers.test_three_shapes import Printing, check_ledgers
from tests.kit.kafka_brokers import KafkaBrokers

# Different from those of the stock brokers. The checks of queues and ledgers use 9 and 7.
_KAFKA_NODE, _CLIENT_NODE, _LEDGERS_NODE, _QUEUES_NODE = 5, 6, 7, 9
_TOPIC = "shape"
_PAUSE_S = 0.02
_PATIENCE_S = 60.0


class ShapesPeer:
    """Brokers of the three shapes, and a client with a stream and named objects."""

    name = "shapes"

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._kafka = KafkaBrokers(cluster)
        self._address = self._kafka.start(_KAFKA_NODE, "--partitions", "1")
        self._printing: list[Printing] = []
        self._is_writing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._acknowledged = {"kafka": 0, "client": 0}
        self._stream_id = 0

    def ask(self, command: str) -> int:
        """Have a command done; return the number of messages acknowledged so far."""
        getattr(self, f"_{command}")()
        lines = sum(len(printing.lines) for printing in self._printing)
        return lines + sum(self._acknowledged.values())

    def close(self) -> None:
        self._stop()
        self._kafka.stop()

    def _write(self) -> None:
        self._is_writing.set()
        self._printing = [
            Printing(self._cluster, "rocketmq_broker.py", _QUEUES_NODE),
            Printing(self._cluster, "pulsar_rolling_broker.py", _LEDGERS_NODE),
        ]
        self._threads = [
            threading.Thread(target=self._produce),
            threading.Thread(target=lambda: asyncio.run(self._append())),
        ]
        for thread in self._threads:
            thread.start()

    def _kill(self) -> None:
        self._kafka.children[_KAFKA_NODE].kill()

    def _start(self) -> None:
        self._kafka.start(_KAFKA_NODE, "--partitions", "1")
        for printing in self._printing:
            printing.restart()

    def _stop(self) -> None:
        self._is_writing.clear()
        for thread in self._threads:
            thread.join()
        for printing in self._printing:
            printing.kill()

    def _settle(self) -> None:
        """Nothing is anywhere but in the bucket."""

    def _read(self) -> None:
        queues, ledgers = self._printing
        ends = {(topic, int(number)): int(end) for _, topic, number, end in queues.lines}
        asyncio.run(check_queues(self._cluster, ends))
        asyncio.run(check_ledgers(self._cluster, ledgers.lines))
        asyncio.run(self._read_stream())
        assert self._consume() >= set(range(self._acknowledged["kafka"]))

    def _produce(self) -> None:
        """Produce numbers in order, each acknowledged before the next."""
        config: dict[str, Any] = {"bootstrap.servers": self._address, "enable.idempotence": True}
        producer = Producer({**config, "message.timeout.ms": 300_000})

        def count(error: object, _: Any) -> None:
            assert error is None, error
            self._acknowledged["kafka"] += 1

        while self._is_writing.wait(_PAUSE_S) and self._is_writing.is_set():
            producer.produce(
                _TOPIC, _content("kafka", self._acknowledged["kafka"]), on_delivery=count
            )
            producer.flush()

    def _consume(self) -> set[int]:
        numbers: set[int] = set()
        consumer = Consumer({"bootstrap.servers": self._address, "group.id": "readers"})
        consumer.assign([TopicPartition(_TOPIC, 0, 0)])
        deadline = time.monotonic() + _PATIENCE_S
        while len(numbers) < self._acknowledged["kafka"] and time.monotonic() < deadline:
            for message in consumer.consume(1000, 1.0):
                value = message.value() or b""
                number = int(value.split()[1])
                assert value == _content("kafka", number)
                numbers.add(number)
        consumer.close()
        return numbers

    async def _append(self) -> None:
        """Append a record and put a named object, again and again."""
        async with await self._client(_CLIENT_NODE) as client:
            stream = await client.create_stream()
            self._stream_id = stream.id
            named = NamedObjects(client.session, client.store)
            while self._is_writing.is_set():
                number = self._acknowledged["client"]
                assert await stream.append(_content("record", number)) == number
                data = _content("object", number)
                await named.put(f"client/{number:08}", data, owner=OwnerStream(stream.id))
                self._acknowledged["client"] += 1
                await asyncio.sleep(_PAUSE_S)

    async def _read_stream(self) -> None:
        async with await self._client(_CLIENT_NODE) as client:
            named = NamedObjects(client.session, client.store)
            records = [record.payload async for record in client.stream(self._stream_id)]
            for number in range(self._acknowledged["client"]):
                assert records[number] == _content("record", number)
                assert await named.get(f"client/{number:08}") == _content("object", number)

    def _client(self, node_id: int) -> Any:
        return StreamClient.open(self._cluster.endpoints, self._cluster.store_uri, node_id=node_id)


def _content(kind: str, number: int) -> bytes:
    return b"%s %d %s" % (kind.encode(), number, bytes(number % 500))
