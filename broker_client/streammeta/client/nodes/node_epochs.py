"""Epoch of a new process of a node: its start time, or above a registered epoch in the future.

Epochs must grow with each start, and start times in ms do so while clocks are correct. A process
with a fast clock would lock its node out until that time, so a new process then takes an epoch just
above the registered one.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import GET_NODES
from streammeta.client.errors import NodeEpochExpiredError
from streammeta.client.nodes.session import BrokerSession, Tags
from streammeta.v1 import nodes_pb2

_STEP_MAX = 60_000
"""Range of the random step above the registered epoch, for two processes that start at once."""

_log = logging.getLogger(__name__)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


async def register(
    client: ControllerClient,
    node_id: int,
    node_epoch: int | None,
    *,
    wal_config: str,
    tags: Tags | None,
    timeout_s: float,
    now_ms: Callable[[], int] = _wall_ms,
) -> BrokerSession:
    """Register a process of a node. For None the epoch is above all earlier ones.

    Raises `NodeEpochExpiredError` when a newer process has registered.
    """

    async def open_session(epoch: int) -> BrokerSession:
        return await BrokerSession.open(
            client, node_id, epoch, wal_config=wal_config, tags=tags, timeout_s=timeout_s
        )

    if node_epoch is not None:
        return await open_session(node_epoch)
    try:
        # The usual case needs no lookup of the registered epoch.
        return await open_session(now_ms())
    except NodeEpochExpiredError:
        registered = await _get_registered_epoch(client, node_id)
        ahead_ms = registered - now_ms()
        if ahead_ms <= 0:
            # Another process started after this one: it is the newer one.
            raise

    # Two machines that start the node at once must not both get `registered + 1`.
    epoch = registered + 1 + secrets.randbelow(_STEP_MAX)
    _log.warning(
        "node %d is registered with epoch %d, %d ms ahead of this machine's clock, registering"
        " with epoch %d. Check the clocks of the node's machines",
        node_id,
        registered,
        ahead_ms,
        epoch,
    )
    return await open_session(epoch)


async def _get_registered_epoch(client: ControllerClient, node_id: int) -> int:
    request = nodes_pb2.GetNodesRequest(node_ids=[node_id])
    nodes = (await client.call(GET_NODES, request)).nodes
    return max((node.node_epoch for node in nodes), default=-1)
