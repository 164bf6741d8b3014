"""What a group finds of a topic that was written before: prints one JSON object."""

import json
import sys
import time

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

SERVERS, TOPIC = sys.argv[1:3]


def end_of(consumer: Consumer, place: TopicPartition) -> int:
    """Return the end of a partition, asked for again while it moves to another broker."""
    until = time.monotonic() + 30
    while True:
        try:
            return int(consumer.get_watermark_offsets(place, timeout=60)[1])
        except KafkaException as error:
            moves = error.args[0].code() == KafkaError.NOT_LEADER_FOR_PARTITION
            if not moves or time.monotonic() > until:
                raise
            time.sleep(0.05)


def main() -> None:
    """Read ends and committed offsets."""
    consumer = Consumer({"bootstrap.servers": SERVERS, "group.id": f"{TOPIC}-group"})
    places = [TopicPartition(TOPIC, partition) for partition in range(3)]
    ends = sum(end_of(consumer, place) for place in places)
    committed = sum(place.offset for place in consumer.committed(places, timeout=60))
    consumer.close()
    print(json.dumps({"ends": ends, "committed": committed}))


main()
