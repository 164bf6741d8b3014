"""Steady load of small writes through the product's client, with a watch for the next answer."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from scripts.benchmarks.cluster import caller_of
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.client.errors import BrokerClientError
from streammeta.client.parts import ControllerClient
from streammeta.v1 import kv_pb2

WRITERS = 8
WRITES_A_SECOND = 200
VALUE_BYTES = 100


@dataclass(slots=True)
class _Awaited:
    old_leader: str
    since: float
    acknowledged: asyncio.Future[float]


class SteadyLoad:
    """Writers that put a value, wait for the answer, pause, and put the next value."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._awaited: _Awaited | None = None
        self._failure: BrokerClientError | None = None

    def next_acknowledged(self, old_leader: str, since: float) -> asyncio.Future[float]:
        """Return the future time of the first answer after `since` that is not from `old_leader`.

        `old_leader` is an endpoint, and times are from `time.monotonic`. Replaces an earlier watch.
        The future fails with a `BrokerClientError` if a writer fails or has failed.
        """
        acknowledged: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            acknowledged.set_exception(self._failure)
            return acknowledged
        self._awaited = _Awaited(old_leader, since, acknowledged)
        return acknowledged

    async def write_until_failure(self, writer: int) -> None:
        """Write as one of the writers."""
        item = kv_pb2.KVToPut(
            namespace="bench", key=f"writer-{writer}", value=bytes(VALUE_BYTES), overwrite=True
        )
        try:
            while True:
                await self._client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
                self._on_acknowledged(time.monotonic())
                await asyncio.sleep(WRITERS / WRITES_A_SECOND)
        except BrokerClientError as error:
            self._on_failed(error)

    def _on_acknowledged(self, now: float) -> None:
        # The client names the controller that answered last, and no other task ran in between.
        awaited = self._awaited
        if awaited is None or now <= awaited.since or self._client.leader == awaited.old_leader:
            return
        self._awaited = None
        if not awaited.acknowledged.done():
            awaited.acknowledged.set_result(now)

    def _on_failed(self, error: BrokerClientError) -> None:
        self._failure = error
        if self._awaited is not None and not self._awaited.acknowledged.done():
            self._awaited.acknowledged.set_exception(error)


@contextlib.asynccontextmanager
async def steady_load(cluster: LocalCluster) -> AsyncIterator[SteadyLoad]:
    """Run the load on a cluster until the block ends."""
    async with ControllerClient(cluster.endpoints, tls=caller_of(cluster)) as client:
        load = SteadyLoad(client)
        writers = [asyncio.create_task(load.write_until_failure(n)) for n in range(WRITERS)]
        try:
            yield load
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
