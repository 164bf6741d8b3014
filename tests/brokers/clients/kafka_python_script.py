"""Operations of kafka-python against a broker: prints one JSON object."""

import json
import sys

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic

SERVERS, TOPIC = sys.argv[1:3]
COUNT = 500


def main() -> None:
    """Create, produce with gzip, consume as a group, commit, look offsets up by time."""
    admin = KafkaAdminClient(bootstrap_servers=SERVERS)
    admin.create_topics([NewTopic(name=TOPIC, num_partitions=2, replication_factor=1)])
    producer = KafkaProducer(bootstrap_servers=SERVERS, acks="all", compression_type="gzip")
    sent = [
        producer.send(TOPIC, value=f"value {number}".encode(), timestamp_ms=1000 + number)
        for number in range(COUNT)
    ]
    producer.flush(60)
    failed = [str(future.exception) for future in sent if future.failed()]
    consumer = KafkaConsumer(
        TOPIC,
        bootstrap_servers=SERVERS,
        group_id=f"{TOPIC}-group",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=30_000,
    )
    seen: list[str] = []
    for message in consumer:
        seen.append(message.value.decode())
        if len(seen) == COUNT:
            break
    consumer.commit()
    places = [TopicPartition(TOPIC, partition) for partition in range(2)]
    committed = sum(consumer.committed(place) or 0 for place in places)
    ends = sum(consumer.end_offsets(places).values())
    found = consumer.offsets_for_times(dict.fromkeys(places, 1000 + COUNT // 2))
    behind = sum(
        ends_at - found[place].offset
        for place, ends_at in consumer.end_offsets(places).items()
        if found[place]
    )
    consumer.close()
    wanted = sorted(f"value {number}" for number in range(COUNT))
    answer = {"failed": failed, "left": 0, "same": sorted(seen) == wanted, "behind": behind}
    print(json.dumps({**answer, "committed": committed, "ends": ends}))


main()
