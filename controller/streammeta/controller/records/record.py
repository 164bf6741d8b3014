"""Records: the facts a decision puts into the log, and the effect of each on replay.

Replay is a pure function of the map, the records and their log offset: what needed a clock or a
counter to decide is written into the record. Records are never judged again on replay. Where many
rows change alike they are one record with columns (read-only int64 arrays of equal length).
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Column: TypeAlias = npt.NDArray[np.int64]
"""One column: row i is element i. No record, request or answer changes one once it is made."""
Mask: TypeAlias = npt.NDArray[np.bool_]
"""Rows chosen of a column."""
EMPTY_COLUMN: Int64Column = np.zeros(0, dtype=np.int64)
EMPTY_COLUMN.setflags(write=False)
Tags: TypeAlias = tuple[tuple[str, str], ...]
"""(key, value) pairs, no key twice. In answers sorted by key."""

FACT_COLUMNS = ("min_timestamp_ms", "max_timestamp_ms", "crc32c")
"""In commits: between which times the records of each object are, and its CRC-32C.

-1 is unknown; each column may be empty: all are unknown.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsCreated:
    """Appends `count` closed, empty streams (epoch -1, offsets 0) and remembers the request.

    `tags` has one entry a stream, or none at all.
    """

    request_id: str
    node_id: int
    first_stream_id: int
    count: int
    tags: tuple[Tags, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsOpened:
    """Ends each stream's current range at the stream's end and begins the next one there.

    The stream becomes OPENED under `stream_epoch`, owned by `node_id`. `tags` (one entry a row, or
    none at all) are set where the stream has none.
    """

    node_id: int
    stream_id: Int64Column
    stream_epoch: Int64Column
    tags: tuple[Tags, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsReopened:
    """Makes closed streams OPENED again, in the same range and epoch."""

    stream_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsClosed:
    """Makes streams CLOSED; where `end_offset` is not -1 the stream ends there from now on.

    If that lies above the stream's end, its owner owes the upload of what lies between. The column
    may be empty: all are -1.
    """

    stream_id: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsTrimmed:
    """Raises the start, and the end to at least the start; drops or clips past ranges below it."""

    stream_id: Int64Column
    start_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangesRemoved:
    """Drops past ranges."""

    stream_id: Int64Column
    range_index: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsDeleted:
    """Drops streams with their ranges and tags; what objects hold of them is dead from then on."""

    stream_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsPrepared:
    """Appends `count` PREPARED objects with that deadline and remembers the request."""

    request_id: str
    node_id: int
    first_object_id: int
    count: int
    deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetObjectRanges:
    """Ranges of set objects behind each other, sorted by stream id, then start, in each object."""

    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamSetObjectsCommitted:
    """Makes prepared objects COMMITTED set objects of a node; each holds its part of `ranges`.

    Raises each existing stream's end to at least the row's end; unknown streams are passed over.
    An upload's `data_time_ms` is its commit time, a compaction's the least of its sources'.

    Of the last three columns but one see `FACT_COLUMNS`. `content_digest` tells a repeat of the
    commit from one with other content; 0 is unknown, and the column may be empty: all are.
    """

    node_id: int
    committed_at_ms: int
    data_time_ms: int
    object_id: Int64Column
    order_id: Int64Column
    object_size: Int64Column
    attributes: Int64Column
    range_count: Int64Column
    ranges: SetObjectRanges
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    content_digest: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamObjectsCommitted:
    """Makes prepared objects COMMITTED, each holding its row's range; ends rise as above.

    The attributes say which are composites. Of the last three columns see `FACT_COLUMNS`; one
    `content_digest`, as above, is that of all of them.
    """

    committed_at_ms: int
    object_id: Int64Column
    object_size: Int64Column
    attributes: Int64Column
    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    content_digest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedObjectsCommitted:
    """Makes prepared objects COMMITTED that hold no stream; their names are in keys.

    `crc32c` may be empty: all are unknown, -1.
    """

    committed_at_ms: int
    object_id: Int64Column
    object_size: Int64Column
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    content_digest: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitRowsRejected:
    """Remembers the verdicts of rows a commit left out, so that its repeat is answered alike.

    `content_digest` is the digest of that commit; 0 below the feature level that added it.
    """

    object_id: Int64Column
    stream_id: Int64Column
    error: Int64Column
    content_digest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsDestroyed:
    """Makes objects MARK_DESTROYED at `marked_at_ms`; they hold no ranges any more.

    `deep` sets the deep-delete bit of their attributes. What a composite links is not touched:
    it is named too, or was linked to another composite before.
    """

    object_id: Int64Column
    marked_at_ms: int
    deep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsRemoved:
    """Forgets objects; of those that were committed the id is kept in a bounded window."""

    object_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsLinked:
    """Makes objects LINKED: kept for a composite alone, no longer found by stream.

    Objects that are LINKED already change their composite.
    """

    composite_id: int
    object_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectAttributesSet:
    """Replaces the attributes of a committed object; its kind, size and times stay."""

    object_id: int
    attributes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingUploadsSet:
    """Sets what a node owes of streams; an empty range (start = end) takes it off the list."""

    node_id: int
    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UploadsAbandoned:
    """Takes what a node owes of streams off its list; those offsets are lost from now on."""

    node_id: int
    stream_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeLocked:
    """Locks or unlocks a node: streams it owned last can be opened by itself alone."""

    node_id: int
    locked: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeUnregistered:
    """Forgets a node, or, while it holds set objects, lets it depart; then the last one ends it.

    Its id can be issued again once it is forgotten.
    """

    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeIdIssued:
    """Remembers the request; the id is not issued again before a node of it has come and gone."""

    request_id: str
    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeSupervised:
    """The node sends heartbeats: from now on its silence means that it is gone."""

    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecoveryAssigned:
    """Assigns the recovery of a node's data to a node; `target_id` -1: to none any more."""

    node_id: int
    target_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeletionsHeld:
    """Keeps the bytes of objects destroyed at or after `since_ms` until `until_ms`.

    Replaces the earlier one.
    """

    since_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketClaimed:
    """Sets the cluster's UUID, once and for all, and raises the bound of issuable object ids."""

    cluster_uuid: str
    issued_below: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureLevelSet:
    """Raises the level: from here on log and checkpoints may hold what it adds."""

    level: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsReclaimed:
    """Makes undecided ids, which a restored map does not know, PREPARED objects again.

    What commits them follows in the same entry.
    """

    object_id: Int64Column
    deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestoreFinished:
    """Ends recovery mode: no id is undecided any more."""

    undecided_below: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeRegistered:
    """Creates or overwrites a node; a larger epoch ends its failover, recovery and departure."""

    node_id: int
    node_epoch: int
    wal_config: str
    tags: Tags = ()
    process_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeEpochSet:
    """Creates a node or overwrites its epoch and failover flag."""

    node_id: int
    node_epoch: int
    failover: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVsPut:
    """Stores values; their version is the record's log offset plus 1."""

    namespaces: tuple[str, ...]
    keys: tuple[str, ...]
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVsDeleted:
    """Deletes keys; a namespace without keys is gone."""

    namespaces: tuple[str, ...]
    keys: tuple[str, ...]


Record: TypeAlias = (
    StreamsCreated
    | StreamsOpened
    | StreamsReopened
    | StreamsClosed
    | StreamsTrimmed
    | RangesRemoved
    | StreamsDeleted
    | ObjectsPrepared
    | StreamSetObjectsCommitted
    | StreamObjectsCommitted
    | NamedObjectsCommitted
    | CommitRowsRejected
    | ObjectsDestroyed
    | ObjectsRemoved
    | ObjectsLinked
    | ObjectAttributesSet
    | PendingUploadsSet
    | UploadsAbandoned
    | NodeLocked
    | NodeUnregistered
    | NodeIdIssued
    | NodeSupervised
    | RecoveryAssigned
    | DeletionsHeld
    | BucketClaimed
    | FeatureLevelSet
    | ObjectsReclaimed
    | RestoreFinished
    | NodeRegistered
    | NodeEpochSet
    | KVsPut
    | KVsDeleted
)
