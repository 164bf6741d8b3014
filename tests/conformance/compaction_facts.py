"""Compactions looked at from outside, and put in place where the controller refuses them.

Worked out from the state before the request and nothing else, so that a difference on purpose can
be told from a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streammeta.controller.metadata.api.answers import ObjectDescription, StreamDescription
from streammeta.controller.metadata.api.requests import CommitStreamObject, CommitStreamSetObject
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState, SourceOperation
from tests.conformance.scenario_run import ScenarioRun

Spans = dict[int, list[tuple[int, int]]]
"""Offsets by stream id."""


@dataclass(frozen=True, slots=True)
class Before:
    """The map before a request."""

    streams: Mapping[int, StreamDescription]
    objects: Mapping[int, ObjectDescription]

    def is_committed(self, object_id: int) -> bool:
        item = self.objects.get(object_id)
        return item is not None and item.state is ObjectState.COMMITTED


def spans_of(item: ObjectDescription) -> Spans:
    found: Spans = {}
    columns = (item.ranges.stream_id, item.ranges.start_offset, item.ranges.end_offset)
    for stream_id, start, end in zip(*(values.tolist() for values in columns), strict=True):
        found.setdefault(stream_id, []).append((start, end))
    return found


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted spans, those that touch or overlap joined."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def is_inside(part: tuple[int, int], whole: Sequence[tuple[int, int]]) -> bool:
    """Whether one of `whole` contains the part."""
    return any(start <= part[0] and part[1] <= end for start, end in whole)


def fits(before: Before, sources: Iterable[int], outputs: Spans) -> bool:
    """Whether outputs hold the live parts of the sources and, of live offsets, nothing else."""
    held: Spans = {}
    for object_id in sources:
        for stream_id, spans in spans_of(before.objects[object_id]).items():
            held.setdefault(stream_id, []).extend(spans)
    for stream_id, stream in before.streams.items():
        low = stream.start_offset
        have, made = merged(held.get(stream_id, [])), outputs.get(stream_id, [])
        live = [(max(start, low), end) for start, end in have if end > low]
        allowed = merged([*have, *([(0, low)] if low else [])])
        if any(end > low and not is_inside((start, end), allowed) for start, end in made):
            return False
        if any(not is_inside(part, merged(made)) for part in live):
            return False
    return True


def set_object_features(
    before: Before, node_id: int, object_id: int, sources: Sequence[int], outputs: Spans
) -> list[str]:
    if not all(before.is_committed(source) for source in sources):
        return []
    ours = (
        before.objects[source].kind is ObjectKind.STREAM_SET
        and before.objects[source].node_id == node_id
        for source in sources
    )
    if not all(ours) or object_id in sources or len(set(sources)) < len(sources):
        return ["foreign-source"]
    return [] if fits(before, sources, outputs) else ["outputs-do-not-cover"]


def stream_object_features(
    before: Before, stream_id: int, sources: Sequence[int], outputs: Spans
) -> list[str]:
    if stream_id not in before.streams:
        return ["stream-of-compaction-missing"]
    present = [source for source in sources if source in before.objects]
    if len(present) < len(sources):
        return []
    committed = [source for source in sources if before.is_committed(source)]
    prepared = ObjectState.PREPARED
    if any(
        before.objects[source].state not in (ObjectState.COMMITTED, prepared) for source in sources
    ):
        return []
    kinds = (ObjectKind.STREAM, ObjectKind.COMPOSITE)
    for source in committed:
        item = before.objects[source]
        if item.kind not in kinds or set(spans_of(item)) - {stream_id}:
            return ["foreign-source"]
    own = Before({stream_id: before.streams[stream_id]}, before.objects)
    return [] if fits(own, committed, outputs) else ["outputs-do-not-cover"]


def malformed_rows(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether rows name a stream twice, or hold an empty or negative range."""
    streams: set[int] = set()
    for row in rows:
        if row["stream"] in streams or not 0 <= row["start"] < row["end"]:
            return True
        streams.add(row["stream"])
    return False


Told = Mapping[str, Any]


def put_set_compaction(run: ScenarioRun, request: CommitStreamSetObject, before: Before) -> None:
    """Commit the outputs and destroy the sources, as the scenario's records would."""
    sources = request.compacted_object_ids.tolist()
    records = [told for item in sources for told in _destroyed(run, before, item)]
    if request.object_id >= 0:
        ranges = request.ranges
        columns = (ranges.stream_id, ranges.start_offset, ranges.end_offset)
        rows = [
            {"stream": stream_id, "start": start, "end": end}
            for stream_id, start, end in zip(*(c.tolist() for c in columns), strict=True)
        ]
        size, attributes = request.object_size, request.attributes
        records.append(_committed(run, request.object_id, size, attributes))
        records.append(
            {
                "type": "S3StreamSetObject",
                "object": request.object_id,
                "node": request.node.node_id,
                "order": request.order_id,
                "ranges": rows,
                "data_time_ms": min(before.objects[item].data_time_ms for item in sources),
            }
        )
    others = request.stream_objects
    names = (others.object_id, others.object_size, others.attributes, others.stream_id)
    offsets = (others.start_offset, others.end_offset)
    for cells in zip(*(c.tolist() for c in (*names, *offsets)), strict=True):
        records += _stream_object(run, before, *cells)
    run.foreign.replay(records)


def put_merge(run: ScenarioRun, request: CommitStreamObject, before: Before) -> None:
    """Commit the result and let the sources go, as the scenario's records would."""
    sources = request.source_object_ids.tolist()
    operations = request.operations or (SourceOperation.DELETE,) * len(sources)
    records: list[Told] = []
    for object_id, operation in zip(sources, operations, strict=True):
        if operation is SourceOperation.KEEP_DATA:
            records.append({"type": "RemoveS3Object", "object": object_id})
        else:
            records += _destroyed(run, before, object_id)
    if request.object_id >= 0:
        span = (request.start_offset, request.end_offset)
        described = (request.object_id, request.object_size, request.attributes)
        records += _stream_object(run, before, *described, request.stream_id, *span)
    run.foreign.replay(records)


def _stream_object(
    run: ScenarioRun,
    before: Before,
    object_id: int,
    size: int,
    attributes: int,
    stream_id: int,
    start: int,
    end: int,
) -> Iterable[Told]:
    if stream_id not in before.streams:
        return _destroyed(run, before, object_id)
    held = {"object": object_id, "stream": stream_id, "start": start, "end": end}
    return (_committed(run, object_id, size, attributes), {"type": "S3StreamObject", **held})


def _committed(run: ScenarioRun, object_id: int, size: int, attributes: int) -> Told:
    values = {"size": size, "attributes": attributes, "timestamp": run.clock.now_ms}
    return {"type": "S3Object", "object": object_id, "state": "COMMITTED", **values}


def _destroyed(run: ScenarioRun, before: Before, object_id: int) -> Iterator[Told]:
    item = before.objects[object_id]
    values = {"size": item.object_size, "attributes": item.attributes}
    marked = {"state": "MARK_DESTROYED", "timestamp": run.clock.now_ms, **values}
    yield {"type": "RemoveStreamSetObject", "object": object_id}
    yield {"type": "S3Object", "object": object_id, **marked}
