"""Answers of the metadata, as plain values.

Mirrors the responses in `proto/`: same fields, same meaning. Per-item outcomes are `ErrorCode`
values. A request that fails as a whole raises an exception instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.object_listings import StreamObject, StreamSetObject
from streammeta.controller.metadata.api.object_slices import NO_SLICES, ObjectSlices
from streammeta.controller.metadata.tables.values import (
    Int64Column,
    ObjectKind,
    ObjectState,
    RangeColumns,
    StreamState,
    Tags,
)


class Answer:
    """Base of complete answers. The other classes here are parts of them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateStreamsAnswer(Answer):
    """All streams were created, or none and `stream_ids` is empty."""

    error: ErrorCode
    stream_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """Outcome of one stream. Offsets are -1 on error."""

    error: ErrorCode
    start_offset: int = -1
    next_offset: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStreamsAnswer(Answer):
    """Outcomes in request order."""

    streams: tuple[OpenedStream, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorsAnswer(Answer):
    """One outcome for each stream or named object to close, name or delete, in request order."""

    errors: tuple[ErrorCode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimStreamsAnswer(Answer):
    """Outcome and start offset of each stream, in request order, -1 if the trim was rejected."""

    errors: tuple[ErrorCode, ...]
    start_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpeningStream:
    """A stream open on the node, or a pending upload up to `upload_end_offset`."""

    stream_id: int
    epoch: int
    start_offset: int
    end_offset: int
    upload_end_offset: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GetOpeningStreamsAnswer(Answer):
    """One page, in stream id order. `next_page_token` is empty on the last."""

    error: ErrorCode
    streams: tuple[OpeningStream, ...] = ()
    next_page_token: str = ""


@dataclass(frozen=True, slots=True)
class StreamRange:
    """A period of ownership. The current one ends at the stream's end."""

    range_index: int
    epoch: int
    start_offset: int
    end_offset: int
    node_id: int


@dataclass(frozen=True, slots=True)
class StreamObjectRange:
    """The range that a stream object contains."""

    object_id: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """Offsets that a node acknowledged before a fast close and has not committed yet."""

    node_id: int
    stream_id: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonUploadsAnswer(Answer):
    """Abandoned uploads, the number of closed streams and of streams still open on the node."""

    error: ErrorCode
    abandoned: tuple[PendingUpload, ...] = ()
    closed_streams: int = 0
    open_streams: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDescription:
    """A stream. `epoch`, `range_index` and `node_id` are -1 if it was never opened."""

    stream_id: int
    epoch: int
    range_index: int
    start_offset: int
    end_offset: int
    state: StreamState
    node_id: int
    tags: Tags = ()
    ranges: tuple[StreamRange, ...] = ()
    stream_objects: tuple[StreamObjectRange, ...] = ()
    pending_uploads: tuple[PendingUpload, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FindStreamsAnswer(Answer):
    """One page, in stream id order. `next_page_token` is empty on the last."""

    streams: tuple[StreamDescription, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeStreamsAnswer(FindStreamsAnswer):
    """One page. `total` counts all streams of the cluster."""

    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareObjectsAnswer(Answer):
    """The ids are `first_object_id` and its successors, -1 on error."""

    error: ErrorCode
    first_object_id: int = -1
    deadline_ms: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVResult:
    """The value now stored, or the deleted one. `version` 0 and `found` False if absent."""

    error: ErrorCode
    value: bytes = b""
    version: int = 0
    found: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRowResults:
    """One verdict (an `ErrorCode` number) and one first offset per shared row.

    An offset is -1 if the row has none, or if it is no longer known. `committed_at_ms` is the
    append time of the committed rows, -1 without one.
    """

    errors: Int64Column
    start_offset: Int64Column
    committed_at_ms: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitStreamSetObjectAnswer(Answer):
    """`error` for the whole commit, and one verdict (an `ErrorCode` number) per row.

    If the call fails before its rows are examined, every verdict equals `error`. `kv_results` and
    `trim_errors` have one item for each value to put and stream to trim, or none if the commit
    itself was rejected. `trim_start_offsets` contains the new start of each trimmed stream, and is
    empty unless the commit succeeded. `shared` is None without shared rows.
    """

    error: ErrorCode
    range_errors: Int64Column
    stream_object_errors: Int64Column
    kv_results: tuple[KVResult, ...] = ()
    trim_errors: tuple[ErrorCode, ...] = ()
    trim_start_offsets: tuple[int, ...] = ()
    shared: SharedRowResults | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommitUploadsAnswer(Answer):
    """One `ErrorCode` number per upload, and one per row of ranges, in request order.

    If an upload fails before its rows are examined, they have its error.
    """

    errors: Int64Column
    range_errors: Int64Column


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStreamObjectAnswer(Answer):
    """The outcomes of the commit and its effects, as in `CommitStreamSetObjectAnswer`."""

    error: ErrorCode
    kv_results: tuple[KVResult, ...] = ()
    trim_errors: tuple[ErrorCode, ...] = ()
    trim_start_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer(Answer):
    """The outcome of a call without other results."""

    error: ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectList:
    """Contiguous slices. The first covers the requested start, the last may pass the end.

    Stream offsets are -1 on STREAM_NOT_EXIST. `lost_end_offset` is -1 unless the start lies in
    abandoned offsets. Then there are no slices, and it is the end of these offsets.
    """

    error: ErrorCode
    objects: ObjectSlices = field(default_factory=lambda: NO_SLICES)
    stream_start_offset: int = -1
    stream_end_offset: int = -1
    lost_end_offset: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectLists(Sequence[ObjectList]):
    """Results in columns. A result becomes an `ObjectList` on access.

    The slices of all results are concatenated. `bounds` contains the first row of each result and
    the end of the last one.
    """

    error: Int64Column
    stream_start_offset: Int64Column
    stream_end_offset: Int64Column
    lost_end_offset: Int64Column
    bounds: Int64Column
    slices: ObjectSlices

    def __len__(self) -> int:
        return len(self.error)

    @overload
    def __getitem__(self, at: int) -> ObjectList: ...

    @overload
    def __getitem__(self, at: slice) -> list[ObjectList]: ...

    def __getitem__(self, at: int | slice) -> ObjectList | list[ObjectList]:
        if isinstance(at, slice):
            return [self[index] for index in range(len(self))[at]]

        error, low, high, lost_end, _ = next(self.heads(at, at + 1))
        return ObjectList(
            error=ErrorCode(error),
            objects=self.slices.part(int(self.bounds[at]), int(self.bounds[at + 1])),
            stream_start_offset=low,
            stream_end_offset=high,
            lost_end_offset=lost_end,
        )

    def __iter__(self) -> Iterator[ObjectList]:
        return iter(self[:])

    def heads(self, first: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Iterate over error, stream offsets, lost end and number of slices of some results."""
        counts = np.diff(self.bounds[first : end + 1])
        columns = (
            self.error,
            self.stream_start_offset,
            self.stream_end_offset,
            self.lost_end_offset,
        )
        cells = (values[first:end].tolist() for values in columns)
        return zip(*cells, counts.tolist(), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GetObjectsAnswer(Answer):
    """Results in request order, fewer than queries if the request `may_stop`."""

    results: Sequence[ObjectList]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectDescription:
    """An object. `ranges.stream_epoch` is empty. The last three fields are as in `ObjectSlice`."""

    object_id: int
    state: ObjectState
    kind: ObjectKind
    object_size: int
    timestamp_ms: int
    attributes: int
    node_id: int
    stream_id: int
    ranges: RangeColumns
    composite_id: int = -1
    data_time_ms: int = -1
    min_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    crc32c: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeObjectsAnswer(Answer):
    """One page. `total` counts all objects of the cluster."""

    objects: tuple[ObjectDescription, ...]
    next_page_token: str
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckObjectsAnswer(Answer):
    """States in request order. Ids below `next_object_id` have been issued.

    `cluster_uuid` (empty: not claimed yet) and `issued_below` are the cluster's claim on its
    bucket.
    """

    states: tuple[ObjectState, ...]
    next_object_id: int
    cluster_uuid: str
    issued_below: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireObjectsAnswer(Answer):
    """The number of objects marked destroyed."""

    expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveObjectsAnswer(Answer):
    """The number of objects removed."""

    removed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAnswer(Answer):
    """The number of objects marked destroyed."""

    destroyed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyDeadStreamSetObjectsAnswer(Answer):
    """The number of objects destroyed, and the largest id examined, -1 after the last one."""

    destroyed: int
    next_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldDeletionsAnswer(Answer):
    """The end of the hold, by the leader's clock."""

    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimBucketAnswer(Answer):
    """The cluster's UUID and bound of object ids after the call."""

    cluster_uuid: str
    issued_below: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdoptObjectsAnswer(CommitUploadsAnswer):
    """Errors of objects and of rows. With any, nothing changed. Adopted objects have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRestoreAnswer(Answer):
    """Whether recovery mode was on."""

    was_recovering: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFeatureLevelAnswer(Answer):
    """The level before and after the call."""

    before: int
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdAnswer(Answer):
    """The issued id."""

    node_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueProducerIdsAnswer(Answer):
    """The first of the issued ids, 0 on an error."""

    error: ErrorCode
    first_producer_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireProducersAnswer(Answer):
    """The number of forgotten producers."""

    expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignRecoveriesAnswer(Answer):
    """The number of assignments made."""

    assigned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """A node, without its session, which is not part of the metadata."""

    node_id: int
    node_epoch: int
    failover: bool
    wal_config: str
    tags: Tags
    has_opening_streams: bool
    stream_set_object_count: int
    stream_set_objects: tuple[StreamSetObject, ...] = ()
    locked: bool = False
    pending_upload_count: int = 0
    recovered_by: int = -1
    departed: bool = False
    supervised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodesAnswer(Answer):
    """One page, in node id order."""

    nodes: tuple[NodeDescription, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListStreamSetObjectsAnswer(Answer):
    """One page in object id order. `total` counts all of the node's stream set objects."""

    error: ErrorCode
    objects: tuple[StreamSetObject, ...] = ()
    next_page_token: str = ""
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListStreamObjectsAnswer(Answer):
    """One page, by end offset and object id. It may be short or empty although others follow."""

    error: ErrorCode
    objects: tuple[StreamObject, ...] = ()
    next_page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVResultsAnswer(Answer):
    """Answer to Put-, Get- and DeleteKVs, in request order. GetKVs may stop early."""

    results: tuple[KVResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEntry:
    """A key of a listing."""

    key: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKVsAnswer(Answer):
    """One page. `namespace_names` is set only when namespaces were requested."""

    entries: tuple[KVEntry, ...] = ()
    next_page_token: str = ""
    namespace_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataSize:
    """Numbers of entities in the metadata. `committed_bytes` sums committed objects' sizes."""

    streams: int
    objects: int
    prepared_objects: int
    committed_objects: int
    destroyed_objects: int
    stream_set_objects: int
    nodes: int
    keys: int
    committed_bytes: int
