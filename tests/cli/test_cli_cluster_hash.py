"""`streammeta cluster hash`: equal, different and silent members; loaded, idle and stalled ones."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.cli.cluster_command import Verdict, judge
from streammeta.cli.local_cluster import free_ports
from streammeta.rpc.failures import RpcFailure
from streammeta.v1 import admin_pb2, admin_pb2_grpc, quorum_pb2_grpc
from streammeta.v1 import quorum_pb2 as pb
from tests.kit.grpc_servers import abort, served_by_threads, unimplemented
from tests.kit.real_cluster import (
    leader_of,
    running_cluster,
    streammeta,
    wait_until,
    writes_going_on,
)

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


class FakeController(unimplemented(*SERVICES)):  # type: ignore[misc]
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
        voters = [
            pb.ReplicaStatus(key=pb.ReplicaKey(node_id=number, directory_id="d"), endpoint=where)
            for number, where in enumerate(self._voters, 1)
        ]
        end = self._log.end_offset
        return pb.DescribeQuorumResponse(
            cluster_id="c",
            node_id=self.node_id,
            role="leader" if self.node_id == LEADER else "follower",
            leader_id=LEADER,
            epoch=3,
            high_watermark=end,
            end_offset=end,
            voters=voters,
            observers=self.observers,
        )

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
) -> Iterator[list[FakeController]]:
    """Three voters, of which the last `silent` do not run."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(3)]
    members = [
        FakeController(number, log, endpoints, number in differs) for number in range(1, 4 - silent)
    ]
    with contextlib.ExitStack() as stack:
        for member in members:
            at = endpoints[member.node_id - 1]
            stack.enter_context(served_by_threads(member, *SERVICES, at=at, threads=8))
        yield members


def hash_of(members: list[FakeController], *words: str) -> tuple[int, dict[str, Any]]:
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


def test_a_cluster_under_load_is_compared_ahead_of_its_end() -> None:
    with cluster(FakeLog(rate=500.0)) as members:
        code, answer = hash_of(members)
    assert (code, answer["verdict"]) == (0, "ok")
    assert answer["at_offset"] > 100
    assert len({row["state_hash"] for row in answer["members"]}) == 1


def test_when_writes_stop_short_of_the_offset_another_one_is_taken() -> None:
    with cluster(FakeLog(rate=400.0, stops_at=300)) as members:
        code, answer = hash_of(members)
    assert (code, answer["at_offset"]) == (0, 300)


@pytest.mark.parametrize(
    ("world", "error", "third"),
    [({"differs": (3,)}, "DIFFERENT", "DIFFERENT"), ({"silent": 1}, "NO_ANSWER", "no answer")],
)
def test_a_member_that_differs_or_is_silent_is_named_among_the_others(
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
        code, answer = hash_of(members, "--timeout", "1")
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
def test_who_differs_from_what_most_say_is_different(
    hashes: dict[int, bytes], different: list[int]
) -> None:
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
