"""Cluster metadata: one replicated state machine, composed of the registries.

`decide` turns a request into records and an answer without changing anything, `apply` replays
records, `query` reads. There is one owner, which makes one call at a time. The module is pure: no
I/O, no clock (times are part of requests), no randomness. Replay depends only on records and their
offsets.

Each applied entry keeps its undo actions until `forget_undo` reports it as committed. A controller
that loses leadership thereby undoes the entries that were never committed, newest first.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode, InvariantError, NewerLogError
from streammeta.controller.metadata.api import answers, object_listings, requests
from streammeta.controller.metadata.api.validation import validate
from streammeta.controller.metadata.decisions import maintenance
from streammeta.controller.metadata.decisions.adoption import Adoption
from streammeta.controller.metadata.decisions.commit_effects import CommitEffects, Decided
from streammeta.controller.metadata.decisions.commit_rules import Repeats
from streammeta.controller.metadata.decisions.compactions import Compactions
from streammeta.controller.metadata.decisions.named_objects import NamedObjects
from streammeta.controller.metadata.decisions.producer_decisions import ProducerDecisions
from streammeta.controller.metadata.decisions.record_checks import RecordChecks
from streammeta.controller.metadata.decisions.signatures import (
    as_list,
    ignore_offset,
    with_time,
    without_time,
)
from streammeta.controller.metadata.decisions.uploads import Uploads
from streammeta.controller.metadata.node_decisions import NodeDecisions
from streammeta.controller.metadata.reads import Reads
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel, Recovery
from streammeta.controller.metadata.registries.kv import KVs
from streammeta.controller.metadata.registries.nodes import Node, Nodes
from streammeta.controller.metadata.registries.object_indexes import NodeObjects
from streammeta.controller.metadata.registries.objects import Objects
from streammeta.controller.metadata.registries.producers import Producers
from streammeta.controller.metadata.registries.stream_decisions import StreamDecisions
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.sections.frozen import FrozenMetadata, FrozenParts
from streammeta.controller.metadata.sections.restore import restore
from streammeta.controller.metadata.tables import values
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.records import record as rec
from streammeta.controller.records.record import Record


@dataclass(frozen=True, slots=True)
class Decision:
    """Records to append atomically, and the answer to return once they are committed.

    Without records nothing changes, but the answer still reflects the latest state.
    """

    records: tuple[Record, ...]
    answer: answers.Answer


@dataclass(frozen=True, slots=True)
class _Applied:
    offset: int
    applied_before: int
    undo: Undo = field(default_factory=Undo)


class ClusterMetadata:
    """Streams, objects, nodes, keys and producers, at the log offset `applied_end_offset`."""

    def __init__(self) -> None:
        self.applied_end_offset = 0
        # Objects and nodes share these counts: a departed node stays while it has objects.
        set_objects = NodeObjects()
        self._objects = Objects(set_objects)
        self._streams = Streams(self._objects)
        self._feature_level = FeatureLevel()
        self._nodes = Nodes(set_objects, self._feature_level)
        self._stream_decisions = StreamDecisions(
            self._streams, self._objects, self._nodes, self._feature_level
        )
        self._kvs = KVs()
        self._producers = Producers()
        self._bucket_claim = maintenance.BucketClaim()

        self._repeats = Repeats(self._streams, self._objects, self._producers)
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
        self._upkeep = maintenance.ObjectUpkeep(self._streams, self._objects)
        self._producer_decisions = ProducerDecisions(
            self._nodes, self._producers, self._feature_level
        )
        self._reads = Reads(self._streams, self._objects, self._nodes, self._bucket_claim)
        self._node_decisions = NodeDecisions(self._nodes, self._streams, self._reads)
        self._record_checks = RecordChecks(
            self._streams, self._objects, self._nodes, self._producers
        )
        self._applied: deque[_Applied] = deque()
        self._deciders = self._make_deciders()
        self._readers = self._make_readers()
        self._replayers = self._make_replayers()

    @classmethod
    def from_sections(
        cls, sections: Mapping[str, Mapping[str, Any]], end_offset: int
    ) -> "ClusterMetadata":
        """Return the metadata with the given sections of a `FrozenMetadata` at `end_offset`.

        Raises:
            DamagedMetadataError: the sections break a rule.
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
            producers=cluster_metadata._producers,
        )
        return cluster_metadata

    # ---- the three verbs ----

    def decide(self, request: requests.WriteRequest, now_ms: int, offset: int) -> Decision:
        """Decide a request against the latest state.

        Args:
            request: the request.
            now_ms: the leader's wall clock.
            offset: log offset of the records.

        Raises:
            InvalidRequestError: the request is malformed, or repeats an id with other content.
            LimitExceededError: the request is larger than a limit.
            RecoveringError: the request must wait for the end of recovery mode.
        """
        # Records may only follow the log that the decision is based on.
        assert offset >= self.applied_end_offset, "the decision would precede applied entries"
        validate(request)
        self._recovery.require_allowed(request)
        records, answer = self._deciders[type(request)](request, now_ms, offset)
        return Decision(tuple(records), answer)

    def query(self, request: requests.ReadRequest) -> answers.Answer:
        """Read the latest state. Raises as `decide` does."""
        validate(request)
        return self._readers[type(request)](request)

    def apply(self, offset: int, records: Sequence[Record]) -> None:
        """Replay one log entry, at or above `applied_end_offset`.

        Raises:
            InvariantError: the records do not fit the metadata. Their effects are undone.
            NewerLogError: this version does not support the level they set. Likewise undone.
        """
        # Larger offsets are fine: not every log entry concerns the metadata.
        if offset < self.applied_end_offset:
            raise InvariantError(
                f"log entry {offset} was to be replayed, but everything below "
                f"{self.applied_end_offset} has been applied"
            )

        entry = _Applied(offset, self.applied_end_offset)
        try:
            for record in records:
                self._record_checks.check(record)
                self._replayers[type(record)](record, offset, entry.undo)
        except Exception as error:
            # A part of an entry must never stay: other replicas would differ.
            _undo(entry.undo)
            if isinstance(error, NewerLogError):
                raise
            raise InvariantError(
                f"log entry {offset} does not fit the metadata: {error}"
            ) from error

        self._applied.append(entry)
        self.applied_end_offset = offset + 1

    # ---- undo ----

    def forget_undo(self, end_offset: int) -> None:
        """Drop the undo actions of entries below `end_offset`, which are committed."""
        while self._applied and self._applied[0].offset < end_offset:
            for action in self._applied.popleft().undo.when_committed:
                action()

    def undo_to(self, end_offset: int) -> None:
        """Undo every entry at or above `end_offset`, newest first.

        Raises:
            InvariantError: such an entry is committed. Nothing was undone.
        """
        oldest = self._applied[0].applied_before if self._applied else self.applied_end_offset
        if end_offset < oldest:
            raise InvariantError(
                f"undo to {end_offset} was requested, but everything below {oldest} is committed"
            )

        # Undo actions assume the state right after their entry, hence newest first.
        while self._applied and self._applied[-1].offset >= end_offset:
            entry = self._applied.pop()
            _undo(entry.undo)
            self.applied_end_offset = entry.applied_before

        assert self.applied_end_offset <= end_offset, "entries above the new end are left"

    # ---- views ----

    def freeze(self) -> FrozenMetadata:
        """Return an immutable view of the metadata, including entries that may be undone.

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
            producers=self._producers.view(),
        )
        return FrozenMetadata(self.applied_end_offset, parts)

    def state_hash(self) -> bytes:
        """Return 32 bytes, equal for equal metadata. Reads everything."""
        return self.freeze().digest()

    def size(self) -> answers.MetadataSize:
        """Count the entities."""
        objects = self._objects
        return answers.MetadataSize(
            streams=self._streams.live_count(),
            objects=len(objects),
            prepared_objects=objects.count(values.ObjectState.PREPARED),
            committed_objects=objects.count(values.ObjectState.COMMITTED),
            destroyed_objects=objects.count(values.ObjectState.MARK_DESTROYED),
            stream_set_objects=objects.stream_set_object_count(),
            nodes=len(self._nodes),
            keys=len(self._kvs),
            committed_bytes=objects.committed_bytes,
        )

    def used(self) -> Mapping[str, int]:
        """Return the usage of each limit, see `MetadataLimits`."""
        return {
            "streams": self._streams.live_count(),
            "prepared_objects": self._objects.count(values.ObjectState.PREPARED),
            "nodes": len(self._nodes),
            "kv_keys": len(self._kvs),
            "kv_bytes": self._kvs.nbytes,
            "tag_bytes": self._streams.tag_characters,
            "producers": len(self._producers),
        }

    def ranges_of_streams(self) -> npt.NDArray[np.int32]:
        """Return each stream's number of ranges in objects, by stream id.

        Streams past the end have none. Takes milliseconds for millions of streams.
        """
        return self._objects.ranges_of_streams()

    def owned_sizes(
        self, at_once: int
    ) -> Iterator[tuple[values.Int64Column, values.Int64Column, values.Int64Column]]:
        """Yield stream, node and size of committed objects, see `ObjectQueries.owned_sizes`."""
        return self._objects.owned_sizes(at_once)

    def has_node(self, node_id: int) -> bool:
        """Return whether a node is known, including departed ones."""
        return self._nodes.get(node_id) is not None

    def new_producers(self, stream_id: values.Int64Column, producer_id: values.Int64Column) -> int:
        """Return the number of distinct pairs that `Producers` has no state of."""
        return self._producers.count_new(stream_id, producer_id)

    def kv_size(self, namespace: str, key: str) -> int:
        """Return the bytes of a key and its value, or -1 if it does not exist."""
        return self._kvs.size_of(namespace, key)

    def kv_value(self, namespace: str, key: str) -> bytes | None:
        """Return the value of a key, or None if it does not exist."""
        return self._kvs.value_of(namespace, key)

    def nodes(self, node_ids: Sequence[int] = ()) -> Sequence[answers.NodeDescription]:
        """Return these nodes, or all, without a limit. Remote callers use `query`."""
        return self._reads.describe_nodes(node_ids)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for columns. Dictionaries (tags, nodes, keys) are not included."""
        return self._streams.nbytes + self._objects.nbytes + self._producers.nbytes

    def node(self, node_id: int) -> Node | None:
        """Return a node, or None if it never registered or was forgotten."""
        return self._nodes.get(node_id)

    # ---- lifecycle of objects ----

    @property
    def bucket_claim(self) -> maintenance.Claim:
        """The cluster's UUID and bound of object ids."""
        return self._bucket_claim.current

    @property
    def feature_level(self) -> int:
        """The cluster's feature level, see `features`."""
        return self._feature_level.current

    @property
    def undecided(self) -> tuple[int, int] | None:
        """Bounds of the ids that a restore left undecided. None unless in recovery mode."""
        return self._recovery.undecided

    @property
    def next_object_id(self) -> int:
        """The object id that is issued next."""
        return self._objects.next_object_id

    def list_expired(
        self, now_ms: int, limit: int, since_ms: int = 0, beyond_ms: int = values.INT64_MAX
    ) -> tuple[int, ...]:
        """Return at most `limit` prepared objects that `ExpireObjects` destroys at `now_ms`."""
        request = requests.ExpireObjects(limit=limit, since_ms=since_ms, beyond_ms=beyond_ms)
        return self._upkeep.list_expired(request, now_ms)

    def destroyed(self, marked_before_ms: int, limit: int, now_ms: int) -> tuple[int, ...]:
        """Return at most `limit` objects destroyed before that time, oldest first.

        Objects whose bytes are held at `now_ms` are skipped.
        """
        return self._upkeep.list_deletable(marked_before_ms, limit, now_ms)

    def uncommitted(self, object_ids: Sequence[int]) -> set[int]:
        """Return the known objects that were never committed.

        A commit sets the kind of an object, and destroying it does not change the kind.
        """
        ids = np.array(object_ids, dtype=np.int64)
        rows = self._objects.rows(ids)
        known = rows >= 0
        is_unused = self._objects.kinds(rows[known]) == values.ObjectKind.UNKNOWN
        return set(ids[known][is_unused].tolist())

    def stream_ends(self, stream_ids: values.Int64Column) -> dict[int, int]:
        """Return the end offsets of streams, without deleted ones.

        A trim above the end raises it. A stream whose id was not issued yet ends at 0.
        """
        is_issued = stream_ids < len(self._streams)
        issued = stream_ids[is_issued]
        live = issued[self._streams.exist(issued)]
        ends = dict.fromkeys(stream_ids[~is_issued].tolist(), 0)
        ends.update(zip(live.tolist(), self._streams.end_offsets(live).tolist(), strict=True))
        return ends

    def has_idle_producer(self, before_ms: int, from_ms: int) -> bool:
        """Return whether a producer was last used between these times."""
        stream_id, _ = self._producers.list_expired(before_ms, 1, from_ms)
        return len(stream_id) > 0

    @property
    def deletion_hold(self) -> maintenance.DeletionHold:
        """The replicated deletion hold."""
        return self._upkeep.hold

    def newest_stamp_ms(self, most_ms: int) -> int:
        """Return the newest time of a commit or mark up to `most_ms`, or -1."""
        return self._objects.newest_stamp_ms(most_ms)

    def has_sweepings(self) -> bool:
        """Return whether a deleted stream has left objects to destroy."""
        return self._objects.has_sweepings()

    # ---- deciding ----

    def _make_deciders(self) -> dict[type, Callable[..., tuple[Sequence[Record], answers.Answer]]]:
        # Each function accepts exactly its key's type, which a dictionary's type cannot express.
        streams, uploads = self._stream_decisions, self._uploads
        upkeep, nodes = self._upkeep, self._nodes
        return {
            requests.CreateStreams: without_time(streams.create),
            requests.OpenStreams: without_time(streams.open),
            requests.CloseStreams: without_time(streams.close),
            requests.TrimStreams: without_time(streams.trim),
            requests.DeleteStreams: with_time(self._decide_delete_streams),
            requests.AbandonUploads: without_time(streams.abandon),
            requests.ReleaseStreams: without_time(streams.release),
            requests.GetOpeningStreams: without_time(self._node_decisions.open_streams),
            requests.IssueProducerIds: without_time(as_list(self._producer_decisions.issue)),
            requests.ExpireProducers: with_time(as_list(self._producer_decisions.expire)),
            requests.PrepareObjects: with_time(self._decide_prepare),
            requests.CommitStreamSetObject: self._decide_stream_set_object,
            requests.CommitUploads: with_time(uploads.decide_batch),
            requests.CommitStreamObject: self._decide_stream_object,
            requests.ExpireObjects: with_time(as_list(upkeep.decide_expire)),
            requests.RemoveObjects: without_time(as_list(upkeep.decide_remove)),
            requests.SweepDeletedStreams: with_time(as_list(upkeep.decide_sweep)),
            requests.DestroyDeadStreamSetObjects: with_time(as_list(upkeep.decide_destroy_dead)),
            requests.HoldDeletions: with_time(as_list(upkeep.decide_hold)),
            requests.ClaimBucket: without_time(as_list(self._bucket_claim.decide)),
            requests.SetFeatureLevel: without_time(as_list(self._feature_level.decide)),
            requests.AdoptObjects: with_time(self._adoption.decide),
            requests.FinishRestore: without_time(as_list(self._recovery.decide_finish)),
            requests.RegisterNode: without_time(as_list(nodes.decide_register)),
            requests.UnregisterNode: without_time(as_list(self._node_decisions.unregister)),
            requests.GetNextNodeId: without_time(as_list(nodes.decide_next_id)),
            requests.SetNodeLock: without_time(as_list(nodes.decide_lock)),
            requests.SuperviseNode: without_time(as_list(nodes.decide_supervise)),
            requests.AssignRecoveries: without_time(nodes.decide_recoveries),
            requests.PutKVs: lambda request, _, offset: as_list(self._kvs.decide_put)(
                request, offset
            ),
            requests.DeleteKVs: with_time(self._decide_delete_keys),
            requests.CommitNamedObjects: with_time(self._named.decide_commit),
            requests.DeleteNamedObjects: with_time(self._named.decide_delete),
        }

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
        deleted = [
            stream_id
            for record in records
            if isinstance(record, rec.StreamsDeleted)
            for stream_id in record.stream_id.tolist()
        ]
        return (*records, *self._named.destroy_with_streams(deleted, now_ms)), answer

    def _decide_delete_keys(
        self, request: requests.DeleteKVs, now_ms: int
    ) -> tuple[Sequence[Record], answers.Answer]:
        record, answer = self._kvs.decide_delete(request)
        if record is None:
            return (), answer
        deleted = zip(record.namespaces, record.keys, strict=True)
        return (record, *self._named.destroy_with_keys(deleted, now_ms)), answer

    def _decide_stream_set_object(
        self, request: requests.CommitStreamSetObject, now_ms: int, offset: int
    ) -> Decided:
        if len(request.compacted_object_ids):
            records, answer = self._compactions.decide_stream_set_object(request, now_ms)
        else:
            records, answer = self._uploads.decide(request, now_ms)
        return self._effects.add_effects(request, records, answer, offset)

    def _decide_stream_object(
        self, request: requests.CommitStreamObject, now_ms: int, offset: int
    ) -> Decided:
        records, answer = self._compactions.decide_stream_object(request, now_ms)
        return self._effects.add_effects(request, records, answer, offset)

    # ---- reading and replaying ----

    def _make_readers(self) -> dict[type, Callable[..., answers.Answer]]:
        return {
            requests.DescribeStreams: self._reads.describe_streams,
            requests.FindStreams: self._reads.find_streams,
            requests.GetObjects: self._reads.get_objects,
            requests.DescribeObjects: self._reads.describe_objects,
            requests.CheckObjects: self._reads.check_objects,
            requests.GetNodes: self._reads.get_nodes,
            object_listings.ListStreamSetObjects: self._reads.list_stream_set_objects,
            object_listings.ListStreamObjects: self._reads.list_stream_objects,
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
            rec.StreamSetObjectsCommitted: uploads.replay_stream_set_objects,
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
            rec.ProducerBatchesCommitted: self._producers.replay_batches,
            rec.ProducerIdsIssued: self._producers.replay_issued,
            rec.ProducersExpired: self._producers.replay_expired,
        }
        # Only versions of values depend on the log offset.
        replayers = {kind: ignore_offset(replay) for kind, replay in anywhere.items()}
        return {**replayers, rec.KVsPut: self._kvs.replay_put}

    def _replay_destroyed(self, record: rec.ObjectsDestroyed, undo: Undo) -> None:
        self._objects.replay_destroyed(record, undo)
        self._nodes.forget_departed(undo)

    def _replay_unregistered(self, record: rec.NodeUnregistered, undo: Undo) -> None:
        # The node may only leave without pending uploads, so its list has completed ones only.
        self._streams.drop_pending(record.node_id, undo)
        self._nodes.replay_unregistered(record, undo)


def _undo(actions: Undo) -> None:
    for action in reversed(actions):
        action()
