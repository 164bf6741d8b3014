"""Changes of topics, one item after the other, with an error for each item.

A request is answered within a time limit, also while no controller is available.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import Topic
from streammeta.brokers.kafka.cluster.keys import topic_key
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.client.errors import BrokerClientError

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
