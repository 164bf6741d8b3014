"""The leader's own requests: expiry, removal, sweeps, deletion holds, and the claim on the bucket.

Deleted streams leave objects to sweep, set objects may hold nothing live any more, and bytes of
destroyed objects are kept while readers may still hold an older map. The claim is the cluster's
UUID, which never changes once set, and the bound below which object ids may be issued, which only
grows; `storage.bucket_marker` knows what is written to the bucket, and in which order.
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
    """The bytes of what is destroyed at or after `since_ms` are kept until `until_ms`."""

    since_ms: int = -1
    until_ms: int = -1


class ObjectUpkeep:
    """Decides the leader's own requests about objects; holds the replicated deletion hold."""

    def __init__(self, streams: Streams, objects: ObjectQueries) -> None:
        self._streams = streams
        self._objects = objects
        self._hold = DeletionHold()

    @property
    def hold(self) -> DeletionHold:
        """The replicated deletion hold."""
        return self._hold

    def load(self, hold: DeletionHold) -> None:
        """Set the hold of an empty map."""
        self._hold = hold

    def decide_expire(
        self, request: requests.ExpireObjects, now_ms: int
    ) -> tuple[rec.ObjectsDestroyed | None, answers.ExpireObjectsAnswer]:
        """Mark prepared objects past their deadline."""
        ids = column(self.expired(request, now_ms))
        return _destroyed(ids, now_ms), answers.ExpireObjectsAnswer(expired=len(ids))

    def expired(self, request: requests.ExpireObjects, now_ms: int) -> tuple[int, ...]:
        """Return the objects that the request would mark."""
        found = self._objects.expired_before(now_ms, request.limit, request.since_ms)
        beyond_ms = max(now_ms, request.beyond_ms)
        room = request.limit - len(found)
        return found + self._objects.expired_before(INT64_MAX, room, beyond_ms)

    def decide_remove(
        self, request: requests.RemoveObjects
    ) -> tuple[rec.ObjectsRemoved | None, answers.RemoveObjectsAnswer]:
        """Forget destroyed objects whose bytes are gone."""
        ids = column(sorted(set(request.object_ids)))
        ids = ids[self._objects.states(ids) == ObjectState.MARK_DESTROYED]
        record = rec.ObjectsRemoved(object_id=ids) if len(ids) else None
        return record, answers.RemoveObjectsAnswer(removed=len(ids))

    def decide_sweep(
        self, request: requests.SweepDeletedStreams, now_ms: int
    ) -> tuple[rec.ObjectsDestroyed | None, answers.SweepAnswer]:
        """Destroy what deleted streams have left."""
        ids = self._objects.sweepings(request.limit)
        return _destroyed(ids, now_ms, deep=True), answers.SweepAnswer(destroyed=len(ids))

    def decide_destroy_dead(
        self, request: requests.DestroyDeadSetObjects, now_ms: int
    ) -> tuple[rec.ObjectsDestroyed | None, answers.DestroyDeadSetObjectsAnswer]:
        """Destroy those of a node's set objects that hold nothing live."""
        objects = self._objects
        limit = request.limit
        ids = objects.set_objects_of(request.node_id, request.after_object_id, limit + 1)
        next_after = int(ids[limit - 1]) if len(ids) > limit else -1
        ids = ids[:limit]
        rows = objects.rows(ids)
        spans = objects.spans(rows)
        live = self._streams.live_starts(spans) < spans.end_offset
        owners = np.repeat(np.arange(len(ids)), objects.range_counts(rows))
        dead = ids[np.bincount(owners[live], minlength=len(ids)) == 0]
        answer = answers.DestroyDeadSetObjectsAnswer(destroyed=len(dead), next_after=next_after)
        return _destroyed(dead, now_ms), answer

    def decide_hold(
        self, request: requests.HoldDeletions, now_ms: int
    ) -> tuple[rec.DeletionsHeld | None, answers.HoldDeletionsAnswer]:
        """Begin to hold deletions, or continue for longer; a longer hold stays as it is.

        A hold that ends later than the longest one that begins now was stamped by a wrong clock:
        it is cut to that length.
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
        """See `DeletionsHeld`."""
        undo.assign(self, "_hold", DeletionHold(record.since_ms, record.until_ms))

    def deletable(self, marked_before_ms: int, limit: int, now_ms: int) -> tuple[int, ...]:
        """Return at most `limit` objects destroyed before a time and not held, oldest first.

        A mark in the future is of an earlier term, whose leader had a wrong clock. Such objects
        come last: a leader waits for the delay after its term began, so theirs is over.
        """
        if now_ms < self._hold.until_ms:
            marked_before_ms = min(marked_before_ms, self._hold.since_ms)
            return self._objects.destroyed_before(marked_before_ms, limit)
        found = self._objects.destroyed_before(marked_before_ms, limit)
        future_ms = max(marked_before_ms, now_ms + 1)
        return found + self._objects.destroyed_before(INT64_MAX, limit - len(found), future_ms)


@dataclass(frozen=True, slots=True)
class Claim:
    """UUID of the cluster ("": none yet); object ids below `issued_below` may be issued."""

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
        """Set the claim of an empty map."""
        self._current = claim

    def decide(
        self, request: requests.ClaimBucket
    ) -> tuple[rec.BucketClaimed | None, answers.ClaimBucketAnswer]:
        """Set the UUID if there is none, raise the bound; None if neither changes."""
        before = self._current
        claim = Claim(
            before.cluster_uuid or request.cluster_uuid,
            max(before.issued_below, request.issued_below),
        )
        answer = answers.ClaimBucketAnswer(
            cluster_uuid=claim.cluster_uuid, issued_below=claim.issued_below
        )
        if claim == before:
            return None, answer
        record = rec.BucketClaimed(cluster_uuid=claim.cluster_uuid, issued_below=claim.issued_below)
        return record, answer

    def replay(self, record: rec.BucketClaimed, undo: Undo) -> None:
        """See `BucketClaimed`.

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


def _destroyed(
    ids: Int64Column, marked_at_ms: int, *, deep: bool = False
) -> rec.ObjectsDestroyed | None:
    if not len(ids):
        return None
    return rec.ObjectsDestroyed(object_id=ids, marked_at_ms=marked_at_ms, deep=deep)
