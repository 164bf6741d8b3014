"""Calls about the cluster and its topics: Metadata, topics and their settings, producer ids."""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from streammeta.brokers.kafka.broker import Broker
from streammeta.brokers.kafka.cluster import Topic
from streammeta.brokers.kafka.codes import Code, KafkaError
from streammeta.brokers.kafka.keys import deleted_key, leader_key, topic_key
from streammeta.brokers.kafka.topic_configs import DEFAULTS, checked
from streammeta.brokers.kafka.wire import Request, Tree
from streammeta.brokers.partition.log_clock import wall_clock_ms

PARTITIONS_MAX = 10_000
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_TOPIC, _BROKER = 2, 4
_BROKERS = 1
"""Endpoint type of brokers, as DescribeCluster has it."""
_UNKNOWN_OPERATIONS = -(2**31)
_DEFAULT_SOURCE, _TOPIC_SOURCE = 5, 1


async def metadata(broker: Broker, request: Request) -> Tree:
    """Return brokers, and the leaders of topics; topics that are wanted and absent are created."""
    body = request.body
    named = body.topics
    is_all = named is None or (request.version == 0 and not named)
    names = sorted(broker.view.topics) if is_all else [one.name for one in named]
    may_create = getattr(body, "allow_auto_topic_creation", True)
    rows = []
    for name in names:
        try:
            if name not in broker.view.topics:
                await _find_or_create(broker, name, may_create=may_create)
            rows.append(_topic_row(broker, broker.topic(name)))
        except KafkaError as error:
            rows.append({"error_code": error.code, "name": name, "partitions": ()})
    return {
        "brokers": _brokers(broker, "node_id"),
        "cluster_id": broker.cluster_id,
        "controller_id": broker.view.controller,
        "topics": rows,
        "cluster_authorized_operations": _UNKNOWN_OPERATIONS,
    }


async def _find_or_create(broker: Broker, name: str, *, may_create: bool) -> None:
    await broker.refresh()
    if name not in broker.view.topics and may_create and broker.creates_topics:
        await _create(broker, name, broker.default_partitions, {})
        await broker.refresh()


def _brokers(broker: Broker, id_field: str) -> Sequence[Tree]:
    return [
        {id_field: node_id, "host": one.host, "port": one.port, "rack": None}
        for node_id, one in sorted(broker.view.brokers.items())
    ]


def _topic_row(broker: Broker, topic: Topic) -> Tree:
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
    rows = []
    await broker.refresh()
    for item in request.body.topics:
        row: dict[str, Any] = {"name": item.name, "error_code": Code.NONE, "error_message": None}
        try:
            count = _partition_count(broker, item)
            configs = checked({one.name: one.value for one in item.configs})
            _check_new(broker, item.name)
            if not request.body.validate_only:
                await _create(broker, item.name, count, configs)
        except KafkaError as error:
            row |= {"error_code": error.code, "error_message": str(error)}
        rows.append(row)
    await broker.refresh()
    return {"topics": rows}


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
    rows = []
    await broker.refresh()
    for name in request.body.topic_names:
        row = {"name": name, "error_code": Code.NONE}
        try:
            topic = broker.topic(name)
            places = [(topic.topic_id, partition) for partition in range(topic.partitions)]
            note = {"partitions": topic.partitions, "at_ms": wall_clock_ms()}
            await broker.keys.put({deleted_key(topic.topic_id): note})
            await broker.keys.delete([topic_key(name), *(leader_key(*one) for one in places)])
        except KafkaError as error:
            row["error_code"] = error.code
        rows.append(row)
    await broker.refresh()
    return {"responses": rows}


async def create_partitions(broker: Broker, request: Request) -> Tree:
    """Let topics grow."""
    rows = []
    await broker.refresh()
    for item in request.body.topics:
        row: dict[str, Any] = {"name": item.name, "error_code": Code.NONE}
        try:
            topic = broker.topic(item.name)
            _check_count(item.count)
            if item.count <= topic.partitions:
                message = f"the topic has {topic.partitions} partitions, wanted more than that"
                raise KafkaError(Code.INVALID_PARTITIONS, message)
            grown = Topic(topic.name, topic.topic_id, int(item.count), topic.configs)
            if not request.body.validate_only:
                key = topic_key(topic.name)
                if not await broker.keys.put({key: grown.document()}, expected=topic.version):
                    raise KafkaError(Code.REQUEST_TIMED_OUT, "the topic has changed; ask again")
        except KafkaError as error:
            row |= {"error_code": error.code, "error_message": str(error)}
        rows.append(row)
    await broker.refresh()
    return {"results": rows}


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
    producer_id = await broker.next_producer_id()
    return {"error_code": Code.NONE, "producer_id": producer_id, "producer_epoch": 0}
