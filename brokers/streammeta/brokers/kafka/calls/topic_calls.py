"""Handlers of cluster and topic APIs: Metadata, creation, growth and deletion, producer ids.

Every call is answered within a time limit, with an error for each item, also while no controller is
available.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import Topic
from streammeta.brokers.kafka.cluster.keys import deleted_key, leader_key, topic_key
from streammeta.brokers.kafka.cluster.topic_configs import DISKLESS, checked, is_diskless
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.brokers.kafka.protocol.wire import Request, Tree
from streammeta.brokers.partition.log_clock import wall_clock_ms
from streammeta.client.errors import BrokerClientError

# Changes of topics, one item after the other, with an error for each item.
#
# A request is answered within a time limit, also while no controller is available.

CHANGED_WITHIN_S = (1.0, 60.0)
"""Bounds on the time for all changes of a request."""
_UNLESS_ASKED_S = 30.0

Outcome = dict[str, Any]
"""The error fields of an item."""


async def change_all(
    broker: Broker, body: Any, items: Iterable[Any], change: Callable[[Any], Awaitable[None]]
) -> list[tuple[Any, Outcome]]:
    """Change one item after the other, between two reads of the view.

    Return the items with their outcomes. The timeout of the request, if it has one, bounds the
    whole call.
    """
    least, most = CHANGED_WITHIN_S
    asked = getattr(body, "timeout", None)
    within_s = _UNLESS_ASKED_S if asked is None else asked.total_seconds()
    deadline = asyncio.get_running_loop().time() + min(max(within_s, least), most)
    outcomes = []
    unread = await _failure_of(broker.refresh(), deadline)
    for item in items:
        failure = unread or await _failure_of(change(item), deadline)
        outcomes.append((item, failure or {"error_code": Code.NONE, "error_message": None}))
    await _failure_of(broker.refresh(), deadline)
    return outcomes


async def put_topic(broker: Broker, topic: Topic, changed: Topic) -> None:
    """Replace a topic of the view with its changed version.

    Raises `KafkaError` if another broker has changed it meanwhile.
    """
    key = topic_key(topic.name)
    if not await broker.keys.put({key: changed.document()}, expected=topic.version):
        raise KafkaError(Code.REQUEST_TIMED_OUT, "the topic has changed. Retry")


async def _failure_of(step: Awaitable[None], deadline: float) -> Outcome | None:
    """Run one step of a change, and return the fields of its error, None for success."""
    try:
        async with asyncio.timeout_at(deadline):
            await step
    except KafkaError as error:
        return {"error_code": error.code, "error_message": str(error)}
    except (BrokerClientError, TimeoutError) as error:
        message = f"no controller answered in time, retry: {error or 'timeout'}"
        return {"error_code": Code.REQUEST_TIMED_OUT, "error_message": message}
    return None


PARTITIONS_MAX = 10_000
LOOKUP_TIMEOUT_S = 5.0
"""Time limit for Metadata to find or create unknown topics, in seconds."""
LEADER_WAIT_S = 1.0
"""Time limit for new topics to get leaders before the call that names them is answered, in s."""
PRODUCER_ID_TIMEOUT_S = 5.0
"""Time limit for reserving a producer id, in seconds."""
_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_BROKERS = 1
"""Endpoint type of brokers in DescribeCluster."""
_IDS_FROM, _BY_ID_FROM = 10, 12
"""First versions of Metadata with topic ids, and with lookups by id alone."""
_UNKNOWN_OPERATIONS = -(2**31)


async def metadata(broker: Broker, request: Request) -> Tree:
    """Return brokers, and the leaders of topics. Missing topics are created if that is allowed.

    While no controller answers, the answer comes from the last view. As in Apache Kafka, a topic
    has one row however often it is named. Otherwise its partitions would multiply.
    """
    body = request.body
    # Version 0 has no null list, and an empty one asks for all topics.
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
    """Look up unknown topics, and create the named ones.

    Return errors by name. New topics get a moment to find their leaders.
    """
    absent = [name for name in names if name not in broker.view.topics]
    errors: Mapping[str, Code] = {}
    if absent or (ids and not _topics_by_id(broker).keys() >= set(ids)):
        errors = await _refresh_and_create(broker, absent, may_create=may_create)
    await _wait_for_leaders(broker, [*absent, *filter(partial(_is_new, broker), names)])
    return errors


async def _refresh_and_create(
    broker: Broker, names: Sequence[str], *, may_create: bool
) -> Mapping[str, Code]:
    """Refresh the view, create the topics missing in it, and return errors by name."""
    errors: dict[str, Code] = {}
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            # The topic may have been created through another broker a moment ago.
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
        _log.warning("looking up %d topics failed: %s", len(names), error or "timeout")
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
    """Return the row of a topic given by its id. The name of a missing one is None."""
    topic = found.get(topic_id)
    if topic is not None:
        return _topic_row(broker, topic.name, {}, version)
    code = Code.INVALID_REQUEST if version < _BY_ID_FROM else Code.UNKNOWN_TOPIC_ID
    name = "" if version < _BY_ID_FROM else None
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": ()}


def _is_new(broker: Broker, name: str) -> bool:
    """Return whether a topic has a partition that never had a leader, or has no stream yet."""
    topic = broker.view.topics.get(name)
    if topic is not None and topic.is_diskless:
        return topic.provided < topic.partitions
    places = ((topic.topic_id, partition) for partition in range(topic.partitions)) if topic else ()
    return any(place not in broker.view.leaders for place in places)


async def _wait_for_leaders(broker: Broker, names: Sequence[str]) -> None:
    """Wait briefly for leaders of new topics: some clients fail on a topic without one."""

    def are_led() -> bool:
        topics = filter(None, map(broker.view.topics.get, names))
        return all(
            broker.is_available(topic, partition)
            for topic in topics
            for partition in range(topic.partitions)
        )

    await broker.until(are_led, LEADER_WAIT_S)


def _brokers(broker: Broker, id_field: str) -> Sequence[Tree]:
    return [
        {id_field: node_id, "host": endpoint.host, "port": endpoint.port, "rack": endpoint.rack}
        for node_id, endpoint in sorted(broker.view.brokers.items())
    ]


def _topic_row(broker: Broker, name: str, errors: Mapping[str, Code], version: int) -> Tree:
    topic = broker.view.topics.get(name)
    if topic is None:
        code = errors.get(name, Code.UNKNOWN_TOPIC_OR_PARTITION)
        return {"error_code": code, "name": name, "partitions": ()}

    rows = []
    for partition, leader in enumerate(broker.leaders_of(topic)):
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
    """Return the brokers. Controllers are not shown to Kafka clients."""
    asked = getattr(request.body, "endpoint_type", _BROKERS)
    if asked != _BROKERS:
        return {
            "error_code": Code.MISMATCHED_ENDPOINT_TYPE,
            "error_message": f"endpoint type {asked} is not supported, expected {_BROKERS}"
            " (brokers)",
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
    """Create topics. Kafka's controller appoints their leaders."""
    body = request.body

    async def create(item: Any) -> None:
        count = _partition_count(broker, item)
        configs = checked({config.name: config.value for config in item.configs})
        _check_kind(broker, configs)
        _check_new(broker, item.name)
        if not body.validate_only:
            await _create(broker, item.name, count, configs)

    outcomes = await change_all(broker, body, body.topics, create)
    await _wait_for_leaders(
        broker, [item.name for item, error in outcomes if not error["error_code"]]
    )
    return {"topics": [{"name": item.name, **error} for item, error in outcomes]}


def _partition_count(broker: Broker, item: Any) -> int:
    if item.assignments:
        return _assigned_count(item)
    if item.replication_factor == 0 or item.replication_factor < -1:
        message = "the replication factor is ignored, expected -1 or at least 1"
        raise KafkaError(Code.INVALID_REPLICATION_FACTOR, message)
    count = broker.default_partitions if item.num_partitions == -1 else int(item.num_partitions)
    _check_count(count)
    return count


def _assigned_count(item: Any) -> int:
    """Return the number of assigned partitions. The assigned brokers are ignored."""
    places = sorted(assignment.partition_index for assignment in item.assignments)
    count = len(places)
    if places != list(range(count)) or not all(row.broker_ids for row in item.assignments):
        message = (
            f"assignments name partitions {places[:10]}, expected 0 and up, with brokers for each"
        )
        raise KafkaError(Code.INVALID_REPLICA_ASSIGNMENT, message)
    # The number may be given too if it agrees.
    if item.num_partitions not in (-1, count):
        message = f"{item.num_partitions} partitions and {count} assignments. Give only one of them"
        raise KafkaError(Code.INVALID_REQUEST, message)
    _check_count(count)
    return count


def _check_count(count: int) -> None:
    if not 1 <= count <= PARTITIONS_MAX:
        message = f"{count} partitions, expected 1 to {PARTITIONS_MAX}"
        raise KafkaError(Code.INVALID_PARTITIONS, message)


def _check_kind(broker: Broker, configs: Mapping[str, str]) -> None:
    if is_diskless(configs) and broker.diskless is None:
        message = f"{DISKLESS} needs brokers that are started with --shared, this one is not"
        raise KafkaError(Code.INVALID_CONFIG, message)


def _check_new(broker: Broker, name: str) -> None:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        message = f"{name!r} is not a topic name, expected 1 to 249 of a-z, A-Z, 0-9, '.', '_', '-'"
        raise KafkaError(Code.INVALID_TOPIC, message)
    if name in broker.view.topics:
        raise KafkaError(Code.TOPIC_ALREADY_EXISTS, f"topic {name!r} already exists")


async def _create(broker: Broker, name: str, count: int, configs: Mapping[str, str]) -> None:
    _check_new(broker, name)
    # The id distinguishes a topic from a deleted one of the same name.
    topic_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    topic = Topic(name, topic_id, count, configs)
    if not await broker.keys.put({topic_key(name): topic.document()}, expected=0):
        raise KafkaError(Code.TOPIC_ALREADY_EXISTS, f"topic {name!r} already exists")


async def delete_topics(broker: Broker, request: Request) -> Tree:
    """Delete topics by their keys. Their leaders close the streams, which are deleted later."""

    async def delete(name: str) -> None:
        topic = broker.topic(name)
        places = [(topic.topic_id, partition) for partition in range(topic.partitions)]
        note = {"partitions": topic.partitions, "at_ms": wall_clock_ms()}
        # The record precedes the deletion, so that a crash in between does not leak the streams.
        await broker.keys.put({deleted_key(topic.topic_id): note})
        await broker.keys.delete([topic_key(name), *(leader_key(*place) for place in places)])

    body = request.body
    outcomes = await change_all(broker, body, body.topic_names, delete)
    return {"responses": [{"name": name, **error} for name, error in outcomes]}


async def create_partitions(broker: Broker, request: Request) -> Tree:
    """Add partitions to topics."""
    body = request.body

    async def grow(item: Any) -> None:
        topic = broker.topic(item.name)
        _check_count(item.count)
        if item.count <= topic.partitions:
            message = f"the topic has {topic.partitions} partitions. Ask for more"
            raise KafkaError(Code.INVALID_PARTITIONS, message)
        _check_new_assignments(item, topic.partitions)
        grown = replace(topic, partitions=int(item.count))
        if body.validate_only:
            return
        await put_topic(broker, topic, grown)

    outcomes = await change_all(broker, body, body.topics, grow)
    return {"results": [{"name": item.name, **error} for item, error in outcomes]}


def _check_new_assignments(item: Any, present: int) -> None:
    """Reject assignments unless there is one for each new partition. Their brokers are ignored."""
    new = item.count - present
    if item.assignments is not None and len(item.assignments) != new:
        message = f"{len(item.assignments)} assignments, expected {new}, one for each new partition"
        raise KafkaError(Code.INVALID_REPLICA_ASSIGNMENT, message)


async def init_producer_id(broker: Broker, request: Request) -> Tree:
    """Assign a producer id. Transactional ids are rejected."""
    if request.body.transactional_id is not None:
        return {
            "error_code": Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            "producer_id": -1,
            "producer_epoch": -1,
        }

    try:
        async with asyncio.timeout(PRODUCER_ID_TIMEOUT_S):
            producer_id = await broker.next_producer_id()
    except (BrokerClientError, TimeoutError):
        return {
            "error_code": Code.COORDINATOR_LOAD_IN_PROGRESS,
            "producer_id": -1,
            "producer_epoch": -1,
        }

    return {"error_code": Code.NONE, "producer_id": producer_id, "producer_epoch": 0}
