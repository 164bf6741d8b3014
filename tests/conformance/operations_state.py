"""Operations that put a state in place: foreign records, streams and keys by hand, bare ranges."""

from __future__ import annotations

from typing import Any

from streammeta.controller.metadata.api.requests import OpenStreams, StreamToOpen
from streammeta.controller.metadata.tables.values import StreamState
from streammeta.controller.records.codec import RecordCodecError
from streammeta.controller.records.record import RangesRemoved
from tests.conformance.foreign_records import ForeignRecords, node_records
from tests.conformance.live_controller import LiveController
from tests.conformance.map_rows import MetadataRows
from tests.conformance.scenario_args import Args
from tests.conformance.scenario_run import SERVICE, Outcome, ScenarioRun


async def inject_records(run: ScenarioRun, args: Args) -> Outcome:
    """Replay records; one that the log refuses raises as a malformed argument would."""
    try:
        run.foreign.replay(args.take("records"))
    except RecordCodecError as error:
        return Outcome({"raises": "IllegalArgument", "error": str(error)})
    return Outcome({"error": "NONE"})


async def set_state(run: ScenarioRun, args: Args) -> Outcome:
    with run.live.edited() as rows:
        for item in args.each("streams", []):
            _set_stream(rows, item)
        for stream_id in args.take("removed_streams", []) or []:
            for section in ("streams", "stream_tags", "ranges"):
                rows.drop(section, stream_id=stream_id)
        for item in args.take("kv_keys", []) or []:
            named = item if isinstance(item, dict) else {"key": item}
            key = {"namespace": named.get("namespace") or "", "key": named["key"]}
            rows.put("kvs", key, value=str(named.get("value", "")).encode(), version=1)
        for key in args.take("removed_kv_keys", []) or []:
            rows.drop("kvs", namespace="", key=key)
    return Outcome({"error": "NONE"})


def _set_stream(rows: MetadataRows, item: Args) -> None:
    stream_id, start = item.take("stream"), item.take("start", 0)
    rows.put(
        "streams",
        {"stream_id": stream_id},
        epoch=item.take("epoch", 0),
        range_index=-1,
        start_offset=start,
        end_offset=item.take("end", start),
        state=int(StreamState[item.take("state", "CLOSED")]),
    )
    rows.drop("stream_tags", stream_id=stream_id)
    for key, value in sorted((item.take("tags", {}) or {}).items()):
        rows.put("stream_tags", {"stream_id": stream_id, "key": str(key)}, value=str(value))
    counters = rows.counters
    counters["next_stream_id"] = max(counters["next_stream_id"], stream_id + 1)


async def removable_ranges(run: ScenarioRun, args: Args) -> Outcome:
    """Ask which ranges opening a stream would drop, of a stream made up on the side."""
    ranges, current = list(args.take("ranges")), args.take("current_range_index", None)
    objects = list(args.take("stream_objects", []) or [])
    generated = args.take("stream_objects_generated", None)
    if generated:
        step = generated["step"]
        objects += [
            {"object": i, "start": step * i, "end": step * (i + 1)}
            for i in range(generated["count"])
        ]
    last = max(item["index"] for item in ranges)
    epoch = max(item["epoch"] for item in ranges)
    live = LiveController(run.clock)
    start = min((item["start"] for item in [*ranges, *objects]), default=0)
    records: list[dict[str, Any]] = [
        *node_records(SERVICE.node_id, -1, ()),
        {
            "type": "S3Stream",
            "stream": 0,
            "epoch": epoch,
            "range_index": last if current is None else current,
            "start": start,
        },
        *({"type": "Range", "stream": 0, **item} for item in ranges),
        *({"type": "S3StreamObject", "stream": 0, **item} for item in objects),
    ]
    ForeignRecords(live).replay(records)
    item = StreamToOpen(0, epoch + 1)
    _, decided = live.judge(OpenStreams(node=SERVICE, streams=(item,)))
    removed = [
        index
        for record in decided
        if isinstance(record, RangesRemoved)
        for index in record.range_index.tolist()
    ]
    return Outcome({"removable": removed})
