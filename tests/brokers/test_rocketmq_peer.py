"""RocketMQ's released classes read what is written here, and the other way."""

from __future__ import annotations

import asyncio
import os
import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streammeta.brokers.rocketmq.cluster.cluster_store import QueueStore, StoreConfig
from streammeta.brokers.rocketmq.cluster.segment_view import render
from streammeta.brokers.rocketmq.cluster.upload_pool import PoolConfig
from streammeta.brokers.rocketmq.dispatch import GroupCommit, LocalMessage
from streammeta.brokers.rocketmq.formats.consume_queue import ITEM_SIZE
from streammeta.brokers.rocketmq.formats.key_index import IndexHeader, query_compacted
from streammeta.brokers.rocketmq.formats.message import (
    Message,
    encode_message,
    java_hash,
    physical_offset_of,
    with_physical_offset,
)
from streammeta.brokers.rocketmq.formats.metadata import METADATA_FILE, MetadataTable, Queue
from streammeta.brokers.rocketmq.formats.names import SegmentType, index_path, segment_path
from streammeta.brokers.rocketmq.key_index_service import IndexSizes
from streammeta.brokers.rocketmq.message_file import FileSizes, MessageFile
from streammeta.brokers.rocketmq.segments.flat_file import FlatFilePlace
from streammeta.brokers.rocketmq.segments.storage import TimeBounds
from streammeta.client import StreamClient
from tests.brokers.rocketmq_messages import HOST, STORED_MS, LocalMessages, key, message, tags
from tests.kit.memory_stores import MemoryKeeper
from tests.kit.real_cluster import raise_level, running_cluster
from tests.kit.tools import JavaPeer, java_peer

pytestmark = pytest.mark.process
QUEUE = Queue("b", "P", 0)
COUNT = 120
CONFIG = StoreConfig(
    FileSizes(4000, 1000), IndexSizes(50, 500), PoolConfig(linger_s=0.01), GroupCommit(count=40)
)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> JavaPeer:
    return java_peer("rocketmq", tmp_path_factory.mktemp("classes"))


def _asked(peer: JavaPeer, root: Path, work: Path, *lines: str) -> list[str]:
    script = work / "script"
    script.write_text("\n".join(lines))
    return peer.run(str(root), "c", "b", str(script))


def test_released_classes_read_the_view(peer: JavaPeer, tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        raise_level(cluster, 3)
        stored = asyncio.run(_view(cluster.endpoints, cluster.store_uri, tmp_path / "view"))
    times = [
        f"time P 0 {STORED_MS + at} {bound}"
        for at in (-1, 0, 50, 119, 120)
        for bound in ("LOWER", "UPPER")
    ]
    asked = ("read P 0", *times, f"key P {key(0)}", f"key P {key(77)}", "key P none")
    read, *rest = _asked(peer, tmp_path / "view", tmp_path, *asked)
    assert [bytes.fromhex(word) for word in read.split()] == stored
    offsets = [int(word) for word in rest[: len(times)]]
    assert offsets == [0, 0, 0, 0, 50, 50, 119, 119, 120, 120]
    places = [physical_offset_of(stored) for stored in stored]
    found = [[int(word) for word in line.split()] for line in rest[len(times) :]]
    assert found == [places[0:10], places[70:80], []]


async def _view(endpoints: list[str], bucket: str, directory: Path) -> list[bytes]:
    async with await StreamClient.open(endpoints, bucket, node_id=1) as client:
        store = await QueueStore.open(client, "c", "b", CONFIG)
        dispatcher = await store.dispatcher("P", 0, LocalMessages("P", 0, COUNT))
        await dispatcher.file.init_offset(0)
        while dispatcher.file.commit_offset < COUNT:
            await dispatcher.dispatch(force=True)
        await render(store, "c", directory)
        found = await dispatcher.file.read(0, COUNT)
        await store.close()
        return [stored.data for stored in found]


@dataclass
class _RandomMessages:
    """A local queue of messages that a seed determines; times ascend, some are equal."""

    rng: random.Random
    topic: str
    queue_id: int
    max_offset: int
    min_offset: int = 0
    messages: list[LocalMessage] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        now_ms = STORED_MS
        for offset in range(self.max_offset):
            now_ms += self.rng.choice((0, 0, 1, 7))
            self.times.append(now_ms)
            kind = f"Tag{self.rng.randrange(5)}"
            keys = {f"k{self.rng.randrange(25)}" for _ in range(self.rng.randrange(3))}
            encoded = encode_message(
                Message(
                    topic=self.topic,
                    body=self.rng.randbytes(self.rng.choice((1, 40, 600))),
                    queue_id=self.queue_id,
                    queue_offset=offset,
                    born_timestamp_ms=now_ms,
                    born_host=HOST,
                    store_timestamp_ms=now_ms,
                    store_host=HOST,
                    properties={"TAGS": kind} | ({"KEYS": " ".join(sorted(keys))} if keys else {}),
                )
            )
            self.messages.append(LocalMessage(encoded, java_hash(kind)))

    def offset_at(self, timestamp_ms: int) -> int:
        return bisect_left(self.times, timestamp_ms)

    def is_split(self, timestamp_ms: int, items_a_segment: int) -> bool:
        """Whether the messages of a time are in more than one segment."""
        first, end = self.offset_at(timestamp_ms), bisect_right(self.times, timestamp_ms)
        return first // items_a_segment < (end - 1) // items_a_segment

    def read(self, offset: int, count: int) -> list[LocalMessage]:
        return self.messages[offset : offset + count]


@dataclass
class _Asked:
    """Lines for the peer, and what ours answers to the same; hex for messages."""

    lines: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def add(self, line: str, answer: str) -> None:
        self.lines.append(line)
        self.answers.append(answer)


async def _random_view(
    endpoints: list[str], bucket: str, rng: random.Random, directory: Path
) -> _Asked:
    """Dispatch random messages, expire some, render the view; ask ours what the peer is asked."""
    async with await StreamClient.open(endpoints, bucket, node_id=1) as client:
        store = await QueueStore.open(client, "c", "b", CONFIG)
        local = _RandomMessages(rng, "P", 0, rng.randrange(200, 500))
        dispatcher = await store.dispatcher("P", 0, local)
        await dispatcher.file.init_offset(0)
        while dispatcher.file.commit_offset < local.max_offset:
            await dispatcher.dispatch(force=True)
        if rng.random() < 0.7:
            await store.expire(rng.choice(local.times[: local.max_offset * 3 // 4]))
        await render(store, "c", directory)
        asked, fetcher = _Asked(), store.fetcher
        end, first = local.max_offset, await dispatcher.file.first_offset()
        offsets = [0, first, end - 1, end, end + 1, *(rng.randrange(end) for _ in range(20))]
        for offset in offsets:
            count = rng.choice((1, 2, 32, 100))
            found = await fetcher.fetch(QUEUE, offset, count)
            messages = " ".join(entry.data.hex() for entry in found.messages)
            asked.add(
                f"fetch P 0 {offset} {count}", f"{found.status} {found.next_offset} {messages}"
            )
        # The peer's search by time reads items whose messages have expired, and fails. Of messages
        # of one time in two segments it finds the first of the second; ours are the first of all.
        for _ in range(0 if first else 20):
            at = rng.choice(local.times) + rng.choice((0, 0, 1))
            if local.is_split(at, CONFIG.files.consume_queue // ITEM_SIZE):
                continue
            for bound in ("LOWER", "UPPER"):
                offset = await fetcher.offset_at(QUEUE, at, upper=bound == "UPPER")
                asked.add(f"time P 0 {at} {bound}", str(offset))
        for number in range(26):
            hits = await fetcher.query("P", f"k{number}", 1000)
            asked.add(f"query P k{number}", " ".join(sorted(digest.hex() for digest in hits)))
        await store.close()
        return asked


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_random_messages_are_found_alike_after_expiry_too(
    peer: JavaPeer, tmp_path: Path, rounds: int
) -> None:
    first = int(os.environ.get("STREAMMETA_SEED", "1"))
    for seed in range(first, first + rounds):
        work = tmp_path / str(seed)
        work.mkdir()
        with running_cluster(work, 1) as cluster:
            raise_level(cluster, 3)
            asked = asyncio.run(
                _random_view(
                    cluster.endpoints, cluster.store_uri, random.Random(seed), work / "view"
                )
            )
        answers = _asked(peer, work / "view", work, *asked.lines)
        for line, ours, theirs in zip(asked.lines, asked.answers, answers, strict=True):
            assert _is_alike(line, ours.split(), theirs.split()), f"seed {seed}: {line}"


def _is_alike(line: str, ours: list[str], theirs: list[str]) -> bool:
    """Whether both found the same; the peer may end a read early, at the end of a segment."""
    if line.startswith("query"):
        return ours == sorted(theirs)
    if theirs[0] != "FOUND":
        return ours == theirs
    offset, found = int(line.split()[3]), theirs[2:]
    return (
        ours[0] == "FOUND"
        and found == ours[2:][: len(found)]
        and (int(theirs[1]) == offset + len(found) > offset)
    )


class _File:
    """A segment that the peer wrote; nothing is written to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def size(self) -> int | None:
        return self._path.stat().st_size

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        raise AssertionError("the peer's files are only read")

    async def read(self, position: int, length: int) -> bytes:
        return self._path.read_bytes()[position : position + length]

    async def seal(self) -> None:
        raise AssertionError("the peer's files are only read")

    async def reload(self) -> int | None:
        raise AssertionError("the peer's files are only read")

    async def destroy(self) -> None:
        raise AssertionError("the peer's files are only read")


class _Files:
    def __init__(self, root: Path) -> None:
        self._root = root

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> _File:
        return _File(self._root / "files" / segment_path("c", path, kind, base_offset))


async def test_what_released_classes_wrote_is_read(peer: JavaPeer, tmp_path: Path) -> None:
    root = tmp_path / "peer"
    root.mkdir()
    lines = [
        f"{java_hash(tags(at))} {STORED_MS + at} {key(at)} {message('P', 0, at).hex()}"
        for at in range(COUNT)
    ]
    (tmp_path / "messages").write_text("\n".join(lines))
    asked = (f"write P 0 {tmp_path / 'messages'}", "upload")
    assert _asked(peer, root, tmp_path, *asked) == ["true", "uploaded"]
    table = MetadataTable.decode((root / METADATA_FILE).read_text())
    place = FlatFilePlace(_Files(root), MemoryKeeper(table), lambda: STORED_MS)
    file = MessageFile(place, QUEUE, CONFIG.files)
    await file.open()
    found = await file.read(0, COUNT)
    wanted, at = [], 0
    for offset in range(COUNT):
        wanted.append(with_physical_offset(message("P", 0, offset), at))
        at += len(wanted[-1])
    assert [stored.data for stored in found] == wanted
    assert [row.tags_code for row in found] == [java_hash(tags(number)) for number in range(COUNT)]
    assert await file.offset_at(STORED_MS + 30) == 30
    await _index_is_read(root, table, [physical_offset_of(data) for data in wanted])


async def _index_is_read(root: Path, table: MetadataTable, places: list[int]) -> None:
    (one,) = table.segments_of(index_path("b"), SegmentType.INDEX)
    segment = _Files(root).segment(one.path, one.kind, one.base_offset)
    header = IndexHeader.decode(await segment.read(0, 28))
    assert header.item_count == COUNT
    items = await query_compacted(segment.read, 50, "P", key(33), 99, header.begin_ms)
    assert sorted(item.offset for item in items) == places[30:40]
