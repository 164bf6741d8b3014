"""A real Prometheus over real controllers: what the dashboard shows, and which alerts fire."""

from __future__ import annotations

import asyncio
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from streammeta.client import StreamClient
from streammeta.client.errors import BrokerClientError
from streammeta.client.parts import BrokerSession, ControllerClient
from tests.kit.certificates import Authority
from tests.kit.kafka_brokers import KafkaBrokers
from tests.kit.real_cluster import STEADY, leader_of
from tests.kit.tools import needs, path_of
from tests.kit.waiting import wait_until
from tests.monitoring.dashboard import RATE, expressions
from tests.monitoring.metrics_table import written
from tests.monitoring.planes import Planed, Planes, limit_files, running
from tests.monitoring.prometheus import BROKERS, JOB, Prometheus, scraping
from tests.trust.replaced_files import Placed
from tests.trust.test_tls_files import SOUND

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    needs("prometheus"),
    needs("promtool"),
]

OPTIONS = (*STEADY, "--snapshot-log-bytes", "2000", "--session-timeout-ms", "4000")
QUICK = (*STEADY, "--tls-reload-ms", "50")
BEAT_S = 0.3
KAFKA_ID = 2_001

OF_THE_MACHINE = {
    "StreammetaLoopHeld",
    "StreammetaCommitsSlow",
    "StreammetaFlushesSlow",
    "StreammetaLeaderChanges",
    "StreammetaDiskFills",
}
"""Alerts that tell of a busy machine or its own disk, which a test has no part in."""


@dataclass
class Brokers:
    """Brokers 1007 and 1008, which beat in a thread; the first writes too."""

    planed: Planed
    bucket: str
    only: set[int] = field(default_factory=lambda: {1007, 1008})
    written: int = 0
    _ends: Event = field(default_factory=Event)

    def run(self) -> None:
        asyncio.run(self._beat())

    def end(self) -> None:
        self._ends.set()

    async def _beat(self) -> None:
        endpoints = self.planed.cluster.endpoints
        async with (
            ControllerClient(endpoints) as other,
            await StreamClient.open(endpoints, self.bucket, node_id=1007) as client,
        ):
            session = await BrokerSession.open(other, 1008, time.time_ns())
            (stream,) = await client.create_streams([{"topic": "example"}])
            (await client.open_streams([stream])).require_all()
            while not self._ends.is_set():
                try:
                    if 1008 in self.only:
                        await session.heartbeat()
                    await client.session.heartbeat()
                    await client.append_many(stream, [b"a", b"b"])
                    self.written += 1
                except BrokerClientError:
                    pass  # a controller was killed; the next round finds the leader
                await asyncio.sleep(BEAT_S)


@contextmanager
def beating(planed: Planed, bucket: str) -> Iterator[Brokers]:
    brokers = Brokers(planed, bucket)
    thread = Thread(target=brokers.run)
    thread.start()
    try:
        yield brokers
    finally:
        brokers.end()
        thread.join(60)


@contextmanager
def kafka_serving(planed: Planed) -> Iterator[KafkaBrokers]:
    """Run a Kafka-shaped broker that is written to and read from, and give it."""
    brokers, ends = KafkaBrokers(planed.cluster), Event()
    at = brokers.start(KAFKA_ID, "--http-listen", "127.0.0.1:0")
    thread = Thread(target=exchange, args=(at, ends))
    thread.start()
    try:
        yield brokers
    finally:
        ends.set()
        thread.join(60)
        brokers.stop()


def exchange(at: str, ends: Event) -> None:
    """Produce and consume by a stock client until it is told to end."""
    quiet: Any = {"bootstrap.servers": at, "log_level": 0}
    producer = Producer(quiet)
    consumer = Consumer({**quiet, "group.id": "readers", "auto.offset.reset": "earliest"})
    consumer.subscribe(["example"])
    while not ends.is_set():
        producer.produce("example", b"value")
        producer.poll(0)
        consumer.poll(0)
        ends.wait(BEAT_S)
    producer.flush(10)
    consumer.close()


@dataclass
class Scene:
    planed: Planed
    brokers: Brokers
    kafka: KafkaBrokers
    prometheus: Prometheus

    def wait_firing(self, name: str) -> None:
        wait_until(lambda: name in self.prometheus.firing(), f"{name} to fire")

    def wait_quiet(self) -> None:
        with suppress(AssertionError):
            wait_until(lambda: self.prometheus.firing() <= OF_THE_MACHINE)
        assert self.prometheus.firing() <= OF_THE_MACHINE


@pytest.fixture(scope="module")
def scene(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Give a cluster that is well, written to and scraped for a while."""
    root = tmp_path_factory.mktemp("scraped")
    with running(root, authority, Planes(False, False, False), OPTIONS) as planed:
        planed.wait_ready()
        with (
            beating(planed, f"file://{root / 'bucket'}") as brokers,
            kafka_serving(planed) as kafka,
            scraping(
                root / "prometheus", planed.http_endpoints, [kafka.http[KAFKA_ID]]
            ) as prometheus,
        ):
            wait_until(lambda: brokers.written >= 20, "twenty writes")
            count = f'count_over_time(streammeta_quorum_epoch{{job="{JOB}"}}[1h]) > 5'
            wait_until(lambda: len(prometheus.query(count)) == 3, "five scrapes of each")
            sent = "streammeta_kafka_fetched_bytes_total > 0"
            wait_until(lambda: len(prometheus.query(sent)) == 1, "records that were consumed")
            yield Scene(planed, brokers, kafka, prometheus)


def test_every_panel_of_the_dashboard_has_values(scene: Scene) -> None:
    empty = [
        (title, expression)
        for title, expression in expressions()
        if not scene.prometheus.query(
            expression.replace("$job", JOB).replace("$brokers", BROKERS).replace(RATE, "10s")
        )
    ]
    assert empty == []


def test_a_leader_that_is_scraped_gives_the_metrics_of_the_page(scene: Scene) -> None:
    leader = leader_of(scene.planed.cluster)
    status, text = scene.planed.page("/metrics", leader)
    assert status == 200
    given = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    named = set(re.findall(r"^\| `(\w+)`", written(), re.MULTILINE))
    assert given == named
    checked = subprocess.run(
        [path_of("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_no_alert_fires_in_a_cluster_that_is_well(scene: Scene) -> None:
    assert scene.prometheus.fired() <= OF_THE_MACHINE


def test_a_full_disk_raises_its_alert_until_there_is_room(scene: Scene) -> None:
    cluster = scene.planed.cluster
    follower = next(node_id for node_id in cluster.node_ids if node_id != leader_of(cluster))
    limit_files(cluster.children[follower].pid, 1)
    scene.wait_firing("StreammetaDiskFull")
    limit_files(cluster.children[follower].pid, resource.RLIM_INFINITY)
    scene.wait_quiet()


def test_a_silent_broker_raises_its_alert_until_it_is_back(scene: Scene) -> None:
    scene.brokers.only.remove(1008)
    scene.wait_firing("StreammetaBrokersFenced")
    scene.brokers.only.add(1008)
    scene.wait_quiet()


def test_a_killed_leader_raises_its_alert_until_it_is_back(scene: Scene) -> None:
    cluster = scene.planed.cluster
    leader = leader_of(cluster)
    cluster.children[leader].kill()
    scene.wait_firing("StreammetaMajorityAtRisk")
    assert "StreammetaNoLeader" not in scene.prometheus.fired()
    cluster.start(leader)
    scene.wait_quiet()


def test_a_broker_that_can_store_nothing_raises_its_alerts_until_it_can(scene: Scene) -> None:
    own = {"StreammetaClientUploadsFail", "StreammetaKafkaPartitionsUnavailable"}
    assert not own & scene.prometheus.fired()
    pid = scene.kafka.children[KAFKA_ID].pid
    limit_files(pid, 1)
    for name in own:
        scene.wait_firing(name)
    others = scene.prometheus.firing() - own - OF_THE_MACHINE
    assert not {name for name in others if "Kafka" not in name}, "controllers are well"
    limit_files(pid, resource.RLIM_INFINITY)
    wait_until(
        lambda: "StreammetaKafkaPartitionsUnavailable" not in scene.prometheus.firing(),
        "partitions to take records again",
    )


def test_a_certificate_near_its_end_raises_its_alerts_until_it_is_replaced(
    authority: Authority, tmp_path: Path
) -> None:
    soon, now = "StreammetaCertificateExpiresSoon", "StreammetaCertificateExpires"
    placed = Placed(tmp_path / "own", authority.issue("controller/1"))
    planes = Planes(http=False)
    with running(tmp_path / "cluster", authority, planes, QUICK, placed.files) as planed:
        planed.wait_ready()
        with scraping(tmp_path / "prometheus", planed.http_endpoints) as prometheus:
            assert not {soon, now} & prometheus.fired()
            for days, wanted in ((10, {soon}), (2, {soon, now})):
                own = tmp_path / str(days)
                own.mkdir()
                placed.place(replace(SOUND, end=timedelta(days=days)).issue(authority, own))
                wait_until(lambda: wanted <= prometheus.firing(), f"{wanted} to fire")  # noqa: B023
                assert {soon, now} & prometheus.fired() == wanted
            placed.place(authority.issue("controller/1", serial=1))
            wait_until(lambda: not {soon, now} & prometheus.firing(), "both to end")
