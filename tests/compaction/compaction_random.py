"""Histories and index entries drawn at random: uploads, trims, deletions, streams handed on.

What comes out has all that makes compaction hard: gaps between a node's set objects of one stream,
blocks that begin below a stream's start, set objects without anything live, lost offsets.

For what is pure in compaction: no map, no bucket. Each byte tells its object and place.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from streammeta.storage.compaction.entries import Entry, EntryTable
from tests.compaction.compaction_world import TrueStream, World
from tests.kit.seeds import seeds

LONG = 1_000
"""Seeds from here on are for long runs, and stand for ten histories each."""


def short_and_long(short: int, long: int) -> list[Any]:
    """Return so many seeds of one history for every run, and so many of ten with `--slow`."""
    return [*seeds(short), *seeds(0, slow=long, start=LONG)]


def draws(seed: int) -> list[random.Random]:
    """Return what the histories of a seed are drawn from."""
    if seed < LONG:
        return [random.Random(seed)]
    return [random.Random(10 * seed + number) for number in range(10)]


@dataclass(frozen=True, slots=True)
class Shape:
    """How much there is of what; `actions` are drawn one after the other."""

    nodes: int = 2
    streams: int = 6
    actions: int = 30
    records: int = 4
    span: int = 3
    payload: int = 90
    block_bytes: int = 150
    apart: float = 0.1
    """Share of stream objects among what is written."""


async def random_world(rng: random.Random, shape: Shape | None = None) -> World:
    shape = shape or Shape()
    world = World(shape.block_bytes)
    world.tells_facts = rng.random() < 0.7
    world.is_relative = lambda object_id: object_id % 3 == 0
    nodes = range(1000, 1000 + shape.nodes)
    await world.register(*nodes)
    for _ in range(shape.streams):
        await world.create(rng.choice(nodes), 1)
    for _ in range(shape.actions):
        await act(world, rng, shape)
    return world


async def act(world: World, rng: random.Random, shape: Shape) -> None:
    world.clock.now_ms += rng.choice([0, 1_000, 60_000, 600_000])
    draw = rng.random()
    if draw < 0.7:
        await upload(world, rng, shape)
    elif draw < 0.8:
        await trim(world, rng)
    elif draw < 0.92:
        await hand_on(world, rng)
    elif draw < 0.95:
        await lose(world, rng)
    elif draw < 0.97:
        await delete(world, rng)


async def upload(world: World, rng: random.Random, shape: Shape) -> None:
    node_id = rng.choice(list(world.nodes))
    mine = [stream.stream_id for stream in _open(world) if stream.owner == node_id]
    chosen = rng.sample(mine, rng.randint(0, len(mine)))
    if not chosen:
        return
    sizes = {
        stream_id: [
            (rng.randint(1, shape.span), rng.randint(0, shape.payload))
            for _ in range(rng.randint(1, shape.records))
        ]
        for stream_id in chosen
    }
    apart = [stream_id for stream_id in chosen if rng.random() < shape.apart]
    await world.upload(node_id, sizes, apart)


async def trim(world: World, rng: random.Random) -> None:
    """Move the start of an open stream, also into the middle of a record, or to its end."""
    candidates = [stream for stream in _open(world) if stream.end > stream.start]
    if candidates:
        stream = rng.choice(candidates)
        await world.trim(stream.stream_id, rng.randint(stream.start, stream.end))


async def hand_on(world: World, rng: random.Random) -> None:
    if world.live():
        stream = rng.choice(world.live())
        await world.move(stream.stream_id, rng.choice(list(world.nodes)))


async def lose(world: World, rng: random.Random) -> None:
    """Lose acknowledged offsets of a stream, which goes on behind them."""
    if _open(world):
        stream = rng.choice(_open(world))
        await world.lose(stream.stream_id, rng.randint(1, 5))
        await world.move(stream.stream_id, rng.choice(list(world.nodes)))


async def delete(world: World, rng: random.Random) -> None:
    """Delete a stream, unless it is the last one."""
    if len(world.live()) > 1:
        await world.delete(rng.choice(world.live()).stream_id)


def _open(world: World) -> list[TrueStream]:
    return [object_ for object_ in world.live() if object_.is_open]


@dataclass
class Sources:
    """Entries of readable set objects, and where the streams that exist start."""

    entries: list[Entry] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)

    @property
    def table(self) -> EntryTable:
        return EntryTable.of_rows(self.entries)

    @property
    def live(self) -> list[Entry]:
        """Entries with something above the start of a stream that exists."""
        return [
            entry
            for entry in self.entries
            if entry.stream_id in self.starts and entry.end_offset > self.starts[entry.stream_id]
        ]


def random_sources(
    rng: random.Random,
    *,
    objects: int = 12,
    streams: int = 8,
    largest: int = 40,
    gaps: float = 0.15,
    overlaps: float = 0.0,
) -> Sources:
    """Draw entries of at most `largest` bytes; `gaps` and `overlaps` are shares of the ranges."""
    sources = Sources()
    ends: defaultdict[int, int] = defaultdict(int)
    for object_id in range(objects):
        position = 0
        chosen = rng.sample(range(streams), rng.randint(1, streams))
        for stream_id in sorted(chosen):
            at = ends[stream_id]
            if rng.random() < gaps:
                at += rng.randint(1, 9)
            elif rng.random() < overlaps:
                at = max(0, at - rng.randint(1, 3))
            for _ in range(rng.randint(1, 3)):
                end, size = at + rng.randint(1, 5), rng.randint(1, largest)
                sources.entries.append(
                    Entry(object_id, stream_id, at, end, end - at, position, size)
                )
                at, position = end, position + size
            ends[stream_id] = max(at, ends[stream_id])
    for stream_id, end in ends.items():
        if rng.random() < 0.9:
            sources.starts[stream_id] = rng.choice([0, 0, 0, rng.randint(0, end)])
    return sources


def bytes_at(object_id: int, position: int, size: int) -> bytes:
    return bytes((object_id * 31 + at * 7) % 251 for at in range(position, position + size))
