"""Calls of consumer groups: the coordinator around the state machine, and offsets in keys.

A group is coordinated by the broker that the view names; another answers NOT_COORDINATOR. Offsets
are committed when their keys are, so they outlive their coordinator; members join its successor.
A former coordinator's commit is refused by the versions of the keys.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streammeta.brokers.kafka.broker import Broker
from streammeta.brokers.kafka.codes import NO_TRANSACTIONS, Code
from streammeta.brokers.kafka.group_offsets import GroupOffsets
from streammeta.brokers.kafka.groups import Group, Join, Reply, State, failed_join
from streammeta.brokers.kafka.keys import offset_key
from streammeta.brokers.kafka.record_calls import Answer
from streammeta.brokers.kafka.wire import Request, Tree
from streammeta.client import BrokerClientError

_TICK_S = 0.1
_METADATA_MAX = 4096
_PUT_ATTEMPTS = 3
OFFSETS_WITHIN_S = 5.0
"""Time in which offsets are put or read."""
_NEEDS_ID_FROM = 4
_GROUP, _TRANSACTION = 0, 1
"""Types of keys that a coordinator is looked for by."""

_log = logging.getLogger(__name__)


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
            self._send(group.end(Code.NOT_COORDINATOR))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._pass_time(_now_ms())
            except Exception:  # noqa: BLE001 - members of other groups must be timed out too
                _log.exception("groups were not looked at, they are looked at again")

    def _pass_time(self, now_ms: int) -> None:
        """Drop groups of other coordinators, and time out members of the own ones."""
        for name in [one for one in self._offsets if self._refusal(one) is not Code.NONE]:
            del self._offsets[name]
        for name, group in list(self.groups.items()):
            if self._refusal(name) is Code.NOT_COORDINATOR:
                del self.groups[name]
                self._send(group.end(Code.NOT_COORDINATOR))
                continue
            self._send(group.tick(now_ms))

    def _send(self, replies: Iterable[Reply]) -> None:
        for token, answer in replies:
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(answer)

    def _refusal(self, name: str) -> Code:
        """Return why this broker does not speak for a group, NONE if it does."""
        if not name:
            return Code.INVALID_GROUP_ID
        coordinator = self.broker.view.coordinator(name)
        if coordinator == -1:
            return Code.COORDINATOR_NOT_AVAILABLE
        return Code.NONE if coordinator == self.broker.node_id else Code.NOT_COORDINATOR

    def _group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group(_new_member_id))

    def _token(self) -> tuple[object, asyncio.Future[Tree]]:
        token = object()
        self._waiting[token] = asyncio.get_running_loop().create_future()
        return token, self._waiting[token]

    # -- membership

    async def find_coordinator(self, request: Request) -> Tree:
        """Return the broker that coordinates a group; transactions have none.

        They are refused by the one error that every client takes for final: with another one
        librdkafka asks again until its caller's patience ends.
        """
        body = request.body
        node_id = self.broker.view.coordinator(body.key)
        found = self.broker.view.brokers.get(node_id)
        code, message = Code.NONE, None
        key_type = getattr(body, "key_type", _GROUP)
        if key_type == _TRANSACTION:
            code, message = Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, NO_TRANSACTIONS
        elif key_type != _GROUP:
            code, message = Code.INVALID_REQUEST, f"key_type is {key_type}, wanted 0, a group"
        elif found is None:
            code = Code.COORDINATOR_NOT_AVAILABLE
        if code is not Code.NONE or found is None:
            return {
                "error_code": code,
                "error_message": message,
                "node_id": -1,
                "host": "",
                "port": -1,
            }
        return {
            "error_code": code,
            "error_message": None,
            "node_id": node_id,
            "host": found.host,
            "port": found.port,
        }

    async def join(self, request: Request) -> Answer:
        """Take a member in; the answer comes with the next generation."""
        body = request.body
        refused = self._refusal(body.group_id)
        token, future = self._token()
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
            protocols=[(one.name, bytes(one.metadata)) for one in body.protocols],
            needs_id=request.version >= _NEEDS_ID_FROM,
        )
        self._send(self._group(body.group_id).join(token, asked, _now_ms()))
        return _wait(future)

    async def sync(self, request: Request) -> Answer:
        """Return a member's assignment once the leader has brought it."""
        body = request.body
        refused = self._refusal(body.group_id)
        token, future = self._token()
        if refused is not Code.NONE:
            self._send([(token, {"error_code": refused})])
            return _wait(future)
        group = self._group(body.group_id)
        instance = getattr(body, "group_instance_id", None)
        fenced = group.check(body.member_id, body.generation_id, instance)
        if fenced is Code.FENCED_INSTANCE_ID:
            self._send([(token, {"error_code": fenced})])
            return _wait(future)
        assignments = {one.member_id: bytes(one.assignment) for one in body.assignments}
        replies = group.sync(token, body.member_id, body.generation_id, assignments, _now_ms())
        self._send(replies)
        return _wait(future)

    async def heartbeat(self, request: Request) -> Tree:
        """Keep a member in its group."""
        body = request.body
        code = self._refusal(body.group_id)
        if code is Code.NONE:
            group = self._group(body.group_id)
            instance = getattr(body, "group_instance_id", None)
            code = group.check(body.member_id, body.generation_id, instance)
            if code is Code.NONE:
                code = group.heartbeat(body.member_id, body.generation_id, _now_ms())
        return {"error_code": code}

    async def leave(self, request: Request) -> Tree:
        """Let a member go."""
        body = request.body
        code = self._refusal(body.group_id)
        if code is Code.NONE:
            code, replies = self._group(body.group_id).leave(body.member_id, _now_ms())
            self._send(replies)
        return {"error_code": code}

    # -- offsets

    async def commit(self, request: Request) -> Tree:
        """Commit offsets."""
        body = request.body
        code = self._refusal(body.group_id)
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
                one = self._commit_code(code, topic.name, item)
                if one is Code.NONE:
                    key = offset_key(body.group_id, topic.name, item.partition_index)
                    values[key] = _offset_value(item)
                parts.append({"partition_index": item.partition_index, "error_code": one})
            rows.append({"name": topic.name, "partitions": parts})
        refused = await self._put_offsets(body.group_id, values) if values else Code.NONE
        for part in (part for row in rows for part in row["partitions"]):
            part["error_code"] = part["error_code"] or refused
        return {"topics": rows}

    async def _put_offsets(self, group: str, values: Mapping[str, Any]) -> Code:
        """Put offsets; return NOT_COORDINATOR if this broker is not the coordinator any more."""
        try:
            async with asyncio.timeout(OFFSETS_WITHIN_S):
                for _ in range(_PUT_ATTEMPTS):
                    if await self._offsets_of(group).put(values):
                        return Code.NONE
                    await self.broker.refresh()
                    if self._refusal(group) is not Code.NONE:
                        break
        except (BrokerClientError, TimeoutError):
            return Code.COORDINATOR_NOT_AVAILABLE
        return Code.NOT_COORDINATOR

    async def _read_offsets(self, group: str) -> tuple[Code, Mapping[str, Any]]:
        """Return offsets, and NOT_COORDINATOR if this broker is not the coordinator any more."""
        try:
            async with asyncio.timeout(OFFSETS_WITHIN_S):
                for _ in range(_PUT_ATTEMPTS):
                    found = await self._offsets_of(group).read()
                    if found is not None:
                        return Code.NONE, found
                    await self.broker.refresh()
                    if self._refusal(group) is not Code.NONE:
                        break
        except (BrokerClientError, TimeoutError):
            return Code.COORDINATOR_LOAD_IN_PROGRESS, {}
        return Code.NOT_COORDINATOR, {}

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
        """Return committed offsets, -1 where there are none."""
        body = request.body
        refused = self._refusal(body.group_id)
        found: Mapping[str, Any] = {}
        if refused is Code.NONE:
            refused, found = await self._read_offsets(body.group_id)
        if refused is not Code.NONE:
            return {"error_code": refused, "topics": _refused_offsets(body, refused)}
        wanted: Mapping[str, Iterable[int]]
        if body.topics is None:
            wanted = _by_topic(found)
        else:
            wanted = {one.name: one.partition_indexes for one in body.topics}
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

    # -- descriptions

    async def describe(self, request: Request) -> Tree:
        """Describe groups."""
        return {"groups": [self._description(name) for name in request.body.groups]}

    def _description(self, name: str) -> Tree:
        code = self._refusal(name)
        group = self.groups.get(name) or Group(_new_member_id)
        return {
            "error_code": code,
            "group_id": name,
            "group_state": group.state.value if name in self.groups else "Dead",
            "protocol_type": group.protocol_type,
            "protocol_data": group.protocol if group.state is State.STABLE else "",
            "members": [
                {
                    "member_id": one.member_id,
                    "group_instance_id": one.instance_id,
                    "client_id": one.client_id,
                    "client_host": "",
                    "member_metadata": one.metadata(group.protocol),
                    "member_assignment": one.assignment,
                }
                for one in group.members.values()
            ],
        }

    async def list_groups(self, _: Request) -> Tree:
        """List the groups that this broker coordinates."""
        return {
            "error_code": Code.NONE,
            "groups": [
                {"group_id": name, "protocol_type": one.protocol_type}
                for name, one in sorted(self.groups.items())
            ],
        }


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


def _refused_offsets(body: Any, code: Code) -> list[Tree]:
    """Return rows that carry a refusal in versions whose answer has no code of its own."""
    return [
        {
            "name": one.name,
            "partitions": [
                {**_offset_row(at, None), "error_code": code} for at in one.partition_indexes
            ],
        }
        for one in body.topics or ()
    ]


def _by_topic(found: Mapping[str, Any]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for key in sorted(found):
        name, _, partition = key.rpartition("/")
        topics.setdefault(name, []).append(int(partition))
    return topics
