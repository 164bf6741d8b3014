"""A steady load of small writes through the product's client, and the watch for the next answer."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streammeta.client import BrokerClientError, ControllerClient
from streammeta.client.methods import PUT_KVS
from streammeta.v1 import kv_pb2

if TYPE_CHECKING:  # earlier commits, as baselines, have no such module
    from streammeta.rpc.tls import TlsFiles

WRITERS = 8
WRITES_A_SECOND = 200
VALUE_BYTES = 100


@dataclass(slots=True)
class _Awaited:
    old_leader: str
    since: float
    acknowledged: asyncio.Future[float]


class SteadyLoad:
    """Writers that each put a value, wait for the answer, pause, and put the next."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._awaited: _Awaited | None = None
        self._failure: BrokerClientError | None = None

    def next_acknowledged(self, old_leader: str, since: float) -> asyncio.Future[float]:
        """Return the future time of the first answer after `since` not given by `old_leader`.

        `old_leader` is an endpoint, times are those of `time.monotonic`. Replaces what was awaited
        before. The future fails with a `BrokerClientError` if a writer does, or has.
        """
        acknowledged: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            acknowledged.set_exception(self._failure)
            return acknowledged
        self._awaited = _Awaited(old_leader, since, acknowledged)
        return acknowledged

    async def write_until_failure(self, writer: int) -> None:
        """Be one of the writers."""
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
        # The client names the controller that answered last, and nothing ran in between.
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
async def steady_load(
    endpoints: Sequence[str], tls: "TlsFiles | None" = None
) -> AsyncIterator[SteadyLoad]:
    """Run the load over `endpoints`."""
    options: dict[str, Any] = {} if tls is None else {"tls": tls}
    async with ControllerClient(endpoints, **options) as client:
        load = SteadyLoad(client)
        writers = [asyncio.create_task(load.write_until_failure(n)) for n in range(WRITERS)]
        try:
            yield load
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
