"""Pulsar's released offloader reads what is written here, and the other way, in one bucket."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from streammeta.brokers.pulsar.blobs.blobs import BlobError, NoSuchBlobError
from streammeta.brokers.pulsar.blobs.bucket_blobs import BucketBlobs
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.formats.ledger_values import (
    LedgerInfo,
    OffloadContext,
    OffloadSegment,
)
from streammeta.brokers.pulsar.formats.object_names import VERSION_KEY
from streammeta.brokers.pulsar.formats.read_errors import NoSuchLedgerError
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.brokers.pulsar.segments import Segments
from streammeta.brokers.pulsar.streaming import OfferResult, StreamingSegment
from streammeta.storage.errors import PayloadError
from tests.conformance.pulsar_offload import MemoryLedger
from tests.kit.tools import JavaPeer, java_peer
from tests.storage.s3_servers import S3Endpoint, running_moto

pytestmark = [pytest.mark.process, pytest.mark.s3]
BUCKET = "ledgers"
MIB = 1 << 20
EXTRA = {"ManagedLedgerName": "public/default/persistent/topic"}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> JavaPeer:
    return java_peer("pulsar", tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Endpoint]:
    with running_moto() as found:
        found.create_bucket(BUCKET)
        yield found


@pytest.fixture
def blobs(server: S3Endpoint) -> Iterator[BucketBlobs]:
    found = BucketBlobs.of(server.uri(BUCKET))
    yield found
    found.close()


def _asked(peer: JavaPeer, server: S3Endpoint, work: Path, lines: list[str]) -> list[str]:
    script = work / "script"
    script.write_text("\n".join(lines))
    return peer.run(server.url, BUCKET, str(script))


def _random_ledger(rng: random.Random, number: int) -> tuple[MemoryLedger, str]:
    """Return a ledger of 1 entry or many, some of them empty, some near the size of a block."""
    largest = rng.choice((0, 30, 3000, 3 * MIB)) + 1
    count = rng.choice((1, 2, 101, 700)) if largest < MIB else rng.randint(1, 6)
    bodies = [rng.randbytes(rng.randrange(largest)) for _ in range(count - 1)]
    bodies.append(rng.randbytes(largest))
    ledger_id = rng.randrange(1 << 40) * 100 + number
    return MemoryLedger(ledger_id, bodies), str(UUID(int=rng.getrandbits(128), version=4))


def _read_back(line: str) -> list[bytes]:
    return [b"" if word == "-" else bytes.fromhex(word) for word in line.split(" ")]


@pytest.mark.parametrize(
    "count",
    [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_random_ledgers_are_read_by_the_other_side(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path, count: int
) -> None:
    seed = int(os.environ.get("STREAMMETA_SEED", "1"))
    rng = random.Random(seed)
    offloader = Offloader(blobs, 5 * MIB)
    ledgers = [_random_ledger(rng, number) for number in range(2 * count)]
    ours, theirs = ledgers[:count], ledgers[count:]
    lines, ranges = [], []
    for ledger, uuid in ours:
        await offloader.offload(ledger, uuid, EXTRA)
        first, last = sorted(rng.choices(range(len(ledger.entries)), k=2))
        ranges.append((first, last))
        end = len(ledger.entries) - 1
        lines += [
            f"metadata {ledger.ledger_id} {uuid}",
            f"read {ledger.ledger_id} {uuid} 0 {end}",
            f"read {ledger.ledger_id} {uuid} {first} {last}",
        ]
    for ledger, uuid in theirs:
        entries = tmp_path / f"entries-{ledger.ledger_id}"
        entries.write_text("".join(entry.data.hex() + "\n" for entry in ledger.entries))
        lines.append(f"write {ledger.ledger_id} {uuid} {entries}")
    answers = _asked(peer, server, tmp_path, lines)
    for number, (ledger, _) in enumerate(ours):
        told, whole, part = answers[3 * number : 3 * number + 3]
        first, last = ranges[number]
        bodies = [entry.data for entry in ledger.entries]
        assert told == f"{len(bodies) - 1} {sum(map(len, bodies))} 1 1 1 CRC32C", f"seed {seed}"
        assert _read_back(whole) == bodies, f"seed {seed}"
        assert _read_back(part) == bodies[first : last + 1], f"seed {seed}"
    assert answers[3 * count :] == ["written"] * count
    for ledger, uuid in theirs:
        handle = await offloader.open(ledger.ledger_id, uuid)
        last = len(ledger.entries) - 1
        assert (handle.metadata.last_entry, handle.metadata.length) == (
            last,
            sum(len(entry.data) for entry in ledger.entries),
        )
        assert await handle.read(0, last) == ledger.entries, f"seed {seed}"
        first = rng.randrange(last + 1)
        assert await handle.read(first, last) == ledger.entries[first:], f"seed {seed}"


async def test_equal_ledgers_become_equal_bytes(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    ledger, _ = _random_ledger(random.Random(7), 0)
    ledger = MemoryLedger(9, [entry.data or b"x" for entry in ledger.entries] * 3)
    ours, theirs = (str(UUID(int=number, version=4)) for number in (1, 2))
    await Offloader(blobs, 5 * MIB).offload(ledger, ours, EXTRA)
    entries = tmp_path / "entries"
    entries.write_text("".join(entry.data.hex() + "\n" for entry in ledger.entries))
    assert _asked(peer, server, tmp_path, [f"write 9 {theirs} {entries}"]) == ["written"]
    one, other = [await blobs.read(f"{uuid}-ledger-9", 0, 1 << 30) for uuid in (ours, theirs)]
    assert one == other
    there = await blobs.metadata(f"{theirs}-ledger-9-index")
    here = await blobs.metadata(f"{ours}-ledger-9-index")
    assert {key: there[key.lower()] for key in here} == here


def _random_rows(rng: random.Random) -> list[tuple[int, Entry]]:
    """Return entries of one ledger or several that follow each other, in several blocks."""
    rows = list[tuple[int, Entry]]()
    first = rng.choice((0, 3, 127, 128, 129, 5000))
    for ledger_id in sorted(rng.sample(range(1 << 20), rng.choice((1, 1, 3)))):
        largest = rng.choice((0, 40, 3000, 2 * MIB))
        count = rng.choice((1, 2, 400)) if largest < MIB else rng.randint(4, 9)
        for at in range(first, first + count):
            rows.append((ledger_id, Entry(at, rng.randbytes(rng.randint(0, largest)))))
        first = 0
    return rows


async def _stream(blobs: BucketBlobs, uuid: str, rows: list[tuple[int, Entry]]) -> None:
    ledger_id, first = rows[0]
    segment = StreamingSegment(blobs, uuid, ledger_id, first.entry_id, extra=EXTRA)
    for ledger_id, entry in rows:
        while segment.offer(ledger_id, entry) is not OfferResult.SUCCESS:
            await segment.upload_blocks()
    await segment.finish()


def _file_of(work: Path, uuid: str, rows: list[tuple[int, Entry]]) -> Path:
    path = work / f"rows-{uuid}"
    lines = [f"{ledger} {entry.entry_id} {entry.data.hex() or '-'}\n" for ledger, entry in rows]
    path.write_text("".join(lines))
    return path


def _by_id(line: str) -> dict[int, bytes]:
    pairs = (word.split(":") for word in line.split(" "))
    return {int(entry_id): bytes.fromhex(data) for entry_id, data in pairs}


@pytest.mark.parametrize(
    "count",
    [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_segments_that_are_written_here_are_read_by_the_peer(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path, count: int
) -> None:
    """The peer gives a segment from its first entry on, and the last segment first."""
    seed = int(os.environ.get("STREAMMETA_SEED", "1"))
    rng = random.Random(seed)
    lines, wanted = list[str](), list[dict[int, bytes]]()
    for _ in range(count):
        uuid, rows = str(UUID(int=rng.getrandbits(128), version=4)), _random_rows(rng)
        await _stream(blobs, uuid, rows)
        for ledger_id in {number for number, _ in rows}:
            entries = {entry.entry_id: entry.data for ledger, entry in rows if ledger == ledger_id}
            low, high = sorted(rng.choices(list(entries), k=2))
            lines.append(f"segments {ledger_id} {min(entries)} {max(entries)} {uuid}")
            lines.append(f"segments {ledger_id} {low} {high} {uuid}")
            wanted += [entries, {at: data for at, data in entries.items() if at <= high}]
    uuids = [str(UUID(int=rng.getrandbits(128), version=4)) for _ in range(3)]
    entries = {at: rng.randbytes(20) for at in range(400)}
    for number, (begin, end) in enumerate(((0, 128), (128, 300), (300, 400))):
        rows = [(6, Entry(at, entries[at])) for at in range(begin, end)]
        await _stream(blobs, uuids[number], rows)
    lines.append(f"segments 6 0 399 {' '.join(uuids)}")
    wanted.append(entries)
    answers = _asked(peer, server, tmp_path, lines)
    assert [_by_id(answer) for answer in answers] == wanted, f"seed {seed}"


async def test_segments_that_the_peer_writes_are_read_here(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    """Each ledger has less than a block: of more than that the peer loses where it lies."""
    rng = random.Random(5)
    uuids = [str(UUID(int=rng.getrandbits(128), version=4)) for _ in range(3)]
    pieces = [
        [(ledger, Entry(at, rng.randbytes(rng.randrange(size)))) for ledger, at in places]
        for size, places in (
            (40, [(2, at) for at in range(300)]),
            (9000, [(2, at) for at in range(300, 500)] + [(4, at) for at in range(100)]),
            (3, [(4, 100), (5, 0), (5, 1), (11, 0)]),
        )
    ]
    lines = [
        f"stream {uuid} {_file_of(tmp_path, uuid, rows)}"
        for uuid, rows in zip(uuids, pieces, strict=True)
    ]
    assert _asked(peer, server, tmp_path, lines) == ["2 299", "4 99", "11 0"]
    segments = Segments(blobs)
    for ledger_id in (2, 4, 5, 11):
        entries = [entry for rows in pieces for number, entry in rows if number == ledger_id]
        handle = await segments.open(ledger_id, uuids)
        assert (handle.first_entry, handle.last_entry) == (0, len(entries) - 1)
        assert await handle.read(0, len(entries) - 1) == entries
        low = len(entries) // 3
        assert await handle.read(low, len(entries) - 1) == entries[low:]


async def test_equal_segments_become_equal_bytes(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    rng = random.Random(6)
    rows = [(3, Entry(at, rng.randbytes(at))) for at in range(120)]
    rows += [(8, Entry(at, rng.randbytes(50))) for at in range(2)]
    ours, theirs = (str(UUID(int=number, version=4)) for number in (21, 22))
    await _stream(blobs, ours, rows)
    lines = [f"stream {theirs} {_file_of(tmp_path, theirs, rows)}"]
    assert _asked(peer, server, tmp_path, lines) == ["8 1"]
    for name in ("", "-index"):
        one, other = [await blobs.read(f"{uuid}{name}", 0, 1 << 30) for uuid in (ours, theirs)]
        assert one == other
        here, there = [await blobs.metadata(f"{uuid}{name}") for uuid in (ours, theirs)]
        assert here[VERSION_KEY] == there[VERSION_KEY]


async def test_blocks_that_the_peer_puts_elsewhere_than_its_index_says_are_refused(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    """The peer leaves the first entry out of the length of a full block."""
    rows = [(5, Entry(at, bytes([at]) * 300_000)) for at in range(40)]
    uuid = str(UUID(int=23, version=4))
    lines = [f"stream {uuid} {_file_of(tmp_path, uuid, rows)}"]
    assert _asked(peer, server, tmp_path, lines) == ["5 39"]
    handle = await Segments(blobs).open(5, [uuid])
    with pytest.raises(PayloadError, match="entry"):
        await handle.read(0, 39)
    assert await handle.read(0, 9) == [entry for _, entry in rows[:10]]


async def test_a_segment_that_one_side_deletes_is_gone_for_the_other(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    uuid, other = (str(UUID(int=number, version=4)) for number in (24, 25))
    segments = Segments(blobs)
    for text in (uuid, other):
        await _stream(blobs, text, [(1, Entry(0, b"a"))])
    third = str(UUID(int=26, version=4))
    lines = [f"stream {third} {_file_of(tmp_path, third, [(1, Entry(1, b'b'))])}"]
    lines += [f"drop {uuid}", f"drop {third}"]
    assert _asked(peer, server, tmp_path, lines) == ["1 1", "dropped", "dropped"]
    with pytest.raises(NoSuchLedgerError):
        await segments.open(1, [uuid])
    await segments.delete(other)
    await segments.delete(other)
    left = {name[:36] for name in await blobs.names()}
    assert not {uuid, other, third} & left


def test_segments_in_a_list_are_the_peers(
    peer: JavaPeer, server: S3Endpoint, tmp_path: Path
) -> None:
    uuids = [str(UUID(int=number << 60 | 7, version=4)) for number in (0x8F, 0x11)]
    segments = [
        OffloadSegment(uuids[0], True, 5, 6, 41, "aws-s3", {"bucket": "b", "region": "r"}),
        OffloadSegment(uuids[1], False, 9, driver="aws-s3"),
    ]
    context = OffloadContext("", segments=tuple(segments))
    info = LedgerInfo(1 << 40, 42, 4200, 8, context)
    encoded = info.encode().hex()
    (answer,) = _asked(peer, server, tmp_path, [f"info {encoded}"])
    assert answer == f"{uuids[0]} 41 aws-s3 {uuids[1]} 0 aws-s3 {encoded}"
    assert LedgerInfo.decode(bytes.fromhex(encoded)) == info


async def test_what_one_side_deletes_is_gone_for_the_other(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    uuid, other = (str(UUID(int=number, version=4)) for number in (3, 4))
    offloader, ledger = Offloader(blobs, 5 * MIB), MemoryLedger(11, [b"a", b"b"])
    await offloader.offload(ledger, uuid, EXTRA)
    await offloader.offload(ledger, other, EXTRA)
    assert {(11, uuid), (11, other)} <= set(await offloader.list_copies())
    assert _asked(peer, server, tmp_path, [f"delete 11 {uuid}"]) == ["deleted"]
    with pytest.raises(NoSuchLedgerError):
        await offloader.open(11, uuid)
    await offloader.delete(11, other)
    await offloader.delete(11, other)
    assert not {(11, uuid), (11, other)} & set(await offloader.list_copies())


async def test_an_upload_that_is_dropped_leaves_nothing(blobs: BucketBlobs) -> None:
    upload = await blobs.begin("dropped", {})
    await upload.part(1, b"abc")
    await upload.abort()
    await upload.abort()
    with pytest.raises(NoSuchBlobError):
        await blobs.metadata("dropped")
    with pytest.raises(NoSuchBlobError):
        await blobs.read("dropped", 0, 1)
    with pytest.raises(BlobError):
        await upload.complete()
    await blobs.put("kept", b"abc", {"role": "data"})
    assert await blobs.read("kept", 1, 9) == b"bc"
    assert await blobs.read("kept", 3, 1) == b""
    assert await blobs.metadata("kept") == {"role": "data"}
    await blobs.delete(["kept"])
