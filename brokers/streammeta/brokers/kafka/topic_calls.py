"""Calls about the cluster and its topics: Metadata, topics and their settings, producer ids.

Every call is answered in a bounded time, with the error of each item, also while no controller is
there.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from streammeta.brokers.kafka.broker import Broker
from streammeta.brokers.kafka.cluster import Topic
from streammeta.brokers.kafka.codes import Code, KafkaError
from streammeta.brokers.kafka.keys import deleted_key, leader_key, topic_key
from streammeta.brokers.kafka.topic_configs import DEFAULTS, checked
from streammeta.brokers.kafka.wire import Request, Tree
from streammeta.brokers.partition.log_clock import wall_clock_ms
from streammeta.client import BrokerClientError

PARTITIONS_MAX = 10_000
FOUND_WITHIN_S = 5.0
"""Time in which Metadata finds or creates topics that the view does not have."""
LED_WITHIN_S = 1.0
"""Time that new topics have to get their leaders before the call that names them is answered."""
CHANGED_WITHIN_S = (1.0, 60.0)
"""Bounds of the time for changes of topics that a request asks for."""
PRODUCER_ID_WITHIN_S = 5.0
"""Time in which a producer id is reserved."""
_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_TOPIC, _BROKER = 2, 4
_BROKERS = 1
"""Endpoint type of brokers, as DescribeCluster has it."""
_UNKNOWN_OPERATIONS = -(2**31)
_DEFAULT_SOURCE, _TOPIC_SOURCE = 5, 1


async def metadata(broker: Broker, request: Request) -> Tree:
    """Return brokers, and the leaders of topics; topics that are wanted and absent are created.

    While no controller answers, the answer is from the last view.
    """
    body = request.body
    named = body.topics
    is_all = named is None or (request.version == 0 and not named)
    names = sorted(broker.view.topics) if is_all else [topic.name for topic in named]
    may_create = getattr(body, "allow_auto_topic_creation", True) and broker.creates_topics
    errors: Mapping[str, Code] = {}
    if not is_all:
        absent = [name for name in names if name not in broker.view.topics]
        errors = await _find_or_create(broker, absent, may_create=may_create)
        await _until_led(broker, [*absent, *filter(partial(_is_new, broker), names)])
    return {
        "brokers": _brokers(broker, "node_id"),
        "cluster_id": broker.cluster_id,
        "controller_id": broker.view.controller,
        "topics": [_topic_row(broker, name, errors) for name in names],
        "cluster_authorized_operations": _UNKNOWN_OPERATIONS,
    }


async def _find_or_create(
    broker: Broker, names: Sequence[str], *, may_create: bool
) -> Mapping[str, Code]:
    """Look for topics that the view does not have, and create them; return errors by name."""
    if not names:
        return {}
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


def _topic_row(broker: Broker, name: str, errors: Mapping[str, Code]) -> Tree:
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

    outcomes = await _change_all(broker, body, body.topics, create)
    await _until_led(broker, [item.name for item, error in outcomes if not error["error_code"]])
    return {"topics": [{"name": item.name, **error} for item, error in outcomes]}


async def _change_all(
    broker: Broker, body: Any, items: Iterable[Any], change: Callable[[Any], Awaitable[None]]
) -> list[tuple[Any, dict[str, Any]]]:
    """Change one item after the other, between two readings of the view.

    Returns the items, each with the fields of its error. The request's timeout bounds all of it.
    """
    least, most = CHANGED_WITHIN_S
    within_s = min(max(body.timeout.total_seconds(), least), most)
    deadline = asyncio.get_running_loop().time() + within_s
    outcomes = []
    unread = await _failure_of(broker.refresh(), deadline)
    for item in items:
        failure = unread or await _failure_of(change(item), deadline)
        outcomes.append((item, failure or {"error_code": Code.NONE, "error_message": None}))
    await _failure_of(broker.refresh(), deadline)
    return outcomes


async def _failure_of(step: Awaitable[None], deadline: float) -> dict[str, Any] | None:
    """Take a step of a change; return the fields of its error, None if there was none."""
    try:
        async with asyncio.timeout_at(deadline):
            await step
    except KafkaError as error:
        return {"error_code": error.code, "error_message": str(error)}
    except (BrokerClientError, TimeoutError) as error:
        message = f"no controller has answered in time, ask again: {error or 'timeout'}"
        return {"error_code": Code.REQUEST_TIMED_OUT, "error_message": message}
    return None


def _partition_count(broker: Broker, item: Any) -> int:
    if item.assignments:
        raise KafkaError(
            Code.INVALID_REQUEST, "assignments are made by the brokers; leave them out"
        )
    if item.replication_factor == 0 or item.replication_factor < -1:
        message = "the replication factor is ignored, wanted -1 or at least 1"
        raise KafkaError(Code.INVALID_REPLICATION_FACTOR, message)
    count = broker.default_partitions if item.num_partitions == -1 else int(item.num_partitions)
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
    outcomes = await _change_all(broker, body, body.topic_names, delete)
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
        grown = Topic(topic.name, topic.topic_id, int(item.count), topic.configs)
        if body.validate_only:
            return
        key = topic_key(topic.name)
        if not await broker.keys.put({key: grown.document()}, expected=topic.version):
            raise KafkaError(Code.REQUEST_TIMED_OUT, "the topic has changed; ask again")

    outcomes = await _change_all(broker, body, body.topics, grow)
    return {"results": [{"name": item.name, **error} for item, error in outcomes]}


async def describe_configs(broker: Broker, request: Request) -> Tree:
    """Return the settings of topics; brokers have none of Kafka's."""
    rows = []
    for item in request.body.resources:
        row: dict[str, Any] = {
            "resource_type": item.resource_type,
            "resource_name": item.resource_name,
            "error_code": Code.NONE,
            "error_message": None,
            "configs": (),
        }
        try:
            if item.resource_type == _TOPIC:
                topic = broker.topic(item.resource_name)
                row["configs"] = _config_rows(topic, item.configuration_keys)
            elif item.resource_type != _BROKER:
                message = f"resource type {item.resource_type} is not known, wanted 2 or 4"
                raise KafkaError(Code.INVALID_REQUEST, message)
        except KafkaError as error:
            row |= {"error_code": error.code, "error_message": str(error)}
        rows.append(row)
    return {"results": rows}


def _config_rows(topic: Topic, names: Sequence[str] | None) -> Sequence[Tree]:
    return [
        {
            "name": name,
            "value": topic.configs.get(name, default),
            "read_only": False,
            "config_source": _TOPIC_SOURCE if name in topic.configs else _DEFAULT_SOURCE,
            "is_sensitive": False,
            "synonyms": (),
            "documentation": None,
        }
        for name, default in DEFAULTS.items()
        if names is None or name in names
    ]


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
