"""The broken network breaks what it is told to break, that alone, and mends it again."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.chaos.fault_proxy import Behaviour, Cut, FaultNetwork, Mode

SHORT_S = 0.15
LONG_S = 5.0
Ask = Callable[[], Awaitable[bytes]]


class Echo:
    """Member 1: answers what it is sent, reversed, and remembers it."""

    def __init__(self) -> None:
        self.heard = b""
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(100):
            self.heard += data
            writer.write(data[::-1])
        writer.close()


def with_network(
    scenario: Callable[
        [FaultNetwork, Echo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]
    ],
) -> None:
    """Run a scenario in which member 2 is connected to member 1 through the network."""

    async def run() -> None:
        echo = Echo()
        server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
        network = FaultNetwork({1: server.sockets[0].getsockname()[1], 2: 1})
        await network.start()
        try:
            reader, writer = await dial(network)
            assert await ask(reader, writer, b"hello") == b"olleh"
            await scenario(network, echo, reader, writer)
            writer.close()
        finally:
            await network.close()
            server.close()

    asyncio.run(run())


async def dial(network: FaultNetwork) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = network.endpoint(2, 1).split(":")
    return await asyncio.open_connection(host, int(port))


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), LONG_S)


async def hears_nothing(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), SHORT_S)
    except TimeoutError:
        return True
    return False


def pair(sender: int, receiver: int, mode: Mode) -> Cut:
    return Cut(frozenset({(sender, receiver)}), Behaviour(mode))


def test_held_bytes_arrive_when_the_fault_ends() -> None:
    async def scenario(
        network: FaultNetwork,
        echo: Echo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        cut = pair(2, 1, Mode.HOLD)
        network.cut(cut)
        writer.write(b"later")
        assert await hears_nothing(reader)
        assert echo.heard == b"hello"

        network.heal(cut)

        assert await asyncio.wait_for(reader.readexactly(5), LONG_S) == b"retal"

    with_network(scenario)


def test_a_lost_answer_was_heard_and_its_connection_is_reset_at_the_end() -> None:
    async def scenario(
        network: FaultNetwork,
        echo: Echo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        network.cut(pair(1, 2, Mode.DROP))
        writer.write(b"lost")
        assert await hears_nothing(reader)
        assert echo.heard == b"hellolost"

        network.heal_all()

        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.readexactly(4), LONG_S)
        assert await ask(*await dial(network), b"again") == b"niaga"

    with_network(scenario)


def test_new_connections_do_not_pass_a_cut() -> None:
    async def scenario(
        network: FaultNetwork,
        echo: Echo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        network.cut(pair(2, 1, Mode.DROP))
        new_reader, new_writer = await dial(network)
        new_writer.write(b"new")
        assert await hears_nothing(new_reader)
        assert (echo.heard, echo.connections) == (b"hello", 1)
        new_writer.close()

    with_network(scenario)


def test_a_reset_ends_old_and_new_connections_until_healed() -> None:
    async def scenario(
        network: FaultNetwork,
        echo: Echo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        network.cut(pair(2, 1, Mode.RESET))
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), LONG_S)
        new_reader, _ = await dial(network)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(new_reader.read(1), LONG_S)

        network.heal_all()

        assert await ask(*await dial(network), b"well") == b"llew"

    with_network(scenario)


def test_other_pairs_are_left_alone_and_faults_add_up() -> None:
    async def scenario(
        network: FaultNetwork,
        echo: Echo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        network.cut(pair(FaultNetwork.CLIENTS, 1, Mode.RESET))
        assert await ask(reader, writer, b"abc") == b"cba"

        hold, slow = pair(2, 1, Mode.HOLD), pair(2, 1, Mode.SLOW)
        network.cut(hold)
        network.cut(slow)
        writer.write(b"de")
        assert await hears_nothing(reader)
        network.heal(hold)
        assert await asyncio.wait_for(reader.readexactly(2), LONG_S) == b"ed"

    with_network(scenario)
