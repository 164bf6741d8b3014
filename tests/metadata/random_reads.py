"""Random well-formed reads of data that a model's state holds or held."""

from collections.abc import Callable
from typing import Any

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
)
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.tables.values import PageRequest
from tests.metadata.random_commits import NODE_IDS, RandomDraws
from tests.metadata.random_requests import NAMES
from tests.metadata.slow_model_state import State


class RandomReads(RandomDraws):
    """Makes reads for one model, which it only looks at."""

    def make(self, kind: type, state: State) -> Any:
        return _MAKERS[kind](self, state)

    def _page(self, end: int) -> PageRequest:
        token = str(self._rng.randrange(end + 1)) if self._chance(40) else ""
        return PageRequest(self._one((0, 1, 2, 1_000)), token)

    def _ids(self, end: int) -> tuple[int, ...]:
        return tuple(self._some(range(end + 1), 4))

    def _streams(self, state: State) -> Any:
        return r.DescribeStreams(
            stream_ids=self._ids(state.next_stream) if self._chance(50) else (),
            owner_node_id=self._one((None, None, *NODE_IDS)),
            include_ranges=self._chance(50),
            include_stream_objects=self._chance(50),
            page=self._page(state.next_stream),
        )

    def _tagged(self, state: State) -> Any:
        tags = self._one(((("k", "v"),), (("a", "2"), ("z", "1")), (("a", "2"),), (("z", "2"),)))
        owner = self._one((None, *NODE_IDS))
        return r.FindStreams(tags=tags, owner_node_id=owner, page=self._page(state.next_stream))

    def _query(self, state: State) -> ObjectQuery:
        stream_id = self._stream(state)
        stream = state.streams.get(stream_id)
        start, end = (stream.start, stream.end) if stream is not None else (0, 3)
        first = max(0, self._one((start, end, (start + end) // 2)) + self._one((0, 0, 1, -1)))
        return ObjectQuery(
            stream_id, first, self._one((-1, first + 4, max(first, end))), self._one((0, 0, 1, 2))
        )

    def _slices(self, state: State) -> Any:
        return r.GetObjects(queries=tuple(self._query(state) for _ in range(self._one((1, 3)))))

    def _objects(self, state: State) -> Any:
        ids = self._ids(state.next_object) if self._chance(50) else ()
        return r.DescribeObjects(object_ids=ids, page=self._page(state.next_object))

    def _states(self, state: State) -> Any:
        return r.CheckObjects(object_ids=self._ids(state.next_object))

    def _nodes(self, _state: State) -> Any:
        ids = tuple(self._some(NODE_IDS, 2)) if self._chance(50) else ()
        return r.GetNodes(node_ids=ids, include_stream_set_objects=self._chance(50))

    def _set_objects(self, state: State) -> Any:
        page = self._page(state.next_object)
        return ListStreamSetObjects(
            node_id=self._one(NODE_IDS), page=page, include_ranges=self._chance(50)
        )

    def _stream_objects(self, state: State) -> Any:
        query = self._query(state)
        token = self._one(("", "", f"{query.start_offset}-{self._one((0, state.next_object))}"))
        return ListStreamObjects(
            stream_id=query.stream_id,
            start_offset=query.start_offset,
            end_offset=query.end_offset,
            page=PageRequest(query.limit, token),
        )

    def _values(self, _state: State) -> Any:
        keys = self._some("abc", 2)
        return r.GetKVs(keys=tuple(r.KVKey(key=key, namespace=self._one("mn")) for key in keys))

    def _named(self, _state: State) -> Any:
        return r.DescribeNamedObjects(
            names=tuple(self._some(NAMES, 3)) if self._chance(50) else (),
            prefix=self._one(("", "b", "b/")),
            page=PageRequest(self._one((0, 1, 2)), self._one(("", "", "a", "b/1"))),
        )

    def _keys(self, _state: State) -> Any:
        return r.ListKVs(
            namespace=self._one("mn"),
            prefix=self._one(("", "a")),
            keys_only=self._chance(50),
            namespaces=self._chance(30),
            page=PageRequest(self._one((0, 1, 2)), self._one(("", "a", "m"))),
        )


_MAKERS: dict[type, Callable[[RandomReads, State], Any]] = {
    r.DescribeStreams: RandomReads._streams,
    r.FindStreams: RandomReads._tagged,
    r.GetObjects: RandomReads._slices,
    r.DescribeObjects: RandomReads._objects,
    r.CheckObjects: RandomReads._states,
    r.GetNodes: RandomReads._nodes,
    ListStreamSetObjects: RandomReads._set_objects,
    ListStreamObjects: RandomReads._stream_objects,
    r.GetKVs: RandomReads._values,
    r.ListKVs: RandomReads._keys,
    r.DescribeNamedObjects: RandomReads._named,
}
