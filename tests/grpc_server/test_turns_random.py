"""Connections that come, say anything and are lost at any time leave nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from streammeta.controller.grpc_server.frames import Flag, Kind, Setting, frame
from streammeta.controller.grpc_server.limits import Limits
from streammeta.controller.grpc_server.messages import framed
from streammeta.controller.grpc_server.server import Server
from tests.grpc_server.turn_meter import (
    ECHO,
    GREETING,
    POUR,
    Client,
    echoed,
    grant,
    head,
    new_server,
    settings,
)

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


@pytest.mark.parametrize("seed", range(12))
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
