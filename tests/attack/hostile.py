"""Attacks on one listener, of gRPC or HTTP: connections that send what no client sends, or nothing.

Each is a coroutine that attacks with a bounded number of connections for as long as it is let; a
listener that closes a connection is connected to again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from scripts.benchmarks.http2 import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    request_headers,
)

CONTINUATION, GOAWAY, DATA, PRIORITY = 9, 7, 0, 2
_BURST = 200
"""Frames written at once."""
_PATIENCE_S = 0.2
"""Time for which an attacker waits for the listener to take more, or to let it in, in seconds."""
_OPENING_MAX = 64
"""Handshakes at the same time: more would wait for the attacker's own processor."""
_ATTACK_S_MAX = 90
"""Maximum time of an attack, in seconds."""
_ENDED_S_MAX = 60
"""Maximum time until calls that are refused have ended, in seconds."""
_OPENED_WITHIN_S = 60.0
"""Time for a connection, and for its handshake, in seconds."""
_PAUSE_S = 0.02
"""Pause of an attacker whose connection has ended: the honest client shares its interpreter."""
_BREATH_S = 0.001
"""Pause between two bursts on one connection, for the same reason."""
_STREAM_ID_MAX = (1 << 31) - 1
_WINDOW_0 = struct.pack(">HI", 4, 0)
_SNAPSHOT = "/streammeta.v1.MetadataService/GetSnapshot"
_DESCRIBE = "/streammeta.v1.StreamService/DescribeStreams"
_EMPTY_MESSAGE = bytes(5)


@dataclass
class Target:
    """A listener, and the certificate with which it is attacked, if any."""

    endpoint: str
    tls: ssl.SSLContext | None = None
    connections: int = 8
    """At the same time."""
    made: int = 0
    """Connections made."""
    sent: int = 0
    """Bytes."""
    opening: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_OPENING_MAX))
    rng: Random = field(default_factory=lambda: Random(7))

    @asynccontextmanager
    async def connection(
        self, *, plain: bool = False
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect; `plain` leaves out TLS although the listener wants it."""
        async with self.opening:
            reader, writer = await self._open(None if plain else self.tls)
        self.made += 1
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _open(
        self, context: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.endpoint.rpartition(":")
        connected = socket.socket()
        connected.setblocking(False)
        try:
            async with asyncio.timeout(_OPENED_WITHIN_S):
                await asyncio.get_running_loop().sock_connect(connected, (host, int(port)))
        except BaseException:
            connected.close()
            raise
        if context is None:
            return await asyncio.open_connection(sock=connected)
        opening = asyncio.ensure_future(
            asyncio.open_connection(
                sock=connected,
                ssl=context,
                server_hostname=host,
                ssl_handshake_timeout=_OPENED_WITHIN_S,
            )
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Cancelled itself at its end, it would wait for the peer's goodbye, and stay open.
            (opened,) = await asyncio.gather(opening, return_exceptions=True)
            if not isinstance(opened, BaseException):
                opened[1].transport.abort()
            raise

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> bool:
        """Send; False if the listener takes no more for now."""
        writer.write(data)
        self.sent += len(data)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await writer.drain()
        except TimeoutError:
            return False
        return not writer.is_closing()


Attack = Callable[[Target], Awaitable[None]]


async def attacked(attack: Attack, target: Target, is_enough: Callable[[], bool]) -> None:
    """Let as many attackers as the target says attack until it is enough."""

    async def again() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await attack(target)
            await asyncio.sleep(_PAUSE_S)

    attackers = [asyncio.create_task(again()) for _ in range(target.connections)]
    try:
        async with asyncio.timeout(_ATTACK_S_MAX):
            while not is_enough():  # noqa: ASYNC110 (a thread changes it)
                await asyncio.sleep(0.05)
    finally:
        for attacker in attackers:
            attacker.cancel()
        ended = await asyncio.gather(*attackers, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError) and error is not None:
            raise error


async def garbage(target: Target) -> None:
    """Bytes of no protocol, of HTTP/1.1, of a preface cut short, and none at all."""
    rng = target.rng
    request = b"GET / HTTP/1.1\r\n\r\n"
    noise = rng.randbytes(rng.randrange(1, 4_000))
    first = rng.choice((noise, request, PREFACE[:11], bytes(64)))
    async with target.connection(plain=True) as (reader, writer):
        await target.send(writer, first)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(100)


async def half_handshakes(target: Target) -> None:
    """A handshake's first half, and silence: the connection stays open."""
    hello = client_hello()
    async with target.connection(plain=True) as (reader, writer):
        await target.send(writer, hello[: target.rng.randrange(1, len(hello))])
        await reader.read()


def client_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    sent = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    handshake = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return sent.read()


@asynccontextmanager
async def _speaking(
    target: Target, settings: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect as an HTTP/2 client that reads what comes."""
    async with target.connection() as (reader, writer):
        await target.send(writer, PREFACE + frame(SETTINGS, 0, 0, settings))
        reading = asyncio.create_task(read_all(reader))
        try:
            yield reader, writer
        finally:
            reading.cancel()


async def read_all(reader: asyncio.StreamReader) -> None:
    """Read to the end of a connection, keeping nothing."""
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def _flood(target: Target, burst: Callable[[], bytes]) -> None:
    async with _speaking(target) as (_, writer):
        is_taken = True
        while is_taken:
            is_taken = await target.send(writer, burst())
            await asyncio.sleep(_BREATH_S)


async def rapid_reset(target: Target) -> None:
    """Calls that are reset as soon as they are opened."""
    block = request_headers(_DESCRIBE, target.endpoint)
    stream_ids = itertools.count(1, 2)

    def burst() -> bytes:
        return b"".join(
            frame(HEADERS, END_HEADERS, stream_id, block)
            + frame(RST_STREAM, 0, stream_id, b"\0\0\0\x08")
            for stream_id in itertools.islice(stream_ids, _BURST)
        )

    await _flood(target, burst)


async def ping_flood(target: Target) -> None:
    """Pings, each of which wants an answer."""
    await _flood(target, lambda: frame(PING, 0, 0, bytes(8)) * _BURST)


async def settings_flood(target: Target) -> None:
    """Settings, each of which wants an answer."""
    await _flood(target, lambda: frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * _BURST)


async def endless_headers(target: Target) -> None:
    """A header block that never ends."""
    block = request_headers(_DESCRIBE, target.endpoint)
    more = frame(CONTINUATION, 0, 1, b"\0\x01a" + b"\x7f\x81\x07" + b"b" * 1_024)
    async with _speaking(target) as (_, writer):
        await target.send(writer, frame(HEADERS, 0, 1, block))
        is_taken = True
        while is_taken:
            is_taken = await target.send(writer, more * 16)
            await asyncio.sleep(_BREATH_S)


async def malformed_frames(target: Target) -> None:
    """Frames of any type, flags, stream and length, true or not."""
    rng = target.rng

    def burst() -> bytes:
        kinds = (DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, 200)
        said = frame(
            rng.choice(kinds),
            rng.randrange(256),
            rng.choice((0, 1, 2, rng.randrange(_STREAM_ID_MAX))),
            rng.randbytes(rng.choice((0, 1, 4, 8, 300))),
        )
        if rng.random() < 0.2:
            said = rng.randbytes(3) + said[3:]
        return said

    await _flood(target, burst)


async def slow_readers(target: Target) -> None:
    """Calls with large answers of which nothing is read: a window of no bytes."""
    message = frame(DATA, END_STREAM, 0, _EMPTY_MESSAGE)
    async with target.connection() as (_, writer):
        await target.send(writer, PREFACE + frame(SETTINGS, 0, 0, _WINDOW_0))
        for stream_id, path in zip(range(1, 64, 2), itertools.cycle((_SNAPSHOT, _DESCRIBE))):
            block = request_headers(path, target.endpoint)
            opened = frame(HEADERS, END_HEADERS, stream_id, block)
            message = frame(DATA, END_STREAM, stream_id, _EMPTY_MESSAGE)
            await target.send(writer, opened + message)
        await asyncio.Event().wait()  # until the attack is over


@asynccontextmanager
async def unread(target: Target, path: str, calls: int) -> AsyncIterator[asyncio.StreamReader]:
    """Make calls whose answers can't be sent, and yield what comes in spite of it."""
    async with target.connection() as (reader, writer):
        await target.send(writer, PREFACE + frame(SETTINGS, 0, 0, _WINDOW_0))
        for stream_id in range(1, 2 * calls, 2):
            block = request_headers(path, target.endpoint)
            opened = frame(HEADERS, END_HEADERS, stream_id, block)
            await target.send(writer, opened + frame(DATA, END_STREAM, stream_id, _EMPTY_MESSAGE))
        yield reader


async def ended(reader: asyncio.StreamReader, calls: int) -> None:
    """Read until as many calls have ended, without an answer of any size."""
    async with asyncio.timeout(_ENDED_S_MAX):
        while calls:
            length, kind, flags, _ = struct.unpack(">IBBI", b"\0" + await reader.readexactly(9))
            await reader.readexactly(length)
            calls -= kind == HEADERS and bool(flags & END_STREAM)


async def idle(target: Target) -> None:
    """A connection that says what it must, and then nothing."""
    async with _speaking(target) as (reader, _):
        del reader
        await asyncio.Event().wait()  # until the attack is over


async def false_lengths(target: Target) -> None:
    """Frames of peers that announce far more than they hold, and hellos that are none."""
    rng = target.rng
    announced = struct.pack(">I", rng.choice((0, 1, 1 << 20, (1 << 32) - 1)))
    async with target.connection(plain=rng.random() < 0.5) as (reader, writer):
        await target.send(writer, announced + b"strmpeer" + rng.randbytes(rng.randrange(200)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(100)


ON_CLIENTS: Sequence[Attack] = (
    *(garbage, half_handshakes, rapid_reset, ping_flood, settings_flood),
    *(endless_headers, malformed_frames, slow_readers),
)
ON_PEERS: Sequence[Attack] = (garbage, half_handshakes, false_lengths)


_LINE = b"GET /metrics HTTP/1.1\r\n"
_REQUEST = _LINE + b"host: x\r\n\r\n"
_LETTER_S = 0.05
"""Pause between two bytes of a slow request, in seconds."""
"""Pause between two pieces of a large request, in seconds."""
_READ_S = 0.5
"""Time for an answer, in seconds."""


async def silent(target: Target) -> None:
    """A connection on which nothing is said."""
    async with target.connection() as (reader, _):
        await reader.read()


async def slow_loris(target: Target) -> None:
    """A request that comes byte by byte and does not end."""
    async with target.connection() as (_, writer):
        await target.send(writer, _LINE)
        is_taken = True
        while is_taken:
            is_taken = await target.send(writer, b"x")
            await asyncio.sleep(_LETTER_S)


async def large_requests(target: Target) -> None:
    """Paths, header fields, numbers of them and bodies that are far too large, and do not end."""
    first, more = target.rng.choice(
        (
            (b"GET /", b"x" * 65_536),
            (_LINE + b"x: ", b"y" * 65_536),
            (_LINE, b"".join(b"x%d: y\r\n" % number for number in range(5_000))),
            (b"POST /metrics HTTP/1.1\r\ncontent-length: 999999999999\r\n\r\n", bytes(65_536)),
            (
                b"POST /livez HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
                b"10000\r\n%s\r\n" % bytes(65_536),
            ),
        )
    )
    async with target.connection() as (_, writer):
        await target.send(writer, first)
        is_taken = True
        while is_taken:
            is_taken = await target.send(writer, more)
            await asyncio.sleep(_BREATH_S)  # a send may not wait: the end must be noticed


async def pipelined(target: Target) -> None:
    """Requests for the largest page, one behind the other on one connection."""
    async with target.connection() as (reader, writer):
        reading = asyncio.create_task(read_all(reader))
        try:
            is_taken = True
            while is_taken:
                is_taken = await target.send(writer, _REQUEST * 100)
                await asyncio.sleep(0)
        finally:
            reading.cancel()


async def unread_pages(target: Target) -> None:
    """A request for the largest page, of which nothing is read."""
    async with target.connection() as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await target.send(writer, _REQUEST * 10)
        await asyncio.Event().wait()  # until the attack is over


async def without_certificate(target: Target) -> None:
    """A request over TLS by a caller that shows no certificate: it must not be answered."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    stranger = Target(target.endpoint, context, opening=target.opening)
    target.made += 1  # a listener for plain text lets it connect, and no further
    async with stranger.connection() as (reader, writer):
        await target.send(writer, _REQUEST)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_S):
                answer = await reader.read(100)
                assert not answer, f"a stranger is answered: {answer!r}"


ON_HTTP: Sequence[Attack] = (
    *(garbage, half_handshakes, slow_loris, large_requests, pipelined, unread_pages),
    without_certificate,
)
