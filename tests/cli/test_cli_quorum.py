"""`streammeta quorum` and `cluster hash`: the leader, silent controllers, and different ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import free_ports
from streammeta.cli.quorum.cluster_command import Verdict, judge
from streammeta.cli.root import cli
from streammeta.rpc.failures import RpcFailure
from streammeta.v1 import admin_pb2, admin_pb2_grpc, quorum_pb2_grpc
from streammeta.v1 import quorum_pb2 as pb
from tests.kit.grpc_servers import abort, served_by_threads, unimplemented
from tests.kit.real_cluster import leader_of, running_cluster, streammeta, writes_going_on
from tests.kit.waiting import wait_until


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
        served = [served_by_threads(controller, quorum_pb2_grpc) for controller in controllers]
        endpoints = [stack.enter_context(context) for context in served]
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


@pytest.mark.parametrize(
    ("digests", "said"),
    [
        (("", ""), "none"),
        (("ab", "ab"), "equal"),
        (("ab", "cd"), "DIFFERENT"),
        (("ab", ""), "DIFFERENT"),
    ],
)
def test_policies_that_differ_are_told(digests: tuple[str, str], said: str) -> None:
    told: list[dict[str, Any]] = [
        {"policy_sha256": digest, "policy_loaded_ms": 1_000 if digest else None}
        for digest in digests
    ]
    with serving(view(1, "leader", **told[0]), view(2, "follower", **told[1])) as (connect, _):
        answer = described(connect)
    assert answer["policy"] == said
    assert ("policies" in answer) == any(digests)
    if digests[0]:
        row = {"node_id": 1, "sha256": "ab", "loaded": "1970-01-01T00:00:01.000Z"}
        assert answer["policies"][0] == row


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
    assert "node 2 already votes" in answer["error"]["message"]
    assert not controllers[0].added


def test_adding_a_voter_again_is_confirmed_for_the_same_disk_and_endpoint() -> None:
    with serving(view(1, "leader"), view(2, "follower")) as (connect, controllers):
        for controller in controllers:
            for voter in controller.view.voters:
                voter.peer_endpoint = "h:1"
        answer = add_voter(connect, 2)
        (request,) = controllers[0].added
        for controller in controllers:
            controller.view.observers.append(replica(2, "another disk"))
        refused = add_voter(connect, 2)
    assert answer["exit_code"] == 0
    assert request.voter.key.directory_id == "d"
    assert refused["error"]["code"] == "DUPLICATE_VOTER"


LEADER = 1
SERVICES = (admin_pb2_grpc, quorum_pb2_grpc)


class FakeLog:
    """The one log of a fake cluster; it grows by `rate` offsets a second until `stops_at`."""

    def __init__(self, rate: float = 0.0, stops_at: int = 1 << 60) -> None:
        self._began = time.monotonic()
        self._rate = rate
        self._stops_at = stops_at

    @property
    def end_offset(self) -> int:
        grown = int((time.monotonic() - self._began) * self._rate)
        return min(100 + grown, self._stops_at)


class HashedController(unimplemented(*SERVICES)):  # type: ignore[misc]
    """A member whose hash at an offset is told by the offset, unless it `differs`."""

    observers: tuple[pb.ReplicaStatus, ...] = ()

    def __init__(self, node_id: int, log: FakeLog, voters: list[str], differs: bool) -> None:
        self.node_id = node_id
        self._log = log
        self._voters = voters
        self._differs = differs
        self.asked: list[int] = []
        self.is_always_beyond = False

    def DescribeQuorum(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.leader_only and self.node_id != LEADER:
            where = {"leader_endpoint": self._voters[0], "leader_id": "1"}
            abort(context, grpc.StatusCode.UNAVAILABLE, "NOT_LEADER", "does not lead", where)
        role = "leader" if self.node_id == LEADER else "follower"
        answer = view(self.node_id, role, 3, len(self._voters), self.observers)
        answer.leader_id = LEADER
        answer.high_watermark = answer.end_offset = self._log.end_offset
        for voter, endpoint in zip(answer.voters, self._voters, strict=True):
            voter.endpoint = endpoint
        return answer

    def StateHash(self, request: Any, context: Any) -> Any:  # noqa: N802
        at = request.at_offset
        self.asked.append(at)
        if self._log.end_offset > at or self.is_always_beyond:
            abort(context, grpc.StatusCode.FAILED_PRECONDITION, "OFFSET_PASSED", "passed", {})
        while self._log.end_offset < at:
            if not context.is_active():
                return admin_pb2.StateHashResponse()
            time.sleep(0.01)
        said = b"%d" % at + (b" other" if self._differs else b"")
        return admin_pb2.StateHashResponse(
            offset=at, hash=said, answered_by=self.node_id, log_hash=said
        )


@contextlib.contextmanager
def cluster(
    log: FakeLog, differs: tuple[int, ...] = (), silent: int = 0
) -> Iterator[list[HashedController]]:
    """Three voters, of which the last `silent` do not run."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(3)]
    members = [
        HashedController(number, log, endpoints, number in differs)
        for number in range(1, 4 - silent)
    ]
    with contextlib.ExitStack() as stack:
        for member in members:
            at = endpoints[member.node_id - 1]
            stack.enter_context(served_by_threads(member, *SERVICES, at=at, threads=8))
        yield members


def hash_of(members: list[HashedController], *words: str) -> tuple[int, dict[str, Any]]:
    answer = streammeta("cluster", "hash", "--connect", members[0]._voters[0], *words)
    return answer["exit_code"], answer


def test_an_idle_cluster_is_compared_at_its_end() -> None:
    with cluster(FakeLog()) as members:
        code, answer = hash_of(members)
    assert (code, answer["verdict"], answer["at_offset"]) == (0, "ok", 100)
    leads = [(row["node_id"], row["leader"]) for row in answer["members"]]
    assert leads == [(1, True), (2, False), (3, False)]
    assert {row["state_hash"] for row in answer["members"]} == {b"100".hex()}
    assert all(member.asked == [100] for member in members)


def test_when_writes_stop_short_of_the_offset_another_one_is_taken() -> None:
    with cluster(FakeLog(rate=400.0, stops_at=300)) as members:
        code, answer = hash_of(members)
    assert (code, answer["at_offset"]) == (0, 300)


@pytest.mark.parametrize(
    ("world", "error", "third"),
    [({"differs": (3,)}, "DIFFERENT", "DIFFERENT"), ({"silent": 1}, "NO_ANSWER", "no answer")],
)
def test_a_different_or_silent_member_is_named(
    world: dict[str, Any], error: str, third: str
) -> None:
    with cluster(FakeLog(), **world) as members:
        code, answer = hash_of(members)
    assert (code, answer["error"]["code"]) == (1, error)
    assert "controller 3" in answer["error"]["message"]
    rows = [(row["node_id"], row["verdict"]) for row in answer["error"]["details"]["members"]]
    assert rows == [(1, "ok"), (2, "ok"), (3, third)]


def test_an_observer_that_is_not_named_is_listed_and_is_no_failure() -> None:
    with cluster(FakeLog()) as members:
        key = pb.ReplicaKey(node_id=7, directory_id="d")
        members[0].observers = (pb.ReplicaStatus(key=key, last_fetch_age_ms=5),)
        code, answer = hash_of(members)
    assert (code, answer["verdict"]) == (0, "ok")
    rows = [(row["node_id"], row["verdict"]) for row in answer["members"]]
    assert rows == [(1, "ok"), (2, "ok"), (3, "ok"), (7, "not asked")]


def test_without_a_common_offset_in_time_that_is_said() -> None:
    with cluster(FakeLog()) as members:
        members[2].is_always_beyond = True
        code, answer = hash_of(members, "--timeout", "4")
        assert (code, answer["error"]["code"]) == (1, "NO_COMMON_OFFSET")


def said(node_id: int, state: bytes, log: bytes = b"l") -> admin_pb2.StateHashResponse:
    return admin_pb2.StateHashResponse(hash=state, log_hash=log, answered_by=node_id)


@pytest.mark.parametrize(
    ("hashes", "different"),
    [
        ({1: b"a", 2: b"a", 3: b"a"}, []),
        ({1: b"a", 2: b"a", 3: b"b"}, [3]),
        ({1: b"b", 2: b"a", 3: b"a"}, [1]),  # the leader may be the one that is wrong
        ({1: b"a", 2: b"b"}, [2]),  # in case of doubt the leader is right
        ({1: b"a", 2: b"b", 3: b"c"}, [2, 3]),
    ],
)
def test_controllers_unlike_most_differ(hashes: dict[int, bytes], different: list[int]) -> None:
    answers = {f"h:{node}": said(node, value) for node, value in hashes.items()}
    rows = judge(answers, LEADER)
    assert [row.node_id for row in rows if row.verdict is Verdict.DIFFERENT] == different


def test_equal_maps_of_different_logs_are_different_and_an_unknown_log_is_not() -> None:
    answers = {"h:1": said(1, b"a"), "h:2": said(2, b"a", b"other"), "h:3": said(3, b"a", b"")}
    verdicts = [row.verdict for row in judge(answers, LEADER)]
    assert verdicts == [Verdict.OK, Verdict.DIFFERENT, Verdict.OK]


def test_a_failed_answer_is_no_answer() -> None:
    failure = RpcFailure(grpc.StatusCode.UNAVAILABLE, "gone")
    well, failed = judge({"h:1": said(1, b"a"), "h:2": failure}, LEADER)
    assert (well.verdict, well.problem) == (Verdict.OK, "")
    assert (failed.verdict, failed.problem) == (Verdict.NO_ANSWER, "gone")


@pytest.mark.process
def test_a_real_cluster_is_compared_under_load_idle_and_with_a_member_lost(tmp_path: Path) -> None:
    options = ("--election-timeout-ms", "400", "--snapshot-log-bytes", "20000")
    with running_cluster(tmp_path, options=options) as running:
        leader_of(running)
        with writes_going_on(running) as writes:
            writes.expect_progress()
            loaded = streammeta("cluster", "hash", "--connect", running.connect)
            assert (loaded["exit_code"], len(loaded["members"])) == (0, 3), loaded
            # A member that took its map from a snapshot has the same hashes.
            leader = leader_of(running)
            follower = next(node for node in running.node_ids if node != leader)
            running.children[follower].kill()
            running.start(follower)
            wait_until(
                lambda: streammeta("cluster", "hash", "--connect", running.connect)["ok"],
                "all are equal again",
            )
        idle = streammeta("cluster", "hash", "--connect", running.connect)
        assert idle["exit_code"] == 0, idle
        assert len({row["log_hash"] for row in idle["members"]}) == 1
        assert all(len(row["state_hash"]) == 64 for row in idle["members"])
        running.children[follower].kill()
        lost = streammeta("cluster", "hash", "--connect", running.connect)
        assert (lost["exit_code"], lost["error"]["code"]) == (1, "NO_ANSWER")
        assert f"controller {follower}" in lost["error"]["message"]
