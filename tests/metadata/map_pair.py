"""The map and the slow model side by side: every answer, description and view must be equal.

The driver of a `Pair` draws the requests and says when to undo, commit, freeze or restart. All
comparisons raise `AssertionError`. Records go through their encoding on the way to the map.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from streammeta.controller.errors import FeatureLevelError, InvalidRequestError, RecoveringError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.answers import ObjectLists
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
)
from streammeta.controller.metadata.api.object_slices import (
    ObjectQuery,
    ObjectQueryColumns,
    ObjectSlices,
)
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries import stream_decisions
from streammeta.controller.metadata.sections.frozen import FrozenMetadata
from streammeta.controller.metadata.tables.values import (
    ObjectKind,
    ObjectState,
    PageRequest,
    column,
)
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import ObjectsDestroyed, Record
from tests.metadata.random_requests import RandomRequests
from tests.metadata.slow_model import Model
from tests.metadata.slow_model_adoption import require_allowed
from tests.metadata.slow_model_reads import size_of
from tests.metadata.slow_model_streams import kept_alive, swept
from tests.metadata.slow_model_uploads import deletable

_VIEWS_MAX = 3
_JUMP = 24
"""Object ids that a restore leaves out."""
_FIELDS: dict[type, tuple[str, ...]] = {}


def plain(value: Any) -> Any:
    """Return a value that can be compared: dataclasses and columns as tuples."""
    if isinstance(value, ObjectSlices | ObjectLists):
        value = tuple(value)
    kind = type(value)
    names = _FIELDS.get(kind)
    if names is None:
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        names = _FIELDS[kind] = tuple(field.name for field in fields)
    if names:
        return (kind.__name__, *[plain(getattr(value, name)) for name in names])
    if kind is tuple:
        return tuple([plain(item) for item in value])
    return tuple(value.tolist()) if kind is np.ndarray else value


def in_columns(read: r.GetObjects) -> r.GetObjects:
    """Return the same read with its queries in columns."""
    cells = zip(*(dataclasses.astuple(query) for query in read.queries), strict=True)
    return dataclasses.replace(read, queries=ObjectQueryColumns(*map(column, cells)))


def same(got: Any, want: Any, what: object) -> None:
    """Raise unless two values are equal, with the first difference."""
    left, right = plain(got), plain(want)
    if left == right:
        return
    while isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        unequal = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
        if len(unequal) != 1 or not isinstance(unequal[0][0], tuple):
            break
        left, right = unequal[0]
    raise AssertionError(f"{what}: map has {left}, model has {right}")


@contextmanager
def told(where: object, *expected: type[Exception]) -> Iterator[None]:
    """Say where whatever fails in the block did; errors of `expected` types are passed on."""
    try:
        yield
    except expected:
        raise
    except Exception as error:
        raise AssertionError(f"{where}: {error!r}") from error


@dataclass(slots=True)
class _View:
    frozen: FrozenMetadata
    digest: bytes
    model: Model
    now: int
    in_the_log: bool = True
    """Whether everything below its offset is still in the log."""


class Pair:
    """A map, a model, and the log that made them."""

    def __init__(self) -> None:
        self.map = ClusterMetadata()
        self.model = Model()
        self.now = 1_000
        self.log: list[tuple[int, bytes]] = []
        self._base = self.map.freeze()
        """What the log continues."""
        self.uncommitted: list[tuple[int, Model]] = []
        """Offset of each entry that can be undone, and the model before it."""
        self._views: list[_View] = []

    # ---- writing ----

    def begin(self, requests: RandomRequests) -> None:
        """Make what a cluster begins with."""
        for request in requests.start(self.model):
            self.write(request)

    def write(self, request: Any, offset: int | None = None) -> Any:
        """Let both answer a write, and apply it; return the answer."""
        at = self.map.applied_end_offset if offset is None else offset
        before = self.model.copy()
        try:
            decision = self.map.decide(request, self.now, at)
        except (InvalidRequestError, FeatureLevelError, RecoveringError) as error:
            self._expect_refusal(request, at, type(error))
            return None
        if decision.records:
            payload = encode_records(decision.records)
            self.map.apply(at, decode_records(payload))
            self.log.append((at, payload))
            self.uncommitted.append((at, before))
        answer = self._write_model(request, at, decision.records)
        same(decision.answer, answer, request)
        if not decision.records:
            assert self.model.state == before.state, f"{request} changed the model, not the map"
        self._check_promises(before, request)
        return decision.answer

    def _expect_refusal(self, request: Any, at: int, kind: type[Exception]) -> None:
        try:
            self.model.write(request, self.now, at)
        except kind:
            return
        raise AssertionError(f"the map refuses {request}: {kind.__name__}")

    def _write_model(self, request: Any, at: int, records: Sequence[Record]) -> Any:
        require_allowed(self.model.state, request)
        if isinstance(request, r.SweepDeletedStreams):
            return self._sweep(records, request.limit, self.model.state.sweeping)
        existing = set(self.model.state.streams)
        try:
            answer = self.model.write(request, self.now, at)
        except (InvalidRequestError, FeatureLevelError) as error:
            raise AssertionError(f"the map takes {request}: {error}") from error
        if isinstance(request, r.DeleteStreams):
            deleted = existing - set(self.model.state.streams)
            self._sweep(records, stream_decisions.DESTROYED_AT_ONCE_MAX, deleted)
        return answer

    def _sweep(self, records: Sequence[Record], limit: int, streams: set[int]) -> Any:
        """Which objects of deleted streams go first is up to the map, but not how many."""
        named = [
            object_id
            for record in records
            if isinstance(record, ObjectsDestroyed)
            for object_id in record.object_id.tolist()
            if self.model.state.objects[object_id].kind is not ObjectKind.NAMED
        ]
        sweepable = swept(self.model.state, streams)
        assert len(named) == len(set(named)), f"swept twice: {named}"
        assert set(named) <= sweepable, f"swept {named}, of {sweepable}"
        assert len(named) == min(limit, len(sweepable)), f"swept {named} of {sweepable}"
        return self.model.sweep(set(named), self.now)

    def _check_promises(self, before: Model, request: Any) -> None:
        """What must hold whatever the rules say."""
        state = self.model.state
        for stream_id, stream in state.streams.items():
            was = before.state.streams.get(stream_id, stream)
            assert was.end <= stream.end, f"{request} lowers the end of stream {stream_id}"
            assert was.start <= stream.start, f"{request} lowers the start of stream {stream_id}"
        assert before.state.next_object <= state.next_object, f"{request} lowers the next id"
        still = kept_alive(state)
        states = self._states(sorted(still))
        for object_id, found in zip(sorted(still), states, strict=True):
            kept = found in (ObjectState.COMMITTED, ObjectState.LINKED)
            assert kept, f"{request} lost object {object_id}, now {found.name}"

    def _states(self, ids: Sequence[int]) -> Sequence[ObjectState]:
        if not ids:
            return ()
        answer: Any = self.map.query(r.CheckObjects(object_ids=tuple(ids)))
        states: Sequence[ObjectState] = answer.states
        return states

    # ---- the log ----

    def undo(self, index: int) -> None:
        """Take back the uncommitted entry at `index`, and what came after it."""
        offset, self.model = self.uncommitted[index]
        del self.uncommitted[index:]
        self.log = [entry for entry in self.log if entry[0] < offset]
        self.map.undo_to(offset)
        for view in self._views:
            view.in_the_log &= view.frozen.end_offset <= offset

    def commit(self, count: int) -> None:
        """The oldest `count` uncommitted entries can't be undone any more."""
        self.uncommitted = self.uncommitted[count:]
        end = self.uncommitted[0][0] if self.uncommitted else self.map.applied_end_offset
        self.map.forget_undo(end)

    def freeze(self) -> None:
        """Take a view, to be looked at later."""
        frozen = self.map.freeze()
        self._views.append(_View(frozen, self.map.state_hash(), self.model.copy(), self.now))
        del self._views[:-_VIEWS_MAX]

    def restart(self) -> None:
        """Go on with a map made from the sections of this one; everything is committed."""
        self.commit(len(self.uncommitted))
        frozen = self.map.freeze()
        restored = ClusterMetadata.from_sections(frozen.sections(), frozen.end_offset)
        assert restored.state_hash() == self.map.state_hash(), "the sections lose something"
        self.map = restored

    def recover(self) -> None:
        """Go on with a map that was restored: what was prepared is gone, and ids have jumped."""
        self.commit(len(self.uncommitted))
        frozen, state = self.map.freeze(), self.model.state
        prepared = [i for i in state.objects if state.is_prepared(i)]
        state.undecided = (min([state.next_object, *prepared]), state.next_object + _JUMP)
        state.next_object += _JUMP
        state.feature_level = max(2, state.feature_level)
        for object_id in prepared:
            del state.objects[object_id]
        self.map = ClusterMetadata.from_sections(
            recovering(frozen.sections(), state.undecided), frozen.end_offset
        )
        self._base, self.log = self.map.freeze(), []
        for view in self._views:
            view.in_the_log = False

    def check_views(self) -> None:
        """Views are what they were, make maps that answer as the model did, and can be replayed."""
        for view in self._views:
            assert view.frozen.digest() == view.digest, "a view has changed"
            restored = ClusterMetadata.from_sections(view.frozen.sections(), view.frozen.end_offset)
            assert restored.state_hash() == view.digest, "the sections lose something"
            compare(restored, view.model, view.now)
            names = r.ListKVs(namespaces=True)
            same(restored.query(names), view.model.query(names), "namespaces")
            if view.in_the_log:
                self._replay(restored)

    def check_log(self) -> None:
        """The whole log makes the same map."""
        base = self._base
        self._replay(ClusterMetadata.from_sections(base.sections(), base.end_offset))

    def _replay(self, replayed: ClusterMetadata) -> None:
        for offset, payload in self.log:
            if offset >= replayed.applied_end_offset:
                replayed.apply(offset, decode_records(payload))
        assert replayed.state_hash() == self.map.state_hash(), "replay makes another map"

    def check(self) -> None:
        compare(self.map, self.model, self.now)


def recovering(sections: Any, undecided: tuple[int, int]) -> dict[str, Any]:
    """Return the sections of a map as they are after a restore."""
    first, below = undecided
    objects = sections["objects"]
    stays = objects["state"] != ObjectState.PREPARED
    return {
        **sections,
        "counters": {**sections["counters"], "next_object_id": column([below])},
        "objects": {name: values[stays] for name, values in objects.items()},
        "feature_level": {"level": np.maximum(sections["feature_level"]["level"], 2)},
        "recovery": {"undecided_from": column([first]), "undecided_below": column([below])},
    }


def compare(cluster_metadata: ClusterMetadata, model: Model, now: int) -> None:
    state = model.state
    reads: list[Any] = [
        r.DescribeStreams(include_ranges=True, include_stream_objects=True),
        r.FindStreams(tags=(("k", "v"),)),
        *(r.FindStreams(tags=(("k", "v"),), owner_node_id=node_id) for node_id in state.nodes),
        r.FindStreams(tags=(("a", "2"), ("z", "1")), page=PageRequest(1)),
        r.DescribeObjects(),
        r.CheckObjects(object_ids=tuple(range(state.next_object + 2))),
        r.GetNodes(include_stream_set_objects=True),
        r.ListKVs(namespace="n"),
        r.DescribeNamedObjects(),
        r.DescribeNamedObjects(prefix="b", page=PageRequest(1)),
        *(
            ListStreamSetObjects(node_id=node_id, page=page, include_ranges=page.page_size == 2)
            for node_id in (*state.nodes, 5)
            for page in (PageRequest(), PageRequest(2), PageRequest(1, str(state.next_object // 2)))
        ),
    ]
    queries = tuple(
        ObjectQuery(stream_id, start, end, limit)
        for stream_id, stream in (*state.streams.items(), (state.next_stream, None))
        for start in (_starts(stream) if stream is not None else (0,))
        for end, limit in ((-1, 0), (start + 4, 2))
    )
    reads.append(r.GetObjects(queries=queries))
    reads.extend(
        ListStreamObjects(
            stream_id=query.stream_id,
            start_offset=query.start_offset,
            end_offset=query.end_offset,
            page=PageRequest(query.limit),
        )
        for query in queries
    )
    for read in reads:
        want = model.query(read)
        same(cluster_metadata.query(read), want, type(read).__name__)
        if isinstance(read, r.GetObjects):
            same(cluster_metadata.query(in_columns(read)), want, "GetObjects in columns")
    same(cluster_metadata.size(), size_of(state), "size")
    claim = cluster_metadata.bucket_claim
    same(cluster_metadata.undecided, state.undecided, "undecided ids")
    same(cluster_metadata.feature_level, state.feature_level, "feature level")
    same((claim.cluster_uuid, claim.issued_below), state.claim, "claim")
    _compare_what_is_due(cluster_metadata, model, now)
    _check_data(cluster_metadata, model)


def _starts(stream: Any) -> set[int]:
    return {
        max(0, stream.start - 1),
        stream.start,
        stream.start + 3,
        stream.end,
        *(min(stream.lost, default=stream.start), max(stream.lost, default=stream.start)),
    }


def _compare_what_is_due(cluster_metadata: ClusterMetadata, model: Model, now: int) -> None:
    prepared = [i for i in model.state.objects if model.state.is_prepared(i)]
    for at in (now, now + 3_600_000):
        expired = [i for i in prepared if model.state.objects[i].timestamp < at]
        same(sorted(cluster_metadata.list_expired(at, len(prepared) + 1)), expired, "expired")
    everything = len(model.state.objects) + 1
    for marked_before in (now + 1, now - 200):
        got = cluster_metadata.destroyed(marked_before, everything, now)
        assert len(got) == len(set(got)), f"destroyed: {got} names an object twice"
        same(tuple(sorted(got)), tuple(sorted(deletable(model.state, marked_before, now))), "due")
    needed = kept_alive(model.state)
    assert needed.isdisjoint(cluster_metadata.destroyed(now + 1, everything, now)), (
        "needed, yet destroyed"
    )
    same(cluster_metadata.has_sweepings(), bool(model.sweepable()), "has_sweepings")


def _check_data(cluster_metadata: ClusterMetadata, model: Model) -> None:
    """Every offset that was uploaded and not trimmed is found in exactly one slice."""
    for stream_id, stream in model.state.streams.items():
        found: list[int] = []
        at = stream.start
        offsets = sorted(model.state.data.get(stream_id, ()))
        while rest := [offset for offset in offsets if offset >= at]:
            query = ObjectQuery(stream_id, rest[0], -1)
            answer: Any = cluster_metadata.query(r.GetObjects(queries=(query,)))
            slices = answer.results[0].objects
            assert slices, f"offset {rest[0]} of stream {stream_id} is in no object"
            for slice_, following in itertools.pairwise(slices):
                assert slice_.end_offset == following.start_offset, f"slices of stream {stream_id}"
            found.extend(range(max(rest[0], slices[0].start_offset), slices[-1].end_offset))
            at = slices[-1].end_offset
        assert found == offsets, f"stream {stream_id} holds {found}, uploaded was {offsets}"
