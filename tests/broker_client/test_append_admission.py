"""One append, or stream, that no object can hold is refused by itself; the others go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from streammeta.client import errors
from streammeta.client.arguments import INT64_MAX
from streammeta.client.nodes.session import OpenedStream
from streammeta.client.parts import StreamWriter
from tests.kit.fake_broker import writing


async def told(writer: StreamWriter, *stream_ids: int) -> list[Any]:
    """Append a record to each of the streams and flush; return their offsets or errors."""
    acks = [await writer.append(stream_id, b"x") for stream_id in stream_ids]
    await writer.flush()
    return await asyncio.gather(*acks, return_exceptions=True)


@pytest.mark.parametrize("left", [0, 3])
async def test_a_stream_without_offsets_left_fails_alone(left: int) -> None:
    """The append that does not fit is refused by itself; the batch and the stream go on."""
    async with writing(3) as (b, writer):
        first = INT64_MAX - left
        b.cluster.map.streams[0].start = b.cluster.map.streams[0].end = first
        opened = OpenedStream(0, b.cluster.map.streams[0].epoch, first, first)
        writer.attach([opened])
        others = [await writer.append(stream_id, b"x") for stream_id in (1, 2)]
        fits = [await writer.append(0, b"x", 2)] if left else []
        for refused in (
            writer.append(0, b"x", left + 1),
            writer.append_many(0, [b"x"] * (left + 1)),
        ):
            with pytest.raises(errors.LimitExceededError):
                await refused
        await writer.flush()
        assert await asyncio.gather(*others) == [0, 0]
        assert await asyncio.gather(*fits) == [first] * len(fits)
        assert writer.next_offset(0) == (first + 2 if left else first)
        assert writer.buffered_bytes == 0
        assert await told(writer, 1, 2) == [1, 1]


@pytest.mark.parametrize("name", ["stream_id", "epoch", "next_offset"])
async def test_a_stream_with_a_number_that_no_object_can_hold_is_not_attached(name: str) -> None:
    async with writing(2) as (_, writer):
        bad = replace(OpenedStream(7, 1, 0, 0), **{name: 2**63})
        with pytest.raises(ValueError, match=rf"streams\[0\]\.{name}"):
            writer.attach([bad])
        assert await told(writer, 0, 1) == [0, 0]
