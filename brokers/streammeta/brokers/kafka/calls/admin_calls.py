"""Handlers of APIs for log directories and ACLs, which have no counterpart here."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.protocol.codes import Code
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
