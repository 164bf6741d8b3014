"""Tables of the layouts of a partition, held against bytes that the product makes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streammeta.brokers.partition import meta_map
from streammeta.brokers.partition.producer_state import ProducerStates
from streammeta.brokers.partition.record_batch import read_batches, rebased
from streammeta.brokers.partition.segments import Segment, encode_log
from streammeta.brokers.partition.state import LeaderEpochs, encode_entries
from tests.conformance.conformance_report import Mismatch, compare
from tests.kit.kafka_batches import Rec, make_batch, sequenced

SENTENCES = frozenset(("control_record", "txn_index_entry", "streams_of_a_partition", "wire"))
"""Tables of what the product does not write, or in words that say how fields are used."""

_SIZES = {"i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "i64": 8}


def _batch(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Look at every field of a header whose fields all differ."""
    records = [Rec(1000), Rec(1007)]
    raw = make_batch(records, attributes=8, producer_id=11, producer_epoch=12, base_sequence=13)
    data = rebased(raw, 14, 15)
    (batch,) = read_batches(data)
    known = {
        "base_offset": 14,
        "batch_length": len(data) - 12,
        "partition_leader_epoch": 15,
        "magic": 2,
        "crc": batch.computed_checksum,
        "attributes": 8,
        "last_offset_delta": 1,
        "base_timestamp": 1000,
        "max_timestamp": 1007,
        "producer_id": 11,
        "producer_epoch": 12,
        "base_sequence": 13,
        "record_count": 2,
    }
    for name, kind, at, *_ in stated["fields"]:
        field = str(name).split()[0]
        if kind in _SIZES:
            found = int.from_bytes(data[at : at + _SIZES[kind]], "big")
            yield from compare(known.get(field), found, str(name))
        else:
            yield from compare(stated["header_size"], at, str(name))
    empty = make_batch([Rec(0)])
    yield from compare(stated["header_size"], len(empty) - 7, "header_size")


def _map_record(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
    data = meta_map.encode_entry("ab", b"rest")
    at = 0
    for (name, kind), wanted in zip(stated["fields"], (0, 2, b"ab", b"rest"), strict=True):
        size = _SIZES.get(kind, 2 if kind == "utf-8" else len(data) - at)
        raw = data[at : at + size]
        yield from compare(wanted, int.from_bytes(raw, "big") if kind in _SIZES else raw, str(name))
        at += size
    written = [
        meta_map.LOG,
        meta_map.PARTITION,
        meta_map.PRODUCER_SNAPSHOTS,
        meta_map.LEADER_EPOCHS,
    ]
    yield from compare(stated["keys"], written, "keys")


def _snapshot(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
    states = ProducerStates()
    (batch,) = read_batches(sequenced(1, 2, 3))
    states.record(batch, 0)
    yield from compare(stated["entry_size"], len(states.snapshot()) - 10, "entry_size")


def _names_of(stated: str, value: bytes) -> Iterator[Mismatch]:
    """Look for the keys of a JSON value in words that list them."""
    names = set(re.findall(r"\b\w+\b", stated))
    written = json.loads(value)
    keys = {*written, *(key for segment in written.get("segmentMetas", ()) for key in segment)}
    if not keys <= names:
        yield Mismatch("value", stated, sorted(keys))


def _partition(stated: str) -> Iterator[Mismatch]:
    yield from _names_of(stated, meta_map.PartitionState().encode())


def _log(stated: str) -> Iterator[Mismatch]:
    yield from _names_of(stated, encode_log({}, [Segment(base_offset=0, created_ms=1)]))


def _epochs(stated: str) -> Iterator[Mismatch]:
    fields = re.findall(r"\bi(16|32|64)\b", stated)
    size = sum(int(field) // 8 for field in fields)
    yield from compare(len(LeaderEpochs([(1, 2)]).encode()), size, "leader_epoch_value")


def _snapshots(stated: str) -> Iterator[Mismatch]:
    found = re.search(r"0x[0-9a-f]{2}", stated)
    written = f"0x{meta_map.encode_snapshots({})[0]:02x}"
    yield from compare(found[0] if found else None, written, "producer_snapshots_value")


def _time_entry(stated: str) -> Iterator[Mismatch]:
    size = int((re.match(r"\d+", stated) or ["0"])[0])
    yield from compare(len(encode_entries([(1, 2)], 0)), size, "time_index_entry")


LAYOUTS: dict[str, Callable[[Any], Iterator[Mismatch]]] = {
    "record_batch_v2": _batch,
    "meta_stream_record": _map_record,
    "producer_snapshot": _snapshot,
    "partition_value": _partition,
    "log_value": _log,
    "leader_epoch_value": _epochs,
    "producer_snapshots_value": _snapshots,
    "time_index_entry": _time_entry,
}
