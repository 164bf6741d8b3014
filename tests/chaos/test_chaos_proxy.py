"""The broken network breaks what it is told to break, that alone, and mends it again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.fault_proxy import Behaviour, Cut, FaultNetwork, Mode
from tests.kit.waiting import PATIENCE_S

SHORT_S = 0.15


class Echo:
    """Member 1: answers what it is sent, reversed, and remembers it."""

    def __init__(self) -> None:
        self.heard = b""
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while data := await reader.read(100):
                self.heard += data
                writer.write(data[::-1])
        finally:
            writer.close()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """Connections of member 2 to member 1 through the network; the last one is at hand."""

    def __init__(self, network: FaultNetwork, echo: Echo) -> None:
        self.network = network
        self.echo = echo
        self._opened: list[asyncio.StreamWriter] = []

    async def dial(self) -> Connection:
        host, port = self.network.endpoint(2, 1).split(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        self._opened.append(self.writer)
        return self.reader, self.writer

    async def close(self) -> None:
        for writer in self._opened:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest_asyncio.fixture
async def link() -> AsyncIterator[Link]:
    """A connection that works, until the test breaks it."""
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    network = FaultNetwork({1: 1, 2: 1}, {1: port, 2: 1})
    await network.start()
    link = Link(network, echo)
    try:
        assert await ask(*await link.dial(), b"hello") == b"olleh"
        yield link
    finally:
        await link.close()
        await network.close()
        server.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), PATIENCE_S)


async def hears_nothing(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), SHORT_S)
    except TimeoutError:
        return True
    return False


def pair(sender: int, receiver: int, mode: Mode) -> Cut:
    return Cut(frozenset({(sender, receiver)}), Behaviour(mode))


async def test_a_lost_answer_was_heard_and_its_connection_is_reset_at_the_end(link: Link) -> None:
    link.network.cut(pair(1, 2, Mode.DROP))
    link.writer.write(b"lost")
    assert await hears_nothing(link.reader)
    assert link.echo.heard == b"hellolost"

    link.network.heal_all()

    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(link.reader.readexactly(4), PATIENCE_S)
    assert await ask(*await link.dial(), b"again") == b"niaga"


async def test_a_reset_ends_old_and_new_connections_until_healed(link: Link) -> None:
    link.network.cut(pair(2, 1, Mode.RESET))
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(link.reader.read(1), PATIENCE_S)
    await link.dial()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(link.reader.read(1), PATIENCE_S)

    link.network.heal_all()

    assert await ask(*await link.dial(), b"well") == b"llew"


async def test_other_pairs_are_left_alone_and_faults_add_up(link: Link) -> None:
    link.network.cut(pair(FaultNetwork.CLIENTS, 1, Mode.RESET))
    assert await ask(link.reader, link.writer, b"abc") == b"cba"

    hold, slow = pair(2, 1, Mode.HOLD), pair(2, 1, Mode.SLOW)
    link.network.cut(hold)
    link.network.cut(slow)
    link.writer.write(b"de")
    assert await hears_nothing(link.reader)
    link.network.heal(hold)
    assert await asyncio.wait_for(link.reader.readexactly(2), PATIENCE_S) == b"ed"
