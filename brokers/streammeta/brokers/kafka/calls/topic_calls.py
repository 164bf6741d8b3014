"""Calls about the cluster and its topics: Metadata, topics that come, grow and go, producer ids.

Every call is answered in a bounded time, with the error of each item, also while no controller is
there.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from streammeta.brokers.kafka.calls.topic_changes import change_all, put_topic
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import Topic
from streammeta.brokers.kafka.cluster.keys import deleted_key, leader_key, topic_key
from streammeta.brokers.kafka.cluster.topic_configs import checked
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.brokers.kafka.protocol.wire import Request, Tree
from streammeta.brokers.partition.log_clock import wall_clock_ms
from streammeta.client import BrokerClientError

PARTITIONS_MAX = 10_000
FOUND_WITHIN_S = 5.0
"""Time in which Metadata finds or creates topics that the view does not have."""
LED_WITHIN_S = 1.0
"""Time that new topics have to get their leaders before the call that names them is answered."""
PRODUCER_ID_WITHIN_S = 5.0
"""Time in which a producer id is reserved."""
_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_BROKERS = 1
"""Endpoint type of brokers, as DescribeCluster has it."""
_IDS_FROM, _BY_ID_FROM = 10, 12
"""Versions of Metadata from which on topics have ids, and may be asked for by these alone."""
_UNKNOWN_OPERATIONS = -(2**31)


async def metadata(broker: Broker, request: Request) -> Tree:
    """Return brokers, and the leaders of topics; topics that are wanted and absent are created.

    While no controller answers, the answer is from the last view. A topic has one row, as in
    Apache Kafka, however often it is named: its partitions would multiply with the names.
    """
    body = request.body
    is_all = body.topics is None or (request.version == 0 and not body.topics)
    may_create = getattr(body, "allow_auto_topic_creation", True) and broker.creates_topics
    rows = []
    if is_all:
        names = sorted(broker.view.topics)
        rows = [_topic_row(broker, name, {}, request.version) for name in names]
    else:
        named = list(dict.fromkeys(asked.name for asked in body.topics if asked.name is not None))
        by_id = list(dict.fromkeys(asked.topic_id for asked in body.topics if asked.name is None))
        errors = await _find_or_create(broker, named, by_id, may_create=may_create)
        rows = [_topic_row(broker, name, errors, request.version) for name in named]
        found = _topics_by_id(broker) if by_id and request.version >= _BY_ID_FROM else {}
        rows += [_row_of_id(broker, topic_id, found, request.version) for topic_id in by_id]
    return {
        "brokers": _brokers(broker, "node_id"),
        "cluster_id": broker.cluster_id,
        "controller_id": broker.view.controller,
        "topics": rows,
        "cluster_authorized_operations": _UNKNOWN_OPERATIONS,
    }


async def _find_or_create(
    broker: Broker, names: Sequence[str], ids: Sequence[Any], *, may_create: bool
) -> Mapping[str, Code]:
    """Look for topics that the view does not have, and create those that are named.

    Returns errors by name. New topics get a moment to find their leaders.
    """
    absent = [name for name in names if name not in broker.view.topics]
    errors: Mapping[str, Code] = {}
    if absent or (ids and not _topics_by_id(broker).keys() >= set(ids)):
        errors = await _look_again(broker, absent, may_create=may_create)
    await _until_led(broker, [*absent, *filter(partial(_is_new, broker), names)])
    return errors


async def _look_again(
    broker: Broker, names: Sequence[str], *, may_create: bool
) -> Mapping[str, Code]:
    """Read the view again, and create topics that it does not have; return errors by name."""
    errors: dict[str, Code] = {}
    try:
        async with asyncio.timeout(FOUND_WITHIN_S):
            await broker.refresh()
            absent = [name for name in names if name not in broker.view.topics]
            if absent and may_create:
                for name in absent:
                    try:
                        await _create(broker, name, broker.default_partitions, {})
                    except KafkaError as error:  # another broker may have created it meanwhile
                        errors[name] = error.code
                await broker.refresh()
    except (BrokerClientError, TimeoutError) as error:
        _log.warning("%d topics were not found: %s", len(names), error or "timeout")
        return dict.fromkeys(names, Code.LEADER_NOT_AVAILABLE)
    return errors


def _topics_by_id(broker: Broker) -> Mapping[uuid.UUID | None, Topic]:
    return {_uuid_of(topic): topic for topic in broker.view.topics.values()}


def _uuid_of(topic: Topic) -> uuid.UUID:
    return uuid.UUID(bytes=base64.urlsafe_b64decode(topic.topic_id + "=="))


def _row_of_id(
    broker: Broker,
    topic_id: uuid.UUID | None,
    found: Mapping[uuid.UUID | None, Topic],
    version: int,
) -> Tree:
    """Return the row of a topic that is asked for by its id, which is named by `None` if absent."""
    topic = found.get(topic_id)
    if topic is not None:
        return _topic_row(broker, topic.name, {}, version)
    code = Code.INVALID_REQUEST if version < _BY_ID_FROM else Code.UNKNOWN_TOPIC_ID
    name = "" if version < _BY_ID_FROM else None
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": ()}


def _is_new(broker: Broker, name: str) -> bool:
    """Return whether a topic has a partition that nobody has led yet."""
    topic = broker.view.topics.get(name)
    places = ((topic.topic_id, partition) for partition in range(topic.partitions)) if topic else ()
    return any(place not in broker.view.leaders for place in places)


async def _until_led(broker: Broker, names: Sequence[str]) -> None:
    """Give new topics a moment to get their leaders: some clients take a topic without for bad."""

    def are_led() -> bool:
        topics = filter(None, map(broker.view.topics.get, names))
        return all(
            broker.is_available(topic, partition)
            for topic in topics
            for partition in range(topic.partitions)
        )

    await broker.until(are_led, LED_WITHIN_S)


def _brokers(broker: Broker, id_field: str) -> Sequence[Tree]:
    return [
        {id_field: node_id, "host": one.host, "port": one.port, "rack": None}
        for node_id, one in sorted(broker.view.brokers.items())
    ]


def _topic_row(broker: Broker, name: str, errors: Mapping[str, Code], version: int) -> Tree:
    topic = broker.view.topics.get(name)
    if topic is None:
        code = errors.get(name, Code.UNKNOWN_TOPIC_OR_PARTITION)
        return {"error_code": code, "name": name, "partitions": ()}
    rows = []
    for partition in range(topic.partitions):
        leader = broker.view.leader(topic, partition)
        node_id = -1 if leader is None else leader.node_id
        replicas = () if leader is None else (node_id,)
        rows.append(
            {
                "error_code": Code.LEADER_NOT_AVAILABLE if leader is None else Code.NONE,
                "partition_index": partition,
                "leader_id": node_id,
                "leader_epoch": -1 if leader is None else leader.epoch,
                "replica_nodes": replicas,
                "isr_nodes": replicas,
                "offline_replicas": (),
            }
        )
    return {
        "error_code": Code.NONE,
        "name": topic.name,
        "topic_id": _uuid_of(topic) if version >= _IDS_FROM else None,
        "is_internal": False,
        "partitions": rows,
        "topic_authorized_operations": _UNKNOWN_OPERATIONS,
    }


async def describe_cluster(broker: Broker, request: Request) -> Tree:
    """Return the brokers; of the controllers Kafka's clients are told nothing."""
    asked = getattr(request.body, "endpoint_type", _BROKERS)
    if asked != _BROKERS:
        return {
            "error_code": Code.MISMATCHED_ENDPOINT_TYPE,
            "error_message": f"endpoint type {asked} is not offered, wanted {_BROKERS}: brokers",
            "endpoint_type": _BROKERS,
        }
    return {
        "error_code": Code.NONE,
        "endpoint_type": _BROKERS,
        "cluster_id": broker.cluster_id,
        "controller_id": broker.view.controller,
        "brokers": _brokers(broker, "broker_id"),
        "cluster_authorized_operations": _UNKNOWN_OPERATIONS,
    }


async def create_topics(broker: Broker, request: Request) -> Tree:
    """Create topics; leaders are appointed by the broker that is the controller."""
    body = request.body

    async def create(item: Any) -> None:
        count = _partition_count(broker, item)
        configs = checked({config.name: config.value for config in item.configs})
        _check_new(broker, item.name)
        if not body.validate_only:
            await _create(broker, item.name, count, configs)

    outcomes = await change_all(broker, body, body.topics, create)
    await _until_led(broker, [item.name for item, error in outcomes if not error["error_code"]])
    return {"topics": [{"name": item.name, **error} for item, error in outcomes]}


def _partition_count(broker: Broker, item: Any) -> int:
    if item.assignments:
        return _assigned_count(item)
    if item.replication_factor == 0 or item.replication_factor < -1:
        message = "the replication factor is ignored, wanted -1 or at least 1"
        raise KafkaError(Code.INVALID_REPLICATION_FACTOR, message)
    count = broker.default_partitions if item.num_partitions == -1 else int(item.num_partitions)
    _check_count(count)
    return count


def _assigned_count(item: Any) -> int:
    """Return the number of assigned partitions; the brokers of the assignments are ignored."""
    places = sorted(assignment.partition_index for assignment in item.assignments)
    count = len(places)
    if places != list(range(count)) or not all(row.broker_ids for row in item.assignments):
        message = f"assignments are of partitions {places[:10]}, wanted 0.. and brokers for each"
        raise KafkaError(Code.INVALID_REPLICA_ASSIGNMENT, message)
    if item.num_partitions not in (-1, count):
        message = f"{item.num_partitions} partitions and {count} assignments, wanted one of both"
        raise KafkaError(Code.INVALID_REQUEST, message)
    _check_count(count)
    return count


def _check_count(count: int) -> None:
    if not 1 <= count <= PARTITIONS_MAX:
        message = f"{count} partitions, wanted 1..{PARTITIONS_MAX}"
        raise KafkaError(Code.INVALID_PARTITIONS, message)


def _check_new(broker: Broker, name: str) -> None:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        message = f"{name!r} is no name of a topic: 1..249 of a-z, A-Z, 0-9, '.', '_', '-'"
        raise KafkaError(Code.INVALID_TOPIC, message)
    if name in broker.view.topics:
        raise KafkaError(Code.TOPIC_ALREADY_EXISTS, f"there is a topic {name!r}")


async def _create(broker: Broker, name: str, count: int, configs: Mapping[str, str]) -> None:
    _check_new(broker, name)
    topic_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    topic = Topic(name, topic_id, count, configs)
    if not await broker.keys.put({topic_key(name): topic.document()}, expected=0):
        raise KafkaError(Code.TOPIC_ALREADY_EXISTS, f"there is a topic {name!r}")


async def delete_topics(broker: Broker, request: Request) -> Tree:
    """Delete topics by their keys; streams are closed by their leaders, and deleted then."""

    async def delete(name: str) -> None:
        topic = broker.topic(name)
        places = [(topic.topic_id, partition) for partition in range(topic.partitions)]
        note = {"partitions": topic.partitions, "at_ms": wall_clock_ms()}
        await broker.keys.put({deleted_key(topic.topic_id): note})
        await broker.keys.delete([topic_key(name), *(leader_key(*place) for place in places)])

    body = request.body
    outcomes = await change_all(broker, body, body.topic_names, delete)
    return {"responses": [{"name": name, **error} for name, error in outcomes]}


async def create_partitions(broker: Broker, request: Request) -> Tree:
    """Let topics grow."""
    body = request.body

    async def grow(item: Any) -> None:
        topic = broker.topic(item.name)
        _check_count(item.count)
        if item.count <= topic.partitions:
            message = f"the topic has {topic.partitions} partitions, wanted more than that"
            raise KafkaError(Code.INVALID_PARTITIONS, message)
        _check_new_assignments(item, topic.partitions)
        grown = Topic(topic.name, topic.topic_id, int(item.count), topic.configs)
        if body.validate_only:
            return
        await put_topic(broker, topic, grown)

    outcomes = await change_all(broker, body, body.topics, grow)
    return {"results": [{"name": item.name, **error} for item, error in outcomes]}


def _check_new_assignments(item: Any, present: int) -> None:
    """Refuse assignments unless there is one for each new partition; their brokers are ignored."""
    new = item.count - present
    if item.assignments is not None and len(item.assignments) != new:
        message = f"{len(item.assignments)} assignments, wanted {new}: one for each new partition"
        raise KafkaError(Code.INVALID_REPLICA_ASSIGNMENT, message)


async def init_producer_id(broker: Broker, request: Request) -> Tree:
    """Give out a producer id; those of transactions are refused."""
    if request.body.transactional_id is not None:
        return {
            "error_code": Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            "producer_id": -1,
            "producer_epoch": -1,
        }
    try:
        async with asyncio.timeout(PRODUCER_ID_WITHIN_S):
            producer_id = await broker.next_producer_id()
    except (BrokerClientError, TimeoutError):
        return {
            "error_code": Code.COORDINATOR_LOAD_IN_PROGRESS,
            "producer_id": -1,
            "producer_epoch": -1,
        }
    return {"error_code": Code.NONE, "producer_id": producer_id, "producer_epoch": 0}
