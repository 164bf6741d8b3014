"""The broken network breaks and mends as told, and the checks after a run find what they seek."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.chaos import chaos_checks
from tests.chaos.fault_proxy import Behaviour, Cut, FaultNetwork, Mode
from tests.kit.waiting import PATIENCE_S
from tests.linearizability import models
from tests.linearizability.history import UNKNOWN, Operation

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


def put(value: str, invoked: int, returned: int | None) -> Operation[Any, Any]:
    answer = UNKNOWN if returned is None else models.KVAnswer(True, value, invoked + 1)
    return Operation("client", "key", models.Put(value), invoked, returned, answer)


def delete(value: str, version: int, invoked: int) -> Operation[Any, Any]:
    answer = models.KVAnswer(True, value, version)
    return Operation("client", "key", models.Delete(), invoked, invoked + 1, answer)


def last_read(value: str | None, version: int = 0) -> Operation[Any, Any]:
    return Operation(
        "client", "key", models.Get(), 1000, 1001, models.KVAnswer(True, value, version)
    )


def test_a_value_may_be_overwritten_by_whatever_did_not_end_before() -> None:
    chaos_checks.check_no_write_lost([put("a", 0, 5), put("b", 3, 9), last_read("a", 1)])
    chaos_checks.check_no_write_lost([put("a", 0, None), put("b", 3, 9), last_read("a", 1)])
    chaos_checks.check_no_write_lost([put("a", 0, 5), delete("a", 1, 7), last_read(None)])


@pytest.mark.parametrize("value", ["a", None, "never written"])
def test_a_lost_write_is_found(value: str | None) -> None:
    with pytest.raises(AssertionError, match=r"lost|never written"):
        chaos_checks.check_no_write_lost([put("a", 0, 1), put("b", 3, 9), last_read(value)])


def test_a_stale_read_is_found() -> None:
    stale = Operation("client", "key", models.Get(), 10, 11, models.KVAnswer(True, "a", 1))
    chaos_checks.check_histories([put("a", 0, 1), stale, last_read("a", 1)], [])

    with pytest.raises(AssertionError, match="not linearizable"):
        chaos_checks.check_histories([put("a", 0, 1), put("b", 3, 9), stale, last_read("b", 4)], [])


def commit(stream: str, object_id: int, *, known: bool = True) -> Operation[Any, Any]:
    returned, answer = (1, models.Committed()) if known else (None, UNKNOWN)
    return Operation("client", stream, models.CommitRange(object_id, 0, 5), 0, returned, answer)


def objects(stream: str, *object_ids: int) -> Operation[Any, Any]:
    return Operation("client", stream, models.ReadObjects(), 8, 9, models.Objects(object_ids))


def test_a_lost_commit_and_half_a_commit_are_found() -> None:
    chaos_checks.check_no_commit_lost(
        [commit("1", 7), commit("2", 7), objects("1", 7), objects("2", 7)]
    )
    unknown = [commit("1", 7, known=False), commit("2", 7, known=False)]
    chaos_checks.check_no_commit_lost([*unknown, objects("1"), objects("2")])

    with pytest.raises(AssertionError, match="lost"):
        chaos_checks.check_no_commit_lost([commit("1", 7), objects("1", 6)])
    with pytest.raises(AssertionError, match="object 7"):
        chaos_checks.check_no_commit_lost([*unknown, objects("1", 7), objects("2")])


def test_errors_in_logs_are_found_unless_expected(tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    log.write_text('{"event": "leader_elected", "level": "info"}\n')
    chaos_checks.check_logs([log])

    log.write_text('{"event": "disk_full", "level": "error"}\n')
    chaos_checks.check_logs([log], ["disk_full"])
    with pytest.raises(AssertionError, match="disk_full"):
        chaos_checks.check_logs([log])
    log.write_text("Traceback (most recent call last):\n")
    with pytest.raises(AssertionError, match="Traceback"):
        chaos_checks.check_logs([log])


def test_the_longest_gap_is_between_answers_of_all_histories() -> None:
    second = 10**9
    assert chaos_checks.longest_gap_s([[put("a", 0, second)], [put("b", 0, 4 * second)]]) == 3.0
    assert chaos_checks.longest_gap_s([[]]) == 0.0
