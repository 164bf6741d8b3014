"""The slow model's life of objects before and after their commits."""

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import answers as a
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.values import ObjectKind, ObjectState
from tests.metadata.slow_model_state import Object, State
from tests.metadata.slow_model_streams import issued_before


def prepare(state: State, request: r.PrepareObjects, now: int) -> a.PrepareObjectsAnswer:
    """Ids are issued once a request id."""
    error = state.check(request.node)
    if error:
        return a.PrepareObjectsAnswer(error=error)
    key = ("prepare", request.node.node_id, request.request_id)
    issued = issued_before(state, key, request.count)
    if issued is None:
        issued = (state.next_object, request.count, now + request.ttl_ms)
        state.requests[key] = issued
        for _ in range(request.count):
            state.objects[state.next_object] = Object(issued[2])
            state.next_object += 1
    return a.PrepareObjectsAnswer(
        error=ErrorCode.NONE, first_object_id=issued[0], deadline_ms=issued[2]
    )


def expire(state: State, request: r.ExpireObjects, now: int) -> a.ExpireObjectsAnswer:
    """Earliest deadlines first."""
    due = sorted(
        (item.timestamp, object_id)
        for object_id, item in state.objects.items()
        if item.state is ObjectState.PREPARED and item.timestamp < now
    )
    expired = [object_id for _, object_id in due][: request.limit]
    state.destroy(expired, now)
    return a.ExpireObjectsAnswer(expired=len(expired))


def remove(state: State, request: r.RemoveObjects) -> a.RemoveObjectsAnswer:
    """Only what is marked destroyed can be forgotten."""
    gone = {
        object_id
        for object_id in request.object_ids
        if object_id in state.objects
        and state.objects[object_id].state is ObjectState.MARK_DESTROYED
    }
    for object_id in gone:
        if state.objects.pop(object_id).kind is not ObjectKind.UNKNOWN:
            state.forgotten_commits.add(object_id)
    return a.RemoveObjectsAnswer(removed=len(gone))


def destroy_dead(
    state: State, request: r.DestroyDeadSetObjects, now: int
) -> a.DestroyDeadSetObjectsAnswer:
    """Set objects of which no reader could ask anything."""
    held = sorted(i for i in state.set_objects_of(request.node_id) if i > request.after_object_id)
    looked_at = held[: request.limit]
    dead = [i for i in looked_at if not state.alive(state.objects[i].held)]
    state.destroy(dead, now)
    more = len(held) > len(looked_at)
    return a.DestroyDeadSetObjectsAnswer(
        destroyed=len(dead), next_after=looked_at[-1] if more else -1
    )


def hold(state: State, request: r.HoldDeletions, now: int) -> a.HoldDeletionsAnswer:
    """Bytes of what is destroyed from now on are kept; a running hold goes on."""
    since, until = state.hold
    if now < until:
        state.hold = (since, max(until, now + request.hold_ms))
    else:
        state.hold = (now, now + request.hold_ms)
    return a.HoldDeletionsAnswer(until_ms=state.hold[1])


def deletable(state: State, marked_before: int, now: int) -> set[int]:
    """Objects marked destroyed before that time whose bytes are not held back."""
    since, until = state.hold
    return {
        object_id
        for object_id, item in state.objects.items()
        if item.state is ObjectState.MARK_DESTROYED
        and item.timestamp < marked_before
        and not (now < until and item.timestamp >= since)
    }


def claim_bucket(state: State, request: r.ClaimBucket) -> a.ClaimBucketAnswer:
    """The first UUID is the cluster's for ever, and the bound is the highest there was."""
    if not state.claim[0]:
        state.claim = (request.cluster_uuid, state.claim[1])
    if request.issued_below > state.claim[1]:
        state.claim = (state.claim[0], request.issued_below)
    return a.ClaimBucketAnswer(cluster_uuid=state.claim[0], issued_below=state.claim[1])
