"""An idempotent producer of numbers, and a group that reads them meanwhile; prints one JSON object.

Prints "acknowledged N" lines as acknowledgements come, so that a test can kill processes between.
Numbers of a partition ascend in the order they are sent.
"""

import json
import sys
import threading
import time
from typing import Any

from confluent_kafka import Consumer, Producer

SERVERS, TOPIC, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3])
TOLD_EVERY = 2_000
PATIENCE_S = 120.0
PADDING = b"." * 100


class Reader(threading.Thread):
    """A member of the group; `seen` has a number for each partition and offset."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, int], int] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        """Read until stopped."""
        consumer = Consumer(
            {
                "bootstrap.servers": SERVERS,
                "group.id": f"{TOPIC}-group",
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 10_000,
                "topic.metadata.refresh.interval.ms": 1000,
            }
        )
        consumer.subscribe([TOPIC])
        while not self.stopped.is_set():
            for message in consumer.consume(2000, 0.2):
                if message.error() is None:
                    place = (message.partition() or 0, message.offset() or 0)
                    self.seen[place] = int((message.value() or b"").partition(b".")[0])
        consumer.close()


class Acknowledgements:
    """Counts outcomes."""

    def __init__(self) -> None:
        self.count = 0
        self.failed: list[str] = []

    def add(self, error: object, _: Any) -> None:
        """Take the outcome of one record."""
        if error is not None:
            self.failed.append(str(error))
            return
        self.count += 1
        if self.count % TOLD_EVERY == 0:
            print(f"acknowledged {self.count}", flush=True)


def produce() -> Acknowledgements:
    """Send all numbers, and wait for every outcome."""
    producer = Producer(
        {
            "bootstrap.servers": SERVERS,
            "enable.idempotence": True,
            "linger.ms": 20,
            "batch.size": 65_536,
            "queue.buffering.max.messages": 50_000,
            "topic.metadata.refresh.interval.ms": 1000,
            "retry.backoff.max.ms": 500,
        }
    )
    outcomes = Acknowledgements()
    for number in range(COUNT):
        value = b"%d%b" % (number, PADDING)
        while True:
            try:
                producer.produce(TOPIC, value, str(number), on_delivery=outcomes.add)
                break
            except BufferError:  # the producer's own queue is full
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush(PATIENCE_S)
    return outcomes


def main() -> None:
    """Produce and read at the same time; tell what came of it."""
    readers = [Reader(), Reader()]
    for reader in readers:
        reader.start()
    sent = produce()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if len(readers[0].seen.keys() | readers[1].seen.keys()) >= COUNT:
            break
        time.sleep(0.5)
    for reader in readers:
        reader.stopped.set()
        reader.join()
    seen = readers[0].seen | readers[1].seen
    ordered = [seen[place] for place in sorted(seen)]
    places = sorted(seen)
    late = sum(
        places[at][0] == places[at - 1][0] and ordered[at] < ordered[at - 1]
        for at in range(1, len(places))
    )
    answer = {
        "failed": sorted(set(sent.failed)),
        "acknowledged": sent.count,
        "stored": len(seen),
        "numbers": len(set(ordered)),
        "out_of_order": late,
    }
    print(json.dumps(answer))


main()
