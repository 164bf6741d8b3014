"""The parts that both compactors share: bucket check, store requests, listing, repeated cycles."""

from __future__ import annotations

import asyncio
import logging
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

BARRED = (NodeFencedError, NodeNotRegisteredError)
"""Errors that bar the node: a newer process has registered, or none."""

_log = logging.getLogger(__name__)


class Compactor:
    """Base of the compactors: one cluster, its bucket, and the process in whose name it works.

    Ids of outputs are prepared in the name of `writer`. `is_busy` tells whether others want the
    store now, see `StoreCalls`; its traffic is the last grade of the client's `network`.
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
        """Release the threads; nothing may be under way."""
        self._calls.close()

    def _key_of(self, object_id: int) -> str:
        return key_for(object_id, self._namespace)


async def repeat(interval_s: float, cycle: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    """Run `cycle`, with the loop's time, every `interval_s` seconds until cancelled.

    Raises what bars the node; a cycle that fails otherwise is tried again at its next time.
    """
    loop = asyncio.get_running_loop()
    while True:
        begun = loop.time()
        try:
            await cycle(begun)
        except (*BARRED, WrongBucketError):
            raise
        except (BrokerClientError, StorageError) as error:
            _log.warning("compaction failed and is tried again: %s", error)
        await asyncio.sleep(max(0.0, begun + interval_s - loop.time()))
