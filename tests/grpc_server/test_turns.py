"""Work of a turn of the event loop: bounded whatever clients send, and shared among them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from streammeta.controller.grpc_server.call import Call
from streammeta.controller.grpc_server.frames import (
    FRAME_BYTES_MAX,
    PREFACE,
    ErrorCode,
    Flag,
    Kind,
    Setting,
    frame,
)
from streammeta.controller.grpc_server.headers import FIELDS_MAX
from streammeta.controller.grpc_server.limits import DEFAULT, Limits
from streammeta.controller.grpc_server.messages import framed
from streammeta.controller.grpc_server.server import Server
from streammeta.controller.grpc_server.shares import Budget
from tests.grpc_server.turn_meter import (
    ECHO,
    GREETING,
    POUR,
    Client,
    Meter,
    echoed,
    grant,
    head,
    new_server,
    settings,
)
from tests.kit.seeds import seeds

_BLOCKED = 1_000
"""Calls whose answers wait for a window."""

_BLOCK_MAX = FIELDS_MAX + 64
"""Operations that one frame may set off: those of one block of headers."""

_BOUND = DEFAULT.work_a_turn + _BLOCK_MAX

_WINDOWS = settings(*[(Setting.INITIAL_WINDOW_SIZE, number & 1) for number in range(2_730)])
_FULL = Flag.END_HEADERS | Flag.END_STREAM


def ids(calls: int) -> range:
    return range(1, 2 * calls, 2)


def headers(stream_id: int, block: bytes) -> bytes:
    return frame(Kind.HEADERS, _FULL, stream_id, block)


def long_block(unit: bytes, frames: int = 8) -> bytes:
    """Return one block of headers in frames as long as may be, of one piece again and again."""
    part = unit * (FRAME_BYTES_MAX // len(unit))
    rest = [frame(Kind.CONTINUATION, 0, 1, part)] * (frames - 2)
    return b"".join(
        (
            frame(Kind.HEADERS, Flag.END_STREAM, 1, part),
            *rest,
            frame(Kind.CONTINUATION, Flag.END_HEADERS, 1, part),
        )
    )


def reset(stream_id: int) -> bytes:
    return frame(Kind.RST_STREAM, 0, stream_id, struct.pack(">I", ErrorCode.CANCEL))


_CALLS = b"".join(map(echoed, ids(_BLOCKED))) + grant(0, 1 << 30)
_NO_WINDOW = settings((Setting.INITIAL_WINDOW_SIZE, 0))
_OPEN_POUR = frame(Kind.HEADERS, Flag.END_HEADERS, 1, head(POUR))
_HUFFMAN = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(b"0" * 15_500)
_HUFFMAN_LENGTH = b"\xff" + bytes((len(_HUFFMAN) - 127 & 127 | 128, len(_HUFFMAN) - 127 >> 7))
_INDEXED = headers(1, head(ECHO) + b"\x40\x01z\x00")
_PING = frame(Kind.PING, 0, 0, b"12345678")


@dataclass(frozen=True, slots=True)
class Payload:
    data: bytes
    before: bytes = b""
    most: int = _BOUND


_PAYLOADS = {
    "calls": Payload(_CALLS),
    "pings": Payload(_PING * 8_000),
    "answered-pings": Payload(frame(Kind.PING, Flag.ACK, 0, b"12345678") * 8_000),
    "windows": Payload(grant(0, 1) * 8_000),
    "windows-of-the-connection": Payload(grant(0, 1) * 1_000, _NO_WINDOW + _CALLS, 1_100),
    "windows-in-settings": Payload(_WINDOWS * 20),
    "windows-in-settings-of-waiting-calls": Payload(_WINDOWS * 5, _NO_WINDOW + _CALLS),
    "references": Payload(
        _INDEXED + b"".join(headers(at, head(ECHO) + b"\xbe" * 1_900) for at in ids(30)[1:])
    ),
    "huffman": Payload(
        b"".join(headers(at, head(ECHO) + b"\0\x01z" + _HUFFMAN_LENGTH + _HUFFMAN) for at in ids(6))
    ),
    "table": Payload(b"".join(headers(at, head(ECHO) + b"\x40\x01a\0" * 1_200) for at in ids(30))),
    "table-updates": Payload(headers(1, b"\x20" * 16_000)),
    "skipped-references": Payload(long_block(b"\x82")),
    "skipped-table-updates": Payload(long_block(b"\x20")),
    "skipped-entries": Payload(long_block(b"\x40\x01a\0")),
    "skipped-values": Payload(long_block(b"\0\x01a\x7f\x81\x7e" + bytes(16_384 - 6))),
    "bytes": Payload(frame(Kind.DATA, 0, 1, b"\0") * 8_000, _OPEN_POUR),
    "padding": Payload(frame(Kind.DATA, 8, 1, b"\xfe" + bytes(254)) * 2_000, _OPEN_POUR),
    "empty-messages": Payload(frame(Kind.DATA, 0, 1, framed(b"") * 3_276) * 20, _OPEN_POUR),
    "closed-windows": Payload(b"".join(echoed(at) + grant(at, 0) for at in ids(3_000))),
    "data-behind-the-end": Payload(
        b"".join(
            frame(Kind.HEADERS, _FULL, at, head(POUR)) + frame(Kind.DATA, 0, at, b"x")
            for at in ids(3_000)
        )
    ),
    "resets": Payload(b"".join(echoed(at) + reset(at) for at in ids(3_000))),
    "priorities": Payload(frame(Kind.PRIORITY, 0, 1, bytes(5)) * 8_000),
    "ends": Payload(frame(Kind.GOAWAY, 0, 0, bytes(8)) * 8_000),
    "trailers": Payload(b"".join(headers(1, head(ECHO)) for _ in range(8_000))),
    "late-trailers": Payload(
        b"".join(echoed(at) + headers(at, head(ECHO) + b"\xbe" * 1_000) for at in ids(20)),
        frame(Kind.HEADERS, _FULL, 1, head(ECHO) + b"\x40\x01z\x00"),
    ),
    "windows-that-grow": Payload(
        b"".join(settings((Setting.INITIAL_WINDOW_SIZE, size)) for size in range(1, 20)),
        _NO_WINDOW + _CALLS,
    ),
    "windows-of-streams": Payload(
        b"".join(grant(at, 1) for at in ids(_BLOCKED)) * 4, _NO_WINDOW + _CALLS
    ),
}


@asynccontextmanager
async def metered(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Meter]:
    meter = Meter(monkeypatch)
    running = asyncio.ensure_future(meter.run())
    try:
        yield meter
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def quiet(meter: Meter) -> None:
    """Wait until nothing happens for some turns."""
    still = 0
    while still < 5:
        still = 0 if meter.now else still + 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", _PAYLOADS)
async def test_no_payload_takes_more_work_of_a_turn_than_its_bound(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = _PAYLOADS[name]
    async with metered(monkeypatch) as meter:
        client = Client(new_server())
        await client.say_when_read(GREETING + payload.before)
        await quiet(meter)
        meter.restart()
        await client.say_when_read(payload.data)
        await quiet(meter)
        assert 0 < meter.most <= payload.most, meter.worst
        client.connection.connection_lost(None)
        await quiet(meter)


async def speak_together(meter: Meter, name: str) -> None:
    """Let twelve connections say the same in one turn, and wait until all are settled."""
    server = new_server()
    clients = [Client(server) for _ in range(12)]
    await turns(3)
    meter.restart()
    for client in clients:
        client.say(PREFACE, settings(), _PAYLOADS[name].data[:24_000])
    for client in clients:
        await client.settled()


@pytest.mark.parametrize("name", ["calls", "references", "skipped-entries", "pings"])
async def test_connections_share_the_work_of_a_turn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them speak in the same turn, and none has said who it is."""
    async with metered(monkeypatch) as meter:
        await speak_together(meter, name)
        await quiet(meter)
        assert 0 < meter.most <= _BOUND, meter.worst


async def test_turns_after_a_long_one_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1,900 references take more than a turn has; the quorum needs several turns."""
    async with metered(monkeypatch) as meter:
        await speak_together(meter, "references")
        for first in range(0, len(meter.turns), 3):
            of_some = meter.turns[first : first + 12]
            assert sum(of_some) <= 12 * DEFAULT.work_a_turn + _BLOCK_MAX


async def test_the_end_of_a_connection_ends_its_calls_by_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand calls are given up at once, and each ends a task."""
    async with metered(monkeypatch) as meter:
        server = new_server()
        clients = [Client(server) for _ in range(4)]
        for client in clients:
            await client.say_when_read(GREETING + _NO_WINDOW + _CALLS)
        await quiet(meter)
        assert server.calls == 4 * _BLOCKED
        meter.restart()
        for client in clients:
            client.connection.connection_lost(None)
        await quiet(meter)
        assert meter.worst["calls"] <= DEFAULT.work_a_turn // 2 + 1
        assert server.calls == 0
        assert not server.connections


async def test_a_connection_counts_until_its_calls_have_ended() -> None:
    server = new_server()
    client = Client(server, share := server.add_share())
    await client.say_when_read(GREETING + _NO_WINDOW + _CALLS)
    client.connection.connection_lost(None)
    assert (share.connections, len(server.connections)) == (1, 1)
    while server.calls:  # noqa: ASYNC110 - turns
        await asyncio.sleep(0)
    assert (share.connections, len(server.connections)) == (0, 0)


async def test_a_handler_that_never_waits_takes_no_more_messages_than_a_turn_has_room_for() -> None:
    taken = 0

    async def drain(messages: Any, context: Any) -> bytes:
        nonlocal taken
        async for _ in messages:
            taken += 1
        return b""

    server = new_server(Drain=grpc.stream_unary_rpc_method_handler(drain))
    client = Client(server)
    opened = frame(Kind.HEADERS, Flag.END_HEADERS, 1, head("/t.S/Drain"))
    data = frame(Kind.DATA, 0, 1, framed(b"") * 3_276) * 4
    client.say(GREETING + opened + data + frame(Kind.DATA, Flag.END_STREAM, 1))
    before = most = 0
    while server.calls:
        await asyncio.sleep(0)
        most, before = max(most, taken - before), taken
    assert taken == 4 * 3_276
    assert most <= DEFAULT.work_a_turn + 1


async def test_many_handlers_that_never_wait_leave_connections_their_turn() -> None:
    filled = asyncio.Event()

    async def drain(messages: Any, context: Any) -> bytes:
        await filled.wait()
        async for _ in messages:
            pass
        return b""

    server = new_server(Drain=grpc.stream_unary_rpc_method_handler(drain))
    clients = [Client(server) for _ in range(3)]
    for client in clients:
        client.say(GREETING)
        for stream_id in ids(_BLOCKED):
            opened = frame(Kind.HEADERS, Flag.END_HEADERS, stream_id, head("/t.S/Drain"))
            await client.say_when_read(opened)
            await client.say_when_read(frame(Kind.DATA, 0, stream_id, framed(b"") * 60))
    filled.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert await turns_until_answered(Client(server, host="bystander")) <= 4

    for client in clients:
        client.connection.connection_lost(None)
    while server.calls:  # noqa: ASYNC110 - turns
        await asyncio.sleep(0)


async def test_a_process_that_was_stopped_takes_work_again_soon() -> None:
    """The time that passes while a debugger or a machine holds a process is nobody's work."""
    budget = Budget(1_024, 0.005)
    budget.spend(1, 3_600.0)
    turns = 0
    while budget.is_spent:
        budget.renew()
        turns += 1
        assert turns <= 32


async def test_calls_that_others_do_not_hold_up_are_begun_by_turns_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probes and heartbeats come from anybody who may connect."""
    server, begun = new_server(), 0

    def count(call: Call) -> None:
        nonlocal begun
        begun += 1
        start(call)

    start = Call.start
    monkeypatch.setattr(Call, "start", count)
    server.prioritize([ECHO])
    client = Client(server)
    client.say(GREETING + _CALLS)
    before = most = 0
    while begun < _BLOCKED:
        await asyncio.sleep(0)
        most, before = max(most, begun - before), begun
    assert most <= 2 * DEFAULT.begun_a_turn  # one turn's by what came, and the next one's


# -- rounds


def flood(client: Client) -> None:
    """Leave a connection with work for many turns."""
    client.say(GREETING, _PAYLOADS["references"].data)


async def turns_until_answered(client: Client) -> int:
    client.say(GREETING, _PING)
    taken = 0
    while not client.is_answered(b"12345678"):
        taken += 1
        assert taken < 1_000
        await asyncio.sleep(0)
    return taken


async def test_a_listener_has_its_turn_however_many_wait_at_another() -> None:
    server = new_server()
    crowded, other = server.add_share(), server.add_share()
    for number in range(40):
        flood(Client(server, crowded, f"host-{number}"))
    assert await turns_until_answered(Client(server, other, "bystander")) <= 4


async def test_a_caller_has_its_turn_however_many_connections_another_has() -> None:
    server = new_server()
    share = server.add_share()
    for _ in range(40):
        flood(Client(server, share, "one host"))
    assert await turns_until_answered(Client(server, share, "bystander")) <= 4


async def test_connections_of_a_caller_take_turns() -> None:
    server = new_server()
    share = server.add_share()
    clients = [Client(server, share, "one host") for _ in range(8)]
    for client in clients:
        client.say(GREETING, _PING * 4_000, frame(Kind.PING, 0, 0, b"the last"))
    for client in clients:
        assert not client.is_answered(b"the last")
    ended: list[int] = []
    while len(ended) < len(clients):
        await asyncio.sleep(0)
        ended += [
            number
            for number, client in enumerate(clients)
            if number not in ended and client.is_answered(b"the last")
        ]
        if not ended:
            continue
        behind = [len(client.transport.sent) for client in clients]
        assert max(behind) - min(behind) <= 17 * 2 * DEFAULT.work_of_connection


async def test_frames_that_come_later_wait_behind_those_that_wait() -> None:
    """Else a client whose bytes keep coming would have every turn's room."""
    server = new_server()
    share = server.add_share()
    waiting, pushy = Client(server, share, "a"), Client(server, share, "b")
    pushy.say(GREETING)
    waiting.say(GREETING, _PING * 2_000)
    assert not waiting.is_answered(b"12345678") or waiting.transport.is_paused
    before = len(pushy.transport.sent)
    pushy.say(_PING)
    assert len(pushy.transport.sent) == before
    await pushy.settled()
    assert pushy.is_answered(b"12345678")


_LIMITS = Limits(
    work_a_turn=40,
    work_a_turn_s=3_600,
    work_of_connection=10,
    begun_a_turn=3,
    lookahead_bytes=4_000,
)


class Speaker:
    """A client that says frames at random, most of them sound."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        share = rng.choice(server._shares)
        self._rng = rng
        self._next_id = 1
        self.client = Client(server, share, rng.choice("ab"))
        self.client.say(GREETING)

    def speak(self) -> None:
        if not self.client.transport.is_paused and not self.client.transport.is_closed:
            self.client.say(*(self._part() for _ in range(self._rng.randrange(1, 30))))

    def _part(self) -> bytes:
        rng = self._rng
        stream_id = max(1, self._next_id - 2 * rng.randrange(1, 6))
        match rng.randrange(9):
            case 0 | 1:
                self._next_id += 2
                return echoed(self._next_id - 2, bytes(rng.randrange(2_000)))
            case 2:
                self._next_id += 2
                return frame(Kind.HEADERS, Flag.END_HEADERS, self._next_id - 2, head(POUR))
            case 3:
                return frame(Kind.DATA, 0, stream_id, framed(b"a") * rng.randrange(1, 40))
            case 4:
                return settings((Setting.INITIAL_WINDOW_SIZE, rng.choice((0, 1, 500, 1 << 20))))
            case 5:
                return grant(rng.choice((0, stream_id)), rng.randrange(1, 5_000))
            case 6:
                return frame(Kind.RST_STREAM, 0, stream_id, bytes(4))
            case 7:
                return frame(Kind.PING, 0, 0, b"12345678")
            case _:
                self._next_id += 2
                block = head(ECHO) + b"\x82" * rng.randrange(100)
                return frame(Kind.HEADERS, 5, self._next_id - 2, block)


@pytest.mark.parametrize("seed", seeds(4, slow=8))
async def test_nothing_is_left_of_connections_that_are_lost(seed: int) -> None:
    rng = random.Random(seed)
    server = new_server(_LIMITS)
    for _ in range(2):
        server.add_share()
    speakers: list[Speaker] = []
    for _ in range(300):
        if len(speakers) < 6:
            speakers.append(Speaker(server, rng))
        speaker = rng.choice(speakers)
        speaker.speak()
        if speaker.client.transport.is_closed or rng.random() < 0.02:
            speaker.client.connection.connection_lost(None)
            speakers.remove(speaker)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    for speaker in speakers:
        speaker.client.connection.connection_lost(None)
    for _ in range(2_000):
        await asyncio.sleep(0)
    assert (server.calls, server.held, len(server.connections)) == (0, 0, 0)
    assert not server._queue
    for share in server._shares:
        assert share.connections == 0
        assert all(call.is_over for call in (*share.waiting, *share.priority))
