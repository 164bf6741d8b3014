"""Watch of the cluster: signals that the view may have changed.

The view itself is read from the leader elsewhere. A failed watch is set up again. Until then the
view is refreshed periodically.
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


async def watch_cluster(
    controllers: ControllerClient, keys: Keys, on_change: Callable[[], None]
) -> None:
    """Call `on_change` after each change of a node or of a key in the view."""
    while True:
        try:
            described = await controllers.describe_cluster()
            await _follow(controllers, keys, described.high_watermark or 0, on_change)
        except BrokerClientError as error:
            _log.warning("watching the cluster failed, retrying: %s", error)
        except Exception:  # noqa: BLE001 - the view must be renewed all the same
            _log.exception("watching the cluster failed unexpectedly, retrying")
        await asyncio.sleep(_PAUSE_S)


async def _follow(
    controllers: ControllerClient, keys: Keys, offset: int, on_change: Callable[[], None]
) -> None:
    watch = MetadataWatch(
        controllers,
        from_offset=offset,
        kinds=[metadata_pb2.ENTITY_KIND_NODE, metadata_pb2.ENTITY_KIND_KV],
        kv_prefixes=[(keys.namespace, prefix) for prefix in VIEW_PREFIXES],
        combine=True,
    )
    on_change()  # of what has changed before the watch
    async with contextlib.aclosing(watch.follow()) as changes:
        async for change in changes:
            if change is not None:
                on_change()
