"""Golden directories: data directories as each version wrote them, packed, with what they hold.

Each is written once, by the version it is named after, and never changed: it has a log with every
kind of record and with control batches, two checkpoints on the way, and a torn tail.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import get_args

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.directory import LOCK_NAME, format_directory
from streammeta.controller.journal.journal import Journal
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.messages import Batch, BatchKind, encode_voters
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import decode_records
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import (
    FrozenCheckpoint,
    snapshot_check,
)
from streammeta.controller.runtime.persistence.state_hashes import RollingHash
from tests.metadata.map_pair import Pair
from tests.metadata.random_requests import MAKERS, RandomRequests

ROOT = Path(__file__).parent
PACKED, FACTS = "data.tar.xz", "facts.json"
CLUSTER, NODE = ClusterId("golden"), NodeId(3)
_KEY = ReplicaKey(NODE, DirectoryId("0f0e0d0c-0b0a-4908-8706-050403020100"))
_OTHERS = (Voter(ReplicaKey(NodeId(1)), "h1:9091"), Voter(ReplicaKey(NodeId(2)), "[::1]:9092"))
VOTERS = VoterSet((*_OTHERS, Voter(_KEY, "h3:9093", "h3:9090")))
_SEED, _ENTRIES_MIN, _ENTRIES_MAX = 2, 400, 2_000
_EVEN_SHARE = 0.3
_SEGMENT_BYTES = 16 << 10
_TORN_BYTES = 17


@dataclass(frozen=True, slots=True)
class Facts:
    """Contents of a directory; hashes are hexadecimal."""

    version: str
    level: int
    records: Sequence[str]
    """Kinds of records in the log, sorted."""
    checkpoints: Sequence[int]
    """Their end offsets."""
    end_offset: int
    state_hash: str
    log_hash: str


def versions() -> list[str]:
    """Return the versions that there is a directory of."""
    return sorted(path.parent.name for path in ROOT.glob(f"*/{FACTS}"))


def unpack(version: str, to: Path) -> Facts:
    """Unpack the directory of a version; return what it holds."""
    with tarfile.open(ROOT / version / PACKED) as packed:
        packed.extractall(to, filter="data")
    return Facts(**json.loads((ROOT / version / FACTS).read_text()))


def open_directory(directory: Path) -> Journal:
    """Open an unpacked directory, as a controller does."""
    return Journal.open(
        directory,
        cluster_id=CLUSTER,
        node_id=NODE,
        read_snapshot_voters=snapshot_check(CLUSTER),
        segment_bytes=_SEGMENT_BYTES,
        reserve_bytes=0,
    )


def write_golden(version: str, scratch: Path) -> Path:
    """Write the directory of this version, and return its folder; `scratch` is an empty folder.

    Raises:
        FileExistsError: there is one: what a release wrote is not written again.
    """
    folder = ROOT / version
    folder.mkdir()
    facts = _write_directory(version, scratch)
    (folder / PACKED).write_bytes(_packed(scratch))
    (folder / FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n")
    return folder


def _write_directory(version: str, directory: Path) -> Facts:
    format_directory(
        directory,
        cluster_id=CLUSTER,
        node_id=NODE,
        bootstrap_voters=VOTERS,
        directory_id=_KEY.directory_id,
    )
    journal = open_directory(directory)
    journal.write_quorum_state(QuorumState(Epoch(9), _KEY, NODE))
    written = _Log(journal)
    entries = list(_entries())
    for number, payload in enumerate(entries):
        if number % (len(entries) // 3) == 0:
            written.change_voters()
        if number in (len(entries) // 3, 2 * len(entries) // 3):
            written.take_checkpoint()
        written.append(payload)
    journal.close()
    _tear(directory)
    return Facts(
        version=version,
        level=written.map.feature_level,
        records=sorted(written.kinds),
        checkpoints=written.checkpoints,
        end_offset=written.end_offset,
        state_hash=written.map.freeze().digest().hex(),
        log_hash=written.log_hash.value.hex(),
    )


class _Log:
    """The log, and the map that it makes; an epoch lasts from one change of the voters on."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._epoch = Epoch(0)
        self.map = ClusterMetadata()
        self.log_hash = RollingHash()
        self.end_offset = EndOffset(0)
        self.kinds: set[str] = set()
        self.checkpoints: list[int] = []

    def append(self, payload: bytes) -> None:
        records = decode_records(payload)
        self.kinds.update(type(record).__name__ for record in records)
        self.map.apply(self.end_offset, records)
        self.log_hash.extend(self.end_offset, payload)
        self._write(BatchKind.DATA, payload)

    def change_voters(self) -> None:
        self._epoch = Epoch(self._epoch + 2)
        self._write(BatchKind.CONTROL, encode_voters(VOTERS))

    def take_checkpoint(self) -> None:
        snapshot_id = SnapshotId(self.end_offset, self._epoch)
        writer = self._journal.snapshots.begin(snapshot_id)
        point = SnapshotPoint(snapshot_id, CLUSTER, VOTERS)
        FrozenCheckpoint(point, self.map.freeze(), self.log_hash.value).write(writer)
        writer.seal()
        self._journal.finish_snapshot(writer)
        self.checkpoints.append(snapshot_id.end_offset)

    def _write(self, kind: BatchKind, payload: bytes) -> None:
        batch = Batch(self.end_offset, self._epoch, kind, (payload,))
        self._journal.append([batch])
        self._journal.sync()
        self.end_offset = batch.end_offset


def _entries() -> Iterator[bytes]:
    """Yield entries until every kind of record was there."""
    rng = Random(_SEED)
    requests, pair = RandomRequests(rng), Pair()
    pair.begin(requests)
    wanted = {kind.__name__ for kind in get_args(rec.Record)}
    given = 0
    while wanted or given < _ENTRIES_MIN:
        for _, payload in pair.log[given:]:
            wanted -= {type(record).__name__ for record in decode_records(payload)}
            yield payload
        given = len(pair.log)
        if given > _ENTRIES_MAX:
            raise ValueError(f"{given} entries and none of {sorted(wanted)}; try another seed")
        pair.now += 50
        # Rare requests are as likely as others now and then, or some kinds would take long.
        is_even = rng.random() < _EVEN_SHARE
        asked = requests.make(rng.choice(MAKERS), pair.model) if is_even else None
        pair.write(asked or requests.any(pair.model))


def _tear(directory: Path) -> None:
    """Leave a batch at the end of the log that was not written to its end."""
    last = max(directory.glob("*.log"))
    whole = last.read_bytes()
    last.write_bytes(whole + whole[-4 * _TORN_BYTES : -_TORN_BYTES])


def _packed(directory: Path) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:xz") as packed:
        for path in sorted(directory.iterdir()):
            if path.name == LOCK_NAME:
                continue
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                packed.addfile(entry, file)
    return sink.getvalue()
