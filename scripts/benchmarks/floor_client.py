"""Client of the floor: messages as large as a commit, one at a time, by the same HTTP/2 client."""

import asyncio

from scripts.benchmarks.committer import Load, LoadError
from scripts.benchmarks.floor import MESSAGE_BYTES, PIPELINE, UNARY
from scripts.benchmarks.http2 import Http2Connection

_MESSAGE = bytes(MESSAGE_BYTES)


class UnaryFloor:
    """One call for each message."""

    def __init__(self, load: Load) -> None:
        if load.in_flight != 1:
            raise ValueError("load.in_flight: the floor accepts one message at a time")
        self._load = load

    async def open(self) -> None:
        """Connect."""
        self._connection = await Http2Connection.connect(self._load.endpoint)

    async def close(self) -> None:
        """Release the connection."""
        self._connection.close()

    async def commit(self, _slot: int) -> None:
        """Send a message and wait for its answer."""
        await self._connection.call(UNARY, _MESSAGE)


class PipelinedFloor(UnaryFloor):
    """All messages on one stream."""

    async def open(self) -> None:
        """Connect and begin the stream."""
        await super().open()
        self._answered: asyncio.Future[None] | None = None
        self._stream_id = self._connection.open(PIPELINE, self._on_answer, self._on_end)

    async def commit(self, _slot: int) -> None:
        """Send a message and wait for its answer."""
        self._answered = asyncio.get_running_loop().create_future()
        self._connection.send(self._stream_id, _MESSAGE)
        await self._answered

    def _on_answer(self, _message: bytes) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _on_end(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(LoadError("the floor ended the stream"))
