"""Pulsar's released offloader reads what is written here, and the other way, in one bucket."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from streammeta.brokers.pulsar.blobs import BlobError, NoSuchBlobError
from streammeta.brokers.pulsar.bucket_blobs import BucketBlobs
from streammeta.brokers.pulsar.offloader import NoSuchLedgerError, Offloader
from tests.conformance.pulsar_offload import MemoryLedger
from tests.kit.java_peers import JavaPeer, java_peer
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
    return [b"" if one == "-" else bytes.fromhex(one) for one in line.split(" ")]


@pytest.mark.parametrize(
    "count",
    [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
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
        entries.write_text("".join(one.data.hex() + "\n" for one in ledger.entries))
        lines.append(f"write {ledger.ledger_id} {uuid} {entries}")
    answers = _asked(peer, server, tmp_path, lines)
    for number, (ledger, _) in enumerate(ours):
        told, whole, part = answers[3 * number : 3 * number + 3]
        first, last = ranges[number]
        bodies = [one.data for one in ledger.entries]
        assert told == f"{len(bodies) - 1} {sum(map(len, bodies))} 1 1 1 CRC32C", f"seed {seed}"
        assert _read_back(whole) == bodies, f"seed {seed}"
        assert _read_back(part) == bodies[first : last + 1], f"seed {seed}"
    assert answers[3 * count :] == ["written"] * count
    for ledger, uuid in theirs:
        handle = await offloader.open(ledger.ledger_id, uuid)
        last = len(ledger.entries) - 1
        assert (handle.metadata.last_entry, handle.metadata.length) == (
            last,
            sum(len(one.data) for one in ledger.entries),
        )
        assert await handle.read(0, last) == ledger.entries, f"seed {seed}"
        first = rng.randrange(last + 1)
        assert await handle.read(first, last) == ledger.entries[first:], f"seed {seed}"


async def test_equal_ledgers_become_equal_bytes(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    ledger, _ = _random_ledger(random.Random(7), 0)
    ledger = MemoryLedger(9, [one.data or b"x" for one in ledger.entries] * 3)
    ours, theirs = (str(UUID(int=number, version=4)) for number in (1, 2))
    await Offloader(blobs, 5 * MIB).offload(ledger, ours, EXTRA)
    entries = tmp_path / "entries"
    entries.write_text("".join(one.data.hex() + "\n" for one in ledger.entries))
    assert _asked(peer, server, tmp_path, [f"write 9 {theirs} {entries}"]) == ["written"]
    one, other = [await blobs.read(f"{uuid}-ledger-9", 0, 1 << 30) for uuid in (ours, theirs)]
    assert one == other
    there = await blobs.metadata(f"{theirs}-ledger-9-index")
    here = await blobs.metadata(f"{ours}-ledger-9-index")
    assert {key: there[key.lower()] for key in here} == here


async def test_what_one_side_deletes_is_gone_for_the_other(
    peer: JavaPeer, server: S3Endpoint, blobs: BucketBlobs, tmp_path: Path
) -> None:
    uuid, other = (str(UUID(int=number, version=4)) for number in (3, 4))
    offloader, ledger = Offloader(blobs, 5 * MIB), MemoryLedger(11, [b"a", b"b"])
    await offloader.offload(ledger, uuid, EXTRA)
    await offloader.offload(ledger, other, EXTRA)
    assert {(11, uuid), (11, other)} <= set(await offloader.held())
    assert _asked(peer, server, tmp_path, [f"delete 11 {uuid}"]) == ["deleted"]
    with pytest.raises(NoSuchLedgerError):
        await offloader.open(11, uuid)
    await offloader.delete(11, other)
    await offloader.delete(11, other)
    assert not {(11, uuid), (11, other)} & set(await offloader.held())


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
