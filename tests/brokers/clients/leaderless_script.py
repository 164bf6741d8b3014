"""A producer and a consumer of a topic without leaders while a broker is killed: prints one object.

Prints "produced N" lines as acknowledgements come, so that a test can kill a broker in between.
The records of each partition are numbered from 0.
"""

import json
import sys
import time
from collections import defaultdict
from functools import partial
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

SERVERS, TOPIC, COUNT, PARTITIONS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


def read_all(wanted: int) -> dict[int, list[tuple[Any, int]]]:
    """Read offsets and numbers of all partitions up to `wanted` records, within a minute."""
    consumer = Consumer(
        {
            "bootstrap.servers": SERVERS,
            "group.id": f"{TOPIC}-reader",
            "topic.metadata.refresh.interval.ms": 1000,
        }
    )
    consumer.assign([TopicPartition(TOPIC, place, 0) for place in range(PARTITIONS)])
    seen: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    deadline = time.monotonic() + 60
    while sum(map(len, seen.values())) < wanted and time.monotonic() < deadline:
        for message in consumer.consume(500, 0.2):
            if message.error() is None:
                place = message.partition()
                assert place is not None
                seen[place].append((message.offset(), int(message.value() or b"")))
    consumer.close()
    return seen


def main() -> None:
    """Produce numbers idempotently to each partition, then read them."""
    producer = Producer(
        {
            "bootstrap.servers": SERVERS,
            "enable.idempotence": True,
            "linger.ms": 5,
            "topic.metadata.refresh.interval.ms": 500,
            "retry.backoff.max.ms": 500,
        }
    )
    failed: list[str] = []
    acknowledged: dict[int, list[int]] = defaultdict(list)
    waits: list[float] = []

    def done(sent: float, number: int, error: object, message: Any) -> None:
        if error is not None:
            failed.append(str(error))
            return
        waits.append(time.monotonic() - sent)
        acknowledged[message.partition()].append(number)
        if len(waits) % 100 == 0:
            print(f"produced {len(waits)}", flush=True)

    for index in range(COUNT):
        number, place = divmod(index, PARTITIONS)
        producer.produce(
            TOPIC,
            value=str(number),
            partition=place,
            on_delivery=partial(done, time.monotonic(), number),
        )
        producer.poll(0.005)
    left = producer.flush(60)
    seen = read_all(len(waits))
    print(
        json.dumps(
            {
                "failed": failed,
                "left": left,
                "acknowledged": len(waits),
                "in_order": all(
                    [number for _, number in seen[place]] == sorted(acknowledged[place])
                    for place in range(PARTITIONS)
                ),
                "without_gaps": all(
                    [offset for offset, _ in rows] == list(range(len(rows)))
                    for rows in seen.values()
                ),
                "longest_wait_s": round(max(waits), 3),
            }
        )
    )


main()
