"""Calls of groups at their coordinator: who may commit, what is kept, who is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

import pytest

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import ClusterView, Endpoint, Topic
from streammeta.brokers.kafka.cluster.keys import Keys
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.groups.groups import INITIAL_DELAY_MS, State
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.wire import read_request
from tests.kit.kafka_wire import request_bytes
from tests.kit.memory_keys import MemoryControllers

_HERE, _THERE = 1, 2
_TOPICS = {"t": Topic("t", "id", 2, {})}


class Coordinator:
    """A broker that coordinates all groups, until a test says who does; time is moved by hand."""

    def __init__(self, controllers: MemoryControllers, node_id: int = _HERE) -> None:
        nobody: Any = None
        self.controllers = controllers
        keys = Keys(cast(Any, controllers), "c")
        self.broker = Broker(nobody, keys, "c", node_id)
        self.moves_on_refresh: int | None = None
        self.broker.refresh = self._refresh  # type: ignore[method-assign]
        self.coordinated_by(node_id)
        self.groups = Groups(self.broker)

    def beside(self) -> Coordinator:
        """Return another process of the broker, or its successor."""
        return Coordinator(self.controllers)

    def coordinated_by(self, *node_ids: int) -> None:
        living = {node_id: Endpoint("h", 1, 1) for node_id in node_ids}
        self.broker.view = ClusterView(living, _TOPICS)

    async def _refresh(self) -> None:
        if self.moves_on_refresh is not None:
            self.coordinated_by(self.moves_on_refresh)

    async def commit(
        self,
        offset: int,
        *,
        member: str = "",
        generation: int = -1,
        partition: int = 0,
        **said: Any,
    ) -> Code:
        item = {
            "partition_index": partition,
            "committed_offset": offset,
            "committed_leader_epoch": 3,
            "committed_metadata": "m",
            **said,
        }
        tree = {
            "group_id": "g",
            "generation_id_or_member_epoch": generation,
            "member_id": member,
            "group_instance_id": None,
            "topics": [{"name": "t", "partitions": [item]}],
        }
        answer = await self.groups.commit(read_request(request_bytes(8, 7, tree)))
        code: Code = answer["topics"][0]["partitions"][0]["error_code"]
        return code

    async def committed(self, *partitions: int) -> list[tuple[int, Code]]:
        wanted = [{"name": "t", "partition_indexes": partitions}] if partitions else None
        tree = {"group_id": "g", "topics": wanted}
        answer = await self.groups.fetch_offsets(read_request(request_bytes(9, 5, tree)))
        if not answer["topics"]:
            return []
        rows = answer["topics"][0]["partitions"]
        return [(row["committed_offset"], row["error_code"]) for row in rows]

    async def join(self, member: str = "") -> asyncio.Future[Any]:
        tree = {
            "group_id": "g",
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            "member_id": member,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        return asyncio.ensure_future(
            await self.groups.join(read_request(request_bytes(11, 3, tree)))
        )

    async def sync(self, member: str, generation: int, **assigned: bytes) -> asyncio.Future[Any]:
        rows = [{"member_id": one, "assignment": data} for one, data in assigned.items()]
        tree = {
            "group_id": "g",
            "generation_id": generation,
            "member_id": member,
            "group_instance_id": None,
            "assignments": rows,
        }
        answer: Awaitable[Any] = await self.groups.sync(read_request(request_bytes(14, 3, tree)))
        return asyncio.ensure_future(answer)

    async def heartbeat(self, member: str, generation: int) -> Code:
        tree = {
            "group_id": "g",
            "generation_id": generation,
            "member_id": member,
            "group_instance_id": None,
        }
        answer = await self.groups.heartbeat(read_request(request_bytes(12, 3, tree)))
        code: Code = answer["error_code"]
        return code

    async def member(self) -> str:
        """Make a group of one member that is stable; return its id."""
        joining = await self.join()
        group = self.groups.groups["g"]
        self.groups._pass_time(group.rebalance_deadline + INITIAL_DELAY_MS)
        answer = await joining
        member: str = answer["member_id"]
        await (await self.sync(member, answer["generation_id"]))
        assert group.state is State.STABLE
        return member


@pytest.fixture
def here() -> Coordinator:
    return Coordinator(MemoryControllers())


# -- offsets


async def test_offsets_are_kept_with_their_epoch_and_read_by_a_successor(here: Coordinator) -> None:
    former, present = here, here.beside()
    assert await former.commit(5) is Code.NONE
    assert await former.commit(7, partition=1) is Code.NONE
    assert await present.committed(0, 1, 9) == [
        (5, Code.NONE),
        (7, Code.NONE),
        (-1, Code.NONE),
    ]
    assert await present.committed() == [(5, Code.NONE), (7, Code.NONE)]
    ((value, _),) = (await present.broker.keys.list("offset/g/t/0")).values()
    assert {**value, "term": 0} == {"offset": 5, "epoch": 3, "metadata": "m", "term": 0}


async def test_a_broker_that_does_not_coordinate_keeps_and_tells_nothing(here: Coordinator) -> None:
    assert await here.commit(5) is Code.NONE
    here.coordinated_by(_THERE)
    assert await here.commit(6) is Code.NOT_COORDINATOR
    assert await here.committed(0) == [(-1, Code.NOT_COORDINATOR)]
    assert (await (await here.join()))["error_code"] is Code.NOT_COORDINATOR
    assert await here.heartbeat("m", 1) is Code.NOT_COORDINATOR
    assert (await (await here.sync("m", 1)))["error_code"] is Code.NOT_COORDINATOR
    here.coordinated_by()
    assert await here.commit(6) is Code.COORDINATOR_NOT_AVAILABLE
    here.coordinated_by(_HERE)
    assert await here.committed(0) == [(5, Code.NONE)]


async def test_a_former_coordinator_that_has_not_heard_of_it_commits_nothing(
    here: Coordinator,
) -> None:
    """Its view is old: the versions of the keys refuse it, and it reads the view again."""
    former, present = here, here.beside()
    assert await former.commit(5) is Code.NONE
    assert await present.commit(9) is Code.NONE
    former.moves_on_refresh = _THERE
    assert await former.commit(6) is Code.NOT_COORDINATOR
    assert await present.committed(0) == [(9, Code.NONE)]


async def test_a_coordinator_that_lost_a_race_takes_the_group_over_again(here: Coordinator) -> None:
    beside = here.beside()
    assert await here.commit(5) is Code.NONE
    assert await beside.commit(6) is Code.NONE
    assert await here.commit(7) is Code.NONE
    assert await here.committed(0) == [(7, Code.NONE)]


async def test_a_commit_that_is_refused_again_and_again_is_not_answered_as_kept(
    here: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: Any) -> None:
        return None

    monkeypatch.setattr(here.broker.keys, "put_at", refuse)
    assert await here.commit(5) is Code.NOT_COORDINATOR
    assert await here.committed(0) == [(-1, Code.NOT_COORDINATOR)]


async def test_a_coordinator_that_was_another_meanwhile_forgets_the_versions_it_knew(
    here: Coordinator,
) -> None:
    """What it reads is final: the coordinator between can write no more."""
    between = here.beside()
    assert await here.commit(5) is Code.NONE
    here.coordinated_by(_THERE)
    here.groups._pass_time(0)
    assert await between.commit(6) is Code.NONE
    here.coordinated_by(_HERE)
    assert await here.committed(0) == [(6, Code.NONE)]
    between.moves_on_refresh = _THERE
    assert await between.commit(7) is Code.NOT_COORDINATOR
    assert await here.committed(0) == [(6, Code.NONE)]


async def test_only_members_of_the_generation_commit(here: Coordinator) -> None:
    member = await here.member()
    assert await here.commit(5, member=member, generation=1) is Code.NONE
    assert await here.commit(6, member=member, generation=0) is Code.ILLEGAL_GENERATION
    assert await here.commit(6, member="stranger", generation=1) is Code.UNKNOWN_MEMBER_ID
    assert await here.commit(6) is Code.UNKNOWN_MEMBER_ID, "a group with members is not alone"
    assert await here.committed(0) == [(5, Code.NONE)]


async def test_offsets_of_unknown_partitions_and_long_metadata_are_not_kept(
    here: Coordinator,
) -> None:
    assert await here.commit(5, partition=2) is Code.UNKNOWN_TOPIC_OR_PARTITION
    assert await here.commit(5, partition=-1) is Code.UNKNOWN_TOPIC_OR_PARTITION
    assert await here.commit(5, committed_metadata="m" * 4097) is Code.INVALID_REQUEST
    assert not here.controllers.stored
    assert await here.commit(5, committed_metadata="m" * 4096) is Code.NONE


async def test_one_bad_partition_of_a_commit_does_not_refuse_the_others(here: Coordinator) -> None:
    rows = [
        {"partition_index": at, "committed_offset": 4, "committed_leader_epoch": -1}
        for at in (0, 5)
    ]
    tree = {
        "group_id": "g",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [
            {"name": "t", "partitions": [{**row, "committed_metadata": None} for row in rows]}
        ],
    }
    answer = await here.groups.commit(read_request(request_bytes(8, 7, tree)))
    codes = [row["error_code"] for row in answer["topics"][0]["partitions"]]
    assert codes == [Code.NONE, Code.UNKNOWN_TOPIC_OR_PARTITION]
    assert await here.committed(0) == [(4, Code.NONE)]


# -- members


async def test_members_that_wait_hear_that_the_coordinator_is_another(here: Coordinator) -> None:
    joining = await here.join()
    here.coordinated_by(_THERE)
    here.groups._pass_time(0)
    assert (await joining)["error_code"] is Code.NOT_COORDINATOR
    assert not here.groups.groups
    assert not here.groups._waiting


async def test_members_that_wait_are_answered_when_the_broker_closes(here: Coordinator) -> None:
    async with here.groups:
        joining = await here.join()
    assert (await joining)["error_code"] is Code.NOT_COORDINATOR


async def test_a_silent_member_is_timed_out_by_its_coordinator(here: Coordinator) -> None:
    member = await here.member()
    deadline = here.groups.groups["g"].members[member].deadline
    here.groups._pass_time(deadline - 1)
    assert await here.heartbeat(member, 1) is Code.NONE
    here.groups._pass_time(deadline + 10_000_000)
    assert await here.heartbeat(member, 1) is Code.UNKNOWN_MEMBER_ID
    assert await here.commit(5, member=member, generation=1) is Code.UNKNOWN_MEMBER_ID
