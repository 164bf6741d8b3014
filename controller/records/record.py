"""Records: the facts a decision puts into the log, and what each one does when it is replayed.

Replay is a pure function of the map, the records and their log offset: what needed a clock or a
counter to decide is written into the record. Records are never judged again on replay. Where many
rows change alike they are one record with columns (read-only int64 arrays of equal length).
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Column: TypeAlias = npt.NDArray[np.int64]
Tags: TypeAlias = tuple[tuple[str, str], ...]


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
    """Makes streams CLOSED; nothing else changes."""

    stream_id: Int64Column


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
class StreamSetObjectCommitted:
    """Makes a prepared object COMMITTED, holding these ranges, sorted by stream id.

    Raises each existing stream's end to at least the row's end; unknown streams are passed over.
    """

    object_id: int
    node_id: int
    order_id: int
    object_size: int
    attributes: int
    committed_at_ms: int
    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamObjectsCommitted:
    """Makes prepared objects COMMITTED, each holding its row's range; ends rise as above."""

    committed_at_ms: int
    object_id: Int64Column
    object_size: Int64Column
    attributes: Int64Column
    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitRowsRejected:
    """Remembers the verdicts of rows a commit left out, so that its repeat is answered alike."""

    object_id: Int64Column
    stream_id: Int64Column
    error: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsDestroyed:
    """Makes objects MARK_DESTROYED at `marked_at_ms`; they hold no ranges any more.

    `deep` sets the deep-delete bit of their attributes.
    """

    object_id: Int64Column
    marked_at_ms: int
    deep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectsRemoved:
    """Forgets objects; of those that were committed the id is kept in a bounded window."""

    object_id: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeRegistered:
    """Creates or overwrites a node; a larger epoch ends its failover."""

    node_id: int
    node_epoch: int
    wal_config: str
    tags: Tags = ()


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
    | StreamSetObjectCommitted
    | StreamObjectsCommitted
    | CommitRowsRejected
    | ObjectsDestroyed
    | ObjectsRemoved
    | NodeRegistered
    | NodeEpochSet
    | KVsPut
    | KVsDeleted
)
