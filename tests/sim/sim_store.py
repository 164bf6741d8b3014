"""The state machine that the simulated quorum replicates: values with versions, lists, and a map.

Decides requests, applies records, undoes what was not committed, and writes snapshots whose bytes
differ on purpose from node to node. Its hash is kept incrementally, so that replicas can be
compared after every batch.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, field
from typing import BinaryIO

from controller.ids import DirectoryId, NodeId
from controller.journal.errors import BadSnapshotError
from controller.quorum.messages import SnapshotId
from controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.linearizability.models import (
    CommitRange,
    Committed,
    Delete,
    End,
    Get,
    KVAnswer,
    NotAtEnd,
    Objects,
    Put,
    ReadEnd,
    ReadObjects,
)
from tests.sim.sim_check import check
from tests.sim.sim_map import MapAnswer, MapReplica, MapSettled, MapWrite

Request = Get | Put | Delete | CommitRange | ReadEnd | ReadObjects | MapWrite | MapSettled
Answer = KVAnswer | Committed | NotAtEnd | End | Objects | MapAnswer
Held = tuple[str, int] | tuple[int, ...]
"""A key's value and version, or a list's object ids."""

_ABSENT: Held = ("", 0)


@dataclass(frozen=True, slots=True)
class StoreImage:
    """An immutable copy of a store, with the voters as of its end."""

    snapshot_id: SnapshotId
    voters: VoterSet
    held: dict[str, Held]
    hash: int
    map_image: int = 0
    """Names the image of the map, 0 if it has never been written to."""
    map_hash: bytes = field(default=b"", compare=False)


class Store:
    """One replica's state."""

    def __init__(self) -> None:
        self.end_offset = 0
        """Everything below is applied, committed or not."""
        self.hash = 0
        self._held: dict[str, Held] = {}
        self._undo: list[tuple[int, str, Held | None]] = []
        self._replica: MapReplica | None = None

    @property
    def replica(self) -> MapReplica:
        """The map; most runs have none, so it is made when it is first asked for."""
        if self._replica is None:
            self._replica = MapReplica()
        return self._replica

    # -- requests

    def decide(
        self, key: str, request: Request, offset: int, now_ms: int = 0
    ) -> tuple[Answer, bytes | None]:
        """Answer a request; a mutation's record will take `offset`."""
        match request:
            case MapWrite():
                return self.replica.decide(request.request, now_ms, offset)
            case Put(value=value):
                held = self._value(key)
                if not _may_write(held, request.expected_version):
                    return _refused(held), None
                answer = KVAnswer(True, value, offset + 1)
                return answer, f"put {key} {value}".encode()
            case Delete():
                held = self._value(key)
                if held == _ABSENT or not _may_write(held, request.expected_version):
                    return _refused(held), None
                return KVAnswer(True, held[0], held[1]), f"delete {key}".encode()
            case CommitRange(object_id=object_id, start=start):
                objects = self._list(key)
                if object_id in objects:
                    return Committed(), None
                if start != len(objects):
                    return NotAtEnd(), None
                return Committed(), f"commit {key} {object_id}".encode()
            case _:
                return self.query(key, request), None

    def query(self, key: str, request: Request) -> Answer:
        """Answer a read."""
        match request:
            case ReadEnd():
                return End(len(self._list(key)))
            case ReadObjects():
                return Objects(self._list(key))
            case MapSettled():
                return MapAnswer(None)
            case _:
                value, version = self._value(key)
                return KVAnswer(True, value if version else None, version)

    def _value(self, key: str) -> tuple[str, int]:
        return self._held.get(key, _ABSENT)  # type: ignore[return-value]

    def _list(self, key: str) -> tuple[int, ...]:
        return self._held.get(key, ())  # type: ignore[return-value]

    # -- records

    def held(self, key: str) -> Held | None:
        """What is stored under a key, None if nothing."""
        return self._held.get(key)

    def hold(self, key: str, held: Held) -> None:
        """Store something under a key, outside the log."""
        self._set(key, self._held.get(key), held)

    def apply(self, offset: int, record: bytes, *, undoable: bool = False) -> str:
        """Apply one record, which must be the next; return the key it changed."""
        kind, key, *rest = record.decode().split(" ")
        old = self._held.get(key)
        if undoable:
            self._undo.append((offset, key, old))
        if kind == "put":
            self._set(key, old, (rest[0], offset + 1))
        elif kind == "delete":
            self._set(key, old, None)
        elif kind == "map":
            self._set(key, old, (f"{zlib.crc32(record, offset):08x}", offset + 1))
            self.replica.apply(offset, rest[0].encode(), undoable=undoable)
        else:
            objects = self._list(key)
            check(int(rest[0]) not in objects, "applied once", f"{record!r} at {offset}")
            self._set(key, old, (*objects, int(rest[0])))
        self.end_offset = offset + 1
        return key

    def _set(self, key: str, old: Held | None, new: Held | None) -> None:
        if old is not None:
            self.hash ^= _hash(key, old)
        if new is None:
            self._held.pop(key, None)
        else:
            self.hash ^= _hash(key, new)
            self._held[key] = new

    def undo_to(self, end_offset: int) -> None:
        """Take back what was applied from `end_offset` on."""
        while self._undo and self._undo[-1][0] >= end_offset:
            _, key, old = self._undo.pop()
            self._set(key, self._held.get(key), old)
        if self._replica is not None:
            self._replica.undo_to(end_offset)
        self.end_offset = end_offset

    def forget_undo(self, end_offset: int) -> None:
        """What lies below `end_offset` is committed."""
        keep = 0
        while keep < len(self._undo) and self._undo[keep][0] < end_offset:
            keep += 1
        del self._undo[:keep]
        if self._replica is not None:
            self._replica.forget_undo(end_offset)

    # -- snapshots

    def image(self, snapshot_id: SnapshotId, voters: VoterSet) -> StoreImage:
        """Copy the state at the snapshot's end, below which everything must be committed."""
        held, state_hash = dict(self._held), self.hash
        for offset, key, old in reversed(self._undo):
            if offset < snapshot_id.end_offset:
                break
            if key in held:
                state_hash ^= _hash(key, held.pop(key))
            if old is not None:
                state_hash ^= _hash(key, old)
                held[key] = old
        name, map_hash = 0, b""
        if self._replica is not None:
            name, map_hash = self._replica.image(snapshot_id.end_offset)
        return StoreImage(snapshot_id, voters, held, state_hash, name, map_hash)

    def load(self, image: StoreImage) -> None:
        """Replace everything."""
        self._held = dict(image.held)
        self._undo.clear()
        self._replica = MapReplica.load(image.map_image) if image.map_image else None
        self.hash = image.hash
        self.end_offset = image.snapshot_id.end_offset


def _may_write(held: tuple[str, int], expected_version: int | None) -> bool:
    return expected_version is None or expected_version == held[1]


def _refused(held: tuple[str, int]) -> KVAnswer:
    return KVAnswer(False, held[0] if held[1] else None, held[1])


def _hash(key: str, held: Held) -> int:
    return zlib.crc32(f"{key}={held}".encode())


# -- files


def encode_image(image: StoreImage, rng: random.Random, padding: int = 60) -> bytes:
    """Write an image: entries in any order, less than `padding` fill, a checksum at the end."""
    keys = sorted(image.held)
    rng.shuffle(keys)
    fields = {
        "end_offset": image.snapshot_id.end_offset,
        "epoch": image.snapshot_id.epoch,
        "voters": [
            [voter.key.node_id, voter.key.directory_id, voter.endpoint] for voter in image.voters
        ],
        "held": [[key, *image.held[key]] for key in keys],
        "map": image.map_image,
        "padding": "." * rng.randrange(padding),
    }
    body = json.dumps(fields).encode()
    return body + zlib.crc32(body).to_bytes(4, "big")


def decode_image(data: bytes) -> StoreImage:
    """Read what `encode_image` wrote; raises BadSnapshotError unless all of it is as it was."""
    body, checksum = data[:-4], data[-4:]
    if zlib.crc32(body).to_bytes(4, "big") != checksum:
        raise BadSnapshotError(f"{len(data)} bytes whose checksum does not match")
    fields = json.loads(body)
    voters = VoterSet(
        tuple(
            Voter(ReplicaKey(NodeId(node), directory and DirectoryId(directory)), endpoint)
            for node, directory, endpoint in fields["voters"]
        )
    )
    held: dict[str, Held] = {key: tuple(rest) for key, *rest in fields["held"]}
    store_hash = 0
    for key, value in held.items():
        store_hash ^= _hash(key, value)
    snapshot_id = SnapshotId(fields["end_offset"], fields["epoch"])
    return StoreImage(snapshot_id, voters, held, store_hash, fields["map"])


def read_snapshot_voters(snapshot_id: SnapshotId, file: BinaryIO) -> VoterSet:
    """Check a whole snapshot and return the voters it names."""
    image = decode_image(file.read())
    if image.snapshot_id != snapshot_id:
        raise BadSnapshotError(f"it is {image.snapshot_id}, named {snapshot_id}")
    return image.voters
