"""Real controllers: every operator's call is on record once, and what a killed one had begun."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.controller.features import SUPPORTED
from streammeta.controller.trust.audit.lines import NAMESPACE
from streammeta.rpc.methods import METHODS
from streammeta.v1 import admin_pb2, common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.kit.certificates import Authority
from tests.kit.real_cluster import (
    controller_command,
    format_data,
    leader_of,
    quorum,
    replica,
    start_python,
    streammeta,
)
from tests.kit.waiting import wait_until
from tests.trust.audited_cluster import AuditedCluster, ask, audited_cluster

pytestmark = pytest.mark.process

NODE = common_pb2.NodeIdentity(node_id=1000, node_epoch=1)
OF_NO_RESTORE = admin_pb2.ObjectToAdopt(
    object_id=9, ranges=[admin_pb2.RangeToAdopt(stream_id=0, stream_epoch=1, end_offset=9)]
)
GUARDED = {
    name.removeprefix("streammeta.v1.") for name, facts in METHODS.items() if facts.audit.is_guarded
}


def change_the_map(client: ControllerClient) -> None:
    """Make each call of the map that is guarded, and succeed."""
    ask(client, nodes_pb2.RegisterNodeRequest(node=NODE, wal_config="wal-secret"))
    created = ask(
        client,
        streams_pb2.CreateStreamsRequest(
            request_id="c", node=NODE, streams=[streams_pb2.NewStream()]
        ),
    )
    (stream,) = created.stream_ids
    opened = [streams_pb2.StreamToOpen(stream_id=stream, stream_epoch=1)]
    ask(client, streams_pb2.OpenStreamsRequest(node=NODE, streams=opened))
    closed = [streams_pb2.StreamToClose(stream_id=stream, stream_epoch=1, end_offset=9)]
    ask(client, streams_pb2.CloseStreamsRequest(node=NODE, streams=closed))
    ask(client, streams_pb2.AbandonUploadsRequest(request_id="a", node_id=1000))
    deleted = [streams_pb2.StreamToDelete(stream_id=stream, stream_epoch=1)]
    answer = ask(client, streams_pb2.DeleteStreamsRequest(node=NODE, streams=deleted))
    assert list(answer.errors) == [common_pb2.ERROR_CODE_NONE]
    ask(client, kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="k", value=b"value-secret")]))
    ask(client, kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(key="k")]))
    ask(client, nodes_pb2.LockNodeRequest(node_id=1000))
    ask(client, nodes_pb2.UnlockNodeRequest(node_id=1000))
    commit_and_delete_a_named_object(client)
    answer = ask(client, nodes_pb2.UnregisterNodeRequest(node=NODE))
    assert answer.error == common_pb2.ERROR_CODE_NONE


def commit_and_delete_a_named_object(client: ControllerClient) -> None:
    ask(client, kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="owner")]))
    prepare = objects_pb2.PrepareObjectsRequest(request_id="p", node=NODE, count=1, ttl_ms=60_000)
    named = objects_pb2.NamedObjectToCommit(
        object_id=ask(client, prepare).first_object_id,
        name="n",
        owner_key=objects_pb2.OwnerKey(key="owner"),
    )
    commit = objects_pb2.CommitNamedObjectsRequest(request_id="n", node=NODE, objects=[named])
    assert list(ask(client, commit).errors) == [common_pb2.ERROR_CODE_NONE]
    deleted = [objects_pb2.NamedObjectToDelete(name="n")]
    answer = ask(client, objects_pb2.DeleteNamedObjectsRequest(node=NODE, objects=deleted))
    assert list(answer.errors) == [common_pb2.ERROR_CODE_NONE]


def change_the_voters(cluster: AuditedCluster) -> None:
    """Add a voter, hand leadership to it and back, and remove it."""
    joined = cluster.join()
    wait_until(lambda: replica(cluster, joined).get("lag", 99) == 0, "the new one to catch up")
    endpoint = cluster.peer_endpoints[-1]
    quorum(cluster, "add-voter", "--node-id", str(joined), "--endpoint", endpoint)
    wait_until(lambda: bool(replica(cluster, joined).get("endpoint")), "the new one to report")
    quorum(cluster, "transfer", "--to", str(joined))
    assert leader_of(cluster) == joined
    quorum(cluster, "remove-voter", "--node-id", "1")


def test_every_guarded_call_is_recorded_once_with_its_offset(tmp_path: Path) -> None:
    with audited_cluster(tmp_path, 1) as cluster:
        assert leader_of(cluster) == 1
        with ControllerClient(cluster.endpoints, timeout_s=60) as client:
            ask(client, admin_pb2.UpdateFeatureLevelRequest(level=SUPPORTED.highest))
            change_the_map(client)
            ask(client, admin_pb2.TakeSnapshotRequest())
            ask(client, admin_pb2.FinishRestoreRequest())
            ask(client, admin_pb2.AdoptObjectsRequest(objects=[OF_NO_RESTORE]))
            ask(client, objects_pb2.CheckObjectsRequest(object_ids=[0, 7], deleting=True))
        change_the_voters(cluster)
        cluster.stop_all()
        files = [str(cluster.audit_log(node_id)) for node_id in cluster.node_ids]
        lines = cluster.lines()

    done = [line for line in lines if line["verdict"] == "OK" and line["call"] in GUARDED]
    refused = {"AdminService.AdoptObjects"}  # nothing was restored
    assert sorted(line["call"] for line in done) == sorted(set(GUARDED) - refused)
    assert {line["call"] for line in lines if line.get("reason") == "OBJECT_NOT_EXIST"} == refused
    for line in done:
        assert line.get("offset", 0) > 0 or line["call"].endswith("TransferLeadership")
        same = [one for one in lines if one["node"] == line["node"] and one["call"] == line["call"]]
        before = same[same.index(line) - 1]
        assert before["verdict"] == "BEGUN"
        assert before.get("target", {}).items() <= line.get("target", {}).items()
    released = [line for line in lines if line["call"] == "ObjectService.CheckObjects"]
    assert [line["verdict"] for line in released] == ["BEGUN", "OK"]
    assert all(line["target"] == {"objects": [0, 7]} for line in released)
    of_map = [line["offset"] for line in done if line["call"].startswith(("Node", "Stream", "KV"))]
    assert of_map == sorted(of_map)
    begun = [line["call"] for line in lines if line["call"].startswith("audit.")]
    assert begun == ["audit.start", "audit.stop"] * 2
    assert "secret" not in json.dumps(lines)
    verified = streammeta("audit", "verify", *files)
    assert verified["exit_code"] == 0
    heads = {chain["node"]: f"{chain['last_seq']}:{chain['head']}" for chain in verified["chains"]}
    for node_id, path in zip(cluster.node_ids, files, strict=True):
        logged = (tmp_path / f"controller-{node_id}.log").read_text()
        assert "secret" not in logged
        told = [
            line for line in map(json.loads, logged.splitlines()) if line["event"] == "audit_chain"
        ][-1]
        assert heads[node_id] == f"{told['seq']}:{told['hash']}"
        expected = streammeta("audit", "verify", path, "--expect", heads[node_id])
        assert expected["exit_code"] == 0


def start(root: Path, module: str, log: Path | None = None) -> tuple[Any, str]:
    """Start a controller that records calls; return it and its endpoint."""
    command = controller_command(root, audit_log=str(log or root / "audit.log"))
    command[1] = module
    child = start_python("audited", command, root)
    return child, child.wait_ready().removeprefix("endpoint=")


def test_a_call_committed_and_not_yet_recorded_by_a_killed_process_was_begun(
    tmp_path: Path,
) -> None:
    format_data(tmp_path)
    child, endpoint = start(tmp_path, "tests.trust.doomed_controller")
    try:
        with ControllerClient([endpoint], timeout_s=60) as client:
            ask(client, nodes_pb2.RegisterNodeRequest(node=NODE))
        with ControllerClient([endpoint], timeout_s=2) as client, pytest.raises(CallError):
            ask(client, nodes_pb2.LockNodeRequest(node_id=1000))
        assert child.process.wait(60) == -signal.SIGKILL
    finally:
        child.kill()

    child, endpoint = start(tmp_path, "streammeta.cli.main")
    try:
        with ControllerClient([endpoint], timeout_s=60) as client:
            (node,) = ask(client, nodes_pb2.GetNodesRequest()).nodes
        assert node.locked
    finally:
        child.stop()

    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_bytes().splitlines()]
    (begun,) = [line for line in lines if line["call"] == "NodeService.LockNode"]
    assert begun["verdict"] == "BEGUN"
    assert begun["target"] == {"node": 1000}
    assert lines[lines.index(begun) + 1]["call"] == "audit.start"
    assert streammeta("audit", "verify", str(tmp_path / "audit.log"))["exit_code"] == 0


def test_a_file_renamed_by_another_program_is_left_on_sighup(tmp_path: Path) -> None:
    format_data(tmp_path)
    child, endpoint = start(tmp_path, "streammeta.cli.main")
    path, renamed = tmp_path / "audit.log", tmp_path / "audit.log.1"
    try:
        with ControllerClient([endpoint], timeout_s=60) as client:
            ask(client, nodes_pb2.RegisterNodeRequest(node=NODE))
            path.rename(renamed)
            os.kill(child.pid, signal.SIGHUP)
            wait_until(path.exists, "a new file")
            ask(client, nodes_pb2.LockNodeRequest(node_id=1000))
    finally:
        child.stop()
    calls = [json.loads(line)["call"] for line in path.read_bytes().splitlines()]
    assert calls[:2] == ["NodeService.LockNode"] * 2
    assert streammeta("audit", "verify", str(renamed), str(path))["exit_code"] == 0


def test_over_tls_lines_name_callers_and_their_certificates(
    tmp_path: Path, authority: Authority
) -> None:
    broker, admin = authority.issue("broker/1000"), authority.issue("admin/alice")
    with audited_cluster(tmp_path, 1, {1: authority.issue("controller/1")}) as cluster:
        with ControllerClient(cluster.endpoints, timeout_s=60, tls=broker) as client:
            ask(client, nodes_pb2.RegisterNodeRequest(node=NODE))
            with pytest.raises(CallError, match="broker/1000"):
                ask(client, nodes_pb2.LockNodeRequest(node_id=1000))
        with ControllerClient(cluster.endpoints, timeout_s=60, tls=admin) as client:
            ask(client, nodes_pb2.LockNodeRequest(node_id=1000))
        cluster.stop_all()
        lines = [line for line in cluster.lines() if line["call"].endswith("LockNode")]
    said = [(line["principal"], line["verdict"], line.get("reason")) for line in lines]
    assert said == [
        ("broker/1000", "DENIED", "ROLE_LACKS_CALL"),
        ("admin/alice", "BEGUN", None),
        ("admin/alice", "OK", None),
    ]
    fingerprints = []
    for files in (broker, admin, admin):
        facts = files.load().facts
        assert facts is not None
        fingerprints.append(f"sha256:{facts.fingerprint}")
    assert [line["cert"] for line in lines] == fingerprints


def test_with_a_full_disk_operators_are_refused_and_brokers_are_not(tmp_path: Path) -> None:
    format_data(tmp_path)
    child, endpoint = start(tmp_path, "streammeta.cli.main", Path("/dev/full"))
    try:
        with ControllerClient([endpoint], timeout_s=60) as client:
            ask(client, nodes_pb2.RegisterNodeRequest(node=NODE))
        with (
            ControllerClient([endpoint], timeout_s=1) as client,
            pytest.raises(CallError, match="audit log"),
        ):
            ask(client, nodes_pb2.LockNodeRequest(node_id=1000))
        with ControllerClient([endpoint], timeout_s=60) as client:
            (node,) = ask(client, nodes_pb2.GetNodesRequest()).nodes
            assert not node.locked
            ask(client, kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="k", value=b"v")]))
    finally:
        assert child.stop() == 0
    events = [json.loads(line)["event"] for line in child.log_path.read_text().splitlines()]
    assert events.count("audit_log_failed") == 1


def test_a_log_that_can_not_be_opened_is_refused_at_the_start(tmp_path: Path) -> None:
    format_data(tmp_path)
    (tmp_path / "audit.log").mkdir()
    command = controller_command(tmp_path, audit_log=str(tmp_path / "audit.log" / "x" / "y"))
    (tmp_path / "audit.log" / "x").write_text("a file")
    child = start_python("refused", command, tmp_path)
    assert child.process.wait(60) != 0
    assert "audit-log: " in child.log_tail()
    child.stop()


def test_a_cut_end_of_any_controllers_log_is_reported_by_the_cluster_and_by_a_copy(
    tmp_path: Path,
) -> None:
    with audited_cluster(tmp_path, 3) as cluster:
        leader_of(cluster)
        files = [str(cluster.audit_log(node_id)) for node_id in cluster.node_ids]
        keys = kv_pb2.ListKVsRequest(namespace=NAMESPACE)
        with ControllerClient(cluster.endpoints, timeout_s=60) as client:
            wait_until(lambda: len(ask(client, keys).entries) == 3, "an anchor of each log")
        live = ("audit", "verify", *files, "--connect", cluster.connect)
        assert streammeta(*live)["ok"]
        copy = tmp_path / "map"
        made = streammeta(
            *("snapshot", "export", "--connect", cluster.connect, "--to", "parquet", str(copy))
        )
        assert made["ok"], made
        cluster.stop_all()
        for file in map(Path, files):
            whole = file.read_bytes()
            assert streammeta("audit", "verify", *files, "--map", str(copy))["ok"]
            file.write_bytes(whole[: whole.index(b"\n") // 2])
            answer = streammeta("audit", "verify", *files, "--map", str(copy))
            assert answer["error"]["code"] == "AUDIT_CHAIN", answer
            file.write_bytes(whole)
