"""What is sent from the caller's memory arrives as it is, also when it is sent twice."""

from __future__ import annotations

import io
import mmap
import random

from streammeta.storage.object_store.s3_client import as_view, sendable


def test_bytes_are_sent_as_they_are() -> None:
    data = b"abc"
    assert as_view(data) is data
    assert sendable(data) is data


def test_a_view_reads_like_a_file_over_its_bytes() -> None:
    seed = 11
    rng = random.Random(seed)
    data = rng.randbytes(100_000)
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    body, like = sendable(as_view(memoryview(memory))), io.BytesIO(data)
    assert not isinstance(body, bytes)
    for _ in range(300):
        size, offset, whence = rng.randrange(4_000), rng.randrange(110_000), rng.randrange(3)
        if rng.random() < 0.5:
            offset = -offset if whence == io.SEEK_END else offset
            assert body.seek(offset, whence) == like.seek(offset, whence), f"seed {seed}"
        assert body.read(size) == like.read(size), f"seed {seed}"
        assert body.tell() == like.tell(), f"seed {seed}"
    body.seek(0)
    assert body.read() == data
    body.seek(0)
    pieces = list(iter(lambda: body.read(1 << 20), b""))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) < len(data), "a copy of all of it was made"
