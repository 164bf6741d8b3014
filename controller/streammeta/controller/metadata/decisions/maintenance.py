"""The leader's own requests: expiry, removal, sweeps, deletion holds, and the claim on the bucket.

Deleted streams leave objects to sweep, stream set objects may lose their last live data, and bytes
of destroyed objects are kept while readers may still use older metadata. The claim consists of the
cluster's UUID, which never changes once set, and the bound below which object ids may be issued,
which only grows. `storage.bucket_marker` defines the writes to the bucket and their order.
"""

from dataclasses import dataclass

import numpy as np

from streammeta.controller.errors import InvariantError
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.api.validation import TTL_MS_MAX
from streammeta.controller.metadata.registries.object_queries import ObjectQueries
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import INT64_MAX, Int64Column, ObjectState, column
from streammeta.controller.records import record as rec


@dataclass(frozen=True, slots=True)
class DeletionHold:
    """The bytes of objects destroyed at or after `since_ms` are kept until `until_ms`."""

    since_ms: int = -1
    until_ms: int = -1


class ObjectUpkeep:
    """Decisions on the leader's own requests about objects, and the replicated deletion hold."""

    def __init__(self, streams: Streams, objects: ObjectQueries) -> None:
        self._streams = streams
        self._objects = objects
        self._hold = DeletionHold()

    @property
    def hold(self) -> DeletionHold:
        """The replicated deletion hold."""
        return self._hold

    def load(self, hold: DeletionHold) -> None:
        """Set the hold of empty metadata."""
        self._hold = hold

    def decide_expire(
        self, request: requests.ExpireObjects, now_ms: int
    ) -> tuple[rec.ObjectsDestroyed | None, answers.ExpireObjectsAnswer]:
        """Destroy prepared objects whose deadline has passed."""
        ids = column(self.list_expired(request, now_ms))
        return _destruction(ids, now_ms), answers.ExpireObjectsAnswer(expired=len(ids))

    def list_expired(self, request: requests.ExpireObjects, now_ms: int) -> tuple[int, ...]:
        """Return the objects that the request would destroy."""
        found = self._objects.list_expired(now_ms, request.limit, request.since_ms)
        # A deadline far in the future was stamped by a leader with a wrong clock.
        beyond_ms = max(now_ms, request.beyond_ms)
        room = request.limit - len(found)
        return found + self._objects.list_expired(INT64_MAX, room, beyond_ms)

    def decide_remove(
        self, request: requests.RemoveObjects
    ) -> tuple[rec.ObjectsRemoved | None, answers.RemoveObjectsAnswer]:
        """Forget destroyed objects whose bytes are deleted."""
        ids = column(sorted(set(request.object_ids)))
        # A retry finds some of the objects removed already.
        ids = ids[self._objects.states(ids) == ObjectState.MARK_DESTROYED]
        record = rec.ObjectsRemoved(object_id=ids) if len(ids) else None
        return record, answers.RemoveObjectsAnswer(removed=len(ids))

    def decide_sweep(
        self, request: requests.SweepDeletedStreams, now_ms: int
    ) -> tuple[rec.ObjectsDestroyed | None, answers.SweepAnswer]:
        """Destroy objects left over from deleted streams."""
        ids = self._objects.list_sweepings(request.limit)
        return _destruction(ids, now_ms, deep=True), answers.SweepAnswer(destroyed=len(ids))

    def decide_destroy_dead(
        self, request: requests.DestroyDeadStreamSetObjects, now_ms: int
    ) -> tuple[rec.ObjectsDestroyed | None, answers.DestroyDeadStreamSetObjectsAnswer]:
        """Destroy a node's stream set objects without live data."""
        objects = self._objects
        limit = request.limit
        # One more than the limit shows whether these are the last ones.
        ids = objects.stream_set_objects_of(request.node_id, request.after_object_id, limit + 1)
        next_after = int(ids[limit - 1]) if len(ids) > limit else -1

        ids = ids[:limit]
        rows = objects.rows(ids)
        spans = objects.spans(rows)

        live = self._streams.live_starts(spans) < spans.end_offset
        owners = np.repeat(np.arange(len(ids)), objects.range_counts(rows))
        dead = ids[np.bincount(owners[live], minlength=len(ids)) == 0]
        answer = answers.DestroyDeadStreamSetObjectsAnswer(
            destroyed=len(dead), next_after=next_after
        )
        return _destruction(dead, now_ms), answer

    def decide_hold(
        self, request: requests.HoldDeletions, now_ms: int
    ) -> tuple[rec.DeletionsHeld | None, answers.HoldDeletionsAnswer]:
        """Begin or extend a deletion hold. A longer hold stays as it is.

        A hold that ends later than the longest possible one that begins now was stamped by a wrong
        clock, and is shortened to that length.
        """
        since_ms, until_ms = now_ms, now_ms + request.hold_ms
        if now_ms < self._hold.until_ms:
            since_ms = min(since_ms, self._hold.since_ms)
            until_ms = max(until_ms, min(self._hold.until_ms, now_ms + TTL_MS_MAX))
        answer = answers.HoldDeletionsAnswer(until_ms=until_ms)
        if DeletionHold(since_ms, until_ms) == self._hold:
            return None, answer
        return rec.DeletionsHeld(since_ms=since_ms, until_ms=until_ms), answer

    def replay_held(self, record: rec.DeletionsHeld, undo: Undo) -> None:
        """Replay `DeletionsHeld`."""
        undo.assign(self, "_hold", DeletionHold(record.since_ms, record.until_ms))

    def list_deletable(self, marked_before_ms: int, limit: int, now_ms: int) -> tuple[int, ...]:
        """Return at most `limit` objects destroyed before a time and not held, oldest first.

        A mark in the future was written by an earlier leader with a wrong clock. Such objects come
        last. A leader waits for the delay after its term began, so their delay is over as well.
        """
        if now_ms < self._hold.until_ms:
            marked_before_ms = min(marked_before_ms, self._hold.since_ms)
            return self._objects.list_destroyed(marked_before_ms, limit)
        found = self._objects.list_destroyed(marked_before_ms, limit)
        future_ms = max(marked_before_ms, now_ms + 1)
        return found + self._objects.list_destroyed(INT64_MAX, limit - len(found), future_ms)


@dataclass(frozen=True, slots=True)
class Claim:
    """UUID of the cluster (empty: not set). Object ids below `issued_below` may be issued."""

    cluster_uuid: str = ""
    issued_below: int = 0


class BucketClaim:
    """The replicated claim."""

    def __init__(self) -> None:
        self._current = Claim()

    @property
    def current(self) -> Claim:
        """The replicated claim."""
        return self._current

    def load(self, claim: Claim) -> None:
        """Set the claim of empty metadata."""
        self._current = claim

    def decide(
        self, request: requests.ClaimBucket
    ) -> tuple[rec.BucketClaimed | None, answers.ClaimBucketAnswer]:
        """Set the UUID unless it is set, and raise the bound, None if neither changes."""
        before = self._current
        claim = Claim(
            before.cluster_uuid or request.cluster_uuid,
            max(before.issued_below, request.issued_below),
        )
        answer = answers.ClaimBucketAnswer(
            cluster_uuid=claim.cluster_uuid, issued_below=claim.issued_below
        )
        # A repeat must not grow the log.
        if claim == before:
            return None, answer
        record = rec.BucketClaimed(cluster_uuid=claim.cluster_uuid, issued_below=claim.issued_below)
        return record, answer

    def replay(self, record: rec.BucketClaimed, undo: Undo) -> None:
        """Replay `BucketClaimed`.

        Raises:
            InvariantError: the record would change the UUID or lower the bound.
        """
        before = self._current
        claim = Claim(record.cluster_uuid, record.issued_below)

        if not claim.cluster_uuid or before.cluster_uuid not in ("", claim.cluster_uuid):
            raise InvariantError(
                f"record sets the cluster's UUID to {claim.cluster_uuid!r}, "
                f"but it is {before.cluster_uuid!r}"
            )
        if claim.issued_below < before.issued_below:
            raise InvariantError(
                f"record lowers the bound of object ids to {claim.issued_below}, "
                f"but it is {before.issued_below}"
            )
        undo.assign(self, "_current", claim)


def _destruction(
    ids: Int64Column, marked_at_ms: int, *, deep: bool = False
) -> rec.ObjectsDestroyed | None:
    if not len(ids):
        return None
    return rec.ObjectsDestroyed(object_id=ids, marked_at_ms=marked_at_ms, deep=deep)
