"""A stock Kafka broker's tiered storage with this product's metadata manager and with Kafka's own.

Both brokers run at once, and take turns: one with `streammeta-kafka-tiered` and three controllers,
one with Kafka's manager, which keeps the metadata in a topic of the broker. The storage of both is
a directory, since the plug-in's own storage needs the plug-in's metadata, and Kafka's storage for
tests does not run in this version. A turn of copies tiers the closed segments of a new topic. Then
metadata of segments without bytes are stored through the managers' own calls, and brokers restart.
`peers/TieredLoad.java` is the load and the storage.
"""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from confluent_kafka import Consumer, TopicPartition

from scripts.benchmarks.cluster import (
    counters_path,
    find_leader,
    in_thread,
    observed,
    running_cluster,
)
from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress, Table, Target, medians
from scripts.benchmarks.observed_controller import Counters
from scripts.benchmarks.options import option
from scripts.benchmarks.peers import apache_kafka
from scripts.benchmarks.peers.java_load import JavaLoad, jar_of
from scripts.benchmarks.processes import rss_bytes

OURS, PEER = "streammeta", "kafka"
MANAGERS = {
    OURS: "io.streammeta.kafka.StreammetaRemoteLogMetadataManager",
    PEER: "org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager",
}
TOPIC = "copied-0"
READ_WITHIN_S = 300.0
_BROKER = """\
remote.log.storage.system.enable=true
remote.log.storage.manager.class.name=TieredLoad$Storage
remote.log.storage.manager.class.path={classes}
remote.log.storage.manager.impl.prefix=rsm.config.
rsm.config.dir={root}/remote
remote.log.metadata.manager.class.name={manager}
remote.log.metadata.manager.class.path={plugin}
remote.log.metadata.manager.impl.prefix=rlmm.config.
remote.log.metadata.manager.listener.name=PLAINTEXT
rlmm.config.endpoints={endpoints}
rlmm.config.remote.log.metadata.topic.replication.factor=1
remote.log.manager.task.interval.ms=500
log.retention.check.interval.ms=500
log.initial.task.delay.ms=500
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Numbers of segments and of turns."""

    partitions: int = option(50, "partitions of a topic")
    copied: int = option(20, "segments of a partition that a turn copies")
    copies: int = option(5, "turns of copies")
    noted: int = option(100_000, "segments of which the metadata exist before the restarts")
    restarts: int = option(3, "turns of restarts")


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure both managers."""
    if apache_kafka.missing():
        raise BenchmarkError(apache_kafka.missing())
    jars = f"{apache_kafka.class_path()}:{jar_of('streammeta-kafka-tiered')}"
    load = JavaLoad.compile("TieredLoad", root / "classes", jars)
    with running_cluster(root / "cluster", change=observed(root)) as cluster, ExitStack() as stack:
        counters = counters_path(root, (await find_leader(cluster)).node_id)
        systems = [
            _System(name, root / name, load, settings, ",".join(cluster.endpoints), counters)
            for name in MANAGERS
        ]
        for system in systems:
            stack.callback(system.stop)
        await _take_turns(systems, settings, progress)
    return _outcome(systems)


async def _take_turns(systems: Sequence["_System"], settings: Settings, progress: Progress) -> None:
    for system in systems:
        await in_thread(system.start)
    for turn in range(settings.copies):
        for system in systems:
            progress(f"kafka-tiered: copies {turn + 1} with {system.name}")
            await in_thread(system.copy, f"copied-{turn}")
    for system in systems:
        progress(f"kafka-tiered: metadata of {settings.noted} segments with {system.name}")
        await in_thread(system.store_metadata)
    for turn in range(settings.restarts):
        for system in systems:
            progress(f"kafka-tiered: restart {turn + 1} with {system.name}")
            await in_thread(system.restart, turn % settings.partitions)


class _System:
    """A broker with one of the managers, and its figures of each turn."""

    def __init__(
        self,
        name: str,
        root: Path,
        load: JavaLoad,
        settings: Settings,
        endpoints: str,
        counters: Path,
    ) -> None:
        self.name = name
        self.copies: list[dict[str, float]] = []
        self.stalled = 0
        self.restarts: list[dict[str, float]] = []
        self._root = root
        self._load = load
        self._settings = settings
        self._endpoints = endpoints
        self._counters = counters
        self._broker = ExitStack()
        self._address = ""
        self._pid = 0

    def start(self) -> None:
        """Start the broker."""
        options = _BROKER.format(
            classes=self._load.classes,
            root=self._root,
            manager=MANAGERS[self.name],
            plugin=jar_of("streammeta-kafka-tiered") if self.name == OURS else "",
            endpoints=self._endpoints,
        )
        broker = apache_kafka.running_kafka(self._root, settings=options)
        self._address, child = self._broker.enter_context(broker)
        self._pid = child.pid

    def stop(self) -> None:
        """Stop the broker."""
        self._broker.close()

    def copy(self, topic: str) -> None:
        """Measure the copies of a new topic's segments, and the metadata of each.

        A broker sometimes stops before the last segments of a topic. Such a turn is counted and
        not measured.
        """
        before = self._stored()
        try:
            seconds = self._run_load("copy", topic, self._settings.copied)
        except BenchmarkError as error:
            # Any other failure is one of the load, or of the broker.
            if "TimeoutException" not in str(error):
                raise
            self.stalled += 1
            return
        count = self._settings.partitions * self._settings.copied
        stored = {name: (now - before[name]) / count for name, now in self._stored().items()}
        self.copies.append({"seconds": seconds, **stored})

    def store_metadata(self) -> None:
        """Store metadata of many segments that have no bytes."""
        options = [f"endpoints={self._endpoints}"]
        if self.name == PEER:
            prefix = "remote.log.metadata"
            options = [
                f"{prefix}.common.client.bootstrap.servers={self._address}",
                f"{prefix}.topic.replication.factor=1",
                *("broker.id=9", "cluster.id=load", f"log.dir={self._root}"),
            ]
        self._run_load("store", TOPIC, self._settings.noted, MANAGERS[self.name], *options)

    def restart(self, partition: int) -> None:
        """Measure from a restart to the first records from the local disk and from the storage."""
        self.stop()
        self.start()
        began = psutil.Process(self._pid).create_time()
        # The first segments of a partition are remote only, the last one is on the broker's disk.
        offsets = (self._settings.copied, 0)
        local, remote = (at - began for at in _read_first(self._address, partition, offsets))
        figures = {"local_s": local, "remote_s": remote, "between_s": remote - local}
        memory = {"heap_mib": _live_heap_mib(self._pid), "rss_mib": rss_bytes(self._pid) / 2**20}
        self.restarts.append(figures | memory)

    def _run_load(self, kind: str, topic: str, segments: int, *options: str) -> float:
        words = (kind, self._address, topic, self._settings.partitions, segments, *options)
        return float(self._load.run(*words)[-1])

    def _stored(self) -> dict[str, float]:
        """Return the bytes and the number of entries in the log of the metadata."""
        if self.name == OURS:
            counters = Counters.read(self._counters)
            return {"bytes": counters.payload_bytes, "entries": counters.payloads}
        logs = (self._root / "data").glob("__remote_log_metadata-*/*.log")
        return {
            "bytes": sum(log.stat().st_size for log in logs),
            "entries": _entries(self._address),
        }


def _entries(servers: str) -> int:
    """Return the number of records in the topic of Kafka's manager."""
    topic = "__remote_log_metadata"
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench"})
    found = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, at))[1] for at in found]
    consumer.close()
    return sum(ends)


def _read_first(servers: str, partition: int, offsets: Sequence[int]) -> list[float]:
    """Return the times at which the records at the offsets were read, each by a consumer."""
    consumers = {offset: _consumer(servers, partition, offset) for offset in offsets}
    times: dict[int, float] = {}
    deadline = time.monotonic() + READ_WITHIN_S
    while len(times) < len(offsets) and time.monotonic() < deadline:
        for offset in consumers.keys() - times.keys():
            message = consumers[offset].poll(0.01)
            if message is not None and message.error() is None and message.offset() == offset:
                times[offset] = time.time()
    for consumer in consumers.values():
        consumer.close()
    if len(times) < len(offsets):
        raise BenchmarkError(f"only the offsets {list(times)} were read in {READ_WITHIN_S:.0f} s")
    return [times[offset] for offset in offsets]


def _consumer(servers: str, partition: int, offset: int) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.error.backoff.ms": 20,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 50,
        }
    )
    consumer.assign([TopicPartition(TOPIC, partition, offset)])
    return consumer


def _live_heap_mib(pid: int) -> float:
    """Return the memory of the objects that a JVM uses, after a full collection."""
    command = ["jcmd", str(pid), "GC.class_histogram"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1].split()[2]) / 2**20


def _outcome(systems: Sequence[_System]) -> Outcome:
    for system in systems:
        if not system.copies:
            raise BenchmarkError(f"every turn of copies with {system.name} stalled")
    stalled = {system.name: {"stalled": float(system.stalled)} for system in systems}
    copies = {system.name: medians(system.copies) | stalled[system.name] for system in systems}
    restarts = {system.name: medians(system.restarts) for system in systems}

    def ratio(found: dict[str, dict[str, float]], name: str) -> float:
        return found[OURS][name] / found[PEER][name]

    return Outcome(
        benchmark="kafka-tiered",
        figures={
            f"{system}_{kind}_{name}": value
            for kind, found in (("copy", copies), ("restart", restarts))
            for system, figures in found.items()
            for name, value in figures.items()
        },
        details={system.name: [system.copies, system.restarts] for system in systems},
        tables=list(_tables(copies, restarts)),
        targets=[
            Target("copies, times Kafka's", "at most", 1.05, ratio(copies, "seconds")),
            Target("restart, times Kafka's", "at most", 0.2, ratio(restarts, "between_s")),
        ],
    )


def _tables(
    copies: dict[str, dict[str, float]], restarts: dict[str, dict[str, float]]
) -> Iterator[Table]:
    yield Table.of(
        "Copies of closed segments, medians",
        [{"manager": name, **figures} for name, figures in copies.items()],
        "manager | s = seconds | entries a segment = entries | bytes a segment = bytes"
        " | turns that stalled = stalled",
    )
    yield Table.of(
        "Restart of the broker to its first records, medians",
        [{"manager": name, **figures} for name, figures in restarts.items()],
        "manager | local s = local_s | remote s = remote_s | remote after local s = between_s"
        " | live heap MiB = heap_mib | RSS MiB = rss_mib",
    )
