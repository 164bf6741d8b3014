"""Checks of records before replay: the entities they name must exist, in the required state.

Decisions only produce records that pass, so one that fails was damaged, or written by a faulty
controller. It is rejected as a whole, before it changes anything. Columns are checked by vector
operations. Conditions that depend on the request are not checked again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from streammeta.controller.errors import InvariantError
from streammeta.controller.metadata.api.commit_validation import all_between
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.object_queries import ObjectQueries
from streammeta.controller.metadata.registries.producers import Producers
from streammeta.controller.metadata.registries.stream_heads import DELETED
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables.values import (
    INT32_MAX,
    INT64_MAX,
    Int64Column,
    Mask,
    ObjectKind,
    ObjectState,
    StreamState,
)
from streammeta.controller.records import record as rec
from streammeta.controller.records.record import Record

_PREPARED = int(ObjectState.PREPARED)
_COMMITTED = int(ObjectState.COMMITTED)
_DESTROYED = int(ObjectState.MARK_DESTROYED)
_LINKED = int(ObjectState.LINKED)
_SET = int(ObjectKind.STREAM_SET)
_COMPOSITE = int(ObjectKind.COMPOSITE)
_NAMED = int(ObjectKind.NAMED)
_OPENED = int(StreamState.OPENED)
_CLOSED = int(StreamState.CLOSED)
_SHARED = int(StreamState.SHARED)


class RecordChecks:
    """Checks of all kinds of records against the metadata they are to be replayed on."""

    def __init__(
        self, streams: Streams, objects: ObjectQueries, nodes: Nodes, producers: Producers
    ) -> None:
        self._streams = streams
        self._objects = objects
        self._nodes = nodes
        self._producers = producers
        self._checks: dict[type, Callable[[Any], None]] = {
            rec.StreamsCreated: self._check_created,
            rec.StreamsOpened: self._check_opened,
            rec.StreamsReopened: lambda record: self._check_live(record.stream_id, _CLOSED),
            rec.StreamsClosed: self._check_closed,
            rec.StreamsTrimmed: self._check_trimmed,
            rec.RangesRemoved: self._check_ranges_removed,
            rec.StreamsDeleted: lambda record: self._check_live(record.stream_id),
            rec.ObjectsPrepared: self._check_prepared,
            rec.StreamSetObjectsCommitted: self._check_set_objects,
            rec.StreamObjectsCommitted: self._check_stream_objects,
            rec.NamedObjectsCommitted: lambda record: self._check_committable(
                record.object_id, record.object_size
            ),
            rec.ObjectsDestroyed: lambda record: self._check_in_state(
                record.object_id, _PREPARED, _COMMITTED, _LINKED
            ),
            rec.ObjectsReclaimed: self._check_reclaimed,
            rec.ObjectsRemoved: lambda record: self._check_in_state(record.object_id, _DESTROYED),
            rec.ObjectsLinked: self._check_linked,
            rec.ObjectAttributesSet: lambda record: self._check_in_state(
                np.array([record.object_id]), _COMMITTED
            ),
            rec.PendingUploadsSet: self._check_pending,
            rec.UploadsAbandoned: self._check_abandoned,
            rec.NodeLocked: self._check_node,
            rec.NodeUnregistered: self._check_node,
            rec.NodeSupervised: self._check_node,
            rec.RecoveryAssigned: self._check_node,
            rec.NodeRegistered: self._check_node_epoch,
            rec.NodeEpochSet: self._check_node_epoch,
            rec.NodeIdIssued: lambda record: _require_not_negative("node_id", record.node_id),
            rec.ProducerBatchesCommitted: self._check_batches,
            rec.ProducerIdsIssued: self._check_producer_ids,
            rec.ProducersExpired: self._check_expired,
        }

    def check(self, record: Record) -> None:
        """Raise `InvariantError` if a record does not fit the metadata.

        Kinds that refer to no existing entity need no check.
        """
        check = self._checks.get(type(record))
        if check is None:
            return
        try:
            check(record)
        except InvariantError as error:
            raise InvariantError(f"{type(record).__name__}: {error}") from None

    # ---- streams ----

    def _check_created(self, record: rec.StreamsCreated) -> None:
        self._check_node(record)
        _require_positive("count", record.count)
        if len(record.tags) not in (0, record.count):
            raise InvariantError(f"tags: {len(record.tags)} for {record.count} streams")
        if len(record.shared) not in (0, record.count):
            raise InvariantError(f"shared: {len(record.shared)} for {record.count} streams")
        is_flag = (record.shared == 0) | (record.shared == 1)
        _require("shared", is_flag, record.shared, "0 or 1")

    def _check_opened(self, record: rec.StreamsOpened) -> None:
        self._check_node(record)
        self._check_live(record.stream_id)
        owned = self._streams.states(record.stream_id) != _SHARED
        _require("stream_id", owned, record.stream_id, "a stream that is not shared")
        # Only a larger epoch fences the previous owner.
        later = record.stream_epoch > self._streams.epochs(record.stream_id)
        _require("stream_epoch", later, record.stream_epoch, "above the stream's")
        if len(record.tags) not in (0, len(record.stream_id)):
            raise InvariantError(f"tags: {len(record.tags)} for {len(record.stream_id)} streams")

    def _check_closed(self, record: rec.StreamsClosed) -> None:
        self._check_live(record.stream_id, _OPENED)
        _require("end_offset", record.end_offset >= -1, record.end_offset, "-1 or more")

    def _check_trimmed(self, record: rec.StreamsTrimmed) -> None:
        self._check_live(record.stream_id)
        forward = record.start_offset >= self._streams.start_offsets(record.stream_id)
        _require("start_offset", forward, record.start_offset, "the stream's or above")

    def _check_ranges_removed(self, record: rec.RangesRemoved) -> None:
        ids = record.stream_id
        self._check_issued("stream_id", ids)
        good = self._streams.exist(ids)
        _require("stream_id", good, ids, "a stream that exists")
        past = (record.range_index >= 0) & (record.range_index < self._streams.range_indexes(ids))
        _require("range_index", past, record.range_index, "a range before the current one")

    def _check_live(self, stream_id: Int64Column, state: int | None = None) -> None:
        """Check that streams exist, in the given state if any, each named once."""
        self._check_issued("stream_id", stream_id)
        _require_unique("stream_id", stream_id)

        states = self._streams.states(stream_id)
        if state is None:
            _require("stream_id", states != DELETED, stream_id, "a stream that exists")
        else:
            wanted = f"a stream that is {StreamState(state).name}"
            _require("stream_id", states == state, stream_id, wanted)

    def _check_issued(self, field: str, stream_id: Int64Column) -> None:
        count = len(self._streams)
        # Most records name one stream, and vector operations would cost more than their replay.
        if len(stream_id) == 1 and 0 <= stream_id.item() < count:
            return
        # As an unsigned number a negative id is very large, so one comparison finds both errors.
        if len(stream_id) and np.maximum.reduce(stream_id.view(np.uint64)) >= count:
            good = (stream_id >= 0) & (stream_id < count)
            _require(field, good, stream_id, f"one of the {count} streams ever created")

    # ---- objects ----

    def _check_prepared(self, record: rec.ObjectsPrepared) -> None:
        self._check_node(record)
        _require_positive("count", record.count)
        _require_not_negative("deadline_ms", record.deadline_ms)

    def _check_reclaimed(self, record: rec.ObjectsReclaimed) -> None:
        ids = record.object_id
        if not len(ids):
            raise InvariantError("object_id: none")
        _require_unique("object_id", ids)
        issued = (ids >= 0) & (ids < self._objects.next_object_id)
        _require("object_id", issued, ids, "an id that was issued")
        _require("object_id", self._objects.rows(ids) < 0, ids, "an id that no object has")
        _require_not_negative("deadline_ms", record.deadline_ms)

    def _check_set_objects(self, record: rec.StreamSetObjectsCommitted) -> None:
        self._check_node(record)
        self._check_committable(record.object_id, record.object_size)
        if len(record.range_count) > 1 or record.range_count.item() < 0:
            good = record.range_count >= 0
            _require("range_count", good, record.range_count, "0 or more")
        self._check_ranges(record.ranges)

    def _check_stream_objects(self, record: rec.StreamObjectsCommitted) -> None:
        self._check_committable(record.object_id, record.object_size)
        self._check_ranges(record)

    def _check_committable(self, object_id: Int64Column, object_size: Int64Column) -> None:
        if not len(object_id):
            raise InvariantError("object_id: none")
        if len(object_id) > 1 or not self._objects.is_prepared(object_id.item()):
            self._check_in_state(object_id, _PREPARED)
        if not all_between(object_size, 0, INT64_MAX):
            _require("object_size", object_size >= 0, object_size, "0 or more")

    def _check_ranges(self, ranges: Any) -> None:
        self._check_issued("stream_id", ranges.stream_id)
        start, end = ranges.start_offset, ranges.end_offset
        if len(start) == 1 and 0 <= start.item() < end.item():
            return
        good = (start >= 0) & (start < end)
        _require("start_offset", good, start, "0 or more, and below end_offset")

    def _check_linked(self, record: rec.ObjectsLinked) -> None:
        self._check_in_state(record.object_id, _COMMITTED, _LINKED)
        kinds = self._objects.kinds(self._objects.rows(record.object_id))
        of_stream = (kinds != _SET) & (kinds != _NAMED)
        _require("object_id", of_stream, record.object_id, "a stream object")
        row = self._objects.rows(np.array([record.composite_id]))
        committed = self._objects.are_in_state(row, ObjectState.COMMITTED)[0]
        if not committed or self._objects.kinds(row)[0] != _COMPOSITE:
            raise InvariantError(
                f"composite_id: names object {record.composite_id}, must be a committed composite"
            )

    def _check_in_state(self, object_id: Int64Column, *states: int) -> None:
        """Check that objects exist in one of these states, each named once."""
        rows = self._objects.rows(object_id)
        if len(rows) and np.minimum.reduce(rows) < 0:
            _require("object_id", rows >= 0, object_id, "an object that exists")

        found = self._objects.row_states(rows)
        # isin would sort, and there are three states at most.
        good = found == states[0]
        for state in states[1:]:
            good |= found == state
        if np.count_nonzero(good) < len(good):
            wanted = " or ".join(ObjectState(state).name for state in states)
            _require("object_id", good, object_id, f"an object that is {wanted}")
        _require_unique("object_id", object_id)

    # ---- nodes and their pending uploads ----

    def _check_node(self, record: Any) -> None:
        if self._nodes.get(record.node_id) is None:
            raise InvariantError(f"node_id: names node {record.node_id}, which does not exist")

    def _check_node_epoch(self, record: rec.NodeRegistered | rec.NodeEpochSet) -> None:
        _require_not_negative("node_id", record.node_id)
        _require_not_negative("node_epoch", record.node_epoch)
        node = self._nodes.get(record.node_id)
        if node is not None and record.node_epoch < node.node_epoch:
            raise InvariantError(
                f"node_epoch: {record.node_epoch}, but node {record.node_id} has "
                f"epoch {node.node_epoch}"
            )

    def _check_pending(self, record: rec.PendingUploadsSet) -> None:
        self._check_node(record)
        self._check_issued("stream_id", record.stream_id)
        _require_unique("stream_id", record.stream_id)
        start, end = record.start_offset, record.end_offset
        _require("start_offset", (start >= 0) & (start <= end), start, "0 to end_offset")

    def _check_abandoned(self, record: rec.UploadsAbandoned) -> None:
        self._check_node(record)
        # A node can only abandon its own uploads.
        owed = self._streams.pending_of(record.node_id).stream_id
        good = np.isin(record.stream_id, owed)
        _require("stream_id", good, record.stream_id, "a stream with a pending upload of the node")
        _require_unique("stream_id", record.stream_id)

    # ---- producers ----

    def _check_batches(self, record: rec.ProducerBatchesCommitted) -> None:
        if not len(record.stream_id):
            raise InvariantError("stream_id: none")
        _require_not_negative("committed_at_ms", record.committed_at_ms)
        self._check_issued("stream_id", record.stream_id)
        for field, low, high in _BATCH_BOUNDS:
            values = getattr(record, field)
            if not all_between(values, low, high):
                good = (values >= low) & (values <= high)
                _require(field, good, values, f"{low} to {high}")

    def _check_producer_ids(self, record: rec.ProducerIdsIssued) -> None:
        _require_positive("count", record.count)
        following = self._producers.next_producer_id
        if record.first_producer_id != following:
            raise InvariantError(
                f"first_producer_id: {record.first_producer_id}, must be the next id {following}"
            )
        if record.count > INT64_MAX - following:
            raise InvariantError(f"count: {record.count}, but ids are at most {INT64_MAX}")

    def _check_expired(self, record: rec.ProducersExpired) -> None:
        streams, producers = record.stream_id, record.producer_id
        known = self._producers.are_known(streams, producers)
        _require("producer_id", known, producers, "a producer of the stream")
        pairs = list(zip(streams.tolist(), producers.tolist(), strict=True))
        if len(set(pairs)) < len(pairs):
            raise InvariantError("producer_id: names a producer of a stream twice")


_BATCH_BOUNDS = (
    ("producer_id", 0, INT64_MAX),
    ("producer_epoch", 0, INT32_MAX),
    ("first_sequence", 0, INT32_MAX),
    ("record_count", 1, INT32_MAX),
    ("start_offset", 0, INT64_MAX),
)


def _require(field: str, good: Mask, values: Int64Column, wanted: str) -> None:
    if np.count_nonzero(good) < len(good):
        row = int(np.argmin(good))
        raise InvariantError(f"{field}[{row}]: names {values[row]}, must be {wanted}")


def _require_unique(field: str, values: Int64Column) -> None:
    if len(values) < 2:
        return
    # Sorting needs no table of all ids, unlike counting.
    ordered = np.sort(values)
    twins = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twins):
        raise InvariantError(f"{field}: names {twins[0]} twice")


def _require_positive(field: str, value: int) -> None:
    if value < 1:
        raise InvariantError(f"{field}: {value}, must be 1 or more")


def _require_not_negative(field: str, value: int) -> None:
    if value < 0:
        raise InvariantError(f"{field}: {value}, must be 0 or more")
