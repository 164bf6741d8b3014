"""The map's rules once more, slowly and obviously: dictionaries and loops, one row at a time.

Written from the contract, not from the map's code; the state machine compares the two. It takes
the map's requests and gives the map's answers, but decides and applies at once. Nothing can be
undone: a test that wants that keeps `copy()` of the model before.
"""

import pickle
from collections.abc import Callable
from typing import Any

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.answers import SweepAnswer
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
)
from tests.metadata import slow_model_adoption as adoption
from tests.metadata import slow_model_compactions as compactions
from tests.metadata import slow_model_named as named
from tests.metadata import slow_model_reads as reads
from tests.metadata import slow_model_shared as shared
from tests.metadata import slow_model_streams as streams
from tests.metadata import slow_model_uploads as uploads
from tests.metadata.slow_model_state import State


class Model:
    """One state, and every request's rule."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state if state is not None else State()

    def copy(self) -> "Model":
        return Model(pickle.loads(pickle.dumps(self.state, pickle.HIGHEST_PROTOCOL)))

    def write(self, request: Any, now: int, offset: int) -> Any:
        """Decide and apply; raises `InvalidRequestError` as the map does for a reused id.

        In recovery mode it raises `RecoveringError` too.
        """
        adoption.require_allowed(self.state, request)
        answer = self._write(request, now, offset)
        if type(request) in REPEATED and request not in self.state.lately:
            self.state.lately = [*self.state.lately[-7:], request]
            if isinstance(request, r.CommitStreamSetObject) and len(request.shared_rows):
                self.state.appends = [*self.state.appends[-7:], request]
        return answer

    def _write(self, request: Any, now: int, offset: int) -> Any:
        if isinstance(request, r.CommitStreamSetObject | r.CommitStreamObject):
            rule = _rule_of(request)
            return uploads.with_effects(
                self.state, request, offset, lambda state: rule(state, request, now)
            )
        if isinstance(request, r.CommitNamedObjects):
            return named.commit(self.state, request, now, offset)
        if isinstance(request, r.DeleteStreams | r.DeleteKVs):
            answer = _TIMELESS[type(request)](self.state, request)
            named.go_with_owners(self.state, now)
            return answer
        if type(request) in _TIMED:
            return _TIMED[type(request)](self.state, request, now)
        if isinstance(request, r.PutKVs):
            return streams.put(self.state, request, offset)
        return _TIMELESS[type(request)](self.state, request)

    def sweepable(self) -> set[int]:
        """Objects of deleted streams that are still to be destroyed."""
        return streams.swept(self.state, self.state.sweeping)

    def sweep(self, chosen: set[int], now: int) -> SweepAnswer:
        streams.sweep(self.state, chosen, now)
        return SweepAnswer(destroyed=len(chosen))

    def query(self, request: Any) -> Any:
        return _READS[type(request)](self.state, request)


def _rule_of(request: r.CommitStreamSetObject | r.CommitStreamObject) -> Callable[..., Any]:
    if isinstance(request, r.CommitStreamObject):
        return compactions.compact_stream_objects
    return compactions.compact_set_objects if len(request.compacted_object_ids) else uploads.upload


REPEATED = (
    r.CommitStreamSetObject,
    r.CommitUploads,
    r.CommitStreamObject,
    r.CommitNamedObjects,
    r.CreateStreams,
    r.PrepareObjects,
    r.AdoptObjects,
)
"""Requests that are known again by an id in them."""

_TIMED: dict[type, Callable[..., Any]] = {
    r.PrepareObjects: uploads.prepare,
    r.CommitUploads: uploads.uploads,
    r.ExpireObjects: uploads.expire,
    r.DestroyDeadStreamSetObjects: uploads.destroy_dead,
    r.HoldDeletions: uploads.hold,
    r.ExpireProducers: shared.expire,
    r.AdoptObjects: adoption.adopt,
    r.DeleteNamedObjects: named.delete,
}
_TIMELESS: dict[type, Callable[..., Any]] = {
    r.CreateStreams: streams.create,
    r.IssueProducerIds: shared.issue,
    r.OpenStreams: streams.open_streams,
    r.CloseStreams: streams.close,
    r.TrimStreams: streams.trim,
    r.DeleteStreams: streams.delete,
    r.GetOpeningStreams: streams.opening,
    r.AbandonUploads: streams.abandon,
    r.ReleaseStreams: streams.release,
    r.RemoveObjects: uploads.remove,
    r.ClaimBucket: uploads.claim_bucket,
    r.SetFeatureLevel: adoption.set_feature_level,
    r.FinishRestore: adoption.finish,
    r.RegisterNode: streams.register,
    r.UnregisterNode: streams.unregister,
    r.SuperviseNode: streams.supervise,
    r.GetNextNodeId: streams.next_node_id,
    r.SetNodeLock: streams.lock,
    r.AssignRecoveries: streams.assign,
    r.DeleteKVs: streams.delete_keys,
}
_READS: dict[type, Callable[..., Any]] = {
    r.DescribeStreams: reads.describe_streams,
    r.FindStreams: reads.find_streams,
    r.GetObjects: reads.get_objects,
    r.DescribeObjects: reads.describe_objects,
    r.CheckObjects: reads.check_objects,
    r.GetNodes: reads.get_nodes,
    ListStreamSetObjects: reads.list_stream_set_objects,
    ListStreamObjects: reads.list_stream_objects,
    r.GetKVs: reads.get_kvs,
    r.ListKVs: reads.list_kvs,
    r.DescribeNamedObjects: named.describe,
}
