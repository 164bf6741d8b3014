"""Small administration: settings, groups and offsets that go, log directories, ids of topics.

Every call goes through its bytes, in the versions that differ.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.keys import topic_key
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.groups.groups import INITIAL_DELAY_MS
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.wire import write_response
from streammeta.brokers.kafka.service.server import _calls
from tests.kit.kafka_batches import plain
from tests.kit.kafka_cluster import Cluster, lead_topic, opened, request_of
from tests.kit.kafka_wire import read_answer

_TOPIC, _BROKER = 2, 4
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)
_RANGE = "range"


class Place:
    """A broker of one topic, which is asked in bytes."""

    def __init__(self, cluster: Cluster, broker: Broker) -> None:
        self.cluster, self.broker = cluster, broker
        self.groups = Groups(broker)
        self._calls = _calls(broker, self.groups)

    async def begin(self, api: tuple[int, int], tree: Any) -> Awaitable[Any]:
        """Begin a call; its answer comes as an entity."""
        request = request_of(api, tree)
        outcome: Any = await self._calls[api[0]](request)

        async def answer() -> Any:
            found = await outcome if asyncio.iscoroutine(outcome) else outcome
            return read_answer(*api, b"".join(write_response(request, found))[4:])

        return answer()

    async def ask(self, api: tuple[int, int], tree: Any) -> Any:
        return await (await self.begin(api, tree))

    # -- settings

    async def alter(
        self,
        *changes: tuple[str, int, str | None],
        only: bool = False,
        kind: int = _TOPIC,
        name: str = "t",
    ) -> tuple[int, str]:
        """Alter single settings; return code and message."""
        configs = [
            {"name": setting, "config_operation": operation, "value": value}
            for setting, operation, value in changes
        ]
        resource = {"resource_type": kind, "resource_name": name, "configs": configs}
        tree = {"resources": [resource], "validate_only": only}
        (row,) = (await self.ask((44, 1), tree)).responses
        return row.error_code, row.error_message or ""

    async def replace(self, configs: Mapping[str, str | None], times: int = 1) -> tuple[int, str]:
        """Replace all settings; return code and message."""
        rows = [{"name": name, "value": value} for name, value in configs.items()]
        resource = {"resource_type": _TOPIC, "resource_name": "t", "configs": rows}
        tree = {"resources": [resource] * times, "validate_only": False}
        row, *_ = (await self.ask((33, 2), tree)).responses
        return row.error_code, row.error_message or ""

    async def settings(self) -> dict[str, str]:
        """Return the settings of the topic that are not defaults."""
        resource = {"resource_type": _TOPIC, "resource_name": "t", "configuration_keys": None}
        flags = {"include_synonyms": False, "include_documentation": False}
        (row,) = (await self.ask((32, 4), {"resources": [resource], **flags})).results
        assert row.error_code == Code.NONE
        return {config.name: config.value for config in row.configs if config.config_source == 1}

    # -- groups

    async def commit(self, group: str, *partitions: int) -> None:
        rows = [
            {"partition_index": at, "committed_offset": 7, "committed_leader_epoch": -1}
            for at in partitions
        ]
        topics = [{"name": "t", "partitions": [{**row, "committed_metadata": ""} for row in rows]}]
        head = {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": ""}
        answer = await self.ask((8, 8), {**head, "group_instance_id": None, "topics": topics})
        assert {row.error_code for row in answer.topics[0].partitions} == {Code.NONE}

    async def committed(self, group: str) -> set[int]:
        tree = {"groups": [{"group_id": group, "topics": None}], "require_stable": False}
        (row,) = (await self.ask((9, 8), tree)).groups
        assert row.error_code == Code.NONE
        return {part.partition_index for topic in row.topics for part in topic.partitions}

    async def delete_groups(self, *names: str) -> list[int]:
        answer = await self.ask((42, 2), {"groups_names": names})
        assert [row.group_id for row in answer.results] == list(names)
        return [row.error_code for row in answer.results]

    async def delete_offsets(self, group: str, *partitions: int) -> list[int]:
        """Return the code of the group and of each partition."""
        rows = [{"partition_index": at} for at in partitions]
        tree = {"group_id": group, "topics": [{"name": "t", "partitions": rows}]}
        answer = await self.ask((47, 0), tree)
        return [
            answer.error_code,
            *(part.error_code for row in answer.topics for part in row.partitions),
        ]

    async def join(self, group: str, metadata: bytes, **said: Any) -> str:
        """Make a group of one member that is stable; return its id."""
        tree = {
            "group_id": group,
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            "member_id": "",
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": [{"name": _RANGE, "metadata": metadata}],
            **said,
        }
        version = 5 if tree["group_instance_id"] else 3
        joining = asyncio.ensure_future(await self.begin((11, version), tree))
        deadline = self.groups.groups[group].rebalance_deadline
        self.groups._pass_time(deadline + INITIAL_DELAY_MS)
        member: str = (await joining).member_id
        return member

    async def leave(self, group: str, *members: tuple[str, str | None]) -> list[int]:
        rows = [{"member_id": one, "group_instance_id": instance} for one, instance in members]
        answer = await self.ask((13, 4), {"group_id": group, "members": rows})
        return [answer.error_code, *(row.error_code for row in answer.members)]


@pytest.fixture
async def place() -> Place:
    cluster, _, broker = await lead_topic(partitions=2)
    return Place(cluster, broker)


# -- settings


async def test_single_settings_are_set_and_deleted(place: Place) -> None:
    assert await place.alter(("retention.ms", _SET, "5"), ("segment.ms", _SET, "9")) == (0, "")
    assert await place.settings() == {"retention.ms": "5", "segment.ms": "9"}
    assert await place.alter(("retention.ms", _DELETE, None)) == (0, "")
    assert await place.settings() == {"segment.ms": "9"}
    assert await place.alter(("segment.ms", _SET, "10")) == (0, "")
    assert await place.settings() == {"segment.ms": "10"}


async def test_all_settings_are_replaced(place: Place) -> None:
    assert await place.replace({"retention.ms": "5", "segment.ms": "9"}) == (0, "")
    assert await place.replace({"segment.ms": "10"}) == (0, "")
    assert await place.settings() == {"segment.ms": "10"}
    assert await place.replace({}) == (0, "")
    assert await place.settings() == {}


async def test_altered_settings_count_for_logs_that_are_open(place: Place) -> None:
    log = place.broker.log_of("t", 0)
    await (await log.append(plain("a" * 100))).durable
    assert await place.alter(("max.message.bytes", _SET, "50")) == (0, "")
    assert place.broker.log_of("t", 0) is log
    assert log.config.max_batch_bytes == 50
    assert await place.alter(("max.message.bytes", _DELETE, None)) == (0, "")
    await (await log.append(plain("a" * 100))).durable


async def test_settings_of_kafka_that_change_nothing_here_are_kept(place: Place) -> None:
    kept = {
        "min.insync.replicas": "2",
        "unclean.leader.election.enable": "true",
        "compression.type": "zstd",
        "flush.ms": "1000",
        "min.cleanable.dirty.ratio": "0.5",
        "follower.replication.throttled.replicas": "0:1,0:2",
    }
    assert await place.replace(kept) == (0, "")
    assert await place.settings() == kept
    await (await place.broker.log_of("t", 0).append(plain("a"))).durable


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("colour", "red"),
        ("cleanup.policy", "compact"),
        ("message.timestamp.type", "LogAppendTime"),
        ("retention.ms", "soon"),
        ("min.insync.replicas", "none"),
        ("min.insync.replicas", "0"),
        ("unclean.leader.election.enable", "maybe"),
        ("min.cleanable.dirty.ratio", "2"),
        ("compression.type", "brotli"),
        ("retention.ms", "9" * 5000),
    ],
)
async def test_what_kafka_does_not_know_or_would_need_more_is_refused(
    place: Place, setting: str, value: str
) -> None:
    for code, message in (
        await place.alter(("segment.ms", _SET, "9"), (setting, _SET, value)),
        await place.replace({"segment.ms": "9", setting: value}),
    ):
        assert code == Code.INVALID_CONFIG
        assert message.startswith(setting)
        assert len(message) < 2000
    assert await place.settings() == {}, "nothing is changed"


async def test_settings_have_the_types_that_kafka_gives_them(place: Place) -> None:
    wanted = {
        "retention.bytes": 5,
        "segment.bytes": 3,
        "cleanup.policy": 7,
        "compression.type": 2,
        "message.timestamp.type": 2,
        "min.insync.replicas": 3,
        "preallocate": 1,
        "min.cleanable.dirty.ratio": 6,
        "flush.ms": 5,
    }
    kept = {"min.insync.replicas": "1", "preallocate": "true", "flush.ms": "1"}
    assert await place.replace({**kept, "min.cleanable.dirty.ratio": "0.5"}) == (0, "")
    resource = {"resource_type": _TOPIC, "resource_name": "t", "configuration_keys": [*wanted]}
    flags = {"include_synonyms": False, "include_documentation": False}
    (row,) = (await place.ask((32, 3), {"resources": [resource], **flags})).results
    assert {config.name: config.config_type for config in row.configs} == wanted


async def test_lists_are_appended_to_and_subtracted_from(place: Place) -> None:
    name = "leader.replication.throttled.replicas"
    assert await place.alter((name, _APPEND, "0:1,0:2")) == (0, "")
    assert await place.alter((name, _APPEND, "0:2,0:3")) == (0, "")
    assert await place.settings() == {name: "0:1,0:2,0:3"}
    assert await place.alter((name, _SUBTRACT, "0:2")) == (0, "")
    assert await place.settings() == {name: "0:1,0:3"}
    code, message = await place.alter(("retention.ms", _APPEND, "5"))
    assert (code, message.startswith("retention.ms is not a list")) == (Code.INVALID_CONFIG, True)
    code, _ = await place.alter(("cleanup.policy", _APPEND, "compact"))
    assert code == Code.INVALID_CONFIG


async def test_bad_changes_of_settings_are_refused(place: Place) -> None:
    refused = [
        await place.alter(("retention.ms", _SET, None)),
        await place.alter(("retention.ms", 9, "5")),
        await place.alter(("retention.ms", _SET, "5"), ("retention.ms", _DELETE, None)),
        await place.alter(("retention.ms", _SET, "5"), kind=_BROKER, name="1"),
        await place.replace({"retention.ms": None}),
        await place.replace({"retention.ms": "5"}, times=2),
    ]
    assert {code for code, _ in refused} == {Code.INVALID_REQUEST}
    assert all(message for _, message in refused)
    code, _ = await place.alter(("retention.ms", _SET, "5"), name="absent")
    assert code == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert await place.settings() == {}


async def test_a_look_alters_nothing_and_a_lost_race_is_noticed(place: Place) -> None:
    assert await place.alter(("retention.ms", _SET, "5"), only=True) == (0, "")
    assert await place.settings() == {}
    topic = place.broker.view.topics["t"]

    place.cluster.grow_before_next(topic)
    code, _ = await place.alter(("retention.ms", _SET, "5"))
    assert code == Code.REQUEST_TIMED_OUT
    assert place.broker.view.topics["t"].partitions == 9
    assert await place.alter(("retention.ms", _SET, "5")) == (0, "")
    assert place.broker.view.topics["t"].partitions == 9
    await opened(place.broker)


# -- assignments of replicas


def _assignments(*places: int) -> list[Mapping[str, Any]]:
    return [{"partition_index": at, "broker_ids": [1, 2, 3]} for at in places]


@pytest.mark.parametrize(
    ("count", "assignments", "code"),
    [
        (-1, _assignments(1, 0, 2), Code.NONE),
        (3, _assignments(0, 1, 2), Code.NONE),
        (4, _assignments(0, 1, 2), Code.INVALID_REQUEST),
        (-1, _assignments(0, 2), Code.INVALID_REPLICA_ASSIGNMENT),
        (-1, _assignments(0, 0), Code.INVALID_REPLICA_ASSIGNMENT),
        (-1, [{"partition_index": 0, "broker_ids": []}], Code.INVALID_REPLICA_ASSIGNMENT),
    ],
)
async def test_assignments_of_replicas_say_how_many_partitions_there_are(
    place: Place, count: int, assignments: Any, code: Code
) -> None:
    topic = {
        "name": "assigned",
        "num_partitions": count,
        "replication_factor": -1,
        "assignments": assignments,
        "configs": [],
    }
    tree = {"topics": [topic], "timeout": 1000, "validate_only": False}
    (row,) = (await place.ask((19, 4), tree)).topics
    assert row.error_code == code
    if code is Code.NONE:
        assert place.broker.view.topics["assigned"].partitions == 3
        await opened(place.broker)


@pytest.mark.parametrize(("rows", "code"), [(1, Code.NONE), (2, Code.INVALID_REPLICA_ASSIGNMENT)])
async def test_assignments_of_new_partitions_are_one_for_each(
    place: Place, rows: int, code: Code
) -> None:
    topic = {"name": "t", "count": 3, "assignments": [{"broker_ids": [1]}] * rows}
    tree = {"topics": [topic], "timeout": 1000, "validate_only": False}
    (row,) = (await place.ask((37, 1), tree)).results
    assert row.error_code == code
    assert place.broker.view.topics["t"].partitions == (3 if code is Code.NONE else 2)
    await opened(place.broker)


# -- groups


async def test_a_group_without_members_is_deleted_with_its_offsets(place: Place) -> None:
    await place.commit("g", 0, 1)
    await place.commit("kept", 0)
    assert await place.delete_groups("g", "absent", "") == [
        Code.NONE,
        Code.GROUP_ID_NOT_FOUND,
        Code.INVALID_GROUP_ID,
    ]
    assert await place.committed("g") == set()
    assert await place.committed("kept") == {0}
    assert "g" not in place.groups.groups


async def test_a_group_with_members_is_not_deleted(place: Place) -> None:
    member = await place.join("g", b"")
    assert await place.delete_groups("g") == [Code.NON_EMPTY_GROUP]
    assert await place.leave("g", (member, None)) == [Code.NONE, Code.NONE]
    assert await place.delete_groups("g") == [Code.NONE]
    assert await place.delete_groups("g") == [Code.GROUP_ID_NOT_FOUND]


async def test_another_coordinator_is_named_and_deletes_by_itself(place: Place) -> None:
    await place.commit("g", 0)
    living = place.broker.view.brokers[1]
    place.broker.view = replace(place.broker.view, brokers={2: living})
    assert await place.delete_groups("g") == [Code.NOT_COORDINATOR]
    assert await place.delete_offsets("g", 0) == [Code.NOT_COORDINATOR]
    place.broker.view = replace(place.broker.view, brokers={1: living})
    assert await place.committed("g") == {0}


async def test_offsets_of_partitions_that_nobody_reads_are_deleted(place: Place) -> None:
    await place.commit("g", 0, 1)
    assert await place.delete_offsets("g", 0, 5) == [Code.NONE, Code.NONE, Code.NONE]
    assert await place.committed("g") == {1}
    assert await place.delete_offsets("absent", 0) == [Code.GROUP_ID_NOT_FOUND]


def _subscription(*topics: str) -> bytes:
    names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)


@pytest.mark.parametrize(
    ("metadata", "codes"),
    [
        (_subscription("t", "u"), [Code.NONE, Code.GROUP_SUBSCRIBED_TO_TOPIC]),
        (_subscription("u"), [Code.NONE, Code.NONE]),
        (b"", [Code.NON_EMPTY_GROUP]),
        (struct.pack(">hih", 0, 2**31 - 1, -5), [Code.NON_EMPTY_GROUP]),
        (struct.pack(">hih", 0, 1, 100), [Code.NON_EMPTY_GROUP]),
    ],
)
async def test_offsets_of_topics_that_members_read_are_kept(
    place: Place, metadata: bytes, codes: list[Code]
) -> None:
    await place.commit("g", 0)
    await place.join("g", metadata)
    assert await place.delete_offsets("g", 0) == codes
    assert await place.committed("g") == (set() if codes == [Code.NONE, Code.NONE] else {0})


async def test_several_members_leave_by_one_call(place: Place) -> None:
    member = await place.join("g", b"", group_instance_id="i")
    assert await place.leave("g", ("other", "i"), ("", "absent"), ("x", None)) == [
        Code.NONE,
        Code.FENCED_INSTANCE_ID,
        Code.UNKNOWN_MEMBER_ID,
        Code.UNKNOWN_MEMBER_ID,
    ]
    assert list(place.groups.groups["g"].members) == [member]
    assert await place.leave("g", ("", "i")) == [Code.NONE, Code.NONE]
    assert not place.groups.groups["g"].members
    (row,) = (await place.ask((16, 4), {"states_filter": ["Empty"]})).groups
    assert (row.group_id, row.group_state) == ("g", "Empty")
    assert not (await place.ask((16, 4), {"states_filter": ["Stable"]})).groups


async def test_several_coordinators_are_found_by_one_call(place: Place) -> None:
    answer = await place.ask((10, 4), {"key_type": 0, "coordinator_keys": ["g", "h"]})
    assert [(row.key, row.node_id, row.error_code) for row in answer.coordinators] == [
        ("g", 1, Code.NONE),
        ("h", 1, Code.NONE),
    ]
    answer = await place.ask((10, 4), {"key_type": 1, "coordinator_keys": ["x"]})
    (row,) = answer.coordinators
    assert row.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    old = await place.ask((10, 2), {"key_type": 0, "key": "g"})
    assert (old.node_id, old.error_code) == (1, Code.NONE)


async def test_offsets_of_several_groups_are_fetched_by_one_call(place: Place) -> None:
    await place.commit("g", 0, 1)
    wanted = [
        {"group_id": "g", "topics": [{"name": "t", "partition_indexes": [1, 2]}]},
        {"group_id": "h", "topics": None},
        {"group_id": "", "topics": None},
        {"group_id": "g" * 700, "topics": None},
    ]
    answer = await place.ask((9, 8), {"groups": wanted, "require_stable": True})
    first, second, *bad = answer.groups
    rows = first.topics[0].partitions
    assert [(row.partition_index, row.committed_offset) for row in rows] == [(1, 7), (2, -1)]
    assert (second.group_id, second.error_code, second.topics) == ("h", Code.NONE, ())
    assert {row.error_code for row in bad} == {Code.INVALID_GROUP_ID}


# -- log directories, ACLs


async def test_log_directories_have_the_bytes_of_the_partitions_that_are_led_here(
    place: Place,
) -> None:
    batch = plain("a" * 100)
    await (await place.broker.log_of("t", 1).append(batch)).durable
    (result,) = (await place.ask((35, 4), {"topics": None})).results
    (topic,) = result.topics
    sizes = {row.partition_index: row.partition_size for row in topic.partitions}
    assert (result.log_dir, topic.name, sizes) == ("bucket", "t", {0: 0, 1: len(batch)})
    assert (result.total_bytes, result.usable_bytes) == (-1, -1)
    asked = [{"topic": "t", "partitions": [1]}, {"topic": "absent", "partitions": [0]}]
    for version in (1, 2, 3):
        (result,) = (await place.ask((35, version), {"topics": asked})).results
        rows = [row.partition_index for topic in result.topics for row in topic.partitions]
        assert rows == [1]


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_there_are_no_acls(place: Place, version: int) -> None:
    tree = {
        "resource_type_filter": 1,
        "resource_name_filter": None,
        "pattern_type_filter": 1,
        "principal_filter": None,
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    }
    answer = await place.ask((29, version), tree)
    assert (answer.error_code, answer.resources) == (Code.NONE, ())


# -- ids of topics


async def _metadata(place: Place, version: int, *topics: Mapping[str, Any]) -> Any:
    flags = {"include_topic_authorized_operations": False, "allow_auto_topic_creation": False}
    if version < 11:
        flags["include_cluster_authorized_operations"] = False
    return await place.ask((3, version), {"topics": topics or None, **flags})


async def test_topics_have_ids_and_are_found_by_them(place: Place) -> None:
    new = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    tree = {"topics": [{"name": "new", **new}], "timeout": 1000, "validate_only": False}
    await place.ask((19, 4), tree)
    topic_id = uuid.UUID(
        bytes=base64.urlsafe_b64decode(place.broker.view.topics["new"].topic_id + "==")
    )
    await place.cluster.keys.delete([topic_key("t")])
    await place.broker.refresh()
    for version in (10, 11, 12):
        (row,) = (await _metadata(place, version)).topics
        assert (row.name, row.topic_id, row.error_code) == ("new", topic_id, Code.NONE)
    (by_name,) = (await _metadata(place, 12, {"topic_id": None, "name": "new"})).topics
    assert by_name.topic_id == topic_id
    (by_id,) = (await _metadata(place, 12, {"topic_id": topic_id, "name": None})).topics
    assert (by_id.name, by_id.error_code) == ("new", Code.NONE)
    (early,) = (await _metadata(place, 10, {"topic_id": topic_id, "name": None})).topics
    assert early.error_code == Code.INVALID_REQUEST
    other = uuid.uuid4()
    (absent,) = (await _metadata(place, 12, {"topic_id": other, "name": None})).topics
    assert (absent.name, absent.topic_id) == (None, other)
    assert absent.error_code == Code.UNKNOWN_TOPIC_ID
    await opened(place.broker)
