"""Handlers of consumer group APIs: the coordinator around the state machine, and offsets in keys.

The broker named by the view coordinates a group. Others answer NOT_COORDINATOR. A commit of offsets
succeeds once their keys are committed, so offsets survive their coordinator. Members rejoin at its
successor. The keys' versions reject a former coordinator's commit.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from streammeta.brokers.kafka.calls.record_calls import Answer
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.keys import offset_key
from streammeta.brokers.kafka.groups.group_offsets import GroupOffsets
from streammeta.brokers.kafka.groups.groups import Group, Join, Reply, State, failed_join
from streammeta.brokers.kafka.groups.subscriptions import CONSUMER, subscribed_topics
from streammeta.brokers.kafka.protocol.codes import NO_TRANSACTIONS, Code
from streammeta.brokers.kafka.protocol.wire import Request, Tree
from streammeta.client.errors import BrokerClientError

_TICK_S = 0.1
_METADATA_MAX = 4096
_PUT_ATTEMPTS = 3
OFFSETS_TIMEOUT_S = 5.0
"""Time limit for reading or putting offsets, in seconds."""
_KEY_MAX = 700
"""Maximum length of a group's key. A topic and a partition follow it, and keys have 1024 bytes."""
_NEEDS_ID_FROM = 4
_MEMBERS_FROM, _COORDINATORS_FROM, _GROUPS_FROM = 3, 4, 8
"""First versions of LeaveGroup, FindCoordinator and OffsetFetch with several items per call."""
_GROUP, _TRANSACTION = 0, 1
"""Types of keys in FindCoordinator."""

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _new_member_id(prefix: str) -> str:
    return f"{prefix or 'member'}-{secrets.token_hex(8)}"


@dataclass
class Groups:
    """The groups that a broker coordinates. Use it as an async context manager."""

    broker: Broker
    groups: dict[str, Group] = field(default_factory=dict)
    _offsets: dict[str, GroupOffsets] = field(default_factory=dict)
    _waiting: dict[object, asyncio.Future[Tree]] = field(default_factory=dict)
    _ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Groups:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        for group in self.groups.values():
            # Waiting requests must not hang: nobody would answer them.
            self._send(group.end(Code.NOT_COORDINATOR))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._pass_time(_now_ms())
            except Exception:  # noqa: BLE001 - members of other groups must be timed out too
                _log.exception("timing out group members failed, retrying")

    def _pass_time(self, now_ms: int) -> None:
        """Drop groups of other coordinators, and time out members of own groups."""
        # Offsets of a former term are outdated even if this broker becomes coordinator again.
        for name in [
            group for group in self._offsets if self._check_coordinator(group) is not Code.NONE
        ]:
            del self._offsets[name]
        for name, group in list(self.groups.items()):
            if self._check_coordinator(name) is Code.NOT_COORDINATOR:
                del self.groups[name]
                self._send(group.end(Code.NOT_COORDINATOR))
                continue
            self._send(group.tick(now_ms))

    def _send(self, replies: Iterable[Reply]) -> None:
        for token, answer in replies:
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(answer)

    def _check_coordinator(self, name: str) -> Code:
        """Return why this broker does not coordinate a group, NONE if it does."""
        # The key also contains a topic and a partition, and must fit the controllers' limit.
        if not name or len(offset_key(name)) > _KEY_MAX:
            return Code.INVALID_GROUP_ID
        coordinator = self.broker.view.coordinator(name)
        if coordinator == -1:
            return Code.COORDINATOR_NOT_AVAILABLE
        return Code.NONE if coordinator == self.broker.node_id else Code.NOT_COORDINATOR

    def _group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group(_new_member_id))

    def _register_waiter(self) -> tuple[object, asyncio.Future[Tree]]:
        token = object()
        self._waiting[token] = asyncio.get_running_loop().create_future()
        return token, self._waiting[token]

    # -- membership

    async def find_coordinator(self, request: Request) -> Tree:
        """Return the broker that coordinates a group. Transactions have no coordinator.

        They are rejected with the only error that every client treats as final. With another error
        librdkafka retries until its caller's timeout.
        """
        body = request.body
        # Version 0 has no key type, and knows groups only.
        key_type = getattr(body, "key_type", _GROUP)
        if request.version < _COORDINATORS_FROM:
            return self._coordinator(body.key, key_type)
        return {
            "coordinators": [
                {"key": key, **self._coordinator(key, key_type)} for key in body.coordinator_keys
            ]
        }

    def _coordinator(self, name: str, key_type: int) -> Tree:
        node_id = self.broker.view.coordinator(name)
        found = self.broker.view.brokers.get(node_id)
        code, message = Code.NONE, None
        if key_type == _TRANSACTION:
            code, message = Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, NO_TRANSACTIONS
        elif key_type != _GROUP:
            code, message = Code.INVALID_REQUEST, f"key_type is {key_type}, expected 0 (group)"
        elif found is None:
            code = Code.COORDINATOR_NOT_AVAILABLE

        if code is not Code.NONE or found is None:
            node_id, host, port = -1, "", -1
        else:
            host, port = found.host, found.port

        return {
            "error_code": code,
            "error_message": message,
            "node_id": node_id,
            "host": host,
            "port": port,
        }

    async def join(self, request: Request) -> Answer:
        """Add a member. The answer comes with the next generation."""
        body = request.body
        refused = self._check_coordinator(body.group_id)
        token, future = self._register_waiter()
        if refused is not Code.NONE:
            self._send([(token, failed_join(refused, body.member_id))])
            return _wait(future)

        session_ms = _ms(body.session_timeout)
        asked = Join(
            member_id=body.member_id,
            instance_id=getattr(body, "group_instance_id", None),
            client_id=request.client_id,
            session_ms=session_ms,
            rebalance_ms=_ms(getattr(body, "rebalance_timeout", None)) or session_ms,
            protocol_type=body.protocol_type,
            protocols=[(protocol.name, bytes(protocol.metadata)) for protocol in body.protocols],
            needs_id=request.version >= _NEEDS_ID_FROM,
        )
        self._send(self._group(body.group_id).join(token, asked, _now_ms()))

        return _wait(future)

    async def sync(self, request: Request) -> Answer:
        """Return a member's assignment once the leader has sent it."""
        body = request.body
        refused = self._check_coordinator(body.group_id)
        token, future = self._register_waiter()
        if refused is not Code.NONE:
            self._send([(token, {"error_code": refused})])
            return _wait(future)

        group = self._group(body.group_id)
        instance = getattr(body, "group_instance_id", None)
        fenced = group.check(body.member_id, body.generation_id, instance)
        # The state machine does not know instance ids in SyncGroup, so a replaced static member is
        # stopped here.
        if fenced is Code.FENCED_INSTANCE_ID:
            self._send([(token, {"error_code": fenced})])
            return _wait(future)

        assignments = {
            assignment.member_id: bytes(assignment.assignment) for assignment in body.assignments
        }
        replies = group.sync(token, body.member_id, body.generation_id, assignments, _now_ms())
        self._send(replies)

        return _wait(future)

    async def heartbeat(self, request: Request) -> Tree:
        """Extend a member's session with its group."""
        body = request.body
        code = self._check_coordinator(body.group_id)
        if code is Code.NONE:
            group = self._group(body.group_id)
            instance = getattr(body, "group_instance_id", None)
            code = group.check(body.member_id, body.generation_id, instance)
            if code is Code.NONE:
                code = group.heartbeat(body.member_id, body.generation_id, _now_ms())
        return {"error_code": code}

    async def leave(self, request: Request) -> Tree:
        """Remove a member, in newer versions several."""
        body = request.body
        code = self._check_coordinator(body.group_id)
        if request.version < _MEMBERS_FROM:
            return {"error_code": code or self._leave(body.group_id, body.member_id, None)}

        return {
            "error_code": code,
            "members": [
                {
                    "member_id": member.member_id,
                    "group_instance_id": member.group_instance_id,
                    "error_code": self._leave(
                        body.group_id, member.member_id, member.group_instance_id
                    ),
                }
                for member in (() if code else body.members)
            ],
        }

    def _leave(self, group: str, member_id: str, instance_id: str | None) -> Code:
        code, replies = self._group(group).leave(member_id, _now_ms(), instance_id)
        self._send(replies)
        return code

    # -- offsets

    async def commit(self, request: Request) -> Tree:
        """Commit offsets."""
        body = request.body
        code = self._check_coordinator(body.group_id)
        if code is Code.NONE:
            code = self._group(body.group_id).check_commit(
                body.member_id,
                body.generation_id_or_member_epoch,
                getattr(body, "group_instance_id", None),
            )

        values = {}
        rows = []
        for topic in body.topics:
            parts = []
            for item in topic.partitions:
                own = self._commit_code(code, topic.name, item)
                if own is Code.NONE:
                    key = offset_key(body.group_id, topic.name, item.partition_index)
                    values[key] = _offset_value(item)
                parts.append({"partition_index": item.partition_index, "error_code": own})
            rows.append({"name": topic.name, "partitions": parts})

        refused = await self._put_offsets(body.group_id, values) if values else Code.NONE
        for part in (part for row in rows for part in row["partitions"]):
            part["error_code"] = part["error_code"] or refused

        return {"topics": rows}

    async def _put_offsets(self, group: str, values: Mapping[str, Any]) -> Code:
        """Put offsets, and return the error, NONE for success."""

        async def put(offsets: GroupOffsets) -> bool | None:
            return await offsets.put(values) or None

        code, _ = await self._as_coordinator(group, put, _deadline())
        return Code.COORDINATOR_NOT_AVAILABLE if code is Code.COORDINATOR_LOAD_IN_PROGRESS else code

    async def _as_coordinator(
        self,
        group: str,
        act: Callable[[GroupOffsets], Awaitable[ResultT | None]],
        deadline: float,
    ) -> tuple[Code, ResultT | None]:
        """Run `act` until no other coordinator interferes, and return a code and the result.

        The code is NOT_COORDINATOR if this broker is no longer the coordinator, and
        COORDINATOR_LOAD_IN_PROGRESS if the controllers have not answered by the deadline.
        """
        try:
            async with asyncio.timeout_at(deadline):
                # The first attempt may find outdated versions, and the next one takes the group
                # over.
                for _ in range(_PUT_ATTEMPTS):
                    found = await act(self._offsets_of(group))
                    if found is not None:
                        return Code.NONE, found
                    # Another coordinator's write means that this broker's view may be outdated.
                    await self.broker.refresh()
                    if self._check_coordinator(group) is not Code.NONE:
                        break
        except (BrokerClientError, TimeoutError):
            return Code.COORDINATOR_LOAD_IN_PROGRESS, None
        return Code.NOT_COORDINATOR, None

    def _offsets_of(self, group: str) -> GroupOffsets:
        return self._offsets.setdefault(group, GroupOffsets(self.broker.keys, group))

    def _commit_code(self, code: Code, topic: str, item: Any) -> Code:
        if code is not Code.NONE:
            return code
        known = self.broker.view.topics.get(topic)
        if known is None or not 0 <= item.partition_index < known.partitions:
            return Code.UNKNOWN_TOPIC_OR_PARTITION
        if len(item.committed_metadata or "") > _METADATA_MAX:
            return Code.INVALID_REQUEST
        return Code.NONE

    async def fetch_offsets(self, request: Request) -> Tree:
        """Return committed offsets, -1 for missing ones, since version 8 of several groups.

        A group that is named twice is answered once.
        """
        body, deadline = request.body, _deadline()
        if request.version < _GROUPS_FROM:
            return await self._fetch_group_offsets(body.group_id, body.topics, deadline)
        return {
            "groups": [
                {
                    "group_id": asked.group_id,
                    **await self._fetch_group_offsets(asked.group_id, asked.topics, deadline),
                }
                for asked in {group.group_id: group for group in body.groups}.values()
            ]
        }

    async def _fetch_group_offsets(
        self, group: str, topics: Sequence[Any] | None, deadline: float
    ) -> Tree:
        code = self._check_coordinator(group)
        found: Mapping[str, Any] | None = None
        if code is Code.NONE:
            code, found = await self._as_coordinator(group, GroupOffsets.read, deadline)
        if found is None:
            return {"error_code": code, "topics": _error_rows(topics, code)}

        wanted: Mapping[str, Iterable[int]]
        if topics is None:
            wanted = _by_topic(found)
        else:
            wanted = {topic.name: topic.partition_indexes for topic in topics}

        return {
            "error_code": Code.NONE,
            "topics": [
                {
                    "name": name,
                    "partitions": [_offset_row(at, found.get(f"{name}/{at}")) for at in places],
                }
                for name, places in wanted.items()
            ],
        }

    async def delete_offsets(self, request: Request) -> Tree:
        """Delete committed offsets of partitions that no member of the group reads."""
        body = request.body
        code = self._check_coordinator(body.group_id)
        kept = self._topics_in_use(body.group_id)
        if code is Code.NONE and kept is None:
            code = Code.NON_EMPTY_GROUP

        rows = []
        keys: list[str] = []
        for topic in body.topics:
            is_kept = kept is not None and topic.name in kept
            own = Code.GROUP_SUBSCRIBED_TO_TOPIC if is_kept else Code.NONE
            places = [item.partition_index for item in topic.partitions]
            if not is_kept:
                keys += [offset_key(body.group_id, topic.name, place) for place in places]
            parts = [{"partition_index": place, "error_code": own} for place in places]
            rows.append({"name": topic.name, "partitions": parts})

        if code is Code.NONE:
            code = await self._delete_keys(body.group_id, keys, _deadline())

        return {"error_code": code, "topics": rows if code is Code.NONE else ()}

    def _topics_in_use(self, name: str) -> Collection[str] | None:
        """Return the topics that members of a group read, None if unknown."""
        group = self.groups.get(name)
        if group is None or not group.members:
            return ()
        if group.protocol_type != CONSUMER:
            return None
        named: set[str] = set()
        for member in group.members.values():
            topics = [subscribed_topics(metadata) for _, metadata in member.protocols]
            for found in topics:
                if found is None:
                    return None
                named |= found
        return named

    async def delete(self, request: Request) -> Tree:
        """Delete groups without members, and their offsets."""
        deadline = _deadline()
        return {
            "results": [
                {"group_id": name, "error_code": await self._delete(name, deadline)}
                for name in request.body.groups_names
            ]
        }

    async def _delete(self, name: str, deadline: float) -> Code:
        code = self._check_coordinator(name)
        if code is Code.NONE and self._has_members(name):
            code = Code.NON_EMPTY_GROUP
        if code is Code.NONE:
            code = await self._delete_keys(name, None, deadline)
        if code is Code.NONE and not self._has_members(name):  # some may have joined meanwhile
            self.groups.pop(name, None)
        return code

    def _has_members(self, name: str) -> bool:
        group = self.groups.get(name)
        return group is not None and bool(group.members)

    async def _delete_keys(self, name: str, keys: Collection[str] | None, deadline: float) -> Code:
        """Delete offsets, by default all. GROUP_ID_NOT_FOUND if the group is unknown."""

        async def delete(offsets: GroupOffsets) -> tuple[int, int] | None:
            return await offsets.delete(keys)

        code, counts = await self._as_coordinator(name, delete, deadline)
        is_unknown = counts == (0, 0) and name not in self.groups
        return Code.GROUP_ID_NOT_FOUND if is_unknown else code

    # -- descriptions

    async def describe(self, request: Request) -> Tree:
        """Describe groups. A group that is named twice is described once."""
        names = dict.fromkeys(request.body.groups)
        return {"groups": [self._description(name) for name in names]}

    def _description(self, name: str) -> Tree:
        code = self._check_coordinator(name)
        group = self.groups.get(name) or Group(_new_member_id)
        return {
            "error_code": code,
            "group_id": name,
            "group_state": group.state.value if name in self.groups else "Dead",
            "protocol_type": group.protocol_type,
            "protocol_data": group.protocol if group.state is State.STABLE else "",
            "members": [
                {
                    "member_id": member.member_id,
                    "group_instance_id": member.instance_id,
                    "client_id": member.client_id,
                    "client_host": "",
                    "member_metadata": member.metadata(group.protocol),
                    "member_assignment": member.assignment,
                }
                for member in group.members.values()
            ],
        }

    async def list_groups(self, request: Request) -> Tree:
        """List the groups coordinated by this broker. Newer versions may filter by state."""
        states = getattr(request.body, "states_filter", ())
        return {
            "error_code": Code.NONE,
            "groups": [
                {
                    "group_id": name,
                    "protocol_type": group.protocol_type,
                    "group_state": group.state.value,
                }
                for name, group in sorted(self.groups.items())
                if not states or group.state.value in states
            ],
        }


def _deadline() -> float:
    return asyncio.get_running_loop().time() + OFFSETS_TIMEOUT_S


async def _wait(future: asyncio.Future[Tree]) -> Tree:
    return await future


def _ms(duration: Any) -> int:
    return 0 if duration is None else int(duration.total_seconds() * 1000)


def _offset_value(item: Any) -> Mapping[str, Any]:
    return {
        "offset": item.committed_offset,
        "epoch": getattr(item, "committed_leader_epoch", -1),
        "metadata": item.committed_metadata or "",
    }


def _offset_row(partition: int, value: Mapping[str, Any] | None) -> Tree:
    value = {"offset": -1, "epoch": -1, "metadata": ""} if value is None else value
    return {
        "partition_index": partition,
        "committed_offset": value["offset"],
        "committed_leader_epoch": value["epoch"],
        "metadata": value["metadata"],
        "error_code": Code.NONE,
    }


def _error_rows(topics: Sequence[Any] | None, code: Code) -> list[Tree]:
    """Return rows with the error in versions whose answer has no code at the top."""
    return [
        {
            "name": topic.name,
            "partitions": [
                {**_offset_row(at, None), "error_code": code} for at in topic.partition_indexes
            ],
        }
        for topic in topics or ()
    ]


def _by_topic(found: Mapping[str, Any]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for key in sorted(found):
        name, _, partition = key.rpartition("/")
        topics.setdefault(name, []).append(int(partition))
    return topics
