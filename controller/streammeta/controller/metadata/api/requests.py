"""Requests to the metadata, as plain values.

Mirrors the requests in `proto/`: same fields, same meaning, columns as read-only numpy int64
arrays. Does not depend on protobuf. `validation` checks requests before they reach the metadata.
"""

from dataclasses import dataclass, field, fields
from typing import TypeAlias

from streammeta.controller.metadata.api.object_slices import ObjectQuery, ObjectQueryColumns
from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    INT64_MAX,
    Int64Column,
    NodeIdentity,
    OnConflict,
    PageRequest,
    RangeColumns,
    SharedRowColumns,
    SourceOperation,
    StreamObjectColumns,
    Tags,
)


class WriteRequest:
    """Base of requests that may change the metadata, for `ClusterMetadata.decide`."""

    __slots__ = ()


class ReadRequest:
    """Base of requests that only read the metadata, for `ClusterMetadata.query`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NewStream:
    """A stream to create, owned or shared."""

    tags: Tags = ()
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateStreams(WriteRequest):
    """Create empty streams. A repeated `request_id` returns the first answer."""

    request_id: str
    node: NodeIdentity
    streams: tuple[NewStream, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueProducerIds(WriteRequest):
    """Issue a block of ids for idempotent producers."""

    node: NodeIdentity
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireProducers(WriteRequest):
    """Forget at most `limit` producers whose last batch is older than `idle_ms`.

    Producers that expire by that before `since_ms` are skipped.
    """

    limit: int
    idle_ms: int
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class StreamToOpen:
    """A stream to open."""

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
    """A stream to close. Uploads follow up to `end_offset`, None means that all is committed."""

    stream_id: int
    stream_epoch: int
    end_offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStreams(WriteRequest):
    """Give up ownership of streams. `recoverer` closes them for a node that it recovers."""

    node: NodeIdentity
    streams: tuple[StreamToClose, ...]
    recoverer: NodeIdentity | None = None


@dataclass(frozen=True, slots=True)
class StreamToTrim:
    """A stream to trim, at most to `appended_end_offset`, the end of the owner's appends."""

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
    """A stream to delete. `stream_epoch` is -1 if it was never opened."""

    stream_id: int
    stream_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteStreams(WriteRequest):
    """Delete closed streams permanently."""

    node: NodeIdentity
    streams: tuple[StreamToDelete, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GetOpeningStreams(WriteRequest):
    """Register a node's epoch for fencing (first page only) and list its open streams.

    With `failover` another node, `recoverer` if it names itself, asks in order to recover them.
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
class FindStreams(ReadRequest):
    """Read the streams that have all of some tags, and an owner if set, in id order."""

    tags: Tags
    owner_node_id: int | None = None
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareObjects(WriteRequest):
    """Issue consecutive object ids. A repeated `request_id` returns the first answer."""

    request_id: str
    node: NodeIdentity
    count: int
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVToPut:
    """A value to put. `expected_version` None means no condition, 0 only if absent."""

    key: str
    value: bytes
    namespace: str = ""
    overwrite: bool = False
    expected_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitStreamSetObject(WriteRequest):
    """Register an upload, or a compaction of the SSOs in `compacted_object_ids`.

    A repeated `object_id` returns the first answer. `object_id` -1 means that the commit has no
    SSO, because all data was split into stream objects or has expired. Time bounds and `crc32c`
    describe the SSO's content, see `StreamObjectColumns`. `kv_puts` and `trims` take effect if and
    only if the commit does. With `failover`, `recoverer` uploads for a node that it recovers.
    `shared_rows` append to shared streams, whose offsets the commit assigns.
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
    shared_rows: SharedRowColumns = field(default_factory=SharedRowColumns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitUploads(WriteRequest):
    """Register uploads, one row per stream set object, decided in order.

    The first `range_count[0]` rows of `ranges` belong to the first object, and so on. A bad range
    rejects its own upload only. An object's order id is its object id. The last three columns
    describe the objects' content, see `StreamObjectColumns`. Each may be empty.
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
    """Register a compaction of stream objects of one stream. `object_id` -1 means no result.

    `operations` has one entry per source, or is empty: DELETE for all. Offsets are -1 without a
    result. Time bounds and `crc32c` describe the result's content, see `StreamObjectColumns`.
    `kv_puts` and `trims` are as in `CommitStreamSetObject`.
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
    """A prepared object and its name. It is deleted together with its owner, a stream or a key."""

    object_id: int
    name: str
    object_size: int
    crc32c: int = -1
    owner_stream_id: int = -1
    owner_key: OwnerKey | None = None
    metadata: Tags = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNamedObjects(WriteRequest):
    """Name objects that contain no stream data: all of them, or none."""

    node: NodeIdentity
    objects: tuple[NamedObjectToCommit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObjectToDelete:
    """A name to delete. `object_id` None means whichever object has it."""

    name: str
    object_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNamedObjects(WriteRequest):
    """Delete names and destroy their objects, or without names the first objects of an owner.

    With an owner only its objects are deleted. `with_owner_key` deletes `owner_key` with the last.
    """

    node: NodeIdentity
    objects: tuple[NamedObjectToDelete, ...] = ()
    owner_stream_id: int = -1
    owner_key: OwnerKey | None = None
    with_owner_key: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeNamedObjects(ReadRequest):
    """Read named objects by name or prefix, page by page in name order."""

    names: tuple[str, ...] = ()
    prefix: str = ""
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonUploads(WriteRequest):
    """Give up a node's pending uploads of these streams, or of all.

    Also closes the open streams of the process with the epoch `close_streams_of_epoch`.
    """

    node_id: int
    stream_ids: tuple[int, ...] = ()
    close_streams_of_epoch: int | None = None


Queries: TypeAlias = tuple[ObjectQuery, ...] | ObjectQueryColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class GetObjects(ReadRequest):
    """Read which objects contain ranges of streams. `may_stop` allows only the first ones."""

    queries: Queries
    may_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeObjects(ReadRequest):
    """Read objects by id or page by page."""

    object_ids: tuple[int, ...] = ()
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckObjects(ReadRequest):
    """Read the states of object ids, issued or not."""

    object_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireObjects(WriteRequest):
    """Destroy prepared objects whose deadline has passed, at most `limit` of them.

    Deadlines before `since_ms` are skipped. Deadlines from `beyond_ms` on count as passed.
    """

    limit: int
    since_ms: int = 0
    beyond_ms: int = INT64_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveObjects(WriteRequest):
    """Forget destroyed objects whose bytes are deleted. Other ids are ignored."""

    object_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDeletedStreams(WriteRequest):
    """Destroy stream objects of deleted streams, at most `limit` of them."""

    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyDeadStreamSetObjects(WriteRequest):
    """Destroy a node's stream set objects that no longer contain live data of any stream.

    Examines its `limit` committed SSOs with the smallest ids above `after_object_id`.
    """

    node_id: int
    after_object_id: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldDeletions(WriteRequest):
    """Keep the bytes of objects destroyed from now on for `hold_ms`. A longer hold wins."""

    hold_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimBucket(WriteRequest):
    """Set the cluster's UUID unless it has one, and raise the bound of issuable object ids.

    An existing UUID and a higher bound stay.
    """

    cluster_uuid: str
    issued_below: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdoptObjects(WriteRequest):
    """Adopt objects found in the bucket into metadata restored from an earlier backup.

    All objects are adopted, or none. Columns are as in `CommitUploads`, except that the ranges may
    be parts of an object's ranges, and an object's epoch is the largest among its records.
    `replaced` are known objects whose remaining data the ranges contain. They are destroyed.
    `after_gap` is 1 for each range that may begin after its stream's end, the offsets in between
    being lost. It may be empty.
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


def to_uploads(request: AdoptObjects) -> CommitUploads:
    """Return the same objects as uploads of no particular node."""
    own = ("replaced", "after_gap")
    names = (part.name for part in fields(request) if part.name not in own)
    columns = {name: getattr(request, name) for name in names}
    return CommitUploads(node=NodeIdentity(0, 0), **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRestore(WriteRequest):
    """End recovery mode. Changes nothing if it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFeatureLevel(WriteRequest):
    """Set the cluster's feature level, which all controllers support."""

    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterNode(WriteRequest):
    """Forget a node that owns nothing."""

    node: NodeIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNextNodeId(WriteRequest):
    """Issue a node id. A repeated `request_id` returns the first answer."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNodeLock(WriteRequest):
    """Lock or unlock a node."""

    node_id: int
    locked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperviseNode(WriteRequest):
    """Remember that a node sends heartbeats, so that missing ones mean that it is dead."""

    node: NodeIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseStreams(WriteRequest):
    """Fence a dead process that has no write-ahead log, and close its open streams."""

    node: NodeIdentity


@dataclass(frozen=True, slots=True)
class RecoveryTarget:
    """The node that recovers the data of another node's process. `target_id` -1 means nobody."""

    node_id: int
    node_epoch: int
    target_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignRecoveries(WriteRequest):
    """Assign recoveries of nodes' data. An assignment that no longer applies is skipped."""

    targets: tuple[RecoveryTarget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterNode(WriteRequest):
    """Register a broker process. A larger epoch fences older ones.

    `process_id` distinguishes processes of one epoch. Empty means unknown.
    """

    node: NodeIdentity
    wal_config: str = ""
    tags: Tags = ()
    process_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodes(ReadRequest):
    """Read all nodes or those with the ids. Without a page all must fit in one answer."""

    node_ids: tuple[int, ...] = ()
    include_stream_set_objects: bool = False
    page: PageRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutKVs(WriteRequest):
    """Put values, each with its own condition."""

    items: tuple[KVToPut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVKey:
    """A key. `expected_version` is a condition of deletes only."""

    key: str
    namespace: str = ""
    expected_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetKVs(ReadRequest):
    """Read values. With `may_stop` the answer may cover only the first keys."""

    keys: tuple[KVKey, ...]
    may_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteKVs(WriteRequest):
    """Delete keys, each with its own condition."""

    keys: tuple[KVKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKVs(ReadRequest):
    """Read the keys with a prefix in key order, or the namespaces if `namespaces` is set."""

    namespace: str = ""
    prefix: str = ""
    keys_only: bool = False
    namespaces: bool = False
    page: PageRequest = field(default_factory=PageRequest)
