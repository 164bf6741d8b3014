"""Watch of the cluster: signals that the view may have changed.

The view itself is read from the leader elsewhere. A failed watch is set up again. Until then the
view is refreshed periodically.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from streammeta.brokers.kafka.cluster.keys import VIEW_PREFIXES, Keys
from streammeta.client import NodeIdentity, StreamClient, errors
from streammeta.client.parts import BrokerSession

_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


async def watch_cluster(client: StreamClient, keys: Keys, on_change: Callable[[], None]) -> None:
    """Call `on_change` after each change of a node or of a key in the view."""
    prefixes = [(keys.namespace, prefix) for prefix in VIEW_PREFIXES]
    while True:
        try:
            async with client.watch(["node", "key"], key_prefixes=prefixes) as changes:
                on_change()  # covers changes before the watch
                async for _ in changes:
                    on_change()
        except errors.BrokerClientError as error:
            _log.warning("watching the cluster failed, retrying: %s", error)
        except Exception:  # noqa: BLE001 - the view must be renewed all the same
            _log.exception("watching the cluster failed unexpectedly, retrying")
        await asyncio.sleep(_PAUSE_S)


# Recovery of brokers named by the controllers: their streams are closed so that others open them.
#
# Brokers of this shape acknowledge only committed records, so a dead one leaves nothing to
# upload.


async def close_streams_of(session: BrokerSession, recoveries: Iterable[NodeIdentity]) -> int:
    """Fence the nodes of `recoveries`, close their open streams, and return the number of streams.

    A node that was reassigned to another broker is skipped.
    """
    closed = 0
    for node in recoveries:
        try:
            streams = await session.list_streams_of(node)
        except (
            errors.NodeFencedError,
            errors.NodeNotRegisteredError,
            errors.StreamEpochMismatchError,
        ):
            continue
        epochs = {stream.stream_id: stream.epoch for stream in streams}
        closed += len((await session.close_streams(epochs, of=node)).done)

    return closed
