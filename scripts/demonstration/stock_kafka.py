"""Stock broker of Apache Kafka with tiered storage (KIP-405), and Kafka's clients."""

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from scripts.demonstration import steps
from scripts.demonstration.stock_broker import LOCALHOST, TIMEOUT_S, TOPIC, StockBroker
from streammeta.cli.local.local_cluster import free_ports

_SETTINGS: Mapping[str, object] = MappingProxyType(
    {
        "process.roles": "broker,controller",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 1,
        "remote.log.manager.task.interval.ms": 500,
        "log.retention.check.interval.ms": 500,
        "log.initial.task.delay.ms": 500,
    }
)
# Segments are as small as Kafka permits, and leave the disk as soon as they are in the bucket.
_TOPIC_SETTINGS = {
    "remote.storage.enable": "true",
    "segment.bytes": str(1 << 20),
    "local.retention.bytes": "1",
    "file.delete.delay.ms": "100",
}


class StockKafka(StockBroker):
    """One broker in KRaft mode, and a topic with one partition."""

    name = "Kafka"
    artifact = "kafka_2.13"
    node_id = 1
    row_count = 100_000
    java_options = ("-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")

    def start(self) -> None:
        """Format the log directory, start the broker, and create the topic."""
        (controller_port,) = free_ports(1)
        listener = f"PLAINTEXT://{LOCALHOST}:{self._port}"
        settings = {
            **_SETTINGS,
            "node.id": self.node_id,
            "controller.quorum.voters": f"{self.node_id}@{LOCALHOST}:{controller_port}",
            "listeners": f"{listener},CONTROLLER://{LOCALHOST}:{controller_port}",
            "advertised.listeners": listener,
            "log.dirs": self._folder / "logs",
            "rsm.config.bucket": self._endpoint.store_uri,
        }
        for prefix, manager in (("rsm.config.", "storage"), ("rlmm.config.", "metadata")):
            settings |= self._tls(prefix)
            settings[f"{prefix}endpoints"] = ",".join(self._caller.endpoints)
            settings[f"remote.log.{manager}.manager.class.path"] = self._jars()[0]
        example = self._example("server.properties")
        config = self._write_settings("server.properties", settings, example)

        format_words = ("format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", config)
        self._wait_for_end(self._java("format", "kafka.tools.StorageTool", *format_words))
        self._wait_for_port(self._port, self._java("broker", "kafka.Kafka", config))
        admin = AdminClient(self._client)
        topic = NewTopic(TOPIC, 1, 1, config=_TOPIC_SETTINGS)
        if error := admin.create_topics([topic])[TOPIC].exception(TIMEOUT_S):
            raise RuntimeError(f"Kafka did not create its topic: {error}")

    @property
    def _client(self) -> dict[str, str | int | float | bool]:
        return {"bootstrap.servers": f"{LOCALHOST}:{self._port}"}

    def write(self, rows: Sequence[bytes]) -> None:
        """Produce a record for each row."""
        producer = Producer({**self._client, "acks": "all", "linger.ms": 5})
        failures: list[str] = []

        def on_delivery(error: object, _: object) -> None:
            if error is not None:
                failures.append(str(error))

        for row in rows:
            while True:
                try:
                    producer.produce(TOPIC, row, on_delivery=on_delivery)
                    break
                except BufferError:  # the producer's own queue is full
                    producer.poll(0.1)
        if producer.flush(TIMEOUT_S) or failures:
            raise RuntimeError(f"Kafka did not acknowledge all rows: {failures[:1]}")

    def lose_local_files(self) -> int:
        """Wait until local retention has left the active segment, and return its first offset."""
        folder = self._folder / "logs" / f"{TOPIC}-0"

        def first_offsets() -> list[int]:
            return [int(path.stem) for path in folder.glob("*.log")]

        steps.wait_until(lambda: len(first_offsets()) == 1, "Kafka keeps segments", TIMEOUT_S)
        return first_offsets()[0]

    def read_back(self) -> int:
        """Consume the partition from its beginning, and compare each record with its row."""
        consumer = Consumer({**self._client, "group.id": "readers", "enable.auto.commit": False})
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        read = 0
        with contextlib.closing(consumer):
            while messages := consumer.consume(min(5_000, len(self.rows) - read), TIMEOUT_S / 4):
                for message in messages:
                    if error := message.error():
                        raise RuntimeError(f"Kafka did not return record {read}: {error}")
                    if (message.offset(), message.value()) != (read, self.rows[read]):
                        raise RuntimeError(f"Kafka's record {read} differs from its row")
                    read += 1
        return read
