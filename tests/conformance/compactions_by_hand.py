"""Puts a compaction in place that the controller refuses, for the sake of the steps after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from streammeta.controller.metadata.requests import CommitStreamObject, CommitStreamSetObject
from streammeta.controller.metadata.values import SourceOperation
from tests.conformance.compaction_facts import Before
from tests.conformance.scenario_run import ScenarioRun

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
    return (
        _committed(run, object_id, size, attributes),
        {"type": "S3StreamObject", **held},
    )


def _committed(run: ScenarioRun, object_id: int, size: int, attributes: int) -> Told:
    values = {"size": size, "attributes": attributes, "timestamp": run.clock.now_ms}
    return {"type": "S3Object", "object": object_id, "state": "COMMITTED", **values}


def _destroyed(run: ScenarioRun, before: Before, object_id: int) -> Iterator[Told]:
    item = before.objects[object_id]
    values = {"size": item.object_size, "attributes": item.attributes}
    marked = {"state": "MARK_DESTROYED", "timestamp": run.clock.now_ms, **values}
    yield {"type": "RemoveStreamSetObject", "object": object_id}
    yield {"type": "S3Object", "object": object_id, **marked}
