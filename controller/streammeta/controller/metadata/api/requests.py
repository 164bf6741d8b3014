"""Requests to the map, as plain values.

Mirrors the requests in `proto/`: same fields, same meaning, columns as read-only numpy int64
arrays. Knows nothing of protobuf and checks nothing; `validation` does that before the map looks
at its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias, overload

from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    INT64_MAX,
    Int64Column,
    NodeIdentity,
    OnConflict,
    PageRequest,
    RangeColumns,
    SourceOperation,
    StreamObjectColumns,
    Tags,
)


class WriteRequest:
    """Requests that may change the map; `ClusterMetadata.decide` takes them."""

    __slots__ = ()


class ReadRequest:
    """Requests that read the map; `ClusterMetadata.query` takes them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NewStream:
    """A stream to create."""

    tags: Tags = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateStreams(WriteRequest):
    """Create closed, empty streams; a repeated `request_id` gets the first answer."""

    request_id: str
    node: NodeIdentity
    streams: tuple[NewStream, ...]


@dataclass(frozen=True, slots=True)
class StreamToOpen:
    """One stream of OpenStreams."""

    stream_id: int
    stream_epoch: int
    tags: Tags = ()
    reopen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStreams(WriteRequest):
    """Take ownership of streams."""

    node: NodeIdentity
    streams: tuple[StreamToOpen, ...]


@dataclass(frozen=True, slots=True)
class StreamToClose:
    """One stream of CloseStreams; up to `end_offset` uploads follow, None: all is committed."""

    stream_id: int
    stream_epoch: int
    end_offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStreams(WriteRequest):
    """Give up ownership of streams; `recoverer` closes them for a node that it recovers."""

    node: NodeIdentity
    streams: tuple[StreamToClose, ...]
    recoverer: NodeIdentity | None = None


@dataclass(frozen=True, slots=True)
class StreamToTrim:
    """One stream of TrimStreams.

    `appended_end_offset` is the end of what the owner has appended, which ends the trim; None: not
    given, and the trim ends at `new_start_offset`.
    """

    stream_id: int
    stream_epoch: int
    new_start_offset: int
    appended_end_offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimStreams(WriteRequest):
    """Move streams' visible start forward."""

    node: NodeIdentity
    streams: tuple[StreamToTrim, ...]


@dataclass(frozen=True, slots=True)
class StreamToDelete:
    """One stream of DeleteStreams; `stream_epoch` -1 if it was never opened."""

    stream_id: int
    stream_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteStreams(WriteRequest):
    """Delete closed streams for good."""

    node: NodeIdentity
    streams: tuple[StreamToDelete, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GetOpeningStreams(WriteRequest):
    """Register a node's epoch for fencing (first page only) and list the streams it has open.

    With `failover` another node asks, `recoverer` if it says so, to recover what it lists.
    """

    node: NodeIdentity
    failover: bool = False
    page: PageRequest = field(default_factory=PageRequest)
    recoverer: NodeIdentity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeStreams(ReadRequest):
    """Read streams by id, by owner, or all of them, in id order."""

    stream_ids: tuple[int, ...] = ()
    owner_node_id: int | None = None
    include_ranges: bool = False
    include_stream_objects: bool = False
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareObjects(WriteRequest):
    """Issue consecutive object ids; a repeated `request_id` gets the first answer."""

    request_id: str
    node: NodeIdentity
    count: int
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVToPut:
    """One value to put; `expected_version` None: no condition, 0: only if absent."""

    key: str
    value: bytes
    namespace: str = ""
    overwrite: bool = False
    expected_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitStreamSetObject(WriteRequest):
    """Register an upload, or with `compacted_object_ids` what these set objects were compacted to.

    A repeated `object_id` gets the first answer. `object_id` -1: there is no set object, as when
    everything was split into stream objects or has expired. Time bounds and `crc32c` say what is
    known of the set object's content, see `StreamObjectColumns`. `kv_puts` and `trims` take effect
    if and only if the commit does. `recoverer` uploads for a node that it recovers, by `failover`.
    """

    node: NodeIdentity
    object_id: int
    order_id: int
    object_size: int
    attributes: int = 0
    ranges: RangeColumns = field(default_factory=RangeColumns)
    stream_objects: StreamObjectColumns = field(default_factory=StreamObjectColumns)
    compacted_object_ids: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    failover: bool = False
    on_conflict: OnConflict = OnConflict.REJECT_ALL
    min_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    crc32c: int = -1
    kv_puts: tuple[KVToPut, ...] = ()
    trims: tuple[StreamToTrim, ...] = ()
    recoverer: NodeIdentity | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitUploads(WriteRequest):
    """Register uploads, one row a set object, judged one after the other.

    The first `range_count[0]` rows of `ranges` are the first object's, and so on. A bad range
    rejects its own upload. An object's order is its id. The last three say what is known of the
    objects' content, see `StreamObjectColumns`; each may be empty.
    """

    node: NodeIdentity
    object_id: Int64Column
    object_size: Int64Column
    range_count: Int64Column
    ranges: RangeColumns
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitStreamObject(WriteRequest):
    """Register what stream objects of one stream were compacted to; `object_id` -1: to nothing.

    `operations` has one entry a source, or is empty: DELETE for each. Offsets are -1 without a
    result. Time bounds and `crc32c` say what is known of the result's content, see
    `StreamObjectColumns`. `kv_puts` and `trims` are as in `CommitStreamSetObject`.
    """

    node: NodeIdentity
    object_id: int = -1
    object_size: int
    stream_id: int
    stream_epoch: int
    start_offset: int = -1
    end_offset: int = -1
    attributes: int = 0
    source_object_ids: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    operations: tuple[SourceOperation, ...] = ()
    min_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    crc32c: int = -1
    kv_puts: tuple[KVToPut, ...] = ()
    trims: tuple[StreamToTrim, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """A key that owns named objects."""

    namespace: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObjectToCommit:
    """A prepared object and its name; a stream or a key owns it, and it goes with that."""

    object_id: int
    name: str
    object_size: int
    crc32c: int = -1
    owner_stream_id: int = -1
    owner_key: OwnerKey | None = None
    metadata: Tags = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNamedObjects(WriteRequest):
    """Give names to objects that hold no stream: all of them, or none."""

    node: NodeIdentity
    objects: tuple[NamedObjectToCommit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObjectToDelete:
    """A name to take away; `object_id` None: whichever object has it."""

    name: str
    object_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNamedObjects(WriteRequest):
    """Take names away and destroy their objects."""

    node: NodeIdentity
    objects: tuple[NamedObjectToDelete, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeNamedObjects(ReadRequest):
    """Read named objects by name, or those with a prefix, page by page in name order."""

    names: tuple[str, ...] = ()
    prefix: str = ""
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonUploads(WriteRequest):
    """Give up what a node owes of these streams, or of all; close what a process of it has open."""

    node_id: int
    stream_ids: tuple[int, ...] = ()
    close_streams_of_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectQuery:
    """The range to find objects of; `end_offset` -1: as far as `limit` (0: 1000) allows."""

    stream_id: int
    start_offset: int
    end_offset: int
    limit: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ObjectQueryColumns(Sequence[ObjectQuery]):
    """Queries in columns; one becomes an `ObjectQuery` when it is asked for."""

    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column
    limit: Int64Column

    def __len__(self) -> int:
        return len(self.stream_id)

    @overload
    def __getitem__(self, at: int) -> ObjectQuery: ...

    @overload
    def __getitem__(self, at: slice) -> "ObjectQueryColumns": ...

    def __getitem__(self, at: int | slice) -> "ObjectQuery | ObjectQueryColumns":
        if isinstance(at, slice):
            return self.take(at)
        columns = (self.stream_id, self.start_offset, self.end_offset, self.limit)
        return ObjectQuery(*(int(values[at]) for values in columns))

    def take(self, at: slice | Int64Column) -> "ObjectQueryColumns":
        """Return some of the queries."""
        columns = (self.stream_id, self.start_offset, self.end_offset, self.limit)
        return ObjectQueryColumns(*(values[at] for values in columns))


Queries: TypeAlias = tuple[ObjectQuery, ...] | ObjectQueryColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class GetObjects(ReadRequest):
    """Read which objects hold ranges of streams; of the first queries only if it `may_stop`.

    Many queries are given in columns.
    """

    queries: Queries
    may_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeObjects(ReadRequest):
    """Read objects by id or page by page."""

    object_ids: tuple[int, ...] = ()
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckObjects(ReadRequest):
    """Read the states of ids, issued or not."""

    object_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireObjects(WriteRequest):
    """Mark prepared objects past their deadline destroyed, at most `limit` of them.

    Deadlines before `since_ms` are left out. Deadlines from `beyond_ms` on count as passed.
    """

    limit: int
    since_ms: int = 0
    beyond_ms: int = INT64_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveObjects(WriteRequest):
    """Forget destroyed objects whose bytes are gone; other ids are passed over."""

    object_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDeletedStreams(WriteRequest):
    """Destroy stream objects of streams that were deleted, at most `limit` of them."""

    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyDeadSetObjects(WriteRequest):
    """Destroy set objects of a node that hold nothing of any stream any more.

    Looks at its `limit` committed set objects with the smallest ids above `after_object_id`.
    """

    node_id: int
    after_object_id: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldDeletions(WriteRequest):
    """Keep the bytes of objects destroyed from now on for `hold_ms`; a longer hold stays."""

    hold_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimBucket(WriteRequest):
    """Give the cluster a UUID unless it has one, and let object ids below a bound be issued.

    The UUID that is there stays; so does a higher bound.
    """

    cluster_uuid: str
    issued_below: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdoptObjects(WriteRequest):
    """Take objects of before a restore, found in the bucket, into the restored map, all or none.

    Columns as in `CommitUploads`; the ranges may be parts of what an object holds. The epoch of
    each is the largest among its records. `replaced` are objects of the map that leave it, as the
    ranges have what is left of theirs. `after_gap` has 1 for each range that may begin after its
    stream's end, offsets in between being lost; it may be empty.
    """

    object_id: Int64Column
    object_size: Int64Column
    range_count: Int64Column
    ranges: RangeColumns
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    replaced: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    after_gap: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)


def as_uploads(request: AdoptObjects) -> CommitUploads:
    """Return the same objects as uploads of no node."""
    own = ("replaced", "after_gap")
    names = (part.name for part in fields(request) if part.name not in own)
    columns = {name: getattr(request, name) for name in names}
    return CommitUploads(node=NodeIdentity(0, 0), **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRestore(WriteRequest):
    """End recovery mode; harmless if it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFeatureLevel(WriteRequest):
    """Raise the cluster's feature level, which all controllers are known to read.

    A level that is there already, or a higher one, stays.
    """

    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterNode(WriteRequest):
    """Forget a node that owns nothing."""

    node: NodeIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNextNodeId(WriteRequest):
    """Issue a node id; a repeated `request_id` gets the first answer."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNodeLock(WriteRequest):
    """Lock or unlock a node."""

    node_id: int
    locked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperviseNode(WriteRequest):
    """Remember that a node sends heartbeats, so that its silence means something."""

    node: NodeIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseStreams(WriteRequest):
    """Fence a process that has no write-ahead log and is gone, and close its open streams."""

    node: NodeIdentity


@dataclass(frozen=True, slots=True)
class RecoveryTarget:
    """The node to recover the data of a node's process; `target_id` -1: none any more."""

    node_id: int
    node_epoch: int
    target_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignRecoveries(WriteRequest):
    """Assign recoveries of nodes' data; what no longer fits the nodes is passed over."""

    targets: tuple[RecoveryTarget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterNode(WriteRequest):
    """Register a broker process; a larger epoch fences older ones.

    `process_id` tells processes of one epoch apart; empty: unknown.
    """

    node: NodeIdentity
    wal_config: str = ""
    tags: Tags = ()
    process_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodes(ReadRequest):
    """Read nodes by id or all; without a page all of them must fit in one answer."""

    node_ids: tuple[int, ...] = ()
    include_stream_set_objects: bool = False
    page: PageRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListStreamSetObjects(ReadRequest):
    """Read one node's committed set objects page by page, in object id order."""

    node_id: int
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutKVs(WriteRequest):
    """Put values, each on its own condition."""

    items: tuple[KVToPut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVKey:
    """One key; `expected_version` is a condition of deletes only."""

    key: str
    namespace: str = ""
    expected_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetKVs(ReadRequest):
    """Read values; those of the first keys only if it `may_stop`."""

    keys: tuple[KVKey, ...]
    may_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteKVs(WriteRequest):
    """Delete keys, each on its own condition."""

    keys: tuple[KVKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKVs(ReadRequest):
    """Read keys with a prefix in key order, or with `namespaces` the namespaces."""

    namespace: str = ""
    prefix: str = ""
    keys_only: bool = False
    namespaces: bool = False
    page: PageRequest = field(default_factory=PageRequest)
