"""Consumer groups of the classic protocol as a state machine: inputs give replies, time is given.

States: Empty, PreparingRebalance (members join), CompletingRebalance (the leader assigns), Stable.
Requests that wait are known by a token of the caller; a reply names the token and the answer.
Nothing here survives a coordinator: members of a group that is not known join again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from streammeta.brokers.kafka.protocol.codes import Code

INITIAL_DELAY_MS = 300
"""Time in ms that an empty group waits for more members after the first."""
_SESSION_MS = (100, 1_800_000)

Reply = tuple[object, Mapping[str, Any]]
"""A token, and the fields of the answer."""


class State(Enum):
    """States of a group, by the names that DescribeGroups gives."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


@dataclass
class Member:
    """A member; `joining` and `syncing` are tokens of requests that wait."""

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
        """Return what the member says in a protocol."""
        return dict(self.protocols).get(protocol, b"")


@dataclass(frozen=True, kw_only=True)
class Join:
    """A JoinGroup request; `needs_id`: a new member is told its id first."""

    member_id: str
    instance_id: str | None
    client_id: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: Sequence[tuple[str, bytes]]
    needs_id: bool


def failed_join(code: Code, member_id: str = "") -> Mapping[str, Any]:
    """Return the answer of a join that is refused."""
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
    """One group. Times are ms of one clock; `new_id` makes ids of members."""

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
        """Take a member into the next generation."""
        refused = self._refused_join(asked)
        if refused is not None:
            return [(token, failed_join(refused, asked.member_id))]
        static = self._static(asked.instance_id)
        if static is not None and asked.member_id == "":
            return self._replace(static, token, asked, now)
        if asked.member_id == "" and asked.needs_id and asked.instance_id is None:
            member_id = self.new_id(asked.client_id)
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
        """Give a member its assignment; the leader brings those of all."""
        code = self.check(member_id, generation)
        if code is Code.NONE and self.state is State.PREPARING:
            code = Code.REBALANCE_IN_PROGRESS
        if code is not Code.NONE:
            return [(token, {"error_code": code})]
        member = self.members[member_id]
        member.deadline = now + member.session_ms
        if self.state is State.STABLE:
            return [(token, {"error_code": Code.NONE, "assignment": member.assignment})]
        replies = self._superseded(member, "syncing")
        member.syncing = token
        if member_id != self.leader:
            return replies
        self.state = State.STABLE
        for one in self.members.values():
            one.assignment = assignments.get(one.member_id, b"")
        return replies + self._answer_syncs(Code.NONE)

    def heartbeat(self, member_id: str, generation: int, now: int) -> Code:
        """Keep a member; return what it is told."""
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
        """Let a member go; a static one may be named by its instance alone."""
        static = self._static(instance_id)
        if instance_id is not None and static is None:
            return Code.UNKNOWN_MEMBER_ID, []
        if static is not None and member_id not in ("", static.member_id):
            return Code.FENCED_INSTANCE_ID, []
        member_id = member_id if static is None else static.member_id
        if self.expected_ids.pop(member_id, None) is not None:
            return Code.NONE, []
        if member_id not in self.members:
            return Code.UNKNOWN_MEMBER_ID, []
        return Code.NONE, self._remove([self.members[member_id]], now)

    def check(self, member_id: str, generation: int, instance_id: str | None = None) -> Code:
        """Return whether a member may speak for a generation."""
        static = self._static(instance_id)
        if static is not None and static.member_id != member_id:
            return Code.FENCED_INSTANCE_ID
        if member_id not in self.members:
            return Code.UNKNOWN_MEMBER_ID
        return Code.NONE if generation == self.generation else Code.ILLEGAL_GENERATION

    def check_commit(self, member_id: str, generation: int, instance_id: str | None) -> Code:
        """Return whether offsets may be committed; consumers without a group may if it is empty."""
        if generation < 0 and not member_id:
            return Code.NONE if not self.members else Code.UNKNOWN_MEMBER_ID
        code = self.check(member_id, generation, instance_id)
        if code is Code.NONE and self.state is State.COMPLETING:
            return Code.REBALANCE_IN_PROGRESS
        return code

    def tick(self, now: int) -> list[Reply]:
        """Let time pass: sessions end, and a rebalance waits no longer."""
        self.expected_ids = {one: at for one, at in self.expected_ids.items() if at > now}
        silent = [
            one
            for one in self.members.values()
            if one.joining is None and one.syncing is None and one.deadline <= now
        ]
        replies = self._remove(silent, now) if silent else []
        if self.state is State.PREPARING and now >= self.rebalance_deadline:
            replies += self._complete(now)
        return replies

    def end(self, code: Code) -> list[Reply]:
        """Answer all that waits, and forget all members."""
        replies: list[Reply] = [
            (one.joining, failed_join(code, one.member_id))
            for one in self.members.values()
            if one.joining is not None
        ]
        replies += self._answer_syncs(code)
        self.members, self.state = {}, State.EMPTY
        return replies

    # -- joining

    def _refused_join(self, asked: Join) -> Code | None:
        if not _SESSION_MS[0] <= asked.session_ms <= _SESSION_MS[1]:
            return Code.INVALID_SESSION_TIMEOUT
        others = [one for one in self.members.values() if one.member_id != asked.member_id]
        names = {name for name, _ in asked.protocols}
        if not names or not asked.protocol_type:
            return Code.INCONSISTENT_GROUP_PROTOCOL
        if others and asked.protocol_type != self.protocol_type:
            return Code.INCONSISTENT_GROUP_PROTOCOL
        if not names.intersection(*({name for name, _ in one.protocols} for one in others)):
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
        found = (one for one in self.members.values() if one.instance_id == instance_id)
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
        """Put a static member's new process in the place of the one before."""
        replies: list[Reply] = []
        if former.joining is not None:
            refused = failed_join(Code.FENCED_INSTANCE_ID, former.member_id)
            replies.append((former.joining, refused))
        if former.syncing is not None:
            replies.append((former.syncing, {"error_code": Code.FENCED_INSTANCE_ID}))
        member = self._member(self.new_id(asked.instance_id or ""), asked, now)
        member.assignment = former.assignment
        self.members = {
            one.member_id: one
            for one in (member if each is former else each for each in self.members.values())
        }
        former_leader = self.leader
        if self.leader == former.member_id:
            self.leader = member.member_id
        if self.state is State.STABLE and member.protocols == former.protocols:
            # It is told of the leader before, so that it does not assign anew.
            return [*replies, (token, self._joined(member, former_leader))]
        member.joining = token
        return replies + self._rebalance(now)

    def _rejoin(self, member: Member, token: object, asked: Join, now: int) -> list[Reply]:
        replies = self._superseded(member, "joining")
        is_same = member.protocols == tuple(asked.protocols)
        member.protocols = tuple(asked.protocols)
        member.session_ms, member.rebalance_ms = asked.session_ms, asked.rebalance_ms
        member.deadline = now + asked.session_ms
        is_follower = member.member_id != self.leader
        if is_same and (
            self.state is State.COMPLETING or (self.state is State.STABLE and is_follower)
        ):
            return [*replies, (token, self._joined(member, self.leader))]
        member.joining = token
        return replies + self._rebalance(now)

    def _superseded(self, member: Member, which: str) -> list[Reply]:
        """Answer a request that the member has sent again."""
        token = getattr(member, which)
        setattr(member, which, None)
        if token is None:
            return []
        code = Code.REBALANCE_IN_PROGRESS
        return [(token, failed_join(code) if which == "joining" else {"error_code": code})]

    def _rebalance(self, now: int) -> list[Reply]:
        """Collect joins for the next generation; complete it when all have joined."""
        replies: list[Reply] = []
        if self.state is not State.PREPARING:
            self.is_initial = self.state is State.EMPTY
            replies = self._answer_syncs(Code.REBALANCE_IN_PROGRESS)
            self.state = State.PREPARING
            longest = max(one.rebalance_ms for one in self.members.values())
            self.rebalance_deadline = now + (INITIAL_DELAY_MS if self.is_initial else longest)
        if not self.is_initial and all(one.joining is not None for one in self.members.values()):
            replies += self._complete(now)
        return replies

    def _complete(self, now: int) -> list[Reply]:
        """Begin the next generation with the members that have joined."""
        self.members = {
            one.member_id: one for one in self.members.values() if one.joining is not None
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
        for one in self.members.values():
            replies.append((one.joining, self._joined(one, self.leader)))
            one.joining, one.deadline, one.assignment = None, now + one.session_ms, b""
        return replies

    def _choose_protocol(self) -> str:
        """Return the first protocol of the leader that all members know."""
        common = set.intersection(
            *({name for name, _ in one.protocols} for one in self.members.values())
        )
        return next(name for name, _ in self.members[self.leader].protocols if name in common)

    def _joined(self, member: Member, leader: str) -> Mapping[str, Any]:
        listed = self.members.values() if member.member_id == leader else ()
        return {
            "error_code": Code.NONE,
            "generation_id": self.generation,
            "protocol_name": self.protocol,
            "leader": leader,
            "member_id": member.member_id,
            "members": [
                {
                    "member_id": one.member_id,
                    "group_instance_id": one.instance_id,
                    "metadata": one.metadata(self.protocol),
                }
                for one in listed
            ],
        }

    def _answer_syncs(self, code: Code) -> list[Reply]:
        replies: list[Reply] = []
        for one in self.members.values():
            if one.syncing is not None:
                answer = {"error_code": code, "assignment": one.assignment if not code else b""}
                replies.append((one.syncing, answer))
                one.syncing = None
        return replies

    def _remove(self, gone: Sequence[Member], now: int) -> list[Reply]:
        replies: list[Reply] = []
        for one in gone:
            del self.members[one.member_id]
            if one.joining is not None:
                replies.append((one.joining, failed_join(Code.UNKNOWN_MEMBER_ID, one.member_id)))
            if one.syncing is not None:
                replies.append((one.syncing, {"error_code": Code.UNKNOWN_MEMBER_ID}))
        if not self.members:
            self.state, self.is_initial = State.EMPTY, False
            return replies
        return replies + self._rebalance(now)
