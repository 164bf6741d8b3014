"""`streammeta quorum` when not all is well: no leader, two, silence, disks of old, full disks."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from streammeta.cli.local_cluster import free_ports
from streammeta.cli.output import run_cli
from streammeta.cli.quorum_command import quorum
from streammeta.cli.root import cli
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1.quorum_pb2_grpc import QuorumServiceServicer, add_QuorumServiceServicer_to_server
from tests.kit.grpc_servers import served_by_threads


class FakeController(QuorumServiceServicer):
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
def serving(*views: pb.DescribeQuorumResponse) -> Iterator[list[FakeController]]:
    """Serve each view; every view's voters get the endpoints, in order of the views."""
    with contextlib.ExitStack() as stack:
        controllers = [FakeController(view) for view in views]  # type: ignore[abstract]
        endpoints = [
            stack.enter_context(
                served_by_threads((add_QuorumServiceServicer_to_server, controller))
            )
            for controller in controllers
        ]
        for view in views:
            for voter, endpoint in zip(view.voters, endpoints, strict=False):
                voter.endpoint = endpoint
        yield controllers


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


def streammeta(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    exit_code = run_cli(cli, ["quorum", *words])
    return exit_code, capsys.readouterr().out


def described(capsys: pytest.CaptureFixture[str], connect: str) -> dict[str, Any]:
    exit_code, said = streammeta(capsys, "describe", "--connect", connect, "--format", "json")
    answer: dict[str, Any] = json.loads(said)
    assert exit_code == (0 if answer["ok"] else 1)
    return answer


def test_without_a_leader_everybody_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(view(1, "prospective"), view(2, "candidate", epoch=6)) as controllers:
        answer = described(capsys, controllers[0].view.voters[0].endpoint)

    assert (answer["leader_id"], answer["epoch"]) == (None, 6)
    roles = {row["node_id"]: row["role"] for row in answer["controllers"]}
    assert roles == {1: "prospective", 2: "candidate"}
    assert "leader" not in {row["role"] for row in answer["replicas"]}


def test_of_two_that_claim_to_lead_the_newer_is_believed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(view(1, "leader", epoch=4), view(2, "leader", epoch=5)) as controllers:
        answer = described(capsys, controllers[0].view.voters[0].endpoint)

    assert (answer["leader_id"], answer["epoch"]) == (2, 5)


def test_a_voter_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    with serving(view(1, "leader", voters=1)) as controllers:
        controllers[0].view.voters.add(key=pb.ReplicaKey(node_id=2), endpoint=gone)
        answer = described(capsys, controllers[0].view.voters[0].endpoint)

    assert [row["endpoint"] for row in answer["silent"]] == [gone]
    lost = answer["replicas"][1]
    assert (lost["end_offset"], lost["lag"], lost["directory_id"]) == (None, None, None)


def test_if_nobody_answers_the_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    gone = f"127.0.0.1:{free_ports(1)[0]}"

    answer = described(capsys, gone)

    assert answer["error"]["code"] == "NO_CONTROLLER"
    assert gone in answer["error"]["message"]


def test_observers_are_shown_while_they_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    observers = (
        replica(7, "new"),
        replica(7, "old", 60_000),
        replica(8, ""),
        replica(9, "x", None),
    )
    with serving(view(1, "leader", observers=observers), view(2, "follower")) as controllers:
        answer = described(capsys, controllers[0].view.voters[0].endpoint)

    assert answer["observer_ids"] == [7]
    assert [row["directory_id"] for row in answer["replicas"]] == ["d", "d", "new"]


def test_damage_and_a_full_disk_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    ill = view(2, "follower", repairing=True, disk_full=True, snapshot_id=pb.SnapshotId())
    with serving(view(1, "leader"), ill) as controllers:
        connect = controllers[0].view.voters[0].endpoint
        answer = described(capsys, connect)
        _, table = streammeta(capsys, "describe", "--connect", connect, "--format", "table")

    well, hurt = answer["controllers"]
    assert (well["repairing"], well["disk_full"], well["snapshot_end"]) == (False, False, None)
    assert (hurt["repairing"], hurt["disk_full"], hurt["snapshot_end"]) == (True, True, 0)
    assert "repairing" in table
    assert "yes" in table


def test_the_disk_of_a_new_voter_is_looked_up(capsys: pytest.CaptureFixture[str]) -> None:
    observers = (replica(7, "new"), replica(7, "old", 60_000))
    with serving(view(1, "leader", observers=observers)) as controllers:
        connect = controllers[0].view.voters[0].endpoint
        exit_code, said = streammeta(
            capsys,
            *("add-voter", "--connect", connect, "--node-id", "7", "--endpoint", "h:1"),
            *("--format", "json"),
        )

    assert (exit_code, json.loads(said)["end_offset"]) == (0, 77)
    (request,) = controllers[0].added
    assert (request.cluster_id, request.voter.endpoint) == ("c", "h:1")
    assert (request.voter.key.node_id, request.voter.key.directory_id) == (7, "new")


def test_of_two_disks_one_must_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    observers = (replica(7, "one"), replica(7, "two"))
    with serving(view(1, "leader", observers=observers)) as controllers:
        connect = controllers[0].view.voters[0].endpoint
        words = ("add-voter", "--connect", connect, "--node-id", "7", "--endpoint", "h:1")
        exit_code, said = streammeta(capsys, *words, "--format", "json")
        chosen, _ = streammeta(capsys, *words, "--directory-id", "two")

    error = json.loads(said)["error"]
    assert (exit_code, error["code"]) == (1, "SEVERAL_DIRECTORIES")
    assert "one, two" in error["message"]
    assert "--directory-id" in error["hint"]
    assert chosen == 0
    assert [request.voter.key.directory_id for request in controllers[0].added] == ["two"]


def test_a_voter_is_not_taken_for_a_lost_observer(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(view(1, "leader"), view(2, "follower")) as controllers:
        exit_code, said = streammeta(
            capsys,
            *("add-voter", "--connect", controllers[0].view.voters[0].endpoint, "--node-id", "2"),
            *("--endpoint", "h:1", "--format", "json"),
        )

    error = json.loads(said)["error"]
    assert (exit_code, error["code"]) == (1, "DUPLICATE_VOTER")
    assert "node 2 votes already" in error["message"]
    assert not controllers[0].added


@pytest.mark.parametrize("name", sorted(quorum.commands))
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    said = CliRunner().invoke(quorum, [name, "--help"])

    assert said.exit_code == 0
    assert f"streammeta quorum {name} --connect" in said.output
    assert "--format" in said.output
