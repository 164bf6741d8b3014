"""Random uploads and compactions: mostly what a writer would send, sometimes off by one."""

import itertools
from dataclasses import replace
from typing import Any

from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata import values as v
from tests.metadata.random_draws import NODE_IDS, RandomDraws, range_columns
from tests.metadata.slow_model_state import HOLDERS, State
from tests.metadata.slow_model_uploads import Row


class RandomCommits(RandomDraws):
    """Makes commits of all kinds."""

    # ---- uploads ----

    def _row(self, state: State, node_id: int, stream_id: int) -> Row:
        stream = state.streams.get(stream_id)
        start, length = 0, self._rng.randint(1, 9)
        if stream is not None:
            start = stream.end
            owed = state.owed(node_id, stream_id)
            if owed is not None and not self._chance(10):
                start = owed[0]
                length = self._one((length, owed[1] - owed[0]))
            elif stream.start == stream.end and self._chance(30):
                start -= 2
        start = max(0, start + self._one((0,) * 12 + (1, -1, -6)))
        end = start + length
        return Row(stream_id, start, end, self._epoch(state, stream_id), -1)

    def _writer(self, state: State) -> tuple[v.NodeIdentity, list[int]]:
        """Return a node and streams it would upload."""
        owing = sorted(key for key in state.pending if state.owed(*key))
        opened = sorted((s.node, i) for i, s in state.streams.items() if s.opened)
        if owing and self._chance(30):
            node_id = self._one(owing)[0]
        elif opened:
            node_id = self._one(opened)[0]
        else:
            node_id = self._one(NODE_IDS)
        mine = [i for node, i in (*owing, *opened) if node == node_id] or [self._stream(state)]
        streams = self._some(sorted(set(mine)), 3)
        if self._chance(8):
            streams.append(self._any_stream(state))
        return self._identity(state, node_id), sorted(set(streams))

    def _upload(self, state: State) -> Any:
        node, streams = self._writer(state)
        rows = [self._row(state, node.node_id, stream) for stream in streams]
        split = 0 if self._chance(self._stream_objects_percent) else self._rng.randint(0, len(rows))
        object_id, *ids = self._prepared(state, 1 + len(rows) - split)
        return self._commit(node, object_id if split else -1, rows[:split], rows[split:], ids)

    def _commit(
        self,
        node: v.NodeIdentity,
        object_id: int,
        ranges: list[Row],
        objects: list[Row],
        ids: list[int],
        **changes: Any,
    ) -> r.CommitStreamSetObject:
        for row, own in zip(objects, ids, strict=True):
            row.object_id, row.size = own, 1 + own % 3
            row.attributes = 1 if self._chance(5) else self._one((0, 0, 4))
        epochs = self._chance(50)
        policy = v.OnConflict.ACCEPT_VALID if self._chance(40) else v.OnConflict.REJECT_ALL
        fields: dict[str, Any] = {
            "node": node,
            "object_id": object_id,
            "order_id": object_id,
            "object_size": 7 if object_id >= 0 else 0,
            "attributes": self._one((0, 0, 4)),
            "ranges": range_columns(ranges, epochs=epochs),
            "stream_objects": v.StreamObjectColumns(
                object_id=v.column([row.object_id for row in objects]),
                object_size=v.column([row.size for row in objects]),
                stream_id=v.column([row.stream for row in objects]),
                stream_epoch=v.column([row.epoch for row in objects] if epochs else ()),
                start_offset=v.column([row.start for row in objects]),
                end_offset=v.column([row.end for row in objects]),
                attributes=v.column([row.attributes for row in objects]),
                **self._fact_columns(len(objects)),
            ),
            "failover": self._chance(30),
            "on_conflict": policy,
            **(self._facts() if object_id >= 0 else {}),
        }
        return r.CommitStreamSetObject(**(fields | changes))

    def _batch(self, state: State) -> Any:
        node, streams = self._writer(state)
        ends: dict[int, int] = {}
        rows, counts = [], []
        ids = self._prepared(state, self._rng.randint(1, 4))
        for _ in ids:
            chosen = sorted(self._some(streams, 2))
            for stream in chosen:
                row = self._row(state, node.node_id, stream)
                if stream in ends and not self._chance(10):
                    row.start, row.end = ends[stream], ends[stream] + row.end - row.start
                ends[stream] = row.end
                rows.append(row)
            counts.append(len(chosen))
        return r.CommitUploads(
            node=node,
            object_id=v.column(ids),
            object_size=v.column([5] * len(ids)),
            range_count=v.column(counts),
            ranges=range_columns(rows, epochs=self._chance(50)),
            **self._fact_columns(len(ids)),
        )

    def _repeat(self, state: State) -> Any:
        """Send something again that was sent lately, sometimes with one thing changed."""
        if not state.lately:
            return self._upload(state)
        request = self._one(state.lately)
        if not isinstance(request, r.CommitStreamSetObject) or self._chance(60):
            return request
        other: dict[str, Any] = self._one(
            (
                {"object_size": request.object_size + 1},
                {"attributes": request.attributes ^ 8},
                {},
                {"failover": not request.failover},
                {"on_conflict": v.OnConflict(3 - request.on_conflict)},
            )
        )
        return replace(request, **other)

    def _repeat_upload(self, state: State) -> Any:
        """Name an object that is committed, or was."""
        request = self._upload(state)
        others = set(request.stream_objects.object_id.tolist())
        known = [i for i in range(state.next_object) if state.was_committed(i) and i not in others]
        if not known or request.object_id < 0:
            return request
        fields = {name: getattr(request, name) for name in request.__slots__}
        return r.CommitStreamSetObject(**(fields | {"object_id": self._one(known)}))

    # ---- compactions ----

    def _compact_set(self, state: State) -> Any:
        holding = [i for i in NODE_IDS if state.set_objects_of(i)]
        if not holding:
            return self._upload(state)
        node_id = self._one(holding)
        sources = self._some(sorted(state.set_objects_of(node_id)), 4)
        if self._chance(5):
            sources.append(self._rng.randrange(state.next_object))
            sources = sorted(set(sources))
        node = self._identity(state, node_id)
        if self._chance(8):
            return self._replace_set(state, node, sources[0])
        ranges, objects = self._outputs(state, sources)
        object_id, *ids = self._prepared(state, 1 + len(objects))
        if sources == [object_id]:
            return self._replace_set(state, node, object_id)
        return self._commit(
            node,
            object_id if ranges else -1,
            ranges,
            objects,
            ids,
            order_id=self._one((-1, sources[0])),
            compacted_object_ids=v.column(sources),
        )

    def _replace_set(self, state: State, node: v.NodeIdentity, source: int) -> Any:
        if self._chance(30):
            source = self._rng.randrange(state.next_object)
        return r.CommitStreamSetObject(
            node=node,
            object_id=source,
            order_id=source,
            object_size=7,
            attributes=self._one((0, 4, 8)),
            compacted_object_ids=v.column([source]),
        )

    def _outputs(self, state: State, sources: list[int]) -> tuple[list[Row], list[Row]]:
        """Return the ranges and stream objects that cover the sources, or almost."""
        held = [row for i in sources if i in state.objects for row in state.objects[i].held]
        ranges: list[Row] = []
        objects: list[Row] = []
        for stream_id in sorted({stream for stream, _, _ in held}):
            mine = [row for row in held if row[0] == stream_id]
            alive = state.alive(mine).get(stream_id)
            if not alive and not self._chance(20):
                continue
            low, high = min(row[1] for row in mine), max(row[2] for row in mine)
            if alive and self._chance(60):
                low = min(alive)
            low = max(0, low + self._one((0,) * 30 + (1, -1)))
            high += self._one((0,) * 30 + (1, -1))
            if self._chance(2):
                continue
            for start, end in self._pieces(sorted(alive or ()), low, max(low + 1, high)):
                row = Row(stream_id, start, end, 0, -1)
                (objects if self._chance(self._stream_objects_percent) else ranges).append(row)
        if self._chance(3):
            other = Row(self._stream(state), 0, 3, 0, -1)
            if other.stream not in {row.stream for row in (*ranges, *objects)}:
                objects.append(other)
        return ranges, objects

    def _pieces(self, alive: list[int], low: int, high: int) -> list[tuple[int, int]]:
        """Return pieces of a stream from `low` to `high`; offsets that are not alive cut it."""
        cuts = {low, high}
        holes: set[int] = set()
        if alive and self._chance(85):
            for before, after in itertools.pairwise(alive):
                if after > before + 1 and low < before + 1 and after < high:
                    cuts |= {before + 1, after}
                    holes.add(before + 1)
        if self._chance(35):
            cuts.update(self._rng.randint(low, high) for _ in range(self._rng.randint(1, 2)))
        pieces = [piece for piece in itertools.pairwise(sorted(cuts)) if piece[0] not in holes]
        if len(pieces) > 1 and self._chance(6):
            pieces.pop(self._rng.randrange(len(pieces)))
        return pieces

    def _compact_stream(self, state: State) -> Any:
        by_stream: dict[int, list[int]] = {}
        for object_id, item in state.objects.items():
            if item.kind in HOLDERS and item.state is v.ObjectState.COMMITTED:
                by_stream.setdefault(item.held[0][0], []).append(object_id)
        if not by_stream:
            return self._upload(state)
        stream_id = self._one(sorted(by_stream))
        ordered = sorted(by_stream[stream_id], key=lambda i: state.objects[i].held[0][1])
        first = self._rng.randrange(len(ordered))
        sources = ordered[first : first + self._rng.randint(1, 4)]
        if self._chance(5):
            sources.append(self._rng.randrange(state.next_object))
            sources = list(dict.fromkeys(sources))
        return self._stream_compaction(state, stream_id, sources)

    def _stream_compaction(self, state: State, stream_id: int, sources: list[int]) -> Any:
        held = [row for i in sources if i in state.objects for row in state.objects[i].held]
        alive = state.alive(held).get(stream_id)
        (object_id,) = self._prepared(state, 1)
        low, high = min(row[1] for row in held), max(row[2] for row in held)
        if alive and self._chance(50):
            low = min(alive)
        low = max(0, low + self._one((0,) * 20 + (1, -1)))
        high = max(low + 1, high + self._one((0,) * 20 + (1, -1)))
        attributes = self._one((0, 1, 1, 5))
        if object_id in sources:
            sources = [object_id]
        if self._chance(5):
            object_id, sources = sources[0], sources[:1]
            attributes = state.objects[object_id].attributes & 3 | self._one((0, 4))
        elif not alive and self._chance(70):
            object_id, low, high, attributes = -1, -1, -1, 0
            if self._chance(20):
                sources = list(dict.fromkeys([*sources, *self._prepared(state, 1)]))
        operations = tuple(self._operation(state, i, attributes) for i in sources)
        if sources == [object_id] or self._chance(20):
            operations = ()
        return r.CommitStreamObject(
            node=self._owner(state, stream_id),
            object_id=object_id,
            object_size=11 if object_id >= 0 else 0,
            stream_id=stream_id,
            stream_epoch=self._epoch(state, stream_id),
            start_offset=low,
            end_offset=high,
            attributes=attributes,
            source_object_ids=v.column(sources),
            operations=operations,
            **(self._facts() if object_id >= 0 else {}),
        )

    def _operation(self, state: State, object_id: int, attributes: int) -> v.SourceOperation:
        item = state.objects.get(object_id)
        delete = self._one((v.SourceOperation.DELETE, v.SourceOperation.DEEP_DELETE))
        if attributes & 3 != 1:
            return delete
        is_composite = item is not None and item.kind is v.ObjectKind.COMPOSITE
        keep = self._chance(10 if is_composite else 85)
        return v.SourceOperation.KEEP_DATA if keep else delete
