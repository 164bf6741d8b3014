"""Groups as a state machine: generations, assignments, static members, sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streammeta.brokers.kafka.groups.groups import INITIAL_DELAY_MS, Group, Join, Reply, State
from streammeta.brokers.kafka.protocol.codes import Code

RANGE = (("range", b"topics"),)


class World:
    """A group, the time, and what was replied by token."""

    def __init__(self) -> None:
        self.count = 0
        self.now = 0
        self.replies: dict[object, Mapping[str, Any]] = {}
        self.group = Group(self._new_id)

    def _new_id(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"

    def take(self, replies: list[Reply]) -> None:
        for token, answer in replies:
            assert token not in self.replies, "a request is answered twice"
            self.replies[token] = answer

    def join(self, token: str, member_id: str = "", **fields: Any) -> None:
        asked: dict[str, Any] = {
            "member_id": member_id,
            "instance_id": None,
            "client_id": token,
            "session_ms": 10_000,
            "rebalance_ms": 60_000,
            "protocol_type": "consumer",
            "protocols": RANGE,
            "needs_id": False,
            **fields,
        }
        self.take(self.group.join(token, Join(**asked), self.now))

    def sync(self, token: str, member_id: str, assignments: Mapping[str, bytes]) -> None:
        replies = self.group.sync(token, member_id, self.group.generation, assignments, self.now)
        self.take(replies)

    def pass_time(self, ms: int) -> None:
        self.now += ms
        self.take(self.group.tick(self.now))


def _two_members() -> tuple[World, str, str]:
    world = World()
    world.join("a")
    world.join("b")
    world.pass_time(INITIAL_DELAY_MS)
    a, b = (world.replies[token]["member_id"] for token in ("a", "b"))
    world.sync("sync a", a, {a: b"for a", b: b"for b"})
    world.sync("sync b", b, {})
    return world, a, b


def test_first_members_share_a_generation_and_the_leader_knows_all() -> None:
    world, a, b = _two_members()
    assert world.replies["a"]["leader"] == world.replies["b"]["leader"] == a
    assert [member["member_id"] for member in world.replies["a"]["members"]] == [a, b]
    assert world.replies["b"]["members"] == []
    assert world.replies["sync a"]["assignment"] == b"for a"
    assert world.replies["sync b"]["assignment"] == b"for b"
    assert (world.group.state, world.group.generation) == (State.STABLE, 1)


def test_follower_waits_for_the_assignment_of_the_leader() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.pass_time(INITIAL_DELAY_MS)
    a, b = (world.replies[token]["member_id"] for token in ("a", "b"))
    world.sync("sync b", b, {})
    assert "sync b" not in world.replies
    world.sync("sync a", a, {b: b"late"})
    assert world.replies["sync b"]["assignment"] == b"late"


def test_new_member_begins_a_rebalance_that_all_join() -> None:
    world, a, b = _two_members()
    world.join("c")
    assert world.group.heartbeat(a, 1, world.now) is Code.REBALANCE_IN_PROGRESS
    world.join("a again", a)
    assert "c" not in world.replies
    world.join("b again", b)
    assert [world.replies[name]["generation_id"] for name in ("c", "a again", "b again")] == [2] * 3
    assert world.group.check(a, 1) is Code.ILLEGAL_GENERATION


def test_silent_member_is_removed_also_while_others_wait_for_it() -> None:
    world, a, b = _two_members()
    world.pass_time(6_000)
    assert world.group.heartbeat(a, 1, world.now) is Code.NONE
    world.pass_time(5_000)
    assert world.group.heartbeat(a, 1, world.now) is Code.REBALANCE_IN_PROGRESS
    assert b not in world.group.members
    world.join("a again", a)
    assert world.replies["a again"]["generation_id"] == 2


def test_member_that_leaves_is_not_waited_for() -> None:
    world, a, b = _two_members()
    code, replies = world.group.leave(b, world.now)
    world.take(replies)
    assert code is Code.NONE
    world.join("a again", a)
    assert world.replies["a again"]["generation_id"] == 2
    assert world.group.leave(b, world.now)[0] is Code.UNKNOWN_MEMBER_ID


def test_member_is_told_its_id_before_it_joins() -> None:
    world = World()
    world.join("first", needs_id=True)
    refused = world.replies["first"]
    assert refused["error_code"] is Code.MEMBER_ID_REQUIRED
    world.join("second", refused["member_id"], needs_id=True)
    world.pass_time(INITIAL_DELAY_MS)
    assert world.replies["second"]["member_id"] == refused["member_id"]
    world.join("unknown", "made-up")
    assert world.replies["unknown"]["error_code"] is Code.UNKNOWN_MEMBER_ID


def test_static_member_comes_back_without_a_rebalance_and_fences_its_former_process() -> None:
    world = World()
    world.join("a", instance_id="one")
    world.pass_time(INITIAL_DELAY_MS)
    former = world.replies["a"]["member_id"]
    world.sync("sync", former, {former: b"kept"})
    world.join("again", instance_id="one")
    present = world.replies["again"]["member_id"]
    assert (world.group.generation, world.group.state) == (1, State.STABLE)
    world.sync("sync again", present, {})
    assert world.replies["sync again"]["assignment"] == b"kept"
    assert world.group.check(former, 1, "one") is Code.FENCED_INSTANCE_ID


def test_members_without_a_common_protocol_are_refused() -> None:
    world, _, _ = _two_members()
    world.join("other", protocols=(("sticky", b""),))
    assert world.replies["other"]["error_code"] is Code.INCONSISTENT_GROUP_PROTOCOL
    world.join("type", protocol_type="connect")
    assert world.replies["type"]["error_code"] is Code.INCONSISTENT_GROUP_PROTOCOL
    assert world.group.generation == 1


def test_commits_are_taken_from_members_and_from_consumers_without_a_group() -> None:
    world, a, _ = _two_members()
    assert world.group.check_commit(a, 1, None) is Code.NONE
    assert world.group.check_commit(a, 0, None) is Code.ILLEGAL_GENERATION
    assert world.group.check_commit("", -1, None) is Code.UNKNOWN_MEMBER_ID
    assert World().group.check_commit("", -1, None) is Code.NONE


def test_end_answers_all_that_waits() -> None:
    world = World()
    world.join("a")
    world.take(world.group.end(Code.NOT_COORDINATOR))
    assert world.replies["a"]["error_code"] is Code.NOT_COORDINATOR


def test_no_commit_while_a_rebalance_completes() -> None:
    world = World()
    world.join("a")
    world.pass_time(INITIAL_DELAY_MS)
    a = world.replies["a"]["member_id"]
    assert world.group.check_commit(a, 1, None) is Code.REBALANCE_IN_PROGRESS
    world.sync("sync", a, {a: b"all"})
    assert world.group.check_commit(a, 1, None) is Code.NONE
    world.join("b")
    assert world.group.state is State.PREPARING
    assert world.group.check_commit(a, 1, None) is Code.NONE  # of the generation that ends


def test_a_fenced_static_member_commits_nothing() -> None:
    world = World()
    world.join("a", instance_id="one")
    world.pass_time(INITIAL_DELAY_MS)
    former = world.replies["a"]["member_id"]
    world.sync("sync", former, {})
    world.join("again", instance_id="one")
    assert world.group.check_commit(former, 1, "one") is Code.FENCED_INSTANCE_ID
    assert world.group.check_commit(former, 1, None) is Code.UNKNOWN_MEMBER_ID


def test_an_assignment_is_of_its_generation_alone() -> None:
    world, a, b = _two_members()
    world.join("a again", a)
    world.join("a once more", a)
    world.join("b again", b)
    world.take(world.group.sync("sync old", b, 1, {}, world.now))
    assert world.replies["sync old"]["error_code"] is Code.ILLEGAL_GENERATION
    world.join("c")
    world.take(world.group.sync("sync early", b, world.group.generation, {}, world.now))
    assert world.replies["sync early"]["error_code"] is Code.REBALANCE_IN_PROGRESS


def test_members_that_do_not_join_in_time_are_left_out() -> None:
    world, a, b = _two_members()
    world.join("c", rebalance_ms=60_000)
    world.join("a again", a)
    for _ in range(9):
        world.pass_time(6_000)
        assert world.group.heartbeat(b, 1, world.now) is Code.REBALANCE_IN_PROGRESS
    assert "c" not in world.replies
    world.pass_time(6_000)
    assert world.replies["c"]["generation_id"] == 2
    assert b not in world.group.members


def test_an_id_that_is_not_used_in_time_is_forgotten() -> None:
    world = World()
    world.join("first", needs_id=True, session_ms=10_000)
    member_id = world.replies["first"]["member_id"]
    world.pass_time(10_000)
    world.join("late", member_id, needs_id=True)
    assert world.replies["late"]["error_code"] is Code.UNKNOWN_MEMBER_ID


def test_the_last_member_that_leaves_empties_the_group() -> None:
    world, a, b = _two_members()
    for member_id in (a, b):
        world.take(world.group.leave(member_id, world.now)[1])
    assert (world.group.state, world.group.members) == (State.EMPTY, {})
    assert world.group.check_commit("", -1, None) is Code.NONE
