"""Real controllers: voters come and go, leadership moves, disks are lost, and nothing else is."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.rpc.calls.error_mapping import OFFSET_KEY, READ_AFTER_KEY
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.failures import read_failure
from streammeta.v1 import kv_pb2
from streammeta.v1.kv_pb2_grpc import KVServiceStub
from tests.kit.real_cluster import (
    STEADY,
    controller_command,
    leader_of,
    put,
    quorum,
    running_cluster,
    start_python,
    streammeta,
    writes_going_on,
)
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three controllers, for tests that leave them as they were but for who leads."""
    with running_cluster(tmp_path_factory.mktemp("quorum"), options=STEADY) as running:
        leader_of(running)
        wait_until(lambda: _have_told_their_disks(running), "all voters have told their disks")
        yield running


def _have_told_their_disks(cluster: LocalCluster) -> bool:
    rows = quorum(cluster, "describe")["replicas"]
    return all(row["directory_id"] and row["endpoint"] for row in rows)


def test_describe_tells_who_leads_and_how_far_everybody_is(cluster: LocalCluster) -> None:
    with ControllerClient(cluster.endpoints, timeout_s=60) as client:
        put(client, "described", "yes")

    def nobody_lags() -> bool:
        return all(row["lag"] == 0 for row in quorum(cluster, "describe")["replicas"])

    wait_until(nobody_lags, "all voters have everything")
    for connect in cluster.endpoints:
        seen = quorum(cluster, "describe", connect=connect)

        assert (seen["cluster_id"], seen["voter_ids"]) == ("test", [1, 2, 3])
        roles = {row["node_id"]: row["role"] for row in seen["replicas"]}
        assert sorted(roles.values()) == ["follower", "follower", "leader"]
        assert roles[seen["leader_id"]] == "leader"
        assert [row["endpoint"] for row in seen["replicas"]] == cluster.endpoints
        assert [row["peer_endpoint"] for row in seen["replicas"]] == cluster.peer_endpoints
        assert all(row["end_offset"] >= seen["high_watermark"] > 0 for row in seen["replicas"])
        assert [row["node_id"] for row in seen["controllers"]] == [1, 2, 3]
        assert not any(row["repairing"] or row["disk_full"] for row in seen["controllers"])
        assert "silent" not in seen


def test_leadership_goes_where_it_is_sent(cluster: LocalCluster) -> None:
    with writes_going_on(cluster) as writes:
        for _ in range(2):
            writes.expect_progress()
            leader = leader_of(cluster)
            to = leader % 3 + 1

            answer = quorum(cluster, "transfer", "--to", str(to))

            assert (answer["leader_before"], answer["leader_id"]) == (leader, to)
        assert quorum(cluster, "transfer")["leader_id"] != to


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("add-voter", "--node-id", "9", "--endpoint", "h:1"), "OBSERVER_NOT_FOUND", "--seeds"),
        (("add-voter", "--node-id", "9", "--endpoint", "h"), "CONFIG", "HOST:PORT"),
        (("remove-voter", "--node-id", "1", "--directory-id", "x"), "VOTER_NOT_FOUND", "describe"),
        (("transfer", "--to", "9"), "TRANSFER_REFUSED", "9"),
        (("transfer", "--to", "1000"), "USAGE", "0<=x<=999"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(
    cluster: LocalCluster, words: tuple[str, ...], code: str, says: str
) -> None:
    before = quorum(cluster, "describe")

    name, *more = words
    said = streammeta("quorum", name, "--connect", cluster.connect, *more)

    assert (said["ok"], said["error"]["code"]) == (False, code), said
    assert said["exit_code"] == (2 if code == "USAGE" else 1)
    assert says in said["error"]["message"] + said["error"]["hint"]
    after = quorum(cluster, "describe")
    for unchanged in ("voter_ids", "leader_id", "epoch"):
        assert before[unchanged] == after[unchanged]


def test_each_controller_that_is_named_writes_a_snapshot(cluster: LocalCluster) -> None:
    taken = quorum(cluster, "snapshot")["snapshots"]

    assert [row["node_id"] for row in taken] == [1, 2, 3]
    seen = {row["node_id"]: row for row in quorum(cluster, "describe")["controllers"]}
    for row in taken:
        assert seen[row["node_id"]]["snapshot_end"] >= row["end_offset"] > 0


# -- session reads


class Session:
    """Reads and writes one key at chosen controllers, with the metadata of session reads."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._channels = {
            node_id: operator_channel(endpoint)
            for node_id, endpoint in zip(cluster.node_ids, cluster.endpoints, strict=True)
        }

    def write(self, node_id: int, value: str) -> int:
        """Put the key; return the offset that the answer quotes."""
        item = kv_pb2.KVToPut(key="session", value=value.encode(), overwrite=True)
        _, call = KVServiceStub(self._channels[node_id]).PutKVs.with_call(
            kv_pb2.PutKVsRequest(items=[item]), timeout=60
        )
        return _quoted_offset(call)

    def read(self, node_id: int, after: object, timeout_s: float = 10) -> tuple[str, int]:
        """Get the key; return its value and the offset that the answer quotes."""
        answer, call = KVServiceStub(self._channels[node_id]).GetKVs.with_call(
            kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key="session")]),
            timeout=timeout_s,
            metadata=((READ_AFTER_KEY, str(after)),),
        )
        return answer.results[0].value.decode(), _quoted_offset(call)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _quoted_offset(call: Any) -> int:
    return int(dict(call.trailing_metadata())[OFFSET_KEY])


@pytest.fixture
def session(cluster: LocalCluster) -> Iterator[Session]:
    opened = Session(cluster)
    yield opened
    opened.close()


def test_a_session_reads_its_own_writes_at_any_controller(
    cluster: LocalCluster, session: Session
) -> None:
    leader = leader_of(cluster)
    for number in range(30):
        offset = session.write(leader, str(number))
        for node_id in cluster.node_ids:
            value, holds_at = session.read(node_id, offset)
            assert (value, holds_at >= offset) == (str(number), True)


def test_a_session_read_waits_no_longer_than_its_caller(
    cluster: LocalCluster, session: Session
) -> None:
    leader = leader_of(cluster)
    offset = session.write(leader, "x")
    for node_id in cluster.node_ids:
        with pytest.raises(grpc.RpcError) as refused:
            session.read(node_id, offset + 1_000_000, timeout_s=1)

        failure = read_failure(refused.value)
        assert failure.code.name in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        if failure.reason:
            assert failure.reason == "NOT_CAUGHT_UP"
            assert failure.metadata["wanted"] == str(offset + 1_000_000)


@pytest.mark.parametrize("after", ["-1", "x", "", "1.5", str(1 << 63)])
def test_a_malformed_offset_is_refused_by_name(session: Session, after: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        session.read(1, after)

    failure = read_failure(refused.value)
    assert (failure.code.name, failure.metadata["field"]) == ("INVALID_ARGUMENT", READ_AFTER_KEY)


# -- voters come and go


def test_a_node_of_another_cluster_is_not_let_in(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        data = str(tmp_path / "stray")
        identity = ("--node-id", "2", "--cluster-id", "other", "--data-dir", data)
        assert streammeta("storage", "format", "--join", *identity)["ok"]
        seeds = f"1@{cluster.peer_endpoints[0]}"
        options = {"node_id": "2", "cluster_id": "other", "data_dir": data, "seeds": seeds}
        stray = start_python("stray", controller_command(tmp_path, **options), tmp_path)
        try:
            stray.wait_ready()
            wait_until(lambda: "another_cluster" in stray.log_tail(), "it says what is wrong")
            wait_until(lambda: quorum(cluster, "describe")["leader_id"] == 1, "a leader")
            assert [row["node_id"] for row in quorum(cluster, "describe")["replicas"]] == [1]
        finally:
            stray.kill()


def test_all_addresses_may_change_at_once(tmp_path: Path) -> None:
    """Nodes that find each other through --seeds tell the leader where they listen now."""
    with running_cluster(tmp_path) as cluster:
        with writes_going_on(cluster) as writes:
            writes.expect_progress()
        cluster.stop_all()
        ports = free_ports(6)
        cluster.ports[:], cluster.peer_ports[:] = ports[:3], ports[3:]
        cluster.start_all()
        with writes_going_on(cluster):
            pass

        def are_known() -> bool:
            rows = quorum(cluster, "describe")["replicas"]
            known = [[row[name] for row in rows] for name in ("endpoint", "peer_endpoint")]
            return known == [cluster.endpoints, cluster.peer_endpoints]

        wait_until(are_known, "the voters' new addresses are known")


def test_logs_that_name_one_address_for_everything_lead_to_the_others(tmp_path: Path) -> None:
    """Once the overrides have brought the voters together, their records need no override."""
    with running_cluster(tmp_path) as cluster:
        peers = dict(zip(cluster.node_ids, cluster.peer_endpoints, strict=True))
        cluster.stop_all()
        common = VoterSet(
            tuple(
                Voter(ReplicaKey(NodeId(node_id)), endpoint)
                for node_id, endpoint in zip(cluster.node_ids, cluster.endpoints, strict=True)
            )
        )
        for node_id in cluster.node_ids:
            cluster.wipe(node_id)
            format_directory(
                cluster.data_dir(node_id),
                cluster_id=ClusterId("test"),
                node_id=NodeId(node_id),
                bootstrap_voters=common,
            )
        cluster.peer_overrides = {
            node_id: {other: where for other, where in peers.items() if other != node_id}
            for node_id in cluster.node_ids
        }
        cluster.start_all()
        leader_of(cluster)
        wait_until(lambda: _have_told_their_disks(cluster), "all voters have told their addresses")
        cluster.stop_all()
        cluster.peer_overrides = {}
        cluster.start_all()
        leader_of(cluster)

        rows = quorum(cluster, "describe")["replicas"]
        assert [row["peer_endpoint"] for row in rows] == cluster.peer_endpoints
        assert [row["endpoint"] for row in rows] == cluster.endpoints


def test_a_stopped_controller_does_not_hide_the_others(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        wait_until(lambda: _have_told_their_disks(cluster), "all voters have told their addresses")
        leader = leader_of(cluster)
        stopped = cluster.children[leader % 3 + 1]
        stopped.process.send_signal(signal.SIGSTOP)

        seen = quorum(cluster, "describe", connect=cluster.endpoints[leader - 1])

        assert seen["leader_id"] == leader
        assert [row["endpoint"] for row in seen["silent"]] == [cluster.endpoints[leader % 3]]
        assert len(seen["controllers"]) == 2
