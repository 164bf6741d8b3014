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

import numpy as np

from controller.errors import ErrorCode, InvalidRequestError, InvariantError
from controller.metadata.answers import (
    Answer,
    CreateStreamsAnswer,
    ExpireObjectsAnswer,
    GetOpeningStreamsAnswer,
    MapSize,
    OpenedStream,
    OpenStreamsAnswer,
    PrepareObjectsAnswer,
    RemoveObjectsAnswer,
    StreamErrorsAnswer,
)
from controller.metadata.columns import Undo
from controller.metadata.commits import Commits
from controller.metadata.frozen import FrozenMap, FrozenParts
from controller.metadata.kv import KVs
from controller.metadata.nodes import Nodes
from controller.metadata.objects import Objects
from controller.metadata.reads import Reads
from controller.metadata.request_log import IssuedIds, RequestKey, RequestKind, Window
from controller.metadata.requests import (
    CheckObjects,
    CloseStreams,
    CommitStreamSetObject,
    CreateStreams,
    DeleteKVs,
    DeleteStreams,
    DescribeObjects,
    DescribeStreams,
    ExpireObjects,
    GetKVs,
    GetNodes,
    GetObjects,
    GetOpeningStreams,
    ListKVs,
    OpenStreams,
    PrepareObjects,
    PutKVs,
    ReadRequest,
    RegisterNode,
    RemoveObjects,
    TrimStreams,
    WriteRequest,
)
from controller.metadata.restore import restore
from controller.metadata.streams import Streams
from controller.metadata.validation import validate
from controller.metadata.values import ObjectKind, ObjectState
from controller.records.record import (
    CommitRowsRejected,
    KVsDeleted,
    KVsPut,
    NodeEpochSet,
    NodeRegistered,
    ObjectsDestroyed,
    ObjectsPrepared,
    ObjectsRemoved,
    RangesRemoved,
    Record,
    StreamObjectsCommitted,
    StreamsClosed,
    StreamsCreated,
    StreamsDeleted,
    StreamSetObjectCommitted,
    StreamsOpened,
    StreamsReopened,
    StreamsTrimmed,
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
    undo: Undo = field(default_factory=list)


class ClusterMap:
    """Streams, objects, nodes and keys, as of the log below `applied_end_offset`."""

    def __init__(self) -> None:
        self.applied_end_offset = 0
        self._objects = Objects()
        self._streams = Streams(self._objects)
        self._nodes = Nodes()
        self._kvs = KVs()
        self._commits = Commits(self._nodes, self._streams, self._objects)
        self._reads = Reads(self._streams, self._objects, self._nodes)
        self._applied: deque[_Applied] = deque()
        self._deciders = self._make_deciders()
        self._readers = self._make_readers()
        self._replayers = self._make_replayers()

    @classmethod
    def from_sections(
        cls, sections: Mapping[str, Mapping[str, Any]], end_offset: int
    ) -> "ClusterMap":
        """Return the map a `FrozenMap` at `end_offset` had these sections of."""
        cluster_map = cls()
        cluster_map.applied_end_offset = end_offset
        restore(
            sections,
            streams=cluster_map._streams,
            objects=cluster_map._objects,
            nodes=cluster_map._nodes,
            kvs=cluster_map._kvs,
            rejected=cluster_map._commits.rejected,
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
            self._applied.popleft()
        if not self._applied:
            # Undo entries name rows, so rows may move only while there is none.
            self._objects.collect_garbage()

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
        objects, object_ranges = self._objects.view()
        return FrozenParts(
            streams=streams,
            past_ranges=past_ranges,
            tags=tags,
            objects=objects,
            object_ranges=object_ranges,
            next_object_id=self._objects.next_object_id,
            nodes=self._nodes.in_order(),
            kvs=self._kvs.snapshot(),
            requests=self._streams.requests.items() + self._objects.requests.items(),
            rejected=self._commits.rejected.items(),
            removed=self._objects.removed.keys(),
        )

    def size(self) -> MapSize:
        """Count what the map holds."""
        states = np.bincount(self._objects["state"], minlength=len(ObjectState))
        committed = self._objects["state"] == ObjectState.COMMITTED
        set_objects = committed & (self._objects["kind"] == ObjectKind.STREAM_SET)
        return MapSize(
            streams=self._streams.live_count(),
            objects=len(self._objects),
            prepared_objects=int(states[ObjectState.PREPARED]),
            committed_objects=int(states[ObjectState.COMMITTED]),
            destroyed_objects=int(states[ObjectState.MARK_DESTROYED]),
            stream_set_objects=int(np.count_nonzero(set_objects)),
            nodes=len(self._nodes),
            keys=len(self._kvs),
            committed_bytes=int(self._objects["object_size"][committed].sum()),
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated for columns; dictionaries (tags, nodes, keys) come on top."""
        return self._streams.nbytes + self._objects.nbytes

    # ---- the life of objects ----

    def prepared_deadline(self) -> int | None:
        """Return the earliest deadline of a prepared object, or None."""
        return self._objects.deadlines.first_time()

    def expired(self, now_ms: int, limit: int) -> tuple[int, ...]:
        """Return at most `limit` prepared objects whose deadline lies before `now_ms`."""
        return self._objects.deadlines.before(now_ms, limit)

    def destroyed(self, marked_before_ms: int, limit: int) -> tuple[int, ...]:
        """Return at most `limit` objects marked destroyed before that time, oldest first."""
        return self._objects.destroyed.before(marked_before_ms, limit)

    # ---- deciding ----

    def _make_deciders(self) -> dict[type, Callable[..., tuple[Sequence[Record], Answer]]]:
        # Each value takes exactly its key's type, which a dictionary's type can't say.
        return {
            CreateStreams: self._decide_create,
            OpenStreams: self._decide_open,
            CloseStreams: self._decide_close,
            TrimStreams: self._decide_trim,
            DeleteStreams: self._decide_delete,
            GetOpeningStreams: self._decide_opening,
            PrepareObjects: self._decide_prepare,
            CommitStreamSetObject: lambda request, now_ms, _: self._commits.decide(request, now_ms),
            ExpireObjects: self._decide_expire,
            RemoveObjects: self._decide_remove,
            RegisterNode: lambda request, *_: _one(self._nodes.decide_register(request)),
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
            ids = tuple(range(issued.first_id, issued.first_id + issued.count))
            return (), CreateStreamsAnswer(error=ErrorCode.NONE, stream_ids=ids)
        return self._streams.decide_create(request)

    def _decide_open(
        self, request: OpenStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], OpenStreamsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), OpenStreamsAnswer(streams=(OpenedStream(error),) * len(request.streams))
        return self._streams.decide_open(request)

    def _decide_close(
        self, request: CloseStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], StreamErrorsAnswer]:
        # A recovery closes streams on behalf of a fenced node.
        error = self._nodes.check(request.node, fence_failover=False)
        if error is not ErrorCode.NONE:
            return (), StreamErrorsAnswer(errors=(error,) * len(request.streams))
        return self._streams.decide_close(request)

    def _decide_trim(
        self, request: TrimStreams, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], StreamErrorsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), StreamErrorsAnswer(errors=(error,) * len(request.streams))
        return self._streams.decide_trim(request)

    def _decide_delete(
        self, request: DeleteStreams, now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], StreamErrorsAnswer]:
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return (), StreamErrorsAnswer(errors=(error,) * len(request.streams))
        return self._streams.decide_delete(request, now_ms)

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
        streams, token = self._reads.opening_streams(request.node.node_id, request.page)
        answer = GetOpeningStreamsAnswer(error=error, streams=streams, next_page_token=token)
        return _one((record, answer))

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

    def _decide_expire(
        self, request: ExpireObjects, now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], ExpireObjectsAnswer]:
        record = self._objects.decide_expire(now_ms, request.limit)
        expired = 0 if record is None else len(record.object_id)
        return _one((record, ExpireObjectsAnswer(expired=expired)))

    def _decide_remove(
        self, request: RemoveObjects, _now_ms: int, _offset: int
    ) -> tuple[Sequence[Record], RemoveObjectsAnswer]:
        record = self._objects.decide_remove(request.object_ids)
        removed = 0 if record is None else len(record.object_id)
        return _one((record, RemoveObjectsAnswer(removed=removed)))

    # ---- reading and replaying ----

    def _make_readers(self) -> dict[type, Callable[..., Answer]]:
        return {
            DescribeStreams: self._reads.describe_streams,
            GetObjects: self._reads.get_objects,
            DescribeObjects: self._reads.describe_objects,
            CheckObjects: self._reads.check_objects,
            GetNodes: self._reads.get_nodes,
            GetKVs: self._kvs.get,
            ListKVs: self._kvs.list,
        }

    def _make_replayers(self) -> dict[type, Callable[[Any, int, Undo], None]]:
        streams, objects, nodes, commits = self._streams, self._objects, self._nodes, self._commits
        anywhere: dict[type, Callable[[Any, Undo], None]] = {
            StreamsCreated: streams.replay_created,
            StreamsOpened: streams.replay_opened,
            StreamsReopened: streams.replay_reopened,
            StreamsClosed: streams.replay_closed,
            StreamsTrimmed: streams.replay_trimmed,
            RangesRemoved: streams.replay_ranges_removed,
            StreamsDeleted: streams.replay_deleted,
            ObjectsPrepared: objects.replay_prepared,
            StreamSetObjectCommitted: commits.replay_set_object,
            StreamObjectsCommitted: commits.replay_stream_objects,
            CommitRowsRejected: commits.replay_rejected,
            ObjectsDestroyed: objects.replay_destroyed,
            ObjectsRemoved: objects.replay_removed,
            NodeRegistered: nodes.replay_registered,
            NodeEpochSet: nodes.replay_epoch_set,
            KVsDeleted: self._kvs.replay_deleted,
        }
        replayers = {kind: _ignoring_offset(replay) for kind, replay in anywhere.items()}
        return {**replayers, KVsPut: self._kvs.replay_put}


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
