"""A stock client's load on brokers that speak Kafka's protocol: prints one JSON object.

A process of its own that knows nothing of streammeta: confluent-kafka (librdkafka) produces,
consumes, sends records one by one to be read at once, or watches how long a broker's end silences a
partition. `failover` prints "ready" before each broker's end is due, and a line after it.

Example: python -m scripts.benchmarks.kafka_load produce 127.0.0.1:9092 topic 64
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from scripts.benchmarks.figures import percentile

RECORD_BYTES = 1024
BATCH_BYTES = 65_536
PARTITIONS = 8
PATIENCE_S = 120.0
SILENCE_S = 1.0


def create(servers: str, topic: str, partitions: int) -> None:
    """Create a topic, and wait until all of its partitions have leaders."""
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
    while True:
        found = admin.list_topics(timeout=30).topics.get(topic)
        leaders = [] if found is None else [one.leader for one in found.partitions.values()]
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


def produce(servers: str, topic: str, mib: int) -> Mapping[str, Any]:
    """Produce records that do not compress, as fast as they are taken."""
    create(servers, topic, PARTITIONS)
    producer = _producer(servers, 5)
    value = os.urandom(RECORD_BYTES)
    failed: list[str] = []
    began = time.monotonic()
    for number in range(mib * 1024):
        while True:
            try:
                producer.produce(
                    topic,
                    value,
                    partition=number // 64 % PARTITIONS,
                    on_delivery=lambda error, _: failed.append(str(error)) if error else None,
                )
                break
            except BufferError:  # the producer's own queue is full
                producer.poll(0.01)
        if number % 512 == 0:
            producer.poll(0)
    left = producer.flush(PATIENCE_S)
    seconds = time.monotonic() - began
    return {"seconds": seconds, "failed": len(failed) + left, "client_cpu_s": time.process_time()}


def _consumer(servers: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 500,
        }
    )


def consume(servers: str, topic: str, mib: int) -> Mapping[str, Any]:
    """Consume a topic from its beginning."""
    consumer = _consumer(servers)
    consumer.assign([TopicPartition(topic, at, 0) for at in range(PARTITIONS)])
    seen, began = 0, time.monotonic()
    while seen < mib * 1024 and time.monotonic() < began + PATIENCE_S:
        seen += sum(one.error() is None for one in consumer.consume(10_000, 0.5))
    seconds = time.monotonic() - began
    consumer.close()
    return {"seconds": seconds, "missing": mib * 1024 - seen, "client_cpu_s": time.process_time()}


def latency(servers: str, topic: str, linger_ms: int, seconds: float) -> Mapping[str, Any]:
    """Send 100 records a second, and measure until each is consumed."""
    create(servers, topic, 1)
    consumer = _consumer(servers)
    consumer.assign([TopicPartition(topic, 0, 0)])
    latencies: list[float] = []
    wanted = int(seconds * 100)

    def read() -> None:
        while len(latencies) < wanted:
            for one in consumer.consume(100, 0.01):
                if one.error() is None:
                    sent = float((one.value() or b"").split(b" ")[0])
                    latencies.append((time.monotonic() - sent) * 1000)

    producer = _producer(servers, linger_ms)
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    for _ in range(wanted):
        producer.produce(
            topic, b"%f %b" % (time.monotonic(), bytes(RECORD_BYTES - 20)), partition=0
        )
        producer.poll(0.01)
    producer.flush(PATIENCE_S)
    reading.join(PATIENCE_S)
    measured = latencies[wanted // 5 :]
    return {"p50_ms": percentile(measured, 0.5), "p99_ms": percentile(measured, 0.99)}


def failover(servers: str, topic: str, runs: int) -> Mapping[str, Any]:
    """Send numbers to one partition all the time; measure its silence when its leader ends."""
    create(servers, topic, 1)
    producer = _producer(servers, 0)
    acknowledged = [time.monotonic()]
    kept: set[int] = set()
    failed: list[str] = []
    numbers = count()

    def done(number: int, error: object, _: object) -> None:
        if error is not None:
            failed.append(str(error))
        else:
            kept.add(number)
            acknowledged.append(time.monotonic())

    def send_for(longest_s: float, silence_s: float) -> float:
        """Send until a silence of so long has ended; return its length, 0 for none."""
        began = time.monotonic()
        while time.monotonic() < began + longest_s:
            number = next(numbers)
            value = b"%d" % number
            producer.produce(topic, value, partition=0, on_delivery=partial(done, number))
            producer.poll(0.01)
            gaps = [now - before for before, now in pairwise(acknowledged)]
            if gaps and max(gaps) > silence_s:
                return max(gaps)
            del acknowledged[:-2]
        return 0.0

    silences = []
    for _ in range(runs):
        send_for(2.0, PATIENCE_S)
        print(f"leader {_leader(servers, topic)}", flush=True)
        silences.append(send_for(PATIENCE_S, SILENCE_S))
        print("acknowledged", flush=True)
    producer.flush(PATIENCE_S)
    lost = len(kept - _stored(servers, topic))
    return {"silences_s": silences, "failed": failed, "acknowledged": len(kept), "lost": lost}


def _stored(servers: str, topic: str) -> set[int]:
    """Return the numbers that a topic's only partition holds."""
    consumer = _consumer(servers)
    end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=PATIENCE_S)[1]
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: set[int] = set()
    at, deadline = 0, time.monotonic() + PATIENCE_S
    while at < end and time.monotonic() < deadline:
        for one in consumer.consume(10_000, 0.5):
            if one.error() is None:
                found.add(int(one.value() or b""))
                at = (one.offset() or 0) + 1
    consumer.close()
    return found


def _leader(servers: str, topic: str) -> int:
    """Return the leader of a topic's only partition; a broker that restarts is not asked again."""
    admin = AdminClient({"bootstrap.servers": servers})
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            found: int = admin.list_topics(topic, timeout=30).topics[topic].partitions[0].leader
            return found
        except KafkaException:
            if time.monotonic() > deadline:
                raise


def main(words: Sequence[str]) -> None:
    """Run one load."""
    kind, servers, topic, *numbers = words
    match kind:
        case "produce":
            found = produce(servers, topic, int(numbers[0]))
        case "consume":
            found = consume(servers, topic, int(numbers[0]))
        case "latency":
            found = latency(servers, topic, int(numbers[0]), float(numbers[1]))
        case _:
            found = failover(servers, topic, int(numbers[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
