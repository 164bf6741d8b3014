"""A producer and a consumer group while a broker is killed: prints one JSON object.

Prints "produced N" lines as acknowledgements come, so that a test can kill a broker in between.
Records that are acknowledged without an offset are `unplaced`: librdkafka concludes from a later
batch that they are stored, which no answer has said.
"""

import json
import sys
import time
from functools import partial
from typing import Any

from confluent_kafka import Consumer, Producer

SERVERS, TOPIC, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3])


def read_as_group() -> list[tuple[Any, Any, int]]:
    """Read `COUNT` records as two members of a group; give up after a minute."""
    members = [
        Consumer(
            {
                "bootstrap.servers": SERVERS,
                "group.id": f"{TOPIC}-group",
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6000,
                "topic.metadata.refresh.interval.ms": 1000,
            }
        )
        for _ in range(2)
    ]
    for member in members:
        member.subscribe([TOPIC])
    seen: list[tuple[Any, Any, int]] = []
    deadline = time.monotonic() + 60
    while len(seen) < COUNT and time.monotonic() < deadline:
        for member in members:
            seen += [
                (message.partition(), message.offset(), int(message.value() or b""))
                for message in member.consume(500, 0.1)
                if message.error() is None
            ]
    for member in members:
        member.close()
    return seen


def main() -> None:
    """Produce numbers idempotently, then read all of them as a group of two members."""
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
    unplaced: list[int] = []
    acknowledged: list[tuple[Any, Any, int]] = []

    def done(number: int, error: object, message: Any) -> None:
        if error is not None:
            failed.append(str(error))
            return
        if message.offset() is None:
            unplaced.append(number)
        acknowledged.append((message.partition(), message.offset(), number))
        if len(acknowledged) % 100 == 0:
            print(f"produced {len(acknowledged)}", flush=True)

    for number in range(COUNT):
        producer.produce(
            TOPIC,
            key=str(number),
            value=str(number),
            on_delivery=partial(done, number),
        )
        producer.poll(0.005)
    left = producer.flush(60)
    seen = read_as_group()
    known = [row for row in acknowledged if row[1] is not None]
    found = sorted(row for row in seen if row[2] not in unplaced)
    print(
        json.dumps(
            {
                "failed": failed,
                "left": left,
                "unplaced": len(unplaced),
                "lost": sorted({row[2] for row in acknowledged} - {row[2] for row in seen}),
                "acknowledged": len(acknowledged),
                "seen": len(seen),
                "same": found == sorted(known),
                "in_order": all(
                    [number for where, _, number in seen if where == place]
                    == sorted(number for where, _, number in seen if where == place)
                    for place in {where for where, _, _ in seen}
                ),
            }
        )
    )


main()
