"""The state machine that the simulated quorum replicates: values with versions, lists, and a map.

To the product's controller it is the map: it decides requests, applies records, undoes what was not
committed, and gives views. Its snapshots' bytes differ on purpose from node to node. Its hash is
kept incrementally, so that replicas can be compared after every batch.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from streammeta.controller.errors import ApiError
from streammeta.controller.features import BASE_LEVEL, SUPPORTED, Levels
from streammeta.controller.ids import DirectoryId, NodeId, SnapshotId
from streammeta.controller.journal.errors import BadSnapshotError, NewerVersionError
from streammeta.controller.metadata.api.requests import SetFeatureLevel
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata, Decision
from streammeta.controller.metadata.registries.limits import QUOTAS
from streammeta.controller.metadata.sections.frozen import FrozenMetadata
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.records.codec import encode_records
from streammeta.controller.records.record import Int64Column, KVsPut, Record
from tests.linearizability import models
from tests.sim.sim_map import MAP_KEY, MapAnswer, MapWrite, find_readable, state_of
from tests.sim.sim_time import check

Request = (
    models.Get
    | models.Put
    | models.Delete
    | models.CommitRange
    | models.ReadEnd
    | models.ReadObjects
    | MapWrite
)
READS = models.Get | models.ReadEnd | models.ReadObjects
Answer = (
    models.KVAnswer | models.Committed | models.NotAtEnd | models.End | models.Objects | MapAnswer
)
Held = tuple[str, int] | tuple[int, ...]
"""A key's value and version, or a list's object ids."""

_ABSENT: Held = ("", 0)
_OWN = "simulated "
"""Namespaces of the store's own records begin so; the map's never do."""


@dataclass(frozen=True, slots=True)
class Keyed:
    key: str
    request: Request


@dataclass(frozen=True, slots=True)
class StoreImage:
    """An immutable copy of a store, with the voters as of its end."""

    snapshot_id: SnapshotId
    voters: VoterSet
    held: dict[str, Held]
    hash: int
    log_hash: bytes
    map_name: str = ""
    """Names the image of the map, empty if it has never been written to."""


@dataclass(frozen=True, slots=True)
class StoreView:
    end_offset: int
    held: dict[str, Held]
    hash: int
    map_view: FrozenMetadata | None

    def digest(self) -> bytes:
        """Return what equal stores have in common."""
        state = hashlib.sha256(repr(sorted(self.held.items())).encode())
        if self.map_view is not None:
            state.update(self.map_view.digest())
        return state.digest()


@dataclass(frozen=True, slots=True)
class _Applied:
    offset: int
    applied_before: int
    key: str
    old: Held | None


class Store:
    maps: ClassVar[dict[str, FrozenMetadata]] = {}
    """Images of maps by their digests: files of the simulator hold no more than that."""

    def __init__(self, levels: Levels = SUPPORTED) -> None:
        self.applied_end_offset = 0
        """Every entry below is applied, committed or not."""
        self._levels = levels
        self.hash = 0
        self._held: dict[str, Held] = {}
        self._undo: deque[_Applied] = deque()
        self._map: ClusterMetadata | None = None

    @property
    def map(self) -> ClusterMetadata:
        """The real map; most runs have none, so it is made when it is first asked for."""
        if self._map is None:
            self._map = self._of_version(ClusterMetadata())
        return self._map

    @property
    def level(self) -> int:
        """The feature level of the map."""
        return BASE_LEVEL if self._map is None else self._map.feature_level

    @property
    def feature_level(self) -> int:
        """The level, by the map's own name."""
        return self.level

    def _of_version(self, cluster_metadata: ClusterMetadata) -> ClusterMetadata:
        """Let a map be that of this node's version."""
        cluster_metadata._feature_level._levels = self._levels
        return cluster_metadata

    # -- limits, which no run reaches

    def used(self) -> Mapping[str, int]:
        """Return zero of everything that is limited."""
        return dict.fromkeys(QUOTAS, 0)

    def has_node(self, _: int) -> bool:
        """Return True: no node counts."""
        return True

    def new_producers(self, stream_id: Int64Column, producer_id: Int64Column) -> int:
        """Return how many producers of the map would be new."""
        return self.map.new_producers(stream_id, producer_id)

    def kv_size(self, _: str, __: str) -> int:
        """Return -1: no key is there."""
        return -1

    # -- requests

    def decide(self, asked: Keyed, now_ms: int, offset: int) -> Decision:
        """Answer a request; a mutation's record will take `offset`."""
        if isinstance(asked.request, MapWrite):
            return self._decide_on_map(asked.request, now_ms, offset)
        answer, record = self._decide(asked.key, asked.request, offset)
        return Decision(() if record is None else (record,), answer)  # type: ignore[arg-type]

    def _decide_on_map(self, write: MapWrite, now_ms: int, offset: int) -> Decision:
        asked = write.request
        if isinstance(asked, SetFeatureLevel) and not self._levels.include(asked.level):
            return Decision((), MapAnswer(None))  # type: ignore[arg-type]
        try:
            decision = self.map.decide(write.request, now_ms, offset)
        except ApiError:
            return Decision((), MapAnswer(None))  # type: ignore[arg-type]
        answer: Any = MapAnswer(decision.answer)
        return Decision(decision.records, answer)

    def _decide(self, key: str, request: Request, offset: int) -> tuple[Answer, Record | None]:
        match request:
            case models.Put(value=value):
                held = self._value(key)
                if not _may_write(held, request.expected_version):
                    return _refused(held), None
                return models.KVAnswer(True, value, offset + 1), record_of("put", key, value)
            case models.Delete():
                held = self._value(key)
                if held == _ABSENT or not _may_write(held, request.expected_version):
                    return _refused(held), None
                return models.KVAnswer(True, held[0], held[1]), record_of("delete", key)
            case models.CommitRange(object_id=object_id, start=start):
                objects = self._list(key)
                if object_id in objects:
                    return models.Committed(), None
                if start != len(objects):
                    return models.NotAtEnd(), None
                return models.Committed(), record_of("commit", key, str(object_id))
            case _:
                return self.answer(key, request), None

    def query(self, asked: Keyed) -> Answer:
        return self.answer(asked.key, asked.request)

    def answer(self, key: str, request: Request) -> Answer:
        match request:
            case models.ReadEnd():
                return models.End(len(self._list(key)))
            case models.ReadObjects():
                return models.Objects(self._list(key))
            case _:
                value, version = self._value(key)
                return models.KVAnswer(True, value if version else None, version)

    def _value(self, key: str) -> tuple[str, int]:
        return self._held.get(key, _ABSENT)  # type: ignore[return-value]

    def _list(self, key: str) -> tuple[int, ...]:
        return self._held.get(key, ())  # type: ignore[return-value]

    # -- records

    def held(self, key: str) -> Held | None:
        return self._held.get(key)

    def hold(self, key: str, held: Held) -> None:
        """Store something under a key, outside the log."""
        self._set(key, self._held.get(key), held)

    def apply(self, offset: int, records: Sequence[Record]) -> str:
        """Apply one entry, at or above `applied_end_offset`; return the key it changed."""
        check(offset >= self.applied_end_offset, "applied once", f"entry {offset}")
        kind, key, value = _read(records[0])
        old = self._held.get(key)
        if kind == "put":
            self._set(key, old, (value, offset + 1))
        elif kind == "delete":
            self._set(key, old, None)
        elif kind == "commit":
            objects = self._list(key)
            check(int(value) not in objects, "applied once", f"object {value} at {offset}")
            self._set(key, old, (*objects, int(value)))
        else:
            self.map.apply(offset, records)
            self._set(key, old, (f"{zlib.crc32(encode_records(records), offset):08x}", offset + 1))
        self._undo.append(_Applied(offset, self.applied_end_offset, key, old))
        self.applied_end_offset = offset + 1
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
        """Take back every entry at or above `end_offset`, newest first."""
        changed_map = False
        while self._undo and self._undo[-1].offset >= end_offset:
            entry = self._undo.pop()
            self._set(entry.key, self._held.get(entry.key), entry.old)
            self.applied_end_offset = entry.applied_before
            changed_map |= entry.key == MAP_KEY
        if changed_map:
            self.map.undo_to(end_offset)
            find_readable(self.map, state_of(self.map), f"undone to {end_offset}")

    def forget_undo(self, end_offset: int) -> None:
        """What lies below `end_offset` is committed."""
        while self._undo and self._undo[0].offset < end_offset:
            self._undo.popleft()
        if self._map is not None:
            self._map.forget_undo(end_offset)

    # -- views and snapshots

    def freeze(self) -> StoreView:
        map_view = self.map.freeze() if MAP_KEY in self._held else None
        return StoreView(self.applied_end_offset, dict(self._held), self.hash, map_view)

    def image(self, snapshot_id: SnapshotId, voters: VoterSet, log_hash: bytes) -> StoreImage:
        """Copy the state, which must be that at the snapshot's end."""
        name = ""
        if MAP_KEY in self._held:
            view = self.map.freeze()
            name = view.digest().hex()
            self.maps[name] = view
        return StoreImage(snapshot_id, voters, dict(self._held), self.hash, log_hash, name)

    @classmethod
    def of(cls, image: StoreImage, levels: Levels = SUPPORTED) -> Store:
        store = cls(levels)
        store.applied_end_offset = image.snapshot_id.end_offset
        store.hash = image.hash
        store._held = dict(image.held)
        if image.map_name:
            view = cls.maps[image.map_name]
            made = ClusterMetadata.from_sections(view.sections(), image.snapshot_id.end_offset)
            store._map = store._of_version(made)
        return store


def record_of(kind: str, key: str, value: str = "") -> KVsPut:
    """Return a record of the store's own: a kind of change, a key, perhaps a value."""
    return KVsPut(namespaces=(_OWN + kind,), keys=(key,), values=(value.encode(),))


def _read(record: Record) -> tuple[str, str, str]:
    """Return kind, key and value of a record; all of the map's are of one kind and key."""
    if isinstance(record, KVsPut) and record.namespaces[0].startswith(_OWN):
        return record.namespaces[0].removeprefix(_OWN), record.keys[0], record.values[0].decode()
    return "map", MAP_KEY, ""


def _may_write(held: tuple[str, int], expected_version: int | None) -> bool:
    return expected_version is None or expected_version == held[1]


def _refused(held: tuple[str, int]) -> models.KVAnswer:
    return models.KVAnswer(False, held[0] if held[1] else None, held[1])


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
        "log_hash": image.log_hash.hex(),
        "map": image.map_name,
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
    log_hash = bytes.fromhex(fields["log_hash"])
    return StoreImage(snapshot_id, voters, held, store_hash, log_hash, fields["map"])


def read_snapshot_voters(levels: Levels, snapshot_id: SnapshotId, file: BinaryIO) -> VoterSet:
    """Check a whole snapshot and return the voters it names."""
    image = decode_image(file.read())
    if image.snapshot_id != snapshot_id:
        raise BadSnapshotError(f"it is {image.snapshot_id}, named {snapshot_id}")
    if image.map_name:
        (level,) = Store.maps[image.map_name].sections()["feature_level"]["level"]
        if not levels.include(level):
            raise NewerVersionError(f"it is of feature level {level}, beyond {levels}")
    return image.voters
