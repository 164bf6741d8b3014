"""Handlers of APIs for log directories and ACLs, which have no counterpart here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streammeta.brokers.kafka.calls.topic_calls import change_all, put_topic
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import Topic
from streammeta.brokers.kafka.cluster.topic_configs import DEFAULTS, LISTS, checked_change, type_of
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.brokers.kafka.protocol.wire import Request, Tree

LOG_DIR = "bucket"
"""Name of the only log directory."""


async def describe_log_dirs(broker: Broker, request: Request) -> Tree:
    """Return the size of the partitions led by this broker. All their bytes are in the bucket."""
    asked = request.body.topics
    wanted = None if asked is None else {item.topic: set(item.partitions) for item in asked}
    rows: defaultdict[str, list[Tree]] = defaultdict(list)
    for topic, partition in broker.view.partitions():
        log = broker.logs.get((topic.topic_id, partition))
        if log is None or (wanted is not None and partition not in wanted.get(topic.name, ())):
            continue
        row: Tree = {
            "partition_index": partition,
            "partition_size": sum(segment.size for segment in log.segments),
            "offset_lag": 0,
            "is_future_key": False,
        }
        rows[topic.name].append(row)

    topics: Any = [{"name": name, "partitions": found} for name, found in rows.items()]
    result = {"error_code": Code.NONE, "log_dir": LOG_DIR, "topics": topics}

    return {"error_code": Code.NONE, "results": [result]}


async def describe_acls(_: Broker, __: Request) -> Tree:
    """Return no ACLs: every client may do everything."""
    return {"error_code": Code.NONE, "error_message": None, "resources": ()}


# Handlers of topic settings: DescribeConfigs, AlterConfigs, IncrementalAlterConfigs.
#
# Brokers have none of Kafka's settings: they are described without any, and can't be altered.

_TOPIC, _BROKER = 2, 4
_DEFAULT_SOURCE, _TOPIC_SOURCE = 5, 1
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)


async def describe_configs(broker: Broker, request: Request) -> Tree:
    """Return the settings of topics. A topic that is named twice is described once."""
    resources = {(item.resource_type, item.resource_name): item for item in request.body.resources}
    rows = []
    for item in resources.values():
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
                message = f"resource type {item.resource_type} is unknown, expected 2 or 4"
                raise KafkaError(Code.INVALID_REQUEST, message)
        except KafkaError as error:
            row |= {"error_code": error.code, "error_message": str(error)}
        rows.append(row)

    return {"results": rows}


def _config_rows(topic: Topic, names: Sequence[str] | None) -> Sequence[Tree]:
    return [
        {
            "name": name,
            "value": value,
            "read_only": False,
            "config_source": _TOPIC_SOURCE if name in topic.configs else _DEFAULT_SOURCE,
            "is_sensitive": False,
            "synonyms": (),
            "config_type": type_of(name),
            "documentation": None,
        }
        for name, value in {**DEFAULTS, **topic.configs}.items()
        if names is None or name in names
    ]


async def alter_configs(broker: Broker, request: Request) -> Tree:
    """Replace all settings of topics. Unnamed settings get their defaults."""

    def replaced(topic: Topic, configs: Sequence[Any]) -> Mapping[str, str]:
        return checked_change(topic.configs, {row.name: _value(row) for row in configs})

    return await _alter(broker, request, replaced)


async def incremental_alter_configs(broker: Broker, request: Request) -> Tree:
    """Set, delete, append to and subtract from single settings of topics."""

    def changed(topic: Topic, configs: Sequence[Any]) -> Mapping[str, str]:
        values = dict(topic.configs)
        for config in configs:
            _apply(values, config)
        return checked_change(topic.configs, values)

    return await _alter(broker, request, changed)


async def _alter(broker: Broker, request: Request, settings: Any) -> Tree:
    """Put the settings that the callback `settings` derives from a topic and a request."""
    body = request.body
    times = Counter((item.resource_type, item.resource_name) for item in body.resources)

    async def alter(item: Any) -> None:
        # The order of two changes of one resource is not defined.
        if times[item.resource_type, item.resource_name] > 1:
            raise KafkaError(Code.INVALID_REQUEST, "the resource is named twice. Name it once")
        if item.resource_type != _TOPIC:
            message = f"settings of resource type {item.resource_type} can't be altered, expected 2"
            raise KafkaError(Code.INVALID_REQUEST, f"{message}: topics")
        _require_once(config.name for config in item.configs)
        topic = broker.topic(item.resource_name)
        # Validation happens before `validate_only` is honoured, as the flag asks for nothing else.
        altered = replace(topic, configs=settings(topic, item.configs))
        if not body.validate_only and altered != topic:
            await put_topic(broker, topic, altered)

    outcomes = await change_all(broker, body, body.resources, alter)
    return {
        "responses": [
            {
                "resource_type": item.resource_type,
                "resource_name": item.resource_name,
                **outcome,
            }
            for item, outcome in outcomes
        ]
    }


def _require_once(names: Iterable[str]) -> None:
    """Raise `KafkaError` for a setting that occurs more than once."""
    for name, count in Counter(names).items():
        if count > 1:
            raise KafkaError(
                Code.INVALID_REQUEST, f"{name[:100]} is set {count} times. Set it once"
            )


def _value(config: Any) -> str:
    """Return the value of a setting. Raises `KafkaError` if it is missing."""
    if config.value is None:
        raise KafkaError(Code.INVALID_REQUEST, f"{config.name[:100]} needs a value")
    return str(config.value)


def _apply(values: dict[str, str], config: Any) -> None:
    """Change one setting among the values of a topic."""
    name, operation = config.name, config.config_operation
    if operation == _SET:
        values[name] = _value(config)
    elif operation == _DELETE:
        values.pop(name, None)
    elif operation in (_APPEND, _SUBTRACT):
        # Appending to a scalar would silently produce an invalid value.
        if name not in LISTS:
            raise KafkaError(
                Code.INVALID_CONFIG,
                f"{name[:100]} is not a list, expected one of {', '.join(LISTS)}",
            )
        values[name] = _change_list(
            values.get(name, DEFAULTS.get(name, "")), _value(config), is_added=operation == _APPEND
        )
    else:
        raise KafkaError(Code.INVALID_REQUEST, f"operation {operation} is unknown, expected 0 to 3")


def _change_list(before: str, change: str, *, is_added: bool) -> str:
    """Return a list, as text, with the items of a change added or removed."""
    present, named = (list(filter(None, text.split(","))) for text in (before, change))
    if is_added:
        return ",".join([*present, *(item for item in named if item not in present)])
    return ",".join(item for item in present if item not in named)
