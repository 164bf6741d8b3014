"""`streammeta quorum` when not all is well: no leader, two, silence, disks of old, full disks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from streammeta.cli.local_cluster import free_ports
from streammeta.cli.output import run_cli
from streammeta.cli.root import cli
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1 import quorum_pb2_grpc
from tests.kit.grpc_servers import served_by_threads, unimplemented
from tests.kit.real_cluster import streammeta


class FakeController(unimplemented(quorum_pb2_grpc)):  # type: ignore[misc]
    """Says what it was given, and remembers which voters it was asked to add."""

    def __init__(self, view: pb.DescribeQuorumResponse) -> None:
        self.view = view
        self.added: list[pb.AddVoterRequest] = []

    def DescribeQuorum(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.view

    def AddVoter(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.added.append(request)
        return pb.AddVoterResponse(end_offset=77)


@contextlib.contextmanager
def serving(*views: pb.DescribeQuorumResponse) -> Iterator[tuple[str, list[FakeController]]]:
    """Serve each view, gives the first endpoint; every view's voters get the endpoints in order."""
    with contextlib.ExitStack() as stack:
        controllers = [FakeController(view) for view in views]
        served = [served_by_threads(each, quorum_pb2_grpc) for each in controllers]
        endpoints = [stack.enter_context(each) for each in served]
        for view in views:
            for voter, endpoint in zip(view.voters, endpoints, strict=False):
                voter.endpoint = endpoint
        yield endpoints[0], controllers


def view(
    node_id: int,
    role: str,
    epoch: int = 5,
    voters: int = 2,
    observers: tuple[pb.ReplicaStatus, ...] = (),
    **fields: Any,
) -> pb.DescribeQuorumResponse:
    return pb.DescribeQuorumResponse(
        cluster_id="c",
        node_id=node_id,
        role=role,
        leader_id=node_id if role == "leader" else None,
        epoch=epoch,
        high_watermark=90,
        end_offset=100,
        voters=[replica(voter_id, "d") for voter_id in range(1, voters + 1)],
        observers=observers,
        **fields,
    )


def replica(node_id: int, directory_id: str, age_ms: int | None = 3) -> pb.ReplicaStatus:
    return pb.ReplicaStatus(
        key=pb.ReplicaKey(node_id=node_id, directory_id=directory_id),
        end_offset=95,
        last_fetch_age_ms=age_ms,
    )


def described(connect: str) -> dict[str, Any]:
    answer = streammeta("quorum", "describe", "--connect", connect)
    assert answer["exit_code"] == (0 if answer["ok"] else 1)
    return answer


def add_voter(connect: str, node_id: int, *words: str) -> dict[str, Any]:
    at = ("--connect", connect, "--node-id", str(node_id), "--endpoint", "h:1")
    return streammeta("quorum", "add-voter", *at, *words)


def test_without_a_leader_everybody_is_shown() -> None:
    with serving(view(1, "prospective"), view(2, "candidate", epoch=6)) as (connect, _):
        answer = described(connect)
    assert (answer["leader_id"], answer["epoch"]) == (None, 6)
    roles = {row["node_id"]: row["role"] for row in answer["controllers"]}
    assert roles == {1: "prospective", 2: "candidate"}
    assert "leader" not in {row["role"] for row in answer["replicas"]}


def test_of_two_that_claim_to_lead_the_newer_is_believed() -> None:
    with serving(view(1, "leader", epoch=4), view(2, "leader", epoch=5)) as (connect, _):
        answer = described(connect)
    assert (answer["leader_id"], answer["epoch"]) == (2, 5)


def test_a_voter_that_does_not_answer_is_named_and_without_any_the_command_fails() -> None:
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    with serving(view(1, "leader", voters=1)) as (connect, controllers):
        controllers[0].view.voters.add(key=pb.ReplicaKey(node_id=2), endpoint=gone)
        answer = described(connect)
    assert [row["endpoint"] for row in answer["silent"]] == [gone]
    lost = answer["replicas"][1]
    assert (lost["end_offset"], lost["lag"], lost["directory_id"]) == (None, None, None)

    error = described(gone)["error"]
    assert error["code"] == "NO_CONTROLLER"
    assert gone in error["message"]


def test_a_voter_that_has_not_told_where_clients_reach_it_is_named() -> None:
    with serving(view(1, "leader", voters=1)) as (connect, controllers):
        controllers[0].view.voters.add(key=pb.ReplicaKey(node_id=2), peer_endpoint="h:9")
        answer = described(connect)
    (silent,) = answer["silent"]
    assert silent["endpoint"] is None
    assert "voter 2, h:9 to its peers" in silent["reason"]
    assert answer["replicas"][1]["peer_endpoint"] == "h:9"


def test_observers_are_shown_while_they_fetch() -> None:
    observers = (
        replica(7, "new"),
        replica(7, "old", 60_000),
        replica(8, ""),
        replica(9, "x", None),
    )
    with serving(view(1, "leader", observers=observers), view(2, "follower")) as (connect, _):
        answer = described(connect)
    assert answer["observer_ids"] == [7]
    assert [row["directory_id"] for row in answer["replicas"]] == ["d", "d", "new"]


def test_damage_and_a_full_disk_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    ill = view(2, "follower", repairing=True, disk_full=True, snapshot_id=pb.SnapshotId())
    with serving(view(1, "leader"), ill) as (connect, _):
        well, hurt = described(connect)["controllers"]
        run_cli(cli, ["quorum", "describe", "--connect", connect, "--format", "table"])
    assert (well["repairing"], well["disk_full"], well["snapshot_end"]) == (False, False, None)
    assert (hurt["repairing"], hurt["disk_full"], hurt["snapshot_end"]) == (True, True, 0)
    table = capsys.readouterr().out
    assert "repairing" in table
    assert "yes" in table


def test_the_disk_of_a_new_voter_is_looked_up() -> None:
    observers = (replica(7, "new"), replica(7, "old", 60_000))
    with serving(view(1, "leader", observers=observers)) as (connect, controllers):
        answer = add_voter(connect, 7)
    assert (answer["exit_code"], answer["end_offset"]) == (0, 77)
    (request,) = controllers[0].added
    assert (request.cluster_id, request.voter.endpoint) == ("c", "h:1")
    assert (request.voter.key.node_id, request.voter.key.directory_id) == (7, "new")


def test_of_two_disks_one_must_be_chosen() -> None:
    observers = (replica(7, "one"), replica(7, "two"))
    with serving(view(1, "leader", observers=observers)) as (connect, controllers):
        refused = add_voter(connect, 7)
        assert add_voter(connect, 7, "--directory-id", "two")["ok"]
    error = refused["error"]
    assert (refused["exit_code"], error["code"]) == (1, "SEVERAL_DIRECTORIES")
    assert "one, two" in error["message"]
    assert "--directory-id" in error["hint"]
    assert [request.voter.key.directory_id for request in controllers[0].added] == ["two"]


def test_a_voter_is_not_taken_for_a_lost_observer() -> None:
    with serving(view(1, "leader"), view(2, "follower")) as (connect, controllers):
        answer = add_voter(connect, 2)
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "DUPLICATE_VOTER")
    assert "node 2 votes already" in answer["error"]["message"]
    assert not controllers[0].added
