"""The map: one replicated state machine made of the subjects' managers.

`decide` turns a request into records and an answer without changing anything; `apply` replays
records; `query` reads. One owner calls it, never two at a time. Pure: no I/O, no clock (times come
with the request), no randomness; replay depends on nothing but records and their offsets.

Each applied entry keeps what undoes it until `forget_undo` says it is committed, so that losing
leadership takes back what was replayed and never committed, newest first.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streammeta.controller.errors import ErrorCode, InvalidRequestError, InvariantError
from streammeta.controller.metadata.answers import (
    AbandonUploadsAnswer,
    Answer,
    CommitStreamSetObjectAnswer,
    CreateStreamsAnswer,
    ErrorAnswer,
    GetOpeningStreamsAnswer,
    MapSize,
    OpenedStream,
    OpenStreamsAnswer,
    PrepareObjectsAnswer,
    StreamErrorsAnswer,
)
from streammeta.controller.metadata.commit_rules import Repeats
from streammeta.controller.metadata.compactions import Compactions
from streammeta.controller.metadata.frozen import FrozenMap, FrozenParts
from streammeta.controller.metadata.kv import KVs
from streammeta.controller.metadata.maintenance import BucketClaim, Claim, ObjectUpkeep
from streammeta.controller.metadata.nodes import Nodes
from streammeta.controller.metadata.object_indexes import NodeObjects
from streammeta.controller.metadata.objects import Objects
from streammeta.controller.metadata.reads import Reads, StreamReads
from streammeta.controller.metadata.record_checks import RecordChecks
from streammeta.controller.metadata.request_identity import (
    IssuedIds,
    RequestKey,
    RequestKind,
    digest_of_tags,
)
from streammeta.controller.metadata.requests import (
    AbandonUploads,
    AssignRecoveries,
    CheckObjects,
    ClaimBucket,
    CloseStreams,
    CommitStreamObject,
    CommitStreamSetObject,
    CommitUploads,
    CreateStreams,
    DeleteKVs,
    DeleteStreams,
    DescribeObjects,
    DescribeStreams,
    DestroyDeadSetObjects,
    ExpireObjects,
    GetKVs,
    GetNextNodeId,
    GetNodes,
    GetObjects,
    GetOpeningStreams,
    HoldDeletions,
    ListKVs,
    ListStreamSetObjects,
    OpenStreams,
    PrepareObjects,
    PutKVs,
    ReadRequest,
    RegisterNode,
    RemoveObjects,
    SetNodeLock,
    SuperviseNode,
    SweepDeletedStreams,
    TrimStreams,
    UnregisterNode,
    WriteRequest,
)
from streammeta.controller.metadata.restore import restore
from streammeta.controller.metadata.shared_views import Window
from streammeta.controller.metadata.stream_decisions import StreamDecisions
from streammeta.controller.metadata.streams import Streams
from streammeta.controller.metadata.tables import Undo
from streammeta.controller.metadata.uploads import Uploads
from streammeta.controller.metadata.validation import validate
from streammeta.controller.metadata.values import ObjectState
from streammeta.controller.records.record import (
    BucketClaimed,
    CommitRowsRejected,
    DeletionsHeld,
    KVsDeleted,
    KVsPut,
    NodeEpochSet,
    NodeIdIssued,
    NodeLocked,
    NodeRegistered,
    NodeSupervised,
    NodeUnregistered,
    ObjectAttributesSet,
    ObjectsDestroyed,
    ObjectsLinked,
    ObjectsPrepared,
    ObjectsRemoved,
    PendingUploadsSet,
    RangesRemoved,
    Record,
    RecoveryAssigned,
    StreamObjectsCommitted,
    StreamsClosed,
    StreamsCreated,
    StreamsDeleted,
    StreamSetObjectsCommitted,
    StreamsOpened,
    StreamsReopened,
    StreamsTrimmed,
    UploadsAbandoned,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to append, atomically, and what to answer once it is committed.

    Without records nothing changes; the answer still speaks of the latest state.
    """

    records: tuple[Record, ...]
    answer: Answer


@dataclass(frozen=True, slots=True)
class _Applied:
    offset: int
    applied_before: int
    undo: Undo = field(default_factory=Undo)


class ClusterMap:
    """Streams, objects, nodes and keys, as of the log below `applied_end_offset`."""

    def __init__(self) -> None:
        self.applied_end_offset = 0
        set_objects = NodeObjects()
        self._objects = Objects(set_objects)
        self._streams = Streams(self._objects)
        self._nodes = Nodes(set_objects)
        self._stream_decisions = StreamDecisions(self._streams, self._objects, self._nodes)
        self._kvs = KVs()
        self._bucket_claim = BucketClaim()
        self._repeats = Repeats(self._objects)
        self._uploads = Uploads(self._nodes, self._streams, self._objects, self._repeats)
        self._compactions = Compactions(
            self._nodes, self._streams, self._objects, self._uploads, self._repeats
        )
        self._upkeep = ObjectUpkeep(self._streams, self._objects)
        self._reads = Reads(self._streams, self._objects, self._nodes, self._bucket_claim)
        self._stream_reads = StreamReads(self._streams, self._objects)
        self._record_checks = RecordChecks(self._streams, self._objects, self._nodes)
        self._applied: deque[_Applied] = deque()
        self._deciders = self._make_deciders()
        self._readers = self._make_readers()
        self._replayers = self._make_replayers()

    @classmethod
    def from_sections(
        cls, sections: Mapping[str, Mapping[str, Any]], end_offset: int
    ) -> "ClusterMap":
        """Return the map a `FrozenMap` at `end_offset` had these sections of.

        Raises:
            DamagedMapError: they are not those of a map.
        """
        cluster_map = cls()
        cluster_map.applied_end_offset = end_offset
        restore(
            sections,
            streams=cluster_map._streams,
            objects=cluster_map._objects,
            nodes=cluster_map._nodes,
            kvs=cluster_map._kvs,
            upkeep=cluster_map._upkeep,
            bucket_claim=cluster_map._bucket_claim,
            rejected=cluster_map._repeats.rejected,
        )
        return cluster_map

    # ---- the three verbs ----

    def decide(self, request: WriteRequest, now_ms: int, offset: int) -> Decision:
        """Judge a request against the latest state.

        Args:
            request: what is asked.
            now_ms: the leader's wall clock.
            offset: log offset the records would be appended at.

        Raises:
            InvalidRequestError: the request is malformed, or repeats an id with other content.
            LimitExceededError: the request is larger than a limit.
        """
        validate(request)
        records, answer = self._deciders[type(request)](request, now_ms, offset)
        return Decision(tuple(records), answer)

    def query(self, request: ReadRequest) -> Answer:
        """Read the latest state; raises as `decide` does."""
        validate(request)
        return self._readers[type(request)](request)

    def apply(self, offset: int, records: Sequence[Record]) -> None:
        """Replay one log entry, at or above `applied_end_offset`.

        Raises:
            InvariantError: the records don't fit the map; what was replayed of them is undone.
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

    def freeze(self) -> FrozenMap:
        """Return an immutable view of the map as it is now, entries that may be undone included.

        Who publishes it waits until everything below `applied_end_offset` is committed.
        """
        return FrozenMap(self.applied_end_offset, self._parts())

    def state_hash(self) -> bytes:
        """Return 32 bytes: maps that answer alike have equal hashes. Looks at the whole map."""
        return self.freeze().digest()

    def _parts(self) -> FrozenParts:
        streams, past_ranges, tags = self._streams.view()
        objects, object_ranges, object_facts = self._objects.view()
        return FrozenParts(
            streams=streams,
            past_ranges=past_ranges,
            tags=tags,
            objects=objects,
            object_ranges=object_ranges,
            object_facts=object_facts,
            next_object_id=self._objects.next_object_id,
            deletion_hold=self._upkeep.hold,
            bucket_claim=self._bucket_claim.current,
            pending=self._streams.pending.in_order(),
            lost=self._streams.lost.spans,
            nodes=self._nodes.in_order(),
            last_node_id=self._nodes.last_issued_id,
            free_node_ids=self._nodes.free_ids,
            kvs=self._kvs.snapshot(),
            requests=(
                self._streams.requests.view(),
                self._objects.requests.view(),
                self._nodes.requests.view(),
            ),
            rejected=self._repeats.rejected.view(),
            removed=self._objects.removed.view(),
        )

    def size(self) -> MapSize:
        """Count what the map holds."""
        counts = self._objects.counts
        return MapSize(
            streams=self._streams.live_count(),
            objects=counts.present(),
            prepared_objects=counts.of(ObjectState.PREPARED),
            committed_objects=counts.of(ObjectState.COMMITTED),
            destroyed_objects=counts.of(ObjectState.MARK_DESTROYED),
            stream_set_objects=self._objects.set_objects.total(),
            nodes=len(self._nodes),
            keys=len(self._kvs),
            committed_bytes=counts.committed_bytes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated for columns; dictionaries (tags, nodes, keys) come on top."""
        return self._streams.nbytes + self._objects.nbytes

    # ---- the life of objects ----

    @property
    def bucket_claim(self) -> Claim:
        """The cluster's UUID and bound of object ids."""
        return self._bucket_claim.current

    @property
    def next_object_id(self) -> int:
        """The object id that is issued next."""
        return self._objects.next_object_id

    def prepared_deadline(self) -> int | None:
        """Return the earliest deadline of a prepared object, or None."""
        return self._objects.deadlines.first_time()

    def expired(self, now_ms: int, limit: int) -> tuple[int, ...]:
        """Return at most `limit` prepared objects whose deadline lies before `now_ms`."""
        return self._objects.deadlines.before(now_ms, limit)

    def destroyed(self, marked_before_ms: int, limit: int, now_ms: int) -> tuple[int, ...]:
        """Return at most `limit` objects marked destroyed before that time, oldest first.

        Those whose bytes are held at `now_ms` are left out.
        """
        return self._upkeep.deletable(marked_before_ms, limit, now_ms)

    def has_sweepings(self) -> bool:
        """Whether a stream that was deleted has left objects to destroy."""
        return self._objects.has_sweepings()

    # ---- deciding ----

    def _make_deciders(self) -> dict[type, Callable[..., tuple[Sequence[Record], Answer]]]:
        # Each value takes exactly its key's type, which a dictionary's type can't say.
        compactions, upkeep = self._compactions, self._upkeep
        return {
            CreateStreams: self._decide_create,
            OpenStreams: self._decide_open,
            CloseStreams: self._decide_close,
            TrimStreams: self._decide_trim,
            DeleteStreams: self._decide_delete,
            GetOpeningStreams: self._decide_opening,
            PrepareObjects: self._decide_prepare,
            CommitStreamSetObject: self._decide_set_object,
            CommitUploads: lambda request, now_ms, _: self._uploads.decide_batch(request, now_ms),
            AbandonUploads: self._decide_abandon,
            CommitStreamObject: lambda request, now_ms, _: compactions.decide_stream_object(
                request, now_ms
            ),
            ExpireObjects: lambda request, now_ms, _: _one(upkeep.decide_expire(request, now_ms)),
            RemoveObjects: lambda request, *_: _one(upkeep.decide_remove(request)),
            SweepDeletedStreams: lambda request, now_ms, _: _one(
                upkeep.decide_sweep(request, now_ms)
            ),
            DestroyDeadSetObjects: lambda request, now_ms, _: _one(
                upkeep.decide_destroy_dead(request, now_ms)
            ),
            HoldDeletions: lambda request, now_ms, _: _one(upkeep.decide_hold(request, now_ms)),
            ClaimBucket: lambda request, *_: _one(self._bucket_claim.decide(request)),
            RegisterNode: lambda request, *_: _one(self._nodes.decide_register(request)),
            UnregisterNode: self._decide_unregister,
            GetNextNodeId: lambda request, *_: _one(self._nodes.decide_next_id(request)),
            SetNodeLock: lambda request, *_: _one(self._nodes.decide_lock(request)),
            SuperviseNode: lambda request, *_: _one(self._nodes.decide_supervise(request)),
            AssignRecoveries: lambda request, *_: self._nodes.decide_recoveries(request),
            PutKVs: lambda request, _, offset: _one(self._kvs.decide_put(request, offset)),
            DeleteKVs: lambda request, *_: _one(self._kvs.decide_delete(request)),
        }

    def _decide_create(
        self, request: CreateStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], CreateStreamsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), CreateStreamsAnswer(error=error)
        key = RequestKey(RequestKind.CREATE_STREAMS, request.node.node_id, request.request_id)
        issued = _issued_before(self._streams.requests, key, len(request.streams))
        if issued is not None:
            tags = [stream.tags for stream in request.streams]
            if issued.content_digest not in (0, digest_of_tags(tags)):
                raise InvalidRequestError(
                    "request_id",
                    f"{request.request_id!r} was used for streams with other tags; "
                    "a new request needs a new id",
                )
            ids = tuple(range(issued.first_id, issued.first_id + issued.count))
            return (), CreateStreamsAnswer(error=ErrorCode.NONE, stream_ids=ids)
        return self._stream_decisions.create(request)

    def _decide_open(
        self, request: OpenStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], OpenStreamsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), OpenStreamsAnswer(streams=(OpenedStream(error),) * len(request.streams))
        return self._stream_decisions.open(request)

    def _decide_close(
        self, request: CloseStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], StreamErrorsAnswer]:
        # A recovery closes streams on behalf of a fenced node.
        error = self._nodes.check(request.node, fence_failover=False)
        if error is not ErrorCode.NONE:
            return (), StreamErrorsAnswer(errors=(error,) * len(request.streams))
        return self._stream_decisions.close(request)

    def _decide_trim(
        self, request: TrimStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], StreamErrorsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), StreamErrorsAnswer(errors=(error,) * len(request.streams))
        return self._stream_decisions.trim(request)

    def _decide_delete(
        self, request: DeleteStreams, now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], StreamErrorsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), StreamErrorsAnswer(errors=(error,) * len(request.streams))
        return self._stream_decisions.delete(request, now_ms)

    def _decide_opening(
        self, request: GetOpeningStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], GetOpeningStreamsAnswer]:
        record: NodeEpochSet | None = None
        if request.page.page_token:
            error = self._nodes.check(request.node, fence_failover=False)
        else:
            record, error = self._nodes.decide_epoch(request.node, failover=request.failover)
        if error is not ErrorCode.NONE:
            return (), GetOpeningStreamsAnswer(error=error)
        error, streams, token = self._stream_reads.opening_streams(
            request.node.node_id, request.page
        )
        if error is not ErrorCode.NONE:
            return (), GetOpeningStreamsAnswer(error=error)
        answer = GetOpeningStreamsAnswer(error=error, streams=streams, next_page_token=token)
        return _one((record, answer))

    def _decide_abandon(
        self, request: AbandonUploads, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], AbandonUploadsAnswer]:
        return self._stream_decisions.abandon(request)

    def _decide_unregister(
        self, request: UnregisterNode, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], ErrorAnswer]:
        node_id = request.node.node_id
        owes = self._streams.open_counts.get(node_id) > 0
        owes = owes or len(self._streams.active_uploads(node_id)) > 0
        return _one(self._nodes.decide_unregister(request.node, owes_streams=owes))

    def _decide_prepare(
        self, request: PrepareObjects, now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], PrepareObjectsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), PrepareObjectsAnswer(error=error)
        key = RequestKey(RequestKind.PREPARE_OBJECTS, request.node.node_id, request.request_id)
        issued = _issued_before(self._objects.requests, key, request.count)
        if issued is not None:
            return (), PrepareObjectsAnswer(
                error=ErrorCode.NONE,
                first_object_id=issued.first_id,
                deadline_ms=issued.deadline_ms,
            )
        return _one(self._objects.decide_prepare(request, now_ms))

    def _decide_set_object(
        self, request: CommitStreamSetObject, now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], CommitStreamSetObjectAnswer]:
        if len(request.compacted_object_ids):
            return self._compactions.decide_set_object(request, now_ms)
        return self._uploads.decide(request, now_ms)

    # ---- reading and replaying ----

    def _make_readers(self) -> dict[type, Callable[..., Answer]]:
        return {
            DescribeStreams: self._stream_reads.describe_streams,
            GetObjects: self._reads.get_objects,
            DescribeObjects: self._reads.describe_objects,
            CheckObjects: self._reads.check_objects,
            GetNodes: self._reads.get_nodes,
            ListStreamSetObjects: self._reads.list_set_objects,
            GetKVs: self._kvs.get,
            ListKVs: self._kvs.list,
        }

    def _make_replayers(self) -> dict[type, Callable[[Any, int, Undo], None]]:
        streams, objects, nodes, uploads = self._streams, self._objects, self._nodes, self._uploads
        anywhere: dict[type, Callable[[Any, Undo], None]] = {
            StreamsCreated: streams.replay_created,
            StreamsOpened: streams.replay_opened,
            StreamsReopened: streams.replay_reopened,
            StreamsClosed: streams.replay_closed,
            StreamsTrimmed: streams.replay_trimmed,
            RangesRemoved: streams.replay_ranges_removed,
            StreamsDeleted: streams.replay_deleted,
            ObjectsPrepared: objects.replay_prepared,
            StreamSetObjectsCommitted: uploads.replay_set_objects,
            StreamObjectsCommitted: uploads.replay_stream_objects,
            CommitRowsRejected: self._repeats.replay_rejected,
            PendingUploadsSet: streams.replay_pending_set,
            UploadsAbandoned: streams.replay_abandoned,
            ObjectsDestroyed: self._replay_destroyed,
            ObjectsRemoved: objects.replay_removed,
            ObjectsLinked: objects.replay_linked,
            ObjectAttributesSet: objects.replay_attributes,
            DeletionsHeld: self._upkeep.replay_held,
            BucketClaimed: self._bucket_claim.replay,
            NodeRegistered: nodes.replay_registered,
            NodeEpochSet: nodes.replay_epoch_set,
            NodeUnregistered: self._replay_unregistered,
            NodeIdIssued: nodes.replay_id_issued,
            NodeLocked: nodes.replay_locked,
            NodeSupervised: nodes.replay_supervised,
            RecoveryAssigned: nodes.replay_recovery_assigned,
            KVsDeleted: self._kvs.replay_deleted,
        }
        replayers = {kind: _ignoring_offset(replay) for kind, replay in anywhere.items()}
        return {**replayers, KVsPut: self._kvs.replay_put}

    def _replay_destroyed(self, record: ObjectsDestroyed, undo: Undo) -> None:
        self._objects.replay_destroyed(record, undo)
        self._nodes.forget_departed(undo)

    def _replay_unregistered(self, record: NodeUnregistered, undo: Undo) -> None:
        # Nothing of what is on its list is owed any more.
        self._streams.pending.drop(record.node_id, undo)
        self._nodes.replay_unregistered(record, undo)


def _ignoring_offset(replay: Callable[[Any, Undo], None]) -> Callable[[Any, int, Undo], None]:
    return lambda record, _offset, undo: replay(record, undo)


def _undo(actions: Undo) -> None:
    for action in reversed(actions):
        action()


def _one(decided: tuple[Record | None, Any]) -> tuple[Sequence[Record], Any]:
    record, answer = decided
    return () if record is None else (record,), answer


def _issued_before(
    window: Window[RequestKey, IssuedIds], key: RequestKey, count: int
) -> IssuedIds | None:
    issued = window.get(key)
    if issued is not None and issued.count != count:
        raise InvalidRequestError(
            "request_id",
            f"{key.request_id!r} was used for {issued.count} ids, now for {count}; "
            "a new request needs a new id",
        )
    return issued
