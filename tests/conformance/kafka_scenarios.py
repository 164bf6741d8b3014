"""Scenarios about partitions of Kafka's shape: batches, values of the map, producers, segments.

What a scenario is follows from its name. Bytes are compared with those of `streammeta.brokers`;
logs run on streams in memory. What is not offered says so, and counts neither way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from streammeta.brokers.partition.errors import (
    InvalidProducerEpochError,
    MetaStreamClosedError,
    OutOfOrderSequenceError,
    SegmentError,
)
from streammeta.brokers.partition.leader_epochs import LeaderEpochs
from streammeta.brokers.partition.log import PartitionLog
from streammeta.brokers.partition.meta_map import MetaMap, PartitionState, encode_entry
from streammeta.brokers.partition.meta_stream import MetaStream
from streammeta.brokers.partition.opening import create_meta_stream, open_log
from streammeta.brokers.partition.producer_state import (
    ProducerStates,
    sequence_after,
)
from streammeta.brokers.partition.record_batch import read_batches, rebased
from streammeta.brokers.partition.segments import Segment, decode_log, rolled
from streammeta.brokers.partition.time_index import encode_entries, lookup
from streammeta.brokers.partition.time_search import offset_by_time
from streammeta.storage.inspection.kafka_batch import decode_kafka_records
from tests.conformance.automq_log_scenarios import AUTOMQ_LOG_CHECKS
from tests.conformance.conformance_report import Mismatch, ScenarioResult, compare
from tests.conformance.scenario_args import Args, run_entry
from tests.kit.kafka_batches import Rec, make_batch, sequenced
from tests.kit.memory_streams import MemoryStreams

_NOT_OFFERED = (
    "wal_recover_over_epochs",
    "wal_read_skips_",
    "failover_context_",
    "remote_segment_",
    "txn_index_",
    "wire_",
    "log_aborted_transactions_",
    "log_streams_open_together",
    "log_non_active_segments",
    "meta_stream_bad_handoff_",
    "producer_epoch_bumped_by_marker",
    "producer_first_unstable_",
    "producer_coordinator_fencing",
    "producer_snapshots_trimmed",
    "producer_reload_range",
    "segment_recovers_txn_",
    "segment_read_positions",
    "records_with_gaps",
    "producer_snapshot_merges_",
)
"""Beginnings of names: transactions, compaction of logs, snapshots of which several are kept,
AutoMQ's running write-ahead log and hand-over, KIP-405, messages that a library encodes."""


def is_kafka(content: Mapping[str, Any]) -> bool:
    """Whether a file is about partitions of Kafka's shape."""
    return "record_batch_v2" in (content.get("layout") or {})


def run_kafka(file: str, content: Mapping[str, Any]) -> Iterator[ScenarioResult]:
    """Run all scenarios of a file."""
    scenarios = {one["name"]: one for one in content["scenarios"]}
    for name, scenario in scenarios.items():
        if name.startswith(_NOT_OFFERED):
            result = ScenarioResult(file, name, is_counted=False)
            result.deviate(0, "kafka", "kafka-not-offered")
            yield result
            continue

        def check(args: Args, _: ScenarioResult, name: str = name) -> Iterator[Mismatch]:
            found = [prefix for prefix in _CHECKS if name.startswith(prefix)]
            if not found:
                args.names()
                yield Mismatch("name", "a scenario that is known", name)
                return
            given = args.take("steps" if args.has("steps") else "input")
            facts = _CHECKS[max(found, key=len)](given, scenarios)
            expect, derived = args.take("expect", {}), args.take("derived", {})
            yield from compare(expect or derived, facts, "expect")

        yield run_entry(file, scenario, "kafka", check)


def _bytes(value: Any) -> bytes | None:
    return None if value is None else str(value).encode()


def _batch(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    records = [
        Rec(
            one["timestamp"],
            _bytes(one["key"]),
            _bytes(one["value"]),
            [(name, value.encode()) for name, value in one.get("headers", ())],
        )
        for one in given["records"]
    ]
    raw = make_batch(
        records,
        producer_id=given.get("producer_id", -1),
        producer_epoch=given.get("producer_epoch", -1),
        base_sequence=given.get("base_sequence", -1),
    )
    raw = rebased(raw, given["base_offset"], given["leader_epoch"])
    (batch,) = read_batches(raw)
    found = [
        Rec(one.timestamp, one.key, one.value, one.headers) for one in decode_kafka_records(batch)
    ]
    same = [Rec(one.timestamp, one.key, one.value, tuple(one.headers)) for one in records]
    return {"hex": raw.hex() if found == same else found, "size": batch.size, "checked": "class"}


def _abort_marker(given: Mapping[str, Any], scenarios: Mapping[str, Any]) -> Mapping[str, Any]:
    wanted = scenarios["record_batch_abort_marker"]["derived"]["hex"]
    (batch,) = read_batches(bytes.fromhex(wanted))
    found = {
        "base_offset": batch.base_offset,
        "leader_epoch": batch.partition_leader_epoch,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
        "timestamp": batch.max_timestamp,
    }
    is_read = batch.is_control and batch.is_intact and found.items() <= given.items()
    return {"hex": wanted if is_read else found, "checked": "class"}


def _rebase(given: Mapping[str, Any], scenarios: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = bytes.fromhex(scenarios[given["batch"]]["derived"]["hex"])
    patched = rebased(raw, given["new_base_offset"], given["new_leader_epoch"])
    return {"hex": patched.hex(), "checked": "encoder"}


def _partition_record(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    state = PartitionState(
        given["start"], given["cleaner"], given["recover"], given["clean_shutdown"]
    )
    raw = encode_entry(given["key"], state.encode())
    return {"json": state.encode().decode(), "hex": raw.hex(), "checked": "class"}


def _log_value(given: Mapping[str, Any], scenarios: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a value of slices; those written here have the offsets of the log itself."""
    text = scenarios["meta_stream_log_value"]["derived"]["json"]
    streams, segments = decode_log(json.loads(text))
    found = [
        (one.base_offset, one.created_ms, one.modified_ms, one.size, one.end_offset)
        for one in segments
    ]
    wanted = [
        (one["base"], one["created"], one["modified"], one["size"], one["log"][1])
        for one in given["segments"]
    ]
    is_read = streams == given["streams"] and found == wanted
    return {"json": text if is_read else found, "checked": "class"}


def _epochs_value(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    entries = [(epoch, start) for epoch, start in given["entries"]]
    return {"hex": LeaderEpochs(entries).encode().hex(), "checked": "class"}


def _snapshot(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    states = ProducerStates()
    first, last = given["offsets"]
    raw = sequenced(
        given["producer_id"], given["epoch"], given["sequences"][0], last - first + 1,
        time=given["timestamp"],
    )  # fmt: skip
    (batch,) = read_batches(raw)
    states.record(batch, first)
    return {"hex": states.snapshot().hex(), "checked": "class"}


def _time_bytes(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    entries = [(time, offset) for time, offset in given["entries"]]
    return {"hex": encode_entries(entries, given["base_offset"]).hex(), "checked": "class"}


def _time_lookup(given: Mapping[str, Any], _: object) -> list[Any]:
    base = given["base"]
    entries = [(10 * at, base + 10 * at) for at in range(1, 30)]
    empty, *others = given["lookup"]
    first = int(str(empty).split()[0])
    return [list(lookup([], first, base)), *(list(lookup(entries, at, base)) for at in others)]


async def _meta(streams: MemoryStreams) -> MetaStream:
    (stream_id,) = await streams.create_streams([{}])
    await streams.open_streams({stream_id: 0})
    return await MetaStream.replay(streams, stream_id, 0, 0)


async def _frozen(given: list[str], _: object) -> list[str]:
    meta = await _meta(MemoryStreams())
    calls: Mapping[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "close": meta.close,
        "append": lambda: meta.put({"A": b""}),
        "trim": meta.compact,
    }
    outcomes = []
    for one in given:
        try:
            await calls[one]()
            outcomes.append("ok")
        except MetaStreamClosedError:
            outcomes.append("error")
    return outcomes


def _keeps_latest(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    found = MetaMap()
    for offset, (key, value) in enumerate(given["appends"]):
        # Values of the scenario are no real ones: keys that are not decoded stand for them.
        found.apply(offset, encode_entry(f"test.{key}", bytes.fromhex(str(value))))
    kept = sorted(found.live.values(), key=lambda one: one[0])
    return {
        "end": found.end_offset,
        "kept": [[at, one.key.removeprefix("test."), one.raw.hex()] for at, one in kept],
    }


async def _compaction(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    streams = MemoryStreams()
    meta = await _meta(streams)
    for item in given["stream"]:
        if isinstance(item, list):
            await meta.put({item[0]: bytes.fromhex(str(item[1]))})
    await meta.close()
    stream = streams.table.streams[0]
    inside = [one for one in stream.records if 2 <= one.base_offset < 4]
    return {"next_offset": stream.end, f"records_in_{stream.start}_to_{stream.end}": len(inside)}


async def _log(streams: MemoryStreams | None = None) -> PartitionLog:
    streams = streams or MemoryStreams()
    meta_id = await create_meta_stream(streams, "topic", 0)
    return await open_log(streams, meta_id, 0, {})


async def _append(log: PartitionLog, *records: Rec) -> None:
    await (await log.append(make_batch(records))).durable


def _partition_value(streams: MemoryStreams, log: PartitionLog) -> Mapping[str, Any]:
    found = MetaMap()
    for one in streams.table.streams[log.stream_ids[0]].records:
        found.apply(one.base_offset, one.payload)
    partition = found.entry("PARTITION")
    assert partition is not None
    assert isinstance(partition.value, Mapping)
    return {**partition.value, "keys": found.live.keys()}


async def _append_and_read(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    streams = MemoryStreams()
    log = await _log(streams)
    before = [*read_batches(data)] if (data := await log.read(0, 1000)) else []
    for key, value in given["records"]:
        await _append(log, Rec(1, _bytes(key), _bytes(value)))
    batches = read_batches(await log.read(0, 1000))
    records = [one for batch in batches for one in decode_kafka_records(batch)]
    return {
        "end": log.high_watermark,
        "recovery_point": _partition_value(streams, log)["r"],
        "read": [[(one.key or b"").decode(), (one.value or b"").decode()] for one in records],
        "read_before": before,
    }


async def _roll_empty(given: list[str], _: object) -> Mapping[str, Any]:
    log = await _log()
    counts, bases = [], []
    for one in given:
        if "append" in one:
            await _append(log, Rec(1))
        await log.roll()
        counts.append(len(log.segments))
        bases.append(log.segments[-1].base_offset)
    return {"segments": counts, "new_base": bases}


def _roll_below(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    segments = rolled([Segment(base_offset=0, created_ms=1)], given["appended"], 0, 1)
    try:
        rolled(segments, given["end_set_to"], 0, 1)
    except SegmentError:
        return {"roll": "error"}
    return {"roll": "ok"}


async def _closes_clean(_: object, __: object) -> Mapping[str, Any]:
    streams = MemoryStreams()
    log = await _log(streams)
    await log.close()
    value = _partition_value(streams, log)
    keys = [key for key in ("LOG", "PARTITION") if key in value["keys"]]
    return {"meta_keys": keys, "clean_shutdown": value["cs"]}


async def _offset_by_time(given: Mapping[str, Any], _: object) -> list[int | None]:
    log = await _log()
    base = given["base"]
    for _at in range(base):
        await _append(log, Rec(0))
    await log.trim(base)
    for offset in range(base, base + 10):
        await _append(log, Rec(10 * offset))
    found = [await offset_by_time(log, time) for time in given["search"]]
    return [None if one is None else one[1] for one in found]


def _epochs_rebuilt(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    epochs = LeaderEpochs()
    for base, epoch in given["batches"]:
        epochs.assign(epoch, base)
    return {"epochs": [list(one) for one in epochs.entries]}


async def _read_across(given: Mapping[str, Any], _: object) -> Mapping[str, Any]:
    streams = MemoryStreams()
    log = await _log(streams)
    for _at in range(3):
        await _append(log, *[Rec(1)] * 50)
    reader = await open_log(MemoryStreams(streams.table), log.stream_ids[0], 1, {})
    start, end = given["read"]
    asked, count = [], 0
    while start < end:
        asked.append(start)
        for batch in read_batches(await reader.read(start, 1)):
            count += batch.record_count
            start = batch.last_offset + 1
    return {"records": count, "stream_fetch_offsets": asked}


def _sequence_rules(given: list[list[str]], _: object) -> list[str]:
    states, outcomes = ProducerStates(), []
    for step in given:
        epoch, sequence = (int(words.split()[1]) for words in step)
        (batch,) = read_batches(sequenced(7, epoch, sequence))
        try:
            states.check(7, epoch, sequence)
            states.record(batch, states.map_end)
            outcomes.append("ok")
        except OutOfOrderSequenceError:
            outcomes.append("OutOfOrderSequence")
        except InvalidProducerEpochError:
            outcomes.append("InvalidProducerEpoch")
    return outcomes


def _sequence_wraps(given: list[Mapping[str, Any]], _: object) -> list[str]:
    outcomes = []
    for one in given:
        if "batch" in one:
            first, last = one["batch"]
            (batch,) = read_batches(sequenced(7, 0, first, (last - first) % 2**31 + 1))
            outcomes.append(f"ok: first {batch.base_sequence}, last {batch.last_sequence}")
        else:
            is_next = sequence_after(one["last"]) == one["next"]
            outcomes.append("ok" if is_next else "OutOfOrderSequence")
    return outcomes


def _run(check: Callable[[Any, Any], Coroutine[Any, Any, Any]]) -> Callable[[Any, Any], Any]:
    return lambda given, scenarios: asyncio.run(check(given, scenarios))


_CHECKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "record_batch_": _batch,
    "record_batch_abort_marker": _abort_marker,
    "record_batch_rebase": _rebase,
    "meta_stream_partition_record": _partition_record,
    "meta_stream_log_value": _log_value,
    "meta_stream_leader_epochs_value": _epochs_value,
    "meta_stream_frozen": _run(_frozen),
    "meta_stream_keeps_latest": _keeps_latest,
    "meta_stream_compaction": _run(_compaction),
    "producer_snapshot_one": _snapshot,
    "producer_sequence_rules": _sequence_rules,
    "producer_sequence_wraps": _sequence_wraps,
    "time_index_bytes": _time_bytes,
    "time_index_lookup": _time_lookup,
    "log_append_and_read": _run(_append_and_read),
    "log_roll_empty_segment": _run(_roll_empty),
    "log_roll_below_active_base": _roll_below,
    "log_close_is_clean": _run(_closes_clean),
    "segment_offset_by_time": _run(_offset_by_time),
    "segment_recovers_epochs": _epochs_rebuilt,
    "records_read_across_batches": _run(_read_across),
    **AUTOMQ_LOG_CHECKS,
}
"""Checks by the beginning of a name; the longest that fits counts."""
