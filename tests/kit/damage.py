"""Seeded damages of an object's bytes: each returns other bytes than it was given."""

import random


def damage(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    """Flip, splice, cut off, or swap blocks; `other` is another object, `blocks` are ranges."""
    while True:
        kind = rng.choice([_flip, _splice, _zero, _cut, _swap, _take_from_another])
        spoiled = kind(data, other, blocks, rng)
        if spoiled != data:
            return spoiled


def _flip(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _splice(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    size = rng.randrange(1, min(500, len(data)))
    source, target = rng.randrange(len(data) - size), rng.randrange(len(data) - size)
    return data[:target] + data[source : source + size] + data[target + size :]


def _zero(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    size = rng.randrange(1, min(5000, len(data)))
    at = rng.randrange(len(data) - size)
    return data[:at] + bytes(size) + data[at + size :]


def _cut(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _swap(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    (first, first_end), (second, second_end) = sorted(rng.sample(blocks, 2))
    between = data[first_end:second]
    swapped = data[second:second_end] + between + data[first:first_end]
    return data[:first] + swapped + data[second_end:]


def _take_from_another(
    data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random
) -> bytes:
    start, end = rng.choice(blocks)
    return data[:start] + other[start:end] + data[end:]
