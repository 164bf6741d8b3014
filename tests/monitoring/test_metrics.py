"""Metrics of a controller: values, names, units, their page, and the bound on a scrape's lines."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.controller.features import SUPPORTED
from streammeta.controller.monitoring.history.sampling import LAG_INTERVAL_S, LoopLag
from streammeta.controller.monitoring.metrics.families import Exposition
from streammeta.controller.quorum import roles
from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.rpc.calls.tally import RequestTally
from streammeta.controller.runtime.writer.submission import CommitTally
from streammeta.controller.trust.audit.file import AuditFile
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.storage.durable_files import PosixFileSystem
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY
from tests.kit.tools import needs, path_of
from tests.kit.waiting import until, wait_until
from tests.monitoring.http_calls import samples
from tests.monitoring.metrics_table import PAGE, TABLES, series_names, table, written
from tests.monitoring.planes import Planed, Planes, running
from tests.monitoring.sampled import END, LEADING, SOURCES, audited, registry_of
from tests.server.rpc_server import NODE, serving

OF_FILES = {
    f"streammeta_reconcile_{name}"
    for name in ("last_success_timestamp_seconds", "bytes", "lost_objects")
}
"""Metrics in files that reconciliation writes."""

LINES_MAX = 1_500
"""Lines of a scrape, whatever the map holds."""


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    return {
        name.removeprefix("streammeta_"): value
        for name, value in samples(generate_latest(registry).decode()).items()
    }


def test_values_are_those_of_the_parts() -> None:
    seen = scraped(registry_of())
    assert seen['build_info{version="1.2.3"}'] == 1
    assert (seen["quorum_is_leader"], seen["quorum_has_leader"], seen["quorum_leader_id"]) == (
        1,
        1,
        1,
    )
    assert seen['quorum_state{state="leader"}'] == 1
    assert sum(value for name, value in seen.items() if name.startswith("quorum_state{")) == 1
    assert (seen["quorum_epoch"], seen["quorum_high_watermark"]) == (3, 50_000)
    assert (seen["log_end_offset"], seen["log_applied_offset"]) == (50_000, 49_000)
    assert seen['quorum_replica_lag_offsets{peer="2"}'] == 10
    assert 'quorum_replica_lag_offsets{peer="3"}' not in seen
    assert seen['quorum_replica_last_caught_up_age_seconds{peer="2"}'] == 0.25
    assert seen['map_objects{state="mark_destroyed"}'] == 4
    assert (seen["map_streams"], seen["map_nodes"], seen["map_keys"]) == (1, 6, 7)
    assert seen['tls_certificate_not_after_timestamp_seconds{plane="http"}'] == END.timestamp()
    assert seen['tls_reloads_total{plane="http",result="refused"}'] == 2
    assert seen['connections{plane="clients"}'] == 3
    assert seen['connections_refused_total{cause="hello_refused",plane="peers"}'] == 3
    assert seen["tls_handshakes_begun_total"] == 11
    assert seen['requests_refused_total{reason="NO_IDENTITY"}'] == 5
    assert seen['commits_total{verdict="accepted"}'] == 20
    assert seen['commits_total{verdict="refused"}'] == 1
    assert (seen["request_memory_bytes"], seen["memory_limit_bytes"]) == (4096, 1 << 30)
    assert (seen["backup_end_offset"], seen["backup_lag_offsets"]) == (49_900, 100)
    assert (seen["backup_lag_seconds"], seen["backup_failing"]) == (2.5, 1)
    assert seen["deletions_ahead"] == 4
    assert (seen["deletions_unbacked"], seen["deletions_unbacked_age_seconds"]) == (12, 70.5)
    assert (seen["feature_level"], seen["feature_level_max"]) == (2, SUPPORTED.highest)
    assert seen["quorum_uncommitted_offsets"] == 0
    assert seen['commit_latency_seconds_count{verdict="accepted"}'] == 20
    assert seen['commit_latency_seconds_bucket{le="0.002048",verdict="accepted"}'] == 0
    assert seen['commit_latency_seconds_bucket{le="0.004096",verdict="accepted"}'] == 20
    assert seen['commit_latency_seconds_sum{verdict="refused"}'] == 0.1


def test_values_of_the_work_are_those_of_the_parts() -> None:
    seen = scraped(registry_of())
    assert seen['quorum_replica_last_fetch_age_seconds{peer="2"}'] == 0.01
    assert (seen["quorum_leaderships_begun_total"], seen["quorum_leaderships_ended_total"]) == (
        2,
        1,
    )
    assert seen['peer_requests_failed_total{peer="2"}'] == 3
    assert seen['log_flush_duration_seconds_bucket{le="0.001024"}'] == 2
    assert seen["log_flush_duration_seconds_count"] == 3
    assert (seen["log_bytes"], seen["log_appended_bytes_total"]) == (900, 1_000)
    assert seen["data_dir_free_bytes"] == 1 << 40
    assert (seen["checkpoint_bytes"], seen["checkpoint_age_seconds"]) == (5_000, 6)
    assert seen["checkpoints_put_off_total"] == 1
    assert (seen['map_used{quota="kv_keys"}'], seen['map_limit{quota="kv_keys"}']) == (7, 70)
    assert seen['bucket_calls_total{operation="put"}'] == 9
    assert seen['bucket_calls_failed_total{operation="put"}'] == 1
    assert seen['node_sessions{state="active"}'] == 5
    assert (seen["recoveries_assigned"], seen["compactions_assigned"]) == (1, 2)
    assert seen["node_sessions_expired_total"] == 4
    assert seen['deletions_total{result="deleted"}'] == 30
    assert seen["deletion_rate_limit"] == 2_000
    assert seen["process_resident_memory_bytes"] > 1 << 20


def test_what_can_be_counted_is_there_before_it_happens() -> None:
    seen = scraped(registry_of())
    assert seen['connections_refused_total{cause="handshake_failed",plane="http"}'] == 0
    assert seen['requests_refused_total{reason="BUSY"}'] == 0
    assert seen['loop_lag_seconds_bucket{le="0.0005"}'] == 0
    assert seen['requests_total{method="KVService.PutKVs",result="failed"}'] == 0
    assert seen['admission_refused_total{class="commit"}'] == 0
    assert seen['bucket_throttled_total{operation="delete_many"}'] == 0
    assert seen['commit_latency_seconds_bucket{le="0.000512",verdict="refused"}'] == 0


async def test_calls_are_counted_by_how_they_end() -> None:
    async def end(wanted: str, _: object) -> bytes:
        if wanted == "failed":
            raise ValueError(wanted)
        if wanted == "abandoned":
            raise asyncio.CancelledError
        return b""

    tally = RequestTally()
    call = tally.wrap("streammeta.v1.KVService.GetKVs", end, lasts=False)
    await call("answered", None)
    with pytest.raises(ValueError, match="failed"):
        await call("failed", None)
    with pytest.raises(asyncio.CancelledError):
        await call("abandoned", None)
    (seen,) = tally.methods.values()
    assert list(tally.methods) == ["KVService.GetKVs"]
    assert seen.ended == {"answered": 1, "failed": 1, "abandoned": 1}
    assert seen.under_way == 0
    assert seen.times is not None
    assert seen.times.total == 3


def test_what_is_not_known_has_no_value() -> None:
    following = replace(LEADING, role="follower", leader_id=None, has_leader=False)
    sources = replace(SOURCES, quorum=lambda: following, certificates=list, backup=lambda: None)
    seen = scraped(registry_of(sources))
    assert (seen["quorum_is_leader"], seen["quorum_has_leader"]) == (0, 0)
    for name in (
        "quorum_leader_id",
        "quorum_uncommitted",
        "quorum_replica_lag",
        "tls_cert",
        "audit_",
        "backup_",
    ):
        assert not [metric for metric in seen if metric.startswith(name)]


def test_every_part_in_the_quorum_is_a_state() -> None:
    states = {
        roles.Unattached, roles.Prospective, roles.Candidate, roles.Follower, roles.Leader,
        roles.Resigned,
    }  # fmt: skip
    named = [name for name in scraped(registry_of()) if name.startswith("quorum_state{")]
    assert {f'quorum_state{{state="{state.__name__.lower()}"}}' for state in states} == set(named)


async def test_the_audit_log_is_watched(tmp_path: Path) -> None:
    writer = AuditWriter(AuditFile(PosixFileSystem(), tmp_path / "audit.log"))
    try:
        seen = scraped(audited(writer))
        assert (seen["audit_failing"], seen["audit_lines_total"]) == (0, 0)
        writer.failure, writer.lost = "the disk is full", 3
        seen = scraped(audited(writer))
        assert (seen["audit_failing"], seen["audit_dropped_total"]) == (1, 3)
        writer.failure = ""
    finally:
        await writer.stop()


@pytest.mark.parametrize("of", TABLES)
def test_the_page_has_all_metrics(of: str) -> None:
    assert written(of) == table(of), "run: python -m tests.monitoring.metrics_table"


def test_what_the_page_offers_for_other_names_exists() -> None:
    _, _, names = PAGE.read_text().partition("## Other names")
    lines = names.partition("\n## ")[0].splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    assert len(rows) > 20
    known = set().union(*map(series_names, TABLES))
    for _, expected, given, *_ in rows:
        found = re.findall(r"`(streammeta_\w+)", given)
        assert found or given.strip().startswith("left out: "), given
        assert set(found) <= known | OF_FILES
        assert not set(re.findall(r"`(\w+)`", expected)) & {
            name.removeprefix("streammeta_") for name in known
        }, f"{expected} is given by its own name"


def test_a_scrape_is_short() -> None:
    assert len(generate_latest(registry_of()).splitlines()) <= LINES_MAX


@needs("promtool")
@pytest.mark.parametrize("of", TABLES)
def test_promtool_finds_nothing(of: str) -> None:
    checked = subprocess.run(
        [path_of("promtool"), "check", "metrics"],
        input=generate_latest(TABLES[of]()),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, b"")


class Counted(Collector):
    """Two metrics; counts how often they are collected, and turns of others before each."""

    def __init__(self) -> None:
        self.times = self.turns = 0
        self.turns_before: list[int] = []

    def collect(self) -> Iterator[Metric]:
        self.times += 1
        self.turns_before.append(self.turns)
        yield GaugeMetricFamily("one", "One.", value=1)
        self.turns_before.append(self.turns)
        yield GaugeMetricFamily("two", "Two.", value=self.times)


async def test_scrapes_at_the_same_time_share_one_and_others_run_meanwhile() -> None:
    registry, counted = CollectorRegistry(), Counted()
    registry.register(counted)
    counted.times = 0
    counted.turns_before.clear()
    exposition = Exposition(registry)

    async def others() -> None:
        while True:
            counted.turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    texts = await asyncio.gather(exposition.text(), exposition.text())
    running.cancel()
    assert [samples(text.decode()) for text in texts] == [{"one": 1.0, "two": 1.0}] * 2
    assert counted.turns_before[0] < counted.turns_before[1]
    assert samples((await exposition.text()).decode())["two"] == 2


async def test_a_held_loop_is_seen() -> None:
    registry = CollectorRegistry()
    measuring = asyncio.create_task(LoopLag(registry).run())

    def late() -> float:
        return scraped(registry)["loop_lag_seconds_sum"]

    await asyncio.sleep(0)
    held_for = 3 * LAG_INTERVAL_S
    loop = asyncio.get_running_loop()
    until_s = loop.time() + held_for
    while loop.time() < until_s:
        pass
    await until(lambda: scraped(registry)["loop_lag_seconds_count"] >= 1, "a measurement")
    assert late() >= held_for - LAG_INTERVAL_S - 0.01
    measuring.cancel()


def commit(object_id: int, stream_id: int, start: int) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        request_id=f"commit {object_id}",
        node=NODE,
        object_id=object_id,
        order_id=object_id,
        object_size=100,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        ranges=objects_pb2.RangeColumns(
            stream_id=[stream_id], stream_epoch=[1], start_offset=[start], end_offset=[start + 10]
        ),
    )


async def test_single_commits_are_counted_by_verdict() -> None:
    async with serving() as rpcs:
        (stream_id,), first = await rpcs.begin(streams=1, objects=3)
        answers = [
            await rpcs.ask(commit(first + number, stream_id, start))
            for number, start in enumerate((0, 10, 50))
        ]
    assert [answer.error == common_pb2.ERROR_CODE_NONE for answer in answers] == [True, True, False]
    assert rpcs.controller.commits == CommitTally(accepted=2, refused=1)
    assert sum(rpcs.controller.commits.times) == 3


async def test_calls_that_end_with_an_error_are_counted_by_reason() -> None:
    before = error_mapping.refused["INVALID_FIELD"]
    async with serving() as rpcs:
        refused = await rpcs.refusal("StreamService/CreateStreams", b"\xff\xff\xff")
    assert refused[1] == "INVALID_FIELD"
    assert error_mapping.refused["INVALID_FIELD"] == before + 1


STREAMS, STREAMS_A_CALL = 10_000, 2_000
NODES = range(1_000, 1_300)
PATHS = 200


@pytest.mark.process
async def test_streams_nodes_and_unknown_paths_add_no_line(
    authority: Authority, tmp_path: Path
) -> None:
    rng = random.Random(0)
    with running(tmp_path / "run", authority, Planes(False, False, False), STEADY) as planed:
        planed.wait_ready()
        async with ControllerClient(planed.cluster.endpoints) as client:
            await _filled(client, NODES[:1], 1)
            planed.page("/unknown")
            leader = _leader(planed)
            before = set(planed.metrics(leader))
            await _filled(client, NODES, STREAMS)
        for _ in range(PATHS):
            status, _ = planed.page(f"/{rng.randbytes(8).hex()}", leader)
            assert status == 404
        wait_until(lambda: _streams(planed, leader) > STREAMS, "the streams to be counted")
        after = set(planed.metrics(leader))
        status, text = planed.page("/metrics", leader)
    assert after == before
    assert (status, len(text.splitlines()) <= LINES_MAX) == (200, True)


async def _filled(client: ControllerClient, nodes: range, streams: int) -> None:
    """Register brokers, and create streams with a tag of its own each."""
    sessions = [await BrokerSession.open(client, node_id, 1) for node_id in nodes]
    tags = [{"topic": f"topic-{number}"} for number in range(streams)]
    for start in range(0, streams, STREAMS_A_CALL):
        await sessions[0].create_streams(tags[start : start + STREAMS_A_CALL])


def _leader(planed: Planed) -> int:
    return next(
        n for n in planed.cluster.node_ids if planed.metrics(n)["streammeta_quorum_is_leader"]
    )


def _streams(planed: Planed, node_id: int) -> float:
    return planed.metrics(node_id)["streammeta_map_streams"]
