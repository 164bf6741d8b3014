"""Stock Kafka clients of the demo: an idempotent producer, and a group of two consumers.

A separate process that uses Kafka's protocol and the rows, but nothing of streammeta. Prints an
event a line, as JSON: `acknowledged` with a number of records, and finally `done`.

Example: python -m scripts.demonstration.kafka_clients 127.0.0.1:9092 flights 100000
"""

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from confluent_kafka import Consumer, Message, Producer

from scripts.demonstration.dataset import NAMES, load

MEMBERS = 2
TOLD_EVERY = 1_000
"""Acknowledged records between two events."""
PATIENCE_S = 60.0
"""Time for the group to read the rest after the end of the producer."""
ROWS_A_TURN = 50
TURN_S = 0.004
"""Pause between two turns of the producer, which must outlive the failover, not break a record."""


def tell(event: str, **facts: object) -> None:
    """Print an event."""
    print(json.dumps({"event": event, **facts}), flush=True)


class Acknowledgements:
    """Counter of acknowledged records, and of the longest silence of a partition."""

    def __init__(self) -> None:
        self.count = 0
        self.failures: list[str] = []
        self.longest_wait_s = 0.0
        self._newest: dict[int | None, float] = {}

    def add(self, error: object, message: Message) -> None:
        """Handle the outcome of one record."""
        if error is not None:
            self.failures.append(str(error))
            return
        now = time.monotonic()
        before = self._newest.get(message.partition(), now)
        self._newest[message.partition()] = now
        self.longest_wait_s = max(self.longest_wait_s, now - before)
        self.count += 1
        if self.count % TOLD_EVERY == 0:
            tell("acknowledged", count=self.count)


class Group:
    """Two members of one group, and the row at each partition and offset."""

    def __init__(self, servers: str, topic: str) -> None:
        self.rows: dict[tuple[int, int], int] = {}
        self.delivered = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        settings = {
            "bootstrap.servers": servers,
            "group.id": f"{topic}-readers",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6000,
            "topic.metadata.refresh.interval.ms": 500,
        }
        self._members = [
            threading.Thread(target=self._read, args=(settings, topic)) for _ in range(MEMBERS)
        ]

    def start(self) -> None:
        """Join and read until `stop`."""
        for member in self._members:
            member.start()

    def stop(self) -> None:
        """Leave."""
        self._stopped.set()
        for member in self._members:
            member.join()

    def _read(self, settings: Mapping[str, Any], topic: str) -> None:
        consumer = Consumer(dict(settings))
        consumer.subscribe([topic])
        while not self._stopped.is_set():
            taken = [message for message in consumer.consume(500, 0.1) if message.error() is None]
            with self._lock:
                self.delivered += len(taken)
                for message in taken:
                    place = (message.partition() or 0, message.offset() or 0)
                    self.rows[place] = int((message.value() or b"").partition(b",")[0])
        consumer.close()


def produce(servers: str, topic: str, rows: list[tuple[str, bytes]]) -> Acknowledgements:
    """Send all rows under their keys, and wait for every outcome."""
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "linger.ms": 10,
            "compression.type": "lz4",
            "topic.metadata.refresh.interval.ms": 500,
            "retry.backoff.max.ms": 500,
        }
    )
    acknowledgements = Acknowledgements()
    for number, (key, row) in enumerate(rows):
        send = partial(producer.produce, topic, b"%d,%b" % (number, row), key)
        while True:
            try:
                send(on_delivery=acknowledgements.add)
                break
            except BufferError:  # the producer's own queue is full
                producer.poll(0.1)
        if number % ROWS_A_TURN == 0:
            time.sleep(TURN_S)
            producer.poll(0)
    producer.flush(PATIENCE_S)
    return acknowledgements


def out_of_order(places: Mapping[tuple[int, int], int], rows: list[tuple[str, bytes]]) -> int:
    """Return the number of rows that follow a later row of the same key."""
    newest: dict[str, int] = defaultdict(lambda: -1)
    late = 0
    for place in sorted(places):
        number = places[place]
        key = rows[number][0]
        late += number < newest[key]
        newest[key] = max(newest[key], number)
    return late


def main() -> None:
    """Produce and consume at the same time, and print the outcome."""
    servers, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rows = list(load(NAMES[0], count).rows)
    group = Group(servers, topic)
    group.start()
    sent = produce(servers, topic, rows)
    deadline = time.monotonic() + PATIENCE_S
    while len(group.rows) < len(rows) and time.monotonic() < deadline:
        time.sleep(0.1)
    group.stop()
    numbers = set(group.rows.values())
    tell(
        "done",
        rows=len(rows),
        acknowledged=sent.count,
        failures=sorted(set(sent.failures)),
        longest_wait_of_a_partition_s=round(sent.longest_wait_s, 2),
        consumed=len(numbers),
        stored_twice=len(group.rows) - len(numbers),
        out_of_order=out_of_order(group.rows, rows),
        delivered_again=group.delivered - len(group.rows),
    )


if __name__ == "__main__":
    main()
