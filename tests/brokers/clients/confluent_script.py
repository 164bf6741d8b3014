"""Operations of confluent-kafka (librdkafka) against a broker: prints one JSON object."""

import json
import sys

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

SERVERS, TOPIC = sys.argv[1:3]
COUNT = 500


def main() -> None:
    """Create, produce idempotently with lz4, consume as a group, commit, read back."""
    admin = AdminClient({"bootstrap.servers": SERVERS})
    for future in admin.create_topics([NewTopic(TOPIC, 3)]).values():
        future.result(60)
    producer = Producer(
        {"bootstrap.servers": SERVERS, "enable.idempotence": True, "compression.type": "lz4"}
    )
    failed: list[str] = []
    for number in range(COUNT):
        producer.produce(
            TOPIC,
            key=str(number),
            value=f"value {number}",
            on_delivery=lambda error, _: failed.append(str(error)) if error else None,
        )
    left = producer.flush(60)
    consumer = Consumer(
        {
            "bootstrap.servers": SERVERS,
            "group.id": f"{TOPIC}-group",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([TOPIC])
    seen: list[str] = []
    while len(seen) < COUNT:
        message = consumer.poll(30)
        if message is None:
            break
        if message.error() is None:
            seen.append((message.value() or b"").decode())
    consumer.commit(asynchronous=False)
    places = [TopicPartition(TOPIC, partition) for partition in range(3)]
    committed = sum(place.offset for place in consumer.committed(places, timeout=60))
    ends = sum(consumer.get_watermark_offsets(place, timeout=60)[1] for place in places)
    consumer.close()
    wanted = sorted(f"value {number}" for number in range(COUNT))
    answer = {"failed": failed, "left": left, "same": sorted(seen) == wanted}
    print(json.dumps({**answer, "committed": committed, "ends": ends}))


main()
