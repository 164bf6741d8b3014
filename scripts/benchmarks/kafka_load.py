"""Loads of a stock client on brokers of Kafka's protocol, in separate processes.

confluent-kafka (librdkafka) produces, consumes, sends records one by one to be read at once, or
measures for how long a broker's end silences a partition.
"""

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import count, pairwise

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from scripts.benchmarks.figures import percentile

RECORD_BYTES = 1024
BATCH_BYTES = 65_536
PARTITIONS = 8
PATIENCE_S = 120.0
SILENCE_S = 1.0
GROUP = {
    "group.id": "bench",
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "fetch.wait.max.ms": 500,
}


def _create_topic(servers: str, topic: str, partitions: int) -> None:
    """Create a topic, and wait until all of its partitions have leaders."""
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
    while True:
        found = admin.list_topics(timeout=30).topics.get(topic)
        leaders = [] if found is None else [part.leader for part in found.partitions.values()]
        if len(leaders) == partitions and min(leaders) >= 0:
            return
        time.sleep(0.1)


def _producer(servers: str, linger_ms: int) -> Producer:
    return Producer(
        {
            "bootstrap.servers": servers,
            "acks": "all",
            "linger.ms": linger_ms,
            "batch.size": BATCH_BYTES,
            "queue.buffering.max.messages": 50_000,
            "topic.metadata.refresh.interval.ms": 500,
            "retry.backoff.max.ms": 200,
            "reconnect.backoff.max.ms": 200,
        }
    )


def _consumer(servers: str, topic: str, partitions: int) -> Consumer:
    consumer = Consumer({"bootstrap.servers": servers, **GROUP})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    return consumer


def _messages(consumer: Consumer, most: int, timeout_s: float) -> Iterator[Message]:
    """Yield the next messages without errors."""
    return (found for found in consumer.consume(most, timeout_s) if found.error() is None)


def produce(*, servers: str, topic: str, mib: int) -> dict[str, float]:
    """Produce records that do not compress, as fast as the broker accepts them."""
    _create_topic(servers, topic, PARTITIONS)
    producer = _producer(servers, 5)
    value = os.urandom(RECORD_BYTES)
    failed: list[str] = []

    def note(error: object, _message: object) -> None:
        if error is not None:
            failed.append(str(error))

    began = time.monotonic()
    for number in range(mib * 1024):
        # Runs of 64 records fill whole batches of a partition.
        partition = number // 64 % PARTITIONS
        while True:
            try:
                producer.produce(topic, value, partition=partition, on_delivery=note)
                break
            except BufferError:  # the producer's own queue is full
                producer.poll(0.01)
        if number % 512 == 0:
            producer.poll(0)
    left = producer.flush(PATIENCE_S)
    return {"seconds": time.monotonic() - began, "failed": len(failed) + left}


def consume(*, servers: str, topic: str, mib: int) -> dict[str, float]:
    """Consume a topic from its beginning."""
    consumer = _consumer(servers, topic, PARTITIONS)
    seen, began = 0, time.monotonic()
    while seen < mib * 1024 and time.monotonic() < began + PATIENCE_S:
        seen += sum(1 for _ in _messages(consumer, 10_000, 0.5))
    seconds = time.monotonic() - began
    consumer.close()
    return {"seconds": seconds, "missing": mib * 1024 - seen}


def latency(*, servers: str, topic: str, linger_ms: int, seconds: float) -> dict[str, float]:
    """Send 100 records a second, and measure until each is consumed."""
    _create_topic(servers, topic, 1)
    consumer, producer = _consumer(servers, topic, 1), _producer(servers, linger_ms)
    latencies_ms: list[float] = []
    wanted = int(seconds * 100)

    def read() -> None:
        while len(latencies_ms) < wanted:
            for message in _messages(consumer, 100, 0.01):
                sent = float((message.value() or b"").split(b" ")[0])
                latencies_ms.append((time.monotonic() - sent) * 1000)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    for _ in range(wanted):
        value = b"%f %b" % (time.monotonic(), bytes(RECORD_BYTES - 20))
        producer.produce(topic, value, partition=0)
        producer.poll(0.01)
    producer.flush(PATIENCE_S)
    reading.join(PATIENCE_S)
    # The first fifth is a warm-up of client and broker.
    measured = latencies_ms[wanted // 5 :]
    return {
        name: round(percentile(measured, at), 1) for name, at in (("p50_ms", 0.5), ("p99_ms", 0.99))
    }


def fail_over(*, servers: str, topic: str, runs: int) -> dict[str, object]:
    """Send numbers to one partition all the time, and measure its silence when its leader ends.

    Prints `leader ID` when that broker is to be killed, and `acknowledged` at the silence's end.
    """
    _create_topic(servers, topic, 1)
    producer = _producer(servers, 0)
    acknowledged_at = [time.monotonic()]
    acknowledged: set[int] = set()
    failed: list[str] = []
    numbers = count()

    def note(number: int, error: object, _: object) -> None:
        if error is not None:
            failed.append(str(error))
        else:
            acknowledged.add(number)
            acknowledged_at.append(time.monotonic())

    def send_for(longest_s: float, silence_s: float) -> float:
        """Send until a silence of at least `silence_s` has ended; return its length, 0 for none."""
        began = time.monotonic()
        while time.monotonic() < began + longest_s:
            number = next(numbers)
            value = b"%d" % number
            producer.produce(topic, value, partition=0, on_delivery=partial(note, number))
            producer.poll(0.01)
            gaps = [now - before for before, now in pairwise(acknowledged_at)]
            if gaps and max(gaps) > silence_s:
                return max(gaps)
            # Only the newest gap matters, and the list would grow for ever.
            del acknowledged_at[:-2]
        return 0.0

    silences_s = []
    for _ in range(runs):
        send_for(2.0, PATIENCE_S)
        print(f"leader {_leader(servers, topic)}", flush=True)
        silences_s.append(round(send_for(PATIENCE_S, SILENCE_S), 2))
        print("acknowledged", flush=True)
    producer.flush(PATIENCE_S)
    lost = len(acknowledged - _stored_numbers(servers, topic))
    return {
        "seconds": silences_s,
        "acknowledged": len(acknowledged),
        "lost": lost,
        "failed": failed,
    }


def _stored_numbers(servers: str, topic: str) -> set[int]:
    """Return the numbers in a topic's only partition."""
    consumer = _consumer(servers, topic, 1)
    end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=PATIENCE_S)[1]
    found: set[int] = set()
    at, deadline = 0, time.monotonic() + PATIENCE_S
    while at < end and time.monotonic() < deadline:
        for message in _messages(consumer, 10_000, 0.5):
            found.add(int(message.value() or b""))
            at = (message.offset() or 0) + 1
    consumer.close()
    return found


def _leader(servers: str, topic: str) -> int:
    """Return the leader of a topic's only partition. A broker that restarts may not answer yet."""
    admin = AdminClient({"bootstrap.servers": servers})
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            found: int = admin.list_topics(topic, timeout=30).topics[topic].partitions[0].leader
            return found
        except KafkaException:
            if time.monotonic() > deadline:
                raise
