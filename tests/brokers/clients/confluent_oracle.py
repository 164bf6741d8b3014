"""The operations of a file by confluent-kafka: prints one JSON array, a result for each.

An operation that fails gives the name of its error.
"""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewPartitions, NewTopic

SERVERS = sys.argv[1]
PATIENCE_S = 60.0

Asked = dict[str, Any]


class FailedError(Exception):
    """An operation failed with an error of the client."""


class Script:
    """Runs operations."""

    def __init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": SERVERS})

    def run(self, asked: Asked) -> Any:
        """Return the result of an operation."""
        return getattr(self, asked["op"])(asked)

    def brokers(self, _: Asked) -> Any:
        """Return the number of brokers."""
        return len(self.admin.describe_cluster().result(60).nodes)

    def create(self, asked: Asked) -> Any:
        """Create a topic."""
        wanted = NewTopic(asked["topic"], asked["partitions"], 1, config=asked.get("configs", {}))
        self.admin.create_topics([wanted])[asked["topic"]].result(60)
        return "done"

    def delete(self, asked: Asked) -> Any:
        """Delete a topic."""
        self.admin.delete_topics([asked["topic"]])[asked["topic"]].result(60)
        return "done"

    def grow(self, asked: Asked) -> Any:
        """Let a topic grow."""
        wanted = NewPartitions(asked["topic"], asked["partitions"])
        self.admin.create_partitions([wanted])[asked["topic"]].result(60)
        return "done"

    def describe(self, asked: Asked) -> Any:
        """Return the number of partitions."""
        found = self.admin.list_topics(timeout=60).topics.get(asked["topic"])
        if found is None:
            raise FailedError("no such topic")
        return len(found.partitions)

    def configs(self, asked: Asked) -> Any:
        """Return settings of a topic."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, asked["topic"])
        found = self.admin.describe_configs([resource])[resource].result(60)
        return {name: found[name].value for name in asked["names"]}

    def produce(self, asked: Asked) -> Any:
        """Produce records; return partition and offset of each."""
        producer = Producer(
            {
                "bootstrap.servers": SERVERS,
                "acks": asked["acks"],
                "compression.type": asked["compression"],
                "enable.idempotence": asked["idempotent"],
                "linger.ms": 20,
            }
        )
        outcomes: list[Any] = []
        for at, key, value in asked["records"]:
            producer.produce(
                asked["topic"],
                value,
                key,
                asked.get("partition", -1),
                timestamp=at,
                on_delivery=lambda error, message: outcomes.append(
                    str(error) if error else [message.partition(), message.offset()]
                ),
            )
        outcomes.append(producer.flush(PATIENCE_S))
        return sorted(outcomes[:-1]) + outcomes[-1:]

    def consume(self, asked: Asked) -> Any:
        """Consume so many records from an offset or the beginning."""
        consumer = _consumer("nobody", "error")
        at = asked.get("from")
        if at is None:
            place = TopicPartition(asked["topic"], asked["partition"])
            at = consumer.get_watermark_offsets(place, timeout=60)[0]
        consumer.assign([TopicPartition(asked["topic"], asked["partition"], at)])
        seen: list[Any] = []
        deadline = time.monotonic() + PATIENCE_S
        try:
            while len(seen) < asked["count"] and time.monotonic() < deadline:
                for message in consumer.consume(100, 0.1):
                    if message.error() is not None:
                        raise KafkaException(message.error())
                    seen.append(_row(message))
        finally:
            consumer.close()
        return seen

    def offset(self, asked: Asked) -> Any:
        """Return an offset by time or name."""
        place = TopicPartition(asked["topic"], asked["partition"])
        names = {"earliest": OffsetSpec.earliest, "latest": OffsetSpec.latest}
        at = asked["at"]
        spec = names[at]() if at in names else OffsetSpec.for_timestamp(at)  # type: ignore[no-untyped-call]
        found = self.admin.list_offsets(
            {place: spec}, isolation_level=IsolationLevel.READ_UNCOMMITTED
        )
        result = found[place].result(60)
        return [result.offset, result.timestamp, result.leader_epoch]

    def delete_records(self, asked: Asked) -> Any:
        """Delete records below an offset; return the first that is left."""
        place = TopicPartition(asked["topic"], asked["partition"], asked["before"])
        (future,) = self.admin.delete_records([place]).values()
        return future.result(60).low_watermark

    def group(self, asked: Asked) -> Any:
        """Consume as a group of two members that share the partitions, and commit."""
        members = [_consumer(asked["group"], "earliest") for _ in range(2)]
        for member in members:
            member.subscribe([asked["topic"]])
        seen: dict[str, Any] = {}
        shares: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for member in members:
                for message in member.consume(100, 0.1):
                    if message.error() is None:
                        seen[f"{message.partition()}/{message.offset()}"] = _row(message)
            shares = [len(member.assignment()) for member in members]
            is_shared = min(shares) > 0 and sum(shares) == asked["partitions"]
            if is_shared and sum(map(_position, members)) == asked["count"]:
                break
        for member in members:
            member.commit(asynchronous=False)
        for member in members:
            member.close()
        return {"shares": sorted(shares), "seen": seen}

    def committed(self, asked: Asked) -> Any:
        """Return the committed offsets of a group."""
        wanted = ConsumerGroupTopicPartitions(asked["group"])
        (future,) = self.admin.list_consumer_group_offsets([wanted]).values()
        found = future.result(60).topic_partitions
        return sorted([place.partition, place.offset] for place in found)

    def group_state(self, asked: Asked) -> Any:
        """Return the state of a group."""
        (future,) = self.admin.describe_consumer_groups([asked["group"]]).values()
        return future.result(60).state.name


def _repeated(script: Script, asked: Asked) -> Any:
    """Return the result once it is the one that is waited for, or the last."""
    deadline = time.monotonic() + PATIENCE_S
    found: Any = None
    while found != asked["until"] and time.monotonic() < deadline:
        with suppress(FailedError):
            found = script.run(asked)
        time.sleep(0.1)
    return found


def _consumer(group: str, reset: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": SERVERS,
            "group.id": group,
            "auto.offset.reset": reset,
            "enable.auto.commit": False,
            "session.timeout.ms": 10_000,
        }
    )


def _position(member: Consumer) -> int:
    """Return the sum of a member's positions."""
    return sum(max(place.offset, 0) for place in member.position(member.assignment()))


def _row(one: Any) -> Any:
    value = one.value()
    return [
        one.offset(),
        one.timestamp()[1],
        one.key().decode(),
        None if value is None else value.decode(),
        one.leader_epoch(),
    ]


def main() -> None:
    """Run all operations."""
    script = Script()
    results: list[Any] = []
    for asked in json.loads(Path(sys.argv[2]).read_text()):
        try:
            results.append(_repeated(script, asked) if "until" in asked else script.run(asked))
        except KafkaException as error:
            results.append({"error": error.args[0].name()})
        except FailedError as error:
            results.append({"error": str(error)})
    print(json.dumps(results))


main()
