"""The map: one replicated state machine made of the subjects' managers.

`decide` turns a request into records and an answer without changing anything; `apply` replays
records; `query` reads. One owner calls it, never two at a time. Pure: no I/O, no clock (times come
with the request), no randomness; replay depends on nothing but records and their offsets.

Each applied entry keeps what undoes it until `forget_undo` says it is committed, so that losing
leadership takes back what was replayed and never committed, newest first.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode, InvariantError, NewerLogError
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.api.validation import validate
from streammeta.controller.metadata.decisions.adoption import Adoption
from streammeta.controller.metadata.decisions.commit_effects import CommitEffects, Decided
from streammeta.controller.metadata.decisions.commit_rules import Repeats
from streammeta.controller.metadata.decisions.compactions import Compactions
from streammeta.controller.metadata.decisions.maintenance import (
    BucketClaim,
    Claim,
    DeletionHold,
    ObjectUpkeep,
)
from streammeta.controller.metadata.decisions.named_objects import NamedObjects
from streammeta.controller.metadata.decisions.record_checks import RecordChecks
from streammeta.controller.metadata.decisions.uploads import Uploads
from streammeta.controller.metadata.reads import Reads
from streammeta.controller.metadata.registries.feature_level import FeatureLevel
from streammeta.controller.metadata.registries.kv import KVs
from streammeta.controller.metadata.registries.nodes import Node, Nodes
from streammeta.controller.metadata.registries.object_indexes import NodeObjects
from streammeta.controller.metadata.registries.objects import Objects
from streammeta.controller.metadata.registries.recovery import Recovery
from streammeta.controller.metadata.registries.stream_decisions import StreamDecisions
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.sections.frozen import FrozenMetadata, FrozenParts
from streammeta.controller.metadata.sections.restore import restore
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import (
    INT64_MAX,
    Int64Column,
    ObjectKind,
    ObjectState,
)
from streammeta.controller.records import record as rec
from streammeta.controller.records.record import Record


@dataclass(frozen=True, slots=True)
class Decision:
    """Records to append atomically, and the answer to give once they are committed.

    Without records nothing changes; the answer still speaks of the latest state.
    """

    records: tuple[Record, ...]
    answer: answers.Answer


@dataclass(frozen=True, slots=True)
class _Applied:
    offset: int
    applied_before: int
    undo: Undo = field(default_factory=Undo)


class ClusterMetadata:
    """Streams, objects, nodes and keys, as of the log below `applied_end_offset`."""

    def __init__(self) -> None:
        self.applied_end_offset = 0
        set_objects = NodeObjects()
        self._objects = Objects(set_objects)
        self._streams = Streams(self._objects)
        self._feature_level = FeatureLevel()
        self._nodes = Nodes(set_objects, self._feature_level)
        self._stream_decisions = StreamDecisions(self._streams, self._objects, self._nodes)
        self._kvs = KVs()
        self._bucket_claim = BucketClaim()
        self._repeats = Repeats(self._objects)
        self._uploads = Uploads(
            self._nodes, self._streams, self._objects, self._repeats, self._feature_level
        )
        self._compactions = Compactions(
            self._nodes, self._streams, self._objects, self._uploads, self._repeats
        )
        self._effects = CommitEffects(self._stream_decisions, self._kvs, self._feature_level)
        self._recovery = Recovery()
        self._adoption = Adoption(
            self._nodes, self._streams, self._objects, self._repeats, self._recovery
        )
        self._named = NamedObjects(
            self._nodes,
            self._streams,
            self._objects,
            self._kvs,
            self._repeats,
            self._feature_level,
        )
        self._upkeep = ObjectUpkeep(self._streams, self._objects)
        self._reads = Reads(self._streams, self._objects, self._nodes, self._bucket_claim)
        self._record_checks = RecordChecks(self._streams, self._objects, self._nodes)
        self._applied: deque[_Applied] = deque()
        self._deciders = self._make_deciders()
        self._readers = self._make_readers()
        self._replayers = self._make_replayers()

    @classmethod
    def from_sections(
        cls, sections: Mapping[str, Mapping[str, Any]], end_offset: int
    ) -> "ClusterMetadata":
        """Return the map a `FrozenMetadata` at `end_offset` had these sections of.

        Raises:
            DamagedMapError: they are not those of a map.
        """
        cluster_metadata = cls()
        cluster_metadata.applied_end_offset = end_offset
        restore(
            sections,
            streams=cluster_metadata._streams,
            objects=cluster_metadata._objects,
            nodes=cluster_metadata._nodes,
            kvs=cluster_metadata._kvs,
            upkeep=cluster_metadata._upkeep,
            bucket_claim=cluster_metadata._bucket_claim,
            feature_level=cluster_metadata._feature_level,
            recovery=cluster_metadata._recovery,
            repeats=cluster_metadata._repeats,
        )
        return cluster_metadata

    # ---- the three verbs ----

    def decide(self, request: requests.WriteRequest, now_ms: int, offset: int) -> Decision:
        """Judge a request against the latest state.

        Args:
            request: what is asked.
            now_ms: the leader's wall clock.
            offset: log offset the records would be appended at.

        Raises:
            InvalidRequestError: the request is malformed, or repeats an id with other content.
            LimitExceededError: the request is larger than a limit.
            RecoveringError: the map is in recovery mode, which the request must wait for.
        """
        validate(request)
        self._recovery.require_allowed(request)
        records, answer = self._deciders[type(request)](request, now_ms, offset)
        return Decision(tuple(records), answer)

    def query(self, request: requests.ReadRequest) -> answers.Answer:
        """Read the latest state; raises as `decide` does."""
        validate(request)
        return self._readers[type(request)](request)

    def apply(self, offset: int, records: Sequence[Record]) -> None:
        """Replay one log entry, at or above `applied_end_offset`.

        Raises:
            InvariantError: the records don't fit the map; what was replayed of them is undone.
            NewerLogError: this version can't run at the feature level that they set; likewise.
        """
        if offset < self.applied_end_offset:
            raise InvariantError(
                f"log entry {offset} was to be replayed, but the map holds everything below "
                f"{self.applied_end_offset}"
            )
        entry = _Applied(offset, self.applied_end_offset)
        try:
            for record in records:
                self._record_checks.check(record)
                self._replayers[type(record)](record, offset, entry.undo)
        except Exception as error:
            _undo(entry.undo)
            if isinstance(error, NewerLogError):
                raise
            raise InvariantError(f"log entry {offset} does not fit the map: {error}") from error
        self._applied.append(entry)
        self.applied_end_offset = offset + 1

    # ---- undo ----

    def forget_undo(self, end_offset: int) -> None:
        """Entries below `end_offset` are committed: they can't be undone any more."""
        while self._applied and self._applied[0].offset < end_offset:
            for action in self._applied.popleft().undo.when_committed:
                action()

    def undo_to(self, end_offset: int) -> None:
        """Take back every entry at or above `end_offset`, newest first.

        Raises:
            InvariantError: such an entry was committed; nothing has been undone.
        """
        oldest = self._applied[0].applied_before if self._applied else self.applied_end_offset
        if end_offset < oldest:
            raise InvariantError(
                f"undo to {end_offset} was asked for, but everything below {oldest} is committed"
            )
        while self._applied and self._applied[-1].offset >= end_offset:
            entry = self._applied.pop()
            _undo(entry.undo)
            self.applied_end_offset = entry.applied_before

    # ---- views ----

    def freeze(self) -> FrozenMetadata:
        """Return an immutable view of the map as it is now, entries that may be undone included.

        Publish it only once everything below `applied_end_offset` is committed.
        """
        parts = FrozenParts(
            streams=self._streams.view(),
            objects=self._objects.view(),
            nodes=self._nodes.view(),
            kvs=self._kvs.snapshot(),
            deletion_hold=self._upkeep.hold,
            bucket_claim=self._bucket_claim.current,
            feature_level=self._feature_level.current,
            undecided=self._recovery.undecided,
            left_out=self._repeats.left_out.view(),
        )
        return FrozenMetadata(self.applied_end_offset, parts)

    def state_hash(self) -> bytes:
        """Return 32 bytes: maps that answer alike have equal hashes. Looks at the whole map."""
        return self.freeze().digest()

    def size(self) -> answers.MapSize:
        """Count what the map holds."""
        objects = self._objects
        return answers.MapSize(
            streams=self._streams.live_count(),
            objects=len(objects),
            prepared_objects=objects.count(ObjectState.PREPARED),
            committed_objects=objects.count(ObjectState.COMMITTED),
            destroyed_objects=objects.count(ObjectState.MARK_DESTROYED),
            stream_set_objects=objects.set_object_count(),
            nodes=len(self._nodes),
            keys=len(self._kvs),
            committed_bytes=objects.committed_bytes,
        )

    def used(self) -> Mapping[str, int]:
        """Count what is limited; see `map_limits`."""
        return {
            "streams": self._streams.live_count(),
            "prepared_objects": self._objects.count(ObjectState.PREPARED),
            "nodes": len(self._nodes),
            "kv_keys": len(self._kvs),
            "kv_bytes": self._kvs.nbytes,
            "tag_bytes": self._streams.tag_bytes,
        }

    def ranges_of_streams(self) -> npt.NDArray[np.int32]:
        """Return the number of ranges that objects hold of each stream, by stream id.

        Streams beyond the end have none. Takes milliseconds for millions of streams.
        """
        return self._objects.ranges_of_streams()

    def owned_sizes(self, at_once: int) -> Iterator[tuple[Int64Column, Int64Column, Int64Column]]:
        """Yield stream, node and size of committed objects, some rows at a time.

        See `ObjectQueries.owned_sizes`. A piece of 65,536 rows takes a millisecond or two.
        """
        return self._objects.owned_sizes(at_once)

    def has_node(self, node_id: int) -> bool:
        """Return whether a node is known, departed ones included."""
        return self._nodes.get(node_id) is not None

    def kv_size(self, namespace: str, key: str) -> int:
        """Return the bytes of a key and its value, -1 if there is no such key."""
        return self._kvs.size_of(namespace, key)

    def kv_value(self, namespace: str, key: str) -> bytes | None:
        """Return the value of a key, None if there is no such key."""
        return self._kvs.value_of(namespace, key)

    def nodes(self, node_ids: Sequence[int] = ()) -> Sequence[answers.NodeDescription]:
        """Describe these nodes, or all, however many; callers far away ask `query`."""
        return self._reads.describe_nodes(node_ids)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for columns; dictionaries (tags, nodes, keys) come on top."""
        return self._streams.nbytes + self._objects.nbytes

    def node(self, node_id: int) -> Node | None:
        """Return a node as of now, or None if it never registered or is forgotten."""
        return self._nodes.get(node_id)

    # ---- the life of objects ----

    @property
    def bucket_claim(self) -> Claim:
        """The cluster's UUID and bound of object ids."""
        return self._bucket_claim.current

    @property
    def feature_level(self) -> int:
        """The cluster's feature level, see `features`."""
        return self._feature_level.current

    @property
    def undecided(self) -> tuple[int, int] | None:
        """Bounds of the ids that a restore has left undecided; None unless in recovery mode."""
        return self._recovery.undecided

    @property
    def next_object_id(self) -> int:
        """The object id that is issued next."""
        return self._objects.next_object_id

    def expired(
        self, now_ms: int, limit: int, since_ms: int = 0, beyond_ms: int = INT64_MAX
    ) -> tuple[int, ...]:
        """Return at most `limit` prepared objects that `ExpireObjects` marks at `now_ms`."""
        request = requests.ExpireObjects(limit=limit, since_ms=since_ms, beyond_ms=beyond_ms)
        return self._upkeep.expired(request, now_ms)

    def destroyed(self, marked_before_ms: int, limit: int, now_ms: int) -> tuple[int, ...]:
        """Return at most `limit` objects marked destroyed before that time, oldest first.

        Those whose bytes are held at `now_ms` are left out.
        """
        return self._upkeep.deletable(marked_before_ms, limit, now_ms)

    def uncommitted(self, object_ids: Sequence[int]) -> set[int]:
        """Return those of some objects that the map has and that were never committed.

        A mark does not change the kind of an object, and a commit gives it one.
        """
        ids = np.array(object_ids, dtype=np.int64)
        rows = self._objects.rows(ids)
        known = rows >= 0
        is_unused = self._objects.kinds(rows[known]) == ObjectKind.UNKNOWN
        return set(ids[known][is_unused].tolist())

    def stream_ends(self, stream_ids: Int64Column) -> dict[int, int]:
        """Return the end offsets of streams without the deleted ones.

        A trim beyond the end raises it. A stream whose id was not issued yet ends at 0.
        """
        is_issued = stream_ids < len(self._streams)
        issued = stream_ids[is_issued]
        live = issued[self._streams.existing(issued)]
        ends = dict.fromkeys(stream_ids[~is_issued].tolist(), 0)
        ends.update(zip(live.tolist(), self._streams.end_offsets(live).tolist(), strict=True))
        return ends

    @property
    def deletion_hold(self) -> DeletionHold:
        """The replicated deletion hold."""
        return self._upkeep.hold

    def newest_stamp_ms(self, most_ms: int) -> int:
        """Return the newest time of a commit or of a mark up to `most_ms`, -1 without any."""
        return self._objects.newest_stamp_ms(most_ms)

    def has_sweepings(self) -> bool:
        """Return whether a deleted stream has left objects to destroy."""
        return self._objects.has_sweepings()

    # ---- deciding ----

    def _make_deciders(self) -> dict[type, Callable[..., tuple[Sequence[Record], answers.Answer]]]:
        # Each value takes exactly its key's type, which a dictionary's type can't say.
        streams, uploads = self._stream_decisions, self._uploads
        upkeep, nodes = self._upkeep, self._nodes
        return {
            requests.CreateStreams: _without_time(streams.create),
            requests.OpenStreams: _without_time(streams.open),
            requests.CloseStreams: _without_time(streams.close),
            requests.TrimStreams: _without_time(streams.trim),
            requests.DeleteStreams: _with_time(self._decide_delete_streams),
            requests.AbandonUploads: _without_time(streams.abandon),
            requests.ReleaseStreams: _without_time(streams.release),
            requests.GetOpeningStreams: _without_time(self._decide_opening),
            requests.PrepareObjects: _with_time(self._decide_prepare),
            requests.CommitStreamSetObject: self._decide_set_object,
            requests.CommitUploads: _with_time(uploads.decide_batch),
            requests.CommitStreamObject: self._decide_stream_object,
            requests.ExpireObjects: _with_time(_one(upkeep.decide_expire)),
            requests.RemoveObjects: _without_time(_one(upkeep.decide_remove)),
            requests.SweepDeletedStreams: _with_time(_one(upkeep.decide_sweep)),
            requests.DestroyDeadSetObjects: _with_time(_one(upkeep.decide_destroy_dead)),
            requests.HoldDeletions: _with_time(_one(upkeep.decide_hold)),
            requests.ClaimBucket: _without_time(_one(self._bucket_claim.decide)),
            requests.SetFeatureLevel: _without_time(_one(self._feature_level.decide)),
            requests.AdoptObjects: _with_time(self._adoption.decide),
            requests.FinishRestore: _without_time(_one(self._recovery.decide_finish)),
            requests.RegisterNode: _without_time(_one(nodes.decide_register)),
            requests.UnregisterNode: _without_time(_one(self._decide_unregister)),
            requests.GetNextNodeId: _without_time(_one(nodes.decide_next_id)),
            requests.SetNodeLock: _without_time(_one(nodes.decide_lock)),
            requests.SuperviseNode: _without_time(_one(nodes.decide_supervise)),
            requests.AssignRecoveries: _without_time(nodes.decide_recoveries),
            requests.PutKVs: lambda request, _, offset: _one(self._kvs.decide_put)(request, offset),
            requests.DeleteKVs: _with_time(self._decide_delete_keys),
            requests.CommitNamedObjects: _with_time(self._named.decide_commit),
            requests.DeleteNamedObjects: _with_time(self._named.decide_delete),
        }

    def _decide_opening(
        self, request: requests.GetOpeningStreams
    ) -> tuple[Sequence[Record], answers.GetOpeningStreamsAnswer]:
        record: rec.NodeEpochSet | None = None
        error = ErrorCode.NONE
        if request.page.page_token or request.recoverer is not None:
            error = self._nodes.check(
                request.node, fence_failover=False, recoverer=request.recoverer
            )
        if error is ErrorCode.NONE and not request.page.page_token:
            record, error = self._nodes.decide_epoch(request.node, failover=request.failover)
        if error is not ErrorCode.NONE:
            return (), answers.GetOpeningStreamsAnswer(error=error)
        answer = self._reads.opening_streams(request.node.node_id, request.page)
        changes = record is not None and answer.error is ErrorCode.NONE
        return (record,) if record is not None and changes else (), answer

    def _decide_unregister(
        self, request: requests.UnregisterNode
    ) -> tuple[rec.NodeUnregistered | None, answers.ErrorAnswer]:
        node_id = request.node.node_id
        owes = self._streams.open_count(node_id) > 0
        owes = owes or len(self._streams.active_uploads(node_id)) > 0
        return self._nodes.decide_unregister(request.node, owes_streams=owes)

    def _decide_prepare(
        self, request: requests.PrepareObjects, now_ms: int
    ) -> tuple[Sequence[Record], answers.PrepareObjectsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), answers.PrepareObjectsAnswer(error=error)
        return self._objects.decide_prepare(request, now_ms)

    def _decide_delete_streams(
        self, request: requests.DeleteStreams, now_ms: int
    ) -> tuple[Sequence[Record], answers.Answer]:
        records, answer = self._stream_decisions.delete(request, now_ms)
        gone = [
            stream_id
            for record in records
            if isinstance(record, rec.StreamsDeleted)
            for stream_id in record.stream_id.tolist()
        ]
        return (*records, *self._named.gone_with_streams(gone, now_ms)), answer

    def _decide_delete_keys(
        self, request: requests.DeleteKVs, now_ms: int
    ) -> tuple[Sequence[Record], answers.Answer]:
        record, answer = self._kvs.decide_delete(request)
        if record is None:
            return (), answer
        gone = zip(record.namespaces, record.keys, strict=True)
        return (record, *self._named.gone_with_keys(gone, now_ms)), answer

    def _decide_set_object(
        self, request: requests.CommitStreamSetObject, now_ms: int, offset: int
    ) -> Decided:
        if len(request.compacted_object_ids):
            records, answer = self._compactions.decide_set_object(request, now_ms)
        else:
            records, answer = self._uploads.decide(request, now_ms)
        return self._effects.added(request, records, answer, offset)

    def _decide_stream_object(
        self, request: requests.CommitStreamObject, now_ms: int, offset: int
    ) -> Decided:
        records, answer = self._compactions.decide_stream_object(request, now_ms)
        return self._effects.added(request, records, answer, offset)

    # ---- reading and replaying ----

    def _make_readers(self) -> dict[type, Callable[..., answers.Answer]]:
        return {
            requests.DescribeStreams: self._reads.describe_streams,
            requests.GetObjects: self._reads.get_objects,
            requests.DescribeObjects: self._reads.describe_objects,
            requests.CheckObjects: self._reads.check_objects,
            requests.GetNodes: self._reads.get_nodes,
            requests.ListStreamSetObjects: self._reads.list_set_objects,
            requests.GetKVs: self._kvs.get,
            requests.ListKVs: self._kvs.list,
            requests.DescribeNamedObjects: self._named.describe,
        }

    def _make_replayers(self) -> dict[type, Callable[[Any, int, Undo], None]]:
        streams, objects, nodes, uploads = self._streams, self._objects, self._nodes, self._uploads
        anywhere: dict[type, Callable[[Any, Undo], None]] = {
            rec.StreamsCreated: streams.replay_created,
            rec.StreamsOpened: streams.replay_opened,
            rec.StreamsReopened: streams.replay_reopened,
            rec.StreamsClosed: streams.replay_closed,
            rec.StreamsTrimmed: streams.replay_trimmed,
            rec.RangesRemoved: streams.replay_ranges_removed,
            rec.StreamsDeleted: streams.replay_deleted,
            rec.ObjectsPrepared: objects.replay_prepared,
            rec.StreamSetObjectsCommitted: uploads.replay_set_objects,
            rec.StreamObjectsCommitted: uploads.replay_stream_objects,
            rec.NamedObjectsCommitted: objects.replay_named,
            rec.CommitRowsRejected: self._repeats.left_out.replay,
            rec.PendingUploadsSet: streams.replay_pending_set,
            rec.UploadsAbandoned: streams.replay_abandoned,
            rec.ObjectsDestroyed: self._replay_destroyed,
            rec.ObjectsRemoved: objects.replay_removed,
            rec.ObjectsLinked: objects.replay_linked,
            rec.ObjectAttributesSet: objects.replay_attributes,
            rec.DeletionsHeld: self._upkeep.replay_held,
            rec.BucketClaimed: self._bucket_claim.replay,
            rec.FeatureLevelSet: self._feature_level.replay,
            rec.ObjectsReclaimed: objects.replay_reclaimed,
            rec.RestoreFinished: self._recovery.replay_finished,
            rec.NodeRegistered: nodes.replay_registered,
            rec.NodeEpochSet: nodes.replay_epoch_set,
            rec.NodeUnregistered: self._replay_unregistered,
            rec.NodeIdIssued: nodes.replay_id_issued,
            rec.NodeLocked: nodes.replay_locked,
            rec.NodeSupervised: nodes.replay_supervised,
            rec.RecoveryAssigned: nodes.replay_recovery_assigned,
            rec.KVsDeleted: self._kvs.replay_deleted,
        }
        replayers = {kind: _ignoring_offset(replay) for kind, replay in anywhere.items()}
        return {**replayers, rec.KVsPut: self._kvs.replay_put}

    def _replay_destroyed(self, record: rec.ObjectsDestroyed, undo: Undo) -> None:
        self._objects.replay_destroyed(record, undo)
        self._nodes.forget_departed(undo)

    def _replay_unregistered(self, record: rec.NodeUnregistered, undo: Undo) -> None:
        # Nothing of what is on its list is owed any more.
        self._streams.drop_pending(record.node_id, undo)
        self._nodes.replay_unregistered(record, undo)


def _ignoring_offset(replay: Callable[[Any, Undo], None]) -> Callable[[Any, int, Undo], None]:
    return lambda record, _offset, undo: replay(record, undo)


def _undo(actions: Undo) -> None:
    for action in reversed(actions):
        action()


def _with_time(decide: Callable[..., Any]) -> Callable[..., Any]:
    return lambda request, now_ms, _offset: decide(request, now_ms)


def _without_time(decide: Callable[..., Any]) -> Callable[..., Any]:
    return lambda request, _now_ms, _offset: decide(request)


def _one(decide: Callable[..., tuple[Record | None, Any]]) -> Callable[..., Any]:
    """Turn a decision of one record or none into one of several."""

    def decided(*args: Any) -> tuple[Sequence[Record], Any]:
        record, answer = decide(*args)
        return () if record is None else (record,), answer

    return decided
