"""`streammeta kafka` beside one Apache Kafka broker, in one run with one client.

Three controllers and one broker of this product over a directory store; one Apache Kafka broker
that is its own controller. Both acknowledge with acks=all: here an object that holds the records is
committed by a majority, there they are in the page cache. The client is confluent-kafka
(`kafka_load`). The failover of a broker is measured with two of this product's brokers, all
settings of controllers and brokers but the linger being the default ones.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from scripts.benchmarks.bench_cluster import running_cluster
from scripts.benchmarks.figures import Outcome, Table, Target, median, targets_table
from scripts.benchmarks.peers.apache_kafka import missing, running_kafka
from scripts.benchmarks.peers.servers import PeerError
from streammeta.cli.local_cluster import PROGRAM, Child, LocalCluster, free_ports, start_child
from streammeta.client.tally import STORE_KINDS

OURS, PEER = "streammeta", "kafka"
VOTERS = 3
LATENCY_S = 5.0
FAILOVER_TARGET_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the loads, and the number of failovers."""

    total_mib: int = 256
    lingers_ms: Sequence[int] = (0, 20)
    broker_lingers_ms: Sequence[int] = (5, 50)
    failovers: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One system's produce and consume."""

    system: str
    produce_mb_s: float
    consume_mb_s: float
    produce_requests_per_gb: Mapping[str, float]
    consume_requests_per_gb: Mapping[str, float]
    broker_rss_mib: float
    broker_cpu_s: float
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Time from the producer to the consumer, by what each side waits for more records."""

    system: str
    broker_linger_ms: int
    client_linger_ms: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Times from a broker's end to the partition's next acknowledged record, and what was lost."""

    seconds: Sequence[float]
    acknowledged: int
    lost: int


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure both systems.

    Raises:
        ChildFailedError: a process ended early.
        PeerError: Apache Kafka is not here, or did not start.
    """
    return await asyncio.to_thread(_measure, root, settings, progress)


def _measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    if missing():
        raise PeerError(missing())
    root.mkdir(parents=True)
    throughputs: list[Throughput] = []
    latencies: list[Latency] = []
    for linger_ms in settings.broker_lingers_ms:
        progress(f"kafka: streammeta with a linger of {linger_ms} ms")
        place = root / f"ours-{linger_ms}"
        with (
            running_cluster(place, VOTERS) as cluster,
            _broker(cluster, 1, linger_ms) as (address, http, child),
        ):
            if not throughputs:
                throughputs.append(_throughput(OURS, address, http, child, settings, place))
            latencies += _latencies(OURS, address, linger_ms, settings, place)
    progress("kafka: Apache Kafka")
    with running_kafka(root / "kafka", "1g", ()) as (address, child):
        throughputs.append(_throughput(PEER, address, "", child, settings, root))
        latencies += _latencies(PEER, address, 0, settings, root)
    progress("kafka: failover")
    silence = _failovers(root / "failover", settings)
    return _outcome(settings, throughputs, latencies, silence)


@contextmanager
def _broker(
    cluster: LocalCluster, node_id: int, linger_ms: int
) -> Iterator[tuple[str, str, Child]]:
    child = _start_broker(cluster, node_id, linger_ms)
    try:
        yield *_addresses(child), child
    finally:
        child.stop()


def _start_broker(cluster: LocalCluster, node_id: int, linger_ms: int, port: int = 0) -> Child:
    place = ("--connect", cluster.connect, "--store", cluster.store_uri)
    words = (
        "--node-id",
        str(node_id),
        "--listen",
        f"127.0.0.1:{port}",
        "--linger",
        f"{linger_ms}ms",
        *("--http-listen", "127.0.0.1:0"),
    )
    log = cluster.root / f"kafka-{node_id}.log"
    return start_child(f"kafka {node_id}", [*PROGRAM, "kafka", *place, *words], log)


def _addresses(child: Child) -> tuple[str, str]:
    """Return where clients are served, and metrics."""
    found = re.search(r"bootstrap\.servers=(\S+) .* http=(\S+)", child.wait_ready())
    assert found is not None
    return found[1], found[2]


def _load(place: Path, *words: object) -> Child:
    command = [sys.executable, "-m", "scripts.benchmarks.kafka_load", *map(str, words)]
    return start_child("load", command, place / "load.log")


def _result(load: Child) -> Any:
    last = ""
    while line := load.read_line():
        last = line
    if load.stop() != 0:
        raise PeerError(f"the client failed; its log:\n{load.log_tail()}")
    return json.loads(last)


def _throughput(
    system: str, address: str, http: str, child: Child, settings: Settings, place: Path
) -> Throughput:
    at_first = _store_requests(http)
    produced = _result(_load(place, "produce", address, "bulk", settings.total_mib))
    between = _store_requests(http)
    consumed = _result(_load(place, "consume", address, "bulk", settings.total_mib))
    at_last = _store_requests(http)
    megabytes = settings.total_mib * 1.048576

    def per_gb(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
        return {kind: round((after[kind] - before[kind]) * 1000 / megabytes, 1) for kind in after}

    process = psutil.Process(child.pid)
    times = process.cpu_times()
    return Throughput(
        system=system,
        produce_mb_s=round(megabytes / produced["seconds"], 1),
        consume_mb_s=round(megabytes / consumed["seconds"], 1),
        produce_requests_per_gb=per_gb(at_first, between),
        consume_requests_per_gb=per_gb(between, at_last),
        broker_rss_mib=round(process.memory_info().rss / 2**20, 1),
        broker_cpu_s=round(times.user + times.system, 2),
        failed=produced["failed"] + consumed["missing"],
    )


def _store_requests(http: str) -> dict[str, float]:
    """Return a broker's requests to the bucket by kind, as its metrics at `http` have them.

    Nobody else makes any here. Without `http` there is no bucket.
    """
    if not http:
        return dict.fromkeys(STORE_KINDS, 0.0)
    with urlopen(f"http://{http}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        kind: float(number)
        for kind, number in re.findall(
            r'^streammeta_client_store_requests_total\{kind="(\w+)"\} (\S+)$', text, re.MULTILINE
        )
    }


def _latencies(
    system: str, address: str, broker_linger_ms: int, settings: Settings, place: Path
) -> Iterator[Latency]:
    for linger_ms in settings.lingers_ms:
        words = ("latency", address, f"slow-{linger_ms}", linger_ms, LATENCY_S)
        found = _result(_load(place, *words))
        yield Latency(
            system=system,
            broker_linger_ms=broker_linger_ms,
            client_linger_ms=linger_ms,
            p50_ms=round(found["p50_ms"], 1),
            p99_ms=round(found["p99_ms"], 1),
        )


def _failovers(place: Path, settings: Settings) -> Silence:
    """Kill the leader of a partition again and again; a broker that was killed starts anew."""
    with running_cluster(place, VOTERS) as cluster:
        ports = dict(zip((1, 2), free_ports(2), strict=True))
        brokers = {node_id: _start_broker(cluster, node_id, 5, ports[node_id]) for node_id in ports}
        try:
            servers = ",".join(_addresses(child)[0] for child in brokers.values())
            load = _load(place, "failover", servers, "silent", settings.failovers)
            last = ""
            while line := load.read_line():
                last = line
                if line.startswith("leader "):
                    killed = int(line.split()[1])
                    brokers[killed].kill()
                elif line == "acknowledged":
                    brokers[killed] = _start_broker(cluster, killed, 5, ports[killed])
                    brokers[killed].wait_ready()
            if load.stop() != 0:
                raise PeerError(f"the client failed; its log:\n{load.log_tail()}")
            found = json.loads(last)
        finally:
            for child in brokers.values():
                child.stop()
    return Silence(
        seconds=[round(one, 2) for one in found["silences_s"]],
        acknowledged=found["acknowledged"],
        lost=found["lost"],
    )


def _outcome(
    settings: Settings,
    throughputs: Sequence[Throughput],
    latencies: Sequence[Latency],
    silence: Silence,
) -> Outcome:
    by_system = {one.system: one for one in throughputs}
    ours, peer = by_system[OURS], by_system[PEER]
    ratios = (peer.produce_mb_s, peer.consume_mb_s)
    targets = [
        Target("produce, share of Kafka's", "at least", 0.3, ours.produce_mb_s / ratios[0]),
        Target("consume, share of Kafka's", "at least", 0.5, ours.consume_mb_s / ratios[1]),
        Target("failover p50 s", "at most", FAILOVER_TARGET_S, median(silence.seconds)),
        Target("acknowledged records lost in failovers", "at most", 0, silence.lost),
    ]
    figures = {f"{one.system}_produce_mb_s": one.produce_mb_s for one in throughputs}
    figures |= {f"{one.system}_consume_mb_s": one.consume_mb_s for one in throughputs}
    return Outcome(
        benchmark="kafka",
        settings=asdict(settings),
        figures=figures,
        details={
            "throughputs": [asdict(one) for one in throughputs],
            "latencies": [asdict(one) for one in latencies],
            "failovers": asdict(silence),
        },
        tables=(*_tables(throughputs, latencies, silence), *targets_table(targets)),
    )


def _tables(
    throughputs: Sequence[Throughput], latencies: Sequence[Latency], silence: Silence
) -> Iterator[Table]:
    yield Table(
        title="Records of 1 KiB in batches of 64 KiB, acks=all, 8 partitions",
        columns=(*("system", "produce MB/s", "consume MB/s", "RSS MiB", "CPU s", "failed"),),
        rows=tuple(
            (
                *(one.system, one.produce_mb_s, one.consume_mb_s),
                *(one.broker_rss_mib, one.broker_cpu_s, one.failed),
            )
            for one in throughputs
        ),
    )
    yield Table(
        title="Requests of the broker to the bucket per GB of records, by kind",
        columns=("system", "load", *STORE_KINDS),
        rows=tuple(
            (one.system, load, *(requests[kind] for kind in STORE_KINDS))
            for one in throughputs
            if one.system == OURS
            for load, requests in (
                ("produce", one.produce_requests_per_gb),
                ("consume", one.consume_requests_per_gb),
            )
        ),
    )
    yield Table(
        title="Producer to consumer, 100 records/s in one partition",
        columns=("system", "broker's linger ms", "client's linger ms", "p50 ms", "p99 ms"),
        rows=tuple(tuple(asdict(one).values()) for one in latencies),
    )
    yield Table(
        title="kill -9 of a partition's leader to its next acknowledged record, seconds",
        columns=("p50", "max", "runs", "acknowledged", "lost"),
        rows=(
            (
                median(silence.seconds),
                max(silence.seconds),
                len(silence.seconds),
                silence.acknowledged,
                silence.lost,
            ),
        ),
    )
