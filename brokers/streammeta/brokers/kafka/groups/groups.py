"""Consumer groups of the classic protocol as a pure state machine. The caller passes the time.

States: Empty, PreparingRebalance (members join), CompletingRebalance (the leader assigns), Stable.
A waiting request is identified by the caller's token. A reply names the token and the answer.
Groups do not survive their coordinator: members of an unknown group join again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from streammeta.brokers.kafka.protocol.codes import Code

INITIAL_DELAY_MS = 300
"""Time that an empty group waits for more members after the first, in ms."""
_SESSION_MS = (100, 1_800_000)

Reply = tuple[object, Mapping[str, Any]]
"""A token and the fields of the answer."""


class State(Enum):
    """States of a group, with their names in DescribeGroups."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


@dataclass
class Member:
    """A member. `joining` and `syncing` are tokens of its waiting requests."""

    member_id: str
    instance_id: str | None
    client_id: str
    session_ms: int
    rebalance_ms: int
    protocols: Sequence[tuple[str, bytes]]
    deadline: int
    joining: object | None = None
    syncing: object | None = None
    assignment: bytes = b""

    def metadata(self, protocol: str) -> bytes:
        """Return the member's metadata for a protocol."""
        return dict(self.protocols).get(protocol, b"")


@dataclass(frozen=True, kw_only=True)
class Join:
    """A JoinGroup request. `needs_id` means that a new member has to join again with its id."""

    member_id: str
    instance_id: str | None
    client_id: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: Sequence[tuple[str, bytes]]
    needs_id: bool


def failed_join(code: Code, member_id: str = "") -> Mapping[str, Any]:
    """Return the answer to a rejected join."""
    return {
        "error_code": code,
        "generation_id": -1,
        "protocol_name": "",
        "leader": "",
        "member_id": member_id,
        "members": (),
    }


@dataclass
class Group:
    """One group. Times are in ms of one clock. `new_id` creates ids of members."""

    new_id: Callable[[str], str]
    state: State = State.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    expected_ids: dict[str, int] = field(default_factory=dict)
    rebalance_deadline: int = 0
    is_initial: bool = False

    # -- inputs

    def join(self, token: object, asked: Join, now: int) -> list[Reply]:
        """Add a member to the next generation."""
        refused = self._check_join(asked)
        if refused is not None:
            return [(token, failed_join(refused, asked.member_id))]

        static = self._static(asked.instance_id)
        # A restarted static member keeps its place, and followers need not rebalance.
        if static is not None and asked.member_id == "":
            return self._replace(static, token, asked, now)

        if asked.member_id == "" and asked.needs_id and asked.instance_id is None:
            member_id = self.new_id(asked.client_id)
            # The id is reserved without a member, so a client that never returns does not delay a
            # rebalance.
            self.expected_ids[member_id] = now + asked.session_ms
            return [(token, failed_join(Code.MEMBER_ID_REQUIRED, member_id))]

        known = self.members.get(asked.member_id)
        if known is None:
            member_id = asked.member_id or self.new_id(asked.instance_id or asked.client_id)
            self.expected_ids.pop(member_id, None)
            self.members[member_id] = self._member(member_id, asked, now)
            self.members[member_id].joining = token
            return self._rebalance(now)

        return self._rejoin(known, token, asked, now)

    def sync(
        self,
        token: object,
        member_id: str,
        generation: int,
        assignments: Mapping[str, bytes],
        now: int,
    ) -> list[Reply]:
        """Return a member's assignment. The leader's request contains all assignments."""
        code = self.check(member_id, generation)
        if code is Code.NONE and self.state is State.PREPARING:
            code = Code.REBALANCE_IN_PROGRESS
        if code is not Code.NONE:
            return [(token, {"error_code": code})]

        member = self.members[member_id]
        member.deadline = now + member.session_ms
        if self.state is State.STABLE:
            return [(token, {"error_code": Code.NONE, "assignment": member.assignment})]

        replies = self._answer_repeated(member, "syncing")
        member.syncing = token
        if member_id != self.leader:
            return replies

        self.state = State.STABLE
        for member in self.members.values():
            member.assignment = assignments.get(member.member_id, b"")

        return replies + self._answer_syncs(Code.NONE)

    def heartbeat(self, member_id: str, generation: int, now: int) -> Code:
        """Extend a member's session, and return the code of its answer."""
        code = self.check(member_id, generation)
        if code is Code.NONE:
            member = self.members[member_id]
            member.deadline = now + member.session_ms
            if self.state is State.PREPARING:
                return Code.REBALANCE_IN_PROGRESS
        return code

    def leave(
        self, member_id: str, now: int, instance_id: str | None = None
    ) -> tuple[Code, list[Reply]]:
        """Remove a member. A static one may be named by its instance alone."""
        static = self._static(instance_id)
        if instance_id is not None and static is None:
            return Code.UNKNOWN_MEMBER_ID, []
        if static is not None and member_id not in ("", static.member_id):
            return Code.FENCED_INSTANCE_ID, []
        member_id = member_id if static is None else static.member_id
        # The client leaves before it has joined with its reserved id.
        if self.expected_ids.pop(member_id, None) is not None:
            return Code.NONE, []
        if member_id not in self.members:
            return Code.UNKNOWN_MEMBER_ID, []
        return Code.NONE, self._remove([self.members[member_id]], now)

    def check(self, member_id: str, generation: int, instance_id: str | None = None) -> Code:
        """Return NONE if a member belongs to a generation, otherwise the error."""
        static = self._static(instance_id)
        if static is not None and static.member_id != member_id:
            return Code.FENCED_INSTANCE_ID
        if member_id not in self.members:
            return Code.UNKNOWN_MEMBER_ID
        return Code.NONE if generation == self.generation else Code.ILLEGAL_GENERATION

    def check_commit(self, member_id: str, generation: int, instance_id: str | None) -> Code:
        """Return NONE if offsets may be committed, otherwise the error.

        Consumers outside of the group may commit while it is empty.
        """
        # A consumer that assigns its partitions itself commits without a member id.
        if generation < 0 and not member_id:
            return Code.NONE if not self.members else Code.UNKNOWN_MEMBER_ID
        code = self.check(member_id, generation, instance_id)
        if code is Code.NONE and self.state is State.COMPLETING:
            return Code.REBALANCE_IN_PROGRESS
        return code

    def tick(self, now: int) -> list[Reply]:
        """Advance the time: expire sessions, and end a rebalance at its deadline."""
        self.expected_ids = {
            member_id: at for member_id, at in self.expected_ids.items() if at > now
        }
        # A member with a waiting request is alive: its connection is open, and its answer is still
        # due.
        silent = [
            member
            for member in self.members.values()
            if member.joining is None and member.syncing is None and member.deadline <= now
        ]
        replies = self._remove(silent, now) if silent else []
        if self.state is State.PREPARING and now >= self.rebalance_deadline:
            replies += self._complete(now)
        return replies

    def end(self, code: Code) -> list[Reply]:
        """Answer all waiting requests, and remove all members."""
        replies: list[Reply] = [
            (member.joining, failed_join(code, member.member_id))
            for member in self.members.values()
            if member.joining is not None
        ]
        replies += self._answer_syncs(code)
        # Members learn the new coordinator from the error and join there.
        self.members, self.state = {}, State.EMPTY
        return replies

    # -- joining

    def _check_join(self, asked: Join) -> Code | None:
        if not _SESSION_MS[0] <= asked.session_ms <= _SESSION_MS[1]:
            return Code.INVALID_SESSION_TIMEOUT

        others = [member for member in self.members.values() if member.member_id != asked.member_id]
        names = {name for name, _ in asked.protocols}
        if not names or not asked.protocol_type:
            return Code.INCONSISTENT_GROUP_PROTOCOL
        if others and asked.protocol_type != self.protocol_type:
            return Code.INCONSISTENT_GROUP_PROTOCOL
        if not names.intersection(*({name for name, _ in member.protocols} for member in others)):
            return Code.INCONSISTENT_GROUP_PROTOCOL

        is_known = asked.member_id in self.members or asked.member_id in self.expected_ids
        if asked.member_id and not is_known:
            return Code.UNKNOWN_MEMBER_ID

        static = self._static(asked.instance_id)
        if static is not None and asked.member_id not in ("", static.member_id):
            return Code.FENCED_INSTANCE_ID

        self.protocol_type = asked.protocol_type

        return None

    def _static(self, instance_id: str | None) -> Member | None:
        if instance_id is None:
            return None
        found = (member for member in self.members.values() if member.instance_id == instance_id)
        return next(found, None)

    def _member(self, member_id: str, asked: Join, now: int) -> Member:
        return Member(
            member_id,
            asked.instance_id,
            asked.client_id,
            asked.session_ms,
            asked.rebalance_ms,
            tuple(asked.protocols),
            now + asked.session_ms,
        )

    def _replace(self, former: Member, token: object, asked: Join, now: int) -> list[Reply]:
        """Replace a static member with its new process."""
        replies: list[Reply] = []
        if former.joining is not None:
            refused = failed_join(Code.FENCED_INSTANCE_ID, former.member_id)
            replies.append((former.joining, refused))
        if former.syncing is not None:
            replies.append((former.syncing, {"error_code": Code.FENCED_INSTANCE_ID}))

        member = self._member(self.new_id(asked.instance_id or ""), asked, now)
        member.assignment = former.assignment
        self.members = {
            member_.member_id: member_
            for member_ in (
                member if present is former else present for present in self.members.values()
            )
        }
        former_leader = self.leader
        if self.leader == former.member_id:
            self.leader = member.member_id
        if self.state is State.STABLE and member.protocols == former.protocols:
            # The answer names the former leader, so that the new process does not assign again.
            return [*replies, (token, self._join_answer(member, former_leader))]

        member.joining = token

        return replies + self._rebalance(now)

    def _rejoin(self, member: Member, token: object, asked: Join, now: int) -> list[Reply]:
        replies = self._answer_repeated(member, "joining")
        is_same = member.protocols == tuple(asked.protocols)
        member.protocols = tuple(asked.protocols)
        member.session_ms, member.rebalance_ms = asked.session_ms, asked.rebalance_ms
        member.deadline = now + asked.session_ms
        # A leader that rejoins asks for a new assignment. A follower only repeats its request.
        is_follower = member.member_id != self.leader
        if is_same and (
            self.state is State.COMPLETING or (self.state is State.STABLE and is_follower)
        ):
            return [*replies, (token, self._join_answer(member, self.leader))]
        member.joining = token
        return replies + self._rebalance(now)

    def _answer_repeated(self, member: Member, which: str) -> list[Reply]:
        """Answer the member's earlier request, which it has repeated."""
        token = getattr(member, which)
        setattr(member, which, None)
        if token is None:
            return []
        code = Code.REBALANCE_IN_PROGRESS
        return [(token, failed_join(code) if which == "joining" else {"error_code": code})]

    def _rebalance(self, now: int) -> list[Reply]:
        """Collect joins for the next generation, and complete it when all members have joined."""
        replies: list[Reply] = []
        if self.state is not State.PREPARING:
            self.is_initial = self.state is State.EMPTY
            replies = self._answer_syncs(Code.REBALANCE_IN_PROGRESS)
            self.state = State.PREPARING
            # All members must get the chance to rejoin, so the slowest one decides.
            longest = max(member.rebalance_ms for member in self.members.values())
            self.rebalance_deadline = now + (INITIAL_DELAY_MS if self.is_initial else longest)
        if not self.is_initial and all(
            member.joining is not None for member in self.members.values()
        ):
            replies += self._complete(now)
        return replies

    def _complete(self, now: int) -> list[Reply]:
        """Start the next generation with the members that have joined."""
        self.members = {
            member.member_id: member
            for member in self.members.values()
            if member.joining is not None
        }
        self.is_initial = False
        if not self.members:
            self.state = State.EMPTY
            return []

        self.generation += 1
        self.state = State.COMPLETING
        if self.leader not in self.members:
            self.leader = next(iter(self.members))

        self.protocol = self._choose_protocol()
        replies: list[Reply] = []
        for member in self.members.values():
            replies.append((member.joining, self._join_answer(member, self.leader)))
            member.joining, member.deadline, member.assignment = None, now + member.session_ms, b""

        return replies

    def _choose_protocol(self) -> str:
        """Return the leader's first protocol that all members support."""
        # Members were admitted only with a shared protocol, so the intersection is not empty.
        common = set.intersection(
            *({name for name, _ in member.protocols} for member in self.members.values())
        )
        return next(name for name, _ in self.members[self.leader].protocols if name in common)

    def _join_answer(self, member: Member, leader: str) -> Mapping[str, Any]:
        listed = self.members.values() if member.member_id == leader else ()
        return {
            "error_code": Code.NONE,
            "generation_id": self.generation,
            "protocol_name": self.protocol,
            "leader": leader,
            "member_id": member.member_id,
            "members": [
                {
                    "member_id": member.member_id,
                    "group_instance_id": member.instance_id,
                    "metadata": member.metadata(self.protocol),
                }
                for member in listed
            ],
        }

    def _answer_syncs(self, code: Code) -> list[Reply]:
        replies: list[Reply] = []
        for member in self.members.values():
            if member.syncing is not None:
                answer = {"error_code": code, "assignment": member.assignment if not code else b""}
                replies.append((member.syncing, answer))
                member.syncing = None
        return replies

    def _remove(self, gone: Sequence[Member], now: int) -> list[Reply]:
        replies: list[Reply] = []
        for member in gone:
            del self.members[member.member_id]
            if member.joining is not None:
                replies.append(
                    (member.joining, failed_join(Code.UNKNOWN_MEMBER_ID, member.member_id))
                )
            if member.syncing is not None:
                replies.append((member.syncing, {"error_code": Code.UNKNOWN_MEMBER_ID}))
        if not self.members:
            self.state, self.is_initial = State.EMPTY, False
            return replies
        return replies + self._rebalance(now)
