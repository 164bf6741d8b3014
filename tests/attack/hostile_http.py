"""Attacks on a listener for HTTP: requests that do not end, are too large, or do not pause."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence

from tests.attack.hostile import Attack, Target, garbage, half_handshakes, read_all

_LINE = b"GET /metrics HTTP/1.1\r\n"
_REQUEST = _LINE + b"host: x\r\n\r\n"
_LETTER_S = 0.05
"""Pause between two bytes of a slow request, in seconds."""
_BREATH_S = 0.001
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
