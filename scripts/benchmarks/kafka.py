"""`streammeta kafka` and one Apache Kafka broker, in one run with one client.

Three controllers and one broker of this product with a directory store, and one Apache Kafka broker
that is its own controller. Both acknowledge with acks=all: here a majority commits an object with
the records, there the records are in the page cache. The client is confluent-kafka (`kafka_load`).
The failover of a broker is measured with two of this product's brokers. All settings except the
linger are the defaults.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.request import urlopen

from scripts.benchmarks import kafka_load
from scripts.benchmarks.cluster import in_thread, running_cluster
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, median
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
        produced = await run_worker(log, kafka_load.produce, **load)
        between = self._store_requests()
        consumed = await run_worker(log, kafka_load.consume, **load)
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
            times = await run_worker(log, kafka_load.latency, seconds=LATENCY_S, **load)
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
        async with working(place / "load.log", kafka_load.fail_over, **load) as client:

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
        f"Records of 1 KiB in batches of 64 KiB, acks=all, {kafka_load.PARTITIONS} partitions",
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
