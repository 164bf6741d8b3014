"""What a group finds of a topic that was written before: prints one JSON object."""

import json
import sys

from confluent_kafka import Consumer, TopicPartition

SERVERS, TOPIC = sys.argv[1:3]


def main() -> None:
    """Read ends and committed offsets."""
    consumer = Consumer({"bootstrap.servers": SERVERS, "group.id": f"{TOPIC}-group"})
    places = [TopicPartition(TOPIC, partition) for partition in range(3)]
    ends = sum(consumer.get_watermark_offsets(place, timeout=30)[1] for place in places)
    committed = sum(one.offset for one in consumer.committed(places, timeout=30))
    consumer.close()
    print(json.dumps({"ends": ends, "committed": committed}))


main()
