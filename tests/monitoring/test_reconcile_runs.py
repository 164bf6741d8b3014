"""Runs of reconciliation as real controllers keep and show them.

No failure to tell is one of the run, and what stands there and can't be read is left alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import tls_words
from streammeta.reconcile.run_reporter import report_run
from streammeta.storage.cluster_files.reconcile_runs import KEY, NAMESPACE, Run, decode
from streammeta.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST
from tests.kit.waiting import wait_until
from tests.monitoring.planes import Planed, Planes, running

pytestmark = pytest.mark.process

RUN = Run(
    started_ms=1_000,
    ended_ms=2_000,
    kind="plan",
    engine="local",
    result="settled",
    problem="",
    succeeded=True,
    orphan_bytes=70,
    missing=2,
)


@pytest.fixture(scope="module")
def plain(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planed]:
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
    plain: Planed, tmp_path: Path
) -> None:
    write(plain, None)
    made = planning(plain, tmp_path / "p")
    assert (made.returncode, "warning" in made.stderr) == (0, False), made.stderr
    assert report_run(RUN, plain.cluster.endpoints, None) == ""
    for node_id in plain.cluster.node_ids:
        shown = "streammeta_reconcile_last_success_timestamp_seconds"
        wait_until(lambda: plain.metrics(node_id).get(shown) == 2, "it has come")  # noqa: B023
        seen = plain.metrics(node_id)
        assert seen["streammeta_reconcile_orphan_bytes"] == 70
        assert seen["streammeta_reconcile_missing_objects"] == 2

    def status() -> dict[str, object]:
        document: dict[str, object] = json.loads(plain.page("/api/status.json")[1])["reconcile"]
        return document

    wait_until(lambda: len(status()["runs"]) == 2, "both are shown")  # type: ignore[arg-type]
    assert (status()["missing"], status()["problem"]) == (2, "")
    newest, first = decode(kept(plain)).runs
    assert newest == RUN
    assert (first.kind, first.engine, first.orphans, first.missing) == ("plan", "local", 0, 0)
    wait_until(lambda: "1970-01-01 00:00:02 UTC" in plain.page("/reconcile")[1], "the page has it")


def test_runs_told_at_the_same_time_are_all_kept(plain: Planed) -> None:
    write(plain, None)
    runs = [replace(RUN, ended_ms=3_000 + number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(lambda run: report_run(run, plain.cluster.endpoints, None), runs))
    assert told == [""] * 3
    assert {each.ended_ms for each in decode(kept(plain)).runs} == {3_000, 3_001, 3_002}


@pytest.mark.parametrize("value", [b"\xff", b'{"version": 2}', b"<script>alert(1)</script>"])
def test_a_value_of_someone_else_is_shown_as_unreadable_and_stays(
    plain: Planed, tmp_path: Path, value: bytes
) -> None:
    write(plain, value)
    for node_id in plain.cluster.node_ids:
        note = "The reports of runs can&#39;t be read"
        wait_until(lambda: note in plain.page("/reconcile", node_id)[1], "it is told")  # noqa: B023
        assert "<script>alert" not in plain.page("/reconcile", node_id)[1]
        assert not [name for name in plain.metrics(node_id) if "reconcile" in name]
        assert plain.page("/", node_id)[0] == 200
    made = planning(plain, tmp_path / "p")
    assert made.returncode == 0
    assert "warning: status pages do not show this run" in made.stderr
    assert "left unchanged" in made.stderr
    assert kept(plain) == value


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
        assert [each.kind for each in decode(kept(planed)).runs] == ["plan"]
