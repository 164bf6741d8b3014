"""Status, history and runs of reconciliation, as real controllers show them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import tls_words
from streammeta.reconcile.run_reporter import report_run
from streammeta.storage.cluster_files.reconcile_runs import KEY, NAMESPACE, decode
from streammeta.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST, put
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get
from tests.monitoring.planes import Planed, Planes, running
from tests.reconcile.test_reconcile_telling import RUN

pytestmark = pytest.mark.process

STATUS = "/api/status.json"


def status(planed: Planed, node_id: int) -> dict[str, Any]:
    code, text = planed.page(STATUS, node_id)
    assert code == 200, text
    document: dict[str, Any] = json.loads(text)
    return document


def names_of_alarms(planed: Planed, node_id: int) -> set[str]:
    return {alarm["name"] for alarm in status(planed, node_id)["alarms"]}


def is_well(seen: dict[str, Any]) -> bool:
    """Whether a status tells of three controllers that answer, have all, and hold one key."""
    controllers = [(node["node_id"], node["answers"]) for node in seen["controllers"]]
    has_all = [voter["lag"] for voter in seen["quorum"]["voters"]] == [0, 0, 0]
    is_led = seen["quorum"]["leader_id"] in (1, 2, 3)
    all_answer = controllers == [(1, True), (2, True), (3, True)]
    return has_all and is_led and all_answer and not seen["alarms"] and seen["map"]["keys"] == 1


@pytest.fixture
def plain(authority: Authority, tmp_path: Path) -> Iterator[Planed]:
    """Give controllers in plain text."""
    with running(tmp_path, authority, Planes(False, False, False), FAST) as planed:
        planed.wait_ready()
        yield planed


def test_every_controller_tells_of_all_with_a_leader_and_without_a_majority(plain: Planed) -> None:
    planed = plain
    with ControllerClient(planed.cluster.endpoints) as client:
        put(client, "key", "value")
    for node_id in planed.cluster.node_ids:
        wait_until(lambda: is_well(status(planed, node_id)), "all is well")  # noqa: B023

    leader = status(planed, 1)["quorum"]["leader_id"]
    left = [node_id for node_id in planed.cluster.node_ids if node_id != leader]
    planed.cluster.children[leader].kill()

    def is_replaced() -> bool:
        seen = status(planed, left[0])
        has_other = seen["quorum"]["has_leader"] and seen["quorum"]["leader_id"] != leader
        return has_other and names_of_alarms(planed, left[0]) == {"controller_silent"}

    wait_until(is_replaced, "another leads, and the dead one is named")
    planed.cluster.children[left[1]].kill()
    lost = {"no_leader", "controller_silent"}
    wait_until(lambda: names_of_alarms(planed, left[0]) >= lost, "the loss is told")
    assert status(planed, left[0])["map"]["keys"] == 1, "the map is shown without a leader"


def test_the_history_has_a_sample_a_second(plain: Planed) -> None:
    def samples(query: str) -> dict[str, Any]:
        code, text = plain.page(f"/api/series.json?{query}")
        assert code == 200, text
        document: dict[str, Any] = json.loads(text)
        return document

    wait_until(lambda: len(samples("names=epoch")["times"]) >= 3, "there are samples")
    seen = samples("names=epoch,commit_p99")
    assert list(seen["series"]) == ["epoch", "commit_p99"]
    assert seen["series"]["epoch"][-1] >= 1
    assert seen["units"]["commit_p99"] == "ms"
    later = samples(f"names=epoch&since={seen['times'][-2]}")
    assert later["times"][0] == seen["times"][-1]
    assert samples("step=60&names=epoch")["times"] == []
    for query in ("names=epoch,nothing", "step=2", "since=x"):
        assert plain.page(f"/api/series.json?{query}")[0] == 400


def test_over_tls_the_status_is_for_roles_and_controllers_ask_by_their_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    with running(tmp_path, authority, Planes(), FAST) as planed:
        planed.wait_ready()
        wait_until(lambda: not names_of_alarms(planed, 1), "all answer")
        at = planed.http_endpoints[0]
        for role, code in (("broker/7", 403), ("reader/r", 200), ("admin/alice", 200)):
            assert get(at, STATUS, authority.issue(role))[0] == code


def test_a_port_in_plain_text_beside_tls_has_no_status(
    authority: Authority, tmp_path: Path
) -> None:
    with running(tmp_path, authority, Planes(http=False), FAST) as planed:
        planed.wait_ready()
        assert planed.page("/metrics")[0] == 200
        assert planed.page(STATUS)[0] == 404


@pytest.fixture(scope="module")
def asking(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planed]:
    root = tmp_path_factory.mktemp("telling")
    with running(root, authority, Planes(False, False, False), FAST) as planed:
        planed.wait_ready()
        yield planed


def kept(planed: Planed) -> bytes:
    """Return the value, as an admin reads it."""
    request = kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(namespace=NAMESPACE, key=KEY)])
    with ControllerClient(planed.cluster.endpoints, tls=planed.admin) as client:
        answer = client.call_leader(
            lambda channel, _: kv_pb2_grpc.KVServiceStub(channel).GetKVs(request), 20
        )
    return bytes(answer.results[0].value)


def write(planed: Planed, value: bytes | None) -> None:
    """Put a value there, or delete the key."""

    def send(channel: grpc.Channel, _: float) -> object:
        stub = kv_pb2_grpc.KVServiceStub(channel)
        if value is None:
            key = kv_pb2.KVKey(namespace=NAMESPACE, key=KEY)
            return stub.DeleteKVs(kv_pb2.DeleteKVsRequest(keys=[key]))
        item = kv_pb2.KVToPut(namespace=NAMESPACE, key=KEY, value=value, overwrite=True)
        return stub.PutKVs(kv_pb2.PutKVsRequest(items=[item]))

    with ControllerClient(planed.cluster.endpoints, tls=planed.admin) as client:
        client.call_leader(send, 20)


def planning(planed: Planed, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `streammeta reconcile plan` on the cluster, whose map is empty."""
    command = [
        *(sys.executable, "-m", "streammeta.cli.main", "reconcile", "plan"),
        *("--store", planed.cluster.store_uri, "--connect", planed.cluster.connect),
        *("--plan", str(folder), "--engine", "local", "--allow-empty-map", *words),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_runs_of_the_command_are_on_the_page_in_the_status_and_in_the_metrics(
    asking: Planed, tmp_path: Path
) -> None:
    write(asking, None)
    made = planning(asking, tmp_path / "p")
    assert (made.returncode, "warning" in made.stderr) == (0, False), made.stderr
    assert report_run(RUN, asking.cluster.endpoints, None) == ""
    for node_id in asking.cluster.node_ids:
        shown = "streammeta_reconcile_last_success_timestamp_seconds"
        wait_until(lambda: asking.metrics(node_id).get(shown) == 2, "it has come")  # noqa: B023
        seen = asking.metrics(node_id)
        assert seen["streammeta_reconcile_orphan_bytes"] == 70
        assert seen["streammeta_reconcile_missing_objects"] == 2

    def status() -> dict[str, object]:
        document: dict[str, object] = json.loads(asking.page("/api/status.json")[1])["reconcile"]
        return document

    wait_until(lambda: len(status()["runs"]) == 2, "both are shown")  # type: ignore[arg-type]
    assert (status()["missing"], status()["problem"]) == (2, "")
    newest, first = decode(kept(asking)).runs
    assert newest == RUN
    assert (first.kind, first.engine, first.orphans, first.missing) == ("plan", "local", 0, 0)
    wait_until(lambda: "1970-01-01 00:00:02 UTC" in asking.page("/reconcile")[1], "the page has it")


def test_runs_told_at_the_same_time_are_all_kept(asking: Planed) -> None:
    write(asking, None)
    runs = [replace(RUN, ended_ms=3_000 + number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(lambda run: report_run(run, asking.cluster.endpoints, None), runs))
    assert told == [""] * 3
    assert {run.ended_ms for run in decode(kept(asking)).runs} == {3_000, 3_001, 3_002}


@pytest.mark.parametrize("value", [b"\xff", b'{"version": 2}', b"<script>alert(1)</script>"])
def test_a_value_of_someone_else_is_shown_as_unreadable_and_stays(
    asking: Planed, tmp_path: Path, value: bytes
) -> None:
    write(asking, value)
    for node_id in asking.cluster.node_ids:
        note = "The reports of runs can&#39;t be read"
        wait_until(lambda: note in asking.page("/reconcile", node_id)[1], "it is told")  # noqa: B023
        assert "<script>alert" not in asking.page("/reconcile", node_id)[1]
        assert not [name for name in asking.metrics(node_id) if "reconcile" in name]
        assert asking.page("/", node_id)[0] == 200
    made = planning(asking, tmp_path / "p")
    assert made.returncode == 0
    assert "warning: status pages do not show this run" in made.stderr
    assert "left unchanged" in made.stderr
    assert kept(asking) == value


def test_a_reconcilers_certificate_tells_of_its_run_and_a_readers_does_not(
    authority: Authority, tmp_path: Path
) -> None:
    with running(tmp_path / "tls", authority, Planes(), FAST) as planed:
        planed.wait_ready()
        refused = report_run(RUN, planed.cluster.endpoints, authority.issue("reader/spark"))
        assert "reader/spark may not use keys of namespace '_streammeta/reconcile'" in refused
        assert kept(planed) == b""
        words = tls_words(authority.issue("reconciler/nightly"))
        made = planning(planed, tmp_path / "plan", *words)
        assert (made.returncode, "warning" in made.stderr) == (0, False), made.stderr
        assert [run.kind for run in decode(kept(planed)).runs] == ["plan"]
