"""Shapes of the bytes and values of a partition: batches, values of its map, index entries."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from streammeta.brokers.partition.meta_map import PartitionState, encode_entry, encode_snapshots
from streammeta.brokers.partition.producer_state import ProducerStates
from streammeta.brokers.partition.record_batch import read_batches, rebased
from streammeta.brokers.partition.segments import Segment, decode_log, encode_log
from streammeta.brokers.partition.state import LeaderEpochs, decode_entries, encode_entries, lookup
from streammeta.storage.inspection.kafka_batch import KafkaBatch, decode_kafka_records
from tests.conformance.shape_facts import AnyOf, Words
from tests.conformance.shape_sentences import range_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape
from tests.conformance.shape_worlds import NotOfferedError
from tests.kit.kafka_batches import Rec, make_batch, sequenced

_CONTROL = {"ABORT": 0, "COMMIT": 1}
_CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def text_bytes(value: Any) -> bytes | None:
    return None if value is None else str(value).encode()


# ---- batches ----


def _records(given: Given) -> list[Rec]:
    found = []
    for clause in given.each("records", []):
        headers = [(name, text_bytes(value)) for name, value in clause.take("headers", None) or ()]
        stamp = clause.first("timestamp", "time", default=0)
        found.append(
            Rec(
                stamp,
                text_bytes(clause.take("key", None)),
                text_bytes(clause.take("value", None)),
                headers,
            )
        )
    return found


def _attributes(given: Given) -> int:
    codec = _CODECS[str(given.first("compression", "codec", default="none")).lower()]
    flags = {"log_append_time": 8, "transactional": 16, "control": 32}
    found = given.take("attributes", None)
    bits = codec | sum(bit for name, bit in flags.items() if given.take(name, False))
    return bits if found is None else found | bits


def _batch(given: Given) -> Any:
    records, attributes = _records(given), _attributes(given)
    given.take("producer", None)
    producer = (
        given.take("producer_id", -1),
        given.take("producer_epoch", -1),
        given.take("base_sequence", -1),
    )
    base, epoch = (
        given.take("base_offset", 0),
        given.first("leader_epoch", "partition_leader_epoch", default=-1),
    )
    wanted = {
        "base_offset": base,
        "partition_leader_epoch": epoch,
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "base_sequence": producer[2],
    }
    stated = given.stated.get("hex")
    if given.has("type"):
        return _control_batch(given, wanted, str(stated))
    if attributes & 7 > 1 or (stated is not None and attributes & 7):
        raw = bytes.fromhex(str(stated))
    else:
        ours = make_batch(
            records,
            attributes=attributes,
            producer_id=producer[0],
            producer_epoch=producer[1],
            base_sequence=producer[2],
        )
        raw = rebased(ours, base, epoch)
    (batch,) = read_batches(raw)
    found = {name: getattr(batch, name) for name in wanted}
    read = [
        Rec(record.timestamp, record.key, record.value, tuple(record.headers))
        for record in decode_kafka_records(batch)
    ]
    same = [Rec(row.timestamp, row.key, row.value, tuple(row.headers)) for row in records]
    is_same = found == wanted and batch.is_intact and (attributes & 8 or read == same)
    return _batch_facts(batch, raw.hex() if is_same else f"{found} {read}")


def _control_batch(given: Given, wanted: Mapping[str, Any], stated: str) -> Any:
    """Read the control batch that is stated: none is written here."""
    (batch,) = read_batches(bytes.fromhex(stated))
    (record,) = decode_kafka_records(batch)
    kind, epoch = given.take("type"), given.take("coordinator_epoch", 0)
    found = {name: getattr(batch, name) for name in wanted}
    key = (0).to_bytes(2, "big") + _CONTROL[kind].to_bytes(2, "big")
    value = (0).to_bytes(2, "big") + epoch.to_bytes(4, "big")
    parts = (record.key, record.value, batch.max_timestamp)
    is_read = (
        parts == (key, value, given.take("timestamp", batch.max_timestamp)) and batch.is_control
    )
    is_read = is_read and batch.is_intact and found == wanted
    return _batch_facts(batch, stated if is_read else f"{found} {parts}")


def _batch_facts(batch: KafkaBatch, written: str) -> dict[str, Any]:
    return {
        "hex": written,
        "size": batch.size,
        "record_count": batch.record_count,
        "records": batch.record_count,
        "last_offset": batch.last_offset,
        "last_offset_delta": batch.last_offset_delta,
        "last_sequence": batch.last_sequence,
        "base_timestamp": batch.base_timestamp,
        "max_timestamp": batch.max_timestamp,
        "crc": batch.computed_checksum,
        "compression": batch.compression_name,
        "transactional": batch.is_transactional,
        "control": batch.is_control,
    }


def _rebase(given: Given) -> Any:
    said = str(given.first("batch", "hex"))
    other = given.others.get(said)
    raw = bytes.fromhex(other["derived"]["hex"] if other is not None else said)
    (before,) = read_batches(raw)
    patched = rebased(
        raw,
        given.first("new_base_offset", "base_offset"),
        given.first("new_leader_epoch", "leader_epoch", default=before.partition_leader_epoch),
    )
    (batch,) = read_batches(patched)
    same = raw[16:] == patched[16:]
    return {
        **_batch_facts(batch, patched.hex()),
        "crc_same": same,
        "rest_same": same and raw[8:12] == patched[8:12],
    }


# ---- values of the map ----


def _map_record(given: Given) -> Any:
    key = given.take("key")
    names = ("start", "cleaner", "recover", "clean_shutdown")
    if any(given.has(name) for name in names):
        state = PartitionState(
            given.take("start", 0),
            given.take("cleaner", 0),
            given.first("recover", "recovery", default=0),
            given.take("clean_shutdown", False),
        )
        value = state.encode()
    elif given.has("entries"):
        value = LeaderEpochs([(epoch, start) for epoch, start in given.take("entries")]).encode()
    else:
        value = bytes.fromhex(str(given.first("value_hex", "value", default="")))
    raw = encode_entry(key, value)
    text = value.decode(errors="replace")
    return {
        "json": AnyOf(text, Words({re.escape(re.sub(r"[\"'`]", "", text).lower()): True})),
        "hex": raw.hex(),
        "value_hex": value.hex(),
        "size": len(raw),
    }


def _log_value(given: Given) -> Any:
    """Read a value of slices; what is written here has the offsets of the log itself."""
    text = given.stated.get("json")
    segments = given.take("segments")
    streams = given.take("streams")
    if text is None:
        made = [
            Segment(base_offset=one["base"], created_ms=one.get("created", 0)) for one in segments
        ]
        text = encode_log(streams, made).decode()
    named, read = decode_log(json.loads(text))
    found = [
        (
            segment.base_offset,
            segment.created_ms,
            segment.modified_ms,
            segment.size,
            segment.end_offset,
            segment.time_start,
            segment.time_end,
            segment.first_batch_time,
        )
        for segment in read
    ]
    wanted = [
        (
            segment["base"],
            segment.get("created", 0),
            segment.get("modified", 0),
            segment.get("size", 0),
            segment["log"][1],
            *segment.get("time", segment.get("tim")),
            segment.get("first_batch_timestamp", 0),
        )
        for segment in segments
    ]
    return {
        "json": text if (named, found) == (streams, wanted) else f"{named} {found}",
        "segments": len(read),
    }


def _epochs_value(given: Given) -> Any:
    rows = given.first("entries", "epochs")
    if any(len(row) != 2 for row in rows):
        raise NotOfferedError  # rows of a transaction index
    entries = [(epoch, start) for epoch, start in rows]
    epochs = LeaderEpochs(entries)
    facts: dict[str, Any] = {
        "hex": epochs.encode().hex(),
        "size": len(epochs.encode()),
        "entries": [list(entry) for entry in epochs.entries],
    }
    if given.has("ask") or given.has("offsets"):
        facts["epoch_at"] = facts["epochs"] = [
            epochs.at(offset) for offset in given.first("ask", "offsets")
        ]
    if given.has("end_of"):
        end = given.first("log_end", "end", default=1 << 40)
        facts["end_of"] = facts["ends"] = [
            list(epochs.end_of(epoch, end)) for epoch in given.take("end_of")
        ]
    if given.has("trim"):
        epochs.trim(given.take("trim"))
        facts["after_trim"] = {"entries": [list(entry) for entry in epochs.entries]}
    return facts


def _epochs_of_batches(given: Given) -> Any:
    epochs = LeaderEpochs()
    for base, epoch, *more in given.take("batches"):
        if more:
            raise NotOfferedError
        epochs.assign(epoch, base)
    return {
        "epochs": [list(entry) for entry in epochs.entries],
        "entries": [list(entry) for entry in epochs.entries],
    }


# ---- producers ----


def _snapshot(given: Given) -> Any:
    states = ProducerStates()
    rows = given.each("producers") if given.has("producers") else [given]
    for row in rows:
        first, last = row.take("offsets")
        sequences = row.take("sequences")
        raw = sequenced(
            row.take("producer_id"),
            row.first("epoch", "producer_epoch", default=0),
            sequences[0],
            last - first + 1,
            time=row.take("timestamp", 0),
        )
        (batch,) = read_batches(raw)
        if batch.last_sequence != sequences[-1]:
            raise ValueError(f"sequences are {sequences}, expected as many as offsets")
        states.record(batch, first)
    data = states.snapshot()
    facts = {"hex": data.hex(), "size": len(data), "count": len(rows)}
    if given.has("snapshot_offset"):
        facts["value_hex"] = encode_snapshots({given.take("snapshot_offset"): data}).hex()
    return facts


def _snapshots_value(given: Given) -> Any:
    rows = {snapshot[0]: bytes.fromhex(str(snapshot[1])) for snapshot in given.take("snapshots")}
    value = encode_snapshots(rows)
    return {"hex": value.hex(), "value_hex": value.hex(), "size": len(value)}


# ---- time index ----


def linear(said: str, name: str) -> tuple[int, int]:
    """Return a and b of "NAME a + b i": of "offset 45 + 10 i" (45, 10)."""
    found = re.search(rf"{name}s?,? (?:= )?(?:(\d+) \+ )?(\d+)? ?\*? ?(?:i\b|offset)", said)
    if found is None:
        fixed = re.search(rf"{name}s? (?:= )?(\d+)", said)
        return (int(fixed[1]) if fixed else 0), 0
    return int(found[1] or 0), int(found[2] or 1)


def time_entries(said: Any, base: int) -> list[tuple[int, int]]:
    if isinstance(said, list):
        return [(pair[0], pair[1]) for pair in said]
    span = range_of(str(said).rpartition("i =")[2]) or range(0)
    times, offsets = linear(str(said), "timestamp"), linear(str(said), "offset")
    return [(times[0] + times[1] * at, offsets[0] + offsets[1] * at) for at in span]


def _time_index(given: Given) -> Any:
    base = given.first("base_offset", "base", default=0)
    entries = time_entries(given.take("entries"), base)
    raw = encode_entries(entries, base)
    same = decode_entries(raw, base) == entries
    facts: dict[str, Any] = {
        "hex": raw.hex() if same else "others when read again",
        "size": len(raw),
        "entries": len(entries),
    }
    asked = given.first("lookup", "lookups", default=[])
    found = []
    for offset in asked:
        time = int(re.findall(r"-?\d+", str(offset))[0])
        found.append(list(lookup([] if "empty" in str(offset) else entries, time, base)))
    return Answer({**facts, "found": found, "lookup": found}, found)


_BATCH = (
    "base_offset leader_epoch partition_leader_epoch attributes producer producer_id "
    "producer_epoch base_sequence records type coordinator_epoch timestamp compression "
    "codec log_append_time transactional control"
)

SHAPES = (
    Shape(
        "kafka batch",
        _batch,
        "base_offset records | leader_epoch records | base_offset type coordinator_epoch | "
        "records producer_id | records attributes | producer_id type",
        "hex|size|record.*|last_.*|.*timestamp|crc|compression|transactional|control",
        "Kafka clients",
        keys=_BATCH,
    ),
    Shape(
        "kafka batch with another offset",
        _rebase,
        "batch new_base_offset | hex new_base_offset | hex base_offset",
        "hex|.*_same|size|crc|last_.*",
        keys="new_leader_epoch leader_epoch",
    ),
    Shape(
        "kafka map record",
        _map_record,
        "key start recover | key entries | key value_hex | key clean_shutdown | key value",
        "json|hex|value_hex|size",
        "MetaStreamTest|MetaKeyValue",
        keys="cleaner recovery",
    ),
    Shape("kafka log value", _log_value, "streams segments", "json|segments", "ElasticLogMeta"),
    Shape(
        "kafka leader epochs",
        _epochs_value,
        "entries | epochs",
        "hex|size|entries|epoch.*|end.*|after_trim",
        "ElasticLeaderEpochCheckpointMeta",
        keys="ask offsets end_of log_end end trim",
    ),
    Shape(
        "kafka epochs of batches",
        _epochs_of_batches,
        "batches",
        "epochs|entries",
        "ElasticLogSegmentTest",
        keys="base",
    ),
    Shape(
        "kafka producer snapshot",
        _snapshot,
        "producer_id sequences offsets | producers",
        "hex|size|count|value_hex",
        "Kafka storage",
        keys="epoch producer_epoch timestamp snapshot_offset",
    ),
    Shape("kafka snapshots value", _snapshots_value, "snapshots", "hex|value_hex|size"),
    Shape(
        "kafka time index",
        _time_index,
        "base_offset entries | base entries | base entries lookup",
        "hex|size|entries|found|lookup",
        "ElasticTimeIndexTest",
        keys="lookups",
    ),
)
