"""Records: the facts that a decision writes to the log, and the effect of each on replay.

Replay is a pure function of the metadata, the records and their log offset. Values from a clock or
a counter are therefore part of the record. Replay does not validate records again. Many rows that
change alike are one record with columns (read-only int64 arrays of equal length).
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Column: TypeAlias = npt.NDArray[np.int64]
"""One column: row i is element i. Columns of records, requests and answers never change."""
Mask: TypeAlias = npt.NDArray[np.bool_]
"""Selected rows of a column."""
EMPTY_COLUMN: Int64Column = np.zeros(0, dtype=np.int64)
EMPTY_COLUMN.setflags(write=False)
Tags: TypeAlias = tuple[tuple[str, str], ...]
"""(key, value) pairs with unique keys, in answers sorted by key."""

FACT_COLUMNS = ("min_timestamp_ms", "max_timestamp_ms", "crc32c")
"""In commits: the time bounds of the records in each object, and the object's CRC-32C.

-1 is unknown. Each column may be empty, which means that all are unknown.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsCreated:
    """Appends `count` empty streams (offsets 0) and remembers the request.

    `tags` has one entry per stream, or none. `shared` is 1 for a shared stream (epoch 0) and 0 for
    an owned one (closed, epoch -1), or empty: all are owned.
    """

    request_id: str
    node_id: int
    first_stream_id: int
    count: int
    tags: tuple[Tags, ...] = ()
    shared: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsOpened:
    """Ends each stream's current range at the stream's end and begins the next one there.

    The stream becomes OPENED under `stream_epoch`, owned by `node_id`. `tags` (one entry per row,
    or none) are set on streams without tags.
    """

    node_id: int
    stream_id: Int64Column
    stream_epoch: Int64Column
    tags: tuple[Tags, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsReopened:
    """Opens closed streams again, in the same range and epoch."""

    stream_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsClosed:
    """Makes streams CLOSED. An `end_offset` other than -1 becomes the stream's end.

    If that is above the current end, the offsets in between become a pending upload of the owner.
    The column may be empty, which means that all are -1.
    """

    stream_id: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsTrimmed:
    """Raises the start, and the end to at least the start. Drops or clips ranges below it."""

    stream_id: Int64Column
    start_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangesRemoved:
    """Drops past ranges."""

    stream_id: Int64Column
    range_index: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamsDeleted:
    """Drops streams with their ranges and tags. Their data in objects is dead from then on."""

    stream_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsPrepared:
    """Appends `count` PREPARED objects with a deadline and remembers the request."""

    request_id: str
    node_id: int
    first_object_id: int
    count: int
    deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamSetObjectRanges:
    """Concatenated ranges of SSOs, in each object sorted by stream id, then start."""

    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamSetObjectsCommitted:
    """Makes prepared objects COMMITTED stream set objects of a node, with their `ranges`.

    Raises each existing stream's end to at least the row's end. Unknown streams are skipped.
    An upload's `data_time_ms` is its commit time, a compaction's the minimum of its sources.

    The three columns after `ranges` are described at `FACT_COLUMNS`. `content_digest` identifies
    the commit's content, so that a repeat differs from another commit. 0 is unknown, and the
    column may be empty, which means that all are unknown.
    """

    node_id: int
    committed_at_ms: int
    data_time_ms: int
    object_id: Int64Column
    order_id: Int64Column
    object_size: Int64Column
    attributes: Int64Column
    range_count: Int64Column
    ranges: StreamSetObjectRanges
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    content_digest: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamObjectsCommitted:
    """Makes prepared objects COMMITTED, each with its row's range. Ends are raised as above.

    The attributes mark composites. The three columns after the offsets are described at
    `FACT_COLUMNS`. `content_digest`, as above, is the digest of the whole commit.
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
    """Makes prepared objects without stream data COMMITTED. Their names are in keys.

    `crc32c` may be empty: all are unknown, -1.
    """

    committed_at_ms: int
    object_id: Int64Column
    object_size: Int64Column
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    content_digest: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitRowsRejected:
    """Remembers the verdicts of rows that a commit left out, for the answer to its repeat.

    `content_digest` is the digest of the commit, 0 below the feature level that added it.
    """

    object_id: Int64Column
    stream_id: Int64Column
    error: Int64Column
    content_digest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsDestroyed:
    """Makes objects MARK_DESTROYED at `marked_at_ms` and drops their ranges.

    `deep` sets the deep-delete bit of their attributes. Objects linked to a composite do not
    change: they are listed as well, or were linked to another composite before.
    """

    object_id: Int64Column
    marked_at_ms: int
    deep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsRemoved:
    """Forgets objects. A bounded window remembers the ids of those that were committed."""

    object_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsLinked:
    """Makes objects LINKED: kept only for a composite, no longer found by stream.

    Objects that are LINKED already change their composite.
    """

    composite_id: int
    object_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectAttributesSet:
    """Replaces the attributes of a committed object. Its kind, size and times stay."""

    object_id: int
    attributes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingUploadsSet:
    """Sets a node's pending uploads of streams. An empty range (start = end) removes one."""

    node_id: int
    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UploadsAbandoned:
    """Removes a node's pending uploads of streams. Their offsets are lost."""

    node_id: int
    stream_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeLocked:
    """Locks or unlocks a node: only itself can open the streams that it owned last."""

    node_id: int
    locked: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeUnregistered:
    """Forgets a node. While it has stream set objects it is departed until the last is gone.

    A forgotten node's id can be issued again.
    """

    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeIdIssued:
    """Remembers the request. The id is not issued again until a node has used and left it."""

    request_id: str
    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeSupervised:
    """The node sends heartbeats: from now on missing ones mean that it is dead."""

    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecoveryAssigned:
    """Assigns the recovery of a node's data to another node. `target_id` -1 means to nobody."""

    node_id: int
    target_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeletionsHeld:
    """Keeps the bytes of objects destroyed at or after `since_ms` until `until_ms`.

    Replaces an earlier hold.
    """

    since_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketClaimed:
    """Sets the cluster's UUID permanently and raises the bound of issuable object ids."""

    cluster_uuid: str
    issued_below: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureLevelSet:
    """Raises the level: from here on log and checkpoints may use its additions."""

    level: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsReclaimed:
    """Makes undecided ids, unknown to restored metadata, PREPARED objects again.

    The records that commit them follow in the same entry.
    """

    object_id: Int64Column
    deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestoreFinished:
    """Ends recovery mode: ids are no longer undecided."""

    undecided_below: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeRegistered:
    """Creates or replaces a node. A larger epoch ends its failover, recovery and departure."""

    node_id: int
    node_epoch: int
    wal_config: str
    tags: Tags = ()
    process_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeEpochSet:
    """Creates a node or replaces its epoch and failover flag."""

    node_id: int
    node_epoch: int
    failover: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVsPut:
    """Stores values. Their version is the record's log offset plus 1."""

    namespaces: tuple[str, ...]
    keys: tuple[str, ...]
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVsDeleted:
    """Deletes keys. A namespace without keys disappears."""

    namespaces: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProducerBatchesCommitted:
    """Remembers batches of idempotent producers, in commit order.

    A producer may have several batches in a stream, with consecutive sequences. A larger epoch
    drops the batches of the one before. The commit's time becomes the producer's last use.
    """

    committed_at_ms: int
    stream_id: Int64Column
    producer_id: Int64Column
    producer_epoch: Int64Column
    first_sequence: Int64Column
    record_count: Int64Column
    start_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProducerIdsIssued:
    """Issues `count` producer ids, the first of which is the metadata's next producer id."""

    first_producer_id: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProducersExpired:
    """Forgets the states of producers in streams."""

    stream_id: Int64Column
    producer_id: Int64Column


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
    | ProducerBatchesCommitted
    | ProducerIdsIssued
    | ProducersExpired
)
