"""The parts that both compactors share: bucket check, store requests, listing, repeated cycles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.listing import Listing
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import BrokerClientError, NodeFencedError, NodeNotRegisteredError
from streammeta.client.model import NodeIdentity
from streammeta.storage.errors import StorageError, WrongBucketError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import ObjectStore

FENCED = (NodeFencedError, NodeNotRegisteredError)
"""Errors that fence the node: a newer process has registered, or none has."""

_log = logging.getLogger(__name__)


def wall_ms() -> int:
    """Return the time in ms since 1970."""
    return time.time_ns() // 1_000_000


class Compactor:
    """Base of the compactors: one cluster, its bucket, and the process that writes the outputs.

    Ids of outputs are prepared in the name of `writer`. `is_busy` returns whether others use the
    store, see `StoreCalls`. Its traffic has the lowest grade of the client's `network`.
    """

    def __init__(
        self,
        client: ControllerClient,
        writer: NodeIdentity,
        namespace: str,
        store: ObjectStore,
        config: CompactionConfig | None = None,
        *,
        is_busy: Callable[[], bool] | None = None,
    ) -> None:
        self._client = client
        self._writer = writer
        self._namespace = namespace
        self._config = config or CompactionConfig()
        self._bucket = BucketCheck(client, store, namespace)
        self._calls = StoreCalls(store, self._config, is_busy, network=client.network)
        self._listing = Listing(client)

    def close(self) -> None:
        """Release the threads. No compaction may be running."""
        self._calls.close()

    def _key_of(self, object_id: int) -> str:
        return key_for(object_id, self._namespace)


async def repeat(interval_s: float, cycle: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    """Run `cycle`, with the loop's time, every `interval_s` seconds until cancelled.

    Raises errors that fence the node. After another failure the next cycle is the retry.
    """
    loop = asyncio.get_running_loop()
    while True:
        begun = loop.time()
        try:
            await cycle(begun)
        except (*FENCED, WrongBucketError):
            raise
        except (BrokerClientError, StorageError) as error:
            _log.warning("compaction failed, the next cycle retries it: %s", error)
        await asyncio.sleep(max(0.0, begun + interval_s - loop.time()))
