"""`streammeta check perf`: its verdict, on a real cluster too, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import PROGRAM, LocalCluster
from streammeta.cli.quorum.speed_check import NAMESPACE, Load, Measured, judge
from streammeta.v1 import kv_pb2
from streammeta.v1.kv_pb2_grpc import KVServiceStub
from tests.kit.hung_process import output_of
from tests.kit.real_cluster import leader_of, running_cluster
from tests.kit.waiting import wait_until

LOAD = Load(rate=100, duration_s=2)


def verdicts(latencies_ms: Sequence[float], failures: int = 0, elapsed_s: float = 2) -> list[bool]:
    measured = Measured(latencies_ms, ["refused"] * failures, elapsed_s)
    return [check.passed for check in judge(LOAD, measured)]


def test_each_threshold_is_judged_for_itself() -> None:
    assert verdicts([5.0] * 200) == [True, True, True, True]
    assert verdicts([5.0] * 200, elapsed_s=2.23) == [False, True, True, True]
    assert verdicts([5.0] * 179) == [False, True, True, True]
    assert verdicts([5.0] * 180) == [True, True, True, True]
    assert verdicts([5.0] * 198 + [101.0, 101.0]) == [True, True, True, True]
    assert verdicts([5.0] * 197 + [101.0] * 3) == [True, False, True, True]
    assert verdicts([5.0] * 199 + [1_001.0]) == [True, True, False, True]
    assert verdicts([5.0] * 199, failures=1) == [True, True, True, False]
    assert verdicts([], failures=200) == [False, True, True, False]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def keys(cluster: LocalCluster) -> list[str]:
    with ControllerClient(cluster.endpoints) as client:
        request = kv_pb2.ListKVsRequest(namespace=NAMESPACE, keys_only=True)
        listed = client.call(lambda channel: KVServiceStub(channel).ListKVs, request)
        return [entry.key for entry in listed.entries]


def begun(cluster: LocalCluster, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "check", "perf", "--connect", cluster.connect, "--format", "json", *words],
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    told, _ = output_of(process, 90)
    answer: dict[str, Any] = json.loads(told)
    return process.returncode, answer


@pytest.mark.process
def test_a_cluster_is_judged_and_left_as_it_was(cluster: LocalCluster) -> None:
    code, told = ended(begun(cluster, "--rate", "20", "--duration", "1s"))
    assert told["writes"] == 20
    assert {figure["figure"]: figure["threshold"] for figure in told["figures"]} == {
        "writes_per_s_at_least": 18.0,
        "p99_ms_at_most": 100.0,
        "slowest_ms_at_most": 1_000.0,
        "failed_writes_at_most": 0,
    }
    passed = [figure["verdict"] for figure in told["figures"]].count("pass") == 4
    said = (told["verdict"], code, told["ok"])
    assert said == (("pass", 0, True) if passed else ("fail", 1, False))
    assert 0 < told["p50_ms"] <= told["p99_ms"] <= told["slowest_ms"]
    assert keys(cluster) == []


@pytest.mark.process
def test_a_stopped_leader_fails_the_check_and_nothing_is_left(cluster: LocalCluster) -> None:
    leader = cluster.children[leader_of(cluster)]
    process = begun(cluster, "--rate", "50", "--duration", "5s", "--timeout", "30")
    wait_until(lambda: keys(cluster) != [], "the check to write")
    os.kill(leader.pid, signal.SIGSTOP)
    try:
        code, told = ended(process)
    finally:
        os.kill(leader.pid, signal.SIGCONT)
    assert (code, told["ok"], told["error"]["code"]) == (1, False, "TOO_SLOW")
    assert "slowest_ms_at_most" in told["error"]["message"]
    assert told["slowest_ms"] > 1_000
    assert keys(cluster) == []


@pytest.mark.process
def test_what_an_interrupted_check_left_is_removed_by_a_later_one(cluster: LocalCluster) -> None:
    others = f"{2**43:014d}-cafe/0"
    items = [
        kv_pb2.KVToPut(namespace=NAMESPACE, key=key, value=b"v")
        for key in ("00000000000001-cafe/0", others, "not-ours")
    ]
    with ControllerClient(cluster.endpoints) as client:
        put = kv_pb2.PutKVsRequest(items=items)
        client.call(lambda channel: KVServiceStub(channel).PutKVs, put)
    ended(begun(cluster, "--rate", "1", "--duration", "1s"))
    try:
        assert keys(cluster) == [others, "not-ours"]
    finally:
        with ControllerClient(cluster.endpoints) as client:
            delete = kv_pb2.DeleteKVsRequest(
                keys=[kv_pb2.KVKey(namespace=NAMESPACE, key=key) for key in (others, "not-ours")]
            )
            client.call(lambda channel: KVServiceStub(channel).DeleteKVs, delete)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--duration", "61s"], "1s to 60s"),
        (["--duration", "500ms"], "1s to 60s"),
        (["--rate", "0"], "--rate"),
    ],
)
def test_a_load_without_bounds_is_refused(words: list[str], named: str) -> None:
    command = [*PROGRAM, "check", "perf", "--connect", "127.0.0.1:1", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert named in done.stderr
