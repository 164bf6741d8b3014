"""The records of a step in the scenarios' vocabulary, and the facts asserted about them.

Ours are columns and say what happened; the scenarios' say row by row what is from now on. Where one
follows from the other (and the state before) it is spelled out and counted; where it does not, only
whether there are any records can be compared. Order within an entry means nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from streammeta.controller.metadata.api.answers import StreamDescription
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from streammeta.controller.records import record as ours
from tests.conformance.compaction_facts import Before
from tests.conformance.conformance_report import Mismatch

Told = dict[str, Any]
"""One record in the scenarios' vocabulary: its type and the fields that may be asserted."""

OBJECT_TYPES = ("S3Object", "RemoveS3Object")


@dataclass(frozen=True, slots=True)
class Context:
    """What is needed to spell records out: the step and the state before it."""

    op: str
    is_compaction: bool
    before: Before
    pending: Mapping[int, Mapping[int, tuple[int, int]]]
    recorded_ends: Mapping[int, int]


def spell_out(records: Sequence[ours.Record], context: Context) -> list[Told] | None:
    """Return the records in the scenarios' vocabulary; None if one has no exact counterpart."""
    told: list[Told] = []
    for record in records:
        spell = _SPELLED.get(type(record))
        if spell is None:
            return None
        told.extend(spell(record, context))
    if not context.is_compaction:
        told.extend(_end_offsets(records, context))
    return told


def check_records(
    facts: Mapping[str, Any], records: Sequence[ours.Record], context: Context
) -> Iterator[Mismatch]:
    told = spell_out(records, context)
    for name, expected in facts.items():
        if name == "count" and (told is None or (expected == 0) is not (not records)):
            if (expected == 0) is not (not records):
                yield Mismatch("records.count", expected, f"{len(records)} records of ours")
        elif name == "count_is_zero":
            if bool(expected) is not (not records):
                yield Mismatch("records.count", f"zero: {expected}", len(records))
        elif name in _CHECKS:
            if told is not None:
                yield from _CHECKS[name](expected, told)
        else:
            yield Mismatch(f"records.{name}", expected, "unknown field")


def _check_count(expected: int, told: list[Told]) -> Iterator[Mismatch]:
    if expected != len(told):
        yield Mismatch("records.count", expected, f"{len(told)} ({_types(told)})")


def _check_other_count(expected: int, told: list[Told]) -> Iterator[Mismatch]:
    others = [item for item in told if item["type"] not in OBJECT_TYPES]
    if expected != len(others):
        yield Mismatch("records.count_without_object_records", expected, _types(others))


def _check_types(expected: list[str], told: list[Told]) -> Iterator[Mismatch]:
    if Counter(expected) != Counter(item["type"] for item in told):
        yield Mismatch("records.types", expected, _types(told))


def _check_includes(
    expected: list[str], told: list[Told], *, wanted: bool = True
) -> Iterator[Mismatch]:
    for kind in expected:
        if any(item["type"] == kind for item in told) is not wanted:
            name = "includes" if wanted else "excludes"
            yield Mismatch(f"records.{name}", kind, _types(told))


def _check_sequence(expected: list[Told], told: list[Told]) -> Iterator[Mismatch]:
    left = list(told)
    for index, wanted in enumerate(expected):
        match = next((item for item in left if _matches(wanted, item)), None)
        if match is None:
            yield Mismatch(f"records.sequence[{index}]", wanted, _types(left) or "no record left")
        else:
            left.remove(match)
    if left and len(expected) < len(told):
        yield Mismatch("records.sequence", f"{len(expected)} records", f"also {_types(left)}")


def _matches(wanted: Told, item: Told) -> bool:
    for name, value in wanted.items():
        if name == "keys_unordered":
            if sorted(value) != sorted(item.get("keys", [])):
                return False
        elif item.get(name) != value:
            return False
    return True


def _types(told: Sequence[Told]) -> str:
    return ", ".join(item["type"] for item in told)


_CHECKS: dict[str, Callable[[Any, list[Told]], Iterator[Mismatch]]] = {
    "count": _check_count,
    "count_without_object_records": _check_other_count,
    "types": _check_types,
    "includes": _check_includes,
    "excludes": partial(_check_includes, wanted=False),
    "sequence": _check_sequence,
}


# ---- spelling out ----


def _cells(record: Any, *columns: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(getattr(record, name).tolist() for name in columns), strict=True)


def _rows(kind: str, **columns: str) -> Callable[[Any, Context], Iterator[Told]]:
    """Return what tells a record of this kind for each row of these columns."""

    def spell(record: Any, _: Context) -> Iterator[Told]:
        for cells in _cells(record, *columns.values()):
            yield {"type": kind, **dict(zip(columns, cells, strict=True))}

    return spell


def _created(record: ours.StreamsCreated, _: Context) -> Iterator[Told]:
    yield {"type": "AssignedStreamId", "stream": record.first_stream_id + record.count - 1}
    for stream_id in range(record.first_stream_id, record.first_stream_id + record.count):
        yield {"type": "S3Stream", "stream": stream_id, "state": "CLOSED"}


def _opened(record: ours.StreamsOpened, context: Context) -> Iterator[Told]:
    for stream_id in record.stream_id.tolist():
        yield {"type": "S3Stream", "stream": stream_id, "state": "OPENED"}
        index = context.before.streams[stream_id].range_index
        if index >= 0:
            yield {"type": "Range", "stream": stream_id, "index": index}
        yield {"type": "Range", "stream": stream_id, "index": index + 1}


def _reopened(record: ours.StreamsReopened, _: Context) -> Iterator[Told]:
    for stream_id in record.stream_id.tolist():
        yield {"type": "S3Stream", "stream": stream_id, "state": "OPENED"}


def _closed(record: ours.StreamsClosed, context: Context) -> Iterator[Told]:
    ends = record.end_offset.tolist() or [-1] * len(record.stream_id)
    for stream_id, end in zip(record.stream_id.tolist(), ends, strict=True):
        yield {"type": "S3Stream", "stream": stream_id, "state": "CLOSED"}
        stream = context.before.streams[stream_id]
        if end >= 0 and end != context.recorded_ends.get(stream_id, stream.end_offset):
            yield {"type": "Range", "stream": stream_id, "index": stream.range_index}
        if end > stream.end_offset:
            yield {"type": "NodeWALUncommittedOffsets", "node": stream.node_id}


def _trimmed(record: ours.StreamsTrimmed, context: Context) -> Iterator[Told]:
    for stream_id, start in _cells(record, "stream_id", "start_offset"):
        yield {"type": "S3Stream", "stream": stream_id}
        yield from _trimmed_ranges(context.before.streams[stream_id], start)


def _trimmed_ranges(stream: StreamDescription, start: int) -> Iterator[Told]:
    for item in sorted(stream.ranges, key=lambda item: item.range_index):
        if start <= item.start_offset:
            return
        told = {"stream": stream.stream_id, "index": item.range_index}
        if item.range_index != stream.range_index and start >= item.end_offset:
            yield {"type": "RemoveRange", **told}
            continue
        yield {"type": "Range", **told}
        return


def _prepared(record: ours.ObjectsPrepared, _: Context) -> Iterator[Told]:
    last = record.first_object_id + record.count - 1
    yield {"type": "AssignedS3ObjectId", "object": last, "assigned": last}
    for object_id in range(record.first_object_id, last + 1):
        told = {"object": object_id, "state": "PREPARED", "timestamp_ms": record.deadline_ms}
        yield {"type": "S3Object", **told}


def _set_objects(record: ours.StreamSetObjectsCommitted, context: Context) -> Iterator[Told]:
    for object_id, order, size in _cells(record, "object_id", "order_id", "object_size"):
        yield _committed(object_id, size, record.committed_at_ms)
        if context.op != "commit_object":
            told = {"object": object_id, "node": record.node_id, "order": order}
            yield {"type": "S3StreamSetObject", **told}


def _stream_objects(record: ours.StreamObjectsCommitted, context: Context) -> Iterator[Told]:
    for object_id, size, stream_id in _cells(record, "object_id", "object_size", "stream_id"):
        if stream_id in context.before.streams:
            yield _committed(object_id, size, record.committed_at_ms)
            yield {"type": "S3StreamObject", "object": object_id, "stream": stream_id}


def _committed(object_id: int, size: int, now_ms: int) -> Told:
    told = {"object": object_id, "state": "COMMITTED", "size": size, "timestamp_ms": now_ms}
    return {"type": "S3Object", **told}


def _destroyed(record: ours.ObjectsDestroyed, context: Context) -> Iterator[Told]:
    for object_id in record.object_id.tolist():
        yield {"type": "S3Object", "object": object_id, "state": "MARK_DESTROYED"}
        yield from _let_go(object_id, context)


def _let_go(object_id: int, context: Context) -> Iterator[Told]:
    item = context.before.objects.get(object_id)
    if item is None or item.state is not ObjectState.COMMITTED:
        return
    if item.kind is ObjectKind.STREAM_SET:
        yield {"type": "RemoveStreamSetObject", "object": object_id}
    elif context.op != "delete_stream":
        yield {"type": "RemoveS3StreamObject", "object": object_id}


def _linked(record: ours.ObjectsLinked, context: Context) -> Iterator[Told]:
    for object_id in record.object_id.tolist():
        item = context.before.objects.get(object_id)
        if item is not None and item.state is not ObjectState.LINKED:
            yield {"type": "RemoveS3Object", "object": object_id}
            yield from _let_go(object_id, context)


def _end_offsets(records: Sequence[ours.Record], context: Context) -> Iterator[Told]:
    """Yield the one record of new ends an upload has, if it moves any."""
    for record in records:
        if isinstance(record, ours.StreamSetObjectsCommitted):
            node_id, stream_ids = record.node_id, record.ranges.stream_id.tolist()
        elif isinstance(record, ours.StreamObjectsCommitted):
            node_id, stream_ids = -1, record.stream_id.tolist()
        else:
            continue
        for stream_id in stream_ids:
            stream = context.before.streams.get(stream_id)
            if stream is None or node_id not in (-1, stream.node_id):
                continue
            owed = context.pending.get(stream.node_id, {}).get(stream_id)
            if owed is None or max(stream.start_offset, owed[0]) >= owed[1]:
                yield {"type": "S3StreamEndOffsets"}
                return


_SPELLED: dict[type, Callable[[Any, Context], Iterable[Told]]] = {
    ours.StreamsCreated: _created,
    ours.StreamsOpened: _opened,
    ours.StreamsReopened: _reopened,
    ours.StreamsClosed: _closed,
    ours.StreamsTrimmed: _trimmed,
    ours.RangesRemoved: _rows("RemoveRange", stream="stream_id", index="range_index"),
    ours.StreamsDeleted: _rows("RemoveS3Stream", stream="stream_id"),
    ours.ObjectsPrepared: _prepared,
    ours.StreamSetObjectsCommitted: _set_objects,
    ours.StreamObjectsCommitted: _stream_objects,
    ours.ObjectsDestroyed: _destroyed,
    ours.ObjectsLinked: _linked,
    ours.ObjectsRemoved: _rows("RemoveS3Object", object="object_id"),
    ours.PendingUploadsSet: lambda record, _: [
        {"type": "NodeWALUncommittedOffsets", "node": record.node_id}
    ],
    ours.NodeEpochSet: lambda record, _: [{"type": "NodeWALMetadata", "node": record.node_id}],
    ours.NodeRegistered: lambda *_: [{"type": "KV"}],
    ours.KVsPut: lambda record, _: [{"type": "KV", "keys": list(record.keys)}],
    ours.KVsDeleted: lambda record, _: [{"type": "RemoveKV", "keys": list(record.keys)}],
}
