"""News of the cluster: a watch that says when the view may have changed, and nothing more.

What has changed is read from the leader by others. A watch that fails is set up anew; until then
the view is renewed by time alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from streammeta.brokers.kafka.cluster.keys import VIEW_PREFIXES, Keys
from streammeta.client import BrokerClientError, ControllerClient
from streammeta.client.controllers.metadata_watch import MetadataWatch
from streammeta.v1 import metadata_pb2

_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


async def follow_news(controllers: ControllerClient, keys: Keys, tell: Callable[[], None]) -> None:
    """Call `tell` at each change of a node, or of a key that the view is made of."""
    while True:
        try:
            described = await controllers.describe_cluster()
            await _follow(controllers, keys, described.high_watermark or 0, tell)
        except BrokerClientError as error:
            _log.warning("no news of the cluster: %s", error)
        except Exception:  # noqa: BLE001 - the view must be renewed all the same
            _log.exception("the watch of the cluster failed unexpectedly, it is set up again")
        await asyncio.sleep(_PAUSE_S)


async def _follow(
    controllers: ControllerClient, keys: Keys, offset: int, tell: Callable[[], None]
) -> None:
    watch = MetadataWatch(
        controllers,
        from_offset=offset,
        kinds=[metadata_pb2.ENTITY_KIND_NODE, metadata_pb2.ENTITY_KIND_KV],
        kv_prefixes=[(keys.namespace, prefix) for prefix in VIEW_PREFIXES],
        combine=True,
    )
    tell()  # of what has changed before the watch
    async with contextlib.aclosing(watch.follow()) as changes:
        async for change in changes:
            if change is not None:
                tell()
