"""`streammeta kafka` and one Apache Kafka broker, in one run with one client.

Three controllers and one broker of this product with a directory store, and one Apache Kafka broker
that is its own controller. Both acknowledge with acks=all: here a majority commits an object with
the records, there the records are in the page cache. The client is confluent-kafka, in processes of
its own: it produces, consumes, sends records one by one to be read at once, or measures for how
long a broker's end silences a partition. The failover of a broker is measured with two of this
product's brokers. All settings except the linger are the defaults.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeAlias
from urllib.request import urlopen

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from scripts.benchmarks.cluster import in_thread, running_cluster
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, median, percentile
from scripts.benchmarks.options import option
from scripts.benchmarks.peers.apache_kafka import missing, running_kafka
from scripts.benchmarks.peers.servers import PeerError
from scripts.benchmarks.processes import cpu_s, read_result, rss_bytes, run_worker, working
from streammeta.cli.local.local_cluster import PROGRAM, Child, LocalCluster, free_ports, start_child
from streammeta.client.resources.tally import STORE_KINDS

OURS, PEER = "streammeta", "kafka"
LATENCY_S = 5.0
FAILOVER_TARGET_S = 3.0
_REQUESTS = re.compile(
    r'^streammeta_client_store_requests_total\{kind="(\w+)"\} (\S+)$', re.MULTILINE
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the loads, and the number of failovers."""

    total_mib: int = option(256, "MiB produced and consumed")
    failovers: int = option(7, "kills of a broker")
    lingers_ms: tuple[int, ...] = (0, 20)
    broker_lingers_ms: tuple[int, ...] = (5, 50)


Figures: TypeAlias = Mapping[str, Any]
"""Figures of one system under one load."""


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure both systems."""
    if missing():
        raise PeerError(missing())
    throughputs: list[Figures] = []
    latencies: list[Figures] = []
    for linger_ms in settings.broker_lingers_ms:
        progress(f"kafka: streammeta with a linger of {linger_ms} ms")
        with running_cluster(root / f"ours-{linger_ms}") as cluster:
            broker = _start_broker(cluster, 1, linger_ms)
            try:
                measured = _Measured(OURS, *_addresses(broker), broker, root)
                # The broker's linger changes latencies, but hardly throughput.
                if not throughputs:
                    throughputs.append(await measured.throughput(settings))
                latencies += await measured.latencies(linger_ms, settings)
            finally:
                broker.stop()

    progress("kafka: Apache Kafka")
    with running_kafka(root / "kafka", "1g", ()) as (address, child):
        measured = _Measured(PEER, address, "", child, root)
        throughputs.append(await measured.throughput(settings))
        latencies += await measured.latencies(0, settings)
    progress("kafka: failover")
    failovers = await _fail_over(root / "failover", settings)
    return _outcome(throughputs, latencies, failovers)


def _start_broker(cluster: LocalCluster, node_id: int, linger_ms: int, port: int = 0) -> Child:
    words = (
        *("--connect", cluster.connect, "--store", cluster.store_uri),
        *("--node-id", str(node_id), "--linger", f"{linger_ms}ms"),
        *("--listen", f"127.0.0.1:{port}", "--http-listen", "127.0.0.1:0"),
    )
    log = cluster.root / f"kafka-{node_id}.log"
    return start_child(f"kafka {node_id}", [*PROGRAM, "kafka", *words], log)


def _addresses(broker: Child) -> tuple[str, str]:
    """Return the broker's addresses for clients and for metrics."""
    found = re.search(r"bootstrap\.servers=(\S+) .* http=(\S+)", broker.wait_ready())
    assert found is not None
    return found[1], found[2]


@dataclass(frozen=True, slots=True)
class _Measured:
    """A running broker. `http` is the address of its metrics, "" if it has none."""

    system: str
    servers: str
    http: str
    broker: Child
    place: Path

    async def throughput(self, settings: Settings) -> Figures:
        load = {"servers": self.servers, "topic": "bulk", "mib": settings.total_mib}
        log = self.place / "load.log"
        at_first = self._store_requests()
        produced = await run_worker(log, produce, **load)
        between = self._store_requests()
        consumed = await run_worker(log, consume, **load)
        at_last = self._store_requests()
        megabytes = settings.total_mib * 1.048576

        def per_gb(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
            return {
                kind: round((after[kind] - before[kind]) * 1000 / megabytes, 1) for kind in after
            }

        return {
            "system": self.system,
            "produce_mb_s": round(megabytes / produced["seconds"], 1),
            "consume_mb_s": round(megabytes / consumed["seconds"], 1),
            "produce_requests_per_gb": per_gb(at_first, between),
            "consume_requests_per_gb": per_gb(between, at_last),
            "broker_rss_mib": round(rss_bytes(self.broker.pid) / 2**20, 1),
            "broker_cpu_s": round(cpu_s([self.broker.pid]), 2),
            "failed": produced["failed"] + consumed["missing"],
        }

    async def latencies(self, broker_linger_ms: int, settings: Settings) -> list[Figures]:
        log = self.place / "load.log"
        found: list[Figures] = []
        for linger_ms in settings.lingers_ms:
            load = {"servers": self.servers, "topic": f"slow-{linger_ms}", "linger_ms": linger_ms}
            times = await run_worker(log, latency, seconds=LATENCY_S, **load)
            lingers = {"broker_linger_ms": broker_linger_ms, "client_linger_ms": linger_ms}
            found.append({"system": self.system, **lingers, **times})
        return found

    def _store_requests(self) -> dict[str, float]:
        """Return the broker's requests to the bucket by kind, from its metrics."""
        if not self.http:
            return dict.fromkeys(STORE_KINDS, 0.0)
        with urlopen(f"http://{self.http}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {kind: float(number) for kind, number in _REQUESTS.findall(text)}


async def _fail_over(place: Path, settings: Settings) -> dict[str, Any]:
    """Kill the leader of a partition again and again. A killed broker is started again."""
    with running_cluster(place) as cluster, contextlib.ExitStack() as stack:
        ports = dict(zip((1, 2), free_ports(2), strict=True))
        brokers: dict[int, Child] = {}
        stack.callback(lambda: [broker.stop() for broker in brokers.values()])
        for node_id, port in ports.items():
            brokers[node_id] = _start_broker(cluster, node_id, 5, port)
        servers = ",".join(_addresses(broker)[0] for broker in brokers.values())
        load = {"servers": servers, "topic": "silent", "runs": settings.failovers}
        async with working(place / "load.log", fail_over, **load) as client:

            def kill_leader() -> None:
                leader = int(client.read_line().removeprefix("leader "))
                brokers[leader].kill()
                client.read_line()
                brokers[leader] = _start_broker(cluster, leader, 5, ports[leader])
                brokers[leader].wait_ready()

            for _ in range(settings.failovers):
                await in_thread(kill_leader)
            found: dict[str, Any] = await read_result(client)
    return found


def _outcome(
    throughputs: Sequence[Figures], latencies: Sequence[Figures], failovers: Figures
) -> Outcome:
    ours, peer = throughputs
    produced, consumed = (ours[name] / peer[name] for name in ("produce_mb_s", "consume_mb_s"))
    return Outcome(
        benchmark="kafka",
        figures={
            f"{found['system']}_{name}": found[name]
            for name in ("produce_mb_s", "consume_mb_s")
            for found in throughputs
        },
        details={"throughputs": throughputs, "latencies": latencies, "failovers": failovers},
        tables=list(_tables(throughputs, latencies, failovers)),
        targets=[
            Target("produce, share of Kafka's", "at least", 0.3, produced),
            Target("consume, share of Kafka's", "at least", 0.5, consumed),
            Target("failover p50 s", "at most", FAILOVER_TARGET_S, median(failovers["seconds"])),
            Target("acknowledged records lost in failovers", "at most", 0, failovers["lost"]),
        ],
    )


def _tables(
    throughputs: Sequence[Figures], latencies: Sequence[Figures], failovers: Figures
) -> Iterator[Table]:
    yield Table.of(
        f"Records of 1 KiB in batches of 64 KiB, acks=all, {PARTITIONS} partitions",
        throughputs,
        "system | produce MB/s = produce_mb_s | consume MB/s = consume_mb_s"
        " | RSS MiB = broker_rss_mib | CPU s = broker_cpu_s | failed",
    )
    requests = [
        {"load": load, **throughputs[0][f"{load}_requests_per_gb"]}
        for load in ("produce", "consume")
    ]
    title = "Requests of the broker to the bucket per GB of records, by kind"
    yield Table.of(title, requests, " | ".join(("load", *STORE_KINDS)))
    yield Table.of(
        "Producer to consumer, 100 records/s in one partition",
        latencies,
        "system | broker's linger ms = broker_linger_ms | client's linger ms = client_linger_ms"
        " | p50 ms = p50_ms | p99 ms = p99_ms",
    )
    seconds = failovers["seconds"]
    row = {**failovers, "p50": median(seconds), "max": max(seconds), "runs": len(seconds)}
    title = "kill -9 of a partition's leader to its next acknowledged record, seconds"
    yield Table.of(title, [row], "p50 | max | runs | acknowledged | lost")
