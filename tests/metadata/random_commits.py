"""Random uploads and compactions, mostly what a correct broker would send, and their draws."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables import values as v
from tests.metadata.slow_model_shared import SEQUENCES, Batch
from tests.metadata.slow_model_state import HOLDERS, State
from tests.metadata.slow_model_uploads import Row

NODE_IDS = (7, 1_000, 1_001)
_T = TypeVar("_T")


class RandomDraws:
    """Draws for one sequence of requests."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        # What a whole sequence prefers: some states are reached by many of the same kind alone.
        self._stream_objects_percent = rng.choice((30, 30, 90))
        self._facts_percent = rng.choice((0, 50, 97))

    def _one(self, values: Sequence[_T]) -> _T:
        return values[self._rng.randrange(len(values))]

    def _chance(self, percent: int) -> bool:
        return self._rng.randrange(100) >= 100 - percent

    def _some(self, values: Sequence[_T], most: int) -> list[_T]:
        rest = list(values)
        count = self._rng.randint(1, max(1, min(most, len(rest)))) if rest else 0
        return [rest.pop(self._rng.randrange(len(rest))) for _ in range(count)]

    def _request_id(self) -> str:
        # A few are used again and again, most only once.
        return f"r{self._rng.randrange(4 if self._chance(15) else 2**32)}"

    def _identity(self, state: State, node_id: int) -> v.NodeIdentity:
        node = state.nodes.get(node_id)
        epoch = node.epoch if node is not None else 1
        return v.NodeIdentity(node_id, max(0, epoch + self._one((0,) * 30 + (1, -1))))

    def _node(self, state: State) -> v.NodeIdentity:
        usable = [i for i, node in state.nodes.items() if not (node.failover or node.departed)]
        if usable and not self._chance(15):
            return self._identity(state, self._one(usable))
        return self._identity(state, self._one(NODE_IDS))

    def _owner(self, state: State, stream_id: int) -> v.NodeIdentity:
        stream = state.streams.get(stream_id)
        if stream is None or stream.node < 0 or self._chance(8):
            return self._node(state)
        return self._identity(state, stream.node)

    def _stream(self, state: State) -> int:
        if state.streams and not self._chance(10):
            return self._one(sorted(state.streams))
        return self._any_stream(state)

    def _any_stream(self, state: State) -> int:
        """Return a stream that may be gone, or may not have been created yet."""
        return self._rng.randrange(state.next_stream + 2)

    def _epoch(self, state: State, stream_id: int, *, least: int = 0) -> int:
        stream = state.streams.get(stream_id)
        epoch = stream.epoch if stream is not None else 0
        return max(least, epoch + self._one((0,) * 30 + (1, -1)))

    def _prepared(self, state: State, count: int) -> list[int]:
        """Return `count` different ids, mostly prepared ones."""
        prepared = [i for i in state.objects if state.is_prepared(i)]
        others = [i for i in range(state.next_object + count) if i not in prepared]
        chosen: list[int] = []
        for _ in range(count):
            source = others if not prepared or self._chance(3) else prepared
            chosen.append(source.pop(self._rng.randrange(len(source))))
        return chosen

    def _facts(self) -> dict[str, Any]:
        """Return what is known of an object's content, with -1 for what is not."""
        low = high = crc32c = -1
        if self._chance(self._facts_percent):
            low = self._one((0, self._rng.randrange(9), 2**63 - 1))
            high = min(low + self._one((0, 3, 2**62)), 2**63 - 1)
        if self._chance(self._facts_percent):
            crc32c = self._one((0, 5, 2**32 - 1))
        return {"min_timestamp_ms": low, "max_timestamp_ms": high, "crc32c": crc32c}

    def _fact_columns(self, count: int) -> dict[str, v.Int64Column]:
        """Return the facts of `count` objects; columns that know nothing are sometimes empty."""
        rows = [self._facts() for _ in range(count)]
        names = ("min_timestamp_ms", "max_timestamp_ms", "crc32c")
        columns = {name: v.column([row[name] for row in rows]) for name in names}
        for alike in (names[:2], names[2:]):
            if all((columns[name] == -1).all() for name in alike) and self._chance(50):
                columns.update((name, v.column()) for name in alike)
        return columns

    def _tags(self) -> v.Tags:
        return self._one(((), (("k", "v"),), (("z", "1"), ("a", "2"))))


def range_columns(rows: list[Row], *, epochs: bool) -> v.RangeColumns:
    """Return rows as columns; without `epochs` that column is empty."""
    return v.RangeColumns(
        stream_id=v.column([row.stream for row in rows]),
        stream_epoch=v.column([row.epoch for row in rows] if epochs else ()),
        start_offset=v.column([row.start for row in rows]),
        end_offset=v.column([row.end for row in rows]),
    )


def shared_columns(batches: list[Batch], *, producers: bool) -> v.SharedRowColumns:
    """Return batches as columns; without `producers` theirs are empty."""
    return v.SharedRowColumns(
        stream_id=v.column([batch.stream for batch in batches]),
        record_count=v.column([batch.count for batch in batches]),
        producer_id=v.column([batch.producer for batch in batches] if producers else ()),
        producer_epoch=v.column([batch.epoch for batch in batches] if producers else ()),
        first_sequence=v.column([batch.sequence for batch in batches] if producers else ()),
    )


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

    def _append(self, state: State) -> Any:
        """Append to shared streams, mostly the next batches of a few producers."""
        shared = [i for i, stream in state.streams.items() if stream.shared]
        if not shared or state.feature_level < 5:
            return self._upload(state)
        request = self._upload(state) if self._chance(20) else None
        taken: set[int] = set()
        if request is not None:
            taken = {*request.ranges.stream_id.tolist(), *request.stream_objects.stream_id.tolist()}
        streams = sorted(set(self._some(shared, 3)) - taken)
        if self._chance(5):
            streams = sorted({*streams, self._any_stream(state)} - taken)
        batches = [batch for stream_id in streams for batch in self._batches(state, stream_id)]
        if not batches or (request is not None and request.object_id < 0):
            return self._upload(state)
        rows = shared_columns(batches, producers=self._chance(80))
        if request is not None:
            return replace(request, failover=False, recoverer=None, shared_rows=rows)
        (object_id,) = self._prepared(state, 1)
        request = self._commit(self._node(state), object_id, [], [], [], failover=False)
        return replace(request, shared_rows=rows)

    def _batches(self, state: State, stream_id: int) -> list[Batch]:
        """Return one or more batches for a stream, some of them repeats or out of order."""
        batches: list[Batch] = []
        for _ in range(self._one((1, 1, 2, 3))):
            producer = self._one((-1, 0, 0, 1))
            count = self._one((1, 1, 2, 3, 5))
            batch = Batch(stream_id, count, -1, -1, -1)
            known = state.producers.get((stream_id, producer))
            before = [b for b in batches if b.producer == producer]
            if producer >= 0:
                batch.producer = producer
                batch.epoch, batch.sequence = 0, self._one((0, 0, 0, 7, 2**31 - 1))
                if before:
                    batch.epoch = before[-1].epoch
                    batch.sequence = (before[-1].sequence + before[-1].count) % SEQUENCES
                elif known is not None:
                    sequence, length, _ = known.batches[-1]
                    batch.epoch, batch.sequence = known.epoch, (sequence + length) % SEQUENCES
                if known is not None and self._chance(15):
                    batch.sequence, batch.count, _ = self._one(known.batches)
                if self._chance(20):
                    batch.epoch, batch.sequence = batch.epoch + 1, self._one((0, 0, 0, 1))
                if self._chance(15):
                    batch.epoch = max(0, batch.epoch - 1)
                if self._chance(4):
                    batch.sequence = max(0, batch.sequence - 1)
            batches.append(batch)
        return batches

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
        if state.appends and self._chance(40):
            gone = [item for item in state.appends if state.is_destroyed(item.object_id)]
            request = self._one(gone or state.appends)
        if not isinstance(request, r.CommitStreamSetObject) or self._chance(60):
            return request
        other: dict[str, Any] = self._one(
            (
                {"object_size": request.object_size + 1},
                {"attributes": request.attributes ^ 8},
                {},
                {"failover": not (request.failover or request.shared_rows), "recoverer": None},
                {"on_conflict": v.OnConflict(3 - request.on_conflict)},
                {"kv_puts": request.kv_puts[1:], "trims": request.trims[:1]},
            )
        )
        return replace(request, **other)

    def _resend(self, state: State) -> Any:
        """Commit an object that some commit left out, in a commit of its own or as a set object."""
        left_out = sorted({key[1:] for key in state.rejected})
        fitting = [key for key in left_out if state.is_prepared(key[0])]
        if not fitting:
            return self._repeat(state)
        object_id, stream_id = self._one(fitting)
        stream = state.streams.get(stream_id)
        node = self._owner(state, stream_id) if stream is not None else self._node(state)
        row = self._row(state, node.node_id, stream_id)
        as_set_object = self._chance(30)
        return self._commit(
            node,
            object_id if as_set_object else -1,
            [row] if as_set_object else [],
            [] if as_set_object else [row],
            [] if as_set_object else [object_id],
        )

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
        holding = [i for i in NODE_IDS if state.stream_set_objects_of(i)]
        if not holding:
            return self._upload(state)
        node_id = self._one(holding)
        sources = self._some(sorted(state.stream_set_objects_of(node_id)), 4)
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
