"""Operations on streams: create, open, close, trim, delete, describe, list what is open.

Each turns arguments into a request and the answer into the scenarios' words; errors are the
controller's. A stream's recorded end is noted where its current range would be written anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import StreamDescription
from streammeta.controller.metadata.tables.values import StreamState, Tags
from tests.conformance.scenario_args import Args
from tests.conformance.scenario_run import PAGE, SERVICE, Outcome, ScenarioRun, error_name

TOPIC_TAG = "0"
PARTITION_TAG = "1"
NO_TOPIC = "A" * 22
FAST_CLOSE_LEVEL = 6


async def get_opening_streams(run: ScenarioRun, args: Args) -> Outcome:
    """Register the node's epoch and list what it has to take care of."""
    node = run.node(args.take("node"), args.take("node_epoch", 0))
    failover = bool(args.take("failover", False))
    known = (await run.nodes()).get(node.node_id)
    same = known is not None and (known.node_epoch, known.failover) == (node.node_epoch, failover)
    stored = known.node_epoch if known is not None else -1
    features = ["registries-are-one"] if run.is_behind_other_registry("open", node, stored) else []
    request = requests.GetOpeningStreams(node=node, failover=failover, page=PAGE)
    answer, records = await run.send(request)
    listed, last = list(answer.streams), answer
    while last.next_page_token:
        page = replace(PAGE, page_token=last.next_page_token)
        last, _ = await run.send(replace(request, page=page))
        listed.extend(last.streams)
    streams = [
        {
            "stream": item.stream_id,
            "epoch": item.epoch,
            "start_offset": item.start_offset,
            "end_offset": item.end_offset,
        }
        for item in listed
    ]
    found = {"error": error_name(answer.error), "streams": streams}
    is_repeat = same and found["error"] == "NONE" and not run.dry_run
    features += ["node-registered-already"] if is_repeat else []
    return Outcome(found, features, records)


async def create_stream(run: ScenarioRun, args: Args) -> Outcome:
    request = requests.CreateStreams(
        request_id=run.request_id(),
        node=_node(run, args),
        streams=(requests.NewStream(_tags(args)),),
    )
    answer, records = await run.send(request)
    found: dict[str, Any] = {"error": error_name(answer.error)}
    if answer.stream_ids:
        found["stream_id"] = answer.stream_ids[0]
    return Outcome(found, records=records)


async def open_stream(run: ScenarioRun, args: Args) -> Outcome:
    node, stream_id, epoch = _node(run, args), args.take("stream"), args.take("epoch")
    item = requests.StreamToOpen(stream_id, epoch, _tags(args))
    before = (await run.streams()).get(stream_id)
    run.is_malformed = epoch < 0
    answer, records = await run.send(requests.OpenStreams(node=node, streams=(item,)))
    (opened,) = answer.streams
    if not run.dry_run and error_name(opened.error) == "NONE" and before and before.epoch < epoch:
        run.foreign.recorded_ends[stream_id] = before.end_offset
    return Outcome(
        {
            "error": error_name(opened.error),
            "start_offset": opened.start_offset,
            "next_offset": opened.next_offset,
        },
        records=records,
    )


async def close_stream(run: ScenarioRun, args: Args) -> Outcome:
    """Close one stream; below the level of fast close that is judged only, not carried out."""
    node, stream_id, epoch = _node(run, args), args.take("stream"), args.take("epoch")
    end_offset = args.take("end_offset", -1)
    is_fast = end_offset is not None and end_offset >= 0
    is_too_old = is_fast and run.level < FAST_CLOSE_LEVEL
    item = requests.StreamToClose(stream_id, epoch, end_offset if is_fast else None)
    run.is_malformed = epoch < 0
    request = requests.CloseStreams(node=node, streams=(item,))
    answer, records = await run.send(request, judged=is_too_old)
    found = {"error": error_name(answer.errors[0])}
    if is_fast and found["error"] == "NONE" and not (run.dry_run or is_too_old):
        run.foreign.recorded_ends[stream_id] = end_offset
    return Outcome(found, ["feature-level"] if is_too_old else [], records)


async def trim_stream(run: ScenarioRun, args: Args) -> Outcome:
    node, stream_id, epoch = _node(run, args), args.take("stream"), args.take("epoch")
    item = requests.StreamToTrim(stream_id, epoch, args.take("new_start_offset"))
    before = (await run.streams()).get(stream_id)
    run.is_malformed = epoch < 0 or item.new_start_offset < 0
    answer, records = await run.send(requests.TrimStreams(node=node, streams=(item,)))
    found = {"error": error_name(answer.errors[0])}
    if found["error"] == "NONE" and before is not None and not run.dry_run:
        current = next((r for r in before.ranges if r.range_index == before.range_index), None)
        if current is not None and item.new_start_offset > current.start_offset:
            end = max(item.new_start_offset, before.end_offset)
            run.foreign.recorded_ends[stream_id] = end
    return Outcome(found, records=records)


async def delete_stream(run: ScenarioRun, args: Args) -> Outcome:
    """Delete one stream in the runner's name and under the stream's present epoch."""
    stream_id = args.take("stream")
    for unchecked in ("epoch", "node", "node_epoch"):
        args.take(unchecked, None)
    item = requests.StreamToDelete(stream_id, await run.current_epoch(stream_id))
    answer, records = await run.send(requests.DeleteStreams(node=SERVICE, streams=(item,)))
    return Outcome({"error": error_name(answer.errors[0])}, records=records)


async def describe_streams(run: ScenarioRun, args: Args) -> Outcome:
    """Describe streams by id, by owner or by topic; the first that is given counts."""
    stream_id, node_id = args.take("stream", -1), args.take("node", -1)
    topics = args.take("topic_partitions", None)
    if stream_id < 0 and node_id < 0 and not topics:
        return Outcome({"error": "INVALID_REQUEST", "streams": []})
    found = []
    for stream in (await run.streams()).values():
        described = describe(run, stream)
        if stream_id >= 0:
            wanted = stream.stream_id == stream_id
        elif node_id >= 0:
            wanted = stream.node_id == node_id
        else:
            wanted = any(_is_of(run, described, topic) for topic in topics)
        if wanted:
            found.append(described)
    by_topic = stream_id < 0 and node_id < 0
    return Outcome({"error": "NONE", "streams": found}, ["topics"] if by_topic else [])


def describe(run: ScenarioRun, stream: StreamDescription) -> dict[str, Any]:
    tags = dict(stream.tags)
    topic_id = tags.get(TOPIC_TAG, NO_TOPIC)
    names = {known: name for name, known in run.topics.items()}
    is_opened_ever = stream.node_id >= 0
    return {
        "stream": stream.stream_id,
        "node": stream.node_id,
        "state": StreamState(stream.state).name,
        "epoch": stream.epoch,
        "start_offset": stream.start_offset,
        "end_offset": stream.end_offset if is_opened_ever else -1,
        "topic_id": topic_id,
        "topic_name": names.get(topic_id, ""),
        "partition_index": int(tags[PARTITION_TAG], 16) if PARTITION_TAG in tags else -1,
        "tags": tags,
    }


def _is_of(run: ScenarioRun, described: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    partitions = wanted.get("partitions") or []
    of_topic = described["topic_id"] == run.topics.get(wanted.get("topic", ""), "")
    return of_topic and (not partitions or described["partition_index"] in partitions)


def _node(run: ScenarioRun, args: Args) -> Any:
    return run.node(args.take("node"), args.take("node_epoch", 0))


def _tags(args: Args) -> Tags:
    return tuple((str(key), str(value)) for key, value in (args.take("tags", {}) or {}).items())
