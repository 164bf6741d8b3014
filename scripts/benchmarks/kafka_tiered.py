"""A stock Kafka broker's tiered storage with this product's metadata manager and with Kafka's own.

Both brokers run at once, and take turns: one with `streammeta-kafka-tiered` and three controllers,
one with Kafka's manager, which keeps the metadata in a topic of the broker. The storage of both is
a directory, since the plug-in's own storage needs the plug-in's metadata, and Kafka's storage for
tests does not run in this version. A turn copies closed segments, in a topic of its own. Then metadata of segments without
bytes are added through the managers' own calls (`peers/TieredLoad.java`), and the brokers restart.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Consumer, TopicPartition

from scripts.benchmarks.cluster import counters_path, find_leader, observed, running_cluster
from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress, Table, Target, median
from scripts.benchmarks.observed_controller import Counters
from scripts.benchmarks.options import option
from scripts.benchmarks.peers import apache_kafka
from scripts.benchmarks.processes import rss_bytes

OURS, PEER = "streammeta", "kafka"
MANAGERS = {
    OURS: "io.streammeta.kafka.StreammetaRemoteLogMetadataManager",
    PEER: "org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager",
}
LOAD = Path(__file__).parent / "peers" / "TieredLoad.java"
PLUGIN = "clients/java/streammeta-kafka-tiered/target/streammeta-kafka-tiered-*-SNAPSHOT.jar"
HEAP = "512m"
READ_WITHIN_S = 300.0
_BROKER = """\
remote.log.storage.system.enable=true
remote.log.storage.manager.class.name=TieredLoad$Storage
remote.log.storage.manager.class.path={storage}
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
    copied: int = option(1_000, "segments that a turn copies")
    copies: int = option(3, "turns of copies")
    noted: int = option(100_000, "segments of which the metadata exist before the restarts")
    restarts: int = option(3, "turns of restarts")


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure both managers."""
    if apache_kafka.missing():
        raise BenchmarkError(apache_kafka.missing())
    compiled = [*("javac", "-d", str(root / "classes")), *("-cp", _jars()), str(LOAD)]
    subprocess.run(compiled, check=True)
    with running_cluster(root / "cluster", change=observed(root)) as cluster:
        leader = await find_leader(cluster)
        counters = counters_path(root, leader.node_id)
        systems = [System(name, root, ",".join(cluster.endpoints), counters) for name in MANAGERS]
        return await asyncio.to_thread(_measure, systems, settings, progress)


def _measure(systems: Sequence["System"], settings: Settings, progress: Progress) -> Outcome:
    try:
        for system in systems:
            system.start()
        for turn in range(settings.copies):
            for system in systems:
                progress(f"kafka-tiered: copy {turn + 1} with {system.name}")
                system.copy(f"copied-{turn}", settings)
        for system in systems:
            progress(f"kafka-tiered: metadata of {settings.noted} segments with {system.name}")
            system.note("copied-0", settings)
        for turn in range(settings.restarts):
            for system in systems:
                progress(f"kafka-tiered: restart {turn + 1} with {system.name}")
                system.restart("copied-0", settings)
    finally:
        for system in systems:
            system.stop()
    return _outcome(systems)


class System:
    """A broker with one of the managers, and its figures."""

    def __init__(self, name: str, root: Path, endpoints: str, counters: Path) -> None:
        self.name = name
        self.copy_s: list[float] = []
        self.serve_s: list[float] = []
        self.restart_s: list[float] = []
        self.memory: dict[str, float] = {}
        self.stored: dict[str, float] = {}
        self.note_s = 0.0
        self._root = root / name
        self._endpoints = endpoints
        self._counters = counters
        self._plugin = _plugin()
        self._classes = root / 'classes'
        self._broker = ExitStack()

    def start(self) -> None:
        settings = _BROKER.format(
            storage=self._classes,
            root=self._root,
            manager=MANAGERS[self.name],
            plugin=self._plugin if self.name == OURS else "",
            endpoints=self._endpoints,
        )
        broker = apache_kafka.running_kafka(self._root, HEAP, (), settings)
        self.address, self.child = self._broker.enter_context(broker)

    def stop(self) -> None:
        self._broker.close()

    def copy(self, topic: str, settings: Settings) -> None:
        each = settings.copied // settings.partitions
        before = self._stored()
        self.copy_s.append(self._load("copy", topic, settings.partitions, each))
        count = each * settings.partitions
        self.stored = {
            name: (value - before[name]) / count for name, value in self._stored().items()
        }

    def note(self, topic: str, settings: Settings) -> None:
        options = (
            [f"endpoints={self._endpoints}"]
            if self.name == OURS
            else [
                f"remote.log.metadata.common.client.bootstrap.servers={self.address}",
                "remote.log.metadata.topic.replication.factor=1",
                "broker.id=9",
                "cluster.id=load",
                f"log.dir={self._root}",
            ]
        )
        arguments = (topic, settings.partitions, settings.noted, MANAGERS[self.name], *options)
        self.note_s = self._load("note", *arguments)

    def restart(self, topic: str, settings: Settings) -> None:
        self._broker.close()
        self.start()
        began = psutil.Process(self.child.pid).create_time()
        # The newest segment of a partition is local, the first one is not.
        local = settings.copied // settings.partitions
        self.serve_s.append(_read(self.address, topic, [0], local) - began)
        self.restart_s.append(_read(self.address, topic, [0], 0) - began)
        self.memory = {
            "heap_mib": _live_heap_mib(self.child.pid),
            "rss_mib": rss_bytes(self.child.pid) / 2**20,
        }

    def waits(self) -> list[float]:
        """Return how much later than a local record the first remote one was read."""
        return [read - local for read, local in zip(self.restart_s, self.serve_s, strict=True)]

    def _load(self, *words: object) -> float:
        command = [
            *("java", "-Xmx512m", "-cp", f"{self._classes}:{_jars()}", LOAD.stem),
            *(words[0], self.address, *words[1:]),
        ]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"the load of {self.name} failed:\n{done.stderr[-4000:]}")
        return float(json.loads(done.stdout.splitlines()[-1])["seconds"])

    def _stored(self) -> dict[str, float]:
        """Return the bytes and the entries in the log of the metadata."""
        if self.name == OURS:
            counters = Counters.read(self._counters)
            return {"bytes": counters.payload_bytes, "entries": counters.payloads}
        logs = (self._root / "data").glob("__remote_log_metadata-*/*.log")
        return {"bytes": sum(log.stat().st_size for log in logs), "entries": _entries(self.address)}


def _jars() -> str:
    return f"{apache_kafka.class_path()}:{_plugin()}"


def _plugin() -> Path:
    found = sorted(apache_kafka.ROOT.glob(PLUGIN))
    if not found:
        raise BenchmarkError(
            "the plug-in's jar is missing; run "
            "./scripts/java --skip-tests -pl streammeta-kafka-tiered -am"
        )
    return found[0]


def _read(servers: str, topic: str, partitions: Sequence[int], offset: int) -> float:
    """Return the time at which the record at an offset of each partition has been read."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.error.backoff.ms": 20,
            "reconnect.backoff.max.ms": 50,
        }
    )
    consumer.assign([TopicPartition(topic, partition, offset) for partition in partitions])
    left = set(partitions)
    deadline = time.monotonic() + READ_WITHIN_S
    while left and time.monotonic() < deadline:
        message = consumer.poll(0.05)
        if message is not None and message.error() is None and message.offset() == offset:
            left.discard(message.partition())
    now = time.time()
    consumer.close()
    if left:
        raise BenchmarkError(f"partitions {left} were not read within {READ_WITHIN_S:.0f} s")
    return now


def _entries(servers: str) -> int:
    """Return the number of records in the topic of Kafka's manager."""
    topic = "__remote_log_metadata"
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench"})
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, at))[1] for at in partitions]
    consumer.close()
    return sum(ends)


def _live_heap_mib(pid: int) -> float:
    """Return the memory of the objects that are in use, after a full collection."""
    histogram = ["jcmd", str(pid), "GC.class_histogram"]
    done = subprocess.run(histogram, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1].split()[2]) / 2**20


def _outcome(systems: Sequence[System]) -> Outcome:
    ours, peer = systems
    rows = [
        {
            "system": system.name,
            "copy_s": median(system.copy_s),
            "note_s": system.note_s,
            "serve_s": median(system.serve_s),
            "restart_s": median(system.restart_s),
            "waited_s": median(system.waits()),
            **{f"stored_{name}": value for name, value in system.stored.items()},
            **system.memory,
        }
        for system in systems
    ]
    return Outcome(
        benchmark="kafka-tiered",
        figures={},
        details={
            s.name: {"copy_s": s.copy_s, "serve_s": s.serve_s, "restart_s": s.restart_s}
            for s in systems
        },
        tables=[
            Table.of(
                "Both",
                rows,
                "system | copy s = copy_s | note s = note_s | local s = serve_s"
                " | remote s = restart_s | waited s = waited_s | stored_bytes | stored_entries"
                " | heap_mib | rss_mib",
            )
        ],
        targets=[
            Target("copy, times Kafka's", "at most", 1.05, rows[0]["copy_s"] / rows[1]["copy_s"]),
            Target("restart, Kafka's", "at most", 0.2, rows[0]["waited_s"] / rows[1]["waited_s"]),
        ],
    )
